"""What clients keep: the rounds of a training they have been in, whatever a leader asks of them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rounds.population import federation, plan
from rounds.shops import finished
from tessera.errors import ConfigError, RoundRefused
from tessera.ids import ClientId, RoundId
from tessera.plan import CohortsPlan, DPPlan, Plan, Trust
from tessera.protocols.two_server.params import Servers
from tessera.rounds.attendance import Attendance, Place, attended, registered, training_digest
from tessera.rounds.cohorts import Cohorts
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.simulation.federation import Federation

CLIENTS, COHORT = 12, 4
LOOSE = {"dropout": 0.5}


def planned(scheme: str = "submodel", rounds: int = 9, **section: object) -> Plan:
    cohorts = CohortsPlan(**({"drawn": "schedule"} | section))
    simulation = {"rounds": rounds}
    return plan(scheme, cohort=COHORT, cohorts=cohorts, security=dict(LOOSE), simulation=simulation)


# --- the rule itself ------------------------------------------------------------------------------


@given(
    bound=st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(1, 9)),
    asked=st.lists(st.integers(0, 35), max_size=40),
)
def test_whatever_is_asked_of_it_a_client_keeps_the_bound(
    bound: tuple[int, int, int], asked: list[int]
) -> None:
    """Against the definition: at most k of T rounds, any two of them at least b apart."""
    rounds, most, separation = bound
    settings = planned(rounds=rounds, separation=separation)
    most = min(most, settings.participation.most)
    settings = replace(settings, cohorts=replace(settings.cohorts, rounds_per_client=most))
    free = replace(settings, cohorts=replace(settings.cohorts, drawn="schedule"))
    stored = new(free)
    taken = []
    for number in asked:
        at = Place(first=number % 1000, rounds=1000)  # a leader may say any place is its own
        try:
            stored = attended(free, None, RoundId(number), stored, at)
        except RoundRefused as refused:
            assert refused.hint and refused.record is None
            continue
        taken.append(number)
    assert len(taken) <= most
    assert all(b - a >= separation for a, b in pairwise(taken))
    assert all(number < rounds for number in taken)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (5, "rounds of a training rise"),
        (2, "rounds of a training rise"),
        (6, "no place"),
        (50, "training of 50 rounds"),
    ],
)
def test_each_refusal_has_its_reason(number: int, said: str) -> None:
    settings = planned(rounds=50, separation=3, rounds_per_client=17)
    stored = Attendance(training=training_digest(settings, None), last=5, count=2)
    with pytest.raises(RoundRefused, match=said):
        attended(settings, None, RoundId(number), stored, Place(first=2, rounds=3))
    kept = attended(settings, None, RoundId(8), stored, Place(first=2, rounds=3))
    assert (kept.last, kept.count) == (8, 3)
    with pytest.raises(RoundRefused, match="less than 3 rounds apart"):
        attended(settings, None, RoundId(7), stored, Place(first=1, rounds=2))
    full = replace(stored, count=17)
    with pytest.raises(RoundRefused, match="all of its 17 rounds"):
        attended(settings, None, RoundId(8), full, Place(first=2, rounds=3))
    with pytest.raises(RoundRefused, match="no place in the schedule"):
        attended(settings, None, RoundId(8), stored, None)


def test_a_client_that_remembers_nothing_and_has_no_schedule_waits_for_another_training() -> None:
    """Nobody whom it could believe knows how often the seed has drawn it."""
    settings = planned(drawn="seed", rounds_per_client=4)
    assert attended(settings, None, RoundId(2), new(settings), None).count == 1
    with pytest.raises(RoundRefused, match="has lost what it remembered") as lost:
        attended(settings, None, RoundId(2), None, None)
    record = lost.value.record
    assert isinstance(record, Attendance)
    with pytest.raises(RoundRefused, match="all of its 4"):
        attended(settings, None, RoundId(3), record, None)


def new(plan: Plan, servers: Servers | None = None) -> Attendance:
    """What a client has that was registered, and in no round."""
    return registered(plan, servers)[plan.federation]


def noisy(**changes: object) -> Plan:
    dp = DPPlan(**({"unit": "user", "noise": 2.0, "clip": 1.0, "trust": Trust.EACH} | changes))
    return replace(planned("two-server", separation=3), dp=dp)


KEYS = Servers(leader=b"a" * 32, helper=b"b" * 32, box=b"c" * 31 + b"\x01")


@pytest.mark.parametrize(
    "other",
    [
        (noisy(noise=3.0), KEYS),
        (noisy(clip=2.0), KEYS),
        (replace(noisy(), cohorts=replace(noisy().cohorts, separation=2)), KEYS),
        (replace(noisy(), cohorts=replace(noisy().cohorts, rounds_per_client=2)), KEYS),
        (noisy().with_simulation(rounds=8), KEYS),
        (noisy(correlated=True), KEYS),
        (noisy(), replace(KEYS, leader=b"d" * 32)),
        (noisy(), replace(KEYS, helper=b"d" * 32)),
        (noisy(), replace(KEYS, box=b"e" * 31 + b"\x01")),
    ],
)
def test_other_parameters_under_the_same_name_are_refused(other: tuple[Plan, Servers]) -> None:
    at = Place(first=0, rounds=3)
    stored = attended(noisy(), KEYS, RoundId(0), new(noisy(), KEYS), at)
    attended(noisy(), KEYS, RoundId(3), stored, at)
    with pytest.raises(RoundRefused, match="other rounds, noise or servers"):
        attended(other[0], other[1], RoundId(3), stored, at)


def test_a_client_that_remembers_nothing_takes_its_places_for_used_and_waits_a_pass() -> None:
    settings = planned(rounds=50, separation=5, rounds_per_client=4)
    at = Place(first=2, rounds=5)
    assert attended(settings, None, RoundId(2), new(settings), at).count == 1
    with pytest.raises(RoundRefused, match="has lost what it remembered") as lost:
        attended(settings, None, RoundId(12), None, at)
    record = lost.value.record
    assert isinstance(record, Attendance) and (record.last, record.count) == (12, 3)
    following = attended(settings, None, RoundId(17), record, at)
    assert following.count == 4
    with pytest.raises(RoundRefused, match="all of its 4"):
        attended(settings, None, RoundId(22), following, at)


# --- in rounds ------------------------------------------------------------------------------------


def liar(
    monkeypatch: pytest.MonkeyPatch, asks: Callable[[list[ClientId], int], list[ClientId]]
) -> None:
    """A leader that invites others than the schedule has."""
    honest = Cohorts.sample
    monkeypatch.setattr(Cohorts, "sample", lambda self, r: asks(honest(self, r), int(r)))


SCHEMES = [("submodel", "every"), ("secure-fedavg", "every"), ("two-server", "every")]


@pytest.mark.parametrize(("scheme", "crypto"), [*SCHEMES, *((s, "none") for s, _ in SCHEMES)])
def test_a_client_invited_early_refuses_and_the_round_goes_on_without_it(
    scheme: str, crypto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = planned(scheme, rounds=6).with_simulation(rounds=6, crypto=crypto)
    fed = federation(settings, clients=CLIENTS)
    assert fed.cohorts.schedule is not None
    early = fed.cohorts.schedule.of_round(0)[0]

    def asks(cohort: list[ClientId], number: int) -> list[ClientId]:
        return sorted([*cohort[1:], early]) if number == 1 else cohort

    liar(monkeypatch, asks)
    local = fed.participants[early].local
    ends, charged, attendance = [], [], []
    for _ in range(6):
        ends += finished(fed, 1)
        charged.append(len(local.ledger.entries))
        attendance.append(local.attendance[settings.federation])
    assert all(isinstance(end, RoundFinished) for end in ends)
    assert [end.survivors for end in ends] == [4, 3, 4, 4, 4, 4]
    assert charged[0] == charged[1] and attendance[0] == attendance[1]
    assert charged[3] >= charged[2] and attendance[3].count == 2  # in its own place again


def test_a_client_is_in_no_more_rounds_than_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seed: sized for k rounds, and a leader that invites a client once more is refused."""
    settings = planned(rounds=6, drawn="seed", rounds_per_client=2)
    fed = federation(settings, clients=CLIENTS)
    always = ClientId(3)
    liar(monkeypatch, lambda cohort, _: sorted({*[c for c in cohort if c != always][:3], always}))
    ends = finished(fed, 6)
    there = [e for e in ends if isinstance(e, RoundFinished)]
    assert fed.participants[always].local.attendance[settings.federation].count == 2
    assert sum(e.survivors for e in there[2:]) < 4 * len(there[2:])


def test_rounds_that_were_given_up_keep_their_place_and_count() -> None:
    settings = planned(rounds=6, separation=3)
    from tessera.simulation.faults import Drop

    def all_drop(round_id: RoundId, cohort: list[ClientId]) -> list[Drop]:
        return [Drop(c, "collect") for c in cohort] if int(round_id) == 0 else []

    fed = federation(settings, clients=CLIENTS, faults=all_drop)
    ends = finished(fed, 6)
    assert isinstance(ends[0], RoundAbort) and isinstance(ends[3], RoundFinished)
    assert {p.local.attendance[settings.federation].count for p in fed.participants.values()} == {2}
    with pytest.raises(ConfigError, match="has had its 6 rounds") as over:
        finished(fed, 1)
    assert over.value.hint


def resumed(fed: Federation, other: Federation, at: int) -> None:
    other.model.dense = fed.dense
    other.go_on_at(at)


def test_a_run_that_goes_on_knows_the_rounds_of_everybody() -> None:
    settings = planned(rounds=9)
    whole, later = federation(settings, clients=CLIENTS), federation(settings, clients=CLIENTS)
    finished(whole, 5)
    resumed(whole, later, 5)
    for client, participant in whole.participants.items():
        assert later.participants[client].local.attendance == participant.local.attendance


def test_a_plan_without_a_bound_counts_nothing() -> None:
    settings = plan("submodel", cohort=COHORT)
    fed = federation(settings, clients=CLIENTS)
    finished(fed, 3)
    assert not any(p.local.attendance for p in fed.participants.values())
    assert training_digest(settings, None) == b""
