"""What the section [dp] of a plan amounts to: the account of its noise under its scheme.

One place turns a plan into a `NoiseSetting`, and this into the events that a client charges, the
limits that hold, the rounds that a budget lasts, and the noise that a budget asks for. Observers
and exact releases are the scheme's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from tessera.crypto.noise import DISTANCE
from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.plan import DPPlan, Metrics, NoiseFrom, NoisyRows, Plan, Sharing
from tessera.plan.dp import GIVEN_UP, LONGER
from tessera.privacy.dp.events import (
    THE_METRICS,
    THE_ROWS,
    THE_SETUP_SUM,
    THE_SHARING,
    THE_UNION,
    THE_WRITTEN_ROWS,
    Bounds,
    NoisySum,
)
from tessera.privacy.dp.guarantee import Guarantee, Observer, Unit
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
from tessera.privacy.dp.subjects import Printed
from tessera.rounds import as_printed, schemes
from tessera.rounds.schemes import Rows, SchemeEntry, Sums

EXACT: Final = {
    Rows.WHOLE: (),
    Rows.NAMED: (THE_ROWS,),
    Rows.RANDOMISED: (THE_UNION,),
    Rows.LISTED: (),
    Rows.UNSEEN: (THE_WRITTEN_ROWS,),
}
"""What is released without noise, by how clients say which rows are theirs."""


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
        one_by_one=frozenset({Observer.LEADER} if entry.sums is Sums.PLAIN else ()),
        roster=entry.masks,
        exact=(*(() if all_rows else EXACT[entry.rows]), *more),
    )


def released(plan: Plan, *, setup: bool = False) -> tuple[str, ...]:
    """What this plan releases exactly beside its scheme; `setup`: its task has a set-up sum."""
    found = [THE_UNION] if plan.narrows else []
    if setup and not section(plan).setup:
        found.append(THE_SETUP_SUM)
    if plan.security.sharing is Sharing.AUTO:
        found.append(THE_SHARING)
    if plan.simulation.metrics is Metrics.FEDERATED and not noisy_metrics(plan):
        found.append(THE_METRICS)
    return tuple(found)


def exact(plan: Plan) -> tuple[str, ...]:
    """What a round of this plan releases without noise."""
    return noise_setting(plan).sight.exact


def covers_rows(plan: Plan) -> bool:
    """Whether which rows a client holds is inside the number per user: then nobody is named."""
    return plan.dp is not None and plan.dp.unit == "user" and not exact(plan)


def section(plan: Plan) -> DPPlan:
    """The plan's section; asked for only where there is one."""
    if plan.dp is None:
        raise MisuseError("a plan without [dp] has no noise")
    return plan.dp


def noise_setting(plan: Plan, *, setup: bool = False) -> NoiseSetting:
    """The account of one client under this plan.

    Each client is charged as if its releases were seen one by one, also where only sums are: they
    are rounded and cut before they are summed, so that the sum is not that of the noisy values.
    """
    dp = section(plan)
    printed = dp.printed is not Printed.NONE
    rate, coins = dp.sampling, Coins.CLIENT if dp.by_batches else Coins.PUBLIC
    if plan.drawn_in_secret:
        rate, coins = dp.participation, Coins.LEADER
    return NoiseSetting(
        unit=dp.protects,
        noise=as_printed.noise(plan).sigma(1) if printed else dp.noise or 1.0,
        printed=as_printed.claim(plan) if printed else "",
        trust=dp.trust.trust,
        steps=dp.steps,
        sampling=Sampling.POISSON if rate < 1.0 else Sampling.NONE,
        rate=rate,
        coins=coins,
        drawn=dp.drawn,
        records=dp.records_per_subject,
        cap=max(1, dp.cap),
        clients=dp.clients_per_subject,
        row_moves=row_moved(plan),
        clipped=not dp.by_batches,
        selection=selection_ratio(plan),
        setup=setup_ratio(plan),
        metrics=metrics_ratio(plan),
        tests=tests(plan) if noisy_metrics(plan) else 0,
        distance=DISTANCE * plan.full_length,
        fails=GIVEN_UP + LONGER if rate < 1.0 and plan.drawn_in_secret else 0.0,
        sources=1 if plan.noisy_vector is None else plan.noisy_vector.sources,
        vector=summed_vector(plan),
        sight=sight(
            schemes.of(plan),
            *released(plan, setup=setup),
            all_rows=dp.trust.in_the_sum,
        ),
    )


def row_moved(plan: Plan) -> float:
    """Unit index: how far one row moves what a client sends, in clips; else 0.

    Two gradients of each example that changes with it, or two clipped vectors if that is less. What
    is rounded again until it is short enough may move by two integers more in every word, whatever
    the coins are.
    """
    dp = section(plan)
    if dp.unit != "index":
        return 0.0
    moved = row_moves(dp.per_row, dp.example_clip, clip=dp.clip)
    if dp.trust is NoiseFrom.LOCAL:  # rounded towards zero example by example: none grows
        return moved
    vector = plan.noisy_vector
    if vector is None:
        raise MisuseError("noise per index is a client's own, or integers on a sum")
    integers = moved * vector.top + 2.0 * math.sqrt(vector.words)
    return min(MOST_MOVE, integers / vector.bound)


def _shares(plan: Plan) -> tuple[float, float, float]:
    """Of the budget, for the popularity of rows, the set-up sum and tests; rounds have the rest."""
    dp = section(plan)
    return (
        dp.selection if dp.rows is NoisyRows.SELECTED else 0.0,
        dp.setup,
        dp.metrics if noisy_metrics(plan) else 0.0,
    )


def _ratio(plan: Plan, share: float, times: int = 1) -> float:
    """Noise of what is released so often with this share of the budget, over that of a round.

    Gaussian noise spends by the inverse of its variance.
    """
    if not share:
        return 0.0
    rest = 1.0 - sum(_shares(plan))
    if rest <= 0.0:
        dp = section(plan)
        raise ConfigError(
            f"[dp] selection = {dp.selection:g}, setup = {dp.setup:g} and metrics = "
            f"{dp.metrics:g} of the budget leave nothing for the rounds",
            hint="shares that add up to less than 1",
        )
    return math.sqrt(rest * times / (share * plan.simulation.rounds))


def selection_ratio(plan: Plan) -> float:
    """Noise on the popularity of rows, over that of a round; 0 where none are selected.

    A row moves a client's marks by another length than its update.
    """
    moved = MARKS_MOVE / row_moved(plan) if section(plan).unit == "index" else 1.0
    return moved * _ratio(plan, _shares(plan)[0])


def setup_ratio(plan: Plan) -> float:
    """Noise on the sum before the first round, over that of a round; 0: it has none."""
    return _ratio(plan, _shares(plan)[1])


def metrics_ratio(plan: Plan) -> float:
    """Noise on the statistics of one sum of a test, over that of a round; 0: they have none."""
    return _ratio(plan, _shares(plan)[2], tests(plan))


def noisy_metrics(plan: Plan) -> bool:
    """Whether tests are sums of clients' statistics, with noise."""
    federated = plan.simulation.metrics is Metrics.FEDERATED
    return plan.dp is not None and plan.dp.unit == "user" and federated


def tested_in(plan: Plan, round_id: RoundId) -> bool:
    """Whether the plan has the model tested after this round: it does not follow from data."""
    past, every = int(round_id) + 1, plan.simulation.evaluate_every
    return past % every == 0 or past == plan.simulation.rounds


def tests(plan: Plan) -> int:
    """How many sums of statistics the tests of all rounds are."""
    return sums_of_a_test(plan) * -(-plan.simulation.rounds // plan.simulation.evaluate_every)


def sums_of_a_test(plan: Plan) -> int:
    """Over the test parts and, where training stops by them, over the validation parts."""
    return 2 if plan.simulation.patience else 1


def follows_from_rounds(plan: Plan) -> bool:
    """Whether noise beside that of the rounds is sized by their number."""
    return plan.dp is not None and any(_shares(plan))


def setup_noise(plan: Plan) -> float:
    """Standard deviation of the noise on the set-up sum, over a client's part; 0: none."""
    return section(plan).noise * setup_ratio(plan)


def metrics_noise(plan: Plan) -> float:
    """Standard deviation of the noise on the statistics of a test, over a client's part."""
    return section(plan).noise * metrics_ratio(plan)


def selection_noise(plan: Plan) -> float:
    """Standard deviation of the noise on the popularity of rows, over the length of marks."""
    return section(plan).noise * selection_ratio(plan)


def selection_events(plan: Plan) -> Iterator[NoisySum]:
    """What a client is charged for its marks, before the first round."""
    return noise_setting(plan).selection_events(federation=plan.federation)


def setup_events(plan: Plan) -> Iterator[NoisySum]:
    """What a client is charged for its part of the set-up sum, before it leaves."""
    return noise_setting(plan).setup_events(federation=plan.federation)


def in_the_sum(plan: Plan) -> float:
    """Deviation of all noise on a round's sum, over the clip; an expectation, not a promise."""
    dp = section(plan)
    if dp.trust is NoiseFrom.LOCAL:
        return dp.noise * math.sqrt(plan.cohort)
    if dp.trust is NoiseFrom.SHARES:
        return dp.noise * math.sqrt(
            plan.cohort / max(1, plan.least_survivors - plan.corrupt_shares)
        )
    return dp.noise * (math.sqrt(2.0) if dp.trust is NoiseFrom.EACH else 1.0)


def summed_vector(plan: Plan) -> SummedVector | None:
    """What is summed where noise is integers on the sum, as far as an account needs it."""
    vector, trust = plan.noisy_vector, section(plan).trust
    if vector is None:
        return None
    honest = ""
    if trust is NoiseFrom.EACH:
        honest = "if one of the two servers adds its noise and does not collude"
    if trust is NoiseFrom.SHARES:
        honest = (
            f"if {vector.sources} of the survivors add their noise and tell it nobody, and the "
            "secure sum's threshold holds"
        )
    return SummedVector(words=vector.words, bound=vector.bound, honest=honest)


def events(plan: Plan, round_id: RoundId) -> Iterator[NoisySum]:
    """What a client is charged for the noisy releases of a round, and of the test after it."""
    setting = noise_setting(plan)
    yield from setting.events(federation=plan.federation, round_id=round_id)
    if noisy_metrics(plan) and tested_in(plan, round_id):
        yield from setting.metrics_events(
            sums_of_a_test(plan), federation=plan.federation, round_id=round_id
        )


def absent_events(plan: Plan, round_id: RoundId) -> Iterator[NoisySum]:
    """What a client is charged for a round whose cohort, drawn in secret, it is not in."""
    setting = noise_setting(plan)
    return setting.absent_events(federation=plan.federation, round_id=round_id)


def limits(plan: Plan) -> tuple[Limit, ...]:
    """The plan's budget against everybody from whom its noise protects; none if it has none."""
    dp = section(plan)
    if not dp.epsilon:
        return ()
    return _limits(noise_setting(plan), dp.epsilon, dp.delta)


@lru_cache(maxsize=64)  # asked for by every client in every round
def _limits(setting: NoiseSetting, epsilon: float, delta: float) -> tuple[Limit, ...]:
    return setting.limits(epsilon=epsilon, delta=delta)


def spent(plan: Plan, ledger: Ledger) -> Guarantee | None:
    """The worst of what is left after all that a ledger has, against those the noise is for."""
    if plan.dp is None:
        return None
    dp = section(plan)
    return max(
        (
            ledger.guarantee(unit=dp.protects, against=observer, delta=dp.delta)
            for observer in noise_setting(plan).protected()
        ),
        key=lambda g: g.epsilon,
    )


def composed(runs: Sequence[tuple[Plan, int]]) -> Guarantee:
    """What several runs over the same people leave together, each after so many rounds.

    The worst against those whom the noise of every run is for, for a client that was in all rounds;
    `NoAccount` where the runs protect different units or nobody in common. Choosing among the runs
    by exact figures is not in it.
    """
    first = section(runs[0][0])
    ledger = Ledger(bounds=bounds(runs[0][0]))
    observers = [noise_setting(plan).protected() for plan, _ in runs]
    for at, (plan, rounds) in enumerate(runs):
        for entry in noise_setting(plan).ledger(rounds).entries:
            event = replace(entry.event, federation=f"run {at}")  # each draws noise of its own
            ledger.spend(event, reason=entry.reason)
    alike = [o for o in observers[0] if all(o in others for others in observers)]
    units = {section(plan).protects for plan, _ in runs}
    if not alike or len(units) > 1:
        raise NoAccount("the runs protect different units, or against different observers")
    delta = max(section(plan).delta for plan, _ in runs)
    return max(
        (ledger.guarantee(unit=first.protects, against=o, delta=delta) for o in alike),
        key=lambda found: found.epsilon,
    )


def bounds(plan: Plan) -> Bounds:
    """How many rows, records and clients one unit can have, as the plan states it."""
    dp = section(plan)
    rows = plan.union.max_rows * len(plan.roots)
    return Bounds(
        rows_per_example=rows,
        rows_per_client=rows,
        records_per_subject=dp.records_per_subject,
        clients_per_subject=dp.clients_per_subject if dp.protects is Unit.SUBJECT else 0,
    )


def lasts(plan: Plan) -> int | None:
    """How many rounds with one client its budget lasts; None: there is no budget."""
    dp = section(plan)
    if not dp.epsilon or dp.printed is not Printed.NONE:
        return None
    return _rounds(noise_setting(plan), dp.epsilon, dp.delta)


@lru_cache(maxsize=64)
def _rounds(setting: NoiseSetting, epsilon: float, delta: float) -> int:
    return setting.rounds(epsilon=epsilon, delta=delta)


def calibrated(plan: Plan) -> Plan:
    """The plan with its noise: the least that keeps the budget, where none is given.

    For all rounds, each of them with the same client: cohorts are drawn publicly, so that nothing
    is gained by being in few of them that could be promised beforehand. A cohort that is drawn in
    secret is a gain against those who do not know it, where the noise is not for anybody else.
    """
    dp = plan.dp
    if dp is None:
        return plan
    if dp.printed is not Printed.NONE:
        as_printed.noise(plan).sigma(1)  # that there is such noise
        return plan
    if not dp.noise:
        least = noise_setting(plan).least_noise(
            epsilon=dp.epsilon, delta=dp.delta, rounds=plan.simulation.rounds
        )
        plan = replace(plan, dp=replace(dp, noise=least))
    if lasts(plan) == 0:
        raise ConfigError(
            f"[dp] noise = {dp.noise:g} passes epsilon = {dp.epsilon:g} in the first round",
            hint="leave noise out: the least that keeps the budget is computed",
        )
    return plan


def delta_warning(delta: float, people: int) -> str:
    """The rule that a delta breaks, if it does; `people` 0: unknown."""
    if not people or delta < 1.0 / people:
        return ""
    return (
        f"delta {delta:g} is not below one over {people:,} people: publishing one person's data "
        "outright would keep it"
    )
