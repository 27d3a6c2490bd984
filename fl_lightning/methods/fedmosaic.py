"""FedMosaic: PQ-LoRA and relevance-guided aggregation (Seo et al. 2025, arXiv 2506.11024).

    h = W x + scale * [ (1 - g) * B(P A x + Q) + g * B(Pg A x + Qg) ]

    on the last linear layer of each of num_blocks blocks
    w_ij = softmax_j( cos(sketch_i, sketch_j) / tau ),     Pg_i, Qg_i = sum_j w_ij (P_j, Q_j)

Clients differ in width and depth; their P and Q have one shape. The base W of each family is drawn
from the run's seed, known to both sides, frozen, never sent; without pre-trained weights it is a
random feature map, and only P, Q, g and the last linear layer learn. Where the data have a public
set, A and B of the families are aligned on it; a P of one family then means the same in another. On
the client stay: P, Q, g, that layer, and the moving average of the gradient of the reference model.
Up go P, Q and the sketch; down come Pg, Qg. The server remembers the last P, Q and sketch of every
client that ever sent them: a client that is not sampled still helps.

``K`` clients that the server has heard of, ``L`` adapted layers, ``r`` rank, ``M`` values of a
sketch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.aggregation.averages import WeightedMean
from fl_lightning.client import Client
from fl_lightning.compatibility import only
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError, require
from fl_lightning.methods.base import Method, NetworkSetting
from fl_lightning.methods.relevance import (
    cosine,
    gradient_of,
    kept_rows,
    last_linear,
    mix,
    relevance_weights,
    sketch,
    update_ema,
)
from fl_lightning.methods.terms import refuse_readers
from fl_lightning.models import build_network
from fl_lightning.models.pq_lora import adapted_layers, align, attach, read_adapters, write_global
from fl_lightning.wire import Layout, Limit, Payload

NEWCOMER = Client(id=-1, train=np.empty(0, np.int64), val=np.empty(0, np.int64))


class FedMosaic(Method):
    """Personalised: every client has a model of its own, helped by those whose data look like its
    own.

    Args:
        network: of every client, when ``networks`` is null; a network with ``num_blocks`` blocks,
            such as ``residual_mlp``.
        networks: families of networks of different width and depth; client k has number k modulo
            their count.
        reference: small frozen model, the same for all, whose last linear layer's gradient says how
            alike two clients are.
        rank: r of P [r, r] and Q [r], the same for all clients, at most the narrowest side of an
            adapted layer.
        num_blocks: blocks that each network is cut into; the last linear layer of each is adapted.
        scale: factor of the adapters.
        gate: g, the weight of the global copy: one trained number a layer (``scalar``, starts at
            0.5), or a sigmoid of its input.
        full_gradient: whether P and Q get their gradient without the factor (1 - g); false: the
            plain derivative.
        head: the last linear layer is trained and kept by each client (``local``), or ``frozen`` as
            drawn.
        align: ``public``: A and B of every family are turned towards the first one's on the
            unlabelled public set, so that a P of one family means the same in another; ``none``:
            they are drawn independently.
        tau: temperature of the softmax over cosines, above 0; .inf weighs all clients alike.
        include_self: whether a client's own P and Q are part of its global copy.
        ema: weight of this round's gradient in the moving average, in (0, 1].
        sketch_rows: share of the gradient's feature rows that travels, in (0, 1]; the same rows for
            every client and round.
        sketch_batches: batches of a round that the gradient is averaged over, at least 1.
        sigma: standard deviation of the noise on each value of the sketch, 0 or more.
        loss: L_task: ``cross_entropy``, or ``squared_error``, || outputs - one-hot target ||^2, as
            in the paper's example of two clients.
    """

    kind = "personal models"
    stackable = True
    keeps_state = True
    refuses = {
        **only(
            "classification",
            "it finds related clients by the gradient of a last layer over classes",
        ),
        "module": "it cuts the networks of its clients into blocks with adapters, which no module has",
        "secure_sum": "its server compares the gradients of single clients",
        "privacy": "its server compares single clients with each other",
        "received_terms": "its clients receive adapters for models of their own, and no model",
        "server_optimizer": "its server mixes adapters for each client",
    }

    personalised = True
    growing = frozenset({"ids", "adapters", "sketches"})

    def __init__(
        self,
        network: NetworkSetting = "residual_mlp",
        networks: list[NetworkSetting] | None = None,
        reference: NetworkSetting = "small_cnn",
        rank: Annotated[int, within("[1, inf)", "at least 1", 8)] = 8,
        num_blocks: Annotated[int, within("[1, inf)", "at least 1", 4)] = 4,
        scale: float = 1.0,
        gate: Literal["scalar", "input"] = "scalar",
        full_gradient: bool = True,
        head: Literal["local", "frozen"] = "local",
        align: Literal["none", "public"] = "none",
        tau: Annotated[float, within("(0, inf]", "a temperature is above 0", 0.5)] = 0.5,
        include_self: bool = False,
        ema: Annotated[float, within("(0, 1]", "a weight in (0, 1]", 0.5)] = 0.5,
        sketch_rows: Annotated[float, within("(0, 1]", "a share in (0, 1]", 0.4)] = 0.4,
        sketch_batches: Annotated[int, within("[1, inf)", "at least 1", 4)] = 4,
        sigma: Annotated[
            float, within("[0, inf)", "a standard deviation is 0 or more", 0.01)
        ] = 0.01,
        loss: Literal["cross_entropy", "squared_error"] = "cross_entropy",
        **settings: Any,
    ) -> None:
        super().__init__(network=network, **settings)
        require(
            networks is None or networks,
            f"--model.networks {networks}",
            "at least one family",
            "write --model.networks [residual_mlp]",
        )
        if self.max_share != 1:
            raise InputError(
                f"--model.max_share {self.max_share}",
                "FedMosaic mixes by relevance and weighs nobody by its examples",
                "leave it out",
            )
        if not isinstance(self.average, WeightedMean):
            raise InputError(
                f"--model.average {type(self.average).__name__}",
                "FedMosaic mixes by relevance and averages no weights",
                "leave it out, write --model.average WeightedMean",
            )
        read, why = (
            ("features", "previous_features"),
            "its clients' networks are of several families",
        )
        refuse_readers(self.terms, read, "FedMosaic", why)
        self.specs = networks or [network]
        self.reference_spec = reference
        self.adapter_settings = (num_blocks, rank, scale, gate, full_gradient)
        self.local_head, self.align = head == "local", align
        self.tau, self.include_self = tau, include_self
        self.ema, self.sigma, self.squared_error = ema, sigma, loss == "squared_error"
        self.sketch_rows, self.sketch_batches = sketch_rows, sketch_batches

    def build(self, data: FederatedData) -> None:
        self.take_task(data.task)
        shape = data.num_classes, data.example_shape
        made = partial(build_network, channels_last=self.channels_last)
        self.reference = made(self.reference_spec, *shape).requires_grad_(False)
        self.reference_weight = last_linear(self.reference)
        shape_of_gradient = self.reference.get_parameter(self.reference_weight).shape
        self.gradient: Tensor
        self.register_buffer("gradient", torch.zeros(shape_of_gradient), persistent=False)
        classes, features = self.gradient.shape
        self.kept = kept_rows(classes, features, self.sketch_rows, self.stream("sketch_rows"))
        self.families = nn.ModuleList(self._adapt(made(spec, *shape)) for spec in self.specs)
        self.network = self.families[0]
        if self.align == "public":
            self._align_families(data)
        self.layouts = [
            Layout({n: p for n, p in family.named_parameters() if p.requires_grad})
            for family in self.families
        ]
        self.start = [
            layout.read(family) for layout, family in zip(self.layouts, self.families, strict=True)
        ]
        adapters = read_adapters(adapted_layers(self.network))
        self.server = {
            "ids": torch.empty(0, dtype=torch.int64),
            "adapters": adapters.new_empty(0, *adapters.shape),
            "sketches": torch.empty(0, len(self.kept)),
        }
        self._build_terms(data)

    def _align_families(self, data: FederatedData) -> None:
        if not len(data.public):
            raise InputError(
                "--model.align public with no public set",
                "the families meet on public examples",
                "write --data.public_examples 100, or --model.align none",
            )
        public = torch.cat([inputs.cpu() for inputs, _ in data.public_batches()])
        for family in list(self.families)[1:]:
            align(family, self.network, public)

    def _adapt(self, network: nn.Module) -> nn.Module:
        network = attach(network, *self.adapter_settings)
        linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
        inside = {id(module) for layer in adapted_layers(network) for module in layer.modules()}
        if self.local_head and id(linear[-1]) not in inside:
            linear[-1].requires_grad_(True)
        return network

    # The client's half

    def family(self, client: Client) -> int:
        return client.id % len(self.families)

    def receive(self, message: Payload, client: Client) -> None:
        index = self.family(client)
        self.network = self.families[index]
        self.trained_names = [*self.layouts[index].shapes]
        self.layouts[index].write(self.network, client.state.get("trained", self.start[index]))
        write_global(adapted_layers(self.network), message.tensor("adapters"))
        self.remember_received()
        self.gradient = torch.zeros_like(self.gradient)

    def task_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        if not self.squared_error:
            return super().task_loss(outputs, target)
        if not target.is_floating_point():  # else shares of the classes, as a stressor made them
            target = target.unsqueeze(1) == torch.arange(outputs.shape[1], device=outputs.device)
        return (outputs - target.to(outputs)).square().sum(dim=1).mean()

    def trainable(self) -> Iterable[nn.Parameter]:
        return [p for p in self.network.parameters() if p.requires_grad]

    def train(self, mode: bool = True) -> FedMosaic:
        """Frozen means frozen: neither the reference nor the base's running statistics move."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        if hasattr(self, "reference"):
            self.reference.eval()
        return self

    def work_kind(self, client: Client) -> str:
        return f"family {self.family(client)}"

    def trained_size(self, client: Client) -> int:
        return self.layouts[self.family(client)].size

    def local_batches(self, data: FederatedData, client: Client, **work: Any) -> Iterator[Any]:
        """Yield the client's batches; the reference's gradient on the first of them is averaged on
        the way, equally over examples."""
        total, seen = torch.zeros_like(self.gradient), 0
        for number, (inputs, target) in enumerate(super().local_batches(data, client, **work)):
            if number < self.sketch_batches:
                with torch.autocast(self.device.type, enabled=False):
                    gradient = gradient_of(
                        self.reference, self.reference_weight, self.task_loss, inputs, target
                    )
                total += gradient * len(target)
                seen += len(target)
                self.gradient = total / seen
            yield inputs, target

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A number as gate stays in [0, 1]: beyond, the full gradient of P and Q would point away
        from the minimum."""
        for layer in adapted_layers(self.network):
            if isinstance(layer.gate, Tensor):
                layer.gate.copy_(layer.gate.clamp(0, 1))

    def upload(self, client: Client) -> Payload:
        index, gradient = self.family(client), self.gradient.cpu()
        ema = update_ema(
            client.state.get("gradient", torch.zeros_like(gradient)), gradient, self.ema
        )
        kept = {"trained": self.layouts[index].read(self.network), "gradient": ema}
        # a round that diverged is forgotten
        if all(bool(value.isfinite().all()) for value in kept.values()):
            client.state.update(kept)
        noise = torch.from_numpy(
            self.stream("sketch_noise", client).normal(0, self.sigma, tuple(ema.shape))
        ).to(ema)
        return Payload(
            {
                "adapters": read_adapters(adapted_layers(self.network)),
                "sketch": sketch(ema, noise, self.kept),
            }
        )

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        return {"adapters": self.server["adapters"].shape[1:], "sketch": (len(self.kept),)}

    # The server's half

    def broadcast(self, client: Client) -> Payload:
        return Payload({"adapters": self._mixed_for(client.id)})

    def check(self, upload: Payload, client: Client) -> None:
        upload.tensor("adapters")
        upload.tensor("sketch")

    def aggregate(self, uploads: Mapping[int, Payload]) -> None:
        """Remember the newest P, Q and sketch of each client, in order of id."""
        rows = {
            int(id): (a, s)
            for id, a, s in zip(
                self.server["ids"], self.server["adapters"], self.server["sketches"], strict=True
            )
        }
        rows |= {
            id: (upload.tensor("adapters"), upload.tensor("sketch"))
            for id, upload in uploads.items()
        }
        ids = sorted(rows)
        self.server = {
            "ids": torch.tensor(ids, dtype=torch.int64),
            "adapters": torch.stack([rows[id][0] for id in ids]),
            "sketches": torch.stack([rows[id][1] for id in ids]),
        }

    def _mixed_for(self, id: int) -> Tensor:
        """Pg and Qg of client ``id``, ``[L, r, r + 1]``: zero while nobody else is known, the plain
        mean for a client without sketch."""
        mine = self.server["ids"] == id
        relevance = torch.zeros(1, len(mine), dtype=torch.float64)
        if mine.any():
            relevance = cosine(self.server["sketches"][mine], self.server["sketches"])
        weights = relevance_weights(
            relevance, self.tau, exclude=None if self.include_self else mine
        )
        return mix(weights, self.server["adapters"])[0]

    def relevance(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ids ``[K]`` of the clients that the server has heard of, and the cosines of their
        sketches ``[K, K]``."""
        return self.server["ids"].numpy(), cosine(
            self.server["sketches"], self.server["sketches"]
        ).numpy()

    def deploy(self, client: Client | None = None) -> nn.Module:
        """Return what this client has kept, with the global copy that it would be sent now; without
        a client, a newcomer's model."""
        client = client or NEWCOMER
        self.receive(self.broadcast(client), client)
        return self.network
