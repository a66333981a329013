"""How figures are said: sizes, times, levels, shares, and the word for what was not measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

NOT_MEASURED: Final = "not measured"
NOT_APPLICABLE: Final = "n/a"
"""For a figure that a scheme cannot have; one that is missing is not measured."""
NBSP: Final = "\u00a0"
"""Between a number and its unit, which belong on one line."""
INFINITE: Final = "infinite"
NUMBERS: Final = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")


def score(value: float | None) -> str:
    """A metric to three decimals, which is as far as one test part can tell two models apart."""
    return NOT_MEASURED if value is None else f"{value:.3f}"


def signed(value: float) -> str:
    """A difference with its sign; a real minus, so that it does not break off its number."""
    return f"{value:+.3f}".replace("-", "−")


def size(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= scale:
            return f"{three_digits(value / scale)}{NBSP}{unit}"
    return f"{value:.0f}{NBSP}B"


def seconds(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    if value >= 7200:
        return f"{three_digits(value / 3600)}{NBSP}h"
    if value >= 120:
        return f"{three_digits(value / 60)}{NBSP}min"
    if value >= 1:
        return f"{three_digits(value)}{NBSP}s"
    if value >= 1e-3:
        return f"{three_digits(1000 * value)}{NBSP}ms"
    return f"<1{NBSP}ms" if value > 0 else f"0{NBSP}ms"


def three_digits(value: float) -> str:
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def level(value: float | None) -> str:
    """An epsilon; an infinite one is a word."""
    if value is None:
        return NOT_MEASURED
    return INFINITE if math.isinf(value) else f"{value:.2f}"


def share(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    if 0.0 < value < 5e-4:
        return f"<0.1{NBSP}%"
    return f"0{NBSP}%" if value == 0.0 else f"{100 * value:.1f}{NBSP}%"


def count(value: float | None) -> str:
    """A number of things; a mean of few keeps a digit, or 0.4 would look like none."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,.1f}" if value < 10 and value != int(value) else f"{value:,.0f}"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def spelt(number: int) -> str:
    """A number at the start of a sentence."""
    return NUMBERS[number] if number < len(NUMBERS) else f"{number:,}"


def enumeration(items: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


def predictor(name: str) -> str:
    """A trivial predictor's name, for readers who do not know what is summed."""
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
