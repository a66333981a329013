"""The sealed box for the helper, which the leader carries and cannot change.

The leader holds the public part of every client's keys and forwards it. If it could forward a
changed one, a shifted correction word would move the helper's share at exactly the rows where the
helper's control bit is set, and comparing with the leader's own control bits would give the
client's row. So the digest of the public part is inside the box, with the round, the report's id
and the client's id, under the client's signature; the same names are in the box's HPKE `info`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tessera import wire
from tessera.crypto.keys import SealingKey, SigningKey, seal_to
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import CryptoError, WireError
from tessera.ids import ClientId, TableId
from tessera.protocols.two_server.messages import Header, HelperBox, Purpose
from tessera.protocols.two_server.params import TwoServerParams

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
