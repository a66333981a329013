"""`tessera privacy` prints the papers' table, finds probabilities, and refuses with a next step."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from tessera.cli.format import parse_holders
from tessera.cli.privacy import privacy
from tessera.errors import ConfigError
from tessera.privacy.index import identification_forecast

app = typer.Typer()
app.command()(privacy)

HOLDERS = "1=0.867,2=0.110,3=0.023"


@pytest.fixture(autouse=True)
def few_rows_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """How likely a holder is named has tests of its own (`test_naming_command.py`)."""
    monkeypatch.setattr(identification_forecast, "WORK", 1)
    monkeypatch.setattr(identification_forecast, "FEW_ROWS", 5)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def report(*arguments: str) -> dict:
    return json.loads(run(*arguments, "--json"), parse_constant=pytest.fail)


TABLE_3 = {
    1: (1.0, 0.0, "inf", "inf", 86.7, 0.0),
    2: (88.3, 11.7, 2.02, 2.71, 0.0, 10.3),
    3: (78.1, 21.9, 1.27, 1.95, 0.0, 19.5),
    4: (62.5, 37.5, 0.51, 1.10, 0.0, 34.2),
    5: (1.0, 1.0, 0.0, 0.0, 0.0, 0.0),
}


def printed(found: dict) -> tuple[float | str, ...]:
    """The figures as Table 3 of Niu et al. 2020 prints them: 1 for certainty, else per cent."""

    def share(value: float) -> float:
        return 1.0 if value == 1.0 else round(100 * value, 1)

    def level(value: float | str) -> float | str:
        return value if isinstance(value, str) else round(value, 2)

    return (
        share(found["p5"]),
        share(found["p6"]),
        level(found["epsilon_once"]),
        level(found["epsilon_longitudinal"]),
        share(found["p7"]),
        share(found["p8"]),
    )


@pytest.mark.parametrize("cpp", TABLE_3)
def test_the_papers_table_by_level_and_by_probabilities(cpp: int) -> None:
    cohort = ("--clients", "100", "--holders", HOLDERS)
    named = report("--cpp", str(cpp), *cohort)
    assert printed(named) == TABLE_3[cpp]
    given = [arg for p in ("p1", "p2", "p3", "p4") for arg in (f"--{p}", str(named[p]))]
    assert report(*given, *cohort) == named


def test_probabilities_may_be_fractions() -> None:
    found = report("--p1", "15/16", "--p2", "1/16", "--p3", "15/16", "--p4", "1/16")
    assert found == report("--cpp", "2")


def test_every_level_says_what_it_is_about() -> None:
    assert report("--cpp", "2")["scope"] == "per index, given the union"
    assert "per index, given the union" in run("--cpp", "2")


@pytest.mark.parametrize("arguments", [(), ("--cpp", "2"), ("--want-epsilon", "2")])
def test_the_table_fits_80_columns(arguments: tuple[str, ...]) -> None:
    text = run(*arguments)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "…" not in text


def test_without_a_choice_the_five_levels_stand_side_by_side() -> None:
    text = run()
    for figure in ("cpp1", "cpp5", "86.7%", "10.3%", "19.5%", "34.2%", "2.02", "2.71", "infinite"):
        assert figure in text
    assert set(report()["levels"]) == {"cpp1", "cpp2", "cpp3", "cpp4", "cpp5"}


def test_p7_stays_the_papers_whatever_the_quorum_and_the_quorum_has_its_own() -> None:
    found = report("--cpp", "1", "--min-group", "2", "--dropout", "0")
    assert found["p7"] == pytest.approx(0.867)
    assert found["quorum"]["event_1"] == 0.0
    assert found["quorum"]["missed"] == pytest.approx(0.867)


def test_the_way_back_keeps_level_and_traffic() -> None:
    found = report("--want-epsilon", "2.5", "--want-epsilon-once", "1.5", "--max-rows-factor", "9")
    assert found["epsilon_longitudinal"] == pytest.approx(2.5)
    assert found["epsilon_once"] == pytest.approx(1.5)
    assert found["rows"]["revealed"] == pytest.approx(9 * 301)
    again = [arg for p in ("p1", "p2", "p3", "p4") for arg in (f"--{p}", repr(found[p]))]
    assert report(*again) == found


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--cpp", "6"], "cpp6"),
        (["--cpp", "2", "--p1", "0.5"], "--cpp 2 and --p1"),
        (["--p1", "0.5", "--p3", "1"], "--p2, --p4 missing"),
        (["--p1", "1.5", "--p2", "0", "--p3", "1", "--p4", "0"], "p1 = 1.5"),
        (["--p1", "x", "--p2", "0", "--p3", "1", "--p4", "0"], "p1 = 'x'"),
        (["--p1", "1/0", "--p2", "0", "--p3", "1", "--p4", "0"], "p1 = '1/0'"),
        (["--p1", "0", "--p2", "0", "--p3", "1", "--p4", "0"], "p5 = 0"),
        (["--holders", "1=0.5"], "sum to 0.5"),
        (["--holders", "one=1"], "'one=1'"),
        (["--holders", "1=0.5,1=0.5"], "'1=0.5'"),
        (["--holders", "1=x"], "share of 1"),
        (["--clients", "2"], "3 holders among 2"),
        (["--max-rows-factor", "3"], "need --want-epsilon"),
        (["--want-epsilon", "2", "--cpp", "2"], "--want-epsilon 2.0"),
        (["--want-epsilon", "2", "--want-epsilon-once", "3"], "above 2.0"),
        (["--rounds", "0"], "rounds = 0"),
        (["--rows", "0"], "rows = 0"),
        (["--colluders", "100"], "colluders = 100"),
        (["--population", "99"], "--population 99"),
        (["--period-rounds", "-1"], "--period-rounds -1"),
        (["--group", "1"], "--group 1"),
        (["--group", "101"], "--group 101"),
        (["--group", "10", "--cpp", "4"], "everybody names the whole union"),
        (["--void", "2"], "--void 2 without --group"),
    ],
)
def test_bad_input_names_the_field_and_the_value_and_prints_nothing(
    arguments: list[str], reason: str
) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert reason in str(result.exception)
    assert result.exception.hint is not None
    assert result.stdout == ""


def test_between_two_servers_there_is_no_epsilon_and_it_says_what_is_released() -> None:
    found = report("--scheme", "two-server")
    assert found["epsilon"] is None and "no index privacy applies" in found["why"]
    assert "exact update, without its name" in found["released"]
    assert any("collude" in point for point in found["not_covered"])
    text = CliRunner().invoke(app, ["--scheme", "two-server"]).stdout
    assert max(map(len, map(str.rstrip, text.splitlines()))) <= 80
    assert "Who must be honest" in text
    assert report("--scheme", "fedavg")["epsilon"] is None
    result = CliRunner().invoke(app, ["--scheme", "three-server"])
    assert isinstance(result.exception, ConfigError) and result.exception.hint


@pytest.mark.parametrize("option", [["--cpp", "2"], ["--clients", "100"], ["--want-epsilon", "2"]])
def test_where_nothing_is_randomised_options_about_it_are_refused(option: list[str]) -> None:
    result = CliRunner().invoke(app, ["--scheme", "two-server", *option])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"{option[0]} is about randomised sets")
    assert result.exception.hint is not None and result.stdout == ""
    assert CliRunner().invoke(app, option).exit_code == 0


def test_holders_may_have_spaces() -> None:
    assert parse_holders("1 = 3/4, 2 = 0.25").mean == pytest.approx(1.25)
