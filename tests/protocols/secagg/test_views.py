"""What the server sees says nothing before the sum opens, and nothing but the sum afterwards.

Statistics have fixed seeds. Each chi-square test refuses a true null hypothesis with probability
10^-6 (over the choice of the seed, made once); the twins with a rule switched off show that it
would notice.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from scipy import stats

import harness
from tessera import wire
from tessera.crypto import prg
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.ids import ClientId
from tessera.protocols.secagg import mask_streams, states, transcript
from tessera.protocols.secagg.messages import MaskedInput, RevealedShares, Roster
from tessera.protocols.secagg.params import GraphKind, Threat
from tessera.protocols.secagg.session import Session, neighbourhood
from tessera.protocols.secagg.standalone import Contribution, RowInput
from tessera.protocols.secagg.unmask import RecoveryTask, recover
from tessera.simulation.faults import Delay, Drop

ALARM = 1e-6
BYTE = Ring(8)


def p_value(words: np.ndarray) -> float:
    counts = np.bincount(words.reshape(-1), minlength=256)
    return float(stats.chisquare(counts).pvalue)


def received(ran: harness.Ran, kind: type) -> list:
    return [
        wire.decode(s.data)
        for s in ran.views.by_party["server"]
        if s.direction == "received" and s.kind == kind.__name__
    ]


def sent_roster(ran: harness.Ran) -> Roster:
    return next(wire.decode(s.data) for s in ran.views.by_party["server"] if s.kind == "Roster")


def session(cohort: harness.Cohort, client: ClientId) -> Session:
    """A client's secrets, which a test knows because its entropy is scripted."""
    root = ScriptedEntropy(cohort.seed).secret(
        Label.ROUND_ROOT, cohort.params.federation, cohort.params.round_id, client
    )
    return Session(params=cohort.params, me=client, root=root)


def zero_cohort(stage, clients: int, seed: int, rows: int = 0, **more) -> harness.Cohort:
    """Everybody contributes zeros, so that all that is seen is masks."""
    cohort = harness.Cohort.of(harness.params(clients, stage, **more), seed=seed)
    for client in cohort.clients:
        tables = {
            spec.table: RowInput(
                rows=np.arange(rows, dtype=np.uint64),
                words=stage.group.zeros((rows, spec.width)),
            )
            for spec in stage.tables
        }
        dense = stage.group.zeros(stage.dense) if stage.dense else None
        cohort.inputs[client] = [Contribution(dense=dense, tables=tables)]
    return cohort


@pytest.mark.parametrize("graph", list(GraphKind))
def test_the_servers_view_before_unmasking_is_uniform(graph):
    degree = {"degree": 4} if graph is GraphKind.SPARSE else {}
    words = []
    for seed in range(40):
        stage = harness.row_stage(BYTE, width=4, dense=64)
        cohort = zero_cohort(stage, 7, seed, rows=6, graph=graph, **degree)
        for message in received(harness.run(cohort), MaskedInput):
            words.append(BYTE.unpack(message.dense, 64))
            words.append(BYTE.unpack(message.tables[0], 24))
    assert p_value(np.concatenate(words)) > ALARM


@pytest.mark.parametrize("graph", list(GraphKind))
def test_sums_over_part_of_the_cohort_are_uniform_even_without_self_masks(graph):
    """The server may know every self-mask; pair masks alone keep any proper part closed."""
    degree = {"degree": 4} if graph is GraphKind.SPARSE else {}
    parts: dict[int, list[np.ndarray]] = {size: [] for size in (1, 2, 3, 6)}
    for seed in range(40):
        cohort = zero_cohort(harness.dense_stage(BYTE, 64), 7, seed, graph=graph, **degree)
        masked = {m.sender: m for m in received(harness.run(cohort), MaskedInput)}
        for size, found in parts.items():
            total = BYTE.zeros(64)
            for client in cohort.clients[:size]:
                own = mask_streams.dense_stream(
                    session(cohort, client).self_seed(0), Label.SELF_MASK
                )
                BYTE.iadd(total, BYTE.unpack(masked[client].dense, 64))
                prg.accumulate(BYTE, total, [own], [-1])
            found.append(total)
    for size, found in parts.items():
        assert p_value(np.concatenate(found)) > ALARM, size


def rows_without_self_masks(
    cohort: harness.Cohort, masked: dict, clients: Iterable[ClientId], rows: int, width: int
) -> np.ndarray:
    total = BYTE.zeros((rows, width))
    positions = np.arange(rows, dtype=np.uint64)
    for client in clients:
        own = mask_streams.row_stream(session(cohort, client).self_seed(0), Label.SELF_MASK, 0)
        BYTE.iadd(total, BYTE.unpack(masked[client].tables[0], rows * width).reshape(rows, width))
        prg.accumulate_rows(BYTE, total, [own], [-1], [positions], [positions])
    return total


def views_of_row_groups(graph: GraphKind, sizes: Iterable[int]) -> dict[int, np.ndarray]:
    """Sums over parts of a row's group of three, two of whom are not neighbours in the graph."""
    degree = {"degree": 4} if graph is GraphKind.SPARSE else {}
    found: dict[int, list[np.ndarray]] = {size: [] for size in sizes}
    rows, width = 8, 8
    for seed in range(40):
        stage = harness.row_stage(BYTE, width=width)
        cohort = zero_cohort(stage, 9, seed, rows=rows, graph=graph, **degree)
        # The group: a client and two others, strangers to it in the graph where there are any.
        ran = harness.run(cohort)
        hood = neighbourhood(cohort.params, sent_roster(ran))
        first = cohort.clients[0]
        strangers = [c for c in cohort.clients if c != first and c not in hood.neighbours(first)]
        group = [first, *(strangers or cohort.clients[1:])[:2]]
        for client in cohort.clients:
            part = cohort.inputs[client][0].tables[0]
            if client not in group:
                empty = RowInput(rows=part.rows[:0], words=part.words[:0])
                cohort.inputs[client] = [Contribution(tables={0: empty})]
        ran = harness.run(cohort)
        masked = {m.sender: m for m in received(ran, MaskedInput)}
        for size in found:
            found[size].append(rows_without_self_masks(cohort, masked, group[:size], rows, width))
    return {size: np.concatenate(words) for size, words in found.items()}


@pytest.mark.parametrize("graph", list(GraphKind))
def test_a_row_opened_over_any_proper_subset_of_its_group_stays_uniform(graph):
    views = views_of_row_groups(graph, (1, 2, 3))
    assert p_value(views[1]) > ALARM
    assert p_value(views[2]) > ALARM
    assert not views[3].any(), "over the whole group the masks cancel"


def test_if_rows_were_masked_along_the_sparse_graph_a_member_would_open(monkeypatch):
    """The rule switched off: a member whose neighbours are outside the group stands alone."""
    original = states.masked

    def along_the_graph(at, given, *, shared, **more):
        hood = neighbourhood(at.session.params, at.roster)
        near = set(hood.neighbours(at.session.me))
        fewer = {t: {c: r for c, r in by.items() if c in near} for t, by in shared.items()}
        return original(at, given, shared=fewer, **more)

    monkeypatch.setattr(states, "masked", along_the_graph)
    alone = views_of_row_groups(GraphKind.SPARSE, (1,))[1]
    assert not alone.any(), "the attack works where the rule does not hold"


def opened_by_the_server(ran: harness.Ran, victim: ClientId, key_stage: int) -> np.ndarray:
    """A server that kept everything: opens the victim's first input with the key of a stage."""
    cohort, params = ran.cohort, ran.cohort.params
    roster = sent_roster(ran)
    hood = neighbourhood(params, roster)
    shares = received(ran, RevealedShares)
    points = {holder: i for i, holder in enumerate(hood.holders(victim), start=1)}

    def put_together(stage: int, kind: str) -> Secret:
        given = {
            m.sender: getattr(m, kind)[victim]
            for m in shares
            if m.stage == stage and victim in getattr(m, kind)
        }
        task = RecoveryTask(victim, points, given, lambda secret: True)
        return recover([task], threshold=hood.threshold).secrets[victim]

    seed = put_together(0, "self_masks")
    key = AgreementKey.from_secret(put_together(key_stage, "mask_keys"))
    public = {m.client: m.stages[0].mask_key for m in roster.members}
    context = transcript.roster_context(params, roster)
    message = next(m for m in received(ran, MaskedInput) if (m.sender, m.stage) == (victim, 0))
    group = params.stages[0].group
    words = group.unpack(message.dense, params.stages[0].dense)
    streams = [mask_streams.dense_stream(seed, Label.SELF_MASK)]
    nothing = transcript.pair_binding(transcript.agreed_digest())
    signs = [-1]
    for peer in cohort.clients:
        if peer != victim:
            pair = mask_streams.pair_secret(key, public[peer], context, (victim, peer), 0, nothing)
            streams.append(mask_streams.dense_stream(pair, Label.PAIR_MASK))
            signs.append(-mask_streams.mask_sign(victim, peer))
    prg.accumulate(group, words, streams, signs)
    return words


def two_stages() -> harness.Cohort:
    return harness.Cohort.of(
        harness.params(7, harness.dense_stage(BYTE, 256), harness.dense_stage(BYTE, 5))
    )


def test_a_client_that_drops_between_stages_leaves_its_first_input_closed():
    cohort = two_stages()
    victim = cohort.clients[2]
    ran = harness.run(cohort, [Drop(victim, "collect", stage=1)])
    harness.assert_nobody_gave_both_shares(ran)
    attempt = opened_by_the_server(ran, victim, key_stage=1)
    truth = cohort.inputs[victim][0].dense
    assert (attempt != truth).mean() > 0.9
    assert p_value(attempt - truth) > ALARM


def test_if_stages_shared_their_keys_that_input_would_open(monkeypatch):
    """The rule switched off: one mask key for all stages."""
    monkeypatch.setattr(
        Session, "mask_key", lambda self, stage: self.root.derive(Label.MASK_KEY, "one for all")
    )
    cohort = two_stages()
    victim = cohort.clients[2]
    ran = harness.run(cohort, [Drop(victim, "collect", stage=1)])
    attempt = opened_by_the_server(ran, victim, key_stage=1)
    assert (attempt == cohort.inputs[victim][0].dense).all(), "the attack works"


def row_of_few(holders: int, **more) -> harness.Cohort:
    """Seven clients and an active server; one row, which the first few of them hold."""
    stage = harness.row_stage(BYTE, width=64)
    cohort = harness.Cohort.of(harness.params(7, stage, threat=Threat.ACTIVE, **more), seed=8)
    rng = np.random.default_rng(8)
    for i, client in enumerate(cohort.clients):
        rows = np.array([5] if i < holders else [], dtype=np.uint64)
        words = harness.random_words(BYTE, (len(rows), 64), rng)
        cohort.inputs[client] = [Contribution(tables={0: RowInput(rows=rows, words=words)})]
    return cohort


def declared_gone(cohort: harness.Cohort, clients: Iterable[ClientId]) -> harness.Ran:
    """A server that takes no input from these and tells everybody else that they dropped out.

    They did answer; the others cannot know, and sign the list.
    """
    return harness.run(cohort, [Delay(c, "collect", seconds=11.0) for c in clients])


def test_below_the_active_quorum_a_lying_server_opens_one_members_row():
    """The rule switched off: of a group of two the server declares the other one gone."""
    cohort = row_of_few(2, min_group=2, insecure_small_groups=True)
    alone, other = cohort.clients[:2]
    ran = declared_gone(cohort, [other])
    assert ran.outcome.aborted is None
    [row] = ran.sums[0].tables[0].words
    assert (row == cohort.inputs[alone][0].tables[0].words[0]).all(), "the attack works"


def test_with_the_active_quorum_whomever_it_declares_gone_two_honest_members_stay():
    cohort = row_of_few(2)
    assert cohort.params.quorum == 4
    assert not len(declared_gone(cohort, []).sums[0].tables[0].rows), "two are no group"

    cohort = row_of_few(4)
    alone, *others = cohort.clients[:4]
    own = cohort.inputs[alone][0].tables[0].words[0]
    ran = declared_gone(cohort, others[:2])
    [row] = ran.sums[0].tables[0].words
    assert (row == own + cohort.inputs[others[2]][0].tables[0].words[0]).all(), "a sum of two"
    assert p_value(row - own) > ALARM

    ran = declared_gone(cohort, others)
    assert ran.outcome.aborted is not None, "three are more than a list of seven may leave out"
    assert ran.sums == ()
    assert not received(ran, RevealedShares)


def test_recorded_views_are_one_file_per_party_and_read_back(tmp_path):
    from tessera.errors import ConfigError
    from tessera.simulation import views

    ran = harness.run(harness.Cohort.of(harness.params(4)))
    paths = ran.views.write(tmp_path / "views")
    assert len(paths) == 5
    for path in paths:
        name = path.name.removesuffix(".view.jsonl")
        party = name if name == "server" else int(name.removeprefix("client-"))
        assert list(views.read(path)) == ran.views.by_party[party]
    with pytest.raises(ConfigError, match="already"):
        ran.views.write(tmp_path / "views")
    assert (tmp_path / "views").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
