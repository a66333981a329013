"""The demo trains under every scheme and ends with a table and a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.cli import demo
from tessera.cli import main as cli
from tessera.rounds.plan import Scheme


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "SHOP", {"users": 30, "items": 120, "examples": 8, "history": 4})
    monkeypatch.setattr(demo, "COHORT", 6)
    monkeypatch.setattr(demo, "GROUP", 3)


def test_every_scheme_is_in_the_table_and_on_the_page(capsys):
    assert cli.main(["demo", "--rounds", "2"]) == 0
    captured = capsys.readouterr()
    page = Path("runs/demo/demo.html").read_text()
    for scheme in Scheme:
        assert f"{scheme.value} " in captured.out
        assert scheme.value in page
    assert "runs/demo/demo.html" in captured.out
    assert "2/2" in captured.err
    assert max(map(len, captured.out.splitlines()[:-1])) <= 80


def test_for_machines_it_is_one_object_and_a_second_demo_gets_its_own_folder(capsys):
    for folder in ("runs/demo", "runs/demo-2"):
        assert cli.main(["demo", "--rounds", "1", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["page"] == f"{folder}/demo.html"
        assert [run["scheme"] for run in told["runs"]] == [scheme.value for scheme in Scheme]


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    assert cli.main(["demo", "--out", "mine"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.main(["demo", "--rounds", "0"]) == 2
