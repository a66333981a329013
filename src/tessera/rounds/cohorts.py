"""Cohorts: who takes part in a round, and under which name.

Most follow from the plan's seed, which everybody has. Where the plan has a `participation`, each
client has a coin of the leader's entropy in every round: only the leader, and whoever meets the
cohort, knows who is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from tessera.crypto.coins import CoinStream
from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError
from tessera.ids import ClientId, RoundId
from tessera.plan import Plan, Sharing
from tessera.plan.dp import GIVEN_UP, boundary
from tessera.rounds import schemes
from tessera.rounds.fixed_groups import FixedGroup, with_newcomers


def drawn_in_secret(
    plan: Plan, round_id: RoundId, clients: int, entropy: Entropy
) -> npt.NDArray[np.bool_]:
    """Which of so many clients the leader's coins have in a round: the same if asked again."""
    section = plan.dp
    if section is None or not section.participation:
        raise MisuseError("coins for a cohort that follows from the plan's seed")
    secret = entropy.secret(Label.COHORT_COINS, plan.federation, int(round_id))
    coins = CoinStream(Stream.of(secret, Label.COHORT_COINS))
    return coins.heads(clients, section.participation)


def check_drawn(plan: Plan, population: int) -> None:
    """Refuse a population for which the account of secret cohorts would not hold."""
    section = plan.dp
    assert section is not None
    share = section.participation
    if round(share * population) != plan.cohort:
        raise ConfigError(
            f"[dp] participation = {share:g} of {population:,} clients makes a cohort of "
            f"{share * population:.5g}, and not of {plan.cohort:,}, by which sums are divided",
            hint=f"cohort = {max(2, round(share * population))}",
        )
    fewest = plan.fewest_clients
    if boundary(fewest, expected=plan.cohort, share=share) > GIVEN_UP:
        raise ConfigError(
            f"[dp] participation = {share:g}: that fewer than {fewest} clients are drawn, and the "
            f"round is given up, is not below {GIVEN_UP:g}; it would show who is there",
            hint="more clients, a larger share of them, or fewer that a round needs",
        )
    if schemes.of(plan).masks:  # a sum over the fewest, and over the most, has to be possible
        for clients in (fewest, min(population, plan.most_clients)):
            plan.part(secure=True, clients=clients)


class Cohorts:
    """Draws one cohort after the other: by the plan's seed, or by the leader's coins."""

    def __init__(
        self,
        plan: Plan,
        population: Collection[ClientId],
        entropy: Entropy,
        groups: Sequence[FixedGroup] = (),
    ) -> None:
        """`groups` are the fixed groups that were formed before, which stay."""
        if len(population) < plan.cohort:
            raise ConfigError(
                f"{len(population)} clients for a cohort of {plan.cohort}",
                hint="take a smaller cohort, or more clients",
            )
        if plan.drawn_in_secret:
            check_drawn(plan, len(population))
        self.plan = plan
        self.pseudonyms: dict[int, dict[int, int]] = {}
        self._population, self._entropy = population, entropy
        self._met: dict[int, set[ClientId]] = defaultdict(set)
        self._lasting: tuple[RoundId, tuple[ClientId, ...]] | None = None
        self.groups: list[FixedGroup] = []
        if plan.grouped:
            self.groups = with_newcomers(plan, groups, population)

    def admit(self, newcomers: Collection[ClientId]) -> None:
        """Clients that join from now on. A fixed group takes nobody in: they form new ones.

        Whoever found no group so far waits with them.
        """
        population = sorted({*self._population, *newcomers})
        if self.plan.drawn_in_secret:
            check_drawn(self.plan, len(population))
        self._population = population
        if self.plan.grouped:
            self.groups = with_newcomers(self.plan, self.groups, self._population)

    @property
    def least_rounds(self) -> int:
        """Rounds that every client has in a period: all of them, if cohorts are not drawn."""
        everybody = len(self._population) == self.plan.cohort
        masks_always = self.plan.security.sharing is Sharing.SECURE
        return self.plan.privacy.least_rounds if everybody and masks_always else 1

    def sample(self, round_id: RoundId) -> list[ClientId]:
        """The cohort: drawn without replacement, within what the plan allows in this period.

        Where keys last, it stays as long as they do. One that is drawn in secret has a coin for
        everybody instead, and any number of clients.
        """
        plan, lasting = self.plan, self.plan.key_rounds
        if plan.drawn_in_secret:
            everybody = sorted(self._population)
            heads = drawn_in_secret(plan, round_id, len(everybody), self._entropy)
            return [client for client, there in zip(everybody, heads, strict=True) if there]
        if lasting > 1:
            round_id = RoundId(round_id // lasting * lasting)
            if self._lasting is not None and self._lasting[0] == round_id:
                return list(self._lasting[1])
        if plan.grouped:
            wanted = plan.cohort // plan.privacy.group_size
            here = set(self._population)
            whole = [group for group in self.groups if here.issuperset(group)]
            if len(whole) < wanted:
                raise ConfigError(
                    f"round {round_id}: {len(whole)} whole fixed groups, a cohort has {wanted}",
                    hint="more clients, a smaller cohort, or smaller groups",
                )
            rng = np.random.default_rng([plan.seed, int(round_id)])
            drawn = rng.choice(len(whole), wanted, replace=False)
            return [c for at in sorted(drawn) for c in whole[at]]
        pool = sorted(self._population)
        if plan.privacy.one_participation:
            met = self._met[plan.period(round_id)]
            pool = [c for c in pool if c not in met]
        if len(pool) < plan.cohort:
            raise ConfigError(
                f"round {round_id}: {len(pool)} clients may take part, a cohort has {plan.cohort}",
                hint="more clients, a smaller cohort, or shorter periods",
            )
        rng = np.random.default_rng([plan.seed, int(round_id)])
        chosen = [pool[i] for i in sorted(rng.choice(len(pool), plan.cohort, replace=False))]
        self._met[plan.period(round_id)].update(chosen)
        self._lasting = (round_id, tuple(chosen))
        return chosen

    def named(self, round_id: RoundId, chosen: Sequence[ClientId]) -> dict[ClientId, ClientId]:
        """Who is who in this round: themselves, or under pseudonyms names drawn afresh.

        Not even the order of the names follows from the plan's seed, which everybody knows.
        """
        if not self.plan.privacy.pseudonyms:
            return {c: c for c in chosen}
        secret = self._entropy.secret(Label.PSEUDONYMS, self.plan.federation, int(round_id))
        drawn = uniform(Ring(32), Stream.of(secret, Label.PSEUDONYMS), 4 * len(chosen))
        names = dict.fromkeys(drawn.tolist())  # each once, in the order in which they were drawn
        named = {ClientId(name): client for name, client in zip(names, chosen, strict=False)}
        self.pseudonyms[int(round_id)] = {int(name): int(c) for name, c in named.items()}
        return named
