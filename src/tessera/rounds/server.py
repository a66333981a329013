"""ServerRound: the same phases from the other side, and the means that come out of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.entropy import RootedEntropy
from tessera.errors import MisuseError, RoundAborted
from tessera.ids import SERVER, ClientId, Party, TableId, clients_in
from tessera.learning.tables.submodel import Ids
from tessera.plan import UNION
from tessera.protocols import plain
from tessera.protocols.machine import (
    REASON,
    Closes,
    Coordinator,
    Moved,
    Outbound,
    RoundOutcome,
    RoundOver,
    Steps,
    shortened,
    to_all,
)
from tessera.protocols.secagg import messages as secagg
from tessera.protocols.secagg.groups import distinct, places_in
from tessera.protocols.secagg.phases import StageSum, StageSums
from tessera.protocols.two_server.write.sums import NoiseSecrets
from tessera.rounds import encode, schemes, select
from tessera.rounds.delivery import SentModel
from tessera.rounds.messages import Download, RoundResult, UnionOpened, farewells
from tessera.rounds.party import ServerRoundSetup
from tessera.rounds.resolve import resolve
from tessera.rounds.root import StoredRoot, draw_root
from tessera.rounds.sums import ServerSetup, SumServer
from tessera.wire.stored import ByDigest, Inner, Kept

SumRole = Annotated[SumServer, Inner("sum")]
MaybeUnion = Annotated[Kept[UnionOpened] | None, wire.Maybe(ByDigest(UnionOpened))]


@wire.record(tag=0x02A0)
@dataclass(frozen=True, slots=True, kw_only=True)
class SummingUnion:
    """Carries the union's sum."""

    root: StoredRoot = field(repr=False)
    noise: NoiseSecrets = field(repr=False)
    sum: SumRole


@wire.record(tag=0x02A1)
@dataclass(frozen=True, slots=True, kw_only=True)
class SummingUpdate:
    """Carries the update's sum, over the union where there is one.

    `residual` counts the ids that the union's encoding could not give back.
    """

    root: StoredRoot = field(repr=False)
    noise: NoiseSecrets = field(repr=False)
    sum: SumRole
    union: MaybeUnion
    residual: Annotated[int, wire.VARINT]


@wire.record(tag=0x02A2)
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSummed:
    """The sums are opened; their means are `result`. The noise of a server is in the last."""

    sums: StageSums = field(repr=False)
    union: MaybeUnion
    residual: Annotated[int, wire.VARINT]


@wire.record(tag=0x02A3)
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStopped:
    """Too few answered. A union that was opened before stays opened."""

    phase: Annotated[str, wire.TEXT]
    reason: Annotated[str, REASON]
    sums: StageSums = field(repr=False)
    union: MaybeUnion


AT_WORK: Final = (SummingUnion, SummingUpdate)


class ServerRound(Coordinator[ServerRoundSetup]):
    """The server in one round of training; `result` is for the caller to merge."""

    ROLE = "server of a round"
    STATES = (*AT_WORK, RoundSummed, RoundStopped)
    PHASES: ClassVar = {RoundSummed: "done", RoundStopped: "aborted"}
    FROM_CLIENT = (*secagg.FROM_CLIENT, *plain.FROM_CLIENT)

    def __init__(self, setup: ServerRoundSetup) -> None:
        self._set_up(setup)
        self._begin(self._first(draw_root(setup.own.entropy, self.plan, self.round_id, SERVER)))

    def _set_up(self, setup: ServerRoundSetup) -> None:
        super()._set_up(setup)
        plan = self.plan = setup.plan
        schemes.check(type(self).__name__, plan, two_servers=False)
        self.invited = frozenset(setup.invited)
        agreed = resolve(plan)
        self._rows, self._sum, self._noise = agreed.rows, setup.sum, agreed.noise
        self._sent = SentModel(plan, setup.dense, setup.tables, lambda: self.union)
        self._setup = ServerSetup(
            plan=plan,
            round_id=setup.round_id,
            invited=self.invited,
            identity=setup.identity,
            sent=self._sent,
            cut=self._noise.cut(),
        )
        # What follows from the state, worked out once: a carrier asks whenever somebody wants to
        # know how the round stands.
        self._united: tuple[Kept[UnionOpened], dict[str, Ids]] | None = None
        self._result: tuple[RoundSummed, RoundResult] | None = None

    def _supplied(self) -> Mapping[str, Any]:
        return {"sum": partial(self._sum.wake_server, self._setup)}

    def _first(self, root: RootedEntropy) -> SummingUnion | SummingUpdate:
        total, noise = self._sum.serve(self._setup, root), self.setup.noise_secrets(root)
        if self._rows.randomised:
            return SummingUnion(root=root, noise=noise, sum=total)
        return SummingUpdate(root=root, noise=noise, sum=total, union=None, residual=0)

    # --- where the round stands -----------------------------------------------------------------

    @property
    def phase(self) -> str:
        return self.state.sum.phase if isinstance(self.state, AT_WORK) else super().phase

    @property
    def expected(self) -> frozenset[Party]:
        return self.state.sum.expected if isinstance(self.state, AT_WORK) else frozenset()

    @property
    def sums(self) -> tuple[StageSum, ...]:
        """The sums that are opened so far; nothing once the round is over."""
        if isinstance(self.state, RoundSummed | RoundStopped):
            return self.state.sums
        return self.state.sum.sums if isinstance(self.state, AT_WORK) else ()

    @property
    def union(self) -> Mapping[str, Ids]:
        """The opened union by table, derived tables included; empty before, and without one."""
        kept = getattr(self.state, "union", None)
        if kept is None:
            return {}
        if self._united is None or self._united[0] is not kept:
            self._united = (kept, select.union_rows(self.plan, kept.message, self.setup.derived))
        return self._united[1]

    @property
    def result(self) -> RoundResult:
        """Per-row averages by counts (FedSubAvg), or the whole model's by training-set size."""
        state = self.state
        if not isinstance(state, RoundSummed):
            raise MisuseError(f"a round in phase {self.phase} has no result")
        if self._result is None or self._result[0] is not state:
            total = state.sums[-1]
            means = encode.means(self.plan, total, union=self.union, residual=state.residual)
            self._result = (state, means)
        return self._result[1]

    # --- messages and the clock -----------------------------------------------------------------

    def start(self) -> list[Outbound]:
        """Messages before any client has sent one: the model, if clients need all of it."""
        return [] if self._sum.masks or self._rows.chosen else self._whole_model()

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        if isinstance(self.state, AT_WORK):
            return self._take(self.state, sender, data)
        return super().receive(sender, data)

    def _take(
        self, state: SummingUnion | SummingUpdate, sender: Party, data: bytes
    ) -> list[Outbound]:
        """A client's message is the sum's, which judges whether it is due."""
        out: list[Outbound] = state.sum.receive(sender, data)
        return out

    def _close_union(self, state: SummingUnion) -> Moved:
        total, plan = state.sum, self.plan
        out = total.close_phase()
        if total.phase != "between":
            return state, out
        opened = total.sums[UNION]
        ids, residual = self._sum.opened_ids(plan, self.round_id, total)
        union = Kept.of(select.opened_union(plan, self.round_id, ids))
        following = SummingUpdate(
            root=state.root, noise=state.noise, sum=total, union=union, residual=residual
        )
        found = select.union_rows(plan, union.message, self.setup.derived)
        rows = {plan.table_id(name): len(ids) for name, ids in found.items()}
        self._united = (union, found)
        survivors = [ClientId(int(c)) for c in opened.survivors]
        to_survivors = self._sum.post(survivors, union)
        return following, [*out, *to_survivors, *total.begin_stage(union.digest, rows)]

    def _close_update(self, state: SummingUpdate) -> Moved:
        total = state.sum
        closing, revealed = total.phase, dict(total.revealed)
        out = total.close_phase()
        if closing == "reveal":
            # Rows before groups: a client that knows its groups can train at once.
            out = [*self._downloads(revealed), *out]
        if closing == "share" and not self._rows.chosen:
            out = [*self._whole_model(), *out]
        if total.phase != "done":
            return state, out
        # Before anybody looks at it: what follows from the sum follows from noisy words only.
        opened = self._noise.on_sum(total.sums[-1], state.noise, self.round_id)
        sums = (*total.sums[:-1], opened)
        return RoundSummed(sums=sums, union=state.union, residual=state.residual), out

    def _aborted(self, error: RoundAborted) -> RoundStopped:
        return RoundStopped(
            phase=error.phase,
            reason=shortened(error.reason),
            sums=self.sums,
            union=getattr(self.state, "union", None),
        )

    def farewell(self) -> list[Outbound]:
        """To everybody, when the round has ended and its outcome is stored: secrets may go."""
        state = self.state
        if isinstance(state, RoundSummed):
            return farewells(self.round_id, self.invited, self.result)
        if isinstance(state, RoundStopped):
            message = RoundOver.of(self.round_id, RoundOutcome.ABORTED, state.reason)
            return to_all(self.invited, message)
        raise MisuseError(f"a round in phase {self.phase} has not ended")

    # --- the rows -------------------------------------------------------------------------------

    def _downloads(self, revealed: Mapping[ClientId, Mapping[TableId, Ids]]) -> list[Outbound]:
        plan, dtype, union = self.plan, self.plan.model.precision.dtype, self.union
        dense = wire.HashedBytes(self.setup.dense.astype(dtype).tobytes())
        # Each row is read once for the whole cohort, then cut out for each client.
        read: dict[TableId, tuple[Ids, npt.NDArray[np.generic]]] = {}
        for t in plan.tables:
            table = plan.table_id(t.name)
            wanted = distinct(
                np.concatenate(
                    [np.zeros(0, dtype=np.uint64), *(r[table] for r in revealed.values())]
                )
            )
            ids = select.ids_at(union, t.name, wanted)
            read[table] = (wanted, self.setup.tables[t.name].values(ids).astype(dtype))
        out = []
        for client, by_table in revealed.items():
            tables = {
                table: read[table][1].take(places_in(read[table][0], rows), axis=0).tobytes()
                for table, rows in by_table.items()
            }
            message = Download(round_id=self.round_id, dense=dense, tables=tables)
            out += self._sum.post([client], message)
        return out

    def _whole_model(self) -> list[Outbound]:
        message = self._sent.download(self.round_id, None)
        return self._sum.post(clients_in(self.expected), message)


STEPS: Final[Steps] = {
    (state, kind): ServerRound._take for state in AT_WORK for kind in ServerRound.FROM_CLIENT
}
CLOSES: Final[Closes] = {
    SummingUnion: ServerRound._close_union,
    SummingUpdate: ServerRound._close_update,
}
ServerRound.STEPS, ServerRound.CLOSES = STEPS, CLOSES
