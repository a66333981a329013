"""Words around numbers: plurals, enumerations, facts, and what does not apply."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tessera.report.numbers import INFINITE

NOT_APPLICABLE: Final = "n/a"
"""For a figure that a scheme cannot have; one that is missing is not measured."""
LONGITUDINAL: Final = "longi\u00adtudinal ε"
"""For narrow columns: with a soft hyphen."""
NUMBERS: Final = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def spelt(number: int) -> str:
    """A number at the start of a sentence."""
    return NUMBERS[number] if number < len(NUMBERS) else f"{number:,}"


def enumeration(items: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def predictor(name: str) -> str:
    """A baseline's name, for readers who do not know what is summed."""
    return "sum of means" if name == "sum" else name


def fact(value: Any) -> str:
    """A value of a facts dictionary, whatever it is, as a person would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return INFINITE if math.isinf(value) else f"{value:,.4g}"
    if value is None:
        return "not known"
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {fact(item)}" for name, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(fact(item) for item in value)
    return str(value)
