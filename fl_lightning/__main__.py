"""``python -m fl_lightning``: exit codes and the one line for bad input. Torch is imported only when a command runs."""

from __future__ import annotations

import sys

from fl_lightning.commands import answer_quickly
from fl_lightning.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code; an error that is not the user's passes through, with its traceback."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = answer_quickly(argv)
        if code is None:
            from fl_lightning.cli import run

            run(argv[0], argv[1:])
    except InputError as error:
        sys.stderr.write(f"fl_lightning: error: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:  # --help and --print_config: 0; after SIGTERM: 143
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
