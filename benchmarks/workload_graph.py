"""The limit on a card: what somebody writes by hand who knows CUDA and needs this one workload.

A local step is recorded once for each size of batch (a CUDA graph) and played for every client, so
that a card does not wait for hundreds of launches. Data, weights and the sum are on the card; the
host sends a client's order of examples and nothing else. Nothing is encoded, checked, counted,
logged or saved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from workload import WORKLOADS, now, parser, report, travelling, wait, weights

WARM = 3
"""Steps before a recording, in which libraries choose their kernels."""


def main() -> None:
    options = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    work = WORKLOADS[options.workload]
    model = work.build(channels_last=True).to("cuda")
    inputs, target = (tensor.to("cuda") for tensor in work.data())
    before, marks = weights(model), [now()]
    own = [value for value in travelling(model).values() if value.is_floating_point()]
    begin = [value.detach().clone() for value in own]
    total = [torch.zeros_like(value) for value in begin]
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], **work.sgd, fused=True
    )
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=options.precision == "bf16-mixed")

    def step(index: Tensor) -> None:
        with autocast:
            loss = work.loss(model, inputs[index], target[index])
        loss.backward()
        optimizer.step()

    sizes = {
        min(work.batch, work.examples - start) for start in range(0, work.examples, work.batch)
    }
    recorded = {size: record(step, optimizer, size) for size in sizes}
    buffers = [
        state["momentum_buffer"]
        for state in optimizer.state.values()
        if state.get("momentum_buffer") is not None
    ]
    rng, steps, rounds = np.random.default_rng(0), 0, 1 + (options.rounds or work.rounds)
    with torch.no_grad():
        torch._foreach_copy_(own, begin)
        for _ in range(rounds):
            for client in rng.choice(work.clients, work.cohort, replace=False):
                torch._foreach_copy_(own, begin)
                if buffers:
                    torch._foreach_zero_(buffers)
                orders = [rng.permutation(work.examples) for _ in range(work.epochs)]
                order = (
                    torch.from_numpy(np.stack(orders)) + int(client) * work.examples
                ).pin_memory()
                for epoch in order.to("cuda", non_blocking=True):
                    for index in epoch.split(work.batch):
                        recorded[len(index)](index)
                        steps += 1
                torch._foreach_add_(total, own)
            torch._foreach_div_(total, work.cohort)
            torch._foreach_copy_(begin, total)
            torch._foreach_zero_(total)
            wait("cuda")
            marks.append(now())
        torch._foreach_copy_(own, begin)
    moved = weights(model) - before
    report(marks, steps=steps, rounds=rounds, moved=moved, packages=("timm",))


def record(
    step: Callable[[Tensor], None], optimizer: torch.optim.Optimizer, size: int
) -> Callable[[Tensor], None]:
    """Return a local step of ``size`` examples that plays what ``step`` launched."""
    static = torch.arange(size, device="cuda")
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM):
            step(static)
            optimizer.zero_grad()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(static)
    optimizer.zero_grad()  # the next recording has gradients of its own; this one keeps its memory

    def play(index: Tensor) -> None:
        static.copy_(index)
        graph.replay()

    return play


if __name__ == "__main__":
    main()
