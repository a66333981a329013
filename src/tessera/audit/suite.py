"""Suite: all attacks over one run, in one pass through its record."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from tessera.audit.dropout import LateDropouts
from tessera.audit.events import Events
from tessera.audit.finding import Finding
from tessera.audit.holders import SoleHolders
from tessera.audit.infer import Inference
from tessera.audit.intersect import Intersection
from tessera.audit.opening import KeptShares, LoneRows
from tessera.audit.record import Record, RoundView
from tessera.errors import ConfigError


class Attack(Protocol):
    """Takes rounds in order and says what it found; the truth is for scoring only."""

    def take(self, view: RoundView) -> None:
        """One more round."""

    def findings(self) -> list[Finding]:
        """What came out, once all rounds are taken."""


def attacks(record: Record) -> list[Attack]:
    """Everything that is tried on a run."""
    plan, truth = record.plan, record.truth
    return [
        Intersection(plan, truth),
        Intersection(plan, truth, whole_run=True),
        LateDropouts(plan, truth),
        Events(plan, truth),
        Inference(plan, truth),
        SoleHolders(plan, truth),
        KeptShares(plan, truth),
        LoneRows(plan, truth),
    ]


def run(record: Record) -> list[Finding]:
    """Every attack's findings over the whole record."""
    tried = attacks(record)
    rounds = 0
    for view in record.rounds():
        missing = set(view.in_union) - record.truth.keys()
        if missing:
            raise ConfigError(
                f"the truth does not know client {min(missing)} of round {view.round_id}",
                hint="it is written with the run, for all clients",
            )
        rounds += 1
        for attack in tried:
            attack.take(view)
    return [replace(found, rounds=rounds) for attack in tried for found in attack.findings()]
