"""New users' ways through the documents, to their last step: names, a model, a table, a choice.

What is run is what README and docs say, taken out of the pages; only the data is made here.
"""

from __future__ import annotations

import json

import pytest

import journeys
import tessera
from tessera.cli import main as cli


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_from_a_csv_with_bad_lines_to_names(tmp_path, capsys):
    journeys.purchases(tmp_path / "purchases.csv")
    journeys.follow("docs/data.md", "tessera init purchases.csv")
    out = capsys.readouterr().out
    assert "60 bad lines" in out and "separator semicolon, encoding cp1252" in out
    assert "user C00042" in out and out.count("SKU-") >= 10
    *command, _, user = journeys.commands("docs/data.md", "tessera init purchases.csv")[-1]
    assert cli.main([*command, "--user", user, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["recommended"]) == 10
    assert {item["id"] for item in found["recommended"]}.isdisjoint(
        item["id"] for item in found["past"]
    )


@pytest.mark.slow
def test_from_a_frame_to_a_model_that_answers_in_its_ids(tmp_path):
    journeys.purchases(tmp_path / "purchases.csv", lines=20_000, bad=12, users=400)
    names: dict[str, object] = {}
    exec(journeys.program("docs/data.md", "from_frame"), names)
    assert names["task"].data.facts["bad lines, left out"] == 12
    found = names["model"].recommend(history=["SKU-15", "SKU-3"], k=10)
    assert len(found) == 10 and all(item.startswith("SKU-") for item, _ in found)


@pytest.mark.slow
def test_the_notebook(capsys):
    names: dict[str, object] = {}
    for cell in journeys.cells("examples/tutorial.ipynb"):
        exec(cell, names)
    assert "secure-submodel" in capsys.readouterr().out
    assert isinstance(names["both"], tessera.Comparison)
    assert "<svg" in names["runs"][-1]._repr_html_()


def test_choosing_a_scheme(capsys):
    journeys.follow("docs/choosing.md", "--all-schemes")
    out = capsys.readouterr().out
    for scheme in ("central", "fedavg", "submodel", "secure-fedavg", "secure-submodel"):
        assert f"{scheme}, learnt by the server:" in " ".join(out.split())
    assert "reads everything" in out
    assert cli.main(["plan", "plan.toml", "--all-schemes", "--json"]) == 0
    found = {one["scheme"]: one for one in json.loads(capsys.readouterr().out)["schemes"]}
    assert found["submodel"]["bytes_up"] < found["fedavg"]["bytes_up"]
    assert found["secure-submodel"]["holder_named"] == pytest.approx(0.1)
    assert found["fedavg"]["holder_named"] == 1.0


@pytest.mark.slow
def test_a_module_loss_and_metric_of_ones_own(tmp_path, capsys):
    journeys.purchases(tmp_path / "purchases.csv", lines=20_000, bad=12, users=400)
    names: dict[str, object] = {}
    exec(journeys.program("docs/training.md", "class DeepFM"), names)
    out = capsys.readouterr().out
    assert out.count("SKU-") >= 10
    run = names["run"]
    assert run.facts["metric"] == "log loss" and run.facts["lower_is_better"]
    assert set(run.facts["trivial"]) == {"overall share"}
    assert all(r["validation"] is not None for r in run.rounds if r["metric"] is not None)
    assert run.metric < 0.72  # chance is 0.693, and the first model is worse
    assert "log loss" in run.report().read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_next_word(tmp_path, capsys):
    journeys.messages(tmp_path / "messages.csv")
    names: dict[str, object] = {}
    exec(journeys.program("docs/training.md", "tessera.Softmax"), names)
    found = names["model"].recommend(history=["good", "morning"], k=3, seen=True)
    assert len(found) == 3 and sum(chance for _, chance in found) <= 1.0
    ranking = names["run"].ranking(3)
    assert set(ranking) == {"model", "most frequent", "successor of the last"}
    assert ranking["model"]["top-3"] > ranking["most frequent"]["top-3"]
    assert "perplexity" in capsys.readouterr().out
    assert "top-3" in names["run"].report().read_text(encoding="utf-8")
