"""Data of your own: a CSV of users, items and ratings. Runs in under a minute.

python examples/own_data.py [FILE.csv]
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

import tessera


def synthesise(path: Path, users: int = 100, films: int = 120) -> None:
    """A synthetic file, if you have none: user, film, stars, seconds since 1970."""
    rng = np.random.default_rng(0)
    mood, quality = rng.normal(size=users), rng.normal(size=films)
    taste, kind = rng.normal(size=(users, 2)), rng.normal(size=(films, 2))
    with path.open("w", newline="") as out:
        lines = csv.writer(out)
        lines.writerow(["user", "film", "stars", "when"])
        for when in range(8_000):
            who, what = int(rng.integers(users)), int(films * rng.random() ** 2)
            liking = (mood[who] + quality[what]) / 3 + taste[who] @ kind[what]
            stars = np.clip(np.rint(3.3 + liking + rng.normal() / 2), 1, 5)
            lines.writerow([f"p{who}", f"film {what}", int(stars), 1_700_000_000 + when])


def main(path: Path, rounds: int = 30) -> tessera.Run:
    task = tessera.tasks.load(
        "interactions",
        path=str(path),
        user="user",
        item="film",
        time="when",
        label="stars",
        threshold=4.0,  # four stars and more are a click
    )
    plan = tessera.Plan(scheme="secure-submodel", cohort=20)
    return tessera.simulate(task, plan, rounds=rounds)


if __name__ == "__main__":
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "own-data.csv")
    if len(sys.argv) < 2:
        synthesise(file)
    run = main(file)
    print("AUC by round:", {done: round(auc, 3) for done, auc in run.curve})
    print("without a model:", {name: round(auc, 3) for name, auc in run.facts["trivial"].items()})
    print("page:", run.report())
