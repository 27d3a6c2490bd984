"""Switched branches: what off computes, what later tokens see, and that nothing that is off is
called."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from laddered import two_blocks
from refusals import refused

from fl_lightning.energy.switched.branches import (
    BranchPlan,
    SkippingCache,
    branch_names,
    switch_branches,
)
from fl_lightning.errors import MisuseError
from fl_lightning.models.language import Llama

PARTS = ("self_attn", "mlp")


def network(blocks: int = 2, seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return two_blocks(259, blocks, rank=0).eval()


def tokens(rows: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))


def all_but(branch: int, rows: int, length: int, branches: int = 4) -> torch.Tensor:
    gates = torch.ones(rows, length, branches, dtype=torch.bool)
    gates[:, :, branch] = False
    return gates


def deleted(plain: Llama, branch: int) -> Llama:
    """The network whose block has no such branch at all, written down without switches."""
    found = deepcopy(plain)
    block = found.layers[branch // 2]

    def without_attention(x, rotary, cache=None):
        return x + block.mlp(block.post_attention_layernorm(x))

    def without_feed_forward(x, rotary, cache=None):
        return x + block.self_attn(block.input_layernorm(x), rotary, cache)

    block.forward = without_feed_forward if branch % 2 else without_attention
    return found


def test_i_zeroing_either_end_of_a_branch_is_the_branch_off():
    plain, ids = network(), tokens()
    for index in range(2):
        ends = {"self_attn": ("qkv_proj", "o_proj"), "mlp": ("gate_up_proj", "down_proj")}
        for place, (part, layers) in enumerate(ends.items()):
            found = []
            for layer in layers:
                cut = deepcopy(plain)
                with torch.no_grad():
                    getattr(getattr(cut.layers[index], part), layer).weight.zero_()
                    found.append(cut(ids))
            switched = deepcopy(plain)
            board = switch_branches(switched)
            with torch.no_grad(), board.using(BranchPlan(all_but(2 * index + place, *ids.shape))):
                found.append(switched(ids))
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("branch", range(4))
def test_iii_a_skipped_branch_is_not_called_and_the_rest_is_the_network_without_it(branch):
    plain, ids = network(), tokens()
    switched, calls = deepcopy(plain), []
    board = switch_branches(switched)
    block = switched.layers[branch // 2]
    norm = block.post_attention_layernorm if branch % 2 else block.input_layernorm
    for module in (getattr(block, PARTS[branch % 2]), norm):
        module.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        with board.using(BranchPlan(all_but(branch, *ids.shape))):
            found = switched(ids)
        assert calls == []
        assert torch.equal(found, deleted(plain, branch)(ids))
        assert torch.equal(switched(ids), plain(ids))
    assert len(calls) == 2


def test_sequences_and_tokens_with_plans_of_their_own():
    """Rows of a batch that differ are those of batches that do not, and so are tokens of the same
    plan."""
    plain, ids = network(), tokens(4)
    switched = deepcopy(plain)
    board = switch_branches(switched)
    masks = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0]], dtype=torch.bool)
    with torch.no_grad():
        with board.using(BranchPlan.of_sequences(masks, ids.shape[1])):
            together = switched(ids)
        for row, mask in enumerate(masks):
            with board.using(BranchPlan.of_sequences(mask.unsqueeze(0), ids.shape[1])):
                assert torch.allclose(switched(ids[row : row + 1])[0], together[row], atol=1e-5)
        late = torch.ones(4, ids.shape[1], 4, dtype=torch.bool)
        late[:, 7:] = masks.unsqueeze(1)
        with board.using(BranchPlan(late)):
            mixed = switched(ids)
    assert torch.allclose(mixed[:, :7], plain(ids)[:, :7], atol=1e-5)
    assert not torch.allclose(mixed[1, 7:], plain(ids)[1, 7:], atol=1e-3)


@pytest.mark.parametrize("written", ["at once", "step by step"])
def test_iv_later_tokens_do_not_depend_on_a_token_that_was_skipped(written):
    plain, ids = network(blocks=1), tokens(2)
    board = switch_branches(plain)
    other = ids.clone()
    other[:, 4] = (other[:, 4] + 9) % 256

    def read(ids, gates):
        if written == "at once":
            with torch.no_grad(), board.using(BranchPlan(gates)):
                return plain(ids)
        cache, found = SkippingCache(), []
        for place in range(ids.shape[1]):
            with torch.no_grad(), board.using(BranchPlan(gates[:, place : place + 1])):
                at = torch.full((len(ids), 1), place)
                found.append(plain.logits(plain.features(ids[:, place : place + 1], at, cache)))
        return torch.cat(found, dim=1)

    gates = torch.ones(2, 12, 2, dtype=torch.bool)
    assert not torch.allclose(read(ids, gates)[:, 5:], read(other, gates)[:, 5:], atol=1e-4)
    gates[:, 4, 0] = False  # the attention alone; both sequences, so no key is computed there
    assert torch.equal(read(ids, gates)[:, 5:], read(other, gates)[:, 5:])
    gates[1, 4, 0] = True  # now one of them writes a key there
    first, second = read(ids, gates), read(other, gates)
    assert torch.allclose(first[0, 5:], second[0, 5:], atol=1e-6)
    assert not torch.allclose(first[1, 5:], second[1, 5:], atol=1e-4)


def test_reading_step_by_step_is_reading_at_once_whatever_is_skipped():
    plain, ids = network(), tokens(3, 10)
    board = switch_branches(plain)
    gates = torch.rand(3, 10, 4, generator=torch.Generator().manual_seed(3)) > 0.4
    gates[:, :4] = True
    gates[:, 6] = False
    cache = SkippingCache()
    with torch.no_grad():
        with board.using(BranchPlan(gates)):
            whole = plain(ids)
        with board.using(BranchPlan(gates[:, :4])):
            found = [
                plain.logits(plain.features(ids[:, :4], torch.arange(4)[None].expand(3, -1), cache))
            ]
        for place in range(4, 10):
            with board.using(BranchPlan(gates[:, place : place + 1])):
                at = torch.full((3, 1), place)
                found.append(plain.logits(plain.features(ids[:, place : place + 1], at, cache)))
    assert torch.allclose(torch.cat(found, dim=1), whole, atol=1e-5)


def test_plans_and_networks_that_do_not_fit_are_refused():
    plain = network()
    board = switch_branches(plain)
    with (
        pytest.raises(MisuseError, match="2 branches"),
        board.using(BranchPlan(torch.ones(1, 3, 2).bool())),
    ):
        pass
    wrong = BranchPlan(torch.ones(1, 3, 4).bool())
    with pytest.raises(MisuseError, match="tokens of shape"), board.using(wrong):
        plain(tokens())
    for other in (torch.nn.Linear(2, 2), plain):
        with refused(f"network {type(other).__name__}"):
            switch_branches(other)
    assert branch_names(2)[2] == "layers.1.self_attn"
