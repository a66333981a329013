"""The twin of sets.c in NumPy: one pass over all sets together, whatever their number."""

from __future__ import annotations

from typing import Final

import numpy as np

from tessera.crypto.kernel.sets import Bytes, Indices, Members, Numbers, SetKernel

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
