"""The server's side of a round of secure sums: it forwards shares, adds up, and unmasks the sum.

Phases follow each other as in `CLOSES`; the engine's clock ends each one with `close_phase`. What a
phase has collected is a record like any other, so that a server can be stopped between any two
messages and go on in another process. Inputs are added up as they come and not kept. Within a phase
the order of messages leaves no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.group import Group
from tessera.crypto.keys import Identity, is_public_key, verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError, PeerError, RoundAborted
from tessera.ids import SERVER, ClientId, Party, StageId, TableId
from tessera.protocols.machine import (
    Closes,
    Coordinator,
    Moved,
    Outbound,
    Steps,
    UnderParams,
    shortened,
    to_all,
)
from tessera.protocols.secagg import groups, transcript
from tessera.protocols.secagg.mask_streams import KEY_BYTES
from tessera.protocols.secagg.masking import check_context
from tessera.protocols.secagg.messages import (
    FROM_CLIENT,
    MAX_POSITION,
    Advert,
    ConsistencyProof,
    ConsistencySignature,
    Endorsement,
    ForwardedShares,
    MaskedInput,
    NextStage,
    RevealedSet,
    RevealedShares,
    Roster,
    RowGroups,
    ShareBoxes,
    SurvivorList,
    TableGroups,
)
from tessera.protocols.secagg.params import Neighbourhood, SecAggParams, StageSpec, Threat
from tessera.protocols.secagg.phases import (
    PHASE_NAMES,
    PHASES,
    Advertising,
    Between,
    Collecting,
    CollectingShares,
    Done,
    Endorsing,
    InputSum,
    Progress,
    Revealing,
    StageSum,
    SumAborted,
    TableSum,
    Unmasking,
)
from tessera.protocols.secagg.session import member_of, neighbourhood
from tessera.protocols.secagg.transcript import NothingSent, SentDigests
from tessera.protocols.secagg.unmask import (
    recover,
    recovery_tasks,
    release_rows,
    remove_masks,
    rows_meeting_quorum,
    shrunk,
    surviving,
)
from tessera.wire.index_set import client_array
from tessera.wire.stored import Kept


@dataclass(frozen=True)
class SecAggServerSetup(UnderParams):
    """`sent` knows the digests of what its caller sent the clients; their masks depend on it."""

    params: SecAggParams
    invited: Collection[ClientId]
    _: KW_ONLY
    identity: Identity | None = None
    sent: SentDigests = field(default_factory=NothingSent)

    party: ClassVar[Party] = SERVER

    def __post_init__(self) -> None:
        if len(self.invited) != self.params.cohort:
            raise MisuseError(f"{len(self.invited)} clients for a cohort of {self.params.cohort}")
        if self.identity is None and self.params.threat is Threat.ACTIVE:
            raise MisuseError("the active setting needs the directory of public keys")


class Server(Coordinator[SecAggServerSetup]):
    """The aggregation server in one round."""

    ROLE = "server of secure sums"
    STATES = PHASES
    PHASES = PHASE_NAMES
    FROM_CLIENT = FROM_CLIENT

    def __init__(self, setup: SecAggServerSetup, *, entropy: Entropy) -> None:
        params = setup.params
        seed = entropy.secret(Label.GRAPH, params.federation, params.round_id)
        super().__init__(setup, Advertising(graph_seed=seed.reveal()))

    def _set_up(self, setup: SecAggServerSetup) -> None:
        super()._set_up(setup)
        self.params, self._sent = setup.params, setup.sent
        self.invited = frozenset(setup.invited)
        self._directory = {} if setup.identity is None else setup.identity.directory
        self.complaints: list[PeerError] = []
        # Surviving members of each row while a sum is unmasked; derived from the phase.
        self._left: dict[TableId, npt.NDArray[np.int64]] | None = None
        self._arranged: tuple[Kept[Roster], Neighbourhood] | None = None

    # -- where the round stands

    @property
    def sums(self) -> tuple[StageSum, ...]:
        """The sums that are opened, by stage."""
        if isinstance(self.state, Done | SumAborted):
            return self.state.sums
        at = getattr(self.state, "at", None)
        return () if at is None else at.sums

    @property
    def stage(self) -> StageSpec:
        return self.params.stage(self.state.at.stage)

    @property
    def revealed(self) -> dict[ClientId, dict[TableId, npt.NDArray[np.uint64]]]:
        """The rows that clients have named so far, during the reveal phase."""
        if not isinstance(self.state, Revealing):
            return {}
        return {
            c: {t.table: t.rows for t in kept.message.tables}
            for c, kept in self.state.answers.items()
        }

    @property
    def expected(self) -> frozenset[Party]:
        if type(self.state) not in CLOSES:
            return frozenset()
        return frozenset(self._recipients() - self.state.answers.keys())

    def _recipients(self) -> frozenset[ClientId]:
        state = self.state
        match state:
            case Advertising():
                return self.invited
            case CollectingShares():
                return frozenset(m.client for m in state.listed.message.members)
            case Collecting() if state.total.tables:
                return frozenset(next(iter(state.total.tables.values())).members)
            case Endorsing():
                return state.survivors
            case Unmasking():
                return state.recipients
        participants: frozenset[ClientId] = state.at.participants
        return participants

    # -- messages from clients

    def _check_due(self, sender: Party, message: Any) -> None:
        if getattr(message, "stage", None) not in (None, self._stage):
            raise self._refuse(sender, f"sent {type(message).__name__} of another stage")
        if sender not in self._recipients():
            raise self._refuse(sender, "has dropped out earlier")
        if sender in self.state.answers:
            raise self._refuse(sender, f"sent a second {type(message).__name__}")

    @property
    def _stage(self) -> StageId | None:
        return self.state.at.stage if hasattr(self.state, "at") else None

    # Each of these checks everything before it changes anything: a refusal leaves the state alone.

    def _take_advert(self, phase: Advertising, kept: Kept[Advert]) -> Moved:
        params, message, sender = self.params, kept.message, kept.message.sender
        if message.context != params.context:
            raise self._refuse(sender, "advertised keys for other parameters")
        if len(message.stages) != len(params.stages):
            raise self._refuse(sender, f"advertised keys for {len(message.stages)} stages")
        if not all(
            map(is_public_key, (message.channel_key, *(s.mask_key for s in message.stages)))
        ):
            raise self._refuse(sender, "advertised an invalid public key")
        if params.threat is Threat.ACTIVE:
            known = self._directory.get(sender)
            if not transcript.advert_is_signed(message, params.context, known):
                raise self._refuse(sender, "advertised keys with a bad signature")
        elif message.signature:
            raise self._refuse(sender, "sent a signature in the semi-honest setting")
        if message.channel_key in {a.message.channel_key for a in phase.answers.values()}:
            raise self._refuse(sender, "advertised another client's key")
        phase.answers[sender] = kept
        return phase, []

    def _take_boxes(self, phase: CollectingShares, kept: Kept[ShareBoxes]) -> Moved:
        message, hood = kept.message, self._hood(phase.listed)
        if message.boxes.keys() != set(hood.holders(message.sender)) - {message.sender}:
            raise self._refuse(message.sender, "sent shares for others than its holders")
        if any(len(boxes) != len(self.params.stages) for boxes in message.boxes.values()):
            raise self._refuse(message.sender, "sent shares for other stages")
        phase.answers[message.sender] = kept
        return phase, []

    def _take_revealed(self, phase: Revealing, kept: Kept[RevealedSet]) -> Moved:
        message = kept.message
        if [t.table for t in message.tables] != [t.table for t in self.stage.tables]:
            raise self._refuse(message.sender, "revealed rows of other tables")
        if any(len(t.rows) and int(t.rows[-1]) >= MAX_POSITION for t in message.tables):
            raise self._refuse(message.sender, "revealed a row position over 2^40")
        for t in message.tables:
            rows = phase.at.rows.get(t.table)
            if rows is not None and len(t.rows) and int(t.rows[-1]) >= rows:
                raise self._refuse(
                    message.sender, f"revealed a row beyond table {t.table}'s {rows}"
                )
        if not self.params.quorum <= message.quorum <= self.params.cohort:
            raise self._refuse(message.sender, f"asks for a quorum of {message.quorum}")
        phase.answers[message.sender] = kept
        return phase, []

    def _take_input(self, phase: Collecting, kept: Kept[MaskedInput]) -> Moved:
        message, total = kept.message, phase.total
        group, sender = self.stage.group, message.sender
        dense = self._unpacked(group, message.dense, (self.stage.dense,), sender)
        if len(message.tables) != len(self.stage.tables):
            raise self._refuse(sender, "sent other tables")
        rows = [
            self._unpacked(
                group, data, (len(total.tables[spec.table].members[sender]), spec.width), sender
            )
            for spec, data in zip(self.stage.tables, message.tables, strict=True)
        ]
        group.iadd(total.dense, dense)
        for spec, words in zip(self.stage.tables, rows, strict=True):
            part = total.tables[spec.table]
            at = part.index(sender)
            group.iadd(words, part.words.take(at, axis=0))
            part.words[at] = words
        total.answers[sender] = True
        return phase, []

    def _take_signature(self, phase: Endorsing, kept: Kept[ConsistencySignature]) -> Moved:
        message = kept.message
        statement = transcript.consistency_statement(
            self.params,
            phase.at.listed.digest,
            phase.at.stage,
            transcript.agreed_digest(phase.at.context, self._sent.common(phase.at.stage)),
            message.groups,
            client_array(phase.survivors),
        )
        public = self._directory.get(message.sender)
        if public is None or not verify(public, message.signature, statement):
            raise self._refuse(message.sender, "signed another statement than the one due")
        phase.answers[message.sender] = Endorsement(
            groups=message.groups, signature=message.signature
        )
        return phase, []

    def _take_shares(self, phase: Unmasking, kept: Kept[RevealedShares]) -> Moved:
        message, alive = kept.message, phase.survivors
        hood = self._hood(phase.at.listed)
        held = hood.owners(message.sender, phase.at.participants)
        if not message.self_masks.keys() <= held & alive:
            raise self._refuse(
                message.sender,
                "sent a self-mask share of a client that is not a survivor it holds shares of",
            )
        if not message.mask_keys.keys() <= held - alive:
            raise self._refuse(
                message.sender, "sent a key share of a client that has not dropped out"
            )
        if not self._row_keys_fit(phase, message):
            raise self._refuse(message.sender, "sent row keys that do not match the rows due")
        phase.answers[message.sender] = kept
        return phase, []

    def _hood(self, listed: Kept[Roster]) -> Neighbourhood:
        """The graph, which follows from the roster: arranged once."""
        if self._arranged is None or self._arranged[0] is not listed:
            self._arranged = (listed, neighbourhood(self.params, listed.message))
        return self._arranged[1]

    def _row_keys_fit(self, phase: Unmasking, message: RevealedShares) -> bool:
        if not self.params.strict_quorum:
            return not message.row_keys
        if self._left is None:
            self._left = {
                t: surviving(part, phase.survivors) for t, part in phase.total.tables.items()
            }
        quorum = phase.total.quorums.get(message.sender, 0)
        due = {
            table: len(rows_meeting_quorum(part, message.sender, quorum, self._left[table]))
            for table, part in phase.total.tables.items()
        }
        return {t: len(k) for t, k in message.row_keys.items()} == {
            t: rows * KEY_BYTES for t, rows in due.items()
        }

    def _unpacked(
        self, group: Group, data: bytes, shape: tuple[int, ...], sender: ClientId
    ) -> npt.NDArray[Any]:
        count = int(np.prod(shape))
        if len(data) != (count * group.bits + 7) // 8:
            raise self._refuse(sender, f"sent {len(data)} bytes for {count} words")
        try:
            return group.unpack(data, count).reshape(*shape, *group.limbs)
        except ValueError as error:
            raise self._refuse(sender, f"sent words that are not in {group.name}") from error

    # -- the clock

    def _send_roster(self, phase: Advertising) -> Moved:
        self._need(len(phase.answers), self.params.min_survivors)
        members = tuple(member_of(phase.answers[c].message) for c in sorted(phase.answers))
        roster = Roster(round_id=self.params.round_id, graph_seed=phase.graph_seed, members=members)
        listed = Kept.of(roster)
        return CollectingShares(listed=listed), to_all(phase.answers, listed)

    def _forward_shares(self, phase: CollectingShares) -> Moved:
        self._need(len(phase.answers), self.params.min_survivors)
        sharers = client_array(phase.answers)
        inbox: dict[ClientId, dict[ClientId, tuple[bytes, ...]]] = {
            c: {} for c in sorted(phase.answers)
        }
        for sender, kept in phase.answers.items():
            for holder, boxes in kept.message.boxes.items():
                if holder in inbox:
                    inbox[holder][sender] = boxes
        out = [
            Outbound.of(
                c, ForwardedShares(round_id=self.params.round_id, sharers=sharers, boxes=boxes)
            )
            for c, boxes in inbox.items()
        ]
        participants = frozenset(phase.answers)
        at = Progress(listed=phase.listed, participants=participants, stage=StageId(0))
        return self._inputs_of(at), out

    def begin_stage(
        self, context: bytes = bytes(32), rows: Mapping[TableId, int] | None = None
    ) -> list[Outbound]:
        """Begin the next stage; `context` is the digest of what everybody must agree on before it.

        `rows` is how many positions each of its tables has: no client may name one beyond them. The
        first stage begins by itself when shares are forwarded.
        """
        if not isinstance(self.state, Between):
            raise MisuseError(f"a stage cannot begin in phase {self.phase}")
        check_context(context)
        at = self.state.at
        stage, rows = StageId(at.stage + 1), dict(rows or {})
        if not rows.keys() <= {t.table for t in self.params.stage(stage).tables}:
            raise MisuseError(f"stage {stage}: rows of other tables than the stage has")
        if any(not 0 <= count <= MAX_POSITION for count in rows.values()):
            raise MisuseError(f"stage {stage}: a table has 0 to 2^40 rows")
        following = self._inputs_of(replace(at, stage=stage, context=context, rows=rows))
        self._move(following, b"")
        return to_all(at.participants, NextStage(round_id=self.params.round_id, stage=stage))

    def _inputs_of(self, at: Progress) -> Revealing | Collecting:
        spec = self.params.stage(at.stage)
        if spec.tables:
            return Revealing(at=at)
        total = InputSum(dense=spec.group.zeros(spec.dense), tables={})
        return Collecting(at=at, total=total)

    def _form_groups(self, phase: Revealing) -> Moved:
        self._need(len(phase.answers), self.params.min_survivors)
        group = self.stage.group
        answers = {c: phase.answers[c].message for c in sorted(phase.answers)}
        quorums = {c: m.quorum for c, m in answers.items()}
        sums: dict[TableId, TableSum] = {}
        shared: dict[TableId, groups.SharedRows] = {}
        for i, spec in enumerate(self.stage.tables):
            revealed = {c: m.tables[i].rows for c, m in answers.items()}
            members = groups.form(revealed, quorums)
            shared[spec.table] = groups.SharedRows(members)
            rows = groups.distinct(np.concatenate(list(members.values())))
            wanted = groups.distinct(np.concatenate(list(revealed.values())))
            sums[spec.table] = TableSum(
                rows=rows,
                words=group.zeros((len(rows), spec.width)),
                members=members,
                below_quorum=len(wanted) - len(rows),
            )
        total = InputSum(dense=group.zeros(self.stage.dense), tables=sums, quorums=quorums)
        out = []
        for c, answer in answers.items():
            tables = tuple(
                TableGroups(
                    table=part.table,
                    included=groups.places_in(part.rows, sums[part.table].members[c]).astype(
                        np.uint64
                    ),
                    shared=shared[part.table][c],
                )
                for part in answer.tables
            )
            message = RowGroups(round_id=self.params.round_id, stage=phase.at.stage, tables=tables)
            out.append(Outbound.of(c, message))
        return Collecting(at=phase.at, total=total), out

    def _name_survivors(self, phase: Collecting) -> Moved:
        at, survivors = phase.at, frozenset(phase.answers)
        self._need(len(survivors), self.params.min_survivors)
        hood = self._hood(at.listed)
        for client in sorted(at.participants):
            # A secret could not be recovered: abort before anything is opened.
            self._need(
                len(survivors & set(hood.holders(client))),
                hood.threshold,
                f"holders of client {client}'s shares",
            )
        message = SurvivorList(
            round_id=self.params.round_id, stage=at.stage, survivors=client_array(survivors)
        )
        out = to_all(survivors, message)
        if self.params.threat is Threat.ACTIVE:
            return Endorsing(at=at, total=phase.total, survivors=survivors), out
        following = Unmasking(at=at, total=phase.total, survivors=survivors, recipients=survivors)
        return following, out

    def _send_proof(self, phase: Endorsing) -> Moved:
        self._need(len(phase.answers), self.params.topology.threshold, "signatures")
        message = ConsistencyProof(
            round_id=self.params.round_id, stage=phase.at.stage, endorsements=dict(phase.answers)
        )
        following = Unmasking(
            at=phase.at,
            total=phase.total,
            survivors=phase.survivors,
            recipients=frozenset(phase.answers),
        )
        return following, to_all(phase.answers, message)

    # -- unmasking

    def _open_sum(self, phase: Unmasking) -> Moved:
        at, alive = phase.at, phase.survivors
        seeds, keys = self._recovered(phase)
        self._left = None
        remove_masks(
            self.params,
            at.listed.message,
            at.stage,
            phase.total,
            seeds,
            keys,
            context=at.context,
            sent=self._sent,
        )
        tables = phase.total.tables
        if self.params.strict_quorum:
            tables = release_rows(self.params, phase)
        opened = StageSum(
            stage=at.stage,
            survivors=client_array(alive),
            dense=phase.total.dense,
            tables={
                table: replace(part, shrunk=shrunk(part, alive, self.params.quorum))
                for table, part in tables.items()
            },
        )
        sums = (*at.sums, opened)
        if at.stage + 1 == len(self.params.stages):
            return Done(sums=sums), []
        return Between(at=replace(at, participants=alive, sums=sums)), []

    def _recovered(self, phase: Unmasking) -> tuple[dict[ClientId, Secret], dict[ClientId, Secret]]:
        """The survivors' self-mask seeds and the keys of those who are gone, or `RoundAborted`."""
        seeds, keys = recovery_tasks(self.params, phase)
        threshold = self._hood(phase.at.listed).threshold
        for one in (*seeds, *keys):
            if len(one.shares) < threshold <= len(one.points.keys() & phase.answers.keys()):
                # Enough of its holders answered, but could not unseal its box and have no share.
                reason = f"left {len(one.shares)} holders with a share, {threshold} are needed"
                self.complaints.append(self._refuse(one.owner, reason))
        self._need(min(len(one.shares) for one in (*seeds, *keys)), threshold, "shares of a secret")
        found_seeds, found_keys = (recover(each, threshold=threshold) for each in (seeds, keys))
        # Holder or owner may be at fault: an owner may have sealed a wrong share to its holder.
        for holder in sorted(found_seeds.bad_holders | found_keys.bad_holders):
            self.complaints.append(self._refuse(holder, "gave a wrong share, or was given one"))
        for owner in sorted(found_seeds.bad_owners | found_keys.bad_owners):
            reason = "shared its secrets wrongly, or too many of its holders gave wrong shares"
            self.complaints.append(self._refuse(owner, reason))
        self._need(
            len(found_seeds.secrets) + len(found_keys.secrets),
            len(phase.at.participants),
            "secrets that could be recovered",
        )
        return found_seeds.secrets, found_keys.secrets

    # -- small things

    def _aborted(self, error: RoundAborted) -> SumAborted:
        return SumAborted(phase=error.phase, reason=shortened(error.reason), sums=self.sums)

    def _need(self, answered: int, needed: int, what: str = "") -> None:
        if answered < needed:
            reason = f"{answered} {what}, {needed} are needed" if what else ""
            raise self._too_few(answered, needed, reason)


STEPS: Final[Steps] = {
    (Advertising, Advert): Server._take_advert,
    (CollectingShares, ShareBoxes): Server._take_boxes,
    (Revealing, RevealedSet): Server._take_revealed,
    (Collecting, MaskedInput): Server._take_input,
    (Endorsing, ConsistencySignature): Server._take_signature,
    (Unmasking, RevealedShares): Server._take_shares,
}
"""Which message is due in which phase."""

CLOSES: Final[Closes] = {
    Advertising: Server._send_roster,
    CollectingShares: Server._forward_shares,
    Revealing: Server._form_groups,
    Collecting: Server._name_survivors,
    Endorsing: Server._send_proof,
    Unmasking: Server._open_sum,
}
"""What ends each phase, in the order of a round."""

Server.STEPS, Server.CLOSES = STEPS, CLOSES
