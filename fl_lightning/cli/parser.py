"""The parser that turns a command line into a trainer, a method and data.

Each command has a parser of its own, made by LightningCLI (``run=False``). Its trainer is not a
``lightning.Trainer``, which is why the three ``add_*`` methods and ``instantiate_classes`` are
overridden.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import replace
from glob import escape
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
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
from jsonargparse._loaders_dumpers import get_yaml_default_loader
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fl_lightning import rng
from fl_lightning.cli.callbacks_module import find_theirs, import_callbacks
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.configs import (
    ENV_PREFIX,
    as_layer,
    bases_of_environment,
    check_encoding,
    check_environment,
    check_kind,
    dropped_names,
    kept_federation,
    named_last,
    read_configs,
    with_bare_flags,
    with_config_of_run,
    with_printing_last,
)
from fl_lightning.cli.description import Description, read_description, write_description
from fl_lightning.cli.help import class_help
from fl_lightning.cli.messages import constructor_message, explain, explain_null, wrong_nulls
from fl_lightning.cli.refusals import CLOSED, UserInput
from fl_lightning.cli.run_names import overrides
from fl_lightning.cli.types import (
    Seed,
    concrete_classes,
    describe_settings,
    import_class,
    settings_of,
)
from fl_lightning.config.documents import ODD_NUMBER, check_size, load_yaml
from fl_lightning.config.packaged import configs_folder, find_config, with_found_configs
from fl_lightning.data import FederatedData, FederatedImages
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.methods import Method
from fl_lightning.run.log import FirstRejection
from fl_lightning.support.user_code import first_cause, is_bug_of_user
from fl_lightning.trainer import FederatedTrainer

T = TypeVar("T")
# Fabric and Lightning have loggers of the same names: a short name means Lightning's, which know
# MLflow too.
AnyLogger = lightning.pytorch.loggers.Logger | lightning.fabric.loggers.Logger
# The exceptions of a parser for wrong input; any other exception is a bug of the code that raised
# it.
INPUT_ERRORS = (
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
    """The parser of a command that is a method of the trainer.

    It parses ``args`` and builds ``trainer``, ``model`` and ``datamodule``; :meth:`start` then
    calls the trainer's method.

    Args:
        command: a method of the trainer; its arguments other than ``method``, ``data`` and ``seed``
            become flags.
        args: the command line after the command.

    Raises:
        InputError: bad input, in three parts.
    """

    def __init__(self, command: str, args: list[str]) -> None:
        self.command, self.typed = command, args
        found = with_found_configs(with_printing_last(args))
        self.args = args = with_bare_flags(found, _switches_of_trainer(command))
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
        # Both begin with the class in use, or the defaults of another one would be taken over as if
        # they had been given.
        method = named_class(self.args, "model", Method)
        parser.add_argument(
            "--model",
            type=Method,
            help="the method: class name, or class_path and init_args",
            **({"default": {"class_path": method}} if method else {"required": True}),
        )
        named = named_class(self.args, "data", FederatedData)
        named = named or f"{FederatedImages.__module__}.{FederatedImages.__qualname__}"
        parser.add_argument(
            "--data",
            type=FederatedData,
            default={"class_path": named},
            help="the federation's data; FederatedImages if no class",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self.command_arguments = parser.add_method_arguments(
            FederatedTrainer, _trainers_method(self.command), skip={"method", "data", "seed"}
        )
        if settings := COMMANDS[self.command].settings:
            parser.add_class_arguments(resolve_name(settings), self.command)
            self.command_arguments.append(self.command)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        if text := class_help(self.args, settings_of(parser)):
            sys.stdout.write(text)
            raise SystemExit(0)
        check_environment(settings_of(parser))
        # below the variables of the environment, as the file is that they come with
        parser.default_config_files = [escape(str(path)) for path in bases_of_environment()]
        given = UserInput(self.args, read_configs(self.args))
        check_kind(given.texts)
        self.config = parse(parser, given, flags=_settings_of_classes)
        for group in ("trainer", "model", "data"):
            if not isinstance(self.config[group], Namespace):
                shown = f"{group}: {self.config[group]}{given.in_file(group)}"
                raise InputError(
                    shown,
                    f"{group} is a group of settings",
                    f"leave it out or write --{group}.NAME VALUE",
                )
        if any(
            arg.split("=")[0].startswith("--model.network") for arg in self.args
        ) and self.config.get("model.init_args.module"):
            raise InputError(
                "--model.network beside --model.module",
                "the module is the network",
                "leave one of them out",
            )
        for path, action in wrong_nulls(self.config, settings_of(parser)):
            raise explain_null(path, action, given)
        self.config_text = self._resolved_text()
        final = load_yaml(self.config_text)
        folder = configs_folder()  # of the project's own files a user chose none of the settings
        ours = {file for file in given.texts if Path(file).resolve().is_relative_to(folder)}
        told = dropped_names(
            self.args, (text for file, text in given.texts.items() if file not in ours), final
        )
        dropped = [*told, *dropped_names([], (given.texts[file] for file in ours), final)]
        if told:
            closed = f"; {CLOSED}" if "model.network" in told else ""
            names = ", ".join(told)
            sys.stderr.write(
                f"fl_lightning: note: not used, the class in use has no such setting: {names}{closed}\n"
            )
        # a setting of the data themselves: they are of another class
        if any(name.startswith("data.") and name.count(".") == 1 for name in dropped):
            kept = kept_federation(self.args, given.texts.values())
            sys.stderr.write(
                f"fl_lightning: note: kept from the configuration: {kept}\n" if kept else ""
            )

    def _parse_ckpt_path(self) -> None:
        """Do nothing: the command line takes precedence over the hyper-parameters of a
        checkpoint."""

    def _set_seed(self) -> None:
        """Do nothing: the seed goes to the trainer's random streams and not to a global random
        state."""

    def _resolved_text(self) -> str:
        """Return the whole configuration as YAML, without arguments of this call such as
        ``ckpt_path``."""
        config = self.config.clone()
        for name in self.command_arguments:
            config.pop(name)
        return keeping_names(lambda: self.parser.dump(config, skip_unset=False))

    def instantiate_classes(self) -> None:
        # the stream makes the weights of a network that a constructor builds follow from the seed
        with as_input_errors(), rng.torch_stream(self.config["seed_everything"], "weights"):
            self.config_init = self.parser.instantiate(self.config)
        self.datamodule = self.config_init["data"]
        self.model = self.config_init["model"]
        # Fabric raises these two where the machine lacks what is asked for
        with as_input_errors(MisconfigurationException, RuntimeError):
            self.trainer = FederatedTrainer(**self.config_init["trainer"])  # type: ignore[assignment]

    def start(self, command_line: list[str] | None = None) -> None:
        """Call the trainer's method with the method, the data, the seed and the command's
        arguments.

        Args:
            command_line: what the run's metadata says it was started with; default: this command.
        """
        trainer: Any = self.trainer
        trainer.config_text = self.config_text
        trainer.config = load_yaml(self.config_text)
        trainer.command_line = command_line or [
            "python",
            "-m",
            "fl_lightning",
            self.command,
            *self.typed,
        ]
        trainer.overrides = overrides(trainer.command_line[4:])
        arguments = {name: self.config_init[name] for name in self.command_arguments}
        with _log_to_stderr():
            getattr(trainer, self.command)(
                self.model, self.datamodule, seed=self.config["seed_everything"], **arguments
            )


class _Stderr(logging.StreamHandler):
    """A handler that writes to the current ``sys.stderr``, so that lines appear above a live
    display."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Return a context in which the log is shown, with the first rejected upload only.

    The summary of the run tells how many there were.
    """
    log, rejections = logging.getLogger("fl_lightning"), FirstRejection()
    log.setLevel(logging.INFO)
    handler = next((handler for handler in log.handlers if isinstance(handler, _Stderr)), None)
    if handler is None:
        log.addHandler(handler := _Stderr())
    handler.addFilter(rejections)
    try:
        yield
    except BaseException:
        if rejections.count > 1:  # without an error the run's summary tells it
            log.warning(
                "%d uploads were rejected until then; run.log has the reason of each",
                rejections.count,
            )
        raise
    finally:
        handler.removeFilter(rejections)


def run(command: str, args: list[str], *, describe: bool = False) -> None:
    """Run one command of :data:`fl_lightning.cli.commands.COMMANDS`.

    Args:
        command: its name.
        args: the command line after it.
        describe: whether to keep a description of the command's settings for ``early.py``, if there
            is none.
    """
    check_encoding(args)
    import_short_names()
    if describe and find_theirs() is None and read_description(command) is None:
        write_description(command, description_of(command))
    if config := find_config(name := os.environ.get(f"{ENV_PREFIX}CONFIG", "")):
        os.environ[f"{ENV_PREFIX}CONFIG"] = str(config)
    elif not name:
        os.environ.pop(f"{ENV_PREFIX}CONFIG", None)
    function = COMMANDS[command].function
    if function is None:
        FederatedCLI(command, with_config_of_run(command, args)).start()
    elif COMMANDS[command].settings:
        resolve_name(function)(FederatedCLI(command, args))
    else:
        _run_function(command, resolve_name(function), args)


def _run_function(command: str, function: Any, args: list[str]) -> None:
    """Run a command without trainer, model and data: its flags are the parameters of
    ``function``."""
    args = with_found_configs(with_printing_last(args))
    parser, names, switches = _parser_of_function(command, function)
    args = with_bare_flags(args, switches)
    texts = read_configs(args, COMMANDS[command].usual_config)
    if command == "compare":
        check_kind(texts, command)
    config = parse(parser, UserInput(args, texts))
    with as_input_errors():
        values = parser.instantiate(config)
    handed = {"resolve": resolve} if COMMANDS[command].resolves else {}
    function(**{name: values[name] for name in names}, **handed)


def _parser_of_function(command: str, function: Any) -> tuple[ArgumentParser, list[str], list[str]]:
    """Return the parser of such a command, the names of its settings, and which of them are
    switches."""
    parser = ArgumentParser(
        prog=f"python -m fl_lightning {command}", allow_abbrev=False, exit_on_error=False
    )
    handed = ["resolve"] if COMMANDS[command].resolves else []
    if "config" not in inspect.signature(function).parameters:
        parser.add_argument(
            "--config", action=ActionConfigFile, help="YAML with arguments of this command"
        )
    words = COMMANDS[command].words
    names = parser.add_function_arguments(function, skip={*handed, *([words] if words else [])})
    if words:
        parser.add_argument(
            words, nargs="*", type=str, metavar=words.upper().removesuffix("S"), help="one or more"
        )
        names.append(words)
    return parser, names, _switches(function)


def _switches(function: Callable[..., Any]) -> list[str]:
    """Return the arguments that are false by default: such a flag needs no value."""
    return [
        name
        for name, found in inspect.signature(function).parameters.items()
        if found.default is False
    ]


def _switches_of_trainer(command: str) -> list[str]:
    return _switches(getattr(FederatedTrainer, _trainers_method(command)))


def _trainers_method(command: str) -> str:
    """Return the name of the trainer's method whose arguments are flags of a command."""
    return "fit" if COMMANDS[command].settings else command


def description_of(command: str) -> Description:
    """Return what can be written on the command line of a command."""
    entry = COMMANDS[command]
    if entry.function is None or entry.settings:
        parser = _ParserAlone(command, []).parser
        found = describe_settings(parser, _settings_of_classes(), {"trainer": FederatedTrainer})
        return replace(found, switches=tuple(_switches_of_trainer(command)))
    of_function, _, switches = _parser_of_function(command, resolve_name(entry.function))
    found = describe_settings(of_function)
    return replace(found, switches=tuple(switches), takes_words=entry.words is not None)


class _ParserAlone(FederatedCLI):
    """The parser of a command, with nothing parsed and nothing made."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = Namespace()

    def instantiate_classes(self) -> None:
        pass


def resolve(args: list[str]) -> str:
    """Return the whole configuration that ``fit`` has with these arguments, as YAML.

    Raises:
        InputError: ``fit`` would refuse them.
    """
    with redirect_stderr(StringIO()):  # the run itself reports the settings that are not used
        cli = FederatedCLI("fit", args)
        trainer: Any = cli.trainer
        trainer.check_settings(cli.model)
        return cli.config_text


def named_class(args: list[str], group: str, base: type) -> str:
    """Return the class path that flags or configuration files name last for a group of settings;
    empty where they name none, or none that there is.

    Args:
        args: the command line after the command.
        group: ``model`` or ``data``.
        base: the class of which it names a subclass.
    """
    with suppress(Exception):  # whatever is wrong with it, the parser finds it
        named = named_last(group, args, read_configs(args).values())
        imported = import_class(str(named))  # it may define the class
        found = {cls for cls in concrete_classes(base) if cls is imported or cls.__name__ == named}
        if len(found) == 1:
            return "".join(f"{cls.__module__}.{cls.__qualname__}" for cls in found)
        return ""
    return ""


def parse(
    parser: ArgumentParser, given: UserInput, flags: Callable[[], Iterable[str]] = list
) -> Namespace:
    """Parse the arguments.

    Args:
        parser: the parser.
        given: the command line and the files that it names.
        flags: returns the settings to suggest beside the parser's own. It is called for a refusal
            alone, since reading the signatures of all classes takes a second.

    Raises:
        InputError: they are wrong; the message has three parts and names the nearest valid name.
    """
    try:
        return keeping_names(lambda: parser.parse_args(given.args))
    except _OversizeError as error:
        check_size(error.document, given.source_of(error.document))
        raise
    except INPUT_ERRORS as error:
        raise explain(str(error), parser, given, flags()) from error


class _OversizeError(Exception):
    """A YAML text that :func:`check_size` refuses.

    It is not a ValueError, after which jsonargparse would try the next type of a union.
    """

    def __init__(self, document: str) -> None:
        super().__init__()
        self.document = document


# jsonargparse calls what a class path names, so it may not name functions that run commands, open
# files or load pickles.
set_parsing_settings(
    import_path_denylist=[
        f"torch.{name}" for name in ("load", "save", "hub", "serialization", "jit", "package")
    ]
)
_load_yaml = get_loader("yaml")


def _load_limited_yaml(document: str) -> Any:
    """Return the value of a YAML text given by a flag, an environment variable or a file."""
    try:
        check_size(document, "")
    except InputError:
        raise _OversizeError(document) from None
    return _load_yaml(as_layer(document))


# a text for the loader, of which an int makes decimal digits and no minutes
for _resolvers in get_yaml_default_loader().yaml_implicit_resolvers.values():
    _resolvers.insert(0, ("tag:yaml.org,2002:str", ODD_NUMBER))
set_loader("yaml", _load_limited_yaml, exceptions=(yaml.YAMLError,))


def keeping_names(function: Callable[[], T]) -> T:
    """Call a function that may write a configuration, so that a name for ``Callable | str`` stays a
    name.

    jsonargparse first tries to write such a name as a callable, warns that it cannot, and writes
    the text of the warning as the value. When the warning is an error, it tries ``str`` next. Where
    that does not help either, as with a lambda as default, the function is called again and the
    warning is shown.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", r"\s*Unable to serialize", UserWarning)
            return function()
    except UserWarning:
        return function()


def _settings_of_classes() -> list[str]:
    """Return the settings of all methods and data, such as ``model.alpha``, to suggest after a
    typo."""
    return sorted(
        {
            f"{group}.{name}"
            for group, cls in (("model", Method), ("data", FederatedData))
            for subclass in concrete_classes(cls)
            for name in settings_of(subclass)
        }
    )


@contextmanager
def as_input_errors(*more: type[Exception]) -> Iterator[None]:
    """Return a context in which an error of a constructor becomes an InputError about the
    configuration.

    A bug in the user's own code stays the exception that it raised.

    Args:
        more: exceptions to convert beside ValueError, ImportError and OSError.

    Raises:
        InputError: a constructor refused its arguments.
    """
    converted: tuple[type[Exception], ...] = (ValueError, ImportError, *more)
    try:
        yield
    except (InputError, MisuseError):
        raise
    except OSError as error:
        raise InputError(
            str(error.filename or "a file of the configuration"),
            f"it cannot be read ({error.strerror or error})",
            "name one that can",
        ) from error
    except converted as error:
        if is_bug_of_user(cause := first_cause(error)):
            raise cause from None
        raise InputError.from_text(constructor_message(str(error))) from error


def import_short_names() -> None:
    """Import ``callbacks``, whose classes then have short names; the working directory joins the
    path."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    import_callbacks()
