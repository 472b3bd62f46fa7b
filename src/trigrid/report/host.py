"""What the operating system says of this process."""

from __future__ import annotations

import resource
import sys


def peak_resident_bytes() -> int:
    """The most memory that was ever resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
