"""FedMosaic's example of two clients as a federation of this project, beside a plain loop that
shares no code with it."""

from __future__ import annotations

from functools import partial

import torch
from refusals import refused
from toy import run, sgd

from fl_lightning import rng
from fl_lightning.data import TwoClients
from fl_lightning.methods import FedMosaic
from fl_lightning.models import FirstInputs
from fl_lightning.models.pq_lora import adapted_layers

LR, EMA, TAU = 0.1, 0.6, 0.5
SETTINGS = {
    "loss": "squared_error",
    "reference": partial(FirstInputs, inputs=2),
    "rank": 2,
    "num_blocks": 1,
    "head": "frozen",
    "tau": TAU,
    "include_self": True,
    "ema": EMA,
    "sketch_rows": 0.5,
    "sigma": 0.0,
}


def mosaic() -> FedMosaic:
    networks = [partial(FirstInputs, inputs=inputs) for inputs in (4, 6)]
    return FedMosaic(networks=networks, optimizer=sgd(LR), **SETTINGS)


def example() -> TwoClients:
    data = TwoClients()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    return data


def test_two_rounds_are_a_plain_loop(tmp_path):
    """P, Q, gates, relevance and mixtures after two rounds, written out."""
    method, data, start = mosaic(), example(), mosaic()
    run(method, TwoClients(), tmp_path, max_rounds=2, local_epochs=1, engine="sequential")
    with rng.torch_stream(0, "weights"):
        start.build(data)
    W, A, B = [], [], []
    for family in start.families:
        (layer,) = adapted_layers(family)
        W, A, B = [*W, layer.base.weight], [*A, layer.A], [*B, layer.B]
    reference, kept = start.reference.get_parameter("linear.weight"), start.kept
    own = [
        {name: torch.zeros(shape) for name, shape in (("P", (2, 2)), ("Q", 2))} for _ in range(2)
    ]
    gates, mixed, ema = (
        [torch.tensor(0.5)] * 2,
        [(torch.zeros(2, 2), torch.zeros(2))] * 2,
        [0.0, 0.0],
    )
    for round in (1, 2):
        for k in range(2):
            P, Q, g, gradients = own[k]["P"], own[k]["Q"], gates[k], []
            batches = list(data.train_batches(data.client(k), round=round, epochs=1))
            assert [len(target) for _, target in batches] == [8] * 4
            for x, target in batches:
                y = torch.eye(2)[target]
                low = x[:, : 4 if k == 0 else 6] @ A[k].T
                base = x[:, : 4 if k == 0 else 6] @ W[k].T
                mine, theirs = low @ P.T + Q, low @ mixed[k][0].T + mixed[k][1]
                residual = base + ((1 - g) * mine + g * theirs) @ B[k].T - y
                # of the low-rank output; P and Q without the factor 1 - g
                back = 2 / len(x) * residual @ B[k]
                dP, dQ, dg = back.T @ low, back.sum(0), (back * (theirs - mine)).sum()
                small = x[:, :2]
                gradients.append(2 / len(x) * (small @ reference.T - y).T @ small)
                P, Q, g = P - LR * dP, Q - LR * dQ, (g - LR * dg).clamp(0, 1)
            own[k], gates[k] = {"P": P, "Q": Q}, g
            ema[k] = EMA * torch.stack(gradients).mean(0) + (1 - EMA) * ema[k]
        sketches = torch.stack([e.flatten()[kept] for e in ema]).detach()
        unit = sketches / sketches.norm(dim=1, keepdim=True)
        weights = torch.softmax(unit @ unit.T / TAU, dim=1)
        mixed = [
            tuple(sum(weights[k, j] * own[j][name] for j in range(2)) for name in ("P", "Q"))
            for k in range(2)
        ]
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)
    for k in range(2):
        close(
            method.server["adapters"][k, 0],
            torch.cat([own[k]["P"], own[k]["Q"][:, None]], 1).detach(),
        )
        close(method.server["sketches"][k], sketches[k])
        close(method._mixed_for(k)[0], torch.cat([mixed[k][0], mixed[k][1][:, None]], 1).detach())


def test_the_two_clients_hold_one_cloud_each():
    data, again = example(), example()
    classes = [set(data.train_target[data.client(k).train].tolist()) for k in range(2)]
    assert sorted(map(tuple, classes)) == [(0,), (1,)]
    assert all(len(data.client(k).train) == len(data.client(k).val) == 32 for k in range(2))
    centres = torch.tensor([[1, 0, 0.5, -0.25, 0, 0], [0, 1, -0.25, 0.5, 0.25, -0.25]])
    means = torch.stack(
        [data.clouds["train"][data.train_target == label].mean(0) for label in range(2)]
    )
    torch.testing.assert_close(means, centres, rtol=0, atol=4 * 0.3 / 64**0.5)
    assert torch.equal(data.clouds["train"], again.clouds["train"])


def test_bad_settings():
    with refused("TwoClients(examples=1)", "examples: 64"):
        TwoClients(examples=1)
    with refused("TwoClients(noise=-1)", "noise: 0.3"):
        TwoClients(noise=-1)
    with refused("FirstInputs(inputs=0)", "inputs: 4"):
        FirstInputs(2, inputs=0)
