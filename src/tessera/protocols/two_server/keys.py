"""A client's keys at one server: checked when they come, expanded when they are evaluated.

Both protocols and both servers do this alike. Between the two moments keys are kept as the bytes
they came in, about half of what they take expanded; that is also how they are stored. What is held
has been checked, so that expanding it does not fail: a client with invalid keys is excluded when
its report comes, at both servers, and not when reports are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tessera.crypto.dpf import PublicKeys, ServerKeys
from tessera.crypto.forest import HEADER_BYTES, Forest
from tessera.crypto.group import Group
from tessera.crypto.kernel.backend import packed_size
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import PeerError, WireError
from tessera.ids import ClientId, TableId
from tessera.protocols.two_server.envelope import ReportContext

LEADER_PARTY: Final = 0
HELPER_PARTY: Final = 1

TOGETHER: Final = 64
"""Reports that are expanded and evaluated in one go."""

Refusal = Callable[[ClientId, str], PeerError]


@dataclass(frozen=True, slots=True, eq=False)
class Reported:
    """One query or report at one server, checked: keys by table, in the order of the tables."""

    context: ReportContext
    public: tuple[bytes, ...] = field(repr=False)
    seeds: tuple[bytes, ...] = field(repr=False)

    def expanded(self, forest: Forest, table: TableId, at: int, *, party: int) -> ServerKeys:
        """Its keys for one table, the `at`-th that has any, ready to be evaluated."""
        return ServerKeys.of(
            PublicKeys.from_bytes(forest, self.public[at]),
            Secret(self.seeds[at]),
            party=party,
            report_id=self.context.table_id(table),
        )


def batches(reports: Sequence[Reported]) -> Iterator[Sequence[Reported]]:
    """All of them, `TOGETHER` at a time."""
    for start in range(0, len(reports), TOGETHER):
        yield reports[start : start + TOGETHER]


def check_keys(
    forests: Sequence[Forest], public: Sequence[bytes], refusal: Refusal, client: ClientId
) -> None:
    """Refuse a public part that could not be expanded: another shape, or padding bits set."""
    if len(public) != len(forests):
        raise refusal(client, f"sent keys for {len(public)} tables, {len(forests)} are expected")
    for forest, data in zip(forests, public, strict=True):
        if not _surely_keys(forest, data):
            try:
                PublicKeys.from_bytes(forest, data)
            except WireError as error:
                raise refusal(client, f"sent invalid keys: {error}") from error


def check_words(group: Group, data: bytes, count: int) -> None:
    """ValueError unless these are `count` packed words of the group."""
    if not _surely_words(group, data, count):
        group.unpack(data, count)


# Where words are those of a ring, every pattern of bits is some keys, or some words: what can be
# wrong is the length, the forest they name, and bits that are left over in a last byte. That is
# seen without unpacking anything. Whatever is not surely right is unpacked, which decides.


def _surely_keys(forest: Forest, data: bytes) -> bool:
    """Whether `PublicKeys.from_bytes` would take these."""
    if len(data) != forest.public_bytes or data[:HEADER_BYTES] != forest.digest:
        return False
    values, trees = forest.values, forest.trees
    finals = len(data) - forest.finals_bytes  # before them a bit for every step, filled up
    if not _is_clear(data[finals - 1], trees.total_steps):
        return False
    if values.group is None:
        return True
    words = trees.count * values.per_leaf * values.words
    return _surely_words(values.group, memoryview(data)[finals:], words)


def _surely_words(group: Group, data: bytes | memoryview, count: int) -> bool:
    """Whether `group.unpack` would take these."""
    if not isinstance(group, Ring) or len(data) != packed_size(count, group.bits):
        return False
    return not data or _is_clear(data[-1], count * group.bits)


def _is_clear(last: int, bits: int) -> bool:
    """Whether the last byte of so many bits is zero above them."""
    return not bits % 8 or not last >> bits % 8
