"""What all parts of `tessera reproduce subject-dp` share: epsilons, seeds, means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Final

from tessera.reproduce.cells import Cell

DELTA: Final = 1e-5
EPSILONS: Final = (1.0, 3.0, 10.0)
SEEDS: Final = (0, 1, 2)
NO_NOISE: Final = "no noise"


def summed(
    table: str, row: str, column: str, scores: Sequence[float], unit: str, note: str
) -> Cell:
    """The mean over seeds; the note begins with the deviation."""
    spread = f"+-{stdev(scores):.4f} over {len(scores)} seeds" if len(scores) > 1 else "one seed"
    return Cell(
        table=table,
        row=row,
        column=column,
        paper=None,
        ours=mean(scores),
        unit=unit,
        note=f"{spread}; {note}",
    )
