"""A picture of an energy budget: which layers are computed for which tokens, and what sequences
cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.evaluation import evaluation_mode
from fl_lightning.figures import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    count_rounds,
    legend_outside,
    open_frame,
    short_names,
)
from fl_lightning.hooks import Context, RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEQUENCES = 64
"""Test sequences whose options are shown."""
BEFORE, AFTER = 32, 12
"""Tokens before and from the first token of the answer that are shown."""


class OptionFigure(FigureMeter):
    """Draws ``figures/options`` for ``HEST``, and adds the clients' prices to each round.

    Left: what each layer costs at each place of a sequence of the test set, on the first client's
    device, as a share of its cost at *high*. Middle: joules of a test sequence over the rounds,
    beside its budget and its cost at *high*. Right: the price of energy. ``energy/price`` is the
    mean of lambda over the clients that trained in the round.
    """

    name = "options"
    reads_states = "energy/price"
    rule = "it draws the options of HEST under a budget"
    instead = "write --model HEST, or leave it out"
    empty: ClassVar = {"prices": [], "rounds": [], "joules": [], "high": []}

    def applies_to(self, context: Context) -> bool:
        return self.name in context.method.shows

    def on_cohort(self, cohort: list[Any], round: int, context: Context) -> None:
        self.prices: dict[int, float] = {}

    def on_client_end(self, client: Any, round: int, context: Context) -> None:
        if self.applies and "price" in client.state:
            self.prices[client.id] = float(client.state["price"])

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if not self.applies:
            return
        if self.prices:
            prices = [self.prices[client] for client in sorted(self.prices)]
            record.metrics["energy/price"] = float(np.mean(prices))
            self.seen["prices"].append(
                [record.round, min(prices), float(np.mean(prices)), max(prices)]
            )
        if "energy/joules" in record.metrics:
            self.seen["rounds"].append(record.round)
            self.seen["joules"].append(record.metrics["energy/joules"])
            self.seen["high"].append(record.metrics["energy/joules_high"])
        super().on_round_end(record, context)

    def figure(self, context: Any) -> Figure:
        method, data = context.method, context.data
        client = data.client(0, context.states.get(0))
        index = torch.arange(min(SEQUENCES, len(data.test_target)), device=data.device)
        target = data.test_target[index]
        with evaluation_mode(method.deploy(client)):
            choices, lengths = method.budgeted.options_of(data.inputs("test", index), target)
        device = method.device_of(client)
        shares = costs_by_place(device, choices, lengths)
        budgets = float(np.mean(method.budget_shares))
        source = f"{device.table.label}, scope {device.table.scope}"
        return option_figure(shares, list(device.table.groups), self.seen, budgets, source)


def costs_by_place(device: Any, choices: torch.Tensor, lengths: Any) -> np.ndarray:
    """Return what each group costs at each place, as a share of *high*, ``[G, BEFORE + AFTER]``;
    NaN where no sequence has a token. Place ``BEFORE`` is the first token of the answer that is
    read.

    Args:
        device: what the sequences ran on.
        choices: options int64 ``[B, T, G]``.
        lengths: of the sequences.
    """
    found = np.full((len(choices), BEFORE + AFTER, choices.shape[2]), np.nan)
    for row, (prompt, end) in enumerate(
        zip(lengths.prompts.tolist(), lengths.ends.tolist(), strict=True)
    ):
        for place in range(max(0, prompt - BEFORE), min(end, prompt + AFTER)):
            costs = device.token_costs(prompt if place < prompt else 1)
            taken = costs.gather(1, choices[row, place].unsqueeze(1)).squeeze(1)
            found[row, place - prompt + BEFORE] = (taken / costs[:, -1]).numpy()
    seen = ~np.isnan(found)
    with np.errstate(invalid="ignore"):
        return (np.where(seen, found, 0).sum(0) / np.where(seen.any(0), seen.sum(0), np.nan)).T


def option_figure(
    shares: np.ndarray, groups: list[str], seen: dict[str, Any], budget: float, source: str
) -> Figure:
    """Draw the three panels.

    Args:
        shares: of :func:`costs_by_place`.
        groups: names of the layers.
        seen: what the meter has recorded.
        budget: mean over the clients of E_max, as a share of the cost at *high*.
        source: where joules come from, and their scope.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, max(4.6, 1.8 + 0.2 * len(groups))), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.4, 1, 0.8])
    open_frame(middle, right)
    top = max(1.0, float(np.nanmax(shares)) if np.isfinite(shares).any() else 1.0)
    extent = (-BEFORE - 0.5, AFTER - 0.5, len(groups) - 0.5, -0.5)
    image = left.imshow(shares, vmin=0, vmax=top, cmap="cividis", aspect="auto", extent=extent)
    figure.colorbar(image, ax=left, shrink=0.85, pad=0.02, label="cost as a share of high")
    left.axvline(-0.5, color="white", linewidth=1.5)
    left.set_yticks(range(len(groups)), short_names(groups), fontsize=9)
    left.set(
        title="what each layer costs, token by token",
        xlabel="place; 0 is the first token after the prompt",
    )
    rounds, joules, high = seen["rounds"], np.array(seen["joules"]), np.array(seen["high"])
    if rounds:
        middle.plot(
            rounds, 1e3 * high, color=GREY, linestyle=":", marker="^", label="all layers at high"
        )
        middle.plot(
            rounds, 1e3 * budget * high, color=RED, linestyle="--", marker="s", label="budget"
        )
        middle.plot(rounds, 1e3 * joules, color=BLUE, marker="o", label="spent")
        middle.set_ylim(0, 1.05e3 * max(high.max(), joules.max()))
    middle.set(
        title="a sequence of the test set", xlabel=f"round\n{source}", ylabel="mean millijoules"
    )
    if seen["prices"]:
        at, least, mean, most = np.array(seen["prices"]).T
        right.fill_between(
            at,
            least,
            most,
            color=ORANGE,
            alpha=0.25,
            linewidth=0,
            label="price, clients of the round",
        )
        right.plot(
            at, mean, color=ORANGE, marker="D", markersize=4, label="price, mean over clients"
        )
    right.set(title="price of energy", xlabel="round", ylabel="lambda")
    for axes in (middle, right):
        count_rounds(axes)
    legend_outside(figure, columns=5, size="medium")
    return figure
