"""The handshake of a two-server round: one header that both servers have signed.

The seed of the bins is derived from both servers' nonces. The leader commits to its nonce, the
helper answers with its own, the leader reveals: neither can choose the seed. The leader learns the
seed first and could abort a round whose seed it dislikes. The helper takes part in each round
number once and its replay guard records it, so every such attempt costs a round number.

The header carries the digest of every table and of the dense part. The helper signs only the
digests of its own copy. A leader that has changed a row, to see whose training fails on it, gets no
signature, and no client sends a query.

It also names the keys that are written with: new ones, or those of an earlier round of the same key
period. The helper says which it holds; the leader has stored its own before the helper could.

What a client of both protocols does first: check the signed header, then wait for its caller.

A client leaves (`ServerFault`) only for reasons that do not depend on its rows: signatures, digests
and lengths that everybody could check, and rows that fail their check, whichever they are. Failures
of training on the rows are handled by its caller, which sends zeros rather than nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import Identity, SigningKey, verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import MisuseError, ServerFault
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId, TableId
from tessera.protocols.machine import (
    Aborted,
    Coordinator,
    Follower,
    Left,
    Moved,
    Outbound,
    UnderParams,
    to_all,
)
from tessera.protocols.two_server.collector import ReplayGuard
from tessera.protocols.two_server.key_period import KeyStore, OwnKeyStore, living, with_keys
from tessera.protocols.two_server.messages import (
    Digest,
    HandshakeConsent,
    HandshakeNonce,
    HandshakeOffer,
    HandshakeReveal,
    Header,
    Purpose,
    Round,
    Signature,
    SignedHeader,
)
from tessera.protocols.two_server.params import Ids, TwoServerParams, TwoServerTable
from tessera.protocols.two_server.reports import Layouts, ReportContext, layouts_of
from tessera.wire.stored import ByDigest, Kept

# --- the model ------------------------------------------------------------------------------------
#
# Both servers serve it, and sign digests of it.


Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """Rows as bytes, in the order of each table's domain, and the dense part as bytes."""

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
        """(digest of every table, digest of the dense part), as the header states them."""
        self.check(params)
        tables = {t.table: table_digest(t.table, self.tables[t.table]) for t in params.read}
        return tables, dense_digest(self.dense)


def table_digest(table: TableId, rows: Bytes) -> bytes:
    shape = encode_context(Label.TABLE_DIGEST, table, *rows.shape)
    return hashlib.sha256(shape + np.ascontiguousarray(rows).tobytes()).digest()


def dense_digest(dense: bytes) -> bytes:
    return hashlib.sha256(encode_context(Label.DENSE_DIGEST, wire.part_digest(dense))).digest()


# --- the header -----------------------------------------------------------------------------------

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
    later = header.epoch > 0
    if header.epoch < 0 or (header.bins is not None) is not later:
        raise fault("signed a round with keys of another round, and not their bins")
    if not params.same_key_period(header.period, header.round_id):
        raise fault("signed a round with keys that are too old")
    statement = header.statement
    if not verify(params.servers.leader, signed.leader, statement):
        raise fault("did not sign the header it sent")
    if not verify(params.servers.helper, signed.helper, statement):
        raise fault("sent a header that the helper did not sign")
    return header


# --- the leader -----------------------------------------------------------------------------------


@wire.record(tag=0x0430)
@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The offer is sent; its nonce is secret until the helper has answered."""

    nonce: Digest = field(repr=False)
    offer: Annotated[Kept[HandshakeOffer], ByDigest(HandshakeOffer)]


@wire.record(tag=0x0431)
@dataclass(frozen=True, slots=True, kw_only=True)
class Revealed:
    """Both nonces are known; waits for the helper's signature on the header."""

    header: Header
    signature: Signature = field(repr=False)


@wire.record(tag=0x0432)
@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderSigned:
    """Both servers have signed."""

    signed: Annotated[Kept[SignedHeader], ByDigest(SignedHeader)]


@dataclass(frozen=True, kw_only=True)
class LeaderHandshakeSetup(UnderParams):
    """`key_store` has the leader's keys of earlier rounds, where they last longer than one."""

    params: TwoServerParams
    invited: Collection[ClientId]
    key: SigningKey
    key_store: KeyStore | None = None

    party: ClassVar[Party] = SERVER

    def __post_init__(self) -> None:
        if self.key.public != self.params.servers.leader:
            raise MisuseError("two servers: the leader's key is not the one that is pinned")


class LeaderHandshake(Coordinator[LeaderHandshakeSetup]):
    """The leader's side. `signed_header` is there once the helper has consented."""

    ROLE = "leader of a handshake"
    STATES = (Committed, Revealed, HeaderSigned, Aborted)
    PHASES: ClassVar = {
        Committed: PHASE,
        Revealed: PHASE,
        HeaderSigned: "done",
        Aborted: "aborted",
    }
    FROM_HELPER = (HandshakeNonce, HandshakeConsent)

    def __init__(
        self, setup: LeaderHandshakeSetup, model: ServedModel, *, entropy: Entropy
    ) -> None:
        params = setup.params
        tables, dense = model.digests(params)
        secret = entropy.secret(Label.SERVER_NONCE, params.federation, params.round_id, SERVER)
        nonce = secret.reveal()
        offer = HandshakeOffer(
            round_id=params.round_id,
            context=params.context,
            commitment=commitment(params, nonce),
            tables=tables,
            dense=dense,
        )
        super().__init__(setup, Committed(nonce=nonce, offer=Kept.of(offer)))

    def _set_up(self, setup: LeaderHandshakeSetup) -> None:
        super()._set_up(setup)
        self.params, self.invited = setup.params, frozenset(setup.invited)

    def begin(self) -> list[Outbound]:
        """The first message, to the helper."""
        if not isinstance(self.state, Committed):
            raise MisuseError("a handshake begins once")
        return self.resend()

    @property
    def expected(self) -> frozenset[Party]:
        """The helper: no client is waited for."""
        waits = isinstance(self.state, Committed | Revealed)
        return frozenset({HELPER}) if waits else frozenset()

    @property
    def signed_header(self) -> Kept[SignedHeader] | None:
        return self.state.signed if isinstance(self.state, HeaderSigned) else None

    def _kinds_from(self, sender: Party) -> tuple[type[Any], ...]:
        if sender != HELPER:
            raise self._refuse(sender, "sent a message before the handshake was complete")
        return self.FROM_HELPER

    def resend(self) -> list[Outbound]:
        """Its last message to the helper again; nothing once both have signed."""
        match self.state:
            case Committed(offer=offer):
                return [Outbound.again(HELPER, offer.data)]
            case Revealed(header=header, signature=signature):
                reveal = HandshakeReveal(
                    round_id=self.round_id, nonce=header.leader_nonce, signature=signature
                )
                return [Outbound.of(HELPER, reveal)]
        return []

    def _on_nonce(self, state: Committed, kept: Kept[HandshakeNonce]) -> Moved:
        offer, period, bins = state.offer.message, kept.message.period, None
        if period != self.round_id:
            held = living(self.params, self.setup.key_store, self.round_id)
            if held is None or held.period != period:
                raise self._refuse(HELPER, f"holds keys of round {period}, which the leader lacks")
            bins = held.seed
        header = Header(
            round_id=self.round_id,
            context=self.params.context,
            leader_nonce=state.nonce,
            helper_nonce=kept.message.nonce,
            tables=offer.tables,
            dense=offer.dense,
            period=period,
            bins=bins,
        )
        signature = self.setup.key.sign(header.statement)
        reveal = HandshakeReveal(round_id=self.round_id, nonce=state.nonce, signature=signature)
        return Revealed(header=header, signature=signature), [Outbound.of(HELPER, reveal)]

    def _on_consent(self, state: Revealed, kept: Kept[HandshakeConsent]) -> Moved:
        """The signed header goes to every client; those without keys wait for the next period."""
        signature = kept.message.signature
        if not verify(self.params.servers.helper, signature, state.header.statement):
            raise self._refuse(HELPER, "signed another header")
        signed = Kept.of(
            SignedHeader(header=state.header, leader=state.signature, helper=signature)
        )
        here = with_keys(self.params, state.header, self.setup.key_store, self.invited)
        return HeaderSigned(signed=signed), to_all(here, signed)

    def _give_up(self, state: Committed | Revealed) -> Moved:
        raise self._too_few(0, 1, "the helper has not answered")


LeaderHandshake.STEPS = {
    (Committed, HandshakeNonce): LeaderHandshake._on_nonce,
    (Revealed, HandshakeConsent): LeaderHandshake._on_consent,
}
LeaderHandshake.CLOSES = {
    Committed: LeaderHandshake._give_up,
    Revealed: LeaderHandshake._give_up,
}


# --- the helper -----------------------------------------------------------------------------------


@wire.record(tag=0x0438)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingOffer:
    """Has its nonce; waits for the leader's commitment."""

    nonce: Digest = field(repr=False)


@wire.record(tag=0x0439)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingReveal:
    """Its nonce is sent; waits for the one that the leader has committed to."""

    nonce: Digest = field(repr=False)
    period: Round
    offer: Annotated[Kept[HandshakeOffer], ByDigest(HandshakeOffer)]


@wire.record(tag=0x043A)
@dataclass(frozen=True, slots=True, kw_only=True)
class Consented:
    """Has signed the header."""

    header: Header


@dataclass(frozen=True, kw_only=True)
class HelperHandshakeSetup(UnderParams):
    """`model` is the helper's own copy, `key_store` has its keys of earlier rounds."""

    params: TwoServerParams
    model: ServedModel
    key: SigningKey
    replay_guard: ReplayGuard
    key_store: KeyStore | None = None

    party: ClassVar[Party] = HELPER

    def __post_init__(self) -> None:
        if self.key.public != self.params.servers.helper:
            raise MisuseError("two servers: the helper's key is not the one that is pinned")


class HelperHandshake(Follower[HelperHandshakeSetup]):
    """The helper's side. `header` is there once the helper has signed it."""

    ROLE = "helper of a handshake"
    STATES = (AwaitingOffer, AwaitingReveal, Consented, Left)
    PHASES: ClassVar = {
        AwaitingOffer: PHASE,
        AwaitingReveal: PHASE,
        Consented: "done",
        Left: "left",
    }
    SETTLED = (Consented,)
    FROM_SERVER = (HandshakeOffer, HandshakeReveal)

    def __init__(self, setup: HelperHandshakeSetup, *, entropy: Entropy) -> None:
        params = setup.params
        secret = entropy.secret(Label.SERVER_NONCE, params.federation, params.round_id, HELPER)
        super().__init__(setup, AwaitingOffer(nonce=secret.reveal()))

    @property
    def header(self) -> Header | None:
        return self.state.header if isinstance(self.state, Consented) else None

    def resend(self) -> list[Outbound]:
        """Its last message again, byte for byte."""
        match self.state:
            case AwaitingReveal(nonce=nonce, period=period):
                said = HandshakeNonce(round_id=self.round_id, nonce=nonce, period=period)
                return [Outbound.of(SERVER, said)]
            case Consented(header=header):
                signature = self.setup.key.sign(header.statement)  # deterministic
                consent = HandshakeConsent(round_id=self.round_id, signature=signature)
                return [Outbound.of(SERVER, consent)]
        return []

    def _check_message(self, message: Any) -> None:
        if message.round_id != self.round_id:
            raise self._fault("started another round")

    def _on_offer(self, state: AwaitingOffer, offer: Kept[HandshakeOffer]) -> Moved:
        if offer.message.context != self.setup.params.context:
            raise self._fault("started a round with other parameters")
        if not self._same_model(offer.message):
            raise self._fault("holds another model than the helper")
        if 0 < self.setup.params.rounds <= self.round_id:
            raise self._fault("started a round after the last one of its training")
        if not self.setup.replay_guard.begin_round(self.round_id):
            raise self._fault("started a round that was started before")
        held = living(self.setup.params, self.setup.key_store, self.round_id)
        period = self.round_id if held is None else held.period
        following = AwaitingReveal(nonce=state.nonce, period=period, offer=offer)
        said = HandshakeNonce(round_id=self.round_id, nonce=state.nonce, period=period)
        return following, [Outbound.of(SERVER, said)]

    def _same_model(self, message: HandshakeOffer) -> bool:
        return (message.tables, message.dense) == self.setup.model.digests(self.setup.params)

    def _on_reveal(self, state: AwaitingReveal, kept: Kept[HandshakeReveal]) -> Moved:
        message, offer = kept.message, state.offer.message
        if commitment(self.setup.params, message.nonce) != offer.commitment:
            raise self._fault("revealed a nonce that does not match its commitment")
        held = living(self.setup.params, self.setup.key_store, self.round_id)
        later = state.period != self.round_id
        if later and (held is None or held.period != state.period):
            raise MisuseError("two servers: keys that the helper has named are not in its store")
        header = Header(
            round_id=self.round_id,
            context=self.setup.params.context,
            leader_nonce=message.nonce,
            helper_nonce=state.nonce,
            tables=offer.tables,
            dense=offer.dense,
            period=state.period,
            bins=held.seed if later and held is not None else None,
        )
        if not verify(self.setup.params.servers.leader, message.signature, header.statement):
            raise self._fault("did not sign the header")
        consent = HandshakeConsent(
            round_id=self.round_id, signature=self.setup.key.sign(header.statement)
        )
        return Consented(header=header), [Outbound.of(SERVER, consent)]


HelperHandshake.STEPS = {
    (AwaitingOffer, HandshakeOffer): HelperHandshake._on_offer,
    (AwaitingReveal, HandshakeReveal): HelperHandshake._on_reveal,
}


KeptHeader = Annotated[Kept[SignedHeader], ByDigest(SignedHeader)]


@wire.record(tag=0x0420)
@dataclass(frozen=True, slots=True, kw_only=True)
class Invited:
    """Knows the round; waits for the signed header."""


@wire.record(tag=0x0421)
@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The header is signed and the bins are known; waits for its caller."""

    signed: KeptHeader


@dataclass(frozen=True)
class TwoServerClientSetup(UnderParams):
    """`own_keys` stores its keys, where they last longer than a round."""

    params: TwoServerParams
    party: ClientId
    _: KW_ONLY
    entropy: Entropy
    identity: Identity
    own_keys: OwnKeyStore | None = None


class TwoServerClient(Follower[TwoServerClientSetup]):
    """One client in one round of one of the two protocols; `STEPS` says which messages it takes."""

    PURPOSE: ClassVar[Purpose]

    def __init__(self, setup: TwoServerClientSetup, *, last_round: RoundId | None = None) -> None:
        """`last_round` is the highest round this client has ever joined; numbers only increase."""
        if last_round is not None and setup.round_id <= last_round:
            raise ServerFault(
                f"started round {setup.round_id} after round {last_round}",
                round_id=setup.round_id,
                phase=PHASE,
            )
        super().__init__(setup, Invited())

    def _set_up(self, setup: TwoServerClientSetup) -> None:
        super()._set_up(setup)
        self.params, self.me, self._entropy = setup.params, setup.party, setup.entropy

    @property
    def is_ready(self) -> bool:
        """Whether it waits for its caller to `submit`."""
        return isinstance(self.state, Prepared)

    def _on_header(self, state: Invited, signed: Kept[SignedHeader]) -> Moved:
        check_header(self.params, signed.message)
        return Prepared(signed=signed), []

    @property
    def signed_header(self) -> Kept[SignedHeader]:
        """What both servers signed, while this client waits for its caller."""
        if not isinstance(self.state, Prepared):
            raise MisuseError(f"nothing is due in state {self.phase}")
        return self.state.signed

    def prepare(self, signed: Kept[SignedHeader]) -> None:
        """Go on with the header that the same client's other protocol has checked."""
        if not isinstance(self.state, Invited):
            raise MisuseError(f"a header is not due in state {self.phase}")
        self._move(Prepared(signed=signed), b"")

    def resend(self) -> list[Outbound]:
        """What it has sent, again, byte for byte."""
        sent: Kept[Any] | None = getattr(self.state, "sent", None)
        return [] if sent is None else [Outbound.again(SERVER, sent.data)]

    # -- for the two protocols

    def _report_context(self, header: Header, report_id: bytes) -> ReportContext:
        return ReportContext(
            params=self.params,
            header=header,
            purpose=self.PURPOSE,
            client=self.me,
            report_id=report_id,
        )

    def _new_report_context(self, header: Header, content: bytes) -> ReportContext:
        """Seeds and keys follow from the report's id, and that from what the report says.

        A client that was set back and has trained again says something else, under other seeds:
        two reports under the same ones would show the difference of two updates, and its bins.
        """
        where = (self.params.federation, self.params.round_id, self.me, self.PURPOSE.value)
        own = self._entropy.secret(Label.REPORT_ID, *where, header.digest, content)
        return self._report_context(header, own.reveal())  # public, and unique

    def _layouts(self, header: Header) -> Layouts:
        return layouts_of(self.params, header)


def content_digest(*parts: bytes | np.ndarray[Any, Any]) -> bytes:
    """Of all that a report says; only ever an input of a keyed derivation."""
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else np.ascontiguousarray(part).view(np.uint8).data
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.digest()


def check_tables(given: Mapping[Any, Any], due: tuple[TwoServerTable, ...]) -> None:
    if given.keys() != {t.table for t in due}:
        raise MisuseError("two servers: rows of other tables than the round has")


def row_indices(spec: TwoServerTable, ids: Ids) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Our caller's rows: ascending ids of the domain, at most as many as the plan allows."""
    rows = spec.index(ids)
    if bool((rows[1:] <= rows[:-1]).any()):
        raise MisuseError(f"table {spec.table}: row ids ascend, without repeats")
    if len(rows) > spec.max_rows:
        raise MisuseError(f"table {spec.table}: {len(rows)} rows where max_rows is {spec.max_rows}")
    return rows
