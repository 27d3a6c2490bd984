"""A search for settings: by validation, resumable, and one run at the end."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
import yaml
from optuna.trial import TrialState
from places import CONFIGS

from fl_lightning.__main__ import main
from fl_lightning.errors import InputError
from fl_lightning.run.metadata import task_of
from fl_lightning.study.execute import jobs, tune
from fl_lightning.study.execute import trials as module
from fl_lightning.study.execute.jobs import Job, RunningJob
from fl_lightning.study.execute.trials import SearchSession, open_search
from fl_lightning.study.plan.search import Search
from fl_lightning.tasks import LanguageModelling, Regression, Task

pytestmark = [pytest.mark.slow, pytest.mark.essential]

SEARCH = """
study: small
config: {configs}/fedavg.yaml
settings: {{trainer.max_rounds: 5}}
final: {{trainer.max_rounds: 7}}
space:
  model.optimizer.init_args.lr: {{low: 1.0e-3, high: 1.0e-1, log: true}}
  trainer.local_epochs: {{low: 1, high: 4}}
  model.average: [WeightedMean, CoordinateMedian]
trials: 8
"""


class Runs:
    """Stands in for the pool: a run's validation accuracy is a function of its settings, and a
    session can be killed at any job."""

    def __init__(self, folder: Path, lives: int = 1000, task: Task | None = None) -> None:
        self.slots, self.running, self.folder, self.lives, self.task = [{}], [], folder, lives, task
        self.jobs: list[Job] = []
        self.made: list[dict] = [{}]
        """What ``metadata.json`` says of data and files, of one run after the other; the last says
        it of all others."""

    def run(self, jobs, ended, look=lambda running: None):
        waiting = list(jobs)
        while waiting:
            job = waiting.pop(0)
            if self.lives == 0:
                raise SystemExit(143)
            self.lives -= 1
            self.jobs.append(job)
            flags = dict(word.removeprefix("--").split("=", 1) for word in job.args if "=" in word)
            run = new_run(self.folder.parent / flags["trainer.experiment"], job.name)
            (run / "config.yaml").write_text(resolve(job.args[1:]))
            good = (
                1
                - abs(float(flags["model.optimizer.init_args.lr"]) - 0.03)
                - 0.01 * int(flags["trainer.local_epochs"])
            )
            good -= 0.1 * (flags["model.average"] == "CoordinateMedian")
            lines = [f"{round},{good * round / 5}\n" for round in range(1, 6)]
            metadata, name = {"final/best_val_accuracy": good}, "accuracy"
            if self.task is not None:
                name, good = self.task.primary, 5 - good
                lines = [f"{round},{good + 5 - round}\n" for round in range(1, 6)]
                metadata = {f"final/best_val_{name}": good, "task": task_of(self.task)}
            (run / "metrics.csv").write_text(f"round,val/{name}\n" + "".join(lines))
            made = self.made.pop(0) if len(self.made) > 1 else self.made[0]
            (run / "metadata.json").write_text(json.dumps(metadata | made))
            process = Process()
            look([RunningJob(job, process, 0)])
            following = ended(RunningJob(job, process, 0), 143 if process.stopped else 0)
            waiting += [following] if following else []


def resolve(args: list[str]) -> str:
    """Stands in for the parser: the file and the flags as they are."""
    flags = dict(word.removeprefix("--").split("=", 1) for word in args if "=" in word)
    return yaml.safe_dump({"file": Path(args[args.index("--config") + 1]).read_text(), **flags})


def new_run(folder: Path, name: str) -> Path:
    """As ``fit`` makes it: beside one that has the name."""
    run = next(
        run
        for n in range(1, 9)
        if not (run := folder / (name if n == 1 else f"{name}-{n}")).exists()
    )
    run.mkdir(parents=True)
    return run


class Process:
    stopped = False

    def terminate(self):
        self.stopped = True


def search_in(folder: Path, text: str = SEARCH) -> Search:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "search.yaml").write_text(text.format(configs=CONFIGS))
    return Search.read(folder / "search.yaml")


def session(
    folder: Path, lives: int = 1000, text: str = SEARCH, task: Task | None = None
) -> tuple[SearchSession, Runs]:
    search = search_in(folder, text)
    trials = folder / search.name
    trials.mkdir(exist_ok=True)
    runs = Runs(trials, lives, task)
    return SearchSession(search, trials, runs, False, {}, resolve), runs  # type: ignore[arg-type]


def tried(folder: Path) -> list[tuple]:
    study = optuna.load_study(
        study_name="small-tune", storage=f"sqlite:///{folder / 'small-tune' / 'optuna.db'}"
    )
    return [(trial.number, trial.params, trial.value, trial.state.name) for trial in study.trials]


def test_a_search_that_was_killed_is_the_one_that_was_not(tmp_path):
    """Killed three times, each time with a trial at work, which is run again with the settings that
    it had."""
    whole, runs = session(tmp_path / "whole")
    whole.run()
    names = [job.name for job in runs.jobs]
    assert names == [*(f"trial-{n:04d}" for n in range(8)), "tuned-seed0"]
    for lives in (2, 0, 3):
        with pytest.raises(SystemExit):
            session(tmp_path / "killed", lives)[0].run()
    last, runs = session(tmp_path / "killed")
    last.run()
    assert [job.name for job in runs.jobs] == names[5:]
    assert tried(tmp_path / "killed") == tried(tmp_path / "whole")
    again, runs = session(tmp_path / "killed")
    (tmp_path / "killed" / "small" / "tuned-seed0" / "metrics.csv").unlink()
    for file in ("metadata.json", "config.yaml", ""):
        path = tmp_path / "killed" / "small" / "tuned-seed0" / file
        path.unlink() if file else path.rmdir()
    again.run()
    assert [job.name for job in runs.jobs] == ["tuned-seed0"]  # no trial is repeated


def test_the_best_trial_becomes_one_run_of_the_study_with_settings_of_its_own(tmp_path):
    tune, runs = session(tmp_path)
    tune.run()
    best = max(tried(tmp_path), key=lambda trial: trial[2])
    final = runs.jobs[-1].args
    assert {f"--{key}={value}" for key, value in best[1].items()} <= set(final)
    assert {
        "--trainer.experiment=small",
        "--trainer.run_name=tuned-seed0",
        "--trainer.max_rounds=7",
    } <= set(final)
    assert {"--trainer.experiment=small-tune", "--trainer.max_rounds=5"} <= set(runs.jobs[0].args)
    tags = json.loads(
        next(word for word in final if word.startswith("--trainer.tags=")).split("=", 1)[1]
    )
    assert tags == {
        "study": "small",
        "label": "tuned",
        "tuned_by": "small-tune",
        "trial": str(best[0]),
    }
    assert (
        yaml.safe_load((tmp_path / "small-tune" / "best.yaml").read_text())["settings"] == best[1]
    )
    trial = json.loads(
        next(word for word in runs.jobs[3].args if word.startswith("--trainer.tags=")).split(
            "=", 1
        )[1]
    )
    assert trial == {"study": "small-tune", "label": "trial", "trial": "3"}
    assert all(
        0.001 <= params["model.optimizer.init_args.lr"] <= 0.1
        for _, params, _, _ in tried(tmp_path)
    )
    assert {params["trainer.local_epochs"] for _, params, _, _ in tried(tmp_path)} <= {1, 2, 3, 4}


def test_a_trial_below_the_median_is_ended_and_a_failed_one_does_not_stop_the_search(
    tmp_path, monkeypatch
):
    tune, runs = session(tmp_path, text=SEARCH + "prune: true\n")
    fail = module.metric_of
    monkeypatch.setattr(
        module,
        "metric_of",
        lambda run, metric: None if run.name == "trial-0002" else fail(run, metric),
    )
    tune.run()
    states = [state for *_, state in tried(tmp_path)]
    assert len(states) == 8
    assert states[2] == "FAIL"
    assert "PRUNED" in states[5:]  # not before there is a median to be below
    assert runs.jobs[-1].name == "tuned-seed0"


@pytest.mark.parametrize("at", ["terminate", "look", "never looked"])
def test_a_search_that_was_killed_around_a_pruning_is_the_one_that_was_not(tmp_path, at):
    """As it ends a trial; before its verdict is noted; and where nobody looks at a trial that is
    quick."""
    text = SEARCH + "prune: true\n"
    session(tmp_path / "whole", text=text)[0].run()
    whole = tried(tmp_path / "whole")
    (first, *_) = [number for number, *_, state in whole if state == "PRUNED"]
    tune, _ = session(tmp_path / "killed", text=text)
    prune, ended = tune.prune, tune.ended

    def killed(running):
        if at == "never looked":
            return
        (one,) = running
        if at == "look" and one.job.name.endswith(f"{first:04d}"):
            tune.should_prune = lambda trial, run: raises()
        prune(running)

    def raises():
        raise SystemExit(143)

    def lost(running, code):
        if at == "terminate" and code:
            raises()
        return ended(running, code)

    tune.prune, tune.ended = killed, lost
    with suppress(SystemExit):
        tune.run()
    if at != "never looked":
        assert tried(tmp_path / "killed")[-1][-1] == "RUNNING"
        session(tmp_path / "killed", text=text)[0].run()
    assert tried(tmp_path / "killed") == whole


def test_a_round_is_judged_once_however_often_one_looks(tmp_path):
    """Trials that end later do not prune one that has passed its last round."""
    tune, _ = session(tmp_path, text=SEARCH + "prune: true\n")
    tune.open()
    tune.display = SimpleNamespace(line=lambda text: None)

    def trial(value: float, *, ends: bool):
        drawn = tune.study.ask(tune.search.distributions())
        run = new_run(tune.folder, f"own-{drawn.number}")
        (run / "metrics.csv").write_text(f"round,val/accuracy\n1,{value}\n")
        pruned = tune.should_prune(tune.study.get_trials()[drawn.number], run)
        if ends:
            tune.study.tell(drawn.number, value)
        return pruned, drawn.number, run

    for _ in range(4):
        trial(0.1, ends=True)
    pruned, number, run = trial(0.5, ends=False)
    assert not pruned
    for _ in range(6):
        trial(0.9, ends=True)
    assert not tune.is_pruned(number, run)
    assert trial(0.5, ends=False)[0]


def test_no_combination_is_tried_twice_and_no_more_than_there_are(tmp_path):
    text = SEARCH.replace("{{low: 1.0e-3, high: 1.0e-1, log: true}}", "[0.01, 0.03]")
    text = text.replace("{{low: 1, high: 4}}", "{{low: 2, high: 3}}").replace(
        "trials: 8", "trials: 9"
    )
    one, runs = session(tmp_path / "whole", text=text)
    one.run()
    assert one.summary().startswith("small-tune: 8 of 8 trials")
    found = {str(sorted(params.items())) for _, params, *_ in tried(tmp_path / "whole")}
    assert len(found) == len(runs.jobs) - 1 == 8  # and the final run
    killed, _ = session(tmp_path / "killed", lives=5, text=text)
    with pytest.raises(SystemExit):
        killed.run()
    session(tmp_path / "killed", text=text)[0].run()
    assert tried(tmp_path / "killed") == tried(tmp_path / "whole")


@pytest.mark.parametrize("step", ["untried", "enqueue_trial", "tell", "told"])
def test_a_search_that_was_killed_while_a_trial_is_replaced_is_the_one_that_was_not(
    tmp_path, monkeypatch, step
):
    text = SEARCH.replace("{{low: 1.0e-3, high: 1.0e-1, log: true}}", "[0.01, 0.03]")
    text = text.replace("{{low: 1, high: 4}}", "[1, 2]")
    session(tmp_path / "whole", text=text)[0].run()
    assert len(tried(tmp_path / "whole")) > 8  # some were drawn twice
    owner = Search if step == "untried" else optuna.Study
    called, calls = getattr(owner, step.replace("told", "tell")), []

    def killed(*args, **more):
        is_replaced = step in ("untried", "enqueue_trial") or more.get("state") is TrialState.FAIL
        if not is_replaced or calls:
            return called(*args, **more)
        calls.append(step)
        if step == "told":
            called(*args, **more)
        raise SystemExit(143)

    monkeypatch.setattr(owner, step.replace("told", "tell"), killed)
    with pytest.raises(SystemExit):
        session(tmp_path / "killed", text=text)[0].run()
    session(tmp_path / "killed", text=text)[0].run()
    assert calls
    assert tried(tmp_path / "killed") == tried(tmp_path / "whole")


def test_what_is_tuned_is_not_fixed_too(tmp_path):
    for where in ("settings", "final"):
        line = f"{where}: {{trainer.max_rounds:"
        text = SEARCH.replace(
            line.replace("{", "{{"), f"{where}: {{{{trainer.local_epochs: 2, trainer.max_rounds:"
        )
        with pytest.raises(
            InputError, match=f"{where}: trainer.local_epochs; it is in space as well"
        ):
            search_in(tmp_path, text)


def test_a_choice_is_listed_once(tmp_path):
    text = SEARCH.replace("[WeightedMean, C", "[CoordinateMedian, WeightedMean, C")
    with pytest.raises(InputError, match=r"space.model.average: 'CoordinateMedian', twice; "):
        search_in(tmp_path, text)
    for choices, equal in (("[0, 2, false]", "0 and False"), ("[2, 1.0, 1]", "1.0 and 1")):
        with pytest.raises(InputError, match=f"space.model.average: {equal}; choices that are eq"):
            search_in(tmp_path, SEARCH.replace("[WeightedMean, CoordinateMedian]", choices))


def test_a_search_is_not_continued_as_another(tmp_path):
    session(tmp_path)[0].run()
    trials = tmp_path / "small-tune"
    with pytest.raises(
        InputError, match=r"another space.*remove that folder.*change 'study: small'"
    ):
        open_search(search_in(tmp_path, SEARCH.replace("high: 4", "high: 5")), trials, resolve)
    prune = search_in(tmp_path, SEARCH + "prune: true\n")
    with pytest.raises(InputError, match=r"another configuration \(prune: False -> True\)"):
        open_search(prune, trials, resolve)
    fewer = search_in(tmp_path, SEARCH.replace("trials: 8", "trials: 7"))
    with pytest.raises(InputError, match=r"trials: 7; 8 were begun.*write trials: 8 or more"):
        open_search(fewer, trials, resolve)
    # more of the same
    open_search(search_in(tmp_path, SEARCH.replace("trials: 8", "trials: 9")), trials, resolve)


def test_a_folder_with_signs_of_an_address_in_its_name_holds_its_search(tmp_path):
    trials = tmp_path / "50%20?100%"
    trials.mkdir()
    open_search(search_in(trials), trials, resolve)
    assert (trials / "optuna.db").exists()
    assert [*tmp_path.iterdir()] == [trials]


def test_a_search_is_not_continued_when_the_contents_of_its_configuration_have_changed(tmp_path):
    (tmp_path / "base.yaml").write_text("lr: 1\n")
    text = SEARCH.replace("{configs}/fedavg.yaml", "base.yaml")
    session(tmp_path, text=text)[0].run()
    before = tried(tmp_path)
    (tmp_path / "base.yaml").write_text("lr: 2\n")
    with pytest.raises(
        InputError,
        match=r"(?s)small-tune; .*another configuration \(file: .*1.* -> .*2.*remove that folder",
    ):
        session(tmp_path, text=text)[0].run()
    assert tried(tmp_path) == before
    (tmp_path / "base.yaml").write_text("lr: 1\n")
    session(tmp_path, text=text)[0].run()


@pytest.mark.parametrize("edited_after", [3, 8])
def test_a_search_ends_before_the_next_run_when_its_configuration_is_edited(
    tmp_path, capsys, edited_after
):
    """Before the next trial, and before the final run; restored, it goes on as if not edited."""
    base, text = tmp_path / "base.yaml", SEARCH.replace("{configs}/fedavg.yaml", "base.yaml")
    base.write_text("lr: 1\n")
    one, runs = session(tmp_path, text=text)
    ended = one.ended

    def edit(running, code):
        if len(runs.jobs) == edited_after:
            base.write_text("lr: 2\n")
        return ended(running, code)

    one.ended = edit
    said = r"(?s)small-tune; .*another configuration \(file: .*1.* -> .*2.*remove that folder"
    with pytest.raises(InputError, match=said):
        one.run()
    assert len(runs.jobs) == edited_after
    assert "the same command continues" not in capsys.readouterr().err
    base.write_text("lr: 1\n")
    session(tmp_path, text=text)[0].run()
    whole = tmp_path / "whole"
    whole.mkdir()
    shutil.copy(base, whole)
    session(whole, text=text)[0].run()
    assert tried(tmp_path) == tried(whole)


@pytest.mark.parametrize(
    ("first", "second", "several"),
    [
        ({"content_sha256": "a"}, {"content_sha256": "b"}, "the data"),
        ({"content_sha256": "a", "code": {"net": "c"}}, {"code": {"net": "d"}}, "net"),
        ({"code": {"net": "c"}}, {"code": {"average": "d"}}, None),  # the search may vary the class
    ],
)
def test_trials_of_other_data_or_files_are_not_compared(tmp_path, first, second, several):
    one, runs = session(tmp_path)
    runs.made = [first, second]
    if several is None:
        one.run()
        return
    said = rf"trial-0000 and trial-0001 of .*two versions of {several}, .*remove .*/trial-0001$"
    with pytest.raises(InputError, match=said):
        one.run()
    shutil.rmtree(tmp_path / "small-tune/trial-0001")
    again, runs = session(tmp_path)
    runs.made = [first]
    again.run()
    assert len(again.trials(TrialState.COMPLETE)) == 8


def test_a_trial_is_credited_with_its_own_run_and_not_with_one_that_has_its_name(tmp_path):
    """Leftovers of an earlier search, better than anything that can be found now."""
    for run in ("small-tune/trial-0000", "small-tune/trial-0001", "small/tuned-seed0"):
        left = tmp_path / run
        left.mkdir(parents=True)
        (left / "config.yaml").write_text("another: run\n")
        (left / "metadata.json").write_text(json.dumps({"final/best_val_accuracy": 99.0}))
    (tmp_path / "small-tune" / "trial-0001" / "config.yaml").write_text("[not: yaml")
    tune, runs = session(tmp_path)
    tune.run()
    assert max(value for _, _, value, _ in tried(tmp_path)) < 1
    assert tune.run_of(runs.jobs[0]) == tmp_path / "small-tune" / "trial-0000-2"
    assert tune.run_of(runs.jobs[-1]) == tmp_path / "small" / "tuned-seed0-2"


def test_a_search_follows_the_primary_metric_of_its_runs(tmp_path):
    """Without a metric in its file, it minimises a perplexity with the very trials that a file that
    names the metric has, killed or not."""
    text, perplexity = SEARCH + "prune: true\n", LanguageModelling()
    named = text + "metric: final/best_val_perplexity\n"
    assert search_in(tmp_path, named).direction == "minimize"
    session(tmp_path / "named", text=named, task=perplexity)[0].run()
    for lives in (0, 3):
        with pytest.raises(SystemExit):
            session(tmp_path / "followed", lives, text, perplexity)[0].run()
    followed, _ = session(tmp_path / "followed", text=text, task=perplexity)
    followed.run()
    of_named, of_followed = tried(tmp_path / "named"), tried(tmp_path / "followed")
    assert [(params, state) for _, params, _, state in of_followed] == [
        (params, state) for _, params, _, state in of_named
    ]
    assert {"COMPLETE", "PRUNED"} <= {state for *_, state in of_named}
    least = min(value for *_, value, state in of_named if state == "COMPLETE")
    for folder in ("named", "followed"):
        best = yaml.safe_load((tmp_path / folder / "small-tune" / "best.yaml").read_text())
        assert best["final/best_val_perplexity"] == pytest.approx(least)
        assert 4 < least < 5
    assert f"best final/best_val_perplexity {least:.4g} in" in followed.summary()
    up = text + "direction: maximize\n"
    for wrong, said in ((named, "write metric: final/best_val_mse"), (up, "leave direction out")):
        mistaken, runs = session(tmp_path / said[:5], text=wrong, task=Regression())
        with pytest.raises(InputError, match=f"primary metric of the runs is mse.*{said}"):
            mistaken.run()
        assert len(runs.jobs) == 1


def test_a_misspelt_metric_of_rounds_ends_the_search_after_one_trial(tmp_path):
    text = SEARCH + "metric: val/acuracy\ndirection: maximize\n"
    tune, runs = session(tmp_path, text=text)
    with pytest.raises(
        InputError, match=r"metric: val/acuracy; trial-0000 has fini.*write metric: val/accuracy"
    ):
        tune.run()
    assert len(runs.jobs) == 1


def test_a_search_where_nothing_is_validated_ends_after_one_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "metric_of", lambda run, metric: None)
    tune, runs = session(tmp_path)
    said = r"trial-0000 has finished and validated nothing; write .*data.val_fraction: 0.1"
    with pytest.raises(InputError, match=said):
        tune.run()
    assert len(runs.jobs) == 1


def test_no_trial_no_run(tmp_path, monkeypatch):
    """All were validated, and diverged."""
    monkeypatch.setattr(module, "metric_of", lambda run, metric: None)
    tune, runs = session(tmp_path)
    runs.made = [{"final/last5_val_accuracy": None}]
    with pytest.raises(SystemExit, match="1"):
        tune.run()
    assert [job.name for job in runs.jobs][-1] == "trial-0007"


def test_the_first_start_decides_the_threads_of_trials(tmp_path, monkeypatch):
    """As a sweep does: the number changes how sums are rounded."""
    given = []
    monkeypatch.setattr(SearchSession, "run", lambda self: given.append(self.environment))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(jobs, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    search_in(tmp_path)
    for at_a_time in (2, 1, 8):
        tune.tune(f"{tmp_path}/search.yaml", at_a_time, "~/runs", "none", False, resolve=resolve)
    assert (tmp_path / "runs" / "small-tune" / tune.THREADS).is_file()
    assert given == [{"OMP_NUM_THREADS": "4"}] * 3


def test_a_damaged_database_is_named_in_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    search_in(tmp_path)
    Path("runs/small-tune").mkdir(parents=True)
    Path("runs/small-tune/optuna.db").write_bytes(b"rubbish " * 13)
    assert main(["tune", "--config", "search.yaml", "--logger", "false"]) == 2
    said = capsys.readouterr().err
    assert "runs/small-tune/optuna.db; the search's database cannot be read or written (" in said
    assert said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.essential
def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = (
        SEARCH.replace("trials: 8", "trials: 1")
        .replace("max_rounds: 5", "max_rounds: 2, data.num_clients: 4")
        .replace("max_rounds: 7", "max_rounds: 2")
    )
    search_in(tmp_path, text.replace("CoordinateMedian", "CoordinateMedina"))
    assert main(["tune", "--config", "search.yaml"]) == 2
    assert "CoordinateMedina" in capsys.readouterr().err
    assert not Path("runs").exists()
    search_in(tmp_path, text)
    assert main(["tune", "--config", "search.yaml", "--logger", "false"]) == 0
    for run in ("runs/small-tune/trial-0000", "runs/small/tuned-seed0"):
        assert json.loads(Path(run, "metadata.json").read_text())["status"] == "finished"
