"""A server that lies in its half of an answer is found out, whichever rows the client has.

Without the check it would learn them: it spoils one bin, and who trains on a strange row shows it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import pairs
from tessera.crypto.kernel.points_reference import carryless
from tessera.ids import TableId
from tessera.protocols import wire
from tessera.protocols.pair.params import CHECK_BYTES, Read
from tessera.protocols.retrieval.client import _aim
from tessera.protocols.retrieval.fingerprint import (
    Fingerprints,
    checks,
    fingerprints,
)

WANTED = pairs.ids(3, 5)


class Lies:
    """XORs bytes into one server's half of the answers to one client."""

    def __init__(self, read: Read = Read.CHECKED) -> None:
        self.spec = pairs.table(40, 3, row_bytes=12, words=0, read=read)
        self.pair = pairs.Pair.of(pairs.params(self.spec))
        self.victim = self.pair.clients[1]
        self.header = self.pair.open()
        self.added = b""

    @property
    def bins(self) -> int:
        return self.spec.bins

    def aim(self):
        """What only the victim knows."""
        state = self.pair.roles[self.victim].state
        layout = self.pair.roles[self.victim]._layouts(self.header).reading[self.spec.table]
        placement = layout.table.place(self.spec.index(WANTED))
        return layout, placement, _aim(layout, placement, state.aim, self.spec)

    def by_leader(self, source, message):
        if message.kind != "Answers" or message.to != self.victim:
            return [message.data]
        told = wire.decode(message.data)
        return [wire.encode(replace(told, tables=(self.changed(told.tables[0]),)))]

    def changed(self, half: bytes) -> bytes:
        return bytes(a ^ b for a, b in zip(half, self.added, strict=True))

    def run(self, who: str, add) -> None:
        """`add` makes the bytes once the query is out."""
        lies = self

        class Helper(pairs.ReadHelper):
            def _sealed(self, subject, held, half):
                if who == "helper" and subject.client == lies.victim:
                    half = {table: lies.changed(one) for table, one in half.items()}
                return super()._sealed(subject, held, half)

        self.pair.reading(self.header, helper=Helper)
        for c in self.pair.clients:
            self.pair.carry(c, self.pair.roles[c].submit({TableId(0): WANTED}))
        if who == "leader":
            self.pair.meddle = self.by_leader
        self.added = add()
        self.pair.close()

    def at(self, bin_: int, row: bytes = b"", check: bytes = b"") -> bytes:
        """These bytes for one bin, zeros elsewhere."""
        added = bytearray(self.spec.half_bytes)
        added[bin_ * 12 : bin_ * 12 + len(row)] = row
        start = self.bins * 12 + bin_ * CHECK_BYTES
        added[start : start + len(check)] = check
        return bytes(added)


@pytest.mark.parametrize("who", ["leader", "helper"])
@pytest.mark.parametrize("what", ["row", "check", "both"])
def test_a_changed_half_makes_the_client_leave_in_every_bin_alike(who: str, what: str) -> None:
    bins = Lies().bins
    for bin_ in range(bins):
        lies = Lies()

        def add(lies: Lies = lies, bin_: int = bin_) -> bytes:
            layout, _, _ = lies.aim()
            assert layout.forest.sizes.min() > 0
            row, check = b"\x00\x70", b"\x01" + bytes(30) + b"\x80"
            return lies.at(bin_, b"" if what == "check" else row, b"" if what == "row" else check)

        lies.run(who, add)
        assert lies.pair.left.keys() == {lies.victim}
        assert "not the table's" in lies.pair.left[lies.victim].reason
        assert lies.pair.fetched(lies.victim) is None
        others = [c for c in lies.pair.clients if c != lies.victim]
        assert all(lies.pair.fetched(c) is not None for c in others)


@pytest.mark.parametrize("who", ["leader", "helper"])
def test_if_rows_were_not_checked_a_change_would_be_felt_in_held_bins_only(who: str) -> None:
    """With the rule off the client takes strange rows, and what it does then names its bins."""
    felt, held = set(), set()
    for bin_ in range(Lies().bins):
        lies = Lies(Read.POINTS)
        placed: list[np.ndarray] = []

        def add(lies: Lies = lies, bin_: int = bin_, placed: list[np.ndarray] = placed) -> bytes:
            placed.append(lies.aim()[1].bins)
            return lies.at(bin_, b"\x00\x70")

        lies.run(who, add)
        assert not lies.pair.left
        held |= set(placed[0].tolist())
        rows = lies.pair.fetched(lies.victim).tables[0].rows
        if not np.array_equal(rows, lies.pair.model.tables[0][lies.spec.index(WANTED)]):
            felt.add(bin_)
    assert felt == held and len(held) == len(WANTED)


@pytest.mark.parametrize("knows", [True, False])
def test_only_who_knows_the_word_could_forge_a_row(knows: bool) -> None:
    """The whole check rests on it: everything else here is known to the server."""
    lies = Lies()

    def add() -> bytes:
        _, placement, aim = lies.aim()
        bin_, change = int(placement.bins[0]), b"\x00\x70" + bytes(10)
        true = lies.pair.model.tables[0][lies.spec.index(WANTED[:1])]
        forged = true ^ np.frombuffer(change, np.uint8)
        prints = [fingerprints(lies.spec.table, WANTED[:1], rows) for rows in (true, forged)]
        word = aim.values[bin_] if knows else aim.values[bin_] ^ np.uint64(2)
        return lies.at(bin_, change, checks(word, prints[0] ^ prints[1]).tobytes())

    lies.run("leader", add)
    assert bool(lies.pair.left) is not knows


def test_a_fingerprint_binds_row_id_and_table() -> None:
    rows = np.arange(24, dtype=np.uint8).reshape(2, 12)
    here = fingerprints(TableId(1), pairs.ids(4, 5), rows)
    assert here.shape == (2, 16)
    assert np.array_equal(here[1:], fingerprints(TableId(1), pairs.ids(5), rows[1:]))
    for other in (
        fingerprints(TableId(2), pairs.ids(4, 5), rows),
        fingerprints(TableId(1), pairs.ids(6, 7), rows),
        fingerprints(TableId(1), pairs.ids(4, 5), rows ^ np.uint8(1)),
    ):
        assert not (other == here).all(axis=1).any()


def test_known_fingerprints_are_made_anew_where_rows_changed(monkeypatch) -> None:
    made: list[int] = []
    real = fingerprints

    def counted(table, ids, rows):
        made.append(len(ids))
        return real(table, ids, rows)

    monkeypatch.setattr("tessera.protocols.retrieval.fingerprint.fingerprints", counted)
    known = Fingerprints()
    ids = pairs.ids(*range(50))
    rows = np.random.default_rng(1).integers(0, 256, (50, 7), dtype=np.uint8)
    assert np.array_equal(known.of(TableId(0), ids, rows), real(TableId(0), ids, rows))
    rows[[3, 9]] ^= np.uint8(4)
    assert np.array_equal(known.of(TableId(0), ids, rows), real(TableId(0), ids, rows))
    assert np.array_equal(known.of(TableId(1), ids, rows), real(TableId(1), ids, rows))
    narrowed = pairs.ids(*range(1, 51))
    assert np.array_equal(known.of(TableId(0), narrowed, rows), real(TableId(0), narrowed, rows))
    assert made == [50, 2, 50, 50]


def test_checks_are_linear_in_the_word() -> None:
    """So that shares of a word give shares of a check."""
    rng = np.random.default_rng(2)
    a, b = (rng.integers(0, 2**64, (9, 1), dtype=np.uint64) for _ in range(2))
    prints = rng.integers(0, 256, (9, 16), dtype=np.uint8)
    assert np.array_equal(checks(a ^ b, prints), checks(a, prints) ^ checks(b, prints))
    one = carryless(np.ones(9, np.uint64), prints.view("<u8"))
    assert np.array_equal(one[:, ::2], prints.view("<u8")) and not one[:, 1::2].any()
