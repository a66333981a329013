"""The promise: the opened sum is the survivors' sum, exactly, or nothing at all is opened."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import harness
from tessera.crypto.field import Field
from tessera.crypto.ring import Ring
from tessera.protocols.secagg.params import GraphKind, SecAggParams, Threat, fewest_members
from tessera.protocols.secagg.session import neighbourhood
from tessera.simulation.faults import Drop

GROUPS = st.one_of(st.integers(8, 128).map(Ring), st.sampled_from([Field(31), Field(61)]))
DENSE_PHASES = ["advertise", "share", "collect", "unmask"]


@st.composite
def cohorts(draw, *, graphs=tuple(GraphKind)) -> harness.Cohort:
    n = draw(st.integers(9 if graphs == (GraphKind.SPARSE,) else 3, 13))
    stages = []
    for _ in range(draw(st.integers(1, 2))):
        group = draw(GROUPS)
        dense = draw(st.integers(0, 9))
        if draw(st.booleans()) or not dense:
            tables = draw(st.sampled_from([(0,), (2, 5)]))
            stages.append(harness.row_stage(group, draw(st.integers(1, 4)), dense, tables))
        else:
            stages.append(harness.dense_stage(group, dense))
    graph = draw(st.sampled_from(graphs)) if n >= 9 else GraphKind.COMPLETE
    threat = draw(st.sampled_from(Threat)) if graph is GraphKind.COMPLETE else Threat.SEMI_HONEST
    more = {"threat": threat, "graph": graph, "dropout": 0.4}
    if graph is GraphKind.SPARSE:
        fewest = fewest_members(n, more["dropout"])
        more["degree"] = draw(st.sampled_from([d for d in (4, 6) if d < fewest - 1]))
    elif threat is Threat.ACTIVE and draw(st.booleans()):
        more["corrupt"] = (n - 1) // 3
    params = harness.params(n, *stages, **more)
    quorums = {3 * i + 1: draw(st.integers(params.quorum, n)) for i in range(n)}
    return harness.Cohort.of(params, seed=draw(st.integers(0, 2**32)), quorums=quorums)


def phases(params: SecAggParams) -> list[tuple[str, int]]:
    found = [("advertise", 0), ("share", 0)]
    reveals = 0
    for i, stage in enumerate(params.stages):
        if stage.tables:
            found.append(("reveal", reveals))
            reveals += 1
        found.append(("collect", i))
        if params.threat is Threat.ACTIVE:
            found.append(("consistency", i))
        found.append(("unmask", i))
    return found


@st.composite
def scripts(draw, cohort: harness.Cohort, *, count: int) -> list[Drop]:
    chosen = draw(st.permutations(cohort.clients))[:count]
    places = phases(cohort.params)
    drops = []
    for client in chosen:
        phase, stage = draw(st.sampled_from(places))
        drops.append(Drop(client, phase, stage=stage, after=draw(st.booleans())))
    return drops


def tolerance(params: SecAggParams) -> int:
    return params.cohort - params.min_survivors


@given(cohorts(graphs=(GraphKind.COMPLETE,)), st.data())
@settings(max_examples=60)
def test_the_sum_is_exact_for_every_tolerated_dropout(cohort, data):
    count = data.draw(st.integers(0, tolerance(cohort.params)))
    ran = harness.run(cohort, data.draw(scripts(cohort, count=count)))
    assert ran.outcome.aborted is None
    assert not ran.outcome.refused
    assert not ran.outcome.left
    assert len(ran.sums) == len(cohort.params.stages)
    harness.assert_sums_are_exact(ran)
    harness.assert_nobody_gave_both_shares(ran)


@given(cohorts(graphs=(GraphKind.COMPLETE,)), st.data())
@settings(max_examples=40)
def test_one_dropout_more_aborts_and_reveals_nothing(cohort, data):
    script = data.draw(scripts(cohort, count=tolerance(cohort.params) + 1))
    last = len(cohort.params.stages) - 1
    # Whoever answers the very last message has dropped out of nothing.
    script = [Drop(d.client, d.phase, stage=d.stage) for d in script]
    ran = harness.run(cohort, script)
    assert ran.outcome.aborted is not None
    assert ran.outcome.aborted.answered < ran.outcome.aborted.needed
    assert len(ran.sums) <= last
    harness.assert_sums_are_exact(ran)
    harness.assert_nobody_gave_both_shares(ran)
    # The stage that was aborted: nobody's secret has a threshold of shares at the server.
    threshold = cohort.params.topology.threshold
    for (stage, _, _), holders in harness.shares_by_secret(ran).items():
        assert stage < len(ran.sums) or len(holders) < threshold


@given(cohorts(graphs=(GraphKind.SPARSE,)), st.data())
@settings(max_examples=40)
def test_on_the_sparse_graph_a_round_is_exact_or_gives_up_for_a_reason(cohort, data):
    count = data.draw(st.integers(0, tolerance(cohort.params) + 1))
    script = data.draw(scripts(cohort, count=count))
    ran = harness.run(cohort, script)
    assert not ran.outcome.refused
    harness.assert_sums_are_exact(ran)
    harness.assert_nobody_gave_both_shares(ran)
    if ran.outcome.aborted is None:
        assert len(ran.sums) == len(cohort.params.stages)
        return
    # Given up only where a neighbourhood, or the cohort, had fallen below its threshold.
    assert count > 0
    gone = {d.client for d in script}
    left = set(cohort.clients) - gone
    short = len(left) < cohort.params.min_survivors
    if (roster := harness.roster_of(ran)) is not None:
        hood = neighbourhood(cohort.params, roster)
        short = short or any(
            len(left & set(hood.holders(c))) < hood.threshold for c in hood.members
        )
    assert short


@pytest.mark.parametrize("phase", [*DENSE_PHASES, "consistency"])
def test_in_every_phase_the_tolerated_number_may_drop_out_at_once(phase):
    cohort = harness.Cohort.of(harness.params(9, threat=Threat.ACTIVE))
    gone = cohort.clients[::4][: tolerance(cohort.params)]
    assert len(gone) == 2
    ran = harness.run(cohort, harness.drops(gone, phase))
    assert ran.outcome.aborted is None
    harness.assert_sums_are_exact(ran)
    expected = (
        cohort.clients
        if phase in ("unmask", "consistency")
        else [c for c in cohort.clients if c not in gone]
    )
    assert ran.survivors() == expected


def test_a_client_that_drops_between_two_stages_is_in_the_first_sum_only():
    cohort = harness.Cohort.of(
        harness.params(7, harness.dense_stage(Ring(16)), harness.row_stage(Ring(40), dense=3))
    )
    late = cohort.clients[3]
    ran = harness.run(cohort, [Drop(late, "reveal")])
    assert late in ran.survivors(0)
    assert late not in ran.survivors(1)
    harness.assert_sums_are_exact(ran)


def test_a_row_below_quorum_is_counted_and_stays_closed():
    cohort = harness.Cohort.of(harness.params(5, harness.row_stage(), corrupt=2), seed=3)
    ran = harness.run(cohort)
    groups = harness.plain_groups(cohort, 0, 0, cohort.clients)
    revealed = {int(r) for c in cohort.clients for r in cohort.inputs[c][0].tables[0].rows}
    assert 0 < len(groups) < len(revealed), "the example has rows of both kinds"
    assert ran.sums[0].tables[0].below_quorum == len(revealed) - len(groups)
    assert {int(r) for r in ran.sums[0].tables[0].rows} == set(groups)
    harness.assert_sums_are_exact(ran)


def test_rows_that_dropouts_shrank_below_the_quorum_are_counted_once_the_sum_is_open():
    cohort = harness.Cohort.of(harness.params(6, harness.row_stage(), corrupt=1), seed=3)
    gone = cohort.clients[2]
    whole = harness.run(cohort).sums[0].tables[0]
    assert whole.shrunk == 0, "nobody dropped out"
    ran = harness.run(cohort, harness.drops([gone], "collect"))
    part = ran.sums[0].tables[0]
    groups = harness.plain_groups(cohort, 0, 0, cohort.clients)
    left = {row: len(members - {gone}) for row, members in groups.items()}
    small = [row for row, size in left.items() if size < cohort.params.quorum]
    assert 0 < len(small) < len(groups), "the example has rows of both kinds"
    assert part.shrunk == len(small)
    before = harness.run(cohort, harness.drops([gone], "reveal")).sums[0].tables[0]
    assert before.shrunk == 0, "who is gone before the groups are formed shrinks none"


def test_clients_with_different_quorums_agree_on_the_groups():
    params = harness.params(6, harness.row_stage())
    quorums = {1: 2, 4: 2, 7: 3, 10: 5, 13: 6, 16: 4}
    ran = harness.run(harness.Cohort.of(params, seed=5, quorums=quorums))
    assert not ran.outcome.left
    harness.assert_sums_are_exact(ran)


def test_byte_counts_are_the_lengths_of_what_was_encoded():
    cohort = harness.Cohort.of(harness.params(4, harness.dense_stage(Ring(20), 1000)))
    ran = harness.run(cohort)
    client = cohort.clients[0]
    sent = [s for s in ran.views.by_party[client] if s.direction == "sent"]
    up, down = ran.outcome.traffic.bytes_of(client)
    assert up == sum(len(s.data) for s in sent)
    assert down == sum(
        len(s.data)
        for s in ran.views.by_party["server"]
        if s.direction == "sent" and s.other == client
    )
    masked = next(s for s in sent if s.kind == "MaskedInput")
    assert 2500 < len(masked.data) < 2500 + 40, "1,000 words of exactly 20 bits, and the frame"


@pytest.mark.slow
def test_a_cohort_of_a_hundred_on_both_graphs():
    for graph in GraphKind:
        params = harness.params(
            100,
            harness.dense_stage(Ring(22), 500),
            harness.row_stage(Ring(22), dense=40),
            graph=graph,
            corrupt=10,
        )
        cohort = harness.Cohort.of(params, universe=60)
        gone = cohort.clients[3::5]
        ran = harness.run(cohort, harness.drops(gone, "collect"))
        assert ran.outcome.aborted is None
        assert len(ran.survivors()) == 80
        harness.assert_sums_are_exact(ran)
        assert params.topology.complete == (graph is GraphKind.COMPLETE)
