"""MemberWork: what a member of a fixed group computes in an epoch, whatever carries it.

Its rows are frozen once a period, before anything of them leaves. In the union's epoch they become
words of the keyed sum table; in an epoch of updates the member trains from the whole union, so that
no fetch says which rows are its own. What it draws comes from the epoch's coins. What fails because
of its own data is sent as zeros (docs/threat-model.md): a member that left for it would show it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tessera.crypto.entropy import Entropy
from tessera.crypto.group import Words
from tessera.crypto.prg import Label
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import Ids, ModelUpdate, Submodel
from tessera.plan import Plan
from tessera.privacy.dp.events import THE_SUMS, THE_UNION, IndexAnswers
from tessera.privacy.index.period import FrozenPeriod, freeze
from tessera.rounds import delivery, encode, select
from tessera.rounds.encode import Clipped, UpdateLayout
from tessera.rounds.epochs.messages import PeriodRecord
from tessera.rounds.local_state import LocalState, check_rows
from tessera.rounds.messages import Download, UnionOpened
from tessera.rounds.resolve import resolve
from tessera.rounds.root import ClientEntropy
from tessera.rounds.select import Selection
from tessera.rounds.words import union_words


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
