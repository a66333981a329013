"""Text as examples: the words before a word, and the word itself, speaker by speaker.

A speaker is a client with speeches of its own. An example is a word that has a word before it in
its speech: `context` (N, T) has the T words before it, the latest first and -1 where there are none
or none that is known, `next` (N,) the word itself. The last tenth of a speaker's words is the test
part, the tenth before it the validation part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data.classes import HELD, TEST, VALIDATION
from tessera.data.examples import NONE, ClientData, Examples
from tessera.data.row_names import RowNames
from tessera.errors import ConfigError

CONTEXT: Final = "context"
NEXT: Final = "next"
WORD: Final = "word"

Speech = Sequence[str]


def spoken(
    name: str,
    speakers: Mapping[str, Sequence[Speech]],
    *,
    length: int,
    least: int = 1,
    part: str = TEST,
    facts: Mapping[str, Any],
) -> ClientData:
    """Speakers' own words as a population; `length` words are a context.

    The dictionary has the words that occur `least` times or more in the training part. With `part`
    "validation" the model is tested on the tenth before the last, and the last is not looked at.
    """
    if part not in (TEST, VALIDATION):
        raise ConfigError(f"{name}: part = {part!r}", hint=f"{TEST} or {VALIDATION}")
    if length < 1 or least < 1:
        raise ConfigError(f"{name}: length = {length}, least = {least}", hint="both are 1 or more")
    held = {TEST: (1.0 - HELD, 1.0), VALIDATION: (1.0 - 2 * HELD, 1.0 - HELD)}[part]
    texts = [_joined(speeches, held) for speeches in speakers.values()]
    occurring = Counter(word for text in texts for word in text.words[: text.train])
    known = sorted(word for word, times in occurring.items() if times >= least)
    row = {word: at for at, word in enumerate(known)}
    coded = [_coded(text, row, length) for text in texts]
    train, test = [each[0] for each in coded], [each[1] for each in coded]
    if not any(len(each) for each in train):
        raise ConfigError(f"{name}: no word follows another", hint="is the text empty?")
    return ClientData(
        name=name,
        train=_stacked(train),
        offsets=_offsets(train),
        test=_stacked(test),
        test_offsets=_offsets(test),
        sizes={WORD: len(known), "user": len(speakers)},
        facts={
            **facts,
            "words": f"{sum(text.train for text in texts):,} for training",
            "dictionary": f"{len(known):,} words, of the training part",
            "split": "by speaker: the last tenth is tested on"
            if part == TEST
            else "by speaker: the tenth before the last is tested on, the last is left out",
        },
        ids={WORD: RowNames(known), "user": RowNames(list(speakers))},
    )


_WORD: Final = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|'[^\W\d_]+")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, with their apostrophes and without anything else."""
    return _WORD.findall(text.lower())


class _joined:
    """A speaker's words in one line, where speeches begin, and how many are for training."""

    def __init__(self, speeches: Sequence[Speech], held: tuple[float, float]) -> None:
        self.words = [word for speech in speeches for word in speech]
        self.place = np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(len(speech)) for speech in speeches)]
        )
        self.train, self.end = (round(share * len(self.words)) for share in held)


def _coded(text: _joined, row: Mapping[str, int], length: int) -> tuple[Examples, Examples]:
    """Training and test examples of one speaker."""
    ids = np.array([row.get(word, NONE) for word in text.words], dtype=np.int64)
    context = np.full((len(ids), length), NONE, dtype=np.int64)
    for back in range(1, length + 1):
        there = text.place >= back
        context[there, back - 1] = ids[np.flatnonzero(there) - back]
    follows = text.place >= 1
    at = np.arange(len(ids))
    # A word outside the dictionary can be missed by a test, but nothing can be learnt of it.
    train = follows & (at < text.train) & (ids >= 0)
    test = follows & (at >= text.train) & (at < text.end)
    every = Examples({CONTEXT: context, NEXT: ids})
    return every.take(train), every.take(test)


def _stacked(parts: Sequence[Examples]) -> Examples:
    return Examples(
        {name: np.concatenate([part[name] for part in parts]) for name in (CONTEXT, NEXT)}
    )


def _offsets(parts: Sequence[Examples]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
