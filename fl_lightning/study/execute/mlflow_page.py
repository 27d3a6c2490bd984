"""What MLflow's page shows of a study when it is opened by its link: columns, groups and charts.

MLflow keeps such a view as a tag of the experiment, ``mlflow.sharedViewState.<key>``, in JSON (as written by
its *Share* button, 3.17).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

KEY = "study"
TAG = f"mlflow.sharedViewState.{KEY}"
BY_ROUND = ("test/accuracy", "val/accuracy", "test/ece", "train/loss_task", "comm/total_bytes", "time/round")
AT_THE_END = ("final/accuracy", "final/auc_accuracy", "final/best_val_accuracy")
RUNS = 100  # drawn at most


def view(axes: Sequence[str]) -> str:
    """The view of a study whose runs have these axes as tags."""
    columns = [f"tags.`{name}`" for name in ("label", *axes, "seed")]
    columns += [f"metrics.`{name}`" for name in (*AT_THE_END, "comm/total_bytes")]
    sections = {
        "at the end": [_chart("BAR", name) for name in AT_THE_END],
        "by round": [_line(name) for name in BY_ROUND],
    }
    return json.dumps(
        {
            "selectedColumns": columns,
            "groupBy": {
                "aggregateFunction": "average",
                "groupByKeys": [{"mode": "tag", "groupByData": "label"}],
            },
            "useGroupedValuesInCharts": True,
            "hideEmptyCharts": True,
            "isAccordionReordered": True,
            "compareRunSections": [
                {
                    "uuid": name,
                    "name": name,
                    "display": True,
                    "isReordered": True,
                    "deleted": False,
                    "isGenerated": False,
                }
                for name in sections
            ],
            "compareRunCharts": [
                chart | {"uuid": f"{name}: {chart['metricKey']}", "metricSectionId": name}
                for name, charts in sections.items()
                for chart in charts
            ],
        }
    )


def link(experiment_id: str, port: int = 5000) -> str:
    """Where ``mlflow ui`` shows the view."""
    place = f"http://127.0.0.1:{port}/#/experiments/{experiment_id}/runs"
    return f"{place}?viewStateShareKey={KEY}&workflowType=machine_learning&compareRunsMode=CHART"


def _chart(kind: str, metric: str) -> dict[str, Any]:
    return {
        "type": kind,
        "runsCountToCompare": RUNS,
        "metricKey": metric,
        "deleted": False,
        "isGenerated": False,
    }


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
