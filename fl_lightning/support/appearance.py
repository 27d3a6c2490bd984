"""How values look, to see whether they have changed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.support.tensor_bytes import raw_bytes


def appearance(value: Any) -> str:
    """Return a text of a value, another one where the value has changed: of tensors, arrays and
    generators by what is in them, of all else as they show themselves. Of what cannot be looked
    into, such as a tensor without data, it is empty."""
    try:
        return _text(value)
    except (RuntimeError, NotImplementedError, RecursionError):
        return ""


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return repr({repr(key): _text(each) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return repr([_text(each) for each in value])
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, random.Random):
        value = value.getstate()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return sha256(value.tobytes()).hexdigest()
    if isinstance(value, Tensor):
        return sha256(raw_bytes(value.detach().cpu().contiguous()).numpy().tobytes()).hexdigest()
    return repr(getattr(getattr(value, "bit_generator", None), "state", value))
