"""LEAF's JSON: users are clients, and one line for each mistake in a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from page_commands import documented

from fl_lightning.__main__ import main
from fl_lightning.data import IID, LeafData, Natural
from fl_lightning.errors import InputError


def content(sizes: dict[str, int], side: int = 4, first: int = 0) -> dict:
    """Users whose pixels all have their number, apart from a bright row that is the class."""
    data = {}
    for number, (user, n) in enumerate(sizes.items(), first):
        x = np.full((n, side, side), 0.01 * number)
        y = [i % 3 for i in range(n)]
        for image, label in zip(x, y, strict=True):
            image[label] = 1
        data[user] = {"x": x.reshape(n, side * side).tolist(), "y": y}
    return {"users": list(sizes), "num_samples": list(sizes.values()), "user_data": data}


def write(path: Path, found: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    return path


def ready(train: Path, **settings) -> LeafData:
    data = LeafData(str(train), **settings)
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    return data


SIZES = {"f01": 9, "f02": 12, "f03": 6}


def test_every_user_is_a_client_and_holds_its_own(tmp_path):
    """From two files of a folder; a user without examples is no client."""
    write(tmp_path / "train" / "a.json", content({"f01": 9, "f02": 12, "none": 0}))
    write(tmp_path / "train" / "b.json", content({"f03": 6}, first=7))
    test = write(tmp_path / "test.json", content({"f03": 3, "other": 3}))
    data = ready(tmp_path / "train", test=str(test))
    assert isinstance(data.partition, Natural)
    assert data.names.clients == ["f01", "f02", "f03"]
    assert data.num_clients == 3
    assert data.num_classes == 3
    assert data.example_shape == (16,)
    assert (data.sizes + data.val_sizes).tolist() == [9, 12, 6]
    for id, level in enumerate((0.0, 0.01, 0.07)):
        held = torch.from_numpy(np.sort([*data.client(id).train, *data.client(id).val]))
        assert data.inputs("train", held)[:, -1].unique().tolist() == [pytest.approx(level)]
        assert data.train_target[held].tolist() == [i % 3 for i in range(len(held))]
    assert len(data.test_target) == 6
    assert ready(tmp_path / "train", num_clients=2, partition=IID()).num_clients == 2


def test_grey_levels_become_images(tmp_path):
    path = write(tmp_path / "train.json", content(SIZES))
    data, plain = ready(path, images=True), ready(path)
    assert data.example_shape == (3, 4, 4)
    every = torch.arange(len(data.train_target))
    for channel in data.inputs("train", every).unbind(1):
        assert torch.equal(channel.flatten(1), plain.inputs("train", every))
    assert len(data.test_target) + len(every) == 27


def changed(key: str, value: object, user: str | None = "f02") -> dict:
    found = content(SIZES)
    (found if user is None else found["user_data"][user])[key] = value
    return found


NAN = [[float("nan")] * 16] * 12
WRONG = {
    "not LEAF's": ({"x": [1]}, {}, "it is not in LEAF's form; write"),
    "a list": ([1, 2], {}, "it is not in LEAF's form; write"),
    "no such user": (changed("users", ["f01", "f09"], None) | {"num_samples": [9, 1]}, {}, "user f09; user_data has no lists x and y"),
    "number of numbers": (changed("num_samples", [9], None), {}, "num_samples has not one number for each of 3 users"),
    "wrong number": (changed("num_samples", [9, 13, 6], None), {}, "user f02; num_samples says 13 and it has 12"),
    "y is short": (changed("y", [1, 2]), {}, "user f02; it has 12 x and 2 y"),
    "ragged": (changed("x", [[1.0], *[[1.0, 2.0]] * 11]), {}, "user f02; its x are not lists of numbers"),
    "too large": (changed("x", [[10**400], *[[1.0]] * 11]), {}, "user f02; its x are not lists of numbers"),
    "other shape": (changed("x", [[1.0, 2.0]] * 12), {}, r"user f02; its x are of shape \[2\], and the first user's of \[16\]"),
    "numbers": (changed("x", [1.0] * 12), {}, "an x is a list of numbers"),
    "text": (changed("x", ["to be"] * 12), {}, "its x are texts; see TextFiles"),
    "not finite": (changed("x", NAN), {}, "user f02, example 0; its x is not finite"),
    "no square": (content(SIZES, side=4) | {"users": ["f01"], "num_samples": [1], "user_data": {"f01": {"x": [[1.0, 2.0]], "y": [1]}}}, {"images": True}, "an x has 2 numbers, which are no square"),
    "fractions": (changed("y", [0.5] * 12), {}, "a class is a whole number or a text"),
    "nobody": (content({}), {}, "it has no examples"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_line(tmp_path, mistake):
    found, settings, words = WRONG[mistake]
    with pytest.raises(InputError, match=words) as error:
        ready(write(tmp_path / "train.json", found), **settings)
    assert "\n" not in str(error.value)


def test_files_that_are_missing_damaged_or_hold_a_user_twice(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        ready(tmp_path / "train.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"this folder has no \.json files"):
        ready(tmp_path / "empty")
    (tmp_path / "cut.json").write_text('{"users": ["a"')
    with pytest.raises(InputError, match=r"cut\.json; it is not JSON"):
        ready(tmp_path / "cut.json")
    (tmp_path / "cut.json").write_text('{"users": ["a"], "user_data": {"a": {}, "a": {}}}')
    with pytest.raises(InputError, match=r"cut\.json, key 'a'; an object has it twice"):
        ready(tmp_path / "cut.json")
    for name in "ab":
        write(tmp_path / "twice" / f"{name}.json", content({"f01": 3}))
    with pytest.raises(InputError, match=r"b\.json, user f01; the user is in .*a\.json too"):
        ready(tmp_path / "twice")


@pytest.mark.slow
@pytest.mark.essential
def test_femnist_is_trained_by_the_documented_command(tmp_path, monkeypatch):
    """With 28 x 28 grey levels, as the published files have."""
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "femnist" / "train" / "part0.json",
        content({f"f{i:03}": 30 + i for i in range(4)}, side=28),
    )
    write(
        tmp_path / "femnist" / "test" / "part0.json",
        content({f"f{i:03}": 9 for i in range(4)}, side=28),
    )
    (command,) = documented("LeafData")
    assert main([*command, "--trainer.max_rounds", "4", "--trainer.logger", "false"]) == 0
    (found,) = Path("runs").rglob("metadata.json")
    assert json.loads(found.read_text())["final/accuracy"] > 0.5
    partition = json.loads((found.parent / "partition.json").read_text())
    assert partition["sizes"] == [30, 31, 32, 33]
    assert partition["examples"]["clients"] == ["f000", "f001", "f002", "f003"]
