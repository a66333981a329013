"""`tessera privacy dp` prints what the ledger says, and refuses what says nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tessera.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["privacy", "dp", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    return found


def cell(found: dict[str, Any], unit: str, against: str) -> dict[str, Any]:
    (one,) = (c for c in found["guarantees"] if (c["unit"], c["against"]) == (unit, against))
    return one


PERSON = ("--unit", "subject", "--rate", "0.01", "--delta", "1e-5", "--scheme", "secure-fedavg")


def test_an_items_epsilon_and_what_it_is_for_a_person_with_ten(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(
        capsys, "--noise", "1.5", "--rounds", "1000", "--rate", "0.01", "--records", "10"
    )
    assert cell(found, "item", "leader")["epsilon"] == pytest.approx(1.0598, rel=1e-3)
    assert cell(found, "subject", "leader")["epsilon"] > 14.35
    assert cell(found, "item", "leader")["condition"] == "given the union"
    refused = cell(found, "user", "leader")
    assert refused["epsilon"] is None
    assert "about one item" in refused["why"]
    assert found["found"] == "epsilon"


def test_noise_from_a_budget_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, *PERSON, "--epsilon", "4", "--rounds", "1000")
    assert found["found"] == "noise"
    assert found["noise"] == pytest.approx(0.735, rel=2e-3)
    noise = str(found["noise"])
    back = report(capsys, *PERSON, "--noise", noise, "--rounds", "1000")
    assert 3.99 < cell(back, "subject", "readers of the model")["epsilon"] <= 4.0
    lasts = report(capsys, *PERSON, "--noise", noise, "--epsilon", "4")
    assert lasts["found"] == "rounds"
    assert 1000 <= lasts["rounds"] <= 1001


def test_several_clients_stand_beside_what_one_would_claim(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = (*PERSON, "--noise", "0.735", "--rounds", "1000", "--clients", "3")
    found = report(capsys, *asked)
    person = cell(found, "subject", "leader")
    assert person["epsilon"] == pytest.approx(6.6, abs=0.05)
    assert person["assumption"] == "if at most 3 clients hold a person"
    assert found["by_one_client_alone"] == pytest.approx(4.0, abs=0.01)
    _, out, _ = run(capsys, *asked)
    assert "by one client's steps alone it would be 4.00" in out
    assert "if at most 3 clients hold a person" in out


def test_a_trusted_server_and_its_helper_have_no_number_against_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("--unit", "user", "--trust", "server", "--scheme", "two-server")
    found = report(capsys, *asked, "--epsilon", "3", "--rounds", "10")
    assert cell(found, "user", "leader")["epsilon"] == "inf"
    assert cell(found, "user", "helper")["epsilon"] == "inf"
    assert cell(found, "user", "other clients")["epsilon"] == pytest.approx(3.0, abs=0.01)
    assert found["contributions_over_noise"] == pytest.approx(found["noise"] * (301 * 18) ** 0.5)
    _, out, _ = run(capsys, *asked, "--epsilon", "3", "--rounds", "10")
    assert "infinite: sees it without noise" in out


def test_an_interaction_stands_beside_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--noise", "3", "--rounds", "1000", "--rate", "0.01", "--history", "3")
    found = report(capsys, *asked)
    assert found["interaction"]["examples"] == 4
    example = cell(found, "item", "leader")["epsilon"]
    assert found["interaction"]["epsilon"]["leader"] > 2.0 * example
    _, out, _ = run(capsys, *asked)
    assert "an interaction is in up to 4 examples" in out


ITEM_PLAN = """
scheme = "submodel"
cohort = 5
[dp]
unit = "item"
noise = 3.0
trust = "local"
sampling = 0.01
[task]
name = "taobao-like"
{model}
"""


@pytest.mark.parametrize(
    ("model", "holds"), [("", False), ('model = "personal"', False), ('model = "biased"', True)]
)
def test_no_number_per_interaction_where_a_click_rate_is_made_of_all(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, holds: bool
) -> None:
    """The model that a task has if nothing is said is one with a click rate."""
    path = tmp_path / "plan.toml"
    path.write_text(ITEM_PLAN.format(model=model))
    asked = (str(path), "--rounds", "10", "--history", "3")
    found = report(capsys, *asked)["interaction"]
    _, out, _ = run(capsys, *asked)
    if holds:
        assert found["epsilon"]["leader"] > 0.0 and "reason" not in found
        assert "an interaction is in up to 4 examples" in out
    else:
        assert found["epsilon"] is None and "click rate" in found["reason"]
        assert "per interaction: none, since model 'personal'" in out
        assert "an interaction is in up to" not in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--noise", "1.5", "--rounds", "10"),
        ("--unit", "user", "--epsilon", "3", "--rounds", "10", "--scheme", "two-server"),
        (*PERSON, "--noise", "2", "--rounds", "10", "--clients", "12", "--records", "5"),
    ],
)
def test_the_page_fits_80_columns(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80


def test_a_delta_that_one_published_person_would_keep_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("--noise", "3", "--rounds", "1", "--delta", "1e-5", "--json", "--subjects")
    status, _, err = run(capsys, *asked, "100000")
    assert status == 2 and err.startswith("error: delta 1e-05") and "hint: " in err
    _, out, err = run(capsys, *asked, "99999")
    assert not err
    assert json.loads(out)["warnings"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--noise", "1"), "1 of --noise"),
        (("--noise", "1", "--epsilon", "1", "--rounds", "1"), "3 of --noise"),
        (("--noise", "1", "--rounds", "0"), "--rounds 0"),
        (("--epsilon", "-1", "--rounds", "1"), "--epsilon -1"),
        (("--noise", "0.01", "--epsilon", "1"), "in the first round"),
        (("--noise", "1", "--rounds", "1", "--unit", "family"), "--unit family"),
        (("--noise", "1", "--rounds", "1", "--unit", "index"), 'unit = "index"'),
        (("--noise", "1", "--rounds", "1", "--sampling", "shuffled"), "--sampling shuffled"),
        (("--noise", "1", "--rounds", "1", "--trust", "nobody"), "--trust nobody"),
        (("--noise", "1", "--rounds", "1", "--scheme", "central"), "no rounds"),
        (("--noise", "1", "--rounds", "1", "--subjects", "-1"), "--subjects -1"),
        (("--noise", "1", "--rounds", "1", "--delta", "0"), "delta = 0"),
        (("--noise", "1", "--rounds", "1", "--rate", "0"), "rate"),
        (("--noise", "1", "--rounds", "1", "--unit", "user", "--history", "3"), "--history 3"),
    ],
)
def test_bad_input_is_an_error_and_a_hint_and_prints_nothing(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert not out
    error, hint = err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert hint.startswith("hint: ")


def test_without_the_library_the_extra_is_named() -> None:
    code = "import sys; sys.modules['dp_accounting'] = None\n" + (
        "from tessera.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    asked = [sys.executable, "-c", code, "privacy", "dp", "--noise", "1", "--rounds", "1"]
    asked += ["--rate", "0.1"]  # a sample; without one there is a formula
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert told.stderr.startswith("error: privacy accounting needs dp-accounting")
    assert "hint: pip install 'tessera-fl[dp]'" in told.stderr


def test_plain_privacy_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["privacy", "--cpp", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert round(found["epsilon_longitudinal"], 2) == 2.71
    assert main(["privacy", "dq"]) == 2


USER = ("--unit", "user", "--trust", "server", "--scheme", "fedavg", "--delta", "1e-5")
ROUNDS = ("--epsilon", "3", "--rounds", "3", "--rows", "130", "--width", "1")


def test_trusts_stand_beside_each_other_at_one_budget(capsys: pytest.CaptureFixture[str]) -> None:
    options = (*USER, *ROUNDS, "--catalogue", "3883", "--cohort", "100")
    found = {one["trust"]: one for one in report(capsys, *options)["choices"]}
    noise = {trust: one["noise_in_sum"] for trust, one in found.items()}
    assert noise["server"] < noise["shares"] < noise["each"] < noise["local"]
    assert noise["each"] == pytest.approx(2**0.5 * noise["server"])
    assert noise["local"] == pytest.approx(10.0 * noise["server"])
    assert found["server"]["clients_for_a_row"] == pytest.approx(noise["server"] * 130**0.5)
    assert all(one["bytes_up"] > 0 and one["refused"] is None for one in found.values())
    corrupt = report(capsys, *options, "--corrupt", "99")["choices"]
    assert "nobody is left" in corrupt[1]["refused"] and corrupt[0]["refused"] is None
    status, out, _ = run(capsys, *options)
    assert status == 0 and "who adds the noise" in out and "popular ones are learnt" in out


def test_selecting_rows_has_its_share_of_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    bare = report(capsys, *USER, *ROUNDS)["noise"]
    found = report(capsys, *USER, *ROUNDS, "--selection", "0.1")["noise"]
    assert found == pytest.approx(bare / 0.9**0.5, rel=1e-3)
    status, _, err = run(capsys, *USER, *ROUNDS, "--selection", "1.5")
    assert status == 2 and "between 0 and 1" in err
    status, _, err = run(capsys, *USER, "--catalogue", "5", *ROUNDS, "--unit", "item")
    assert status == 2


SECRET_PLAN = """
scheme = "{scheme}"
cohort = 604
[[table]]
name = "items"
rows = 500
width = 1
[update]
average = "examples"
[simulation]
rounds = 20
[dp]
unit = "user"
epsilon = 3.0
delta = 1e-5
trust = "{trust}"
{cohorts}
"""


def test_a_cohort_drawn_in_secret_is_a_sample_to_those_alone_who_do_not_know_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = {}
    for scheme, trust in (("fedavg", "server"), ("two-server", "each")):
        for cohorts in ("", '[cohorts]\ndrawn = "secret"\nshare = 0.1'):
            path = tmp_path / "plan.toml"
            text = SECRET_PLAN.format(scheme=scheme, trust=trust, cohorts=cohorts)
            path.write_text(text)
            found[trust, bool(cohorts)] = report(capsys, str(path))
    for trust in ("server", "each"):
        assert not any(
            "tells nobody" in c.get("assumption", "") for c in found[trust, False]["guarantees"]
        )
    # Clients and readers are all that a trusted server's noise is for: it may be less.
    assert found["server", True]["noise"] < 0.25 * found["server", False]["noise"]
    assert (
        "tells nobody who was drawn"
        in cell(found["server", True], "user", "readers of the model")["assumption"]
    )
    # Each of two servers knows the cohort: the noise stays, and others have a smaller number.
    secret = found["each", True]
    assert secret["noise"] == pytest.approx(found["each", False]["noise"], rel=1e-3)
    assert cell(secret, "user", "leader")["epsilon"] == pytest.approx(3.0, rel=1e-3)
    for observer in ("other clients", "readers of the model"):
        assert cell(secret, "user", observer)["epsilon"] < 0.5
    # By who adds the noise, each at the noise that the budget takes of it.
    by_trust = {c["trust"]: c["noise_in_sum"] for c in secret["choices"]}
    again = {c["trust"]: c["noise_in_sum"] for c in found["server", True]["choices"]}
    assert by_trust == pytest.approx(again, rel=1e-3)
    assert by_trust["server"] == pytest.approx(found["server", True]["noise"], rel=1e-3)
    assert by_trust["each"] > 0.99 * 2**0.5 * found["server", False]["noise"]


# --- rounds of a client, and correlated noise -----------------------------------------------------

SERVER = ("--unit", "user", "--trust", "server", "--scheme", "fedavg", "--delta", "1e-5")
SIXTY = (*SERVER, "--epsilon", "3", "--rounds", "60")


def test_noise_is_for_the_rounds_that_a_client_is_in(capsys: pytest.CaptureFixture[str]) -> None:
    every = report(capsys, *SIXTY)["noise"]
    once = report(capsys, *SIXTY, "--rounds-per-client", "1")
    assert once["noise"] == pytest.approx(1.3906, rel=2e-4)
    assert every == pytest.approx(once["noise"] * 60**0.5, rel=1e-3)
    assert once["training"]["independent_of_all_rounds"] == pytest.approx(10.77, rel=1e-3)


def test_correlated_noise_is_one_release_of_all_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = ("--rounds-per-client", "1", "--separation", "60", "--correlated", "--terms", "4")
    found = report(capsys, *SIXTY, *schedule)
    assert cell(found, "user", "readers of the model")["epsilon"] == pytest.approx(3.0, rel=1e-3)
    training = found["training"]
    assert training["terms"] == 4
    assert training["noise_of_one_round"] == pytest.approx(2.42, rel=2e-3)  # 1.39 independent
    assert training["noise_of_all_rounds"] == pytest.approx(3.66, rel=2e-3)
    back = report(capsys, *SERVER, "--rounds", "60", *schedule, "--noise", str(found["noise"]))
    assert back["found"] == "epsilon"
    assert cell(back, "user", "other clients")["epsilon"] == pytest.approx(3.0, rel=1e-3)
    _, out, _ = run(capsys, *SIXTY, *schedule)
    said = " ".join(out.split())
    assert "noise is for a client in 1 of 60 rounds" in said
    assert "a training is one release: 2.42 clips deep in one round, 3.66 in the sum" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*SERVER, "--noise", "2", "--epsilon", "3", "--correlated"), "without --rounds"),
        ((*SIXTY, "--rounds-per-client", "4", "--separation", "20"), "room for 3"),
        ((*SIXTY, "--correlated", "--terms", "5"), "terms = 5"),
        ((*SIXTY, "--correlated", "--catalogue", "100"), "--catalogue 100"),
        ((*SIXTY, "--correlated", "--trust", "shares"), "drops out"),
        ((*SIXTY, "--correlated", "--trust", "local"), "noise of its own"),
    ],
)
def test_rounds_of_a_client_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and not out
    error, hint = err.splitlines()
    assert said in error
    assert hint.startswith("hint: ")
