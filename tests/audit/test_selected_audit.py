"""Where a client's largest changes are: a coin toss for either of two servers, read in the open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rounds.two_server.test_top import task
from simulation import test_top as dense
from tessera import simulate
from tessera.audit import in_the_clear, two_server, two_server_view
from tessera.audit.finding import Finding, Verdict
from tessera.audit.record import Record
from tessera.audit.suite import report
from tessera.audit.two_server_view import helper_view, leader_view
from tessera.ids import TableId
from tessera.plan import TwoServerPlan
from tessera.protocols.two_server.messages import Purpose
from tessera.rounds import encode

PLACES = "places selected: a real row told from another, by the {}"


def recorded(folder: Path, by: str = "element", scheme: str = "two-server", **more) -> Path:
    settings = dense.plan(
        top=0.3 if by == "element" else 0.01, scheme=scheme, update={"top_by": by}, **more
    )
    simulate(
        task(by),
        settings,
        4,
        out=folder,
        record_views=True,
        trainer="sequential",
        insecure_test_entropy="where the largest changes are",
    )
    return folder


def found(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in report(Record.load(folder)).findings}


@pytest.mark.parametrize("by", ["element", "row"])
@pytest.mark.parametrize("write", ["dpf", "dense"])
def test_either_server_alone_tosses_a_coin(tmp_path, by, write):
    outcome = found(recorded(tmp_path / "run", by, two_server=TwoServerPlan(write=write)))
    for whose in ("leader", "helper"):
        places = outcome[PLACES.format(whose)]
        assert places.trials > 80 and places.claimed == 0.5
        assert places.low <= 0.5 + 0.05 and places.verdict is not Verdict.BROKEN


def test_both_servers_together_read_them(tmp_path, monkeypatch):
    """What is scored with is what clients selected; and with it the attack finds every place."""
    told = {}
    honest = encode.selected_words

    def noted(plan, words, round_id, residual):
        out = honest(plan, words, round_id, residual)
        (cut,) = plan.cuts
        told.setdefault(int(round_id), []).append(np.flatnonzero(cut.of(out).any(axis=1)).tolist())
        return out

    monkeypatch.setattr(encode, "selected_words", noted)
    folder = recorded(tmp_path / "run", "row", two_server=TwoServerPlan(write="dpf"))
    record = Record.load(folder)
    for part in record.taken():
        round_id = part.round_id
        ours = leader_view(record.plan, round_id, part.entries)
        theirs = helper_view(record.plan, round_id, part.helper_entries, record.box_key, {})
        places = two_server_view.selected_places(ours, theirs)
        assert sorted(p.tolist() for p in places.values()) == sorted(told[int(round_id)])
    (spec,) = two_server_view.cuts_of(ours)
    whose = {}
    for client in ours.received[Purpose.WRITE]:
        _, _, own = ours.keys(client, Purpose.WRITE, TableId(spec.table))
        whose[own.trees.key] = client

    def together(layout, own, rows):
        client = whose[own.trees.key]
        shares = [two_server_view.shares_at(v, spec, client, rows) for v in (ours, theirs)]
        return np.abs(ours.params.group.add(*shares).astype(float)).sum(axis=1)

    monkeypatch.setattr(two_server, "evaluated", together)
    attack = two_server.TwoServerAttacks(record.plan, record.truth)
    attack.take(replace(ours, selected=places))
    finding = next(f for f in attack.findings() if f.name == PLACES.format("leader"))
    assert finding.trials and finding.measured == 1.0


def test_in_the_open_they_are_read(tmp_path):
    outcome = found(recorded(tmp_path / "run", scheme="fedavg"))
    read = outcome[in_the_clear.SELECTED_READ]
    assert read.measured == 1.0 and read.trials > 100 and read.verdict is Verdict.UNCLAIMED
