"""What comes next, trained or summed up under every row scheme."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tessera import tasks, wire
from tessera.api import simulate
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.prg import Label
from tessera.data.row_names import RowNames
from tessera.data.sequences import SEEN, Sequences, sequence_data
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import ServerStep
from tessera.learning.metrics import ndcg
from tessera.learning.models.pairs import TABLE, Pairs
from tessera.learning.rankers import placed
from tessera.learning.softmax import CANDIDATES
from tessera.learning.training.jobs import prepare
from tessera.plan import Plan, SimulationPlan
from tessera.plan.defaults import plan_beside
from tessera.plan.dp import DPPlan
from tessera.plan.sections import GroupsPlan
from tessera.protocols.plain import PlainRows
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.root import lasting_secret, with_negatives
from tessera.runs.client_training import Trainer
from tessera.runs.folder import RunFolder
from tessera.runs.standing import both, mixed, standing
from tessera.runs.training import Training, complete, eligible
from tessera.simulation.views import Views
from tessera.tasks.sequences import NEXT, sequence_task

USERS, ITEMS, NEGATIVES = 20, 60, 25
SECRET = b"next"


@pytest.fixture(scope="module")
def data():
    """Items go up by one or two, from wherever a user begins."""
    rng = np.random.default_rng(2)
    own = [
        (rng.integers(ITEMS) + np.cumsum(rng.integers(1, 3, rng.integers(8, 20)))) % ITEMS
        for _ in range(USERS)
    ]
    user = np.repeat(np.arange(USERS), [len(each) for each in own])
    events = Sequences.sorted(user, np.concatenate(own), None, users=USERS, items=ITEMS)
    named = {"user": RowNames.numbered(USERS), "item": RowNames.numbered(ITEMS)}
    return sequence_data("steps", events, items=ITEMS, length=8, ids=named)


def a_task(data, model: str = "next", **options):
    options = {"width": 8, "negatives": NEGATIVES, "exact_pairs": True, **options}
    return sequence_task(data, title="steps", recommended=NEXT, model=model, **options)


def trained(task, scheme: str, rounds: int = 2, cohort: int = 10, views=None, **more) -> Training:
    trainer, entropy = more.pop("trainer", Trainer.AUTO), more.pop("entropy", None)
    simulation = SimulationPlan(rounds=rounds, crypto=more.pop("crypto", "none"))
    plan = complete(Plan(scheme=scheme, cohort=cohort, simulation=simulation, **more), task)
    entropy = entropy or ScriptedEntropy(SECRET)
    training = Training(task, plan, entropy=entropy, views=views, trainer=trainer)
    for _ in training.run(rounds):
        pass
    return training


def test_a_few_rounds_beat_the_predictors_that_need_no_model(data):
    task = a_task(data, power=0.0)
    run = trained(task, "submodel", rounds=60, cohort=20)
    found = run.evaluation.measures(run.dense, run.tables)
    assert set(found) == {"NDCG@10", "recall@10", "recall@20"}
    assert found["NDCG@10"] > task.metric.baselines(data)["most frequent"] + 0.2


@pytest.mark.parametrize("crypto", ["none", "every"])
def test_submodel_and_two_servers_train_the_same_model_to_the_bit(data, crypto):
    task = a_task(data)
    one, two = trained(task, "submodel"), trained(task, "two-server", crypto=crypto)
    before = task.bind(task.build(0)).initial("items")
    assert np.abs(one.parameters()["items.weight"] - before).max() > 0.001
    for name, values in one.parameters().items():
        assert values.tobytes() == two.parameters()[name].tobytes(), name


class SameCoins:
    """Test entropy by which a client draws in round r what it draws in epoch r + 2 of its group.

    Everybody is in every round, and epoch 1 is the union: the update of round r is that epoch's.
    """

    def __init__(self, seed: bytes) -> None:
        self._scripted = ScriptedEntropy(seed)

    def secret(self, label, *context, size=32):
        match label, context:
            case Label.EPOCH_ROOT, (federation, _, int(client), int(epoch)):
                return self._epoch_root(federation, client, epoch)
            case Label.PARTY_ROOT, (federation, int(round_id), int(client)):
                root = self._epoch_root(federation, client, round_id + 2)
                return root.derive(Label.EPOCH_COINS)
        return self._scripted.secret(label, *context, size=size)

    def _epoch_root(self, federation, client, epoch):
        return self._scripted.secret(Label.EPOCH_ROOT, federation, client, epoch)


@pytest.mark.parametrize("group", [10, 5])
@pytest.mark.parametrize("crypto", ["none", "every"])
def test_fixed_groups_and_two_servers_train_the_model_of_submodel_to_the_bit(data, crypto, group):
    """With the same coins, own negatives as candidates and nobody missing; ten rounds.

    One by one: side by side, dropout masks are drawn for all who train together.
    """
    task, groups = a_task(data, candidates="own"), GroupsPlan(size=group, small=True)
    same = {"cohort": 20, "trainer": Trainer.SEQUENTIAL, "entropy": SameCoins(SECRET), "rounds": 10}
    plain = trained(task, "submodel", **same).parameters()
    waiting = trained(task, "secure-submodel", crypto=crypto, groups=groups, **same).parameters()
    split = trained(task, "two-server", crypto=crypto, **same).parameters()
    before = task.bind(task.build(0)).initial("items")
    assert np.abs(plain["items.weight"] - before).max() > 0.01
    for name, values in plain.items():
        assert values.tobytes() == split[name].tobytes(), name
        assert values.tobytes() == waiting[name].tobytes(), name
    other = trained(task, "secure-submodel", groups=groups, **{**same, "entropy": None})
    assert other.parameters()["items.weight"].tobytes() != plain["items.weight"].tobytes()


def test_in_fixed_groups_the_whole_union_is_trained_and_counted_alike(data):
    """Also what a member has drawn and another has not: counts do not tell who holds a row."""
    task = a_task(data, union_negatives=4)
    views = Views()
    run = trained(
        task, "secure-submodel", cohort=USERS, groups=GroupsPlan(size=5, small=True), views=views
    )
    for group in run.federation.epochs.met:
        union = set()
        for client in group.group.members:
            real = run.clients[client].local.real["items"]
            own = set(map(int, data.events.of(int(client))))
            assert own <= set(real.tolist()) and len(real) <= len(own) + 4
            union |= set(real.tolist())
        assert group.at.union is not None
        assert union == set(group.at.union.message.tables[0].tolist())
        visit = run.federation._visit(group.group.members[0], RoundId(2))
        submodel = visit.fetch()
        assert set(submodel.trained["items"].tolist()) == union
        job = prepare(run.bound, run.job(group.group.members[0], submodel, RoundId(2)))
        for counts in job.counts.values():
            assert len(counts) == len(union) and len(set(counts.tolist())) == 1
        own = data.events.of(int(group.group.members[0]))
        left_out = np.isneginf(job.shared[CANDIDATES])
        assert set(job.rows["items"][left_out].tolist()) == set(own.tolist())


def test_evenly_drawn_negatives_use_no_counts_in_groups_either(data):
    """With noise nobody has paid for counts, and the shares of holders are counts."""
    task = a_task(data, power=0.0)
    assert task.in_groups(5).loss is task.loss
    assert a_task(data).in_groups(5).loss.whole_union
    assert not a_task(data, candidates="own").in_groups(5).loss.whole_union


def test_what_is_not_in_a_rounds_examples_is_no_wrong_answer_either(data):
    """A round trains on some examples; the items of all the others are the client's own, too."""
    task = a_task(data)
    plan = Plan(scheme="submodel", cohort=10, training=replace(NEXT.training, examples=2))
    run = Training(task, complete(plan, task), entropy=ScriptedEntropy(SECRET))
    for client in run.clients.eligible:
        job = run.job(client, run._whole(client), RoundId(0))
        assert len(job.examples) == 2
        rows = prepare(run.bound, job)
        left_out = rows.rows["items"][np.isneginf(rows.shared[CANDIDATES])]
        assert set(left_out.tolist()) == set(data.events.of(int(client)).tolist())


def test_every_round_asks_for_all_rows_and_counts_them_alike(data):
    """Negatives are drawn once: neither the window of a round nor the plan's seed says which."""
    views, task = Views(), a_task(data)
    run = trained(task, "submodel", rounds=3, cohort=USERS, views=views, crypto="every")
    asked: dict[int, set[frozenset[int]]] = {}
    for seen in views.by_party["server"]:
        if wire.kind_of(seen.data) is PlainRows:
            message = wire.decode(seen.data)
            asked.setdefault(int(message.sender), set()).add(
                frozenset(map(int, message.tables[0].rows))
            )
    assert len(asked) == USERS
    for client, rows in asked.items():
        job = run.job(ClientId(client), run._whole(ClientId(client)))
        for counts in prepare(run.bound, job).counts.values():
            assert len(set(counts.tolist())) == 1
        own = set(map(int, data.events.of(client)))
        (named,) = rows
        assert own < named and named == set(
            map(int, run.clients[ClientId(client)].local.real["items"])
        )
        public = lasting_secret(ScriptedEntropy(b"0"), run.plan.federation, client)
        mine = {"items": np.array(sorted(own), np.uint64)}
        guessed = with_negatives(mine, run.bound.candidates, public)["items"]
        assert named - (set(map(int, guessed)) - own) != own


def test_what_is_drawn_does_not_change_when_a_client_has_more(data):
    softmax = a_task(data).bind(a_task(data).build(0)).candidates
    secret = lasting_secret(ScriptedEntropy(b"a"), "f", 1)
    first, then = (
        set(with_negatives({"items": np.array(own, np.uint64)}, softmax, secret)["items"].tolist())
        for own in ([1, 2], [1, 2, 3, 4])
    )
    assert then == first | {3, 4}


def test_the_held_out_item_is_a_negative_as_often_as_others(data):
    drawn = held = 0
    softmax = a_task(data, power=0.0).bind(a_task(data).build(0)).candidates
    for k in range(40):
        for user in range(USERS):
            secret = lasting_secret(ScriptedEntropy(bytes([k])), "f", user)
            own = np.sort(data.events.of(user)).astype(np.uint64)
            rows = with_negatives({"items": own}, softmax, secret)["items"]
            drawn += len(rows) - len(own)
            held += int(data.test_of(user)["item"][0] in rows)
    others = np.mean([ITEMS - len(data.events.of(user)) for user in range(USERS)])
    assert held / (40 * USERS) == pytest.approx(drawn / (40 * USERS) / others, abs=0.06)


@pytest.mark.parametrize("server", [None, ServerStep(optimizer="adam", schedule="linear")])
def test_a_linear_schedule_falls_over_the_rounds_of_the_plan(data, server):
    plan = Plan(scheme="submodel", cohort=5, server=server, simulation=SimulationPlan(rounds=40))
    whole = complete(plan, a_task(data))
    assert whole.server is not None and whole.server.schedule_rounds == 40
    assert complete(whole, a_task(data)) == whole


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "more"),
    [
        ("submodel", {}),
        ("two-server", {"crypto": "every"}),
        ("secure-submodel", {"crypto": "every", "groups": GroupsPlan(size=5, small=True)}),
    ],
)
def test_pair_sums_are_those_of_all_clients_under_every_scheme(data, scheme, more):
    task = a_task(data, "pairs", min_holders=1)
    run = trained(task, scheme, rounds=1, cohort=USERS, **more)
    plain = trained(task, "submodel", rounds=1, cohort=USERS)
    table, expected = run.tables[TABLE], Pairs(items=ITEMS).sums_of(data.events)
    ids = table.touched_ids
    values = table.values(ids)
    assert values.tobytes() == plain.tables[TABLE].values(ids).tobytes()  # to the bit
    assert len(ids) == plain.tables[TABLE].touched
    found = Pairs(items=ITEMS).sums([(ids.astype(np.int64), values[:, 0].astype(np.float64))])
    assert_allclose(found, expected, atol=USERS * 2e-3)  # rounded by every client
    _, cell, _ = Pairs(items=ITEMS).counts(data.events)
    holders = np.bincount(cell, minlength=Pairs(items=ITEMS).cells)[ids.astype(np.int64)]
    assert (values[:, 1] == holders).all()
    figures = run.evaluation.measures(run.dense, run.tables)
    assert figures["NDCG@10"] > task.metric.baselines(task.data)["most frequent"] + 0.2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"model": "pears"}, "model = 'pears'"),
        ({"model": "pairs", "min_holders": 0}, "min_holders = 0"),
        ({"negatives": ITEMS}, "60 negatives among 60 items"),
        ({"negatives": 0}, "0 negatives among"),
        ({"power": 2.0}, "power = 2.0"),
        ({"candidates": "all"}, "candidates = 'all'"),
        ({"union_negatives": -1}, "union_negatives = -1"),
    ],
)
def test_tasks_that_cannot_be_are_refused(data, options, match):
    with pytest.raises(ConfigError, match=match) as caught:
        a_task(data, **options)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({"scheme": "fedavg"}, "whose clients send sums by the row"),
        ({"simulation": SimulationPlan(rounds=2)}, "counts twice"),
        ({"simulation": SimulationPlan(rounds=1, patience=2)}, "nothing is trained"),
        ({"dp": DPPlan(unit="user", epsilon=8.0, clip=1.0)}, "their vectors have no bound"),
    ],
)
def test_plans_whose_sums_would_not_add_up_are_refused(data, plan, match):
    settings = {"scheme": "submodel", "simulation": SimulationPlan(rounds=1), **plan}
    with pytest.raises(ConfigError, match=match):
        complete(Plan(cohort=USERS, **settings), a_task(data, "pairs"))


def test_noise_refuses_negatives_by_counts_that_nobody_paid_for(data):
    plan = Plan(scheme="two-server", cohort=USERS, dp=DPPlan(unit="user", epsilon=8.0, clip=1.0))
    with pytest.raises(ConfigError, match="how often items occur"):
        complete(plan, a_task(data))
    complete(plan, a_task(data, power=0.0))


def test_without_an_order_there_is_no_next_and_pairs_are_ease(data):
    unordered = replace(data, ordered=False)
    with pytest.raises(ConfigError, match="no times"):
        a_task(unordered)
    assert a_task(unordered, any_order=True).architecture == a_task(data).architecture
    assert (
        a_task(unordered, "pairs").bind(a_task(unordered, "pairs").build(0))[TABLE].rows == ITEMS**2
    )


def test_the_penalty_on_rows_is_beside_the_sum_of_a_clients_losses(data):
    """L2 of .01 where losses are added up is .01 / examples where their mean is taken."""
    each = data.events.counts.mean()  # nobody has 50
    assert a_task(data).recommended.training.weight_decay == pytest.approx(0.01 / each, rel=0.05)


def test_a_set_may_have_a_penalty_of_its_own(data):
    of_set = tasks.known("sequences-amazon")
    task = of_set.kind.make(data, title="", recommended=of_set.recommended, negatives=5)
    assert task.recommended.training.weight_decay == 0.0011


@pytest.mark.parametrize(
    ("scheme", "more"),
    [
        ("fedavg", {}),
        ("secure-fedavg", {}),
        ("secure-submodel", {"privacy": {"level": "cpp4"}}),
    ],
)
def test_it_trains_under_the_other_schemes_too(data, scheme, more):
    task = a_task(data)
    run = trained(task, scheme, crypto="every", **more)
    before = task.bind(task.build(run.plan.seed)).initial("items")
    assert np.abs(run.parameters()["items.weight"] - before).max() > 1e-3


def test_it_trains_in_one_place(data, tmp_path):
    plan = Plan(scheme="central", cohort=10, simulation=SimulationPlan(rounds=9))
    run = simulate(a_task(data, power=0.0), plan, out=tmp_path / "run")
    assert run.metric is not None and run.metric > 0.05


# --- both -----------------------------------------------------------------------------------------


def mixed_run(data, folder, scheme="submodel", **more):
    task = a_task(data, "next+pairs", min_holders=1, power=0.0)
    simulation = SimulationPlan(rounds=3, **more.pop("simulation", {}))
    plan = Plan(scheme=scheme, cohort=10, simulation=simulation, **more)
    run = simulate(task, plan, out=folder, insecure_test_entropy="both", on_event=lambda _: None)
    return task, run


def test_two_models_train_without_what_their_weight_is_chosen_by(data):
    task = a_task(data, "next+pairs")
    held = task.beside.held
    assert 0 < len(held) <= USERS // 2
    for user, item, seen in zip(held["user"], held["item"], held[SEEN], strict=True):
        whole = data.events.of(user)
        assert item == whole[-1] and seen[seen >= 0].tolist() == whole[:-1].tolist()
        assert task.data.events.of(user).tolist() == whole[:-1].tolist()
        assert item not in task.data.of(int(user))["item"]
        pairs = task.beside.task.data.of(int(user))["cell"]
        assert not (item == pairs % ITEMS).any() and not (item == pairs // ITEMS % ITEMS).any()
    assert np.array_equal(task.data.test["item"], data.test["item"])
    assert np.array_equal(task.data.test[SEEN], data.test[SEEN])


@pytest.mark.parametrize(
    ("scheme", "more"),
    [
        ("submodel", {}),
        ("submodel", {"simulation": {"metrics": "federated"}}),
        ("two-server", {"simulation": {"metrics": "federated"}}),
        ("secure-submodel", {"groups": GroupsPlan(size=5, small=True)}),
        (
            "secure-submodel",
            {
                "groups": GroupsPlan(size=5, small=True),
                "simulation": {"metrics": "federated"},
            },
        ),
    ],
)
def test_one_run_has_both_models_and_the_weight_with_the_best_gain(data, tmp_path, scheme, more):
    task, run = mixed_run(data, tmp_path / "run", scheme, **more)
    found = run.facts["mixture"]
    curve = dict(map(tuple, found["curve"]))
    assert curve[found["weight"]] == max(curve.values()) > 0.0
    log = RunFolder.load(run.folder)
    with both(log, task) as (one, other), standing(log, task) as model:
        given = one.of_all_items(task.beside.held), other.of_all_items(task.beside.held)
        assert_allclose(
            model.of_all_items(task.beside.held), mixed(*given, found["weight"]), atol=1e-9
        )
        for weight in (0.0, 0.5, 1.0):
            right = ndcg(placed(mixed(*given, weight), task.beside.held), 10)
            assert curve[weight] == pytest.approx(right, abs=1e-3)
    assert bool(found["test"]) == (run.plan.simulation.metrics == "central")
    before = (run.folder / "run.json").read_text()
    again = simulate(task, run.plan, out=run.folder, resume=True, on_event=lambda _: None)
    assert (again.folder / "run.json").read_text() == before


def test_both_models_of_fixed_groups_have_the_same_groups(data):
    task = a_task(data, "next+pairs")
    plan = Plan(scheme="secure-submodel", cohort=10, groups=GroupsPlan(size=5, small=True))
    second = complete(plan_beside(plan, task.beside.task), task.beside.task)
    groups = [
        cohorts_of(each).formed(eligible(own.data, each))
        for each, own in ((complete(plan, task), task), (second, task.beside.task))
    ]
    assert groups[0] == groups[1] and len(groups[0]) == USERS // 5


def test_two_models_are_refused_where_they_would_not_add_up(data):
    task, groups = a_task(data, "next+pairs", power=0.0), GroupsPlan(size=5, small=True)
    plan = Plan(scheme="two-server", cohort=USERS, dp=DPPlan(unit="user", epsilon=8.0, clip=1.0))
    with pytest.raises(ConfigError, match="pay for both"):
        complete(plan, task)
    many = SimulationPlan(min_examples=9)
    with pytest.raises(ConfigError, match="other groups"):
        complete(Plan(scheme="secure-submodel", cohort=10, groups=groups, simulation=many), task)
    with pytest.raises(ConfigError, match="have one holder"):
        a_task(data, "next+pairs", exact_pairs=False)
    with pytest.raises(ConfigError, match="whose clients send sums by the row"):
        simulate(task, Plan(scheme="fedavg", cohort=10))
