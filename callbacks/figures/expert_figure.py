"""A picture of experts: how much each is used, who takes which, who loses by it, and who is served
worst."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from callbacks.figures.drawing import evenly_spaced
from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.client import Client
from fl_lightning.figures import BLACK, BLUE, COLOURS, GREY, RED, count_rounds, open_frame
from fl_lightning.hooks import Context, RoundRecord
from fl_lightning.methods.experts.responsibilities import Paired
from fl_lightning.metrics.names import words_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 40
"""Clients; the names of more cannot be read."""
READABLE = 0.06
"""The share of the use from which a number has room in the bar of an expert."""
LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue
SURE = 2.0
"""Standard errors by which a client's own adapter is better, for its transfer to count as
negative."""


class ExpertFigure(FigureMeter):
    """Draws ``figures/experts`` for ``FedVEMoE``, and adds to each round what the clients that
    trained in it know of experts.

    - ``router/entropy``: mean over clients of the entropy of their responsibilities, in nats;
    - ``router/purity``: mutual information of the clients' groups and the experts that each takes
      first, divided by the larger of the two entropies; 1 where each group has one expert of its
      own. Only where there are groups;
    - ``transfer/nats``: mean over clients of what the model that they are given loses against their
      own adapter on their validation examples, in nats a token; ``transfer/worst``: the largest;
      ``transfer/negative``: the share of clients that lose by more than two standard errors. In
      rounds that are evaluated.
    """

    name = "experts"
    reads_states = "router/* and transfer/*"
    rule = "it draws the experts of FedVEMoE, and there are none"
    instead = "write --model FedVEMoE with --model.k_max 1 or more, or leave it out"
    empty: ClassVar = {
        "use": [],
        "clients": {},
        "evaluated": [],
        "mean": [],
        "worst": [],
        "lost": {},
    }

    def on_cohort(self, cohort: list[Any], round: int, context: Context) -> None:
        self.trained: dict[str, Client] = {}

    def applies_to(self, context: Context) -> bool:
        return self.name in context.method.shows

    def on_client_end(self, client: Any, round: int, context: Context) -> None:
        if self.applies and "responsibilities" in client.state:
            self.seen["clients"][str(client.id)] = client.state["responsibilities"].tolist()
            self.trained[str(client.id)] = client

    def on_validate(self, values: dict[int, float], record: RoundRecord, context: Context) -> None:
        if self.applies and values:
            # in one order on any number of processes
            of_clients = [values[id] for id in sorted(values)]
            lower = not context.data.task.higher_is_better
            self.seen["evaluated"].append(record.round)
            self.seen["mean"].append(float(np.mean(of_clients)))
            self.seen["worst"].append(float(max(of_clients) if lower else min(of_clients)))
            ids = sorted(self.trained, key=int)
            found = {id: context.method.transfer(self.trained[id]) for id in ids}
            lost = {id: each for id, each in found.items() if each is not None}
            self.seen["lost"] |= {id: [each.mean, each.error] for id, each in lost.items()}
            record.metrics |= transfer_metrics([*lost.values()]) if lost else {}

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if not self.applies:
            return
        slots = range(1, context.method.k_max + 1)
        self.seen["use"].append([record.metrics.get(f"expert/{slot}/mass", 0.0) for slot in slots])
        if self.trained:
            ids = sorted(self.trained, key=int)
            r = self._responsibilities(ids)
            record.metrics["router/entropy"] = float(np.mean([entropy(row) for row in r]))
            purity = purity_of(r, self._groups(ids, context))
            if purity is not None:
                record.metrics["router/purity"] = purity
        super().on_round_end(record, context)

    def state_dict(self) -> dict[str, Any]:
        kept = super().state_dict()
        return {**kept, **{name: dict(sorted(kept[name].items())) for name in ("clients", "lost")}}

    def _responsibilities(self, ids: list[str]) -> np.ndarray:
        """Return those of some clients when they were last asked, ``[K, S]``."""
        return np.array([self.seen["clients"][id][1:] for id in ids])

    def _groups(self, ids: list[str], context: Context) -> np.ndarray:
        return context.data.group_counts().argmax(1)[[int(id) for id in ids]]

    def figure(self, context: Context) -> Figure:
        if not self.seen["clients"]:
            raise ValueError("no client has chosen an expert")
        ids = sorted(self.seen["clients"], key=int)
        groups = self._groups(ids, context)
        names = context.data.group_names or range(context.data.num_groups)
        labels = [f"{id}  {names[group]}" for id, group in zip(ids, groups, strict=True)]
        if not context.data.group_counts().any():  # nodes do not say them of their own data
            labels = ids
        r = self._responsibilities(ids)
        served = self.seen["evaluated"], self.seen["mean"], self.seen["worst"]
        lost = np.array([self.seen["lost"].get(id, [np.nan, np.nan]) for id in ids])
        metric = words_of(context.data.task.primary)
        return expert_figure(np.array(self.seen["use"]), r, groups, labels, served, metric, lost)


def entropy(p: np.ndarray) -> float:
    """Return the entropy of probabilities in nats."""
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def purity_of(r: np.ndarray, groups: np.ndarray) -> float | None:
    """Return the mutual information of a client's group and the expert that it takes first, divided
    by the larger entropy; None where all clients are of one group.

    Args:
        r: responsibilities ``[K, S]``.
        groups: of the clients ``[K]``.
    """
    from sklearn.metrics import normalized_mutual_info_score

    if len(np.unique(groups)) < 2:
        return None
    return float(normalized_mutual_info_score(groups, r.argmax(1), average_method="max"))


def transfer_metrics(lost: Sequence[Paired]) -> dict[str, float]:
    """Return ``transfer/*`` of what each client loses, in nats."""
    mean = np.array([each.mean for each in lost])
    error = np.array([each.error for each in lost])
    return {
        "transfer/nats": float(mean.mean()),
        "transfer/worst": float(mean.max()),
        "transfer/negative": float(((mean > 0) & (mean > SURE * error)).mean()),
    }


def expert_figure(
    use: np.ndarray,
    r: np.ndarray,
    groups: np.ndarray,
    labels: list[str],
    served: tuple[list[int], list[float], list[float]],
    metric: str,
    lost: np.ndarray,
) -> Figure:
    """Draw the experts of a run in four panels, from left to right: the share of the use of each
    expert over the rounds; responsibilities, clients of a group next to each other; what each of
    these clients loses against its own adapter; the primary metric of the mean and of the worst
    client.

    Args:
        use: shares ``[R, S]``.
        r: responsibilities ``[K, S]``.
        groups: of the clients ``[K]``.
        labels: names of the clients ``[K]``.
        served: rounds that were evaluated, mean and worst over clients.
        metric: words for the primary metric.
        lost: mean and standard error of what each client loses, in nats a token ``[K, 2]``; NaN
            where it is not known. No panel if it is known of none.
    """
    from matplotlib.figure import Figure

    has_lost = bool(np.isfinite(lost).any())
    widths = [1.0, 1.0, 0.6, 0.8] if has_lost else [1.0, 1.0, 0.8]
    figure = Figure(figsize=(4.8 * sum(widths), 4.4), layout="constrained")
    left, middle, *between, right = figure.subplots(1, len(widths), width_ratios=widths)
    open_frame(left, right)
    taken = (use > 0).any(axis=0) | (r > 0.01).any(axis=0)  # noise can hide every use
    ever = np.flatnonzero(taken) if taken.any() else np.arange(1)
    _draw_use(left, use, ever)
    order = np.argsort(groups, kind="stable")[evenly_spaced(len(groups), SHOWN)]
    image = middle.imshow(r[order][:, ever], vmin=0, vmax=1, cmap="Blues", aspect="auto")
    figure.colorbar(image, ax=middle, shrink=0.8, pad=0.02, label="responsibility")
    middle.set_xticks(range(len(ever)), [str(expert + 1) for expert in ever])
    middle.set_yticks(range(len(order)), [labels[client] for client in order], fontsize=8)
    middle.set(title="who takes which, when last asked", xlabel="expert")
    for axes in between:
        _draw_lost(axes, lost[order])
    _draw_served(right, *served, metric)
    for axes in (left, right):
        # of one evaluation alone, ticks would be parts of rounds
        axes.set_xlim(0.5, max(len(use), 1) + 0.5)
        count_rounds(axes)
    return figure


def _draw_use(axes: Axes, use: np.ndarray, ever: np.ndarray) -> None:
    """Stack the shares of the use of some experts ``ever``; ``[R, S]``."""
    rounds, below = np.arange(1, len(use) + 1), np.zeros(len(use))
    for expert in ever:
        colour = _colour(expert, int(ever.max()))
        axes.bar(rounds, use[:, expert], 1.0, below, color=colour, edgecolor="white", linewidth=0.4)
        below += use[:, expert]
    axes.set(
        title="use of each expert",
        xlabel="round",
        ylabel="share of the clients' weight",
        ylim=(0, 1),
    )
    for expert in ever:  # the name stands where the expert is used most
        at = int(use[:, expert].argmax())
        height = use[at, :expert].sum() + use[at, expert] / 2
        if use[at, expert] > READABLE:
            ink = BLACK if _is_light(_colour(expert, int(ever.max()))) else "white"
            axes.text(
                at + 1, height, str(expert + 1), ha="center", va="center", color=ink, weight="bold"
            )


def _colour(expert: int, last: int) -> Any:
    """Return the colour of an expert: one of all figures', or of twenty where there are more
    experts."""
    from matplotlib import colormaps

    few = COLOURS[:-1]
    return few[expert] if last < len(few) else colormaps["tab20"](expert % 20)


def _is_light(colour: Any) -> bool:
    from matplotlib.colors import to_rgb

    return float(np.dot(to_rgb(colour), LUMINANCE)) > 0.6


def _draw_lost(axes: Axes, lost: np.ndarray) -> None:
    """Draw what each client loses against its own adapter, ``[K, 2]``, with ``SURE`` standard
    errors."""
    mean, error = lost.T
    open_frame(axes)
    negative = (mean > 0) & (mean > SURE * error)
    colours = [RED if each else BLUE for each in negative]
    axes.barh(np.arange(len(lost)), mean, height=0.7, xerr=SURE * error, color=colours, ecolor=GREY)
    axes.axvline(0, color=BLACK, linewidth=0.8)
    axes.set(title="loss against its own adapter", xlabel="nats a token (red: negative transfer)")
    axes.set(yticks=[], ylim=(len(lost) - 0.5, -0.5))  # the rows of the panel beside it


def _draw_served(
    axes: Axes, rounds: list[int], mean: list[float], worst: list[float], metric: str
) -> None:
    """Draw the primary metric of the mean and of the worst client in the rounds that were
    evaluated."""
    from matplotlib.ticker import ScalarFormatter

    axes.plot(rounds, mean, color=BLUE, marker="o", label="mean client")
    axes.plot(rounds, worst, color=RED, marker="s", linestyle="--", label="worst client")
    axes.set(title=f"{metric} on validation", xlabel="round", ylabel=metric)
    if mean and max(worst) > 4 * min(mean) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
    if mean:
        axes.legend(
            frameon=False,
            labelcolor=BLACK,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16),
            ncols=2,
        )
