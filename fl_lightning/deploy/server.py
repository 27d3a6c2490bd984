"""The server's half: a trainer whose clients are on nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_lightning.deploy.build import config_for_nodes
from fl_lightning.deploy.engine import RemoteEngine, RoundRules, Transport
from fl_lightning.loop import Federation
from fl_lightning.trainer import FederatedTrainer


def deploy_over(
    trainer: FederatedTrainer,
    config: Mapping[str, Any],
    transport: Transport,
    rules: RoundRules | None = None,
) -> None:
    """Have the trainer's ``fit`` send its clients' work over a transport.

    A checkpoint is written after every round: a server that is started again is then at most one round behind
    its nodes, which keep states of that many rounds.

    Args:
        config: the whole configuration of the run, of which nodes are sent what they need.
    """

    def remote(fed: Federation, before: Mapping[str, Any]) -> RemoteEngine:
        run = before.get("deployment", {}).get("run")
        return RemoteEngine(
            transport,
            fed,
            config_for_nodes(config),
            rules,
            run=run,
            deterministic=trainer.deterministic,
        )

    trainer.checkpoint_every = 1
    trainer.remote = remote
