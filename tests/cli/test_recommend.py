"""`tessera recommend`: predictions that a person can read, from what the client itself has."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from reproduce import films
from tessera import load, tasks
from tessera.api import simulate
from tessera.cli import main as cli
from tessera.cli import recommend
from tessera.errors import ConfigError
from tessera.plan import Plan, SimulationPlan, TaskPlan
from tessera.report.figures import RunFigures
from tessera.report.numbers import size
from tessera.report.terminal import Page
from tessera.runs.folder import RunFolder
from tessera.runs.training import Training

FACTORS = {"factors": 4, "seed": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return films.write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """A run of each kind: no mask, a mask, by attributes, in one place."""
    top = tmp_path_factory.mktemp("runs")
    found = {}
    for name, scheme, options in (
        ("plain", "submodel", {}),
        ("masked", "submodel", {"mask": "linear", "penalty": 5.0}),
        ("attributes", "fedavg", {"model": "linear"}),
        ("central", "central", {"mask": "linear"}),
    ):
        options = {**FACTORS, **options}
        plan = Plan(
            scheme=scheme,
            cohort=20,
            task=TaskPlan(name="ratings-100k", options=options),
            simulation=SimulationPlan(rounds=3),
        )
        task = tasks.load("ratings-100k", data=data, **options)
        simulate(task, plan, out=top / name, trainer="sequential")
        found[name] = top / name
    return found


def told(run, data, capsys, *arguments):
    command = ["recommend", str(run), "--data", str(data), "--json", *arguments]
    assert cli.main(command) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["plain", "masked"])
def test_predictions_are_those_of_the_run(name, runs, data, capsys):
    """Against the whole run restored, set-up and everybody's mask included."""
    found = told(runs[name], data, capsys, "--client", "7", "--past", "100")
    options = json.loads((runs[name] / "run.json").read_text())
    assert options["metric"] == "RMSE"
    log = RunFolder.load(runs[name])
    task = tasks.load("ratings-100k", data=data, **log.plan.task.options)
    with Training(task, log.plan, folder=runs[name] / "checkpoint") as stood:
        own = stood.task.data.of(7)
        scores = stood.evaluation.scores(stood.dense, stood.tables | stood.local, own)
    expected = dict(zip(own["item"].tolist(), np.clip(scores, 1, 5).tolist(), strict=True))
    assert {i["item"]: i["predicted"] for i in found["past"]} == pytest.approx(expected, abs=1e-4)
    assert {i["item"]: i["rating"] for i in found["past"]} == dict(
        zip(own["item"].tolist(), own["label"].tolist(), strict=True)
    )


@pytest.mark.parametrize("name", ["plain", "masked", "attributes", "central"])
def test_only_what_was_not_rated_is_shown_the_best_first(name, runs, data, capsys):
    found = told(runs[name], data, capsys, "--client", "3", "--top", "8", "--past", "40")
    rated = {item["item"] for item in found["past"]}
    shown = [item["item"] for item in found["recommended"]]
    assert len(shown) == len(set(shown)) == 8
    assert not rated & set(shown)
    assert len(rated) == found["ratings"]
    predicted = [item["predicted"] for item in found["recommended"]]
    assert predicted == sorted(predicted, reverse=True)
    assert all(1 <= value <= 5 for value in predicted)
    assert all(i["title"].startswith(f"Film {i['item'] + 1} ") for i in found["recommended"])
    ratings = [item["rating"] for item in found["past"]]
    assert ratings == sorted(ratings, reverse=True)
    assert (found["rounds"], found["client"]) == (3, 3)
    assert found["mask"] == ("linear" if name in ("masked", "central") else None)


def test_a_held_out_rating_stands_beside_its_item(runs, data, capsys):
    found = told(runs["plain"], data, capsys, "--client", "3", "--top", str(films.FILMS))
    task = tasks.load("ratings-100k", data=data, **FACTORS)
    held = task.data.test_of(3)
    expected = dict(zip(held["item"].tolist(), held["label"].tolist(), strict=True))
    shown = {i["item"]: i["rating"] for i in found["recommended"] if i["rating"] is not None}
    assert shown == expected and expected


def test_nothing_is_written_into_the_run(runs, data, capsys):
    def names():
        return sorted(p.name for p in runs["masked"].rglob("*") if "sqlite-" not in p.name)

    before = names()
    told(runs["masked"], data, capsys, "--client", "0")
    assert names() == before


@pytest.mark.parametrize("width", [80, 140])
def test_people_read_two_lists_that_fit(width, runs, data):
    found = recommend.recommendations(runs["masked"], 3, data=data)
    out = io.StringIO()
    recommend.show(found, Page(Console(file=out, width=width, highlight=False)))
    text = out.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    assert "over its own linear mask" in text and "…" not in text
    for item in (*found.recommended, *found.past):
        assert item.title in text
    beside = any("recommended" in line and "rated before" in line for line in text.splitlines())
    assert beside == (width == 140)


@pytest.mark.parametrize("client", ["40", "-1"])
def test_a_client_that_is_not_there_is_refused(client, runs, data, capsys):
    assert cli.main(["recommend", str(runs["plain"]), "--client", client, "--data", str(data)]) == 2
    err = capsys.readouterr().err
    assert f"no client {client}: there are 40" in err and "hint: use 0 to 39" in err


def test_a_run_of_clicks_ranks_what_its_user_did_not_click(tmp_path, capsys):
    options = {"users": 20, "items": 60, "examples": 6, "history": 4}
    task = tasks.load("taobao-like", **options)
    plan = Plan(scheme="submodel", cohort=5, task=TaskPlan(name="taobao-like", options=options))
    simulate(task, plan, 1, out=tmp_path / "shop", trainer="sequential")
    assert cli.main(["recommend", str(tmp_path / "shop"), "--client", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    own = task.data.of(1)
    clicked = set(own["item"][own["label"] > 0].tolist())
    shown = [item["item"] for item in found["recommended"]]
    assert len(shown) == 10 and not clicked & set(shown)
    assert {item["item"] for item in found["past"]} == clicked
    assert all(0 < item["predicted"] < 1 for item in found["recommended"])
    assert cli.main(["recommend", str(tmp_path / "shop"), "--client", "1"]) == 0
    assert "probability of a click" in capsys.readouterr().out


def test_a_click_run_answers_for_the_user_that_was_named_and_in_the_films_own_ids(
    data, tmp_path, capsys
):
    task = tasks.load("movielens-100k", data=data, size="tiny", width=2)
    options = {"size": "tiny", "width": 2}
    plan = Plan(scheme="submodel", cohort=5, task=TaskPlan(name="movielens-100k", options=options))
    simulate(task, plan, 1, out=tmp_path / "run", trainer="sequential")
    found = told(tmp_path / "run", data, capsys, "--user", "6")
    assert (found["user"], found["client"]) == ("6", 5)
    own = task.data.of(5)
    clicked = own["item"][own["label"] > 0].tolist()
    assert {item["id"] for item in found["past"]} == {str(row + 1) for row in clicked}
    for item in (*found["recommended"], *found["past"]):
        assert item["id"] == str(item["item"] + 1)
        assert item["title"].startswith(f"Film {item['id']} ")
    assert not found["score"]
    command = ["recommend", str(tmp_path / "run"), "--data", str(data), "--user", "6"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "user 6 with" in out and "title" in out and found["recommended"][0]["title"] in out


@pytest.mark.parametrize(
    ("model", "rounds", "cohort"), [("next", 2, 10), ("pairs", 1, films.USERS)]
)
def test_a_sequence_run_lists_what_may_come_next_beside_what_did(
    model, rounds, cohort, data, tmp_path, capsys
):
    options = {"model": model, "exact_pairs": model == "pairs", "width": 4, "negatives": 10}
    task = tasks.load("sequences-100k", data=data, **options)
    named = TaskPlan(name="sequences-100k", options=options)
    simulation = SimulationPlan(rounds=rounds)
    plan = Plan(scheme="submodel", cohort=cohort, task=named, simulation=simulation)
    run = simulate(task, plan, out=tmp_path / "run", progress=False)
    found = told(tmp_path / "run", data, capsys, "--user", "6", "--past", "3")
    own = task.data.events.of(5)
    shown = [item["item"] for item in found["recommended"]]
    assert len(shown) == 10 and not set(shown) & set(own.tolist())
    assert [item["item"] for item in found["past"]] == own[::-1][:3].tolist()
    held = int(task.data.test_of(5)["item"][0])
    assert found["came_next"]["item"] == held and found["came_next"]["id"] == str(held + 1)
    everything = told(tmp_path / "run", data, capsys, "--user", "6", "--top", str(films.FILMS))
    ranked = [item["item"] for item in everything["recommended"]]
    predicted = [item["predicted"] for item in everything["recommended"]]
    assert found["place"] >= ranked.index(held) + 1 and predicted == sorted(predicted)[::-1]
    assert cli.main(["rank", str(run.folder), "--data", str(data), "--users", "7", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures["figures"]["model"]) == ["NDCG@10", "recall@10", "recall@20"]
    assert figures["targets"] <= 7 and "EASE" in figures["figures"]
    whole = run.ranking()
    assert whole["model"]["NDCG@10"] == pytest.approx(run.metric, abs=1e-6)
    assert cli.main(["recommend", str(tmp_path / "run"), "--data", str(data), "--user", "6"]) == 0
    out = capsys.readouterr().out
    assert "What came next, held out of training: Film" in out and "not a probability" in out
    if model == "pairs":
        with pytest.raises(ConfigError, match="solved and not trained"):
            run.export(out=tmp_path / "model")
    else:
        assert len(load(run.export(out=tmp_path / "model")).recommend(["3", "5"], k=4)) == 4


def test_a_run_of_two_models_recommends_and_ranks_by_their_mixture(data, tmp_path, capsys):
    options = {"model": "next+pairs", "exact_pairs": True, "width": 4, "negatives": 10}
    task = tasks.load("sequences-100k", data=data, **options)
    named = TaskPlan(name="sequences-100k", options=options)
    plan = Plan(scheme="submodel", cohort=10, task=named, simulation=SimulationPlan(rounds=2))
    run = simulate(task, plan, out=tmp_path / "run", progress=False)
    own = task.data.test_of(5)["seen"][0]
    found = told(run.folder, data, capsys, "--user", "6", "--past", "3")
    assert [item["item"] for item in found["past"]] == own[own >= 0][::-1][:3].tolist()
    assert not {item["item"] for item in found["recommended"]} & set(own.tolist())

    def ranked(*more):
        assert cli.main(["rank", str(run.folder), "--data", str(data), "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)

    whole = ranked()
    assert list(whole["figures"])[:3] == ["model", "next", "pairs"]
    tested = run.facts["mixture"]["test"]
    assert whole["figures"]["model"] == tested["next+pairs"]
    assert whole["figures"]["pairs"] == tested["pairs"]
    few = ranked("--sampled", "8")
    assert few["candidates"] == 9 and list(few["figures"]["model"]) == ["HR@10", "NDCG@10"]
    assert few["figures"]["model"]["NDCG@10"] > whole["figures"]["model"]["NDCG@10"]
    assert cli.main(["rank", str(run.folder), "--data", str(data), "--sampled", "8"]) == 0
    assert "sampled by a public seed" in capsys.readouterr().out
    assert cli.main(["rank", str(run.folder), "--data", str(data), "--sampled", "29"]) == 2
    assert "of which 29 are drawn" in capsys.readouterr().err


def test_a_run_of_two_models_says_what_both_cost_and_open(data, tmp_path, capsys):
    (tmp_path / "plan.toml").write_text(
        'scheme = "submodel"\ncohort = 10\n[task]\nname = "sequences-100k"\nmodel = "next+pairs"\n'
        "exact_pairs = true\nwidth = 4\nnegatives = 10\n[simulation]\nrounds = 4\n"
    )
    plan, out = str(tmp_path / "plan.toml"), tmp_path / "run"
    assert cli.main(["run", plan, "--data", str(data), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "NDCG@10 of next+pairs" in shown and "weight of pairs, of 1" in shown
    one, two = RunFigures.load(out), RunFigures.load(out / "beside")
    sent = one.per_round("bytes_up") * 4 * 10 / films.USERS + two.per_round("bytes_up")
    page = (out / "report.html").read_text()
    section = page[page.index("Both models, submodel") :].replace("\u00a0", " ")
    for text in (size(sent), "4 of 10, then 1 of 40", "whoever opens the sums", "had no say in it"):
        assert text in section, text
    assert cli.main(["plan", plan, "--data", str(data), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["beside"]
    assert told["model"] == "pairs" and told["rounds"] == 1 and told["cohort"] == films.USERS
    assert told["bytes_up"] == pytest.approx(two.per_round("bytes_up"), rel=0.1)
    assert cli.main(["plan", plan, "--data", str(data)]) == 0
    assert "and for pairs, beside it" in capsys.readouterr().out


def test_a_run_of_sequences_ends_with_its_ranking(data, tmp_path, capsys):
    (tmp_path / "plan.toml").write_text(
        'scheme = "submodel"\ncohort = 10\n[task]\nname = "sequences-100k"\nwidth = 4\n'
        "negatives = 10\n[simulation]\nrounds = 1\n"
    )
    plan, out = str(tmp_path / "plan.toml"), str(tmp_path / "run")
    assert cli.main(["run", plan, "--data", str(data), "--out", out]) == 0
    shown = capsys.readouterr().out
    assert "recall@10" in shown and "EASE" in shown and "ties count against the" in shown


def test_where_negatives_were_drawn_a_score_is_shown_and_no_probability(tmp_path, capsys):
    rng = np.random.default_rng(1)
    lines = [f"u{rng.integers(8)},i{rng.integers(30)}" for _ in range(200)]
    (tmp_path / "clicks.csv").write_text("\n".join(["user,item", *lines]) + "\n")
    options = {"path": str(tmp_path / "clicks.csv"), "size": "tiny", "width": 2}
    plan = Plan(scheme="submodel", cohort=5, task=TaskPlan(name="interactions", options=options))
    simulate(tasks.load("interactions", **options), plan, 1, out=tmp_path / "run", progress=False)
    assert cli.main(["recommend", str(tmp_path / "run"), "--user", "u1"]) == 0
    out = capsys.readouterr().out
    assert "a score" in out and "the probability of a click" not in out


def test_a_run_on_other_data_is_refused(runs, tmp_path, capsys):
    other = films.write(tmp_path)
    path = other / "ml-100k" / "u.data"
    path.write_text(path.read_text().replace("\t5\t", "\t4\t"))
    command = ["recommend", str(runs["plain"]), "--client", "1", "--data", str(other)]
    assert cli.main(command) == 2
    assert "was trained on other data" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_refused(runs, data, tmp_path, capsys):
    for name in ("plan.toml", "run.json", "rounds.jsonl", "events.jsonl"):
        (tmp_path / name).write_text((runs["plain"] / name).read_text())
    assert cli.main(["recommend", str(tmp_path), "--client", "1", "--data", str(data)]) == 2
    assert "no round of this run is checkpointed" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint").exists()


def test_titles_and_names_are_printed_as_text_and_not_as_markup() -> None:
    """A title is data: `[red]` in it is four letters and two brackets."""
    item = recommend.Item(0, "[red]Alien[/] [link=x]", 4.0, None)
    found = recommend.Recommendations(
        run="r",
        task="films [bold]",
        scheme="submodel",
        rounds=1,
        client=0,
        ratings=1,
        mask=None,
        scale=(1.0, 5.0),
        recommended=[item],
        past=[],
    )
    console = Console(width=100, record=True, highlight=False, force_terminal=False)
    with console.capture() as captured:
        recommend.show(found, Page(console))
    assert "[red]Alien[/] [link=x]" in captured.get() and "films [bold]" in captured.get()
