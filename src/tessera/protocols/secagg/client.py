"""A client in a round of secure sums: the transition table, and the role that walks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.errors import MisuseError, ServerFault, WireError
from tessera.ids import SERVER, ClientId, RoundId, StageId, TableId
from tessera.protocols import wire
from tessera.protocols.machine import Outbound, Steps, message_digest
from tessera.protocols.secagg.identity import Identity
from tessera.protocols.secagg.masking import Input
from tessera.protocols.secagg.messages import (
    FROM_SERVER,
    ConsistencyProof,
    ForwardedShares,
    NextStage,
    Roster,
    RowGroups,
    SurvivorList,
)
from tessera.protocols.secagg.params import MAX_STAGES, SecAggParams, StageSpec, Threat
from tessera.protocols.secagg.session import Session, advert_of, identity_of
from tessera.protocols.secagg.states import (
    Advertised,
    AwaitingGroups,
    AwaitingProof,
    AwaitingShares,
    AwaitingSurvivors,
    Finished,
    Grouped,
    Left,
    Ready,
    Resting,
    Reveal,
)

State = (
    Advertised
    | AwaitingShares
    | Ready
    | AwaitingGroups
    | Grouped
    | AwaitingSurvivors
    | AwaitingProof
    | Resting
    | Finished
    | Left
)
STATES: Final = State.__args__

STEPS: Final[Steps] = {
    (Advertised, Roster): Advertised.on_roster,
    (AwaitingShares, ForwardedShares): AwaitingShares.on_shares,
    (Ready, Reveal): Ready.on_reveal,
    (Ready, Input): Ready.on_input,
    (AwaitingGroups, RowGroups): AwaitingGroups.on_groups,
    (Grouped, Input): Grouped.on_input,
    (AwaitingSurvivors, SurvivorList): AwaitingSurvivors.on_survivors,
    (AwaitingProof, ConsistencyProof): AwaitingProof.on_proof,
    (Resting, NextStage): Resting.on_next_stage,
}


@wire.record(tag=0x0180)
@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSnapshot:
    """A client's stored state, and the digests of the messages it has handled."""

    state: Annotated[State, wire.OneOf(*STATES)]
    handled: Annotated[tuple[bytes, ...], wire.Sequence(wire.Exactly(16), 8 + 4 * MAX_STAGES)]


class Client:
    """One client in one round: bytes in, bytes out, and a state that can be stored."""

    def __init__(
        self, state: State, *, identity: Identity | None = None, handled: tuple[bytes, ...] = ()
    ) -> None:
        self.state = state
        self._identity = identity
        self._handled = handled

    @classmethod
    def join(
        cls,
        params: SecAggParams,
        me: ClientId,
        *,
        entropy: Entropy,
        identity: Identity | None = None,
        last_round: RoundId | None = None,
    ) -> tuple[Client, list[Outbound]]:
        """Enter a round: draw its root, derive the keys, advertise them.

        `last_round` is the highest round this client has ever joined; round numbers only increase.
        """
        if last_round is not None and params.round_id <= last_round:
            raise ServerFault(
                f"started round {params.round_id} after round {last_round}",
                round_id=params.round_id,
                phase="advertise",
            )
        if params.threat is Threat.ACTIVE:
            identity_of(identity)
        root = entropy.secret(Label.ROUND_ROOT, params.federation, params.round_id, me)
        session = Session(params=params, me=me, root=root)
        client = cls(Advertised(session=session), identity=identity)
        return client, [Outbound.of(SERVER, advert_of(session, identity))]

    @classmethod
    def restore(cls, snapshot: bytes, *, identity: Identity | None = None) -> Client:
        stored = wire.decode(snapshot, expect=[ClientSnapshot])
        return cls(stored.state, identity=identity, handled=stored.handled)

    def snapshot(self) -> bytes:
        return wire.encode(ClientSnapshot(state=self.state, handled=self._handled))

    @property
    def phase(self) -> str:
        return type(self.state).__name__

    @property
    def wants(self) -> StageSpec | None:
        """The stage this client waits for its caller to contribute to, if it does."""
        if isinstance(self.state, Ready | Grouped):
            return self.state.at.spec
        return None

    @property
    def awaits_rows(self) -> bool:
        """Whether it needs the rows first (`Reveal`) and the values later (`Input`)."""
        return isinstance(self.state, Ready) and bool(self.state.at.spec.tables)

    @property
    def included(self) -> Mapping[TableId, npt.NDArray[np.uint64]]:
        """The positions whose values are due now, by table: those that met the quorum."""
        return self.state.included if isinstance(self.state, Grouped) else {}

    @property
    def stage(self) -> StageId:
        """The stage this client is in; before the first and after the last it has none."""
        if isinstance(self.state, Advertised | AwaitingShares | Finished | Left):
            raise MisuseError(f"no stage in state {self.phase}")
        return self.state.at.stage

    def knows_survivors(self, stage: StageId) -> bool:
        """Whether it has a stage's list of survivors: no sum is opened before that."""
        state = self.state
        if isinstance(state, Advertised | AwaitingShares | Finished | Left):
            return isinstance(state, Finished)
        here = state.at.stage
        return here > stage or (here == stage and isinstance(state, AwaitingProof))

    def receive(self, data: bytes) -> list[Outbound]:
        mark = message_digest(data)
        if mark in self._handled and not isinstance(self.state, Left):
            return []
        try:
            try:
                message = wire.decode(data, expect=FROM_SERVER)
            except WireError as error:
                raise self._fault(f"sent an invalid message: {error}") from error
            out = self._step(message)
        except ServerFault as fault:
            self.state = Left(round_id=fault.round_id, me=self._me, reason=fault.reason)
            raise
        self._handled += (mark,)
        return out

    def submit(self, contribution: Reveal | Input) -> list[Outbound]:
        """Take the caller's part of the current stage; `MisuseError` if it does not fit."""
        if (type(self.state), type(contribution)) not in STEPS:
            raise MisuseError(f"{type(contribution).__name__} is not due in state {self.phase}")
        return self._step(contribution)

    def _step(self, message: Any) -> list[Outbound]:
        step = STEPS.get((type(self.state), type(message)))
        if step is None:
            raise self._fault(f"sent {type(message).__name__}, which is not due")
        following, out = step(self.state, message, self._identity)
        # Encoded first: what cannot be sent is our caller's mistake and leaves the state as it was.
        outbound = [Outbound.of(SERVER, m) for m in out]
        self.state = following
        return outbound

    def _fault(self, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self._round_id, phase=self.phase)

    @property
    def _round_id(self) -> RoundId:
        state = self.state
        return (
            state.round_id
            if isinstance(state, Finished | Left)
            else _session(state).params.round_id
        )

    @property
    def _me(self) -> ClientId:
        state = self.state
        return state.me if isinstance(state, Finished | Left) else _session(state).me


def _session(state: Any) -> Session:
    session: Session = (
        state.session if isinstance(state, Advertised | AwaitingShares) else state.at.session
    )
    return session
