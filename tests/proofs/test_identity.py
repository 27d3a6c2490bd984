"""What a run rests on beside its settings: other data or another frozen base are no
continuation."""

from __future__ import annotations

import pytest
import torch
from refusals import refused
from tiny_language import adam, fit, method_of, records, tiny
from torch import nn
from toy import run

from fl_lightning.data import IID, TableData
from fl_lightning.methods import AQFL, FedAvg, FedMPQ
from fl_lightning.run.directory import read_json


def another_base(vocab_size: int) -> nn.Module:
    network = tiny(vocab_size)
    with torch.no_grad():
        next(p for p in network.parameters() if not p.requires_grad).add_(1.0)
    return network


def test_a_run_is_not_continued_on_another_frozen_base(tmp_path):
    fit(method_of(), tmp_path, max_rounds=1)
    (run,) = (tmp_path / "fl_lightning").iterdir()
    assert len(read_json(run / "metadata.json")["frozen_sha256"]) == 64
    method = method_of()
    method.network_spec = another_base
    with refused("--ckpt_path", "allow_changed"):
        fit(method, tmp_path, max_rounds=1, ckpt_path="last")
    fit(method_of(), tmp_path, max_rounds=1, ckpt_path="last")


class Tied(nn.Module):
    """The output layer has the embedding's weights, as most small language models have it."""

    reads_tokens = True

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(tokens, 8), nn.Linear(8, tokens, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, inputs):
        return self.output(self.embedding(inputs["input_ids"]))


@pytest.mark.parametrize("kind", [AQFL, FedMPQ])
def test_a_weight_that_two_layers_share_is_quantised_once(kind, tmp_path):
    method = kind(network=Tied, optimizer=adam())
    fit(method, tmp_path, records(generate=False), max_rounds=1)
    assert method.codec.names == ["embedding.weight"]
    assert method.codec.rest.size == 0


def test_a_run_is_not_continued_on_other_data_of_the_same_form(tmp_path):
    """Not the numbers of the table that it has seen, though as many rows of the same classes."""
    table = tmp_path / "table.csv"
    rows = [f"{number % 7},{number % 3},{number % 2}" for number in range(40)]

    def train(text: str, **settings):
        table.write_text("a,b,kind\n" + text)
        data = TableData(str(table), "kind", num_clients=2, partition=IID(), batch_size=8)
        return run(FedAvg(network="mlp"), data, tmp_path, max_rounds=1, **settings)

    train("\n".join(rows))
    train("\n".join(rows), ckpt_path="last")
    with refused("--ckpt_path", "allow_changed"):
        train(
            "\n".join(f"{(number * 5) % 9},{row[2:]}" for number, row in enumerate(rows)),
            ckpt_path="last",
        )
