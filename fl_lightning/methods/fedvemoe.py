"""Fed-VEMoE: a federation of language models that finds its own experts.

The server has slots for experts, each a LoRA adapter, and a shared adapter in slot 0. In a round a
client

    E-step   measures all experts on the same probe examples, held out of its training:
             r_k = softmax over active k of (log pi_k - L_k / tau'),   tau' = max(tau, kappa se)
    M-step   trains the shared adapter and the M - 1 experts with the largest r on
             L_CE + gate_weight KL(mean_t a_t || share)
    own      trains an adapter of its own on the same batches, which never leaves it but by a birth
    upload   rejects all experts where its own adapter is better by a paired test

    and the server averages each expert over the clients that trained it, w_ik = n_i share_ik:

    W_k <- W_k + eta (sum_i w_ik W_ik / sum_i w_ik - W_k)

Then it prunes experts that nobody uses, merges experts that are alike, and gives a free slot to the
adapter of about one of the clients that rejected all experts
(:mod:`fl_lightning.methods.experts.slots`).

The probes are paired: on different examples for each expert the sign of a difference would be that
of the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.aggregation.averages import WeightedMean
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE, largest
from fl_lightning.aggregation.server import examples_in
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.client import Client
from fl_lightning.compatibility import no_personal, only
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.methods.base import KnownNetwork, Method
from fl_lightning.methods.experts.merging import AdapterSpace
from fl_lightning.methods.experts.responsibilities import (
    SHARE_UNITS,
    Paired,
    is_worse_than_own,
    responsibilities,
    seated,
)
from fl_lightning.methods.experts.slots import RULES, Rules, Slots
from fl_lightning.methods.experts.sums import (
    counts,
    least_count,
    means,
    next_rows,
    updates,
    warn_of_noise,
)
from fl_lightning.methods.experts.wire import ExpertWire, Received, Trained
from fl_lightning.methods.terms import refuse_readers
from fl_lightning.metrics.text import IGNORED
from fl_lightning.models.language.experts import Seats
from fl_lightning.models.recipe import copied
from fl_lightning.models.tensors import tensors_of
from fl_lightning.rng import stream
from fl_lightning.wire import Limit, Payload, PayloadError

CHANGES = ("experts/born", "experts/pruned", "experts/merged")
LEAST_TRAINING = 4
"""At most one in so many of a client's examples is a probe."""
UNUSABLE = 1e3
"""Nats a token of a model whose loss on the probes is not finite."""


@dataclass(frozen=True)
class Choice:
    """What a client found on its probes.

    Args:
        r: responsibilities, float64 ``[K + 1]``.
        slots: of the experts in its seats.
        shares: of each of them, adding up to 1.
        rejects: whether its own adapter is better than every expert.
    """

    r: Tensor
    slots: list[int]
    shares: Tensor
    rejects: bool = False


class FedVEMoE(Method):
    """Clients train a shared adapter and the experts that suit them; experts are born, pruned and
    merged.

    Args:
        network: a language model with LoRA adapters on a frozen base.
        k_init: experts at the start, 1 to ``k_max``. The first starts as the network does; the
            others get a small random B each, so that they are not the same.
        k_max: K, slots for experts; 0: FedAvg of the adapter.
        top_m: M, adapters that a client trains, the shared one among them.
        shared: whether there is a shared adapter.
        probes: examples of each client that are held out for the choice of experts, at most a
            quarter of what it has.
        tau: temperature of the responsibilities, in nats a token.
        kappa: standard errors of the probes that the temperature does not fall below.
        gamma: temperature of the weights at each token; .inf: an expert's weight is its share.
        gate_weight: factor of KL(mean weight || share) in the local loss, where a client has
            several experts.
        server_lr: eta, the server's step towards the mean.
        birth: ``test``: clients train an adapter of their own and compare; ``never``: they do not,
            which halves their work.
        birth_gap: nats a token that the own adapter has to be better by.
        birth_z: standard errors that it has to be better by.
        rules: when slots are used, pruned, merged and filled.
        wire: ``plain``: a client sends what it trained; ``oblivious``: all slots, so that the
            length of a message says nothing, as a secure sum needs; ``private``: also sums of
            updates in place of means of weights, as ``trainer.privacy`` needs, and A has to be
            frozen.
        down: ``all``: a client is sent all experts in every round; ``changed``: those that have
            moved since it last took part. It then remembers all of them between rounds, ``[K + 1, P
            + d]``.
        mass_scale: c, the factor of a client's shares and votes beside its updates in the one
            message that is clipped, where ``wire`` is private.
    """

    kind = "language models"
    personalised = True
    keeps_state = True
    refuses = {
        **no_personal("its clients have models of their own, of experts"),
        **only("language", "experts are adapters of a language model, chosen at each token"),
        "received_terms": "a client chooses its experts after it has received them",
        "server_optimizer": "it has a mean for each expert; write --model.server_lr for their step",
    }
    measured = frozenset({"responsibilities"})
    labels_of: Callable[[Client], Tensor]

    def __init__(
        self,
        network: KnownNetwork = "llama_tiny",
        k_init: int = 1,
        k_max: Annotated[int, within("[0, 256]", "0 to 256 slots", 8)] = 8,
        top_m: int = 2,
        shared: bool = True,
        probes: Annotated[int, within("[2, inf)", "2 examples or more", 32)] = 32,
        tau: Annotated[float, within("(0, inf]", "a temperature is above 0", 0.05)] = 0.05,
        kappa: Annotated[float, within("[0, inf]", "0 or more", 1.0)] = 1.0,
        gamma: Annotated[float, within("(0, inf]", "a temperature is above 0", 1.0)] = 1.0,
        gate_weight: Annotated[float, within("[0, inf)", "0 or more and finite", 0.01)] = 0.01,
        server_lr: Annotated[float, within("(0, inf)", "above 0 and finite", 1.0)] = 1.0,
        birth: Literal["test", "never"] = "test",
        birth_gap: Annotated[float, within("[0, inf]", "0 nats or more", 0.05)] = 0.05,
        birth_z: Annotated[float, within("[0, inf]", "0 or more", 2.0)] = 2.0,
        rules: Rules = RULES,
        wire: Literal["plain", "oblivious", "private"] = "plain",
        down: Literal["all", "changed"] = "all",
        mass_scale: Annotated[float, within("(0, inf)", "above 0 and finite", 0.1)] = 0.1,
        **settings: Any,
    ) -> None:
        super().__init__(network=network, **settings)
        why = "a client keeps no model but its own adapter"
        refuse_readers(self.terms, ("previous_features",), "FedVEMoE", why)
        for name, value, valid, rule, example in (
            (
                "k_init",
                k_init,
                1 <= k_init <= max(1, k_max),
                f"1 to {max(1, k_max)} experts, k_max",
                1,
            ),
            (
                "top_m",
                top_m,
                top_m >= 1 + (shared and k_max > 0),
                "2 or more with a shared adapter",
                2,
            ),
            ("shared", shared, shared or k_max > 0, "true where there are no experts", True),
        ):
            require(valid, f"--model.{name} {value}", rule, f"write --model.{name} {example}")
        require(
            self.average.is_sum,
            f"--model.average {type(self.average).__name__}",
            "experts have different trainers, and few of them to order",
            "write --model.average WeightedMean, or NormClipping",
        )
        plain_mean = type(self.average) is WeightedMean and self.max_share == 1
        require(
            plain_mean or wire != "private",
            f"--model.average {type(self.average).__name__}, max_share {self.max_share:g} with "
            "wire private",
            "its sums are of updates, in which each client counts once",
            "leave both out, or write --model.wire oblivious",
        )
        self.k_init, self.k_max = min(k_init, k_max), k_max
        self.seats_wanted = min(top_m - shared, k_max)
        self.shared, self.probes = shared, probes
        self.tau, self.kappa, self.gamma, self.gate_weight = tau, kappa, gamma, gate_weight
        self.server_lr, self.birth_gap, self.birth_z = server_lr, birth_gap, birth_z
        self.keeps_own = birth == "test" and k_max > 0
        self.rules, self.oblivious, self.private = rules, wire != "plain", wire == "private"
        self.mass_scale, self.remembers = mass_scale, down == "changed" and k_max > 0
        self.shows = frozenset({"experts"} if k_max else ())
        if not self.oblivious:
            why = "a plain message tells its experts; write --model.wire oblivious"
            self.refuses = {**self.refuses, "secure_sum": why}
        if not self.private:
            why = "its means are over an expert's trainers; write --model.wire private"
            self.refuses = {**self.refuses, "privacy": why}

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.first = {"weights": self.server.pop("weights").float()}
        self._data, self.changed_in, self.labels_of = data, 0, data.labels
        self.learns_own = False
        if self.keeps_own:
            frozen = {id(p): p for p in self.network.parameters() if not p.requires_grad}
            self.own_network = copied(self.network, frozen)
        self.features = 0
        if self.k_max:
            plain = tensors_of(self.network)
            self.seats = Seats(self.network, self.seats_wanted, self.gamma, self.shared)
            names = {name for each in self.seats.factors for name in (each.a, each.b)}
            fixed = {name: plain[name].detach() for name in names - self.layout.shapes.keys()}
            self.space = AdapterSpace(self.layout, self.seats.factors, fixed)
            require(
                not self.private or len(fixed) == len(self.seats.factors),
                "--model.wire private where A is trained",
                "noise on both factors is multiplied by each other",
                "write --model.network LlamaTiny --model.network.init_args.ffa true",
            )
            require(
                not any(bool(b.any()) for _, b in self.seats.shared),
                f"--model {type(self).__name__} with a shared adapter on adapters that do not start at 0",
                "an expert starts as the network's adapter does, so it would be added twice",
                "write adapter lora or ffa of the network, or --model.shared false",
            )
            self.features = self.seats.gate.router.shape[1]
            trained = (n for n, p in self.network.named_parameters() if p.requires_grad)
            self.trained_names = [*trained]
        self.wire = ExpertWire(
            self.layout.size,
            self.features,
            self.k_max,
            self.seats_wanted,
            self.shared,
            self.oblivious,
            self.keeps_own,
        )
        start = Slots.start(self._first_experts(), self.features, self.k_init)
        self.server = dict(vars(start))
        if self.remembers:
            self.server["moved"] = torch.zeros(self.k_max + 1, dtype=torch.int64)
            self.server["served"] = torch.zeros(data.num_clients, dtype=torch.int64)

    def _first_experts(self) -> Tensor:
        """Return what each slot starts with, float32 ``[K + 1, P]``; a free one with zeros."""
        experts = torch.zeros(self.k_max + 1, len(self.first["weights"]))
        experts[0] = self.first["weights"]
        random = stream(self.seed, "experts")
        for slot in range(1, self.k_init + 1):
            experts[slot] = self.first["weights"]
            if slot > 1:
                tensors = self.layout.unpack(experts[slot])
                for each in self.seats.factors:
                    shape = tuple(tensors[each.b].shape)
                    tensors[each.b] += torch.from_numpy(random.normal(0, 0.01, shape)).float()
        return experts

    @property
    def slots(self) -> Slots:
        """The server's slots."""
        return Slots(**{each.name: self.server[each.name] for each in fields(Slots)})

    # The client's half

    def receive(self, message: Payload, client: Client) -> None:
        received = self.wire.received(message, client.state.get("experts"))
        if self.remembers:
            known = torch.zeros(self.k_max + 1, self.layout.size + self.features)
            for slot, row in received.rows.items():
                known[slot] = row
            client.state["experts"] = known
        self._start(received, client)
        self.remember_received()

    def _start(self, received: Received, client: Client) -> None:
        self.received = received
        if self.shared:
            self._write(self._shared_tensors(), received.rows[0])
        if self.keeps_own:
            self.layout.write(self.own_network, client.state.get("own", self.first["weights"]))
        self.learns_own = False
        if self.k_max:
            r = responsibilities(
                torch.empty(0, 0), received.prior, received.active, self.tau, self.kappa
            )[0]
            self._take(Choice(r, *seated(r, received.active, self.seats_wanted)))

    def _shared_tensors(self) -> Mapping[str, Tensor]:
        return self.seats.shared_tensors() if self.k_max else tensors_of(self.network)

    @torch.no_grad()
    def _write(self, tensors: Mapping[str, Tensor], row: Tensor) -> None:
        for name, value in self.layout.unpack(row[: self.layout.size]).items():
            tensors[name].copy_(value)

    @torch.no_grad()
    def _take(self, choice: Choice) -> None:
        """Put the chosen experts into the seats; empty seats have no weight."""
        self.choice, gate = choice, self.seats.gate
        shares = torch.zeros(self.seats_wanted, dtype=torch.float64)
        shares[: len(choice.slots)] = choice.shares
        gate.log_shares = shares.log().to(gate.log_shares)
        gate.log_weights = None
        gate.router.zero_()
        for seat in range(self.seats_wanted):
            slot = choice.slots[min(seat, len(choice.slots) - 1)]
            row = self.received.rows[slot]
            self._write(self.seats.tensors(seat), row)
            if seat < len(choice.slots):
                gate.router[seat] = row[self.layout.size :].to(gate.router)

    def local_batches(
        self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int
    ) -> Iterator[Any]:
        """Choose experts, then yield the client's batches without its probes: once for the experts,
        and once more for its own adapter."""
        self.learns_own = False
        if self.k_max:
            self._take(self.choose(data, client, labels))
        rest = np.delete(np.arange(len(client.train)), self._probe_places(client))
        trained = Client(client.id, client.train[rest], client.val, client.state)
        kept = labels[torch.from_numpy(rest).to(labels.device)]
        yield from super().local_batches(data, trained, epochs=epochs, labels=kept, steps=steps)
        if self.keeps_own:
            self.learns_own = True
            yield from super().local_batches(data, trained, epochs=epochs, labels=kept, steps=steps)

    def step_kind(self, batch_idx: int) -> str:
        return "own" if self.learns_own else "experts"

    def work_kind(self, client: Client) -> str:
        experts = int(self.server["active"].sum())
        return f"{experts} experts to choose from by {len(self._probe_places(client))} probes"

    def _probe_places(self, client: Client) -> np.ndarray:
        """Return where the client's probes are among its training examples; the same in every
        round. One example alone has no error of its mean, so there are none or two at least."""
        if self.k_max == 0 or (self.k_max == 1 and not self.keeps_own):
            return np.empty(0, np.int64)  # there is nothing to choose
        n = len(client.train)
        count = min(self.probes, n // LEAST_TRAINING)
        random = stream(self.seed, "probes", client.id)
        return np.sort(random.choice(n, count if count > 1 else 0, replace=False))

    def choose(self, data: FederatedData, client: Client, labels: Tensor) -> Choice:
        """Return the experts that suit a client, by the losses of its probes: the E-step.

        Args:
            data: the client's data.
            client: whose model has been received.
            labels: of its training examples, ``[n, T]``.
        """
        received, places = self.received, self._probe_places(client)
        nats = torch.zeros(len(places), self.k_max + 1, dtype=torch.float64)
        own = torch.zeros(len(places) if self.keeps_own else 0, dtype=torch.float64)
        if len(places):
            target = labels[torch.from_numpy(places).to(labels.device)]
            index = torch.from_numpy(client.train[places]).to(data.device)
            nats_of = partial(self._nats, data, index, target)
            for slot in torch.nonzero(received.active).flatten().tolist():
                nats[:, slot] = nats_of(self.network, self._with_expert(slot))
            if self.keeps_own:
                own = nats_of(self.own_network, {})
        r, _ = responsibilities(nats, received.prior, received.active, self.tau, self.kappa)
        rejects = is_worse_than_own(nats, own, received.active, self.birth_gap, self.birth_z)
        return Choice(r, *seated(r, received.active, self.seats_wanted), rejects)

    def transfer(self, client: Client) -> Paired | None:
        """Return by how much the model that a client is given is worse than what it learned alone,
        on its validation examples, in nats a token: negative transfer where it is above 0. None
        where it has fewer than two validation examples, or no adapter of its own."""
        if len(client.val) < 2 or "own" not in client.state:
            return None
        index = torch.from_numpy(client.val).to(self._data.device)
        target = self._data.train_target[index]
        nats_of = partial(self._nats, self._data, index, target)
        return Paired.of(nats_of(self.deploy(client), {}), nats_of(self.own_network, {}))

    def _with_expert(self, slot: int) -> dict[str, Tensor]:
        """Return the tensors of the network that computes with the shared adapter and one
        expert."""
        row = self.received.rows[slot][: self.layout.size].to(self.device)
        return self.seats.replacing(self.layout.unpack(row))

    @torch.no_grad()
    def _nats(
        self,
        data: FederatedData,
        index: Tensor,
        target: Tensor,
        network: nn.Module,
        tensors: dict[str, Tensor],
    ) -> Tensor:
        """Return the mean loss of each training example at ``index`` over its labelled tokens,
        float64 ``[N]`` on the CPU. Where one is not finite, all are ``UNUSABLE``: one broken expert
        must not decide about the others. No autocast is on: clients choose in training what they
        are evaluated with."""
        size, was_training, parts = data.evaluation_batch, network.training, []
        network.eval()
        for places, labels in zip(index.split(size), target.split(size), strict=True):
            inputs = data.with_labels(data.inputs("train", places), labels)
            with torch.autocast(data.device.type, enabled=False):
                outputs = functional_call(network, tensors, (inputs,))
            nats, tokens = self.task.examplewise(outputs, labels)["loss"]
            parts.append((nats / tokens.clamp_min(1)).double().cpu())
        network.train(was_training)
        found = torch.cat(parts)
        return found if bool(found.isfinite().all()) else torch.full_like(found, UNUSABLE)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Return the terms of the objective: of the experts, or in the second pass of the own
        adapter."""
        if self.learns_own:
            inputs, target = batch
            loss = self.task_loss(self.own_network(inputs), target)
            return {"loss": loss, "loss_own": loss}
        outputs = super().training_step(batch, batch_idx)
        if self.k_max == 0 or len(self.choice.slots) < 2 or self.gate_weight == 0:
            return outputs
        gate = self.gate_weight * self._gate_divergence(batch[1])
        return {**outputs, "loss": outputs["loss"] + gate, "loss_gate": gate}

    def _gate_divergence(self, target: Tensor) -> Tensor:
        """Return KL(mean of a_t over labelled tokens || share)."""
        gate, count = self.seats.gate, len(self.choice.slots)
        assert gate.log_weights is not None
        labelled = (
            (target[:, : gate.log_weights.shape[1]] != IGNORED).to(gate.router.dtype).unsqueeze(-1)
        )
        mean = (gate.log_weights[..., :count].exp() * labelled).sum(
            (0, 1)
        ) / labelled.sum().clamp_min(1)
        return (mean * (mean.clamp_min(1e-12).log() - gate.log_shares[:count])).sum()

    def trainable(self) -> Iterable[nn.Parameter]:
        """Return what the optimiser steps on. In each of the two passes the other half has no
        gradient, and rests."""
        return [p for p in self.parameters() if p.requires_grad]

    def upload(self, client: Client) -> Payload:
        rows = {0: self._row(self._shared_tensors())} if self.shared else {}
        if self.k_max == 0:
            return Payload(
                {"examples": self.examples_of(client), **self.wire.upload(Trained({}, rows))}
            )
        choice, router = self.choice, self.seats.gate.router
        for seat, slot in enumerate(choice.slots):
            rows[slot] = self._row(self.seats.tensors(seat), router[seat])
        own = self.layout.read(self.own_network) if self.keeps_own else None
        learned = own is not None and bool(own.isfinite().all())
        if own is not None and learned:
            client.state["own"] = own
        client.state["responsibilities"] = choice.r.float()
        seeds = choice.rejects and learned and self._wins_lottery(client)
        shares = dict(zip(choice.slots, choice.shares.tolist(), strict=True))
        trained = Trained(shares, rows, choice.rejects, own if seeds else None)
        return Payload({"examples": self.examples_of(client), **self.wire.upload(trained)})

    def _row(self, adapter: Mapping[str, Tensor], router: Tensor | None = None) -> Tensor:
        router = torch.zeros(self.features) if router is None else router.detach().cpu().float()
        return torch.cat([self.layout.pack(adapter), router])

    def _wins_lottery(self, client: Client) -> bool:
        """Return whether this client's own adapter seeds an expert: with probability 1 / rejecters
        of the last round, so that about one does. Where no slot is free nobody's does."""
        last = self.received.rejecters
        if last == 0 or bool(self.received.active[1:].all()):
            return False
        return bool(self.stream("birth", client).random() < 1 / last)

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        return {"examples": (), **self.wire.limits()}

    # The server's half

    def broadcast(self, client: Client) -> Payload:
        moved = None
        if self.remembers:
            last = self.server["served"][client.id]
            moved = (self.server["moved"] >= last) | (last == 0)
        return self.wire.broadcast(self.slots, moved)

    def starts_of(self, upload: Payload) -> Tensor:
        """Return what the rows of an upload were before the client trained them, ``[n, P + d]``."""
        mine = upload.codes("slots").values.reshape(-1) if self.k_max else torch.empty(0)
        return self.slots.rows[self.wire.sent(torch.nonzero(mine).flatten().add(1).tolist())]

    def entry_starts(self, upload: Payload) -> Mapping[str, Tensor]:
        return {"rows": self.starts_of(upload)} if "rows" in upload else {}

    def averaged(self, upload: Payload) -> Iterator[tuple[int, float, Tensor]]:
        examples, trained = examples_in(upload), self.wire.trained(upload, self.server["active"])
        for slot, row in trained.rows.items():
            yield slot, examples * trained.shares[slot], row[: self.layout.size]

    def check(self, upload: Payload, client: Client) -> None:
        upload.tensor("examples")
        self.wire.trained(upload, self.server["active"])
        added = self.addends(upload, client.id, 1).values() if self.private else ()
        if not all(largest(one.values) < MAX_MAGNITUDE for one in added):
            raise PayloadError("an update of 2^20 or more, which no sum has room for")

    def addends(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        """Return what an upload adds: to the mean of each slot; how much each was used; how many
        clients reject all experts and seed one, and their seeds."""
        trained, starts = self.wire.trained(upload, self.server["active"]), self.slots.rows
        if self.private:
            addends = updates(trained, starts, self.mass_scale)
        else:
            addends = means(trained, starts, weight, self.largest_weight, self.oblivious)
        if trained.own is not None:
            addends["own"] = Addend(trained.own.float() - self._seeds_from)
        elif self.oblivious and self.keeps_own:
            addends["own"] = Addend(torch.zeros(self.layout.size))
        return addends

    def weight_bounds(self, name: str, most: int, client_id: int, examples: int) -> tuple[int, int]:
        if name.startswith("expert/"):
            return 0, examples * SHARE_UNITS
        return super().weight_bounds(name, most, client_id, examples)

    def largest_value(self, name: str) -> float:
        if name not in ("mass", "votes"):
            return super().largest_value(name)
        # products in float32 may be a little above the scale
        return max(1.0, self.mass_scale * (1 + 2.0**-20)) if self.private else 1.0

    def starts(self) -> Mapping[str, Tensor]:
        return {}  # with trainer.privacy addends are differences already

    @property
    def _seeds_from(self) -> Tensor:
        """What seeds are counted from: where they are clipped, what all own adapters began with."""
        return self.first["weights"] if self.private else torch.zeros_like(self.first["weights"])

    def summing_state(self) -> Mapping[str, Tensor]:
        return vars(self.slots)

    def next_state(self, sums: Sums) -> None:
        before, scale = self.slots, self.mass_scale if self.private else 1.0
        mass, (clients, rejects, seeds) = counts(sums, scale)
        if self.round == 1:
            warn_of_noise(least_count(sums, scale), self.cohort, self.keeps_own)
        after = before.with_rows(next_rows(sums, before.rows, mass, self.server_lr))
        if self.k_max:
            after = (
                after.used(mass, self.rules)
                .pruned(self.round, self.rules)
                .merged(self.space, self.rules)
            )
            seed = (sums.total("own") / seeds + self._seeds_from).float() if seeds else None
            free = ~before.active & (torch.arange(len(mass)) > 0)
            after = after.with_birth(
                seed, free, rejects, max(clients, rejects), self.round, self.rules
            )
        state = dict(vars(after))
        if self.remembers:
            same = (after.rows == before.rows).all(1) & (after.born == before.born)
            state["moved"] = torch.where(same, self.server["moved"], self.round)
            state["served"] = self.server["served"].clone()
            state["served"][list(self.served)] = self.round
        self.server, self.changed_in = state, self.round

    def server_metrics(self) -> dict[str, float]:
        slots = self.slots
        kept = self.changed_in == self.round and bool(self.served)
        changes = slots.changes if kept else 0 * slots.changes
        total = slots.mass[1:].sum()
        use = slots.mass[1:] / total.clamp_min(1e-300)
        # nothing is known of it where no use is above a private sum's noise
        effective = (-use * use.clamp_min(1e-300).log()).sum().exp() if total > 0 else 0.0
        return {
            **super().server_metrics(),
            "experts/active": float(slots.active.sum()),
            "experts/effective": float(effective),
            **dict(zip(CHANGES, changes.tolist(), strict=True)),
            "experts/rejecters": float(slots.rejecters),
            **{f"expert/{slot}/mass": float(use[slot - 1]) for slot in range(1, self.k_max + 1)},
        }

    def deploy(self, client: Client | None = None) -> nn.Module:
        """Return the network with the experts that suit a client by its probes; without a client,
        those of a newcomer, by the prior."""
        someone = client or Client(-1, np.empty(0, np.int64), np.empty(0, np.int64))
        self._start(self.wire.received(self.wire.broadcast(self.slots)), someone)
        if self.k_max and client is not None:
            self._take(self.choose(self._data, client, self.labels_of(client)))
        return self.network
