"""Naming: whose a row is, from everything that all rounds of a run show.

Four attacks, each as good as `privacy/index/posterior.py` makes it:

- *counts against answers*, by the server. A count is positive exactly if a holder is in its sum, so
  that over the rounds the counts of a row copy its holder's own answers and presence.
- *participation*, by the server. The same without the answers: who was there when a row was in the
  union or changed, and who when it was not. Newcomers, leavers and dropouts are named by it.
- *movement*, by one curious client that names every row: it is told the groups of all rows, and
  sees until its next round which of them moved. Its view is computed from the server's: what moves
  follows from the opened sums.
- *linked rows*, by the server, or either of two: the first attack (without answers the second),
  and rows whose deltas are collinear have one holder (`links.py`).

Each is held against what the plan claims for a guess (`claims.py`), twice: the share of right best
guesses over all (row, holder) pairs, and the most confident 1 % of the guesses, since a mean hides
the few who are named for certain. Prior numbers of holders are the true ones, as the formulas of
`privacy/index/exposure.py` take them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tessera.audit import evidence
from tessera.audit.evidence import Circle, circles
from tessera.audit.finding import Finding
from tessera.audit.guesses import BY_BOUND, BY_LOT, CLIENT, Claims, GuessTrials, has_level
from tessera.audit.record import RoundView, Truth
from tessera.audit.transcript import Indices, Meeting, Transcript, common_holders
from tessera.audit.two_server import EITHER
from tessera.audit.two_server_view import TwoServerView
from tessera.ids import SERVER, ClientId
from tessera.learning.tables.arrays import Ids
from tessera.plan import Plan
from tessera.privacy.index.posterior import Floats
from tessera.rounds import schemes

COUNTS: Final = "counts against answers"
PARTICIPATION: Final = "participation"
MOVEMENT: Final = "movement"
LINKS: Final = "linked rows"
ATTACKS: Final = (COUNTS, PARTICIPATION, MOVEMENT, LINKS)
BY_ANSWERS: Final = "Claimed is what follows from the answers alone; with the sums B = 1, named"
BY_NOTHING: Final = "Nothing makes two clients look the same: B = 1, named"
MEANINGS: Final = {
    COUNTS: "a row's counts and unions copy what its holders answered, round by round",
    PARTICIPATION: "who took part when a row was in the union or changed, and who when not",
    MOVEMENT: "one client that names every row gets their groups, and sees which rows changed",
    LINKS: "rows whose deltas are collinear have one holder, in the group of each of them",
}


@dataclass(slots=True)
class NamingAttacks:
    """Takes every round, and attacks once all are there."""

    plan: Plan
    truth: Truth = field(repr=False)
    only: Ids | None = field(default=None, repr=False)  # the rows to attack; by chance if not given
    transcript: Transcript = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.transcript = Transcript(self.plan, self.truth, self.only)

    def take(self, view: RoundView) -> None:
        self.transcript.take(view)

    def take_two_server(self, view: TwoServerView) -> None:
        self.transcript.take_two_server(view)

    def posteriors(self, name: str, client: ClientId, rows: Ids) -> Iterator[tuple[Circle, Floats]]:
        """One attack on some rows of a client, where it met others: P(it holds) by row and client.

        Nothing if no sum with the client in it was opened.
        """
        for circle in self._circles():
            if client in circle.clients:
                kept = np.isin(self.transcript.rows[circle.rows], rows)
                part = Circle(circle.clients, circle.truth[kept], circle.rows[kept])
                attack = self._attack(part, _of(circle, self.transcript.meetings))[name]
                yield attack[0], attack[1]

    def _circles(self) -> list[Circle]:
        rows = self.transcript.rows
        owned = {c: np.isin(rows, held) for c, held in self.truth.items()}
        return circles(self.transcript.meetings, owned)

    def findings(self) -> list[Finding]:
        plan, found = self.plan, self._circles()
        two = schemes.of(plan).two_servers
        guesses = {name: GuessTrials() for name in self._tried}
        for number, circle in enumerate(found):
            meetings = _of(circle, self.transcript.meetings)
            for name, (seen, holds, claims) in self._attack(circle, meetings).items():
                if seen.rows.size and len(seen.clients) > 1:
                    rng = np.random.default_rng([number, ATTACKS.index(name), 23])
                    guesses[name].add(seen, holds, claims, rng)
        server = EITHER if two else SERVER
        return [
            finding
            for name, each in guesses.items()
            for finding in each.findings(
                name,
                CLIENT if name == MOVEMENT else server,
                meaning=MEANINGS[name],
                spread=BY_LOT if self._claim_of(name) == BY_ANSWERS else 0.0,
                claim=self._claim_of(name),
            )
        ]

    def _claim_of(self, name: str) -> str:
        """What this attack is held against, in words. No answer says who takes part."""
        if self.plan.grouped:
            return BY_BOUND
        return BY_ANSWERS if has_level(self.plan) and name != PARTICIPATION else BY_NOTHING

    @property
    def _tried(self) -> tuple[str, ...]:
        """Two servers' clients are told nothing of each other; whole models have no answers."""
        entry = schemes.of(self.plan)
        if entry.two_servers:
            return (PARTICIPATION, LINKS)
        return ATTACKS if entry.by_rows else (PARTICIPATION, MOVEMENT, LINKS)

    def _attack(
        self, circle: Circle, meetings: Sequence[Meeting]
    ) -> dict[str, tuple[Circle, Floats, Claims]]:
        plan, tried = self.plan, self._tried
        found = {}
        claims = self._claims(circle, meetings)
        if COUNTS in tried or LINKS in tried:
            holds = circle.holds(plan, evidence.of_server(plan, meetings))
            if COUNTS in tried:
                found[COUNTS] = circle, holds, claims
            if LINKS in tried:
                found[LINKS] = circle, common_holders(holds, _clusters(circle, meetings)), claims
        present = circle.holds(plan, evidence.of_participation(plan, meetings))
        silent = self._claim_of(PARTICIPATION) == BY_NOTHING
        found[PARTICIPATION] = circle, present, Claims.nothing(circle) if silent else claims
        if MOVEMENT in tried:
            curious = _most_present(circle, meetings)
            others = circle.without(curious)
            moved = others.holds(plan, evidence.of_client(plan, self.transcript.meetings, curious))
            found[MOVEMENT] = others, moved, self._claims(others, meetings, curious_clients=1)
        return {name: found[name] for name in tried}

    def _claims(
        self, circle: Circle, meetings: Sequence[Meeting], *, curious_clients: int = 0
    ) -> Claims:
        if self.plan.grouped:
            return Claims.by_groups(self.plan, circle, meetings, curious_clients=curious_clients)
        if has_level(self.plan):
            return Claims.by_answers(self.plan, circle, meetings)
        return Claims.nothing(circle)


def _of(circle: Circle, meetings: Sequence[Meeting]) -> list[Meeting]:
    here = set(circle.clients)
    return [m for m in meetings if here & {*m.present, *m.answers.clients, *m.active.clients}]


def _most_present(circle: Circle, meetings: Sequence[Meeting]) -> ClientId:
    """The client that took part most often; of several the first."""
    there = {c: sum(c in m.answers.clients for m in meetings) for c in circle.clients}
    return max(circle.clients, key=lambda c: there[c])


def _clusters(circle: Circle, meetings: Sequence[Meeting]) -> Iterator[tuple[Indices, Indices]]:
    """Linked rows of every meeting, and who is in the sums of all of them."""
    place = {c: i for i, c in enumerate(circle.clients)}
    for one in meetings:
        links, active = one.links[circle.rows], one.active.bits[:, circle.rows]
        counts = one.counts[circle.rows]
        who = np.array([place[c] for c in one.active.clients], dtype=np.intp)
        for label in np.unique(links[links > 0]):
            together = np.flatnonzero(links == label)
            yield together, who[active[:, together].all(axis=1)]
            for count in np.unique(counts[together]):
                alike = together[counts[together] == count]
                if 1 < len(alike) < len(together):
                    yield alike, who[active[:, alike].all(axis=1)]
