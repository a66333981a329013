"""Shamir sharing of a 32-byte secret: any t of n shares give it back, fewer reveal nothing.

Shamir, "How to share a secret" (1979), in a small field so that arrays do the work: a secret is
16 limbs of 16 bits, each shared on its own over F_p with p = 2^17 - 1
(docs/decisions/0004-shamir-small-field.md). All polynomials of a call are one matrix product
in float64, which is exact here: a product is below 2^34, and a sum of 1,000 of them below 2^44,
where float64 holds every integer up to 2^53.

A share is its 16 values of 17 bits as one little-endian bit stream, 34 bytes. It does not carry its
point: holders are numbered by the caller (position in the sorted holder list, plus one), the same
on both sides. A share does not prove that it is correct: whoever combines shares checks
the outcome against a public key or a commitment.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import prg
from tessera.crypto.field import Field
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, CryptoError, MisuseError

SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 34
MAX_HOLDERS: Final = 1_000

_FIELD: Final = Field(17)
_P: Final = _FIELD.order
_LIMBS: Final = SECRET_BYTES // 2
_BATCH: Final = 64  # secrets combined at once: a few MB at 1,000 holders

_Matrix = npt.NDArray[np.float64]


def split(
    secrets: Sequence[Secret], *, threshold: int, points: Sequence[int], coefficients: Secret
) -> list[list[bytes]]:
    """Share each secret among holders at `points`: `split(...)[s][h]` is the share of s for h.

    The polynomials' other coefficients, uniform in F_p, are expanded from `coefficients`, which
    has to be fresh for every call: two secrets shared under one differ as their shares do.
    """
    _check_threshold(threshold, len(points))
    held = _check_points(points)
    for secret in secrets:
        if len(secret) != SECRET_BYTES:
            raise MisuseError(f"shamir: a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    columns = len(secrets) * _LIMBS
    constant = np.frombuffer(b"".join(s.reveal() for s in secrets), dtype="<u2")
    # the shape is part of the stream's name, so that it never cuts one stream in two ways
    stream = prg.Stream.of(coefficients, prg.Label.SHARE_COEFFICIENTS, threshold, len(secrets))
    others = prg.uniform(_FIELD, stream, (threshold - 1) * columns)
    # f(x) = secret + a_1 x + ... + a_(t-1) x^(t-1), for all limbs and points at once
    matrix = others.reshape(threshold - 1, columns).astype(np.float64)
    values = _reduced(_powers(held, threshold) @ matrix + constant)  # (points, columns)
    values = values.reshape(len(held), len(secrets), _LIMBS).swapaxes(0, 1)
    packed = _FIELD.pack(np.ascontiguousarray(values).astype(_FIELD.dtype))
    shares = [packed[i : i + SHARE_BYTES] for i in range(0, len(packed), SHARE_BYTES)]
    return [shares[i : i + len(held)] for i in range(0, len(shares), len(held))]


def combine(shares: Mapping[int, bytes], *, threshold: int) -> Secret:
    """The secret whose share at each point is given; the `threshold` lowest points are used."""
    return combine_many(list(shares), [list(shares.values())], threshold=threshold)[0]


def combine_many(
    points: Sequence[int], shares: Sequence[Sequence[bytes]], *, threshold: int
) -> list[Secret]:
    """Several secrets from the same holders: `shares[s][h]` is the share of s at `points[h]`.

    Faster than one at a time, for the interpolation is prepared once. A `CryptoError` names the
    secret's position in `shares`; the others can be combined without it.
    """
    _check_threshold(threshold, MAX_HOLDERS)
    held = _check_points(points)
    if len(held) < threshold:
        raise CryptoError(f"shamir: {len(held)} shares, {threshold} are needed")
    order = sorted(range(len(held)), key=held.__getitem__)[:threshold]
    weights = _weights(tuple(held[h] for h in order))
    secrets: list[Secret] = []
    for first in range(0, len(shares), _BATCH):
        batch = shares[first : first + _BATCH]
        values = _unpacked(batch, order, held, first)
        limbs = _reduced(weights @ values.astype(np.float64))
        over = (limbs >> 16).any(axis=1)
        if over.any():
            raise CryptoError(
                f"shamir: secret {first + int(over.argmax())} combines to a limb over 16 bits: "
                "some share is wrong, or belongs to another secret or point"
            )
        secrets += (Secret(row.tobytes()) for row in limbs.astype("<u2"))
    return secrets


def _check_threshold(threshold: int, holders: int) -> None:
    if not 1 <= holders <= MAX_HOLDERS:
        raise ConfigError(f"shamir: 1 to {MAX_HOLDERS} holders, not {holders}")
    if not 1 <= threshold <= holders:
        raise ConfigError(f"shamir: threshold {threshold} of {holders} holders")


def _check_points(points: Sequence[int]) -> tuple[int, ...]:
    """The points as a key for the caches; the secret is at 0, and p is 0 again."""
    held = tuple(operator.index(point) for point in points)
    for point in held:
        if not 0 < point < _P:
            raise CryptoError(f"shamir: point {point} is not between 1 and {_P - 1}")
    if len(set(held)) != len(held):
        twice = next(point for point in held if held.count(point) > 1)
        raise CryptoError(f"shamir: point {twice} occurs twice")
    return held


def _unpacked(
    shares: Sequence[Sequence[bytes]], order: Sequence[int], held: Sequence[int], first: int
) -> npt.NDArray[Any]:
    """Limbs of the shares that are used, (secret, point, limb); `first` is for messages."""
    chosen: list[bytes] = []
    for s, row in enumerate(shares, first):
        if len(row) != len(held):
            raise MisuseError(f"shamir: secret {s} has {len(row)} shares at {len(held)} points")
        for h in order:
            if len(row[h]) != SHARE_BYTES:
                raise CryptoError(
                    f"shamir: secret {s}, point {held[h]}: a share has {SHARE_BYTES} bytes, "
                    f"not {len(row[h])}"
                )
            chosen.append(row[h])
    try:
        limbs = _FIELD.unpack(b"".join(chosen), len(chosen) * _LIMBS)
    except ValueError:
        bad = next(i for i, share in enumerate(chosen) if not _is_reduced(share))
        s, h = divmod(bad, len(order))
        raise CryptoError(
            f"shamir: secret {first + s}, point {held[order[h]]}: a limb is not below {_P}"
        ) from None
    return limbs.reshape(len(shares), len(order), _LIMBS)


def _is_reduced(share: bytes) -> bool:
    bits = int.from_bytes(share, "little")
    return all(bits >> 17 * limb & _P != _P for limb in range(_LIMBS))


def _reduced(exact: _Matrix) -> npt.NDArray[np.int64]:
    """Sums of products, each an integer below 2^53, modulo p."""
    return exact.astype(np.int64) % _P


@lru_cache(maxsize=8)
def _powers(points: tuple[int, ...], threshold: int) -> _Matrix:
    """Row per point: x, x^2, ..., x^(threshold - 1) modulo p. At most 8 MB."""
    x = np.array(points, dtype=np.int64)
    powers = np.empty((threshold - 1, len(points)))
    power = x
    for k in range(threshold - 1):
        powers[k] = power
        power = power * x % _P
    powers.flags.writeable = False  # it is shared by all who ask
    return powers.T


@lru_cache(maxsize=256)
def _weights(points: tuple[int, ...]) -> _Matrix:
    """Lagrange's weights at zero: w_i = product over j != i of x_j / (x_j - x_i), modulo p."""
    x = np.array(points, dtype=np.int64)
    factors = (x[None, :] - x[:, None]) % _P
    np.fill_diagonal(factors, x)  # so that row i's product is x_i * product of (x_j - x_i)
    while factors.shape[1] > 1:  # fold the right half onto the left; an odd one out stays
        half = factors.shape[1] // 2
        folded = factors[:, :half] * factors[:, -half:] % _P
        factors = np.concatenate((folded, factors[:, half : factors.shape[1] - half]), axis=1)
    product = 1
    for point in points:
        product = product * point % _P
    weights = np.array([product * pow(int(f), -1, _P) % _P for f in factors[:, 0]], dtype=float)
    weights.flags.writeable = False
    return weights
