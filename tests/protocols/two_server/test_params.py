"""A round's parameters: what cannot work is refused before anything is sent."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import two_servers
from tessera import wire
from tessera.crypto.cuckoo import STASH_ROWS, SimpleTable, bins_for
from tessera.crypto.dpf import BITS, SELECTORS, Forest, Values
from tessera.crypto.field import Field
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.protocols.two_server import params as params_module
from tessera.protocols.two_server.params import (
    Read,
    Servers,
    TwoServerParams,
    TwoServerTable,
    Write,
)


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
        ({"ids": two_servers.ids(1, 2, 3)}, "3 ids for 40 rows"),
        ({"ids": two_servers.ids(*range(38), 50, 50)}, "sorted"),
    ],
)
def test_a_table_that_cannot_work_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        two_servers.table(**change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"plan_hash": b"short"}, "plan hash"),
        ({"round_id": RoundId(1 << 64)}, "round"),
        ({"clients": 1}, "cohort of 1"),
        ({"min_cohort": 1}, "hide one client's rows"),
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
        two_servers.params(**change)


def test_tables_ascend_and_there_is_something_to_do():
    with pytest.raises(ConfigError, match="must ascend"):
        two_servers.params(two_servers.table(name=2), two_servers.table(name=1))
    with pytest.raises(ConfigError, match="neither tables nor dense words"):
        TwoServerParams(**_settings(tables=(), dense=0))


def test_what_goes_into_one_message_is_counted_over_all_tables():
    whole = [two_servers.small_table(1 << 25, name=name, words=0) for name in range(2)]
    two_servers.params(whole[0])
    with pytest.raises(ConfigError, match="too many to be read whole"):
        two_servers.params(*whole)
    shared = [
        two_servers.small_table(1 << 24, name=name, words=3, row_bytes=0) for name in range(2)
    ]
    two_servers.params(shared[0])
    with pytest.raises(ConfigError, match="bytes of a message"):
        two_servers.params(*shared)


@pytest.mark.parametrize(
    ("settings", "says", "hint"),
    [
        ({"rows": 1 << 20, "max_rows": 1 << 18, "row_bytes": 1024}, "the answer to a", "max_rows"),
        # One server's half of it is a message, both are not.
        ({"rows": 1 << 18, "max_rows": 1 << 16, "row_bytes": 1600}, "the answer to a", "max_rows"),
        ({"rows": 1 << 18, "max_rows": 1 << 18, "words": 200}, "a report", "max_rows"),
        # The words are a message, and which rows they are of makes it too long.
        ({"rows": 4_190_000, "max_rows": 64, "words": 16}, "a share of", "union"),
    ],
)
def test_what_would_not_fit_a_message_is_refused_before_it_is_made(settings, says, hint):
    with pytest.raises(ConfigError, match=f"{says}.*bytes of a message") as caught:
        two_servers.params(two_servers.table(**settings))
    assert hint in caught.value.hint
    fewer = {"rows": settings["rows"] // 2, "max_rows": settings["max_rows"] // 4}
    two_servers.params(two_servers.table(**settings | fewer))


def test_parts_of_one_message_count_together():
    whole = two_servers.small_table(1 << 24, name=9, row_bytes=10, words=0)
    half = two_servers.table(1 << 18, 1 << 16, row_bytes=700)
    two_servers.params(half), two_servers.params(whole)
    with pytest.raises(ConfigError, match="the answer to a query"):
        two_servers.params(half, whole)
    keys, plain = two_servers.table(1 << 18, 1 << 18, words=100), {"dense": 1 << 25}
    two_servers.params(keys), two_servers.params(two_servers.table(), **plain)
    with pytest.raises(ConfigError, match="a report"):
        two_servers.params(keys, **plain)


def test_the_check_beside_every_row_counts():
    settings = {"rows": 1 << 18, "max_rows": 1 << 16, "row_bytes": 1570}
    two_servers.params(two_servers.table(**settings, read=Read.POINTS))
    with pytest.raises(ConfigError, match="the answer to a query"):
        two_servers.params(two_servers.table(**settings, read=Read.CHECKED))


LONG = {
    "Query": {"rows": 40_000, "max_rows": 1200, "row_bytes": 1, "words": 0},
    "QueryAnswers": {"rows": 6000, "max_rows": 1500, "row_bytes": 90, "words": 0},
    "WriteReport": {"rows": 20_000, "max_rows": 4000, "row_bytes": 0, "words": 1},
    "SumShare": {"rows": 60_000, "max_rows": 5, "row_bytes": 0, "words": 1},
}
"""Rounds in which a message of one kind is far longer than the small change around its content."""


@pytest.mark.parametrize("kind", LONG)
def test_no_message_is_longer_than_what_was_checked(kind, monkeypatch):
    """Where the limit is what this message takes, less the small change, the round is refused."""
    spec = two_servers.table(**LONG[kind])
    network = two_servers.Network.of(two_servers.params(spec, dense=1))
    header = network.handshake()
    if spec.row_bytes:
        network.reading(header)
        network.read({c: {0: two_servers.ids(1)} for c in network.clients})
    else:
        network.writing(header)
        rows = np.arange(spec.max_rows, dtype=np.uint64)
        network.write(
            {c: two_servers.update(network.params, {0: rows}, c) for c in network.clients}
        )
    longest = max(map(len, network.sent(kind)))
    spare = wire.DEFAULT_CAP - params_module.MAX_BYTES
    assert longest > 2 * spare
    monkeypatch.setattr(params_module, "MAX_BYTES", longest - spare - 1)
    with pytest.raises(ConfigError, match="bytes of a message"):
        two_servers.params(spec, dense=1)
    monkeypatch.setattr(params_module, "MAX_BYTES", longest * 3 // 2)
    two_servers.params(spec, dense=1)


VALUES = st.sampled_from(
    [BITS, SELECTORS, *(Values(Ring(b), w) for b in (17, 22, 64) for w in (1, 2, 19))]
)


@settings(max_examples=150)
@given(
    values=VALUES,
    rows=st.integers(3, 3000),
    share=st.floats(0, 1),
    stash=st.integers(0, 2),
    seed=st.integers(0, 2**32),
)
def test_keys_are_never_longer_than_the_bound_whatever_the_seed(values, rows, share, stash, seed):
    spec = two_servers.table(rows, max(1, int(share * rows)), stash=stash)
    table = SimpleTable.of(rows, spec.bins, seed, stash=stash)
    assert Forest.of(table.sizes, values).public_bytes <= spec.most_key_bytes(values)


def test_keys_are_not_longer_than_the_bound_where_all_bins_are_alike():
    """The worst case: nine leaves everywhere, one more than fit three levels."""
    spec = two_servers.table(3 * bins_for(60), 60)
    values = Values(Ring(22), 19)
    alike = Forest.of(np.full(spec.bins, 9), values)
    assert set(alike.trees.depths) == {4}
    assert alike.public_bytes <= spec.most_key_bytes(values)


def test_the_bound_on_keys_is_not_far_from_their_length():
    for rows, most in ((143_534, 301), (20_000, 2000), (5000, 5000)):
        spec = two_servers.table(rows, most)
        table = SimpleTable.of(rows, spec.bins, 1)
        for values in (SELECTORS, Values(Ring(22), 19)):
            real = Forest.of(table.sizes, values).public_bytes
            assert real <= spec.most_key_bytes(values) < 1.6 * real


@pytest.mark.parametrize("read", [Read.CHECKED, Read.POINTS])
def test_a_half_is_as_long_as_a_servers_answer(read):
    network = two_servers.Network.of(
        two_servers.params(two_servers.table(30, 4, stash=1, read=read))
    )
    network.reading(network.handshake())
    network.read({c: {0: two_servers.ids(1)} for c in network.clients})
    assert len(network.sent("QueryAnswers")) == len(network.clients)
    for data in network.sent("QueryAnswers"):
        assert len(wire.decode(data).tables[0]) == network.params.tables[0].half_bytes
    assert (
        two_servers.table(read=Read.WHOLE).half_bytes
        == two_servers.table(row_bytes=0).half_bytes
        == 0
    )


def test_the_two_servers_are_two():
    pinned = two_servers.servers()
    with pytest.raises(ConfigError, match="sign with one key"):
        replace(pinned, helper=pinned.leader)
    with pytest.raises(ConfigError, match="sealing key is not a valid"):
        replace(pinned, box=bytes(32))
    with pytest.raises(ConfigError, match="32 bytes"):
        Servers(leader=b"", helper=pinned.helper, box=pinned.box)


def _settings(**change):
    base = two_servers.params()
    return {f.name: getattr(base, f.name) for f in fields(base)} | change


def test_every_parameter_is_in_the_context():
    """Two parties who know different things do not agree on a single signature or box."""
    other = Servers(
        leader=two_servers.servers().helper,
        helper=two_servers.servers().leader,
        box=two_servers.servers().box,
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
        "rounds": 9,
    }
    seen = {two_servers.params().context}
    for name, value in changes.items():
        seen.add(TwoServerParams(**_settings(**{name: value})).context)
    wider = {"cohort": 5, "min_cohort": 5}
    assert len({TwoServerParams(**_settings(corrupt=c, **wider)).context for c in range(3)}) == 3
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
        seen.add(two_servers.params(two_servers.table(**change)).context)
    assert len(seen) == 1 + len(changes) + len(tables)
    assert two_servers.params() == two_servers.params() and hash(two_servers.params()) == hash(
        two_servers.params()
    )


def test_bins_follow_from_the_plan_and_not_from_a_clients_rows():
    spec = two_servers.table(1000, 32)
    assert spec.bins == bins_for(32)
    assert two_servers.table(1000, 32, stash=2).bins == bins_for(32, stash=2)


def test_ids_lead_to_rows_of_the_domain_and_back():
    narrow = TwoServerTable(
        table=0, rows=3, max_rows=3, row_bytes=1, ids=two_servers.ids(5, 70, 2**63)
    )
    assert narrow.index(two_servers.ids(2**63, 5)).tolist() == [2, 0]
    assert narrow.named(np.array([1])).tolist() == [70]
    whole = two_servers.table()
    assert whole.index(two_servers.ids(0, 39)).tolist() == [0, 39]
    assert whole.named(np.array([7])).tolist() == [7]
    for spec, stranger in ((narrow, 6), (narrow, 2**64 - 1), (whole, 40), (whole, 2**64 - 1)):
        with pytest.raises(MisuseError, match="not in the round's domain"):
            spec.index(two_servers.ids(stranger))
