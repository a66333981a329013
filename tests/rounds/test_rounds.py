"""A round gives the means it should under every scheme, and charges before it says a word."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rounds import population
from rounds.population import GOODS, contribution, derived, federation, plan
from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError, MisuseError, ServerFault
from tessera.ids import SERVER, ClientId, RoundId, TableId
from tessera.plan import Scheme
from tessera.privacy.dp.events import ExactRelease, IndexAnswers
from tessera.privacy.dp.ledger import BudgetExceeded, Ledger
from tessera.privacy.index.period import EarlyPeriod
from tessera.privacy.index.response import IndexPrivacy
from tessera.protocols.union.decoys import Listed, WholeTable
from tessera.rounds import encode
from tessera.rounds.client import ClientRound
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.rounds.messages import UnionOpened, most_union_bytes
from tessera.rounds.party import ClientRoundSetup
from tessera.simulation.faults import Drop, random_dropouts
from tessera.simulation.views import Views

PAPERS = {"decoys": 0.0, "min_group": 1, "insecure_small_groups": True}


def finished(fed, rounds: int = 1) -> list[RoundFinished]:
    return [e for e in fed.run(rounds) if isinstance(e, RoundFinished)]


def row_oracle(fed, survivors, name: str, revealed: dict, counted: bool = True) -> dict:
    """Per-row means by counts, in plain floats."""
    total: dict[int, np.ndarray] = {}
    counts: dict[int, int] = {}
    width = fed.plan.table(name).width
    for client in survivors:
        ids = revealed[client][name]
        part = contribution(client, name, ids, width)
        for i, row in enumerate(ids.tolist()):
            total[row] = total.get(row, 0) + part.values[i] * part.counts[i]
            counts[row] = counts.get(row, 0) + int(part.counts[i])
    return {row: total[row] / counts[row] for row in total}


def real_sets(fed) -> dict:
    maps = derived()
    return {
        c: {
            "goods": m.local.real["goods"],
            "categories": maps["categories"].row_ids(m.local.real["goods"]),
        }
        for c, m in fed.participants.items()
    }


@pytest.mark.parametrize("scheme", ["submodel", "secure-submodel"])
def test_rows_get_their_mean_by_counts(scheme):
    settings = plan(scheme, privacy={"level": "cpp1", **PAPERS})
    fed = federation(settings)
    [done] = finished(fed)
    result = fed.last.result
    step = settings.quantizer.clip / settings.quantizer.top
    for name in ("goods", "categories"):
        expected = row_oracle(fed, result.survivors, name, real_sets(fed))
        part = result.tables[name]
        assert part.ids.tolist() == sorted(expected)
        for row, mean in zip(part.ids.tolist(), part.mean, strict=True):
            assert np.abs(mean - expected[row]).max() < 8 * step
    weights = {c: 2 + int(c) % 3 for c in result.survivors}
    assert done.weight == sum(weights.values())
    dense = sum(np.cos(int(c)) / 8 * weights[c] for c in result.survivors) / done.weight
    assert np.abs(result.dense - dense).max() < 8 * step


@pytest.mark.parametrize("scheme", ["fedavg", "secure-fedavg"])
def test_the_whole_model_gets_its_mean_by_training_set_size(scheme):
    fed = federation(plan(scheme))
    [done] = finished(fed)
    part = fed.last.result.tables["goods"]
    total = np.zeros((GOODS, 3))
    for client, member in fed.participants.items():
        rows = member.local.real["goods"]
        total[rows] += contribution(client, "goods", rows, 3).values * (2 + int(client) % 3)
    step = fed.plan.quantizer.clip / fed.plan.quantizer.top
    assert np.abs(part.mean - total / done.weight).max() < 8 * step
    assert fed.tables["goods"].touched == GOODS


@pytest.mark.parametrize("pair", [("submodel", "secure-submodel"), ("fedavg", "secure-fedavg")])
def test_secure_and_plain_give_the_same_integers(pair):
    """The same rounding coins, the same rows: masks change nothing, to the last bit."""
    models = []
    for scheme in pair:
        fed = federation(plan(scheme, privacy={"level": "cpp1", **PAPERS}))
        finished(fed, 2)
        ids = np.arange(GOODS, dtype=np.uint64)
        models.append((fed.dense.tobytes(), fed.tables["goods"].values(ids).tobytes()))
    assert models[0] == models[1]


def test_cpp1_and_cpp5_train_the_same_model_in_the_papers_setting():
    models = []
    for level in ("cpp1", "cpp5"):
        fed = federation(plan(privacy={"level": level, **PAPERS}))
        finished(fed, 2)
        ids = np.arange(GOODS, dtype=np.uint64)
        models.append((fed.dense.tobytes(), fed.tables["goods"].values(ids).tobytes()))
    assert models[0] == models[1]


@pytest.mark.parametrize("encoding", ["bloom", "sum-table"])
@pytest.mark.parametrize("seed", range(3))
def test_the_union_is_exactly_the_survivors_rows_and_decoys(encoding, seed):
    settings = plan(union={"encoding": encoding}, privacy={"level": "cpp4", "decoys": 0.0})
    fed = federation(settings, seed=seed, faults=random_dropouts(0.2, seed, settings))
    finished(fed)
    survivors = [ClientId(int(c)) for c in fed.last.sums[0].survivors]
    union = set(
        np.concatenate([fed.participants[c].local.real["goods"] for c in survivors]).tolist()
    )
    assert set(fed.last.union["goods"].tolist()) == union
    assert set(fed.last.union["categories"].tolist()) == {g % 12 for g in union}


def test_decoys_are_in_the_union_and_leave_no_trace_in_the_model():
    settings = plan(privacy={"level": "cpp5", "decoys": 0.5})
    fed = federation(settings, each=10)
    finished(fed)
    real = set(np.concatenate([m.local.real["goods"] for m in fed.participants.values()]).tolist())
    union = set(fed.last.union["goods"].tolist())
    assert real < union
    decoys = np.array(sorted(union - real), dtype=np.uint64)
    table = fed.tables["goods"]
    assert (table.values(decoys) == table.spec.initial_values(decoys)).all()
    assert table.touched == len(real)


def test_decoys_stay_for_the_period_and_change_with_it():
    settings = plan(privacy={"level": "cpp5", "decoys": 1.0, "period_rounds": 2})
    fed = federation(settings, each=5)
    unions = []
    for _ in range(3):
        finished(fed)
        unions.append(fed.last.union["goods"].tolist())
    assert unions[0] == unions[1]
    assert unions[1] != unions[2]


def test_a_row_below_quorum_is_not_updated():
    fed = federation(plan(privacy={"level": "cpp1", "decoys": 0.0}))
    [done] = finished(fed)
    holders: dict[int, int] = {}
    for member in fed.participants.values():
        for row in member.local.real["goods"].tolist():
            holders[row] = holders.get(row, 0) + 1
    shared = {row for row, count in holders.items() if count >= 2}
    assert set(fed.last.result.tables["goods"].ids.tolist()) == shared
    assert done.rows_below_quorum == len(holders) - len(shared)


def test_dropouts_between_union_and_update_are_survived():
    fed = federation(
        plan(),
        faults=lambda round_id, cohort: [
            Drop(cohort[2], "reveal"),
            Drop(cohort[5], "collect", stage=1),
        ],
    )
    [done] = finished(fed)
    assert done.survivors == 6
    assert len(fed.last.sums[0].survivors) == 8


def test_too_many_dropouts_give_the_round_up_and_leave_the_model_alone():
    fed = federation(plan(), faults=lambda r, cohort: [Drop(c, "collect") for c in cohort[:4]])
    events = list(fed.run(1))
    assert isinstance(events[-1], RoundAbort)
    assert fed.tables["goods"].touched == 0
    assert not fed.dense.any()


# --- privacy --------------------------------------------------------------------------------------


def client_round(fed, client: ClientId, round_id: int = 0, settings=None, **local) -> ClientRound:
    member = fed.participants[client]
    for name, value in local.items():
        setattr(member.local, name, value)
    return new_client(settings or fed.plan, round_id, client, member.local)


def new_client(settings, round_id: int, client: ClientId, local) -> ClientRound:
    return ClientRound(
        ClientRoundSetup(
            plan=settings,
            round_id=RoundId(round_id),
            party=client,
            local=local,
            entropy=ScriptedEntropy(b"one client"),
        )
    )


def test_everything_is_charged_before_the_first_message():
    fed = federation(plan())
    client = client_round(fed, ClientId(0))
    ledger = fed.participants[ClientId(0)].local.ledger
    assert not ledger.entries
    out = client.start()
    assert [m.kind for m in out] == ["Advert"]
    assert [type(e.event) for e in ledger.entries] == [
        ExactRelease,
        ExactRelease,
        IndexAnswers,
    ]
    assert ledger.guarantee().epsilon == pytest.approx(0.5108, abs=1e-4)
    assert ledger.guarantee().condition == "given the union, the sums and counts"
    assert ledger.guarantee(conditional=False).epsilon == np.inf


@pytest.mark.parametrize(
    ("scheme", "released"),
    [
        ("secure-submodel", ["the union", "the sums and counts"]),
        ("secure-fedavg", ["the sums and counts"]),
        ("submodel", []),
        ("fedavg", []),
    ],
)
def test_every_scheme_that_opens_sums_by_row_charges_for_them(scheme, released):
    """In the clear nothing is promised, so nothing is charged."""
    fed = federation(plan(scheme))
    [done] = finished(fed)
    charged = fed.participants[ClientId(0)].local.ledger.entries
    exact = [e.event.what for e in charged if isinstance(e.event, ExactRelease)]
    assert exact == released
    assert done.condition == ("given " + ", ".join(released) if released else "")


def test_a_budget_that_would_be_passed_stops_the_client_before_it_says_anything():
    fed = federation(plan(privacy={"level": "cpp2"}))
    client = client_round(fed, ClientId(0), ledger=Ledger(budget=1.0))
    with pytest.raises(BudgetExceeded, match="round 0"):
        client.start()
    assert client.phase == "Invited"


@pytest.mark.parametrize(
    ("given", "planned", "periods"), [(None, 0.0, 20), (None, 2.5, 2), (4.0, 2.5, 3), (0.5, 0.0, 0)]
)
def test_a_budget_is_on_by_default_and_ends_the_answers(given, planned, periods):
    """At CPP4 a period costs 0.51 in one round, and up to 1.10: 20 periods by default."""
    settings = plan(privacy={"level": "cpp4", "period_rounds": 4, "budget": planned})
    local = federation(settings).participants[ClientId(0)].local
    local.ledger = Ledger(budget=given)
    started = 0
    with pytest.raises(BudgetExceeded, match="budget"):
        for number in range(200):
            new_client(settings, number, ClientId(0), local).start()
            started = number + 1
    assert started // 4 == periods


def rounds_started(fed, numbers):
    """How many of these rounds a client starts before it refuses one."""
    local = fed.participants[ClientId(0)].local
    for started, number in enumerate(numbers):
        try:
            new_client(fed.plan, number, ClientId(0), local).start()
        except EarlyPeriod:
            return started
    return len(numbers)


def test_a_period_that_is_early_by_the_clients_own_count_is_refused():
    """Round ids are the leader's: 0, 100, 200 would begin a period each, and answer anew."""
    fed = federation(plan(privacy={"level": "cpp4", "period_rounds": 100}))
    assert rounds_started(fed, [0, 100, 200]) == 1
    assert rounds_started(fed, list(range(201, 210))) == 0  # still not due


def test_a_leader_that_numbers_its_rounds_one_by_one_is_never_early():
    fed = federation(plan(privacy={"level": "cpp4", "period_rounds": 5}))
    assert rounds_started(fed, list(range(17))) == 17


def test_refused_rounds_count_so_that_a_client_that_missed_some_comes_back():
    fed = federation(plan(privacy={"level": "cpp4", "period_rounds": 5}))
    assert rounds_started(fed, [0, 3]) == 2
    for number in (5, 6, 7):
        assert rounds_started(fed, [number]) == 0
    assert rounds_started(fed, [8, 9]) == 2


@pytest.mark.parametrize(
    ("more", "started"), [({"own_rounds": 1}, 3), ({"own_rounds": 2}, 1), ({}, 1)]
)
def test_own_rounds_say_how_many_a_client_waits_for(more, started):
    fed = federation(plan(privacy={"level": "cpp4", "period_rounds": 100, **more}))
    assert rounds_started(fed, [0, 100, 200]) == started


def test_where_cohorts_are_drawn_simulated_clients_do_not_insist_on_their_rounds():
    fed = federation(plan(cohort=4, privacy={"level": "cpp4", "period_rounds": 2}), clients=9)
    assert len(finished(fed, 8)) == 8
    assert fed.participants[ClientId(0)].local.own_rounds == 1
    with pytest.raises(ConfigError, match="own_rounds"):
        plan(privacy={"period_rounds": 2, "own_rounds": 3})


def test_a_client_may_choose_its_own_probabilities_and_quorum():
    fed = federation(plan(privacy={"level": "cpp1", "decoys": 0.0}))
    choosy = fed.participants[ClientId(3)].local
    choosy.privacy, choosy.quorum = IndexPrivacy.named("cpp5"), 4
    views = fed.views = Views()
    finished(fed)
    sets = {
        s.other: wire.decode(s.data)
        for s in views.by_party["server"]
        if s.kind == "RevealedSet" and s.direction == "received"
    }
    union = len(fed.last.union["goods"])
    assert len(sets[ClientId(3)].tables[0].rows) == union
    assert sets[ClientId(3)].quorum == 4
    assert all(len(m.tables[0].rows) < union for c, m in sets.items() if c != ClientId(3))


def test_derived_rows_follow_their_parent_and_nothing_else():
    views = Views()
    fed = federation(plan(privacy={"level": "cpp3"}), views=views)
    finished(fed)
    goods, categories = fed.last.union["goods"], fed.last.union["categories"]
    for seen in views.by_party["server"]:
        if seen.kind == "RevealedSet" and seen.direction == "received":
            message = wire.decode(seen.data)
            follow = derived()["categories"].row_ids(goods[message.tables[0].rows])
            assert categories[message.tables[1].rows].tolist() == follow.tolist()


def test_a_permanent_answer_never_changes_within_a_period():
    """p3 = 1, p4 = 0: what is revealed is the permanent answer itself, union by union."""
    settings = plan(
        privacy={"level": "", "p1": 0.75, "p2": 0.25, "p3": 1.0, "p4": 0.0, "period_rounds": 6}
    )
    views = Views()
    fed = federation(settings, clients=10, views=views)
    by_period: dict[tuple[int, int], dict[int, set[bool]]] = {}
    for round_id in range(12):
        views.by_party.clear()
        assert finished(fed)
        union = fed.last.union["goods"]
        for seen in views.by_party["server"]:
            if seen.kind == "RevealedSet" and seen.direction == "received":
                yes = set(union[wire.decode(seen.data).tables[0].rows].tolist())
                answers = by_period.setdefault((seen.other, round_id // 6), {})
                for row in union.tolist():
                    answers.setdefault(row, set()).add(row in yes)
    assert all(len(kinds) == 1 for answers in by_period.values() for kinds in answers.values())
    changed = [
        row
        for client in range(10)
        for row in by_period[client, 0].keys() & by_period[client, 1].keys()
        if by_period[client, 0][row] != by_period[client, 1][row]
    ]
    assert changed, "another period is another answer"


def test_rows_that_come_within_a_period_wait_for_the_next():
    settings = plan(privacy={"level": "cpp5", "decoys": 0.0, "period_rounds": 2})
    fed = federation(settings, each=5)
    finished(fed)
    before = fed.last.union["goods"].tolist()
    fresh = next(row for row in range(GOODS) if row not in before)
    local = fed.participants[ClientId(0)].local
    rows = np.sort(np.append(local.real["goods"], np.uint64(fresh))).astype(np.uint64)
    local.real = {"goods": rows}
    finished(fed)
    assert fed.last.union["goods"].tolist() == before
    finished(fed)
    assert fresh in fed.last.union["goods"].tolist()


@pytest.mark.parametrize(
    "more",
    [
        {"privacy": {"level": "cpp4", "decoys": 0.0}},
        {"cohort": 9},
        {"security": {"dropout": 0.1}},
        {"seed": 3},
    ],
    ids=str,
)
def test_another_plan_within_a_period_is_refused_before_anything_is_sent(more):
    """With decoys of 0.5 and then none, what is left of a client in the unions is real."""
    settings = plan(privacy={"level": "cpp4", "decoys": 0.5, "period_rounds": 2})
    changed = {"privacy": {"level": "cpp4", "decoys": 0.5}, **more}
    changed["privacy"] |= {"period_rounds": 2}
    fed = federation(settings)
    client_round(fed, ClientId(0)).start()
    later = client_round(fed, ClientId(0), round_id=1, settings=plan(**changed))
    with pytest.raises(ConfigError, match=r"plan|decoys") as refused:
        later.start()
    assert "period 1" in refused.value.hint and later.phase == "Invited"
    assert client_round(fed, ClientId(0), round_id=1).start()
    assert client_round(fed, ClientId(0), round_id=2, settings=plan(**changed)).start()


def test_another_catalogue_within_a_period_is_refused():
    fed = federation(plan())
    client_round(fed, ClientId(0)).start()
    listed = Listed(np.arange(50, dtype=np.uint64))
    with pytest.raises(ConfigError, match="another catalogue"):
        client_round(fed, ClientId(0), round_id=1, catalogue=listed).start()
    assert client_round(fed, ClientId(0), round_id=1, catalogue=WholeTable(GOODS)).start()


def test_how_many_of_a_cohort_mask_may_differ_from_round_to_round():
    """The client's plan is its part's; what it freezes must not change with the others' choices."""
    chosen = plan(security={"sharing": "auto"})
    parts = [chosen.part(secure=True, clients=n) for n in (6, 8)]
    assert parts[0].digest != parts[1].digest
    assert parts[0].lasting_digest == parts[1].lasting_digest
    assert replace(chosen, seed=1).lasting_digest != chosen.lasting_digest
    assert plan(cohort=9).lasting_digest != plan().lasting_digest


def test_a_plan_that_asks_for_other_probabilities_within_a_period_is_refused():
    fed = federation(plan(privacy={"level": "cpp4"}))
    client_round(fed, ClientId(0)).start()
    sweeping = plan(privacy={"level": "", "p1": 0.75, "p2": 0.0, "p3": 1.0, "p4": 0.0})
    with pytest.raises(ConfigError, match="p1"):
        client_round(fed, ClientId(0), round_id=1, settings=sweeping).start()


def test_a_perturbed_set_drops_and_adds_rows_for_the_whole_period():
    settings = plan(privacy={"level": "cpp5", "decoys": 0.0, "keep": 0.5, "add": 0.1})
    fed = federation(settings)
    for member in fed.participants.values():
        member.local.pool = {"goods": np.arange(GOODS, dtype=np.uint64)}
    finished(fed)
    first = set(fed.last.union["goods"].tolist())
    real = set(np.concatenate([m.local.real["goods"] for m in fed.participants.values()]).tolist())
    assert real - first, "some real rows are left out"
    assert first - real, "some rows are nobody's"
    finished(fed)
    assert set(fed.last.union["goods"].tolist()) == first
    with pytest.raises(ConfigError, match="there is no pool"):
        list(federation(settings).run(1))


def test_max_rows_keeps_a_fixed_subset_and_reports_the_rest_at_home():
    settings = plan(union={"max_rows": 7}, privacy={"level": "cpp1", "decoys": 0.0})
    client = client_round(federation(settings), ClientId(0))
    client.start()
    assert client.left_out == 13
    fed = federation(settings)
    views = fed.views = Views()
    finished(fed, 2)
    unions = [wire.decode(s.data) for s in views.by_party["server"] if s.kind == "UnionOpened"]
    assert len(unions[0].tables[0]) <= 7 * 8


# --- bad input ------------------------------------------------------------------------------------


def test_ids_outside_the_table_are_refused():
    fed = federation(plan())
    bad = {"goods": np.array([5, GOODS], dtype=np.uint64)}
    with pytest.raises(ConfigError, match="'goods': row id 200 is outside its 200 rows"):
        client_round(fed, ClientId(0), real=bad)


def test_a_derived_table_without_its_map_is_refused():
    fed = federation(plan())
    with pytest.raises(ConfigError, match="'categories' is derived"):
        client_round(fed, ClientId(0), derived={})


def test_the_model_must_be_the_plans():
    fed = federation(plan())
    fed.model.dense = np.zeros(3, dtype=np.float32)
    with pytest.raises(MisuseError, match="not the plan's"):
        list(fed.run(1))


def test_a_cohort_larger_than_the_population_is_refused():
    with pytest.raises(ConfigError, match="5 clients for a cohort of 8"):
        federation(plan(), clients=5)


def test_a_union_is_bounded_by_the_plan_before_anything_is_made_of_it():
    """A bitmap of 2^30 rows would be 2^27 bytes on the wire, and 64 times as many in memory."""
    small = plan(cohort=2, union={"max_rows": 3}, privacy={"decoys": 0.0})
    assert 2 * 3 <= small.most_union < GOODS  # and a few that an encoding may invent
    tables = tuple(replace(t, rows=2**24) if t.name == "goods" else t for t in small.tables)
    large = replace(small, tables=tables)
    rows = np.arange(large.most_union + 1, dtype=np.uint64)
    for many in (rows, np.arange(2**20, dtype=np.uint64)):
        fed = federation(small, clients=2)
        clients = {c: client_round(fed, c, settings=large) for c in fed.participants}
        population.sum_union(clients, large.secagg(RoundId(0)))
        client = clients[ClientId(0)]
        data = wire.encode(UnionOpened(round_id=RoundId(0), tables={TableId(0): many}))
        with pytest.raises(ServerFault, match=r"more rows than|where the cap is"):
            client.receive(SERVER, data)
        assert client.phase == "Left"


@given(
    st.sets(st.integers(0, 2**20 - 1), max_size=300),
    st.sampled_from([1, 3, 2**10, 2**20]),
    st.integers(0, 50),
)
def test_no_honest_union_is_longer_than_its_bound(ids, domain, more):
    rows = np.array(sorted({i % domain for i in ids}), dtype=np.uint64)
    data = wire.encode(UnionOpened(round_id=RoundId(0), tables={TableId(0): rows}))
    most = min(len(rows) + more, domain)
    assert len(data) <= most_union_bytes(most, domain, 1)


def test_every_scheme_has_its_own_words():
    assert [s.value for s in Scheme if s.secure] == ["secure-fedavg", "secure-submodel"]
    assert population.plan("submodel").stages[0].tables[0].width == 4


@pytest.mark.parametrize("scheme", ["fedavg", "submodel", "secure-fedavg", "secure-submodel"])
def test_means_are_worked_out_once_however_often_a_round_is_asked(scheme, monkeypatch):
    fed, calls = federation(plan(scheme)), []
    means = encode.means

    def counted(plan, total, **more):
        calls.append(total)
        return means(plan, total, **more)

    monkeypatch.setattr(encode, "means", counted)
    finished(fed)
    assert all(fed.last.result.survivors for _ in range(3))
    assert len(calls) == 1


@given(st.integers(1, 4000), st.floats(0.0, 1.0), st.integers(0, 2**32), st.integers(0, 3000))
def test_no_dense_union_is_longer_than_its_bound(domain, share, seed, more):
    """A union that has most of its table."""
    rows = np.flatnonzero(np.random.default_rng(seed).random(domain) < share).astype(np.uint64)
    data = wire.encode(UnionOpened(round_id=RoundId(0), tables={TableId(0): rows}))
    assert len(data) <= most_union_bytes(min(len(rows) + more, domain), domain, 1)
