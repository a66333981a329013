"""The server's side of a round of secure sums: it forwards shares, adds up, and unmasks the sum.

Phases follow each other as in `CLOSES`; the engine's clock ends each one with `close_phase`. What a
phase has collected is a record like any other, so that a server can be stopped between any two
messages and go on in another process. Inputs are added up as they come and not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.group import Group
from tessera.crypto.keys import is_public_key, verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError, PeerError, RoundAborted, WireError
from tessera.ids import ClientId, StageId, TableId
from tessera.protocols import wire
from tessera.protocols.machine import Outbound, Steps
from tessera.protocols.secagg import binding, groups, transcript
from tessera.protocols.secagg.binding import NothingSent, SentDigests
from tessera.protocols.secagg.holdback import KEY_BYTES
from tessera.protocols.secagg.identity import Identity
from tessera.protocols.secagg.masking import CONTEXT_BYTES, check_context
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
from tessera.protocols.secagg.params import SecAggParams, StageSpec, Threat
from tessera.protocols.secagg.phases import (
    MAX_SUM_BYTES,
    PHASE_NAMES,
    Aborted,
    Advertising,
    Between,
    Collecting,
    CollectingShares,
    Done,
    Endorsing,
    Phase,
    Revealing,
    ServerSnapshot,
    StageSum,
    TableSum,
    Unmasking,
)
from tessera.protocols.secagg.recovery import recover
from tessera.protocols.secagg.session import member_of, neighbourhood
from tessera.protocols.secagg.unmask import (
    recovery_tasks,
    release_rows,
    remove_masks,
    rows_meeting_quorum,
    shrunk,
    surviving,
)


class Server:
    """The aggregation server in one round.

    `sent` knows the digests of what its caller sent the clients; their masks depend on it.
    """

    def __init__(
        self,
        params: SecAggParams,
        invited: Iterable[ClientId],
        *,
        entropy: Entropy,
        identity: Identity | None = None,
        sent: SentDigests | None = None,
    ) -> None:
        self.params = params
        self._sent: SentDigests = sent or NothingSent()
        self.invited = frozenset(invited)
        if len(self.invited) != params.cohort:
            raise MisuseError(f"{len(self.invited)} clients for a cohort of {params.cohort}")
        self._directory = _directory(params, identity)
        seed = entropy.secret(Label.GRAPH, params.federation, params.round_id)
        self._graph_seed = seed.reveal()  # public: every client lays the graph from it
        self._phase: Phase = Advertising()
        self._roster: Roster | None = None
        self._participants = self.invited
        self._stage = StageId(0)
        self._context = bytes(CONTEXT_BYTES)
        self._rows: dict[TableId, int] = {}
        self.sums: tuple[StageSum, ...] = ()
        self.complaints: list[PeerError] = []
        # Surviving members of each row while a sum is unmasked; derived from the phase.
        self._left: dict[TableId, npt.NDArray[np.int64]] | None = None

    # -- stored and resumed

    def snapshot(self) -> bytes:
        stored = ServerSnapshot(
            params=self.params,
            invited=_array(self.invited),
            graph_seed=self._graph_seed,
            phase=self._phase,
            roster=self._roster,
            participants=_array(self._participants),
            stage=self._stage,
            context=self._context,
            rows=self._rows,
            sums=self.sums,
        )
        return wire.encode(stored)

    @classmethod
    def restore(
        cls, snapshot: bytes, *, identity: Identity | None = None, sent: SentDigests | None = None
    ) -> Server:
        stored = wire.decode(snapshot, expect=[ServerSnapshot], cap=MAX_SUM_BYTES)
        server = cls.__new__(cls)
        server.params = stored.params
        server._sent = sent or NothingSent()
        server.invited = _clients(stored.invited)
        server._graph_seed = stored.graph_seed
        server._directory = _directory(stored.params, identity)
        server._phase = stored.phase
        server._roster = stored.roster
        server._participants = _clients(stored.participants)
        server._stage = stored.stage
        server._context = stored.context
        server._rows = stored.rows
        server.sums = stored.sums
        server.complaints = []
        server._left = None
        return server

    # -- where the round stands

    @property
    def phase(self) -> str:
        return PHASE_NAMES[type(self._phase)]

    @property
    def stage(self) -> StageSpec:
        return self.params.stage(self._stage)

    @property
    def revealed(self) -> dict[ClientId, dict[TableId, npt.NDArray[np.uint64]]]:
        """The rows that clients have named so far, during the reveal phase."""
        if not isinstance(self._phase, Revealing):
            return {}
        return {
            c: {t.table: t.rows for t in message.tables}
            for c, message in self._phase.answers.items()
        }

    @property
    def expected(self) -> frozenset[ClientId]:
        phase = self._phase
        if isinstance(phase, Between | Done | Aborted):
            return frozenset()
        return self._recipients() - phase.answers.keys()

    def _recipients(self) -> frozenset[ClientId]:
        phase = self._phase
        if isinstance(phase, Collecting) and phase.tables:
            return frozenset(next(iter(phase.tables.values())).members)
        if isinstance(phase, Endorsing):
            return _clients(phase.survivors)
        if isinstance(phase, Unmasking):
            return _clients(phase.recipients)
        return self._participants

    # -- messages from clients

    def receive(self, sender: ClientId, data: bytes) -> None:
        if sender not in self.invited:
            raise self._refuse(sender, "is not in this cohort")  # and its message is not decoded
        try:
            message = wire.decode(data, expect=FROM_CLIENT)
        except WireError as error:
            raise self._refuse(sender, f"sent an invalid message: {error}") from error
        if message.sender != sender:
            raise self._refuse(sender, "sent a message in another client's name")
        if message.round_id != self.params.round_id:
            raise self._refuse(sender, f"sent {type(message).__name__} of another round")
        take = STEPS.get((type(self._phase), type(message)))
        if take is None:
            raise self._refuse(sender, f"sent {type(message).__name__}, which is not due")
        if getattr(message, "stage", self._stage) != self._stage:
            raise self._refuse(sender, f"sent {type(message).__name__} of another stage")
        if sender not in self._recipients():
            raise self._refuse(sender, "has dropped out earlier")
        if sender not in self.expected:
            raise self._refuse(sender, f"sent a second {type(message).__name__}")
        take(self, self._phase, message)

    # Each of these checks everything before it changes anything: a refusal leaves the state alone.

    def _take_advert(self, phase: Advertising, message: Advert) -> None:
        params, sender = self.params, message.sender
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
        if message.channel_key in {a.channel_key for a in phase.answers.values()}:
            raise self._refuse(sender, "advertised another client's key")
        phase.answers[sender] = message

    def _take_boxes(self, phase: CollectingShares, message: ShareBoxes) -> None:
        hood = neighbourhood(self.params, self._listed())
        if message.boxes.keys() != set(hood.holders(message.sender)) - {message.sender}:
            raise self._refuse(message.sender, "sent shares for others than its holders")
        if any(len(boxes) != len(self.params.stages) for boxes in message.boxes.values()):
            raise self._refuse(message.sender, "sent shares for other stages")
        phase.answers[message.sender] = message

    def _take_revealed(self, phase: Revealing, message: RevealedSet) -> None:
        if [t.table for t in message.tables] != [t.table for t in self.stage.tables]:
            raise self._refuse(message.sender, "revealed rows of other tables")
        if any(len(t.rows) and int(t.rows[-1]) >= MAX_POSITION for t in message.tables):
            raise self._refuse(message.sender, "revealed a row position over 2^40")
        for t in message.tables:
            rows = self._rows.get(t.table)
            if rows is not None and len(t.rows) and int(t.rows[-1]) >= rows:
                raise self._refuse(
                    message.sender, f"revealed a row beyond table {t.table}'s {rows}"
                )
        if not self.params.quorum <= message.quorum <= self.params.cohort:
            raise self._refuse(message.sender, f"asks for a quorum of {message.quorum}")
        phase.answers[message.sender] = message

    def _take_input(self, phase: Collecting, message: MaskedInput) -> None:
        group, sender = self.stage.group, message.sender
        dense = self._unpacked(group, message.dense, (self.stage.dense,), sender)
        if len(message.tables) != len(self.stage.tables):
            raise self._refuse(sender, "sent other tables")
        rows = [
            self._unpacked(
                group, data, (len(phase.tables[spec.table].members[sender]), spec.width), sender
            )
            for spec, data in zip(self.stage.tables, message.tables, strict=True)
        ]
        group.iadd(phase.dense, dense)
        for spec, words in zip(self.stage.tables, rows, strict=True):
            total = phase.tables[spec.table]
            at = total.index(sender)
            total.words[at] = group.add(total.words[at], words)
        phase.answers[sender] = True

    def _take_signature(self, phase: Endorsing, message: ConsistencySignature) -> None:
        statement = transcript.consistency_statement(
            self.params,
            transcript.roster_digest(self._listed()),
            self._stage,
            binding.agreed_digest(self._context, self._sent.common(self._stage)),
            message.groups,
            phase.survivors,
        )
        public = self._directory.get(message.sender)
        if public is None or not verify(public, message.signature, statement):
            raise self._refuse(message.sender, "signed another statement than the one due")
        phase.answers[message.sender] = Endorsement(
            groups=message.groups, signature=message.signature
        )

    def _take_shares(self, phase: Unmasking, message: RevealedShares) -> None:
        hood = neighbourhood(self.params, self._listed())
        alive = _clients(phase.survivors)
        held = {c for c in self._participants if hood.holds(message.sender, c)}
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
        phase.answers[message.sender] = message

    def _row_keys_fit(self, phase: Unmasking, message: RevealedShares) -> bool:
        if not self.params.strict_quorum:
            return not message.row_keys
        if self._left is None:
            alive = _clients(phase.survivors)
            self._left = {t: surviving(part, alive) for t, part in phase.collected.tables.items()}
        quorum = phase.collected.quorums.get(message.sender, 0)
        due = {
            table: len(rows_meeting_quorum(part, message.sender, quorum, self._left[table]))
            for table, part in phase.collected.tables.items()
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

    def close_phase(self) -> list[Outbound]:
        """End this phase with whoever has answered; when to call it is the engine's choice."""
        close = CLOSES.get(type(self._phase))
        if close is None:
            raise MisuseError(f"there is no phase to close: {self.phase}")
        out: list[Outbound] = close(self, self._phase)
        return out

    def _send_roster(self, phase: Advertising) -> list[Outbound]:
        self._need(len(phase.answers), self.params.min_survivors)
        members = tuple(member_of(phase.answers[c]) for c in sorted(phase.answers))
        self._roster = Roster(
            round_id=self.params.round_id, graph_seed=self._graph_seed, members=members
        )
        self._participants = frozenset(phase.answers)
        self._phase = CollectingShares()
        return self._to_all(self._participants, self._roster)

    def _forward_shares(self, phase: CollectingShares) -> list[Outbound]:
        self._need(len(phase.answers), self.params.min_survivors)
        self._participants = frozenset(phase.answers)
        sharers = _array(self._participants)
        inbox: dict[ClientId, dict[ClientId, tuple[bytes, ...]]] = {c: {} for c in phase.answers}
        for sender, message in phase.answers.items():
            for holder, boxes in message.boxes.items():
                if holder in inbox:
                    inbox[holder][sender] = boxes
        self._begin_inputs()
        return [
            Outbound.of(
                c, ForwardedShares(round_id=self.params.round_id, sharers=sharers, boxes=boxes)
            )
            for c, boxes in inbox.items()
        ]

    def begin_stage(
        self, context: bytes = bytes(32), rows: Mapping[TableId, int] | None = None
    ) -> list[Outbound]:
        """Begin the next stage; `context` is the digest of what everybody must agree on before it.

        `rows` is how many positions each of its tables has: no client may name one beyond them. The
        first stage begins by itself when shares are forwarded.
        """
        if not isinstance(self._phase, Between):
            raise MisuseError(f"a stage cannot begin in phase {self.phase}")
        check_context(context)
        stage, rows = StageId(self._stage + 1), dict(rows or {})
        if not rows.keys() <= {t.table for t in self.params.stage(stage).tables}:
            raise MisuseError(f"stage {stage}: rows of other tables than the stage has")
        if any(not 0 <= count <= MAX_POSITION for count in rows.values()):
            raise MisuseError(f"stage {stage}: a table has 0 to 2^40 rows")
        self._stage, self._context, self._rows = stage, context, rows
        self._begin_inputs()
        return self._to_all(
            self._participants, NextStage(round_id=self.params.round_id, stage=self._stage)
        )

    def _begin_inputs(self) -> None:
        if self.stage.tables:
            self._phase = Revealing()
        else:
            self._phase = Collecting(dense=self.stage.group.zeros(self.stage.dense), tables={})

    def _form_groups(self, phase: Revealing) -> list[Outbound]:
        self._need(len(phase.answers), self.params.min_survivors)
        group = self.stage.group
        quorums = {c: m.quorum for c, m in phase.answers.items()}
        by_client: dict[ClientId, list[TableGroups]] = {c: [] for c in phase.answers}
        sums: dict[TableId, TableSum] = {}
        for i, spec in enumerate(self.stage.tables):
            revealed = {c: m.tables[i].rows for c, m in phase.answers.items()}
            members = groups.form(revealed, quorums)
            shared = groups.shared_rows(members)
            rows = groups.distinct(np.concatenate(list(members.values())))
            wanted = groups.distinct(np.concatenate(list(revealed.values())))
            sums[spec.table] = TableSum(
                rows=rows,
                words=group.zeros((len(rows), spec.width)),
                members=members,
                below_quorum=len(wanted) - len(rows),
            )
            for c in by_client:
                included = np.searchsorted(revealed[c], members[c]).astype(np.uint64)
                by_client[c].append(
                    TableGroups(table=spec.table, included=included, shared=shared[c])
                )
        self._phase = Collecting(dense=group.zeros(self.stage.dense), tables=sums, quorums=quorums)
        return [
            Outbound.of(
                c,
                RowGroups(round_id=self.params.round_id, stage=self._stage, tables=tuple(tables)),
            )
            for c, tables in by_client.items()
        ]

    def _name_survivors(self, phase: Collecting) -> list[Outbound]:
        self._need(len(phase.answers), self.params.min_survivors)
        hood = neighbourhood(self.params, self._listed())
        for client in self._participants:
            # A secret could not be recovered: abort before anything is opened.
            self._need(len(phase.answers.keys() & set(hood.holders(client))), hood.threshold)
        survivors = _array(phase.answers)
        if self.params.threat is Threat.ACTIVE:
            self._phase = Endorsing(collected=phase, survivors=survivors)
        else:
            self._phase = Unmasking(collected=phase, survivors=survivors, recipients=survivors)
        message = SurvivorList(
            round_id=self.params.round_id, stage=self._stage, survivors=survivors
        )
        return self._to_all(phase.answers, message)

    def _send_proof(self, phase: Endorsing) -> list[Outbound]:
        self._need(len(phase.answers), self.params.topology.threshold)
        message = ConsistencyProof(
            round_id=self.params.round_id, stage=self._stage, endorsements=dict(phase.answers)
        )
        self._phase = Unmasking(
            collected=phase.collected, survivors=phase.survivors, recipients=_array(phase.answers)
        )
        return self._to_all(phase.answers, message)

    # -- unmasking

    def _open_sum(self, phase: Unmasking) -> list[Outbound]:
        alive = _clients(phase.survivors)
        seeds, keys = self._recovered(phase)
        remove_masks(
            self.params,
            self._listed(),
            self._stage,
            phase.collected,
            seeds,
            keys,
            context=self._context,
            sent=self._sent,
        )
        tables = phase.collected.tables
        if self.params.strict_quorum:
            tables = release_rows(self.params, self._listed(), self._stage, phase)
        opened = StageSum(
            stage=self._stage,
            survivors=phase.survivors,
            dense=phase.collected.dense,
            tables={
                table: replace(part, shrunk=shrunk(part, alive, self.params.quorum))
                for table, part in tables.items()
            },
        )
        self.sums += (opened,)
        self._left = None
        self._participants = alive
        last = self._stage + 1 == len(self.params.stages)
        self._phase = Done() if last else Between()
        return []

    def _recovered(self, phase: Unmasking) -> tuple[dict[ClientId, Secret], dict[ClientId, Secret]]:
        """The survivors' self-mask seeds and the keys of those who are gone, or `RoundAborted`."""
        seeds, keys = recovery_tasks(
            self.params, self._listed(), self._stage, self._participants, phase
        )
        threshold = neighbourhood(self.params, self._listed()).threshold
        for one in (*seeds, *keys):
            if len(one.shares) < threshold <= len(one.points.keys() & phase.answers.keys()):
                # Enough of its holders answered, but could not unseal its box and have no share.
                reason = f"left {len(one.shares)} holders with a share, {threshold} are needed"
                self.complaints.append(self._refuse(one.owner, reason))
        self._need(min(len(one.shares) for one in (*seeds, *keys)), threshold)
        found_seeds, found_keys = (recover(each, threshold=threshold) for each in (seeds, keys))
        # Holder or owner may be at fault: an owner may have sealed a wrong share to its holder.
        for holder in sorted(found_seeds.bad_holders | found_keys.bad_holders):
            self.complaints.append(self._refuse(holder, "gave a wrong share, or was given one"))
        for owner in sorted(found_seeds.bad_owners | found_keys.bad_owners):
            reason = "shared its secrets wrongly, or too many of its holders gave wrong shares"
            self.complaints.append(self._refuse(owner, reason))
        self._need(len(found_seeds.secrets) + len(found_keys.secrets), len(self._participants))
        return found_seeds.secrets, found_keys.secrets

    # -- small things

    def _need(self, answered: int, needed: int) -> None:
        if answered >= needed:
            return
        name = self.phase
        self._phase = Aborted(phase=name)
        raise RoundAborted(
            round_id=self.params.round_id, phase=name, answered=answered, needed=needed
        )

    def _refuse(self, peer: ClientId, reason: str) -> PeerError:
        return PeerError(reason, round_id=self.params.round_id, phase=self.phase, peer=peer)

    def _listed(self) -> Roster:
        if self._roster is None:
            raise MisuseError("there is no roster yet")
        return self._roster

    def _to_all(self, clients: Iterable[ClientId], message: Any) -> list[Outbound]:
        """One encoding for everybody: the message does not depend on who reads it."""
        data = wire.encode(message)
        return [Outbound(c, type(message).__name__, data) for c in sorted(clients)]


STEPS: Final[Steps] = {
    (Advertising, Advert): Server._take_advert,
    (CollectingShares, ShareBoxes): Server._take_boxes,
    (Revealing, RevealedSet): Server._take_revealed,
    (Collecting, MaskedInput): Server._take_input,
    (Endorsing, ConsistencySignature): Server._take_signature,
    (Unmasking, RevealedShares): Server._take_shares,
}
"""Which message is due in which phase."""

CLOSES: Final[Mapping[type[Any], Callable[..., list[Outbound]]]] = {
    Advertising: Server._send_roster,
    CollectingShares: Server._forward_shares,
    Revealing: Server._form_groups,
    Collecting: Server._name_survivors,
    Endorsing: Server._send_proof,
    Unmasking: Server._open_sum,
}
"""What ends each phase, in the order of a round."""


def _directory(params: SecAggParams, identity: Identity | None) -> Mapping[ClientId, bytes]:
    if identity is None and params.threat is Threat.ACTIVE:
        raise MisuseError("the active setting needs the directory of public keys")
    return {} if identity is None else identity.directory


def _array(clients: Iterable[ClientId]) -> npt.NDArray[np.uint64]:
    return np.array(sorted(clients), dtype=np.uint64)


def _clients(array: npt.NDArray[np.uint64]) -> frozenset[ClientId]:
    return frozenset(ClientId(int(c)) for c in array)
