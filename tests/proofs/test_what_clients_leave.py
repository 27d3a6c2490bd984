"""Methods and networks of one's own that keep tensors which live on, or write where no message
goes: whoever trains a client, and whoever trained in its process before, the weights are the
same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toy import run, sgd

from fl_lightning.conformance.toy import images
from fl_lightning.engines.worker import pack, unpack
from fl_lightning.errors import MisuseError
from fl_lightning.hooks import Meter
from fl_lightning.methods import FedAvg
from fl_lightning.models.tensors import SMALL, UnsentBuffers
from fl_lightning.support.tensor_bytes import raw_bytes
from fl_lightning.wire import Payload


def network(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, num_classes))


class KeepsItsNetwork(FedAvg):
    """Clients start half way between what they are sent and what they ended with.

    Args:
        how: what is kept: the parameters, their data, views of them, something that is written
            into, or copies.
    """

    def __init__(self, how: str, **settings):
        super().__init__(**settings)
        self.how, self.scratch = how, {}

    def receive(self, message, client):
        super().receive(message, client)
        for name, value in self.network.named_parameters():
            if name in client.state:
                value.data = 0.5 * value.data + 0.5 * client.state[name].view(value.shape)

    def upload(self, client):
        for name, value in self.network.named_parameters():
            kept = {
                "parameter": value,
                "data": value.data,
                "view": value.view(-1),
                "copy": value.data.clone(),
            }
            kept["scratch"] = self.scratch.setdefault(name, torch.empty_like(value)).copy_(value)
            client.state[name] = kept[self.how]
        return super().upload(client)


class ServesItsNetwork(FedAvg):
    """The server remembers a tensor of the network as it is after its first step.

    Args:
        copies: whether it makes a copy.
    """

    def __init__(self, copies: bool, **settings):
        super().__init__(**settings)
        self.copies = copies

    def next_state(self, sums):
        super().next_state(sums)
        self.layout.write(self.network, self.server["weights"])
        weight = next(self.network.parameters())
        if "before" in self.server:
            self.server["weights"] = self.server["weights"] + self.server["before"].mean()
        self.server["before"] = weight.detach().clone() if self.copies else weight


def weights(method, folder, data=None, **settings):
    settings = {
        "max_rounds": 3,
        "local_epochs": 1,
        "workers": 1,
        "engine": "sequential",
        **settings,
    }
    return run(method, data or images(), folder, **settings).method.server["weights"]


@pytest.mark.parametrize("how", ["parameter", "data", "view", "scratch"])
def test_what_a_client_keeps_of_its_network_is_as_it_was(how, tmp_path):
    def found(how, **settings):
        method = KeepsItsNetwork(how, network=network, optimizer=sgd())
        return weights(method, tmp_path / how / str(settings), **settings)

    copied = found("copy")
    assert torch.equal(found(how), copied)
    assert torch.equal(found(how, workers=2), copied)
    assert not torch.equal(
        weights(FedAvg(network=network, optimizer=sgd()), tmp_path / "not"), copied
    )


def test_what_a_server_keeps_of_its_network_is_as_it_was(tmp_path):
    both = [ServesItsNetwork(copies, network=network, optimizer=sgd()) for copies in (True, False)]
    first, second = (weights(method, tmp_path / str(method.copies)) for method in both)
    assert torch.equal(first, second)
    assert not both[1].server["before"].requires_grad


class Counting(nn.Module):
    """Its outputs depend on a buffer that each batch changes.

    Args:
        kind: of the buffer: BatchNorm's counter, an integer, or one that is not in the
            ``state_dict``.
    """

    def __init__(self, kind: str, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=None if kind == "norm" else 0.1)
        self.head, self.kind = network(num_classes), kind
        zero = torch.zeros(1, dtype=torch.int64 if kind == "integer" else torch.float32)
        self.register_buffer("count", zero, persistent=kind != "outside")

    def forward(self, x):
        if self.training and self.kind != "norm":
            self.count = self.count + 1
        return self.head(self.norm(x)) * (1 + 0.1 * self.count)


@pytest.mark.parametrize("kind", ["norm", "integer", "outside"])
def test_no_client_finds_buffers_that_another_has_written_to(kind, tmp_path):
    losses = []

    def found(**settings):
        method = FedAvg(network=lambda num_classes: Counting(kind, num_classes), optimizer=sgd())
        settings = {
            "max_rounds": 3,
            "local_epochs": 1,
            "workers": 1,
            "engine": "sequential",
            **settings,
        }
        trainer = run(method, images(), tmp_path / str(settings), **settings)
        losses.append(trainer.history["test/loss"].tolist())
        return method.server["weights"]

    alone = found()
    assert torch.equal(found(workers=2), alone)
    assert losses[0] == losses[1]
    assert torch.allclose(found(engine="batched"), alone, atol=1e-6)
    half = weights(
        FedAvg(network=lambda num_classes: Counting(kind, num_classes), optimizer=sgd()),
        tmp_path / "resumed",
        max_rounds=2,
        experiment="half",
        run_name="run",
    )
    assert not torch.equal(half, alone)
    method = FedAvg(network=lambda num_classes: Counting(kind, num_classes), optimizer=sgd())
    path = str(tmp_path / "resumed" / "half" / "run")
    assert torch.equal(
        weights(method, tmp_path / "resumed", ckpt_path=path, allow_changed=True), alone
    )


def test_buffers_are_set_again_where_they_were_written_to():
    method = nn.Module()
    method.network = module = Counting("outside", 4)
    module.register_buffer("cache", None, persistent=False)
    module.register_buffer("table", torch.zeros(SMALL + 1), persistent=False)
    # what a method has is its own affair
    method.register_buffer("own", torch.ones(1), persistent=False)
    unsent = UnsentBuffers(method)
    kept, table = module.norm.num_batches_tracked, module.table
    unsent.restore()
    assert module.table is table
    assert table._version == 0  # nothing was written to
    module.train()(torch.rand(2, 3, 16, 16))
    written, module.cache = module.count, torch.ones(1)
    table[0] = 1
    assert (int(kept), int(written)) == (1, 1)
    unsent.restore()
    assert (int(module.norm.num_batches_tracked), int(module.count), int(table.sum())) == (0, 0, 0)
    assert module.norm.num_batches_tracked is kept  # a module may have it under two names
    assert int(written) == 1  # somebody else may have it
    assert module.cache is None
    with torch.inference_mode():
        module.count = torch.ones(1)
    unsent.restore()
    module.count.data += 1  # which nobody is told of
    unsent.restore()
    assert (int(module.count), int(method.own)) == (0, 1)


class DrawsInEvaluation(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = network(num_classes)

    def forward(self, x):
        return self.head(nn.functional.dropout(x, 0.5, training=True))


def test_what_an_evaluation_draws_is_its_own(tmp_path):
    """A run that is continued measures what the whole one did."""

    def measured(name, **settings):
        given = {"local_epochs": 1, "experiment": name, "run_name": "run", **settings}
        method = FedAvg(network=DrawsInEvaluation, optimizer=sgd())
        history = run(method, images(), tmp_path, **given).history
        return history["test/loss"].tolist()

    whole = measured("whole", max_rounds=3)
    measured("half", max_rounds=2)
    path = str(tmp_path / "half" / "run")
    assert measured("half", max_rounds=3, ckpt_path=path, allow_changed=True) == whole


def test_a_single_value_of_any_stride_travels():
    one = torch.arange(2.0)[::2]
    assert one.stride() == (2,)
    assert raw_bytes(one).tolist() == raw_bytes(torch.zeros(1)).tolist()
    assert Payload.from_bytes(Payload({"one": one}).to_bytes()).tensor("one").tolist() == [0.0]


class States(Meter):
    """What clients keep after the last round, by id."""

    def on_round_end(self, record, context):
        self.found = {id: dict(state) for id, state in context.states.items()}


class KeepsOneTwice(FedAvg):
    def upload(self, client):
        client.state["a"] = client.state["b"] = torch.arange(6.0) + client.state.get(
            "a", torch.zeros(6)
        )
        client.state["half"] = client.state["a"][::2]
        return super().upload(client)


def test_a_client_may_keep_a_tensor_under_two_names(tmp_path):
    method = KeepsOneTwice(network=network, optimizer=sgd())
    states = States()
    weights(method, tmp_path, max_rounds=2, workers=2, callbacks=[states])
    assert states.found
    assert all(torch.equal(state["b"], 2 * torch.arange(6.0)) for state in states.found.values())
    kept = {"a": torch.ones(2), "t": torch.rand(3, 2).T}
    kept["b"] = kept["a"]
    read = unpack(pack(kept))
    assert read.keys() == kept.keys()
    assert all(torch.equal(value, kept[name]) for name, value in read.items())


class CountsReceived(FedAvg):
    """It writes to its client as it receives, and sets what cannot be stacked."""

    def receive(self, message, client):
        super().receive(message, client)
        client.state["received"] = client.state.get("received", torch.zeros(1)) + 1
        self.client = client


def test_a_stack_that_cannot_be_made_leaves_no_trace(tmp_path):
    method = CountsReceived(network=network, optimizer=sgd())
    states = States()
    weights(method, tmp_path, max_rounds=2, engine="batched", callbacks=[states])
    assert {float(state["received"]) for state in states.found.values()} == {2.0}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("", torch.ones(1), "no file of tensors"),
        ("__metadata__", torch.ones(1), "no file of tensors"),
        ("few", torch.eye(3), "to_dense"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused(name, value, said, tmp_path):
    class Keeps(FedAvg):
        def upload(self, client):
            client.state[name] = value.to_sparse() if name == "few" else value
            return super().upload(client)

    with pytest.raises(MisuseError, match=said):
        weights(Keeps(network=network, optimizer=sgd()), tmp_path)
