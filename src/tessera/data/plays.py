"""Plays as text: who says what, a role of one play being one speaker.

After the list of persons, acts and scenes are headed lines; a speech begins with its role at the
start of a line, then a tab; its other lines begin with a tab; directions stand in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tessera.data import files
from tessera.data.classes import TEST
from tessera.data.examples import ClientData
from tessera.data.words import spoken, words_of
from tessera.errors import ConfigError

MOST_BYTES: Final = 1 << 24
FEWEST_WORDS: Final = 200
"""Roles with fewer words are left out."""

FOLDER: Final = "shakespeare"
SOURCE: Final = files.Source(
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
    root = files.data_folder(folder, SOURCE)
    found = _texts(root / FOLDER) or _texts(root)
    if not found:
        raise ConfigError(f"{SOURCE.title}: no texts in {root / FOLDER}", hint=SOURCE.hint)
    roles: dict[str, list[list[str]]] = {}
    for path in found:
        play = path.name.partition(".")[0]
        text = files.content(path, most=MOST_BYTES).decode("latin-1")
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
