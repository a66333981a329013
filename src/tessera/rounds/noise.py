"""Noise: who adds it to what, what clients are charged for it, and what is left afterwards.

`noise_of` turns a plan into one object, and everybody asks that: what a client clips and trains,
which noise it adds to what it sends, what a server adds to a sum, what a ledger is charged before a
round, and what may be said of it. Each kind of noise is a class here; what all of them answer, and
the account that they share, is in `noise_account.py`.

Where noise is integers on the sum, a client's vector is clipped, rounded and within a bound
(`clipped_vector.py`). A trusted server adds noise to every word of the opened sum in the ring,
before the sum is centred: what is centred, judged and merged, and what clients are told of it,
follows from noisy words alone. Noise on a centred sum would not do: a lying client can put the
others at the wrap of the ring, where one integer more or less changes the sum by 2^b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tessera.crypto.correlated import correlated_noise, noise_streams
from tessera.crypto.entropy import Entropy
from tessera.crypto.group import Words
from tessera.crypto.noise import DEVIATION, Gaussian, add_noise, dense_noise, row_noise
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError
from tessera.ids import SERVER, ClientId, Party, RoundId, TableId
from tessera.learning.averaging import TableMean
from tessera.learning.compression import Quantizer, signed
from tessera.learning.tables.submodel import Ids, ModelUpdate
from tessera.plan import NoisyRows, Plan, Trust
from tessera.plan.noisy_vector import NoisyVector
from tessera.privacy.dp.accounting import epsilon as epsilon_of
from tessera.privacy.dp.guarantee import Adjacency, Guarantee, json_number
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.dp.mechanism import NoAccount
from tessera.privacy.dp.noise_setting import (
    MOST_MOVE,
    SummedVector,
)
from tessera.privacy.dp.subjects import Printed, PrintedNoise
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.rounds.clipped_vector import (
    ClippedBounds,
    SumBounds,
    clipped_update,
    noise_stream,
    noisy_update,
    within_bound,
)

if TYPE_CHECKING:
    from tessera.rounds.messages import RoundResult

from tessera.rounds.no_noise import Figure, Noise, Values
from tessera.rounds.noise_account import AddedNoise

ONE_SERVER: Final = "if one of the two servers adds its noise and does not collude"
SIZES: Final = (1, 2, 4, 8)
"""Records of one person in a batch, for which the noise of a paper's algorithm is shown."""


def noise_of(plan: Plan) -> Noise:
    """The noise of a plan, made once."""
    known: Noise | None = vars(plan).get("_noise")
    if known is None:
        known = vars(plan)["_noise"] = _made(plan)
    return known


def _made(plan: Plan) -> Noise:
    if plan.dp is None:
        return Noise(plan)
    kind = PAPERS.get(plan.dp.printed, KINDS[plan.dp.trust])
    return kind(plan)


def added(plan: Plan) -> AddedNoise:
    """The noise of a plan that has some."""
    found = noise_of(plan)
    assert isinstance(found, AddedNoise)
    return found


class ClientNoise(AddedNoise):
    """Every client adds all of it, to its own steps or to its own update."""

    by, honest = "every client", "nobody"

    def trained_rows(self, own: Mapping[str, Ids], sent: Mapping[str, Ids]) -> Mapping[str, Ids]:
        return sent  # every row has noise: those that had none would show which are its own

    def contribution(self, update: ModelUpdate, coins: Secret) -> ModelUpdate:
        """At user level an update is clipped as a whole; else noise is in its steps already."""
        dp = self.dp
        if dp.by_batches:
            return update
        clipped = clipped_update(update, dp.clip)
        return noisy_update(clipped, dp.clip, dp.noise, coins.derive(Label.CLIENT_NOISE))

    @cached_property
    def in_the_sum(self) -> float:
        return self.dp.noise * math.sqrt(self.plan.cohort)

    def own_part(self, counted: int) -> float:
        return 1.0

    def own_sources(self, members: int, counted: int) -> float:
        return float(members)


class NoiseOnSums(AddedNoise):
    """Integers on the sum of clipped vectors of integers."""

    @cached_property
    def vector(self) -> NoisyVector:
        assert self.plan.noisy_vector is not None
        return self.plan.noisy_vector

    def trained_rows(self, own: Mapping[str, Ids], sent: Mapping[str, Ids]) -> Mapping[str, Ids]:
        """Those that everybody is sent; none of a table where nothing is said of it."""
        none = np.zeros(0, dtype=np.uint64)
        return {
            name: np.intersect1d(own.get(name, none), ids, assume_unique=True)
            for name, ids in sent.items()
        }

    def cut(self) -> Callable[[Sequence[Words]], list[Words]] | None:
        return partial(within_bound, self.vector.bound, self.plan.ring)

    def sum_bounds(self, clients: int) -> SumBounds:
        vector = self.vector
        return ClippedBounds(
            clients=clients, top=vector.top, max_count=self.plan.update.max_count, vector=vector
        )

    def decoded(self, quantizer: Quantizer, words: Words) -> Values:
        """One scale for all, as they were clipped as one vector."""
        return signed(words, self.plan.ring).astype(np.float64) / self.vector.scale

    @property
    def sources(self) -> int:
        return self.vector.sources

    @property
    def summed_vector(self) -> SummedVector:
        vector = self.vector
        return SummedVector(words=vector.words, bound=vector.bound, honest=self.assumed)

    @property
    def assumed(self) -> str:
        """Who has to be honest beyond whom the plan trusts with the sum."""
        return ""

    @property
    def row_moves(self) -> float:
        """What is rounded again until it is short enough may move by two integers more in every
        word, whatever the coins are."""
        moved = super().row_moves
        if not moved:
            return 0.0
        integers = moved * self.vector.top + 2.0 * math.sqrt(self.vector.words)
        return min(MOST_MOVE, integers / self.vector.bound)


class ServerNoise(NoiseOnSums):
    """A trusted server adds it to the sum that it has opened, before it looks at it."""

    by, honest = "the server", "the server"
    servers = 1

    @property
    def opens_all(self) -> bool:
        """Clients name their rows to this server alone, and it adds noise to all there are."""
        return self.plan.by_rows and self.dp.rows is NoisyRows.ALL

    def covers(self, figure: Figure) -> bool:
        """What is as long as what a client names says how much that is."""
        return super().covers(figure) and not (self.opens_all and figure is Figure.ROWS)

    def on_sum(self, total: StageSum, secrets: Sequence[Secret], round_id: RoundId) -> StageSum:
        at, inverse = int(round_id), self.correlation
        ring, deviation = self.plan.ring, self.vector.deviation
        if len(secrets) != min(inverse.draws, at + 1):
            raise MisuseError(f"noise of round {at} needs the secrets of {inverse.draws}")

        def noisy(words: Words, part: str, rows: Ids | None = None) -> Words:
            if inverse.terms:
                streams = noise_streams(secrets, at, SERVER, part)
                return correlated_noise(inverse, deviation).add(ring, words, streams, rows)
            return add_noise(
                ring, deviation, words, noise_stream(secrets[0], round_id, SERVER, part)
            )

        summed = self._whole(total) if self.opens_all else total.tables
        tables = {
            table: replace(part, words=noisy(part.words, f"table {int(table)}", part.rows))
            for table, part in summed.items()
        }
        return replace(total, dense=noisy(total.dense, "dense"), tables=tables)

    def _whole(self, total: StageSum) -> dict[TableId, TableSum]:
        """Every table with all its rows, zeros where nobody wrote, and without who named them."""
        found = {}
        for t in self.plan.tables:
            table = self.plan.table_id(t.name)
            words = self.plan.ring.zeros((t.rows, t.width + 1))
            if table in total.tables:
                words[total.tables[table].rows] = total.tables[table].words
            rows = np.arange(t.rows, dtype=np.uint64)
            found[table] = TableSum(rows=rows, words=words, members={}, below_quorum=0)
        return found


class ShareNoise(NoiseOnSums):
    """Every client adds a share of it, before its masks: enough of them have to be honest."""

    by, honest = "clients in shares", "a number of clients"

    @property
    def opens_all(self) -> bool:
        return True

    def share_stream(self, root: Entropy, round_id: RoundId, client: Party) -> Stream | None:
        return noise_stream(root.secret(Label.SUM_NOISE), round_id, client, "whole")

    @property
    def assumed(self) -> str:
        return (
            f"if {self.sources} of the survivors add their noise and tell it nobody, and the "
            "secure sum's threshold holds"
        )

    @cached_property
    def in_the_sum(self) -> float:
        counted = max(1, self.plan.least_survivors - self.plan.corrupt_shares)
        return self.dp.noise * math.sqrt(self.plan.cohort / counted)

    def counted_sources(self, survivors: Callable[[], int]) -> int:
        return survivors() - self.plan.corrupt_shares

    def own_part(self, counted: int) -> float:
        return 1.0 / math.sqrt(counted)

    def own_sources(self, members: int, counted: int) -> float:
        return members / counted


class EachServerNoise(NoiseOnSums):
    """Each of two servers adds the whole of it, to its share: one of them has to be honest."""

    by, honest = "each server", "one of two servers"
    servers = 2

    @property
    def opens_all(self) -> bool:
        return True

    @cached_property
    def server_deviation(self) -> float:
        return self.vector.deviation

    @property
    def assumed(self) -> str:
        return ONE_SERVER

    @cached_property
    def in_the_sum(self) -> float:
        return self.dp.noise * self.plan.correlation.one_round * math.sqrt(2.0)


class PaperNoise(AddedNoise):
    """An algorithm of Marathe and Kanani 2022 verbatim: this one is `LocalSubDP`.

    It has no account: noise goes by the batch (`privacy/dp/subjects.py`). The claim stands
    wherever a number would, marked as the paper's.
    """

    by, honest = "every client", "nobody"
    why = "the length of its noise shows how many records of one person a batch has"

    @property
    def batches(self) -> int:
        """Mini-batches of a round: a client's own (TR)."""
        return self.dp.steps

    @property
    def divisor(self) -> int:
        """What the sum of a batch is divided by before its noise is added."""
        return 1

    @cached_property
    def paper(self) -> PrintedNoise:
        """sigma_Z of a paper's algorithm over all rounds of this plan (section 3.1 and 3.2)."""
        dp, rounds = self.dp, self.plan.simulation.rounds
        return PrintedNoise(dp.epsilon, dp.delta, dp.sampling, self.batches * rounds)

    @property
    def multiplier(self) -> float:
        return self.paper.sigma(1)

    @property
    def claim(self) -> str:
        return (
            f"with {self.dp.printed.value}, whose epsilon {self.dp.epsilon:g} is as printed by the "
            "paper and does not hold"
        )

    @cached_property
    def lasts(self) -> int | None:
        return None

    def calibrated(self) -> Plan:
        self.paper.sigma(1)  # that there is such noise
        return self.plan

    def trained_rows(self, own: Mapping[str, Ids], sent: Mapping[str, Ids]) -> Mapping[str, Ids]:
        return sent

    @property
    def open_setting(self) -> str:
        return ""  # its noise follows from every batch

    def paper_facts(self) -> dict[str, Any] | None:
        dp, kept = self.dp, self._person()
        return {
            "algorithm": dp.printed.label,
            "epsilon_as_printed": dp.epsilon,
            "epsilon": json_number(math.inf),
            "why": self.why,
            "noise_by_most_of_a_person": {size: self.paper.sigma(size) for size in SIZES},
            "records": dp.records_per_subject or None,
            "epsilon_one_record_in_a_batch": None if kept is None else json_number(kept),
        }

    def _person(self) -> float | None:
        """The epsilon of a person with as many records as the plan states, one of them in a batch.

        As if nobody could tell a batch's Z from the length of its noise; None if none are stated.
        """
        dp, plan = self.dp, self.plan
        if not dp.records_per_subject:
            return None
        one = self.paper.one_in_a_batch(records=dp.records_per_subject, batch=self.divisor)
        times = plan.simulation.rounds * dp.steps * dp.clients_per_subject
        return epsilon_of([(one, times)], adjacency=Adjacency.ADD_OR_REMOVE, delta=dp.delta)


class CentralPaperNoise(PaperNoise):
    """`CentralSubDP`: the server adds it, and sees every client's gradient."""

    by = honest = "the server"
    why = f"{PaperNoise.why}, and the server sees every client's gradient without noise"

    @property
    def only_simulated(self) -> str:
        return "CentralSubDP has clients send Z beside their gradients, which services do not carry"

    @property
    def batches(self) -> int:
        """Those of all clients (sR)."""
        return self.plan.cohort

    @property
    def divisor(self) -> int:
        return self.plan.local_training.batch

    def on_means(
        self,
        result: RoundResult,
        entropy: Entropy,
        round_id: RoundId,
        largest: Mapping[ClientId, int] | None = None,
    ) -> RoundResult:
        """Line 17: noise of sigma_Z C on every client's mean gradient.

        `largest` has what clients say beside their gradients: the most examples of one person in a
        batch. What is summed are steps: means times the rate of the round, for rows times that of
        tables.
        """
        said = largest or {}
        missing = [client for client in result.survivors if client not in said]
        if missing:
            raise MisuseError(f"CentralSubDP: client {missing[0]} has not said its Z")
        plan, paper = self.plan, self.paper
        training = plan.local_training
        secret = entropy.secret(Label.SERVER_NOISE, plan.federation, int(round_id))
        parts = sum(paper.units(said[client]) for client in result.survivors)
        step = training.rate_in(int(round_id)) * self.dp.clip * paper.unit / DEVIATION

        def drawn(source: Gaussian, shape: tuple[int, int]) -> Values:
            steps = np.full(shape[0], parts, np.int64)
            return source.owed(steps, shape[1]).astype(np.float64) * step

        tables = {}
        for name, part in result.tables.items():
            rows = drawn(row_noise(secret, name), part.mean.shape) * training.table_rate
            tables[name] = TableMean(
                part.ids, part.mean + rows / np.maximum(part.counts, 1)[:, None], part.counts
            )
        dense = drawn(dense_noise(secret), (result.dense.size, 1))[:, 0] / max(result.weight, 1)
        return replace(result, dense=result.dense + dense, tables=tables)


KINDS: Final[dict[Trust, type[AddedNoise]]] = {
    Trust.LOCAL: ClientNoise,
    Trust.SHARES: ShareNoise,
    Trust.SERVER: ServerNoise,
    Trust.EACH: EachServerNoise,
}
PAPERS: Final = {Printed.LOCAL: PaperNoise, Printed.CENTRAL: CentralPaperNoise}


def composed(runs: Sequence[tuple[Plan, int]]) -> Guarantee:
    """What several runs over the same people leave together, each after so many rounds.

    The worst against those whom the noise of every run is for, for a client that was in all rounds;
    `NoAccount` where the runs protect different units or nobody in common. Choosing among the runs
    by exact figures is not in it.
    """
    noises = [noise_of(plan) for plan, _ in runs]
    ledger = Ledger(bounds=noises[0].bounds)
    for at, (noise, (_, rounds)) in enumerate(zip(noises, runs, strict=True)):
        for entry in noise.setting.ledger(rounds).entries:
            event = replace(entry.event, federation=f"run {at}")  # each draws noise of its own
            ledger.spend(event, reason=entry.reason)
    observers = [noise.setting.protected() for noise in noises]
    alike = [o for o in observers[0] if all(o in others for others in observers)]
    units = {noise.dp.unit for noise in noises}
    if not alike or len(units) > 1:
        raise NoAccount("the runs protect different units, or against different observers")
    delta = max(noise.dp.delta for noise in noises)
    return max(
        (ledger.guarantee(unit=noises[0].dp.unit, against=o, delta=delta) for o in alike),
        key=lambda found: found.epsilon,
    )


def paper_notes(facts: Mapping[str, Any] | None) -> list[str]:
    """`paper_facts` in sentences."""
    if facts is None:
        return []
    sigmas = facts["noise_by_most_of_a_person"]
    found = [
        f"{facts['algorithm']} by the paper: epsilon {facts['epsilon_as_printed']:g}, at noise of "
        f"{' / '.join(f'{sigma:.3g}' for sigma in sigmas.values())} for "
        f"{' / '.join(map(str, sigmas))} records of one person in a batch",
        f"what holds: no finite epsilon, as {facts['why']}",
    ]
    if facts["records"]:
        found.append(
            f"and if nobody could tell: a person with {facts['records']} records, of which a batch "
            f"has one at most, has epsilon {float(facts['epsilon_one_record_in_a_batch']):.3g}"
        )
    return found


def training_notes(facts: Mapping[str, float] | None) -> list[str]:
    """`NoiseSetting.over_training` in sentences, where there is anything to say."""
    if facts is None:
        return []
    rounds, most = int(facts["rounds"]), int(facts["rounds_per_client"])
    found = []
    if most < rounds:
        apart = int(facts["separation"])
        found.append(
            f"noise is for a client in {most} of {rounds} rounds"
            + (f", {apart} or more apart" if most > 1 and apart > 1 else "")
            + ", which it keeps itself"
        )
    if facts["terms"] > 1:
        found.append(
            f"noise is correlated over rounds, and a training is one release: "
            f"{facts['noise_of_one_round']:.3g} clips deep in one round, "
            f"{facts['noise_of_all_rounds']:.3g} in the sum of all (independent noise: "
            f"{facts['independent_of_one_round']:.3g} and "
            f"{facts['independent_of_all_rounds']:.3g}), of each who adds it"
        )
    return found
