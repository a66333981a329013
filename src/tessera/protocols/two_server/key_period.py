"""Keys that last: what servers and a client keep from the first round of a key period to its last.

Cui et al. 2022, section 5: in its first round a client sends full keys, later only last corrections
(hints), which are converted under the epoch in the generator's tweak. A period is named by the
round of its keys, and a round's epoch is how many rounds it is away: numbers of rounds are used
once, so epochs only rise, and a round that is aborted has used its own.

Two hints for one epoch would show the difference of two updates. A `RisingStore` keeps one record
that only a later one replaces, on disk before `keep` returns: a client stores what it is about to
send, and after a restart sends that or nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Generic, Protocol, TypeVar

from tessera import wire
from tessera.crypto.dpf import Forest
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError, ServerFault
from tessera.ids import ClientId, RoundId, TableId
from tessera.protocols.secagg.messages import MAX_ROWS
from tessera.protocols.two_server.messages import Blobs, Digest, Header, Round, Seeds
from tessera.protocols.two_server.params import MAX_COHORT, MAX_TABLES, Absent, Ids, TwoServerParams
from tessera.wire.index_set import IndexSet

IDEAL: Final = bytes(32)
"""The report id of what an ideal round stores in place of keys: nothing can be written with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    """One client's keys at one server, as they came; later hints replace their last corrections."""

    report_id: Digest = field(repr=False)
    public: Blobs = field(repr=False)
    seeds: Seeds = field(repr=False)

    def with_hints(
        self, forests: tuple[Forest, ...], hints: tuple[bytes, ...]
    ) -> tuple[bytes, ...]:
        """The keys of an epoch."""
        return tuple(
            public[: forest.public_bytes - forest.finals_bytes] + hint
            for forest, public, hint in zip(forests, self.public, hints, strict=True)
        )


@wire.record(tag=0x0440)
@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPeriod:
    """A server's keys of one period: those of the clients on the list of its first round."""

    plan_hash: Digest = field(repr=False)
    period: Round
    seed: Digest = field(repr=False)  # of the bins
    clients: Annotated[
        dict[ClientId, ClientKeys], wire.ByKey(wire.U32, wire.Nested(ClientKeys), MAX_COHORT)
    ] = field(repr=False)

    @property
    def mark(self) -> tuple[int, int]:
        return int(self.period), 0

    @property
    def ideal(self) -> bool:
        return any(own.report_id == IDEAL for own in self.clients.values())


@wire.record(tag=0x0441)
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKeys:
    """A client's own keys of one period: what they follow from, and what it sent last.

    Rows are those it has keys for; others wait for the next period.
    """

    plan_hash: Digest = field(repr=False)
    period: Round
    seed: Digest = field(repr=False)
    root: Annotated[Secret, wire.SECRET] = field(repr=False)
    report_id: Digest = field(repr=False)
    rows: Annotated[dict[TableId, Ids], wire.ByKey(wire.U16, IndexSet(MAX_ROWS), MAX_TABLES)] = (
        field(repr=False)
    )
    epoch: Annotated[int, wire.U32]
    sent: Annotated[bytes, wire.UpTo(wire.DEFAULT_CAP)] = field(repr=False)

    @classmethod
    def begun(
        cls,
        params: TwoServerParams,
        header: Header,
        rows: Mapping[TableId, Ids],
        *,
        root: Secret,
        report_id: bytes,
    ) -> OwnKeys:
        """New ones in the first round of a period, for these rows of tables written by keys."""
        return cls(
            plan_hash=params.plan_hash,
            period=header.period,
            seed=header.write_seed,
            root=root,
            report_id=report_id,
            rows={t.table: rows[t.table] for t in params.written if t.writes_points},
            epoch=0,
            sent=b"",
        )

    @property
    def mark(self) -> tuple[int, int]:
        return int(self.period), self.epoch

    @property
    def ideal(self) -> bool:
        return self.report_id == IDEAL


class Marked(Protocol):
    """A record with its place in the order in which records may replace each other."""

    @property
    def mark(self) -> tuple[int, int]: ...

    @property
    def ideal(self) -> bool: ...


R = TypeVar("R", bound=Marked)


class RisingStore(Protocol[R]):
    """One record of a kind; `keep` returns once it is durable."""

    def latest(self) -> R | None:
        """What is stored."""

    def keep(self, record: R) -> None:
        """Store a later record; MisuseError for an earlier one, or for another in the same place.

        The very record that is stored may be kept again.
        """


class MemoryStore(Generic[R]):
    """For simulations and tests: as durable as the object."""

    def __init__(self) -> None:
        self._latest: R | None = None

    def latest(self) -> R | None:
        return self._latest

    def keep(self, record: R) -> None:
        check_rising(self._latest, record)
        self._latest = record


def check_rising(stored: Any, record: Any) -> None:
    """MisuseError unless the record may take the place of the one that is stored."""
    if stored is None or record.mark > stored.mark:
        return
    if record.mark != stored.mark or wire.encode(record) != wire.encode(stored):
        raise MisuseError(
            f"keys of round {record.mark[0]}, epoch {record.mark[1]} after those of round "
            f"{stored.mark[0]}, epoch {stored.mark[1]}: one hint for each epoch, and epochs rise"
        )


KeyStore = RisingStore[KeyPeriod]
OwnKeyStore = RisingStore[OwnKeys]


def living(
    params: TwoServerParams,
    store: RisingStore[R] | None,
    round_id: RoundId,
    *,
    ideal: bool = False,
) -> R | None:
    """The stored keys, if this round may still be written with them.

    MisuseError in a real round if an ideal one has begun the period: it has stored whose keys last,
    and no keys. An `ideal` round may follow either.
    """
    found: Any = None if store is None else store.latest()
    if found is None or found.plan_hash != params.plan_hash or found.period >= round_id:
        return None
    if not params.same_key_period(found.period, round_id):
        return None
    if found.ideal and not ideal:
        raise MisuseError(
            f"two servers: round {round_id} cannot be written with the keys of round "
            f"{found.period}: that round was ideal, and made none"
        )
    kept: R = found
    return kept


def keys_of(
    params: TwoServerParams, header: Header, store: KeyStore | None, *, ideal: bool = False
) -> KeyPeriod | None:
    """A server's keys for a round with hints; None in a round with full keys."""
    if not header.epoch:
        return None
    found = living(params, store, header.round_id, ideal=ideal)
    if found is None or (found.period, found.seed) != (header.period, header.write_seed):
        raise MisuseError("two servers: a round with hints, and its keys are not in the store")
    return found


def with_keys(
    params: TwoServerParams,
    header: Header,
    store: KeyStore | None,
    clients: frozenset[ClientId],
    *,
    ideal: bool = False,
) -> frozenset[ClientId]:
    """Those of them who take part: who have keys, where the round is written with earlier ones."""
    keys = keys_of(params, header, store, ideal=ideal)
    return clients if keys is None else clients & keys.clients.keys()


def own_keys_of(
    params: TwoServerParams, header: Header, store: OwnKeyStore | None, *, ideal: bool = False
) -> OwnKeys | None:
    """A client's own keys for a round with hints; None in a round with full keys.

    `ServerFault`: it has none of that period, or the epoch is not ahead.
    """
    latest = None if store is None else store.latest()
    if not header.epoch:
        if latest is not None and latest.mark > (int(header.period), 0):
            raise _fault(header, "asked for new keys in a round that is past")
        return None
    found = living(params, store, header.round_id, ideal=ideal)
    if found is None or (found.period, found.seed) != (header.period, header.write_seed):
        raise _fault(header, "asked for a hint to keys that this client has not made")
    if found.epoch > header.epoch:
        raise _fault(header, "asked for a hint for an epoch that is past")
    return found


def _fault(header: Header, reason: str) -> ServerFault:
    return ServerFault(reason, round_id=header.round_id, phase="write")


# --- lists of a period ----------------------------------------------------------------------------
#
# Which lists may be added up, by the same rules at both servers; and the lists of a key period.
#
# Each server alone can have clients excluded after the list is closed: the leader by sums of tags
# that are wrong, the helper by its word. So both count them against the plan's bound.
#
# The first round of a key period decides who is on its lists, and both servers store the keys. A
# client's rows are the same all period, so whoever is missing once shows its rows in the
# difference of two exact sums. Rounds of a period open over the list of the first or not at all,
# unless the plan allows it.


def missing_members(
    params: TwoServerParams, keys: KeyPeriod | None, here: Iterable[ClientId]
) -> frozenset[ClientId]:
    """Those of the first list who are missing, where that forbids a sum."""
    if keys is None or params.absent is Absent.ALLOW:
        return frozenset()
    return frozenset(keys.clients.keys() - set(here))


def too_many_excluded(params: TwoServerParams, excluded: int, listed: int) -> str:
    """Why a list that has lost so many of its reports is not added up; "" if it is."""
    if excluded <= params.most_excluded:
        return ""
    return (
        f"{excluded} of {listed} reports were excluded after their list was closed; "
        f"the plan allows {params.most_excluded}"
    )


def shortage(
    params: TwoServerParams, keys: KeyPeriod | None, here: Collection[ClientId], excluded: int = 0
) -> tuple[int, int, str] | None:
    """(How many reports are here, how many are needed, why) if these may not be added up."""
    listed = len(here) + excluded
    if reason := too_many_excluded(params, excluded, listed):
        return len(here), max(params.min_cohort, listed - params.most_excluded), reason
    if len(here) < params.min_cohort:
        return len(here), params.min_cohort, ""
    if keys is not None and (missing := missing_members(params, keys, here)):
        return len(here), len(keys.clients), f"{len(missing)} clients whose keys last are missing"
    return None


def keep_keys(
    params: TwoServerParams,
    header: Header,
    store: KeyStore | None,
    reports: Mapping[ClientId, tuple[bytes, tuple[bytes, ...], tuple[bytes, ...]]],
) -> None:
    """Store (id, public part, seeds) of every report on the first list of a period."""
    if store is None:
        raise MisuseError("two servers: keys that last longer than a round need a store")
    store.keep(
        KeyPeriod(
            plan_hash=params.plan_hash,
            period=header.period,
            seed=header.write_seed,
            clients={
                c: ClientKeys(report_id=report_id, public=tuple(map(bytes, public)), seeds=seeds)
                for c, (report_id, public, seeds) in sorted(reports.items())
            },
        )
    )
