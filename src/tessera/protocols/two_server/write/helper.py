"""The helper of a private write: one list of reports per round, and one share of its sum.

When collection closes, the leader names every report that it has forwarded, and the helper says
which of those it does not hold; the rest is the list. A leader that leaves out a report which has
reached the helper, or proposes another list or one that is too short, has broken the protocol: the
helper leaves, and nothing is released. So a round has one sum only, and no two sums can be
subtracted. Its replay guard records the list, so that this also holds for a helper that is woken
from an older state.

Where keys are checked, the helper tosses a coin once the leader has named all reports, hears the
leader's sums of tags, and excludes whoever has others there (`crypto/verifiable.py`).

A leader still has a say in who is in the sum: before the list by not forwarding a report, down to
`min_cohort`, and after it by naming what it did not forward or by wrong sums of tags. So whoever is
excluded after the list counts against `most_excluded`, and beyond it nothing is released.

Messages between the servers may be lost or repeated. A repetition of the last one is answered with
the same bytes, a repetition of an earlier one is ignored, and different bytes in place of either
are a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.ids import HELPER, SERVER, ClientId
from tessera.protocols.machine import Left, Moved, Outbound, Steps
from tessera.protocols.two_server.collector import (
    CollectingHelper,
    HelperReport,
    HelperSetup,
    ReportsByClient,
)
from tessera.protocols.two_server.key_period import (
    KeyPeriod,
    KeyStore,
    keep_keys,
    keys_of,
    missing_members,
    too_many_excluded,
)
from tessera.protocols.two_server.messages import (
    CheckCoin,
    CheckSums,
    Closing,
    Exclusions,
    Forwarded,
    IncludedList,
    Listed,
    OpenedSum,
    Purpose,
    Reasons,
    SumShare,
)
from tessera.protocols.two_server.reports import (
    HELPER_PARTY,
)
from tessera.protocols.two_server.write import sums
from tessera.protocols.two_server.write.sums import (
    NoiseSecrets,
    RowShares,
    TwoServerSum,
    coin_of,
    row_shares,
)
from tessera.wire.stored import ByDigest, Kept

CHECK_FAILED: Final = "wrote more than one leaf in a bin, or invalid keys"
"""Of a client whose tags do not add up to the same at both servers."""


@wire.record(tag=0x0690)
@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingReports:
    """Reports come in. A coin will follow from the seed, which nobody else knows."""

    coin_seed: Annotated[Secret, wire.SECRET] = field(repr=False)
    held: ReportsByClient = field(default_factory=dict)
    excluded: Reasons = field(default_factory=dict)
    noise: NoiseSecrets = field(default=(), repr=False)


@wire.record(tag=0x0694)
@dataclass(frozen=True, slots=True, kw_only=True)
class CoinTossed:
    """Collection is over and the coin is said; waits for the leader's sums of tags."""

    held: ReportsByClient
    excluded: Reasons
    coin: Annotated[Secret, wire.SECRET] = field(repr=False)
    noise: NoiseSecrets = field(default=(), repr=False)


@wire.record(tag=0x0691)
@dataclass(frozen=True, slots=True, kw_only=True)
class ListFixed:
    """Collection is over and the list is fixed; waits for the leader's signature on it."""

    held: ReportsByClient
    excluded: Reasons
    noise: NoiseSecrets = field(default=(), repr=False)


@wire.record(tag=0x0692)
@dataclass(frozen=True, slots=True, kw_only=True)
class ShareReleased:
    """The share of this round is released; its bytes are kept, the reports are not."""

    reports: Listed = field(repr=False)
    excluded: Reasons
    share: Annotated[Kept[SumShare], ByDigest(SumShare)]


@wire.record(tag=0x0693)
@dataclass(frozen=True, slots=True, kw_only=True)
class SumReceived:
    """The leader has sent the sum; the round is over, and a later fault changes nothing."""

    reports: Listed = field(repr=False)
    excluded: Reasons
    opened: Annotated[Kept[OpenedSum], ByDigest(OpenedSum)]


@dataclass(frozen=True, kw_only=True)
class WriteHelperSetup(HelperSetup):
    """`key_store` has its keys of earlier rounds, where they last longer than one."""

    key_store: KeyStore | None = None


class WriteHelper(CollectingHelper[WriteHelperSetup]):
    """The helper in one round of writing. It receives messages of the leader only."""

    ROLE = "helper of a write"
    STATES = (HoldingReports, CoinTossed, ListFixed, ShareReleased, SumReceived, Left)
    PHASES: ClassVar = {
        HoldingReports: "collect",
        CoinTossed: "check",
        ListFixed: "exclude",
        ShareReleased: "open",
        SumReceived: "done",
        Left: "left",
    }
    SETTLED = (SumReceived,)
    FROM_SERVER = (Forwarded, Closing, CheckSums, IncludedList, OpenedSum)

    PURPOSE = Purpose.WRITE
    HOLDING = (HoldingReports, CoinTossed, ListFixed)
    LATE = "reported after collection had closed"

    def __init__(
        self, setup: WriteHelperSetup, *, entropy: Entropy, noise: NoiseSecrets = ()
    ) -> None:
        """Its noise follows from the secrets `noise`, where the round has any."""
        params = setup.params
        seed = entropy.secret(Label.CHECK_SEED, params.federation, params.round_id)
        super().__init__(setup, HoldingReports(coin_seed=seed, noise=noise))

    def _set_up(self, setup: WriteHelperSetup) -> None:
        super()._set_up(setup)
        self._checks = setup.params.verified and not setup.header.epoch
        # What follows from the state, worked out once.
        self._rows: RowShares | None = None
        self._total: TwoServerSum | None = None

    @cached_property
    def _keys(self) -> KeyPeriod | None:
        return keys_of(self.params, self.header, self.setup.key_store)

    @property
    def total(self) -> TwoServerSum | None:
        """The sum, once the leader has sent it; read from its message, and once more if woken."""
        state = self.state
        if not isinstance(state, SumReceived):
            return None
        if self._total is None:
            self._total = sums.sum_from_message(self.params, state.opened.message, state.reports)
        return self._total

    @property
    def excluded(self) -> dict[ClientId, str]:
        """The clients that were excluded after the list was closed, and why."""
        phase = self.state
        fixed = isinstance(phase, ListFixed | ShareReleased | SumReceived)
        return dict(phase.excluded) if fixed else {}

    def resend(self) -> list[Outbound]:
        """The last message again, byte for byte."""
        return self._to_leader(self.state)

    def _to_leader(self, phase: Any) -> list[Outbound]:
        if isinstance(phase, CoinTossed):
            coin = CheckCoin(round_id=self.round_id, coin=phase.coin.reveal())
            return [Outbound.of(SERVER, coin)]
        if isinstance(phase, ListFixed):
            exclusions = Exclusions(round_id=self.round_id, reasons=phase.excluded)
            return [Outbound.of(SERVER, exclusions)]
        if isinstance(phase, ShareReleased):
            return [Outbound.again(SERVER, phase.share.data)]
        return []

    def _end(self, state: Any) -> None:
        super()._end(state)
        self._rows = self._total = None

    # Each of these checks everything before it changes anything.

    def _on_closing(self, phase: HoldingReports, kept: Kept[Closing]) -> Moved:
        self._check_closing(phase, kept.message)
        excluded = {
            c: phase.excluded.get(c, "no such report has reached the helper")
            for c in kept.message.reports
            if c not in phase.held
        }
        if not self._checks:
            fixed = ListFixed(held=phase.held, excluded=excluded, noise=phase.noise)
            return fixed, self._to_leader(fixed)
        coin = coin_of(phase.coin_seed, sums.list_digest(kept.message.reports))
        tossed = CoinTossed(held=phase.held, excluded=excluded, coin=coin, noise=phase.noise)
        return tossed, self._to_leader(tossed)

    def _on_check_sums(self, phase: CoinTossed, kept: Kept[CheckSums]) -> Moved:
        """Whoever has other sums here is left out: its leaves are taken out of the shares again.

        A leader that lies is told the same of every client, whatever that client wrote: the sums
        differ, or they are those that it could compute itself. How many it can have excluded so is
        bounded when it asks for the share.
        """
        theirs = kept.message.sums
        if theirs.keys() != phase.held.keys() | phase.excluded.keys():
            raise self._fault("sent sums of other reports than it had named")
        rows = self._row_shares(phase.held, phase.coin)
        failed = {c: h for c, h in phase.held.items() if theirs[c] != rows.checks[c]}
        if failed:
            rows = rows.without(self.params, self._row_shares(failed))
        self._rows = rows
        following = ListFixed(
            held={c: h for c, h in phase.held.items() if c not in failed},
            excluded={**phase.excluded, **dict.fromkeys(failed, CHECK_FAILED)},
            noise=phase.noise,
        )
        return following, self._to_leader(following)

    def _row_shares(
        self, held: Mapping[ClientId, HelperReport], coin: Secret | None = None
    ) -> RowShares:
        """Its shares of the rows of these reports."""
        return row_shares(
            self.params,
            self.header,
            [self._reported(c, h) for c, h in sorted(held.items())],
            party=HELPER_PARTY,
            workers=self.setup.workers,
            coin=coin,
        )

    def _check_closing(self, phase: HoldingReports, message: Closing) -> None:
        """Every report that has reached the helper is on the list."""
        if any(message.reports.get(c) != report.digest for c, report in phase.held.items()):
            raise self._fault("left out a report that it had forwarded")

    def _on_list(self, phase: ListFixed, kept: Kept[IncludedList]) -> Moved:
        message = kept.message
        self._check_list(phase, message)
        if not self.setup.replay_guard.release(self.round_id, sums.list_digest(message.reports)):
            raise self._fault("requested a second sum in one round")
        self._keep_keys(phase.held)
        listed = {c: phase.held[c] for c in sorted(message.reports)}
        seeds = (h.dense_seed for h in listed.values() if h.dense_seed is not None)
        rows = self._row_shares(listed) if self._rows is None else self._rows
        share = sums.share_of(self.params, rows.tables, sums.helper_dense(self.params, seeds))
        share = sums.with_noise(self.params, share, phase.noise, HELPER)
        unsigned = sums.packed(self.params, share, bytes(64))
        statement = sums.sum_statement(self.header, message.reports, unsigned)
        signed = replace(unsigned, signature=self.setup.key.sign(statement))
        following = ShareReleased(
            reports=message.reports, excluded=phase.excluded, share=Kept.of(signed)
        )
        self._rows = None
        self._forget()
        return following, self._to_leader(following)

    def _check_list(self, phase: ListFixed, message: IncludedList) -> None:
        due = {c: report.digest for c, report in phase.held.items()}
        if message.reports != due:
            raise self._fault("proposed a list that differs from what both hold")
        excluded = len(phase.excluded)
        if reason := too_many_excluded(self.params, excluded, len(due) + excluded):
            raise self._fault(f"requested a sum where {reason}")
        if len(due) < self.params.min_cohort:
            raise self._fault(f"requested a sum over {len(due)} reports")
        if missing := missing_members(self.params, self._keys, due):
            raise self._fault(f"requested a sum without {len(missing)} clients of the period")
        statement = sums.list_statement(self.header, message.reports)
        if not verify(self.params.servers.leader, message.signature, statement):
            raise self._fault("did not sign the list")

    def _keep_keys(self, held: Mapping[ClientId, HelperReport]) -> None:
        """Before anything is released over them."""
        if self.params.key_rounds > 1 and self._keys is None:
            keep_keys(
                self.params,
                self.header,
                self.setup.key_store,
                {c: (h.report_id, h.public, h.seeds) for c, h in held.items()},
            )

    def _on_sum(self, phase: ShareReleased, kept: Kept[OpenedSum]) -> Moved:
        message = kept.message
        statement = sums.sum_statement(self.header, phase.reports, message)
        if not verify(self.params.servers.leader, message.signature, statement):
            raise self._fault("did not sign the sum")
        try:
            self._total = sums.sum_from_message(self.params, message, phase.reports)
        except ValueError as error:
            raise self._fault(f"sent an invalid sum: {error}") from error
        return SumReceived(reports=phase.reports, excluded=phase.excluded, opened=kept), []


STEPS: Final[Steps] = {
    (HoldingReports, Forwarded): WriteHelper._on_report,
    (HoldingReports, Closing): WriteHelper._on_closing,
    (CoinTossed, Forwarded): WriteHelper._on_late_report,
    (CoinTossed, CheckSums): WriteHelper._on_check_sums,
    (ListFixed, Forwarded): WriteHelper._on_late_report,
    (ListFixed, IncludedList): WriteHelper._on_list,
    (ShareReleased, Forwarded): WriteHelper._on_late_report,
    (ShareReleased, OpenedSum): WriteHelper._on_sum,
    (SumReceived, Forwarded): WriteHelper._on_late_report,
}
WriteHelper.STEPS = STEPS
