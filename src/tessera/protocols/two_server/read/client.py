"""A client that fetches rows: keys go to both servers, and the XOR of both answers is the row.

Bins without a row of the client get keys too, for a random row that is checked like the others and
then discarded. A row that found no bin is left out silently: a second attempt would reveal that
there was one.

Row authentication tags, with which a client checks the rows that it fetched.

A server may lie in its half of an answer: what it adds there is added to the row, and the effect of
a changed row on a client's training can be seen in the sum. So every row has a public tag f of 128
bits, which binds its bytes, its id, its table and the round; and the client's point functions have
random odd words w as values, which only the client knows. Beside its half of a row each server
sends the XOR over the bin of (its share of w) * f, a product of polynomials over GF(2). The two
products add up to w * f(row). A server that changes its half of the row would have to change its
product by w * (f(row) - f(changed row)), and it does not know w.

A lie goes undetected with probability at most 2^-63, whatever the client's rows are. Dummies are
checked like the others, so a client that leaves reveals nothing about its rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import ECB

from tessera import wire
from tessera.crypto import dpf, kernel
from tessera.crypto.cuckoo import Layout, Placement
from tessera.crypto.group import Words
from tessera.crypto.kernel.trees import BLOCK
from tessera.crypto.keys import SealingKey, verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import CryptoError, WireError
from tessera.ids import SERVER, TableId
from tessera.protocols.machine import Left, Moved, Outbound
from tessera.protocols.secagg.messages import MAX_ROWS
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.handshake import (
    Invited,
    KeptHeader,
    Prepared,
    TwoServerClient,
    check_tables,
    content_digest,
    dense_digest,
    row_indices,
    table_digest,
)
from tessera.protocols.two_server.messages import (
    Digest,
    Header,
    Purpose,
    Query,
    QueryAnswers,
    SealedAnswer,
    SignedHeader,
)
from tessera.protocols.two_server.params import CHECK_BYTES, MAX_TABLES, Ids, Read, TwoServerTable
from tessera.wire.index_set import IndexSet
from tessera.wire.stored import ByDigest, Kept

ROW_TAG_BYTES: Final = BLOCK
Bytes = npt.NDArray[np.uint8]


def row_digests(table: TableId, ids: Ids, rows: Bytes) -> Bytes:
    """(k, 32) bytes: BLAKE2s of table, id and bytes of each row."""
    numbers = np.ascontiguousarray(ids, dtype=np.uint64)
    return kernel.active().row_digests(
        table.to_bytes(8, "little"), numbers, np.ascontiguousarray(rows)
    )


def row_tags(digests: Bytes, seed: bytes) -> Bytes:
    """(k, 16) bytes: a digest's two blocks under AES, chained, with a key from the round's seed.

    128 bits of the digest itself would resist a second preimage, but not a collision: a server
    could have searched for two rows with the same tag for years, and planted one of them. The seed
    is made by both servers once the model is fixed.
    """
    key = hashlib.sha256(encode_context(Label.ROW_TAGS, seed)).digest()[:BLOCK]
    context = Cipher(AES128(key), ECB()).encryptor()
    first, second = np.ascontiguousarray(digests[:, :BLOCK]), digests[:, BLOCK:]
    chained = np.frombuffer(context.update(first.tobytes()), np.uint8).reshape(-1, BLOCK) ^ second
    return np.frombuffer(context.update(chained.tobytes()), np.uint8).reshape(-1, BLOCK)


class RowTagCache:
    """The tags of a server's tables; only rows that changed since the last round are hashed."""

    def __init__(self) -> None:
        self._known: dict[TableId, tuple[Ids, Bytes, Bytes]] = {}

    def of(self, table: TableId, ids: Ids, rows: Bytes, seed: bytes) -> Bytes:
        """(k, 16) bytes, for the round that has this seed."""
        known = self._known.get(table)
        if known is None or not np.array_equal(known[0], ids) or known[1].shape != rows.shape:
            digests = row_digests(table, ids, rows)
        else:
            changed = np.nonzero((_wide(known[1]) != _wide(rows)).any(axis=1))[0]
            digests = known[2].copy()
            digests[changed] = row_digests(table, ids[changed], rows[changed])
        self._known[table] = (ids.copy(), rows.copy(), digests)
        return row_tags(digests, seed)


def _wide(rows: Bytes) -> npt.NDArray[Any]:
    """Rows of bytes as rows of the widest words that they are made of: fewer to compare."""
    width = next(size for size in (8, 4, 2, 1) if rows.shape[1] % size == 0)
    return np.ascontiguousarray(rows).view(f"<u{width}")


def tag_products(words: Words, tags: Bytes) -> Bytes:
    """(k, 32) bytes: what the products of both servers have to add up to, for these words."""
    flat = np.ascontiguousarray(words, dtype=np.uint64).reshape(-1)
    return kernel.active().products(flat, np.ascontiguousarray(tags))


@dataclass(frozen=True, slots=True, eq=False)
class FetchedRows:
    """Rows of one table as the servers hold them: ascending ids, and (k, row_bytes) bytes.

    Rows that found no place are not among them; a table that is read whole comes with all its rows.
    """

    ids: Ids = field(repr=False)
    rows: Bytes = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """What a client has fetched in a round."""

    tables: Mapping[TableId, FetchedRows]
    dense: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentQuery:
    """What a query was made from, and what its answer is checked with."""

    signed: KeptHeader
    wanted: Annotated[dict[TableId, Ids], wire.ByKey(wire.U16, IndexSet(MAX_ROWS), MAX_TABLES)] = (
        field(repr=False)
    )
    points_secret: Annotated[Secret, wire.SECRET] = field(repr=False)
    report_id: Digest = field(repr=False)
    digest: Digest = field(repr=False)
    answer_key: Annotated[Secret, wire.SECRET] = field(repr=False)

    @property
    def header(self) -> Header:
        return self.signed.message.header


@wire.record(tag=0x0580)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingAnswers:
    """The query is sent; waits for both halves."""

    query: SentQuery
    sent: Annotated[Kept[Query], ByDigest(Query)]


@wire.record(tag=0x0581)
@dataclass(frozen=True, slots=True, kw_only=True)
class RowsFetched:
    """Both halves are here and are the table's; nothing more is due."""

    query: SentQuery
    answers: Annotated[Kept[QueryAnswers], ByDigest(QueryAnswers)]


class RetrievalClient(TwoServerClient):
    """One client's retrieval in one round; `fetched` is there once it is `Finished`."""

    ROLE = "client of a retrieval"
    STATES = (Invited, Prepared, AwaitingAnswers, RowsFetched, Left)
    PHASES: ClassVar = {RowsFetched: "Finished"}
    PURPOSE = Purpose.RETRIEVE
    FROM_SERVER = (SignedHeader, QueryAnswers)
    _fetched: tuple[RowsFetched, Fetched] | None = None

    @property
    def fetched(self) -> Fetched | None:
        """The rows; worked out once, and once more after it was woken."""
        state = self.state
        if not isinstance(state, RowsFetched):
            return None
        if self._fetched is None or self._fetched[0] is not state:
            self._fetched = (state, self._combine(state))
        return self._fetched[1]

    def submit(self, wanted: Mapping[TableId, Ids]) -> list[Outbound]:
        """Ask for these rows: ascending ids for every table that is read through keys."""
        signed = self.signed_header
        header = signed.message.header
        layouts = self._layouts(header)
        specs = self._by_points()
        check_tables(wanted, specs)
        content = content_digest(*(np.asarray(wanted[spec.table], np.uint64) for spec in specs))
        context = self._new_report_context(header, content)
        hidden = self._entropy.secret(Label.RETRIEVAL_POINTS, context.report_id)
        public: list[bytes] = []
        seeds: list[tuple[Secret, Secret]] = []
        for spec in specs:
            layout = layouts.reading[spec.table]
            placement = layout.table.place(row_indices(spec, wanted[spec.table]))
            chosen = _points(layout, placement, hidden, spec)
            pair = dpf.gen(
                layout.forest,
                chosen.points,
                chosen.values,
                report_id=context.table_id(spec.table),
                entropy=self._entropy,
            )
            public.append(wire.HashedBytes(pair.public.to_bytes()))
            seeds.append(pair.seeds)
        secret = self._entropy.secret(Label.ANSWER_KEY, context.report_id)
        box = reports.seal_box(
            context,
            public,
            seeds=[helper for _, helper in seeds],
            dense_seed=None,
            answer_key=SealingKey.from_secret(secret).public,
            key=self.setup.identity.key,
        )
        query = Query(
            round_id=self.params.round_id,
            sender=self.me,
            report_id=context.report_id,
            public=tuple(public),
            seeds=tuple(leader.reveal() for leader, _ in seeds),
            box=box,
        )
        sent = Kept.of(query)
        asked = SentQuery(
            signed=signed,
            wanted={t: np.array(ids, dtype=np.uint64) for t, ids in wanted.items()},
            points_secret=hidden,
            report_id=context.report_id,
            digest=context.report_digest(public, box),
            answer_key=secret,
        )
        self._move(AwaitingAnswers(query=asked, sent=sent), b"")
        return [Outbound.again(SERVER, sent.data)]

    def _end(self, state: Any) -> None:
        super()._end(state)
        self._fetched = None

    def _on_answers(self, state: AwaitingAnswers, answers: Kept[QueryAnswers]) -> Moved:
        following = RowsFetched(query=state.query, answers=answers)
        self._fetched = (following, self._combine(following))
        return following, []

    def _combine(self, state: RowsFetched) -> Fetched:
        """The rows, of which both halves are checked; `ServerFault` if they do not hold."""
        query, message = state.query, state.answers.message
        if (message.round_id, message.report_id) != (self.params.round_id, query.report_id):
            raise self._fault("answered another query")
        halves = self._unsealed(query, message.box)
        theirs = dict(zip((t.table for t in self._by_points()), halves, strict=True))
        if len(message.tables) != len(self.params.read):
            raise self._fault(f"answered for {len(message.tables)} tables")
        if dense_digest(message.dense) != query.header.dense:
            raise self._fault("sent another dense part than both servers signed")
        found: dict[TableId, FetchedRows] = {}
        for spec, data in zip(self.params.read, message.tables, strict=True):
            if spec.reads_whole:
                found[spec.table] = self._whole(spec, data, query.header)
            else:
                found[spec.table] = self._combined(query, spec, data, theirs[spec.table])
        return Fetched(found, message.dense)

    def _unsealed(self, state: SentQuery, box: bytes) -> tuple[bytes, ...]:
        """The helper's half, which only this client's one-time key unseals."""
        context = self._report_context(state.header, state.report_id)
        key = SealingKey.from_secret(state.answer_key)
        try:
            inside = key.unseal(box, context.answer_info(state.digest))
            answer: SealedAnswer = wire.decode(inside, expect=[SealedAnswer])
        except (CryptoError, WireError) as error:
            raise self._fault(
                "forwarded an answer of the helper that cannot be unsealed"
            ) from error
        statement = context.answer_statement(state.digest, answer.tables)
        if not verify(self.params.servers.helper, answer.signature, statement):
            raise self._fault("forwarded an answer that the helper did not sign")
        if len(answer.tables) != len(self._by_points()):
            raise self._fault("forwarded the helper's answer for other tables")
        return answer.tables

    def _combined(
        self, state: SentQuery, spec: TwoServerTable, ours: bytes, theirs: bytes
    ) -> FetchedRows:
        layout = self._layouts(state.header).reading[spec.table]
        due = spec.half_bytes
        if not len(ours) == len(theirs) == due:
            raise self._fault(f"answered with {len(ours)} and {len(theirs)} bytes, not {due}")
        both = np.frombuffer(ours, np.uint8) ^ np.frombuffer(theirs, np.uint8)
        split = layout.forest.bins * spec.row_bytes
        rows = both[:split].reshape(-1, spec.row_bytes)
        ids = state.wanted[spec.table]
        placement = layout.table.place(spec.index(ids))
        if spec.read is Read.CHECKED:
            chosen = _points(layout, placement, state.points_secret, spec)
            products = both[split:].reshape(-1, CHECK_BYTES)
            if not self._holds(state.header, spec, chosen, rows, products):
                raise self._fault("answered with rows that are not the table's: one server lied")
        there = placement.bins >= 0
        return FetchedRows(ids[there], rows[placement.bins[there]])

    def _holds(
        self,
        header: Header,
        spec: TwoServerTable,
        chosen: dpf.RetrievalPoints,
        rows: Bytes,
        products: Bytes,
    ) -> bool:
        """Whether every row is the table's, dummies included, so that a failure reveals nothing."""
        some = np.nonzero(chosen.points >= 0)[0]
        assert chosen.values is not None
        ids = spec.named(self._layouts(header).reading[spec.table].rows_at(chosen.points)[some])
        tags = row_tags(row_digests(spec.table, ids, rows[some]), header.seed)
        return bool(np.array_equal(products[some], tag_products(chosen.values[some], tags)))

    def _whole(self, spec: TwoServerTable, data: bytes, header: Header) -> FetchedRows:
        if len(data) != spec.rows * spec.row_bytes:
            raise self._fault(f"sent {len(data)} bytes for table {spec.table}")
        rows = np.frombuffer(data, np.uint8).reshape(spec.rows, spec.row_bytes)
        if table_digest(spec.table, rows) != header.tables[spec.table]:
            raise self._fault(f"sent another table {spec.table} than both servers signed")
        return FetchedRows(spec.named(np.arange(spec.rows)), rows)

    def _by_points(self) -> tuple[TwoServerTable, ...]:
        return tuple(t for t in self.params.tables if t.reads_points)


def _points(
    layout: Layout, placement: Placement, hidden: Secret, spec: TwoServerTable
) -> dpf.RetrievalPoints:
    """The points and values for one table, the same for the query and for its answer."""
    return dpf.retrieval_points(
        layout.forest, placement.points, hidden.derive(Label.RETRIEVAL_POINTS, spec.table)
    )


RetrievalClient.STEPS = {
    (Invited, SignedHeader): RetrievalClient._on_header,
    (AwaitingAnswers, QueryAnswers): RetrievalClient._on_answers,
}
