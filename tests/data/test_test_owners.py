"""With the natural partition a client's own model is tested on the examples that are its own."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from toy import run, sgd

from fl_lightning.data import (
    IID,
    FederatedData,
    ImageFolder,
    LeafData,
    Natural,
    TableData,
    TextFiles,
    TokenData,
    TokenFile,
)
from fl_lightning.data.test_owners import deal_test_set, owners_sha256
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg
from fl_lightning.run.resume import changed_identity

SITES = ["a", "b", "c", "d"]
WHO = np.array([0, 1, 2, 3] * 10)
"""Whose each example is, in the order of the files."""


def table(folder):
    for split, who in (("train", WHO), ("test", [*WHO, 4])):
        names = [[*SITES, "new"][client] for client in who]
        pd.DataFrame(
            {"x": np.arange(len(who)), "y": np.arange(len(who)) % 2, "site": names}
        ).to_csv(folder / f"{split}.csv", index=False)
    train, test = (str(folder / f"{split}.csv") for split in ("train", "test"))
    return TableData(train, test=test, target="y", client="site", num_clients=0), [*WHO, None]


def leaf(folder):
    for split, users in (("train", SITES), ("test", [*SITES[::-1], "new"])):
        data = {user: {"x": [[number, 1.0]] * 2, "y": [0, 1]} for number, user in enumerate(users)}
        (folder / split).mkdir()
        (folder / split / "all.json").write_text(
            json.dumps({"users": users, "num_samples": [2] * len(users), "user_data": data})
        )
    train, test = (str(folder / split) for split in ("train", "test"))
    return LeafData(train, test=test), [3, 3, 2, 2, 1, 1, 0, 0, None, None]


def images(folder):
    for split, names in (("train", SITES), ("test", [*SITES, "new"])):
        for name in names:
            for label in ("cat", "dog"):
                place = folder / split / name / label
                place.mkdir(parents=True)
                Image.new("RGB", (4, 4), (len(name), 0, 0)).save(place / "1.png")
    train, test = (str(folder / split) for split in ("train", "test"))
    data = ImageFolder(train, test=test, client_folders=True, size=4)
    return data, [0, 0, 1, 1, 2, 2, 3, 3, None, None]


def tokens(folder):
    for split, who, first in (("train", WHO, 0), ("test", [*WHO[:8], 4], 100)):
        lines = [
            {"input_ids": [first + number, 5, 6], "who": [*SITES[:2], 3, 4, 7][client]}
            for number, client in enumerate(who)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    train, test = (TokenFile(str(folder / f"{split}.jsonl")) for split in ("train", "test"))
    data = TokenData(train, test=test, client="who", context=4, num_clients=0, vocab_size=200)
    return data, [*map([2, 3, 0, 1].__getitem__, WHO[:8]), None]  # 3, 4, "a", "b"


def texts(folder):
    for split, who in (("train", WHO), ("test", [*WHO[:8], 4])):
        lines = [
            {
                "definition": split,
                "inputs": str(number),
                "targets": "yes",
                "task_name": "t",
                "who": who,
            }
            for number, who in enumerate([*SITES, "new"][client] for client in who)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    train, test = (str(folder / f"{split}.jsonl") for split in ("train", "test"))
    return TextFiles(train, test=test, client="who", context=32, num_clients=0), [*WHO[:8], None]


@pytest.mark.parametrize("make", [table, leaf, images, tokens, texts])
def test_an_example_that_names_its_client_is_dealt_to_it(make, tmp_path):
    """One whose client does not train turns up anywhere, as all do with another partition."""
    data, expected = make(tmp_path)
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    dealt = deal_test_set(data)
    known = [place for place, client in enumerate(expected) if client is not None]
    assert isinstance(data.partition, Natural)
    assert dealt[known].tolist() == [expected[place] for place in known]
    assert set(dealt.tolist()) <= {0, 1, 2, 3}
    data.partition = IID()
    data.distribute(0, torch.device("cpu"))
    assert (deal_test_set(data)[known] != dealt[known]).any()


def test_a_test_file_need_not_say_whose_an_example_is(tmp_path):
    data, _ = table(tmp_path)
    pd.read_csv(tmp_path / "test.csv").drop(columns="site").to_csv(
        tmp_path / "test.csv", index=False
    )
    data.setup()
    data.distribute(0, torch.device("cpu"))
    assert data.test_owner is None
    assert {*deal_test_set(data)} <= {0, 1, 2, 3}


class Grouped(FederatedData):
    """Two classes, of which each has examples of both groups; a client has one group alone."""

    num_classes, example_shape = 2, (1,)

    def __init__(self):
        super().__init__(
            dataset="own", num_clients=2, partition=Natural(), batch_size=4, val_fraction=0.0
        )

    def setup(self, stage=None):
        self.group = torch.arange(800) // 400
        self.train_target = self.test_target = torch.arange(800) % 2
        self._owner = self.group.numpy()

    def inputs(self, split, index, draws=None):
        return self.group[index, None].float()

    @property
    def train_group(self):
        return self.group


class WithBoth(Grouped):
    @property
    def test_group(self):
        return self.group


def test_the_test_set_goes_by_groups_or_evenly_where_its_own_are_not_said():
    """The classes of the test examples are no groups of the training examples."""
    data = WithBoth(), Grouped()
    for some in data:
        some.setup()
        some.distribute(0, torch.device("cpu"))
    assert deal_test_set(data[0]).tolist() == data[0].group.tolist()
    dealt, target = deal_test_set(data[1]), data[1].test_target.numpy()
    for value in (0, 1):
        assert abs(dealt[target == value].mean() - 0.5) < 0.1


def test_a_run_is_not_continued_where_a_test_row_is_of_another_client(tmp_path):
    def fit(**settings):
        data = TableData(
            str(tmp_path / "train.csv"), test=str(path), target="y", client="site", num_clients=0
        )
        method = FedAvg(network=partial(torch.nn.Linear, 1), optimizer=sgd())
        return run(method, data, tmp_path / "runs", max_rounds=1, **settings), data

    table(tmp_path)
    path, kept = tmp_path / "test.csv", (tmp_path / "test.csv").read_text()
    begun, before = fit()
    again = {"ckpt_path": str(begun.run_dir)}
    fit(**again)
    path.write_text(kept.replace("new", "a"))
    with pytest.raises(
        InputError, match=r"the clients or groups of test examples: [0-9a-f]{12} ->"
    ):
        fit(**again)
    metadata = json.loads((begun.run_dir / "metadata.json").read_text())
    assert metadata["test_owners_sha256"] == owners_sha256(before)
    assert not changed_identity({"partition": "p"}, {"partition": "p", "test_owners": "o"})
    grouped = [WithBoth(), WithBoth(), Grouped()]
    for number, some in enumerate(grouped):
        some.setup()
        some.group = some.group.roll(number)
    assert len(set(map(owners_sha256, grouped))) == 3
    assert owners_sha256(grouped[2]) == ""
