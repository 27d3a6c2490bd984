"""HESTLadder: adapters of a language model whose residual branches are left out within an energy
budget.

    A:  L = CE(full)
    B:  L = CE(full) + CE(S) + KL(full || S),   S a random subset of branches for each sequence
    C:  the same with S from the ladder,        full = S_0 > S_1 > ... > S_K

Clients train one adapter for all budgets. First all branches are on, which is FedAvg bit for bit;
then every step also trains a random subset of the branches, taught by the full network (the
sandwich rule and the distillation in place of US-Nets, Yu and Huang, ICCV 2019, arXiv 1903.05134).
In the last rounds of B the clients report what their validation examples lose by each branch, as
sums, and the server leaves out one branch a round: the ladder. What travels down is the adapter and
the masks. Then the adapter is trained on the levels that a client's own budget allows.

In use a sequence takes the best level that its budget affords, and a ledger holds it
(:mod:`fl_lightning.energy.budgets.levels`). Joules are of the network with merged adapters on the
client's device. Nothing is published under this name: see docs/methods/hestladder.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning import rng
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.client import Client
from fl_lightning.compatibility import no_personal, only
from fl_lightning.config.constraints import at_least, within
from fl_lightning.data import FederatedData
from fl_lightning.energy import CostTable
from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.gates import GateWeights, energy_of
from fl_lightning.energy.budgets.gates import next_price as next_gate_price
from fl_lightning.energy.budgets.ladder import LARGEST_LOSS, BranchCosts, distinct, drawn_masks
from fl_lightning.energy.budgets.ladder_network import EVALUATED_SEQUENCES, LadderNetwork
from fl_lightning.energy.budgets.ladder_search import GATED, Budgeted, LadderSearch, Search
from fl_lightning.energy.budgets.layer_gates import gates_for
from fl_lightning.energy.budgets.measuring import COUNTED
from fl_lightning.energy.budgets.network import embedding_of
from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.energy.budgets.tables import (
    branch_devices,
    budget_shares,
    known_by,
    require_reachable,
)
from fl_lightning.energy.options import Deciding
from fl_lightning.energy.regret import RegretController, next_price
from fl_lightning.energy.switched.branches import PARTS, BranchWeights, blocks_of
from fl_lightning.errors import require
from fl_lightning.methods.base import KnownNetwork, Method
from fl_lightning.methods.losses import distillation as distilled
from fl_lightning.methods.terms import refuse_readers
from fl_lightning.tasks import LanguageModelling
from fl_lightning.wire import Codes, Layout, Limit, Payload, PayloadError

log = logging.getLogger("fl_lightning")

ROUNDS = within("[1, inf)", "a stage has 1 round or more", "leave it out")
PRICE = "price"
"""Name of lambda in what a client keeps; it never travels."""
MOST_ENUMERATED = 10
"""Branches of which all subsets are tried by ``search: enumeration``."""


class HESTLadder(Method):
    """Adapters whose branches are left out by a ladder that the federation finds, within an energy
    budget.

    Args:
        network: a ``llama_tiny``, or another Llama of the project's, with adapters or without.
        budget: E_max of a sequence, as a share of what it costs with all branches, the whole
            network counted; a list: client i has entry i modulo their number. Infinity for all:
            FedAvg.
        costs: file of a table of costs of branches, as ``python -m fl_lightning energy --calibrate
            true --scope branch`` writes it, or the name of one that comes with the package; a list:
            client i has entry i modulo their number.
        all_on_rounds: rounds of stage A, all branches on.
        subset_rounds: rounds of stage B, random subsets; stage C is what follows.
        levels: K, most levels below all branches: one is added in each of the last rounds of stage
            B.
        branches_per_level: branches that a level leaves out more than the one before; 1, or more
            for networks of many blocks. All of a level are chosen by the losses without each of
            them alone.
        search: ``elimination``: the branch whose joules cost the least loss; ``random``: any branch
            that is not protected, a baseline; ``enumeration``: of all subsets the one of least
            validation loss for each budget at the end of stage B, a baseline that takes 2^G passes
            over the validation examples; ``gates``: the branch of the lowest gate, a baseline whose
            stage B trains a static gate a branch by gradient; ``tabs``: the same with gates that
            read the states of their own block, and in use choose a subset for each sequence.
        phase: ``all``: a sequence has one level from its first token on; ``answer``: its prompt has
            all branches where the budget allows that.
        distillation: weight of KL(full || S).
        controller: what gets the level of least predicted loss, by a state of the first block,
            which is then always computed: ``sequence``: each sequence, among the levels that its
            budget affords; ``step``: each token after the prompt, so that what a budget leaves over
            is spent; ``none``: a sequence has the best level that its budget affords.
        loss_scale: what clients multiply the losses of subsets by, in nats, in a message that is
            clipped and made noisy as a whole, above 0. ``trainer.privacy`` needs it. The noise of a
            loss is z C / (cohort times this) nats; the larger it is, the less of the clip is left
            to the weights. Default: 1.
        gates_lr: learning rate of the gates of ``search: gates`` or ``tabs``; null: that of the
            adapter.
    """

    kind = "language models"
    personalised = True
    calls_server_optimizer = True
    refuses = {
        **no_personal("its clients have budgets of their own, and one ladder"),
        **only("language", "its levels are of sequences of tokens"),
        "module": "it switches the branches of a network",
        "asynchronous": "what travels depends on the stage, and these uploads are of any round",
        "privacy": "losses of subsets are clipped together with weights; write --model.loss_scale 0.1",
    }
    counted_metrics = COUNTED
    limited = False
    deciding: Deciding = "none"

    def __init__(
        self,
        network: KnownNetwork = "llama_tiny",
        budget: float | list[float] = 0.8,
        costs: str | list[str] | CostTable | None = None,
        all_on_rounds: Annotated[int, ROUNDS] = 10,
        subset_rounds: Annotated[int, ROUNDS] = 6,
        levels: Annotated[
            int, within("[1, inf)", "a ladder has 1 level or more", "leave it out")
        ] = 4,
        branches_per_level: Annotated[int, at_least(1)] = 1,
        search: Search = "elimination",
        phase: Literal["all", "answer"] = "all",
        distillation: Annotated[float, within("[0, inf)", "it is 0 or more", "leave it out")] = 1.0,
        controller: Deciding = "none",
        loss_scale: Annotated[float | None, within("(0, inf)", "it is above 0", 0.1)] = None,
        gates_lr: Annotated[float | None, within("(0, inf)", "it is above 0", 0.02)] = None,
        **settings: Any,
    ) -> None:
        super().__init__(network=network, **settings)
        budgets = budget_shares(budget, "of all branches", example=0.8)
        require(
            subset_rounds > levels,
            f"--model.subset_rounds {subset_rounds} with --model.levels {levels}",
            "its first round tries every branch, and each of its last ones leaves one out",
            f"write --model.subset_rounds {levels + 1}, or fewer levels",
        )
        require(
            search not in GATED or (phase, controller) == ("all", "none"),
            f"--model.search {search} with --model.phase {phase} and --model.controller "
            f"{controller}",
            "its gates are trained for one subset of a whole sequence, prompt and answer",
            "leave phase and controller out",
        )
        require(
            gates_lr is None or search in GATED,
            f"--model.gates_lr {gates_lr} with --model.search {search}",
            "it is of gates, and this search has none",
            "leave it out, or write --model.search gates",
        )
        self.gates_lr = gates_lr
        self.budget_shares, self.costs, self.phase, self.distillation = (
            budgets,
            costs,
            phase,
            distillation,
        )
        self.deciding, first = controller, all_on_rounds + 1
        kept = 0 if controller == "none" else len(PARTS)
        self.plan = LadderSearch(
            search, first, first + subset_rounds, levels, budgets, kept, branches_per_level
        )
        self.price, self.loss_scale = 0.0, 1.0 if loss_scale is None else loss_scale
        if loss_scale is not None:
            self.refuses = {
                feature: why for feature, why in self.refuses.items() if feature != "privacy"
            }
        self.limited = self.personalised = not math.isinf(budgets[0])
        read, why = ("features", "previous_features"), "a step also passes a subset of the branches"
        refuse_readers(self.terms if self.limited else (), read, "HESTLadder", why)
        self.shows = frozenset({"ladder"} if self.limited and search != "tabs" else ())
        self.client_id = 0
        self.losses: Tensor | None = None

    def build(self, data: FederatedData) -> None:
        super().build(data)
        if not self.limited:
            return
        costs = self.costs if isinstance(self.costs, list) else [self.costs]
        count = len(blocks_of(self.network))
        shipped = getattr(self.network, "block_costs", "")
        self.devices = branch_devices(costs, self.budget_shares, count, self.deciding, shipped)
        self.measured_by = known_by(self.devices)
        lengths = Lengths.of(data.test_target, data.test_target.shape[1])
        for device in self.devices:
            require_reachable(device, lengths)
        if isinstance(data.task, LanguageModelling) and data.task.generates:
            lengths = lengths.with_answers(data.task.max_new_tokens)
        self.budgeted = Budgeted.of(self.devices, lengths)
        controller = None
        if self.deciding != "none":
            controller = RegretController(
                embedding_of(self.network).embedding_dim, self.plan.levels
            )
        full_prompt, branches = self.phase == "answer", len(PARTS) * count
        gates = gates_for(self.plan.kind, branches, embedding_of(self.network).embedding_dim)
        self.network = LadderNetwork(self.network, self.devices[0], full_prompt, controller, gates)
        require(
            self.plan.kind not in ("enumeration", "tabs") or branches <= MOST_ENUMERATED,
            f"--model.search {self.plan.kind} on a network of {branches} branches",
            f"it tries all subsets of at most {MOST_ENUMERATED} branches",
            "write --model.search elimination",
        )
        self.has_said_no_ladder: set[bool] = set()
        self.layout = Layout.of(self.network)
        self.start_server()
        self.server |= self.plan.start(branches)
        self._build_terms(data)

    def _build_terms(self, data: FederatedData) -> None:
        """Make room once the network is that of the budgets."""
        if isinstance(self.network, LadderNetwork) or not self.limited:
            super()._build_terms(data)

    def trainable(self) -> Iterable[nn.Parameter] | Iterable[dict[str, Any]]:
        gated = self.laddered.gates if self.gates_lr and self.limited else None
        if gated is None:
            return super().trainable()
        gates: dict[str, Any] = {"params": [*gated.parameters()], "lr": self.gates_lr}
        apart = {*map(id, gates["params"])}
        rest = [p for p in self.parameters() if p.requires_grad and id(p) not in apart]
        return [{"params": rest}, gates]

    @property
    def keeps_state(self) -> bool:
        return super().keeps_state or self.keeps_price

    @property
    def keeps_price(self) -> bool:
        """Whether a client has a price of joules."""
        return self.limited and (self.deciding != "none" or self.plan.kind in GATED)

    @property
    def laddered(self) -> LadderNetwork:
        """The network at its levels."""
        assert isinstance(self.network, LadderNetwork), "there is no budget"
        return self.network

    def device_of(self, client: Client) -> Device:
        """Return a client's device."""
        return self.devices[client.id % len(self.devices)]

    @property
    def has_masks(self) -> bool:
        """Whether the broadcasts of this round hold masks: in the stages B and C."""
        return self.limited and self.round >= self.plan.first_subsets

    @property
    def searches(self) -> bool:
        """Whether clients report the losses of subsets in this round."""
        return self.limited and self.plan.asks(self.round)

    def work_kind(self, client: Client) -> str:
        if not self.has_masks:
            return super().work_kind(client)
        in_b = self.round < self.plan.first_ladder
        stage = f"subsets from {self.plan.lowest_share(self.round):g}" if in_b else "ladder"
        kind = f"{stage}, device {client.id % len(self.devices)}"
        return f"{kind}, searching" if self.searches else kind

    # The client's half

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        self.losses, self.client_id = None, client.id
        if not self.limited:
            return
        known = torch.ones_like(self.server["ladder"], dtype=torch.bool)
        if self.has_masks:
            masks = message.codes("masks").values.bool()
            if self.round < self.plan.first_ladder:
                self.protected, self.base = masks
                known[-1] = self.base
            else:
                self.levels = known = masks
        self.on, self.price = self.device_of(client), kept_price(client)
        self.laddered.run_on(self.on, known, self.price)

    def local_batches(
        self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int
    ) -> Iterator[Any]:
        """Yield the batches of the round; where the round searches, find first what the validation
        examples lose, under the weights that were received."""
        if self.searches:
            self.losses = self._validation_losses(data, client, labels)
        yield from super().local_batches(data, client, epochs=epochs, labels=labels, steps=steps)

    def _validation_losses(self, data: FederatedData, client: Client, labels: Tensor) -> Tensor:
        """Return the loss of each candidate on a client's validation examples, or on its first
        training examples where it has none, in nats a labelled token, float32 ``[M]``."""
        if len(client.val):
            batches: Iterable[Any] = data.val_batches([client], EVALUATED_SEQUENCES)
        else:
            batches = super().local_batches(data, client, epochs=1, labels=labels, steps=1)
        return self.laddered.mean_losses(
            batches, self.plan.candidates(self.base, self.round)
        ).float()

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Return the loss, the task's with all branches, and in the stages B and C ``loss_subset``
        and ``loss_distilled``; in C with a controller also ``loss_regret``, which trains the
        controller alone."""
        if not self.has_masks:
            return super().training_step(batch, batch_idx)
        inputs, target = batch
        noise = rng.stream(self.seed, f"branches/{batch_idx}", self.round, self.client_id)
        network, levels = self.laddered, None
        masks: Tensor | BranchWeights
        if self.round >= self.plan.first_ladder:
            network.run_on(self.on, self.levels, self.price)
            levels = network.levels_to_train(inputs, target, noise)
            masks = network.gates_of(levels)
        elif network.gates is not None:
            masks = network.gates.weights(
                Lengths.of(target, target.shape[1]).prompts, noise, self.protected
            )
        else:
            costs, lowest = BranchCosts.of(self.on), self.plan.lowest_share(self.round)
            masks = drawn_masks(noise, costs, self.protected, lowest, len(target))
        full, subset, states = network.sandwich(inputs, target, masks)
        task, part = self.task_loss(full, target), self.task_loss(subset, target)
        student, teacher = (self.task.class_rows(one, target) for one in (subset, full.detach()))
        told = self.distillation * distilled(student, teacher.logits, temperature=1.0)
        losses = {
            "loss": task + part + told,
            "loss_task": task,
            "loss_subset": part,
            "loss_distilled": told,
        }
        if levels is not None and self.deciding != "none":
            regret = network.regret_loss(states, target, levels, full, subset)
            lengths = Lengths.of(target, full.shape[1])
            self.price = next_price(self.price, *network.spent_by_wishes(states.detach(), lengths))
            losses |= {"loss": losses["loss"] + regret, "loss_regret": regret}
        if isinstance(masks, GateWeights):
            more = {
                "loss_energy": self._priced_energy(masks, float(task.detach())),
                **masks.losses(),
            }
            losses |= {"loss": losses["loss"] + sum(more.values()), **more}
        return self.with_terms(losses, batch, full)

    def _priced_energy(self, drawn: GateWeights, task: float) -> Tensor:
        """Return lambda (E / E_t - 1) of the gates that have drawn, and move lambda."""
        before = self.price
        energy = energy_of(
            drawn.chances, BranchCosts.of(self.on), self.plan.lowest_share(self.round)
        )
        self.price = next_gate_price(before, float(energy.detach()), task, min(self.budget_shares))
        return before * (energy - 1)

    def upload(self, client: Client) -> Payload:
        """Return n_k and the adapter, and where the round searches the losses of the candidates."""
        if self.keeps_price:
            client.state[PRICE] = torch.tensor(self.price)
        entries = {
            "examples": self.examples_of(client),
            "weights": self.adapters.sent(self, client),
        }
        return Payload(entries if self.losses is None else {**entries, "losses": self.losses})

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        found: dict[str, Limit] = {
            "examples": (),
            "weights": (self.adapters.sent_values(self, client),),
        }
        if not self.searches:
            return found
        candidates = self.plan.candidates(self.server["ladder"][-1].bool(), self.round)
        return {**found, "losses": (len(candidates),)}

    # The server's half

    def broadcast(self, client: Client) -> Payload:
        """Return the adapter; in stage B also which branches are protected and the ladder's last
        level so far, and in stage C the ladder, one bit a branch."""
        if not self.has_masks:
            return super().broadcast(client)
        ladder = self.server["ladder"]
        in_b = self.round < self.plan.first_ladder
        masks = torch.stack((self.server["protected"], ladder[-1])) if in_b else ladder
        return Payload({"masks": Codes(masks.int(), 1), "weights": self.server["weights"]})

    def check(self, upload: Payload, client: Client) -> None:
        super().check(upload, client)
        if not self.searches:
            return
        losses = upload.tensor("losses")
        if bool((losses < 0).any()) or float(losses.max()) > LARGEST_LOSS:
            raise PayloadError(
                f"losses from {float(losses.min()):.4g} to {float(losses.max()):.4g}",
                f"a loss lies between 0 and {LARGEST_LOSS:g} nats a token",
                "send what LadderNetwork.losses returns",
            )

    def addends(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        """Return FedAvg's addend, and where the round searches the losses of the candidates."""
        found = super().addends(upload, client_id, weight)
        if self.searches:
            losses = self.loss_scale * upload.tensor("losses")
            found["losses"] = Addend(losses, weight, self.largest_weight)
        return found

    def largest_value(self, name: str) -> float:
        return self.loss_scale * LARGEST_LOSS if name == "losses" else super().largest_value(name)

    def next_state(self, sums: Sums) -> None:
        """Average the adapters; and in the rounds of stage B that search, choose what is protected
        or the ladder's next level."""
        super().next_state(sums)
        if not self.limited:
            return
        losses = (
            (sums.mean("losses") / self.loss_scale).clamp(0, LARGEST_LOSS)
            if self.searches
            else None
        )
        noise = self.stream("ladder")
        gates = self.layout.unpack(self.server["weights"].float()).get("gates.theta")
        self.server |= self.plan.next_entries(
            self.server, losses, self.round, self.budgeted, noise, gates
        )

    def server_metrics(self) -> dict[str, float]:
        found = super().server_metrics()
        if not self.limited or self.plan.kind == "tabs":  # whose subsets are no levels
            return found
        ladder = distinct(self.server["ladder"])
        share = float(BranchCosts.of(self.devices[0]).share(ladder[-1:]))
        return {**found, "energy/levels": float(len(ladder)), "energy/least_share": share}

    def deploy(self, client: Client | None = None) -> nn.Module:
        """Return the network at the levels that are known, on a client's device and at its price;
        without a client, on the first device at the price 0."""
        super().deploy(client)
        if self.limited:
            self._say_no_ladder()
            device = self.devices[0] if client is None else self.device_of(client)
            self.laddered.run_on(device, self.server["ladder"].bool(), kept_price(client))
        return self.network

    def _say_no_ladder(self) -> None:
        last = self.plan.first_ladder - 1
        over = self.round > last
        if over in self.has_said_no_ladder or min(self.budget_shares) >= 1:
            return
        if not over and self.round < last:
            log.warning(
                "no ladder is known before the end of round %d: until then all sequences under a "
                "budget below 1 are refused, and their perplexity is that of a guess",
                last,
            )
        elif over and bool(self.server["ladder"].all()):
            log.warning(
                "the ladder leaves no branch out: its rounds, up to %d, were void, or no budget asks for it",
                last,
            )
        else:
            return
        self.has_said_no_ladder.add(over)


def kept_price(client: Client | None) -> float:
    """Return lambda of a client; 0 where it has none yet, or there is no client."""
    return 0.0 if client is None or PRICE not in client.state else float(client.state[PRICE])
