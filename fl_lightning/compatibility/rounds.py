"""When clients are done, who talks to whom, and who takes part."""

from __future__ import annotations

from collections.abc import Iterator

from fl_lightning.compatibility.features import some_with, why_not
from fl_lightning.compatibility.protection import MASKED_TO_THE_END, protected, seen_uploads
from fl_lightning.compatibility.runs import Refusal, Run


def clock(run: Run) -> Iterator[Refusal]:
    if run.deployed and run.has_clock:
        rule = "the rounds of a deployment take real time, which time/round has"
        yield "trainer.clock in a deployment", rule, "leave it out"


def late_clients(run: Run) -> Iterator[Refusal]:
    if run.rounds is None or not run.rounds.goes_by_clock:
        return
    given = f"--trainer.rounds {type(run.rounds).__name__}"
    if run.deployed and run.rounds.has_versions:
        rule = "its clients start one by one, and nodes are asked a round at a time"
        yield f"{given} in a deployment", rule, "write --trainer.rounds OverSelection, or Deadline"
    if not run.has_clock and not run.deployed:
        instead = "write --trainer.clock.devices LogNormalDevices, or leave it out"
        yield given, "it goes by a clock, and there is none", instead
    if run.rounds.has_versions:
        rule = "it changes uploads knowing those of a round, and these arrive one by one"
        yield from seen_uploads(run, f"{given} with", rule)
        if why := why_not(run.method, "asynchronous"):
            yield (
                f"{given} with --model {run.name}",
                why,
                "write --trainer.rounds Deadline, or leave it out",
            )
    noise = "epsilon is accounted for uniform cohorts, and who is in time depends on the clients"
    yield from protected(run, f"{given} with", masks=MASKED_TO_THE_END, noise=noise)


def topology(run: Run) -> Iterator[Refusal]:
    if run.topology is None:
        return
    if run.has_edge_lines and (run.topology.has_peers or not run.topology.has_nodes):
        given = f"--trainer.clock.edges with --trainer.topology {type(run.topology).__name__}"
        yield (
            given,
            "these are lines of edge servers, and here are none",
            "leave it out, or take Hierarchy",
        )
    if not run.topology.has_nodes:
        return
    method, peers = run.method, run.topology.has_peers
    given = f"--trainer.topology {type(run.topology).__name__}"
    with_model = f"{given} with --model {run.name}"
    if run.deployed:
        yield (
            f"{given} in a deployment",
            "its clients talk to one server",
            "leave it out, or simulate it",
        )
    masks = "masks hide uploads from one server that adds them all up, and here there is none"
    noise = "noise is accounted for one sum a round, and here there are several"
    yield from protected(run, f"{given} with", masks=masks, noise=noise)
    if run.rounds is not None and run.rounds.goes_by_clock:
        rule = "its nodes average what has arrived once everybody is done"
        yield (
            f"{given} with --trainer.rounds {type(run.rounds).__name__}",
            rule,
            "write Synchronous",
        )
    rule = "it changes uploads knowing those that one server gets, and here there are several"
    yield from seen_uploads(run, f"{given} with", rule)
    if why := why_not(method, "topology"):
        yield with_model, why, f"take one of {some_with('topology')}"
    if method.server_optimizer is not None:
        rule = "a server optimiser remembers the updates of one server"
        instead = "leave server_optimizer out, or write --model FedAvg"
        yield (
            f"{given} with --model.server_optimizer {type(method.server_optimizer).__name__}",
            rule,
            instead,
        )
    if method.personalised:
        rule = "its clients' own models are parts of one server's, and here each node has another"
        yield with_model, rule, "write --model FedAvg, without personal and finetune"
    if not method.average.is_sum:
        rule = "it compares the vectors of a whole cohort, and a node gets few"
        name = type(method.average).__name__
        yield (
            f"{given} with --model.average {name}",
            rule,
            "write --model.average WeightedMean, or NormClipping",
        )
    if not peers:
        return
    if method.weigh_by != "clients" or method.max_share != 1:
        rule = (
            "peers weigh alike: what an average is made of is not known any more after the next one"
        )
        yield (
            f"{given} with --model.weigh_by {method.weigh_by}",
            rule,
            "write --model.weigh_by clients",
        )
    if method.reads_public and not run.topology.partners_stay:
        rule = "its uploads are updates of what their readers know already, and here readers change"
        instead = "take Gossip with Ring, Torus, Complete or GraphFile, or --model FedMPQ"
        yield with_model, rule, instead


def availability(run: Run) -> Iterator[Refusal]:
    if not run.availability:
        return
    given = f"--trainer.clock.availability {run.availability} with"
    noise = "epsilon is accounted for cohorts that are drawn from all clients"
    yield from protected(run, given, masks=MASKED_TO_THE_END, noise=noise)


def sampler(run: Run) -> Iterator[Refusal]:
    sampler = run.sampler
    if sampler is None or sampler.is_uniform:
        return
    given = f"--trainer.sampler {type(sampler).__name__}"
    if sampler.goes_by_clock and not run.has_clock:
        instead = "write --trainer.clock.devices LogNormalDevices, or leave it out"
        yield given, "it goes by a clock, and there is none", instead
    if run.rounds is not None and run.rounds.has_versions:
        rule = "it compares clients for a whole cohort, and these rounds draw one by one"
        yield (
            f"{given} with --trainer.rounds {type(run.rounds).__name__}",
            rule,
            "leave one of them out",
        )
    if run.topology is not None and run.topology.has_nodes:
        rule = "it chooses among the clients of one server, and here are several nodes"
        yield (
            f"{given} with --trainer.topology {type(run.topology).__name__}",
            rule,
            "leave one of them out",
        )
    seen = "it prefers some clients by what it has seen of single ones"
    masks = f"{seen}, and the server is to learn a sum alone"
    noise = f"{seen}, and epsilon is accounted for uniform cohorts"
    yield from protected(run, f"{given} with", masks=masks, noise=noise)
    if run.deployed:
        yield f"{given} in a deployment", "its clients are drawn uniformly", "leave it out"
