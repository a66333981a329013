"""Canaries in sums with noise inside: claims hold through each trust, and no source is for nothing.

Bounds are at 99 %: each is above what was kept in one of a hundred audits at most. Here all follow
from fixed seeds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera.audit.canary_findings import canary_findings, left_to
from tessera.audit.canary_training import Guessing, claimed, observe_in_sums
from tessera.audit.finding import Verdict
from tessera.crypto.entropy import ScriptedEntropy
from tessera.plan import CohortsPlan, DPPlan, ModelPlan, Plan, SimulationPlan, TablePlan, Trust
from tessera.privacy.dp.guarantee import Observer
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.rounds.noise import noise_of

DELTA, ROUNDS = 1e-6, 20
ENTROPY = ScriptedEntropy(b"canaries in sums")
USER = DPPlan(unit="user", noise=6.0, trust=Trust.SHARES, delta=DELTA)
SUBJECT = replace(USER, unit="subject", clients_per_subject=3)
EACH = replace(USER, trust=Trust.EACH)


def planned(section: DPPlan, cohort: int = 9) -> Plan:
    scheme = "two-server" if section.trust is Trust.EACH else "secure-fedavg"
    if section.trust is Trust.SERVER:
        scheme = "fedavg"
    return Plan(
        scheme=scheme,
        cohort=cohort,
        model=ModelPlan(dense=5),
        tables=(TablePlan(name="items", rows=100, width=4),),
        simulation=SimulationPlan(rounds=ROUNDS),
        dp=section,
    )


def bound(plan: Plan, unknown: int, clients: int = 1, canaries: int = 400) -> float:
    seen = observe_in_sums(
        plan, unknown=unknown, canaries=canaries, rounds=ROUNDS, entropy=ENTROPY, clients=clients
    )
    one = GaussianNoise(noise_of(plan).dp.noise, ((clients, 1.0),))
    tried: tuple[Guessing, ...] = (seen.guesses(one, sum_only=True), seen.by_length())
    return max(each.bound(delta=DELTA, level=0.995) for each in tried)


@pytest.mark.parametrize(
    ("section", "observer"),
    [
        (section, observer)
        for section in (USER, SUBJECT, EACH)
        for observer in Observer
        if observer is not Observer.HELPER or section is EACH
    ],
)
def test_no_bound_is_above_the_claim(section: DPPlan, observer: Observer) -> None:
    plan = planned(section)
    setting = noise_of(plan).setting
    found = bound(plan, left_to(setting, observer), setting.clients)
    claim = claimed(setting, observer, rounds=ROUNDS, delta=DELTA)
    assert 0.02 * claim < found <= claim


def test_noise_for_one_clients_worth_does_not_hold_for_a_person_with_three() -> None:
    """Shifts of three clients add up under one noise; the claim per user is not one per person."""
    plan = planned(replace(USER, noise=12.0))
    setting = noise_of(plan).setting
    claim = claimed(setting, Observer.LEADER, rounds=ROUNDS, delta=DELTA)
    assert bound(plan, left_to(setting, Observer.LEADER), clients=3, canaries=8_000) > claim


def test_with_one_server_silent_the_other_finds_everybody_and_is_not_protected_from() -> None:
    plan = planned(replace(EACH, noise=12.0))
    setting = noise_of(plan).setting
    claim = claimed(setting, Observer.HELPER, rounds=ROUNDS, delta=DELTA)
    # The leader adds none: the helper knows its own noise, and nothing is left of the other's.
    assert bound(plan, unknown=0) > claim
    # The helper's is still there against the leader, and against readers.
    assert bound(plan, unknown=1) <= claim


def test_shares_that_are_not_there_are_found() -> None:
    plan = planned(replace(USER, corrupt=6, noise=12.0))
    setting = noise_of(plan).setting
    assert setting.sources == plan.least_survivors - 6 == 1
    claim = claimed(setting, Observer.CLIENTS, rounds=ROUNDS, delta=DELTA)
    assert bound(plan, unknown=1) <= claim < bound(plan, unknown=0)


@pytest.mark.parametrize("section", [USER, EACH], ids=["shares", "each"])
def test_the_audit_of_a_run_holds(section: DPPlan) -> None:
    found = canary_findings(planned(section), ENTROPY)
    assert {f.name for f in found} >= {"canaries: clients, seen by the leader"}
    for each in found:
        assert each.claimed is not None and each.low <= each.claimed


# --- noise that is correlated over rounds ---------------------------------------------------------


def scheduled(trust: str) -> Plan:
    """Epsilon 3, a client in two of twelve rounds."""
    section = DPPlan(unit="user", trust=Trust(trust), epsilon=3.0, delta=DELTA, correlated=True)
    again = replace(
        planned(replace(section, noise=12.0, coefficients="-8388608, -2097152")),
        dp=section,
        cohorts=CohortsPlan(drawn="schedule", separation=6, rounds_per_client=2),
        simulation=SimulationPlan(rounds=12),
    )
    return noise_of(again).calibrated()


@pytest.mark.parametrize("trust", ["server", "each"])
def test_canaries_of_a_whole_training_stay_within_the_claim(trust, monkeypatch) -> None:
    plan, observer = scheduled(trust), Observer.HELPER if trust == "each" else Observer.CLIENTS
    setting = noise_of(plan).setting
    claim = claimed(setting, observer, rounds=12, delta=DELTA)
    assert claim == pytest.approx(3.0, rel=0.01)
    found = bound(plan, left_to(setting, observer), setting.clients, canaries=8_000)
    assert 0.2 * claim < found <= claim
    # ... and pass it if each server's noise is sized as if rounds were alone.
    one = replace(plan, dp=replace(plan.dp, noise=plan.dp.noise / 3.0))
    assert bound(one, left_to(setting, observer), setting.clients, canaries=8_000) > claim


def test_the_audit_of_correlated_noise_has_a_verdict_for_everybody() -> None:
    for trust in ("server", "each"):
        found = canary_findings(scheduled(trust), ENTROPY)
        assert found and all(one.verdict is Verdict.HOLDS for one in found)


def test_of_a_client_in_few_rounds_as_many_releases_are_audited_as_it_is_in() -> None:
    """In more it would move the sums by more than the claim is for."""
    plan = scheduled("each")
    alone = replace(plan, dp=replace(plan.dp, noise=0.0, correlated=False, coefficients=""))
    for one in canary_findings(noise_of(alone).calibrated(), ENTROPY):
        assert "in 2 noisy releases" in one.meaning
        assert one.claimed == pytest.approx(3.0, rel=0.01)
        assert one.verdict is Verdict.HOLDS
