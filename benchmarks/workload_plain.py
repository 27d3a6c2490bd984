"""The loop that one would write by hand: sequential clients, tensors in memory, torch's defaults;
nothing logged, counted or saved."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from workload import WORKLOADS, Workload, now, parser, report, travelling, wait, weights


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--compile", action="store_true", help="the network by torch.compile")
    options = arguments.parse_args()
    work = WORKLOADS[options.workload]
    model = with_peft() if work.tokens else work.build(options.channels_last)
    model.to(options.device)
    if options.compile:
        model.compile()
    autocast = torch.autocast(
        options.device, torch.bfloat16, enabled=options.precision == "bf16-mixed"
    )
    before, steps, marks = weights(model), 0, [now()]
    inputs, target = (tensor.to(options.device) for tensor in work.data())
    state = {name: value.detach().clone() for name, value in travelling(model).items()}
    rng = np.random.default_rng(0)
    rounds = 1 + (options.rounds or work.rounds)
    for _ in range(rounds):
        total = {
            name: torch.zeros_like(value, dtype=torch.float32) for name, value in state.items()
        }
        for client in rng.choice(work.clients, work.cohort, replace=False):
            model.load_state_dict(state, strict=False)
            with autocast:
                steps += train(model, work, inputs, target, int(client), rng)
            for name, value in travelling(model).items():
                total[name] += value.detach() / work.cohort
        state = {name: value.to(state[name].dtype) for name, value in total.items()}
        wait(options.device)
        marks.append(now())
    model.load_state_dict(state, strict=False)
    report(marks, steps=steps, rounds=rounds, moved=weights(model) - before, packages=("timm",))


def with_peft() -> nn.Module:
    from language_step import WithPeft

    return WithPeft()


def train(
    model: nn.Module,
    work: Workload,
    inputs: torch.Tensor,
    target: torch.Tensor,
    client: int,
    rng: np.random.Generator,
) -> int:
    """The client's local epochs; how many steps they had."""
    optimizer, steps = (
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **work.sgd),
        0,
    )
    for _ in range(work.epochs):
        order = torch.from_numpy(rng.permutation(work.examples)) + client * work.examples
        for index in order.to(inputs.device).split(work.batch):
            loss = work.loss(model, inputs[index], target[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    return steps


if __name__ == "__main__":
    main()
