"""A run trains, stops and goes on, and ends with the same model to the bit."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from runs import toy
from tessera.api import Run, simulate
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.scores import ClickStatistics, auc, evaluate
from tessera.plan import Scheme, SecurityPlan, TwoServerPlan
from tessera.protocols.secagg.params import Threat
from tessera.rounds.events import RoundFinished
from tessera.runs.central import CentralTraining
from tessera.runs.folder import CHECKPOINT, HELPER_KEY, ROOT, ROUNDS, RUN, RunFolder, entropy_of
from tessera.runs.statistics import secure_sum
from tessera.runs.training import STORE, Training, complete

ALL = [scheme.value for scheme in Scheme]
FEDERATED = [scheme for scheme in ALL if scheme != "central"]


def go(folder: Path, scheme: str, rounds: int, *, task=None, plan=None, **more) -> Run:
    more.setdefault("insecure_test_entropy", None if more.get("resume") else "a test")
    return simulate(
        task or toy.task(),
        plan or toy.plan(scheme),
        rounds,
        out=folder,
        trainer="sequential",
        **more,
    )


def model(folder: Path, *, task=None) -> dict[str, bytes]:
    """Every parameter as stored, the simulated clients' local rows among them."""
    settings = RunFolder.load(folder).plan
    kind = CentralTraining if settings.scheme is Scheme.CENTRAL else Training
    entropy = entropy_of(RunFolder.load(folder))
    with kind(
        task or toy.task(), settings, folder=folder / CHECKPOINT, entropy=entropy
    ) as training:
        return {name: part.tobytes() for name, part in training.parameters(local=True).items()}


def round_lines(folder: Path) -> list[dict]:
    """What the log says of each round, but for clocks."""
    clocks = ("client_seconds", "server_seconds", "helper_seconds", "seconds")
    lines = RunFolder.load(folder).rounds()
    return [{k: v for k, v in line.items() if k not in clocks} for line in lines]


# --- stop and go on -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ALL)
@pytest.mark.parametrize("stopped", [1, 4])
def test_a_run_that_was_stopped_ends_with_the_same_model_to_the_bit(tmp_path, scheme, stopped):
    go(tmp_path / "whole", scheme, 6)
    go(tmp_path / "parts", scheme, stopped)
    go(tmp_path / "parts", scheme, 6, resume=True)
    assert model(tmp_path / "whole") == model(tmp_path / "parts")
    whole, parts = round_lines(tmp_path / "whole"), round_lines(tmp_path / "parts")
    assert [r["round_id"] for r in parts] == list(range(6))
    for a, b in zip(whole, parts, strict=True):
        if a["round_id"] == stopped - 1:  # the last round of a run is tested, due or not
            a, b = a | {"metric": None}, b | {"metric": None}
        assert a == b


@pytest.mark.parametrize("optimizer", ["momentum", "adaptive"])
def test_the_servers_memory_is_part_of_the_checkpoint(tmp_path, optimizer):
    plan = toy.plan("submodel").__class__.parse(
        toy.plan("submodel").to_toml()
        + f'\n[server]\noptimizer = "{optimizer}"\nrate = 0.1\n\n[task]\nname = "toy"\n'
    )
    go(tmp_path / "whole", "submodel", 5, plan=plan)
    go(tmp_path / "parts", "submodel", 2, plan=plan)
    go(tmp_path / "parts", "submodel", 5, plan=plan, resume=True)
    assert model(tmp_path / "whole") == model(tmp_path / "parts")


def test_real_secrets_are_the_same_after_a_stop(tmp_path):
    """The root is kept with the checkpoint, so that permanent answers do not change on the way."""
    go(tmp_path / "one", "secure-submodel", 2, insecure_test_entropy=None)
    root = tmp_path / "one" / CHECKPOINT / ROOT
    assert root.stat().st_mode & 0o777 == 0o600
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        go(tmp_path / name, "secure-submodel", 5, resume=True)
    assert model(tmp_path / "one") == model(tmp_path / "two")
    go(tmp_path / "other", "secure-submodel", 5, insecure_test_entropy=None)
    assert model(tmp_path / "one") != model(tmp_path / "other")


def test_what_was_logged_after_the_checkpoint_happens_again_and_is_told_once(tmp_path):
    go(tmp_path / "run", "submodel", 3)
    log = tmp_path / "run" / ROUNDS
    last = log.read_text().splitlines()[-1]
    ahead = json.loads(last) | {"round_id": 3}
    log.write_text(log.read_text() + json.dumps(ahead) + "\n" + last[:40])
    go(tmp_path / "run", "submodel", 5, resume=True)
    assert [r["round_id"] for r in round_lines(tmp_path / "run")] == list(range(5))


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from runs import toy
from tessera.runs import training
from tessera.api import simulate
training.SECONDS_BETWEEN_CHECKPOINTS = 0.0
simulate(toy.task(), toy.plan("secure-submodel", simulation={"rounds": 400}), out=Path(sys.argv[1]),
         trainer="sequential", insecure_test_entropy="a test")
"""


def test_a_killed_run_goes_on(tmp_path):
    folder = tmp_path / "run"
    tests = Path(__file__).parents[1]
    victim = subprocess.Popen([sys.executable, "-c", KILLED, str(folder), str(tests)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and victim.poll() is None:
        if (folder / ROUNDS).exists() and len((folder / ROUNDS).read_text().splitlines()) >= 3:
            break
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    done = len((folder / ROUNDS).read_text().splitlines())
    assert 3 <= done < 390
    plan = toy.plan("secure-submodel", simulation={"rounds": 400})
    go(folder, "secure-submodel", done + 2, plan=plan, resume=True)
    go(tmp_path / "whole", "secure-submodel", done + 2, plan=plan)
    assert model(folder) == model(tmp_path / "whole")


# --- what is refused ------------------------------------------------------------------------------


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    go(tmp_path / "run", "submodel", 1)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*.jsonl")}
    with pytest.raises(ConfigError, match="holds a run already"):
        go(tmp_path / "run", "submodel", 2)
    assert before == {p: p.read_bytes() for p in before}


def test_another_plan_does_not_go_on_with_a_run(tmp_path):
    go(tmp_path / "run", "submodel", 1)
    with pytest.raises(ConfigError, match="another plan"):
        go(tmp_path / "run", "fedavg", 2, resume=True)


def test_another_version_does_not_go_on_with_a_run(tmp_path):
    go(tmp_path / "run", "submodel", 1)
    facts = json.loads((tmp_path / "run" / RUN).read_text())
    (tmp_path / "run" / RUN).write_text(json.dumps(facts | {"version": "0.0.1"}))
    with pytest.raises(ConfigError, match=r"started by tessera 0\.0\.1"):
        go(tmp_path / "run", "submodel", 2, resume=True)


def test_a_run_goes_on_in_the_way_it_began(tmp_path):
    go(tmp_path / "run", "submodel", 1)
    other = toy.plan("submodel", simulation={"dropout": 0.3})
    with pytest.raises(ConfigError, match=r"another \[simulation\]"):
        go(tmp_path / "run", "submodel", 2, resume=True, plan=other)
    with pytest.raises(ConfigError, match="other data"):
        go(tmp_path / "run", "submodel", 2, resume=True, task=toy.task(poisoned=3))
    with pytest.raises(ConfigError, match="must continue so"):
        simulate(
            toy.task(),
            toy.plan("submodel"),
            2,
            out=tmp_path / "run",
            resume=True,
            trainer="vectorised",
        )
    with pytest.raises(ConfigError, match="or not at all"):
        go(tmp_path / "run", "submodel", 2, resume=True, record_views=True)
    more = toy.plan("submodel", simulation={"rounds": 9})
    go(tmp_path / "run", "submodel", 2, resume=True, plan=more)
    assert json.loads((tmp_path / "run" / RUN).read_text())["rounds"] == 2


@pytest.mark.parametrize("scheme", ["secure-submodel", "central"])
def test_without_its_root_a_run_does_not_go_on(tmp_path, scheme):
    go(tmp_path / "run", scheme, 1, insecure_test_entropy=None)
    (tmp_path / "run" / CHECKPOINT / ROOT).unlink()
    with pytest.raises(ConfigError, match="its root secret is missing"):
        go(tmp_path / "run", scheme, 2, resume=True)
    assert not (tmp_path / "run" / CHECKPOINT / ROOT).exists()


def test_what_fails_before_the_first_round_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="clients for a cohort"):
        go(tmp_path / "run", "submodel", 1, task=toy.task(users=3))
    assert not (tmp_path / "run").exists()


def test_a_test_part_without_clicks_is_refused(tmp_path):
    task = toy.task()
    task.data.test["label"][:] = 0.0
    with pytest.raises(ConfigError, match="no AUC"):
        go(tmp_path / "run", "submodel", 1, task=task)


def test_an_active_server_is_withstood_with_keys_of_the_run(tmp_path):
    security = SecurityPlan(threat=Threat.ACTIVE)
    plan = toy.plan("secure-submodel", security=security, privacy={"level": "cpp5"})
    go(tmp_path / "whole", "secure-submodel", 3, plan=plan)
    go(tmp_path / "parts", "secure-submodel", 1, plan=plan)
    go(tmp_path / "parts", "secure-submodel", 3, plan=plan, resume=True)
    assert model(tmp_path / "whole") == model(tmp_path / "parts")
    kinds = {e.get("phase") for e in RunFolder.load(tmp_path / "whole").events()}
    assert "consistency" in kinds


def test_a_run_keeps_the_entropy_it_began_with(tmp_path):
    go(tmp_path / "run", "submodel", 1)
    with pytest.raises(ConfigError, match="other entropy"):
        go(tmp_path / "run", "submodel", 2, resume=True, insecure_test_entropy="else")


@pytest.mark.parametrize(("scheme", "name"), [("submodel", STORE), ("central", "central.npz")])
def test_a_damaged_checkpoint_is_said_to_be_one(tmp_path, scheme, name):
    go(tmp_path / "run", scheme, 2)
    path = tmp_path / "run" / CHECKPOINT / name
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match=name):
        go(tmp_path / "run", scheme, 3, resume=True)


def test_a_plan_with_other_tables_than_the_tasks_is_refused():
    other = complete(toy.plan("submodel"), toy.task(users=30))
    narrower = other.__class__.parse(other.to_toml().replace("width = 4", "width = 3"))
    with pytest.raises(ConfigError, match="not those of task"):
        complete(narrower, toy.task())


# --- what a run does ------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", FEDERATED)
def test_sampled_cryptography_changes_nothing_but_what_is_measured(tmp_path, scheme):
    sampled = {"crypto": "sampled", "crypto_every": 3, "dropout": 0.2}
    go(tmp_path / "every", scheme, 6, plan=toy.plan(scheme, simulation={"dropout": 0.2}))
    go(tmp_path / "sampled", scheme, 6, plan=toy.plan(scheme, simulation=sampled))
    assert model(tmp_path / "every") == model(tmp_path / "sampled")
    sampled = round_lines(tmp_path / "sampled")
    assert [r["measured"] for r in sampled] == [r["round_id"] % 3 == 0 for r in sampled]
    assert len(sampled) >= 3
    for a, b in zip(
        round_lines(tmp_path / "every"), round_lines(tmp_path / "sampled"), strict=True
    ):
        for name in ("metric", "loss", "survivors", "rows_opened", "epsilon", "clipped"):
            assert a[name] == b[name]


@pytest.mark.parametrize("scheme", ALL)
def test_every_scheme_learns(tmp_path, scheme):
    run = go(tmp_path / "run", scheme, 6, plan=toy.plan(scheme, privacy={"level": "cpp1"}))
    losses = [r["loss"] for r in run.rounds]
    assert all(np.isfinite(losses))
    assert [n for n, _ in run.curve] == [2, 4, 6]
    assert 0.4 < run.metric < 1.0


def test_the_metric_is_the_models_over_everybodys_held_out_part(tmp_path):
    run, task = go(tmp_path / "run", "submodel", 3), toy.task()
    entropy = ScriptedEntropy(b"a test")
    with Training(task, run.plan, folder=run.folder / CHECKPOINT, entropy=entropy) as training:
        parameters = training.parameters(local=True)
        scores = evaluate(training.module, training.bound, parameters, task.data.test)
    assert run.metric == auc(scores, task.data.test["label"])


def test_a_client_whose_loss_is_not_a_number_sends_zeros_and_is_counted(tmp_path):
    sick, well = toy.task(poisoned=3), toy.task(poisoned=99)
    plan = toy.plan("submodel", simulation={"rounds": 8})
    run = go(tmp_path / "sick", "submodel", 8, task=sick, plan=plan)
    counted = [r["not_finite"] for r in run.rounds]
    met = [
        3 in e["cohort"]
        for e in RunFolder.load(run.folder).events()
        if "cohort" in e and e["event"] == "RoundStarted"
    ]
    assert counted == [int(m) for m in met] and sum(counted) > 0
    ended = model(run.folder, task=sick)
    assert all(np.isfinite(np.frombuffer(v, np.float32)).all() for v in ended.values())
    healthy = go(tmp_path / "well", "submodel", 8, task=well, plan=plan)
    assert not sum(r["not_finite"] for r in healthy.rounds)
    weights = [(a["weight"], b["weight"]) for a, b in zip(run.rounds, healthy.rounds, strict=True)]
    for (sick_weight, well_weight), there in zip(weights, met, strict=True):
        assert (sick_weight < well_weight) == there


def test_clients_with_too_few_examples_are_never_asked(tmp_path):
    task = toy.task()
    counts = np.diff(task.data.offsets)
    least = int(np.sort(counts)[-10])
    plan = toy.plan("submodel", simulation={"min_examples": least})
    run = go(tmp_path / "run", "submodel", 6, plan=plan)
    sampled_clients = {
        c
        for e in RunFolder.load(run.folder).events()
        if e["event"] == "RoundStarted"
        for c in e["cohort"]
    }
    assert sampled_clients <= set(np.flatnonzero(counts >= least).tolist())
    with pytest.raises(ConfigError, match="clients for a cohort"):
        go(
            tmp_path / "none",
            "submodel",
            1,
            plan=toy.plan("submodel", simulation={"min_examples": 99}),
        )


def test_local_rows_are_no_part_of_what_is_agreed_sent_or_exported(tmp_path):
    run = go(tmp_path / "run", "secure-submodel", 4)
    assert [t.name for t in run.plan.tables] == ["items", "categories"]
    with Training(toy.task(), run.plan, folder=run.folder / CHECKPOINT) as training:
        shared, own = training.parameters(), training.parameters(local=True)
        first = training.bound.initial("users")
    assert (shared["users.weight"] == first).all()
    assert (own["users.weight"] != first).any()
    assert (own["items.weight"] == shared["items.weight"]).all()


def test_federated_metrics_are_the_sum_of_the_cohorts_statistics(tmp_path):
    plan = toy.plan("secure-submodel", simulation={"metrics": "federated", "evaluate_every": 3})
    run = go(tmp_path / "run", "secure-submodel", 3, plan=plan)
    task = toy.task()
    cohort = [
        e["cohort"] for e in RunFolder.load(run.folder).events() if e["event"] == "RoundStarted"
    ]
    entropy = ScriptedEntropy(b"a test")
    with Training(task, run.plan, folder=run.folder / CHECKPOINT, entropy=entropy) as training:
        parameters = training.parameters(local=True)
        statistics = {}
        for client in cohort[-1]:
            own = task.data.test_of(client)
            scores = evaluate(training.module, training.bound, parameters, own)
            statistics[ClientId(client)] = ClickStatistics.count(scores, own["label"])
    whole = sum(
        statistics.values(), start=ClickStatistics.of(0 * next(iter(statistics.values())).vector())
    )
    assert run.metric == whole.auc
    assert len(statistics) == run.rounds[-1]["survivors"]
    vectors = {client: one.vector() for client, one in statistics.items()}
    entropy = ScriptedEntropy(b"another")
    summed = ClickStatistics.of(secure_sum(vectors, run.plan, "metrics", RoundId(2), entropy))
    assert (summed.vector() == whole.vector()).all()


def test_a_run_between_two_servers_says_how_tables_are_written_and_keeps_both_views(tmp_path):
    run = go(tmp_path / "run", "two-server", 1, record_views=True)
    described = run.facts["two_server"]
    assert described["domain"] == "whole" and described["min_cohort"] == 5
    assert [t["name"] for t in described["tables"]] == ["items", "categories"]
    (only,) = run.rounds
    assert only["writing"] == {t["name"]: t["reason"] for t in described["tables"]}
    assert only["bytes_between"] > 0 and sum(only["helper_seconds"].values()) > 0
    kept = {path.name for path in (run.folder / "views").iterdir()}
    assert kept == {"server.view.jsonl", "helper.view.jsonl"}
    assert (run.folder / HELPER_KEY).stat().st_mode & 0o777 == 0o600
    narrow = toy.plan("two-server", two_server=TwoServerPlan(domain="union"))
    run = go(tmp_path / "narrow", "two-server", 1, plan=narrow)
    assert run.facts["two_server"]["tables"] == []  # every round has a union of its own
    assert set(run.rounds[0]["writing"]) == {"items", "categories"}


def test_events_end_with_the_round(tmp_path):
    run = go(tmp_path / "run", "secure-submodel", 2)
    kinds = [e["event"] for e in RunFolder.load(run.folder).events()]
    assert kinds[0] == "RoundStarted" and kinds[-1] == RoundFinished.__name__
