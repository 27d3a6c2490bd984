"""A workload in pfl-research: ``SimulatedBackend``, ``FederatedAveraging``, ``PyTorchModel``;
evaluation and printed metrics off.

With several processes: ``python -m torch.distributed.run --nproc_per_node 2 pfl_research.py W1``.
"""

from __future__ import annotations

import os

os.environ["PFL_PYTORCH_DEVICE"] = "cpu"  # read at import

from functools import partial

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from workload import WORKLOADS, Workload, now, parser, report, weights


class Classifier(nn.Module):
    """What pfl asks of a module: ``loss`` and ``metrics``. Its first round evaluates whatever the
    settings; here that is free."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.steps = network, 0

    def loss(self, inputs: Tensor, target: Tensor) -> Tensor:
        self.steps += 1
        return nn.functional.cross_entropy(self.network(inputs), target)

    def metrics(self, inputs: Tensor, target: Tensor) -> dict[str, float]:
        return {}


class Marks(TrainingProcessCallback):
    """The clock before the first round and after each."""

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.clock = [now()]
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.clock.append(now())
        return False, Metrics()


def federation(work: Workload) -> FederatedDataset:
    """Each client's tensors in memory; the documentation's sampler, which draws nobody twice before
    everybody was drawn."""
    inputs, target = (tensor.split(work.examples) for tensor in work.data())
    return FederatedDataset(
        lambda user: PyTorchTensorDataset((inputs[user], target[user])),
        MinimizeReuseUserSampler(range(work.clients)),
    )


def main() -> None:
    options = parser(__doc__).parse_args()
    work, marks = WORKLOADS[options.workload], Marks()
    np.random.seed(0)  # noqa: NPY002  pfl draws from it, the same in every process
    model = Classifier(work.build(options.channels_last))
    before, data = weights(model), federation(work)
    rounds = 1 + (options.rounds or work.rounds)
    settings = dict(work.sgd)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6,
            train_cohort_size=work.cohort, val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        PyTorchModel(
            model, partial(torch.optim.SGD, **{name: value for name, value in settings.items() if name != "lr"}),
            torch.optim.SGD(model.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(local_num_epochs=work.epochs, local_learning_rate=settings["lr"], local_batch_size=work.batch),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[marks],
        send_metrics_to_platform=False,
    )  # fmt: skip
    steps = torch.tensor(model.steps)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(steps)
    if os.environ.get("RANK", "0") == "0":
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        moved = weights(model) - before
        report(
            marks.clock,
            steps=int(steps),
            rounds=rounds,
            moved=moved,
            packages=("timm", "pfl"),
            processes=processes,
        )
    if torch.distributed.is_initialized():  # whoever leaves first would make the other one abort
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
