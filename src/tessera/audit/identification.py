"""Identification: whose a row is, from everything that all rounds of a run show.

Four attacks, each as good as `privacy/index/posterior.py` makes it:

- *counts against answers*, by the server. A count is positive exactly if a holder is in its sum, so
  that over the rounds the counts of a row copy its holder's own answers and presence.
- *participation*, by the server. The same without the answers: who was there when a row was in the
  union or changed, and who when it was not. It identifies newcomers, leavers and dropouts.
- *movement*, by one curious client that names every row: it is told the groups of all rows, and
  sees until its next round which of them moved. Its view is computed from the server's: what moves
  follows from the opened sums.
- *linked rows*, by the server, or either of two: the first attack (without answers the second),
  and rows whose deltas are collinear have one holder (`transcript.py`).

Each is held against what the plan claims for a guess (`guesses.py`), twice: the share of right best
guesses over all (row, holder) pairs, and the most confident 1 % of the guesses, since a mean hides
the few who are identified for certain. Prior numbers of holders are the true ones, as the formulas
of `privacy/index/exposure.py` take them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tessera.audit import evidence
from tessera.audit.evidence import Circle, circles
from tessera.audit.finding import Finding
from tessera.audit.guesses import CLIENT, Claims, GuessTrials, HolderClaim, holder_claim
from tessera.audit.round_view import RoundView, Truth
from tessera.audit.transcript import Indices, Meeting, Transcript, common_holders
from tessera.audit.two_server_view import EITHER, TwoServerView
from tessera.ids import SERVER, ClientId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.privacy.index.posterior import Floats
from tessera.rounds import schemes

COUNTS: Final = "counts against answers"
PARTICIPATION: Final = "participation"
MOVEMENT: Final = "movement"
LINKS: Final = "linked rows"
ATTACKS: Final = (COUNTS, PARTICIPATION, MOVEMENT, LINKS)
MEANINGS: Final = {
    COUNTS: "a row's counts and unions copy what its holders answered, round by round",
    PARTICIPATION: "who took part when a row was in the union or changed, and who when not",
    MOVEMENT: "one client that names every row gets their groups, and sees which rows changed",
    LINKS: "rows whose deltas are collinear have one holder, in the group of each of them",
}


@dataclass(slots=True)
class IdentificationAttacks:
    """Takes every round, and attacks once all are there."""

    plan: Plan
    truth: Truth = field(repr=False)
    only: Ids | None = field(default=None, repr=False)  # the rows to attack; by chance if not given
    attacker: str = SERVER
    transcript: Transcript = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.transcript = Transcript(self.plan, self.truth, self.only)

    def take(self, view: RoundView | TwoServerView) -> None:
        self.transcript.take(view)

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
        guesses = {name: GuessTrials() for name in self._tried}
        for number, circle in enumerate(self._circles()):
            meetings = _of(circle, self.transcript.meetings)
            for name, (seen, holds, claims) in self._attack(circle, meetings).items():
                if seen.rows.size and len(seen.clients) > 1:
                    rng = np.random.default_rng([number, ATTACKS.index(name), 23])
                    guesses[name].add(seen, holds, claims, rng)
        found: list[Finding] = []
        for name, each in guesses.items():
            claim = self._claim(name)
            found += each.findings(
                name,
                CLIENT if name == MOVEMENT else self.attacker,
                meaning=MEANINGS[name],
                spread=claim.spread,
                claim=claim.words,
            )
        return found

    def _claim(self, name: str) -> HolderClaim:
        claim = holder_claim(self.plan)
        return claim.without_answers() if name == PARTICIPATION else claim

    @property
    def _tried(self) -> tuple[str, ...]:
        """Two servers' clients are told nothing of each other; whole models have no answers."""
        if self.attacker == EITHER:
            return (PARTICIPATION, LINKS)
        return ATTACKS if schemes.of(self.plan).by_rows else (PARTICIPATION, MOVEMENT, LINKS)

    def _attack(
        self, circle: Circle, meetings: Sequence[Meeting]
    ) -> dict[str, tuple[Circle, Floats, Claims]]:
        plan, tried = self.plan, self._tried
        claims = self._claim(COUNTS).on(circle, meetings)
        holds = circle.holds(plan, evidence.of_server(plan, meetings))
        present = circle.holds(plan, evidence.of_participation(plan, meetings))
        found = {
            COUNTS: (circle, holds, claims),
            LINKS: (circle, common_holders(holds, _clusters(circle, meetings)), claims),
            PARTICIPATION: (circle, present, self._claim(PARTICIPATION).on(circle, meetings)),
        }
        if MOVEMENT in tried:
            curious = _most_present(circle, meetings)
            others = circle.without(curious)
            moved = others.holds(plan, evidence.of_client(plan, self.transcript.meetings, curious))
            against = self._claim(MOVEMENT).on(others, meetings, curious_clients=1)
            found[MOVEMENT] = others, moved, against
        return {name: found[name] for name in tried}


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
