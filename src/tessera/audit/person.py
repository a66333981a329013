"""One person: what a run's server knows of the rows of a single client.

The attacks are those of the audit. Where rows are in the clear they are read (`in_the_clear.py`);
elsewhere they are guessed from everything that all rounds show (`identification.py`, the attack
with linked rows, which has what the others of the server have). Rounds are taken as they come, with
the messages of the server (of two: the leader, which opens the same sums as the helper).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from tessera.audit.attack import RoundSeen
from tessera.audit.epochs import EpochReplay
from tessera.audit.evidence import Circle
from tessera.audit.identification import LINKS, IdentificationAttacks
from tessera.audit.in_the_clear import ClearRows
from tessera.audit.record import decoded, shown
from tessera.audit.round_view import RoundView, Truth
from tessera.audit.two_server_view import EITHER, TwoServerView
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.privacy.index.posterior import DIGITS, IDENTIFIED, Floats, chance_of_guess
from tessera.rounds.select import Shown
from tessera.simulation.views import ViewEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRows:
    """What the server has of one client's rows after a run.

    `right` is how many of them are correctly attributed: those that are read, or else the expected
    number of right best guesses, where clients that the attack cannot tell apart share theirs.
    `sure` are the rows that the server gives the client with a probability above `IDENTIFIED`;
    `by_chance` is how many a random guess gets right on average.
    """

    scheme: str
    rounds: int  # in which the client's update was opened or read
    rows: Ids = field(repr=False)
    right: float
    sure: Ids = field(repr=False)
    by_chance: float
    read: bool  # in the clear: no guess was needed


class PersonWatch:
    """Follows a run for a few clients, and says of any of them what the server has."""

    def __init__(self, plan: Plan, truth: Truth, clients: Iterable[ClientId]) -> None:
        self.plan, self._truth = plan, truth
        rows = np.unique(np.concatenate([truth[c] for c in clients]))
        self._clear: ClearRows | None = None
        self._epochs = EpochReplay(plan) if plan.grouped else None
        self._guessed = IdentificationAttacks(plan.group_plan, truth, rows)
        there = shown(plan)
        if Shown.SHARES in there:
            self._guessed = replace(self._guessed, attacker=EITHER)
        elif Shown.SUMS not in there:
            self._clear = ClearRows(plan, truth)

    def take(self, round_id: RoundId, entries: Iterable[ViewEntry]) -> None:
        """One more round, as the server saw it."""
        if self._epochs is not None:
            for epoch in self._epochs.take(decoded(entries)):
                self._guessed.take(epoch)
            return
        seen = RoundSeen(
            plan=self.plan, round_id=round_id, truth=self._truth, entries=list(decoded(entries))
        )
        if self._clear is not None:
            self._clear.take(*seen.messages)
            return
        views: list[RoundView | TwoServerView] = [*seen.leader, *seen.sums]
        for view in views:
            self._guessed.take(view)

    def rounds_of(self, client: ClientId) -> int:
        """In how many rounds the client's update was opened, with others or alone."""
        if self._clear is not None:
            return self._clear.rounds[client]
        meetings = self._guessed.transcript.meetings
        return sum(client in m.active.clients and bool(m.counted.any()) for m in meetings)

    def known(self, client: ClientId) -> KnownRows:
        rows, none = self._truth[client], np.zeros(0, dtype=np.uint64)
        right, sure, by_chance = 0.0, none, 0.0
        if self._clear is not None:
            sure = np.intersect1d(rows, self._clear.read.get(client, none))
            right = float(len(sure))
        else:
            for circle, found in self._guessed.posteriors(LINKS, client, rows):
                at = self._guessed.transcript.rows[circle.rows]
                right, sure, by_chance = _guessed(circle, found, client, at)
        return KnownRows(
            scheme=self.plan.scheme.value,
            rounds=self.rounds_of(client),
            rows=rows,
            right=right,
            sure=sure,
            by_chance=by_chance,
            read=self._clear is not None,
        )


def _guessed(
    circle: Circle, holds: Floats, client: ClientId, rows: Ids
) -> tuple[float, Ids, float]:
    """Rows correctly attributed, as expected; those for certain; and how many by chance."""
    place = circle.clients.index(client)
    holders = circle.truth.sum(axis=1)
    chances = chance_of_guess(holds, holders, place)
    right = round(float(chances[circle.truth[:, place]].sum()), DIGITS)
    return right, rows[holds[:, place] > IDENTIFIED], float(holders.sum() / len(circle.clients))
