"""Programs started in folders of a user's, without the seconds of imports: a process that has
imported everything but ``callbacks`` and forks one child for each. Talks JSON lines over its pipes.

    {"folder": F, "main": [ARGUMENT, ...]}     as ``python -m fl_lightning`` in F
    {"folder": F, "script": TEXT}              as ``python -c`` in F

The answer: exit status, standard output, standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path


def child(request: dict) -> int:
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]  # where Python has the working directory
    for stream, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(f"../{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), stream)
    try:
        if "script" in request:
            exec(request["script"], {"__name__": "__main__"})
            return 0
        from fl_lightning.__main__ import main

        return main(request["main"])
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def serve() -> None:
    import torch

    import fl_lightning.cli.parser  # noqa: F401

    torch.set_num_threads(1)
    assert "callbacks" not in sys.modules
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(request)
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        streams = [
            Path(request["folder"], "..", name).read_text() for name in ("out.txt", "err.txt")
        ]
        print(json.dumps([os.waitstatus_to_exitcode(status), *streams]), flush=True)  # noqa: T201


if __name__ == "__main__":
    serve()
