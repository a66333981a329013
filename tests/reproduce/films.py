"""A few synthetic films, users and ratings in the files of MovieLens 100K."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

USERS: Final = 40
FILMS: Final = 30
EACH: Final = 16
"""Ratings of every user."""


def write(folder: Path, *, split: bool = False) -> Path:
    """Users like one half of the films or the other; with `split` a published test part, too."""
    rng = np.random.default_rng(5)
    own = folder / "ml-100k"
    own.mkdir(parents=True)
    lines = []
    for user in range(1, USERS + 1):
        for at, film in enumerate(rng.permutation(FILMS)[:EACH] + 1):
            good = (film % 2 == user % 2) * 2.0
            rating = int(np.clip(np.rint(2.0 + good + rng.normal(0, 0.7)), 1, 5))
            lines.append(f"{user}\t{film}\t{rating}\t{1000 * user + at}\n")
    (own / "u.data").write_text("".join(lines))
    (own / "u.item").write_text(
        "".join(
            f"{film}|Film {film} (19{60 + film % 30})|01-Jan-19{60 + film % 30}||no address|"
            + "|".join(str(int(k == 1 + film % 2 or k == 3 + film % 5)) for k in range(19))
            + "\n"
            for film in range(1, FILMS + 1)
        ),
        encoding="latin-1",
    )
    (own / "u.user").write_text(
        "".join(f"{user}|{20 + user}|{'MF'[user % 2]}|writer|00000\n" for user in range(1, 41))
    )
    (own / "u.occupation").write_text("writer\n")
    if split:
        held = lines[::EACH]
        (own / "ua.test").write_text("".join(held))
        (own / "ua.base").write_text("".join(line for line in lines if line not in held))
    return folder
