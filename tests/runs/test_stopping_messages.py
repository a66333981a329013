"""When training ends follows from bytes on the wire, which tell no more of anybody than is charged.

Under a secure scheme with `crypto = "every"` the sums that `patience` decides by are messages, and
pass the simulator. Those of plain schemes and of two servers are taken in memory
(`test_early_stopping.py`), and a deployment has no federated metrics and no `patience`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from runs import toy
from runs.test_early_stopping import NOISE, TESTS, Scripted, finished, worlds
from tessera.audit.canary_training import Guessing
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.examples import LABEL, ClientData
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.compression import signed
from tessera.learning.metrics import ClickMetric
from tessera.plan import DPPlan, Plan
from tessera.privacy.dp.accounting import epsilon as epsilon_of
from tessera.privacy.dp.events import THE_METRICS
from tessera.privacy.dp.guarantee import Adjacency, Observer
from tessera.protocols.secagg.params import SecAggParams
from tessera.protocols.secagg.server import SecAggServerSetup
from tessera.protocols.secagg.standalone import Aggregator
from tessera.rounds.events import RoundFinished
from tessera.rounds.noise import noise_of
from tessera.runs import statistics
from tessera.runs.evaluation import VALIDATION, EarlyStopping
from tessera.runs.statistics import WORDS, Counts, NoisyStatistic
from tessera.runs.training import Training, complete
from tessera.simulation.simulator import FINISHED, Simulator
from tessera.simulation.views import Views

MEMBERS = {ClientId(c): ClientId(c) for c in range(6)}


def secure_plan(trust: str, **simulation) -> Plan:
    given = {"patience": 2, "evaluate_every": 1, "rounds": TESTS, "metrics": "federated"}
    section = DPPlan(**{**NOISE, "trust": trust})
    plan = toy.plan("secure-fedavg", dp=section, simulation={**given, **simulation})
    return complete(plan, toy.task())


@dataclass(frozen=True)
class CarriedSum:
    """One secure sum as the simulator carried it."""

    params: SecAggParams
    clients: tuple[ClientId, ...]
    views: Views = field(repr=False)

    @property
    def what(self) -> str:
        return self.params.stages[0].name

    def received(self, kind: str = "") -> list[tuple[ClientId, bytes]]:
        """What arrived at the server, in order."""
        seen = [e for e in self.views.by_party[SERVER] if e.direction == "received"]
        return [(e.other, e.data) for e in seen if kind in ("", e.kind)]

    def opened(self) -> Counts:
        """What another server makes of the same bytes."""
        server = Aggregator(
            SecAggServerSetup(self.params, self.clients), entropy=ScriptedEntropy(b"another server")
        )
        for sender, data in self.received():
            server.receive(sender, data)
            while server.phase not in FINISHED and not server.expected:
                server.close_phase()
        return signed(server.sums[0].dense.astype(np.int64), WORDS)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> list[CarriedSum]:
    """Every secure sum of metrics that is carried from now on."""
    carried: list[CarriedSum] = []

    def recorded(server, clients, first_messages):
        carried.append(CarriedSum(server.params, tuple(clients), Views()))
        return Simulator(server, clients, first_messages, views=carried[-1].views)

    monkeypatch.setattr(statistics, "Simulator", recorded)
    return carried


def no_noise(patch: pytest.MonkeyPatch) -> None:
    """The protection off: the same messages carry exact figures."""
    patch.setattr(NoisyStatistic, "_drawn", lambda self, *_: np.zeros(self.words, np.int64))


def stopped(held: ClientData, script: int, plan: Plan, seed: bytes = b"") -> int:
    """The round after which training ends, by the shipped sums and the shipped rule."""
    evaluation, entropy = Scripted(script), ScriptedEntropy(seed)
    stopping = EarlyStopping(plan.simulation.patience, False, held)

    def measure(held: ClientData, round_id: RoundId) -> float | None:
        evaluation.round_id = int(round_id)
        given = (plan, round_id, MEMBERS, None, {}, entropy)
        return evaluation.federated(*given, validation=held)

    for round_id in range(TESTS):
        stopping.after(finished(round_id), measure)
        if stopping.reason:
            return round_id
    return TESTS


def by_the_bytes(carried: list[CarriedSum], plan: Plan) -> int:
    """The same by whoever reads what the clients sent, and nothing else."""
    stopping = EarlyStopping(plan.simulation.patience, False, worlds(0)[0])
    for at, total in enumerate(c for c in carried if c.what == VALIDATION):
        words = total.opened()
        scale = NoisyStatistic(
            plan=plan,
            entropy=ScriptedEntropy(b""),
            what=VALIDATION,
            noise=noise_of(plan).statistic_noise(THE_METRICS),
            words=len(words),
        ).scale
        value = ClickMetric().from_few(words / scale * noise_of(plan).dp.counted)
        if not np.isnan(value):
            stopping.seen(value)
        if stopping.reason:
            return at
    return TESTS


def a_victim(plan: Plan) -> tuple[int, int]:
    """A script and the first person whose labels alone move the last round by exact figures."""
    quick = plan.with_simulation(crypto="none")
    with pytest.MonkeyPatch.context() as patch:
        no_noise(patch)
        for script in range(12):
            ends = partial(stopped, script=script, plan=quick)
            for one in MEMBERS:
                if ends(worlds(int(one))[0]) != ends(worlds(int(one))[1]):
                    return script, int(one)
    raise AssertionError("nobody's labels move the last round")


def told(scores: np.ndarray, coins: np.ndarray) -> tuple[float, float]:
    """The share guessed rightly where scores are over 0, and the least epsilon that allows what
    the best of them show, at 99.9 %."""
    right = float(np.mean((scores > 0.0) == coins))
    return right, Guessing(scores, coins).bound(delta=1e-5, level=0.999)


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["shares", "server"])
@pytest.mark.parametrize("runs", [100, pytest.param(3000, marks=pytest.mark.campaign)])
def test_the_last_round_by_carried_sums_tells_no_more_than_is_claimed(
    trust, runs, wire, monkeypatch
):
    """Who knows all but one person's labels guesses them by when training ended. With noise in
    shares the server guesses by all sums that it opened, too."""
    plan, coins = secure_plan(trust), np.random.default_rng(6).random(runs) < 0.5
    script, victim = a_victim(plan)
    assert not wire  # the search carries nothing
    (event,) = noise_of(plan).setting.metrics_events(TESTS)
    claim = epsilon_of(
        [(event.view(Observer.READERS), TESTS)], adjacency=Adjacency.ZERO_OUT, delta=1e-5
    )
    parts = worlds(victim)
    # What the victim's labels add to each round's sum, in words.
    moves = [difference(parts, script, at, victim) for at in range(TESTS)]

    def drawn(number: int) -> tuple[np.ndarray, np.ndarray]:
        ends, sums = np.zeros(number, int), np.zeros(number)
        for run, there in enumerate(coins[:number]):
            wire.clear()
            ends[run] = stopped(parts[int(there)], script, plan, b"%d" % run)
            assert len(wire) == min(ends[run] + 1, TESTS)
            if trust == "shares":
                opened = [carried.opened() for carried in wire]
                sums[run] = sum(float(o @ m) for o, m in zip(opened, moves, strict=False))
                if run < 20:
                    assert by_the_bytes(wire, plan) == ends[run]
        return ends, sums

    ends, sums = drawn(runs)
    half = runs // 2
    right, bound = told(likelier(ends, coins, half), coins[half:])
    lines = [f"attack 8, carried, {trust}: {runs} draws, {right:.1%} right, epsilon >= {bound:.3f}"]
    assert bound <= claim
    if trust == "shares":
        right, bound = told(sums - np.median(sums), coins)
        lines.append(f"by all sums {right:.1%}, epsilon >= {bound:.3f}")
        assert bound <= claim
    no_noise(monkeypatch)
    ends, _ = drawn(60)
    right, bound = told(likelier(ends, coins[:60], 30), coins[30:60])
    lines.append(f"claimed {claim:.3f}; without noise {right:.1%}, epsilon >= {bound:.3f}")
    print("; ".join(lines))
    assert bound > claim and len({*ends[coins[:60]]} & {*ends[~coins[:60]]}) == 0


def difference(
    parts: tuple[ClientData, ClientData], script: int, at: int, victim: int
) -> np.ndarray:
    evaluation, metric = Scripted(script), ClickMetric()
    evaluation.round_id = at
    out, there = (
        metric.few(evaluation.scores(None, {}, own), own)
        for own in (part.test_of(victim) for part in parts)
    )
    return there - out


def likelier(ends: np.ndarray, coins: np.ndarray, half: int) -> np.ndarray:
    """Scores of the second half: how much oftener the first half ended so with labels flipped."""
    first, there = ends[:half], coins[:half]
    odds = {
        end: (((first == end) & there).sum() + 1.0) / (((first == end) & ~there).sum() + 1.0)
        for end in range(TESTS + 1)
    }
    return np.log([odds[int(end)] for end in ends[half:]])


def test_of_a_whole_run_only_its_validation_sums_carry_the_held_out_labels(wire):
    """Two runs with all coins the same, in one of them some people's held-out labels flipped: until
    one ends, what clients send differs in masked vectors of the validation sums, in no length, and
    nowhere else. Who reads those bytes knows the last round."""
    plan, seen = secure_plan("shares", patience=3), []
    for flipped in (False, True):
        task, views = toy.task(), Views()
        wire.clear()
        with Training(task, plan, entropy=ScriptedEntropy(b"run"), views=views) as training:
            assert training.stopping is not None
            if flipped:
                training.stopping.held = some_flipped(training.stopping.held)
            rounds = [e for e in training.run(TESTS) if isinstance(e, RoundFinished)]
        assert len(rounds) == min(by_the_bytes(wire, plan) + 1, TESTS)
        masked = [e.data for e in views.by_party[SERVER] if e.kind == "MaskedInput"]
        seen.append((rounds, masked, list(wire)))
    (one, masked_one, sums_one), (two, masked_two, sums_two) = seen
    both = min(len(one), len(two))
    assert both >= 3
    share = both * len(masked_one) // len(one)
    assert masked_one[:share] == masked_two[:share]
    differing = set()
    for a, b in zip(sums_one[: 2 * both], sums_two[: 2 * both], strict=True):
        assert [(s, len(d)) for s, d in a.received()] == [(s, len(d)) for s, d in b.received()]
        if a.received("MaskedInput") != b.received("MaskedInput"):
            differing.add(a.what)
        else:
            assert_array_equal(a.opened(), b.opened())
    assert differing == {VALIDATION}


def some_flipped(held: ClientData) -> ClientData:
    """Every third person's, so that somebody of each round is among them."""
    own = held.test["user"] % 3 == 0
    labels = np.where(own, 1.0 - held.test[LABEL], held.test[LABEL]).astype(np.float32)
    return replace(held, test=held.test.with_field(LABEL, labels))
