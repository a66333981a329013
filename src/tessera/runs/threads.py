"""Threads: a server's evaluations on all its processors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tessera.errors import ConfigError


class Threads:
    """Workers for a server that may use all its processors: the kernel lets other threads run.

    A simulated server has one worker, so that its seconds are those of one processor.
    """

    def __init__(self, count: int | None = None) -> None:
        """`count` threads; without it as many as there are processors."""
        self.count = (os.cpu_count() or 1) if count is None else count
        if self.count < 1:
            raise ConfigError(f"a server with {self.count} threads", hint="one or more")

    def run(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Make these calls at once; what the first of them raises is raised when all are done."""
        with ThreadPoolExecutor(self.count) as pool:
            under_way = [pool.submit(call) for call in calls]
        for one in under_way:
            one.result()
