"""A picture of the partition: which client holds how many examples of which class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from callbacks.figures.drawing import draw, evenly_spaced, sample
from fl_lightning.figures import GREY
from fl_lightning.hooks import Context, Meter
from fl_lightning.tasks import Classification

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NAMED_GROUPS = 20
SHOWN = 200  # clients; more columns than that cannot be told apart on a page


class PartitionFigure(Meter):
    """Draws ``figures/partition`` before the first round, from ``data.group_counts()``."""

    def on_setup(self, context: Context) -> None:
        counts = context.data.group_counts()
        group = "class" if isinstance(context.data.task, Classification) else "group"
        names = context.data.group_names
        if counts.any():  # a server does not know it of the nodes' own data
            draw(context, "partition", lambda: partition_figure(counts, group, names))


def partition_figure(counts: np.ndarray, group: str = "class", names: Sequence[str] = ()) -> Figure:
    """Clients across, classes or other groups up, colour = examples; above, the size of each
    client. Of one group there are the sizes alone.

    Args:
        counts: examples per client and group ``[K, G]``. Of more than 200 clients, 200 evenly
            spaced ones are shown.
        group: what a group is.
        names: names of the groups ``[G]``; up to 20 are shown.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    clients, classes = counts.shape
    shown = evenly_spaced(clients, SHOWN)
    counts = counts[shown]
    sizes = counts.sum(axis=1)
    held = (counts > 0).sum(axis=1)[sizes > 0]
    figure = Figure(figsize=(11, 5 if classes > 1 else 3), layout="constrained")
    x = np.arange(len(shown))
    ticks = x[:: max(1, -(-len(x) // 20))]
    middle = f"{np.median(sizes):.0f} example{'s' if np.median(sizes) != 1 else ''}"
    if classes == 1:
        top = figure.subplots()
        top.set_title(f"Partition: {sample(len(shown), clients)}, median {middle}")
        top.set(xlabel="client", xlim=(-0.6, len(shown) - 0.4))
        top.set_xticks(ticks, [str(shown[i]) for i in ticks])
    else:
        top, main = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    top.bar(x, sizes, width=0.85, color=GREY)
    top.set(ylabel="examples")
    top.spines[["top", "right"]].set_visible(False)
    if classes == 1:
        return figure
    image = main.imshow(
        np.ma.masked_equal(counts.T, 0),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap="viridis_r",
        norm=LogNorm(vmin=1, vmax=max(int(counts.max(initial=1)), 2)),
    )
    if 0 < len(names) <= MAX_NAMED_GROUPS:
        main.set_yticks(range(len(names)), names)
    else:
        main.yaxis.set_major_locator(MaxNLocator(min(classes, 10), integer=True))
    main.set_xticks(ticks, [str(shown[i]) for i in ticks])
    main.set(xlabel="client", ylabel=group, xlim=(-0.6, len(shown) - 0.4))
    bar = figure.colorbar(image, ax=main, label=f"examples of the {group} (log scale)", pad=0.01)
    bar.minorticks_off()
    decades = range(int(np.log10(image.norm.vmax)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    marks = [step * 10**e for e in decades for step in steps if step * 10**e <= image.norm.vmax]
    bar.set_ticks(marks, labels=[f"{mark:,}" for mark in marks])
    median = (
        f", median {middle} in {np.median(held):.0f} of {classes} {group}{'es' if group == 'class' else 's'}"
        if len(held)
        else ""
    )
    top.set_title(f"Partition: {sample(len(shown), clients)}{median}")
    main.spines[["top", "right"]].set_visible(False)
    return figure
