"""Known rows: how far somebody comes who knows of one row whose it is; measured, not bounded.

B is for observers who know nothing of a member's rows beforehand. Who knows one (one purchase)
links others to it by their values, and how many depends on model and data: `tessera audit` measures
it for a run (`audit/values.py`). Here are the figures of runs that were measured for this purpose
(docs/results.md), so that a forecast can name the nearest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRowFigure:
    """Of members with 10 to 200 rows, after so many opened rounds of their group."""

    task: str
    model: str
    rounds: int
    linked: float  # share of a member's other rows that are linked to the known one
    right: float  # share of the linked rows that are the member's

    def __str__(self) -> str:
        rounds = f"{self.rounds} round{'s' if self.rounds != 1 else ''}"
        return (
            f"{self.linked:.0%} of its other rows ({self.right:.0%} of those linked are its own), "
            f"measured in {rounds} of {self.task}, model {self.model}"
        )


MEASURED: Final = (
    KnownRowFigure(task="taobao-like", model="personal", rounds=2, linked=0.95, right=0.94),
    KnownRowFigure(task="movielens", model="personal", rounds=1, linked=0.34, right=0.33),
)
LINKS: Final = "who knows one row of a member links"
NOT_MEASURED: Final = "what one known row links is not measured for this model: tessera audit"


def nearest(task: str, model: str) -> KnownRowFigure | None:
    """The figure of this model, on this task if there is one, or else on the first measured."""
    same = [each for each in MEASURED if each.model == model]
    return next((each for each in same if each.task == task), same[0] if same else None)


def in_words(task: str, model: str) -> str:
    """What a forecast says beside B."""
    found = nearest(task, model)
    if found is None:
        return NOT_MEASURED
    other = "" if found.task == task else " (the nearest that was measured)"
    return f"{LINKS} {found}{other}"


def all_in_words() -> str:
    """What is said where no task is known."""
    return f"{LINKS} {'; '.join(map(str, MEASURED))}; other models: not measured, tessera audit"
