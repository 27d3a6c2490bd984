"""What is to be added up under masks in one round, and how the clients of this process do it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from fl_lightning.aggregation.server import SummingServer
from fl_lightning.aggregation.sum_form import SumForm
from fl_lightning.aggregation.sums import Addend
from fl_lightning.distributed.collectives import gather_bytes
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.wire import Payload

if TYPE_CHECKING:  # it needs the extra privacy
    from fl_lightning.privacy.secure.simulation import Outcome


@dataclass(frozen=True, slots=True)
class MaskedRound:
    """What is to be added up under masks in one round.

    Args:
        settings: of the secure sum.
        method: the resident module with the server's state.
        round: number of the round.
        leaves_before: ids of the cohort, each with the phase before which it drops out, or an empty
            text.
        uploads: those of this process, by id.
        addends: what a client adds to the sums, of its id and its upload.
        deliver: what becomes of a masked message on its way; None: it is lost.
    """

    settings: SecureSum
    method: SummingServer
    round: int
    leaves_before: Mapping[int, str]
    uploads: Mapping[int, Payload]
    addends: Callable[[int, Payload], dict[str, Addend]]
    deliver: Callable[[int, bytes], bytes | None]


AddUnderMasks = Callable[[MaskedRound], "tuple[SumForm, Outcome]"]
"""Has the clients of a round mask and send their vectors, and returns the form of all of them and
what came of the round."""


def add_up_here(asked: MaskedRound) -> tuple[SumForm, Outcome]:
    """Have clients whose uploads are in this process, or in the other ones of the run, mask and add
    them up.

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


def _common_form(
    uploads: Mapping[int, Payload], addends: Callable[[int, Payload], dict[str, Addend]]
) -> SumForm:
    """Return the form of all clients' vectors, on every process."""
    own = [SumForm.of(addends(id, upload)).parts for id, upload in [*uploads.items()][:1]]
    found = [
        of_rank for text in gather_bytes(json.dumps(own).encode()) for of_rank in json.loads(text)
    ]
    return (
        SumForm(tuple((name, size, most) for name, size, most in found[0])) if found else SumForm()
    )
