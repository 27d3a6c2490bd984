"""The ring on which a deployment's server puts the clients of a secure sum."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from fl_lightning.aggregation.masked_round import MaskedRound
from fl_lightning.errors import as_bad_input
from fl_lightning.privacy import Randomness
from fl_lightning.support import disk

RING_FILE = "ring.key"
"""In the directory of a deployment without privacy whose clients have some of the others for
neighbours: what its rings follow from."""
KEY_BYTES = 32


def drawn_ring(asked: MaskedRound, randomness: Randomness) -> list[int]:
    """Return the cohort in the order of the ring on which neighbours have masks in common."""
    draws = randomness(asked.method.seed, "secure_ring", asked.round, 0)
    return draws.permutation(sorted(asked.leaves_before)).tolist()


def kept_ring(asked: MaskedRound, run_dir: Path) -> list[int]:
    """Return the cohort in an order that nobody knows before, and that a server which repeats the
    round has again: nodes then give it the sum that they gave it before.

    The order is that of HMAC-SHA256 of the ids, under a key of this round and cohort.
    """
    cohort = sorted(asked.leaves_before)
    key = hmac.digest(_secret_in(run_dir), f"{asked.round} {cohort}".encode(), "sha256")
    return sorted(cohort, key=lambda id: hmac.digest(key, str(id).encode(), "sha256"))


def _secret_in(run_dir: Path) -> bytes:
    """Return the secret of a run, drawn from the operating system when it is first asked for.

    Raises:
        InputError: it can be neither read nor written.
    """
    path = run_dir / RING_FILE
    with as_bad_input(
        f"{path}", "the rings of its secure sums follow from it", "let this user write it", OSError
    ):
        secret = path.read_bytes() if path.exists() else b""
        if len(secret) != KEY_BYTES:  # none yet, or a killed process has left a part of one
            secret, flags = os.urandom(KEY_BYTES), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            file = os.open(path, flags | disk.NO_FOLLOW, 0o600)
            with open(file, "wb") as opened:
                opened.write(secret)
                opened.flush()
                os.fsync(file)
            disk.sync_folder(run_dir)
    return secret
