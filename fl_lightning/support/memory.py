"""Keep the memory that one training step frees for the next one."""

from __future__ import annotations

import ctypes
import sys

MMAP_MAX, TRIM_THRESHOLD, TOP_PAD = -4, -1, -2  # of <malloc.h>


def keep_freed_memory() -> None:
    """Ask glibc not to return freed blocks to the system: each step of a large network would fault
    the same pages in again.

    The process then stays as large as its largest step. Does nothing where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(MMAP_MAX, 0)
    mallopt(TRIM_THRESHOLD, 2**31 - 1)
    mallopt(TOP_PAD, 2**26)
