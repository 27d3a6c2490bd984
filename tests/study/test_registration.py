"""What was registered before the runs stands at the head of every report, whatever was edited
afterwards."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from compared import OFF, ON, A, B, C, report_of
from refusals import refused
from synthetic_runs import make_study

from fl_lightning.__main__ import main
from fl_lightning.config.settings import config_of
from fl_lightning.errors import InputError
from fl_lightning.study.plan.differences import different
from fl_lightning.study.plan.registration import (
    Registration,
    differences,
    plan_of,
    question_of,
    register,
    registered_study,
)
from fl_lightning.study.plan.schema import entry
from fl_lightning.study.plan.study import Study
from fl_lightning.study.report.compare import compare

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")
STRICT, LAX = "accuracy(A) - accuracy(B) >= 0.045", "accuracy(A) - accuracy(B) >= -0.05"


@pytest.fixture
def runs(tmp_path) -> Path:
    """A study whose one criterion fails, registered before its runs, which carry its mark."""
    root = tmp_path / "runs"
    folder = make_study(root, {"A": A, "B": B, "C": C}, criteria=[STRICT])
    register_as(folder, 0)
    return root


def register_as(folder: Path, runs: int) -> Registration:
    """Register the study in the folder as a sweep would, and mark the runs."""
    study = Study.read(folder / "study.yaml")
    cells = [(one.method, one.levels, config_of(folder / one.name)) for one in study.cells()]
    last = Registration.read(folder)
    plan = plan_of(study, cells, last.entries[-1].plan if last else None)
    registration = register(folder, plan, runs)
    for path in folder.glob("*/metadata.json"):
        metadata = json.loads(path.read_text())
        metadata["tags"]["registration"] = registration.tag
        path.write_text(json.dumps(metadata))
    return registration


def edit(root: Path, **changes) -> None:
    path = root / "study/study.yaml"
    path.write_text(
        yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}, sort_keys=False)
    )


def head(root: Path, **flags) -> tuple[str, dict]:
    """The first line below the title of the report, and ``report.json``."""
    out = root.parent / "out"
    compare("study", out, root, overwrite=True, **flags)
    return (out / "report.md").read_text().splitlines()[2], report_of(out)


def test_an_edited_criterion_is_visible_in_the_first_line_and_both_verdicts_are_shown(runs, capsys):
    line, report = head(runs)
    assert line.startswith("As registered before the first run")
    assert [entry["verdict"] for entry in report["criteria"]] == ["fails"]
    edit(runs, criteria=[LAX])
    line, report = head(runs)
    date = Registration.read(runs / "study").first.date
    assert line.startswith("**Not as registered**")
    assert f"{date[:10]} {date[11:16]} UTC" in line
    assert f"`{STRICT}` removed" in line
    assert f"`{LAX}` added" in line
    assert [entry["verdict"] for entry in report["criteria"]] == ["holds"]
    assert [entry["verdict"] for entry in report["registration"]["registered"]["criteria"]] == [
        "fails"
    ]
    text = (runs.parent / "out/report.md").read_text()
    assert text.index("## Criteria as registered") < text.index("## Criteria as they are now")
    assert "Not as registered" in capsys.readouterr().out


def test_missing_cells_are_in_the_first_line_whatever_was_registered(runs):
    edit(runs, seeds=[0, 1, 2, 3])
    missing = "3 of 12 cells have no run that counts, such as A-seed3."
    line, _ = head(runs)
    assert line.startswith("**Not as registered**")
    assert missing in line
    (runs / "study/registration.json").unlink()
    line, _ = head(runs)
    assert line.startswith("**Not registered**")
    assert line.endswith(f" {missing}")
    edit(runs, seeds=[0, 1, 2])
    register_as(runs / "study", 9)
    shutil.rmtree(runs / "study/B-seed1")
    line, _ = head(runs)
    assert line.startswith("**Registered late**")
    assert line.endswith(" 1 of 9 cells have no run that counts, such as B-seed1.")


def test_a_look_at_a_part_of_the_cells_is_not_called_as_registered(runs):
    """Nor where a finished run was removed."""
    shutil.rmtree(runs / "study/B-seed1")
    for cell in ("A-seed2", "B-seed2", "C-seed2"):
        shutil.rmtree(runs / "study" / cell)
    line, report = head(runs)
    assert line.startswith(
        "**Not complete**: 4 of 9 cells have no run that counts, such as B-seed1."
    )
    assert report["registration"]["status"] == "not complete"
    assert "; seeds 0, 1; " in (runs.parent / "out/report.md").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"selection": "last5"}, "selection: registered last, now last5"),
        (
            {"metric": "final/auc_accuracy"},
            "metric: registered final/accuracy, now final/auc_accuracy",
        ),
        ({"methods": {"A": {}, "B": {}}}, "methods: C removed"),
        ({"methods": {"A": {}, "B": {}, "C": {}, "D": {}}}, "methods: D added"),
        ({"seeds": [0, 1]}, "seeds: 2 removed"),
        ({"seeds": [0, 1, 2, 3]}, "seeds: 3 added"),
        ({"proposed": ["A"]}, "proposed: A added"),
        ({"premises": ["accuracy(A) > 0"]}, "premise `accuracy(A) > 0` added"),
        (
            {"criteria": [{"criterion": STRICT, "share": 0.5}]},
            f"registered `{STRICT}`, now `{STRICT}` (share",
        ),
        ({"target_accuracy": 0.5}, "target_accuracy: registered None, now 0.5"),
    ],
)
def test_whatever_is_edited_is_named(runs, changes, said):
    edit(runs, **changes)
    line, report = head(runs)
    assert line.startswith("**Not as registered**")
    assert said in line
    assert said in report["registration"]["differences"][0]
    assert report["registration"]["registered"]["criteria"][0]["verdict"] == "fails"


def test_two_criteria_of_one_text_are_told_apart():
    """They differ in the share of the levels."""
    lax, strict = {"criterion": STRICT, "share": 0.2}, {"criterion": STRICT}
    assert different("criteria", [lax, strict], [{**lax, "share": 0.4}, strict]) == [
        f"criterion {STRICT}: registered `{STRICT}` (share 0.2), now `{STRICT}` (share 0.4)"
    ]
    assert different("criteria", [lax, strict], [lax]) == [f"criterion `{STRICT}` removed"]
    assert different("criteria", [lax], [lax, strict]) == [f"criterion `{STRICT}` added"]


@dataclass(frozen=True, kw_only=True)
class NotedStudy(Study):
    note: str = entry("it is a text", "why", default="", register=str, later=True)


def test_one_field_is_all_that_a_new_entry_takes(runs):
    """It is read, checked, written, registered and compared; plans without it keep their hash."""
    path = runs / "study/study.yaml"
    without = NotedStudy.read(path)
    assert question_of(without) == question_of(Study.read(path))
    edit(runs, note="as in the first draft")
    study = NotedStudy.read(path)
    assert study.note == "as in the first draft"
    assert yaml.safe_load(study.to_yaml()) == yaml.safe_load(without.to_yaml()) | {
        "note": study.note
    }
    asked = question_of(study)
    assert asked == question_of(without) | {"note": study.note}
    plan = plan_of(study, [])
    assert registered_study(replace(study, note="now"), plan).note == study.note
    assert differences(plan, replace(study, note="now")) == [
        f"note: registered {study.note}, now now"
    ]
    with pytest.raises(InputError, match="note; known here: study, seeds, "):
        Study.read(path)
    edit(runs, note=[1])
    with refused("note: [1]", "write note: why"):
        NotedStudy.read(path)


def test_another_metric_on_the_command_line_is_named_too(runs):
    line, report = head(runs, metric="test/ece")
    assert "metric: registered final/accuracy, now test/ece" in line
    assert report["registration"]["registered"]["metric"] == "final/accuracy"


def test_runs_of_other_settings_and_of_another_registration_are_named(runs):
    folder = runs / "study"
    for seed in range(3):
        path = folder / f"A-seed{seed}/config.yaml"
        path.write_text(yaml.safe_dump({"seed_everything": seed, "model": {"lr": 9.0}}))
    assert "3 runs of A have other settings than registered" in head(runs)[0]
    shutil.rmtree(folder)
    make_study(runs, {"A": A, "B": B, "C": C}, criteria=[STRICT])
    register_as(folder, 0)
    (folder / "registration.json").unlink()
    edit(runs, criteria=[LAX])
    study = Study.read(folder / "study.yaml")
    cells = [(one.method, one.levels, config_of(folder / one.name)) for one in study.cells()]
    register(folder, plan_of(study, cells), 0)  # as if there had been no runs yet
    assert "such as A-seed0, were made under a registration that is not in" in head(runs)[0]


def test_an_argument_that_a_class_got_later_is_no_amendment(runs, monkeypatch):
    """Neither of the plan, which an earlier version has written, nor of runs of before and since."""
    folder = runs / "study"
    (folder / "registration.json").unlink()

    def write(seed: int, **later: object) -> None:
        model = {"class_path": "FedMPQ", "init_args": {"bits": 4.0, **later}}
        settings = {"seed_everything": seed, "model": model}
        (folder / f"A-seed{seed}/config.yaml").write_text(yaml.safe_dump(settings))

    for seed in range(3):
        write(seed)
    with monkeypatch.context() as before:
        before.setattr("fl_lightning.config.settings.LATER_ARGUMENTS", {})
        first = register_as(folder, 0).first
    write(1, supernet=False)
    write(2, supernet=False)
    line, _ = head(runs)
    assert line.startswith("As registered before the first run")
    for seed in range(3):
        write(seed, supernet=False)
    assert register_as(folder, 3).entries == (first,)
    for seed in range(3):
        write(seed, supernet=True)
    assert "3 runs of A have other settings than registered" in head(runs)[0]
    assert len(register_as(folder, 3).entries) == 2


def test_the_first_registration_stays_and_later_ones_are_amendments(runs):
    folder = runs / "study"
    first = Registration.read(folder).first
    again = register_as(folder, 9)
    assert again.entries == (first,)  # nothing has changed
    edit(runs, criteria=[LAX])
    amended = register_as(folder, 9)
    assert amended.first == first
    assert [entry.runs for entry in amended.entries] == [0, 9]
    line, _ = head(runs)
    assert "amended" in line
    written = (folder / "registration.json").read_text()
    for damaged in (
        "{",
        "[]",
        '{"entries": []}',
        written.replace('"grid"', '"gird"'),
        "[" * 50_000,
    ):
        (folder / "registration.json").write_text(damaged)
        with pytest.raises(InputError, match="registration"):
            register_as(folder, 9)
    assert (
        main(["compare", "--study", "study", "--root", str(runs), "--out", str(runs.parent / "o")])
        == 2
    )


def test_a_run_outside_the_grid_is_compared_at_every_level_and_counted_once(tmp_path):
    """A beats B at one level and loses at the other; the runs of A are the same ones."""
    root = tmp_path / "runs"
    folder = make_study(
        root,
        {"A": A, "B": {ON: dict.fromkeys(A, 0.8), OFF: dict.fromkeys(A, 0.99)}},
        methods={"A": {"grid": False}, "B": {}},
        grid={"noise": {"on": {}, "off": {}}},
        criteria=["accuracy(A) - accuracy(B) >= 0.05"],
    )
    register_as(folder, 0)
    line, report = head(root)
    assert line.startswith("As registered before the first run")
    levels = {
        tuple(one["levels"].items()): one["decision"] for one in report["criteria"][0]["levels"]
    }
    assert levels == {ON: "holds", OFF: "fails"}
    assert len(report["provenance"]["runs"]) == 3 + 2 * 3
    text = (tmp_path / "out/report.md").read_text()
    assert "9 finished runs" in text
    assert "Each run of A is compared at every level." in text
    shutil.rmtree(folder / "A-seed1")
    _, report = head(root)
    assert report["not_counted"] == [{"name": "A-seed1", "reason": "no run; never started"}]


def test_an_edited_registration_and_one_that_came_late_are_told(runs):
    path = runs / "study/registration.json"
    written = path.read_text()
    path.write_text(written.replace("0.045", "-0.05"))
    edit(runs, criteria=[LAX])
    assert "registration.json was edited" in head(runs)[0]
    path.unlink()
    assert head(runs)[0].startswith("**Not registered**")
    register_as(runs / "study", 9)
    line, _ = head(runs)
    assert line.startswith("**Registered late**")
    assert "9 runs were" in line


def test_a_registration_from_which_a_level_was_cut_is_told(tmp_path):
    """No run was made by a plan that says nothing of it."""
    root = tmp_path / "runs"
    at_levels = {"A": {ON: A, OFF: B}, "B": {ON: B, OFF: A}}
    folder = make_study(root, at_levels, grid={"noise": {"on": {}, "off": {}}}, criteria=[STRICT])
    register_as(folder, 0)
    document = json.loads((folder / "registration.json").read_text())
    del document["entries"][0]["plan"]["methods"]["A"]["sha256"]["noise=off"]
    (folder / "registration.json").write_text(json.dumps(document))
    line, report = head(root)
    assert "registration.json was edited" in line
    judged = report["registration"]["registered"]["criteria"][0]["levels"]
    seeds = {one["levels"]["noise"]: one["seeds"] for one in judged}
    assert seeds == {"on": [0, 1, 2], "off": []}
    assert [run["name"] for run in report["runs"]].count("A-noise=off-seed0") == 1


def test_a_stopping_rule_allows_the_seeds_that_it_names_and_no_choice_among_them(tmp_path):
    root = tmp_path / "runs"
    folder = make_study(root, {"A": A, "B": B, "C": C}, criteria=[STRICT])
    edit(root, seeds=[0, 1], until={"max_seeds": 3})
    register_as(folder, 0)
    line, report = head(root)
    assert line.startswith("As registered")
    assert report["seeds"] == [0, 1, 2]
    edit(root, until={"max_seeds": 9})
    assert "stopping max_seeds: registered 3, now 9" in head(root)[0]
    edit(root, until={"max_seeds": 3}, seeds=[1, 2])
    assert "seeds: registered in the order 0, 1, now 1, 2" in head(root)[0]
    edit(root, until=None, seeds=[0, 1, 2])
    assert "stopping rule: registered decided, now fixed" in head(root)[0]
