"""Sets of indices of sets.c, called through ctypes, which lets other threads run."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from tessera.crypto.kernel.points_native import address_of
from tessera.crypto.kernel.sets import Bytes, Indices, Members, Numbers, SetKernel

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
