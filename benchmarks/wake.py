"""What it costs to be able to wake: snapshots and wakes after every message of a round.

A client may be stopped after any message and go on in another process. Here some clients of a round
at the papers' size are put to bytes and woken from them after each message they take, and the rest
are not; both do the same work otherwise. CPU seconds of the snapshots and wakes themselves are held
against those of a client that is not put to bytes. Beside them stands all that the first spend more
than the second: a woken client decodes again what it needs of the messages it has, and unseals
again the shares that it holds. The role that was put to bytes is dropped when the clock has
stopped: the other clients' are dropped, too. Messages that a snapshot names by digest (the roster,
the union) are stored once, as they came, and not counted in its size.

How large a snapshot is among a thousand clients is read off a few of them, with the roster of all
and messages of the length that they would have: nobody else's shares and inputs are made for it.

    python -m benchmarks.wake [--clients 100] [--large 1000] [--repeats 3] [--json]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from papers import sfsl_round as sfsl
from papers.sfsl_round import COLUMNS, ROUND, RoundSetting
from tessera import wire
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.ids import SERVER, ClientId, Party, StageId
from tessera.plan import Plan
from tessera.protocols.machine import Outbound
from tessera.protocols.secagg.groups import distinct
from tessera.protocols.secagg.messages import (
    BOX_BYTES,
    ForwardedShares,
    NextStage,
    RevealedSet,
    Roster,
    RowGroups,
    SurvivorList,
    TableGroups,
)
from tessera.protocols.secagg.params import GraphKind
from tessera.protocols.secagg.session import neighbourhood
from tessera.rounds import select
from tessera.rounds.client import ClientRound
from tessera.rounds.messages import Download
from tessera.rounds.party import HelperRoundSetup, ServerRoundSetup
from tessera.rounds.server import ServerRound
from tessera.rounds.two_server.client import TwoServerClientRound
from tessera.rounds.two_server.helper import HelperRound
from tessera.rounds.two_server.leader import LeaderRound
from tessera.simulation.simulator import Simulator
from tessera.simulation.subcohort import between_messages
from tessera.simulation.two_server import TwoServerSetup
from tessera.wire.index_set import client_array

CLIENTS: Final = 100
LARGE: Final = 1_000
EVERY: Final = 10
SAMPLED: Final = 3
"""Clients of the large cohort whose snapshots are looked at."""
"""One client in so many is put to bytes after each message; a server after each phase."""
MOST_TIME: Final = "<= 0.1"
MOST_BYTES: Final = "<= 5000"

Wake = Callable[[Any], Any]


@dataclass(slots=True)
class Spent:
    """Seconds of snapshots and wakes, and the largest snapshot and its messages."""

    seconds: float = 0.0
    times: int = 0
    snapshot: int = 0
    messages: int = 0


class Sleeper:
    """A role that is put to bytes, dropped and woken after every message it takes.

    A server is when its phase changes: while it collects, the messages themselves are what is
    stored.
    """

    def __init__(self, role: Any, wake: Wake, *, by_phase: bool = False) -> None:
        self._role, self._wake, self._by_phase = role, wake, by_phase
        self._phase = role.phase
        self.spent = Spent()

    def receive(self, sender: Party, data: bytes) -> list[Outbound]:
        out: list[Outbound] = self._role.receive(sender, data)
        if not self._by_phase or self._role.phase != self._phase:
            self._sleep()
        return out

    def supply(self, update: Any) -> list[Outbound]:
        out: list[Outbound] = self._role.supply(update)
        self._sleep()
        return out

    def close_phase(self) -> list[Outbound]:
        out: list[Outbound] = self._role.close_phase()
        self._sleep()
        return out

    def _sleep(self) -> None:
        self._phase = self._role.phase
        begun = time.process_time()
        stored, messages = self._role.snapshot(), dict(self._role.messages)
        woken = self._wake((stored, messages))
        spent = self.spent
        spent.seconds += time.process_time() - begun
        self._role = woken
        spent.times += 1
        spent.snapshot = max(spent.snapshot, len(stored))
        spent.messages = max(spent.messages, sum(map(len, messages.values())))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)


@dataclass(frozen=True, slots=True)
class Run:
    """One round: seconds of clients that were put to bytes and of the others; what was stored."""

    sleeping: float
    awake: float
    client: Spent
    server: Spent
    server_seconds: float

    @property
    def price(self) -> float:
        """Snapshots and wakes of a client, over all that one does which is not put to bytes."""
        return self.client.seconds / self.awake

    @property
    def whole_price(self) -> float:
        """All that the one spends more than the other, over what that one does."""
        return (self.sleeping - self.awake) / self.awake

    @property
    def server_price(self) -> float:
        return self.server.seconds / (self.server_seconds - self.server.seconds)


def run(setting: RoundSetting, plan: Plan) -> Run:
    """The round with some clients, and the server, put to bytes again and again."""
    cohort = range(setting.clients)
    clients: dict[ClientId, Any] = {}
    sleepers: dict[ClientId, Sleeper] = {}
    for me, given in sfsl.own_of(setting, plan, cohort).items():
        clients[me] = ClientRound(given)
        if me in cohort[::EVERY]:
            sleepers[me] = clients[me] = Sleeper(clients[me], partial(_woken, ClientRound, given))
    as_server = sfsl.server_setup(setting, plan)
    server = Sleeper(ServerRound(as_server), partial(_woken, ServerRound, as_server), by_phase=True)
    first_messages = {c: client.start() for c, client in clients.items()}
    simulator = Simulator(
        server,
        clients,
        first_messages,
        greeting=server.start(),
        work=between_messages(clients, partial(sfsl.trained, plan)),
        on_phase=lambda end: say(f"  {end.phase}: {end.answered} clients answered"),
    )
    outcome = simulator.run()
    if outcome.aborted is not None:
        raise outcome.aborted
    seconds = {c: sum(kinds.values()) for c, kinds in outcome.traffic.client_seconds.items()}
    return Run(
        sleeping=median(seconds[c] for c in sleepers),
        awake=median(s for c, s in seconds.items() if c not in sleepers),
        client=typical([sleeper.spent for sleeper in sleepers.values()]),
        server=server.spent,
        server_seconds=sum(outcome.traffic.server_seconds.values()),
    )


def sampled(setting: RoundSetting, plan: Plan) -> Spent:
    """Some clients of a large cohort, put to bytes after each message.

    The roster is that of all of them. Boxes of the others are made up: what cannot be unsealed
    costs a share, and no byte of the state. So are the groups, all of which hold this client only.
    """
    cohort = range(setting.clients)
    server, spent = sfsl.server_of(setting, plan), []
    given = sfsl.own_of(setting, plan, cohort)
    clients = {me: ClientRound(own) for me, own in given.items()}
    for me, client in clients.items():
        for out in client.start():
            server.receive(me, out.data)
    roster = next(out.data for out in server.close_phase() if out.kind == Roster.__name__)
    hood = neighbourhood(plan.secagg(ROUND), wire.decode(roster))
    held = [given[me].local.real["goods"] for me in clients]
    union = select.opened_union(plan, ROUND, distinct(np.concatenate(held)))
    everybody = client_array(clients)
    for me in list(clients)[:: setting.clients // SAMPLED][:SAMPLED]:
        say(f"  client {me}")
        sleeper = Sleeper(clients[me], partial(_woken, ClientRound, given[me]))
        take = partial(_take, sleeper)
        sleeper.receive(SERVER, roster)
        boxes = {c: (bytes(BOX_BYTES),) * 2 for c in clients if c != me and hood.holds(me, c)}
        take(ForwardedShares(round_id=ROUND, sharers=everybody, boxes=boxes))
        take(SurvivorList(round_id=ROUND, stage=StageId(0), survivors=everybody))
        said = take(union) + take(NextStage(round_id=ROUND, stage=StageId(1)))
        named = next(wire.decode(out.data) for out in said if out.kind == RevealedSet.__name__)
        width = COLUMNS * plan.model.precision.dtype.itemsize
        rows = {part.table: bytes(width * len(part.rows)) for part in named.tables}
        dense = wire.HashedBytes(bytes(plan.model.dense * plan.model.precision.dtype.itemsize))
        take(Download(round_id=ROUND, dense=dense, tables=rows))
        groups = tuple(
            TableGroups(
                table=part.table, included=np.arange(len(part.rows), dtype=np.uint64), shared={}
            )
            for part in named.tables
        )
        take(RowGroups(round_id=ROUND, stage=StageId(1), tables=groups))
        sleeper.supply(sfsl.trained(plan, {me: sleeper.pending})[me])
        take(SurvivorList(round_id=ROUND, stage=StageId(1), survivors=everybody))
        spent.append(sleeper.spent)
    return typical(spent)


def _take(sleeper: Sleeper, message: Any) -> list[Outbound]:
    return sleeper.receive(SERVER, wire.encode(message))


def between_two(setting: RoundSetting) -> list[tuple[str, Spent, float]]:
    """A round between two servers: name, snapshots and wakes, and all seconds of each server."""
    plan, cohort = setting.plan, [ClientId(i) for i in range(setting.clients)]
    entropy = ScriptedEntropy(b"wake")
    setup = TwoServerSetup.of(entropy, plan.federation)
    signers = identities(cohort, entropy, plan.federation)
    model = {"plan": plan, "round_id": ROUND, **sfsl.model_of(setting, plan)}
    one = signers[cohort[0]]
    own = replace(setup.leader_party, row_tags=None)
    as_leader = ServerRoundSetup(**model, invited=cohort, own=own, identity=one)
    own_helper = replace(setup.helper_party, row_tags=None)
    as_helper = HelperRoundSetup(**model, own=own_helper, directory=one.directory)
    leader = Sleeper(LeaderRound(as_leader), partial(_woken, LeaderRound, as_leader), by_phase=True)
    helper = Sleeper(HelperRound(as_helper), partial(_woken, HelperRound, as_helper), by_phase=True)
    clients = {
        me: TwoServerClientRound(replace(own, identity=signers[me], servers=setup.servers))
        for me, own in sfsl.own_of(setting, plan, range(setting.clients)).items()
    }
    first_messages = {c: client.start() for c, client in clients.items()}
    outcome = Simulator(
        leader,
        clients,
        first_messages,
        helper=helper,
        greeting=leader.start(),
        work=between_messages(clients, partial(sfsl.trained, plan)),
    ).run()
    if outcome.aborted is not None:
        raise outcome.aborted
    traffic = outcome.traffic
    return [
        ("leader", leader.spent, sum(traffic.server_seconds.values())),
        ("helper", helper.spent, sum(traffic.helper_seconds.values())),
    ]


def typical(spent: Sequence[Spent]) -> Spent:
    """Median seconds, and the largest of everything else."""
    return Spent(
        seconds=median(each.seconds for each in spent),
        times=max(each.times for each in spent),
        snapshot=max(each.snapshot for each in spent),
        messages=max(each.messages for each in spent),
    )


def _woken(kind: Any, setup: Any, stored: Any) -> Any:
    return kind.wake(*stored, setup)


def measure(clients: int, large: int, repeats: int) -> list[machine.Row]:
    setting = RoundSetting(clients=clients)
    plan = setting.plan
    runs = []
    for turn in range(repeats):
        say(f"run {turn + 1} of {repeats}, {clients} clients")
        runs.append(run(setting, plan))
    at = {"n": clients, "scheme": setting.scheme, "level": setting.level}
    one = sorted(runs, key=lambda each: each.price)[len(runs) // 2]
    rows = [
        machine.result(
            "client: snapshots and wakes after each message",
            {**at, "times": one.client.times},
            one.client.seconds,
            "s",
            one.awake,
            "the same client without",
            one.price,
            MOST_TIME,
            machine.meets(one.price, MOST_TIME),
        ),
        machine.result(
            "client: these, and what is decoded and unsealed again",
            {**at, "times": one.client.times},
            one.sleeping - one.awake,
            "s",
            one.awake,
            "the same client without",
            one.whole_price,
            None,
            None,
        ),
        machine.result(
            "server: snapshots and wakes when its phase changes",
            {**at, "times": one.server.times},
            one.server.seconds,
            "s",
            one.server_seconds - one.server.seconds,
            "the same server without",
            one.server_price,
            None,
            None,
        ),
    ]
    say(f"{clients} clients, two servers")
    two = RoundSetting(scheme="two-server", clients=clients, papers=False)
    for name, spent, seconds in between_two(two):
        without = seconds - spent.seconds
        rows.append(
            machine.result(
                f"{name}: snapshots and wakes when its phase changes",
                {"n": clients, "scheme": two.scheme, "times": spent.times},
                spent.seconds,
                "s",
                without,
                f"the same {name} without",
                spent.seconds / without,
                None,
                None,
            )
        )
    wide = replace(setting, clients=large)
    spread = replace(wide.plan.security, graph=GraphKind.SPARSE, dropout=0.05)
    sparse = replace(wide.plan, security=spread)
    say(f"{SAMPLED} of {large} clients, a sparse graph")
    many = sampled(wide, sparse)
    for n, found in ((clients, one.client), (large, many)):
        rows.append(
            machine.result(
                "client: largest snapshot, beside messages stored once",
                {**at, "n": n},
                found.snapshot,
                "B",
                found.messages,
                "those messages",
                found.snapshot,
                MOST_BYTES if n == large else None,
                machine.meets(found.snapshot, MOST_BYTES) if n == large else None,
            )
        )
    return rows


def say(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--large", type=int, default=LARGE)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows = measure(args.clients, args.large, args.repeats)
    machine.print_report(machine.calibrate(), rows, title="To wake", as_json=args.json)
    return machine.exit_status(rows, require_peers=False)


if __name__ == "__main__":
    sys.exit(main())
