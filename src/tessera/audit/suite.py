"""Suite: the table of attacks, and those that a run shows something for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tessera.audit.answers import FLIPS, INFERENCE
from tessera.audit.attack import Attack, rounds_of
from tessera.audit.finding import Finding, corrected
from tessera.audit.identification import IDENTIFICATION, IDENTIFICATION_BY_SERVERS
from tessera.audit.in_the_clear import CLEAR_ROWS, OPEN_SELECTIONS
from tessera.audit.intersect import INTERSECTION, INTERSECTION_OVER_RUN
from tessera.audit.ratings.labels import Labels
from tessera.audit.ratings.plain_uploads import PLAIN_UPLOADS, PlainUploads
from tessera.audit.ratings.sums import OPENED_SUMS
from tessera.audit.record import Record, Shown, shown
from tessera.audit.row_counts import EVENTS, LATE_DROPOUTS, SOLE_HOLDERS
from tessera.audit.two_server import KEY_PERIODS, KEYS_AND_SHARES
from tessera.audit.unmasking import KEPT_SHARES, LONE_ROWS
from tessera.audit.values import VALUES
from tessera.runs.folder import RunFolder

ATTACKS: Final[tuple[Attack[Any], ...]] = (
    IDENTIFICATION_BY_SERVERS,
    IDENTIFICATION,
    VALUES,
    INTERSECTION,
    INTERSECTION_OVER_RUN,
    LATE_DROPOUTS,
    EVENTS,
    INFERENCE,
    SOLE_HOLDERS,
    KEPT_SHARES,
    LONE_ROWS,
    FLIPS,
    KEYS_AND_SHARES,
    KEY_PERIODS,
    PLAIN_UPLOADS,
    OPENED_SUMS,
    OPEN_SELECTIONS,
    CLEAR_ROWS,
)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Every attack's findings, and for masked ratings the paper's tables."""

    findings: list[Finding]
    tables: dict[str, Any] = field(default_factory=dict)


def run(record: Record) -> list[Finding]:
    """Every attack's findings over the whole record."""
    return report(record).findings


def audited(folder: Path) -> AuditReport:
    """Every attack on a run in its folder; with [dp] canaries, too, whatever the scheme hides.

    Canaries are trained, and training needs PyTorch: it is loaded here and not before.
    """
    run = RunFolder.load(folder)
    if run.plan.dp is None:
        return report(Record.load(folder))
    found: list[Finding] = import_module("tessera.audit.canary_findings").canary_findings(run.plan)
    if shown(run.plan, Labels.read(run)) <= {Shown.CLEAR_ROWS, Shown.CLEAR_PLACES}:
        return AuditReport(corrected(found))
    return report(Record.load(folder), found)


def report(record: Record, more: Sequence[Finding] = ()) -> AuditReport:
    """Every attack that the record shows something for; `more` is found already."""
    tried = [(attack, attack.by(record)) for attack in ATTACKS if attack.needs in record.shown]
    rounds = 0
    for seen in rounds_of(record):
        read = False
        for attack, attacker in tried:
            for each in attack.reads(seen):
                attacker.take(each)
                read = True
        rounds += read
    found = [finding for _, attacker in tried for finding in attacker.findings()]
    ratings = (a for _, a in tried if isinstance(a, PlainUploads))
    return AuditReport(
        [replace(finding, rounds=rounds) for finding in corrected([*found, *more])],
        next((attacker.tables() for attacker in ratings), {}),
    )
