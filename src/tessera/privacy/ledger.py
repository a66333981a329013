"""Ledger: what was released, one typed event each, and the guarantee that is left.

Everything that leaves is an event, charged before it is sent. Randomised answers compose exactly
within a period, where the permanent answers cap them, and by addition across periods. An exact
release (the union, counts, sums) is a non-private event: its own epsilon is infinite, and the
number that remains is of the answers alone, "given the union, the sums and counts". An unknown
event is refused.

Every ledger has a budget: the client's own, the plan's, or what twenty periods cost at the client's
probabilities. A leader that begins period after period is out of answers then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.privacy.exposure import epsilon_after, epsilon_longitudinal
from tessera.privacy.guarantee import Adjacency, Guarantee, Trust, Unit
from tessera.privacy.response import IndexPrivacy


class BudgetExceeded(ConfigError):
    """The event would pass the budget. It was not recorded, and nothing may be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexAnswers:
    """One client's randomised answers about the union of one round: all its tables together.

    The unit is one index of one table, so tables do not add up; a derived table adds nothing.
    """

    federation: str
    period: int
    round_id: RoundId
    privacy: IndexPrivacy


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRelease:
    """Something released exactly, such as "the union": no finite epsilon covers it."""

    federation: str
    round_id: RoundId
    what: str


THE_UNION: Final = "the union"
THE_SUMS: Final = "the sums and counts"
"""Of every row that is opened; together with the answers they name holders over several rounds."""

Event = IndexAnswers | ExactRelease

BUDGET_PERIODS: Final = 20
"""Periods that a client answers in unless it, or the plan, sets a budget."""


def default_budget(privacy: IndexPrivacy) -> float:
    """What `BUDGET_PERIODS` periods cost at these probabilities; infinite for exact answers."""
    return BUDGET_PERIODS * epsilon_longitudinal(privacy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An event as it was charged, with the reason given for it."""

    event: Event
    reason: str


class Ledger:
    """One client's record of index privacy spent, against a budget for the conditional epsilon.

    Without a budget of the client's own, the plan's holds; without that one, `default_budget`.
    Entries are plain records in order of spending; made again from them, a ledger is the same.
    """

    def __init__(self, *, budget: float | None = None, entries: Iterable[Entry] = ()) -> None:
        if budget is not None and not budget >= 0.0:
            raise ConfigError(
                f"privacy budget {budget} is not an epsilon", hint="a budget is 0 or more, or inf"
            )
        self.budget = budget
        self._entries: list[Entry] = []
        for entry in entries:  # spent already: a lower budget does not undo it
            self._must_fit(entry.event)
            self._entries.append(entry)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def spend(self, event: Event, *, reason: str, planned: float | None = None) -> None:
        """Charge for what is about to be sent; BudgetExceeded means that it must not be.

        `planned` is the plan's budget, for a client that has none of its own.
        """
        self._must_fit(event)
        if isinstance(event, IndexAnswers):
            budget = self._budget_for(event.privacy, planned)
            spent, after = composed(self._answers()), composed([*self._answers(), event])
            if after > budget:
                whole = epsilon_longitudinal(event.privacy)
                raise BudgetExceeded(
                    f"{reason}: index privacy would reach epsilon {after:.4g} of a budget of "
                    f"{budget:.4g}, and {spent:.4g} is spent",
                    hint=f"a period at these probabilities costs up to {whole:.4g}: choose closer "
                    "ones for the next period, longer periods, or raise the budget ([privacy] "
                    "budget)",
                )
        self._entries.append(Entry(event=event, reason=reason))

    def guarantee(self, *, conditional: bool = True) -> Guarantee:
        """What all entries together promise about one index of this client.

        The number is given the exact releases, which its condition names. With `conditional=False`
        it covers them too, and is infinite as soon as there is one.
        """
        released = list(
            dict.fromkeys(e.event.what for e in self._entries if isinstance(e.event, ExactRelease))
        )
        return Guarantee(
            epsilon=composed(self._answers()) if conditional or not released else math.inf,
            delta=0.0,
            unit=Unit.INDEX,
            adjacency=Adjacency.ADD_OR_REMOVE,
            trust=Trust.LOCAL,
            condition="given " + ", ".join(released) if conditional and released else "",
        )

    def spent_in(self, federation: str, period: int) -> float:
        """The conditional epsilon of one period so far."""
        wanted = (federation, period)
        return composed(a for a in self._answers() if (a.federation, a.period) == wanted)

    def _budget_for(self, privacy: IndexPrivacy, planned: float | None) -> float:
        if self.budget is not None:
            return self.budget
        return default_budget(privacy) if planned is None else planned

    def _answers(self) -> list[IndexAnswers]:
        return [e.event for e in self._entries if isinstance(e.event, IndexAnswers)]

    def _must_fit(self, event: Event) -> None:
        if not isinstance(event, IndexAnswers | ExactRelease):
            raise MisuseError(f"the index ledger does not know how {type(event).__name__} composes")
        if not isinstance(event, IndexAnswers):
            return
        for known in self._answers():
            if known.federation != event.federation:
                continue
            if known.round_id == event.round_id:
                raise MisuseError(
                    f"round {event.round_id} is charged already: its stored answers are sent "
                    "again, and no others are drawn"
                )
            if known.period == event.period and known.privacy != event.privacy:
                raise MisuseError(
                    f"round {event.round_id}: period {event.period} was charged with other "
                    "probabilities, and a period is frozen"
                )


def composed(answers: Iterable[IndexAnswers]) -> float:
    """The epsilon of all these answers: exact within a period, added up across periods."""
    rounds: dict[tuple[str, int], list[IndexPrivacy]] = {}
    for answer in answers:
        rounds.setdefault((answer.federation, answer.period), []).append(answer.privacy)
    return math.fsum(epsilon_after(each[0], len(each)) for each in rounds.values())
