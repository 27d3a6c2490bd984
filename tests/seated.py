"""Rounds of a method on the toy images, on seats or by one client after another."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from tape import Tapes
from test_graphs import NORMED

from fl_lightning import rng
from fl_lightning.conformance.toy import images
from fl_lightning.engines import ClientTask, SequentialEngine
from fl_lightning.engines.cuda import seats
from fl_lightning.engines.cuda.graphs import RecordedSteps
from fl_lightning.engines.cuda.recorders import Rerun
from fl_lightning.engines.cuda.seats import SeatsEngine
from fl_lightning.engines.steps import Steps
from fl_lightning.loop import Payload

COHORTS = ([1, 4], [0, 2, 3, 5], [1, 2, 3, 4, 5], [0, 1, 2, 4])
RECORDERS = {"eager": None, "rerun": Rerun, "tapes": Tapes}


class Federation:
    """A method on the toy images, and what trains its rounds."""

    def __init__(self, method, engine, recorder=None, fabric=None, epochs=2, **settings):
        self.fabric = fabric or Fabric(accelerator="cpu", devices=1)
        self.method, self.data, self.epochs = method, images(), epochs
        self.data.prepare_data()
        self.data.setup("fit")
        self.data.distribute(0, torch.device("cpu"))
        with rng.torch_stream(0, "weights"):
            method.build(self.data)
        self.recorders, self.states = [], {}
        make_steps = self._recorded(recorder) if recorder else Steps
        if engine is SequentialEngine:
            self.engine = SequentialEngine(self.fabric, method, self.data, make_steps(self.fabric, method))
        else:
            self.engine = engine(self.fabric, method, self.data, 3, make_steps=make_steps, **settings)
        self.engine.start()

    def _recorded(self, recorder):
        def make_steps(fabric, method):
            self.recorders.append(recorder())
            return RecordedSteps(fabric, method, self.recorders[-1], 1)

        return make_steps

    def orders(self, round, ids):
        self.method.round, data = round, self.data
        clients = [data.client(id, self.states.pop(id, {})) for id in ids]  # nobody else holds them
        return [
            ClientTask(
                c,
                round,
                self.method.broadcast(c).to_bytes(),
                data.labels(c),
                self.epochs,
                data.num_steps(c, self.epochs),
            )
            for c in clients
        ]

    def round(self, round, ids):
        done = list(self.engine.train(self.orders(round, ids)))
        assert [result.client.id for result in done] == ids
        self.states |= {result.client.id: result.state for result in done}
        self.method.aggregate({result.client.id: Payload.from_bytes(result.upload) for result in done})
        return done

    def rounds(self):
        """As ``assert_same`` takes it: results, and the server's end."""
        return [
            result for number, ids in enumerate(COHORTS, 1) for result in self.round(number, ids)
        ], self.method.server


def network(name):
    return {} if name == "FedMosaic" else {"network": NORMED}


class OneModule(SeatsEngine):
    def _seat(self):
        steps = self.make_steps(self.fabric, self.method)
        return seats.Seat(
            SequentialEngine(self.fabric, self.method, self.data, steps), self.make_stream(self.fabric.device)
        )
