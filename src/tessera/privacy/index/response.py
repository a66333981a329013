"""Randomised response over index sets: which rows a client asks for.

Algorithm 2 of Niu et al. 2020 (MobiCom, "Billion-Scale Federated Learning on Mobile Clients").
For every row of the union a client answers whether it has it, twice: *permanently* (yes
with p1 if the row is real, with p2 if not; the same for the whole period) and, on top of that,
*instantaneously* (yes with p3 after a permanent yes, with p4 after a no; fresh each round).

We depart from the paper in one place. Permanent answers are not stored row by row: they are a keyed
function of (secret, federation, period, table, row), a 64-bit word compared with a threshold. That
equals the paper's memoisation only if secret, real set and probabilities stay what they were, which
`privacy/index/period.py` sees to.

Not constant time: lookups branch on the real set, which the client owns. A table of any size costs
work in proportion to the union, never to the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR, ECB

from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError

Rows = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
RowIds = npt.NDArray[Any] | Iterable[int]
"""Row ids as a caller may have them: any integers, in any order."""

LEAST: Final = 2.0**-32
"""A probability is 0, 1 or at least this far from both, so that its 64-bit threshold keeps its
epsilon: a p2 that rounded to 0 would make every yes a proof."""


def check_probability(name: str, value: float) -> None:
    """Refuse what is not a probability, or too close to 0 or 1 for a 64-bit threshold."""
    if not 0.0 <= value <= 1.0:  # also refuses nan
        raise ConfigError(
            f"index privacy: {name} = {value} is not a probability",
            hint=f"{name} lies between 0 and 1, both included",
        )
    if 0.0 < value < LEAST or LEAST > 1.0 - value > 0.0:
        raise ConfigError(
            f"index privacy: {name} = {value} is too close to 0 or 1 to be distinguished from it",
            hint=f"use 0, 1, or a value at least {LEAST:.1e} away from both",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPrivacy:
    """The four probabilities of Algorithm 2, chosen by each client for itself."""

    p1: float  # permanent yes, row real
    p2: float  # permanent yes, row not real
    p3: float  # revealed after a permanent yes
    p4: float  # revealed after a permanent no

    def __post_init__(self) -> None:
        for item in fields(self):
            check_probability(item.name, getattr(self, item.name))
        if self.exact_p5 == 0:
            raise ConfigError(
                f"index privacy: p1 = {self.p1}, p3 = {self.p3}, p4 = {self.p4} give p5 = 0: no "
                "real row is ever revealed or trained, and epsilon is undefined",
                hint="raise p1 and p3; `tessera privacy` lists the named levels",
            )

    @classmethod
    def named(cls, name: str) -> IndexPrivacy:
        """A choice of the paper's Table 3, "cpp1" (exact) to "cpp5" (the whole union)."""
        try:
            return LEVELS[name.lower()]
        except KeyError:
            raise ConfigError(
                f"index privacy: there is no level {name!r}",
                hint=f"the named levels are {', '.join(LEVELS)}; others are set by p1 to p4",
            ) from None

    @property
    def names_all(self) -> bool:
        """Whether every row of the union is revealed, real or not."""
        return self.exact_p5 == self.exact_p6 == 1

    @property
    def exact_p5(self) -> Fraction:
        """P(revealed | real), without rounding: p1 (p3 - p4) + p4 (Niu et al. 2020, 4.2.2)."""
        return Fraction(self.p1) * (Fraction(self.p3) - Fraction(self.p4)) + Fraction(self.p4)

    @property
    def exact_p6(self) -> Fraction:
        """P(revealed | not real), without rounding: p2 (p3 - p4) + p4 (Niu et al. 2020, 4.2.2)."""
        return Fraction(self.p2) * (Fraction(self.p3) - Fraction(self.p4)) + Fraction(self.p4)

    @property
    def p5(self) -> float:
        """P(revealed | real), as a float."""
        return float(self.exact_p5)

    @property
    def p6(self) -> float:
        """P(revealed | not real), as a float."""
        return float(self.exact_p6)

    @property
    def fingerprints(self) -> bool:
        """Whether a client's answers are its own and the same in every round of a period."""
        return self.p3 == 1.0 and self.p4 == 0.0 and min(self.p1, self.p2) < 1.0


LEVELS: Final[Mapping[str, IndexPrivacy]] = MappingProxyType(
    {
        "cpp1": IndexPrivacy(p1=1.0, p2=0.0, p3=1.0, p4=0.0),
        "cpp2": IndexPrivacy(p1=15 / 16, p2=1 / 16, p3=15 / 16, p4=1 / 16),
        "cpp3": IndexPrivacy(p1=7 / 8, p2=1 / 8, p3=7 / 8, p4=1 / 8),
        "cpp4": IndexPrivacy(p1=3 / 4, p2=1 / 4, p3=3 / 4, p4=1 / 4),
        "cpp5": IndexPrivacy(p1=1.0, p2=1.0, p3=1.0, p4=1.0),
    }
)
"""Choices of probability parameters (Niu et al. 2020, Table 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbation:
    """The perturbed real set: Niu et al. 2019 (arXiv 1911.02254), Appendix D, fourth measure.

    Each real row is kept with probability `keep` and each row of a public pool that is not real is
    added with probability `add`, once per period. Intersecting the unions of many rounds then finds
    the perturbed set and not the real one.
    """

    keep: float
    add: float

    def __post_init__(self) -> None:
        check_probability("keep", self.keep)
        check_probability("add", self.add)
        if self.keep == 0.0:
            raise ConfigError(
                "index privacy: keep = 0.0 leaves nothing to train", hint="set keep above 0"
            )


def threshold(probability: float) -> int:
    """T in 0 .. 2^64 such that "a uniform 64-bit word is below T" has this probability."""
    return round(Fraction(probability) * (1 << 64))


def below(words: Rows, probability: float) -> Mask:
    """Which of these uniform words are below the threshold: a yes."""
    limit = threshold(probability)
    if limit >> 64:  # 2^64 itself is not a uint64
        return np.ones(words.shape, dtype=np.bool_)
    return words < np.uint64(limit)


def keyed_words(secret: Secret, label: str, context: tuple[int | str, ...], rows: Rows) -> Rows:
    """One 64-bit word per row: AES-128 of the row id under a key for (label, context), cut in half.

    A row's word does not depend on which others there are. AES is a permutation; half of its
    output tells it from a random function only after about 2^64 rows.
    """
    key = secret.derive(label, *context, size=16).reveal()
    blocks = np.zeros((rows.size, 2), dtype="<u8")
    blocks[:, 0] = rows
    encryptor = Cipher(AES(key), ECB()).encryptor()  # distinct blocks: ECB is AES itself
    return np.frombuffer(encryptor.update(blocks.tobytes()), dtype="<u8")[::2].astype(np.uint64)


def fresh_words(secret: Secret, count: int) -> Rows:
    """`count` uniform 64-bit words from a secret that was made for them alone (AES-128-CTR)."""
    encryptor = Cipher(AES(secret.reveal()), CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8").astype(np.uint64)


def as_rows(values: RowIds, *, what: str, size: int | None = None) -> Rows:
    """Row ids as a sorted, read-only array without repeats; `size` is the table's, if known."""
    if not isinstance(values, np.ndarray):
        # through object: numpy would make floats of a list with ids above 2^63
        values = np.array(list(values), dtype=object)
    whole = values.dtype.kind in "iu" or (
        values.dtype == object and all(isinstance(v, int | np.integer) for v in values.flat)
    )
    if values.ndim != 1 or not (whole or values.size == 0):
        raise ConfigError(
            f"{what}: row ids are a list of integers, not {values.ndim} dimensions of "
            f"{values.dtype}",
            hint="pass a one-dimensional array of integers",
        )
    for extreme in (int(values.min()), int(values.max())) if values.size else ():
        if not 0 <= extreme < 1 << 64:
            raise ConfigError(
                f"{what}: row id {extreme} is out of range", hint="row ids are 0 .. 2^64 - 1"
            )
    rows = np.unique(values.astype(np.uint64))
    if size is not None and rows.size and int(rows[-1]) >= size:
        raise ConfigError(
            f"{what}: row id {int(rows[-1])} is outside the table, which has {size} rows",
            hint=f"ids of this table are 0 .. {size - 1}",
        )
    rows.flags.writeable = False
    return rows


def must_be_sorted(rows: Rows) -> None:
    """A row that is there twice would be answered twice in a round, and charged once."""
    if rows.dtype != np.uint64 or not bool(np.all(rows[1:] > rows[:-1])):
        raise MisuseError("rows to answer about are 64-bit ids in increasing order, each once")


def contained(rows: Rows, members: Rows) -> Mask:
    """For each of the sorted `rows`, whether it is one of the sorted `members`."""
    mask = np.zeros(rows.shape, dtype=np.bool_)
    at = np.searchsorted(rows, members)
    inside = at < rows.size
    found = at[inside][rows[at[inside]] == members[inside]]
    mask[found] = True
    return mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answers:
    """One client's answers about one table in one round. Only `revealed` ever leaves the client."""

    permanent: Rows = field(repr=False)  # S' within the union
    revealed: Rows = field(repr=False)  # S''
    succinct: Rows = field(repr=False)  # S and S'': what is trained
