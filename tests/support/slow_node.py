"""A node that answers its orders of round 2 only when a file is there.

It is started by:

    python tests/support/slow_node.py SUPERLINK FOLDER PARTITION OF CERTIFICATES KEY FILE
"""

import sys
import time
from pathlib import Path

from fl_lightning.deploy.flower import fleet, launch
from fl_lightning.deploy.node.build import builder
from fl_lightning.deploy.node.node import Node, NodeSettings
from fl_lightning.deploy.protocol.messages import Message


def main() -> None:
    address, folder, partition, of, certificates, key, file = sys.argv[1:]
    node = Node(NodeSettings(Path(folder), int(partition), int(of), name="slow"), builder())

    def answer(data: bytes) -> bytes:
        answered = node.answer(data)  # the clients are trained, and what they keep is written
        if Message.from_bytes(data).header.get("round") == 2:
            while not Path(file).exists():
                time.sleep(0.05)
        return answered

    launch.log_to_stderr()
    with launch.Started():
        home = Path(folder) / "flower"
        fleet.serve(
            address, answer, home, name="slow", root_certificates=certificates, private_key=key
        )


if __name__ == "__main__":
    main()
