"""What the machine under a run has: cores and memory."""

from __future__ import annotations

import os
import sys


def usable_cores() -> int:
    """Cores this process may run on, which in a container can be fewer than there are."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no sysconf on Windows, other names elsewhere
        return None
