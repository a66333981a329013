"""Course: round after round from a server's side, without I/O.

Who is drawn, who is summed with whom, the server's role in each part, and what becomes of the sums:
merged, stepped into the model, committed, tested, told as an event. Who carries the messages, in
one process or between many, is no business of a course: an engine drives it so.

    drawn = course.draw()
    for part in drawn.parts:
        server = course.server(drawn, part)     # carried to its end: a result, or an abort
    event = course.conclude(drawn, outcomes)

With two servers the helper has a course of its own (`HelperCourse`): a model of its own, stepped
from what the leader opened to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from tessera.crypto.keys import Identity
from tessera.errors import ConfigError, MisuseError, RoundAborted
from tessera.ids import ClientId, RoundId
from tessera.plan import Plan
from tessera.rounds.client import ClientRound
from tessera.rounds.cohorts import Cohorts, Named, Unmasked
from tessera.rounds.events import RoundAbort, RoundFinished, RoundStarted
from tessera.rounds.messages import OUT_OF_BOUNDS, RoundResult, merged
from tessera.rounds.party import (
    ClientRoundSetup,
    HelperParty,
    HelperRoundSetup,
    ServerModel,
    ServerParty,
    ServerRoundSetup,
    StoredRole,
)
from tessera.rounds.resolve import resolve
from tessera.rounds.schedule import Schedule
from tessera.rounds.server import ServerRound
from tessera.rounds.sums import Sum
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound

Evaluate = Callable[[RoundId], float | None]
Commit = Callable[[RoundId, ServerModel], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPart:
    """Clients of a cohort that are summed together, and the plan among them."""

    plan: Plan
    named: Named


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRound:
    """A round's cohort, and its parts: those who are masked first, then those in the clear."""

    round_id: RoundId
    period: int
    named: Named
    parts: tuple[RoundPart, ...]

    @property
    def started(self) -> RoundStarted:
        cohort = tuple(int(c) for c in sorted(self.named))
        return RoundStarted(round_id=self.round_id, period=self.period, cohort=cohort)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOutcome:
    """What came of a part: its result, or why there is none.

    `excluded` counts by reason those who answered and are not in the sum; `writing` says how two
    servers had each table written; `reason` is why it was aborted, if more is known than how many
    were missing.
    """

    part: RoundPart
    result: RoundResult | None = None
    aborted: RoundAborted | None = None
    reason: str = ""
    excluded: Mapping[str, int] = field(default_factory=dict)
    writing: Mapping[str, str] = field(default_factory=dict)


class Course:
    """A plan, its clients and the server's model, round after round."""

    def __init__(
        self,
        plan: Plan,
        clients: Collection[ClientId],
        model: ServerModel,
        party: ServerParty,
        *,
        evaluate: Evaluate | None = None,
        commit: Commit | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        """`commit` makes a stepped model durable before anybody hears of it; `evaluate` tests it,
        in the rounds in which that is due. `schedule` has everybody's places, where they do not
        follow from the plan's seed.
        """
        if not resolve(plan).sum.federated:
            raise ConfigError(
                f"a course of rounds does not run scheme {plan.scheme.value!r}: it has none",
                hint="name a federated scheme",
            )
        if resolve(plan).cohorts.waits:
            raise MisuseError("fixed groups wait: their rounds are those of an EpochCourse")
        self.plan, self.model = plan, model
        self.cohorts = Cohorts(plan, clients, party.entropy, schedule=schedule)
        self.survivors: dict[ClientId, ClientId] = {}  # of the last round: who each name is
        self.next_round = 0
        self._party, self._evaluate, self._commit = party, evaluate, commit

    # --- who, and with whom ---------------------------------------------------------------------

    def draw(
        self, unmasked: Unmasked | None = None, there: Collection[ClientId] | None = None
    ) -> DrawnRound:
        """The next round, among those who are there, if that is known."""
        self._must_not_be_over()
        round_id = RoundId(self.next_round)
        self.cohorts.there = there
        drawn = self._drawn(round_id, self.cohorts.sample(round_id), unmasked)
        self.next_round += 1
        return drawn

    def resume(self, round_id: RoundId, record: str) -> DrawnRound:
        """A round that was drawn, by the record of its cohort (`Cohorts.record`)."""
        self.next_round = int(round_id) + 1
        return self._drawn(round_id, self.cohorts.restore(record), None)

    def skip_to(self, round_id: int, unmasked: Unmasked | None = None) -> Iterator[DrawnRound]:
        """The rounds before this one, drawn once more; the next is this one.

        They follow from the plan's seed and the entropy, which must be the same as then.
        """
        while self.next_round < round_id:
            yield self.draw(unmasked)

    @property
    def is_over(self) -> bool:
        """Whether the training has had all rounds for which its noise is sized."""
        return self.plan.bounds_rounds and self.next_round >= self.plan.participation.rounds

    def _must_not_be_over(self) -> None:
        rounds = self.plan.participation.rounds
        if self.is_over:
            raise ConfigError(
                f"the training has had its {rounds} rounds, and clients are in no other",
                hint="a longer training is another one: another federation, with noise of its own",
            )

    def _drawn(
        self, round_id: RoundId, chosen: Sequence[ClientId], unmasked: Unmasked | None
    ) -> DrawnRound:
        named = self.cohorts.named(round_id, chosen)
        return DrawnRound(
            round_id=round_id,
            period=self.plan.period(round_id),
            named=named,
            parts=tuple(
                RoundPart(plan=plan, named={name: named[name] for name in names})
                for plan, names in self.cohorts.rule.split(named, self.cohorts.groups, unmasked)
            ),
        )

    def given_up(self, drawn: DrawnRound) -> RoundAbort | None:
        """Why a round is not begun with the cohort that was drawn; None: it is."""
        came = len(drawn.named)
        if not (reason := self.cohorts.rule.given_up(came)):
            return None
        needed = self.plan.fewest_clients
        return RoundAbort(
            round_id=drawn.round_id, phase="draw", answered=came, needed=needed, reason=reason
        )

    # --- the server in a part -------------------------------------------------------------------

    def server(
        self,
        drawn: DrawnRound,
        part: RoundPart,
        identity: Identity | None = None,
        stored: StoredRole | None = None,
        ideal: Sum | None = None,
    ) -> RoundServer:
        """The server's role in a part, new or woken. `identity` has its clients' keys; `ideal` is a
        sum in memory, in place of the plan's."""
        setup = ServerRoundSetup(
            plan=part.plan,
            round_id=drawn.round_id,
            dense=self.model.dense,
            tables=self.model.tables,
            derived=self.model.derived,
            invited=tuple(part.named),
            own=self._party,
            identity=identity,
            ideal=ideal,
        )
        return server_role(setup, stored)

    # --- what comes of it -----------------------------------------------------------------------

    def conclude(
        self,
        drawn: DrawnRound,
        outcomes: Sequence[PartOutcome],
        *,
        measured: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
        largest: Mapping[ClientId, int] | None = None,
    ) -> RoundFinished | RoundAbort:
        """Merge what the parts opened, step, commit and test the model.

        The event is as far as a server can know it: it has no client's seconds, bytes or epsilon.
        `measured`: messages were sent. `clock` says how long the round took, once all is done.
        `largest` is for `CentralPaperNoise.on_means`.
        """
        plan, round_id = self.plan, drawn.round_id
        results = [each.result for each in outcomes if each.result is not None]
        lost = [each for each in outcomes if each.aborted is not None]
        if lost:
            return _abort(lost[-1])
        result = mergeable(results)
        if result is None:
            return RoundAbort(
                round_id=round_id,
                phase="merge",
                answered=sum(len(each.survivors) for each in results),
                needed=plan.least_survivors,
                reason=OUT_OF_BOUNDS,
            )
        self.survivors = {name: drawn.named[name] for name in result.survivors}
        result = self.cohorts.rule.divided(result)
        result = resolve(plan).noise.on_means(result, self._party.entropy, round_id, largest)
        self.model.step(result, round_id)
        if self._commit is not None:
            self._commit(round_id, self.model)
        metric = self._evaluate(round_id) if self._evaluate is not None else None
        return RoundFinished(
            round_id=round_id,
            cohort=len(drawn.named),
            survivors=len(result.survivors),
            union_rows=result.union_rows,
            union_residual=result.union_residual,
            rows_opened=result.rows_opened,
            rows_below_quorum=result.below_quorum,
            rows_shrunk=result.shrunk,
            rows_lost=result.lost,
            rows_out_of_bounds=result.rows_out_of_bounds,
            weight=result.weight,
            measured=measured,
            secure=measured and resolve(drawn.parts[0].plan).sum.hides,
            bytes_up={},
            bytes_down={},
            client_seconds={},
            server_seconds={},
            epsilon=math.nan,
            condition="",
            metric=metric,
            excluded=_added(each.excluded for each in outcomes if each.result is not None),
            unmasked=sum(
                len(part.named) for part in drawn.parts if part.plan.scheme is not plan.scheme
            ),
            writing=outcomes[0].writing,
            seconds=clock(),
        )


class HelperCourse:
    """The second server, round after round: its own model, by what the leader opened to it."""

    def __init__(
        self, plan: Plan, model: ServerModel, party: HelperParty, *, commit: Commit | None = None
    ) -> None:
        if not resolve(plan).sum.helpers:
            raise MisuseError(f"scheme {plan.scheme} has no helper")
        self.plan, self.model = plan, model
        self._party, self._commit = party, commit

    def helper(
        self,
        round_id: RoundId,
        directory: Mapping[ClientId, bytes],
        stored: StoredRole | None = None,
        ideal: Sum | None = None,
    ) -> HelperRound:
        """The helper's role in a round, new or woken, over its model as it is now."""
        setup = HelperRoundSetup(
            plan=self.plan,
            round_id=round_id,
            dense=self.model.dense,
            tables=self.model.tables,
            derived=self.model.derived,
            own=self._party,
            directory=directory,
            ideal=ideal,
        )
        return helper_role(setup, stored)

    def conclude(self, round_id: RoundId, result: RoundResult | None) -> None:
        """Step by the means that follow from the sum it was shown; by none, if it was shown none.

        A leader that stepped otherwise finds out in the next round, whose handshake compares
        digests of both models.
        """
        stepped = None if result is None else mergeable([result])
        if stepped is None:
            return
        self.model.step(resolve(self.plan).cohorts.divided(stepped), round_id)
        if self._commit is not None:
            self._commit(round_id, self.model)


def mergeable(results: Sequence[RoundResult]) -> RoundResult | None:
    """One result of those whose sums honest clients can have reached; None if none is left."""
    possible = [each for each in results if not each.out_of_bounds]
    return merged(possible) if possible else None


def _abort(outcome: PartOutcome) -> RoundAbort:
    aborted = outcome.aborted
    assert aborted is not None
    return RoundAbort(
        round_id=aborted.round_id,
        phase=aborted.phase,
        answered=aborted.answered,
        needed=aborted.needed,
        reason=outcome.reason,
    )


def _added(counts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for reason, count in each.items():
            total[reason] = total.get(reason, 0) + count
    return total


# --- roles ----------------------------------------------------------------------------------------
#
# The roles of a round by scheme, new or woken.

RoundClient: TypeAlias = ClientRound | TwoServerClientRound
RoundServer: TypeAlias = ServerRound | LeaderRound

R = TypeVar("R", ClientRound, TwoServerClientRound, ServerRound, LeaderRound, HelperRound)


def client_role(setup: ClientRoundSetup, stored: StoredRole | None = None) -> RoundClient:
    if resolve(setup.plan).sum.two_servers:
        return _role(TwoServerClientRound, setup, stored)
    return _role(ClientRound, setup, stored)


def server_role(setup: ServerRoundSetup, stored: StoredRole | None = None) -> RoundServer:
    """The server's, or the leader's of two."""
    if resolve(setup.plan).sum.two_servers:
        return _role(LeaderRound, setup, stored)
    return _role(ServerRound, setup, stored)


def helper_role(setup: HelperRoundSetup, stored: StoredRole | None = None) -> HelperRound:
    return _role(HelperRound, setup, stored)


def _role(kind: type[R], setup: Any, stored: StoredRole | None) -> R:
    if stored is None:
        return kind(setup)
    return kind.wake(stored.snapshot, stored.messages, setup)
