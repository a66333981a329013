"""What is passed on of a run with [dp] is charged or public: every field of every file is decided.

Attack: an AUC over P clicks and N others is k / (P N), and of its 16 digits one pair (P, N) fits.
Beside a model with a small epsilon it gives away the labels of a person's held-out examples, and
`tessera export` wrote it.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

try:
    import pandas
except ImportError:
    pandas = None

from runs import toy
from tessera.api import Run, compare, simulate
from tessera.cli import main as cli
from tessera.cli import run_summary
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.examples import LABEL, Examples
from tessera.errors import ConfigError
from tessera.learning.metrics import ClickMetric
from tessera.plan import DPPlan
from tessera.report import comparison, page
from tessera.report.figures import RunFigures
from tessera.rounds import events
from tessera.rounds.events import FIGURES, NOT_CHARGED, Event, RoundFinished, is_charged
from tessera.rounds.no_noise import Figure
from tessera.runs import export
from tessera.runs.folder import RunFolder
from tessera.runs.ranking import FullRanking
from tessera.runs.recommend import Recommendations
from tessera.runs.training import Training, complete

EXACT_NAMES = events.NAMES[Figure.EXACT]
NOISE = {"unit": "user", "epsilon": 3.0, "delta": 1e-5, "trust": "server"}


def noisy_plan(**more):
    simulation = {"rounds": 4, "evaluate_every": 2, **more.pop("simulation", {})}
    return toy.plan("fedavg", dp=DPPlan(**{**NOISE, **more}), simulation=simulation)


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> Run:
    """Its metric is taken in one place, without noise."""
    out = tmp_path_factory.mktemp("exact") / "run"
    return simulate(toy.task(), noisy_plan(), out=out, progress=False)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory) -> Run:
    """Its metric is a noisy sum, and charged."""
    plan = noisy_plan(simulation={"metrics": "federated"})
    for _ in range(30):  # noise leaves some rounds without a figure: counts may be below 1
        out = tmp_path_factory.mktemp("noisy") / "run"
        run = simulate(toy.task(), plan, out=out, progress=False)
        if list(RunFolder.load(run.folder).rounds())[-1]["metric"] is not None:
            return run
    raise AssertionError("no run of thirty has a figure after its last round")


# --- the attack -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tested():
    """A model with a small epsilon, its scores of the test part, and the exact AUC over it."""
    plan, entropy = complete(noisy_plan(), toy.task()), ScriptedEntropy(b"an exported figure")
    with Training(toy.task(), plan, entropy=entropy) as training:
        metric = [e for e in training.run(4) if isinstance(e, RoundFinished)][-1].metric
        tables = training.tables | training.local
        test = training.task.data.test
        return training.evaluation.scores(training.dense, tables, test), training.task.data, metric


def pairs_that_fit(value: float, most: int) -> list[tuple[int, int]]:
    """(clicks, others), each at most so many, that an AUC of all these digits can be over."""
    found = []
    for clicks, others in itertools.product(range(1, most + 1), repeat=2):
        halves = round(value * 2 * clicks * others)  # a tie counts half
        if abs(halves / (2 * clicks * others) - value) < 1e-15:
            found.append((clicks, others))
    return found


def test_one_pair_of_6561_fits_an_auc_of_all_its_digits():
    rng = np.random.default_rng(3)
    labels = np.repeat([1.0, 0.0], [79, 73]).astype(np.float32)
    scores = rng.normal(size=len(labels)).astype(np.float32)
    value = ClickMetric().measures(scores, Examples({LABEL: labels}))["AUC"]
    assert set(pairs_that_fit(value, 81)) == {(79, 73), (73, 79)}  # one, and its mirror


def labels_that_fit(tested, client: int, value: float) -> list[tuple[float, ...]]:
    """Labels of one person's held-out examples with which the AUC is this, the others' known."""
    scores, data, _ = tested
    own = slice(int(data.test_offsets[client]), int(data.test_offsets[client + 1]))
    found = []
    for guess in itertools.product((0.0, 1.0), repeat=own.stop - own.start):
        labels = data.test[LABEL].copy()
        labels[own] = guess
        auc = ClickMetric().measures(scores, data.test.with_field(LABEL, labels))["AUC"]
        if abs(auc - value) < 1e-12:
            found.append(guess)
    return found


def test_an_exact_auc_tells_the_held_out_labels_of_a_person(tested):
    """What the figure gave away that was exported: nearly everybody's labels, to one who knows the
    others'. A charged figure is of no use for it."""
    _, data, value = tested
    told = 0
    for client in range(data.clients):
        found = labels_that_fit(tested, client, value)
        assert tuple(data.test_of(client)[LABEL]) in found
        told += len(found) == 1
        assert not labels_that_fit(tested, client, value + 1e-3)  # a figure with noise fits none
    assert told >= 0.9 * data.clients


def test_an_exported_model_has_no_exact_metric(exact, noisy, monkeypatch):
    assert exact.metric is not None  # the simulation knows it
    model = exact.export()
    about = json.loads((model / "about.json").read_text())
    assert about["metric"] == {"name": "AUC", "value": None, "after_rounds": None}
    assert str(exact.metric) not in "".join(
        path.read_bytes().decode("latin-1") for path in model.iterdir()
    )
    charged_one = json.loads((noisy.export() / "about.json").read_text())["metric"]
    assert charged_one["value"] == noisy.metric and charged_one["after_rounds"] == 4
    # As it was: with the check switched off the figure is there, to the last digit.
    monkeypatch.setattr(export, "is_charged", lambda *_: True)
    about = json.loads((exact.export() / "about.json").read_text())
    assert about["metric"]["value"] == exact.metric


def test_local_rows_follow_from_data_without_noise_and_are_not_exported(exact):
    with pytest.raises(ConfigError, match="nobody was charged") as refused:
        export.export_run(exact.folder, toy.task(), with_local=True)
    assert refused.value.hint


# --- every field ----------------------------------------------------------------------------------

NAMES = {f.name for kind in get_args(Event) for f in fields(kind)}
EXACT = NAMES & EXACT_NAMES
"""Fields of events that are functions of clients' data without noise, under every plan."""


def test_every_field_of_every_event_is_in_the_one_list():
    """A new field fails here until somebody has decided what it follows from."""
    assert not NAMES - FIGURES.keys()
    assert EXACT >= {
        *("loss", "clipped", "rows_over_cap", "not_finite", "broken", "singleton_rows"),
        *("client_seconds", "server_seconds", "seconds", "excluded", "weight"),
    }
    plan = noisy_plan()
    assert {name for name in NAMES if not is_charged(plan, name)} == EXACT | {
        "metric",
        "validation",
    }
    assert all(is_charged(toy.plan("fedavg"), name) for name in NAMES)


def test_every_name_of_every_record_is_in_the_one_list(exact, noisy):
    """run.json, summaries of `run` and `compare`, rankings and lists: nothing is undecided."""
    of_types = {f.name for kind in (FullRanking, Recommendations) for f in fields(kind)}
    assert not of_types - FIGURES.keys()
    for run in (exact, noisy):
        figures = RunFigures.load(run.folder)
        facts = {name for name in figures.facts if name != "task"}
        parts = {f"task.{part}" for part in figures.facts["task"]}
        found = facts | parts | {*figures.summary()} | {*run_summary.summary(run.folder)}
        assert not found - FIGURES.keys() - {NOT_CHARGED}


def test_no_name_is_in_the_list_twice():
    assert sum(map(len, events.NAMES.values())) == len(FIGURES)


def test_what_is_public_follows_from_the_plan():
    own = toy.plan("submodel", dp=DPPlan(**NOISE | {"trust": "local"}))
    assert not is_charged(own, "bytes_up")  # as long as its client has rows
    secret = toy.plan("fedavg", dp=DPPlan(**NOISE), cohorts={"drawn": "secret", "share": 0.2})
    assert not is_charged(secret, "survivors") and is_charged(noisy_plan(), "survivors")
    item = noisy_plan(simulation={"metrics": "federated"})
    item = replace(item, dp=DPPlan(unit="item", noise=1.0, trust="local"))
    assert not is_charged(item, "metric")  # federated, and exact


def test_events_and_run_json_name_their_exact_figures(exact, noisy):
    for run, metric in ((exact, {"metric", "validation"}), (noisy, set())):
        log = RunFolder.load(run.folder)
        lines = [*log.events(), *log.rounds()]
        assert {line["event"] for line in lines} >= {"RoundStarted", "RoundFinished"}
        for line in lines:
            named = set(filter(None, line.get(NOT_CHARGED, "").split(", ")))
            assert named == (line.keys() & (EXACT | metric))
        facts = set(log.facts[NOT_CHARGED].split(", "))
        assert facts == {"task.facts", "task.examples", "task.test_examples", "data", "trivial"}


def walk(value, name=""):
    if isinstance(value, dict):
        for key, one in value.items():
            yield from walk(one, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for one in value:
            yield from walk(one, name)
    else:
        yield name, value


ABOUT = {
    # The plan's and the code's; the shapes of tables are the plan's.
    *("sequence_length", "history_length", "task.name", "task.title", "federation", "scheme"),
    *("plan", "seed", "rounds", "metric.name", "format", "version", "tessera", "softmax"),
    *("local_rows", "files.maps.npz", "files.state_dict.pt", "files.ids.json", "architecture"),
    *("tables.parameter", "tables.kind", "tables.fields", "tables.fields.category"),
    *("tables.parent", "tables.rows", "tables.width", "tables.by_rule", "tables.map"),
    *(f"fields.{name}" for name in ("user", "item", "history", "category", "age", "gender")),
    # Charged, or not there.
    *("metric.value", "metric.after_rounds"),
}


def test_every_field_of_an_exported_model_is_public_or_charged(exact, noisy):
    for run in (exact, noisy):
        model = run.export()
        about = json.loads((model / "about.json").read_text())
        undecided = {name for name, _ in walk(about)} - ABOUT
        assert not {name for name in undecided if not name.startswith("fields.")}
        assert {path.name for path in model.iterdir()} <= {
            *("about.json", "state_dict.pt", "maps.npz", "ids.json")
        }


COMPARED = {
    # Public.
    *("folder", "label", "scheme", "level", "rounds", "rounds_planned", "rounds_given_up"),
    *("why_given_up", "rounds_measured", "rounds_secure", "cohort", "naming_bound"),
    *("epsilon_once", "epsilon_ever", "epsilon_spent", "noise_epsilon", "noise_scope"),
    *("dropouts", "insecure_test_entropy", "bytes_up", "bytes_down", "bytes_between"),
    *("writing",),
    # Charged where the metric is.
    *("final", "best", "best_round"),
}


def there(value) -> bool:
    return value is not None and value != {} and value != ""


@pytest.mark.parametrize("which", ["exact", "noisy"])
def test_every_figure_that_compare_passes_on_is_charged_or_public(which, request):
    run = request.getfixturevalue(which)
    found = compare([run])
    (summary,) = [one.summary() for one in found.runs]
    assert {name for name, value in summary.items() if there(value)} <= COMPARED
    assert there(summary["final"]) is (which == "noisy")
    (row,) = csv.DictReader(io.StringIO(found.to_csv()))
    assert {name for name, value in row.items() if value} <= COMPARED
    texts = [page.page(found.runs), str(found), found._repr_html_(), found.to_csv()]
    figures = RunFolder.load(run.folder)
    withheld = [f"{value:.3f}" for value in figures.facts["trivial"].values()]
    withheld += [f"{r['loss']:.3f}" for r in figures.rounds() if r["loss"]]
    if which == "exact":
        withheld += [f"{value:.3f}" for _, value in run.curve]
    else:  # what is charged may be shown, and may read the same
        withheld = [each for each in withheld if each != f"{run.metric:.3f}"]
    for text in texts:
        assert not [value for value in withheld if value in text]
    assert "Charged figures only." in texts[0] and "Charged figures only." in texts[1]


@pytest.mark.parametrize("which", ["exact", "noisy"])
def test_a_runs_own_report_has_exact_figures_and_marks_them(which, request):
    run = request.getfixturevalue(which)
    text = run.report().read_text()
    for key, names in ((each.key, each.exact) for each in page.SECTIONS if each.exact):
        section = text.partition(f'<section id="{key}"')[2].partition("</section>")[0]
        exact_ones = [name for name in names if not is_charged(run.plan, name)]
        assert bool(section and exact_ones) is (NOT_CHARGED in section), key
        assert all(names[name] in section for name in exact_ones if section)
    lede = text.partition('class="lede"')[2].partition("</p>")[0]
    assert f"{run.metric:.3f}" in lede
    assert lede.count(NOT_CHARGED) == (2 if which == "exact" else 1)  # the baseline always is
    marked = compare([run], exact=True)
    (row,) = csv.DictReader(io.StringIO(marked.to_csv()))
    assert row["final"] and ("final" in row[NOT_CHARGED].split(", ")) is (which == "exact")
    assert "seconds" in row[NOT_CHARGED]


def test_a_run_without_noise_is_shown_as_ever(tmp_path):
    run = simulate(toy.task(), toy.plan("fedavg"), 2, out=tmp_path / "run", progress=False)
    assert not [e for e in RunFolder.load(run.folder).events() if NOT_CHARGED in e]
    assert NOT_CHARGED not in run.report().read_text()
    (one,) = compare([run]).runs
    assert one.summary()["final"] == run.metric and not one.withholds


# --- neighbouring data ----------------------------------------------------------------------------
#
# Two runs whose data differ in one person, under the same noise: whatever leaves the folder is the
# same to the byte, but for what is charged.


def neighbour(task, client: int):
    """The task with other labels and other items of one person, in both of its parts."""
    data = task.data

    def changed(part, offsets):
        own = slice(int(offsets[client]), int(offsets[client + 1]))
        labels, items = part[LABEL].copy(), part["item"].copy()
        labels[own] = 1.0 - labels[own]
        items[own] = (items[own] + 7) % toy.GOODS
        return part.with_field(LABEL, labels).with_field("item", items)

    train, test = changed(data.train, data.offsets), changed(data.test, data.test_offsets)
    return replace(task, data=replace(data, train=train, test=test))


def passed_on_by_all(run: Run, out) -> dict[str, str]:
    """Everything that a run is made into for others, by the name of its exporter."""
    out.mkdir()
    found = compare([run])
    files = {
        "compare page": found.report(out / "compare.html"),
        "page elsewhere": run.report(out / "page.html"),
        "model": run.export(toy.task(), out / "model") / "about.json",
    }
    texts = {name: path.read_text() for name, path in files.items()}
    about = json.loads(texts["model"])
    about.pop("files")  # digests of the model, which is charged
    return texts | {
        "model": json.dumps(about),
        "csv": found.to_csv(),
        "text": str(found),
        "notebook": found._repr_html_(),
        "frame": run.to_frame().to_csv() if pandas is not None else "",
        "json": json.dumps(comparison.summary(found.runs, out / "page.html")),
        "run --json": json.dumps(
            events.told(run.plan, run_summary.summary(run.folder), exact=False)
        ),
    }


PLANS = {
    "trusted server": lambda: noisy_plan(),
    "each of two servers": lambda: toy.plan(
        "two-server",
        dp=DPPlan(**NOISE | {"trust": "each", "rows": "all"}),
        simulation={"rounds": 2, "evaluate_every": 1},
    ),
}


@pytest.mark.parametrize("kind", PLANS)
def test_neighbouring_data_give_the_same_files_but_for_charged_fields(kind, tmp_path, monkeypatch):
    texts, losses = [], []
    for name, task in (("a", toy.task()), ("b", neighbour(toy.task(), 5))):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)  # so that folders are called the same
        run = simulate(
            task,
            PLANS[kind](),
            out="run",
            progress=False,
            trainer="sequential",
            insecure_test_entropy="the same noise",
        )
        texts.append(passed_on_by_all(run, Path("out")))
        losses.append([(r["loss"], r["metric"]) for r in run.rounds])
    assert losses[0] != losses[1]  # the data did matter
    for name in texts[0]:
        assert texts[0][name] == texts[1][name], name
    # And there is something to withhold: as the run's own page has it, the two differ.
    own = []
    for name in "ab":
        monkeypatch.chdir(tmp_path / name)
        own.append(Run(Path("run")).report().read_text())
    assert own[0] != own[1]


def test_commands_withhold_what_is_not_charged_from_files_and_programs(exact, tmp_path, capsys):
    assert (
        cli.main(["compare", str(exact.folder), "--json", "--out", str(tmp_path / "p.html")]) == 0
    )
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert told["final"] is None and told["clipped"] is None
    with_all = events.told(exact.plan, run_summary.summary(exact.folder), exact=True)
    without = events.told(exact.plan, run_summary.summary(exact.folder), exact=False)
    assert with_all["final"] is not None and "final" in with_all[NOT_CHARGED]
    assert without["final"] is None and without["trivial"] == {} and without["seconds"] is None
    page_elsewhere = exact.report(tmp_path / "elsewhere.html").read_text()
    assert "Charged figures only." in page_elsewhere
    kept = exact.report(tmp_path / "kept.html", exact=True).read_text()
    assert f"{exact.metric:.3f}" in kept and NOT_CHARGED in kept


# --- several runs ---------------------------------------------------------------------------------


def test_runs_over_the_same_people_add_up(exact, tmp_path):
    second = simulate(toy.task(), replace(noisy_plan(), seed=4), out=tmp_path / "b", progress=False)
    third = simulate(toy.task(), replace(noisy_plan(), seed=5), out=tmp_path / "c", progress=False)
    text = compare([exact, second, third]).together
    assert "epsilon 5.656, delta 1e-05 per user" in text
    assert "by exact figures is not in it" in text and text in " ".join(
        str(compare([exact, second, third])).split()
    )
    assert compare([exact]).together == ""
    item = DPPlan(unit="item", noise=1.0, trust="local")
    plan = toy.plan("fedavg", dp=item, simulation={"rounds": 1})
    other = simulate(toy.task(), plan, out=tmp_path / "d", progress=False)
    assert "there is no one ε" in compare([exact, other]).together
