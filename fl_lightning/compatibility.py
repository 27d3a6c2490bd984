"""What fits what: the features that a run may have, what each of them needs, and one check of a run.

A method says in ``refuses`` which features it cannot have, and why; a row of the table says what a feature
needs beside that. Constructors of methods, ``build``, ``fit``, ``check``, ``deploy``, nodes and the plans of
studies all call :func:`check_run`, and the page "What works with what" is printed from the same rows.

Not here are values that are wrong by themselves, which constructors refuse; what a callback reads of a run,
which its ``on_check`` knows; and what only a machine, a file or a checkpoint can tell.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from fl_lightning.aggregation.averages import Average, WeightedMean
from fl_lightning.aggregation.private import PrivateAggregation
from fl_lightning.aggregation.server import SummingServer
from fl_lightning.clock.rounds import Rounds
from fl_lightning.config.overriding import overrides
from fl_lightning.errors import InputError
from fl_lightning.hooks import Context, Stressor, reads_probabilities, sees_uploads
from fl_lightning.metrics.states import keeps_outputs
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.tasks import Classification, LanguageModelling, Task

TaskFeature = Literal["classification", "language", "other_classes", "no_classes"]
"""What is learnt: a class of each example, a language, other things with logits of classes, or without."""
TASKS: tuple[TaskFeature, ...] = get_args(TaskFeature)
Feature = (
    TaskFeature
    | Literal["module", "received_terms", "secure_sum", "privacy", "attack", "own_data", "server_optimizer"]
    | Literal["personal", "finetune", "topology", "adapter_average", "asynchronous"]
)
"""What a run may have and a method may refuse."""
Refusal = tuple[str, str, str]
"""What was given; the rule that it breaks; what to write instead."""

OWNS_ONE = "it is the name of a server optimiser, and has no other"
SQUARES_UNKNOWN = "a message is clipped as a whole, and the square of a length is then none any more"
UNSEEN = "it changes uploads knowing those of others, and nobody sees one by itself"
MASKED_TO_THE_END = "who masks an upload is needed until the end of the round"
SINGLE_UPLOADS: dict[Feature, tuple[tuple[str, ...], str]] = {
    "secure_sum": (
        ("aggregate", "add_up", "bounded_weights"),
        "its {} reads single uploads, and the server gets their sum alone",
    ),
    "privacy": (("aggregate",), "its {} needs single uploads, and no sum of them"),
    "adapter_average": (
        ("aggregate", "addends"),
        "its own {} makes something else of uploads than a mean of adapters",
    ),
}
"""Features that a method cannot have which overrides one of these hooks of :class:`SummingServer`."""


@dataclass(frozen=True)
class Run:
    """What is to be combined.

    Args:
        method: perhaps before ``build``.
        callbacks: stressors and meters.
        masks: ``trainer.secure_sum``.
        privacy: of ``trainer.privacy``.
        task: None where the data have not been read, as in the plan of a study.
        deployed: whether clients are on nodes.
        own_data: whether the data are the nodes' own.
        rounds: of ``trainer.rounds``.
        has_clock: whether there is a ``trainer.clock``.
        topology: of ``trainer.topology``; None: one server.
        availability: the name of what says when clients are online; empty where they always are.
        sampler: of ``trainer.sampler``.
    """

    method: Any
    callbacks: Sequence[object] = ()
    masks: SecureSum | None = None
    privacy: PrivateAggregation | None = None
    task: Task | None = None
    deployed: bool = False
    own_data: bool = False
    rounds: Rounds | None = None
    has_clock: bool = False
    topology: Any = None
    availability: str = ""
    sampler: Any = None

    @classmethod
    def of(cls, fed: Context, *, deployed: bool) -> Run:
        """Return what a federation combines."""
        way, data, timing = fed.aggregation, fed.data, fed.timing
        found = cls(fed.method, fed.callbacks, way.masks, way.privacy, data.task, deployed, data.apart)
        found = replace(found, sampler=fed.sampler)
        return found if timing is None else found.timed(timing)

    def timed(self, timing: Any) -> Run:
        """Return the same with a clock, a :class:`fl_lightning.clock.Timing`."""
        reached = timing.clock.reached
        name = "" if reached.is_always else type(reached).__name__
        return replace(self, rounds=timing.rounds, has_clock=True, availability=name)

    @property
    def name(self) -> str:
        """The method's class name."""
        return type(self.method).__name__

    @property
    def readers(self) -> list[str]:
        """The callbacks that read the probabilities of test examples."""
        return [type(callback).__name__ for callback in self.callbacks if reads_probabilities(callback)]

    @property
    def is_measured_on_nodes(self) -> bool:
        """Whether models are evaluated where the clients are, in a deployment. Where uploads are secret, so
        is what single clients measure, and the server evaluates a newcomer's."""
        return (self.method.personalised or self.own_data) and self.masks is None and self.privacy is None


@dataclass(frozen=True)
class Row:
    """A feature of a run, or several of a kind.

    Args:
        name: its name on the page.
        needs: what it needs, in one sentence.
        refusals: yields what of a run does not go with it; nothing where the run does not have it.
        features: those of its kind that methods can refuse, which are columns of the page.
    """

    name: str
    needs: str
    refusals: Callable[[Run], Iterator[Refusal]]
    features: tuple[Feature, ...] = ()


def check_run(run: Run) -> None:
    """Refuse what cannot be combined, before anything is created.

    Raises:
        InputError: the first of it, in the order of :data:`ROWS`.
    """
    for row in ROWS:
        for refusal in row.refusals(run):
            raise InputError(*refusal)


def why_not(method: Any, feature: Feature) -> str:
    """Return why a method, or a class of methods, cannot have a feature; empty where it can."""
    if feature in method.refuses:
        return method.refuses[feature]
    if feature == "server_optimizer":
        return OWNS_ONE if feature in method.owns else _why_no_mean(method)
    if feature == "topology":
        return _why_no_nodes(method)
    hooks, rule = SINGLE_UPLOADS.get(feature, ((), ""))
    if feature in ("personal", "finetune"):
        if feature in method.owns:
            return "it sets it by itself"
        hooks, rule = ("aggregate",), "its own {} makes something else of uploads than weights"
    return next((rule.format(hook) for hook in hooks if _overrides(method, hook)), "")


def _why_no_mean(method: Any) -> str:
    own = ("aggregate",) if method.calls_server_optimizer else ("aggregate", "next_state")
    names = [hook for hook in own if _overrides(method, hook)]
    return f"its own {names[0]} makes the next weights, and not the clients' mean" if names else ""


def _why_no_nodes(method: Any) -> str:
    if _overrides(method, "aggregate"):
        return "its own aggregate needs all uploads of a round in one place"
    if _overrides(method, "next_state") and not method.sums_over_any:
        return "its own next_state keeps what one server knows of all clients"
    if "server_optimizer" in method.owns:
        return "its server remembers its updates, and here there are several"
    has_own = method.personalised or {"personal", "finetune"} & method.owns
    return "its clients keep models of their own" if has_own else ""


def _overrides(method: Any, hook: str) -> bool:
    if isinstance(method, type):
        return getattr(method, hook) is not getattr(SummingServer, hook)
    return overrides(method, SummingServer, hook)


def methods_with(feature: Feature) -> list[str]:
    """Return the names of the package's methods whose classes can have a feature."""
    kinds, names = [SummingServer], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        concrete = not inspect.isabstract(kind) and kind.__name__ != "Method"
        if concrete and kind.__module__.startswith("fl_lightning.methods.") and not why_not(kind, feature):
            names.add(kind.__name__)
    return sorted(names)


# What a method learns, and what it is made of


def feature_of(task: Task) -> TaskFeature:
    """Return of which kind a task is."""
    if isinstance(task, Classification):
        return "classification"
    if isinstance(task, LanguageModelling):
        return "language"
    return "other_classes" if task.has_classes else "no_classes"


def only(task: TaskFeature, why: str) -> dict[Feature, str]:
    """Return the ``refuses`` of a method that learns one kind of task alone.

    >>> sorted(only("language", "it decides token by token"))
    ['classification', 'no_classes', 'other_classes']
    """
    return {other: why for other in TASKS if other != task}


def no_personal(why: str) -> dict[Feature, str]:
    """Return the ``refuses`` of a method of which nothing can stay on a client or be tuned there."""
    return {"personal": why, "finetune": why}


def _task(run: Run) -> Iterator[Refusal]:
    if run.task is None:
        return
    kind, where = feature_of(run.task), f"where the task is {type(run.task).__name__}"
    if why := why_not(run.method, kind):
        text = "classification" in run.method.refuses and not why_not(run.method, "language")
        data = "write --data.class_path InstructionData, or another one of text"
        yield f"--model {run.name} {where}", why, data if text else "write --model FedAvg"
    terms = [type(term).__name__ for term in run.method.active_terms() if term.reads_logits]
    if terms and kind == "no_classes":
        yield f"--model.terms {', '.join(terms)} {where}", "it compares logits of classes", "leave it out"
    for name in run.readers if kind != "classification" else ():
        rule = "it reads the probabilities of the classes of every test example"
        yield f"{name} {where}", rule, f"leave callbacks.{name} out"


def _module(run: Run) -> Iterator[Refusal]:
    module = run.method.module
    if module is not None and (why := why_not(run.method, "module")):
        given = f"--model.module {type(module).__name__} with --model {run.name}"
        yield given, why, "leave module out, or write --model FedAvg"


def _received_terms(run: Run) -> Iterator[Refusal]:
    why = why_not(run.method, "received_terms")
    for term in run.method.terms if why else ():
        if term.reads_received:
            given = f"--model.terms {type(term).__name__} with --model {run.name}"
            yield given, why, "write ScaledLoss or LabelSmoothing"


def _server_optimizer(run: Run) -> Iterator[Refusal]:
    method, optimizer = run.method, run.method.server_optimizer
    if optimizer is None:
        return
    given = f"--model.server_optimizer {type(optimizer).__name__} with"
    why = why_not(method, "server_optimizer")
    if why and "server_optimizer" not in method.owns:
        yield f"{given} --model {run.name}", why, "leave it out, or write --model FedAvg"
    if not optimizer.needs_squares:
        return
    if not method.average.is_sum:
        rule = "it compares the mean with the lengths of the updates in it, and this is no mean"
        instead = "write --model.average WeightedMean, or NormClipping"
        yield f"{given} --model.average {type(method.average).__name__}", rule, instead
    if run.privacy is not None:
        yield (
            f"{given} trainer.privacy",
            SQUARES_UNKNOWN,
            "write --model.server_optimizer ServerSGD, or leave it out",
        )
    download = getattr(method, "download", "full")
    if run.masks is not None and download != "full":
        rule = "clients measure their own update, and do not know the exact weights that it starts from"
        yield (
            f"{given} --trainer.secure_sum and --model.download {download}",
            rule,
            "write --model.download full",
        )


def _personal(run: Run) -> Iterator[Refusal]:
    method = run.method
    asked: dict[Feature, Any] = {"personal": method.personal, "finetune": method.finetune}
    for feature, value in asked.items():
        given = value if isinstance(value, str) else type(value).__name__
        why = why_not(method, feature) if value is not None else ""
        if why and feature not in method.owns:
            yield (
                f"--model.{feature} {given} with --model {run.name}",
                why,
                "leave it out, or write --model FedAvg",
            )


# What becomes of uploads


def _adapter_average(run: Run) -> Iterator[Refusal]:
    method, rule = run.method, run.method.adapters
    if not rule.name:
        return
    given, linear = f"--model.adapter_average {rule.name} with", "write --model.adapter_average frozen_a"
    if why := why_not(method, "adapter_average"):
        yield f"{given} --model {run.name}", why, "leave it out, or write --model FedAvg"
    own = [hook for hook in MESSAGES if _differs(method, hook)] if rule.own_messages else []
    if own:
        why = f"its messages hold more or less than the weights, and {run.name} has a {own[0]} of its own"
        yield f"{given} --model {run.name}", why, "write --model FedAvg"
    if not rule.is_linear and not isinstance(method.average, WeightedMean):
        why = "it says itself what becomes of the clients' adapters"
        yield f"{given} --model.average {type(method.average).__name__}", why, "leave average out"
    if method.average.guide and rule.own_messages:
        why = "what clients send changes from round to round, and the average remembers an update"
        yield f"{given} --model.average {type(method.average).__name__}", why, "leave average out"
    if method.server_optimizer is not None and rule.replaces_adapters:
        why = "each round starts from new adapters, and there is nothing to step from"
        yield f"{given} --model.server_optimizer", why, "write --model.adapter_average residual"
    if rule.moves_base and method.terms_read("previous_features"):
        why = "its term compares with the client's model of another round, whose frozen weights were others"
        yield f"{given} --model {run.name}", why, "write --model.adapter_average product"
    if method.personal is not None and method.personal != rule.personal and rule.personal is not None:
        why = f"it keeps {rule.personal} on clients by itself"
        yield f"{given} --model.personal {method.personal}", why, "leave personal out"
    if run.masks is not None and not rule.is_linear:
        why = "it multiplies the factors of single clients, and the server gets their sum alone"
        yield f"{given} --trainer.secure_sum", why, linear
    if run.privacy is not None and not rule.is_linear:
        why = "it multiplies the factors of single clients, and noise is for sums of what they send"
        yield f"{given} trainer.privacy", why, linear
    if run.rounds is not None and run.rounds.has_versions and rule.own_messages:
        why = "what a client has depends on the round that it took part in last, and uploads are of any round"
        yield f"{given} --trainer.rounds {type(run.rounds).__name__}", why, "leave rounds out"
    has_nodes = run.topology is not None and run.topology.has_nodes
    if has_nodes and (rule.refines or rule.own_messages or rule.ranks or not rule.is_linear):
        why = "it remembers, or sends, what one server makes of all adapters, and here nodes have their own"
        yield f"{given} --trainer.topology {type(run.topology).__name__}", why, "leave one of them out"


def _differs(method: Any, hook: str) -> bool:
    """Return whether a method has another hook than ``Method``, which has some of ``SummingServer`` anew."""
    own = next(vars(kind)[hook] for kind in type(method).__mro__ if hook in vars(kind))
    return own.__module__ != "fl_lightning.methods.base" and own is not vars(SummingServer).get(hook)


MESSAGES = ("broadcast", "receive", "upload", "upload_limits", "decode", "next_state", "deploy")
"""Hooks of a method that make its messages and read them."""


def _secure_sum(run: Run) -> Iterator[Refusal]:
    if run.masks is None:
        return
    given, method = "--trainer.secure_sum with", run.method
    if why := why_not(method, "secure_sum"):
        others = ", ".join(methods_with("secure_sum"))
        yield f"{given} --model {run.name}", why, f"leave it out, or take one of {others}"
    given_average = f"{given} --model.average {type(method.average).__name__}"
    if not method.average.is_sum:
        rule = "it compares the clients' single vectors, and the server gets their sum alone"
        instead = "write --model.average WeightedMean, or NormClipping, which clients do by themselves"
        yield given_average, rule, instead
    download = getattr(method, "download", "full")
    if overrides(method.average, Average, "bounded") and download != "full":
        rule = "clients bound their own update, and do not know the exact weights that it starts from"
        instead = "write --model.download full, or --model.average WeightedMean"
        yield f"{given_average} and --model.download {download}", rule, instead
    if method.max_share < 1:
        rule = "a client's share depends on everybody's n_k, and nobody knows another client's"
        instead = "write --model.max_share 1, or leave secure_sum out"
        yield f"{given} --model.max_share {method.max_share}", rule, instead
    yield from _seen_uploads(run, given)


def _average(run: Run) -> Iterator[Refusal]:
    given = f"--model.average {type(run.method.average).__name__} with --model {run.name}"
    if run.method.average.guide and _overrides(run.method, "aggregate"):
        rule = "it goes by an update of the server's weights, and the method averages something else"
        yield given, rule, "write --model.average GeometricMedian, or --model FedAvg"


def _privacy(run: Run) -> Iterator[Refusal]:
    if run.privacy is None:
        return
    given, method, average = "trainer.privacy with", run.method, type(run.method.average).__name__
    if why := why_not(method, "privacy"):
        yield f"{given} --model {run.name}", why, "write --model FedAvg"
    if not method.average.is_sum:
        instead = "write --model.average WeightedMean"
        yield f"{given} --model {run.name}", f"{average} needs single uploads", instead
    if method.max_share != 1:
        rule = "all clients weigh the same, and a share depends on who else returned"
        yield f"{given} --model.max_share {method.max_share:g}", rule, "leave max_share out"
    if method.weigh_by != "clients":
        rule = "n_k as a weight tells how much data a client has, and lets one move the sum by more than C"
        yield f"{given} --model.weigh_by {method.weigh_by}", rule, "write --model.weigh_by clients"
    for name in [name for name in method.layout.shapes if name.endswith("running_var")][:1]:
        instead = "use group normalisation, the default of small_cnn"
        yield f"{given} batch normalisation ({name})", "noise makes running variances negative", instead
    yield from _seen_uploads(run, given)


def _seen_uploads(run: Run, given: str, rule: str = UNSEEN) -> Iterator[Refusal]:
    for callback in filter(sees_uploads, run.callbacks):
        yield f"{given} {type(callback).__name__}", rule, "write attack: sign_flip, or leave it out"


def _protected(run: Run, given: str, *, masks: str, noise: str) -> Iterator[Refusal]:
    """Yield that something goes neither with masked uploads nor with noisy ones, and why."""
    if run.masks is not None:
        yield f"{given} trainer.secure_sum", masks, "leave one of them out"
    if run.privacy is not None:
        yield f"{given} trainer.privacy", noise, "leave one of them out"


def _attack(run: Run) -> Iterator[Refusal]:
    why = why_not(run.method, "attack")
    for callback in run.callbacks if why else ():
        if isinstance(callback, Stressor) and callback.attacks:
            given = f"{type(callback).__name__} with --model {run.name}"
            yield given, why, "leave it out, or write --model FedAvg"


# Virtual time


def _clock(run: Run) -> Iterator[Refusal]:
    if run.deployed and run.has_clock:
        rule = "the rounds of a deployment take real time, which time/round has"
        yield "trainer.clock in a deployment", rule, "leave it out"


def _late_clients(run: Run) -> Iterator[Refusal]:
    if run.rounds is None or not run.rounds.goes_by_clock:
        return
    given = f"--trainer.rounds {type(run.rounds).__name__}"
    if run.deployed:
        yield f"{given} in a deployment", "it goes by virtual time", "write --min_nodes and --round_seconds"
    if not run.has_clock:
        instead = "write --trainer.clock.devices LogNormalDevices, or leave it out"
        yield given, "it goes by a clock, and there is none", instead
    if run.rounds.has_versions:
        rule = "it changes uploads knowing those of a round, and these arrive one by one"
        yield from _seen_uploads(run, f"{given} with", rule)
        if why := why_not(run.method, "asynchronous"):
            yield f"{given} with --model {run.name}", why, "write --trainer.rounds Deadline, or leave it out"
    noise = "epsilon is accounted for uniform cohorts, and who is in time depends on the clients"
    yield from _protected(run, f"{given} with", masks=MASKED_TO_THE_END, noise=noise)


# Who talks to whom


def _topology(run: Run) -> Iterator[Refusal]:
    if run.topology is None or not run.topology.has_nodes:
        return
    method, peers = run.method, run.topology.has_peers
    given = f"--trainer.topology {type(run.topology).__name__}"
    with_model = f"{given} with --model {run.name}"
    if run.deployed:
        yield f"{given} in a deployment", "its clients talk to one server", "leave it out, or simulate it"
    masks = "masks hide uploads from one server that adds them all up, and here there is none"
    noise = "noise is accounted for one sum a round, and here there are several"
    yield from _protected(run, f"{given} with", masks=masks, noise=noise)
    if run.rounds is not None and run.rounds.goes_by_clock:
        rule = "its nodes average what has arrived once everybody is done"
        yield f"{given} with --trainer.rounds {type(run.rounds).__name__}", rule, "write Synchronous"
    rule = "it changes uploads knowing those that one server gets, and here there are several"
    yield from _seen_uploads(run, f"{given} with", rule)
    if why := why_not(method, "topology"):
        yield with_model, why, f"take one of {', '.join(methods_with('topology'))}"
    if method.server_optimizer is not None:
        rule = "a server optimiser remembers the updates of one server"
        instead = "leave server_optimizer out, or write --model FedAvg"
        yield f"{given} with --model.server_optimizer {type(method.server_optimizer).__name__}", rule, instead
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
    if run.availability:
        rule = "how long a peer is at work depends on the messages of its neighbours, and so on who is there"
        given_clock = f"--trainer.clock.availability {run.availability}"
        yield f"{given} with {given_clock}", rule, "leave availability out, or write Hierarchy"
    if method.weigh_by != "clients" or method.max_share != 1:
        rule = "peers weigh alike: what an average is made of is not known any more after the next one"
        yield f"{given} with --model.weigh_by {method.weigh_by}", rule, "write --model.weigh_by clients"
    if method.reads_public and not run.topology.partners_stay:
        rule = "its uploads are updates of what their readers know already, and here readers change"
        instead = "take Gossip with Ring, Torus, Complete or GraphFile, or --model FedMPQ"
        yield with_model, rule, instead


# Who takes part


def _availability(run: Run) -> Iterator[Refusal]:
    if not run.availability:
        return
    given = f"--trainer.clock.availability {run.availability} with"
    noise = "epsilon is accounted for cohorts that are drawn from all clients"
    yield from _protected(run, given, masks=MASKED_TO_THE_END, noise=noise)


def _sampler(run: Run) -> Iterator[Refusal]:
    sampler = run.sampler
    if sampler is None or sampler.is_uniform:
        return
    given = f"--trainer.sampler {type(sampler).__name__}"
    if sampler.goes_by_clock and not run.has_clock:
        instead = "write --trainer.clock.devices LogNormalDevices, or leave it out"
        yield given, "it goes by a clock, and there is none", instead
    if run.rounds is not None and run.rounds.has_versions:
        rule = "it compares clients for a whole cohort, and these rounds draw one by one"
        yield f"{given} with --trainer.rounds {type(run.rounds).__name__}", rule, "leave one of them out"
    if run.topology is not None and run.topology.has_nodes:
        rule = "it compares clients by the losses of one server's model, and here nodes have their own"
        yield f"{given} with --trainer.topology {type(run.topology).__name__}", rule, "leave one of them out"
    masks = "the server learns single clients' losses, and is to learn a sum alone"
    noise = "epsilon is accounted for uniform cohorts and for what uploads tell, and losses tell more"
    yield from _protected(run, f"{given} with", masks=masks, noise=noise)
    if run.deployed:
        yield f"{given} in a deployment", "nodes are asked for no losses", "leave it out"


# Deployments


def _deployed(run: Run) -> Iterator[Refusal]:
    on_nodes = {"change_labels": "labels"} if run.deployed else {}
    if run.deployed and run.masks is not None:
        on_nodes["change_upload"] = "uploads before they are masked"
    for callback in run.callbacks:
        for hook, what in on_nodes.items() if isinstance(callback, Stressor) else ():
            if overrides(callback, Stressor, hook):
                name, rule = type(callback).__name__, f"it changes {what}, and only nodes have them"
                yield f"callbacks.{name}", rule, f"leave {name} out of a deployment"
    if not (run.deployed and run.is_measured_on_nodes and run.method.personalised) or run.own_data:
        return
    for name in run.readers:
        rule = f"it reads the outputs for test examples, and those of {run.name} stay on nodes"
        yield f"callbacks.{name}", rule, f"leave {name} out of a deployment"
    for metric in run.task.named if run.task else ():
        if keeps_outputs(metric.metric):
            given = f"--data.metrics {metric.path} with {run.name} in a deployment"
            rule = f"it keeps outputs for test examples, and those of {run.name} stay on nodes"
            sums = "MulticlassF1Score, or AUROC with --data.metrics.thresholds 100"
            yield given, rule, f"take one that keeps sums, as {sums}"


def _deployed_privacy(run: Run) -> Iterator[Refusal]:
    if run.privacy is None or not run.deployed:
        return
    if run.masks is None and run.privacy.settings.is_distributed:
        given = "trainer.privacy.where distributed without trainer.secure_sum"
        rule = "the server would get single messages with a share of the noise, which is too little by itself"
        yield given, rule, "write --trainer.secure_sum.threshold 0.67, or --trainer.privacy.where central"
    if run.masks is not None and _overrides(run.method, "addends") and not _overrides(run.method, "starts"):
        given = f"trainer.privacy and trainer.secure_sum with --model {run.name}"
        rule = f"a server that sees no upload has to know what the addends of {run.name} start from"
        yield given, rule, f"override starts of {run.name}, as addends is"


def _own_data(run: Run) -> Iterator[Refusal]:
    if not run.own_data:
        return
    if why := why_not(run.method, "own_data"):
        yield f"{run.name} on the nodes' own data", why, "take another method"
    if run.method.weigh_by == "tokens":
        rule = "nodes say how many examples they have, and not how many tokens"
        yield "--model.weigh_by tokens on the nodes' own data", rule, "write --model.weigh_by examples"


ROWS = (
    Row("task", "The method can learn it; what compares logits needs classes.", _task, TASKS),
    Row("module", "Clients train a LightningModule of yours as the network.", _module, ("module",)),
    Row(
        "terms of the received model",
        "Clients receive a model, which terms of the local loss compare with theirs.",
        _received_terms,
        ("received_terms",),
    ),
    Row(
        "server optimiser",
        "The server's next weights are a mean; an extrapolation sums squared lengths of updates too.",
        _server_optimizer,
        ("server_optimizer",),
    ),
    Row(
        "personal models",
        "Clients send weights; a part may stay with them, or a copy be tuned before it is evaluated.",
        _personal,
        ("personal", "finetune"),
    ),
    Row(
        "adapter average",
        "The server takes means of weights that hold the factors of LoRA; a rule that multiplies them reads "
        "single uploads, and one with messages of its own needs FedAvg's.",
        _adapter_average,
        ("adapter_average",),
    ),
    Row("attack", "Clients send what they have learned, which hostile ones replace.", _attack, ("attack",)),
    Row(
        "guided average",
        "CenteredClipping and FLTrust go by updates of the server's weights, so the method averages weights.",
        _average,
    ),
    Row(
        "secure sum",
        "The server needs nothing of uploads but sums, with weights that each client knows by itself.",
        _secure_sum,
        ("secure_sum",),
    ),
    Row(
        "client-level privacy",
        "The server needs nothing of uploads but sums of messages that can be clipped and weigh the same.",
        _privacy,
        ("privacy",),
    ),
    Row("clock", "Clients are simulated, since virtual seconds are not those of real machines.", _clock),
    Row(
        "late clients",
        "`OverSelection`, `Deadline`, `FedBuff` and `FedAsync` go by a clock, and the server may leave out "
        "single uploads; the last two need clients that send weights alone and keep nothing.",
        _late_clients,
    ),
    Row(
        "topology",
        "Edge servers and peers run the server's half of a method, each on sums of what it gets: "
        "`Hierarchy`, `Gossip` and `Moshpit` need a weighted mean, rounds that wait for everybody, "
        "and no server that remembers updates; peers weigh alike, are always online, and code updates "
        "for those who stay.",
        _topology,
        ("topology",),
    ),
    Row(
        "clients that come and go",
        "The server may leave out single uploads, and a cohort is drawn from those that are online.",
        _availability,
    ),
    Row(
        "samplers that look at clients",
        "`PowerOfChoice` and `Oort` see losses and times of single simulated clients, cohort by cohort; "
        "`Oort` goes by a clock.",
        _sampler,
    ),
    Row(
        "deployment",
        "Stressors, callbacks and named metrics read nothing that is on nodes alone: labels, uploads before "
        "they are masked, outputs of personal models.",
        _deployed,
    ),
    Row(
        "private deployment",
        "Shares of noise are sent under masks, and the server knows what its sums start from.",
        _deployed_privacy,
    ),
    Row(
        "nodes' own data",
        "The server needs to know of a client's examples no more than how many there are.",
        _own_data,
        ("own_data",),
    ),
)
"""The table; a run is checked in the order of its rows."""

FORMER: dict[str, tuple[Feature, ...]] = {
    "received_refused": ("received_terms",),
    "attack_refused": ("attack",),
    "secure_refused": ("secure_sum",),
    "privacy_refused": ("privacy",),
    "module_refused": ("module",),
    "classification_only": ("language", "other_classes", "no_classes"),
    "language_only": ("classification", "other_classes", "no_classes"),
}
"""Attributes that methods of earlier versions set, and the entries of ``refuses`` that they are now."""


def adopt_former(kind: Any) -> None:
    """Take over what a method's class declares in the way of earlier versions, and warn."""
    for name, features in FORMER.items():
        if why := vars(kind).get(name):
            text = f"{kind.__name__}.{name}; reasons are entries of refuses; write refuses with {features[0]}"
            warnings.warn(text, DeprecationWarning, stacklevel=4)
            kind.refuses = {**kind.refuses, **dict.fromkeys(features, why)}
