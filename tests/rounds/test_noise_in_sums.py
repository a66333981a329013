"""Noise inside the sums: what opens, and what is left when everybody takes off what he knows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rounds.shops import finished, model_of, one_table, shop
from tessera.crypto.entropy import RootedEntropy, ScriptedEntropy
from tessera.crypto.noise import discrete_gaussian
from tessera.crypto.prg import Label, Stream
from tessera.ids import HELPER, SERVER, ClientId, RoundId
from tessera.learning.compression import signed
from tessera.plan import DPPlan, Plan, SimulationPlan, Trust, UpdatePlan
from tessera.privacy.dp.guarantee import Observer, Unit
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.dp.mechanism import GaussianShares
from tessera.protocols.two_server.write import sums
from tessera.rounds import encode
from tessera.rounds.clipped_vector import noise_stream
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.rounds.noise import noise_of
from tessera.rounds.root import draw_root
from tessera.simulation.faults import Drop

ROWS, COHORT = 30, 9
HELD = {c: [c, c + 1, 20] for c in range(COHORT)}
SHARES = DPPlan(unit="user", noise=1.0, trust=Trust.SHARES)
LISTED = replace(SHARES, rows="list", row_list="goods 0-8, 20")
WAYS = [("secure-fedavg", SHARES), ("secure-submodel", LISTED)]
IDEAL = SimulationPlan(crypto="none")


def planned(scheme: str, section: DPPlan, **more) -> Plan:
    return replace(
        one_table(scheme, ROWS, cohort=COHORT, **more), dp=section, update=UpdatePlan(levels=2**12)
    )


@pytest.mark.parametrize("counts", [0.0, 0.05])
@pytest.mark.parametrize(("scheme", "section"), WAYS)
def test_shares_under_masks_equal_the_ideal_round_to_the_bit(scheme, section, counts) -> None:
    plan = planned(scheme, replace(section, counts=counts))

    def faults(_, cohort):
        return [Drop(cohort[2], "collect")]

    models = []
    for each in (plan, replace(plan, simulation=IDEAL)):
        fed = shop(each, HELD, faults=faults)
        ends = finished(fed, 2)
        assert all(isinstance(e, RoundFinished) and e.survivors == COHORT - 1 for e in ends)
        models.append(model_of(fed))
    assert models[0] == models[1]


def share_of(plan: Plan, client: int, seed: bytes = b"shop") -> np.ndarray:
    """The share of one client in round 0, as it follows from its root."""
    root = draw_root(ScriptedEntropy(seed), plan, RoundId(0), ClientId(client))
    stream = noise_stream(root.secret(Label.SUM_NOISE), RoundId(0), ClientId(client), "whole")
    assert plan.noisy_vector is not None
    return discrete_gaussian(plan.noisy_vector.deviation).sample(stream, plan.noisy_vector.words)


def opened(plan: Plan, monkeypatch: pytest.MonkeyPatch, **more) -> np.ndarray:
    """The opened sum of one round, in integers."""
    found: list[np.ndarray] = []
    means = encode.means

    def recording(plan, total, **given):
        found.append(signed(total.dense, plan.ring))
        return means(plan, total, **given)

    monkeypatch.setattr(encode, "means", recording)
    finished(shop(plan, HELD, **more), 1)
    monkeypatch.undo()
    return found[-1]


@pytest.mark.parametrize(("scheme", "section"), WAYS)
def test_what_opens_is_the_clipped_sum_plus_every_survivors_noise(
    scheme, section, monkeypatch
) -> None:
    """And leader and corrupt clients, who take off what they know, are left with the noise of at
    least as many as the account has."""
    plan = planned(scheme, section)
    vector = plan.noisy_vector
    assert vector is not None
    noisy = opened(plan, monkeypatch)
    monkeypatch.setattr(encode, "add_noise", lambda ring, deviation, words, stream: words)
    bare = opened(plan, monkeypatch)
    assert np.abs(bare).max() <= COHORT * vector.bound
    drawn = [share_of(plan, c) for c in range(COHORT)]
    assert (noisy - bare == sum(drawn)).all()


@pytest.mark.parametrize("corrupt", [1, 3])
def test_with_all_tolerated_dropouts_the_rest_has_the_variance_that_is_claimed(corrupt) -> None:
    plan = planned("secure-fedavg", replace(SHARES, corrupt=corrupt))
    vector, least = plan.noisy_vector, plan.least_survivors
    assert vector is not None and vector.sources == least - corrupt < COHORT
    claimed = (plan.dp.noise * vector.bound) ** 2
    unknown = [
        sum(share_of(plan, c, seed.to_bytes(2)) for c in range(least - corrupt))
        for seed in range(60)
    ]
    spread = float(np.var(np.concatenate(unknown)))
    # A sample variance of n normal values has a standard error of sqrt(2 / n).
    n = 60 * vector.words
    assert spread == pytest.approx(claimed, rel=5 * math.sqrt(2 / n))
    fewer = np.concatenate(unknown) - np.concatenate(
        [share_of(plan, 0, seed.to_bytes(2)) for seed in range(60)]
    )
    assert float(np.var(fewer)) < claimed * (1 - 5 * math.sqrt(2 / n))


def test_with_fewer_survivors_nothing_opens_and_the_charge_stays() -> None:
    plan = planned("secure-fedavg", SHARES)
    gone = COHORT - plan.least_survivors + 1
    fed = shop(plan, HELD, faults=lambda _, cohort: [Drop(c, "collect") for c in cohort[:gone]])
    before = model_of(fed)
    (end,) = finished(fed, 1)
    assert isinstance(end, RoundAbort) and model_of(fed) == before
    for participant in fed.participants.values():
        assert len(participant.local.ledger.entries) == 1


def test_an_update_that_is_not_finite_is_zeros_and_its_noise(monkeypatch) -> None:
    plan = planned("secure-fedavg", SHARES)
    sick = {ClientId(3): lambda u: replace(u, dense=np.full_like(u.dense, np.nan))}
    with_nan = opened(plan, monkeypatch, breaks=sick)
    nothing = opened(plan, monkeypatch, breaks={ClientId(3): lambda u: None})
    assert (with_nan == nothing).all()
    assert not (with_nan == opened(plan, monkeypatch)).all()


@pytest.mark.parametrize("survivors", range(7, COHORT + 1))
def test_no_admitted_set_of_survivors_has_a_higher_epsilon_than_is_printed(survivors) -> None:
    plan = planned("secure-fedavg", SHARES)
    vector = plan.noisy_vector
    assert vector is not None and plan.least_survivors == 7
    ledger = Ledger(bounds=noise_of(plan).bounds)
    for event in noise_of(plan).events(RoundId(0)):
        ledger.spend(event, reason="a round")
    told = ledger.guarantee(unit=Unit.USER, against=Observer.CLIENTS, delta=1e-5)
    there = GaussianShares(
        deviation=vector.deviation,
        shares=survivors - plan.corrupt_shares,
        moves=vector.bound,
        words=vector.words,
    )
    assert there.concentrated <= noise_of(plan).setting.in_the_sum(Observer.CLIENTS).concentrated
    assert told.trust.label == "distributed" and "6 of the survivors" in told.assumption
    assert not told.condition


def test_a_person_at_several_clients_moves_twice_each() -> None:
    section = replace(SHARES, unit="subject", clients_per_subject=3)
    mechanism = noise_of(planned("secure-fedavg", section)).setting.in_the_sum(Observer.LEADER)
    user = noise_of(planned("secure-fedavg", SHARES)).setting.in_the_sum(Observer.LEADER)
    assert mechanism.moves == 6 * user.moves and mechanism.deviation == user.deviation


def test_a_woken_client_says_the_same() -> None:
    root = RootedEntropy(ScriptedEntropy(b"x").secret(Label.PARTY_ROOT))
    one = noise_stream(root.secret(Label.SUM_NOISE), RoundId(1), ClientId(2), "whole")
    assert one == noise_stream(root.secret(Label.SUM_NOISE), RoundId(1), ClientId(2), "whole")
    assert one != noise_stream(root.secret(Label.SUM_NOISE), RoundId(2), ClientId(2), "whole")
    assert one != noise_stream(root.secret(Label.SUM_NOISE), RoundId(1), ClientId(3), "whole")


# --- two servers ----------------------------------------------------------------------------------

EACH = DPPlan(unit="user", noise=1.0, trust=Trust.EACH)


def each_plan(**more) -> Plan:
    return planned("two-server", replace(EACH, **more), max_rows=5)


def noise_of_server(plan: Plan, name: str) -> list[np.ndarray]:
    """What a server adds in round 0, to the dense part and to the table."""
    assert plan.noisy_vector is not None
    root = draw_root(ScriptedEntropy(b"shop"), plan, RoundId(0), name)
    source = discrete_gaussian(plan.noisy_vector.deviation)
    sizes = (plan.model.dense + 1, ROWS * (plan.tables[0].width + 1))
    return [
        source.sample(Stream.of(root.secret(Label.SUM_NOISE), Label.SUM_NOISE, 0, name, at), size)
        for at, size in enumerate(sizes)
    ]


def opened_by_two(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    found: list[list[np.ndarray]] = []
    means = encode.means

    def recording(plan, total, **given):
        part = total.tables[plan.table_id("goods")]
        rows = np.zeros((ROWS, part.words.shape[1]), dtype=np.int64)
        rows[part.rows] = signed(part.words, plan.ring)
        found.append([signed(total.dense, plan.ring), rows.ravel(), len(part.rows)])
        return means(plan, total, **given)

    monkeypatch.setattr(encode, "means", recording)
    (end,) = finished(shop(plan, HELD), 1)
    assert isinstance(end, RoundFinished)
    monkeypatch.undo()
    return found[-1]


@pytest.mark.parametrize("counts", [0.0, 0.05])
def test_two_servers_open_the_sum_plus_both_noises_over_every_row(counts, monkeypatch) -> None:
    plan = each_plan(counts=counts)
    noisy = opened_by_two(plan, monkeypatch)
    assert noisy[2] == ROWS
    monkeypatch.setattr(sums, "with_noise", lambda params, share, secret, sender: share)
    bare = opened_by_two(plan, monkeypatch)
    assert np.abs(bare[1]).max() > 0 and not bare[1].reshape(ROWS, -1)[12:20].any()
    drawn = [noise_of_server(plan, name) for name in (SERVER, HELPER)]
    for at in range(2):
        assert (noisy[at] - bare[at] == drawn[0][at] + drawn[1][at]).all()
        for one in drawn:  # the other's is the whole noise
            n = one[at].size
            assert np.var(one[at]) == pytest.approx(
                plan.noisy_vector.bound**2, rel=5 * math.sqrt(2 / n)
            )


def test_an_ideal_round_between_two_servers_has_their_noise_to_the_bit() -> None:
    models = []
    for crypto in ("every", "none"):
        fed = shop(replace(each_plan(), simulation=SimulationPlan(crypto=crypto)), HELD)
        assert all(isinstance(e, RoundFinished) for e in finished(fed, 2))
        models.append(model_of(fed))
    assert models[0] == models[1]


def test_against_either_server_the_number_has_one_noise_and_names_the_other() -> None:
    plan = each_plan()
    ledger = noise_of(plan).setting.ledger(1)
    for observer in Observer:
        told = ledger.guarantee(unit=Unit.USER, against=observer, delta=1e-5)
        assert 0.0 < told.epsilon < 10.0 and not told.condition
        assert told.trust.label == "one of two servers" and "collude" in told.assumption
