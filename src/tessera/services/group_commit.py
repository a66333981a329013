"""Group commit: the one thread that writes a journal, for a leader, a helper and clients alike.

Changes run in that thread, one batch after the other; a batch is one transaction and one sync of
the disk (`docs/decisions/0016-group-commit.md`). What comes in while a batch is at work is a part
of it, as long as it has not taken `LONGEST`; what comes later is the next batch. A change is done
when its batch is on disk; if it does not come to disk, everybody of the journal goes back to where
the journal is, and has sent nothing. A change that fails in a way that nobody foresaw fails alone:
the others of its batch are made once more, each by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from tessera.errors import TesseraError
from tessera.services.journal import Journal, JournalFailed
from tessera.services.link import NumberConflict, OldCopy
from tessera.services.logs import JsonLog

T = TypeVar("T")
Change = Callable[[], Any]
Waiting = tuple[Change, asyncio.Future[Any]]

LONGEST: Final = 0.25
"""Seconds after which a batch takes no more changes: the first of many clients that train here
should not wait for the last one."""
REFUSALS: Final = (OldCopy, NumberConflict)
"""What a change may raise and stay in its batch: it has changed nothing beside what it says."""


class Journalled(Protocol):
    """A party whose state is in a journal."""

    journal: Journal

    @property
    def is_over(self) -> bool:
        """Whether it is in no round."""

    def load(self) -> None:
        """Go back to where the journal is."""


class GroupCommit:
    """Takes changes of these parties to the journal that they share."""

    def __init__(
        self, parties: Sequence[Journalled], retry: float, log: JsonLog, *, fold: bool = True
    ) -> None:
        """`retry`: seconds of rest after a batch that did not come to disk. `fold`: once nobody is
        in a round any more, erased secrets leave the log, too."""
        self._parties, self._retry, self._log = parties, retry, log
        self._journal = parties[0].journal
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._waiting: deque[Waiting] = deque()
        self._work: asyncio.Task[None] | None = None
        self._fold, self._in_rounds = fold, False
        self.on_batch: Callable[[bool], None] = lambda _: None
        """Called after each batch, with whether it is on disk."""
        self._alone = 0
        """So many changes at the head of those that wait are made one by one."""

    async def run(self, change: Callable[[], T]) -> T:
        """What the change returns or raises, once it is on disk. `JournalFailed`: it is not."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, future))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._write())
        return await future

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch: list[Waiting] = []
            try:
                outcomes = await loop.run_in_executor(self._thread, self._batch, batch)
            except JournalFailed as error:
                self._log("step failed", reason=str(error))
                self.on_batch(False)
                await asyncio.sleep(self._retry)
                self._fail(batch, error)
                continue
            except Exception as error:  # noqa: BLE001 (whoever waits for the change has it)
                if len(batch) == 1:
                    self._fail(batch, error)
                else:  # whose it was shows when they are made one by one
                    self._waiting.extendleft(reversed(batch))
                    self._alone = len(batch)
                continue
            except BaseException as error:  # the end
                self._fail([*batch, *self._waiting], error)
                raise
            self.on_batch(True)
            for (_, future), (result, refused) in zip(batch, outcomes, strict=True):
                if future.done():
                    continue
                if refused is not None:
                    future.set_exception(refused)
                else:
                    future.set_result(result)

    @staticmethod
    def _fail(batch: Sequence[Waiting], error: BaseException) -> None:
        for _, future in batch:
            if not future.done():
                future.set_exception(error)

    def _batch(self, taken: list[Waiting]) -> list[tuple[Any, TesseraError | None]]:
        """In the thread: one transaction. `taken` says which changes are in it."""
        outcomes: list[tuple[Any, TesseraError | None]] = []
        last = time.monotonic() + (0.0 if self._alone else LONGEST)
        self._alone = max(0, self._alone - 1)
        try:
            with self._journal.group():
                while self._waiting and (not taken or time.monotonic() < last):
                    taken.append(self._waiting.popleft())
                    try:
                        outcomes.append((taken[-1][0](), None))
                    except REFUSALS as refused:
                        outcomes.append((None, refused))
        except Exception:  # nothing of it has happened
            for party in self._parties:
                party.load()
            raise
        if self._fold:
            before, self._in_rounds = self._in_rounds, any(not p.is_over for p in self._parties)
            if before and not self._in_rounds:
                self._journal.fold()
        return outcomes

    def close(self) -> None:
        self._thread.shutdown()
