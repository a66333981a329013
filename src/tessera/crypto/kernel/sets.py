"""SetKernel: rows that clients share, and sets of indices encoded many at once.

Nothing here is secret. It is in the kernel because a server encodes 20,000 short sets in a round,
which takes one call of C and would take 20,000 of NumPy.

A set is encoded as its length and its largest index, each as a varint (seven bits a byte, lowest
first), then by Elias and Fano: the low bits of every index side by side, then the high bits in
unary, index k setting bit (index >> low) + k. A set that fills most of its range is a bitmap
instead. Each part is padded to whole bytes; bit k of it is bit k % 8 of byte k // 8. Zeros follow
if an index took fewer bits than are asked for. `wire/index_set.py` encodes and decodes single
sets in the same way.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.points import address_of
from tessera.errors import MisuseError

Indices = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_HEADER_BYTES: Final = 32
"""More than a set takes besides its indices: two varints, two paddings, and a word beyond."""


@dataclass(frozen=True, slots=True)
class Members:
    """The clients of each row, row after row: those of row r are clients[starts[r]:starts[r + 1]].

    `total` is how many clients there are; each has a number below.
    """

    starts: Numbers
    clients: npt.NDArray[np.uint32]
    total: int

    def __post_init__(self) -> None:
        _check(self.starts, np.int64, "starts")
        _check(self.clients, np.uint32, "clients")
        if not len(self.starts) or self.starts[0] != 0 or self.starts[-1] != len(self.clients):
            raise MisuseError("members: starts go from 0 to the number of clients in all rows")
        if (np.diff(self.starts) < 0).any():
            raise MisuseError("members: starts do not ascend")
        if len(self.clients) and int(self.clients.max()) >= self.total:
            raise MisuseError(f"members: a client over {self.total}")


class SetKernel(ABC):
    """The half of a backend that is about sets of indices."""

    def shared_counts(self, members: Members, own: Numbers) -> Numbers:
        """For each client, how many of the rows `own` it is a member of."""
        self._check_own(members, own)
        counts = np.zeros(members.total, dtype=np.int64)
        if own.size:
            self._shared_counts(members, own, counts)
        return counts

    def shared_rows(
        self, members: Members, own: Numbers, counts: Numbers, wanted: npt.NDArray[np.bool_]
    ) -> tuple[Indices, Numbers]:
        """The places among `own` of the rows that each wanted client is a member of, ascending.

        One set after the other, in the order of the clients, and where each begins and ends.
        `counts` are those of `shared_counts`.
        """
        self._check_own(members, own)
        _check(counts, np.int64, "counts")
        if not counts.size == wanted.size == members.total or wanted.dtype != np.bool_:
            raise MisuseError(f"shared rows: counts and wishes of {members.total} clients are due")
        lengths = counts[wanted]
        bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=bounds[1:])
        indices = np.empty(int(bounds[-1]), dtype=np.uint64)
        if indices.size:
            first = np.full(members.total, -1, dtype=np.int64)
            first[wanted] = bounds[:-1]
            self._shared_rows(members, own, first, indices)
        return indices, bounds

    def encode_sets(
        self, indices: Indices, bounds: Numbers, *, least_bits: int = 0
    ) -> tuple[Bytes, Numbers]:
        """Sets that stand one after the other, encoded likewise, and where each code ends.

        Set s is indices[bounds[s]:bounds[s + 1]], and ascends. The code of a set of n indices has
        n * `least_bits` bits at least, beside the two numbers at its beginning.
        """
        if not 0 <= least_bits <= 64:
            raise MisuseError(f"sets: {least_bits} bits for an index; it has 64 at most")
        _check(indices, np.uint64, "indices")
        _check(bounds, np.int64, "bounds")
        if not bounds.size or bounds[0] != 0 or bounds[-1] != indices.size:
            raise MisuseError("sets: bounds go from 0 to the number of indices")
        if (np.diff(bounds) < 0).any():
            raise MisuseError("sets: bounds do not ascend")
        rising = indices[1:] > indices[:-1]
        inner = bounds[1:-1]
        rising[inner[(inner > 0) & (inner < indices.size)] - 1] = True  # where two sets meet
        if not rising.all():
            raise MisuseError("a set of indices is not sorted")
        sets, largest = bounds.size - 1, int(indices.max()) if indices.size else 0
        # An index takes its low bits, one bit of its own and two of the range at most.
        bits = max(largest.bit_length() + 3, least_bits)
        room = sets * _HEADER_BYTES + indices.size * bits // 8
        out, ends = np.empty(room, dtype=np.uint8), np.zeros(sets, dtype=np.int64)
        if sets:
            self._encode_sets(indices, bounds, least_bits, out, ends)
        return out[: int(ends[-1]) if sets else 0], ends

    @staticmethod
    def _check_own(members: Members, own: Numbers) -> None:
        _check(own, np.int64, "rows")
        if own.size and not 0 <= own.min() <= own.max() < len(members.starts) - 1:
            raise MisuseError(f"a row is outside the {len(members.starts) - 1} rows")

    @abstractmethod
    def _shared_counts(self, members: Members, own: Numbers, counts: Numbers) -> None: ...

    @abstractmethod
    def _shared_rows(
        self, members: Members, own: Numbers, first: Numbers, indices: Indices
    ) -> None: ...

    @abstractmethod
    def _encode_sets(
        self, indices: Indices, bounds: Numbers, least_bits: int, out: Bytes, ends: Numbers
    ) -> None: ...


def _check(array: npt.NDArray[Any], dtype: type[np.generic], what: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        raise MisuseError(f"{what}: a flat array of {np.dtype(dtype)} is due")
    if not array.flags.c_contiguous:
        raise MisuseError(f"{what}: the array is not contiguous")


# --- sets native ----------------------------------------------------------------------------------
#
# Sets of indices of sets.c, called through ctypes, which lets other threads run.


_SIZE: Final = ctypes.c_size_t
_POINTER: Final = ctypes.c_void_p

SET_ARGUMENTS: Final[dict[str, tuple[type[Any], ...]]] = {
    # starts, clients; the rows, how many; counts
    "tessera_shared_counts": (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER),
    # starts, clients; the rows, how many; where each client's are next; indices
    "tessera_shared_rows": (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER),
    # indices, bounds, sets; fewest bits of an index; out, ends
    "tessera_encode_sets": (_POINTER, _POINTER, _SIZE, ctypes.c_uint, _POINTER, _POINTER),
}


class NativeSets(SetKernel):
    """The half of a native path that is about sets."""

    _library: ctypes.CDLL

    def _shared_counts(self, members: Members, own: Numbers, counts: Numbers) -> None:
        self._library.tessera_shared_counts(
            address_of(members.starts),
            address_of(members.clients),
            address_of(own),
            own.size,
            address_of(counts),
        )

    def _shared_rows(
        self, members: Members, own: Numbers, first: Numbers, indices: Indices
    ) -> None:
        self._library.tessera_shared_rows(
            address_of(members.starts),
            address_of(members.clients),
            address_of(own),
            own.size,
            address_of(first),
            address_of(indices),
        )

    def _encode_sets(
        self, indices: Indices, bounds: Numbers, least_bits: int, out: Bytes, ends: Numbers
    ) -> None:
        self._library.tessera_encode_sets(
            address_of(indices),
            address_of(bounds),
            ends.size,
            least_bits,
            address_of(out),
            address_of(ends),
        )


# --- sets reference -------------------------------------------------------------------------------
#
# The twin of sets.c in NumPy: one pass over all sets together, whatever their number.


_POWERS: Final = np.array([1 << i for i in range(64)], dtype=np.uint64)
_VARINT_BYTES: Final = 10
"""A 64-bit number takes so many bytes at most."""


class ReferenceSets(SetKernel):
    """The portable half of a backend that is about sets."""

    def _shared_counts(self, members: Members, own: Numbers, counts: Numbers) -> None:
        clients = members.clients[_flat(members, own)[1]]
        counts += np.bincount(clients, minlength=members.total)

    def _shared_rows(
        self, members: Members, own: Numbers, first: Numbers, indices: Indices
    ) -> None:
        places, at = _flat(members, own)
        # Short keys sort by radix, and stably: places ascend within a client.
        clients = members.clients[at].astype(np.min_scalar_type(members.total))
        wanted = first[clients] >= 0
        places, clients = places[wanted], clients[wanted]
        indices[:] = places[np.argsort(clients, kind="stable")]

    def _encode_sets(
        self, indices: Indices, bounds: Numbers, least_bits: int, out: Bytes, ends: Numbers
    ) -> None:
        each = np.diff(bounds)
        counts, some = each.astype(np.uint64), each > 0
        tops = np.zeros_like(counts)
        tops[some] = indices[bounds[1:][some] - 1]
        low = _floor_log2(tops // np.maximum(counts, 1))
        unary = (tops >> low) + counts
        bitmap = tops < counts * low + unary
        low[bitmap] = 0
        bits = np.where(bitmap, tops + np.uint64(1), unary)
        bits[~some] = 0

        # Where the parts of every code begin: two numbers, low bits, high bits, zeros.
        low_bytes, bit_bytes = _bytes_of(counts * low), _bytes_of(bits)
        body = np.maximum(low_bytes + bit_bytes, _bytes_of(counts * np.uint64(least_bits)))
        header = _varint_bytes(counts) + np.where(some, _varint_bytes(tops), 0)
        ends[:] = np.cumsum(header + body)
        lows_at = ends - body
        bits_at = lows_at + low_bytes

        # One byte for each bit, packed at the end. Numbers of a set are repeated for its indices.
        marks = np.zeros(8 * int(ends[-1]), dtype=np.uint8)
        place = np.arange(indices.size) - np.repeat(bounds[:-1], each)
        shift = np.repeat(low, each)
        high = (indices >> shift).astype(np.int64) + np.where(np.repeat(bitmap, each), 0, place)
        marks[high + np.repeat(8 * bits_at, each)] = 1
        begin = place * shift.astype(np.int64) + np.repeat(8 * lows_at, each)
        for bit in range(int(low.max())):
            chosen = np.flatnonzero(shift > bit)
            marks[begin[chosen] + bit] = indices[chosen] >> np.uint64(bit) & np.uint64(1)
        out[: int(ends[-1])] = np.packbits(marks, bitorder="little")
        starts = lows_at - header
        _put_varints(out, starts, counts)
        _put_varints(out, (starts + _varint_bytes(counts))[some], tops[some])


def _flat(members: Members, own: Numbers) -> tuple[Numbers, Numbers]:
    """For every member of every row: the row's place among `own`, and where the member stands."""
    first = members.starts[own]
    count = members.starts[own + 1] - first
    places = np.repeat(np.arange(own.size), count)
    return places, np.arange(places.size) + np.repeat(first - np.cumsum(count) + count, count)


def _floor_log2(numbers: Indices) -> Indices:
    """Exact, and 0 for 0."""
    found = np.searchsorted(_POWERS, numbers, side="right") - 1
    return np.maximum(found, 0).astype(np.uint64)


def _bytes_of(bits: Indices) -> Numbers:
    return ((bits + np.uint64(7)) >> np.uint64(3)).astype(np.int64)


def _varint_bytes(numbers: Indices) -> Numbers:
    return (_floor_log2(numbers) // 7 + 1).astype(np.int64)


def _put_varints(out: Bytes, at: Numbers, numbers: Indices) -> None:
    left, at = numbers.copy(), at.copy()
    for _ in range(_VARINT_BYTES):
        more = left > 0x7F
        out[at] = (left & np.uint64(0x7F)).astype(np.uint8) | (more.astype(np.uint8) << 7)
        left, at = left[more] >> np.uint64(7), at[more] + 1
