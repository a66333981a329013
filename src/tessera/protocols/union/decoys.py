"""Decoys: ids that a client adds to its union input though it does not hold them.

A client that takes part in the union and drops out before the update leaves rows that nobody
updates; by their count of zero the server would recognise them as that client's
(docs/threat-model.md). With decoys such rows have a second explanation. A decoy must be an id that
exists: an invented one is recognised and covers nothing. So decoys come from a public catalogue, or
from the unions of earlier rounds.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from tessera.crypto.hashing import Ids
from tessera.crypto.prg import Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError
from tessera.protocols.union.encoding import check_domain, check_ids

SHARE: Final = 0.1
"""Decoys per id that a client holds, unless the plan says otherwise."""

_WORD: Final = Ring(64)


class Catalogue(Protocol):
    """Ids that are publicly known to exist."""

    @property
    def size(self) -> int:
        """How many there are."""

    def at(self, places: Ids) -> Ids:
        """The ids at these places 0 .. size - 1; each place has another id."""

    @property
    def digest(self) -> bytes:
        """The same for the same ids: decoys from another catalogue would be other ones."""


@dataclass(frozen=True, slots=True)
class WholeTable:
    """Every id of the domain exists: a fixed table, all of whose rows are in use."""

    domain: int

    def __post_init__(self) -> None:
        check_domain(self.domain)

    @property
    def size(self) -> int:
        return self.domain

    def at(self, places: Ids) -> Ids:
        return places

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(f"{Label.WHOLE_CATALOGUE} {self.domain}".encode()).digest()


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """A list of ids: a catalogue, or the unions of earlier rounds taken together."""

    ids: Ids = field(repr=False)  # sorted and distinct

    def __post_init__(self) -> None:
        check_ids(self.ids, 2**64)

    @property
    def size(self) -> int:
        return self.ids.size

    def at(self, places: Ids) -> Ids:
        return self.ids[places]

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(
            Label.LISTED_CATALOGUE.encode() + self.ids.astype("<u8").tobytes()
        ).digest()


def decoy_count(held: int, share: float = SHARE) -> int:
    """How many decoys go with a set of this size: its share, rounded up; none with no ids."""
    if not 0.0 <= share < math.inf:
        raise ConfigError(f"decoys: a share of {share}; it must be 0 or more")
    return math.ceil(round(share * held, 9))  # 0.1 * 30 may be a little over 3


def draw(held: Ids, catalogue: Catalogue, randomness: Stream, *, share: float = SHARE) -> Ids:
    """Decoys for this set, sorted: uniform among the catalogue's ids that are not in it.

    The same stream, set and catalogue give the same decoys, so the caller decides how long they
    stay: decoys redrawn every round fade when unions are intersected over rounds, those of a
    stream that is kept for a period do not. If the catalogue has too few others, all are taken.
    """
    return draw_others(held, catalogue, randomness, decoy_count(held.size, share))


def draw_others(held: Ids, catalogue: Catalogue, randomness: Stream, wanted: int) -> Ids:
    """So many of the catalogue's ids that are not in this set, sorted; `draw` says how."""
    check_ids(held, 2**64)
    if not wanted or not catalogue.size:
        return np.zeros(0, dtype=np.uint64)
    if catalogue.size <= 4 * (held.size + wanted):
        return _from_all(held, catalogue, wanted, randomness)
    return _by_rejection(held, catalogue, wanted, randomness)


def with_decoys(
    held: Ids, catalogue: Catalogue, randomness: Stream, *, share: float = SHARE
) -> Ids:
    """What the client puts into the union: its ids and their decoys, sorted."""
    return np.union1d(held, draw(held, catalogue, randomness, share=share))


def _from_all(held: Ids, catalogue: Catalogue, wanted: int, randomness: Stream) -> Ids:
    """A small catalogue: a random word for each id that is not held, and the smallest words win.

    Equal words (2^-64 per pair) would be decided by the order of the ids.
    """
    others = np.setdiff1d(catalogue.at(np.arange(catalogue.size, dtype=np.uint64)), held)
    words = uniform(_WORD, randomness, others.size)
    chosen = np.argsort(words, kind="stable")[:wanted]
    return np.sort(others[chosen])


def _by_rejection(held: Ids, catalogue: Catalogue, wanted: int, randomness: Stream) -> Ids:
    """A large catalogue: draw places, drop those held or drawn before; three in four are kept."""
    # Words at and over the largest multiple of the size would make small places more likely.
    fair = 2**64 - 2**64 % catalogue.size
    chosen = np.zeros(0, dtype=np.uint64)
    start = 0
    while chosen.size < wanted:
        batch = 2 * (wanted - chosen.size) + 16
        words = uniform(_WORD, randomness, batch, start=start).astype(np.uint64)
        start += batch
        words = words[words <= np.uint64(fair - 1)]
        places = words if catalogue.size == 2**64 else words % np.uint64(catalogue.size)
        ids = catalogue.at(places)
        ids = ids[~np.isin(ids, held)]
        # The first occurrences in the order of drawing: sorting first would favour small ids.
        joined = np.concatenate([chosen, ids])
        _, first = np.unique(joined, return_index=True)
        chosen = joined[np.sort(first)][:wanted]
        if chosen.size < wanted and start > 64 * (wanted + 16):
            raise MisuseError("decoys: the catalogue repeats ids; each place needs another")
    return np.sort(chosen)
