"""How a round between two servers begins: one header that both have signed.

The seed of the bins comes from both servers' nonces. The leader commits to its own first, the
helper answers with its own, the leader reveals: neither can choose the seed. The leader is the
first to know it and might give the round up if it dislikes it; the helper opens a round's number
once, so that this costs a round each time and every one of them is in its ledger.

The header carries the digest of every table and of the dense part. The helper signs only what it
holds itself, so that a leader who has changed a row to see whose training fails on it gets no
signature, and no client asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import SigningKey, verify
from tessera.crypto.secret import encode_context
from tessera.errors import MisuseError, PeerError, RoundAborted, ServerFault, WireError
from tessera.ids import HELPER, SERVER, ClientId, TableId
from tessera.protocols import wire
from tessera.protocols.machine import Outbound, Party, fingerprint
from tessera.protocols.two_server.envelope import NONCE
from tessera.protocols.two_server.ledger import Ledger
from tessera.protocols.two_server.messages import (
    Header,
    Opening,
    OpeningConsent,
    OpeningNonce,
    OpeningOffer,
    OpeningReveal,
)
from tessera.protocols.two_server.params import TwoServerParams

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """What a server serves in a round: rows as bytes, in the order of each table's domain."""

    tables: Mapping[TableId, Bytes] = field(default_factory=dict, repr=False)
    dense: bytes = field(default=b"", repr=False)

    def check(self, params: TwoServerParams) -> None:
        due = {t.table: (t.rows, t.row_bytes) for t in params.read}
        if {t: rows.shape for t, rows in self.tables.items()} != due:
            raise MisuseError("two servers: the model has other tables than the round")
        if any(rows.dtype != np.uint8 for rows in self.tables.values()):
            raise MisuseError("two servers: rows are served as bytes")
        if len(self.dense) != params.dense_bytes:
            raise MisuseError(f"two servers: a dense part of {len(self.dense)} bytes")

    def digests(self, params: TwoServerParams) -> tuple[dict[TableId, bytes], bytes]:
        """(of every table, of the dense part): what the header states."""
        self.check(params)
        tables = {t.table: table_digest(t.table, self.tables[t.table]) for t in params.read}
        return tables, dense_digest(self.dense)


def table_digest(table: TableId, rows: Bytes) -> bytes:
    shape = encode_context("tessera two-server table", table, *rows.shape)
    return hashlib.sha256(shape + np.ascontiguousarray(rows).tobytes()).digest()


def dense_digest(dense: bytes) -> bytes:
    return hashlib.sha256(encode_context("tessera two-server dense", dense)).digest()


def commitment(params: TwoServerParams, nonce: bytes) -> bytes:
    parts = ("tessera two-server commitment", params.context, nonce)
    return hashlib.sha256(encode_context(*parts)).digest()


def check_opening(params: TwoServerParams, opening: Opening) -> Header:
    """The header of a round that both servers have opened as this client knows it."""

    def fault(reason: str) -> ServerFault:
        return ServerFault(reason, round_id=params.round_id, phase="opening")

    header = opening.header
    if header.round_id != params.round_id or header.context != params.context:
        raise fault("opened a round with other parameters")
    if header.tables.keys() != {t.table for t in params.read}:
        raise fault("opened a round without the digest of every table")
    statement = header.statement
    if not verify(params.servers.leader, opening.leader, statement):
        raise fault("did not sign the header it sent")
    if not verify(params.servers.helper, opening.helper, statement):
        raise fault("sent a header that the helper did not sign")
    return header


class LeaderOpening:
    """The leader's side. `opening` is there once the helper has consented."""

    def __init__(
        self,
        params: TwoServerParams,
        model: Model,
        invited: Iterable[ClientId],
        *,
        key: SigningKey,
        entropy: Entropy,
    ) -> None:
        if key.public != params.servers.leader:
            raise MisuseError("two servers: the leader's key is not the one that is pinned")
        self.params, self._key = params, key
        self.invited = frozenset(invited)
        self._tables, self._dense = model.digests(params)
        secret = entropy.secret(NONCE, params.federation, params.round_id, SERVER)
        self._nonce = secret.reveal()  # public in the end, and closed until the helper has answered
        self._header: Header | None = None
        self._signature = b""
        self.opening: Opening | None = None
        self.phase = "opening"

    def begin(self) -> list[Outbound]:
        offer = OpeningOffer(
            round_id=self.params.round_id,
            context=self.params.context,
            commitment=commitment(self.params, self._nonce),
            tables=self._tables,
            dense=self._dense,
        )
        return [Outbound.of(HELPER, offer)]

    @property
    def expected(self) -> frozenset[ClientId]:
        """Clients have no say in this: what is missing is the helper's word."""
        return frozenset()

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """Take the helper's answer; in the end the opening goes to everybody invited."""
        if sender != HELPER:
            raise self._refuse("speaks before the round is open", sender)
        try:
            message = wire.decode(data, expect=(OpeningNonce, OpeningConsent))
        except WireError as error:
            raise self._refuse(f"sent bytes that are no message: {error}") from error
        if message.round_id != self.params.round_id:
            raise self._refuse("answered for another round")
        if isinstance(message, OpeningNonce) and self._header is None:
            return self._on_nonce(message)
        if isinstance(message, OpeningConsent) and self._header and self.opening is None:
            return self._on_consent(message, self._header)
        raise self._refuse(f"sent {type(message).__name__}, which is not due")

    def close_phase(self) -> list[Outbound]:
        """The helper has not answered in time."""
        self.phase = "aborted"
        raise RoundAborted(round_id=self.params.round_id, phase="opening", answered=0, needed=1)

    def _on_nonce(self, message: OpeningNonce) -> list[Outbound]:
        self._header = Header(
            round_id=self.params.round_id,
            context=self.params.context,
            leader_nonce=self._nonce,
            helper_nonce=message.nonce,
            tables=self._tables,
            dense=self._dense,
        )
        self._signature = self._key.sign(self._header.statement)
        reveal = OpeningReveal(
            round_id=self.params.round_id, nonce=self._nonce, signature=self._signature
        )
        return [Outbound.of(HELPER, reveal)]

    def _on_consent(self, message: OpeningConsent, header: Header) -> list[Outbound]:
        if not verify(self.params.servers.helper, message.signature, header.statement):
            raise self._refuse("signed another header")
        self.opening = Opening(header=header, leader=self._signature, helper=message.signature)
        self.phase = "done"
        return [Outbound.of(c, self.opening) for c in sorted(self.invited)]

    def _refuse(self, reason: str, peer: Party = HELPER) -> PeerError:
        return PeerError(reason, round_id=self.params.round_id, phase=self.phase, peer=peer)


class HelperOpening:
    """The helper's side. `header` is there once it has signed."""

    def __init__(
        self,
        params: TwoServerParams,
        model: Model,
        *,
        key: SigningKey,
        entropy: Entropy,
        ledger: Ledger,
    ) -> None:
        if key.public != params.servers.helper:
            raise MisuseError("two servers: the helper's key is not the one that is pinned")
        self.params, self._key, self._ledger = params, key, ledger
        self._tables, self._dense = model.digests(params)
        secret = entropy.secret(NONCE, params.federation, params.round_id, HELPER)
        self._nonce = secret.reveal()
        self._offer: OpeningOffer | None = None
        self._said: dict[bytes, list[Outbound]] = {}
        self.header: Header | None = None
        self.phase = "opening"

    def receive(self, data: bytes) -> list[Outbound]:
        """Take the leader's message; the very bytes again get the same answer again.

        `ServerFault`: the helper has left the round.
        """
        mark = fingerprint(data)
        if mark not in self._said or self.phase == "left":
            self._said[mark] = self._receive(data)
        return self._said[mark]

    def _receive(self, data: bytes) -> list[Outbound]:
        try:
            if self.phase == "left":
                raise self._fault("goes on after the helper has left")
            try:
                message = wire.decode(data, expect=(OpeningOffer, OpeningReveal))
            except WireError as error:
                raise self._fault(f"sent bytes that are no message: {error}") from error
            if message.round_id != self.params.round_id:
                raise self._fault("opens another round")
            if isinstance(message, OpeningOffer) and self._offer is None:
                return self._on_offer(message)
            if isinstance(message, OpeningReveal) and self._offer and self.header is None:
                return self._on_reveal(message, self._offer)
            raise self._fault(f"sent {type(message).__name__}, which is not due")
        except ServerFault:
            self.phase = "left"
            raise

    def _on_offer(self, message: OpeningOffer) -> list[Outbound]:
        if message.context != self.params.context:
            raise self._fault("opens a round with other parameters")
        if not self._same_model(message):
            raise self._fault("holds another model than the helper")
        if not self._ledger.open_round(self.params.round_id):
            raise self._fault("opens a round that was opened before")
        self._offer = message
        nonce = OpeningNonce(round_id=self.params.round_id, nonce=self._nonce)
        return [Outbound.of(SERVER, nonce)]

    def _same_model(self, message: OpeningOffer) -> bool:
        return (message.tables, message.dense) == (self._tables, self._dense)

    def _on_reveal(self, message: OpeningReveal, offer: OpeningOffer) -> list[Outbound]:
        if commitment(self.params, message.nonce) != offer.commitment:
            raise self._fault("revealed another nonce than it had committed to")
        header = Header(
            round_id=self.params.round_id,
            context=self.params.context,
            leader_nonce=message.nonce,
            helper_nonce=self._nonce,
            tables=offer.tables,
            dense=offer.dense,
        )
        if not verify(self.params.servers.leader, message.signature, header.statement):
            raise self._fault("did not sign the header")
        self.header = header
        self.phase = "done"
        consent = OpeningConsent(
            round_id=self.params.round_id, signature=self._key.sign(header.statement)
        )
        return [Outbound.of(SERVER, consent)]

    def _fault(self, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self.params.round_id, phase="opening")
