"""A ledger's events as text, for the journal: what was charged is charged after a restart, too.

A record is written with its kind and its fields, and read back by the classes named here; a kind
that is not among them is refused. Nothing is skipped: a charge that cannot be stored is an error
before anything is sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

from tessera.errors import MisuseError
from tessera.privacy.events import EVENTS, Event
from tessera.privacy.guarantee import Adjacency, Observer, Trust, Unit
from tessera.privacy.integer_noise import GaussianShares, SkellamNoise
from tessera.privacy.mechanism import FixedSizeNoise, GaussianNoise, PureLevel, Unseen
from tessera.privacy.response import IndexPrivacy

RECORDS: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind
    for kind in (
        *EVENTS,
        IndexPrivacy,
        GaussianNoise,
        FixedSizeNoise,
        GaussianShares,
        SkellamNoise,
        PureLevel,
        Unseen,
    )
}
CHOICES: Final[Mapping[str, type[Enum]]] = {
    kind.__name__: kind for kind in (Observer, Adjacency, Trust, Unit)
}


def event_text(event: Event) -> str:
    """One line of JSON."""
    return json.dumps(_plain(event), sort_keys=True)


def event_of(text: str) -> Event:
    """The inverse of `event_text`."""
    found = _value(json.loads(text))
    if not isinstance(found, EVENTS):
        raise MisuseError(f"{type(found).__name__} is not a privacy event")
    return found


def _plain(value: Any) -> Any:
    kind = type(value).__name__
    if isinstance(value, Enum):
        if kind not in CHOICES:
            raise MisuseError(f"a charge with a {kind} cannot be stored")
        return {"choice": kind, "value": value.value}
    if is_dataclass(value) and not isinstance(value, type):
        if kind not in RECORDS:
            raise MisuseError(f"a charge with a {kind} cannot be stored")
        return {
            "record": kind,
            "fields": {f.name: _plain(getattr(value, f.name)) for f in fields(value)},
        }
    if isinstance(value, frozenset):
        return {"set": sorted((_plain(v) for v in value), key=json.dumps)}
    if isinstance(value, tuple):
        return {"tuple": [_plain(v) for v in value]}
    if value is None or isinstance(value, str | int | float):
        return value
    raise MisuseError(f"a charge with a {kind} cannot be stored")


def _value(plain: Any) -> Any:
    match plain:
        case {"choice": str(kind), "value": value}:
            return CHOICES[kind](value)
        case {"record": str(kind), "fields": dict(parts)}:
            if kind not in RECORDS:
                raise MisuseError(f"{kind} is not part of a privacy event")
            return RECORDS[kind](**{name: _value(part) for name, part in parts.items()})
        case {"set": list(items)}:
            return frozenset(_value(item) for item in items)
        case {"tuple": list(items)}:
            return tuple(_value(item) for item in items)
    return plain
