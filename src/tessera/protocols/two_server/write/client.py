"""A client that writes rows: one report, whose length does not depend on its content.

Where training failed (values that are not finite, or beyond the headroom) the caller passes None
and zeros are sent: a missing report would tell an attacker who caused the failure that it worked.
Rows that found no bin are left out silently, for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto import dpf, verifiable
from tessera.crypto.entropy import RootedEntropy
from tessera.crypto.group import Words
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError
from tessera.ids import SERVER, TableId
from tessera.protocols.machine import Left, Outbound
from tessera.protocols.two_server import reports
from tessera.protocols.two_server.handshake import (
    Invited,
    Prepared,
    TwoServerClient,
    check_tables,
    content_digest,
    row_indices,
)
from tessera.protocols.two_server.key_period import OwnKeys, own_keys_of
from tessera.protocols.two_server.messages import Purpose, SignedHeader, WriteReport
from tessera.protocols.two_server.params import Ids, TwoServerTable
from tessera.protocols.two_server.reports import ReportContext
from tessera.protocols.two_server.write.sums import split_dense
from tessera.wire.stored import ByDigest, Kept


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

    def submit(
        self, update: Update | None, rows: Mapping[TableId, Ids] | None = None
    ) -> list[Outbound]:
        """Write these rows; None writes zeros, where training failed.

        Keys are made for `rows`, by default those of the update. Where they last, an update of a
        later round is for rows among them, and others are left out. What was stored for this epoch
        is sent, and no other update.
        """
        header = self.signed_header.message.header
        given = self._zeros() if update is None else update
        self._check(given)
        made = own_keys_of(self.params, header, self.setup.own_keys)
        stored = None if self.setup.own_keys is None else self.setup.own_keys.latest()
        if stored is not None and stored.mark == (int(header.period), header.epoch):
            return self._send(Kept.of(wire.decode(stored.sent, expect=[WriteReport])))
        named = {t: part.ids for t, part in given.tables.items()} if rows is None else dict(rows)
        context = self._new_report_context(header, self._content(given, named))
        if made is None:
            made = OwnKeys.begun(
                self.params,
                header,
                named,
                root=self._entropy.secret(Label.KEY_PERIOD_ROOT, context.report_id),
                report_id=context.report_id,
            )
        sent = Kept.of(self._report(context, made, given))
        if self.params.key_rounds > 1:
            if self.setup.own_keys is None:
                raise MisuseError("two servers: keys that last longer than a round need a store")
            self.setup.own_keys.keep(replace(made, epoch=header.epoch, sent=sent.data))
        return self._send(sent)

    def _content(self, given: Update, rows: Mapping[TableId, Ids]) -> bytes:
        parts: list[bytes | Words | Ids] = [b"" if given.dense is None else given.dense]
        for spec in self.params.written:
            part = given.tables[spec.table]
            parts += [part.ids, part.words, rows[spec.table]]
        return content_digest(*parts)

    def _send(self, sent: Kept[WriteReport]) -> list[Outbound]:
        self._move(Sent(sent=sent), b"")
        return [Outbound.again(SERVER, sent.data)]

    def _report(self, context: ReportContext, made: OwnKeys, given: Update) -> WriteReport:
        """Keys for all bins, or in a later round of their period the last corrections alone."""
        later, public = context.header.epoch > 0, []
        seeds: list[tuple[Secret, Secret]] = []
        for spec in self.params.written:
            if spec.writes_points:
                part, own = self._keys(context, made, spec, given.tables[spec.table])
                public.append(wire.HashedBytes(part))
                seeds += [] if later else [own]
        dense, dense_seed = b"", None
        if self.params.dense_words:
            dense_seed = self._entropy.secret(Label.DENSE_SEED, context.report_id)
            dense = split_dense(self.params, self._plain(given), dense_seed)
        box = reports.seal_box(
            context,
            public,
            seeds=[helper for _, helper in seeds],
            dense_seed=dense_seed,
            answer_key=None,
            key=self.setup.identity.key,
        )
        return WriteReport(
            round_id=self.params.round_id,
            sender=self.me,
            report_id=context.report_id,
            public=tuple(public),
            seeds=tuple(leader.reveal() for leader, _ in seeds),
            dense=dense,
            box=box,
        )

    def _keys(
        self, context: ReportContext, made: OwnKeys, spec: TwoServerTable, part: RowUpdate
    ) -> tuple[bytes, tuple[Secret, Secret]]:
        """One table's public part in this epoch, and both seeds.

        The keys follow from the period's root, so that an epoch needs its values alone.
        """
        layout = self._layouts(context.header).writing[spec.table]
        rows = made.rows[spec.table]
        row_indices(spec, part.ids)
        words = self.params.group.zeros((len(rows), spec.words))
        kept = np.isin(part.ids, rows, assume_unique=True)
        words[np.searchsorted(rows, part.ids[kept])] = part.words[kept]
        placement = layout.table.place(row_indices(spec, rows))
        own = replace(context, report_id=made.report_id).table_id(spec.table)
        pair = dpf.gen(
            layout.forest,
            placement.points,
            layout.spread(placement, words),
            report_id=own,
            entropy=RootedEntropy(made.root),
            epoch=context.header.epoch,
        )
        keys = pair.public.to_bytes()
        if context.header.epoch:
            return keys[len(keys) - layout.forest.finals_bytes :], pair.seeds
        if self.params.verified:
            keys += verifiable.corrections(pair, placement.points, report_id=own)
        return keys, pair.seeds

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
