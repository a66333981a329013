"""DigestKernel: BLAKE2s of many rows at once, each with its number; with both of its twins.

Nothing here is secret. It is in the kernel because a server hashes every row that a round has
changed, 30,000 at the papers' size, which takes one call of C and would take 30,000 of Python.
"""

from __future__ import annotations

import ctypes
import hashlib
from abc import ABC, abstractmethod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.kernel.points import address_of
from tessera.errors import MisuseError

DIGEST_BYTES: Final = 32
PERSON_BYTES: Final = 8

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]

_SIZE: Final = ctypes.c_size_t
_POINTER: Final = ctypes.c_void_p

DIGEST_ARGUMENTS: Final[dict[str, tuple[type[Any], ...]]] = {
    # whose; how many, numbers; rows, bytes of one; out
    "tessera_row_digests": (ctypes.c_char_p, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER),
}


class DigestKernel(ABC):
    """The part of a backend that hashes rows."""

    def row_digests(self, person: bytes, numbers: Numbers, rows: Bytes) -> Bytes:
        """(n, 32): BLAKE2s, under this personalisation, of numbers[i] in 8 bytes and rows[i]."""
        if not isinstance(person, bytes) or len(person) != PERSON_BYTES:
            raise MisuseError(f"a personalisation is {PERSON_BYTES} bytes")
        if numbers.dtype != np.uint64 or numbers.ndim != 1 or rows.dtype != np.uint8:
            raise MisuseError("row_digests: numbers of 64 bits and rows of bytes are due")
        if rows.ndim != 2 or rows.shape[0] != numbers.size:
            raise MisuseError("row_digests: one number for each row")
        if not numbers.flags.c_contiguous or not rows.flags.c_contiguous:
            raise MisuseError("row_digests: the kernel works on contiguous arrays")
        out = np.empty((numbers.size, DIGEST_BYTES), dtype=np.uint8)
        if numbers.size:
            self._row_digests(person, numbers, rows, out)
        return out

    @abstractmethod
    def _row_digests(self, person: bytes, numbers: Numbers, rows: Bytes, out: Bytes) -> None: ...


class ReferenceDigests(DigestKernel):
    """By hashlib, row by row."""

    def _row_digests(self, person: bytes, numbers: Numbers, rows: Bytes, out: Bytes) -> None:
        for i, number in enumerate(numbers.tolist()):
            named = number.to_bytes(8, "little") + rows[i].tobytes()
            digest = hashlib.blake2s(named, person=person).digest()
            out[i] = np.frombuffer(digest, dtype=np.uint8)


class NativeDigests(DigestKernel):
    """By digests.c, through ctypes, which lets other threads run."""

    _library: ctypes.CDLL

    def _row_digests(self, person: bytes, numbers: Numbers, rows: Bytes, out: Bytes) -> None:
        self._library.tessera_row_digests(
            person,
            numbers.size,
            address_of(numbers),
            address_of(rows),
            rows.shape[1],
            address_of(out),
        )
