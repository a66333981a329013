"""Noise correlated over rounds: an oracle over Python integers, addressing by row, statistics."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest

from tessera.crypto import correlated
from tessera.crypto.correlated import (
    FRACTION,
    GRID,
    BandedInverse,
    correlated_noise,
    noise_streams,
)
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.ids import HELPER, SERVER

INVERSE = BandedInverse((-(1 << 23), -(1 << 21), -1_234_567))
SECRETS = [Secret(bytes([at] * 32)) for at in range(1, 9)]


def streams(at: int, sender: str = SERVER, part: int = 3) -> list[correlated.Stream]:
    """Of round `at` of eight, whose secrets are `SECRETS`."""
    newest = [SECRETS[at - back] for back in range(INVERSE.draws) if at - back >= 0]
    return noise_streams(newest, at, sender, part)


def test_what_is_added_is_the_definition_in_exact_numbers() -> None:
    noise, ring = correlated_noise(INVERSE, 37.5), Ring(20)
    z = [noise.source.sample(streams(at)[0], 60).tolist() for at in range(8)]
    terms = [Fraction(term, 1 << FRACTION) for term in INVERSE.terms]
    words = ring.from_ints(np.arange(60) * 17_000)
    for at in range(8):
        y = []
        for i in range(60):
            past = sum(
                (r * z[at - 1 - back][i] for back, r in enumerate(terms) if at - 1 - back >= 0),
                Fraction(0),
            )
            y.append(z[at][i] + floor(past + Fraction(1, 2)))  # on the grid before z is added
        assert noise.sample(streams(at), 60).tolist() == y
        due = [
            (17_000 * i + floor(Fraction(y[i], 1 << GRID) + Fraction(1, 2))) % (1 << 20)
            for i in range(60)
        ]
        assert ring.to_ints(noise.add(ring, words, streams(at))) == due


@pytest.mark.parametrize(
    "ids", [[0, 1, 2, 3], [5], [3, 9, 10, 400, 401, 5000], list(range(0, 900, 7))]
)
def test_a_rows_noise_depends_on_no_other_row(ids: list[int]) -> None:
    noise, ring = correlated_noise(INVERSE, 11.0), Ring(32)
    whole = noise.add(ring, ring.zeros((5_100, 3)), streams(5))
    rows = np.array(ids, dtype=np.uint64)
    alone = noise.add(ring, ring.zeros((len(ids), 3)), streams(5), rows)
    assert np.array_equal(alone, whole[ids])


def test_how_much_is_drawn_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, ring = correlated_noise(INVERSE, 11.0), Ring(32)
    before = noise.add(ring, ring.zeros((1_000, 5)), streams(7))
    monkeypatch.setattr(correlated, "CHUNK", 64)
    assert np.array_equal(noise.add(ring, ring.zeros((1_000, 5)), streams(7)), before)


def test_rounds_servers_and_tables_have_streams_of_their_own() -> None:
    every = [
        (stream.key, stream.nonce)
        for at in range(4)
        for sender in (SERVER, HELPER)
        for part in (0, 1)
        for stream in streams(at, sender, part)[:1]
    ]
    assert len(set(every)) == len(every)
    again = streams(3)
    assert again[1:] == streams(2)[:3], "an earlier round's z is the same one in later rounds"


def test_running_sums_have_less_noise_and_single_rounds_more() -> None:
    noise, rounds, width = correlated_noise(INVERSE, 50.0), 8, 20_000
    y = np.array([noise.sample(streams(at), width) for at in range(rounds)]) * 2.0**-GRID
    independent = 50.0 * np.sqrt(rounds)
    assert y.sum(axis=0).std() < 0.5 * independent
    assert 50.0 < y[-1].std() < 65.0


def test_what_would_overflow_is_refused() -> None:
    with pytest.raises(ConfigError, match="63 bits"):
        correlated_noise(BandedInverse((-(1 << 24),) * 3), 2.0**20)
    with pytest.raises(MisuseError):
        correlated_noise(INVERSE, 11.0).add(Ring(32), Ring(32).zeros(3), [])
    with pytest.raises(MisuseError, match="ascend"):
        ids = np.array([3, 2], dtype=np.uint64)
        correlated_noise(INVERSE, 11.0).add(Ring(32), Ring(32).zeros((2, 1)), streams(1), ids)
