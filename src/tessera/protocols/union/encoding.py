"""UnionEncoding: how a set of ids becomes words whose secure sum reveals the union and no more.

A client encodes its ids, the secure sum adds all encodings in `group`, and the server decodes the
total. Both encodings make the total a randomised function of the union alone: how many clients hold
an id does not change its distribution (docs/protocols/union.md). An encoding is a frozen record of
public numbers, the same at every client and at the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol, Self

import numpy as np

from tessera.crypto.group import Group, Words
from tessera.crypto.hashing import Ids
from tessera.crypto.prg import Stream
from tessera.errors import ConfigError, MisuseError

MAX_DOMAIN: Final = 2**64
"""Ids are 64-bit words, so a table has at most this many rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnionResult:
    """What the server reads out of the sum."""

    ids: Ids = field(repr=False)  # sorted, each once
    complete: bool  # nothing is left that decoding could see and not explain
    residual: int  # cells that did not peel, or candidates that were not scanned; 0 if complete


class UnionEncoding(Protocol):
    """One way to write a set under a secure sum."""

    @property
    def domain(self) -> int:
        """Ids are 0 .. domain - 1."""

    @property
    def capacity(self) -> int:
        """The size of union that the rates below are stated for."""

    @property
    def seed(self) -> int:
        """The round's public hash seed, 64 bits."""

    @property
    def group(self) -> Group:
        """What the secure sum is taken in."""

    @property
    def length(self) -> int:
        """Words under the secure sum."""

    @property
    def expected_bytes(self) -> int:
        """Bytes of one client's words on the wire; they do not depend on its set."""

    @property
    def false_negative_rate(self) -> float:
        """Bound on the probability that an id of the union is missed without a sign of it."""

    @property
    def failure_rate(self) -> float:
        """Bound on the probability that a full union decodes with `complete` false."""

    @property
    def expected_false_positives(self) -> float:
        """Ids in the result that are in no client's set, on average, at capacity."""

    def with_seed(self, seed: int) -> Self:
        """The same encoding for another round."""

    def encode(self, ids: Ids, randomness: Stream) -> Words:
        """One client's words, shape (length,). `ids` sorted and distinct; the stream is used once.

        A stream used for two sets would tell the server where they differ.
        """

    def decode(self, total: Words) -> UnionResult:
        """The union, from the sum of all encodings. Ends on any words of the right shape."""


def check_domain(domain: int) -> None:
    """Refuse a domain that 64-bit ids cannot number."""
    if not 1 <= domain <= MAX_DOMAIN:
        raise ConfigError(f"union: a domain of {domain} ids; there must be 1 to 2^64")


def check_ids(ids: Ids, domain: int) -> None:
    """Refuse what is not a sorted set of ids of this domain: a bug of the caller, not of a peer."""
    if ids.dtype != np.uint64 or ids.ndim != 1:
        raise MisuseError(f"union: ids are a flat uint64 array, not {ids.dtype} of {ids.shape}")
    if ids.size and not bool(np.all(ids[:-1] < ids[1:])):
        raise MisuseError("union: ids must be sorted and distinct")
    if ids.size and int(ids[-1]) >= domain:
        raise MisuseError(f"union: an id is outside the domain of {domain}")  # which one: private


def check_total(total: Words, group: Group, length: int) -> None:
    """Refuse an array that no secure sum of this encoding can have given."""
    if total.shape != (length,) or not group.contains(total):
        raise MisuseError(
            f"union: a total has {length} reduced words of {group.name}, "
            f"not {total.dtype} of {total.shape}"
        )


def packed_bytes(group: Group, length: int) -> int:
    """What `group.pack` gives for this many words."""
    return -(-length * group.bits // 8)
