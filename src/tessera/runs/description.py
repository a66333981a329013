"""What is known of a run before its first round, as plain JSON values: run.json."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tessera.crypto.dpf import Forest
from tessera.errors import __version__
from tessera.plan import Plan
from tessera.rounds import schemes
from tessera.rounds.forecast.traffic import TwoServerTraffic

if TYPE_CHECKING:
    from tessera.tasks import Task

TEST_ENTROPY: Final = "insecure test entropy"
SYSTEM: Final = "system"


def digest_of(task: Task) -> str:
    """Names the training part as it is read: its columns and whose they are.

    Before clients draw their negatives, so that it is the same in every run over the same data.
    """
    digest = hashlib.sha256(task.data.offsets.tobytes())
    for name, column in sorted(task.data.train.fields.items()):
        digest.update(name.encode() + b"\0" + np.ascontiguousarray(column).data)
    return digest.hexdigest()


def describe(
    task: Task,
    plan: Plan,
    rounds: int,
    learner: dict[str, str],
    script: str | None,
    trivial: Mapping[str, float],
) -> dict[str, Any]:
    """What is known before the first round: run.json. `trivial` is what needs no model."""
    data, simulation, privacy = task.data, plan.simulation, plan.privacy.index
    bound = task.bind(task.build(plan.seed))
    facts: dict[str, Any] = {
        "version": __version__,
        "name": plan.federation,
        "scheme": plan.scheme.value,
        "task": {
            "name": task.name,
            "title": task.title or task.name,
            "facts": dict(data.facts),
            "clients": data.clients,
            "examples": len(data.train),
            "test_examples": len(data.test),
        },
        "data": digest_of(task),
        "metric": task.metric.name,
        "lower_is_better": task.metric.lower_is_better,
        "metrics": simulation.metrics.value,
        "trivial": dict(trivial),
        "learner": learner,
        "entropy": SYSTEM if script is None else TEST_ENTROPY,
        "crypto": {"mode": simulation.crypto.value, "every": simulation.crypto_every},
        "rounds": rounds,
        "cohort": plan.cohort,
        "model": {
            "dense": bound.dense_size,
            "tables": [
                {
                    "name": t.name,
                    "rows": t.rows,
                    "width": t.width,
                    "derived_from": t.derived_from or "",
                    "local": t.local,
                }
                for t in bound.tables
            ],
        },
        "level": plan.privacy.level,
        "naming_bound": plan.promise.bound(),
        "index_privacy": {"p1": privacy.p1, "p2": privacy.p2, "p3": privacy.p3, "p4": privacy.p4},
    }
    entry = schemes.of(plan)
    if entry.two_servers:
        facts["two_server"] = describe_two_server(
            plan, None if entry.rows.union else TwoServerTraffic(plan, None, {})
        )
    if script is not None:
        facts["entropy_script"] = script
    return facts


def describe_two_server(plan: Plan, traffic: TwoServerTraffic | None) -> dict[str, Any]:
    """What two servers look at and how tables are written, as plain JSON values.

    The same in `tessera plan --json` and in run.json. `traffic` is None where a union decides, in
    each round anew; that round then tells.
    """
    least = max(2, plan.least_survivors)
    forests: list[Forest] = []
    if traffic is not None:
        layouts = (*traffic.layouts.reading.values(), *traffic.layouts.writing.values())
        forests = [layout.forest for layout in layouts]
    return {
        "domain": schemes.of(plan).rows.domain,
        "write": plan.two_server.write.value,
        "check": plan.two_server.check,
        "verify": plan.two_server.verify,
        "key_rounds": plan.two_server.key_rounds,
        "absent": plan.two_server.absent.value,
        "report_bytes": None if traffic is None else list(traffic.report_bytes),
        "row_limit": plan.two_server.row_limit,
        "max_rows": plan.union.max_rows,
        "min_cohort": least,
        "may_vanish": plan.cohort - least,
        "most_excluded": plan.most_missing,
        "rows_looked_at": None if traffic is None else sum(int(f.sizes.sum()) for f in forests),
        "aes_blocks": None if traffic is None else sum(f.aes_blocks for f in forests),
        "tables": [
            {
                "name": cost.table,
                "rows": cost.rows,
                "write": cost.write.value,
                "keys": cost.keys,
                "shares": cost.shares,
                "reason": cost.reason,
            }
            for cost in (() if traffic is None else traffic.writing)
        ],
    }
