"""Noise in recorded views: files are read, everybody takes off what he knows, and the rest is left.

The leader's view is replayed through the server's own code, message by message (`audit/record.py`).
What is left when the sums of data and the noise of those who collude are taken off has at least the
variance that is claimed, with exactly the dropouts that a plan tolerates.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rounds.shops import finished, one_table, shop
from tessera.audit import record
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.noise import add_noise, discrete_gaussian
from tessera.crypto.prg import Label, Stream
from tessera.ids import HELPER, SERVER, ClientId, RoundId
from tessera.learning.compression import signed
from tessera.plan import DPPlan, Plan, Trust, UpdatePlan
from tessera.protocols.two_server.messages import OpenedSum
from tessera.protocols.two_server.write import sums
from tessera.rounds import encode
from tessera.rounds.clipped_vector import noise_stream
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.rounds.root import draw_root
from tessera.simulation import views
from tessera.simulation.faults import Drop

ROWS, COHORT, ROUND = 1500, 9, RoundId(0)
HELD = {c: [c, c + 1, 20] for c in range(COHORT)}
SHARES = DPPlan(unit="user", noise=1.0, trust=Trust.SHARES)
EACH = DPPlan(unit="user", noise=1.0, trust=Trust.EACH)


def planned(scheme: str, section: DPPlan) -> Plan:
    plan = one_table(scheme, ROWS, cohort=COHORT, max_rows=5)
    return replace(plan, dp=section, update=UpdatePlan(levels=2**12))


def recorded(plan: Plan, folder: Path, gone: int = 0) -> RoundFinished | RoundAbort:
    """One round, every party's view in a file of its own; the last `gone` clients fall silent."""
    with views.StreamedViews(folder) as kept:
        drops = (lambda _, cohort: [Drop(c, "collect") for c in cohort[-gone:]]) if gone else None
        (end,) = finished(shop(plan, HELD, faults=drops, views=kept), 1)
    return end


def messages(folder: Path, party: str) -> list:
    return list(record.decoded(views.read(folder / f"{party}.view.jsonl")))


def opened(plan: Plan, folder: Path) -> np.ndarray:
    """What opens of the files of the leader, in integers."""
    seen = record.replayed(plan, ROUND, messages(folder, SERVER))
    assert seen is not None and seen.finished
    return signed(seen.sums[-1].dense, plan.ring)


def own_noise(plan: Plan, client: int) -> np.ndarray:
    """What a client knows of its own noise: its root is its own."""
    root = draw_root(ScriptedEntropy(b"shop"), plan, ROUND, ClientId(client))
    stream = noise_stream(root.secret(Label.SUM_NOISE), ROUND, ClientId(client), "whole")
    vector = plan.noisy_vector
    assert vector is not None
    return discrete_gaussian(vector.deviation).sample(stream, vector.words)


def at_least(left: np.ndarray, claimed: float) -> bool:
    """Within five standard errors of a variance: wrong once in a million."""
    return float(np.var(left)) >= claimed * (1.0 - 5.0 * math.sqrt(2.0 / left.size))


@pytest.mark.parametrize("corrupt", [1, 3])
def test_leader_and_corrupt_clients_are_left_with_the_noise_that_is_claimed(
    corrupt, tmp_path, monkeypatch
) -> None:
    plan = planned("secure-fedavg", replace(SHARES, corrupt=corrupt))
    vector, least = plan.noisy_vector, plan.least_survivors
    assert vector is not None and least < COHORT
    claimed = (plan.dp.noise * vector.bound) ** 2
    end = recorded(plan, tmp_path / "noisy", gone=COHORT - least)
    assert isinstance(end, RoundFinished) and end.survivors == least
    noisy = opened(plan, tmp_path / "noisy")
    # The data's own sum, which an attacker may know: the same round with no noise at all.
    monkeypatch.setattr(encode, "add_noise", lambda ring, deviation, words, stream: words)
    recorded(plan, tmp_path / "bare", gone=COHORT - least)
    bare = opened(plan, tmp_path / "bare")
    monkeypatch.undo()
    left = noisy - bare - sum(own_noise(plan, c) for c in range(corrupt))
    assert at_least(left, claimed)
    assert not at_least(left - own_noise(plan, corrupt), claimed)  # one more: no longer


def test_one_honest_client_without_noise_leaves_less_than_is_claimed(tmp_path, monkeypatch) -> None:
    """The shares are sized for exactly so many: the audit of the views finds one that is silent."""
    plan = planned("secure-fedavg", SHARES)
    vector, least = plan.noisy_vector, plan.least_survivors
    assert vector is not None
    silent = noise_stream(
        draw_root(ScriptedEntropy(b"shop"), plan, ROUND, ClientId(2)).secret(Label.SUM_NOISE),
        ROUND, ClientId(2), "whole",
    )  # fmt: skip
    monkeypatch.setattr(
        encode, "add_noise", lambda r, d, w, s: w if s == silent else add_noise(r, d, w, s)
    )
    recorded(plan, tmp_path / "noisy", gone=COHORT - least)
    noisy = opened(plan, tmp_path / "noisy")
    monkeypatch.setattr(encode, "add_noise", lambda ring, deviation, words, stream: words)
    recorded(plan, tmp_path / "bare", gone=COHORT - least)
    left = noisy - opened(plan, tmp_path / "bare") - own_noise(plan, 0)
    assert not at_least(left, (plan.dp.noise * vector.bound) ** 2)


def test_one_dropout_more_and_the_files_have_no_sum(tmp_path) -> None:
    plan = planned("secure-fedavg", SHARES)
    end = recorded(plan, tmp_path / "few", gone=COHORT - plan.least_survivors + 1)
    assert isinstance(end, RoundAbort)
    seen = record.replayed(plan, ROUND, messages(tmp_path / "few", SERVER))
    assert seen is not None and not seen.finished and not seen.sums


def test_no_client_sends_two_inputs_and_what_is_sent_again_is_the_same(tmp_path) -> None:
    plan = planned("secure-fedavg", SHARES)
    recorded(plan, tmp_path / "whole")
    for client in range(COHORT):
        sent: dict[str, set[bytes]] = {}
        for entry, _ in messages(tmp_path / "whole", f"client-{client}"):
            if entry.direction == "sent":
                sent.setdefault(entry.kind, set()).add(entry.data)
        assert all(len(each) == 1 for each in sent.values())


# --- two servers ----------------------------------------------------------------------------------


def server_noise(plan: Plan, name: str) -> np.ndarray:
    """What a server knows of its own noise, dense part and table."""
    vector = plan.noisy_vector
    assert vector is not None
    secret = draw_root(ScriptedEntropy(b"shop"), plan, ROUND, name).secret(Label.SUM_NOISE)
    source = discrete_gaussian(vector.deviation)
    sizes = (plan.model.dense + 1, ROWS * (plan.tables[0].width + 1))
    return np.concatenate(
        [
            source.sample(Stream.of(secret, Label.SUM_NOISE, 0, name, at), size)
            for at, size in enumerate(sizes)
        ]
    )


def opened_between(plan: Plan, folder: Path) -> np.ndarray:
    """What the helper's file says that the leader opened: every word, dense part first."""
    (told,) = (m for _, m in messages(folder, HELPER) if isinstance(m, OpenedSum))
    width = plan.tables[0].width + 1
    dense = plan.ring.unpack(told.dense, plan.model.dense + 1)
    rows = plan.ring.unpack(told.tables[0].words, ROWS * width)
    return np.concatenate([signed(dense, plan.ring), signed(rows, plan.ring)])


@pytest.mark.parametrize("silent", [None, SERVER, HELPER])
def test_each_server_is_left_with_the_noise_of_the_other(silent, tmp_path, monkeypatch) -> None:
    """With one silent, the claim against *it* still holds, and the other reads the sum."""
    plan, noisy_share = planned("two-server", EACH), sums.with_noise
    vector = plan.noisy_vector
    assert vector is not None
    claimed = (plan.dp.noise * vector.bound) ** 2

    def some(params, share, secret, sender):
        return share if sender == silent else noisy_share(params, share, secret, sender)

    monkeypatch.setattr(sums, "with_noise", some)
    recorded(plan, tmp_path / "noisy")
    monkeypatch.setattr(sums, "with_noise", lambda params, share, secret, sender: share)
    recorded(plan, tmp_path / "bare")
    noise = opened_between(plan, tmp_path / "noisy") - opened_between(plan, tmp_path / "bare")
    for me, other in ((SERVER, HELPER), (HELPER, SERVER)):
        left = noise - (0 if me == silent else server_noise(plan, me))
        assert at_least(left, claimed) is (other != silent)
        if other == silent:
            assert not left.any()
