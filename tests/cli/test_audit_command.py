"""`tessera audit` prints each attack beside its claim, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from audit import runs
from tessera.audit.finding import Finding
from tessera.cli.audit import audit, show
from tessera.errors import ConfigError
from tessera.runs.folder import TRUTH

app = typer.Typer()
app.command()(audit)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("audit") / "run"
    return runs.record(out, runs.plan_of(cohort=4, rows=80), 4, each=8, drops=0.3)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_json_is_one_object_with_every_attack(folder: Path) -> None:
    found = json.loads(run(str(folder), "--json"), parse_constant=pytest.fail)
    assert list(found) == ["attacks"]
    kinds = {attack["name"].split(":")[0].split(" ")[0] for attack in found["attacks"]}
    one_round = {"intersection", "late", "Event", "inference", "sole", "kept", "lone"}
    assert kinds == one_round | {"counts", "participation", "movement", "linked"}
    for attack in found["attacks"]:
        client = attack["name"].startswith("movement")
        assert attack["attacker"] == ("client" if client else "server")
        assert attack["verdict"] in {"within bound", "broken", "untested", "no claim"}
        assert attack["rounds"] == 4
        assert attack["meaning"]
        assert {"measured", "low", "high", "claimed", "trials", "chance"} <= attack.keys()
        assert attack["level"] > 0.999, "corrected for the number of claims"


def test_the_table_fits_80_columns_and_cuts_nothing(folder: Path) -> None:
    text = run(str(folder))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert "within bound" in text and "4 recorded rounds, by the server and one client" in text
    text = " ".join(text.split())
    assert "counts against answers: a row's counts" in text and "Chance: a random guess" in text
    assert "Claimed is what follows from the answers alone; with the sums B = 1, identified" in text


def test_a_broken_claim_is_called_broken(capsys: pytest.CaptureFixture[str]) -> None:
    found = Finding(
        name="an attack", measured=0.5, low=0.4, high=0.6, claimed=0.1, trials=9, meaning="why"
    )
    show([found])
    text = capsys.readouterr().out
    assert "broken" in text and "50.0% (40.0-60.0)" in text and "an attack: why" in text


def test_nothing_to_try_is_not_called_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    show([Finding(name="x", measured=0.0, low=0.0, high=1.0, claimed=0.0, trials=0, meaning="")])
    assert "untested" in capsys.readouterr().out


def test_a_client_that_the_truth_does_not_know_is_an_error(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    for path in folder.rglob("*"):
        if path.is_file():
            to = copy / path.relative_to(folder)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
    (copy / TRUTH).write_text("{}")
    with pytest.raises(ConfigError, match="does not know client") as caught:
        run(str(copy))
    assert caught.value.hint


def test_a_folder_that_is_no_run_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(str(tmp_path))
    assert caught.value.hint
