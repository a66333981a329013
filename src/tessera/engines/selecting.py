"""Rows selected with noise: everybody's marks, summed once before the first round.

Noise is added by whom the plan trusts (`[dp] trust`): the server, to the sum; every client, all of
it, to its own marks; every client a share of it, under the masks of a secure sum; or each of two
servers, all of it, to the sum of its shares. A sum is taken group by group, as that of any
statistic, and each group is opened: in shares each group has the whole noise.

Marks are rounded down to integers, so that they are not longer than 1; noise is a discrete Gaussian
over the same unit, thousands of units wide: what it differs from a Gaussian by is negligible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy
from tessera.crypto.noise import WIDEST, discrete_gaussian
from tessera.crypto.prg import Label, Stream, uniform
from tessera.data.examples import ClientData
from tessera.engines.secure_statistics import WORDS, secure_sum
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.arrays import Ids
from tessera.learning.bound_model import BoundModel
from tessera.learning.popularity import Popularity
from tessera.learning.quantize import signed
from tessera.learning.setup import Progress
from tessera.rounds import dp, schemes
from tessera.rounds.plan import Crypto, NoiseFrom, NoisyRows, Plan

Marks = npt.NDArray[np.int64]

FINEST: Final = 20
"""A mark of 1 is at most 2 to this many units."""
WHAT: Final = "selection"


def select_rows(
    data: ClientData,
    bound: BoundModel,
    plan: Plan,
    clients: list[ClientId],
    entropy: Entropy,
    progress: Progress | None = None,
) -> Popularity | None:
    """The popularity of all rows by the plan's noise; None where it selects none."""
    if plan.dp is None or plan.dp.rows is not NoisyRows.SELECTED:
        return None
    return RowSelection(data, bound, plan, entropy).popularity(clients, progress)


class RowSelection:
    """One histogram over all tables of a model."""

    def __init__(self, data: ClientData, bound: BoundModel, plan: Plan, entropy: Entropy) -> None:
        self._data, self._bound, self._plan, self._entropy = data, bound, plan, entropy
        self._sizes = {t.name: t.rows for t in plan.tables}
        self._noise = dp.selection_noise(plan)
        self._scale = 2.0 ** min(FINEST, math.floor(math.log2(WIDEST / self._noise)))
        if self._noise * self._scale < 1000.0:
            raise ConfigError(
                f"[dp] noise of {self._noise:g} on the popularity of rows is out of range",
                hint="a smaller epsilon, or a smaller selection in [dp]",
            )

    def popularity(self, clients: list[ClientId], progress: Progress | None) -> Popularity:
        plan, trust = self._plan, self._trust
        names = sorted(clients)
        groups = max(1, len(names) // plan.cohort)
        total = np.zeros(sum(self._sizes.values()), np.int64)
        sources = 0.0  # of noise, each of the deviation that the account asks for
        for group in range(groups):
            members = names[group::groups]
            total += self._summed(members, group)
            sources += self._sources(members)
            if progress is not None:
                progress((group + 1) * len(names) // groups, len(names))
        servers = {NoiseFrom.SERVER: 1, NoiseFrom.EACH: 2}.get(trust, 0)
        for server in range(servers):
            total += self._drawn(len(total), "server", server)
        marks, start = {}, 0
        for name, rows in self._sizes.items():
            marks[name] = total[start : start + rows] / self._scale
            start += rows
        return Popularity(
            marks=marks,
            clients=len(names),
            deviation=self._noise * math.sqrt(servers + sources),
            threshold=dp.section(plan).threshold,
        )

    @property
    def _trust(self) -> NoiseFrom:
        return dp.section(self._plan).trust

    def _sources(self, members: list[ClientId]) -> float:
        """How often the whole noise is in the sum of a group, by its clients."""
        if self._trust is NoiseFrom.LOCAL:
            return float(len(members))
        if self._trust is NoiseFrom.SHARES:
            return len(members) / self._honest(len(members))
        return 0.0

    def _honest(self, members: int) -> int:
        """Clients of a group whose shares are enough: its fewest survivors, less the corrupt."""
        plan = self._plan
        lost = plan.cohort - plan.least_survivors
        return max(1, members - lost - plan.corrupt_shares)

    def _summed(self, members: list[ClientId], group: int) -> Marks:
        """Over a group: what opens of it, or what two servers hold together."""
        plan, crypto = self._plan, self._plan.simulation.crypto
        real = crypto is Crypto.EVERY or (crypto is Crypto.SAMPLED and group == 0)
        if self._trust is NoiseFrom.EACH:
            return self._shared(members)
        if schemes.of(plan).hides and real:
            vectors = {client: self._sent(client, len(members)) for client in members}
            words = secure_sum(vectors, plan, WHAT, RoundId(group), self._entropy)
            return signed(words, WORDS)
        total = np.zeros(sum(self._sizes.values()), np.int64)
        for client in members:
            total += self._sent(client, len(members))
        return total

    def _shared(self, members: list[ClientId]) -> Marks:
        """Every client's marks in two random shares; each server adds up its own."""
        length = sum(self._sizes.values())
        leader, helper = WORDS.zeros((length,)), WORDS.zeros((length,))
        for client in members:
            secret = self._entropy.secret(Label.SELECTION_SHARE, self._plan.federation, int(client))
            share = uniform(WORDS, Stream.of(secret, Label.SELECTION_SHARE), length)
            helper = WORDS.add(helper, share)
            words = WORDS.from_ints(self._marked(client))
            leader = WORDS.add(leader, WORDS.sub(words, share))
        return signed(WORDS.add(leader, helper), WORDS)

    def _sent(self, client: ClientId, members: int) -> Marks:
        """A client's marks with its own noise, where it adds any."""
        marks = self._marked(client)
        if self._trust is NoiseFrom.LOCAL:
            marks += self._drawn(len(marks), "client", int(client))
        elif self._trust is NoiseFrom.SHARES:
            part = 1.0 / math.sqrt(self._honest(members))
            marks += self._drawn(len(marks), "client", int(client), part)
        return marks

    def _drawn(self, count: int, who: str, number: int, part: float = 1.0) -> Marks:
        secret = self._entropy.secret(Label.SELECTION_NOISE, self._plan.federation, who, number)
        stream = Stream.of(secret, Label.SELECTION_NOISE)
        return discrete_gaussian(self._noise * self._scale * part).sample(stream, count)

    def _marked(self, client: ClientId) -> Marks:
        return marked(
            self._bound.all_row_ids_of(self._data.of(int(client))), self._sizes, self._scale
        )


def marked(rows: Mapping[str, Ids], sizes: Mapping[str, int], scale: float) -> Marks:
    """A client's marks over all tables, at most `scale` long."""
    held = sum(len(rows[name]) for name in sizes)
    marks = np.zeros(sum(sizes.values()), np.int64)
    start = 0
    for name, size in sizes.items():
        marks[rows[name].astype(np.int64) + start] = math.floor(scale / math.sqrt(max(held, 1)))
        start += size
    return marks
