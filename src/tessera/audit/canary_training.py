"""Canaries through the trainer: what an observer sees of each, over many rounds of one step.

A canary is an example, a person or a client whose gradient lies on a row of its own, as long as the
clip allows, whatever the model is. All rows are at hand, so that the trainer puts noise on every
one. The loss is linear: an attacker loses nothing by not choosing the model anew in each round.
What is seen of a canary is the change of its row, in clips: what it contributed, plus noise.

Everything below the model is what a plan's training uses: batches by the clients' coins, clipping
by groups, noise from a key stream, noise that is applied lazily. Not whole rounds of a simulation:
50 releases of 500 canaries would be 25,000 clients' messages, and only the noise is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from tessera.crypto.correlated import correlated_noise, noise_streams
from tessera.crypto.entropy import Entropy
from tessera.crypto.noise import discrete_gaussian
from tessera.crypto.prg import Label
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.data.examples import SUBJECT, Examples
from tessera.errors import MisuseError
from tessera.ids import SERVER, ClientId, RoundId, StageId, TableId
from tessera.learning.bound_model import BoundModel, Table
from tessera.learning.compression import signed
from tessera.learning.module_tables import Tables
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart, TableUpdate
from tessera.learning.training.jobs import Job, Trainable, Trained
from tessera.learning.training.noisy_steps import EachExample, NoisySteps
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised.noisy import NoisyVectorised
from tessera.plan import CohortsPlan, NoisyRows, Plan, Scheme, TablePlan
from tessera.privacy.dp.guarantee import Observer, Unit
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.privacy.dp.noise_setting import Drawn, NoiseSetting
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.rounds.clipped_vector import clipped_update, clipped_vector, noise_stream, noisy_update
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.encode import means
from tessera.rounds.noise import noise_of
from tessera.runs.client_training import OfSubjects, PrintedBatches
from tessera.wire.index_set import client_array

# --- canaries -------------------------------------------------------------------------------------
#
# Canaries: a lower bound on epsilon from guesses about who was in the training data.
#
# Many canaries (examples, clients or persons that nobody else resembles) are each trained on or
# not, by a fair coin. The attacker sees what the observer sees, knows each canary's gradient, and
# guesses. Whatever keeps (epsilon, delta) per canary makes the number of correct guesses hardly
# larger than Binomial(guesses, e^epsilon / (1 + e^epsilon)), whatever the guesses depend on
# (Steinke, Nasr, Jagielski 2023, arXiv 2305.08846, Theorem 5.2). Turned round, many correct
# guesses are evidence against every smaller epsilon: `lower_bound` is the largest that is refuted,
# wrong with a probability of 1 - level at most. One run is enough, and canaries need not be
# independent.
#
# The bound saturates: with g guesses, all correct, it is about ln(g / ln(1 / (1 - level))).


Values = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

SHARES: Final = (0.05, 0.15, 0.4, 1.0)
"""Shares of the canaries that are guessed, the surest first: the best counts, and for having chosen
among them the error rate is divided by their number."""
MOST: Final = 60.0


@dataclass(frozen=True, slots=True)
class Guessing:
    """How sure the attacker is that each canary was in (large) or not (small), and the truth."""

    scores: Values = field(repr=False)
    present: Mask = field(repr=False)

    def __post_init__(self) -> None:
        if self.scores.shape != self.present.shape or self.scores.ndim != 1:
            raise MisuseError(f"canaries: {self.scores.shape} scores, {self.present.shape} truths")

    def correct(self, guesses: int) -> int:
        """How many of so many guesses are right: half for "in", at the top, half for "out"."""
        order = np.argsort(self.scores, kind="stable")
        outs = guesses // 2
        ins = guesses - outs
        right = int((~self.present[order[:outs]]).sum())
        return right + int(self.present[order[len(order) - ins :]].sum())

    def bound(self, *, delta: float, level: float) -> float:
        """The best lower bound on epsilon at this level."""
        canaries = len(self.scores)
        each = 1.0 - (1.0 - level) / len(SHARES)
        found = 0.0
        for share in SHARES:
            guesses = max(1, int(share * canaries))
            bound = lower_bound(
                canaries=canaries,
                guesses=guesses,
                correct=self.correct(guesses),
                delta=delta,
                level=each,
            )
            found = max(found, bound)
        return found


def lower_bound(*, canaries: int, guesses: int, correct: int, delta: float, level: float) -> float:
    """The largest epsilon that so many correct guesses refute; 0 if they refute none."""
    if not 0 <= correct <= guesses <= canaries:
        raise MisuseError(f"canaries: {correct} correct of {guesses} guesses of {canaries}")

    def refuted(epsilon: float) -> bool:
        chance = p_value(epsilon, canaries=canaries, guesses=guesses, correct=correct, delta=delta)
        return chance < 1.0 - level

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, MOST
    while high - low > 1e-4:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def p_value(epsilon: float, *, canaries: int, guesses: int, correct: int, delta: float) -> float:
    """At most how likely so many correct guesses are if the training keeps (epsilon, delta)."""
    logs = _log_binomial(guesses, epsilon)
    tail = float(np.exp(logs[correct:]).sum())
    # delta lets some guesses be right for certain: the worst way of spending it (Theorem 5.2).
    below = np.cumsum(np.exp(logs[:correct][::-1]))
    worst = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, tail + 2.0 * canaries * delta * worst)


def _log_binomial(trials: int, epsilon: float) -> Values:
    """Log probabilities of 0 .. trials successes at a rate of e^epsilon / (1 + e^epsilon)."""
    k = np.arange(trials + 1, dtype=np.float64)
    factorials = np.concatenate([np.zeros(1), np.cumsum(np.log(np.arange(1, trials + 1)))])
    choose = factorials[-1] - factorials - factorials[::-1]
    log_rate, log_rest = -math.log1p(math.exp(-epsilon)), -math.log1p(math.exp(epsilon))
    return np.asarray(choose + k * log_rate + (trials - k) * log_rest)


def likelihood_ratios(seen: Values, mechanism: GaussianNoise) -> Values:
    """How much likelier each canary's observations are if it was in: the best possible score.

    `seen` (releases, canaries) is what lies along each canary's gradient, in units of the clip.
    """
    variance = mechanism.noise**2
    logs = [math.log(p) + shift * (seen - 0.5 * shift) / variance for shift, p in mechanism.shifts]
    return np.asarray(np.logaddexp.reduce(logs, axis=0).sum(axis=0))


# --- canary training ------------------------------------------------------------------------------

TABLE: Final = "rows"
FIELD: Final = "row"
SLOPE: Final = "slope"
"""How many times steeper than others an example's loss is, where it is said."""
STEEP: Final = 100.0
"""The slope of a canary's loss: far above the clip, which cuts it to exactly one."""
TRAINING: Final = LocalTraining(batch=1, rate=1.0, decay=1.0)


class Canaries(nn.Module):
    """One row of one number for each canary; an example's output is its row."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(count, 1)
        nn.init.zeros_(self.rows.weight)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.rows(batch[FIELD])[:, 0]
        return found


def steep_loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    slope: Tensor = -STEEP * output
    return slope * batch[SLOPE] if SLOPE in batch else slope


class Trains(Protocol):
    """The part of a learner that is asked for."""

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]: ...


MakeLearner = Callable[[nn.Module, BoundModel, NoisySteps], Trains]


def real_learner(module: nn.Module, bound: BoundModel, noisy: NoisySteps) -> Trains:
    return NoisyVectorised(Trainable(module, bound, steep_loss, TRAINING), noisy)


class PrintedCanaries:
    """The trainer of a paper's algorithm, as printed, in batches of a share of the examples."""

    def __init__(
        self, module: nn.Module, bound: BoundModel, noisy: NoisySteps, share: float
    ) -> None:
        self.module, self.bound, self.share = module, bound, share
        self.noisy = replace(noisy, clip=1.0, steps=1, batch=1)

    def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
        found = []
        for job in jobs:
            batches = self.noisy.drawing
            if not isinstance(batches, PrintedBatches):
                raise MisuseError("canaries: the plan's batches are not a paper's")
            size = max(1, round(self.share * len(job.examples)))
            noisy = replace(self.noisy, drawing=replace(batches, size=size))
            learner = NoisyVectorised(
                Trainable(self.module, self.bound, steep_loss, TRAINING), noisy
            )
            found += learner.train([job], round_id=round_id)
        return found


@dataclass(frozen=True, slots=True)
class Seen:
    """(rounds, clients, canaries): how each client's update moved along each canary, in clips.

    Where cohorts are drawn in secret, `drawn` (rounds, canaries) says who was in.
    """

    moved: Values = field(repr=False)
    present: Mask = field(repr=False)
    drawn: Mask | None = field(default=None, repr=False)

    def guesses(
        self, one: GaussianNoise, *, sum_only: bool = False, cohorts_known: bool = False
    ) -> Guessing:
        """The best attack on canaries that move each client's release as `one` says.

        Where only the sum over clients is seen, shifts and variances add up. Whoever knows the
        cohorts looks at nothing but the rounds in which a canary was drawn, and `one` is not
        sampled.
        """
        if cohorts_known and self.drawn is not None:
            ((shift, _),) = one.shifts
            said = np.where(self.drawn[:, None, :], self.moved, 0.5 * shift)  # which is nothing
            return Seen(said, self.present).guesses(one, sum_only=sum_only)
        rounds, clients, canaries = self.moved.shape
        if not sum_only:
            each = self.moved.reshape(rounds * clients, canaries)
            return Guessing(likelihood_ratios(each, one), self.present)
        together = replace(one.grouped(clients), noise=one.noise * clients**0.5)
        return Guessing(likelihood_ratios(self.moved.sum(axis=1), together), self.present)

    def by_length(self) -> Guessing:
        """An attack on the noise itself: rows of canaries that were in have more of it."""
        return Guessing(np.square(self.moved).sum(axis=(0, 1)), self.present)


def observe(
    setting: NoiseSetting,
    *,
    canaries: int,
    rounds: int,
    entropy: Entropy,
    records: int = 1,
    clients: int = 1,
    learner: MakeLearner = real_learner,
) -> Seen:
    """Train on half of the canaries, each with so many records at each of so many clients.

    These are what the canaries have, and not what the setting says about them. Which of them are in
    follows from the entropy, too.
    """
    present = flipped(entropy, canaries)
    moved = np.zeros((rounds, clients, canaries))
    if setting.unit is Unit.USER:  # a canary is a client
        for at in np.ndindex(rounds, clients, canaries):
            secret = entropy.secret(Label.CANARIES, *at)
            moved[at] = sent(bool(present[at[-1]]), setting.noise, secret)
        return Seen(moved, present)
    who = np.repeat(np.flatnonzero(present), records)
    each = [Examples({FIELD: who, SUBJECT: who})] * clients
    for round_id, updates in enumerate(trained(setting, canaries, each, rounds, entropy, learner)):
        moved[round_id] = updates
    return Seen(moved, present)


def observe_in_sums(
    plan: Plan,
    *,
    unknown: int,
    canaries: int,
    rounds: int,
    entropy: Entropy,
    clients: int = 1,
) -> Seen:
    """Canaries in sums with integer noise, clipped and rounded as updates are.

    A canary is a client, or a person at so many `clients`, whose update lies on a row of its own.
    The observer takes off all noise that it knows: that of `unknown` sources is left. Where noise
    is correlated there is one release, the whole training.
    """
    vector = plan.noisy_vector
    if vector is None:
        raise MisuseError("canaries in sums: the plan has no noise inside its sums")
    present = flipped(entropy, canaries)
    source = discrete_gaussian(vector.deviation)
    steep = np.full((1, 1), STEEP * vector.clip)
    update = ModelUpdate(np.zeros(0), 1, {TABLE: TableUpdate(steep, np.ones(1, np.int64))})
    rows = {TABLE: np.zeros(1, np.uint64)}
    if plan.correlation.inverse.terms:
        coins = entropy.secret(Label.CANARIES, "coins", 0, 0)
        sent = clipped_vector(vector, update, rows, {TABLE: 1}, 1, coins)
        word = clients * int(sent.tables[TABLE][0, 0])
        return Seen(_whole_training(plan, word * present, unknown, entropy) / vector.bound, present)
    moved = np.zeros((rounds, 1, canaries))
    drawn = drawn_canaries(plan, rounds, canaries, entropy)
    for at in range(rounds):
        there = present if drawn is None else present & drawn[at]
        for client in range(clients):
            coins = entropy.secret(Label.CANARIES, "coins", at, client)
            sent = clipped_vector(vector, update, rows, {TABLE: 1}, 1, coins)
            moved[at, 0] += there * int(sent.tables[TABLE][0, 0])
        for other in range(unknown):
            secret = entropy.secret(Label.CANARIES, "noise", at, other)
            stream = noise_stream(secret, RoundId(at), SERVER, str(other))
            moved[at, 0] += source.sample(stream, canaries)
    return Seen(moved / vector.bound, present, drawn)


def _whole_training(
    plan: Plan, words: npt.NDArray[np.int64], unknown: int, entropy: Entropy
) -> Values:
    """What is left of these words, each sent as often as a client may, under correlated noise.

    The noise is that of the servers' own code. The observer undoes C^-1 and weighs rounds by how
    far a client moves them: no test of one against the other does better.
    """
    mixed, bound, vector = plan.correlation, plan.participation, plan.noisy_vector
    assert vector is not None
    own = np.arange(bound.rounds) % bound.separation == 0
    own &= np.cumsum(own) <= bound.most
    opened = np.outer(own, words).astype(np.float64)
    source, ring = correlated_noise(mixed.inverse, vector.deviation), Ring(62)
    for other in range(unknown):
        secrets = [entropy.secret(Label.CANARIES, "noise", at, other) for at in range(bound.rounds)]
        for at in range(bound.rounds):
            newest = secrets[max(0, at + 1 - mixed.inverse.draws) : at + 1][::-1]
            streams = noise_streams(newest, at, SERVER, other)
            opened[at] += signed(source.add(ring, ring.zeros(len(words)), streams), ring)
    coefficients = mixed.coefficients
    undone = [coefficients[: at + 1][::-1] @ opened[: at + 1] for at in range(bound.rounds)]
    moves = np.convolve(coefficients, own)[: bound.rounds]
    found: Values = (moves @ np.array(undone)) / float(moves @ moves)
    return found.reshape(1, 1, -1)


def observe_merging(
    plan: Plan, *, canaries: int, rounds: int, entropy: Entropy
) -> tuple[Guessing, ...]:
    """Canaries whose rows a lying client has put where a trusted server would judge them.

    The liar adds as much to a canary's row as is possible at all, so that the exact sum is beyond
    the bounds with the canary and within them without it; or it puts the row at the wrap of the
    ring, where it turns into its negative. Seen is which rows are merged, and whether they rise.
    Sum, noise, judging and means are those of a round over a table with a row for each canary.
    Where noise is correlated each of a client's rounds has the noise of one round, by itself.
    """
    section, most = noise_of(plan).dp, plan.participation.most
    if section.correlated:
        one = section.noise * plan.correlation.one_round
        section = replace(section, correlated=False, coefficients="", noise=one)
        rounds = min(rounds, most)
    small = replace(
        plan,
        scheme=Scheme.SUBMODEL,
        tables=(TablePlan(name=TABLE, rows=canaries, width=1),),
        model=replace(plan.model, dense=1, shapes=""),
        cohorts=CohortsPlan(),
        dp=replace(section, rows=NoisyRows.OWN, row_list=""),
    )
    vector, ring = small.noisy_vector, small.ring
    assert vector is not None
    present = flipped(entropy, canaries)
    every = np.arange(canaries, dtype=np.uint64)
    clients = client_array(map(ClientId, range(small.cohort)))
    found = []
    for border in (vector.largest, (1 << (ring.bits - 1)) - 1):
        exact = np.zeros((canaries, 2), np.int64)
        exact[:, 0] = border + present * vector.top
        rows = TableSum(rows=every, words=ring.from_ints(exact), members={}, below_quorum=0)
        total = StageSum(
            stage=StageId(0), survivors=clients, dense=ring.zeros(2), tables={TableId(0): rows}
        )
        scores = np.zeros(canaries)
        for at in range(rounds):
            secret = entropy.secret(Label.CANARIES, "merging", border, at)
            opened = noise_of(small).on_sum(total, (secret,), RoundId(at))
            part = means(small, opened, union={}).tables[TABLE]
            scores += 1.0
            scores[part.ids] -= np.where(part.mean[:, 0] > 0.0, 1.0, 0.5)
        found.append(Guessing(scores, present))
    return tuple(found)


def drawn_canaries(plan: Plan, rounds: int, canaries: int, entropy: Entropy) -> Mask | None:
    """Which canaries are in the cohort of each round; None where the plan's seed has them all."""
    rule = cohorts_of(plan)
    every = [rule.coins(RoundId(at), canaries, entropy) for at in range(rounds)]
    drawn = [coins for coins in every if coins is not None]
    return np.stack(drawn) if drawn else None


def flipped(entropy: Entropy, canaries: int) -> Mask:
    """A fair coin for each canary."""
    coins = np.frombuffer(entropy.secret(Label.CANARIES, size=canaries).reveal(), np.uint8)
    return np.asarray(coins & 1, np.bool_)


def trained(
    setting: NoiseSetting,
    rows: int,
    examples: Sequence[Examples],
    rounds: int,
    entropy: Entropy,
    learner: MakeLearner,
) -> Iterator[Values]:
    """(clients, rows) for each round: where the clients' updates move the rows."""
    module = Canaries(rows)
    bound = Tables({f"{TABLE}.weight": Table(FIELD)}).bind(module)
    every = np.arange(rows, dtype=np.uint64)
    values = np.zeros((rows, 1), np.float32)
    submodel = Submodel(np.zeros(0, np.float32), {TABLE: TablePart(every, values)}, {TABLE: every})
    trainer = learner(module, bound, steps_of(setting))
    for round_id in range(rounds):
        jobs = [
            Job(client, submodel, own, coins=entropy.secret(Label.CANARIES, round_id, client))
            for client, own in enumerate(examples)
        ]
        found = trainer.train(jobs, round_id=round_id)
        yield np.stack([one.update.tables[TABLE].values[:, 0] for one in found]).astype(np.float64)


def steps_of(setting: NoiseSetting) -> NoisySteps:
    """A step of the trainer under this setting: a clip of 1, divided by 1."""
    drawing = EachExample(setting.rate)
    if setting.unit is Unit.SUBJECT:
        cap = setting.cap if setting.by_records else 0
        return NoisySteps(
            clip=1.0,
            noise=setting.noise,
            steps=1,
            batch=1,
            drawing=OfSubjects(setting.rate, cap, setting.drawn),
        )
    return NoisySteps(clip=1.0, noise=setting.noise, steps=1, batch=1, drawing=drawing)


def sent(present: bool, noise: float, secret: Secret) -> float:
    """User level: what a client sends whose whole update is one steep value, or zeros."""
    values = np.array([[STEEP if present else 0.0]])
    update = ModelUpdate(np.zeros(0), 1, {TABLE: TableUpdate(values, np.ones(1, np.int64))})
    noisy = noisy_update(clipped_update(update, 1.0), 1.0, noise, secret)
    return float(noisy.tables[TABLE].values[0, 0])


def as_it_is(setting: NoiseSetting, *, records: int) -> GaussianNoise:
    """How one client's release moves for a canary with so many records at it."""
    rate = setting.rate
    if setting.unit is Unit.ITEM:
        return GaussianNoise.records(setting.noise, rate, of=records, cap=records)
    if setting.unit is Unit.SUBJECT and setting.drawn is Drawn.RECORDS:
        return GaussianNoise.records(setting.noise, rate, of=records, cap=setting.cap)
    return GaussianNoise.poisson(setting.noise, rate)


def claimed(setting: NoiseSetting, observer: Observer, *, rounds: int, delta: float) -> float:
    """The epsilon that the ledger has for so many rounds."""
    ledger = setting.ledger(rounds)
    return ledger.guarantee(unit=setting.unit, against=observer, delta=delta).epsilon
