"""Suite: the table of attacks, and those that a run shows something for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tessera.audit.answers import Flips, Inference
from tessera.audit.attack import Attack, Attacker, rounds_of, scored
from tessera.audit.finding import Finding, corrected
from tessera.audit.identification import IdentificationAttacks
from tessera.audit.in_the_clear import ClearRows, OpenSelections
from tessera.audit.intersect import Intersection
from tessera.audit.ratings.labels import Labels
from tessera.audit.ratings.plain_uploads import PlainUploads
from tessera.audit.ratings.sums import with_initial_factors
from tessera.audit.record import Record, shown
from tessera.audit.row_counts import Events, LateDropouts, SoleHolders
from tessera.audit.two_server import KeyPeriodLists, TwoServerAttacks
from tessera.audit.two_server_view import EITHER
from tessera.audit.unmasking import KeptShares, LoneRows
from tessera.audit.values import with_knowledge
from tessera.rounds.select import Shown
from tessera.runs.folder import RunFolder

PAIRS: Final = "pairs"
"""The table of sums of pairs."""


class NoSums:
    """Attacks nothing: the run has no sums that its attack would be on."""

    def take(self, seen: Any, /) -> None:
        return

    def findings(self) -> list[Finding]:
        return []


def with_pairs(record: Record) -> Attacker[Any]:
    """What follows histories, where a plan sums up pairs. Their model needs PyTorch: it is loaded
    here and not before."""
    if not any(t.name == PAIRS for t in record.plan.tables):
        return NoSums()
    chains: Attacker[Any] = import_module("tessera.audit.pair_sums").PairChains.of(record)
    return chains


ATTACKS: Final[tuple[Attack[Any], ...]] = (
    Attack(
        "identification by either of two servers",
        Shown.SHARED_ROWS,
        "nothing",
        scored(partial(IdentificationAttacks, attacker=EITHER)),
        lambda seen: seen.leader,
    ),
    Attack(
        "identification over all rounds",
        Shown.SUMS,
        "fixed groups: B; a level of answers: what these alone say; else nothing",
        scored(IdentificationAttacks),
    ),
    Attack(
        "values of opened rows", Shown.GROUPS, "B; nothing against prior knowledge", with_knowledge
    ),
    Attack(
        "intersection of unions within a period",
        Shown.UNIONS,
        "0 with one participation a period or fixed groups; s / (s + decoys)",
        scored(Intersection),
    ),
    Attack(
        "intersection of unions over the whole run",
        Shown.UNIONS,
        "0 with fixed groups, else nothing",
        scored(partial(Intersection, whole_run=True)),
    ),
    Attack("late dropout", Shown.ANSWERS, "left_behind", scored(LateDropouts)),
    Attack("Events 1 and 2", Shown.UNIONS, "event_1, event_2", scored(Events)),
    Attack("inference from revealed sets", Shown.ANSWERS, "epsilon_after", scored(Inference)),
    Attack(
        "sole holder",
        Shown.UNIONS,
        "sole_holder; the likelihood ratios of answers",
        scored(SoleHolders),
    ),
    Attack("kept shares", Shown.ANSWERS, "0", scored(KeptShares)),
    Attack("lone rows", Shown.ANSWERS, "chance", scored(LoneRows)),
    Attack("flips", Shown.ANSWERS, "0", scored(Flips)),
    Attack(
        "keys and shares of one server",
        Shown.SHARES,
        "a coin; one over the cohort",
        scored(TwoServerAttacks),
        lambda seen: seen.servers,
    ),
    Attack(
        "histories in sums of pairs, by two servers",
        Shown.SHARED_ROWS,
        "nothing of exact sums to the servers; readers and noisy sums: what goes with anybody's",
        with_pairs,
        lambda seen: seen.leader,
    ),
    Attack(
        "histories in sums of pairs, by groups",
        Shown.GROUPS,
        "nothing of exact sums to the server; readers: what goes with anybody's",
        with_pairs,
    ),
    Attack(
        "lists of a key period",
        Shown.KEY_PERIODS,
        '0 with absent = "refuse", else nothing',
        scored(KeyPeriodLists),
        lambda seen: seen.leader,
    ),
    Attack(
        "ratings in the clear",
        Shown.UPLOADS,
        "nothing",
        lambda record: PlainUploads(record.plan, record.rated),
        lambda seen: seen.ratings,
    ),
    Attack(
        "ratings in secure sums",
        Shown.RATING_SUMS,
        "rows with one rater; chance",
        with_initial_factors,
        lambda seen: seen.rating_sums,
    ),
    Attack(
        "selected places in the clear",
        Shown.CLEAR_PLACES,
        "nothing",
        lambda record: OpenSelections(record.plan),
        lambda seen: seen.messages,
    ),
    Attack(
        "rows in the clear",
        Shown.CLEAR_ROWS,
        "nothing",
        scored(ClearRows),
        lambda seen: seen.messages,
    ),
)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Every attack's findings, and for masked ratings the paper's tables."""

    findings: list[Finding]
    tables: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As `tessera audit --json` prints it, and as it is kept in the run's folder."""
        tables = {"tables": self.tables} if self.tables else {}
        return {"attacks": [finding.as_json() for finding in self.findings], **tables}


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
