"""Recorded views: everything each party saw, in one file per party, for attacks and audits.

A view is JSON lines: time, direction, the other party, the kind of message, and its bytes. It has
everything a party sent and received and no other secrets, so it is as confidential as the round.
Files are readable by their owner only.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, TextIO, Union, get_args, get_origin, get_type_hints

from tessera.errors import ConfigError, MisuseError
from tessera.ids import Party
from tessera.plan import Scheme
from tessera.rounds.events import Event

# --- run shapes -----------------------------------------------------------------------------------
#
# The shapes of a run's JSON files: what is checked when they are read, name by name.
#
# A folder may have been cut off, edited or forged. Whoever reads a figure of it later relies on
# its type, so a value of another one is refused here, with its name, and not wherever it is used
# first.


INFINITE: Final = "inf"
"""Stands for an infinite epsilon."""

MOST: Final = 2**63
LARGEST: Final = 1e300

_TABLE: Final = {"name": str, "rows": int, "width": int, "derived_from": str | None, "local": bool}

FACTS: Final[Mapping[str, Any]] = {
    "layout": int,
    "version": str,
    "name": str,
    "scheme": Scheme,
    "task": {
        "name": str,
        "title": str,
        "facts": Mapping[str, Any],
        "clients": int,
        "examples": int,
        "test_examples": int,
    },
    "data": str,
    "metric": str,
    "lower_is_better": bool,
    "metrics": str,
    "trivial": Mapping[str, float | None],
    "learner": {"name": str, "reason": str},
    "entropy": str,
    "entropy_script": str,
    "crypto": {"mode": str, "every": int},
    "rounds": int,
    "cohort": int,
    "model": {"dense": int, "tables": [_TABLE]},
    "level": str,
    "naming_bound": float | None,
    "index_privacy": Mapping[str, float],
    "setup": Mapping[str, Any],
    "views": bool,
    "two_server": Mapping[str, Any],
    "mixture": {
        "names": [str],
        "weight": float,
        "users": int,
        "curve": [[float]],
        "test": Mapping[str, Mapping[str, float]],
    },
}
"""run.json. What is not named here is not checked."""

NEEDED: Final = (
    *("scheme", "metric", "lower_is_better", "metrics", "trivial", "entropy", "rounds", "cohort"),
    *("task.name", "task.title", "task.clients", "learner.name", "crypto.mode"),
)
"""What run.json has for every run of a task."""

EVENTS: Final[Mapping[str, Mapping[str, Any]]] = {
    kind.__name__: {
        # A number that is not one is written as null.
        f.name: float | None
        if get_type_hints(kind)[f.name] is float
        else get_type_hints(kind)[f.name]
        for f in fields(kind)
    }
    for kind in get_args(Event)
}
"""events.jsonl and rounds.jsonl, by kind of event."""


def misfit(value: Any, shape: Any, name: str = "") -> str | None:
    """The name of the first value that has not its shape, or None.

    A shape is a type as in an annotation, a dictionary of shapes by name (of which any may be
    missing), or a list with the shape of its entries. Numbers are at most 63 bits or 1e300, whole
    ones are counts: 0 or more.
    """
    if isinstance(shape, dict | list):
        kind = dict if isinstance(shape, dict) else list
        if not isinstance(value, kind):
            return name
        inner = (
            [(value[one], shape[one], _below(name, one)) for one in shape if one in value]
            if isinstance(shape, dict)
            else [(one, shape[0], f"{name}[{at}]") for at, one in enumerate(value)]
        )
        return next((found for each in inner if (found := misfit(*each)) is not None), None)
    origin = get_origin(shape)
    if origin in (Union, UnionType):
        fits = any(misfit(value, one, name) is None for one in get_args(shape))
        return None if fits else name
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            return name
        of = get_args(shape)[1]
        each = ((one, misfit(value[one], of, _below(name, one))) for one in value)
        return next((found for _, found in each if found is not None), None)
    if origin is tuple:
        if not isinstance(value, list):
            return name
        return misfit(value, [get_args(shape)[0]], name)
    return None if _is(value, shape) else name


def _is(value: Any, shape: Any) -> bool:
    if shape is Any:
        return True
    if shape is Scheme:
        return value in list(Scheme)
    if shape is NoneType:
        return value is None
    if shape is bool:
        return isinstance(value, bool)
    if shape is int:
        return type(value) is int and 0 <= value < MOST
    if shape is float:
        if value == INFINITE:
            return True
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # NaN and infinities are numbers: who reads them leaves them out.
        return number and (isinstance(value, float) or abs(value) < LARGEST)
    return isinstance(value, shape)


def _below(name: str, key: str) -> str:
    return f"{name}.{key}" if name else str(key)


# --- views ----------------------------------------------------------------------------------------

_SHAPE: Final[dict[str, Any]] = {
    "time": float,
    "direction": str,
    "other": int | str,
    "kind": str,
    "data": str,
}


@dataclass(frozen=True, slots=True)
class ViewEntry:
    """One message as one party saw it: `direction` is "sent" or "received"."""

    time: float
    direction: str
    other: Party
    kind: str
    data: bytes = field(repr=False)


class Views:
    """What every party of a run saw, in the order it saw it."""

    def __init__(self) -> None:
        self.by_party: dict[Party, list[ViewEntry]] = {}

    def add(
        self, time: float, sender: Party, receiver: Party, kind: str, data: bytes, *, arrived: bool
    ) -> None:
        """Record a message at its sender, or at its receiver once it has arrived."""
        party, other = (receiver, sender) if arrived else (sender, receiver)
        entry = ViewEntry(time, "received" if arrived else "sent", other, kind, data)
        self.by_party.setdefault(party, []).append(entry)

    def write(self, folder: Path) -> list[Path]:
        """One file per party; an existing folder with views in it is not overwritten."""
        _make_room(folder)
        paths = []
        for party, seen in sorted(self.by_party.items(), key=lambda item: str(item[0])):
            path = folder / _file_name(party)
            with open(path, "x", opener=_for_the_owner) as file:
                file.writelines(_line(entry) for entry in seen)
            paths.append(path)
        return paths


class StreamedViews(Views):
    """Views written while the run goes on, so that memory stays that of one message.

    Only the parties asked for are kept (all, if none are named). To be closed after the run, or
    used in a `with` statement.
    """

    def __init__(self, folder: Path, parties: Collection[Party] | None = None) -> None:
        super().__init__()
        _make_room(folder)
        self._folder, self._parties = folder, parties
        self._files: dict[Party, TextIO] = {}

    def add(
        self, time: float, sender: Party, receiver: Party, kind: str, data: bytes, *, arrived: bool
    ) -> None:
        party, other = (receiver, sender) if arrived else (sender, receiver)
        if self._parties is not None and party not in self._parties:
            return
        if party not in self._files:
            path = self._folder / _file_name(party)
            self._files[party] = open(path, "x", opener=_for_the_owner)
        entry = ViewEntry(time, "received" if arrived else "sent", other, kind, data)
        self._files[party].write(_line(entry))

    def write(self, folder: Path) -> list[Path]:
        raise MisuseError("these views are written already, as they came")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> StreamedViews:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RoundViews(Views):
    """Views that are looked at while the run goes on and not written: memory is that of one round.

    Only the parties asked for are kept.
    """

    def __init__(self, parties: Collection[Party]) -> None:
        super().__init__()
        self._parties = frozenset(parties)

    def add(
        self, time: float, sender: Party, receiver: Party, kind: str, data: bytes, *, arrived: bool
    ) -> None:
        if (receiver if arrived else sender) in self._parties:
            super().add(time, sender, receiver, kind, data, arrived=arrived)

    def taken(self, party: Party) -> list[ViewEntry]:
        """What a party has seen since this was last asked."""
        return self.by_party.pop(party, [])


def _make_room(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.glob("*.view.jsonl")):
        raise ConfigError(
            f"{folder} holds recorded views already", hint="name another folder, or remove it"
        )


def _file_name(party: Party) -> str:
    name = party if isinstance(party, str) else f"client-{party}"
    return f"{name}.view.jsonl"


def _line(entry: ViewEntry) -> str:
    fields = {
        "time": entry.time,
        "direction": entry.direction,
        "other": entry.other,
        "kind": entry.kind,
        "data": base64.b64encode(entry.data).decode(),
    }
    return json.dumps(fields) + "\n"


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def read(path: Path) -> Iterator[ViewEntry]:
    """A recorded view, entry by entry."""
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            wrong = misfit(entry, _SHAPE) if isinstance(entry, dict) else "it"
            if wrong is not None:
                raise ValueError(f"{wrong} is not of the type that a view has")
            yield ViewEntry(
                entry["time"],
                entry["direction"],
                entry["other"],
                entry["kind"],
                base64.b64decode(entry["data"]),
            )
