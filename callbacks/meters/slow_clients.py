"""How well those are served whose rounds take longest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callbacks.meters.training_cost import steps_and_examples
from fl_lightning.errors import require
from fl_lightning.hooks import Context, Meter, RoundRecord


class SlowClients(Meter):
    """Adds ``val/<primary>_slowest_decile`` to every evaluated round of a run in virtual time: the
    mean of the primary metric over the slowest tenth of the clients, to be read beside that of all
    clients.

    A client is as slow as its whole round would be: latency, its trained weights in float32 down
    and up, and all its local steps, in the clock's seconds. Neither who was ever drawn nor what a
    method sends changes that, so methods and forms of rounds are compared on the same clients. Of
    the clients with validation examples the slowest tenth is taken, rounded up, and whoever is as
    slow as one of these: equal clients are all slow. Each counts once. It is a function of the
    seed, and changes nothing.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def on_check(self, context: Context) -> None:
        """Refuse a run in which nobody is slow, or nothing is known of single clients.

        Raises:
            InputError: there is no clock, devices are drawn anew in each round, or no client has
                validation examples.
        """
        given = "callbacks.SlowClients"
        rule = "the run has no virtual time"
        instead = "write --trainer.clock.devices LogNormalDevices"
        require(context.timing is not None, given, rule, f"{instead}, or leave it out")
        rule = "the seconds of a deployment are measured, and nothing is known of those to come"
        require(not context.timing.is_measured, given, rule, "leave it out")
        devices = context.timing.clock.devices
        given = f"{given} with --trainer.clock.devices {type(devices).__name__}"
        require(devices.lasting, given, "a client's device is drawn anew in each round", instead)
        require(
            len(context.data.validating) > 0,
            "callbacks.SlowClients",
            "no client has validation examples",
            "write --data.val_fraction 0.1, or leave it out",
        )

    def on_setup(self, context: Context) -> None:
        self._seconds = {}

    def on_validate(self, values: dict[int, float], record: RoundRecord, context: Context) -> None:
        for id in values.keys() - self._seconds.keys():
            self._seconds[id] = seconds_of_round(context, id)
        slow = slowest({id: self._seconds[id] for id in values})
        if slow:
            name = f"val/{context.data.task.primary}_slowest_decile"
            record.metrics[name] = sum(values[id] for id in slow) / len(slow)


def seconds_of_round(context: Any, id: int) -> float:
    """Return the virtual seconds of a whole round of a client, with weights in float32 both ways.

    Args:
        context: the federation.
        id: the client's.
    """
    client = context.data.client(id)
    _, examples = steps_and_examples(context, client, work=1.0)
    size = 4 * context.method.trained_size(client)
    return context.timing.clock.seconds(context.seed, 1, id, examples=examples, down=size, up=size)


def slowest(seconds: Mapping[int, float]) -> list[int]:
    """Return the ids of the slowest tenth, rounded up, and of all that are as slow as one of them,
    in order.

    >>> slowest({0: 1.0, 1: 3.0, 2: 2.0, 3: 3.0})
    [1, 3]
    """
    if not seconds:
        return []
    last = sorted(seconds.values(), reverse=True)[-(-len(seconds) // 10) - 1]
    return sorted(id for id, value in seconds.items() if value >= last)
