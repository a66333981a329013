"""A client's session in a round: its root secret, the keys derived from it, the shares it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError, ServerFault
from tessera.ids import ClientId, StageId, TableId
from tessera.protocols import wire
from tessera.protocols.secagg import graph, mask_streams, transcript
from tessera.protocols.secagg.identity import Identity
from tessera.protocols.secagg.messages import Advert, Clients, Member, Roster, Shares, StageKeys
from tessera.protocols.secagg.params import MAX_STAGES, SecAggParams, StageSpec, Threat


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Who this client is in which round, and the root all its secrets of the round come from."""

    params: SecAggParams
    me: Annotated[ClientId, wire.U32]
    root: Annotated[Secret, wire.SECRET]

    def channel(self) -> AgreementKey:
        return AgreementKey.from_secret(self.root.derive(Label.CHANNEL_KEY, self.params.context))

    def mask_key(self, stage: StageId) -> Secret:
        return self.root.derive(Label.MASK_KEY, self.params.context, stage)

    def self_seed(self, stage: StageId) -> Secret:
        return self.root.derive(Label.SELF_SEED, self.params.context, stage)

    def hold_back(self, stage: StageId, table: TableId) -> Secret:
        return self.root.derive(Label.HOLD_BACK, self.params.context, stage, table, size=16)

    def stages(self) -> list[StageId]:
        return [StageId(i) for i in range(len(self.params.stages))]

    def fault(self, phase: str, reason: str) -> ServerFault:
        return ServerFault(reason, round_id=self.params.round_id, phase=phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShares:
    """The shares this client holds in one stage, by owner."""

    mask_keys: Shares = field(repr=False)
    self_masks: Shares = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a client carries from stage to stage once shares are exchanged."""

    session: Session
    roster: Roster
    stage: Annotated[StageId, wire.U8]
    participants: Clients
    held: Annotated[tuple[HeldShares, ...], wire.Sequence(wire.Nested(HeldShares), MAX_STAGES)]

    @property
    def spec(self) -> StageSpec:
        return self.session.params.stage(self.stage)

    def fault(self, phase: str, reason: str) -> ServerFault:
        return self.session.fault(f"{phase} ({self.spec.name})", reason)


def advert_of(session: Session, identity: Identity | None) -> Advert:
    """A client's public keys for the round; signed in the active setting."""
    params, me = session.params, session.me
    channel = session.channel().public
    nonce = session.root.derive(Label.NONCE, params.context).reveal()
    stages = tuple(
        StageKeys(
            mask_key=AgreementKey.from_secret(session.mask_key(stage)).public,
            commitment=mask_streams.seed_commitment(
                session.self_seed(stage), params.context, me, stage
            ),
        )
        for stage in session.stages()
    )
    signature = b""
    if params.threat is Threat.ACTIVE:
        statement = transcript.advert_statement(params.context, me, channel, nonce, stages)
        signature = identity_of(identity).key.sign(statement)
    return Advert(
        round_id=params.round_id,
        sender=me,
        context=params.context,
        channel_key=channel,
        nonce=nonce,
        stages=stages,
        signature=signature,
    )


def member_of(advert: Advert) -> Member:
    return Member(
        client=advert.sender,
        channel_key=advert.channel_key,
        nonce=advert.nonce,
        stages=advert.stages,
        signature=advert.signature,
    )


def neighbourhood(params: SecAggParams, roster: Roster) -> graph.Neighbourhood:
    """The graph over a roster, the same for everybody who holds it."""
    members = tuple(m.client for m in roster.members)
    return graph.arrange(members, params.topology, roster.graph_seed)


def identity_of(identity: Identity | None) -> Identity:
    if identity is None:
        raise MisuseError("the active setting needs an identity and the directory")
    return identity
