"""Tally: whole numbers of many clients added up under the plan's security, beside the rounds.

For what is asked once (the mean of all ratings) or now and then (metrics on held-out examples), and
is no update: a secure sum of its own, in keys of its own. Only the sum leaves; its messages are
real, their bytes are in no round's figures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy, SystemEntropy
from tessera.crypto.ring import Ring
from tessera.engines.simulator import Simulator
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.setup import Progress, Ready
from tessera.protocols.secagg.client import Client
from tessera.protocols.secagg.params import GraphKind, SecAggParams, StageSpec, Threat
from tessera.protocols.secagg.standalone import Aggregator, Contribution, Contributor
from tessera.rounds.plan import Crypto, Plan
from tessera.tasks import Task

Counts = npt.NDArray[np.int64]

WORDS: Final = Ring(40)
"""Room for the sums of any cohort: 2^30 units each from 1,000 clients."""

MANY: Final = 200
"""From here on a sum of few words takes the sparse graph, whatever the rounds do."""


def add_up(
    vectors: Mapping[ClientId, Counts], plan: Plan, what: str, round_id: RoundId, entropy: Entropy
) -> Counts:
    """The secure sum of these vectors; `what` names its keys, and tells it from other sums."""
    if plan.security.threat is Threat.ACTIVE:
        raise ConfigError(
            f"plan: {what} against an active server need signed keys for a second sum",
            hint='use threat = "semi-honest"; metrics = "central" needs no such sum',
        )
    params = SecAggParams(
        federation=f"{plan.federation}: {what}",
        round_id=round_id,
        plan_hash=hashlib.sha256(what.encode() + plan.digest).digest(),
        cohort=len(vectors),
        stages=(StageSpec(name=what, group=WORDS, dense=len(next(iter(vectors.values())))),),
        graph=GraphKind.SPARSE if len(vectors) >= MANY else plan.security.graph,
        corrupt=plan.security.corrupt,
        dropout=plan.security.dropout,
    )
    clients, opening = {}, {}
    for name, vector in vectors.items():
        client, opening[name] = Client.join(params, name, entropy=entropy)
        clients[name] = Contributor(client, (Contribution(dense=WORDS.from_ints(vector)),))
    server = Aggregator(params, tuple(vectors), entropy=entropy)
    outcome = Simulator(server, clients, opening).run()
    if outcome.aborted is not None:
        raise outcome.aborted
    return server.sums[0].dense.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over everybody, taken group by group; the server sees each group's own sum."""

    sum: Counts = field(repr=False)
    clients: int
    groups: int
    secure_groups: int


Told = Callable[[str, int, int], None]
"""(what is under way, how many clients are done, of how many)."""


def set_up(
    task: Task, plan: Plan, entropy: Entropy | None = None, tell: Told | None = None
) -> tuple[Task, Ready | None]:
    """The task with the data that is trained on, once the sum over all clients is taken."""
    if task.setup is None:
        return task, None
    counts = {
        ClientId(client): task.setup.count(task.data.of(client))
        for client in range(task.data.clients)
        if task.data.offsets[client] < task.data.offsets[client + 1]
    }
    summing = partial(tell, "adding up") if tell is not None else None
    total = everybody(counts, plan, "set-up", entropy or SystemEntropy(), summing)
    fitting = partial(tell, "fitting masks") if tell is not None else None
    ready = task.setup.finish(task.data, total.sum, fitting)
    about = {"clients": total.clients, "groups": total.groups, "masked": total.secure_groups}
    ready = replace(ready, facts={**ready.facts, "sum": about})
    return replace(task, data=ready.data), ready


def everybody(
    vectors: Mapping[ClientId, Counts],
    plan: Plan,
    what: str,
    entropy: Entropy,
    progress: Progress | None = None,
) -> Total:
    """The sum over all clients, in groups of a cohort's size at least.

    With plain schemes it is a plain sum; between two servers, too, it is clients who mask it. Where
    cryptography is sampled, one group is masked and the others add the same integers in the open.
    """
    names = sorted(vectors)
    groups = max(1, len(names) // plan.cohort)
    total = np.zeros(len(vectors[names[0]]), np.int64)
    masked = 0
    for group in range(groups):
        part = {name: vectors[name] for name in names[group::groups]}
        crypto = plan.simulation.crypto
        real = crypto is Crypto.EVERY or (crypto is Crypto.SAMPLED and group == 0)
        if plan.scheme.hides and real:
            total += add_up(part, plan, what, RoundId(group), entropy)
            masked += 1
        else:
            total += np.sum(list(part.values()), axis=0)
        if progress is not None:
            progress((group + 1) * len(names) // groups, len(names))
    return Total(total, len(names), groups, masked)
