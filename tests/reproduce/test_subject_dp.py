"""What privacy of people costs: contributions are bounded as accounted for, figures make sense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from papers import subject_dp as work
from papers import subject_dp_shops as data
from papers import subject_dp_trained as users
from papers.cells import Request
from papers.subject_dp_biases import (
    NONE,
    VARIANTS,
    KeyedDraws,
    Learning,
    People,
    Release,
    groups,
    noise_of_sum,
    run,
    setting_of,
)
from papers.subject_dp_shops import DELTA, RETAIL, Records, ShopData, market
from tessera import api
from tessera.ids import RoundId
from tessera.plan import TablePlan
from tessera.privacy.dp.accounting import epsilon as epsilon_of
from tessera.privacy.dp.guarantee import Adjacency, Unit
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.privacy.dp.subjects import Printed, PrintedNoise

SMALL = {"users": 300, "items": 40, "examples": 30, "history": 1}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> ShopData:
    monkeypatch.setattr(data, "RETAIL_SIZE", SMALL)
    return market(RETAIL, each=2, seed=0)


class Silent:
    """Noise that is none, so that only contributions are left."""

    def standard_normal(self, size: int) -> np.ndarray:
        return np.zeros(size)


def without(found: ShopData, gone: np.ndarray) -> ShopData:
    kept = ~gone
    train = found.train
    return replace(
        found,
        train=Records(
            train.item[kept],
            train.person[kept],
            train.subject[kept],
            train.shop[kept],
            train.value[kept],
        ),
    )


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.setting], ids=lambda v: v.name)
def test_whoever_is_left_out_moves_the_sums_by_the_clip_at_most(variant, small: ShopData) -> None:
    setting, how, rng = variant.setting, Learning(clip=0.3, count_clip=0.5), Silent()
    if setting.by_records:
        setting = replace(setting, records=9)
    train, at_home = small.train, setting.unit is Unit.ITEM

    def released(found: ShopData, values: np.ndarray, clip: float) -> np.ndarray:
        release = Release(group=groups(setting, found), noise=1.0, at_home=at_home)
        sums, deviation = release.sums(found, values, clip, rng)
        assert deviation == clip
        if not at_home:
            return sums
        people = People(found, release, replace(how, clip=clip), rng)
        people.counts = np.full(found.people, 1.0)
        own = people.fit(values) * (1.0 + 3.5 * clip if 3.5 * clip > 4.0 else 5.0)
        return np.concatenate([sums, own])

    unit = {Unit.ITEM: np.arange(len(train)), Unit.USER: train.shop}.get(setting.unit, train.person)
    if setting.by_records:
        unit = np.arange(len(train))  # a record moves it by the clip, a person by cap of them
    for values, clip in ((train.value, how.clip), (np.ones(len(train)), how.count_clip)):
        whole = released(small, values, clip)
        for one in unit[[0, len(unit) // 2, -1]]:
            gone = unit == one
            part = released(without(small, gone), values[~gone], clip)
            moved = np.linalg.norm(whole - part)
            assert moved <= clip * (1 + 1e-9)
            assert moved > 0.1 * clip  # and the bound is not for nothing


def test_noise_is_what_the_account_asks_for(small: ShopData) -> None:
    subject = next(v.setting for v in VARIANTS if v.name == "subject")
    assert subject is not None
    noise = noise_of_sum(setting_of(subject, small, 2), 3.0, rounds=3)
    # A person at two shops moves the sum by two clips; counts and three sums are four releases.
    kept = epsilon_of(
        [(GaussianNoise(noise, ((2, 1.0),)), 4)], adjacency=Adjacency.ADD_OR_REMOVE, delta=DELTA
    )
    assert kept == pytest.approx(3.0, rel=1e-3) and kept <= 3.0


def test_more_privacy_costs_more_and_none_costs_nothing(small: ShopData) -> None:
    by_name = {v.name: v for v in VARIANTS}
    free = run(by_name[NONE], small, epsilon=0.0, each=2, seed=0)
    strict = run(by_name["subject"], small, epsilon=0.05, each=2, seed=0)
    loose = run(by_name["subject"], small, epsilon=100.0, each=2, seed=0)
    assert strict < loose <= free + 0.02  # AUC


def test_cells_resume_from_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "RETAIL_SIZE", SMALL)
    monkeypatch.setattr(work, "QUICK_EACH", (1,))
    monkeypatch.setattr(work, "EPSILONS", (3.0,))
    monkeypatch.setattr(PrintedNoise, "sigma", lambda self, size: float(size))
    fast = tuple(v for v in VARIANTS if v.printed is not Printed.LOCAL and v.name != "user")
    monkeypatch.setattr(work, "VARIANTS", fast)
    request = Request(parts=("utility",), cache=tmp_path, quick=True, sets=(RETAIL,))
    found = work.cells(request)
    rows = [cell.row for cell in found]
    assert rows[:4] == [
        "mean of all",
        "mean of the item",
        "mean of the person at the shop",
        "sum of means",
    ]
    assert rows[4:] == [v.name for v in fast] and all(cell.ours is not None for cell in found)
    page = (tmp_path / work.PAGE).read_text()
    assert "<svg" in page and "CentralSubDP, as printed" in page

    def never(*_: object, **__: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(work, "run", never)
    monkeypatch.setattr(work, "market", never)
    assert work.cells(request) == found


@pytest.mark.slow
def test_the_papers_noise_and_what_it_keeps(tmp_path: Path) -> None:
    found = work.cells(Request(parts=("noise",), cache=tmp_path, quick=True))
    ours = [cell.ours for cell in found]
    assert ours[:4] == pytest.approx([0.735, 1.04, 1.69, 3.12], rel=5e-3)
    assert ours[4:6] == pytest.approx([5.17, 0.735], rel=5e-3)
    assert all(cell.ours > 10 * float(cell.row.split()[1]) for cell in found[6:])


def test_draws_of_a_run_are_its_own_and_have_the_moments_they_should() -> None:
    one, again, other = KeyedDraws.of(0, 1), KeyedDraws.of(0, 1), KeyedDraws.of(0, 2)
    noise, coins = one.standard_normal(100_000), one.random(100_000)
    np.testing.assert_array_equal(noise, again.standard_normal(100_000))
    assert (noise != other.standard_normal(100_000)).mean() > 0.99
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1.0) < 0.02
    assert abs((np.abs(noise) > 2.0).mean() - 0.0455) < 0.005
    assert 0.0 <= coins.min() and coins.max() < 1.0 and abs(coins.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(noise, coins)[0, 1]) < 0.02


def test_noise_per_user_is_measured_by_the_real_trainer_and_resumed(tmp_path, monkeypatch):
    """A small shop: selected rows, every row, no noise; and nothing is measured twice."""
    size = {"users": 60, "items": 80, "categories": 4, "history": 1, "examples": 20}
    monkeypatch.setattr(users, "SHOP_SIZE", size)
    users.loaded.cache_clear()
    request = Request(parts=("users",), cache=tmp_path, quick=True, sets=(users.SHOP,))
    found = work.cells(request)
    rows = {(cell.row, cell.column) for cell in found}
    assert ("selected rows, over 2 deviations", "epsilon 3") in rows
    assert ("sum", "no noise") in rows and len({cell.table for cell in found}) == 1
    assert all(0.0 < cell.ours < 1.0 and cell.unit == "AUC" for cell in found)
    calls = []
    monkeypatch.setattr(api, "simulate", lambda *_, **__: calls.append(1))
    assert work.cells(request) == found and not calls
    assert "per user" in (tmp_path / "subject-dp.html").read_text()
    users.loaded.cache_clear()


@pytest.mark.parametrize("clients", [943, 6_040])
def test_a_sum_over_everybody_takes_all_clients_of_either_set(clients: int) -> None:
    """MovieLens 1M has more clients than the complete graph takes."""
    for line in users.TRUSTS:
        plan = line.plan(clients, 0.0, seed=0)
        whole = replace(plan, tables=(TablePlan(name="items", rows=1_000, width=1),))
        assert whole.secagg(RoundId(0)).cohort == clients
