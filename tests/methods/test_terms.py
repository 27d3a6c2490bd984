"""Terms that are added to a method's loss: what they equal, where they vanish, and that every
engine computes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import yaml
from averaged import digits
from outcomes import rows_of
from refusals import refused
from toy import CENTRES, Points, on_points, run, sgd

from fl_lightning.__main__ import main
from fl_lightning.config.recorded import describe
from fl_lightning.config.settings import flatten, settings_hash
from fl_lightning.conformance import command, method_under_test, run_checks
from fl_lightning.methods import (
    AQFL,
    MOON,
    BalancedSoftmax,
    CalibratedLogits,
    ContrastiveTerm,
    DistillationTerm,
    DynamicTerm,
    FedAvg,
    FedDyn,
    FedKD,
    FedLC,
    FedMosaic,
    FedMPQ,
    FedMPQKD,
    FedNTD,
    FedPQ,
    FedProx,
    LabelSmoothing,
    Method,
    NotTrueTerm,
    ProximalTerm,
    QFedAvg,
    ScaledLoss,
    Term,
)
from fl_lightning.wire import Payload

ALL = {
    "scaled": ScaledLoss(0.5),
    "smoothing": LabelSmoothing(0.1),
    "prox": ProximalTerm(0.1),
    "ntd": NotTrueTerm(0.5),
    "kd": DistillationTerm(0.5, 2.0),
    "calibrated": CalibratedLogits(0.5),
    "contrast": ContrastiveTerm(1.0),
    "dynamic": DynamicTerm(0.1),
}
NEUTRAL = [
    ScaledLoss(0.0),
    LabelSmoothing(0.0),
    ProximalTerm(0.0),
    NotTrueTerm(0.0),
    DistillationTerm(0.0),
]
NEUTRAL += [CalibratedLogits(0.0), ContrastiveTerm(0.0), DynamicTerm(0.0)]


def fitted(method: Method, tmp_path, **settings):
    settings = {
        "max_rounds": 2,
        "participation": 0.5,
        "local_epochs": 1,
        "max_local_steps": 4,
        "engine": "sequential",
        **settings,
    }
    trainer = run(method, digits(), tmp_path, **settings)
    return method.server["weights"], rows_of(trainer.run_dir / "metrics.csv")


def optimizer():
    return sgd(0.05, momentum=0.9)


@pytest.mark.quick("sequential")
@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize(
    ("whole", "plain", "term"),
    [
        (lambda: FedProx(mu=0.1, optimizer=optimizer()), FedAvg, ProximalTerm(0.1)),
        (lambda: FedNTD(beta=0.5, tau=2.0, optimizer=optimizer()), FedAvg, NotTrueTerm(0.5, 2.0)),
        (lambda: FedMPQKD(alpha=0.7, temperature=3.0, optimizer=optimizer()), FedMPQ, DistillationTerm(0.7, 3.0)),
        (lambda: FedLC(tau=2.0, optimizer=optimizer()), FedAvg, CalibratedLogits(2.0)),
        (lambda: MOON(mu=2.0, temperature=0.4, optimizer=optimizer()), FedAvg, ContrastiveTerm(2.0, 0.4)),
    ],
    ids=["FedProx", "FedNTD", "FedMPQKD", "FedLC", "MOON"],
)  # fmt: skip
def test_a_method_is_the_plain_one_with_its_term(whole, plain, term, engine, tmp_path):
    """Bit for bit, weights and losses."""
    expected, losses = fitted(whole(), tmp_path / "whole", engine=engine)
    found, rows = fitted(
        plain(optimizer=optimizer(), terms=[term]), tmp_path / "plain", engine=engine
    )
    assert torch.equal(expected, found)
    for name in ("train/loss", "train/loss_task", f"train/loss_{term.name}"):
        assert [row[name] for row in rows] == [row[name] for row in losses]
    assert abs(float(rows[-1][f"train/loss_{term.name}"])) > 0


@pytest.mark.parametrize("kind", [FedAvg, FedMPQ, AQFL])
def test_neutral_terms_are_neutral_bit_for_bit(kind, tmp_path):
    plain, losses = fitted(kind(optimizer=optimizer()), tmp_path / "plain")
    found, rows = fitted(kind(optimizer=optimizer(), terms=NEUTRAL), tmp_path / "neutral")
    assert torch.equal(plain, found)
    assert set(rows[0]) == set(losses[0])


@pytest.mark.quick("FedAvg", "FedMPQKD")
@pytest.mark.parametrize("kind", [FedAvg, QFedAvg, FedPQ, AQFL, FedMPQ, FedMPQKD])
def test_every_engine_computes_every_term(kind, tmp_path, caplog):
    """The terms add up to the loss; batched agrees with sequential to the rounding of float32,
    without falling back."""
    terms = [term for name, term in ALL.items() if name != "kd" or kind is not FedMPQKD]
    settings = {"terms": terms, "optimizer": sgd(0.02)}
    if kind is AQFL or issubclass(kind, FedMPQ):
        settings |= {"bits": 8}  # a code that is rounded the other way moves less
    one, rows = fitted(kind(**settings), tmp_path / "one", max_rounds=1)
    together, batched = fitted(kind(**settings), tmp_path / "many", max_rounds=1, engine="batched")
    assert "one by one" not in caplog.text
    parts = [name for name in rows[0] if name.startswith("train/loss_")]
    assert {f"train/loss_{term.name}" for term in terms} <= set(parts)
    for row in (*rows, *batched):
        assert sum(float(row[name]) for name in parts) == pytest.approx(
            float(row["train/loss"]), rel=1e-5
        )
    for name in parts:
        assert float(batched[0][name]) == pytest.approx(float(rows[0][name]), rel=1e-3, abs=1e-6)
    if kind is FedAvg:
        torch.testing.assert_close(one, together, rtol=0, atol=2e-5)


def received(method: Method):
    """The method in its first round, and a batch of client 0."""
    data = digits()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    method.build(data)
    method.round = 1
    client = data.client(0)
    method.receive(Payload.from_bytes(method.broadcast(client).to_bytes()), client)
    method.train()
    return method, next(iter(data.train_batches(client, round=1, epochs=1)))


@pytest.mark.parametrize("settings", [{}, {"download": "quantised"}], ids=str)
@pytest.mark.parametrize("kind", [FedAvg, AQFL, FedMPQ])
def test_the_proximal_term_is_zero_at_the_weights_received(kind, settings):
    """Its value, and its gradient by what the optimiser moves, to the last bit, at any bit-width;
    after a step it is mu / 2 times the square of the way that the weights before rounding have
    gone."""
    if kind is FedAvg:
        settings = {}
    else:
        settings = {**settings, "bits": 2}
    method, batch = received(kind(optimizer=sgd(0.5), terms=[ProximalTerm(0.3)], **settings))
    parameters = list(method.trainable())
    start = {name: w.detach().clone() for name, w in method.trained_weights().items()}
    assert {name for name, w in start.items() if w.ndim > 1}
    term = method.training_step(batch)["loss_prox"]
    gradients = torch.autograd.grad(term, parameters, allow_unused=True)
    assert term.detach() == 0
    assert all(bool((gradient == 0).all()) for gradient in gradients if gradient is not None)

    optimizer = method.configure_optimizers()
    method.training_step(batch)["loss"].backward()
    optimizer.step()
    method.on_train_batch_end({}, batch, 0)
    moved = sum(
        float((w - start[name]).detach().square().sum())
        for name, w in method.trained_weights().items()
    )
    assert moved > 0
    term = method.training_step(batch)["loss_prox"]
    assert float(term.detach()) == pytest.approx(0.15 * moved, rel=1e-5)
    pull = torch.autograd.grad(term, [p for p in parameters if p.requires_grad], allow_unused=True)
    assert any(bool(gradient.abs().sum() > 0) for gradient in pull if gradient is not None)


def test_the_received_network_of_a_quantised_method_is_in_full_precision_and_frozen():
    method, (inputs, target) = received(
        FedMPQ(bits=2, activation_bits=2, optimizer=sgd(0.5), terms=[NotTrueTerm()])
    )
    before = method.layout.read(method.received_network)
    assert torch.equal(before, method.server["weights"])
    assert not method.received_network.training
    plain, _ = received(FedAvg())
    plain.layout.write(plain.network, method.server["weights"])
    assert torch.equal(method.received_network(inputs), plain.network.eval()(inputs))
    method.training_step((inputs, target))["loss"].backward()
    method.configure_optimizers().step()
    assert torch.equal(method.layout.read(method.received_network), before)
    assert all(p.grad is None for p in method.received_network.parameters())


class WithServersHalf(FedAvg):
    """FedDyn, written anew around its term."""

    def build(self, data):
        super().build(data)
        self.H, self.clients = torch.zeros(self.trained_values), len(data.active)

    def next_state(self, sums):
        mean, start = sums.mean("weights").float(), self.server["weights"].float()
        self.H += len(self.served) / self.clients * (mean - start)[: self.trained_values]
        mean[: self.trained_values] += self.H
        self.server["weights"] = mean


@pytest.mark.slow
@pytest.mark.essential
def test_the_dynamic_term_is_the_clients_half_of_feddyn(tmp_path):
    settings = {"max_rounds": 6, "participation": 0.5}
    whole, _ = fitted(FedDyn(alpha=0.2, optimizer=optimizer()), tmp_path / "whole", **settings)
    method = WithServersHalf(terms=[DynamicTerm(0.2)], weigh_by="clients", optimizer=optimizer())
    parts, _ = fitted(method, tmp_path / "parts", **settings)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)
    alone, _ = fitted(
        FedAvg(terms=[DynamicTerm(0.2)], weigh_by="clients", optimizer=optimizer()),
        tmp_path / "a",
        **settings,
    )
    assert (alone - whole).abs().max() > 1e-3


def test_a_scaled_loss_is_a_larger_learning_rate(tmp_path):
    """Under plain SGD; alpha 1 doubles, which is exact in binary."""
    scaled, _ = fitted(FedAvg(optimizer=sgd(0.02), terms=[ScaledLoss(1.0)]), tmp_path / "scaled")
    faster, _ = fitted(FedAvg(optimizer=sgd(0.04)), tmp_path / "faster")
    assert torch.equal(scaled, faster)


def test_label_smoothing_is_that_of_torch():
    method, (inputs, target) = received(FedAvg(terms=[LabelSmoothing(0.2)]))
    outputs = method.training_step((inputs, target))
    expected = F.cross_entropy(method.network(inputs), target, label_smoothing=0.2)
    torch.testing.assert_close(outputs["loss"], expected)


def test_a_term_is_put_on_the_quantised_student():
    """Not on the network in full precision: smoothing of a 1-bit student differs from that of its
    weights."""
    method, batch = received(FedMPQ(bits=1, terms=[LabelSmoothing(0.2)]))
    outputs = method.training_step(batch)
    weights, _ = method.quantized_weights()
    logits = torch.func.functional_call(method.network, weights, (batch[0],))
    expected = F.cross_entropy(logits, batch[1], label_smoothing=0.2)
    torch.testing.assert_close(outputs["loss_task"] + outputs["loss_smoothing"], expected)
    assert not torch.allclose(
        F.cross_entropy(method.network(batch[0]), batch[1]), outputs["loss_task"]
    )


class OwnReceive(FedAvg):
    def receive(self, message, client):
        self.layout.write(self.network, message.tensor("weights"))


class OwnStep(FedAvg):
    def training_step(self, batch, batch_idx=0):
        loss = self.task_loss(self.network(batch[0]), batch[1])
        return {"loss": loss, "loss_task": loss}


@pytest.mark.parametrize(
    ("kind", "hint"), [(OwnReceive, "remember_received"), (OwnStep, "with_terms")]
)
def test_a_method_that_would_ignore_a_term_is_refused(kind, hint, tmp_path):
    with pytest.raises((ValueError, TypeError), match=hint):
        run(on_points(kind(terms=[ProximalTerm(0.1)])), Points((3, 1)), tmp_path, max_rounds=1)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: ScaledLoss(-1), "ScaledLoss(alpha=-1)"),
        (lambda: LabelSmoothing(1.0), "LabelSmoothing(smoothing=1.0)"),
        (lambda: ProximalTerm(float("inf")), "ProximalTerm(mu=inf)"),
        (lambda: NotTrueTerm(tau=0), "NotTrueTerm(tau=0)"),
        (lambda: DistillationTerm(temperature=-1), "DistillationTerm(temperature=-1)"),
        (lambda: CalibratedLogits(tau=-1), "CalibratedLogits(tau=-1)"),
        (lambda: BalancedSoftmax(gamma=-1), "BalancedSoftmax(gamma=-1)"),
        (lambda: ContrastiveTerm(temperature=0), "ContrastiveTerm(temperature=0)"),
        (
            lambda: FedLC(terms=[BalancedSoftmax()]),
            "--model.terms BalancedSoftmax with --model FedLC",
        ),
        (lambda: FedAvg(terms=[BalancedSoftmax(), CalibratedLogits()]), "two terms of the name"),
        (
            lambda: FedProx(terms=[ProximalTerm()]),
            "--model.terms ProximalTerm with --model FedProx",
        ),
        (lambda: FedMPQKD(terms=[DistillationTerm()]), "--model.terms DistillationTerm with"),
        (lambda: FedAvg(terms=[{"class_path": "ScaledLoss"}]), "an item of type dict"),
        (lambda: FedAvg(terms=[ScaledLoss(), ScaledLoss(1)]), "two terms of the name loss_scaled"),
        (lambda: FedKD(terms=[ProximalTerm()]), "--model.terms ProximalTerm with --model FedKD"),
        (
            lambda: FedMosaic(terms=[NotTrueTerm()]),
            "--model.terms NotTrueTerm with --model FedMosaic",
        ),
    ],
)
def test_bad_terms(make, given):
    with refused(given, ""):
        make()


def test_averaged_weights_are_received():
    FedKD(average_weights=True, terms=[ProximalTerm()])


@pytest.mark.slow
@pytest.mark.essential
def test_terms_are_named_by_their_class_on_the_command_line(capsys):
    flags = ["--model", "FedMPQ", "--model.terms+=LabelSmoothing", "--model.terms.smoothing", "0.2"]
    assert main(["fit", *flags, "--model.terms+=ProximalTerm", "--print_config"]) == 0
    terms = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["terms"]
    assert [term["class_path"].rpartition(".")[2] for term in terms] == [
        "LabelSmoothing",
        "ProximalTerm",
    ]
    assert [term["init_args"] for term in terms] == [{"smoothing": 0.2}, {"mu": 0.01}]
    assert main(["fit", "--model", "FedAvg", "--model.terms+=NoTerm"]) == 2
    assert "NotTrueTerm" in capsys.readouterr().err


def test_a_run_without_terms_has_the_hash_that_it_had():
    def flat(arguments):
        return flatten(
            {"model": {"class_path": "fl_lightning.methods.FedAvg", "init_args": arguments}}
        )

    old = settings_hash(flat({"average": None}))
    assert settings_hash(flat({"average": None, "terms": None})) == old
    assert settings_hash(flat({"average": None, "terms": []})) == old
    made = {"model": describe(FedAvg(terms=[ScaledLoss(0.5)]))}
    assert settings_hash(flatten(made)) != settings_hash(flatten({"model": describe(FedAvg())}))


class Ridge(Term):
    """A term of a user's own: 0.5 |w|^2 over the trained weights."""

    name = "ridge"
    reads_received_weights = True

    def __call__(self, step):
        return 0.5 * sum(weight.square().sum() for weight in step.trained_weights.values())


def test_a_term_of_ones_own(tmp_path):
    """A quadratic and a ridge of the same curvature meet half-way."""
    method = on_points(FedAvg(terms=[Ridge()]))
    run(method, Points((3, 1)), tmp_path, max_rounds=60, local_epochs=1)
    middle = 0.75 * CENTRES[0] + 0.25 * CENTRES[1]
    torch.testing.assert_close(method.server["weights"], middle / 2, rtol=0, atol=1e-4)


# the parser's, of class paths within a dictionary
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_terms_in_the_command_that_checks_a_method(capsys, monkeypatch):
    checked = []
    monkeypatch.setattr(command, "run_checks", lambda subject: checked.append(subject.make()) or [])
    terms = (
        "{terms: [{class_path: ScaledLoss, init_args: {alpha: 0.25}}, {class_path: NotTrueTerm}]}"
    )
    assert main(["check", "--model", "FedMPQ", "--settings", terms]) == 0
    assert [type(term) for term in checked[0].terms] == [ScaledLoss, NotTrueTerm]
    assert checked[0].terms[0].alpha == 0.25
    for wrong in ("{terms: [{class_path: NoTerm}]}", "{terms: [LabelSmoothing]}"):
        assert main(["check", "--model", "FedMPQ", "--settings", wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


WEAK = [
    ScaledLoss(0.01),
    LabelSmoothing(0.01),
    ProximalTerm(0.01),
    NotTrueTerm(0.01),
    DistillationTerm(0.01),
]
WEAK += [ContrastiveTerm(0.01)]


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("kind", [FedAvg, FedMPQ])
def test_methods_with_terms_conform(kind):
    """All terms at once, so weak that the known optimum moves by less than 0.1."""
    subject = method_under_test(kind, {"terms": WEAK}, noise=0.15)
    assert [f"{o.check}: {o.detail}" for o in run_checks(subject) if o.verdict == "failed"] == []
