"""`tessera mask-bound` prints the bound with its assumptions, and refuses with a next step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tessera.cli import main as cli
from tessera.privacy.masks import epsilon_of, samples_needed


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["mask-bound", *arguments]) == 0
    return capsys.readouterr().out


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    text = told(capsys, *arguments, "--json")
    return dict(json.loads(text, parse_constant=pytest.fail))


def test_the_figures_are_those_of_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    result = found(
        capsys,
        *("--ratings", "4000", "--epsilon", "0.2", "--delta", "0.1", "--parameters", "3"),
        *("--bits", "8"),
    )
    assert result["log2_hypotheses"] == 24
    assert result["samples_needed"] == samples_needed(0.2, 0.1, 2**24)
    assert result["epsilon_of_ratings"] == pytest.approx(epsilon_of(4000, 0.1, 2**24))
    assert result["promises"] is True
    assert abs(2 * result["samples_as_printed"] - result["samples_needed"]) <= 1
    assert len(result["assumptions"]) == 4
    assert "statement on learning" in result["meaning"]


def test_a_usual_client_is_promised_nothing_and_is_told_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert found(capsys)["promises"] is False
    assert found(capsys, "--ratings", "0")["epsilon_of_ratings"] == "inf"
    text = told(capsys)
    assert "an empty bound" in text
    assert "an empty bound" not in told(capsys, "--ratings", "1000000")


def test_the_assumptions_stand_beside_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys)
    for part in ("finite class", "i.i.d. ratings", "loss in [0, 1]", "exact minimiser", "23"):
        assert part in text
    assert "says nothing on what the masked ratings" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--delta", "0"), "delta"),
        (("--epsilon", "0"), "epsilon"),
        (("--ratings", "-1"), "ratings"),
        (("--parameters", "0"), "parameters"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["mask-bound", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ") and said in lines[0]
    assert lines[1].startswith("hint: ")
