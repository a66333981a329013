"""How numbers are written for people, and words around them: on a terminal, on a page.

Three significant digits, decimal units. A value that rounds up to the next unit is written in it
(999,950 bytes are "1.00 MB"), and what is small but not zero does not read as zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

NOT_MEASURED: Final = "not measured"
INFINITE: Final = "infinite"

SIZES: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
NEARLY: Final = 0.9995
"""From this on, three digits round up to one."""


def size(value: float | None) -> str:
    """Bytes."""
    if value is None:
        return NOT_MEASURED
    for scale, unit in SIZES:
        if value >= NEARLY * scale:
            return f"{rounded(value / scale)} {unit}"
    return f"{value:.0f} B"


def memory(value: int | None) -> str:
    """A machine's memory, which is sold in powers of two."""
    return "unknown" if value is None else f"{value / 2**30:.1f} GiB"


def seconds(value: float | None, *, digits: int = 3) -> str:
    """A duration; an estimate takes two digits."""
    if value is None:
        return NOT_MEASURED
    if value >= 7200:
        return f"{rounded(value / 3600, digits)} h"
    if value >= 120:
        return f"{rounded(value / 60, digits)} min"
    if value >= 1 - 0.5 * 10**-digits:
        return f"{rounded(value, digits)} s"
    if value >= 1e-3:
        return f"{rounded(1000 * value, digits)} ms"
    return "<1 ms" if value > 0 else "0 ms"


def rounded(value: float, digits: int = 3) -> str:
    """At least this many significant digits; zeros at the end stay, and so do whole numbers."""
    return f"{value:,.{max(0, digits - whole_digits(value, digits))}f}"


def whole_digits(value: float, digits: int) -> int:
    """Digits before the point once the value is rounded: 9.996 has two of three."""
    if not value:
        return 1
    return max(1, math.floor(math.log10(float(f"{abs(value):.{digits - 1}e}"))) + 1)


def share(value: float | None) -> str:
    """A measured or computed share, in per cent."""
    if value is None:
        return NOT_MEASURED
    if value == 0.0 or math.isclose(value, 1.0, rel_tol=1e-9):
        return f"{value:.0%}"
    if 0.0 < value < 5e-4:
        return f"{100 * value:.1g}%" if value >= 1e-5 else "<0.001%"
    return ">99.9%" if 0.9995 <= value < 1.0 else f"{value:.1%}"


def percent(value: float) -> str:
    """A share that somebody set: 20%, 12.5%."""
    return f"{100 * value:.4g}%"


def probability(value: float) -> str:
    """As the papers print one: 0.9375."""
    if 0.0 < value < 5e-5:
        return f"{value:.0e}"
    return f"{value:.4f}".rstrip("0").rstrip(".")


def epsilon(value: float | str | None) -> str:
    """An epsilon, of a guarantee or measured; "inf" is how JSON carries an infinite one."""
    if value is None:
        return NOT_MEASURED
    number = float(value)
    if math.isinf(number):
        return INFINITE
    return "<0.01" if 0.0 < number < 0.005 else f"{number:z.2f}"


def count(value: float | None) -> str:
    """A number of things; an average of few keeps a digit, or 0.4 would look like none."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,.1f}" if value < 9.95 and value != int(value) else f"{value:,.0f}"


def score(value: float | None, *, digits: int = 3) -> str:
    """A metric; with three decimals, as far as one test part can tell two models apart."""
    return NOT_MEASURED if value is None else f"{value:.{digits}f}"


def signed(value: float, *, digits: int = 3) -> str:
    """A difference with its sign; a real minus, so that it does not break off its number."""
    return f"{value:+.{digits}f}".replace("-", "−")


def in_unit(value: float, unit: str) -> str:
    """What an attack measured, or a claim about it, by its unit: epsilon, auc, or a share."""
    if unit == "epsilon":
        return epsilon(value)
    return score(value) if unit == "auc" else share(value)


def figure(value: float) -> str:
    """A number whose unit stands elsewhere."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


# --- words ----------------------------------------------------------------------------------------

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
