"""The entry ``until`` of a study file: seeds are added until every criterion is decided, or a
budget ends it.

    seeds: [0, 1, 2, 3, 4]                  # are run in any case; the next are 5, 6, 7 ...
    until: {max_seeds: 40, max_hours: 6}    # or just: until: decided
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fl_lightning.errors import InputError
from fl_lightning.study.plan.schema import entry
from fl_lightning.study.plan.spec_file import Hours, Seed, SpecFile
from fl_lightning.study.statistics import LEVEL, SEQUENCE_C2

DECIDED = "decided"
MAX_SEEDS = 50
"""Seeds of a study that sets no other limit."""
Ending = Literal["decided", "max_seeds", "max_hours", "failed", "open"]


@dataclass
class StoppingEntries:
    """The entries of ``until`` in a study file, where it is a mapping."""

    max_seeds: Seed = entry("it is an integer, 1 or more", "40", default=MAX_SEEDS)  # type: ignore[valid-type]
    max_hours: Hours | None = entry("it is a number above 0", "6", default=None)  # type: ignore[valid-type]


@dataclass(frozen=True)
class StoppingRule:
    """The rule by which a sweep stops to add seeds: when every criterion is decided, or a budget is
    spent.

    Args:
        max_seeds: the number of seeds at which it stops, those that the study lists among them.
        max_hours: the hours of sweeping, over all its sessions, after which it stops; None: no
            limit.
        level: the level of the confidence sequences that decide.
        c2: the c2 of these confidence sequences.
    """

    max_seeds: int = MAX_SEEDS
    max_hours: float | None = None
    level: float = LEVEL
    c2: float = SEQUENCE_C2

    def document(self) -> dict[str, Any]:
        """Return the entry as it is written in a study file."""
        given = {"max_seeds": self.max_seeds, "max_hours": self.max_hours}
        return {key: value for key, value in given.items() if value is not None}

    def registered(self) -> dict[str, Any]:
        """Return everything that the decisions depend on, for the pre-registration."""
        return {"rule": DECIDED, **asdict(self)}

    @classmethod
    def from_registered(cls, document: Mapping[str, Any]) -> StoppingRule | None:
        """Return the rule that was registered; None where the seeds are fixed."""
        if document["rule"] != DECIDED:
            return None
        return cls(**{key: value for key, value in document.items() if key != "rule"})

    def seeds(self, listed: Sequence[int]) -> list[int]:
        """Return every seed that may be run, in order: those of the study, then the numbers after
        the greatest.

        >>> StoppingRule(max_seeds=5).seeds([2, 7])
        [2, 7, 8, 9, 10]
        """
        after = max(listed) + 1
        return [*listed, *range(after, after + max(0, self.max_seeds - len(listed)))]


@dataclass(frozen=True)
class Stopping:
    """Where a study that adds seeds has stopped, or is.

    Args:
        seeds: the seeds that count, in order.
        ending: ``decided``: every criterion is; ``max_seeds``, ``max_hours``: a budget is spent;
            ``failed``: a cell failed, so that no seed after it can count; ``open``: the sweep is to
            go on.
        undecided: the criteria that are undecided, as long as more seeds may decide one of them.
        beyond: the seeds after these that were begun, since a slot was free for them.
    """

    seeds: tuple[int, ...] = ()
    ending: Ending = "open"
    undecided: tuple[str, ...] = ()
    beyond: tuple[int, ...] = ()

    def sentence(self) -> str:
        """Return where it stopped, and why, in words."""
        after = "before the first look"
        if self.seeds:
            plural = "s" * (len(self.seeds) > 1)
            after = f"after {len(self.seeds)} seed{plural} ({', '.join(map(str, self.seeds))})"
        open_ones = f"undecided: {', '.join(f'`{text}`' for text in self.undecided)}"
        if self.ending == "decided":
            return f"no seed is added {after}: every criterion that seeds can decide is decided"
        why = {
            "max_seeds": "max_seeds is reached",
            "max_hours": "max_hours is spent",
            "failed": "a cell failed, and seeds count in order",
            "open": "the sweep can go on",
        }[self.ending]
        return f"{after}, {why}; {open_ones}" if self.undecided else f"{after}, {why}"


def stopping_rule(file: SpecFile, given: Any, key: str) -> StoppingRule:
    """Return the rule that the entry ``until`` of a study file describes.

    Raises:
        InputError: it is no such entry.
    """
    entries = file.parse(StoppingEntries, {} if given == DECIDED else given, f"{key}.")
    hours = None if entries.max_hours is None else float(entries.max_hours)
    return StoppingRule(int(entries.max_seeds), hours)


def check_rule(
    rule: StoppingRule, seeds: Sequence[int], criteria: Sequence[Any], where: str
) -> None:
    """Check that a rule fits a study.

    Args:
        rule: the rule.
        seeds: the seeds that the study lists.
        criteria: the criteria of the study.
        where: the beginning of a message.

    Raises:
        InputError: it does not.
    """
    if not criteria:
        example = "write criteria: [accuracy(A) - accuracy(B) >= 0.01]"
        raise InputError(
            f"{where}until", "seeds are added until criteria are decided: there is none", example
        )
    if rule.max_seeds < len(seeds):
        given, listed = f"{where}max_seeds {rule.max_seeds}", f"the study lists {len(seeds)} seeds"
        raise InputError(
            given, f"{listed}, which are run in any case", f"write {len(seeds)} or more"
        )
