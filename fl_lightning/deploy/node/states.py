"""What clients keep between rounds, on the disk of their node: it never leaves it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from fl_lightning.errors import LostStateError, as_bad_input, require
from fl_lightning.support import disk
from fl_lightning.support.tensor_bytes import separate

KEPT_ROUNDS = 3
"""States of a client that stay on the disk whatever the server keeps: after the round that is done,
after the one that it started from, and one more for a server that falls back to the checkpoint
before its last."""
RUN_ID = re.compile(r"[0-9a-f]{8,64}")
AFTER = re.compile(r"after_(\d+)\.safetensors")


def run_id(value: object) -> str:
    """Return the id of a run as a server sends it, which names files.

    Raises:
        InputError: it is none.
    """
    run = str(value)
    given = f"{run[:64]!r} is no id of a run"
    require(RUN_ID.fullmatch(run), given, "it has 8 to 64 hexadecimal digits", "send such a one")
    return run


class StateFolder:
    """The states of the clients of one node, by run, client and round.

    ``<folder>/<run>/client_<id>/after_<round>.safetensors`` is what a client kept after that round.
    A file is written aside, synced and renamed, so that one with its final name is whole. Its
    metadata has the SHA-256 of the node's own data, and one of this and of the same file without
    metadata. The server says from which round's state a client goes on: one that falls back to an
    earlier checkpoint finds the state of then.

    Args:
        folder: it is made when the first state is written.

    Attributes:
        data: SHA-256 of the node's own data, of which states are; empty where it has none or they
            do not say.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, ""

    def load(self, run: str, client: int, round: int) -> dict[str, Tensor] | None:
        """Return what a client kept after a round; nothing after round 0; None where no such state
        is here.

        Raises:
            LostStateError: it is here and cannot be read, or is of other data. It is left as it is.
        """
        if round == 0:
            return {}
        path = self._of(run, client) / f"after_{round:06d}.safetensors"
        with suppress(OSError):
            os.utime(self.folder / run)  # the run is in use: it is not one of long ago
        try:
            state, data = _unpacked(path) if path.exists() else (None, "")
        except (OSError, SafetensorError) as error:
            raise LostStateError(
                f"{path}, what client {client} kept after round {round}",
                "the file is damaged or cannot be read",
                "put it back from a copy, or continue the run from a checkpoint of an earlier round if there "
                "is one; until then the client counts as dropped",
            ) from error
        if data and data != self.data:
            raise LostStateError(
                f"{path}, what client {client} kept after round {round}",
                "the node had other data of its own then",
                "put those back, or start the run anew",
            )
        return state

    def save(
        self,
        run: str,
        client: int,
        round: int,
        state: Mapping[str, Tensor],
        *,
        started_from: int,
        checkpoints: Collection[int] = (),
        always: bool = False,
    ) -> None:
        """Write what a client keeps after a round, and remove what no server can ask for any more.

        Args:
            started_from: the round whose state it started from; states of rounds between are of a
                future that the server has forgotten. Those of later rounds stay: this one may be
                of an order that came late.
            checkpoints: rounds of the server's checkpoints, to which it may go back: of each the
                state of then stays.
            always: write a file also for a client that keeps nothing and never has.

        Raises:
            InputError: the disk does not take it. What was kept before is then still there.
        """
        folder = self._of(run, client)
        if not (state or always or folder.exists()):
            return
        packed = separate({name: tensor.cpu() for name, tensor in state.items()})
        given = f"what client {client} keeps after round {round}"
        instead = "make room, or let the node write its folder; the client counts as dropped"
        with as_bad_input(given, "the node's disk does not take it", instead, OSError):
            folder.mkdir(parents=True, exist_ok=True)
            own = {"data": self.data} if self.data else {}
            whole = save(packed, {"sha256": _sum_of(packed, self.data), **own})
            disk.replace(folder / f"after_{round:06d}.safetensors", whole)
        rounds = {
            int(found[1]): path
            for path in folder.iterdir()
            if (found := AFTER.fullmatch(path.name))
        }
        past = sorted(number for number in rounds if number <= started_from)
        kept = {round, *past[1 - KEPT_ROUNDS :]}
        kept |= {number for number in rounds if number > round}
        kept |= {
            max((number for number in past if number <= then), default=round)
            for then in checkpoints
        }
        for number, path in rounds.items():
            if number not in kept:
                with suppress(OSError):  # one that stays does no harm
                    path.unlink()

    def _of(self, run: str, client: int) -> Path:
        return self.folder / run_id(run) / f"client_{int(client):06d}"


def _unpacked(path: Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file, and the SHA-256 of the node's own data, empty where none was
    noted.
    """
    state = load(path.read_bytes())
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
    data = about.get("data", "")
    if about.get("sha256") != _sum_of(state, data):
        raise SafetensorError("its SHA-256 is another")
    return state, data


def _sum_of(state: Mapping[str, Tensor], data: str) -> str:
    return sha256(save(dict(state)) + data.encode()).hexdigest()
