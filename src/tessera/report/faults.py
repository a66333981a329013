"""What went wrong in a run's rounds, by reason: for `tessera run` and for its page.

Reasons are the engine's words (`RoundFinished.excluded` and `broken`, `RoundAbort.reason`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tessera.errors import RoundAborted
from tessera.ids import RoundId
from tessera.rounds.events import RoundAbort

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
