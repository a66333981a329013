"""Negatives beside clicks say whose they are, if anybody else can draw them: they cannot.

The attack is on a file of clicks without labels. A server has linked the rows of each member of a
fixed group by their values (`tessera audit` measures how well), and does not know whose each set
is. Drawn by a public seed over the log in order of users, a member's negatives are one stretch of a
stream that the server draws again: sets in order of their stretches are the members in order of
their ids. Drawn from each client's secret there is no such stream: a guess is right with 1 / 10.

Guesses are counted by rows, with members as clusters: the rows of a set are right all at once. The
one-sided level is 99.9 %, so with fixed scripts an honest draw would have failed with 1 in 1,000.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from tessera import tasks
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.examples import NONE, ClientData
from tessera.ids import ClientId
from tessera.plan import GroupsPlan, Plan, SimulationPlan
from tessera.rounds.cohorts import cohorts_of
from tessera.runs.training import Training, complete
from tessera.tasks import Task

SEED = 3
BOUND = 0.1
ONE_SIDED = 3.09  # 99.9 %
ITEMS = 4_000

Ints = npt.NDArray[np.int64]


def shop(folder, members: int, clicks: int) -> Task:
    """Everybody clicks on items of its own taste, from a public list."""
    rng = np.random.default_rng(7)
    lines = ["user,item,time"]
    for who in range(members):
        for at in range(int(rng.integers(clicks // 2, 2 * clicks))):
            lines.append(f"u{who:05d},i{int(ITEMS * rng.random() ** 2)},{1_700_000_000 + at}")
    (folder / "clicks.csv").write_text("\n".join(lines) + "\n")
    (folder / "items.txt").write_text("".join(f"i{k}\n" for k in range(ITEMS)))
    return tasks.load(
        "interactions",
        path=str(folder / "clicks.csv"),
        dictionary=str(folder / "items.txt"),
        time="time",
        size="tiny",
        width=2,
    )


def publicly_drawn(task: Task, seed: int) -> Task:
    """The protection switched off: one public stream over the log in order of users."""
    assert task.data.undrawn is not None
    rng, parts = np.random.default_rng(seed), {}
    own = {
        (int(user), int(item))
        for part in (task.data.train, task.data.test)
        for user, item in zip(part["user"], part["item"], strict=True)
    }
    for name, pool in (("train", task.data.undrawn.train), ("test", task.data.undrawn.test)):
        part = getattr(task.data, name)
        item, empty = part["item"].copy(), np.flatnonzero(part["item"] == NONE)
        item[empty] = rng.choice(pool, size=len(empty))
        clash = [at for at in empty if (int(part["user"][at]), int(item[at])) in own]
        item[clash] = pool[-1]
        parts[name] = part.with_field("item", item)
    return replace(task, data=replace(task.data, **parts, undrawn=None))


def linked_sets(task: Task) -> tuple[list[tuple[ClientId, ...]], dict[ClientId, Ints]]:
    """A run's groups, and for each member the rows it takes part with."""
    plan = Plan(
        scheme="secure-submodel",
        cohort=20,
        seed=SEED,
        groups=GroupsPlan(size=10),
        simulation=SimulationPlan(crypto="none"),
    )
    plan = complete(plan, task)
    with Training(task, plan, entropy=ScriptedEntropy(b"members")) as run:
        groups = cohorts_of(plan).formed(run.clients.eligible)
        (table,) = {table.name for table in plan.roots}
        return groups, {
            client: run.clients[client].local.real[table].astype(np.int64)
            for group in groups
            for client in group
        }


def place_in(stream: Ints, rows: Ints) -> int:
    """Where the stretch is that has most of these rows and least of others."""
    score = np.cumsum(np.where(np.isin(stream, rows), 1.0, -0.5))
    before = np.minimum.accumulate(np.concatenate([[0.0], score[:-1]]))
    return int(np.argmax(score - before))


def attacked(task: Task, data: ClientData) -> tuple[float, float, int, int]:
    """The share of rows whose holder is guessed, its standard error, rows and members."""
    assert data.undrawn is not None
    groups, sets = linked_sets(task)
    drawn = np.random.default_rng(SEED).choice(data.undrawn.train, size=len(data.train) // 2)
    right, weight = [], []
    for group in groups:
        by_place = sorted(group, key=lambda c: (place_in(drawn, sets[c]), hash_of(c)))
        for guess, holder in zip(sorted(group), by_place, strict=True):
            right.append(guess == holder)
            weight.append(len(sets[holder]))
    hit, rows = np.array(right, float), np.array(weight, float)
    rate = float((hit * rows).sum() / rows.sum())
    error = float(np.sqrt((rows**2 * (hit - rate) ** 2).sum()) / rows.sum())
    return rate, error, int(rows.sum()), len(rows)


def hash_of(client: ClientId) -> int:
    """An order of ties that is not the order of the ids."""
    return (int(client) * 2_654_435_761) % 2**32


@pytest.mark.parametrize(
    ("members", "clicks"),
    [(300, 16), pytest.param(2_000, 40, marks=pytest.mark.campaign)],
)
def test_a_members_negatives_do_not_show_its_place_in_the_file(tmp_path, members, clicks):
    task = shop(tmp_path, members, clicks)
    rate, error, rows, guessed = attacked(publicly_drawn(task, SEED), task.data)
    print(f"public stream: {rate:.1%} of {rows} rows of {guessed} members")
    assert rate > 0.99
    rate, error, rows, guessed = attacked(task, task.data)
    print(f"own secrets: {rate:.1%} +- {error:.1%} of {rows} rows of {guessed} members")
    assert rows >= 2_000 and guessed >= 300
    assert rate - ONE_SIDED * error <= BOUND
