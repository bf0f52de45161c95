"""Memory of received rows: taken from the kernel once, then used again.

ZMQ allocates each message anew. At a chunk's size glibc maps fresh pages for every message and
gives them back with it, and faulting them in costs more than copying the rows: on two cores the
wire loses a third of its speed. With higher thresholds freed messages stay in the heap.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_HEAP_BLOCK = 32 << 20
"""glibc accepts no more; the sender's window is not larger either."""
_KEPT_FREE = 128 << 20
"""Freed memory that each heap of the process may keep."""


def keep_freed_messages() -> bool:
    """Raise glibc's thresholds for the whole process; whether the C library knows them."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc: slower, nothing else
        return False
    done = bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK))
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_FREE)) and done
