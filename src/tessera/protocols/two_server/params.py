"""The parameters of a two-server round: its tables, its group, and the pinned keys.

Everything is checked once, here, before anything is sent. Client, leader and helper each make this
object from what they know themselves (the plan, the pinned keys, the announced union); its
`context` is in every signature and every sealed box, so that parties that know different parameters
stop at the first message.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import ceil, log2
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.correlated import INDEPENDENT, BandedInverse
from tessera.crypto.cuckoo import HASHES, STASH_ROWS, bins_for
from tessera.crypto.dpf import BITS, HEADER_BYTES, SELECTORS, Values
from tessera.crypto.group import Group
from tessera.crypto.kernel.backend import packed_size
from tessera.crypto.kernel.points import TAG_BYTES
from tessera.crypto.kernel.trees import BLOCK
from tessera.crypto.keys import KEY_BYTES, is_public_key
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId, TableId

MAX_TABLES: Final = 256
MAX_COHORT: Final = 100_000
MAX_BYTES: Final = wire.DEFAULT_CAP - (1 << 16)
"""The most bytes that one part of a message may take, so that all of it still is a message."""

CHECK_BYTES: Final = 32
"""In a server's answer beside every row that is checked: two products of 128 bits."""

ROW_LIMIT: Final = 1 << 22
WRITTEN_LIMIT: Final = 1 << 22
"""Rows of the largest table that is written by keys and not read, whatever the limit of others."""

Ids = npt.NDArray[np.uint64]


class Read(Enum):
    """How the rows of a table come down."""

    CHECKED = "checked"  # through point functions, and no server can change a row unnoticed
    POINTS = "dpf"  # the same without the check: for servers that are known not to lie
    WHOLE = "whole"  # the table as it is: for tables too small to hide a row in


class Absent(Enum):
    """What two servers do in a key period where somebody on its first list is missing."""

    REFUSE = "refuse"
    ALLOW = "allow"  # the rows of whoever is missing show in the difference of two sums


class Write(Enum):
    """How the rows of a table go up."""

    POINTS = "dpf"
    DENSE = "dense"  # all rows, as two plain shares


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TwoServerTable:
    """One table of the round.

    Its rows are 0 .. rows - 1, or the sorted ids of a narrower domain (a union). On the way down a
    row is `row_bytes` bytes (0: the table is not read), on the way up `words` words with its count
    among them (0: not written). No client holds more than `max_rows` of them.
    """

    table: TableId
    rows: int
    max_rows: int
    row_bytes: int = 0
    words: int = 0
    ids: Ids | None = field(default=None, repr=False)
    read: Read = Read.CHECKED
    write: Write = Write.POINTS
    stash: int = 0

    def __post_init__(self) -> None:
        where = f"two servers: table {self.table}"
        if not 0 <= self.table < 1 << 16:
            raise ConfigError(f"{where} is over 65,535")
        if self.ids is not None:
            ids = self.ids
            if ids.dtype != np.uint64 or ids.ndim != 1 or bool((ids[1:] <= ids[:-1]).any()):
                raise ConfigError(f"{where}: a domain is sorted 64-bit ids without repeats")
            if len(ids) != self.rows:
                raise ConfigError(f"{where}: {len(ids)} ids for {self.rows} rows")
        if self.rows < 1:
            raise ConfigError(f"{where}: a table of {self.rows} rows")
        if not 1 <= self.max_rows <= self.rows:
            raise ConfigError(
                f"{where}: a client may hold {self.max_rows} of {self.rows} rows",
                hint="max_rows is at least 1 and at most the number of rows",
            )
        if not 0 <= self.row_bytes <= 1 << 20 or not 0 <= self.words <= 1 << 16:
            raise ConfigError(
                f"{where}: rows of {self.row_bytes} bytes down, {self.words} words up"
            )
        if not self.row_bytes and not self.words:
            raise ConfigError(f"{where} is neither read nor written")
        if self.uses_points and self.rows < HASHES:
            raise ConfigError(
                f"{where}: {self.rows} rows cannot be hashed to {HASHES} bins each",
                hint='so small a table is read "whole" and written "dense"',
            )
        if self.stash < 0 or (self.stash and not self.uses_points):
            raise ConfigError(f"{where}: a stash of {self.stash}")
        if self.stash and self.rows > STASH_ROWS:
            raise ConfigError(
                f"{where}: a stash for {self.rows} rows: each of its keys covers the whole table",
                hint=f"no stash above {STASH_ROWS} rows",
            )

    @property
    def reads_points(self) -> bool:
        return bool(self.row_bytes) and self.read is not Read.WHOLE

    @property
    def reads_whole(self) -> bool:
        return bool(self.row_bytes) and self.read is Read.WHOLE

    @property
    def writes_points(self) -> bool:
        return bool(self.words) and self.write is Write.POINTS

    @property
    def writes_dense(self) -> bool:
        return bool(self.words) and self.write is Write.DENSE

    @property
    def uses_points(self) -> bool:
        return self.reads_points or self.writes_points

    @property
    def bins(self) -> int:
        """From the largest set that the plan allows, so that it says nothing of a client's own."""
        return bins_for(self.max_rows, stash=self.stash)

    @property
    def trees(self) -> int:
        """A client's point functions: one for each bin, and for each place in the stash."""
        return self.bins + self.stash

    @property
    def selecting(self) -> Values:
        """The values of point functions that fetch rows of this table."""
        return SELECTORS if self.read is Read.CHECKED else BITS

    @property
    def half_bytes(self) -> int:
        """One server's answer to a query: every client fetches as many rows as there are bins."""
        if not self.reads_points:
            return 0
        check = CHECK_BYTES if self.read is Read.CHECKED else 0
        return (self.bins + self.stash) * (self.row_bytes + check)

    def most_key_bytes(self, values: Values) -> int:
        """The public part of a client's keys for this table is no longer, however rows are hashed.

        Its length follows from how full the bins are. A bin of n leaves has at most 1 + log2(n)
        levels, and the sum of these is largest where all bins are alike (Jensen); it also has less
        than n, and no bin has more rows than the table.
        """
        leaves = HASHES * self.rows / values.per_leaf
        deepest = (-(-self.rows // values.per_leaf) - 1).bit_length()
        alike = self.bins * (1 + log2(1 + leaves / self.bins))
        steps = ceil(min(alike, leaves, self.bins * deepest)) + self.stash * deepest
        finals = BLOCK * self.trees
        if values.group is not None:
            finals = packed_size(self.trees * values.per_leaf * values.words, values.group.bits)
        return HEADER_BYTES + BLOCK * steps + finals

    def index(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Where in the domain these ids are; `MisuseError` for one that is not in it."""
        if ids.dtype != np.uint64 or ids.ndim != 1:
            raise MisuseError(f"table {self.table}: row ids are a flat array of uint64")
        if self.ids is None:
            found = ids.astype(np.int64)
            strange = bool((ids >= np.uint64(self.rows)).any())
        else:
            found = np.searchsorted(self.ids, ids).astype(np.int64)
            strange = bool((self.ids[np.minimum(found, self.rows - 1)] != ids).any())
        if strange:
            raise MisuseError(f"table {self.table}: an id is not in the round's domain")
        return found

    def named(self, indices: npt.NDArray[np.int64]) -> Ids:
        """The ids of these rows of the domain."""
        return indices.astype(np.uint64) if self.ids is None else self.ids[indices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The pinned public keys: both servers' signing keys, and the helper's sealing key."""

    leader: bytes = field(repr=False)
    helper: bytes = field(repr=False)
    box: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.leader) != KEY_BYTES or len(self.helper) != KEY_BYTES:
            raise ConfigError(f"two servers: signing keys have {KEY_BYTES} bytes")
        if self.leader == self.helper:
            raise ConfigError(
                "two servers: leader and helper sign with one key",
                hint="two servers that are one hide nothing from it",
            )
        if not is_public_key(self.box):
            raise ConfigError("two servers: the helper's sealing key is not a valid public key")


@dataclass(frozen=True, kw_only=True, eq=False)
class TwoServerParams:
    """A round's parameters, the same at every client and both servers.

    `dense` counts the words that every client writes besides its rows, `dense_bytes` the bytes that
    it reads besides them. `min_cohort` is the fewest reports that are ever added up, `corrupt` of
    which may be a server's own; no more than `most_excluded` are left out once their list is
    closed. A table of over `row_limit` rows has to be narrowed to a union
    first: evaluation touches about three times its rows for every client. One that is written and
    not read may have `WRITTEN_LIMIT`: nobody would know what to narrow it to. With `verify` both
    servers check that a client writes one leaf in a bin at most. Keys last `key_rounds` rounds, and
    `absent` says what happens if somebody with keys is missing in a later one. Each server adds
    `noise` of this deviation to every word of its share, and then every row opens; rounds are mixed
    by `correlation`. A training has `rounds`; 0: any number.
    """

    federation: str
    round_id: RoundId
    plan_hash: bytes
    cohort: int
    min_cohort: int
    most_excluded: int
    group: Group
    servers: Servers
    tables: tuple[TwoServerTable, ...] = ()
    dense: int = 0
    dense_bytes: int = 0
    corrupt: int = 0
    row_limit: int = ROW_LIMIT
    verify: bool = True
    key_rounds: int = 1
    absent: Absent = Absent.REFUSE
    noise: float = 0.0
    correlation: BandedInverse = INDEPENDENT
    rounds: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise < float("inf"):
            raise ConfigError(f"two servers: noise of deviation {self.noise}")
        if len(self.plan_hash) != 32:
            raise ConfigError(f"two servers: a plan hash of {len(self.plan_hash)} bytes; it has 32")
        if not 0 <= self.round_id < 1 << 64:
            raise ConfigError(f"two servers: round {self.round_id} must lie in [0, 2^64)")
        if not 2 <= self.cohort <= MAX_COHORT:
            raise ConfigError(f"two servers: a cohort of {self.cohort}; it takes 2 to {MAX_COHORT}")
        if not 0 <= self.corrupt < self.cohort:
            raise ConfigError(f"two servers: {self.corrupt} corrupt clients of {self.cohort}")
        if not self.corrupt + 2 <= self.min_cohort <= self.cohort:
            raise ConfigError(
                f"two servers: min_cohort {self.min_cohort} of a cohort of {self.cohort} with "
                f"{self.corrupt} corrupt: a sum needs two honest clients to hide one client's rows",
                hint=f"min_cohort is {self.corrupt + 2} to {self.cohort}",
            )
        if not 0 <= self.most_excluded < self.cohort:
            raise ConfigError(
                f"two servers: {self.most_excluded} of {self.cohort} reports may be excluded"
            )
        if self.key_rounds < 1:
            raise ConfigError(f"two servers: keys that last {self.key_rounds} rounds")
        names = [table.table for table in self.tables]
        if sorted(set(names)) != names or len(names) > MAX_TABLES:
            raise ConfigError(
                f"two servers: tables {names} must ascend, and be {MAX_TABLES} at most"
            )
        if self.dense < 0 or self.dense_bytes < 0:
            raise ConfigError(f"two servers: {self.dense} dense words, {self.dense_bytes} bytes")
        if not self.tables and not self.dense:
            raise ConfigError("two servers: neither tables nor dense words")
        for table in self.tables:
            limit = self.row_limit if table.row_bytes else max(self.row_limit, WRITTEN_LIMIT)
            if table.uses_points and table.rows > limit:
                raise ConfigError(
                    f"two servers: table {table.table} has {table.rows} rows and the limit is "
                    f"{limit}",
                    hint="narrow the table to the cohort's union, or raise row_limit",
                )
            if table.writes_points:
                Values(self.group, table.words)  # refuses a group that point functions do not have
        self._check_lengths()

    def _check_lengths(self) -> None:
        """No message of the round is longer than messages may be, whoever writes which rows."""
        bits = self.group.bits
        whole = self.dense_bytes + sum(t.rows * t.row_bytes for t in self.tables if t.reads_whole)
        if whole > MAX_BYTES:
            raise ConfigError(f"two servers: {whole} bytes are too many to be read whole")
        share = self.dense + sum(t.rows * t.words for t in self.written)
        marks = sum(packed_size(t.rows, 1) for t in self.written)  # which rows are in the sum
        narrower = "narrow the tables to the cohort's union"
        fewer = "lower max_rows: everybody's messages have room for as many rows"
        queries = (t.most_key_bytes(t.selecting) for t in self.tables if t.reads_points)
        keys = (
            t.most_key_bytes(Values(self.group, t.words)) + TAG_BYTES * self.verify * t.trees
            for t in self.tables
            if t.writes_points
        )
        for name, size, hint in (
            (f"a share of {share} words", packed_size(share, bits) + marks, narrower),
            ("the answer to a query", 2 * sum(t.half_bytes for t in self.tables) + whole, fewer),
            ("a query", sum(queries), fewer),
            ("a report", sum(keys) + packed_size(self.dense_words, bits), fewer),
        ):
            if size > MAX_BYTES:
                raise ConfigError(
                    f"two servers: {name} is over the {MAX_BYTES} bytes of a message: {size}",
                    hint=hint,
                )

    @property
    def dense_words(self) -> int:
        """Words of the plain shares: the dense part, then every table that is written densely."""
        return self.dense + sum(t.rows * t.words for t in self.tables if t.writes_dense)

    def same_key_period(self, period: RoundId, round_id: RoundId) -> bool:
        """Whether keys of one round may last to another: everybody makes new ones when a number of
        rounds begins that `key_rounds` divides, or when the round before opened nothing."""
        return period // self.key_rounds == round_id // self.key_rounds

    @property
    def verified(self) -> bool:
        """Whether there is something to check: rows that are written by keys."""
        return self.verify and any(t.writes_points for t in self.tables)

    @property
    def read(self) -> tuple[TwoServerTable, ...]:
        return tuple(t for t in self.tables if t.row_bytes)

    @property
    def written(self) -> tuple[TwoServerTable, ...]:
        return tuple(t for t in self.tables if t.words)

    @cached_property
    def context(self) -> bytes:
        """A digest that binds boxes, signatures and shares to this round and no other. What is not
        listed (`row_limit`, `most_excluded`) follows from the plan, whose hash is."""
        parts: list[int | bytes | str] = [
            self.federation,
            self.round_id,
            self.plan_hash,
            self.cohort,
            self.min_cohort,
            self.group.name,
        ]
        parts += [self.servers.leader, self.servers.helper, self.servers.box]
        parts += [self.dense, self.dense_bytes, self.corrupt, int(self.verify)]
        parts += [self.key_rounds, self.absent.value]
        parts += [f"noise {self.noise!r}"] if self.noise else []
        parts += [f"mixed by {term}" for term in self.correlation.terms]
        parts += [f"rounds {self.rounds}"] if self.rounds else []
        for t in self.tables:
            parts += [t.table, t.rows, t.max_rows, t.row_bytes, t.words]
            parts += [t.read.value, t.write.value, t.stash]
            parts += [
                "all" if t.ids is None else hashlib.sha256(t.ids.astype("<u8").tobytes()).digest()
            ]
        return hashlib.sha256(encode_context(Label.TWO_SERVER_ROUND, *parts)).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TwoServerParams) and self.context == other.context

    def __hash__(self) -> int:
        return hash(self.context)
