"""A client's round, state by state: from its public keys to the shares it reveals.

Read from top to bottom as a round happens. Each state is a record with exactly the fields that
exist in that state, so that nothing is read too early and everything can be stored; each transition
returns the next state and what to send. Nothing here draws randomness: keys, seeds and
coefficients are labelled derivations of the round's root, so that a client woken from its
snapshot sends the same bytes as before. Roster, boxes, groups and survivors are `Kept` as the
messages they came in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto import shamir
from tessera.crypto.keys import Identity, is_public_key, seal, verify
from tessera.crypto.prg import Label
from tessera.errors import MisuseError, ServerFault
from tessera.ids import ClientId, StageId, TableId
from tessera.protocols.secagg import mask_streams, transcript
from tessera.protocols.secagg.masking import Input, check_context, masked
from tessera.protocols.secagg.messages import (
    MAX_POSITION,
    ConsistencyProof,
    ConsistencySignature,
    ForwardedShares,
    NextStage,
    RevealedRows,
    RevealedSet,
    RevealedShares,
    Roster,
    RowGroups,
    ShareBoxes,
    SurvivorList,
)
from tessera.protocols.secagg.params import MAX_COHORT, Threat
from tessera.protocols.secagg.session import (
    Holding,
    KeptRoster,
    OwnShares,
    OwnSharesByStage,
    Session,
    Standing,
    advert_of,
    identity_of,
    member_of,
    neighbourhood,
)
from tessera.protocols.secagg.transcript import NO_VIEW
from tessera.wire.stored import ByDigest, Kept

KeptRows = Annotated[Kept[RevealedSet], ByDigest(RevealedSet)]
"""The rows that a client has named, as it sent them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reveal:
    """The rows that this client names in a stage, and the smallest group it accepts.

    `context` is the digest of what came before and everybody must agree on (the union).
    """

    tables: Mapping[TableId, npt.NDArray[np.uint64]] = field(repr=False)
    quorum: int = 0
    context: bytes = field(default=bytes(32), repr=False)


@wire.record(tag=0x0181)
@dataclass(frozen=True, slots=True, kw_only=True)
class Advertised:
    """Keys are sent; waits for the roster."""

    session: Session

    def on_roster(
        self, listed: Kept[Roster], identity: Identity | None
    ) -> tuple[AwaitingShares, list[Any]]:
        params, me, roster = self.session.params, self.session.me, listed.message
        self._check_roster(roster, identity)
        context = transcript.roster_context(params, roster)
        hood = neighbourhood(params, roster)
        channel = self.session.channel()
        keys = {m.client: m.channel_key for m in roster.members}
        holders = hood.holders(me)
        points = range(1, len(holders) + 1)

        boxes: dict[ClientId, list[bytes]] = {c: [] for c in holders if c != me}
        own: list[OwnShares] = []
        sealing = {c: channel.agree(keys[c], Label.CHANNEL, context, me, c) for c in boxes}
        for stage in self.session.stages():
            # Each stage is shared on its own: its shares are independent of the others'.
            mask_shares, self_shares = shamir.split(
                [self.session.mask_key(stage), self.session.self_seed(stage)],
                threshold=hood.threshold,
                points=points,
                coefficients=self.session.root.derive(Label.SHARE_COEFFICIENTS, context, stage),
            )
            for holder, mask_share, self_share in zip(
                holders, mask_shares, self_shares, strict=True
            ):
                if holder == me:
                    own.append(OwnShares(mask_key=mask_share, self_mask=self_share))
                    continue
                nonce, associated = transcript.box_nonce_and_data(context, stage, me, holder)
                boxes[holder].append(
                    seal(
                        sealing[holder],
                        mask_share + self_share,
                        nonce=nonce,
                        associated=associated,
                    )
                )
        sent = {c: tuple(b) for c, b in boxes.items()}
        next_state = AwaitingShares(session=self.session, listed=listed, own=tuple(own))
        return next_state, [ShareBoxes(round_id=params.round_id, sender=me, boxes=sent)]

    def _check_roster(self, roster: Roster, identity: Identity | None) -> None:
        params, me = self.session.params, self.session.me

        def refuse(reason: str) -> ServerFault:
            return self.session.fault("advertise", reason)

        if roster.round_id != params.round_id:
            raise refuse(f"sent the roster of round {roster.round_id}")
        names = [m.client for m in roster.members]
        if sorted(set(names)) != names:
            raise refuse("sent a roster that is not in ascending order")
        if len(names) > params.cohort or len(names) < params.min_survivors:
            raise refuse(f"sent a roster of {len(names)} for a cohort of {params.cohort}")
        if any(len(m.stages) != len(params.stages) for m in roster.members):
            raise refuse("sent a roster with keys for other stages")
        for m in roster.members:
            if not all(map(is_public_key, (m.channel_key, *(s.mask_key for s in m.stages)))):
                raise refuse(f"sent a roster with an invalid public key of client {m.client}")
        if len({m.channel_key for m in roster.members}) != len(names):
            raise refuse("sent a roster in which two members have the same key")
        own_entry = [m for m in roster.members if m.client == me]
        if not own_entry or own_entry[0] != member_of(advert_of(self.session, identity)):
            raise refuse("sent a roster without this client's own keys")
        if params.threat is Threat.ACTIVE:
            known = identity_of(identity).directory
            for m in roster.members:
                if not transcript.advert_is_signed(m, params.context, known.get(m.client)):
                    raise refuse(f"sent a roster in which client {m.client}'s keys are forged")


@wire.record(tag=0x0182)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingShares:
    """Shares are sent; waits for the ones it is to hold."""

    session: Session
    listed: KeptRoster
    own: OwnSharesByStage = field(repr=False)

    def on_shares(
        self, forwarded: Kept[ForwardedShares], identity: Identity | None
    ) -> tuple[Ready, list[Any]]:
        params, me, msg = self.session.params, self.session.me, forwarded.message
        hood = neighbourhood(params, self.listed.message)
        sharers = {ClientId(int(c)) for c in msg.sharers}
        if msg.round_id != params.round_id:
            raise self.session.fault("share", f"sent the boxes of round {msg.round_id}")
        if me not in sharers or not sharers <= set(hood.members):
            raise self.session.fault("share", "named sharers who are not in the roster")
        if len(sharers) < params.min_survivors:
            raise self.session.fault("share", f"continued with {len(sharers)} sharers")
        due = {c for c in sharers if hood.holds(me, c)} - {me}
        if msg.boxes.keys() != due:
            raise self.session.fault("share", "did not forward exactly the boxes due here")
        holding = Holding(
            session=self.session, listed=self.listed, own=self.own, forwarded=forwarded
        )
        holding.unseal()
        return Ready(at=Standing(holding=holding, stage=StageId(0))), []


@wire.record(tag=0x0183)
@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Holds its shares; waits for its caller's contribution to this stage."""

    at: Standing

    def on_reveal(
        self, wish: Reveal, identity: Identity | None
    ) -> tuple[AwaitingGroups, list[Any]]:
        spec, params = self.at.spec, self.at.session.params
        quorum = wish.quorum or params.quorum
        if not params.quorum <= quorum <= params.cohort:
            raise MisuseError(
                f"a quorum of {quorum} where the plan asks for {params.quorum} of {params.cohort}"
            )
        check_context(wish.context)
        if not spec.tables or {t.table for t in spec.tables} != wish.tables.keys():
            raise MisuseError(f"stage {spec.name}: rows of other tables than the stage has")
        for table, rows in wish.tables.items():
            _check_rows(f"stage {spec.name}, table {table}", rows)
        tables = tuple(
            RevealedRows(table=t.table, rows=np.asarray(wish.tables[t.table], dtype=np.uint64))
            for t in spec.tables
        )
        message = RevealedSet(
            round_id=params.round_id,
            stage=self.at.stage,
            sender=self.at.session.me,
            quorum=quorum,
            tables=tables,
        )
        named = Kept.of(message)
        return AwaitingGroups(at=self.at, named=named, context=wish.context), [named]

    def on_input(
        self, given: Input, identity: Identity | None
    ) -> tuple[AwaitingSurvivors, list[Any]]:
        if self.at.spec.tables:
            raise MisuseError(f"stage {self.at.spec.name}: rows are revealed before they are sent")
        agreed = transcript.agreed_digest(given.context, given.received.common)
        message = masked(self.at, given, agreed=agreed, included={}, shared={})
        next_state = AwaitingSurvivors(at=self.at, agreed=agreed, view=NO_VIEW)
        return next_state, [message]


@wire.record(tag=0x0184)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingGroups:
    """Has named its rows; waits for the group of each of them."""

    at: Standing
    named: KeptRows
    context: Annotated[bytes, wire.KEY] = field(repr=False)

    def on_groups(
        self, groups: Kept[RowGroups], identity: Identity | None
    ) -> tuple[Grouped, list[Any]]:
        msg = groups.message

        def refuse(reason: str) -> ServerFault:
            return self.at.fault("reveal", reason)

        params, me = self.at.session.params, self.at.session.me
        own = self.named.message
        if msg.round_id != params.round_id or msg.stage != self.at.stage:
            raise refuse("sent the groups of another round or stage")
        if [t.table for t in msg.tables] != [t.table for t in own.tables]:
            raise refuse("sent the groups of other tables")
        peers = {int(c) for c in self.at.participants} - {me}
        for table, revealed in zip(msg.tables, own.tables, strict=True):
            if len(table.included) and int(table.included[-1]) >= len(revealed.rows):
                raise refuse("included a row that this client did not reveal")
            if not table.shared.keys() <= peers:
                raise refuse("put a client that does not take part into a group")
            size = np.ones(len(table.included), dtype=np.int64)
            for rows in table.shared.values():
                if len(rows) and int(rows[-1]) >= len(size):
                    raise refuse("put a peer into the group of a row that is not included")
                size[rows] += 1
            if (size < own.quorum).any():
                raise refuse(f"included a group below this client's quorum of {own.quorum}")
        next_state = Grouped(
            at=self.at,
            context=self.context,
            grouping=Grouping(named=self.named, groups=groups),
        )
        return next_state, []


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """A client's rows and their groups in one stage: what is summed, and what is held back."""

    named: KeptRows
    groups: Annotated[Kept[RowGroups], ByDigest(RowGroups)]

    @cached_property
    def included(self) -> dict[TableId, npt.NDArray[np.uint64]]:
        """The rows whose group met the quorum."""
        own, groups = self.named.message.tables, self.groups.message.tables
        return {
            part.table: revealed.rows[part.included]
            for revealed, part in zip(own, groups, strict=True)
        }

    def smallest(self, table: TableId) -> int:
        """How many members the smallest group has that a row named in this table is summed over.

        0 if a row was left out. As the server tells it: a client knows its own rows only.
        """
        named = {part.table: len(part.rows) for part in self.named.message.tables}
        part = next(part for part in self.groups.message.tables if part.table == table)
        if len(part.included) != named[table]:
            return 0
        size = np.ones(len(part.included), dtype=np.int64)
        for rows in part.shared.values():
            size[rows] += 1
        return int(size.min(initial=MAX_COHORT))

    def row_keys(self, at: Standing, alive: set[int]) -> dict[TableId, bytes]:
        """The keys of the rows whose surviving group still meets the quorum, in row order."""
        found = {}
        for part in self.groups.message.tables:
            size = np.ones(len(part.included), dtype=np.int64)
            for peer, rows in part.shared.items():
                if peer in alive:
                    size[rows] += 1
            still = self.included[part.table][size >= self.named.message.quorum]
            secret = at.session.hold_back(at.stage, part.table)
            found[part.table] = mask_streams.hold_back_keys(secret, still).tobytes()
        return found


MaybeHeldBack = Annotated[Grouping | None, wire.Maybe(wire.Nested(Grouping))]
"""With a strict quorum: what decides which hold-back keys are revealed."""


@wire.record(tag=0x0185)
@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Knows its groups; waits for its caller's values of the included rows."""

    at: Standing
    context: Annotated[bytes, wire.KEY] = field(repr=False)
    grouping: Grouping

    @property
    def included(self) -> dict[TableId, npt.NDArray[np.uint64]]:
        return self.grouping.included

    def on_input(
        self, given: Input, identity: Identity | None
    ) -> tuple[AwaitingSurvivors, list[Any]]:
        groups = self.grouping.groups.message
        shared = {t.table: t.shared for t in groups.tables}
        agreed = transcript.agreed_digest(self.context, given.received.common)
        message = masked(self.at, given, agreed=agreed, included=self.included, shared=shared)
        signs = self.at.session.params.threat is Threat.ACTIVE
        next_state = AwaitingSurvivors(
            at=self.at,
            agreed=agreed,
            view=transcript.view_digest(groups, given.received) if signs else NO_VIEW,
            held_back=self.grouping if self.at.session.params.strict_quorum else None,
        )
        return next_state, [message]


@wire.record(tag=0x0186)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingSurvivors:
    """Its input is out; waits for the one list of those whose input counts.

    `agreed` is the digest of what everybody was sent. `view`, in the active setting, is that of
    what this client alone was sent: its groups, and the values of their rows.
    """

    at: Standing
    agreed: Annotated[bytes, wire.KEY] = field(repr=False)
    view: Annotated[bytes, wire.KEY] = field(repr=False)
    held_back: MaybeHeldBack = None

    def on_survivors(
        self, listed: Kept[SurvivorList], identity: Identity | None
    ) -> tuple[AwaitingProof | Resting | Finished, list[Any]]:
        params, me, msg = self.at.session.params, self.at.session.me, listed.message
        survivors = {int(c) for c in msg.survivors}
        if msg.round_id != params.round_id or msg.stage != self.at.stage:
            raise self.at.fault("collect", "sent the survivors of another round or stage")
        if not survivors <= {int(c) for c in self.at.participants}:
            raise self.at.fault("collect", "named a survivor who did not take part")
        if me not in survivors:
            raise self.at.fault("collect", "left this client's input out of the sum")
        if len(survivors) < params.min_survivors:
            raise self.at.fault("collect", f"would open a sum of {len(survivors)} inputs")
        if params.threat is Threat.SEMI_HONEST:
            return unmasked(self.at, listed, self.held_back)
        statement = transcript.consistency_statement(
            params,
            self.at.holding.listed.digest,
            self.at.stage,
            self.agreed,
            self.view,
            msg.survivors,
        )
        signed = ConsistencySignature(
            round_id=params.round_id,
            stage=self.at.stage,
            sender=me,
            groups=self.view,
            signature=identity_of(identity).key.sign(statement),
        )
        next_state = AwaitingProof(
            at=self.at,
            agreed=self.agreed,
            survivors=listed,
            held_back=self.held_back,
        )
        return next_state, [signed]


@wire.record(tag=0x0187)
@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingProof:
    """Has signed one list; waits for proof that a threshold signed the same (active setting)."""

    at: Standing
    agreed: Annotated[bytes, wire.KEY] = field(repr=False)
    survivors: Annotated[Kept[SurvivorList], ByDigest(SurvivorList)]
    held_back: MaybeHeldBack = None

    def on_proof(
        self, proof: Kept[ConsistencyProof], identity: Identity | None
    ) -> tuple[Resting | Finished, list[Any]]:
        params, msg = self.at.session.params, proof.message
        known = identity_of(identity).directory
        roster, survivors = self.at.holding.listed.digest, self.survivors.message.survivors
        if msg.round_id != params.round_id or msg.stage != self.at.stage:
            raise self.at.fault("consistency", "sent the proof of another round or stage")
        if not msg.endorsements.keys() <= {int(c) for c in survivors}:
            raise self.at.fault(
                "consistency", "sent a signature of a client that is not a survivor"
            )
        for client, endorsed in msg.endorsements.items():
            statement = transcript.consistency_statement(
                params, roster, self.at.stage, self.agreed, endorsed.groups, survivors
            )
            public = known.get(client)
            if public is None or not verify(public, endorsed.signature, statement):
                raise self.at.fault("consistency", f"forged the signature of client {client}")
        if len(msg.endorsements) < params.topology.threshold:
            raise self.at.fault("consistency", f"has {len(msg.endorsements)} signatures only")
        return unmasked(self.at, self.survivors, self.held_back)


@wire.record(tag=0x018A)
@dataclass(frozen=True, slots=True, kw_only=True)
class Resting:
    """Has done its part of a stage; waits until the server begins the next one."""

    at: Standing

    def on_next_stage(
        self, begun: Kept[NextStage], identity: Identity | None
    ) -> tuple[Ready, list[Any]]:
        msg = begun.message
        if msg.round_id != self.at.session.params.round_id or msg.stage != self.at.stage:
            raise self.at.fault("rest", "began another round or stage")
        return Ready(at=self.at), []


@wire.record(tag=0x0188)
@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The round is over for this client; its secrets and the shares it held are gone."""


def _check_rows(where: str, rows: Any) -> None:
    """Our caller's row positions: a set, in the one order in which it is sent."""
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise MisuseError(f"{where}: rows are a one-dimensional array of integers")
    if not len(rows):
        return
    if (rows[1:] <= rows[:-1]).any() or int(rows[0]) < 0:
        raise MisuseError(f"{where}: rows ascend from 0 on, without repeats")
    if int(rows[-1]) >= MAX_POSITION:
        raise MisuseError(f"{where}: a row position over 2^40")


def unmasked(
    at: Standing, listed: Kept[SurvivorList], held_back: Grouping | None
) -> tuple[Resting | Finished, list[Any]]:
    """The shares that open this stage's sum, and the state after it.

    `alive` and `gone` are disjoint, and the stage is behind us once this returns: a holder never
    reveals both shares of one client in one stage.
    """
    params, me, held = at.session.params, at.session.me, at.held
    alive = {int(c) for c in listed.message.survivors}
    gone = {int(c) for c in at.participants} - alive
    message = RevealedShares(
        round_id=params.round_id,
        stage=at.stage,
        sender=me,
        self_masks={c: share for c, share in held.self_masks.items() if c in alive},
        mask_keys={c: share for c, share in held.mask_keys.items() if c in gone},
        row_keys={} if held_back is None else held_back.row_keys(at, alive),
    )
    following = StageId(at.stage + 1)
    if following == len(params.stages):
        return Finished(), [message]
    return Resting(at=Standing(holding=at.holding, stage=following, survivors=listed)), [message]
