"""A training with correlated noise is one Gaussian release: its account, on a grid of integers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy.stats import norm

from tessera.crypto.correlated import FRACTION, GRID, BandedInverse
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.plan import Plan
from tessera.privacy.dp.accounting import epsilon, gaussian_epsilon
from tessera.privacy.dp.correlation import Correlation, inverse_of, optimised
from tessera.privacy.dp.events import Bounds, NoisySum
from tessera.privacy.dp.guarantee import Adjacency, Observer, Trust, Unit
from tessera.privacy.dp.ledger import BudgetExceeded, Ledger
from tessera.privacy.dp.mechanism import GaussianNoise, NoAccount
from tessera.privacy.dp.noise_setting import Coins, NoiseSetting, SummedVector
from tessera.privacy.dp.participation import Participation
from tessera.rounds.noise import noise_of

Integers = npt.NDArray[np.int64]

ONCE = Participation(rounds=60, most=1, separation=60)
READERS = Observer.READERS


def setting(limits: Participation = ONCE, **changes: object) -> NoiseSetting:
    found = NoiseSetting(
        unit=Unit.USER,
        noise=3.0,
        trust=Trust.SERVER,
        coins=Coins.PUBLIC,
        vector=SummedVector(words=1000, bound=500.0, honest=""),
        correlation=Correlation(optimised(limits, 3), limits),
    )
    return replace(found, **changes)


# --- the analytic Gaussian ------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "known"), [(1.0, 3.7306), (3.0, 1.3906), (10.0, 0.4999)])
def test_noise_over_sensitivity_is_the_known_one(level: float, known: float) -> None:
    assert gaussian_epsilon(1.0 / known, 1e-5) == pytest.approx(level, rel=1e-3)
    fine = setting(vector=SummedVector(words=1, bound=1e6, honest=""))
    least = fine.least_noise(epsilon=level, delta=1e-5, rounds=60)
    assert fine.correlation is not None
    assert least / fine.correlation.sensitivity == pytest.approx(known, abs=2e-4)


@pytest.mark.parametrize("mean", [1e-3, 0.1, 0.7, 2.0, 9.0, 30.0, 60.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.2])
def test_epsilon_of_a_gaussian_solves_its_equation(mean: float, delta: float) -> None:
    found = gaussian_epsilon(mean, delta)

    def exact(level: float) -> float:
        low, high = norm.logsf(level / mean - mean / 2), norm.logsf(level / mean + mean / 2)
        return float(np.exp(low) - np.exp(level + high))

    assert exact(found) <= delta * (1.0 + 1e-9)
    assert found == 0.0 or exact(found * (1.0 - 1e-6)) > delta


def test_epsilon_of_a_gaussian_is_that_of_its_loss_distribution() -> None:
    for noise in (0.5, 1.4, 4.0):
        other = from_gaussian_mechanism(noise).get_epsilon_for_delta(1e-6)
        assert gaussian_epsilon(1.0 / noise, 1e-6) == pytest.approx(other, rel=1e-3)
        assert gaussian_epsilon(1.0 / noise, 1e-6) <= other


# --- on a grid ------------------------------------------------------------------------------------


def past(inverse: BandedInverse, drawn: list[Integers]) -> Integers:
    """The part of earlier rounds, in steps of the grid, rounded to it."""
    total = np.full(drawn[0].shape, 1 << (FRACTION - 1), dtype=np.int64)
    for term, z in zip(inverse.terms, reversed(drawn), strict=False):
        total += term * z
    return total >> FRACTION


def shift(
    inverse: BandedInverse, own: list[Integers], rng: np.random.Generator, deviation: float
) -> float:
    """How long Z' - Z is, where both worlds open the same: with a client's vectors and without."""
    first: list[Integers] = []
    second: list[Integers] = []
    for vector in own:
        z = np.rint(rng.normal(0.0, deviation, vector.shape)).astype(np.int64)
        zeros = [np.zeros_like(z)]
        opened = vector + z + past(inverse, first or zeros)
        first.append(z)
        second.append(opened - past(inverse, second or zeros))
    return math.sqrt(sum(float(((b - a) ** 2).sum()) for a, b in zip(first, second, strict=True)))


@pytest.mark.parametrize("grid", [0, 4, GRID])
def test_no_training_on_a_grid_moves_further_than_its_account_says(grid: int) -> None:
    rng = np.random.default_rng(7)
    words, limits = 50, Participation(rounds=12, most=3, separation=4)
    longest = 0.0
    for shares in ([0.6, 1.0], [0.5, 0.7, 0.9], [0.9, 0.2]):
        found = Correlation(inverse_of(np.array(shares)), limits)
        for _ in range(20):
            direction = rng.normal(size=words)
            direction *= 3.0 / np.linalg.norm(direction)
            unit = np.rint(direction).astype(np.int64) << grid
            bound = float(np.linalg.norm(unit)) * 2.0**-grid
            own = [unit * (t % 4 == 0) for t in range(limits.rounds)]
            steps = shift(found.inverse, own, rng, 1000.0 * 2.0**grid) * 2.0**-grid
            claim = found.moves(bound=bound, words=words, grid=grid)
            assert steps <= claim
            longest = max(longest, steps / (found.sensitivity * bound))
    if grid == 0:
        assert (
            longest > 1.2
        )  # the sensitivity alone is not enough: the past is rounded in each world


def test_rounding_and_distance_are_in_the_account() -> None:
    ideal = setting(vector=SummedVector(words=1, bound=1e6, honest=""))
    coarse = setting(vector=SummedVector(words=10**8, bound=5000.0, honest=""))
    (a,), (b,) = (each.parts(READERS, 60) for each in (ideal, coarse))
    assert isinstance(a[0], GaussianNoise) and isinstance(b[0], GaussianNoise)
    assert a[1] == b[1] == 1
    over = ideal.correlation
    assert over is not None
    assert a[0].noise == pytest.approx(3.0 / over.sensitivity, rel=1e-6)
    rounding = over.operator_norm * math.sqrt(6e9) * 2.0**-GRID / 5000.0
    assert b[0].noise == pytest.approx(3.0 / (over.sensitivity + rounding), rel=1e-6)
    assert b[0].distance == pytest.approx(6e9 * 1e-3 / (15000.0 * 2.0**GRID) ** 4)


# --- charged once ---------------------------------------------------------------------------------


def spent(ledger: Ledger, unit: Unit = Unit.USER) -> float:
    return ledger.guarantee(unit=unit, against=READERS, delta=1e-5).epsilon


def event(of: NoiseSetting, training: str, round_id: int = 0) -> NoisySum:
    (found,) = of.events(federation="f", round_id=RoundId(round_id), training=training)
    return found


def test_a_training_is_one_release_whatever_the_rounds() -> None:
    found = setting()
    (one,), (all_rounds,) = found.parts(READERS, 1), found.parts(READERS, 60)
    assert one == all_rounds
    mean = 1.0 / one[0].noise  # type: ignore[union-attr]
    assert spent(found.ledger(60)) == pytest.approx(gaussian_epsilon(mean, 1e-5), rel=1e-6)
    assert event(found, "first", 3) == event(found, "first", 40)


def test_another_training_is_another_charge() -> None:
    """mu^2 adds up, also of trainings with other noise, and of independent rounds beside them."""
    found, other = setting(), setting(noise=5.0)
    alone = replace(setting(), correlation=None, noise=9.0)
    ledger, square = Ledger(), 0.0
    for of, name in ((found, "first"), (other, "second"), (alone, "")):
        charged = event(of, name)
        ledger.spend(charged, reason="test")
        assert ledger.has(charged)
        view = charged.view(READERS)
        assert isinstance(view, GaussianNoise)
        square += view.noise**-2
        expected = gaussian_epsilon(math.sqrt(square), 1e-5)
        assert spent(ledger) == pytest.approx(expected, rel=1e-5)


def test_a_training_does_not_change_under_its_name() -> None:
    ledger = Ledger()
    ledger.spend(event(setting(), "first"), reason="test")
    with pytest.raises(ConfigError, match="charged already, with another"):
        ledger.spend(event(setting(noise=4.0), "first"), reason="test")


def test_a_person_at_several_clients_moves_more() -> None:
    """Both vectors of each of c clients are clipped: 2 c times as far. Without c it is refused."""
    found = setting()
    ledger = found.ledger(60)
    ledger.bounds = Bounds()
    with pytest.raises(NoAccount, match="clients_per_subject is not stated"):
        spent(ledger, Unit.SUBJECT)
    ledger.bounds = Bounds(clients_per_subject=3)
    ((one, _),) = found.parts(READERS, 60)
    assert isinstance(one, GaussianNoise)
    level = gaussian_epsilon(6.0 / one.noise, 1e-5)
    assert spent(ledger, Unit.SUBJECT) == pytest.approx(level, rel=1e-5)
    person = setting(unit=Unit.SUBJECT, clients=3)
    ((of_person, _),) = person.parts(READERS, 60)
    assert isinstance(of_person, GaussianNoise)
    assert of_person.noise == pytest.approx(one.noise / 6.0, rel=1e-3)


def test_independent_noise_is_for_the_rounds_that_a_client_is_in() -> None:
    limits = Participation(rounds=60, most=3, separation=1)
    bounded = setting(correlation=Correlation(BandedInverse(), limits))
    assert bounded.parts(READERS, 60) == replace(bounded, correlation=None).parts(READERS, 3)
    assert bounded.parts(READERS, 2) == replace(bounded, correlation=None).parts(READERS, 2)
    level = {"epsilon": 3.0, "delta": 1e-5, "rounds": 60}
    every = replace(bounded, correlation=None).least_noise(**level)  # type: ignore[arg-type]
    assert bounded.least_noise(**level) == pytest.approx(  # type: ignore[arg-type]
        every / math.sqrt(20.0), rel=1e-3
    )


def test_what_has_no_account_is_refused() -> None:
    with pytest.raises(ConfigError, match="one server adds it"):
        setting(vector=None)
    with pytest.raises(ConfigError, match="one server adds it"):
        setting(sources=2)


# --- of a plan ------------------------------------------------------------------------------------

PLAN = """
scheme = "{scheme}"
cohort = 10
[model]
dense = 5
[[table]]
name = "items"
rows = 100
width = 4
[simulation]
rounds = 60
[cohorts]
drawn = "schedule"
separation = 20
rounds_per_client = {most}
[server]
optimizer = "plain"
[dp]
unit = "user"
delta = 1e-5
epsilon = 3
correlated = true
trust = "{trust}"
{more}
"""


def plan(more: str = "", scheme: str = "fedavg", trust: str = "server", most: int = 3) -> Plan:
    return Plan.parse(PLAN.format(more=more, scheme=scheme, trust=trust, most=most))


@pytest.mark.parametrize(("scheme", "trust"), [("fedavg", "server"), ("two-server", "each")])
def test_a_plan_is_calibrated_for_its_participations(scheme: str, trust: str) -> None:
    found = noise_of(plan(scheme=scheme, trust=trust)).calibrated()
    assert found.dp is not None and found.dp.coefficients
    assert Plan.parse(found.to_toml()) == found
    noise, over = noise_of(found), found.correlation
    assert noise.correlation == over.inverse == optimised(found.participation, 3)
    ((one, times),) = noise.setting.parts(READERS, 60)
    assert times == 1 and isinstance(one, GaussianNoise)
    level = epsilon([(one, 1)], adjacency=Adjacency.ZERO_OUT, delta=1e-5)
    assert 2.99 < level <= 3.0
    assert noise.lasts == 60
    # Independent noise of the same plan, against the same observers.
    alone = replace(plan(scheme=scheme, trust=trust).dp, correlated=False)  # type: ignore[type-var]
    other = noise_of(noise_of(replace(found, dp=alone)).calibrated())
    mixed = found.dp.noise * over.all_rounds
    assert mixed < 0.55 * other.dp.noise * math.sqrt(60.0)


def test_a_client_is_charged_a_training_once_before_its_first_message() -> None:
    noise = noise_of(noise_of(plan()).calibrated())
    ledger = Ledger()
    for round_id in (4, 24, 44):
        assert noise.affords(ledger, RoundId(round_id))
        noise.charge(ledger, RoundId(round_id))
        found = noise.guarantee(ledger)
        assert found is not None and 2.99 < found.epsilon <= 3.0
    assert sum(len(entry.event.noisy) for entry in ledger.entries) == 1
    # Another training is another charge, which this budget does not cover.
    assert not noise.affords(ledger, RoundId(4), "another")
    with pytest.raises(BudgetExceeded):
        noise.charge(ledger, RoundId(4), "another")
    assert sum(len(entry.event.noisy) for entry in ledger.entries) == 1


def test_one_rounds_noise_has_its_room_in_the_ring() -> None:
    found = noise_of(plan()).calibrated()
    vector = found.noisy_vector
    assert vector is not None and vector.correlated == found.correlation.one_round > 1.1
    independent = replace(vector, correlated=0.0)
    assert vector.tail > 1.1 * independent.tail
    assert noise_of(found).in_the_sum == pytest.approx(vector.noise * vector.correlated)


@pytest.mark.parametrize(
    ("change", "says", "hint"),
    [
        ({"trust": "shares", "scheme": "secure-fedavg"}, "drops out", '"server" or "each"'),
        ({"trust": "local"}, "noise of its own", '"server" or "each"'),
        ({"more": "counts = 0.1"}, "another number in every round", "leave counts out"),
        ({"more": "terms = 2"}, "terms = 2", "3 or 4"),
        ({"more": 'coefficients = "1, 2"'}, "rise or are negative", "optimised"),
        ({"more": 'coefficients = "-16777216, -8388608"'}, "rise or are negative", "optimised"),
        ({"more": 'coefficients = "-8388608"'}, "1 coefficients with terms = 3", "give 2"),
        ({"more": 'coefficients = "-0.5"'}, "coefficients = '-0.5'", "over 2"),
        ({"scheme": "submodel"}, "opens the rows of its own clients", '"list"'),
    ],
)
def test_plans_that_cannot_have_it_are_refused(
    change: dict[str, str], says: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        plan(**change)  # type: ignore[arg-type]
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize(
    "server",
    ['optimizer = "adam"', 'optimizer = "momentum"', "decay = 0.9", 'schedule = "linear"'],
)
def test_steps_that_differ_from_round_to_round_are_refused(server: str) -> None:
    text = PLAN.format(more="", scheme="fedavg", trust="server", most=3)
    lines = text.replace('optimizer = "plain"', server)
    with pytest.raises(ConfigError, match="different weights") as refused:
        Plan.parse(lines)
    assert "in [server]" in (refused.value.hint or "")


def test_coefficients_without_correlated_are_refused() -> None:
    text = PLAN.format(more='coefficients = "-1, -1"', scheme="fedavg", trust="server", most=3)
    with pytest.raises(ConfigError, match="coefficients without correlated"):
        Plan.parse(text.replace("correlated = true", ""))


def test_more_participations_than_the_budget_lasts_are_refused() -> None:
    text = PLAN.format(more="noise = 1.5", scheme="fedavg", trust="server", most=3)
    with pytest.raises(ConfigError, match="for 1 of the 3 rounds") as refused:
        noise_of(Plan.parse(text.replace("correlated = true", ""))).calibrated()
    assert "rounds_per_client = 1" in (refused.value.hint or "")
    with pytest.raises(ConfigError, match="by all rounds of a training"):
        noise_of(plan("noise = 1.5")).calibrated()
