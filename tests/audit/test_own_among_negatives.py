"""Which of the rows that a client asks for are its own, and which are negatives: three attacks.

The server of a plain scheme sees every request. Each attack is against one rule, and each rule is
switched off once, to see that its attack then finds the own rows:

- *public draw*: negatives that follow from something public are drawn again and taken away;
- *fresh draws*: negatives that are drawn anew leave the own rows in the intersection of requests;
- *moving request*: asking only for what a round's window of steps needs leaves own rows in the
  difference of requests, as negatives stay.

As shipped, all rows are asked for every time, with negatives drawn once from the client's secret.
An attack names rows as own; its advantage is the share of own rows that it names, less that of
negatives: 1 if it finds all, 0 if it guesses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tessera import tasks, wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.row_names import RowNames
from tessera.data.sequences import Sequences, sequence_data
from tessera.ids import ClientId
from tessera.plan import Plan, SimulationPlan
from tessera.protocols.plain import PlainRows
from tessera.rounds.root import lasting_secret, with_negatives
from tessera.runs import training
from tessera.runs.client_training import own_rows
from tessera.runs.training import Training, complete
from tessera.simulation.views import Views
from tessera.tasks import Task
from tessera.tasks.sequences import NEXT, sequence_task

ROUNDS = 8
EXAMPLES = 8
PUBLIC = ScriptedEntropy(b"the plan's seed: 0")
ONE_SIDED = 3.09  # 99.9 %

Requests = list[set[int]]
"""Of one client, one in each round."""
Guess = Callable[[Training, ClientId, Requests], set[int]]


# --- attacks --------------------------------------------------------------------------------------


def drawn_again(run: Training, client: ClientId, asked: Requests) -> set[int]:
    """Without what a draw from public data gives."""
    secret = lasting_secret(PUBLIC, run.plan.federation, int(client))
    nothing = {"items": np.zeros(0, np.uint64)}
    softmax = run.bound.candidates
    assert softmax is not None
    return set.union(*asked) - set(with_negatives(nothing, softmax, secret)["items"].tolist())


def always_there(run: Training, client: ClientId, asked: Requests) -> set[int]:
    return set.intersection(*asked)


def comes_and_goes(run: Training, client: ClientId, asked: Requests) -> set[int]:
    return set.union(*asked) - set.intersection(*asked)


# --- rules that are off ---------------------------------------------------------------------------


def public_draw(run: Training, round_id: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(training, "lasting_secret", lambda _, *whose: lasting_secret(PUBLIC, *whose))
    run.clients._made.clear()


def fresh_draw(run: Training, round_id: int, patch: pytest.MonkeyPatch) -> None:
    fresh = ScriptedEntropy(b"negatives of round %d" % round_id)
    patch.setattr(training, "lasting_secret", lambda _, *whose: lasting_secret(fresh, *whose))
    run.clients._made.clear()


def moving_request(run: Training, round_id: int, patch: pytest.MonkeyPatch) -> None:
    """For a window of each client's steps, at a place of its own in every round."""
    for client in run.clients.eligible:
        examples, steps = run.task.data.of(int(client)), run.plan.local_training.examples
        places = max(1, len(examples) - steps + 1)
        at = int(np.random.default_rng([round_id, int(client)]).integers(places))
        some = examples.take(slice(at, at + steps))
        run.clients[client].local.real = own_rows(run.bound, some, run.clients.secret_of(client))


def as_shipped(run: Training, round_id: int, patch: pytest.MonkeyPatch) -> None:
    pass


RULES = {
    "public draw": (public_draw, drawn_again),
    "fresh draws": (fresh_draw, always_there),
    "moving request": (moving_request, comes_and_goes),
}


# --- measured -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Advantage:
    """Of every client: the share of its own rows that is named, and of its negatives."""

    own: list[float] = field(default_factory=list)
    negatives: list[float] = field(default_factory=list)
    named: int = 0
    right: int = 0
    rows: int = 0

    def add(self, named: set[int], asked: Requests, own: set[int]) -> None:
        others = set.union(*asked) - own
        self.named, self.right = self.named + len(named), self.right + len(named & own)
        self.rows += len(own)
        self.own.append(len(named & own) / len(own))
        self.negatives.append(len(named & others) / max(1, len(others)))

    @property
    def each(self) -> np.ndarray:
        return np.array(self.own) - np.array(self.negatives)

    @property
    def above(self) -> float:
        """What it is above, with 99.9 %."""
        return float(self.each.mean() - ONE_SIDED * self.each.std() / np.sqrt(len(self.own)))

    def shown(self, attack: str, rule: str) -> None:
        print(
            f"{attack}, {rule}: {np.mean(self.own):.1%} of own rows named, "
            f"{np.mean(self.negatives):.1%} of negatives; {self.right} of {self.named} named are "
            f"own, of {self.rows} own; advantage {self.each.mean():.3f} (above {self.above:.3f}), "
            f"{len(self.own)} clients"
        )


def requests_in(views: Views) -> Iterator[tuple[ClientId, set[int]]]:
    """What the server reads in messages, in order."""
    for seen in views.by_party["server"]:
        if wire.kind_of(seen.data) is PlainRows:
            message = wire.decode(seen.data)
            yield message.sender, set(message.tables[0].rows.tolist())


def attacked(task: Task, off, guess: Guess, patch: pytest.MonkeyPatch) -> Advantage:
    """By messages: everybody is in every round of a `submodel` run."""
    plan = Plan(
        scheme="submodel",
        cohort=task.data.clients,
        training=replace(task.recommended.training, examples=EXAMPLES),
        simulation=SimulationPlan(rounds=ROUNDS, crypto="every", evaluate_every=ROUNDS),
    )
    views, asked = Views(), {}
    with patch.context() as patched:
        run = Training(
            task, complete(plan, task), entropy=ScriptedEntropy(b"negatives"), views=views
        )
        for round_id in range(ROUNDS):
            off(run, round_id, patched)
            for _ in run.run(round_id + 1):
                pass
    for client, rows in requests_in(views):
        asked.setdefault(client, []).append(rows)
    found = Advantage()
    for client, seen in asked.items():
        assert len(seen) == ROUNDS
        own = set(task.data.events.of(int(client)).tolist())
        found.add(guess(run, client, seen), seen, own)
    return found


def shop() -> Task:
    """Everybody has some forty of 2,000 items, popular ones rather than others."""
    users, items, rng = 60, 2_000, np.random.default_rng(11)
    user = np.repeat(np.arange(users), rng.integers(30, 60, users))
    item = (items * rng.random(len(user)) ** 2).astype(np.int64)
    events = Sequences.sorted(user, item, None, users=users, items=items)
    names = {"user": RowNames.numbered(users), "item": RowNames.numbered(items)}
    data = sequence_data("shop", events, items=items, length=5, ids=names)
    return sequence_task(data, title="shop", recommended=NEXT, width=2, negatives=100)


@pytest.mark.parametrize("name", RULES)
def test_own_rows_are_found_with_their_rule_off_and_not_with_it_on(name, monkeypatch):
    task, (off, guess) = shop(), RULES[name]
    found = attacked(task, off, guess, monkeypatch)
    found.shown(name, "rule off")
    assert found.above > 0.7 and found.right == found.named
    found = attacked(task, as_shipped, guess, monkeypatch)
    found.shown(name, "as shipped")
    assert found.above <= 0.0


# --- MovieLens 1M ---------------------------------------------------------------------------------


@pytest.mark.campaign
@pytest.mark.skipif("TESSERA_DATA" not in os.environ, reason="needs the data sets")
@pytest.mark.parametrize("name", RULES)
def test_own_rows_among_300_negatives_on_movielens(name, monkeypatch):
    """Requests as clients would send them, three rounds: nothing is trained."""
    task, (off, guess) = tasks.load("sequences-1m"), RULES[name]
    plan = complete(Plan(scheme="submodel", cohort=100), task)
    for rule in (off, as_shipped):
        found = Advantage()
        with monkeypatch.context() as patched:
            run = Training(task, plan, entropy=ScriptedEntropy(b"negatives"))
            asked: dict[ClientId, Requests] = {}
            for round_id in range(3):
                rule(run, round_id, patched)
                for client in run.clients.eligible[::4]:
                    rows = run.clients[client].local.real["items"]
                    asked.setdefault(client, []).append(set(rows.tolist()))
        for client, seen in asked.items():
            own = set(task.data.events.of(int(client)).tolist())
            found.add(guess(run, client, seen), seen, own)
        found.shown(name, "as shipped" if rule is as_shipped else "rule off")
        assert (found.above > 0.0) == (rule is not as_shipped)
        assert found.right > 0.95 * found.named or rule is as_shipped
