"""Secure statistics: integer vectors of many clients, summed under the plan's security.

For statistics that are not updates: the mean of all ratings before the first round, metrics on
held-out examples after some rounds. Each is a secure sum of its own with keys of its own, and only
the sum is opened. Its messages are real; their bytes are not counted in any round.

In a plan with fixed groups each sum is over a whole group, and needs all of its members: a sum over
any other set of clients would tell them apart.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.noise import discrete_gaussian
from tessera.crypto.prg import Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError
from tessera.ids import ClientId, RoundId
from tessera.learning.compression import signed
from tessera.learning.task_setup import Progress
from tessera.plan import Crypto, Plan
from tessera.privacy.dp.noise_setting import LEAST_SHARE, NO_ROUND
from tessera.protocols.secagg.client import Client, SecAggClientSetup
from tessera.protocols.secagg.params import GraphKind, SecAggParams, StageSpec
from tessera.protocols.secagg.server import SecAggServerSetup
from tessera.protocols.secagg.standalone import Aggregator, Contribution, Contributor
from tessera.rounds import schemes
from tessera.rounds.cohorts import FixedGroup, cohorts_of
from tessera.rounds.noise import added
from tessera.rounds.noise_account import AddedNoise
from tessera.simulation.simulator import Simulator

Counts = npt.NDArray[np.int64]

WORDS: Final = Ring(48)
"""Wide enough for the sum of any population: 2^20 units each from 10^8 clients, and noise; or 2^30
each from 10^5."""

MANY: Final = 200
"""From here on a sum of few words takes the sparse graph, whatever the rounds do."""


def secure_sum(
    vectors: Mapping[ClientId, Counts],
    plan: Plan,
    what: str,
    round_id: RoundId,
    entropy: Entropy,
    *,
    whole: bool = False,
) -> Counts:
    """The secure sum of these vectors; `what` names its keys, and tells it from other sums.

    `whole`: it opens over all of these clients or not at all.
    """
    plan.security.check_unsigned(what)
    words = len(next(iter(vectors.values())))
    params = sum_params(plan, what, round_id, len(vectors), words)
    if whole:
        graph = GraphKind.COMPLETE
        params = replace(params, graph=graph, dropout=0.0, threshold=len(vectors))
    clients, first_messages = {}, {}
    for name, vector in vectors.items():
        client, first_messages[name] = Client.join(SecAggClientSetup(params, name), entropy=entropy)
        clients[name] = Contributor(client, (Contribution(dense=WORDS.from_ints(vector)),))
    server = Aggregator(SecAggServerSetup(params, tuple(vectors)), entropy=entropy)
    outcome = Simulator(server, clients, first_messages).run()
    if outcome.aborted is not None:
        raise outcome.aborted
    return server.sums[0].dense.astype(np.int64)


def sum_params(plan: Plan, what: str, round_id: RoundId, clients: int, words: int) -> SecAggParams:
    """Of a secure sum over so many clients, with the thresholds that the plan has for a cohort."""
    return SecAggParams(
        federation=f"{plan.federation}: {what}",
        round_id=round_id,
        plan_hash=hashlib.sha256(what.encode() + plan.digest).digest(),
        cohort=clients,
        stages=(StageSpec(name=what, group=WORDS, dense=words),),
        graph=GraphKind.SPARSE if clients >= MANY else plan.security.graph,
        corrupt=plan.security.corrupt,
        dropout=plan.security.dropout,
    )


@dataclass(frozen=True, slots=True)
class PopulationSum:
    """A sum over all clients, taken group by group; the server sees the sum of each group."""

    sum: Counts = field(repr=False)
    clients: int
    groups: int
    secure_groups: int


def cohort_sum(
    vectors: Mapping[ClientId, Counts],
    groups: Sequence[FixedGroup],
    plan: Plan,
    what: str,
    round_id: RoundId,
    entropy: Entropy,
) -> Counts | None:
    """The sum over a cohort; in fixed `groups` over those that are whole, each a sum of its own.

    None if none is.
    """
    rule = cohorts_of(plan)
    sums = [
        secure_sum({c: vectors[c] for c in part}, plan, what, round_id, entropy, whole=rule.waits)
        for part in rule.present(vectors.keys(), groups)
    ]
    return np.sum(sums, axis=0) if sums else None


def population_sum(
    vectors: Mapping[ClientId, Counts],
    plan: Plan,
    what: str,
    entropy: Entropy,
    progress: Progress | None = None,
    groups: Sequence[FixedGroup] = (),
) -> PopulationSum:
    """The sum over all clients, in groups of a cohort's size at least; or in the plan's fixed ones.

    With plain schemes it is a plain sum; with two servers, too, clients mask with each other. Where
    cryptography is sampled, one group is masked and the others add the same integers in the clear.
    """
    names = sorted(vectors)
    rule = cohorts_of(plan)
    parts = rule.parts(names, groups)
    total = np.zeros(len(vectors[names[0]]), np.int64)
    masked = done = 0
    for number, members in enumerate(parts):
        part = {name: vectors[name] for name in members}
        if is_masked(plan, number):
            at = RoundId(number)
            total += secure_sum(part, plan, what, at, entropy, whole=rule.waits)
            masked += 1
        else:
            total += np.sum(list(part.values()), axis=0)
        done += len(part)
        if progress is not None:
            progress(done, len(names))
    return PopulationSum(total, len(names), len(parts), masked)


def is_masked(plan: Plan, group: int) -> bool:
    """Whether the sum of a group is masked: where cryptography is sampled, that of the first is."""
    crypto = plan.simulation.crypto
    real = crypto is Crypto.EVERY or (crypto is Crypto.SAMPLED and group == 0)
    return real and schemes.of(plan).hides


# --- noisy statistics -----------------------------------------------------------------------------
#
# Sums over clients that are no updates, with the plan's noise on them.
#
# The popularity of rows and a task's set-up sum before the first round, metrics on held-out
# examples after some rounds. A client's part has an L2 norm of at most 1, and is cut towards zero
# to integers. Noise is added by whom the plan trusts (`[dp] trust`): the server, to the sum; every
# client, all of it, to its own part; every client a share of it, under the masks of a secure sum;
# or each of two servers, all of it, to the sum of its shares. Where a sum is taken group by group,
# each group opens: in shares each has the whole noise.
#
# Noise is a discrete Gaussian over the same integers, thousands of them wide, and a share of it is
# `LEAST_SHARE` wide or more, which the account takes for granted (`privacy/dp/noise_setting.py`).
# It follows from the run's entropy, the name of the statistic, the round and its own width: taken
# again it is the same, and so must be what it is added to. A run goes on over the same data and
# with the same noise only (`api.py`).


Integers = npt.NDArray[np.int64]
Part = Callable[[ClientId], npt.NDArray[np.float64]]
"""A client's part of the sum, of a norm of at most 1."""

FINEST: Final = 20
"""A length of 1 is at most 2 to this many integers."""
WIDEST: Final = 1e6
"""All noise on a sum is at most so many integers wide."""
LEAST_MEMBERS: Final = 2
"""Of a secure sum."""
LEAST_NOISE: Final = 1000.0
"""All noise on a sum is so many integers wide, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyTotal:
    """A sum in lengths of a client's part, and the deviation of all noise on each of its words."""

    sum: npt.NDArray[np.float64] = field(repr=False)
    deviation: float
    clients: int
    groups: int
    secure_groups: int


class SharedTotal:
    """What two servers hold of a sum while its clients come, cohort after cohort: shares.

    Each server adds up its own, adds its own noise at the end, and only then is the sum opened,
    once: sums of single cohorts would each need that noise, and differ by who was in them.
    """

    def __init__(self, words: int) -> None:
        self.leader, self.helper = WORDS.zeros((words,)), WORDS.zeros((words,))
        self._open = False

    def add(self, leader: npt.NDArray[np.uint64], helper: npt.NDArray[np.uint64]) -> None:
        """A client's two shares."""
        if self._open:
            raise MisuseError("a sum that was opened takes no other part")
        self.leader = WORDS.add(self.leader, leader)
        self.helper = WORDS.add(self.helper, helper)

    def opened(self, noise: Sequence[Integers]) -> Integers:
        """With the noise of each server on its own share."""
        if self._open:
            raise MisuseError("a sum is opened once")
        self._open = True
        leader, helper = (WORDS.from_ints(each) for each in noise)
        shares = WORDS.add(self.leader, leader), WORDS.add(self.helper, helper)
        return signed(WORDS.add(*shares), WORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyStatistic:
    """A statistic called `what`, with `noise` deviations over a client's length on its sum.

    `words` is how long it is.
    """

    plan: Plan
    entropy: Entropy = field(repr=False)
    what: str
    noise: float
    words: int
    round_id: RoundId = NO_ROUND

    def __post_init__(self) -> None:
        if self.noise * self.scale < LEAST_NOISE:
            raise ConfigError(
                f"[dp] noise of {self.noise:g} on {self.what} is out of range",
                hint="a smaller epsilon, or a smaller share of the budget for it in [dp]",
            )

    @property
    def scale(self) -> float:
        """Integers that a length of 1 is."""
        return 2.0 ** min(FINEST, math.floor(math.log2(WIDEST / self.noise)))

    @property
    def kind(self) -> AddedNoise:
        return added(self.plan)

    def over_all(
        self, clients: Sequence[ClientId], part: Part, progress: Progress | None = None
    ) -> NoisyTotal:
        """Over a population, in one pass: in groups of a cohort's size at least, or by the rounds
        of the plan's schedule."""
        names = sorted(clients)
        if self.counted(min(len(names), self.plan.cohort)) < 1:
            raise ConfigError(
                f"[dp] {self.what} over {len(names)} clients in shares: nobody is left whose noise "
                "counts",
                hint="more clients, a smaller corrupt, or less dropout in [security]",
            )
        return self._over(cohorts_of(self.plan).one_pass(names), part, progress)

    def over_cohort(self, clients: Sequence[ClientId], part: Part) -> NoisyTotal | None:
        """Over those of a round, in one sum; None, and nothing leaves, if they are too few."""
        if self.counted(len(clients)) < 1:
            return None
        return self._over([sorted(clients)], part, None)

    def _over(
        self, groups: Sequence[Sequence[ClientId]], part: Part, progress: Progress | None
    ) -> NoisyTotal:
        """One group after the other; what nobody opens before all are in is held in shares."""
        total, servers = np.zeros(self.words, np.int64), self.kind.servers
        shares = SharedTotal(self.words) if servers > 1 else None
        sources, masked = 0.0, 0  # sources of noise, each of the deviation that is accounted for
        done, clients = 0, sum(map(len, groups))
        for number, members in enumerate(groups):
            if shares is not None:
                self._share(shares, members, part)
            else:
                summed, real = self._summed(members, part, number)
                total += summed
                masked += real
            sources += self.kind.own_sources(len(members), self.counted(len(members)))
            done += len(members)
            if progress is not None:
                progress(done, clients)
        noise = [self._drawn("server", server) for server in range(servers)]
        if shares is not None:
            total = shares.opened(noise)
        elif servers:
            # As if noise were added before any sum was centred: what is centred has noise, and a
            # client that puts the others at the wrap of the ring learns nothing from it.
            total = signed(WORDS.from_ints(total + np.sum(noise, axis=0)), WORDS)
        return NoisyTotal(
            sum=total / self.scale,
            deviation=self.noise * math.sqrt(servers + sources),
            clients=clients,
            groups=len(groups),
            secure_groups=masked,
        )

    def counted(self, members: int) -> int:
        """Clients of a group whose noise is enough.

        In shares these are its fewest survivors, less the corrupt: those of its own secure sum,
        whose group may be larger than a cohort.
        """

        def survivors() -> int:
            if members < LEAST_MEMBERS:
                return 0
            sums = sum_params(self.plan, self.what, self.round_id, members, self.words)
            return sums.min_survivors

        return self.kind.counted_sources(survivors)

    def _summed(self, members: Sequence[ClientId], part: Part, group: int) -> tuple[Integers, bool]:
        """Over a group: what opens of it, and whether it was masked."""
        plan = self.plan
        counted = self.counted(len(members))
        if is_masked(plan, group):
            vectors = {client: self._sent(client, part, counted) for client in members}
            # Population sums have no round: their groups are told apart by number.
            number = RoundId(int(self.round_id) + group)
            return signed(secure_sum(vectors, plan, self.what, number, self.entropy), WORDS), True
        total = np.zeros(self.words, np.int64)
        for client in members:
            total += self._sent(client, part, counted)
        return total, False

    def _share(self, shares: SharedTotal, members: Sequence[ClientId], part: Part) -> None:
        """Every client's part in two random shares."""
        for client in members:
            secret = self.entropy.secret(Label.STATISTIC_SHARE, *self._address, int(client))
            share = uniform(WORDS, Stream.of(secret, Label.STATISTIC_SHARE), self.words)
            words = WORDS.from_ints(self.rounded(part(client)))
            shares.add(WORDS.sub(words, share), share)

    def rounded(self, part: npt.NDArray[np.float64]) -> Integers:
        """Towards zero, and so not longer than `scale`; zeros where it is not finite."""
        if not np.isfinite(part).all():
            return np.zeros(self.words, np.int64)
        length = float(np.linalg.norm(part))
        # A hair less than 1, so that rounding of floats cannot pass it.
        within = part if length <= 1.0 else part * ((1.0 - 1e-12) / length)
        return np.trunc(within * self.scale).astype(np.int64)

    def _sent(self, client: ClientId, part: Part, counted: int) -> Integers:
        """A client's part with its own noise, where it adds any."""
        own = self.rounded(part(client))
        if share := self.kind.own_part(counted):
            own += self._drawn("client", int(client), share)
        return own

    def _drawn(self, who: str, number: int, part: float = 1.0) -> Integers:
        deviation = self.noise * self.scale * part
        if deviation < LEAST_SHARE:
            raise ConfigError(
                f"[dp] a share of the noise on {self.what} is {deviation:.3g} integers wide, too "
                "narrow for an account of the sum",
                hint="a smaller epsilon, or fewer clients in a sum",
            )
        secret = self.entropy.secret(Label.STATISTIC_NOISE, *self._address, who, number)
        stream = Stream.of(secret, Label.STATISTIC_NOISE)
        return discrete_gaussian(deviation).sample(stream, self.words)

    @property
    def _address(self) -> tuple[str, str, int, str]:
        """Noise of another width is other noise, and not the same coins at another scale."""
        return self.plan.federation, self.what, int(self.round_id), repr(self.noise)
