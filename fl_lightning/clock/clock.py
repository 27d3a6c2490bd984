"""The settings of virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Annotated, ClassVar

from fl_lightning.clock.availability import Always, Availability
from fl_lightning.clock.devices import Devices, Line
from fl_lightning.config.constraints import check_fields, within
from fl_lightning.config.recorded import parts_of, require_made
from fl_lightning.errors import MisuseError

ALWAYS = Always()
RATE = within("[1e-6, inf]", "a line carries a millionth of a byte a second or more", 1e6)


@dataclass(frozen=True, kw_only=True)
class Lines:
    """One line for every client.

    Args:
        down, up: bytes per second, above 0. Default: bytes take no time.
        latency: seconds that an exchange with a client takes beside computing and bytes, 0 or more.
    """

    down: Annotated[float, RATE] = math.inf
    up: Annotated[float, RATE] = math.inf
    latency: Annotated[float, within("[0, 1e9]", "a latency is 0 to 1e9 seconds", 0.1)] = 0.0

    settings_alone: ClassVar[bool] = True
    """In a configuration it is its settings, without a class path."""

    settings_shown: ClassVar = ("{name} {value} of a line of --trainer.clock", "{name}: {value}")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How long a client's round takes, in virtual seconds:

        latency + bytes down / down + seconds of the device for its examples + bytes up / up

    Args:
        devices: how long clients compute.
        network: their lines, where ``devices`` does not know them. Default: bytes take no time.
        availability: when they are online. Default: always.
        edges: the line of each edge server of ``Hierarchy`` to the cloud: ``up`` to it, ``down``
            from it, and ``latency`` of a round trip. Default: bytes between them take no time.
    """

    devices: Devices
    network: Lines | None = None
    availability: Availability | None = None
    edges: Lines | None = None

    settings_alone: ClassVar[bool] = True
    """In a configuration it is its settings, without a class path."""

    settings_shown: ClassVar = ("--trainer.clock.{name} {value}",) * 2

    def __post_init__(self) -> None:
        require_made(parts_of(Clock), vars(self))

    @property
    def reached(self) -> Availability:
        """When clients can be reached."""
        return self.availability or ALWAYS

    @property
    def content_sha256(self) -> str:
        """SHA-256 of the files that devices and availability are read from; empty where there are
        none."""
        found = [self.devices.content_sha256, self.reached.content_sha256]
        return sha256("/".join(found).encode()).hexdigest() if any(found) else ""

    @cached_property
    def usual_line(self) -> Line:
        """The line of a client whose own is not known."""
        network = self.network or Lines()
        return Line(network.down, network.up, network.latency)

    def line(self, client: int) -> Line:
        """Return a client's line."""
        own = self.devices.line(client)
        if own is None:
            return self.usual_line
        return own if own.latency is not None else replace(own, latency=self.usual_line.latency)

    def seconds(
        self, seed: int, round: int, client: int, *, examples: int, down: int, up: int
    ) -> float:
        """Return the virtual seconds between the server's broadcast and the end of a client's
        upload.

        Args:
            seed: seed of the run.
            round: number of the round, from 1.
            client: its id.
            examples: examples that pass through its local steps, each epoch counted.
            down, up: bytes that it is sent and sends.

        Raises:
            MisuseError: the devices gave no time.
        """
        line = self.line(client)
        computing = self.devices.seconds(seed, round, client, examples)
        if not 0 <= computing < math.inf:
            raise MisuseError(
                f"{type(self.devices).__name__}.seconds gave {computing} for client {client}",
                "a client computes for 0 seconds or more, and not for ever",
                "return such a number",
            )
        return (line.latency or 0.0) + down / line.down + computing + up / line.up
