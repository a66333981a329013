"""Suite: all attacks over one run, in one pass through its record.

Naming attacks are for every scheme that hides whose a row is; other attacks on rows for the one
with randomised answers; those on keys for two servers; those on ratings for tasks that federate
factors, under any scheme. Where a scheme hides nothing, rows are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tessera.audit.answers import Flips, Inference
from tessera.audit.finding import Finding, corrected
from tessera.audit.identification import NamingAttacks
from tessera.audit.in_the_clear import ClearRows, OpenSelections
from tessera.audit.intersect import Intersection
from tessera.audit.ratings.labels import Labels
from tessera.audit.ratings.plain_uploads import PlainUploads
from tessera.audit.ratings.record import rating_round
from tessera.audit.ratings.sums import OpenedSums, initial_factors
from tessera.audit.record import Record, RoundView
from tessera.audit.row_counts import Events, LateDropouts, SoleHolders
from tessera.audit.two_server import (
    KeyPeriodLists,
    TwoServerAttacks,
    selected_places,
)
from tessera.audit.two_server_view import helper_view, leader_view
from tessera.audit.unmasking import KeptShares, LoneRows
from tessera.audit.values import AttackerKnowledge, ValueAttacks
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.plan import Sharing
from tessera.protocols.two_server.messages import Purpose
from tessera.rounds import schemes
from tessera.runs.folder import RunFolder


class Attack(Protocol):
    """Takes rounds in order and says what it found; the truth is for scoring only."""

    def take(self, view: RoundView) -> None:
        """One more round."""

    def findings(self) -> list[Finding]:
        """What came out, once all rounds are taken."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Every attack's findings, and for masked ratings the paper's tables."""

    findings: list[Finding]
    tables: dict[str, Any] = field(default_factory=dict)


def attacks(record: Record) -> list[Attack]:
    """Everything that is tried on rows, where all of a cohort are masked."""
    plan, truth = record.plan.group_plan, record.truth
    if not schemes.of(plan).masks or plan.security.sharing is not Sharing.SECURE:
        return []
    if not schemes.of(plan).randomises:
        return [NamingAttacks(plan, truth)]
    return [
        NamingAttacks(plan, truth),
        *_on_values(record),
        Intersection(plan, truth),
        Intersection(plan, truth, whole_run=True),
        LateDropouts(plan, truth),
        Events(plan, truth),
        Inference(plan, truth),
        SoleHolders(plan, truth),
        KeptShares(plan, truth),
        LoneRows(plan, truth),
        Flips(plan, truth),
    ]


def _on_values(record: Record) -> list[Attack]:
    """Of fixed groups: what the values say, given what an attacker knows; that needs PyTorch."""
    if not record.plan.grouped:
        return []
    known: AttackerKnowledge | None = None
    if record.plan.task.name:
        known = import_module("tessera.audit.knowledge").of_run(record.plan)
    return [ValueAttacks(record.plan.group_plan, record.truth, known)]


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
    labels = Labels.read(run)
    if not schemes.of(run.plan).hides and not (labels is not None and labels.factorised):
        return AuditReport(corrected(found))
    return report(Record.load(folder), found)


def report(record: Record, more: Sequence[Finding] = ()) -> AuditReport:
    """Every attack over the whole record; `more` is found already."""
    plan, labels = record.plan, record.labels
    on_rows = attacks(record)
    plain_uploads = opened_sums = two_server = naming = selections = key_lists = None
    seeds: dict[RoundId, bytes] = {}
    if schemes.of(plan).two_servers:
        two_server = TwoServerAttacks(plan, record.truth)
        key_lists = KeyPeriodLists(plan, record.truth) if plan.key_rounds > 1 else None
        naming = NamingAttacks(plan, record.truth) if plan.tables else None
    elif plan.selects:
        selections = OpenSelections(plan)
    if labels is not None and labels.factorised:
        if not schemes.of(plan).hides or plan.security.sharing is not Sharing.SECURE:
            plain_uploads = PlainUploads(plan, labels)
        if schemes.of(plan).masks and plan.security.sharing is not Sharing.PLAIN:
            opened_sums = OpenedSums(plan, labels, initial_factors(plan, len(labels.of)))
    clear = None
    if not schemes.of(plan).hides and plan.roots and not plain_uploads and not selections:
        clear = ClearRows(plan, record.truth)
    rounds = 0
    for round_id, seen, helpers in record.entries_of_both():
        sums = record.replayed(round_id, seen)
        for view in sums:
            _known(record.truth.keys(), view.in_union, round_id)
            for attack in on_rows:
                attack.take(view)
        if labels is not None and (plain_uploads or opened_sums):
            views: list[RoundView | None] = [*sums]
            for each in views or [None]:
                rated = rating_round(plan.group_plan, round_id, seen, each)
                _known(labels.of.keys(), (*rated.uploads, *rated.survivors), round_id)
                for on_ratings in (plain_uploads, opened_sums):
                    if on_ratings is not None:
                        on_ratings.take(rated)
        of_leader = None
        if two_server is not None:
            of_leader = leader_view(plan, round_id, seen)
            key = record.box_key
            of_helper = None if key is None else helper_view(plan, round_id, helpers, key, seeds)
            if of_helper is not None:
                seeds[round_id] = of_helper.header.seed
            selected = None
            if of_leader is not None and of_helper is not None and plan.selects:
                selected = selected_places(of_leader, of_helper)
            for one in (of_leader, of_helper):
                if one is not None:
                    _known(record.truth.keys(), one.received[Purpose.RETRIEVE], round_id)
                    two_server.take(one, selected)
            if key_lists is not None and of_leader is not None:
                key_lists.take(of_leader)
            if naming is not None and of_leader is not None:  # both open the same sums
                naming.take_two_server(of_leader)
        if selections is not None:
            selections.take(message for _, message in seen)
        if clear is not None:
            clear.take(message for _, message in seen)
            _known(record.truth.keys(), clear.rounds, round_id)
        rounds += any((sums, plain_uploads, of_leader, selections, clear))
    tried = (naming, *on_rows, two_server, key_lists, plain_uploads, opened_sums, selections, clear)
    found = [f for attack in tried if attack for f in attack.findings()]
    return AuditReport(
        [replace(finding, rounds=rounds) for finding in corrected([*found, *more])],
        plain_uploads.tables() if plain_uploads else {},
    )


def _known(known: Collection[ClientId], clients: Iterable[ClientId], round_id: RoundId) -> None:
    missing = set(clients) - set(known)
    if missing:
        raise ConfigError(
            f"the truth does not know client {min(missing)} of round {round_id}",
            hint="it is written with the run, for all clients",
        )
