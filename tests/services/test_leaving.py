"""A member that leaves, or whose own deadline passes: its key is erased, its group is retired."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from services.group_lab import GroupLab, grouped
from services.service_lab import Killed
from tessera import wire
from tessera.ids import SERVER, ClientId
from tessera.protocols.epochs import messages
from tessera.protocols.epochs.messages import Leave
from tessera.protocols.epochs.server import LEFT
from tessera.rounds import select
from tessera.services.group_client import OWN_DEADLINE, OWN_WILL
from tessera.services.link import name_of

SIZE, DEADLINE = 4, 10_000.0


@contextmanager
def lab(folder: Path, **more: Any) -> Iterator[GroupLab]:
    plan = grouped(2 * SIZE, SIZE, groups={"deadline": DEADLINE}, **more)
    run = GroupLab(plan, folder / "services", 2 * SIZE)
    try:
        yield run
    finally:
        run.close()


def tell(run: GroupLab, client: ClientId) -> None:
    """What it has to say, until the leader has it."""
    while run.parties[client].outgoing:
        try:
            run.ask(client, run.parties[client].outgoing[0])
            run.parties[client].sent()
        except Killed as killed:
            run.restart(killed.party)


def with_one_missing(run: GroupLab) -> ClientId:
    """The first group has its union, but for one member, who has deposited its key."""
    *others, last = run.groups[0].members
    for client in (*others, last, *others):
        run.visit(client, once=True)
    assert run.leader.open[0].missing == 1
    return last


# --- what somebody learns who takes the device ----------------------------------------------------


def opened(run: GroupLab, member: Any, key: Any) -> set[int]:
    """The rows of those who have delivered, by the leader's running sum and this key; none if it
    does not open."""
    group, at = run.groups[0], run.leader._role(0).state.role.state
    keys = tuple(entry.mask_key for entry in at.last.entries)
    ring, length = at.link.header.ring, at.link.header.length
    total = at.total.copy()
    ring.iadd(total, messages.masked(ring.zeros(length), at.link, group, member, key, keys))
    plan = run.plan.group_plan
    decoded = plan.union_encoding(at.link.header.epoch).decode(total)
    if decoded.residual:
        return set()
    rows = select.opened_union(plan, at.link.header.epoch, decoded.ids)
    return {int(row) for each in rows.tables.values() for row in each}


def on_disk(run: GroupLab, client: ClientId) -> bytes:
    files = sorted((run.folder / name_of(client)).rglob("*"))
    return b"".join(each.read_bytes() for each in files if each.is_file())


def test_after_its_deadline_nobody_opens_what_others_have_delivered(tmp_path: Path) -> None:
    with lab(tmp_path) as run:
        last = with_one_missing(run)
        key = run.parties[last].role.state.member.state.root
        held = {int(row) for c in run.groups[0].members if c != last for row in holdings_of(run, c)}
        assert opened(run, last, key) == held, "whoever takes the key opens the sum of the others"
        assert key.reveal() in on_disk(run, last)
        run.now += DEADLINE
        run.parties[last].expire()
        assert run.parties[last].left == OWN_DEADLINE
        assert key.reveal() not in on_disk(run, last), "it is gone from the log, too"
        assert run.parties[last].role.phase == "Over"


def holdings_of(run: GroupLab, client: ClientId) -> Any:
    return run.parties[client].local.real["goods"]


def test_before_its_deadline_a_member_stays_whatever_the_leader_says(tmp_path: Path) -> None:
    """Its deadline is from when its key was made, and each delivery makes another."""
    with lab(tmp_path) as run:
        last = with_one_missing(run)
        other = run.groups[0].members[0]
        run.now += DEADLINE - 1_000
        for _ in range(3):  # nothing is due to it, as the leader says, and its time goes on
            run.parties[other].take(run.ask(other, run.parties[other].fetch()))
        assert run.parties[other].expires_in < 1_000
        run.restart(last)
        assert not run.parties[last].left
        for _ in range(2):  # its key again, and then the union
            run.visit(last, once=True)
        assert run.parties[last].expires_in > DEADLINE - 100, "it has delivered"


def test_a_deadline_that_passed_while_it_was_off_is_kept_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    with lab(tmp_path) as run:
        last = with_one_missing(run)
        run.kill(last)
        run.now += DEADLINE
        run.start(last)
        one = run.parties[last]
        assert one.left == OWN_DEADLINE and one.pending is None
        assert [wire.kind_of(data) for data in one.outgoing] == [Leave]


def test_a_kill_at_any_moment_of_expiring_leaves_no_key_and_tells_the_leader(
    tmp_path: Path,
) -> None:
    for after in range(12):
        with lab(tmp_path / f"{after}") as run:
            last = with_one_missing(run)
            key = run.parties[last].role.state.member.state.root
            run.now += DEADLINE
            run.kill_at = {(last, run.moments[last] + after), (SERVER, run.moments[SERVER] + after)}
            try:
                run.parties[last].expire()
            except Killed:
                run.restart(last)
            tell(run, last)
            run.kill_at = set()
            run.restart(last)
            assert run.parties[last].left == OWN_DEADLINE and not run.parties[last].outgoing
            assert key.reveal() not in on_disk(run, last)
            run.restart(SERVER)
            assert run.leader.retired == {0: LEFT}


# --- the leader is told ---------------------------------------------------------------------------


def test_a_group_is_retired_as_soon_as_a_member_has_left(tmp_path: Path) -> None:
    with lab(tmp_path) as run:
        run.ready()
        first, second = (group.members for group in run.groups)
        run.visit(first[0], once=True)
        run.parties[first[1]].leave()
        tell(run, first[1])
        assert run.leader.retired == {0: LEFT} and 0 not in run.leader.open
        assert run.parties[first[1]].left == OWN_WILL
        run.visit(first[0])
        assert run.parties[first[0]].retired == LEFT
        for _ in range(4):
            for client in second:
                run.visit(client)
        assert run.leader.next_round > 0, "the other group goes on"
        run.restart(SERVER)
        assert run.leader.retired == {0: LEFT}
        assert {each.closed for each in run.order() if each.part == 0} >= {-1}


def test_a_forged_or_replayed_leave_is_refused_by_name(tmp_path: Path) -> None:
    with lab(tmp_path) as run:
        run.ready()
        (mine, other, *_), (stranger, *_) = (group.members for group in run.groups)
        said = run.parties[mine]._setup.member.leave
        elsewhere = replace(run.parties[stranger]._setup.member.leave, sender=mine)
        refused = {
            "another client's name": (other, said),
            "invalid signature": (mine, replace(said, signature=bytes(64))),
            "left another group": (mine, elsewhere),
        }
        forged = replace(said, sender=other)
        for reason, (client, leave) in {**refused, "an invalid signature": (other, forged)}.items():
            answer = run.leader.take(client, wire.encode(leave))
            assert reason in answer.refused
        assert not run.leader.retired
        assert not run.leader.take(mine, wire.encode(said)).refused
        again = run.leader.take(mine, wire.encode(said))
        assert not again.refused and again.message, "the group's end, and nothing else"


def test_what_a_member_says_when_it_leaves_does_not_depend_on_why(tmp_path: Path) -> None:
    said = []
    for reason in ("its budget is spent", OWN_DEADLINE, OWN_WILL):
        with lab(tmp_path / reason) as run:
            last = with_one_missing(run)
            run.parties[last].decline(reason)
            said.append(list(run.parties[last].outgoing))
    assert said[0] == said[1] == said[2] and len(said[0]) == 1


def test_who_has_left_does_not_come_back(tmp_path: Path) -> None:
    with lab(tmp_path) as run:
        last = with_one_missing(run)
        run.parties[last].leave()
        tell(run, last)
        run.restart(last)
        run.visit(last)
        assert run.parties[last].left == OWN_WILL and not run.parties[last].outgoing
        assert np.all([each.missing for each in run.leader.open.values()])
