"""Words around numbers: plurals, enumerations, facts, and what does not apply."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from tessera.errors import RoundAborted
from tessera.ids import RoundId
from tessera.report.numbers import INFINITE
from tessera.rounds.events import RoundAbort

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


# --- faults ---------------------------------------------------------------------------------------
#
# What went wrong in a run's rounds, by reason: for `tessera run` and for its page.
#
# Reasons are the engine's words (`RoundFinished.excluded` and `broken`, `RoundAbort.reason`).


UNKNOWN: Final = "too few answered"


def by_reason(counted: Iterable[Any]) -> dict[str, int]:
    """Counts by reason added up, the most frequent first; anything else is ignored."""
    total: Counter[str] = Counter()
    for part in counted:
        if isinstance(part, Mapping):
            total.update({str(why): many for why, many in part.items() if isinstance(many, int)})
    return dict(total.most_common())


def in_rounds(rounds: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Of finished rounds: who is not in a sum, and who sent zeros because training failed."""
    every = list(rounds)
    return {name: by_reason(r.get(name) for r in every) for name in ("excluded", "broken")}


def abort_reasons(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many rounds were aborted, by reason, from a run's events."""
    return by_reason(
        {str(e.get("reason") or UNKNOWN): 1} for e in events if e.get("event") == "RoundAbort"
    )


def aborted(last: RoundAbort) -> RoundAborted:
    """The error of a run in which every round was aborted."""
    return RoundAborted(
        round_id=RoundId(last.round_id),
        phase=last.phase,
        answered=last.answered,
        needed=last.needed,
    )


def lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, how many) of all that went wrong, for a terminal."""
    for caption, many, reasons in (
        ("clients not in a sum, in all", sum(facts["excluded"].values()), facts["excluded"]),
        ("clients that sent zeros, in all", facts["not_finite"], facts["broken"]),
        ("rounds aborted", sum(facts["why_given_up"].values()), facts["why_given_up"]),
    ):
        if many:
            yield caption, f"{many:,}"
            yield from ((f"  {why}", f"{count:,}") for why, count in reasons.items())
