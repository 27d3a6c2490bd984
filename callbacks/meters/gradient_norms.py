"""How hard each term of the local loss pulls: the L2 norm of its gradient by what the client
trains.

    g_term = || d loss_term / d theta ||_2

at the start of a client's round, on its first batch, and where asked also at its last local step.
theta is what the local optimiser steps on: for FedMPQ the latent weights or the bit planes,
BatchNorm and biases. A regulariser that outweighs the task is seen here: FedMPQ's is said to do so
at few local epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor

from callbacks.figures.drawing import draw, never_fatal, own_copy
from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.engines.base import one_thread
from fl_lightning.engines.sequential import local_step, start_optimizer
from fl_lightning.errors import require
from fl_lightning.exchange import asked_steps
from fl_lightning.figures import (
    COLOURS,
    LINE_STYLES,
    MARKERS,
    count_rounds,
    legend_outside,
    new_axes,
)
from fl_lightning.hooks import Context, Meter, RoundRecord
from fl_lightning.methods.optimizing import local_optimizer, parameters_of
from fl_lightning.wire import Payload

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FEW_ROUNDS = 5
"""Rounds of which a figure shows the points above all, since a line says little between them."""


class GradientNorms(Meter):
    """Adds ``gradient/task``, ``gradient/bit``, ``gradient/kd`` (or what else the method's loss is
    made of) to some rounds, draws ``figures/gradient_norms`` at the end.

    ``gradient/bit_over_task`` (and so on) is the norm of a term by the task's, the mean of the
    clients' ratios. With ``last_step`` the same are measured at the client's last local step of the
    round, as ``gradient/last_task``, ``gradient/last_bit``, ``gradient/last_bit_over_task``.

    Measured on a copy of the method in float32: the run ends with the same weights as without. The
    time that it takes is part of ``time/train``.

    Args:
        every: rounds from one measurement to the next, at least 1; the first round is measured.
        clients: first so many clients of the cohort that are measured, at least 1; the metric is
            their mean.
        last_step: whether the copy also trains, as long as a client without a stressor does, so
            that the last step can be measured. A measured client then costs about twice its round.
    """

    reads_states = "gradient/*"

    def __init__(
        self,
        every: Annotated[int, within("[1, inf)", "rounds between measurements, 1 or more", 5)] = 5,
        clients: Annotated[int, within("[1, inf)", "clients to measure, 1 or more", 2)] = 2,
        last_step: bool = False,
    ) -> None:
        self.every, self.clients, self.last_step = every, clients, last_step
        self._measured: list[dict[str, float]] = []
        self._history: list[tuple[int, dict[str, float]]] = []

    def on_check(self, context: Context) -> None:
        alike = [other for other in context.callbacks if isinstance(other, GradientNorms)]
        clients = sorted({other.clients for other in alike})
        require(
            len(clients) <= 1,
            "callbacks.GradientNorms",
            f"there are several, of {' and '.join(map(str, clients))} clients, and one gradient/task",
            "leave one",
        )
        self._history = []

    def on_round_start(self, round: int, context: Context) -> None:
        self._measured = []

    def on_client_start(
        self, client: Client, message: bytes, labels: Tensor, round: int, context: Context
    ) -> None:
        if (round - 1) % self.every == 0 and len(self._measured) < self.clients:
            with never_fatal(f"round {round}: gradient norms of client {client.id}"):
                norms = with_ratios(gradient_norms(context, client, message, labels))
                if self.last_step:
                    last = with_ratios(last_gradient_norms(context, client, message, labels))
                    norms |= {f"last_{name}": value for name, value in last.items()}
                self._measured.append(norms)

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if self._measured and (record.round - 1) % self.every == 0:
            names = dict.fromkeys(name for norms in self._measured for name in norms)
            means = {
                name: float(np.mean([norms[name] for norms in self._measured if name in norms]))
                for name in names
            }
            record.metrics |= {f"gradient/{name}": value for name, value in means.items()}
            shown = {
                name: value for name, value in means.items() if not name.endswith("_over_task")
            }
            self._history.append((record.round, shown))

    def on_fit_end(self, summary: dict[str, float], context: Context) -> None:
        draw(context, "gradient_norms", lambda: gradient_figure(self._history))

    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self._history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._history = [(round, norms) for round, norms in state["history"]]


def gradient_norms(
    context: Context, client: Client, message: bytes, labels: Tensor
) -> dict[str, float]:
    """Return the norm of each term on the first batch that has it: the client's own first one, and
    what it learns from before."""
    method, seed = own_copy(context), context.seed
    method.start_client(Payload.from_bytes(message), client.apart(), labels)
    method.train()
    optimizer = local_optimizer(method)

    def norms_at(step: int, batch: Any) -> dict[str, float]:
        with rng.torch_stream(seed, "dropout", method.round, client.id):
            outputs = method.training_step(batch, step)
        return norms_of(outputs, parameters_of(optimizer))

    norms, step, batch = dict[str, float](), 0, None
    batches = method.local_batches(context.data, client, epochs=1, labels=labels, steps=1)
    for step, batch in enumerate(batches):  # one by one: what comes next changes what is trained
        if step == 0:
            norms = norms_at(step, batch)
    return norms_at(step, batch) | norms if step else norms


def last_gradient_norms(
    context: Any, client: Client, message: bytes, labels: Tensor
) -> dict[str, float]:
    """Return the norm of each term at the last local step of the client's round, of the batch that
    it has then."""
    method, data, epochs = own_copy(context), context.data, context.local_epochs
    steps = asked_steps(context, client)

    def begin() -> Iterator[Any]:
        method.start_client(Payload.from_bytes(message), client.apart(), labels)
        method.train()
        return method.local_batches(data, client, epochs=epochs, labels=labels, steps=steps)

    stream = partial(rng.torch_stream, context.seed, "dropout", method.round, client.id)
    with one_thread(context.fabric.device):
        with stream():
            last = sum(1 for _ in begin()) - 1
        with stream():
            batches = enumerate(begin())
            optimizer = start_optimizer(context.fabric, method)
            for index, batch in islice(batches, last):
                local_step(context.fabric, method, optimizer, batch, index)
            index, batch = next(batches)
            outputs = method.training_step(batch, index)
            return norms_of(outputs, parameters_of(optimizer))


def with_ratios(norms: dict[str, float]) -> dict[str, float]:
    """Add the norm of each term by the task's, where the task has one."""
    task = norms.get("task", 0.0)
    ratios = {
        f"{name}_over_task": value / task
        for name, value in norms.items()
        if name != "task" and task
    }
    return norms | ratios


def norms_of(outputs: Mapping[str, Tensor], parameters: Sequence[Tensor]) -> dict[str, float]:
    """``outputs["loss_kd"]`` gives ``kd``; 0 for a term that no parameter has a part in."""
    norms = {}
    for name, term in outputs.items():
        if not name.startswith("loss_"):
            continue
        square = 0.0
        if term.requires_grad:
            gradients = torch.autograd.grad(term, parameters, retain_graph=True, allow_unused=True)
            square = sum(
                float(gradient.double().square().sum())
                for gradient in gradients
                if gradient is not None
            )
        norms[name.removeprefix("loss_")] = square**0.5
    return norms


def gradient_figure(history: list[tuple[int, dict[str, float]]]) -> Figure:
    """Draw a curve for each term over the rounds, the norms on a log scale, where 0 has no place:
    such rounds are left out, and said so."""
    names = list(dict.fromkeys(name for _, norms in history for name in norms))
    if not names:
        raise ValueError("no round was measured")
    last = any(name.startswith("last_") for name in names)
    when = "in the first and the last step" if last else "at the start"
    figure, axes = new_axes(
        f"Gradient of each loss term, {when} of a client's round",
        "round",
        "L2 norm of the gradient",
    )
    few = len(history) <= FEW_ROUNDS
    for index, name in enumerate(names):
        values = np.array([norms.get(name, np.nan) for _, norms in history])
        shown = np.isfinite(values) & (values > 0)
        note = (
            ""
            if shown.all()
            else f" ({len(shown) - shown.sum()} of {len(shown)} rounds are 0 or missing)"
        )
        axes.plot(
            [round for round, _ in history],
            np.where(shown, values, np.nan),
            label=name + note,
            color=COLOURS[index % 8],
            linestyle=LINE_STYLES[index % 8],
            marker=MARKERS[index % 8],
            markersize=8 if few else 4,
            linewidth=0.8 if few else 1.5,
        )
    axes.set_yscale("log")
    if few:  # ticks where there is something, and room beside it
        rounds = [round for round, _ in history]
        axes.set_xlim(rounds[0] - 0.6, rounds[-1] + 0.6)
        axes.set_xticks(rounds)
    else:
        count_rounds(axes)
    legend_outside(figure)
    return figure
