"""One of two servers cannot tell a client's rows from others, and both together can."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from audit import runs
from rounds.population import federation, plan
from tessera.audit import two_server
from tessera.audit.finding import Finding, Verdict
from tessera.audit.guesses import BEST_GUESS
from tessera.audit.identification import LINKS, PARTICIPATION
from tessera.audit.record import Record
from tessera.audit.suite import report
from tessera.audit.two_server import ABSENT, REKEYED
from tessera.audit.two_server_view import helper_view, leader_view
from tessera.cli import main as cli
from tessera.crypto import dpf
from tessera.ids import HELPER, SERVER, ClientId
from tessera.plan import Plan, Scheme, TwoServerPlan
from tessera.runs.folder import HELPER_KEY, TRUTH, VIEWS, RunFolder
from tessera.runs.truth import write_box_key, write_truth
from tessera.simulation.faults import Drop, random_dropouts
from tessera.simulation.views import StreamedViews

READ = "rows fetched: a real row told from another, by the {}"
WRITTEN = "rows written: a real row told from another, by the {}"
ALONE = "sole writer: a row opens as one client's update"
NAMED = "sole writer: the client is identified, by the {}"


def recorded(folder: Path, rounds: int = 4, settings: Plan | None = None, **way) -> Path:
    if settings is None:
        settings = plan("two-server", two_server=TwoServerPlan(**way), union={"max_rows": 20})
    log = RunFolder.create(folder, settings)
    with StreamedViews(folder / VIEWS, [SERVER, HELPER]) as views:
        fed = federation(
            settings, clients=12, views=views, faults=random_dropouts(0.1, 1, settings)
        )
        for event in fed.run(rounds):
            log.append(event)
    write_truth(folder / TRUTH, fed.participants)
    assert fed.two_server is not None
    write_box_key(folder / HELPER_KEY, fed.two_server)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("two-server") / "run", write="dpf")


def guesses(finding: Finding) -> bool:
    """No better than chance, with a margin: of so many findings some are off by chance."""
    return bool(finding.trials) and finding.low <= finding.claimed + 0.05


def found(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in report(Record.load(folder)).findings}


def test_a_server_alone_guesses(folder):
    outcome = found(folder)
    alone = outcome.pop(ALONE)
    assert alone.verdict is Verdict.UNCLAIMED and alone.attacker == two_server.EITHER
    assert all(guesses(finding) for finding in outcome.values())
    assert all(finding.rounds == 4 for finding in outcome.values())
    there = outcome[f"{PARTICIPATION}: {BEST_GUESS}"]
    assert there.attacker == two_server.EITHER and there.verdict is Verdict.UNCLAIMED
    assert there.measured > 1.3 * there.chance, "who was there when a row was written"
    for kind in (READ, WRITTEN):
        for whose in ("leader", "helper"):
            finding = outcome[kind.format(whose)]
            assert finding.claimed == 0.5 and finding.trials > 250
            assert finding.attacker == whose


def test_rows_of_one_client_are_linked_by_their_direction(tmp_path):
    """Presence excludes clients row by row, and others' rows blur it; linked rows add it up."""
    settings = runs.plan_of(cohort=4, rows=60, level="cpp1", scheme=Scheme.TWO_SERVER)
    names = {}
    for own in (True, False):
        folder = runs.record(
            tmp_path / str(own), settings, 12, clients=12, each=20, own_direction=own
        )
        names[own] = found(folder)
    there, linked = (names[True][f"{name}: {BEST_GUESS}"] for name in (PARTICIPATION, LINKS))
    assert linked.attacker == two_server.EITHER and linked.verdict is Verdict.UNCLAIMED
    assert linked.measured > there.measured + 0.03
    alike = names[False][f"{LINKS}: {BEST_GUESS}"]  # all deltas are one: nothing is told apart
    assert alike.measured < there.measured


def test_rows_of_a_sole_writer_are_counted_and_nameless(folder):
    """The truth, counted once more from who was in the sums."""
    outcome = found(folder)
    record = Record.load(folder)
    alone = rows = 0
    for round_id, seen in record.entries():
        view = leader_view(record.plan, round_id, seen)
        assert view is not None and view.opened is not None
        written = np.concatenate([record.truth[c] for c in view.included])
        ids, counts = np.unique(written, return_counts=True)
        alone, rows = alone + int((counts == 1).sum()), rows + len(ids)
    assert outcome[ALONE].measured == alone / rows and 0.1 < alone / rows < 0.9
    assert outcome[ALONE].trials == rows
    for whose in ("leader", "helper"):
        named = outcome[NAMED.format(whose)]
        assert guesses(named) and 1 / 8 <= named.claimed <= 1 / 6 and named.trials == alone


def test_two_servers_together_read_every_row(folder, monkeypatch):
    """The same attack with both shares: it can win, so that failing means something."""
    kept = {}

    def together(layout, own, rows):
        if own.party == 0:
            kept[own.trees.key] = own
            return np.zeros(len(rows))
        bins, places = layout.table.chosen[rows], layout.table.positions[rows]
        shares = [
            dpf.evaluate_points(one, bins.reshape(-1), places.reshape(-1))
            for one in (kept[own.trees.key], own)
        ]
        group = layout.forest.values.group
        both = shares[0] ^ shares[1] if group is None else group.add(*shares)
        return both.reshape(len(rows), -1) != 0

    monkeypatch.setattr(two_server, "evaluated", together)
    outcome = found(folder)
    for name in (READ, WRITTEN, NAMED):
        finding = outcome[name.format("helper")]
        most = 0.75 if name == READ else 0.9  # keys that nobody needs point somewhere, too
        assert finding.verdict is Verdict.BROKEN and finding.measured > most
        assert guesses(outcome[name.format("leader")])


WAYS = [
    {"write": "dense"},
    {"domain": "union", "write": "dpf"},
    {"domain": "union", "write": "dense"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_plain_shares_and_unions_are_audited_too(tmp_path, way):
    outcome = found(recorded(tmp_path / "run", 2, **way))
    assert outcome.pop(ALONE).verdict is Verdict.UNCLAIMED
    for name, finding in outcome.items():
        assert guesses(finding), name
    for whose in ("leader", "helper"):
        assert outcome[WRITTEN.format(whose)].trials > 100
        assert outcome[NAMED.format(whose)].trials == outcome[NAMED.format("leader")].trials > 0


@pytest.mark.parametrize("way", [{"write": "dense"}, WAYS[2]], ids=str)
def test_two_plain_shares_add_up_to_what_was_written(tmp_path, way):
    """What each server is taken to have of a table is its share and nothing else."""
    record = Record.load(recorded(tmp_path / "run", 1, **way))
    (part,) = record.taken()
    leader = leader_view(record.plan, part.round_id, part.entries)
    helper = helper_view(record.plan, part.round_id, part.helper_entries, record.box_key, {})
    assert helper.header == leader.header and helper.included == leader.included
    ((spec, start),) = leader.roots
    for client in leader.included:
        shares = [view.plain(client, spec) for view in (leader, helper)]
        rows = np.flatnonzero(leader.params.group.add(*shares).any(axis=1))
        real = record.truth[client] - np.uint64(start)
        ids = rows if spec.ids is None else spec.ids[rows]
        assert np.array_equal(ids, real)


def test_behind_a_derived_table_of_a_union_nothing_is_looked_at_and_that_is_said(tmp_path):
    settings = plan("two-server", two_server=TwoServerPlan(domain="union", write="dense"))
    first, second = settings.tables
    turned = replace(settings, tables=(second, first))
    outcome = found(recorded(tmp_path / "run", 1, settings=turned))
    for whose in ("leader", "helper"):
        finding = outcome[WRITTEN.format(whose)]
        assert (
            finding.verdict is Verdict.UNTESTED and "a map that is not recorded" in finding.meaning
        )
        assert guesses(outcome[READ.format(whose)])


@pytest.mark.parametrize("gone", [HELPER_KEY, f"{VIEWS}/{HELPER}.view.jsonl"])
def test_without_its_key_or_its_view_the_helpers_part_is_left_out(tmp_path, folder, gone):
    (folder / gone).rename(tmp_path / "kept")
    try:
        outcome = found(folder)
    finally:
        (tmp_path / "kept").rename(folder / gone)
    assert outcome[READ.format("helper")].verdict is Verdict.UNTESTED
    assert guesses(outcome[READ.format("leader")])
    assert NAMED.format("helper") not in outcome


def test_the_command_tells_it(folder, capsys):
    assert cli.main(["audit", str(folder), "--json"]) == 0
    attacks = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["attacks"]
    assert {attack["attacker"] for attack in attacks} == {"leader", "helper", two_server.EITHER}
    assert cli.main(["audit", str(folder)]) == 0
    text = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80 and "…" not in text
    text = " ".join(text.split())
    assert "recorded rounds, by the leader and the helper" in text and "no claim" in text
    for kind in (
        two_server.TOLD_APART,
        two_server.IDENTIFIED,
        two_server.ALONE,
    ):  # each explained once
        assert text.count(f"{kind}: of ") == 1


def test_lists_that_differ_while_keys_last_are_counted(tmp_path):
    """One client misses the second round of its keys, and is back; the next keys are over all."""
    outcomes = {}
    for absent in ("allow", "refuse"):
        way = TwoServerPlan(write="dpf", domain="whole", key_rounds=3, absent=absent)
        settings = plan("two-server", two_server=way, union={"max_rows": 20})
        folder = tmp_path / absent
        log = RunFolder.create(folder, settings)
        gone = {1: "collect", 3: "query"}
        with StreamedViews(folder / VIEWS, [SERVER, HELPER]) as views:
            fed = federation(
                settings,
                clients=settings.cohort,
                views=views,
                faults=lambda r, cohort, gone=gone: (
                    [Drop(ClientId(2), gone[int(r)])] if int(r) in gone else []
                ),
            )
            for event in fed.run(5):
                log.append(event)
        write_truth(folder / TRUTH, fed.participants)
        write_box_key(folder / HELPER_KEY, fed.two_server)
        outcomes[absent] = found(folder)
    missing, moved = outcomes["allow"][ABSENT], outcomes["allow"][REKEYED]
    own = len(fed.participants[ClientId(2)].local.real["goods"])
    every = sum(len(p.local.real["goods"]) for p in fed.participants.values())
    # rounds 1, 2 and 4 are written with earlier keys; the client is not on the list of round 3
    assert missing.measured == pytest.approx(own / (2 * every + every - own))
    assert missing.verdict is Verdict.UNCLAIMED
    assert moved.measured == pytest.approx(own / every) and moved.verdict is Verdict.UNCLAIMED
    assert outcomes["refuse"][ABSENT].measured == 0.0
    assert outcomes["refuse"][ABSENT].verdict is Verdict.HOLDS
