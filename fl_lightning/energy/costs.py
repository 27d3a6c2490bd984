"""What each option of each group costs on one device, in joules.

A *group* is a linear layer of the base together with its adapter. An *option* is how it is
computed: ``off``, ``int8`` or ``high``, the better one later. ``G`` groups; a step has ``n``
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fl_lightning.config.near_names import require_choice
from fl_lightning.energy.cost_shapes import MeasuredCost
from fl_lightning.energy.options import OPTIONS, PRECISIONS, SCOPES
from fl_lightning.errors import require

LABELS = re.compile(r"NVML|RAPL|modelled: CPU seconds x \d+(\.\d+)? W")
"""Where joules come from. A table has one label, and figures with different labels are never
mixed."""
LARGEST_STEP = 4096
"""Tokens up to which useless options are looked for."""


@dataclass(frozen=True)
class Removal:
    """An option that is not cheaper than a better one.

    Args:
        group: name of the group.
        option: the option that is removed.
        first: smallest number of tokens of a step at which it is.
        last: largest one; None: there is none.
    """

    group: str
    option: str
    first: int = 1
    last: int | None = None

    def covers(self, tokens: int) -> bool:
        """Return whether the option is removed from a step of so many tokens."""
        return self.first <= tokens and (self.last is None or tokens <= self.last)

    def __str__(self) -> str:
        upper = "" if self.last is None else f" to {self.last}"
        return f"{self.group}: {self.option} from {self.first}{upper} tokens"


@dataclass(frozen=True)
class CostTable:
    """Joules of all options of all groups of one network on one device.

    Args:
        label: where joules come from: ``NVML``, ``RAPL`` or ``modelled: CPU seconds x 15 W``.
        device: the device in words.
        scope: ``adapter`` or ``model``: what *off* leaves out. It stands beside every figure.
        context: tokens that a step sees, its own included, when ``rest`` was measured.
        groups: cost of each option of each group, in the order of the network.
        rest: cost of everything that no option changes: embedding, attention, normalisation, head.
        removed: options that are not to be used, see :meth:`without_useless`.
        high: precision that *high* was measured in, ``float32`` or ``bfloat16``.
        adapter: the adapters that it was measured with, as ``lora of rank 8``; ``merged``: none, in
            one matrix with their layers; empty where nobody said.
        controller: cost of choosing the levels of so many tokens by a
            :class:`~fl_lightning.energy.regret.RegretController`; None: it was not measured.

    Raises:
        InputError: the label, the scope or the precision is unknown, there is no group, a group
            lacks an option or has an unknown one, or a removal names what the table does not have.
    """

    label: str
    device: str
    scope: str
    context: int
    groups: Mapping[str, Mapping[str, MeasuredCost]]
    rest: MeasuredCost
    removed: tuple[Removal, ...] = ()
    high: str = "float32"
    adapter: str = ""
    controller: MeasuredCost | None = None

    def __post_init__(self) -> None:
        require_label(self.label)
        require_choice(self.scope, SCOPES, "scope")
        require_choice(self.high, PRECISIONS, "high")
        require(
            self.groups,
            "a table of costs without groups",
            "it has one group or more",
            "calibrate again",
        )
        for name, options in self.groups.items():
            require(
                set(options) == set(OPTIONS),
                f"group {name} with the options {', '.join(options) or 'none'}",
                f"a group has the options {', '.join(OPTIONS)}",
                "calibrate again",
            )
        for removal in self.removed:
            require(
                removal.group in self.groups and removal.option in OPTIONS[:-1],
                f"removed {removal}",
                "what is removed is off or int8 of a group of the table, never high",
                "calibrate again",
            )

    def tensors(self, tokens: int, kind: str = "mean") -> Tensor:
        """Return joules of a step whose tokens all take the same option, float64 ``[G, 3]``.

        They are of the whole step; divided by ``tokens`` they are of a token. Removed options cost
        infinity.

        Args:
            tokens: n, 1 or more.
            kind: ``mean`` or ``q99``.
        """
        return self.by_tokens(tokens, kind)[..., -1]

    def by_tokens(self, tokens: int, kind: str = "mean") -> Tensor:
        """Return joules of an option in a step of which 0, 1 ... n tokens take it, float64 ``[G, 3,
        n + 1]``.

        Options that are removed at n tokens cost infinity, but for no token, which costs nothing.
        """
        assert tokens >= 1, tokens
        counts, known = np.arange(tokens + 1), {}
        found = np.empty((len(self.groups), len(OPTIONS), tokens + 1))
        for row, options in zip(found, self.groups.values(), strict=True):
            for index, option in enumerate(OPTIONS):
                cost = options[option].of_kind(kind)
                if cost not in known:
                    known[cost] = cost.at(counts)
                row[index] = known[cost]
        names = {name: index for index, name in enumerate(self.groups)}
        for removal in self.removed:
            if removal.covers(tokens):
                found[names[removal.group], OPTIONS.index(removal.option), 1:] = np.inf
        return torch.from_numpy(found)

    def fixed(self, tokens: int, kind: str = "mean") -> float:
        """Return joules of a step that no option changes."""
        return float(self.rest.of_kind(kind).at(tokens))

    def all_high(self, tokens: int, kind: str = "mean") -> float:
        """Return joules of a step with all groups at ``high``, everything else included."""
        return self.fixed(tokens, kind) + float(self.tensors(tokens, kind)[:, -1].sum())

    def all_high_sequence(self, prompt: int, new: int, kind: str = "mean") -> float:
        """Return joules of a sequence with all groups at ``high``.

        Args:
            prompt: tokens of the prompt, which is one step; 0: there is none.
            new: steps of a single token after it.
            kind: ``mean`` or ``q99``.
        """
        first = self.all_high(prompt, kind) if prompt else 0.0
        return first + (new * self.all_high(1, kind) if new else 0.0)

    def available(self, tokens: int) -> Tensor:
        """Return which options are not removed from a step of so many tokens, bool ``[G, 3]``."""
        return self.tensors(tokens).isfinite()

    def without_useless(
        self, tokens: int | None = None, options: Sequence[str] = OPTIONS
    ) -> CostTable:
        """Return the table without options that are not cheaper than a better one by their mean,
        and without those that are removed already.

        Args:
            tokens: those that are useless in a step of so many tokens are removed from every step.
                None: each is removed from steps of the lengths, up to 4 096 tokens, at which it is
                useless.
            options: those that a controller has, ``high`` among them; the others are removed from
                every step.
        """
        largest = LARGEST_STEP if tokens is None else tokens
        costs = replace(self, removed=()).by_tokens(largest).numpy()
        costs[:, [option not in options for option in OPTIONS], 1:] = np.inf
        names = list(self.groups)
        for one in self.removed:
            row = costs[names.index(one.group), OPTIONS.index(one.option)]
            row[one.first : None if one.last is None else one.last + 1] = np.inf
        better = np.stack((costs[:, 1:].min(1), costs[:, 2]), axis=1)
        useless = costs[:, :2] >= better  # [G, 2, n + 1]
        found = [*self.removed]
        for name, rows in zip(names, useless, strict=True):
            for option, row in zip(OPTIONS[:-1], rows, strict=True):
                if tokens is None:
                    found += [
                        Removal(name, option, first, last) for first, last in _ranges(row[1:])
                    ]
                elif row[-1]:
                    found.append(Removal(name, option))
        return replace(self, removed=tuple(dict.fromkeys(found)))

    def for_groups(self, names: Sequence[str], advice: str = "calibrate this network") -> CostTable:
        """Return the table with its groups in the order of a network's.

        Args:
            names: of the network's groups.
            advice: what to do where the network has others, for the message.

        Raises:
            InputError: the network has other groups.
        """
        lacks, foreign = set(names) - set(self.groups), set(self.groups) - set(names)
        require(
            not lacks and not foreign,
            f"a table of {len(self.groups)} groups for a network of {len(names)}, which "
            + (f"also has {min(lacks)}" if lacks else f"has no {min(foreign, default='')}"),
            "a table is of the network that it was calibrated on",
            advice,
        )
        return replace(self, groups={name: self.groups[name] for name in names})


def _ranges(flags: np.ndarray) -> list[tuple[int, int | None]]:
    """Return first and last number of tokens of each run of true flags; flag 0 is of 1 token. The
    last is None where the run goes on to the end."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    return [
        (int(start) + 1, None if end == len(flags) else int(end))
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def require_label(label: str) -> None:
    """Refuse a label that does not say where joules come from.

    Raises:
        InputError: it is none of the three.
    """
    require(
        isinstance(label, str) and LABELS.fullmatch(label),
        f"label {label}",
        "joules are of NVML, of RAPL, or modelled from CPU seconds at a stated power",
        "write NVML, RAPL or modelled: CPU seconds x 15 W",
    )


def one_label(labels: Iterable[str]) -> str:
    """Return the label that all figures have.

    Raises:
        InputError: there are two labels, or none.
    """
    found = sorted(set(labels))
    require(
        len(found) == 1,
        f"figures of {' and of '.join(found) or 'no meter'}",
        "joules of different sources are never mixed in one table",
        "measure all of them with one meter",
    )
    return found[0]
