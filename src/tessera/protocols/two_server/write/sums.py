"""Shares of a sum, and the sum: what both servers compute, each over its own half.

A row's share is the sum of point functions over the cohort; the dense part, and tables for which
that is cheaper, are two plain shares: the helper's is a 32-byte seed, the leader's is the vector
less what the seed expands to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto import dpf, prg, verifiable
from tessera.crypto.correlated import correlated_noise, noise_streams
from tessera.crypto.cuckoo import Layout
from tessera.crypto.group import Words
from tessera.crypto.kernel.trees import Bytes, RowSpace
from tessera.crypto.noise import add_noise
from tessera.crypto.prg import Label, Stream
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret, encode_context
from tessera.crypto.verifiable import SUM_BYTES, Coefficients
from tessera.errors import MisuseError
from tessera.ids import ClientId, TableId
from tessera.protocols.secagg.messages import MAX_ROWS, Clients
from tessera.protocols.secagg.phases import MAX_SUM_BYTES
from tessera.protocols.two_server.messages import Header, Listed, OpenedRows, OpenedSum, SumShare
from tessera.protocols.two_server.params import MAX_TABLES, Ids, TwoServerParams
from tessera.protocols.two_server.reports import Reported, Workers, batches, check_words, layouts_of
from tessera.wire.index_set import IndexSet

MOST_DRAWS: Final = 64
NoiseSecrets = Annotated[tuple[Secret, ...], wire.Sequence(wire.SECRET, MOST_DRAWS)]
"""What a server's noise in a round follows from: its secret of the round, and where noise is
correlated those of the rounds before, newest first. Empty where it adds none."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One server's share of the sum: of the dense words, and of all rows of every table."""

    dense: Words = field(repr=False)
    tables: dict[TableId, Words] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSum:
    """The rows of one table that some client wrote: ascending ids, and (rows, words, *limbs)."""

    rows: Annotated[npt.NDArray[np.uint64], IndexSet(MAX_ROWS)] = field(repr=False)
    words: Annotated[npt.NDArray[Any], wire.Words(MAX_SUM_BYTES)] = field(repr=False)


@wire.record(tag=0x0610)
@dataclass(frozen=True, slots=True, kw_only=True)
class TwoServerSum:
    """The opened sum, and whose reports are in it."""

    survivors: Clients
    dense: Annotated[npt.NDArray[Any], wire.Words(MAX_SUM_BYTES)] = field(repr=False)
    tables: Annotated[
        dict[TableId, RowSum], wire.ByKey(wire.U16, wire.Nested(RowSum), MAX_TABLES)
    ] = field(repr=False)


def dense_stream(seed: Secret) -> Stream:
    return Stream.of(seed, Label.DENSE_SHARE)


def split_dense(params: TwoServerParams, words: Words, seed: Secret) -> bytes:
    """The leader's share of these words: what is left when the helper's is taken away."""
    share = np.array(words, dtype=params.group.dtype)
    prg.accumulate(params.group, share, [dense_stream(seed)], [-1])
    return params.group.pack(share)


def leader_dense(params: TwoServerParams, shares: Iterable[bytes]) -> Words:
    total = params.group.zeros(params.dense_words)
    for data in shares:
        params.group.add_packed(total, data)
    return total


def helper_dense(params: TwoServerParams, seeds: Iterable[Secret]) -> Words:
    total = params.group.zeros(params.dense_words)
    streams = [dense_stream(seed) for seed in seeds]
    prg.accumulate(params.group, total, streams, [1] * len(streams))
    return total


def share_of(params: TwoServerParams, rows: Mapping[TableId, Words], dense: Words) -> Share:
    """One server's share of the sum: the rows that are written by keys, and its plain part."""
    tables: dict[TableId, Words] = {}
    start = params.dense
    for spec in params.written:
        if not spec.writes_dense:
            tables[spec.table] = rows[spec.table]
            continue
        size = spec.rows * spec.words
        part = dense[start : start + size]
        tables[spec.table] = part.reshape(spec.rows, spec.words, *params.group.limbs)
        start += size
    return Share(dense[: params.dense], tables)


def with_noise(
    params: TwoServerParams, share: Share, secrets: Sequence[Secret], sender: str
) -> Share:
    """A server's share with its own noise on every word, where the round has any.

    All of the noise that protects from the other server: the sum has both servers'. It follows from
    a secret of the round, so that a share that is sent again is the same; correlated noise also
    from those of the rounds before.
    """
    if not params.noise:
        return share
    at, inverse = int(params.round_id), params.correlation
    if len(secrets) != min(inverse.draws, at + 1):
        raise MisuseError(f"two servers: noise of round {at} needs secrets of {inverse.draws}")
    group = params.group
    if group.limbs or not isinstance(group, Ring):
        raise MisuseError(f"two servers: no noise in {group.name}")

    def noisy(words: Words, part: int, rows: Ids | None = None) -> Words:
        if inverse.terms:
            streams = noise_streams(secrets, at, sender, part)
            return correlated_noise(inverse, params.noise).add(group, words, streams, rows)
        stream = Stream.of(secrets[0], Label.SUM_NOISE, at, sender, part)
        return add_noise(group, params.noise, words, stream)

    ids = {spec.table: spec.ids for spec in params.written}
    tables = {
        table: noisy(words, 1 + int(table), ids[table]) for table, words in share.tables.items()
    }
    return Share(noisy(share.dense, 0), tables)


# -- on the wire


def packed(params: TwoServerParams, share: Share, signature: bytes) -> SumShare:
    return SumShare(
        round_id=params.round_id,
        dense=wire.HashedBytes(params.group.packed(share.dense)),
        tables=tuple(
            wire.HashedBytes(params.group.packed(share.tables[t.table])) for t in params.written
        ),
        signature=signature,
    )


def check_share(params: TwoServerParams, message: SumShare) -> None:
    """ValueError unless these are the words of a share: as many as are due, of the group."""
    if len(message.tables) != len(params.written):
        raise ValueError(f"{len(message.tables)} tables")
    check_words(params.group, message.dense, params.dense)
    for spec, data in zip(params.written, message.tables, strict=True):
        check_words(params.group, data, spec.rows * spec.words)


def added(
    params: TwoServerParams, ours: Share, theirs: SumShare, survivors: Iterable[int]
) -> TwoServerSum:
    """The sum, of a share and one that came and was checked; it takes the place of ours.

    Rows that are zero in every word are left out: no client wrote them. With noise every row opens:
    which have none would say where nobody wrote.
    """
    group = params.group
    tables: dict[TableId, RowSum] = {}
    for spec, data in zip(params.written, theirs.tables, strict=True):
        total = ours.tables[spec.table]
        group.add_packed(total, data)
        there = np.arange(spec.rows)
        if not params.noise:
            there = np.flatnonzero(np.bitwise_or.reduce(total.reshape(spec.rows, -1), axis=1))
        tables[spec.table] = RowSum(rows=spec.named(there), words=total[there])
    group.add_packed(ours.dense, theirs.dense)
    return TwoServerSum(
        survivors=np.array(sorted(survivors), dtype=np.uint64),
        dense=ours.dense,
        tables=tables,
    )


def opened_sum(params: TwoServerParams, total: TwoServerSum, signature: bytes) -> OpenedSum:
    group = params.group
    return OpenedSum(
        round_id=params.round_id,
        dense=wire.HashedBytes(group.packed(total.dense)),
        tables=tuple(
            OpenedRows(
                table=spec.table,
                rows=spec.index(total.tables[spec.table].rows).astype(np.uint64),
                words=wire.HashedBytes(group.packed(total.tables[spec.table].words)),
            )
            for spec in params.written
        ),
        signature=signature,
    )


def sum_from_message(
    params: TwoServerParams, message: OpenedSum, survivors: Iterable[int]
) -> TwoServerSum:
    """Invert `opened_sum`; ValueError for tables, rows or words that are not the round's."""
    group = params.group
    if [part.table for part in message.tables] != [spec.table for spec in params.written]:
        raise ValueError("other tables")
    tables: dict[TableId, RowSum] = {}
    for spec, part in zip(params.written, message.tables, strict=True):
        if len(part.rows) and int(part.rows[-1]) >= spec.rows:
            raise ValueError("a row outside the domain")
        words = group.unpack(part.words, len(part.rows) * spec.words)
        tables[spec.table] = RowSum(
            rows=spec.named(part.rows.astype(np.int64)),
            words=words.reshape(len(part.rows), spec.words, *group.limbs),
        )
    return TwoServerSum(
        survivors=np.array(sorted(survivors), dtype=np.uint64),
        dense=group.unpack(message.dense, params.dense),
        tables=tables,
    )


# -- what is signed


def list_statement(header: Header, reports: Listed) -> bytes:
    """One list of (client, report) of one round."""
    return encode_context(Label.INCLUDED_LIST, header.digest, list_digest(reports))


def list_digest(reports: Listed) -> bytes:
    entries: Iterator[int | bytes] = (part for c in sorted(reports) for part in (c, reports[c]))
    return hashlib.sha256(encode_context(*entries)).digest()


def sum_statement(header: Header, reports: Listed, message: SumShare | OpenedSum) -> bytes:
    """A share, or the sum, over that list."""
    parts = [wire.part_digest(message.dense)]
    for part in message.tables:
        if isinstance(part, OpenedRows):
            parts += [part.rows.astype("<u8").tobytes(), wire.part_digest(part.words)]
        else:
            parts.append(wire.part_digest(part))
    content = hashlib.sha256(encode_context(*parts)).digest()
    kind = "OpenedSum" if isinstance(message, OpenedSum) else "SumShare"  # signed: not the class
    return encode_context(Label.SUM, kind, list_statement(header, reports), content)


# --- shares of rows -------------------------------------------------------------------------------
#
# Of the rows that are written by keys, with the sums that check the keys.
#
# Shares and checks come from one pass over all leaves (`crypto/verifiable.py`). A client that
# fails its check is found after its leaves were added: they are taken out again, which costs one
# client's evaluation and not another pass.


@dataclass(frozen=True, slots=True, eq=False)
class RowShares:
    """Shares of all rows by table; `checks` has the sums of every client, where there is a coin."""

    tables: dict[TableId, Words] = field(repr=False)
    checks: dict[ClientId, bytes] = field(repr=False)

    def without(self, params: TwoServerParams, others: RowShares) -> RowShares:
        """Less the shares of some of the same clients."""
        tables = {
            table: params.group.sub(rows, others.tables[table])
            for table, rows in self.tables.items()
        }
        return RowShares(tables, self.checks)


def coin_of(seed: Secret, closing: bytes) -> Secret:
    """The coin of one closed collection, named by the digest of its list.

    It is the same whenever a helper is woken. One that was restored from before the closing, and
    hears another, draws another: reports that were made in the knowledge of a coin meet a new one.
    """
    return seed.derive(Label.CHECK_COIN, closing, size=verifiable.COIN_BYTES)


def row_shares(
    params: TwoServerParams,
    header: Header,
    reports: Sequence[Reported],
    *,
    party: int,
    workers: Workers,
    coin: Secret | None = None,
) -> RowShares:
    """One server's shares over exactly these reports; with a coin, their sums to be compared."""
    writing = layouts_of(params, header).writing
    checks = np.zeros((len(reports), SUM_BYTES), dtype=np.uint8)
    factors: list[Coefficients | None] = [None] * len(writing)
    if coin is not None:
        forests = [layout.forest for layout in writing.values()]
        factors = list(verifiable.coefficients(coin, forests))
    tables = {}
    epoch = header.epoch
    for at, (table, layout) in enumerate(writing.items()):
        one = _Pass(layout, table, at, party, workers, factors[at], epoch)
        checks ^= np.concatenate([checks[:0], *map(one.add, batches(reports, layout.forest))])
        tables[table] = one.rows()
    if coin is None:
        return RowShares(tables, {})
    named = zip(reports, checks, strict=True)
    return RowShares(tables, {report.context.client: each.tobytes() for report, each in named})


class _Pass:
    """The rows of one table, to which reports are added: an array for each worker."""

    def __init__(
        self,
        layout: Layout,
        table: TableId,
        at: int,
        party: int,
        workers: Workers,
        factors: Coefficients | None,
        epoch: int,
    ) -> None:
        self._layout, self._table, self._at, self._party = layout, table, at, party
        self._workers, self._factors, self._epoch = workers, factors, epoch
        self._parts = layout.forest.parts(workers.count)
        self._spaces = [layout.row_space(party) for _ in self._parts]

    def add(self, reports: Sequence[Reported]) -> Bytes:
        """Add some reports; their sums of this table, zeros where nothing is checked."""
        forest, factors = self._layout.forest, self._factors
        keys = [r.expanded(forest, self._table, self._at, party=self._party) for r in reports]
        found = [np.zeros((len(reports), SUM_BYTES), dtype=np.uint8) for _ in self._parts]
        each = list(zip(self._parts, self._spaces, found, strict=True))
        if factors is None:
            self._workers.run(
                [
                    partial(dpf.add_to, forest, keys, space, part=part, epoch=self._epoch)
                    for part, space, _ in each
                ]
            )
            return found[0]
        sent = [report.corrections(forest, self._at) for report in reports]

        def check(part: range, space: RowSpace, into: Bytes) -> None:
            into[:] = verifiable.check_sums(forest, keys, sent, factors, space, part=part)

        self._workers.run([partial(check, *one) for one in each])
        total = found[0]
        for more in found[1:]:
            total ^= more
        return total

    def rows(self) -> Words:
        """This server's shares of all rows."""
        group = self._layout.forest.values.group
        assert group is not None
        total, *others = (self._layout.row_words(space) for space in self._spaces)
        for more in others:
            total = group.add(total, more)
        return total
