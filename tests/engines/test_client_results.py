"""``clients.csv``: what a run leaves of each client's validation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from outcomes import rows_of
from ten import SMALL
from toy import run, sgd

from fl_lightning import methods
from fl_lightning.conformance.toy import images
from fl_lightning.data.summary import MAX_COUNTED_CLIENTS
from fl_lightning.metrics import client_spread
from fl_lightning.run.clients import from_json, is_json_of, keep


class Grouped(type(images())):
    """The toy images, dealt out by their class, where odd and even classes are two groups."""

    @property
    def train_group(self) -> torch.Tensor:
        return self.train_target % 2


@pytest.mark.parametrize("name", ["FedAvg", "LocalOnly"])
def test_clients_of_the_best_and_the_last_round_are_written(name, tmp_path):
    """The spread over clients in ``metrics.csv`` follows from the rows of its round."""
    method = getattr(methods, name)(network=SMALL, optimizer=sgd(0.05, momentum=0.9))
    trainer = run(method, images(), tmp_path, max_rounds=3)
    rows, data, done = rows_of(trainer.run_dir / "clients.csv"), trainer.data, trainer.progress.done
    assert {int(row["round"]) for row in rows} == {done.best_round, 3}
    for round in {done.best_round, 3}:
        mine = [row for row in rows if int(row["round"]) == round]
        assert [int(row["client"]) for row in mine] == data.validating.tolist()
        assert [int(row["val_examples"]) for row in mine] == data.val_sizes[
            data.validating
        ].tolist()
        assert [int(row["train_examples"]) for row in mine] == data.sizes[data.validating].tolist()
        spread = client_spread(
            [float(row["accuracy"]) for row in mine], [int(row["val_examples"]) for row in mine]
        )
        found = trainer.progress.history[round - 1]
        assert spread.items() <= found.items()
        assert "val/loss" not in found
        assert all(math.isfinite(float(row["loss"])) and row["group"] == "" for row in mine)


def test_a_client_is_of_the_group_of_most_of_its_examples(tmp_path):
    data = images()
    data.__class__ = Grouped
    trainer = run(methods.FedAvg(network=SMALL, optimizer=sgd(0.05)), data, tmp_path, max_rounds=1)
    expected = []
    for id in data.validating.tolist():
        client = data.client(id)
        odd = data.train_target[np.concatenate([client.train, client.val])] % 2
        expected.append({-1: "0", 0: "", 1: "1"}[int((2 * odd.sum() - len(odd)).sign())])
    assert [row["group"] for row in rows_of(trainer.run_dir / "clients.csv")] == expected


def test_what_is_kept_is_the_best_and_the_last_evaluation():
    """Round by round: evaluated in rounds 2, 4 and 6, the second of them the best."""
    of = {round: {"accuracy": {0: round / 10, 7: math.nan}} for round in (2, 4, 6)}
    kept: dict = {}
    for round, best, expected in (
        (1, 0, ()),
        (2, 2, (2,)),
        (3, 2, (2,)),
        (4, 4, (4,)),
        (5, 4, (4,)),
        (6, 4, (4, 6)),
    ):
        kept = keep(kept, round, of.get(round, {}), best)
        assert tuple(sorted(kept)) == expected
    as_json = {
        str(round): {"accuracy": {str(id): v for id, v in of[round]["accuracy"].items()}}
        for round in kept
    }
    assert is_json_of(as_json)
    assert str(from_json(as_json)) == str(kept)
    assert not is_json_of({"four": {}})
    assert not is_json_of({"4": {"accuracy": {"0": None}}})
    many = {"accuracy": dict.fromkeys(range(MAX_COUNTED_CLIENTS + 1), 0.5)}
    assert keep(kept, 7, many, 4) == {}
