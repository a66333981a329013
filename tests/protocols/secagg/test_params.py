"""Parameters that cannot work are refused where they are made, with the reason and a way out."""

from __future__ import annotations

import pytest

import harness
from tessera.crypto.field import Field
from tessera.crypto.ring import Ring
from tessera.errors import ConfigError, MisuseError
from tessera.ids import TableId
from tessera.protocols import wire
from tessera.protocols.secagg.params import GraphKind, StageSpec, TableSpec, Threat


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
    ],
)
def test_what_cannot_work_is_refused(settings, why):
    settings = dict(settings)
    with pytest.raises(ConfigError, match=why):
        harness.params(settings.pop("clients"), **settings)


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


@pytest.mark.parametrize("n", range(2, 40))
def test_the_default_threshold_meets_both_rules_for_every_cohort(n):
    threshold = harness.params(n).topology.threshold
    assert n // 2 < threshold <= n
    corrupt = (n - 1) // 3
    active = harness.params(n, threat=Threat.ACTIVE, corrupt=corrupt).topology.threshold
    assert 2 * active > n + corrupt


def test_the_threshold_does_not_shrink_with_the_roster():
    params = harness.params(30)
    assert params.topology(22).threshold == params.topology(30).threshold


def test_stages_that_say_nothing_or_twice_the_same_are_refused():
    with pytest.raises(ConfigError, match="neither"):
        StageSpec(name="empty", group=Ring(8))
    twice = (TableSpec(table=TableId(1), width=2), TableSpec(table=TableId(1), width=3))
    with pytest.raises(ConfigError, match="ascend"):
        StageSpec(name="rows", group=Ring(8), tables=twice)
    with pytest.raises(ConfigError, match="width"):
        StageSpec(name="rows", group=Ring(8), tables=(TableSpec(table=TableId(1), width=0),))


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
