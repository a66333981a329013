"""SharedSum: by two servers, a share at each. It makes the roles of a round between them.

`rounds/two_server/ideal.py` has one more, which makes roles that read and write in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tessera.crypto.entropy import Entropy
from tessera.errors import MisuseError
from tessera.ids import HELPER, ClientId, Party, RoundId, TableId
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.protocols.machine import Outbound
from tessera.protocols.two_server.handshake import (
    HelperHandshake,
    HelperHandshakeSetup,
    LeaderHandshake,
    LeaderHandshakeSetup,
    ServedModel,
    TwoServerClientSetup,
)
from tessera.protocols.two_server.messages import Header, SignedHeader
from tessera.protocols.two_server.read.client import Fetched, RetrievalClient
from tessera.protocols.two_server.read.server import (
    RetrievalHelper,
    RetrievalHelperSetup,
    RetrievalLeader,
    RetrievalLeaderSetup,
)
from tessera.protocols.two_server.write.client import Update, WriteClient
from tessera.protocols.two_server.write.helper import WriteHelper, WriteHelperSetup
from tessera.protocols.two_server.write.leader import WriteLeader, WriteLeaderSetup
from tessera.protocols.two_server.write.sums import NoiseSecrets, TwoServerSum
from tessera.rounds.select import Rows, Shown
from tessera.rounds.sums import FederatedSum, InnerRole, Sum, UnionSum
from tessera.wire.stored import Kept


class RowReader(InnerRole, Protocol):
    """A client that fetches rows."""

    @property
    def fetched(self) -> Fetched | None: ...

    def submit(self, wanted: Mapping[TableId, Ids]) -> list[Outbound]: ...


class RowWriter(InnerRole, Protocol):
    """A client that writes rows."""

    def prepare(self, signed: Kept[SignedHeader]) -> None: ...

    def submit(self, update: Update | None, rows: Mapping[TableId, Ids]) -> list[Outbound]: ...


class Leading(InnerRole, Protocol):
    """The leader in one of the protocols."""

    @property
    def expected(self) -> frozenset[Party]: ...

    def close_phase(self) -> list[Outbound]: ...


class LeaderAgreement(Leading, Protocol):
    """The leader in the handshake."""

    @property
    def signed_header(self) -> Kept[SignedHeader] | None: ...

    def begin(self) -> list[Outbound]: ...


class LeaderRetrieval(Leading, Protocol):
    """The leader that answers queries."""

    @property
    def header(self) -> Header: ...

    @property
    def refused(self) -> frozenset[ClientId]: ...


class Adding(InnerRole, Protocol):
    """A server that adds up reports."""

    @property
    def total(self) -> TwoServerSum | None: ...

    @property
    def excluded(self) -> Mapping[ClientId, str]: ...


class LeaderWrite(Adding, Leading, Protocol):
    """The leader that adds up reports."""


class HelperAgreement(InnerRole, Protocol):
    """The helper in the handshake."""

    @property
    def header(self) -> Header | None: ...


class SharedSum(FederatedSum):
    """By two servers, a share at each."""

    two_servers = True
    helpers = (HELPER,)
    in_memory: bool = False
    """Whether it is ideal: keys that last are noted, and none is made."""

    def shown(self, plan: Plan, rows: Rows, *, rated: bool) -> frozenset[Shown]:
        found = {
            Shown.SHARES: True,
            Shown.SHARED_ROWS: bool(plan.tables),
            Shown.KEY_PERIODS: plan.key_rounds > 1,
        }
        return frozenset(what for what, there in found.items() if there)

    def most_dropouts(self, plan: Plan, cohort: int) -> int | None:
        return cohort - plan.least_survivors

    @property
    def union(self) -> Sum:
        """How the union is summed, where tables are narrowed to one."""
        return UnionSum()

    def served(self, make: Callable[[], ServedModel]) -> ServedModel:
        """The model in the bytes that are read."""
        return make()

    # --- a client's roles -----------------------------------------------------------------------

    def reader(self, setup: TwoServerClientSetup, last_round: RoundId | None) -> RowReader:
        return RetrievalClient(setup, last_round=last_round)

    def writer(self, setup: TwoServerClientSetup) -> RowWriter:
        return WriteClient(setup)

    # --- the leader's ---------------------------------------------------------------------------

    def handshake(
        self, setup: LeaderHandshakeSetup, model: ServedModel, root: Entropy
    ) -> LeaderAgreement:
        return LeaderHandshake(setup, model, entropy=root)

    def retrieve(self, setup: RetrievalLeaderSetup) -> LeaderRetrieval:
        return RetrievalLeader(setup)

    def add_up(self, setup: WriteLeaderSetup, noise: NoiseSecrets) -> LeaderWrite:
        return WriteLeader(setup, noise=noise)

    # --- the helper's ---------------------------------------------------------------------------

    def consent(self, setup: HelperHandshakeSetup, root: Entropy) -> HelperAgreement:
        return HelperHandshake(setup, entropy=root)

    def help_retrieve(self, setup: RetrievalHelperSetup) -> InnerRole:
        return RetrievalHelper(setup)

    def help_add_up(self, setup: WriteHelperSetup, root: Entropy, noise: NoiseSecrets) -> Adding:
        return WriteHelper(setup, entropy=root, noise=noise)


class NarrowedSum(SharedSum):
    """Likewise, over the rows of a union that opens first."""


def shared(total: Sum) -> SharedSum:
    """This sum, which is one between two servers."""
    if not isinstance(total, SharedSum):
        raise MisuseError(f"{type(total).__name__} has no roles between two servers")
    return total
