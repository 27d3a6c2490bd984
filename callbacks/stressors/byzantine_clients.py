"""Byzantine clients: some of the federation's clients send something else than what they learned."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.errors import InputError
from fl_lightning.hooks import Context, Stressor
from fl_lightning.methods import FedVEMoE
from fl_lightning.rng import stream
from fl_lightning.wire import Codes, Layout, Payload

log = logging.getLogger("fl_lightning")

METADATA = frozenset({"examples", "bits", "tops", "slots", "shares", "votes"})
NOT_NEGATIVE = frozenset({"scales", "norms"})


class ByzantineClients(Stressor):
    """The same seeded clients in every round; they train like the others and replace their upload by an
    attack.

    An honest update u = x_k - x becomes, with the default ``strength``: ``sign_flip`` -10 u, ``scale`` 10 u,
    ``noise`` u + 10 rms(u) z with z standard normal. That is exact where values travel in fp32 (entries
    ``weights`` and ``rest``). What is coded is attacked as it stands:

    - ``scales`` (FedMPQ, AQFL) and ``norms`` (QFedAvg) are multiplied by ``strength``; ``sign_flip`` also
      flips the sign bit of every code, ``noise`` draws every code anew. QFedAvg codes updates, so this is the
      attack above. FedMPQ and AQFL code weights, so there it turns and scales the weights themselves.
    - codebooks (FedPQ) and every other float entry, such as soft labels, are treated as u itself; ``noise``
      also draws indices anew.

    - ``rows`` of FedVEMoE's experts are attacked exactly; ``own``, which seeds an expert, is treated as u.

    Bit-widths and the counts of dropped planes (``bits`` and ``tops`` of FedMPQ) stay honest, as do which
    experts a client trained, their shares and its votes (``slots``, ``shares``, ``votes``), and ``examples``
    unless ``claimed_examples`` says otherwise.

    Attacks are on uploads, so they are the same for every task: of a language model's adapters they change
    the factors. Wrong targets, such as corrupted answers, are :class:`callbacks.LabelNoise`.

    Args:
        clients: share of the clients with training data that attack, in [0, 1]; rounded, but at least one
            when positive.
        attack: ``sign_flip``, ``noise`` or ``scale``.
        strength: how many times the honest update it is, above 0.
        round: first round of the attack, counted from 1.
        claimed_examples: the number of examples n_k that attackers claim, 1 to 2**63 - 1: their weight in
            every average. The server refuses a claim above what the client enrolled with. None: their true
            n_k.
    """

    def __init__(
        self,
        clients: float = 0.2,
        attack: Literal["sign_flip", "noise", "scale"] = "sign_flip",
        strength: float = 10.0,
        round: int = 1,
        claimed_examples: int | None = None,
    ) -> None:
        if not 0 <= clients <= 1:
            raise InputError(
                f"ByzantineClients(clients={clients})",
                "a share lies in [0, 1]",
                "for 20 % write clients: 0.2",
            )
        if attack not in ("sign_flip", "noise", "scale"):
            raise InputError(
                f"ByzantineClients(attack={attack!r})",
                "it is sign_flip, noise or scale",
                "write attack: sign_flip",
            )
        if not 0 < strength < math.inf:
            raise InputError(
                f"ByzantineClients(strength={strength})", "it is above 0 and finite", "write strength: 10"
            )
        if round < 1:
            raise InputError(
                f"ByzantineClients(round={round})",
                "rounds are counted from 1",
                "for an attack from the start write round: 1",
            )
        if claimed_examples is not None and not 1 <= claimed_examples < 2**63:
            raise InputError(
                f"ByzantineClients(claimed_examples={claimed_examples})",
                "it lies in 1 to 2**63 - 1",
                "write claimed_examples: 1000000",
            )
        self.clients, self.attack, self.strength, self.round = clients, attack, strength, round
        self.claimed_examples = claimed_examples
        self._attackers: frozenset[int] | None = None  # recomputed at will

    def on_check(self, context: Context) -> None:
        method = context.method
        if method.attack_refused:
            raise InputError(
                f"ByzantineClients with --model {type(method).__name__}",
                method.attack_refused,
                "leave it out, or write --model FedAvg",
            )
        if self.round > context.max_rounds:
            log.warning(
                (
                    "ByzantineClients attack from round %d and the run ends at %d: nobody attacks; for "
                    "an attack set round to %d or less"
                ),
                self.round, context.max_rounds, context.max_rounds,
            )  # fmt: skip

    def on_setup(self, context: Context) -> None:
        self._attackers = None

    def change_upload(self, upload: Payload, *, client: Client, round: int, context: Context) -> Payload:
        if round < self.round or client.id not in self.attackers(context):
            return upload
        draws = stream(context.seed, "byzantine", round, client.id)
        method = context.method
        attacked = {}
        for name, value in upload.items():
            start = method.starts_of(upload) if name == "rows" and isinstance(method, FedVEMoE) else None
            attacked[name] = self._attacked(name, value, method, client, draws, start)
        return Payload(attacked)

    def attackers(self, context: Context) -> frozenset[int]:
        """Return who attacks: a function of the seed and of which clients have training data."""
        if self._attackers is None:
            candidates = np.flatnonzero(context.data.sizes)
            count = max(
                int(self.clients * len(candidates) + 0.5), int(self.clients > 0 and len(candidates) > 0)
            )
            self._attackers = frozenset(
                stream(context.seed, "byzantine_clients").choice(candidates, count, replace=False).tolist()
            )
            log.info("%s by %d of %d clients from round %d", self.attack, count, len(candidates), self.round)
        return self._attackers

    def _attacked(
        self,
        name: str,
        value: Tensor | Codes,
        method: Any,
        client: Client,
        draws: np.random.Generator,
        start: Tensor | None,
    ) -> Tensor | Codes:
        if name == "examples" and self.claimed_examples is not None:
            return torch.tensor(self.claimed_examples)
        if name in METADATA:
            return value
        if isinstance(value, Codes):
            return self._attacked_codes(value, draws)
        if not value.is_floating_point():
            return value
        if name in NOT_NEGATIVE:
            return value * self.strength
        honest = broadcast_of(name, value, method, client) if start is None else start
        return (honest + self._attacked_update(value - honest, draws)).to(value.dtype)

    def _attacked_update(self, update: Tensor, draws: np.random.Generator) -> Tensor:
        if self.attack == "sign_flip":
            return -self.strength * update
        if self.attack == "scale":
            return self.strength * update
        rms = update.double().square().mean().sqrt()
        return update + self.strength * rms * torch.from_numpy(draws.standard_normal(tuple(update.shape)))

    def _attacked_codes(self, codes: Codes, draws: np.random.Generator) -> Codes:
        values, top = codes.values, 2**codes.bits
        if self.attack == "noise":
            top = int(values.max()) + 1 if codes.are_indices and values.numel() else top
            drawn = draws.integers(top, size=tuple(values.shape), dtype=np.int32)
            return replace(codes, values=torch.from_numpy(drawn))
        flips = self.attack == "sign_flip" and not codes.are_indices
        return replace(codes, values=values ^ (top // 2)) if flips else codes


def broadcast_of(name: str, value: Tensor, method: Any, client: Client) -> Tensor:
    """Return what the server sent this client for this entry: the values from which its update is counted;
    zeros where the entry is no weight."""
    layout, start = getattr(method, "layout", None), method.server.get("weights")
    if start is None and name == "weights":  # the server has several models, as the Oracle has
        sent = method.broadcast(client)
        start = sent.tensor(name) if name in sent else None
    if isinstance(layout, Layout) and start is not None:
        if name == "weights" and value.shape == start.shape:
            return start
        rest = getattr(method, "rest", None)
        if name == "rest" and isinstance(rest, Layout) and value.shape == (rest.size,):
            return rest.pack(layout.unpack(start))
    return torch.zeros_like(value)
