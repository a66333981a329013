"""EpochClient: one client in the life of its fixed group, visit after visit.

    fetch -> check what came -> (union: offer its rows) or (update: train the base) -> deliver

It comes when it can. All that it is given for an epoch is compared with the epoch's header before
anything is computed; with the certificate of the epoch before, what training made of its own rows
then is kept. Training takes time, and time is the engine's: an update that is due shows its
submodel as `pending`, and goes on when it is given the update. The carrier stores the snapshot
before it sends what a call returned.

MemberWork: what a member of a fixed group computes in an epoch, whatever carries it.

Its rows are frozen once a period, before anything of them leaves. In the union's epoch they become
words of the keyed sum table; in an epoch of updates the member trains from the whole union, so that
no fetch says which rows are its own. What it draws comes from the epoch's coins. What fails because
of its own data is sent as zeros (docs/threat-model.md): a member that left for it would show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Self

from tessera import wire
from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.group import Words
from tessera.crypto.keys import SigningKey
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError, TesseraError, WireError
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.tables.submodel import Ids, ModelUpdate, Submodel
from tessera.plan import Plan
from tessera.privacy.dp.events import THE_SUMS, THE_UNION, IndexAnswers
from tessera.privacy.index.period import FrozenPeriod, freeze
from tessera.protocols.epochs.group import FixedGroup, OfGroup
from tessera.protocols.epochs.member import GroupMember, MemberSetup
from tessera.protocols.epochs.messages import ComeBack, EpochHeader, EpochKind
from tessera.protocols.machine import Follower, Left, Moved, Outbound, RoundOutcome, Steps
from tessera.rounds import delivery, encode, select
from tessera.rounds.encode import Clipped, UpdateLayout
from tessera.rounds.epochs.group import (
    FROM_SERVER,
    EpochWork,
    MaybeUnion,
    PeriodRecord,
    header_of,
)
from tessera.rounds.messages import Download, UnionOpened, most_union_bytes, union_words
from tessera.rounds.party import LocalState, Word, check_rows
from tessera.rounds.resolve import resolve
from tessera.rounds.root import ClientEntropy, coins_of
from tessera.rounds.select import Selection
from tessera.wire.stored import ByDigest, Inner, Kept


class MemberWork:
    """One member's computations; `clipped`, `broken` and `written` are known to it alone."""

    def __init__(self, plan: Plan, me: ClientId, local: LocalState) -> None:
        """`plan` is the agreement within the group (`Plan.group_plan`)."""
        check_rows(plan, local)
        agreed = resolve(plan)
        self.plan, self.me, self.local = plan, me, local
        self._rows, self._sum, self._noise = agreed.rows, agreed.sum, agreed.noise
        self.clipped, self.broken = Clipped(), ""
        self.written: dict[str, Ids] = {}

    # --- once a period --------------------------------------------------------------------------

    def begin(self, record: PeriodRecord) -> None:
        """Fix the data of a new period: those up to its cut-off, whenever this member comes."""
        if self.local.data is not None:
            self.local.real = self.local.data.up_to(record.cutoff)

    def freeze(self, period: int, entropy: Entropy) -> None:
        """Fix this period's rows, durably, before anything of them is sent."""
        plan, local = self.plan, self.local
        roots = plan.root_ids
        held = select.held(plan, local.real)
        freeze(
            local.periods,
            federation=plan.federation,
            period=period,
            privacy=plan.privacy.index,
            real={table: held[t.name] for table, t in roots.items()},
            entropy=ClientEntropy(entropy, self.me),
            sizes={table: t.rows for table, t in roots.items()},
            max_rows=dict.fromkeys(roots, plan.union.max_rows),
            agreement=local.agreement_on(plan),
        )

    def _frozen(self, period: int) -> FrozenPeriod:
        stored = self.local.periods.latest(self.plan.federation)
        assert stored is not None and stored.period == period, "a union comes before its updates"
        return stored

    def union_words(self, period: int, epoch: int, coins: Entropy) -> Words:
        """This member's rows under the epoch's encoding; nothing else is in it."""
        plan, frozen = self.plan, self._frozen(period)
        rows = {plan.tables[part.table].name: part.offered for part in frozen.tables}
        ids = select.offered(plan, rows, frozen.secret, period, self.local.decoys_from(plan))
        return union_words(plan, RoundId(epoch), ids, coins.secret(Label.UNION_COINS))

    # --- updates --------------------------------------------------------------------------------

    def charge(self, epoch: int, period: int) -> None:
        """For what this epoch's sum will show, before the first message about it leaves."""
        plan, local, at = self.plan, self.local, RoundId(epoch)
        if self._rows.randomised:
            local.release(plan, at, THE_UNION, *self._noise.bare(THE_SUMS))
            local.ledger.spend(
                IndexAnswers(
                    federation=plan.federation,
                    period=period,
                    round_id=at,
                    privacy=self._frozen(period).privacy,
                ),
                reason=f"epoch {epoch}: rows of the group's union",
                planned=plan.privacy.budget,
            )
        else:
            local.release(plan, at, *self._noise.bare(*self._sum.opened(plan)))
        self._noise.charge(local.ledger, at)

    def selection(self, period: int, union: Mapping[str, Ids], coins: Entropy) -> Selection:
        """The whole union is fetched; a member's own rows of it are trained, and of the table that
        a softmax is over all of them, where the union's rows are its candidates."""
        plan, maps = self.plan, self.local.derived
        if self._rows.randomised:
            frozen = self._frozen(period)
            chosen = select.choose_answers(
                plan, frozen, union, maps, round_id=RoundId(0), entropy=coins
            )
            return select.with_candidates(plan, chosen, self.local.candidates)
        whole = plan.sent_rows
        own = self._noise.trained_rows(select.own(plan, self.local.real, maps), whole)
        return Selection(requested=whole, trained=own)

    def submodel(self, download: Download, chosen: Selection) -> Submodel:
        """What is trained; `delivery.UnfitModel` if nobody could compute with it."""
        dense, tables = delivery.model_parts(self.plan, download, chosen.requested)
        return Submodel(dense, tables, chosen.trained)

    def update_words(
        self,
        update: ModelUpdate | None,
        chosen: Selection,
        layout: UpdateLayout,
        round_id: RoundId,
        coins: Entropy,
    ) -> Words:
        """The update as one vector; zeros where training gave nothing that can be sent."""
        plan = self.plan
        self.broken = encode.flaw(plan, update, chosen.trained)
        if update is None or self.broken:
            update = encode.zeros(plan)
        encoded = encode.update_words(
            plan,
            update,
            chosen.trained,
            coins.secret(Label.ROUNDING),
            round_id=round_id,
            residual=self.local.residual_in(plan),
            noise=self._noise.share_stream(coins, round_id, self.me),
        )
        self.clipped, self.written = encoded.clipped, dict(encoded.written)
        return layout.flat(encoded)

    @property
    def left_out(self) -> int:
        """Real rows over the cap that the plan sets on the rows a client may name."""
        stored = self.local.periods.latest(self.plan.federation)
        return 0 if stored is None else sum(len(t.left_out) for t in stored.tables)

    def union_of(self, message: UnionOpened | None) -> dict[str, Ids]:
        """The group's rows by table, derived tables included; none of a whole model."""
        return {} if message is None else select.union_rows(self.plan, message, self.local.derived)


Member = Annotated[GroupMember, Inner("member")]


@wire.record(tag=0x0290)
@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenVisits:
    """Nothing is to be trained. `union` is that of `period`, once it has come."""

    member: Member
    period: Annotated[int, wire.U32] = 0
    cutoff: Annotated[int, wire.U64] = 0
    """Of the data of `period`, which are fixed."""
    updates: Annotated[int, wire.U32] = 0
    """That it has delivered in `period`, by its own count."""
    union: MaybeUnion = None


@wire.record(tag=0x0291)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBase:
    """An update is due, from this base."""

    member: Member
    period: Annotated[int, wire.U32]
    cutoff: Annotated[int, wire.U64]
    updates: Annotated[int, wire.U32]
    union: MaybeUnion
    base: Annotated[Kept[Download], ByDigest(Download)]


@dataclass(frozen=True, kw_only=True)
class EpochClientSetup(OfGroup):
    """A client, its group and what it has of its own; `plan` is the federation's."""

    plan: Plan
    group: FixedGroup
    party: ClientId
    key: SigningKey = field(repr=False)
    local: LocalState = field(repr=False)
    entropy: Entropy = field(repr=False)

    def __post_init__(self) -> None:
        if self.group.plan != self.plan.lasting_digest:
            raise ConfigError(f"group {self.group.number} was formed under another plan")

    @property
    def member(self) -> MemberSetup:
        return MemberSetup(group=self.group, party=self.party, key=self.key)


class CutoffAhead(TesseraError):
    """The cut-off of a new period has not passed by this client's clock, which may be slow. The
    answer was not taken: it may ask again."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the period's cut-off is {seconds:.0f} seconds ahead of this clock")
        self.seconds = seconds


class EpochClient(Follower[EpochClientSetup]):
    """One client of a fixed group. A fault of the server's ends it for good."""

    ROLE = "client of a fixed group"
    STATES = (BetweenVisits, TrainingBase, Left)
    FROM_SERVER = FROM_SERVER

    def _set_up(self, setup: EpochClientSetup) -> None:
        super()._set_up(setup)
        self.plan = setup.plan.group_plan
        self._agreed = resolve(self.plan)
        self.work = MemberWork(self.plan, setup.party, setup.local)
        self._chosen: tuple[Any, Selection] | None = None  # of this state, worked out once
        self._now: float | None = None
        self._patient = False

    def _supplied(self) -> Mapping[str, Any]:
        return {"member": lambda data, kept: GroupMember.wake(data, kept, self.setup.member)}

    @classmethod
    def join(cls, setup: EpochClientSetup) -> tuple[Self, list[Outbound]]:
        """Once in a group's life: its members are recorded, and the first mask key is deposited."""
        members, periods = setup.group.members, setup.local.periods
        if flaw := resolve(setup.plan).cohorts.members_flaw(members, periods):
            raise ConfigError(f"client {setup.party}: the federation {flaw}")
        member, out = GroupMember.join(setup.member, entropy=setup.entropy)
        return cls(setup, BetweenVisits(member=member)), out

    # --- what its carrier reads -----------------------------------------------------------------

    @property
    def phase(self) -> str:
        state = self.state
        return state.member.phase if isinstance(state, BetweenVisits) else super().phase

    @property
    def delivered(self) -> int:
        """The last epoch that it has delivered, or 0."""
        return self._member.delivered

    @property
    def settled(self) -> int:
        """The last epoch whose certificate it has, or 0."""
        return self._member.settled

    @property
    def due(self) -> EpochHeader | None:
        """The epoch whose update is due, if one is."""
        return self._member.due if isinstance(self.state, TrainingBase) else None

    @property
    def coins(self) -> Secret:
        """What the training of `pending` draws from."""
        return coins_of(self.epoch_coins)

    @property
    def epoch_coins(self) -> RootedEntropy:
        """Where everything that is drawn for the epoch that is due comes from."""
        return self._member.coins

    @property
    def base_round(self) -> int:
        """The server's round in which the base of `pending` was fixed."""
        assert isinstance(self.state, TrainingBase)
        return int(self.state.base.message.round_id)

    @property
    def pending(self) -> Submodel | None:
        """What is to be trained now; nothing before it is here, and nothing after."""
        state = self.state
        return self._submodel(state) if isinstance(state, TrainingBase) else None

    @property
    def _member(self) -> GroupMember:
        if not isinstance(self.state, BetweenVisits | TrainingBase):
            raise MisuseError(f"no member in state {self.phase}")
        return self.state.member

    # --- what its carrier does ------------------------------------------------------------------

    def fetch(
        self,
        visit: int,
        now: float | None = None,
        *,
        told: bool = True,
        patient: bool = False,
    ) -> list[Outbound]:
        """Ask what is due; `visit` is a number that was not used before. `now`, in seconds since
        1970: a cut-off that has not passed is refused, or, if `patient`, `CutoffAhead` and nothing
        has changed; None where there is no clock. `told`: whether the server is known to have the
        last delivery."""
        self._patient = patient
        self._now = now
        return self._member.fetch(visit, told=told)

    def supply(self, update: ModelUpdate | None) -> list[Outbound]:
        """Deliver what came out of the training of `pending`; None: nothing did."""
        state = self.state
        if not isinstance(state, TrainingBase):
            raise MisuseError("an update is not due: nothing was fetched, or it was given already")
        words = self.work.update_words(
            update,
            self._selection(state),
            UpdateLayout(self.plan, self._rows(state)),
            state.base.message.round_id,
            state.member.coins,
        )
        out = state.member.deliver(words, entropy=self.setup.entropy)
        following = BetweenVisits(
            member=state.member,
            period=state.period,
            cutoff=state.cutoff,
            updates=state.updates + 1,
            union=state.union,
        )
        self._move(following, b"")
        return out

    def resend(self) -> list[Outbound]:
        """What it has stored and the server may not have: the same bytes."""
        return self.state.member.resend() if isinstance(self.state, BetweenVisits) else []

    def withdraw(self, reason: str) -> list[Outbound]:
        """For good: mask key and coins of an epoch that it has not delivered are erased, and the
        server is told."""
        if isinstance(self.state, BetweenVisits | TrainingBase):
            self.state.member.withdraw(reason)
        self.over(RoundOutcome.ABORTED, reason)
        return [Outbound.of(SERVER, self.setup.member.leave)]

    # --- messages -------------------------------------------------------------------------------

    def _on_work(self, state: BetweenVisits | TrainingBase, kept: Kept[EpochWork]) -> Moved:
        work, member, before = kept.message, state.member, state.member.due
        ahead = 0.0 if self._now is None else work.record.cutoff - self._now
        if self._patient and ahead > 0.0 and work.record.period != state.period:
            raise CutoffAhead(ahead)
        out = member.receive(SERVER, work.assignment)
        header = member.due
        if header is None or header == before:  # delivered already, or what it has
            return state, out
        self._handled = set()  # what was said in the epochs before is not repeated
        if isinstance(state, BetweenVisits):  # and not when another base takes the place of one
            self._settle()
        union = state.union if state.period == header.period else None
        if work.union:
            union = self._opened_union(work.union, union)
        base = self._decoded(work.base, Download) if work.base else None
        self._check_kind(header, union)
        local = self.setup.local
        made = header_of(
            self.plan, header.epoch, work.record, union, base, local.derived, local.counts
        )
        if made != header:
            raise self._fault("sent other inputs than the epoch's header has digests of")
        self._check_cutoff(state, work.record)
        if work.record.period != state.period:
            self._check_period(state, work.record)
            self.work.begin(work.record)
        if base is None:
            return self._offered(state, work.record), member.resend()
        if isinstance(state, BetweenVisits):
            self.work.charge(header.epoch, header.period)
        following = TrainingBase(
            member=member,
            period=header.period,
            cutoff=work.record.cutoff,
            updates=state.updates if state.period == header.period else 0,
            union=union,
            base=base,
        )
        self._submodel(following)  # or it leaves
        return following, []

    def _on_wait(self, state: Any, kept: Kept[ComeBack]) -> Moved:
        state.member.receive(SERVER, kept.data)
        return state, []

    def _settle(self) -> None:
        """The epoch before is certified: what this client made of its own rows in it is kept."""
        local = self.setup.local
        if (pending := local.unsettled) is not None:
            local.settle(pending, counted=True, by=Word.CERTIFICATE)

    def _check_kind(self, header: EpochHeader, union: Kept[UnionOpened] | None) -> None:
        """A period has one union that decodes, before its updates."""
        if header.kind is EpochKind.UNION:
            if not self._agreed.rows.union or union is not None:
                raise self._fault(f"asked for a union that is not due in period {header.period}")
        elif self._agreed.rows.union and union is None:
            raise self._fault(f"asked for an update in period {header.period} before its union")

    def _check_period(self, state: BetweenVisits | TrainingBase, record: PeriodRecord) -> None:
        """A new period after as many updates as the plan says and not before, by its own count:
        what came between two unions is seen as such."""
        due = self.plan.groups.period
        if state.period and not 0 < due <= state.updates:
            after = f"the plan has one after {due}" if due else "the plan has one for good"
            raise self._fault(
                f"began period {record.period} after {state.updates} updates, and {after}"
            )

    def _check_cutoff(self, state: BetweenVisits | TrainingBase, record: PeriodRecord) -> None:
        """A period has one cut-off, which has passed, later than that of the period before."""
        data, cutoff = self.setup.local.data, record.cutoff
        if record.period == state.period:
            if cutoff != state.cutoff:
                raise self._fault(f"named two cut-offs of period {record.period}")
            return
        if cutoff < state.cutoff or cutoff == state.cutoff != 0:
            raise self._fault(
                f"named a cut-off of period {record.period} that is not later than the last one"
            )
        if cutoff == 0 and data is not None and data.timed:
            raise self._fault(f"named no cut-off of period {record.period}")
        if self._now is not None and cutoff > self._now:
            raise self._fault(
                f"named a cut-off of period {record.period} that has not passed by this client's "
                "clock"
            )

    def _offered(self, state: Any, record: PeriodRecord) -> BetweenVisits:
        """Freeze the period's rows and deliver them under the union's encoding."""
        member, entropy = state.member, self.setup.entropy
        self.work.freeze(record.period, entropy)
        words = self.work.union_words(record.period, member.due.epoch, member.coins)
        member.deliver(words, entropy=entropy)
        return BetweenVisits(member=member, period=record.period, cutoff=record.cutoff)

    def _opened_union(self, data: bytes, known: Kept[UnionOpened] | None) -> Kept[UnionOpened]:
        """A union is bounded by the plan before anything is made of it."""
        plan = self.plan
        most = most_union_bytes(plan.most_union, plan.domain, len(plan.roots))
        if len(data) > most:
            raise self._fault(f"sent a union of {len(data)} bytes where the cap is {most}")
        union = self._decoded(data, UnionOpened)
        if known is not None and known != union:
            raise self._fault("sent two unions of one period")
        if flaw := select.union_flaw(plan, union.message):
            raise self._fault(flaw)
        return union

    def _decoded(self, data: bytes, kind: type[Any]) -> Kept[Any]:
        try:
            message, digest = wire.opened(data, expect=(kind,))
        except WireError as error:
            raise self._fault(f"sent an invalid {kind.__name__}: {error}") from error
        return Kept.received(message, data, digest)

    # --- what is trained ------------------------------------------------------------------------

    def _rows(self, state: TrainingBase) -> dict[str, Ids]:
        return self.work.union_of(None if state.union is None else state.union.message)

    def _selection(self, state: TrainingBase) -> Selection:
        if self._chosen is None or self._chosen[0] is not state:
            chosen = self.work.selection(state.period, self._rows(state), state.member.coins)
            self._chosen = (state, chosen)
        return self._chosen[1]

    def _submodel(self, state: TrainingBase) -> Submodel:
        """A client that cannot compute with the base leaves: all members were sent the same."""
        try:
            return self.work.submodel(state.base.message, self._selection(state))
        except delivery.UnfitModel as error:
            raise self._fault(str(error)) from error

    def _end(self, state: Any) -> None:
        super()._end(state)
        self._chosen = None


STEPS: Final[Steps] = {
    (state, kind): step
    for state in (BetweenVisits, TrainingBase)
    for kind, step in ((EpochWork, EpochClient._on_work), (ComeBack, EpochClient._on_wait))
}
EpochClient.STEPS = STEPS
