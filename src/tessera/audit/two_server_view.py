"""The view of each of two servers on a round, from its own recorded messages.

The leader receives its seeds and its plain shares directly. The helper gets its part through the
leader, as `Forwarded`: the public part, and a box sealed to its key, which is stored with a
recorded simulation. The header is agreed on by both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.audit.round_view import Entries
from tessera.crypto import dpf, prg
from tessera.crypto.cuckoo import Layout
from tessera.crypto.group import Words
from tessera.crypto.keys import SealingKey
from tessera.crypto.secret import Secret
from tessera.errors import CryptoError
from tessera.ids import ClientId, RoundId, TableId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.messages import (
    Forwarded,
    HandshakeConsent,
    HandshakeNonce,
    HandshakeOffer,
    HandshakeReveal,
    Header,
    IncludedList,
    OpenedSum,
    Purpose,
    Query,
    SignedHeader,
    WriteReport,
)
from tessera.protocols.two_server.params import Servers, TwoServerParams, TwoServerTable
from tessera.protocols.two_server.reports import Layouts, ReportContext, layouts_of
from tessera.protocols.two_server.write.sums import dense_stream
from tessera.protocols.union.encoding import packed_bytes
from tessera.rounds.messages import UnionOpened
from tessera.rounds.two_server.domain import two_server_params

LEADER: Final = "leader"
HELPER: Final = "helper"
EITHER: Final = "either server"
PARTIES: Final = {LEADER: 0, HELPER: 1}
MOST: Final = 20_000
"""Places of a cut that are looked at, the first ones: they are all alike."""

Places = npt.NDArray[np.int64]
Selected = Mapping[tuple[ClientId, TableId], Places]


@dataclass(frozen=True, slots=True)
class ReceivedKeys:
    """A client's query or report as one server has it: its own seeds, and its plain share."""

    report_id: bytes
    public: tuple[bytes, ...] = field(repr=False)
    seeds: tuple[bytes, ...] = field(repr=False)
    plain: bytes | Secret | None = field(repr=False)  # the leader's words, the helper's seed


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoServerView:
    """What one of two servers has of a round."""

    plan: Plan
    round_id: RoundId
    whose: str
    header: Header = field(repr=False)
    params: TwoServerParams = field(repr=False)
    received: Mapping[Purpose, Mapping[ClientId, ReceivedKeys]] = field(repr=False)
    included: tuple[ClientId, ...]
    opened: OpenedSum | None = field(repr=False)
    selected: Selected = field(default_factory=dict, repr=False)  # for scoring only

    @property
    def layouts(self) -> Layouts:
        return layouts_of(self.params, self.header)

    def report_context(self, client: ClientId, purpose: Purpose) -> ReportContext:
        return _report_context(
            self.params, self.header, purpose, client, self.received[purpose][client].report_id
        )

    def keys(
        self, client: ClientId, purpose: Purpose, table: TableId
    ) -> tuple[Layout, dpf.PublicKeys, dpf.ServerKeys] | None:
        """A client's point functions for a table as this server has them; None if it has none."""
        ways = {Purpose.RETRIEVE: self.layouts.reading, Purpose.WRITE: self.layouts.writing}
        given, layout = self.received[purpose].get(client), ways[purpose].get(table)
        if given is None or layout is None:
            return None
        forest = layout.forest
        at = next((i for i, b in enumerate(given.public) if b.startswith(forest.digest)), None)
        if at is None:
            return None  # no keys for this table: refused then, too
        part = given.public[at][: forest.public_bytes]  # and not what it is checked by
        public = dpf.PublicKeys.from_bytes(forest, part)
        own = dpf.ServerKeys.of(
            public,
            Secret(given.seeds[at]),
            party=PARTIES[self.whose],
            report_id=self.report_context(client, purpose).table_id(table),
        )
        return layout, public, own

    @property
    def roots(self) -> Iterator[tuple[TwoServerTable, int]]:
        """The tables whose rows clients choose, each with where it begins in the one id space."""
        for table, t in self.plan.root_ids.items():
            for spec in self.params.tables:
                if spec.table == table:
                    yield spec, self.plan.offsets[t.name]

    def plain(self, client: ClientId, spec: TwoServerTable) -> Words | None:
        """This server's plain share of a table that is written whole: (rows, words).

        Narrowed to a union, derived tables have as many rows as a map says that is not recorded,
        so that nothing behind one of them can be found: None.
        """
        keys = self.received[Purpose.WRITE].get(client)
        start = self.params.dense
        if keys is None or keys.plain is None or not spec.writes_dense:
            return None
        written = {other.table: other for other in self.params.written}
        for table, t in self.plan.table_ids.items():
            if table == spec.table:
                break
            if t.derived_from and self.plan.narrows:
                return None
            if table in written and written[table].writes_dense:
                start += written[table].rows * written[table].words
        known = len(self.plan.tables)
        start += sum(
            other.rows * other.words
            for other in self.params.written  # cuts of the dense part, behind all tables
            if known <= other.table < spec.table and other.writes_dense
        )
        words = _first_words(self.params, keys.plain, start + spec.rows * spec.words)
        return words[start:].reshape(spec.rows, spec.words, *self.params.group.limbs)


def leader_view(plan: Plan, round_id: RoundId, seen: Entries) -> TwoServerView | None:
    """The leader's; None if it was not opened."""
    received, sent = _by_direction(seen)
    signed = next((m for m in sent if isinstance(m, SignedHeader)), None)
    if signed is None:
        return None
    keys = {
        Purpose.RETRIEVE: {
            m.sender: ReceivedKeys(m.report_id, m.public, m.seeds, None)
            for m in received
            if isinstance(m, Query)
        },
        Purpose.WRITE: {
            m.sender: ReceivedKeys(m.report_id, m.public, m.seeds, m.dense)
            for m in received
            if isinstance(m, WriteReport)
        },
    }
    return _round(plan, round_id, LEADER, signed.header, keys, sent)


def helper_view(
    plan: Plan,
    round_id: RoundId,
    seen: Entries,
    key: SealingKey,
    seeds: Mapping[RoundId, bytes],
) -> TwoServerView | None:
    """The helper's; None if it has not agreed to open it. `key` opens what was sealed to it, and
    `seeds` are those of earlier rounds' bins, whose keys may still be written with."""
    received, sent = _by_direction(seen)
    offer = next((m for m in received if isinstance(m, HandshakeOffer)), None)
    reveal = next((m for m in received if isinstance(m, HandshakeReveal)), None)
    nonce = next((m for m in sent if isinstance(m, HandshakeNonce)), None)
    agreed = any(isinstance(m, HandshakeConsent) for m in sent)
    if offer is None or reveal is None or nonce is None or not agreed:
        return None
    header = Header(
        round_id=round_id,
        context=offer.context,
        leader_nonce=reveal.nonce,
        helper_nonce=nonce.nonce,
        tables=offer.tables,
        dense=offer.dense,
        period=nonce.period,
        bins=None if nonce.period == round_id else seeds.get(nonce.period),
    )
    params = _params(plan, round_id, received)
    keys: dict[Purpose, dict[ClientId, ReceivedKeys]] = {purpose: {} for purpose in Purpose}
    for m in received:
        if not isinstance(m, Forwarded):
            continue
        context = _report_context(params, header, m.purpose, m.sender, m.report_id)
        try:
            box = reports.unseal_box(context, m.box, key)
        except CryptoError:
            continue  # as it was refused then
        keys[m.purpose][m.sender] = ReceivedKeys(m.report_id, m.public, box.seeds, box.dense_seed)
    return _round(plan, round_id, HELPER, header, keys, received)


def both_views(
    plan: Plan,
    round_id: RoundId,
    seen: Entries,
    helpers: Entries,
    key: SealingKey | None,
    seeds: dict[RoundId, bytes],
) -> list[TwoServerView]:
    """A round as each server has it, as far as it is known: `key` is the helper's.

    `seeds` are those of earlier rounds' bins; this round's is added.
    """
    leader = leader_view(plan, round_id, seen)
    helper = None if key is None else helper_view(plan, round_id, helpers, key, seeds)
    if helper is not None:
        seeds[round_id] = helper.header.seed
    if leader is not None and helper is not None:
        selected = selected_places(leader, helper)
        leader, helper = (replace(view, selected=selected) for view in (leader, helper))
    return [view for view in (leader, helper) if view is not None]


def _round(
    plan: Plan,
    round_id: RoundId,
    whose: str,
    header: Header,
    keys: Mapping[Purpose, Mapping[ClientId, ReceivedKeys]],
    between: Sequence[Any],
) -> TwoServerView:
    """`between` are the messages from the leader to the helper."""
    included = next((m for m in between if isinstance(m, IncludedList)), None)
    return TwoServerView(
        plan=plan,
        round_id=round_id,
        whose=whose,
        header=header,
        params=_params(plan, round_id, between),
        received=keys,
        included=() if included is None else tuple(sorted(included.reports)),
        opened=next((m for m in between if isinstance(m, OpenedSum)), None),
    )


def _params(plan: Plan, round_id: RoundId, between: Sequence[Any]) -> TwoServerParams:
    domain: dict[str, Ids] | None = None
    for union in (m for m in between if isinstance(m, UnionOpened)):  # where there is one
        # Rows of derived tables follow from a map that is not recorded: they are left out.
        domain = {t.name: np.zeros(0, dtype=np.uint64) for t in plan.tables}
        domain |= {t.name: union.tables[table] for table, t in plan.root_ids.items()}
    return two_server_params(plan, round_id, _nobody(), domain)


def _by_direction(seen: Entries) -> tuple[list[Any], list[Any]]:
    received = [message for entry, message in seen if entry.direction == "received"]
    return received, [message for entry, message in seen if entry.direction == "sent"]


def _report_context(
    params: TwoServerParams, header: Header, purpose: Purpose, client: ClientId, report_id: bytes
) -> ReportContext:
    return ReportContext(
        params=params, header=header, purpose=purpose, client=client, report_id=report_id
    )


def _nobody() -> Servers:
    """Keys are pinned, and not in a view; bins do not depend on them once the header is there."""
    box = SealingKey.from_secret(Secret(bytes(range(32)))).public
    return Servers(leader=bytes(32), helper=b"\x01" * 32, box=box)


def _first_words(params: TwoServerParams, plain: bytes | Secret, count: int) -> Words:
    """The first `count` words of one server's plain share, however many there are."""
    group = params.group
    if isinstance(plain, Secret):
        words = group.zeros(count)
        prg.accumulate(group, words, [dense_stream(plain)], [1])
        return words
    data = bytearray(plain[: packed_bytes(group, count)])
    spare = 8 * len(data) - count * group.bits
    if spare:
        data[-1] &= 0xFF >> spare  # bits of the next word
    return group.unpack(bytes(data), count)


# --- selected places ------------------------------------------------------------------------------
#
# Where a client's largest changes are (`[update] top`) follows from both shares together. Here both
# are put together to know the truth, which each server's own attack is then scored with.


def cuts_of(view: TwoServerView) -> list[TwoServerTable]:
    """The tables of a round that are cuts of the dense part."""
    known = view.plan.table_ids
    return [spec for spec in view.params.tables if spec.table not in known]


def looked_at(spec: TwoServerTable) -> Places:
    return np.arange(min(spec.rows, MOST))


def selected_places(leader: TwoServerView, helper: TwoServerView) -> dict[Any, Places]:
    """What every client wrote of each cut, from both servers' shares: for scoring only."""
    found = {}
    for spec in cuts_of(leader):
        rows = looked_at(spec)
        for client in leader.received[Purpose.WRITE]:
            if client not in helper.received[Purpose.WRITE]:
                continue
            ours, theirs = (shares_at(view, spec, client, rows) for view in (leader, helper))
            if ours is not None and theirs is not None:
                total = leader.params.group.add(ours, theirs)
                found[client, TableId(spec.table)] = rows[total.any(axis=1)]
    return found


def shares_at(
    view: TwoServerView, spec: TwoServerTable, client: ClientId, rows: Places
) -> Words | None:
    """One server's share of what a client wrote in these rows, (rows, words)."""
    if spec.writes_dense:
        plain = view.plain(client, spec)
        return None if plain is None else plain[rows]
    known, group = view.keys(client, Purpose.WRITE, TableId(spec.table)), view.params.group
    if known is None:
        return None
    layout, _, own = known
    each = evaluated(layout, own, rows).reshape(len(rows), -1, spec.words)
    total = group.zeros((len(rows), spec.words))
    for way in range(each.shape[1]):
        total = group.add(total, each[:, way])
    return total


def evaluated(layout: Layout, own: dpf.ServerKeys, rows: Places) -> Words:
    """One server's share at the places of every row, (rows, words of all places)."""
    bins, places = layout.table.chosen[rows], layout.table.positions[rows]
    values = dpf.evaluate_points(own, bins.reshape(-1), places.reshape(-1))
    return values.reshape(len(rows), -1)
