"""Schedule: a public place for every client in a pass over all of them, the same in every pass.

A pass has as many rounds as clients fill cohorts, and as many places in each as a cohort has. The
order is a permutation by a seed that is drawn after registration has closed. Clients are dealt to
the rounds in turn, so that no round of a pass has more than one fewer than another: 6,040 clients
in cohorts of 100 make 61 rounds, of which one has 100 clients and 60 have 99. Places that are left
over stay empty, newcomers take them, and who leaves leaves one. Nobody moves to another place
within a training: from pass to pass a client's rounds are exactly a pass apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.plan import Plan
from tessera.plan.places import rounds_of_a_pass
from tessera.rounds.attendance import Place

EMPTY: Final = -1
"""In place of a client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Who has which place. Place p is in round p mod `rounds` of every pass."""

    rounds: int
    """Of a pass."""
    places: npt.NDArray[np.int64] = field(repr=False)
    """A client, or `EMPTY`."""

    @classmethod
    def drawn(cls, clients: Collection[int], cohort: int, seed: Secret) -> Schedule:
        """For these clients, by a seed that anybody may know from now on."""
        ids = np.sort(np.fromiter(clients, dtype=np.int64, count=len(clients)))
        rounds = rounds_of_a_pass(len(ids), cohort)
        keys = uniform(Ring(64), Stream.of(seed, Label.SCHEDULE), len(ids))
        places = np.full(rounds * cohort, EMPTY, dtype=np.int64)
        places[: len(ids)] = ids[np.argsort(keys, kind="stable")]
        return cls(rounds=rounds, places=places)

    def of_round(self, round_id: int) -> list[ClientId]:
        """Those who have a place in it, in rising order."""
        there = self.places[round_id % self.rounds :: self.rounds]
        return [ClientId(int(c)) for c in np.sort(there[there != EMPTY])]

    def place_of(self, client: ClientId) -> Place | None:
        found = np.flatnonzero(self.places == int(client))
        if not len(found):
            return None
        return Place(first=int(found[0]) % self.rounds, rounds=self.rounds)

    def by_client(self) -> dict[ClientId, Place]:
        return {
            ClientId(client): Place(first=at % self.rounds, rounds=self.rounds)
            for at, client in enumerate(self.places.tolist())
            if client != EMPTY
        }

    @property
    def digest(self) -> bytes:
        places = self.places.astype("<i8").tobytes()
        return hashlib.sha256(encode_context(Label.SCHEDULE_DIGEST, self.rounds, places)).digest()

    @property
    def clients(self) -> int:
        return int(np.count_nonzero(self.places != EMPTY))

    @property
    def fewest(self) -> int:
        """Clients of the round that has the fewest."""
        there = np.arange(len(self.places))[self.places != EMPTY] % self.rounds
        return int(np.bincount(there, minlength=self.rounds).min())

    def among(self, clients: Collection[ClientId]) -> Schedule:
        """For those who are there now: who left leaves a place, newcomers take the first free ones.

        Newcomers that find none wait for another training.
        """
        now = np.fromiter(map(int, clients), dtype=np.int64, count=len(clients))
        places = np.where(np.isin(self.places, now), self.places, EMPTY)
        newcomers = np.sort(now[~np.isin(now, places)])
        free = np.flatnonzero(places == EMPTY)[: len(newcomers)]
        places[free] = newcomers[: len(free)]
        return replace(self, places=places)

    def check(self, plan: Plan) -> None:
        """Refuse clients with whom a plan cannot keep what it promises, or has empty rounds."""
        bound, rounds, said = plan.participation, self.rounds, f"{self.clients:,} clients"
        if bound.separation > rounds:
            raise ConfigError(
                f"[cohorts] separation = {bound.separation}: {said} in cohorts of {plan.cohort:,} "
                f"make a pass of {rounds} rounds, and each is in every pass",
                hint=f"separation = {rounds}, a smaller cohort, or more clients",
            )
        if bound.most * rounds < bound.rounds:
            raise ConfigError(
                f"[cohorts] rounds_per_client = {bound.most}: {said} in cohorts of "
                f"{plan.cohort:,} have had their rounds after {bound.most * rounds} of "
                f"{bound.rounds}, and nobody may be in the others",
                hint=f"rounds = {bound.most * rounds} in [simulation], or rounds_per_client = "
                f"{-(-bound.rounds // rounds)}",
            )
        if self.fewest < plan.least_survivors:
            raise ConfigError(
                f"a round of the schedule has {self.fewest} clients of {plan.cohort:,}, and needs "
                f"{plan.least_survivors}: {said} are too few for passes of {rounds} rounds",
                hint=f"another training with those who are there, with a cohort of "
                f"{-(-self.clients // rounds)}: within a training nobody changes places",
            )
