"""Print by how many bytes this process grew at most while it trained one client, and what was
forecast.

python measured_step.py NETWORK BATCH CONTEXT [name=FOLDER] [gradient_checkpointing=1] [rank=0] ...
"""

from __future__ import annotations

import ctypes
import json
import sys
from functools import partial
from pathlib import Path

import torch
from lightning.fabric import Fabric

from fl_lightning.data import InstructionData
from fl_lightning.engines import ClientTask, SequentialEngine
from fl_lightning.methods import FedAvg
from fl_lightning.models.language import LlamaTiny
from fl_lightning.run.dry_run import forecast


def resident(line: str) -> int:
    """Return what this process holds (``VmRSS``) or has held at most (``VmHWM``), in bytes. The
    peak that ``getrusage`` knows is that of the process which started this one, where that was
    larger."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(one for one in status if one.startswith(f"{line}:")).split()[1])


def main() -> None:
    torch.set_num_threads(1)
    network, batch, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    settings = {key: value for key, _, value in (word.partition("=") for word in sys.argv[4:])}
    if network == "hf":
        from fl_lightning.models.language.hf import TransformersLM as cls
    else:
        cls = LlamaTiny
    given = {key: int(value) if value.isdigit() else value for key, value in settings.items()}
    method = FedAvg(network=partial(cls, **given), optimizer=torch.optim.AdamW)
    # long answers, so that each batch fills the context
    data = InstructionData(
        num_clients=1, examples_per_client=4 * batch, batch_size=batch, context=context
    )
    found = forecast(method, data, participation=1.0, rounds=1).metrics()
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    some = data._sequences["train"]
    object.__setattr__(some, "length", torch.full_like(some.length, context))
    method.build(data)
    engine = SequentialEngine(Fabric(accelerator="cpu", devices=1), method, data)
    client = data.client(0)
    message = method.broadcast(client).to_bytes()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    list(engine.train([ClientTask(client, 1, message, data.labels(client), 1, 3)]))
    grown = resident("VmHWM") - before
    tensors = [*method.network.parameters(), *method.network.buffers()]
    beside = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    sys.stdout.write(json.dumps({"grown": grown, "weights": beside, **found}) + "\n")


if __name__ == "__main__":
    main()
