"""Client-level privacy over nodes: with the simulation's randomness the simulation's weights and
bytes, and without it noise and cohorts that no seed tells.

The reference of rounds in which a node dies is the simulation whose stressor has its clients leave.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from deploy_transports import InProcess
from outcomes import rows_of
from safetensors.torch import save
from scipy import stats
from test_deploy import ALL, COMMON, ROOT, command_line, deployed, nodes_in, simulated, weights
from test_deploy_flower import finish, metadata_in, ours
from test_deploy_flower import simulated as simulated_by_command
from test_deploy_secure import Leave, Mortal

from fl_lightning import rng
from fl_lightning.compatibility import Run, check_run
from fl_lightning.deploy.node.build import builder
from fl_lightning.deploy.node.node import Node, NodeSettings
from fl_lightning.deploy.protocol.gate import config_for_nodes
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.deploy.protocol.private import take_up
from fl_lightning.deploy.server.deployable import check_deployable
from fl_lightning.errors import InputError, RunStopped
from fl_lightning.methods import FedAdaLoRA, FedAvg
from fl_lightning.privacy import NoisySums, SystemGenerator, discrete_gaussian, rounded_gaussian
from fl_lightning.study.results.run_records import read_directory
from fl_lightning.study.results.runs import run_metrics

pytest.importorskip("dp_accounting")
pytest.importorskip("Crypto")

SMALL = [*ALL[1:5], "--model.weigh_by=clients", "--trainer.participation=0.75"]  # 3 of 4 clients
NOISE = "noise_multiplier: 0.5, clip_norm: 1.0, min_returned: 0.6"
CENTRAL = f"--trainer.privacy={{{NOISE}}}"
SHARES = f"--trainer.privacy={{{NOISE}, where: distributed}}"
QUANTILE = f"--trainer.privacy={{{NOISE}, where: distributed, target_quantile: 0.3}}"
SECURE = "--trainer.secure_sum={threshold: 0.6}"


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    (path,) = folder.glob(f"*/*/{name}.csv")
    return rows_of(path)


def column(folder: Path, name: str) -> list[str]:
    return [row[name] for row in rows(folder, "metrics")]


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    "more",
    [
        [CENTRAL],
        [CENTRAL.replace("}", ", target_quantile: 0.5}")],
        [CENTRAL, SECURE],
        [SHARES, SECURE],
        [QUANTILE, SECURE],
        [SHARES, SECURE, "--model=QFedAvg", "--model.weigh_by=clients"],
    ],
    ids=[
        "central",
        "central-quantile",
        "secure-central",
        "secure-shares",
        "secure-quantile",
        "secure-codes",
    ],
)
def test_with_the_randomness_of_a_simulation_weights_and_bytes_are_its_own(more, tmp_path):
    nodes = InProcess(nodes_in(tmp_path, 3, randomness=rng.stream))
    cli = deployed("fedavg", tmp_path, nodes, *SMALL, *more, randomness=rng.stream)
    assert weights(cli) == simulated("fedavg", tmp_path, *SMALL, *more)
    here, there = tmp_path / "deployed", tmp_path / "simulated"
    assert rows(here, "ledger") == rows(there, "ledger")
    for name in ("privacy/epsilon", "privacy/clip_norm"):
        assert column(here, name) == column(there, name)
    assert float(column(here, "privacy/epsilon")[2]) > float(column(here, "privacy/epsilon")[0]) > 0


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("more", [[CENTRAL], [SHARES, SECURE]], ids=["central", "secure-shares"])
def test_two_runs_of_one_seed_have_other_cohorts_and_noise_and_one_epsilon(more, tmp_path, caplog):
    """Of 8 clients 4 take part: three cohorts are twice the same by a chance of 3e-6."""
    more = [*SMALL, "--data.num_clients=8", "--trainer.participation=0.5", *more]
    found = []
    for name in ("one", "other"):
        cli = deployed("fedavg", tmp_path / name, InProcess(nodes_in(tmp_path / name)), *more)
        found.append((weights(cli), rows(tmp_path / name / "deployed", "ledger")))
    assert found[0][0] != found[1][0]
    cohorts = [[(row["round"], row["client"]) for row in ledger] for _, ledger in found]
    assert len(cohorts[0]) == len(cohorts[1]) == 12
    assert cohorts[0] != cohorts[1]
    assert "no seed tells them" in caplog.text
    simulated("fedavg", tmp_path, *more)
    expected = column(tmp_path / "simulated", "privacy/epsilon")
    assert [
        column(tmp_path / name / "deployed", "privacy/epsilon") for name in ("one", "other")
    ] == [expected] * 2


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("phase", ["masked", "unmask"])
def test_a_node_that_dies_takes_its_share_of_the_noise_along(phase, tmp_path):
    """Epsilon is that of all rounds. Before it is masked its message and share are missing; two
    others are the whole noise."""
    mortal = Mortal(tmp_path, [1], phase, randomness=rng.stream)
    more = [*SMALL, "--trainer.participation=1.0", SHARES, SECURE]
    cli = deployed("fedavg", tmp_path, mortal, *more, randomness=rng.stream)
    assert weights(cli) == simulated("fedavg", tmp_path, *more, drop=Leave(2, [1], phase))
    there = tmp_path / "simulated"
    assert column(tmp_path / "deployed", "privacy/epsilon") == column(there, "privacy/epsilon")


class KilledAfter(InProcess):
    """The server ends when all have answered a message of round 2."""

    kind = ("train", None)

    def exchange(self, messages, timeout):
        answers = list(super().exchange(messages, timeout))
        header = Message.from_bytes(next(iter(messages.values()))).header
        if (header.get("round"), header["kind"], header.get("phase")) == (2, *self.kind):
            raise KeyboardInterrupt
        yield from answers


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    "more", [[CENTRAL], [QUANTILE, SECURE]], ids=["central", "secure-quantile"]
)
def test_a_server_that_is_started_again_accounts_each_round_once(more, tmp_path):
    nodes = nodes_in(tmp_path, randomness=rng.stream)
    with pytest.raises(KeyboardInterrupt):
        deployed("fedavg", tmp_path, KilledAfter(nodes), *SMALL, *more, randomness=rng.stream)
    (run,) = (tmp_path / "deployed" / "fedavg").iterdir()
    again = [*SMALL, *more, f"--ckpt_path={run}"]
    cli = deployed("fedavg", tmp_path, InProcess(nodes), *again, randomness=rng.stream)
    assert weights(cli) == simulated("fedavg", tmp_path, *SMALL, *more)
    for name in ("privacy/epsilon", "privacy/clip_norm"):
        assert column(tmp_path / "deployed", name) == column(tmp_path / "simulated", name)


class KilledAfterUnmasking(KilledAfter):
    kind = ("phase", "unmask")


@pytest.mark.slow
@pytest.mark.essential
def test_a_private_round_is_unmasked_once(tmp_path, caplog):
    """Two sums of one round with other noise would be two looks at its clients; the round is then
    void."""
    more = [*SMALL, "--trainer.participation=1.0", SHARES, SECURE]
    nodes = nodes_in(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        deployed("fedavg", tmp_path, KilledAfterUnmasking(nodes), *more)
    (run,) = (tmp_path / "deployed" / "fedavg").iterdir()
    deployed("fedavg", tmp_path, InProcess(nodes_in(tmp_path)), *more, f"--ckpt_path={run}")
    assert "a private round is unmasked once" in caplog.text
    assert column(tmp_path / "deployed", "secure/void") == ["0", "1", "0"]
    assert len({*column(tmp_path / "deployed", "privacy/epsilon")}) == 3


def test_a_node_whose_owner_wants_noise_refuses_a_run_with_less(tmp_path):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(f"trainer: {{privacy: {{{NOISE}, where: distributed}}}}\n")
    node = Node(NodeSettings(tmp_path / "node0", name="n0"), builder([overlay]))
    weaker = [SECURE, SHARES.replace("multiplier: 0.5", "multiplier: 0.01")]
    for run in (weaker, [SECURE]):
        with pytest.raises(
            InputError, match=r"node n0; client-level privacy: .*_multiplier': 0.5, .* here"
        ):
            deployed("fedavg", tmp_path, InProcess({"node0": node}), *SMALL, *run)
    # a node does not count on its server's honesty: what it builds, and so does, is what its owner
    # wrote
    (fed, _) = node.built[1:]
    assert fed.aggregation.privacy.settings.noise_multiplier == 0.5
    assert fed.aggregation.privacy.settings.is_distributed
    assert fed.aggregation.privacy.randomness is not rng.stream


def checked_node(folder: Path, *more: str) -> tuple[Node, dict]:
    """A node that has checked a run, and what each message of the run's first round says."""
    node, cli = nodes_in(folder)["node0"], command_line("fedavg", folder, *SMALL, *more)
    sent = yaml.safe_dump(config_for_nodes(yaml.safe_load(cli.config_text))).encode()
    checked = Message.from_bytes(node.answer(Message({"kind": "check"}, (sent,)).to_bytes()))
    assert checked.kind == "checked"
    return node, {"run": "a" * 32, "config": hashlib.sha256(sent).hexdigest(), "round": 1}


def test_a_node_whose_owner_wants_privacy_refuses_a_run_without(tmp_path):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("trainer: {privacy: {noise_multiplier: 0.5, clip_norm: 1.0}}\n")
    node = Node(NodeSettings(tmp_path / "node0", name="n0"), builder([overlay]))
    said = r"node n0; client-level privacy: .*'clip_norm': 1.0.* there, None here"
    with pytest.raises(InputError, match=said):
        deployed("fedavg", tmp_path, InProcess({"node0": node}), *SMALL)


def test_a_private_node_keeps_losses_and_says_what_it_accounts(tmp_path, caplog):
    """Noise is on no loss; and n and the cohort are what the server says. What the server writes is
    one line of the node's log."""
    caplog.set_level(logging.INFO, "fl_lightning")
    node, about = checked_node(tmp_path, CENTRAL)
    fed = node.built[1]
    terms = {"kind": "train", "seed": 0, "cohort": 3, "clip_norm": 1.0}
    sent = fed.method.broadcast(fed.data.client(0, {})).to_bytes()
    for number, client in enumerate((0, "7\n2026-12-01 all is well\x1b[2K"), 1):
        order = {"client": client, "epochs": 1, "steps": 1, "since": 0, "message": 0}
        header = about | terms | {"noisy_sum": number, "orders": [order]}
        (result,) = Message.from_bytes(node.answer(Message(header, (sent,)).to_bytes())).header[
            "results"
        ]
        assert result.get("losses", {}) == {}
        assert ("steps" in result) == (client == 0)
    header = about | {"kind": "phase", "phase": "x\n2026-12-01 all is well\x1b[2K"}
    node.answer(Message(header).to_bytes())
    assert caplog.text.count("accounts 3 of 4 clients in a round, as the server says") == 1
    lines = [each.message for each in caplog.records if "all is well" in each.message]
    assert len(lines) == 2
    assert all("\n" not in line and "\x1b" not in line for line in lines)


@pytest.mark.parametrize("more", [[SECURE], [CENTRAL], [SHARES, SECURE]])
def test_a_node_whose_sums_are_secret_measures_no_client_whatever_its_server_asks(more, tmp_path):
    """Sums of one client's batches under weights that the server chooses tell its examples."""
    node, about = checked_node(tmp_path, *more)
    order = {"kind": "evaluate", **about, "splits": ["validation"], "clients": {"0": 0}}
    state = save(node.built[1].method.server)
    answer = Message.from_bytes(node.answer(Message(order, (state,)).to_bytes()))
    assert answer.kind == "refused"
    assert "without secure_sum and privacy" in answer.header["reason"]
    assert not answer.parts


def prepared(folder: Path, *more: str):
    cli = command_line("fedavg", folder, *SMALL, *more)
    return cli.trainer.prepare(cli.model, cli.datamodule, seed=0)


def test_a_node_takes_no_order_that_would_thin_its_noise(tmp_path):
    privacy = prepared(tmp_path, CENTRAL.replace("}", ", max_epsilon: 100}")).aggregation.privacy
    good, sums = (
        {"round": 1, "cohort": 3, "clip_norm": 1.0},
        NoisySums(tmp_path / "sums" / "of_a_run.csv"),
    )
    take_up(privacy, good, sums)
    for wrong, reason in (
        ({"cohort": 4}, "a cohort of 4 clients; rounds of 3 are accounted"),
        ({"cohort": 0}, "a cohort of 0 clients"),
        ({"clip_norm": 2.0}, "a clip_norm of 2; this node's is 1"),
        ({"clip_norm": float("nan")}, "a clip_norm of nan"),
        ({"round": 10**4}, "round 10000 of a private run; .*, above max_epsilon 100"),
    ):
        with pytest.raises(InputError, match=reason):
            take_up(privacy, good | wrong, sums)
    assert sums.count == 1
    following = prepared(tmp_path, QUANTILE).aggregation.privacy
    take_up(following, good | {"clip_norm": 0.25}, sums)
    assert following.clip_norm == 0.25
    with pytest.raises(InputError, match="a clip_norm of 1e"):
        take_up(following, good | {"clip_norm": 1e9}, sums)


def test_a_node_counts_each_order_as_one_more_sum_and_refuses_those_beyond_its_budget(tmp_path):
    """Whatever its server says, which may repeat a round, or have lost its count."""
    path = tmp_path / "sums.csv"
    privacy = prepared(tmp_path, CENTRAL).aggregation.privacy
    most = privacy.accountant.epsilon(7)
    privacy = prepared(
        tmp_path, CENTRAL.replace("}", f", max_epsilon: {most}}}")
    ).aggregation.privacy
    good = {"cohort": 3, "clip_norm": 1.0}
    for order, number in (
        ({"round": 1}, 1),
        ({"round": 1}, 2),
        ({"round": 4}, 4),
        ({"round": 2}, 5),
    ):
        take_up(privacy, good | order, NoisySums(path))  # a node that is started again has its file
        assert NoisySums(path).count == number
    with pytest.raises(InputError, match="round 2 of a private run; with it, noisy sum 8 here"):
        take_up(privacy, good | {"round": 2, "noisy_sum": 8}, NoisySums(path))
    take_up(privacy, good | {"round": 2, "noisy_sum": 7}, NoisySums(path))
    with pytest.raises(InputError, match="noisy sum 8"):
        take_up(privacy, good | {"round": 3, "noisy_sum": 3}, NoisySums(path))


def test_a_sum_that_was_begun_is_counted_whatever_became_of_its_line(tmp_path):
    path = tmp_path / "sums.csv"
    assert NoisySums(path).count == 0
    NoisySums(path).add(1, 1)
    NoisySums(path).add(2, 2)
    assert path.read_text() == "sum,round\n1,1\n2,2\n"
    path.write_text("sum,round\n1,1\n\x00\ufffd")  # the second line is half lost
    NoisySums(path).add(3, 2)
    assert path.read_bytes().endswith(b"\n3,2\n")
    assert NoisySums(path).count == 3
    path.write_text("3,2\n")  # the first ones are
    assert NoisySums(path).count == 3


def epsilons(folder: Path) -> list[float]:
    return [float(value) for value in column(folder, "privacy/epsilon")]


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    "way", ["by hand", "by itself", "by hand, without the file of an earlier release"]
)
def test_a_private_deployment_that_is_taken_back_pays_for_each_repeated_round(
    way, tmp_path, caplog
):
    """Its noise is new each time: 5 sums are allowed, 3 rounds are done, and taken back to the
    first."""
    of = prepared(tmp_path, CENTRAL).aggregation.privacy.accountant.epsilon
    more = [
        *SMALL,
        "--trainer.keep_checkpoints=9",
        CENTRAL.replace("}", f", max_epsilon: {of(5)}}}"),
    ]
    here, nodes = tmp_path / "deployed", nodes_in(tmp_path)
    deployed("fedavg", tmp_path, InProcess(nodes), *more)
    (run,) = (here / "fedavg").iterdir()
    assert epsilons(here) == [of(1), of(2), of(3)]

    def taken_back():
        """Go on from the first checkpoint, named or the only one left whole of an interrupted
        run."""
        if way != "by itself":
            return deployed("fedavg", tmp_path, InProcess(nodes), *more, f"--ckpt_path={first}")
        for later in sorted(first.parent.glob("round_*"))[1:]:
            (later / "progress.json").write_text("{")
        about = metadata_in(here) | {"status": "interrupted"}
        (run / "metadata.json").write_text(json.dumps(about))
        return deployed("fedavg", tmp_path, InProcess(nodes), *more, f"--ckpt_path={run}")

    first = run / "checkpoints" / "round_000001"
    lines = ["sum,round", "1,1", "2,2", "3,3", "4,2", "5,3"]
    if "without" in way:
        (run / "noisy_sums.csv").unlink()
        del lines[1:4]
    taken_back()
    assert epsilons(here) == [of(1), of(4), of(5)]
    assert "3 noisy sums were begun for the 1 rounds that are done" in caplog.text
    taken_back()
    assert (run / "noisy_sums.csv").read_text().split() == lines
    assert "one more round would exceed max_epsilon" in caplog.text
    # the rounds that are left say less than was spent; metadata.json, and so compare, say that
    assert run_metrics(read_directory(run))["privacy/epsilon"] == of(5)
    assert metadata_in(here)["deployment"]["privacy"] == {"noisy_sums": 5, "epsilon": of(5)}
    if way == "by itself":
        assert metadata_in(here)["status"] == "finished"
        assert epsilons(here) == [of(1)]
    for node in ("node0", "node1"):
        (path,) = (tmp_path / node / "noisy_sums").iterdir()
        assert NoisySums(path).count == 5


@pytest.mark.slow
@pytest.mark.essential
def test_a_private_deployment_may_be_taken_back_with_other_settings(tmp_path):
    """No round of it has the noise of another."""
    more = [*SMALL, "--trainer.keep_checkpoints=9", CENTRAL]
    here, nodes = tmp_path / "deployed", nodes_in(tmp_path)
    deployed("fedavg", tmp_path, InProcess(nodes), *more)
    (first,) = here.rglob("round_000001")
    changed = ["--trainer.allow_changed=true", "--trainer.local_epochs=2"]
    deployed("fedavg", tmp_path, InProcess(nodes), *more, *changed, f"--ckpt_path={first}")
    assert len(epsilons(here)) == 3
    assert metadata_in(here)["deployment"]["privacy"]["noisy_sums"] == 5


@pytest.mark.slow
@pytest.mark.essential
def test_a_run_directory_that_was_put_back_from_a_copy_counts_what_its_nodes_know(tmp_path, caplog):
    """Of 3 rounds the copy has one, in every file. Its nodes are refused by name until it counts
    all 3."""
    of = prepared(tmp_path, CENTRAL).aggregation.privacy.accountant.epsilon
    more = [*SMALL, "--trainer.keep_checkpoints=9", CENTRAL]
    here, nodes = tmp_path / "deployed", nodes_in(tmp_path)

    class KilledAfterOne(KilledAfter):
        def exchange(self, messages, timeout):
            header = Message.from_bytes(next(iter(messages.values()))).header
            if header["kind"] == "train" and header["round"] == 2:
                raise KeyboardInterrupt
            yield from super().exchange(messages, timeout)

    with pytest.raises(KeyboardInterrupt):
        deployed("fedavg", tmp_path, KilledAfterOne(nodes), *more)
    (run,) = (here / "fedavg").iterdir()
    # as a copy between the two rounds has it
    (run / "noisy_sums.csv").write_text("sum,round\n1,1\n")
    about = metadata_in(here)
    about["deployment"]["privacy"]["noisy_sums"] = 1
    (run / "metadata.json").write_text(json.dumps(about))
    copy = shutil.copytree(run, tmp_path / "copy")
    deployed("fedavg", tmp_path, InProcess(nodes), *more, f"--ckpt_path={run}")
    shutil.rmtree(run)
    copy.rename(run)
    message = (
        "node n0; it has taken part in 3 noisy sums of this run, and noisy_sums.csv .* counts 1"
    )
    with pytest.raises(InputError, match=message):
        deployed("fedavg", tmp_path, InProcess(nodes), *more, f"--ckpt_path={run}")
    with (run / "noisy_sums.csv").open("a") as file:
        file.write("3,0\n")
    deployed("fedavg", tmp_path, InProcess(nodes), *more, f"--ckpt_path={run}")
    assert epsilons(here) == [of(1), of(4), of(5)]


@pytest.mark.slow
@pytest.mark.essential
def test_metadata_counts_where_the_file_of_sums_is_gone(tmp_path):
    """Here the rounds that a run was taken back by are in no table any more."""
    of = prepared(tmp_path, CENTRAL).aggregation.privacy.accountant.epsilon
    more, nodes = [*SMALL, "--trainer.keep_checkpoints=9", CENTRAL], nodes_in(tmp_path)
    deployed("fedavg", tmp_path, InProcess(nodes), *more)
    (run,) = (tmp_path / "deployed" / "fedavg").iterdir()
    first = [*more, f"--ckpt_path={run / 'checkpoints' / 'round_000001'}"]
    deployed("fedavg", tmp_path, InProcess(nodes), *first)
    (run / "noisy_sums.csv").unlink()
    deployed("fedavg", tmp_path, InProcess(nodes), *first)
    assert epsilons(tmp_path / "deployed") == [of(1), of(6), of(7)]


def test_nothing_is_asked_of_nodes_before_the_line_is_on_the_disk(tmp_path):
    def spoil(run: Path) -> None:
        (run / "noisy_sums.csv").mkdir()

    with pytest.raises(RunStopped, match="a noisy sum is counted before its noise is drawn"):
        deployed("fedavg", tmp_path, InProcess(nodes_in(tmp_path)), *SMALL, CENTRAL, on_begin=spoil)
    assert not (tmp_path / "node0" / "noisy_sums").exists()
    (run,) = (tmp_path / "deployed" / "fedavg").iterdir()
    with pytest.raises(
        InputError, match="it says how much of the budget is spent, and cannot be read"
    ):
        prepared(tmp_path, CENTRAL).aggregation.privacy.continue_in(run, 0, there=0, changed=False)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_private_simulation_that_is_taken_back_is_the_one_that_never_was(rounds, tmp_path):
    """Its seed gives the same noise, so a repeated round is no second look."""
    more = [*SMALL, "--trainer.keep_checkpoints=9", "--trainer.checkpoint_every=1", CENTRAL]
    expected, there = simulated("fedavg", tmp_path, *more), tmp_path / "simulated"
    (run,) = (there / "fedavg").iterdir()
    before = epsilons(there)
    checkpoint = run / "checkpoints" / f"round_00000{rounds}"
    assert simulated("fedavg", tmp_path, *more, f"--ckpt_path={checkpoint}") == expected
    of = prepared(tmp_path, CENTRAL).aggregation.privacy.accountant.epsilon
    assert epsilons(there) == before == [of(1), of(2), of(3)]
    assert not (run / "noisy_sums.csv").exists()


def test_what_a_private_deployment_cannot_do_is_refused(tmp_path):
    with pytest.raises(InputError, match="a share of the noise, which is too little by itself"):
        check_deployable(prepared(tmp_path, SHARES))

    class Other(FedAvg):
        def addends(self, upload, client_id, weight):
            return super().addends(upload, client_id, weight)

    fed = prepared(tmp_path, SHARES, SECURE)
    check_deployable(fed)
    fed.method.__class__ = Other
    with pytest.raises(InputError, match="override starts of Other, as addends is"):
        check_run(Run.of(fed, deployed=True))
    fed.method.__class__ = FedAdaLoRA
    with pytest.raises(InputError, match=r"addends of FedAdaLoRA start from; leave one of them"):
        check_run(Run.of(fed, deployed=True))
    coded = ["--model=AQFL", "--model.weigh_by=clients", "--model.download=quantised", CENTRAL]
    check_deployable(prepared(tmp_path, *coded))  # where the server counts messages
    fed = prepared(tmp_path, *coded, SECURE)  # a simulation, whose clients read its weights
    with pytest.raises(InputError, match=r"weights that they do not know exactly; .* full"):
        check_deployable(fed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")
def test_through_flower_bytes_and_epsilon_are_those_of_the_simulation_and_weights_are_not(tmp_path):
    words = ["--config", str(ROOT / "configs" / "fedavg.yaml"), *COMMON, *SMALL, SHARES, SECURE]
    words += ["--trainer.participation=1.0"]
    deploy = ["deploy", *words, "--trainer.default_root_dir=deployed", "--deploy.local_nodes=2"]
    process, log = ours(*deploy, cwd=tmp_path, log="deploy.log"), tmp_path / "deploy.log"
    assert finish(process, log) == 0, log.read_text()
    expected = simulated_by_command(tmp_path, words)
    here, there = tmp_path / "deployed", tmp_path / "simulated"
    assert rows(here, "ledger") == rows(there, "ledger")
    assert column(here, "privacy/epsilon") == column(there, "privacy/epsilon")
    assert metadata_in(here)["weights_sha256"] != expected["weights_sha256"]
    assert "no seed tells them" in next(here.glob("*/*/run.log")).read_text()


# Draws of the operating system


def test_draws_of_the_system_have_the_distributions_of_numpys():
    """Kolmogorov-Smirnov against the distribution; a false alarm once in 1e6."""
    system, size = SystemGenerator(), 40_001
    assert stats.kstest(system.random(size), "uniform").pvalue > 1e-6
    assert stats.kstest(system.standard_normal(size), "norm").pvalue > 1e-6
    for p in (0.3, 1e-3):
        drawn = system.geometric(p, size)
        assert drawn.min() >= 1
        counts = [int((drawn <= x).sum()) for x in (1, 3, 10, 1000)]
        for x, count in zip((1, 3, 10, 1000), counts, strict=True):
            assert stats.binomtest(count, size, 1 - (1 - p) ** x).pvalue > 1e-6
    for draw in (rounded_gaussian, discrete_gaussian):
        noise = draw(system, size, 1000.0)
        assert (noise == np.rint(noise)).all()
        assert stats.kstest(noise / 1000, "norm").pvalue > 1e-6
    drawn = np.stack(
        [system.choice(np.arange(5) * 7, 2, replace=False, shuffle=False) for _ in range(2000)]
    )
    assert (drawn[:, 0] != drawn[:, 1]).all()
    assert stats.chisquare(np.unique(drawn, return_counts=True)[1]).pvalue > 1e-6
    assert set(np.unique(drawn)) == {0, 7, 14, 21, 28}


def test_draws_follow_from_the_bytes_that_are_read():
    """All bits one: u is 1 and a draw the smallest that there is; all zero: u = 2^-64, as far as it
    goes."""
    ones, zeros = SystemGenerator(lambda size: b"\xff" * size), SystemGenerator(bytes)
    assert ones.random(2).tolist() == [1 - 2**-53] * 2
    assert ones.geometric(0.5, 1).tolist() == [1]
    assert zeros.random(1).tolist() == [0.0]
    assert zeros.geometric(0.5, 1).tolist() == [64]
    np.testing.assert_allclose(zeros.standard_normal(2), [(128 * np.log(2)) ** 0.5, 0])
