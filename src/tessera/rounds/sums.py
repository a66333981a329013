"""Sums: how the updates of a round are added up, chosen once by the plan's scheme.

By one server in the clear, by one server under masks, by two servers of which each has a share
(`rounds/two_server/shared_sum.py`), or not at all. A kind makes and wakes the roles of `protocols/`
that do it; `rounds/ideal.py` has one more, which adds up in memory behind the same interface.
`rounds/schemes.py` says which a plan has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from tessera.crypto.entropy import Entropy
from tessera.crypto.group import Words
from tessera.crypto.keys import Identity, identities
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, MisuseError
from tessera.ids import ClientId, Party, RoundId, StageId, TableId
from tessera.learning.tables.submodel import Ids
from tessera.plan import UNION, Plan, Sharing
from tessera.privacy.dp.events import THE_SUMS
from tessera.protocols.machine import Outbound, to_all
from tessera.protocols.plain import (
    Cut,
    PlainClient,
    PlainClientSetup,
    PlainServer,
    PlainServerSetup,
)
from tessera.protocols.secagg.client import Client, SecAggClientSetup
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.params import SecAggParams, StageSpec
from tessera.protocols.secagg.phases import StageSum
from tessera.protocols.secagg.server import SecAggServerSetup, Server
from tessera.protocols.secagg.transcript import NothingSent, Received, SentDigests
from tessera.rounds import delivery
from tessera.rounds.messages import Download, RowWords, union_words, whole_words
from tessera.rounds.select import Rows, Shown
from tessera.wire.stored import Kept

T = TypeVar("T")
Messages: TypeAlias = Mapping[bytes, bytes]
Split: TypeAlias = list[tuple[Plan, tuple[ClientId, ...]]]
"""The parts of a cohort that are summed apart, each with the plan among its clients."""

LEAST_TOGETHER: Final = 3
LEAST_SHARE: Final = 0.1
"""If fewer clients of a cohort would remain in the secure sum, all of them take part in it."""


class InnerRole(Protocol):
    """A role in a protocol, inside the state of a role in a round."""

    @property
    def phase(self) -> str: ...

    def receive(self, sender: Party, data: bytes) -> list[Outbound]: ...

    def resend(self) -> list[Outbound]: ...

    def snapshot(self) -> bytes: ...

    @property
    def messages(self) -> Messages: ...


class SumClient(InnerRole, Protocol):
    """A client's role in a sum; all kinds have one interface."""

    @property
    def stage(self) -> StageId: ...

    @property
    def wants(self) -> StageSpec | None:
        """The stage this client waits for its caller to contribute to, if it does."""

    @property
    def awaits_rows(self) -> bool:
        """Whether what it waits for are the rows that this client names."""

    @property
    def included_among_named(self) -> Mapping[TableId, Ids]:
        """Which of the rows it named have met the quorum, by table."""

    @property
    def knows_groups(self) -> bool:
        """Whether it knows who shares its rows, and has not submitted values yet."""

    def smallest_group(self, table: TableId) -> int:
        """Of the rows it named in a table, once it knows their groups; 0 if one was left out."""

    def knows_survivors(self, stage: StageId) -> bool:
        """Whether it has a stage's list of survivors: no sum is opened before that."""

    def submit(self, contribution: Any) -> list[Outbound]: ...


class SumServer(InnerRole, Protocol):
    """The server's role in a sum."""

    @property
    def expected(self) -> frozenset[Party]: ...

    @property
    def sums(self) -> tuple[StageSum, ...]:
        """Those that are opened, by stage."""

    @property
    def revealed(self) -> dict[ClientId, dict[TableId, Ids]]:
        """The rows that clients have named."""

    def close_phase(self) -> list[Outbound]: ...

    def begin_stage(
        self, context: bytes = ..., rows: Mapping[TableId, int] | None = None
    ) -> list[Outbound]: ...


@dataclass(frozen=True, kw_only=True)
class ClientSetup:
    """What a client's role in a sum is made of, and woken with."""

    plan: Plan
    round_id: RoundId
    party: ClientId
    identity: Identity | None = None

    @property
    def context(self) -> bytes:
        return self.plan.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    """What the server's role in a sum is made of, and woken with.

    `sent` has the digests of what clients are sent; `cut` makes of one client's words in the clear
    what an honest one may send.
    """

    plan: Plan
    round_id: RoundId
    invited: frozenset[ClientId]
    identity: Identity | None
    sent: SentDigests = field(default_factory=NothingSent, repr=False)
    cut: Cut | None = field(default=None, repr=False)


class Sum:
    """A way to add up. This one has no rounds at all: all data are in one place."""

    federated: bool = False
    """Whether there are rounds, clients and messages at all."""
    masks: bool = False
    """Whether clients mask their inputs with each other."""
    two_servers: bool = False
    helpers: tuple[Party, ...] = ()
    """Servers beside the one that clients talk to."""

    @property
    def hides(self) -> bool:
        """Whether no single server sees a client's update, by masks or by shares."""
        return self.masks or self.two_servers

    def check_clients(self) -> None:
        """Refuse what needs clients: with synthetic ones nothing is learnt in one place."""
        raise ConfigError(
            "central training needs a task: nothing can be learnt from synthetic rows",
            hint="add a [task]; `tessera init` lists what there is",
        )

    @property
    def only_simulated(self) -> str:
        """Why there are no services for it; "" if there are."""
        return "scheme 'central' has no clients to deploy"

    @property
    def servers(self) -> str:
        """Who sees its messages, as it is printed."""
        return "both servers" if self.helpers else "the server"

    def signers(
        self, plan: Plan, clients: Iterable[ClientId], entropy: Entropy
    ) -> dict[ClientId, Identity]:
        """With what each client signs its keys, for the others to check; none if nobody does."""
        return {}

    def clear_part(self, plan: Plan, clients: int) -> Plan:
        """The agreement among so many clients of a cohort that send in the clear."""
        return plan

    def masked_part(self, plan: Plan, clients: int) -> Plan:
        """Likewise among those who mask: they meet each other, and their number is agreed on."""
        return plan

    def split(self, plan: Plan, clients: tuple[ClientId, ...], bare: Collection[ClientId]) -> Split:
        """A cohort in parts that are summed apart; `bare` would send in the clear."""
        return [(plan, clients)]

    def most_dropouts(self, plan: Plan, cohort: int) -> int | None:
        """Of a cohort, so that a round is not aborted; None: any number."""
        return None

    def opened(self, plan: Plan) -> tuple[str, ...]:
        """What of many clients it opens, and of none alone."""
        return ()

    def shown(self, plan: Plan, rows: Rows, *, rated: bool) -> frozenset[Shown]:
        """What its messages show to servers; `rated`: they are gradients of ratings."""
        return frozenset()

    # --- roles ----------------------------------------------------------------------------------

    def join(
        self, setup: ClientSetup, root: Entropy, last_round: RoundId | None
    ) -> tuple[SumClient, list[Outbound]]:
        """A client's role, and what it says first."""
        raise MisuseError(f"{type(self).__name__} has no roles before one server")

    def wake_client(self, setup: ClientSetup, snapshot: bytes, messages: Messages) -> SumClient:
        raise MisuseError(f"{type(self).__name__} has no roles before one server")

    def serve(self, setup: ServerSetup, root: Entropy) -> SumServer:
        """The server's role."""
        raise MisuseError(f"{type(self).__name__} has no roles before one server")

    def wake_server(self, setup: ServerSetup, snapshot: bytes, messages: Messages) -> SumServer:
        raise MisuseError(f"{type(self).__name__} has no roles before one server")

    # --- what a client gives --------------------------------------------------------------------

    def union_input(self, plan: Plan, round_id: RoundId, ids: Ids, coins: Secret) -> Any:
        """To the union's sum."""
        return Input(dense=union_words(plan, round_id, ids, coins))

    def whole_input(
        self, plan: Plan, dense: Words, rows: Mapping[str, RowWords], received: Received
    ) -> Any:
        """To the sum of whole models that have a count for each of their rows."""
        return Input(dense=whole_words(plan, dense, rows), received=received)

    def received(
        self, plan: Plan, download: Download, included: Mapping[TableId, Ids] | None
    ) -> Received:
        """What masks are bound to: they are shared only with those who were sent the same."""
        return Received()

    def kept(self, record: T) -> Kept[T]:
        """What a client stores once, like a message."""
        return Kept.of(record)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What is the same for everybody: made for each of them, where they are apart."""
        return make()

    # --- what a server sends and opens ----------------------------------------------------------

    def post(self, clients: Iterable[ClientId], message: Any) -> list[Outbound]:
        """One message to some clients."""
        return to_all(clients, message)

    def opened_ids(self, plan: Plan, round_id: RoundId, total: SumServer) -> tuple[Ids, int]:
        """The ids in an opened union, and how many its encoding could not give back."""
        decoded = plan.union_encoding(round_id).decode(total.sums[UNION].dense)
        return decoded.ids, decoded.residual


def _those(found: Mapping[Shown, bool]) -> frozenset[Shown]:
    return frozenset(what for what, there in found.items() if there)


class FederatedSum(Sum):
    """Over rounds with clients, who send messages."""

    federated = True
    only_simulated = ""

    def check_clients(self) -> None:
        return


class PlainSum(FederatedSum):
    """By one server, in the clear."""

    def shown(self, plan: Plan, rows: Rows, *, rated: bool) -> frozenset[Shown]:
        values = {Shown.UPLOADS: rated, Shown.CLEAR_PLACES: plan.selects}
        return _those(values) or _those({Shown.CLEAR_ROWS: bool(plan.roots)})

    def join(
        self, setup: ClientSetup, root: Entropy, last_round: RoundId | None
    ) -> tuple[SumClient, list[Outbound]]:
        return PlainClient(self._client(setup)), []

    def wake_client(self, setup: ClientSetup, snapshot: bytes, messages: Messages) -> SumClient:
        return PlainClient.wake(snapshot, messages, self._client(setup))

    def serve(self, setup: ServerSetup, root: Entropy) -> SumServer:
        return PlainServer(self._server(setup))

    def wake_server(self, setup: ServerSetup, snapshot: bytes, messages: Messages) -> SumServer:
        return PlainServer.wake(snapshot, messages, self._server(setup))

    def _client(self, setup: ClientSetup) -> PlainClientSetup:
        plan = setup.plan
        return PlainClientSetup(plan.stages[0], setup.round_id, setup.party, sparse=plan.selects)

    def _server(self, setup: ServerSetup) -> PlainServerSetup:
        spec, needed = setup.plan.stages[0], setup.plan.least_survivors
        return PlainServerSetup(spec, setup.round_id, setup.invited, needed=needed, cut=setup.cut)


class MaskedSum(FederatedSum):
    """By one server, under masks that cancel in the sum."""

    masks = True

    def signers(
        self, plan: Plan, clients: Iterable[ClientId], entropy: Entropy
    ) -> dict[ClientId, Identity]:
        return identities(clients, entropy, plan.federation) if plan.security.signs else {}

    def clear_part(self, plan: Plan, clients: int) -> Plan:
        return plan.part(secure=False, clients=clients)

    def masked_part(self, plan: Plan, clients: int) -> Plan:
        return plan.part(secure=True, clients=clients)

    def split(self, plan: Plan, clients: tuple[ClientId, ...], bare: Collection[ClientId]) -> Split:
        masked, plain = (
            tuple(client for client in clients if (client in bare) is clear)
            for clear in (False, True)
        )
        if not plain or 0 < len(masked) < max(LEAST_TOGETHER, LEAST_SHARE * len(clients)):
            return [(plan, clients)]
        split = [(self.clear_part(plan, len(plain)), plain)]
        if masked:
            split.insert(0, (self.masked_part(plan, len(masked)), masked))
        return split

    def most_dropouts(self, plan: Plan, cohort: int) -> int | None:
        return cohort - plan.least_survivors

    def opened(self, plan: Plan) -> tuple[str, ...]:
        return (THE_SUMS,) if plan.tables else ()

    def shown(self, plan: Plan, rows: Rows, *, rated: bool) -> frozenset[Shown]:
        """Where some clients send in the clear, nothing is claimed of the others."""
        ratings = {
            Sharing.SECURE: {Shown.RATING_SUMS: rated},
            Sharing.AUTO: {Shown.RATING_SUMS: rated, Shown.UPLOADS: rated},
            Sharing.PLAIN: {Shown.UPLOADS: rated},
        }
        sharing = plan.security.sharing
        masked = {Sharing.SECURE: rows.shown | {Shown.SUMS}}
        return _those(ratings[sharing]) | masked.get(sharing, frozenset())

    def join(
        self, setup: ClientSetup, root: Entropy, last_round: RoundId | None
    ) -> tuple[SumClient, list[Outbound]]:
        return Client.join(self._client(setup), entropy=root, last_round=last_round)

    def wake_client(self, setup: ClientSetup, snapshot: bytes, messages: Messages) -> SumClient:
        return Client.wake(snapshot, messages, self._client(setup))

    def serve(self, setup: ServerSetup, root: Entropy) -> SumServer:
        return Server(self._server(setup), entropy=root)

    def wake_server(self, setup: ServerSetup, snapshot: bytes, messages: Messages) -> SumServer:
        return Server.wake(snapshot, messages, self._server(setup))

    def _params(self, plan: Plan, round_id: RoundId) -> SecAggParams:
        return plan.secagg(round_id)

    def _client(self, setup: ClientSetup) -> SecAggClientSetup:
        params = self._params(setup.plan, setup.round_id)
        return SecAggClientSetup(params, setup.party, identity=setup.identity)

    def _server(self, setup: ServerSetup) -> SecAggServerSetup:
        params, identity = self._params(setup.plan, setup.round_id), setup.identity
        return SecAggServerSetup(params, setup.invited, identity=identity, sent=setup.sent)

    def received(
        self, plan: Plan, download: Download, included: Mapping[TableId, Ids] | None
    ) -> Received:
        return delivery.received(plan, download, included)


class GroupSum(MaskedSum):
    """Likewise over a fixed group: it waits for all members (`rounds/epochs/`)."""


class UnionSum(MaskedSum):
    """A union's that stands by itself, before a round between two servers: in the active setting,
    always."""

    def _params(self, plan: Plan, round_id: RoundId) -> SecAggParams:
        return plan.union_sum(round_id)
