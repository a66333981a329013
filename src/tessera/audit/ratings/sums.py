"""Gradients in sums: rows with one rater, whose they are, and what follows for the others.

A secure sum gives, for each row it opens, the number of ratings in it and the sum of their deltas.
Where that number is 1 the sum *is* one client's (e, e p), solved as in `gradient.py`. Three things
follow, and the second and third are not in the paper:

- the rating but for the client's own bias, with no name on it;
- *links*: all rows of one client have the same p, which differs from everybody else's, so that its
  sole rows are known to belong together. If each row hides its rater among the members of a group,
  the rater of all of them is a member of all the groups;
- *mixtures*: a row with several raters is the sum of e p over them: k + 1 equations for as many
  unknown e as there are raters, once their p is known. Every client with a sole row has revealed
  its p, so rows of such clients can be separated into single ratings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.audit.ratings.gradient import Floats, factors_of, gradients
from tessera.learning.tables.arrays import Ids
from tessera.learning.training.settings import LocalTraining

SURE: Final = 4.0
"""Standard deviations by which something has to differ from what rounding does."""

AMPLE: Final = 20.0
"""An error this many times what rounding explains is large enough to divide by."""


@dataclass(frozen=True, slots=True)
class SumRows:
    """Rows of one opened sum: the values sent, the mean delta, and the number of ratings.

    `quantum` is the distance of two neighbouring levels of what clients send.
    """

    round_id: int
    items: Ids = field(repr=False)
    rows: Floats = field(repr=False)  # (n, k + 1)
    means: Floats = field(repr=False)
    counts: npt.NDArray[np.int64] = field(repr=False)
    quantum: float

    def noise(self, training: LocalTraining) -> float:
        """How far rounding may put one coordinate of one rating's e p, as a standard deviation."""
        return 0.5 * self.quantum / (training.rate_in(self.round_id) * training.table_rate)


@dataclass(frozen=True, slots=True)
class Linked:
    """Sole rows of one client: places in the sum, their x = r - base - c, and its factors.

    `weight` is the sum of their squared errors: the factors are as sharp as its root is large.
    """

    at: npt.NDArray[np.int64] = field(repr=False)
    ratings: Floats = field(repr=False)
    factors: Floats = field(repr=False)
    weight: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """A row of several raters, taken apart: which of the linked clients, and the x of each."""

    at: int
    raters: tuple[int, ...]
    ratings: tuple[float, ...]


def alone(rows: SumRows, training: LocalTraining) -> tuple[Floats, Floats, Floats]:
    """(e, p, x) of every row, each taken for one client's; wrong where there are several.

    Factors are NaN where the error is too small to divide by.
    """
    errors, products = gradients(rows.rows, rows.means, training, rows.round_id)
    enough = np.abs(errors) > AMPLE * rows.noise(training)
    factors = np.full_like(products, np.nan)
    factors[enough] = products[enough] / errors[enough, None]
    ratings = errors + np.einsum("nk,nk->n", rows.rows[:, :-1], factors) + rows.rows[:, -1]
    return errors, factors, ratings


def linked(rows: SumRows, training: LocalTraining) -> list[Linked]:
    """The rows with one rating, put together by whose they are; those that fit nobody or two are
    left out."""
    errors, products = gradients(rows.rows, rows.means, training, rows.round_id)
    noise = rows.noise(training)
    sole = np.flatnonzero((rows.counts == 1) & (np.abs(errors) > AMPLE * noise))
    found: list[list[int]] = []
    centres = np.zeros((0, products.shape[1]))
    # The largest errors first: they give the sharpest factors to compare the others with.
    for at in sole[np.argsort(-np.abs(errors[sole]))]:
        off = _misfit(products[at], errors[at], centres, noise)
        fits = np.flatnonzero(off < _close(products.shape[1]))
        if not len(fits):
            found.append([int(at)])
            centres = np.vstack([centres, products[at] / errors[at]])
        elif len(fits) == 1:
            whose = int(fits[0])
            found[whose].append(int(at))
            centres[whose] = factors_of(errors[found[whose]], products[found[whose]])
    groups = []
    for places, centre in zip(found, centres, strict=True):
        where = np.array(sorted(places), dtype=np.int64)
        x = errors[where] + rows.rows[where, :-1] @ centre + rows.rows[where, -1]
        groups.append(Linked(where, x, centre, float(errors[where] @ errors[where])))
    return groups


def mixtures(rows: SumRows, known: list[Linked], training: LocalTraining) -> list[Mixture]:
    """The rows of several ratings that linked clients explain to within rounding.

    The raters are picked one after the other (orthogonal matching pursuit), among directions made
    as different as they can be; as many as the count says, and not more than half the equations.
    Who is picked with an error that rounding explains is left out: it may be somebody else.
    """
    if not known:
        return []
    errors, products = gradients(rows.rows, rows.means, training, rows.round_id)
    total = np.column_stack([products, errors]) * rows.counts[:, None]
    atoms = np.column_stack([[g.factors for g in known], np.ones(len(known))])  # (clients, k + 1)
    weights = np.array([group.weight for group in known])
    noise = rows.noise(training)
    flat = _flattened(atoms, noise)
    room = min(len(known), atoms.shape[1] // 2)
    found = []
    for at in np.flatnonzero((rows.counts >= 2) & (rows.counts <= room)):
        count = int(rows.counts[at])
        picked = np.array(_picked(total[at], atoms, flat, count))
        chosen = atoms[picked]
        parts, *_ = np.linalg.lstsq(chosen.T, total[at], rcond=None)
        left = total[at] - parts @ chosen
        # The raters' own rounding, and that of the sole rows which gave their factors.
        spread = noise * np.sqrt(count + float(np.sum(parts * parts / weights[picked])))
        if np.sqrt(np.sum(left * left) / (len(left) - count)) > spread * _close(len(left) - count):
            continue
        sigma = spread * np.sqrt(np.diag(np.linalg.pinv(chosen @ chosen.T)))
        sure = np.abs(parts) > SURE * sigma
        x = parts + rows.rows[at, :-1] @ chosen[:, :-1].T + rows.rows[at, -1]
        if sure.any():
            raters, ratings = picked[sure].tolist(), x[sure].tolist()
            found.append(Mixture(int(at), tuple(raters), tuple(ratings)))
    return found


def _close(freedom: int) -> float:
    """Up to this many times its standard deviation the root mean square of noise may come."""
    return 1.0 + SURE / float(np.sqrt(2.0 * freedom))


def _misfit(product: Floats, error: float, centres: Floats, noise: float) -> Floats:
    """How far e p lies from e times each centre, in units of what rounding explains."""
    left = product - error * centres
    # The centre comes from a row at least as large: its own rounding is at most as much again.
    spread = noise * np.sqrt(2.0 * (1.0 + np.einsum("ck,ck->c", centres, centres)))
    return np.asarray(np.sqrt(np.mean(left * left, axis=1)) / spread)


def _flattened(atoms: Floats, noise: float) -> Floats:
    """A map under which the atoms' directions share nothing that is more than noise."""
    values, vectors = np.linalg.eigh(atoms.T @ atoms)
    scale = 1.0 / np.sqrt(np.maximum(values, 0.0) + max(noise, 1e-12) ** 2 * len(atoms))
    return np.asarray((vectors * scale) @ vectors.T)


def _picked(total: Floats, atoms: Floats, flat: Floats, count: int) -> list[int]:
    target, dictionary = flat @ total, atoms @ flat
    dictionary /= np.linalg.norm(dictionary, axis=1, keepdims=True)
    picked: list[int] = []
    left = target
    for _ in range(count):
        score = np.abs(dictionary @ left)
        score[picked] = -1.0
        picked.append(int(np.argmax(score)))
        parts, *_ = np.linalg.lstsq(dictionary[picked].T, target, rcond=None)
        left = target - parts @ dictionary[picked]
    return sorted(picked)
