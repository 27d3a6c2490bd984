"""A picture of who helps whom: similarity as the method found it, beside similarity of the clients'
labels, which it never saw."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from callbacks.figures.drawing import evenly_spaced, sample
from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.hooks import Context, RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 100  # clients; cells of more cannot be told apart on a page


class RelevanceFigure(FigureMeter):
    """Draws ``figures/relevance`` for a method with relevances (``FedMosaic``), where two clients
    or more are known.

    Adds ``relevance/label_correlation`` to each round with three known clients or more: the
    correlation, in [-1, 1], over pairs of clients, between relevance and the cosine of their label
    counts.
    """

    name = "relevance"
    rule = "it draws methods that weigh clients by relevance"
    instead = "write --model FedMosaic, or leave it out"

    def applies_to(self, context: Context) -> bool:
        return hasattr(context.method, "relevance")

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if not self.applies:
            return
        ids, relevance = context.method.relevance()
        correlation = label_correlation(relevance, context.data.group_counts()[ids])
        if not math.isnan(correlation):
            record.metrics["relevance/label_correlation"] = correlation
        if len(ids) >= 2:
            super().on_round_end(record, context)

    def on_fit_end(self, summary: dict[str, float], context: Context) -> None:
        if self.applies and len(context.method.relevance()[0]) >= 2:
            super().on_fit_end(summary, context)

    def figure(self, context: Context) -> Figure:
        ids, relevance = context.method.relevance()
        counts = context.data.group_counts()[ids]
        if not counts.any():
            raise ValueError("nodes do not say how many examples of each class they have")
        return relevance_figure(ids, relevance, counts)


def label_similarity(counts: np.ndarray) -> np.ndarray:
    """Return the cosine of the clients' label counts ``[K, C]``, as ``[K, K]`` in [0, 1]."""
    unit = counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-12)
    return unit @ unit.T


def label_correlation(relevance: np.ndarray, counts: np.ndarray) -> float:
    """Pearson's correlation of relevance ``[K, K]`` and label similarity over pairs of different
    clients; NaN for fewer than three pairs or where either is constant."""
    upper = np.triu_indices(len(relevance), 1)
    found, true = relevance[upper], label_similarity(counts)[upper]
    if len(found) < 3 or min(np.ptp(found), np.ptp(true)) == 0:
        return float("nan")
    return float(np.corrcoef(found, true)[0, 1])


def similar_next_to_each_other(similarity: np.ndarray) -> np.ndarray:
    """Return an order of clients: leaves of average-linkage clustering on ``1 - similarity`` ``[K,
    K]``."""
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering

    distance = (1 - similarity)[np.triu_indices(len(similarity), 1)].clip(0)
    if len(similarity) <= 2:
        return np.arange(len(similarity))
    return leaves_list(optimal_leaf_ordering(linkage(distance, "average"), distance))


def relevance_figure(ids: np.ndarray, relevance: np.ndarray, counts: np.ndarray) -> Figure:
    """Relevance, label similarity and the labels themselves, with clients in one order in all
    three.

    Args:
        ids: clients ``[K]``; of more than 100, 100 evenly spaced ones are shown.
        relevance: cosine of their sketches, in [-1, 1] ``[K, K]``.
        counts: examples per client and class ``[K, C]``.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    correlation, total = label_correlation(relevance, counts), len(ids)
    shown = evenly_spaced(total, SHOWN)
    ids, relevance, counts = ids[shown], relevance[np.ix_(shown, shown)], counts[shown]
    order = similar_next_to_each_other(label_similarity(counts))
    ids, relevance, counts = ids[order], relevance[np.ix_(order, order)], counts[order]
    figure = Figure(figsize=(12.5, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 0.75])
    off = np.eye(len(ids), dtype=bool)
    for axes, values, limits, cmap, title in (
        (
            left,
            np.ma.masked_array(relevance, off),
            (-1, 1),
            "RdBu_r",
            "relevance: cosine of gradient sketches",
        ),
        (
            middle,
            np.ma.masked_array(label_similarity(counts), off),
            (0, 1),
            "Reds",
            "cosine of label counts (never sent)",
        ),
    ):
        image = axes.imshow(
            values, vmin=limits[0], vmax=limits[1], cmap=cmap, interpolation="nearest"
        )
        figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
        axes.set(title=title, xlabel="client", ylabel="client")
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    most = max(float(share.max(initial=0)), 1e-9)
    held = np.ma.masked_equal(share, 0)
    image = right.imshow(
        held, vmin=0, vmax=most, cmap="viridis_r", aspect="auto", interpolation="nearest"
    )
    right.set_box_aspect(1 / 0.75)  # as high as the squares beside it
    figure.colorbar(image, ax=right, shrink=0.8, pad=0.02, label="share of the client's examples")
    right.set(title="labels", xlabel="class", ylabel="client")
    right.xaxis.set_major_locator(MaxNLocator(min(counts.shape[1], 10), integer=True))
    ticks = np.arange(0, len(ids), max(1, -(-len(ids) // 20)))
    names = [str(ids[tick]) for tick in ticks]
    for axes in (left, middle, right):
        axes.set_yticks(ticks, names, fontsize=8)
    for axes in (left, middle):
        axes.set_xticks(ticks, names, fontsize=8, rotation=90 if len(names) > 10 else 0)
    agreement = (
        ""
        if math.isnan(correlation)
        else f"; correlation of relevance and label similarity over all pairs {correlation:.2f}"
    )
    figure.suptitle(f"{sample(len(ids), total)}, similar labels next to each other{agreement}")
    return figure
