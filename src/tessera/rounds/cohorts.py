"""Cohorts: who takes part in a round, and under which name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.rounds.plan import Plan, Sharing


class Cohorts:
    """Draws one cohort after the other; the plan's seed decides who is in it, and nothing else."""

    def __init__(self, plan: Plan, population: Collection[ClientId], entropy: Entropy) -> None:
        if len(population) < plan.cohort:
            raise ConfigError(
                f"{len(population)} clients for a cohort of {plan.cohort}",
                hint="take a smaller cohort, or more clients",
            )
        self.plan = plan
        self.pseudonyms: dict[int, dict[int, int]] = {}
        self._population, self._entropy = population, entropy
        self._met: dict[int, set[ClientId]] = defaultdict(set)
        self.groups = fixed_groups(plan, population) if plan.grouped else []

    def admit(self, newcomers: Collection[ClientId]) -> None:
        """Clients that join from now on. A fixed group takes nobody in: they form new ones.

        Whoever found no group so far waits with them.
        """
        known = sorted({*self._population, *newcomers})
        self._population = known
        if self.plan.grouped:
            placed = {c for group in self.groups for c in group}
            waiting = [c for c in known if c not in placed]
            self.groups = [*self.groups, *fixed_groups(self.plan, waiting, known=len(known))]

    @property
    def least_rounds(self) -> int:
        """Rounds that every client has in a period: all of them, if cohorts are not drawn."""
        everybody = len(self._population) == self.plan.cohort
        masks_always = self.plan.security.sharing is Sharing.SECURE
        return self.plan.privacy.least_rounds if everybody and masks_always else 1

    def sample(self, round_id: RoundId) -> list[ClientId]:
        """The cohort: drawn without replacement, within what the plan allows in this period."""
        plan = self.plan
        if plan.grouped:
            rng = np.random.default_rng([plan.seed, int(round_id)])
            drawn = rng.choice(
                len(self.groups), plan.cohort // plan.privacy.group_size, replace=False
            )
            return [c for at in sorted(drawn) for c in self.groups[at]]
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


def fixed_groups(
    plan: Plan, population: Collection[ClientId], *, known: int = 0
) -> list[tuple[ClientId, ...]]:
    """The groups that always meet, each of the plan's size; clients that fill none have none.

    Who meets whom follows from the plan's seed, which everybody knows: what hides a holder is that
    the members of its group leave one trace, not that they are unknown. `known` are all clients
    that there are by now, if some have a group already.
    """
    rng = np.random.default_rng([plan.seed, known or len(population)])
    order = rng.permutation(sorted(population))
    size = plan.privacy.group_size
    return [
        tuple(sorted(ClientId(int(c)) for c in order[start : start + size]))
        for start in range(0, len(order) - size + 1, size)
    ]
