"""Synthetic run folders with curves, costs and rows as a real run might have them.

Everything is a formula in the round's number, so that a test can say what a page must show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tessera.rounds.events import RoundFinished, as_json
from tessera.runs.folder import LAYOUT

SCHEMES: Final = ("central", "fedavg", "submodel", "secure-fedavg", "secure-submodel")
FINAL: Final = {
    "central": 0.781,
    "fedavg": 0.688,
    "submodel": 0.752,
    "secure-fedavg": 0.687,
    "secure-submodel": 0.749,
    "two-server": 0.752,
}
TRIVIAL: Final = {"user mean": 0.682, "item mean": 0.733, "sum": 0.769}
CPP2: Final = {"p1": 15 / 16, "p2": 1 / 16, "p3": 15 / 16, "p4": 1 / 16}
FULL: Final = 412_000.0
"""Bytes of the full model, about."""

PLAN: Final = """\
federation = "movielens <b>demo</b>"
scheme = "{scheme}"
cohort = 100
seed = 1

[task]
name = "movielens"

[privacy]
level = "cpp2"
"""


def traffic(scheme: str) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes up and down of one client, by cost category."""
    if scheme == "central":
        return {}, {}
    if scheme == "fedavg":
        return {"update": FULL}, {"rows down": FULL}
    if scheme == "submodel":
        return {"update": 81_400.0}, {"rows down": 61_300.0}
    if scheme == "two-server":
        return (
            {"choice": 12_000.0, "update": 91_000.0},
            {"keys": 340.0, "rows down": 130_000.0},
        )
    keys = {"keys": 9_800.0, "unmask": 5_100.0}
    if scheme == "secure-fedavg":
        return {**keys, "update": 1.25 * FULL}, {"keys": 20_600.0, "rows down": FULL, "unmask": 400}
    up = {"union": 88_000.0, "choice": 1_900.0, "update": 133_000.0}
    down = {"union": 21_000.0, "choice": 14_200.0, "rows down": 89_700.0, "unmask": 400.0}
    return {**keys, **up}, {"keys": 20_600.0, **down}


def times(scheme: str) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of one client and of the server, by cost category."""
    if scheme == "central":
        return {}, {"train": 6.2}
    client, server = {"train": 0.061}, {"update": 0.012}
    if scheme.startswith("secure-"):
        client |= {"keys": 0.031, "update": 0.022, "unmask": 0.004}
        server |= {"keys": 0.008, "unmask": 0.41}
    if scheme == "secure-submodel":
        client |= {"union": 0.018, "choice": 0.0006}
        server |= {"union": 0.52, "choice": 0.093}
    return client, server


def a_round(scheme: str, number: int, *, secure: bool, evaluated: bool, speed: float = 12.0) -> Any:
    """Round `number`, counted from 0."""
    ripple = math.sin(1.7 * number + len(scheme))
    reached = 0.5 + (FINAL[scheme] - 0.5) * (1.0 - math.exp(-(number + 1) / speed))
    two = scheme == "two-server"
    union = round(2_650 + 80 * ripple) if scheme == "secure-submodel" else 0
    below = round(0.11 * union)
    up, down = traffic(scheme)
    client, server = times(scheme)
    masked = (scheme.startswith("secure-") or two) and secure
    if scheme != "central" and not secure:
        up, down = dict.fromkeys(up, 0.0), dict.fromkeys(down, 0.0)
        client = {category: v if category == "train" else 0.0 for category, v in client.items()}
        server = {}
    finished: dict[str, Any] = {
        "round_id": number,
        "cohort": 0 if scheme == "central" else 100,
        "survivors": 0 if scheme == "central" else 94 + round(2 * ripple),
        "union_rows": union,
        "union_residual": 0,
        "rows_opened": union - below,
        "rows_below_quorum": below,
        "rows_shrunk": 3 if union and number % 4 == 0 else 0,
        "rows_lost": 0,
        "rows_out_of_bounds": 0,
        "weight": 14_800 + round(300 * ripple),
        "measured": secure and scheme != "central",
        "secure": masked,
        "bytes_up": up,
        "bytes_down": down,
        "client_seconds": client,
        "server_seconds": server,
        "epsilon": min(2.71, 2.02 + 0.02 * number) if scheme == "secure-submodel" else math.inf,
        "condition": "given the union",
        "metric": reached + 0.002 * ripple if evaluated else None,
        "loss": 0.7 - 0.2 * (1.0 - math.exp(-number / speed)),
        "not_finite": 1 if number == 3 and scheme == "fedavg" else 0,
        "clipped": 0.0011,
        "broken": {},
        "rows_over_cap": 0,
        "unmasked": 0,
        "singleton_rows": 0,
        "excluded": {},
        "seconds": 2.1,
        "helper_seconds": {"rows down": 0.4, "unmask": 0.6} if two and secure else {},
        "bytes_between": 160_000.0 if two and secure else 0.0,
        "writing": {"items": "keys of 91,000 bytes, not plain shares of 400,000"}
        if two and secure
        else {},
    }
    return as_json(RoundFinished(**finished))


def facts(scheme: str, rounds: int, **changes: Any) -> dict[str, Any]:
    """run.json."""
    return {
        "layout": LAYOUT,
        "version": "0.4.0",
        "name": scheme,
        "scheme": scheme,
        "task": {
            "name": "movielens-1m",
            "title": "MovieLens 1M as clicks: which films will a person like?",
            "facts": {
                "users": 6_040,
                "films": 3_706,
                "liked means": "rated 4 or more",
                "split": "the last 20 % of each person's ratings, by time, are the test part",
                "share of likes": 0.5752,
            },
            "clients": 6_040,
            "examples": 797_758,
            "test_examples": 202_451,
        },
        "metric": "AUC",
        "lower_is_better": False,
        "metrics": "central",
        "trivial": TRIVIAL,
        "learner": {"name": "vectorised", "reason": "the module passed its self-check"},
        "entropy": "system",
        "crypto": {"mode": "every", "every": 1},
        "rounds": rounds,
        "cohort": 100,
        "model": {
            "dense": 64_327,
            "tables": [
                {"name": "items", "rows": 3_706, "width": 18, "derived_from": None, "local": False},
                {
                    "name": "genres",
                    "rows": 18,
                    "width": 18,
                    "derived_from": "items",
                    "local": False,
                },
                {"name": "users", "rows": 6_040, "width": 18, "derived_from": None, "local": True},
            ],
        },
        "level": "cpp2" if scheme == "secure-submodel" else "",
        "index_privacy": CPP2,
        **changes,
    }


def make(
    folder: Path,
    scheme: str = "secure-submodel",
    *,
    rounds: int = 50,
    finished: int | None = None,
    every: int = 1,
    evaluate: int = 2,
    plan: str = PLAN,
    changes: Mapping[str, Any] | None = None,
    in_rounds: Mapping[str, Any] | None = None,
) -> Path:
    """A folder with `finished` of `rounds` rounds; every `every`-th has messages and masks.

    `changes` go over run.json, `in_rounds` over each line of rounds.jsonl.
    """
    folder.mkdir(parents=True)
    crypto = {"mode": "sampled" if every > 1 else "every", "every": every}
    told = facts(scheme, rounds, **{"crypto": crypto, **(changes or {})})
    (folder / "run.json").write_text(json.dumps(told))
    (folder / "plan.toml").write_text(plan.replace("{scheme}", scheme))
    (folder / "events.jsonl").touch()
    done = rounds if finished is None else finished
    lines = (
        a_round(
            scheme,
            number,
            secure=number % every == 0,
            evaluated=number % evaluate == 0 or number == done - 1,
        )
        | dict(in_rounds or {})
        for number in range(done)
    )
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def five(parent: Path) -> list[Path]:
    """One run of each scheme, the secure ones with cryptography on every tenth round."""
    return [
        make(parent / scheme, scheme, every=10 if scheme.startswith("secure-") else 1)
        for scheme in SCHEMES
    ]
