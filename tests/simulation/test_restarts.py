"""A whole federation is restarted after every message, and the model is that of one which is not.

All parties are put to bytes, dropped, and woken from the bytes alone in another process: two that
take turns, or a new one each time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Final

import pytest

import tessera
from rounds.population import federation, plan
from simulation import restarted
from simulation.restarted import Json, Step, model_digest
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.ids import SERVER, ClientId
from tessera.plan import DPPlan, Plan, Trust, TwoServerPlan
from tessera.rounds.events import RoundFinished
from tessera.simulation.faults import Drop

GONE: Final = ClientId(3)
FINISHED: Final = {"done", "aborted"}
PATH: Final = os.pathsep.join(
    str(p) for p in (Path(tessera.__file__).parents[1], Path(__file__).parents[1])
)

SHARES: Final = DPPlan(unit="user", noise=1.0, trust=Trust.SHARES)
EACH: Final = DPPlan(unit="user", noise=1.0, trust=Trust.EACH)
CASES: Final = {
    "fedavg": (plan("fedavg", cohort=5), ("collect", 0)),
    "submodel": (plan("submodel", cohort=5), ("collect", 0)),
    "secure-fedavg": (plan("secure-fedavg", cohort=5), ("collect", 0)),
    "secure-submodel": (plan("secure-submodel", cohort=5), ("collect", 1)),
    "secure-submodel, active": (
        plan("secure-submodel", cohort=5, security={"threat": "active"}),
        ("reveal", 0),
    ),
    "two-server": (
        plan("two-server", cohort=5, two_server=TwoServerPlan(domain="whole", write="dpf")),
        ("collect", 0),
    ),
    "two-server, keys that last": (
        plan(
            "two-server",
            cohort=5,
            two_server=TwoServerPlan(domain="whole", write="dpf", key_rounds=2),
        ),
        ("collect", 0),
    ),
    "secure-fedavg, noise in shares": (
        plan("secure-fedavg", cohort=5, dp=SHARES),
        ("collect", 0),
    ),
    "two-server, noise of each": (
        plan("two-server", cohort=5, two_server=TwoServerPlan(domain="whole"), dp=EACH),
        ("collect", 0),
    ),
    "two-server, over a union": (
        plan("two-server", cohort=5, two_server=TwoServerPlan(domain="union")),
        ("collect", 1),
    ),
}


class Process:
    """Another process, which keeps nothing between two steps."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "simulation.restarted"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PATH},
        )

    def step(self, stored: Json, event: Json) -> Json:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps({"stored": stored, "event": event}) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        assert line, "the process ended"
        found: Json = json.loads(line)
        return found

    def close(self) -> None:
        self._child.communicate(timeout=60)


@contextmanager
def two_that_take_turns() -> Iterator[Step]:
    processes = [Process(), Process()]
    turns = cycle(processes)
    try:
        yield lambda stored, event: next(turns).step(stored, event)
    finally:
        for each in processes:
            each.close()


@contextmanager
def a_new_one_each_time() -> Iterator[Step]:
    def step(stored: Json, event: Json) -> Json:
        process = Process()
        try:
            return process.step(stored, event)
        finally:
            process.close()

    yield step


def restarted_rounds(
    settings: Plan, place: tuple[str, int], rounds: int, step: Step
) -> tuple[str, Json]:
    """The model's digest after these rounds, in each of which one client drops out; and what is
    stored in the end."""
    stored: Json = {"plan": settings.to_toml(), "round": 0}
    after: Json = {}
    queue: deque[tuple[str, str, str]] = deque()

    def do(what: str, party: str = SERVER, **more: str) -> None:
        nonlocal stored, after
        after = step(stored, {"do": what, "party": party, **more})
        stored = after["stored"]
        for to, sent in after["out"]:
            if party == SERVER or not gone(party):
                queue.append((party, to, sent))

    def gone(party: str) -> bool:
        here = (after["phase"], visits[after["phase"]])
        if party == str(GONE) and here == place:
            left.add(party)
        return party in left

    for round_id in range(rounds):
        stored["round"], stored["snapshots"], stored["messages"] = round_id, {}, {}
        visits: Counter[str] = Counter()
        left: set[str] = set()
        do("invite")
        for client in range(settings.cohort):
            do("start", str(client))
        do("start")
        while after["phase"] not in FINISHED:
            while queue:
                sender, to, sent = queue.popleft()
                if to not in left:
                    do("deliver", to, sender=sender, data=sent)
                if not queue:
                    for client in after["pending"]:
                        if client not in left:
                            do("train", client)
            phase = after["phase"]
            if phase in FINISHED:  # by a message of the helper's, and not by the clock
                break
            do("close")
            visits[phase] += 1
            assert not after["aborted"]
        do("end")
        while queue:
            sender, to, sent = queue.popleft()
            do("deliver", to, sender=sender, data=sent)
        do("merge")
    return after["model"], stored


def uninterrupted(settings: Plan, place: tuple[str, int], rounds: int) -> tuple[str, list[int]]:
    """The same rounds in one process: the model's digest, and what each client was charged."""
    phase, stage = place
    fed = federation(
        settings,
        entropy_seed=restarted.SEED,
        faults=lambda *_: [Drop(GONE, phase, stage=stage)],
    )
    signers = identities(list(fed.participants), ScriptedEntropy(restarted.SEED), "tessera")
    for client, participant in fed.participants.items():
        participant.identity = signers[client]
    ends = [e for e in fed.run(rounds) if isinstance(e, RoundFinished)]
    assert [e.survivors for e in ends] == [settings.cohort - 1] * rounds
    charged = [len(p.local.ledger.entries) for p in fed.participants.values()]
    return model_digest(fed.dense, fed.tables), charged


@pytest.mark.parametrize("case", CASES)
def test_a_federation_restarted_after_every_message_has_the_same_model(case: str) -> None:
    settings, place = CASES[case]
    with two_that_take_turns() as step:
        model, stored = restarted_rounds(settings, place, 3, step)
    whole, charged = uninterrupted(settings, place, 3)
    assert model == whole
    assert [len(stored["locals"][str(c)]["ledger"]) for c in range(settings.cohort)] == charged
    assert not stored["messages"]
    for party, snapshot in stored["snapshots"].items():
        assert len(restarted.data(snapshot)) < 1000, f"{party} keeps a tombstone only"


@pytest.mark.slow
def test_every_step_in_a_new_process_is_the_same_too() -> None:
    settings, place = CASES["secure-fedavg"]
    with a_new_one_each_time() as step:
        model, _ = restarted_rounds(settings, place, 1, step)
    assert model == uninterrupted(settings, place, 1)[0]
