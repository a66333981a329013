"""Guesses: how often a best guess at a row's holder is right, beside what the plan claims for it.

Twice: the share over all (row, holder) pairs, and the most confident 1 % of the guesses, since a
mean hides the few who are identified for certain.

Claims. *Fixed groups*: the bound B (`privacy/index/bound.py`), whatever the observer does and for
any number of rounds. *Levels of the papers* (randomised answers with a finite epsilon): B = 1, so
that the plan says "identified"; what it prints beside that is a level of the answers, and the run
is held against that: how often a guess from the answers alone is right, and at most how sure it can
be. Everywhere else nothing is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from tessera.audit.evidence import Circle
from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.transcript import Bits, Indices, Meeting
from tessera.ids import ClientId
from tessera.plan import Plan, PrivacyPlan
from tessera.privacy.index import exposure
from tessera.privacy.index.bound import Promise, holder_bound
from tessera.privacy.index.posterior import (
    CONFIDENT,
    DIGITS,
    IDENTIFIED,
    Floats,
    best_guesses,
    log_ratio_table,
)
from tessera.rounds import schemes

Answered = npt.NDArray[np.int64]

DRAWS: Final = 300_000
"""Answers that are drawn to find out what they tell, about; by at least `LEAST` rows."""
LEAST: Final = 2000
FEW: Final = 8
"""Above so many holders, rows with similar numbers of them are drawn together."""
BY_BOUND: Final = (
    "Claimed is B on average, h / g for a row that h of g members hold: they look the same"
)


@dataclass(frozen=True, slots=True)
class Claims:
    """At [row, client] of a circle: the share of right guesses, and the most of any one guess."""

    mean: Floats = field(repr=False)
    most: Floats = field(repr=False)


@dataclass(frozen=True, slots=True)
class HolderClaim:
    """What a plan claims for guesses at a row's holder, in words and for each guess: nothing."""

    words: ClassVar[str] = "Nothing makes two clients look the same: B = 1, identified"
    spread: ClassVar[float] = 0.0

    def on(
        self, circle: Circle, meetings: Sequence[Meeting], *, curious_clients: int = 0
    ) -> Claims:
        return Claims(np.ones(circle.truth.shape), np.ones(circle.truth.shape))

    def without_answers(self) -> HolderClaim:
        """Against who looks at participation alone: no answer says who takes part."""
        return self


@dataclass(frozen=True, slots=True)
class GroupClaim(HolderClaim):
    """Of fixed groups: B, for the holders in the group that a client met first."""

    promise: Promise
    words: ClassVar[str] = BY_BOUND

    def on(
        self, circle: Circle, meetings: Sequence[Meeting], *, curious_clients: int = 0
    ) -> Claims:
        first: dict[ClientId, frozenset[ClientId]] = {}
        for one in meetings:
            for client in one.met:
                first.setdefault(client, frozenset(one.met))
        return self.in_groups(
            circle, {first[c] for c in circle.clients}, curious_clients=curious_clients
        )

    def in_groups(
        self,
        circle: Circle,
        groups: Iterable[Collection[ClientId]],
        *,
        curious_clients: int = 0,
    ) -> Claims:
        """B, for a row's holders in each of these groups."""
        bound = np.ones(circle.truth.shape)
        for group in groups:
            here = [i for i, c in enumerate(circle.clients) if c in group]
            held = np.maximum(circle.truth[:, here].sum(axis=1), 1)
            by_holders = {
                int(h): self.promise.bound(holders=int(h), curious_clients=curious_clients)
                for h in np.unique(held)
            }
            bound[:, here] = np.array([by_holders[int(h)] for h in held])[:, None]
        return Claims(bound, bound)


@dataclass(frozen=True, slots=True)
class AnswerClaim(HolderClaim):
    """Of a level of the answers: what they tell about a row's holders, nothing else being known."""

    privacy: PrivacyPlan
    words: ClassVar[str] = (
        "Claimed is what follows from the answers alone; with the sums B = 1, identified"
    )
    spread: ClassVar[float] = 0.02  # how far what is drawn may be off

    def on(
        self, circle: Circle, meetings: Sequence[Meeting], *, curious_clients: int = 0
    ) -> Claims:
        answered, held = answers_by_period(circle, meetings), circle.truth.sum(axis=1)
        level = math.fsum(
            exposure.epsilon_after(self.privacy.index, int(most))
            for most in answered.max(axis=0, initial=0)
            if most
        )
        mean, most = (np.ones(len(held)) for _ in range(2))
        drawn: dict[int, float] = {}
        for holders in np.unique(held).tolist():
            here = held == holders
            more = (
                holders if holders <= FEW else math.ceil(1.25 ** math.ceil(math.log(holders, 1.25)))
            )
            if more not in drawn:
                drawn[more] = answers_alone(self.privacy, answered, more)
            mean[here] = drawn[more]
            most[here] = holder_bound(holders=holders, alike=len(circle.clients), level=level)
        shape = circle.truth.shape
        return Claims(*(np.broadcast_to(part[:, None], shape) for part in (mean, most)))

    def without_answers(self) -> HolderClaim:
        return HolderClaim()


def holder_claim(plan: Plan) -> HolderClaim:
    """What this plan claims for guesses at a row's holder."""
    if plan.grouped:
        return GroupClaim(plan.promise)
    if (
        schemes.of(plan).randomises
        and 0.0 < exposure.epsilon_longitudinal(plan.privacy.index) < math.inf
    ):
        return AnswerClaim(plan.privacy)
    return HolderClaim()


def answers_by_period(circle: Circle, meetings: Sequence[Meeting]) -> Answered:
    """How often each client of a circle answered in each period."""
    place = {c: i for i, c in enumerate(circle.clients)}
    periods = sorted({one.period for one in meetings}) or [0]
    answered = np.zeros((len(place), len(periods)), dtype=np.int64)
    for one in meetings:
        for client in one.answers.clients:
            if client in place:
                answered[place[client], periods.index(one.period)] += 1
    return answered


def answers_alone(plan: PrivacyPlan, answered: Answered, holders: int) -> float:
    """How often the best guess from the answers alone is right, for a row with so many holders.

    Drawn by the plan's probabilities: every client is asked about the row whenever it answers.
    """
    privacy, perturbed = plan.index, plan.perturbation
    clients, periods = answered.shape
    if holders >= clients:
        return 1.0
    rng, table = np.random.default_rng(17), log_ratio_table(privacy, int(answered.max(initial=0)))
    draws = max(LEAST, DRAWS // answered.size)
    truth = rng.random((draws, clients)).argsort(axis=1) < holders
    score = np.zeros((draws, clients))
    for t in range(periods):
        offered = truth
        if perturbed is not None:
            offered = rng.random(truth.shape) < np.where(truth, perturbed.keep, perturbed.add)
        permanent = rng.random(truth.shape) < np.where(offered, privacy.p1, privacy.p2)
        yes = rng.binomial(answered[:, t], np.where(permanent, privacy.p3, privacy.p4))
        ratio = table[answered[:, t], yes]
        if perturbed is not None:
            likely = np.exp(ratio)
            ratio = np.log(perturbed.keep * likely + 1.0 - perturbed.keep)
            ratio -= np.log(perturbed.add * likely + 1.0 - perturbed.add)
        score += ratio
    return float(best_guesses(score, truth, rng).right.mean())


# --- guesses --------------------------------------------------------------------------------------

BEST_GUESS: Final = "best guess at a row's holder"
CONFIDENT_GUESS: Final = "the most confident 1 %"
CLIENT: Final = "client"


@dataclass(slots=True)
class GuessTrials:
    """Best guesses of one attack over all circles."""

    confidence: list[Floats] = field(default_factory=list)
    right: list[Bits] = field(default_factory=list)
    clients: list[Indices] = field(default_factory=list)
    mean: list[Floats] = field(default_factory=list)  # claims, of each pair
    most: list[Floats] = field(default_factory=list)  # of each guess
    chance: list[Floats] = field(default_factory=list)
    identified: int = 0
    identified_right: int = 0

    def add(self, circle: Circle, holds: Floats, claims: Claims, rng: np.random.Generator) -> None:
        found = best_guesses(holds, circle.truth, rng)
        ids = np.array([int(c) for c in circle.clients], dtype=np.intp)
        self.confidence.append(found.confidence)
        self.right.append(found.right)
        self.clients.append(ids[found.clients])
        self.mean.append(claims.mean[circle.truth])
        self.most.append(claims.most[found.rows, found.clients])
        held = circle.truth.sum(axis=1)
        self.chance.append(held[found.rows] / len(circle.clients))
        identified = holds > IDENTIFIED
        self.identified += int(identified.sum())
        self.identified_right += int((identified & circle.truth).sum())

    def findings(
        self, name: str, attacker: str, *, meaning: str, claim: str, spread: float = 0.0
    ) -> Iterator[Finding]:
        if not self.right:
            for what in (BEST_GUESS, CONFIDENT_GUESS):
                yield ClusteredTrials().finding(
                    f"{name}: {what}", claimed=1.0, meaning=meaning, attacker=attacker, kind=name
                )
            return
        right, clients = np.concatenate(self.right), np.concatenate(self.clients)
        most = np.concatenate(self.most)
        mean, chance = float(np.concatenate(self.mean).mean()), np.concatenate(self.chance)
        meaning = self._meaning(meaning, len(right), claim)
        yield self._trials(right, clients).finding(
            f"{name}: {BEST_GUESS}",
            claimed=_rounded(mean),
            meaning=meaning,
            spread=spread if mean < 1.0 else 0.0,
            chance=float(chance.mean()),
            attacker=attacker,
            kind=name,
        )
        at = self._surest(most)
        yield self._trials(right[at], clients[at]).finding(
            f"{name}: {CONFIDENT_GUESS}",
            claimed=_rounded(float(most[at].mean()) if at.size else 1.0),
            meaning=meaning,
            chance=float(chance[at].mean()) if at.size else math.nan,
            attacker=attacker,
            kind=name,
        )

    def _surest(self, most: Floats) -> Indices:
        """The most confident guesses; those that everybody's holding makes certain are left out."""
        confidence = np.concatenate(self.confidence).round(DIGITS)
        lot = np.random.default_rng(19).random(len(confidence))
        order = np.lexsort((lot, -confidence))
        if (most < 1.0).any():
            order = order[most[order] < 1.0]
        return order[: math.ceil(CONFIDENT * len(order))]

    def _meaning(self, meaning: str, pairs: int, claim: str) -> str:
        text = f"{meaning}. Of {pairs:,} pairs of a row and a holder "
        if self.identified:
            right, part = self.identified_right / self.identified, self.identified_right / pairs
            text += f"{part:.1%} are guessed correctly with a confidence above {IDENTIFIED:.0%}; "
            text += f"of all guesses as confident {right:.1%} are right"
        else:
            text += f"none is identified: no guess is above {IDENTIFIED:.0%}"
        return f"{text}. {claim}"

    @staticmethod
    def _trials(right: Bits, clients: Indices) -> ClusteredTrials:
        """Guesses at one client may be right or wrong together."""
        trials = ClusteredTrials()
        for client in np.unique(clients):
            here = right[clients == client]
            trials.add(int(client), int(here.sum()), len(here))
        return trials


def _rounded(claim: float) -> float:
    """A claim of nearly 1 claims nothing."""
    return 1.0 if claim > 0.9995 else claim
