"""The commands, and the answers that need no torch: help, version, and the refusal of an unknown
command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from fl_lightning import __version__
from fl_lightning.config.near_names import nearest
from fl_lightning.config.packaged import configs
from fl_lightning.errors import InputError

TRACEBACK_VARIABLE = "FL_LIGHTNING_TRACEBACK"
"""Name of the environment variable that makes a failing command print its traceback; its value is
then 1."""


@dataclass(frozen=True)
class Command:
    """One command of the program.

    Args:
        help: one line for ``--help``.
        function: ``module:function`` to call; its parameters are the flags of the command. None for
            the trainer's method of the command's name, with trainer, model and data from the
            configuration.
        words: the parameter of ``function`` that takes the words of the command line that are not
            flags.
        resolves: whether ``function`` has a parameter ``resolve`` for the function that turns
            arguments of ``fit`` into the whole configuration.
        quick: a function that needs no torch; it is called with the arguments in place of
            ``function``.
        settings: ``module:Class`` whose parameters become the flags ``--<command>.NAME``, beside
            those of ``fit``; ``function`` is then called with the parsed command line, with
            trainer, model and data.
        extra: whether ``function`` cannot be imported without an extra of the package.
        usual_config: the file that is proposed where ``--config`` names none.
    """

    help: str
    function: str | None = None
    words: str | None = None
    resolves: bool = False
    quick: Callable[[list[str]], None] | None = None
    settings: str | None = None
    extra: bool = False
    usual_config: str = "configs/kd_default.yaml"


COMMANDS = {
    "fit": Command("train a federation; every round goes to MLflow and to the run directory"),
    "deploy": Command(
        "train on real machines: the clients are on nodes, behind Flower's SuperLink",
        "fl_lightning.deploy.command:deploy",
        settings="fl_lightning.deploy.command:Deployment",
        extra=True,
    ),
    "node": Command(
        "hold some clients of deployed runs, until it is stopped",
        "fl_lightning.deploy.command:node",
        extra=True,
    ),
    "sweep": Command(
        "run every cell of a study, in parallel, or add seeds until its criteria are decided; the next start "
        "continues",
        "fl_lightning.study.execute.sweep:sweep",
        resolves=True,
        usual_config="configs/exp1_embedded.yaml",
    ),
    "tune": Command(
        "search for the best settings by validation, of one configuration or of every method of a study",
        "fl_lightning.study.execute.tune:tune",
        resolves=True,
        usual_config="configs/tune_exp1_embedded.yaml",
    ),
    "test": Command(
        "probe a finished run: clean, corrupted and attacked images, clients, calibration, cost; "
        "nothing is trained"
    ),
    "export": Command(
        "write a run's model into a folder that torch, peft, transformers or ONNX loads"
    ),
    "compare": Command(
        "what finished runs show: tables, paired tests, verdicts, figures",
        "fl_lightning.study.report.compare:compare",
    ),
    "rank": Command(
        "train one method, yours, on a published study, and print its place among the published methods",
        "fl_lightning.study.execute.rank:rank",
        resolves=True,
    ),
    "track": Command(
        "bring runs that were not tracked, or not wholly, into MLflow",
        "fl_lightning.run.track:track",
        "run_dirs",
    ),
    "check": Command(
        "run the conformance kit on a method, yours or one of the project's",
        "fl_lightning.conformance:check",
    ),
    "traces": Command(
        "convert FedScale's traces of devices' availability to a file that a run reads",
        "fl_lightning.clock.convert_traces:traces",
        "words",
    ),
    "energy": Command(
        "print what each option of each linear layer costs in joules, or measure it on this device",
        "fl_lightning.energy.command:energy",
    ),
    "configs": Command(
        "list the configurations that come with the program; configs FOLDER copies them there",
        quick=configs,
    ),
}

_HELP = """\
usage: python -m fl_lightning COMMAND [options]

Compares federated-learning methods under stress.

commands:
{commands}

try it (no network needed):
  python -m fl_lightning fit --config configs/kd_default.yaml
  mlflow ui --backend-store-uri sqlite:///mlflow.db

options of a command:
  --config FILE        YAML; give it again to layer another file on top; kd_default and others come along
  --trainer.max_rounds 5, --model FedAvg, --model.alpha 1.0, --data.num_clients 10 ...   override one setting
  --trainer.callbacks+=LabelNoise --trainer.callbacks.round 3   append a callback and set its argument
  --print_config       print the resolved configuration and stop
  --help               all settings of the command; --model.help FedAvg: those of one class

environment: FL_LIGHTNING_TRAINER__MAX_ROUNDS=5, FL_LIGHTNING_DATA='{{num_clients: 10}}', ...
  A configuration file beats the environment, a flag beats both (in the order in which they are written).
  FL_LIGHTNING_TRACEBACK=1 prints the traceback of whatever ends a command.

exit codes: 0 done, 2 bad input, 130 interrupted, 1 anything else
  --version            print the version and stop
"""


def help_text() -> str:
    """Return the text of ``--help``."""
    return _HELP.format(
        commands="\n".join(f"  {name:<20} {command.help}" for name, command in COMMANDS.items())
    )


def answer_quickly(argv: list[str]) -> int | None:
    """Answer what needs no torch and return the exit code, or return None if a command has to be
    run.

    Raises:
        InputError: the first argument is not a command.
    """
    if not argv:
        sys.stderr.write(help_text())
        return 2
    if argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(help_text())
        return 0
    if argv[0] in ("-V", "--version"):
        sys.stdout.write(f"fl_lightning {__version__}\n")
        return 0
    if argv[0] not in COMMANDS:
        near = nearest(argv[0], COMMANDS)
        instead = (
            f"write python -m fl_lightning {near} ..."
            if near
            else "see python -m fl_lightning --help"
        )
        raise InputError(
            argv[0], f"the first argument must be a command: {', '.join(COMMANDS)}", instead
        )
    if quick := COMMANDS[argv[0]].quick:
        quick(argv[1:])
        return 0
    return None
