"""The lean Llama: transformers' logits, causality, relative positions, stacks of clients, and
generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fl_lightning.errors import InputError, MisuseError
from fl_lightning.models.language import Llama
from fl_lightning.models.language.llama import Variant, transformers_settings, transformers_weights

VOCABULARY = 259
LENGTHS = [17, 3, 9, 1, 12]


def network(seed: int = 0, **sizes: Any) -> Llama:
    """A network whose attention is far from even, so that a wrong position shows."""
    torch.manual_seed(seed)
    made = Llama(VOCABULARY, **sizes)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            else:
                weight.mul_(1 if "embed" in name else 3)
    return made


def prompts(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Prompts padded on the right with tokens that are also text, and their mask."""
    torch.manual_seed(seed)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return torch.randint(0, VOCABULARY, mask.shape), mask


def by_whole_passes(made: Llama, prompt: Tensor, count: int) -> list[int]:
    """Greedy decoding that computes everything again for each token."""
    ids = prompt
    for _ in range(count):
        ids = torch.cat((ids, made(ids[None])[0, -1].argmax()[None]))
    return ids[len(prompt) :].tolist()


def test_it_has_the_weights_that_it_is_said_to_have_and_no_buffers():
    made = Llama(VOCABULARY, width=96, depth=4, heads=4)
    assert sum(weight.numel() for weight in made.parameters()) == 468_096
    assert not [*made.buffers()]
    assert set(made.state_dict()) == {name for name, _ in made.named_parameters()}


@pytest.mark.parametrize("sizes", [{}, {"width": 32, "depth": 2, "heads": 2, "hidden": 56}])
def test_logits_and_gradients_are_those_of_transformers(sizes: dict[str, int]):
    transformers = pytest.importorskip("transformers")
    ours = network(**sizes)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**transformers_settings(ours)))
    theirs.load_state_dict(transformers_weights(ours.state_dict()))
    ids, mask = prompts()
    expected = theirs(input_ids=ids, attention_mask=mask.long()).logits[mask]
    got = ours({"input_ids": ids, "attention_mask": mask})[mask]
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
    expected.logsumexp(-1).mean().backward()
    got.logsumexp(-1).mean().backward()
    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    found = transformers_weights(gradients)
    for name, weight in theirs.named_parameters():
        scale = weight.grad.abs().max().item()
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-3, atol=1e-4 * scale, msg=name)


def test_shared_heads_of_keys_are_equal_heads():
    """A network of four heads whose keys and values are two by two the same has the logits, and the
    answers from its cache, of one with two heads of keys and values."""
    shared = network(width=32, depth=2, heads=4, variant=Variant(key_heads=2, tied=False))
    whole = Llama(VOCABULARY, width=32, depth=2, heads=4, variant=Variant(tied=False))
    weights = shared.state_dict()
    for name in [name for name in weights if "qkv" in name]:
        query, keys, values = weights[name].split((32, 16, 16))
        twice = [one.view(2, 8, 32).repeat_interleave(2, 0).flatten(0, 1) for one in (keys, values)]
        weights[name] = torch.cat((query, *twice))
    whole.load_state_dict(weights)
    ids, mask = prompts()
    torch.testing.assert_close(shared(ids), whole(ids))
    assert not torch.allclose(
        shared(ids),
        F.linear(shared.features(ids, torch.arange(17)[None]), shared.embed_tokens.weight),
    )
    answers = [
        one.generate(ids, mask, max_new_tokens=6, eos=None, pad=0) for one in (shared, whole)
    ]
    assert torch.equal(*answers)


def test_a_token_sees_nothing_behind_it():
    made = network()
    ids, mask = prompts()
    other = torch.where(mask, ids, (ids + 1) % VOCABULARY)
    torch.testing.assert_close(made(other)[mask], made(ids)[mask])
    assert not torch.allclose(made(other)[~mask], made(ids)[~mask])
    torch.testing.assert_close(made({"input_ids": ids}), made(ids))


def test_attention_sees_distances_and_not_places():
    made = network().double()
    ids, _ = prompts()
    places = torch.arange(ids.shape[1])[None]
    torch.testing.assert_close(
        made.features(ids, places + 40), made.features(ids, places), rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(made.features(ids, places * 2), made.features(ids, places), atol=0.1)


def test_a_stack_of_clients_has_the_gradients_of_each():
    made = network(width=24, depth=2, heads=2).double()
    ids = torch.randint(0, VOCABULARY, (3, 4, 11))
    stacks = {
        name: torch.stack([weight.detach() * (1 + 0.1 * k) for k in range(3)])
        for name, weight in made.named_parameters()
    }

    def loss(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        return functional_call(made, weights, (ids,)).logsumexp(-1).mean()

    together = vmap(grad(loss))(stacks, ids)
    for k in range(3):
        alone = grad(loss)({name: stack[k] for name, stack in stacks.items()}, ids[k])
        for name, gradient in alone.items():
            torch.testing.assert_close(together[name][k], gradient)


def test_bf16_keeps_the_logits_near():
    made, (ids, mask) = network(), prompts()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = made(ids)
    assert rounded.dtype == torch.bfloat16
    exact = made(ids)
    assert (rounded.float() - exact)[mask].norm() < 0.1 * exact[mask].norm()


def test_prompts_of_different_lengths_get_what_each_gets_alone():
    made, (ids, mask) = network(), prompts()
    together = made.generate(ids, mask, max_new_tokens=12)
    assert together.shape == (len(LENGTHS), 12)
    assert len({*together.flatten().tolist()}) > 10
    for row, length in enumerate(LENGTHS):
        assert together[row].tolist() == by_whole_passes(made, ids[row, :length], 12)
    torch.testing.assert_close(made.generate(ids, mask, max_new_tokens=12), together)
    places = torch.arange(ids.shape[1])
    back = (places - (ids.shape[1] - torch.tensor(LENGTHS)[:, None])) % ids.shape[1]
    left = made.generate(ids.gather(1, back), mask.flip(1), max_new_tokens=12)  # padded on the left
    assert left.equal(together)


def test_generation_ends_at_eos():
    made, (ids, mask) = network(), prompts()
    free = made.generate(ids, mask, max_new_tokens=12).tolist()
    eos = free[0][4]
    ended = made.generate(ids, mask, 12, eos, pad=258).tolist()
    for tokens, before in zip(ended, free, strict=True):
        end = before.index(eos) + 1 if eos in before else 12
        assert tokens == (before[:end] + [258] * 12)[: len(tokens)]
    alone = made.generate(ids[:1], None, 12, eos)
    assert alone.tolist() == [free[0][: free[0].index(eos) + 1]], "it stops when all have ended"


def test_what_cannot_be_generated_or_built_is_refused():
    made = network(width=24, depth=1, heads=2)
    with pytest.raises(MisuseError, match="one token or more"):
        made.generate(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[1, 1, 0], [0, 0, 0]]))
    with pytest.raises(MisuseError, match="one token or more"):
        made.generate(torch.zeros(2, 3, dtype=torch.int64), max_new_tokens=0)
    for sizes in ({"width": 20, "heads": 4}, {"depth": 0}, {"heads": 0}):
        with pytest.raises(InputError, match="multiple of 2"):
            Llama(VOCABULARY, **sizes)
