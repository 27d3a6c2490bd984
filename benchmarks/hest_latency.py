"""Seconds and modelled joules of an answer: HEST, TABS and no controller on a budget, and a merged
adapter.

    OMP_NUM_THREADS=1 python benchmarks/hest_latency.py [--budget 0.6] [--rounds 10] [--answers 100]
    OMP_NUM_THREADS=1 python benchmarks/hest_latency.py --run hest=DIR --run tabs=DIR --run none=DIR

Each contender is trained for some rounds of configs/hest_tokens.yaml, or comes from a run
directory. Then prompts of the test set are answered one at a time, by each contender in turn and in
rotating order, on one thread: the switched layers compute the option of each token, and leave out
what is off. ``none`` is LoRA with all layers at *high*, as in the study; ``merged`` is the same
network with W + dW as plain weights, without switches.

All answers have ``--tokens`` tokens, so that all contenders have the same work; with
``--stop_at_eos`` they end where they end. Seconds are by the clock on the wall: use an idle
machine. Joules are those of the tables of costs, of the switched layers and of the whole network.
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
from fl_lightning.energy import shipped_table
from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.switched import narrow_kept
from fl_lightning.metrics.text import prompts_and_answers
from fl_lightning.models import LlamaTiny
from fl_lightning.models.adapters import merged_lora
from fl_lightning.probing.command import choose_checkpoint, load_model

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "hest_tokens.yaml"
LORA = [
    "--model.network=LlamaTiny", "--model.network.rank=8", "--model.network.adapter=lora",
    "--model.costs=llama_tiny_lora", "--model.optimizer.init_args.lr=0.004",
]  # fmt: skip
SETTINGS = {
    "hest": ["--model.controller=hest"],
    "tabs": ["--model.controller=tabs"],
    "none": ["--model.controller=none", *LORA],
}
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
        joules: returns those of the switched layers and of the whole network, for the last answer,
            by the tokens of its prompt and those that were read after it.
    """

    answer: Callable[[Tensor], Tensor]
    joules: Callable[[int, int], tuple[float, float]]
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    spent: list[tuple[float, float]] = field(default_factory=list)

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


def trained(name: str, options: argparse.Namespace, root: Path) -> Path:
    """Train a contender and return its run directory."""
    arguments = [
        "--config", str(CONFIG), f"--trainer.max_rounds={options.rounds}",
        f"--trainer.eval_every={options.rounds}",
        "--trainer.logger=false", "--trainer.callbacks=[]", f"--trainer.default_root_dir={root}",
        f"--trainer.run_name={name}", f"--model.budget={options.budget}",
        *SETTINGS[name],
        *(QUICK if options.quick else []),
    ]  # fmt: skip
    print(f"training {name} for {options.rounds} rounds", flush=True)
    FederatedCLI("fit", arguments).start()
    return root / "hest_tokens" / name


def loaded(run: Path) -> Any:
    """Return the model of a run's last checkpoint."""
    cli = FederatedCLI("fit", ["--config", str(run / "config.yaml"), "--trainer.logger=false"])
    trainer: Any = cli.trainer
    fed = trainer.prepare(cli.model, cli.datamodule, seed=cli.config["seed_everything"])
    checkpoint = choose_checkpoint(str(run), "last", run.parent)
    return load_model(fed, checkpoint, yaml.safe_load(cli.config_text), allow_changed=True)


def of_run(subject: Any, generate: dict[str, Any]) -> Contender:
    """Return what answers as the first client of a run does."""
    network: Any = subject.method.deploy(subject.data.client(0, subject.states.get(0))).eval()

    def answer(prompt: Tensor) -> Tensor:
        network.expect(None)
        return network.generate(prompt, None, **generate)

    def joules(prompt: int, new: int) -> tuple[float, float]:
        found, device = float(network.measured()["energy/joules_generated"].sum()), network.on
        rest = device.rest(prompt, new)
        return (found - rest, found) if device.whole else (found, found + rest)

    return Contender(answer, joules)


def merged(network: LlamaTiny, generate: dict[str, Any]) -> Contender:
    """Return what answers with plain weights; its adapters are merged by the caller."""
    device = Device(shipped_table("llama_tiny_merged"), 1.0)

    def joules(prompt: int, new: int) -> tuple[float, float]:
        found = device.all_high(prompt, new, "mean")
        return found, found + device.rest(prompt, new)

    return Contender(lambda prompt: network.generate(prompt, None, **generate), joules)


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
    """Print one row for each contender, and what the first takes of the time of the others."""
    print(
        "| contender | answers | tokens | mean ms | p50 ms | p99 ms | mJ of layers | mJ of the network |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, one in contenders.items():
        ms, joules = 1e3 * np.array(one.seconds), 1e3 * np.array(one.spent).mean(0)
        print(
            f"| {name} | {len(ms)} | {np.mean(one.tokens):.1f} | {ms.mean():.1f} | {np.median(ms):.1f} |"
            f" {np.quantile(ms, 0.99):.1f} | {joules[0]:.0f} | {joules[1]:.0f} |"
        )
    first, *others = contenders
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
        "--run", action="append", default=[], metavar="NAME=DIR", help="hest, tabs or none"
    )
    parser.add_argument("--budget", type=float, default=0.6, help="share of the energy at high")
    parser.add_argument("--rounds", type=int, default=10, help="of training")
    parser.add_argument(
        "--answers", type=int, default=100, help="prompts that each contender answers"
    )
    parser.add_argument("--tokens", type=int, default=32, help="bound on the length of an answer")
    parser.add_argument("--stop_at_eos", action="store_true")
    parser.add_argument(
        "--quick", type=lambda text: text == "true", default=False, help="true: a tiny one"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.answers, options.tokens = 1, 3, 4
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
        contenders = {name: of_run(subject, generate) for name, subject in subjects.items()}
        for subject in subjects.values():
            open_.enter_context(narrow_kept(subject.method.network))
        if "none" in names:
            network = LlamaTiny(data.num_classes, rank=8).eval()
            copied = {
                name.replace("network.", "", 1).replace(".adapted.", "."): value
                for name, value in subjects["none"].method.network.state_dict().items()
            }
            network.load_state_dict(copied)
            open_.enter_context(merged_lora(network))
            contenders["merged"] = merged(network, generate)
        compete(contenders, prompts_of(data, options.answers), eos)
    print_results(contenders)
    return contenders


if __name__ == "__main__":
    main()
