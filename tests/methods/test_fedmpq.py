"""What has to hold of FedMPQ (METHODS.md, section 4): P1 to P5, its grid, and what it says of its
bits."""

import csv
from functools import partial

import pytest
import torch
from refusals import refused
from torch import nn
from toy import ready, run, sgd

from fl_lightning import rng
from fl_lightning.conformance.toy import images, on_images
from fl_lightning.data import IID, Dirichlet, FederatedImages
from fl_lightning.errors import InputError
from fl_lightning.methods import AQFL, FedAvg, FedMPQ, FedMPQKD
from fl_lightning.methods.fedmpq import GROWTH
from fl_lightning.wire import Payload, PayloadError

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.03, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
}


@pytest.mark.parametrize(
    "setting",
    [
        {"representation": "plane"},
        {"rounding": "nearst"},
        {"plane_lr": "match"},
        {"download": "quantized"},
        {"kl": "backward"},
        {"teacher": "jiont"},
        {"teacher": True},
        {"teacher_source": "recieved"},
    ],
)
def test_misspelt_settings_from_python_are_refused(setting):
    """No parser stands before a constructor: each of these would have been taken for another
    setting."""
    ((name, value),) = setting.items()
    with refused(f"--model.{name} {value}", f"write --model.{name} "):
        FedMPQKD(**setting)


class Shortcuts(nn.Module):
    """A main convolution, and shortcuts of two names."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.downsample = nn.Sequential(nn.Conv2d(3, 4, 1))
        self.shortcut = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        return self.head((self.conv(x) + self.downsample(x) + self.shortcut(x)).mean((2, 3)))


@pytest.mark.parametrize("kind", [AQFL, FedMPQ, FedMPQKD])
def test_layers_on_shortcuts_can_stay_in_full_precision(kind, tmp_path):
    """Those inside modules of these names, whatever their kernels."""
    main, shortcuts = ["conv.weight", "head.weight"], ["downsample.0.weight", "shortcut.weight"]
    for quantised in (True, False):
        method = kind(network=Shortcuts, optimizer=sgd(0.1), quantise_shortcuts=quantised)
        run(method, images(), tmp_path / str(quantised), max_rounds=1, max_local_steps=1)
        coded, rest = set(method.codec.names), set(method.rest.shapes)
        assert coded == {*main, *(shortcuts if quantised else ())}
        assert set(shortcuts) <= (coded if quantised else rest)


def silos(num_clients=4):
    """Digits at clients that have enough of them to move their weights."""
    partition = Dirichlet(beta=0.5, min_size=10)
    return FederatedImages(
        dataset="digits",
        num_clients=num_clients,
        partition=partition,
        batch_size=16,
        val_fraction=0.05,
    )


def metrics(trainer):
    with (trainer.run_dir / "metrics.csv").open() as file:
        return [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


def total(rows, name):
    return sum(row[name] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_planes_go_because_of_the_regulariser(optimizer, tmp_path):
    """P1 and P2: no plane at 0; the more the larger lambda_b. P3, in short: accuracy at the claimed
    0.01."""
    pruned, moved, accuracy = [], [], []
    for lambda_b in (0.0, 0.003, 0.01, 0.03):
        method = FedMPQ(lambda_b=lambda_b, optimizer=OPTIMIZERS[optimizer])
        rows = metrics(run(method, silos(), tmp_path / str(lambda_b), max_rounds=16))
        pruned.append(total(rows, "bits/pruned"))
        moved.append(total(rows, "bits/moved"))
        accuracy.append(rows[-1]["test/accuracy"])
    assert pruned[0] == moved[0] == 0
    assert pruned == sorted(pruned)
    assert pruned[3] > 0
    assert moved[3] > 0
    assert accuracy[2] > 0.7


@pytest.mark.slow
def test_no_collapse_at_the_claimed_weight(tmp_path):
    """P3, on kd_default's federation without its label noise: 100 rounds at 0.01."""
    data = FederatedImages(
        dataset="digits",
        num_clients=100,
        partition=Dirichlet(beta=0.1, min_size=1),
        val_fraction=0.05,
    )
    method = FedMPQ(lambda_b=0.01, optimizer=OPTIMIZERS["momentum"])
    rows = metrics(run(method, data, tmp_path, max_rounds=100, participation=0.2, local_epochs=2))
    assert total(rows, "bits/moved") > 0
    assert min(row["test/accuracy"] for row in rows[-20:]) > 0.7


def steps_of(method, optimizer, lambda_b=None, *, network="small_cnn", steps=4):
    """How far a client moves each quantised layer in a few steps, by name."""
    data = FederatedImages(
        dataset="synthetic",
        synthetic_classes=10,
        synthetic_examples=512,
        num_clients=2,
        partition=IID(),
    )
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    settings = {} if lambda_b is None else {"lambda_b": lambda_b}
    method = method(network=network, optimizer=OPTIMIZERS[optimizer], **settings)
    with rng.torch_stream(0, "weights"):
        method.build(data)
    method.round, client = 1, data.client(0)
    method.train()
    method.receive(method.broadcast(client), client)
    local = method.configure_optimizers()
    for number, batch in enumerate(data.train_batches(client, round=1, epochs=1, steps=steps)):
        local.zero_grad()
        outputs = method.training_step(batch, number)
        outputs["loss"].backward()
        local.step()
        method.on_train_batch_end(outputs, batch, number)
    start = method.layout.unpack(method.server["weights"])
    end = {name: parameter.detach() for name, parameter in method.network.named_parameters()}
    end |= method.unrounded() if isinstance(method, FedMPQ) else {}
    return {
        name: float((end[name] - start[name]).norm()) for name in start if start[name].dim() > 1
    }


def ratios(representation, optimizer, **settings):
    ours = steps_of(partial(FedMPQ, representation=representation), optimizer, 0.0, **settings)
    plain = steps_of(FedAvg, optimizer, **settings)
    return torch.tensor([ours[name] / plain[name] for name in ours])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_the_optimisers_own(optimizer):
    """P4: W moves as far as under the same optimiser on W itself."""
    moved = ratios("latent", optimizer)
    assert moved.min() > 0.95
    assert moved.max() < 1.05


def test_what_planes_forbid_of_p4():
    """Under SGD a weight's planes move it one to two times as far, since either side of it may be
    clamped. Adam moves every plane by lr, so that W moves by about s times that, whatever
    ``plane_lr`` does."""
    for optimizer in ("SGD", "momentum"):
        moved = ratios("planes", optimizer)
        assert moved.min() > 1
        assert moved.max() < 2
    assert ratios("planes", "AdamW").max() < 0.5


def built(**settings):
    """FedMPQ's server before its first round, and data."""
    data = ready()
    method = FedMPQ(**settings)
    with rng.torch_stream(0, "weights"):
        method.build(data)
    method.round = 1
    return method, data


@pytest.mark.parametrize("representation", ["latent", "planes"])
def test_lambda_b_keeps_the_papers_ratio_at_the_start(representation):
    """P5: in round 1 pull is 1, and L_bit moves W, where the task moves it by g, by what autograd
    gives the raw planes of one side: n N / (sum n) sum_b 2^b p_b / ||p_b|| / (c sum_b 4^b)."""
    bits = 3
    method, data = built(bits=bits, representation=representation)
    client, generator = data.client(0), torch.Generator().manual_seed(0)
    assert torch.equal(method.broadcast(client).tensor("pull"), torch.ones(len(method.layers)))
    on_the_grid = method.codec.encode(method.server["weights"], [bits] * len(method.layers))
    # so that no digit hangs on rounding
    method.server["weights"] = 1.0001 * method.decode(on_the_grid)
    message = method.broadcast(client)
    method.receive(message, client)
    weights, penalty = method.quantized_weights()
    upstream = {name: torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    task = sum((w * upstream[name]).sum() for name, w in weights.items())

    gradients = [
        torch.autograd.grad(value, method.variables, retain_graph=True)[0]
        for value in (task, penalty)
    ]

    def moved_by(gradient):
        """W before a small step of SGD on what is trained, less W after it, by what the step
        was."""
        before = {name: w.clone() for name, w in method.unrounded().items()}
        with torch.no_grad():
            method.variables -= 0.01 * gradient
        after = {name: w.clone() for name, w in method.unrounded().items()}
        with torch.no_grad():
            method.variables += 0.01 * gradient
        return {name: (before[name] - after[name]).flatten() / 0.01 for name in before}

    by_task, by_penalty = map(moved_by, gradients)
    both_sides = 1 if representation == "latent" else 2
    for name, scale, size in zip(
        method.layers, method.scales.tolist(), method.layer_sizes, strict=True
    ):
        torch.testing.assert_close(
            by_task[name], both_sides * upstream[name].flatten(), rtol=1e-3, atol=1e-3
        )
        step, w = scale / (2**bits - 1), weights[name].detach().flatten()
        magnitudes, powers = (w / step).abs().round().long(), 2.0 ** torch.arange(bits).unsqueeze(1)
        planes = torch.stack([(magnitudes >> b & 1).float() for b in range(bits)]).requires_grad_()
        norms = size * bits / sum(method.layer_sizes) * (planes.square().sum(1) + 1e-8).sqrt().sum()
        (of_planes,) = torch.autograd.grad(norms, planes)
        expected = w.sign() * (powers * of_planes).sum(0) / (step * (powers**2).sum())
        torch.testing.assert_close(by_penalty[name], expected, rtol=1e-2, atol=1e-3)


def test_the_grid_is_kept_halved_and_doubled():
    """s starts at max |W_0|; a few large weights leave it, many double it, planes dropped at the
    top halve it; the pull falls with a layer's size and never rises above 1."""
    method, data = built(prune_threshold=0.02)
    client, start = data.client(0), method.server["grid"].clone()
    tensors = method.layout.unpack(method.server["weights"])
    assert torch.equal(start, torch.stack([tensors[name].abs().max() for name in method.layers]))

    weights = method.server["weights"].clone()
    none = torch.zeros(len(method.layers))
    assert torch.equal(method._next_grid(weights, none), start)
    assert torch.equal(method._next_grid(weights / 4, none + 1), start / 2)
    assert torch.equal(method._next_grid(weights / 4, none + 0.4), start)

    first = tensors[method.layers[0]]
    many = int(GROWTH * 0.02 * first.numel()) + 1
    for count, factor in ((many - 2, 1), (many, 2)):
        larger = first.flatten().clone()
        larger[:count] = 1.5 * start[0]
        changed = method.layout.pack(tensors | {method.layers[0]: larger.view(first.shape)})
        assert float(method._next_grid(changed, none)[0] / start[0]) == factor

    method.server["weights"] = weights / 4
    method.server["grid"] = start / 2
    pull = method.broadcast(client).tensor("pull")
    torch.testing.assert_close(pull, torch.full_like(pull, 0.25))
    method.server["grid"] = start * 2
    assert torch.equal(method.broadcast(client).tensor("pull"), torch.ones_like(pull))


def test_a_layer_of_zeros_can_be_trained():
    data = ready()

    def network(num_classes):
        head = nn.Linear(3 * 32 * 32, num_classes)
        nn.init.zeros_(head.weight)
        return nn.Sequential(nn.Flatten(), head)

    method = FedMPQ(network=network, lambda_b=0.0, optimizer=sgd(0.5))
    method.build(data)
    method.round, client = 1, data.client(0)
    method.receive(method.broadcast(client), client)
    for number, batch in enumerate(data.train_batches(client, round=1, epochs=1)):
        outputs = method.training_step(batch, number)
        gradient = torch.autograd.grad(outputs["loss"], method.variables)[0]
        with torch.no_grad():
            method.variables -= 0.5 * gradient
    sent = Payload.from_bytes(method.upload(client).to_bytes())
    assert method.decode(sent).abs().sum() > 0


def test_metrics_of_the_bits(tmp_path):
    """bits/pruned is what the uploads lack, bits/moved the layers whose width changed, bits/average
    the mean of bits/layer; a round that nobody finished has neither pruned nor moved."""
    lacking = []

    class Counting(FedMPQ):
        def aggregate(self, uploads):
            given = self.allocate(self.mean_budget())
            lacking.append(
                sum(
                    n - sent
                    for upload in uploads.values()
                    for n, sent in zip(given, upload.codes("bits").values.tolist(), strict=True)
                )
            )
            super().aggregate(uploads)

    from callbacks.stressors.straggler_dropout import StragglerDropout

    method = on_images(Counting(bits=4, lambda_b=0.05, prune_threshold=0.3))
    rows = metrics(
        run(method, images(), tmp_path, max_rounds=6, callbacks=[StragglerDropout(0.6)], seed=1)
    )
    trained = [row for row in rows if row["clients/trained"]]
    assert [row["bits/pruned"] for row in trained] == lacking
    assert sum(lacking) > 0
    sizes = dict(
        zip(
            [name.removesuffix(".weight") for name in method.layers],
            method.layer_sizes,
            strict=True,
        )
    )
    layers = [f"bits/layer/{name}" for name in sizes]
    widths = [[4] * len(layers), *([row[layer] for layer in layers] for row in rows)]
    for row, before, after in zip(rows, widths[:-1], widths[1:], strict=True):
        assert row["bits/moved"] == sum(a != b for a, b in zip(before, after, strict=True))
        mean = sum(n * b for n, b in zip(sizes.values(), after, strict=True)) / sum(sizes.values())
        assert row["bits/average"] == pytest.approx(mean)
    assert widths[-1] != widths[0]
    empty = [row for row in rows if not row["clients/trained"]]
    assert all(row["bits/pruned"] == row["bits/moved"] == 0 for row in empty)


def test_why_a_depthwise_layer_may_not_move():
    """On maps of one pixel a depthwise kernel uses its middle tap, BatchNorm cancels that tap's
    size, and what gradient is left belongs to taps so small that the quantiser makes them zero;
    ReLU6 passes nothing at zero. Whatever the representation: the network and the quantiser forbid
    it."""
    torch.manual_seed(0)
    channels = 256
    tap = torch.randn(channels)
    x, upstream = torch.randn(64, channels), torch.randn(64, channels)

    def gradient(tap):
        leaf = tap.clone().requires_grad_()
        out = nn.functional.relu6(nn.functional.batch_norm(x * leaf, None, None, training=True))
        return torch.autograd.grad((out * upstream).sum(), leaf)[0]

    step = tap.abs().max() / 15
    small = tap.abs() < step / 2
    full = gradient(tap).square()
    assert small.float().mean() < 0.2
    assert full[small].sum() > 0.9 * full.sum()
    quantized = gradient((tap / step).round() * step).square()
    assert quantized[small].sum() == 0
    assert quantized.sum() < 0.01 * full.sum()


def test_a_negative_scale_turns_no_layer():
    method, data = built()
    client = data.client(0)
    method.receive(method.broadcast(client), client)
    upload = method.upload(client)
    method.check(upload, client)
    scales = upload.tensor("scales").clone()
    scales[0] = -scales[0]
    with pytest.raises(PayloadError):
        method.check(Payload({**upload, "scales": scales}), client)


@pytest.mark.parametrize("bits", ["4", None, True, [4, "4"], [], 9])
def test_a_budget_is_a_number(bits):
    with pytest.raises(InputError, match="budget"):
        FedMPQ(bits=bits)
