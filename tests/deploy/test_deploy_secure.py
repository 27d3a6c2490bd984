"""Secure sums over nodes: what they give, what they cost, who can leave when, and what never
travels.

The reference is the simulation with the same secure sum; of a node that dies before a phase, one
whose stressor has its clients leave before that phase.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from deploy_transports import InProcess
from outcomes import rows_of
from safetensors.torch import save
from test_deploy import (
    RULES,
    Drop,
    Processes,
    command_line,
    deployed,
    nodes_in,
    simulated,
    weights,
)

from callbacks import ByzantineClients, SecureDropout
from fl_lightning import rng
from fl_lightning.aggregation import receiving
from fl_lightning.aggregation.adapters.plain_weights import AS_THEY_ARE
from fl_lightning.aggregation.masked_round import MaskedRound
from fl_lightning.aggregation.sum_form import SumForm
from fl_lightning.deploy.node.build import builder
from fl_lightning.deploy.node.node import Node, NodeSettings
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.deploy.protocol.server_state import beside_broadcast, take_over
from fl_lightning.deploy.server.deployable import check_deployable
from fl_lightning.deploy.server.roster import RoundRules
from fl_lightning.deploy.server.server import deploy_over
from fl_lightning.errors import InputError
from fl_lightning.hooks import Stressor
from fl_lightning.methods import FedAvg
from fl_lightning.privacy import from_system
from fl_lightning.privacy.secure import PHASES, SecureSum
from fl_lightning.wire import Payload, PayloadError

pytest.importorskip("Crypto")

from fl_lightning.deploy.node.secure import KeptRound, SecureRounds
from fl_lightning.deploy.server.ring import drawn_ring, kept_ring
from fl_lightning.deploy.server.secure import add_up_on_nodes, common_form, lengths_known
from fl_lightning.privacy.secure.client import SecureClient
from fl_lightning.privacy.secure.server import SecureServer

SECURE = "--trainer.secure_sum={threshold: 0.6}"  # 3 of 4 clients
IMAGES = [
    "--trainer.participation=1.0",
    "--data.num_clients=4",
    "--data.dataset=synthetic",
    "--data.synthetic_examples=240",
    "--data.synthetic_test_examples=40",
    SECURE,
]
RING = "--trainer.secure_sum={threshold: 0.6, neighbours: 2}"
TEXTS = [
    "--trainer.participation=1.0",
    "--trainer.max_local_steps=2",
    "--data.num_clients=4",
    "--data.partition=IID",
    "--data.examples_per_client=40",
    "--data.tests_per_task=1",
    SECURE,
]
RUN = "0123456789abcdef"
SUM = SecureSum(threshold=0.6)
FORM = SumForm((("weights", 4, 10),))


def table(cli, name: str) -> list[dict[str, str]]:
    return rows_of(cli.trainer.run_dir / f"{name}.csv")


class Leave(Stressor):
    """Has clients drop out before a phase of one round's secure sum."""

    def __init__(self, round: int, clients: Collection[int], phase: str) -> None:
        self.round, self.clients, self.phase = round, clients, phase

    def change_cohort(self, cohort, *, round, context):
        gone = SecureDropout(1.0, self.phase).change_cohort(cohort, round=round, context=context)
        here = round == self.round
        return [
            there if here and each.client.id in self.clients else each
            for each, there in zip(cohort, gone, strict=True)
        ]


class Mortal(InProcess):
    """Nodes of one client each, some of which die before a phase of round 2 and are started again
    before round 3. It remembers all messages."""

    def __init__(self, folder: Path, dying: Collection[int] = (), phase: str = "", **more) -> None:
        super().__init__(nodes_in(folder, 4, **more))
        self.folder, self.dying, self.phase, self.more = folder, dying, phase, more
        self.seen: list[tuple[str, bytes]] = []
        self.answers: list[bytes] = []

    def nodes(self):
        self.by_key = {**nodes_in(self.folder, 4, **self.more), **self.by_key}
        return super().nodes()

    def exchange(self, messages, timeout):
        self.seen += messages.items()
        header = Message.from_bytes(next(iter(messages.values()))).header
        if (header.get("round"), header.get("phase")) == (2, self.phase):
            for number in self.dying:
                self.by_key.pop(f"node{number}", None)
        for key, answer in super().exchange(messages, timeout):
            self.answers.append(answer)
            yield key, answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more"),
    [
        pytest.param(
            "fedavg",
            [*IMAGES, "--model.average=NormClipping", "--model.average.max_norm=0.05"],
            marks=pytest.mark.essential,
        ),
        ("fedavg", [*IMAGES, "--model.server_optimizer=Extrapolation"]),
        pytest.param(
            "qfedavg",
            [*IMAGES, RING],
            marks=pytest.mark.essential,
        ),
        ("fedmpq", IMAGES),
        ("hest_tokens", TEXTS),
        (
            "hest_default",
            [
                *TEXTS,
                "--model.all_on_rounds",
                "1",
                "--model.subset_rounds",
                "2",
                "--model.levels",
                "1",
            ],
        ),
        pytest.param(
            "vemoe_default",
            [*TEXTS, "--model.wire=oblivious", "--model.down=changed"],
            marks=pytest.mark.essential,
        ),
        ("lora_default", [*TEXTS, "--model.adapter_average=alternate"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_and_bytes_are_those_of_the_simulation(config, more, tmp_path):
    """Vectors are bounded by the round's weights, decoded from them, made of the server's bits or
    of its experts, or one factor of its adapters; HEST's clients keep a price between rounds."""
    cli = deployed(config, tmp_path, InProcess(nodes_in(tmp_path, 3)), *more)
    assert weights(cli) == simulated(config, tmp_path, *more)
    reference = next((tmp_path / "simulated").glob("*/*/ledger.csv"))
    assert (cli.trainer.run_dir / "ledger.csv").read_text() == reference.read_text()
    expected = rows_of(reference.with_name("metrics.csv"))
    for row, other in zip(table(cli, "metrics"), expected, strict=True):
        same = {name for name in other if name.startswith(("comm/", "secure/", "clients/"))}
        assert {f"comm/{phase}_bytes" for phase in PHASES} < same
        assert {name: row[name] for name in same} == {name: other[name] for name in same}
        assert not any(name.startswith("train/") for name in row)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["residual", pytest.param("product", marks=pytest.mark.essential)])
def test_products_of_adapters_are_added_up_under_masks(rule, tmp_path, monkeypatch):
    """Nodes make the products, which no message in the open holds, and which are longer than what
    a server takes that does not know how many values they have."""
    monkeypatch.setattr(receiving, "MIN_UNDECLARED_VALUES", 1)
    monkeypatch.setattr(receiving, "UNDECLARED_FACTOR", 1)
    more = [*TEXTS, f"--model.adapter_average={rule}"]
    test_weights_and_bytes_are_those_of_the_simulation("lora_default", more, tmp_path)


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("phase", PHASES)
def test_a_node_that_dies_leaves_before_the_phase(phase, tmp_path):
    cli = deployed("fedavg", tmp_path, Mortal(tmp_path, [1], phase), *IMAGES)
    assert weights(cli) == simulated("fedavg", tmp_path, *IMAGES, drop=Leave(2, [1], phase))
    statuses = {(row["round"], row["client"]): row["status"] for row in table(cli, "ledger")}
    gone = statuses.pop(("2", "1"))
    assert gone == ("trained" if phase == "unmask" else "lost")
    assert set(statuses.values()) == {"trained"}


@pytest.mark.slow
@pytest.mark.essential
def test_a_dead_node_has_kept_its_states(tmp_path):
    """A client of HEST that trained and whose vector never came goes on from the price that it kept
    before."""
    cli = deployed("hest_tokens", tmp_path, Mortal(tmp_path, [1], "masked"), *TEXTS)
    assert weights(cli) == simulated("hest_tokens", tmp_path, *TEXTS, drop=Leave(2, [1], "masked"))
    kept = sorted(
        path.stem for path in (tmp_path / "node1" / "states").glob("*/client_000001/*.safetensors")
    )
    assert kept == ["after_000001", "after_000003"]


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("phase", ["masked", "unmask"])
def test_with_too_few_nodes_a_round_is_void_and_the_run_goes_on(phase, tmp_path):
    cli = deployed("fedavg", tmp_path, Mortal(tmp_path, [1, 3], phase), *IMAGES)
    assert weights(cli) == simulated("fedavg", tmp_path, *IMAGES, drop=Leave(2, [1, 3], phase))
    assert [row["secure/void"] for row in table(cli, "metrics")] == ["0", "1", "0"]
    assert {row["status"] for row in table(cli, "ledger") if row["round"] == "2"} == {"lost"}


def test_a_round_in_which_nobody_trains_is_void_and_the_run_goes_on(tmp_path):
    cli = command_line("fedavg", tmp_path / "deployed", *IMAGES)
    cli.trainer.callbacks += [Drop(1, [0, 1, 2, 3])]
    transport = InProcess(nodes_in(tmp_path, 2))
    deploy_over(cli.trainer, yaml.safe_load(cli.config_text), transport, RULES)
    cli.start()
    assert weights(cli) == simulated("fedavg", tmp_path, *IMAGES, drop=Drop(1, [0, 1, 2, 3]))
    assert [row["secure/void"] for row in table(cli, "metrics")] == ["1", "0", "0"]


class Restarted(Mortal):
    """The server ends when round 2 has been unmasked and not counted; which nodes are there
    afterwards is said."""

    def exchange(self, messages, timeout):
        answers = list(super().exchange(messages, timeout))
        header = Message.from_bytes(next(iter(messages.values()))).header
        if (header.get("round"), header.get("phase")) == (2, "unmask"):
            raise KeyboardInterrupt
        yield from answers


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    ("away", "more"), [((), []), ((3,), []), ((), [RING])], ids=["all", "one-away", "ring"]
)
def test_a_server_that_repeats_a_round_gets_the_same_sum_or_none(away, more, tmp_path, caplog):
    with pytest.raises(KeyboardInterrupt):
        deployed("fedavg", tmp_path, Restarted(tmp_path), *IMAGES, *more)
    (run,) = (tmp_path / "deployed" / "fedavg").iterdir()
    again = Mortal(tmp_path, away, "masked")
    cli = deployed("fedavg", tmp_path, again, *IMAGES, *more, f"--ckpt_path={run}")
    voids = [row["secure/void"] for row in table(cli, "metrics")]
    assert (run / "ring.key").exists() == bool(more)
    if not away:
        assert weights(cli) == simulated("fedavg", tmp_path, *IMAGES, *more)
        assert voids == ["0", "0", "0"]
    else:
        assert "a second sum of round 2 over other clients" in caplog.text
        assert weights(cli) == simulated(
            "fedavg", tmp_path, *IMAGES, drop=Leave(2, range(4), "keys")
        )
        assert voids == ["0", "1", "0"]


class KilledBeforeMasked(Processes):
    """The second of two processes is killed before round 2 is masked, and started again before
    round 3."""

    def exchange(self, messages, timeout):
        header = Message.from_bytes(next(iter(messages.values()))).header
        masked = (header.get("round"), header.get("phase")) == (2, "masked")
        if masked:
            self.processes[1].send_signal(signal.SIGKILL)
            self.processes[1].wait(60)
        yield from super().exchange(messages, timeout)
        if masked:
            self.restart()


@pytest.mark.slow
def test_a_process_that_is_killed_between_phases(tmp_path):
    """With it go two of four clients: the round is void. When it is back it holds nothing of that
    round."""
    with closing(KilledBeforeMasked(tmp_path)) as transport:
        transport.wait()
        cli = deployed("fedavg", tmp_path, transport, *IMAGES, rules=RoundRules(2, 200, 200))
    assert weights(cli) == simulated("fedavg", tmp_path, *IMAGES, drop=Leave(2, (1, 3), "masked"))
    assert [row["secure/void"] for row in table(cli, "metrics")] == ["0", "1", "0"]


@pytest.mark.slow
@pytest.mark.essential
def test_no_message_holds_what_a_client_would_upload(tmp_path, monkeypatch):
    """Neither its payload, nor its weights, nor its integers, nor its losses and n_k."""
    secrets: list[bytes] = []
    keep = KeptRound.keep

    def watched(self, fed, result, broadcast):
        form = keep(self, fed, result, broadcast)
        secrets.append(result.upload)
        secrets.append(Payload.from_bytes(result.upload).tensor("weights").numpy().tobytes())
        secrets.append(self.vectors[result.client.id].numpy().tobytes())
        return form

    monkeypatch.setattr(KeptRound, "keep", watched)
    transport = Mortal(tmp_path)
    deployed("fedavg", tmp_path, transport, *IMAGES, "--trainer.max_rounds=1")
    assert len(secrets) == 3 * 4
    sent = b"".join(message for _, message in transport.seen)
    pieces = [secret[at : at + 64] for secret in secrets for at in range(0, len(secret) - 64, 256)]
    # weights that no client moved are those of the broadcast
    pieces = [piece for piece in pieces if piece not in sent]
    assert len(pieces) > 1000
    answers = b"".join(transport.answers)
    # the masked vectors
    assert sum(len(answer) > len(secrets[2]) for answer in transport.answers) == 4
    assert not any(piece in answers for piece in pieces)
    kept = [
        message for message in map(Message.from_bytes, transport.answers) if message.kind == "kept"
    ]
    assert [len(message.parts) for message in kept] == [0] * 4
    for message in kept:
        (result,) = message.header["results"]
        # the last says whether it keeps anything
        assert result.keys() == {"client", "form", "keeps"}


@pytest.mark.slow
@pytest.mark.essential
def test_a_refused_upload_is_not_named_and_leaves_before_it_is_masked(tmp_path, monkeypatch):
    def refuse(method, upload, client, counted):
        if client.id == 1:
            raise PayloadError("secret 4711")

    monkeypatch.setattr("fl_lightning.deploy.node.secure.check_upload", refuse)
    transport = Mortal(tmp_path)
    cli = deployed("fedavg", tmp_path, transport, *IMAGES)
    assert not any(b"secret 4711" in answer for answer in transport.answers)
    statuses = {row["client"]: row["status"] for row in table(cli, "ledger")}
    assert statuses == {"0": "trained", "1": "rejected", "2": "trained", "3": "trained"}


def test_who_seals_what_cannot_be_opened_is_left_out_after_two_rounds(
    tmp_path, monkeypatch, caplog
):
    """Nodes send complaints in place of masked vectors."""
    honest = SecureClient.shares

    def spoilt(self, message):
        given = Payload.from_bytes(honest(self, message))
        envelopes = given.tensor("envelopes") ^ (self.id == 0)
        return Payload({**dict(given.items()), "envelopes": envelopes}).to_bytes()

    monkeypatch.setattr(SecureClient, "shares", spoilt)
    cli = deployed("fedavg", tmp_path, Mortal(tmp_path), *IMAGES, "--trainer.max_rounds=3")
    assert [row["secure/void"] for row in table(cli, "metrics")] == ["1", "1", "0"]
    assert "client 0 was named for wrong shares in 2 rounds, and is left out" in caplog.text


@pytest.mark.slow
@pytest.mark.essential
def test_a_client_that_lies_voids_no_round_and_is_left_out(tmp_path, monkeypatch, caplog):
    """Client 0 gives wrong shares; in round 2 client 1 adds 2^40 to its n_k, which voids that round
    alone."""
    unmask, masked, of_client_1 = SecureClient.unmask, SecureClient.masked, []

    def wrong_shares(self, message):
        answer = Payload.from_bytes(unmask(self, message)).tensor("shares")
        return Payload({"shares": answer ^ (self.id == 0)}).to_bytes()

    def large_weight(self, vector):
        of_client_1.extend([self] if self.id == 1 else [])
        vector[-1] += 2**40 * (self.id == 1 and len(of_client_1) == 2)
        return masked(self, vector)

    monkeypatch.setattr(SecureClient, "unmask", wrong_shares)
    monkeypatch.setattr(SecureClient, "masked", large_weight)
    cli = deployed("fedavg", tmp_path, Mortal(tmp_path), *IMAGES)
    assert [row["secure/void"] for row in table(cli, "metrics")] == ["0", "1", "0"]
    assert "round 2 is void, and the model stays: its sum is impossible" in caplog.text
    statuses = [row["status"] for row in table(cli, "ledger")]
    assert statuses == ["trained"] * 4 + ["lost"] * 4 + ["dropped"] + ["trained"] * 3


@pytest.mark.parametrize(
    ("more", "here"),
    [([], "None"), ([RING.replace("0.6", "0.8")], r"{'threshold': 0.8, 'neighbours': 2}")],
    ids=["plain", "ring"],
)
def test_a_node_whose_owner_wants_secure_sums_refuses_others(more, here, tmp_path):
    """What the owner's file leaves out has its default, and not the value of the server."""
    base = tmp_path / "base.yaml"
    base.write_text("trainer: {secure_sum: {threshold: 0.8}}\n")
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("base: base.yaml\n")
    node = Node(NodeSettings(tmp_path / "node0", name="n0"), builder([overlay]))
    there = "{'threshold': 0.8, 'neighbours': 'all'}"
    with pytest.raises(InputError, match=f"node n0; secure sum: {there} there, {here} here"):
        deployed("fedavg", tmp_path, InProcess({"node0": node}), *more)


def test_what_changes_uploads_is_refused(tmp_path):
    cli = command_line("fedavg", tmp_path, *IMAGES)
    cli.trainer.callbacks += [ByzantineClients(0.5)]
    fed = cli.trainer.prepare(cli.model, cli.datamodule, seed=0)
    with pytest.raises(
        InputError, match="ByzantineClients; it changes uploads before they are masked"
    ):
        check_deployable(fed)


def test_a_node_has_the_state_of_the_server_that_vectors_are_made_of(tmp_path):
    """FedMPQ's clients are sent weights and grid; the server's bits travel beside them, and so does
    what a method keeps since its first round."""
    server, node = (
        cli.trainer.prepare(cli.model, cli.datamodule, seed=0).method
        for cli in (command_line("fedmpq", tmp_path, *IMAGES) for _ in range(2))
    )
    server.server = {name: tensor.clone() + 1 for name, tensor in server.server.items()}
    server.server["since_round_1"] = torch.arange(3)
    broadcast = server.broadcast(SimpleNamespace(id=0))
    beside = beside_broadcast(server, broadcast.to_bytes())
    assert len(beside) < broadcast.nbytes / 10
    take_over(node, broadcast, beside)
    assert node.server.keys() == server.server.keys()
    assert all(torch.equal(node.server[name], tensor) for name, tensor in server.server.items())
    with pytest.raises(InputError, match=r"server.weights .* on this node"):
        take_over(node, Payload({"weights": torch.zeros(3)}), save({}))


# The two halves alone


def kept_rounds(
    folder: Path, round: int = 1, start: str = "0", run: str = RUN
) -> dict[int, SecureRounds]:
    """Three nodes, each with one client's vector."""
    nodes = {}
    for id in range(3):
        nodes[id] = SecureRounds(folder / str(id))
        vector = torch.arange(5) + 100 * id + 7
        nodes[id].rounds[run] = KeptRound(round, SUM, 3, {id: vector}, {id: start})
    return nodes


def phase_message(
    phase: str, id: int, part: bytes = b"", round: int = 1, run: str = RUN
) -> Message:
    header = {"kind": "phase", "run": run, "round": round, "phase": phase, "clients": [id]}
    return Message(header, (part,) if phase != "keys" else ())


def test_nobody_knows_the_ring_of_a_deployment_before():
    """It is an order of the cohort, another one each time, and not that of the seed."""
    asked = SimpleNamespace(
        method=SimpleNamespace(seed=0), round=1, leaves_before=dict.fromkeys(range(100), "")
    )
    rings = [drawn_ring(asked, source) for source in (from_system, from_system, rng.stream)]
    assert all(sorted(ring) == [*range(100)] for ring in rings)
    assert len({tuple(ring) for ring in rings}) == 3
    assert signature(deploy_over).parameters["randomness"].default is from_system


def test_a_ring_of_a_run_is_the_same_in_a_repeated_round_and_in_no_other(tmp_path):
    """It follows from a secret that the run's directory keeps, and a part of which is none."""

    def ring(run: str, round: int = 1, cohort: int = 100) -> list[int]:
        (tmp_path / run).mkdir(exist_ok=True)
        asked = SimpleNamespace(round=round, leaves_before=dict.fromkeys(range(cohort), ""))
        return kept_ring(asked, tmp_path / run)

    first, path = ring("a"), tmp_path / "a" / "ring.key"
    assert ring("a") == first
    others = [ring("a", round=2), ring("a", cohort=101)[:100], ring("b"), [*range(100)]]
    assert len({tuple(each) for each in [first, *others]}) == 5
    assert sorted(first) == [*range(100)]
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes()[:31])
    assert ring("a") not in (first, *others)
    assert ring("a") == ring("a")


def add_up(
    nodes: Mapping[int, SecureRounds], silent: Mapping[str, int] | None = None, round: int = 1
):
    """The outcome, and the messages of each client by phase."""
    (run,) = nodes[0].rounds
    seen: dict[tuple[str, int], bytes] = {}

    def ask(phase: str, messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        for id, message in messages.items():
            seen[phase, id] = message
            if (silent or {}).get(phase) == id:
                continue
            _, parts = nodes[id].answer(phase_message(phase, id, message, round, run))
            yield id, parts[0]

    asked = MaskedRound(
        SUM,
        SimpleNamespace(seed=0, server={"weights": torch.zeros(4)}, adapters=AS_THEY_ARE),
        round,
        dict.fromkeys(nodes, ""),
        {},
        lambda id, upload: {},
        lambda id, message: message,
    )
    return add_up_on_nodes(asked, dict.fromkeys(nodes, FORM), ask)[1], seen


def test_masks_cancel_exactly(tmp_path):
    outcome, _ = add_up(kept_rounds(tmp_path))
    assert outcome.total.tolist() == [321, 324, 327, 330, 333]
    outcome, _ = add_up(kept_rounds(tmp_path / "other"), silent={"masked": 2})
    assert outcome.total.tolist() == [114, 116, 118, 120, 122]
    assert outcome.living == {0, 1}


def test_phases_are_answered_once_and_in_order(tmp_path):
    nodes = kept_rounds(tmp_path)
    with pytest.raises(InputError, match=r"phase unmask of round 1; .* the next one is keys"):
        nodes[0].answer(phase_message("unmask", 0))
    with pytest.raises(InputError, match="phase keys of round 2; this node keeps round 1"):
        nodes[0].answer(phase_message("keys", 0, round=2))
    with pytest.raises(InputError, match=r"for clients \[1\]; clients \[0\] are in it"):
        nodes[0].answer(phase_message("keys", 1))
    _, seen = add_up(nodes, silent={"unmask": 0})
    for phase in PHASES[:3]:
        with pytest.raises(
            InputError, match=f"phase {phase} of round 1; .* the next one is unmask"
        ):
            nodes[0].answer(phase_message(phase, 0, seen[phase, 0]))
    for phase in PHASES:
        with pytest.raises(InputError, match="this node keeps no round"):
            nodes[1].answer(phase_message(phase, 1, seen[phase, 1]))


def test_a_second_sum_of_a_round_is_the_same_or_refused(tmp_path):
    """Also by a node that was started again, and in a run of another id, which servers choose. A
    private sum that the client was in says nothing of another run's."""
    kept_rounds(tmp_path)[0]._write("private", 1, {"0": {"0": []}})
    first, _ = add_up(kept_rounds(tmp_path))
    for run in (RUN, "another"):
        same, _ = add_up(kept_rounds(tmp_path, run=run))
        assert same.total.tolist() == first.total.tolist()
    for run in (RUN, "another", "third"):
        with pytest.raises(InputError, match="a second sum of round 1 over other clients"):
            add_up(kept_rounds(tmp_path, run=run), silent={"masked": 2})
    for other in (kept_rounds(tmp_path, start="1"), kept_rounds(tmp_path, round=2)):
        outcome, _ = add_up(other, silent={"masked": 2}, round=other[0].rounds[RUN].round)
        assert outcome.living == {0, 1}


def private_rounds(folder: Path, ids: Sequence[int]) -> SecureRounds:
    """One node's clients, of whose private round nothing has been answered."""
    node = SecureRounds(folder)
    vectors = {id: torch.arange(5) + id for id in ids}
    starts = dict.fromkeys(ids, "0")
    node.rounds[RUN] = KeptRound(1, SUM, len(ids), vectors, starts, once=True)
    return node


def masked_of(node: SecureRounds, ids: Sequence[int]) -> set[int]:
    """The clients whose masked vectors leave a node; it is not asked for more."""
    header = {"kind": "phase", "run": RUN, "round": 1, "clients": [*ids]}
    server = SecureServer(SUM, ids, 5)

    def ask(phase: str, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        parts = tuple(messages[id] for id in ids) if messages else ()
        answer, found = node.answer(Message({**header, "phase": phase}, parts))
        return dict(zip(answer["clients"], found, strict=True))

    lists = server.pass_on_keys(ask("keys", {}))
    return set(ask("masked", server.pass_on_shares(ask("shares", lists))))


def test_a_private_vector_leaves_once_though_its_sum_was_never_unmasked_here(tmp_path, caplog):
    """Others hold its shares. A node that was started again in between knows, and a client that was
    in no sum of the round is in the next one."""
    assert masked_of(private_rounds(tmp_path, [0, 1, 2]), [0, 1, 2]) == {0, 1, 2}
    again = private_rounds(tmp_path, [1, 2, 3, 4])
    assert masked_of(again, [1, 2, 3, 4]) == {3, 4}
    assert caplog.text.count("with other noise; a private round is unmasked once") == 2


def test_the_package_says_which_sums_its_methods_have_and_others_may_have_any(tmp_path):
    cli = command_line("fedavg", tmp_path, *IMAGES)
    method = cli.trainer.prepare(cli.model, cli.datamodule, seed=0).method
    assert lengths_known(method) == {"weights": method.layout.size}

    class Other(FedAvg):
        def addends(self, upload, client_id, weight):
            return {"own": super().addends(upload, client_id, weight)["weights"]}

    method.__class__ = Other
    assert lengths_known(method) == {}


class Renames(InProcess):
    """All clients say from round 2 on that their vectors hold another sum than the method's, by
    round."""

    def __init__(self, folder: Path, *names: str) -> None:
        super().__init__(nodes_in(folder))
        self.names = names

    def exchange(self, messages, timeout):
        for key, data in super().exchange(messages, timeout):
            answer, order = Message.from_bytes(data), Message.from_bytes(messages[key])
            if answer.kind == "kept" and order.header["round"] > 1:
                renamed = self.names[order.header["round"] - 2]
                for part in (part for one in answer.header["results"] for part in one["form"]):
                    part[0] = "evil" if part[0] == renamed else part[0]
                data = answer.to_bytes()
            yield key, data


@pytest.mark.slow
@pytest.mark.essential
def test_sums_that_the_method_does_not_have_void_the_round(tmp_path, caplog):
    """Clients know all that they mask, so the vectors add up; the state is that of before."""
    transport = Renames(tmp_path, "weights", "change")
    cli = deployed("scaffold", tmp_path, transport, *IMAGES)
    assert [row["secure/void"] for row in table(cli, "metrics")] == ["0", "1", "1"]
    assert "clients named sums that SCAFFOLD cannot take (KeyError: 'change')" in caplog.text
    assert {row["status"] for row in table(cli, "ledger")[4:]} <= {"lost", "rejected"}
    (tmp_path / "one").mkdir()
    one = deployed(
        "scaffold",
        tmp_path / "one",
        InProcess(nodes_in(tmp_path / "one")),
        *IMAGES,
        "--trainer.max_rounds=1",
    )
    assert weights(cli) == weights(one)


def test_the_form_is_the_one_that_most_clients_have():
    longer, huge = SumForm((("weights", 5, 10),)), SumForm((("weights", 2**40, 10),))
    assert common_form({0: longer, 1: FORM, 2: FORM}, 100) == FORM
    assert common_form({0: huge, 1: huge, 2: FORM}, 100) == FORM
    assert common_form({0: SumForm(), 1: longer, 2: FORM}, 100) == longer
    assert common_form({0: SumForm()}, 100) == SumForm()
    # a sum of the method is missing, or has another length; there may be more of them
    other, more = SumForm((("evil", 4, 10),)), SumForm((("change", 3, 1), ("weights", 4, 10)))
    for wrong in (other, longer):
        assert common_form({0: wrong, 1: wrong, 2: more}, 100, {"weights": 4}) == more
        assert common_form({0: wrong}, 100, {"weights": 4}) == SumForm()
    for wrong in ([["weights", -1, 10]], [["weights", 4]], [["weights", 4, 0]], None):
        with pytest.raises((ValueError, TypeError)):
            SumForm.from_json(wrong)
