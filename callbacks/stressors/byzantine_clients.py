"""Byzantine clients: some of the federation's clients send something else than what they
learned."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from callbacks.stressors.draws import own_stream
from fl_lightning.aggregation.robust import squared_distances
from fl_lightning.client import Client
from fl_lightning.config.constraints import Constraint, within
from fl_lightning.errors import InputError
from fl_lightning.hooks import Context, Stressor
from fl_lightning.rng import stream
from fl_lightning.tasks import Classification
from fl_lightning.wire import Codes, Layout, Payload

log = logging.getLogger("fl_lightning")

METADATA = frozenset({"examples", "bits", "tops", "slots", "shares", "votes", "steps", "counts"})
NOT_NEGATIVE = frozenset({"scales", "norms"})
OMNISCIENT = frozenset({"alie", "ipm", "min_max"})


class ByzantineClients(Stressor):
    """The same seeded clients in every round; they train like the others and replace their upload
    by an attack. Of two, each draws its own clients.

    An honest update u = x_k - x becomes, with the default ``strength``: ``sign_flip`` -10 u,
    ``scale`` 10 u, ``noise`` u + 10 rms(u) z with z standard normal. That is exact where values
    travel in fp32 (entries ``weights`` and ``rest``). What is coded is attacked as it stands:

    - ``scales`` (FedMPQ, AQFL) and ``norms`` (QFedAvg) are multiplied by ``strength``;
      ``sign_flip`` also flips the sign bit of every code, ``noise`` draws every code anew. QFedAvg
      codes updates, so this is the attack above. FedMPQ and AQFL code weights, so there it turns
      and scales the weights themselves.
    - codebooks (FedPQ) and every other float entry, such as soft labels, are treated as u itself;
      ``noise`` also draws indices anew.

    - ``rows`` of FedVEMoE's experts are attacked exactly; ``own``, which seeds an expert, is
      treated as u.

    Attackers of ``alie``, ``ipm`` and ``min_max`` know the honest updates u_k of the round, those
    that count, with mean m and standard deviation s of each value, and all send the same update,
    over all float entries together:

    - ``alie`` (Baruch et al., NeurIPS 2019): m - z s, with the largest z that hides among n
      uploads, f of them hostile: Phi(z) = (n - f - h) / (n - f), h = floor(n / 2 + 1) - f; z is 0
      where that is below 1/2.
    - ``ipm`` (Xie et al., UAI 2020): -``strength`` m. Their small attack, for averages that go by
      distances, is strength 0.1.
    - ``min_max`` (Shejwalkar & Houmansadr, NDSS 2021): m - g s, with the largest g that leaves it
      no further from any u_k than two of these are from each other.

    They are for uploads of values as they are, and not of codes. With ``label_flip`` clients are
    honest and train on wrong labels, C - 1 - y in place of y.

    Bit-widths and the counts of dropped planes (``bits`` and ``tops`` of FedMPQ) stay honest, as do
    which experts a client trained, their shares and its votes (``slots``, ``shares``, ``votes``),
    how many steps it made (``steps`` of FedNova and FedCM), and ``examples`` unless
    ``claimed_examples`` says otherwise.

    Attacks are on uploads, so they are the same for every task: of a language model's adapters they
    change the factors. Wrong targets, such as corrupted answers, are :class:`callbacks.LabelNoise`.

    Args:
        clients: share of the clients with training data that attack, in [0, 1]; rounded, but at
            least one when positive.
        attack: ``sign_flip``, ``noise``, ``scale``, ``label_flip``, ``alie``, ``ipm`` or
            ``min_max``.
        strength: how many times the honest update it is, above 0; ``label_flip``, ``alie`` and
            ``min_max`` have none.
        round: first round of the attack, counted from 1.
        claimed_examples: the number of examples n_k that attackers claim, 1 to 2**63 - 1: their
            weight in every average. The server refuses a claim above what the client enrolled with.
            None: their true n_k.
    """

    attacks = True

    def __init__(
        self,
        clients: Annotated[
            float, within("[0, 1]", "a share lies in [0, 1]", "for 20 % write clients: 0.2")
        ] = 0.2,
        attack: Annotated[
            Literal["sign_flip", "noise", "scale", "label_flip", "alie", "ipm", "min_max"],
            Constraint(
                "it is sign_flip, noise, scale, label_flip, alie, ipm or min_max", "sign_flip"
            ),
        ] = "sign_flip",
        strength: Annotated[float, within("(0, inf)", "it is above 0 and finite", 10)] = 10.0,
        round: Annotated[
            int,
            within(
                "[1, inf)",
                "rounds are counted from 1",
                "for an attack from the start write round: 1",
            ),
        ] = 1,
        claimed_examples: Annotated[
            int | None, within("[1, 9223372036854775807]", "it lies in 1 to 2**63 - 1", 1000000)
        ] = None,
    ) -> None:
        self.clients, self.attack, self.strength, self.round = clients, attack, strength, round
        self.claimed_examples = claimed_examples
        self._attackers: frozenset[int] | None = None  # recomputed at will
        # hooks that some attacks alone have: a deployment has no labels, a private sum no single
        # uploads
        if attack == "label_flip":
            self.change_labels = self._flip_labels  # type: ignore[method-assign]
        if attack in OMNISCIENT:
            self.change_uploads = self._attack_together  # type: ignore[method-assign]

    def on_check(self, context: Context) -> None:
        self._attackers = None
        if self.attack == "label_flip" and not isinstance(context.data.task, Classification):
            raise InputError(
                f"ByzantineClients(attack='label_flip') where the task is {type(context.data.task).__name__}",
                "it turns classes of examples around",
                "write attack: sign_flip, or take LabelNoise",
            )
        if self.round > context.max_rounds:
            log.warning(
                (
                    "ByzantineClients attack from round %d and the run ends at %d: nobody attacks; for "
                    "an attack set round to %d or less"
                ),
                self.round, context.max_rounds, context.max_rounds,
            )  # fmt: skip

    def change_upload(
        self, upload: Payload, *, client: Client, round: int, context: Context
    ) -> Payload:
        if round < self.round or client.id not in self.attackers(context):
            return upload
        draws = stream(context.seed, own_stream("byzantine", self, context), round, client.id)
        method, starts = context.method, context.method.entry_starts(upload)
        return Payload(
            {
                name: self._attacked(name, value, method, client, draws, starts.get(name))
                for name, value in upload.items()
            }
        )

    def attackers(self, context: Context) -> frozenset[int]:
        """Return who attacks: a function of the seed and of which clients have training data."""
        if self._attackers is None:
            candidates = np.flatnonzero(context.data.sizes)
            count = max(
                int(self.clients * len(candidates) + 0.5),
                int(self.clients > 0 and len(candidates) > 0),
            )
            random = stream(context.seed, own_stream("byzantine_clients", self, context))
            self._attackers = frozenset(random.choice(candidates, count, replace=False).tolist())
            log.info(
                "%s by %d of %d clients from round %d",
                self.attack,
                count,
                len(candidates),
                self.round,
            )
        return self._attackers

    def _flip_labels(
        self, labels: Tensor, *, client: Client, round: int, context: Context
    ) -> Tensor:
        if round < self.round or client.id not in self.attackers(context):
            return labels
        if labels.is_floating_point():  # shares of the classes
            return labels.flip(1)
        return context.data.num_classes - 1 - labels

    def _attack_together(
        self, uploads: dict[int, Payload], *, round: int, context: Context
    ) -> dict[int, Payload]:
        hostile = sorted(self.attackers(context) & uploads.keys()) if round >= self.round else []
        honest = sorted(uploads.keys() - {*hostile})
        if not hostile:
            return uploads
        if not honest:
            log.warning(
                "round %d: all %d uploads are hostile, and %s follows honest ones: nobody attacks",
                round,
                len(hostile),
                self.attack,
            )
            return uploads
        starts = {id: self._starts(uploads[id], context, id) for id in uploads}
        updates = torch.stack(
            [_update(uploads[id], starts[id], starts[hostile[0]]) for id in honest]
        )
        update = self._joint_update(updates, len(hostile))
        return uploads | {id: _with_update(uploads[id], starts[id], update) for id in hostile}

    def _starts(self, upload: Payload, context: Context, id: int) -> dict[str, Tensor]:
        """Return what each attacked entry was before the client trained it.

        Raises:
            InputError: the upload has codes.
        """
        client, own, starts = context.data.client(id), context.method.entry_starts(upload), {}
        for name, value in upload.items():
            if isinstance(value, Codes):
                raise InputError(
                    f"ByzantineClients(attack={self.attack!r}) with --model {type(context.method).__name__}",
                    f"the entry {name!r} of its uploads has codes, which no attacker can choose freely",
                    "write attack: sign_flip, or --model FedAvg",
                )
            if name not in METADATA and value.is_floating_point():
                starts[name] = own.get(name, broadcast_of(name, value, context.method, client))
        return starts

    def _joint_update(self, honest: Tensor, hostile: int) -> Tensor:
        """Return what all attackers send.

        Args:
            honest: updates of the others, float64 ``[K, P]``.
            hostile: f, how many attack.
        """
        mean = honest.mean(dim=0)
        if self.attack == "ipm":
            return -self.strength * mean
        spread = honest.std(dim=0, correction=0)
        if self.attack == "alie":
            return mean - hiding_quantile(len(honest) + hostile, hostile) * spread
        return mean - min_max_length(honest, mean, spread) * spread

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
        if name in METADATA or self.attack == "label_flip" or self.attack in OMNISCIENT:
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
        return update + self.strength * rms * torch.from_numpy(
            draws.standard_normal(tuple(update.shape))
        )

    def _attacked_codes(self, codes: Codes, draws: np.random.Generator) -> Codes:
        values, top = codes.values, 2**codes.bits
        if self.attack == "noise":
            top = int(values.max()) + 1 if codes.are_indices and values.numel() else top
            drawn = draws.integers(top, size=tuple(values.shape), dtype=np.int32)
            return replace(codes, values=torch.from_numpy(drawn))
        flips = self.attack == "sign_flip" and not codes.are_indices
        return replace(codes, values=values ^ (top // 2)) if flips else codes


def _update(upload: Payload, start: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    """Return the updates of all attacked entries as one vector, float64.

    Raises:
        InputError: these are other entries than those of ``like``.
    """
    if {name: one.shape for name, one in start.items()} != {
        name: one.shape for name, one in like.items()
    }:
        raise InputError(
            "an attack that knows all uploads where clients send different entries",
            "attackers send a mean of them",
            "write attack: sign_flip",
        )
    return torch.cat(
        [(upload.tensor(name).double() - start[name]).flatten() for name in sorted(start)]
    )


def _with_update(upload: Payload, start: Mapping[str, Tensor], update: Tensor) -> Payload:
    """Return the upload with another update."""
    names = sorted(start)
    pieces = update.split([start[name].numel() for name in names])
    sent = {
        name: (start[name] + piece.view_as(start[name])).to(upload.tensor(name).dtype)
        for name, piece in zip(names, pieces, strict=True)
    }
    return Payload({**dict(upload.items()), **sent})


def hiding_quantile(count: int, hostile: int) -> float:
    """Return z of ``alie``: the share of honest values below m + z s leaves the attackers and as
    many honest clients as they need for a majority outside.

    >>> round(hiding_quantile(50, 12), 3)
    0.336
    """
    honest, needed = count - hostile, max(1, count // 2 + 1 - hostile)
    share = (honest - needed) / honest
    return NormalDist().inv_cdf(share) if share > 0.5 else 0.0


def min_max_length(honest: Tensor, mean: Tensor, spread: Tensor) -> float:
    """Return g of ``min_max``: the largest for which ||m - g s - u_k|| <= max_ij ||u_i - u_j|| for
    all k.

    Each k bounds it by a quadratic equation, g^2 s.s - 2 g s.(m - u_k) + ||m - u_k||^2 = max ||u_i
    - u_j||^2.
    """
    away, squared = mean - honest, float(spread.square().sum())
    if squared == 0:
        return 0.0
    along, left = away @ spread, squared_distances(list(honest)).max() - away.square().sum(dim=1)
    return float(((along + (along.square() + squared * left.clamp_min(0)).sqrt()) / squared).min())


def broadcast_of(name: str, value: Tensor, method: Any, client: Client) -> Tensor:
    """Return what the server sent this client for this entry: the values from which its update is
    counted; zeros where the entry is no weight."""
    layout, start = getattr(method, "layout", None), method.server.get("weights")
    found, rest = None, getattr(method, "rest", None)
    if isinstance(layout, Layout) and name == "weights":
        if start is not None and start.shape == value.shape:
            found = start
        elif start is not None and (moving := method.adapters.moving(method)) is not None:
            found = start[moving]  # the half of a round
        else:  # one of several models, or a client's ranks
            sent = method.broadcast(client)
            found = sent.tensor(name) if name in sent else None
    elif isinstance(layout, Layout) and isinstance(rest, Layout) and name == "rest":
        found = None if start is None else rest.pack(layout.unpack(start))
    return found if found is not None and found.shape == value.shape else torch.zeros_like(value)
