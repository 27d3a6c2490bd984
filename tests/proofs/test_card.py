"""What holds on a CPU holds on a card: runs repeat themselves and are continued bit for bit, and
end near a CPU's.

These tests need CUDA and are skipped elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks_program import data_of, method_of
from ten import TEN, same
from toy import run

from fl_lightning.trainer import FederatedTrainer

CARD = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
NEAR = 0.05
"""Of the norm: quantised methods round a value up on the one device and down on the other."""


def trained(name: str, folder: Path, ckpt_path: str | None = None, **settings) -> FederatedTrainer:
    settings = {"max_rounds": 2, "max_local_steps": 4, "accelerator": CARD, **settings}
    return run(method_of(name), data_of(name), folder, ckpt_path=ckpt_path, **settings)


def server(trainer: FederatedTrainer) -> dict[str, torch.Tensor]:
    return trainer.fitted[0].server


@pytest.mark.parametrize("name", [*TEN, "FedAdam", "moshpit", "buffered"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_repeats_itself_and_is_continued_exactly(name: str, precision: str, tmp_path: Path):
    whole = server(trained(name, tmp_path / "whole", precision=precision))
    begun = trained(name, tmp_path / "parts", precision=precision, max_rounds=1)
    again = {"ckpt_path": str(begun.run_dir), "allow_changed": True}  # it has a round more
    rest = trained(name, tmp_path / "parts", precision=precision, **again)
    assert same(server(rest), whole)


@pytest.mark.parametrize("name", [*TEN, "FedAdam"])
@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_it_ends_near_a_run_on_a_cpu(name: str, engine: str, tmp_path: Path):
    card = server(trained(name, tmp_path / "card", engine=engine))
    cpu = server(trained(name, tmp_path / "cpu", accelerator="cpu", engine="sequential"))
    assert card.keys() == cpu.keys()
    for entry, value in cpu.items():
        if value.is_floating_point() and value.numel() > 1:
            assert (card[entry].cpu() - value).norm() <= NEAR * value.norm(), entry
