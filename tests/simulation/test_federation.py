"""Many rounds: who is sampled, what is logged, and the countermeasures over rounds."""

from __future__ import annotations

import numpy as np
import pytest

from rounds.population import federation, holdings, plan
from rounds.shops import one_table, shop
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.privacy.index.response import IndexPrivacy
from tessera.protocols.secagg.params import Threat
from tessera.rounds.events import RoundFinished, RoundStarted
from tessera.simulation.faults import Drop, random_dropouts


def cohorts(fed, rounds: int) -> list[tuple[int, ...]]:
    return [e.cohort for e in fed.run(rounds) if isinstance(e, RoundStarted)]


def test_the_seed_decides_who_is_sampled_and_another_seed_decides_otherwise():
    one = [federation(plan(seed=1), clients=20).cohorts.sample(RoundId(r)) for r in range(5)]
    again = [federation(plan(seed=1), clients=20).cohorts.sample(RoundId(r)) for r in range(5)]
    other = [federation(plan(seed=2), clients=20).cohorts.sample(RoundId(r)) for r in range(5)]
    assert one == again != other
    assert all(len(set(cohort)) == 8 for cohort in one)


def test_by_a_schedule_a_client_comes_once_a_pass_and_in_the_same_order():
    settings = plan("submodel", cohort=4, cohorts={"drawn": "schedule", "separation": 3})
    settings = settings.with_simulation(rounds=6)
    fed = federation(settings, clients=12)
    found = cohorts(fed, 6)
    everybody = [c for cohort in found[:3] for c in cohort]
    assert sorted(everybody) == list(range(12))
    assert found[3:] == found[:3]
    with pytest.raises(ConfigError, match="a pass of 2 rounds") as caught:
        federation(settings, clients=8)
    assert "separation = 2" in caught.value.hint


def test_pseudonyms_are_new_in_every_round_and_change_nothing_else():
    plain = federation(plan(seed=3, privacy={"level": "cpp5", "decoys": 0.0}), clients=9)
    covered = federation(
        plan(seed=3, privacy={"level": "cpp5", "decoys": 0.0, "pseudonyms": True}), clients=9
    )
    names = []
    for _ in range(3):
        started = next(e for e in plain.round() if isinstance(e, RoundStarted))
        hidden = next(e for e in covered.round() if isinstance(e, RoundStarted))
        real = covered.cohorts.pseudonyms[hidden.round_id]
        assert sorted(real.values()) == sorted(started.cohort)
        assert sorted(real) == sorted(hidden.cohort)
        names += hidden.cohort
    assert len(set(names)) == 24, "no name is seen twice"


def test_the_plans_seed_does_not_tell_who_is_behind_a_name():
    """The names are seen, and so are seed, population and round: no order of them helps."""
    rounds, found = 150, {"by the seed": 0, "by their order": 0}
    for r in range(rounds):
        settings = plan("submodel", seed=r, privacy={"pseudonyms": True})
        fed = federation(settings, clients=12, entropy_seed=f"secret {r}".encode())
        round_id = RoundId(r)
        chosen = fed.cohorts.sample(round_id)
        real = fed.cohorts.named(round_id, chosen)
        names = sorted(real)
        order = np.random.default_rng([settings.seed, r, 2]).permutation(len(chosen))
        guesses = {
            "by the seed": [names[place] for place in order],
            "by their order": names,
        }
        for how, guess in guesses.items():
            found[how] += sum(real[n] == c for n, c in zip(guess, chosen, strict=True))
    for how, right in found.items():  # one in a cohort is right by chance, give or take one
        assert abs(right - rounds) < 5 * rounds**0.5, how


def test_names_are_the_same_again_with_the_same_secrets_and_others_with_others():
    settings = plan("submodel", privacy={"pseudonyms": True})

    def names(secret: bytes) -> list[dict]:
        fed = federation(settings, clients=12, entropy_seed=secret)
        return [fed.cohorts.named(RoundId(r), fed.cohorts.sample(RoundId(r))) for r in range(3)]

    assert names(b"one") == names(b"one")
    assert not any(a.keys() & b.keys() for a, b in zip(names(b"one"), names(b"two"), strict=True))
    large = federation(plan("submodel", cohort=3000, privacy={"pseudonyms": True}), clients=3000)
    assert len(large.cohorts.named(RoundId(0), large.cohorts.sample(RoundId(0)))) == 3000


@pytest.mark.parametrize("p", [(1.0, 0.0), (0.625, 0.375), (1.0, 0.5)])
def test_answers_that_never_change_are_refused_under_pseudonyms(p):
    """They are a fingerprint: whoever answers alike in two rounds is the same client."""
    same = {"level": "", "p1": p[0], "p2": p[1], "p3": 1.0, "p4": 0.0}
    plan(privacy=same)  # under one name they are the client's choice
    with pytest.raises(ConfigError, match="fingerprint"):
        plan(privacy={**same, "pseudonyms": True})
    fed = federation(plan(privacy={"level": "cpp4", "pseudonyms": True}))
    local = fed.participants[ClientId(0)].local
    local.privacy = IndexPrivacy(p1=p[0], p2=p[1], p3=1.0, p4=0.0)
    with pytest.raises(ConfigError, match="fingerprint"):
        next(e for e in fed.round() if isinstance(e, RoundFinished))


def test_pseudonyms_and_certified_names_exclude_each_other():
    with pytest.raises(ConfigError, match="pseudonyms"):
        plan(privacy={"pseudonyms": True}, security={"threat": Threat.ACTIVE})


def test_dropouts_are_within_what_the_plan_tolerates():
    settings = plan(cohort=9)
    script = random_dropouts(0.9, 1, settings)
    most = 9 - settings.secagg(RoundId(0)).min_survivors
    for r in range(20):
        faults = script(RoundId(r), list(range(9)))
        assert len(faults) <= most
        assert faults == script(RoundId(r), list(range(9)))
    fed = federation(settings, faults=random_dropouts(0.3, 1, settings))
    finished = [e for e in fed.run(4) if isinstance(e, RoundFinished)]
    assert len(finished) == 4
    assert any(e.survivors < 9 for e in finished)


HELD = {0: [1, 2, 3], 1: [2, 9], 2: [3, 9, 20], 3: [2, 41]}
"""Rows 1, 20 and 41 have one writer each; the synthetic trainers count odd rows twice."""


@pytest.mark.parametrize("crypto", ["every", "none"])
@pytest.mark.parametrize("scheme", ["submodel", "secure-submodel", "two-server", "fedavg"])
def test_singleton_rows_are_those_that_one_client_wrote_with_however_many_examples(scheme, crypto):
    privacy = {"level": "cpp5", "min_group": 1, "insecure_small_groups": True, "decoys": 0.0}
    settings = one_table(scheme, 60, privacy=privacy).with_simulation(crypto=crypto)
    (end,) = [e for e in shop(settings, HELD).run(1) if isinstance(e, RoundFinished)]
    assert end.singleton_rows == 3


def test_singleton_rows_count_those_in_the_sum_alone():
    settings = one_table("submodel", 60, security={"dropout": 0.5})
    fed = shop(settings, HELD, faults=lambda *_: [Drop(2, "collect")])
    (end,) = [e for e in fed.run(1) if isinstance(e, RoundFinished)]
    assert end.survivors == 3
    assert end.singleton_rows == 4  # 1, 3, 9 and 41; 20 is written by nobody


def test_rows_below_the_quorum_are_nobodys():
    settings = plan(privacy={"level": "cpp4"})
    fed = federation(settings)
    (end,) = [e for e in fed.run(1) if isinstance(e, RoundFinished)]
    opened = {name: set(mean.ids.tolist()) for name, mean in fed.last.result.tables.items()}
    real = [set(rows.tolist()) for rows in holdings(8).values()]
    alone = [row for row in opened["goods"] if sum(row in held for held in real) == 1]
    of = [{row % 12 for row in held} for held in real]
    alone += [row for row in opened["categories"] if sum(row in held for held in of) == 1]
    assert end.rows_below_quorum and 0 < end.singleton_rows <= len(alone)
