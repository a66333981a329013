"""A client's session in a round: its root secret, the keys derived from it, the shares it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from tessera import wire
from tessera.crypto import shamir
from tessera.crypto.keys import AgreementKey, Identity, unseal
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import CryptoError, MisuseError, ServerFault
from tessera.ids import ClientId, StageId, TableId
from tessera.protocols.secagg import mask_streams, transcript
from tessera.protocols.secagg.messages import (
    Advert,
    Clients,
    ForwardedShares,
    Member,
    Roster,
    StageKeys,
    SurvivorList,
)
from tessera.protocols.secagg.params import (
    MAX_STAGES,
    Neighbourhood,
    SecAggParams,
    StageSpec,
    Threat,
    arrange,
)
from tessera.wire.stored import ByDigest, Kept, Supplied

KeptRoster = Annotated[Kept[Roster], ByDigest(Roster)]
Share = Annotated[bytes, wire.Exactly(shamir.SHARE_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Who this client is in which round, and the root all its secrets of the round come from."""

    params: Annotated[SecAggParams, Supplied("params")]
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
class OwnShares:
    """The shares of one stage's secrets that their owner holds itself, on the complete graph."""

    mask_key: Share = field(repr=False)
    self_mask: Share = field(repr=False)


OwnSharesByStage = Annotated[
    tuple[OwnShares, ...], wire.Sequence(wire.Nested(OwnShares), MAX_STAGES)
]


@dataclass(frozen=True, slots=True)
class HeldShares:
    """The shares this client holds in one stage, by owner."""

    mask_keys: dict[ClientId, bytes] = field(default_factory=dict, repr=False)
    self_masks: dict[ClientId, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The shares this client holds: its own, and those in the boxes that were forwarded to it.

    Stored as they came, sealed; unsealed when they are first needed, and then kept in memory.
    """

    session: Session
    listed: KeptRoster
    own: OwnSharesByStage = field(repr=False)
    forwarded: Annotated[Kept[ForwardedShares], ByDigest(ForwardedShares)]

    @cached_property
    def sharers(self) -> Clients:
        return self.forwarded.message.sharers

    @property
    def shares(self) -> tuple[HeldShares, ...]:
        """By stage."""
        return self._unsealed[0]

    @property
    def complaints(self) -> tuple[ClientId, ...]:
        """The peers whose boxes could not be unsealed."""
        return self._unsealed[1]

    def unseal(self) -> None:
        """Unseal now, while the message is decoded; its bytes are enough from here on."""
        assert len(self.sharers) and self.shares
        self.forwarded.forget_decoded()

    @cached_property
    def _unsealed(self) -> tuple[tuple[HeldShares, ...], tuple[ClientId, ...]]:
        session, me = self.session, self.session.me
        context = transcript.roster_context(session.params, self.listed.message)
        channel = session.channel()
        keys = {m.client: m.channel_key for m in self.listed.message.members}
        held = tuple(HeldShares() for _ in session.stages())
        for stage_held, own in zip(held, self.own, strict=bool(self.own)):
            stage_held.mask_keys[me], stage_held.self_masks[me] = own.mask_key, own.self_mask
        complaints = []
        for sender, boxes in self.forwarded.message.boxes.items():
            try:
                box_key = channel.agree(keys[sender], Label.CHANNEL, context, sender, me)
                plain = [
                    unseal(box_key, box, nonce=nonce, associated=associated)
                    for stage, box in zip(session.stages(), boxes, strict=True)
                    for nonce, associated in [
                        transcript.box_nonce_and_data(context, stage, sender, me)
                    ]
                ]
            except (CryptoError, ValueError):
                # Whoever is at fault, this client holds one share less, and others hold the rest.
                complaints.append(sender)
                continue
            for stage_held, pair in zip(held, plain, strict=True):
                stage_held.mask_keys[sender] = pair[: shamir.SHARE_BYTES]
                stage_held.self_masks[sender] = pair[shamir.SHARE_BYTES :]
        return held, tuple(complaints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a client carries from stage to stage once shares are exchanged.

    `survivors` is the list of the stage before; the first stage has the sharers instead.
    """

    holding: Holding
    stage: Annotated[StageId, wire.U8]
    survivors: Annotated[Kept[SurvivorList] | None, wire.Maybe(ByDigest(SurvivorList))] = None

    @property
    def session(self) -> Session:
        return self.holding.session

    @property
    def roster(self) -> Roster:
        return self.holding.listed.message

    @property
    def participants(self) -> Clients:
        """Those who may be in this stage's sum."""
        return self.holding.sharers if self.survivors is None else self.survivors.message.survivors

    @property
    def held(self) -> HeldShares:
        """The shares that this client holds in this stage."""
        return self.holding.shares[self.stage]

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


def neighbourhood(params: SecAggParams, roster: Roster) -> Neighbourhood:
    """The graph over a roster, the same for everybody who holds it."""
    members = tuple(m.client for m in roster.members)
    return arrange(members, params.topology, roster.graph_seed)


def identity_of(identity: Identity | None) -> Identity:
    if identity is None:
        raise MisuseError("the active setting needs an identity and the directory")
    return identity
