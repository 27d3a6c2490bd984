"""Corruptions, attacks, calibration and cost against known answers; the tests of the command are in
test_robustness_command.py."""

from __future__ import annotations

from itertools import product

import cv2
import numpy as np
import pytest
import torch
from probed import subject_of
from torch import nn
from torch.nn import functional as F

from fl_lightning import evaluation
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg, FedMosaic, FedMPQ
from fl_lightning.probing import PROBES, probe, probes, select_probes
from fl_lightning.probing.attacks import EPS, fgsm, pgd
from fl_lightning.probing.corruptions import recipes
from fl_lightning.probing.corruptions.layers import (
    FROST_FILES,
    clipped_zoom,
    frost_photographs,
    motion_blur,
    plasma,
)
from fl_lightning.probing.corruptions.published import PublishedImages
from fl_lightning.probing.corruptions.recipes import EXTRA, STANDARD, corrupt
from fl_lightning.probing.cost import float_bytes, flops, latencies
from fl_lightning.probing.scaling import TEMPERATURE_BOUNDS, calibration, fit_temperature
from fl_lightning.rng import stream
from fl_lightning.tasks import Regression

ALL = (*STANDARD, *EXTRA)


def pictures(n: int = 8, side: int = 32) -> np.ndarray:
    """Smooth colours, uint8 ``[n, side, side, 3]``, away from black and white."""
    coarse = torch.from_numpy(stream(0, "pictures").uniform(60, 200, (n, 3, 4, 4)))
    return (
        F.interpolate(coarse, size=(side, side), mode="bilinear")
        .permute(0, 2, 3, 1)
        .numpy()
        .astype(np.uint8)
    )


# Attacks

WEIGHT = torch.tensor([0.5, -2.0, 1.0, 0.0, -0.25, 3.0])


def linear(pixels: torch.Tensor) -> torch.Tensor:
    """Two classes; the logit of class 1 is ``WEIGHT @ x``."""
    score = pixels @ WEIGHT
    return torch.stack([torch.zeros_like(score), score], dim=1)


def loss(forward, pixels, target):
    return F.cross_entropy(forward(pixels), target, reduction="none")


def test_fgsm_on_a_linear_model_is_known_and_the_best_there_is():
    pixels, target, eps = torch.full((2, 6), 0.5), torch.tensor([0, 1]), 0.1
    found = fgsm(linear, pixels, target, eps)
    # class 0 is hurt by a higher score, class 1 by a lower one; a weight of 0 moves nothing
    raises = WEIGHT.sign()
    torch.testing.assert_close(found, 0.5 + eps * torch.stack([raises, -raises]))
    corners = 0.5 + eps * torch.tensor(list(product((-1.0, 1.0), repeat=6)))
    for row, label in enumerate(target):
        best = loss(linear, corners, label.expand(len(corners))).max()
        assert loss(linear, found, target)[row] == pytest.approx(best.item(), abs=1e-6)
    worst = pgd(linear, pixels, target, torch.zeros_like(pixels), eps)
    torch.testing.assert_close(loss(linear, worst, target), loss(linear, found, target))


@pytest.fixture
def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 4)).eval()


@pytest.fixture
def examples():
    rng = stream(0, "examples")
    images = torch.from_numpy(rng.integers(0, 256, (40, 3, 4, 4)).astype(np.float32)) / 255
    return (
        images,
        torch.from_numpy(rng.integers(0, 4, 40)),
        torch.from_numpy(rng.uniform(-1, 1, images.shape).astype(np.float32)),
    )


def test_pgd_is_never_weaker_than_fgsm_and_often_stronger(network, examples):
    pixels, target, start = examples
    clean, one, many = (
        loss(network, x, target)
        for x in (
            pixels,
            fgsm(network, pixels, target, 0.2),
            pgd(network, pixels, target, start, 0.2),
        )
    )
    assert (many >= one).all()
    assert (many > one + 1e-3).sum() > 10
    assert many.mean() > one.mean() > clean.mean()
    without_a_step = pgd(network, pixels, target, torch.zeros_like(start), 0.2, steps=0)
    # FGSM's example is always among those it chooses from
    assert torch.equal(loss(network, without_a_step, target), one)


@pytest.mark.parametrize("eps", [0.0, EPS, 0.3])
def test_attacks_stay_within_eps_and_the_pixel_range(network, examples, eps):
    pixels, target, start = examples
    for found in (fgsm(network, pixels, target, eps), pgd(network, pixels, target, start, eps)):
        assert (found - pixels).abs().max() <= eps + 1e-6
        assert found.min() >= 0
        assert found.max() <= 1
        if eps == 0:
            assert torch.equal(found, pixels)


def test_attacks_leave_the_noise_of_a_run_in_its_images(network, examples):
    """They brought pixels beyond [0, 1] back to it, by far more than eps."""
    pixels, target, start = examples
    noisy = 1.5 * pixels - 0.25
    for found in (fgsm(network, noisy, target), pgd(network, noisy, target, start)):
        assert (found - noisy).abs().max() <= EPS + 1e-6
        assert found.min() >= noisy.min()
        assert found.max() <= noisy.max()


def test_an_attack_on_one_example_does_not_depend_on_the_others(network, examples):
    pixels, target, start = examples
    together = pgd(network, pixels, target, start)
    alone = torch.cat(
        [pgd(network, pixels[i : i + 1], target[i : i + 1], start[i : i + 1]) for i in range(5)]
    )
    torch.testing.assert_close(together[:5], alone)


def test_half_precision_hides_no_gradient(examples):
    """Of answers that are so sure that the slope of their loss is below the least float16, and of
    others, every example has the signs of float32."""
    torch.manual_seed(0)
    pixels, target, _ = examples
    network = nn.Sequential(nn.Flatten(), nn.Linear(pixels[0].numel(), 10))
    network[1].weight.data *= 10
    target = network(pixels).argmax(1)
    network[1].bias.data += 30 * F.one_hot(target[0], 10)
    moved = fgsm(network, pixels, target) - pixels

    def half(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return network(x).float()

    in_half = fgsm(half, pixels, target) - pixels
    assert (F.cross_entropy(half(pixels), target, reduction="none") < 1e-8).any()
    assert in_half.flatten(1).any(1).all()
    inside = (pixels > 0) & (pixels < 1)
    assert (in_half.sign() == moved.sign())[inside].double().mean() > 0.98


def test_attacks_see_pixels_and_leave_no_gradient(tmp_path):
    """What is shown is what the test set shows, in [0, 1] before normalisation; no parameter gets a
    gradient."""
    subject = subject_of(FedAvg(), tmp_path)
    subject.method.zero_grad(set_to_none=True)  # training left some
    seen = []

    def look(forward, pixels, target, number):
        seen.append((float(pixels.min()), float(pixels.max())))
        assert torch.equal(forward(pixels), subject.method.network(subject.data.normalise(pixels)))
        return fgsm(forward, pixels, target, 0.0)

    assert torch.equal(subject.answers_to(change=look), subject.answers())
    assert torch.equal(subject.answers_to(subject.images.test_images), subject.answers())
    assert min(low for low, _ in seen) >= 0
    assert 0.5 < max(high for _, high in seen) <= 1
    assert all(p.grad is None for p in subject.method.parameters())
    assert not subject.answers_to(255 - subject.images.test_images).equal(subject.answers())


@pytest.mark.parametrize("method", [FedMPQ, FedMosaic])
def test_the_answers_are_those_of_the_evaluation(method, tmp_path):
    """In the order of the test set, from the right client with its own state, bit for bit."""
    subject = subject_of(method(), tmp_path)
    _, (probs, target) = evaluation.on_test_set(
        subject.fabric, subject.method, subject.data, subject.states
    )
    assert torch.equal(subject.answers().softmax(1), probs)
    assert torch.equal(subject.answers_to().softmax(1), probs)
    assert torch.equal(subject.target, target)


def test_both_gradients_are_taken_where_weights_are_quantised(tmp_path):
    subject = subject_of(FedMPQ(bits=1, activation_bits=2), tmp_path)
    teacher, vector = subject.method.full_precision(), subject.method.server["weights"]
    assert torch.equal(subject.method.layout.read(teacher), vector)
    assert not torch.equal(subject.method.layout.read(subject.method.deploy()), vector)
    assert not any(module._forward_pre_hooks for module in teacher.modules())
    assert any(module._forward_pre_hooks for module in subject.method.network.modules())
    for name in ("fgsm", "pgd"):
        found = PROBES[name](subject).metrics
        # FGSM at 1 bit need not be the stronger one
        assert found[f"{name}/loss"] != found[f"{name}/full_gradient_loss"]
    finding = PROBES["fgsm"](subject_of(FedAvg(), tmp_path))
    assert set(finding.metrics) == {"fgsm/accuracy", "fgsm/loss"}
    assert "FedAvg deploys its weights in full precision" in finding.skipped[0]


# Corruptions


@pytest.mark.parametrize("name", ALL)
def test_every_corruption_is_visible_and_a_function_of_the_seed(name, monkeypatch):
    images = pictures()
    before, state = images.copy(), np.random.get_state()[1].copy()  # noqa: NPY002
    found = corrupt(name, images, seed=1)
    assert found.dtype == np.uint8
    assert found.shape == images.shape
    assert np.array_equal(images, before)
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002
    change = np.abs(found.astype(float) - images).mean(axis=(1, 2, 3))
    assert change.min() > 0.2
    assert change.max() < 80
    assert np.array_equal(found, corrupt(name, images, seed=1))
    random = name not in {
        *("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
    } | {*("gaussian_blur", "saturate")}
    assert random != np.array_equal(found, corrupt(name, images, seed=2))
    # more images leave the first ones as they are
    monkeypatch.setattr(recipes, "IMAGES_PER_BLOCK", 4)
    assert np.array_equal(corrupt(name, images, seed=1)[:4], corrupt(name, images[:4], seed=1))


@pytest.mark.parametrize(
    "name",
    ["motion_blur", "glass_blur", "elastic_transform", "zoom_blur", "pixelate", "gaussian_blur"],
)
def test_what_moves_pixels_leaves_one_colour_alone(name):
    grey = np.full((2, 32, 32, 3), 128, np.uint8)
    assert np.abs(corrupt(name, grey, seed=0).astype(int) - 128).max() <= 1


def test_noise_has_the_published_strength():
    grey = np.full((200, 16, 16, 3), 102, np.uint8)  # 0.4
    noise = {
        name: corrupt(name, grey, seed=0) / 255 - 0.4
        for name in ("gaussian_noise", "shot_noise", "speckle_noise")
    }
    assert noise["gaussian_noise"].std() == pytest.approx(0.08, rel=0.02)
    assert noise["shot_noise"].std() == pytest.approx((0.4 / 100) ** 0.5, rel=0.02)
    assert noise["speckle_noise"].std() == pytest.approx(0.4 * 0.12, rel=0.02)
    impulse = corrupt("impulse_noise", grey, seed=0)
    assert (impulse != 102).mean() == pytest.approx(0.03, rel=0.1)
    assert (impulse == 255).sum() == pytest.approx((impulse == 0).sum(), rel=0.1)
    assert set(np.unique(impulse)) == {0, 102, 255}


def test_light_and_colour_by_hand():
    image = np.zeros((1, 2, 2, 3), np.uint8)
    image[0, 0] = 200  # mean 100
    assert corrupt("contrast", image, 0)[0, :, 0, 0].tolist() == [140, 60]  # 100 +- 0.4 * 100
    assert corrupt("brightness", image, 0)[0, :, 0, 0].tolist() == [
        238,
        38,
    ]  # + 0.15 * 255, cut off to whole numbers
    red = np.full((1, 1, 1, 3), (200, 100, 100), np.uint8)  # saturation 0.5 -> 0.75
    assert corrupt("saturate", red, 0)[0, 0, 0].tolist() == pytest.approx([200, 50, 50], abs=1)


def test_blurs_are_those_of_the_published_code():
    image = pictures(1)[0]
    alias = np.zeros((17, 17), np.float32)
    alias[8, 8] = 1  # the disk of radius 0.5
    kernel = cv2.GaussianBlur(alias, ksize=(3, 3), sigmaX=0.6)
    wanted = cv2.filter2D(image / 255.0, -1, kernel) * 255
    assert np.abs(corrupt("defocus_blur", image[None], 0)[0] - wanted).max() <= 1
    dot = np.zeros((1, 9, 9, 1))
    dot[0, 4, 4] = 1
    row = motion_blur(dot, radius=1, sigma=1.0, angles=np.array([0.0]))[0, 4, :, 0]
    weight = np.exp(-np.array([0.0, 1.0, 4.0]) / 2)
    assert row[[4, 3, 2]] == pytest.approx(weight / weight.sum())  # half a Gaussian, to one side
    assert row.sum() == pytest.approx(1)
    assert motion_blur(dot, 1, 1.0, np.array([-90.0]))[0, :, 4, 0][[4, 5, 6]] == pytest.approx(
        weight / weight.sum()
    )


def test_plasma_and_zoom():
    height = plasma(3, 24, 2.5, stream(0, "plasma"))
    assert height.shape == (3, 24, 24)  # cut from 32
    assert height.min() >= 0
    assert height.max() <= 1
    images = pictures(2) / 255
    assert np.allclose(clipped_zoom(images, 1.0), images)
    ramp = np.broadcast_to(np.linspace(0, 1, 32)[None, None, :, None], (1, 32, 32, 1))
    # half as much of it is seen
    assert np.ptp(clipped_zoom(ramp, 2.0)) == pytest.approx(0.5, abs=0.03)


def test_frost_is_cut_from_photographs_where_they_are(tmp_path):
    assert frost_photographs(tmp_path) == []
    for number, name in enumerate(FROST_FILES):
        picture = np.zeros((300, 250, 3), np.uint8)
        picture[...] = (0, 0, 50 * number)  # OpenCV writes blue first: these are red
        assert cv2.imwrite(str(tmp_path / name), picture)
    photographs = frost_photographs(tmp_path)
    assert photographs[0].shape == (60, 50, 3)
    black = np.zeros((50, 32, 32, 3), np.uint8)
    red = corrupt("frost", black, 0, photographs)[:, 0, 0]
    assert set(red[:, 0] // 10) == {0, 2, 4, 6, 8}  # 0.4 of 0, 50, 100, 150, 200
    assert red[:, 1:].max() <= 4  # JPEG
    (tmp_path / FROST_FILES[0]).write_text("no picture")
    with pytest.raises(InputError, match="no picture"):
        frost_photographs(tmp_path)


# The published arrays


@pytest.fixture
def cifar_c(tmp_path):
    """Files of the published form, almost all holes: only the rows around severity 3 are
    written."""
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    for name in ALL:
        array = np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="w+", dtype=np.uint8, shape=(50_000, 32, 32, 3)
        )
        for row, value in ((19_999, 1), (20_000, 2), (29_999, 3), (30_000, 4)):
            array[row] = value
        del array
    np.save(folder / "labels.npy", np.tile(np.arange(10_000) % 10, 5).astype(np.uint8))
    return tmp_path


def test_published_arrays_are_read_at_severity_3(cifar_c):
    published = PublishedImages("cifar10", str(cifar_c))
    assert published.why_not is None
    images = published.read("frost")
    assert images.shape == (10_000, 32, 32, 3)
    assert (images[0] == 2).all()
    assert (images[-1] == 3).all()
    published.check_labels(np.arange(10_000) % 10)
    with pytest.raises(InputError, match="not the labels of the test set"):
        published.check_labels(np.arange(10_000) % 10 + 1)
    np.save(
        cifar_c / "CIFAR-10-C" / "fog.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True
    )
    with pytest.raises(InputError, match=r"fog\.npy; it cannot be read"):
        published.read("fog")
    np.save(cifar_c / "CIFAR-10-C" / "snow.npy", np.zeros((5, 32, 32, 3), np.uint8))
    with pytest.raises(InputError, match="published are uint8"):
        published.read("snow")
    (cifar_c / "CIFAR-10-C" / "snow.npy").unlink()
    assert "lacks 1 of 20 files, first snow.npy" in str(
        PublishedImages("cifar10", str(cifar_c)).why_not
    )
    assert "no published" in str(PublishedImages("digits", str(cifar_c)).why_not)


def test_corrupted_images_that_are_clean_are_answered_as_clean_ones(tmp_path, monkeypatch):
    subject = subject_of(FedAvg(), tmp_path)
    monkeypatch.setattr(
        probes,
        "corrupt_images",
        lambda name, images, seed, photographs: 255 - images if name in EXTRA else images,
    )
    found = PROBES["corruptions"](subject)
    clean = PROBES["clean"](subject).metrics["test/accuracy"]
    assert [found.metrics[f"corrupted/{name}"] for name in STANDARD] == [clean] * 15
    assert found.metrics["corrupted/accuracy"] == pytest.approx(clean)
    inverse = (
        (subject.answers_to(255 - subject.images.test_images).argmax(1) == subject.target)
        .double()
        .mean()
        .item()
    )
    assert found.metrics["corrupted/extra_accuracy"] == pytest.approx(inverse)
    assert found.details["source"] == "generated"
    assert any("published corruptions not used" in said for said in found.skipped)
    assert any("16x16" in said for said in found.skipped)


def test_images_with_noise_are_rounded_and_not_cut_off(tmp_path, monkeypatch):
    subject = subject_of(FedAvg(), tmp_path)
    bytes_of_test = subject.images.test_images
    subject.images.test_images = bytes_of_test.to(torch.float16) - 0.25
    seen = []
    monkeypatch.setattr(
        probes,
        "corrupt_images",
        lambda name, images, seed, photographs: seen.append(images) or images,
    )
    PROBES["corruptions"](subject)
    assert torch.equal(seen[0], bytes_of_test)


def test_photographs_that_are_no_larger_than_the_images_are_left_out(tmp_path, monkeypatch):
    subject = subject_of(FedAvg(), tmp_path)
    monkeypatch.setattr(
        probes, "frost_photographs", lambda folder: [np.zeros((16, 30, 3), np.uint8)] * 5
    )
    found = PROBES["corruptions"](subject)
    assert found.details["frost"].startswith("drawn, since photographs")


def test_images_that_the_run_has_changed_are_corrupted_by_the_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(PublishedImages, "why_not", None)
    subject = subject_of(FedAvg(), tmp_path)
    subject.images.local_test_fraction = 0.25
    monkeypatch.setattr(probes, "corrupt_images", lambda name, images, seed, photographs: images)
    found = PROBES["corruptions"](subject)
    assert found.details["why"] == "the run's test images are not those of the data set"


# Calibration


def test_a_planted_temperature_is_found():
    rng = stream(0, "planted")
    logits = torch.from_numpy(rng.normal(0, 3, (20_000, 5)))
    target = torch.tensor([rng.choice(5, p=p) for p in (logits / 3).softmax(1).numpy()])
    temperature = fit_temperature(logits, target)
    assert temperature == pytest.approx(3, rel=0.03)
    assert fit_temperature(2 * logits, target) == pytest.approx(2 * temperature, rel=1e-4)
    nll = {
        t: calibration(logits, target, t)["nll"]
        for t in (0.98 * temperature, temperature, 1.02 * temperature)
    }
    assert min(nll, key=nll.get) == temperature
    before, after = calibration(logits, target), calibration(logits, target, temperature)
    assert after["ece"] < 0.01 < before["ece"]
    assert after["brier"] < before["brier"]


def test_a_temperature_of_too_few_examples_is_bounded_and_said(tmp_path):
    right = torch.eye(4).repeat(3, 1)
    assert fit_temperature(right, right.argmax(1)) == TEMPERATURE_BOUNDS[0]
    assert fit_temperature(right, (right.argmax(1) + 1) % 4) == TEMPERATURE_BOUNDS[1]


def test_the_temperature_never_sees_the_test_set(tmp_path):
    subject = subject_of(FedAvg(), tmp_path)
    before = PROBES["calibration"](subject).metrics
    subject.data.test_target = (subject.data.test_target + 1) % 4
    after = PROBES["calibration"](subject).metrics
    assert after["calibration/temperature"] == before["calibration/temperature"]
    assert after["calibration/ece"] != before["calibration/ece"]


def test_probes_of_language_say_why_they_are_left_out_of_images(tmp_path):
    subject = subject_of(FedAvg(), tmp_path)
    assert PROBES["kinds"](subject).skipped == [
        "kinds left out: the test examples are all of one kind"
    ]
    assert PROBES["generation"](subject).skipped == [
        "generation left out: the task is Classification"
    ]


def test_images_with_another_task_are_probed_by_what_knows_no_classes(tmp_path):
    """Corruptions are measured by the accuracy, attacks and temperatures by the cross-entropy."""
    subject = subject_of(FedAvg(), tmp_path)
    data, of_classes = subject.data, ["corruptions", "fgsm", "pgd", "calibration", "inversion"]
    data.task = Regression()
    data.train_target, data.test_target = (
        F.one_hot(target, 4).float() for target in (data.train_target, data.test_target)
    )
    found = probe(subject, list(PROBES))
    for name in of_classes:
        assert not found[name].metrics
        assert found[name].skipped == [f"{name} left out: the task is Regression"]
    assert found["clean"].metrics.keys() >= {"test/mse", "test/mae"}
    assert {name for name, one in found.items() if one.metrics or one.timings} == {
        *("clean", "clients", "cost", "latency", "membership")
    }


def test_the_answers_are_taken_in_the_batches_of_the_evaluation(tmp_path, monkeypatch):
    """A data class says how many examples fit into the memory at once."""
    subject = subject_of(FedAvg(), tmp_path)
    monkeypatch.setattr(type(subject.data), "evaluation_batch", 7)
    sizes: list[int] = []
    network = subject.method.network
    hook = network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    found = PROBES["calibration"](subject).metrics
    hook.remove()
    assert max(sizes) == 7
    assert found["calibration/ece"] == PROBES["clean"](subject).metrics["test/ece"]


def test_without_validation_examples_it_is_said(tmp_path):
    subject = subject_of(FedAvg(), tmp_path, val_fraction=0.0)
    assert "val_fraction" in PROBES["clients"](subject).skipped[0]
    finding = PROBES["calibration"](subject)
    assert "calibration/ece" in finding.metrics
    assert "calibration/temperature" not in finding.metrics
    assert "val_fraction" in finding.skipped[0]


# Cost


def test_flops_and_bytes_by_hand():
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 8 * 8, 10)
    ).eval()
    assert flops(network, torch.zeros(1, 3, 8, 8)) == 2 * (64 * 4 * 3 * 9) + 2 * 256 * 10
    assert float_bytes(network) == 4 * ((4 * 27 + 4) + 4 * 4 + 2570)


def test_latency_has_one_time_per_pass_and_model():
    network = nn.Linear(3, 2).eval()
    taken = latencies(
        {"student": network, "teacher": network}, torch.zeros(10, 3).split(4), torch.device("cpu")
    )
    assert {name: len(seconds) for name, seconds in taken.items()} == {"student": 3, "teacher": 3}
    assert all((seconds > 0).all() for seconds in taken.values())


def test_probes_are_chosen_by_name():
    assert select_probes(None) == [name for name in PROBES if name != "inversion"]
    assert select_probes("pgd, clean") == ["clean", "pgd"]
    for wrong in ("clen", "", "clean,,nothing"):
        with pytest.raises(InputError, match="comma-separated list of clean"):
            select_probes(wrong)
