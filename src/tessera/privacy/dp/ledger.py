"""Ledger: what was released, one typed event each, and the guarantees that are left.

Everything that leaves is an event, charged before it is sent. Per index, randomised answers compose
exactly within a period, where the permanent answers cap them, and by addition across periods. Noisy
sums compose by their privacy losses (`privacy/dp/accounting.py`), and only where unit, adjacency
and observer are one; what is about a smaller unit is converted upwards by a stated rule
(`privacy/dp/events.py`). An exact release (the union, counts, sums) is a non-private event: its
own epsilon is infinite, and the number that remains is "given the union, the sums and counts". What
has no account is refused by name and never skipped.

Every ledger has a budget per index: the client's own, the plan's, or what twenty periods cost at
the client's probabilities. A leader that begins period after period is out of answers then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tessera.errors import ConfigError
from tessera.privacy.dp.accounting import epsilon
from tessera.privacy.dp.events import (
    EVENTS,
    WHICH_ROWS,
    Bounds,
    Event,
    IndexAnswers,
    NoisySum,
    answers_as,
    held_by,
    noise_as,
)
from tessera.privacy.dp.guarantee import Adjacency, Guarantee, Observer, Trust, Unit
from tessera.privacy.dp.mechanism import NoAccount, Parts
from tessera.privacy.index.exposure import epsilon_after, epsilon_longitudinal
from tessera.privacy.index.response import IndexPrivacy

BUDGET_PERIODS: Final = 20
"""Periods that a client answers in unless it, or the plan, sets a budget."""


def default_budget(privacy: IndexPrivacy) -> float:
    """What `BUDGET_PERIODS` periods cost at these probabilities; infinite for exact answers."""
    return BUDGET_PERIODS * epsilon_longitudinal(privacy)


class BudgetExceeded(ConfigError):
    """The event would pass the budget. It was not recorded, and nothing may be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An event as it was charged, with the reason given for it."""

    event: Event
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The most that may be spent per unit against one observer, given the exact releases."""

    epsilon: float
    delta: float
    unit: Unit
    against: Observer

    def __post_init__(self) -> None:
        if not self.epsilon >= 0.0:
            raise ConfigError(
                f"privacy budget {self.epsilon} is not an epsilon",
                hint="a budget is 0 or more, or inf",
            )


class Ledger:
    """One client's record of privacy spent, against a budget per index and limits per other unit.

    Without a budget of the client's own, the plan's holds; without that one, `default_budget`.
    Entries are plain records in order of spending; made again from them, a ledger is the same.
    `bounds` say how events about small units are converted to larger ones.
    """

    def __init__(
        self,
        *,
        budget: float | None = None,
        limits: Iterable[Limit] = (),
        bounds: Bounds = Bounds(),  # noqa: B008 (frozen)
        entries: Iterable[Entry] = (),
    ) -> None:
        if budget is not None and not budget >= 0.0:
            raise ConfigError(
                f"privacy budget {budget} is not an epsilon", hint="a budget is 0 or more, or inf"
            )
        self.budget = budget
        self.limits = tuple(limits)
        self.bounds = bounds
        self._entries: list[Entry] = []
        for entry in entries:  # spent already: a lower budget does not undo it
            self._must_fit(entry.event)
            self._entries.append(entry)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def spend(
        self,
        event: Event,
        *,
        reason: str,
        planned: float = 0.0,
        limits: Iterable[Limit] = (),
    ) -> None:
        """Charge for what is about to be sent; BudgetExceeded means that it must not be.

        `planned` is the plan's budget per index, for a client that has none of its own (0: the
        plan has none, either); `limits` are the plan's for other units, beside this client's own.
        """
        self._admit(event, reason, planned, limits)

    def _admit(self, event: Event, reason: str, planned: float, limits: Iterable[Limit]) -> None:
        self._must_fit(event)
        for answer in event.answers:
            budget = self._budget_for(answer.privacy, planned)
            spent, after = composed(self._answers()), composed([*self._answers(), answer])
            if after > budget:
                whole = epsilon_longitudinal(answer.privacy)
                raise BudgetExceeded(
                    f"{reason}: index privacy would reach epsilon {after:.4g} of a budget of "
                    f"{budget:.4g}, and {spent:.4g} is spent",
                    hint=f"a period at these probabilities costs up to {whole:.4g}: choose closer "
                    "ones for the next period, longer periods, or raise the budget ([privacy] "
                    "budget)",
                )
        self._entries.append(Entry(event=event, reason=reason))
        try:
            for limit in (*self.limits, *limits):
                self._must_keep(limit, reason)
        except (BudgetExceeded, NoAccount):
            self._entries.pop()
            raise

    def has(self, event: Event) -> bool:
        """Whether exactly this is charged already."""
        return any(entry.event == event for entry in self._entries)

    def affords(self, events: Iterable[Event], limits: Iterable[Limit] = ()) -> bool:
        """Whether all limits would be kept with these events, too; nothing is charged."""
        before, limits = len(self._entries), tuple(limits)
        try:
            for event in events:
                self._admit(event, "in advance", 0.0, limits)
        except BudgetExceeded:
            return False
        finally:
            del self._entries[before:]
        return True

    def guarantee(
        self,
        *,
        unit: Unit = Unit.INDEX,
        against: Observer = Observer.LEADER,
        delta: float = 0.0,
        conditional: bool = True,
    ) -> Guarantee:
        """What all entries together promise about one unit, against one observer.

        The number is given the exact releases, which its condition names. With `conditional=False`
        it covers them too, and is infinite as soon as there is one. Noise has no epsilon at a delta
        of 0: per index the number is then of the answers, given noisy sums as well, as it is where
        no noise is for an index. Else it is of both, and infinite where what is exact shows which
        rows there are, or answers are drawn again.
        """
        of_answers = unit is Unit.INDEX and not (delta and self._noisy_per_index())
        released = list(dict.fromkeys(self._released(against, noisy=of_answers)))
        if (released and not conditional) or (not of_answers and self._tells_rows(unit, released)):
            level = math.inf
        elif of_answers:
            level = composed(a for a in self._answers() if against in a.against)
        else:
            parts = self.parts(unit, against)
            level = (
                math.inf
                if parts is None
                else epsilon(parts, adjacency=self._adjacency(unit, against), delta=delta)
            )
        return Guarantee(
            epsilon=level,
            delta=0.0 if of_answers else delta,
            unit=unit,
            adjacency=self._adjacency(unit, against),
            trust=Trust.LOCAL if of_answers else self._trust(against),
            against=against,
            condition="given " + ", ".join(released) if conditional and released else "",
            assumption="" if of_answers else self._assumption(unit, against),
            per_user=self._per_user(against, delta)
            if unit is Unit.INDEX and not of_answers
            else None,
        )

    def _per_user(self, against: Observer, delta: float) -> float:
        """The number beside that of an index; infinite where there is none."""
        try:
            return self.guarantee(unit=Unit.USER, against=against, delta=delta).epsilon
        except NoAccount:
            return math.inf

    def guarantees(
        self, *, delta: float, units: Iterable[Unit], observers: Iterable[Observer]
    ) -> Iterator[Guarantee | NoAccount]:
        """One guarantee per unit and observer; where there is no account, why."""
        observers = tuple(observers)
        for unit in units:
            for observer in observers:
                try:
                    yield self.guarantee(unit=unit, against=observer, delta=delta)
                except NoAccount as refusal:
                    yield refusal

    def parts(self, unit: Unit, against: Observer) -> Parts | None:
        """What has to be composed for one unit; None where this observer sees something bare."""
        adjacency = self._adjacency(unit, against)
        found: list[Parts] = []
        for event in self._noisy():
            mechanism = event.view(against)
            if mechanism is None:
                return None
            found.append(noise_as(event, mechanism, unit, self.bounds))
        answers = [a for a in self._answers() if against in a.against]
        if answers:
            level = answers_as(composed(answers), unit, adjacency, self.bounds)
            found.append(((level, 1),))
        return tuple(part for parts in found for part in parts)

    def _budget_for(self, privacy: IndexPrivacy, planned: float) -> float:
        if self.budget is not None:
            return self.budget
        return planned or default_budget(privacy)

    def _released(self, against: Observer, *, noisy: bool) -> Iterator[str]:
        """What is exact; and `noisy` sums, for a number of answers alone."""
        for entry in self._entries:
            yield from entry.event.exact_to(against)
            yield from (event.what for event in entry.event.noisy if noisy)

    def _noisy_per_index(self) -> bool:
        return any(event.unit is Unit.INDEX for event in self._noisy())

    def _tells_rows(self, unit: Unit, released: Iterable[str]) -> bool:
        """Whether an index has no number, whatever the noise: its row can be read elsewhere.

        An answer that is drawn again in a later round, or for a later period, is a further release
        about the row, and over the rounds the noisy sums tell the answers apart.
        """
        if unit is not Unit.INDEX:
            return False
        answers = self._answers()
        once = all((a.privacy.p3, a.privacy.p4) == (1.0, 0.0) for a in answers)
        periods = {(a.federation, a.period) for a in answers}
        redrawn = len(periods) > 1 or (len(answers) > 1 and not once)
        return redrawn or not WHICH_ROWS.isdisjoint(released)

    def _adjacency(self, unit: Unit, against: Observer) -> Adjacency:
        """The two worlds of the events about this unit and of those converted to it."""
        named = {
            event.adjacency: event.what
            for event in self._noisy()
            if event.unit is unit or (event.unit is Unit.ITEM and unit is Unit.SUBJECT)
            if event.shown_to(against)
        }
        if len(named) > 1:
            worlds = " and ".join(f"{what} ({how.value})" for how, what in named.items())
            raise NoAccount(f"no account per {unit.value} of {worlds} together")
        return next(iter(named), unit.adjacency)

    def _trust(self, against: Observer) -> Trust:
        """The most demanding: composed events ask for all of it."""
        asked = {e.trust for e in self._noisy() if e.shown_to(against)}
        return next((trust for trust in Trust if trust in asked), Trust.LOCAL)

    def _assumption(self, unit: Unit, against: Observer) -> str:
        seen = [e for e in self._noisy() if e.shown_to(against)]
        texts = [event.assumption for event in seen if event.assumption]
        texts += [event.kept_secret for event in seen if event.amplified(against)]
        if unit is Unit.SUBJECT and seen:
            converted = any(event.unit is not Unit.SUBJECT for event in seen)
            clients = max(event.clients for event in seen)
            texts.insert(0, held_by(max(clients, converted * self.bounds.clients_per_subject)))
        return ", ".join(dict.fromkeys(texts))

    def _answers(self) -> list[IndexAnswers]:
        return [answer for entry in self._entries for answer in entry.event.answers]

    def _noisy(self) -> list[NoisySum]:
        return [event for entry in self._entries for event in entry.event.noisy]

    def _must_keep(self, limit: Limit, reason: str) -> None:
        spent = self.guarantee(unit=limit.unit, against=limit.against, delta=limit.delta)
        if spent.epsilon > limit.epsilon:
            raise BudgetExceeded(
                f"{reason}: privacy per {limit.unit.value} against {limit.against.value} would "
                f"reach epsilon {spent.epsilon:.4g} of a budget of {limit.epsilon:.4g} at delta "
                f"{limit.delta:.3g}",
                hint="`tessera privacy dp` says how many rounds a budget lasts",
            )

    def _must_fit(self, event: Event) -> None:
        if not isinstance(event, EVENTS):
            raise NoAccount(f"the ledger has no account for {type(event).__name__}")
        event.must_follow(entry.event for entry in self._entries)


def composed(answers: Iterable[IndexAnswers]) -> float:
    """The epsilon of all these answers: exact within a period, added up across periods."""
    rounds: dict[tuple[str, int], list[IndexPrivacy]] = {}
    for answer in answers:
        rounds.setdefault((answer.federation, answer.period), []).append(answer.privacy)
    return math.fsum(epsilon_after(each[0], len(each)) for each in rounds.values())
