"""What a method learns, and what it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fl_lightning.aggregation.averages import WeightedMean
from fl_lightning.aggregation.server import SummingServer
from fl_lightning.compatibility.features import SQUARES_UNKNOWN, Feature, feature_of, why_not
from fl_lightning.compatibility.runs import Refusal, Run


def task(run: Run) -> Iterator[Refusal]:
    if run.task is None:
        return
    kind, where = feature_of(run.task), f"where the task is {type(run.task).__name__}"
    if why := why_not(run.method, kind):
        text = "classification" in run.method.refuses and not why_not(run.method, "language")
        data = "write --data.class_path InstructionData, or another one of text"
        yield f"--model {run.name} {where}", why, data if text else "write --model FedAvg"
    terms = [type(term).__name__ for term in run.method.active_terms() if term.reads_logits]
    if terms and kind == "no_classes":
        yield (
            f"--model.terms {', '.join(terms)} {where}",
            "it compares logits of classes",
            "leave it out",
        )
    for name in run.readers if kind != "classification" else ():
        rule = "it reads the probabilities of the classes of every test example"
        yield f"{name} {where}", rule, f"leave callbacks.{name} out"


def module(run: Run) -> Iterator[Refusal]:
    module = run.method.module
    if module is not None and (why := why_not(run.method, "module")):
        given = f"--model.module {type(module).__name__} with --model {run.name}"
        yield given, why, "leave module out, or write --model FedAvg"


def received_terms(run: Run) -> Iterator[Refusal]:
    why = why_not(run.method, "received_terms")
    for term in run.method.terms if why else ():
        if term.reads_received:
            given = f"--model.terms {type(term).__name__} with --model {run.name}"
            yield given, why, "write ScaledLoss or LabelSmoothing"


def server_optimizer(run: Run) -> Iterator[Refusal]:
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


def personal(run: Run) -> Iterator[Refusal]:
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


def adapter_average(run: Run) -> Iterator[Refusal]:
    method, rule = run.method, run.method.adapters
    if not rule.name:
        return
    given = f"--model.adapter_average {rule.name} with"
    linear = "write --model.adapter_average frozen_a"
    if why := why_not(method, "adapter_average"):
        yield f"{given} --model {run.name}", why, "leave it out, or write --model FedAvg"
    own = own_messages_of(method) if rule.own_messages else []
    if own:
        why = f"its messages hold more or less than the weights, and {run.name} has a {own[0]} of its own"
        yield f"{given} --model {run.name}", why, "write --model FedAvg"
    if not rule.is_linear and not isinstance(method.average, WeightedMean):
        why = "it says itself what becomes of the clients' adapters"
        yield f"{given} --model.average {type(method.average).__name__}", why, "leave average out"
    if method.average.guide and rule.own_messages:
        why = "what clients send changes from round to round, and the average remembers an update"
        yield f"{given} --model.average {type(method.average).__name__}", why, "leave average out"
    yield from _steps_with_adapters(run, given)
    if (rule.replaces_adapters or rule.new_factors) and method.terms_read("shift"):
        why = "its term adds up a client's updates, and each round starts from new adapters"
        yield f"{given} a DynamicTerm", why, "write --model.adapter_average residual"
    if rule.moves_base and method.terms_read("previous_features"):
        why = "its term compares with the client's model of another round, whose frozen weights were others"
        yield f"{given} --model {run.name}", why, "write --model.adapter_average product"
    if (
        method.personal is not None
        and method.personal != rule.personal
        and rule.personal is not None
    ):
        why = f"it keeps {rule.personal} on clients by itself"
        yield f"{given} --model.personal {method.personal}", why, "leave personal out"
    if run.masks is not None and not (rule.is_linear or rule.sums_products):
        why = "it weighs single clients by what their adapters add, and the server gets their sum alone"
        yield f"{given} --trainer.secure_sum", why, linear
    if run.privacy is not None and not rule.is_linear:
        why = (
            "it multiplies factors, and noise on products would be on m n values of a layer, not r (m + n)"
            if rule.sums_products
            else "it weighs single clients by what their adapters add, and under noise all weigh the same"
        )
        yield f"{given} trainer.privacy", why, linear
    if run.rounds is not None and run.rounds.has_versions and rule.sends_parts:
        why = (
            "what a client has depends on the round that it took part in last, and uploads are of any round"
            if rule.own_messages
            else "clients of several ranks send parts, and a stale update is weighed whole"
        )
        yield f"{given} --trainer.rounds {type(run.rounds).__name__}", why, "leave rounds out"
    has_nodes = run.topology is not None and run.topology.has_nodes
    if has_nodes and (rule.refines or rule.own_messages or rule.ranks or not rule.is_linear):
        why = "it remembers, or sends, what one server makes of all adapters, and here nodes have their own"
        yield (
            f"{given} --trainer.topology {type(run.topology).__name__}",
            why,
            "leave one of them out",
        )


def _steps_with_adapters(run: Run, given: str) -> Iterator[Refusal]:
    method, optimizer, rule = run.method, run.method.server_optimizer, run.method.adapters
    if optimizer is None:
        return
    if rule.replaces_adapters:
        why = "each round starts from new adapters, and there is nothing to step from"
    elif rule.new_factors and not optimizer.keeps_mean:
        why = "the factors of each round have other directions, and a step mixes those of two"
    elif rule.refines and optimizer.needs_squares and not optimizer.keeps_mean:
        why = "it compares the mean with the updates in it, and the rule makes something else of it"
    else:
        return
    setting = f"--model {run.name}" if "server_optimizer" in method.owns else ""
    instead = "write --model.adapter_average residual"
    yield f"{given} {setting or '--model.server_optimizer'}", why, instead


def own_messages_of(method: Any) -> list[str]:
    """Return the hooks of ``MESSAGES`` that a method has of its own, so that its messages may hold
    something else than the weights."""
    return [hook for hook in MESSAGES if _differs(method, hook)]


def _differs(method: Any, hook: str) -> bool:
    """Return whether a method has another hook than ``Method``, which has some of ``SummingServer``
    anew."""
    own = next(vars(kind)[hook] for kind in type(method).__mro__ if hook in vars(kind))
    return own.__module__ != "fl_lightning.methods.base" and own is not vars(SummingServer).get(
        hook
    )


MESSAGES = ("broadcast", "receive", "upload", "upload_limits", "decode", "next_state", "deploy")
"""Hooks of a method that make its messages and read them."""
