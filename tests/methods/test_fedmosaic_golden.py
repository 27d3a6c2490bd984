"""FedMosaic's worked example, number by number, through the layers and functions that the method is
made of."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.methods.relevance import (
    cosine,
    gradient_of,
    mix,
    relevance_weights,
    sketch,
    update_ema,
)
from fl_lightning.models.pq_lora import PQLoRALinear, read_adapters, write_global


@pytest.fixture
def example(golden) -> dict:
    return json.loads((golden / "fedmosaic_two_clients.json").read_text())


def f64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().sum() / len(target)


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
    layer.weight.data = weight
    return layer


def adapted(example: dict, k: int) -> PQLoRALinear:
    layer = PQLoRALinear(linear(f64(example["W"][k])), example["settings"]["rank"])
    layer.A.copy_(f64(example["A"][k]))
    layer.B.copy_(f64(example["B"][k]))
    return layer


def close(ours, theirs) -> None:
    torch.testing.assert_close(ours, f64(theirs), rtol=0, atol=1e-9)


def test_worked_example(example):
    settings, clients = example["settings"], range(len(example["x"]))
    x, y = [f64(v) for v in example["x"]], [f64(v) for v in example["y"]]
    layers = [adapted(example, k) for k in clients]
    reference = linear(f64(example["W_s"]))
    outputs, inputs = reference.weight.shape
    ema = [torch.zeros_like(reference.weight) for _ in clients]
    assert len(example["rounds"]) == settings["rounds"]
    for record in example["rounds"]:
        sketches = []
        for k in clients:
            assert len(record["batches"][k]) == settings["local_steps"]
            optimizer = torch.optim.SGD(
                [p for p in layers[k].parameters() if p.requires_grad], lr=settings["lr"]
            )
            for batch in record["batches"][k]:
                optimizer.zero_grad()
                squared_error(layers[k](x[k][batch]), y[k][batch]).backward()
                optimizer.step()
            some = record["gradient_batch"][k]
            gradient = gradient_of(
                reference, "weight", squared_error, x[k][some][:, :inputs], y[k][some][:, :outputs]
            )
            ema[k] = update_ema(ema[k], gradient, settings["ema"])
            kept = torch.tensor(record["kept"][k])
            values = sketch(ema[k], f64(record["noise"][k]), kept)
            sketches.append(values.new_zeros(gradient.numel()).index_put((kept,), values))
        relevance = cosine(torch.stack(sketches), torch.stack(sketches))
        weights = relevance_weights(relevance, settings["tau"])
        uploads = torch.stack([read_adapters([layer]) for layer in layers])
        mixed = mix(weights, uploads)
        for layer, adapters in zip(layers, mixed, strict=True):
            write_global([layer], adapters)

        expected = record["expected"]
        close(torch.stack(ema).detach(), expected["gradient_ema"])
        close(relevance, expected["relevance"])
        close(weights, expected["weights"])
        close(torch.stack([layer.gate.detach() for layer in layers]), expected["beta"])
        for ours, name in ((uploads, ""), (mixed, "_global")):
            close(ours[:, 0, :, :-1], expected[f"P{name}"])
            close(ours[:, 0, :, -1], expected[f"Q{name}"])
