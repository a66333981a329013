"""Tables: m rows of d float32 columns, of which a federation reads and updates a few.

    StoredTable     what every table does: values, update, put; and pending, settle for a store
    |- DenseTable   the whole array, for tables that fit in memory and are touched everywhere
    `- LazyTable    only rows that were updated, so that m may be 2^64 - 1

An untouched row is computed from (seed, id) each time it is read, and a row is kept only after an
update with a positive count. So a decoy id in a union leaves no trace in the model: the row of an
id that nobody trained on reads the same before and after (docs/threat-model.md).

TableSpec: a table's name, shape and first rows. DerivedMap: from its rows to another table's.

Row ids are sorted, distinct uint64 arrays, as a union comes out. An id outside its table is a
`ConfigError`, because it comes from data or a plan; a wrong shape or order is a `MisuseError`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from tessera.crypto.prg import Label
from tessera.errors import ConfigError, MisuseError
from tessera.learning.tables.submodel import Counts, Floats, Ids, distinct

# --- initial --------------------------------------------------------------------------------------
#
# The distribution of a table's initial rows, as a function of (key, id).
#
# A row that nobody has updated is computed each time it is read (lazy initialisation), with the
# same bits on every machine and in any batch. Why rows are not stored from the start:
# docs/decisions/0007-lazy-rows.md.


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


# --- spec -----------------------------------------------------------------------------------------

MAX_SIZE: Final = 2**64 - 1
"""The most rows of a table: its size, too, has to fit 64 bits."""

MAX_SEED: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """A table's name, its shape, and the rule for rows that nobody has updated yet.

    The seed is public and drives initialisation only; no secret may come from it. Two tables of
    one seed begin differently, because the name is part of the key below.
    """

    name: str
    size: int  # m, the number of rows
    width: int  # d, the number of columns
    initial: Distribution = ZEROS
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("table: the name is empty")
        if not 1 <= self.size <= MAX_SIZE:
            raise ConfigError(f"table {self.name!r}: size {self.size} is not in 1 .. 2^64 - 1")
        if not 1 <= self.width < 2**31:
            raise ConfigError(f"table {self.name!r}: width {self.width} is not in 1 .. 2^31 - 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"table {self.name!r}: seed {self.seed} is not in 0 .. 2^64 - 1")

    @property
    def initial_rule(self) -> str:
        """The rule in words; what a store compares, since it does not hold untouched rows."""
        if isinstance(self.initial, Zeros | Given | PerClient):
            return f"{self.initial}"
        return f"{self.initial} from seed {self.seed}, rule {RULE.decode()}"

    def check(self, ids: Ids) -> None:
        """Raise unless `ids` are sorted distinct uint64 row ids of this table."""
        if not isinstance(ids, np.ndarray) or ids.dtype != np.uint64 or ids.ndim != 1:
            raise MisuseError(f"table {self.name!r}: row ids must be a flat uint64 array")
        if ids.size == 0:
            return
        if ids.size > 1 and not bool((ids[1:] > ids[:-1]).all()):
            raise MisuseError(f"table {self.name!r}: row ids must be ascending, without repeats")
        if int(ids[-1]) >= self.size:
            first = int(ids[np.searchsorted(ids, np.uint64(self.size))])
            raise ConfigError(
                f"table {self.name!r}: row id {first} is outside its {self.size} rows",
                hint=f"ids count from 0, so the last is {self.size - 1}: raise the table's size, "
                "or map the ids into it",
            )

    def initial_values(self, ids: Ids) -> Floats:
        """The rows as they are before any update; the same on every machine and in any batch."""
        self.check(ids)
        if isinstance(self.initial, Given | PerClient):
            raise MisuseError(f"table {self.name!r}: its first rows are {self.initial}")
        return initial_values(self.initial, self._key(), ids, self.width)

    def _key(self) -> bytes:
        seed = self.seed.to_bytes(8, "little")
        return hashlib.sha256(RULE + b"\0" + seed + self.name.encode()).digest()[:16]


class DerivedMap:
    """The public map from a table's rows to those of a derived table, such as items -> category.

    It has to be total: the rows of the derived table follow from the parent's and are never
    randomised on their own, so an id without an image would leave a client's set incomplete, and
    visibly so. A hole is an entry below 0, at or above the derived table's size, or missing.
    """

    def __init__(
        self,
        parent: TableSpec,
        derived: TableSpec,
        source: NDArray[np.integer[Any]] | Callable[[Ids], NDArray[np.integer[Any]]],
    ) -> None:
        """`source` is an array over all of the parent's rows, or a function from ids to ids."""
        self.parent = parent
        self.derived = derived
        if isinstance(source, np.ndarray):
            if source.ndim != 1 or source.size != parent.size:
                missing = f"row {source.size}" if source.size < parent.size else "no row"
                raise ConfigError(
                    f"{self}: the map has shape {source.shape}, {parent.name!r} has {parent.size} "
                    f"rows; {missing} of it is left out",
                    hint="give one entry per row of the parent table, in order",
                )
            self._check(np.arange(source.size, dtype=np.uint64), source)
            array = source.astype(np.uint64)
            self._lookup: Callable[[Ids], NDArray[np.integer[Any]]] = lambda ids: array[ids]
        else:
            self._lookup = source

    def __str__(self) -> str:
        return f"derived table {self.derived.name!r} of {self.parent.name!r}"

    def images(self, ids: Ids) -> NDArray[np.uint64]:
        """The derived row of every id, in the order of `ids`; with repeats, not sorted."""
        self.parent.check(ids)
        images = self._lookup(ids)
        if not isinstance(images, np.ndarray) or images.shape != ids.shape:
            raise ConfigError(f"{self}: the map did not return one row per id")
        self._check(ids, images)
        return images.astype(np.uint64, copy=False)

    def row_ids(self, ids: Ids) -> Ids:
        """The rows of the derived table that belong to `ids`, sorted and without repeats."""
        images = self.images(ids)
        return ids if images is ids else distinct(images)  # row for row: they are sorted already

    def _check(self, ids: Ids, images: NDArray[np.integer[Any]]) -> None:
        if images.dtype.kind not in "iu":
            raise ConfigError(f"{self}: the map gives {images.dtype}, not whole numbers")
        hole = images < 0
        hole |= images.astype(np.uint64) >= np.uint64(self.derived.size)
        if hole.any():
            at = int(np.argmax(hole))
            raise ConfigError(
                f"{self}: row {int(ids[at])} maps to {int(images[at])}, which is not one of its "
                f"{self.derived.size} rows ({int(np.count_nonzero(hole))} such)",
                hint="give every row of the parent an image; a row 'unknown' can take the rest",
            )


class StoredTable(ABC):
    """Values by row id. Reading never changes a table; a row with count 0 is never written.

    `pending` are the rows changed since the last `settle`; a store writes them and settles the
    table once they are durable.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self._pending: Ids = np.empty(0, dtype=np.uint64)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def size(self) -> int:
        """m, the number of rows."""
        return self.spec.size

    @property
    def width(self) -> int:
        """d, the number of columns."""
        return self.spec.width

    @property
    @abstractmethod
    def touched(self) -> int:
        """How many rows no longer follow from (seed, id): what a full checkpoint has to hold."""

    @property
    @abstractmethod
    def touched_ids(self) -> Ids:
        """These rows, ascending."""

    def initial(self, ids: Ids) -> Floats:
        """The rows as they were before any update."""
        return self.spec.initial_values(ids)

    def values(self, ids: Ids) -> Floats:
        """The current rows, as a copy the caller may change."""
        self.spec.check(ids)
        return self._read(ids)

    def update(self, ids: Ids, deltas: Floats, counts: Counts) -> int:
        """Add `deltas` to the rows with a positive count; how many those are.

        A delta is what the row moves by, already averaged; the count only says whether anybody
        trained on it.
        """
        ids, deltas = self._counted(ids, deltas, counts)
        with np.errstate(over="ignore"):  # found below, before anything is written
            values = self._read(ids) + deltas
        return self._keep(ids, values)

    def put(self, ids: Ids, values: Floats, counts: Counts) -> int:
        """Replace the rows with a positive count by `values`; how many those are."""
        return self._keep(*self._counted(ids, values, counts))

    def pending(self) -> tuple[Ids, Floats]:
        """The rows changed since the last `settle`, and what they are now."""
        return self._pending.copy(), self._read(self._pending)

    def settle(self) -> None:
        """Forget which rows have changed: they are durable now."""
        self._pending = self._pending[:0].copy()

    def restore(self, ids: Ids, values: Floats) -> None:
        """Take rows back from a store: kept, and nothing is pending about them."""
        ids, values = self._counted(ids, values, np.ones(ids.size, dtype=np.int64))
        self._write(ids, values)
        if self._pending.size:
            self._pending = self._pending[~np.isin(self._pending, ids)]

    def _counted(self, ids: Ids, values: Floats, counts: Counts) -> tuple[Ids, Floats]:
        """The rows with a positive count, after every check that needs no current value."""
        self.spec.check(ids)
        if values.dtype != np.float32 or values.shape != (ids.size, self.width):
            raise MisuseError(
                f"table {self.name!r}: rows are {values.dtype} {values.shape}, "
                f"expected float32 {(ids.size, self.width)}"
            )
        if counts.shape != ids.shape or counts.dtype.kind not in "iu":
            raise MisuseError(
                f"table {self.name!r}: counts are {counts.dtype} {counts.shape}, "
                f"expected whole numbers {ids.shape}"
            )
        if counts.size and counts.min() < 0:
            raise MisuseError(f"table {self.name!r}: a count is below 0")
        kept = counts > 0
        return (ids, values) if kept.all() else (ids[kept], values[kept])

    def _keep(self, ids: Ids, values: Floats) -> int:
        if not np.isfinite(values).all():
            raise MisuseError(f"table {self.name!r}: an updated row is not finite; none was kept")
        self._write(ids, values)
        self._pending = distinct(np.concatenate((self._pending, ids)))
        return int(ids.size)

    @abstractmethod
    def _read(self, ids: Ids) -> Floats: ...

    @abstractmethod
    def _write(self, ids: Ids, values: Floats) -> None: ...


class DenseTable(StoredTable):
    """All m rows in one array: m * d * 4 bytes, and one indexing step per read or update."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        if isinstance(spec.initial, Given):
            raise MisuseError(f"table {spec.name!r}: use DenseTable.from_array for given rows")
        self._array = spec.initial_values(np.arange(spec.size, dtype=np.uint64))
        self._updated = np.zeros(spec.size, dtype=np.bool_)

    @classmethod
    def from_array(cls, name: str, array: Floats) -> DenseTable:
        """A table that begins as a copy of `array`. All of it is pending, until first stored."""
        if array.ndim != 2 or array.dtype != np.float32:
            raise MisuseError(
                f"table {name!r}: given rows are {array.dtype} {array.shape}, "
                "expected float32 (m, d)"
            )
        if not np.isfinite(array).all():
            raise ConfigError(
                f"table {name!r}: the given array holds values that are not finite",
                hint="look at what exported it; a trained row is never NaN or infinite",
            )
        size, width = array.shape
        table = cls.__new__(cls)
        StoredTable.__init__(table, TableSpec(name=name, size=size, width=width, initial=Given()))
        table._array = np.array(array, order="C")
        table._updated = np.ones(size, dtype=np.bool_)
        table._pending = np.arange(size, dtype=np.uint64)
        return table

    @property
    def touched(self) -> int:
        return int(np.count_nonzero(self._updated))

    @property
    def touched_ids(self) -> Ids:
        return np.flatnonzero(self._updated).astype(np.uint64)

    def _read(self, ids: Ids) -> Floats:
        return self._array[ids]

    def _write(self, ids: Ids, values: Floats) -> None:
        self._array[ids] = values
        self._updated[ids] = True


class LazyTable(StoredTable):
    """Only rows that were updated: about 16 + 5 d bytes for each, whatever m is.

    A kept row has a slot in an arena of rows, in the order of first update; `_SlotIndex` finds it.
    """

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        if isinstance(spec.initial, Given):
            raise MisuseError(f"table {spec.name!r}: given rows are a DenseTable")
        self._slots = _SlotIndex()
        self._arena = np.empty((0, spec.width), dtype=np.float32)

    @property
    def touched(self) -> int:
        return self._slots.count

    @property
    def touched_ids(self) -> Ids:
        return self._slots.ids

    def holds(self, ids: Ids) -> NDArray[np.bool_]:
        """Which of these rows are kept."""
        return self._slots.find(ids) >= 0

    def _read(self, ids: Ids) -> Floats:
        slots = self._slots.find(ids)
        untouched = slots < 0
        if not untouched.any():
            return self._arena[slots]
        if untouched.all():
            return self.initial(ids)
        values = np.empty((ids.size, self.width), dtype=np.float32)
        values[untouched] = self.initial(ids[untouched])
        values[~untouched] = self._arena[slots[~untouched]]
        return values

    def _write(self, ids: Ids, values: Floats) -> None:
        slots = self._slots.find(ids)
        untouched = slots < 0
        if untouched.any():
            slots[untouched] = self._slots.add(ids[untouched])
            self._reserve(self._slots.count)
        self._arena[slots] = values

    def _reserve(self, count: int) -> None:
        """Room for `count` rows; a quarter more when it has to grow, so that growing is rare."""
        if count > len(self._arena):
            capacity = count + count // 4
            # In place, so that old and new arena need not exist together. Every read of ours is a
            # copy, hence no array elsewhere can still point into the old memory.
            self._arena.resize((capacity, self.width), refcheck=False)


class _SlotIndex:
    """id -> slot for ids that get slots 0, 1, 2 ... as they are added.

    A few sorted runs, each more than twice as long as the next: a lookup is one binary search per
    run, and an id is merged O(log n) times in all. No hash table: a dict of Python integers costs
    over 100 bytes per id and cannot look up an array.
    """

    def __init__(self) -> None:
        self.count = 0
        self._runs: list[tuple[Ids, NDArray[np.int64]]] = []

    @property
    def ids(self) -> Ids:
        """Every id with a slot, ascending."""
        none = np.empty(0, dtype=np.uint64)
        return np.sort(np.concatenate([none, *(known for known, _ in self._runs)]))

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """The slot of every id, -1 where there is none."""
        slots = np.full(ids.size, -1, dtype=np.int64)
        for known, slot in self._runs:
            at = np.searchsorted(known, ids)
            at[at == known.size] = 0  # past the end: compare with any, it cannot be equal
            hit = known[at] == ids
            slots[hit] = slot[at[hit]]
        return slots

    def add(self, ids: Ids) -> NDArray[np.int64]:
        """Give the next slots to `ids`, sorted and none of them known."""
        slots = np.arange(self.count, self.count + ids.size, dtype=np.int64)
        self.count += ids.size
        self._runs.append((ids, slots))
        while len(self._runs) > 1 and self._runs[-2][0].size <= 2 * self._runs[-1][0].size:
            (old_ids, old_slots), (new_ids, new_slots) = self._runs[-2:]
            merged = np.concatenate((old_ids, new_ids))
            order = np.argsort(merged, kind="stable")  # finds the two runs and merges them
            self._runs[-2:] = [(merged[order], np.concatenate((old_slots, new_slots))[order])]
        return slots
