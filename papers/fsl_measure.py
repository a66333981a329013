"""What Cui et al. 2022 measure in section 7, measured here: bins, point functions, a DIN round.

Bins and keys are those of `tessera.crypto` alone, for one client; the round is the one that the
paper borrows from Niu et al. 2020 (`papers/sfsl_round.py`), between two servers and with all
their messages. Seconds are CPU seconds of one core. Secrets are scripted, training returns
constants and is part of no figure.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, comb, log2
from statistics import fmean, median
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from papers import sfsl_round as sfsl
from papers.sfsl_round import ROUND, RoundSetting
from tessera.crypto import dpf, kernel
from tessera.crypto.cuckoo import HASHES, Layout, SimpleTable, choices
from tessera.crypto.dpf import REPORT_ID_BYTES, SEED_BYTES, Forest, Values
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.group import Group, Words
from tessera.crypto.keys import identities
from tessera.crypto.ring import Ring
from tessera.ids import ClientId, Party
from tessera.learning.tables.table import LazyTable, StoredTable
from tessera.plan.plan import Plan
from tessera.privacy.index.period import MemoryPeriods
from tessera.protocols.machine import Outbound
from tessera.protocols.two_server.params import Read, TwoServerParams, TwoServerTable
from tessera.protocols.two_server.read.client import RowTagCache, row_digests
from tessera.protocols.union.encoding import packed_bytes
from tessera.rounds.messages import RoundResult
from tessera.rounds.party import ClientRoundSetup, HelperRoundSetup, LocalState, ServerRoundSetup
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.domain import two_server_params
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound
from tessera.simulation.simulator import WORK, Simulator, Work
from tessera.simulation.subcohort import between_messages
from tessera.simulation.two_server import TwoServerSetup

# --- meter ----------------------------------------------------------------------------------------
#
# What a server of a round hashes for each byte that it receives or sends; and the pace of AES.
#
# Blocks' time is seconds divided by the seconds of one AES block on the kernel in use. Clocks and
# neighbours of a machine change within a second, so the pace is taken many times during a round.


_PACE_BLOCKS: Final = 1 << 21


class Pace:
    """Seconds of an AES block, taken whenever `work` is asked for more work."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._taken: list[float] = []

    def __call__(self, present: Collection[ClientId]) -> Any:
        begun = time.process_time()
        kernel.active().aes_limit(_PACE_BLOCKS)
        self._taken.append((time.process_time() - begun) / _PACE_BLOCKS)
        return self._work(present)

    @property
    def block(self) -> float:
        return median(self._taken)


class Metered:
    """A leader's or helper's round, with a meter of bytes: received and sent, and hashed."""

    def __init__(self, role: Any) -> None:
        self._role = role
        self.carried = self.hashed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)

    def start(self) -> list[Outbound]:
        return self._weighed(self._role.start)

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        self.carried += len(data)
        return self._weighed(lambda: self._role.receive(sender, data))

    def close_phase(self) -> list[Outbound]:
        return self._weighed(self._role.close_phase)

    @property
    def share(self) -> float:
        """Bytes hashed for each byte received or sent."""
        return self.hashed / max(1, self.carried)

    def _weighed(self, step: Callable[[], list[Outbound]]) -> list[Outbound]:
        with self._counting():
            out = step()
        self.carried += sum(len(message.data) for message in out)
        return out

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Within it every SHA-256 of the process is counted: a simulator takes step after step."""
        original = hashlib.sha256
        setattr(hashlib, "sha256", partial(_CountedHash, self, original))  # noqa: B010
        try:
            yield
        finally:
            setattr(hashlib, "sha256", original)  # noqa: B010


class _CountedHash:
    """Stands for `hashlib.sha256`, and tells the meter how much it is given."""

    def __init__(self, meter: Metered, original: Callable[[], Any], data: Any = b"") -> None:
        self._meter, self._running = meter, original()
        self.update(data)

    def update(self, data: Any) -> None:
        self._meter.hashed += len(data)
        self._running.update(data)

    def digest(self) -> bytes:
        return bytes(self._running.digest())


# --- measure --------------------------------------------------------------------------------------

T = TypeVar("T")

SCALAR: Final = Values(Ring(128))
"""The paper's weights: one word of 128 bits."""

_CHUNK: Final = 1 << 20  # rows hashed at once: a table of 2^25 rows would take gigabytes
_SEED_PLAIN: Final = 32  # the smaller one of two plain shares
_REPEATS: Final = 3


def part_of(rows: int, percent: float) -> int:
    """k at this share of m."""
    return max(1, round(rows * percent / 100))


def scaled(factor: float, k: int) -> int:
    """The paper's number of bins."""
    return max(HASHES, ceil(factor * k))


# --- bins -----------------------------------------------------------------------------------------


def bin_sizes(rows: int, bins: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """How many of `rows` rows are in each bin of the simple table."""
    total = np.zeros(bins, dtype=np.int64)
    for start in range(0, rows, _CHUNK):
        ids = np.arange(start, min(rows, start + _CHUNK), dtype=np.uint64)
        total += np.bincount(choices(ids, seed, bins).reshape(-1), minlength=bins)
    return total


def log2_smallest_failure(ids: int, bins: int) -> float:
    """log2 of the expected number of sets of four rows that have the same three bins.

    Where it is far below zero it is, but for terms of its square, a lower bound on the probability
    that some row finds no place.
    """
    return log2(max(comb(ids, 4), 1)) - 3 * log2(comb(bins, 3))


def failure_rate(ids: int, bins: int, trials: int) -> float:
    """How often some of `ids` rows found no place, over this many seeds."""
    rows = np.arange(ids)
    failed = sum(
        SimpleTable.of(ids, bins, seed).place(rows).left_out.size > 0 for seed in range(trials)
    )
    return failed / trials


# --- point functions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTimes:
    """CPU seconds for one client: the least of some runs of each step."""

    plan: float  # the simple table and its trees: public, once a round
    place: float  # cuckoo hashing
    gen: float
    eval: float
    aggregate: float
    server: float  # eval and aggregation in one pass, as servers do it: leaves straight to rows


def key_times(rows: int, k: int, bins: int, values: Values = SCALAR) -> KeyTimes:
    """One client with k of the rows, through the kernel in use; one server's share of the sum."""
    group = values.group
    assert group is not None
    plan, layout = timed(lambda: Layout.of(SimpleTable.of(rows, bins, 0), values), 1)
    held = np.random.default_rng(0).permutation(rows)[:k].astype(np.int64)
    words = group.zeros((k, values.words))
    words[...] = 1
    report, entropy = bytes(REPORT_ID_BYTES), ScriptedEntropy(b"fsl")
    ready, _ = timed(lambda: layout.table.positions, 1)
    layout.rows(layout.forest.empty(), 0)  # the public list of who is where is made here

    def generate() -> dpf.KeyPair:
        spread = layout.spread(placement, words)
        return dpf.gen(layout.forest, placement.points, spread, report_id=report, entropy=entropy)

    def evaluate() -> npt.NDArray[np.uint8]:
        received = dpf.ServerKeys.of(keys.public, keys.seeds[1], party=1, report_id=report)
        return dpf.evaluate(layout.forest, [received])

    def serve() -> Words:
        received = dpf.ServerKeys.of(keys.public, keys.seeds[1], party=1, report_id=report)
        space = layout.row_space(1)
        dpf.add_to(layout.forest, [received], space)
        return layout.row_words(space)

    place, placement = timed(lambda: layout.table.place(held))
    gen, keys = timed(generate)
    evaluated, leaves = timed(evaluate)
    aggregate, _ = timed(lambda: layout.rows(leaves, 1))
    server, _ = timed(serve)
    return KeyTimes(
        plan=plan + ready,
        place=place,
        gen=gen,
        eval=evaluated,
        aggregate=aggregate,
        server=server,
    )


def timed(work: Callable[[], T], repeats: int = _REPEATS) -> tuple[float, T]:
    """The least CPU seconds of some runs, and what the last gave."""
    least = float("inf")
    for _ in range(repeats):
        begun = time.process_time()
        made = work()
        least = min(least, time.process_time() - begun)
    return least, made


# --- bytes ----------------------------------------------------------------------------------------


def key_bytes(rows: int, bins: int, values: Values) -> int:
    """What a client uploads for both servers: keys, two seeds and the report's id."""
    forest = Forest.of(bin_sizes(rows, bins), values)
    return forest.public_bytes + 2 * SEED_BYTES + REPORT_ID_BYTES


def plain_bytes(rows: int, values: Values) -> int:
    """The same as two plain shares of the whole table: a seed, and what is left."""
    assert values.group is not None
    return packed_bytes(values.group, rows * values.words) + _SEED_PLAIN


def break_even(rows: int, values: Values, bins_for: Callable[[int], int]) -> float:
    """The largest share k/m at which keys take no more bytes than plain shares, to m / 1000."""
    plain = plain_bytes(rows, values)

    def too_long(thousandths: int) -> bool:
        return key_bytes(rows, bins_for(part_of(rows, thousandths / 10)), values) > plain

    return bisect_left(range(1, 1000), True, key=too_long) / 1000


# --- the round of section 7.5 ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoServerMeasured:
    """One round between two servers: bytes and CPU seconds, means over clients.

    The simulated parties share what is public: the simple tables with their trees, and the model in
    bytes. What that takes is in the `_plan` fields and in nothing else.
    """

    up: dict[str, float]  # by kind of message
    down: dict[str, float]
    rows_up: float  # of the report: keys of rows, and everything but the dense share
    dense_up: float
    between: float  # bytes between the servers, for each client
    client: float
    leader: dict[str, float]  # by phase of the round
    helper: dict[str, float]
    client_plan: float
    server_plan: float
    survivors: int
    rows_opened: int
    block: float  # seconds of an AES block, during the round
    hashed: tuple[float, float]  # bytes for each byte received or sent: leader, helper

    @property
    def bytes(self) -> float:
        return sum(self.up.values()) + sum(self.down.values())


def two_server(setting: RoundSetting, *, verify: bool = True) -> TwoServerMeasured:
    """The round twice: the first run makes what is public, and the second is measured.

    What is hashed is counted in the first, since counting takes time. Between them the rows change
    that the first has written, as between any two rounds: servers compute tags of changed rows
    only.
    """
    setting = replace(setting, scheme="two-server", papers=False)
    plan = replace(setting.plan, two_server=replace(setting.plan.two_server, verify=verify))
    tables: dict[str, StoredTable] = {
        t.name: LazyTable(sfsl.spec(plan, t.name)) for t in plan.tables
    }
    tags = RowTagCache(), RowTagCache()
    first, result = _run(setting, plan, tables, tags, count_hashes=True)
    for name, mean in result.tables.items():
        tables[name].update(mean.ids, mean.mean.astype(np.float32) + np.float32(1), mean.counts)
    return replace(_run(setting, plan, tables, tags)[0], hashed=first.hashed)


def _run(
    setting: RoundSetting,
    plan: Plan,
    tables: dict[str, StoredTable],
    tags: tuple[RowTagCache, RowTagCache],
    *,
    count_hashes: bool = False,
) -> tuple[TwoServerMeasured, RoundResult]:
    entropy = ScriptedEntropy(b"fsl")
    setup = TwoServerSetup.of(entropy, plan.federation)
    names = [ClientId(i) for i in range(setting.clients)]
    signers = identities(names, entropy, plan.federation)
    maps = sfsl.derived_maps(setting, plan)
    dense = np.zeros(plan.model.dense, dtype=np.float32)
    model: Any = {"dense": dense, "tables": tables, "derived": maps}
    server = LeaderRound(
        ServerRoundSetup(
            plan=plan,
            round_id=ROUND,
            **model,
            invited=names,
            own=replace(setup.leader_party, row_tags=tags[0]),
            identity=signers[names[0]],
        )
    )
    as_helper = HelperRoundSetup(
        plan=plan,
        round_id=ROUND,
        **model,
        own=replace(setup.helper_party, row_tags=tags[1]),
        directory=signers[names[0]].directory,
    )
    ready, helper = timed(lambda: HelperRound(as_helper), 1)  # the model as both servers hold it
    clients = {
        me: TwoServerClientRound(
            ClientRoundSetup(
                plan=plan,
                round_id=ROUND,
                party=me,
                local=LocalState(
                    real={"goods": setting.market.client(int(me))},
                    periods=MemoryPeriods(),
                    derived=maps,
                ),
                entropy=entropy,
                identity=signers[me],
                servers=setup.servers,
            )
        )
        for me in names
    }
    first_messages = {me: client.start() for me, client in clients.items()}
    pace = Pace(between_messages(clients, partial(sfsl.trained, plan)))
    meters = Metered(server), Metered(helper)
    driven: tuple[Any, Any] = meters if count_hashes else (server, helper)
    simulator = Simulator(
        driven[0],
        clients,
        first_messages,
        helper=driven[1],
        greeting=driven[0].start(),
        work=pace,
    )
    outcome = simulator.run()
    if outcome.aborted is not None:
        raise outcome.aborted
    traffic, result = outcome.traffic, server.result
    survivors = list(result.survivors)
    up = {kind: fmean(traffic.up[c][kind] for c in survivors) for kind in traffic.up[survivors[0]]}
    down = {
        kind: fmean(traffic.down[c][kind] for c in survivors) for kind in traffic.down[survivors[0]]
    }
    params = two_server_params(plan, ROUND, setup.servers)
    share = packed_bytes(params.group, params.dense)
    client_plan, server_plan = public_plan(params)
    measured = TwoServerMeasured(
        up=up,
        down=down,
        rows_up=up["WriteReport"] - share,
        dense_up=share,
        between=traffic.between.total() / len(survivors),
        client=fmean(
            sum(seconds for kind, seconds in traffic.client_seconds[c].items() if kind != WORK)
            for c in survivors
        ),
        leader=dict(traffic.server_seconds),
        helper=dict(traffic.helper_seconds),
        client_plan=client_plan,
        server_plan=server_plan + ready,
        survivors=len(survivors),
        rows_opened=result.rows_opened,
        block=pace.block,
        hashed=(meters[0].share, meters[1].share),
    )
    return measured, result


def public_plan(params: TwoServerParams) -> tuple[float, float]:
    """CPU seconds in which a client, and a server, makes the public part of a round."""
    client = server = 0.0
    for spec in params.tables:
        if spec.uses_points:
            ours, theirs = _table_plan(spec, params.group)
            client, server = client + ours, server + theirs
    return client, client + server


def _table_plan(spec: TwoServerTable, group: Group) -> tuple[float, float]:
    """What all parties make of one table, and what only servers make on top of it."""

    def make() -> tuple[Layout, Layout]:
        table = SimpleTable.of(spec.rows, spec.bins, 1, stash=spec.stash)
        assert table.positions.size  # made when first used
        words = Values(group, spec.words) if spec.writes_points else spec.selecting
        return Layout.of(table, spec.selecting), Layout.of(table, words)

    shared, (reading, writing) = timed(make, 1)
    model = np.zeros((spec.rows, spec.row_bytes), dtype=np.uint8)
    steps: list[Callable[[], object]] = [lambda: reading.padded(model)]
    tags = 0.0
    if spec.read is Read.CHECKED:  # of a first round; later only changed rows are hashed
        ids = spec.named(np.arange(spec.rows))
        tags, _ = timed(lambda: row_digests(spec.table, ids, model), 1)
    if spec.writes_points:
        steps.append(lambda: writing.row_space(0))
    # A second call finds what the first has made, and its own work belongs to the round.
    made = sum(max(0.0, timed(step, 1)[0] - timed(step, 1)[0]) for step in steps)
    return shared, tags + made
