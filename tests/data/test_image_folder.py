"""Folders of images: read, resized, dealt out by folders of clients, and refused in one line."""

from __future__ import annotations

import json
import logging
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import damaged, write
from page_commands import documented
from PIL import Image

from fl_lightning.__main__ import main
from fl_lightning.data import IID, ImageFolder, Natural
from fl_lightning.errors import InputError


def ready(train: Path, **settings) -> ImageFolder:
    data = ImageFolder(str(train), **{"num_clients": 3, "partition": IID(), "size": 20, **settings})
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    return data


def test_images_are_those_of_the_files(tmp_path):
    train, test = write(tmp_path / "train"), write(tmp_path / "test", 4)
    data = ready(train, test=str(test))
    assert data.names.classes == ["blue", "red"]
    assert data.dataset == tmp_path.name
    assert data.train_target.tolist() == [0] * 10 + [1] * 10
    for number, path in enumerate(sorted(train.rglob("*.png"))):
        assert np.array_equal(
            data.train_images[number].permute(1, 2, 0).numpy(), np.array(Image.open(path))
        )
    assert len(data.test_target) == 8
    seen = data.inputs("train", torch.arange(20))
    torch.testing.assert_close(seen.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(seen.std((0, 2, 3), correction=0), torch.ones(3), rtol=0, atol=1e-5)
    assert data.example_shape == (3, 20, 20)
    same = ready(train, test=str(test)).partition_summary()
    assert json.loads(json.dumps(same)) == json.loads(json.dumps(data.partition_summary()))


def test_images_of_any_shape_and_mode_become_squares(tmp_path):
    """The middle of a wide image stays, whatever lies beside it."""
    write(tmp_path)
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 15:25] = (10, 200, 30)
    Image.fromarray(wide).save(tmp_path / "red" / "wide.png")
    Image.fromarray(np.full((8, 8), 77, np.uint8)).save(tmp_path / "red" / "grey.png")
    Image.fromarray(np.full((8, 8, 4), 99, np.uint8)).save(tmp_path / "red" / "transparent.png")
    data = ready(tmp_path, test_fraction=0.05, crop="shrink", crop_size=16, flip=True)
    found = {tuple(image[:, 10, 10].tolist()) for image in (*data.train_images, *data.test_images)}
    assert {(10, 200, 30), (77, 77, 77), (99, 99, 99)} <= found
    batch, _ = next(iter(data.train_batches(data.client(0), round=1, epochs=1)))
    assert batch.shape[1:] == (3, 16, 16)


def test_every_client_keeps_the_images_of_its_folder(tmp_path):
    for number, client in enumerate(("north", "south", "west")):
        write(
            tmp_path / client,
            4 + number,
            colours={"blue": (0, number, 180), "red": (180, number, 0)},
        )
    data = ready(tmp_path, client_folders=True, num_clients=0, partition=None, test_fraction=0.25)
    assert isinstance(data.partition, Natural)
    assert data.num_clients == 3
    assert data.names.clients == ["north", "south", "west"]
    files = {path.parts[-3]: np.array(Image.open(path)) for path in sorted(tmp_path.rglob("*.png"))}
    assert len(files) == 3
    pixels = {
        np.array(Image.open(path)).transpose(2, 0, 1).tobytes(): path.parts[-3]
        for path in tmp_path.rglob("*.png")
    }
    for id, name in enumerate(data.names.clients):
        held = [*data.client(id).train, *data.client(id).val]
        assert held
        assert {pixels[data.train_images[i].numpy().tobytes()] for i in held} == {name}
    assert len(data.train_target) + len(data.test_target) == 30


def test_what_is_no_image_is_told(tmp_path, caplog):
    write(tmp_path)
    (tmp_path / "red" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "violet").mkdir()
    with caplog.at_level(logging.WARNING):
        ready(tmp_path)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: left out as no images: 1 of .txt",
        f"{tmp_path}: left out, as they hold no image: violet",
    ]


def split(folder: Path) -> None:
    write(folder / "train")
    write(folder / "test")


def no_image(folder: Path) -> None:
    (write(folder) / "red" / "003.png").write_bytes(b"hello")


def flat(folder: Path) -> None:
    folder.mkdir()
    for number in range(2):
        Image.new("RGB", (9, 9)).save(folder / f"{number}.png")


def deep(folder: Path) -> None:
    Image.fromarray(np.full((9, 9), 40_000, np.uint16)).save(write(folder) / "red" / "deep.png")


def deep_colours(folder: Path) -> None:
    """A PNG of 16 bits a channel, which PIL cannot write and calls RGB where it reads one."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 16, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress((b"\0" + bytes(9 * 6)) * 9))
    path = write(folder) / "red" / "deep.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + pixels + chunk(b"IEND", b""))


WRONG = {
    "no folder": (lambda folder: None, {}, "there is no such folder"),
    "empty": (lambda folder: (folder / "red").mkdir(parents=True), {}, "it holds no images; the form is class/image"),
    "no classes": (flat, {}, "its 2 images lie outside of class folders; the form is class/image; make a folder"),
    "one class": (lambda folder: write(folder, colours={"red": (1, 2, 3)}), {}, "all training examples are of the class red"),
    "root of splits": (split, {}, "it holds train and test, which are no classes; write train: .*/train and test:"),
    "clients unsaid": (lambda folder: write(folder / "north"), {}, "write client_folders: true"),
    "no clients": (write, {"client_folders": True}, "it holds no images; the form is client/class/image"),
    "cut off": (damaged, {}, r"003\.png; it is no image or damaged"),
    "not an image": (no_image, {}, r"003\.png; it is no image or damaged"),
    "16 bits": (deep, {}, r"deep\.png; its pixels have more than 8 bits"),
    "16 bits of each colour": (deep_colours, {}, r"deep\.png; its pixels have more than 8 bits"),
    "nobody": (write, {"num_clients": 0}, "nothing says whose an example is"),
    "natural": (write, {"partition": Natural()}, "the data do not say whose an example is"),
    "size": (write, {"size": 0}, "at least one pixel"),
    "large": (write, {"size": 10**8}, "they take"),
    "crop": (write, {"crop": "shrink", "crop_size": 21}, "write 1 to 20"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_line(tmp_path, mistake):
    make, settings, words = WRONG[mistake]
    make(tmp_path / "images")
    with pytest.raises(InputError, match=words) as error:
        ready(tmp_path / "images", **settings)
    assert "\n" not in str(error.value)


def test_a_class_of_the_test_alone_is_refused(tmp_path):
    write(tmp_path / "train")
    write(tmp_path / "test", 2, colours={"green": (0, 200, 0)})
    with pytest.raises(InputError, match=r"green/000\.png; the class green has no training images"):
        ready(tmp_path / "train", test=str(tmp_path / "test"))


def test_a_class_that_the_test_lacks_is_told(tmp_path, caplog):
    write(tmp_path / "train")
    write(tmp_path / "test", 2, colours={"blue": (0, 0, 200)})
    ready(tmp_path / "train", test=str(tmp_path / "test"))
    assert (
        f"{tmp_path / 'test'} has no image of red: accuracy is of the other classes" in caplog.text
    )


@pytest.mark.slow
@pytest.mark.essential
def test_folders_are_trained_by_the_documented_commands(tmp_path, monkeypatch):
    """And the test command attacks and corrupts the images."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "birds" / "train", 30)
    write(tmp_path / "birds" / "test", 10)
    for number, client in enumerate(("east", "north", "west")):
        write(tmp_path / "clinics" / client, 10 + number)
    for command, clients in zip(documented("ImageFolder"), (10, 3), strict=True):
        assert main([*command, "--trainer.max_rounds", "4", "--trainer.logger", "false"]) == 0
        (run,) = (path.parent for path in Path("runs").rglob("metadata.json"))
        assert json.loads((run / "metadata.json").read_text())["final/accuracy"] > 0.9
        assert len(json.loads((run / "partition.json").read_text())["sizes"]) == clients
        if clients == 3:
            assert main(["test", "--ckpt_path", str(run)]) == 0
            measured = json.loads((run / "test.json").read_text())
            assert "fgsm/accuracy" in json.dumps(measured)
            assert "corrupted/accuracy" in json.dumps(measured)
        Path("runs").rename(f"runs{clients}")


def test_colours_of_five_and_six_bits_are_read(tmp_path):
    """A BMP of 16 bits a pixel has 5 of red, 6 of green and 5 of blue."""
    write(tmp_path)
    masks = struct.pack("<3I", 0xF800, 0x07E0, 0x001F)
    colour = 31 << 11 | 21 << 5 | 10
    pixels = struct.pack("<10H", *[colour] * 9, 0) * 9  # a row is a multiple of 4 bytes
    head = struct.pack("<IiiHHIIiiII", 40, 9, 9, 1, 16, 3, len(pixels), 0, 0, 0, 0)
    start = 14 + len(head) + len(masks)
    file = struct.pack("<2sIHHI", b"BM", start + len(pixels), 0, 0, start)
    (tmp_path / "red" / "five.bmp").write_bytes(file + head + masks + pixels)
    data = ready(tmp_path)
    every = np.concatenate([data.train_images, data.test_images])
    expected = [255, round(21 * 255 / 63), round(10 * 255 / 31)]
    assert any(np.array_equal(image[:, 10, 10], expected) for image in every)
