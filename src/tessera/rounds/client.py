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
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Final

import numpy.typing as npt

from tessera import wire
from tessera.crypto.prg import Label
from tessera.errors import ConfigError, MisuseError
from tessera.ids import SERVER, TableId
from tessera.learning.tables.submodel import Floats, Ids, Submodel, TablePart
from tessera.plan import UNION
from tessera.privacy.dp.events import THE_SUMS, THE_UNION, IndexAnswers
from tessera.privacy.index.period import FrozenPeriod, freeze, must_not_be_early
from tessera.protocols.machine import (
    Left,
    Moved,
    Outbound,
    RoundOutcome,
    Step,
    Steps,
)
from tessera.protocols.secagg import messages as secagg
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.params import MAX_TABLES
from tessera.protocols.secagg.phases import MAX_SUM_BYTES
from tessera.protocols.secagg.states import Reveal
from tessera.rounds import delivery, encode, select
from tessera.rounds.messages import (
    FROM_SERVER,
    Download,
    RowsByTable,
    RowWords,
    UnionOpened,
)
from tessera.rounds.party import ClientRoundSetup, Word
from tessera.rounds.resolve import resolve
from tessera.rounds.root import ClientEntropy, StoredRoot, draw_root
from tessera.rounds.select import Selection
from tessera.rounds.sums import SumClient
from tessera.rounds.training_client import TrainingClient, TrainingOutput
from tessera.wire.stored import ByDigest, Inner, Kept

Sum = Annotated[SumClient, Inner("sum")]
KeptDownload = Annotated[Kept[Download], ByDigest(Download)]
Words = Annotated[npt.NDArray[Any], wire.Words(MAX_SUM_BYTES)]


@wire.record(tag=0x0280)
@dataclass(frozen=True, slots=True, kw_only=True)
class NotStarted:
    """Has not begun: nothing is charged and nothing sent."""


@wire.record(tag=0x0281)
@dataclass(frozen=True, slots=True, kw_only=True)
class OfferingRows:
    """Takes part in the union's sum; waits for the union."""

    root: StoredRoot
    sum: Sum


@wire.record(tag=0x0282)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyToChoose:
    """Knows the union, where there is one; names rows as soon as the sum asks for them."""

    root: StoredRoot
    sum: Sum
    union: Annotated[Kept[UnionOpened] | None, wire.Maybe(ByDigest(UnionOpened))]


@wire.record(tag=0x0203)
@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAsked:
    """The ids it has asked for, and those of them that it trains; rows of derived tables follow.

    Not sent to anybody; stored once, like a message, since it does not change any more.
    """

    requested: RowsByTable = field(repr=False)
    trained: RowsByTable = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What it has asked for, over which union."""

    rows: Annotated[Kept[RowsAsked], ByDigest(RowsAsked)]
    union: Annotated[Kept[UnionOpened] | None, wire.Maybe(ByDigest(UnionOpened))]

    @property
    def context(self) -> bytes:
        """What everybody must have alike before the update is summed."""
        return NO_CONTEXT if self.union is None else self.union.digest


AskedFor = Annotated[Question | None, wire.Maybe(wire.Nested(Question))]
"""None: the whole model, which is sent unasked."""


@wire.record(tag=0x0283)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingModel:
    """Waits for the values of its rows, or for the whole model."""

    root: StoredRoot
    sum: Sum
    asked: AskedFor


@wire.record(tag=0x0284)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingModel:
    """Has something to train (`pending`); waits for its caller's update."""

    root: StoredRoot
    sum: Sum
    asked: AskedFor
    download: KeptDownload


@wire.record(tag=0x0285)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """Has its update in words; sends it as soon as the sum asks for it.

    `tables` has words of the trained rows; without counts by row a whole model is all in `dense`.
    """

    sum: Sum
    asked: AskedFor
    download: KeptDownload
    dense: Words = field(repr=False)
    tables: Annotated[
        dict[TableId, npt.NDArray[Any]],
        wire.ByKey(wire.U16, wire.Words(MAX_SUM_BYTES), MAX_TABLES),
    ] = field(repr=False)


@wire.record(tag=0x0286)
@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSent:
    """Its update is out; does its part of what opens the sum."""

    sum: Sum


AT_WORK: Final = (
    OfferingRows,
    ReadyToChoose,
    AwaitingModel,
    TrainingModel,
    TrainedModel,
    UpdateSent,
)
NO_CONTEXT: Final = bytes(32)


class ClientRound(TrainingClient):
    """One client in one round of training, before one server."""

    ROLE = "client of a round"
    STATES = (NotStarted, *AT_WORK, Left)
    PHASES: ClassVar = {NotStarted: "Invited"}
    FROM_SERVER = FROM_SERVER
    TWO_SERVERS = False
    INVITED, OFFERING, TRAINING = NotStarted, OfferingRows, TrainingModel

    def _set_up(self, setup: ClientRoundSetup) -> None:
        super()._set_up(setup)
        self._sum, self._cohorts = setup.sum, resolve(setup.plan).cohorts
        self._selected: tuple[Any, Selection] | None = None  # of this question, worked out once

    def _supplied(self) -> Mapping[str, Any]:
        return {"sum": partial(self._sum.wake_client, self.setup)}

    @property
    def phase(self) -> str:
        return self.state.sum.phase if isinstance(self.state, AT_WORK) else super().phase

    # --- 1. charged before anything is sent -----------------------------------------------------

    def start(self) -> list[Outbound]:
        self._must_begin()
        self.prepare()
        root = draw_root(self._entropy, self.plan, self.round_id, self.me)
        total, out = self._sum.join(self.setup, root, self._local.last_round)
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
        self._local.attend(self.plan, self.round_id, self.setup.servers)
        if self._rows.randomised:
            self._freeze_and_charge()
        else:
            bare = self._noise.bare(*self._sum.opened(self.plan))
            self._local.release(self.plan, self.round_id, *bare)
        training = self._local.training(self.plan)
        self._noise.charge(self._local.ledger, self.round_id, training)

    def _freeze_and_charge(self) -> None:
        plan, local = self.plan, self._local
        roots = plan.root_ids
        held, pool = select.held(plan, local.real), select.held(plan, local.pool)
        real = {table: held[t.name] for table, t in roots.items()}
        perturbation = plan.privacy.perturbation
        if perturbation is not None and perturbation.add and not local.pool:
            raise ConfigError(
                f"plan: add = {perturbation.add} perturbs the real set, and there is no pool",
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
            period=self._period_number,
            privacy=local.answers(plan),
            real=real,
            entropy=ClientEntropy(self._entropy, self.me),
            sizes={table: t.rows for table, t in roots.items()},
            max_rows=dict.fromkeys(roots, plan.union.max_rows),
            perturbation=perturbation,
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
            planned=plan.privacy.budget,
        )
        local.periods.count_round(plan.federation)

    @property
    def _period_number(self) -> int:
        return self.plan.period(self.round_id)

    @property
    def _frozen(self) -> FrozenPeriod | None:
        """The period of this round, once it is frozen."""
        stored, now = self._local.periods.latest(self.plan.federation), self._period_number
        in_it = stored is not None and stored.period == now
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

    def _told(self, outcome: RoundOutcome) -> None:
        if not isinstance(self.state, TrainedModel):
            super()._told(outcome)

    def _end(self, state: Any) -> None:
        if isinstance(self.state, TrainedModel):  # it was never sent, whatever a server says of it
            self._local.settle(self.round_id, counted=False, by=Word.OWN)
        super()._end(state)
        self._selected = None

    def _check_message(self, message: Any) -> None:
        if message.round_id != self.round_id:
            raise self._fault(f"sent {type(message).__name__} of round {message.round_id}")

    def _on_sum(self, state: Any, data: bytes) -> Moved:
        out = state.sum.receive(SERVER, data)
        if wire.kind_of(data) is secagg.RowGroups and state.sum.knows_groups:  # else it is repeated
            self._check_row_groups(state.sum)
        return state, out

    def _check_row_groups(self, total: SumClient) -> None:
        if not self._rows.randomised:
            return
        own = self._period().privacy
        if flaw := self._cohorts.row_groups_flaw(own, total.smallest_group):
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
        self._check_union(state.sum, union.message)
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
            return {table: rows[t.name] for table, t in plan.root_ids.items()}

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
        if state.sum.knows_groups:  # already, where no message has said so
            self._check_row_groups(state.sum)
        following = TrainingModel(
            root=state.root, sum=state.sum, asked=state.asked, download=download
        )
        self._fetched(following)
        return following, []

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

    # --- 5. upload ------------------------------------------------------------------------------

    def _on_update(self, state: TrainingModel, supplied: TrainingOutput) -> Moved:
        plan, trained = self.plan, self._selection(state.asked).trained
        # Who left, or stopped, would say something of its data.
        update = self._sound(supplied.update, trained) or encode.zeros(plan)
        encoded = self._words(update, trained, state.root)
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
        elif not rows:
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
