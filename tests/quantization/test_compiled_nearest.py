"""The compiled search for the nearest centroid against the one in Python, bit for bit."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from fl_lightning.quantization import compiled_nearest, product
from fl_lightning.support import compiled
from fl_lightning.support.compiled import CompiledLibrary

pytestmark = pytest.mark.skipif(shutil.which(compiled.COMPILER) is None, reason="no C++ compiler")
SIZES = [0.0, 1e-45, 1e-39, 1e-20, 1e-3, 1.0, 1e18, 1e19, 1e30]
"""Magnitudes whose squares are zero, subnormal, ordinary and infinite."""


def compiled_search():
    here = compiled_nearest
    return CompiledLibrary(here.COMPILED.source, here.DISTANCES_PER_BUILD)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        made = compiled_search()
        assert made.build()
        assert made.found is not None
    return made


class Without(CompiledLibrary):
    """A machine without a compiler."""

    def library(self, work):
        return None


def both(function, built, monkeypatch):
    """Return what a function returns with the library and without it, as bytes."""
    answers = []
    for one in (built, Without(built.source, 0)):
        monkeypatch.setattr(compiled_nearest, "COMPILED", one)
        answers.append([array.tobytes() for array in function()])
    return answers


@pytest.mark.parametrize("dim", [1, 2, 3, 8])
@pytest.mark.parametrize(("count", "centroids"), [(1, 1), (63, 7), (64, 16), (65, 2), (1000, 256)])
def test_the_library_finds_the_same(dim, count, centroids, built, monkeypatch):
    draws = np.random.default_rng(count + dim)
    for size in SIZES:
        points = (size * draws.standard_normal((count, dim))).astype(np.float32)
        # many distances are equal: of points on a grid, and of centroids that occur twice
        points[::3] = size * draws.integers(-2, 3, points[::3].shape)
        codebook = np.asfortranarray(points[draws.integers(0, count, centroids)])
        one, other = both(
            lambda given=(points, codebook): product.nearest(*given), built, monkeypatch
        )
        assert one == other


def test_k_means_has_the_same_bits(built, monkeypatch):
    points = np.random.default_rng(0).standard_normal((3000, 2)).astype(np.float32)
    points[:500] = points[0]  # some clusters are empty at first
    one, other = both(
        lambda: product.kmeans(points, 128, 20, np.random.default_rng(1)), built, monkeypatch
    )
    assert one == other


def test_the_library_of_another_process_is_used_when_it_is_there(built, tmp_path, monkeypatch):
    """A process that may not build, since another one is at it, asks again and does not build
    later."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    late = compiled_search()
    asked = []
    monkeypatch.setattr(late, "build", lambda: asked.append(1) and False)
    assert late.library(compiled_nearest.DISTANCES_PER_BUILD) is None
    assert late.library(compiled_nearest.DISTANCES_PER_BUILD) is None
    shutil.copy(built.path, tmp_path / "aside")
    (tmp_path / "aside").replace(late.path)
    assert late.library(1) is not None
    assert len(asked) == 1
