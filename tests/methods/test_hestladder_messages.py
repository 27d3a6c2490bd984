"""What HESTLadder sends, what it refuses, what its work is counted as, and its picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from laddered import branch_costs, built_ladder, ladder_of, three_blocks
from refusals import refused
from tiny_language import fit, records

from callbacks import LadderFigure
from fl_lightning.clock import Deadline, FedBuff
from fl_lightning.compatibility import Run, check_run
from fl_lightning.energy import to_json
from fl_lightning.errors import InputError
from fl_lightning.models.adapters import adapter_layers, merged_lora
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.probing.cost import flops
from fl_lightning.probing.probes import cost
from fl_lightning.run.resume import changed_identity
from fl_lightning.wire import Payload


def test_bytes_by_hand(tmp_path):
    """Masks are a bit a branch, losses four bytes a candidate; stage A sends what FedAvg sends."""
    method, data = built_ladder(network=three_blocks, costs=branch_costs(3))
    client, sizes = data.client(0), {}
    for round in range(1, 6):
        method.round = round
        sent = method.broadcast(client)
        method.receive(sent, client)
        list(method.local_batches(data, client, epochs=1, labels=data.labels(client), steps=1))
        up = method.upload(client)
        sizes[round] = (sent.nbytes, up.nbytes)
        assert Payload.from_bytes(sent.to_bytes()).nbytes == sent.nbytes == len(sent.to_bytes())
        up.require_within(method.upload_limits(client))
    down, back = sizes[1]
    entry = Payload({"masks": method.broadcast(client).codes("masks")}).nbytes - Payload({}).nbytes
    assert sizes[5] == (down + entry, back)
    losses = Payload({"losses": torch.zeros(7)}).nbytes - Payload({}).nbytes
    assert sizes[2][1] == sizes[3][1] == sizes[4][1] == back + losses
    assert losses >= 4 * 7


def test_a_secure_run_is_the_plain_one(tmp_path):
    plain, secret = ladder_of(), ladder_of()
    settings = {"max_rounds": 5}
    fit(plain, tmp_path / "plain", **settings)
    fit(secret, tmp_path / "secret", secure_sum=SecureSum(), **settings)
    for name, tensor in plain.server.items():
        assert torch.equal(tensor, secret.server[name]), name
    assert not plain.server["ladder"][-1].all()


@pytest.mark.slow
@pytest.mark.essential
def test_a_private_run_without_noise_is_the_plain_one_and_noise_is_in_the_losses(tmp_path):
    """Losses are clipped and made noisy with the weights, in units of ``loss_scale``."""
    pytest.importorskip("dp_accounting")

    def found(folder: str, **settings) -> dict[str, torch.Tensor]:
        method = ladder_of(weigh_by="clients", loss_scale=0.1)
        fit(method, tmp_path / folder, max_rounds=5, **settings)
        return method.server

    plain = found("plain")
    clear = found("clear", privacy=ClientPrivacy(noise_multiplier=1e-9, clip_norm=1e3))
    assert not plain["ladder"][-1].all()
    assert torch.equal(clear["ladder"], plain["ladder"])
    torch.testing.assert_close(clear["ladder_losses"], plain["ladder_losses"], rtol=1e-4, atol=1e-4)
    noisy = found("noisy", privacy=ClientPrivacy(noise_multiplier=1.0, clip_norm=0.01))
    moved = (noisy["ladder_losses"][1:] - plain["ladder_losses"][1:]).abs()
    assert bool((moved > 1e-3).all())
    with refused("trainer.privacy with --model HESTLadder", "loss_scale 0.1"):
        fit(
            ladder_of(),
            tmp_path / "refused",
            privacy=ClientPrivacy(noise_multiplier=1.0, clip_norm=1.0),
        )


def test_a_client_without_validation_measures_on_the_labels_that_it_trains_on():
    found = []
    for changed in (False, True):
        method, data = built_ladder(records(generate=False, val_fraction=0.0), round=2)
        client = data.client(0)
        assert len(client.val) == 0
        method.receive(method.broadcast(client), client)
        labels = data.labels(client)
        given = torch.where(labels >= 0, labels.flip(-1), labels) if changed else labels
        next(iter(method.local_batches(data, client, epochs=1, labels=given, steps=1)))
        found.append(method.losses)
    assert not found[0].equal(found[1])


def test_losses_that_cannot_be_are_refused():
    method, data = built_ladder(round=2)
    client = data.client(0)
    method.receive(method.broadcast(client), client)
    list(method.local_batches(data, client, epochs=1, labels=data.labels(client), steps=1))
    good = method.upload(client)
    for value in (-1.0, 1e3):
        wrong = Payload({**{name: good[name] for name in good}, "losses": torch.full((5,), value)})
        with pytest.raises(Exception, match="losses from"):
            method.check(wrong, client)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"budget": 0.0}, "--model.budget 0.0"),
        ({"budget": "half"}, "--model.budget half"),
        ({"budget": [0.5, math.inf]}, "--model.budget [0.5, inf]"),
        ({"budget": 0.05}, "--model.budget 0.05 where the cheapest options cost"),
        ({"subset_rounds": 2}, "--model.subset_rounds 2 with --model.levels 2"),
        ({"all_on_rounds": 0}, "--model.all_on_rounds 0"),
        ({"search": "greedy"}, "--model.search greedy"),
        ({"phase": "prompt"}, "--model.phase prompt"),
        ({"costs": []}, "--model.costs []"),
        ({"costs": "llama_tiny"}, "a ladder of branches with a table of costs of the scope model"),
        ({"costs": branch_costs(3)}, "a table of 6 groups for a network of 4"),
        ({"network": "mlp"}, ""),
    ],
)
def test_bad_settings_are_refused(settings, said):
    with refused(said):
        built_ladder(**settings)


def test_uploads_of_any_round_are_refused():
    """A client of stage A has no losses for the round in which its upload arrives."""
    run_of = Run(ladder_of(), rounds=FedBuff(4, 2), has_clock=True)
    with refused("--trainer.rounds FedBuff with --model HESTLadder", "Deadline"):
        check_run(run_of)
    check_run(Run(ladder_of(), rounds=Deadline(1.0), has_clock=True))


def test_a_run_is_not_continued_where_its_table_of_costs_has_changed(tmp_path):
    file, run = tmp_path / "costs.json", tmp_path / "runs"
    file.write_text(to_json(branch_costs()))
    begun = fit(ladder_of(costs=str(file)), run, max_rounds=1)
    metadata = json.loads((begun.run_dir / "metadata.json").read_text())
    assert metadata["costs_label"] == branch_costs().label
    assert metadata["costs_scope"] == "branch"
    again = {"ckpt_path": str(begun.run_dir), "max_rounds": 1}
    fit(ladder_of(costs=str(file)), run, **again)
    file.write_text(to_json(branch_costs(q99=2.0)))
    said = f"tables of model.costs: {metadata['costs_sha256'][:12]} -> "
    with pytest.raises(InputError, match=said):
        fit(ladder_of(costs=str(file)), run, **again)
    assert not changed_identity({"partition": "p"}, {"partition": "p", "costs": "c"})  # of before


def test_a_probe_counts_what_a_device_computes():
    """With all branches, of adapters that are merged: nothing is merged within a measured pass."""
    method, data = built_ladder(budget=1.0)
    network, index = method.deploy(data.client(0)).eval(), torch.arange(1)
    inputs = data.inputs("test", index)
    subject = SimpleNamespace(method=method, data=data, states={}, uploads=None)
    with merged_lora(network.network):
        merged = flops(network.network, inputs)
    assert cost(subject).metrics["cost/flops"] == merged < flops(network.network, inputs)
    assert not any(layer.merged for layer in adapter_layers(network).values())


def test_clients_are_of_one_kind_where_they_do_the_same_work():
    method, data = built_ladder(budget=[0.6, 0.9], round=1)
    kinds = {}
    for round in range(1, 7):
        method.round = round
        kinds[round] = [method.work_kind(data.client(id)) for id in range(4)]
    assert kinds[1] == [kinds[1][0]] * 4
    for round in (2, 3, 4, 5):
        assert kinds[round] == 2 * kinds[round][:2] != 4 * kinds[round][:1]
    assert kinds[5] == kinds[6]
    assert not {*kinds[2]} & {*kinds[3]}, "the least share of what is drawn falls"


def test_a_run_has_a_picture_of_its_ladder(tmp_path):
    fit(ladder_of(), tmp_path, max_rounds=5, callbacks=[LadderFigure()])
    assert list(Path(tmp_path).rglob("figures/ladder.png"))
