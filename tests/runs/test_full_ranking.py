"""`tessera rank` puts a user's next click among all items it did not have."""

from __future__ import annotations

import json

import numpy as np
import pytest

from runs import toy
from tessera import tasks
from tessera.api import simulate
from tessera.cli import main as cli
from tessera.data.examples import LABEL
from tessera.errors import ConfigError
from tessera.plan import Plan, TaskPlan
from tessera.runs.ranking import _item_ranks, full_ranking


def test_a_score_that_knows_the_answer_is_first_and_a_constant_one_last():
    data = toy.task().data
    truth = {}
    for client in range(data.clients):
        test = data.test_of(client)
        if (test[LABEL] > 0).any():
            truth[client] = int(test["item"][np.argmax(test[LABEL] > 0)])
    right, among = _item_ranks(
        data,
        lambda e: np.array([truth[u] == i for u, i in zip(e["user"], e["item"], strict=True)]),
        0,
        None,
    )
    assert not right["model"].any() and len(right["model"]) > 10
    flat, _ = _item_ranks(data, lambda e: np.zeros(len(e), np.float32), 0, None)
    assert flat["model"].mean() == pytest.approx(among - 1, abs=0.6)


def test_successors_and_popularity_by_an_independent_count():
    data = toy.task().data
    found, _ = _item_ranks(data, lambda e: np.zeros(len(e), np.float32), 0, None)
    expected = []
    times = np.bincount(data.train["item"][data.train[LABEL] > 0], minlength=data.sizes["item"])
    for client in range(data.clients):
        train, test = data.of(client), data.test_of(client)
        if not (test[LABEL] > 0).any():
            continue
        at = int(np.argmax(test[LABEL] > 0))
        had = set(train["item"].tolist()) | set(test["item"][:at].tolist())
        item = int(test["item"][at])
        if item in had:
            continue
        left = [i for i in range(data.sizes["item"]) if i not in had]
        expected.append(sum(times[i] >= times[item] for i in left) - 1)
    assert found["most frequent"].tolist() == expected


def test_the_command_ranks_a_run_and_says_among_how_many(tmp_path, capsys):
    options = {"speakers": 6, "words": 60, "spoken_each": 48, "width": 4, "hidden": 4}
    task = tasks.load("speakers-like", **options)
    named = TaskPlan(name="speakers-like", options=options)
    plan = Plan(scheme="submodel", cohort=4, task=named)
    run = simulate(task, plan, 1, out=tmp_path / "run", progress=False)
    assert cli.main(["rank", str(run.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["candidates"] == task.data.sizes["word"]
    assert found["figures"]["model"]["top-3"] == pytest.approx(run.metric)
    assert set(found["figures"]) == {"model", "most frequent", "successor of the last"}
    assert cli.main(["rank", str(run.folder)]) == 0
    assert "perplexity" in capsys.readouterr().out


def test_a_click_run_is_ranked_from_python_too(tmp_path):
    run = simulate(toy.task(), toy.plan("submodel"), 1, out=tmp_path / "run", progress=False)
    found = run.ranking(5, users=8)
    assert set(found["model"]) == {"recall@5", "NDCG@5", "recall@1"}
    with pytest.raises(ConfigError, match="top = 0"):
        full_ranking(run.folder, top=0, task=toy.task())


# --- a run of sequences ---------------------------------------------------------------------------


@pytest.fixture
def following(tmp_path):
    """A run on a validation part; items go up by one from wherever a user begins."""
    lines = ["user,item,time,name"]
    for user in range(24):
        for at in range(9):
            item = (5 * user + at) % 40
            lines.append(f"u{user},i{item},{1_700_000_000 + at},Item & Co {item}")
    path = tmp_path / "own.csv"
    path.write_text("\n".join(lines) + "\n")
    options = {"path": str(path), "time": "time", "part": "validation", "negatives": 12, "width": 8}
    named = TaskPlan(name="sequences", options=options)
    plan = Plan(scheme="submodel", cohort=12, task=named)
    task = tasks.load("sequences", **options)
    return simulate(task, plan, 3, out=tmp_path / "run", progress=False)


def test_a_run_keeps_its_ranking_and_three_lists_for_the_report(following):
    kept = json.loads((following.folder / "ranking.json").read_text())
    found = kept["ranking"]
    assert found["part"] == "validation" and found["targets"] == 24
    assert found["figures"]["model"]["NDCG@10"] == pytest.approx(following.metric)
    assert {"most frequent", "successors, windowed", "EASE"} < set(found["figures"])
    assert len(kept["lists"]) == 3
    data = following.task.data
    for one in kept["lists"]:
        row = data.names_of("user").row(one["user"])
        assert one["came_next"]["id"] == data.names_of("item").name(data.test_of(row)["item"][0])
    text = following.report().read_text(encoding="utf-8")
    assert "What users would be shown" in text and "validation part" in text
    assert kept["lists"][0]["recommended"][0]["id"] in text and "What came next: i" in text
    assert "successors, windowed" in following._repr_html_()


def test_the_test_part_is_looked_at_once_and_every_further_look_is_counted(following, capsys):
    data = following.task.data
    by_hand = tasks.load(
        "sequences", path=str(following.folder.parent / "own.csv"), time="time", negatives=12
    ).data
    assert data.final["item"].tolist() == by_hand.test["item"].tolist()
    assert data.final["history"][:, 0].tolist() == data.test["item"].tolist()
    assert data.test["item"].tolist() != data.final["item"].tolist()
    first = following.ranking(test=True)
    assert first != following.ranking()
    assert cli.main(["rank", str(following.folder), "--test"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "of the test part" in said and "was looked at 1 time before" in said
    assert len(json.loads((following.folder / "tested.json").read_text())) == 2
    assert cli.main(["rank", str(following.folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "of the validation part" in said and "--test` then ranks the test part, once" in said
