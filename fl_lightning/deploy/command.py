"""The commands ``deploy`` and ``node``."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml

from fl_lightning.config.constraints import check_fields, path_to, within
from fl_lightning.config.near_names import require_choice
from fl_lightning.config.packaged import find_config
from fl_lightning.deploy.flower import addresses, fleet, launch
from fl_lightning.deploy.flower.simulated import require_ray, run_words
from fl_lightning.deploy.node import folders, sockets
from fl_lightning.deploy.node.build import builder, counter
from fl_lightning.deploy.node.cleaning import clean
from fl_lightning.deploy.node.node import Node, NodeSettings
from fl_lightning.deploy.node.own_data import OwnData
from fl_lightning.deploy.protocol.gate import config_for_nodes, names_in
from fl_lightning.deploy.server import halves
from fl_lightning.deploy.server.census import STAND_INS, stand_in
from fl_lightning.deploy.server.deployable import check_deployable
from fl_lightning.deploy.server.job import outcome_of, write_job
from fl_lightning.deploy.server.roster import RoundRules
from fl_lightning.deploy.server.wall_clock import measure_time
from fl_lightning.errors import InputError, RunStopped, require
from fl_lightning.run.interrupts import Interrupts
from fl_lightning.run.resume import find_start

log = logging.getLogger("fl_lightning")

PACKAGES = {"callbacks", "fl_lightning", "torch", "torchmetrics", "torchvision"}
"""Packages that need no ``--allow``: of them a node imports classes that do no harm."""
NODES = within("[0, inf)", "it is a number of nodes", "write 0 for none")


@dataclass(frozen=True)
class Deployment:
    """How a run reaches its nodes.

    Args:
        superlink: host and port of Flower's SuperLink, which runs on this machine.
        root_certificates: file with the certificate that signed the SuperLink's, in PEM form.
            Default: no TLS, which is allowed on 127.0.0.1 alone.
        local_nodes: to try out: start a SuperLink on a free port and so many nodes on this machine,
            and stop them at the end; 0: they are running already.
        simulation: to try out: start a SuperLink here whose nodes are so many simulated ones in
            Flower's own simulation engine, which needs Ray; 0: nodes are processes.
        min_nodes: nodes that a round begins with, at least 1. Default: all of ``local_nodes`` or
            ``simulation``, or 1.
        wait_seconds: seconds that a round waits for so many nodes, and that a check of a node may
            take.
        round_seconds: seconds after which a round goes on without the clients that have not
            answered.
        own_data: whether the clients are those of the nodes' own data (``node --data``), with which
            the federation begins once ``min_nodes`` are there; the run's data are then for its test
            set. Default: nodes have the clients that the run deals its data out to.
    """

    settings_shown: ClassVar = ("--deploy.{name} {value}",) * 2

    superlink: str = addresses.SUPERLINK
    root_certificates: str | None = None
    local_nodes: Annotated[int, NODES] = 0
    simulation: Annotated[int, NODES] = 0
    min_nodes: int | None = None
    wait_seconds: float = 300.0
    round_seconds: float = 600.0
    own_data: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def started_nodes(self) -> int:
        """How many nodes are started here, as processes or simulated."""
        return self.local_nodes + self.simulation

    def rules(self) -> RoundRules:
        """Return how long a round waits.

        Raises:
            InputError: one of the numbers is out of its range.
        """
        started = self.started_nodes
        min_nodes = max(1, started) if self.min_nodes is None else self.min_nodes
        require(
            not started or min_nodes <= started,
            f"--deploy.min_nodes {min_nodes}",
            f"{started} nodes are started here, and no other joins them",
            f"write at most {started}, or leave it out",
        )
        return RoundRules(min_nodes, self.wait_seconds, self.round_seconds)


def deploy(cli: Any) -> None:
    """Run a configuration on nodes, through Flower.

    Args:
        cli: the parsed command line: trainer, method, data and a :class:`Deployment`.

    Raises:
        InputError: the run cannot be deployed, or Flower is not installed.
        RunStopped: the server's half failed.
    """
    require(
        not cli.config_init.get("dry_run"),
        "deploy --dry_run true",
        "it tells what a run takes, without nodes",
        "write fit in place of deploy, and leave --deploy out",
    )
    launch.require_flower()
    settings: Deployment = cli.config_init["deploy"]
    if settings.simulation:
        require_ray()
        require(
            not settings.local_nodes,
            f"--deploy.simulation {settings.simulation} with local_nodes {settings.local_nodes}",
            "nodes are simulated or processes",
            "leave one of them out",
        )
    rules = settings.rules()
    require(
        not (settings.root_certificates and settings.started_nodes),
        "--deploy.root_certificates with --deploy.local_nodes or --deploy.simulation",
        "the SuperLink that is started here has no certificate and listens on 127.0.0.1 alone",
        "leave one of them out",
    )
    if not settings.started_nodes:
        addresses.require_tls(
            settings.superlink, settings.root_certificates, "--deploy.root_certificates"
        )
        addresses.require_host(settings.superlink, "--deploy.superlink")
        addresses.warn_of_reach(settings.superlink)
    require(
        not (settings.own_data and settings.started_nodes),
        "--deploy.own_data with --deploy.local_nodes or --deploy.simulation",
        "nodes that are started here have no data of their own",
        "start them with: python -m fl_lightning node --data FOLDER",
    )
    measure_time(cli.trainer)
    _check(cli, settings)
    if (ckpt_path := cli.config_init["ckpt_path"]) is not None:
        start = find_start(
            ckpt_path, cli.trainer.root / cli.trainer.experiment, cli.trainer.run_name
        )
        cli.trainer.parts.check_start(start, cli.datamodule, deployed=True)
    outcome = _run(cli, settings, rules)
    if outcome["code"]:
        raise (InputError if outcome["code"] == 2 else RunStopped)(*outcome["error"])


def _check(cli: Any, settings: Deployment) -> None:
    """Refuse what the server would refuse, in one line, before anything starts. How many clients
    there are on the nodes' own data is known later: what goes with few or with many is not refused
    here."""
    many = [partial(stand_in, clients=count) for count in STAND_INS]
    refused = list[InputError]()
    for deal in many if settings.own_data else [cli.trainer.deal]:
        cli.trainer.deal, seed = deal, cli.config["seed_everything"]
        try:
            check_deployable(cli.trainer.prepare(cli.model, cli.datamodule, seed=seed))
            return
        except InputError as error:
            refused.append(error)
    raise refused[0]


def _run(cli: Any, settings: Deployment, rules: RoundRules) -> Mapping[str, Any]:
    """Run the job on a SuperLink, show its log, and return its outcome.

    A signal leaves the run to itself where the SuperLink was not started here. Only the first one
    counts.
    """
    folder = Path(tempfile.mkdtemp(prefix="fl-deploy-"))
    asked = left = False
    with Interrupts():
        try:
            words = ["python", "-m", "fl_lightning", "deploy", *cli.typed]
            nodes = Path(cli.trainer.root).absolute() / "nodes"
            ckpt_path = cli.config_init["ckpt_path"]
            write_job(
                folder,
                cli.config_text,
                rules,
                ckpt_path,
                words,
                nodes=nodes,
                own_data=settings.own_data,
                allow=(allow := _own_packages(cli)),
            )
            with halves.here(folder, halves.COMMAND), launch.Started() as started:
                address, more = _reach(cli, settings, started, nodes, allow)
                asked = not settings.started_nodes
                launch.flwr_run(folder, address, settings.root_certificates, *more)
                left = asked and launch.goes_on(folder)
                require_end(left, address)
                return outcome_of(folder)
        except (KeyboardInterrupt, SystemExit):
            if left := asked:
                when = "" if (folder / "begun").exists() else " if it was taken already"
                at = settings.superlink
                log.warning(
                    "the run goes on at %s%s; flwr list names it, flwr stop ends it", at, when
                )
            raise
        finally:
            if not left or halves.is_gone(folder, halves.SERVER):
                shutil.rmtree(folder, ignore_errors=True)


def require_end(left: bool, address: str) -> None:
    """Refuse to say what came of a run that has not ended.

    Raises:
        RunStopped: it has not, although its log has.
    """
    if left:
        raise RunStopped(
            f"the log of the run at {address} broke off",
            "the run itself goes on",
            "flwr list names it, flwr log shows the rest, flwr stop ends it",
        )


def _own_packages(cli: Any) -> list[str]:
    """Return the user's own packages of the configuration, who starts the nodes of this machine
    too."""
    packages = names_in(config_for_nodes(yaml.safe_load(cli.config_text))) - PACKAGES
    return [name for name in sorted(packages) if find_spec(name)]


def _reach(
    cli: Any, settings: Deployment, started: launch.Started, nodes: Path, allow: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the address of the SuperLink and further arguments of ``flwr run``. A SuperLink and
    nodes that are to be started here are started first."""
    if settings.simulation:
        one_worker = cli.trainer.parts.masks is not None
        address = launch.start_superlink(started, nodes / "superlink", "--simulation")
        return address, run_words(settings.simulation, one_worker=one_worker)
    if not settings.local_nodes:
        return settings.superlink, []
    address = launch.start_superlink(started, nodes / "superlink")
    for number in range(settings.local_nodes):
        launch.start_node(
            started, address, nodes / f"node{number}", number, settings.local_nodes, allow
        )
    return address, []


def node(
    superlink: str = addresses.SUPERLINK,
    folder: str = "node",
    partition_id: int = 0,
    num_partitions: int = 1,
    data: str | None = None,
    name: str | None = None,
    overlays: list[str] | str | None = None,
    allow: list[str] | str | None = None,
    root_certificates: str | None = None,
    private_key: str | None = None,
    connection: str = "direct",
    keep_days: float = 30.0,
) -> None:
    """Hold some clients of runs: answer a SuperLink's messages until this process is stopped.

    Args:
        superlink: host and port of Flower's SuperLink; ``none``: listen on the socket in ``folder``
            alone.
        folder: where the node keeps what its clients keep between rounds, and the configurations of
            runs.
        partition_id: it has the clients whose id leaves this remainder when divided by
            ``num_partitions``.
        num_partitions: nodes that the clients are dealt to, at least 1.
        data: data of its own, for runs with ``deploy.own_data``: a folder or file in the form of
            the run's ``train``, or a YAML file with ``class_path`` and ``init_args`` of a data
            module. They are of the client ``partition_id``; where they say whose each example is,
            of this one, the one that is ``num_partitions`` further, and so on. Default: its part of
            the data that a run names.
        name: its name in the server's log and in ``metadata.json``; default: the machine's name and
            ``partition_id``.
        overlays: configuration files layered over the run's: where this node's data lie, on which
            device it trains. Several are separated by commas, or a list in brackets, as names with
            commas need it.
        allow: packages whose classes and functions a run may name, beside the project's classes,
            torch's optimisers and layers, metrics of torchmetrics, and data sets and networks of
            torchvision and timm. Several are separated by commas, or a list in brackets.
        root_certificates: file with the certificate that signed the SuperLink's, in PEM form.
            Default: no TLS, which is allowed on 127.0.0.1 alone.
        private_key: file with this node's key, by which the SuperLink knows it.
        connection: ``direct``: this process fetches its messages from the SuperLink itself;
            ``supernode``: a SuperNode of Flower does, which starts a process for each message.
        keep_days: at its start the node removes configurations and states of runs that it has not
            used in so many days before its last use; 0: it removes nothing.

    Raises:
        InputError: a setting is wrong, another node has the folder, or Flower is not installed.
        RunStopped: the SuperLink does not let the node in, or the SuperNode ended.
    """
    require_choice(connection, ("direct", "supernode"), "--connection")
    require(
        0 <= partition_id < num_partitions,
        f"--partition_id {partition_id} of --num_partitions {num_partitions}",
        "partitions are counted from 0",
        f"write 0 to {max(0, num_partitions - 1)}",
    )
    require(
        keep_days >= 0,
        f"--keep_days {keep_days:g}",
        "it is a number of days",
        "write 0 to keep all",
    )
    files, packages = _overlays(overlays), _packages(allow)
    for flag, file in (("--private_key", private_key), ("--root_certificates", root_certificates)):
        if file is not None:
            given = f"{{value}}, the file of {flag}"
            path_to("file", "there is no such file", "name one that is", given=given).check(file)
    connects = superlink != "none"
    if connects:
        launch.require_flower()
        addresses.require_tls(superlink, root_certificates, "--root_certificates")
    place = folders.own_folder(Path(folder))
    described = {"name": name or f"{NodeSettings(place).name}-{partition_id}"}
    settings = NodeSettings(place, partition_id, num_partitions, allow=packages, **described)
    own = None if data is None else OwnData(data, partition_id, num_partitions)
    answering = Node(settings, builder(files, own), None if own is None else counter(files, own))
    launch.log_to_stderr()
    if connects and connection == "direct":
        with folders.locked(place), launch.Started():  # SIGTERM signs the node off
            clean(place, keep_days)
            fleet.serve(
                superlink,
                answering.answer,
                place / "flower",
                name=settings.name,
                root_certificates=root_certificates,
                private_key=private_key,
            )
        return
    with folders.locked(place), launch.Started() as started, folders.socket_for(place) as socket:
        clean(place, keep_days)
        if connects:
            addresses.check_handshake(superlink, root_certificates, "--root_certificates")
            launch.start_supernode(
                started, superlink, socket, settings, root_certificates, private_key
            )
        log.info("node %s listens at %s", settings.name, socket)
        sockets.serve(socket, answering.answer, goes_on=started.all_run)
        raise RunStopped(
            "the SuperNode ended", "a node needs it", "look into its log, and start the node again"
        )


def _several(given: list[str] | str | None) -> list[str]:
    """Return the entries of a list, or of a text in which commas separate them."""
    entries = given.split(",") if isinstance(given, str) else given or []
    return [entry.strip() for entry in entries]


def _overlays(given: list[str] | str | None) -> list[Path]:
    """Return the files of ``--overlays``."""
    for entry in (entries := _several(given)):
        require(
            entry and find_config(entry),
            f"--overlays {entry}",
            "there is no such file",
            "write --overlays own.yaml, several as a.yaml,b.yaml",
        )
    return [Path(entry) for entry in entries]


def _packages(given: list[str] | str | None) -> tuple[str, ...]:
    """Return the packages of ``--allow``."""
    for entry in (entries := _several(given)):
        require(
            all(part.isidentifier() for part in entry.split(".")),
            f"--allow {entry}",
            "it is the name of a package, as Python imports it",
            "write --allow my_package, several as a,b",
        )
    return tuple(entries)
