"""Partitions from a file of indices: another run's clients exactly, and one line for each
mistake."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from page_commands import documented
from toy import ready

from fl_lightning.__main__ import main
from fl_lightning.data import Dirichlet, FederatedImages, FromFile
from fl_lightning.errors import InputError

N = 300  # training examples of the toy


@pytest.mark.parametrize("val_fraction", [0.0, 0.2])
def test_the_partition_of_a_run_is_taken_over_exactly(tmp_path, val_fraction):
    """With its validation examples, whatever seed and share the new run has, and so with the same
    hash."""
    first = ready(
        3, partition=Dirichlet(0.3, min_size=0), num_clients=20, val_fraction=val_fraction
    )
    path = tmp_path / "partition.json"
    path.write_text(json.dumps(first.partition_summary()))
    second = ready(8, partition=FromFile(str(path)), num_clients=20, val_fraction=0.4)
    assert second.partition_hash == first.partition_hash
    for id in range(20):
        for part in ("train", "val"):
            assert np.array_equal(getattr(first.client(id), part), getattr(second.client(id), part))
    assert second.val_sizes.sum() == first.val_sizes.sum()


def test_lists_of_lists_leave_the_validation_to_the_run(tmp_path):
    lists = [list(range(id, N, 4))[::-1] for id in range(4)]
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    data = ready(partition=FromFile(str(tmp_path / "lists.json")), num_clients=4, val_fraction=0.2)
    for id, some in enumerate(lists):
        client = data.client(id)
        assert sorted([*client.train, *client.val]) == sorted(some)
        assert client.train.tolist() == sorted(client.train)
        assert len(client.val) == 15


EVEN, ODD = list(range(0, N, 2)), list(range(1, N, 2))
WRONG = {
    "no JSON": ("[[1, 2", "it is not JSON"),
    "a key twice": ('{"clients": [], "clients": [[0]]}', "key 'clients'; an object has it twice"),
    "nothing": ("{}", "it lists no clients"),
    "no lists": ("[]", "it lists no clients"),
    "too many clients": (json.dumps([EVEN, ODD, []]), "lists 3 clients; write num_clients: 3"),
    "twice": (json.dumps([EVEN, [*ODD, 8]]), "example 8 is listed twice, by the clients 0 and 1"),
    "twice by one": (json.dumps([[*EVEN, 8], ODD]), "example 8 is listed twice, by the clients 0 and 0"),
    "not at all": (json.dumps([EVEN[2:], ODD]), "2 of 300 examples are in no list, such as 0"),
    "too large": (json.dumps([EVEN, [*ODD, 300]]), "client 1; there is no example 300: the data has 300"),
    "negative": (json.dumps([[*EVEN, -1], ODD]), "client 0; there is no example -1"),
    "huge": (json.dumps([[*EVEN, 10**30], ODD]), "client 0; examples are a list of whole numbers"),
    "fractions": (json.dumps([EVEN, [1.5]]), "client 1; examples are a list of whole numbers"),
    "truths": (json.dumps([EVEN, [True]]), "client 1; examples are a list of whole numbers"),
    "a number": (json.dumps([EVEN, 7]), "client 1; examples are a list of whole numbers"),
    "other keys": (json.dumps({"clients": [{"train": EVEN, "test": ODD}, {}]}), "client 0; it has the lists train and val"),
    "no training": (json.dumps({"clients": [{"train": [], "val": EVEN}, {"train": [], "val": ODD}]}), "no client has a training example"),
    "validation twice": (json.dumps({"clients": [{"train": EVEN, "val": [2]}, {"train": ODD}]}), "example 2 is listed twice"),
    "summary of many": (json.dumps({"left_out": "clients of 5000 clients"}), "it leaves out the clients' examples"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_line(tmp_path, mistake):
    content, words = WRONG[mistake]
    (tmp_path / "clients.json").write_text(content)
    with pytest.raises(InputError, match=words) as error:
        ready(partition=FromFile(str(tmp_path / "clients.json")), num_clients=2)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_public_examples_are_refused(tmp_path):
    with pytest.raises(InputError, match="it cannot be read"):
        ready(partition=FromFile(str(tmp_path / "none.json")))
    (tmp_path / "clients.json").write_text(json.dumps([EVEN, ODD]))
    with pytest.raises(InputError, match="write public_examples: 0"):
        ready(partition=FromFile(str(tmp_path / "clients.json")), num_clients=2, public_examples=10)


@pytest.mark.slow
@pytest.mark.essential
def test_the_documented_command_takes_the_clients_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = FederatedImages("digits", num_clients=12)
    data.setup()
    data.distribute(5, torch.device("cpu"))
    Path("clients.json").write_text(json.dumps(data.partition_summary()))
    (command,) = documented("FromFile")
    assert main([*command, "--trainer.max_rounds", "1", "--trainer.logger", "false"]) == 0
    (found,) = Path("runs").rglob("partition.json")
    assert json.loads(found.read_text())["sha256"] == data.partition_hash
