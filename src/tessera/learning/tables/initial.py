"""The distribution of a table's initial rows, as a function of (key, id).

A row that nobody has updated is computed each time it is read (lazy initialisation), with the same
bits on every machine and in any batch. Why rows are not stored from the start:
docs/decisions/0007-lazy-rows.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from tessera.crypto.prg import Label
from tessera.errors import ConfigError
from tessera.learning.tables.arrays import Floats, Ids

RULE: Final = Label.LAZY_ROWS.encode()
"""Names the computation below. Change it with any change to a single bit of what that gives."""

_CHUNK_WORDS: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Zeros:
    """Every untouched row is zero: biases, counters, optimiser state."""

    def __str__(self) -> str:
        return "zeros"


@dataclass(frozen=True, slots=True)
class Uniform:
    """Untouched entries are uniform on [-bound, bound]."""

    bound: float

    def __post_init__(self) -> None:
        _check_scale("uniform bound", self.bound)

    def __str__(self) -> str:
        return f"uniform({self.bound!r})"


@dataclass(frozen=True, slots=True)
class Normal:
    """Untouched entries are normal with mean 0 and deviation `std`, cut off at 6.3 of it."""

    std: float

    def __post_init__(self) -> None:
        _check_scale("normal std", self.std)

    def __str__(self) -> str:
        return f"normal({self.std!r})"


@dataclass(frozen=True, slots=True)
class Given:
    """The rows were handed in as an array: no rule gives them back, so a store keeps them all."""

    def __str__(self) -> str:
        return "given"


ZEROS: Final = Zeros()


@dataclass(frozen=True, slots=True)
class PerClient:
    """Every client draws its rows from a secret of its own: no public rule gives them."""

    def __str__(self) -> str:
        return "drawn by each client"


Rule: TypeAlias = Zeros | Uniform | Normal
Distribution: TypeAlias = Rule | Given | PerClient


def initial_values(initial: Rule, key: bytes, ids: Ids, width: int) -> Floats:
    """The values (k, width) of these rows before any update; `key` is 16 bytes, and public."""
    values = np.zeros((ids.size, width), dtype=np.float32)
    if isinstance(initial, Zeros):
        return values
    # In parts whose float64 temporaries stay in the cache; the result does not depend on it.
    step = max(1, _CHUNK_WORDS // width)
    for start in range(0, ids.size, step):
        values[start : start + step] = shaped(initial, units(key, ids[start : start + step], width))
    return values


def shaped(initial: Rule, u: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values of this distribution from numbers in (0, 1)."""
    if isinstance(initial, Zeros):
        return np.zeros_like(u)
    if isinstance(initial, Uniform):
        return (2.0 * u - 1.0) * initial.bound
    return _normal_quantile(u) * initial.std


def _check_scale(what: str, value: float) -> None:
    if not 0.0 < value <= float(np.finfo(np.float32).max) / 8:
        raise ConfigError(
            f"table: {what} {value!r} must be positive and its rows must fit float32",
            hint="for rows that start at zero use Zeros()",
        )


def units(key: bytes, ids: Ids, width: int) -> NDArray[np.float64]:
    """Numbers in (0, 1), shape (k, width): block c of row id is AES_key(id || c), 4 words each.

    This is counter mode with the id in the counter: a row needs no state and no predecessor, and
    one call encrypts the blocks of all rows. The key of a shared table is public, and AES is there
    because it is exact, fast and everywhere; that of a client's own rows is secret.
    """
    cipher = Cipher(algorithms.AES(key), modes.ECB())
    blocks = -(-width // 4)
    counters = np.empty((ids.size, blocks, 2), dtype="<u8")
    counters[:, :, 0] = ids[:, None]
    counters[:, :, 1] = np.arange(blocks, dtype=np.uint64)
    # ECB, as every block is encrypted once, and is a counter of ours and not somebody's data.
    stream = cipher.encryptor().update(counters.tobytes())
    words = np.frombuffer(stream, dtype="<u4").reshape(ids.size, 4 * blocks)[:, :width]
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def _normal_quantile(u: NDArray[np.float64]) -> NDArray[np.float64]:
    """The normal quantile function for u in [2^-33, 1 - 2^-33], the same bits everywhere.

    Wichura, Algorithm AS 241 (Applied Statistics 37(3), 1988), PPND16; names follow the paper.
    Only +, -, *, / and sqrt are used, which IEEE 754 rounds in one way; Box-Muller would need the
    log and cos of whatever mathematics library this machine has. The paper's third range,
    sqrt(-log r) > 5, lies below 2^-33 and is left out.
    """
    q = u - 0.5
    r = 0.180625 - q * q
    x = q * _polynomial(_A, r) / _polynomial(_B, r)
    tail = np.abs(q) > 0.425
    r = np.minimum(u[tail], 1.0 - u[tail])
    r = np.sqrt(-_log(r)) - 1.6
    x[tail] = np.copysign(_polynomial(_C, r) / _polynomial(_D, r), q[tail])
    return x


def _log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of positive x from exactly rounded steps: log x = e log 2 + 2 atanh t."""
    mantissa, exponent = np.frexp(x)  # mantissa in [1/2, 1)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    exponent = exponent - small
    t = (mantissa - 1.0) / (mantissa + 1.0)  # |t| < 0.172, so 11 terms leave less than 2^-53
    series = _polynomial(tuple(1.0 / (2 * n + 1) for n in reversed(range(11))), t * t)
    return exponent * 0.6931471805599453 + 2.0 * t * series


def _polynomial(coefficients: tuple[float, ...], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Horner's rule, highest power first."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total


# fmt: off
_A: Final = (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853,
             45921.953931549871457, 13731.693765509461125, 1971.5909503065514427,
             133.14166789178437745, 3.3871328727963666080)
_B: Final = (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610,
             21213.794301586595867, 5394.1960214247511077, 687.18700749205790830,
             42.313330701600911252, 1.0)
_C: Final = (7.7454501427834140764e-4, 2.27238449892691845833e-2, 2.4178072517745061177e-1,
             1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055,
             4.6303378461565452959, 1.42343711074968357734)
_D: Final = (1.05075007164441684324e-9, 5.475938084995344946e-4, 1.51986665636164571966e-2,
             1.4810397642748007459e-1, 6.8976733498510000455e-1, 1.6763848301838038494,
             2.05319162663775882187, 1.0)
# fmt: on
