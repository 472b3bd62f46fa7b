"""What the operating system says of this process."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def peak_resident_bytes() -> int:
    """The most memory that was ever resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """The memory that is resident now, or 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def allocated_bytes() -> int:
    """What the C library has given out and not got back, tensors on the CPU among it; 0 where it does not say, as it
    does from glibc 2.33 on (mallinfo2)."""
    told = _mallinfo()
    if told is None:
        return 0
    found = told()
    return int(found.uordblks) + int(found.hblkhd)


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2; uordblks: in use of its arenas, hblkhd: of what is mapped alone."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )


@cache
def _mallinfo() -> Callable[[], Any] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    function.restype = _Mallinfo
    return function
