"""A slice of the test loss around the final weights (Li, Xu, Taylor, Studer & Goldstein, NeurIPS
2018).

    f(a, b) = L(W + a d + b e)

d, e random and filter-normalised: every filter of d has the norm of that filter of W; BatchNorm and
biases stay. The teacher's slice is that of the full-precision weights; the student's is that of
what would be deployed from them, quantised anew at every point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from callbacks.figures.drawing import Every, own_copy, student_and_teacher
from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.aggregation.server_optimizers import ServerOptimizer
from fl_lightning.config.constraints import within
from fl_lightning.errors import require
from fl_lightning.figures import BLUE, RED, legend_outside, new_axes
from fl_lightning.hooks import Context
from fl_lightning.rng import stream
from fl_lightning.tasks import Task
from fl_lightning.wire import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LossLandscape(FigureMeter):
    """Draws ``figures/loss_landscape``: the test loss of student and teacher, as the task has it,
    along the same one or two directions.

    Two forward passes of ``examples`` examples for each of ``points`` ** ``dimensions`` points:
    seconds for a small network, minutes for a large one on a CPU. Methods whose clients have
    networks of their own have no such pair: the meter says so and is idle.

    Args:
        dimensions: 2: contours; 1: curves.
        points: along each direction, odd so that the weights themselves are one of them, at least
            3.
        span: how far to go each way, in norms of the weights, above 0.
        examples: test examples at most, drawn by the run's seed, at least 1.
        every: rounds between figures; 0: only at the end.
    """

    name = "loss_landscape"
    rule = "every client has a network of its own and there is none to look around"
    instead = "leave it out, or write --model FedMPQKD"

    def __init__(
        self,
        dimensions: Annotated[int, within("[1, 2]", "a slice has 1 or 2", 2)] = 2,
        points: int = 11,
        span: Annotated[float, within("(0, inf)", "above 0 and finite", 1)] = 1.0,
        examples: Annotated[int, within("[1, inf)", "test examples, 1 or more", 500)] = 500,
        every: Every = 0,
    ) -> None:
        name = type(self).__name__
        require(
            points >= 3 and points % 2 == 1,
            f"{name}(points={points})",
            "an odd number, 3 or more",
            "write points: 11",
        )
        self.dimensions, self.points, self.span, self.examples = dimensions, points, span, examples
        super().__init__(every)

    def applies_to(self, context: Context) -> bool:
        return not context.method.personalised

    def figure(self, context: Context) -> Figure:
        steps = np.linspace(-self.span, self.span, self.points)
        losses, examples = self._losses(context, steps)
        title = (
            f"Test loss around the weights of round {context.method.round} ({examples} examples)"
        )
        if self.dimensions == 2:
            return contour_figure(steps, losses, title)
        return curve_figure(steps, losses, title)

    def _losses(self, context: Context, steps: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
        """Return the loss of each network at every point of the slice, ``[points]`` or ``[points,
        points]`` (b, a); number of examples."""
        method, data, total = own_copy(context), context.data, len(context.data.test_target)
        index = np.sort(
            stream(context.seed, "landscape_images").choice(
                total, min(self.examples, total), replace=False
            )
        )
        position = torch.from_numpy(index).to(data.device)
        batches = [
            (data.inputs("test", part), data.test_target[part]) for part in position.split(512)
        ]
        centre, others = method.evaluated_weights, ServerOptimizer.without_own(method.server)
        draws = stream(context.seed, "landscape")
        directions = [
            filter_normalised(method.layout, method.network, centre, draws)
            for _ in range(self.dimensions)
        ]
        grid = np.stack(np.meshgrid(*[steps] * self.dimensions), axis=-1)
        losses: dict[str, np.ndarray] = {}
        for place in np.ndindex(grid.shape[:-1]):
            weights = centre + sum(
                float(a) * d for a, d in zip(grid[place], directions, strict=True)
            )
            method.server = {**others, "weights": weights}
            for name, network in student_and_teacher(method).items():
                found = losses.setdefault(name, np.empty(grid.shape[:-1]))
                found[place] = loss(network, batches, data.task)
        return losses, len(index)


def filter_normalised(
    layout: Layout, network: nn.Module, weights: Tensor, rng: np.random.Generator
) -> Tensor:
    """Return a random direction, float32 ``[size]``: of each filter (row of a weight) the norm of
    that filter of ``weights``; 0 elsewhere."""
    learned = {name for name, parameter in network.named_parameters() if parameter.ndim >= 2}
    direction = {}
    for name, tensor in layout.unpack(weights).items():
        if name not in learned:
            direction[name] = torch.zeros_like(tensor)
            continue
        drawn = torch.from_numpy(rng.standard_normal(tuple(tensor.shape))).to(tensor)
        scale = tensor.flatten(1).norm(dim=1) / drawn.flatten(1).norm(dim=1).clamp_min(1e-12)
        direction[name] = drawn * scale.view(-1, *[1] * (tensor.ndim - 1))
    return layout.pack(direction)


@torch.no_grad()
def loss(network: nn.Module, batches: list[tuple[Any, Tensor]], task: Task) -> float:
    """Return the mean loss of a task."""
    sums = [task.sums(network(inputs), target)["loss"] for inputs, target in batches]
    total, weight = (sum(map(float, each)) for each in zip(*sums, strict=True))
    return total / weight


def contour_figure(steps: np.ndarray, losses: dict[str, np.ndarray], title: str) -> Figure:
    """Draw a panel for each network, one scale of colours for all, levels at equal ratios."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    everything = np.concatenate([values.ravel() for values in losses.values()])
    finite = everything[np.isfinite(everything) & (everything > 0)]
    if not finite.size:
        raise ValueError("the loss is nowhere finite and above 0")
    low, high = finite.min(), max(finite.max(), finite.min() * 1.01)
    levels = np.geomspace(low * (1 - 1e-9), high * (1 + 1e-9), 13)
    figure = Figure(figsize=(1.4 + 4.6 * len(losses), 4.8), layout="constrained")
    panels = figure.subplots(1, len(losses), squeeze=False, sharey=True)[0]
    middle = len(steps) // 2
    for axes, (name, values) in zip(panels, losses.items(), strict=True):
        shown = np.ma.masked_invalid(values)
        image = axes.contourf(steps, steps, shown, levels, norm=LogNorm(low, high), cmap="viridis")
        axes.contour(steps, steps, shown, levels, colors="white", linewidths=0.4)
        axes.plot(0, 0, marker="P", color=RED, markeredgecolor="white", markersize=11)
        axes.locator_params(nbins=5)
        axes.set(
            title=f"{name}: {values[middle, middle]:.3f} at the cross",
            xlabel="a, along the first direction",
            aspect="equal",
        )
    panels[0].set_ylabel("b, along the second direction")
    bar = figure.colorbar(image, ax=panels, label="test loss (log scale)", pad=0.02)
    ticks = levels[::2].tolist()
    bar.set_ticks(ticks, labels=[f"{tick:#.4g}".rstrip(".") for tick in ticks])
    bar.minorticks_off()
    figure.suptitle(title)
    return figure


def curve_figure(steps: np.ndarray, losses: dict[str, np.ndarray], title: str) -> Figure:
    figure, axes = new_axes(
        title, "a, in norms of the weights, along one random direction", "test loss"
    )
    for (name, values), (colour, format) in zip(
        losses.items(), ((BLUE, "o-"), (RED, "s--")), strict=False
    ):
        axes.plot(
            steps,
            values,
            format,
            color=colour,
            markersize=4,
            label=f"{name}: {values[len(steps) // 2]:.3f} at 0",
        )
    finite = np.concatenate(list(losses.values()))
    finite = finite[np.isfinite(finite) & (finite > 0)]
    if not finite.size:
        raise ValueError("the loss is nowhere finite and above 0")
    if finite.max() > 20 * finite.min():
        axes.set_yscale("log")
    legend_outside(figure)
    return figure
