"""A workload in Flower's simulation (Ray): ``FedAvg`` of its message API, evaluation off.

One actor for every ``--cpus_per_client`` cores; Ray gives each as many threads.
"""

from __future__ import annotations

import os

# both are read at import
os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")

import flower_client
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import WORKLOADS, now, parser, report, weights


class Timed(FedAvg):
    """FedAvg that notes the clock at the start of every round."""

    def __init__(self, **settings: float) -> None:
        super().__init__(**settings)
        self.clock: list[float] = []

    def configure_train(self, *given):
        self.clock.append(now())
        return super().configure_train(*given)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--cpus_per_client", type=int, default=1)
    options = arguments.parse_args()
    work = WORKLOADS[options.workload]
    # the start of the last one is the end of the one before it
    rounds = 2 + (options.rounds or work.rounds)
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        model = work.build(options.channels_last)
        before = weights(model)
        strategy = Timed(
            fraction_train=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_available_nodes=work.clients,
        )
        result = strategy.start(
            grid, ArrayRecord(model.state_dict()), num_rounds=rounds,
            train_config=ConfigRecord({"workload": options.workload, "channels_last": options.channels_last}),
        )  # fmt: skip
        means = result.train_metrics_clientapp.values()
        model.load_state_dict(result.arrays.to_torch_state_dict())
        steps = round(work.cohort * sum(float(mean["steps"]) for mean in means))
        # those of the actors are to be reported
        torch.set_num_threads(round(max(float(mean["threads"]) for mean in means)))
        report(
            strategy.clock, steps=steps, rounds=rounds, moved=weights(model) - before, packages=("timm", "flwr", "ray"),
            actors=max(1, (os.cpu_count() or 1) // options.cpus_per_client),
        )  # fmt: skip

    resources = {"num_cpus": options.cpus_per_client, "num_gpus": 0.0}
    run_simulation(
        server,
        flower_client.app,
        num_supernodes=work.clients,
        backend_config={"client_resources": resources},
    )


if __name__ == "__main__":
    main()
