"""Reports of a round as they come in, at both servers, checked, each accepted once.

Reading and writing do this alike. The helper's come through the leader, into its inbox.

A report that fails a check is a `PeerError` that names its client, and the client is excluded from
the round for good: the leader carried the report and could otherwise try another one. If a report
of that client is held already, the second one is refused and the first stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from tessera import wire
from tessera.crypto.dpf import Forest
from tessera.crypto.keys import SealingKey, SigningKey, is_public_key, verify
from tessera.crypto.secret import Secret
from tessera.errors import CryptoError, MisuseError, PeerError
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.protocols.machine import Coordinator, Follower, Moved, Outbound
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.key_period import KeyPeriod
from tessera.protocols.two_server.messages import (
    Digest,
    Forwarded,
    Header,
    HelperBox,
    Purpose,
    Query,
    Seeds,
    WriteReport,
)
from tessera.protocols.two_server.params import MAX_COHORT, TwoServerParams
from tessera.protocols.two_server.reports import (
    NO_KEYS,
    ReportContext,
    Reported,
    SingleWorker,
    Workers,
    check_keys,
    layouts_of,
    reported,
)
from tessera.wire.stored import ByDigest, Kept

# --- each counts once -----------------------------------------------------------------------------
#
# The helper records the rounds it took part in, the reports it saw and the lists it summed.
#
# A report that counted twice, or in two rounds, could be subtracted from a sum. Every box names
# its round, but a round may be restarted under the same number after a crash, so ids are kept for
# ever. A helper that is woken from an older snapshot does not know that it has released its share,
# and could be led to another list: the one list of a round is kept here, too.
#
# `MemoryReplayGuard` is the only implementation here. It starts empty in every process: a helper
# that restarts with an empty one would accept old reports and repeat old rounds. Whoever runs a
# helper beyond one process has to supply a guard with durable storage.


class ReplayGuard(Protocol):
    """An append-only store of round numbers and report ids.

    A call returns once its entry is durable; the helper answers on that assumption.
    `MemoryReplayGuard` does not meet it.
    """

    def begin_round(self, round_id: RoundId) -> bool:
        """Record that this round begins; False if it, or a later one, has begun before."""

    def accept(self, report_id: bytes) -> bool:
        """Record a report's id; False if it is recorded already."""

    def release(self, round_id: RoundId, reports: bytes) -> bool:
        """Record the list, by digest, over which this round's share is released; False if another
        one is recorded already."""


class MemoryReplayGuard:
    """A replay guard for simulations and tests; its entries live as long as the object."""

    def __init__(self) -> None:
        self._last: RoundId | None = None
        self._accepted: set[bytes] = set()
        self._released: dict[RoundId, bytes] = {}

    def begin_round(self, round_id: RoundId) -> bool:
        if self._last is not None and round_id <= self._last:
            return False
        self._last = round_id
        return True

    def accept(self, report_id: bytes) -> bool:
        if report_id in self._accepted:
            return False
        self._accepted.add(report_id)
        return True

    def release(self, round_id: RoundId, reports: bytes) -> bool:
        return self._released.setdefault(round_id, reports) == reports


# --- what both servers are given ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LeaderSetup:
    """The leader of a read or of a write, once both servers have signed the header."""

    params: TwoServerParams
    header: Header
    invited: Collection[ClientId]
    workers: Workers = field(default_factory=SingleWorker)

    party: ClassVar[Party] = SERVER

    @property
    def round_id(self) -> RoundId:
        return self.params.round_id

    @property
    def context(self) -> bytes:
        return self.header.digest


@dataclass(frozen=True, kw_only=True)
class HelperSetup:
    """The helper of a read or of a write; `directory` has the clients' certified keys."""

    params: TwoServerParams
    header: Header
    key: SigningKey
    box_key: SealingKey
    directory: Mapping[ClientId, bytes]
    replay_guard: ReplayGuard
    workers: Workers = field(default_factory=SingleWorker)

    party: ClassVar[Party] = HELPER

    def __post_init__(self) -> None:
        pinned = self.params.servers
        if (self.key.public, self.box_key.public) != (pinned.helper, pinned.box):
            raise MisuseError("two servers: the helper's keys are not the ones that are pinned")

    @property
    def round_id(self) -> RoundId:
        return self.params.round_id

    @property
    def context(self) -> bytes:
        return self.header.digest


# --- the helper's inbox ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperReport:
    """A report at the helper: what it takes to evaluate and to identify it."""

    report: Annotated[Kept[Forwarded], ByDigest(Forwarded)]
    digest: Digest = field(repr=False)
    seeds: Seeds = field(repr=False)
    dense_seed: Annotated[Secret | None, wire.Maybe(wire.SECRET)] = field(repr=False)
    answer_key: Annotated[bytes | None, wire.Maybe(wire.KEY)] = field(repr=False)

    @property
    def report_id(self) -> bytes:
        return self.report.message.report_id

    @property
    def public(self) -> tuple[bytes, ...]:
        return self.report.message.public


ReportsByClient = Annotated[
    dict[ClientId, HelperReport], wire.ByKey(wire.U32, wire.Nested(HelperReport), MAX_COHORT)
]


class ReportInbox:
    """The reports of one purpose in one round, and the clients that were excluded."""

    def __init__(
        self,
        setup: HelperSetup,
        purpose: Purpose,
        *,
        held: dict[ClientId, HelperReport] | None = None,
        excluded: dict[ClientId, str] | None = None,
        keys: KeyPeriod | None = None,
    ) -> None:
        """`keys` are those of an earlier round that reports have hints for."""
        self.setup, self.purpose = setup, purpose
        self.params, self.header = setup.params, setup.header
        # The caller's own dictionaries, if it stores them in its state.
        self.held: dict[ClientId, HelperReport] = {} if held is None else held
        self.excluded: dict[ClientId, str] = {} if excluded is None else excluded
        self._forests = layouts_of(self.params, self.header).forests(purpose)
        self._keys = keys
        self._hashed: tuple[Forwarded, bytes] | None = None

    def report_context(self, client: ClientId, report_id: bytes) -> ReportContext:
        return ReportContext(
            params=self.params,
            header=self.header,
            purpose=self.purpose,
            client=client,
            report_id=report_id,
        )

    def forget(self) -> None:
        """Drop all reports, with their seeds: the round is over for the helper."""
        self.held, self.excluded, self._hashed = {}, {}, None

    def take(self, report: Kept[Forwarded]) -> None:
        """Hold this report, or refuse it with a `PeerError` for its client."""
        message, client = report.message, report.message.sender
        if client not in self.setup.directory:
            raise self._refusal(client, "has no certified key")
        if client not in self.held and len(self.held) >= self.params.cohort:
            raise self._refusal(client, "would exceed the size of the cohort")
        context = self.report_context(client, message.report_id)
        digest = reports.report_digest(self._public_digest(context, message), message.box)
        if client in self.held:
            if self.held[client].digest == digest:
                return  # a repeated delivery
            raise self._refusal(client, "sent a second report")
        if client in self.excluded:
            raise self._refusal(client, "was refused before")
        try:
            box = self._checked(context, message)
        except PeerError as error:
            self.excluded[client] = error.reason
            raise
        self.held[client] = HelperReport(
            report=report,
            digest=digest,
            seeds=box.seeds,
            dense_seed=box.dense_seed,
            answer_key=box.answer_key,
        )
        self._hashed = None
        report.forget_decoded()

    def _checked(self, context: ReportContext, message: Forwarded) -> HelperBox:
        client = context.client
        try:
            box, signed = reports.unsealed(context, message.box, self.setup.box_key)
        except CryptoError as error:
            raise self._refusal(client, "sent a box that cannot be unsealed") from error
        if not reports.matches(box, context):
            raise self._refusal(client, "sent a box of another round, client or report")
        if not self._is_signed(box, signed, client):
            raise self._refusal(client, "sent a box with a bad signature")
        # From here on the report is the client's own: its id is used up, whatever follows.
        if not self._is_fresh(message.report_id):
            raise self._refusal(client, "sent a report id that was used before")
        if not self._is_public_part(box, context, message):
            raise self._refusal(client, "sent a public part that does not match its box")
        retrieving = self.purpose is Purpose.RETRIEVE
        own = None if self._keys is None else self._keys.clients.get(client)
        if self._keys is not None and own is None:
            raise self._refusal(client, NO_KEYS)
        seeds = 0 if own is not None else len(self._forests)
        due = (seeds, not retrieving and bool(self.params.dense_words), retrieving)
        there = (len(box.seeds), box.dense_seed is not None, box.answer_key is not None)
        if there != due or (box.answer_key is not None and not is_public_key(box.answer_key)):
            raise self._refusal(client, "sent a box with missing or unexpected parts")
        corrected = not retrieving and self.params.verified and own is None
        check_keys(
            self._forests, message.public, self._refusal, client, corrected=corrected, keys=own
        )
        return box

    def _is_signed(self, box: HelperBox, signed: bytes, client: ClientId) -> bool:
        """Whether the client of this certified key made the box."""
        public = self.setup.directory.get(client)
        return public is not None and verify(public, box.signature, signed)

    def _is_fresh(self, report_id: bytes) -> bool:
        return self.setup.replay_guard.accept(report_id)

    def _is_public_part(self, box: HelperBox, context: ReportContext, message: Forwarded) -> bool:
        return box.public == self._public_digest(context, message)

    def _public_digest(self, context: ReportContext, message: Forwarded) -> bytes:
        """Needed twice for one message, and expensive to compute."""
        if self._hashed is None or self._hashed[0] is not message:
            self._hashed = message, context.public_digest(message.public)
        return self._hashed[1]

    def _refusal(self, client: ClientId, reason: str) -> PeerError:
        return PeerError(
            reason, round_id=self.params.round_id, phase=self.purpose.value, peer=client
        )


# --- the two collectors ---------------------------------------------------------------------------
#
# Reading and writing begin alike at both servers: the leader checks what a client sends, holds it
# and forwards it; the helper's inbox takes it.

L = TypeVar("L", bound=LeaderSetup)
H = TypeVar("H", bound=HelperSetup)


class CollectingLeader(Coordinator[L]):
    """A leader that collects reports; a state in which it holds any has them in `held`."""

    PURPOSE: ClassVar[Purpose]
    NOUN: ClassVar[str]
    """What a client sends, in a refusal."""

    def _set_up(self, setup: L) -> None:
        super()._set_up(setup)
        self.params, self.header = setup.params, setup.header
        self.invited = frozenset(setup.invited)

    @property
    def _keys(self) -> KeyPeriod | None:
        """Those of an earlier round that reports have hints for, if they have."""
        return None

    @property
    def expected(self) -> frozenset[Party]:
        """The clients whose reports have not come, or the helper."""
        if any((type(self.state), kind) in self.STEPS for kind in self.FROM_CLIENT):
            return frozenset(self.invited - self.state.held.keys())
        waits = any((type(self.state), kind) in self.STEPS for kind in self.FROM_HELPER)
        return frozenset({HELPER}) if waits else frozenset()

    def _check_due(self, sender: Party, message: Any) -> None:
        if isinstance(message, self.FROM_CLIENT) and sender in self.state.held:
            raise self._refuse(sender, f"sent a {self.NOUN} that is not due")

    def _check_report(self, report: Query | WriteReport, *, corrected: bool = False) -> None:
        """Refuse what could not be evaluated."""
        sender, forests, keys = report.sender, self._forests, self._keys
        own = None if keys is None else keys.clients.get(sender)
        if keys is not None and own is None:
            raise self._refuse(sender, NO_KEYS)
        check_keys(forests, report.public, self._refuse, sender, corrected=corrected, keys=own)
        if len(report.seeds) != (len(forests) if own is None else 0):
            raise self._refuse(sender, f"sent {len(report.seeds)} seeds")

    def _digest(self, report: Query | WriteReport) -> bytes:
        """The digest by which both servers name the report."""
        context = self._report_context(report.sender, report.report_id)
        return context.report_digest(report.public, report.box)

    def _forwarded(self, report: Query | WriteReport) -> Outbound:
        forwarded = Forwarded(
            purpose=self.PURPOSE,
            round_id=self.round_id,
            sender=report.sender,
            report_id=report.report_id,
            public=report.public,
            box=report.box,
        )
        return Outbound.of(HELPER, forwarded)

    def _reported(self, client: ClientId, report: Query | WriteReport) -> Reported:
        """A report that was checked, to be evaluated."""
        context = self._report_context(client, report.report_id)
        return reported(context, report.public, report.seeds, self._forests, self._keys)

    @property
    def _forests(self) -> tuple[Forest, ...]:
        return layouts_of(self.params, self.header).forests(self.PURPOSE)

    def _report_context(self, client: ClientId, report_id: bytes) -> ReportContext:
        return ReportContext(
            params=self.params,
            header=self.header,
            purpose=self.PURPOSE,
            client=client,
            report_id=report_id,
        )


class CollectingHelper(Follower[H]):
    """A helper that collects reports; `HOLDING` are the states that have them."""

    PURPOSE: ClassVar[Purpose]
    HOLDING: ClassVar[tuple[type[Any], ...]]
    LATE: ClassVar[str]
    """Said of a report that comes when the list is closed."""

    def _set_up(self, setup: H) -> None:
        super()._set_up(setup)
        self.params, self.header = setup.params, setup.header

    @property
    def _keys(self) -> KeyPeriod | None:
        """Those of an earlier round that reports have hints for, if they have."""
        return None

    @cached_property
    def inbox(self) -> ReportInbox:
        """What has come; it is the state's own, while the state holds it."""
        holding = isinstance(self.state, self.HOLDING)
        return ReportInbox(
            self.setup,
            self.PURPOSE,
            held=self.state.held if holding else None,
            excluded=self.state.excluded if holding else None,
            keys=self._keys,
        )

    def _end(self, state: Any) -> None:
        super()._end(state)
        self._forget()

    def _forget(self) -> None:
        """Drop what the inbox holds; a role that is woken may have no inbox yet."""
        if "inbox" in self.__dict__:
            self.inbox.forget()

    def _check_message(self, message: Any) -> None:
        if message.round_id != self.round_id:
            raise self._fault("sent a message of another round")
        if isinstance(message, Forwarded) and message.purpose is not self.PURPOSE:
            other = "writing" if self.PURPOSE is Purpose.RETRIEVE else "reading"
            raise self._fault(f"forwarded keys that are for {other}")

    def _on_report(self, state: Any, kept: Kept[Forwarded]) -> Moved:
        self.inbox.take(kept)
        return state, []

    def _on_late_report(self, state: Any, kept: Kept[Forwarded]) -> Moved:
        raise PeerError(
            self.LATE, round_id=self.round_id, phase=self.phase, peer=kept.message.sender
        )

    def _reported(self, client: ClientId, held: HelperReport) -> Reported:
        """A report that was checked, to be evaluated."""
        context = self.inbox.report_context(client, held.report_id)
        forests = layouts_of(self.params, self.header).forests(self.PURPOSE)
        return reported(context, held.public, held.seeds, forests, self._keys)
