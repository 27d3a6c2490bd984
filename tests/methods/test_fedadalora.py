"""FedAdaLoRA: which directions the server keeps, what of the others is left, and what is
refused."""

from __future__ import annotations

import csv
import json
from functools import partial

import pytest
import torch
from outcomes import rows_of
from refusals import refused
from tiny_language import adam, fit, method_of, records

from fl_lightning.aggregation.receiving import check_upload
from fl_lightning.conformance.bench import prepare_data
from fl_lightning.methods import FedAdaLoRA
from fl_lightning.models.adapters import add_adapter, budget_at
from fl_lightning.models.language import Llama
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.wire import Payload, PayloadError

LAYERS = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj"]
RANK = 4
DIRECTIONS = RANK * len(LAYERS)


def network(vocab_size: int) -> Llama:
    return add_adapter(
        Llama(vocab_size, width=16, depth=1, heads=2), "adalora", rank=RANK, targets=LAYERS
    )


def method(**settings) -> FedAdaLoRA:
    small = {"final_rank": 1.0, "warmup": 1, "fall": 3, "optimizer": adam()}
    return FedAdaLoRA(network=network, **{**small, **settings})


def built(**settings) -> FedAdaLoRA:
    made = method(**settings)
    made.build(prepare_data(records(generate=False)))
    return made


def factors(made: FedAdaLoRA) -> list[dict[str, torch.Tensor]]:
    """P, lambda and Q of each layer in the server's weights, by hand from the network's names."""
    tensors = made.layout.unpack(made.server["weights"])
    return [
        {part: tensors[f"layers.0.{layer}.lora_{part}"] for part in ("A", "E", "B")}
        for layer in LAYERS
    ]


def alive(made: FedAdaLoRA) -> list[bool]:
    """Whether anything of a direction is not zero."""
    return [
        bool(layer["A"][i].any() or layer["E"][i].any() or layer["B"][:, i].any())
        for layer in factors(made)
        for i in range(RANK)
    ]


class Spy(FedAdaLoRA):
    """Writes down what the server had and got in each round."""

    def aggregate(self, uploads):
        kept, counts = (
            self.server["kept"].clone(),
            {k: float(u.tensor("examples")) for k, u in uploads.items()},
        )
        shares = {k: u.tensor("importance").double() for k, u in uploads.items()}
        self.rounds = [*getattr(self, "rounds", ()), (kept, counts, shares)]
        super().aggregate(uploads)
        self.after = [*getattr(self, "after", ()), (self.server["kept"].clone(), alive(self))]


def test_the_most_important_directions_are_kept_and_the_others_are_gone(tmp_path):
    made = Spy(network=network, final_rank=1.0, warmup=1, fall=3, optimizer=adam())
    trainer = fit(made, tmp_path, max_rounds=6)
    was = torch.ones(DIRECTIONS, dtype=torch.bool)
    for round, ((kept, counts, shares), (after, is_alive)) in enumerate(
        zip(made.rounds, made.after, strict=True), 1
    ):
        assert kept.bool().equal(was)
        assert {len(share) for share in shares.values()} == {int(was.sum())}
        assert all(float(share.sum()) == pytest.approx(1) for share in shares.values())
        mean = sum(counts[k] * shares[k] for k in counts) / sum(counts.values())
        ranked = sorted(
            zip(was.nonzero()[:, 0].tolist(), mean.tolist(), strict=True), key=lambda pair: -pair[1]
        )
        budget = 3 + int(9 * min(1.0, max(0.0, 1 - round / 3)) ** 3)  # of the rounds after this one
        assert sorted(after.nonzero()[:, 0].tolist()) == sorted(i for i, _ in ranked[:budget])
        assert is_alive == after.bool().tolist()  # AdamW moves no direction that was dropped
        was = after.bool()
    with (trainer.run_dir / "metrics.csv").open() as file:
        found = [float(row["adapter/directions"]) for row in csv.DictReader(file)]
    assert found == [float(after.sum()) for after, _ in made.after] == [5, 3, 3, 3, 3, 3]


def test_a_message_of_few_directions_is_small(tmp_path):
    trainer = fit(method(), tmp_path, max_rounds=6)
    rows = rows_of(trainer.run_dir / "ledger.csv")
    first, last = ({int(r["upload"]) for r in rows if r["round"] == n} for n in ("1", "6"))
    head = 19 + sum(3 + len(name) for name in ("examples", "weights", "importance")) + 4 + 4 + 4
    sizes = (16 + 48, 16 + 16, 40 + 16)  # in and out of each layer
    assert first == {head + 4 * (RANK * sum(size + 2 for size in sizes))}
    assert max(last) <= head + 4 * 3 * (64 + 2)


def test_importance_is_what_the_gradients_of_the_steps_say(tmp_path):
    """One step, with an optimiser that does not move: |w g| by autograd, smoothed by hand."""
    made = built(orthogonality=0.0, optimizer=partial(torch.optim.SGD, lr=0.0))
    data = prepare_data(records(generate=False))
    for p in made.network.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    made.server["weights"] = made.layout.read(made.network)
    client = data.client(0)
    made.receive(made.broadcast(client), client)
    batch = next(iter(data.train_batches(client, round=1, epochs=1)))
    outputs = made.training_step(batch)
    outputs["loss"].backward()
    made.on_train_batch_end(outputs, batch, 0)
    shares = made.upload(client).tensor("importance")
    scores = []
    for layer in LAYERS:
        entry = {}
        for part in ("A", "E", "B"):
            weight = dict(made.network.named_parameters())[f"layers.0.{layer}.lora_{part}"]
            sensitivity = (weight * weight.grad).abs().detach()
            mean = 0.15 * sensitivity
            entry[part] = mean * (0.15 * (sensitivity - mean).abs())
        scores += (entry["E"][:, 0] + entry["B"].mean(0) + entry["A"].mean(1)).tolist()
    torch.testing.assert_close(shares, torch.tensor(scores) / sum(scores))


def test_the_regulariser_is_that_of_the_paper():
    made = built(orthogonality=0.3)
    data = prepare_data(records(generate=False))
    client = data.client(0)
    made.receive(made.broadcast(client), client)
    losses = made.training_step(next(iter(data.train_batches(client, round=1, epochs=1))))
    apart = 0.0
    for layer in factors(made):
        for gram in (layer["B"].T @ layer["B"], layer["A"] @ layer["A"].T):
            apart += sum(
                float((gram[i, j] - int(i == j)) ** 2) for i in range(RANK) for j in range(RANK)
            )
    assert losses["loss_orthogonal"].item() == pytest.approx(0.3 * apart, rel=1e-5)
    assert losses["loss"].item() == pytest.approx(
        losses["loss_task"].item() + 0.3 * apart, rel=1e-5
    )


def test_a_secure_sum_keeps_the_same_directions(tmp_path):
    pytest.importorskip("Crypto")
    hashes = set()
    for name, sum in (("plain", None), ("secure", SecureSum(threshold=0.6))):
        trainer = fit(method(), tmp_path / name, max_rounds=3, secure_sum=sum)
        hashes.add(json.loads((trainer.run_dir / "metadata.json").read_text())["weights_sha256"])
    assert len(hashes) == 1


def test_scaled_importance_keeps_the_same_directions_and_leaves_the_clip_to_the_update(tmp_path):
    """Importance of norm 1/4 or more is cut with an update that alone is far within the clip."""
    small = {"optimizer": partial(torch.optim.SGD, lr=1e-3), "weigh_by": "clients"}
    privacy = ClientPrivacy(noise_multiplier=0.0, clip_norm=0.25)
    ended = {}
    for scale in (1.0, 2.0**-10):
        for way in (None, privacy):
            made = method(importance_scale=scale, **small)
            fit(made, tmp_path / f"{scale}-{way is None}", max_rounds=3, privacy=way)
            ended[scale, way is None] = made.server["weights"], made.server["kept"].tolist()
    plain, kept = ended[1.0, True]
    assert ended[2.0**-10, True][0].equal(plain)
    assert [one for _, one in ended.values()].count(kept) == 4
    torch.testing.assert_close(ended[2.0**-10, False][0], plain, rtol=0, atol=1e-8)
    assert not torch.allclose(ended[1.0, False][0], plain, rtol=0, atol=1e-8)


@pytest.mark.parametrize("shares", [[0.2] * DIRECTIONS, [-0.1] + [0.1] * (DIRECTIONS - 1), [1.0]])
def test_no_client_says_more_than_its_share(shares):
    made = built()
    client = prepare_data(records(generate=False)).client(0)
    made.receive(made.broadcast(client), client)
    upload = made.upload(client)
    check_upload(made, upload, client, ())
    told = Payload({**dict(upload.items()), "importance": torch.tensor(shares)})
    with pytest.raises(PayloadError, match=r"at least 0 and at most 1 together|of shape"):
        check_upload(made, told, client, ())
    short = Payload({**dict(upload.items()), "weights": upload.tensor("weights")[1:]})
    with pytest.raises(PayloadError, match="of shape"):
        check_upload(made, short, client, ())


def test_bad_settings():
    for name, value in (
        ("warmup", -1),
        ("fall", 0),
        ("final_rank", -1.0),
        ("orthogonality", float("nan")),
    ):
        with refused(f"--model.{name} {value}", "leave it out"):
            method(**{name: value})
    with refused(
        "--model FedAdaLoRA on a network without AdaLoRA", "--model.network.adapter adalora"
    ):
        method_of(FedAdaLoRA).build(prepare_data(records(generate=False)))


def test_the_budget_falls_as_the_paper_has_it():
    budgets = [budget_at(round, 96, 32, 2, 0, 12) for round in range(1, 15)]
    assert budgets[:2] == [96, 96]
    assert budgets[11:] == [32, 32, 32]
    assert budgets == sorted(budgets, reverse=True)
