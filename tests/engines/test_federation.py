"""Many rounds: who is sampled, what is logged, and the countermeasures over rounds."""

from __future__ import annotations

import json

import pytest

from rounds.population import federation, plan
from tessera.engines.federation import random_dropouts, write_truth
from tessera.engines.runlog import RunLog
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.protocols.secagg.params import Threat
from tessera.rounds.events import PhaseClosed, RoundFinished, RoundStarted


def cohorts(fed, rounds: int) -> list[tuple[int, ...]]:
    return [e.cohort for e in fed.run(rounds) if isinstance(e, RoundStarted)]


def test_the_seed_decides_who_is_sampled_and_another_seed_decides_otherwise():
    one = [federation(plan(seed=1), clients=20).sample(RoundId(r)) for r in range(5)]
    again = [federation(plan(seed=1), clients=20).sample(RoundId(r)) for r in range(5)]
    other = [federation(plan(seed=2), clients=20).sample(RoundId(r)) for r in range(5)]
    assert one == again != other
    assert all(len(set(cohort)) == 8 for cohort in one)


def test_with_one_participation_a_client_comes_once_a_period():
    settings = plan("submodel", cohort=4, privacy={"one_participation": True, "period_rounds": 3})
    fed = federation(settings, clients=12)
    found = cohorts(fed, 6)
    for period in (found[:3], found[3:]):
        everybody = [c for cohort in period for c in cohort]
        assert sorted(everybody) == list(range(12))
    with pytest.raises(ConfigError, match="may take part"):
        list(federation(settings, clients=7).run(3))


def test_fixed_groups_always_meet_together():
    settings = plan("submodel", cohort=4, privacy={"fixed_groups": 3})
    found = cohorts(federation(settings, clients=12), 6)
    assert found[:3] == found[3:]
    assert sorted(c for cohort in found[:3] for c in cohort) == list(range(12))


def test_pseudonyms_are_new_in_every_round_and_change_nothing_else():
    plain = federation(plan(seed=3, privacy={"level": "cpp1", "decoys": 0.0}), clients=9)
    covered = federation(
        plan(seed=3, privacy={"level": "cpp1", "decoys": 0.0, "pseudonyms": True}), clients=9
    )
    names = []
    for _ in range(3):
        started = next(e for e in plain.round() if isinstance(e, RoundStarted))
        hidden = next(e for e in covered.round() if isinstance(e, RoundStarted))
        real = covered.pseudonyms[hidden.round_id]
        assert sorted(real.values()) == sorted(started.cohort)
        assert sorted(real) == sorted(hidden.cohort)
        names += hidden.cohort
    assert len(set(names)) == 24, "no name is seen twice"


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


def test_a_run_folder_holds_the_plan_and_every_event(tmp_path):
    settings = plan()
    fed = federation(settings, clients=10)
    log = RunLog.create(tmp_path / "run", settings)
    events = list(fed.run(2))
    for event in events:
        log.append(event)
    write_truth(tmp_path / "run" / "truth.json", fed.members)

    back = RunLog.open(tmp_path / "run")
    assert back.plan == settings
    assert back.plan.digest == settings.digest
    assert len(list(back.events())) == len(events)
    rounds = list(back.rounds())
    assert [r["round_id"] for r in rounds] == [0, 1]
    assert all(rounds[0]["bytes_up"][part] > 100 for part in ("keys", "union", "update"))
    assert rounds[0]["bytes_up"]["rows down"] == 0 < rounds[0]["bytes_down"]["rows down"]
    assert rounds[0]["condition"] == "given the union"
    phases = [e.phase for e in events if isinstance(e, PhaseClosed) and e.round_id == 0]
    assert phases == ["advertise", "share", "collect", "unmask", "reveal", "collect", "unmask"]
    truth = json.loads((tmp_path / "run" / "truth.json").read_text())
    assert len(truth["3"]["goods"]) == 20

    with pytest.raises(ConfigError, match="holds a run already"):
        RunLog.create(tmp_path / "run", settings)
    with pytest.raises(ConfigError, match=r"no plan\.toml"):
        RunLog.open(tmp_path)
    (tmp_path / "run" / "rounds.jsonl").write_text('{"cut')
    with pytest.raises(ConfigError, match="line 1 is cut off"):
        list(back.rounds())


def test_an_infinite_level_is_a_string_in_the_log(tmp_path):
    settings = plan(privacy={"level": "cpp1"})
    log = RunLog.create(tmp_path / "run", settings)
    for event in federation(settings).run(1):
        log.append(event)
    assert next(log.rounds())["epsilon"] == "inf"
