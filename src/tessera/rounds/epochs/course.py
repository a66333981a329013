"""EpochCourse: round after round over fixed groups that wait, from a server's side, without I/O.

A round invites as many clients as the plan's cohort, among those to whom an update is due; whoever
comes delivers, and at the round's end the groups that have become full are merged and the model is
stepped. Groups that somebody has delivered to come first, the oldest base before all: fewer vectors
wait, and bases stay young. A union takes no training and no place in a cohort: every member that is
there delivers it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.averaging import TableMean
from tessera.plan import Plan
from tessera.protocols.epochs.chain import EpochKind
from tessera.rounds.course import Commit, Evaluate
from tessera.rounds.epochs.group import GroupEpochs
from tessera.rounds.events import RoundFinished
from tessera.rounds.resolve import resolve
from tessera.rounds.root import draw_root
from tessera.rounds.server_model import ServerModel
from tessera.rounds.words import RoundResult, merged

NOBODY: Final[tuple[ClientId, ...]] = ()


class EpochCourse:
    """A plan, its groups and the server's model, round after round."""

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[GroupEpochs],
        model: ServerModel,
        entropy: Entropy,
        *,
        evaluate: Evaluate | None = None,
        commit: Commit | None = None,
    ) -> None:
        """`commit` makes a stepped model durable before anybody hears of it; `evaluate` tests it,
        in the rounds in which that is due."""
        self.plan, self.groups, self.model = plan, list(groups), model
        self.next_round = 0
        self.counted: tuple[ClientId, ...] = NOBODY
        """Whose updates the last round merged."""
        self._of = {member: group for group in self.groups for member in group.group.members}
        self._entropy, self._evaluate, self._commit = entropy, evaluate, commit
        self._delivered = 0

    def group_of(self, client: ClientId) -> GroupEpochs:
        """The group of a client; KeyError for one that is left over."""
        return self._of[client]

    # --- who is due -----------------------------------------------------------------------------

    def unions(self) -> list[ClientId]:
        """Everybody to whom the union of a period is due."""
        waiting = (g for g in self.groups if g.next_kind is EpochKind.UNION)
        return sorted(client for group in waiting for client in group.due)

    def invited(self, round_id: RoundId) -> list[ClientId]:
        """The cohort of a round, among those to whom an update is due: fewer, if no more are."""
        open_groups = [g for g in self.groups if g.next_kind is EpochKind.UPDATE and g.due]
        begun = sorted((g for g in open_groups if g.begun), key=_age)
        fresh = [g for g in open_groups if not g.begun]
        rng = np.random.default_rng([self.plan.seed, int(round_id)])
        order = [*begun, *(fresh[at] for at in rng.permutation(len(fresh)))]
        due = [client for group in order for client in sorted(group.due)]
        return due[: self.plan.cohort]

    # --- what comes of it -----------------------------------------------------------------------

    def take_unions(self) -> int:
        """Read the unions that have become full; how many did not decode."""
        lost = 0
        for group in self.groups:
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
        undecoded: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> RoundFinished:
        """Merge the groups that are full, step, commit and test the model.

        A round in which none has become full changes nothing: what was delivered waits.
        """
        plan, results, ages = self.plan, list[RoundResult](), list[int]()
        outside = 0
        for group in [g for g in self.groups if g.full]:
            assert group.at.open is not None
            age = int(round_id) - int(group.at.open.round_id)
            result = group.take(self.model, self._noise_secret(group))
            if result is None or result.out_of_bounds:
                outside += result is not None
                continue
            ages.append(age)
            results.append(aged(result, plan.groups.weight(age)))
        total = merged(results) if results else None
        self.counted = NOBODY if total is None else total.survivors
        if total is not None:
            total = resolve(plan).noise.on_means(total, self._entropy, round_id, None)
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
            secure=measured,
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
            groups_retired=sum(bool(g.at.retired) for g in self.groups),
            age=sum(ages) / len(ages) if ages else 0.0,
            seconds=clock(),
        )

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


def _age(group: GroupEpochs) -> int:
    """The round in which its base was fixed: the oldest first."""
    assert group.at.open is not None
    return int(group.at.open.round_id)
