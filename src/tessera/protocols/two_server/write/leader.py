"""The leader of a private write: collects reports, agrees on one list, and opens the sum.

Phases follow each other: collect, check (the helper's coin comes, where keys are checked), exclude
(the helper says which reports it does not hold, or have failed), open (the helper's share comes),
done. Each is a record, so that the leader can be stopped between any
two messages; the carrier stores the snapshot before it sends them.

Messages between the servers may be lost or repeated. The leader sends its last message again, byte
for byte, when its carrier calls `resend`, or when the helper repeats the message it answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from tessera import wire
from tessera.crypto.keys import SigningKey, verify
from tessera.crypto.secret import Secret
from tessera.ids import HELPER, SERVER, ClientId
from tessera.protocols.machine import Aborted, Moved, Outbound
from tessera.protocols.secagg.phases import Members
from tessera.protocols.two_server.collector import CollectingLeader, LeaderSetup
from tessera.protocols.two_server.key_period import (
    KeyPeriod,
    KeyStore,
    keep_keys,
    keys_of,
    shortage,
)
from tessera.protocols.two_server.messages import (
    CheckCoin,
    CheckSums,
    Closing,
    Digest,
    Exclusions,
    IncludedList,
    Listed,
    OpenedSum,
    Purpose,
    Reasons,
    SumShare,
    WriteReport,
)
from tessera.protocols.two_server.params import MAX_COHORT
from tessera.protocols.two_server.reports import (
    LEADER_PARTY,
    check_words,
)
from tessera.protocols.two_server.write import sums
from tessera.protocols.two_server.write.sums import (
    NoiseSecrets,
    RowShares,
    TwoServerSum,
    row_shares,
)
from tessera.wire.stored import ByDigest, Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderReport:
    """A report at the leader, and the digest by which lists name it."""

    report: Annotated[Kept[WriteReport], ByDigest(WriteReport)]
    digest: Digest = field(repr=False)


LeaderReports = Annotated[
    dict[ClientId, LeaderReport], wire.ByKey(wire.U32, wire.Nested(LeaderReport), MAX_COHORT)
]


@wire.record(tag=0x0680)
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectingReports:
    """Reports come in and are forwarded to the helper."""

    held: LeaderReports = field(default_factory=dict)
    noise: NoiseSecrets = field(default=(), repr=False)


@wire.record(tag=0x0684)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingCoin:
    """Collection is over; waits for the coin that keys are checked with."""

    held: LeaderReports
    noise: NoiseSecrets = field(default=(), repr=False)


@wire.record(tag=0x0681)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingExclusions:
    """Waits for the list of reports that are left out. `sums` is what it has said of every
    client's keys, if they are checked."""

    held: LeaderReports
    sums: Annotated[Kept[CheckSums] | None, wire.Maybe(ByDigest(CheckSums))] = None
    noise: NoiseSecrets = field(default=(), repr=False)


@wire.record(tag=0x0682)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingShare:
    """The list is signed; waits for the helper's share over it."""

    held: LeaderReports
    excluded: Reasons
    noise: NoiseSecrets = field(default=(), repr=False)


@wire.record(tag=0x0683)
@dataclass(frozen=True, slots=True, kw_only=True)
class SumOpened:
    """The sum is opened; the reports are deleted. `opened` is the message with the sum."""

    survivors: Members
    excluded: Reasons
    opened: Annotated[Kept[OpenedSum], ByDigest(OpenedSum)]


@dataclass(frozen=True, kw_only=True)
class WriteLeaderSetup(LeaderSetup):
    """`key_store` has its keys of earlier rounds, where they last longer than one."""

    key: SigningKey
    key_store: KeyStore | None = None


class WriteLeader(CollectingLeader[WriteLeaderSetup]):
    """The leader in one round of writing."""

    ROLE = "leader of a write"
    STATES = (
        CollectingReports,
        AwaitingCoin,
        AwaitingExclusions,
        AwaitingShare,
        SumOpened,
        Aborted,
    )
    PHASES: ClassVar = {
        CollectingReports: "collect",
        AwaitingCoin: "check",
        AwaitingExclusions: "exclude",
        AwaitingShare: "open",
        SumOpened: "done",
        Aborted: "aborted",
    }
    FROM_CLIENT = (WriteReport,)
    FROM_HELPER = (CheckCoin, Exclusions, SumShare)

    PURPOSE = Purpose.WRITE
    NOUN = "report"

    def __init__(self, setup: WriteLeaderSetup, *, noise: NoiseSecrets = ()) -> None:
        """Its noise follows from the secrets `noise`, where the round has any."""
        super().__init__(setup, CollectingReports(noise=noise))

    def _set_up(self, setup: WriteLeaderSetup) -> None:
        super()._set_up(setup)
        self._checks = setup.params.verified and not setup.header.epoch
        # What follows from the state, worked out once.
        self._rows: RowShares | None = None
        self._total: TwoServerSum | None = None

    @cached_property
    def _keys(self) -> KeyPeriod | None:
        return keys_of(self.params, self.header, self.setup.key_store)

    # -- where the round stands

    @property
    def total(self) -> TwoServerSum | None:
        """The sum, once it is opened; after a wake it is read from the message with the sum."""
        state = self.state
        if not isinstance(state, SumOpened):
            return None
        if self._total is None:
            self._total = sums.sum_from_message(self.params, state.opened.message, state.survivors)
        return self._total

    @property
    def excluded(self) -> dict[ClientId, str]:
        """The clients that the helper excluded, and why."""
        phase = self.state
        return dict(phase.excluded) if isinstance(phase, AwaitingShare | SumOpened) else {}

    # -- messages

    def _on_report(self, phase: CollectingReports, kept: Kept[WriteReport]) -> Moved:
        report, group = kept.message, self.params.group
        self._check_report(report, corrected=self._checks)
        try:
            check_words(group, report.dense, self.params.dense_words)
        except ValueError as error:
            raise self._refuse(report.sender, f"sent an invalid plain share: {error}") from error
        phase.held[report.sender] = LeaderReport(report=kept, digest=self._digest(report))
        kept.forget_decoded()
        return phase, [self._forwarded(report)]

    def _close_collection(self, phase: CollectingReports) -> Moved:
        self._check_list(phase.held)
        kind = AwaitingCoin if self._checks else AwaitingExclusions
        following = kind(held=phase.held, noise=phase.noise)
        return following, self._to_helper(following)

    def _give_up(self, phase: AwaitingCoin | AwaitingExclusions | AwaitingShare) -> Moved:
        raise self._too_few(0, 1, "the helper has not answered")

    def resend(self) -> list[Outbound]:
        """The last message to the helper again, byte for byte."""
        return self._to_helper(self.state)

    def _to_helper(self, phase: Any) -> list[Outbound]:
        if isinstance(phase, SumOpened):
            return [Outbound.again(HELPER, phase.opened.data)]
        if not isinstance(phase, AwaitingCoin | AwaitingExclusions | AwaitingShare):
            return []
        if isinstance(phase, AwaitingExclusions) and phase.sums is not None:
            return [Outbound.again(HELPER, phase.sums.data)]
        reports = _listed(phase.held)
        if not isinstance(phase, AwaitingShare):
            return [Outbound.of(HELPER, Closing(round_id=self.round_id, reports=reports))]
        signature = self.setup.key.sign(sums.list_statement(self.header, reports))  # deterministic
        included = IncludedList(round_id=self.round_id, reports=reports, signature=signature)
        return [Outbound.of(HELPER, included)]

    def _on_coin(self, phase: AwaitingCoin, kept: Kept[CheckCoin]) -> Moved:
        """Reports are added up and checked in one pass; whoever fails is taken out again later."""
        self._rows = self._row_shares(phase.held, Secret(kept.message.coin))
        sums = Kept.of(CheckSums(round_id=self.round_id, sums=self._rows.checks))
        following = AwaitingExclusions(held=phase.held, sums=sums, noise=phase.noise)
        return following, self._to_helper(following)

    def _on_exclusions(self, phase: AwaitingExclusions, kept: Kept[Exclusions]) -> Moved:
        reasons = kept.message.reasons
        if not reasons.keys() <= phase.held.keys():
            raise self._refuse(HELPER, "excluded a client that was not on the list")
        held = {c: report for c, report in phase.held.items() if c not in reasons}
        self._check_list(held, len(reasons))
        if self.params.key_rounds > 1 and self._keys is None:
            # Before the helper can store its own, which is when it releases its share.
            found = {c: each.report.message for c, each in held.items()}
            keep_keys(
                self.params,
                self.header,
                self.setup.key_store,
                {c: (r.report_id, r.public, r.seeds) for c, r in found.items()},
            )
        if self._rows is not None and reasons:
            gone = {c: phase.held[c] for c in reasons}
            self._rows = self._rows.without(self.params, self._row_shares(gone))
        following = AwaitingShare(held=held, excluded=reasons, noise=phase.noise)
        return following, self._to_helper(following)

    def _on_share(self, phase: AwaitingShare, kept: Kept[SumShare]) -> Moved:
        message, reports = kept.message, _listed(phase.held)
        statement = sums.sum_statement(self.header, reports, message)
        if not verify(self.params.servers.helper, message.signature, statement):
            raise self._refuse(HELPER, "signed another share or another list")
        try:
            sums.check_share(self.params, message)
        except ValueError as error:
            raise self._refuse(HELPER, f"sent an invalid share: {error}") from error
        dense = (held.report.message.dense for held in phase.held.values())
        rows = self._row_shares(phase.held) if self._rows is None else self._rows
        ours = sums.share_of(self.params, rows.tables, sums.leader_dense(self.params, dense))
        ours = sums.with_noise(self.params, ours, phase.noise, SERVER)
        total = sums.added(self.params, ours, message, phase.held)
        unsigned = sums.opened_sum(self.params, total, bytes(64))
        statement = sums.sum_statement(self.header, reports, unsigned)
        opened = Kept.of(replace(unsigned, signature=self.setup.key.sign(statement)))
        survivors = frozenset(phase.held)
        following = SumOpened(survivors=survivors, excluded=phase.excluded, opened=opened)
        self._rows, self._total = None, total
        return following, self._to_helper(following)

    def _row_shares(
        self, held: Mapping[ClientId, LeaderReport], coin: Secret | None = None
    ) -> RowShares:
        """Its shares of the rows of these reports."""
        return row_shares(
            self.params,
            self.header,
            [self._reported(c, each.report.message) for c, each in sorted(held.items())],
            party=LEADER_PARTY,
            workers=self.setup.workers,
            coin=coin,
        )

    def _check_list(self, held: Mapping[ClientId, LeaderReport], excluded: int = 0) -> None:
        """Enough reports, and not too many that the helper excluded; rounds of a key period open
        over the list of its first, or not at all."""
        if found := shortage(self.params, self._keys, held, excluded):
            raise self._too_few(*found)

    def _end(self, state: Any) -> None:
        super()._end(state)
        self._rows = self._total = None


def _listed(held: dict[ClientId, LeaderReport]) -> Listed:
    return {c: held[c].digest for c in sorted(held)}


WriteLeader.STEPS = {
    (CollectingReports, WriteReport): WriteLeader._on_report,
    (AwaitingCoin, CheckCoin): WriteLeader._on_coin,
    (AwaitingExclusions, Exclusions): WriteLeader._on_exclusions,
    (AwaitingShare, SumShare): WriteLeader._on_share,
}
WriteLeader.CLOSES = {
    CollectingReports: WriteLeader._close_collection,
    AwaitingCoin: WriteLeader._give_up,
    AwaitingExclusions: WriteLeader._give_up,
    AwaitingShare: WriteLeader._give_up,
}
