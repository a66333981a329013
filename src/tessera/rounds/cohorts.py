"""Cohorts: who takes part in a round, who is summed with whom, and what a client insists on.

Five kinds, chosen once by the plan (`cohorts_of`): drawn by the plan's seed, which everybody has;
the same as long as two servers' keys last; by a public schedule, in which everybody has a place;
whole fixed groups, which never change; or by coins of the leader, so that only the leader, and
whoever meets the cohort, knows who is in it. A new kind is a class in this file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import CoinStream, Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import ConfigError, MisuseError
from tessera.ids import ClientId, RoundId, TableId
from tessera.learning.averaging import TableMean
from tessera.plan import Plan, Sharing
from tessera.plan.dp import GIVEN_UP, boundary
from tessera.plan.places import drawn_by_seed
from tessera.privacy.index.period import AnotherGroup, PeriodStore
from tessera.privacy.index.response import IndexPrivacy
from tessera.rounds import schemes
from tessera.rounds.attendance import Place
from tessera.rounds.messages import RoundResult
from tessera.rounds.schedule import Schedule
from tessera.rounds.sums import Split

if TYPE_CHECKING:
    from tessera.tasks import Task

FixedGroup: TypeAlias = tuple[ClientId, ...]
Named: TypeAlias = Mapping[ClientId, ClientId]
"""Who each name of a round is."""
Unmasked: TypeAlias = Callable[[ClientId], bool]
"""Whether a client sends its update unmasked, where the plan leaves that to it."""

TOO_FEW_DRAWN: Final = "the coins drew too few clients"
TOO_MANY_DRAWN: Final = "the coins drew more clients than a sum has room for"


class CohortRule:
    """How cohorts come about. This is the plain kind: drawn by the plan's seed in every round."""

    waits: bool = False
    """Whether clients are in fixed groups, whose sums wait for all members (`rounds/epochs/`)."""
    hidden: bool = False
    """Whether those who do not meet a cohort do not know who is in it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @property
    def only_simulated(self) -> str:
        """Why services do not have such cohorts; "" if they do."""
        return self.plan.privacy.only_simulated

    # --- a server's side ------------------------------------------------------------------------

    def check(self, population: int) -> None:
        """Refuse a population for which what the plan promises would not hold."""

    def formed(
        self, clients: Collection[ClientId], groups: Sequence[FixedGroup] = ()
    ) -> list[FixedGroup]:
        """The fixed groups there are, as they are, and those that form among the other clients."""
        return []

    def task_of(self, task: Task) -> Task:
        """The task as clients in such cohorts train it."""
        return task

    def parts(
        self, clients: Sequence[ClientId], groups: Sequence[FixedGroup]
    ) -> Sequence[Collection[ClientId]]:
        """In which a population's statistics are summed: of a cohort's size at least."""
        if groups:
            raise MisuseError("fixed groups of a plan without any")
        return self.one_pass(clients)

    def one_pass(self, clients: Sequence[ClientId]) -> Sequence[Sequence[ClientId]]:
        """Everybody once, in cohorts: whoever adds up over all clients meets these in turn."""
        many = max(1, len(clients) // self.plan.cohort)
        return [clients[part::many] for part in range(many)]

    def summed(self, clients: list[ClientId], groups: Sequence[FixedGroup]) -> list[ClientId]:
        """Of clients with data, those who are in such sums."""
        return clients

    def present(
        self, clients: Collection[ClientId], groups: Sequence[FixedGroup]
    ) -> Sequence[Collection[ClientId]]:
        """Those of a cohort whose statistics are summed together."""
        return [clients]

    def scheduled(
        self, clients: Collection[ClientId], stored: Schedule | None = None
    ) -> Schedule | None:
        """Where each client has its place, as it was `stored` if it was; None: nobody has one."""
        return None

    def candidates(self, round_id: RoundId, cohorts: Cohorts) -> list[ClientId]:
        """Who may be drawn."""
        return sorted(cohorts.population)

    def draw(self, round_id: RoundId, cohorts: Cohorts) -> list[ClientId]:
        """Without replacement, among those who are there; while these are fewer than a cohort, all
        of them, and others whose places stay empty unless they come."""
        pool, cohort = self.candidates(round_id, cohorts), self.plan.cohort
        present = set(pool if cohorts.there is None else cohorts.there)
        kept: list[ClientId] = []
        others = [c for c in pool if c in present]
        if len(others) < cohort:
            kept, others = others, [c for c in pool if c not in present]
        drawn = drawn_by_seed(self.plan, int(round_id), len(others), cohort - len(kept))
        return sorted([*kept, *(others[i] for i in drawn)])

    def coins(
        self, round_id: RoundId, clients: int, entropy: Entropy
    ) -> npt.NDArray[np.bool_] | None:
        """Which of so many clients are in a round, where it is not the seed that draws."""
        return None

    def split(self, named: Named, groups: Sequence[FixedGroup], unmasked: Unmasked | None) -> Split:
        """Those who are masked first, then those in the clear."""
        names = tuple(sorted(named))
        bare = () if unmasked is None else tuple(name for name in names if unmasked(named[name]))
        return schemes.of(self.plan).sum.split(self.plan, names, bare)

    def among(self, clients: int) -> Plan:
        """The agreement in a round with so many clients."""
        return self.plan

    def given_up(self, came: int) -> str:
        """Why a round with so many clients is not begun; "" if it is."""
        return ""

    def divided(self, result: RoundResult) -> RoundResult:
        """The means of a round as they are stepped into the model."""
        return result

    def most_dropouts(self, cohort: int) -> int | None:
        """How many of a cohort a simulation has drop out at most; None: any number.

        With more than the secure sums tolerate a round would be aborted.
        """
        return schemes.of(self.plan).sum.most_dropouts(self.among(cohort), cohort)

    def spent(self, round_id: RoundId, lasts: int | None, short: Callable[[RoundId], bool]) -> str:
        """For how many rounds a budget has lasted, if it does not last for this one; else ""."""
        return f"{lasts} rounds" if short(round_id) else ""

    # --- a client's side ------------------------------------------------------------------------

    def least_rounds(self, population: int) -> int:
        """Rounds that every client has in a period: all of them, if cohorts are not drawn."""
        everybody = population == self.plan.cohort
        masks_always = self.plan.security.sharing is Sharing.SECURE
        return self.plan.privacy.least_rounds if everybody and masks_always else 1

    def members_flaw(self, members: Sequence[ClientId], periods: PeriodStore) -> str:
        """What is wrong with those a client is to be summed with; "" if nothing is."""
        return ""

    def row_groups_flaw(self, own: IndexPrivacy, smallest: Callable[[TableId], int]) -> str:
        """What is wrong with the groups of the rows that a client named; "" if nothing is.

        Masks follow from the values of the rows that two clients share, and who shares which is the
        server's word. Where everybody names the whole union a client knows what is right: a row
        that is left out could be another one for every client, and members that are left out could
        be summed apart. `smallest` is the smallest group of a table's rows, 0 if one was left out.
        """
        alike = all(answers.names_all for answers in (self.plan.privacy.index, own))
        tables = map(TableId, range(len(self.plan.tables)))
        if alike and any(smallest(table) < 1 for table in tables):
            return "left rows of the union out of the sum"
        return ""

    def check_choices(self, choices: Mapping[str, bool]) -> None:
        """Refuse what a client has chosen for itself (True) where everybody has to be alike."""


class LastingCohorts(CohortRule):
    """Drawn by the seed for as many rounds as the keys of two servers' clients last."""

    def _first(self, round_id: RoundId) -> RoundId:
        """In which the keys of a round were made."""
        return RoundId(round_id // self.plan.key_rounds * self.plan.key_rounds)

    def candidates(self, round_id: RoundId, cohorts: Cohorts) -> list[ClientId]:
        first = self._first(round_id)
        if cohorts.lasting is not None and cohorts.lasting[0] == first:
            return list(cohorts.lasting[1])
        return super().candidates(first, cohorts)

    def draw(self, round_id: RoundId, cohorts: Cohorts) -> list[ClientId]:
        first = self._first(round_id)
        if cohorts.lasting is None or cohorts.lasting[0] != first:
            cohorts.lasting = (first, tuple(super().draw(first, cohorts)))
        return list(cohorts.lasting[1])


class ScheduledCohorts(CohortRule):
    """By a public schedule: the same order in every pass, and nobody changes places.

    Whose word the order is: in a simulation nobody's, it follows from the plan's seed and the name
    of the federation; in a deployment the leader's, which draws a seed once registration is closed
    and tells it to everybody. A leader that chooses the order chooses who meets whom in a round. It
    does not choose how often: clients count, and keep the distance.
    """

    @property
    def _order(self) -> Secret:
        context = encode_context(Label.SIMULATED_SCHEDULE, self.plan.federation, self.plan.seed)
        return Secret(hashlib.sha256(context).digest())

    def scheduled(
        self, clients: Collection[ClientId], stored: Schedule | None = None
    ) -> Schedule | None:
        if stored is None:
            found = Schedule.drawn(clients, self.plan.cohort, self._order)
        else:
            found = stored.among(clients)
        found.check(self.plan)
        return found

    def one_pass(self, clients: Sequence[ClientId]) -> Sequence[Sequence[ClientId]]:
        """Its rounds, in their order."""
        schedule = Schedule.drawn(clients, self.plan.cohort, self._order)
        return [schedule.of_round(number) for number in range(schedule.rounds)]

    def candidates(self, round_id: RoundId, cohorts: Cohorts) -> list[ClientId]:
        assert cohorts.schedule is not None
        return cohorts.schedule.of_round(int(round_id))

    def draw(self, round_id: RoundId, cohorts: Cohorts) -> list[ClientId]:
        """A place whose client has left, or is not there, is empty."""
        return self.candidates(round_id, cohorts)


class FixedGroups(CohortRule):
    """Clients that are always summed together.

    The salt of the groups is public, and so is who meets whom: what hides a holder is that the
    members of its group leave one trace, not that they are unknown.
    """

    waits = True

    def formed(
        self, clients: Collection[ClientId], groups: Sequence[FixedGroup] = ()
    ) -> list[FixedGroup]:
        """Each of the plan's size; clients that fill none wait for others."""
        size = self.plan.group_size
        placed = [client for group in groups for client in group]
        if any(len(group) != size for group in groups) or len(set(placed)) != len(placed):
            raise ConfigError(
                f"stored groups are not of {size} clients each, every client in one",
                hint="a fixed group keeps its members: restore the groups as they were stored",
            )
        there = set(placed)
        order = sorted((c for c in clients if c not in there), key=self._place)
        starts = range(0, len(order) - size + 1, size)
        return [*groups, *(tuple(sorted(order[at : at + size])) for at in starts)]

    def parts(
        self, clients: Sequence[ClientId], groups: Sequence[FixedGroup]
    ) -> Sequence[Collection[ClientId]]:
        if not groups:
            raise MisuseError("a plan with fixed groups sums in these, and no others")
        return groups

    def summed(self, clients: list[ClientId], groups: Sequence[FixedGroup]) -> list[ClientId]:
        """Who waits for a group is in none."""
        if not groups:
            raise ConfigError(
                f"{len(clients)} clients with data make no group of {self.plan.group_size}",
                hint="more clients, or smaller groups",
            )
        return sorted(client for group in groups for client in group)

    def present(
        self, clients: Collection[ClientId], groups: Sequence[FixedGroup]
    ) -> Sequence[Collection[ClientId]]:
        """The groups of which all are there."""
        there = set(clients)
        return [group for group in groups if there >= set(group)]

    def _place(self, client: ClientId) -> bytes:
        salt = encode_context(Label.FIXED_GROUPS, self.plan.federation, self.plan.seed)
        return hashlib.sha256(salt + encode_context(int(client))).digest()

    def task_of(self, task: Task) -> Task:
        """Members have a union at hand, unless they have the whole model."""
        return task.in_groups(self.plan.group_size) if self.plan.has_union else task

    def draw(self, round_id: RoundId, cohorts: Cohorts) -> list[ClientId]:
        raise MisuseError("fixed groups wait: who is invited is an EpochCourse's to say")

    def most_dropouts(self, cohort: int) -> int | None:
        """All that are drawn drop out: their groups wait."""
        return None

    def members_flaw(self, members: Sequence[ClientId], periods: PeriodStore) -> str:
        """Asked before anything is shared with them; the first ones are recorded."""
        given = tuple(int(c) for c in members)
        try:
            known = periods.group(self.plan.federation, given)
            if known != given:
                return "named other members of this client's group than in its first round"
        except AnotherGroup as error:
            return f"named other members than this client's rows have met: {error}"
        return ""

    def check_choices(self, choices: Mapping[str, bool]) -> None:
        """A choice of one's own may follow from one's data, and is seen."""
        for name, chosen in choices.items():
            if chosen:
                raise ConfigError(
                    f"a client of a fixed group has its own {name}: members who choose for "
                    "themselves can be told apart by what they choose",
                    hint=f"leave {name} to the plan, or use another level than groups",
                )


class SecretCohorts(CohortRule):
    """Secret Poisson sampling: a coin of the leader's for every client and round."""

    hidden = True

    @property
    def only_simulated(self) -> str:
        return (
            '[cohorts] drawn = "secret": a client that is not drawn would have to be '
            "charged, too, and a deployment does not tell it of the round"
        )

    @property
    def share(self) -> float:
        """The probability of a client to be in a round."""
        return self.plan.cohorts.share

    def check(self, population: int) -> None:
        plan, share = self.plan, self.share
        if round(share * population) != plan.cohort:
            raise ConfigError(
                f"[cohorts] share = {share:g} of {population:,} clients makes a cohort of "
                f"{share * population:.5g}, and not of {plan.cohort:,}, by which sums are divided",
                hint=f"cohort = {max(2, round(share * population))}",
            )
        fewest = plan.fewest_clients
        too_few = boundary(fewest, expected=plan.cohort, share=share)
        if too_few > GIVEN_UP:
            raise ConfigError(
                f"[cohorts] share = {share:g}: that fewer than {fewest} clients are drawn, and "
                f"the round is given up, is not below {GIVEN_UP:g}; it would show who is there",
                hint="more clients, a larger share of them, or fewer that a round needs",
            )
        for clients in (fewest, min(population, plan.most_clients)):
            self.among(clients)  # a sum over the fewest, and over the most, has to be possible

    def among(self, clients: int) -> Plan:
        """Who masks meets the whole cohort; to others its size is no part of the agreement."""
        return schemes.of(self.plan).sum.masked_part(self.plan, clients)

    def coins(self, round_id: RoundId, clients: int, entropy: Entropy) -> npt.NDArray[np.bool_]:
        """Which of so many clients are in a round: the same if asked again."""
        secret = entropy.secret(Label.COHORT_COINS, self.plan.federation, int(round_id))
        return CoinStream(Stream.of(secret, Label.COHORT_COINS)).heads(clients, self.share)

    def draw(self, round_id: RoundId, cohorts: Cohorts) -> list[ClientId]:
        everybody = sorted(cohorts.population)
        heads = self.coins(round_id, len(everybody), cohorts.entropy)
        return [client for client, there in zip(everybody, heads, strict=True) if there]

    def split(self, named: Named, groups: Sequence[FixedGroup], unmasked: Unmasked | None) -> Split:
        names = tuple(sorted(named))
        return [] if self.given_up(len(names)) else [(self.among(len(names)), names)]

    def given_up(self, came: int) -> str:
        """That follows from coins alone, and hardly ever from those of one client
        (`plan/dp.py`): nothing is sent, and the charge for the round stays."""
        if came < self.plan.fewest_clients:
            return TOO_FEW_DRAWN
        return TOO_MANY_DRAWN if came > self.plan.most_clients else ""

    def divided(self, result: RoundResult) -> RoundResult:
        """By the number of clients that is expected, where theirs is a secret.

        Where counts are summed under noise, they are what sums are divided by.
        """
        if self.plan.noisy_counts:
            return result
        weight = self.plan.cohort
        tables = {
            name: TableMean(
                part.ids,
                part.mean * (np.maximum(part.counts, 1) / weight)[:, None],
                np.full(len(part.ids), weight, dtype=np.int64),
            )
            for name, part in result.tables.items()
        }
        dense = result.dense * (max(result.weight, 1) / weight)
        return replace(result, weight=weight, dense=dense, tables=tables)

    def spent(self, round_id: RoundId, lasts: int | None, short: Callable[[RoundId], bool]) -> str:
        """When training ends is not to follow from who was drawn."""
        return f"up to {lasts} rounds" if lasts is not None and int(round_id) >= lasts else ""


def cohorts_of(plan: Plan) -> CohortRule:
    """The kind of cohorts that a plan has."""
    if plan.drawn_in_secret:
        return SecretCohorts(plan)
    if plan.cohorts.scheduled:
        return ScheduledCohorts(plan)
    if plan.grouped:
        return FixedGroups(plan)
    return LastingCohorts(plan) if plan.key_rounds > 1 else CohortRule(plan)


class Cohorts:
    """One cohort after the other, among the clients that there are."""

    def __init__(
        self,
        plan: Plan,
        population: Collection[ClientId],
        entropy: Entropy,
        groups: Sequence[FixedGroup] = (),
        schedule: Schedule | None = None,
    ) -> None:
        """`groups` are the fixed groups that were formed before, which stay; so does `schedule`."""
        plan.check_population(len(population), hint="take a smaller cohort, or more clients")
        self.plan, self.rule = plan, cohorts_of(plan)
        self.rule.check(len(population))
        self.population, self.entropy = population, entropy
        self.groups = self.rule.formed(population, groups)
        self.schedule = self.rule.scheduled(population, schedule)
        self.lasting: tuple[RoundId, tuple[ClientId, ...]] | None = None
        self.there: Collection[ClientId] | None = None
        """Who is there to be drawn; None: everybody, or nobody knows."""
        self.pseudonyms: dict[int, dict[int, int]] = {}

    def admit(self, newcomers: Collection[ClientId]) -> None:
        """Clients that join from now on. A fixed group takes nobody in: they form new ones.

        Whoever found no group so far waits with them. In a schedule they take free places.
        """
        population = sorted({*self.population, *newcomers})
        self.rule.check(len(population))
        self.population = population
        self.groups = self.rule.formed(population, self.groups)
        self.schedule = self.rule.scheduled(population, self.schedule)

    @property
    def least_rounds(self) -> int:
        return self.rule.least_rounds(len(self.population))

    def places(self) -> dict[ClientId, Place]:
        """Of everybody who has one."""
        return {} if self.schedule is None else self.schedule.by_client()

    def sample(self, round_id: RoundId) -> list[ClientId]:
        """The cohort of a round."""
        return self.rule.draw(round_id, self)

    def candidates(self, round_id: RoundId) -> list[ClientId]:
        """Who may be in the cohort of a round."""
        return self.rule.candidates(round_id, self)

    def record(self, chosen: Iterable[ClientId]) -> str:
        """A cohort, with what later ones depend on. Who was there follows from no seed."""
        return json.dumps({"chosen": sorted(chosen), "lasting": self.lasting})

    def restore(self, record: str) -> list[ClientId]:
        """The cohort of a record; later ones are drawn as if it had just been."""
        found = json.loads(record)
        if found["lasting"] is not None:
            first, members = found["lasting"]
            self.lasting = RoundId(first), tuple(map(ClientId, members))
        return [ClientId(c) for c in found["chosen"]]

    def named(self, round_id: RoundId, chosen: Sequence[ClientId]) -> dict[ClientId, ClientId]:
        """Who is who in this round: themselves, or under pseudonyms names drawn afresh.

        Not even the order of the names follows from the plan's seed, which everybody knows.
        """
        if not self.plan.privacy.pseudonyms:
            return {c: c for c in chosen}
        secret = self.entropy.secret(Label.PSEUDONYMS, self.plan.federation, int(round_id))
        drawn = uniform(Ring(32), Stream.of(secret, Label.PSEUDONYMS), 4 * len(chosen))
        names = dict.fromkeys(drawn.tolist())  # each once, in the order in which they were drawn
        named = {ClientId(name): client for name, client in zip(names, chosen, strict=False)}
        self.pseudonyms[int(round_id)] = {int(name): int(c) for name, c in named.items()}
        return named
