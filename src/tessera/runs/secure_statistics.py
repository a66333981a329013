"""Secure statistics: integer vectors of many clients, summed under the plan's security.

For statistics that are not updates: the mean of all ratings before the first round, metrics on
held-out examples after some rounds. Each is a secure sum of its own with keys of its own, and only
the sum is opened. Its messages are real; their bytes are not counted in any round.

In a plan with fixed groups each sum is over a whole group, and needs all of its members: a sum over
any other set of clients would tell them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError
from tessera.ids import ClientId, RoundId
from tessera.learning.task_setup import Progress
from tessera.plan import Crypto, Plan
from tessera.protocols.secagg.client import Client
from tessera.protocols.secagg.params import GraphKind, SecAggParams, StageSpec, Threat
from tessera.protocols.secagg.standalone import Aggregator, Contribution, Contributor
from tessera.rounds import schemes
from tessera.rounds.fixed_groups import FixedGroup
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
    if plan.security.threat is Threat.ACTIVE:
        raise ConfigError(
            f"plan: {what} against an active server need signed keys for a second sum",
            hint='use threat = "semi-honest"; metrics = "central" needs no such sum',
        )
    words = len(next(iter(vectors.values())))
    params = sum_params(plan, what, round_id, len(vectors), words)
    if whole:
        graph = GraphKind.COMPLETE
        params = replace(params, graph=graph, dropout=0.0, threshold=len(vectors))
    clients, first_messages = {}, {}
    for name, vector in vectors.items():
        client, first_messages[name] = Client.join(params, name, entropy=entropy)
        clients[name] = Contributor(client, (Contribution(dense=WORDS.from_ints(vector)),))
    server = Aggregator(params, tuple(vectors), entropy=entropy)
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


def group_sums(
    vectors: Mapping[ClientId, Counts],
    groups: Sequence[FixedGroup],
    plan: Plan,
    what: str,
    round_id: RoundId,
    entropy: Entropy,
) -> Counts | None:
    """The sum over all fixed groups that are there, each a sum of its own; None if none is."""
    whole = [group for group in groups if vectors.keys() >= set(group)]
    sums = [
        secure_sum({c: vectors[c] for c in group}, plan, what, round_id, entropy, whole=True)
        for group in whole
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
    if plan.grouped != bool(groups):
        raise MisuseError(f"{what} of a plan with fixed groups are summed in these, and no others")
    many = max(1, len(names) // plan.cohort)
    parts: Sequence[Collection[ClientId]] = groups or [names[part::many] for part in range(many)]
    total = np.zeros(len(vectors[names[0]]), np.int64)
    masked = done = 0
    for number, members in enumerate(parts):
        part = {name: vectors[name] for name in members}
        crypto = plan.simulation.crypto
        real = crypto is Crypto.EVERY or (crypto is Crypto.SAMPLED and number == 0)
        if schemes.of(plan).hides and real:
            at = RoundId(number)
            total += secure_sum(part, plan, what, at, entropy, whole=plan.grouped)
            masked += 1
        else:
            total += np.sum(list(part.values()), axis=0)
        done += len(part)
        if progress is not None:
            progress(done, len(names))
    return PopulationSum(total, len(names), len(parts), masked)
