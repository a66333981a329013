"""The shapes of a run's JSON files: what is checked when they are read, name by name.

A folder may have been cut off, edited or forged. Whoever reads a figure of it later relies on its
type, so a value of another one is refused here, with its name, and not wherever it is used first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from tessera.plan import Scheme
from tessera.rounds.events import Event

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
