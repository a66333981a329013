"""A server that lies in its half of an answer is found out, whichever rows the client has.

Without the check it would learn them: it spoils one bin, and who trains on a strange row shows it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import CBC

import two_servers
from tessera import wire
from tessera.crypto.kernel.points_reference import carryless
from tessera.crypto.secret import encode_context
from tessera.ids import RoundId, TableId
from tessera.protocols.two_server.params import CHECK_BYTES, Read
from tessera.protocols.two_server.read.client import (
    RowTagCache,
    _points,
    row_digests,
    row_tags,
    tag_products,
)

WANTED = two_servers.ids(3, 5)
WIDTH = 80  # more than one block of the digest
SETTINGS = {
    "plain": {},
    "stash": {"stash": 1},
    "union": {"ids": np.arange(40, dtype=np.uint64) * 1000 + 7},
}


class Lies:
    """XORs bytes into one server's half of the answers to one client, in the second of two tables.

    Five rows fit, so that there are bins without any of the client's.
    """

    def __init__(self, read: Read = Read.CHECKED, **more) -> None:
        first = two_servers.table(9, 3, row_bytes=4, words=0, read=read)
        self.spec = two_servers.table(40, 5, name=1, row_bytes=WIDTH, words=0, read=read, **more)
        self.network = two_servers.Network.of(two_servers.params(first, self.spec))
        self.victim = self.network.clients[1]
        self.header = self.network.handshake()
        self.wanted = self.spec.named(WANTED.astype(np.int64))
        self.added = b""

    @property
    def bins(self) -> int:
        return self.spec.bins + self.spec.stash

    def points(self, client=None, table: int = 1):
        """What only the victim knows (or what only another client does)."""
        client = self.network.roles[self.victim if client is None else client]
        spec = self.network.params.tables[table]
        layout = client._layouts(self.header).reading[spec.table]
        rows = spec.index(client.state.query.wanted[spec.table])
        placement = layout.table.place(rows)
        return layout, placement, _points(layout, placement, client.state.query.points_secret, spec)

    def by_leader(self, source, message):
        if message.kind != "QueryAnswers" or message.to != self.victim:
            return [message.data]
        decoded = wire.decode(message.data)
        return [wire.encode(replace(decoded, tables=self.changed(decoded.tables)))]

    def changed(self, halves: tuple[bytes, ...]) -> tuple[bytes, ...]:
        spoiled = bytes(a ^ b for a, b in zip(halves[1], self.added, strict=True))
        return halves[0], spoiled

    def run(self, who: str, add, wanted=None) -> None:
        """`add` makes the bytes once the query is out."""
        lies = self

        class LyingHelper(two_servers.RetrievalHelper):
            def _sealed(self, context, held, half):
                if who == "helper" and context.client == lies.victim:
                    half = dict(zip(half, lies.changed(tuple(half.values())), strict=True))
                return super()._sealed(context, held, half)

        self.network.reading(self.header, helper=LyingHelper)
        rows = self.wanted if wanted is None else wanted
        for c in self.network.clients:
            wanted = {TableId(0): two_servers.ids(2), TableId(1): rows}
            self.network.carry(c, self.network.roles[c].submit(wanted))
        if who == "leader":
            self.network.meddle = self.by_leader
        self.added = add(self)
        self.network.close()

    def at(self, bin_: int, row: bytes = b"", check: bytes = b"") -> bytes:
        """These bytes for one bin, zeros elsewhere."""
        added = bytearray(self.spec.half_bytes)
        added[bin_ * WIDTH : bin_ * WIDTH + len(row)] = row
        start = self.bins * WIDTH + bin_ * CHECK_BYTES
        added[start : start + len(check)] = check
        return bytes(added)

    def assert_found_out(self) -> None:
        assert self.network.left.keys() == {self.victim}
        assert "not the table's" in self.network.left[self.victim].reason
        assert self.network.fetched(self.victim) is None
        others = [c for c in self.network.clients if c != self.victim]
        assert all(self.network.fetched(c) is not None for c in others)


@pytest.mark.parametrize("who", ["leader", "helper"])
@pytest.mark.parametrize("where", SETTINGS)
def test_a_changed_half_makes_the_client_leave_in_every_bin_alike(who: str, where: str) -> None:
    """The last byte of the row, and nothing else; rows that are held, dummies and the stash."""
    bins = Lies(**SETTINGS[where]).bins
    last = bytes(WIDTH - 1) + b"\x40"
    empty = 0
    for bin_ in range(bins):
        lies, sizes = Lies(**SETTINGS[where]), []

        def add(lies: Lies, bin_: int = bin_, sizes: list[int] = sizes) -> bytes:
            sizes += lies.points()[0].forest.sizes.tolist()
            return lies.at(bin_, last)

        lies.run(who, add)
        if sizes[bin_]:
            lies.assert_found_out()
        else:  # nothing is read there, as everybody knows
            assert not lies.network.left
            empty += 1
    assert empty < bins / 2


@pytest.mark.parametrize("byte", [0, 7, 8, 15, 16, 23, 24, 31])
def test_every_part_of_the_check_counts(byte: int) -> None:
    lies = Lies()
    changed = bytes(byte) + b"\x80"
    lies.run("leader", lambda lies: lies.at(int(lies.points()[1].bins[0]), check=changed))
    lies.assert_found_out()


@pytest.mark.parametrize("who", ["leader", "helper"])
def test_a_client_that_asks_for_nothing_notices_too(who: str) -> None:
    lies = Lies()
    lies.run(who, lambda lies: lies.at(3, b"\x01"), wanted=two_servers.ids())
    lies.assert_found_out()


@pytest.mark.parametrize("who", ["leader", "helper"])
def test_if_rows_were_not_checked_a_change_would_be_felt_in_held_bins_only(who: str) -> None:
    """With the rule off the client takes strange rows, and what it does then names its bins."""
    felt, held = set(), set()
    for bin_ in range(Lies().bins):
        lies = Lies(Read.POINTS)
        placed: list[np.ndarray] = []

        def add(lies: Lies, bin_: int = bin_, placed: list[np.ndarray] = placed) -> bytes:
            placed.append(lies.points()[1].bins)
            return lies.at(bin_, b"\x00\x70")

        lies.run(who, add)
        assert not lies.network.left
        held |= set(placed[0].tolist())
        rows = lies.network.fetched(lies.victim).tables[1].rows
        if not np.array_equal(rows, lies.network.model.tables[1][lies.spec.index(WANTED)]):
            felt.add(bin_)
    assert felt == held and len(held) == len(WANTED)


@pytest.mark.parametrize(
    "knows", ["the word", "one", "a neighbour", "another's", "another table's"]
)
def test_only_who_knows_the_word_could_forge_a_row(knows: str) -> None:
    """The whole check rests on it: everything else here is known to the server."""
    lies = Lies()

    def add(lies: Lies) -> bytes:
        _, placement, chosen = lies.points()
        bin_, change = int(placement.bins[0]), b"\x00\x70" + bytes(WIDTH - 2)
        true = lies.network.model.tables[1][lies.spec.index(WANTED[:1])]
        forged = true ^ np.frombuffer(change, np.uint8)
        difference = np.bitwise_xor(
            *(
                row_tags(row_digests(lies.spec.table, WANTED[:1], rows), lies.header.seed)
                for rows in (true, forged)
            )
        )
        word = {
            "the word": chosen.values[bin_],
            "one": np.ones(1, np.uint64),
            "a neighbour": chosen.values[bin_ - 1],
            "another's": lies.points(lies.network.clients[0])[2].values[bin_],
            "another table's": lies.points(table=0)[2].values[0],
        }[knows]
        return lies.at(bin_, change, tag_products(word, difference).tobytes())

    lies.run("leader", add)
    if knows == "the word":
        assert not lies.network.left
    else:
        lies.assert_found_out()


def test_words_and_dummies_are_nobody_elses() -> None:
    """Of two clients, two tables and two rounds none has a word or a secret in common."""
    words, secrets = [], []
    for round_id in (12, 13):
        network = two_servers.Network.of(
            two_servers.params(
                *(two_servers.table(40, 5, name=n, words=0) for n in (0, 1)),
                round_id=RoundId(round_id),
            )
        )
        network.reading(network.handshake())
        for client in network.clients[:2]:
            role = network.roles[client]
            role.submit({TableId(0): two_servers.ids(1), TableId(1): two_servers.ids(1)})
            secrets.append(role.state.query.points_secret.reveal())
            for spec in network.params.tables:
                layout = role._layouts(role.state.query.header).reading[spec.table]
                placement = layout.table.place(np.array([1]))
                words += (
                    _points(layout, placement, role.state.query.points_secret, spec)
                    .values.ravel()
                    .tolist()
                )
    assert len(set(secrets)) == len(secrets) and len(set(words)) == len(words)


def test_rows_that_are_changed_after_the_query_do_not_matter() -> None:
    network = two_servers.Network.of(two_servers.params(two_servers.table(40, 5, words=0)))
    network.reading(network.handshake())
    own = two_servers.ids(3, 5)
    for c in network.clients:
        network.carry(c, network.roles[c].submit({TableId(0): own}))
    own += np.uint64(1)
    network.close()
    assert not network.left
    assert network.fetched(network.clients[0]).tables[0].ids.tolist() == [3, 5]


def test_a_row_tag_binds_row_id_table_and_round() -> None:
    rows = np.arange(2 * WIDTH, dtype=np.uint8).reshape(2, WIDTH)
    seed, ids = bytes(32), two_servers.ids(4, 5)

    def made(table: int, ids: np.ndarray, rows: np.ndarray, seed: bytes) -> np.ndarray:
        return row_tags(row_digests(TableId(table), ids, rows), seed)

    here = made(1, ids, rows, seed)
    assert here.shape == (2, 16)
    assert np.array_equal(here[1:], made(1, ids[1:], rows[1:], seed))
    last = rows.copy()
    last[:, -1] ^= 1
    for other in (
        made(2, ids, rows, seed),
        made(1, ids + np.uint64(2), rows, seed),
        made(1, ids, last, seed),
        made(1, ids, rows, b"\x01" + seed[1:]),
    ):
        assert not (other == here).all(axis=1).any()


def test_row_tags_are_two_chained_blocks_of_the_digest() -> None:
    """By another way: CBC without its first block, from a digest made by hand."""
    row, seed = bytes(range(WIDTH)), b"s" * 32
    digest = hashlib.blake2s(
        (9).to_bytes(8, "little") + row, person=(3).to_bytes(8, "little")
    ).digest()
    key = hashlib.sha256(encode_context("tessera row fingerprints", seed)).digest()[:16]
    chain = Cipher(AES128(key), CBC(bytes(16))).encryptor().update(digest)
    rows = np.frombuffer(row, np.uint8).reshape(1, -1)
    made = row_tags(row_digests(TableId(3), two_servers.ids(9), rows), seed)
    assert made.tobytes() == chain[16:]


def test_known_digests_are_made_anew_where_rows_changed(monkeypatch) -> None:
    made: list[int] = []
    real = row_digests

    def counted(table, ids, rows):
        made.append(len(ids))
        return real(table, ids, rows)

    monkeypatch.setattr("tessera.protocols.two_server.read.client.row_digests", counted)
    known, seeds = RowTagCache(), [bytes([i]) * 32 for i in range(5)]
    ids = two_servers.ids(*range(50))
    rows = np.random.default_rng(1).integers(0, 256, (50, 7), dtype=np.uint8)

    def same(table: int, seed: bytes) -> bool:
        due = row_tags(real(TableId(table), ids, rows), seed)
        return np.array_equal(known.of(TableId(table), ids, rows, seed), due)

    assert same(0, seeds[0]) and same(0, seeds[1])
    rows[[3, 9]] ^= np.uint8(4)
    assert same(0, seeds[2]) and same(1, seeds[2])
    ids += np.uint64(1)  # the caller's own array: another domain now
    assert same(0, seeds[3])
    assert made == [50, 0, 2, 50, 50]


def test_checks_are_linear_in_the_word() -> None:
    """So that shares of a word give shares of a check."""
    rng = np.random.default_rng(2)
    a, b = (rng.integers(0, 2**64, (9, 1), dtype=np.uint64) for _ in range(2))
    tags = rng.integers(0, 256, (9, 16), dtype=np.uint8)
    assert np.array_equal(tag_products(a ^ b, tags), tag_products(a, tags) ^ tag_products(b, tags))
    one = carryless(np.ones(9, np.uint64), tags.view("<u8"))
    assert np.array_equal(one[:, ::2], tags.view("<u8")) and not one[:, 1::2].any()
