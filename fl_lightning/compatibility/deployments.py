"""What only nodes know."""

from __future__ import annotations

from collections.abc import Iterator

from fl_lightning.compatibility.features import overrides_hook, why_not
from fl_lightning.compatibility.runs import Refusal, Run
from fl_lightning.config.overriding import overrides
from fl_lightning.hooks import Stressor
from fl_lightning.metrics.states import keeps_outputs


def deployed(run: Run) -> Iterator[Refusal]:
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


def deployed_privacy(run: Run) -> Iterator[Refusal]:
    if run.privacy is None or not run.deployed:
        return
    if run.masks is None and run.privacy.settings.is_distributed:
        given = "trainer.privacy.where distributed without trainer.secure_sum"
        rule = "the server would get single messages with a share of the noise, which is too little by itself"
        yield (
            given,
            rule,
            "write --trainer.secure_sum.threshold 0.67, or --trainer.privacy.where central",
        )
    if (
        run.masks is not None
        and overrides_hook(run.method, "addends")
        and not overrides_hook(run.method, "starts")
    ):
        given = f"trainer.privacy and trainer.secure_sum with --model {run.name}"
        rule = f"a server that sees no upload has to know what the addends of {run.name} start from"
        ours = type(run.method).__module__.startswith("fl_lightning.")
        own = f"override starts of {run.name}, as addends is"
        yield given, rule, "leave one of them out" if ours else own
    download = getattr(run.method, "download", "full")
    if run.masks is not None and download != "full":
        given = f"trainer.privacy and trainer.secure_sum with --model.download {download}"
        rule = "clients count their message from weights that they do not know exactly"
        yield given, rule, "write --model.download full, or leave one of them out"


def own_data(run: Run) -> Iterator[Refusal]:
    if not run.own_data:
        return
    for callback in run.callbacks:
        if isinstance(callback, Stressor) and callback.by_group:
            given = f"callbacks.{type(callback).__name__} on the nodes' own data"
            rule = "it goes by the clients' groups, and nodes do not say of which groups their examples are"
            yield given, rule, f"leave {type(callback).__name__} out"
    if why := why_not(run.method, "own_data"):
        yield f"{run.name} on the nodes' own data", why, "take another method"
    if run.method.weigh_by == "tokens":
        rule = "nodes say how many examples they have, and not how many tokens"
        yield (
            "--model.weigh_by tokens on the nodes' own data",
            rule,
            "write --model.weigh_by examples",
        )
