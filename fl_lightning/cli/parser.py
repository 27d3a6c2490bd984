"""From a command line to a trainer, a method and data. Only this module, ``cli_errors`` and ``cli_types``
know jsonargparse.

A command has a parser of its own, made by LightningCLI (``run=False``), whose trainer is not a
``lightning.Trainer``: the three ``add_*`` methods and ``instantiate_classes`` are what that takes.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from io import StringIO
from typing import Any, TypeVar

import lightning.fabric.loggers
import lightning.pytorch.loggers
import yaml
from jsonargparse import (
    ActionConfigFile,
    ArgumentParser,
    Namespace,
    get_loader,
    set_loader,
    set_parsing_settings,
)
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fl_lightning import rng
from fl_lightning.cli.callbacks_module import import_callbacks
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.configs import (
    ENV_PREFIX,
    check_encoding,
    check_environment,
    check_kind,
    dropped_names,
    read_configs,
    with_config_of_run,
    without_base,
)
from fl_lightning.cli.help import class_help
from fl_lightning.cli.messages import Given, condense, explain, null_refused, nulls
from fl_lightning.cli.types import Seed, concrete, settings_of
from fl_lightning.data import FederatedData, FederatedImages
from fl_lightning.errors import InputError
from fl_lightning.methods import Method
from fl_lightning.support.documents import check_size
from fl_lightning.support.packaged import find_config, layers, with_found_configs
from fl_lightning.support.user_code import first_cause, is_bug_of_user
from fl_lightning.trainer import FederatedTrainer

T = TypeVar("T")
# Fabric and Lightning have loggers of the same names: a short name means Lightning's, which know MLflow too.
AnyLogger = lightning.pytorch.loggers.Logger | lightning.fabric.loggers.Logger
# What a parser or a constructor raises when it is given something wrong; anything else is a bug of the code
# that raised it.
INPUT_PROBLEMS = (
    ArgumentError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OSError,
    ImportError,
    yaml.YAMLError,
    RecursionError,
)


class FederatedCLI(LightningCLI):
    """Parses ``args`` and builds ``trainer``, ``model`` and ``datamodule``; :meth:`start` runs the trainer's
    method ``command``.

    Args:
        command: a method of the trainer; its arguments other than ``method``, ``data`` and ``seed`` become
            flags.
        args: the command line after the command.

    Raises:
        InputError: bad input, in three parts.
    """

    def __init__(self, command: str, args: list[str]) -> None:
        self.command, self.typed = command, args
        self.args = args = with_found_configs(args)
        super().__init__(
            model_class=Method,
            datamodule_class=FederatedData,
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            save_config_callback=None,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs={
                "prog": f"python -m fl_lightning {command}",
                "description": COMMANDS[command].help,
                "epilog": (
                    "Configuration files beat environment variables (ENV); flags beat both, in the "
                    "order written."
                ),
                "allow_abbrev": False,
                "exit_on_error": False,
                "default_env": True,
                "env_prefix": ENV_PREFIX.rstrip("_"),
            },
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--seed_everything",
            type=Seed,
            default=0,
            help="seed of every random stream of the run, >= 0 and below 2^63",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(FederatedTrainer, "trainer", instantiate=False, skip={"logger"})
        parser.add_argument(
            "--trainer.logger",
            type=bool | AnyLogger | list[AnyLogger],
            default=True,
            help="true for MLflow at sqlite:///mlflow.db, false for none, or any Lightning loggers",
        )
        parser.add_argument(
            "--model", type=Method, required=True, help="the method: class name, or class_path and init_args"
        )
        images = {"class_path": f"{FederatedImages.__module__}.{FederatedImages.__qualname__}"}
        parser.add_argument(
            "--data",
            type=FederatedData,
            default=images,
            help="the federation's data; FederatedImages if no class",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self.command_arguments = parser.add_method_arguments(
            FederatedTrainer, self.command, skip={"method", "data", "seed"}
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        if text := class_help(self.args, settings_of(parser)):
            sys.stdout.write(text)
            raise SystemExit(0)
        check_environment(settings_of(parser))
        given = Given(self.args, read_configs(self.args))
        check_kind(given.texts)
        self.config = parse(parser, given, flags=_settings_of_classes())
        for group in ("trainer", "model", "data"):
            if not isinstance(self.config[group], Namespace):
                shown = f"{group}: {self.config[group]}{given.in_file(group)}"
                raise InputError(
                    f"{shown}",
                    f"{group} is a group of settings",
                    f"leave it out or write --{group}.NAME VALUE",
                )
        if any(arg.split("=")[0].startswith("--model.network") for arg in self.args) and self.config.get(
            "model.init_args.module"
        ):
            raise InputError(
                "--model.network beside --model.module", "the module is the network", "leave one of them out"
            )
        for path, action in nulls(self.config, settings_of(parser)):
            raise InputError.from_text(null_refused(path, action, given))
        self.config_text = self._resolved_text()
        dropped = dropped_names(self.args, given.texts.values(), yaml.safe_load(self.config_text))
        if dropped:
            sys.stderr.write(
                f"fl_lightning: note: not used, the class in use has no such setting: {', '.join(dropped)}\n"
            )

    def _parse_ckpt_path(self) -> None:
        """Nothing: hyper-parameters of a checkpoint must not beat the command line."""

    def _set_seed(self) -> None:
        """Nothing: no global random state; the trainer's streams take the seed."""

    def _resolved_text(self) -> str:
        """The whole configuration as YAML, without what belongs to this call alone (``ckpt_path``)."""
        config = self.config.clone()
        for name in self.command_arguments:
            config.pop(name)
        return with_names(lambda: self.parser.dump(config, skip_unset=False))

    def instantiate_classes(self) -> None:
        # a module that builds its network in its constructor gets weights that follow from the seed
        with input_problems(), rng.torch_stream(self.config["seed_everything"], "weights"):
            self.config_init = self.parser.instantiate(self.config)
        self.datamodule = self.config_init["data"]
        self.model = self.config_init["model"]
        with input_problems(
            MisconfigurationException, RuntimeError
        ):  # Fabric's words for "this machine cannot do that"
            self.trainer = FederatedTrainer(**self.config_init["trainer"])  # type: ignore[assignment]

    def start(self) -> None:
        """Hand everything to the trainer."""
        trainer: Any = self.trainer
        trainer.config_text = self.config_text
        trainer.config = yaml.safe_load(self.config_text)
        trainer.command_line = ["python", "-m", "fl_lightning", self.command, *self.typed]
        arguments = {name: self.config_init[name] for name in self.command_arguments}
        with _log_to_stderr():
            getattr(trainer, self.command)(
                self.model, self.datamodule, seed=self.config["seed_everything"], **arguments
            )


class _Stderr(logging.StreamHandler):
    """Writes to what ``sys.stderr`` is at the time, so that lines appear above a live display and not through
    it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _FirstRejection(logging.Filter):
    """Lets through what the log says of the first rejected upload, and counts the others."""

    count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not re.search(r"upload of client .* rejected", str(record.msg)):
            return True
        self.count += 1
        return self.count == 1


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Show the log, and of all rejected uploads the first; the run's summary has their number."""
    log, rejections = logging.getLogger("fl_lightning"), _FirstRejection()
    log.setLevel(logging.INFO)
    handler = next((handler for handler in log.handlers if isinstance(handler, _Stderr)), None)
    if handler is None:
        log.addHandler(handler := _Stderr())
    handler.addFilter(rejections)
    try:
        yield
    except BaseException:
        if rejections.count > 1:  # a run that ends well says so in its summary
            log.warning(
                "%d uploads were rejected until then; run.log has the reason of each", rejections.count
            )
        raise
    finally:
        handler.removeFilter(rejections)


def run(command: str, args: list[str]) -> None:
    """Run one command of :data:`fl_lightning.cli.commands.COMMANDS`."""
    check_encoding(args)
    _import_short_names()
    if config := find_config(os.environ.get(f"{ENV_PREFIX}CONFIG", "")):
        os.environ[f"{ENV_PREFIX}CONFIG"], *more = map(str, layers(config))
        args = [*(part for layer in more for part in ("--config", layer)), *args]
    function = COMMANDS[command].function
    if function is None:
        FederatedCLI(command, with_config_of_run(args) if command == "test" else args).start()
    else:
        module, _, name = function.partition(":")
        _run_function(command, getattr(import_module(module), name), args)


def _run_function(command: str, function: Any, args: list[str]) -> None:
    """A command without trainer, model and data: its flags are the arguments of ``function``."""
    args = with_found_configs(args)
    parser = ArgumentParser(prog=f"python -m fl_lightning {command}", allow_abbrev=False, exit_on_error=False)
    handed = {"resolve": resolve} if COMMANDS[command].resolves else {}
    if "config" not in inspect.signature(function).parameters:
        parser.add_argument("--config", action=ActionConfigFile, help="YAML with arguments of this command")
    words = COMMANDS[command].words
    names = parser.add_function_arguments(function, skip={*handed, *([words] if words else [])})
    if words:
        parser.add_argument(
            words, nargs="*", type=str, metavar=words.upper().removesuffix("S"), help="one or more"
        )
        names.append(words)
    config = parse(parser, Given(args, read_configs(args)))
    with input_problems():
        values = parser.instantiate(config)
    function(**{name: values[name] for name in names}, **handed)


def resolve(args: list[str]) -> str:
    """The whole configuration that ``fit`` has with these arguments, as YAML.

    Raises:
        InputError: ``fit`` would refuse them.
    """
    with redirect_stderr(StringIO()):  # which settings a class does not know, the run itself says
        return FederatedCLI("fit", args).config_text


def parse(parser: ArgumentParser, given: Given, flags: Iterable[str] = ()) -> Namespace:
    """``parser.parse_args`` whose complaints are :class:`InputError`, in three parts and with the nearest
    valid name."""
    try:
        return with_names(lambda: parser.parse_args(given.args))
    except _TooLarge as error:
        check_size(error.document, given.source_of(error.document))
        raise
    except INPUT_PROBLEMS as error:
        raise InputError.from_text(explain(str(error), parser, given, flags)) from error


class _TooLarge(Exception):
    """A YAML text that :func:`check_size` refuses. Not a ValueError: jsonargparse would go on with the next
    type of a union."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.document = document


# A class path in a value may not name what runs commands, opens files or loads pickles: jsonargparse would
# call it.
set_parsing_settings(
    import_path_denylist=[
        f"torch.{name}" for name in ("load", "save", "hub", "serialization", "jit", "package")
    ]
)
_load_yaml = get_loader("yaml")


def _loaded(document: str) -> Any:
    """What a flag, a variable of the environment, or a file that is given in place of a value says in
    YAML."""
    try:
        check_size(document, "")
    except InputError:
        raise _TooLarge(document) from None
    return _load_yaml(without_base(document))


set_loader("yaml", _loaded, exceptions=(yaml.YAMLError,))


def with_names(function: Callable[[], T]) -> T:
    """Call what may write a configuration, such that a name given for ``Callable | str`` is written as that
    name.

    jsonargparse tries the callable first, warns that it cannot write a name as one and keeps the warning's
    text as the value; when the warning is an error it goes on to ``str``. Where that does not help (a lambda
    as default) it stays a warning.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", r"\s*Unable to serialize", UserWarning)
            return function()
    except UserWarning:
        return function()


def _settings_of_classes() -> Iterator[str]:
    """``model.alpha``, ``data.num_clients`` and so on, for the suggestion after a mistyped flag."""
    for group, cls in (("model", Method), ("data", FederatedData)):
        for subclass in concrete(cls):
            yield from (f"{group}.{name}" for name in settings_of(subclass))


@contextmanager
def input_problems(*more: type[Exception]) -> Iterator[None]:
    """What a constructor says about its arguments is about the configuration."""
    problems: tuple[type[Exception], ...] = (ValueError, ImportError, *more)
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            str(error.filename or "a file of the configuration"),
            f"it cannot be read ({error.strerror or error})",
            "name one that can",
        ) from error
    except problems as error:
        if is_bug_of_user(cause := first_cause(error)):
            raise cause from None
        raise InputError.from_text(condense(str(error))) from error


def _import_short_names() -> None:
    """Stressors and meters are known by their class name, and classes of the working directory can be
    imported."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    import_callbacks()
