"""Federated learning over large embedding tables, each client touching only its own rows.

    task = tessera.tasks.load("taobao-like", users=2_000, items=20_000)
    plan = tessera.Plan(scheme="secure-submodel", cohort=50)
    run = tessera.simulate(task, plan, rounds=20)
    run.report("report.html")

Importing this package loads nothing but the exception tree: every name below is fetched from its
layer when it is first used, so that a client that only takes sums never pays for what trains.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from tessera.errors import (
    ConfigError,
    PeerError,
    RoundAborted,
    ServerFault,
    TesseraError,
    __version__,
)

if TYPE_CHECKING:
    from tessera import tasks
    from tessera.api import Comparison, Run, compare, simulate
    from tessera.learning.bound_model import Derived, Local, Table
    from tessera.learning.module_tables import Tables
    from tessera.learning.saved import load
    from tessera.learning.softmax import Softmax
    from tessera.plan import Plan
    from tessera.services.library import Client
    from tessera.services.packing import deploy
    from tessera.tasks import Task

__all__ = [
    "Client",
    "Comparison",
    "ConfigError",
    "Derived",
    "Local",
    "PeerError",
    "Plan",
    "RoundAborted",
    "Run",
    "ServerFault",
    "Softmax",
    "Table",
    "Tables",
    "Task",
    "TesseraError",
    "__version__",
    "compare",
    "deploy",
    "load",
    "simulate",
    "tasks",
]

_ELSEWHERE: Final = {
    "Client": "tessera.services.library",
    "deploy": "tessera.services.packing",
    "Comparison": "tessera.api",
    "Derived": "tessera.learning.bound_model",
    "Local": "tessera.learning.bound_model",
    "Plan": "tessera.plan",
    "Softmax": "tessera.learning.softmax",
    "Table": "tessera.learning.bound_model",
    "Run": "tessera.api",
    "Tables": "tessera.learning.module_tables",
    "Task": "tessera.tasks",
    "compare": "tessera.api",
    "load": "tessera.learning.saved",
    "simulate": "tessera.api",
}


def __getattr__(name: str) -> Any:
    if name == "tasks":
        return _imported("tessera.tasks")
    if name in _ELSEWHERE:
        return getattr(_imported(_ELSEWHERE[name]), name)
    raise AttributeError(f"module 'tessera' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _imported(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(
            "training needs PyTorch, which is not installed",
            hint="install torch, or this package with its extra `train`",
        ) from error
