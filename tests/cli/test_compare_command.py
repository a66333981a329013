"""`tessera compare` puts runs side by side: a table that fits the terminal, a page, one object."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from report import folders
from tessera.cli.compare import compare
from tessera.errors import ConfigError

app = typer.Typer()
app.command()(compare)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [str(folder) for folder in folders.five(tmp_path_factory.mktemp("runs"))]


def run(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize("columns", [80, 130, 140, 200])
def test_the_table_fits_the_terminal_and_cuts_nothing(
    runs: list[str], tmp_path: Path, columns: int
) -> None:
    text = run(*runs, "--out", str(tmp_path / "page.html"), columns=columns)
    figures = [line for line in text.splitlines() if "The page" not in line]
    assert max(len(line.rstrip()) for line in figures) <= min(columns, 140)
    assert "…" not in text
    for name in ("AUC", "spent", "quorum", "dropped"):
        assert name in text
    lines = [" ".join(line.split()) for line in figures]
    learnt = "secure-submodel 50 0.744 0.746 −0.025 238 kB 146 kB"
    times, guarded = "137 ms 1.04 s", "yes 2.02 2.71 2.71 11.0% 6.0%"
    if columns >= 138:
        assert f"{learnt} {times} {guarded}" in lines
    else:
        each = (learnt, f"secure-submodel {times}", f"secure-submodel {guarded}")
        assert all(line in lines for line in each)
    assert "sum of means 0.769" in text and "cryptography on" in text


@pytest.mark.parametrize("columns", [80, 200])
def test_two_servers_have_columns_of_their_own(
    runs: list[str], tmp_path: Path, columns: int
) -> None:
    pair = folders.make(tmp_path / "pair", "two-server", every=10)
    out = tmp_path / "page.html"
    text = run(*runs, str(pair), "--out", str(out), columns=columns)
    figures = [line for line in text.splitlines() if "The page" not in line]
    assert max(len(line.rstrip()) for line in figures) <= min(columns, 158)
    lines = [" ".join(line.split()) for line in figures]
    costs = "1.00 s 160 kB"
    assert any(line.startswith("two-server") and costs in line for line in lines)
    assert any(line.startswith("fedavg") and "n/a n/a" in line for line in lines)
    page = out.read_text()
    assert "Time of the helper in one round" in page
    assert "keys of 91,000 bytes, not plain shares of 400,000" in page
    assert "One of the two servers" in page and "Two servers that collude" in page
    told = json.loads(run(str(pair), "--json", "--out", str(out)))["runs"][0]
    assert told["bytes_between"] == 160_000.0 and told["rounds_secure"] == 5
    assert told["helper_seconds"] == {"rows down": pytest.approx(0.4), "unmask": pytest.approx(0.6)}


def test_the_page_is_written_where_it_is_said(runs: list[str], tmp_path: Path) -> None:
    out = tmp_path / "deep" / "page.html"
    assert f"The page: {out}" in run(*runs, "--out", str(out)).replace("\n", "")
    HTMLParser().feed(out.read_text())
    assert "Five models were trained side by side" in out.read_text()


def test_without_a_name_the_page_is_in_this_folder(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(*runs)
    assert (tmp_path / "compare.html").is_file()


def test_json_is_one_object_with_every_run(runs: list[str], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    found = json.loads(run(*runs, "--json", "--out", str(out)), parse_constant=pytest.fail)
    assert found["task"] == "movielens-1m" and found["metric"] == "AUC"
    assert found["trivial"] == pytest.approx(folders.TRIVIAL)
    assert found["page"] == str(out)
    assert [r["scheme"] for r in found["runs"]] == list(folders.SCHEMES)
    secure = found["runs"][-1]
    assert secure["rounds"] == 50 and secure["rounds_secure"] == 5 and secure["cohort"] == 100
    assert secure["bytes_up"]["update"] == 133_000.0
    assert secure["epsilon_once"] == pytest.approx(math.log(226 / 30))  # p5 = 226/256, p6 = 30/256
    assert secure["epsilon_ever"] == pytest.approx(math.log(15))
    assert secure["ahead_of_trivial"] == pytest.approx(secure["final"] - 0.769)
    central = found["runs"][0]
    assert central["bytes_up"] is None and central["dropouts"] is None


def test_an_infinite_level_is_a_string_in_json_and_a_word_in_the_table(tmp_path: Path) -> None:
    open_book = {"p1": 1.0, "p2": 0.0, "p3": 1.0, "p4": 0.0}
    folder = folders.make(tmp_path / "a", changes={"level": "cpp1", "index_privacy": open_book})
    out = str(tmp_path / "page.html")
    found = json.loads(run(str(folder), "--json", "--out", out), parse_constant=pytest.fail)
    assert found["runs"][0]["epsilon_once"] == found["runs"][0]["epsilon_ever"] == "inf"
    assert "infinite" in run(str(folder), "--out", out)


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path) -> None:
    named = [
        folders.make(tmp_path / f"r{i}", changes={"name": f"[red]run[/] {i}"}) for i in range(2)
    ]
    text = run(*map(str, named), "--out", str(tmp_path / "page.html"))
    assert "[red]run[/] 0" in text and "[red]run[/] 1" in text


def test_test_entropy_is_said_in_the_terminal_too(tmp_path: Path) -> None:
    folder = folders.make(tmp_path / "a", changes={"entropy": "insecure test entropy"})
    assert "Insecure test entropy." in run(str(folder), "--out", str(tmp_path / "page.html"))


def test_runs_of_two_tasks_are_refused_and_nothing_is_written(
    runs: list[str], tmp_path: Path
) -> None:
    other = folders.make(tmp_path / "other", changes={"task": {"name": "amazon"}})
    with pytest.raises(ConfigError, match="different data: movielens-1m") as error:
        run(runs[0], str(other), "--out", str(tmp_path / "page.html"))
    assert error.value.hint
    assert not (tmp_path / "page.html").exists()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no plan\.toml"):
        run(str(tmp_path), "--out", str(tmp_path / "page.html"))


def test_a_section_that_a_plan_lacks_is_one_line(tmp_path: Path) -> None:
    plain = folders.make(tmp_path / "plain", "secure-fedavg", every=10)
    noisy = folders.make(tmp_path / "noisy", "secure-fedavg", every=10)
    plan = noisy / "plan.toml"
    plan.write_text(f'{plan.read_text()}\n[dp]\nunit = "user"\nepsilon = 3.0\ntrust = "server"\n')
    text = run(str(plain), str(noisy), "--out", str(tmp_path / "page.html"))
    assert "Differs: [dp], a section that is not in the plan of plain" in text
    assert "dp.unit" not in text
