"""Claims: the most that a plan allows a guess at a row's holder to be right.

*Fixed groups*: the naming bound B (`privacy/index/bound.py`), whatever the observer does and for
any number of rounds. *Levels of the papers* (randomised answers with a finite epsilon): B = 1, so
that the plan says "named"; what it prints beside that is a level of the answers, and the run is
held against that: how often a guess from the answers alone is right, and at most how sure it can
be. Everywhere else nothing is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.audit.evidence import Circle
from tessera.audit.transcript import Meeting
from tessera.ids import ClientId
from tessera.plan import Plan
from tessera.privacy.index import exposure
from tessera.privacy.index.bound import naming_bound
from tessera.privacy.index.naming import Floats, best_guesses, log_ratio_table
from tessera.rounds import schemes

Answered = npt.NDArray[np.int64]

DRAWS: Final = 300_000
"""Answers that are drawn to find out what they tell, about; by at least `LEAST` rows."""
LEAST: Final = 2000
BY_LOT: Final = 0.02
"""How far what is drawn may be off."""
FEW: Final = 8
"""Above so many holders, rows with similar numbers of them are drawn together."""


@dataclass(frozen=True, slots=True)
class Claims:
    """At [row, client] of a circle: the share of right guesses, and the most of any one guess."""

    mean: Floats = field(repr=False)
    most: Floats = field(repr=False)

    @classmethod
    def nothing(cls, circle: Circle) -> Claims:
        return cls(np.ones(circle.truth.shape), np.ones(circle.truth.shape))

    @classmethod
    def by_groups(
        cls, plan: Plan, circle: Circle, meetings: Sequence[Meeting], *, curious_clients: int = 0
    ) -> Claims:
        """B, for the holders in the group that a client met first; it is to meet no other."""
        first = _first_groups(meetings)
        return cls.by_bound(
            plan, circle, {first[c] for c in circle.clients}, curious_clients=curious_clients
        )

    @classmethod
    def by_bound(
        cls,
        plan: Plan,
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
                int(h): plan.promise.bound(holders=int(h), curious_clients=curious_clients)
                for h in np.unique(held)
            }
            bound[:, here] = np.array([by_holders[int(h)] for h in held])[:, None]
        return cls(bound, bound)

    @classmethod
    def by_answers(cls, plan: Plan, circle: Circle, meetings: Sequence[Meeting]) -> Claims:
        """What answers about a row tell about its holders, nothing else being known."""
        answered, held = answers_by_period(circle, meetings), circle.truth.sum(axis=1)
        level = math.fsum(
            exposure.epsilon_after(plan.privacy.index, int(most))
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
                drawn[more] = answers_alone(plan, answered, more)
            mean[here] = drawn[more]
            most[here] = naming_bound(holders=holders, alike=len(circle.clients), level=level)
        shape = circle.truth.shape
        return cls(*(np.broadcast_to(part[:, None], shape) for part in (mean, most)))


def has_level(plan: Plan) -> bool:
    """Whether the plan prints a level of the answers that says something."""
    randomised = schemes.of(plan).randomises and not plan.grouped
    return randomised and 0.0 < exposure.epsilon_longitudinal(plan.privacy.index) < math.inf


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


def answers_alone(plan: Plan, answered: Answered, holders: int) -> float:
    """How often the best guess from the answers alone is right, for a row with so many holders.

    Drawn by the plan's probabilities: every client is asked about the row whenever it answers.
    """
    privacy, perturbed = plan.privacy.index, plan.privacy.perturbation
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


def _first_groups(meetings: Sequence[Meeting]) -> Mapping[ClientId, frozenset[ClientId]]:
    found: dict[ClientId, frozenset[ClientId]] = {}
    for one in meetings:
        for client in one.met:
            found.setdefault(client, frozenset(one.met))
    return found
