"""Events: what leaves a client or a server, as far as privacy is concerned. Plain records.

Whatever leaves is one of these, or the ledger refuses it. An event names its unit, and for every
observer the mechanism that stands between the observer and the data. An observer who is not named
sees the thing itself: then there is no finite number against that observer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.privacy.dp.guarantee import EVERYBODY, Adjacency, Observer, Trust, Unit
from tessera.privacy.dp.mechanism import (
    FixedSizeNoise,
    GaussianNoise,
    GaussianShares,
    IntegerMechanism,
    Mechanism,
    NoAccount,
    Parts,
    PureLevel,
    Unseen,
)
from tessera.privacy.index.response import IndexPrivacy


class Release:
    """What a ledger asks of every event. Most have neither answers nor noise nor anything exact."""

    __slots__ = ()

    @property
    def answers(self) -> tuple[IndexAnswers, ...]:
        return ()

    @property
    def noisy(self) -> tuple[NoisySum, ...]:
        return ()

    def exact_to(self, against: Observer) -> tuple[str, ...]:
        """What of it this observer sees without noise."""
        return ()

    def must_follow(self, earlier: Iterable[Release]) -> None:
        """MisuseError if a client may not make this release after the earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexAnswers(Release):
    """One client's randomised answers about the union of one round: all its tables together.

    The unit is one index of one table, so tables do not add up; a derived table adds nothing. The
    server sees the answers, and other clients see who answered yes for the rows they named.
    """

    federation: str
    period: int
    round_id: RoundId
    privacy: IndexPrivacy

    @property
    def against(self) -> frozenset[Observer]:
        return EVERYBODY - {Observer.READERS}

    @property
    def answers(self) -> tuple[IndexAnswers, ...]:
        return (self,)

    def must_follow(self, earlier: Iterable[Release]) -> None:
        for known in (answer for event in earlier for answer in event.answers):
            if known.federation != self.federation:
                continue
            if known.round_id == self.round_id:
                raise MisuseError(
                    f"round {self.round_id} is charged already: its stored answers are sent "
                    "again, and no others are drawn"
                )
            if known.period == self.period and known.privacy != self.privacy:
                raise MisuseError(
                    f"round {self.round_id}: period {self.period} was charged with other "
                    "probabilities, and a period is frozen"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRelease(Release):
    """Something released exactly, such as "the union": no finite epsilon covers it."""

    federation: str
    round_id: RoundId
    what: str
    against: frozenset[Observer] = EVERYBODY

    def exact_to(self, against: Observer) -> tuple[str, ...]:
        return (self.what,) if against in self.against else ()


THE_UNION: Final = "the union"
THE_SUMS: Final = "the sums and counts"
"""Of every row that is opened; together with the answers they name holders over several rounds."""
THE_COUNTS: Final = "the counts"
"""Of every row, where its sum has noise and its number of clients has none."""
THE_ROWS: Final = "the rows of each client"
"""Where a client names its rows in the clear."""
THE_WRITTEN_ROWS: Final = "which rows are written"
"""Where nobody sees whose rows they are, and all see which of them open."""
WHICH_ROWS: Final = frozenset({THE_UNION, THE_SUMS, THE_COUNTS, THE_ROWS, THE_WRITTEN_ROWS})
"""Exact releases from which it can be read whether a row is there: no number per index is given
them."""
THE_SETUP_SUM: Final = "the set-up sum"
THE_POPULARITY: Final = "the popularity of rows"
"""With noise, once before the first round: what rows are selected by."""
THE_METRICS: Final = "federated metrics"
THE_SHARING: Final = "which clients share in the open"
"""The bit that automatic sharing sets from a client's own data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisySum(Release):
    """One round's noisy releases, `times` of them, about one unit; or those of a whole training.

    Where noise is correlated over rounds, all rounds are one release: `training` names it, and it
    is charged once, before a client's first message in it.

    `clients` are those that may hold one person. All of them release likewise and are seen one by
    one, or only their sum is seen (`summed`): then they are in the mechanism already. `assumption`
    is what else the mechanism takes for granted and nobody checks; `kept_secret` likewise for those
    who see a sample, of what nobody may tell them. Of an index, `of_client` says
    how far a whole client moves the release over how far one row does, infinite where a client has
    no bound: only noise on all that a client sends can say so.
    """

    federation: str
    round_id: RoundId
    what: str
    unit: Unit
    adjacency: Adjacency
    trust: Trust
    seen: tuple[tuple[Observer, Mechanism], ...]
    times: int = 1
    clients: int = 1
    summed: bool = False
    assumption: str = ""
    kept_secret: str = ""
    of_client: float = 0.0
    training: str = ""

    def __post_init__(self) -> None:
        if self.unit is Unit.INDEX and not self.of_client > 0.0:
            raise MisuseError(
                "noise on a row's words is no claim about an index, which moves other rows and the "
                "dense part: noise on all that a client sends is"
            )
        if self.times < 1 or self.clients < 1:
            raise ConfigError(
                f"{self.what}: {self.times} releases by {self.clients} clients",
                hint="both are counts from 1 up",
            )
        if self.clients > 1 and self.unit is not Unit.SUBJECT:
            raise MisuseError(f"one {self.unit.value} does not sit with several clients")
        observers = [observer for observer, _ in self.seen]
        if len(set(observers)) < len(observers):
            raise MisuseError(f"{self.what}: an observer is named twice")

    @property
    def noisy(self) -> tuple[NoisySum, ...]:
        return (self,)

    def must_follow(self, earlier: Iterable[Release]) -> None:
        mine = self._name
        if all(mine != n._name for e in earlier for n in e.noisy):
            return
        if self.training:
            raise ConfigError(
                f"training {self.training!r} of federation {self.federation!r} is charged already, "
                "with another clip, noise, schedule or other coefficients",
                hint="a training keeps what it began with: another one has another name, and is "
                "another charge",
            )
        raise MisuseError(
            f"round {self.round_id}: {self.what} is charged already: stored bytes are sent "
            "again, and no other noise is drawn"
        )

    @property
    def _name(self) -> tuple[str, str, RoundId, str]:
        return (self.federation, self.training, self.round_id, self.what)

    def shown_to(self, observer: Observer) -> bool:
        """Whether this observer sees anything of it."""
        return not isinstance(self.view(observer), Unseen)

    def view(self, observer: Observer) -> Mechanism | None:
        """What stands between this observer and the data; None: nothing does."""
        return dict(self.seen).get(observer)

    def amplified(self, observer: Observer) -> bool:
        """Whether this observer's view is that of a sample which somebody has to keep secret."""
        view = self.view(observer)
        return bool(self.kept_secret) and isinstance(view, GaussianNoise) and view.sampled


def views(mechanism: Mechanism, observers: Iterable[Observer]) -> dict[Observer, Mechanism]:
    """The same mechanism for all of these observers."""
    return dict.fromkeys(observers, mechanism)


def seen(by: Mapping[Observer, Mechanism]) -> tuple[tuple[Observer, Mechanism], ...]:
    """Views in the order of the observers, so that equal events are equal."""
    return tuple((observer, by[observer]) for observer in Observer if observer in by)


Event = IndexAnswers | ExactRelease | NoisySum
EVENTS: Final = (IndexAnswers, ExactRelease, NoisySum)


# --- other units ----------------------------------------------------------------------------------
#
# What an event about a small unit says about a larger one. Upwards only.
#
# - index to item: the answers' epsilon times the rows of one example;
# - index to user: times all rows of one client; of noise, as much as a whole client moves it;
# - index to subject: times all rows of one client, times the clients that hold a person;
# - item to subject: all records of a person at one client at once, each drawn by its own coin;
# - user to subject: both updates of a client are clipped, so that each moves by 2C, and nothing is
#   amplified.
#
# For the last two, there is one event per client that holds the person where each client's noise
# is its own, and one event with the records or moves of all of them where they share one noise.
#
# Replaced rows count twice. Batches of fixed size lose their amplification. A bound that is not
# stated, and every other pair of units, is refused by name.


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many small units one larger one can have; 0 where that is not stated."""

    rows_per_example: int = 0
    rows_per_client: int = 0
    records_per_subject: int = 0  # at one client
    clients_per_subject: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 0:
                raise ConfigError(
                    f"{item.name} = {getattr(self, item.name)} is not a count",
                    hint="use 1 or more, or 0 where nothing is known",
                )

    def stated(self, name: str, *, event: str, unit: Unit) -> int:
        count: int = getattr(self, name)
        if count:
            return count
        raise NoAccount(f"no account of {event} per {unit.value}: {name} is not stated")


def answers_as(level: float, unit: Unit, adjacency: Adjacency, bounds: Bounds) -> PureLevel:
    """Randomised answers of this epsilon per index, for a unit that changes several rows."""
    event = "randomised answers"
    if unit is Unit.INDEX:
        rows = 1
    elif unit is Unit.ITEM:
        rows = bounds.stated("rows_per_example", event=event, unit=unit)
    else:
        rows = bounds.stated("rows_per_client", event=event, unit=unit)
    if unit is Unit.SUBJECT:
        rows *= bounds.stated("clients_per_subject", event=event, unit=unit)
    return PureLevel((2 if adjacency is Adjacency.REPLACE else 1) * rows * level)


def noise_as(event: NoisySum, mechanism: Mechanism, unit: Unit, bounds: Bounds) -> Parts:
    """What this event is for one `unit`: mechanisms and how often each."""
    if isinstance(mechanism, Unseen):
        return ()
    if event.unit is unit:
        return ((mechanism, event.times * (1 if event.summed else event.clients)),)
    rule = RULES.get((event.unit, unit))
    if rule is None:
        raise NoAccount(
            f"no account of {event.what} per {unit.value}: it is about one {event.unit.value}, and "
            "no rule leads from there"
        )
    return rule(event, mechanism, bounds)


def item_to_subject(event: NoisySum, mechanism: Mechanism, bounds: Bounds) -> Parts:
    named = f"{event.what}, an event per item,"
    records = bounds.stated("records_per_subject", event=named, unit=Unit.SUBJECT)
    clients = bounds.stated("clients_per_subject", event=named, unit=Unit.SUBJECT)
    if not isinstance(mechanism, GaussianNoise | FixedSizeNoise):
        raise NoAccount(f"no account of {event.what} for a person's records: {mechanism}")
    if one_noise(event):
        return ((mechanism.grouped(records * clients), event.times),)
    return ((mechanism.grouped(records), event.times * clients),)


def index_to_user(event: NoisySum, mechanism: Mechanism, bounds: Bounds) -> Parts:
    """The same noise, for an update that is sent or not."""
    if not math.isfinite(event.of_client):
        raise NoAccount(
            f"no account of {event.what} per user: each example is clipped, and the plan does not "
            "bound how many examples a client has"
        )
    if isinstance(mechanism, GaussianShares):
        moved: Mechanism = replace(mechanism, moves=event.of_client * mechanism.moves)
    elif isinstance(mechanism, GaussianNoise):
        moved = replace(mechanism, noise=mechanism.noise / event.of_client)
    else:
        raise NoAccount(f"no account of {event.what} for a whole client: {mechanism}")
    return ((moved, event.times),)


def user_to_subject(event: NoisySum, mechanism: Mechanism, bounds: Bounds) -> Parts:
    """Without amplification: a client that is drawn or not still has the person's records."""
    named = f"{event.what}, an event per user,"
    clients = bounds.stated("clients_per_subject", event=named, unit=Unit.SUBJECT)
    if isinstance(mechanism, IntegerMechanism):
        if one_noise(event):
            return ((mechanism.grouped(2 * clients), event.times),)
        return ((mechanism.grouped(2), event.times * clients),)
    if not isinstance(mechanism, GaussianNoise | FixedSizeNoise) or (
        isinstance(mechanism, GaussianNoise) and mechanism.shifts[-1][0] > 1
    ):
        raise NoAccount(f"no account of {event.what} for a person's clients: {mechanism}")
    if one_noise(event):
        return ((certain(mechanism, 2 * clients), event.times),)
    return ((certain(mechanism, 2), event.times * clients),)


def certain(mechanism: GaussianNoise | FixedSizeNoise, multiple: int) -> GaussianNoise:
    """The same noise on a sum that moves by so many clips for certain."""
    fails = mechanism.fails if isinstance(mechanism, GaussianNoise) else 0.0
    return GaussianNoise(
        mechanism.noise,
        ((multiple, 1.0),),
        distance=mechanism.distance,
        fails=min(1.0, multiple * fails),
    )


def one_noise(event: NoisySum) -> bool:
    """Whether all clients of a person share the noise: then their shifts add up under it."""
    return event.summed or event.trust is not Trust.LOCAL


RULES: Final[dict[tuple[Unit, Unit], Callable[[NoisySum, Mechanism, Bounds], Parts]]] = {
    (Unit.INDEX, Unit.USER): index_to_user,
    (Unit.ITEM, Unit.SUBJECT): item_to_subject,
    (Unit.USER, Unit.SUBJECT): user_to_subject,
}


def held_by(clients: int) -> str:
    """What every number per subject takes for granted; nobody can check it."""
    return (
        f"if at most {clients} clients hold a person"
        if clients > 1
        else ("if one client holds all records of a person")
    )
