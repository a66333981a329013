"""One of two servers cannot tell a client's rows from others, and both together can."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rounds.population import federation, plan
from tessera.audit import pair
from tessera.audit.finding import Finding, Verdict
from tessera.audit.record import Record
from tessera.audit.suite import report
from tessera.crypto import dpf
from tessera.crypto.secret import Secret
from tessera.engines.federation import random_dropouts, write_truth
from tessera.engines.pair import write_box_key
from tessera.engines.runlog import HELPER_KEY, TRUTH, VIEWS, RunLog
from tessera.engines.views import StreamedViews
from tessera.ids import HELPER, SERVER
from tessera.interfaces import cli
from tessera.rounds.plan import TwoServerPlan

READ = "rows fetched: a real row told from another, by the {}"
WRITTEN = "rows written: a real row told from another, by the {}"
ALONE = "sole writer: a row opens as one client's update"
NAMED = "sole writer: the client is named, by the {}"


def recorded(folder: Path, rounds: int = 4, **way) -> Path:
    settings = plan("two-server", two_server=TwoServerPlan(**way), union={"max_rows": 20})
    log = RunLog.create(folder, settings)
    with StreamedViews(folder / VIEWS, [SERVER, HELPER]) as views:
        fed = federation(
            settings, clients=12, views=views, faults=random_dropouts(0.1, 1, settings)
        )
        for event in fed.run(rounds):
            log.append(event)
    write_truth(folder / TRUTH, fed.members)
    assert fed.pair is not None
    write_box_key(folder / HELPER_KEY, fed.pair)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("pair") / "run", write="dpf")


def found(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in report(Record.open(folder)).findings}


def test_a_server_alone_guesses(folder):
    outcome = found(folder)
    assert all(finding.verdict is Verdict.HOLDS for finding in outcome.values())
    assert all(finding.rounds == 4 for finding in outcome.values())
    for kind in (READ, WRITTEN):
        for whose in ("leader", "helper"):
            finding = outcome[kind.format(whose)]
            assert finding.agrees and finding.claimed == 0.5 and finding.trials > 250
            assert finding.attacker == (SERVER if whose == "leader" else HELPER)


def test_rows_of_one_writer_are_counted_and_nameless(folder):
    """The truth, counted once more from who was in the sums."""
    outcome = found(folder)
    record = Record.open(folder)
    alone = rows = 0
    for round_id, seen in record.seen():
        view = pair.pair_round(record.plan, round_id, seen)
        assert view is not None and view.opened is not None
        written = np.concatenate([record.truth[c] for c in view.included])
        ids, counts = np.unique(written, return_counts=True)
        alone, rows = alone + int((counts == 1).sum()), rows + len(ids)
    assert outcome[ALONE].measured == alone / rows and 0.1 < alone / rows < 0.9
    assert outcome[ALONE].trials == rows
    for whose in ("leader", "helper"):
        named = outcome[NAMED.format(whose)]
        assert named.agrees and 1 / 8 <= named.claimed <= 1 / 6 and named.trials == alone


def test_two_servers_together_read_every_row(folder, monkeypatch):
    """The same attack with both shares: it can win, so that failing means something."""
    kept = {}

    def together(layout, public, seed, subject, table, whose, rows):
        keys = dpf.ServerKeys.of(
            public, Secret(seed), party=pair.PARTIES[whose], report_id=subject.table_id(table)
        )
        bins, places = layout.table.chosen[rows], layout.table.positions[rows]
        values = dpf.evaluate_points(keys, bins.reshape(-1), places.reshape(-1))
        if whose == SERVER:
            kept["share"] = values
            return np.zeros(len(rows))
        group = layout.forest.values.group
        both = kept["share"] ^ values if group is None else group.add(kept["share"], values)
        return (both.reshape(len(rows), -1) != 0).mean(axis=1)

    monkeypatch.setattr(pair, "_share", together)
    outcome = found(folder)
    for name in (READ, WRITTEN, NAMED):
        finding = outcome[name.format("helper")]
        most = 0.75 if name == READ else 0.9  # keys that nobody needs point somewhere, too
        assert finding.verdict is Verdict.BROKEN and finding.measured > most
        assert outcome[name.format("leader")].verdict is Verdict.HOLDS


@pytest.mark.parametrize("way", [{"write": "dense"}, {"domain": "union", "write": "dpf"}], ids=str)
def test_plain_shares_and_unions_are_audited_too(tmp_path, way):
    outcome = found(recorded(tmp_path / "run", 2, **way))
    assert all(finding.verdict is not Verdict.BROKEN for finding in outcome.values())
    assert outcome[WRITTEN.format("leader")].trials > 100
    dense = "domain" not in way
    assert (outcome[WRITTEN.format("helper")].verdict is Verdict.UNTESTED) == dense


def test_without_its_key_the_helpers_part_is_left_out(tmp_path, folder):
    (folder / HELPER_KEY).rename(tmp_path / "key")
    try:
        outcome = found(folder)
    finally:
        (tmp_path / "key").rename(folder / HELPER_KEY)
    assert outcome[READ.format("helper")].verdict is Verdict.UNTESTED
    assert outcome[READ.format("leader")].verdict is Verdict.HOLDS
    assert NAMED.format("helper") not in outcome


def test_the_command_tells_it(folder, capsys):
    assert cli.main(["audit", str(folder), "--json"]) == 0
    attacks = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["attacks"]
    assert {attack["attacker"] for attack in attacks} == {SERVER, HELPER}
    assert cli.main(["audit", str(folder)]) == 0
    text = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80 and "…" not in text
