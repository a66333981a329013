"""A small commented plan for each scheme, which can be run as it is."""

from __future__ import annotations

from typing import Final

from tessera.rounds.plan.comments import section, top_level
from tessera.rounds.plan.scheme import Scheme
from tessera.rounds.plan.sections import (
    ModelPlan,
    PrivacyPlan,
    SecurityPlan,
    TablePlan,
    TwoServerPlan,
    UnionPlan,
    UpdatePlan,
)

HEAD: Final = """\
# A plan: everything a federation agrees on beforehand. A misspelt key is refused.
# `tessera plan THIS` checks it and says what its rounds cost; `tessera run THIS` runs them.
# All keys are explained in docs/plan.md.
"""

MESSAGES: Final = "everybody's messages are as long as this asks for:"
"""Why a cap that is too high costs bytes between two servers."""


def example_plan(scheme: Scheme) -> str:
    parts = [
        HEAD,
        top_level(federation="example", scheme=scheme, cohort=20, seed=1),
        section("model", ModelPlan(dense=500)),
        section("table", TablePlan(name="items", rows=5000, width=8), ("name", "rows", "width")),
        section("table", TablePlan(name="categories", rows=100, width=8, derived_from="items")),
        section("update", UpdatePlan(clip=1.0), ("clip", "levels", "max_count")),
    ]
    keys = ("threat", "graph", "corrupt", "dropout") if scheme.secure else ("dropout",)
    parts.append(section("security", SecurityPlan(), keys))
    if scheme is Scheme.SECURE_SUBMODEL:
        parts.append(section("privacy", PrivacyPlan(), ("level", "decoys", "period_rounds")))
        parts.append(section("union", UnionPlan(max_rows=60), ("max_rows", "encoding")))
    if scheme is Scheme.TWO_SERVER:
        notes = {"max_rows": (MESSAGES, "no more than clients hold")}
        parts.append(section("union", UnionPlan(max_rows=60), ("max_rows",), notes=notes))
        parts.append(section("two_server", TwoServerPlan()))
    return "\n".join(parts)
