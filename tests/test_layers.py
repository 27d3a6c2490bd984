"""Imports go down only (DESIGN.md, section 3), and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"cli", "__main__", "commands", "cli_errors", "cli_types", "cli_input", "cli_help", "callbacks_module"},
    {"study", "conformance"},
    {"trainer", "trial"},
    {"journal", "metadata", "progress", "resume", "snapshot", "tracking", "track", "tracked_runs", "interrupts", "probing"},
    {"run_directory", "follower", "tables", "checkpoint", "disk", "settings", "redaction", "mlflow_store", "writer", "run_log"},
    {"loop"},
    {"evaluation", "robustness"},
    {"engines"},
    {"methods", "hooks"},
    {"client", "data", "models", "wire", "quantization", "metrics", "rng", "errors", "user_code", "recorded", "figures"}
    | {"documents", "packaged", "terminal"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
CONFINED = {"jsonargparse": {"cli", "cli_errors", "cli_types"}, "mlflow": {"mlflow_store", "tracked_runs"}, "optuna": {"study"}}
FILES = sorted((ROOT / "fl_lightning").rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT / "fl_lightning").parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path):
    here = room(path)
    if here == "__init__":
        return
    assert here in RANK, f"{here} has no layer"
    for name in imports(path):
        top = name.split(".")[0]
        assert top != "callbacks", "the engine room never imports callbacks"
        assert here in CONFINED.get(top, {here}), f"{name} is not for {here}"
        if top == "fl_lightning" and len(name.split(".")) > 1:
            target = name.split(".")[1]
            if target in RANK and target != here:
                assert RANK[target] >= RANK[here], f"{here} imports {target}, which is above it"


def test_no_pickle():
    for path in [*FILES, *sorted((ROOT / "callbacks").rglob("*.py"))]:
        assert "torch.load" not in path.read_text(), path
        assert path.name == "cifar.py" or not any(n.split(".")[0] in {"pickle", "dill", "cloudpickle"} for n in imports(path)), (
            path
        )
