"""One member is left behind: it trains less often than the others, so that its rows move less.

The server goes on without a member for some epochs (it opens nothing in them), with the member's
last signature in the place of the one that is missing, and then asks everybody again. What opens
then would show whose own vector is behind. Three lines are in the way, and each alone is enough:
epochs are assigned in their order, a certificate has everybody's signature over one link, and masks
name a link that has the whole past in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import pytest

from lying_server import (
    CERTIFICATE,
    CHAIN,
    NUMBER,
    SIZE,
    Attack,
    B,
    Floats,
    LyingServer,
    attacked,
    off,
    plan_of,
)
from tessera.errors import ServerFault
from tessera.ids import ClientId
from tessera.plan.sections import GroupsPlan

FEW, ALL = 2, 30  # groups of ten
PAST: Final = {"number": NUMBER, "certificate": CERTIFICATE, "chain": CHAIN}


def going_on_without(server: LyingServer, victim: ClientId, epochs: int) -> None:
    """The others train; their certificate has what the victim signed before."""
    others = [c for c in server.group.members if c != victim]
    for _ in range(epochs):
        server.collect(dict.fromkeys(others, server.fixed()))


def skipped(epochs: int) -> Attack:
    def attack(server: LyingServer, victim: ClientId) -> Floats | None:
        going_on_without(server, victim, epochs)
        return server.epoch()

    return attack


def border(server: LyingServer, victim: ClientId) -> Floats | None:
    """The last epoch of a period is certified to nine; then all begin the next one."""
    going_on_without(server, victim, 1)
    server.begin_period()
    server.epoch()
    return server.epoch()


ATTACKS: Final[Mapping[str, Attack]] = {
    "an epoch skipped for one member": skipped(1),
    "a member kept waiting for 3 epochs": skipped(3),
    "the border of a period": border,
}


def compared(name: str, groups: int, patch: pytest.MonkeyPatch) -> None:
    with patch.context() as patched:
        off(patched, PAST.values())
        found = attacked(ATTACKS[name], groups=groups, epochs=2)
    found.shown(name, "without number, certificate and chain")
    assert found.above > 0.5 and not found.refused and not found.closed
    found = attacked(ATTACKS[name], groups=groups, epochs=2)
    found.shown(name, "as shipped")
    assert len(found.refused) == 10 * groups and found.above <= B
    assert "a signature of another epoch or chain" in found.refused[0]


@pytest.mark.parametrize("name", ATTACKS)
def test_nobody_is_left_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(name, FEW, monkeypatch)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ATTACKS)
def test_nobody_of_300_is_left_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(name, ALL, monkeypatch)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("line", PAST)
def test_each_line_alone_is_enough(line: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    off(monkeypatch, [each for at, each in PAST.items() if at != line])
    found = attacked(ATTACKS[name], groups=1, epochs=2)
    assert len(found.refused) + found.closed == 10
    assert (found.closed == 10) == (line == "chain")


@pytest.mark.parametrize("due", [0, 2])
def test_a_period_that_the_plan_does_not_have_yet_is_refused(
    due: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members are told the same, so that masks would cancel: each keeps count by itself."""
    plan = replace(plan_of(), groups=GroupsPlan(size=SIZE, period=due))
    monkeypatch.setattr("lying_server.plan_of", lambda: plan)
    server = LyingServer.after(3, 2)  # the union, and one update
    early = server.copy()
    early.begin_period()
    with pytest.raises(ServerFault, match="began period 2 after 1 updates, and the plan has one"):
        early.epoch()
    server.epoch()
    server.begin_period()
    if not due:
        with pytest.raises(ServerFault, match="for good"):
            server.epoch()
        return
    server.epoch()
    assert server.epoch() is not None
    server.begin_period()  # and the count begins anew
    with pytest.raises(ServerFault, match="began period 3 after 1 updates"):
        server.epoch()
