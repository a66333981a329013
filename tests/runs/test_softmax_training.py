"""A softmax over a table under every row scheme, with negatives that nobody else can draw."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tessera import load, simulate, tasks, wire
from tessera.crypto.entropy import ScriptedEntropy, SystemEntropy
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.learning.training.settings import LocalTraining
from tessera.plan import Plan, SimulationPlan, UnionPlan
from tessera.plan.dp import DPPlan
from tessera.protocols.plain import PlainRows
from tessera.rounds.root import lasting_secret, with_negatives
from tessera.runs.held import HeldRows
from tessera.runs.training import Training, complete
from tessera.services.journal import Journal
from tessera.services.journal_stores import own_secret
from tessera.simulation.views import Views

NEGATIVES = 30
SECRET = b"softmax"


@pytest.fixture(scope="module")
def task():
    return tasks.load(
        "speakers-like", speakers=8, words=120, spoken_each=60, width=4, hidden=4,
        negatives=NEGATIVES,
    )  # fmt: skip


def plan(scheme: str, **more) -> Plan:
    return Plan(scheme=scheme, cohort=5, training=LocalTraining(batch=8, rate=0.5), **more)


def trained(task, scheme: str, rounds: int = 2, views=None, **more) -> Training:
    settings = complete(plan(scheme, **more), task)
    training = Training(task, settings, entropy=ScriptedEntropy(SECRET), views=views)
    for _ in training.run(rounds):
        pass
    return training


def test_submodel_and_two_servers_train_the_same_model_to_the_bit(task):
    one, two = trained(task, "submodel"), trained(task, "two-server")
    before = task.bind(task.build(0)).initial("words")
    assert np.abs(one.parameters()["words.weight"] - before).max() > 0.01
    for name, values in one.parameters().items():
        assert values.tobytes() == two.parameters()[name].tobytes(), name


@pytest.mark.parametrize("more", [{"groups": {"size": 5}}, {"privacy": {"level": "cpp4"}}])
def test_secure_submodel_trains(task, more):
    run = trained(task, "secure-submodel", **more)
    before = task.bind(task.build(0)).initial("words")
    assert np.abs(run.parameters()["words.weight"] - before).max() > 0.01


def own_rows(task, client: int):
    bound = task.bind(task.build(0))
    return bound.row_ids_of(task.data.of(client))["words"]


def test_negatives_are_among_a_clients_rows_and_count_under_the_cap(task):
    bound = task.bind(task.build(0))
    run = trained(task, "two-server", rounds=1)
    held = run.clients[ClientId(3)].local.real["words"]
    assert len(held) == len(own_rows(task, 3)) + NEGATIVES
    assert set(own_rows(task, 3)) < set(held)
    least = min(len(run.clients[c].local.real["words"]) for c in run.clients)
    counted = HeldRows.of(task, complete(plan("two-server"), task))
    assert counted.most >= least > NEGATIVES
    capped = trained(task, "two-server", rounds=1, union=UnionPlan(max_rows=20))
    assert capped.federation.course.model is not None
    assert bound.candidates.negatives == NEGATIVES


def requests(views) -> dict[int, list[frozenset[int]]]:
    """What each client asked the server for, round by round, of the table of words."""
    found: dict[int, list[frozenset[int]]] = {}
    for seen in views.by_party["server"]:
        if wire.kind_of(seen.data) is PlainRows:
            message = wire.decode(seen.data)
            (first, *_) = message.tables
            found.setdefault(int(message.sender), []).append(frozenset(map(int, first.rows)))
    return found


def test_what_a_server_sees_is_fixed_and_the_plans_seed_takes_nothing_away(task):
    views = Views()
    real = SimulationPlan(crypto="every")
    run = trained(task, "submodel", rounds=3, views=views, simulation=real)
    seen = requests(views)
    assert len(seen) >= 5
    for client, asked in seen.items():
        assert len(set(asked)) == 1, "negatives that change leave the own rows in all requests"
        own, named = frozenset(map(int, own_rows(task, client))), asked[0]
        assert own < named and len(named) == len(own) + NEGATIVES
        # The protection switched off: negatives drawn from what everybody knows.
        for entropy, removed in ((ScriptedEntropy(SECRET), True), (ScriptedEntropy(b"0"), False)):
            secret = lasting_secret(entropy, run.plan.federation, client)
            mine = {"words": np.array(sorted(own), np.uint64)}
            drawn = with_negatives(mine, run.bound.candidates, secret)["words"]
            left = named - (frozenset(map(int, drawn)) - own)
            assert (left == own) == removed


def test_a_deployed_client_keeps_its_secret(tmp_path):
    with_one = Journal.open(tmp_path / "a", owner="client 1", plan=b"p" * 32)
    first = own_secret(with_one, "client 1", SystemEntropy(), "f", 1)
    other = own_secret(with_one, "client 2", SystemEntropy(), "f", 2)
    with_one.close()
    again = Journal.open(tmp_path / "a", owner="client 1", plan=b"p" * 32)
    kept = own_secret(again, "client 1", SystemEntropy(), "f", 1)
    assert kept.reveal() == first.reveal() != other.reveal()
    again.close()


def test_noise_in_every_step_is_refused(task):
    section = DPPlan(unit="item", epsilon=8.0, noise=1.0, clip=1.0)
    with pytest.raises(ConfigError, match="softmax over table 'words'"):
        complete(plan("secure-fedavg", dp=section), task)


def test_the_same_run_goes_on_with_the_same_negatives(task, tmp_path):
    settings = complete(plan("submodel"), task)
    found = []
    for _ in range(2):  # the second opens what the first has left
        with Training(task, settings, folder=tmp_path / "run") as training:
            for _ in training.run(1):
                pass
            found.append(training.clients[ClientId(2)].local.real["words"])
    assert_array_equal(*found)


EVERY_SCHEME = [
    ("central", {}),
    ("fedavg", {}),
    ("submodel", {}),
    ("secure-fedavg", {}),
    ("secure-submodel", {"groups": {"size": 5}}),
    ("secure-submodel", {"privacy": {"level": "cpp4"}}),
    ("two-server", {}),
]


@pytest.mark.parametrize(("scheme", "more"), EVERY_SCHEME)
def test_the_lag_model_of_words_trains_under_every_scheme(scheme, more, tmp_path):
    lags = tasks.load(
        "speakers-like", speakers=8, words=120, spoken_each=60, width=4, model="next", negatives=30,
    )  # fmt: skip
    run = simulate(
        lags,
        Plan(scheme=scheme, cohort=5, **more),
        rounds=2,
        out=tmp_path / "run",
        insecure_test_entropy="lags",
    )
    assert run.metric is not None and 0.0 <= run.metric <= 1.0
    found = load(run.export()).module
    before = dict(lags.build(0).named_parameters())["items.weight"]
    assert (found.get_parameter("items.weight") - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["plays", "speakers-like"])
def test_each_model_of_words_has_settings_of_its_own(name):
    """Whichever is the default: a lag model takes one step, of Adam at the server."""
    known = tasks.known(name)
    data = tasks.load("speakers-like", speakers=8, words=120, spoken_each=60).data

    def good(**model):
        return known.kind.make(
            data, title="", recommended=known.recommended, **known.fixed, **model
        ).recommended

    lags, bilinear = good(model="next"), good(model="log-bilinear")
    assert lags.server.optimizer == "adam" and lags.training.batch == lags.training.examples
    assert bilinear.server.optimizer == "plain" and bilinear.training.batch < 20
    assert good() == known.recommended == (lags if name == "plays" else bilinear)
    assert known.options["model"] == ("next" if name == "plays" else "log-bilinear")


def test_models_of_words_that_are_unknown_are_refused():
    with pytest.raises(ConfigError, match="model = 'lags'"):
        tasks.load("speakers-like", model="lags")
