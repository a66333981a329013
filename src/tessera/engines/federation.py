"""Many rounds over a population, in one process: cohorts, periods, dropouts, and the record.

The plan's seed drives who is sampled and who drops out, and nothing else. Every message is really
encoded and decoded; what each party saw can be recorded for the audits.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tessera.crypto.entropy import Entropy, SystemEntropy
from tessera.crypto.prg import Label, Stream, uniform
from tessera.crypto.ring import Ring
from tessera.engines.faults import Drop, Fault
from tessera.engines.simulator import Happening, Simulator, Traffic
from tessera.engines.stopwatch import ANSWERS, STAGE_OF, Stopwatch
from tessera.engines.views import Views
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.learning.tables import DerivedMap, Table
from tessera.protocols.secagg.binding import Identity
from tessera.rounds.client import ClientRound, LocalState, Trainer
from tessera.rounds.events import Event, PhaseClosed, RoundFinished, RoundGivenUp, RoundStarted
from tessera.rounds.plan import Plan
from tessera.rounds.server import ServerRound, merge

FaultScript = Callable[[RoundId, Sequence[ClientId]], Sequence[Fault]]


@dataclass(slots=True)
class Member:
    """One client of the population: what it has of its own, and how it trains."""

    local: LocalState
    trainer: Trainer
    identity: Identity | None = None


class Federation:
    """A plan, its population and the model, round after round."""

    def __init__(
        self,
        plan: Plan,
        members: Mapping[ClientId, Member],
        *,
        dense: npt.NDArray[np.float32],
        tables: Mapping[str, Table],
        derived: Mapping[str, DerivedMap] | None = None,
        entropy: Entropy | None = None,
        faults: FaultScript | None = None,
        views: Views | None = None,
        first_round: int = 0,
    ) -> None:
        if len(members) < plan.cohort:
            raise ConfigError(
                f"{len(members)} clients for a cohort of {plan.cohort}",
                hint="take a smaller cohort, or more clients",
            )
        self.plan, self.members = plan, dict(members)
        self.dense, self.tables, self.derived = dense, tables, dict(derived or {})
        self.views = views
        self.last: ServerRound | None = None
        self.pseudonyms: dict[int, dict[int, int]] = {}
        self._entropy: Entropy = entropy or SystemEntropy()
        self._faults = faults
        self._next = first_round
        self._met: dict[int, set[ClientId]] = defaultdict(set)

    def run(self, rounds: int) -> Iterator[Event]:
        for _ in range(rounds):
            yield from self.round()

    def round(self) -> Iterator[Event]:
        """One round: its events in the order they happen, and the model merged at the end."""
        plan, round_id = self.plan, RoundId(self._next)
        self._next += 1
        chosen = self.sample(round_id)
        named = self._named(round_id, chosen)
        cohort = sorted(named)
        yield RoundStarted(
            round_id=round_id, period=plan.period(round_id), cohort=tuple(int(c) for c in cohort)
        )
        server = self.last = ServerRound(
            plan,
            round_id,
            cohort,
            dense=self.dense,
            tables=self.tables,
            derived=self.derived,
            entropy=self._entropy,
            identity=self.members[named[cohort[0]]].identity,
        )
        clients = {c: self._client(c, named[c], round_id) for c in cohort}
        opening = {c: client.start() for c, client in clients.items()}
        happened: list[Happening] = []
        watch = Stopwatch()

        def on_phase(happening: Happening) -> None:
            watch.on_phase(happening)
            happened.append(happening)

        simulator = watch.simulator = Simulator(
            server,
            clients,
            opening,
            greeting=server.start(),
            faults=self._faults(round_id, cohort) if self._faults else (),
            views=self.views,
            on_phase=on_phase,
        )
        outcome = simulator.run()
        for h in happened:
            yield PhaseClosed(
                round_id=round_id,
                phase=h.phase,
                visit=h.visit,
                time=h.time,
                answered=h.answered,
                missing=tuple(int(c) for c in h.missing),
            )
        if outcome.aborted is not None:
            yield RoundGivenUp(
                round_id=round_id,
                phase=outcome.aborted.phase,
                answered=outcome.aborted.answered,
                needed=outcome.aborted.needed,
            )
            return
        self.dense = merge(server.result, self.dense, self.tables)
        yield self._finished(round_id, named, server, outcome.traffic, watch)

    def sample(self, round_id: RoundId) -> list[ClientId]:
        """The cohort: drawn without replacement, within what the plan allows in this period."""
        plan = self.plan
        pool = sorted(self.members)
        if plan.privacy.fixed_groups:
            turn = int(round_id) % plan.privacy.fixed_groups
            pool = pool[turn :: plan.privacy.fixed_groups]
        if plan.privacy.one_participation:
            met = self._met[plan.period(round_id)]
            pool = [c for c in pool if c not in met]
        if len(pool) < plan.cohort:
            raise ConfigError(
                f"round {round_id}: {len(pool)} clients may take part, a cohort has {plan.cohort}",
                hint="more clients, a smaller cohort, fewer fixed_groups or shorter periods",
            )
        rng = np.random.default_rng([plan.seed, int(round_id)])
        chosen = [pool[i] for i in sorted(rng.choice(len(pool), plan.cohort, replace=False))]
        self._met[plan.period(round_id)].update(chosen)
        return chosen

    def _named(self, round_id: RoundId, chosen: Sequence[ClientId]) -> dict[ClientId, ClientId]:
        """Who is who in this round: themselves, or under pseudonyms names drawn afresh."""
        if not self.plan.privacy.pseudonyms:
            return {c: c for c in chosen}
        secret = self._entropy.secret("pseudonyms", self.plan.federation, int(round_id))
        names = np.unique(uniform(Ring(32), Stream.of(secret, Label.NONCE), 4 * len(chosen)))
        order = np.random.default_rng([self.plan.seed, int(round_id), 2]).permutation(len(chosen))
        named = {
            ClientId(int(names[place])): client for place, client in zip(order, chosen, strict=True)
        }
        self.pseudonyms[int(round_id)] = {int(name): int(c) for name, c in named.items()}
        return named

    def _client(self, name: ClientId, client: ClientId, round_id: RoundId) -> ClientRound:
        member = self.members[client]
        return ClientRound(
            self.plan,
            round_id,
            name,
            local=member.local,
            trainer=member.trainer,
            entropy=self._entropy,
            identity=member.identity,
        )

    def _finished(
        self,
        round_id: RoundId,
        named: Mapping[ClientId, ClientId],
        server: ServerRound,
        traffic: Traffic,
        watch: Stopwatch,
    ) -> RoundFinished:
        result, cohort = server.result, sorted(named)
        spent = [self.members[c].local.ledger.guarantee() for c in named.values()]
        worst = max(spent, key=lambda guarantee: guarantee.epsilon)
        return RoundFinished(
            round_id=round_id,
            cohort=len(cohort),
            survivors=len(result.survivors),
            union_rows=result.union_rows,
            union_residual=result.union_residual,
            rows_opened=result.rows_opened,
            rows_below_quorum=result.below_quorum,
            rows_shrunk=result.shrunk,
            rows_lost=result.lost,
            weight=result.weight,
            bytes_up=watch.by_stage(traffic.up, "up", cohort, STAGE_OF),
            bytes_down=watch.by_stage(traffic.down, "down", cohort, STAGE_OF),
            client_seconds=watch.by_stage(traffic.client_seconds, "seconds", cohort, ANSWERS),
            server_seconds=dict(watch.server),
            epsilon=worst.epsilon,
            condition=worst.condition,
        )


def random_dropouts(share: float, seed: int, plan: Plan) -> FaultScript:
    """Every client drops out of a round with this probability, at a phase drawn evenly.

    At most as many as the plan tolerates: a round that loses more is given up, and says nothing.
    """
    most = plan.cohort - plan.secagg(RoundId(0)).min_survivors if plan.scheme.secure else None
    places = [("share", 0), ("collect", 0), ("unmask", 0)]
    if len(plan.stages) == 2:
        places += [("reveal", 0), ("collect", 1), ("unmask", 1)]

    def script(round_id: RoundId, cohort: Sequence[ClientId]) -> list[Fault]:
        rng = np.random.default_rng([seed, int(round_id), 1])
        gone = [c for c in cohort if rng.random() < share][:most]
        return [
            Drop(c, phase, stage=stage)
            for c in gone
            for phase, stage in [places[int(rng.integers(len(places)))]]
        ]

    return script


def write_truth(path: Path, members: Mapping[ClientId, Member]) -> None:
    """What the audits compare with: everybody's real rows. Simulated data only, ever."""
    truth = {
        str(client): {name: rows.tolist() for name, rows in member.local.real.items()}
        for client, member in members.items()
    }
    path.write_text(json.dumps(truth))
