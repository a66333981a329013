"""Parameters that cannot work are refused where they are made, with the reason and a way out."""

from __future__ import annotations

import pytest

import harness
from tessera import wire
from tessera.crypto.field import Field
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError
from tessera.ids import TableId
from tessera.protocols.secagg.params import GraphKind, RowSumSpec, StageSpec, Threat, arrange


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"clients": 1}, "cohort of 1"),
        ({"clients": 10, "threshold": 5}, "must be over half"),
        ({"clients": 10, "threshold": 11}, "must be over half"),
        ({"clients": 10, "threat": Threat.ACTIVE, "corrupt": 4}, "less than a third"),
        ({"clients": 10, "threat": Threat.ACTIVE, "corrupt": 3, "threshold": 6}, "survivor lists"),
        ({"clients": 10, "threat": Threat.ACTIVE, "graph": GraphKind.SPARSE}, "complete graph"),
        ({"clients": 1001}, "complete graph"),
        ({"clients": 10, "dropout": 1.0}, r"\[0, 1\)"),
        ({"clients": 10, "corrupt": 10}, "10 corrupt"),
        ({"clients": 10, "corrupt": 1, "min_group": 2}, "one honest member"),
        ({"clients": 10, "degree": 4}, "sparse graph"),
        ({"clients": 10, "degree": 5, "graph": GraphKind.SPARSE}, "even"),
        ({"clients": 10, "degree": 8, "graph": GraphKind.SPARSE}, "8 of 10 may be left"),
        ({"clients": 10, "degree": 6, "graph": GraphKind.SPARSE, "dropout": 0.3}, "7 of 10"),
        ({"clients": 100, "threshold": 30, "graph": GraphKind.SPARSE}, "without a degree"),
        ({"clients": 10, "corrupt": 7}, "on their own"),
        ({"clients": 10, "plan_hash": bytes(31)}, "31 bytes"),
        ({"clients": 10, "round_id": -1}, "round -1"),
        ({"clients": 10, "round_id": 2**64}, "must lie in"),
        ({"clients": 10, "corrupt": -1}, "-1 corrupt"),
        ({"clients": 10, "min_group": -1}, "min_group must"),
        ({"clients": 10, "min_group": 2**64}, "min_group must"),
        ({"clients": 10, "threshold": -7}, "threshold must"),
        ({"clients": 10, "degree": -2, "graph": GraphKind.SPARSE}, "degree must"),
        ({"clients": 10, "federation": "é" * 501}, "1002 bytes"),
        ({"clients": 10, "federation": "\ud800"}, "not valid UTF-8"),
    ],
)
def test_what_cannot_work_is_refused(settings, why):
    settings = dict(settings)
    with pytest.raises(ConfigError, match=why):
        harness.params(settings.pop("clients"), **settings)


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        ({"dense": 5, "max_value": 2**64}, "max_value"),
        ({"dense": 5, "max_value": -1}, "max_value"),
        ({"dense": 2**31}, "a message holds"),
        ({"dense": -1}, "-1 dense"),
        ({"tables": (RowSumSpec(table=TableId(65536), width=1),)}, "over 65,535"),
        ({"dense": 5, "name": "n" * 1001}, "1001 bytes"),
    ],
)
def test_a_stage_that_cannot_be_sent_is_refused(stage, why):
    with pytest.raises(ConfigError, match=why):
        StageSpec(**{"name": "stage", "group": Ring(128), **stage})


def test_whatever_parameters_are_accepted_can_be_sent():
    params = harness.params(
        10,
        StageSpec(name="n" * 1000, group=Ring(8), dense=2**28 - 1024, max_value=0),
        StageSpec(
            name="rows",
            group=Ring(128),
            tables=(RowSumSpec(table=TableId(65535), width=1),),
            max_value=2**64 - 1,
        ),
        federation="é" * 500,
        round_id=2**64 - 1,
    )
    assert wire.decode(wire.encode(params)) == params


def test_headroom_too_small_for_the_cohort_is_refused_with_the_width_that_would_do():
    stage = harness.dense_stage(Ring(20), 10, max_value=2**15 - 1)
    with pytest.raises(ConfigError, match="does not fit z2") as caught:
        harness.params(100, stage)
    assert "22 bits" in str(caught.value.hint)
    harness.params(32, stage)
    with pytest.raises(ConfigError):
        harness.params(33, stage)
    full = harness.dense_stage(Field(31), 10, max_value=2**31 - 2)
    with pytest.raises(ConfigError):
        harness.params(2, full)


def test_a_small_group_needs_to_be_called_insecure():
    params = harness.params(10, min_group=1, insecure_small_groups=True)
    assert params.quorum == 1
    assert harness.params(10).quorum == 2
    assert harness.params(10, corrupt=3).quorum == 5


def test_against_an_active_server_a_group_outlasts_whom_it_may_declare_gone():
    rows = harness.row_stage()
    params = harness.params(10, rows, threat=Threat.ACTIVE, corrupt=1)
    assert params.topology.threshold == 7
    assert params.quorum == (10 - 7) + 1 + 2
    with pytest.raises(ConfigError, match="one honest member") as caught:
        harness.params(10, rows, threat=Threat.ACTIVE, corrupt=1, min_group=5)
    assert "min_group = 6" in str(caught.value.hint)
    small = {"min_group": 5, "insecure_small_groups": True}
    assert harness.params(10, rows, threat=Threat.ACTIVE, corrupt=1, **small).quorum == 5
    dense = harness.params(10, threat=Threat.ACTIVE, corrupt=1)
    assert dense.quorum == 3, "there are no rows to open"


def test_a_quorum_that_no_cohort_can_meet_is_refused_where_there_are_rows():
    with pytest.raises(ConfigError, match="needs 11 members"):
        harness.params(10, harness.row_stage(), min_group=11)
    with pytest.raises(ConfigError, match="needs 5 members"):
        harness.params(4, harness.row_stage(), corrupt=2, min_group=5)
    assert harness.params(10, min_group=11).quorum == 11


@pytest.mark.parametrize("n", range(2, 40))
def test_the_default_quorum_fits_every_cohort(n):
    corrupt = (n - 1) // 3
    params = harness.params(n, harness.row_stage(), threat=Threat.ACTIVE, corrupt=corrupt)
    assert params.quorum <= n


@pytest.mark.parametrize("n", range(2, 40))
def test_the_default_threshold_meets_both_rules_for_every_cohort(n):
    threshold = harness.params(n).topology.threshold
    assert n // 2 < threshold <= n
    corrupt = (n - 1) // 3
    active = harness.params(n, threat=Threat.ACTIVE, corrupt=corrupt).topology.threshold
    assert 2 * active > n + corrupt


def test_the_graph_is_the_plans_whatever_the_roster():
    params = harness.params(100, graph=GraphKind.SPARSE, corrupt=10)
    topology = params.topology
    assert not topology.complete
    assert params.min_survivors == 80
    for size in (80, 91, 100):
        members = tuple(range(size))
        hood = arrange(members, topology, bytes(32))
        assert hood.threshold == topology.threshold
        assert {len(hood.holders(c)) for c in members} == {topology.degree}


def test_where_no_degree_will_do_the_sparse_graph_is_the_complete_one():
    topology = harness.params(6, graph=GraphKind.SPARSE, corrupt=1).topology
    assert (topology.complete, topology.degree, topology.threshold) == (True, 5, 5)


def test_stages_that_say_nothing_or_twice_the_same_are_refused():
    with pytest.raises(ConfigError, match="neither"):
        StageSpec(name="empty", group=Ring(8))
    twice = (RowSumSpec(table=TableId(1), width=2), RowSumSpec(table=TableId(1), width=3))
    with pytest.raises(ConfigError, match="ascend"):
        StageSpec(name="rows", group=Ring(8), tables=twice)
    with pytest.raises(ConfigError, match="width"):
        StageSpec(name="rows", group=Ring(8), tables=(RowSumSpec(table=TableId(1), width=0),))


def test_any_difference_in_parameters_is_another_context():
    base = harness.params(10)
    others = [
        harness.params(11),
        harness.params(10, corrupt=1),
        harness.params(10, federation="other"),
        harness.params(10, round_id=13),
        harness.params(10, plan_hash=bytes(32)),
        harness.params(10, harness.dense_stage(Ring(33))),
        harness.params(10, threat=Threat.ACTIVE),
        harness.params(10, dropout=0.21),
    ]
    assert len({p.context for p in [base, *others]}) == len(others) + 1
    assert wire.decode(wire.encode(base)) == base


def test_the_server_wants_exactly_its_cohort_and_the_directory():
    cohort = harness.Cohort.of(harness.params(4))
    cohort.inputs.pop(cohort.clients[0])
    with pytest.raises(MisuseError, match="3 clients for a cohort of 4"):
        cohort.server()
    active = harness.Cohort.of(harness.params(4, threat=Threat.ACTIVE))
    active.identity = lambda client: None
    with pytest.raises(MisuseError, match="directory"):
        active.server()
    with pytest.raises(MisuseError, match="directory"):
        active.join(active.clients[0])
