"""Changes of parties that share a journal: one sync for those that are ready, and all or none."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.services import group_commit
from tessera.services.group_commit import GroupCommit
from tessera.services.journal import Journal, JournalFailed, Moment
from tessera.services.link import NumberConflict
from tessera.services.logs import JsonLog


class Party:
    """As much of a party as the steps of a process ask for."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.loads, self.is_over = journal, 0, True

    def load(self) -> None:
        self.loads += 1


def run(folder: Path, use: Callable[[GroupCommit, Journal, Party], Any]) -> list[Moment]:
    """What `use` does with the steps of one party; the journal's commits."""
    moments: list[Moment] = []
    with Journal.open(folder, owner="client 1", plan=b"p" * 32) as journal:
        journal.watch = moments.append
        party = Party(journal)
        steps = GroupCommit([party], 0.01, JsonLog("", quiet=True))
        try:
            asyncio.run(asyncio.wait_for(use(steps, journal, party), 60))
        finally:
            steps.close()
    return moments


def test_what_comes_in_while_a_batch_is_at_work_is_a_part_of_it(tmp_path: Path) -> None:
    async def use(steps: GroupCommit, journal: Journal, _: Party) -> None:
        loop, later = asyncio.get_running_loop(), []

        def first() -> str:
            asyncio.run_coroutine_threadsafe(more(), loop).result()
            return "first"

        async def more() -> None:
            later.append(asyncio.create_task(steps.run(lambda: "second")))
            await asyncio.sleep(0)

        assert await steps.run(first) == "first"
        assert await later[0] == "second"

    assert run(tmp_path, use) == [Moment.BEFORE_COMMIT, Moment.AFTER_COMMIT]


def test_a_batch_that_takes_long_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "LONGEST", 0.0)

    async def use(steps: GroupCommit, journal: Journal, _: Party) -> None:
        assert await asyncio.gather(*(steps.run(lambda n=n: n) for n in range(4))) == [0, 1, 2, 3]

    assert run(tmp_path, use).count(Moment.AFTER_COMMIT) == 4, "each has its own, and none waits"


def test_a_change_that_is_refused_leaves_the_others_of_its_batch(tmp_path: Path) -> None:
    async def use(steps: GroupCommit, journal: Journal, _: Party) -> None:
        def refused() -> None:
            raise NumberConflict("not this one")

        found = await asyncio.gather(
            steps.run(lambda: journal.set_fact("client 1", "a", b"1")),
            steps.run(refused),
            steps.run(lambda: journal.set_fact("client 1", "b", b"2")),
            return_exceptions=True,
        )
        assert [type(each) for each in found] == [type(None), NumberConflict, type(None)]
        assert (journal.fact("client 1", "a"), journal.fact("client 1", "b")) == (b"1", b"2")

    run(tmp_path, use)


def test_if_a_batch_does_not_come_to_disk_none_of_it_has_happened(tmp_path: Path) -> None:
    async def use(steps: GroupCommit, journal: Journal, party: Party) -> None:
        def full() -> None:
            raise sqlite3.OperationalError("database or disk is full")

        found = await asyncio.gather(
            steps.run(lambda: journal.set_fact("client 1", "a", b"1")),
            steps.run(full),
            return_exceptions=True,
        )
        assert [type(each) for each in found] == [JournalFailed, JournalFailed]
        assert party.loads == 1, "it is where its journal is"
        assert journal.fact("client 1", "a") is None
        await steps.run(lambda: journal.set_fact("client 1", "a", b"1"))
        assert journal.fact("client 1", "a") == b"1"

    run(tmp_path, use)


def broken() -> None:
    raise ZeroDivisionError("nobody foresaw this")


def test_after_an_error_the_change_that_waits_next_is_made(tmp_path: Path) -> None:
    """It comes in while the one that fails is at work, and nobody asks for a third."""

    async def use(steps: GroupCommit, journal: Journal, party: Party) -> None:
        loop, later = asyncio.get_running_loop(), []

        def fails() -> None:
            asyncio.run_coroutine_threadsafe(more(), loop).result()
            broken()

        async def more() -> None:
            change = lambda: journal.set_fact("client 1", "a", b"1")  # noqa: E731
            later.append(asyncio.create_task(steps.run(change)))
            await asyncio.sleep(0)

        with pytest.raises(ZeroDivisionError):
            await steps.run(fails)
        await asyncio.wait_for(later[0], 10)
        assert journal.fact("client 1", "a") == b"1"
        assert party.loads == 1, "what failed has left nothing"

    run(tmp_path, use)


@pytest.mark.parametrize("at", range(4))
def test_an_error_is_that_of_its_own_change_and_the_others_come_to_disk(
    at: int, tmp_path: Path
) -> None:
    async def use(steps: GroupCommit, journal: Journal, party: Party) -> None:
        def good(n: int) -> int:
            journal.set_fact("client 1", str(n), b"1")
            return n

        changes: list[Callable[[], Any]] = [lambda n=n: good(n) for n in range(3)]
        changes.insert(at, broken)
        found = await asyncio.gather(*map(steps.run, changes), return_exceptions=True)
        assert isinstance(found.pop(at), ZeroDivisionError)
        assert found == [0, 1, 2]
        assert all(journal.fact("client 1", str(n)) == b"1" for n in range(3))

    run(tmp_path, use)


def test_an_error_while_a_batch_is_written_is_that_of_its_own_change(tmp_path: Path) -> None:
    """A state that cannot be encoded shows at the end of the step, when it is written."""

    async def use(steps: GroupCommit, journal: Journal, party: Party) -> None:
        found = await asyncio.gather(
            steps.run(lambda: journal.set_fact("client 1", "a", b"1")),
            steps.run(lambda: journal.before_commit("client 2", broken)),
            steps.run(lambda: journal.set_fact("client 1", "b", b"2")),
            return_exceptions=True,
        )
        assert [type(each) for each in found] == [type(None), ZeroDivisionError, type(None)]
        assert (journal.fact("client 1", "a"), journal.fact("client 1", "b")) == (b"1", b"2")

    run(tmp_path, use)
