"""A round's parameters: what cannot work is refused before anything is sent."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

import pairs
from tessera.crypto.cuckoo import STASH_ROWS, bins_for
from tessera.crypto.field import Field
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.protocols.pair.params import PairParams, PairTable, Read, Servers, Write


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": 0}, "of 0 rows"),
        ({"name": 1 << 16}, "over 65,535"),
        ({"max_rows": 0}, "may hold 0 of 40"),
        ({"max_rows": 41}, "may hold 41 of 40"),
        ({"rows": 2, "max_rows": 2}, "cannot be hashed to 3 bins"),
        ({"row_bytes": 0, "words": 0}, "neither read nor written"),
        ({"words": -1}, "-1 words"),
        ({"stash": -1}, "a stash of -1"),
        ({"stash": 1, "read": Read.WHOLE, "write": Write.DENSE}, "a stash of 1"),
        ({"stash": 1, "rows": STASH_ROWS + 1}, "covers the whole table"),
        ({"ids": pairs.ids(1, 2, 3)}, "3 ids for 40 rows"),
        ({"ids": pairs.ids(*range(38), 50, 50)}, "sorted"),
    ],
)
def test_a_table_that_cannot_work_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        pairs.table(**change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"plan_hash": b"short"}, "plan hash"),
        ({"round_id": RoundId(1 << 64)}, "round"),
        ({"clients": 1}, "cohort of 1"),
        ({"min_cohort": 1}, "one client's own rows"),
        ({"corrupt": 1}, "with 1 corrupt"),
        ({"corrupt": 3}, "3 corrupt clients of 3"),
        ({"corrupt": -1}, "-1 corrupt"),
        ({"min_cohort": 4}, "min_cohort 4 of a cohort of 3"),
        ({"row_limit": 39}, "the limit is 39"),
        ({"group": Ring(16)}, "no values in z2\\^16"),
        ({"group": Field(31)}, "no values in"),
        ({"dense": -1}, "-1 dense words"),
        ({"dense": 1 << 27}, "is over"),
        ({"dense_bytes": -1}, "-1 bytes"),
        ({"dense_bytes": 1 << 28}, "too many to be read whole"),
    ],
)
def test_a_round_that_cannot_work_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        pairs.params(**change)


def test_tables_ascend_and_there_is_something_to_do():
    with pytest.raises(ConfigError, match="must ascend"):
        pairs.params(pairs.table(name=2), pairs.table(name=1))
    with pytest.raises(ConfigError, match="neither tables nor dense words"):
        PairParams(**_settings(tables=(), dense=0))


def test_what_goes_into_one_message_is_counted_over_all_tables():
    whole = [pairs.small_table(1 << 25, name=name, words=0) for name in range(2)]
    pairs.params(whole[0])
    with pytest.raises(ConfigError, match="too many to be read whole"):
        pairs.params(*whole)
    shared = [pairs.small_table(1 << 24, name=name, words=3, row_bytes=0) for name in range(2)]
    pairs.params(shared[0])
    with pytest.raises(ConfigError, match="bytes of a message"):
        pairs.params(*shared)


def test_the_two_servers_are_two():
    pinned = pairs.servers()
    with pytest.raises(ConfigError, match="sign with one key"):
        replace(pinned, helper=pinned.leader)
    with pytest.raises(ConfigError, match="sealing key is none"):
        replace(pinned, box=bytes(32))
    with pytest.raises(ConfigError, match="32 bytes"):
        Servers(leader=b"", helper=pinned.helper, box=pinned.box)


def _settings(**change):
    base = pairs.params()
    return {f.name: getattr(base, f.name) for f in fields(base)} | change


def test_every_parameter_is_in_the_context():
    """Two parties who know different things do not agree on a single signature or box."""
    other = Servers(
        leader=pairs.servers().helper, helper=pairs.servers().leader, box=pairs.servers().box
    )
    changes = {
        "federation": "another",
        "round_id": RoundId(13),
        "plan_hash": bytes(32),
        "cohort": 4,
        "min_cohort": 3,
        "group": Ring(33),
        "servers": other,
        "dense": 1,
        "dense_bytes": 1,
    }
    seen = {pairs.params().context}
    for name, value in changes.items():
        seen.add(PairParams(**_settings(**{name: value})).context)
    wider = {"cohort": 5, "min_cohort": 5}
    assert len({PairParams(**_settings(corrupt=c, **wider)).context for c in range(3)}) == 3
    tables = [
        {"name": 1},
        {"rows": 41},
        {"max_rows": 4},
        {"row_bytes": 7},
        {"words": 4},
        {"read": Read.WHOLE},
        {"write": Write.DENSE},
        {"stash": 1},
        {"ids": np.arange(40, dtype=np.uint64)},
        {"ids": np.arange(1, 41, dtype=np.uint64)},
    ]
    for change in tables:
        seen.add(pairs.params(pairs.table(**change)).context)
    assert len(seen) == 1 + len(changes) + len(tables)
    assert pairs.params() == pairs.params() and hash(pairs.params()) == hash(pairs.params())


def test_bins_follow_from_the_plan_and_not_from_a_clients_rows():
    spec = pairs.table(1000, 32)
    assert spec.bins == bins_for(32)
    assert pairs.table(1000, 32, stash=2).bins == bins_for(32, stash=2)


def test_ids_lead_to_rows_of_the_domain_and_back():
    narrow = PairTable(table=0, rows=3, max_rows=3, row_bytes=1, ids=pairs.ids(5, 70, 2**63))
    assert narrow.index(pairs.ids(2**63, 5)).tolist() == [2, 0]
    assert narrow.named(np.array([1])).tolist() == [70]
    whole = pairs.table()
    assert whole.index(pairs.ids(0, 39)).tolist() == [0, 39]
    assert whole.named(np.array([7])).tolist() == [7]
    for spec, stranger in ((narrow, 6), (narrow, 2**64 - 1), (whole, 40), (whole, 2**64 - 1)):
        with pytest.raises(MisuseError, match="not in the round's domain"):
            spec.index(pairs.ids(stranger))
