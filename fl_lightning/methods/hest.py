"""HEST, TABS and BHSP: adapters whose layers are switched token by token within an energy budget.

    L = CE + lambda (E / E_max - 1),    lambda <- max(0, lambda + eta (E_batch / E_max - 1))

Each linear layer with its adapter is a group with three options: *off*, *int8* and *high*. A controller gives
each option of each token a logit theta. In training an option is drawn by the straight-through Gumbel softmax
(Jang et al. 2017, arXiv 1611.01144; Maddison et al. 2017, arXiv 1611.00712), and E = sum p c is the expected
energy of a sequence with p = softmax(theta), which has a gradient. In use a ledger chooses argmax theta -
lambda c and downgrades what the budget does not allow, so no sequence ever costs more.

Nothing is published under these names: this is the definition of this project, see docs/methods/hest.md. The
server averages the adapters and the controllers as FedAvg does. The price lambda, the costs and the budget
belong to a client's device and never travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.energy import (
    OPTIONS,
    BHSPController,
    CostTable,
    HESTController,
    TABSController,
    one_label,
    read_table,
    shipped_table,
)
from fl_lightning.energy.gating import TEMPERATURE
from fl_lightning.energy.networks import calibration_advice
from fl_lightning.errors import InputError, require, require_choice
from fl_lightning.methods.base import Method, NetworkSetting
from fl_lightning.methods.budgets.device import Device
from fl_lightning.methods.budgets.measuring import COUNTED
from fl_lightning.methods.budgets.network import BudgetedNetwork, Controller, embedding_of
from fl_lightning.methods.budgets.passes import Lengths
from fl_lightning.models.adapters import LoRALinear, SpectralLinear
from fl_lightning.models.options import SwitchedLinear, add_switches
from fl_lightning.wire import Layout, Payload

CONTROLLERS = ("hest", "tabs", "bhsp", "none")
DEFAULT_TABLES = {"model": "llama_tiny", "adapter": "llama_tiny_adapter"}
"""Shipped tables of costs of spectral adapters by what *off* leaves out."""
PRICE = "price"
"""Name of lambda in what a client keeps."""


class HEST(Method):
    """Adapters with a controller that decides for each token which layers are computed, and how.

    Args:
        network: a language model with adapters.
        controller: ``hest``: one projection of the token's embedding for all layers; ``tabs``: each layer
            decides by its own input between *off* and *high*, and nothing holds the budget in use; ``bhsp``:
            the same options for all tokens; ``none``: all layers at *high*, FedAvg of the adapters, whose
            energy is measured.
        features: k, the features of a token that ``hest`` decides by.
        scope: what *off* leaves out: the ``adapter`` of a layer, or of the ``model`` the whole layer, whose
            output is then zero.
        high: precision of the option *high*: ``float32`` or ``bfloat16``.
        costs: file of a table of costs, as ``python -m fl_lightning energy --calibrate true`` writes it; a
            list of files: client i has entry i modulo their number. Or the name of a table that comes with
            the package. Default: the one among these that is of the network's adapters.
        budget: E_max of a sequence, as a share of what it costs with all layers at *high*; a list: client i
            has entry i modulo their number. Infinity for all: no controller, FedAvg of the adapters.
        budget_of: what the budget and ``energy/joules`` are of: the switched ``layers``, or the whole
            ``network``, most of which no option may change.
        price_lr: eta, the step of the dual ascent.
        temperature: tau of the Gumbel softmax.
        settings: those of every method.

    Raises:
        InputError: a setting is out of its range.
    """

    personalised = True
    language_only = "it decides token by token"
    counted_metrics = COUNTED
    module_refused = "a controller switches the layers of a network"

    def __init__(
        self,
        network: NetworkSetting = "llama_tiny",
        controller: Literal["hest", "tabs", "bhsp", "none"] = "hest",
        features: int = 8,
        scope: Literal["adapter", "model"] = "model",
        high: Literal["float32", "bfloat16"] = "float32",
        costs: str | list[str] | CostTable | None = None,
        budget: float | list[float] = 0.7,
        budget_of: Literal["layers", "network"] = "layers",
        price_lr: float = 0.1,
        temperature: float = TEMPERATURE,
        **settings: Any,
    ) -> None:
        super().__init__(network=network, **settings)
        require_choice(controller, CONTROLLERS, "--model.controller")
        require_choice(budget_of, ("layers", "network"), "--model.budget_of")
        budgets = list(budget) if isinstance(budget, list) else [budget]
        unlimited = [math.isinf(share) for share in budgets]
        require(
            budgets and all(share > 0 for share in budgets) and all(unlimited) == any(unlimited),
            f"--model.budget {budget}",
            "a budget is a positive share of the energy at high, for each client or for all",
            "write --model.budget 0.7, or .inf for none",
        )
        for name, value in (("features", features), ("price_lr", price_lr), ("temperature", temperature)):
            require(
                0 < value < math.inf, f"--model.{name} {value}", "it is a positive number", "leave it out"
            )
        self.controller_kind, self.features = controller, features
        self.scope, self.high, self.costs, self.whole = scope, high, costs, budget_of == "network"
        self.budget_shares, self.price_lr, self.temperature = budgets, price_lr, temperature
        self.limited = not any(unlimited)
        self.decides = self.limited and controller != "none"
        self.personalised = self.limited
        self.price = torch.zeros(())

    def build(self, data: FederatedData) -> None:
        super().build(data)
        if not self.limited:
            return
        switches = add_switches(self.network, scope=self.scope, high=self.high)
        self.devices = self._devices(switches)
        for device in self.devices if self.decides else []:
            require_reachable(device, Lengths.of(data.test_target, data.test_target.shape[1]))
        controller = self._controller(switches)
        self.network = BudgetedNetwork(self.network, switches, controller, self.devices[0])
        self.layout = Layout.of(self.network)
        self.server = {"weights": self.layout.to_wire(self.layout.read(self.network))}
        self._build_terms()

    def _devices(self, switches: Sequence[SwitchedLinear]) -> list[Device]:
        """Return the kinds of devices: client i has entry i modulo their number."""
        given = self.costs if isinstance(self.costs, list) else [self.costs]
        require(given, "--model.costs []", "a list has the table of one client or more", "leave it out")
        tables, advice = [], calibration_advice(self.network, switches)
        for one in given:
            name = one or default_table(switches, self.scope, advice)
            table = name if isinstance(name, CostTable) else table_of(name, advice)
            require(
                table.scope == self.scope,
                f"--model.scope {self.scope} with a table of costs of the scope {table.scope}",
                "a table is of what *off* leaves out",
                f"write --model.scope {table.scope}, or {advice}",
            )
            require(
                table.high == self.high,
                f"--model.high {self.high} with a table of costs whose *high* is {table.high}",
                "a table is of the precision that it was calibrated in",
                f"write --model.high {table.high}, or {advice}",
            )
            found = table.for_groups([layer.name for layer in switches], advice)
            tables.append(found.without_useless(options=self.options))
        one_label(table.label for table in tables)  # energy/joules is a mean over devices
        count = math.lcm(len(tables), len(self.budget_shares))
        shares = self.budget_shares
        return [Device(tables[i % len(tables)], shares[i % len(shares)], self.whole) for i in range(count)]

    def _controller(self, switches: Sequence[SwitchedLinear]) -> Controller:
        groups = len(switches)
        if self.controller_kind == "none":
            return None
        if self.controller_kind == "bhsp":
            return BHSPController(groups)
        if self.controller_kind == "tabs":
            return TABSController([layer.shape[0] for layer in switches], [1] * groups)
        with rng.torch_stream(self.seed, "controller"):
            return HESTController(embedding_of(self.network).embedding_dim, groups, self.features)

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
            self.budgeted.run_on(self.device_of(client), 0.0)

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
        """Raise the price where the batch cost more than the budget, and lower it where it cost less."""
        if self.decides:
            self.price = (self.price + self.price_lr * (outputs["energy"].detach() - 1)).clamp_min(0)

    def upload(self, client: Client) -> Payload:
        if self.decides:
            client.state[PRICE] = self.price.detach().cpu()
        return super().upload(client)

    # The server's half

    def deploy(self, client: Client | None = None) -> nn.Module:
        """Return the network on a client's device at its price; without a client, on the first device, at the
        price 0."""
        super().deploy(client)
        if self.limited:
            device = self.devices[0] if client is None else self.device_of(client)
            price = 0.0 if client is None else float(client.state.get(PRICE, torch.zeros(())))
            self.budgeted.run_on(device, price)
        return self.network


def table_of(costs: str, advice: str) -> CostTable:
    """Return the table of costs of a file, or one that comes with the package, by its name.

    Raises:
        InputError: there is none, or the file is damaged; ``advice`` says how to make one.
    """
    try:
        is_file = Path(costs).suffix or len(Path(costs).parts) > 1
        return read_table(costs) if is_file else shipped_table(costs)
    except InputError as error:
        raise InputError(error.given, error.rule, f"correct --model.costs, or {advice}") from None


def default_table(switches: Sequence[SwitchedLinear], scope: str, advice: str) -> str:
    """Return the shipped table that is of these adapters; groups of all kinds have the same names.

    Args:
        switches: the switched layers.
        scope: what *off* leaves out.
        advice: how to make a table of them.

    Raises:
        InputError: none is.
    """
    kinds = {type(one.adapted) for one in switches}
    if kinds == {SpectralLinear} and {len(one.adapted.spectral_m) for one in switches} == {96}:
        return DEFAULT_TABLES[scope]
    is_lora = kinds == {LoRALinear} and {one.adapted.lora_A.out_features for one in switches} == {8}
    if is_lora and scope == "model":
        return "llama_tiny_lora"
    raise InputError(
        f"adapters {min(kind.__name__ for kind in kinds)} in the scope {scope} without --model.costs",
        "tables that come with the package are of spectral adapters of rank 96, and of LoRA of rank 8 in the "
        "scope model",
        advice,
    )


def require_reachable(device: Device, lengths: Lengths) -> None:
    """Refuse a budget that no sequence of these lengths can keep.

    Raises:
        InputError: the cheapest options cost more.
    """
    each = set(zip(lengths.prompts.tolist(), lengths.new.tolist(), strict=True))
    least = min((device.least_share(*one, "q99") for one in each), default=0.0)
    require(
        least <= device.share,
        f"--model.budget {device.share:g} where the cheapest options cost {least:.2f} of *high*",
        "a budget below them refuses all sequences of the test set",
        f"write --model.budget {min(1.0, least + 0.1):.1f}"
        + (", or --model.scope model" if device.table.scope == "adapter" else ""),
    )
