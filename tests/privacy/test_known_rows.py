"""What a forecast says about one known row: a measured figure by name, or that there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.cli import main as cli
from tessera.privacy.index.known_rows import MEASURED, NOT_MEASURED, in_words, nearest

PLAN = 'scheme = "secure-submodel"\ncohort = 20\n[task]\nname = "taobao-like"\nusers = 40\n'


def test_the_same_task_comes_first_then_the_same_model() -> None:
    shop, films = MEASURED
    assert nearest("movielens", "personal") == films
    assert nearest("taobao", "personal") == shop and nearest("movielens", "din") is None
    assert "nearest" in in_words("taobao", "personal") and shop.task in in_words(
        "taobao", "personal"
    )
    assert "nearest" not in in_words("taobao-like", "personal")
    assert in_words("movielens", "din") == NOT_MEASURED


@pytest.mark.parametrize(("model", "said"), [("personal", "links 9"), ("din", "not measured")])
def test_tessera_plan_quotes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, said: str
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f'{PLAN}items = 500\nmodel = "{model}"\n')
    assert cli.main(["plan", str(path), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert sum(said in note for note in notes) == 1


def test_tessera_privacy_quotes_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["privacy", "--group", "10"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(str(each) in printed for each in MEASURED)
