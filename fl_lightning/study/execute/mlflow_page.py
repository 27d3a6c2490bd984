"""The link to a study on MLflow's page, and the columns, groups and charts that it shows there.

MLflow keeps such a view as a tag of the experiment, ``mlflow.sharedViewState.<key>``, in JSON of
its own that no document describes. Here it is as the *Share* button of ``FITTING_SERIES`` writes
it; with other versions the link leads to the experiment without a view.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fl_lightning.study.metric_names import CLASSIFICATION, TaskMetrics

FITTING_SERIES = ("3.17.",)
"""The versions of MLflow that are known to read this JSON."""
KEY = "study"
TAG = f"mlflow.sharedViewState.{KEY}"
BY_ROUND = ("test/{}", "val/{}", "test/ece", "train/loss_task", "comm/total_bytes", "time/round")
AT_THE_END = ("final/{}", "final/auc_{}", "final/best_val_{}")
"""The charts; braces are the primary metric of the task."""
MAX_RUNS = 100
"""Runs that a chart draws at most."""


def has_view() -> bool:
    """Return whether the installed MLflow reads the view."""
    return version("mlflow").startswith(FITTING_SERIES)


def view_tags(axes: Sequence[str], task: TaskMetrics = CLASSIFICATION) -> dict[str, str]:
    """Return the experiment's tags with the view of a study.

    There is none where the installed MLflow does not read it.

    Args:
        axes: the axes that the study's runs have as tags.
        task: the task of its runs.
    """
    if not has_view():
        return {}
    by_round, at_the_end = (
        [name.format(task.primary) for name in names] for names in (BY_ROUND, AT_THE_END)
    )
    columns = [f"tags.`{name}`" for name in ("label", *axes, "seed")]
    columns += [f"metrics.`{name}`" for name in (*at_the_end, "comm/total_bytes")]
    sections = {
        "at the end": [_chart("BAR", name) for name in at_the_end],
        "by round": [_line(name) for name in by_round],
    }
    shown = {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    groups = {
        "aggregateFunction": "average",
        "groupByKeys": [{"mode": "tag", "groupByData": "label"}],
    }
    view = {
        "selectedColumns": columns,
        "groupBy": groups,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "isAccordionReordered": True,
        "compareRunSections": [{"uuid": name, "name": name, **shown} for name in sections],
        "compareRunCharts": [
            chart | {"uuid": f"{name}: {chart['metricKey']}", "metricSectionId": name}
            for name, charts in sections.items()
            for chart in charts
        ],
    }
    return {TAG: json.dumps(view)}


def link(experiment_id: str, port: int = 5000) -> str:
    """Return where ``mlflow ui`` shows the runs of an experiment, with the view if there is one."""
    place = f"http://127.0.0.1:{port}/#/experiments/{experiment_id}/runs"
    view = f"?viewStateShareKey={KEY}&workflowType=machine_learning&compareRunsMode=CHART"
    return place + view if has_view() else place


def _chart(kind: str, metric: str) -> dict[str, Any]:
    own = {"deleted": False, "isGenerated": False}
    return {"type": kind, "runsCountToCompare": MAX_RUNS, "metricKey": metric, **own}


def _line(metric: str) -> dict[str, Any]:
    return _chart("LINE", metric) | {
        "selectedMetricKeys": [metric],
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisKey": "step",
        "xAxisScaleType": "linear",
        "selectedXAxisMetricKey": "",
        "useGlobalXaxisKey": False,
        "range": {},
    }
