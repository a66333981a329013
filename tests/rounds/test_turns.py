"""A message of the round's own is taken when it is due; at any other time the client leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from rounds.population import GOODS, federation, plan
from rounds.shops import Roles, finished, two_server_plan
from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ServerFault
from tessera.ids import SERVER, ClientId, RoundId
from tessera.plan import Plan
from tessera.rounds.client import ClientRound
from tessera.rounds.messages import Download, UnionOpened
from tessera.rounds.party import ClientRoundSetup
from tessera.simulation.faults import Delay
from tessera.simulation.views import Views

ME: Final = ClientId(0)
SEED: Final = b"roles"

ONE_SERVER: Final = ["fedavg", "submodel", "secure-fedavg", "secure-submodel"]
UNION_TAKEN: Final = {
    "secure-submodel": {"Resting"},
    # A survivor whose signature came too late gets no proof, and the union all the same.
    "two-server": {"AwaitingProof", "Finished"},
}
"""The states of the sum in which a client waits for the union, or has it."""


def settings_of(scheme: str) -> Plan:
    return two_server_plan({"domain": "union"}) if scheme == "two-server" else plan(scheme)


def sent_to_me(settings: Plan) -> list[tuple[str, bytes]]:
    """What the server sends to one client until the round ends: (kind, bytes), in order."""
    views = Views()
    fed = federation(settings, entropy_seed=SEED, views=views)
    finished(fed, 1)
    return [
        (seen.kind, seen.data)
        for seen in views.by_party[SERVER]
        if seen.direction == "sent" and seen.other == ME and seen.kind != "RoundOver"
    ]


class Replayed:
    """That client again: given the same messages it goes through the same states."""

    def __init__(self, settings: Plan) -> None:
        self.settings, self.messages = settings, sent_to_me(settings)

    def after(self, count: int) -> ClientRound:
        """The client once it has taken so many of them."""
        if self.settings.scheme == "two-server":
            role: ClientRound = Roles(self.settings).client()
        else:
            local = federation(self.settings).participants[ME].local
            role = ClientRound(
                ClientRoundSetup(
                    plan=self.settings,
                    round_id=RoundId(0),
                    party=ME,
                    local=local,
                    entropy=ScriptedEntropy(SEED),
                )
            )
        role.start()
        for _, data in self.messages[:count]:
            role.receive(SERVER, data)
        return role

    def place(self, kind: str) -> int:
        return next(at for at, (found, _) in enumerate(self.messages) if found == kind)

    def message(self, kind: str) -> bytes:
        return self.messages[self.place(kind)][1]


def assert_leaves(role: ClientRound, data: bytes, reason: str) -> None:
    with pytest.raises(ServerFault, match=reason) as caught:
        role.receive(SERVER, data)
    assert role.phase == "Left" and role.pending is None
    with pytest.raises(ServerFault) as again:
        role.receive(SERVER, data)
    assert again.value.reason == caught.value.reason


@pytest.mark.parametrize("scheme", ["secure-submodel", "two-server"])
def test_a_union_is_taken_after_the_sum_it_comes_from_and_never_before(scheme: str) -> None:
    replayed = Replayed(settings_of(scheme))
    union, at = replayed.message("UnionOpened"), replayed.place("UnionOpened")
    assert at > 2
    early = [n for n in range(at) if replayed.after(n).phase not in UNION_TAKEN[scheme]]
    assert early[:3] == [0, 1, 2]
    for count in early:
        assert_leaves(replayed.after(count), union, "not due")
    role = replayed.after(at)
    assert role.phase in UNION_TAKEN[scheme]
    role.receive(SERVER, union)
    assert role.receive(SERVER, union) == []  # a carrier's repetition
    opened: UnionOpened = wire.decode(union)
    other = replace(opened, tables={t: ids[1:] for t, ids in opened.tables.items()})
    assert_leaves(role, wire.encode(other), "not due")


@pytest.mark.parametrize("scheme", ["fedavg", "submodel", "secure-fedavg"])
def test_a_union_is_never_due_where_there_is_none(scheme: str) -> None:
    replayed = Replayed(plan(scheme))
    ids = np.array([1, 5], dtype=np.uint64)
    union = wire.encode(
        UnionOpened(round_id=RoundId(0), tables={replayed.settings.table_id("goods"): ids})
    )
    for count in range(len(replayed.messages)):
        assert_leaves(replayed.after(count), union, "not due")


def test_rows_that_were_not_named_are_not_taken() -> None:
    replayed = Replayed(plan("secure-submodel"))
    download, named = replayed.message("Download"), replayed.place("NextStage")
    for count in range(named + 1):
        assert_leaves(replayed.after(count), download, "not due")
    role = replayed.after(named + 1)
    role.receive(SERVER, download)
    assert role.pending is not None


@pytest.mark.parametrize("scheme", ONE_SERVER)
def test_a_download_of_the_wrong_length_ends_the_round_for_its_client(scheme: str) -> None:
    replayed = Replayed(plan(scheme))
    at = replayed.place("Download")
    good: Download = wire.decode(replayed.message("Download"))
    table = max(good.tables)
    for bad in (
        replace(good, dense=good.dense[:-1]),
        replace(good, dense=good.dense + b"\0"),
        replace(good, tables={**good.tables, table: good.tables[table][:-4]}),
        replace(good, tables={**good.tables, table: b""}),
    ):
        assert_leaves(replayed.after(at), wire.encode(bad), "bytes for")
    fewer = replace(good, tables={t: rows for t, rows in good.tables.items() if t != table})
    assert_leaves(replayed.after(at), wire.encode(fewer), "other tables")
    role = replayed.after(at)
    role.receive(SERVER, replayed.message("Download"))
    assert role.pending is not None
    assert_leaves(role, wire.encode(replace(good, dense=b"")), "not due")


def test_a_client_that_signs_too_late_still_gets_the_union() -> None:
    """An active server's proof goes to those who signed in time; the union to all who are in it."""
    settings = two_server_plan({"domain": "union"}, security={"threat": "active"})
    late = lambda _, cohort: [Delay(cohort[0], "consistency", seconds=1e6)]  # noqa: E731
    [done] = finished(federation(settings, faults=late), 1)
    assert done.survivors == settings.cohort


def test_a_lying_union_makes_the_client_leave_for_good() -> None:
    replayed = Replayed(plan("secure-submodel"))
    at, union = replayed.place("UnionOpened"), replayed.message("UnionOpened")
    opened: UnionOpened = wire.decode(union)
    far = {0: np.array([GOODS], dtype=np.uint64)}
    for bad, reason in (
        (wire.encode(replace(opened, tables=far)), "outside table 'goods'"),
        (wire.encode(replace(opened, tables={})), "other tables"),
        (wire.encode(replace(opened, round_id=RoundId(9))), "of round 9"),
        (union[:-1] + b"\x00", "message"),
    ):
        assert_leaves(replayed.after(at), bad, reason)


def test_the_same_union_or_download_again_is_ignored() -> None:
    replayed = Replayed(plan("secure-submodel"))
    role = replayed.after(replayed.place("Download") + 1)
    before, phase = role.pending, role.phase
    assert before is not None
    for kind in ("UnionOpened", "Download"):
        assert role.receive(SERVER, replayed.message(kind)) == []
    assert role.pending is before and role.phase == phase
