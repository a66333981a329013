"""Secrets recovered from shares and checked; the holders of wrong shares are identified.

A recombined mask key must have the public key its owner advertised, a self-mask seed the
commitment. Where they differ some share is wrong. Shares are points of a polynomial, a Reed-Solomon
code word, so that with m of them and threshold t up to (m - t) // 2 wrong ones are found wherever
they are (Welch and Berlekamp, US patent 4,633,470, 1986), and their holders named; in most cases
more are, since a share is 16 such points that are wrong together. A wrong share may be the fault of
the holder that gave it or of the owner that sealed it. Where decoding fails the owner is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import shamir
from tessera.crypto.field import Field
from tessera.crypto.secret import Secret
from tessera.errors import CryptoError
from tessera.ids import ClientId

SHARE_FIELD: Final = Field(17)
"""Where the limbs of a share are (`tessera.crypto.shamir`)."""

LIMBS: Final = shamir.SECRET_BYTES // 2
_P: Final = SHARE_FIELD.order
_Residues = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecoveryTask:
    """A client's secret to be recovered: its shares by holder, and a check of the outcome."""

    owner: ClientId
    points: Mapping[ClientId, int]
    shares: Mapping[ClientId, bytes] = field(repr=False)
    is_right: Callable[[Secret], bool] = field(repr=False)


@dataclass(slots=True)
class Recovered:
    """The secrets by owner, the holders of wrong shares, the owners whose secret was not found."""

    secrets: dict[ClientId, Secret] = field(default_factory=dict, repr=False)
    bad_holders: set[ClientId] = field(default_factory=set)
    bad_owners: set[ClientId] = field(default_factory=set)


def recover(tasks: list[RecoveryTask], *, threshold: int) -> Recovered:
    """Every secret from the first threshold of its holders, or from others where that fails."""
    found = Recovered()
    doubtful: list[RecoveryTask] = []
    together: dict[tuple[int, ...], list[tuple[RecoveryTask, list[bytes]]]] = defaultdict(list)
    for one in tasks:
        chosen = sorted(one.shares, key=one.points.__getitem__)[:threshold]
        points = tuple(one.points[c] for c in chosen)
        together[points].append((one, [one.shares[c] for c in chosen]))
    for points, batch in together.items():
        # Secrets with the same holders cost one interpolation.
        try:
            secrets = shamir.combine_many(
                points, [shares for _, shares in batch], threshold=threshold
            )
        except CryptoError:
            doubtful += [one for one, _ in batch]
            continue
        for (one, _), secret in zip(batch, secrets, strict=True):
            if one.is_right(secret):
                found.secrets[one.owner] = secret
            else:
                doubtful.append(one)
    for one in doubtful:
        _search(one, threshold, found)
    return found


def _search(one: RecoveryTask, threshold: int, found: Recovered) -> None:
    """Without the holders known to be bad; if that fails, without those a decoding points at."""
    trusted = [c for c in one.shares if c not in found.bad_holders]
    secret = _put_together(one, trusted, threshold)
    if secret is not None:
        found.secrets[one.owner] = secret
        return
    limbs = {c: limb for c, share in one.shares.items() if (limb := _limbs(share)) is not None}
    for chosen in _choices(one, limbs, threshold):
        secret = _put_together(one, chosen, threshold)
        if secret is not None:
            found.secrets[one.owner] = secret
            found.bad_holders |= _misfits(one, limbs, chosen)
            return
    found.bad_owners.add(one.owner)


def _choices(
    one: RecoveryTask, limbs: Mapping[ClientId, _Residues], threshold: int
) -> Iterator[list[ClientId]]:
    """A threshold of holders each, among which the right ones should be."""
    holders = sorted(limbs)
    spare = len(holders) - threshold
    if spare < 0:
        return
    # Half of the spare number of errors is found whatever the wrong shares are. Beyond that there
    # are equations enough up to 16 / 17 of it, unless liars agree on what to be wrong by.
    for errors in sorted({spare // 2, LIMBS * spare // (LIMBS + 1)}):
        yield _fitting(one, limbs, threshold, errors)[:threshold]
    if spare == 1:  # nothing to decode with, but a right secret is recognised
        for out in holders:
            yield [c for c in holders if c != out]


def _put_together(one: RecoveryTask, holders: list[ClientId], threshold: int) -> Secret | None:
    """The secret from these holders' shares, if it is the right one."""
    secret = _combined({one.points[c]: one.shares[c] for c in holders}, threshold)
    return secret if secret is not None and one.is_right(secret) else None


def _misfits(
    one: RecoveryTask, limbs: Mapping[ClientId, _Residues], chosen: list[ClientId]
) -> set[ClientId]:
    """The holders whose shares are not on the polynomials through those of the chosen."""
    points = np.array([one.points[c] for c in chosen], dtype=np.int64)
    values = np.stack([limbs[c] for c in chosen])
    scaled = _inverse(_products_of_differences(points))[:, None] * values % _P
    found = one.shares.keys() - limbs.keys()
    for c in limbs.keys() - set(chosen):
        # Lagrange: P(x) = product of (x - x_i) * sum of y_i / ((x - x_i) * product of (x_i - x_k))
        away = (one.points[c] - points) % _P
        due = (_inverse(away)[:, None] * scaled % _P).sum(axis=0) % _P
        for factor in away:
            due = due * factor % _P
        if (due != limbs[c]).any():
            found.add(c)
    return found


def _combined(shares: Mapping[int, bytes], threshold: int) -> Secret | None:
    try:
        return shamir.combine(shares, threshold=threshold)
    except CryptoError:
        return None


# --- decoding -------------------------------------------------------------------------------------


def _fitting(
    one: RecoveryTask, limbs: Mapping[ClientId, _Residues], threshold: int, errors: int
) -> list[ClientId]:
    """The holders whose shares lie on one polynomial, if at most `errors` do not."""
    holders = sorted(limbs)
    points = np.array([one.points[c] for c in holders], dtype=np.int64)
    values = np.stack([limbs[c] for c in holders])
    right = error_locator(points, values, threshold=threshold, errors=errors) != 0
    return [c for c, fits in zip(holders, right, strict=True) if fits]


def error_locator(
    points: _Residues, values: _Residues, *, threshold: int, errors: int
) -> _Residues:
    """A polynomial E at every point, zero where `values` (m, limbs) are off their polynomials.

    With one limb, Welch and Berlekamp look for E of degree at most e and Q of degree below t + e,
    not both zero, with Q(x_i) = y_i E(x_i) for all i. Let P be the polynomial through the right
    values, and at most e be wrong. Such E and Q exist: E zero at the wrong points, and Q = P E.
    If m - e >= t + e there are no others: Q - P E vanishes at m - e points, so everywhere, and E is
    zero wherever y_i != P(x_i).

    Q itself is not needed. Values z_i are those of some polynomial of degree below d just if
    sum_i v_i x_i^j z_i = 0 for all j < m - d, where v_i is 1 / product of (x_i - x_k) over k != i.
    That leaves equations in the e + 1 coefficients of E alone,

        sum_k E_k S_(j+k) = 0    for 0 <= j < m - t - e,    with S_k = sum_i v_i x_i^k y_i.

    The limbs have their errors in the same places, so E has to meet the equations of all of them.
    """
    m, spare = len(points), len(points) - threshold
    term = _inverse(_products_of_differences(points))[:, None] * values % _P
    sums = np.empty((spare, values.shape[1]), dtype=np.int64)
    for k in range(spare):
        sums[k] = term.sum(axis=0) % _P
        term = term * points[:, None] % _P
    window = np.add.outer(np.arange(spare - errors), np.arange(errors + 1))
    system = sums[window].transpose(2, 0, 1).reshape(-1, errors + 1)
    located = np.zeros(m, dtype=np.int64)
    for coefficient in reversed(_kernel_vector(system)):
        located = (located * points + int(coefficient)) % _P
    return located


def _kernel_vector(matrix: _Residues) -> _Residues:
    """A vector x with `matrix` x = 0 by elimination modulo p; zero only if there is no other."""
    reduced = matrix.copy()
    columns = reduced.shape[1]
    pivots: list[int] = []
    free = -1
    for column in range(columns):
        rank = len(pivots)
        below = np.flatnonzero(reduced[rank:, column])
        if not len(below):
            free = column
            break
        reduced[[rank, rank + below[0]]] = reduced[[rank + below[0], rank]]
        reduced[rank] = reduced[rank] * pow(int(reduced[rank, column]), -1, _P) % _P
        factors = reduced[:, column].copy()
        factors[rank] = 0
        reduced = (reduced - factors[:, None] * reduced[rank]) % _P
        pivots.append(column)
    vector = np.zeros(columns, dtype=np.int64)
    if free >= 0:  # the first column without a pivot follows from those before it
        vector[free] = 1
        vector[:free] = -reduced[:free, free] % _P
    return vector


def _products_of_differences(points: _Residues) -> _Residues:
    """For each point the product of its differences from all the others, modulo p."""
    products = np.ones(len(points), dtype=np.int64)
    for point in points:
        differences = (points - point) % _P
        products = products * np.where(differences == 0, 1, differences) % _P
    return products


def _inverse(values: _Residues) -> _Residues:
    return np.array([pow(int(value), -1, _P) for value in values], dtype=np.int64)


def _limbs(share: bytes) -> _Residues | None:
    """A share's values, or None if it is not a valid share."""
    try:
        return SHARE_FIELD.unpack(share, LIMBS).astype(np.int64)
    except ValueError:
        return None
