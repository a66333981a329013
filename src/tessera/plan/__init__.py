"""A plan: everything a federation agrees on beforehand, in one TOML file or made in Python.

scheme.py    who is trusted with what
sections.py  a record for each section of the file; dp.py has that of [dp]
checks.py    rules between sections; noise_checks.py has those of [dp]
plan.py      the whole agreement and what follows from it
toml.py      text to plan and back
keys.py      keys, with the text under their fields
comments.py  a plan with comments; example.py has one for each scheme
reference.py the page of all keys
renamed.py   keys that once had another name
digest.py    what binds keys and signatures to a plan
"""

from tessera.plan.dp import DPPlan, NoiseFrom, NoisyRows, Unknown
from tessera.plan.plan import UNION, Plan
from tessera.plan.scheme import Scheme
from tessera.plan.sections import (
    Crypto,
    Domain,
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

__all__ = [
    "UNION",
    "Crypto",
    "DPPlan",
    "Domain",
    "Metrics",
    "ModelPlan",
    "NoiseFrom",
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
    "TwoServerPlan",
    "UnionPlan",
    "Unknown",
    "UpdatePlan",
    "Writing",
]
