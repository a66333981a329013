"""`tessera explain` runs a real round and tells the truth about it, for people and machines."""

from __future__ import annotations

import json

import pytest

from tessera.cli import main as cli
from tessera.cli.explain import GENRES
from tessera.simulation import views


def test_it_opens_the_exact_sum_and_says_who_dropped_out(capsys):
    assert cli.main(["explain"]) == 0
    out = capsys.readouterr().out
    assert "equal, to the last minute" in out
    assert "NOT EQUAL" not in out
    assert "client 1" in out
    for genre in GENRES:
        assert genre in out


def test_for_machines_it_is_one_object(capsys):
    assert cli.main(["explain", "--json", "--clients", "9", "--drop", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["exact"] is True
    assert told["clients"] == 9
    assert len(told["survivors"][0]) == 8
    assert told["bytes_up"] > 1000
    assert [p["phase"] for p in told["phases"]][:3] == ["advertise", "share", "collect"]


def test_the_active_setting_adds_the_consistency_round(capsys):
    assert cli.main(["explain", "--active", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["exact"] is True
    assert [p["phase"] for p in told["phases"]].count("consistency") == 2


def test_too_many_dropouts_end_in_an_error_line_and_status_one(capsys):
    assert cli.main(["explain", "--drop", "8"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: round 1, ")
    assert "nothing is opened" in captured.out
    assert "the sum it opened" not in captured.out


@pytest.mark.parametrize("bad", [["--clients", "2"], ["--drop", "12"], ["--drop", "-1"]])
def test_bad_input_is_an_error_line_and_status_two(bad, capsys):
    assert cli.main(["explain", *bad]) == 2
    assert capsys.readouterr().err.startswith("error: explain: ")


def test_views_are_recorded_once_and_never_overwritten(tmp_path, capsys):
    folder = tmp_path / "views"
    assert cli.main(["explain", "--record-views", str(folder)]) == 0
    files = sorted(p.name for p in folder.iterdir())
    assert len(files) == 13
    seen = list(views.read(folder / "server.view.jsonl"))
    assert {"Advert", "MaskedInput", "RevealedShares"} <= {s.kind for s in seen}
    assert cli.main(["explain", "--record-views", str(folder)]) == 2
    assert "hint: " in capsys.readouterr().err
    assert sorted(p.name for p in folder.iterdir()) == files
