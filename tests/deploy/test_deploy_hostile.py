"""Nodes that answer nonsense, and nodes that were started again: no answer ends the server's run,
and nothing counts that a checked process has not done.

The second of two nodes is honest but for one entry of one kind of answer. Each case has a round of
one run, and the clients of the first node must train on.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from outcomes import rows_of
from own_leaves import SIZES, config, leaf, leaf_file, own_nodes
from safetensors.torch import save
from test_deploy import (
    ALL,
    InProcess,
    command_line,
    deployed,
    metadata_of,
    nodes_in,
    simulated,
    weights,
)

from fl_lightning.__main__ import main
from fl_lightning.deploy import flower
from fl_lightning.deploy.flower import simulated as simulated_nodes
from fl_lightning.deploy.node import folders
from fl_lightning.deploy.node.build import builder
from fl_lightning.deploy.node.node import Node, NodeSettings
from fl_lightning.deploy.protocol import messages
from fl_lightning.deploy.protocol.gate import config_for_nodes
from fl_lightning.deploy.protocol.identity import describe, facts, mismatches
from fl_lightning.deploy.protocol.mail import Mail
from fl_lightning.deploy.protocol.messages import (
    HEAD,
    MAGIC,
    Message,
    MessageError,
    longest_header,
    printable,
)
from fl_lightning.deploy.server.census import Census
from fl_lightning.deploy.server.engine import RemoteEngine
from fl_lightning.deploy.server.roster import Roster, RoundRules
from fl_lightning.errors import InputError
from fl_lightning.evaluation import MAX_PARTS
from fl_lightning.federation import Federation

pytestmark = [pytest.mark.slow, pytest.mark.essential]

RULES = RoundRules(wait_seconds=5, round_seconds=60)
SMALL = [
    *ALL[:5],
    "--trainer.max_rounds=2",
    "--trainer.max_local_steps=1",
    "--trainer.eval_every=2",
]
Change = Callable[[Message], bytes]
HUGE = 10**400  # no float is as large


class Hostile(InProcess):
    """The second node's answers to one kind of message are changed, from round 2 on, by another
    case in each round."""

    def __init__(self, nodes: Mapping[str, Node], kind: str, changes: Sequence[Change]) -> None:
        super().__init__(nodes)
        self.kind, self.changes = kind, changes

    def exchange(self, messages, timeout):
        for key, answer in super().exchange(messages, timeout):
            order = Message.from_bytes(messages[key])
            case = order.header.get("round", 2) - 2
            hostile = key == "node1" and order.kind == self.kind and case >= 0
            yield key, self.changes[case](Message.from_bytes(answer)) if hostile else answer


def rounds(cases: Sized) -> list[str]:
    """Settings of a run of an honest round and one for each case."""
    return [*SMALL, f"--trainer.max_rounds={1 + len(cases)}"]


def assert_one_line(caplog, least: int, *, says: str = "") -> None:
    """Warnings name the node, and no text of it acts on a terminal or is long."""
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(line.isprintable() and len(line) < 1500 for line in lines)
    assert sum(line.startswith("node n1") and says in line for line in lines) >= least


def table(cli, name: str) -> list[dict[str, str]]:
    return rows_of(cli.trainer.run_dir / f"{name}.csv")


def having(**entries: object) -> Change:
    return lambda answer: Message({**answer.header, **entries}, answer.parts).to_bytes()


def lacking(name: str) -> Change:
    return lambda answer: Message(
        {key: value for key, value in answer.header.items() if key != name}, answer.parts
    ).to_bytes()


def result(**entries: object) -> Change:
    """Change the first result of an answer."""

    def change(answer: Message) -> bytes:
        first, *others = answer.header["results"]
        results = [{**first, **entries}, *others]
        return Message({**answer.header, "results": results}, answer.parts).to_bytes()

    return change


def identity(**entries: object) -> Change:
    return lambda answer: having(identity={**answer.header["identity"], **entries})(answer)


def raw(header: bytes) -> Change:
    return lambda answer: HEAD.pack(MAGIC, len(header)) + header


def ledger(cli) -> dict[int, list[str]]:
    """What became of the clients in each round; 0 and 2 are on the honest node."""
    assert metadata_of(cli)["status"] == "finished"
    found: dict[int, list[str]] = {}
    for row in table(cli, "ledger"):
        found.setdefault(int(row["round"]), []).append(row["status"])
    return found


NODE_DROPPED = ["trained", "dropped", "trained", "dropped"]
CLIENT_DROPPED = ["trained", "dropped", "trained", "trained"]
NOBODY_DROPPED = ["trained"] * 4
ANSWERS = {
    "garbage": (lambda answer: bytes(100), NODE_DROPPED),
    "4 GiB of header": (lambda answer: HEAD.pack(MAGIC, 2**32 - 1) + b"{}", NODE_DROPPED),
    "deeply nested": (
        raw(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b',"parts":[]}'),
        NODE_DROPPED,
    ),
    "sizes that are floats": (raw(b'{"kind":"trained","results":[],"parts":[0.0]}'), NODE_DROPPED),
    "no results": (lacking("results"), NODE_DROPPED),
    "results is a number": (having(results=5), NODE_DROPPED),
    "results are text": (having(results=["x"]), NODE_DROPPED),
    "client is infinite": (result(client=math.inf), CLIENT_DROPPED),
    "client of another node": (result(client=0), CLIENT_DROPPED),
    "losses are a list": (result(losses=[1, 2]), CLIENT_DROPPED),
    "a weight is text": (result(losses={"loss": [1.0, "x"]}), CLIENT_DROPPED),
    "a weight of 0": (result(losses={"loss": [1.0, 0]}), CLIENT_DROPPED),
    "a weight is no number": (result(losses={"loss": [math.nan, math.nan]}), CLIENT_DROPPED),
    "a long name": (result(losses={"x" * 100_000: [1, 1]}), CLIENT_DROPPED),
    "a name that is a path": (result(losses={"evil/../name\n": [1, 1]}), CLIENT_DROPPED),
    "many names": (
        result(losses={f"loss{number}": [1, 1] for number in range(1000)}),
        CLIENT_DROPPED,
    ),
    "steps are infinite": (result(steps=math.inf), CLIENT_DROPPED),
    "steps are many": (result(steps=10**30), CLIENT_DROPPED),
    "upload -1": (result(upload=-1), CLIENT_DROPPED),
    "a reason": (result(reason="\x1b[2J\nnode n0: all is well"), CLIENT_DROPPED),
    "a loss that is no number": (result(losses={"loss": [math.nan, 4]}), NOBODY_DROPPED),
    "a loss that is no float": (result(losses={"loss": [HUGE, 4]}), NOBODY_DROPPED),
    "seconds that are no float": (having(seconds=HUGE), NOBODY_DROPPED),
    "a name that is none": (having(node={"a": 1}), NOBODY_DROPPED),
    "a client of FedAvg that keeps something": (result(keeps=True), NOBODY_DROPPED),
}


@pytest.mark.slow
@pytest.mark.essential
def test_an_answer_that_cannot_be_read_costs_its_clients_the_round(tmp_path, caplog):
    transport = Hostile(nodes_in(tmp_path), "train", [change for change, _ in ANSWERS.values()])
    cli = deployed("fedavg", tmp_path, transport, *rounds(ANSWERS), rules=RULES)
    expected = {case: statuses for case, (_, statuses) in ANSWERS.items()}
    found = ledger(cli)
    assert found.pop(1) == NOBODY_DROPPED
    assert dict(zip(ANSWERS, found.values(), strict=True)) == expected
    assert all(math.isfinite(float(row["train/loss"])) for row in table(cli, "metrics"))
    found_losses = {name for name in table(cli, "metrics")[-1] if name.startswith("train/")}
    assert found_losses == {"train/loss", "train/loss_task"}
    assert_one_line(caplog, sum(statuses != NOBODY_DROPPED for statuses in expected.values()))
    assert metadata_of(cli)["deployment"]["clients_keep"] is False, "or fit would not continue it"


@pytest.mark.parametrize(
    ("config", "since", "others", "counts"),
    [
        ("scaffold", 1, [], True),
        ("scaffold", 0, [], False),
        ("fedavg", 1, [], False),
        ("fedavg", 1, ["node1"], False),
        ("fedavg", 1, ["node0"], True),  # somebody's own method that does not declare it
    ],
)
def test_no_state_is_lost_that_no_client_can_have_kept(config, since, others, counts, tmp_path):
    """It would stop a run in which this node's clients are the only ones."""
    cli = command_line(config, tmp_path, *SMALL)
    fed = cli.trainer.prepare(cli.model, cli.datamodule, seed=0)
    engine = RemoteEngine(InProcess({}), fed, {}, since={1: since})
    engine.keepers |= {*others}
    engine.roster.node_of = {1: "node1"}
    claim = {"client": 1, "reason": "gone", "lost": True}
    answer = Message({"kind": "trained", "results": [claim]})
    assert [*engine._results("node1", answer, {1: None})] == []
    assert engine.refused == ({1} if counts else set())


def test_nodes_add_no_names_of_losses_for_ever(tmp_path, caplog):
    """The result counts, as do the losses that everybody has."""

    def names(round: int) -> dict[str, list[float]]:
        own = {f"own{round}_{number}": [1.0, 1] for number in range(63)}
        return {"loss": [1.0, 1], **own}

    cases = [result(losses=names(round)) for round in range(5)]
    transport = Hostile(nodes_in(tmp_path), "train", cases)
    cli = deployed("fedavg", tmp_path, transport, *rounds(cases), rules=RULES)
    assert all(statuses == NOBODY_DROPPED for statuses in ledger(cli).values())
    columns = table(cli, "metrics")[-1].keys()
    assert len([name for name in columns if name.startswith("train/own")]) == 4 * 63
    said = "node n1: client 1: 63 losses are not counted: a run has 256 names of them at most"
    assert caplog.messages.count(said) == 1


def test_a_node_has_as_many_results_as_orders_and_one_line_of_what_cannot_be_read(tmp_path, caplog):
    cases = [having(results=["x"] * 1000), having(results=["x", "y"])]
    transport = Hostile(nodes_in(tmp_path), "train", cases)
    cli = deployed("fedavg", tmp_path, transport, *rounds(cases), rules=RULES)
    assert [*ledger(cli).values()] == [NOBODY_DROPPED, NODE_DROPPED, NODE_DROPPED]
    said = [line for line in caplog.messages if line.startswith("node n1: ")]
    assert said == [
        "node n1: its answer cannot be read (results: 1000 entries, and not at most 2): its clients "
        "count as dropped",
        "node n1: a result cannot be read (a result: x, and not a dict), nor 1 more",
    ]


def test_a_node_that_refuses_an_order_was_sent_it(tmp_path, caplog):
    """In round 2 it refuses, and is let go at once; the ledger has what it was sent."""
    transport = Hostile(nodes_in(tmp_path), "train", [having(kind="refused", reason="no")])
    cli = deployed("fedavg", tmp_path, transport, *SMALL, rules=RULES)
    assert ledger(cli)[2] == NODE_DROPPED
    sent = [int(row["download"]) for row in table(cli, "ledger")]
    assert sent == sent[:1] * 8
    assert "node n1 (node1) is checked again before the next round" in caplog.text
    assert "has left" not in caplog.text


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Federation, bytes, dict[str, Node]]:
    """A server's federation, the configuration for nodes, and two nodes that have built it."""
    folder = tmp_path_factory.mktemp("checked")
    cli = command_line("fedavg", folder, *SMALL)
    fed = cli.trainer.prepare(cli.model, cli.datamodule, seed=cli.config["seed_everything"])
    sent = config_for_nodes(yaml.safe_load(cli.config_text))
    return fed, yaml.safe_dump(sent).encode(), nodes_in(folder)


CHECKS = {
    "no clients": (lacking("clients"), "clients: None"),
    "clients are infinite": (having(clients=[math.inf]), "clients: inf"),
    "clients are text": (having(clients=["x"]), "clients: x"),
    "a client twice": (having(clients=[1, 1, 3]), "a client is there twice"),
    "no identity": (lacking("identity"), "identity: None"),
    "identity is a list": (having(identity=[1]), "identity: "),
    "examples are a list": (identity(examples=[1]), "examples: "),
    "layout is a number": (identity(layout=5), "layout: 5"),
    "a method with escapes": (identity(method="\x1b[2J\n" * 10**4), r"method: \x1b[2J \x1b[2J"),
    "no uid": (lacking("uid"), "uid: None"),
    "uid is a list": (having(uid=["a"]), "uid: "),
    "no epoch": (having(epoch=""), "epoch: "),
    "no message": (lambda answer: b"x", "its answer cannot be read: "),
    "4 GiB of header": (
        lambda answer: HEAD.pack(MAGIC, 2**32 - 1) + b"{}",
        "(its header has 4294967295 bytes, above ",
    ),
    "a long reason": (
        having(kind="refused", reason="\x1b]0;\u202e" * 10**4),
        r"\x1b]0;\u202e\x1b]0;",
    ),
}


@pytest.mark.parametrize("case", CHECKS)
def test_a_check_that_cannot_be_read_is_refused_by_name(case, built):
    change, reason = CHECKS[case]
    fed, sent, nodes = built
    roster = Roster(fed, sent, RULES, Mail(Hostile(nodes, "check", [change])))
    roster.gather(first=True)
    ((name, said),) = roster.refused.values()
    assert name == ("n1" if case not in ("no message", "4 GiB of header") else "node1")
    assert reason in said
    assert said.isprintable()
    assert len(said) < 1500
    assert roster.clients() == {"n0 (node0)": [0, 2]}


class Registered(InProcess):
    """Nodes under keys of which some are known to have been registered at a time."""

    def __init__(self, nodes: Mapping[str, Node], since: Mapping[str, float]) -> None:
        super().__init__(nodes)
        self.since = since

    def registered(self):
        return self.since


@pytest.mark.parametrize("leaves_first", [False, True])
def test_a_node_with_a_key_of_before_cannot_take_the_place_of_another(
    leaves_first, built, tmp_path
):
    """It has learned the other's uid and has the same clients; its own key is registered, as the
    other's."""
    fed, sent, _ = built
    now = time.time()
    nodes = nodes_in(tmp_path)
    (tmp_path / "thief").mkdir()
    (tmp_path / "thief/uid").write_text(nodes["node1"].uid())
    thief = Node(NodeSettings(tmp_path / "thief", 1, 2, name="thief"), builder())
    transport = Registered(nodes, dict.fromkeys(("node0", "node1", "key2"), now - 60))
    roster = Roster(fed, sent, RULES, Mail(transport))
    roster.gather(first=True)
    if leaves_first:
        del transport.by_key["node1"]
        roster.gather()
    transport.by_key["key2"] = thief
    roster.gather()
    assert "it says that it is node node1, under another key" in roster.refused["key2"][1]
    assert roster.clients().get("n1 (node1)") == (None if leaves_first else [1, 3])
    transport.by_key["node1"] = nodes["node1"]
    roster.gather()
    assert roster.clients() == {"n0 (node0)": [0, 2], "n1 (node1)": [1, 3]}
    # without a key it registers itself when it comes back, under another one
    del transport.by_key["node1"], transport.by_key["key2"]
    transport.by_key["key3"] = nodes["node1"]
    transport.since = {**transport.since, "key3": time.time()}
    roster.gather()
    assert roster.clients() == {"n0 (node0)": [0, 2], "n1 (key3)": [1, 3]}


def test_a_node_gets_the_place_of_another_when_that_has_gone(built, tmp_path, caplog):
    """Its machine was lost, and it has a folder of its own; the connection of before is there for
    a while."""
    fed, sent, _ = built
    nodes = nodes_in(tmp_path)
    transport = InProcess(nodes)
    roster = Roster(fed, sent, RULES, Mail(transport))
    roster.gather(first=True)
    transport.by_key["anew"] = Node(NodeSettings(tmp_path / "anew", 1, 2, name="new"), builder())
    roster.gather()
    assert roster.refused["anew"] == ("new", "client 1 is on node n1 (node1) already")
    roster.gather()
    assert roster.clients() == {"n0 (node0)": [0, 2], "n1 (node1)": [1, 3]}
    del transport.by_key["node1"]
    roster.gather()
    assert roster.clients() == {"n0 (node0)": [0, 2], "new (anew)": [1, 3]}
    assert not roster.refused
    assert "have no node" not in caplog.text
    del transport.by_key["anew"]
    roster.gather()
    roster.gather()
    assert caplog.text.count("2 clients have no node and count as dropped until one is here") == 1


def test_when_nodes_were_registered_is_read_from_flower(monkeypatch):
    monkeypatch.setattr(flower, "_wait_briefly_for_parts", lambda: None)

    class Grid:
        def get_nodes(self):
            times = ("2026-01-02T03:04:05.500000+00:00", "")
            return [
                SimpleNamespace(node_id=id, registered_at=time) for id, time in enumerate(times)
            ]

    assert flower.GridTransport(Grid()).registered() == {"0": 1767323045.5}
    assert flower.GridTransport(SimpleNamespace()).registered() == {}


def test_a_header_that_is_too_long_is_not_read(monkeypatch):
    monkeypatch.setattr(messages.json, "loads", lambda text: pytest.fail("it was read"))
    longest = longest_header(0)
    data = HEAD.pack(MAGIC, longest + 1) + b"[" * (longest + 1)
    with pytest.raises(MessageError, match=f"its header has {longest + 1} bytes, above {longest}"):
        Message.from_bytes(data, longest)
    nodes = InProcess({"n": SimpleNamespace(answer=lambda message: data)})
    assert [*Mail(nodes).exchange({"n": b""}, 1)] == []


def test_the_results_of_many_clients_are_not_too_long():
    """As long as they get: 5 000 clients with three losses each, 500 with the forms of a hundred
    sums."""
    losses = {f"loss_{name}": [-123.45678901234567, 65536.0] for name in ("ce", "kd", "proximal")}
    entry = {"client": 10**6, "keeps": False, "steps": 10**4, "losses": losses, "upload": 10**4}
    data = Message({"results": [entry] * 5000}, (b"x" * 10**3,) * 5000).to_bytes()
    assert len(Message.from_bytes(data, longest_header(5000)).parts) == 5000
    form = [[f"layer.{sum}", 10**6, 10**6] for sum in range(100)]
    data = Message({"results": [{"client": 10**6, "keeps": False, "form": form}] * 500}).to_bytes()
    assert len(Message.from_bytes(data, longest_header(500, forms=True)).header["results"]) == 500


SECURE = "--trainer.secure_sum.threshold=0.67"
FORMS = [
    5,
    [[1]],
    [["x", -5, 0]],
    [["w", 10**12, 0]],
    [["w", math.inf, 0]],
    [["w", 1, HUGE]],
    [["weights", 1, 8], ["weights", 2, 8]],
    {"a": 1},
    None,
]
PHASES = [5, None, [[1], [2]], ["1", "3"], [1, 1]]


def test_a_form_that_is_none_drops_its_client(tmp_path, caplog):
    pytest.importorskip("cryptography")
    transport = Hostile(nodes_in(tmp_path), "train", [result(form=form) for form in FORMS])
    cli = deployed("fedavg", tmp_path, transport, *rounds(FORMS), SECURE, rules=RULES)
    assert ledger(cli) == {
        1: NOBODY_DROPPED,
        **{2 + case: CLIENT_DROPPED for case in range(len(FORMS))},
    }
    assert_one_line(caplog, len(FORMS), says="a result cannot be read")


def test_an_answer_to_a_phase_that_cannot_be_read_leaves_the_sum(tmp_path, caplog):
    pytest.importorskip("cryptography")
    transport = Hostile(
        nodes_in(tmp_path), "phase", [having(clients=clients) for clients in PHASES]
    )
    cli = deployed("fedavg", tmp_path, transport, *rounds(PHASES), SECURE, rules=RULES)
    assert ledger(cli)[1] == NOBODY_DROPPED
    assert_one_line(
        caplog, len(PHASES), says="leaves the secure sum: its answer cannot be read: clients: "
    )


def other_sums(**named: torch.Tensor) -> Change:
    """Send sums of these metrics for client 1 in the place of what was measured."""

    def change(answer: Message) -> bytes:
        sums = save({f"{MAX_PARTS}/{name}": value.double() for name, value in named.items()})
        return Message(answer.header, (sums, save({}))).to_bytes()

    return change


EVALUATIONS = {
    "left_out is text": having(left_out=["x"]),
    "left_out is a number": having(left_out=5),
    "left_out is infinite": having(left_out=[math.inf]),
    "no parts": lambda answer: Message(answer.header).to_bytes(),
    "parts that are nonsense": lambda answer: Message(answer.header, (b"x", b"y")).to_bytes(),
    "a metric that nobody has": other_sums(
        loss=torch.ones(2), accuracy=torch.ones(2), evil=torch.ones(2)
    ),
    "a metric is missing": other_sums(accuracy=torch.ones(2)),
    "a share above 1": other_sums(loss=torch.ones(2), accuracy=torch.tensor([1e6, 2.0])),
    "a share that is no number": other_sums(
        loss=torch.ones(2), accuracy=torch.tensor([math.nan, 2.0])
    ),
    "a negative weight": other_sums(loss=-torch.ones(2), accuracy=torch.ones(2)),
    "an infinite weight": other_sums(loss=torch.tensor([1, math.inf]), accuracy=torch.ones(2)),
    "a name with escapes": other_sums(**{"\x1b[2J": torch.ones(2)}),
}


def test_an_evaluation_that_cannot_be_read_is_left_out(tmp_path, caplog):
    transport = Hostile(nodes_in(tmp_path), "evaluate", list(EVALUATIONS.values()))
    more = [*rounds(EVALUATIONS), "--trainer.eval_every=1"]
    cli = deployed("local_only", tmp_path, transport, *more, rules=RULES)
    assert metadata_of(cli)["status"] == "finished"
    assert_one_line(caplog, len(EVALUATIONS), says="did not evaluate its clients: ")
    assert caplog.text.count("clients 1, 3 are left out of val/* and test/*") == len(EVALUATIONS)
    assert not any("evil" in name for name in table(cli, "metrics")[-1])
    assert all(math.isfinite(float(row["test/accuracy"])) for row in table(cli, "metrics"))


CENSUSES = {
    "clients are a list": having(clients=[1]),
    "no clients": having(clients=None),
    "a negative id": having(clients={"-1": [5, 0]}),
    "a negative count": having(clients={"1": [-5, 9]}),
    "a huge id": having(clients={str(10**9): [5, 0]}),
    "a huge count": having(clients={"1": [10**12, 0]}),
    "more examples than memory": having(clients={"1": [2**31 - 1, 0]}),
    "a count with a fraction": having(clients={"1": [1.5, 0]}),
    "an infinite count": having(clients={"1": [math.inf, 0]}),
    "an id that is text": having(clients={"x": [1, 1]}),
    "three counts": having(clients={"1": [1, 1, 1]}),
    "facts are a list": having(facts=[1]),
}


@pytest.fixture(scope="module")
def census(tmp_path_factory) -> tuple[dict, Message]:
    """What the server's data are, and the honest answer of a node."""
    folder = tmp_path_factory.mktemp("census")
    path = leaf_file(folder / "own.json", {"a": SIZES["a"]})
    answers: list[bytes] = []

    class Listening(InProcess):
        def exchange(self, messages, timeout):
            for key, answer in super().exchange(messages, timeout):
                answers.append(answer)
                yield key, answer

    cli = config(folder, "server", leaf(path, path))
    asking = Census(
        Listening(own_nodes(folder, {1: path}, 2)),
        config_for_nodes(yaml.safe_load(cli.config_text)),
        RULES,
    )
    cli.trainer.deal = asking.deal
    fed = cli.trainer.prepare(cli.model, cli.datamodule, seed=0)
    return facts(fed.data), Message.from_bytes(answers[0])


@pytest.mark.parametrize("case", CENSUSES)
def test_a_census_that_cannot_be_read_is_refused_by_name(case, census):
    known, honest = census
    asking = Census(InProcess({}), {}, RULES)
    asking._take("node1", honest, known)
    assert asking.counts == {1: (7, 2)}
    asking = Census(InProcess({}), {}, RULES)
    with pytest.raises(InputError, match=r"^node n1 \(node1\); .*(cannot be read|examples, above)"):
        asking._take("node1", Message.from_bytes(CENSUSES[case](honest)), known)
    assert not asking.counts


def test_a_census_that_is_no_message_is_refused_by_name(census, monkeypatch):
    monkeypatch.setattr("fl_lightning.deploy.server.census.facts", lambda data: census[0])
    node = SimpleNamespace(answer=lambda order: b"x")
    asking = Census(InProcess({"key": node}), {}, RULES)
    with pytest.raises(InputError, match=r"^node key \(key\); its answer cannot be read: "):
        asking.deal(SimpleNamespace(), 0, torch.device("cpu"))


def test_text_of_a_node_is_one_line_that_no_terminal_acts_on():
    assert printable("node n0:\n all \x1b[2J fine") == r"node n0: all \x1b[2J fine"
    assert printable("caf\u00e9 \u202e\ud800") == "caf\u00e9 \\u202e\\ud800"
    assert printable({"a": 1}) == "{'a': 1}"
    assert printable("x" * 10**6) == "x" * 97 + "..."
    assert len(printable("\x1b" * 10**6)) == 100
    assert printable("x" * 100) == "x" * 100


def test_what_is_no_message_of_ours_is_read_as_no_bytes():
    pytest.importorskip("flwr")
    assert flower.unpacked({"other": {}}) == b""
    assert flower.unpacked({"fl_lightning.0": {"message": 5}}) == b""


class Scripted(InProcess):
    """Does something after some rounds; a node that is away is not connected."""

    def __init__(
        self, nodes: Mapping[str, Node], after: Mapping[int, Callable[[Scripted], None]]
    ) -> None:
        super().__init__(nodes)
        self.after, self.away, self.orders = after, set[str](), list[tuple[str, str]]()

    def nodes(self):
        return [key for key in super().nodes() if key not in self.away]

    def exchange(self, messages, timeout):
        orders = {key: Message.from_bytes(message) for key, message in messages.items()}
        self.orders += [(key, order.kind) for key, order in orders.items()]
        yield from super().exchange(messages, timeout)
        for round in {
            order.header.get("round") for order in orders.values() if order.kind == "train"
        }:
            self.after.get(round, lambda transport: None)(self)


def second_node(folder: Path, overlay: Mapping | None = None) -> Node:
    files = []
    if overlay is not None:
        files.append(folder / "overlay.yaml")
        files[0].write_text(yaml.safe_dump(overlay))
    return Node(NodeSettings(folder / "node1", 1, 2, name="n1"), builder(files))


FEWER = {"data": {"init_args": {"synthetic_examples": 200}}}


def test_a_node_that_comes_back_with_other_data_does_not_count(tmp_path, caplog):
    """It was restarted between two looks, under the same key."""
    transport = Scripted(
        nodes_in(tmp_path), {1: lambda it: it.by_key.update(node1=second_node(tmp_path, FEWER))}
    )
    cli = deployed("fedavg", tmp_path, transport, *SMALL, rules=RULES)
    assert ledger(cli)[2] == NODE_DROPPED
    assert re.search(r"node n1 did not train: .*synthetic_examples: 240 -> 200", caplog.text)


def test_a_node_that_comes_back_as_it_was_is_checked_and_counts(tmp_path):
    transport = Scripted(
        nodes_in(tmp_path), {1: lambda it: it.by_key.update(node1=second_node(tmp_path))}
    )
    cli = deployed("fedavg", tmp_path, transport, *SMALL, rules=RULES)
    assert ledger(cli)[2] == NOBODY_DROPPED
    assert transport.orders.count(("node1", "check")) == 2
    assert weights(cli) == simulated("fedavg", tmp_path, *SMALL)


def test_a_node_that_is_started_again_is_checked_though_nobody_waits_for_it(tmp_path):
    """Four clients are asked where two are wanted. In round 2 the others are enough; in round 3 the
    node's new process is the first to answer, and counts."""

    class Backwards(Scripted):
        def exchange(self, messages, timeout):
            if Message.from_bytes(next(iter(messages.values()))).header.get("round") == 2:
                self.by_key.setdefault("again", second_node(tmp_path))
                self.by_key["node1"] = self.by_key["again"]
            yield from super().exchange(dict(reversed(messages.items())), timeout)

        def nodes(self):
            return ["node0", "node1"]

    first = "--trainer.rounds={class_path: OverSelection, init_args: {factor: 2.0}}"
    more = "--trainer.max_rounds=3", "--trainer.participation=0.5", first
    transport = Backwards(nodes_in(tmp_path), {})
    cli = deployed("fedavg", tmp_path, transport, *SMALL, *more, rules=RULES)
    odd, even = ["lost", "trained"] * 2, ["trained", "lost"] * 2
    assert [*ledger(cli).values()] == [odd, even, odd]
    assert transport.orders.count(("node1", "check")) == 2


def test_a_node_fits_what_nodes_build_and_not_what_the_rounds_have_made_of_it(tmp_path, caplog):
    """The base that residual adapters move is in the server's network since it was evaluated."""
    words = [
        "--trainer.max_rounds=3",
        "--trainer.participation=1.0",
        "--trainer.max_local_steps=2",
        "--trainer.eval_every=1",
        "--model.adapter_average=residual",
        "--data.num_clients=4",
        "--data.partition=Natural",
        "--data.examples_per_client=12",
        "--data.tests_per_task=1",
        "--data.generate=false",
    ]
    transport = Scripted(
        nodes_in(tmp_path), {2: lambda it: it.by_key.update(node1=second_node(tmp_path))}
    )
    cli = deployed("lora_default", tmp_path, transport, *words, rules=RULES)
    assert all(statuses == NOBODY_DROPPED for statuses in ledger(cli).values())
    assert transport.orders.count(("node1", "check")) == 2
    assert weights(cli) == simulated("lora_default", tmp_path, *words)
    assert "has left" not in caplog.text
    resumed = deployed(
        "lora_default",
        tmp_path,
        InProcess(nodes_in(tmp_path)),
        *words[1:],
        "--trainer.max_rounds=4",
        f"--ckpt_path={cli.trainer.run_dir}",
        "--trainer.allow_changed=true",
        rules=RULES,
    )
    assert ledger(resumed)[4] == NOBODY_DROPPED


def test_what_a_server_has_got_since_the_start_is_not_asked_of_nodes(built):
    fed, _, _ = built
    server = describe(fed, [])
    later = {**server, "layout": {**server["layout"], "server.momentum": [3]}}
    assert mismatches(later, server) == []
    other = {**server, "layout": {**server["layout"], "server.weights": [3]}}
    assert len(mismatches(other, server)) == 1


@pytest.mark.parametrize(("until", "left"), [(2.0, 0.5), (math.inf, RULES.wait_seconds)])
def test_a_node_that_was_started_again_is_checked_before_a_deadline(
    until, left, built, monkeypatch, tmp_path
):
    fed, sent, nodes = built
    clock, waits = [100.0], []

    class Slow(InProcess):
        def exchange(self, messages, timeout):
            waits.append(timeout)
            for answer in super().exchange(messages, timeout):
                clock[0] += 1.5
                yield answer

    transport = Slow(dict(nodes))
    fake = SimpleNamespace(monotonic=lambda: clock[0], time=time.time, sleep=time.sleep)
    monkeypatch.setattr("fl_lightning.deploy.server.roster.time", fake)
    roster = Roster(fed, sent, RULES, Mail(transport))
    roster.gather(first=True)
    transport.by_key["node1"] = second_node(tmp_path)
    order = Message({"kind": "echo"}).to_bytes()
    answers = roster.exchange({"node1": order}, 2.0, until=until)
    assert [node for node, _ in answers] == ["node1"]
    assert waits[1:] == [2.0, left]


def test_a_node_that_was_refused_and_left_is_checked_again(tmp_path):
    def away(it: Scripted) -> None:
        it.away = {"node1"}

    def back(overlay: Mapping | None) -> Callable[[Scripted], None]:
        def change(it: Scripted) -> None:
            it.away = set()
            it.by_key["node1"] = second_node(tmp_path, overlay)

        return change

    after = {1: away, 2: back(FEWER), 3: away, 4: back(None)}
    transport = Scripted(nodes_in(tmp_path), after)
    cli = deployed("fedavg", tmp_path, transport, *SMALL, "--trainer.max_rounds=5", rules=RULES)
    assert [found[1] for found in ledger(cli).values()] == ["trained", *["dropped"] * 3, "trained"]


@pytest.mark.parametrize(
    "damage", [lambda text: text[:300], lambda text: text.replace(b"lr: 0.0", b"lr: 0.9")]
)
def test_a_configuration_that_was_changed_on_the_disk_is_not_trained_with(damage, tmp_path):
    """Its node is restarted, says that it has not checked it, and is sent it again."""

    def change(it: Scripted) -> None:
        (path,) = (tmp_path / "node1" / "configs").iterdir()
        before = path.read_bytes()
        path.write_bytes(damage(before))
        assert path.read_bytes() != before
        it.by_key["node1"] = second_node(tmp_path)

    cli = deployed(
        "fedavg",
        tmp_path,
        Scripted(nodes_in(tmp_path), {1: change}),
        *SMALL,
        "--trainer.max_rounds=3",
        rules=RULES,
    )
    assert ledger(cli)[2] == NODE_DROPPED
    assert ledger(cli)[3] == NOBODY_DROPPED


def test_a_second_node_with_the_folder_of_a_connected_one_is_refused_by_name(tmp_path):
    nodes = {
        f"node{number}": Node(
            NodeSettings(tmp_path / "node", number, 2, name=f"n{number}"), builder()
        )
        for number in range(2)
    }
    with pytest.raises(
        InputError, match=r"^node n1; it has the folder of node n0 \(node0\), which is conn"
    ):
        deployed("fedavg", tmp_path, InProcess(nodes), *SMALL, rules=RULES)


def test_a_damaged_uid_is_drawn_anew(tmp_path):
    nodes = nodes_in(tmp_path)
    for folder in ("node0", "node1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "uid").write_text("")
    assert nodes["node0"].uid() != nodes["node1"].uid()
    assert nodes["node0"].uid() == nodes_in(tmp_path)["node0"].uid()


def test_a_folder_has_one_node(tmp_path, capsys):
    with folders.locked(tmp_path):
        words = ["node", "--superlink", "none", "--folder", str(tmp_path)]
        assert main(words) == 2
    assert f"--folder {tmp_path}; another node has this folder" in " ".join(
        capsys.readouterr().err.split()
    )
    with folders.locked(tmp_path):
        pass


def test_workers_of_flowers_simulation_are_one_node(tmp_path, monkeypatch):
    """Any of them may answer for a node, so that it is not checked anew with each."""
    (tmp_path / "job.json").write_text(
        json.dumps({"directory": str(tmp_path), "nodes": str(tmp_path)})
    )
    monkeypatch.chdir(tmp_path)
    simulated_nodes._node.cache_clear()
    one = simulated_nodes._node(tmp_path, 0, 2)
    simulated_nodes._node.cache_clear()
    assert simulated_nodes._node(tmp_path, 0, 2).about == one.about
    simulated_nodes._node.cache_clear()
    assert nodes_in(tmp_path)["node0"].about != nodes_in(tmp_path)["node0"].about
