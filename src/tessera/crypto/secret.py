"""Secret: bytes that do not print, that compare in constant time, and from which others derive.

Keys, seeds and shares travel through records, logs and tracebacks. As a `Secret` they cannot leave
by accident: the only way to the bytes is `reveal()`, which is easy to search for. What this does
not do is erase memory: CPython copies `bytes` freely, and we do not pretend otherwise.
"""

from __future__ import annotations

import hmac
import operator
from functools import lru_cache
from typing import Any, Final, NoReturn, final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from tessera.errors import MisuseError

MAX_DERIVED: Final = 255 * 32
"""The most bytes that one HKDF-Expand gives (RFC 5869, 2.3: 255 blocks of the hash)."""

_SHA256: Final = SHA256()
_DOMAIN: Final = b"tessera-1\0"  # parts our derivations from any other use of the same key


@final
class Secret:
    """An immutable byte string of any length that keeps its content to itself.

    It equals only another `Secret`, has no hash (so it is never a dictionary key, where lookups
    would compare in variable time), and refuses to be pickled. A copy is the object itself.
    """

    __slots__ = ("_content",)

    _content: bytes

    def __init__(self, content: bytes | bytearray | memoryview) -> None:
        if not isinstance(content, bytes | bytearray | memoryview):
            # bytes(5) would be five zero bytes: a key that everybody knows
            raise MisuseError(f"a Secret is made of bytes, not of {type(content).__name__}")
        object.__setattr__(self, "_content", bytes(content))

    def reveal(self) -> bytes:
        """The bytes themselves, for a cipher or for a sealed message; never for a log."""
        return self._content

    def derive(self, label: str, *context: int | bytes | str, size: int = 32) -> Secret:
        """An independent secret for one use: HKDF-Expand with SHA-256 (RFC 5869, 2.3).

        Different (label, context, size) give unrelated secrets. The size is part of the input, so
        that a shorter derivation is not the beginning of a longer one. This secret has to be a
        uniform key of at least 32 bytes, as the RFC asks of its PRK.
        """
        if len(self._content) < 32:
            raise MisuseError(f"cannot derive from {len(self._content)} bytes, 32 are needed")
        check_size(size)
        info = _DOMAIN + encode_context(size, label, *context)
        return Secret(HKDFExpand(_SHA256, size, info).derive(self._content))

    def __repr__(self) -> str:
        return f"Secret({len(self._content)} bytes)"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __len__(self) -> int:
        return len(self._content)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._content, other._content)

    __hash__ = None  # type: ignore[assignment]  # says "unhashable", as for list

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a Secret does not change")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a Secret does not change")

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not pickled; write reveal() where it is to be stored")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a Secret has no state to show")


def check_size(size: int) -> None:
    """Refuse a length that one derivation cannot give."""
    if not 0 < size <= MAX_DERIVED:
        raise MisuseError(f"a derived secret has 1 to {MAX_DERIVED} bytes, not {size}")


def encode_context(*items: int | bytes | str) -> bytes:
    """One byte string per sequence of items: each is a type tag, its length (8 bytes), its bytes.

    Injective, so ("ab", "c") and ("a", "bc"), 1 and "1", or () and ("",) never meet.
    """
    parts: list[bytes] = []
    for item in items:
        if isinstance(item, bytes):
            parts += (b"b", len(item).to_bytes(8, "big"), item)
        elif isinstance(item, str):
            parts.append(_encoded_text(item))
        elif type(item) is int:
            parts.append(_encoded_number(item))
        else:
            parts.append(_encoded_number(_number(item)))
    return b"".join(parts)


@lru_cache(maxsize=256)  # labels, and the names of federations and tables
def _encoded_text(text: str) -> bytes:
    content = text.encode()
    return b"s" + len(content).to_bytes(8, "big") + content


@lru_cache(maxsize=4096)  # stages, sizes and the clients of a cohort
def _encoded_number(number: int) -> bytes:
    # shortest two's complement: the magnitude's bits and one for the sign
    width = (number if number >= 0 else ~number).bit_length() // 8 + 1
    return b"i" + width.to_bytes(8, "big") + number.to_bytes(width, "big", signed=True)


def _number(item: Any) -> int:
    """numpy's integers too, but no bool."""
    try:
        if not isinstance(item, bool):
            return operator.index(item)
    except TypeError:
        pass
    kind = type(item).__name__
    raise MisuseError(f"a derivation's context holds int, bytes or str, not {kind}")
