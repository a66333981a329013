"""Group: the finite additive group that a secure sum is taken in.

Values, masks and the opened sum of one secure sum all live in one group, which the plan names:
`Ring` (Z_2^b) or `Field` (F_p, p a Mersenne prime). Masks are uniform in it, so a masked vector is
uniform too, whatever it hides (docs/threat-model.md).

Elements are held in numpy arrays of unsigned integers, little-endian. A group of more than 64 bits
spends a last axis of two 64-bit limbs, low limb first; `limbs` is that axis, `()` elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tessera.crypto.field import Field
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError

NAME = re.compile(r"z2\^(?P<bits>[1-9][0-9]{0,2})|f2\^(?P<exponent>[1-9][0-9]{0,2})-1")

Words = npt.NDArray[np.unsignedinteger[Any]]
"""Group elements: an array of unsigned integers, each below the group's order."""


class Group(Protocol):
    """What a sum is taken in. Instances are frozen and hashable; equal names mean equal groups."""

    @property
    def name(self) -> str:
        """What the plan calls it: `z2^22`, `f2^61-1`."""

    @property
    def bits(self) -> int:
        """Bits per word on the wire."""

    @property
    def order(self) -> int:
        """Number of elements."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """How one limb is stored: the smallest of 8, 16, 32 and 64 bits that holds it."""

    @property
    def word_bytes(self) -> int:
        """Bytes of one mask word in the key stream: 1, 2, 4, 8 or 16."""

    @property
    def limbs(self) -> tuple[int, ...]:
        """The last axis of every array: `()` up to 64 bits, `(2,)` above."""

    def zeros(self, shape: int | tuple[int, ...]) -> Words:
        """The neutral element, `shape` times: an array of shape `(*shape, *limbs)`."""

    def from_ints(self, values: Iterable[int] | npt.NDArray[Any]) -> Words:
        """Reduce integers, negative ones too; an array keeps its shape, with the limbs appended."""

    def to_ints(self, words: Words) -> list[int]:
        """The elements as integers 0 <= v < order, flat."""

    def add(self, a: Words, b: Words) -> Words:
        """a + b, reduced, in a new array."""

    def sub(self, a: Words, b: Words) -> Words:
        """a - b, reduced, in a new array."""

    def neg(self, a: Words) -> Words:
        """-a, reduced, in a new array."""

    def iadd(self, acc: Words, x: Words) -> None:
        """acc += x, reduced, in place."""

    def pack(self, words: Words) -> bytes:
        """The elements as a little-endian bit stream of exactly ceil(count * bits / 8) bytes."""

    def packed(self, words: Words) -> memoryview:
        """What `pack` gives, not yet copied into an object of its own: for long vectors."""

    def unpack(self, data: bytes | memoryview, count: int) -> Words:
        """Invert `pack`; ValueError on a wrong length, padding bits set, or a value not reduced."""

    def add_packed(self, acc: Words, data: bytes | memoryview) -> None:
        """acc += what `unpack` makes of the data, as many words as `acc` has; in place."""

    def contains(self, words: Words) -> bool:
        """Whether this is an array of this group in which every word is reduced."""


def group_from_name(name: str) -> Group:
    """The group of this name; every group's `name` leads back to an equal one."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"group {name!r} is not known", hint="write z2^B for a ring or f2^E-1 for a prime field"
        )
    if match["bits"] is not None:
        return Ring(int(match["bits"]))
    return Field(int(match["exponent"]))
