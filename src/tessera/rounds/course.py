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
from typing import Final

from tessera.crypto.keys import Identity
from tessera.errors import MisuseError, RoundAborted
from tessera.ids import ClientId, RoundId
from tessera.plan import Plan
from tessera.rounds import schemes
from tessera.rounds.cohorts import Cohorts
from tessera.rounds.encode import RoundResult, by_expected, merged
from tessera.rounds.events import RoundAbort, RoundFinished, RoundStarted
from tessera.rounds.fixed_groups import FixedGroup
from tessera.rounds.messages import OUT_OF_BOUNDS
from tessera.rounds.noise import noise_of
from tessera.rounds.roles import HelperParty, RoundServer, ServerParty, StoredRole
from tessera.rounds.server_model import ServerModel
from tessera.rounds.two_server.helper import HelperRound

TOO_FEW_DRAWN: Final = "the coins drew too few clients"
TOO_MANY_DRAWN: Final = "the coins drew more clients than a sum has room for"
LEAST_TOGETHER: Final = 3
LEAST_SHARE: Final = 0.1
"""If fewer clients of a cohort would remain in the secure sum, all of them take part in it."""

Named = Mapping[ClientId, ClientId]
"""Who each name of a round is."""
Unmasked = Callable[[ClientId], bool]
"""Whether a client sends its update unmasked, where the plan leaves that to it."""
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
        groups: Sequence[FixedGroup] = (),
        evaluate: Evaluate | None = None,
        commit: Commit | None = None,
    ) -> None:
        """`groups` are fixed groups that were formed before.

        `commit` makes a stepped model durable before anybody hears of it; `evaluate` tests it, in
        the rounds in which that is due.
        """
        schemes.check("a course of rounds", plan, schemes.ONE_SERVER | schemes.TWO_SERVERS)
        self.plan, self.model = plan, model
        self.cohorts = Cohorts(plan, clients, party.entropy, groups)
        self.survivors: dict[ClientId, ClientId] = {}  # of the last round: who each name is
        self.next_round = 0
        self._party, self._evaluate, self._commit = party, evaluate, commit

    # --- who, and with whom ---------------------------------------------------------------------

    def draw(self, unmasked: Unmasked | None = None) -> DrawnRound:
        """The next round."""
        drawn = self._drawn(RoundId(self.next_round), unmasked)
        self.next_round += 1
        return drawn

    def skip_to(self, round_id: int, unmasked: Unmasked | None = None) -> Iterator[DrawnRound]:
        """The rounds before this one, drawn once more; the next is this one.

        They follow from the plan's seed and the entropy, which must be the same as then.
        """
        while self.next_round < round_id:
            yield self.draw(unmasked)

    def _drawn(self, round_id: RoundId, unmasked: Unmasked | None) -> DrawnRound:
        named = self.cohorts.named(round_id, self.cohorts.sample(round_id))
        return DrawnRound(
            round_id=round_id,
            period=self.plan.period(round_id),
            named=named,
            parts=tuple(
                RoundPart(plan=plan, named={name: named[name] for name in names})
                for plan, names in self._split(named, unmasked)
            ),
        )

    def given_up(self, drawn: DrawnRound) -> RoundAbort | None:
        """Why a round is not begun whose cohort was drawn in secret; None: it is.

        That follows from coins alone, and hardly ever from those of one client
        (`plan/dp.py`): nothing is sent, and the charge for the round stays.
        """
        came, fewest = len(drawn.named), self.plan.fewest_clients
        if not self.plan.drawn_in_secret or fewest <= came <= self.plan.most_clients:
            return None
        reason = TOO_FEW_DRAWN if came < fewest else TOO_MANY_DRAWN
        return RoundAbort(
            round_id=drawn.round_id, phase="draw", answered=came, needed=fewest, reason=reason
        )

    def _split(
        self, named: Named, unmasked: Unmasked | None
    ) -> list[tuple[Plan, tuple[ClientId, ...]]]:
        plan, names = self.plan, tuple(sorted(named))
        if plan.drawn_in_secret:
            if not plan.fewest_clients <= len(names) <= plan.most_clients:
                return []
            # Who masks meets the whole cohort; to others its size is no part of the agreement.
            masks = schemes.of(plan).masks
            return [(plan.part(secure=True, clients=len(names)) if masks else plan, names)]
        if plan.grouped:
            met = set(names)
            return [(plan.group_plan, group) for group in self.cohorts.groups if met & set(group)]
        if not schemes.of(plan).masks or unmasked is None:
            return [(plan, names)]
        bare = {name for name in names if unmasked(named[name])}
        masked = tuple(name for name in names if name not in bare)
        if not bare or 0 < len(masked) < max(LEAST_TOGETHER, LEAST_SHARE * len(names)):
            return [(plan, names)]
        plain = tuple(name for name in names if name in bare)
        split = [(plan.part(secure=False, clients=len(plain)), plain)]
        if masked:
            split.insert(0, (plan.part(secure=True, clients=len(masked)), masked))
        return split

    # --- the server in a part -------------------------------------------------------------------

    def server(
        self,
        drawn: DrawnRound,
        part: RoundPart,
        identity: Identity | None = None,
        stored: StoredRole | None = None,
    ) -> RoundServer:
        """The server's role in a part, new or woken. `identity` has its clients' keys."""
        make = schemes.of(part.plan).roles.server
        names, model = tuple(part.named), self.model
        return make(part.plan, drawn.round_id, names, model, self._party, identity, stored)

    def goes_on_after(self, outcome: PartOutcome) -> bool:
        """Whether a round goes on: a fixed group that lacks a member opens nothing, others do."""
        return outcome.aborted is None or self.plan.grouped

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
        `largest` is for `PaperNoise.on_means`.
        """
        plan, round_id = self.plan, drawn.round_id
        results = [each.result for each in outcomes if each.result is not None]
        lost = [each for each in outcomes if each.aborted is not None]
        if lost and (not plan.grouped or not results):
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
        result = by_expected(plan, result)
        result = noise_of(plan).on_means(result, self._party.entropy, round_id, largest)
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
            secure=measured and schemes.of(drawn.parts[0].plan).hides,
            bytes_up={},
            bytes_down={},
            client_seconds={},
            server_seconds={},
            epsilon=math.nan,
            condition="",
            metric=metric,
            groups_aborted=len(lost),
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
        make = schemes.of(plan).roles.helper
        if make is None:
            raise MisuseError(f"scheme {plan.scheme} has no helper")
        self.plan, self.model = plan, model
        self._make, self._party, self._commit = make, party, commit

    def helper(
        self,
        round_id: RoundId,
        directory: Mapping[ClientId, bytes],
        stored: StoredRole | None = None,
    ) -> HelperRound:
        """The helper's role in a round, new or woken, over its model as it is now."""
        return self._make(self.plan, round_id, self.model, self._party, directory, stored)

    def conclude(self, round_id: RoundId, result: RoundResult | None) -> None:
        """Step by the means that follow from the sum it was shown; by none, if it was shown none.

        A leader that stepped otherwise finds out in the next round, whose handshake compares
        digests of both models.
        """
        stepped = None if result is None else mergeable([result])
        if stepped is None:
            return
        self.model.step(by_expected(self.plan, stepped), round_id)
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
