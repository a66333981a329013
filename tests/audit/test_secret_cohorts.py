"""Canaries in cohorts drawn in secret: a sample protects from those alone who do not know it.

Bounds are at 99 %, and follow from fixed seeds. A canary is a client whose update lies on a row of
its own; the coins that draw it, the clipping and the noise are those of a plan's training.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessera.audit.canary_findings import canary_findings
from tessera.audit.canary_training import Seen, claimed, observe_in_sums
from tessera.crypto.entropy import ScriptedEntropy
from tessera.plan import CohortsPlan, DPPlan, ModelPlan, Plan, SimulationPlan, TablePlan, Trust
from tessera.plan.sections import UpdatePlan
from tessera.privacy.dp.guarantee import Observer
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.rounds.noise import noise_of

NOISE, SHARE, ROUNDS, DELTA, CANARIES = 2.0, 0.02, 400, 1e-6, 4_000
ENTROPY = ScriptedEntropy(b"secret cohorts")
SERVER = DPPlan(unit="user", noise=NOISE, trust=Trust.SERVER, delta=DELTA)
EACH = replace(SERVER, trust=Trust.EACH)


def planned(section: DPPlan, share: float = SHARE) -> Plan:
    return Plan(
        scheme="two-server" if section.trust is Trust.EACH else "fedavg",
        cohort=80,
        model=ModelPlan(dense=5),
        tables=(TablePlan(name="items", rows=100, width=4),),
        simulation=SimulationPlan(rounds=ROUNDS),
        update=UpdatePlan(average="examples"),
        dp=section,
        cohorts=CohortsPlan(drawn="secret", share=share) if share else CohortsPlan(),
    )


def seen_of(plan: Plan) -> Seen:
    return observe_in_sums(plan, unknown=1, canaries=CANARIES, rounds=ROUNDS, entropy=ENTROPY)


@pytest.mark.parametrize("section", [SERVER, EACH])
def test_readers_stay_within_the_claim_until_the_cohorts_are_told(section: DPPlan) -> None:
    plan = planned(section)
    setting, seen = noise_of(plan).setting, seen_of(plan)
    claim = claimed(setting, Observer.READERS, rounds=ROUNDS, delta=DELTA)
    secret = seen.guesses(GaussianNoise.poisson(NOISE, SHARE))
    assert secret.bound(delta=DELTA, level=0.99) <= claim
    # The same releases, and the coins beside them, as if they followed from the plan's seed.
    public = seen.guesses(GaussianNoise(NOISE), cohorts_known=True)
    assert public.bound(delta=DELTA, level=0.99) > claim
    # Whoever knows them is charged for every participation, and that is kept.
    if section is EACH:
        full = claimed(setting, Observer.LEADER, rounds=ROUNDS, delta=DELTA)
        assert public.bound(delta=DELTA, level=0.99) <= full


@pytest.mark.parametrize("section", [SERVER, EACH])
def test_public_cohorts_have_no_smaller_number(section: DPPlan) -> None:
    public = noise_of(planned(section, share=0.0)).setting
    for observer in public.protected():
        assert not public.secret_to(observer)
        alone = claimed(public, observer, rounds=20, delta=DELTA)
        readers = claimed(public, Observer.READERS, rounds=20, delta=DELTA)
        drawn = claimed(
            noise_of(planned(section)).setting, Observer.READERS, rounds=20, delta=DELTA
        )
        assert alone == readers > 5 * drawn


def test_the_audit_of_a_plan_has_every_observer_with_what_it_knows() -> None:
    plan = planned(EACH, share=0.1)
    found = {finding.name: finding for finding in canary_findings(plan, ENTROPY)}
    assert len(found) == 4
    levels = {name: finding.claimed for name, finding in found.items()}
    for name, finding in found.items():
        assert finding.low <= finding.claimed
        amplified = "clients" in name.split("seen by")[1] or "readers" in name
        assert (finding.claimed < 0.5 * max(levels.values())) is amplified
