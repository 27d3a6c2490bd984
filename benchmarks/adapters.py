"""Time a training step of the byte model with each kind of adapter, in turn, on one thread; then
the options of its switched layers.

    OMP_NUM_THREADS=1 python benchmarks/adapters.py [--repeats 20] [--rows 16] [--length 64]
        [--rank 8]

A step is forward, loss of the next byte, backward and AdamW. Memory is what autograd keeps for the
backward pass, without parameters and buffers. The second table is one pass through all 16 switched
layers on their own, with narrow weights kept; times are those of a pass of n tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.energy.options import OPTIONS
from fl_lightning.energy.switched import SwitchedLinear, add_switches, narrow_kept
from fl_lightning.models.adapters import ADAPTERS
from fl_lightning.models.language import BYTE_VOCABULARY, LlamaTiny
from fl_lightning.support.memory import keep_freed_memory
from fl_lightning.wire import Layout

WARM = 3  # calls before those that count
ALL_DIRECTIONS = 96


def loss_of(network: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(network(ids[:, :-1]).flatten(0, -2), ids[:, 1:].flatten())


def step_of(network: nn.Module, ids: Tensor) -> Callable[[], None]:
    """Return a training step."""
    optimizer = torch.optim.AdamW(
        [p for p in network.parameters() if p.requires_grad], lr=1e-5, fused=True
    )

    def step() -> None:
        loss_of(network, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def kept_bytes(network: nn.Module, ids: Tensor) -> int:
    """Return the bytes that autograd keeps for the backward pass, each storage once."""
    own = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *network.buffers())}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(network, ids)
    del loss
    return sum(sizes.values())


def in_turn(contenders: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each call; every contender has its turn in each repetition."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(WARM + repeats):
        for name, run in contenders.items():
            started = process_time()
            run()
            if repeat >= WARM:
                found[name].append(process_time() - started)
    return found


def print_steps(rank: int, ids: Tensor, repeats: int) -> None:
    """Print a step's time and memory of all kinds."""
    networks: dict[str, nn.Module] = {
        kind: LlamaTiny(BYTE_VOCABULARY, rank=rank, adapter=kind) for kind in ADAPTERS
    }
    for kind in ("svft", "spectral"):
        name = f"{kind}, all {ALL_DIRECTIONS} directions"
        networks[name] = LlamaTiny(BYTE_VOCABULARY, rank=ALL_DIRECTIONS, adapter=kind)
    networks["all weights"] = LlamaTiny(BYTE_VOCABULARY, rank=0)
    seconds = in_turn({name: step_of(network, ids) for name, network in networks.items()}, repeats)
    print(
        "| adapter | values sent | least ms | median ms | ratio to lora | MB kept |\n|---|---|---|---|---|---|"
    )
    for name, times in seconds.items():
        ratio = median(time / first for time, first in zip(times, seconds["lora"], strict=True))
        sent, kept = Layout.of(networks[name]).size, kept_bytes(networks[name], ids)
        print(
            f"| {name} | {sent:,} | {1e3 * min(times):.1f} | {1e3 * median(times):.1f} | {ratio:.2f} |"
            f" {kept / 1e6:.1f} |"
        )


def through_all(layers: list[SwitchedLinear], option: str, inputs: list[Tensor]) -> None:
    with torch.no_grad():
        for layer, x in zip(layers, inputs, strict=True):
            layer.execute(option, x)


def print_options(rank: int, repeats: int) -> None:
    """Print the time of each option at several numbers of tokens."""
    print("\n| tokens | option | least us | ratio to high |\n|---|---|---|---|")
    networks = {
        high: LlamaTiny(BYTE_VOCABULARY, rank=rank, adapter="spectral")
        for high in ("float32", "bfloat16")
    }
    layers = {high: add_switches(network, high=high) for high, network in networks.items()}  # type: ignore[arg-type]
    with narrow_kept(networks["float32"]), narrow_kept(networks["bfloat16"]):
        for tokens in (1, 16, 64, 256, 1024):
            inputs = [torch.randn(tokens, layer.shape[0]) for layer in layers["float32"]]
            contenders: dict[str, Callable[[], None]] = {
                option: partial(through_all, layers["float32"], option, inputs)
                for option in OPTIONS
            }
            contenders["high, bfloat16"] = partial(through_all, layers["bfloat16"], "high", inputs)
            seconds = in_turn(contenders, repeats)
            for name, times in seconds.items():
                ratio = median(
                    time / first for time, first in zip(times, seconds["high"], strict=True)
                )
                print(f"| {tokens} | {name} | {1e6 * min(times):.0f} | {ratio:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", type=int, default=16, help="sequences of a step")
    parser.add_argument("--length", type=int, default=64, help="bytes of a sequence")
    parser.add_argument("--rank", type=int, default=8, help="rank, or number of directions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    print_steps(
        options.rank, torch.randint(0, 256, (options.rows, options.length + 1)), options.repeats
    )
    print_options(options.rank, options.repeats)


if __name__ == "__main__":
    main()
