"""Conversion: what an event about a small unit says about a larger one. Upwards only.

- index to item: the answers' epsilon times the rows of one example;
- index to user: times all rows of one client; of noise, as much as a whole client moves it;
- index to subject: times all rows of one client, times the clients that hold a person;
- item to subject: all records of a person at one client at once, each drawn by its own coin;
- user to subject: both updates of a client are clipped, so that each moves by 2C, and nothing is
  amplified.

For the last two, there is one event per client that holds the person where each client's noise is
its own, and one event with the records or moves of all of them where they share one noise.

Replaced rows count twice. Batches of fixed size lose their amplification. A bound that is not
stated, and every other pair of units, is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Final

from tessera.errors import ConfigError
from tessera.privacy.dp.events import NoisySum
from tessera.privacy.dp.guarantee import Adjacency, Trust, Unit
from tessera.privacy.dp.integer_noise import GaussianShares
from tessera.privacy.dp.mechanism import (
    FixedSizeNoise,
    GaussianNoise,
    IntegerMechanism,
    Mechanism,
    NoAccount,
    Parts,
    PureLevel,
    Unseen,
)


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
