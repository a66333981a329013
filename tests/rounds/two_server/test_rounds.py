"""Rounds between two servers train what rounds of one server train, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rounds.population import CATEGORIES, DENSE, WIDTH, federation, plan
from rounds.shops import Roles, alike, finished, model_of, one_table, shop, two_server_plan
from tessera import wire
from tessera.errors import ConfigError, MisuseError, ServerFault
from tessera.ids import HELPER, SERVER, ClientId, RoundId
from tessera.learning.averaging import ServerStep
from tessera.learning.tables.submodel import ModelUpdate
from tessera.plan import Plan, SimulationPlan, TwoServerPlan
from tessera.protocols.machine import Outbound
from tessera.protocols.two_server.messages import OpenedSum, WriteReport
from tessera.protocols.two_server.params import Read, Servers, Write
from tessera.report.progress import sentence
from tessera.rounds import encode
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.rounds.party import HelperKeys
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.domain import two_server_params, write_cost
from tessera.simulation.faults import Corrupt, Drop, Duplicate, Fault, Reorder
from tessera.simulation.views import Views

SAMPLED = SimulationPlan(crypto="sampled", crypto_every=10_000)
"""Round 0 is real, all others are ideal."""

WAYS = [
    {"write": "dpf"},
    {"write": "dense"},
    {"write": "auto"},
    {"write": "dpf", "domain": "union"},
    {"write": "auto", "domain": "union"},
    {"write": "dpf", "stash": 2},
]
MOMENTUM = ServerStep(optimizer="momentum", rate=0.5, shrinkage=0.01)


# --- the same model ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_two_servers_train_the_model_that_one_server_trains(way):
    open_, between = (
        federation(settings, clients=12)
        for settings in (plan("submodel", server=MOMENTUM), two_server_plan(way, server=MOMENTUM))
    )
    plain, hidden = finished(open_, 2), finished(between, 2)
    assert model_of(between) == model_of(open_)
    for name in ("survivors", "rows_opened", "weight", "clipped", "rows_over_cap"):
        assert [getattr(e, name) for e in hidden] == [getattr(e, name) for e in plain]
    assert all(e.secure and e.measured and e.bytes_between > 0 for e in hidden)
    assert all(sum(e.helper_seconds.values()) > 0 for e in hidden)
    assert all(bool(e.union_rows) == (way.get("domain") == "union") for e in hidden)


def test_keys_that_last_train_the_same_model_with_fewer_bytes():
    """The cohort is drawn once for all rounds in which keys last."""
    way = {"write": "dpf", "domain": "whole"}
    each, lasting = (
        federation(two_server_plan({**way, "key_rounds": rounds}), clients=8) for rounds in (1, 3)
    )
    fresh, kept = finished(each, 6), finished(lasting, 6)
    assert model_of(lasting) == model_of(each)
    up = [sum(e.bytes_up.values()) for e in kept]
    full = sum(fresh[0].bytes_up.values())  # how full single bins are differs with the seed
    assert up[0] == pytest.approx(full, rel=0.06) and up[3] == pytest.approx(full, rel=0.06)
    assert max(up[1:3] + up[4:]) < 0.8 * full
    drawn = federation(two_server_plan({**way, "key_rounds": 3}), clients=20)
    cohorts = [tuple(drawn.cohorts.sample(RoundId(r))) for r in range(9)]
    assert len(set(cohorts)) == 3 and all(len(set(cohorts[at : at + 3])) == 1 for at in (0, 3, 6))


def test_whoever_misses_a_round_of_its_keys_ends_it_and_the_next_one_opens():
    absent = {1: [Drop(ClientId(2), "collect")], 4: [Drop(ClientId(2), "query")]}
    fed = federation(
        two_server_plan({"write": "dpf", "domain": "whole", "key_rounds": 3}),
        clients=8,
        faults=lambda round_id, cohort: absent.get(int(round_id), []),
    )
    ends = [e for e in fed.run(6) if isinstance(e, RoundFinished | RoundAbort)]
    assert [isinstance(e, RoundFinished) for e in ends] == [True, False, True, True, False, True]
    assert "whose keys last are missing" in ends[1].reason


def test_where_it_is_allowed_the_rows_exposed_are_counted():
    way = {"write": "dpf", "domain": "whole", "key_rounds": 3, "absent": "allow"}
    fed = federation(
        two_server_plan(way),
        clients=8,
        faults=lambda round_id, cohort: [Drop(ClientId(2), "collect")] if round_id == 1 else [],
    )
    done = finished(fed, 3)
    own = fed.participants[ClientId(2)].local.own_keys.latest()
    assert [e.rows_exposed for e in done] == [0, sum(map(len, own.rows.values())), 0]
    assert done[1].survivors == 7 and done[1].rows_exposed > 20
    assert "rows exposed" in sentence(done[1]) and "exposed" not in sentence(done[2])


@pytest.mark.parametrize("domain", ["whole", "union"])
def test_the_leader_tells_the_sums_that_were_opened(domain):
    settings = two_server_plan({"domain": domain})
    fed = federation(settings)
    assert fed.last is None
    [done] = finished(fed, 1)
    leader, result = fed.last, fed.last.result
    *union, update = leader.sums
    assert len(union) == (domain == "union")
    assert [s.stage for s in leader.sums] == list(range(len(leader.sums)))
    assert update.survivors.tolist() == list(result.survivors) and done.survivors == 8
    again = encode.means(settings, update, union=leader.union)
    assert again.dense.tobytes() == result.dense.tobytes() and again.weight == result.weight
    for name, mean in result.tables.items():
        assert again.tables[name].ids.tolist() == mean.ids.tolist()
        assert again.tables[name].mean.tobytes() == mean.mean.tobytes()


def test_each_servers_means_are_worked_out_once(monkeypatch):
    calls, row_means = [], encode.row_means

    def counted(plan, ids, *rest):
        calls.append(len(ids))
        return row_means(plan, ids, *rest)

    monkeypatch.setattr(encode, "row_means", counted)
    fed = federation(two_server_plan())
    finished(fed, 1)
    assert all(fed.last.result.survivors for _ in range(3))
    assert len(calls) == 2 * len(fed.plan.tables)


def test_the_model_is_a_sum_that_can_be_done_by_hand():
    """An oracle that knows nothing of rounds: deltas times counts, rounded, by the counts."""
    settings = one_table("two-server", 9, two_server=TwoServerPlan(write="dpf"))
    held = {0: [0, 3, 4], 1: [3, 8], 2: [], 3: [0, 3, 8]}
    fed = shop(settings, held)
    before = fed.tables["goods"].values(np.arange(9, dtype=np.uint64))
    finished(fed, 1)
    moved = fed.tables["goods"].values(np.arange(9, dtype=np.uint64)) - before
    for row in range(9):
        who = [c for c, rows in held.items() if row in rows]
        if not who:
            assert not moved[row].any()
            continue
        count = 1 + row % 2
        mean = sum(count * np.sin(row + c + np.arange(WIDTH)) / 5 for c in who)
        mean = mean / (count * len(who))
        step = 2 * settings.quantizer.clip / (settings.update.levels - 1)
        assert np.abs(moved[row] - mean).max() <= step / count + 1e-6


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_rows_come_down_as_one_server_sends_them(precision):
    models = []
    for scheme in ("submodel", "two-server"):
        base = plan(scheme)
        settings = replace(base, model=replace(base.model, precision=precision))
        settings = Plan.parse(settings.to_toml())
        fed = federation(settings, clients=12)
        finished(fed, 2)
        models.append(model_of(fed))
    assert models[0] == models[1]


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("domain", ["whole", "union"])
def test_tables_of_a_few_rows_are_read_whole_and_written_in_plain_shares(rows, domain):
    held = {c: sorted({c % rows, (c + 1) % rows}) for c in range(4)}
    open_ = shop(one_table("submodel", rows), held)
    two = TwoServerPlan(write="dpf", domain=domain)
    between = shop(one_table("two-server", rows, two_server=two), held)
    plain, hidden = finished(open_, 2), finished(between, 2)
    assert model_of(between) == model_of(open_)
    assert [e.rows_opened for e in hidden] == [e.rows_opened for e in plain]
    (cost,) = between.last.writing
    few = cost.rows < 3
    assert (cost.keys is None) == few and cost.write is (Write.DENSE if few else Write.POINTS)
    assert ("too few" in cost.reason) == few


@pytest.mark.parametrize("domain", ["whole", "union"])
@pytest.mark.parametrize("write", ["dpf", "dense"])
def test_clients_without_rows_and_with_all_of_them(domain, write):
    everything = list(range(60))
    held = {0: [], 1: everything, 2: [7, 59], 3: []}
    open_ = shop(one_table("submodel", 60), held)
    two = TwoServerPlan(write=write, domain=domain)
    between = shop(one_table("two-server", 60, max_rows=60, two_server=two), held)
    finished(open_, 2)
    ends = finished(between, 2)
    assert model_of(between) == model_of(open_)
    assert [e.rows_opened for e in ends] == [60, 60]


@pytest.mark.parametrize("domain", ["whole", "union"])
def test_a_cohort_without_a_single_row_still_trains_the_dense_part(domain):
    held: dict[int, list[int]] = {c: [] for c in range(4)}
    open_ = shop(one_table("submodel", 60), held)
    two = TwoServerPlan(domain=domain)
    between = shop(one_table("two-server", 60, two_server=two), held)
    finished(open_, 2)
    ends = finished(between, 2)
    assert model_of(between) == model_of(open_) and between.dense.any()
    assert [e.rows_opened for e in ends] == [0, 0]


def test_clients_that_face_a_lying_server_sign_for_the_union_too():
    models = []
    for threat in ("semi-honest", "active"):
        fed = federation(two_server_plan({"domain": "union"}, security={"threat": threat}))
        (end,) = finished(fed, 1)
        assert end.survivors == 8
        models.append(model_of(fed))
    assert models[0] == models[1]


@pytest.mark.parametrize("way", [{}, {"domain": "union"}], ids=str)
def test_a_client_that_drops_out_right_after_its_report_counts(way):
    visit = 1 if way else 0
    models = []
    for faults in (None, lambda _, cohort: [Drop(cohort[1], "collect", stage=visit, after=True)]):
        fed = federation(two_server_plan(way), faults=faults)
        (end,) = finished(fed, 1)
        assert end.survivors == 8
        models.append(model_of(fed))
    assert models[0] == models[1]


@pytest.mark.parametrize("way", [{"write": "dpf"}, {"domain": "union"}], ids=str)
def test_messages_twice_and_in_another_order_change_nothing(way):
    last = 1 if "domain" in way else 0

    def faults(_: RoundId, cohort) -> list[Fault]:
        return [
            Duplicate(cohort[0], phase="query"),
            Duplicate(cohort[1], phase="collect", stage=last),
            Duplicate(cohort[2], kind="QueryAnswers"),
            Duplicate(cohort[3], kind="SignedHeader"),
            Duplicate(cohort[4], kind="UnionOpened"),
            Reorder("query", 1),
            Reorder("collect", 2, stage=last),
        ]

    models = []
    for script in (None, faults):
        fed = federation(two_server_plan(way), faults=script)
        (end,) = finished(fed, 1)
        assert end.survivors == 8 and not end.excluded
        models.append(model_of(fed))
    assert models[0] == models[1]


@pytest.mark.parametrize("where", ["message", "box", "keys"])
def test_a_damaged_report_is_left_out_at_both_servers_and_the_round_goes_on(where):
    settings = two_server_plan({"write": "dpf"})
    fed = federation(
        settings,
        faults=lambda _, cohort: [Corrupt(cohort[3], "collect")] if where == "message" else [],
    )
    make = fed._subcohort

    def tampered(*given, **more):
        part = make(*given, **more)
        client = part.clients[ClientId(3)]
        supply = client.supply

        def changed(update: ModelUpdate | None) -> list[Outbound]:
            (out,) = supply(update)
            report = wire.decode(out.data, expect=[WriteReport])
            box, keys = bytearray(report.box), bytearray(report.public[0])
            if where == "box":
                box[-1] ^= 1
            elif where == "keys":
                keys[100] ^= 1
            public = (bytes(keys), *report.public[1:])
            return [Outbound.of(SERVER, replace(report, box=bytes(box), public=public))]

        client.supply = changed
        return part

    fed._subcohort = tampered
    (end,) = finished(fed, 1)
    assert end.survivors == 7
    assert list(fed.last.excluded) == ([] if where == "message" else [3])
    assert (
        end.excluded
        == {
            "message": {"sent an invalid message": 1},
            "box": {"sent a box that cannot be unsealed": 1},
            "keys": {"sent a public part that does not match its box": 1},
        }[where]
    )
    without = federation(settings, faults=lambda _, cohort: [Drop(cohort[3], "collect")])
    finished(without, 1)
    assert model_of(fed) == model_of(without)


@pytest.mark.parametrize("simulation", [SimulationPlan(), SAMPLED])
def test_below_the_least_cohort_the_round_is_aborted_and_the_model_stays(simulation):
    settings = two_server_plan({"min_cohort": 5}, simulation=simulation)

    def faults(round_id: RoundId, cohort) -> list[Fault]:
        return [Drop(c, "collect") for c in cohort[: 4 if round_id else 3]]

    fed = federation(settings, faults=faults)
    first, *rest = finished(fed, 1)
    assert isinstance(first, RoundFinished) and first.survivors == 5 and not rest
    before = model_of(fed)
    (end,) = finished(fed, 1)
    assert isinstance(end, RoundAbort)
    assert (end.phase, end.answered, end.needed) == ("collect", 4, 5)
    assert model_of(fed) == before
    (after,) = finished(federation(settings), 1)
    assert isinstance(after, RoundFinished)


# --- rows over the cap, and pseudonyms ---------------------------------------------------------


@pytest.mark.parametrize("pseudonyms", [False, True])
@pytest.mark.parametrize("domain", ["whole", "union"])
def test_a_client_over_max_rows_keeps_the_same_rows_in_every_round(domain, pseudonyms):
    settings = one_table(
        "two-server",
        60,
        max_rows=10,
        two_server=TwoServerPlan(domain=domain),
        privacy={"pseudonyms": pseudonyms},
    )
    seen: list[np.ndarray] = []
    fed = shop(settings, {0: list(range(0, 60, 2)), 1: [], 2: [], 3: []})
    train = fed._trainer

    def watching(round_id, submodels):
        seen.append(submodels[ClientId(0)].trained["goods"])
        return train(round_id, submodels)

    fed._trainer = watching
    ends = finished(fed, 3)
    assert [len(rows) for rows in seen] == [10, 10, 10]
    assert all((rows == seen[0]).all() and (rows % 2 == 0).all() for rows in seen)
    assert not (seen[0] == np.arange(0, 20, 2)).all(), "which rows is not the order of ids"
    assert [e.rows_over_cap for e in ends] == [20, 20, 20]
    assert [e.rows_opened for e in ends] == [10, 10, 10]


def test_subcohort_servers_decoys_are_the_same_for_ever():
    """They cover a union only as long as they are in all of them."""
    settings = two_server_plan({"domain": "union"}, privacy={"decoys": 0.5})
    roles = Roles(settings)
    client = roles.client()
    client.start()
    local = client._local
    other = two_server_plan({"domain": "union"}, privacy={"decoys": 0.0})

    def later(chosen: Plan) -> TwoServerClientRound:
        setup = roles.client_setup(number=RoundId(1), local=local)
        return TwoServerClientRound(replace(setup, plan=chosen))

    with pytest.raises(ConfigError, match=r"decoys = 0\.5, and 0\.0 was requested"):
        later(other).start()
    assert later(settings).start()


def written(settings: Plan, held: list[int]) -> set[int]:
    """The rows that a client with these writes, when nobody else has any."""
    seen: list[np.ndarray] = []
    fed = shop(settings, {0: held, 1: [], 2: [], 3: []})
    train = fed._trainer

    def watching(round_id, submodels):
        seen.append(submodels[ClientId(0)].trained["goods"])
        return train(round_id, submodels)

    fed._trainer = watching
    finished(fed, 1)
    return set(seen[0].tolist())


def test_one_row_more_changes_at_most_one_of_the_rows_kept():
    """Drawn by place, all that come after the new row would be drawn anew."""
    settings = one_table("two-server", 60, max_rows=10)

    held = list(range(2, 60, 2))
    before = written(settings, held)
    assert len(before) == 10
    for row in (0, 1, 31, 59):
        assert len(before & written(settings, sorted([*held, row]))) >= 9
    gone = min(before)
    left = written(settings, [row for row in held if row != gone])
    assert len(left) == 10 and before - left == {gone}


def test_going_on_at_a_round_is_like_having_been_there():
    first, last = 2, 4
    settings = two_server_plan(
        {"domain": "union"}, union={"max_rows": 12}, privacy={"pseudonyms": True}
    )
    whole = federation(settings, clients=12)
    events = finished(whole, last)
    part, rest = federation(settings, clients=12), federation(settings, clients=12)
    finished(part, first)
    rest.model.dense = part.dense
    for name, table in part.tables.items():
        ids = np.arange(table.size, dtype=np.uint64)
        rest.tables[name].put(ids, table.values(ids), np.ones(len(ids), dtype=np.int64))
    rest.go_on_at(first)
    later = finished(rest, last - first)
    assert model_of(rest) == model_of(whole)
    assert alike(later) == alike(events[first:])


# --- what breaks ------------------------------------------------------------------------------


def test_values_beyond_the_ring_are_cut_and_counted():
    settings = two_server_plan({"write": "dpf"})
    tight = replace(settings, update=replace(settings.update, clip=0.01))
    fed = federation(tight)
    (end,) = finished(fed, 1)
    assert end.clipped > 0.5 and end.survivors == 8


@pytest.mark.parametrize("way", [{}, {"domain": "union"}], ids=str)
def test_a_round_that_is_opened_a_second_time_is_refused_by_the_helper(way):
    fed = federation(two_server_plan(way))
    finished(fed, 2)
    before = model_of(fed)
    fed.course.next_round = 1
    with pytest.raises(ServerFault, match="after round 1"):  # a client remembers, too
        finished(fed, 1)
    fed.course.next_round = 1
    for member in fed.participants.values():
        member.local.last_round = None
    (end,) = finished(fed, 1)
    assert isinstance(end, RoundAbort) and end.phase == "handshake"
    assert model_of(fed) == before
    (again,) = finished(fed, 1)  # round 2 is a new one
    assert isinstance(again, RoundFinished)


def test_keys_that_are_mixed_up_are_refused():
    roles = Roles(two_server_plan())
    pair = roles.setup
    swapped = Servers(leader=pair.servers.helper, helper=pair.servers.leader, box=pair.servers.box)
    with pytest.raises(MisuseError, match="not the one that is pinned"):
        roles.leader(key=pair.helper.signing).start()
    with pytest.raises(MisuseError, match="not the one that is pinned"):
        roles.helper(keys=HelperKeys(pair.leader, pair.helper.box))
    with pytest.raises(ConfigError, match="one key"):
        Servers(leader=pair.servers.leader, helper=pair.servers.leader, box=pair.servers.box)
    with pytest.raises(ConfigError, match="has no key"):
        roles.client(identity=None)
    client = roles.client(servers=swapped)
    client.start()
    with pytest.raises(ServerFault, match="other parameters"):
        client.receive(SERVER, roles.opening(roles.leader(), roles.helper()))
    assert client.phase == "Left" and client.pending is None


def test_a_client_does_not_answer_out_of_turn():
    roles, whole = Roles(two_server_plan({"domain": "union"})), Roles(two_server_plan())
    client = roles.client()
    with pytest.raises(MisuseError, match="started before"):
        client.receive(SERVER, b"")
    client.start()
    with pytest.raises(ServerFault, match="SignedHeader, which is not due"):
        client.receive(SERVER, whole.opening(whole.leader(), whole.helper()))
    with pytest.raises(MisuseError, match="not due"):
        roles.client().supply(ModelUpdate(np.zeros(DENSE), 1, {}))


# --- the events -------------------------------------------------------------------------------


def test_auto_takes_the_fewer_bytes_and_says_why():
    settings = one_table("two-server", 20_000, max_rows=20)
    cost = write_cost(settings, settings.tables[0])
    assert cost.write is Write.POINTS and cost.keys < cost.shares
    assert cost.reason == f"keys of {cost.keys:,} bytes, not plain shares of {cost.shares:,}"
    small = one_table("two-server", 200, max_rows=100)
    many = write_cost(small, small.tables[0])
    assert many.write is Write.DENSE and many.shares < many.keys
    servers = Roles(two_server_plan()).setup.servers
    for check, read in ((True, Read.CHECKED), (False, Read.POINTS)):
        two = replace(settings.two_server, check=check)
        (table,) = two_server_params(replace(settings, two_server=two), RoundId(0), servers).tables
        assert table.write is Write.POINTS and table.read is read


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_a_report_costs_is_what_was_reckoned(way):
    views = Views()
    settings = two_server_plan(way)
    fed = federation(settings, views=views)
    finished(fed, 1)
    reports = [
        e for e in views.by_party[SERVER] if e.kind == "WriteReport" and e.direction == "received"
    ]
    assert len(reports) == 8 and len({len(e.data) for e in reports}) == 1
    report = wire.decode(reports[0].data, expect=[WriteReport])
    costs = fed.last.writing
    points = [cost for cost in costs if cost.write is Write.POINTS]
    for blob, cost in zip(report.public, points, strict=True):
        # A round's seed decides how full the bins are; of a dozen rows it decides much.
        assert abs(len(blob) - cost.keys) <= (0.25 if cost.rows < 20 else 0.05) * cost.keys
    plain = sum(
        cost.rows * (settings.tables[i].width + 1)
        for i, cost in enumerate(costs)
        if cost.write is Write.DENSE
    )
    assert len(report.dense) == -(-(plain + DENSE + 1) * settings.ring.bits // 8)


def test_both_servers_end_with_the_same_sum():
    views = Views()
    fed = federation(two_server_plan({"write": "dpf"}), views=views)
    (end,) = finished(fed, 1)
    (told,) = [e for e in views.by_party[HELPER] if e.kind == "OpenedSum"]
    opened = wire.decode(told.data, expect=[OpenedSum])
    assert sum(len(part.rows) for part in opened.tables) == end.rows_opened
    kinds = {e.kind for e in views.by_party[HELPER]}
    assert not kinds & {"Query", "WriteReport"}, "clients do not speak to the helper"
    assert CATEGORIES >= len(opened.tables[1].rows) > 0
