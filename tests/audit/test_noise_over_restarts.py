"""Noise over long transcripts: rounds that are given up and tried again, parties that restart.

An observer who holds all that was ever recorded subtracts sums from each other. If a noise were
ever added to two of them, the difference would be data alone; if one release were ever drawn anew,
the two would average to less noise than was charged for. Both are tried on every pair, from files
(`--record-views`), under the system's entropy: a party that is woken and drew again would draw
something else.
"""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rounds.shops
from rounds.shops import one_table, shop
from runs import raters
from tessera.audit import record
from tessera.crypto.entropy import RootedEntropy, SystemEntropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.data.examples import Examples
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.learning.compression import signed
from tessera.plan import DPPlan, Plan, SimulationPlan, Trust, UpdatePlan
from tessera.protocols.two_server.messages import OpenedSum
from tessera.protocols.two_server.write import sums
from tessera.rounds import noise as kinds
from tessera.rounds import schemes
from tessera.rounds.course import client_role
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.rounds.noise import noise_of
from tessera.rounds.party import ClientRoundSetup, StoredRole
from tessera.runs.folder import ROOT
from tessera.runs.training import Training, complete
from tessera.simulation import views
from tessera.simulation.faults import Drop, Fault, dropout_places
from tessera.simulation.federation import Federation

ROWS, COHORT, ROUNDS = 300, 9, 24
HELD = {c: [c, c + 1, 20 + c] for c in range(COHORT)}
SHARES = DPPlan(unit="user", noise=1.0, trust=Trust.SHARES)
LISTED = replace(SHARES, rows="list", row_list="goods 0-199")
EACH = DPPlan(unit="user", noise=1.0, trust=Trust.EACH)
WAYS = [
    ("secure-fedavg", SHARES),
    pytest.param("secure-submodel", LISTED, marks=pytest.mark.slow),
    pytest.param("two-server", EACH, marks=pytest.mark.slow),
]
GONE = ClientId(4)
"""Missing in every third round: what sums with and without it differ by is its update."""


def planned(scheme: str, section: DPPlan) -> Plan:
    plan = one_table(scheme, ROWS, cohort=COHORT, max_rows=5)
    return replace(plan, dp=section, update=UpdatePlan(levels=2**12))


def claimed(plan: Plan) -> float:
    vector = plan.noisy_vector
    assert vector is not None
    return float((noise_of(plan).dp.noise * vector.bound) ** 2)


# --- parties that restart -------------------------------------------------------------------------


class Restarting:
    """A role that is put to bytes and woken before every message; it may draw nothing again."""

    def __init__(self, role: Any, wake: Callable[[StoredRole], Any]) -> None:
        self._role, self._wake = role, wake

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)

    def farewell(self) -> Any:
        return self._role.farewell()

    def receive(self, sender: Party, data: bytes) -> Any:
        self._role = self._wake(StoredRole(self._role.snapshot(), dict(self._role.messages)))
        return self._role.receive(sender, data)


class RestartingParties(Federation):
    """Everybody restarts before every message. All entropy is the system's: never the same."""

    def _signers(self, part: Any) -> Any:
        self.signing = super()._signers(part)
        return self.signing

    def _client(
        self, drawn: Any, part: Any, name: ClientId, signers: Any, ideal: Any = None
    ) -> Any:
        def wake(stored: StoredRole) -> Any:
            setup = ClientRoundSetup(
                plan=part.plan,
                round_id=drawn.round_id,
                party=name,
                local=self.participants[part.named[name]].local,
                entropy=SystemEntropy(),
                identity=signers[name],
                servers=None if self.two_server is None else self.two_server.servers,
            )
            return client_role(setup, stored)

        return Restarting(super()._client(drawn, part, name, signers, ideal), wake)

    def _subcohort(self, drawn: Any, part: Any, faults: Any, *, ideal: bool) -> Any:
        made = super()._subcohort(drawn, part, faults, ideal=ideal)
        one = self.signing[next(iter(part.named))]
        made.server = Restarting(
            made.server, lambda stored: self.course.server(drawn, part, one, stored)
        )
        if made.helper is not None:
            course, directory = self.helper_course, one.directory
            assert course is not None
            made.helper = Restarting(
                made.helper, lambda stored: course.helper(drawn.round_id, directory, stored)
            )
        return made


# --- a transcript of many rounds ------------------------------------------------------------------


def faults(plan: Plan) -> Callable[[RoundId, Any], list[Fault]]:
    """Every fourth round is given up, in a phase that changes; it is tried again in the next."""
    places = dropout_places(plan)

    def script(round_id: RoundId, cohort: Any) -> list[Fault]:
        if round_id % 4 == 3:
            phase, stage = places[round_id // 4 % len(places)]
            return [Drop(c, phase, stage=stage) for c in cohort[: COHORT - 1]]
        return [Drop(GONE, "collect")] if round_id % 3 == 2 else []

    return script


@dataclass
class Transcript:
    """What a folder of views says: of each finished round who is in its sum, and the sum."""

    opened: dict[int, tuple[frozenset[int], np.ndarray]]
    given_up: list[int]
    sent: dict[tuple[Party, int, str], set[bytes]]


def recorded(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Transcript:
    monkeypatch.setattr(rounds.shops, "Federation", RestartingParties)
    monkeypatch.setattr(rounds.shops, "ScriptedEntropy", lambda _: SystemEntropy())
    with views.StreamedViews(folder) as kept:
        events = list(shop(plan, HELD, faults=faults(plan), views=kept).run(ROUNDS))
    given_up = [e.round_id for e in events if isinstance(e, RoundAbort)]
    assert len(given_up) == ROUNDS // 4
    survivors = {e.round_id: e.survivors for e in events if isinstance(e, RoundFinished)}
    opened = between(plan, folder) if schemes.of(plan).two_servers else masked(plan, folder)
    assert {r: len(who) for r, (who, _) in opened.items()} == survivors
    sent: dict[tuple[Party, int, str], set[bytes]] = defaultdict(set)
    for path in folder.glob("*.view.jsonl"):
        for entry, message in record.decoded(views.read(path)):
            own = path.name.startswith("client-") or entry.kind == "SumShare"
            if entry.direction == "sent" and own:  # servers pass on what several clients say
                key = (path.name, record._round_of(message), f"{entry.kind} to {entry.other}")
                sent[key].add(entry.data)
    return Transcript(opened, given_up, sent)


def masked(plan: Plan, folder: Path) -> dict[int, tuple[frozenset[int], np.ndarray]]:
    """By the leader's file, replayed through the server's own code."""
    found = {}
    for round_id, seen in record._by_round(folder / f"{SERVER}.view.jsonl"):
        for view in record.replays(plan, round_id, seen):
            if view.finished:
                total = view.sums[-1]
                who = frozenset(int(c) for c in total.survivors)
                found[int(round_id)] = who, signed(total.dense, plan.ring)
            else:
                assert not view.sums  # a round that is given up opens nothing
    return found


def between(plan: Plan, folder: Path) -> dict[int, tuple[frozenset[int], np.ndarray]]:
    """By the helper's file: what the leader opened to it."""
    found, width = {}, plan.tables[0].width + 1
    for round_id, seen in record._by_round(folder / f"{HELPER}.view.jsonl"):
        for _, message in seen:
            if isinstance(message, OpenedSum):
                dense = plan.ring.unpack(message.dense, plan.model.dense + 1)
                rows = plan.ring.unpack(message.tables[0].words, ROWS * width)
                words = np.concatenate([signed(dense, plan.ring), signed(rows, plan.ring)])
                gone = {int(GONE)} if round_id % 3 == 2 else set()
                found[int(round_id)] = frozenset(range(COHORT)) - gone, words
    return found


def least_left(opened: dict[int, tuple[frozenset[int], np.ndarray]]) -> float:
    """The least noise of one sum that any difference of two over the same clients has left."""
    found = []
    items = list(opened.values())
    for at, (who, words) in enumerate(items):
        for other, more in items[:at]:
            if who == other:
                found.append(float(np.var(words - more)) / 2.0)
    assert len(found) > 40
    return min(found)


def enough(variance: float, claim: float, words: int) -> bool:
    """Within six standard errors of a variance: of a hundred pairs none is below by chance."""
    return variance >= claim * (1.0 - 6.0 * math.sqrt(2.0 / words))


@pytest.mark.parametrize(("scheme", "section"), WAYS)
def test_no_noise_is_used_twice_however_often_rounds_are_given_up_and_clients_restart(
    scheme: str, section: DPPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(scheme, section)
    found = recorded(plan, tmp_path, monkeypatch)
    words = next(iter(found.opened.values()))[1].size
    assert enough(least_left(found.opened), claimed(plan), words)
    # And nobody says two things in one place: then there is nothing to average either.
    assert all(len(each) == 1 for each in found.sent.values())
    assert not set(found.given_up) & set(found.opened)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "section"), WAYS)
def test_the_observer_reads_an_update_if_noise_does_not_follow_from_the_round(
    scheme: str, section: DPPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, real = planned(scheme, section), sums.with_noise
    once = RootedEntropy(Secret(bytes(32)))

    def same_stream(secret: Secret, round_id: RoundId, sender: Party, part: str) -> Any:
        return stream(once.secret(Label.SUM_NOISE, sender), RoundId(0), sender, part)

    def same_noise(params: Any, share: Any, secrets: Any, sender: Party) -> Any:
        first = replace(params, round_id=RoundId(0))
        return real(first, share, (once.secret(Label.SUM_NOISE, sender),), sender)

    stream = kinds.noise_stream
    monkeypatch.setattr(kinds, "noise_stream", same_stream)
    monkeypatch.setattr(sums, "with_noise", same_noise)
    found = recorded(plan, tmp_path, monkeypatch)
    assert least_left(found.opened) < 0.01 * claimed(plan)
    if section is not EACH:
        return  # its own share of the noise went with the client that was missing
    # Between two servers the noise is gone from sums with and without a client: its update is left.
    whole = np.mean([w for who, w in found.opened.values() if int(GONE) in who], axis=0)
    less = np.mean([w for who, w in found.opened.values() if int(GONE) not in who], axis=0)
    update = whole - less
    touched = np.abs(update[plan.model.dense + 1 :].reshape(ROWS, -1)).max(axis=1) > 20.0
    assert set(np.flatnonzero(touched)) == set(HELD[int(GONE)])


# --- a run that goes on ---------------------------------------------------------------------------

BIASES = {"factors": 0, "mask": "linear", "penalty": 1.0, "refit": True}


def selected_plan(task: Any) -> Plan:
    plan = Plan(
        scheme="secure-submodel",
        cohort=20,
        simulation=SimulationPlan(rounds=4, evaluate_every=4),
        update=UpdatePlan(levels=2**12),
        dp=DPPlan(unit="user", noise=0.2, trust="shares", rows="selected", threshold=-10.0),
    )
    return complete(plan, task)


@dataclass
class Continued:
    """A run from some checkpoint on: what opened, by round, and the popularity of rows."""

    opened: dict[int, np.ndarray]
    marks: np.ndarray
    plan: Plan


def continued(task: Any, plan: Plan, folder: Path, rounds: int) -> Continued:
    seen = views.Views()
    with Training(task, plan, folder=folder, views=seen) as running:
        events = list(running.run(rounds))
        assert all(not isinstance(e, RoundAbort) for e in events)
        plan, popularity = running.plan, running.popularity
        assert popularity is not None
    by_round = defaultdict(list)
    for entry, message in record.decoded(seen.by_party[SERVER]):
        by_round[record._round_of(message)].append((entry, message))
    opened = {
        round_id: signed(view.sums[-1].dense, plan.ring)
        for round_id, each in by_round.items()
        for view in record.replays(plan, RoundId(round_id), each)
    }
    return Continued(opened, popularity.marks["items"], plan)


def other_data(task: Any) -> Any:
    """The same films, of which one person's ratings are others."""
    train: Examples = task.data.train
    ratings = train["label"].copy()
    first = slice(*task.data.offsets[:2])
    ratings[first] = 6.0 - ratings[first]
    return replace(task, data=replace(task.data, train=train.with_field("label", ratings)))


@pytest.mark.slow
def test_a_run_that_goes_on_from_an_old_checkpoint_says_what_it_said(tmp_path: Path) -> None:
    """Killed two rounds after its last checkpoint: rounds are repeated, and nothing is new."""
    task = raters.task(**BIASES)
    plan = selected_plan(task)
    first = continued(task, plan, tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.copytree(tmp_path / "run", tmp_path / "lost")
    killed = continued(task, plan, tmp_path / "run", 4)
    again = continued(task, plan, tmp_path / "copy", 4)
    assert killed.opened.keys() == again.opened.keys() == {2, 3}
    for round_id, words in killed.opened.items():
        np.testing.assert_array_equal(words, again.opened[round_id])
    np.testing.assert_array_equal(first.marks, again.marks)  # the popularity is released once
    # Without the stored root noise is drawn again, over the same updates and the same marks, for
    # one charge: two releases average to half of its variance.
    (tmp_path / "lost" / ROOT).unlink()
    fresh = continued(task, plan, tmp_path / "lost", 4)
    vector, size = again.plan.noisy_vector, fresh.opened[2].size
    assert vector is not None and fresh.opened[2].size == again.opened[2].size
    whole = vector.deviation**2 * 20  # of all who add a share
    apart = float(np.var(again.opened[2] - fresh.opened[2]))
    assert apart == pytest.approx(2.0 * whole, rel=6.0 * math.sqrt(2.0 / size))
    assert not np.array_equal(first.marks, fresh.marks)


@pytest.mark.slow
def test_over_other_data_the_same_noise_would_show_the_difference(tmp_path: Path) -> None:
    """Why `simulate` refuses to go on with other data (tests/runs/test_noisy_training.py)."""
    task = raters.task(**BIASES)
    plan = selected_plan(task)
    continued(task, plan, tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    there = continued(task, plan, tmp_path / "run", 3)
    other = continued(other_data(task), plan, tmp_path / "copy", 3)
    vector = there.plan.noisy_vector
    assert vector is not None
    apart = there.opened[2] - other.opened[2]
    # Nothing of the noise is left of it: all that moved are the words of one person's films.
    assert np.abs(apart).max() < 2 * vector.bound
    own = np.unique(task.data.of(0)["item"])
    moved = np.flatnonzero(apart) - there.plan.model.dense
    assert 5 < len(moved) and set(moved.tolist()) <= set(own.tolist())
