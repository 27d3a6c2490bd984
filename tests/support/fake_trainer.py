"""The trainer with one of its commands replaced, so that the command line runs without training."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fl_lightning.trainer import FederatedTrainer


def replace_command(
    monkeypatch: pytest.MonkeyPatch, name: str, called: Callable[[SimpleNamespace], Any]
) -> None:
    """Have ``called`` take what a command (``fit``, ``test``) was given, in its place. The parser
    reads the command's flags off the signature."""

    def command(
        self: FederatedTrainer,
        method: Any,
        data: Any,
        *,
        seed: int = 0,
        ckpt_path: str | None = None,
    ) -> None:
        given = {"method": method, "data": data, "seed": seed, "ckpt_path": ckpt_path}
        called(SimpleNamespace(trainer=self, config=self.config, **given))

    monkeypatch.setattr(FederatedTrainer, name, command)
