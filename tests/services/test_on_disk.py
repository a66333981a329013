"""Before a message leaves, what belongs to it is on disk: a second connection to its sender's
journal finds it there at the moment in which the message is handed over.

The table of `docs/threat-model.md` and `services/journal.py`, row by row. Crash points show that
nothing else comes out when somebody is killed; here one looks at what is there.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from rounds.population import plan
from services.service_lab import Lab
from services.tap import Tap
from tessera import wire
from tessera.ids import HELPER, SERVER
from tessera.plan import TwoServerPlan
from tessera.services.journal import NAME
from tessera.services.link import Numbered

CASES: Final = {
    "secure-submodel, active": plan("secure-submodel", cohort=3, security={"threat": "active"}),
    "two-server, checked": plan(
        "two-server", cohort=3, two_server=TwoServerPlan(domain="whole", write="dpf")
    ),
    "two-server, keys that last": plan(
        "two-server", cohort=3, two_server=TwoServerPlan(domain="whole", key_rounds=2)
    ),
}
ROUNDS: Final = 2
TWO_SERVERS: Final = {"Query", "HandshakeNonce", "HelperAnswer", "SumShare", "OpenedSum"}
ONE_SERVER: Final = {"Advert", "ShareBoxes", "RevealedSet", "MaskedInput", "RevealedShares"}
EXPECTED: Final = {
    "secure-submodel, active": ONE_SERVER
    | {"ConsistencySignature", "Roster", "SurvivorList", "Download"},
    "two-server, checked": TWO_SERVERS | {"CheckCoin"},
    "two-server, keys that last": TWO_SERVERS | {"WriteReport"},
}


class OnDisk:
    """What a sender's journal has."""

    def __init__(self, folder: Path, party: str) -> None:
        self._path, self.party = folder / party / NAME, party

    def one(self, statement: str, *values: Any) -> Any:
        with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as database:
            found = database.execute(statement, values).fetchone()
        return None if found is None else found[0]

    def count(self, table: str, condition: str = "1", *values: Any) -> int:
        return int(self.one(f"SELECT COUNT(*) FROM {table} WHERE {condition}", *values))

    def fact(self, name: str) -> bytes | None:
        sql = "SELECT value FROM fact WHERE party = ? AND name = ?"
        found: bytes | None = self.one(sql, self.party, name)
        return found


Check = Callable[[OnDisk, int], bool]


def has_role(disk: OnDisk, round_id: int) -> bool:
    """Its state, with its root or its one list, is of this round."""
    sql = "SELECT length(snapshot) FROM role WHERE party = ? AND round_id = ?"
    return bool(disk.one(sql, disk.party, round_id))


def has_reports(disk: OnDisk, least: int) -> bool:
    return disk.count("report", "CAST(id AS TEXT) LIKE 'report %'") >= least


def has_period(disk: OnDisk, _: int) -> bool:
    mine = f"{disk.party} in %"
    return (
        disk.count("period", "federation LIKE ?", mine)
        == 1
        == disk.count("real_set", "federation LIKE ?", mine)
    )


CLIENT: Final[dict[str, Check]] = {
    "Advert": lambda disk, r: (
        disk.fact("last round") == str(r).encode()
        and disk.count("charge", "party = ?", disk.party) > r
    ),
    "ShareBoxes": has_role,
    "RevealedSet": has_period,
    "MaskedInput": has_period,
    "ConsistencySignature": has_role,
    "RevealedShares": has_role,
    "Query": lambda disk, r: disk.fact("last round") == str(r).encode(),
    "WriteReport": has_role,
    "Hint": lambda disk, _: disk.fact("keys") is not None,
}
LEADER: Final[dict[str, Check]] = {
    "Roster": has_role,
    "SurvivorList": has_role,
    "IncludedList": has_role,
    "Closing": has_role,
    "OpenedSum": lambda disk, r: (
        disk.one("SELECT round_id FROM model_state") == r
        and disk.count("event", "round_id = ?", r) == 1
    ),
    "RoundOver": lambda disk, r: disk.count("event", "round_id = ?", r) == 1,
    "Download": lambda disk, r: (disk.one("SELECT round_id FROM model_state") or 0) >= r - 1,
}
HELPERS: Final[dict[str, Check]] = {
    "HandshakeNonce": lambda disk, r: (
        disk.count("report", "id = ?", f"round {r:020}".encode()) == 1
    ),
    "HelperAnswer": lambda disk, r: has_reports(disk, 1),
    "CheckCoin": has_role,
    "SumShare": lambda disk, r: (
        has_reports(disk, 3)
        and disk.count("report", "CAST(id AS TEXT) LIKE ?", f"share {r:020} %") == 1
    ),
}


class Watched(Tap):
    """A tap that looks at the sender's disk when a message is handed over."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.seen: Counter[str] = Counter()

    def saw(self, round_id: int, sender: str, receiver: str, message: Numbered) -> None:
        super().saw(round_id, sender, receiver, message)
        disk, kind = OnDisk(self._folder, sender), wire.kind_of(message.data)
        name = "" if kind is None else kind.__name__
        stored = disk.one(
            "SELECT c.data FROM outgoing o JOIN content c ON c.id = o.content "
            "WHERE o.party = ? AND o.peer = ? AND o.number = ? AND o.held = 0",
            sender,
            receiver,
            message.number,
        )
        assert stored == message.data, f"{sender}'s {name}: the very bytes"
        sql = "SELECT round_id FROM link WHERE party = ? AND peer = ?"
        assert disk.one(sql, sender, receiver) == round_id, f"{sender}'s {name}: its round"
        assert has_role(disk, round_id), f"{sender}'s {name}: its root"
        checks = LEADER if sender == SERVER else HELPERS if sender == HELPER else CLIENT
        if (check := checks.get(name)) is not None:
            assert check(disk, round_id), f"{sender}'s {name} in round {round_id}"
            self.seen[name] += 1


@pytest.mark.parametrize("case", CASES)
def test_what_belongs_to_a_message_is_on_disk_before_it_leaves(case: str, tmp_path: Path) -> None:
    lab = Lab(CASES[case], tmp_path / "lab")
    tap = lab.tap = Watched(lab.folder)
    lab.run(ROUNDS)
    missing = EXPECTED[case] - tap.seen.keys()
    assert not missing, "what never leaves is not looked at"
    lab.close()
