"""A client's report: the sealed box for the helper, and the keys as one server evaluates them.

The leader carries the box and cannot change it.

The leader holds the public part of every client's keys and forwards it. If it could forward a
changed one, a shifted correction word would move the helper's share at exactly the rows where the
helper's control bit is set, and comparing with the leader's own control bits would give the
client's row. So the digest of the public part is inside the box, with the round, the report's id
and the client's id, under the client's signature; the same names are in the box's HPKE `info`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Final, Protocol

from tessera import wire
from tessera.crypto import verifiable
from tessera.crypto.cuckoo import Layout, SimpleTable
from tessera.crypto.dpf import Forest, PublicKeys, ServerKeys, Values
from tessera.crypto.group import Group
from tessera.crypto.kernel.backend import packed_size
from tessera.crypto.kernel.trees import BLOCK
from tessera.crypto.keys import SealingKey, SigningKey, seal_to
from tessera.crypto.prg import Label
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import CryptoError, PeerError, WireError
from tessera.ids import ClientId, TableId
from tessera.protocols.two_server.key_period import ClientKeys, KeyPeriod
from tessera.protocols.two_server.messages import Header, HelperBox, Purpose
from tessera.protocols.two_server.params import TwoServerParams, TwoServerTable

_UNSIGNED = bytes(64)


@dataclass(frozen=True, kw_only=True)
class ReportContext:
    """What everything in a report is bound to: the round, the purpose, the client, the report."""

    params: TwoServerParams
    header: Header
    purpose: Purpose
    client: ClientId
    report_id: bytes

    def public_digest(self, public: Sequence[bytes]) -> bytes:
        """A digest of the part of a query or report that both servers hold."""
        parts = map(wire.part_digest, public)
        return hashlib.sha256(encode_context(Label.PUBLIC_PART, *self._name, *parts)).digest()

    def report_digest(self, public: Sequence[bytes], box: bytes) -> bytes:
        """A digest of the public part and the box, by which a list names the report."""
        return report_digest(self.public_digest(public), box)

    def table_id(self, table: TableId) -> bytes:
        """The report id of one table's point functions, so that tables have different AES keys."""
        parts = (self.purpose.value, self.report_id, table)
        return hashlib.sha256(encode_context(Label.TABLE_REPORT_ID, *parts)).digest()

    @property
    def box_info(self) -> bytes:
        return encode_context(Label.BOX, *self._name)

    def answer_info(self, digest: bytes) -> bytes:
        """The HPKE `info` that binds the helper's answer to its query."""
        return encode_context(Label.ANSWER, *self._name, digest)

    def answer_statement(self, digest: bytes, tables: Sequence[bytes]) -> bytes:
        """What the helper signs: its half of every bin, for this query."""
        content = hashlib.sha256(encode_context(*map(wire.part_digest, tables))).digest()
        return encode_context(Label.ANSWER_STATEMENT, self.answer_info(digest), content)

    @cached_property
    def _name(self) -> tuple[bytes | str | int, ...]:
        # The header's digest covers the context: federation, round, plan hash, tables and keys.
        return (self.purpose.value, self.header.digest, self.client, self.report_id)


def report_digest(public: bytes, box: bytes) -> bytes:
    """A report's digest from the digest of its public part."""
    return hashlib.sha256(public + box).digest()


def seal_box(
    context: ReportContext,
    public: Sequence[bytes],
    *,
    seeds: Sequence[Secret],
    dense_seed: Secret | None,
    answer_key: bytes | None,
    key: SigningKey,
) -> bytes:
    """A client's box for the helper."""
    box = HelperBox(
        purpose=context.purpose,
        round_id=context.params.round_id,
        plan_hash=context.params.plan_hash,
        header=context.header.digest,
        sender=context.client,
        report_id=context.report_id,
        public=context.public_digest(public),
        seeds=tuple(seed.reveal() for seed in seeds),
        dense_seed=dense_seed,
        answer_key=answer_key,
        signature=_UNSIGNED,
    )
    signed = replace(box, signature=key.sign(statement(box)))
    return seal_to(context.params.servers.box, wire.encode(signed), context.box_info)


def unseal_box(context: ReportContext, box: bytes, key: SealingKey) -> HelperBox:
    """The content of a box; `CryptoError` if it was not sealed to this key for this context."""
    return unsealed(context, box, key)[0]


def unsealed(context: ReportContext, box: bytes, key: SealingKey) -> tuple[HelperBox, bytes]:
    """(The content of a box, what its client has signed): `statement`, of the bytes that came."""
    data = key.unseal(box, context.box_info)
    try:
        inside: HelperBox = wire.decode(data, expect=[HelperBox])
    except WireError as error:
        raise CryptoError(f"a box holds another kind of record ({type(error).__name__})") from None
    return inside, _signed(wire.unsigned_digest(data, len(_UNSIGNED)))


def statement(box: HelperBox) -> bytes:
    """What the client signs: everything in the box."""
    return _signed(wire.digest(replace(box, signature=_UNSIGNED)))


def _signed(digest: bytes) -> bytes:
    return encode_context(Label.BOX_STATEMENT, digest)


def matches(box: HelperBox, context: ReportContext) -> bool:
    """Whether a box belongs to this round, purpose, client and report."""
    return (
        box.purpose,
        box.round_id,
        box.plan_hash,
        box.header,
        box.sender,
        box.report_id,
    ) == (
        context.purpose,
        context.params.round_id,
        context.params.plan_hash,
        context.header.digest,
        context.client,
        context.report_id,
    )


# --- where rows are -------------------------------------------------------------------------------
#
# The bins of every table: public, and the same for everybody in a round.


@dataclass(frozen=True, slots=True, eq=False)
class Layouts:
    """The layouts of a round by table: of bits for retrieval, of words for writing."""

    reading: dict[TableId, Layout] = field(repr=False)
    writing: dict[TableId, Layout] = field(repr=False)

    def forests(self, purpose: Purpose) -> tuple[Forest, ...]:
        """The trees that a query or a report has keys for, in the order of the tables."""
        chosen = self.reading if purpose is Purpose.RETRIEVE else self.writing
        return tuple(layout.forest for layout in chosen.values())


def layouts_of(params: TwoServerParams, header: Header) -> Layouts:
    """The round's bins, once both nonces are known."""
    return _layouts(params, header.seed, header.write_seed)


@lru_cache(maxsize=4)  # a simulated cohort shares one, and so do the two protocols of a round
def _layouts(params: TwoServerParams, read_seed: bytes, write_seed: bytes) -> Layouts:
    reading: dict[TableId, Layout] = {}
    writing: dict[TableId, Layout] = {}
    for spec in params.tables:
        if not spec.uses_points:
            continue
        if spec.reads_points:
            reading[spec.table] = Layout.of(_hashed(spec, read_seed), spec.selecting)
        if spec.writes_points:
            values = Values(params.group, spec.words)
            writing[spec.table] = Layout.of(_hashed(spec, write_seed), values)
    return Layouts(reading, writing)


@lru_cache(maxsize=32)  # reading and writing share a table's bins in a round with full keys
def _hashed(spec: TwoServerTable, seed: bytes) -> SimpleTable:
    own = hashlib.sha256(encode_context(Label.BINS, seed, spec.table)).digest()
    domain = spec.rows if spec.ids is None else spec.ids
    return SimpleTable.of(domain, spec.bins, int.from_bytes(own[:8], "little"), stash=spec.stash)


# --- keys at one server ---------------------------------------------------------------------------
#
# They are checked when they come, and evaluated in the bytes they came in.
#
# Both protocols and both servers do this alike. What is held has been checked, so that evaluating
# it does not fail: a client with invalid keys is excluded when its report comes, at both servers,
# and not when reports are summed.


LEADER_PARTY: Final = 0
HELPER_PARTY: Final = 1

TOGETHER_BYTES: Final = 64 << 20
"""Of root nodes that are expanded at once: more reports in one go read a table fewer times."""

NO_KEYS: Final = "sent a hint, and has no keys in this period"

Refusal = Callable[[ClientId, str], PeerError]


@dataclass(frozen=True, slots=True, eq=False)
class Reported:
    """One query or report at one server, checked: keys by table, in the order of the tables.

    In a report whose keys are checked, the corrections of tags follow a table's keys.
    """

    context: ReportContext
    public: tuple[bytes, ...] = field(repr=False)
    seeds: tuple[bytes, ...] = field(repr=False)

    def expanded(self, forest: Forest, table: TableId, at: int, *, party: int) -> ServerKeys:
        """Its keys for one table, the `at`-th that has any, with their roots, to be evaluated."""
        return ServerKeys.of(
            # checked when they came, and evaluated where they are
            PublicKeys(forest, memoryview(self.public[at])[: forest.public_bytes]),
            Secret(self.seeds[at]),
            party=party,
            report_id=self.context.table_id(table),
        )

    def corrections(self, forest: Forest, at: int) -> memoryview:
        """What makes the tags at its points equal (`crypto/verifiable.py`)."""
        return memoryview(self.public[at])[forest.public_bytes :]


def reported(
    context: ReportContext,
    public: tuple[bytes, ...],
    seeds: tuple[bytes, ...],
    forests: tuple[Forest, ...],
    period: KeyPeriod | None,
) -> Reported:
    """A report at one server; with the keys of an earlier round, `public` is hints to these."""
    if period is None:
        return Reported(context, public, seeds)
    own = period.clients[context.client]
    context = replace(context, report_id=own.report_id)
    return Reported(context, own.with_hints(forests, public), own.seeds)


def batches(reports: Sequence[Reported], forest: Forest) -> Iterator[Sequence[Reported]]:
    """All of them, as many at a time as have not too many root nodes in this forest."""
    together = max(1, TOGETHER_BYTES // (BLOCK * max(1, forest.trees.count)))
    for start in range(0, len(reports), together):
        yield reports[start : start + together]


def check_keys(
    forests: Sequence[Forest],
    public: Sequence[bytes],
    refusal: Refusal,
    client: ClientId,
    *,
    corrected: bool = False,
    keys: ClientKeys | None = None,
) -> None:
    """Refuse a public part that could not be expanded: another shape, or padding bits set.

    `corrected`: corrections of tags follow the keys of every table. With the client's `keys` of an
    earlier round it is hints to these.
    """
    if len(public) != len(forests):
        raise refusal(client, f"sent keys for {len(public)} tables, {len(forests)} are expected")
    if keys is not None:
        public, corrected = keys.with_hints(tuple(forests), tuple(public)), False
    for forest, data in zip(forests, public, strict=True):
        try:
            end = forest.public_bytes if corrected else len(data)
            PublicKeys.from_bytes(forest, memoryview(data)[:end])
            if corrected:
                verifiable.parsed(forest, memoryview(data)[end:])
        except WireError as error:
            raise refusal(client, f"sent invalid keys: {error}") from error


def check_words(group: Group, data: bytes, count: int) -> None:
    """ValueError unless these are `count` packed words of the group."""
    if not _surely_words(group, data, count):
        group.unpack(data, count)


# Where words are those of a ring, every pattern of bits is some words: what can be wrong is the
# length, and bits that are left over in a last byte. That is seen without unpacking anything.
# Whatever is not surely right is unpacked, which decides.


def _surely_words(group: Group, data: bytes | memoryview, count: int) -> bool:
    """Whether `group.unpack` would take these."""
    if not isinstance(group, Ring) or len(data) != packed_size(count, group.bits):
        return False
    used = count * group.bits % 8  # bits of the last byte; those above are zero
    return not used or not data[-1] >> used


# --- workers --------------------------------------------------------------------------------------
#
# How a server runs its evaluations. An engine may bring threads; a protocol has none.


class Workers(Protocol):
    """An executor of independent calls."""

    @property
    def count(self) -> int:
        """How many calls can run at once."""

    def run(self, calls: Sequence[Callable[[], Any]]) -> None:
        """Make these calls; return when all are done."""


class SingleWorker:
    """One call after the other, in the caller's thread."""

    count = 1

    def run(self, calls: Sequence[Callable[[], Any]]) -> None:
        for call in calls:
            call()
