"""What is learnt is the data's: every task is evaluated by sums, selects by its own metric, and
trains the way images do."""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.metrics
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torchmetrics.functional import r2_score
from toy_tasks import TRUE, Bigrams, Counting, Line

from callbacks import (
    AccuracyBytesFigure,
    Calibration,
    ClientAccuracyFigure,
    EarlyStopping,
    LabelNoise,
    LossLandscape,
)
from fl_lightning import FederatedTrainer, evaluation
from fl_lightning.aggregation.averages import CoordinateMedian
from fl_lightning.data.text.tokens import ByteTokenizer, Record, encode_records
from fl_lightning.hooks import RoundRecord
from fl_lightning.methods import (
    AQFL,
    FedAvg,
    FedKD,
    FedMosaic,
    FedMPQ,
    FedMPQKD,
    FedNTD,
    FedPQ,
    FedProx,
    QFedAvg,
)
from fl_lightning.methods.terms import LabelSmoothing
from fl_lightning.metrics.text import IGNORED, token_sums
from fl_lightning.probing.outputs import predict_validation
from fl_lightning.rng import stream
from fl_lightning.tasks import Classification, LanguageModelling, Regression, Task
from fl_lightning.tasks.preference import answer_log_probability


def linear(num_classes):
    return nn.Linear(3, num_classes)


def trained(method, data, path, **settings):
    trainer = FederatedTrainer(
        logger=False,
        default_root_dir=str(path),
        **{
            "max_rounds": 20,
            "participation": 1.0,
            "engine": "sequential",
            "workers": 1,
            **settings,
        },
    )
    return trainer, trainer.fit(method, data, seed=1)


class Answers(nn.Module):
    """It gives these answers to the end, whatever it is asked."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = [[*ByteTokenizer().encode(answer), ByteTokenizer.eos] for answer in answers]

    def generate(self, prompts, mask, max_new_tokens, eos, pad):
        return torch.tensor(
            [(row + [pad] * max_new_tokens)[:max_new_tokens] for row in self.answers]
        )


def test_a_cut_answer_is_right_as_far_as_it_goes():
    """Two answers of different lengths that the context cuts, and one that ends."""
    answers, tokens = ("x" * 30, "y" * 40, "z"), ByteTokenizer()
    records = [Record("task", "Go on.", "", answer) for answer in answers]
    cut = encode_records(records, tokens, context=20, too_long="cut")
    assert cut.cut == 2
    task = LanguageModelling(tokens, max_new_tokens=41)

    def right(*said):
        sums = task._of_answers(Answers(*said), cut.input_ids, cut.target)
        assert torch.equal(sums["exact_match"][0], sums["rouge_l"][0])  # each is one word
        return sums["exact_match"][0].tolist()

    assert right(*answers) == [1.0, 1.0, 1.0]
    assert right("x" * 5, "yx" * 20, "zz") == [0.0, 0.0, 0.0]


def test_a_regression_finds_its_line_and_selects_by_the_smaller_error(tmp_path):
    method = FedAvg(network=linear, optimizer=partial(torch.optim.SGD, lr=0.05))
    landscape = LossLandscape(points=3, dimensions=1, examples=1000)
    callbacks = [
        landscape,
        AccuracyBytesFigure(),
        ClientAccuracyFigure(),
        EarlyStopping("val/mse", patience=20),
    ]
    trainer, final = trained(method, Line(), tmp_path, callbacks=callbacks)
    assert method.network.weight.detach() == pytest.approx(TRUE, abs=0.05)
    assert 0.005 < final["final/mse"] < 0.02  # the noise has a variance of 0.01
    rows = trainer.progress.history
    assert final["final/best_val_mse"] == min(row["val/mse"] for row in rows)
    assert rows[-1]["val/mse_worst_decile"] >= rows[-1]["val/mse"] > 0  # the worst is the largest
    assert trainer.progress.done.best_value == final["final/best_val_mse"]
    assert {"mse_bytes.png", "client_mse.png", "loss_landscape.png"} <= {
        one.name for one in (trainer.run_dir / "figures").iterdir()
    }
    losses, _ = landscape._losses(trainer, np.array([-1.0, 0.0, 1.0]))
    assert losses["deployed in full precision"][1] == pytest.approx(final["final/mse"])
    assert json.loads((trainer.run_dir / "metadata.json").read_text())["task"] == {
        "name": "Regression",
        "primary": "mse",
        "higher_is_better": False,
        "shares": [],
    }


LEARNERS = {  # what becomes of a perplexity that begins between 3 and 5
    "FedAvg": (FedAvg, 1.5),
    "FedProx": (partial(FedProx, mu=0.01), 1.5),
    "FedNTD": (partial(FedNTD, terms=[LabelSmoothing(0.01)]), 2),
    "QFedAvg": (QFedAvg, 1.5),
    "AQFL": (AQFL, 2.5),
    "FedPQ": (FedPQ, 2.5),
    "FedMPQ": (FedMPQ, 2.5),
    "FedMPQKD": (FedMPQKD, 3.9),  # its teacher is the mean of clients that count in different steps
    # and so is what it must not be moved by
    "median": (partial(FedAvg, average=CoordinateMedian()), 6),
}


@pytest.mark.quick("FedAvg", "FedMPQ")
@pytest.mark.parametrize("name", LEARNERS)
def test_tokens_are_learnt_in_dictionaries_of_integers(name, tmp_path):
    method, most = LEARNERS[name]
    data, noise = Counting(), LabelNoise(round=14, clients=1.0, labels=1.0)
    method = method(network=Bigrams, optimizer=partial(torch.optim.Adam, lr=0.05))
    trainer, final = trained(method, data, tmp_path, max_rounds=15, callbacks=[noise])
    rows = trainer.progress.history
    assert rows[12]["test/perplexity"] < most
    if name != "median":  # two rounds of wrong answers
        assert rows[12]["test/perplexity"] < final["final/perplexity"]
    assert rows[-1]["test/perplexity"] == pytest.approx(math.exp(rows[-1]["test/loss"]))
    assert 0 <= rows[-1]["test/token_accuracy"] <= 1
    assert data.group_counts().sum(0).tolist() == [56, 56, 56]
    assert (data.group_counts() > 0).sum() < 18  # skewed by group, where targets have no classes


def test_engines_agree_on_tokens(tmp_path):
    def ends(**settings):
        method = FedAvg(network=Bigrams, optimizer=partial(torch.optim.SGD, lr=0.5))
        trainer, final = trained(method, Counting(), tmp_path, max_rounds=3, **settings)
        sha = json.loads((trainer.run_dir / "metadata.json").read_text())["weights_sha256"]
        return sha, final, method.server["weights"]

    one, two, batched = ends(), ends(workers=2), ends(engine="batched")
    assert one[:2] == two[:2]
    torch.testing.assert_close(one[2], batched[2])


def test_a_run_of_tokens_resumes_exactly(tmp_path):
    def run(path, rounds, **settings):
        method = FedAvg(network=Bigrams, optimizer=partial(torch.optim.SGD, lr=0.5))
        trainer = FederatedTrainer(
            logger=False,
            default_root_dir=str(path),
            max_rounds=rounds,
            participation=0.5,
            workers=1,
            allow_changed=True,
        )
        trainer.fit(method, Counting(), seed=2, **settings)
        return trainer

    run(tmp_path / "halves", 3)
    again, whole = run(tmp_path / "halves", 6, ckpt_path="last"), run(tmp_path / "whole", 6)
    sha = [
        json.loads((one.run_dir / "metadata.json").read_text())["weights_sha256"]
        for one in (again, whole)
    ]
    assert sha[0] == sha[1]
    assert again.progress.summary == whole.progress.summary
    assert again.progress.done.best_round == whole.progress.done.best_round


TARGETS = {
    Classification: (torch.randn(40, 5), torch.arange(40) % 5),
    Regression: (torch.randn(40, 2), torch.randn(40, 2)),
    LanguageModelling: (
        torch.randn(40, 6, 9),
        torch.where(torch.rand(40, 6) < 0.5, torch.randint(9, (40, 6)), torch.tensor(-100)),
    ),
}
TARGETS[LanguageModelling][1][3] = torch.tensor([1, 2, -100, 3, 4, -100])  # two answers


@pytest.mark.parametrize("task", TARGETS)
def test_sums_of_parts_are_the_sum_and_the_loss_is_their_mean(task):
    outputs, target = TARGETS[task]
    task = task()
    whole = task.sums(outputs, target)
    parts = [task.sums(outputs[part], target[part]) for part in torch.arange(40).split([7, 13, 20])]
    for name, (total, weight) in whole.items():
        assert sum(part[name][0] for part in parts) == pytest.approx(float(total))
        assert sum(part[name][1] for part in parts) == float(weight)
    loss = task.loss(outputs, target)
    assert float(loss) == pytest.approx(float(whole["loss"][0] / whole["loss"][1]), rel=1e-5)
    assert task.weight(target).sum() == whole["loss"][1]
    stacked = torch.func.vmap(task.loss)(
        torch.stack([outputs, 2 * outputs]), torch.stack([target, target])
    )
    torch.testing.assert_close(stacked, torch.stack([loss, task.loss(2 * outputs, target)]))
    assert set(task.per_client) <= set(task.finish({n: np.float64(1) for n in whole}))


def test_the_loss_of_tokens_is_torchs_own():
    outputs, target = TARGETS[LanguageModelling]
    expected = F.cross_entropy(outputs.transpose(1, 2), target)
    torch.testing.assert_close(LanguageModelling().loss(outputs, target), expected)
    nothing = torch.full_like(target, -100)
    assert LanguageModelling().loss(outputs, nothing) == 0  # and not NaN


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_losses_of_tokens_in_half_precision_are_those_of_float32(half):
    """32 x 320 tokens of 7 nats: their sum is beyond float16, and their number beyond bfloat16."""
    generator = torch.Generator().manual_seed(0)
    outputs = (3 * torch.randn(32, 320, 99, generator=generator)).to(half)
    target = torch.randint(99, (32, 320), generator=generator)
    target[0, 0] = IGNORED
    expected = F.cross_entropy(outputs.float().flatten(0, 1), target.flatten())
    torch.testing.assert_close(LanguageModelling().loss(outputs, target), expected)
    each = F.cross_entropy(outputs.float().transpose(1, 2), target, reduction="none").sum(1)
    torch.testing.assert_close(answer_log_probability(outputs, target), -each)


@pytest.mark.parametrize("task", TARGETS)
def test_corrupted_targets_are_wrong_where_they_are_asked_to_be(task):
    _, target = TARGETS[task]
    where, before = np.array([3, 5, 8, 30]), target.clone()
    wrong = task().corrupt(target, where, stream(0, "x"), 5 if task is Classification else 9)
    assert torch.equal(target, before)
    same = torch.ones(40, dtype=torch.bool)
    same[where] = False
    assert torch.equal(wrong[same], target[same])
    changed = wrong[where] != target[where]
    if task is LanguageModelling:
        labelled = target[where] != -100
        for row, is_changed in zip(labelled.tolist(), changed.tolist(), strict=True):
            before, after = [False, *row], [*row[1:], False]
            spared = [one and not other for one, other in zip(before, after, strict=False)]
            assert is_changed == [one and not end for one, end in zip(row, spared, strict=True)]
        assert set(wrong.flatten().tolist()) <= set(target.flatten().tolist())
    elif task is Classification:
        assert changed.all()
    else:
        assert changed.all()
        assert sorted(wrong[where].flatten().tolist()) == sorted(target[where].flatten().tolist())


@pytest.mark.parametrize("asked", [0, 1, 2, 5])
def test_all_targets_of_a_small_client_change_that_are_asked_to(asked):
    """A random permutation leaves one in its place on average, and a single one always."""
    target = torch.arange(5.0)
    for seed in range(50):
        where = stream(seed, "where").choice(5, asked, replace=False)
        wrong = Regression().corrupt(target, where, stream(seed, "x"), 1)
        assert np.flatnonzero(wrong != target).tolist() == sorted(where)
        assert set(wrong.tolist()) <= set(target.tolist())


@pytest.mark.parametrize("decoder", [None, ByteTokenizer()])
def test_answers_of_one_token_become_wrong_and_longer_ones_up_to_their_end(decoder):
    """Whether answers are generated for a metric changes nothing of what is learnt."""
    target = torch.full((9, 6), IGNORED)
    target[:8, 4] = torch.arange(8) % 4 + 10
    target[8, 2:5] = torch.tensor([10, 11, ByteTokenizer.eos])
    wrong = LanguageModelling(decoder).corrupt(target, np.arange(9), stream(0, "x"), 300)
    assert (wrong != target).sum(1).tolist() == [1] * 8 + [2]
    assert wrong[8, 4] == ByteTokenizer.eos
    assert torch.equal(wrong == IGNORED, target == IGNORED)


class Unfit(Task):
    primary, per_client = "loss", ("loss",)

    def loss(self, outputs, target):
        return outputs.sum()

    def examplewise(self, outputs, target):
        return {"loss": (outputs.double().sum(1), self.weight(target))}


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (
            Calibration(),
            "Calibration where the task is Regression; it reads the probabilities of the classes",
        ),
        (
            EarlyStopping("val/accuracy"),
            "monitor='val/accuracy'.; it is one of val/mse, val/mse_std",
        ),
    ],
)
def test_what_does_not_apply_is_refused_by_name(callback, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        trained(FedAvg(network=linear), Line(), tmp_path, callbacks=[callback])
    assert not list(tmp_path.iterdir())


def test_early_stopping_follows_the_primary_metric_and_its_direction():
    """A perplexity that rises is no improvement."""
    stopping = EarlyStopping(patience=1)
    stopping.on_check(
        SimpleNamespace(data=SimpleNamespace(task=LanguageModelling(), validating=[0]))
    )
    for round, value in enumerate((9.0, 8.0), start=1):
        stopping.on_validate({}, record := RoundRecord(round, {"val/perplexity": value}), None)
        stopping.on_round_end(record, None)
        assert not stopping.stop_reason()
    stopping.on_validate({}, record := RoundRecord(3, {"val/perplexity": 8.5}), None)
    stopping.on_round_end(record, None)
    assert (
        stopping.stop_reason()
        == "val/perplexity did not improve in 1 evaluated round, best 8 in round 2"
    )


@pytest.mark.parametrize(
    ("method", "data", "says"),
    [
        (
            FedKD,
            Counting(),
            "--model FedKD where the task is LanguageModelling; its soft labels are",
        ),
        (
            FedMosaic,
            Counting(),
            "--model FedMosaic where the task is LanguageModelling; it finds related",
        ),
        (FedMPQKD, Line(), "FedMPQKD where the task is Regression; it compares logits of classes"),
        (FedNTD, Line(), "--model FedNTD where the task is Regression; it compares logits"),
    ],
    ids=["FedKD", "FedMosaic", "FedMPQKD", "FedNTD"],
)
def test_methods_that_cannot_do_a_task_say_why(method, data, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        trained(method(network=linear), data, tmp_path)
    assert not list(tmp_path.iterdir())


def test_label_noise_on_a_task_without_labels_is_refused(tmp_path):
    data = Line()
    data.task = Unfit()
    with pytest.raises(
        ValueError, match="label noise on Unfit; it has no labels that could be wrong"
    ):
        trained(FedAvg(network=linear), data, tmp_path, callbacks=[LabelNoise()])


def test_a_network_for_another_task_is_refused(tmp_path):
    def flat(num_classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(3, 2))

    with pytest.raises(
        ValueError, match=r"makes \(2, 2\) of two examples; outputs \[2, 1\] are needed"
    ):
        trained(FedAvg(network=flat), Line(), tmp_path)


def test_outputs_are_collected_only_for_those_who_ask(tmp_path, monkeypatch):
    asked = []
    original = evaluation.on_test_set

    def spy(*given, answers=True, **others):
        asked.append(answers)
        return original(*given, answers=answers, **others)

    monkeypatch.setattr(evaluation, "on_test_set", spy)
    trained(FedAvg(network=linear), Line(), tmp_path, max_rounds=1)
    assert asked == [False]


def test_streamed_metrics_are_those_of_all_outputs():
    data = Counting()
    data.setup()
    data.distribute(3, torch.device("cpu"))
    method, fabric = FedAvg(network=Bigrams), Fabric(accelerator="cpu", devices=1)
    method.build(data)
    metrics, answers = evaluation.on_test_set(fabric, method, data, answers=False)
    batches, network = [*data.test_batches(batch_size=5)], method.deploy().eval()
    outputs = torch.cat([network(inputs).detach() for inputs, _ in batches])
    target = torch.cat([target for _, target in batches])
    assert answers is None
    assert metrics["test/loss"] == pytest.approx(
        F.cross_entropy(outputs.transpose(1, 2).double(), target).item()
    )
    outputs, target, owners = predict_validation(fabric, method, data)
    found, _ = evaluation.validate(fabric, method, data)
    for id in owners.unique().tolist():
        mine = owners == id
        nats = F.cross_entropy(outputs[mine].transpose(1, 2), target[mine]).item()
        assert found["perplexity"][id] == pytest.approx(math.exp(nats), rel=1e-5)
    assert sorted(found["perplexity"]) == data.validating.tolist()


def test_outputs_that_are_no_numbers_are_of_no_class():
    """The likeliest class of NaN would be class 0."""
    outputs = torch.tensor([[math.nan, math.nan], [1.0, 0.0], [math.inf, 0.0]])
    right, weight = Classification().examplewise(outputs, torch.zeros(3, dtype=torch.int64))[
        "accuracy"
    ]
    assert (right.tolist(), weight.tolist()) == ([0, 1, 0], [1, 1, 1])
    _, right, labelled = token_sums(outputs[None], torch.zeros(1, 3, dtype=torch.int64))
    assert (right.tolist(), labelled.tolist()) == ([1], [3])


def test_named_metrics_of_targets_far_from_zero_keep_their_digits():
    """As a year, or a day's number."""
    rng = np.random.default_rng(0)
    target = torch.tensor(rng.normal(20_000, 3, (500, 1)), dtype=torch.float32)
    outputs = target + torch.tensor(rng.normal(0, 0.5, (500, 1)), dtype=torch.float32)
    ((y, true),) = Regression().metric_inputs(outputs, target)
    expected = sklearn.metrics.r2_score(target.double().numpy(), outputs.double().numpy())
    assert float(r2_score(y, true)) == pytest.approx(expected, abs=1e-9)
    assert abs(float(r2_score(y.float(), true.float())) - expected) > 1e-3
