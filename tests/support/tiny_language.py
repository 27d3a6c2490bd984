"""A small instruction federation with a small Llama network: what tests of language runs share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from toy import run

from fl_lightning.data import InstructionData
from fl_lightning.methods import FedAvg, Method
from fl_lightning.models.adapters import add_adapter, largest_rank
from fl_lightning.models.language import Llama


def tiny(vocab_size: int, rank: int | list[int] = 2, ffa: bool = False) -> Llama:
    """One block of 16 features, with adapters unless ``rank`` is 0; a list has the ranks of
    clients."""
    network = Llama(vocab_size, width=16, depth=1, heads=2)
    network.client_ranks = rank if isinstance(rank, list) else []
    if not rank:
        return network
    return add_adapter(network, "ffa" if ffa else "lora", rank=largest_rank(rank))


def adam(lr: float = 0.01):
    return partial(torch.optim.AdamW, lr=lr, eps=1e-4, weight_decay=0.0)


def method_of(
    cls: type[Method] = FedAvg, *, rank: int | list[int] = 2, ffa: bool = False, **settings
) -> Method:
    return cls(network=partial(tiny, rank=rank, ffa=ffa), optimizer=adam(), **settings)


def records(**settings) -> InstructionData:
    """Four clients, one of each cluster, with answers of different lengths."""
    small = {"num_clients": 4, "examples_per_client": 12, "tests_per_task": 1, "batch_size": 4}
    return InstructionData(**{**small, **settings})


def fit(method: Method, folder: Path, data: InstructionData | None = None, **settings):
    """Two rounds of two local steps of all clients."""
    small = {"max_rounds": 2, "max_local_steps": 2, "workers": 1}
    return run(method, data or records(generate=False), folder, **{**small, **settings})


def set_up(method, data=None, round=1):
    """Build a method on data, sentences by default, and return both; it is then in this round."""
    data = data or records(generate=False)
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    torch.manual_seed(0)
    method.build(data)
    method.round = round
    return method, data


def written_then_read(network, prompts, max_new_tokens):
    """Have a budgeted network write answers and read them, check that both take as many joules, and
    return prompts with answers and their labels."""
    answers = network.generate(prompts, None, max_new_tokens=max_new_tokens)
    written = network.measured()["energy/joules_generated"]
    whole = torch.cat((prompts, answers), dim=1)
    labels = torch.full_like(whole, -100)
    before = prompts.shape[1] - 1
    labels[:, before:-1] = answers
    network.expect(labels[:, :-1])
    with torch.no_grad():
        outputs = network(whole[:, :-1])
    assert torch.equal(outputs[:, before:].argmax(-1), answers)
    assert torch.allclose(network.measured()["energy/joules"], written)
    return whole, labels
