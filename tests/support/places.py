"""Folders of the checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
BENCHMARKS = ROOT / "benchmarks"
CONFIGS = ROOT / "configs"
DOCS = ROOT / "docs"
