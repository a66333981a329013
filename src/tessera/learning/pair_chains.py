"""Following a history in sums of pairs, link by link, from one item that is known.

In exact sums a pair that one person holds has that person's weight, exp(-d / tau), and so says how
many places d + 1 its items are apart (`models/pairs.py`). Such pairs lead from a known item to
others, each with its place in a history; those of one person agree with each other on their places.
The attack takes the largest set that agrees, and goes on from there, on and back: an item is taken
if several pairs with one holder put it into the same place, and none contradicts. Without times
what goes together with all is taken. In sums that show no holders, or have noise, the attack can
only go to the largest cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.data.sequences import Sequences
from tessera.learning.models.pairs import Pairs

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

AGREE: Final = 4
"""Pairs with one holder that have to put an item into its place."""
NEAR: Final = 400
"""Neighbours of the known item that are compared with each other."""
STEPS: Final = 20
"""Links that are followed where nothing says when to stop."""
ROUNDED: Final = 5e-4
"""How far a weight may be from one of a single person's, for its rounding."""


@dataclass(frozen=True)
class PairSums:
    """Cells of one table of sums, ascending, as somebody sees them: (a, b) is a * items + b.

    `holders` are those of each cell, where they are seen. Of ordered pairs a comes before b; of
    others a is the smaller one.
    """

    pairs: Pairs
    cell: Ints = field(repr=False)
    weight: Doubles = field(repr=False)
    holders: Ints | None = field(default=None, repr=False)

    @classmethod
    def of_rows(cls, pairs: Pairs, row: Ints, weight: Doubles, holders: Ints | None) -> PairSums:
        """Of rows of the virtual table: those of pairs with what came next, where there are two."""
        start = pairs.items**2 if pairs.tau else 0
        kept = (row >= start) & ((row - start) // pairs.items != (row - start) % pairs.items)
        return cls(
            pairs, row[kept] - start, weight[kept], None if holders is None else holders[kept]
        )

    def published(self, min_holders: int) -> PairSums:
        """What a reader may have of it, at most: cells with so many holders, and not how many."""
        assert self.holders is not None
        kept = self.holders >= min_holders
        return PairSums(self.pairs, self.cell[kept], self.weight[kept])

    # --- followed ---------------------------------------------------------------------------------

    def followed(self, start: int) -> list[int]:
        """The items that the attack puts into one history with this one, without it."""
        if self.holders is None:
            return self._largest(start)
        if not self.pairs.tau:
            return self._together(start)
        return self._placed(start)

    def _largest(self, start: int) -> list[int]:
        """Always to the largest cell of the last item."""
        chain = [start]
        while len(chain) <= STEPS:
            begin, end = np.searchsorted(
                self.cell, [chain[-1] * self._m, (chain[-1] + 1) * self._m]
            )
            order = begin + np.argsort(-self.weight[begin:end], kind="stable")
            after = (int(self.cell[at] % self._m) for at in order)
            found = next((item for item in after if item not in chain), None)
            if found is None:
                break
            chain.append(found)
        return chain[1:]

    def _placed(self, start: int) -> list[int]:
        """Items by their place in the history, from pairs with one holder that agree on it."""
        found: dict[int, int] = {}
        votes: Counter[tuple[int, int]] = Counter()
        agreed: list[tuple[int, int]] = []

        def take(item: int, place: int) -> None:
            found[item] = place
            for ahead, way in ((True, 1), (False, -1)):
                others, lags = self._alone(item, ahead=ahead)
                places = place + way * (lags + 1)
                for vote in zip(others.tolist(), places.tolist(), strict=True):
                    votes[vote] += 1
                    if votes[vote] == AGREE:
                        agreed.append(vote)

        take(start, 0)
        for item, place in self._agreeing(sorted(votes, key=lambda vote: abs(vote[1]))[:NEAR]):
            take(item, place)
        while agreed:
            item, place = agreed.pop(0)
            taken = item in found or place in found.values()
            if not taken and self._fits(found, item, place):
                take(item, place)
        return list(found)[1:]

    def _agreeing(self, votes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of the neighbours of one item, one that most others agree with, and these."""
        if not votes:
            return []
        item, place = np.array(votes).T
        apart = place[None, :] - place[:, None]  # of the second after the first
        weight, alone = self._looked_up(item[:, None] * self._m + item[None, :])
        agree = alone & (apart > 0) & (np.abs(weight - self._q ** (apart - 1.0)) < ROUNDED)
        agree |= agree.T
        most = int(agree.sum(axis=1).argmax())
        chosen = [at for at in range(len(votes)) if at == most or agree[most, at]]
        taken: dict[int, int] = {}
        for at in sorted(chosen, key=lambda one: -int(agree[one, chosen].sum())):
            if votes[at][1] not in taken.values() and self._fits(taken, *votes[at]):
                taken[votes[at][0]] = votes[at][1]
        return list(taken.items())

    def _fits(self, found: Mapping[int, int], item: int, place: int) -> bool:
        """Whether all pairs with these are there, of at least one person's weight."""
        if not found:
            return True
        others, places = np.array(list(found)), np.array(list(found.values()))
        near = (np.abs(places - place) < self.pairs.window) & (places != place)
        others, apart = others[near], place - places[near]
        cell = np.where(apart > 0, others * self._m + item, item * self._m + others)
        weight, alone = self._looked_up(cell)
        single = self._q ** (np.abs(apart) - 1.0)
        return bool(((weight > single - ROUNDED) & ~(alone & (weight > single + ROUNDED))).all())

    def _together(self, start: int) -> list[int]:
        """Items that go together with all found before, and with one of them in nobody else."""
        chain, at = [start], 0
        while at < len(chain):
            for item in self._alone(chain[at], ahead=True)[0].tolist():
                low, high = np.minimum(chain, item), np.maximum(chain, item)
                if item not in chain and self._looked_up(low * self._m + high)[0].all():
                    chain.append(item)
            at += 1
        return chain[1:]

    # --- looked up --------------------------------------------------------------------------------

    @property
    def _m(self) -> int:
        return self.pairs.items

    @property
    def _q(self) -> float:
        return float(np.exp(-1.0 / self.pairs.tau))

    def _looked_up(self, cell: Ints) -> tuple[Doubles, npt.NDArray[np.bool_]]:
        """Weights of cells, 0 of those that are not there, and whether one person holds them."""
        assert self.holders is not None
        at = np.minimum(np.searchsorted(self.cell, cell), len(self.cell) - 1)
        there = self.cell[at] == cell
        return np.where(there, self.weight[at], 0.0), there & (self.holders[at] == 1)

    def _alone(self, item: int, *, ahead: bool) -> tuple[Ints, Ints]:
        """The items of pairs with one holder and the places between, in one direction or both."""
        ways = (0, 1) if not self.pairs.tau else (0,) if ahead else (1,)
        parts = []
        for way in ways:
            own, other, lag = self._singles[way]
            begin, end = np.searchsorted(own, [item, item + 1])
            parts.append((other[begin:end], lag[begin:end]))
        items, lags = (np.concatenate(column) for column in zip(*parts, strict=True))
        return items, lags

    @cached_property
    def _singles(self) -> list[tuple[Ints, Ints, Ints]]:
        """Pairs with one holder by their first item, then by their second."""
        assert self.holders is not None
        alone = self.holders == 1
        a, b = self.cell[alone] // self._m, self.cell[alone] % self._m
        lag = np.zeros(len(a), np.int64)
        if self.pairs.tau:
            least = np.maximum(self.weight[alone], 1e-6)
            lag = np.rint(-self.pairs.tau * np.log(least)).astype(np.int64)
        back = np.argsort(b, kind="stable")
        return [(a, b, lag), (b[back], a[back], lag[back])]


def linked(found: Sequence[int], histories: Iterable[Ints]) -> float:
    """The share of one history that was found, less what is not in it; of the one that fits best.

    Which of those who hold the known item it is, any second item tells.
    """
    shares = []
    for own in histories:
        right = int(np.isin(found, own).sum())
        shares.append((2 * right - len(found)) / max(1, len(own) - 1))
    return min(1.0, max(0.0, *shares, 0.0))


def known_row_figure(sums: PairSums, events: Sequences, tries: int = 5) -> float:
    """The mean of it over known items of people who stand evenly apart; in sums that show no
    holders, of the histories of these people."""
    users = np.unique(np.linspace(0, events.users - 1, tries).astype(np.int64))
    person = np.repeat(np.arange(events.users), events.counts)
    shares = []
    for user in users[events.counts[users] > 1].tolist():
        own = events.of(user)
        start = int(own[len(own) // 2])
        holders = np.array([user]) if sums.holders is None else person[events.item == start]
        shares.append(linked(sums.followed(start), (events.of(int(one)) for one in holders)))
    return float(np.mean(shares)) if shares else 0.0
