"""Noise: who adds it to what, what clients are charged for it, and what is left afterwards.

`noise_of` turns a plan into one object, and everybody asks that: what a client clips and trains,
which noise it adds to what it sends, what a server adds to a sum, what a ledger is charged before a
round, and what may be said of it. Each kind of noise is a class; `Noise` itself is none at all, and
answers so that nobody has to ask whether there is any.

Where noise is integers on the sum, a client's vector is clipped, rounded and within a bound
(`clipped_vector.py`). A trusted server adds noise to every word of the opened sum in the ring,
before the sum is centred: what is centred, judged and merged, and what clients are told of it,
follows from noisy words alone. Noise on a centred sum would not do: a lying client can put the
others at the wrap of the ring, where one integer more or less changes the sum by 2^b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.group import Words
from tessera.crypto.noise import DEVIATION, DISTANCE, Gaussian, dense_noise, row_noise
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.ids import SERVER, ClientId, Party, RoundId
from tessera.learning.averaging import Divide, TableMean
from tessera.learning.compression import Quantizer, signed
from tessera.learning.popularity import Popularity
from tessera.learning.tables.arrays import Ids
from tessera.learning.tables.submodel import ModelUpdate
from tessera.plan import DPPlan, Metrics, NoiseFrom, NoisyRows, Plan, Sharing
from tessera.plan.dp import GIVEN_UP, LONGER
from tessera.plan.noisy_vector import NoisyVector
from tessera.privacy.dp.accounting import epsilon as epsilon_of
from tessera.privacy.dp.events import (
    THE_METRICS,
    THE_SETUP_SUM,
    THE_SHARING,
    THE_UNION,
    WHICH_ROWS,
    Bounds,
    ExactRelease,
    NoisySum,
)
from tessera.privacy.dp.guarantee import Adjacency, Guarantee, Observer, Unit, json_number
from tessera.privacy.dp.ledger import Ledger, Limit
from tessera.privacy.dp.mechanism import NoAccount
from tessera.privacy.dp.noise_setting import (
    MARKS_MOVE,
    MOST_MOVE,
    Coins,
    NoiseSetting,
    Sampling,
    SummedVector,
    Visibility,
    row_moves,
)
from tessera.privacy.dp.subjects import Printed, PrintedNoise
from tessera.protocols.secagg.phases import StageSum
from tessera.rounds import schemes
from tessera.rounds.clipped_vector import (
    ClippedBounds,
    SumBounds,
    add_noise,
    clipped_update,
    noise_stream,
    noisy_update,
    within_bound,
)
from tessera.rounds.schemes import SchemeEntry

if TYPE_CHECKING:
    from tessera.rounds.words import RoundResult

Values = npt.NDArray[np.float64]

SIZES: Final = (1, 2, 4, 8)
"""Records of one person in a batch, for which the noise of a paper's algorithm is shown."""


class Figure(Enum):
    """What a figure of a run follows from (`charged.py`)."""

    PUBLIC = auto()
    """From the plan, the list of clients and who of them answered, or the account itself."""
    METRIC = auto()
    """From held-out examples: charged where the sums that it is of have noise."""
    COHORT = auto()
    """From who was drawn: public, but where the account relies on its being secret."""
    ROWS = auto()
    """From which rows clients hold: public where none shows in what a client sends."""
    EXACT = auto()
    """From anything else of somebody's data."""


def noise_of(plan: Plan) -> Noise:
    """The noise of a plan, made once."""
    known: Noise | None = vars(plan).get("_noise")
    if known is None:
        known = vars(plan)["_noise"] = _made(plan)
    return known


def _made(plan: Plan) -> Noise:
    if plan.dp is None:
        return Noise(plan)
    if plan.dp.printed is not Printed.NONE:
        return PaperNoise(plan)
    return KINDS[plan.dp.trust](plan)


class Noise:
    """The noise of a plan. This one is none: nothing is clipped, added, or charged for."""

    by: str = ""
    """Who adds it, as it is printed."""
    honest: str = ""
    """Who has to be honest for it, as it is printed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def dp(self) -> DPPlan:
        """The section; asked for only where there is one."""
        raise MisuseError("a plan without [dp] has no noise")

    @property
    def setting(self) -> NoiseSetting:
        """The account of one client; asked for only where there is one."""
        return self.setting_with(setup=False)

    def setting_with(self, *, setup: bool) -> NoiseSetting:
        """The same; `setup`: for a task with a set-up sum."""
        raise MisuseError("a plan without [dp] has no noise")

    @property
    def in_the_sum(self) -> float:
        """Deviation of all noise on a round's sum, over the clip; an expectation, not a promise."""
        return 0.0

    # --- what a client clips, trains and sends ----------------------------------------------------

    @property
    def vector(self) -> NoisyVector | None:
        """The integers that a client sends as one vector, where their sum has integer noise."""
        return None

    def trained_rows(self, own: Mapping[str, Ids], sent: Mapping[str, Ids]) -> Mapping[str, Ids]:
        """Of a model that everybody is `sent`, the rows that a client with these trains."""
        return own

    def contribution(self, update: ModelUpdate, coins: Secret) -> ModelUpdate:
        """What leaves a client, before it is encoded; its own noise follows from its coins."""
        return update

    def share_stream(self, root: Entropy, round_id: RoundId, client: Party) -> Stream | None:
        """What a client's share of the noise follows from, where clients add shares."""
        return None

    # --- what is summed ---------------------------------------------------------------------------

    def cut(self) -> Callable[[Sequence[Words]], list[Words]] | None:
        """What cuts one client's words to what an honest client may send, where they are seen."""
        return None

    def on_sum(self, total: StageSum, secret: Secret, round_id: RoundId) -> StageSum:
        """An opened sum with what the server adds to it."""
        return total

    @property
    def server_deviation(self) -> float:
        """Of the noise that each of two servers adds to every word of its share; 0: none."""
        return 0.0

    def sum_bounds(self, clients: int) -> SumBounds:
        """What honest clients can have summed to."""
        plan = self.plan
        return SumBounds(clients=clients, top=plan.quantizer.top, max_count=plan.update.max_count)

    def decoded(self, quantizer: Quantizer, words: Words) -> Values:
        """Sums of values, as real numbers."""
        return quantizer.decode(words, self.plan.ring)

    def on_means(
        self,
        result: RoundResult,
        entropy: Entropy,
        round_id: RoundId,
        largest: Mapping[ClientId, int] | None = None,
    ) -> RoundResult:
        """The means of a round with noise that is added to them; `largest` is for `PaperNoise`."""
        return result

    def divisors(self, popularity: Popularity | None) -> Divide | None:
        """What sums of rows are divided by, where rows were selected by their popularity."""
        return None

    # --- what is charged, and what is left --------------------------------------------------------

    @property
    def bounds(self) -> Bounds:
        """How many rows, records and clients one unit can have, as the plan states it."""
        return Bounds()

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The plan's budget against everybody from whom its noise protects."""
        return ()

    def bare(self, *released: str) -> tuple[str, ...]:
        """Those of these releases that are a client's to charge for, as nothing has noise."""
        return released

    def events(self, round_id: RoundId) -> tuple[NoisySum, ...]:
        """What a client is charged for the noisy releases of a round, and of the test after it."""
        return ()

    def setup_events(self) -> tuple[NoisySum | ExactRelease, ...]:
        """What a client is charged for its part of the set-up sum, before it leaves."""
        return ()

    def selection_events(self) -> tuple[NoisySum, ...]:
        """What a client is charged for its marks, before the first round."""
        return ()

    def charge(self, ledger: Ledger, round_id: RoundId) -> None:
        """Charge for a round's noisy releases and for what is exact beside them.

        `BudgetExceeded` if the plan's budget does not cover it, or this client's own does not.
        """

    def charge_absent(self, ledger: Ledger, round_id: RoundId) -> None:
        """Charge for a round that this client was not drawn for, where that is a secret."""

    def charge_before(self, ledger: Ledger, events: Iterable[NoisySum | ExactRelease]) -> None:
        """Charge for what leaves a client before the first round."""
        for event in events:
            reason = f"before the first round: {event.what}"
            ledger.spend(event, reason=reason, limits=self.limits)

    def affords(self, ledger: Ledger, round_id: RoundId) -> bool:
        """Whether the budget covers one more round."""
        return True

    def refusal(self, round_id: RoundId, ledgers: Callable[[], Iterable[Ledger]]) -> str:
        """Why this round cannot be, as its noise would pass a client's budget; "" if it can."""
        return ""

    def guarantee(self, ledger: Ledger) -> Guarantee | None:
        """The worst of what is left after all that a ledger has, against those it protects from."""
        return None

    @property
    def lasts(self) -> int | None:
        """How many rounds with one client its budget lasts; None: there is no budget."""
        return None

    def calibrated(self) -> Plan:
        """The plan with its noise: the least that keeps the budget, where none is given."""
        return self.plan

    # --- statistics -------------------------------------------------------------------------------

    @property
    def setup_noise(self) -> float:
        """Standard deviation of the noise on the set-up sum, over a client's part; 0: none."""
        return 0.0

    @property
    def selection_noise(self) -> float:
        """Standard deviation of the noise on the popularity of rows, over the length of marks."""
        return 0.0

    @property
    def metrics_noise(self) -> float:
        """Standard deviation of the noise on the statistics of a test, over a client's part."""
        return 0.0

    @property
    def noisy_metrics(self) -> bool:
        """Whether tests are sums of clients' statistics, with noise."""
        return False

    def may_test(self, round_id: RoundId) -> bool:
        """Whether clients were charged for a test after this round, or need not be."""
        return True

    # --- what is said of it -----------------------------------------------------------------------

    @property
    def only_simulated(self) -> str:
        """Why services do not carry it; "" if they do."""
        return ""

    @property
    def opens_exactly(self) -> bool:
        """Whether a round releases anything of its clients without noise."""
        return True

    @property
    def exact(self) -> tuple[str, ...]:
        """What a round releases without noise beside what has some."""
        return ()

    @property
    def covers_rows(self) -> bool:
        """Whether which rows a client holds is inside the number per user."""
        return False

    def covers(self, figure: Figure) -> bool:
        """Whether such a figure may be passed on: charged, or public."""
        return True

    @property
    def follows_from_rounds(self) -> bool:
        """Whether noise beside that of the rounds is sized by their number."""
        return False

    @property
    def paper(self) -> PrintedNoise:
        """The noise of a paper's algorithm; asked for only where there is one."""
        raise MisuseError("a plan without a paper's algorithm has none of its noise")

    def paper_facts(self) -> dict[str, Any] | None:
        """A paper's algorithm beside what holds, as plain values."""
        return None


class AddedNoise(Noise):
    """Of a plan with [dp]: a budget per unit, for which somebody adds noise to what is clipped."""

    opens_all: bool = False
    """Whether every row of a table opens, written or not."""

    @property
    def dp(self) -> DPPlan:
        assert self.plan.dp is not None
        return self.plan.dp

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
        rate, coins = dp.sampling, Coins.CLIENT if dp.by_batches else Coins.PUBLIC
        if plan.drawn_in_secret:
            rate, coins = dp.participation, Coins.LEADER
        return NoiseSetting(
            unit=dp.protects,
            noise=self.multiplier,
            printed=self.claim,
            trust=dp.trust.trust,
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
            fails=GIVEN_UP + LONGER if rate < 1.0 and plan.drawn_in_secret else 0.0,
            sources=self.sources,
            vector=self.summed_vector,
            sight=sight(schemes.of(plan), *self._released(setup=setup), all_rows=self.opens_all),
        )

    @property
    def multiplier(self) -> float:
        """Deviation of the noise that counts, over the clip; 1 where it is not known yet."""
        return self.dp.noise or 1.0

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
        """Unit index: how far one row moves what a client sends, in clips; else 0.

        Two gradients of each example that changes with it, or two clipped vectors if that is less.
        """
        dp = self.dp
        if dp.protects is not Unit.INDEX:
            return 0.0
        return row_moves(dp.per_row, dp.example_clip, clip=dp.clip)

    def _released(self, *, setup: bool) -> tuple[str, ...]:
        """What this plan releases exactly beside its scheme; `setup`: its task has a set-up sum."""
        plan = self.plan
        found = [THE_UNION] if plan.narrows else []
        if setup and not self.dp.setup:
            found.append(THE_SETUP_SUM)
        if plan.security.sharing is Sharing.AUTO:
            found.append(THE_SHARING)
        if plan.simulation.metrics is Metrics.FEDERATED and not self.noisy_metrics:
            found.append(THE_METRICS)
        return tuple(found)

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
        return math.sqrt(rest * times / (share * self.plan.simulation.rounds))

    @property
    def _selection_ratio(self) -> float:
        """A row moves a client's marks by another length than its update."""
        moved = MARKS_MOVE / self.row_moves if self.dp.protects is Unit.INDEX else 1.0
        return moved * self._ratio(self._selection_share)

    @property
    def setup_noise(self) -> float:
        return self.dp.noise * self.setting.setup

    @property
    def metrics_noise(self) -> float:
        return self.dp.noise * self.setting.metrics

    @property
    def selection_noise(self) -> float:
        return self.dp.noise * self.setting.selection

    @property
    def follows_from_rounds(self) -> bool:
        return self._shares > 0.0

    # --- charged ----------------------------------------------------------------------------------

    @cached_property
    def bounds(self) -> Bounds:
        dp, rows = self.dp, self.plan.union.max_rows * len(self.plan.roots)
        return Bounds(
            rows_per_example=rows,
            rows_per_client=rows,
            records_per_subject=dp.records_per_subject,
            clients_per_subject=dp.clients_per_subject if dp.protects is Unit.SUBJECT else 0,
        )

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        dp = self.dp
        return self.setting.limits(epsilon=dp.epsilon, delta=dp.delta) if dp.epsilon else ()

    def bare(self, *released: str) -> tuple[str, ...]:
        return ()

    def events(self, round_id: RoundId) -> tuple[NoisySum, ...]:
        found = [*self.setting.events(federation=self.plan.federation, round_id=round_id)]
        if self.noisy_metrics and self._tested_in(round_id):
            found += self.setting.metrics_events(
                self._sums_of_a_test, federation=self.plan.federation, round_id=round_id
            )
        return tuple(found)

    def setup_events(self) -> tuple[NoisySum | ExactRelease, ...]:
        federation = self.plan.federation
        if self.dp.setup:
            return tuple(self.setting.setup_events(federation=federation))
        return (ExactRelease(federation=federation, round_id=RoundId(0), what=THE_SETUP_SUM),)

    def selection_events(self) -> tuple[NoisySum, ...]:
        return tuple(self.setting.selection_events(federation=self.plan.federation))

    def charge(self, ledger: Ledger, round_id: RoundId) -> None:
        self._bound(ledger)
        plan = self.plan
        known = (THE_UNION,) if plan.has_union and not schemes.of(plan).two_servers else ()
        for what in self.exact:
            if what not in known:
                exact = ExactRelease(federation=plan.federation, round_id=round_id, what=what)
                ledger.spend(exact, reason=f"round {round_id}: {what}")
        for event in self.events(round_id):
            ledger.spend(event, reason=f"round {round_id}: {event.what}", limits=self.limits)

    def charge_absent(self, ledger: Ledger, round_id: RoundId) -> None:
        if not self.plan.drawn_in_secret:
            return
        self._bound(ledger)
        federation = self.plan.federation
        for event in self.setting.absent_events(federation=federation, round_id=round_id):
            ledger.spend(event, reason=f"round {round_id}: not drawn", limits=self.limits)

    def charge_before(self, ledger: Ledger, events: Iterable[NoisySum | ExactRelease]) -> None:
        self._bound(ledger)
        super().charge_before(ledger, events)

    def _bound(self, ledger: Ledger) -> None:
        if ledger.bounds == Bounds():
            ledger.bounds = self.bounds

    def affords(self, ledger: Ledger, round_id: RoundId) -> bool:
        return ledger.affords(self.events(round_id), self.limits)

    def refusal(self, round_id: RoundId, ledgers: Callable[[], Iterable[Ledger]]) -> str:
        dp = self.dp
        spent = f"the budget of epsilon {dp.epsilon:g} per {dp.unit} is spent: a client has had"
        if self.plan.drawn_in_secret:  # when it ends is not to follow from who was drawn
            over = self.lasts is not None and int(round_id) >= self.lasts
            return f"{spent} up to {self.lasts} rounds" if over else ""
        if all(self.affords(ledger, round_id) for ledger in ledgers()):
            return ""
        return f"{spent} {self.lasts} rounds"

    # --- left -------------------------------------------------------------------------------------

    def guarantee(self, ledger: Ledger) -> Guarantee | None:
        dp = self.dp
        return max(
            (
                ledger.guarantee(unit=dp.protects, against=observer, delta=dp.delta)
                for observer in self.setting.protected()
            ),
            key=lambda g: g.epsilon,
        )

    @cached_property
    def lasts(self) -> int | None:
        dp = self.dp
        if not dp.epsilon:
            return None
        return self.setting.rounds(epsilon=dp.epsilon, delta=dp.delta)

    def calibrated(self) -> Plan:
        """The plan with its noise: the least that keeps the budget, where none is given.

        For all rounds, each of them with the same client: cohorts are drawn publicly, so that
        nothing is gained by being in few of them that could be promised beforehand. A cohort that
        is drawn in secret is a gain against those who do not know it, where the noise is not for
        anybody else.
        """
        plan, dp = self.plan, self.dp
        if not dp.noise:
            least = self.setting.least_noise(
                epsilon=dp.epsilon, delta=dp.delta, rounds=plan.simulation.rounds
            )
            plan = replace(plan, dp=replace(dp, noise=least))
        if noise_of(plan).lasts == 0:
            raise ConfigError(
                f"[dp] noise = {dp.noise:g} passes epsilon = {dp.epsilon:g} in the first round",
                hint="leave noise out: the least that keeps the budget is computed",
            )
        return plan

    # --- tests ------------------------------------------------------------------------------------

    @property
    def noisy_metrics(self) -> bool:
        federated = self.plan.simulation.metrics is Metrics.FEDERATED
        return self.dp.protects is Unit.USER and federated

    def may_test(self, round_id: RoundId) -> bool:
        return not self.noisy_metrics or self._tested_in(round_id)

    def _tested_in(self, round_id: RoundId) -> bool:
        """Whether the plan has the model tested after this round: it does not follow from data."""
        past, simulation = int(round_id) + 1, self.plan.simulation
        return past % simulation.evaluate_every == 0 or past == simulation.rounds

    @property
    def _sums_of_a_test(self) -> int:
        """Over the test parts and, where training stops by them, over the validation parts."""
        return 2 if self.plan.simulation.patience else 1

    @property
    def _tests(self) -> int:
        """How many sums of statistics the tests of all rounds are."""
        simulation = self.plan.simulation
        return self._sums_of_a_test * -(-simulation.rounds // simulation.evaluate_every)

    # --- rows -------------------------------------------------------------------------------------

    @property
    def selects_rows(self) -> bool:
        """Whether rows are selected by their popularity before the first round."""
        return self.dp.rows is NoisyRows.SELECTED

    @property
    def in_the_sum(self) -> float:
        return self.dp.noise

    def divisors(self, popularity: Popularity | None) -> Divide | None:
        if popularity is None:
            return None
        return partial(popularity.divisors, clip=self.dp.clip, noise=self.in_the_sum)

    # --- said -------------------------------------------------------------------------------------

    @property
    def only_simulated(self) -> str:
        if not self.selects_rows:
            return ""
        return (
            '[dp] rows = "selected" needs a sum before the first round, which is not part of a '
            "deployment yet"
        )

    @property
    def exact(self) -> tuple[str, ...]:
        return self.setting.sight.exact

    @property
    def opens_exactly(self) -> bool:
        return bool(self.exact)

    @property
    def covers_rows(self) -> bool:
        return self.dp.protects is Unit.USER and not self.exact

    def covers(self, figure: Figure) -> bool:
        return {
            Figure.PUBLIC: True,
            Figure.METRIC: self.noisy_metrics,
            Figure.COHORT: not self.plan.drawn_in_secret,
            Figure.ROWS: WHICH_ROWS.isdisjoint(self.exact),
            Figure.EXACT: False,
        }[figure]


# --- kinds ----------------------------------------------------------------------------------------


class ClientNoise(AddedNoise):
    """Every client adds all of it, to its own steps or to its own update."""

    by, honest = "every client", "nobody"

    def trained_rows(self, own: Mapping[str, Ids], sent: Mapping[str, Ids]) -> Mapping[str, Ids]:
        return sent  # every row has noise: those that had none would show which are its own

    def contribution(self, update: ModelUpdate, coins: Secret) -> ModelUpdate:
        """At user level an update is clipped as a whole; else noise is in its steps already."""
        dp = self.dp
        if dp.by_batches:
            return update
        clipped = clipped_update(update, dp.clip)
        return noisy_update(clipped, dp.clip, dp.noise, coins.derive(Label.CLIENT_NOISE))

    @property
    def in_the_sum(self) -> float:
        return self.dp.noise * math.sqrt(self.plan.cohort)


class NoiseOnSums(AddedNoise):
    """Integers on the sum of clipped vectors of integers."""

    @property
    def vector(self) -> NoisyVector:
        assert self.plan.noisy_vector is not None
        return self.plan.noisy_vector

    def trained_rows(self, own: Mapping[str, Ids], sent: Mapping[str, Ids]) -> Mapping[str, Ids]:
        """Those that everybody is sent; none of a table where nothing is said of it."""
        none = np.zeros(0, dtype=np.uint64)
        return {
            name: np.intersect1d(own.get(name, none), ids, assume_unique=True)
            for name, ids in sent.items()
        }

    def cut(self) -> Callable[[Sequence[Words]], list[Words]] | None:
        return partial(within_bound, self.vector.bound, self.plan.ring)

    def sum_bounds(self, clients: int) -> SumBounds:
        vector = self.vector
        return ClippedBounds(
            clients=clients, top=vector.top, max_count=self.plan.update.max_count, vector=vector
        )

    def decoded(self, quantizer: Quantizer, words: Words) -> Values:
        """One scale for all, as they were clipped as one vector."""
        return signed(words, self.plan.ring).astype(np.float64) / self.vector.scale

    @property
    def sources(self) -> int:
        return self.vector.sources

    @property
    def summed_vector(self) -> SummedVector:
        vector = self.vector
        return SummedVector(words=vector.words, bound=vector.bound, honest=self.assumed)

    @property
    def assumed(self) -> str:
        """Who has to be honest beyond whom the plan trusts with the sum."""
        return ""

    @property
    def row_moves(self) -> float:
        """What is rounded again until it is short enough may move by two integers more in every
        word, whatever the coins are."""
        moved = super().row_moves
        if not moved:
            return 0.0
        integers = moved * self.vector.top + 2.0 * math.sqrt(self.vector.words)
        return min(MOST_MOVE, integers / self.vector.bound)


class ServerNoise(NoiseOnSums):
    """A trusted server adds it to the sum that it has opened, before it looks at it."""

    by, honest = "the server", "the server"

    def on_sum(self, total: StageSum, secret: Secret, round_id: RoundId) -> StageSum:
        def noisy(words: Words, part: str) -> Words:
            stream = noise_stream(secret, round_id, SERVER, part)
            return add_noise(self.plan.ring, self.vector.deviation, words, stream)

        tables = {
            table: replace(part, words=noisy(part.words, f"table {int(table)}"))
            for table, part in total.tables.items()
        }
        return replace(total, dense=noisy(total.dense, "dense"), tables=tables)


class ShareNoise(NoiseOnSums):
    """Every client adds a share of it, before its masks: enough of them have to be honest."""

    by, honest = "clients in shares", "a number of clients"
    opens_all = True

    def share_stream(self, root: Entropy, round_id: RoundId, client: Party) -> Stream | None:
        return noise_stream(root.secret(Label.SUM_NOISE), round_id, client, "whole")

    @property
    def assumed(self) -> str:
        return (
            f"if {self.sources} of the survivors add their noise and tell it nobody, and the "
            "secure sum's threshold holds"
        )

    @property
    def in_the_sum(self) -> float:
        counted = max(1, self.plan.least_survivors - self.plan.corrupt_shares)
        return self.dp.noise * math.sqrt(self.plan.cohort / counted)


class EachServerNoise(NoiseOnSums):
    """Each of two servers adds the whole of it, to its share: one of them has to be honest."""

    by, honest = "each server", "one of two servers"
    opens_all = True

    @property
    def server_deviation(self) -> float:
        return self.vector.deviation

    @property
    def assumed(self) -> str:
        return "if one of the two servers adds its noise and does not collude"

    @property
    def in_the_sum(self) -> float:
        return self.dp.noise * math.sqrt(2.0)


class PaperNoise(AddedNoise):
    """An algorithm of Marathe and Kanani 2022 verbatim, `CentralSubDP` or `LocalSubDP`.

    Neither has an account: noise goes by the batch (`privacy/dp/subjects.py`). The claim stands
    wherever a number would, and is named as printed.
    """

    @property
    def by(self) -> str:  # type: ignore[override]
        return KINDS[self.dp.trust].by

    @property
    def central(self) -> bool:
        return self.dp.printed is Printed.CENTRAL

    @cached_property
    def paper(self) -> PrintedNoise:
        """sigma_Z of a paper's algorithm over all rounds of this plan (section 3.1 and 3.2).

        Mini-batches are those of all clients of all rounds where the server adds the noise (sR),
        and a client's own otherwise (TR).
        """
        dp, plan = self.dp, self.plan
        each = plan.cohort if self.central else dp.steps
        return PrintedNoise(dp.epsilon, dp.delta, dp.sampling, each * plan.simulation.rounds)

    @property
    def multiplier(self) -> float:
        return self.paper.sigma(1)

    @property
    def only_simulated(self) -> str:
        if not self.central:
            return super().only_simulated
        return "CentralSubDP has clients send Z beside their gradients, which services do not carry"

    @property
    def claim(self) -> str:
        return (
            f"with {self.dp.printed.value}, whose epsilon {self.dp.epsilon:g} is as printed by the "
            "paper and does not hold"
        )

    @cached_property
    def lasts(self) -> int | None:
        return None

    def calibrated(self) -> Plan:
        self.paper.sigma(1)  # that there is such noise
        return self.plan

    def trained_rows(self, own: Mapping[str, Ids], sent: Mapping[str, Ids]) -> Mapping[str, Ids]:
        return sent

    def on_means(
        self,
        result: RoundResult,
        entropy: Entropy,
        round_id: RoundId,
        largest: Mapping[ClientId, int] | None = None,
    ) -> RoundResult:
        """Line 17 of `CentralSubDP`: noise of sigma_Z C on every client's mean gradient.

        `largest` has what clients say beside their gradients: the most examples of one person in a
        batch. What is summed are steps: means times the rate of the round, for rows times that of
        tables.
        """
        if not self.central:
            return result
        said = largest or {}
        missing = [client for client in result.survivors if client not in said]
        if missing:
            raise MisuseError(f"CentralSubDP: client {missing[0]} has not said its Z")
        plan, paper = self.plan, self.paper
        assert plan.training is not None
        secret = entropy.secret(Label.SERVER_NOISE, plan.federation, int(round_id))
        parts = sum(paper.units(said[client]) for client in result.survivors)
        step = plan.training.rate_in(int(round_id)) * self.dp.clip * paper.unit / DEVIATION

        def drawn(source: Gaussian, shape: tuple[int, int]) -> Values:
            steps = np.full(shape[0], parts, np.int64)
            return source.owed(steps, shape[1]).astype(np.float64) * step

        tables = {}
        for name, part in result.tables.items():
            rows = drawn(row_noise(secret, name), part.mean.shape) * plan.training.table_rate
            tables[name] = TableMean(
                part.ids, part.mean + rows / np.maximum(part.counts, 1)[:, None], part.counts
            )
        dense = drawn(dense_noise(secret), (result.dense.size, 1))[:, 0] / max(result.weight, 1)
        return replace(result, dense=result.dense + dense, tables=tables)

    def paper_facts(self) -> dict[str, Any] | None:
        dp, kept = self.dp, self._person()
        why = "the length of its noise shows how many records of one person a batch has"
        if self.central:
            why += ", and the server sees every client's gradient without noise"
        return {
            "algorithm": dp.printed.label,
            "epsilon_as_printed": dp.epsilon,
            "epsilon": json_number(math.inf),
            "why": why,
            "noise_by_most_of_a_person": {size: self.paper.sigma(size) for size in SIZES},
            "records": dp.records_per_subject or None,
            "epsilon_one_record_in_a_batch": None if kept is None else json_number(kept),
        }

    def _person(self) -> float | None:
        """The epsilon of a person with as many records as the plan states, one of them in a batch.

        As if nobody could tell a batch's Z from the length of its noise; None if none are stated.
        """
        dp, plan = self.dp, self.plan
        if not dp.records_per_subject:
            return None
        assert plan.training is not None
        batch = plan.training.batch if self.central else 1
        one = self.paper.one_in_a_batch(records=dp.records_per_subject, batch=batch)
        times = plan.simulation.rounds * dp.steps * dp.clients_per_subject
        return epsilon_of([(one, times)], adjacency=Adjacency.ADD_OR_REMOVE, delta=dp.delta)


KINDS: Final[dict[NoiseFrom, type[AddedNoise]]] = {
    NoiseFrom.LOCAL: ClientNoise,
    NoiseFrom.SHARES: ShareNoise,
    NoiseFrom.SERVER: ServerNoise,
    NoiseFrom.EACH: EachServerNoise,
}


# --- what is said beside a number -----------------------------------------------------------------


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


def composed(runs: Sequence[tuple[Plan, int]]) -> Guarantee:
    """What several runs over the same people leave together, each after so many rounds.

    The worst against those whom the noise of every run is for, for a client that was in all rounds;
    `NoAccount` where the runs protect different units or nobody in common. Choosing among the runs
    by exact figures is not in it.
    """
    noises = [noise_of(plan) for plan, _ in runs]
    ledger = Ledger(bounds=noises[0].bounds)
    for at, (noise, (_, rounds)) in enumerate(zip(noises, runs, strict=True)):
        for entry in noise.setting.ledger(rounds).entries:
            event = replace(entry.event, federation=f"run {at}")  # each draws noise of its own
            ledger.spend(event, reason=entry.reason)
    observers = [noise.setting.protected() for noise in noises]
    alike = [o for o in observers[0] if all(o in others for others in observers)]
    units = {noise.dp.protects for noise in noises}
    if not alike or len(units) > 1:
        raise NoAccount("the runs protect different units, or against different observers")
    delta = max(noise.dp.delta for noise in noises)
    return max(
        (ledger.guarantee(unit=noises[0].dp.protects, against=o, delta=delta) for o in alike),
        key=lambda found: found.epsilon,
    )


def paper_notes(facts: Mapping[str, Any] | None) -> list[str]:
    """`paper_facts` in sentences."""
    if facts is None:
        return []
    sigmas = facts["noise_by_most_of_a_person"]
    found = [
        f"{facts['algorithm']} by the paper: epsilon {facts['epsilon_as_printed']:g}, at noise of "
        f"{' / '.join(f'{sigma:.3g}' for sigma in sigmas.values())} for "
        f"{' / '.join(map(str, sigmas))} records of one person in a batch",
        f"what holds: no finite epsilon, as {facts['why']}",
    ]
    if facts["records"]:
        found.append(
            f"and if nobody could tell: a person with {facts['records']} records, of which a batch "
            f"has one at most, has epsilon {float(facts['epsilon_one_record_in_a_batch']):.3g}"
        )
    return found


def delta_warning(delta: float, people: int) -> str:
    """The rule that a delta breaks, if it does; `people` 0: unknown."""
    if not people or delta < 1.0 / people:
        return ""
    return (
        f"delta {delta:g} is not below one over {people:,} people: publishing one person's data "
        "outright would keep it"
    )
