"""``python -m fl_lightning.study.execute.worker fit ...`` is ``python -m fl_lightning fit ...`` that ends
when whoever started it is gone.

Its standard input is a pipe that its parent holds open and never writes to: when the parent dies, of
whatever, the pipe ends, and the run stops as after SIGTERM, with its checkpoint.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

GRACE = 60.0  # seconds to write the checkpoint


def leave_with_parent(pipe: int) -> None:
    """From a thread: wait for the end of ``pipe``, then stop this process."""
    while os.read(pipe, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(143)  # stuck outside Python


if __name__ == "__main__":
    threading.Thread(target=leave_with_parent, args=[sys.stdin.fileno()], daemon=True, name="parent").start()
    runpy.run_module("fl_lightning", run_name="__main__", alter_sys=True)
