"""A leader that is somebody's: whatever it does with rounds, no two sums cancel a helper's noise.

It aborts rounds in any phase, skips ids, opens ids again, is set back to an old copy of its state,
kills and restarts both servers, and forwards reports under other ids than their clients sealed.
What the helper has released at the end is the claimed mechanism or a part of it: in each place one
sum at most, and no client that keeps its bound moves them by more than is claimed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from noise_map import impulses, worst
from rounds.population import plan
from services.service_lab import Lab
from services.test_noise_map import INVERSE, lab_of, planned
from tessera.errors import MisuseError, PeerError, ServerFault, TesseraError
from tessera.ids import HELPER, SERVER
from tessera.privacy.dp.correlation import Correlation
from tessera.privacy.dp.participation import Participation
from tessera.rounds import noise_chain
from tessera.services.link import OldCopy

PLACES = 9
BOUND = Participation(rounds=PLACES, most=2, separation=3)
CLAIM = Correlation(INVERSE, BOUND).sensitivity
ACTIONS = ("run", "abort", "skip", "again", "set back", "restart leader", "restart helper")


class Adversary:
    """Random rounds by the leader's word; parties that refuse stay out, and it goes on."""

    def __init__(self, lab: Lab, folder: Path, seed: int) -> None:
        self.lab, self.folder, self.rng = lab, folder, np.random.default_rng(seed)
        self.done: list[str] = []
        self.copies = 0

    def act(self) -> None:
        action = str(self.rng.choice(ACTIONS, p=(0.34, 0.22, 0.1, 0.1, 0.08, 0.08, 0.08)))
        try:
            getattr(self, "_" + action.replace(" ", "_"))()
            self.done.append(action)
        except (OldCopy, MisuseError, ServerFault, PeerError, AssertionError) as refused:
            self.done.append(f"{action}: {type(refused).__name__}")

    @property
    def next(self) -> int:
        return int(self.lab.leader.course.next_round)

    def _run(self) -> None:
        if self.next < PLACES:
            self.lab.run(self.next + 1)

    def _abort(self) -> None:
        if self.next >= PLACES:
            return
        lab = self.lab
        lab.leader.open_round()
        for _ in range(int(self.rng.integers(0, 6))):
            for party in list(lab.parties):
                if party != SERVER and self.rng.random() < 0.8:
                    lab._exchange(party)
        lab.leader.stop("the leader says so")
        self._hear()

    def _hear(self) -> None:
        for party in list(self.lab.parties):
            if party != SERVER:
                self.lab._exchange(party)

    def _skip(self) -> None:
        self.lab.leader.course.next_round = min(PLACES, self.next + 1)

    def _again(self) -> None:
        if not self.next:
            return
        self.lab.leader.course.next_round -= 1
        try:
            self.lab.run(self.next + 1)
        finally:
            self._start(SERVER)

    def _set_back(self) -> None:
        """To a copy that was made some time ago; the first time it is only made."""
        copy, own = self.folder / "copy", self.folder / "lab" / "server"
        self.lab.kill(SERVER)
        if copy.exists() and self.rng.random() < 0.5:
            shutil.rmtree(own)
            shutil.copytree(copy, own)
        else:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(own, copy)
        self.lab.start(SERVER)

    def _restart_leader(self) -> None:
        self._start(SERVER)

    def _restart_helper(self) -> None:
        self._start(HELPER)

    def _start(self, party: str) -> None:
        self.lab.kill(party)
        self.lab.start(party)


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's own noise is no concern of it: it opens what it likes."""
    honest = noise_chain.round_secrets

    def lax(inverse, store, own, round_id, fresh, *, replayed=False):
        if replayed:  # the helper
            return honest(inverse, store, own, round_id, fresh, replayed=True)
        return (own,) * min(inverse.draws, int(round_id) + 1)

    monkeypatch.setattr(noise_chain, "round_secrets", lax)


@pytest.mark.parametrize("seed", range(6))
def test_no_two_sums_cancel_the_helpers_noise(seed, tmp_path, monkeypatch) -> None:
    unchecked(monkeypatch)
    with impulses(monkeypatch) as found:
        lab = lab_of(planned("two-server", "each", PLACES), tmp_path / "lab")
        adversary = Adversary(lab, tmp_path, seed)
        for _ in range(14):
            adversary.act()
    opened = [one for one in found.opened if one.sender == HELPER]
    if opened:
        rows, places = found.matrix(HELPER, killed=True)
        assert places == sorted(set(places)), f"one sum in a place: {adversary.done}"
        assert worst(rows, places, BOUND) <= CLAIM * 1.002, adversary.done
    else:
        assert seed not in (0, 1, 2), adversary.done
    lab.close()


def test_a_report_of_another_id_is_in_no_sum(tmp_path) -> None:
    """Clients seal the id for the helper: what one of them made for a round is no report in the
    next, and the helper releases nothing over it."""
    lab = Lab(plan("two-server", cohort=3, dp=planned("two-server", "each").dp), tmp_path / "lab")
    lab.leader.open_round()
    kept: list[bytes] = []
    helper = lab.parties[HELPER]
    take = helper.take

    def noted(messages):
        kept.extend(message.data for message in messages)
        return take(messages)

    helper.take = noted
    lab.run(1)
    lab.leader.open_round()
    lab._exchange(HELPER)
    refused = 0
    for data in kept:
        try:
            helper.role.receive(SERVER, data)
        except (TesseraError, ServerFault):
            refused += 1
    assert refused and helper.role.phase in {"Left", "left", "handshake", "query", "collect"}
    lab.close()
