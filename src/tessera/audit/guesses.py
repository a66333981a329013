"""Guesses: how often a best guess at a row's holder is right, beside what the plan claims for it.

Twice: the share over all (row, holder) pairs, and the most confident 1 % of the guesses, since a
mean hides the few who are identified for certain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tessera.audit.claims import Claims
from tessera.audit.evidence import Circle
from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.links import Indices
from tessera.audit.transcript import Bits
from tessera.privacy.index.naming import CONFIDENT, DIGITS, NAMED, Floats, best_guesses

BEST_GUESS: Final = "best guess at a row's holder"
CONFIDENT_GUESS: Final = "the most confident 1 %"
CLIENT: Final = "client"
BY_BOUND: Final = (
    "Claimed is B on average, h / g for a row that h of g members hold: they look the same"
)


@dataclass(slots=True)
class GuessTrials:
    """Best guesses of one attack over all circles."""

    confidence: list[Floats] = field(default_factory=list)
    right: list[Bits] = field(default_factory=list)
    clients: list[Indices] = field(default_factory=list)
    mean: list[Floats] = field(default_factory=list)  # claims, of each pair
    most: list[Floats] = field(default_factory=list)  # of each guess
    chance: list[Floats] = field(default_factory=list)
    named: int = 0
    named_right: int = 0

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
        named = holds > NAMED
        self.named += int(named.sum())
        self.named_right += int((named & circle.truth).sum())

    def findings(
        self, name: str, attacker: str, *, meaning: str, claim: str, spread: float = 0.0
    ) -> Iterator[Finding]:
        if not self.right:
            nothing = ClusteredTrials()
            for what in (BEST_GUESS, CONFIDENT_GUESS):
                untested = nothing.finding(f"{name}: {what}", claimed=1.0, meaning=meaning)
                yield replace(untested, attacker=attacker, kind=name)
            return
        right, clients = np.concatenate(self.right), np.concatenate(self.clients)
        most = np.concatenate(self.most)
        mean, chance = float(np.concatenate(self.mean).mean()), np.concatenate(self.chance)
        whole = self._trials(right, clients).finding(
            f"{name}: {BEST_GUESS}",
            claimed=_rounded(mean),
            meaning=self._meaning(meaning, len(right), claim),
            spread=spread if mean < 1.0 else 0.0,
            chance=float(chance.mean()),
        )
        yield replace(whole, attacker=attacker, kind=name)
        at = self._surest(most)
        claimed = float(most[at].mean()) if at.size else 1.0
        few = self._trials(right[at], clients[at]).finding(
            f"{name}: {CONFIDENT_GUESS}",
            claimed=_rounded(claimed),
            meaning=self._meaning(meaning, len(right), claim),
            chance=float(chance[at].mean()) if at.size else math.nan,
        )
        yield replace(few, attacker=attacker, kind=name)

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
        if self.named:
            right, part = self.named_right / self.named, self.named_right / pairs
            text += f"{part:.1%} are identified; of guesses above {NAMED:.0%} {right:.1%} are right"
        else:
            text += f"none is identified: no guess is above {NAMED:.0%}"
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
