"""Events: what leaves a client or a server, as far as privacy is concerned. Plain records.

Whatever leaves is one of these, or the ledger refuses it. An event names its unit, and for every
observer the mechanism that stands between the observer and the data. An observer who is not named
sees the thing itself: then there is no finite number against that observer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.privacy.dp.guarantee import EVERYBODY, Adjacency, Observer, Trust, Unit
from tessera.privacy.dp.mechanism import GaussianNoise, Mechanism
from tessera.privacy.index.response import IndexPrivacy


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexAnswers:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRelease:
    """Something released exactly, such as "the union": no finite epsilon covers it."""

    federation: str
    round_id: RoundId
    what: str
    against: frozenset[Observer] = EVERYBODY


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
class NoisySum:
    """One round's noisy releases, `times` of them, about one unit.

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

    def __post_init__(self) -> None:
        if self.unit is Unit.INDEX and not self.of_client > 0.0:
            raise MisuseError(
                "noise on a row's words is no claim about an index, which moves other rows and the "
                "dense part: noise on all that a client sends is"
            )
        if self.times < 1 or self.clients < 1:
            raise ConfigError(
                f"{self.what}: {self.times} releases by {self.clients} clients are none",
                hint="both are counts from 1 up",
            )
        if self.clients > 1 and self.unit is not Unit.SUBJECT:
            raise MisuseError(f"one {self.unit.value} does not sit with several clients")
        observers = [observer for observer, _ in self.seen]
        if len(set(observers)) < len(observers):
            raise MisuseError(f"{self.what}: an observer is named twice")

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
