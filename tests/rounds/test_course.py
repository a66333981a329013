"""A course of rounds: drawn, summed, stepped, committed and told, with no simulation around it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from rounds.population import DENSE, derived, federation, members, plan, specs, trainer
from rounds.shops import finished, model_of, two_server_plan
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.errors import ConfigError, MisuseError, RoundAborted
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import ServerStep
from tessera.learning.tables.store import ModelStore
from tessera.learning.tables.table import LazyTable
from tessera.plan import Plan, SimulationPlan
from tessera.rounds import schemes
from tessera.rounds.course import (
    Course,
    DrawnRound,
    HelperCourse,
    PartOutcome,
    RoundPart,
    client_role,
)
from tessera.rounds.events import RoundAbort, RoundFinished
from tessera.rounds.party import ClientRoundSetup, ServerModel, ServerParty
from tessera.rounds.schemes import SCHEMES
from tessera.simulation.faults import Drop, random_dropouts
from tessera.simulation.simulator import Simulator
from tessera.simulation.subcohort import between_messages
from tessera.simulation.two_server import TwoServerSetup

CLIENTS = 10
ENTROPY = ScriptedEntropy(b"population")
MOMENTUM = ServerStep(optimizer="momentum", rate=0.5, shrinkage=0.01)
FEDERATED = [entry.name for entry in SCHEMES.values() if entry.federated]


def a_model(settings: Plan) -> ServerModel:
    return ServerModel(
        settings,
        dense=np.zeros(DENSE, dtype=np.float32),
        tables={name: LazyTable(spec) for name, spec in specs().items()},
        derived=derived(),
    )


def settings_of(scheme: str) -> Plan:
    if SCHEMES[schemes.named(scheme).scheme].two_servers:
        return two_server_plan(server=MOMENTUM)
    return plan(scheme, server=MOMENTUM)


class Service:
    """What an engine adds to a course: clients somewhere, and somebody who carries messages."""

    def __init__(self, settings: Plan, **more) -> None:
        self.settings, self.locals = settings, members(CLIENTS)
        self.setup = TwoServerSetup.of(ENTROPY, settings.federation)
        two = schemes.of(settings).two_servers
        party = self.setup.leader_party if two else ServerParty(entropy=ENTROPY)
        self.course = Course(settings, self.locals, a_model(settings), party, **more)
        self.helper = (
            HelperCourse(settings, a_model(settings), self.setup.helper_party) if two else None
        )

    def round(self) -> RoundFinished | RoundAbort:
        drawn = self.course.draw()
        outcomes = [self.carried(drawn, part) for part in drawn.parts]
        return self.course.conclude(drawn, outcomes)

    def carried(self, drawn: DrawnRound, part: RoundPart) -> PartOutcome:
        signers: Mapping = dict.fromkeys(part.named)
        if self.helper is not None:
            signers = identities(part.named, ENTROPY, self.settings.federation)
        one = next(iter(signers.values()))
        server = self.course.server(drawn, part, one)
        clients = {
            name: client_role(
                ClientRoundSetup(
                    plan=part.plan,
                    round_id=drawn.round_id,
                    party=name,
                    local=self.locals[client].local,
                    entropy=ENTROPY,
                    identity=signers[name],
                    servers=self.setup.servers,
                )
            )
            for name, client in part.named.items()
        }
        helper = None
        if self.helper is not None:
            helper = self.helper.helper(drawn.round_id, one.directory)
        work = between_messages(
            clients, lambda subs: {c: trainer(part.named[c])(sub) for c, sub in subs.items()}
        )
        first = {name: client.start() for name, client in clients.items()}
        outcome = Simulator(
            server, clients, first, helper=helper, greeting=server.start(), work=work
        ).run()
        assert outcome.aborted is None
        if self.helper is not None:
            self.helper.conclude(drawn.round_id, helper.result)
        return PartOutcome(part=part, result=server.result)


# --- one course, two engines ----------------------------------------------------------------------


@pytest.mark.parametrize("scheme", FEDERATED)
def test_a_course_trains_without_a_federation_what_it_trains_within_one(scheme: str) -> None:
    settings = settings_of(scheme)
    service, simulated = Service(settings), federation(settings, clients=CLIENTS)
    for told in finished(simulated, 3):
        ended = service.round()
        assert isinstance(ended, RoundFinished)
        same = ("round_id", "cohort", "survivors", "rows_opened", "weight", "union_rows", "secure")
        assert [getattr(ended, n) for n in same] == [getattr(told, n) for n in same]
        # What only a simulation knows.
        assert not ended.bytes_up and not ended.client_seconds and math.isnan(ended.epsilon)
    assert service.course.model.digest == simulated.model.digest
    assert service.course.next_round == 3


def test_those_who_send_unmasked_are_summed_apart() -> None:
    settings = plan(security={"sharing": "auto"})
    bare = {ClientId(0), ClientId(1), ClientId(2)}
    course = Service(settings).course
    drawn = course.draw(unmasked=bare.__contains__)
    assert [schemes.of(part.plan).masks for part in drawn.parts] == [True, False]
    assert set(drawn.parts[1].named) == bare & set(drawn.named)
    few = course.draw(unmasked=lambda client: client not in bare - {ClientId(2)})
    assert len(few.parts) == 1  # two would hide nothing of each other


def test_a_part_of_a_whole_cohort_that_is_aborted_ends_the_round() -> None:
    service = Service(plan())
    drawn = service.course.draw()
    aborted = RoundAborted(round_id=drawn.round_id, phase="share", answered=3, needed=7)
    outcome = PartOutcome(part=drawn.parts[0], aborted=aborted)
    before = service.course.model.digest
    ended = service.course.conclude(drawn, [outcome])
    assert isinstance(ended, RoundAbort) and (ended.phase, ended.needed) == ("share", 7)
    assert service.course.model.digest == before


def test_a_sum_out_of_bounds_is_not_merged() -> None:
    service = Service(plan())
    drawn = service.course.draw()
    outcome = service.carried(drawn, drawn.parts[0])
    assert outcome.result is not None
    wild = replace(outcome, result=replace(outcome.result, out_of_bounds=True))
    before = service.course.model.digest
    ended = service.course.conclude(drawn, [wild])
    assert isinstance(ended, RoundAbort) and ended.phase == "merge"
    assert service.course.model.digest == before


def test_rounds_before_a_checkpoint_are_drawn_again_and_are_the_same() -> None:
    settings = plan(privacy={"level": "cpp2"}, cohort=5, cohorts={"drawn": "schedule"})
    first, again = Service(settings).course, Service(settings).course
    drawn = [first.draw() for _ in range(4)]
    skipped = list(again.skip_to(3))
    assert [d.named for d in skipped] == [d.named for d in drawn[:3]]
    assert again.next_round == 3 and again.draw().named == drawn[3].named


def test_a_model_is_committed_before_it_is_tested_or_told() -> None:
    settings, seen = settings_of("secure-submodel"), []
    service = Service(
        settings,
        commit=lambda round_id, model: seen.append(("committed", round_id, model.digest)),
        evaluate=lambda round_id: seen.append(("tested", round_id, None)) or 0.5,
    )
    ended = service.round()
    assert isinstance(ended, RoundFinished) and ended.metric == 0.5
    digest = service.course.model.digest
    assert seen == [("committed", RoundId(0), digest), ("tested", RoundId(0), None)]


def test_a_course_goes_on_from_its_store(tmp_path) -> None:
    settings = settings_of("secure-submodel")
    whole = Service(settings)
    for _ in range(3):
        whole.round()

    def service(path) -> tuple[Service, ModelStore]:
        begun = Service(settings, commit=lambda at, model: store.commit(at, model.dense_parts))
        model = begun.course.model
        store = ModelStore.open(path, plan_hash=settings.digest, tables=model.stored_tables)
        if store.round_id is not None:
            model.restore(store.dense())
        return begun, store

    first, store = service(tmp_path / "model.sqlite")
    for _ in range(2):
        first.round()
    store.close()
    second, store = service(tmp_path / "model.sqlite")
    assert second.course.model.digest == first.course.model.digest
    second.locals = first.locals
    assert len(list(second.course.skip_to(int(store.round_id) + 1))) == 2
    second.round()
    assert second.course.model.digest == whole.course.model.digest
    store.close()


def test_central_training_has_no_course() -> None:
    settings = replace(plan("fedavg"), scheme=schemes.named("central").scheme)
    with pytest.raises(ConfigError, match="a course of rounds does not run scheme 'central'"):
        Course(settings, members(9), a_model(settings), ServerParty(entropy=ENTROPY))
    own = members(9)[ClientId(0)].local
    setup = ClientRoundSetup(
        plan=settings, round_id=RoundId(0), party=ClientId(0), local=own, entropy=ENTROPY
    )
    with pytest.raises(ConfigError, match="does not run scheme 'central'"):
        client_role(setup)


# --- the helper's own model -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        two_server_plan({"write": "dpf"}, server=MOMENTUM),
        two_server_plan({"write": "auto", "domain": "union"}, server=MOMENTUM),
        two_server_plan(
            server=MOMENTUM, simulation=SimulationPlan(crypto="sampled", crypto_every=2)
        ),
    ],
    ids=["whole", "union", "sampled"],
)
def test_the_helper_steps_its_own_model_to_the_same_digest_in_every_round(settings: Plan) -> None:
    fed = federation(settings, clients=CLIENTS, faults=random_dropouts(0.2, 3, settings))
    begun, digests = fed.model.digest, []
    for _ in range(4):
        assert isinstance(list(fed.round())[-1], RoundFinished)
        assert fed.helper_course is not None
        helper = fed.helper_course.model
        assert helper.digest == fed.model.digest
        digests.append(helper.digest)
        for name, table in fed.tables.items():
            assert helper.tables[name] is not table
        assert helper.averaging is not fed.averaging
    assert len({begun, *digests}) == 5


def test_an_aborted_round_moves_neither_model() -> None:
    fed = federation(
        two_server_plan(server=MOMENTUM),
        faults=lambda at, cohort: [Drop(c, "query") for c in cohort] if int(at) == 1 else [],
    )
    first, second, third = (list(fed.round())[-1] for _ in range(3))
    assert [type(end) for end in (first, second, third)] == [
        RoundFinished,
        RoundAbort,
        RoundFinished,
    ]
    assert fed.helper_course is not None
    assert fed.helper_course.model.digest == fed.model.digest


def test_a_helper_that_was_shown_no_sum_stays_where_it_is() -> None:
    service = Service(two_server_plan(server=MOMENTUM))
    assert service.helper is not None
    before = service.helper.model.digest
    service.helper.conclude(RoundId(0), None)
    assert service.helper.model.digest == before


def test_a_leader_that_steps_otherwise_is_found_out_in_the_next_round() -> None:
    fed = federation(two_server_plan(server=MOMENTUM))
    finished(fed, 1)
    fed.model.dense = fed.model.dense + np.float32(1e-6)
    (ended,) = finished(fed, 1)
    assert isinstance(ended, RoundAbort) and ended.phase == "handshake"
    assert "holds another model" in ended.reason


def test_one_server_has_no_helper() -> None:
    settings = plan()
    setup = TwoServerSetup.of(ENTROPY, settings.federation)
    with pytest.raises(MisuseError, match="has no helper"):
        HelperCourse(settings, a_model(settings), setup.helper_party)


# --- a server's model -----------------------------------------------------------------------------


def test_a_digest_is_of_every_value_that_moved() -> None:
    settings = plan(server=MOMENTUM)
    model = a_model(settings)
    digests = {model.digest}
    model.tables["goods"].put(
        np.array([7], np.uint64), np.ones((1, 3), np.float32), np.ones(1, np.int64)
    )
    digests.add(model.digest)
    model.averaging.state[0].put(
        np.array([7], np.uint64), np.ones((1, 3), np.float32), np.ones(1, np.int64)
    )
    digests.add(model.digest)
    model.dense = model.dense + np.float32(1)
    digests.add(model.digest)
    assert len(digests) == 4
    other = model.copy()
    assert other.digest == model.digest
    other.tables["goods"].put(
        np.array([8], np.uint64), np.ones((1, 3), np.float32), np.ones(1, np.int64)
    )
    assert other.digest != model.digest
    with pytest.raises(MisuseError, match="has a dense part"):
        model.restore({})


def test_a_copy_trains_on_by_itself() -> None:
    fed = federation(settings_of("secure-submodel"), clients=CLIENTS)
    finished(fed, 1)
    kept = fed.model.copy()
    before = kept.digest
    finished(fed, 1)
    assert kept.digest == before != fed.model.digest
    assert model_of(fed)


def test_a_cohort_is_drawn_among_those_who_are_there_and_places_of_others_stay() -> None:
    """With everybody there it is the simulator's; bounds of a period hold all the same."""
    from tessera.crypto.entropy import ScriptedEntropy
    from tessera.rounds.cohorts import Cohorts

    clients = [ClientId(c) for c in range(12)]

    def cohorts(**privacy: object) -> Cohorts:
        agreed = plan("secure-fedavg", cohort=4, privacy=privacy)
        return Cohorts(agreed, clients, ScriptedEntropy(b"a"))

    anywhere, everybody, some = cohorts(), cohorts(), cohorts()
    everybody.there, some.there = clients, {ClientId(c) for c in (1, 4, 5, 7, 10, 11)}
    for number in map(RoundId, range(20)):
        assert everybody.sample(number) == anywhere.sample(number)
        assert set(some.sample(number)) <= some.there
    some.there = {ClientId(3), ClientId(8)}
    assert {3, 8} < set(some.sample(RoundId(20))) and len(some.sample(RoundId(21))) == 4
    some.there = frozenset()
    assert len(some.sample(RoundId(22))) == 4


def test_a_cohort_that_lasts_keeps_its_members_whoever_is_there() -> None:
    from tessera.crypto.entropy import ScriptedEntropy
    from tessera.plan import TwoServerPlan
    from tessera.rounds.cohorts import Cohorts, LastingCohorts

    lasting = plan("two-server", cohort=3, two_server=TwoServerPlan(key_rounds=4))
    found = Cohorts(lasting, [ClientId(c) for c in range(9)], ScriptedEntropy(b"a"))
    assert isinstance(found.rule, LastingCohorts)
    found.there = {ClientId(c) for c in (0, 2, 4, 6)}
    first = found.sample(RoundId(0))
    found.there = {ClientId(c) for c in (1, 3, 5)}
    assert found.sample(RoundId(3)) == found.candidates(RoundId(3)) == first
    again = Cohorts(lasting, [ClientId(c) for c in range(9)], ScriptedEntropy(b"a"))
    assert again.restore(found.record(first)) == first
    assert again.sample(RoundId(2)) == first
    assert set(found.sample(RoundId(4))) == {1, 3, 5}
