"""The leader of a private write: collects reports, agrees on one list, and opens the sum.

Phases follow each other: collect, exclude (the helper says which reports it does not hold), open
(the helper's share comes), done. Each is a record, so that the leader can be stopped between any
two messages; the carrier stores the snapshot before it sends them.

Messages between the servers may be lost or repeated. The leader sends its last message again, byte
for byte, when its carrier calls `resend`. A repeated message of the helper is ignored, except for
the share: it is answered with the sum again, since the helper has not received it and the leader,
which is done, waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final

from tessera.crypto.keys import SigningKey, verify
from tessera.errors import MisuseError, PeerError, RoundAborted, WireError
from tessera.ids import HELPER, ClientId, Party
from tessera.protocols import wire
from tessera.protocols.machine import Outbound, message_digest
from tessera.protocols.scatter import sums
from tessera.protocols.scatter.messages import (
    Closing,
    Exclusions,
    IncludedList,
    Listed,
    OpenedSum,
    SumShare,
    WriteReport,
)
from tessera.protocols.scatter.sums import TwoServerSum
from tessera.protocols.secagg.phases import MAX_SUM_BYTES
from tessera.protocols.two_server.envelope import ReportContext
from tessera.protocols.two_server.inbox import Reasons
from tessera.protocols.two_server.keys import LEADER_PARTY, Reported, check_keys, check_words
from tessera.protocols.two_server.layouts import layouts_of
from tessera.protocols.two_server.messages import (
    Blob,
    Blobs,
    Digest,
    Forwarded,
    Header,
    Purpose,
    Seeds,
)
from tessera.protocols.two_server.params import MAX_COHORT, TwoServerParams
from tessera.protocols.two_server.workers import SingleWorker, Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderReport:
    """A report at the leader."""

    report_id: Digest = field(repr=False)
    digest: Digest = field(repr=False)
    public: Blobs = field(repr=False)
    seeds: Seeds = field(repr=False)
    dense: Blob = field(repr=False)


LeaderReports = Annotated[
    dict[ClientId, LeaderReport], wire.ByKey(wire.U32, wire.Nested(LeaderReport), MAX_COHORT)
]


@wire.record(tag=0x0680)
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectingReports:
    """Reports come in and are forwarded to the helper."""

    held: LeaderReports = field(default_factory=dict)


@wire.record(tag=0x0681)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingExclusions:
    """Collection is over; waits for the list of reports that the helper does not hold."""

    held: LeaderReports


@wire.record(tag=0x0682)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingShare:
    """The list is signed; waits for the helper's share over it."""

    held: LeaderReports
    excluded: Reasons


@wire.record(tag=0x0683)
@dataclass(frozen=True, slots=True, kw_only=True)
class SumOpened:
    """The sum is opened; the reports are deleted.

    `share` is the digest of the helper's share message, `opened` the message with the sum.
    """

    total: TwoServerSum
    excluded: Reasons
    share: Annotated[bytes, wire.Exactly(16)] = field(repr=False)
    opened: Blob = field(repr=False)


@wire.record(tag=0x0684)
@dataclass(frozen=True, slots=True, kw_only=True)
class WriteAborted:
    """Aborted with nothing opened; the reports are deleted and count in no other sum."""


LeaderPhase = CollectingReports | AwaitingExclusions | AwaitingShare | SumOpened | WriteAborted
PHASE_NAMES: Final[dict[type[Any], str]] = {
    CollectingReports: "collect",
    AwaitingExclusions: "exclude",
    AwaitingShare: "open",
    SumOpened: "done",
    WriteAborted: "aborted",
}


@wire.record(tag=0x0685)
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSnapshot:
    """The leader's stored state."""

    header: Header
    phase: Annotated[LeaderPhase, wire.OneOf(*PHASE_NAMES)]


class WriteLeader:
    """The leader in one round of writing."""

    FROM_CLIENT: ClassVar = (WriteReport,)

    def __init__(
        self,
        params: TwoServerParams,
        header: Header,
        invited: Iterable[ClientId],
        *,
        key: SigningKey,
        workers: Workers | None = None,
        phase: LeaderPhase | None = None,
    ) -> None:
        self.params, self.header, self._key = params, header, key
        self.invited = frozenset(invited)
        self._workers: Workers = workers or SingleWorker()
        self._forests = layouts_of(params, header).forests(Purpose.WRITE)
        self._phase: LeaderPhase = phase or CollectingReports()

    # -- stored and resumed

    def snapshot(self) -> bytes:
        return wire.encode(LeaderSnapshot(header=self.header, phase=self._phase))

    @classmethod
    def restore(
        cls,
        snapshot: bytes,
        params: TwoServerParams,
        invited: Iterable[ClientId],
        *,
        key: SigningKey,
        workers: Workers | None = None,
    ) -> WriteLeader:
        stored: Any = wire.decode(snapshot, expect=[LeaderSnapshot], cap=MAX_SUM_BYTES)
        return cls(params, stored.header, invited, key=key, workers=workers, phase=stored.phase)

    # -- where the round stands

    @property
    def phase(self) -> str:
        return PHASE_NAMES[type(self._phase)]

    @property
    def expected(self) -> frozenset[ClientId]:
        """The clients whose reports have not come."""
        if not isinstance(self._phase, CollectingReports):
            return frozenset()
        return self.invited - self._phase.held.keys()

    @property
    def total(self) -> TwoServerSum | None:
        """The sum, once it is opened."""
        return self._phase.total if isinstance(self._phase, SumOpened) else None

    @property
    def excluded(self) -> dict[ClientId, str]:
        """The clients that the helper excluded, and why."""
        phase = self._phase
        return dict(phase.excluded) if isinstance(phase, AwaitingShare | SumOpened) else {}

    # -- messages

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """A client's report, or a message of the helper.

        `PeerError`: refused, and this role is as it was. `RoundAborted`: after the helper's
        exclusions too few reports are left.
        """
        if sender == HELPER:
            return self._from_helper(data)
        if isinstance(sender, str) or sender not in self.invited:
            raise self._refuse(sender, "is not in this cohort")
        try:
            report: WriteReport = wire.decode(data, expect=self.FROM_CLIENT)
        except WireError as error:
            raise self._refuse(sender, f"sent an invalid message: {error}") from error
        if report.sender != sender or report.round_id != self.params.round_id:
            raise self._refuse(sender, "sent a report of another client or round")
        if not isinstance(self._phase, CollectingReports) or sender in self._phase.held:
            raise self._refuse(sender, "sent a report that is not due")
        held = self._checked(report)
        self._phase.held[sender] = held
        forwarded = Forwarded(
            purpose=Purpose.WRITE,
            round_id=self.params.round_id,
            sender=sender,
            report_id=report.report_id,
            public=report.public,
            box=report.box,
        )
        return [Outbound.of(HELPER, forwarded)]

    def _checked(self, report: WriteReport) -> LeaderReport:
        sender, group = report.sender, self.params.group
        check_keys(self._forests, report.public, self._refuse, sender)
        if len(report.seeds) != len(self._forests):
            raise self._refuse(sender, f"sent {len(report.seeds)} seeds")
        try:
            check_words(group, report.dense, self.params.dense_words)
        except ValueError as error:
            raise self._refuse(sender, f"sent an invalid plain share: {error}") from error
        context = self._report_context(sender, report.report_id)
        return LeaderReport(
            report_id=report.report_id,
            digest=context.report_digest(report.public, report.box),
            public=report.public,
            seeds=report.seeds,
            dense=report.dense,
        )

    def close_phase(self) -> list[Outbound]:
        """End collection with the reports there are; or abort, if the helper does not answer."""
        phase = self._phase
        if isinstance(phase, SumOpened | WriteAborted):
            raise MisuseError(f"there is no phase to close: {self.phase}")
        if not isinstance(phase, CollectingReports):
            raise self._abort(0, 1)
        if len(phase.held) < self.params.min_cohort:
            raise self._abort(len(phase.held), self.params.min_cohort)
        self._phase = AwaitingExclusions(held=phase.held)
        return self.resend()

    def resend(self) -> list[Outbound]:
        """The last message to the helper again, byte for byte."""
        phase = self._phase
        if isinstance(phase, SumOpened):
            return [Outbound(HELPER, OpenedSum.__name__, phase.opened)]
        if not isinstance(phase, AwaitingExclusions | AwaitingShare):
            return []
        round_id, reports = self.params.round_id, _listed(phase.held)
        if isinstance(phase, AwaitingExclusions):
            return [Outbound.of(HELPER, Closing(round_id=round_id, reports=reports))]
        signature = self._key.sign(sums.list_statement(self.header, reports))  # deterministic
        included = IncludedList(round_id=round_id, reports=reports, signature=signature)
        return [Outbound.of(HELPER, included)]

    def _from_helper(self, data: bytes) -> list[Outbound]:
        try:
            message = wire.decode(data, expect=(Exclusions, SumShare))
        except WireError as error:
            raise self._refuse(HELPER, f"sent an invalid message: {error}") from error
        if message.round_id != self.params.round_id:
            raise self._refuse(HELPER, "sent a message of another round")
        phase = self._phase
        if isinstance(message, Exclusions):
            if isinstance(phase, AwaitingExclusions):
                return self._on_exclusions(phase, message)
            if isinstance(phase, AwaitingShare | SumOpened) and message.reasons == phase.excluded:
                return []
        elif isinstance(phase, AwaitingShare):
            return self._on_share(phase, message, message_digest(data))
        elif isinstance(phase, SumOpened) and message_digest(data) == phase.share:
            return self.resend()
        raise self._refuse(HELPER, f"sent {type(message).__name__}, which is not due")

    def _on_exclusions(self, phase: AwaitingExclusions, message: Exclusions) -> list[Outbound]:
        if not message.reasons.keys() <= phase.held.keys():
            raise self._refuse(HELPER, "excluded a client that was not on the list")
        kept = {c: held for c, held in phase.held.items() if c not in message.reasons}
        if len(kept) < self.params.min_cohort:
            raise self._abort(len(kept), self.params.min_cohort)
        self._phase = AwaitingShare(held=kept, excluded=message.reasons)
        return self.resend()

    def _on_share(self, phase: AwaitingShare, message: SumShare, mark: bytes) -> list[Outbound]:
        reports = _listed(phase.held)
        statement = sums.sum_statement(self.header, reports, message)
        if not verify(self.params.servers.helper, message.signature, statement):
            raise self._refuse(HELPER, "signed another share or another list")
        try:
            theirs = sums.unpacked(self.params, message)
        except ValueError as error:
            raise self._refuse(HELPER, f"sent an invalid share: {error}") from error
        ours = sums.share_of(
            self.params,
            self.header,
            [
                Reported(self._report_context(c, held.report_id), held.public, held.seeds)
                for c, held in sorted(phase.held.items())
            ],
            sums.leader_dense(self.params, (held.dense for held in phase.held.values())),
            party=LEADER_PARTY,
            workers=self._workers,
        )
        total = sums.added(self.params, ours, theirs, phase.held)
        unsigned = sums.opened_sum(self.params, total, bytes(64))
        statement = sums.sum_statement(self.header, reports, unsigned)
        opened = wire.encode(replace(unsigned, signature=self._key.sign(statement)))
        self._phase = SumOpened(total=total, excluded=phase.excluded, share=mark, opened=opened)
        return self.resend()

    def _report_context(self, client: ClientId, report_id: bytes) -> ReportContext:
        return ReportContext(
            params=self.params,
            header=self.header,
            purpose=Purpose.WRITE,
            client=client,
            report_id=report_id,
        )

    def _abort(self, answered: int, needed: int) -> RoundAborted:
        name = self.phase
        self._phase = WriteAborted()
        return RoundAborted(
            round_id=self.params.round_id, phase=name, answered=answered, needed=needed
        )

    def _refuse(self, peer: Party, reason: str) -> PeerError:
        return PeerError(reason, round_id=self.params.round_id, phase=self.phase, peer=peer)


def _listed(held: dict[ClientId, LeaderReport]) -> Listed:
    return {c: held[c].digest for c in sorted(held)}
