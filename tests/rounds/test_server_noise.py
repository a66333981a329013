"""A trusted server's noise: in the ring, before the sum is centred, and all that follows from it.

The attack: one lying client adds so much to one number of the vector that the exact sum there is
at the border of what is merged; whether the round is kept then says whether a victim sent its
update or zeros. Where noise is on the centred sum, it puts the others at the wrap of the ring.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rounds.shops import finished, model_of, one_table, shop
from tessera.crypto.entropy import ScriptedEntropy, SystemEntropy
from tessera.crypto.noise import discrete_gaussian
from tessera.crypto.prg import Label
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.compression import signed
from tessera.plan import DPPlan, Plan, SimulationPlan, Trust, UpdatePlan
from tessera.privacy.dp.guarantee import Observer, Unit
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.protocols.machine import RoundOutcome
from tessera.rounds import encode, messages, server
from tessera.rounds.clipped_vector import noise_stream
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.rounds.forecast import Forecast
from tessera.rounds.noise import ServerNoise, noise_of
from tessera.rounds.party import ServerParty, ServerRoundSetup
from tessera.rounds.root import draw_root
from tessera.simulation.faults import Drop

ROWS, COHORT, VICTIM, LIAR = 12, 5, ClientId(1), ClientId(3)
HELD = {c: [c, c + 1, 9] for c in range(COHORT)}
NOISE = DPPlan(unit="user", noise=8.0, trust=Trust.SERVER)
LISTED = replace(NOISE, rows="list", row_list="goods 0-4, 9")
SCHEMES = ["fedavg", "submodel", "secure-fedavg", "secure-submodel"]
SECURE = ["secure-fedavg", "secure-submodel"]


def planned(scheme: str, section: DPPlan = NOISE, **more) -> Plan:
    base = one_table(scheme, ROWS, cohort=COHORT, **more)
    return replace(base, dp=section, update=UpdatePlan(levels=2**12))


def only_dense(values: float):
    """An update that is one number: everybody else's is zeros, the victim's the whole clip."""

    def update(given):
        dense = np.zeros_like(given.dense)
        dense[0] = values
        return replace(given, dense=dense, tables={})

    return update


def lying(monkeypatch: pytest.MonkeyPatch, border: int) -> None:
    """The liar's words, after they were made: its own program adds the border to the first."""
    honest = encode.update_words

    def update_words(plan, update, *args, **given):
        found = honest(plan, update, *args, **given)
        if update.weight == 77:
            more = plan.ring.from_ints(np.array([border]))
            found.dense[:1] = plan.ring.add(found.dense[:1], more)
        return found

    monkeypatch.setattr(encode, "update_words", update_words)


def attacked(plan: Plan, *, there: bool, seed: int):
    """A federation with a liar and a victim that is there or sends zeros; others send zeros."""
    breaks = {ClientId(c): only_dense(0.0) for c in range(COHORT)}
    breaks[VICTIM] = only_dense(1.0 if there else 0.0)
    breaks[LIAR] = lambda given: replace(only_dense(0.0)(given), weight=77)
    return shop(plan, HELD, breaks=breaks, entropy=ScriptedEntropy(b"attack %d" % seed))


def kept(plan: Plan, *, there: bool, seed: int) -> bool:
    (end,) = finished(attacked(plan, there=there, seed=seed), 1)
    assert isinstance(end, RoundFinished) or end.phase == "merge"
    return isinstance(end, RoundFinished)


def told_apart(plan: Plan, rounds: int) -> int:
    """Of twice so many rounds, half with the victim, in how many the outcome says which."""
    right = 0
    for seed in range(rounds):
        right += not kept(plan, there=True, seed=2 * seed)
        right += kept(plan, there=False, seed=2 * seed + 1)
    return right


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SECURE)
def test_whether_a_round_is_kept_says_nothing_of_a_victim(scheme, monkeypatch) -> None:
    """Noise of 8 clips moves each outcome by 5 % at most, so that 8.4 of 16 are right on average;
    15 or more by chance once in 1,900. With the noise after the judgement all are."""
    plan = planned(scheme)
    lying(monkeypatch, plan.noisy_vector.largest)
    assert 2 <= told_apart(plan, 8) <= 14
    monkeypatch.setattr(ServerNoise, "on_sum", lambda self, total, *_: total)
    assert told_apart(plan, 5) == 10


def test_what_clients_are_told_follows_from_noisy_words(monkeypatch) -> None:
    """The farewell says why a sum is not merged, by the same words that are judged."""
    plan = planned("secure-fedavg")
    lying(monkeypatch, 1 << (plan.ring.bits - 1))  # far beyond
    seen = []
    honest = messages.RoundOver.of
    monkeypatch.setattr(
        messages.RoundOver, "of", lambda *given: seen.append(given[1:]) or honest(*given)
    )
    (end,) = finished(attacked(plan, there=True, seed=0), 1)
    assert isinstance(end, RoundAbort) and end.reason == messages.OUT_OF_BOUNDS
    assert (RoundOutcome.LEFT_OUT, messages.OUT_OF_BOUNDS) in seen


# --- at the wrap ----------------------------------------------------------------------------------


def exact_sum(plan: Plan, monkeypatch: pytest.MonkeyPatch, *, there: bool, seed: int):
    """The opened sum of a round before its noise, through real messages."""
    found = []
    honest = ServerNoise.on_sum

    def recording(self, total, *given):
        found.append(total)
        return honest(self, total, *given)

    monkeypatch.setattr(ServerNoise, "on_sum", recording)
    finished(attacked(plan, there=there, seed=seed), 1)
    monkeypatch.setattr(ServerNoise, "on_sum", honest)
    return found[-1]


def test_at_the_wrap_noise_on_the_centred_sum_gives_the_victim_away_and_in_the_ring_not(
    monkeypatch,
) -> None:
    """8 of 8 against what noise allows: of 400 draws, half with the victim, at most 52.5 % are
    right on average; 60 % or more by chance once in 700."""
    plan = planned("secure-fedavg")
    vector, ring = plan.noisy_vector, plan.ring
    lying(monkeypatch, (1 << (ring.bits - 1)) - 1)
    totals = {there: exact_sum(plan, monkeypatch, there=there, seed=0) for there in (False, True)}
    centred = ringed = 0
    for seed in range(200):
        for there, total in totals.items():
            secret = ScriptedEntropy(b"wrap").secret(Label.SUM_NOISE, seed, int(there))
            stream = noise_stream(secret, RoundId(0), SERVER, "dense")
            drawn = discrete_gaussian(vector.deviation).sample(stream, len(total.dense))
            late = np.clip(signed(total.dense, ring) + drawn, -vector.largest, vector.largest)
            opened = noise_of(plan).on_sum(total, (secret,), RoundId(0))
            assert np.array_equal(opened.dense, ring.add(total.dense, ring.from_ints(drawn)))
            centred += (late[0] < 0) == there if seed < 4 else 0
            ringed += (signed(opened.dense, ring)[0] < 0) == there
    assert centred == 8
    assert 160 <= ringed <= 240


# --- known answers --------------------------------------------------------------------------------


def summed(plan: Plan, monkeypatch: pytest.MonkeyPatch):
    """The exact sum of an honest round, and what is looked at."""
    found = []
    honest = ServerNoise.on_sum

    def recording(self, total, *given):
        found.extend([total, honest(self, total, *given)])
        return found[-1]

    monkeypatch.setattr(ServerNoise, "on_sum", recording)
    (end,) = finished(shop(plan, HELD), 1)
    assert isinstance(end, RoundFinished) and not end.rows_out_of_bounds
    return found


WAYS = [*((scheme, NOISE) for scheme in SCHEMES), ("secure-submodel", LISTED)]


@pytest.mark.parametrize("counts", [0.0, 0.05])
@pytest.mark.parametrize(("scheme", "section"), WAYS)
def test_what_is_looked_at_is_the_sum_plus_noise_in_the_ring(
    scheme, section, counts, monkeypatch
) -> None:
    plan = planned(scheme, replace(section, counts=counts))
    exact, noisy = summed(plan, monkeypatch)
    root = draw_root(ScriptedEntropy(b"shop"), plan, RoundId(0), SERVER)
    source, ring = discrete_gaussian(plan.noisy_vector.deviation), plan.ring

    def expected(words, part):
        stream = noise_stream(root.secret(Label.SUM_NOISE), RoundId(0), SERVER, part)
        drawn = source.sample(stream, words.size).reshape(words.shape)
        whole = (words.astype(object) + drawn.astype(object)) % (1 << ring.bits)  # the oracle
        return whole.astype(np.uint64)

    assert (noisy.dense == expected(exact.dense, "dense")).all()
    for table, part in exact.tables.items():
        assert part.words[:, :-1].any()
        words = noisy.tables[table].words
        assert (words == expected(part.words, f"table {int(table)}")).all()


@pytest.mark.parametrize(("scheme", "section"), WAYS)
def test_real_and_ideal_rounds_are_equal_to_the_bit(scheme, section) -> None:
    plan, models = planned(scheme, section), []
    for crypto in ("every", "none"):
        fed = shop(
            replace(plan, simulation=SimulationPlan(crypto=crypto)),
            HELD,
            faults=lambda _, cohort: [Drop(cohort[2], "collect")],
        )
        assert all(isinstance(e, RoundFinished) for e in finished(fed, 2))
        models.append(model_of(fed))
    assert models[0] == models[1]


def test_the_noise_of_a_mean_has_the_deviation_that_is_charged() -> None:
    """12,000 values: variance and kurtosis within 5 standard errors, 1e-6 by chance."""
    plan = replace(one_table("fedavg", 4_000, cohort=COHORT), dp=NOISE)
    vector = plan.noisy_vector
    fed = shop(plan, HELD, breaks={ClientId(c): only_dense(0.0) for c in range(COHORT)})
    every = np.arange(4_000, dtype=np.uint64)
    before = fed.tables["goods"].values(every).astype(np.float64)
    finished(fed, 1)
    moved = (fed.tables["goods"].values(every) - before).ravel()
    charged = NOISE.noise * vector.bound / vector.scale / COHORT
    n = moved.size
    assert moved.var() == pytest.approx(charged**2, rel=5 * math.sqrt(2 / n))
    normal = (moved / moved.std()) ** 4
    assert normal.mean() == pytest.approx(3.0, abs=5 * math.sqrt(96 / n))
    assert abs(moved.mean()) < 5 * charged / math.sqrt(n)


@pytest.mark.parametrize("rounds", [1, 100])
def test_the_number_is_that_of_gaussian_noise_over_the_bound(rounds) -> None:
    """As before: a wide discrete Gaussian is a rounded one, but for 1e-12 of delta."""
    plan = planned("secure-fedavg", replace(NOISE, delta=1e-5))
    setting = noise_of(plan).setting
    told = setting.ledger(rounds).guarantee(unit=Unit.USER, against=Observer.READERS, delta=1e-5)
    ideal = replace(setting, vector=None, distance=0.0)
    other = ideal.ledger(rounds).guarantee(unit=Unit.USER, against=Observer.READERS, delta=1e-5)
    assert told.epsilon == pytest.approx(other.epsilon, rel=1e-6)
    mechanism = setting.in_the_sum(Observer.READERS)
    assert isinstance(mechanism, GaussianNoise) and mechanism.distance < 1e-12
    assert not told.assumption and told.trust.label == "central"


def test_rows_are_divided_by_those_that_asked_for_them(monkeypatch) -> None:
    """And not by counts, which would be exact: five clients ask for row 9, one for row 5."""
    plan = planned("submodel")
    found = []
    honest = encode.means
    monkeypatch.setattr(
        encode, "means", lambda *args, **given: found.append(honest(*args, **given)) or found[-1]
    )
    finished(shop(plan, HELD), 1)
    part = found[-1].tables["goods"]
    assert dict(zip(part.ids.tolist(), part.counts.tolist(), strict=True))[9] == COHORT
    assert dict(zip(part.ids.tolist(), part.counts.tolist(), strict=True))[0] == 1
    assert found[-1].weight == COHORT


# --- the ring -------------------------------------------------------------------------------------


def test_the_ring_has_room_for_the_tail_and_the_forecast_has_it() -> None:
    plan = planned("secure-fedavg")
    vector = plan.noisy_vector
    # A Gaussian is beyond `tail` in one of all words with probability 2^-40 at most.
    beyond = vector.words * math.erfc(vector.tail / (NOISE.noise * vector.bound * math.sqrt(2)))
    assert beyond <= 2.0**-40
    assert plan.ring.bits == vector.largest.bit_length() + 1
    quiet = replace(plan, dp=None)
    assert plan.ring.bits > quiet.ring.bits
    more, less = (sum(Forecast(each, 3).bytes_up().values()) for each in (plan, quiet))
    assert more > less


# --- plain sums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["fedavg", "submodel"])
def test_in_plain_sums_a_liars_words_are_cut_by_themselves(scheme, monkeypatch) -> None:
    """With or without the victim the round is kept, and the liar has moved it by one bound."""
    plan = planned(scheme)
    vector = plan.noisy_vector
    lying(monkeypatch, plan.noisy_vector.largest)
    assert all(kept(plan, there=there, seed=seed) for there in (True, False) for seed in range(5))
    total = exact_sum(plan, monkeypatch, there=False, seed=0)
    assert 0 < signed(total.dense, plan.ring)[0] <= vector.bound
    monkeypatch.setattr(ServerNoise, "cut", lambda self: None)
    total = exact_sum(plan, monkeypatch, there=False, seed=0)
    assert signed(total.dense, plan.ring)[0] >= vector.largest


def test_words_within_the_bound_are_left_as_they_are() -> None:
    plan = planned("fedavg")
    cut, vector, ring = noise_of(plan).cut(), plan.noisy_vector, plan.ring
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = rng.standard_normal(40)
        values = np.trunc(values * vector.bound / np.linalg.norm(values)).astype(np.int64)
        parts = [ring.from_ints(values[:10]), ring.from_ints(values[10:].reshape(6, 5))]
        assert all(np.array_equal(a, b) for a, b in zip(cut(parts), parts, strict=True))
        longer = cut([ring.from_ints(3 * values)])
        assert np.linalg.norm(signed(longer[0], ring)) <= vector.bound
    assert noise_of(replace(plan, dp=None)).cut() is None


# --- whose coins ----------------------------------------------------------------------------------


def test_a_round_said_not_to_have_counted_has_other_noise_when_it_is_run_again() -> None:
    """Its number is the same: a root is drawn for each round that is begun."""
    plan = planned("fedavg")

    def noise(entropy):
        setup = ServerRoundSetup(
            plan=plan,
            round_id=RoundId(4),
            invited=[ClientId(c) for c in range(COHORT)],
            dense=np.zeros(plan.model.dense, "f4"),
            tables=shop(plan, HELD).tables,
            own=ServerParty(entropy=entropy),
        )
        role = server.ServerRound(setup)
        return role.state.root.secret(Label.SUM_NOISE).reveal()

    assert noise(SystemEntropy()) != noise(SystemEntropy())
    assert noise(ScriptedEntropy(b"a")) == noise(ScriptedEntropy(b"a"))
