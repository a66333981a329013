"""The audit bites: with a rule switched off, the attack that the rule is there for succeeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audit import runs
from tessera.audit import suite
from tessera.audit.finding import Finding, Verdict
from tessera.audit.record import Record
from tessera.crypto.prg import Label
from tessera.ids import ClientId, RoundId
from tessera.plan import SecurityPlan
from tessera.privacy.index.period import FrozenPeriod
from tessera.privacy.index.response import LEVELS, contained
from tessera.protocols.secagg import states
from tessera.protocols.secagg.params import GraphKind
from tessera.protocols.secagg.session import Session, neighbourhood
from tessera.rounds import select
from tessera.rounds.cohorts import Cohorts
from tessera.rounds.party import LocalState

WITHIN = "intersection within a period: "


def attack(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in suite.run(Record.load(folder))}


def test_one_mask_key_for_both_stages_opens_a_late_dropouts_union_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "kept shares: a late dropout's union input opens"
    plan = runs.plan_of()
    kept = attack(runs.record(tmp_path / "kept", plan, 6, drops=0.3))[name]
    assert kept.trials and kept.verdict is Verdict.HOLDS
    monkeypatch.setattr(
        Session, "mask_key", lambda self, stage: self.root.derive(Label.MASK_KEY, "one for all")
    )
    broken = attack(runs.record(tmp_path / "broken", plan, 6, drops=0.3))[name]
    assert broken.measured == 1.0
    assert broken.verdict is Verdict.BROKEN


@pytest.mark.slow
def test_rows_masked_along_the_sparse_graph_open_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "lone rows: one member's row looks open"
    sparse = SecurityPlan(graph=GraphKind.SPARSE, dropout=0.05)
    plan = runs.plan_of(cohort=20, rows=400, security=sparse, level="cpp2")
    kept = attack(runs.record(tmp_path / "kept", plan, 4, each=10))[name]
    assert kept.trials and kept.verdict is Verdict.HOLDS
    original = states.masked

    def along_the_graph(at, given, *, shared, **more):
        near = set(neighbourhood(at.session.params, at.roster).neighbours(at.session.me))
        fewer = {t: {c: r for c, r in by.items() if c in near} for t, by in shared.items()}
        return original(at, given, shared=fewer, **more)

    monkeypatch.setattr(states, "masked", along_the_graph)
    broken = attack(runs.record(tmp_path / "broken", plan, 4, each=10))[name]
    assert broken.measured > 0.2
    assert broken.verdict is Verdict.BROKEN


@pytest.mark.slow
def test_without_decoys_an_empty_row_gives_its_late_dropout_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = runs.plan_of(level="cpp5", decoys=0.5)
    names = ("late dropout: an empty row is its own", f"{WITHIN}a pinned row is real")
    kept = attack(runs.record(tmp_path / "kept", plan, 30, drops=0.1))
    monkeypatch.setattr(select, "with_decoys", lambda held, *_, **__: held)
    bare = attack(runs.record(tmp_path / "broken", plan, 30, drops=0.1))
    for name in names:
        assert kept[name].trials and kept[name].verdict is Verdict.HOLDS
        assert bare[name].measured > kept[name].high
        assert bare[name].verdict is Verdict.BROKEN


@pytest.mark.slow
def test_decoys_drawn_anew_each_round_fade_from_the_intersection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, original = runs.plan_of(rows=1000, decoys=0.5), select.with_decoys
    fresh = np.random.default_rng(3)

    def redrawn(held, catalogue, stream, *, share):
        others = np.setdiff1d(np.arange(catalogue.size, dtype=np.uint64), held)
        count = original(held, catalogue, stream, share=share).size - held.size
        return np.union1d(held, fresh.choice(others, count, replace=False))

    monkeypatch.setattr(select, "with_decoys", redrawn)
    found = attack(runs.record(tmp_path, plan, 20))[f"{WITHIN}a pinned row is real"]
    assert found.verdict is Verdict.BROKEN


@pytest.mark.slow
def test_permanent_answers_that_change_say_more_than_the_level_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = np.random.default_rng(4)

    def redrawn(self, table, rows):
        real = contained(rows, self._table(table).offered)
        return fresh.random(rows.size) < np.where(real, self.privacy.p1, self.privacy.p2)

    monkeypatch.setattr(FrozenPeriod, "permanent", redrawn)
    found = attack(runs.record(tmp_path, runs.plan_of(level="cpp3"), 60))
    assert found["inference from 1 revealed set"].verdict is Verdict.HOLDS
    assert found["inference from 5 revealed sets"].verdict is Verdict.BROKEN


@pytest.mark.slow
def test_clients_without_cover_break_the_plans_level_and_event_1(tmp_path: Path) -> None:
    plan = runs.plan_of(level="cpp3", min_group=1, insecure_small_groups=True)
    found = attack(runs.record(tmp_path, plan, 20, chosen=LEVELS["cpp1"]))
    assert found["Event 1: a row opens as one known client's update"].verdict is Verdict.BROKEN
    assert found["inference from 1 revealed set"].verdict is Verdict.BROKEN


def test_a_second_participation_in_a_period_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def anybody(self: Cohorts, round_id: RoundId) -> list[ClientId]:
        rng = np.random.default_rng([9, int(round_id)])
        pool = sorted(self.population)
        return [pool[i] for i in sorted(rng.choice(len(pool), self.plan.cohort, replace=False))]

    monkeypatch.setattr(Cohorts, "sample", anybody)
    monkeypatch.setattr(LocalState, "attend", lambda *_: None)  # else they refuse
    plan = runs.plan_of(cohort=4, period_rounds=5, cohorts={"drawn": "schedule", "separation": 5})
    found = attack(runs.record(tmp_path, plan, 10, clients=20))
    pinned = found[f"{WITHIN}real rows pinned on their client"]
    assert pinned.claimed == 0.0
    assert pinned.verdict is Verdict.BROKEN
