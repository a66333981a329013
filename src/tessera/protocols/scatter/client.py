"""A client that writes rows: one report, whose length does not depend on its content.

Where training failed (values that are not finite, or beyond the headroom) the caller passes None
and zeros are sent: a missing report would tell an attacker who caused the failure that it worked.
Rows that found no bin are left out silently, for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from tessera.crypto import dpf, verifiable
from tessera.crypto.group import Words
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError
from tessera.ids import SERVER, TableId
from tessera.protocols import wire
from tessera.protocols.machine import Left, Outbound
from tessera.protocols.scatter.messages import WriteReport
from tessera.protocols.scatter.sums import split_dense
from tessera.protocols.stored import ByDigest, Kept
from tessera.protocols.two_server import envelope
from tessera.protocols.two_server.client import (
    Invited,
    Prepared,
    TwoServerClient,
    check_tables,
    row_indices,
)
from tessera.protocols.two_server.messages import Purpose, SignedHeader
from tessera.protocols.two_server.params import Ids


@dataclass(frozen=True, slots=True, eq=False)
class RowUpdate:
    """A client's rows of one table: ascending ids, and reduced words (k, words, *limbs)."""

    ids: Ids = field(repr=False)
    words: Words = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """All that a client writes in a round: the dense words, and rows of every written table."""

    dense: Words | None = field(default=None, repr=False)
    tables: Mapping[TableId, RowUpdate] = field(default_factory=dict, repr=False)


@wire.record(tag=0x0620)
@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The report is sent; nothing more is due."""

    sent: Annotated[Kept[WriteReport], ByDigest(WriteReport)]


class WriteClient(TwoServerClient):
    """One client's report in one round."""

    ROLE = "client of a write"
    STATES = (Invited, Prepared, Sent, Left)
    PURPOSE = Purpose.WRITE
    FROM_SERVER = (SignedHeader,)

    def submit(self, update: Update | None) -> list[Outbound]:
        """Write these rows; None writes zeros, where training failed."""
        header = self.signed_header.message.header
        given = self._zeros() if update is None else update
        self._check(given)
        layouts = self._layouts(header)
        context = self._new_report_context(header)
        public: list[bytes] = []
        seeds: list[tuple[Secret, Secret]] = []
        for spec in self.params.written:
            if not spec.writes_points:
                continue
            layout = layouts.writing[spec.table]
            rows = given.tables[spec.table]
            placement = layout.table.place(row_indices(spec, rows.ids))
            own = context.table_id(spec.table)
            pair = dpf.gen(
                layout.forest,
                placement.points,
                layout.spread(placement, rows.words),
                report_id=own,
                entropy=self._entropy,
            )
            keys = pair.public.to_bytes()
            if self.params.verified:
                keys += verifiable.corrections(pair, placement.points, report_id=own)
            public.append(wire.HashedBytes(keys))
            seeds.append(pair.seeds)
        dense, dense_seed = b"", None
        if self.params.dense_words:
            dense_seed = self._entropy.secret(Label.DENSE_SEED, context.report_id)
            dense = split_dense(self.params, self._plain(given), dense_seed)
        box = envelope.seal_box(
            context,
            public,
            seeds=[helper for _, helper in seeds],
            dense_seed=dense_seed,
            answer_key=None,
            key=self._identity.key,
        )
        report = WriteReport(
            round_id=self.params.round_id,
            sender=self.me,
            report_id=context.report_id,
            public=tuple(public),
            seeds=tuple(leader.reveal() for leader, _ in seeds),
            dense=dense,
            box=box,
        )
        sent = Kept.of(report)
        self._move(Sent(sent=sent), b"")
        return [Outbound.again(SERVER, sent.data)]

    def _zeros(self) -> Update:
        group = self.params.group
        nothing = {
            t.table: RowUpdate(np.zeros(0, dtype=np.uint64), group.zeros((0, t.words)))
            for t in self.params.written
        }
        return Update(group.zeros(self.params.dense) if self.params.dense else None, nothing)

    def _plain(self, given: Update) -> Words:
        """Everything that is shared as it is: the dense words, then whole tables."""
        group = self.params.group
        words = group.zeros(self.params.dense_words)
        if given.dense is not None:
            words[: self.params.dense] = given.dense
        start = self.params.dense
        for spec in self.params.written:
            if spec.writes_dense:
                size = spec.rows * spec.words
                part = given.tables[spec.table]
                whole = words[start : start + size].reshape(spec.rows, spec.words, *group.limbs)
                whole[row_indices(spec, part.ids)] = part.words
                start += size
        return words

    def _check(self, given: Update) -> None:
        group = self.params.group
        check_tables(given.tables, self.params.written)
        if (given.dense is not None) != bool(self.params.dense):
            raise MisuseError("two servers: a dense part is given or missing, unlike in the round")
        parts: list[tuple[npt.NDArray[Any], tuple[int, ...]]] = []
        if given.dense is not None:
            parts.append((given.dense, (self.params.dense, *group.limbs)))
        for spec in self.params.written:
            part = given.tables[spec.table]
            parts.append((part.words, (len(part.ids), spec.words, *group.limbs)))
        for words, shape in parts:
            if words.shape != shape or not group.contains(words):
                raise MisuseError(f"two servers: expected {shape} words of {group.name}")


WriteClient.STEPS = {(Invited, SignedHeader): WriteClient._on_header}
