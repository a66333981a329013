"""A plan: everything a federation agrees on beforehand, in one TOML file or made in Python.

scheme.py        who is trusted with what
sections.py      a record for each section of the file; dp.py has that of [dp]
noisy_vector.py  the integers that a client sends where noise is on the sum
checks.py        rules between sections
places.py        which clients a round has by the seed, and rounds of a pass
defaults.py      what a task fills in where a plan leaves it open; needs PyTorch
plan.py          the whole agreement and what follows from it
toml.py          text to plan and back; what binds keys and signatures to a plan
reference.py     keys with their texts, a plan with comments, the page of all keys
"""

from tessera.plan.dp import DPPlan, NoisyRows, Unknown
from tessera.plan.plan import UNION, Plan
from tessera.plan.scheme import Scheme
from tessera.plan.sections import (
    CohortsPlan,
    Crypto,
    Domain,
    DrawnBy,
    GroupsPlan,
    Metrics,
    ModelPlan,
    Precision,
    PrivacyPlan,
    SecurityPlan,
    ServicePlan,
    Sharing,
    SimulationPlan,
    TablePlan,
    TaskPlan,
    TwoServerPlan,
    UnionPlan,
    UpdatePlan,
    Writing,
)
from tessera.privacy.dp.guarantee import Trust, Unit

__all__ = [
    "UNION",
    "CohortsPlan",
    "Crypto",
    "DPPlan",
    "Domain",
    "DrawnBy",
    "GroupsPlan",
    "Metrics",
    "ModelPlan",
    "NoisyRows",
    "Plan",
    "Precision",
    "PrivacyPlan",
    "Scheme",
    "SecurityPlan",
    "ServicePlan",
    "Sharing",
    "SimulationPlan",
    "TablePlan",
    "TaskPlan",
    "Trust",
    "TwoServerPlan",
    "UnionPlan",
    "Unit",
    "Unknown",
    "UpdatePlan",
    "Writing",
]
