"""What a round touches: the parts of a run, and what it remembers between rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.aggregation.base import Aggregation
from fl_lightning.client import Client
from fl_lightning.clock import Timing
from fl_lightning.data import FederatedData
from fl_lightning.engines import Holders
from fl_lightning.hooks import Callback, RunFiles, stress
from fl_lightning.methods import Method
from fl_lightning.sampling import Sampler, Uniform
from fl_lightning.wire import Ledger, LedgerEntry, Payload

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Federation:
    """Everything that a round touches, and what callbacks may read of the run.

    Args:
        fabric: device and precision.
        method: the resident module and the server's state.
        data: the clients' examples.
        aggregation: what becomes of the uploads of a round.
        callbacks: stressors and meters, in the order of the configuration.
        seed: what every random draw follows from.
        max_rounds: rounds of the run.
        participation: share of the clients with training data that is sampled each round, in (0,
            1].
        local_epochs: passes over its data that a client makes in a round.
        max_local_steps: bound on its local steps; None: no bound.
        eval_every: rounds between evaluations; the last of ``max_rounds`` is always evaluated, and
            so is the one with which privacy ends the run.
        timing: virtual time, and whose uploads are in time; None: rounds take none.
        sampler: draws the clients of a round.
        files: where figures and texts of callbacks go; None outside a run.
        states: what clients keep between rounds, by client id; of several processes, rank 0 has
            all, another rank those of the clients that it trained last.
        holders: which rank holds which client's state.
        ledger: bytes of every client and round.
        asked: what the ledger says of clients that were asked for their loss in this round, by id.
        last_broadcast: of the last one identity, bytes and payload, which keeps it comparable.
    """

    fabric: Fabric
    method: Method
    data: FederatedData
    aggregation: Aggregation
    callbacks: Sequence[Callback]
    seed: int
    max_rounds: int
    participation: float
    local_epochs: int
    eval_every: int
    max_local_steps: int | None = None
    timing: Timing | None = None
    sampler: Sampler = field(default_factory=Uniform)
    files: RunFiles | None = None
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    holders: Holders = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    asked: dict[int, LedgerEntry] = field(default_factory=dict)
    last_broadcast: tuple[tuple[object, ...], bytes, Payload] | None = None

    @property
    def cohort_size(self) -> int:
        """Clients that are wanted each round."""
        return cohort_of(self.participation, len(self.data.active))

    @property
    def invited(self) -> int:
        """Clients that are sampled each round: as many as are wanted, or more for the first."""
        if self.timing is None:
            return self.cohort_size
        return min(self.timing.rounds.invited(self.cohort_size), len(self.data.active))

    def is_evaluated(self, round: int) -> bool:
        """Return whether a round ends with an evaluation: one of ``eval_every``, and the last."""
        privacy = self.aggregation.privacy
        is_last = round == self.max_rounds or (privacy is not None and privacy.ends_with(round))
        return is_last or round % self.eval_every == 0

    def labels_of(self, client: Client) -> Tensor:
        """Return the labels that a client trains on in the method's round, int64 ``[n_k]``: the
        data's, as stressors have changed them."""
        (own,) = self.data.labels_of([client])
        details = {"client": client, "round": self.method.round, "context": self}
        return stress(self.callbacks, "change_labels", own, **details)

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""
        return self._files.run_dir

    def log_figure(self, name: str, figure: Figure) -> None:
        """Save ``figures/<name>.png`` and ``.pdf`` and hand them to the loggers."""
        self._files.log_figure(name, figure)

    def log_text(self, name: str, text: str) -> None:
        """Save ``figures/<name>`` and hand it to the loggers."""
        self._files.log_text(name, text)

    @property
    def _files(self) -> RunFiles:
        assert self.files is not None, "there is no run directory before on_setup"
        return self.files


def cohort_of(participation: float, clients: int) -> int:
    """Return how many of so many clients are wanted each round."""
    return max(1, math.floor(participation * clients + 0.5))


def weights_hash(fed: Federation) -> str:
    """SHA-256 of the server's state as one float64 vector, its tensors in order of name."""
    digest = sha256()
    for _, tensor in sorted(fed.method.server.items()):
        digest.update(tensor.reshape(-1).double().numpy().data)
    return digest.hexdigest()
