"""What becomes of uploads: sums under masks, noise, attacks, and averages that compare."""

from __future__ import annotations

from collections.abc import Iterator

from fl_lightning.aggregation.average import Average
from fl_lightning.compatibility.features import overrides_hook, some_with, why_not
from fl_lightning.compatibility.runs import Refusal, Run
from fl_lightning.config.overriding import overrides
from fl_lightning.hooks import Stressor, sees_uploads

UNSEEN = "it changes uploads knowing those of others, and nobody sees one by itself"
MASKED_TO_THE_END = "who masks an upload is needed until the end of the round"


def secure_sum(run: Run) -> Iterator[Refusal]:
    if run.masks is None:
        return
    given, method = "--trainer.secure_sum with", run.method
    if why := why_not(method, "secure_sum"):
        yield (
            f"{given} --model {run.name}",
            why,
            f"leave it out, or take one of {some_with('secure_sum')}",
        )
    given_average = f"{given} --model.average {type(method.average).__name__}"
    if not method.average.is_sum:
        rule = "it compares the clients' single vectors, and the server gets their sum alone"
        instead = (
            "write --model.average WeightedMean, or NormClipping, which clients do by themselves"
        )
        yield given_average, rule, instead
    download = getattr(method, "download", "full")
    if overrides(method.average, Average, "bounded") and download != "full":
        rule = (
            "clients bound their own update, and do not know the exact weights that it starts from"
        )
        instead = "write --model.download full, or --model.average WeightedMean"
        yield f"{given_average} and --model.download {download}", rule, instead
    if method.max_share < 1:
        rule = "a client's share depends on everybody's n_k, and nobody knows another client's"
        instead = "write --model.max_share 1, or leave secure_sum out"
        yield f"{given} --model.max_share {method.max_share}", rule, instead
    yield from seen_uploads(run, given)


def average(run: Run) -> Iterator[Refusal]:
    given = f"--model.average {type(run.method.average).__name__} with --model {run.name}"
    if run.method.average.guide and overrides_hook(run.method, "aggregate"):
        rule = (
            "it goes by an update of the server's weights, and the method averages something else"
        )
        yield given, rule, "write --model.average GeometricMedian, or --model FedAvg"


def privacy(run: Run) -> Iterator[Refusal]:
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
        yield (
            f"{given} batch normalisation ({name})",
            "noise makes running variances negative",
            instead,
        )
    yield from seen_uploads(run, given)


def seen_uploads(run: Run, given: str, rule: str = UNSEEN) -> Iterator[Refusal]:
    for callback in filter(sees_uploads, run.callbacks):
        yield f"{given} {type(callback).__name__}", rule, "write attack: sign_flip, or leave it out"


def protected(run: Run, given: str, *, masks: str, noise: str) -> Iterator[Refusal]:
    """Yield that something goes neither with masked uploads nor with noisy ones, and why."""
    if run.masks is not None:
        yield f"{given} trainer.secure_sum", masks, "leave one of them out"
    if run.privacy is not None:
        yield f"{given} trainer.privacy", noise, "leave one of them out"


def attack(run: Run) -> Iterator[Refusal]:
    why = why_not(run.method, "attack")
    for callback in run.callbacks if why else ():
        if isinstance(callback, Stressor) and callback.attacks:
            given = f"{type(callback).__name__} with --model {run.name}"
            yield given, why, "leave it out, or write --model FedAvg"
