"""What a node tells a server of an error: what is wrong, and nothing of its files or of where they
lie.

An error of a reader of files may quote them, and the server may have named the file. So messages of
code that reads no files are told whole, and of others the setting or the name of the file that they
begin with. All of it is in the node's own log.
"""

from __future__ import annotations

import os
import re
import traceback
from errno import EDQUOT, ENOSPC, EROFS
from types import FrameType

from fl_lightning.deploy.protocol.messages import MessageError
from fl_lightning.errors import ThreePartError

TOLD = (
    *("deploy", "methods", "privacy", "wire", "loop", "config.import_gate", "config.constraints"),
    *("data.apart", "data.base", "data.form", "data.partition"),
)
"""Parts of the project whose messages quote settings, numbers and names of classes, and no file."""
DISK = (ENOSPC, EDQUOT, EROFS)
"""Errors of a disk, which say nothing of its files."""
UNSAID = "this node cannot do what the configuration says"
LOG = "the node's log says more"
PATH = re.compile(
    r"(?<![\w.:/-])(?:~|[A-Za-z]:)?[/\\](?:[^\s'\",;:()\[\]]*[/\\])*([^\s'\",;:()\[\]/\\]*)"
)
SETTING = re.compile(r"(?:--)?((?:model|data|trainer|seed_everything)(?:\.\w+)*)\b")
PLACE = re.compile(r"(?:--data )?((?:~|[A-Za-z]:)?[/\\][^\n]*)")


def told(error: Exception) -> str:
    """Return what a server may know of an error, in one line."""
    if isinstance(error, MessageError):
        text = str(error)
    elif isinstance(error, OSError) and error.errno in DISK:
        text = f"the node's disk: {os.strerror(error.errno)}; {LOG}"
    elif not isinstance(error, ThreePartError):
        text = f"{type(error).__name__}; {LOG}"
    else:
        frame = _raised_in(error)
        module = frame.f_globals.get("__name__", "") if frame else ""
        if any(f"{module}.".startswith(f"fl_lightning.{part}.") for part in TOLD):
            given = _place(error.given) if PLACE.match(error.given) else error.given
            text = "; ".join(filter(None, [given, error.rule, error.instead]))
        else:
            text = "; ".join(filter(None, [_place(error.given), UNSAID, LOG]))
    return " ".join(PATH.sub(r"\1", " ".join(text.split())).split())


def _raised_in(error: Exception) -> FrameType | None:
    """Return where an error was raised; a function or a ``with`` that raises it for others does not
    count."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for_others = ("fl_lightning.errors", "contextlib")
    kept = [frame for frame in frames if frame.f_globals.get("__name__") not in for_others]
    return kept[-1] if kept else None


def _place(given: str) -> str:
    """Return the setting or the name of the file that a message begins with; empty where it is
    neither."""
    if match := SETTING.match(given):
        return match[1]
    if match := PLACE.match(given):
        path = re.split(r"[,:(;] ?", match[1])[0].strip()
        return re.split(r"[\\/]", path.rstrip("\\/"))[-1].split(" ")[0]
    return ""
