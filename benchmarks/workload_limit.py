"""The limit: what somebody writes by hand who knows the machine and needs this one workload.

As many processes as there are cores, of one thread each, share the cohort. Weights are views of one
vector, so that a client begins with one copy and ends with one addition to its process's sum, in
memory that both see. Deep networks are channels last, freed memory is kept, SGD is fused. A network
of one hidden layer (W4) has no autograd at all: the whole share of a process is one stack of matrix
products. Nothing is encoded, checked, counted, logged or saved, and no round can be continued.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import multiprocessing
from collections.abc import Callable
from multiprocessing.synchronize import Barrier

import numpy as np
import torch
from torch import Tensor, nn
from workload import WORKLOADS, OneHidden, Workload, now, parser, report, travelling

from fl_lightning.support.memory import keep_freed_memory

PROCESSES = len(os.sched_getaffinity(0))
PATIENCE = 600.0  # seconds that a process waits for the others at the end of a round
Share = Callable[[np.ndarray, np.random.Generator, Tensor, Tensor], int]
"""Trains some clients from a vector of weights, adds what they end with to a sum, and returns the
steps."""


def main() -> None:
    options = parser(__doc__).parse_args()
    work = WORKLOADS[options.workload]
    keep_freed_memory()
    begun = now()
    model = work.build(channels_last=True)
    server = flatten(model).share_memory_()
    before = server.clone()
    sums = [torch.zeros_like(server).share_memory_() for _ in range(PROCESSES)]
    steps = torch.zeros(PROCESSES, dtype=torch.int64).share_memory_()
    inputs, target = (tensor.share_memory_() for tensor in work.data())
    train: Share = (
        Stack(work, inputs, target)
        if work.network is OneHidden
        else InTurn(work, model, inputs, target)
    )
    rounds = 1 + (options.rounds or work.rounds)
    context = multiprocessing.get_context("fork")  # no thread has been started yet
    barrier = context.Barrier(PROCESSES, timeout=PATIENCE)
    given = (work, rounds, server, sums, steps, barrier, train)
    others = [
        context.Process(target=take_part, args=(rank, *given)) for rank in range(1, PROCESSES)
    ]
    for other in others:
        other.start()
    marks = [begun, *take_part(0, *given)]
    for other in others:
        other.join()
    moved = (server - before)[are_weights(model)]
    report(marks, steps=int(steps.sum()), rounds=rounds, moved=moved, packages=("timm",))


def take_part(
    rank: int,
    work: Workload,
    rounds: int,
    server: Tensor,
    sums: list[Tensor],
    steps: Tensor,
    barrier: Barrier,
    train: Share,
) -> list[float]:
    """Train this process's clients of every round; the clock at the end of each round."""
    draws, orders, marks = np.random.default_rng(0), np.random.default_rng([1, rank]), []
    piece = slice(len(server) * rank // PROCESSES, len(server) * (rank + 1) // PROCESSES)
    for _ in range(rounds):
        cohort = draws.choice(work.clients, work.cohort, replace=False)
        try:
            steps[rank] += train(cohort[rank::PROCESSES], orders, server, sums[rank])
        except BaseException:
            barrier.abort()
            raise
        barrier.wait()
        server[piece] = sum(one[piece] for one in sums) / work.cohort
        barrier.wait()
        sums[rank].zero_()
        marks.append(now())
    return marks


class InTurn:
    """Clients one after another, through autograd."""

    def __init__(self, work: Workload, model: nn.Module, inputs: Tensor, target: Tensor) -> None:
        self.work, self.model, self.inputs, self.target = work, model, inputs, target
        self.own = flatten(model)
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def __call__(
        self, clients: np.ndarray, rng: np.random.Generator, server: Tensor, total: Tensor
    ) -> int:
        steps = 0
        for client in map(int, clients):
            self.own.copy_(server)
            steps += self._train(client, rng)
            total += self.own
        return steps

    def _train(self, client: int, rng: np.random.Generator) -> int:
        work, steps = self.work, 0
        optimizer = torch.optim.SGD(self.trained, **work.sgd, fused=True)
        for _ in range(work.epochs):
            order = torch.from_numpy(rng.permutation(work.examples)) + client * work.examples
            for index in order.split(work.batch):
                loss = work.loss(self.model, self.inputs[index], self.target[index])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        return steps


class Stack:
    """All clients of a process at once: one hidden layer with ReLU, whose gradients are written
    out.

    A client takes one step over all of its examples, in whichever order.
    """

    def __init__(self, work: Workload, inputs: Tensor, target: Tensor) -> None:
        assert work.epochs == 1
        assert work.batch >= work.examples
        self.inputs = inputs.view(work.clients, work.examples, -1)
        target = nn.functional.one_hot(target, work.classes).float()
        self.target = target.view(work.clients, work.examples, -1)
        self.shapes = [parameter.shape for parameter in OneHidden(work.classes).parameters()]
        self.lr = work.sgd["lr"]

    def __call__(
        self, clients: np.ndarray, rng: np.random.Generator, server: Tensor, total: Tensor
    ) -> int:
        index = torch.from_numpy(clients)
        x, y = self.inputs[index], self.target[index]
        parts = server.split([shape.numel() for shape in self.shapes])
        w1, b1, w2, b2 = (part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))
        hidden = torch.relu(nn.functional.linear(x, w1, b1))
        error = (nn.functional.linear(hidden, w2, b2).softmax(-1) - y) / x.shape[1]
        back = (error @ w2) * (hidden > 0)
        # every client takes one step from the same weights, so that the sum of their weights needs
        # the sum of gradients alone; each has its own all the same, as a server that looks at
        # uploads needs them
        gradients = (
            back.transpose(1, 2) @ x,
            back.sum(1),
            error.transpose(1, 2) @ hidden,
            error.sum(1),
        )
        uploads = server - self.lr * torch.cat([each.flatten(1) for each in gradients], 1)
        total += uploads.sum(0)
        return len(clients)


def flatten(model: nn.Module) -> Tensor:
    """Make what a client sends, but counters, views of one vector, each in the layout that it has,
    and return the vector."""
    state = flattened(model)
    vector = torch.empty(sum(value.numel() for value in state))
    for value, part in zip(state, vector.split([value.numel() for value in state]), strict=True):
        view = part.as_strided(value.shape, value.stride())
        view.copy_(value.data)
        value.data = view
    return vector


def flattened(model: nn.Module) -> list[Tensor]:
    """The parts of the vector, in its order."""
    return [value for value in travelling(model).values() if value.is_floating_point()]


def are_weights(model: nn.Module) -> Tensor:
    """Which values of the vector are weights; the others are BatchNorm's statistics."""
    return torch.cat(
        [torch.full((part.numel(),), isinstance(part, nn.Parameter)) for part in flattened(model)]
    )


if __name__ == "__main__":
    main()
