"""Batches that are bounded by tokens: the bound holds, nothing is left out, and no engine sees
other ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from toy import run, sgd

from fl_lightning.data import InstructionData, PreferencePairs
from fl_lightning.data.text.token_batches import draw_token_pass, token_batch_sizes
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg

CPU = torch.device("cpu")


def lengths(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(1, rng.integers(2, 40), size=rng.integers(0, 60))


@pytest.mark.parametrize("seed", range(40))
def test_no_batch_exceeds_its_bounds_and_every_sequence_is_seen_once_an_epoch(seed):
    length, most = lengths(seed), 1 + seed % 9
    sizes = token_batch_sizes(length, most, 40)
    drawn = draw_token_pass(length, most, 40, seed=seed, round=2, client=1, epochs=3, steps=None)
    batches = np.split(drawn.position, np.cumsum(drawn.sizes)[:-1])
    assert len(drawn.sizes) == 3 * len(sizes)
    for epoch in range(3 if len(length) else 0):
        own = batches[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        assert sorted(map(len, own), reverse=True) == sizes
        assert sorted(np.concatenate(own)) == list(range(len(length)))
    for batch in batches if len(length) else []:
        assert len(batch) <= most
        assert len(batch) * length[batch].max() <= 40


def test_the_first_steps_depend_neither_on_their_number_nor_on_that_of_epochs():
    length = lengths(3)
    whole = draw_token_pass(length, 8, 40, seed=0, round=1, client=0, epochs=4, steps=None)
    part = draw_token_pass(length, 8, 40, seed=0, round=1, client=0, epochs=2, steps=3)
    assert part.sizes == whole.sizes[:3]
    assert np.array_equal(part.position, whole.position[: len(part.position)])
    other = draw_token_pass(length, 8, 40, seed=0, round=2, client=0, epochs=4, steps=None)
    assert not np.array_equal(other.position, whole.position)


def made(**settings) -> InstructionData:
    return InstructionData(
        num_clients=3,
        examples_per_client=20,
        tests_per_task=1,
        generate=False,
        **{"batch_size": 64, "batch_tokens": 256, **settings},
    )


def test_batches_of_tensors_are_within_the_bound_and_steps_are_counted_before():
    data = made()
    data.setup()
    data.distribute(0, CPU)
    client, seen = data.client(1), []
    for inputs, target in data.train_batches(client, round=1, epochs=2):
        assert inputs["input_ids"].numel() <= 256
        assert len(target) == len(inputs["input_ids"])
        seen.append(len(target))
    assert len(seen) == data.num_steps(client, 2)
    assert sum(seen) == 2 * len(client.train)
    assert len(set(seen)) > 1


def weights(tmp_path, name: str, **settings) -> torch.Tensor:
    method = FedAvg(network="llama_tiny", optimizer=sgd(0.05))
    trainer = run(
        method, made(), tmp_path / name, **{"max_rounds": 2, "max_local_steps": 3, **settings}
    )
    return trainer.method.server["weights"]


def test_engines_and_a_continued_run_take_the_same_batches(tmp_path):
    whole = weights(tmp_path, "whole", engine="sequential")
    torch.testing.assert_close(whole, weights(tmp_path, "batched", engine="batched"))
    weights(tmp_path, "part", max_rounds=1, engine="sequential")
    method = FedAvg(network="llama_tiny", optimizer=sgd(0.05))
    settings = {"max_rounds": 2, "max_local_steps": 3, "engine": "sequential"}
    settings |= {"ckpt_path": "last", "allow_changed": True}
    continued = run(method, made(), tmp_path / "part", **settings)
    assert torch.equal(whole, continued.method.server["weights"])
    (metadata,) = (tmp_path / "batched").rglob("metadata.json")
    assert json.loads(metadata.read_text())["engine"] == "batched"


def test_a_bound_that_not_every_example_meets_is_refused():
    with pytest.raises(
        InputError, match=r"^batch_tokens=71; a batch holds at least one example of context=72"
    ):
        made(batch_tokens=71)


def test_both_sequences_of_a_pair_are_within_the_bound():
    data = PreferencePairs(num_clients=2, examples_per_client=40, batch_size=64, batch_tokens=256)
    data.setup()
    data.distribute(0, CPU)
    sizes = [
        some["input_ids"].numel()
        for some, _ in data.train_batches(data.client(0), round=1, epochs=2)
    ]
    assert 128 < max(sizes) <= 256
    assert len(sizes) == data.num_steps(data.client(0), 2)
    with pytest.raises(InputError, match=r"^batch_tokens=111; .* one pair, .*write 112 or more"):
        PreferencePairs(batch_tokens=111)
