"""A round's time is its work: nobody waits for a poll, for a deadline, or for who is not there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from rounds.population import plan
from services.one_loop import NEVER, NO_WAITS, OneLoop
from tessera.ids import ClientId, RoundId
from tessera.plan import ServicePlan
from tessera.services.http.presence import GRACE, Presence

SCHEMES = ["secure-fedavg", "two-server", "secure-submodel"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("enrolled", [4, 11])
def test_with_nobody_missing_nothing_waits_for_a_poll_or_a_deadline(
    scheme: str, enrolled: int, tmp_path: Path
) -> None:
    """The clock stands still and a poll takes for ever: every wait would be the last one."""

    async def rounds() -> None:
        made = OneLoop(plan(scheme, cohort=4), enrolled, tmp_path, rounds=4)
        there: list[int] = []
        made.conductor._log = lambda event, **facts: (  # type: ignore[assignment]
            there.append(facts["there"]) if event == "round opened" else None
        )
        made.start()
        if scheme == "two-server":
            made.help()
        made.join(range(enrolled))
        try:
            await made.until(lambda: made.conductor.finished)
            leader = made.conductor.leader
            assert leader is not None and leader.course.next_round == 4
            assert there[-1] == enrolled, "who waits in a long poll counts when a round opens"
            for number in range(4):
                assert '"RoundFinished"' in leader.outcome(RoundId(number))
        finally:
            await made.close()

    asyncio.run(rounds())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_is_enrolled_and_off_costs_nothing(scheme: str, tmp_path: Path) -> None:
    """Of ten clients three are off; cohorts of four are drawn among the others."""

    async def rounds() -> None:
        made = OneLoop(plan(scheme, cohort=4), 10, tmp_path, rounds=5)
        made.start()
        if scheme == "two-server":
            made.help()
        made.join(range(7))
        try:
            await made.until(lambda: made.conductor.finished)
            leader = made.conductor.leader
            assert leader is not None
            for number in range(5):
                assert '"survivors": 4' in leader.outcome(RoundId(number))
        finally:
            await made.close()

    asyncio.run(rounds())


def test_who_is_off_is_waited_for_once(tmp_path: Path) -> None:
    """A cohort is all there are, and one is off: the first round waits for it, no later one does,
    and it is in the next round once it comes."""
    now = [0.0]

    async def rounds() -> None:
        deadlines = ServicePlan(join=50.0, phase=NEVER, poll=NEVER, retry=0.01)
        made = OneLoop(
            plan("secure-fedavg", cohort=5, security={"dropout": 0.3}),
            5,
            tmp_path,
            deadlines=deadlines,
            clock=lambda: now[0],
        )
        conductor = made.conductor
        made.start()
        made.join(range(4))
        try:
            await made.until(lambda: len(conductor.presence.there) == 4)
            await asyncio.sleep(0.2)
            assert conductor.shown["round"] is None, "the fifth may come"
            now[0] = 51.0
            conductor._wake.set()
            leader = conductor.leader
            assert leader is not None
            await made.until(lambda: leader.course.next_round >= 4)
            assert now[0] == 51.0
            made.join([4])
            await made.until(lambda: '"survivors": 5' in leader.outcome(leader.round_id or 0))
        finally:
            await made.close()

    asyncio.run(rounds())


def test_who_is_there_by_a_scripted_clock() -> None:
    now = [0.0]
    presence, one, two = Presence(20.0, lambda: now[0]), ClientId(1), ClientId(2)
    first, second = object(), object()
    presence.asked(one)
    presence.asked(two)
    presence.waits(one, None, first)
    assert presence.there == {one, two}
    assert presence.free(lambda _: None) == {one}
    assert presence.free(lambda _: RoundId(0)) == frozenset(), "it is about to join that one"
    now[0] = 20.0 + GRACE
    assert one in presence.there
    now[0] += 0.1
    assert not presence.there
    presence.asked(one)
    presence.waits(one, None, second)
    presence.lost(one, first)
    assert one in presence.there, "an old connection ends, and it has another"
    presence.lost(one, second)
    assert not presence.there
    presence.asked(one)
    presence.give_up([one])
    assert not presence.there and presence.missed == {one}
    presence.asked(one)
    assert presence.there == {one} and not presence.missed


def test_a_leader_that_is_started_again_has_the_cohort_that_was_drawn(tmp_path: Path) -> None:
    """Who was there follows from no seed: the cohort is in the journal."""

    async def rounds() -> None:
        made = OneLoop(plan("secure-fedavg", cohort=4), 9, tmp_path, deadlines=NO_WAITS)
        leader = made._load()
        there = {ClientId(c) for c in (1, 3, 4, 6, 8)}
        leader.open_round(there)
        drawn = leader.drawn
        assert drawn is not None and set(drawn.named) < there
        leader.journal.close()
        again = made._load()
        assert again.drawn is not None and again.drawn.named == drawn.named
        again.stop("to the next one")
        again.open_round({ClientId(0), ClientId(2)})
        assert again.drawn is not None and {0, 2} < set(again.drawn.named)
        assert again.absent == set(again.drawn.named) - {0, 2}
        again.journal.close()

    asyncio.run(rounds())
