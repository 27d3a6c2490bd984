"""Which table of costs is of which device, and budgets that can be kept by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import TypeAlias

from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.energy.costs import CostTable, one_label
from fl_lightning.energy.options import BRANCH, OPTIONS, Deciding
from fl_lightning.energy.switched import SwitchedLinear
from fl_lightning.energy.switched.branches import branch_names
from fl_lightning.energy.switched.kinds import MERGED, adapter_name
from fl_lightning.energy.table_files import read_table, shipped_table, to_json
from fl_lightning.errors import InputError, require
from fl_lightning.models.adapters import LoRALinear, SpectralLinear

DEFAULT_TABLES = {"model": "llama_tiny", "adapter": "llama_tiny_adapter"}
"""Shipped tables of costs of spectral adapters by what *off* leaves out."""
BRANCH_TABLE = "llama_tiny_branches"
"""The shipped table of costs of branches."""
BRANCH_ADVICE = (
    "calibrate: python -m fl_lightning energy --calibrate true --scope branch --adapter merged "
    "--out costs.json, for a LlamaPretrained with --network hf:NAME, and write --model.costs costs.json"
)
"""How to make a table of costs of branches, for error messages."""
Costs: TypeAlias = str | CostTable | None
"""A table, its file or the name of a shipped one; None: the shipped one that is of the adapters."""


def devices_of(
    costs: Sequence[Costs],
    shares: Sequence[float],
    switches: Sequence[SwitchedLinear],
    whole: bool,
    advice: str,
    options: Sequence[str] = OPTIONS,
) -> list[Device]:
    """Return the kinds of devices: device i has table i and budget i, each modulo their number.

    Args:
        costs: tables, one or more.
        shares: budgets as shares of the cost at *high*, one or more.
        switches: the switched layers, in the order of the groups.
        whole: whether budgets are of the whole network.
        advice: how to make a table of this network.
        options: those that the controller has.

    Raises:
        InputError: there is no table, or one is of another scope, precision, adapter, network or
            source of joules.
    """
    require(costs, "--model.costs []", "a list has the table of one client or more", "leave it out")
    scope, high, tables = switches[0].scope, switches[0].high, []
    for one in costs:
        name = one or default_table(switches, advice)
        table = name if isinstance(name, CostTable) else table_of(name, advice)
        require(
            table.scope == scope,
            f"--model.scope {scope} with a table of costs of the scope {table.scope}",
            "a table is of what *off* leaves out",
            f"write --model.scope {table.scope}, or {advice}",
        )
        require(
            table.high == high,
            f"--model.high {high} with a table of costs whose *high* is {table.high}",
            "a table is of the precision that it was calibrated in",
            f"write --model.high {table.high}, or {advice}",
        )
        adapter = adapter_name(switches[0].adapted)
        require(
            table.adapter in ("", MERGED, adapter),
            f"{adapter} with a table of costs that was measured with {table.adapter}",
            "a table is of the adapters that it was calibrated with, or of merged ones",
            f"write the network's adapter and rank as the table has them, or {advice}",
        )
        found = table.for_groups([layer.name for layer in switches], advice)
        tables.append(found.without_useless(options=options))
    return _in_turn(tables, shares, whole)


def branch_devices(
    costs: Sequence[Costs],
    shares: Sequence[float],
    blocks: int,
    deciding: Deciding = "none",
    shipped: str = "",
) -> list[Device]:
    """Return the kinds of devices of a network whose branches are switched: device i has table i
    and budget i, each modulo their number. Budgets are of the whole network.

    Args:
        costs: tables of costs of branches, one or more; None: the shipped one.
        shares: budgets as shares of the cost of all branches, one or more.
        blocks: of the network.
        deciding: what a controller gives a level of its own.
        shipped: name of the shipped table that is of such blocks, however many; empty: that of a
            ``llama_tiny`` of four.

    Raises:
        InputError: there is no table, or one is of another scope, network or source of joules, or
            lacks the cost of the controller.
    """
    require(costs, "--model.costs []", "a list has the table of one client or more", "leave it out")
    tables = []
    for one in costs:
        name = one or shipped or BRANCH_TABLE
        table = name if isinstance(name, CostTable) else table_of(name, BRANCH_ADVICE)
        if name == shipped:
            table = of_blocks(table, blocks)
        require(
            table.scope == BRANCH,
            f"a ladder of branches with a table of costs of the scope {table.scope}",
            "a table is of what is left out",
            BRANCH_ADVICE,
        )
        require(
            deciding == "none" or table.controller is not None,
            f"--model.controller {deciding} with a table of costs that has none of a controller",
            "what decides costs joules too, and a budget counts them",
            f"write --model.controller none, or {BRANCH_ADVICE}",
        )
        tables.append(table.for_groups(branch_names(blocks), BRANCH_ADVICE).without_useless())
    return _in_turn(tables, shares, True, deciding)


def _in_turn(
    tables: Sequence[CostTable], shares: Sequence[float], whole: bool, deciding: Deciding = "none"
) -> list[Device]:
    """Return devices of which number i has table i and budget i, each modulo their number, up to
    where that begins anew."""
    one_label(table.label for table in tables)  # energy/joules is a mean over devices
    count = math.lcm(len(tables), len(shares))
    return [
        Device(tables[i % len(tables)], shares[i % len(shares)], whole, deciding)
        for i in range(count)
    ]


def known_by(devices: Sequence[Device]) -> dict[str, str]:
    """Return what tells the tables of costs of devices from others: the ``sha256`` of their texts,
    and the ``label`` and the ``scope`` that they have in common."""
    texts = dict.fromkeys(to_json(device.table) for device in devices)
    table = devices[0].table
    hashed = sha256("".join(texts).encode()).hexdigest()
    return {"sha256": hashed, "label": table.label, "scope": table.scope}


def of_blocks(table: CostTable, blocks: int) -> CostTable:
    """Return a table of costs of branches for a network of another number of the same blocks, each
    of which costs what the first one does; everything else costs what it did."""
    first = [table.groups[name] for name in branch_names(1)]
    groups = dict(zip(branch_names(blocks), first * blocks, strict=True))
    return replace(table, groups=groups)


def budget_shares(budget: float | list[float], whole: str, example: float) -> list[float]:
    """Return the budgets of the kinds of devices, as shares; all are infinite, or none is.

    Args:
        budget: of all clients, or a list of which client i has entry i modulo their number.
        whole: what they are shares of, for the message.
        example: a budget, for the message.

    Raises:
        InputError: one is not positive, or some are infinite and some are not.
    """
    shares = list(budget) if isinstance(budget, list) else [budget]
    numbers = all(isinstance(share, Real) for share in shares)
    unlimited = [numbers and math.isinf(share) for share in shares]
    require(
        shares
        and numbers
        and all(share > 0 for share in shares)
        and all(unlimited) == any(unlimited),
        f"--model.budget {budget}",
        f"a budget is a positive share of the energy {whole}, for each client or for all",
        f"write --model.budget {example}, or .inf for none",
    )
    return shares


def table_of(costs: str, advice: str) -> CostTable:
    """Return the table of costs of a file, or one that comes with the package, by its name.

    Raises:
        InputError: there is none, or the file is damaged; ``advice`` says how to make one.
    """
    try:
        is_file = Path(costs).suffix or len(Path(costs).parts) > 1
        return read_table(costs) if is_file else shipped_table(costs)
    except InputError as error:
        raise InputError(error.given, error.rule, f"correct --model.costs, or {advice}") from None


def default_table(switches: Sequence[SwitchedLinear], advice: str) -> str:
    """Return the shipped table that is of these adapters; groups of all kinds have the same names.

    Raises:
        InputError: none is; ``advice`` says how to make one.
    """
    scope, kinds = switches[0].scope, {type(one.adapted) for one in switches}
    if kinds == {SpectralLinear} and {len(one.adapted.spectral_m) for one in switches} == {96}:
        return DEFAULT_TABLES[scope]
    is_lora = kinds == {LoRALinear} and {one.adapted.lora_A.out_features for one in switches} == {8}
    if is_lora and scope == "model":
        return "llama_tiny_lora"
    raise InputError(
        f"adapters {min(kind.__name__ for kind in kinds)} in the scope {scope} without --model.costs",
        "tables that come with the package are of spectral adapters of rank 96, and of LoRA of rank 8 in the "
        "scope model",
        advice,
    )


def require_reachable(device: Device, lengths: Lengths) -> None:
    """Refuse a budget that no sequence of these lengths can keep."""
    each = set(zip(lengths.prompts.tolist(), lengths.new.tolist(), strict=True))
    least = min((device.least_share(*one, "q99") for one in each), default=0.0)
    require(
        least <= device.share,
        f"--model.budget {device.share:g} where the cheapest options cost {least:.2f} of *high*",
        "a budget below them refuses all sequences of the test set",
        f"write --model.budget {min(1.0, least + 0.1):.1f}"
        + (", or --model.scope model" if device.table.scope == "adapter" else ""),
    )
