"""From a file of one's own to names: `init`, `run`, `recommend`, an exported model, a frame."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import tessera
from tessera import tasks
from tessera.cli import main as cli
from tessera.cli.run_summary import still_improving
from tessera.data import interactions
from tessera.data.guess import guess
from tessera.data.interactions import Interactions
from tessera.errors import ConfigError
from tessera.plan import Plan
from tessera.runs.folder import RunFolder


def read(source, **how):
    return interactions.read(source, Interactions(**how))


COLUMNS = {"user": "customer_id", "item": "sku", "time": "bought_at"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shop(n: int = 1_500, bad: int = 0) -> str:
    rng = np.random.default_rng(3)
    lines = ["order;customer_id;sku;bought_at"]
    for k in range(n):
        day = f"2024-03-{1 + k * 28 // n:02d}T10:00:00Z"
        lines.append(f"{k};C{rng.integers(60):03d};SKU-{rng.integers(90)};{day}")
    for k in range(bad):
        lines[20 + 11 * k] = lines[20 + 11 * k].replace("2024", "in 2024")
    return "\n".join(lines) + "\n"


def written(tmp_path, **kinds):
    path = tmp_path / "purchases.csv"
    path.write_text(shop(**kinds))
    return path


def test_a_file_of_few_users_gets_a_group_that_they_fill(tmp_path, capsys):
    lines = [f"u{k % 7},i{k * k % 41 + k % 7},{1_700_000_000 + k}" for k in range(210)]
    (tmp_path / "few.csv").write_text("\n".join(["user,item,time", *lines]) + "\n")
    assert cli.main(["init", "few.csv", "--model", "clicks"]) == 0
    assert "in groups of 7" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["run", "plan.toml", "--rounds", "1", "--out", "run"]) == 0
    assert RunFolder.load(tmp_path / "run").plan.group_plan.cohort == 7


def test_a_csv_becomes_a_plan_a_run_and_names(tmp_path, capsys):
    written(tmp_path, bad=12)
    assert cli.main(["init", "purchases.csv", "--model", "clicks"]) == 0
    said = capsys.readouterr().out
    assert "1,488 interactions of 60 users with 90 items" in said
    assert "user = customer_id, item = sku, time = bought_at" in said
    assert (
        "separator semicolon" in said and "12 bad lines" in said and "line 21: 'bought_at'" in said
    )
    plan = Plan.read(tmp_path / "plan.toml")
    assert plan.task.options["on_bad"] == "skip"
    assert plan.cohort == 10 and plan.simulation.rounds == 30
    assert cli.main(["run", "plan.toml", "--rounds", "2", "--out", "run"]) == 0
    capsys.readouterr()
    ids = RunFolder.load(tmp_path / "run").ids
    assert len(ids["item"]) == 90 and ids["user"].row("C007") == 7
    assert cli.main(["recommend", "run", "--user", "C007", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    data = read("purchases.csv", **COLUMNS, on_bad="skip")
    own = data.of(7)
    has = {ids["item"].name(row) for row in own["item"][own["label"] > 0]}
    assert {item["id"] for item in found["past"]} <= has
    shown = [item["id"] for item in found["recommended"]]
    assert len(shown) == 10 and not has & set(shown) and shown[0].startswith("SKU-")
    assert cli.main(["recommend", "run", "--user", "C0071"]) == 2
    assert "hint: did you mean 'C007'?" in capsys.readouterr().err
    assert cli.main(["recommend", "run"]) == 2
    assert "--user ID" in capsys.readouterr().err


def test_a_file_with_times_becomes_next_and_its_run_ranks_the_catalogue(tmp_path, capsys):
    written(tmp_path, bad=12)
    assert cli.main(["init", "purchases.csv"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "model = next, as the file has times (bought_at): what comes next" in said
    assert "lines have the time of the one before, and keep the file's order" in said
    plan = Plan.read(tmp_path / "plan.toml")
    own = plan.task.options
    assert (plan.task.name, own["model"], own["part"]) == ("sequences", "next", "validation")
    assert own["negatives"] == 30 and own["on_bad"] == "skip"  # a third of 90 items
    assert plan.scheme == "secure-submodel" and plan.cohort == 10
    assert cli.main(["run", "plan.toml", "--rounds", "2", "--out", "run"]) == 0
    said = capsys.readouterr().out
    for name in ("NDCG@10", "recall@10", "most frequent", "successors, windowed", "EASE"):
        assert name in said
    page = (tmp_path / "run" / "report.html").read_text()
    assert "on the validation part" in page and "on the test part" not in page
    assert cli.main(["recommend", "run", "--user", "C007"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "SKU-" in said and "a score by which items are ordered" in said
    assert "probability of a click" not in said


def test_a_file_without_times_becomes_pairs_and_says_what_they_show(tmp_path, capsys):
    path = written(tmp_path)
    kept = [line.rpartition(";")[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(kept) + "\n")
    assert cli.main(["init", "purchases.csv"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "model = pairs, as the file has no times: what goes together (EASE)" in said
    assert "[dp] epsilon = 10 per user, noise of each of two servers on every cell" in said
    assert "on another data set" in said and "epsilon 10 / 3 / 1 had NDCG@10" in said
    plan = Plan.read(tmp_path / "plan.toml")
    assert plan.scheme == "two-server" and not plan.task.options["exact_pairs"]
    assert (plan.dp.unit, plan.dp.epsilon, plan.dp.trust) == ("user", 10.0, "each")
    assert (plan.task.options["model"], plan.cohort, plan.simulation.rounds) == ("pairs", 60, 1)
    assert cli.main(["run", "plan.toml", "--out", "noisy"]) == 0
    assert "epsilon spent" in capsys.readouterr().out
    given = ["--scheme", "secure-submodel", "--out", "exact.toml"]
    assert cli.main(["init", "purchases.csv", *given]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "exact_pairs = true: whoever opens a sum has the exact counts" in said
    assert Plan.read(tmp_path / "exact.toml").task.options["exact_pairs"]
    assert cli.main(["run", "exact.toml", "--out", "run"]) == 0
    assert "EASE" in capsys.readouterr().out
    assert cli.main(["init", "purchases.csv", "--model", "next", "--out", "other.toml"]) == 2
    err = capsys.readouterr().err
    assert "no times, and what comes next has an order" in err and "hint: " in err


def test_titles_come_from_a_second_file_about_items(tmp_path, capsys):
    written(tmp_path)
    lines = [f"SKU-{k},Thing {k},shelf {k % 4}" for k in range(91)]
    (tmp_path / "items.csv").write_text("\n".join(["sku,title,department", *lines]) + "\n")
    assert cli.main(["init", "purchases.csv", "--items", "items.csv"]) == 0
    said = capsys.readouterr().out
    assert "item_features = items.csv, title = title, attributes = department" in said
    assert "1 of the items described are in nobody's history: left out" in said
    assert cli.main(["run", "plan.toml", "--rounds", "1", "--out", "run"]) == 0
    assert "Thing " in (tmp_path / "run" / "report.html").read_text()
    capsys.readouterr()
    assert cli.main(["recommend", "run", "--user", "C007", "--json"]) == 0
    for item in json.loads(capsys.readouterr().out)["recommended"]:
        assert item["title"] == item["id"].replace("SKU-", "Thing ")


def with_cap(path, cap: int) -> int:
    """Give the plan at `path` another max_rows; the one it had."""
    text = path.read_text()
    own = re.search(r"^max_rows = (\d+)", text, re.MULTILINE)
    path.write_text(text.replace(own[0], f"max_rows = {cap}"))
    return int(own[1])


@pytest.mark.parametrize(
    ("scheme", "drawn"), [("secure-submodel", "union_negatives"), ("two-server", "negatives")]
)
def test_max_rows_fits_the_file_and_a_cap_that_most_are_over_is_refused(
    tmp_path, capsys, scheme, drawn
):
    written(tmp_path)
    assert cli.main(["init", "purchases.csv", "--scheme", scheme]) == 0
    plan = Plan.read(tmp_path / "plan.toml")
    task = tasks.load(plan.task.name, **plan.task.options)
    most = int(task.data.events.counts.max()) + getattr(task.loss, drawn)
    cap = with_cap(tmp_path / "plan.toml", 5)
    assert cap - 16 < most <= cap
    capsys.readouterr()
    for command in (["plan", "plan.toml"], ["run", "plan.toml", "--out", "run"]):
        assert cli.main(command) == 2
        err = " ".join(capsys.readouterr().err.split())
        assert "error: max_rows = 5: 60 of 60 clients" in err
        assert f"hint: max_rows = {most} in [union]" in err


def test_few_clients_over_the_cap_are_counted(tmp_path, capsys):
    written(tmp_path)
    given = ["--model", "pairs", "--scheme", "secure-submodel"]
    assert cli.main(["init", "purchases.csv", *given]) == 0
    options = Plan.read(tmp_path / "plan.toml").task.options
    pairs = np.sort(np.diff(tasks.load("sequences", **options).data.offsets))
    assert pairs[-3] < pairs[-1] <= with_cap(tmp_path / "plan.toml", int(pairs[-1]) - 1)
    capsys.readouterr()
    assert cli.main(["plan", "plan.toml", "--json"]) == 0
    found, over = json.loads(capsys.readouterr().out), np.count_nonzero(pairs == pairs[-1])
    assert (found["held"]["over_cap"], found["held"]["looked_at"]) == (over, 60)
    assert f"{over} of 60 clients hold more rows of a table" in " ".join(found["notes"])
    solve = "after the last round the server solves over 90 x 90 numbers, 0.3 MB"
    assert solve in found["notes"]


def test_times_that_nobody_can_read_are_said_and_not_dropped_in_silence(tmp_path, capsys):
    path = tmp_path / "own.csv"
    lines = [f"u{k % 9},i{k * k % 41},{k % 27 + 1} March 24" for k in range(200)]
    path.write_text("\n".join(["user,item,date", *lines]) + "\n")
    assert cli.main(["init", "own.csv"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "as the file has no times that can be read: of date, line 2: 'date' is not a" in said
    given = ["--time-format", "%d %B %y", "--out", "other.toml"]
    assert cli.main(["init", "own.csv", *given]) == 0
    assert "model = next, as the file has times (date)" in capsys.readouterr().out
    assert Plan.read(tmp_path / "other.toml").task.options["time_format"] == "%d %B %y"


def test_equal_times_are_no_order(tmp_path, capsys):
    lines = [f"u{k % 9},i{k * k % 41},2024-01-01" for k in range(200)]
    (tmp_path / "own.csv").write_text("\n".join(["user,item,date", *lines]) + "\n")
    assert cli.main(["init", "own.csv"]) == 0
    assert "as all times of a user are equal in date" in capsys.readouterr().out
    assert cli.main(["init", "own.csv", "--model", "next", "--out", "other.toml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "191 lines have the time of the one before, and keep the file's order" in said


def test_one_item_per_user_is_refused(tmp_path, capsys):
    lines = [f"u{k},i{k % 41},2024-01-01" for k in range(200)]
    (tmp_path / "own.csv").write_text("\n".join(["user,item,date", *lines]) + "\n")
    assert cli.main(["init", "own.csv"]) == 2
    err = capsys.readouterr().err
    assert "no user has 3 items, of which one is held out" in err and "hint: " in err


def test_a_frame_becomes_a_run_and_an_exported_model_answers_in_its_ids(tmp_path):
    pa = pytest.importorskip("pyarrow")
    csv = pytest.importorskip("pyarrow.csv")
    path = written(tmp_path)
    frame = csv.read_csv(path, parse_options=csv.ParseOptions(delimiter=";"))
    assert isinstance(frame, pa.Table)
    task = tasks.from_frame(frame, **COLUMNS, name="shop", history=5)
    run = tessera.simulate(task, Plan(scheme="submodel", cohort=10), 2, trainer="sequential")
    named = run.recommend("C003", k=5)
    assert len(named) == 5 and all(item.startswith("SKU-") for item, _ in named)
    model = tessera.load(run.export())
    shown = model.recommend(history=["SKU-15", "SKU-3", "not there"], k=100)
    assert {"SKU-15", "SKU-3"}.isdisjoint(item for item, _ in shown)
    assert len(shown) == 88  # all others
    chances = [chance for _, chance in shown]
    assert chances == sorted(chances, reverse=True)
    # the same as predicting for that one item, for a person whose own row is zeros
    best, past = shown[0], [model.items.row(item) for item in ("SKU-15", "SKU-3")]
    columns = {"item": [model.items.row(best.item)], "history": [past]}
    width = model.module.get_parameter("users.weight").shape[1]
    alone = model.predict(columns, local={"users": np.zeros(width)})
    assert best.probability == pytest.approx(float(alone[0]), abs=1e-6)
    with pytest.raises(ConfigError, match="no item 'nothing'"):
        model.recommend(history=["nothing"])
    assert (run.folder / "model" / "ids.json").exists()
    (run.folder / "model" / "ids.json").write_text('{"item": 3}')
    with pytest.raises(ConfigError, match="damaged"):
        tessera.load(run.folder / "model")


def test_an_argument_of_from_frame_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no argument 'histroy'") as caught:
        tasks.from_frame(written(tmp_path), **COLUMNS, histroy=3)
    assert "history" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("header", "line", "found"),
    [
        ("userId,movieId,rating,timestamp", "1,2,4.5,1700000000", ("userId", "movieId", 4.0)),
        ("who,what,when,clicked", "a,b,2024-01-01,1", ("who", "what", 0.0)),
        ("client_id,product_name,day,stars", "a,b,2024-01-01,9", ("client_id", "product_name", 8)),
    ],
)
def test_columns_are_guessed_by_name_and_content(tmp_path, header, line, found):
    path = tmp_path / "own.csv"
    path.write_text(f"{header}\n{line}\n{line}\n")
    one = guess(path)
    assert (one.user, one.item, one.threshold) == found
    assert one.time and one.label


def test_columns_that_cannot_be_guessed_are_asked_for(tmp_path, capsys):
    (tmp_path / "own.csv").write_text("a,b,time\nx,y,noon\n")
    assert cli.main(["init", "own.csv"]) == 2
    err = capsys.readouterr().err
    assert "which column is the user? There are a, b, time" in err and "--user COLUMN" in err
    assert cli.main(["init", "own.csv", "--user", "a", "--item", "b", "--model", "clicks"]) == 0
    assert Plan.read(tmp_path / "plan.toml").task.options["time"] == ""  # noon is no time
    assert cli.main(["init", "nowhere.csv", "--out", "other.toml"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_curve_that_rises_is_told_from_one_that_stands():
    rising = [[k, 0.5 + 0.01 * k] for k in range(20)]
    shaking = [[k, 0.7 + 0.01 * (k % 2)] for k in range(20)]
    flat = [[k, 0.5 + 0.2 * min(k, 8) / 8] for k in range(20)]
    assert still_improving(rising, lower=False) and not still_improving(rising, lower=True)
    assert not still_improving(shaking, lower=False)
    assert not still_improving(flat, lower=False)
    assert still_improving([[k, -v] for k, v in rising], lower=True)
