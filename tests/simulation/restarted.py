"""A federation whose parties exist as bytes only, but for one step at a time.

Run as a program it reads one line of JSON after the other: everything that is stored, and one
event. It wakes all parties, lets one of them take the event, puts all of them back to bytes, and
writes what is stored now and what was sent. Nothing is left in the process.
"""

from __future__ import annotations

import hashlib
import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from rounds.population import DENSE, derived, holdings, specs, trainer
from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.crypto.secret import Secret
from tessera.errors import RoundAborted
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.learning.averaging import Averaging, ServerStep
from tessera.learning.tables.table import LazyTable
from tessera.plan import Plan
from tessera.privacy.dp.events import Event, ExactRelease, IndexAnswers, NoisySum
from tessera.privacy.dp.guarantee import Observer
from tessera.privacy.dp.ledger import Entry, Ledger
from tessera.privacy.index.period import Agreement, FrozenPeriod, MemoryPeriods
from tessera.privacy.index.response import IndexPrivacy
from tessera.protocols.machine import Outbound, RoundOutcome
from tessera.protocols.two_server.collector import MemoryReplayGuard
from tessera.protocols.two_server.key_period import KeyPeriod, MemoryStore
from tessera.protocols.two_server.params import Servers
from tessera.rounds import schemes
from tessera.rounds.course import client_role, helper_role, server_role
from tessera.rounds.messages import RoundResult
from tessera.rounds.party import (
    ClientRoundSetup,
    HelperParty,
    HelperRoundSetup,
    LocalState,
    ServerParty,
    ServerRoundSetup,
    StoredRole,
)
from tessera.services import journal_stores
from tessera.simulation.two_server import TwoServerSetup

SEED: Final = b"restarted"
Json = dict[str, Any]


def text(data: bytes) -> str:
    return b64encode(data).decode()


def data(stored: str) -> bytes:
    return b64decode(stored)


def party_of(name: str) -> Party:
    return ClientId(int(name)) if name.isdecimal() else name


# --- what outlives a round ------------------------------------------------------------------------


def local_of(plan: Plan, me: ClientId, stored: Json) -> LocalState:
    """A client's own state; new if nothing is stored."""
    periods = MemoryPeriods()
    if "period" in stored:
        fields = stored["period"]
        fields = {
            **fields,
            "secret": data(fields["secret"]),
            "tables": [(t, most, data(real), data(off)) for t, most, real, off in fields["tables"]],
            "agreement": [
                data(part) if isinstance(part, str) else part for part in fields["agreement"]
            ],
        }
        periods.begin(FrozenPeriod.from_fields(fields))
        for _ in range(stored["rounds"]):
            periods.count_round(plan.federation)
    ledger = Ledger(
        entries=[
            Entry(event=event_of(each["event"]), reason=each["reason"])
            for each in stored.get("ledger", [])
        ]
    )
    rows = holdings(plan.cohort)[me]
    local = LocalState(real={"goods": rows}, periods=periods, derived=derived(), ledger=ledger)
    if "last_round" in stored:
        local.last_round = RoundId(stored["last_round"])
    if "keys" in stored:
        local.own_keys.keep(wire.decode(data(stored["keys"])))
    if "secret" in stored:
        local.secret = Secret(data(stored["secret"]))
        decoys, catalogue = stored["agreement"]
        local.agreement = Agreement(decoys=decoys, catalogue=data(catalogue))
    return local


def event_of(stored: Json) -> Event:
    if "noisy" in stored:
        return journal_stores.event_of(stored["noisy"])
    if "privacy" not in stored:
        against = frozenset(map(Observer, stored["against"]))
        return ExactRelease(**{**stored, "against": against})
    return IndexAnswers(**{**stored, "privacy": IndexPrivacy(**stored["privacy"])})


def stored_event(event: Event) -> Json:
    if isinstance(event, NoisySum):
        return {"noisy": journal_stores.event_text(event)}
    fields = asdict(event)
    if isinstance(event, ExactRelease):
        fields["against"] = sorted(observer.value for observer in event.against)
    return fields


def stored_local(plan: Plan, local: LocalState) -> Json:
    stored: Json = {
        "ledger": [
            {"event": stored_event(e.event), "reason": e.reason} for e in local.ledger.entries
        ]
    }
    if (keys := local.own_keys.latest()) is not None:
        stored["keys"] = text(wire.encode(keys))
    if local.last_round is not None:
        stored["last_round"] = int(local.last_round)
    if local.secret is not None and local.agreement is not None:
        stored["secret"] = text(local.secret.reveal())
        stored["agreement"] = [local.agreement.decoys, text(local.agreement.catalogue)]
    frozen = local.periods.latest(plan.federation)
    if frozen is not None:
        fields = frozen.to_fields()
        stored["rounds"] = local.periods.rounds(plan.federation)
        stored["period"] = {
            **fields,
            "secret": text(fields["secret"]),
            "tables": [(t, most, text(real), text(off)) for t, most, real, off in fields["tables"]],
            "agreement": [
                text(part) if isinstance(part, bytes) else part for part in fields["agreement"]
            ],
        }
    return stored


class Model:
    """A server's model."""

    def __init__(self, stored: Json) -> None:
        self.tables = {name: LazyTable(spec) for name, spec in specs().items()}
        self.dense = np.zeros(DENSE, dtype=np.float32)
        if stored:
            self.dense = np.frombuffer(data(stored["dense"]), dtype=np.float32).copy()
        for name, (ids, rows) in stored.get("tables", {}).items():
            found = np.frombuffer(data(ids), dtype=np.uint64)
            values = np.frombuffer(data(rows), dtype=np.float32)
            values = values.reshape(len(found), self.tables[name].width)
            if len(found):
                self.tables[name].put(found, values, np.ones(len(found), dtype=np.int64))

    @property
    def given(self) -> Json:
        """As a server is given it."""
        return {"dense": self.dense, "tables": self.tables, "derived": derived()}

    def step(self, plan: Plan, result: RoundResult, round_id: RoundId) -> None:
        averaging = Averaging(plan.server or ServerStep(), plan.model.dense, self.tables)
        mean = result.dense if result.weight else None
        self.dense = averaging.apply(self.dense, mean, result.tables, int(round_id))

    @property
    def digest(self) -> str:
        return model_digest(self.dense, self.tables)

    def stored(self) -> Json:
        tables = {name: table.pending() for name, table in self.tables.items()}
        return {
            "dense": text(self.dense.tobytes()),
            "tables": {
                n: (text(ids.tobytes()), text(rows.tobytes())) for n, (ids, rows) in tables.items()
            },
        }


def model_digest(dense: np.ndarray, tables: Mapping[str, LazyTable]) -> str:
    found = hashlib.sha256(dense.tobytes())
    for name in sorted(tables):
        every = np.arange(tables[name].size, dtype=np.uint64)
        found.update(tables[name].values(every).tobytes())
    return found.hexdigest()


# --- one step -------------------------------------------------------------------------------------


class Exhausted:
    """Entropy for those who have begun: all they draw follows from the root in their state."""

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Secret:
        raise AssertionError(f"{label} is drawn once more")


class Company:
    """All parties, woken from what is stored."""

    def __init__(self, stored: Json, event: Json) -> None:
        self.event = event
        self.plan = Plan.parse(stored["plan"])
        self.round_id = RoundId(stored["round"])
        self.cohort = [ClientId(c) for c in range(self.plan.cohort)]
        self.model = Model(stored.get("model", {}))
        self.messages = {bytes.fromhex(k): data(v) for k, v in stored.get("messages", {}).items()}
        kept: Json = stored.get("locals", {})
        self.locals = {c: local_of(self.plan, c, kept.get(str(c), {})) for c in self.cohort}
        self.entropy = entropy = ScriptedEntropy(SEED)
        signers = identities(self.cohort, entropy, self.plan.federation)
        # What roles are made with, but for entropy: who has begun a round draws nothing any more.
        self._server: Json = {}
        self._servers: Servers | None = None
        self._signers = signers
        self.two = schemes.of(self.plan).two_servers
        if self.two:
            self._hold_two_servers(stored, entropy)
        self.roles: dict[Party, Any] = {}
        snapshots: Json = stored.get("snapshots", {})
        for name, snapshot in snapshots.items():
            self.roles[party_of(name)] = self._woken(party_of(name), data(snapshot))

    def _hold_two_servers(self, stored: Json, entropy: ScriptedEntropy) -> None:
        """Both servers' keys, and a helper with a model and a memory of its own."""
        setup = TwoServerSetup.of(entropy, self.plan.federation)
        self.helper_model = Model(stored.get("helper model", {}))
        self.stepped: Json | None = stored.get("helper stepped")
        self.guard = MemoryReplayGuard()
        if "guard" in stored:
            last, accepted, released = stored["guard"]
            self.guard._last = None if last is None else RoundId(last)
            self.guard._accepted = set(map(data, accepted))
            self.guard._released = {RoundId(int(r)): data(each) for r, each in released.items()}
        self.keys: dict[str, MemoryStore[KeyPeriod]] = {}
        for name in (SERVER, HELPER):
            self.keys[name] = MemoryStore()
            if name in stored.get("keys", {}):
                self.keys[name].keep(wire.decode(data(stored["keys"][name])))
        self._servers = setup.servers
        self._server = {
            "servers": setup.servers,
            "key": setup.leader,
            "key_store": self.keys[SERVER],
        }
        self._helper = {
            "servers": setup.servers,
            "keys": setup.helper,
            "replay_guard": self.guard,
            "key_store": self.keys[HELPER],
        }

    def _role(self, party: Party, entropy: Any, stored: StoredRole | None = None) -> Any:
        """A role, new or woken."""
        given: Json = {"plan": self.plan, "round_id": self.round_id}
        first = self._signers[ClientId(0)]
        if party == SERVER:
            own = ServerParty(entropy=entropy, **self._server)
            given |= {**self.model.given, "invited": self.cohort, "identity": first}
            return server_role(ServerRoundSetup(own=own, **given), stored)
        if party == HELPER:
            helper = HelperParty(entropy=entropy, **self._helper)
            given |= {**self.helper_model.given, "directory": first.directory}
            return helper_role(HelperRoundSetup(own=helper, **given), stored)
        assert not isinstance(party, str)
        setup = ClientRoundSetup(
            party=party,
            local=self.locals[party],
            entropy=entropy,
            identity=self._signers[party],
            servers=self._servers,
            **given,
        )
        return client_role(setup, stored)

    def _woken(self, party: Party, snapshot: bytes) -> Any:
        begins = self.event == {"do": "start", "party": str(party)}
        entropy = self.entropy if begins else Exhausted()
        return self._role(party, entropy, StoredRole(snapshot, self.messages))

    def invite(self) -> None:
        """New roles for a new round."""
        parties = [SERVER, *self.cohort, *([HELPER] if self.two else [])]
        self.roles = {party: self._role(party, self.entropy) for party in parties}

    def take_what_was_shown(self) -> None:
        """The helper steps a copy of its model as soon as it is shown the sum."""
        if self.two and self.stepped is None and self.roles[HELPER].phase == "done":
            stepped = Model(self.helper_model.stored())
            stepped.step(self.plan, self.roles[HELPER].result, self.round_id)
            self.stepped = stepped.stored()

    def merge(self) -> None:
        self.model.step(self.plan, self.roles[SERVER].result, self.round_id)
        self.roles[SERVER].over(RoundOutcome.DONE)
        if self.two:
            assert self.stepped is not None
            self.helper_model, self.stepped = Model(self.stepped), None
            assert self.helper_model.digest == self.model.digest, "both have the same model"

    def stored(self) -> Json:
        named = {
            digest: message
            for role in self.roles.values()
            for digest, message in role.messages.items()
        }
        of_two: Json = {}
        if self.two:
            last, accepted = self.guard._last, sorted(self.guard._accepted)
            released = {str(r): text(each) for r, each in self.guard._released.items()}
            of_two = {
                "helper model": self.helper_model.stored(),
                "guard": (last, [text(each) for each in accepted], released),
                "keys": {
                    name: text(wire.encode(kept))
                    for name, store in self.keys.items()
                    if (kept := store.latest()) is not None
                },
            }
            if self.stepped is not None:
                of_two["helper stepped"] = self.stepped
        return {
            **of_two,
            "plan": self.plan.to_toml(),
            "round": int(self.round_id),
            "model": self.model.stored(),
            "messages": {k.hex(): text(v) for k, v in named.items()},
            "locals": {str(c): stored_local(self.plan, local) for c, local in self.locals.items()},
            "snapshots": {str(p): text(role.snapshot()) for p, role in self.roles.items()},
        }


def step(stored: Json, event: Json) -> Json:
    """What is stored after one event, and what came of it."""
    company = Company(stored, event)
    out: list[Outbound] = []
    aborted = ""
    roles = company.roles
    match event["do"]:
        case "invite":
            company.invite()
        case "start":
            out = roles[party_of(event["party"])].start()
        case "deliver":
            role = roles[party_of(event["party"])]
            out = role.receive(party_of(event["sender"]), data(event["data"])) or []
            company.take_what_was_shown()
        case "train":
            client = party_of(event["party"])
            assert not isinstance(client, str)
            out = roles[client].supply(trainer(client)(roles[client].pending))
        case "close":
            try:
                out = roles[SERVER].close_phase()
            except RoundAborted as error:
                aborted = str(error)
        case "end":
            out = roles[SERVER].farewell()
        case "merge":
            company.merge()
    server = company.roles[SERVER]
    return {
        "stored": company.stored(),
        "out": [(str(message.to), text(message.data)) for message in out],
        "phase": server.phase,
        "expected": sorted(str(p) for p in server.expected),
        "pending": [str(c) for c in company.cohort if company.roles[c].pending is not None],
        "aborted": aborted,
        "model": company.model.digest,
    }


Step = Callable[[Json, Json], Json]


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(step(asked["stored"], asked["event"])), flush=True)


if __name__ == "__main__":
    main()
