"""Findings of canaries: what a run's noise keeps, measured through the trainer beside the claim.

The run's data are not looked at: canaries are trained anew under the run's [dp], in as many
releases as it had or `RELEASES`, and the ledger is asked for as many. A canary has as many records,
at as many clients, as the plan allows for one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from tessera.audit.canary_training import (
    Guessing,
    Mask,
    PrintedCanaries,
    Seen,
    Trains,
    Values,
    as_it_is,
    claimed,
    flipped,
    likelihood_ratios,
    observe,
    observe_in_sums,
    observe_merging,
)
from tessera.audit.finding import LEVEL, Finding, FindingUnit
from tessera.crypto.entropy import Entropy, SystemEntropy
from tessera.crypto.noise import discrete_gaussian
from tessera.crypto.prg import Label
from tessera.data.examples import NONE, Examples
from tessera.ids import SERVER, RoundId
from tessera.learning.bound_model import BoundModel, Table
from tessera.learning.module_tables import Tables
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart
from tessera.learning.training.jobs import Job, Trainable
from tessera.learning.training.noisy_steps import NoisySteps
from tessera.learning.training.row_cut import RowCut
from tessera.learning.training.vectorised.noisy import NoisyVectorised
from tessera.plan import Plan
from tessera.privacy.dp.guarantee import Observer, Trust, Unit
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.privacy.dp.noise_setting import NoiseSetting
from tessera.privacy.dp.subjects import Printed
from tessera.rounds.clipped_vector import clipped_vector, noise_stream
from tessera.rounds.noise import noise_of
from tessera.runs.client_training import index_steps, noisy_steps

# --- canaries that are rows -----------------------------------------------------------------------
#
# A canary is a client that has a row in its examples or does not. The row stands in the histories
# of others' examples, as many as the client's cut leaves it in, and reverses their gradients; and
# as many examples have it as target as the cut leaves. Only the one weight of the dense part is
# looked at, not the row's own words. Cut, clip, rounding and noise are those of a plan's training.


TABLE: Final = "rows"
PLACES: Final = 1
"""Of a history: then an example aimed at a row costs two, and most is left for histories."""
STEEP: Final = 1e4


class TurnedRound(nn.Module):
    """One weight; an entry in its history turns an example's gradient round."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, 1)
        self.weight = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.rows.weight)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        sign = torch.where(batch["history"].ge(0).any(-1), 1.0, -1.0)
        return sign * self.weight


def steep_loss(output: Tensor, batch: object) -> Tensor:
    return -STEEP * output


@dataclass(frozen=True, slots=True)
class SeenRows:
    """(releases, canaries): the weight's moves, 1 apart with and without the row, 0 without it."""

    moved: Values = field(repr=False)
    present: Mask = field(repr=False)
    noise: float

    def guesses(self) -> Guessing:
        one = GaussianNoise(max(self.noise, 1e-6))
        return Guessing(likelihood_ratios(self.moved, one), self.present)


def observe_rows(
    plan: Plan,
    *,
    unknown: int,
    canaries: int,
    rounds: int,
    entropy: Entropy,
    on_the_row_alone: bool = False,
) -> SeenRows:
    """Half of the clients have the row; noise of `unknown` sources is left to the observer.

    `on_the_row_alone`: noise as a claim about the row's own words would have it, and none on the
    dense part.
    """
    section = noise_of(plan).dp
    cut = RowCut.of(section.per_row, PLACES)
    present = flipped(entropy, canaries)
    worlds = (examples(cut, with_row=False), examples(cut, with_row=True))
    rows = 1 + cut.histories + 1
    module = TurnedRound(rows)
    bound = Tables({"rows.weight": Table("item", "history")}).bind(module)
    every = np.arange(rows, dtype=np.uint64)
    part = TablePart(every, np.zeros((rows, 1), np.float32))
    submodel = Submodel(np.zeros(1, np.float32), {TABLE: part}, {TABLE: every})
    learner = NoisyVectorised(
        Trainable(module, bound, steep_loss, plan.local_training), index_steps(plan)
    )
    local = section.trust is Trust.LOCAL

    def trained(which: Mask, at: int) -> list[ModelUpdate]:
        jobs = []
        for canary, there in enumerate(which):
            secret = entropy.secret(Label.CANARIES, "row", at, canary)
            own = cut.apply(bound, worlds[int(there)], secret)
            jobs.append(Job(canary, submodel, own, coins=secret))
        return [found.update for found in learner.train(jobs, round_id=0)]

    moved = np.zeros((rounds, canaries))
    # As many examples as stay: no coin changes them, and where others add noise nothing else does.
    both = [] if local else trained(np.array([False, True]), 0)
    for at in range(rounds):
        if local:
            moved[at] = [float(update.dense[0]) for update in trained(present, at)]
        else:
            hidden = 0 if on_the_row_alone else unknown
            moved[at] = released(plan, both, present, hidden, at, entropy)
    # Without the row h examples are turned the other way; with it they and those aimed at it.
    apart = (2 * cut.histories + cut.targets) * section.example_clip
    deviation = section.noise * section.clip * np.sqrt(unknown / noise_of(plan).setting.sources)
    return SeenRows(
        (moved + cut.histories * section.example_clip) / apart, present, float(deviation / apart)
    )


def examples(cut: RowCut, *, with_row: bool) -> Examples:
    """As many as stay: aimed at others with the row in their history, and aimed at the row."""
    others = np.arange(1, 1 + cut.histories)
    history = np.full((cut.histories, PLACES), 0 if with_row else NONE)
    if with_row:
        beside = np.full((cut.targets, PLACES), 1 + cut.histories)
        others = np.concatenate([others, np.zeros(cut.targets, np.int64)])
        history = np.concatenate([history, beside if cut.places else np.full_like(beside, NONE)])
    return Examples({"item": others.astype(np.int64), "history": history.astype(np.int64)})


def released(
    plan: Plan, both: list[ModelUpdate], present: Mask, unknown: int, at: int, entropy: Entropy
) -> Values:
    """The dense part's weight as an observer has it, of each client by itself."""
    vector = plan.noisy_vector
    assert vector is not None
    every = np.arange(len(both[0].tables[TABLE].values), dtype=np.uint64)
    coins = entropy.secret(Label.CANARIES, "coins", at)
    sent = [
        int(clipped_vector(vector, update, {TABLE: every}, {TABLE: 1}, 1, coins).dense[0])
        for update in both
    ]
    values = np.where(present, sent[1], sent[0]).astype(np.float64)
    source = discrete_gaussian(vector.deviation)
    for other in range(unknown):
        secret = entropy.secret(Label.CANARIES, "noise", at, other)
        stream = noise_stream(secret, RoundId(at), SERVER, str(other))
        values += source.sample(stream, len(values))
    return values / vector.scale


# --- findings -------------------------------------------------------------------------------------

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
    section, entropy = noise_of(plan).dp, entropy or SystemEntropy()
    setting = replace(noise_of(plan).setting, steps=1)
    # A canary is in every release, as many as a client may be in, and the claim is for as many.
    most = setting.releases(plan.simulation.rounds) * section.steps
    if not setting.correlated or setting.unit is Unit.INDEX:  # of a row under correlated noise: 1
        setting = replace(setting, correlation=None)
    releases = max(1, min(RELEASES, most if not setting.correlated else plan.simulation.rounds))
    if setting.unit is Unit.INDEX:
        releases = max(1, min(ROW_RELEASES, most))
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
    section = noise_of(plan).dp
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
    delta = noise_of(plan).dp.delta
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
    if setting.trust is Trust.SERVER:
        merging = observe_merging(plan, canaries=CANARIES, rounds=releases, entropy=entropy)
    return finding(setting, observer, seen, 1, releases, noise_of(plan).dp.delta, merging)


def left_to(setting: NoiseSetting, observer: Observer) -> int:
    """Sources of noise that this observer does not know, at least.

    A server knows its own noise and not the other's; of clients' shares all count that the plan
    does not take for known.
    """
    if setting.trust is Trust.EACH:
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
