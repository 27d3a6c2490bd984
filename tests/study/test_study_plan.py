"""Study files: what they say, what is refused, and that those of the project resolve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from places import CONFIGS

from fl_lightning.__main__ import main
from fl_lightning.cli import parser as cli
from fl_lightning.config.settings import FREE_KEYS, changed_settings, flatten, settings_hash
from fl_lightning.errors import InputError
from fl_lightning.study.execute.cells import StudyCells
from fl_lightning.study.plan.search import Range, Search
from fl_lightning.study.plan.study import Study, as_flag
from fl_lightning.study.plan.variations import Variation

STUDIES = sorted(
    path
    for path in CONFIGS.rglob("*.yaml")
    if "\nstudy:" in (text := path.read_text()) and "\nmethods:" in text
    if path.stem
    # a tokeniser of the Hub; tests/data/test_natural_instructions.py has one in its place
    != "hest"
)
SMALL = """
study: small
config: base.yaml
overlays: top.yaml
settings: {trainer.max_rounds: 3, model.alpha: 0.1}
seeds: [0, 4]
methods:
  A: {}
  B b=1: {config: [b.yaml], settings: {model.alpha: 0.2}}
grid:
  noise: {on: {}, off: {config: off.yaml}}
  lr: {1e-3: {settings: {model.optimizer.init_args.lr: 1e-3}}, 0.10: {settings: {model.alpha: null}}}
degradation: {axis: noise, stressed: on, clean: off}
proposed: [B b=1]
"""


@pytest.fixture
def write(tmp_path):
    for name in ("base", "top", "b", "off"):
        (tmp_path / f"{name}.yaml").write_text("trainer: {max_rounds: 1}\n")

    def write(text: str) -> Path:
        (tmp_path / "small.yaml").write_text(text)
        return tmp_path / "small.yaml"

    return write


def test_every_combination_is_a_cell_whose_later_settings_win(write, tmp_path):
    study = Study.read(write(SMALL))
    cells = study.cells()
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) == 2 * 2 * 2 * 2
    assert names[0] == "A-noise=on-lr=1e-3-seed0"
    assert [cell.seed for cell in cells] == [0] * 8 + [4] * 8  # whole comparisons first
    (cell,) = [cell for cell in cells if cell.name == "B b=1-noise=off-lr=0.10-seed4"]
    files = [Path(cell.args[i + 1]).name for i, word in enumerate(cell.args) if word == "--config"]
    assert files == ["base.yaml", "b.yaml", "top.yaml", "off.yaml"]
    assert cell.args[-3:] == ["--trainer.max_rounds=3", "--model.alpha=null", "--seed_everything=4"]
    assert cell.levels == {"noise": "off", "lr": "0.10"}
    assert study.degradation == {"axis": "noise", "stressed": "on", "clean": "off"}


def test_the_later_of_two_settings_wins_where_one_is_a_part_of_the_other(write):
    """The last flag is what `fit` runs with: the rate of the method, of the level, of the trial."""
    lr, other = (
        "model.optimizer.init_args.lr",
        "{class_path: torch.optim.SGD, init_args: {lr: 1e-3}}",
    )
    study = f"""
study: small
seeds: [0]
settings: {{{lr}: 0.1}}
methods: {{A: {{settings: {{model.optimizer: {other}}}}}}}
grid: {{lr: {{large: {{}}, small: {{settings: {{{lr}: 0.01}}}}}}}}
"""
    search = f"study: small.yaml\nspace: {{{lr}: [0.03]}}\ntrials: 1\nseed: 9\n"
    path = write(study)
    (path.parent / "search.yaml").write_text(search)
    (part,) = Search.read(path.parent / "search.yaml").parts
    cells = [cell.args for cell in Study.read(path).cells()]
    for args, rate in zip([*cells, part.args({lr: 0.03})], (0.001, 0.01, 0.03), strict=True):
        model = yaml.safe_load(cli.resolve(["--config=fedavg.yaml", *args]))["model"]["init_args"]
        assert model["optimizer"]["init_args"]["lr"] == rate, args


def test_a_class_that_is_named_again_stays_before_the_settings_that_only_it_has(write):
    study = """
study: small
seeds: [0]
settings: {model.optimizer: torch.optim.Adam, model.optimizer.eps: 1.0e-6}
methods: {A: {settings: {model.optimizer: torch.optim.AdamW}}}
"""
    (cell,) = Study.read(write(study)).cells()
    found = yaml.safe_load(cli.resolve(["--config=fedavg.yaml", *cell.args]))
    assert found["model"]["init_args"]["optimizer"]["class_path"] == "torch.optim.AdamW"
    assert found["model"]["init_args"]["optimizer"]["init_args"]["eps"] == 1e-6


SHARDS = {"class_path": "Shards", "init_args": {"classes_per_client": 3}}
LR = "model.optimizer.lr"
LR_IN_FULL = "model.init_args.optimizer.init_args.lr"


@pytest.mark.parametrize(
    ("method", "level", "expected"),
    [
        (
            {"trainer.callbacks+": "LabelNoise", "trainer.callbacks.round": 3},
            {"trainer.callbacks+": "StragglerDropout", "trainer.callbacks.mode": "before"},
            {
                "trainer.callbacks.0.init_args.round": 3,
                "trainer.callbacks.1.init_args.mode": "before",
            },
        ),
        (
            {"trainer.callbacks+": "LabelNoise"},
            {"trainer.callbacks": []},
            {"trainer.callbacks.0.class_path": None},
        ),
        ({LR_IN_FULL: 0.5}, {LR: 0.001}, {LR_IN_FULL: 0.001}),
        (
            {"model.network.class_path": "ResidualMLP"},
            {"model.network": "mlp"},
            {"model.init_args.network": "mlp"},
        ),
        (
            {"trainer.secure_sum.threshold": 0.6},
            {"trainer.secure_sum": None},
            {"trainer.secure_sum.threshold": None},
        ),
        (
            {"data.partition.classes_per_client": 4},
            {"data.partition": {"class_path": "Shards"}},
            {"data.init_args.partition.init_args.classes_per_client": 4},
        ),
    ],
)
def test_settings_count_as_flags_typed_one_after_another(write, method, level, expected):
    document = {
        "study": "small",
        "seeds": [0],
        "settings": {
            "trainer.callbacks": [],
            "trainer.secure_sum": {"neighbours": "all"},
            "data.partition": SHARDS,
            "model.network": "small_cnn",
            LR: 0.1,
        },
        "methods": {"A": {"settings": method}},
        "grid": {"axis": {"level": {"settings": level}}},
    }
    (cell,) = Study.read(write(json.dumps(document))).cells()
    found = flatten(yaml.safe_load(cli.resolve(["--config=fedavg.yaml", *cell.args])))
    assert {key: found.get(key) for key in expected} == expected


def test_a_study_reads_no_number_to_another_base(write):
    with pytest.raises(InputError, match=r"line 2: 010; YAML 1\.1 reads it to the base 8 or 60"):
        Study.read(write("study: small\nseeds: [010]\nmethods: {A: {}}\n"))


def test_a_method_outside_the_grid_is_run_once_for_each_seed(write):
    study = Study.read(write(SMALL.replace("  A: {}", "  A: {grid: false}")))
    cells = study.cells()
    assert [cell.name for cell in cells if cell.method == "A"] == ["A-seed0", "A-seed4"]
    assert len(cells) == 2 + 2 * 2 * 2
    (outside, *_, inside) = cells[:5]
    assert not any(Path(word).name == "off.yaml" for word in outside.args)
    assert study.compared_at(outside) == study.combinations()
    assert study.compared_at(inside) == [inside.levels]
    assert Study.read(write(study.to_yaml())).methods["A"] == study.methods["A"]


def test_a_grid_that_nobody_could_run_is_refused_at_once(write):
    study = replace(
        Study.read(write(SMALL)),
        grid={f"axis {n}": dict.fromkeys("abcd", Variation()) for n in range(20)},
    )
    with pytest.raises(
        InputError,
        match=r"\d{12,} cells of 2 methods, 2 seeds and a grid of 20 axes; a study has at most 10000;",
    ):
        study.cells()


def test_what_a_merge_brings_may_be_overridden_and_nothing_else_is_given_twice(write):
    """As YAML 1.1 has it; wherever what is merged stands, and whether it merges something
    itself."""
    text = SMALL.replace(
        "  A: {}\n",
        "  A: {settings: &a {model.alpha: 0.3, model.mu: 1}}\n"
        "  C: {settings: &c {<<: *a, model.alpha: 0.4}}\n"
        "  D: {settings: {model.mu: 2, <<: [*c, *a]}}\n"
        "  E: {settings: {<<: *a, model.mu: 3}}\n",
    )
    text += "claimed: {x: &x {k: 1, l: 1}, y: &y {<<: *x, k: 2}, <<: *y, k: 3}\n"
    y = {"k": 2, "l": 1}
    claimed = {"x": {"k": 1, "l": 1}, "y": y, "k": 3, "l": 1}
    assert Study.read(write(text)).claimed == claimed
    settings = {label: one.settings for label, one in Study.read(write(text)).methods.items()}
    assert settings == {
        "A": {"model.alpha": 0.3, "model.mu": 1},
        "C": {"model.alpha": 0.4, "model.mu": 1},
        "D": {"model.alpha": 0.4, "model.mu": 2},
        "E": {"model.alpha": 0.3, "model.mu": 3},
        "B b=1": {"model.alpha": 0.2},
    }
    for own in ("<<: *a, model.mu: 3, model.mu: 3", "model.mu: 3, <<: *a, model.mu: 4"):
        with pytest.raises(InputError, match=r"line 11.*model\.mu is given twice"):
            Study.read(write(text.replace("<<: *a, model.mu: 3", own)))


def test_a_copy_says_the_same_from_anywhere(write, tmp_path):
    study = Study.read(write(SMALL))
    copy = tmp_path / "elsewhere" / "study.yaml"
    copy.parent.mkdir()
    copy.write_text(study.to_yaml())
    again = Study.read(copy)
    assert again.to_yaml() == study.to_yaml()
    assert [cell.args for cell in again.cells()] == [cell.args for cell in study.cells()]
    (tmp_path / "b.yaml").unlink()
    with pytest.raises(InputError, match=r"b\.yaml"):
        Study.read(copy)
    assert Study.read(copy, find_configs=False).name == "small"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seeds: [0, 4]", "seeds: []", "seeds: [].*list of integers"),
        ("seeds: [0, 4]", "seeds: [1, 1]", "each seed is run once"),
        ("seeds: [0, 4]", "seeds: [-1]", "0 or more"),
        ("seeds: [0, 4]", "seed: [0]", "seed; known here.*write seeds"),
        ("seeds: [0, 4]", "name: s", "name; known here.*write study"),
        ("study: small", "study: a/b", "folder's name"),
        ("study: small", "", "no study"),
        ("methods:", "methods: {}\nx:", "x; known here"),
        ("  A: {}", "  A: {}\n  A: {}", "line 9.*given twice"),
        ("  A: {}", "  a/b: {}", "folder's name"),
        ("  A: {}", "  A: {}\n  a: {}", "differ, in more than case"),
        (
            "  A: {}",
            "  A: {setings: {}}",
            "methods.A.setings; known here.*write methods.A.settings",
        ),
        ("  A: {}", "  A: {config: bb.yaml}", "no such file.*write b.yaml"),
        ("  A: {}", "  A: {grid: 3}", "methods.A.grid: 3"),
        ("noise: {on: {}", "noise: {on: {grid: false}", "grid.noise.on.grid; known here"),
        ("trainer.max_rounds: 3", "max_rounds: 3", "settings are dotted"),
        ("trainer.max_rounds: 3", "trainer.experiment: x", "the command sets it"),
        ("trainer.max_rounds: 3", "seed_everything: 3", "the command sets it"),
        ("  noise: {on", "  seed: {on", "every run has a tag of that name"),
        ("  noise: {on", "  rounds: {on", "runs.csv of a report has a column of that name"),
        ("  noise: {on", "  run: {on", "write run_axis"),
        ("{on: {}, off: {config: off.yaml}}", "{}", "at least one entry"),
        ("axis: noise", "axis: nois", "one of noise, lr; write noise"),
        ("clean: off", "clean: of", "one of on, off; write off"),
        ("clean: off", "clean: [off]", "write degradation.clean: off"),
        ("proposed: [B b=1]", "proposed: [B]", "one of A, B b=1"),
        ("proposed: [B b=1]", "proposed: [A, B b=1, A]", "proposed: A, twice; each label"),
        ("proposed: [B b=1]", "controls: [A, A]", "controls: A, twice; each label is given once"),
        (
            "proposed: [B b=1]",
            "criteria: [auc(A) > 1, {criterion: auc(A)  > 1, text: more}]",
            "criteria: auc.A. > 1, twice; each is judged once; leave one out",
        ),
        ("proposed: [B b=1]", "premises: [auc(A) > 1, auc(A) > 1]", "premises: auc.A. > 1, twice"),
        ("proposed: [B b=1]", "target_accuracy: 90", "share in"),
        ("study: small", "study: [small", "not a valid study file"),
        ("study: small", "? [a]\n: b", "a key must be text"),
        ("study: small", "study: &a {b: *a}", "where 'a' contains itself"),
        (
            "study: small",
            "study: small\nclaimed: 2024-02-31",
            "not valid YAML: day is out of range",
        ),
        ("  A: {}", "  ..: {}", "methods: '..'.*no '.' or '-' first.*such as FedMPQ"),
        ("  A: {}", '  "\\ud800": {}', "folder's name"),
        ("  A: {}", f"  {'A' * 250}: {{}}", "250 bytes.*at most 200 bytes.*shorten it"),
        ("  A: {}", f"  {'A' * 190}: {{}}", "cell: AAAA.*at most 200"),
        (
            "trainer.max_rounds: 3",
            "trainer.max_rounds: 2024-01-01",
            "settings.trainer.max_rounds: datetime.*in quotes",
        ),
        (
            "trainer.max_rounds: 3",
            "trainer.tag: {a: [2024-01-01]}",
            "settings.trainer.tag: .*in quotes",
        ),
        ("seeds: [0, 4]", f"seeds: [0, {2**63}]", "below 2^63"),
        ("stressed: on", "stressed: off", "stressed and clean are both off.*write stressed: on"),
        (
            "proposed: [B b=1]",
            "metric: final/acuracy",
            "metric: final/acuracy.*write metric: final/accuracy",
        ),
        ("proposed: [B b=1]", "metric: acc", "no run has such a metric"),
        (
            "proposed: [B b=1]",
            "criteria: ['metric(\"final/acuracy\", A) >= 0.1']",
            "final/acuracy; no run has such a metric; write final/accuracy",
        ),
        ("proposed: [B b=1]", "test: clean", "test: 'clean'.*a list of probes.*write test: [clean"),
        (
            "proposed: [B b=1]",
            "test: []",
            "test.probes: [].*at least one.*write test.probes: [clean",
        ),
        (
            "proposed: [B b=1]",
            "test: [clean, corrupt]",
            "test: corrupt; one of clean.*write corruptions",
        ),
        ("proposed: [B b=1]", "test: {probes: 5}", "test.probes: 5; it is a list of strings"),
        (
            "proposed: [B b=1]",
            "test: {checkpoint: bset}",
            "test.checkpoint: 'bset'; it is last, best or",
        ),
        ("proposed: [B b=1]", "test: {checkpoint: round_000060}", "all tables are of one model"),
        (
            "proposed: [B b=1]",
            "test: {checkpoint: last}\nselection: best_val",
            "write checkpoint: best",
        ),
        (
            "proposed: [B b=1]",
            "test: {checkpoint: best}\nmetric: final/accuracy",
            "selection: best_val",
        ),
        ("proposed: [B b=1]", "selection: best_val\nmetric: final/accuracy", "selection: last"),
        ("proposed: [B b=1]", "selection: best", "one of last5, best_val, last"),
        ("proposed: [B b=1]", "test: {checkpoint: 3}", "test.checkpoint: 3; it is last, best or"),
    ],
)
def test_a_mistake_is_named_with_its_file(write, old, new, said):
    assert old in SMALL
    plain = said.replace("[", r"\[").replace("^", r"\^")
    with pytest.raises(InputError, match=f"(?s)small.yaml.*{plain}") as refused:
        Study.read(write(SMALL.replace(old, new)))
    assert str(refused.value).count(";") >= 2  # given; rule; instead
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("test", "flags"),
    [
        ("true", {}),
        ("[clean, pgd]", {"probes": "clean,pgd"}),
        ("{probes: 'clean, pgd', checkpoint: best}", {"probes": "clean,pgd", "checkpoint": "best"}),
    ],
)
def test_what_a_test_may_be(write, test, flags):
    assert Study.read(write(SMALL + f"test: {test}\nmetric: corrupted/fog\n")).test == flags


@pytest.mark.parametrize("text", ["trainer: &a {b: *a}\n", "trainer: {max_rounds: 2024-02-31}\n"])
def test_a_configuration_in_itself_or_without_a_value_is_refused(tmp_path, text):
    (tmp_path / "base.yaml").write_text(text)
    with pytest.raises(
        InputError, match=r"^--config .*base.yaml(; it is not|, where 'a' contains itself;)[^\n]*$"
    ):
        cli.resolve(["--config", str(tmp_path / "base.yaml")])


def test_what_is_no_study_is_refused(tmp_path):
    (tmp_path / "list.yaml").write_text("- a\n")
    for name, said in (
        ("none.yaml", "No such file"),
        ("list.yaml", "a study file is a mapping"),
        (".", "cannot be read"),
    ):
        with pytest.raises(InputError, match=said):
            Study.read(tmp_path / name)


@given(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.lists(st.integers())
    )
)
def test_a_flag_is_read_as_the_value_it_was_written_from(value):
    found = yaml.safe_load(as_flag(value))
    if isinstance(value, float) and isinstance(found, str):
        found = float(found)  # PyYAML takes 1e-05 for text, the parser does not
    assert found == value
    assert type(found) is type(value) or (isinstance(value, float) and value.is_integer())


SETTINGS = st.dictionaries(
    st.sampled_from(["model.alpha", "trainer.max_rounds", *FREE_KEYS[:9]]),
    st.sampled_from([0, 0.5, "a", None]),
    max_size=4,
)


@given(SETTINGS, SETTINGS)
def test_two_runs_have_one_hash_where_one_may_continue_the_other(before, after):
    assert (settings_hash(before) == settings_hash(after)) == (not changed_settings(before, after))


def test_noise_on_and_off_differ_in_one_number():
    on, off = (
        yaml.safe_load((CONFIGS / "overlays" / f"noise_{name}.yaml").read_text())
        for name in ("on", "off")
    )
    noise = [
        callback
        for callback in on["trainer"]["callbacks"]
        if callback["class_path"] == "callbacks.LabelNoise"
    ]
    assert [callback["init_args"].pop("clients") for callback in noise] == [0.1]
    clean = [
        callback
        for callback in off["trainer"]["callbacks"]
        if callback["class_path"] == "callbacks.LabelNoise"
    ]
    assert [callback["init_args"].pop("clients") for callback in clean] == [0.0]
    assert on == off


LONG = [pytest.mark.slow, pytest.mark.essential]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem == "exp2_embedded" else LONG)
        for path in STUDIES
    ],
)
def test_a_study_of_the_project_can_be_judged_and_its_ends_resolve(path):
    study = Study.read(path)
    assert len(study.parsed_criteria()) == len(study.criteria)
    assert len(study.parsed_premises()) == len(study.premises)
    for cell in (study.cells()[0], study.cells()[-1]):
        resolved = yaml.safe_load(cli.resolve(cell.args))
        assert resolved["seed_everything"] == cell.seed
        for axis in {"noise"} & set(cell.levels):
            noise = [
                c["init_args"]["clients"]
                for c in resolved["trainer"]["callbacks"]
                if "LabelNoise" in c["class_path"]
            ]
            assert noise == [{"on": 0.1, "off": 0.0}[cell.levels[axis]]]


def hashes(study, folder):
    """Of the cells of one seed: the others differ from these in their number alone."""
    cells = StudyCells.plan(replace(study, seeds=study.seeds[:1], until=None), folder, cli.resolve)
    assert len({record.hash for record in cells}) == len(cells.states) > 0
    assert list(folder.iterdir()) == []
    return {record.hash for record in cells}


IN_EVERY_CHECK = {"leaderboard", "exp2_robust"}
"""All methods in all settings, and the most axes; of all others the ends alone are resolved there."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path, id=path.stem, marks=pytest.mark.essential if path.stem in IN_EVERY_CHECK else []
        )
        for path in STUDIES
    ],
)
def test_every_method_and_every_level_of_the_projects_studies_is_another_run(path, tmp_path):
    """All methods at the first levels, and the first method at all levels."""
    study = Study.read(path)
    methods = dict(list(study.methods.items())[:1])
    of_methods = hashes(
        replace(
            study, grid={axis: dict([*levels.items()][:1]) for axis, levels in study.grid.items()}
        ),
        tmp_path,
    )
    of_levels = hashes(replace(study, methods=methods), tmp_path)
    assert len(of_methods & of_levels) == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_cell_of_every_study_of_the_project_resolves_to_another_run(path, tmp_path):
    hashes(Study.read(path), tmp_path)


@pytest.mark.slow
@pytest.mark.essential
def test_a_real_study_runs_on_other_data(tmp_path, monkeypatch):
    """Experiment 1's cell for two rounds, on images of CIFAR's shape."""
    monkeypatch.chdir(tmp_path)
    cell = next(
        cell for cell in Study.read(CONFIGS / "exp1_core.yaml").cells() if cell.method == "FedMPQKD"
    )
    images = [
        "--data.dataset=synthetic",
        "--data.synthetic_examples=120",
        "--data.synthetic_test_examples=20",
    ]
    limits = [
        "--trainer.max_rounds=2",
        "--trainer.logger=false",
        "--data.partition.init_args.min_size=2",
    ]
    assert main(["fit", *cell.args, *images, *limits]) == 0


@pytest.mark.slow
@pytest.mark.essential
def test_the_search_of_the_project_resolves_at_the_ends_of_its_space():
    search = Search.read(CONFIGS / "tune_kd.yaml")
    for corner in (search.corners()[0], search.corners()[-1]):
        resolved = yaml.safe_load(cli.resolve(search.args(corner)))
        assert resolved["model"]["init_args"]["alpha"] == corner["model.alpha"]
    final = yaml.safe_load(cli.resolve(search.args(corner, final=True)))
    assert final["trainer"]["max_rounds"] == 100


def search_of_every_method(name: str) -> Search:
    search = Search.read(CONFIGS / f"tune_{name}.yaml")
    study = Study.read(CONFIGS / f"{name}.yaml", with_record=False)
    assert [part.label for part in search.parts] == list(study.methods)
    return search


@pytest.mark.slow
@pytest.mark.essential
def test_the_search_of_a_study_resolves_for_every_method_at_the_ends_of_its_space():
    for part in search_of_every_method("exp2_embedded").parts:
        corner = part.corners()[-1]
        resolved = yaml.safe_load(cli.resolve(part.args(corner)))
        optimizer = resolved["model"]["init_args"]["optimizer"]
        assert optimizer["init_args"]["lr"] == corner["model.optimizer.init_args.lr"]
        assert resolved["data"]["init_args"]["public_examples"] == 200


@pytest.mark.slow
@pytest.mark.essential
def test_the_search_of_the_study_of_budgets_resolves_at_the_ends_of_its_space():
    search = search_of_every_method("hest_embedded")
    assert search.trials * len(search.parts) <= 48
    for part in search.parts:
        # the others have one setting alone
        assert ("model.price_lr" in part.space) == (part.label == "HEST")
        corner = part.corners()[-1]
        resolved = yaml.safe_load(cli.resolve(part.args(corner)))
        given = resolved["model"]["init_args"]
        assert given["budget"] == 0.4
        network = given["network"]["init_args"]
        assert network["adapter"] == ("lora" if part.label.startswith("LoRA") else "spectral")
        assert given["optimizer"]["init_args"]["lr"] == corner["model.optimizer.init_args.lr"]
    hest = search.parts[0].corners()
    given = yaml.safe_load(cli.resolve(search.parts[0].args(hest[-1])))["model"]["init_args"]
    assert (given["features"], given["price_lr"], given["temperature"]) == (4, 0.03, 1.0)


def test_a_method_of_a_study_may_have_a_space_of_its_own(write, tmp_path):
    (tmp_path / "study.yaml").write_text(
        "study: small\nconfig: base.yaml\nseeds: [0]\nmethods: {A: {}, B: {}}\n"
    )
    text = """
study: study.yaml
space: {model.lr: {low: 0.1, high: 1.0}}
space_of: {B: {model.alpha: [1, 2]}}
trials: 2
seed: 9
"""
    search = Search.read(write(text))
    assert [set(part.space) for part in search.parts] == [{"model.lr"}, {"model.lr", "model.alpha"}]
    assert set(search.space) == {"model.lr"}
    full = "model.init_args.lr"
    for wrong, said in (
        (text.replace("{B:", "{C:"), "space_of.C"),
        (
            text.replace("study.yaml", "alone").replace("trials", "config: base.yaml\ntrials"),
            "space_of",
        ),
        (text.replace("[1, 2]", "[[1]]"), "space_of.B.model.alpha"),
        (text.replace("model.alpha", "model.lr"), "space_of.B.model.lr; it is in space as well"),
        (text.replace("model.alpha", full), f"space_of.B.{full}; it is in space as well"),
        (text.replace("1.0}", f"1.0}}, {full}: [1]"), f"space: {full}; it is model.lr, spelt"),
        (text + f"settings: {{{full}: 1}}", f"settings: {full}; it is in space as well"),
        (
            text.replace("{low: 0.1, high: 1.0}", "[0.1, 1.0]").replace("trials: 2", "trials: 3"),
            "trials: 3; A has 2 combinations of values; every method has as many trials; write trials: 2",
        ),
    ):
        with pytest.raises(InputError, match=said):
            Search.read(write(wrong))


def test_the_primary_metric_may_be_one_that_was_named(write):
    """`data.primary` takes any of torchmetrics, and the plan of a published study names it."""
    for metric in ("final/last5_f1_score", "final/last5_matthews_corr_coef", "final/auc_r2_score"):
        text = f"{SMALL}metric: {metric}\ncriteria: ['metric(\"{metric}\", A) > 0.1']\n"
        assert Study.read(write(text)).metric == metric
    search = "study: small\nconfig: base.yaml\nspace: {model.alpha: [1, 2]}\ntrials: 2\nmetric: "
    for metric in ("final/best_val_f1_score", "final/last5_val_auroc"):
        assert Search.read(write(search + metric)).metric == metric
    for metric in ("final/best_val_test_f1_score", "final/f1_score", "final/best_val_round"):
        with pytest.raises(InputError, match="the test set must not choose"):
            Search.read(write(search + metric))


def test_a_search_file_says_what_may_be_chosen(write):
    text = """
study: small
config: base.yaml
settings: {trainer.max_rounds: 3}
final: {trainer.max_rounds: 9}
space:
  model.alpha: {low: 0, high: 1.5}
  trainer.local_epochs: {low: 1, high: 4}
  model.kl: [forward, reverse]
trials: 5
"""
    search = Search.read(write(text))
    assert search.space == {
        "model.alpha": Range(0, 1.5),
        "trainer.local_epochs": Range(1, 4),
        "model.kl": ["forward", "reverse"],
    }
    assert [r.is_whole for r in search.space.values() if isinstance(r, Range)] == [False, True]
    assert search.args({"model.kl": "reverse"}, final=True)[2:] == [
        "--trainer.max_rounds=9",
        "--model.kl=reverse",
        "--seed_everything=0",
    ]
    tiny = Search.read(write(text.replace("low: 0,", "low: 1e-3,")))  # text to YAML 1.1
    assert tiny.space["model.alpha"] == Range(0.001, 1.5)
    seen = {(key, value) for corner in search.corners() for key, value in corner.items()}
    assert seen == {("model.alpha", 0), ("model.alpha", 1.5), ("trainer.local_epochs", 1), ("trainer.local_epochs", 4),
                    ("model.kl", "forward"), ("model.kl", "reverse")}  # fmt: skip
    for old, new, said in [
        ("trials: 5", "trials: 0", "1 or more"),
        ("trials: 5", "trials: 5\nmetric: final/accuracy", "the test set must not choose"),
        ("trials: 5", "trials: 5\nmetric: test/loss", "the test set must not choose"),
        ("trials: 5", "trials: 5\nmetric: bits/at/2/accuracy", "the test set must not choose"),
        (
            "trials: 5",
            "trials: 5\nmetric: final/last5_val_acuracy",
            "write metric: final/last5_val_accuracy,",
        ),
        ("trials: 5", "trials: 5\ndirection: up", "one of maximize, minimize"),
        ("low: 0, high: 1.5", "low: 2, high: 1.5", "low is less than high"),
        ("low: 0, high: 1.5", "low: 0, high: 1.5, log: true", "logarithmic range is above 0"),
        ("low: 0, high: 1.5", "low: a, high: 1.5", "space.model.alpha.low: 'a'; it is a number"),
        ("low: 0, high: 1.5", "low: 0", "must be given"),
        ("low: 0, high: 1.5", "low: 0, high: .inf", "the ends are finite"),
        ("[forward, reverse]", "[]", "choices are"),
        ("model.kl:", "kl:", "settings are dotted"),
    ]:
        with pytest.raises(InputError, match=said):
            Search.read(write(text.replace(old, new)))
