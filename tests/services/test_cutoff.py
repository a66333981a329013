"""A period's data are those up to its cut-off: deployed clients of a task over their own files.

Clients are the shipped ones (`task_maker`), over journals; their file grows between two runs, or
while a run is under way. What they send may depend on what was there at the cut-off alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.group_lab import NOW, SEED, GroupLab
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.examples import LABEL, Examples
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.plan import GroupsPlan, Plan, Scheme, SimulationPlan, TaskPlan, UnionPlan
from tessera.rounds.party import ServerModel
from tessera.services.bundle import Bundle, pack_task
from tessera.services.client import MakeLocal, Train
from tessera.services.group_leader import BEFORE_NOW
from tessera.services.journal import Journal
from tessera.services.journal_stores import JournalExamples
from tessera.services.link import name_of
from tessera.services.task_clients import task_maker

CLIENTS, ITEMS, EVENTS = 4, 60, 15
CUTOFF = int(NOW) - BEFORE_NOW


def lines(seed: int, first: float, count: int) -> list[str]:
    """Events of everybody, a minute apart, from a moment on."""
    rng = np.random.default_rng(seed)
    return [
        f"u{client},i{rng.integers(ITEMS)},{int(first) + 60 * at}"
        for at in range(count)
        for client in range(CLIENTS)
    ]


EARLIER = lines(1, CUTOFF - 60 * EVENTS, EVENTS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "items.txt").write_text("".join(f"i{at}\n" for at in range(ITEMS)))
    return write(tmp_path / "events.csv", [])


def write(file: Path, later: list[str]) -> Path:
    file.write_text("\n".join(["user,item,when", *EARLIER, *later]) + "\n")
    return file


def plan_of(file: Path, **time: str) -> Plan:
    options = {
        "path": str(file),
        "item": "item",
        "dictionary": str(file.with_name("items.txt")),
        "history": 4,
    }
    return Plan(
        scheme=Scheme.SECURE_SUBMODEL,
        cohort=CLIENTS,
        task=TaskPlan(name="interactions", options={**options, **time}),
        groups=GroupsPlan(size=CLIENTS, small=True, period=2),
        union=UnionPlan(max_rows=80),
        simulation=SimulationPlan(rounds=4),
    )


class TaskLab(GroupLab):
    """A leader, and clients of a task with their own data."""

    def __init__(self, bundle: Bundle, folder: Path) -> None:
        self.bundle = bundle
        super().__init__(bundle.plan, folder, CLIENTS)

    def own(self, client: ClientId, journal: Journal) -> tuple[MakeLocal, Train]:
        return task_maker(self.bundle, None, ScriptedEntropy(SEED))(journal, client)

    def first_model(self) -> ServerModel:
        return self.bundle.first_model()

    def examples(self, client: int) -> Examples:
        journal = self.client(client).journal
        found = JournalExamples(journal, name_of(ClientId(client))).load()
        assert found is not None
        return found


@pytest.fixture
def run(file: Path, tmp_path: Path) -> Iterator[Any]:
    """Begin a run over the file as it is then."""
    bundle, begun = pack_task(plan_of(file, time="when"), None), list[TaskLab]()

    def begin() -> TaskLab:
        begun.append(TaskLab(bundle, tmp_path / f"run {len(begun)}"))
        return begun[-1]

    yield begin
    for one in begun:
        one.close()


def all_come(lab: TaskLab, epoch: int) -> None:
    """Again and again, until everybody has delivered this epoch."""
    while lab.leader.next_round < 20:
        for client in lab.clients:
            if (client, epoch) not in lab.sent:
                lab.visit(client, once=True)
        if all((client, epoch) in lab.sent for client in lab.clients):
            return
    raise AssertionError(lab.order())


def test_data_after_the_cut_off_change_no_byte_of_what_is_sent(file: Path, run: Any) -> None:
    """They would move the split, negatives, rows and examples, if they were looked at."""
    sent = []
    for seed, count in ((2, 0), (3, 9), (4, 30)):
        write(file, lines(seed, NOW, count))
        lab = run()
        all_come(lab, 3)
        sent.append(dict(lab.sent))
        assert {epoch for _, epoch in sent[-1]} == {1, 2, 3}, "a union and two updates"
    assert sent[0] == sent[1] == sent[2]


def test_a_member_that_comes_late_has_the_same_data_as_at_the_cut_off(file: Path, run: Any) -> None:
    """Its file has grown between the others' arrival and its own."""
    sent = []
    for later in ([], lines(5, NOW, 12)):
        write(file, [])
        lab = run()
        for client in (*lab.clients, *lab.clients[:-1]):  # all keys, then three unions
            lab.visit(client, once=True)
        assert len(lab.sent) == CLIENTS - 1
        write(file, later)
        all_come(lab, 2)
        sent.append(dict(lab.sent))
        assert len(sent[-1]) == 2 * CLIENTS
    assert sent[0] == sent[1]


def test_what_is_found_later_is_not_of_the_period_even_after_a_restart(
    file: Path, run: Any
) -> None:
    """Examples of a period are on disk: lines that are older than the cut-off may come late."""
    lab = run()
    all_come(lab, 2)
    before = [lab.examples(client) for client in range(CLIENTS)]
    write(file, lines(6, CUTOFF - 60 * EVENTS, 3))
    for client in lab.clients:
        lab.restart(client)
    all_come(lab, 3)
    for client, found in enumerate(before):
        assert same(found, lab.examples(client))


def test_a_new_period_has_later_data_and_what_was_drawn_stays(file: Path, run: Any) -> None:
    lab = run()
    write(file, lines(7, NOW - 100, 8))
    all_come(lab, 2)
    first = [lab.examples(client) for client in range(CLIENTS)]
    lab.now += 4_000
    all_come(lab, 4)
    assert [each.kind.value for each in lab.order()] == ["union", "update", "update", "union"]
    cutoffs = [lab.leader.journal.fact("server", f"cut-off 1 {period}") for period in (1, 2)]
    assert CUTOFF <= int(cutoffs[0]) < CUTOFF + 100 and int(cutoffs[1]) > NOW + 3_000
    for client, before in enumerate(first):
        now = lab.examples(client)
        assert len(now) > len(before) and same(before, now.take(slice(len(before))))
        assert (before[LABEL] == 0.0).any(), "negatives are among what stays"


def same(one: Examples, other: Examples) -> bool:
    return one.fields.keys() == other.fields.keys() and all(
        np.array_equal(one[name], other[name]) for name in one.fields
    )


def test_a_file_that_cannot_be_read_any_more_is_sent_as_zeros(file: Path, run: Any) -> None:
    """A client that left for it would show its data."""
    lab = run()
    file.write_text("nothing of it\n")
    all_come(lab, 3)
    assert not any(one.left for one in map(lab.client, range(CLIENTS)))
    assert all(len(lab.examples(client)) == 0 for client in range(CLIENTS))


def test_periods_of_data_without_times_are_refused_in_a_deployment(file: Path) -> None:
    with pytest.raises(ConfigError, match="have no times") as refused:
        pack_task(plan_of(file), None)
    assert "period = 0" in refused.value.hint
