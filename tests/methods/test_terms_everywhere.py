"""Terms of the loss with methods that make, wrap or change their network in their own way, and with
networks of text."""

from __future__ import annotations

import pytest
import torch
from budgeted import costs
from laddered import ladder_of, two_blocks
from mosaics import mosaic
from outcomes import rows_of
from refusals import refused
from tiny_language import adam, fit, method_of, set_up, tiny
from toy import run, sgd

from fl_lightning.conformance.toy import images, small_network
from fl_lightning.data import FederatedImages, TokenData
from fl_lightning.methods import (
    HEST,
    BalancedSoftmax,
    Centralised,
    ContrastiveTerm,
    DistillationTerm,
    FedAvg,
    FedKD,
    FedLC,
    FedVEMoE,
    LabelSmoothing,
    Term,
)
from fl_lightning.models.adapters import add_adapter
from fl_lightning.models.features import FeatureTap
from fl_lightning.models.language import Llama


class Length(Term):
    """A term of a user's own that reads the trained weights, and nothing received."""

    name = "length"

    def __call__(self, step):
        return 1e-3 * sum(weight.square().sum() for weight in step.trained_weights.values())


TERMS = [LabelSmoothing(), BalancedSoftmax(), Length()]


def digits(**settings) -> FederatedImages:
    return FederatedImages(dataset="digits", num_clients=4, **settings)


@pytest.mark.parametrize("name", ["FedKD", "FedMosaic", "FedVEMoE", "Centralised"])
def test_terms_that_read_nothing_received_go_with_any_method(name, tmp_path):
    """All of them are in the loss; of FedMosaic in each of its families."""
    settings = {"max_rounds": 1, "max_local_steps": 2, "workers": 1}
    if name == "FedVEMoE":
        method = method_of(FedVEMoE, k_init=2, k_max=3, top_m=3, terms=TERMS)
        trainer = fit(method, tmp_path, max_rounds=1)
    elif name == "FedMosaic":
        trainer = run(mosaic(terms=TERMS), digits(), tmp_path, **settings)
    elif name == "FedKD":
        method = FedKD(network=small_network, optimizer=sgd(0.05), terms=TERMS)
        trainer = run(method, digits(public_examples=40), tmp_path, **settings)
    else:
        method = Centralised(network=small_network, optimizer=sgd(0.05), terms=TERMS)
        trainer = run(method, images(), tmp_path, **settings)
        everyone = trainer.data.train_target[torch.from_numpy(method.everyone.train)]
        assert torch.equal(method.class_counts, everyone.bincount().float())
    (row,) = rows_of(trainer.run_dir / "metrics.csv")
    terms = {f"train/loss_{term.name}" for term in TERMS}
    assert terms <= row.keys()
    parts = [float(row[name]) for name in (*terms, "train/loss_task")]
    assert all(parts)
    if name in ("FedMosaic", "Centralised"):  # the others train on something else too
        assert sum(parts) == pytest.approx(float(row["train/loss"]), rel=1e-5)


class Previous(Term):
    name = "previous"
    reads_previous_features = True

    def __call__(self, step):
        return step.previous_features.sum()


def test_features_that_nobody_keeps_are_refused(tmp_path):
    with refused("--model.terms that read features or previous_features with --model FedMosaic"):
        mosaic(terms=[Previous()])
    with refused("with --model FedVEMoE", "LabelSmoothing"):
        method_of(FedVEMoE, terms=[Previous()])
    with refused("with --model Centralised"):
        run(Centralised(network=small_network, terms=[Previous()]), images(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def larger_table(vocab_size: int) -> Llama:
    return Llama(vocab_size + 5, width=16, depth=1, heads=2)


def test_tokens_that_no_text_has_are_classes_without_examples():
    """A table may be larger than its tokeniser: the logits of what lies beyond do not count."""
    texts = [{"input_ids": [1, 2 + number % 5, 3, 9], "client": number % 2} for number in range(16)]
    tests = [{**text, "input_ids": [4, *text["input_ids"]]} for text in texts[:4]]
    data = TokenData(texts, tests, vocab_size=24, client="client", context=8, batch_size=4)
    method, data = set_up(FedLC(network=larger_table, optimizer=adam()), data)
    client = data.client(0)
    labels = data.labels(client)
    method.start_client(method.broadcast(client), client, labels)
    inputs, target = next(iter(data.train_batches(client, round=1, epochs=1)))
    logits = method.network(inputs).detach().requires_grad_()
    task = method.task_loss(logits, target)
    method.with_terms({"loss": task, "loss_task": task}, (inputs, target), logits)[
        "loss"
    ].backward()
    counts = method.class_counts
    assert len(counts) + 5 == logits.shape[-1]
    moved = logits.grad.flatten(0, 1).abs().sum(0) > 0
    assert not moved[len(counts) :].any()
    assert torch.equal(moved[: len(counts)], counts > 0)


def hest(**settings) -> HEST:
    return method_of(HEST, costs=costs(), budget=0.8, scope="adapter", **settings)


def test_a_ladders_teacher_has_no_budget(tmp_path):
    """Its stage A with a term of the received network is FedAvg with it; under a budget all
    sequences would be refused, and their logits 0."""
    settings = {"terms": [DistillationTerm()], "optimizer": adam()}
    plain, ladder = FedAvg(network=two_blocks, **settings), ladder_of(budget=0.8, **settings)
    expected = rows_of(fit(plain, tmp_path / "plain", max_rounds=1).run_dir / "metrics.csv")
    found = rows_of(fit(ladder, tmp_path / "ladder", max_rounds=1).run_dir / "metrics.csv")
    for name in ("train/loss", "train/loss_kd"):
        assert expected[0][name] == found[0][name]
    assert torch.equal(plain.server["weights"], ladder.server["weights"])


def test_a_switched_networks_teacher_has_all_layers_at_high():
    method, data = set_up(hest(terms=[DistillationTerm()]))
    client = data.client(0)
    method.receive(method.broadcast(client), client)
    method.train()
    inputs, target = next(iter(data.train_batches(client, round=1, epochs=1)))
    seen = []
    method.received_network.network.register_forward_hook(lambda *passed: seen.append(passed[2]))
    method.training_step((inputs, target))
    with torch.no_grad():
        assert torch.equal(seen[0], method.network(inputs))


def test_features_of_two_passes_are_refused():
    with refused("read features or previous_features with --model HESTLadder", "write ScaledLoss"):
        ladder_of(terms=[ContrastiveTerm()])


def test_a_network_is_tapped_once():
    method, _ = set_up(hest(terms=[ContrastiveTerm()]))
    networks = [method.network, method.received_network, method.previous_network]
    for network in networks:
        taps = [
            sum(type(hook) is FeatureTap for hook in layer._forward_pre_hooks.values())
            for layer in network.modules()
        ]
        assert max(taps) == 1


@pytest.mark.parametrize("kind", ["lora", "spectral"])
def test_the_features_of_an_adapted_layer_are_what_enters_it(kind):
    """Also where one product with W + dW is cheaper, which does not call the base."""
    network = add_adapter(tiny(259, rank=0), kind, rank=16)
    tap, seen = FeatureTap(network), []
    last = network.get_submodule("layers.0.mlp.down_proj")
    last.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    network(torch.ones(2, 64, dtype=torch.int64))
    assert torch.equal(tap.take(), seen[0])
    assert tap.layer is last.base_layer
