"""Text as examples: the words before a word, and the word itself, speaker by speaker.

A speaker is a client with speeches of its own. An example is a word that has a word before it in
its speech: `context` (N, T) has the T words before it, the latest first and -1 where there are none
or none that is known, `next` (N,) the word itself. The last tenth of a speaker's words is the test
part, the tenth before it the validation part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.data import published
from tessera.data.examples import NONE, ClientData, Examples
from tessera.data.row_names import RowNames
from tessera.data.split import HELD, TEST, VALIDATION
from tessera.errors import ConfigError, DataMissing

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


# --- plays ----------------------------------------------------------------------------------------
#
# Plays as text: who says what, a role of one play being one speaker.
#
# After the list of persons, acts and scenes are headed lines; a speech begins with its role at the
# start of a line, then a tab; its other lines begin with a tab; directions stand in brackets.


MOST_BYTES: Final = 1 << 24
FEWEST_WORDS: Final = 200
"""Roles with fewer words are left out."""

FOLDER: Final = "shakespeare"
SOURCE: Final = published.Source(
    title="Plays of William Shakespeare, Moby edition",
    publisher="the public domain",
    page="one text per play",
    folders=(FOLDER,),
    files=("hamlet.txt",),
)

_BEGIN: Final = re.compile(r"^ACT I\b", re.MULTILINE)
_DIRECTION: Final = re.compile(r"\[[^\]]*\]")
_HEADING: Final = re.compile(r"(ACT|SCENE|INDUCTION)\b")


def plays(
    folder: Path | str | None = None,
    *,
    length: int = 4,
    least: int = 1,
    speakers: int = 0,
    part: str = TEST,
) -> ClientData:
    """The plays in the folder, their roles of 200 words or more as clients; the first `speakers`.

    Contexts are of `length` words; words that occur fewer than `least` times are unknown.
    """
    root = published.data_folder(folder, SOURCE)
    found = _texts(root / FOLDER) or _texts(root)
    if not found:
        raise DataMissing(f"{SOURCE.title}: no texts in {root / FOLDER}", hint=SOURCE.hint)
    roles: dict[str, list[list[str]]] = {}
    for path in found:
        play = path.name.partition(".")[0]
        text = published.content(path, most=MOST_BYTES).decode("latin-1")
        for role, speech in speeches(text):
            roles.setdefault(f"{play}: {role}", []).append(speech)
    large = {role: own for role, own in roles.items() if sum(map(len, own)) >= FEWEST_WORDS}
    if not large:
        raise ConfigError(
            f"{root}: no role has {FEWEST_WORDS} words", hint="is it a folder of plays?"
        )
    some = list(large.items())[: speakers or None]
    return spoken(
        "plays",
        dict(some),
        length=length,
        least=least,
        part=part,
        facts={
            "source": SOURCE.title,
            "speakers": f"{len(some):,} roles of {FEWEST_WORDS} words or more, of {len(found)} "
            "plays",
        },
    )


def _texts(folder: Path) -> list[Path]:
    """One file per play, plain or compressed."""
    if not folder.is_dir():
        return []
    plain = sorted(folder.glob("*.txt"))
    names = {path.name for path in plain}
    packed = [path for path in folder.glob("*.txt.gz") if path.name[:-3] not in names]
    return sorted([*plain, *packed], key=lambda path: path.name)


def speeches(text: str) -> Iterator[tuple[str, list[str]]]:
    """(role, words in lower case) of every speech of a play."""
    begin = _BEGIN.search(text)
    body = _DIRECTION.sub("", text[begin.start() :] if begin else text)
    role, words = "", list[str]()
    for line in body.splitlines():
        head, tab, said = line.partition("\t")
        head = head.strip()
        if head:
            if role and words:
                yield role, words
            role = head if tab and not _HEADING.match(head) else ""
            words = []
        if tab and role:
            words += words_of(said)
    if role and words:
        yield role, words


# --- synthetic speakers ---------------------------------------------------------------------------
#
# Synthetic speakers: text with a structure that can be learnt, where no data is at hand.
#
# Words follow each other by a Markov chain: every word has a few successors that are likely, the
# same for everybody, and the rest of the time a word comes from the speaker's own, which are drawn
# by a power law. So successors beat frequencies, and own words make rows that few others have.


SUCCESSORS = 3
FOLLOWED = 0.6
"""Share of words that follow from the word before."""
SPEECH = 12
"""Words of a speech."""


def speakers_like(
    speakers: int = 60,
    words: int = 2_000,
    *,
    spoken_each: int = 400,
    length: int = 4,
    part: str = TEST,
    seed: int = 0,
) -> ClientData:
    """So many speakers, each with `spoken_each` words of a language of `words`."""
    if speakers < 1 or words < 10 or spoken_each < SPEECH:
        raise ConfigError(
            f"speakers-like: {speakers} speakers, {words} words, {spoken_each} spoken by each",
            hint=f"at least 1, 10 and {SPEECH}",
        )
    rng = np.random.default_rng([seed, 29])
    names = [f"w{at}" for at in range(words)]
    likely = 1.0 / np.arange(1, words + 1)
    likely /= likely.sum()
    follow = rng.choice(words, (words, SUCCESSORS), p=likely)
    texts = {}
    for speaker in range(speakers):
        taste = likely * rng.gamma(0.3, size=words)
        own = rng.choice(words, spoken_each, p=taste / taste.sum())
        which = rng.integers(SUCCESSORS, size=spoken_each)
        follows = rng.random(spoken_each) < FOLLOWED
        said = own.copy()
        for at in range(1, spoken_each):
            if follows[at] and at % SPEECH:
                said[at] = follow[said[at - 1], which[at]]
        text = [names[word] for word in said]
        texts[f"speaker {speaker}"] = [
            text[at : at + SPEECH] for at in range(0, spoken_each, SPEECH)
        ]
    return spoken(
        "speakers-like",
        texts,
        length=length,
        part=part,
        facts={"source": f"synthetic speech (seed {seed})", "speakers": f"{speakers:,}"},
    )
