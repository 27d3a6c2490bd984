"""Datasets of torch, torchvision, one's own and a LightningDataModule: read once, and refused in
one line."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from page_commands import documented, file_of_page
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split
from torchvision.datasets import MNIST, FakeData
from toy import run

from fl_lightning.__main__ import main
from fl_lightning.config.recorded import describe
from fl_lightning.data import (
    IID,
    DataModuleData,
    DataModuleTokens,
    DatasetData,
    FederatedData,
    Natural,
    TokenData,
)
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg
from fl_lightning.rng import torch_stream


class ListData(Dataset):
    """Items from a list."""

    def __init__(self, items: list) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        return self.items[index]


def dealt(data: FederatedData) -> FederatedData:
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    return data


def ready(train, **settings) -> DatasetData:
    source = ListData(train) if isinstance(train, list) else train
    test = settings.pop("test", None)
    settings = {"num_clients": 4, "partition": IID(), **settings}
    return dealt(
        DatasetData(source, ListData(test) if isinstance(test, list) else test, **settings)
    )  # type: ignore[return-value]


def all_inputs(data: FederatedData, split: str = "train"):
    target = data.train_target if split == "train" else data.test_target
    return data.inputs(split, torch.arange(len(target)))  # type: ignore[arg-type]


def pairs(n: int = 40) -> list:
    return [(torch.tensor([float(i), -1.0]), "odd" if i % 2 else "even") for i in range(n)]


def test_items_are_the_examples_in_their_order():
    data = ready(pairs(), test=pairs(10))
    assert torch.equal(all_inputs(data)[:, 0], torch.arange(40.0))
    assert data.train_target.tolist() == [0, 1] * 20
    assert data.names.classes == ["even", "odd"]
    assert data.example_shape == (2,)
    assert torch.equal(data.example_inputs(), torch.tensor([[0.0, -1.0]] * 2))
    examples = [
        *all_inputs(ready(pairs()), "train")[:, 0].tolist(),
        *all_inputs(ready(pairs()), "test")[:, 0].tolist(),
    ]
    assert sorted(examples) == list(range(40))
    assert len(ready(pairs()).test_target) == 8


def test_dictionaries_with_several_inputs_clients_and_groups():
    """Integer inputs stay integers; every client holds the items that name it."""
    items = [
        {
            "ids": [i, i + 1],
            "weight": 0.5 * i,
            "label": i % 3,
            "writer": f"w{i % 5}",
            "site": i // 20,
        }
        for i in range(40)
    ]
    data = ready(
        items, target="label", client="writer", group="site", num_clients=0, partition=None
    )
    assert isinstance(data.partition, Natural)
    assert data.num_clients == 5
    inputs = all_inputs(data)
    assert list(inputs) == ["ids", "weight"]
    assert inputs["ids"].dtype == torch.int64
    assert inputs["weight"].shape == data.train_target.shape
    for id, name in enumerate(data.names.clients):
        held = [*data.client(id).train, *data.client(id).val]
        assert {f"w{int(i) % 5}" for i in inputs["ids"][held, 0]} == {name}
    assert data.train_group.tolist() == [int(i) // 20 for i in inputs["ids"][:, 0]]
    assert data.num_groups == 2
    assert data.num_classes == 3
    assert list(all_inputs(ready(items, target="label", input=["ids"]))) == ["ids"]
    assert all_inputs(ready(items, target="label", input="ids")).shape == (31, 2)
    batch, _ = next(iter(data.train_batches(data.client(0), round=1, epochs=1)))
    assert batch["ids"].shape[1:] == (2,)


def test_names_of_a_dictionary_come_in_any_order():
    items = [
        {"x": torch.full((2,), n), "z": torch.full((3,), -n), "y": int(n % 2)}
        for n in map(float, range(20))
    ]
    turned = [dict(reversed(item.items())) for item in items]
    mixed = [pair[n % 2] for n, pair in enumerate(zip(items, turned, strict=True))]
    one = ready(items, test=items, target="y")
    for train, test in ((mixed, items), (items, turned)):
        other = ready(train, test=test, target="y")
        for split in ("train", "test"):
            first, second = all_inputs(one, split), all_inputs(other, split)
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first)
    named = [{"x": item["x"], "w": item["z"], "y": item["y"]} for item in items]
    with pytest.raises(InputError, match=r"its inputs are x .* \[2\], w .* training items' are x"):
        ready(items, test=named, target="y")


def test_regression_of_several_numbers():
    items = [(torch.ones(3) * i, [i, 2.0 * i]) for i in range(20)]
    data = ready(items, task="regression")
    assert data.num_classes == 2
    assert torch.equal(data.train_target[:, 1], 2 * data.train_target[:, 0])
    assert torch.equal(data.train_target[:, 0], all_inputs(data)[:, 0])


def test_torchvision_images_are_bytes_and_normalised_with_the_training_images():
    source = partial(FakeData, size=30, image_size=(3, 20, 20), num_classes=3)
    data = ready(
        source,
        test=partial(FakeData, size=12, image_size=(3, 20, 20), num_classes=3, random_offset=99),
    )
    assert data._inputs["train"].dtype == torch.uint8
    raw = (
        torch.stack(
            [torch.from_numpy(np.array(source()[i][0])).permute(2, 0, 1) for i in range(30)]
        ).double()
        / 255
    )
    mean, std = raw.mean((0, 2, 3))[:, None, None], raw.std((0, 2, 3), correction=0)[:, None, None]
    torch.testing.assert_close(all_inputs(data).double(), (raw - mean) / std, rtol=0, atol=1e-5)
    assert abs(float(all_inputs(data, "test").mean())) < 0.1
    assert data.example_shape == (3, 20, 20)
    assert data.dataset == "FakeData"


def test_random_transforms_are_the_same_in_every_run():
    class Noisy(ListData):
        def __getitem__(self, index: int):
            return torch.rand(3), index % 2

    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = all_inputs(ready(Noisy(pairs())))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(one, all_inputs(ready(Noisy(pairs()))))


class Drawn(ListData):
    """It draws its items as it is made, and adds noise as they are read."""

    def __init__(self, tokens: bool) -> None:
        super().__init__(np.random.randint(9, size=(40, 3)).tolist())  # noqa: NPY002
        self.tokens = tokens

    def __getitem__(self, index: int):
        item = [*self.items[index], np.random.randint(9)]  # noqa: NPY002
        return item if self.tokens else (torch.tensor(item), index % 2)


class DrawnModule(LightningDataModule):
    def __init__(self, tokens: bool) -> None:
        super().__init__()
        self.tokens, self.first = tokens, np.random.randint(200)  # noqa: NPY002

    def train_dataloader(self) -> DataLoader:
        drawn = Drawn(self.tokens)
        drawn.items = [[self.first, *item] for item in drawn.items]
        return DataLoader(drawn)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("module", [False, True])
def test_what_datasets_draw_is_the_same_in_every_run(tokens, module):
    kinds = (DatasetData, DataModuleData), (TokenData, DataModuleTokens)
    source = partial(DrawnModule if module else Drawn, tokens)
    digests = set()
    for seed in (1, 2):
        np.random.seed(seed)  # noqa: NPY002
        data = kinds[tokens][module](source, num_clients=2, partition=IID())
        digests.add(dealt(data).content_sha256)
    assert len(digests) == 1
    twice = DatasetData(source, source, num_clients=2) if not (tokens or module) else None
    assert twice is None or not torch.equal(*map(dealt(twice)._inputs.get, ("train", "test")))


class Noise(ListData):
    """It draws each item as it is read."""

    def __getitem__(self, index: int):
        drawn = torch.randint(9999, (4,))
        return drawn.tolist() if self.items[0] else (drawn, index % 2)

    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize("tokens", [False, True])
def test_what_items_draw_is_another_in_each_split_and_in_training_what_it_was(tokens):
    source = partial(Noise, [tokens])
    kind = partial(TokenData, vocab_size=9999) if tokens else DatasetData
    data = dealt(kind(source, source, num_clients=2, partition=IID()))
    train, test = (all_inputs(data, split) for split in ("train", "test"))
    if tokens:
        train, test = train["input_ids"], test["input_ids"]
    assert not set(map(tuple, train.tolist())) & set(map(tuple, test.tolist()))
    assert len(test) == 20
    with torch_stream(0, "data/read"):
        first = torch.randint(9999, (4,))
    assert torch.equal(train[0], first[: train.shape[1]])


def test_settings_tell_datasets_apart():
    one, other = (
        describe(DatasetData(partial(FakeData, size=size), num_clients=2)) for size in (10, 20)
    )
    assert one != other
    assert one["init_args"]["train"]["class_path"].endswith("FakeData")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(pairs())


def nan(row: int) -> list:
    items = pairs()
    items[row] = (torch.tensor([float("nan"), 0.0]), "odd")
    return items


class SplitsInEachSetup(LightningDataModule):
    """A module whose ``setup`` splits at random whatever the stage, as many do."""

    def setup(self, stage: str) -> None:
        self.train, self.test = random_split(ListData(pairs(40)), [30, 10])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test)


def test_no_training_example_of_a_module_is_a_test_example():
    one, other = (
        dealt(DataModuleData(SplitsInEachSetup, num_clients=2, partition=IID())) for _ in range(2)
    )
    train, test = (set(all_inputs(one, split)[:, 0].tolist()) for split in ("train", "test"))
    assert train | test == set(map(float, range(40)))
    assert not train & test
    assert torch.equal(all_inputs(one), all_inputs(other))  # the split is the same in every run


class WithMore(SplitsInEachSetup):
    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.test)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


def test_what_of_a_module_is_not_read_is_named(caplog):
    dealt(DataModuleData(WithMore, num_clients=2, partition=IID()))
    said = [record.message for record in caplog.records if "not called" in record.message]
    assert said
    assert said[0].startswith("val_dataloader, on_after_batch_transfer of WithMore")


def test_what_of_a_tuple_is_not_read_is_named(caplog):
    items = [(*pair, index) for index, pair in enumerate(pairs())]
    dealt(DatasetData(items, num_clients=2, partition=IID()))
    assert "items are tuples of 3, and what is at position 2 is left out" in caplog.text
    caplog.clear()
    dealt(DatasetData(items, num_clients=2, partition=IID(), group=2))
    assert "left out" not in caplog.text


WRONG = {
    "no items": ([], {}, "it has no items"),
    "a stream": (Stream(), {}, "Stream has no length or no items by position"),
    "no pair": ([torch.ones(3)] * 9, {}, "item 0; an item is .input, target. or a dictionary, and this is a Tensor"),
    "no target": ([{"x": 1, "y": 2}] * 9, {}, "nothing says which is the target; write target: NAME"),
    "wrong target": ([{"x": 1, "label": 2}] * 9, {"target": "labl"}, "target=labl; .* write label"),
    "wrong input": ([{"x": 1, "y": 2}] * 9, {"target": "y", "input": "z"}, "input=z"),
    "wrong place": (pairs(), {"client": 2}, "client=2; .* is a tuple of 2; write a position from 0 to 1"),
    "nobody's": ([{"x": 1, "y": 2, "who": float("nan")}] * 9, {"target": "y", "client": "who"}, "item 0, client nan; a client is a number or a text, and none is missing; say whose"),
    "two clients of one name": ([{"x": 1, "y": n // 2 % 2, "who": n % 2 or "1"} for n in range(9)], {"target": "y", "client": "who"}, "client '1' and 1; they are two values"),
    "two groups of one name": ([{"x": n, "y": n % 2, "kind": [2, "2"][n > 5]} for n in range(9)], {"target": "y", "group": "kind"}, "group '2' and 2; they are two values"),
    "two classes of one name": ([(torch.ones(2), [1, "1", "a"][n % 3]) for n in range(9)], {}, "class '1' and 1; they are two values, and a class is known by its text"),
    "another class of the test": ([(torch.ones(2), n % 2) for n in range(9)], {"test": [(torch.ones(2), "1")]}, "class '1' and 1; they are two"),
    "another client of the test": ([{"x": n, "y": n % 2, "who": 1} for n in range(9)], {"target": "y", "client": "who", "test": [{"x": 1, "y": 1, "who": "1"}]}, "client '1' and 1; they are two"),
    "no group": ([{"x": 1, "y": 2, "kind": None}] * 9, {"target": "y", "group": "kind"}, "item 0, group None; a group is"),
    "a list of clients": ([{"x": 1, "y": 2, "who": ["a"]}] * 9, {"target": "y", "client": "who"}, "a client is a number or a text"),
    "a tuple with a list": ([{"x": 1, "y": 2, "who": ("a", [1])}] * 9, {"target": "y", "client": "who"}, "item 0, client .'a', .1..; a client is a number or a text"),
    "a tensor of clients": ([{"x": 1, "y": 2, "who": torch.ones(2)}] * 9, {"target": "y", "client": "who"}, "item 0, client tensor.*; a client is a number or a text"),
    "text": ([("a text", 1)] * 9, {}, "an input is a tensor, an array, an image or numbers, and this is a str"),
    "16 bits": ([(Image.fromarray(np.full((9, 9), 40_000, np.uint16)), 1)] * 9, {}, "item 0; .* more than 8 bits a channel"),
    "real pixels": ([(Image.fromarray(np.full((9, 9), 0.5, np.float32)), 1)] * 9, {}, "mode F has more than 8 bits"),
    "shapes": ([*pairs(), (torch.ones(3), "odd")], {}, r"item 40, input torch.float32 \[3\]; the first item's"),
    "channels last": ([(np.zeros((28, 28, 3), np.uint8), 1)] * 9, {}, r"item 0, input uint8 \[28, 28, 3\]; an image of bytes is \[C, H, W\]; .* .permute\(2, 0, 1\)"),
    "not finite": (nan(7), {}, "item 7; its input has values that are not finite"),
    "fractions": ([(torch.ones(2), 0.5)] * 9, {}, "a class is a whole number or a text, and this is a float"),
    "one class": ([(torch.ones(2), 1)] * 9, {}, "all training examples are of the class 1"),
    "names of regression": (pairs(), {"task": "regression"}, "item 0; its target is not one or several finite"),
    "no number of regression": ([(torch.ones(2), [])] * 9, {"task": "regression"}, "item 0; its target is not one or several finite"),
    "unknown class": (pairs(), {"test": [(torch.ones(2), "prime")]}, "its class .'prime'. is not among"),
    "other test": (pairs(), {"test": [(torch.ones(3), "odd")]}, "its inputs are torch.float32 .3., and the training"),
    "no clients": (pairs(), {"num_clients": 0}, "nothing says whose an example is"),
    "no files": (partial(MNIST, "nowhere"), {}, "data.train MNIST; it cannot be made .Dataset not found"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_line(mistake):
    train, settings, words = WRONG[mistake]
    with pytest.raises(InputError, match=words) as error:
        ready(train, **settings)
    assert "\n" not in str(error.value)


def test_tensors_of_a_graph_and_sparse_ones_are_their_values():
    x, y = (torch.arange(20.0, requires_grad=True) for _ in range(2))
    plain = ready([([float(n)], float(n)) for n in range(20)], task="regression")
    graph = ready([(x[n, None], y[n]) for n in range(20)], task="regression")
    sparse = ready([(x[n, None].to_sparse(), n) for n in range(20)], task="regression")
    for data in (graph, sparse):
        assert torch.equal(all_inputs(data), all_inputs(plain))
        assert torch.equal(data.train_target, plain.train_target)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 28, 28), (3, 5, 3), (4, 9, 4), (2, 9, 9)])
def test_images_with_channels_first_are_taken(shape):
    """Also one that is as wide as an image has channels."""
    data = ready([(torch.full(shape, n, dtype=torch.uint8), n % 2) for n in range(20)])
    assert data.example_shape == shape
    assert len(data._scale[0]) == shape[0]


def test_too_many_items_are_refused_before_they_are_read():
    class Endless(ListData):
        def __len__(self) -> int:
            return 10**15

    with pytest.raises(InputError, match="with 1000000000000000 items; they take"):
        ready(Endless(pairs()))


def test_a_bug_of_the_dataset_keeps_its_type():
    class Broken(ListData):
        def __getitem__(self, index: int):
            return {}["nothing"]

    with pytest.raises(KeyError) as error:
        ready(Broken(pairs()))
    assert error.value.failed_at == "data.train Broken, item 0"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (
            "{}['nothing']",
            1,
            "data.train Own, item 3; KeyError: 'nothing'; FL_LIGHTNING_TRACEBACK=1 prints its",
        ),
        (
            "raise ValueError('no label')",
            2,
            "data.train Own, item 3; it cannot be read (ValueError: no label); corr",
        ),
        ("open('gone.png')", 2, "data.train Own, item 3; it cannot be read (FileNotFoundError: "),
        (
            "__import__('json').loads('{')",
            1,
            "data.train Own, item 3; JSONDecodeError: Expecting property name",
        ),
    ],
)
def test_an_item_that_fails_is_one_line_with_its_number(
    line, code, said, tmp_path, monkeypatch, capsys
):
    """A traceback is there for who asks for it, with the line of the dataset that failed."""
    (tmp_path / "failing.py").write_text(
        "import torch\n\n\nclass Own(torch.utils.data.Dataset):\n    def __len__(self):\n        return 9\n\n"
        f"    def __getitem__(self, index):\n        if index == 3:\n            {line}\n"
        "        return torch.ones(2), index % 2\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    command = ["fit", "--config", "fedavg", "--data", "DatasetData", "--data.train", "failing.Own"]
    assert main([*command, "--data.num_clients", "2", "--model.network", "mlp"]) == code
    printed = capsys.readouterr().err
    assert f"fl_lightning: error: {said}" in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("FL_LIGHTNING_TRACEBACK", "1")
    assert main([*command, "--data.num_clients", "2", "--model.network", "mlp"]) == code
    assert line in capsys.readouterr().err


# --- a LightningDataModule
# -----------------------------------------------------------------------------------------------------------------


class Module(LightningDataModule):
    """Its loaders shuffle, drop and collate, none of which may be seen."""

    def __init__(self, n: int = 40) -> None:
        super().__init__()
        self.n = n

    def prepare_data(self) -> None:
        Module.prepared = True

    def setup(self, stage: str) -> None:
        self.x, self.y = torch.arange(2.0 * self.n).reshape(self.n, 2), torch.arange(self.n) % 2

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            TensorDataset(self.x, self.y),
            batch_size=7,
            shuffle=True,
            drop_last=True,
            collate_fn=str,
        )


class WithTestLoader(Module):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.x[:6], self.y[:6]), batch_size=4)


def test_the_datasets_behind_the_loaders_are_taken(caplog):
    data = dealt(DataModuleData(WithTestLoader, num_clients=3, partition=IID()))
    said = [one for one in caplog.messages if "not used" in one]
    assert said == [
        "collate_fn, drop_last of DataLoader: not used of train_dataloader; items are read one by one"
    ]
    assert Module.prepared
    assert torch.equal(all_inputs(data), torch.arange(80.0).reshape(40, 2))
    assert torch.equal(all_inputs(data, "test"), torch.arange(12.0).reshape(6, 2))
    without = dealt(DataModuleData(Module, num_clients=3, partition=IID(), test_fraction=0.5))
    assert len(without.train_target) == len(without.test_target) == 20
    assert dealt(DataModuleData(Module(20), num_clients=3)).dataset == "Module"


def test_a_module_without_a_training_loader_is_refused():
    with pytest.raises(InputError, match="train_dataloader gives no loader"):
        dealt(DataModuleData(LightningDataModule, num_clients=3))


# --- the commands
# -----------------------------------------------------------------------------------------------------------------


def write_mnist(folder: Path, sizes: tuple[int, int] = (300, 60)) -> None:
    """Files in MNIST's true format; a class is a bright bar in a place of its own."""
    rng = np.random.default_rng(0)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, n in zip(("train", "t10k"), sizes, strict=True):
        labels = (np.arange(n) % 10).astype(np.uint8)
        images = rng.integers(0, 60, (n, 28, 28), np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 4 : 2 * label + 6] += 180
        for kind, header, content in (
            ("images-idx3", struct.pack(">IIII", 2051, n, 28, 28), images),
            ("labels-idx1", struct.pack(">II", 2049, n), labels),
        ):
            data = header + content.tobytes()
            (raw / f"{name}-{kind}-ubyte").write_bytes(data)
            (raw / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(data))


def final(folder: Path) -> dict:
    (found,) = folder.rglob("metadata.json")
    return json.loads(found.read_text())


def train(command: list[str], rounds: int = 3) -> dict:
    assert main([*command, "--trainer.max_rounds", str(rounds), "--trainer.logger", "false"]) == 0
    return final(Path("runs"))


def test_mnist_in_its_true_format(tmp_path):
    write_mnist(tmp_path)
    data = ready(partial(MNIST, str(tmp_path)), test=partial(MNIST, str(tmp_path), train=False))
    assert data.example_shape == (3, 28, 28)
    assert data.num_classes == 10
    assert data.train_target.tolist() == [*range(10)] * 30


@pytest.mark.parametrize("labels", [80, 130])
def test_mnist_with_another_number_of_labels_is_refused(tmp_path, labels):
    write_mnist(tmp_path, (100, 60))
    file = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    file.write_bytes(struct.pack(">II", 2049, labels) + bytes(labels))
    with pytest.raises(InputError, match=f"data.train MNIST; .* 100 images and {labels} labels"):
        ready(partial(MNIST, str(tmp_path)), test=partial(MNIST, str(tmp_path), train=False))


@pytest.mark.slow
@pytest.mark.essential
def test_mnist_is_trained_by_the_documented_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_mnist(tmp_path / "files")
    (command,) = documented("torchvision.datasets.MNIST")
    assert train(command, rounds=4)["dataset"] == "MNIST"
    assert final(tmp_path)["final/accuracy"] > 0.15


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    ("word", "name"),
    [("own_dataset.Letters", "own_dataset.py"), ("own_module.Moons", "own_module.py")],
)
def test_code_of_the_page_is_trained_by_its_command(tmp_path, monkeypatch, word, name):
    (command,) = documented(word)
    (tmp_path / name).write_text(file_of_page(name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert train(command, rounds=6)["final/accuracy"] > 0.8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [],
            "no data.train given; it is required; write --data.train torchvision.datasets.FakeData",
        ),
        (
            ["--data.train", "torchvision.datasets.MNIST"],
            "no data.train.root given; it is required; write --data.train.root FOLDER",
        ),
        (
            ["--data.train", "own.Set"],
            "(No module named 'own'), and it must be the import path of a torch.utils.data.Dataset; "
            "write --data.train torchvision.datasets.FakeData",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(arguments, words, capsys):
    assert main(["fit", "--config", "fedavg", "--data", "DatasetData", *arguments]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert words in line


@pytest.mark.parametrize("kind", ["vectors", "images"])
def test_engines_agree(tmp_path, kind):
    """Batches that are made at once for all clients are those of each client."""
    made = {}
    for engine in ("sequential", "batched"):
        data = (
            DatasetData(ListData([(torch.randn(5, generator=torch.Generator().manual_seed(i)), i % 2) for i in range(60)]), num_clients=6, partition=IID(), batch_size=4)
            if kind == "vectors"
            else DatasetData(partial(FakeData, size=60, image_size=(3, 16, 16), num_classes=3), num_clients=6, partition=IID(), batch_size=4)
        )  # fmt: skip
        method = FedAvg(
            network="mlp", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05)
        )
        trainer = run(
            method, data, tmp_path / engine, max_rounds=3, participation=0.5, engine=engine
        )
        made[engine] = method.server["weights"]
        assert json.loads((trainer.run_dir / "partition.json").read_text())["examples"]["sha256"]
    torch.testing.assert_close(made["batched"], made["sequential"], rtol=1e-4, atol=1e-5)
    assert made["sequential"].abs().sum() > 0
