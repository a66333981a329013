"""Guarantee: a privacy number that travels with its meaning.

An epsilon alone says nothing. It is per index or per person, it holds against an observer, and here
it often holds only *given* something that is released exactly, such as the union of the cohort's
rows and each row's sum and count, and *if* something is so that nobody can check, such as how many
clients hold one person. Only the ledger makes guarantees, out of what was spent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tessera.errors import MisuseError

GIVEN_THE_UNION: Final = "given the union"
"""The condition under which every epsilon per index holds: the union itself is released exactly."""
INDEX_SCOPE: Final = f"per index, {GIVEN_THE_UNION}"
"""What every epsilon of randomised index sets is about."""
OF_THE_ANSWERS: Final = f"of the answers, {INDEX_SCOPE} and not the sums"
"""What an epsilon of randomised answers leaves out: over several rounds the sums copy the answers,
and what is left then is the bound B (`privacy/index/bound.py`)."""


class Unit(StrEnum):
    """Whose presence the number is about."""

    INDEX = "index"
    """One row id of one client: in its set, or in its examples at all.

    Randomised answers are about the first, noise on all that a client sends about the second.
    """
    ITEM = "item"
    """One training example of one client."""
    USER = "user"
    """All that one client sends."""
    SUBJECT = "subject"
    """A person, whose records may sit with several clients."""

    @property
    def adjacency(self) -> Adjacency:
        """The two worlds that are compared, where nothing says otherwise."""
        return Adjacency.ZERO_OUT if self is Unit.USER else Adjacency.ADD_OR_REMOVE


class Adjacency(StrEnum):
    """Which two worlds are compared."""

    ADD_OR_REMOVE = "add or remove"
    REPLACE = "replace"
    ZERO_OUT = "zero out"


class Observer(StrEnum):
    """Against whom the number holds: whoever sees what that party sees."""

    LEADER = "leader"
    """The server; of two servers, the one that the clients talk to."""
    HELPER = "helper"
    """The second of two servers."""
    CLIENTS = "other clients"
    READERS = "readers of the model"
    """Whoever is given the trained model, of every round."""


EVERYBODY: Final = frozenset(Observer)


class Trust(StrEnum):
    """Who adds the noise, and so who has to be honest; the most demanding first."""

    SERVER = "server"
    """The server, who sees the data and adds the noise."""
    SHARES = "shares"
    """Enough of the clients: every one adds a share of it, before its masks."""
    EACH = "each"
    """One of two servers, each of which adds all of it to its share."""
    LOCAL = "local"
    """Nobody but the client itself."""

    @property
    def label(self) -> str:
        """The model of trust, in the words of the literature."""
        return LABELS.get(self, self.value)


LABELS: Final = {
    Trust.SERVER: "central",
    Trust.SHARES: "distributed",
    Trust.EACH: "one of two servers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """(epsilon, delta)-differential privacy of one `unit` against one observer.

    Under a `condition` where one is named ("given the union"), and only under the `assumption`
    that the plan makes and nobody checks ("at most 3 clients hold a person"). An epsilon per index
    of noise has `per_user` beside it: that of the same releases for a whole client, infinite where
    there is none. It need not be larger: a client that is protected sends zeros in the other world,
    and a row that is taken out leaves an update that may be any other.
    """

    epsilon: float
    delta: float
    unit: Unit
    adjacency: Adjacency
    trust: Trust
    against: Observer
    condition: str = ""
    assumption: str = ""
    per_user: float | None = None

    def __post_init__(self) -> None:
        if not self.epsilon >= 0.0:  # also refuses nan
            raise MisuseError(f"a guarantee's epsilon is 0 or more, not {self.epsilon}")
        if not 0.0 <= self.delta < 1.0:
            raise MisuseError(f"a guarantee's delta is in [0, 1), not {self.delta}")

    @property
    def finite(self) -> bool:
        """Whether anything is promised at all."""
        return math.isfinite(self.epsilon)

    @property
    def scope(self) -> str:
        """What the number is about, as it is printed beside every epsilon."""
        parts = (f"per {self.unit.value}{self.beside}", self.condition, self.assumption)
        return ", ".join(filter(None, parts))

    @property
    def beside(self) -> str:
        """How an epsilon per index compares with that of a whole client."""
        if self.per_user is None:
            return ""
        if math.isinf(self.per_user):
            return " (no number per user)"
        less = "" if self.per_user > self.epsilon else ", which is no more"
        return f" (per user {self.per_user:.4g}{less})"

    def __str__(self) -> str:
        delta = f", delta {self.delta:.3g}" if self.delta else ""
        return (
            f"epsilon {self.epsilon:.4g}{delta} {self.scope} "
            f"({self.adjacency.value}, trust: {self.trust.label}, against: {self.against.value})"
        )

    def to_json(self) -> dict[str, str | float]:
        """Plain values for one JSON object; an infinite epsilon is the string "inf"."""
        return {
            "epsilon": json_number(self.epsilon),
            "delta": self.delta,
            "unit": self.unit.value,
            "adjacency": self.adjacency.value,
            "trust": self.trust.label,
            "against": self.against.value,
            "condition": self.condition,
            "assumption": self.assumption,
            **({} if self.per_user is None else {"per_user": json_number(self.per_user)}),
        }


def json_number(value: float) -> float | str:
    """An epsilon as JSON can carry it: JSON has no infinity, so that is the string "inf"."""
    return "inf" if math.isinf(value) else value
