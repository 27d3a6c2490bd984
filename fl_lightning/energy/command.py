"""The command ``python -m fl_lightning energy``: print a table of costs, or measure one."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fl_lightning.config.near_names import require_choice
from fl_lightning.config.packaged import HF_PREFIX
from fl_lightning.energy.calibration.branches import calibrate_branches
from fl_lightning.energy.calibration.calibrate import DEFAULT_CONTEXT, Calibration
from fl_lightning.energy.calibration.calibrate import calibrate as measure_network
from fl_lightning.energy.calibration.fitting import MAX_RELATIVE_ERROR
from fl_lightning.energy.calibration.meters import DEFAULT_WATTS, ModelledMeter, best_meter
from fl_lightning.energy.calibration.networks import adapted_network
from fl_lightning.energy.costs import CostTable
from fl_lightning.energy.options import BRANCH, OPTIONS, PRECISIONS, SCOPES
from fl_lightning.energy.switched.kinds import MERGED
from fl_lightning.energy.table_files import read_table, shipped_table, to_json
from fl_lightning.errors import as_bad_input, require
from fl_lightning.models.adapters import ALL_LINEAR
from fl_lightning.support import disk

METERS = ("best", "modelled")
DEFAULT_SECONDS = 60.0
OF_A_TABLE = ("table", "calibrate", "network")
"""The flags of a table that is read; all others are of a measurement."""
SHOWN_TOKENS = (1, 16, 256)
"""Numbers of tokens of a step that a printed table has columns for."""


def energy(
    table: str | None = None,
    calibrate: bool = False,
    network: str = "llama_tiny",
    adapter: str | None = None,
    rank: int | None = None,
    targets: str = ALL_LINEAR,
    gguf_file: str | None = None,
    meter: str = "best",
    watts: float = DEFAULT_WATTS,
    seconds: float = DEFAULT_SECONDS,
    scope: str | None = None,
    high: str = "float32",
    context: int = DEFAULT_CONTEXT,
    out: str | None = None,
) -> None:
    """Print what each option of each linear layer costs in joules, or measure it on this device.

    Args:
        table: JSON file of the table to print; by default the one that comes with the package.
        calibrate: measure instead of reading a table.
        network: the network: llama_tiny, or hf:NAME_OR_FOLDER. Without calibrate: name of the table
            that comes with the package.
        adapter: kind of its adapters: lora, ffa, pissa, adalora, svft or spectral; or merged, LoRA
            that is always on and merged into its base. Default: spectral of llama_tiny, lora of
            others.
        rank: their rank. Default: 96 for spectral and svft of llama_tiny, else 8.
        targets: which layers have adapters: all-linear, or names with commas between them.
        gguf_file: the file of hf:NAME_OR_FOLDER that has the weights, where they are GGUF.
        meter: best, which is RAPL's counters where they can be read, or modelled, CPU seconds at a
            stated power.
        watts: power of one busy core, for modelled joules.
        seconds: time of the measurement.
        scope: what off leaves out, adapter or model; or branch: the costs of whole residual
            branches, with adapters merged, of hf:NAME_OR_FOLDER as LlamaPretrained makes it.
            Default: model of merged adapters, else adapter.
        high: precision of the option high, float32 or bfloat16.
        context: tokens that a step sees, its own included.
        out: JSON file to write what was measured to.

    Raises:
        InputError: the table cannot be read, or a setting is refused.
    """
    given = dict(locals())  # the flags by name
    console = Console()
    if not calibrate:
        for name, parameter in signature(energy).parameters.items():
            require(
                name in OF_A_TABLE or given[name] == parameter.default,
                f"--{name} {given[name]} without --calibrate",
                "it is of a measurement, and a table that is read has its own",
                "add --calibrate true, or name a table",
            )
        usual = signature(energy).parameters["network"].default
        require(
            table is None or network == usual,
            f"--table {table} with --network {network}",
            "a table has its own network",
            "leave one out",
        )
        print_table(read_table(table) if table else shipped_table(network), console)
        return
    require(
        table is None,
        f"--table {table} with --calibrate",
        "a table is read or measured",
        "leave one out",
    )
    scope = scope or ("model" if adapter == MERGED else "adapter")
    require_choice(meter, METERS, "--meter")
    require_choice(scope, SCOPES, "--scope")
    require_choice(high, PRECISIONS, "--high")
    require(
        adapter != MERGED or scope in ("model", BRANCH),
        f"--adapter {MERGED} --scope {scope}",
        "an adapter that is merged into its layer cannot be left out by itself",
        "write --scope model",
    )
    require(
        scope != BRANCH or high == "float32",
        f"--high {high} --scope {BRANCH}",
        "costs of branches are measured in float32",
        "leave --high out",
    )
    if out is not None:
        require(
            Path(out).parent.is_dir() and not Path(out).is_dir(),
            f"--out {out}",
            "the file's folder exists",
            "write --out costs.json",
        )
    require(
        gguf_file is None or network.startswith(HF_PREFIX),
        f"--gguf_file {gguf_file} of {network}",
        f"the file is one of {HF_PREFIX}NAME_OR_FOLDER",
        "leave it out",
    )
    made = adapted_network(
        network, adapter, rank, targets, gguf_file=gguf_file, of_blocks=scope == BRANCH
    )
    counter = best_meter("cpu", watts) if meter == "best" else ModelledMeter(watts)
    if scope == BRANCH:
        found = calibrate_branches(made, counter, seconds, context)
    else:
        found = measure_network(made, counter, seconds, scope, context, high=high)  # type: ignore[arg-type]
    print_table(found.table, console)
    print_errors(found, console)
    if out is not None:
        write_table(found.table, Path(out), console)


def write_table(table: CostTable, path: Path, console: Console) -> None:
    """Write the file of a table, and say so.

    Raises:
        InputError: it cannot be written.
    """
    with as_bad_input(f"--out {path}", "it cannot be written", "name another"):
        disk.replace(path, to_json(table).encode())
    console.print(f"written: {escape(str(path))}", soft_wrap=True)


def print_table(table: CostTable, console: Console) -> None:
    """Print the costs, one row for the groups of one cost, and what is not cheaper than something
    better."""
    title = f"{escape(table.label)}, scope {table.scope}, {escape(table.device)}"
    grid = Table("groups", "option", title=title, caption=f"high is in {table.high}")
    for tokens in SHOWN_TOKENS:
        grid.add_column(f"{tokens} token{'s' * (tokens > 1)}", justify="right")
    useless = {tokens: table.without_useless(tokens) for tokens in SHOWN_TOKENS}
    costs = {
        (n, kind): table.tensors(n, kind) * 1e3 for n in SHOWN_TOKENS for kind in ("mean", "q99")
    }
    for names in alike(table):
        row = list(table.groups).index(names[0])
        for column, option in enumerate(OPTIONS):
            cells = []
            for n in SHOWN_TOKENS:
                mean, q99 = (float(costs[n, kind][row, column]) for kind in ("mean", "q99"))
                dim = not bool(useless[n].available(n)[row, column])
                cells.append(
                    f"[dim]*{mean:.3f} / {q99:.3f}[/]" if dim else f"{mean:.3f} / {q99:.3f}"
                )
            grid.add_row(escape(summary_of(names)) if column == 0 else "", option, *cells)
    fixed = [
        f"{table.fixed(n) * 1e3:.3f} / {table.fixed(n, 'q99') * 1e3:.3f}" for n in SHOWN_TOKENS
    ]
    grid.add_row("everything else", "", *fixed)
    console.print(grid)
    console.print(f"everything else: of a step that sees {table.context} tokens")
    console.print(
        "millijoules of a step, mean / 0.99 quantile; *: not cheaper than a better option"
    )


def alike(table: CostTable) -> list[list[str]]:
    """Return the names of groups, those of equal cost together, in the order of the network."""
    found: list[list[str]] = []
    for name, options in table.groups.items():
        for names in found:
            if table.groups[names[0]] == options:
                names.append(name)
                break
        else:
            found.append([name])
    return found


def summary_of(names: list[str]) -> str:
    """Return the names of groups in a few words: their last parts, and how many there are."""
    last = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return last if len(names) == 1 else f"{last} ({len(names)} groups)"


def print_errors(found: Calibration, console: Console) -> None:
    """Print how far the table is from measurements that it was not fitted to."""
    grid = Table("work", title="relative error of the mean where it was not fitted")
    for header in ("largest", "at tokens", "of one token"):
        grid.add_column(header, justify="right")
    for name, errors in found.errors.items():
        worst = max(errors, key=lambda n: abs(errors[n]))
        style = "bold red" if abs(errors[worst]) > MAX_RELATIVE_ERROR else ""
        shown = f"{errors[worst]:+.1%}"
        one = f"{errors[1]:+.1%}" if 1 in errors else ""
        grid.add_row(name, f"[{style}]{shown}[/]" if style else shown, str(worst), one)
    console.print(grid)
    console.print(f"at least {found.samples} samples of each cost")
