"""Everybody computes with the same union and model, or nothing is opened.

Each attack is a server that opens one client's exact update. It succeeds with the rule off and
fails with it on, in both settings. Signatures stay on throughout: they do not stop it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from rounds import population
from rounds.population import DENSE, GOODS, derived, plan, specs
from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.errors import ConfigError, PeerError, RoundAborted, ServerFault
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.tables.submodel import ModelUpdate, TableUpdate
from tessera.learning.tables.table import LazyTable
from tessera.privacy.index.period import MemoryPeriods
from tessera.privacy.index.response import LEVELS
from tessera.protocols.secagg import groups, mask_streams
from tessera.protocols.secagg.client import Client
from tessera.protocols.secagg.transcript import NOTHING
from tessera.rounds import delivery, select
from tessera.rounds.client import ClientRound
from tessera.rounds.ideal import IdealSum, TrustedParty
from tessera.rounds.messages import Download, UnionOpened
from tessera.rounds.party import (
    ClientRoundSetup,
    LocalState,
    ServerParty,
    ServerRoundSetup,
    check_rows,
)
from tessera.rounds.server import ServerRound
from tessera.simulation.federation import run_ideal

ROUND, VICTIM, CLIENTS = RoundId(1), ClientId(3), 8
EVERY = {name: np.arange(spec.size, dtype=np.uint64) for name, spec in specs().items()}
SCHEMES = ["secure-fedavg", "secure-submodel"]
THREATS = ["semi-honest", "active"]


def masks_follow_from_the_roster_only(monkeypatch) -> None:
    """The rule off: pair masks are the same whatever the two clients were sent."""
    secret = mask_streams.pair_secret
    monkeypatch.setattr(mask_streams, "pair_secret", lambda *given: secret(*given[:5], NOTHING))


def any_model_is_fit(monkeypatch) -> None:
    """The other rule off: clients compute with whatever they are sent."""
    monkeypatch.setattr(delivery, "model_flaw", lambda plan, dense, values: "")


@pytest.fixture(autouse=True)
def submitted(monkeypatch) -> dict:
    """What each client has last given to its sum, so that a test can compare."""
    submit, found = Client.submit, {}

    def watched(client, contribution):
        found[client.setup.party] = contribution
        return submit(client, contribution)

    monkeypatch.setattr(Client, "submit", watched)
    return found


class Crafted:
    """A table of which a server says what it likes: `value` for these rows."""

    def __init__(self, table, value: float, rows) -> None:
        self.table, self.value, self.rows = table, value, rows

    def values(self, ids):
        found = self.table.values(ids).copy()
        found[np.isin(ids, self.rows)] = self.value
        return found


class Attack:
    """A server with one model and union for everybody, and others for the victim.

    `dense`, and all values of `rows`, are the model that the others get; the victim has the true
    one, and so have all who are `told`, unless `alike`. Whoever computes with the other model sends
    deltas of zero (`dead`), or nothing at all.
    """

    def __init__(
        self,
        settings,
        *,
        dense=None,
        rows=None,
        dead=True,
        empty_union=False,
        alike=False,
        told=(VICTIM,),
        ideal=None,
    ) -> None:
        self.settings, self.dead, self.two_unions = settings, dead, empty_union
        self.alike, self.told = alike, told
        entropy = ScriptedEntropy(b"one model")
        keys = identities(map(ClientId, range(CLIENTS)), entropy, settings.federation)
        self.holdings = population.holdings(CLIENTS, each=4)
        self.clients = {
            c: ClientRound(
                ClientRoundSetup(
                    plan=settings,
                    round_id=ROUND,
                    party=c,
                    local=LocalState(
                        real={"goods": self.holdings[c]}, periods=MemoryPeriods(), derived=derived()
                    ),
                    entropy=entropy,
                    identity=keys[c],
                    ideal=ideal,
                )
            )
            for c in keys
        }
        self.true_dense = np.full(DENSE, 0.25, dtype=np.float32)
        self.true = {name: LazyTable(spec) for name, spec in specs().items()}
        tables = self.true
        if rows is not None:
            tables = {name: Crafted(table, rows, EVERY[name]) for name, table in tables.items()}
        self.server = ServerRound(
            ServerRoundSetup(
                plan=settings,
                round_id=ROUND,
                invited=keys,
                dense=self.true_dense if dense is None else np.full(DENSE, dense, dtype=np.float32),
                tables=tables,
                derived=derived(),
                own=ServerParty(entropy=entropy),
                identity=keys[VICTIM],
                ideal=ideal,
            )
        )

    def run(self) -> None:
        """The round, with whoever has left it missing."""
        with pytest.MonkeyPatch.context() as patch:
            if self.two_unions:
                patch.setattr(select, "opened_union", self.decoded)
            self._run()

    def _run(self) -> None:
        sent = {c: client.start() for c, client in self.clients.items()}
        for message in self.server.start():
            sent[message.to] += self.at_client(message.to, message.data)
        for c in self.clients:
            sent[c] += self.trained(c)
        while self.server.phase != "done":
            for c, out in sent.items():
                for message in out:
                    self.offered(c, message.data)
            sent = {c: [] for c in self.clients}
            for message in self.server.close_phase():
                sent[message.to] += self.at_client(message.to, message.data)
            for c in self.clients:
                sent[c] += self.trained(c)

    def offered(self, client: ClientId, data: bytes) -> None:
        try:
            self.server.receive(client, data)
        except PeerError:
            # The victim signs what it was sent, which is not what the others sign.
            assert client in self.told and self.server.phase == "consistency"

    def at_client(self, client: ClientId, data: bytes) -> list:
        message = wire.decode(data)
        if client in self.told and isinstance(message, Download) and not self.alike:
            data = wire.encode(self.true_model(client, message))
        if client == VICTIM and isinstance(message, UnionOpened) and self.two_unions:
            data = wire.encode(self.true_union)
        try:
            return self.clients[client].receive(SERVER, data)
        except ServerFault:
            return []

    def true_model(self, told: ClientId, message: Download) -> Download:
        plan, client = self.settings, self.clients[told]
        requested = client._selection(client.state.asked).requested
        values = {
            plan.table_id(name): self.true[name].values(ids) for name, ids in requested.items()
        }
        return replace(
            message,
            dense=self.true_dense.tobytes(),
            tables={table: each.astype("<f4").tobytes() for table, each in values.items()},
        )

    def decoded(self, settings, round_id, ids) -> UnionOpened:
        """The others are told of rows that nobody has, as many as there are."""
        table = settings.table_id("goods")
        self.true_union = UnionOpened(round_id=round_id, tables={table: ids})
        unused = np.setdiff1d(EVERY["goods"], ids)[: len(ids)]
        return UnionOpened(round_id=round_id, tables={table: unused})

    def trained(self, client: ClientId) -> list:
        one = self.clients[client]
        if one.pending is None:
            return []
        update = population.trainer(client)(one.pending)
        if client != VICTIM:
            still = {
                name: TableUpdate(np.zeros_like(part.values), part.counts)
                for name, part in update.tables.items()
            }
            update = ModelUpdate(np.zeros(DENSE), update.weight, still) if self.dead else None
        return one.supply(update)

    def recovered(self, submitted) -> float:
        """The share of the victim's values, of those that are not zero, which the server has."""
        total, sent = self.server.sums[-1], submitted[VICTIM]
        found, due = [total.dense[:DENSE]], [sent.dense[:DENSE]]
        if not self.settings.scheme.by_rows:
            found, due = [total.dense[:-1]], [sent.dense[:-1]]
        for table, words in sent.tables.items():
            part = total.tables[table]
            found.append(part.words[part.index(VICTIM)][:, :-1].reshape(-1))
            due.append(words[:, :-1].reshape(-1))
        opened, own = np.concatenate(found), np.concatenate(due)
        assert np.count_nonzero(own) > DENSE
        return float((opened == own)[own != 0].mean())


def settings_of(scheme: str, threat: str):
    return plan(scheme, cohort=CLIENTS, privacy={"level": "cpp5"}, security={"threat": threat})


@pytest.mark.parametrize("threat", THREATS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", [{"dense": 7.0}, {"rows": 7.0}], ids=["dense part", "rows"])
def test_a_client_with_another_model_than_the_others_is_not_opened(
    monkeypatch, submitted, scheme, threat, model
):
    """A threshold of clients agrees on a dead model, and one has the true one."""
    kept = Attack(settings_of(scheme, threat), **model)
    kept.run()
    assert kept.recovered(submitted) < 0.1
    masks_follow_from_the_roster_only(monkeypatch)
    broken = Attack(settings_of(scheme, threat), **model)
    broken.run()
    assert broken.recovered(submitted) == 1.0


@pytest.mark.parametrize("threat", THREATS)
def test_a_client_with_another_union_than_the_others_is_not_opened(monkeypatch, submitted, threat):
    kept = Attack(settings_of("secure-submodel", threat), empty_union=True)
    kept.run()
    assert kept.recovered(submitted) < 0.1
    masks_follow_from_the_roster_only(monkeypatch)
    broken = Attack(settings_of("secure-submodel", threat), empty_union=True)
    broken.run()
    assert broken.recovered(submitted) == 1.0


def any_groups_are_right(monkeypatch) -> None:
    """Another rule off: clients take the server's word for who shares which rows."""
    monkeypatch.setattr(ClientRound, "_check_row_groups", lambda client, total: None)


def no_row_has_a_group(monkeypatch) -> None:
    """The server says that no row met its quorum: what it sends of the rows is bound nowhere."""
    none = np.zeros(0, dtype=np.uint64)
    monkeypatch.setattr(groups, "form", lambda revealed, quorums: dict.fromkeys(revealed, none))


def victim_is_in_a_pair(monkeypatch) -> None:
    """The server says to the victim and one other that nobody else has named their rows."""
    shared, pair = groups.SharedRows, {VICTIM, ClientId(VICTIM + 1)}

    def divided(members):
        return {
            c: {peer: rows for peer, rows in peers.items() if (c in pair) == (peer in pair)}
            for c, peers in shared(members).items()
        }

    monkeypatch.setattr(groups, "SharedRows", divided)


def in_a_fixed_group(threat: str):
    settings = plan(cohort=CLIENTS, groups={"size": CLIENTS}, security={"threat": threat})
    return settings.group_plan


@pytest.mark.parametrize("threat", THREATS)
@pytest.mark.parametrize("settings", [in_a_fixed_group, partial(settings_of, SCHEMES[1])])
def test_rows_that_are_said_to_have_no_group_do_not_open_the_dense_part(
    monkeypatch, submitted, settings, threat
):
    """Dead rows for all but one, and the truth about the dense part, which is bound for all."""
    no_row_has_a_group(monkeypatch)
    kept = Attack(settings(threat), rows=7.0)
    with pytest.raises(RoundAborted):
        kept.run()
    assert {client.phase for client in kept.clients.values()} == {"Left"}
    any_groups_are_right(monkeypatch)
    broken = Attack(settings(threat), rows=7.0)
    broken.run()
    opened, own = broken.server.sums[-1].dense[:DENSE], submitted[VICTIM].dense[:DENSE]
    assert np.array_equal(opened, own) and own.any()


@pytest.mark.parametrize("victim", [0, 5])
@pytest.mark.parametrize("level", ["cpp1", "cpp2", "cpp3", "cpp4"])
def test_where_clients_name_different_rows_an_active_server_is_refused(
    monkeypatch, submitted, level, victim
):
    """Without the refusal it opens the dense part of a client, whichever it likes: 8 of 8."""
    settings = partial(plan, cohort=CLIENTS, privacy={"level": level, "decoys": 0.0})
    with pytest.raises(ConfigError, match='"active"') as refused:
        settings(security={"threat": "active"})
    assert "semi-honest" in refused.value.hint

    monkeypatch.setattr("tessera.plan.plan.check_liars", lambda plan: None)
    monkeypatch.setitem(globals(), "VICTIM", ClientId(victim))
    no_row_has_a_group(monkeypatch)
    broken = Attack(settings(security={"threat": "active"}), rows=7.0, told=(ClientId(victim),))
    broken.run()
    opened, own = broken.server.sums[-1].dense[:DENSE], submitted[victim].dense[:DENSE]
    assert np.array_equal(opened, own) and own.any()


def test_a_client_with_answers_of_its_own_does_not_meet_an_active_server():
    settings = settings_of("secure-submodel", "active")
    local = LocalState(real={}, periods=MemoryPeriods(), derived=derived())
    check_rows(settings, local)
    local.privacy = LEVELS["cpp4"]
    with pytest.raises(ConfigError, match="whole union"):
        check_rows(settings, local)


@pytest.mark.parametrize("threat", THREATS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_a_model_that_nobody_can_train_opens_nobody(monkeypatch, submitted, scheme, threat, value):
    """To all but one. They leave; did they send zeros, the masks would stay on."""
    model = {"dense": value, "rows": value, "dead": False}
    kept = Attack(settings_of(scheme, threat), **model)
    with pytest.raises(RoundAborted):
        kept.run()
    assert {c for c, client in kept.clients.items() if client.phase != "Left"} == {VICTIM}
    assert len(kept.server.sums) == len(kept.settings.stages) - 1

    any_model_is_fit(monkeypatch)
    masked = Attack(settings_of(scheme, threat), **model)
    masked.run()
    assert masked.recovered(submitted) < 0.1

    masks_follow_from_the_roster_only(monkeypatch)
    broken = Attack(settings_of(scheme, threat), **model)
    broken.run()
    assert broken.recovered(submitted) == 1.0


@pytest.mark.parametrize("scheme", ["fedavg", "submodel", *SCHEMES])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -65505.0])
@pytest.mark.parametrize("part", ["dense", "rows"])
def test_a_client_leaves_if_the_model_is_unfit(scheme, value, part):
    one = Attack(settings_of(scheme, "semi-honest"), alike=True, **{part: value})
    with pytest.raises(RoundAborted):
        one.run()
    for client in one.clients.values():
        assert client.phase == "Left" and "not finite, or beyond" in client.state.reason


def test_the_plan_says_how_large_a_parameter_may_be():
    settings = settings_of("secure-fedavg", "semi-honest")
    for largest, fits in ((65504.0, False), (65505.0, True)):
        model = replace(settings.model, largest=largest)
        one = Attack(replace(settings, model=model), dense=-65505.0, alike=True)
        if fits:
            one.run()
            assert one.server.phase == "done"
        else:
            with pytest.raises(RoundAborted):
                one.run()


@pytest.mark.parametrize("scheme", ["submodel", "secure-submodel"])
def test_an_ideal_round_misses_the_same_clients_as_a_real_one(scheme):
    """A row that is not finite: whoever fetches it leaves, and the others' sum is opened."""
    settings = plan(scheme, cohort=CLIENTS, privacy={"level": "cpp1", "decoys": 0.0})
    settings = replace(settings, security=replace(settings.security, dropout=0.3))

    def begun(total: IdealSum | None = None) -> Attack:
        one = Attack(settings, ideal=total)
        row = one.holdings[VICTIM][:1]
        assert sum(int(row[0]) in rows for rows in one.holdings.values()) <= 2
        one.true["goods"] = Crafted(one.true["goods"], np.nan, row)
        one.trained = lambda c: (  # type: ignore[method-assign]
            []
            if one.clients[c].pending is None
            else one.clients[c].supply(population.trainer(c)(one.clients[c].pending))
        )
        return one

    shared = IdealSum(TrustedParty(settings, ROUND, map(ClientId, range(CLIENTS))))
    real, ideal = begun(), begun(shared)
    real.run()
    result = run_ideal(
        ideal.server,
        ideal.clients,
        lambda subs: {c: population.trainer(c)(sub) for c, sub in subs.items()},
        {},
    )
    assert VICTIM not in result.survivors
    assert result.survivors == real.server.result.survivors
    np.testing.assert_array_equal(result.dense, real.server.result.dense)
    for name, part in result.tables.items():
        np.testing.assert_array_equal(part.ids, real.server.result.tables[name].ids)
        np.testing.assert_array_equal(part.mean, real.server.result.tables[name].mean)


def test_rows_nobody_has_are_enough_to_lie_with():
    """The attack with two unions has as many rows to name as the true union has."""
    held = np.unique(np.concatenate([*population.holdings(CLIENTS, each=4).values()]))
    assert 2 * len(held) * 1.2 < GOODS
