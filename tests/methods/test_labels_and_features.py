"""Methods and terms that read a client's labels, or features of its models: what they equal, what a
client keeps, and the mistakes of public code, each of which a golden file catches."""

from __future__ import annotations

import csv
import math
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from golden_adapters import found_by_a_file
from lightning.fabric import Fabric
from torch import nn
from toy import ready, run, sgd

from callbacks import LabelNoise
from fl_lightning.conformance.toy import images, small_network
from fl_lightning.data import Dirichlet
from fl_lightning.engines.root_set import RootSet
from fl_lightning.errors import InputError
from fl_lightning.methods import (
    MOON,
    SCAFFOLD,
    BalancedSoftmax,
    CalibratedLogits,
    ContrastiveTerm,
    FedAvg,
    FedDyn,
    FedLC,
    FedMPQ,
    FedSAM,
    FLTrust,
    Term,
)
from fl_lightning.models.features import FeatureTap


def begun(method, labels=(0, 0, 0, 1, 2, 2)):
    """The method after a client has received it, with other labels than it has; and a batch."""
    data = ready(num_clients=2)
    method.build(data)
    method.round, client = 1, data.client(0)
    method.receive(method.broadcast(client), client)
    method.start_terms(client, torch.tensor(labels))
    method.train()
    inputs, _ = next(iter(data.train_batches(client, round=1, epochs=1)))
    return method, (inputs[: len(labels)], torch.tensor(labels))


@pytest.mark.parametrize(
    ("term", "weigh"),
    [
        (BalancedSoftmax(0.5), lambda n: n.sqrt()),
        (CalibratedLogits(2.0), lambda n: (-2 / n.sqrt().sqrt()).exp()),
    ],
)
def test_classes_are_weighed_by_the_labels_that_a_client_trains_on(term, weigh):
    """The term and the task loss are -log of a share w_y e^{z_y} / sum w_c e^{z_c}; of absent
    classes w is 0, and nothing moves their logits."""
    method, (inputs, target) = begun(FedAvg(network=small_network, terms=[term]))
    outputs = method.training_step((inputs, target))
    mass = method.network(inputs).exp() * weigh(torch.tensor([3.0, 1.0, 2.0] + [0.0] * 7))
    expected = -(mass.gather(1, target[:, None])[:, 0] / mass.sum(1)).log().mean()
    torch.testing.assert_close(outputs["loss"], expected)
    outputs["loss"].backward()
    assert (list(method.network.parameters())[-1].grad[3:] == 0).all()


def test_equal_counts_are_no_shift():
    method, batch = begun(
        FedAvg(network=small_network, terms=[BalancedSoftmax()]), tuple(range(10))
    )
    outputs = method.training_step(batch)
    torch.testing.assert_close(outputs["loss"], outputs["loss_task"])


def test_labels_that_noise_has_made_are_classes_of_the_client(tmp_path):
    """Else one of them would have a logit of minus infinity, and an infinite loss."""
    data, noise = (
        ready(num_clients=4, partition=Dirichlet(0.1)),
        LabelNoise(1, clients=1.0, labels=0.9),
    )
    method = FedLC(network=small_network, optimizer=sgd(0.05))
    trainer = run(method, data, tmp_path, max_rounds=2, callbacks=[noise])
    with (trainer.run_dir / "metrics.csv").open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file)]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


def test_a_clients_first_round_of_moon_is_that_of_fedavg(tmp_path):
    """z_x and z_prev are the same, so the term has no gradient; in the next round it has."""
    servers = []
    for rounds in (1, 2):
        for kind in (MOON, FedAvg):
            method = kind(network=small_network, optimizer=sgd(0.05))
            run(method, images(), tmp_path, max_rounds=rounds)
            servers.append(method.server["weights"])
    torch.testing.assert_close(*servers[:2], rtol=0, atol=1e-6)
    assert float((servers[2] - servers[3]).abs().max()) > 1e-4


@pytest.mark.parametrize("settings", [{"workers": 2}, {"engine": "batched"}], ids=str)
def test_what_terms_keep_is_the_same_in_every_engine(settings, tmp_path):
    """Of FedDyn beside its own state."""
    servers = []
    for more in ({"workers": 1, "engine": "sequential"}, settings):
        method = FedDyn(
            network=small_network,
            optimizer=sgd(0.02),
            terms=[ContrastiveTerm(), CalibratedLogits()],
        )
        run(method, images(), tmp_path, **{"max_rounds": 3, "participation": 0.5, **more})
        servers.append(method.server["weights"])
    torch.testing.assert_close(*servers, rtol=0, atol=1e-5 if "engine" in settings else 0)


def test_the_previous_model_of_a_quantised_method_is_what_it_trained():
    """And not the network, whose quantised layers stay as they were received."""
    settings = {"network": small_network, "optimizer": sgd(0.05)}
    method, batch = begun(FedMPQ(terms=[ContrastiveTerm()], **settings))
    method.training_step(batch)["loss"].backward()
    method.configure_optimizers().step()
    client = ready(num_clients=2).client(0)
    method.end_client(client)
    kept = method.layout.unpack(client.state["previous_weights"])
    received = method.layout.unpack(method.server["weights"])
    for name, trained in method.unrounded().items():
        assert torch.equal(kept[name], trained)
        assert not torch.equal(kept[name], received[name])
    others = method.rest.unpack(method.rest.read(method.network))
    assert all(torch.equal(kept[name], tensor) for name, tensor in others.items())


@pytest.mark.parametrize("kind", [FedSAM, SCAFFOLD])
def test_terms_go_with_other_steps(kind):
    terms = [CalibratedLogits(), ContrastiveTerm()]
    method, batch = begun(kind(network=small_network, optimizer=sgd(0.05), terms=terms))
    outputs = method.training_step(batch)
    parts = sum(outputs[f"loss_{name}"] for name in ("task", "calibrated", "contrast"))
    torch.testing.assert_close(outputs["loss"], parts)  # SCAFFOLD's correction is 0 at first


def test_a_small_temperature_does_not_overflow():
    method, batch = begun(MOON(temperature=1e-4, network=small_network))
    weights = method.layout.read(method.previous_network)
    weights[: method.trained_values] *= -1
    method.layout.write(method.previous_network, weights)
    outputs = method.training_step(batch)
    outputs["loss"].backward()
    assert outputs["loss"].isfinite()
    assert all(p.grad.isfinite().all() for p in method.network.parameters())


def test_frozen_networks_are_in_evaluation_mode_and_untouched():
    method, batch = begun(MOON(network=small_network))
    before = method.layout.read(method.previous_network)
    method.training_step(batch)["loss"].backward()
    for network in (method.received_network, method.previous_network):
        assert not network.training
        assert torch.equal(method.layout.read(network), before)
        assert all(p.grad is None for p in network.parameters())


def test_a_root_set_keeps_no_model():
    """FLTrust's server trains on it as a client would, of which it would else remember the last
    round."""
    data = ready(num_clients=2, public_examples=20)
    method = MOON(network=small_network, optimizer=sgd(0.5), average=FLTrust(root_steps=3))
    method.build(data)
    root = RootSet(Fabric(accelerator="cpu", devices=1), method, data)
    method.round = 1
    assert torch.equal(root.update(3), root.update(3))


class OfReceived(Term):
    name = "received"
    reads_received_features = True

    def __call__(self, step):
        return step.received_features.mean()


def test_a_term_may_read_one_kind_of_features_alone():
    method, batch = begun(FedAvg(network=small_network, terms=[OfReceived()]))
    assert method.training_step(batch)["loss_received"] != 0
    assert not hasattr(method, "previous_network")


class HeadFirst(nn.Module):
    """Its last layer is registered first."""

    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(4, num_classes)
        self.base = nn.Linear(2, 4)

    def forward(self, inputs):
        return self.head(self.base(inputs))


def test_features_are_what_enters_the_layer_that_is_called_last():
    network, inputs = HeadFirst(3), torch.ones(5, 2)
    tap = FeatureTap(network)
    copy = deepcopy(network)
    network(inputs)
    assert torch.equal(tap.take(), network.base(inputs))
    copy(2 * inputs)  # has a tap of its own
    network(inputs)
    assert torch.equal(tap.take(), network.base(inputs))


def test_a_network_without_a_linear_layer_is_refused(tmp_path):
    def convolution(num_classes):
        return nn.Sequential(nn.Conv2d(3, num_classes, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    with pytest.raises(
        InputError, match="has no linear layer; features are what enters the last one"
    ):
        run(MOON(network=convolution), images(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


# Mistakes of public code


class CountsOfAll(FedLC):
    """PFLlib: the counts of all clients, on balanced data a shift that is the same for all
    classes."""

    def build(self, data):
        super().build(data)
        self.every_label = data.train_target

    def start_terms(self, client, labels):
        super().start_terms(client, self.every_label)


class WithoutTrueClass(FedLC):
    """The paper: the denominator has all classes but the true one, and the loss no lower bound."""

    def with_terms(self, outputs, batch, logits):
        shifted = logits + self.terms[0].shift(self.class_counts)
        others = shifted.masked_fill(F.one_hot(batch[1], logits.shape[1]).bool(), -torch.inf)
        true = shifted.gather(1, batch[1][:, None])[:, 0]
        loss = (others.logsumexp(1) - true).mean()
        return {**outputs, "loss": loss, "loss_calibrated": loss - outputs["loss"]}


class KeepsAbsentClasses(FedLC):
    """A count of 0 taken for one of 1."""

    def start_terms(self, client, labels):
        super().start_terms(client, labels)
        self.class_counts = self.class_counts.clamp(min=1)


class FrozenInTrainingMode(MOON):
    """PFLlib, the authors: the global and the previous network are in training mode."""

    def train(self, mode=True):
        super().train(mode)
        for network in (self.received_network, self.previous_network):
            network.train(mode)
        return self


class PreviousIsReceived(MOON):
    """The previous model is never the client's own."""

    def end_terms(self, client):
        pass


class Exchanged(MOON):
    """The previous and the global model are exchanged."""

    def start_terms(self, client, labels):
        super().start_terms(client, labels)
        mine, theirs = (
            self.layout.read(each) for each in (self.previous_network, self.received_network)
        )
        self.layout.write(self.previous_network, theirs)
        self.layout.write(self.received_network, mine)


FAULTS = [CountsOfAll, WithoutTrueClass, KeepsAbsentClasses]
FAULTS += [FrozenInTrainingMode, PreviousIsReceived, Exchanged]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_golden_file_catches_it(fault, tmp_path):
    assert found_by_a_file(fault, tmp_path)
