"""What the operating system says of this process."""

from __future__ import annotations

import resource
import sys


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
