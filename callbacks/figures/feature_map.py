"""A map of what the network sees before it decides: t-SNE of penultimate features (van der Maaten &
Hinton, JMLR 2008)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from callbacks.figures.drawing import Every, own_copy, student_and_teacher
from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.config.constraints import within
from fl_lightning.figures import COLOURS, MARKERS
from fl_lightning.hooks import Context
from fl_lightning.rng import stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 20  # classes; more colours and markers than that cannot be told apart


class FeatureMap(FigureMeter):
    """Draws ``figures/feature_map``: test images where a t-SNE of the input of the last linear
    layer puts them, coloured by class.

    Student (what is deployed) and teacher (the server's weights in full precision) are embedded
    together, so that both panels are one map; where they are the same network there is one panel.
    Above each: the silhouette of the classes in the features themselves, in [-1, 1] (Rousseeuw,
    1987). Methods whose clients have networks of their own have no such pair: the meter says so and
    is idle.

    Args:
        examples: test images at most, drawn by the run's seed, at least 10.
        perplexity: of t-SNE, above 0; less where there are few images.
        every: rounds between figures; 0: only at the end.
    """

    name = "feature_map"
    rule = "every client has a network of its own and there is none to map"
    instead = "leave it out, or write --model FedMPQKD"

    def __init__(
        self,
        examples: Annotated[int, within("[10, inf)", "a map needs 10 images or more", 1000)] = 1000,
        perplexity: Annotated[float, within("(0, inf]", "it is above 0", 30)] = 30.0,
        every: Every = 0,
    ) -> None:
        super().__init__(every)
        self.examples, self.perplexity = examples, perplexity

    def applies_to(self, context: Context) -> bool:
        return not context.method.personalised

    def figure(self, context: Context) -> Figure:
        total = len(context.data.test_target)
        index = np.sort(
            stream(context.seed, "feature_map").choice(
                total, min(self.examples, total), replace=False
            )
        )
        position = torch.from_numpy(index).to(context.data.device)
        features = {
            name: penultimate(network, context.data, position)
            for name, network in student_and_teacher(own_copy(context)).items()
        }
        target = context.data.test_target[position].cpu().numpy()
        points = embed(
            np.concatenate(list(features.values())), self.perplexity, stream(context.seed, "t-SNE")
        )
        return feature_figure(
            features,
            np.split(points, len(features)),
            target,
            f"round {context.method.round}, {len(target)} test images",
        )


@torch.no_grad()
def penultimate(network: nn.Module, data: Any, position: Tensor) -> np.ndarray:
    """Return the input of the last linear layer for the test images at ``position`` int64 ``[n]``,
    float32 ``[n, F]``."""
    linear = [
        module
        for module in network.modules()
        if isinstance(module, nn.Linear) and module.out_features == data.num_classes
    ]
    if not linear:
        raise ValueError(f"the network has no torch.nn.Linear with {data.num_classes} outputs")
    seen: list[Tensor] = []
    handle = linear[-1].register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].flatten(1).float().cpu())
    )
    with handle:  # which removes it
        for index in position.split(512):
            network(data.inputs("test", index))
    return torch.cat(seen).numpy()


def embed(features: np.ndarray, perplexity: float, rng: np.random.Generator) -> np.ndarray:
    """t-SNE, ``[n, F]`` to ``[n, 2]``."""
    from sklearn.manifold import TSNE

    if not np.isfinite(features).all():
        raise ValueError("the features are not finite")
    perplexity = min(perplexity, (len(features) - 1) / 3)
    return TSNE(
        perplexity=perplexity, init="pca", random_state=int(rng.integers(2**31))
    ).fit_transform(features)


def silhouette(features: np.ndarray, target: np.ndarray) -> float:
    """NaN where there are fewer than two classes, or as many as images."""
    from sklearn.metrics import silhouette_score

    if 2 <= len(np.unique(target)) < len(target):
        return float(silhouette_score(features, target))
    return float("nan")


def feature_figure(
    features: dict[str, np.ndarray], points: list[np.ndarray], target: np.ndarray, title: str
) -> Figure:
    """Draw a panel for each network. Up to 20 classes have a colour and a marker each, more are
    colours on a scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(points), 5.4), layout="constrained")
    panels = figure.subplots(1, len(points), squeeze=False, sharex=True, sharey=True)[0]
    classes = np.unique(target)
    for axes, (name, values), place in zip(panels, features.items(), points, strict=True):
        axes.set(xticks=[], yticks=[], title=f"{name}: silhouette {silhouette(values, target):.2f}")
        if len(classes) > NAMED:
            image = axes.scatter(*place.T, c=target, cmap="viridis", s=9, linewidth=0)
            continue
        for index, label in enumerate(classes):
            colour, marker = COLOURS[index % 8], MARKERS[(index + index // 8) % 8]
            ink = {"color": colour, "edgecolor": "black", "linewidth": 0.3}
            if index >= 8:  # the second of its colour is hollow
                ink = {"color": "white", "edgecolor": colour, "linewidth": 1.2}
            axes.scatter(*place[target == label].T, s=22, marker=marker, label=str(label), **ink)
    if len(classes) > NAMED:
        figure.colorbar(image, ax=panels, label="class", location="bottom", aspect=50)
    else:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            title="class",
            loc="outside lower center",
            ncols=5 * len(points),
            frameon=False,
        )
    figure.suptitle(f"t-SNE of penultimate features, {title}")
    return figure
