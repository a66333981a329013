"""Rounds between two servers in which something fails: training, the leader, or what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rounds.population import DENSE, GOODS, WIDTH, federation
from rounds.shops import Break, Roles, finished, model_of, one_table, shop, two_server_plan
from tessera import wire
from tessera.crypto.cuckoo import STASH_ROWS, SimpleTable
from tessera.crypto.keys import verify
from tessera.errors import ConfigError, PeerError, RoundIsOver, ServerFault
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.learning.tables.submodel import ModelUpdate, TableUpdate
from tessera.learning.tables.table import LazyTable, TableSpec
from tessera.learning.training.settings import FAILURES
from tessera.plan import Plan, SimulationPlan, TablePlan, TwoServerPlan
from tessera.protocols.machine import Outbound, RoundOver
from tessera.protocols.two_server import handshake
from tessera.protocols.two_server.handshake import ServedModel
from tessera.protocols.two_server.messages import OpenedSum
from tessera.protocols.two_server.params import Write
from tessera.protocols.two_server.write.sums import TwoServerSum
from tessera.protocols.union.choice import EncodingChoice
from tessera.rounds.encode import NOTHING
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.rounds.messages import UnionOpened
from tessera.rounds.two_server.domain import served, stash_of, two_server_params, write_cost
from tessera.rounds.two_server.helper import HelperRound
from tessera.simulation.faults import Drop
from tessera.simulation.federation import Federation
from tessera.simulation.simulator import Simulator
from tessera.simulation.views import Views

VICTIM = ClientId(0)
HELD = {0: [1, 2, 3], 1: [2, 9], 2: [3, 9, 20], 3: [2]}


def small(**way) -> Plan:
    two = TwoServerPlan(**{"write": "dpf", "min_cohort": 3, **way})
    return one_table("two-server", 60, two_server=two)


# --- training that fails ------------------------------------------------------------------------


def spoiled(update: ModelUpdate, **changes) -> ModelUpdate:
    """The same update with other values, counts or dense part."""
    part = update.tables["goods"]
    rows = TableUpdate(changes.pop("values", part.values), changes.pop("counts", part.counts))
    return replace(update, tables={"goods": rows}, **changes)


def nan_in_a_row(update: ModelUpdate) -> ModelUpdate:
    values = update.tables["goods"].values.copy()
    values[1, 0] = np.nan
    return spoiled(update, values=values)


def infinite_dense(update: ModelUpdate) -> ModelUpdate:
    return spoiled(update, dense=np.full(DENSE, np.inf))


def far_too_large(update: ModelUpdate) -> ModelUpdate:
    """Finite by itself, and infinite times its count."""
    return spoiled(update, values=np.full((3, WIDTH), 1.7e308))


def a_row_too_many(update: ModelUpdate) -> ModelUpdate:
    return spoiled(update, values=np.zeros((4, WIDTH)), counts=np.ones(4, dtype=int))


def counts_of_another_length(update: ModelUpdate) -> ModelUpdate:
    return spoiled(update, counts=np.ones(2, dtype=int))


def a_negative_count(update: ModelUpdate) -> ModelUpdate:
    return spoiled(update, counts=np.array([1, -1, 1]))


def another_dense_part(update: ModelUpdate) -> ModelUpdate:
    return spoiled(update, dense=np.zeros(DENSE + 1))


def no_weight(update: ModelUpdate) -> ModelUpdate:
    return spoiled(update, weight=float("nan"))


def words(update: ModelUpdate) -> ModelUpdate:
    return spoiled(update, dense=np.array(["a"] * DENSE))


def raising(error: type[Exception]) -> Break:
    def fail(_: ModelUpdate) -> ModelUpdate:
        raise error("training went wrong")

    return fail


def nothing(_: ModelUpdate) -> None:
    return None


BREAKS: list[tuple[Break, str]] = [
    (nan_in_a_row, "table 'goods': values that are not finite"),
    (infinite_dense, "the dense part: values that are not finite"),
    (far_too_large, "table 'goods': values that are not finite"),
    (a_row_too_many, "table 'goods': (4, 3) values, where (3, 3) are due"),
    (counts_of_another_length, "table 'goods': counts that are not numbers of examples"),
    (a_negative_count, "table 'goods': counts that are not numbers of examples"),
    (another_dense_part, "the dense part: (6,) values, where (5,) are due"),
    (no_weight, "a weight that is not a number of examples"),
    (words, "the dense part: values that are not finite"),
    (nothing, NOTHING),
    (raising(ValueError), "training raised ValueError"),
]


def shown(views: Views) -> list[tuple[str, int]]:
    """What both servers see of the victim: kinds and lengths."""
    return [
        (e.kind, len(e.data))
        for e in views.by_party[VICTIM]
        if e.direction == "sent" and e.other == SERVER
    ]


@pytest.mark.parametrize("domain", ["whole", "union"])
@pytest.mark.parametrize(("breaks", "reason"), BREAKS, ids=lambda x: getattr(x, "__name__", ""))
def test_training_that_broke_sends_zeros_of_the_usual_length_and_the_round_goes_on(
    breaks, reason, domain
):
    last = 1 if domain == "union" else 0
    views = Views(), Views(), Views()
    settings = small(domain=domain)
    sound = shop(settings, HELD, views=views[0])
    broken = shop(settings, HELD, breaks={VICTIM: breaks}, views=views[1])
    gone = [Drop(VICTIM, "collect", stage=last)]
    without = shop(settings, HELD, faults=lambda *_: gone, views=views[2])
    (good,), (end,), (fewer,) = (finished(fed, 1) for fed in (sound, broken, without))
    assert (good.survivors, end.survivors, fewer.survivors) == (4, 4, 3)
    assert shown(views[1]) == shown(views[0]), "a server sees no difference"
    assert [kind for kind, _ in shown(views[1])][-2:] == ["Query", "WriteReport"]
    assert model_of(broken) == model_of(without) != model_of(sound), "the sum is the others'"
    assert (end.rows_opened, end.weight) == (4, 3)  # row 1 was the broken client's alone
    assert (good.not_finite, good.broken) == (0, {})
    assert (end.not_finite, end.broken) == (1, {reason: 1}), "its owner hears of it"


@pytest.mark.parametrize("breaks", [nan_in_a_row, nothing, raising(ZeroDivisionError)])
def test_an_ideal_round_sends_the_same_zeros(breaks):
    told, models = [], []
    for simulation in (SimulationPlan(), SimulationPlan(crypto="none")):
        fed = shop(replace(small(), simulation=simulation), HELD, breaks={VICTIM: breaks})
        told += [(e.not_finite, e.broken, e.weight, e.rows_opened) for e in finished(fed, 1)]
        models.append(model_of(fed))
    assert told[0] == told[1] and told[0][0] == 1
    assert models[0] == models[1]


def test_everybody_may_fail_at_once():
    fed = shop(small(), HELD, breaks=dict.fromkeys(map(ClientId, HELD), raising(RuntimeError)))
    before = model_of(fed)
    (end,) = finished(fed, 1)
    assert (end.survivors, end.weight, end.rows_opened) == (4, 0, 0)
    assert end.broken == {"training raised RuntimeError": 4} and end.loss is None
    assert model_of(fed) == before


@pytest.mark.parametrize("error", [NameError, TypeError, KeyError, OSError])
def test_a_fault_of_the_program_is_no_failure_of_training(error):
    assert not issubclass(error, FAILURES)
    with pytest.raises(error):
        finished(shop(small(), HELD, breaks={VICTIM: raising(error)}), 1)


def test_with_one_server_who_fails_sends_zeros_as_well():
    settings = one_table("submodel", 60)
    (end,) = finished(shop(settings, HELD, breaks={VICTIM: raising(ValueError)}), 1)
    assert end.broken == {"training raised ValueError": 1} and end.survivors == len(HELD)


# --- a leader that breaks the rules, and goes on as if nothing had happened -----------------------


Meddle = Callable[[HelperRound, bytes, list[Outbound]], list[Outbound]]


def meddled(fed: Federation, meddle: Meddle) -> None:
    """`meddle` sees every message after the helper has taken it, and says what it answered."""
    make = fed._subcohort

    def changed(*given, **more):
        part = make(*given, **more)
        helper, receive = part.helper, part.helper.receive

        def heard(data: bytes) -> list[Outbound]:
            return receive(SERVER, data)

        helper.receive = lambda sender, data: meddle(heard, data, heard(data))
        return part

    fed._subcohort = changed


TO_HELPER = [
    "UnionOpened",
    "HandshakeOffer",
    "HandshakeReveal",
    "Forwarded",
    "AnswersDue",
    "a report",
    "Closing",
]


@pytest.mark.parametrize("after", TO_HELPER)
def test_a_fault_in_any_part_is_the_end_of_the_round_at_the_helper(after):
    """Whatever the leader does afterwards, and be it all it should: there is no share."""
    views = Views()
    fed = federation(two_server_plan({"domain": "union"}), views=views)
    faults: list[ServerFault] = []
    kinds: list[str] = []

    def meddle(receive, data, out):
        kinds.append(wire.kind_of(data).__name__)
        seen = "a report" if kinds[-1] == "Forwarded" and "AnswersDue" in kinds else kinds[-1]
        if seen == after and not faults:
            for bad in (data[:-1], data):  # then even what it has taken before
                with pytest.raises(ServerFault) as caught:
                    receive(bad)
                faults.append(caught.value)
        return out

    meddled(fed, meddle)
    (end,) = finished(fed, 1)
    assert isinstance(end, RoundAbort) and kinds[-1] in after.replace("a report", "Forwarded")
    assert faults[0].reason == faults[1].reason, "for good, and for the same reason"
    assert end.reason == f"the helper left, for the leader {faults[0].reason}"
    assert "SumShare" not in {e.kind for seen in views.by_party.values() for e in seen}


@pytest.mark.parametrize("way", [{"write": "dpf"}, {"domain": "union"}], ids=str)
def test_whatever_reaches_the_helper_again_is_answered_as_it_was(way):
    """At once; and what followed takes nothing back: a carrier's repetition is nobody's fault."""
    plain, repeated = federation(two_server_plan(way)), federation(two_server_plan(way))
    said: list[tuple[bytes, list[Outbound]]] = []

    def meddle(receive, data, out):
        said.append((data, out))
        assert receive(data) == out
        for earlier, answer in said:
            if wire.kind_of(data) is RoundOver and earlier is not data:
                with pytest.raises(RoundIsOver):
                    receive(earlier)
            else:
                assert receive(earlier) in (answer, [])
        return out

    meddled(repeated, meddle)
    for fed in (plain, repeated):
        (end,) = finished(fed, 1)
        assert isinstance(end, RoundFinished) and end.survivors == 8
    assert model_of(plain) == model_of(repeated)
    assert {wire.kind_of(data).__name__ for data, _ in said} >= {"Closing", "OpenedSum"}


def test_what_comes_after_the_sum_takes_nothing_back():
    fed = federation(two_server_plan())
    helpers: list[HelperRound] = []
    make = fed._subcohort

    def kept(*given, **more):
        helpers.append((part := make(*given, **more)).helper)
        return part

    def meddle(receive, data, out):
        if wire.kind_of(data) is OpenedSum:
            (helper,) = helpers
            total = helper.total
            with pytest.raises(ServerFault):
                receive(b"not a message")
            assert total is not None and helper.total is total and helper.phase == "done"
            told.append(total)
        return out

    told: list[TwoServerSum] = []
    fed._subcohort = kept
    meddled(fed, meddle)
    (end,) = finished(fed, 1)
    assert told and end.survivors == len(told[0].survivors)
    assert helpers[0].total is None and helpers[0].result.weight == end.weight


def test_a_refusal_is_said_again_too():
    roles = Roles(two_server_plan())
    helper = roles.helper()
    roles.opening(roles.leader(), helper)
    views = Views()
    finished(federation(two_server_plan(), views=views), 1)  # another federation's clients
    stranger = next(e.data for e in views.by_party[HELPER] if e.kind == "Forwarded")
    refused = []
    for _ in range(2):
        with pytest.raises(PeerError) as caught:
            helper.receive(SERVER, stranger)
        refused.append(caught.value)
    assert refused[0].peer == refused[1].peer == ClientId(0)
    assert refused[1].reason == "was refused before"


def test_a_helper_that_has_left_hears_nothing_more(monkeypatch):
    heard: list[str] = []

    class Leaving(HelperRound):
        def receive(self, sender: Party, data: bytes) -> list[Outbound]:
            heard.append(wire.kind_of(data).__name__)
            if heard[-1] == "Forwarded":  # the first of many
                raise ServerFault("lies", round_id=self.round_id, phase="query")
            return super().receive(sender, data)

    monkeypatch.setattr("tessera.rounds.course.HelperRound", Leaving)
    ran: list[Simulator] = []
    run = Simulator.run
    monkeypatch.setattr(Simulator, "run", lambda self: (ran.append(self), run(self))[1])
    views = Views()
    (end,) = finished(federation(two_server_plan(), views=views), 1)
    assert isinstance(end, RoundAbort) and end.reason == "the helper left, for the leader lies"
    assert heard == ["HandshakeOffer", "HandshakeReveal", "Forwarded"]
    assert ran[0].outcome.helper_left is not None
    assert [e.kind for e in views.by_party[SERVER] if e.other == HELPER].count("Forwarded") == 8
    assert [e.kind for e in views.by_party[HELPER] if e.direction == "received"] == heard


def test_two_servers_with_two_models_open_nothing():
    fed = federation(two_server_plan())
    assert fed.two_server is not None
    fed._helped_by(fed.two_server).model.dense = np.full(DENSE, 1e-6, dtype=np.float32)
    (end,) = finished(fed, 1)
    assert isinstance(end, RoundAbort) and end.phase == "handshake"
    assert end.reason == "the helper left, for the leader holds another model than the helper"


def test_whose_query_was_refused_is_told_too():
    fed = federation(two_server_plan({"min_cohort": 4}))
    make, victim = fed._subcohort, ClientId(3)

    def changed(*given, **more):
        part = make(*given, **more)
        client, receive = part.clients[victim], part.clients[victim].receive

        def damaged(sender: Party, data: bytes) -> list[Outbound]:
            out = receive(sender, data)
            for at, message in enumerate(out):
                if message.kind == "Query":
                    query = wire.decode(message.data)
                    other = query.box[:-1] + bytes([query.box[-1] ^ 1])
                    out[at] = Outbound.of(SERVER, replace(query, box=other))
            return out

        client.receive = damaged
        return part

    fed._subcohort = changed
    (end,) = finished(fed, 1)
    assert isinstance(end, RoundFinished) and end.survivors == 7
    assert end.excluded == {"sent a box that cannot be unsealed": 1}
    assert fed.last.excluded == {victim: "the helper refused its query"}, "which is all it knows"


def test_who_left_is_told_with_the_reason():
    """A leader that gives two clients each other's answers."""
    fed = federation(two_server_plan({"min_cohort": 4}))
    swap = {ClientId(3): ClientId(4), ClientId(4): ClientId(3)}
    make = fed._subcohort

    def changed(*given, **more):
        part = make(*given, **more)
        receive = part.server.receive

        def swapped(sender, data):
            out = receive(sender, data)
            return [
                replace(o, to=swap.get(o.to, o.to)) if o.kind == "QueryAnswers" else o for o in out
            ]

        part.server.receive = swapped
        return part

    fed._subcohort = changed
    (end,) = finished(fed, 1)
    assert isinstance(end, RoundFinished) and end.survivors == 6
    assert end.excluded == {"left, for the server answered another query": 2}


def test_a_client_verifies_each_servers_signature_once(monkeypatch):
    roles = Roles(two_server_plan())
    header = roles.opening(roles.leader(), roles.helper())
    calls = []

    def counted(public, signature, statement):
        calls.append(public)
        return verify(public, signature, statement)

    monkeypatch.setattr(handshake, "verify", counted)
    client = roles.client()
    client.start()
    (query,) = client.receive(SERVER, header)
    assert query.kind == "Query"
    servers = roles.setup.servers
    assert calls == [servers.leader, servers.helper]
    assert client.receive(SERVER, header) == [query]  # a carrier's repetition
    assert len(calls) == 2


def test_a_dense_part_of_a_wrong_length_that_both_servers_signed_makes_clients_leave(monkeypatch):
    """No digest tells: the two servers agree on it."""

    def short(*given):
        model = served(*given)
        return replace(model, dense=model.dense[:-1])

    monkeypatch.setattr("tessera.rounds.two_server.domain.served", short)
    monkeypatch.setattr(ServedModel, "check", lambda *_: None)
    fed = federation(two_server_plan())
    *_, end = fed.run(1)
    assert isinstance(end, RoundAbort)
    assert f"{fed.plan.cohort} x left, for the server sent" in end.reason and "bytes" in end.reason


# --- the union is the leader's word -------------------------------------------------------------


def union(settings: Plan, ids: np.ndarray | list[int], round_id: int = 0, **more) -> bytes:
    rows = {settings.table_id("goods"): np.asarray(ids, dtype=np.uint64), **more}
    return wire.encode(UnionOpened(round_id=RoundId(round_id), tables=rows))


def test_the_helper_takes_no_union_that_is_not_one():
    roles = Roles(two_server_plan({"domain": "union"}))
    goods = roles.settings.table_id("goods")
    ids = np.array([3, 8], dtype=np.uint64)
    for tables, reason in (
        ({}, "other tables"),
        ({goods: ids, goods + 1: ids}, "other tables"),
        ({goods: np.array([3, GOODS], dtype=np.uint64)}, "outside table"),
    ):
        bad = wire.encode(UnionOpened(round_id=RoundId(0), tables=tables))
        with pytest.raises(ServerFault, match=reason):
            roles.helper().receive(SERVER, bad)
    helper = roles.helper()
    with pytest.raises(ServerFault, match="of round 1"):
        helper.receive(SERVER, union(roles.settings, ids, 1))
    with pytest.raises(ServerFault, match="of round 1"):  # and it has left
        helper.receive(SERVER, union(roles.settings, ids))
    with pytest.raises(ServerFault, match="not due"):
        Roles(two_server_plan()).helper().receive(SERVER, union(roles.settings, ids))


def test_the_same_union_again_is_nothing_new_and_another_one_is_a_fault():
    roles = Roles(two_server_plan({"domain": "union"}))
    told, other = union(roles.settings, [1, 5]), union(roles.settings, [1, 5, 9])
    client = roles.summed_client()
    for role in (roles.helper(), client):
        for _ in range(3):
            assert role.receive(SERVER, told) == []
        with pytest.raises(ServerFault, match="not due"):
            role.receive(SERVER, other)
    assert client.phase == "Left"


def wide(*, width: int = WIDTH, **more) -> tuple[Plan, Roles, dict]:
    """A table so large that it is narrowed, its roles, and the model a helper has of it."""
    rows = 1 << 22
    settings = one_table("two-server", rows, **more)
    settings = replace(settings, tables=(TablePlan(name="goods", rows=rows, width=width),))
    table = LazyTable(TableSpec(name="goods", size=rows, width=width))
    return settings, Roles(settings), {"tables": {"goods": table}, "derived": {}}


def nothing_is_built(monkeypatch) -> None:
    def built(*_, **__):
        raise AssertionError("something was built from a union of any size")

    monkeypatch.setattr(SimpleTable, "of", built)
    monkeypatch.setattr("tessera.rounds.two_server.domain.two_server_params", built)


@pytest.mark.parametrize("encoding", ["bloom", "sum-table"])
@pytest.mark.parametrize("decoys", [0.0, 0.5])
def test_a_union_larger_than_its_cohort_can_name_is_not_even_looked_at(
    encoding, decoys, monkeypatch
):
    settings, roles, model = wide(privacy={"decoys": decoys})
    settings = replace(settings, union=replace(settings.union, encoding=EncodingChoice(encoding)))
    roles = Roles(settings)
    most = settings.most_union
    named = 4 * (40 + int(40 * decoys))
    assert named <= most <= named + 100
    exact, more = union(settings, np.arange(most)), union(settings, np.arange(most + 1))
    client = roles.summed_client()
    for role in (roles.helper(model=model), client):
        assert role.receive(SERVER, exact) == []
    client = roles.summed_client()
    nothing_is_built(monkeypatch)
    for role in (roles.helper(model=model), client):
        with pytest.raises(ServerFault, match="more rows than its cohort can name"):
            role.receive(SERVER, more)
    assert client.phase == "Left" and client.pending is None


def test_a_union_is_never_larger_than_the_tables_are():
    settings = two_server_plan({"domain": "union"}, union={"max_rows": 190})
    assert settings.most_union == GOODS
    held = {c: list(range(60)) for c in range(4)}
    full = one_table("two-server", 60, max_rows=60, two_server=TwoServerPlan(domain="union"))
    (end,) = finished(shop(full, held), 1)
    assert end.survivors == 4 and end.rows_opened == 60


@pytest.mark.parametrize("encoding", ["bloom", "sum-table"])
def test_a_cohort_that_names_all_it_may_is_no_reason_to_leave(encoding):
    """Nobody shares a row with anybody, and a filter lets strangers in besides."""
    base = one_table(
        "two-server",
        1 << 18,
        max_rows=1000,
        two_server=TwoServerPlan(domain="union"),
        privacy={"decoys": 0.0},
    )
    settings = replace(base, union=replace(base.union, encoding=EncodingChoice(encoding)))
    held = {c: list(range(16 * c, 64_000, 64)) for c in range(4)}
    (end,) = finished(shop(settings, held), 1)
    assert end.survivors == 4
    assert end.union_rows > 4000 if encoding == "bloom" else end.union_rows == 4000


def test_a_union_that_the_plan_cannot_work_with_is_the_leaders_fault():
    """Within what a cohort can name, and more than fits into a message."""
    settings, roles, model = wide(width=4000, max_rows=10_000)
    told = union(settings, np.arange(40_000))
    with pytest.raises(ConfigError, match="bytes of a message"):
        domain = {"goods": np.arange(40_000, dtype=np.uint64)}
        two_server_params(settings, RoundId(0), roles.setup.servers, domain)
    client = roles.summed_client()
    for role in (roles.helper(model=model), client):
        with pytest.raises(ServerFault, match="the plan cannot work with"):
            role.receive(SERVER, told)
    assert client.phase == "Left"


def test_the_helper_may_not_send_before_the_union_is_opened():
    leader = Roles(two_server_plan({"domain": "union"})).leader()
    assert leader.start() == []
    with pytest.raises(PeerError, match="helper sent an invalid message, which is not due"):
        leader.receive(HELPER, b"anything")
    assert leader.phase == "advertise"


# --- what is charged, and what a stash is for -----------------------------------------------------


@pytest.mark.parametrize(
    ("domain", "released"),
    [
        ("whole", ["the rows written", "the sums and counts"]),
        ("union", ["the union", "the rows written", "the sums and counts"]),
    ],
)
def test_every_release_is_charged_before_the_first_word(domain, released):
    client = Roles(two_server_plan({"domain": domain})).client()
    client.start()
    entries = client._local.ledger.entries
    assert [entry.event.what for entry in entries] == released
    assert {(e.event.federation, e.event.round_id) for e in entries} == {("tessera", 0)}
    told = ", ".join(released)
    fed = federation(two_server_plan({"domain": domain}))
    (end,) = finished(fed, 1)
    assert end.condition == f"given {told}"
    assert fed.participants[ClientId(0)].local.ledger.guarantee(conditional=False).epsilon == np.inf


def test_a_table_without_room_for_a_stash_leaves_the_others_theirs():
    base = one_table("two-server", 20_000, two_server=TwoServerPlan(write="dpf", stash=2))
    tables = [
        TablePlan(name=f"t{rows}", rows=rows, width=WIDTH)
        for rows in (2, 3, 200, STASH_ROWS, STASH_ROWS + 1)
    ]
    settings = replace(base, tables=tuple(tables))
    params = two_server_params(settings, RoundId(0), Roles(two_server_plan()).setup.servers)
    assert [t.stash for t in params.tables] == [0, 2, 2, 2, 0]
    assert [stash_of(settings, t.rows) for t in tables] == [0, 2, 2, 2, 0]
    plain = replace(settings, two_server=TwoServerPlan(write="dpf"))
    for t, stash in zip(tables, (0, 2, 2, 2, 0), strict=True):
        same = write_cost(settings, t).keys == write_cost(plain, t).keys
        assert same == (not stash), t


@pytest.mark.parametrize("domain", ["whole", "union"])
def test_a_plan_with_a_stash_trains_a_table_that_is_too_large_for_one(domain):
    rows = STASH_ROWS + 3_000
    held = {c: [c, 7, 900 + c, rows - 1] for c in range(4)}
    two = TwoServerPlan(write="dpf", stash=2, domain=domain)
    between = shop(one_table("two-server", rows, two_server=two), held)
    one_server = shop(one_table("submodel", rows), held)
    for fed in (between, one_server):
        (end,) = finished(fed, 1)
        assert end.survivors == 4 and end.rows_opened == 10
    assert model_of(between) == model_of(one_server)
    assert [cost.write for cost in between.last.writing] == [Write.POINTS]
