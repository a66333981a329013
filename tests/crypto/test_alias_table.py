"""Integer noise has the probabilities that it says: exactly from its tables, and as sampled.

Known probabilities come from another formula than the tables': theta functions and Poisson sums in
floating point. Sampled frequencies are tested by chi-square at a fixed stream, each with an error
rate of 1e-6.
"""

from __future__ import annotations

import math
from collections import defaultdict
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.crypto import kernel, noise
from tessera.crypto.noise import UNITS, AliasTable, IntegerNoise, discrete_gaussian, skellam
from tessera.crypto.prg import Stream
from tessera.errors import ConfigError, MisuseError

STREAM = Stream(bytes(range(16)), bytes(8))
GAUSSIANS = [0.2, 0.5, 1.0, 3.7, 40.0]
SKELLAMS = [0.1, 1.0, 7.5, 400.0]


def probabilities(table: AliasTable) -> dict[int, int]:
    """Of every value, in units of 2^-128, read off the columns."""
    entries, reach = table.entries, table.reach
    full = (1 << UNITS) // entries.entries.size
    found: defaultdict[int, int] = defaultdict(int)
    columns = zip(
        entries.thresholds.tolist(), entries.lower.tolist(), entries.others.tolist(), strict=True
    )
    for column, (upper, lower, other) in enumerate(columns):
        own = (upper << 64) + lower
        assert own <= full
        found[column - reach] += own
        found[other - reach] += full - own
    return {value: units for value, units in found.items() if units}


def gaussian_at(k: int, deviation: float) -> float:
    """By Poisson summation where that converges faster than the sum over the integers."""
    if deviation < 1.0:
        total = math.fsum(math.exp(-0.5 * (j / deviation) ** 2) for j in range(-60, 61))
    else:
        dual = math.fsum(
            math.exp(-2.0 * (math.pi * deviation * j) ** 2) * (2.0 if j else 1.0) for j in range(20)
        )
        total = deviation * math.sqrt(2.0 * math.pi) * dual
    return math.exp(-0.5 * (k / deviation) ** 2) / total


def skellam_at(k: int, variance: float) -> float:
    """P(A - B = k) by adding P(A = b + k) P(B = b)."""
    mean = variance / 2.0

    def log_poisson(j: int) -> float:
        return j * math.log(mean) - mean - math.lgamma(j + 1)

    most = int(mean + 60.0 * math.sqrt(mean) + 80.0)
    return math.fsum(math.exp(log_poisson(j + abs(k)) + log_poisson(j)) for j in range(most))


def only_table(noise: IntegerNoise) -> AliasTable:
    ((multiple, table),) = noise.parts
    assert multiple == 1
    return table


@pytest.mark.parametrize("deviation", GAUSSIANS)
def test_a_table_has_the_probabilities_of_the_discrete_gaussian(deviation: float) -> None:
    found = probabilities(only_table(discrete_gaussian(deviation)))
    assert sum(found.values()) == 1 << UNITS
    for k in range(int(6 * deviation) + 2):
        assert found[k] == found[-k]
        assert found[k] / 2.0**UNITS == pytest.approx(gaussian_at(k, deviation), rel=1e-12)


@pytest.mark.parametrize("variance", SKELLAMS)
def test_a_table_has_the_probabilities_of_the_skellam_distribution(variance: float) -> None:
    found = probabilities(only_table(skellam(variance)))
    assert sum(found.values()) == 1 << UNITS
    for k in range(int(6 * math.sqrt(variance)) + 2):
        assert found[k] == found[-k]
        assert found[k] / 2.0**UNITS == pytest.approx(skellam_at(k, variance), rel=1e-9)


@pytest.mark.parametrize("noise", [*map(discrete_gaussian, GAUSSIANS), *map(skellam, SKELLAMS)])
def test_what_is_cut_off_is_within_the_stated_distance(noise: IntegerNoise) -> None:
    found = probabilities(only_table(noise))
    assert max(map(abs, found)) <= noise.reach
    assert noise.reach not in found  # it is rarer than one unit, and so are all beyond it
    assert 2.0**-130 < noise.distance < 2.0**-100
    variance = math.fsum(k * k * units / 2.0**UNITS for k, units in found.items())
    assert noise.variance == pytest.approx(variance, rel=1e-12)


@pytest.mark.parametrize("deviation", [1.5, 40.0, 3000.0, 5000.0, 200_000.0])
def test_samples_have_the_moments_of_a_gaussian(deviation: float) -> None:
    """Mean, variance and fourth moment of 400,000 samples, each within 5 standard errors."""
    n = 400_000
    scaled = discrete_gaussian(deviation).sample(STREAM, n) / deviation
    assert abs(scaled.mean()) < 5 * math.sqrt(1 / n)
    assert abs((scaled**2).mean() - 1.0) < 5 * math.sqrt(2 / n)
    assert abs((scaled**4).mean() - 3.0) < 5 * math.sqrt(96 / n)


@pytest.mark.parametrize("noise", [discrete_gaussian(1.0), discrete_gaussian(2.5), skellam(3.0)])
def test_samples_have_the_probabilities_of_the_table(noise: IntegerNoise) -> None:
    n = 200_000
    found = probabilities(only_table(noise))
    values, counts = np.unique(noise.sample(STREAM, n), return_counts=True)
    seen = dict(zip(values.tolist(), counts.tolist(), strict=True))
    likely = [k for k, units in found.items() if n * units / 2.0**UNITS >= 10.0]
    expected = {k: n * found[k] / 2.0**UNITS for k in likely}
    chi = sum((seen.get(k, 0) - e) ** 2 / e for k, e in expected.items())
    freedom = len(likely) - 1
    # Wilson and Hilferty 1931: the cube root of chi-square over its degrees is nearly normal.
    spread = 2.0 / (9.0 * freedom)
    assert ((chi / freedom) ** (1 / 3) - (1.0 - spread)) / math.sqrt(spread) < 4.75


def test_a_wide_gaussian_is_two_narrow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same construction at a size whose every probability can be added up."""
    monkeypatch.setattr(noise, "WIDEST_TABLE", 16.0)
    monkeypatch.setattr(noise, "NARROW", 8.0)
    monkeypatch.setattr(noise, "STEP", 2)
    wide = discrete_gaussian.__wrapped__(31.25)
    (one, inner), (step, outer) = wide.parts
    assert (one, step) == (1, 2)
    found: defaultdict[int, float] = defaultdict(float)
    for y, p in probabilities(outer).items():
        for x, q in probabilities(inner).items():
            found[x + 2 * y] += (p / 2.0**UNITS) * (q / 2.0**UNITS)
    for k in range(190):
        assert found[k] == pytest.approx(gaussian_at(k, 31.25), rel=1e-10)
    assert wide.variance == pytest.approx(31.25**2, rel=1e-12)
    wider = discrete_gaussian.__wrapped__(40.0)  # its outer one is wide, too
    assert [multiple for multiple, _ in wider.parts] == [1, 2, 4]
    assert wider.variance == pytest.approx(40.0**2, rel=1e-12)


def test_the_table_of_training_is_within_its_distance_of_the_discrete_gaussian() -> None:
    found = probabilities(noise.table())
    assert sum(found.values()) == 1 << UNITS
    with localcontext() as context:
        context.prec = 60
        weights = [(-Decimal(x * x) / (2 * noise.BASE * noise.BASE)).exp() for x in range(4000)]
        whole = weights[0] + 2 * sum(weights[1:])
        off = sum(
            abs(Decimal(units) / (1 << UNITS) - weights[abs(value)] / whole)
            for value, units in found.items()
        )
        off += 2 * sum(weights[noise.ENDS + 1 :]) / whole
    assert float(off / 2) < noise.table().distance < 2.0**-64.5
    # Four draws for what is owed; each sum is smooth but for 2^-71.
    assert 4 * noise.table().distance + 3 * 2.0**-71 < noise.DISTANCE


def test_the_table_of_training_is_symmetric() -> None:
    found = probabilities(noise.table())
    assert all(found[value] == found[-value] for value in found)


@pytest.mark.parametrize("name", kernel.available())
def test_the_second_word_decides_where_the_first_does_not(name: str) -> None:
    entries = only_table(discrete_gaussian(1.0)).entries
    there = (entries.others != np.arange(entries.others.size)) & (entries.lower > 0)
    column = int(np.flatnonzero(there)[0])
    rest = 64 - entries.column_bits
    word = np.array([(column << rest) + int(entries.thresholds[column])] * 2, dtype=np.uint64)
    limit = int(entries.lower[column])
    second = np.array([limit - 1, limit], dtype=np.uint64)
    by = np.array([[3]], dtype=np.int32)
    with kernel.use(name):
        drawn = kernel.active().alias_sums(word, by, 2, entries, lambda: second)
    other = int(entries.others[column])
    assert drawn.tolist() == [[3 * (column - entries.reach), 3 * (other - entries.reach)]]


def test_a_second_word_is_read_only_where_it_is_needed() -> None:
    entries = only_table(discrete_gaussian(1.0)).entries

    def never() -> np.ndarray:
        raise AssertionError("a word had decided")

    words = np.arange(1000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
    drawn = kernel.active().alias_sums(words, np.array([[1]], np.int32), 1000, entries, never)
    assert drawn.shape == (1, 1000) and drawn.any()


@given(start=st.integers(0, 70_000), count=st.integers(0, 300), wide=st.booleans())
def test_a_sample_depends_on_its_position_alone(start: int, count: int, wide: bool) -> None:
    noise = discrete_gaussian(9000.0 if wide else 2.0)
    whole = noise.sample(STREAM, 70_300)
    assert (
        noise.sample(STREAM, count, start=start).tolist() == whole[start : start + count].tolist()
    )


def test_another_stream_has_other_noise() -> None:
    noise = discrete_gaussian(100.0)
    other = noise.sample(Stream(bytes(16), bytes(8)), 1000)
    assert np.count_nonzero(noise.sample(STREAM, 1000) == other) < 30


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e11])
def test_noise_that_has_no_table_is_refused(value: float) -> None:
    with pytest.raises(ConfigError):
        discrete_gaussian(value)
    with pytest.raises(ConfigError):
        skellam(value)


def test_a_negative_number_of_samples_is_refused() -> None:
    with pytest.raises(MisuseError):
        discrete_gaussian(1.0).sample(STREAM, -1)
    with pytest.raises(MisuseError):
        discrete_gaussian(1.0).sample(STREAM, 1, start=-1)
