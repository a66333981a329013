"""Fixed groups that wait: what counts when clients are absent, and what an epoch costs.

Invitations that count are beside those of groups whose members would all have to be there in one
round: (1 - absent)^10. Unequal availability draws each client's own share of rounds from a Beta
distribution; in the last two rows a client is there for six hours of each day, which begin at an
hour of its own, and everybody who is there is asked.

Bytes and the server's CPU seconds of a client and epoch are beside a synchronous round of ten
clients at `cpp5`, in which everybody names the whole union as well: the same rows, nobody missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from tessera.crypto.entropy import ScriptedEntropy
from tessera.ids import ClientId, RoundId
from tessera.plan import (
    Crypto,
    GroupsPlan,
    ModelPlan,
    Plan,
    PrivacyPlan,
    Scheme,
    SimulationPlan,
    TablePlan,
    UnionPlan,
)
from tessera.rounds.events import RoundFinished
from tessera.simulation import population
from tessera.simulation.epochs import federation_for
from tessera.simulation.faults import Drop, Fault

SIZE, COHORT, HOURS = 10, 40, 24
Absent = Callable[[int, ClientId], bool]
AVAILABLE: Final = (4.0, 1.0)
"""Of the Beta distribution: on average a client is there in four rounds of five."""


def plan(cohort: int, *, crypto: Crypto, groups: bool = True, rows: int = 60) -> Plan:
    return Plan(
        scheme=Scheme.SECURE_SUBMODEL,
        cohort=cohort,
        tables=(TablePlan(name="items", rows=3_000, width=16),),
        model=ModelPlan(dense=2_000),
        privacy=PrivacyPlan() if groups else PrivacyPlan(level="cpp5"),
        groups=GroupsPlan(size=SIZE) if groups else GroupsPlan(),
        union=UnionPlan(max_rows=rows),
        simulation=SimulationPlan(crypto=crypto),
    )


def ended(
    chosen: Plan, clients: int, rounds: int, absent: Absent, rows: int = 60
) -> list[RoundFinished]:
    def faults(round_id: RoundId, cohort: Sequence[ClientId]) -> list[Fault]:
        return [Drop(c, "collect") for c in cohort if absent(int(round_id), c)]

    members = population.participants(chosen, clients, rows)
    federation = federation_for(chosen)(
        chosen,
        members,
        dense=population.dense(chosen),
        tables=population.tables(chosen),
        trainer=population.cohort_trainer(chosen, clients),
        derived=population.derived_maps(chosen),
        entropy=ScriptedEntropy(b"benchmark"),
        faults=faults,
    )
    return [event for event in federation.run(rounds) if isinstance(event, RoundFinished)]


def waiting_rows(rounds: int) -> list[machine.Row]:
    rng, clients = np.random.default_rng(0), 200
    own = rng.beta(*AVAILABLE, size=clients)
    found = []
    cases: list[tuple[str, float, Absent, str | None]] = [
        ("5 % absent", 0.05, _by_chance(0.05), ">= 0.78"),
        ("20 % absent", 0.2, _by_chance(0.2), ">= 0.70"),
        ("30 % absent", 0.3, _by_chance(0.3), None),
        ("unequal, 20 % absent", 0.2, _by_chance(1.0 - own), None),
    ]
    for name, share, absent, target in cases:
        events = ended(plan(COHORT, crypto=Crypto.NONE, rows=8), clients, rounds, absent, rows=8)
        invited = sum(event.cohort for event in events)
        counted = sum(event.survivors for event in events) / invited
        waited = [each for event in events for each in event.waited]
        settings = {"who": name, "waited": _mean_p95(waited, "rounds")}
        together = (1.0 - share) ** SIZE
        ok = None if target is None else machine.meets(counted, target)
        row = ("invitations that count", settings, counted, "share", together, "all at once")
        found.append(machine.result(*row, counted / together, target, ok))
    return [*found, *daily_rows(rounds)]


def daily_rows(rounds: int) -> list[machine.Row]:
    """Six hours a day: rounds are hours."""
    rng, clients, days = np.random.default_rng(1), 100, max(4, rounds // 15)
    begins = rng.integers(HOURS, size=clients)

    def absent(hour: int, client: ClientId) -> bool:
        return bool((hour - begins[int(client)]) % HOURS >= 6)

    chosen = plan(clients, crypto=Crypto.NONE, rows=8)
    events = ended(chosen, clients, days * HOURS, absent, rows=8)
    later = [event for event in events if event.round_id >= HOURS]
    opened = sum(event.groups_opened for event in later)
    epochs = opened / (days - 1) / (clients // SIZE)
    settings = {"who": "six hours a day", "waited": _mean_p95(_all_waited(later), "hours")}
    row = ("epochs of a group", settings, epochs, "a day", None, None, None)
    return [machine.result(*row, ">= 0.9", epochs >= 0.9)]


def _all_waited(events: Sequence[RoundFinished]) -> list[int]:
    return [each for event in events for each in event.waited]


def _mean_p95(waited: Sequence[int], unit: str) -> str:
    return f"{np.mean(waited):.2f} / {np.percentile(waited, 95):.0f} {unit} (mean / p95)"


def _by_chance(share: float | np.ndarray) -> Absent:
    rng = np.random.default_rng(7)

    def absent(_: int, client: ClientId) -> bool:
        own = share if isinstance(share, float) else share[int(client)]
        return bool(rng.random() < own)

    return absent


def cost_rows(rounds: int) -> list[machine.Row]:
    """Of one group of ten: updates alone, and with the union that is summed once."""

    def nobody(_: int, __: ClientId) -> bool:
        return False

    waits = ended(plan(SIZE, crypto=Crypto.EVERY), SIZE, rounds, nobody)
    meets = ended(plan(SIZE, crypto=Crypto.EVERY, groups=False), SIZE, rounds, nobody)
    found = []
    for what, targets in (("bytes_up", "<= 0.5"), ("both ways", "<= 0.7"), ("server", "<= 0.5")):
        ours, theirs = _figure(waits[1:], what), _figure(meets[1:], what)
        unit = "CPU s" if what == "server" else "bytes"
        ratio = ours / theirs
        row = (f"an epoch: {what}", {"rows": 60}, ours, unit, theirs, "a synchronous round", ratio)
        found.append(machine.result(*row, targets, machine.meets(ratio, targets)))
    return found


def _figure(events: Sequence[RoundFinished], what: str) -> float:
    if what == "server":
        return float(np.median([sum(e.server_seconds.values()) for e in events]))
    parts = ("bytes_up", "bytes_down") if what == "both ways" else (what,)
    return float(np.mean([sum(sum(getattr(e, part).values()) for part in parts) for e in events]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    rows = [*waiting_rows(args.rounds), *cost_rows(min(12, args.rounds))]
    title = "fixed groups that wait"
    machine.print_report(machine.calibrate(), rows, title=title, as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
