"""TREC question classification (Li and Roth 2002): what kind of answer a question asks for.

A line is COARSE:fine and the question, in words that blanks separate; the six coarse classes are
the labels. The dictionary is made of the training questions, so that it is a release of its own: a
federation would take a public one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.data import published
from tessera.data.examples import LABEL, NONE, ClientData, Examples
from tessera.data.split import TEST, spread_evenly
from tessera.errors import ConfigError

SOURCE: Final = published.Source(
    title="TREC question classification",
    publisher="X. Li and D. Roth, Cognitive Computation Group, UIUC",
    page="Experimental Data for Question Classification",
    folders=("trec",),
    files=("train_5500.label", "TREC_10.label"),
)

COARSE: Final = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
WORDS: Final = "words"

Question = tuple[int, list[str]]


def trec(
    folder: Path | str | None = None,
    *,
    clients: int = 4,
    words: int = 25,
    seed: int = 0,
    part: str = TEST,
) -> ClientData:
    """5,452 training and 500 test questions; of each the first `words` words.

    Words that no training question has are "none", as is what fills a question up.
    """
    if words < 1:
        raise ConfigError(f"trec: words = {words}", hint="1 or more")
    train = questions(SOURCE.find("train_5500.label", folder))
    test = questions(SOURCE.find("TREC_10.label", folder))
    known = {word: i for i, word in enumerate(sorted({w for _, text in train for w in text}))}
    return spread_evenly(
        "trec",
        _examples(train, known, words),
        _examples(test, known, words),
        clients=clients,
        seed=seed,
        part=part,
        sizes={"class": len(COARSE), "word": len(known)},
        facts={
            "source": SOURCE.title,
            "questions": f"{len(train):,} for training, {len(test):,} published for testing",
            "dictionary": f"{len(known):,} words, of the training questions",
        },
    )


def questions(path: Path) -> list[Question]:
    """(class, words in lower case) of each line."""
    found = []
    for number, line in published.lines(path, encoding="latin-1"):
        kind, _, text = line.partition(" ")
        coarse = kind.partition(":")[0]
        if coarse not in COARSE:
            raise ConfigError(
                f"{path}, line {number}: {coarse[:20]!r} is not one of {', '.join(COARSE)}",
                hint="a line is CLASS:kind and a question",
            )
        if not text.split():
            raise ConfigError(f"{path}, line {number}: no question", hint="fetch or copy it again")
        found.append((COARSE.index(coarse), text.lower().split()))
    if not found:
        raise ConfigError(f"{path}: empty", hint="fetch or copy it again")
    return found


def _examples(asked: Sequence[Question], known: dict[str, int], words: int) -> Examples:
    ids: npt.NDArray[np.int64] = np.full((len(asked), words), NONE, dtype=np.int64)
    for row, (_, text) in enumerate(asked):
        first = [known.get(word, NONE) for word in text[:words]]
        ids[row, : len(first)] = first
    return Examples({WORDS: ids, LABEL: np.array([kind for kind, _ in asked], dtype=np.int64)})
