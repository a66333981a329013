"""A bundle's plan names its first model, and what a deployment cannot do is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.errors import ConfigError
from tessera.plan import Plan
from tessera.services.bundle import Bundle, pack_synthetic

PLAN = """
scheme = "secure-fedavg"
cohort = 3
[model]
dense = 4
[[table]]
name = "items"
rows = 20
width = 2
"""


def test_the_digest_of_the_first_model_is_in_the_plans(tmp_path: Path) -> None:
    plan = Plan.parse(PLAN)
    bundle = pack_synthetic(plan, 3, 2)
    assert bundle.plan.digest != plan.digest
    other = replace(bundle, plan=plan, dense=bundle.dense + np.float32(1))
    assert other.plan.digest != bundle.plan.digest, "another first model is another plan"
    assert pack_synthetic(plan, 3, 2).plan.digest == bundle.plan.digest
    bundle.write(tmp_path / "b.npz")
    assert Bundle.read(tmp_path / "b.npz").digest == bundle.digest


def test_a_plan_for_another_first_model_is_refused() -> None:
    bundle = pack_synthetic(Plan.parse(PLAN), 3, 2)
    with pytest.raises(ConfigError, match="the plan is for the first model"):
        replace(bundle, dense=bundle.dense + np.float32(1))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ('[dp]\nunit = "user"\nnoise = 1\nrows = "selected"', "selected"),
        ('[simulation]\nmetrics = "federated"', "federated metrics"),
        ("[privacy]\npseudonyms = true", "pseudonyms"),
        ('[dp]\nunit = "item"\nnoise = 1\ntrust = "local"\n[training]\nbatch = 4', "no examples"),
    ],
)
def test_what_a_deployment_cannot_do_is_refused_by_name(more: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        pack_synthetic(Plan.parse(PLAN + more), 3, 2)
