"""ClientRound: union -> choose -> fetch -> train -> upload, each step once and in this order.

Sums come from `protocols/`, randomised answers from `privacy/`. Everything that is released is
charged to the ledger before the first message leaves. Training takes time, and time
is the engine's: a round that has fetched its rows shows them as `pending`, and goes on when it is
given the update.

A state holds what the round has come to, and in it the sum's own role. What a client keeps from
round to round (`LocalState`) is not in it: it is given again when the round is woken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import Identity
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError, ServerFault
from tessera.ids import SERVER, ClientId, Party, RoundId, TableId
from tessera.learning.tables.arrays import Floats, Ids
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart
from tessera.plan import UNION, Plan
from tessera.privacy.dp.events import THE_SUMS, THE_UNION, IndexAnswers
from tessera.privacy.index.period import FrozenPeriod, freeze, must_not_be_early
from tessera.protocols.machine import (
    Follower,
    Left,
    Moved,
    Outbound,
    RoundOutcome,
    RoundOver,
    Step,
    Steps,
    shortened,
)
from tessera.protocols.secagg import messages as secagg
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.states import Reveal
from tessera.rounds import delivery, encode, schemes, select
from tessera.rounds.client_states import (
    AT_WORK,
    AwaitingModel,
    NotStarted,
    OfferingRows,
    Question,
    ReadyToChoose,
    RowsAsked,
    TrainedModel,
    TrainingModel,
    TrainingOutput,
    UpdateSent,
)
from tessera.rounds.encode import Clipped
from tessera.rounds.local_state import LocalState, Word, check_rows
from tessera.rounds.messages import (
    FROM_SERVER,
    Download,
    UnionOpened,
    most_union_bytes,
)
from tessera.rounds.resolve import resolve
from tessera.rounds.root import coins_of, draw_root
from tessera.rounds.select import Selection
from tessera.rounds.sums import ClientSetup, Sum, SumClient
from tessera.rounds.words import RowWords
from tessera.wire.stored import Kept, Owner

OWN: Final = (*FROM_SERVER, RoundOver)
"""Messages that are the round's and not the sum's."""


class ClientRound(Follower[Any]):
    """One client in one round of training.

    Known to this client only, in the process that trained, and not stored: how much was `clipped`,
    why it sent zeros instead of an update (`broken`), and the rows with a delta (`written`).
    """

    ROLE = "client of a round"
    STATES = (NotStarted, *AT_WORK, Left)
    PHASES: ClassVar = {NotStarted: "Invited"}
    FROM_SERVER = FROM_SERVER

    def __init__(
        self,
        plan: Plan,
        round_id: RoundId,
        me: ClientId,
        *,
        local: LocalState,
        entropy: Entropy,
        identity: Identity | None = None,
    ) -> None:
        owner = self._hold(plan, round_id, me, local, entropy, identity)
        self._begin(owner, NotStarted())

    def take_part_in(self, total: Sum) -> None:
        """Take part in this sum instead of the plan's, an ideal one; before the start."""
        if not isinstance(self.state, NotStarted):
            raise MisuseError("a round is ideal from its beginning, or not at all")
        self._sum = total

    @classmethod
    def wake(  # type: ignore[override]
        cls,
        snapshot: bytes,
        messages: Mapping[bytes, bytes],
        plan: Plan,
        round_id: RoundId,
        me: ClientId,
        *,
        local: LocalState,
        entropy: Entropy,
        identity: Identity | None = None,
    ) -> Self:
        """Go on from a snapshot. What was charged is charged, and what was drawn is drawn."""
        client = cls.__new__(cls)
        owner = client._hold(plan, round_id, me, local, entropy, identity)
        client._resume(snapshot, messages, owner, {"sum": client._woken_sum})
        return client

    def _hold(
        self,
        plan: Plan,
        round_id: RoundId,
        me: ClientId,
        local: LocalState,
        entropy: Entropy,
        identity: Identity | None,
    ) -> Owner:
        schemes.check(type(self).__name__, plan, two_servers=False)
        check_rows(plan, local)
        self.plan, self.me = plan, me
        self._local, self._entropy = local, entropy
        agreed = resolve(plan)
        self._rows, self._sum, self._noise = agreed.rows, agreed.sum, agreed.noise
        self._cohorts = agreed.cohorts
        self._setup = ClientSetup(plan=plan, round_id=round_id, me=me, identity=identity)
        self.clipped, self.broken = Clipped(), ""
        self.written: dict[str, Ids] = {}
        # What follows from the state, worked out once.
        self._selected: tuple[Any, Selection] | None = None
        self._submodel: tuple[Any, Submodel] | None = None
        return self._owned(me, round_id, plan.digest)

    def _woken_sum(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> SumClient:
        return self._sum.wake_client(self._setup, snapshot, messages)

    @property
    def phase(self) -> str:
        return self.state.sum.phase if isinstance(self.state, AT_WORK) else super().phase

    # --- 1. charged before anything is sent -----------------------------------------------------

    def start(self) -> list[Outbound]:
        if not isinstance(self.state, NotStarted):
            raise MisuseError("a round is started once")
        self._local.must_be_settled()
        self.prepare()
        root = draw_root(self._entropy, self.plan, self.round_id, self.me)
        total, out = self._sum.join(self._setup, root, self._local.last_round)
        self._local.last_round = self.round_id
        begun: OfferingRows | ReadyToChoose | AwaitingModel
        if self._rows.randomised:
            begun = OfferingRows(root=root, sum=total)
        elif self._rows.chosen:
            begun = ReadyToChoose(root=root, sum=total, union=None)
        else:
            begun = AwaitingModel(root=root, sum=total, asked=None)
        following, out = self._advanced(begun, out)
        self._move(following, b"")
        return out

    def prepare(self) -> None:
        """Freeze what the answers depend on and charge for them: before the first message."""
        if self._rows.randomised:
            self._freeze_and_charge()
        elif self._sum.masks and self.plan.tables:
            self._local.release(self.plan, self.round_id, *self._noise.bare(THE_SUMS))
        self._noise.charge(self._local.ledger, self.round_id)

    def _freeze_and_charge(self) -> None:
        plan, local = self.plan, self._local
        roots = {plan.table_id(t.name): t for t in plan.roots}
        held, pool = select.held(plan, local.real), select.held(plan, local.pool)
        real = {table: held[t.name] for table, t in roots.items()}
        if plan.privacy.add and not local.pool:
            raise ConfigError(
                f"plan: add = {plan.privacy.add} perturbs the real set, and there is no pool",
                hint="give the client a public list of rows, such as an earlier union",
            )
        least = plan.privacy.least_rounds if local.own_rounds is None else local.own_rounds
        must_not_be_early(local.periods, plan.federation, plan.period(self.round_id), least)
        if (stored := self._frozen) is not None:
            # Ids that came since the period began wait for the next: a join would show as a flip.
            real = {part.table: part.real for part in stored.tables}
        frozen = freeze(
            local.periods,
            federation=plan.federation,
            period=plan.period(self.round_id),
            privacy=local.privacy or plan.privacy.index,
            real=real,
            entropy=_ClientEntropy(self._entropy, self.me),
            sizes={table: t.rows for table, t in roots.items()},
            max_rows=dict.fromkeys(roots, plan.union.max_rows),
            perturbation=plan.privacy.perturbation,
            pool={table: pool[t.name] for table, t in roots.items()},
            agreement=local.agreement_on(plan),
        )
        local.release(plan, self.round_id, THE_UNION, *self._noise.bare(THE_SUMS))
        local.ledger.spend(
            IndexAnswers(
                federation=plan.federation,
                period=plan.period(self.round_id),
                round_id=self.round_id,
                privacy=frozen.privacy,
            ),
            reason=f"round {self.round_id}: rows revealed",
            planned=plan.privacy.budget or None,
        )
        local.periods.count_round(plan.federation)

    @property
    def _frozen(self) -> FrozenPeriod | None:
        """The period of this round, once it is frozen."""
        stored = self._local.periods.latest(self.plan.federation)
        in_it = stored is not None and stored.period == self.plan.period(self.round_id)
        return stored if in_it else None

    def _period(self) -> FrozenPeriod:
        frozen = self._frozen
        if frozen is None:
            raise MisuseError(f"round {self.round_id}: its period is not the one that is stored")
        return frozen

    @property
    def left_out(self) -> int:
        """Real rows over the cap that the plan sets on the rows a client may name."""
        frozen = self._frozen if self._rows.randomised else None
        return 0 if frozen is None else sum(len(t.left_out) for t in frozen.tables)

    # --- messages -------------------------------------------------------------------------------

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        kind = wire.kind_of(data)
        if isinstance(self.state, NotStarted) and kind is not RoundOver:
            raise MisuseError("a round is started before it receives")
        if not isinstance(self.state, AT_WORK) or kind in OWN:
            self._check_length(kind, data)
            return super().receive(sender, data)
        try:
            following, out = self._apply(ClientRound._on_sum, data)
        except ServerFault as fault:
            raise self._leave(fault) from None
        self._move(following, b"")
        return out

    def _told(self, outcome: RoundOutcome) -> None:
        if not isinstance(self.state, TrainedModel):
            self._local.told(self.round_id, outcome)

    def take(self, message: Kept[Any]) -> list[Outbound]:
        """A message of the round's own that was never bytes, in an ideal round."""
        step = STEPS[type(self.state), type(message.message)]
        try:
            following, out = self._apply(step, message)
        except ServerFault as fault:
            raise self._leave(fault) from None
        self._move(following, b"")
        return out

    def _check_length(self, kind: type[Any] | None, data: bytes) -> None:
        """A union is bounded by the plan before anything is made of it: a bitmap that names every
        row is short on the wire and 64 times as long in memory."""
        plan = self.plan
        if kind is UnionOpened and isinstance(self.state, OfferingRows):
            most = most_union_bytes(plan.most_union, plan.domain, len(plan.roots))
            if len(data) > most:
                size = f"{len(data)} bytes where the cap is {most}"
                raise self._leave(self._fault(f"sent a union of {size}"))

    def _end(self, state: Any) -> None:
        if isinstance(self.state, TrainedModel):  # it was never sent, whatever a server says of it
            self._local.settle(self.round_id, counted=False, by=Word.OWN)
        super()._end(state)
        self._selected = self._submodel = None

    def _leave(self, fault: ServerFault) -> ServerFault:
        """For good: later messages are not read."""
        self._end(Left(reason=shortened(fault.reason)))
        return fault

    def _check_message(self, message: Any) -> None:
        if message.round_id != self.round_id:
            raise self._fault(f"sent {type(message).__name__} of round {message.round_id}")

    def _on_sum(self, state: Any, data: bytes) -> Moved:
        """A message of the sum's, which judges itself whether it is due."""
        out = state.sum.receive(SERVER, data)
        if wire.kind_of(data) is secagg.Roster:
            self._check_members(wire.decode(data, expect=(secagg.Roster,)))
        if wire.kind_of(data) is secagg.RowGroups and state.sum.knows_groups:  # else it is repeated
            self._check_row_groups(state.sum)
        return state, out

    def _check_row_groups(self, total: SumClient) -> None:
        if not self._rows.randomised:
            return
        own = self._period().privacy
        if flaw := self._cohorts.row_groups_flaw(own, total.smallest_group):
            raise self._fault(flaw)

    def _check_members(self, roster: secagg.Roster) -> None:
        members = [m.client for m in roster.members]
        if flaw := self._cohorts.members_flaw(members, self._local.periods):
            raise self._fault(flaw)

    def _apply(self, step: Step, message: Any) -> Moved:
        following, out = step(self, self.state, message)
        return self._advanced(following, list(out))

    def _advanced(self, state: Any, out: list[Outbound]) -> Moved:
        """Contribute what the sum waits for, as far as it is known."""
        while (step := CONTRIBUTES.get(type(state))) is not None:
            moved = step(self, state)
            if moved is None:
                break
            state, more = moved
            out = [*out, *more]
        return state, out

    # --- 2. the union: its rows and decoys, under the secure sum --------------------------------

    def _offer(self, state: OfferingRows) -> Moved | None:
        total = state.sum
        if total.wants is None or total.stage != UNION:
            return None
        coins = state.root.secret(Label.UNION_COINS)
        given = self._sum.union_input(self.plan, self.round_id, self._offered(), coins)
        return state, total.submit(given)

    def _offered(self) -> Ids:
        """What this client puts into the union: its rows in the one space of ids, and decoys."""
        plan, frozen = self.plan, self._period()
        rows = {plan.tables[part.table].name: part.offered for part in frozen.tables}
        catalogue = self._local.decoys_from(plan)
        return select.offered(plan, rows, frozen.secret, frozen.period, catalogue)

    def _on_union(self, state: OfferingRows, union: Kept[UnionOpened]) -> Moved:
        if not state.sum.knows_survivors(UNION):
            raise self._fault("sent a union that is not due")
        if flaw := select.union_flaw(self.plan, union.message):
            raise self._fault(flaw)
        return ReadyToChoose(root=state.root, sum=state.sum, union=union), []

    # --- 3. the rows this client asks for -------------------------------------------------------

    def _choose(self, state: ReadyToChoose) -> Moved | None:
        """Name rows, cover included, by their place in the union."""
        if not state.sum.awaits_rows:
            return None
        plan, maps = self.plan, self._local.derived
        union: dict[str, Ids] = {}
        if state.union is None:
            held = select.held(plan, self._local.real)
            chosen = select.choose_held(plan, held, union, maps)
        else:
            union = select.union_rows(plan, state.union.message, maps)
            chosen = select.choose_answers(
                plan,
                self._period(),
                union,
                maps,
                round_id=self.round_id,
                entropy=state.root,
            )

        def of_roots(rows: Mapping[str, Ids]) -> dict[TableId, Ids]:
            return {plan.table_id(t.name): rows[t.name] for t in plan.roots}

        rows = RowsAsked(requested=of_roots(chosen.requested), trained=of_roots(chosen.trained))
        asked = Question(rows=self._sum.kept(rows), union=state.union)
        self._selected = (asked, chosen)
        reveal = Reveal(
            tables={
                plan.table_id(name): select.positions(union, name, ids)
                for name, ids in chosen.requested.items()
            },
            quorum=self._local.quorum,
            context=asked.context,
        )
        following = AwaitingModel(root=state.root, sum=state.sum, asked=asked)
        return following, state.sum.submit(reveal)

    def _selection(self, asked: Question | None) -> Selection:
        """The rows that are fetched and those that are trained, by table name."""
        if self._selected is None or self._selected[0] is not asked:
            self._selected = (asked, self._selection_of(asked))
        return self._selected[1]

    def _selection_of(self, asked: Question | None) -> Selection:
        plan, maps = self.plan, self._local.derived
        if asked is None:
            whole = plan.sent_rows
            own = self._noise.trained_rows(select.own(plan, self._local.real, maps), whole)
            return Selection(requested=whole, trained=own)

        def rows(roots: Mapping[TableId, Ids]) -> dict[str, Ids]:
            by_name = {plan.tables[table].name: ids for table, ids in roots.items()}
            return select.with_derived(plan, by_name, maps)

        asked_for = asked.rows.message
        return Selection(requested=rows(asked_for.requested), trained=rows(asked_for.trained))

    # --- 4. fetch and train ---------------------------------------------------------------------

    def _on_download(self, state: AwaitingModel, download: Kept[Download]) -> Moved:
        if self._sum.in_memory and state.asked is not None:
            self._check_row_groups(state.sum)  # known already: it sends no message
        following = TrainingModel(
            root=state.root, sum=state.sum, asked=state.asked, download=download
        )
        self._submodel = (following, self._submodel_of(following))
        return following, []

    @property
    def coins(self) -> Secret:
        """What the training of `pending` draws from."""
        assert isinstance(self.state, TrainingModel)
        return coins_of(self.state.root)

    @property
    def pending(self) -> Submodel | None:
        """What is to be trained now, once it is here; nothing before, and nothing after."""
        state = self.state
        if not isinstance(state, TrainingModel):
            return None
        if self._submodel is None or self._submodel[0] is not state:
            self._submodel = (state, self._submodel_of(state))
        return self._submodel[1]

    def _submodel_of(self, state: TrainingModel) -> Submodel:
        chosen, message = self._selection(state.asked), state.download.message
        if state.asked is None:  # the same for everybody
            dense, tables = self._sum.once(message, lambda: self._parts(message, chosen))
        else:
            dense, tables = self._parts(message, chosen)
        return Submodel(dense, tables, chosen.trained)

    def _parts(self, message: Download, chosen: Selection) -> tuple[Floats, dict[str, TablePart]]:
        """The model as it was sent. A client that cannot compute with it leaves: the server knows
        which rows it sent, so that leaving tells it nothing."""
        try:
            return delivery.model_parts(self.plan, message, chosen.requested)
        except delivery.UnfitModel as error:
            raise self._fault(str(error)) from error

    def supply(self, update: ModelUpdate | None) -> list[Outbound]:
        """Go on with what came out of the training of `pending`; None: nothing did."""
        if not isinstance(self.state, TrainingModel):
            raise MisuseError("an update is not due: nothing was fetched, or it was given already")
        following, out = self._apply(ClientRound._on_update, TrainingOutput(update))
        self._move(following, b"")
        return out

    # --- 5. upload ------------------------------------------------------------------------------

    def _on_update(self, state: TrainingModel, supplied: TrainingOutput) -> Moved:
        """Into words at once: the update itself is not stored."""
        plan, update = self.plan, supplied.update
        trained = self._selection(state.asked).trained
        self.broken = encode.flaw(plan, update, trained)
        if update is None or self.broken:
            update = encode.zeros(plan)  # who left, or stopped, would say something of its data
        coins = state.root.secret(Label.ROUNDING)
        encoded = encode.update_words(
            plan,
            update,
            trained,
            coins,
            round_id=self.round_id,
            residual=self._local.residual_in(plan),
            noise=self._noise.share_stream(state.root, self.round_id, self.me),
        )
        self.clipped, self.written = encoded.clipped, dict(encoded.written)
        following = TrainedModel(
            sum=state.sum,
            asked=state.asked,
            download=state.download,
            dense=encoded.dense,
            tables={plan.table_id(n): part.words for n, part in encoded.tables.items()},
        )
        return following, []

    def _upload(self, state: TrainedModel) -> Moved | None:
        """The update's words, with those rows whose groups met the quorum."""
        total, plan = state.sum, self.plan
        if total.wants is None or total.awaits_rows:
            return None
        chosen = self._selection(state.asked)
        rows = {
            plan.tables[table].name: RowWords(chosen.trained[plan.tables[table].name], words)
            for table, words in state.tables.items()
        }
        included = None if state.asked is None else total.included_among_named
        received = self._sum.received(plan, state.download.message, included)
        if state.asked is not None and included is not None:
            tables = {}
            for name, part in rows.items():
                table = plan.table_id(name)
                ids = chosen.requested[name][included[table]]
                tables[table] = part.at(ids)
                self.written[name] = ids[tables[table].any(axis=1)]  # and not those below quorum
            context = state.asked.context
            given = Input(dense=state.dense, tables=tables, context=context, received=received)
        elif not plan.counts_rows or not rows:
            given = Input(dense=state.dense, received=received)
        else:
            given = self._sum.whole_input(plan, state.dense, rows, received)
        return UpdateSent(sum=total), total.submit(given)


STEPS: Final[Steps] = {
    (OfferingRows, UnionOpened): ClientRound._on_union,
    (AwaitingModel, Download): ClientRound._on_download,
    (TrainingModel, TrainingOutput): ClientRound._on_update,
    **{(state, kind): ClientRound._on_sum for state in AT_WORK for kind in secagg.FROM_SERVER},
}
ClientRound.STEPS = STEPS

CONTRIBUTES: Final[Mapping[type[Any], Any]] = {
    OfferingRows: ClientRound._offer,
    ReadyToChoose: ClientRound._choose,
    TrainedModel: ClientRound._upload,
}
"""What a round in this state gives its sum, once the sum asks for it."""


class _ClientEntropy:
    """Entropy of one client: scripted entropy is addressed by client, too."""

    def __init__(self, entropy: Entropy, me: ClientId) -> None:
        self._entropy, self._me = entropy, me

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Any:
        return self._entropy.secret(label, int(self._me), *context, size=size)
