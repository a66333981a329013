"""A code's noise read as a linear map, and how far one client moves what it opens.

z is replaced by unit impulses, each stream's at a word of its own, so that one run through the real
path gives the whole matrix: noise = N z, a row for every sum that was opened. For a client with
contributions d to these sums the outputs are a Gaussian mechanism of sensitivity
sqrt(d' (N N')^-1 d), whatever C the plan has in mind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from tessera.crypto import correlated
from tessera.crypto.correlated import GRID
from tessera.crypto.ring import Ring
from tessera.ids import SERVER
from tessera.learning.compression import signed
from tessera.privacy.dp.participation import Participation
from tessera.protocols.two_server.write import sums
from tessera.rounds.noise import ServerNoise
from tessera.rounds.two_server import ideal

UNIT = 1 << 12
"""An impulse, in ring units: entries of N are read to one in so many."""
WIDE = 64
"""Words of a part that is read; narrower ones have no room for every stream."""


@dataclass(frozen=True)
class Opened:
    """The noise on one sum: whose, of which round, over which list, and its words."""

    sender: str
    place: int
    words: np.ndarray = field(repr=False)
    before: bytes = field(repr=False)

    def same(self, other: Opened) -> bool:
        alike = (self.place, self.before) == (other.place, other.before)
        return alike and np.array_equal(self.words, other.words)


class Impulses:
    """In place of a discrete Gaussian: stream k is zeros but for an impulse at word k."""

    name, distance, reach = "impulses", 0.0, UNIT << GRID

    def __init__(self) -> None:
        self.streams: dict[tuple[bytes, bytes], int] = {}
        self.opened: list[Opened] = []

    def sample(self, stream, count: int, *, start: int = 0) -> np.ndarray:
        z = np.zeros(count, dtype=np.int64)
        if start == 0 and count >= WIDE:
            place = self.streams.setdefault((stream.key, stream.nonce), len(self.streams))
            z[place] = UNIT << GRID
        return z

    def matrix(self, sender: str, *, killed: bool = False) -> tuple[np.ndarray, list[int]]:
        """N of one server, and the place of each row. `killed`: the same words over the same list
        are one sum, which was computed again."""
        mine: list[Opened] = []
        for one in self.opened:
            if one.sender == sender and not (killed and any(map(one.same, mine))):
                mine.append(one)
        rows = np.array([one.words[: len(self.streams)] for one in mine], dtype=float) / UNIT
        return rows[:, np.abs(rows).max(axis=0) > 0], [one.place for one in mine]

    def note(self, ring: Ring, sender: str, place: int, before, after) -> None:
        added = signed(ring.sub(after.reshape(-1), before.reshape(-1)), ring)
        assert not added[len(self.streams) :].any()
        self.opened.append(Opened(sender, place, added, before.tobytes()))


@contextmanager
def impulses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Impulses]:
    """Everything that adds correlated noise adds impulses, and what it added is kept."""
    found = Impulses()
    with_noise, on_sum = sums.with_noise, ServerNoise.on_sum

    def watched(params, share, secrets, sender):
        noisy = with_noise(params, share, secrets, sender)
        for table, words in share.tables.items():
            if words.size >= WIDE:
                found.note(params.group, sender, int(params.round_id), words, noisy.tables[table])
                break
        return noisy

    def watched_sum(self, total, secrets, round_id):
        noisy = on_sum(self, total, secrets, round_id)
        found.note(self.plan.ring, SERVER, int(round_id), total.dense, noisy.dense)
        return noisy

    correlated.correlated_noise.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(correlated, "discrete_gaussian", lambda deviation: found)
        patch.setattr(sums, "with_noise", watched)
        patch.setattr(ideal, "with_noise", watched)
        patch.setattr(ServerNoise, "on_sum", watched_sum)
        yield found
    correlated.correlated_noise.cache_clear()


def loss(rows: np.ndarray, d: np.ndarray) -> float:
    """sqrt(d' (N N')^-1 d); infinite where noise leaves a direction of d open."""
    covariance = rows @ rows.T
    solved = np.linalg.pinv(covariance, rcond=1e-9) @ d
    if not np.allclose(covariance @ solved, d, atol=1e-6):
        return math.inf
    return math.sqrt(max(0.0, float(d @ solved)))


def patterns(bound: Participation) -> Iterator[tuple[int, ...]]:
    """All sets of rounds that a client may be in."""
    for most in range(1, bound.most + 1):
        for rounds in itertools.combinations(range(bound.rounds), most):
            if all(b - a >= bound.separation for a, b in itertools.pairwise(rounds)):
                yield rounds


def worst(rows: np.ndarray, places: Sequence[int], bound: Participation) -> float:
    """Over all patterns, signs, and lists where a place has several: a client is in one of them or
    in all."""
    most = 0.0
    for rounds in patterns(bound):
        choices: list[list[np.ndarray]] = []
        for at in rounds:
            here = [i for i, place in enumerate(places) if place == at]
            ways = [[i] for i in here] + ([here] if len(here) > 1 else [])
            each = []
            for way in ways:
                d = np.zeros(len(places))
                d[way] = 1.0
                each += [d, -d]
            choices.append(each or [np.zeros(len(places))])
        for parts in itertools.product(*choices):
            most = max(most, loss(rows, np.sum(parts, axis=0)))
    return most
