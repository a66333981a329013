"""The helper of a private write: one list of reports per round, and one share of its sum.

The leader cannot choose the list. When collection closes, the leader names every report that it has
forwarded, and the helper says which of those it does not hold; the rest is the list. A leader that
leaves out a report which has reached the helper, or proposes another list or one that is too short,
has broken the protocol: the helper leaves, and nothing is released. So a round has one sum only,
and no two sums can be subtracted.

Messages between the servers may be lost or repeated. Every phase knows the messages that led to it:
a repetition of the last one is answered with the same bytes, a repetition of an earlier one is
ignored, and different bytes in place of either are a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from tessera.crypto.keys import SealingKey, SigningKey, verify
from tessera.errors import MisuseError, PeerError, ServerFault, WireError
from tessera.ids import SERVER, ClientId, Party
from tessera.protocols import wire
from tessera.protocols.machine import Outbound, Steps
from tessera.protocols.scatter import sums
from tessera.protocols.scatter.messages import (
    Closing,
    Exclusions,
    IncludedList,
    Listed,
    OpenedSum,
    SumShare,
)
from tessera.protocols.scatter.sums import TwoServerSum
from tessera.protocols.secagg.phases import MAX_SUM_BYTES
from tessera.protocols.two_server.inbox import Reasons, ReportInbox, ReportsByClient
from tessera.protocols.two_server.keys import HELPER_PARTY, Reported
from tessera.protocols.two_server.messages import Digest, Forwarded, Header, Purpose
from tessera.protocols.two_server.params import TwoServerParams
from tessera.protocols.two_server.replay_guard import ReplayGuard
from tessera.protocols.two_server.workers import SingleWorker, Workers


@wire.record(tag=0x0690)
@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingReports:
    """Reports come in."""

    held: ReportsByClient = field(default_factory=dict)
    excluded: Reasons = field(default_factory=dict)


@wire.record(tag=0x0691)
@dataclass(frozen=True, slots=True, kw_only=True)
class ListFixed:
    """Collection is over and the list is fixed; waits for the leader's signature on it.

    `closing` is the digest of the message that closed it.
    """

    held: ReportsByClient
    excluded: Reasons
    closing: Digest = field(repr=False)


@wire.record(tag=0x0692)
@dataclass(frozen=True, slots=True, kw_only=True)
class ShareReleased:
    """The share of this round is released; its bytes are kept, the reports are not."""

    closing: Digest = field(repr=False)
    listed: Digest = field(repr=False)
    reports: Listed = field(repr=False)
    share: Annotated[bytes, wire.UpTo(wire.DEFAULT_CAP)] = field(repr=False)


@wire.record(tag=0x0693)
@dataclass(frozen=True, slots=True, kw_only=True)
class SumReceived:
    """The leader has sent the sum; the round is over, and a later fault changes nothing."""

    closing: Digest = field(repr=False)
    listed: Digest = field(repr=False)
    opened: Digest = field(repr=False)
    total: TwoServerSum


@wire.record(tag=0x0694)
@dataclass(frozen=True, slots=True, kw_only=True)
class HelperLeft:
    """The leader broke the protocol and the helper has left the round, for good."""

    reason: Annotated[str, wire.TEXT]


HelperPhase = HoldingReports | ListFixed | ShareReleased | SumReceived | HelperLeft
PHASE_NAMES: Final[dict[type[Any], str]] = {
    HoldingReports: "collect",
    ListFixed: "exclude",
    ShareReleased: "open",
    SumReceived: "done",
    HelperLeft: "left",
}


@wire.record(tag=0x0695)
@dataclass(frozen=True, slots=True, kw_only=True)
class HelperSnapshot:
    """The helper's stored state; its phase says whether a share was released."""

    header: Header
    phase: Annotated[HelperPhase, wire.OneOf(*PHASE_NAMES)]


class WriteHelper:
    """The helper in one round of writing. It receives messages of the leader only."""

    def __init__(
        self,
        params: TwoServerParams,
        header: Header,
        *,
        key: SigningKey,
        box_key: SealingKey,
        directory: Mapping[ClientId, bytes],
        replay_guard: ReplayGuard,
        workers: Workers | None = None,
        phase: HelperPhase | None = None,
    ) -> None:
        if (key.public, box_key.public) != (params.servers.helper, params.servers.box):
            raise MisuseError("two servers: the helper's keys are not the ones that are pinned")
        self.params, self.header, self._key = params, header, key
        self._workers: Workers = workers or SingleWorker()
        self._phase: HelperPhase = phase or HoldingReports()
        holding = self._phase if isinstance(self._phase, HoldingReports | ListFixed) else None
        self.inbox = ReportInbox(
            params,
            header,
            Purpose.WRITE,
            directory=directory,
            box_key=box_key,
            replay_guard=replay_guard,
            held=holding.held if holding else {},
            excluded=holding.excluded if holding else {},
        )

    # -- stored and resumed

    def snapshot(self) -> bytes:
        """To be stored before what a call returned is sent: two shares could be subtracted."""
        return wire.encode(HelperSnapshot(header=self.header, phase=self._phase))

    @classmethod
    def restore(
        cls,
        snapshot: bytes,
        params: TwoServerParams,
        *,
        key: SigningKey,
        box_key: SealingKey,
        directory: Mapping[ClientId, bytes],
        replay_guard: ReplayGuard,
        workers: Workers | None = None,
    ) -> WriteHelper:
        stored: Any = wire.decode(snapshot, expect=[HelperSnapshot], cap=MAX_SUM_BYTES)
        return cls(
            params,
            stored.header,
            key=key,
            box_key=box_key,
            directory=directory,
            replay_guard=replay_guard,
            workers=workers,
            phase=stored.phase,
        )

    @property
    def phase(self) -> str:
        return PHASE_NAMES[type(self._phase)]

    @property
    def total(self) -> TwoServerSum | None:
        """The sum, once the leader has sent it."""
        return self._phase.total if isinstance(self._phase, SumReceived) else None

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """Take the leader's message. `PeerError`: a client is excluded, the round goes on.
        `ServerFault`: the helper has left the round, unless it had the sum and was done."""
        try:
            try:
                message = wire.decode(data, expect=FROM_LEADER)
            except WireError as error:
                raise self._fault(f"sent an invalid message: {error}") from error
            if message.round_id != self.params.round_id:
                raise self._fault("sent a message of another round")
            step = STEPS.get((type(self._phase), type(message)))
            if step is None:
                raise self._fault(f"sent {type(message).__name__}, which is not due")
            out: list[Outbound] = step(self, self._phase, message)
        except ServerFault as fault:
            if not isinstance(self._phase, SumReceived | HelperLeft):
                self._phase = HelperLeft(reason=fault.reason)
            self.inbox.forget()
            raise
        return out

    def resend(self) -> list[Outbound]:
        """The last message again, byte for byte."""
        phase = self._phase
        if isinstance(phase, ListFixed):
            exclusions = Exclusions(round_id=self.params.round_id, reasons=phase.excluded)
            return [Outbound.of(SERVER, exclusions)]
        if isinstance(phase, ShareReleased):
            return [Outbound(SERVER, SumShare.__name__, phase.share)]
        return []

    # Each of these checks everything before it changes anything.

    def _on_report(self, phase: HoldingReports, message: Forwarded) -> list[Outbound]:
        if message.purpose is not Purpose.WRITE:
            raise self._fault("forwarded keys that are for reading")
        self.inbox.take(message)
        return []

    def _on_late_report(self, phase: HelperPhase, message: Forwarded) -> list[Outbound]:
        raise PeerError(
            "reported after collection had closed",
            round_id=self.params.round_id,
            phase=self.phase,
            peer=message.sender,
        )

    def _on_closing(self, phase: HoldingReports, message: Closing) -> list[Outbound]:
        self._check_closing(phase, message)
        excluded = {
            c: phase.excluded.get(c, "no such report has reached the helper")
            for c in message.reports
            if c not in phase.held
        }
        self._phase = ListFixed(held=phase.held, excluded=excluded, closing=wire.digest(message))
        return self.resend()

    def _check_closing(self, phase: HoldingReports, message: Closing) -> None:
        """Every report that has reached the helper is on the list, so the leader has no choice."""
        if any(message.reports.get(c) != report.digest for c, report in phase.held.items()):
            raise self._fault("left out a report that it had forwarded")

    def _on_closing_again(
        self, phase: ListFixed | ShareReleased | SumReceived, message: Closing
    ) -> list[Outbound]:
        if wire.digest(message) != phase.closing:
            raise self._fault("closed collection twice")
        return self.resend() if isinstance(phase, ListFixed) else []

    def _on_list(self, phase: ListFixed, message: IncludedList) -> list[Outbound]:
        self._check_list(phase, message)
        listed = {c: phase.held[c] for c in sorted(message.reports)}
        share = sums.share_of(
            self.params,
            self.header,
            [
                Reported(self.inbox.report_context(c, h.report_id), h.public, h.seeds)
                for c, h in listed.items()
            ],
            sums.helper_dense(
                self.params, (h.dense_seed for h in listed.values() if h.dense_seed is not None)
            ),
            party=HELPER_PARTY,
            workers=self._workers,
        )
        unsigned = sums.packed(self.params, share, bytes(64))
        statement = sums.sum_statement(self.header, message.reports, unsigned)
        signed = replace(unsigned, signature=self._key.sign(statement))
        self._phase = ShareReleased(
            closing=phase.closing,
            listed=wire.digest(message),
            reports=message.reports,
            share=wire.encode(signed),
        )
        self.inbox.forget()
        return self.resend()

    def _check_list(self, phase: ListFixed, message: IncludedList) -> None:
        due = {c: report.digest for c, report in phase.held.items()}
        if message.reports != due:
            raise self._fault("proposed a list that differs from what both hold")
        if len(due) < self.params.min_cohort:
            raise self._fault(f"requested a sum over {len(due)} reports")
        statement = sums.list_statement(self.header, message.reports)
        if not verify(self.params.servers.leader, message.signature, statement):
            raise self._fault("did not sign the list")

    def _on_list_again(
        self, phase: ShareReleased | SumReceived, message: IncludedList
    ) -> list[Outbound]:
        """A repeated list is answered with the same bytes; another list is a fault."""
        if wire.digest(message) != phase.listed:
            raise self._fault("proposed a second list")
        return self.resend() if isinstance(phase, ShareReleased) else []

    def _on_sum(self, phase: ShareReleased, message: OpenedSum) -> list[Outbound]:
        statement = sums.sum_statement(self.header, phase.reports, message)
        if not verify(self.params.servers.leader, message.signature, statement):
            raise self._fault("did not sign the sum")
        try:
            total = sums.sum_from_message(self.params, message, phase.reports)
        except ValueError as error:
            raise self._fault(f"sent an invalid sum: {error}") from error
        self._phase = SumReceived(
            closing=phase.closing, listed=phase.listed, opened=wire.digest(message), total=total
        )
        return []

    def _on_sum_again(self, phase: SumReceived, message: OpenedSum) -> list[Outbound]:
        if wire.digest(message) != phase.opened:
            raise self._fault("sent a second sum")
        return []

    def _fault(self, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self.params.round_id, phase=self.phase)


STEPS: Final[Steps] = {
    (HoldingReports, Forwarded): WriteHelper._on_report,
    (HoldingReports, Closing): WriteHelper._on_closing,
    (ListFixed, Forwarded): WriteHelper._on_late_report,
    (ListFixed, Closing): WriteHelper._on_closing_again,
    (ListFixed, IncludedList): WriteHelper._on_list,
    (ShareReleased, Forwarded): WriteHelper._on_late_report,
    (ShareReleased, Closing): WriteHelper._on_closing_again,
    (ShareReleased, IncludedList): WriteHelper._on_list_again,
    (ShareReleased, OpenedSum): WriteHelper._on_sum,
    (SumReceived, Forwarded): WriteHelper._on_late_report,
    (SumReceived, Closing): WriteHelper._on_closing_again,
    (SumReceived, IncludedList): WriteHelper._on_list_again,
    (SumReceived, OpenedSum): WriteHelper._on_sum_again,
}
FROM_LEADER: Final = (Forwarded, Closing, IncludedList, OpenedSum)
