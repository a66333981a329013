"""EpochFederation: a simulation of fixed groups that wait, in one process.

What a server does is an `EpochCourse`. Here are the members with their rows and secrets, who is
there in which round, and figures that no server could know. A member that is absent delivers
nothing in that round, and the group waits for it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tessera.crypto.entropy import Entropy, RootedEntropy
from tessera.crypto.group import Words
from tessera.crypto.keys import identities
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import Ids, ModelUpdate, Submodel
from tessera.protocols.epochs import masks
from tessera.protocols.epochs.group import FixedGroup, Leaf
from tessera.rounds.epochs.course import EpochCourse
from tessera.rounds.epochs.group import GroupEpochs, MemoryVectors, OpenEpoch
from tessera.rounds.epochs.vectors import UpdateLayout
from tessera.rounds.epochs.work import MemberWork
from tessera.rounds.events import Event, RoundFinished, RoundStarted
from tessera.rounds.local_state import LocalState, Word
from tessera.rounds.root import coins_of
from tessera.rounds.select import Selection
from tessera.simulation.faults import dropouts
from tessera.simulation.federation import Federation
from tessera.simulation.subcohort import TrainingOutcome, failing_alone


@dataclass(slots=True)
class Visit:
    """One member that is there: what it is given for the open epoch, and what it does with it."""

    group: GroupEpochs
    epoch: OpenEpoch
    work: MemberWork
    entropy: Entropy = field(repr=False)
    chosen: Selection | None = field(default=None, repr=False)

    @property
    def coins(self) -> RootedEntropy:
        """What this member draws from in this epoch."""
        group, header = self.group.group, self.epoch.header
        return masks.coins(masks.fresh_root(self.entropy, group, self.work.me, header.epoch))

    def union_words(self) -> Words:
        """Freeze this period's rows; what this member puts into the union."""
        header = self.epoch.header
        self.work.freeze(header.period, self.entropy)
        return self.work.union_words(header.period, header.epoch, self.coins)

    def fetch(self) -> Submodel:
        """Charge for the epoch, and take the base."""
        header, base = self.epoch.header, self.epoch.base
        assert base is not None
        self.work.charge(header.epoch, header.period)
        self.chosen = self.work.selection(header.period, self._union, self.coins)
        return self.work.submodel(base.message, self.chosen)

    def update_words(self, update: ModelUpdate | None) -> Words:
        """What this member delivers of its update."""
        assert self.chosen is not None
        layout = UpdateLayout(self.work.plan, self._union)
        return self.work.update_words(update, self.chosen, layout, self.epoch.round_id, self.coins)

    @property
    def _union(self) -> Mapping[str, Ids]:
        union = self.epoch.union
        return self.work.union_of(None if union is None else union.message)


class EpochFederation(Federation):
    """A plan with fixed groups, its population and the model, round after round."""

    @cached_property
    def epochs(self) -> EpochCourse:
        """The groups and where they are."""
        groups = [self._group(number, members) for number, members in enumerate(self._formed)]
        evaluate = None if self._evaluate is None else self._tested
        return EpochCourse(self.plan, groups, self.model, self._entropy, evaluate=evaluate)

    @property
    def _formed(self) -> Sequence[tuple[ClientId, ...]]:
        return self.cohorts.groups

    def _group(self, number: int, members: Sequence[ClientId]) -> GroupEpochs:
        signers = identities(members, self._entropy, self.plan.federation)
        leaves = tuple(
            Leaf(
                federation=self.plan.federation,
                client=client,
                key=signers[client].directory[client],
                serial=0,
            )
            for client in members
        )
        group = FixedGroup(
            federation=self.plan.federation,
            plan=self.plan.lasting_digest,
            number=number,
            snapshot=1,
            snapshot_digest=bytes(32),
            values=(bytes(32), bytes(32)),
            beacon=bytes(32),
            leaves=leaves,
        )
        return GroupEpochs(self.plan, group, MemoryVectors(frozenset(members)))

    @property
    def next_round(self) -> int:
        return self.epochs.next_round

    @property
    def survivors(self) -> Mapping[ClientId, ClientId]:
        return {client: client for client in self.epochs.counted}

    def coins(self, round_id: RoundId, client: ClientId) -> Secret:
        """What the training of a member draws from, in the epoch that is open to it."""
        return coins_of(self._visit(client, round_id).coins)

    # --- rounds ---------------------------------------------------------------------------------

    def round(self) -> Iterator[Event]:
        started, course = time.monotonic(), self.epochs
        round_id = RoundId(course.next_round)
        undecoded = self._collect_unions(round_id)
        invited = course.invited(round_id)
        yield RoundStarted(
            round_id=round_id, period=0, cohort=tuple(int(c) for c in sorted(invited))
        )
        gone = self._absent(round_id, invited)
        visits = {c: self._visit(c, round_id) for c in sorted(invited) if c not in gone}
        training = self._train(visits)
        ended = course.conclude(
            round_id,
            invited,
            len(visits),
            measured=False,
            undecoded=undecoded,
            clock=lambda: time.monotonic() - started,
        )
        self._settle_counted()
        yield self._measured(ended, visits, training)

    def _collect_unions(self, round_id: RoundId) -> int:
        """Everybody who is there delivers a union that is due; how many did not decode."""
        due = self.epochs.unions()
        if not due:
            return 0
        gone = self._absent(round_id, due)
        for client in due:
            if client not in gone:
                visit = self._visit(client, round_id)
                _vectors(visit.group).add(client, visit.union_words())
        return self.epochs.take_unions()

    def _absent(self, round_id: RoundId, clients: Sequence[ClientId]) -> frozenset[ClientId]:
        if self._faults is None:
            return frozenset()
        return frozenset(dropouts(self._faults(round_id, sorted(clients))))

    def _visit(self, client: ClientId, round_id: RoundId) -> Visit:
        group = self.epochs.group_of(client)
        epoch = group.opened(self.model, round_id)
        local: LocalState = self.participants[client].local
        return Visit(group, epoch, MemberWork(group.plan, client, local), self._entropy)

    def _train(self, visits: Mapping[ClientId, Visit]) -> TrainingOutcome:
        """Train everybody who is there, those from bases of one round together."""
        training, trainer = TrainingOutcome(), failing_alone(self._trainer)
        by_base: defaultdict[RoundId, dict[ClientId, Submodel]] = defaultdict(dict)
        for client, visit in visits.items():
            by_base[visit.epoch.round_id][client] = visit.fetch()
        for round_id, submodels in sorted(by_base.items()):
            training.add(trainer(round_id, submodels))
        for client, visit in visits.items():
            _vectors(visit.group).add(client, visit.update_words(training.updates.get(client)))
        return training

    def _settle_counted(self) -> None:
        """Members of groups that opened hear of it, as with the certificate in their next visit."""
        for client in self.epochs.counted:
            local = self.participants[client].local
            if (pending := local.unsettled) is not None:
                local.settle(pending, counted=True, by=Word.CERTIFICATE)

    def _tested(self, round_id: RoundId) -> float | None:
        assert self._evaluate is not None
        self._settle_counted()
        return self._evaluate(round_id)

    def _measured(
        self, event: RoundFinished, visits: Mapping[ClientId, Visit], training: TrainingOutcome
    ) -> RoundFinished:
        """The event with what a simulation knows beside the server."""
        work = [visit.work for visit in visits.values()]
        cut, values = sum(w.clipped.cut for w in work), sum(w.clipped.of for w in work)
        worst = max(
            (self.participants[c].local.ledger.guarantee() for c in visits),
            key=lambda g: g.epsilon,
            default=None,
        )
        cohort = max(1, event.cohort)
        return replace(
            event,
            client_seconds={"train": sum(training.seconds.values()) / cohort},
            epsilon=0.0 if worst is None else worst.epsilon,
            condition="" if worst is None else worst.condition,
            loss=training.loss / training.examples if training.examples else None,
            not_finite=training.not_finite + sum(bool(w.broken) for w in work),
            clipped=cut / values if values else 0.0,
            groups_not_finite=training.groups_not_finite,
            rows_over_cap=sum(w.left_out for w in work),
        )


def _vectors(group: GroupEpochs) -> MemoryVectors:
    assert isinstance(group.vectors, MemoryVectors)
    return group.vectors
