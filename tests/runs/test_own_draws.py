"""What clients draw for good follows from their secrets: the same in every scheme, run and process.

A plan's seed is public and drives nothing of it, and what is read, planned and counted is the same
whatever clients draw.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from own_secrets import secret_of
from runs import raters
from tessera import simulate, tasks
from tessera.crypto.entropy import RootedEntropy, ScriptedEntropy
from tessera.data.examples import LABEL, ClientData, Examples, SecretOf, draw
from tessera.data.ratings import RatingData
from tessera.errors import ConfigError
from tessera.plan import GroupsPlan, Plan, SimulationPlan, TaskPlan
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.index.period import MemoryPeriods
from tessera.rounds.party import LocalState
from tessera.runs.central import CentralTraining
from tessera.runs.folder import CHECKPOINT, ROOT, digest_of
from tessera.runs.held import HeldRows
from tessera.runs.ranking import full_ranking
from tessera.runs.recommend import recommendations
from tessera.runs.training import Training, complete
from tessera.services.bundle import Bundle, pack_task
from tessera.services.journal import Journal
from tessera.services.task_clients import task_maker
from tessera.tasks import Task

SRC: Final = Path(__file__).parents[2] / "src" / "tessera"
SCRIPT: Final = "draws"
USERS: Final = 40


@pytest.fixture
def clicks(tmp_path) -> dict[str, object]:
    """Options of a task over clicks without labels."""
    rng = np.random.default_rng(5)
    lines = ["user,item,time"]
    for k in range(30 * USERS):
        lines.append(f"u{rng.integers(USERS):02d},i{rng.integers(120)},{1_700_000_000 + k}")
    (tmp_path / "clicks.csv").write_text("\n".join(lines) + "\n")
    return {"path": str(tmp_path / "clicks.csv"), "time": "time", "size": "tiny", "width": 2}


def plan_of(options: dict[str, object], scheme: str = "secure-submodel", seed: int = 0) -> Plan:
    return Plan(
        scheme=scheme,
        cohort=10,
        seed=seed,
        groups=GroupsPlan(size=5 if scheme == "secure-submodel" else 0),
        simulation=SimulationPlan(crypto="none", rounds=2),
        task=TaskPlan(name="interactions", options=options),
    )


def prepared(task: Task, plan: Plan, entropy: RootedEntropy | ScriptedEntropy) -> ClientData:
    plan = complete(plan, task)
    if plan.scheme.value == "central":
        return CentralTraining(task, plan, entropy=entropy).prepared.data
    with Training(task, plan, entropy=entropy) as training:
        return training.prepared.data


def same(one: ClientData, other: ClientData) -> bool:
    return all(
        np.array_equal(getattr(one, part)["item"], getattr(other, part)["item"])
        for part in ("train", "test")
    )


@pytest.mark.parametrize("scheme", ["submodel", "fedavg", "two-server", "central"])
def test_all_schemes_have_the_same_negatives_under_the_same_entropy(clicks, scheme):
    task = tasks.load("interactions", **clicks)
    first = prepared(task, plan_of(clicks), ScriptedEntropy(b"a"))
    assert (first.train["item"] >= 0).all() and (first.test["item"] >= 0).all()
    assert same(first, prepared(task, plan_of(clicks, scheme, seed=9), ScriptedEntropy(b"a")))
    assert not same(first, prepared(task, plan_of(clicks, scheme), ScriptedEntropy(b"b")))
    assert not same(first, prepared(task, plan_of(clicks, scheme), RootedEntropy.fresh()))


@pytest.mark.parametrize("scheme", ["secure-submodel", "central"])
def test_a_run_that_goes_on_has_the_negatives_it_began_with(clicks, tmp_path, scheme):
    task = tasks.load("interactions", **clicks)
    plan = complete(plan_of(clicks, scheme), task)
    engine = CentralTraining if scheme == "central" else Training
    found = []
    for folder in (tmp_path / "one", tmp_path / "one", tmp_path / "other"):
        with engine(task, plan, folder=folder) as training:
            found.append(training.prepared.data)
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


def test_what_is_planned_does_not_depend_on_what_clients_draw(clicks):
    task, again = (tasks.load("interactions", **clicks) for _ in range(2))
    assert digest_of(task) == digest_of(again)
    plan = complete(plan_of(clicks), task)
    assert plan.digest == complete(plan_of(clicks), again).digest
    held = HeldRows.of(task, plan)
    assert held == HeldRows.of(again, plan)
    for script in (b"a", b"b"):
        with Training(task, plan, entropy=ScriptedEntropy(script)) as training:
            counts = [len(training.clients[c].local.real["items"]) for c in training.clients]
        assert max(counts) <= held.most
        assert 0.8 * held.mean < np.mean(counts) <= held.mean


def test_a_deployed_client_draws_what_a_simulated_one_draws_and_draws_it_once(clicks, tmp_path):
    task, bundle = tasks.load("interactions", **clicks), pack_task(plan_of(clicks), None)
    with Training(task, bundle.plan, entropy=ScriptedEntropy(SCRIPT.encode())) as training:
        simulated = {c: training.clients[c].local.real for c in training.clients.eligible[:4]}
    for entropy in (ScriptedEntropy(SCRIPT.encode()), ScriptedEntropy(b"after a restart")):
        for client, rows in simulated.items():
            deployed = rows_of(bundle, tmp_path, client, entropy)
            assert deployed.keys() == rows.keys()
            assert all(np.array_equal(deployed[table], rows[table]) for table in rows)


def rows_of(bundle: Bundle, folder: Path, client, entropy):
    return local_of(bundle, folder, client, entropy).real


def local_of(bundle: Bundle, folder: Path, client, entropy) -> LocalState:
    journal = Journal.open(folder / f"{client}", owner=f"client {client}", plan=bundle.plan.digest)
    local, _ = task_maker(bundle, None, entropy)(journal, client)
    found = local(MemoryPeriods(), Ledger())
    journal.close()
    return found


def test_a_deployed_member_compares_the_counts_that_its_negatives_are_drawn_by(tmp_path):
    """A bundle has their digest, and so has every epoch's header: who has others leaves."""
    path, rng = tmp_path / "bought.csv", np.random.default_rng(3)
    bought = [(u, int(60 * rng.random() ** 2), t) for u in range(12) for t in range(15)]
    options = {"path": str(path), "time": "when", "width": 2, "negatives": 20, "history": 4}

    def write() -> None:
        lines = [f"u{u:02d},i{i},{1_700_000_000 + t}" for u, i, t in bought]
        path.write_text("user,item,when\n" + "\n".join(lines) + "\n")

    write()
    plan = Plan(
        scheme="secure-submodel",
        cohort=6,
        groups=GroupsPlan(size=3, small=True),
        task=TaskPlan(name="sequences", options=options),
    )
    pack_task(plan, None).write(tmp_path / "bundle.npz")
    bundle, entropy = Bundle.read(tmp_path / "bundle.npz"), ScriptedEntropy(SCRIPT.encode())
    assert len(bundle.counts) == 32 and bundle.first_model().counts == bundle.counts
    with Training(tasks.load("sequences", **options), bundle.plan, entropy=entropy) as training:
        assert training.federation.model.counts == bundle.counts
        for client in training.clients.eligible[:3]:
            local = local_of(bundle, tmp_path, client, entropy)
            assert local.counts == bundle.counts and local.candidates == "items"
            simulated = training.clients[client].local
            assert np.array_equal(local.real["items"], simulated.real["items"])
            assert simulated.counts == local.counts and simulated.candidates == "items"
    had = {i for u, i, _ in bought if u == 11}
    bought.append((11, next(i for _, i, _ in bought if i not in had), 0))  # of the same catalogue
    write()
    other = local_of(bundle, tmp_path, training.clients.eligible[5], entropy)
    assert other.counts != bundle.counts


def test_a_run_over_drawn_negatives_is_exported_ranked_and_recommends(clicks, tmp_path):
    task = tasks.load("interactions", **clicks)
    run = simulate(task, plan_of(clicks), 2, out=tmp_path / "run")
    assert all(0.3 < figure < 0.7 for figure in run.facts["trivial"].values())
    ranked = full_ranking(run.folder, task=task)
    assert ranked.targets > 0
    shown = recommendations(run.folder, client=3, task=task)
    own = task.data.of(3)
    known = set(own["item"][own[LABEL] > 0].tolist())
    assert known.isdisjoint(item.item for item in shown.recommended)
    assert run.export(out=tmp_path / "model").is_dir()


def test_recommending_over_masks_needs_the_runs_root(tmp_path):
    task = raters.task(mask="linear")
    run = simulate(task, raters.plan(cohort=20), 1, out=tmp_path / "run")
    first, again = (recommendations(run.folder, client=2, task=task) for _ in range(2))
    assert first == again
    (run.folder / CHECKPOINT / ROOT).unlink()
    with pytest.raises(ConfigError, match="drew for themselves") as caught:
        recommendations(run.folder, client=2, task=task)
    assert caught.value.hint


# --- all tasks that ship --------------------------------------------------------------------------


def moved(data: ClientData, order: npt.NDArray[np.int64]) -> ClientData:
    """The same clients with their data in another order, under other numbers."""
    place = np.argsort(order)

    def part(examples: Examples, offsets: npt.NDArray[np.int64]) -> dict[str, Any]:
        rows = [np.arange(offsets[who], offsets[who + 1]) for who in order]
        taken = examples.take(np.concatenate(rows))
        if "user" in taken.fields and data.train.subjects is None:
            taken = taken.with_field("user", place[taken["user"]])
        return {"examples": taken, "offsets": np.cumsum([0, *map(len, rows)])}

    train, test = part(data.train, data.offsets), part(data.test, data.test_offsets)
    parts = {
        "train": train["examples"],
        "offsets": train["offsets"],
        "test": test["examples"],
        "test_offsets": test["offsets"],
    }
    if isinstance(data, RatingData):
        parts["profiles"] = replace(data.profiles, values=data.profiles.values[order])
    return replace(data, **parts)


def ready(task: Task, data: ClientData, own: SecretOf) -> ClientData:
    """What clients train on, once everybody has drawn what it draws for good."""
    data = draw(data, own)
    if task.setup is None:
        return data
    total = task.setup.count(data.train) if task.setup.sums else np.zeros(0, np.int64)
    return task.setup.finish(data, total, own).data


SMALL: Final = {
    "taobao-like": {"users": 40, "items": 200, "examples": 10},
    "retail": {"users": 40, "items": 100, "examples": 10, "shops": 5},
    "taobao": {"users": 50},
}


def shipped() -> Iterator[Any]:
    for name, known in sorted(tasks.TASKS.items()):
        masks = ("none", "linear") if "mask" in known.options else (None,)
        for mask in masks:
            slow: tuple[Any, ...] = (pytest.mark.slow,)
            if name in SMALL or name == "interactions":
                slow = ()
            elif mask == "linear" and name != "ratings-lastfm":  # minutes of fitting
                slow = (pytest.mark.campaign,)
            yield pytest.param(
                name, mask, marks=slow, id=name if mask is None else f"{name}-{mask}"
            )


@pytest.mark.parametrize(("name", "mask"), list(shipped()))
def test_clients_in_another_order_have_the_same_examples_if_their_secrets_go_with_them(
    name, mask, clicks
):
    """Of every task that ships: nothing follows from a client's number or place."""
    options = dict(SMALL.get(name, {}))
    options |= clicks if name == "interactions" else {}
    options |= {} if mask is None else {"mask": mask}
    try:
        task = tasks.load(name, **options)
    except ConfigError as missing:
        pytest.skip(str(missing))
    order = np.random.default_rng(1).permutation(task.data.clients)
    here = ready(task, task.data, secret_of)
    there = ready(task, moved(task.data, order), lambda who: secret_of(int(order[who])))
    for at in range(0, len(order), max(1, len(order) // 200)):
        for one, other in (
            (here.of(int(order[at])), there.of(at)),
            (here.test_of(int(order[at])), there.test_of(at)),
        ):
            for field in one.fields.keys() - {"user"}:
                np.testing.assert_allclose(one[field], other[field], atol=1e-4)


# --- generators of numpy and torch ----------------------------------------------------------------

NOBODYS: Final = {
    "data/alimama.py": "which users of the published set are simulated",
    "data/lastfm.py": "the order of a published set that has none",
    "data/split.py": "a set without users is dealt out to simulated clients",
    "data/speech.py": "made up",
    "data/subjects.py": "a published or made-up set is dealt out to simulated shops",
    "data/taobao_like.py": "made up",
    "simulation/calibration.py": "rows to measure this machine with",
    "simulation/faults.py": "who is made to drop out of a simulation",
    "simulation/population.py": "made-up rows and updates of clients without data",
    "simulation/simulator.py": "a test's order of messages",
    "rounds/epochs/server.py": "the order of invitations: public by design",
    "rounds/forecast/epochs.py": "invitations of a forecast, by numbers of members",
    "rounds/forecast/traffic.py": "rows to count bytes with",
    "learning/models/classifiers.py": "first values of shared parameters",
    "learning/models/din.py": "first values of shared parameters",
    "learning/models/factorization.py": "first values of shared parameters",
    "learning/models/features.py": "first values of shared parameters",
    "learning/models/lags.py": "first values of shared parameters",
    "learning/models/next_word.py": "first values of shared parameters",
    "learning/models/private.py": "first values of masks, the same at all clients",
    "learning/models/refitted.py": "first values of shared parameters",
    "learning/rankers.py": "items that papers rank one among, after training",
    "learning/training/local.py": "the layout of a state, which is then filled from coins",
    "learning/training/vectorised/lags.py": "one whose whole state is set from the client's coins",
    "plan/places.py": "cohorts, which are public where the seed draws them",
    "tasks/task.py": "first values of shared parameters",
}
"""Where a generator that anybody can repeat is allowed, and why nothing of a client follows."""

GENERATORS: Final = {"default_rng", "manual_seed", "SeedSequence", "RandomState", "Generator"}


def test_no_other_module_has_a_generator_that_anybody_can_repeat():
    found = {
        str(path.relative_to(SRC))
        for folder in (
            "data",
            "tasks",
            "learning",
            "simulation",
            "runs",
            "services",
            "rounds",
            "plan",
        )
        for path in (SRC / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in GENERATORS
    }
    assert found == set(NOBODYS)
