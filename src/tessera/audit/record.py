"""Record: a run as the server saw it, round by round, and the truth that attacks are scored with.

The server's recorded view is fed through the server's own code once more, so that an attack has the
sums that the server opened, and nothing that it did not see. Rounds come one at a time: memory is
that of one round, however long the run was. What clients sent in the clear needs no replay; attacks
on ratings read it themselves (`ratings/record.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tessera import wire
from tessera.audit.epochs import EpochReplay
from tessera.audit.ratings.labels import Labels
from tessera.audit.round_view import Entries, PhasesView, RoundView, Truth
from tessera.crypto.keys import SealingKey
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError, PeerError, RoundAborted, WireError
from tessera.ids import HELPER, SERVER, ClientId, RoundId, StageId, TableId
from tessera.learning.compression import signed
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan, Sharing
from tessera.protocols.machine import RoundOver
from tessera.protocols.plain import FROM_CLIENT as IN_THE_CLEAR
from tessera.protocols.secagg.messages import (
    Advert,
    ForwardedShares,
    MaskedInput,
    RevealedSet,
    RevealedShares,
    Roster,
)
from tessera.protocols.secagg.params import Threat
from tessera.protocols.secagg.server import SecAggServerSetup, Server
from tessera.protocols.secagg.transcript import NOTHING, Digests
from tessera.protocols.two_server.messages import SignedHeader
from tessera.rounds import schemes
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.delivery import model_digest, row_digests
from tessera.rounds.messages import Download, UnionOpened
from tessera.rounds.select import Shown
from tessera.runs.folder import HELPER_KEY, TRUTH, VIEWS, RunFolder
from tessera.simulation import views
from tessera.simulation.views import ViewEntry


def shown(plan: Plan, labels: Labels | None = None) -> frozenset[Shown]:
    """What runs by this plan show; `labels` are those of a rating task."""
    return schemes.of(plan).shown(plan, rated=labels is not None and labels.factorised)


@dataclass(frozen=True, slots=True)
class Taken:
    """What is taken of a round: the servers' views of it, or a group's epoch that was opened."""

    round_id: RoundId
    entries: Entries
    helper_entries: Entries
    epoch: RoundView | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A run that can be audited: its plan, the server's view, and the truth for scoring only."""

    plan: Plan
    view: Path
    truth: Truth = field(repr=False)
    labels: Labels | None = None  # of a rating task
    helper_view: Path | None = None  # of two servers
    box_key: SealingKey | None = field(default=None, repr=False)  # the helper's own

    @classmethod
    def load(cls, folder: Path) -> Record:
        """A run's folder; ConfigError if it is not one, or lacks what an audit needs."""
        run = RunFolder.load(folder)
        plan, labels = run.plan, Labels.read(run)
        there = shown(plan, labels)
        view, truth = folder / VIEWS / f"{SERVER}.view.jsonl", folder / TRUTH
        everything = (
            f"{folder}: under scheme {plan.scheme} the server reads everything: it hides nothing "
            "that could be attacked"
        )
        if not there and schemes.of(plan).hides:
            raise ConfigError(
                f"{folder}: sharing = {plan.security.sharing.value!r} hides no rows of those in "
                "the open, and claims nothing of the others",
                hint=f'record the run with sharing = "{Sharing.SECURE}"',
            )
        if not there:
            raise ConfigError(everything, hint=f"something is hidden under {_hiding()}")
        if Shown.CLEAR_ROWS in there and not view.exists():
            raise ConfigError(
                f"{everything}, and no views are recorded to show it",
                hint=f"run with --record-views to see it read, or under {_hiding()}",
            )
        if plan.security.threat is Threat.ACTIVE and not there & {Shown.SHARES, Shown.GROUPS}:
            raise ConfigError(
                f"{folder}: the signatures of an active setting are checked with a directory that "
                "is not in the server's view",
                hint='record the run with threat = "semi-honest"; the server sees the same rows',
            )
        for path, what in ((view, "recorded views"), (truth, "truth to score with")):
            if not path.exists():
                raise ConfigError(
                    f"{folder} has no {what}: {path.relative_to(folder)} is missing",
                    hint="record a simulated run with its views and its truth",
                )
        helper, key = folder / VIEWS / f"{HELPER}.view.jsonl", folder / HELPER_KEY
        known = Shown.SHARES in there and helper.exists() and key.exists()
        kind = GroupRecord if cohorts_of(plan).waits else cls
        return kind(
            plan,
            view,
            read_truth(truth, plan),
            labels,
            helper if known else None,
            SealingKey.from_secret(Secret(key.read_bytes())) if known else None,
        )

    @property
    def rated(self) -> Labels:
        """The labels of a rating task."""
        if self.labels is None:
            raise MisuseError("attacks on ratings: the run is not of a rating task")
        return self.labels

    @property
    def shown(self) -> frozenset[Shown]:
        """What it shows to its servers."""
        return shown(self.plan, self.labels)

    def entries(self) -> Iterator[tuple[RoundId, Entries]]:
        """What the server saw, round by round: entries of its view, with their messages."""
        yield from _by_round(self.view)

    def taken(self) -> Iterator[Taken]:
        """The same, with what the helper saw of each round; nothing where that is not known."""
        theirs = iter(()) if self.helper_view is None else _by_round(self.helper_view)
        ahead = next(theirs, None)
        for round_id, seen in self.entries():
            while ahead is not None and ahead[0] < round_id:
                ahead = next(theirs, None)
            known = ahead is not None and ahead[0] == round_id
            yield Taken(round_id, seen, ahead[1] if known and ahead is not None else [])

    def rounds(self) -> Iterator[RoundView]:
        """Every round in which a roster was sent."""
        for round_id, seen in self.entries():
            yield from replays(self.plan, round_id, seen)


class GroupRecord(Record):
    """Of a run in fixed groups."""

    def taken(self) -> Iterator[Taken]:
        for view in self.rounds():
            yield Taken(view.round_id, [], [], view)

    def rounds(self) -> Iterator[RoundView]:
        """Every update of a fixed group that opened."""
        return EpochReplay(self.plan).take(_read(self.view))


def replays(plan: Plan, round_id: RoundId, seen: Entries) -> list[PhasesView]:
    """The round's secure sum once more; none if no client was sent a roster."""
    if not schemes.of(plan).masks:
        return []
    # Everybody who was drawn is told how the round ended.
    plan = cohorts_of(plan).among(max(2, len({entry.other for entry, _ in seen})))
    bare = unmasked_clients(plan, seen)
    if bare:
        masked = plan.cohort - len(bare)
        if masked < 2:
            return []
        plan = plan.part(secure=True, clients=masked)
        seen = [entry for entry in seen if entry[0].other not in bare]
    view = replayed(plan, round_id, seen)
    return [] if view is None else [view]


def _hiding() -> str:
    """The schemes under which there is something to attack, as a plan has them."""
    names = [f'"{entry.name}"' for entry in schemes.SCHEMES.values() if entry.hides]
    return f"scheme = {', '.join(names[:-1])} or {names[-1]}"


def _by_round(path: Path) -> Iterator[tuple[RoundId, Entries]]:
    for round_id, seen in groupby(_read(path), key=lambda entry: _round_of(entry[1])):
        yield RoundId(round_id), list(seen)


def _round_of(message: Any) -> int:
    """Two servers open a round with a header, which has its number."""
    return int(message.header.round_id if isinstance(message, SignedHeader) else message.round_id)


def unmasked_clients(plan: Plan, seen: Entries) -> frozenset[ClientId]:
    """The clients of a round that share unmasked: in a plain scheme all, in a secure one those
    whom the plan lets choose, and who were sent rows without ever having sent a key."""
    if Shown.SUMS in shown(plan):
        return frozenset()
    bare = {ClientId(int(e.other)) for e, m in seen if isinstance(m, (*IN_THE_CLEAR, Download))}
    return frozenset(bare - {m.sender for _, m in seen if isinstance(m, Advert)})


def read_truth(path: Path, plan: Plan) -> dict[ClientId, Ids]:
    """Real rows by client, sorted; what is not a truth file is a ConfigError."""
    try:
        raw = json.loads(path.read_text())
        return {
            ClientId(int(client)): np.sort(
                np.concatenate(
                    [np.zeros(0, dtype=np.uint64)]
                    + [
                        np.array(rows, dtype=np.uint64) + np.uint64(plan.offsets[name])
                        for name, rows in tables.items()
                    ]
                )
            )
            for client, tables in raw.items()
        }
    except (ValueError, KeyError, AttributeError, OverflowError, TypeError) as error:
        raise ConfigError(
            f"{path}: not real rows by client and table: {error}",
            hint="it is written with the run, from the same plan",
        ) from error


def decoded(entries: Iterable[ViewEntry]) -> Iterator[tuple[ViewEntry, Any]]:
    """Entries with their messages; bytes that are not valid were refused by the server."""
    for entry in entries:
        try:
            yield entry, wire.decode(entry.data)
        except WireError:
            continue


def _read(path: Path) -> Iterator[tuple[ViewEntry, Any]]:
    """Of a recorded view."""
    try:
        yield from decoded(views.read(path))
    except (ValueError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not a recorded view, or cut off: {error}", hint="record the run again"
        ) from error


def replayed(plan: Plan, round_id: RoundId, seen: Entries) -> PhasesView | None:
    """The round once more, through the server's own code; None if not even a roster was sent."""
    roster = next((m for _, m in seen if isinstance(m, Roster)), None)
    if roster is None:
        return None
    revealed: dict[ClientId, RevealedSet] = {}
    downloads: dict[ClientId, Download] = {}
    setup = SecAggServerSetup(
        plan.secagg(round_id),
        _invited(plan.cohort, (m.sender for _, m in seen if isinstance(m, Advert))),
        sent=_RecordedModel(plan, revealed, downloads),
    )
    server = Server(setup, entropy=_Known(Secret(roster.graph_seed)))
    union: UnionOpened | None = None
    listening = False
    for entry, message in seen:
        if entry.direction == "received":
            listening = True
            try:
                server.receive(ClientId(int(entry.other)), entry.data)
            except PeerError:
                continue  # as it was refused then
            if isinstance(message, RevealedSet):
                revealed[message.sender] = message
            continue
        if isinstance(message, RoundOver):
            continue  # it says how the last phase ended, well or not
        if listening:  # the first message after answers: a phase was closed
            server.close_phase()
            listening = False
        if isinstance(message, UnionOpened) and union is None:
            union = message
            rows = {table: len(ids) for table, ids in message.tables.items()}
            server.begin_stage(wire.digest(message), rows)
        if isinstance(message, Download):
            downloads[ClientId(int(entry.other))] = message
    if listening and server.phase not in ("done", "between", "aborted"):
        try:
            server.close_phase()  # the last sum is opened without a message
        except RoundAborted:
            pass  # as it was aborted then
    messages = [m for _, m in seen]
    return _view(plan, round_id, roster, server, union, revealed, downloads, messages)


def _view(
    plan: Plan,
    round_id: RoundId,
    roster: Roster,
    server: Server,
    union: UnionOpened | None,
    revealed: Mapping[ClientId, RevealedSet],
    downloads: Mapping[ClientId, Download],
    messages: list[Any],
) -> PhasesView:
    ids = {} if union is None else dict(union.tables)
    roots = [table for table in plan.root_ids if table in ids]
    start = {t: np.uint64(plan.offsets[plan.tables[t].name]) for t in roots}

    def everywhere(positions: Mapping[TableId, Ids]) -> Ids:
        parts = [ids[t][positions[t]] + start[t] for t in roots if t in positions]
        return np.concatenate([np.zeros(0, dtype=np.uint64), *parts])

    sums = server.sums
    tables = sums[-1].tables if len(sums) == len(plan.stages) else {}
    clients = {c for part in tables.values() for c in part.members}
    count = [signed(tables[t].words[:, -1], plan.ring) for t in roots if t in tables]
    return PhasesView(
        plan=plan,
        round_id=round_id,
        period=plan.period(round_id),
        met=tuple(m.client for m in roster.members),
        roster=roster,
        sharers=next(
            (
                tuple(ClientId(int(c)) for c in m.sharers)
                for m in messages
                if isinstance(m, ForwardedShares)
            ),
            (),
        ),
        union=np.concatenate([np.zeros(0, dtype=np.uint64), *(ids[t] + start[t] for t in roots)]),
        revealed={
            c: everywhere({t.table: t.rows for t in message.tables})
            for c, message in revealed.items()
        },
        members={
            c: everywhere({t: tables[t].members[c] for t in roots if c in tables[t].members})
            for c in sorted(clients)
        },
        opened=everywhere({t: tables[t].rows for t in roots if t in tables}),
        counts=np.concatenate([np.zeros(0, dtype=np.int64), *count]),
        sums=sums,
        inputs=tuple(m for m in messages if isinstance(m, MaskedInput)),
        shares=tuple(m for m in messages if isinstance(m, RevealedShares)),
        downloads=downloads,
    )


def _invited(cohort: int, senders: Iterable[ClientId]) -> list[ClientId]:
    """These clients, and unused names for those that sent nothing."""
    known = list(dict.fromkeys(senders))
    spare = (ClientId(i) for i in range(2**32 - 1, 0, -1) if ClientId(i) not in known)
    return known + [next(spare) for _ in range(cohort - len(known))]


@dataclass(frozen=True, slots=True)
class _RecordedModel:
    """What the server sent of the model, as digests, from the recorded downloads."""

    plan: Plan
    revealed: Mapping[ClientId, RevealedSet]
    downloads: Mapping[ClientId, Download]

    def common(self, stage: StageId) -> bytes:
        if stage != len(self.plan.stages) - 1 or not self.downloads:
            return NOTHING
        first = next(iter(self.downloads.values()))
        return model_digest(first.dense, {} if schemes.of(self.plan).by_rows else first.tables)

    def rows(self, stage: StageId, table: TableId, positions: Ids) -> Digests:
        row_bytes = self.plan.tables[table].width * self.plan.model.precision.dtype.itemsize
        asked = [
            (part.rows, self.downloads[c].tables[table])
            for c, message in self.revealed.items()
            for part in message.tables
            if part.table == table and c in self.downloads
        ]
        known = np.concatenate([np.zeros(0, dtype=np.uint64), *(rows for rows, _ in asked)])
        distinct, first = np.unique(known, return_index=True)
        at = first[np.searchsorted(distinct, positions)]
        return row_digests(b"".join(values for _, values in asked), row_bytes, at)


@dataclass(frozen=True, slots=True)
class _Known:
    """The graph's seed is public; the server drew nothing else."""

    seed: Secret

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Secret:
        return self.seed
