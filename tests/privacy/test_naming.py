"""Naming attacks: posteriors against brute force, calibration, and the rates of known settings."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.privacy.naming import pack, posterior
from tessera.privacy.response import Perturbation


def brute_force(
    active: np.ndarray,
    positive: np.ndarray,
    known: np.ndarray,
    ratio: np.ndarray,
    prior: np.ndarray,
    period: np.ndarray,
    perturbation: Perturbation,
) -> np.ndarray | None:
    """Every holder set, and within it every choice of who offers the row in which period.

    active (clients, rounds), ratio (clients, periods): P(answers | offered) / P(answers | not).
    """
    clients, periods = ratio.shape
    keep, add = perturbation.keep, perturbation.add
    total, found = 0.0, np.zeros(clients)
    for size in range(min(clients, len(prior) - 1) + 1):
        for members in itertools.combinations(range(clients), size):
            weight = prior[size] / math.comb(clients, size)
            for u in set(range(clients)) - set(members):
                weight *= math.prod(add * ratio[u] + 1.0 - add)
            for t in range(periods):
                rounds = (period == t) & known
                ways = 0.0
                for offers in itertools.product((True, False), repeat=size):
                    trains = [u for u, o in zip(members, offers, strict=True) if o]
                    seen = active[trains].any(axis=0) if trains else np.zeros(len(period), bool)
                    if (seen == positive)[rounds].all():
                        ways += math.prod(
                            keep * ratio[u, t] if o else 1.0 - keep
                            for u, o in zip(members, offers, strict=True)
                        )
                weight *= ways
            total += weight
            found[list(members)] += weight
    return found / total if total > 0.0 else None


CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "clients": st.integers(2, 6),
        "rounds": st.integers(1, 7),
        "periods": st.integers(1, 3),
        "keep": st.sampled_from([1.0, 0.8, 0.5]),
        "add": st.sampled_from([0.0, 0.1]),
        "unknown": st.sampled_from([0.0, 0.3]),
        "density": st.sampled_from([0.2, 0.5, 1.0]),
        "spread": st.sampled_from([0.0, 1.0, 6.0]),
        "truthful": st.booleans(),
    }
)


@settings(max_examples=400)
@given(CASES)
def test_the_posterior_is_that_of_all_holder_sets(case: dict) -> None:
    rng = np.random.default_rng(case["seed"])
    clients, rounds, periods = case["clients"], case["rounds"], case["periods"]
    active = rng.random((clients, rounds)) < case["density"]
    period = np.sort(rng.integers(0, periods, rounds))
    known = rng.random(rounds) >= case["unknown"]
    log_lr = case["spread"] * rng.standard_normal((clients, periods))
    prior = rng.dirichlet(np.ones(5))
    prior[rng.integers(5)] = 0.0
    perturbation = Perturbation(keep=case["keep"], add=case["add"])
    if case["truthful"]:
        holders = rng.choice(clients, min(clients, int(rng.integers(1, 4))), replace=False)
        offers = rng.random((len(holders), periods)) < case["keep"]
        positive = (active[holders] & offers[:, period]).any(axis=0)
    else:
        positive = rng.random(rounds) < 0.5
    expected = brute_force(active, positive, known, np.exp(log_lr), prior, period, perturbation)
    plain = case["keep"] == 1.0 and case["add"] == 0.0
    found = posterior(
        pack(active[None]),
        pack(positive[None]),
        log_lr[None].sum(axis=2) if plain else log_lr[None],
        prior,
        known=pack(known[None]),
        periods=pack(period == np.arange(periods)[:, None]),
        perturbation=None if plain else perturbation,
    )
    assert found.exact[0] == (expected is not None)
    if expected is not None:
        np.testing.assert_allclose(found.holds[0], expected, rtol=1e-9, atol=1e-12)
