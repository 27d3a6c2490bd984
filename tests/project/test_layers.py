"""Imports go down only, in circles nowhere, and heavy libraries stay where they belong
(``docs/design.md``, "The rooms")."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from places import ROOT

LAYERS = [
    {"__main__"},
    {"deploy"},
    {"cli"},
    {"conformance", "study"},
    {"trainer"},
    {"export"},
    {"probing"},
    {"run"},
    {"tracking"},
    {"loop"},
    {"asking"},
    {"exchange"},
    {"federation"},
    {"topology"},
    {"evaluation"},
    {"engines"},
    {"methods"},
    {"compatibility"},
    {"clock", "sampling"},
    {"aggregation"},
    {"hooks", "data"},
    {"privacy", "energy"},
    {"client", "distributed", "wire"},
    {"models", "quantization"},
    {"tasks"},
    {"metrics"},
    {"config"},
    {"rng", "figures", "support"},
    {"errors"},
]
"""The rooms and loose files of the package, the uppermost first: a file imports from its own room
and from those below its layer."""
INSIDE = {
    "study": [
        {"execute"},
        {"report"},
        {"results"},
        {"plan"},
        {"metric_names"},
        {"ranks"},
        {"statistics"},
    ],
    "energy": [
        {"command", "budgets"},
        {"calibration", "table_files"},
        {"controllers", "gating", "costs", "regret"},
        {"switched", "cost_shapes"},
        {"options"},
    ],
    "deploy": [{"command"}, {"flower"}, {"server", "node"}, {"protocol", "certificates"}],
}
"""The order within large rooms. What stands in one layer does not import each other."""
CONFINED = {
    "jsonargparse": {"cli", "study"},
    "mlflow": {"tracking"},
    "optuna": {"study"},
    "flwr": {"deploy"},
}
FILES = sorted((ROOT / "fl_lightning").rglob("*.py"))
MOST_LOOSE_FILES = 14
MOST_LONG_LINES = 350  # of more than 100 columns: texts of messages that are not broken


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """All modules and names that a file imports, those for type checkers and those inside functions
    too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(module: str, depth: int = 1) -> str:
    return [*module.split("."), "__init__"][depth]


def goes_down(here: str, there: str, layers: list[set[str]]) -> bool:
    rank = {name: number for number, layer in enumerate(layers) for name in layer}
    assert here in rank, f"{here} has no layer"
    return there not in rank or here == there or rank[there] > rank[here]


def test_every_room_stands_in_the_design_and_in_its_picture():
    page = (ROOT / "docs" / "design.md").read_text()
    rooms = {
        path.name for path in (ROOT / "fl_lightning").iterdir() if (path / "__init__.py").is_file()
    }
    picture = (ROOT / "docs" / "assets" / "rooms.svg").read_text()
    assert [name for name in rooms if f"| `fl_lightning/{name}/` |" not in page] == []
    assert [name for name in rooms if f"{name}/" not in picture] == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path):
    module = module_of(path)
    here = room(module)
    for name in imports(path):
        top = name.split(".")[0]
        assert top != "callbacks", "the package never imports callbacks"
        assert here in CONFINED.get(top, {here}), f"{name} is not for {here}"
        if here == "study" and top == "jsonargparse":
            assert path.name == "spec_file.py", "study and search files are parsed in one place"
        if name.startswith("fl_lightning.") and here != "__init__":
            assert goes_down(here, room(name), LAYERS), (
                f"{here} imports {name}, which is not below it"
            )
        if top == "flwr":
            assert module.startswith("fl_lightning.deploy.flower"), (
                "one folder of deploy knows Flower"
            )
        if (
            here in INSIDE
            and name.startswith(f"fl_lightning.{here}.")
            and module != f"fl_lightning.{here}"
        ):
            assert goes_down(room(module, 2), room(name, 2), INSIDE[here]), (
                f"{module} imports {name}"
            )


def test_no_circles_between_files():
    graph = {
        module: {
            name
            for name in imports(path)
            if name in MODULES and not f"{module}.".startswith(f"{name}.")
        }
        for module, path in MODULES.items()
    }
    graph["fl_lightning"] = set()  # its public names are imported where they are asked for
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"files import each other in a circle: {' -> '.join(error.args[1])}")


def test_few_loose_files():
    assert len([path for path in FILES if path.parent == ROOT / "fl_lightning"]) <= MOST_LOOSE_FILES


def test_few_long_lines():
    paths = [*FILES, *(ROOT / "callbacks").rglob("*.py")]
    lines = [line for path in paths for line in path.read_text().splitlines() if len(line) > 100]
    assert len(lines) <= MOST_LONG_LINES


def test_no_pickle():
    for path in [*FILES, *sorted((ROOT / "callbacks").rglob("*.py"))]:
        assert "torch.load" not in path.read_text(), path
        uses_pickle = any(
            name.split(".")[0] in {"pickle", "dill", "cloudpickle"} for name in imports(path)
        )
        guarded = (
            path.name in {"cifar.py", "convert_traces.py"} and "def find_class" in path.read_text()
        )
        assert not uses_pickle or guarded, path
