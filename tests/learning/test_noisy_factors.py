"""Factors at shops with noise per person: a person's part is clipped, and its own row is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch.func import functional_call

from tessera.audit.canary_training import Guessing, likelihood_ratios
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.data.examples import SUBJECT, Examples
from tessera.errors import ConfigError
from tessera.learning.bound_model import Local, Table
from tessera.learning.models.factorization import (
    PENALTY,
    Factorization,
    NoisyFactorizer,
    rating_loss,
)
from tessera.learning.module_tables import Tables
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import Job, Trained
from tessera.learning.training.noisy_steps import LEAST_NOISE, NoisyClient, NoisySteps
from tessera.learning.training.settings import LocalTraining
from tessera.privacy.dp.guarantee import Observer, Unit
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.privacy.dp.noise_setting import Drawn, NoiseSetting
from tessera.runs.client_training import OfSubjects

ITEMS, PEOPLE, FACTORS = 12, 5, 3
RATED = {0: [2, 5, 5], 1: [5, 7, 8, 9], 3: [0], 4: [2, 3, 4, 7, 11]}
TRAINING = LocalTraining(batch=8, rate=1.0, decay=1.0, table_rate=2.0)
ALL = OfSubjects(1.0, 0, Drawn.SUBJECTS)
NOISY = NoisySteps(clip=0.4, noise=LEAST_NOISE, steps=1, batch=8, drawing=ALL)


def module(people: int = PEOPLE, items: int = ITEMS, factors: int = FACTORS) -> Factorization:
    model = Factorization(items, people, factors=factors, spread=0.5, seed=4)
    with torch.no_grad():
        model.users.weight.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(1))
    return model


def tables(model: Factorization):
    return Tables({"items.weight": Table("item"), "users.weight": Local("user")}).bind(model)


BOUND = tables(module())


def shop(rated: dict[int, list[int]], row_of: dict[int, int] | None = None, secret: int = 7) -> Job:
    """A shop's job with the whole table at hand; `row_of` names rows that are not their own."""
    model = module()
    people = [who for who, items in rated.items() for _ in items]
    rows = [(row_of or {}).get(who, who) for who in people]
    labels = [np.random.default_rng([who, at]).integers(1, 6) for who in rated for at in rated[who]]
    every = np.arange(ITEMS, dtype=np.uint64)
    own = np.array(sorted(set(rows)), np.uint64)
    return Job(
        0,
        Submodel(
            np.zeros(0, np.float32),
            {"items": TablePart(every, model.items.weight.detach().numpy())},
            {"items": every},
        ),
        Examples(
            {
                "user": np.array(rows, np.int64),
                "item": np.array([i for items in rated.values() for i in items], np.int64),
                "label": np.array(labels, np.float32),
                "base": np.full(len(people), 3.5, np.float32),
                SUBJECT: np.array(people, np.int64),
            }
        ),
        {"users": TablePart(own, model.users.weight.detach().numpy()[own.astype(int)])},
        coins=Secret(secret.to_bytes(32, "little")),
    )


def train(job: Job, noisy: NoisySteps = NOISY) -> Trained:
    (found,) = NoisyFactorizer(BOUND, TRAINING, noisy).train([job], round_id=0)
    return found


def moved(found: Trained) -> np.ndarray:
    """The step as a sum of gradients: what was taken off, over rate and batch."""
    scale = TRAINING.rate * TRAINING.table_rate / NOISY.batch
    return -found.update.tables["items"].values.astype(np.float64) / scale


@contextmanager
def bare_sums() -> Iterator[list[np.ndarray]]:
    """Sums over all rows as they come out of the clip, in values, before noise."""
    found, plain = [], NoisyClient.take

    def take(self, dense, rows):
        touched, sums = rows["items"]
        whole = np.zeros((ITEMS, sums.shape[1]))
        whole[touched] = sums.numpy() * self.noisy.unit
        found.append(whole)
        plain(self, dense, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoisyClient, "take", take)
        yield found


def without(job: Job, person: int) -> Job:
    return replace(job, examples=job.examples.take(job.examples[SUBJECT] != person))


def test_a_step_is_what_automatic_differentiation_clips_person_by_person() -> None:
    job, model = shop(RATED), module()
    found, total, left_as_it_is = train(job), np.zeros((ITEMS, FACTORS + 1)), 0
    own = torch.zeros(PEOPLE, FACTORS + 1)
    own[torch.from_numpy(found.local["users"].ids.astype(int))] = torch.from_numpy(
        found.local["users"].values
    )
    for person in RATED:
        mine = job.examples.take(job.examples[SUBJECT] == person)
        batch = {name: torch.from_numpy(column) for name, column in mine.fields.items()}
        items = model.items.weight.detach().clone().requires_grad_()
        output = functional_call(model, {"items.weight": items, "users.weight": own}, (batch,))
        (up,) = torch.autograd.grad(rating_loss(output, batch).sum(), items)
        length = float(up.norm())
        left_as_it_is += length <= NOISY.clip
        total += up.numpy() * min(1.0, NOISY.clip / length)
    assert left_as_it_is < len(RATED)  # the clip is at work
    # Noise of a thousandth of the clip, at 6 deviations, and single precision.
    assert_allclose(moved(found), total, atol=6 * NOISY.clip * LEAST_NOISE + 1e-5)


def test_own_rows_are_one_step_to_the_ridge_solution_and_have_no_noise() -> None:
    job = shop(RATED)
    loud = train(job, replace(NOISY, noise=50.0))
    q = job.submodel.tables["items"].values.astype(np.float64)
    for person, p in zip(job.local["users"].ids, job.local["users"].values, strict=True):
        mine = job.examples.take(job.examples[SUBJECT] == int(person))
        pull = -PENALTY * p.astype(np.float64)
        for item, value in zip(mine["item"], mine["label"] - mine["base"], strict=True):
            error = value - q[item, :-1] @ p[:-1] - q[item, -1] - p[-1]
            pull += error * np.append(q[item, :-1], 1.0)
        at = np.searchsorted(loud.local["users"].ids, person)
        assert_allclose(
            loud.local["users"].values[at], p + pull / (len(mine) + PENALTY), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("person", RATED)
def test_a_person_moves_the_sum_by_a_clip_at_most_and_nobody_elses_row(person: int) -> None:
    job = shop(RATED)
    with bare_sums() as sums:
        with_it, without_it = train(job), train(without(job, person))
    length = np.linalg.norm(sums[0] - sums[1])
    assert 0.5 * NOISY.clip < length <= NOISY.clip
    others = job.local["users"].ids != person
    assert_array_equal(
        with_it.local["users"].values[others], without_it.local["users"].values[others]
    )


def test_a_row_of_two_people_would_reach_further_than_the_clip() -> None:
    """Why such rows are refused: one of them is in what the other gives."""
    job = shop(RATED, row_of={4: 1})
    far = np.where(job.examples[SUBJECT] == 4, 30.0, job.examples["label"])
    job = replace(job, examples=job.examples.with_field("label", far.astype(np.float32)))
    with bare_sums() as sums:
        train(job), train(without(job, 4))
    assert np.linalg.norm(sums[0] - sums[1]) > 1.05 * NOISY.clip


def test_every_row_at_hand_has_noise_and_no_count_says_who_was_there() -> None:
    found = train(
        shop(RATED), replace(NOISY, noise=1.0, drawing=OfSubjects(0.5, 0, Drawn.SUBJECTS))
    )
    update = found.update.tables["items"]
    assert (update.values != 0).all() and (update.counts == 1).all() and found.update.weight == 1
    nobody = replace(shop(RATED), examples=shop(RATED).examples.take(slice(0, 0)))
    empty = train(nobody, replace(NOISY, noise=1.0)).update
    assert (empty.tables["items"].values != 0).all() and empty.weight == 1


def test_a_rating_that_is_no_number_costs_its_person_alone() -> None:
    job = shop(RATED)
    label = job.examples["label"].copy()
    label[job.examples[SUBJECT] == 1] = np.nan
    sick = train(replace(job, examples=job.examples.with_field("label", label)))
    well = train(without(job, 1))
    assert sick.finite and sick.not_finite == 1
    # Noise of another order on each row, a thousandth of the clip: within 6 deviations of both.
    assert_allclose(moved(sick), moved(well), atol=9 * NOISY.clip * LEAST_NOISE)
    at = np.searchsorted(job.local["users"].ids, 1)
    assert_array_equal(sick.local["users"].values[at], job.local["users"].values[at])


def test_a_penalty_for_all_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight_decay"):
        NoisyFactorizer(BOUND, replace(TRAINING, weight_decay=0.1), NOISY)


@pytest.mark.parametrize("honest", [True, False], ids=["clipped", "not clipped"])
def test_canaries_that_are_people_stay_under_the_claim_unless_nothing_is_clipped(
    honest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every canary rates an item of its own, five times, far from what is predicted."""
    people, rounds, noise, delta = 600, 12, 8.0, 1e-6
    setting = NoiseSetting(unit=Unit.SUBJECT, noise=noise)
    claim = setting.ledger(rounds).guarantee(
        unit=Unit.SUBJECT, against=Observer.LEADER, delta=delta
    )
    entropy = ScriptedEntropy(b"people")
    coins = np.frombuffer(entropy.secret(Label.CANARIES, size=people).reveal(), np.uint8)
    present = (coins & 1).astype(bool)
    who = np.repeat(np.flatnonzero(present), 5)
    model = module(people, people, 0)
    with torch.no_grad():
        model.items.weight.zero_()
        model.users.weight.zero_()
    bound, every = tables(model), np.arange(people, dtype=np.uint64)
    noisy = NoisySteps(clip=1.0, noise=noise, steps=1, batch=1, drawing=ALL)
    if not honest:
        plain = NoisyFactorizer.clipped

        def careless(self, item, drawn, gradients, touched):
            self.noisy = replace(noisy, clip=10.0, noise=noise / 10.0)
            try:
                return plain(self, item, drawn, gradients, touched)
            finally:
                self.noisy = noisy

        monkeypatch.setattr(NoisyFactorizer, "clipped", careless)
    training = LocalTraining(batch=1, rate=1.0, decay=1.0, table_rate=1.0)
    learner = NoisyFactorizer(bound, training, noisy)
    seen = np.zeros((rounds, people))
    for at in range(rounds):
        values = np.zeros((people, 1), np.float32)
        job = Job(
            0,
            Submodel(
                np.zeros(0, np.float32), {"items": TablePart(every, values)}, {"items": every}
            ),
            Examples(
                {
                    "user": who,
                    "item": who,
                    "label": np.full(len(who), 50.0, np.float32),
                    "base": np.zeros(len(who), np.float32),
                    SUBJECT: who,
                }
            ),
            {"users": TablePart(np.unique(who).astype(np.uint64), values[present])},
            coins=entropy.secret(Label.CANARIES, at),
        )
        (found,) = learner.train([job], round_id=0)
        seen[at] = found.update.tables["items"].values[:, 0]
    scores = likelihood_ratios(seen, GaussianNoise(noise, ((1, 1.0),)))
    bound_found = Guessing(scores, present).bound(delta=delta, level=0.99)
    assert (0.02 * claim.epsilon < bound_found <= claim.epsilon) is honest
