"""Metrics of torchmetrics by class path, and what a LightningModule logs by itself: over batches,
clients, ranks, rounds and resumes they are what scikit-learn, or Lightning, makes of the same
examples."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import lightning
import numpy as np
import pytest
import ranks_program
import torch
import yaml
from compared import decisions
from places import CONFIGS
from ranked import result, started
from ranks_program import LoggingLit
from sklearn import metrics as sk
from tiny_language import records
from torchmetrics import F1Score, R2Score
from torchmetrics.classification import (
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassF1Score,
    MulticlassFBetaScore,
    MulticlassPrecision,
)
from torchmetrics.regression import MeanAbsoluteError, PearsonCorrCoef
from torchmetrics.text import Perplexity
from toy import ready, run, sgd
from toy_tasks import Bigrams, Counting, Line

from callbacks import Calibration, EarlyStopping
from fl_lightning.__main__ import main
from fl_lightning.config.settings import config_of, flatten, settings_hash
from fl_lightning.data.example_batches import ExampleBatches
from fl_lightning.data.test_owners import deal_test_set
from fl_lightning.data.two_clients import TwoClients
from fl_lightning.errors import InputError
from fl_lightning.hooks import Meter
from fl_lightning.methods import Ditto, FedAvg, LocalOnly
from fl_lightning.metrics import expected_calibration_error
from fl_lightning.metrics.named import NamedMetric
from fl_lightning.probing.outputs import predict_validation
from fl_lightning.study.metric_names import TaskMetrics, direction
from fl_lightning.tasks import Classification

CONFIG = str(CONFIGS / "fedavg.yaml")
NAMED = [
    MulticlassF1Score,
    partial(MulticlassPrecision, average="weighted"),
    MulticlassCalibrationError,
]


class Answers(Meter):
    """Keeps the probabilities and classes of the test set in each round."""

    def __init__(self) -> None:
        self.rounds: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_evaluate(self, probs, target, record, context):
        self.rounds.append((probs, target))


@pytest.fixture
def small_batches(monkeypatch):
    """Batches of 16 examples, so that the test set has several and a client's examples fall into
    two."""
    monkeypatch.setattr(ExampleBatches, "evaluation_batch", property(lambda self: 16))


def rows_of(trainer) -> list[dict[str, float]]:
    timed = ("time/",)
    return [
        {name: value for name, value in row.items() if not name.startswith(timed)}
        for row in trainer.progress.history
    ]


def f1_of(probs: torch.Tensor, target: torch.Tensor) -> float:
    return sk.f1_score(target, probs.argmax(1), average="macro", zero_division=0)


@pytest.mark.parametrize("method", [FedAvg, LocalOnly, Ditto])
def test_they_are_those_of_scikit_learn_in_every_round(method, small_batches, tmp_path):
    """No state of a round is left in the next, with one model or one for each client."""
    answers = Answers()
    data = ready(metrics=NAMED, val_fraction=0.3)
    trainer = run(
        method(optimizer=sgd(0.05)), data, tmp_path, max_rounds=3, local_epochs=1, callbacks=[answers, Calibration()]
    )  # fmt: skip
    assert len({f1_of(*found) for found in answers.rounds}) == 3
    for row, (probs, target) in zip(rows_of(trainer), answers.rounds, strict=True):
        assert row["test/f1_score"] == pytest.approx(f1_of(probs, target), abs=1e-6)
        precision = sk.precision_score(target, probs.argmax(1), average="weighted", zero_division=0)
        assert row["test/precision"] == pytest.approx(precision, abs=1e-6)
        whole = MulticlassCalibrationError(num_classes=10, n_bins=15, norm="l1")
        assert (
            row["test/ece"]
            == whole(probs, target).item()
            == expected_calibration_error(probs, target)
        )
        assert row["test/calibration_error"] == pytest.approx(row["test/ece"], abs=1e-6)
    outputs, asked, owners = predict_validation(
        trainer.fabric,
        trainer.method,
        data,
        trainer.progress.done.states if trainer.method.personalised else {},
    )
    own = [f1_of(outputs[owners == id], asked[owners == id]) for id in owners.unique()]
    assert row["val/f1_score"] == pytest.approx(np.mean(own), abs=1e-6)
    assert row["val/f1_score_std"] == pytest.approx(np.std(own), abs=1e-6)
    assert row["val/f1_score_worst_decile"] == pytest.approx(min(own), abs=1e-6)
    if trainer.method.personalised:
        owner = deal_test_set(data)
        own = [f1_of(*(part[owner == id] for part in (probs, target))) for id in np.unique(owner)]
        assert row["personal/f1_score"] == pytest.approx(np.mean(own), abs=1e-6)
    if trainer.method.has_global_model:
        with torch.no_grad():
            every = torch.arange(len(data.test_target))
            outputs = trainer.method.deploy().eval()(data.inputs("test", every))
        assert row["global/f1_score"] == pytest.approx(f1_of(outputs, data.test_target), abs=1e-6)
    # of the worst, which is more
    assert row["val/calibration_error_worst_decile"] > row["val/calibration_error"]


def test_a_run_that_is_continued_has_the_values_of_one_that_was_not(small_batches, tmp_path):
    settings = {"local_epochs": 1, "checkpoint_every": 1}
    whole = run(
        FedAvg(optimizer=sgd(0.05)), ready(metrics=NAMED), tmp_path / "a", max_rounds=3, **settings
    )
    first = run(
        FedAvg(optimizer=sgd(0.05)), ready(metrics=NAMED), tmp_path / "b", max_rounds=1, **settings
    )
    again = run(
        FedAvg(optimizer=sgd(0.05)), ready(metrics=NAMED), tmp_path / "b",
        max_rounds=3, ckpt_path=str(first.run_dir), allow_changed=True, **settings,
    )  # fmt: skip
    assert rows_of(again) == rows_of(whole)


@pytest.mark.slow
@pytest.mark.essential
def test_two_processes_and_workers_give_what_one_gives(tmp_path):
    """With one model and with personal ones; what a module logs by itself too."""
    program = started(tmp_path / "two", "named")
    ranks_program.fit_named(tmp_path / "one")
    ranks_program.fit_named(tmp_path / "workers", workers=2)
    _, errors = program.communicate(timeout=240)
    assert program.returncode == 0, errors
    for name in ("FedAvg", "LocalOnly", "module"):
        one, two, workers = (
            result(tmp_path / where / name / "run") for where in ("one", "two", "workers")
        )
        assert two == one == workers, name
        assert float(one[1][-1]["test/f1_score"]) > 0
    assert float(one[1][-1]["test/f1"]) == float(one[1][-1]["test/f1_score"])


def test_it_selects_the_best_checkpoint_and_stops_early(tmp_path):
    settings = {"local_epochs": 1, "max_rounds": 4, "keep_checkpoints": 1}
    stop = EarlyStopping(monitor="val/calibration_error", patience=4)
    data = ready(metrics=NAMED, primary="f1_score", val_fraction=0.3)
    trainer = run(FedAvg(optimizer=sgd(0.3)), data, tmp_path, callbacks=[stop], **settings)
    validated = [row["val/f1_score"] for row in rows_of(trainer)]
    summary = trainer.progress.summary
    assert summary["final/best_val_f1_score"] == max(validated)
    best = 1 + int(np.argmax(validated))
    assert trainer.progress.done.best_round == summary["final/best_val_round"] == best
    assert (trainer.run_dir / "checkpoints" / f"round_{best:06d}").exists()
    assert stop.state_dict()["best"] == min(
        row["val/calibration_error"] for row in rows_of(trainer)
    )
    task = TaskMetrics.of_run(json.loads((trainer.run_dir / "metadata.json").read_text()))
    assert (task.primary, task.higher_is_better) == ("f1_score", True)
    names = (
        "test/calibration_error",
        "val/precision_worst_decile",
        "final/last5_f1_score",
        "val/f1_score_std",
    )
    assert [direction(name, task) for name in names] == [-1, 1, 1, -1]


def test_a_criterion_is_about_it(tmp_path):
    """Also one whose name says nothing of its direction."""

    class Evenness(MulticlassF1Score):
        higher_is_better = False

    task = Classification().measuring([MulticlassF1Score, Evenness], "evenness", 10)
    accuracies = {"A": {0: 0.2, 1: 0.21, 2: 0.22}, "B": {0: 0.3, 1: 0.32, 2: 0.31}}
    criteria = [
        'metric("test/evenness", A) < 0.25',
        "primary(B) < 0.25",
        "no_increase(primary, A, B, 0.01)",
    ]
    assert decisions(tmp_path, *criteria, accuracies=accuracies, task=task) == [
        "holds",
        "fails",
        "holds",
    ]


def test_flags_name_them_and_fill_in_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [
        *(
            "--data.metrics+=torchmetrics.classification.MulticlassF1Score",
            "--data.metrics.average",
            "micro",
        ),
        *(
            "--data.metrics+=torchmetrics.classification.MulticlassFBetaScore",
            "--data.metrics.beta",
            "2.0",
        ),
        "--data.metrics+=torchmetrics.AUROC",
        *("--trainer.max_rounds", "1", "--trainer.logger", "false", "--data.num_clients", "5"),
    ]
    assert main(["fit", "--config", CONFIG, *flags]) == 0
    (folder,) = Path("runs/fedavg").iterdir()
    row = (folder / "metrics.csv").read_text().splitlines()
    found = dict(zip(*(line.split(",") for line in row), strict=True))
    # micro is accuracy
    assert float(found["test/f1_score"]) == pytest.approx(float(found["test/accuracy"]))
    assert {"test/f_beta_score", "test/auroc", "val/f_beta_score_worst_decile"} < found.keys()
    metrics = yaml.safe_load((folder / "config.yaml").read_text())["data"]["init_args"]["metrics"]
    assert [one["init_args"].get("average") for one in metrics] == ["micro", "macro", "macro"]
    assert main(["test", "--ckpt_path", str(folder), "--probes", "clean,clients,calibration"]) == 0
    tested = json.loads((folder / "test.json").read_text())["metrics"]
    assert tested["calibration/ece"] == tested["test/ece"]
    names = [name for name in found if name.startswith(("test/", "val/")) and name in tested]
    assert {"test/f1_score", "test/ece", "val/auroc"} < {*names}
    assert {name: float(found[name]) for name in names} == {name: tested[name] for name in names}


REFUSED = {
    "torchmetrics.R2Score": "does not take probabilities [n, C] and classes [n]",
    "torchmetrics.classification.BinaryF1Score": "does not take probabilities",
    "torchmetrics.classification.MulticlassConfusionMatrix": "whose value is [10, 10]",
    "torchmetrics.classification.MulticlassAccuracy": "there is another metric of this name",
    "torchmetrics.classification.MulticlassFBetaScore": "beta",
    "torchmetrics.text.BLEUScore": "does not take",
    "torchmetrics.classification.MulticlassF": "cannot be imported",
    "torch.nn.Linear": "it must be null or a list",
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_no_metric_of_the_task_is_refused_at_the_start(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", CONFIG, f"--data.metrics+={path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert REFUSED[path] in line
    assert line.count("; ") == 2
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            {"metrics": [MulticlassF1Score, partial(MulticlassFBetaScore, beta=1.0), F1Score]},
            "f1_score",
        ),
        ({"metrics": [partial(MulticlassF1Score, average=None)]}, r"whose value is \[10\]"),
        ({"metrics": [partial(MulticlassF1Score, average="best")]}, "cannot be made"),
        ({"primary": "f1_score"}, "one of accuracy"),
        ({"metrics": [dict]}, "a metric is a torchmetrics.Metric"),
    ],
)
def test_wrong_ones_are_refused_from_python(arguments, what, tmp_path):
    with pytest.raises(InputError, match=what):
        run(FedAvg(optimizer=sgd(0.05)), ready(**arguments), tmp_path, max_rounds=1)
    assert not [*tmp_path.iterdir()]


def test_metrics_of_two_classes_get_the_probability_of_class_1(tmp_path):
    data = TwoClients()
    data.metrics = [BinaryF1Score, partial(MulticlassAUROC, average="macro")]
    answers = Answers()
    row = rows_of(
        run(
            FedAvg(network="mlp", optimizer=sgd(0.1)),
            data,
            tmp_path,
            max_rounds=1,
            callbacks=[answers],
        )
    )[-1]
    ((probs, target),) = answers.rounds
    assert row["test/f1_score"] == pytest.approx(sk.f1_score(target, probs[:, 1] > 0.5), abs=1e-6)
    assert row["test/auroc"] == pytest.approx(sk.roc_auc_score(target, probs[:, 1]), abs=1e-6)


def test_regression(small_batches, tmp_path):
    """Batches are merged as the metric says: Pearson's coefficient is not a mean of theirs."""
    data = Line()
    data.metrics, data.primary = [MeanAbsoluteError, R2Score, PearsonCorrCoef()], "r2_score"
    method = FedAvg(network=lambda outputs: torch.nn.Linear(3, 1), optimizer=sgd(0.05))
    trainer = run(method, data, tmp_path, max_rounds=2, local_epochs=1)
    row = rows_of(trainer)[-1]
    with torch.no_grad():
        predicted = method.deploy()(data.inputs("test", slice(None))).squeeze(1).numpy()
    true = data.test_target.numpy()
    assert row["test/r2_score"] == pytest.approx(sk.r2_score(true, predicted), abs=1e-5)
    assert row["test/pearson_corr_coef"] == pytest.approx(
        np.corrcoef(true, predicted)[0, 1], abs=1e-5
    )
    assert row["test/mean_absolute_error"] == pytest.approx(row["test/mae"], abs=1e-6)
    assert row["val/mean_absolute_error_worst_decile"] > row["val/mean_absolute_error"]
    assert trainer.progress.summary["final/r2_score"] == row["test/r2_score"]


def test_text(small_batches, tmp_path):
    """Perplexity gets the logits of all positions, and metrics of classes the labelled tokens
    alone."""

    class TokenAverage(MulticlassAccuracy):
        pass

    class OwnPerplexity(Perplexity):
        pass

    data = Counting()
    data.metrics = [OwnPerplexity, partial(TokenAverage, average="micro")]
    row = rows_of(run(FedAvg(network=Bigrams, optimizer=sgd(0.1)), data, tmp_path, max_rounds=1))[
        -1
    ]
    assert row["test/own_perplexity"] == pytest.approx(row["test/perplexity"], rel=1e-5)
    assert row["test/token_average"] == pytest.approx(row["test/token_accuracy"], abs=1e-6)
    assert row["val/token_average_std"] == pytest.approx(row["val/token_accuracy_std"], abs=1e-6)
    text = records(generate=False, metrics=[OwnPerplexity], primary="own_perplexity")
    text.prepare_data()
    text.setup()
    text.distribute(0, torch.device("cpu"))
    assert (text.task.primary, text.task.higher_is_better) == ("own_perplexity", False)
    with pytest.raises(InputError, match="primary"):
        records(generate=False, primary="own_perplexity")


def test_a_vocabulary_that_is_rounded_up_is_cut_to_the_tokens_of_the_data(small_batches, tmp_path):
    """A metric that is told the number of outputs gets all of them."""

    class OfData(MulticlassAccuracy):
        pass

    class OfAll(MulticlassAccuracy):
        pass

    data, wide = Counting(), 16
    data.metrics = [
        partial(OfData, average="micro"),
        partial(OfAll, average="micro", num_classes=wide),
    ]
    method = FedAvg(network=lambda tokens: Bigrams(wide), optimizer=sgd(0.01))
    row = rows_of(run(method, data, tmp_path, max_rounds=1))[-1]
    with torch.no_grad():
        outputs = method.deploy()(data.inputs("test", slice(None)))
    labelled = data.test_target != -100
    for name, tokens in (("of_data", data.num_classes), ("of_all", wide)):
        right = outputs[..., :tokens].argmax(2) == data.test_target
        assert row[f"test/{name}"] == pytest.approx(float(right[labelled].float().mean()), abs=1e-6)
    assert row["test/of_data"] > row["test/of_all"] == pytest.approx(row["test/token_accuracy"])


def test_a_client_with_too_few_examples_has_no_value(tmp_path):
    """R2 needs two: clients with a single example are left out of its mean, and of no other."""
    data = Line(num_clients=40)
    data.metrics = [R2Score]
    method = FedAvg(network=lambda outputs: torch.nn.Linear(3, 1), optimizer=sgd(0.05))
    data.val_fraction = 0.25  # one of five
    trainer = run(method, data, tmp_path / "one", max_rounds=1)
    assert "val/mse" in rows_of(trainer)[-1]
    assert "val/r2_score" not in rows_of(trainer)[-1]


def test_a_metric_that_is_no_number_of_a_client_leaves_it_out():
    """As the correlation of one example, or of equal outputs; NaN of its outputs is another thing."""
    metric = NamedMetric(PearsonCorrCoef, {})
    forms = [(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.1, 1.2, 1.9]))]
    metric.choose_form(forms, "regression", "numbers")
    defined, constant, broken = (
        metric.value_if_defined([metric.state([(outputs, forms[0][1])])])
        for outputs in (forms[0][0], torch.zeros(3), torch.full((3,), math.nan))
    )
    assert defined > 0.9
    assert constant is None
    assert math.isnan(broken)


def test_outputs_that_are_not_finite_are_nan(tmp_path):
    class Broken(torch.nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.body = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, classes)
            )

        def forward(self, images):
            return self.body(images) * (1.0 if self.training else math.nan)

    method = FedAvg(network=Broken, optimizer=sgd(0.05))
    row = rows_of(run(method, ready(metrics=NAMED), tmp_path, max_rounds=1))[-1]
    assert math.isnan(row["test/f1_score"])
    assert math.isnan(row["test/calibration_error"])
    assert math.isnan(row["val/f1_score"])
    assert row["test/accuracy"] == row["val/accuracy"] == 0


def test_runs_without_them_have_the_settings_that_they_had():
    before = {
        "data.class_path": "fl_lightning.data.FederatedImages",
        "data.init_args.num_clients": 10,
    }
    neutral = before | {"data.init_args.metrics": None, "data.init_args.primary": None}
    assert settings_hash(neutral) == settings_hash(before)
    named = before | flatten({"data": {"init_args": {"metrics": [{"class_path": "a.B"}]}}})
    assert settings_hash(named) != settings_hash(before)


def test_what_python_names_is_in_the_configuration(tmp_path):
    metrics = [
        MulticlassF1Score,
        partial(MulticlassPrecision, average="micro"),
        MulticlassAUROC(10, average="weighted"),
    ]
    trainer = run(FedAvg(optimizer=sgd(0.05)), ready(metrics=metrics), tmp_path, max_rounds=1)
    config = config_of(trainer.run_dir)
    assert (
        config["data.init_args.metrics.0"] == "torchmetrics.classification.f_beta.MulticlassF1Score"
    )
    assert config["data.init_args.metrics.1.init_args.average"] == "micro"
    assert config["data.init_args.metrics.2.init_args.average"] == "weighted"


@pytest.mark.filterwarnings("ignore")  # of Lightning's Trainer
def test_a_module_logs_what_lightning_would_log(small_batches, tmp_path):
    """Lightning's own Trainer, given the final weights and the same batches, is the reference."""
    data = ready(metrics=[MulticlassF1Score], val_fraction=0.3)
    method = FedAvg(module=LoggingLit())
    trainer = run(method, data, tmp_path, max_rounds=2, local_epochs=1)
    row = rows_of(trainer)[-1]
    module = LoggingLit()
    module.load_state_dict(method.deploy().state_dict())
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    reference = lightning.Trainer(accelerator="cpu", enable_checkpointing=False, **quiet)
    batches = {
        "test": [*data.test_batches()],
        "val": [(inputs, target) for inputs, target, _ in data.val_batches()],
    }
    assert min(map(len, batches.values())) > 1
    for split, step in (("test", reference.test), ("val", reference.validate)):
        step(module, list_loader(batches[split]), verbose=False)
        logged = {name: value.item() for name, value in reference.callback_metrics.items()}
        assert len(logged) == (7 if split == "test" else 2)
        for name, value in logged.items():
            full = name if name.startswith(f"{split}/") else f"{split}/{name}"
            if full != "test/accuracy":
                assert row[full] == pytest.approx(value, rel=1e-5), name
    assert row["test/f1"] == row["test/f1_score"]
    # the run's own, and not the -1 that the module logs under this name
    assert 0 <= row["test/accuracy"] <= 1
    log = (trainer.run_dir / "run.log").read_text()
    assert log.count("LoggingLit.test_step logs test/accuracy as -1; the run measures") == 1
    assert log.count("keeps that") == 1


def list_loader(batches):
    """Batches as they are."""
    return torch.utils.data.DataLoader(batches, batch_size=None)


def test_a_modules_logs_cost_nothing_and_change_nothing(tmp_path):
    """The weights and the run's own metrics are those of a module without steps; one whose step
    needs a Trainer runs on without it, and the log says so."""

    class Silent(LoggingLit):
        test_step = lightning.LightningModule.test_step
        validation_step = lightning.LightningModule.validation_step

    class NeedsTrainer(LoggingLit):
        def test_step(self, batch, batch_idx):
            self.log("epoch", self.trainer.current_epoch)

    rows, hashes = {}, set()
    for cls in (LoggingLit, Silent, NeedsTrainer):
        method = FedAvg(module=ranks_program.seeded_lit(cls))
        trainer = run(method, ready(), tmp_path / cls.__name__, max_rounds=2, local_epochs=1)
        rows[cls] = rows_of(trainer)[-1]
        hashes.add(json.loads((trainer.run_dir / "metadata.json").read_text())["weights_sha256"])
    assert len(hashes) == 1
    assert rows[Silent].items() < rows[LoggingLit].items()
    assert rows[NeedsTrainer].keys() - rows[Silent].keys() == {"val/val_loss", "val/f1"}
    assert "NeedsTrainer.test_step is left out" in (trainer.run_dir / "run.log").read_text()
