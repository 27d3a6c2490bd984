"""Time a LoRA step of the byte model in turn with others, on one thread: transformers with peft on
the same weights, FFA-LoRA, all weights, and stacks of clients. Time generation with and without
merged adapters.

    OMP_NUM_THREADS=1 python benchmarks/language_step.py [--repeats 20] [--rows 16] [--length 64]
        [--clients 8]

A step is forward, loss of the next byte, backward and AdamW. Times of stacks are those of one
client's step. transformers and peft take part where they are installed
(``fl_lightning[language]``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from time import process_time

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fl_lightning.models.language import BYTE_VOCABULARY, Llama, LlamaTiny, merged_lora
from fl_lightning.models.language.llama import transformers_settings, transformers_weights
from fl_lightning.support.memory import keep_freed_memory

RANK, ALPHA = 8, 16
WARM = 3  # calls before those that count
NEW_TOKENS = 16


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def one_client(
    network: Callable[[Tensor], Tensor], module: nn.Module, ids: Tensor
) -> Callable[[], None]:
    """Return a step of one client."""
    optimizer = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=1e-5, fused=True
    )

    def step() -> None:
        loss_of(network(ids[:, :-1]), ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def many_clients(module: nn.Module, ids: Tensor, share_base: bool) -> Callable[[], None]:
    """Return a step of a stack of clients, on ``ids [K, B, T]``.

    Args:
        module: the network of each.
        ids: their tokens.
        share_base: whether they read one copy of the frozen weights.
    """
    tensors = dict(module.named_parameters())
    stacked = {name for name, p in tensors.items() if p.requires_grad or not share_base}
    rows = {name: torch.stack([tensors[name].detach()] * len(ids)) for name in stacked}
    for name in rows:
        rows[name].requires_grad_(tensors[name].requires_grad)
    shared = {name: p for name, p in tensors.items() if name not in stacked}
    optimizer = torch.optim.AdamW(
        [row for row in rows.values() if row.requires_grad], lr=1e-5, fused=True
    )

    def loss(rows: dict[str, Tensor], ids: Tensor) -> Tensor:
        return loss_of(functional_call(module, rows | shared, (ids[:, :-1],)), ids[:, 1:])

    def step() -> None:
        vmap(loss)(rows, ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class WithPeft(nn.Module):
    """transformers and peft on the same base, rank and layers: logits of ids."""

    def __init__(self) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        base = LlamaTiny(BYTE_VOCABULARY, rank=0)
        model = LlamaForCausalLM(LlamaConfig(**transformers_settings(base)))
        model.load_state_dict(transformers_weights(base.state_dict()))
        settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
        self.adapted = inject_adapter_in_model(settings, model)

    def forward(self, ids: Tensor) -> Tensor:
        return self.adapted(input_ids=ids, use_cache=False).logits


def generation(network: Llama, prompts: Tensor, merged: bool) -> Callable[[], None]:
    def run() -> None:
        if merged:
            with merged_lora(network):
                network.generate(prompts, max_new_tokens=NEW_TOKENS)
        else:
            network.generate(prompts, max_new_tokens=NEW_TOKENS)

    return run


def in_turn(contenders: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each call; every contender has its turn in each repetition."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(WARM + repeats):
        for name, run in contenders.items():
            started = process_time()
            run()
            if repeat >= WARM:
                found[name].append(process_time() - started)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", type=int, default=16, help="sequences of a step")
    parser.add_argument("--length", type=int, default=64, help="bytes of a sequence")
    parser.add_argument("--clients", type=int, default=8, help="clients of a stack")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    made = partial(LlamaTiny, BYTE_VOCABULARY, rank=RANK, alpha=ALPHA)
    ids = torch.randint(0, 256, (options.clients, options.rows, options.length + 1))
    lora, ffa, whole = made(), made(ffa=True), made(rank=0)
    clients = options.clients
    contenders = {
        "LoRA": one_client(lora, lora, ids[0]),
        "FFA-LoRA": one_client(ffa, ffa, ids[0]),
        "all weights": one_client(whole, whole, ids[0]),
        f"LoRA, stack of {clients} over one base": many_clients(made(), ids, share_base=True),
        f"LoRA, stack of {clients} with bases": many_clients(made(), ids, share_base=False),
    }
    if find_spec("transformers") and find_spec("peft"):
        adapted = WithPeft()
        contenders["transformers and peft, LoRA"] = one_client(adapted, adapted, ids[0])
    seconds = in_turn(contenders, options.repeats)
    print(
        f"a step of {options.rows} x {options.length} bytes | least ms | median ms | median ratio to LoRA\n---|---|---|---"
    )
    for name, times in seconds.items():
        share = clients if "stack" in name else 1
        ratio = (
            median(time / first for time, first in zip(times, seconds["LoRA"], strict=True)) / share
        )
        print(
            f"{name} | {1e3 * min(times) / share:.1f} | {1e3 * median(times) / share:.1f} | {ratio:.2f}"
        )
    prompts = ids[0, :, :32]
    decoders = {
        "merged": generation(lora, prompts, True),
        "adapters": generation(lora, prompts, False),
    }
    times = in_turn(decoders, options.repeats)
    tokens = options.rows * NEW_TOKENS
    print(
        f"\ngeneration of {options.rows} x {NEW_TOKENS} bytes after 32 | tokens a second (best) | median ratio\n---|---|---"
    )
    for name, found in times.items():
        ratio = median(time / first for time, first in zip(found, times["merged"], strict=True))
        print(f"{name} | {tokens / min(found):.0f} | {ratio:.2f}")


if __name__ == "__main__":
    main()
