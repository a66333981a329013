"""A client in a round of secure sums: the transition table, and the role that walks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import Identity
from tessera.crypto.prg import Label
from tessera.errors import MisuseError, ServerFault
from tessera.ids import SERVER, ClientId, RoundId, StageId, TableId
from tessera.protocols.machine import (
    Follower,
    Left,
    Moved,
    Outbound,
    Over,
    Step,
    Steps,
    UnderParams,
)
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
from tessera.protocols.secagg.params import SecAggParams, StageSpec, Threat
from tessera.protocols.secagg.session import Session, advert_of, identity_of
from tessera.protocols.secagg.states import (
    Advertised,
    AwaitingGroups,
    AwaitingProof,
    AwaitingShares,
    AwaitingSurvivors,
    Finished,
    Grouped,
    Ready,
    Resting,
    Reveal,
)
from tessera.wire.stored import Kept

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

OUTSIDE: Final = (Advertised, AwaitingShares, Finished, Left, Over)
"""The states before the first stage and after the last."""


@dataclass(frozen=True)
class SecAggClientSetup(UnderParams):
    """A client of secure sums; the active setting needs its identity."""

    params: SecAggParams
    party: ClientId
    _: KW_ONLY
    identity: Identity | None = None

    def __post_init__(self) -> None:
        if self.params.threat is Threat.ACTIVE:
            identity_of(self.identity)


class Client(Follower[SecAggClientSetup]):
    """One client in one round: bytes in, bytes out, and a state that can be stored."""

    ROLE = "client of secure sums"
    STATES = STATES
    STEPS = STEPS
    FROM_SERVER = FROM_SERVER

    @classmethod
    def join(
        cls, setup: SecAggClientSetup, *, entropy: Entropy, last_round: RoundId | None = None
    ) -> tuple[Self, list[Outbound]]:
        """Enter a round: draw its root, derive the keys, advertise them.

        `last_round` is the highest round this client has ever joined; round numbers only increase.
        """
        params, me = setup.params, setup.party
        if last_round is not None and params.round_id <= last_round:
            raise ServerFault(
                f"started round {params.round_id} after round {last_round}",
                round_id=params.round_id,
                phase="advertise",
            )
        root = entropy.secret(Label.ROUND_ROOT, params.federation, params.round_id, me)
        session = Session(params=params, me=me, root=root)
        advert = advert_of(session, setup.identity)
        return cls(setup, Advertised(session=session)), [Outbound.of(SERVER, advert)]

    def _supplied(self) -> Mapping[str, Any]:
        return {"params": self.setup.params}

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
    def included_among_named(self) -> Mapping[TableId, npt.NDArray[np.uint64]]:
        """Which of the rows it named these are, by table."""
        if not isinstance(self.state, Grouped):
            return {}
        return {t.table: t.included for t in self.state.grouping.groups.message.tables}

    @property
    def knows_groups(self) -> bool:
        """Whether it has been sent the groups of its rows, and has not submitted values yet."""
        return isinstance(self.state, Grouped)

    def smallest_group(self, table: TableId) -> int:
        """Of the rows it named in a table, once it knows their groups; 0 if one was left out."""
        if not isinstance(self.state, Grouped):
            raise MisuseError(f"no groups in state {self.phase}")
        return self.state.grouping.smallest(table)

    @property
    def stage(self) -> StageId:
        """The stage this client is in; before the first and after the last it has none."""
        if isinstance(self.state, OUTSIDE):
            raise MisuseError(f"no stage in state {self.phase}")
        stage: StageId = self.state.at.stage
        return stage

    def knows_survivors(self, stage: StageId) -> bool:
        """Whether it has a stage's list of survivors: no sum is opened before that."""
        state = self.state
        if isinstance(state, OUTSIDE):
            return isinstance(state, Finished)
        here = state.at.stage
        return bool(here > stage or (here == stage and isinstance(state, AwaitingProof)))

    def submit(self, contribution: Reveal | Input) -> list[Outbound]:
        """Take the caller's part of the current stage; `MisuseError` if it does not fit."""
        step = STEPS.get((type(self.state), type(contribution)))
        if step is None:
            raise MisuseError(f"{type(contribution).__name__} is not due in state {self.phase}")
        following, out = self._apply(step, contribution)
        self._move(following, b"")
        return out

    def _apply(self, step: Step, message: Any) -> Moved:
        following, out = step(self.state, message, self.setup.identity)
        # Encoded first: what cannot be sent is our caller's mistake and leaves the state as it was.
        return following, [
            Outbound.again(SERVER, m.data) if isinstance(m, Kept) else Outbound.of(SERVER, m)
            for m in out
        ]
