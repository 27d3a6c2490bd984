"""Documents that would be too large once built: refused at once wherever one is read, while
ordinary anchors and aliases stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from places import ROOT

from fl_lightning.__main__ import main
from fl_lightning.config.documents import (
    MAX_VALUES,
    check_size,
    odd_numbers,
)
from fl_lightning.errors import InputError


def bomb(levels: int = 10, *, flow: bool = False) -> str:
    """``levels`` lists, each of which names the one before ten times."""
    lists = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lists += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "{" + ", ".join(lists) + "}" if flow else "\n".join(lists) + "\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FL_LIGHTNING_")]:
        monkeypatch.delenv(name)
    (tmp_path / "bomb.yaml").write_text(bomb())
    (tmp_path / "merge.yaml").write_text(
        "a: &a {x: 1, y: 2}\nb: &b {<<: [" + ", ".join(["*a"] * 40_000) + "]}\n"
    )
    (tmp_path / "leaves.yaml").write_text(
        "trainer:\n  tags:\n" + "".join(f"    k{i}: 1\n" for i in range(30_000))
    )
    (tmp_path / "large.yaml").write_bytes(b"a: 1 # " + bytes(3 * 2**20))
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 60_000)
    (tmp_path / "itself.yaml").write_text("a: &a [*a]\n")
    return tmp_path


COMMANDS = [
    *(
        f"fit --config {name}.yaml"
        for name in ("bomb", "merge", "leaves", "large", "deep", "itself")
    ),
    "fit --config /dev/zero",
    "fit --model FedAvg --trainer bomb.yaml",
    "sweep --config bomb.yaml",
    "tune --config bomb.yaml",
    "compare --study bomb.yaml --out reports",
    "compare --config bomb.yaml",
]


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    before = sorted(Path().rglob("*"))
    assert main(args) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.count(";") >= 2
    assert len(line) < 500
    assert sorted(Path().rglob("*")) == before
    return line


@pytest.mark.parametrize("line", COMMANDS)
def test_a_file_that_is_too_large_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert next(part for part in line.split() if "." in part or "/" in part) in refused(
        line.split(), capsys
    )


@pytest.mark.parametrize("value", [bomb(flow=True), "[" * 60_000], ids=["bomb", "deep"])
def test_a_value_of_a_flag_or_a_variable_that_is_too_large_is_refused(
    value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for args in (["--trainer.tags", value], [f"--trainer.tags={value}"]):
        assert "--trainer.tags" in refused(["fit", "--model", "FedAvg", *args], capsys)
    monkeypatch.setenv("FL_LIGHTNING_TRAINER__TAGS", value)
    assert "FL_LIGHTNING_TRAINER__TAGS" in refused(["fit", "--model", "FedAvg"], capsys)


@pytest.mark.timeout(60)  # the parser itself would take minutes, or all memory
@pytest.mark.parametrize(
    "text", [bomb(), bomb(2000), "[" + "1," * 5_000_000 + "]", "[" * 1_000_000], ids=range(4)
)
def test_a_bomb_is_refused_before_it_is_parsed(text: str) -> None:
    with pytest.raises(InputError, match="which has more than"):
        check_size(text, "a document")


def test_what_counts_is_the_number_of_values_with_aliases_written_out() -> None:
    head, whole = (
        "a: &a [1, 2, 3]\nb: [",
        (MAX_VALUES - 8) // 4,
    )  # 8: the mapping, its two keys, the list of a with its 3, the list of b
    check_size(head + "*a, " * whole + "]", "")
    with pytest.raises(InputError):
        check_size(head + "*a, " * (whole + 1) + "]", "")


def test_ordinary_anchors_and_merges_stay(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "base.yaml").write_text(
        "model: {class_path: FedAvg, init_args: {optimizer: &sgd {class_path: SGD, init_args: {lr: 0.1}}}}\n"
        "data: {num_clients: &n 7}\ntrainer: {max_rounds: *n}\n"
    )
    assert main(["fit", "--config", "base.yaml", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["max_rounds"] == 7


def test_numbers_of_other_bases_are_found_and_no_others():
    text = "{a: 010, b: [1:30, 1:30.5], c: '010', d: 10, e: 0.01, f: 0x10, g: a:30, h: 2024-01-02}"
    assert [one.value for one in odd_numbers(yaml.compose(text))] == ["010", "1:30", "1:30.5"]


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/*.yaml")), ids=lambda path: path.stem)
def test_no_shipped_file_has_a_number_of_another_base(path):
    assert [*odd_numbers(yaml.compose(path.read_text()))] == []
