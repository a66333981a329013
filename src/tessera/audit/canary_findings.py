"""Findings of canaries: what a run's noise keeps, measured through the trainer beside the claim.

The run's data are not looked at: canaries are trained anew under the run's [dp], in as many
releases as it had or `RELEASES`, and the ledger is asked for as many. A canary has as many records,
at as many clients, as the plan allows for one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from torch import nn

from tessera.audit.canaries import Guessing
from tessera.audit.canary_training import (
    PrintedCanaries,
    Seen,
    Trains,
    as_it_is,
    claimed,
    observe,
    observe_in_sums,
    observe_merging,
)
from tessera.audit.finding import LEVEL, Finding, FindingUnit
from tessera.audit.row_canaries import observe_rows
from tessera.crypto.entropy import Entropy, SystemEntropy
from tessera.ids import SERVER
from tessera.learning.bound_model import BoundModel
from tessera.learning.training.noisy_steps import NoisySteps
from tessera.plan import Plan
from tessera.privacy.dp.guarantee import Observer, Trust, Unit
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.privacy.dp.noise_setting import NoiseSetting
from tessera.privacy.dp.subjects import Printed
from tessera.rounds import dp
from tessera.runs.noisy import noisy_steps

CANARIES: Final = 500
RELEASES: Final = 50
RECORDS: Final = 5
"""Records of a person where the plan bounds them nowhere."""
WHO: Final = {Observer.LEADER: "the leader", Observer.HELPER: "the helper"}
ROW_RELEASES: Final = 200
ROW_CANARIES: Final = 2_000
LOCAL_ROW_CANARIES: Final = 100
"""Where every client adds its own noise each is trained in every release."""
KINDS: Final = {
    Unit.INDEX: "rows",
    Unit.ITEM: "examples",
    Unit.USER: "clients",
    Unit.SUBJECT: "persons",
}


def canary_findings(plan: Plan, entropy: Entropy | None = None) -> list[Finding]:
    """One finding per observer against whom the plan's noise protects."""
    section, entropy = dp.section(plan), entropy or SystemEntropy()
    setting = replace(dp.noise_setting(plan), steps=1)
    releases = max(1, min(RELEASES, plan.simulation.rounds * section.steps))
    if setting.unit is Unit.INDEX:
        releases = max(1, min(ROW_RELEASES, plan.simulation.rounds * section.steps))
        return [
            of_rows(plan, setting, observer, releases, entropy) for observer in setting.protected()
        ]
    subject = setting.unit is Unit.SUBJECT
    records = (setting.records or RECORDS) if subject else 1
    if setting.printed:
        return [as_printed(plan, setting, records, releases, entropy)]
    if setting.vector is not None:
        return [
            in_sums(plan, setting, observer, releases, entropy) for observer in setting.protected()
        ]
    seen = observe(
        setting,
        canaries=CANARIES,
        rounds=releases,
        entropy=entropy,
        records=records,
        clients=setting.clients if subject else 1,
    )
    return [
        finding(setting, observer, seen, records, releases, section.delta)
        for observer in setting.protected()
    ]


def as_printed(
    plan: Plan, setting: NoiseSetting, records: int, releases: int, entropy: Entropy
) -> Finding:
    """A paper's algorithm against what it claims: by whom it is seen first."""
    section = dp.section(plan)
    central = section.printed is Printed.CENTRAL

    def learner(module: nn.Module, bound: BoundModel, _: NoisySteps) -> Trains:
        return PrintedCanaries(module, bound, noisy_steps(plan), section.sampling)

    seen = observe(
        setting, canaries=CANARIES, rounds=releases, entropy=entropy, records=records,
        learner=learner,
    )  # fmt: skip
    one = GaussianNoise.records(setting.noise, section.sampling, of=records, cap=records)
    if central:  # the server adds the noise, and sees the gradients
        one = replace(one, noise=0.1)
    tried = (seen.guesses(one), seen.by_length())
    who = "the leader" if central else "whoever sees a client's steps"
    return bounded(
        tried,
        name=f"canaries: persons, {section.printed.label}, seen by {who}",
        claimed=section.epsilon,
        delta=section.delta,
        canaries=len(seen.present),
        releases=releases,
        claims="the claim is the paper's, for a whole training",
    )


def of_rows(
    plan: Plan, setting: NoiseSetting, observer: Observer, releases: int, entropy: Entropy
) -> Finding:
    """Of noise per index: a row is looked for in the dense part alone."""
    seen = observe_rows(
        plan,
        unknown=left_to(setting, observer),
        canaries=LOCAL_ROW_CANARIES if setting.trust is Trust.LOCAL else ROW_CANARIES,
        rounds=releases,
        entropy=entropy,
    )
    delta = dp.section(plan).delta
    return bounded(
        (seen.guesses(),),
        name=f"canaries: {KINDS[setting.unit]}, seen by {WHO.get(observer, observer.value)}",
        claimed=claimed(setting, observer, rounds=releases, delta=delta),
        delta=delta,
        canaries=len(seen.present),
        releases=releases,
        claims="the claim is the ledger's for as many; the row's own words are not looked at",
    )


def in_sums(
    plan: Plan, setting: NoiseSetting, observer: Observer, releases: int, entropy: Entropy
) -> Finding:
    """Of noise inside the sums: what is left once the observer takes off the noise it knows."""
    seen = observe_in_sums(
        plan,
        unknown=left_to(setting, observer),
        canaries=CANARIES,
        rounds=releases,
        entropy=entropy,
        clients=setting.clients,
    )
    merging: tuple[Guessing, ...] = ()
    if setting.trust is Trust.CENTRAL:
        merging = observe_merging(plan, canaries=CANARIES, rounds=releases, entropy=entropy)
    return finding(setting, observer, seen, 1, releases, dp.section(plan).delta, merging)


def left_to(setting: NoiseSetting, observer: Observer) -> int:
    """Sources of noise that this observer does not know, at least.

    A server knows its own noise and not the other's; of clients' shares all count that the plan
    does not take for known.
    """
    if setting.trust is Trust.ONE_OF_TWO:
        return 1 if observer in (Observer.LEADER, Observer.HELPER) else 2
    return setting.sources


def finding(
    setting: NoiseSetting,
    observer: Observer,
    seen: Seen,
    records: int,
    releases: int,
    delta: float,
    more: tuple[Guessing, ...] = (),
) -> Finding:
    """The best of some attacks: along the canaries, by the length of the noise, and others."""
    alone, known = as_it_is(setting, records=records), not setting.secret_to(observer)
    if setting.vector is not None:  # in clips along a canary, of all its clients
        alone = GaussianNoise(setting.noise, ((setting.clients, 1.0),))
    if seen.drawn is not None:  # a canary is a client, and the leader's coins have it in or not
        alone = GaussianNoise.poisson(setting.noise, 1.0 if known else setting.rate)
    sum_only = observer not in setting.sight.one_by_one
    return bounded(
        (seen.guesses(alone, sum_only=sum_only, cohorts_known=known), seen.by_length(), *more),
        name=f"canaries: {KINDS[setting.unit]}, seen by {WHO.get(observer, observer.value)}",
        claimed=claimed(setting, observer, rounds=releases, delta=delta),
        delta=delta,
        canaries=len(seen.present),
        releases=releases,
        claims="the claim is the ledger's for as many",
    )


def bounded(
    tried: tuple[Guessing, ...],
    *,
    name: str,
    claimed: float,
    delta: float,
    canaries: int,
    releases: int,
    claims: str,
) -> Finding:
    """The best of some attacks beside a claim."""

    def interval(level: float) -> tuple[float, float]:
        return best(tried, delta, level), math.inf

    low, high = interval(LEVEL)
    return Finding(
        name=name,
        kind="canaries",
        measured=low,
        low=low,
        high=high,
        claimed=claimed,
        trials=canaries,
        meaning=f"a lower bound on epsilon at delta {delta:g}, from guesses about which of "
        f"{canaries} canaries were trained on, in {releases} noisy releases through the trainer; "
        f"{claims}",
        unit=FindingUnit.EPSILON,
        attacker=SERVER,
        interval=interval,
    )


def best(tried: tuple[Guessing, ...], delta: float, level: float) -> float:
    """The largest bound; for having several, each is at a higher level."""
    each = 1.0 - (1.0 - level) / len(tried)
    return max(guessing.bound(delta=delta, level=each) for guessing in tried)
