"""A network in bfloat16 sends 2 bytes a value, and what arrives is what was sent."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_weighing import Keeps
from tiny_language import adam, fit, records, tiny
from torch import nn
from toy import ready, run, sgd

from fl_lightning import methods
from fl_lightning.aggregation.receiving import check_values
from fl_lightning.errors import InputError
from fl_lightning.methods import (
    CoordinateMedian,
    FedAvg,
    FedMPQ,
    FedMPQKD,
    Method,
    NormClipping,
    Oracle,
    TrimmedMean,
)
from fl_lightning.wire import Layout, Payload, PayloadError


def narrow(vocab_size: int, rank: int = 2):
    return tiny(vocab_size, rank).bfloat16()


def method_of(cls: type[Method] = FedAvg, **settings) -> Method:
    return cls(network=narrow, optimizer=adam(), **settings)


def test_the_way_there_and_back_is_exact_and_half_as_long():
    wide, half = tiny(50), narrow(50)
    assert (Layout.of(wide).dtype, Layout.of(half).dtype) == (torch.float32, torch.bfloat16)
    layout = Layout.of(half)
    sent = Payload({"weights": layout.to_wire(layout.read(half))})
    assert sent.nbytes == len(sent.to_bytes()) == 19 + (3 + len("weights") + 4) + 2 * layout.size
    found = Payload.from_bytes(sent.to_bytes()).tensor("weights")
    assert found.dtype == torch.bfloat16
    before = {name: p.clone() for name, p in half.named_parameters()}
    with torch.no_grad():
        for parameter in half.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    layout.write(half, found)
    assert all(torch.equal(p, before[name]) for name, p in half.named_parameters())


def test_a_network_of_two_precisions_travels_in_float32():
    mixed = narrow(50)
    next(p for p in mixed.parameters() if p.requires_grad).data = torch.zeros(2, 16)
    assert Layout.of(mixed).dtype == torch.float32


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("cls", [FedAvg, Oracle])
def test_the_ledger_and_the_mean(cls, engine, tmp_path, caplog):
    """2 bytes a value both ways; the mean is taken in float64 and rounded to bfloat16 at the
    end."""
    keeps = Keeps()
    trainer = fit(method_of(cls), tmp_path, callbacks=[keeps], engine=engine, max_rounds=1)
    assert "one by one" not in caplog.text
    size = trainer.method.layout.size
    lines = (trainer.run_dir / "ledger.csv").read_text().splitlines()
    columns = [line.split(",") for line in lines]
    of = {name: [row[at] for row in columns[1:]] for at, name in enumerate(columns[0])}
    down, up = (
        next(values for name, values in of.items() if word in name) for word in ("down", "up")
    )
    assert set(down) == {str(19 + 14 + 2 * size)}
    assert set(up) == {str(19 + 14 + 2 * size + (3 + len("examples") + 4))}
    if cls is FedAvg:
        mean = sum(keeps.weight[id] * keeps.sent[id] for id in range(4)) / sum(
            keeps.weight.values()
        )
        server = trainer.method.server["weights"]
        assert server.dtype == torch.bfloat16
        off = (server.double() - mean).abs() / mean.abs().clamp(min=1e-30)
        assert off.max() <= 2**-8  # half a unit in the last place
        assert (server == mean.float().bfloat16()).double().mean() > 0.999


@pytest.mark.parametrize("average", [CoordinateMedian(), TrimmedMean(0.3), NormClipping(1.0)])
def test_robust_averages_take_float32(average, tmp_path):
    trainer = fit(method_of(average=average), tmp_path, max_rounds=2)
    assert trainer.method.server["weights"].dtype == torch.bfloat16
    assert trainer.progress.history[-1]["clients/trained"] == 4


@pytest.mark.parametrize("name", ["FedProx", "FedNTD", "QFedAvg", "FedPQ", "AQFL", "LocalOnly", "Centralised"])  # fmt: skip
def test_every_method_of_language_trains_such_a_network(name, tmp_path):
    """What is coded is computed with in float32."""
    rank = 0 if name == "AQFL" else 2
    method = getattr(methods, name)(network=partial(narrow, rank=rank), optimizer=adam())
    trainer = fit(method, tmp_path, records(generate=False), max_rounds=2)
    last = trainer.progress.history[-1]
    assert last["clients/trained"] == 4
    assert last["test/loss"] < 10


class Mixed(nn.Module):
    """A float32 layer without a bias, then one in bfloat16: what QFedAvg and FedPQ send as it is,
    the bias, is bfloat16, and the whole is not."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.first = nn.Linear(3 * 32 * 32, 8, bias=False)
        self.last = nn.Linear(8, num_classes).bfloat16()

    def forward(self, images):
        return self.last(self.first(images.flatten(1)).bfloat16()).float()


class KeepsRest(Keeps):
    def change_upload(self, upload, *, client, round, context):
        self.weight[client.id] = int(upload.tensor("examples"))
        self.sent[client.id] = upload.tensor("rest").double()
        return upload


@pytest.mark.parametrize("name", ["QFedAvg", "FedPQ"])
def test_a_network_of_two_precisions_is_trained_by_methods_that_code_updates(name, tmp_path):
    """All uploads count, and the bias, which is not coded, becomes the clients' mean."""
    keeps = KeepsRest()
    method = getattr(methods, name)(network=Mixed, optimizer=sgd(0.05))
    trainer = run(method, ready(num_clients=3), tmp_path, callbacks=[keeps], max_rounds=1)
    assert trainer.progress.history[-1]["clients/trained"] == 3
    assert list(method.rest.shapes) == ["last.bias"]
    assert all(torch.equal(bias, bias.bfloat16().double()) for bias in keeps.sent.values())
    assert not torch.equal(keeps.sent[0], keeps.sent[1])
    mean = sum(keeps.weight[id] * keeps.sent[id] for id in range(3)) / sum(keeps.weight.values())
    found = method.layout.unpack(method.server["weights"])["last.bias"]
    torch.testing.assert_close(found, mean.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cls", [FedMPQ, FedMPQKD])
def test_weights_that_are_trained_through_a_quantiser_are_float32(cls, tmp_path):
    with pytest.raises(
        InputError, match=rf"--model {cls.__name__} with a network that is not in float32; .*; "
    ):
        fit(cls(network=partial(narrow, rank=0), optimizer=adam()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_continued_run_ends_as_a_whole_one(tmp_path):
    def end(folder: str, rounds: int, **settings) -> torch.Tensor:
        trainer = fit(
            method_of(), tmp_path / folder, max_rounds=rounds, allow_changed=True, **settings
        )
        return trainer.method.server["weights"]

    whole = end("whole", 3)
    end("parts", 1)
    assert torch.equal(end("parts", 3, ckpt_path="last"), whole)


def test_bfloat16_is_refused_where_the_network_is_float32():
    upload = Payload({"weights": torch.ones(3, dtype=torch.bfloat16)})
    check_values(upload, torch.bfloat16)
    with pytest.raises(
        PayloadError, match=r"'weights' is torch.bfloat16; values travel as torch.float32 or"
    ):
        check_values(upload)
