"""A recorded view replays to what the server opened, whatever went wrong, and is checked first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from audit import runs
from tessera.audit.record import Record
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError, MisuseError
from tessera.ids import SERVER, ClientId
from tessera.learning.tables.table import LazyTable, TableSpec
from tessera.plan import Plan, Scheme
from tessera.privacy.index.period import MemoryPeriods
from tessera.rounds.party import LocalState
from tessera.runs.folder import TRUTH, VIEWS, RunFolder
from tessera.runs.truth import write_truth
from tessera.simulation.faults import Corrupt, Delay, Drop, Duplicate, Fault
from tessera.simulation.federation import Federation
from tessera.simulation.subcohort import Participant, one_by_one
from tessera.simulation.views import StreamedViews, Views


def federation(plan: Plan, views: Views, script) -> Federation:
    members = {
        ClientId(i): Participant(LocalState(real={"goods": real}, periods=MemoryPeriods()))
        for i, real in enumerate(runs.uniform_sets(plan, plan.cohort, 10, 0))
    }
    table = TableSpec(name="goods", size=plan.table("goods").rows, width=runs.WIDTH)
    return Federation(
        plan,
        members,
        dense=np.zeros(0, np.float32),
        tables={"goods": LazyTable(table)},
        trainer=one_by_one(dict.fromkeys(members, runs.train)),
        entropy=ScriptedEntropy(b"replay"),
        faults=lambda round_id, cohort: script,
        views=views,
    )


@pytest.mark.parametrize(
    ("faults", "union", "update"),
    [
        ([], 6, 6),
        ([Drop(ClientId(2), "advertise")], 5, 5),
        ([Drop(ClientId(2), "share")], 5, 5),
        ([Drop(ClientId(2), "collect")], 5, 5),
        ([Drop(ClientId(2), "unmask")], 6, 5),
        ([Drop(ClientId(2), "reveal")], 6, 5),
        ([Drop(ClientId(2), "collect", stage=1)], 6, 5),
        ([Drop(ClientId(2), "unmask", stage=1)], 6, 6),
        ([Delay(ClientId(1), "reveal", 30.0)], 6, 5),
        ([Duplicate(ClientId(1), "collect")], 6, 6),
        ([Corrupt(ClientId(1), "collect", offset=20)], 5, 5),
        ([Drop(ClientId(c), "collect", stage=1) for c in (0, 1, 2, 3)], 6, 0),
        ([Drop(ClientId(c), "collect") for c in (0, 1, 2, 3)], 0, 0),
    ],
)
def test_a_replayed_round_is_the_round_as_the_server_had_it(
    tmp_path: Path, faults: list[Fault], union: int, update: int
) -> None:
    plan, views = runs.plan_of(rows=100), Views()
    ran = federation(plan, views, faults)
    RunFolder.create(tmp_path, plan)
    write_truth(tmp_path / TRUTH, ran.participants)
    for _ in ran.run(2):
        server = ran.last
    views.write(tmp_path / VIEWS)
    *_, view = Record.load(tmp_path).rounds()
    assert view.round_id == server.round_id
    assert (len(view.in_union), len(view.survivors)) == (union, update)
    assert view.finished == (server.phase == "done")
    if union:
        assert view.union.tolist() == server.union["goods"].tolist()
    if update:
        assert view.opened.tolist() == server.result.tables["goods"].ids.tolist()
        assert view.counts.tolist() == server.result.tables["goods"].counts.tolist()
        assert (view.sums[1].tables[0].words == server.sums[1].tables[0].words).all()


def test_streamed_views_are_the_same_files(tmp_path: Path) -> None:
    plan, kept = runs.plan_of(rows=50), Views()
    for _ in federation(plan, kept, []).run(1):
        pass
    with StreamedViews(tmp_path / "streamed", [SERVER, 3]) as streamed:
        for _ in federation(plan, streamed, []).run(1):
            pass
    kept.write(tmp_path / "kept")
    written = sorted(path.name for path in (tmp_path / "streamed").iterdir())
    assert written == ["client-3.view.jsonl", "server.view.jsonl"]
    for name in written:
        path = tmp_path / "streamed" / name
        assert path.read_text() == (tmp_path / "kept" / name).read_text()
        assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(MisuseError):
        streamed.write(tmp_path / "again")
    with pytest.raises(ConfigError, match="already"):
        StreamedViews(tmp_path / "streamed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return runs.record(tmp_path / "run", runs.plan_of(rows=60, cohort=4), 1, each=5)


def refused(folder: Path, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        list(Record.load(folder).rounds())
    assert caught.value.hint


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "not a run's folder")


def test_a_run_without_views_or_truth_is_refused(folder: Path) -> None:
    (folder / TRUTH).rename(folder / "elsewhere")
    refused(folder, "no truth")
    (folder / VIEWS / "server.view.jsonl").unlink()
    refused(folder, "no recorded views")


def test_a_scheme_that_hides_nothing_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, replace(runs.plan_of(), scheme=Scheme.FEDAVG))
    refused(tmp_path, "fedavg")


@pytest.mark.parametrize("text", ["[", '{"a": {}}', '{"1": {"books": [1]}}', "[1]"])
def test_a_truth_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / TRUTH).write_text(text)
    refused(folder, "not real rows")


@pytest.mark.parametrize("line", ["{", "{}", json.dumps({"time": 1})])
def test_a_view_that_is_cut_off_is_refused(folder: Path, line: str) -> None:
    with (folder / VIEWS / "server.view.jsonl").open("a") as file:
        file.write(line)
    refused(folder, "cut off")
