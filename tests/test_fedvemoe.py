"""Fed-VEMoE on small federations: what it must equal, who moves which expert, bytes, births and resume."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from refusals import refused
from test_kill import differences, outcome
from tiny_language import adam, fit, method_of, records, tiny

from fl_lightning.data import TokenData
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg, FedVEMoE
from fl_lightning.methods.experts.slots import Rules
from fl_lightning.methods.receiving import check_upload
from fl_lightning.wire import Codes, Payload, PayloadError

P, D = 2 * (16 * 8 + 64 + 48 + 16), 16  # checked against the layout below


def settled(method, data):
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    method.build(data)
    return method, data
