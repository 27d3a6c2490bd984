"""Keep the memory that one training step frees for the next one."""

from __future__ import annotations

import ctypes
import sys

MMAP_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -4, -3, -1, -2  # of <malloc.h>
LARGE_BYTES = 2**25  # the largest threshold that glibc takes


def keep_freed_memory(large: bool = True) -> None:
    """Ask glibc not to return freed blocks to the system: each step of a large network would fault
    the same pages in again.

    The process then stays as large as its largest step. Does nothing where there is no glibc.

    Args:
        large: whether blocks of more than 32 MiB are kept too. Among uploads of such a size they
            leave holes that nothing else fits into.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if large:
        mallopt(MMAP_MAX, 0)
    else:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)
    mallopt(TRIM_THRESHOLD, 2**31 - 1)
    mallopt(TOP_PAD, 2**26)
