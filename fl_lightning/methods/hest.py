"""HEST, TABS and BHSP: adapters whose layers are switched token by token within an energy budget.

    L = CE + lambda (E / E_max - 1),    lambda <- max(0, lambda + eta (E_batch / E_max - 1))

Each linear layer with its adapter is a group with three options: *off*, *int8* and *high*. A
controller gives each option of each token a logit theta. In training an option is drawn by the
straight-through Gumbel softmax (Jang et al. 2017, arXiv 1611.01144; Maddison et al. 2017, arXiv
1611.00712), and E is the expectation of what a sequence then costs, with a gradient in p =
softmax(theta). In use a ledger chooses argmax theta - lambda c and downgrades what the budget does
not allow, so no sequence ever costs more.

Nothing is published under these names: this is the definition of this project, see
docs/methods/hest.md. The server averages the adapters and the controllers as FedAvg does. The price
lambda, the costs and the budget belong to a client's device and never travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.compatibility import no_personal, only
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.energy import OPTIONS, BHSPController, CostTable, HESTController, TABSController
from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.measuring import COUNTED
from fl_lightning.energy.budgets.network import BudgetedNetwork, Controller, embedding_of
from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.energy.budgets.tables import (
    budget_shares,
    devices_of,
    known_by,
    require_reachable,
)
from fl_lightning.energy.calibration.networks import calibration_advice
from fl_lightning.energy.gating import TEMPERATURE
from fl_lightning.energy.switched import SwitchedLinear, add_switches
from fl_lightning.errors import require
from fl_lightning.methods.base import KnownNetwork, Method
from fl_lightning.wire import Layout, Limit, Payload

PRICE = "price"
"""Name of lambda in what a client keeps."""

POSITIVE = within("(0, inf)", "it is a positive number", "leave it out")


class HEST(Method):
    """Adapters with a controller that decides for each token which layers are computed, and how.

    Args:
        network: a language model with adapters.
        controller: ``hest``: one projection of the token's embedding for all layers; ``tabs``: each
            layer decides by its own input between *off* and *high*, and nothing holds the budget in
            use; ``bhsp``: the same options for all tokens; ``none``: all layers at *high*, FedAvg
            of the adapters, whose energy is measured.
        features: k, the features of a token that ``hest`` decides by.
        scope: what *off* leaves out: the ``adapter`` of a layer, or of the ``model`` the whole
            layer, whose output is then zero.
        high: precision of the option *high*: ``float32`` or ``bfloat16``.
        costs: file of a table of costs, as ``python -m fl_lightning energy --calibrate true``
            writes it; a list of files: client i has entry i modulo their number. Or the name of a
            table that comes with the package. Default: the one among these that is of the network's
            adapters.
        budget: E_max of a sequence, as a share of what it costs with all layers at *high*; a list:
            client i has entry i modulo their number. Infinity for all: no controller, FedAvg of the
            adapters.
        budget_of: what the budget and ``energy/joules`` are of: the switched ``layers``, or the
            whole ``network``, most of which no option may change.
        price_lr: eta, the step of the dual ascent.
        temperature: tau of the Gumbel softmax.
    """

    kind = "language models"
    personalised = True
    decides = False
    refuses = {
        **no_personal("its clients have budgets of their own, and one controller"),
        **only("language", "it decides token by token"),
        "module": "a controller switches the layers of a network",
        "adapter_average": "its adapters are within switches, with a controller that is averaged beside them",
    }
    counted_metrics = COUNTED

    def __init__(
        self,
        network: KnownNetwork = "llama_tiny",
        controller: Literal["hest", "tabs", "bhsp", "none"] = "hest",
        features: Annotated[int, POSITIVE] = 8,
        scope: Literal["adapter", "model"] = "model",
        high: Literal["float32", "bfloat16"] = "float32",
        costs: str | list[str] | CostTable | None = None,
        budget: float | list[float] = 0.7,
        budget_of: Literal["layers", "network"] = "layers",
        price_lr: Annotated[float, POSITIVE] = 0.1,
        temperature: Annotated[float, POSITIVE] = TEMPERATURE,
        **settings: Any,
    ) -> None:
        super().__init__(network=network, **settings)
        budgets = budget_shares(budget, "at high", example=0.7)
        self.controller_kind, self.features = controller, features
        self.scope, self.high, self.costs, self.whole = scope, high, costs, budget_of == "network"
        self.budget_shares, self.price_lr, self.temperature = budgets, price_lr, temperature
        self.limited = not math.isinf(budgets[0])
        self.decides = self.limited and controller != "none"
        self.personalised = self.limited
        self.shows = frozenset({"options"} if self.limited else ())
        self.price = torch.zeros(())

    def build(self, data: FederatedData) -> None:
        super().build(data)
        if not self.limited:
            return
        again = any(
            getattr(module, "gradient_checkpointing", False) for module in self.network.modules()
        )
        require(
            not (self.decides and again),
            "--model.network.gradient_checkpointing true",
            "layers that are computed again in the backward pass would draw their options a second time",
            "write --model.network.gradient_checkpointing false",
        )
        switches = add_switches(self.network, scope=self.scope, high=self.high)
        costs = self.costs if isinstance(self.costs, list) else [self.costs]
        advice = calibration_advice(self.network, switches)
        self.devices = devices_of(
            costs, self.budget_shares, switches, self.whole, advice, self.options
        )
        self.measured_by = known_by(self.devices)
        for device in self.devices if self.decides else []:
            require_reachable(device, Lengths.of(data.test_target, data.test_target.shape[1]))
        controller = self._controller(switches)
        self.network = BudgetedNetwork(self.network, switches, controller, self.devices[0])
        self.layout = Layout.of(self.network)
        self.start_server()
        self._build_terms(data)

    def _build_terms(self, data: FederatedData) -> None:
        """Make room once the network is that of the budgets."""
        if isinstance(self.network, BudgetedNetwork) or not self.limited:
            super()._build_terms(data)

    def _controller(self, switches: Sequence[SwitchedLinear]) -> Controller:
        groups = len(switches)
        if self.controller_kind == "none":
            return None
        if self.controller_kind == "bhsp":
            return BHSPController(groups)
        if self.controller_kind == "tabs":
            return TABSController([layer.shape[0] for layer in switches])
        with rng.torch_stream(self.seed, "controller"):
            return HESTController(embedding_of(self.network).embedding_dim, groups, self.features)

    @property
    def keeps_state(self) -> bool:
        return super().keeps_state or self.decides

    @property
    def options(self) -> tuple[str, ...]:
        """The options that the controller has."""
        return ("off", "high") if self.controller_kind == "tabs" else OPTIONS

    @property
    def budgeted(self) -> BudgetedNetwork:
        """The network under its budgets."""
        assert isinstance(self.network, BudgetedNetwork), "there is no budget"
        return self.network

    def device_of(self, client: Client) -> Device:
        """Return a client's device."""
        return self.devices[client.id % len(self.devices)]

    # The client's half

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        if self.limited:
            self.client_id = client.id
            self.price = client.state.get(PRICE, torch.zeros(())).to(self.device)
            self.budgeted.run_on(self.device_of(client), float(self.price))

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Return the loss, the task's, and ``energy``: E / E_max of the batch."""
        if not self.decides:
            return super().training_step(batch, batch_idx)
        inputs, target = batch
        noise = rng.stream(self.seed, f"options/{batch_idx}", self.round, self.client_id)
        outputs, energy = self.budgeted.sample(inputs, target, noise, self.temperature)
        task = self.task_loss(outputs, target)
        losses = {"loss": task + self.price * (energy - 1), "loss_task": task, "energy": energy}
        return self.with_terms(losses, batch, outputs)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Raise the price where the batch cost more than the budget, and lower it where it cost
        less."""
        if self.decides:
            self.price = (self.price + self.price_lr * (outputs["energy"].detach() - 1)).clamp_min(
                0
            )

    def upload(self, client: Client) -> Payload:
        if self.decides:
            client.state[PRICE] = self.price.detach().cpu()
        return super().upload(client)

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        # said once more: a declaration holds for the ``upload`` of its own class
        return super().upload_limits(client)

    # The server's half

    def deploy(self, client: Client | None = None) -> nn.Module:
        """Return the network on a client's device at its price; without a client, on the first
        device, at the price 0."""
        super().deploy(client)
        if self.limited:
            device = self.devices[0] if client is None else self.device_of(client)
            price = 0.0 if client is None else float(client.state.get(PRICE, torch.zeros(())))
            self.budgeted.run_on(device, price)
        return self.network
