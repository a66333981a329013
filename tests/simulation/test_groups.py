"""Fixed groups: always the same, whole or not at all, and everybody names the same rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rounds.population import federation, members, plan, trainer
from tessera import tasks, wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.plan import Plan
from tessera.privacy.index.period import MemoryPeriods, SqlitePeriods
from tessera.rounds.cohorts import Cohorts, cohorts_of
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.runs.training import complete
from tessera.simulation.faults import Drop, Lie, dropout_places, random_dropouts
from tessera.simulation.federation import Federation
from tessera.simulation.subcohort import one_by_one
from tessera.simulation.views import Views

CLIENTS = 26
GROUPS = {"size": 4}


def grouped(cohort: int = 8, **more):
    return plan(cohort=cohort, groups=GROUPS, **more)


def drops(script):
    """Faults by round: {round: [(client, phase, stage)]}."""
    return lambda round_id, cohort: [Drop(*at) for at in script.get(int(round_id), [])]


def model_of(fed):
    every = {n: np.arange(t.size, dtype=np.uint64) for n, t in fed.tables.items()}
    return [fed.dense, *(t.values(every[n]) for n, t in fed.tables.items())]


def test_groups_are_of_one_size_and_meet_whole():
    fed = federation(grouped(), clients=CLIENTS)
    groups = fed.cohorts.groups
    assert [len(g) for g in groups] == [4] * 6  # and two clients have none
    assert len({c for g in groups for c in g}) == 24
    for number in range(40):
        cohort = set(fed.cohorts.sample(RoundId(number)))
        assert len(cohort) == 8
        assert all(len(cohort & set(g)) in (0, 4) for g in groups)
    again = Cohorts(fed.plan, fed.participants, fed._entropy)
    assert again.groups == groups


def test_newcomers_form_groups_of_their_own_and_change_no_other():
    fed = federation(grouped(), clients=CLIENTS)
    before = list(fed.cohorts.groups)
    later = {ClientId(100 + i): p for i, p in enumerate(members(5, seed=9).values())}
    fed.admit(later)
    assert fed.cohorts.groups[: len(before)] == before
    (new,) = fed.cohorts.groups[len(before) :]  # of two that waited and five that came
    assert len(new) == 4 and not set(new) & {c for g in before for c in g}
    assert any(c in set(fed.cohorts.sample(RoundId(n))) for c in new for n in range(40))
    fed.admit({ClientId(200): next(iter(members(1).values()))})
    assert len(fed.cohorts.groups) == len(before) + 2  # and the three left met a fourth


@given(st.sets(st.integers(0, 400), min_size=8, max_size=40), st.integers(0, 400))
def test_one_more_client_moves_nobody(ids, one):
    chosen, entropy = grouped(), ScriptedEntropy(b"groups")
    clients = [ClientId(i) for i in ids]
    first = Cohorts(chosen, clients, entropy)
    before = list(first.groups)
    more = {*clients, ClientId(one)}
    restarted = Cohorts(chosen, more, entropy, groups=before)  # as a server that has stored them
    first.admit([ClientId(one)])
    for groups in (first.groups, restarted.groups):
        assert groups[: len(before)] == before
        assert len(groups) == len(more) // 4
        assert {c for group in groups[len(before) :] for c in group} <= more - {
            c for group in before for c in group
        }


def test_groups_follow_from_ids_and_a_salt_and_not_from_places_in_a_list():
    chosen, clients = grouped(), [ClientId(i) for i in range(5, 70, 3)]
    rule = cohorts_of(chosen)
    groups = rule.formed(clients)
    assert rule.formed(clients[::-1]) == groups == rule.formed(set(clients))
    assert cohorts_of(replace(chosen, seed=1)).formed(clients) != groups
    assert cohorts_of(replace(chosen, federation="another")).formed(clients) != groups
    # Who is not there leaves the order of all others as it was.
    assert groups[0] in rule.formed({*clients} - {*groups[-1]})


def test_a_federation_goes_on_when_one_more_has_come(tmp_path):
    """The members have stored their groups, and would leave a round that names others."""
    chosen = grouped()
    fed = federation(chosen, clients=CLIENTS)
    for _ in range(3):
        assert isinstance(list(fed.round())[-1], RoundFinished)
    one = {ClientId(100): next(iter(members(1, seed=9).values()))}
    everybody = {**fed.participants, **one}
    restarted = Federation(
        chosen,
        everybody,
        trainer=one_by_one({client: trainer(client) for client in everybody}),
        dense=fed.dense,
        tables=fed.tables,
        derived=fed.model.derived,
        entropy=fed._entropy,
        groups=fed.cohorts.groups,
    )
    restarted.course.next_round = fed.next_round
    for _ in range(6):
        end = list(restarted.round())[-1]
        assert isinstance(end, RoundFinished) and end.survivors == 8 and not end.groups_aborted


def test_a_group_whose_member_is_gone_is_not_drawn():
    chosen, entropy = grouped(), ScriptedEntropy(b"groups")
    clients = [ClientId(i) for i in range(12)]
    groups = Cohorts(chosen, clients, entropy).groups
    left = Cohorts(chosen, [c for c in clients if c != groups[0][0]], entropy, groups=groups)
    assert left.groups == groups
    for number in range(20):
        assert not set(left.sample(RoundId(number))) & set(groups[0])
    alone = Cohorts(chosen, clients[:8], entropy, groups=groups)
    with pytest.raises(ConfigError, match="whole fixed groups, a cohort has 2"):
        alone.sample(RoundId(0))


def test_stored_groups_that_are_not_the_plans_are_refused():
    clients, entropy = [ClientId(i) for i in range(12)], ScriptedEntropy(b"groups")
    for stored in ([(clients[0], clients[1])], [tuple(clients[:4]), tuple(clients[3:7])]):
        with pytest.raises(ConfigError, match="groups are not of 4 clients"):
            Cohorts(grouped(), clients, entropy, groups=stored)


def test_a_round_in_groups_gives_the_model_of_the_plain_rows():
    """Groups are summed apart and merged: the same integers as without any privacy."""
    chosen = grouped()
    fed = federation(chosen, clients=8)
    plain = federation(plan("submodel"), clients=8)
    for one in (fed, plain):
        (finished,) = [e for e in one.round() if isinstance(e, RoundFinished)]
        assert finished.survivors == 8
    for ours, theirs in zip(model_of(fed), model_of(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("at", range(len(dropout_places(grouped().group_plan))))
@pytest.mark.parametrize("crypto", ["every", "none"])
def test_a_group_that_lacks_a_member_opens_nothing_and_the_others_go_on(at, crypto):
    chosen = grouped().with_simulation(crypto=crypto)
    phase, stage = dropout_places(chosen.group_plan)[at]
    probe = federation(chosen, clients=8)
    gone = probe.cohorts.groups[0][1]
    views = Views()
    fed = federation(chosen, clients=8, views=views, faults=drops({0: [(gone, phase, stage)]}))
    finished = list(fed.round())[-1]
    assert isinstance(finished, RoundFinished)
    assert (finished.survivors, finished.groups_aborted) == (4, 1)
    assert sorted(fed.survivors) == sorted(probe.cohorts.groups[1])
    if crypto == "every":  # no list of fewer than the whole group is ever sent
        lists = [wire.decode(s.data) for s in views.by_party["server"] if s.kind == "SurvivorList"]
        assert all(len(one.survivors) == 4 for one in lists)


def test_a_cohort_of_one_group_loses_rounds_to_dropouts_as_well():
    chosen = grouped(cohort=4)
    fed = federation(chosen, clients=4, faults=random_dropouts(0.3, 1, chosen))
    events = list(fed.run(20))
    given_up = sum(isinstance(e, RoundAbort) for e in events)
    assert 8 <= given_up < 20  # 0.7^4 = 24 % of the rounds open


def test_if_every_group_lacks_somebody_the_round_is_aborted():
    probe = federation(grouped(), clients=8)
    script = {0: [(g[0], "collect", 1) for g in probe.cohorts.groups]}
    fed = federation(grouped(), clients=8, faults=drops(script))
    before = [part.copy() for part in model_of(fed)]
    assert isinstance(list(fed.round())[-1], RoundAbort)
    assert all(np.array_equal(a, b) for a, b in zip(before, model_of(fed), strict=True))


def test_everybody_in_a_group_names_the_whole_union_of_the_group():
    views = Views()
    fed = federation(grouped(), clients=8, views=views)
    list(fed.round())
    unions = {
        s.data for s in views.by_party["server"] if s.kind == "UnionOpened" and s.direction != "in"
    }
    assert len(unions) == 2
    for group in fed.cohorts.groups:
        held = np.unique(np.concatenate([fed.participants[c].local.real["goods"] for c in group]))
        assert any(np.array_equal(wire.decode(u).tables[0], held) for u in unions), "no decoys"
    sizes = [len(wire.decode(u).tables[0]) for u in unions]
    revealed = [s for s in views.by_party["server"] if s.kind == "RevealedSet"]
    assert {len(wire.decode(s.data).tables[0].rows) for s in revealed} <= set(sizes)


# --- the client's own checks ----------------------------------------------------------------------


def test_a_client_meets_its_group_and_nobody_else_for_good():
    """Mixed anew, what hides a holder is the old group and the new one together."""
    fed = federation(grouped(), clients=8, views=Views())
    list(fed.round())
    first, second = fed.cohorts.groups
    mixed = [(*first[:2], *second[:2]), (*first[2:], *second[2:])]
    fed.cohorts.groups = [tuple(sorted(g)) for g in mixed]
    events = list(fed.round())
    assert isinstance(events[-1], RoundAbort), "nobody shares anything with strangers"
    fed.cohorts.groups = [first, second]
    assert isinstance(list(fed.round())[-1], RoundFinished)


def test_without_that_check_the_mixed_groups_are_opened(monkeypatch):
    """The attack works with the rule off: two rounds, and the groups' intersection is left."""
    monkeypatch.setattr(MemoryPeriods, "group", lambda self, federation, members: members)
    fed = federation(grouped(), clients=8)
    list(fed.round())
    first, second = fed.cohorts.groups
    fed.cohorts.groups = [(*first[:2], *second[:2]), (*first[2:], *second[2:])]
    assert isinstance(list(fed.round())[-1], RoundFinished)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_client_answers_for_no_list_of_fewer(stage):
    probe = federation(grouped(), clients=8)
    told, without = probe.cohorts.groups[0][:2]
    lie = Lie(told, "SurvivorList", without=without, stage=stage)
    fed = federation(grouped(), clients=8, faults=lambda r, c: [lie])
    finished = list(fed.round())[-1]
    assert isinstance(finished, RoundFinished) and finished.groups_aborted == 1


@pytest.mark.parametrize("store", [lambda path: MemoryPeriods(), lambda path: SqlitePeriods(path)])
def test_a_group_is_stored_once(tmp_path, store):
    periods = store(tmp_path / "periods")
    assert periods.group("f", (1, 2, 2**40)) == (1, 2, 2**40)
    assert periods.group("f", (1, 3)) == (1, 2, 2**40)
    assert periods.group("g", (1, 3)) == (1, 3)


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"privacy": {"pseudonyms": True}}, "pseudonyms"),
        ({"privacy": {"one_participation": True}}, "one_participation"),
        ({"groups": {"size": 1}}, "size = 1"),
        ({"security": {"sharing": "plain"}}, "sharing"),
    ],
)
def test_what_would_tell_members_apart_is_refused(change, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        plan(**{"groups": GROUPS, **change})
    assert caught.value.hint


def test_a_shared_table_with_a_row_for_each_client_is_refused():
    """Its row says whose it is, and from its values follow the updates of the client's others."""
    task = tasks.load(
        "taobao-like", users=12, items=60, examples=10, history=4, width=3, share_users=True
    )
    with pytest.raises(ConfigError, match="'users', which has a row for each client") as caught:
        complete(Plan(scheme="secure-submodel", cohort=8, groups=GROUPS), task)
    assert "share_users" in caught.value.hint
    complete(Plan(scheme="submodel", cohort=8), task)
