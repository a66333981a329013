"""A client's keys at one server: checked when they come, evaluated in the bytes they came in.

Both protocols and both servers do this alike. What is held has been checked, so that evaluating it
does not fail: a client with invalid keys is excluded when its report comes, at both servers, and
not when reports are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tessera.crypto import verifiable
from tessera.crypto.dpf import PublicKeys, ServerKeys
from tessera.crypto.forest import Forest
from tessera.crypto.group import Group
from tessera.crypto.kernel.backend import packed_size
from tessera.crypto.kernel.trees import BLOCK
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import PeerError, WireError
from tessera.ids import ClientId, TableId
from tessera.protocols.two_server.envelope import ReportContext
from tessera.protocols.two_server.key_period import ClientKeys, KeyPeriod

LEADER_PARTY: Final = 0
HELPER_PARTY: Final = 1

TOGETHER_BYTES: Final = 64 << 20
"""Of root nodes that are expanded at once: more reports in one go read a table fewer times."""

NO_KEYS: Final = "sent a hint, and has no keys in this period"

Refusal = Callable[[ClientId, str], PeerError]


@dataclass(frozen=True, slots=True, eq=False)
class Reported:
    """One query or report at one server, checked: keys by table, in the order of the tables.

    In a report whose keys are checked, the corrections of tags follow a table's keys.
    """

    context: ReportContext
    public: tuple[bytes, ...] = field(repr=False)
    seeds: tuple[bytes, ...] = field(repr=False)

    def expanded(self, forest: Forest, table: TableId, at: int, *, party: int) -> ServerKeys:
        """Its keys for one table, the `at`-th that has any, with their roots, to be evaluated."""
        return ServerKeys.of(
            # checked when they came, and evaluated where they are
            PublicKeys(forest, memoryview(self.public[at])[: forest.public_bytes]),
            Secret(self.seeds[at]),
            party=party,
            report_id=self.context.table_id(table),
        )

    def corrections(self, forest: Forest, at: int) -> memoryview:
        """What makes the tags at its points equal (`crypto/verifiable.py`)."""
        return memoryview(self.public[at])[forest.public_bytes :]


def reported(
    context: ReportContext,
    public: tuple[bytes, ...],
    seeds: tuple[bytes, ...],
    forests: tuple[Forest, ...],
    period: KeyPeriod | None,
) -> Reported:
    """A report at one server; with the keys of an earlier round, `public` is hints to these."""
    if period is None:
        return Reported(context, public, seeds)
    own = period.clients[context.client]
    context = replace(context, report_id=own.report_id)
    return Reported(context, own.with_hints(forests, public), own.seeds)


def batches(reports: Sequence[Reported], forest: Forest) -> Iterator[Sequence[Reported]]:
    """All of them, as many at a time as have not too many root nodes in this forest."""
    together = max(1, TOGETHER_BYTES // (BLOCK * max(1, forest.trees.count)))
    for start in range(0, len(reports), together):
        yield reports[start : start + together]


def check_keys(
    forests: Sequence[Forest],
    public: Sequence[bytes],
    refusal: Refusal,
    client: ClientId,
    *,
    corrected: bool = False,
    keys: ClientKeys | None = None,
) -> None:
    """Refuse a public part that could not be expanded: another shape, or padding bits set.

    `corrected`: corrections of tags follow the keys of every table. With the client's `keys` of an
    earlier round it is hints to these.
    """
    if len(public) != len(forests):
        raise refusal(client, f"sent keys for {len(public)} tables, {len(forests)} are expected")
    if keys is not None:
        public, corrected = keys.with_hints(tuple(forests), tuple(public)), False
    for forest, data in zip(forests, public, strict=True):
        try:
            end = forest.public_bytes if corrected else len(data)
            PublicKeys.from_bytes(forest, memoryview(data)[:end])
            if corrected:
                verifiable.parsed(forest, memoryview(data)[end:])
        except WireError as error:
            raise refusal(client, f"sent invalid keys: {error}") from error


def check_words(group: Group, data: bytes, count: int) -> None:
    """ValueError unless these are `count` packed words of the group."""
    if not _surely_words(group, data, count):
        group.unpack(data, count)


# Where words are those of a ring, every pattern of bits is some words: what can be wrong is the
# length, and bits that are left over in a last byte. That is seen without unpacking anything.
# Whatever is not surely right is unpacked, which decides.


def _surely_words(group: Group, data: bytes | memoryview, count: int) -> bool:
    """Whether `group.unpack` would take these."""
    if not isinstance(group, Ring) or len(data) != packed_size(count, group.bits):
        return False
    used = count * group.bits % 8  # bits of the last byte; those above are zero
    return not used or not data[-1] >> used
