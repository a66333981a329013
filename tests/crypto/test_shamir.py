"""Shamir sharing against whole-number arithmetic, and what fewer than t shares say: nothing."""

from __future__ import annotations

import math
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tessera.crypto import prg, shamir
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.field import Field
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, CryptoError, MisuseError
from vectors import expectation, load

P = 2**17 - 1
SECRETS = st.binary(min_size=32, max_size=32).map(Secret)
FRESH = ScriptedEntropy(b"shamir")


def limbs(secret: Secret) -> list[int]:
    content = secret.reveal()
    return [int.from_bytes(content[i : i + 2], "little") for i in range(0, 32, 2)]


def unpacked(share: bytes) -> list[int]:
    bits = int.from_bytes(share, "little")
    return [bits >> 17 * i & P for i in range(16)]


def packed(values: list[int]) -> bytes:
    return sum(v << 17 * i for i, v in enumerate(values)).to_bytes(34, "little")


def polynomial(coefficients: list[int], x: int) -> int:
    return sum(a * x**k for k, a in enumerate(coefficients)) % P


def interpolated_at_zero(points: list[int], values: list[int]) -> int:
    """Lagrange over F_p in whole numbers: numerator and denominator apart, one inverse."""
    total = 0
    for i, y in zip(points, values, strict=True):
        others = [j for j in points if j != i]
        over, under = math.prod(others), math.prod(j - i for j in others)
        total += y * over * pow(under, -1, P)
    return total % P


@st.composite
def sharings(draw, max_holders=9):
    """Secrets, threshold and points; the points anywhere in the field."""
    points = draw(st.lists(st.integers(1, P - 1), min_size=1, max_size=max_holders, unique=True))
    threshold = draw(st.integers(1, len(points)))
    return draw(st.lists(SECRETS, max_size=3)), threshold, points


@pytest.mark.parametrize("vector", load("shamir.json", "split"), ids=attrgetter("name"))
def test_split(vector):
    shares = shamir.split(
        [Secret(bytes.fromhex(s)) for s in vector.secrets],
        threshold=vector.threshold,
        points=vector.points,
        coefficients=Secret(vector.coefficients),
    )
    assert [[share.hex() for share in row] for row in shares] == vector.shares


@pytest.mark.parametrize("vector", load("shamir.json", "combine"), ids=attrgetter("name"))
def test_combine(vector):
    rows = [[bytes.fromhex(share) for share in row] for row in vector.shares]
    with expectation(vector):
        combined = shamir.combine_many(vector.points, rows, threshold=vector.threshold)
        assert combined == [Secret(bytes.fromhex(s)) for s in vector.secrets]


@given(sharings(), SECRETS)
def test_a_share_is_the_polynomials_value_at_the_holders_point(sharing, coefficients):
    secrets, threshold, points = sharing
    shares = shamir.split(secrets, threshold=threshold, points=points, coefficients=coefficients)
    stream = prg.Stream.of(coefficients, prg.Label.SHARE_COEFFICIENTS, threshold, len(secrets))
    columns = 16 * len(secrets)
    drawn = prg.uniform(Field(17), stream, (threshold - 1) * columns).tolist()
    assert len(shares) == len(secrets)
    for s, secret in enumerate(secrets):
        for point, share in zip(points, shares[s], strict=True):
            due = [
                polynomial([limb, *drawn[16 * s + i :: columns]], point)
                for i, limb in enumerate(limbs(secret))
            ]
            assert len(share) == shamir.SHARE_BYTES
            assert unpacked(share) == due


@given(sharings(), SECRETS, st.data())
def test_any_threshold_of_the_shares_give_the_secrets_back(sharing, coefficients, data):
    secrets, threshold, points = sharing
    shares = shamir.split(secrets, threshold=threshold, points=points, coefficients=coefficients)
    some = data.draw(st.permutations(range(len(points))))
    some = some[: data.draw(st.integers(threshold, len(points)))]
    at = [points[i] for i in some]
    rows = [[row[i] for i in some] for row in shares]
    assert shamir.combine_many(at, rows, threshold=threshold) == secrets
    for secret, row in zip(secrets, rows, strict=True):
        assert shamir.combine(dict(zip(at, row, strict=True)), threshold=threshold) == secret


@given(
    st.lists(st.integers(1, P - 1), min_size=1, max_size=6, unique=True),
    st.lists(st.lists(st.integers(0, P - 1), min_size=16, max_size=16), min_size=6, max_size=6),
)
def test_any_shares_combine_to_lagranges_value_or_are_refused(points, values):
    points = sorted(points)
    shares = {x: packed(v) for x, v in zip(points, values, strict=False)}
    columns = zip(*(unpacked(share) for share in shares.values()), strict=True)
    due = [interpolated_at_zero(points, list(column)) for column in columns]
    if max(due) >= 2**16:
        with pytest.raises(CryptoError, match="secret 0 combines to a limb over 16 bits"):
            shamir.combine(shares, threshold=len(points))
    else:
        assert limbs(shamir.combine(shares, threshold=len(points))) == due


@pytest.mark.parametrize("points", [range(1, 1001), range(P - 1000, P)], ids=["low", "high"])
def test_the_largest_sharing_is_exact_even_when_every_coefficient_is(monkeypatch, points):
    """All coefficients p - 1: sums as large as they get, where a lost bit would show."""
    monkeypatch.setattr(
        prg, "uniform", lambda field, stream, count: np.full(count, P - 1, dtype=field.dtype)
    )
    secret = Secret(b"\xff" * 32)
    [shares] = shamir.split([secret], threshold=1000, points=points, coefficients=Secret(b"c" * 32))
    for x, share in zip(points, shares, strict=True):
        value = 0
        for coefficient in [P - 1] * 999 + [2**16 - 1]:  # Horner, from the highest down
            value = (value * x + coefficient) % P
        assert unpacked(share) == [value] * 16
    assert shamir.combine(dict(zip(points, shares, strict=True)), threshold=1000) == secret


def test_a_thousand_holders_two_thirds_of_whom_answer():
    secrets = [FRESH.secret("secret", i) for i in range(70)]  # more than one batch
    points = range(1, 1001)
    shares = shamir.split(secrets, threshold=667, points=points, coefficients=FRESH.secret("a"))
    some = np.random.default_rng(5).permutation(1000)[:667].tolist()
    rows = [[row[i] for i in some] for row in shares]
    assert shamir.combine_many([points[i] for i in some], rows, threshold=667) == secrets
    rows[66][3] = rows[65][3]  # in the second batch
    with pytest.raises(CryptoError, match="secret 66 combines to a limb over 16 bits"):
        shamir.combine_many([points[i] for i in some], rows, threshold=667)


@pytest.mark.parametrize("content", [0, 1, 2**16 - 1])
@pytest.mark.parametrize("point", [1, 2, 1000])
def test_one_share_of_two_is_every_value_once_whatever_the_secret(monkeypatch, content, point):
    """Exact secrecy at t = 2: over all coefficients, each share occurs once for every secret."""
    every = np.arange(16 * 2**13, dtype=np.uint32)
    every[-1] = 0  # p + 1 columns for p coefficients: zero has two
    monkeypatch.setattr(prg, "uniform", lambda field, stream, count: every)
    secret = Secret(content.to_bytes(2, "little") * 16)
    shares = shamir.split(
        [secret] * 2**13, threshold=2, points=[point, 77], coefficients=FRESH.secret("b")
    )
    seen = np.sort(Field(17).unpack(b"".join(row[0] for row in shares), len(every)))
    repeated = content  # the share for coefficient zero
    assert seen.tolist() == sorted([*range(P), repeated])


@pytest.mark.parametrize("content", [bytes(32), b"\xff" * 32], ids=["zeros", "ones"])
def test_two_shares_of_three_look_uniform_together(content):
    """The generator's own coefficients at t = 3: 8 x 8 cells of two holders' shares."""
    shares = shamir.split(
        [Secret(content)] * 4000, threshold=3, points=[1, 2, 3], coefficients=FRESH.secret("c")
    )
    first, second = (Field(17).unpack(b"".join(row[h] for row in shares), 64_000) for h in (0, 1))
    cells = np.histogram2d(first, second, bins=8, range=[[0, P], [0, P]])[0]
    assert 1e-4 < stats.chisquare(cells.ravel()).pvalue < 1 - 1e-4


def test_shares_of_one_secret_differ_with_coefficients_threshold_and_company():
    secret, other = FRESH.secret("x"), FRESH.secret("y")

    def first(secrets: list[Secret], threshold: int, coefficients: Secret) -> bytes:
        return shamir.split(
            secrets, threshold=threshold, points=[1, 2, 3], coefficients=coefficients
        )[0][0]

    one, two = FRESH.secret("one"), FRESH.secret("two")
    shares = {
        first([secret], 2, one),
        first([secret], 2, two),
        first([secret], 3, one),
        first([secret, other], 2, one),
    }
    assert len(shares) == 4
    assert first([secret], 2, one) in shares  # the same again is the same bytes


@pytest.mark.parametrize(
    ("threshold", "holders"), [(0, 3), (-1, 3), (4, 3), (1, 0), (1, 1001), (1001, 1001)]
)
def test_thresholds_and_holders_that_cannot_work_are_refused(threshold, holders):
    with pytest.raises(ConfigError, match="holders"):
        shamir.split(
            [FRESH.secret("x")],
            threshold=threshold,
            points=range(1, holders + 1),
            coefficients=FRESH.secret("a"),
        )


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([1, 0, 3], "point 0 is not"),
        ([1, P, 3], f"point {P} is not"),
        ([1, -1, 3], "point -1 is not"),
        ([3, 1, 3], "point 3 occurs twice"),
    ],
)
def test_no_share_is_made_at_a_point_that_would_give_the_secret_away(points, says):
    with pytest.raises(CryptoError, match=says):
        shamir.split(
            [FRESH.secret("x")], threshold=2, points=points, coefficients=FRESH.secret("a")
        )


@pytest.mark.parametrize("size", [0, 31, 33])
def test_only_32_byte_secrets_are_shared(size):
    with pytest.raises(MisuseError, match=f"32 bytes, not {size}"):
        shamir.split(
            [FRESH.secret("x"), Secret(bytes(size))],
            threshold=1,
            points=[1],
            coefficients=FRESH.secret("a"),
        )


def test_every_secret_has_a_share_at_every_point():
    shares = shamir.split(
        [FRESH.secret("x")] * 2, threshold=2, points=[1, 2, 3], coefficients=FRESH.secret("a")
    )
    with pytest.raises(MisuseError, match="secret 1 has 2 shares at 3 points"):
        shamir.combine_many([1, 2, 3], [shares[0], shares[1][:2]], threshold=2)


@settings(max_examples=30)
@given(st.data())
def test_a_refusal_does_not_show_the_share(data):
    [row] = shamir.split(
        [FRESH.secret("x")], threshold=2, points=[1, 2], coefficients=FRESH.secret("a")
    )
    bad = data.draw(st.sampled_from([row[1][:-1], row[1] + b"\0", b"\xff" * 34]))
    with pytest.raises(CryptoError) as caught:
        shamir.combine({1: row[0], 2: bad}, threshold=2)
    assert row[0].hex()[:8] not in str(caught.value)
    assert bad.hex()[:8] not in str(caught.value)
    assert repr(bad)[2:10] not in str(caught.value)


@pytest.mark.parametrize("bad", [b"", b"\xff" * 34], ids=["length", "limb"])
def test_a_bad_share_is_named_by_its_secret_and_point_in_whatever_order_they_came(bad):
    points = [30, 10, 20]
    shares = shamir.split(
        [FRESH.secret("x")] * 3, threshold=3, points=points, coefficients=FRESH.secret("a")
    )
    shares[2][1] = bad
    with pytest.raises(CryptoError, match="secret 2, point 10: a"):
        shamir.combine_many(points, shares, threshold=3)
