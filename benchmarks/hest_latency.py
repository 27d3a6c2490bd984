"""Seconds and modelled joules of an answer of HESTLadder: a ladder, a controller and gates that
read states under a budget, and all branches.

    OMP_NUM_THREADS=1 python benchmarks/hest_latency.py [--budget 0.8] [--rounds 17] [--answers 100]
    OMP_NUM_THREADS=1 python benchmarks/hest_latency.py --run ladder=DIR --run step=DIR --run all_on=DIR

Each contender is trained for some rounds of configs/hest_default.yaml, or comes from a run
directory. Then prompts of the test set are answered one at a time, by each contender in turn and in
rotating order, on one thread. All have their adapters merged before the first prompt; ``plain`` is
the network of ``all_on``, or else of the last contender, without a ledger. ``tabs`` pays for a pass
over the prompt in which its gates are read, which a device would make once.

All answers have ``--tokens`` tokens, so that all contenders have the same work; with
``--stop_at_eos`` they end where they end. Seconds are by the clock on the wall: use an idle
machine. Joules are those of the table of costs, of the whole network.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.metrics.text import prompts_and_answers
from fl_lightning.models.adapters import merged_lora
from fl_lightning.probing.command import choose_checkpoint, load_model

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "hest_default.yaml"
SETTINGS = {
    "ladder": [],
    "step": ["--model.controller=step"],
    "tabs": ["--model.search=tabs"],
    "all_on": ["--model.budget=1.0"],
}
SEARCH = 5
"""Rounds in which a ladder of four levels is found."""
QUICK = [
    "--trainer.max_local_steps=1", "--data.num_clients=2", "--data.examples_per_client=16",
    "--data.tests_per_task=1", "--data.batch_size=2",
]  # fmt: skip
WARM = 2
"""Answers of each contender before those that count."""


@dataclass
class Contender:
    """What answers, and what its answers have taken.

    Args:
        answer: returns the new tokens ``[1, n]`` of a prompt ``[1, P]``.
        joules: returns those of the last answer, by the tokens of its prompt and those that were
            read after it; 0 where it was refused.
    """

    answer: Callable[[Tensor], Tensor]
    joules: Callable[[int, int], float]
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)

    def turn(self, prompt: Tensor, eos: int | None, counts: bool) -> None:
        """Answer a prompt."""
        started = perf_counter()
        made = self.answer(prompt)
        took = perf_counter() - started
        ends = (made[0] == eos).nonzero() if eos is not None else []
        length = int(ends[0]) + 1 if len(ends) else made.shape[1]
        spent = self.joules(prompt.shape[1], length - 1)
        if counts:
            self.seconds.append(took)
            self.tokens.append(length)
            self.spent.append(spent)

    @property
    def refused(self) -> int:
        """Prompts that were not answered."""
        return sum(joules == 0 for joules in self.spent)


def trained(name: str, options: argparse.Namespace, root: Path) -> Path:
    """Train a contender and return its run directory."""
    rounds = options.rounds
    arguments = [
        "--config", str(CONFIG), f"--trainer.max_rounds={rounds}",
        f"--trainer.eval_every={rounds}", f"--model.all_on_rounds={(rounds - SEARCH) // 2}",
        f"--model.subset_rounds={SEARCH}", f"--model.budget={options.budget}",
        "--trainer.logger=false", "--trainer.callbacks=[]", f"--trainer.default_root_dir={root}",
        f"--trainer.run_name={name}", "--trainer.experiment=latency",
        *SETTINGS[name],
        *(QUICK if options.quick else []),
    ]  # fmt: skip
    print(f"training {name} for {rounds} rounds", flush=True)
    FederatedCLI("fit", arguments).start()
    return root / "latency" / name


def loaded(run: Path) -> Any:
    """Return the model of a run's last checkpoint."""
    cli = FederatedCLI("fit", ["--config", str(run / "config.yaml"), "--trainer.logger=false"])
    trainer: Any = cli.trainer
    fed = trainer.prepare(cli.model, cli.datamodule, seed=cli.config["seed_everything"])
    checkpoint = choose_checkpoint(str(run), "last", run.parent)
    return load_model(fed, checkpoint, yaml.safe_load(cli.config_text), allow_changed=True)


def of_run(network: Any, generate: dict[str, Any]) -> Contender:
    """Return what answers as a client of a run does."""

    def answer(prompt: Tensor) -> Tensor:
        network.expect(None)
        return network.generate(prompt, None, **generate)

    def joules(prompt: int, new: int) -> float:
        return float(network.measured()["energy/joules_generated"].sum())

    return Contender(answer, joules)


def plain(network: Any, generate: dict[str, Any]) -> Contender:
    """Return what answers with all branches of a run's network, and without a ledger."""
    return Contender(
        lambda prompt: network.network.generate(prompt, None, **generate),
        lambda prompt, new: network.on.all_high(prompt, new, "mean"),
    )


def prompts_of(data: Any, count: int) -> list[Tensor]:
    """Return prompts of the test set, each ``[1, P]``, one after the other and again from the
    first."""
    index = torch.arange(count) % len(data.test_target)
    inputs, target = data.inputs("test", index), data.test_target[index]
    ids = inputs["input_ids"] if isinstance(inputs, dict) else inputs
    prompts, mask, _ = prompts_and_answers(ids, target[:, : ids.shape[1]], data.task.decoder.pad)
    return [row[seen].unsqueeze(0) for row, seen in zip(prompts, mask, strict=True)]


def compete(contenders: dict[str, Contender], prompts: list[Tensor], eos: int | None) -> None:
    """Let all contenders answer all prompts, in turn and in rotating order."""
    names = list(contenders)
    for number, prompt in enumerate([*prompts[:WARM], *prompts]):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            contenders[name].turn(prompt, eos, counts=number >= WARM)


def print_results(contenders: dict[str, Contender]) -> None:
    """Print one row for each contender, and what the first takes of the time of the others, of
    those that have answered every prompt."""
    print(
        "| contender | prompts | refused | tokens | mean ms | p50 ms | p99 ms | mJ |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, one in contenders.items():
        ms = 1e3 * np.array(one.seconds)
        print(
            f"| {name} | {len(ms)} | {one.refused} | {np.mean(one.tokens):.1f} | {ms.mean():.1f} | {np.median(ms):.1f} |"
            f" {np.quantile(ms, 0.99):.1f} | {1e3 * np.mean(one.spent):.0f} |"
        )
    first, *others = [name for name, one in contenders.items() if not one.refused]
    own = np.array(contenders[first].seconds)
    for name in others:
        theirs = np.array(contenders[name].seconds)
        print(
            f"{first} / {name}: p99 {np.quantile(own, 0.99) / np.quantile(theirs, 0.99):.3f}, "
            f"mean {own.mean() / theirs.mean():.3f}, median of the ratios {np.median(own / theirs):.3f}"
        )


def main(arguments: list[str] | None = None) -> dict[str, Contender]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", action="append", default=[], metavar="NAME=DIR", help="a finished run"
    )
    parser.add_argument("--budget", type=float, default=0.8, help="share of all branches' energy")
    parser.add_argument("--rounds", type=int, default=17, help="of training")
    parser.add_argument(
        "--answers", type=int, default=100, help="prompts that each contender answers"
    )
    parser.add_argument("--tokens", type=int, default=32, help="bound on the length of an answer")
    parser.add_argument("--stop_at_eos", action="store_true")
    parser.add_argument(
        "--quick", type=lambda text: text == "true", default=False, help="true: a tiny one"
    )
    options = parser.parse_args(arguments)
    training = ("budget", "rounds")
    if options.run and any(getattr(options, one) != parser.get_default(one) for one in training):
        parser.error("--budget and --rounds are of training; a finished run has its own")
    if options.quick:
        options.rounds, options.answers, options.tokens = SEARCH + 2, 3, 4
    torch.set_num_threads(1)
    with ExitStack() as open_:
        root = Path(open_.enter_context(tempfile.TemporaryDirectory()))
        runs = {name: Path(run) for name, _, run in (one.partition("=") for one in options.run)}
        names = list(runs or SETTINGS)
        subjects = {
            name: loaded(runs[name] if runs else trained(name, options, root)) for name in names
        }
        data = subjects[names[0]].data
        eos = data.task.decoder.eos if options.stop_at_eos else None
        generate = {"max_new_tokens": options.tokens, "eos": eos, "pad": data.task.decoder.pad}
        networks = {
            name: subject.method.deploy(subject.data.client(0, subject.states.get(0))).eval()
            for name, subject in subjects.items()
        }
        for network in networks.values():
            open_.enter_context(merged_lora(network))
        contenders = {name: of_run(network, generate) for name, network in networks.items()}
        contenders["plain"] = plain(networks.get("all_on", networks[names[-1]]), generate)
        compete(contenders, prompts_of(data, options.answers), eos)
    print_results(contenders)
    return contenders


if __name__ == "__main__":
    main()
