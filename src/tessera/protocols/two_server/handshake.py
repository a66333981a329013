"""The handshake of a two-server round: one header that both servers have signed.

The seed of the bins is derived from both servers' nonces. The leader commits to its nonce, the
helper answers with its own, the leader reveals: neither can choose the seed. The leader learns the
seed first and could abort a round whose seed it dislikes. The helper takes part in each round
number once and its replay guard records it, so every such attempt costs a round number.

The header carries the digest of every table and of the dense part. The helper signs only the
digests of its own copy. A leader that has changed a row, to see whose training fails on it, gets no
signature, and no client sends a query.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import SigningKey, verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import MisuseError, PeerError, RoundAborted, ServerFault, WireError
from tessera.ids import HELPER, SERVER, ClientId, Party
from tessera.protocols import wire
from tessera.protocols.machine import Outbound, message_digest
from tessera.protocols.two_server.messages import (
    HandshakeConsent,
    HandshakeNonce,
    HandshakeOffer,
    HandshakeReveal,
    Header,
    SignedHeader,
)
from tessera.protocols.two_server.model import ServedModel
from tessera.protocols.two_server.params import TwoServerParams
from tessera.protocols.two_server.replay_guard import ReplayGuard

PHASE: Final = "handshake"
"""The name of this phase in the events of a run, which are stored."""


def commitment(params: TwoServerParams, nonce: bytes) -> bytes:
    parts = encode_context(Label.SERVER_COMMITMENT, params.context, nonce)
    return hashlib.sha256(parts).digest()


def check_header(params: TwoServerParams, signed: SignedHeader) -> Header:
    """The header, if both servers signed it and its parameters are those this client knows."""

    def fault(reason: str) -> ServerFault:
        return ServerFault(reason, round_id=params.round_id, phase=PHASE)

    header = signed.header
    if header.round_id != params.round_id or header.context != params.context:
        raise fault("signed a round with other parameters")
    if header.tables.keys() != {t.table for t in params.read}:
        raise fault("signed a round without the digest of every table")
    statement = header.statement
    if not verify(params.servers.leader, signed.leader, statement):
        raise fault("did not sign the header it sent")
    if not verify(params.servers.helper, signed.helper, statement):
        raise fault("sent a header that the helper did not sign")
    return header


class LeaderHandshake:
    """The leader's side. `signed_header` is set once the helper has consented."""

    def __init__(
        self,
        params: TwoServerParams,
        model: ServedModel,
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
        secret = entropy.secret(Label.SERVER_NONCE, params.federation, params.round_id, SERVER)
        self._nonce = secret.reveal()  # secret until the helper has answered, then public
        self._header: Header | None = None
        self._signature = b""
        self.signed_header: SignedHeader | None = None
        self.phase = PHASE

    def begin(self) -> list[Outbound]:
        offer = HandshakeOffer(
            round_id=self.params.round_id,
            context=self.params.context,
            commitment=commitment(self.params, self._nonce),
            tables=self._tables,
            dense=self._dense,
        )
        return [Outbound.of(HELPER, offer)]

    @property
    def expected(self) -> frozenset[ClientId]:
        """No clients: the handshake waits for the helper only."""
        return frozenset()

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """Take the helper's message; after its consent the signed header goes to every client."""
        if sender != HELPER:
            raise self._refuse("sent a message before the handshake was complete", sender)
        try:
            message = wire.decode(data, expect=(HandshakeNonce, HandshakeConsent))
        except WireError as error:
            raise self._refuse(f"sent an invalid message: {error}") from error
        if message.round_id != self.params.round_id:
            raise self._refuse("answered for another round")
        if isinstance(message, HandshakeNonce) and self._header is None:
            return self._on_nonce(message)
        if isinstance(message, HandshakeConsent) and self._header and self.signed_header is None:
            return self._on_consent(message, self._header)
        raise self._refuse(f"sent {type(message).__name__}, which is not due")

    def close_phase(self) -> list[Outbound]:
        """Abort: the helper has not answered in time."""
        self.phase = "aborted"
        raise RoundAborted(round_id=self.params.round_id, phase=PHASE, answered=0, needed=1)

    def _on_nonce(self, message: HandshakeNonce) -> list[Outbound]:
        self._header = Header(
            round_id=self.params.round_id,
            context=self.params.context,
            leader_nonce=self._nonce,
            helper_nonce=message.nonce,
            tables=self._tables,
            dense=self._dense,
        )
        self._signature = self._key.sign(self._header.statement)
        reveal = HandshakeReveal(
            round_id=self.params.round_id, nonce=self._nonce, signature=self._signature
        )
        return [Outbound.of(HELPER, reveal)]

    def _on_consent(self, message: HandshakeConsent, header: Header) -> list[Outbound]:
        if not verify(self.params.servers.helper, message.signature, header.statement):
            raise self._refuse("signed another header")
        self.signed_header = SignedHeader(
            header=header, leader=self._signature, helper=message.signature
        )
        self.phase = "done"
        return [Outbound.of(c, self.signed_header) for c in sorted(self.invited)]

    def _refuse(self, reason: str, peer: Party = HELPER) -> PeerError:
        return PeerError(reason, round_id=self.params.round_id, phase=self.phase, peer=peer)


class HelperHandshake:
    """The helper's side. `header` is set once the helper has signed it."""

    def __init__(
        self,
        params: TwoServerParams,
        model: ServedModel,
        *,
        key: SigningKey,
        entropy: Entropy,
        replay_guard: ReplayGuard,
    ) -> None:
        if key.public != params.servers.helper:
            raise MisuseError("two servers: the helper's key is not the one that is pinned")
        self.params, self._key, self._replay_guard = params, key, replay_guard
        self._tables, self._dense = model.digests(params)
        secret = entropy.secret(Label.SERVER_NONCE, params.federation, params.round_id, HELPER)
        self._nonce = secret.reveal()
        self._offer: HandshakeOffer | None = None
        self._answers: dict[bytes, list[Outbound]] = {}
        self.header: Header | None = None
        self.phase = PHASE

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """Take the leader's message; a repeated message gets the same answer.

        `ServerFault`: the helper has left the round.
        """
        mark = message_digest(data)
        if mark not in self._answers or self.phase == "left":
            self._answers[mark] = self._receive(data)
        return self._answers[mark]

    def _receive(self, data: bytes) -> list[Outbound]:
        try:
            if self.phase == "left":
                raise self._fault("sent a message after the helper had left")
            try:
                message = wire.decode(data, expect=(HandshakeOffer, HandshakeReveal))
            except WireError as error:
                raise self._fault(f"sent an invalid message: {error}") from error
            if message.round_id != self.params.round_id:
                raise self._fault("started another round")
            if isinstance(message, HandshakeOffer) and self._offer is None:
                return self._on_offer(message)
            if isinstance(message, HandshakeReveal) and self._offer and self.header is None:
                return self._on_reveal(message, self._offer)
            raise self._fault(f"sent {type(message).__name__}, which is not due")
        except ServerFault:
            self.phase = "left"
            raise

    def _on_offer(self, message: HandshakeOffer) -> list[Outbound]:
        if message.context != self.params.context:
            raise self._fault("started a round with other parameters")
        if not self._same_model(message):
            raise self._fault("holds another model than the helper")
        if not self._replay_guard.begin_round(self.params.round_id):
            raise self._fault("started a round that was started before")
        self._offer = message
        nonce = HandshakeNonce(round_id=self.params.round_id, nonce=self._nonce)
        return [Outbound.of(SERVER, nonce)]

    def _same_model(self, message: HandshakeOffer) -> bool:
        return (message.tables, message.dense) == (self._tables, self._dense)

    def _on_reveal(self, message: HandshakeReveal, offer: HandshakeOffer) -> list[Outbound]:
        if commitment(self.params, message.nonce) != offer.commitment:
            raise self._fault("revealed a nonce that does not match its commitment")
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
        consent = HandshakeConsent(
            round_id=self.params.round_id, signature=self._key.sign(header.statement)
        )
        return [Outbound.of(SERVER, consent)]

    def _fault(self, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self.params.round_id, phase=PHASE)
