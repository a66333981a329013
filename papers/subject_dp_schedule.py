"""What noise per user costs in cohorts, trained by real plans: a schedule, and correlated noise.

One bias per item over masks that every client fits again at home, as in `subject_dp_trained.py`,
with a tenth of the budget for the popularity of items. Every client is in one round of a pass:
61 rounds of 100 on MovieLens 1M, 9 of 105 on 100K. Beside it cohorts by the plan's seed, a schedule
with independent noise, larger cohorts, everybody in one round, and masks alone: a training whose
server takes no step.

The server's rate is `PACE` over the rounds of a pass: a round is a part of one step, and clients of
later rounds see what earlier ones have done. It was chosen on the validation parts (seed 0). By
seed every round is a step of its own, at a rate of 1, as without a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from papers.cells import Cell, Request, plain
from papers.runs import Cache, Trainings
from papers.subject_dp_shops import DELTA, EPSILONS, NO_NOISE, column, summed
from papers.subject_dp_trained import (
    ALL,
    BEST,
    HARDLY,
    ML_1M,
    ML_100K,
    NO_MODEL,
    WITHOUT,
    NoisyRuns,
    loaded,
)
from tessera.api import Run
from tessera.learning.averaging import ServerStep
from tessera.learning.training.settings import LocalTraining
from tessera.plan import (
    CohortsPlan,
    Crypto,
    DPPlan,
    DrawnBy,
    NoisyRows,
    Plan,
    SimulationPlan,
    Trust,
)
from tessera.plan.places import rounds_of_a_pass
from tessera.privacy.dp.guarantee import Unit
from tessera.rounds import schemes
from tessera.tasks import Task

SETS: Final = (ML_100K, ML_1M)
COHORTS: Final = {ML_100K: 105, ML_1M: 100}
LARGER: Final = {ML_100K: 315, ML_1M: 300}
PACE: Final = {ML_100K: 1.5, ML_1M: 2.0}
AT_ONCE: Final = 1.5
"""Where everybody is in one round."""
NO_STEP: Final = 1e-9
ALONE: Final = "masks alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledLine:
    """One line of a table: who adds the noise, who is in which round, and how noise is drawn."""

    name: str
    trust: Trust = Trust.SERVER
    drawn: DrawnBy = DrawnBy.SCHEDULE
    correlated: bool = True
    cohort: int = 0
    """0: everybody, in one round."""
    epsilons: tuple[float, ...] = (3.0,)
    pace: float

    @property
    def scheduled(self) -> bool:
        return self.drawn is DrawnBy.SCHEDULE

    def plan(self, clients: int, epsilon: float, seed: int) -> Plan:
        cohort = self.cohort or clients
        rounds = rounds_of_a_pass(clients, cohort)
        return Plan(
            scheme=schemes.named("two-server" if self.trust is Trust.EACH else "fedavg").scheme,
            cohort=cohort,
            seed=seed,
            training=LocalTraining(batch=0, rate=1.0, decay=1.0),
            server=ServerStep(rate=self.pace / rounds if self.scheduled else 1.0),
            cohorts=CohortsPlan(drawn=self.drawn),
            dp=DPPlan(
                unit=Unit.USER,
                epsilon=epsilon,
                noise=0.0 if epsilon else HARDLY,
                delta=DELTA,
                trust=self.trust,
                rows=NoisyRows.SELECTED,
                threshold=ALL,
                correlated=self.correlated,
            ),
            simulation=SimulationPlan(rounds=rounds, evaluate_every=rounds, crypto=Crypto.NONE),
        )


def lines(name: str, *, quick: bool) -> Iterator[ScheduledLine]:
    """Of a set; quickly the two that are recommended."""
    cohort, larger, pace = COHORTS[name], LARGER[name], PACE[name]
    both = {"a trusted server": Trust.SERVER, "each of two servers": Trust.EACH}
    for who, trust in both.items():
        yield ScheduledLine(
            name=f"{who}, correlated, cohorts of {cohort}",
            trust=trust,
            cohort=cohort,
            epsilons=(3.0,) if quick else EPSILONS,
            pace=pace,
        )
    if quick:
        return
    yield ScheduledLine(name=ALONE, cohort=cohort, correlated=False, pace=NO_STEP, epsilons=(0.0,))
    for who, trust in both.items():
        yield ScheduledLine(
            name=f"{who}, correlated, cohorts of {larger}", trust=trust, cohort=larger, pace=pace
        )
        yield ScheduledLine(
            name=f"{who}, everybody in one round", trust=trust, correlated=False, pace=AT_ONCE
        )
        yield ScheduledLine(
            name=f"{who}, independent, cohorts of {cohort}",
            trust=trust,
            cohort=cohort,
            correlated=False,
            pace=pace,
        )
        yield ScheduledLine(
            name=f"{who}, by seed, independent, cohorts of {cohort}",
            trust=trust,
            cohort=cohort,
            drawn=DrawnBy.SEED,
            correlated=False,
            pace=pace,
        )


def schedule_cells(cache: Cache, request: Request) -> Iterator[Cell]:
    """Every set of the request; quickly 100K."""
    runs = NoisyRuns(cache, request)
    for name in filter(request.wants, SETS if request.sets or not request.quick else SETS[:1]):
        yield from of_set(runs, name)


def of_set(runs: NoisyRuns, name: str) -> Iterator[Cell]:
    request, table = runs.request, f"{name}, RMSE, noise per user in cohorts"
    seeds = request.seeds_of()

    def task(seed: int) -> Callable[[], Task]:
        return lambda: loaded(name, seed, 0, request.data)

    guesses = [runs.baselines(name, seed, task(seed)) for seed in seeds]
    for row in guesses[0]:
        yield summed(table, row, NO_NOISE, [guess[row] for guess in guesses], "RMSE", NO_MODEL)
    if name in WITHOUT:
        yield plain(table, BEST, NO_NOISE, WITHOUT[name], "RMSE", "64 factors over masks")
    for line in lines(name, quick=request.quick):
        for epsilon in line.epsilons:
            found = [
                runs.figures(name, line, epsilon, seed, task(seed), noise_of_all) for seed in seeds
            ]
            scores = [one["score"] for one in found]
            note = "no step is taken" if line.name == ALONE else noted(found[0])
            yield summed(table, line.name, column(epsilon), scores, "RMSE", note)


def noise_of_all(trainings: Trainings, run: Run) -> dict[str, Any]:
    """Noise over the clip on one round's sum, and on the sum of all rounds, of each who adds it."""
    plan = run.plan
    assert plan.dp is not None
    noise, mixed = plan.dp.noise, plan.correlation
    return {"one": noise * mixed.one_round, "all": noise * mixed.all_rounds}


def noted(found: dict[str, Any]) -> str:
    return f"noise of {found['one']:.3g} clips on a sum, {found['all']:.3g} on the sum of all"
