"""One round of federated factors with 100 clients: in the clear, masked, mixed, and by Paillier.

Synthetic ratings of MovieLens 100K's size: 1,682 items of power-law popularity, 85 ratings per
client, 64 factors and a bias. Times are CPU seconds of one thread without training: a client's on
average, and the server's. Paillier is measured on 200 values and multiplied out
(`peers/paillier.py`).

    python -m benchmarks.fedmmf [--rounds 3] [--json] [--require-peers]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from benchmarks.peers import PeerMissing, paillier
from tessera.data.ratings import Attributes, RatingData, rating_data
from tessera.plan import Plan, PrivacyPlan, SecurityPlan, Sharing, SimulationPlan
from tessera.rounds.events import RoundFinished
from tessera.runs.training import Training, complete
from tessera.simulation.subcohort import TRAIN
from tessera.tasks import Task, known, rating_task

CLIENTS: Final = 100
ITEMS: Final = 1_682
RATINGS: Final = 85
FACTORS: Final = 64
WORDS: Final = RATINGS * (FACTORS + 1)
"""Values that a client sends of its rows."""

PATHS: Final = {
    "in the open, rows": ("submodel", Sharing.SECURE),
    "masked, rows (cpp1)": ("secure-submodel", Sharing.SECURE),
    "masked, whole model": ("secure-fedavg", Sharing.SECURE),
    "mixed, rows: half of them masked": ("secure-submodel", Sharing.AUTO),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """One round: CPU seconds without training, and bytes of a client both ways."""

    client: float
    server: float
    bytes: float


def ratings() -> RatingData:
    rng = np.random.default_rng(0)
    popular = 1.0 / np.arange(1, ITEMS + 1) ** 0.7
    popular /= popular.sum()
    each = [rng.choice(ITEMS, RATINGS, replace=False, p=popular) for _ in range(CLIENTS)]
    return rating_data(
        "synthetic",
        user=np.repeat(np.arange(CLIENTS), RATINGS),
        item=np.concatenate(each),
        rating=rng.integers(1, 6, CLIENTS * RATINGS),
        users=CLIENTS,
        items=ITEMS,
        low=1.0,
        high=5.0,
        step=1.0,
        item_attributes=Attributes((), np.zeros((ITEMS, 0), np.float32)),
        profiles=Attributes((), np.zeros((CLIENTS, 0), np.float32)),
        titles=[str(i) for i in range(ITEMS)],
        test_share=0.01,
    )


def measure(task: Task, scheme: str, sharing: Sharing, rounds: int) -> Cost:
    """The median round of a few."""
    plan = Plan(
        scheme=scheme,
        cohort=CLIENTS,
        privacy=PrivacyPlan(level="cpp1"),
        security=SecurityPlan(sharing=sharing, indicator=0.5),
        simulation=SimulationPlan(evaluate_every=rounds + 1),
    )
    with Training(task, complete(plan, task)) as training:
        if sharing is Sharing.AUTO:
            for client, member in training.clients.items():
                member.local.indicator = float(client % 2)  # every second one is content
        events = [e for e in training.run(rounds) if isinstance(e, RoundFinished)]
    return Cost(
        median(sum(e.client_seconds.values()) - e.client_seconds[TRAIN] for e in events),
        median(sum(e.server_seconds.values()) for e in events),
        median(sum(e.bytes_up.values()) + sum(e.bytes_down.values()) for e in events),
    )


def rows_of(costs: dict[str, Cost], name: str, rounds: int) -> list[machine.Row]:
    """Everything beside the open sum, and its ratio to it."""
    plain = costs["in the open, rows"]
    rows = []
    for what, cost in costs.items():
        settings: dict[str, Any] = {
            "clients": CLIENTS,
            "rounds": rounds,
            "kernel": name,
        }
        for whose, unit in (("client", "s"), ("server", "s"), ("bytes", "B")):
            ours, baseline = getattr(cost, whose), getattr(plain, whose)
            rows.append(
                machine.result(
                    f"{whose}, {what}",
                    settings,
                    ours,
                    unit,
                    baseline,
                    "in the open",
                    ours / baseline if baseline else None,
                    None,
                    None,
                )
            )
    return rows


def paillier_rows(costs: dict[str, Cost]) -> list[machine.Row]:
    """Homomorphic encryption beside the masked sum of the same rows."""
    masked = costs["masked, rows (cpp1)"]
    try:
        peer = paillier.measure()
    except PeerMissing as error:
        note(f"  {error}")
        peer = None
    rows = []
    for whose, measured in (("client", masked.client), ("server", masked.server)):
        theirs = None
        if peer is not None:
            theirs = peer.client(WORDS) if whose == "client" else peer.server(CLIENTS * WORDS)
        rows.append(
            machine.result(
                f"{whose}, masked rows against Paillier",
                {
                    "clients": CLIENTS,
                    "key bits": paillier.KEY_BITS,
                    "values": WORDS,
                    "note": f"Paillier measured on {paillier.VALUES} values and multiplied out",
                },
                measured,
                "s",
                theirs,
                "phe",
                None if theirs is None else theirs / measured,
                ">= 1",
                None if theirs is None else theirs >= measured,
            )
        )
    return rows


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, of which the median")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--require-peers", action="store_true", help="exit 1 without the peer")
    args = parser.parse_args(arguments)
    calibration = machine.calibrate()
    task = rating_task(
        ratings(), title="synthetic", recommended=known("ratings-100k").recommended, factors=FACTORS
    )
    costs = {}
    for what, (scheme, sharing) in PATHS.items():
        note(f"  {what}")
        costs[what] = measure(task, scheme, sharing, args.rounds)
    rows = rows_of(costs, calibration["kernel"], args.rounds)
    rows += paillier_rows(costs)
    machine.print_report(calibration, rows, title="Federated factors", as_json=args.json)
    return machine.exit_status(rows, require_peers=args.require_peers)


if __name__ == "__main__":
    sys.exit(main())
