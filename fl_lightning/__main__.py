"""``python -m fl_lightning``: exit codes and the one line for bad input. Torch is imported only when a
command runs."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC, EROFS
from typing import Any

from fl_lightning.cli.commands import TRACEBACK_VARIABLE, answer_quickly
from fl_lightning.errors import InputError, RunStopped


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code. A bug passes through with its traceback, unless the run's
    ``run.log`` has it."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = answer_quickly(argv)
        if code is None:
            # threads that wait must not spin: on a busy machine that costs many times what it saves
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            with no_collections():
                from fl_lightning.cli.parser import run

            run(argv[0], argv[1:])
    except InputError as error:
        return _one_line(error, str(error), code=2)
    except RunStopped as error:
        return _one_line(error, str(error), code=1)
    except OSError as error:
        if hasattr(error, "run_log"):
            return _bug(error)
        if error.errno not in (ENOSPC, EDQUOT, EROFS):
            raise
        return _one_line(
            error, f"{error}; a run needs room to write; make some and continue with --ckpt_path", code=1
        )
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:  # --help and --print_config: 0; after SIGTERM: 143
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        if not hasattr(error, "run_log"):
            raise
        return _bug(error)
    return code or 0


def _bug(error: Exception) -> int:
    """One line about an error whose traceback is in the log of the run."""
    where = f"its traceback is in {error.run_log}; {TRACEBACK_VARIABLE}=1 prints it here"  # type: ignore[attr-defined]
    return _one_line(error, f"{type(error).__name__}: {error}; {where}", code=1)


def _one_line(error: Exception, message: str, *, code: int) -> int:
    """Write the message as one line, and the traceback where the user asks for it, both without secrets;
    return the exit code."""
    from fl_lightning.support.redaction import redact, show_exception

    _let_rank_zero_speak()
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        show_exception(type(error), error, error.__traceback__)
    sys.stderr.write(f"fl_lightning: error: {' '.join(redact(message).split())}\n")
    return code


@contextmanager
def no_collections() -> Iterator[None]:
    """Imports make 700 000 objects that stay: looking among them for garbage, again and again, would take a
    quarter of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # now they count as old, and the next collection is not one of them all
        gc.enable()


def _let_rank_zero_speak() -> None:
    """All processes of a run find the same fault; rank 0 says it, and its end is that of the others. Alone
    with it, this one says it."""
    if int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_PROCID") or 0):
        time.sleep(10)


def _show_exception(*error: Any) -> None:
    from fl_lightning.support.redaction import show_exception

    show_exception(*error)


if __name__ == "__main__":
    sys.excepthook = _show_exception
    sys.exit(main())
