"""Unmasking a sum: which secrets have to be recovered, and the masks that they remove."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import prg, shamir
from tessera.crypto.field import Field
from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import CryptoError
from tessera.ids import ClientId, StageId, TableId
from tessera.protocols.secagg import mask_streams, transcript
from tessera.protocols.secagg.messages import Roster
from tessera.protocols.secagg.params import SecAggParams
from tessera.protocols.secagg.phases import InputSum, TableSum, Unmasking
from tessera.protocols.secagg.session import neighbourhood
from tessera.protocols.secagg.transcript import SentDigests

# --- recovery -------------------------------------------------------------------------------------
#
# Secrets recovered from shares and checked; the holders of wrong shares are identified.
#
# A recombined mask key must have the public key its owner advertised, a self-mask seed the
# commitment. Where they differ some share is wrong. Shares are points of a polynomial, a Reed-
# Solomon code word, so that with m of them and threshold t up to (m - t) // 2 wrong ones are found
# wherever they are (Welch and Berlekamp, US patent 4,633,470, 1986), and so are their holders; in
# most cases more are, since a share is 16 such points that are wrong together. A wrong share may
# be the fault of the holder that gave it or of the owner that sealed it. Where decoding fails the
# owner is identified.


SHARE_FIELD: Final = Field(17)
"""Where the limbs of a share are (`tessera.crypto.shamir`)."""

LIMBS: Final = shamir.SECRET_BYTES // 2
_P: Final = SHARE_FIELD.order
_Residues = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecoveryTask:
    """A client's secret to be recovered: its shares by holder, and a check of the outcome."""

    owner: ClientId
    points: Mapping[ClientId, int]
    shares: Mapping[ClientId, bytes] = field(repr=False)
    is_right: Callable[[Secret], bool] = field(repr=False)


@dataclass(slots=True)
class Recovered:
    """The secrets by owner, the holders of wrong shares, the owners whose secret was not found."""

    secrets: dict[ClientId, Secret] = field(default_factory=dict, repr=False)
    bad_holders: set[ClientId] = field(default_factory=set)
    bad_owners: set[ClientId] = field(default_factory=set)


def recover(tasks: list[RecoveryTask], *, threshold: int) -> Recovered:
    """Every secret from the first threshold of its holders, or from others where that fails."""
    found = Recovered()
    doubtful: list[RecoveryTask] = []
    together: dict[tuple[int, ...], list[tuple[RecoveryTask, list[bytes]]]] = defaultdict(list)
    for one in tasks:
        chosen = sorted(one.shares, key=one.points.__getitem__)[:threshold]
        points = tuple(one.points[c] for c in chosen)
        together[points].append((one, [one.shares[c] for c in chosen]))
    for points, batch in together.items():
        # Secrets with the same holders cost one interpolation.
        try:
            secrets = shamir.combine_many(
                points, [shares for _, shares in batch], threshold=threshold
            )
        except CryptoError:
            doubtful += [one for one, _ in batch]
            continue
        for (one, _), secret in zip(batch, secrets, strict=True):
            if one.is_right(secret):
                found.secrets[one.owner] = secret
            else:
                doubtful.append(one)
    for one in doubtful:
        _search(one, threshold, found)
    return found


def _search(one: RecoveryTask, threshold: int, found: Recovered) -> None:
    """Without the holders known to be bad; if that fails, without those a decoding points at."""
    trusted = [c for c in one.shares if c not in found.bad_holders]
    secret = _put_together(one, trusted, threshold)
    if secret is not None:
        found.secrets[one.owner] = secret
        return
    limbs = {c: limb for c, share in one.shares.items() if (limb := _limbs(share)) is not None}
    for chosen in _choices(one, limbs, threshold):
        secret = _put_together(one, chosen, threshold)
        if secret is not None:
            found.secrets[one.owner] = secret
            found.bad_holders |= _misfits(one, limbs, chosen)
            return
    found.bad_owners.add(one.owner)


def _choices(
    one: RecoveryTask, limbs: Mapping[ClientId, _Residues], threshold: int
) -> Iterator[list[ClientId]]:
    """A threshold of holders each, among which the right ones should be."""
    holders = sorted(limbs)
    spare = len(holders) - threshold
    if spare < 0:
        return
    # Half of the spare number of errors is found whatever the wrong shares are. Beyond that there
    # are equations enough up to 16 / 17 of it, unless liars agree on what to be wrong by.
    for errors in sorted({spare // 2, LIMBS * spare // (LIMBS + 1)}):
        yield _fitting(one, limbs, threshold, errors)[:threshold]
    if spare == 1:  # nothing to decode with, but a right secret is recognised
        for out in holders:
            yield [c for c in holders if c != out]


def _put_together(one: RecoveryTask, holders: list[ClientId], threshold: int) -> Secret | None:
    """The secret from these holders' shares, if it is the right one."""
    secret = _combined({one.points[c]: one.shares[c] for c in holders}, threshold)
    return secret if secret is not None and one.is_right(secret) else None


def _misfits(
    one: RecoveryTask, limbs: Mapping[ClientId, _Residues], chosen: list[ClientId]
) -> set[ClientId]:
    """The holders whose shares are not on the polynomials through those of the chosen."""
    points = np.array([one.points[c] for c in chosen], dtype=np.int64)
    values = np.stack([limbs[c] for c in chosen])
    scaled = _inverse(_products_of_differences(points))[:, None] * values % _P
    found = one.shares.keys() - limbs.keys()
    for c in limbs.keys() - set(chosen):
        # Lagrange: P(x) = product of (x - x_i) * sum of y_i / ((x - x_i) * product of (x_i - x_k))
        away = (one.points[c] - points) % _P
        due = (_inverse(away)[:, None] * scaled % _P).sum(axis=0) % _P
        for factor in away:
            due = due * factor % _P
        if (due != limbs[c]).any():
            found.add(c)
    return found


def _combined(shares: Mapping[int, bytes], threshold: int) -> Secret | None:
    try:
        return shamir.combine(shares, threshold=threshold)
    except CryptoError:
        return None


# --- decoding -------------------------------------------------------------------------------------


def _fitting(
    one: RecoveryTask, limbs: Mapping[ClientId, _Residues], threshold: int, errors: int
) -> list[ClientId]:
    """The holders whose shares lie on one polynomial, if at most `errors` do not."""
    holders = sorted(limbs)
    points = np.array([one.points[c] for c in holders], dtype=np.int64)
    values = np.stack([limbs[c] for c in holders])
    right = error_locator(points, values, threshold=threshold, errors=errors) != 0
    return [c for c, fits in zip(holders, right, strict=True) if fits]


def error_locator(
    points: _Residues, values: _Residues, *, threshold: int, errors: int
) -> _Residues:
    """A polynomial E at every point, zero where `values` (m, limbs) are off their polynomials.

    With one limb, Welch and Berlekamp look for E of degree at most e and Q of degree below t + e,
    not both zero, with Q(x_i) = y_i E(x_i) for all i. Let P be the polynomial through the right
    values, and at most e be wrong. Such E and Q exist: E zero at the wrong points, and Q = P E.
    If m - e >= t + e there are no others: Q - P E vanishes at m - e points, so everywhere, and E is
    zero wherever y_i != P(x_i).

    Q itself is not needed. Values z_i are those of some polynomial of degree below d just if
    sum_i v_i x_i^j z_i = 0 for all j < m - d, where v_i is 1 / product of (x_i - x_k) over k != i.
    That leaves equations in the e + 1 coefficients of E alone,

        sum_k E_k S_(j+k) = 0    for 0 <= j < m - t - e,    with S_k = sum_i v_i x_i^k y_i.

    The limbs have their errors in the same places, so E has to meet the equations of all of them.
    """
    m, spare = len(points), len(points) - threshold
    term = _inverse(_products_of_differences(points))[:, None] * values % _P
    sums = np.empty((spare, values.shape[1]), dtype=np.int64)
    for k in range(spare):
        sums[k] = term.sum(axis=0) % _P
        term = term * points[:, None] % _P
    window = np.add.outer(np.arange(spare - errors), np.arange(errors + 1))
    system = sums[window].transpose(2, 0, 1).reshape(-1, errors + 1)
    located = np.zeros(m, dtype=np.int64)
    for coefficient in reversed(_kernel_vector(system)):
        located = (located * points + int(coefficient)) % _P
    return located


def _kernel_vector(matrix: _Residues) -> _Residues:
    """A vector x with `matrix` x = 0 by elimination modulo p; zero only if there is no other."""
    reduced = matrix.copy()
    columns = reduced.shape[1]
    pivots: list[int] = []
    free = -1
    for column in range(columns):
        rank = len(pivots)
        below = np.flatnonzero(reduced[rank:, column])
        if not len(below):
            free = column
            break
        reduced[[rank, rank + below[0]]] = reduced[[rank + below[0], rank]]
        reduced[rank] = reduced[rank] * pow(int(reduced[rank, column]), -1, _P) % _P
        factors = reduced[:, column].copy()
        factors[rank] = 0
        reduced = (reduced - factors[:, None] * reduced[rank]) % _P
        pivots.append(column)
    vector = np.zeros(columns, dtype=np.int64)
    if free >= 0:  # the first column without a pivot follows from those before it
        vector[free] = 1
        vector[:free] = -reduced[:free, free] % _P
    return vector


def _products_of_differences(points: _Residues) -> _Residues:
    """For each point the product of its differences from all the others, modulo p."""
    products = np.ones(len(points), dtype=np.int64)
    for point in points:
        differences = (points - point) % _P
        products = products * np.where(differences == 0, 1, differences) % _P
    return products


def _inverse(values: _Residues) -> _Residues:
    return np.array([pow(int(value), -1, _P) for value in values], dtype=np.int64)


def _limbs(share: bytes) -> _Residues | None:
    """A share's values, or None if it is not a valid share."""
    try:
        return SHARE_FIELD.unpack(share, LIMBS).astype(np.int64)
    except ValueError:
        return None


# --- unmask ---------------------------------------------------------------------------------------


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
