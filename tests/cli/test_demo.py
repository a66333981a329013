"""The demo trains under several schemes and says what each costs and what its server knows."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from tessera.cli import demo
from tessera.cli import main as cli
from tessera.plan import Scheme
from tessera.privacy.index.bound import in_words

USUAL = [scheme.value for scheme in Scheme if scheme is not Scheme.SECURE_FEDAVG]


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shop = {"users": 30, "items": 4_000, "examples": 8, "history": 4, "width": 8, "size": "tiny"}
    monkeypatch.setattr(demo, "SHOP", shop)
    monkeypatch.setattr(demo, "COHORT", 10)
    monkeypatch.setattr(demo, "GROUP", 5)
    monkeypatch.setattr(demo, "MAX_ROWS", 24)


@pytest.mark.parametrize("columns", ["80", "140"])
def test_schemes_a_person_and_sizes_are_on_the_terminal_and_on_the_page(
    capsys, monkeypatch, columns
):
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["demo", "--rounds", "6", "--dropout", "0"]) == 0
    captured = capsys.readouterr()
    page = Path("runs/demo/demo.html").read_text()
    for text in (captured.out, page):
        for scheme in USUAL:
            assert scheme in text
        for word in ("Gained", "Hidden", "Price", "What the server knows", "At your size"):
            assert word in text
        assert "stopped after" in text and "tessera init" in text
    assert "secure-fedavg" not in captured.out
    assert "6/6" in captured.err
    assert max(map(len, captured.out.splitlines())) <= int(columns)
    for scheme in USUAL:
        assert f'href="{scheme}/report.html"' in page
        assert Path(f"runs/demo/{scheme}/report.html").exists()
    assert "plan.toml" not in page

    assert_conditions(captured.out, page)
    report = html.unescape(Path("runs/demo/secure-submodel/report.html").read_text())
    assert in_words(1 / 5) in report and "With 0, 2, 5 members that work with the server" in report
    assert_like_the_readme(captured.out)


def assert_conditions(shown: str, page: str) -> None:
    """Whoever reads one sentence of the demo reads what it supposes, and over how many rounds."""
    for text in (" ".join(shown.split()), html.unescape(page)):
        assert in_words(1 / 5) in text
        assert "whoever knows one row of a member links others to it by their values" in text
        assert "after all rounds" in text and "by chance" in text
        assert "by lot" not in text and "ε" not in text and "psilon" not in text

    assert "With 0, 2, 5 members that work with the server B is 20%, 33.3%, 100%." in page


def assert_like_the_readme(shown: str) -> None:
    """The README has the output of this demo: the same headings, whatever the figures are."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    block = readme.partition("<!-- demo output: begin -->")[2].partition("<!-- demo output: end")[0]
    heads = [line.split() for line in block.splitlines()]
    for line in shown.splitlines():
        if line.startswith((" scheme", "What the server", "At your size", "Next")):
            assert line.split() in heads


def test_for_machines_it_is_one_object_and_a_second_demo_gets_its_own_folder(capsys):
    for folder, more in (("runs/demo", []), ("runs/demo-2", ["--all"])):
        assert cli.main(["demo", "--rounds", "2", "--dropout", "0", "--json", *more]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["page"] == f"{folder}/demo.html"
        schemes = [run["scheme"] for run in told["runs"]]
        assert schemes == ([scheme.value for scheme in Scheme] if more else USUAL)
        known = {each["scheme"]: each for each in told["person"]["known"]}
        items = told["person"]["items"]
        for scheme in ("fedavg", "submodel"):
            if known[scheme]["rounds"]:
                assert known[scheme]["read"] and known[scheme]["sure"] == items
        assert known["secure-submodel"]["sure"] == []
        sizes = told["by_size"]
        assert sizes["fedavg"]["1000000"] > 100 * sizes["secure-submodel"]["1000000"]
        assert sizes["fedavg"]["1000000000"] is None
        if more:
            assert told["stopped_after"] is None


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    assert cli.main(["demo", "--out", "mine"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.main(["demo", "--rounds", "0"]) == 2
