"""Fixed groups: always the same, whole or not at all, and everybody names the same rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rounds.population import federation, members, plan
from tessera import tasks
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.plan import Plan
from tessera.privacy.index.period import MemoryPeriods, SqlitePeriods
from tessera.rounds.cohorts import Cohorts, cohorts_of
from tessera.runs.training import complete
from tessera.simulation.faults import Drop

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


def test_groups_are_of_one_size():
    fed = federation(grouped(), clients=CLIENTS)
    groups = fed.cohorts.groups
    assert [len(g) for g in groups] == [4] * 6  # and two clients have none
    assert len({c for g in groups for c in g}) == 24
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
    assert fed.epochs.members[-1] == new
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


def test_stored_groups_that_are_not_the_plans_are_refused():
    clients, entropy = [ClientId(i) for i in range(12)], ScriptedEntropy(b"groups")
    for stored in ([(clients[0], clients[1])], [tuple(clients[:4]), tuple(clients[3:7])]):
        with pytest.raises(ConfigError, match="groups are not of 4 clients"):
            Cohorts(grouped(), clients, entropy, groups=stored)


# --- the client's own checks ----------------------------------------------------------------------


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
        ({"cohorts": {"drawn": "schedule"}}, "fixed groups"),
        ({"cohorts": {"rounds_per_client": 2}}, "fixed groups"),
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
