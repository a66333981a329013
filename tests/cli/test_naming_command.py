"""How likely a holder is named: the field of `tessera privacy` and of `tessera plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.cli import main as cli
from tessera.plan import Scheme
from tessera.plan.reference import example_plan
from tessera.privacy.index.bound import ANY_ROUNDS, CONDITIONS

COHORT = ("--clients", "30", "--rows", "40")


def naming(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["naming"]
    return found


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--rounds", "12", "--cpp", "4"), 0.90),
        (("--rounds", "12", "--cpp", "3"), 0.79),
        (("--rounds", "12", "--cpp", "2"), 0.62),
        (("--rounds", "12", "--p1", "5/8", "--p2", "3/8", "--p3", "1", "--p4", "0"), 0.0),
        (("--rounds", "12", "--cpp", "4", "--period-rounds", "1"), 0.97),
        (("--rounds", "15", "--cpp", "4", "--population", "120"), 1.0),
    ],
    ids=["cpp4", "cpp3", "cpp2", "one stage", "new periods", "random cohorts"],
)
def test_the_attack_on_the_papers_setting(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: float
) -> None:
    found = naming(capsys, "privacy", *COHORT, *arguments)
    assert found["bound"] == {"server": 1.0, "one_client": 1.0}
    assert found["estimate"]["named"] == pytest.approx(named, abs=0.05)
    assert found["estimate"]["best_guess"] >= found["estimate"]["named"]
    if named:
        assert found["estimate"]["right_among_named"] > 0.99
        assert found["with_dropout"]["named"] >= found["estimate"]["named"]
    else:
        assert found["estimate"]["right_among_named"] is None


def test_cohorts_drawn_at_random_take_more_rounds_in_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn = ("--rounds", "15", "--cpp", "4", "--population", "120", "--dropout", "0")
    found = naming(capsys, "privacy", *COHORT, *drawn)
    assert found["settings"]["rounds"] == 60
    assert found["settings"]["rounds_per_client"] == 15
    assert found["with_dropout"] is None


def test_a_fixed_group_hides_a_holder_and_a_curious_member_sees_one_client_less(
    capsys: pytest.CaptureFixture[str],
) -> None:
    group = ("--group", "10", "--rounds", "200", "--colluders", "2", "--holders", "1=1")
    found = naming(capsys, "privacy", *COHORT, *group)
    assert found["bound"] == {"server": pytest.approx(1 / 8), "one_client": pytest.approx(1 / 7)}
    assert found["bound_mean"] == found["bound"]
    assert found["estimate"]["named"] == 0.0
    assert found["estimate"]["best_guess"] == pytest.approx(1 / 8, abs=0.06)


def test_epsilon_is_of_the_answers_and_stands_beside_what_is_left_given_the_sums(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["privacy", *COHORT, "--rounds", "12", "--cpp", "4"]) == 0
    sentence = " ".join(capsys.readouterr().out.split())
    assert "of the answers, per index, given the union and not the sums" in sentence
    assert "A row's holder can be identified (B = 100%); estimated after 12 rounds: 9" in sentence


def test_the_bound_of_a_group_stands_with_its_conditions_and_without_an_epsilon(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No answer of a member is randomised: there is no noise, and so no epsilon."""
    assert cli.main(["privacy", *COHORT, "--group", "10"]) == 0
    sentence = " ".join(capsys.readouterr().out.split())
    assert f"with at most 10% probability ({CONDITIONS}), {ANY_ROUNDS}" in sentence
    assert "psilon" not in sentence
    for each, expected in ((0, "10.0%"), (2, "12.5%"), (5, "20.0%")):
        assert f"at most (B), {each} members with the server {expected}" in sentence
    assert (
        "With 20% of all clients corrupt B is 0.125 on average, and 0.2 or more for 2%" in sentence
    )
    assert "With 30% of all clients corrupt B is 0.143 on average" in sentence
    assert cli.main(["privacy", *COHORT, "--group", "10", "--void", "2"]) == 0
    sentence = " ".join(capsys.readouterr().out.split())
    assert "0.2 or more for 5.9% of clients, after 2 void snapshots" in sentence


def test_a_late_dropout_at_cpp5_is_qualified(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["privacy", *COHORT, "--cpp", "5"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "in the first round of a period; 100% after one round without dropouts" in shown
    assert "psilon" not in shown
    assert cli.main(["privacy", *COHORT, "--cpp", "2"]) == 0
    assert "first round of a period" not in capsys.readouterr().out


def plan_file(folder: Path, scheme: Scheme, *changes: tuple[str, str]) -> str:
    text = example_plan(scheme)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "plan.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("scheme", [s for s in Scheme if s is not Scheme.CENTRAL])
def test_a_plan_says_how_likely_a_holder_is_named(
    scheme: Scheme, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, scheme)
    found = naming(
        capsys, "plan", path, "--rounds", "20", "--population", "80", "--rows-per-client", "60"
    )
    if not scheme.hides:
        assert found is None
        return
    settings = found["settings"]
    if not settings["group"]:
        assert found["bound"]["server"] == 1.0
        assert settings["population"] == 80 and settings["rounds_per_client"] == 20
        assert found["estimate"]["named"] > 0.9  # a quarter drawn each round


def test_a_plan_with_groups_is_bounded_by_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        'scheme = "secure-submodel"\ncohort = 20\n'
        '[[table]]\nname = "items"\nrows = 5000\nwidth = 8\n'
        "[groups]\nsize = 10\n[security]\ncorrupt = 1\n[union]\nmax_rows = 60\n"
    )
    found = naming(capsys, "plan", str(path), "--rounds", "20")
    assert found["bound"] == {"server": pytest.approx(1 / 9), "one_client": pytest.approx(1 / 8)}
    assert found["bound_mean"]["server"] > found["bound"]["server"]  # rows with several holders
    assert found["estimate"]["named"] == 0.0
    assert found["bound_by_corrupt"] == {str(c): pytest.approx(1 / (10 - c)) for c in (0, 1, 2, 5)}
    assert cli.main(["plan", str(path), "--rounds", "20"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "at most (B), 1 member with the server 11.1%" in shown
    assert "at most (B), 5 members with the server 20.0%" in shown
    assert CONDITIONS in shown and "psilon" not in shown


def test_a_population_below_the_cohort_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, Scheme.SECURE_FEDAVG)
    assert cli.main(["plan", path, "--population", "3"]) != 0
    assert "--population 3 is less than a cohort" in capsys.readouterr().err
