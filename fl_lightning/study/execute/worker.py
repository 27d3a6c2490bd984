"""``python -m fl_lightning.study.execute.worker fit ...`` is ``python -m fl_lightning fit ...``
that ends when the process that started it is gone.

Its standard input is a pipe that its parent holds open and never writes to. When the parent dies,
for any reason, the pipe ends, and the run stops as after SIGTERM, with its checkpoint.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

STOP_SECONDS = 60.0
"""Seconds that the run has to write its checkpoint."""


def leave_with_parent(pipe: int) -> None:
    """Wait for the end of ``pipe``, then stop this process; it is called in a thread."""
    while os.read(pipe, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os._exit(143)  # stuck outside Python


if __name__ == "__main__":
    threading.Thread(
        target=leave_with_parent, args=[sys.stdin.fileno()], daemon=True, name="parent"
    ).start()
    runpy.run_module("fl_lightning", run_name="__main__", alter_sys=True)
