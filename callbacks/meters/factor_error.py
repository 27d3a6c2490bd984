"""What a mean of LoRA factors loses: the mean of B A is not the mean of B times the mean of A."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from callbacks.stressors.byzantine_clients import ByzantineClients
from fl_lightning.aggregation.average import Average
from fl_lightning.aggregation.server import SummingServer
from fl_lightning.client import Client
from fl_lightning.config.overriding import overrides
from fl_lightning.distributed.collectives import gather_parts
from fl_lightning.errors import InputError
from fl_lightning.hooks import Context, Meter, RoundRecord, Stressor, sees_uploads
from fl_lightning.methods import Method
from fl_lightning.methods.experts.merging import AdapterSpace
from fl_lightning.models.adapters.low_rank import factor_pairs
from fl_lightning.models.language.experts import factors_of
from fl_lightning.models.tensors import tensors_of
from fl_lightning.topology.exchange import NodeAggregation
from fl_lightning.wire import Payload


class FactorError(Stressor, Meter):
    """Adds ``average/factor_error`` to every round, for federated LoRA whose A and B are averaged
    apart:

        || sum_k p_k B_k A_k  -  (sum_k p_k B_k) (sum_k p_k A_k) ||  /  || sum_k p_k B_k A_k ||

    in the Frobenius norm over all layers, over the clients whose upload counts; of Fed-VEMoE over
    the trainers of each expert, and squares are added up over experts. It is 0 where A is frozen.
    It reads single uploads, so that a secure sum cannot have it, and holds them in memory until the
    end of the round. It changes nothing.
    """

    def __init__(self) -> None:
        self._uploads: dict[str, Tensor] = {}

    def on_check(self, context: Context) -> None:
        if why := _other_mean(context):
            raise InputError(
                "callbacks.FactorError",
                f"it compares the mean of uploads, and {why}",
                "leave it out",
            )
        fed: Any = context
        after = fed.callbacks[fed.callbacks.index(self) + 1 :]
        attacks = [one for one in after if isinstance(one, ByzantineClients)]
        attacks = [one for one in attacks if one.attack != "label_flip"]
        changing = [*filter(sees_uploads, fed.callbacks), *attacks]
        if changing:
            raise InputError(
                f"callbacks.FactorError with {type(changing[0]).__name__}",
                "it reads each upload when its turn comes, and this one is changed after it",
                "list FactorError last, and leave out attacks that know all uploads, such as alie",
            )
        rounds = context.timing and context.timing.rounds
        if rounds and rounds.has_versions:
            raise InputError(
                f"callbacks.FactorError with --trainer.rounds {type(rounds).__name__}",
                "a buffer weighs uploads by their age, and a part of them is of rounds before",
                "leave it out",
            )
        try:
            self._space = adapter_space(context.method)
        except InputError as error:
            raise InputError(
                f"callbacks.FactorError with {error.given}",
                "it measures LoRA adapters on a frozen network",
                f"leave it out, or {error.instead}",
            ) from error

    def on_round_start(self, round: int, context: Context) -> None:
        self._uploads = {}

    def change_upload(
        self, upload: Payload, *, client: Client, round: int, context: Context
    ) -> Payload:
        for slot, weight, adapter in context.method.averaged(upload):
            value = torch.cat([torch.tensor([weight], dtype=torch.float64), adapter.double()])
            self._uploads[f"{slot}/{client.id}"] = value.cpu()
        return upload

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        everybody = gather_parts(self._uploads)
        self._uploads = {}
        fed: Any = context
        entries = (one for one in fed.ledger.entries if one.round == record.round)
        counted = {str(one.client) for one in entries if one.status == "trained"}
        by_slot: dict[str, dict[int, Tensor]] = {}
        for name in sorted(everybody):  # in one order whatever process trained whom
            slot, _, id = name.partition("/")
            if id in counted:
                by_slot.setdefault(slot, {})[int(id)] = everybody[name]
        squares = [
            self._space.factor_error(*_weighted(rows, context.method)) for rows in by_slot.values()
        ]
        whole = sum(square for _, square in squares)
        if whole > 0:
            record.metrics["average/factor_error"] = (
                sum(error for error, _ in squares) / whole
            ) ** 0.5


def _other_mean(context: Context) -> str:
    """Return why the server takes no mean of what clients send, by their weights; empty: it
    does."""
    method, average = context.method, context.method.average
    if context.aggregation.masks is not None:
        return "a secure sum shows no upload"
    if not method.is_sum:
        named = "the rule of adapter_average measures what it loses"
        return named if method.adapters.name else f"{type(method).__name__} takes no mean"
    if overrides(average, Average, "bounded"):
        return f"{type(average).__name__} takes one of what it makes of each"
    if isinstance(context.aggregation, NodeAggregation):
        return "each node of a topology has its own"
    own = method.own.shapes
    halves = [each for each in factor_pairs(method.network) if (each.a in own) != (each.b in own)]
    if halves:
        return f"{halves[0].a if halves[0].a in own else halves[0].b} stays on each client"
    several = overrides(method, SummingServer, "averaged")
    if several and method.max_share < 1:
        return f"max_share bounds shares of several means in {type(method).__name__}"
    if several or "weights" in method.server:
        return ""
    return f"{type(method).__name__} has one for each group of clients"


def _weighted(rows: Mapping[int, Tensor], method: Method) -> tuple[Tensor, Tensor]:
    """Return vectors ``[K, P]`` and their shares ``[K]``, of what was kept of each client."""
    stacked = torch.stack([*rows.values()])
    weights = stacked[:, 0]
    if method.max_share < 1:
        bounded = method.bounded_weights({id: int(row[0]) for id, row in rows.items()})
        weights = torch.tensor([bounded[id] for id in rows], dtype=torch.float64)
    return stacked[:, 1:], weights / weights.sum()


def adapter_space(method: Method) -> AdapterSpace:
    """Return the space of a method's adapters.

    Raises:
        InputError: its network has none, or trains something else than adapters.
    """
    if method.space is not None:
        return method.space
    factors, tensors = factors_of(method.network), tensors_of(method.network)
    names = {name for each in factors for name in (each.a, each.b)}
    fixed = {name: tensors[name].detach() for name in names - method.layout.shapes.keys()}
    return AdapterSpace(method.layout, factors, fixed)
