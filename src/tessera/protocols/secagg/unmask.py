"""Unmasking a sum: which secrets have to be recovered, and the masks that they remove."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tessera.crypto import prg
from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, StageId, TableId
from tessera.protocols.secagg import mask_streams, transcript
from tessera.protocols.secagg.messages import Roster
from tessera.protocols.secagg.params import SecAggParams
from tessera.protocols.secagg.phases import InputSum, TableSum, Unmasking
from tessera.protocols.secagg.recovery import RecoveryTask
from tessera.protocols.secagg.session import neighbourhood
from tessera.protocols.secagg.transcript import SentDigests


def recovery_tasks(
    params: SecAggParams, phase: Unmasking
) -> tuple[list[RecoveryTask], list[RecoveryTask]]:
    """Of every survivor the self-mask seed, of everyone gone the mask key; never both of one."""
    roster, stage, alive = phase.at.listed.message, phase.at.stage, phase.survivors
    hood = neighbourhood(params, roster)
    advertised = {m.client: m.stages[stage] for m in roster.members}
    seeds: list[RecoveryTask] = []
    keys: list[RecoveryTask] = []
    for owner in sorted(phase.at.participants):
        points = {holder: i for i, holder in enumerate(hood.holders(owner), start=1)}
        given = {
            holder: kept.message.self_masks if owner in alive else kept.message.mask_keys
            for holder, kept in phase.answers.items()
        }
        shares = {
            holder: by_owner[owner] for holder, by_owner in given.items() if owner in by_owner
        }
        if owner in alive:
            check = _matches_commitment(params.context, owner, stage, advertised[owner].commitment)
            seeds.append(RecoveryTask(owner, points, shares, check))
        else:
            check = _has_public_key(advertised[owner].mask_key)
            keys.append(RecoveryTask(owner, points, shares, check))
    return seeds, keys


def _matches_commitment(
    context: bytes, owner: ClientId, stage: StageId, committed: bytes
) -> Callable[[Secret], bool]:
    return lambda seed: mask_streams.seed_commitment(seed, context, owner, stage) == committed


def _has_public_key(advertised: bytes) -> Callable[[Secret], bool]:
    return lambda secret: AgreementKey.from_secret(secret).public == advertised


class _PairSecrets:
    """The pair secrets between survivors and those who are gone, each agreed once."""

    def __init__(
        self,
        params: SecAggParams,
        roster: Roster,
        stage: StageId,
        gone: Mapping[ClientId, Secret],
        agreed: bytes,
        shared: Sequence[_SharedRows],
    ) -> None:
        self._context, self._stage = transcript.roster_context(params, roster), stage
        self._agreed, self._shared = agreed, shared
        self._public = {m.client: m.stages[stage].mask_key for m in roster.members}
        self._gone = {c: AgreementKey.from_secret(secret) for c, secret in gone.items()}
        self._known: dict[tuple[ClientId, ClientId], Secret] = {}

    def between(self, survivor: ClientId, lost: ClientId) -> Secret:
        pair = (survivor, lost)
        if pair not in self._known:
            digests = ((rows.table, rows.digest(survivor, lost)) for rows in self._shared)
            shared = [(table, digest) for table, digest in digests if digest is not None]
            self._known[pair] = mask_streams.pair_secret(
                self._gone[lost],
                self._public[survivor],
                self._context,
                pair,
                self._stage,
                transcript.pair_binding(self._agreed, shared),
            )
        return self._known[pair]


class _SharedRows:
    """The rows of a table that survivors share with those who are gone, and their digests."""

    def __init__(
        self,
        stage: StageId,
        table: TableId,
        sums: TableSum,
        gone: Iterable[ClientId],
        sent: SentDigests,
    ) -> None:
        self.table, self._sums = table, sums
        self._is_lost: dict[ClientId, npt.NDArray[np.bool_]] = {}
        some = np.zeros(len(sums.rows), dtype=np.bool_)
        for client in gone:
            if client in sums.members:  # else it dropped out before it named a row
                self._is_lost[client] = np.zeros(len(sums.rows), dtype=np.bool_)
                self._is_lost[client][sums.index(client)] = True
                some |= self._is_lost[client]
        self._place = np.cumsum(some) - 1
        self._digests = sent.rows(stage, table, sums.rows[some])
        self._at: dict[tuple[ClientId, ClientId], npt.NDArray[np.int64]] = {}
        self._whole: dict[ClientId, bytes] = {}

    def between(self, survivor: ClientId, lost: ClientId) -> npt.NDArray[np.int64]:
        """Where the rows that the two share stand in the sum."""
        if (survivor, lost) not in self._at:
            at = np.zeros(0, dtype=np.int64)
            if lost in self._is_lost and survivor in self._sums.members:
                own = self._sums.index(survivor)
                at = own[self._is_lost[lost][own]]
            self._at[survivor, lost] = at
        return self._at[survivor, lost]

    def digest(self, survivor: ClientId, lost: ClientId) -> bytes | None:
        """Of the values of these rows; None if there are none."""
        at = self.between(survivor, lost)
        if not len(at):
            return None
        # Often one has all rows of the other, and then it shares the same rows with the next one.
        for client in (lost, survivor):
            if len(at) == len(self._sums.members[client]):
                if client not in self._whole:
                    self._whole[client] = self._of(at)
                return self._whole[client]
        return self._of(at)

    def _of(self, at: npt.NDArray[np.int64]) -> bytes:
        return transcript.shared_digest(self._digests, self._place[at])


def remove_masks(
    params: SecAggParams,
    roster: Roster,
    stage: StageId,
    total: InputSum,
    seeds: Mapping[ClientId, Secret],
    keys: Mapping[ClientId, Secret],
    *,
    context: bytes,
    sent: SentDigests,
) -> None:
    """Take every survivor's self-mask out of the sum, and its masks with those who are gone.

    The latter depend on what clients were sent; if that was not the same for all, masks stay on.
    """
    spec, hood = params.stage(stage), neighbourhood(params, roster)
    agreed = transcript.agreed_digest(context, sent.common(stage)) if keys else transcript.NOTHING
    shared = {
        table: _SharedRows(stage, table, total.tables[table], keys, sent)
        for table in sorted(total.tables)
    }
    pairs = _PairSecrets(params, roster, stage, keys, agreed, list(shared.values()))
    if spec.dense:
        ties = [(s, lost) for lost in keys for s in hood.neighbours(lost) if s in seeds]
        own = [mask_streams.dense_stream(seed, Label.SELF_MASK) for seed in seeds.values()]
        tied = [mask_streams.dense_stream(pairs.between(s, d), Label.PAIR_MASK) for s, d in ties]
        signs = [-1] * len(own) + [-mask_streams.mask_sign(s, d) for s, d in ties]
        prg.accumulate(spec.group, total.dense, own + tied, signs)
    for table, sums in total.tables.items():
        _remove_row_masks(params, stage, sums, seeds, keys, pairs, shared[table])


def shrunk(sums: TableSum, alive: Collection[ClientId], quorum: int) -> int:
    """How many rows have fewer surviving members than the quorum that was met before masking."""
    return int((surviving(sums, alive) < quorum).sum())


def surviving(sums: TableSum, alive: Collection[ClientId]) -> npt.NDArray[np.int64]:
    """How many members of each row's group are still there."""
    left = np.zeros(len(sums.rows), dtype=np.int64)
    for survivor in sums.members.keys() & set(alive):
        left[sums.index(survivor)] += 1
    return left


def rows_meeting_quorum(
    sums: TableSum, client: ClientId, quorum: int, left: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Places of a client's rows whose `left` surviving members still meet that client's quorum."""
    at = sums.index(client)
    return at[left[at] >= quorum]


def release_rows(params: SecAggParams, phase: Unmasking) -> dict[TableId, TableSum]:
    """With a strict quorum: take the revealed hold-back masks out, and drop every other row.

    A row is complete when each of its surviving members has revealed its key; a member whose quorum
    is no longer met does not, and one that does not answer cannot.
    """
    stage, alive = phase.at.stage, phase.survivors
    group = params.stage(stage).group
    context = transcript.roster_context(params, phase.at.listed.message)
    released: dict[TableId, TableSum] = {}
    for table, sums in phase.total.tables.items():
        width = sums.words.shape[1]
        left = surviving(sums, alive)
        missing = left.copy()
        for client, kept in phase.answers.items():
            at = rows_meeting_quorum(sums, client, phase.total.quorums[client], left)
            keys = mask_streams.unpacked_keys(kept.message.row_keys[table], len(at))
            assert keys is not None  # checked when it came
            own = mask_streams.hold_back_tweak(context, client, stage, table)
            sums.words[at] = group.sub(
                sums.words[at], mask_streams.hold_back_masks(group, keys, own, width)
            )
            missing[at] -= 1
        complete = (left > 0) & (missing == 0)
        rows = sums.rows[complete]
        released[table] = replace(
            sums,
            rows=rows,
            words=sums.words[complete],
            members={c: r[np.isin(r, rows)] for c, r in sums.members.items()},
            lost=int((~complete).sum()),
        )
    return released


def _remove_row_masks(
    params: SecAggParams,
    stage: StageId,
    sums: TableSum,
    seeds: Mapping[ClientId, Secret],
    keys: Mapping[ClientId, Secret],
    pairs: _PairSecrets,
    shared: _SharedRows,
) -> None:
    """In a row's group everybody masked with everybody, so the graph has no say here."""
    streams, signs, index, positions = [], [], [], []
    for survivor, seed in seeds.items():
        streams.append(mask_streams.row_stream(seed, Label.SELF_MASK, shared.table))
        signs.append(-1)
        index.append(sums.index(survivor))
        positions.append(sums.members[survivor])
    for lost in keys:
        for survivor in seeds:
            at = shared.between(survivor, lost)
            if not len(at):
                continue
            pair = pairs.between(survivor, lost)
            streams.append(mask_streams.row_stream(pair, Label.PAIR_MASK, shared.table))
            signs.append(-mask_streams.mask_sign(survivor, lost))
            index.append(at)
            positions.append(sums.rows[at])
    prg.accumulate_rows(params.stage(stage).group, sums.words, streams, signs, index, positions)
