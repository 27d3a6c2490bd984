"""The compiled sums against those in Python, bit for bit, and when they are built."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from refusals import refused

from fl_lightning.aggregation import compiled_sum, exact_sum
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE, ExactSum, exact_mean, fraction_bits
from fl_lightning.errors import MisuseError
from fl_lightning.support import compiled
from fl_lightning.support.compiled import CompiledLibrary

needs_compiler = pytest.mark.skipif(
    shutil.which(compiled.COMPILER) is None, reason="no C++ compiler"
)
LARGEST = float(np.nextafter(np.float32(MAX_MAGNITUDE), np.float32(0)))


def compiled_sums():
    return CompiledLibrary(compiled_sum.COMPILED.source, compiled_sum.VALUES_PER_BUILD)


class Without(CompiledLibrary):
    """A machine without a compiler."""

    found = None  # type: ignore[assignment]

    def library(self, work):
        return None


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extensions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        made = compiled_sums()
        assert made.load() is None
        assert made.build()
        assert [path.suffix for path in folder.iterdir()].count(".so") == 1  # and nothing aside
        assert made.found is not None
    return made


@pytest.fixture
def both(built, monkeypatch):
    """Call a function with the library and without it."""

    def call(function):
        answers = []
        for sums in (built, Without(built.source, 0)):
            monkeypatch.setattr(compiled_sum, "COMPILED", sums)
            answers.append(function())
        return answers

    return call


def vectors(clients: int, size: int) -> list[torch.Tensor]:
    """Values of all sizes: halves of a unit, zeros of both signs, subnormal ones, and some of both
    sides of what is rounded by a shift."""
    draws = np.random.default_rng(1000 * clients + size)
    values = draws.normal(size=(clients, size)) * 10.0 ** draws.uniform(-45, 0, (clients, size))
    special = [0.0, -0.0, 1e-45, -1e-45, 1e-39, LARGEST, -LARGEST]
    bits = fraction_bits(clients)
    special += [sign * n * 2.0 ** -(bits + 1) for sign in (1, -1) for n in range(1, 8)]
    special += [
        sign * 2.0 ** (51 - bits) * x for sign in (1, -1) for x in (1, 1 - 2**-24, 1 + 2**-23)
    ]
    places = draws.integers(0, size, (clients, len(special) if size > 300 else min(2, size)))
    for row, where in zip(values, places, strict=True):
        row[where] = draws.permutation(np.clip(special, -LARGEST, LARGEST))[: len(where)]
    return [torch.tensor(row, dtype=torch.float32) for row in values]


@needs_compiler
@pytest.mark.parametrize("clients", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("size", [1, 255, 257, 5000])
def test_the_library_adds_the_same_integers(clients, size, both):
    compare(clients, size, both)


@needs_compiler
def test_the_library_adds_the_same_integers_in_threads(both):
    compare(3, exact_sum.THREADED_VALUES + 3, both)


def compare(clients, size, both):
    given = vectors(clients, size)
    weights = np.random.default_rng(size).uniform(0.003, 1, clients).tolist()
    weights[-1] = 1.0

    def sums():
        exact = ExactSum(size, clients)
        for first in range(0, clients, 3):
            exact.add(given[first : first + 3], weights[first : first + 3])
        return (
            exact.integers,
            exact.mean(sum(weights)),
            exact_mean(given, weights, sum(weights), clients),
        )

    with_library, without = both(sums)
    for one, other in zip(with_library, without, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert torch.equal(one.signbit(), other.signbit())


@needs_compiler
@pytest.mark.parametrize(
    "value", [MAX_MAGNITUDE, -MAX_MAGNITUDE, float("inf"), -float("inf"), float("nan")]
)
@pytest.mark.parametrize("place", [0, 256, 40_000])
def test_the_library_refuses_what_python_does(value, place, built, monkeypatch):
    monkeypatch.setattr(compiled_sum, "COMPILED", built)
    given = [torch.ones(40_001), torch.ones(40_001)]
    given[1][place] = value
    for function in (
        lambda: ExactSum(40_001, 2).add(given, [1.0, 1.0]),
        lambda: exact_mean(given, [1.0, 0.0], 1, 2),
    ):
        with refused(f"values up to {abs(value):g}", kind=MisuseError):
            function()


@needs_compiler
def test_what_is_not_flat_float32_is_added_in_python(both):
    wide = torch.randn(50, 2, dtype=torch.float64)
    for given in (
        [wide.float()[:, 0]],
        [wide[:, 0].contiguous()],
        [wide.float()[:, 0], wide[:, 1]],
    ):
        assert compiled_sum.adder(given, [1.0] * len(given)) is None
        one, other = both(lambda given=given: exact_mean(given, [0.5] * len(given), 1.0, 2))
        assert torch.equal(one, other)


@needs_compiler
def test_it_is_built_once_and_found_by_the_next_process(built, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    import fcntl

    file = compiled_sums()
    with open(file.path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not file.build()  # somebody is at it
    file.path.write_bytes(b"half of a library")
    assert compiled_sums().found is None
    shutil.copy(built.path, tmp_path / "aside")
    (tmp_path / "aside").replace(file.path)
    assert compiled_sums().found is not None


def test_without_a_compiler_or_a_folder_nothing_is_built(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "folder"))
    assert not compiled_sums().build()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for compiler in ("no-such-compiler", "false"):  # the second one fails
        monkeypatch.setattr(compiled, "COMPILER", compiler)
        assert not compiled_sums().build()
    assert not [path for path in tmp_path.iterdir() if path.suffix not in ("", ".lock")]


def test_a_short_run_builds_nothing_and_a_long_one_tries_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    sums, built = compiled_sums(), []
    monkeypatch.setattr(sums, "build", lambda: built.append(1))
    for values in (1000, compiled_sum.VALUES_PER_BUILD - 1001):
        assert sums.library(values) is None
    assert not built
    for _ in range(3):
        sums.library(compiled_sum.VALUES_PER_BUILD)
    assert len(built) == 1
    assert exact_sum.exact_mean([torch.ones(2)], [1.0], 1.0, 1).tolist() == [1, 1]
