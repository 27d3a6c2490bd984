"""What the public workloads are, and what every contender says of its run. Peers import it: it
needs torch, numpy and timm alone.

The networks are this project's, torchvision's and timm's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from runpy import run_path
from typing import Any, cast

import torch
from torch import Tensor, nn


def resnet20(num_classes: int) -> nn.Module:
    # by itself: the package of models needs Lightning, which a peer's environment has not
    made = run_path(str(Path(__file__).parents[1] / "fl_lightning/models/resnet.py"))["ResNet20"]
    return cast("nn.Module", made(num_classes))


def resnet18(num_classes: int) -> nn.Module:
    import torchvision

    return torchvision.models.resnet18(num_classes=num_classes)


def lora(num_classes: int) -> nn.Module:
    from fl_lightning.models.language import LlamaTiny

    return LlamaTiny(num_classes, rank=8, alpha=16)


def mobilenetv2(num_classes: int) -> nn.Module:
    import timm

    return timm.create_model("mobilenetv2_100", num_classes=num_classes)


class TwoConvolutions(nn.Sequential):
    """The CNN of Reddi et al. (2021) for 32x32 colour images, without dropout: 1.6 M weights."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, num_classes),
        )  # fmt: skip


class TutorialCNN(nn.Sequential):
    """The CNN of torch's CIFAR-10 tutorial, which BlazeFL's benchmark trains: 62 000 weights."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes),
        )  # fmt: skip


class OneHidden(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, num_classes))


@dataclass(frozen=True)
class Workload:
    """A federation that a round is timed of.

    Args:
        clients: number of clients.
        examples: examples of each client.
        shape: of one example.
        classes: number of classes.
        cohort: clients of a round.
        batch: examples of a local step.
        epochs: local epochs.
        network: makes the network from the number of classes.
        sgd: settings of the local ``torch.optim.SGD``.
        rounds: rounds that are timed.
        tokens: whether an example is a sequence of tokens, each of which has a target; the classes
            are then the vocabulary, and only the weights that are not frozen travel.
    """

    clients: int
    examples: int
    shape: tuple[int, ...]
    classes: int
    cohort: int
    batch: int
    epochs: int
    network: Callable[[int], nn.Module]
    sgd: dict[str, float]
    rounds: int
    tokens: bool = False

    @property
    def steps(self) -> int:
        """Local steps of a round."""
        return self.cohort * self.epochs * -(-self.examples // self.batch)

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all clients, one client after another: noise of the true shape,
        since only the time matters."""
        generator = torch.Generator().manual_seed(0)
        size = self.clients * self.examples
        if self.tokens:
            ids = torch.randint(self.classes, (size, self.shape[0] + 1), generator=generator)
            return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        return torch.randn(size, *self.shape, generator=generator), torch.randint(
            self.classes, (size,), generator=generator
        )

    def loss(self, model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        """The mean cross-entropy of some examples."""
        return nn.functional.cross_entropy(model(inputs).flatten(0, -2), target.flatten())

    def build(self, channels_last: bool) -> nn.Module:
        """The network with weights from seed 0, as torch lays them out, or a deep one channels last
        as this project does."""
        torch.manual_seed(0)
        network = self.network(self.classes)
        if channels_last:
            from fl_lightning.models import lay_out

            network = lay_out(network)
        return network.train()


WORKLOADS = {
    "W1": Workload(100, 50, (3, 32, 32), 10, 10, 10, 1, TwoConvolutions, {"lr": 0.1}, 12),
    "W2": Workload(10, 500, (3, 32, 32), 10, 10, 64, 1, resnet20, {"lr": 0.1, "momentum": 0.9}, 3),
    "W3": Workload(
        100, 500, (3, 28, 28), 100, 8, 64, 2, mobilenetv2, {"lr": 0.05, "momentum": 0.9}, 2
    ),
    # BlazeFL's benchmark, a round of it: five epochs of all 100 clients
    "B1": Workload(100, 500, (3, 32, 32), 10, 100, 50, 5, TutorialCNN, {"lr": 0.1}, 1),
    # its deep network, whose memory counts: 100 uploads of 45 MB, with one step of ten images each
    # in place of fifty
    "B2": Workload(100, 10, (3, 32, 32), 10, 100, 10, 1, resnet18, {"lr": 0.1}, 2),
    "W4": Workload(1000, 20, (64,), 10, 200, 20, 1, OneHidden, {"lr": 0.1}, 20),
    # LoRA of rank 8 on the shipped byte model; the plain loop is that of transformers and peft
    "L1": Workload(8, 96, (64,), 259, 8, 16, 1, lora, {"lr": 0.01}, 4, tokens=True),
}


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every contender has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("workload", choices=WORKLOADS)
    made.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="rounds that are timed, at least 1; 0: the workload's own number",
    )
    made.add_argument(
        "--channels_last",
        action="store_true",
        help="deep networks channels last, as this project has them",
    )
    made.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    made.add_argument("--precision", default="32-true", choices=("32-true", "bf16-mixed"))
    return made


def wait(device: str) -> None:
    """Let a card end what it was asked to do, before the clock is read."""
    if device == "cuda":
        torch.cuda.synchronize()


def travelling(network: nn.Module) -> dict[str, Tensor]:
    """What a client sends: the state, less frozen weights; the parameters themselves, not their
    data."""
    state = network.state_dict(keep_vars=True)
    return {
        name: value
        for name, value in state.items()
        if value.requires_grad or not isinstance(value, nn.Parameter)
    }


def weights(network: nn.Module) -> Tensor:
    """A copy of all trained weights as one vector."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in network.parameters()])


def report(
    marks: Sequence[float],
    *,
    steps: int,
    rounds: int,
    moved: Tensor,
    packages: Iterable[str],
    **more: Any,
) -> None:
    """Print the one JSON line that the runner reads.

    Args:
        marks: :data:`now` at the start of the first round, at its end, and at the end of every
            round that is timed.
        steps: local steps of all rounds, counted where they are made.
        rounds: rounds that these were, one more than there are marks of where one is begun only to
            end the one before it.
        moved: what the rounds added to the weights, as one vector.
        packages: those whose versions matter.
    """
    timed = len(marks) - 2
    found = {
        "seconds": (marks[-1] - marks[1]) / timed,
        "rounds": timed,
        "first_round_ended": marks[1],
        "steps_a_round": steps / rounds,
        "moved": float(moved.norm()),
        "threads": torch.get_num_threads(),
        "versions": {package: version(package) for package in ("torch", "numpy", *packages)},
    }
    print("\n" + json.dumps(found | more), flush=True)


now = time.time
"""The clock of the marks: the same in every process of a machine."""
