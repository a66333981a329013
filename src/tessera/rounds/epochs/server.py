"""EpochServer: the server of one fixed group as a role, with a state that can be stored.

Messages go to the protocol's own role, which keeps the running sum; what it assigns is sent with
the period's record, the union and the base beside it. The epoch that members are given is fixed by
the carrier (`open_next`), from the model as it is then, before it hands on a fetch: stored first.

EpochCourse: round after round over fixed groups that wait, from a server's side, without I/O.

A round invites as many clients as the plan's cohort, among those to whom an update is due; whoever
comes delivers, and at the round's end the groups that have become full are merged and the model is
stepped. Groups that somebody has delivered to come first, the oldest base before all: fewer vectors
wait, and bases stay young. A union takes no training and no place in a cohort: of the groups that
are next in turn, every member that is there delivers it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final

import numpy as np

from tessera import wire
from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.ids import SERVER, ClientId, Party, RoundId
from tessera.learning.averaging import TableMean
from tessera.plan import Plan
from tessera.protocols.epochs.group import FixedGroup, OfGroup
from tessera.protocols.epochs.messages import FROM_MEMBER, Assignment, EpochKind
from tessera.protocols.epochs.server import HOUR, GroupServer, GroupServerSetup
from tessera.protocols.machine import Coordinator, Outbound, Over, RoundOutcome
from tessera.rounds.course import Commit, Evaluate
from tessera.rounds.epochs.group import (
    CarriedVectors,
    Cutoffs,
    EpochWork,
    GroupEpochs,
    GroupProgress,
    all_data,
)
from tessera.rounds.events import RoundFinished
from tessera.rounds.messages import RoundResult, merged
from tessera.rounds.party import ServerModel
from tessera.rounds.resolve import resolve
from tessera.rounds.root import draw_root
from tessera.wire.stored import Inner


@wire.record(tag=0x0292)
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGroup:
    """Where the group is, and the protocol's role with the sum so far."""

    at: GroupProgress
    role: Annotated[GroupServer, Inner("role")]


@dataclass(frozen=True, kw_only=True)
class EpochServerSetup(OfGroup):
    """A group and the federation's plan; `wait`: seconds after which members are told to ask;
    `cutoffs` names those of its periods."""

    plan: Plan
    group: FixedGroup
    wait: int = HOUR
    cutoffs: Cutoffs = field(default=all_data, repr=False)

    party: ClassVar[Party] = SERVER


class EpochServer(Coordinator[EpochServerSetup]):
    """The server of one group. It opens sums over all members and nothing else."""

    ROLE = "server of a group's training"
    STATES = (ServingGroup,)
    STEPS: ClassVar = dict.fromkeys(
        ((ServingGroup, kind) for kind in FROM_MEMBER), GroupServer.receive
    )
    FROM_CLIENT = FROM_MEMBER

    def __init__(self, setup: EpochServerSetup) -> None:
        role = GroupServer(GroupServerSetup(group=setup.group, wait=setup.wait))
        super().__init__(setup, ServingGroup(at=GroupProgress(), role=role))
        self._resumed()

    def _set_up(self, setup: EpochServerSetup) -> None:
        super()._set_up(setup)
        self.invited = frozenset(setup.group.members)
        self._role_setup = GroupServerSetup(group=setup.group, wait=setup.wait)

    def _supplied(self) -> Mapping[str, Any]:
        return {"role": lambda data, kept: GroupServer.wake(data, kept, self._role_setup)}

    def _resume(self, snapshot: bytes, messages: Mapping[bytes, bytes]) -> None:
        super()._resume(snapshot, messages)
        self._resumed()

    def _resumed(self) -> None:
        if isinstance(self.state, ServingGroup):
            setup, vectors = self.setup, CarriedVectors(self.state.role)
            at, cutoffs = self.state.at, setup.cutoffs
            self.epochs = GroupEpochs(setup.plan, setup.group, vectors, at, cutoffs)

    @property
    def phase(self) -> str:
        return self.state.role.phase if isinstance(self.state, ServingGroup) else super().phase

    @property
    def expected(self) -> frozenset[Party]:
        """Whose deposit or delivery is due."""
        return self.state.role.expected if isinstance(self.state, ServingGroup) else frozenset()

    @property
    def has_begun(self) -> bool:
        """Whether all have deposited a mask key, so that there can be epochs."""
        role = self.state.role
        return bool(role.open_epoch is not None or role.awaits_epoch)

    def open_next(self, model: ServerModel, round_id: RoundId) -> None:
        """Fix the next epoch from this model, if one is to be fixed."""
        if self.has_begun and not self.epochs.at.retired and not self.epochs.full:
            self.epochs.opened(model, round_id)

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        """The protocol's role judges what is due; its assignments are sent with their inputs."""
        self._check_open()
        role: GroupServer = self.state.role
        out = role.receive(sender, data)
        if isinstance(role.state, Over):  # a member has left
            self._ended(role.state.reason)
        return [
            self._with_inputs(each) if each.kind == Assignment.__name__ else each for each in out
        ]

    def _with_inputs(self, assigned: Outbound) -> Outbound:
        """The assignment, with everything that its header has digests of and a member lacks."""
        at = self.epochs.at
        if at.open is None:  # to a member that does not remember its delivery of the last one
            work = EpochWork(assignment=assigned.data, record=self.epochs.record)
            return Outbound.of(assigned.to, work)
        base, union = at.open.base, at.open.union
        first = at.open.header.epoch == at.union_epoch + 1  # who comes later has the union
        work = EpochWork(
            assignment=assigned.data,
            record=at.open.record,
            union=union.data if first and union is not None else b"",
            base=b"" if base is None else base.data,
        )
        return Outbound.of(assigned.to, work)

    @property
    def full(self) -> bool:
        """Whether everybody has delivered, and the sum waits to be taken."""
        return isinstance(self.state, ServingGroup) and self.epochs.full

    def take(self, model: ServerModel, noise: Secret) -> RoundResult | None:
        """What a full epoch came to (`GroupEpochs.take`); the group may be retired for it."""
        result = self.epochs.take(model, noise)
        if self.epochs.at.retired:
            self.over(RoundOutcome.ABORTED, self.epochs.at.retired)
        return result

    @property
    def due(self) -> frozenset[ClientId]:
        """Members that have not delivered the epoch that is open, or will be."""
        return self.epochs.due if isinstance(self.state, ServingGroup) else frozenset()

    def retire(self, reason: str) -> list[Outbound]:
        """For good: members are told, and nothing of an open epoch is used or kept."""
        out: list[Outbound] = self.state.role.retire(reason)
        self._ended(reason)
        return out

    def _ended(self, reason: str) -> None:
        self.epochs.at.retired, self.epochs.at.open = reason, None
        self.over(RoundOutcome.ABORTED, reason)


AHEAD: Final = 2
"""A union is asked for once a group's turn is within so many times the groups of a cohort."""
LEAVER: Final = "a member has not come for longer than the plan waits"

Make = Callable[[int, tuple[ClientId, ...]], GroupEpochs]
"""A group that is met for the first time, by its number."""


class EpochCourse:
    """A plan, its groups and the server's model, round after round."""

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[tuple[ClientId, ...]],
        make: Make,
        model: ServerModel,
        entropy: Entropy,
        *,
        evaluate: Evaluate | None = None,
        commit: Commit | None = None,
    ) -> None:
        """`commit` makes a stepped model durable before anybody hears of it; `evaluate` tests it,
        in the rounds in which that is due."""
        self.plan, self.model = plan, model
        self.members = list(groups)
        self.groups: dict[int, GroupEpochs] = {}
        """By number, those that somebody was invited of."""
        self.next_round = 0
        self.counted: tuple[ClientId, ...] = ()
        """Whose updates the last round merged."""
        self._number = {client: at for at, group in enumerate(groups) for client in group}
        self._make, self._entropy = make, entropy
        self._rows = resolve(plan).rows
        self._evaluate, self._commit = evaluate, commit

    def form(self, groups: Iterable[tuple[ClientId, ...]]) -> None:
        """Groups of newcomers; those that there are stay as they are."""
        for group in groups:
            self._number.update(dict.fromkeys(group, len(self.members)))
            self.members.append(group)

    def group_of(self, client: ClientId) -> GroupEpochs:
        """The group of a client; KeyError for one that is left over."""
        return self.group(self._number[client])

    def group(self, number: int) -> GroupEpochs:
        if number not in self.groups:
            self.groups[number] = self._make(number, self.members[number])
        return self.groups[number]

    @property
    def met(self) -> list[GroupEpochs]:
        """Groups that somebody was invited of, by number: sums are merged in this order."""
        return [self.groups[at] for at in sorted(self.groups)]

    # --- who is due -----------------------------------------------------------------------------

    def unions(self, round_id: RoundId) -> list[ClientId]:
        """To whom a union is due in this round: of groups that wait for one, and of those whose
        turn is near and who have none yet."""
        if not self._rows.union or not self.members:
            return []
        wanted = AHEAD * -(-self.plan.cohort // len(self.members[0]))
        for at in self._turns(round_id)[:wanted]:
            self.group(at)
        due = (g for g in self.met if not g.at.retired and g.next_kind is EpochKind.UNION)
        return sorted(client for group in due for client in group.due)

    def invited(self, round_id: RoundId) -> list[ClientId]:
        """The cohort of a round, among those to whom an update is due: fewer, if no more are."""
        updates = [g for g in self.met if not g.at.retired and g.next_kind is EpochKind.UPDATE]
        order = sorted((g for g in updates if g.begun and g.due), key=_base_round)
        places = self.plan.cohort - sum(len(g.due) for g in order)
        for at in self._turns(round_id):
            if places <= 0:
                break
            if not self._rows.union or at in self.groups:
                group = self.group(at)
                if group.next_kind is EpochKind.UPDATE and not group.begun:
                    order.append(group)
                    places -= len(group.due)
        due = [client for group in order for client in sorted(group.due)]
        return due[: self.plan.cohort]

    def _turns(self, round_id: RoundId) -> list[int]:
        """Groups with nothing under way, in the order in which they are invited: all alike."""
        rng = np.random.default_rng([self.plan.seed, int(round_id)])
        order: list[int] = rng.permutation(len(self.members)).tolist()
        return [at for at in order if at not in self.groups or self._rests(self.groups[at])]

    @staticmethod
    def _rests(group: GroupEpochs) -> bool:
        waits = group.next_kind is EpochKind.UNION and group.at.open is not None
        return not (group.at.retired or group.begun or group.full or waits)

    # --- what comes of it -----------------------------------------------------------------------

    def take_unions(self) -> int:
        """Read the unions that have become full; how many did not decode."""
        lost = 0
        for group in self.met:
            if group.full and group.next_kind is EpochKind.UNION:
                group.take(self.model, self._noise_secret(group))
                lost += group.at.union is None
        return lost

    def conclude(
        self,
        round_id: RoundId,
        invited: Sequence[ClientId],
        delivered: int,
        *,
        measured: bool = True,
        secure: Callable[[int], bool] = lambda _: True,
        undecoded: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> RoundFinished:
        """Merge the groups that are full, step, commit and test the model. `secure` says whether
        the vectors of a group, by its number, were masked: a round is if all that it merged were.

        A round in which none has become full changes nothing: what was delivered waits.
        """
        results, waited, outside = list[RoundResult](), list[int](), 0
        masked = measured
        for group in [g for g in self.met if g.full]:
            assert group.at.open is not None
            age = int(round_id) - int(group.at.open.round_id)
            result = group.take(self.model, self._noise_secret(group))
            if result is None or result.out_of_bounds:
                outside += result is not None
                continue
            masked = masked and secure(group.group.number)
            waited.append(age)
            results.append(aged(result, self.plan.groups.weight(age)))
        self._retire_leavers(round_id)
        total = merged(results) if results else None
        self.counted = () if total is None else total.survivors
        if total is not None:
            total = resolve(self.plan).noise.on_means(total, self._entropy, round_id, None)
            self.model.step(total, round_id)
            if self._commit is not None:
                self._commit(round_id, self.model)
        self.next_round = int(round_id) + 1
        metric = self._evaluate(round_id) if self._evaluate is not None else None
        return RoundFinished(
            round_id=round_id,
            cohort=len(invited),
            survivors=len(self.counted),
            union_rows=0 if total is None else total.union_rows,
            union_residual=undecoded,
            rows_opened=0 if total is None else total.rows_opened,
            rows_below_quorum=0,
            rows_shrunk=0,
            rows_lost=0,
            rows_out_of_bounds=0 if total is None else total.rows_out_of_bounds,
            weight=0 if total is None else total.weight,
            measured=measured,
            secure=masked,
            bytes_up={},
            bytes_down={},
            client_seconds={},
            server_seconds={},
            epsilon=math.nan,
            condition="",
            metric=metric,
            delivered=delivered,
            groups_opened=len(results),
            groups_aborted=outside,
            groups_retired=sum(bool(g.at.retired) for g in self.met),
            waited=tuple(waited),
            seconds=clock(),
        )

    def _retire_leavers(self, round_id: RoundId) -> None:
        """Groups that wait for longer than the plan allows; nothing of their epoch is used."""
        for group in self.met:
            at = group.at.open
            if at is not None and int(round_id) - int(at.round_id) >= self.plan.groups.longest_wait:
                group.retire(LEAVER)

    def _noise_secret(self, group: GroupEpochs) -> Secret:
        """What a trusted server's noise on this group's next sum follows from."""
        at = RoundId(group.at.number + 1)
        root = draw_root(self._entropy, self.plan, at, f"{SERVER} of group {group.group.number}")
        return root.secret(Label.SUM_NOISE)


def aged(result: RoundResult, weight: float) -> RoundResult:
    """The same means, scaled: what was computed from an old model moves the new one less."""
    if weight == 1.0:
        return result
    tables = {
        name: TableMean(part.ids, part.mean * weight, part.counts)
        for name, part in result.tables.items()
    }
    return replace(result, dense=result.dense * weight, tables=tables)


def _base_round(group: GroupEpochs) -> int:
    """The round in which its base was fixed: the oldest first."""
    assert group.at.open is not None
    return int(group.at.open.round_id)
