"""FedProto (Tan et al., AAAI 2022): clients keep their models and exchange the mean features of
each class, their prototypes.

    client k:  L = L_task + lam mean ||z - P_y||^2 / d,  0 where P_y is not known;
               starts from its own weights,
               sends z_kc, the mean of z over its n_kc examples of class c, after its local steps
    server:    P_c = sum_k n_kc z_kc / sum_k n_kc,  over those of the round that have the class

z, of d features, is what enters the last linear layer. A class that nobody in a round has keeps its
P_c.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fl_lightning.aggregation.average import NoAverageError
from fl_lightning.client import Client
from fl_lightning.compatibility import only
from fl_lightning.data import FederatedData
from fl_lightning.methods.beside import PersonalMethod
from fl_lightning.methods.terms import a_weight
from fl_lightning.models.features import FeatureTap
from fl_lightning.tasks import likeliest
from fl_lightning.wire import Codes, Limit, Payload, PayloadError


class FedProto(PersonalMethod):
    """Clients that train alone, but for a pull of their features to the prototypes of their
    classes.

    ``average`` is taken class by class; where it has too few clients for a class, its prototype
    stays.

    Args:
        lam: weight of the pull, 0 or more; 1 in the paper. 0: the clients' models are those of
            LocalOnly.
    """

    stackable = True
    has_global_model = False
    own_terms = frozenset({"prototypes"})
    refuses = {
        **PersonalMethod.refuses,
        **only("classification", "it has a prototype for each class of examples"),
        "received_terms": "its clients receive no model",
    }

    def __init__(self, lam: Annotated[float, a_weight(1)] = 1.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.lam = lam

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.train_data = data
        self.train_labels: dict[int, Tensor] = {}  # of clients that train now, by id
        self.first["weights"] = self.server.pop("weights").float()
        self.tap = FeatureTap(self.network)
        with torch.no_grad():
            self.network.eval()(data.example_inputs())
        C, d = data.num_classes, self.tap.take().shape[-1]
        self.server |= {"prototypes": torch.zeros(C, d), "known": torch.zeros(C, dtype=torch.int32)}
        self.register_buffer("prototypes", torch.zeros(C, d), persistent=False)
        self.register_buffer("known", torch.zeros(C), persistent=False)

    # The client's half

    def start_client(self, message: Payload, client: Client, labels: Tensor) -> None:
        super().start_client(message, client, labels)
        self.train_labels[client.id] = labels

    def receive(self, message: Payload, client: Client) -> None:
        self.layout.write(self.network, self.kept(client, "weights"))
        self.prototypes = message.tensor("prototypes").to(self.device)
        self.known = message.codes("known").values.to(self.prototypes)
        self.remember_received()

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        task, logits = self.task_and_logits(batch, batch_idx)
        classes = likeliest(batch[1]).long()
        away = (self.tap.take().float() - self.prototypes[classes]).square().mean(1)
        pull = self.lam * (self.known[classes] * away).mean()
        outputs = self.with_terms({"loss": task, "loss_task": task}, batch, logits)
        return {**outputs, "loss": outputs["loss"] + pull, "loss_prototypes": pull}

    def upload(self, client: Client) -> Payload:
        self.keep(client, weights=self.layout.read(self.network))
        means, counts = self.class_means(client, self.train_labels.pop(client.id))
        return Payload(
            {"examples": self.examples_of(client), "prototypes": means, "counts": counts}
        )

    def class_means(self, client: Client, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean features of each class, float32 ``[C, d]``, zeros of one without
        examples, and how many examples it has, float32 ``[C]``, of the network as it is, in
        evaluation mode."""
        self.network.eval()
        sums = torch.zeros_like(self.prototypes, dtype=torch.float64)
        counts = torch.zeros_like(self.known)
        index = torch.from_numpy(client.train).to(self.device)
        size = self.train_data.evaluation_batch
        for part, target in zip(index.split(size), labels.split(size), strict=True):
            self.network(self.train_data.inputs("train", part))
            of_class = one_hot(likeliest(target).long(), len(counts)).T
            sums += of_class.double() @ self.tap.take().double()
            counts += of_class.sum(1)
        return (sums / counts.clamp_min(1).unsqueeze(1)).float().cpu(), counts.cpu()

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        C, d = self.server["prototypes"].shape
        return {"examples": (), "prototypes": (C, d), "counts": (C,)}

    def deploy(self, client: Client | None = None) -> nn.Module:
        self.layout.write(self.network, self.kept(client, "weights"))
        return self.network

    # The server's half

    def broadcast(self, client: Client) -> Payload:
        known = Codes(self.server["known"], bits=1)
        return Payload({"prototypes": self.server["prototypes"], "known": known})

    def check(self, upload: Payload, client: Client) -> None:
        upload.tensor("examples")
        upload.tensor("prototypes")
        counts = upload.tensor("counts")
        if bool(
            (counts != counts.round()).any()
            or (counts < 0).any()
            or counts.sum() > len(client.train)
        ):
            raise PayloadError(
                f"counts {counts.tolist()} of client {client.id}",
                f"they are whole numbers, 0 or more, of its {len(client.train)} examples",
                "count each example once",
            )

    def aggregate(self, uploads: Mapping[int, Payload]) -> None:
        prototypes, known = self.server["prototypes"].clone(), self.server["known"].clone()
        for c in range(len(known)):
            having = [
                upload for _, upload in sorted(uploads.items()) if upload.tensor("counts")[c] > 0
            ]
            if having:
                shares = self._capped([int(upload.tensor("counts")[c]) for upload in having])
                means = [upload.tensor("prototypes")[c] for upload in having]
                with suppress(NoAverageError):
                    prototypes[c] = self.average.of(means, shares, prototypes[c])
                    known[c] = 1
        self.server |= {"prototypes": prototypes, "known": known}
