"""What a server of a round hashes for each byte that it receives or sends; and the pace of AES.

Blocks' time is seconds divided by the seconds of one AES block on the kernel in use. Clocks and
neighbours of a machine change within a second, so the pace is taken many times during a round.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, Final

from tessera.crypto import kernel
from tessera.engines.simulator import Work
from tessera.ids import ClientId, Party
from tessera.protocols.machine import Outbound

_PACE_BLOCKS: Final = 1 << 21


class Pace:
    """Seconds of an AES block, taken whenever `work` is asked for more work."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._taken: list[float] = []

    def __call__(self, present: Collection[ClientId]) -> Any:
        begun = time.process_time()
        kernel.active().aes_limit(_PACE_BLOCKS)
        self._taken.append((time.process_time() - begun) / _PACE_BLOCKS)
        return self._work(present)

    @property
    def block(self) -> float:
        return median(self._taken)


class Metered:
    """A leader's or helper's round, with a meter of bytes: received and sent, and hashed."""

    def __init__(self, role: Any) -> None:
        self._role = role
        self.carried = self.hashed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)

    def start(self) -> list[Outbound]:
        return self._weighed(self._role.start)

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        self.carried += len(data)
        return self._weighed(lambda: self._role.receive(sender, data))

    def close_phase(self) -> list[Outbound]:
        return self._weighed(self._role.close_phase)

    @property
    def share(self) -> float:
        """Bytes hashed for each byte received or sent."""
        return self.hashed / max(1, self.carried)

    def _weighed(self, step: Callable[[], list[Outbound]]) -> list[Outbound]:
        with self._counting():
            out = step()
        self.carried += sum(len(message.data) for message in out)
        return out

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Within it every SHA-256 of the process is counted: a simulator takes step after step."""
        original = hashlib.sha256
        setattr(hashlib, "sha256", partial(_CountedHash, self, original))  # noqa: B010
        try:
            yield
        finally:
            setattr(hashlib, "sha256", original)  # noqa: B010


class _CountedHash:
    """Stands for `hashlib.sha256`, and tells the meter how much it is given."""

    def __init__(self, meter: Metered, original: Callable[[], Any], data: Any = b"") -> None:
        self._meter, self._running = meter, original()
        self.update(data)

    def update(self, data: Any) -> None:
        self._meter.hashed += len(data)
        self._running.update(data)

    def digest(self) -> bytes:
        return bytes(self._running.digest())
