"""The ClientApp: in a module of its own, so that Ray's actors import it instead of receiving it
anew with every message."""

from __future__ import annotations

from functools import lru_cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from workload import WORKLOADS

app = ClientApp()


@lru_cache
def data(name: str) -> tuple[Tensor, Tensor]:
    """Once for each actor."""
    return WORKLOADS[name].data()


@lru_cache
def network(name: str, channels_last: bool) -> nn.Module:
    """Once for each actor; the documentation's examples build it anew for every message."""
    return WORKLOADS[name].build(channels_last)


@app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    work, steps = WORKLOADS[config["workload"]], 0
    inputs, target = data(config["workload"])
    model = network(config["workload"], config["channels_last"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), **work.sgd)
    first = int(context.node_config["partition-id"]) * work.examples
    for _ in range(work.epochs):
        for index in (torch.randperm(work.examples) + first).split(work.batch):
            loss = nn.functional.cross_entropy(model(inputs[index]), target[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    metrics = MetricRecord(
        {"num-examples": work.examples, "steps": steps, "threads": torch.get_num_threads()}
    )
    return Message(
        content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )
