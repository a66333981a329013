"""The account of noise: what all kinds with a budget share.

`AddedNoise` turns the section [dp] into the account of one client
(`privacy/dp/noise_setting.py`): the events that are charged, the limits that hold, the rounds that
a budget lasts, and the noise that a budget asks for. The kinds are in `noise.py`, what callers ask
of each of them in `no_noise.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Final

from tessera.crypto.noise import DISTANCE
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.learning.averaging import Divide
from tessera.learning.popularity import Popularity
from tessera.plan import DPPlan, NoisyRows, Plan, SimulationPlan
from tessera.plan.dp import GIVEN_UP, LONGER, row_list_of
from tessera.privacy.dp.accounting import delta_flaw
from tessera.privacy.dp.events import (
    THE_METRICS,
    THE_POPULARITY,
    THE_SETUP_SUM,
    WHICH_ROWS,
    Bounds,
    ExactRelease,
    NoisySum,
)
from tessera.privacy.dp.guarantee import Guarantee, Observer, Unit
from tessera.privacy.dp.ledger import Entry, Ledger, Limit
from tessera.privacy.dp.noise_setting import (
    MARKS_MOVE,
    Coins,
    NoiseSetting,
    Sampling,
    SummedVector,
    Visibility,
    row_moves,
)
from tessera.rounds import schemes
from tessera.rounds.no_noise import Figure, Noise
from tessera.rounds.schemes import SchemeEntry


class ProtectedUnit:
    """What the unit of a section says of its account. This one is an example: the unit `item`."""

    people: DPPlan | None = None
    """The section, where persons are protected that may have records at several clients."""
    clients: int = 0
    """That hold one unit, at most, where that is stated."""
    whole_client: bool = False
    """Whether it is all that a client sends: then noise on its statistics protects it."""
    row_moves: float = 0.0
    """How far one row moves what a client sends, in clips, where a row is the unit."""

    def __init__(self, dp: DPPlan) -> None:
        return

    def noisy_tests(self, simulation: SimulationPlan) -> bool:
        """Whether what clients test is summed with noise, which protects this unit."""
        return False

    def exact_tests(self, simulation: SimulationPlan) -> tuple[str, ...]:
        """What tests open without noise."""
        return simulation.released


class ProtectedIndex(ProtectedUnit):
    """A row of one client."""

    def __init__(self, dp: DPPlan) -> None:
        """Two gradients of each example that changes with it."""
        self.row_moves = row_moves(dp.per_row, dp.example_clip, clip=dp.clip)


class ProtectedUser(ProtectedUnit):
    """All that a client sends."""

    whole_client = True

    def noisy_tests(self, simulation: SimulationPlan) -> bool:
        return simulation.clients_test

    def exact_tests(self, simulation: SimulationPlan) -> tuple[str, ...]:
        return ()


class ProtectedSubject(ProtectedUnit):
    """A person."""

    def __init__(self, dp: DPPlan) -> None:
        self.people, self.clients = dp, dp.clients_per_subject


UNITS: Final = {
    Unit.INDEX: ProtectedIndex,
    Unit.ITEM: ProtectedUnit,
    Unit.USER: ProtectedUser,
    Unit.SUBJECT: ProtectedSubject,
}


class AddedNoise(Noise):
    """Of a plan with [dp]: a budget per unit, for which somebody adds noise to what is clipped."""

    servers: int = 0
    """That add the whole of it to a sum."""

    @property
    def dp(self) -> DPPlan:
        assert self.plan.dp is not None
        return self.plan.dp

    @property
    def opens_all(self) -> bool:
        """Whether every row of a table opens, written or not."""
        return False

    @property
    def on_a_sum(self) -> float:
        return self.in_the_sum * self.dp.clip

    @property
    def only_simulated(self) -> str:
        if not self.selects_rows:
            return ""
        return (
            '[dp] rows = "selected" needs a sum before the first round, which is not part of a '
            "deployment yet"
        )

    def check_clients(self) -> None:
        raise ConfigError(
            "[dp] without a task: synthetic clients train nothing, and add no noise",
            hint="name a [task], or leave [dp] out",
        )

    @property
    def erases_logs(self) -> bool:
        return True

    @cached_property
    def unit(self) -> ProtectedUnit:
        return UNITS[self.dp.unit](self.dp)

    @property
    def of_people(self) -> DPPlan | None:
        return self.unit.people

    @property
    def by_trainer(self) -> bool:
        return self.vector is None

    @cached_property
    def clips_examples(self) -> bool:
        return self.dp.by_examples

    @cached_property
    def per_row(self) -> int:
        return self.dp.per_row

    # --- what a task is completed with ------------------------------------------------------------

    def with_selected(self, popularity: Popularity | None) -> Plan:
        if popularity is None or not self.plan.listed:
            return self.plan
        chosen = popularity.selected
        if empty := [name for name, ids in chosen.items() if not len(ids)]:
            raise ConfigError(
                f"[dp]: no row of table {empty[0]!r} is over the noise, so that none is learnt",
                hint="a larger epsilon, more clients, or a lower threshold in [dp]",
            )
        return replace(self.plan, dp=replace(self.dp, row_list=row_list_of(chosen)))

    # --- the account ------------------------------------------------------------------------------

    @cached_property
    def setting(self) -> NoiseSetting:
        """The account of one client under this plan.

        Each client is charged as if its releases were seen one by one, also where only sums are:
        they are rounded and cut before they are summed, so that the sum is not that of the noisy
        values.
        """
        return self.setting_with(setup=False)

    def setting_with(self, *, setup: bool) -> NoiseSetting:
        plan, dp = self.plan, self.dp
        rate, coins = plan.coins
        return NoiseSetting(
            unit=dp.unit,
            noise=self.multiplier,
            printed=self.claim,
            trust=dp.trust,
            steps=dp.steps,
            sampling=Sampling.POISSON if rate < 1.0 else Sampling.NONE,
            rate=rate,
            coins=coins,
            drawn=dp.drawn,
            records=dp.records_per_subject,
            cap=max(1, dp.cap),
            clients=dp.clients_per_subject,
            row_moves=self.row_moves,
            clipped=not dp.by_batches,
            selection=self._selection_ratio,
            setup=self._ratio(dp.setup),
            metrics=self._ratio(self._metrics_share, self._tests),
            tests=self._tests if self.noisy_metrics else 0,
            distance=DISTANCE * plan.full_length,
            fails=GIVEN_UP + LONGER if rate < 1.0 and coins is Coins.LEADER else 0.0,
            sources=self.sources,
            vector=self.summed_vector,
            sight=sight(schemes.of(plan), *self._released(setup=setup), all_rows=self.opens_all),
            correlation=plan.correlation,
        )

    @property
    def multiplier(self) -> float:
        """Deviation of the noise that counts, over the clip; 1 where it is not known yet."""
        return self.dp.multiplier

    @property
    def claim(self) -> str:
        """What stands beside a number that does not hold."""
        return ""

    @property
    def sources(self) -> int:
        """Of noise in a sum, at least: honest survivors, where each adds its own."""
        return 1

    @property
    def summed_vector(self) -> SummedVector | None:
        """What is summed where noise is integers on the sum, as far as an account needs it."""
        return None

    @property
    def row_moves(self) -> float:
        """Unit index: how far one row moves what a client sends, in clips; else 0."""
        return self.unit.row_moves

    def _released(self, *, setup: bool) -> tuple[str, ...]:
        """What this plan releases exactly beside its scheme; `setup`: its task has a set-up sum."""
        plan = self.plan
        found = [*self.rows.opened_first]
        if setup:
            found += self.dp.opened_by_setup
        return (*found, *plan.security.released, *self.unit.exact_tests(plan.simulation))

    # --- sums of statistics, group by group -------------------------------------------------------

    def counted_sources(self, survivors: Callable[[], int]) -> int:
        """Clients whose noise is all of it, of a group with so many survivors; 0: too few."""
        return 1

    def own_part(self, counted: int) -> float:
        """Deviation of what one client adds to its part, over that of all noise that counts."""
        return 0.0

    def own_sources(self, members: int, counted: int) -> float:
        """How often the whole noise is in the sum of a group, by its clients."""
        return 0.0

    # --- shares of the budget ---------------------------------------------------------------------

    @property
    def _metrics_share(self) -> float:
        return self.dp.metrics if self.noisy_metrics else 0.0

    @property
    def _selection_share(self) -> float:
        return self.dp.selection if self.selects_rows else 0.0

    @property
    def _shares(self) -> float:
        """Of the budget, for all but the rounds."""
        return self._selection_share + self.dp.setup + self._metrics_share

    def _ratio(self, share: float, times: int = 1) -> float:
        """Noise of what is released so often with this share of the budget, over that of a round.

        Gaussian noise spends by the inverse of its variance. 0: it has no share, and no noise.
        """
        if not share:
            return 0.0
        rest = 1.0 - self._shares
        if rest <= 0.0:
            dp = self.dp
            raise ConfigError(
                f"[dp] selection = {dp.selection:g}, setup = {dp.setup:g} and metrics = "
                f"{dp.metrics:g} of the budget leave nothing for the rounds",
                hint="shares that add up to less than 1",
            )
        return math.sqrt(rest * times / (share * self.plan.correlation.releases))

    @property
    def _selection_ratio(self) -> float:
        """A row moves a client's marks by another length than its update."""
        moved = MARKS_MOVE / self.row_moves if self.row_moves else 1.0
        return moved * self._ratio(self._selection_share)

    def statistic_noise(self, what: str) -> float:
        setting = self.setting
        ratios = {
            THE_SETUP_SUM: setting.setup,
            THE_POPULARITY: setting.selection,
            THE_METRICS: setting.metrics,
        }
        return self.dp.noise * ratios[what]

    @cached_property
    def follows_from_rounds(self) -> bool:
        return self._shares > 0.0 or self.dp.correlated

    # --- charged ----------------------------------------------------------------------------------

    @cached_property
    def bounds(self) -> Bounds:
        dp, rows = self.dp, self.plan.union.max_rows * len(self.plan.roots)
        return Bounds(
            rows_per_example=rows,
            rows_per_client=rows,
            records_per_subject=dp.records_per_subject,
            clients_per_subject=self.unit.clients,
        )

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        return self.setting.limits(epsilon=self.dp.epsilon, delta=self.dp.delta)

    def own_limits(self, *, epsilon: float, delta: float) -> tuple[Limit, ...]:
        return tuple(
            Limit(epsilon=epsilon, delta=delta, unit=self.dp.unit, against=observer)
            for observer in self.setting.protected()
        )

    @cached_property
    def foreseen(self) -> tuple[Entry, ...]:
        return self.setting.ledger(self.plan.simulation.rounds).entries

    def bare(self, *released: str) -> tuple[str, ...]:
        return ()

    def events(self, round_id: RoundId, training: str = "") -> tuple[NoisySum, ...]:
        """What a round costs, or the `training` that it is of, where noise is correlated."""
        federation = self.plan.federation
        found = [*self.setting.events(federation=federation, round_id=round_id, training=training)]
        if self.noisy_metrics and self._tested_in(round_id):
            found += self.setting.metrics_events(
                self.plan.simulation.tested_parts,
                federation=self.plan.federation,
                round_id=round_id,
            )
        return tuple(found)

    def setup_events(self) -> tuple[NoisySum | ExactRelease, ...]:
        federation = self.plan.federation
        exact = ExactRelease(federation=federation, round_id=RoundId(0), what=THE_SETUP_SUM)
        return tuple(self.setting.setup_events(federation=federation)) or (exact,)

    def selection_events(self) -> tuple[NoisySum, ...]:
        return tuple(self.setting.selection_events(federation=self.plan.federation))

    def _due(self, ledger: Ledger, round_id: RoundId, training: str) -> list[NoisySum]:
        """All that is not charged yet: a training is, once a client has been in a round of it."""
        events = self.events(round_id, training)
        return [event for event in events if not (event.training and ledger.has(event))]

    @property
    def open_setting(self) -> str:
        """An account of noise that nobody has sized would be of none."""
        if not self.dp.noise:
            return "[dp] noise is not known yet: nothing would be added"
        if self.dp.correlated and not self.dp.coefficients:
            return "[dp] coefficients are not known yet: every party might have its own"
        return ""

    def charge(self, ledger: Ledger, round_id: RoundId, training: str = "") -> None:
        if not self.dp.noise and self.open_setting:
            raise ConfigError(self.open_setting, hint="`tessera run` and `tessera pack` compute it")
        self._bound(ledger)
        plan = self.plan
        for what in self.exact:
            if what not in self.rows.charged_with_answers:
                exact = ExactRelease(federation=plan.federation, round_id=round_id, what=what)
                ledger.spend(exact, reason=f"round {round_id}: {what}")
        for event in self._due(ledger, round_id, training):
            ledger.spend(event, reason=f"round {round_id}: {event.what}", limits=self.limits)

    def charge_absent(self, ledger: Ledger, round_id: RoundId) -> None:
        federation = self.plan.federation
        for event in self.setting.absent_events(federation=federation, round_id=round_id):
            self._bound(ledger)
            ledger.spend(event, reason=f"round {round_id}: not drawn", limits=self.limits)

    def _bound(self, ledger: Ledger) -> None:
        if ledger.bounds == Bounds():
            ledger.bounds = self.bounds

    def affords(self, ledger: Ledger, round_id: RoundId, training: str = "") -> bool:
        return ledger.affords(self._due(ledger, round_id, training), self.limits)

    def refusal(self, spent: Callable[[], str]) -> str:
        dp, had = self.dp, spent()
        budget = f"the budget of epsilon {dp.epsilon:g} per {dp.unit} is spent"
        return f"{budget}: a client has had {had}" if had else ""

    # --- left -------------------------------------------------------------------------------------

    def guarantee(self, ledger: Ledger) -> Guarantee | None:
        dp = self.dp
        return max(
            (
                ledger.guarantee(unit=dp.unit, against=observer, delta=dp.delta)
                for observer in self.setting.protected()
            ),
            key=lambda g: g.epsilon,
        )

    @cached_property
    def lasts(self) -> int | None:
        return self.setting.rounds(epsilon=self.dp.epsilon, delta=self.dp.delta)

    def calibrated(self) -> Plan:
        """The plan with its noise: the least that keeps the budget, where none is given.

        For as many rounds as a client may be in, which it keeps itself. A cohort that is drawn in
        secret is a gain against those who do not know it, where the noise is not for anybody else.
        Coefficients of correlated noise are written down with it.
        """
        plan, dp = self.plan, self.dp
        if dp.correlated and not dp.coefficients:
            terms = ", ".join(map(str, self.correlation.terms))
            plan = replace(plan, dp=replace(dp, coefficients=terms))
            return type(self)(plan).calibrated()
        if not dp.noise:
            least = self.setting.least_noise(
                epsilon=dp.epsilon, delta=dp.delta, rounds=plan.simulation.rounds
            )
            plan = replace(plan, dp=replace(dp, noise=least))
        lasts, hint = type(self)(plan).lasts, "leave noise out: the least is computed"
        if lasts == 0:
            whole = "by all rounds of a training" if dp.correlated else "in the first round"
            raise ConfigError(
                f"[dp] noise = {dp.noise:g} passes epsilon = {dp.epsilon:g} {whole}", hint=hint
            )
        if lasts is not None and lasts < plan.cohorts.rounds_per_client:
            raise ConfigError(
                f"[dp] noise = {dp.noise:g} keeps epsilon = {dp.epsilon:g} for {lasts} of the "
                f"{plan.cohorts.rounds_per_client} rounds that a client has by [cohorts]",
                hint=f"{hint}; or rounds_per_client = {lasts}",
            )
        return plan

    # --- tests ------------------------------------------------------------------------------------

    @cached_property
    def noisy_metrics(self) -> bool:
        return self.unit.noisy_tests(self.plan.simulation)

    def may_test(self, round_id: RoundId) -> bool:
        return not self.noisy_metrics or self._tested_in(round_id)

    def _tested_in(self, round_id: RoundId) -> bool:
        """Whether the plan has the model tested after this round: it does not follow from data."""
        simulation = self.plan.simulation
        return simulation.due(int(round_id) + 1, simulation.rounds)

    @property
    def _tests(self) -> int:
        """How many sums of statistics the tests of all rounds are."""
        simulation = self.plan.simulation
        return simulation.tested_parts * -(-simulation.rounds // simulation.evaluate_every)

    # --- rows -------------------------------------------------------------------------------------

    @cached_property
    def selects_rows(self) -> bool:
        return self.dp.rows is NoisyRows.SELECTED

    @cached_property
    def in_the_sum(self) -> float:
        return self.dp.noise * self.plan.correlation.one_round

    @property
    def in_a_step(self) -> float:
        """Deviation of the noise that a round leaves in the model, over the clip.

        Where each client has its place in a pass, a round is a part of one step over all of them,
        and has its part of the noise that is left in the sum of all rounds.
        """
        if not (self.dp.correlated or self.plan.cohorts.scheduled):
            return self.in_the_sum
        mixed, rounds = self.plan.correlation, self.plan.simulation.rounds
        return self.in_the_sum / mixed.one_round * mixed.all_rounds / rounds

    def divisors(self, popularity: Popularity | None) -> Divide | None:
        if popularity is None:
            return None
        return partial(popularity.divisors, clip=self.dp.clip, noise=self.in_a_step)

    # --- said -------------------------------------------------------------------------------------

    @cached_property
    def exact(self) -> tuple[str, ...]:
        return self.setting.sight.exact

    @cached_property
    def opens_exactly(self) -> bool:
        return bool(self.exact)

    @cached_property
    def covers_rows(self) -> bool:
        return self.unit.whole_client and not self.exact

    def warning(self, people: int) -> str:
        return delta_flaw(self.dp.delta, people)

    def covers(self, figure: Figure) -> bool:
        return {
            Figure.PUBLIC: True,
            Figure.METRIC: self.noisy_metrics,
            Figure.COHORT: self.setting.coins is not Coins.LEADER,
            Figure.ROWS: WHICH_ROWS.isdisjoint(self.exact),
            Figure.EXACT: False,
        }[figure]


def sight(entry: SchemeEntry, *more: str, all_rows: bool = False) -> Visibility:
    """What the observers of a scheme see; `more` is released exactly beside what it always is.

    `all_rows`: every row of a table opens, written or not.
    """
    if not entry.federated:
        raise ConfigError(
            f"scheme {entry.name}: there are no rounds, and nobody to add noise for",
            hint="name a federated scheme",
        )
    helper = (Observer.HELPER,) if entry.two_servers else ()
    return Visibility(
        observers=(Observer.LEADER, *helper, Observer.CLIENTS, Observer.READERS),
        one_by_one=frozenset({Observer.LEADER} if entry.federated and not entry.hides else ()),
        roster=entry.masks,
        exact=(*(() if all_rows else entry.rows.exact), *more),
    )
