"""Settings of every method of a study, chosen with one budget, recorded, and used by the study."""

from __future__ import annotations

import json
import random
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from optuna import Study as Study_
from optuna import load_study
from places import CONFIGS
from synthetic_runs import make_run
from test_tune import Process, new_run, resolve

from fl_lightning.__main__ import main
from fl_lightning.errors import InputError
from fl_lightning.study.execute.jobs import RunningJob
from fl_lightning.study.execute.tune_study import StudySearchSession, check_record
from fl_lightning.study.execute.until import with_flags
from fl_lightning.study.plan.search import Search
from fl_lightning.study.plan.spec_file import SpecFile
from fl_lightning.study.plan.study import Study
from fl_lightning.study.plan.tuned import TunedRecord, file_hash
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.markdown import _how_tuned
from fl_lightning.study.report.tables import tuned as chosen_table

STUDY = """
study: small
config: {configs}/fedavg.yaml
seeds: [0, 1]
settings: {{trainer.local_epochs: 2}}
methods:
  Low: {{settings: {{model.optimizer.init_args.lr: 0.5}}}}
  High: {{}}
grid: {{clients: {{few: {{}}, many: {{settings: {{data.num_clients: 9}}}}}}}}
tuned: tuned/small.yaml
"""
SEARCH = """
study: study.yaml
settings: {trainer.max_rounds: 5, data.num_clients: 4}
space: {model.optimizer.init_args.lr: {low: 1.0e-3, high: 1.0e-1, log: true}}
trials: 6
seed: 7
"""
LR = "model.optimizer.init_args.lr"
BEST = {"Low": 0.004, "High": 0.05}


class Trials:
    """Stands in for the pool: trials end in any order, their validation accuracy is a function of
    method, seed and learning rate, and the search can be killed before any of them ends."""

    def __init__(self, folder: Path, slots: int, lives: int, seed: int, failing: str = "") -> None:
        self.slots, self.folder, self.lives, self.failing = [{}] * slots, folder, lives, failing
        self.choose = random.Random(seed)

    def run(self, jobs, ended, look):
        running, following, others = [], deque(), iter(jobs)
        while True:
            while len(running) < len(self.slots):
                job = following.popleft() if following else next(others, None)
                if job is None:
                    break
                running.append(RunningJob(job, Process(), 0))
            if not running:
                return
            look(running)
            if self.lives == 0:
                raise SystemExit(143)
            self.lives -= 1
            one = running.pop(self.choose.randrange(len(running)))
            flags = dict(
                word.removeprefix("--").split("=", 1) for word in one.job.args if "=" in word
            )
            assert flags["trainer.local_epochs"] == "2"
            later = int(flags["seed_everything"]) - 7  # 0 is the first seed of all searches
            assert later == 0 or one.job.name.endswith(f"-seed{7 + later}")
            label = json.loads(flags["trainer.tags"])["label"]
            run = new_run(self.folder, one.job.name)
            own = (word for word in one.job.args[1:] if not word.startswith("--trainer.tags"))
            (run / "config.yaml").write_text(resolve(list(own)))
            (run / "metrics.csv").write_text("round,val/accuracy\n1,0.5\n")
            value = 1 - abs(float(flags[LR]) - BEST[label]) - 5 * later * float(flags[LR])
            (run / "metadata.json").write_text(json.dumps({"final/best_val_accuracy": value}))
            if job := ended(one, int(label == self.failing)):
                following.append(job)


def write(folder: Path, study: str = STUDY, search: str = SEARCH) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "study.yaml").write_text(study.format(configs=CONFIGS))
    (folder / "search.yaml").write_text(search)


def tune(folder: Path, slots: int = 1, lives: int = 1000, seed: int = 0, failing: str = "") -> str:
    """One session; the record, without its day, or nothing."""
    search = Search.read(folder / "search.yaml")
    check_record(search)
    trials = folder / search.name
    trials.mkdir(exist_ok=True)
    pool = Trials(trials, slots, lives, seed, failing)
    with suppress(SystemExit):  # killed, or a method has no finished trial
        StudySearchSession(search, trials, pool, False, {}, resolve).run()
    record = folder / "tuned" / "small.yaml"
    return record.read_text() if record.exists() else ""


def test_every_method_has_its_own_best_of_the_same_number_of_trials(tmp_path):
    write(tmp_path)
    tune(tmp_path)
    record = TunedRecord.read(tmp_path / "tuned" / "small.yaml")
    assert (record.study, record.trials, record.seed, record.search) == (
        "small",
        6,
        7,
        "../search.yaml",
    )
    assert record.settings["data.num_clients"] == 4
    chosen = {label: method.settings[LR] for label, method in record.chosen.items()}
    assert 0.001 <= chosen["Low"] < 0.02 < chosen["High"] <= 0.1
    for label, method in record.chosen.items():
        assert (method.finished, method.pruned, method.failed) == (6, 0, 0)
        assert method.value == pytest.approx(1 - abs(chosen[label] - BEST[label]))
        values = [
            json.loads(path.read_text())["final/best_val_accuracy"]
            for path in (tmp_path / "small-tune").glob(f"{label}-trial-*/metadata.json")
        ]
        assert (len(values), max(values)) == (6, method.value)


def test_methods_are_tried_at_the_same_points(tmp_path):
    """Ten trials are drawn before Optuna goes by what it found, the space of all methods before a
    method's own."""
    own = "space_of: {High: {model.max_share: {low: 0.5, high: 1.0}}}\n"
    write(tmp_path, search=SEARCH.replace("trials: 6", "trials: 12") + own)
    assert tune(tmp_path, slots=2)
    storage = f"sqlite:///{tmp_path / 'small-tune' / 'optuna.db'}"
    low, high = (
        [
            trial.params[LR]
            for trial in load_study(study_name=f"small-tune: {label}", storage=storage).trials
        ]
        for label in BEST
    )
    assert low[:10] == high[:10]
    assert low[10:] != high[10:]
    record = TunedRecord.read(tmp_path / "tuned" / "small.yaml")
    assert "the same values and, beside them, High `model.max_share` at seed 7" in _how_tuned(
        record
    )


def test_a_report_counts_the_trials_that_were_made(tmp_path):
    """Three rates are no more than three trials, however many the file asks for."""
    space = "{low: 1.0e-3, high: 1.0e-1, log: true}"
    write(tmp_path, search=SEARCH.replace(space, "[0.004, 0.02, 0.05]"))
    tune(tmp_path)
    record = TunedRecord.read(tmp_path / "tuned" / "small.yaml")
    assert record.trials == 6
    assert "of 3 trials over" in _how_tuned(record)


def test_settings_that_end_alike_are_named_in_full(tmp_path):
    write(tmp_path)
    tune(tmp_path)
    record = TunedRecord.read(tmp_path / "tuned" / "small.yaml")
    assert chosen_table(record).rows[0][1].startswith("lr ")
    chosen = replace(record.chosen["Low"], settings={LR: 0.1, "model.server_optimizer.lr": 1})
    table = chosen_table(replace(record, chosen={"Low": chosen, "High": record.chosen["High"]}))
    assert table.rows[0][1] == f"{LR} 0.1, model.server_optimizer.lr 1"
    assert table.rows[1][1].startswith(f"{LR} ")


def test_of_several_seeds_the_mean_chooses_and_a_killed_search_is_the_same(tmp_path, monkeypatch):
    """At the first seed alone another rate is the best."""
    write(tmp_path / "one")
    alone = yaml.safe_load(tune(tmp_path / "one"))["chosen"]["High"]
    assert {"values"}.isdisjoint(alone)
    several = SEARCH.replace("seed: 7", "seed: [7, 8]")
    write(tmp_path / "whole", search=several)
    whole = tune(tmp_path / "whole")
    record = TunedRecord.read(tmp_path / "whole" / "tuned" / "small.yaml")
    assert (record.seed, record.seeds, record.trials) == (7, [7, 8], 6)
    assert "with the mean of seeds 7, 8, on" in _how_tuned(record)
    high = record.chosen["High"]
    rate = high.settings[LR]
    assert rate < 0.02 < alone["settings"][LR]
    first = 1 - abs(rate - BEST["High"])
    assert high.values == pytest.approx([first, first - 5 * rate])
    assert high.value == pytest.approx(first - 5 * rate / 2)
    runs = {path.parent.name for path in (tmp_path / "whole").rglob("High-trial-*/metadata.json")}
    assert len(runs) == 12
    assert {"High-trial-0005", "High-trial-0005-seed8"} <= runs

    write(tmp_path / "killed", search=several)
    tell = Study_.tell

    def killed(self, trial, values=None, **kwargs):
        if values is not None:  # the mean is known, and not yet told
            raise SystemExit(143)
        return tell(self, trial, values, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Study_, "tell", killed)
        assert not tune(tmp_path / "killed")
    for lives in (1, 4, 0, 7, 1000):
        again = tune(tmp_path / "killed", slots=2, lives=lives, seed=lives)
    assert again == whole

    write(tmp_path / "killed", search=SEARCH)
    (tmp_path / "killed" / "tuned" / "small.yaml").unlink()
    with pytest.raises(InputError, match=r"of Low: seeds: \[7, 8\] -> \[7\]"):
        tune(tmp_path / "killed")
    study = (tmp_path / "whole" / "study.yaml").read_text().replace("[0, 1]", "[0, 8]")
    (tmp_path / "whole" / "study.yaml").write_text(study)
    with pytest.raises(InputError, match="whose trials have seed 8 of the study"):
        Study.read(tmp_path / "whole" / "study.yaml")


@pytest.mark.slow
@pytest.mark.essential
def test_the_record_does_not_depend_on_jobs_order_or_kills(tmp_path):
    write(tmp_path / "whole")
    whole = tune(tmp_path / "whole")
    assert whole
    write(tmp_path / "killed")
    for lives in (1, 3, 0, 2, 1000):
        record = tune(tmp_path / "killed", slots=2, lives=lives, seed=lives)
    assert record == whole
    assert tune(tmp_path / "killed", slots=2) == whole  # nothing is left to do


def test_a_study_runs_with_what_was_chosen_for_each_method(tmp_path):
    """The chosen value takes the place of the method's own, and a level of the grid that of the
    chosen."""
    write(tmp_path)
    tune(tmp_path)
    chosen = {
        label: one.settings[LR]
        for label, one in TunedRecord.read(tmp_path / "tuned/small.yaml").chosen.items()
    }
    study = Study.read(tmp_path / "study.yaml")
    for cell in study.cells():
        assert [word for word in cell.args if LR in word] == [f"--{LR}={chosen[cell.method]}"]
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "copy.yaml"
    copy.write_text(study.to_yaml())  # what a sweep leaves beside the runs needs no other file
    assert [cell.args[-3:] for cell in Study.read(copy).cells()] == [
        cell.args[-3:] for cell in study.cells()
    ]
    assert Study.read(copy, find_configs=False).tuned == study.tuned
    with_runs = tmp_path / "small"
    for seed in (0, 1):
        for label in chosen:
            for level in ("few", "many"):
                make_run(with_runs, label, seed, 0.5 + 0.1 * seed, levels={"clients": level})
    (with_runs / "study.yaml").write_text(study.to_yaml())
    compare("small", tmp_path / "report", tmp_path)
    text = (tmp_path / "report" / "report.md").read_text()
    assert "## Settings that tune chose" in text
    assert f"| High | lr {chosen['High']:.4g} |" in text
    levels = STUDY.replace("data.num_clients: 9", f"{LR}: 0.7")
    write(tmp_path, study=levels)
    cells = {cell.name: cell.args for cell in Study.read(tmp_path / "study.yaml").cells()}
    assert cells["Low-clients=many-seed0"][-2] == f"--{LR}=0.7"
    said = f"Where a level of the grid sets `{LR}`, its value counts"
    assert said not in text
    for key in (LR, "model.optimizer", f"{LR}.more", LR.replace(".init_args", "")):
        write(tmp_path, study=STUDY.replace("data.num_clients: 9", f"{key}: 0.7"))
        assert Study.read(tmp_path / "study.yaml").set_by_levels([LR, "other"]) == LR
    write(tmp_path, study=levels)
    (with_runs / "study.yaml").write_text(Study.read(tmp_path / "study.yaml").to_yaml())
    compare("small", tmp_path / "report", tmp_path, overwrite=True)
    assert said in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.essential
def test_a_level_has_a_record_of_its_own(tmp_path):
    """Each is of a search at that level, with a folder of trials of its own; a missing one is
    refused."""
    by_level = "tuned: {clients: {few: tuned/few.yaml, many: tuned/many.yaml}}"
    study = STUDY.replace("tuned: tuned/small.yaml", by_level.replace("{", "{{").replace("}", "}}"))
    for level, trials in (("few", 3), ("many", 4)):
        search = SEARCH.replace("trials: 6", f"trials: {trials}") + f"record: tuned/{level}.yaml\n"
        if level == "many":
            search = search.replace("num_clients: 4", "num_clients: 9")
        write(tmp_path, study, search)
        (tmp_path / f"{level}.yaml").write_text(search)
        tune(tmp_path)
        assert (tmp_path / f"{level}-tune").is_dir()
        written = (tmp_path / "tuned" / f"{level}.yaml").read_text()
        written = written.replace("../search.yaml", f"../{level}.yaml")
        # values that no other record has
        document = yaml.safe_load(written.replace(f"{LR}: 0.", f"{LR}: {trials}."))
        del document["sha256"]
        (tmp_path / "tuned" / f"{level}.yaml").write_text(yaml.safe_dump(document))
    found = Study.read(tmp_path / "study.yaml")
    records = {
        level: TunedRecord.read(tmp_path / f"tuned/{level}.yaml") for level in ("few", "many")
    }
    assert found.tuned.records == records
    for cell in found.cells():
        chosen = records[cell.levels["clients"]].chosen[cell.method].settings[LR]
        assert [word for word in cell.args if LR in word] == [f"--{LR}={chosen}"]
    (tmp_path / "small").mkdir()
    copy = tmp_path / "small" / "study.yaml"
    copy.write_text(found.to_yaml())
    assert Study.read(copy, find_configs=False).tuned == found.tuned
    for label in BEST:
        for level in ("few", "many"):
            make_run(tmp_path / "small", label, 0, 0.5, levels={"clients": level})
    compare("small", tmp_path / "report", tmp_path)
    text = (tmp_path / "report" / "report.md").read_text()
    assert (
        text.index("### At clients=few")
        < text.index("of 3 trials")
        < text.index("### At clients=many")
    )
    for old, new, said in (
        ("few: tuned/few.yaml, ", "", "tuned.clients: few; each level of clients has a record"),
        ("tuned: {{clients", "tuned: {{skew", "tuned: skew"),
        ("High: {{}}", "High: {{grid: false}}", "methods.High: grid: false"),
        (
            "many: tuned/many",
            "many: tuned/few",
            "many: its trials have data.num_clients of another",
        ),
    ):
        write(tmp_path, study.replace(old, new))
        with pytest.raises(InputError, match=f"(?s){said}"):
            Study.read(tmp_path / "study.yaml")


def test_numbers_of_unknown_origin_are_refused(tmp_path):
    def refused(said: str, study: str = STUDY, search: str = SEARCH) -> None:
        write(tmp_path, study, search)
        with pytest.raises(InputError, match=f"(?s){said}"):
            Study.read(tmp_path / "study.yaml")

    refused(r"tuned: tuned/small.yaml; there is no such record.*run python -m fl_lightning tune")
    tune(tmp_path)
    write(tmp_path)
    Study.read(tmp_path / "study.yaml")
    refused(
        "Third; the record has no such method; run tune again",
        STUDY.replace("High: {{}}", "High: {{}}\n  Third: {{}}"),
    )
    refused(
        "whose trials have seed 7 of the study; its settings would be chosen on what",
        STUDY.replace("seeds: [0, 1]", "seeds: [7]"),
    )
    refused(
        "Low; the method was changed in the study after it was tuned",
        STUDY.replace("lr: 0.5", "lr: 0.6"),
    )
    criteria = 'criteria: ["gap(Low, High) > 0"]\n'
    refused(
        "whose trials have seed 7 of the study; its settings would be chosen on what",
        STUDY + criteria + "until: {{max_seeds: 9}}\n",
    )
    write(tmp_path, STUDY + criteria)
    with pytest.raises(InputError, match="whose trials have seed 7 of the study"):
        with_flags(Study.read(tmp_path / "study.yaml"), "decided", 9, None)
    refused(
        r"search.yaml; the search, or a configuration that it layers, was changed since",
        search=SEARCH.replace("trials: 6", "trials: 60"),
    )
    write(tmp_path, search=SEARCH + "# a comment\n")
    Study.read(tmp_path / "study.yaml")
    changed = "Low, High; the study's settings or a configuration file were changed after it was"
    refused(changed, STUDY.replace("local_epochs: 2", "local_epochs: 3"))
    record = tmp_path / "tuned" / "small.yaml"
    document = yaml.safe_load(record.read_text())
    document["chosen"]["Low"]["settings"][LR] = 0.9
    record.write_text(yaml.safe_dump(document))
    refused("it was changed after tune had written it, and nobody knows where its values come from")
    record.write_text("study: small\nchosen: {}\n")
    refused("it is no record of tune")


def refused_once_changed(file: Path, value: str, other: str, said: str) -> None:
    """The study beside a file is read where that has a comment more, and refused where a value is
    another."""
    text = file.read_text()
    file.write_text(text + "# as it was\n")
    Study.read(file.parent / "study.yaml")
    file.write_text(text.replace(value, other))
    with pytest.raises(InputError, match=said):
        Study.read(file.parent / "study.yaml")


def test_a_change_in_a_file_of_the_search_is_seen(tmp_path):
    """A record of before had the hash of the search file alone."""
    write(tmp_path, search=SEARCH + "config: over.yaml\n")
    over, said = tmp_path / "over.yaml", "the search, or a configuration that it layers, was"
    over.write_text("trainer: {participation: 0.5}\n")
    tune(tmp_path)
    refused_once_changed(over, "0.5", "1.0", said)
    over.unlink()
    with pytest.raises(InputError, match=said):
        Study.read(tmp_path / "study.yaml")
    Study.read(tmp_path / "study.yaml", find_configs=False)  # as compare does, elsewhere
    record = tmp_path / "tuned" / "small.yaml"
    of_before = yaml.safe_load(record.read_text())
    del of_before["sha256"]
    of_before["search_sha256"] = file_hash(SpecFile(tmp_path / "search.yaml"))
    record.write_text(yaml.safe_dump(of_before))
    Study.read(tmp_path / "study.yaml")


def test_a_change_in_a_file_of_a_method_is_seen(tmp_path):
    """Also where it is the base of the method's; a comment is none."""
    study = STUDY.replace("High: {{}}", "High: {{config: own.yaml}}")
    base, own = tmp_path / "below.yaml", tmp_path / "own.yaml"
    base.write_text("data: {batch_size: 8}\n")
    own.write_text("base: below.yaml\ntrainer: {local_epochs: 2}\n")
    write(tmp_path, study)
    tune(tmp_path)
    refused_once_changed(base, "8", "9", "; High; the study's settings or a configuration file")
    record = tmp_path / "tuned" / "small.yaml"
    of_before = yaml.safe_load(record.read_text())
    del of_before["sha256"]
    for method in of_before["chosen"].values():
        del method["runs_sha256"]
    record.write_text(yaml.safe_dump(of_before))
    assert Study.read(tmp_path / "study.yaml").tuned.document() == of_before


def test_a_search_that_could_mislead_is_refused(tmp_path):
    for old, new, said in [
        ("seed: 7", "seed: 1", r"seed: 1; the study small runs this seed.*write seed: 1001"),
        ("seed: 7", "seed: [7, 1]", r"seed: 1; the study small runs this seed"),
        ("seed: 7", "seed: [7, 7]", r"seed: \[7, 7\]; a trial runs once with each of its seeds"),
        ("seed: 7", "seed: []", r"seed: \[\]; a trial runs once with each of its seeds"),
        ("seed: 7", "final: {trainer.max_rounds: 9}", r"final; what is chosen goes to the record"),
        ("study: study.yaml", "study: nothing.yaml", r"study: nothing.yaml; there is no such file"),
        (
            "study: study.yaml",
            "study: small\nrecord: x.yaml",
            r"record: x.yaml; one configuration is tuned",
        ),
    ]:
        write(tmp_path, search=SEARCH.replace(old, new))
        with pytest.raises(InputError, match=f"(?s){said}"):
            Search.read(tmp_path / "search.yaml")
    write(tmp_path)
    tune(tmp_path)
    write(tmp_path, search=SEARCH.replace("trials: 6", "trials: 7"))
    with pytest.raises(
        InputError, match=r"another search, or an earlier form.*move it away, or name another"
    ):
        check_record(Search.read(tmp_path / "search.yaml"))
    write(tmp_path, search=SEARCH + "record: study.yaml/record.yaml\n")
    with pytest.raises(InputError, match="the record cannot be written there"):
        check_record(Search.read(tmp_path / "search.yaml"))


def test_a_method_without_a_finished_trial_leaves_no_record_and_is_tried_again(tmp_path):
    write(tmp_path / "whole")
    write(tmp_path / "mended")
    assert tune(tmp_path / "mended", failing="Low") == ""
    assert tune(tmp_path / "mended") == tune(tmp_path / "whole")


@pytest.mark.slow
def test_from_the_command_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tiny = "settings: {trainer.max_rounds: 1, trainer.local_epochs: 1, data.num_clients: 4}"
    search = SEARCH.replace("trials: 6", "trials: 1").replace(
        "trainer.max_rounds: 5, data.num_clients: 4", ""
    )
    write(
        tmp_path,
        STUDY.replace(
            "settings: {{trainer.local_epochs: 2}}", tiny.replace("{", "{{").replace("}", "}}")
        ),
        search,
    )
    assert main(["sweep", "--config", "study.yaml"]) == 2
    assert "there is no such record" in capfd.readouterr().err
    assert main(["tune", "--config", "search.yaml", "--jobs", "2", "--logger", "false"]) == 0
    assert "the study reads it by 'tuned: tuned/small.yaml'" in capfd.readouterr().err
    assert main(["sweep", "--config", "study.yaml", "--dry_run", "true"]) == 0
    record = yaml.safe_load(Path("tuned/small.yaml").read_text())
    assert {one["finished"] for one in record["chosen"].values()} == {1}
