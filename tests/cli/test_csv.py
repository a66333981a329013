"""`--csv`: the figures of a table as a file, or alone on stdout."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tessera.cli import main as cli

PLAN = """
scheme = "submodel"
cohort = 4
[task]
name = "taobao-like"
users = 12
items = 60
examples = 20
history = 4
size = "tiny"
width = 2
[simulation]
rounds = 1
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(PLAN)


def records(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_seeds_ranks_and_comparisons_as_csv(capsys):
    train = ["run", "plan.toml", "--seeds", "3,5", "--trainer", "sequential"]
    assert cli.main([*train, "--out", "runs", "--csv", "seeds.csv"]) == 0
    assert "standard deviation" in capsys.readouterr().out
    seeds = records(Path("seeds.csv").read_text())
    assert [one["seed"] for one in seeds] == ["3", "5"]
    assert all(0.0 <= float(one["AUC"]) <= 1.0 for one in seeds)
    for command, column, first in (
        (["rank", seeds[0]["folder"]], "predictor", "model"),
        (["compare", *(one["folder"] for one in seeds)], "label", "seed-3"),
    ):
        assert cli.main([*command, "--csv", "-"]) == 0
        found = records(capsys.readouterr().out)  # nothing else is on stdout
        assert first in found[0][column]
        assert cli.main([*command, "--csv", f"{command[0]}.csv"]) == 0
        assert records(Path(f"{command[0]}.csv").read_text()) == found
        capsys.readouterr()
    assert not Path("-").exists()


def test_all_schemes_as_csv(capsys):
    assert cli.main(["plan", "plan.toml", "--all-schemes", "--csv", "-"]) == 0
    found = {one["scheme"]: one for one in records(capsys.readouterr().out)}
    assert next(iter(found)) == "central" and found["central"]["bytes_up"] == ""
    assert float(found["submodel"]["bytes_up"]) < float(found["fedavg"]["bytes_up"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "plan.toml", "--csv", "x.csv"], "--csv is for a table of schemes"),
        (["run", "plan.toml", "--csv", "x.csv"], "--csv is for the figures of several seeds"),
        (["run", "plan.toml", "--seeds", "1,2", "--csv", "plan.toml"], "is there already"),
        (["run", "plan.toml", "--seeds", "1,2", "--csv", "no/x.csv"], "no: no such folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_first_round(
    arguments, message, capsys
):
    assert cli.main([*arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists() and Path("plan.toml").read_text() == PLAN


def test_seeds_with_noise_print_the_number_of_all_runs_together(capsys):
    text = Path("plan.toml").read_text() + NOISE
    Path("noisy.toml").write_text(text)
    train = ["run", "noisy.toml", "--seeds", "1,2,3", "--trainer", "sequential"]
    assert cli.main([*train, "--out", "noisy"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "together they have spent epsilon 5.656, delta 1e-05 per user" in printed
    assert "Choosing the best of them by exact figures is not in it." in printed
    assert "AUC: simulation only, not charged" in printed
    assert cli.main([*train, "--out", "again", "--csv", "noisy.csv"]) == 0
    assert records(Path("noisy.csv").read_text())[0]["AUC"] == ""  # withheld
    assert cli.main([*train, "--out", "exact", "--csv", "exact.csv", "--exact"]) == 0
    assert "AUC (simulation only, not charged)" in records(Path("exact.csv").read_text())[0]
    run = "noisy/seed-1"
    recommend = ["recommend", run, "--client", "1"]
    for command, more in ((["rank", run], ["--exact"]), (recommend, [])):
        capsys.readouterr()
        assert cli.main(command) == 0
        assert "simulation only, not charged" in capsys.readouterr().out
        assert cli.main([*command, *more, "--json"]) == 0
        assert "simulation only, not charged" in json.loads(capsys.readouterr().out)
    assert cli.main(["export", run, "--with-local"]) == 2
    assert "hint: export without them" in capsys.readouterr().err


NOISE = """
[dp]
unit = "user"
trust = "server"
epsilon = 3.0
delta = 1e-5
"""
