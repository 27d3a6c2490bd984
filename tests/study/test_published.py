"""Published runs are paired with those of a study as if one sweep had made all, or refused by
name."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from compared import GRID, OFF, ON, A, B, C, comparison_of, report_of
from outcomes import rows_of
from places import ROOT
from published import CONFIG, publish
from refusals import refused
from synthetic_runs import make_study

from fl_lightning.errors import InputError
from fl_lightning.study.execute.sweep import sweep
from fl_lightning.study.execute.until import with_flags
from fl_lightning.study.plan.published import PublishedStudy, find_published
from fl_lightning.study.plan.study import Study
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.report.figures import figures as figures_of
from fl_lightning.study.results.published import CONTENT_BY_NAME, add_published

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")
AXIS = {"grid": GRID["grid"]}
MINE = {"Mine": {ON: C, OFF: B}}
UNTIL = "## Until {:.1%} test accuracy at noise=on"
THEIRS = {"A": {ON: A, OFF: B}, "B": {ON: B, OFF: C}}


def own_study(root: Path, published: Path, accuracies=None, run=None, **keys) -> None:
    """Write the runs of a study, named ``mine``, that is compared with published ones."""
    run = {"config": CONFIG, **(run or {})}
    keys = {"published": str(published), "proposed": ["Mine"], **AXIS, **keys}
    make_study(root / "runs", accuracies or MINE, name="mine", run=run, **keys)


def changed(**settings) -> dict:
    """Return the configuration of synthetic runs with other settings, as in
    ``trainer__max_rounds=6``."""
    config = deepcopy(CONFIG)
    for name, value in settings.items():
        *groups, last = name.split("__")
        place = config
        for group in groups:
            place = place[group]
        place[last] = value
    return config


@pytest.mark.slow
@pytest.mark.essential
def test_published_runs_give_what_one_sweep_of_all_methods_gives(tmp_path):
    published = publish(tmp_path, THEIRS, **AXIS)
    own_study(tmp_path, published)
    compare("mine", tmp_path / "paired", tmp_path / "runs")
    make_study(
        tmp_path / "runs",
        {**MINE, **THEIRS},
        name="all",
        run={"config": CONFIG},
        proposed=["Mine"],
        **AXIS,
    )
    compare("all", tmp_path / "swept", tmp_path / "runs")
    paired, swept = (report_of(tmp_path / out) for out in ("paired", "swept"))
    assert paired["methods"] == ["Mine", "A", "B"]
    # differences, places, means, hashes: to the last digit
    assert paired["levels"] == swept["levels"]
    assert paired["levels"][0]["differences"][0]["seeds"] == [0, 1, 2]
    rows = [sorted(rows_of(tmp_path / out / "runs.csv"), key=str) for out in ("paired", "swept")]
    assert rows[0] == rows[1]
    assert {
        row["run"].split("-")[0]
        for row in rows_of(tmp_path / "paired/timings.csv")
        if row["time/round"]
    } == {
        "Mine"  # what a clock measured elsewhere is compared with nothing
    }
    assert {one["name"].split("-")[0] for one in paired["provenance"]["runs"]} == {"Mine"}
    assert paired["published"] == [
        {"study": "board", "runs_sha256": PublishedStudy.read(published, "").sha256}
    ]


def test_fewer_seeds_and_levels_than_are_published_may_be_compared(tmp_path):
    published = publish(tmp_path, THEIRS, **AXIS)
    few = {seed: C[seed] for seed in (0, 2)}
    own_study(tmp_path, published, {"Mine": {ON: few}}, grid={"noise": {"on": {}}})
    compare("mine", tmp_path / "out", tmp_path / "runs")
    (level,) = report_of(tmp_path / "out")["levels"]
    assert level["differences"][0]["differences"] == pytest.approx([C[0] - A[0], C[2] - A[2]])
    assert {row["seed"] for row in rows_of(tmp_path / "out/runs.csv")} == {"0", "2"}


def test_axes_may_be_listed_in_another_order_than_they_are_published_in(tmp_path):
    """A level is known by its axes; every number is that of the same level, and none is missing."""
    grid = {"noise": {"on": {}, "off": {}}, "bits": {"4": {}, "8": {}}}
    places = [(noise, bits) for noise in grid["noise"] for bits in grid["bits"]]
    theirs, mine = {}, {}
    for place, (noise, bits) in enumerate(places):
        theirs[("noise", noise), ("bits", bits)] = {seed: A[seed] - 0.1 * place for seed in A}
        mine[("bits", bits), ("noise", noise)] = {seed: A[seed] + 0.01 * place for seed in A}
    published = publish(tmp_path, {"A": theirs}, grid=grid)
    own_study(tmp_path, published, {"Mine": mine}, grid=dict(reversed(grid.items())))
    compare("mine", tmp_path / "out", tmp_path / "runs")
    report = report_of(tmp_path / "out")
    found = {
        (one["levels"]["noise"], one["levels"]["bits"]): one["differences"][0]["mean"]
        for one in report["levels"]
    }
    assert found == {place: pytest.approx(0.11 * n) for n, place in enumerate(places)}
    assert {tuple(run["levels"]) for run in report["runs"]} == {("bits", "noise")}


@pytest.mark.parametrize("target", [0.85, 0.7])
def test_when_published_runs_reach_another_target_than_theirs_is_not_known(target, tmp_path):
    published = publish(tmp_path, THEIRS, target_accuracy=0.85, **AXIS)
    claims = ["rounds(Mine) <= rounds(A)", 'sum("bits/average", Mine) <= sum("bits/average", A)']
    own_study(tmp_path, published, target_accuracy=target, criteria=claims)
    compare("mine", tmp_path / "out", tmp_path / "runs")
    rounds, bits = (one["levels"][0] for one in report_of(tmp_path / "out")["criteria"])
    assert bits["reason"] == "sum(bits/average, A) is not known of the published runs"
    lines = (tmp_path / "out/report.md").read_text().splitlines()
    _, head, _, *rows = (line for line in lines[lines.index(UNTIL.format(target)) :] if line)
    assert head.endswith("seeds that reach it |")
    reached = {row.split(" | ")[0]: row.split(" | ")[-1] for row in rows[:3]}
    if target == 0.85:  # which C does not reach
        assert reached == {"| Mine": "0 of 3 |", "| A": "3 of 3 |", "| B": "3 of 3 |"}
        assert rounds["reason"] == "no rounds(Mine) in seed 0, 1, 2"
    else:
        assert reached == {"| Mine": "3 of 3 |", "| A": "not known |", "| B": "not known |"}
        assert rounds["decision"] == "undecided"
        assert rounds["reason"] == "rounds(A) is not known of the published runs"


def stop_early(folder: Path) -> None:
    """Let the runs of a study say that early stopping has ended them."""
    for file in folder.glob("*/metadata.json"):
        said = json.loads(file.read_text()) | {"stopped_early": "val/accuracy has not improved"}
        file.write_text(json.dumps(said))


def test_runs_that_early_stopping_has_ended_are_paired_with_published_ones(tmp_path):
    """A published table says how many rounds a run made, and not how many it was to make; those are
    part of the protocol."""
    run = {"config": changed(trainer__max_rounds=9)}
    make_study(tmp_path / "runs", THEIRS, name="board", run=run, **AXIS)
    stop_early(tmp_path / "runs/board")
    compare("board", tmp_path / "published/board", tmp_path / "runs")
    own_study(tmp_path, tmp_path / "published/board", run={**run, "rounds": 7})
    stop_early(tmp_path / "runs/mine")
    compare("mine", tmp_path / "out", tmp_path / "runs")
    (one, *_) = report_of(tmp_path / "out")["levels"]
    assert {label: found["seeds"] for label, found in one["methods"].items()} == {
        label: [0, 1, 2] for label in ("Mine", "A", "B")
    }


def test_seeds_are_not_added_beside_published_runs_by_a_flag_either(tmp_path):
    published = publish(tmp_path, THEIRS, **AXIS)
    own_study(tmp_path, published, criteria=["accuracy(Mine) > accuracy(A)"])
    study = Study.read(tmp_path / "runs/mine/study.yaml")
    with refused("until with published", "leave one of them out"):
        with_flags(study, "decided", None, None)
    assert with_flags(study, None, None, None) is study


BROKEN = {
    "data set": ({"dataset": "cifar10"}, {}, "data set cifar10, published: board has digits"),
    "content": (
        {"content": "f" * 64},
        {},
        "content of the data ffffffffffff, published: board has unknown",
    ),
    "partition": (
        {"partition": "e" * 64},
        {},
        "partition eeeeeeeeeeee, published: board has 5feceb66ffc8",
    ),
    "setting": (
        {"config": changed(data__init_args__batch_size=64)},
        {},
        "another protocol than published: board: data.init_args.batch_size: 32 published, 64 here",
    ),
    "stressor": (
        {"config": changed(trainer__callbacks=[])},
        {},
        'trainer.callbacks.0.class_path: "callbacks.LabelNoise" published, not set here',
    ),
    "network": (
        {"config": changed(model__init_args__network="mlp")},
        {},
        'model.init_args.network: "small_cnn" published, "mlp" here',
    ),
    "selection": ({}, {"selection": "best_val"}, "selection: last is published, best_val is asked"),
    "until": (
        {},
        {"until": {"max_seeds": 5}, "criteria": ["accuracy(Mine) > accuracy(A)"]},
        "until with published",
    ),
}


@pytest.mark.quick("partition", "stressor", "until")
@pytest.mark.parametrize(("run", "keys", "named"), BROKEN.values(), ids=[*BROKEN])
def test_what_breaks_the_pairing_is_refused_by_its_name(tmp_path, run, keys, named):
    own_study(
        tmp_path,
        publish(tmp_path, THEIRS, selection="last", **AXIS),
        run=run,
        **{"selection": "last", **keys},
    )
    with refused(named):
        compare("mine", tmp_path / "out", tmp_path / "runs")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "said"), [("tokens", "the tokens of the text"), ("public", "the public set")]
)
def test_runs_of_other_tokens_or_another_public_set_are_not_paired(tmp_path, name, said):
    """Seed by seed, and where both say it."""
    published = publish(tmp_path, THEIRS, selection="last", **AXIS)
    own_study(tmp_path, published, selection="last")

    def say(pattern: str, sha256: str) -> None:
        for file in (tmp_path / "runs").glob(f"{pattern}/metadata.json"):
            metadata = json.loads(file.read_text())
            file.write_text(json.dumps({**metadata, f"{name}_sha256": sha256 + 63 * "0"}))

    def paired() -> None:
        compare("mine", tmp_path / "out", tmp_path / "runs", overwrite=True)

    say("mine/*", "b")

    def say_of_each(study: str) -> None:
        """A public set is drawn for each seed."""
        for seed in range(3):
            say(f"{study}/*seed{seed}", str(seed if name == "public" else 0))

    paired()  # a report of before does not say
    say_of_each("board")
    compare("board", published, tmp_path / "runs", overwrite=True)
    with refused(f"has {said} b00000000000, published: board has 000000000000"):
        paired()
    say_of_each("mine")
    paired()


@pytest.mark.parametrize(("dataset", "paired"), [("digits", True), ("cifar10", False)])
def test_a_report_that_says_no_content_has_that_of_its_name(tmp_path, dataset, paired):
    """Reports of an earlier release have no SHA-256 of digits, and runs of this one do."""
    published = publish(tmp_path, THEIRS, run={"dataset": dataset}, **AXIS)
    content = min(CONTENT_BY_NAME["digits"])
    own_study(tmp_path, published, run={"content": content, "dataset": dataset})
    if paired:
        compare("mine", tmp_path / "out", tmp_path / "runs")
    else:
        with refused(f"content of the data {content[:12]}, published: board has unknown"):
            compare("mine", tmp_path / "out", tmp_path / "runs")


def test_other_seeds_levels_and_taken_names_are_refused(tmp_path):
    published = publish(tmp_path, THEIRS, **AXIS)
    for accuracies, keys, named in (
        ({"Mine": {ON: {7: 0.5}, OFF: {7: 0.5}}}, {}, "seeds 7 are not published"),
        ({"Mine": {(("noise", "high"),): C}}, {"grid": {"noise": {"high": {}}}}, "noise=high"),
        ({"Mine": C}, {"grid": {}}, "no grid"),
        ({"A": MINE["Mine"]}, {"proposed": []}, "methods: A"),
    ):
        folder = tmp_path / named.replace(" ", "_")
        own_study(folder, published, accuracies, **keys)
        with refused(named):
            compare("mine", folder / "out", folder / "runs")


def test_settings_of_the_method_and_callbacks_that_only_watch_are_no_part_of_the_protocol(tmp_path):
    watched = [{"class_path": "callbacks.ProgressBar"}, *CONFIG["trainer"]["callbacks"]]
    config = changed(
        model__class_path="FedProx", model__init_args__mu=0.5, trainer__callbacks=watched
    )
    own_study(tmp_path, publish(tmp_path, THEIRS, **AXIS), run={"config": config})
    compare("mine", tmp_path / "out", tmp_path / "runs")
    assert report_of(tmp_path / "out")["methods"] == ["Mine", "A", "B"]


def test_a_published_run_of_another_protocol_than_its_level_is_left_out_and_listed(tmp_path):
    published = publish(tmp_path, THEIRS, **AXIS)
    table = published / "runs.csv"
    lines = table.read_text().splitlines(keepends=True)
    (place,) = (i for i, line in enumerate(lines) if line.startswith("B-noise=on-seed1,"))
    protocol = report_of(published)["levels"][0]["protocol_sha256"]
    lines[place] = lines[place].replace(protocol, "d" * 64)
    table.write_text("".join(lines))
    own_study(tmp_path, published)
    compare("mine", tmp_path / "out", tmp_path / "runs")
    report = report_of(tmp_path / "out")
    assert [one["name"] for one in report["not_counted"]] == ["B-noise=on-seed1"]
    assert report["levels"][0]["methods"]["B"]["seeds"] == [0, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [*lines, lines[-1]], "2 lines of"),
        (lambda lines: [*lines, lines[-1].replace(",2,off,", ",02,off,")], "2 lines of B, seed 2"),
        (lambda lines: [line.replace(",A,", ",Z,") for line in lines], "A, Z is not in both"),
        (lambda lines: lines[:1], "A, B is not in both"),
        (lambda lines: lines[:-1], "B-noise=off-seed2: not as report.json has it"),
        (
            lambda lines: [line.replace(",0,on,5,", ",0,on,nan,") for line in lines],
            "A-noise=on-seed0, B",
        ),
        (
            lambda lines: [line.replace(",final/", ",fin/") for line in lines],
            ".* and 9 more: not as",
        ),
        (lambda lines: [line.replace("0.5", "0.9") for line in lines], ".*: not as report.json"),
    ],
)
def test_a_table_that_is_not_of_its_report_is_refused(change, said, tmp_path):
    published = publish(tmp_path, THEIRS, **AXIS)
    table = published / "runs.csv"
    table.write_text("".join(change(table.read_text().splitlines(keepends=True))))
    own_study(tmp_path, published)
    with pytest.raises(InputError, match=f"it is not the table of its report .{said}"):
        compare("mine", tmp_path / "out", tmp_path / "runs")
    study, before = tmp_path / "runs/mine/study.yaml", [*tmp_path.rglob("*")]
    with pytest.raises(InputError, match=f"it is not the table of its report .{said}"):
        sweep(str(study), root=str(tmp_path / "other"), resolve=None)  # nothing is looked at before
    assert [*tmp_path.rglob("*")] == before


@pytest.mark.parametrize("name", ["exp1_embedded", "vemoe_protected"])
def test_a_report_of_an_earlier_release_is_read_and_cannot_be_paired(name):
    found = PublishedStudy.read(find_published(name), name)
    assert found.path == ROOT / "docs/results" / name
    assert found.name == name
    assert len(found.labels) > 2
    with refused(f"published: {name}", "compare of this release"):
        found.check(
            "",
            found.seeds,
            [dict(one["levels"]) for one in found.levels],
            found.report["selection"],
        )


def test_runs_whose_settings_are_not_known_cannot_be_published_to_pair_with(tmp_path):
    published = publish(tmp_path, THEIRS, run={"config": {}}, **AXIS)
    own_study(tmp_path, published)
    with refused("published: board"):
        compare("mine", tmp_path / "out", tmp_path / "runs")


def test_a_folder_that_compare_did_not_write_is_refused(tmp_path):
    (tmp_path / "runs.csv").write_text("run\n")
    report = {"study": "a", "methods": ["A"], "seeds": [0], "selection": "last", "runs": []}
    report |= {"levels": [{"levels": {}}]}
    wrong = {"methods": [1], "seeds": ["0"], "controls": None, "study": None, "levels": [{}]}
    wrong |= {"levels ": [{"levels": {}, "partition_sha256": "a"}], "runs": [{"name": "A"}]}
    texts = [json.dumps({**report, key.strip(): value}) for key, value in wrong.items()]
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert PublishedStudy.read(tmp_path, "somewhere").labels == ["A"]
    for text in ("{}", "[", *texts):
        (tmp_path / "report.json").write_text(text)
        with refused("somewhere", "docs/results"):
            PublishedStudy.read(tmp_path, "somewhere")


def test_a_report_has_the_plan_of_its_study_with_paths_that_hold_elsewhere(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {class_path: FedAvg}\n")
    keys = {
        "config": ["plain.yaml", str(tmp_path / "mine.yaml")],
        "overlays": "overlays/noise_on.yaml",
    }
    published = publish(tmp_path, THEIRS, **AXIS, **keys)
    text = (published / "study.yaml").read_text()
    assert str(tmp_path) not in text
    assert str(ROOT) not in text
    assert "- plain.yaml\n- ../../mine.yaml\n" in text
    plan = Study.read(published / "study.yaml")
    assert [path.resolve() for path in plan.configs] == [
        ROOT / "configs/plain.yaml",
        tmp_path / "mine.yaml",
    ]
    assert (plan.seeds, list(plan.methods), list(plan.grid)) == ([0, 1, 2], ["A", "B"], ["noise"])


def test_published_runs_do_not_join_a_study_to_which_seeds_were_added(tmp_path):
    """The rule is that of the sweep, by a flag: the file has none."""
    own_study(tmp_path, publish(tmp_path, THEIRS, **AXIS), criteria=["gap(Mine, A) > 0"])
    swept = tmp_path / "runs/mine/study.yaml"
    (tmp_path / "mine.yaml").write_text(swept.read_text())
    rule = {"criteria": ["accuracy(Mine) > 0.1"], "until": {"max_seeds": 9}}
    document = {**yaml.safe_load(swept.read_text()), **rule}
    del document["published"]
    swept.write_text(yaml.safe_dump(document))
    with refused("mine.yaml: until with published", "leave one of them out"):
        compare(str(tmp_path / "mine.yaml"), tmp_path / "out", tmp_path / "runs")


def test_published_seeds_that_were_added_until_it_was_decided_are_judged_by_a_sequence(tmp_path):
    """By that of the published report, whatever stands beside it, and in a report of that report."""
    seeds = range(7)
    a = {seed: 0.9 + 0.01 * (seed % 3) for seed in seeds}
    b = {seed: 0.88 + 0.012 * (seed % 2) for seed in seeds}
    keys = {"until": {"max_seeds": 7}, "criteria": ["p(A, B) < 1e-9"], "seeds": [*range(4)]}
    found = [publish(tmp_path, {"A": a, "B": b}, **keys)]
    for far, name in enumerate(("Mine", "Next"), 1):
        mine = {name: {seed: 0.8 - 0.2 * far + 0.003 * (seed % (far + 1)) for seed in seeds}}
        found.append(publish(tmp_path, mine, name, published=str(found[-1])))
    tests = []
    for report in map(report_of, found):
        assert report["interval"] == "confidence sequence"
        pairs = report["levels"][0]["differences"]
        (one,) = (one for one in pairs if (one["a"], one["b"]) == ("A", "B"))
        tests.append([one[name] for name in ("low", "high", "p_t", "p_holm")])
    assert tests[0] == tests[1] == tests[2]


def test_a_figure_of_rounds_and_its_report_say_that_published_runs_have_none(tmp_path, figures):
    published = publish(tmp_path, {"A": A, "B": B})
    own_study(tmp_path, published, {"Mine": C}, grid={})
    comparison = Comparison(add_published(comparison_of(tmp_path / "runs", "mine").results))
    drawn = dict(figures_of(comparison))
    for unit in ("rounds", "megabytes"):
        title = drawn[f"accuracy_over_{unit}"].axes[0].get_title()
        assert title.endswith("\n1 of 3 methods: the others have no such curve")
    compare("mine", tmp_path / "out", tmp_path / "runs")
    text = (tmp_path / "out/report.md").read_text()
    assert "Rounds of published runs are not published: no curve over them shows A, B." in text
