"""Noise setting: what a plan would say about noise, and the events that follow from it.

One record holds unit, noise, sampling and trust, and what the observers of a scheme get to see.
From it come the events of the ledger, one view per observer: whose coins are secret to whom decides
who is charged for a sample and who for every participation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from tessera.crypto.correlated import GRID
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.privacy.dp.accounting import noise_for, rounds_within
from tessera.privacy.dp.correlation import Correlation
from tessera.privacy.dp.events import (
    THE_METRICS,
    THE_POPULARITY,
    THE_SETUP_SUM,
    Bounds,
    ExactRelease,
    NoisySum,
    seen,
)
from tessera.privacy.dp.guarantee import Adjacency, Observer, Trust, Unit
from tessera.privacy.dp.ledger import Ledger, Limit
from tessera.privacy.dp.mechanism import (
    LEAST_ROUNDED,
    FixedSizeNoise,
    GaussianNoise,
    GaussianShares,
    Mechanism,
    NoAccount,
    Parts,
    Unseen,
    check_noise,
    check_rate,
)

NO_ROUND: Final = RoundId(0)
"""Of a forecast, which charges all rounds at once."""
MARKS_MOVE: Final = math.sqrt(2.0)
"""How far a client's marks move if a row is taken out of its examples, and with it what else only
these examples hold: both vectors of marks have a norm of at most 1, and no negative entry."""
MOST_MOVE: Final = 2.0
"""How far one client's clipped vector can move at all, in clips."""
LEAST_SHARE: Final = 8.0
"""A share of noise on a statistic has a deviation of so many integers at least: then a sum of them
is a discrete Gaussian but for 1e-200, however many words and shares there are."""
MOST_WORDS: Final = 2**40
MOST_DISTANCE: Final = 1e-14
"""Of a server's noise from a rounded Gaussian, over all words: at epsilon 10 less than 1e-9 of
delta."""


class Sampling(StrEnum):
    """How a batch is drawn, or a cohort."""

    NONE = "none"
    POISSON = "poisson"
    """A coin for each."""
    FIXED_SIZE = "fixed-size"
    """So many, without replacement."""


class Coins(StrEnum):
    """Whose randomness draws: only what an observer does not know amplifies."""

    CLIENT = "client"
    """Each client's own: secret to everybody else."""
    LEADER = "leader"
    """The leader's: secret to readers, and to clients that are not shown the roster."""
    PUBLIC = "public"
    """The plan's seed, which everybody has: secret to nobody."""


class Drawn(StrEnum):
    """What a batch is drawn from at subject level."""

    SUBJECTS = "subjects"
    """A person's records are added and clipped once, however many there are."""
    RECORDS = "records"
    """Each record is clipped; more than the cap of one person are cut and not refilled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """Who observes a scheme, and what of it."""

    observers: tuple[Observer, ...] = (Observer.LEADER, Observer.CLIENTS, Observer.READERS)
    one_by_one: frozenset[Observer] = frozenset()  # see each client's update, and not only sums
    roster: bool = True  # clients are shown who takes part
    exact: tuple[str, ...] = ()  # what is released exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedVector:
    """Integers whose sum has integer noise, of the setting's `sources` together.

    A client moves it by `bound` in L2. `honest` says who has to be honest, and is not checked;
    nothing where that is who is trusted with the sum.
    """

    words: int
    bound: float
    honest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSetting:
    """Noise on every release of a round, `steps` of them per client."""

    unit: Unit
    noise: float
    trust: Trust = Trust.LOCAL
    steps: int = 1
    sampling: Sampling = Sampling.NONE
    rate: float = 1.0
    coins: Coins = Coins.CLIENT
    drawn: Drawn = Drawn.SUBJECTS
    records: int = 0  # of a person at one client, at most; 0: not stated
    cap: int = 1  # records of a person in a batch, at most
    row_moves: float = 0.0  # unit index: clips that a row taken out of a client moves its vector by
    clipped: bool = True  # a client's vector is at most a clip long, and not only each example's
    clients: int = 1  # that hold a person, at most
    sources: int = 1  # of noise in a sum, at least: honest survivors, where each adds its own
    selection: float = 0.0  # noise on the popularity of rows, over that of a round; 0: none
    setup: float = 0.0  # likewise on the sum before the first round; 0: it has none
    metrics: float = 0.0  # likewise on the statistics of a test; 0: they have none
    tests: int = 0  # sums of statistics, in all rounds
    vector: SummedVector | None = None  # where noise is on the sum, in integers
    distance: float = 0.0  # of the noise of one release from ideal, in total variation
    fails: float = 0.0  # probability that one release has no such account
    printed: str = ""  # a paper's algorithm, whose claim has no account: no number is finite
    sight: Visibility = Visibility()
    correlation: Correlation | None = None  # over a training; None: independent, in every round

    def __post_init__(self) -> None:
        check_noise(self.noise)
        check_rate(self.rate)
        for name in ("steps", "cap", "clients", "sources"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} = {getattr(self, name)} is below 1", hint="use 1 or more"
                )
        for ratio in filter(None, (self.selection, self.setup, self.metrics)):
            check_noise(ratio)
        if (self.setup or self.metrics) and self.unit is not Unit.USER:
            raise ConfigError(
                f"noisy statistics have no account per {self.unit.value}: what a client sends of "
                "them is clipped together",
                hint="use unit user",
            )
        if self.selection and self.unit not in (Unit.USER, Unit.INDEX):
            raise ConfigError(
                f"rows selected with noise have no account per {self.unit.value}: a client's marks "
                "are clipped together",
                hint="use unit user or index, or a public list of rows",
            )
        if self.records < 0:
            raise ConfigError(
                f"records = {self.records} is not a count", hint="use 0 where none is stated"
            )
        if (self.unit is Unit.INDEX) is not (self.row_moves > 0.0):
            raise ConfigError(
                f"noise has no account per {self.unit.value} where a row moves what a client sends "
                f"by {self.row_moves:g} clips",
                hint="an index takes examples per row and a clip of each; other units take neither",
            )
        if self.unit is Unit.INDEX and self.sampling is not Sampling.NONE:
            raise ConfigError(
                "examples of an index that are drawn have no account: a row stands in several",
                hint="leave sampling out: all examples that the cut leaves are used",
            )
        if (self.sampling is Sampling.NONE) is not (self.rate == 1.0):
            raise ConfigError(
                f"sampling {self.sampling.value} at a rate of {self.rate:g}",
                hint="a rate below 1 is that of a sample, and everybody is a rate of 1",
            )
        if self.trust is Trust.SERVER and self.steps > 1:
            raise ConfigError(
                f"a server that adds noise to a sum of {self.steps} local steps protects none of "
                "them: only the last model is summed",
                hint='one step a round, or noise in every step by the client itself ("local")',
            )
        if self.unit is Unit.USER and self.coins is Coins.CLIENT and self.sampling != Sampling.NONE:
            raise ConfigError(
                "a client that draws itself shows by its message that it is in",
                hint="at user level cohorts are drawn by the leader, or publicly",
            )
        if self.by_records and self.sampling is Sampling.FIXED_SIZE:
            raise ConfigError(
                "records of a person in a batch of fixed size have no account",
                hint="draw records by Poisson sampling, or draw subjects",
            )
        if self.by_records and not self.records:
            raise ConfigError(
                "drawing records claims nothing without a bound on a person's records",
                hint="state how many records a person has at one client, or draw subjects",
            )

        if self.correlated and (
            self.vector is None or self.sources > 1 or self.sampling is not Sampling.NONE
        ):
            raise ConfigError(
                "correlated noise has an account where one server adds it to a sum of integers "
                "whose clients are known",
                hint="use trust server or each, without sampling",
            )

    @property
    def correlated(self) -> bool:
        """Whether a training is one release, and not each of its rounds."""
        return self.correlation is not None and self.correlation.correlated

    def releases(self, rounds: int) -> int:
        """How many releases with one client so many rounds have at most."""
        if self.correlation is None or not rounds:
            return rounds
        return 1 if self.correlated else self.correlation.participations(rounds)

    def over_training(self) -> dict[str, float] | None:
        """Noise of a round and of all rounds together, in clips, and that of independent noise
        for the same promise; None where nothing bounds the rounds of a client."""
        over = self.correlation
        if over is None:
            return None
        limits, alone = over.participation, math.sqrt(over.participations() / over.releases)
        return {
            "rounds": limits.rounds,
            "rounds_per_client": over.participations(),
            "separation": limits.separation,
            "terms": over.inverse.draws,
            "sensitivity": over.sensitivity,
            "noise_of_one_round": self.noise * over.one_round,
            "noise_of_all_rounds": self.noise * over.all_rounds,
            "independent_of_one_round": self.noise * alone,
            "independent_of_all_rounds": self.noise * alone * math.sqrt(limits.rounds),
        }

    @property
    def by_records(self) -> bool:
        return self.unit is Unit.SUBJECT and self.drawn is Drawn.RECORDS

    @property
    def adjacency(self) -> Adjacency:
        fixed = self.sampling is Sampling.FIXED_SIZE
        return Adjacency.REPLACE if fixed else self.unit.adjacency

    @property
    def assumption(self) -> str:
        if self.printed:
            return self.printed
        if self.vector is not None:
            return self.vector.honest
        if not self.by_records:
            return ""
        return f"if a person has at most {self.records} records at a client"

    @property
    def kept_secret(self) -> str:
        """What has to stay secret for a sample to be one, where the leader draws it."""
        if self.coins is not Coins.LEADER or self.sampling is Sampling.NONE:
            return ""
        return (
            "if the leader tells nobody who was drawn or how many, and no more drop out than the "
            "plan expects"
        )

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units that this noise may have a number for: of an index only if it is for one."""
        return tuple(unit for unit in Unit if unit is not Unit.INDEX or unit is self.unit)

    @property
    def of_client(self) -> float:
        """How far a whole client moves a release over how far one row does; 0: no index."""
        if self.unit is not Unit.INDEX:
            return 0.0
        return 1.0 / self.row_moves if self.clipped else math.inf

    @property
    def bounds(self) -> Bounds:
        return Bounds(records_per_subject=self.records, clients_per_subject=self.clients)

    def secret_to(self, observer: Observer) -> bool:
        """Whether this observer does not know who was drawn."""
        if self.coins is Coins.LEADER:
            return observer is Observer.READERS or (
                observer is Observer.CLIENTS and not self.sight.roster
            )
        return self.coins is Coins.CLIENT

    def trusted(self, observer: Observer) -> bool:
        """Whether this observer gets to see the sum before the noise."""
        servers = (Observer.LEADER, Observer.HELPER)
        return self.trust is Trust.SERVER and observer in servers

    def sum_only(self, observer: Observer) -> bool:
        """Whether the account is of the sum alone, and not of each client's releases.

        That takes one step a round and an observer who sees no single update. Where every client
        adds its own noise, both hold, and the sum's is the lower one only if it has the noise of at
        least as many others as clients hold a person.
        """
        if self.trust is Trust.SERVER or self.vector is not None:
            return True
        alone = self.steps == 1 and observer not in self.sight.one_by_one
        return alone and self.sources > 1 and self.sources >= self.clients

    def at_one_client(self, observer: Observer) -> GaussianNoise | FixedSizeNoise:
        """One release by one client."""
        secret = self.secret_to(observer)
        if self.sampling is Sampling.FIXED_SIZE and secret:
            return FixedSizeNoise(self.noise, self.rate, distance=self.distance)
        rate = self.rate if secret else 1.0
        one = GaussianNoise.poisson(self.noise / (self.row_moves or 1.0), rate)
        if self.by_records:
            one = GaussianNoise.records(self.noise, rate, of=self.records, cap=self.cap)
        return replace(one, distance=self.distance, fails=self.fails)

    def in_the_sum(self, observer: Observer) -> GaussianNoise | FixedSizeNoise | GaussianShares:
        """One release of the sum over all clients, those of one person among them.

        A client of which one person's records vanish moves its clipped vector by two bounds.
        """
        if self.correlated:
            return self._training()
        if self.vector is not None:
            deviation = self.noise * self.vector.bound / math.sqrt(self.sources)
            moved = self._moved
            shares = GaussianShares(
                deviation=deviation,
                shares=self.sources,
                moves=moved * self.vector.bound,
                words=self.vector.words,
            )
            sampled = self.sampling is not Sampling.NONE and self.secret_to(observer)
            whole = self.trust is Trust.SERVER and deviation >= LEAST_ROUNDED
            if not (sampled or whole or self._as_rounded(shares)):
                return shares
            noise, distance = shares.rounded
            gaussian = GaussianNoise.poisson(noise, self.rate if sampled else 1.0)
            return replace(gaussian, distance=distance, fails=self.fails)
        one = self.at_one_client(observer)
        noise, distance = self.noise / (self.row_moves or 1.0), self.distance
        if self.trust is not Trust.SERVER:
            noise, distance = noise * math.sqrt(self.sources), distance * self.sources
        if self.unit is Unit.SUBJECT and self.clients > 1:
            one = one.grouped(self.clients)
        return replace(one, noise=noise, distance=distance)

    @property
    def _moved(self) -> float:
        """How far one unit moves a sum of vectors, over the longest of them."""
        return 2.0 * self.clients if self.unit is Unit.SUBJECT else self.row_moves or 1.0

    def _training(self) -> GaussianNoise:
        """All rounds of a training with correlated noise: one Gaussian on what C makes of them.

        `correlation.py` says how far a client moves that, docs/protocols/correlated-noise.md why
        noise on a grid is as good as a continuous one.
        """
        vector, over = self.vector, self.correlation
        assert vector is not None and over is not None
        moves = over.moves(bound=self._moved * vector.bound, words=vector.words, grid=GRID)
        drawn = GaussianShares(
            deviation=self.noise * vector.bound * 2.0**GRID,
            shares=1,
            moves=moves * 2.0**GRID,
            words=vector.words * over.participation.rounds,
        )
        noise, distance = drawn.rounded
        return replace(GaussianNoise(noise), distance=distance)

    def _as_rounded(self, shares: GaussianShares) -> bool:
        """Whether one server's noise is as good as a rounded Gaussian, whose account is tighter."""
        if self.trust is not Trust.EACH or shares.deviation < LEAST_ROUNDED:
            return False
        return shares.rounded[1] < MOST_DISTANCE

    def events(
        self,
        rounds: int = 1,
        *,
        federation: str = "",
        round_id: RoundId = NO_ROUND,
        training: str = "",
    ) -> Iterator[NoisySum]:
        """What a client's ledger is charged for a round, or for several at once.

        Where noise is correlated, that is the whole `training`, whatever the round.
        """
        if self.correlated:
            round_id = NO_ROUND
        if self.printed:
            hidden = {o: Unseen() for o in Observer if o not in self.sight.observers}
            yield self._event("noise as printed", seen(hidden), rounds, federation, round_id)
            return
        single: dict[Observer, Mechanism] = {}
        total: dict[Observer, Mechanism] = {}
        for observer in Observer:
            if observer not in self.sight.observers:
                single[observer] = total[observer] = Unseen()
            elif self.trusted(observer):
                single[observer] = Unseen()  # and the total is bare
            elif self.sum_only(observer):
                single[observer], total[observer] = Unseen(), self.in_the_sum(observer)
            else:
                single[observer], total[observer] = self.at_one_client(observer), Unseen()
        for views, summed in ((single, False), (total, True)):
            if all(isinstance(views.get(o), Unseen) for o in Observer):
                continue
            what = f"noisy {'sums' if summed else 'steps'}"
            event = self._event(what, seen(views), rounds, federation, round_id)
            named = training or federation or "a training" if self.correlated else ""
            yield replace(event, summed=summed, training=named)

    def absent_events(self, *, federation: str, round_id: RoundId) -> Iterator[NoisySum]:
        """What a client is charged for a round that it was not drawn for.

        Whoever does not know that sees a sample, whether it was in or not; others saw nothing.
        Nothing where everybody knows who is drawn.
        """
        if self.coins is not Coins.LEADER:
            return
        for event in self.events(federation=federation, round_id=round_id):
            views = {o: v for o, v in event.seen if self.secret_to(o)}
            hidden = {o: Unseen() for o in Observer if o not in views}
            if any(not isinstance(view, Unseen) for view in views.values()):
                yield replace(event, seen=seen({**views, **hidden}))

    def _event(
        self,
        what: str,
        views: tuple[tuple[Observer, Mechanism], ...],
        rounds: int,
        federation: str,
        round_id: RoundId,
    ) -> NoisySum:
        return NoisySum(
            federation=federation,
            round_id=round_id,
            what=what,
            unit=self.unit,
            adjacency=self.adjacency,
            trust=self.trust,
            seen=views,
            times=self.steps * rounds,
            clients=self.clients if self.unit is Unit.SUBJECT else 1,
            assumption=self.assumption,
            kept_secret=self.kept_secret,
            of_client=self.of_client,
        )

    def setup_events(self, *, federation: str = "") -> Iterator[NoisySum]:
        """What a client is charged for its part of the sum before the first round."""
        return self._statistic(THE_SETUP_SUM, self.setup, 1, federation, NO_ROUND)

    def selection_events(self, *, federation: str = "") -> Iterator[NoisySum]:
        """What a client is charged for its marks, before the first round: it is always in."""
        return self._statistic(THE_POPULARITY, self.selection, 1, federation, NO_ROUND)

    def metrics_events(
        self, tests: int = 1, *, federation: str = "", round_id: RoundId = NO_ROUND
    ) -> Iterator[NoisySum]:
        """What a client is charged for statistics of its held-out examples, in so many sums."""
        return self._statistic(THE_METRICS, self.metrics, tests, federation, round_id)

    def _statistic(
        self, what: str, ratio: float, times: int, federation: str, round_id: RoundId
    ) -> Iterator[NoisySum]:
        """A sum that is no update, of vectors that are clipped and rounded apart from it.

        Its integers are fine (`LEAST_SHARE`), so that only noise over length counts.
        """
        if not (ratio and times):
            return
        noise, vector = self.noise * ratio, self.vector
        if self.trust is Trust.SERVER:
            vector = None  # one source, a thousand integers wide or more: as good as continuous
        if vector is not None:
            bound = LEAST_SHARE * math.sqrt(self.sources) / noise
            vector = replace(vector, words=MOST_WORDS, bound=bound)
        alone = replace(
            self,
            noise=noise,
            selection=0.0,
            setup=0.0,
            metrics=0.0,
            vector=vector,
            sampling=Sampling.NONE,
            rate=1.0,
            row_moves=MARKS_MOVE if self.unit is Unit.INDEX else 0.0,
            clipped=True,
            correlation=None,
        )
        for event in alone.events(times, federation=federation, round_id=round_id):
            yield replace(event, what=what)

    def ledger(self, rounds: int) -> Ledger:
        """A ledger after so many rounds, exact releases included."""
        ledger = Ledger(bounds=self.bounds)
        for what in self.sight.exact:
            release = ExactRelease(federation="", round_id=NO_ROUND, what=what)
            ledger.spend(release, reason=what)
        for event in (
            *self.setup_events(),
            *self.selection_events(),
            *self.metrics_events(self.tests),
        ):
            ledger.spend(event, reason=event.what)
        for event in self.events(self.releases(rounds)) if rounds else ():
            ledger.spend(event, reason=f"{rounds} rounds")
        return ledger

    def limits(self, *, epsilon: float, delta: float) -> tuple[Limit, ...]:
        """This budget against every observer that it protects from, for a ledger.

        A paper's target is no budget: no noise of its would be within it; nor is an epsilon of 0.
        """
        if self.printed or not epsilon:
            return ()
        return tuple(
            Limit(epsilon=epsilon, delta=delta, unit=self.unit, against=observer)
            for observer in self.distinct()
        )

    def protected(self) -> tuple[Observer, ...]:
        """The observers against whom there is a number at all."""
        return tuple(o for o in self.sight.observers if not self.trusted(o))

    def least_noise(self, *, epsilon: float, delta: float, rounds: int) -> float:
        """Noise for this budget against every observer that it protects from."""

        def needed(observer: Observer) -> float:
            return noise_for(
                lambda noise: replace(self, noise=noise).parts(observer, rounds),
                adjacency=self.adjacency,
                epsilon=epsilon,
                delta=delta,
            )

        return max(needed(observer) for observer in self.distinct())

    def rounds(self, *, epsilon: float, delta: float) -> int | None:
        """How many rounds this budget lasts against every observer that it protects from.

        As many as one client can be in; of correlated noise all of a training, or none. None: an
        epsilon of 0 is no budget.
        """
        if not epsilon:
            return None
        times = min(
            rounds_within(
                replace(self, selection=0.0, setup=0.0, metrics=0.0).parts(observer, 1),
                adjacency=self.adjacency,
                epsilon=epsilon,
                delta=delta,
                once=self.parts(observer, 0),
            )
            for observer in self.distinct()
        )
        if self.correlation is not None and self.correlated:
            return self.correlation.participation.rounds if times else 0
        return times

    def parts(self, observer: Observer, rounds: int) -> Parts:
        """What is composed against a protected observer."""
        found = self.ledger(rounds).parts(self.unit, observer)
        if found is None:
            raise NoAccount(f"{observer.value} see sums without noise")
        return found

    def distinct(self) -> list[Observer]:
        """One protected observer for each account that differs."""
        accounts = {self.parts(observer, 1): observer for observer in self.protected()}
        return list(accounts.values())


def row_moves(per_row: int, example_clip: float, *, clip: float = 1.0) -> float:
    """In clips: what changes with a row, two clipped gradients for each of `per_row` examples."""
    if per_row < 1 or not 0.0 < example_clip < math.inf:
        raise ConfigError(
            f"noise per index with {per_row} examples per row, each clipped to {example_clip:g}",
            hint="unit index takes both: examples that may change with a row, and a clip of each",
        )
    return 2.0 * per_row * example_clip / clip


def holders_over_noise(setting: NoiseSetting, *, rows: int, width: int, cohort: int) -> float:
    """How many contributions to a row are as long as its noise, if all point the same way.

    A contribution of length C spread evenly over `rows` rows is C / sqrt(rows) on each; noise on a
    row's `width` values is noise C sqrt(width). Where every client of the cohort adds its own, it
    grows with the root of their number.
    """
    for name, count in (("rows", rows), ("width", width), ("cohort", cohort)):
        if count < 1:
            raise ConfigError(f"{name} = {count} is below 1", hint="use 1 or more")
    sources: float = 1 if setting.trust is Trust.SERVER else cohort
    if setting.vector is not None and setting.trust is not Trust.SERVER:
        # as many as are in a sum, where so many are enough
        both = setting.trust is Trust.EACH
        sources = 2 if both else max(1.0, cohort / setting.sources)
    of_round = 1.0 if setting.correlation is None else setting.correlation.one_round
    return setting.noise * of_round * math.sqrt(rows * width * sources)
