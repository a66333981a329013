"""Members of a fixed group are exchangeable in training: every task and model that ships.

Bit by bit with the sequential trainer, which is what a deployed client runs; with the vectorised
one the numbers that differ by a step of the quantiser are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from exchange import (
    Apart,
    CarrierView,
    Script,
    SwappedEntropy,
    apart,
    difference,
    own_rows_swapped,
    recorded,
    restarting,
    swapped,
)
from runs import raters, toy
from tessera import tasks
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.data.examples import ClientData, Examples
from tessera.data.sequences import Sequences, sequence_data
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning import bound_model
from tessera.learning.training.jobs import Job, Trained
from tessera.learning.training.settings import LocalTraining
from tessera.plan import GroupsPlan, Plan, SimulationPlan, UnionPlan, defaults
from tessera.rounds.cohorts import cohorts_of
from tessera.runs import client_training
from tessera.runs.client_training import ClientTraining, Trainer
from tessera.runs.training import Training, complete
from tessera.simulation.epochs import EpochFederation
from tessera.simulation.faults import Drop
from tessera.tasks import Recommended, Task
from tessera.tasks.kinds import text_task
from tessera.tasks.sequences import NEXT, sequence_task

CLIENTS, GROUP, ROUNDS = 8, 4, 2
Pair = tuple[ClientId, ClientId]
NOTHING_HAPPENS: Final = Script({}, {})
COHORT = GROUP  # so that sums over all clients are not over a cohort


# --- tasks that are small enough ------------------------------------------------------------------


def shop(model: str, **more: Any) -> Task:
    return tasks.load(
        "taobao-like", users=CLIENTS, items=60, categories=6, examples=10, history=4,
        width=3, size="tiny", model=model, **more,
    )  # fmt: skip


def ratings(**model: Any) -> Task:
    return raters.task(raters.films(users=CLIENTS, each=15), **model)


def own_file(*, labels: bool) -> Task:
    """Interactions as a user has them; without labels the others are drawn."""
    rng = np.random.default_rng(5)
    columns: dict[str, Any] = {
        "user": np.sort(rng.integers(0, CLIENTS, 160)),
        "item": rng.integers(0, 50, 160),
        "time": 1_700_000_000 + np.arange(160),
    }
    more = {}
    if labels:
        columns["liked"], more = rng.integers(0, 2, 160), {"label": "liked"}
    lines = [
        ",".join(columns),
        *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "own.csv"
        path.write_text("\n".join(lines) + "\n")
        return tasks.load("interactions", path=str(path), time="time", width=3, size="tiny", **more)


class WithDropout(toy.Taste):
    """A module of a user's own, with a layer that draws."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.dropout(super().forward(batch), 0.5, self.training)


def own_module() -> Task:
    task = toy.task(users=CLIENTS)
    return replace(task, module=lambda: WithDropout(toy.GOODS, 8, CLIENTS))


def questions() -> Task:
    """Classes without a table."""
    rng = np.random.default_rng(6)

    def some(each: int) -> tuple[Examples, np.ndarray]:
        n = CLIENTS * each
        words, kinds = rng.integers(0, 30, (n, 8)), rng.integers(0, 3, n)
        return Examples({"words": words, "label": kinds}), np.arange(0, n + 1, each)

    (train, offsets), (test, test_offsets) = some(12), some(3)
    data = ClientData(
        name="questions",
        train=train,
        offsets=offsets,
        test=test,
        test_offsets=test_offsets,
        sizes={"word": 30, "class": 3},
    )
    good = Recommended(training=LocalTraining(batch=4, examples=8, rate=0.2), dense_clip=64.0)
    return text_task(data, title="questions", recommended=good, width=4, filters=4)


def sequences(candidates: str) -> Task:
    """What comes next, against the group's union or against own negatives."""
    rng = np.random.default_rng(8)
    user = np.repeat(np.arange(CLIENTS), rng.integers(6, 14, CLIENTS))
    item = (50 * rng.random(len(user)) ** 2).astype(np.int64)
    events = Sequences.sorted(user, item, None, users=CLIENTS, items=50)
    data = sequence_data("steps", events, items=50, length=4)
    return sequence_task(
        data, title="steps", recommended=NEXT, width=3, negatives=15, candidates=candidates,
        union_negatives=6,
    )  # fmt: skip


TASKS: Final[Mapping[str, Callable[[], Task]]] = {
    "din": lambda: shop("din"),
    "biased": lambda: shop("biased"),
    "personal": lambda: shop("personal"),
    "shops": lambda: tasks.load(
        "retail", users=30, items=60, categories=6, examples=5, history=4, shops=CLIENTS,
        shops_each=1, width=3, size="tiny",
    ),
    "own file": lambda: own_file(labels=True),
    "own file without labels": lambda: own_file(labels=False),
    "ratings": ratings,
    "ratings over linear masks": lambda: ratings(mask="linear"),
    "ratings over masks by networks": lambda: ratings(mask="network"),
    "ratings over masks that are fitted again": lambda: ratings(mask="linear", refit=True),
    "biases": lambda: ratings(factors=0, mask="linear", refit=True),
    "words": lambda: tasks.load(
        "speakers-like", speakers=CLIENTS, words=80, spoken_each=40, width=3, hidden=3,
        negatives=15,
    ),
    "what comes next in a union": lambda: sequences("union"),
    "what comes next among own negatives": lambda: sequences("own"),
    "module with dropout": own_module,
}  # fmt: skip
DENSE_ONLY: Final[Mapping[str, Callable[[], Task]]] = {
    "classes": questions,
    "ratings by attributes": lambda: ratings(model="linear"),
    "ratings by attributes over masks": lambda: ratings(model="network", mask="linear"),
}
"""Models without tables have no rows to hide the holders of; all draw as the others do."""


def plan_of(
    task: Task,
    scheme: str = "secure-submodel",
    *,
    cohort: int = COHORT,
    group: int = GROUP,
    max_rows: int = 30,
    **more: Any,
) -> Plan:
    groups = {"groups": GroupsPlan(size=group)}
    chosen = Plan(
        scheme=scheme,
        cohort=cohort if scheme == "secure-submodel" else CLIENTS,
        seed=3,
        union=UnionPlan(max_rows=max_rows),
        simulation=SimulationPlan(rounds=ROUNDS, evaluate_every=1, **more.pop("simulation", {})),
        **(groups if scheme == "secure-submodel" else {}),
        **more,
    )
    return complete(chosen, task)


def a_pair(chosen: Plan, seed: int, clients: int = CLIENTS) -> Pair:
    """Two members of the group that has the first round."""
    groups = cohorts_of(chosen).formed([ClientId(c) for c in range(clients)])
    group = groups[np.random.default_rng([chosen.seed, 0]).permutation(len(groups))[0]]
    a, b = np.random.default_rng(seed).choice(len(group), 2, replace=False)
    return group[int(a)], group[int(b)]


def a_script(rng: np.random.Generator, rounds: int = 3) -> Script:
    """Who is absent in which round, and who is put to bytes and woken in it."""
    absent = {
        at: tuple(Drop(ClientId(c), "collect") for c in range(CLIENTS) if rng.random() < 0.3)
        for at in range(rounds)
    }
    restarts = {
        (at, ClientId(c)): frozenset({0})
        for at in range(rounds)
        for c in range(CLIENTS)
        if rng.random() < 0.3
    }
    return Script(absent, restarts)


def view_of(
    task: Task,
    chosen: Plan,
    swap: Pair | None,
    *,
    script: Script = NOTHING_HAPPENS,
    trainer: Trainer = Trainer.SEQUENTIAL,
    folder: Path | None = None,
    rounds: int = ROUNDS,
) -> CarrierView:
    """The whole view of a training from its set-up on; with a folder it stops and goes on."""
    entropy = SwappedEntropy(ScriptedEntropy(b"exchange"), swap)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            recorded() as view,
            restarting(script.restarts),
            own_rows_swapped(task, swap, entropy, chosen.federation),
        ):
            for end in range(1, rounds + 1) if folder is not None else (rounds,):
                with Training(
                    swapped(task, swap), chosen, entropy=entropy, trainer=trainer, folder=folder
                ) as run:
                    run.federation._faults = script.of_round
                    for _ in run.run(end):
                        pass
                    if trainer is Trainer.VECTORISED:
                        assert run.learner.learner.name == "vectorised"
    finally:
        torch.set_num_threads(threads)
    return view


def check(task: Task, chosen: Plan, pair: Pair, **more: Any) -> CarrierView:
    one, other = view_of(task, chosen, None, **more), view_of(task, chosen, pair, **more)
    found = difference(one, other)
    assert not found, f"{pair}: {found}"
    return one


@pytest.mark.parametrize("name", TASKS)
def test_two_members_who_change_places_change_nothing(name: str) -> None:
    task = TASKS[name]()
    chosen = plan_of(task)
    for seed in range(2):
        view = check(task, chosen, a_pair(chosen, seed))
        assert view.count("opened") >= 2 + ROUNDS, "two unions, and an update in every round"


def test_a_shared_row_for_each_client_would_tell_members_apart_and_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = shop("personal", share_users=True)
    with pytest.raises(ConfigError, match="'users', which has a row for each client") as refused:
        plan_of(task)
    assert "share_users" in (refused.value.hint or "")
    monkeypatch.setattr(defaults, "check_shared_rows", lambda *_: None)
    chosen = plan_of(task)
    pair = a_pair(chosen, 0)
    one, other = (view_of(task, chosen, swap, rounds=1) for swap in (None, pair))
    assert difference(one, other), "with the rule off"


def _public_rows(name: str, ids: np.ndarray, width: int, secret: Secret) -> np.ndarray:
    return bound_model.units(bytes(bound_model.KEY_BYTES), ids, width)


def _public_coins(self: Any, round_id: RoundId, client: ClientId) -> Secret:
    return ScriptedEntropy(b"public").secret(Label.MEASUREMENT, int(round_id), int(client))


@pytest.mark.parametrize(
    ("where", "what", "drawn"),
    [(bound_model, "_drawn", _public_rows), (EpochFederation, "coins", _public_coins)],
)
def test_a_draw_from_the_id_is_found(
    where: Any, what: str, drawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First own rows, or what is drawn in a round, as anybody could draw them."""
    task = TASKS["personal"]()
    chosen = plan_of(task)
    monkeypatch.setattr(where, what, drawn)
    one, other = (view_of(task, chosen, swap, rounds=1) for swap in (None, a_pair(chosen, 0)))
    assert "opened" in difference(one, other)


@pytest.mark.parametrize("name", DENSE_ONLY)
def test_without_tables_a_sum_over_all_is_the_same(name: str) -> None:
    task = DENSE_ONLY[name]()
    view = check(task, plan_of(task, "secure-fedavg"), (ClientId(1), ClientId(6)))
    assert view.count("opened") >= ROUNDS


@pytest.mark.parametrize("name", ["personal", "ratings over linear masks", "module with dropout"])
def test_dropouts_restarts_and_a_run_that_is_taken_up_again_change_nothing(
    name: str, tmp_path: Path
) -> None:
    task = TASKS[name]()
    chosen = plan_of(task, simulation={"metrics": "federated"})
    for seed in range(2):
        script = a_script(np.random.default_rng(seed))
        pair, rounds = a_pair(chosen, seed), 3
        one = view_of(task, chosen, None, script=script, folder=tmp_path / f"one {seed}", rounds=3)
        other = view_of(
            task, chosen, pair, script=script, folder=tmp_path / f"other {seed}", rounds=rounds
        )
        assert not difference(one, other), pair


def test_members_who_wait_for_one_another_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member is absent for two rounds; what the others made of their own rows waits with it."""
    task = TASKS["personal"]()
    chosen = plan_of(task, cohort=CLIENTS)
    pair = a_pair(chosen, 0)
    script = Script({at: (Drop(pair[0], "collect"),) for at in (1, 2)}, {})
    view = check(task, chosen, pair, script=script, rounds=5)
    assert view.count("opened") == 2 + 5 + 3, "unions, and updates of both groups"


class Raising(toy.Poisoned):
    """Cannot be trained on the examples of one user."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if bool((batch["poison"] > 0).any()):
            raise ValueError("an example that nobody thought of")
        return toy.Taste.forward(self, batch)


@pytest.mark.parametrize("kind", [toy.Poisoned, Raising])
def test_a_member_whose_training_fails_looks_like_the_others(kind: type[toy.Poisoned]) -> None:
    chosen = plan_of(toy.task(users=CLIENTS))
    pair = a_pair(chosen, 0)
    task = toy.task(users=CLIENTS, poisoned=int(pair[0]))
    task = replace(task, module=lambda: kind(toy.GOODS, 8, CLIENTS))
    view = check(task, chosen, pair)
    assert view.count("opened") >= 2 + ROUNDS, "and its group goes on"


@pytest.mark.parametrize("error", [KeyError, TypeError, ConfigError, ValueError])
def test_a_client_that_trains_alone_sends_zeros_whatever_its_data_raised(
    error: type[Exception],
) -> None:
    """As a deployed one does: if it left for an error that nobody foresaw, that would be seen."""

    class Failing:
        name = "failing"

        def train(self, jobs: Sequence[Job], *, round_id: int) -> list[Trained]:
            raise error("of these examples")

    with Training(TASKS["personal"](), plan_of(TASKS["personal"]())) as run:
        job = run.job(ClientId(0), run._whole(ClientId(0)))
        alone = ClientTraining(run.plan, run.bound, run.plan.local_training, Failing())
        (trained,) = alone.train([job], RoundId(0))
        assert trained.failed == f"training raised {error.__name__}"
        assert not trained.update.dense.any() and trained.update.weight == 0
        assert trained.local == job.local


def test_a_client_that_fails_before_it_trains_sends_zeros_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raising(*_: Any) -> Examples:
        raise IndexError("of these examples")

    with Training(TASKS["personal"](), plan_of(TASKS["personal"]())) as run:
        job = run.job(ClientId(0), run._whole(ClientId(0)))
        monkeypatch.setattr(client_training, "drawn", raising)
        trained = run._client_training.alone(
            0, job.submodel, job.examples, job.local, job.coins, RoundId(0)
        )
    assert trained.failed == "training raised IndexError" and trained.local == job.local
    for name, ids in job.submodel.trained.items():
        part = trained.update.tables[name]
        assert part.values.shape[0] == len(ids) and not part.values.any()


MOST_APART: Final = 0.01
"""Share of rows that may differ where clients are trained side by side."""


@pytest.mark.parametrize("name", ["din", "personal", "words"])
def test_vectorised_few_rows_differ_and_by_one_step(name: str) -> None:
    task = TASKS[name]()
    chosen = plan_of(task)
    found = vectorised(task, chosen, a_pair(chosen, 0))
    print(f"{name}: {found}")
    assert found.rows <= MOST_APART * found.of_rows and found.steps <= 1


@pytest.mark.campaign
def test_vectorised_rows_that_differ_in_a_larger_shop() -> None:
    """Ten pairs of members in groups of ten, with the demo's model."""
    task = tasks.load("taobao-like", users=40, items=500, examples=60, history=20)
    chosen = plan_of(task, cohort=10, group=10, max_rows=500)
    for seed in range(10):
        found = vectorised(task, chosen, a_pair(chosen, seed, clients=40))
        print(f"pair {seed}: {found}")
        assert found.rows <= MOST_APART * found.of_rows and found.steps <= 1


def vectorised(task: Task, chosen: Plan, pair: Pair) -> Apart:
    one, other = (
        view_of(task, chosen, swap, trainer=Trainer.VECTORISED, rounds=1) for swap in (None, pair)
    )
    return apart(one, other, chosen.group_plan.ring)


@pytest.mark.campaign
@pytest.mark.parametrize("name", TASKS)
def test_five_scripts_of_every_task_change_nothing(name: str) -> None:
    task = TASKS[name]()
    chosen = plan_of(task)
    for seed in range(5):
        script = a_script(np.random.default_rng([seed, *map(ord, name)]))
        check(task, chosen, a_pair(chosen, seed), script=script, rounds=3)
    print(f"{name}: 5 scripts, no difference")
