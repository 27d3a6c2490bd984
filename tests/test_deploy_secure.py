"""Secure sums over nodes: what they give, what they cost, who can leave when, and what never travels.

The reference is the simulation with the same secure sum; of a node that dies before a phase, one whose stressor
has its clients leave before that phase.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_deploy import command_line, deployed, metadata_of, nodes_in, simulated, weights

from callbacks import SecureDropout
from fl_lightning.deploy.messages import Message
from fl_lightning.deploy.transport_local import InProcess
from fl_lightning.hooks import Stressor
from fl_lightning.privacy.secure import PHASES
from fl_lightning.wire import Payload

pytest.importorskip("Crypto")

SECURE = "--trainer.secure_sum={threshold: 0.6}"
SMALL = [
    "--trainer.participation=1.0",
    "--data.num_clients=4",
    "--data.dataset=synthetic",
    "--data.synthetic_examples=240",
    "--data.synthetic_test_examples=40",
    SECURE,
]


def table(cli, name: str) -> list[dict[str, str]]:
    with (cli.trainer.run_dir / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("config", ["fedavg"])
def test_smoke(config, tmp_path):
    cli = deployed(config, tmp_path, InProcess(nodes_in(tmp_path, 3)), *SMALL)
    assert weights(cli) == simulated(config, tmp_path, *SMALL)
