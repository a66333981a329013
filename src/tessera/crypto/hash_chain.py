"""A chain of values that was committed to at once and is revealed one by one.

    value n - 1 = H(context, n, value n)        value 0 is the commitment

Value n is unique: whoever committed has no second one to choose from, unlike a signature, of which
an Ed25519 signer can make as many as it likes. Nobody else can compute it before it is revealed;
afterwards everybody has all values below it, too. Lamport 1981, with the number and a context in
every step, so that chains of two parties never meet and one search serves one value only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import ConfigError, MisuseError

VALUE_BYTES: Final = 32
MAX_LENGTH: Final = 1 << 16
"""What a verifier walks at most: 0.1 s."""


@dataclass(frozen=True, slots=True)
class HashChain:
    """The owner's side: the secret last value gives all others."""

    last: Secret = field(repr=False)
    length: int
    context: bytes

    def __post_init__(self) -> None:
        if len(self.last) != VALUE_BYTES:
            raise MisuseError(f"a chain begins with a secret of {VALUE_BYTES} bytes")
        if not 1 <= self.length <= MAX_LENGTH:
            raise ConfigError(f"a hash chain of {self.length} values: 1 to {MAX_LENGTH} are due")

    @property
    def commitment(self) -> bytes:
        return _walk(self.last.reveal(), self.length, 0, self.context)

    def value(self, number: int) -> bytes:
        """Value `number`; with it everybody has those below."""
        if not 1 <= number <= self.length:
            raise MisuseError(f"value {number} of a hash chain with {self.length}")
        return _walk(self.last.reveal(), self.length, number, self.context)


def follows(value: bytes, number: int, known: bytes, context: bytes, *, since: int = 0) -> bool:
    """Whether this is value `number` of the chain whose value `since` is `known`.

    The commitment is value 0; False for a number that no chain reaches.
    """
    if len(value) != VALUE_BYTES or not 0 <= since < number <= MAX_LENGTH:
        return False
    return _walk(value, number, since, context) == known


def _walk(value: bytes, number: int, down_to: int, context: bytes) -> bytes:
    for at in range(number, down_to, -1):
        value = hashlib.sha256(encode_context(Label.HASH_CHAIN, context, at, value)).digest()
    return value
