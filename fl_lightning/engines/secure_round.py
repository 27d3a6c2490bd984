"""One round's secure sum over the clients' uploads, and what it cost each of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from fl_lightning.client import Assignment
from fl_lightning.distributed.collectives import gather_bytes
from fl_lightning.methods import Method
from fl_lightning.methods.secure import SumForm
from fl_lightning.methods.sums import Addend, Sums
from fl_lightning.privacy.secure import PHASES, SecureSum
from fl_lightning.wire import LedgerEntry, Payload

if TYPE_CHECKING:  # it needs the extra privacy
    from fl_lightning.privacy.secure.simulation import Outcome


@dataclass(frozen=True, slots=True)
class MaskedSum:
    """What is to be added up under masks in one round.

    Args:
        settings: of the secure sum.
        method: the resident module with the server's state.
        round: number of the round.
        leaves_before: ids of the cohort, each with the phase before which it drops out, or an empty text.
        uploads: those of this process, by id.
        addends: what a client adds to the sums, of its id and its upload.
        deliver: what becomes of a masked message on its way; None: it is lost.
    """

    settings: SecureSum
    method: Method
    round: int
    leaves_before: Mapping[int, str]
    uploads: Mapping[int, Payload]
    addends: Callable[[int, Payload], dict[str, Addend]]
    deliver: Callable[[int, bytes], bytes | None]


@dataclass(frozen=True, slots=True)
class SecureRound:
    """What came of a round.

    Args:
        sums: the server's sums; None where the round is void.
        void: why it is; empty where it is not.
        entries: of the ledger, with the messages of all phases; a client counts if it is in the sum.
        metrics: bytes by phase, and whether the round is void.
    """

    sums: Sums | None
    void: str
    entries: list[LedgerEntry]
    metrics: dict[str, float]


def add_up_here(asked: MaskedSum) -> tuple[SumForm, Outcome]:
    """Have clients whose uploads are in this process, or in the other ones of the run, mask and add them up.

    Returns:
        The form of all clients' vectors, and what came of the round.

    Raises:
        MisuseError: clients' addends have different forms, or values out of range.
        RankLost: a process died or did not answer in time.
    """
    from fl_lightning.privacy.secure.simulation import run_round

    form, method = _common_form(asked.uploads, asked.addends), asked.method

    def vector(id: int, upload: Payload) -> Tensor:
        return form.vector(asked.addends(id, upload), method.average, method.cohort)

    outcome = run_round(
        asked.settings,
        seed=method.seed,
        round=asked.round,
        leaves_before=asked.leaves_before,
        length=form.length,
        vectors={id: partial(vector, id, upload) for id, upload in asked.uploads.items()},
        deliver=asked.deliver,
    )
    return form, outcome


def sum_securely(
    settings: SecureSum,
    method: Method,
    round: int,
    cohort: Sequence[Assignment],
    entries: Sequence[LedgerEntry],
    uploads: Mapping[int, Payload],
    addends: Callable[[int, Payload], dict[str, Addend]],
    deliver: Callable[[int, bytes], bytes | None],
    add_up: Callable[[MaskedSum], tuple[SumForm, Outcome]] = add_up_here,
) -> SecureRound:
    """Mask what the clients would have uploaded, and add it up.

    Args:
        settings: of the secure sum.
        method: the resident module with the server's state.
        round: number of the round.
        cohort: the round's clients.
        entries: one for each of them, of what happened until it would have sent its upload: ``trained`` where
            it has one that passed its own checks.
        uploads: those of this process, by id.
        addends: what a client adds to the sums, of its id and its upload.
        deliver: what becomes of a masked message on its way; None: it is lost.
        add_up: has the clients mask and send their vectors.

    Raises:
        MisuseError: clients' addends have different forms, or values out of range.
        RankLost: a process died or did not answer in time.
    """
    leaves_before = {
        assignment.client.id: _phase_of_leaving(assignment, entry)
        for assignment, entry in zip(cohort, entries, strict=True)
    }
    form, outcome = add_up(MaskedSum(settings, method, round, leaves_before, uploads, addends, deliver))
    counted = set() if outcome.void else outcome.living
    ended = []
    for entry in entries:
        up, down = outcome.traffic.up[entry.client], outcome.traffic.down[entry.client]
        status = entry.status
        if status == "trained" and entry.client not in counted:
            status = "rejected" if entry.client in outcome.rejected else "lost"
        wasted = 0 if entry.client in counted else up
        ended.append(replace(entry, status=status, upload=up, download=entry.download + down, wasted=wasted))
    sums = None if outcome.total is None else form.sums(outcome.total, method.average, method.cohort)
    by_phase = {f"comm/{phase}_bytes": outcome.traffic.phases[phase] for phase in PHASES}
    return SecureRound(sums, outcome.void, ended, {**by_phase, "secure/void": int(outcome.total is None)})


def _phase_of_leaving(assignment: Assignment, entry: LedgerEntry) -> str:
    """Return the phase before which a client drops out; empty where it stays."""
    if assignment.leaves_before:
        return assignment.leaves_before
    if entry.status == "dropped":  # nobody asked it to train, or its machine did not answer
        return "keys"
    return "" if entry.status == "trained" else "masked"


def _common_form(
    uploads: Mapping[int, Payload], addends: Callable[[int, Payload], dict[str, Addend]]
) -> SumForm:
    """Return the form of all clients' vectors, on every process."""
    own = [SumForm.of(addends(id, upload)).parts for id, upload in [*uploads.items()][:1]]
    found = [of_rank for text in gather_bytes(json.dumps(own).encode()) for of_rank in json.loads(text)]
    return SumForm(tuple((name, size, most) for name, size, most in found[0])) if found else SumForm()
