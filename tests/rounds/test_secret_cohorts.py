"""Cohorts drawn in secret: whose coins, what sizes, what is charged, and what gives them away."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rounds.shops import alike, finished, model_of, one_table, shop
from tessera.crypto.entropy import RootedEntropy, ScriptedEntropy
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import TableMean
from tessera.plan import CohortsPlan, DPPlan, Plan, SimulationPlan, Trust, UpdatePlan
from tessera.plan.dp import GIVEN_UP, LONGER, boundary, fewest_drawn, most_drawn
from tessera.privacy.dp import accounting
from tessera.privacy.dp.guarantee import Adjacency, Observer, Unit
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.rounds.cohorts import Cohorts, SecretCohorts, cohorts_of
from tessera.rounds.course import Course
from tessera.rounds.events import RoundAbort, RoundFinished, RoundStarted
from tessera.rounds.messages import RoundResult
from tessera.rounds.noise import noise_of
from tessera.services.bundle import check_deployable
from tessera.simulation.faults import Drop
from tessera.simulation.views import Views

ROWS, CLIENTS, SHARE, COHORT = 40, 44, 0.5, 22
HELD = {c: sorted({c % ROWS, (c + 1) % ROWS, 20}) for c in range(CLIENTS)}
EACH = DPPlan(unit="user", noise=2.0, delta=1e-5, trust=Trust.EACH)
SERVER = replace(EACH, trust=Trust.SERVER)
IDEAL = SimulationPlan(crypto="none")
SECURE_SERVER = ("secure-fedavg", SERVER)
PUBLIC = CohortsPlan()


def secret(share: float = SHARE) -> CohortsPlan:
    return CohortsPlan(drawn="secret", share=share)


def planned(scheme: str = "two-server", section: DPPlan = EACH, **more) -> Plan:
    more.setdefault("security", {"dropout": 0.1, "corrupt": 0})
    update, cohorts = UpdatePlan(levels=2**12, average="examples"), more.pop("cohorts", secret())
    base = one_table(scheme, ROWS, cohort=COHORT, **more)
    return replace(base, dp=section, update=update, cohorts=cohorts)


# --- who is drawn ---------------------------------------------------------------------------------


def test_a_cohort_follows_from_the_leaders_entropy_and_not_from_the_seed() -> None:
    plan, entropy = planned(), RootedEntropy.fresh()
    population = [ClientId(c) for c in range(CLIENTS)]

    def sampled(plan: Plan, entropy) -> list[list[ClientId]]:
        drawing = Cohorts(plan, population, entropy)
        return [drawing.sample(RoundId(r)) for r in range(12)]

    first = sampled(plan, entropy)
    assert sampled(plan, entropy) == first  # a leader that is woken draws the same
    assert sampled(replace(plan, seed=9), entropy) == first
    assert sampled(plan, RootedEntropy.fresh()) != first
    assert len({len(each) for each in first}) > 1
    public = replace(plan, cohorts=PUBLIC)
    known = sampled(public, entropy)
    assert sampled(public, RootedEntropy.fresh()) == known  # anybody can compute it
    # Over many rounds the seed's cohorts say no more than chance about those that were drawn.
    drawing = Cohorts(plan, population, ScriptedEntropy(b"coins"))
    guessing = Cohorts(public, population, entropy)
    right = sum(
        (client in guessed) == (client in there)
        for r in range(100)
        for there, guessed in [(drawing.sample(RoundId(r)), set(guessing.sample(RoundId(r))))]
        for client in population
    )
    assert abs(right / (100 * CLIENTS) - 0.5) < 5 * 0.5 / math.sqrt(100 * CLIENTS)


@pytest.mark.parametrize("share", [0.03, 0.5, 0.9])
def test_every_client_has_a_coin_of_its_own_in_every_round(share: float) -> None:
    plan = planned(cohorts=secret(share))
    rounds, clients, rule = 60, 500, cohorts_of(plan)
    coins = np.stack(
        [rule.coins(RoundId(r), clients, ScriptedEntropy(b"a")) for r in range(rounds)]
    )
    spread = math.sqrt(share * (1 - share))
    assert abs(coins.mean() - share) < 5 * spread / math.sqrt(rounds * clients)
    # Neither neighbours nor one client's rounds go together.
    for left, right in ((coins[:, 1:], coins[:, :-1]), (coins[1:], coins[:-1])):
        product = ((left - share) * (right - share)).mean() / spread**2
        assert abs(product) < 5 / math.sqrt(left.size)


def test_who_has_no_participation_has_no_coins() -> None:
    public = cohorts_of(planned(cohorts=PUBLIC))
    assert public.coins(RoundId(0), 5, ScriptedEntropy(b"a")) is None


def test_a_population_that_does_not_make_the_cohort_is_refused() -> None:
    population = [ClientId(c) for c in range(CLIENTS)]
    entropy = ScriptedEntropy(b"a")
    with pytest.raises(ConfigError, match="makes a cohort of 30") as refused:
        Cohorts(planned(), [ClientId(c) for c in range(60)], entropy)
    assert refused.value.hint == "cohort = 30"
    drawing = Cohorts(planned(), population, entropy)
    with pytest.raises(ConfigError, match="makes a cohort of 23"):
        drawing.admit([ClientId(CLIENTS), ClientId(CLIENTS + 1)])
    few = replace(planned(), cohort=9)
    with pytest.raises(ConfigError, match="it would show who is there"):
        Cohorts(few, population[:18], entropy)
    floor = {"dropout": 0.0, "corrupt": 12}
    with pytest.raises(ConfigError, match="fewer than 14 clients are drawn"):
        Cohorts(planned(security=floor), population, entropy)


@pytest.mark.parametrize(("expected", "share"), [(22, 0.5), (30, 0.1), (100, 0.02), (900, 0.3)])
def test_the_sizes_of_a_cohort_are_bounded_as_is_said(expected: int, share: float) -> None:
    """Against the binomial distribution itself, by SciPy."""
    from scipy.stats import binom

    clients, least = round(expected / share), fewest_drawn(expected, floor=2, dropout=0.2)
    assert binom.sf(most_drawn(expected), clients, share) <= LONGER
    told = boundary(least, expected=expected, share=share)
    assert binom.pmf(least - 1, clients - 1, share) <= told <= GIVEN_UP
    assert told == pytest.approx(
        binom.cdf(least - 1, math.ceil((expected - 0.5) / share) - 1, share), rel=1e-6
    )
    assert least - int(0.2 * least) >= 2


# --- refused by name ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unit": "item", "trust": "local"}, "per user only"),
        ({"unit": "subject"}, "per user only"),
        ({"trust": "shares"}, "shows who is there"),
        ({"trust": "local"}, "shows who is there"),
    ],
)
def test_a_section_without_an_account_is_refused(changes, said) -> None:
    with pytest.raises(ConfigError, match=said):
        planned("fedavg", replace(SERVER, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"drawn": "secret", "share": 1.5}, "not a probability"),
        ({"drawn": "secret", "share": -0.1}, "not a probability"),
        ({"drawn": "secret"}, "not a probability"),
        ({"share": 0.1}, "nothing is drawn by coins"),
        ({"drawn": "secret", "share": 0.1, "rounds_per_client": 3}, "not be independent"),
        ({"drawn": "secret", "share": 0.1, "separation": 3}, "keeps no distance"),
        ({"separation": 3}, "keeps no distance"),
    ],
)
def test_cohorts_that_contradict_themselves_are_refused(changes, said) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        CohortsPlan(**changes)
    assert refused.value.hint


def test_secret_cohorts_are_for_noise() -> None:
    with pytest.raises(ConfigError, match="on a sample"):
        replace(planned(), dp=None)


@pytest.mark.parametrize(
    ("scheme", "section", "more", "said"),
    [
        ("submodel", SERVER, {}, "released exactly show who"),
        ("secure-submodel", SERVER, {}, "released exactly show who"),
        ("two-server", EACH, {"two_server": {"domain": "union"}}, "released exactly"),
        ("two-server", EACH, {"two_server": {"key_rounds": 3}}, "key_rounds = 3"),
        ("secure-fedavg", SERVER, {"security": {"sharing": "auto"}}, "sharing = .auto"),
        ("fedavg", SERVER, {"simulation": {"metrics": "federated"}}, "under the same coins"),
    ],
)
def test_what_shows_the_cohort_is_refused(scheme, section, more, said) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(scheme, section, **more)


def test_counts_by_row_and_services_are_refused() -> None:
    plan = planned("fedavg", SERVER)
    with pytest.raises(ConfigError, match=r"counts = 0\.01"):
        replace(plan, update=UpdatePlan(max_count=20), dp=replace(SERVER, counts=0.01))
    assert not replace(plan, update=UpdatePlan(average="rows")).counts_rows  # none are sent
    with pytest.raises(ConfigError, match="would have to be charged, too"):
        check_deployable(plan)


# --- rounds ---------------------------------------------------------------------------------------


def test_rounds_with_real_messages_and_ideal_ones_are_the_same_to_the_bit() -> None:
    """And sizes vary; the model of both servers, and of a leader that skips to a round, too."""
    plan = planned()

    def faults(round_id, cohort):
        return [Drop(cohort[1], "collect")] if round_id == 1 else []

    models, ended = [], []
    for each in (plan, replace(plan, simulation=IDEAL)):
        fed = shop(each, HELD, faults=faults)
        events = list(fed.run(3))
        sizes = [len(e.cohort) for e in events if isinstance(e, RoundStarted)]
        assert all(e.weight == COHORT for e in events if isinstance(e, RoundFinished))
        ended.append(alike([e for e in events if isinstance(e, RoundFinished | RoundAbort)]))
        models.append(model_of(fed))
        assert fed.helper_course is not None
        assert fed.helper_course.model.digest == fed.model.digest
    assert models[0] == models[1] and ended[0] == ended[1]
    assert len(set(sizes)) > 1
    later = shop(plan, HELD)
    later.go_on_at(2)
    assert later.cohorts.sample(RoundId(2)) == shop(plan, HELD).cohorts.sample(RoundId(2))


def result_of(plan: Plan, clients: int) -> RoundResult:
    """The same sums, over so many clients."""
    ids = np.arange(ROWS, dtype=np.uint64)
    means = TableMean(ids, np.full((ROWS, 3), 6.0 / clients), np.full(ROWS, clients))
    return RoundResult(
        tuple(ClientId(c) for c in range(clients)), clients, np.full(5, 9.0 / clients),
        {"goods": means}, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip


def test_sums_are_divided_by_the_number_that_is_expected() -> None:
    """So that the same sum is the same step, whoever was there."""
    plan = planned()
    few, many = (cohorts_of(plan).divided(result_of(plan, n)) for n in (7, 31))
    for one in (few, many):
        assert one.weight == COHORT and (one.tables["goods"].counts == COHORT).all()
        np.testing.assert_allclose(one.dense, 9.0 / COHORT)
        np.testing.assert_allclose(one.tables["goods"].mean, 6.0 / COHORT)
    public = replace(plan, cohorts=PUBLIC)
    assert cohorts_of(public).divided(result_of(public, 7)).weight == 7
    counted = replace(plan, dp=replace(EACH, counts=0.05))
    assert cohorts_of(counted).divided(result_of(counted, 7)).weight == 7  # noisy counts are there


def test_a_masked_sum_has_the_cohort_that_was_drawn_and_others_the_plan_itself() -> None:
    for scheme, section in (SECURE_SERVER, ("fedavg", SERVER), ("two-server", EACH)):
        plan = planned(scheme, section)
        course = Course.__new__(Course)
        course.plan = plan
        course.cohorts = Cohorts(plan, [ClientId(c) for c in range(CLIENTS)], ScriptedEntropy(b"a"))
        sizes = set()
        course.next_round = 0
        for _ in range(4):
            drawn = course.draw()
            (part,) = drawn.parts
            sizes.add(part.plan.cohort)
            assert part.plan.cohort == len(drawn.named) if scheme == "secure-fedavg" else True
            assert (part.plan is plan) is (scheme != "secure-fedavg")
            events = noise_of(plan).events(RoundId(1))
            assert noise_of(part.plan).events(RoundId(1)) == events
        assert (len(sizes) > 1) is (scheme == "secure-fedavg")


# --- what is charged ------------------------------------------------------------------------------


def test_readers_charge_every_round_as_a_sample_and_servers_every_participation() -> None:
    plan, rounds = replace(planned(), simulation=IDEAL), 6
    fed = shop(plan, HELD)
    events = list(fed.run(rounds))
    started = [e for e in events if isinstance(e, RoundStarted)]
    setting = noise_of(plan).setting
    sampled = {o: setting.in_the_sum(o) for o in (Observer.CLIENTS, Observer.READERS)}
    for client, participant in fed.participants.items():
        there = sum(int(client) in e.cohort for e in started)
        for observer in setting.sight.observers:
            level = participant.local.ledger.guarantee(unit=Unit.USER, against=observer, delta=1e-5)
            if observer in sampled:
                mechanism, times = sampled[observer], rounds
                assert "tells nobody who was drawn" in level.assumption
            else:
                mechanism, times = setting.in_the_sum(observer), there
                assert "who was drawn" not in level.assumption
            assert level.epsilon == accounting.epsilon(
                [(mechanism, times)], adjacency=Adjacency.ZERO_OUT, delta=1e-5
            )
    again = shop(plan, HELD)
    again.go_on_at(rounds)
    for client, participant in fed.participants.items():
        assert again.participants[client].local.ledger.entries == participant.local.ledger.entries


def test_a_round_that_draws_too_few_is_given_up_and_the_charge_stays(monkeypatch) -> None:
    plan, views = planned(), Views()
    fed = shop(plan, HELD, views=views)
    before = model_of(fed)

    def nobody(plan, round_id, clients, entropy):
        return np.arange(clients) < (1 if round_id == 0 else CLIENTS)

    monkeypatch.setattr(SecretCohorts, "coins", nobody)
    (abort,) = finished(fed, 1)
    assert isinstance(abort, RoundAbort)
    assert (abort.phase, abort.answered, abort.needed) == ("draw", 1, plan.fewest_clients)
    assert "too few" in abort.reason
    assert not views.by_party and model_of(fed) == before
    for participant in fed.participants.values():
        (entry,) = participant.local.ledger.entries
        assert entry.event.amplified(Observer.READERS) and entry.reason.endswith("not drawn")
        assert (
            participant.local.ledger.guarantee(
                unit=Unit.USER, against=Observer.LEADER, delta=1e-5
            ).epsilon
            == 0.0
        )
    (end,) = finished(fed, 1)  # the next one goes on
    assert isinstance(end, RoundFinished) and end.survivors == CLIENTS


def test_more_than_a_sum_has_room_for_are_given_up_too(monkeypatch) -> None:
    plan = replace(planned(), cohort=40, cohorts=secret(0.05))
    monkeypatch.setattr(SecretCohorts, "coins", lambda s, r, n, e: np.ones(n, np.bool_))
    course = Course.__new__(Course)
    course.plan = plan
    population = [ClientId(c) for c in range(800)]
    course.cohorts = Cohorts(plan, population, ScriptedEntropy(b"a"))
    course.next_round = 0
    drawn = course.draw()
    assert not drawn.parts
    abort = course.given_up(drawn)
    assert abort is not None and "more clients than" in abort.reason


# --- what clients are shown -----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["two-server", "secure-fedavg"])
def test_between_two_servers_no_message_to_a_client_says_how_many_there_are(
    scheme: str, monkeypatch
) -> None:
    """In a secure sum the roster does: there every participation is charged in full."""
    section = EACH if scheme == "two-server" else replace(SERVER, trust=Trust.SERVER)
    plan = planned(scheme, section)
    sent = []
    for size in (10, 30):
        drawn = lambda s, r, n, e, size=size: np.arange(n) < size  # noqa: E731
        monkeypatch.setattr(SecretCohorts, "coins", drawn)
        views = Views()
        fed = shop_with_noise(plan, views)
        (end,) = finished(fed, 1)
        assert isinstance(end, RoundFinished) and end.survivors == size
        sent.append(
            [
                (e.kind, len(e.data))
                for e in views.by_party[ClientId(3)]
                if e.direction == "received"
            ]
        )
    assert (sent[0] == sent[1]) is (scheme == "two-server")
    assert noise_of(plan).setting.secret_to(Observer.CLIENTS) is (scheme == "two-server")


def shop_with_noise(plan: Plan, views: Views):
    """A shop whose trainer takes the place of one that clips, where a server adds the noise."""
    from tessera.simulation import federation

    class Noisy(federation.Federation):
        def __init__(self, *given, **more) -> None:
            super().__init__(*given, **more, noisy=True)

    import rounds.shops

    made, rounds.shops.Federation = rounds.shops.Federation, Noisy
    try:
        return shop(plan, HELD, views=views)
    finally:
        rounds.shops.Federation = made


# --- the account ----------------------------------------------------------------------------------


def test_a_participation_of_one_is_the_account_without_sampling() -> None:
    rounds = 9
    for scheme, section in (("fedavg", SERVER), ("two-server", EACH)):
        whole = planned(scheme, section, cohorts=secret(1.0))
        public = planned(scheme, section, cohorts=PUBLIC)
        for observer in noise_of(public).setting.protected():
            levels = {
                noise_of(each)
                .setting.ledger(rounds)
                .guarantee(unit=Unit.USER, against=observer, delta=1e-5)
                .epsilon
                for each in (whole, public)
            }
            assert len(levels) == 1


def test_the_account_grows_with_the_participation_and_is_near_that_of_continuous_noise() -> None:
    plan = replace(planned(), dp=replace(EACH, noise=2.0))
    found = []
    for share in (0.05, 0.1, 0.5, 0.9, 1.0):
        setting = noise_of(replace(plan, cohorts=secret(share))).setting
        ledger = setting.ledger(20)
        level = ledger.guarantee(unit=Unit.USER, against=Observer.READERS, delta=1e-5).epsilon
        ideal = accounting.epsilon(
            [(GaussianNoise.poisson(2.0, share), 20)], adjacency=Adjacency.ZERO_OUT, delta=1e-5
        )
        assert ideal < level < 1.02 * ideal if share < 1.0 else ideal < level
        found.append(level)
    assert found == sorted(found)


def test_noise_is_less_where_the_cohort_is_secret_to_all_whom_it_is_for() -> None:
    """Plain averaging by a trusted server, whose clients are not shown each other."""

    def least(cohorts: CohortsPlan, scheme: str) -> float:
        section = replace(SERVER, noise=0.0, epsilon=3.0)
        found = noise_of(planned(scheme, section, cohorts=cohorts)).calibrated()
        return noise_of(found).dp.noise

    assert least(secret(), "fedavg") < 0.75 * least(PUBLIC, "fedavg")
    masked = least(secret(), "secure-fedavg")
    assert masked == pytest.approx(least(PUBLIC, "secure-fedavg"), rel=1e-3)
