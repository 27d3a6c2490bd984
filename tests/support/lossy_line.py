"""A line between two network namespaces that delays packets and loses some: two TUN devices, whose
packets this process carries. A kernel with ``sch_netem`` does the same; many small kernels come
without.

    python tests/support/lossy_line.py NAMESPACE ADDRESS NAMESPACE ADDRESS SECONDS SHARE

``SECONDS`` is the delay of each packet in one direction, ``SHARE`` the share of packets that is
lost. On SIGTERM it prints how many packets it carried and lost. The devices end with this process.
"""

import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 1500


def device(name: str, namespace: str, address: str, peer: str) -> int:
    """Make a TUN device, move it into a namespace, and return its packets as a file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "netns", namespace], check=True)
    inside = ["ip", "-n", namespace]
    subprocess.run([*inside, "addr", "add", address, "peer", peer, "dev", name], check=True)
    subprocess.run([*inside, "link", "set", name, "mtu", str(MTU), "up"], check=True)
    return file


def carry(ends: tuple[int, int], seconds: float, share: float) -> None:
    """Carry packets until SIGTERM."""
    dice, waiting, carried, lost, number = random.Random(0), [], 0, 0, 0
    others = {ends[0]: ends[1], ends[1]: ends[0]}
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    while not stopped:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2
        for file in select.select(ends, [], [], min(pause, 0.2))[0]:
            packet = os.read(file, MTU + 100)
            if dice.random() < share:
                lost += 1
                continue
            number += 1
            heapq.heappush(waiting, (time.monotonic() + seconds, number, others[file], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, file, packet = heapq.heappop(waiting)
            try:
                os.write(file, packet)
                carried += 1
            except OSError:  # the device is down, or its queue is full: lost as on any line
                lost += 1
    sys.stdout.write(f"carried {carried} lost {lost}\n")


def main() -> None:
    one, its_address, other, other_address, seconds, share = sys.argv[1:]
    marks = [f"fl{os.getpid() % 10**6}{side}" for side in "ab"]
    ends = (
        device(marks[0], one, its_address, other_address),
        device(marks[1], other, other_address, its_address),
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(ends, float(seconds), float(share))


if __name__ == "__main__":
    main()
