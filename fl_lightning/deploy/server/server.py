"""The server's half: a trainer whose clients are on nodes."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fl_lightning.deploy.protocol.gate import config_for_nodes
from fl_lightning.deploy.protocol.mail import Transport
from fl_lightning.deploy.server.census import Census
from fl_lightning.deploy.server.engine import RemoteEngine
from fl_lightning.deploy.server.roster import RoundRules
from fl_lightning.deploy.server.wall_clock import measure_time
from fl_lightning.federation import Federation
from fl_lightning.privacy import Randomness, from_system
from fl_lightning.trainer import FederatedTrainer

log = logging.getLogger("fl_lightning")


def deploy_over(
    trainer: FederatedTrainer,
    config: Mapping[str, Any],
    transport: Transport,
    rules: RoundRules | None = None,
    *,
    own_data: bool = False,
    on_begin: Callable[[Path], None] | None = None,
    randomness: Randomness = from_system,
) -> None:
    """Have the trainer's ``fit`` send its clients' work over a transport.

    A checkpoint is written after every round: a server that is started again is then at most one
    round behind its nodes, which keep states of that many rounds.

    Args:
        config: the whole configuration of the run, of which nodes are sent what they need.
        own_data: whether clients are those of the nodes' own data, for which nodes are asked first.
        on_begin: is called with the run directory before the first round.
        randomness: what the server's noise, the cohorts of a private run and the rings of secure
            sums are drawn from.
    """
    measure_time(trainer)
    if trainer.parts.privacy is not None:
        trainer.parts.privacy.randomness = randomness
    if trainer.engine == "batched":
        log.warning(
            "trainer.engine batched; nodes train one client after another, so last bits may differ"
        )
    sent = config_for_nodes(config)
    if own_data:
        census = Census(
            transport, sent, rules or RoundRules(), validates=trainer.parts.are_in_clear
        )
        trainer.deal, sent = census.deal, census.config

    def remote(fed: Federation, before: Mapping[str, Any]) -> RemoteEngine:
        deployment = before.get("deployment", {})
        done = fed.method.round
        privacy = fed.aggregation.privacy
        if privacy is not None and randomness is from_system and before:
            said = deployment.get("privacy", {}).get("noisy_sums", 0)
            privacy.begun = max(privacy.begun, rounds_in(fed.run_dir), said)
        # clients of a run that was simulated have kept nothing until now, or it would be refused
        since = last_rounds(fed.run_dir, done) if done and deployment else {}
        return RemoteEngine(
            transport,
            fed,
            sent,
            rules,
            run=deployment.get("run"),
            since=since,
            keeps=deployment.get("clients_keep") if done else None,
            deterministic=trainer.deterministic,
            on_begin=on_begin,
            randomness=randomness,
        )

    trainer.checkpoint_every = 1
    trainer.remote = remote


def rounds_in(run_dir: Path) -> int:
    """Return the rounds in a run's ``metrics.csv``, which has those after the checkpoint that the
    run goes on from until it goes on: a run of an earlier release has no other count of its noisy
    sums."""
    path = run_dir / "metrics.csv"
    if not path.exists():
        return 0
    with open(path, newline="") as file:
        return sum(1 for _ in csv.DictReader(file))


def last_rounds(run_dir: Path, done: int) -> dict[int, int]:
    """Return the last round of each client in which its upload counted, from a run's
    ``ledger.csv``.

    Args:
        done: rounds that are done; what the file has of later ones is of no use.
    """
    path = run_dir / "ledger.csv"
    found: dict[int, int] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            round = str(row["round"])
            # a process that was killed may have left a part of a line, behind the rounds that are
            # done
            if not round.isdigit() or int(round) > done:
                break
            if row["status"] == "trained":
                found[int(row["client"])] = int(round)
    return found
