"""Negatives stay the same, are the client's alone to know, and are never among its own rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from tessera.crypto.secret import Secret
from tessera.learning.bound_model import Candidates
from tessera.rounds.root import with_negatives

ROWS = 5_000
OWN = np.arange(0, 400, 4, dtype=np.uint64)


def no_weights(*_):
    raise AssertionError("drawing asks for no weights")


def drawn(secret: bytes, own=OWN, rows=ROWS, negatives=60, table="words"):
    real = {table: own, "other": np.arange(3, dtype=np.uint64)}
    among = Candidates(
        root=table, target="word", rows=rows, negatives=negatives, log_weights=no_weights
    )
    found = with_negatives(real, among, Secret(secret))
    assert_array_equal(found["other"], real["other"])
    return np.setdiff1d(found[table], own), found[table]


def test_the_same_secret_gives_the_same_negatives():
    assert_array_equal(drawn(b"a" * 32)[1], drawn(b"a" * 32)[1])


def test_another_client_or_another_table_has_others():
    mine, _ = drawn(b"a" * 32)
    assert len(np.intersect1d(mine, drawn(b"b" * 32)[0])) < 10
    assert len(np.intersect1d(mine, drawn(b"a" * 32, table="tags")[0])) < 10


@settings(max_examples=50, deadline=None)
@given(
    own=st.sets(st.integers(0, 299), max_size=300),
    negatives=st.integers(0, 400),
    rows=st.integers(300, 3_000),
)
def test_there_are_as_many_as_wanted_or_all_there_are(own, negatives, rows):
    held = np.array(sorted(own), dtype=np.uint64)
    others, whole = drawn(b"c" * 32, held, rows, negatives)
    assert len(others) == min(negatives, rows - len(own))
    assert len(whole) == len(own) + len(others)
    assert (np.diff(whole.astype(np.int64)) > 0).all() and (not len(whole) or whole[-1] < rows)


def test_every_other_row_is_as_likely():
    """Chi-squared over ten equal parts of the table, own rows left out."""
    counts = np.zeros(10)
    own = np.arange(0, 1_000, 10, dtype=np.uint64)
    for client in range(200):
        others, _ = drawn(client.to_bytes(32, "big"), own, 1_000, 50)
        counts += np.bincount((others // 100).astype(np.int64), minlength=10)
    expected = counts.sum() / 10
    assert ((counts - expected) ** 2 / expected).sum() < 30  # 9 degrees: p < 0.0005


def test_who_knows_the_secret_takes_the_negatives_away_and_nobody_else_does():
    """What a server sees is the whole set; with the secret the client's own rows are left."""
    secret = b"s" * 32
    others, named = drawn(secret)

    def taken_away(guess: bytes):
        """Draws again with a guess, for own rows that are not known: all that come are removed."""
        candidates = drawn(guess, own=np.zeros(0, np.uint64), negatives=len(others) + 20)[0]
        return np.setdiff1d(named, candidates)

    left = taken_away(secret)
    assert len(np.setdiff1d(OWN, left)) <= 3 and len(np.intersect1d(left, others)) == 0
    # Another secret, such as one that follows from the plan's public seed, removes next to nothing.
    left = taken_away(b"the plan's seed is public: 0    ")
    assert len(np.intersect1d(left, others)) > 0.9 * len(others)
