"""A federation of services in one process, over real journals, with kills between any two steps.

The lab carries messages as the transport does: numbered, repeated until acknowledged. A kill drops
a party's objects and closes its database; the party comes back from its folder alone.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rounds.population import DENSE, derived, holdings, specs, trainer
from services.tap import Tap
from tessera.crypto.entropy import Entropy, ScriptedEntropy
from tessera.crypto.keys import identities
from tessera.crypto.secret import Secret
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.learning.tables.submodel import Submodel
from tessera.learning.tables.table import LazyTable
from tessera.plan import Plan
from tessera.rounds import schemes
from tessera.rounds.attendance import registered
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.party import LocalState, ServerModel, ServerParty
from tessera.services.client import ClientService, TrainingResult
from tessera.services.dialing_party import DialingParty
from tessera.services.helper import HelperService
from tessera.services.journal import Journal, Moment
from tessera.services.journal_stores import ATTENDANCE, attendance_text
from tessera.services.leader import LeaderService, MessageRequest
from tessera.services.link import LinkStanding, Numbered, name_of
from tessera.simulation.two_server import TwoServerSetup

SEED = b"services"


class Killed(BaseException):
    """The process of this party is gone."""

    def __init__(self, party: Party) -> None:
        super().__init__(f"{party} is killed")
        self.party = party


def standing_of(leader: LeaderService, peer: Party) -> LinkStanding | None:
    """How the link with this peer stands; None if it is not in the round."""
    link = leader.links[peer]
    return link.standing if leader.drawn and link.round_id == leader.round_id else None


def outgoing(member: DialingParty) -> Numbered | None:
    """Its first message that the leader has not acknowledged."""
    return next(iter(member.link.on_its_way), None)


class Lab:
    """Leader, helper and clients of one plan."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        entropy: Callable[[], Entropy] | None = None,
        clients: int = 0,
    ) -> None:
        """`clients`: of the whole federation, if they are more than a cohort."""
        self.plan, self.folder = plan, folder
        self.entropy = entropy or (lambda: ScriptedEntropy(SEED))
        self.cohort = [ClientId(c) for c in range(clients or plan.cohort)]
        self.schedule = cohorts_of(plan).scheduled(self.cohort)
        self.signers = identities(self.cohort, ScriptedEntropy(SEED), plan.federation)
        self.two = (
            TwoServerSetup.of(ScriptedEntropy(SEED), plan.federation)
            if schemes.of(plan).two_servers
            else None
        )
        self.tap = Tap()
        self.moments: Counter[Party] = Counter()
        self.kill_at: dict[tuple[Party, int], bool] = {}
        self.trained: Counter[tuple[ClientId, int]] = Counter()
        self.parties: dict[Party, Any] = {}
        self._registered: set[Party] = set()
        for party in (SERVER, *([HELPER] if self.two else []), *self.cohort):
            self.start(party)

    # --- processes ------------------------------------------------------------------------------

    def start(self, party: Party) -> None:
        """A process of this party, over its folder."""
        journal = Journal.open(
            self.folder / name_of(party),
            owner=name_of(party),
            plan=self.plan.digest,
            erase=party != SERVER or self.plan.dp is not None,
        )
        # A killed process loses nothing that it handed to the system; only power loss would.
        journal.database.execute("PRAGMA synchronous = OFF")
        if party in self.cohort and party not in self._registered:
            self._registered.add(party)
            nothing = registered(self.plan, None if self.two is None else self.two.servers)
            with journal.step():
                journal.set_fact(name_of(party), ATTENDANCE, attendance_text(nothing))
        journal.watch = lambda moment: self._watch(party, moment)
        try:
            self.parties[party] = self._made(party, journal)
        except BaseException:
            journal.close()
            raise

    def _watch(self, party: Party, _: Moment) -> None:
        here = (party, self.moments[party])
        self.moments[party] += 1
        if self.kill_at.pop(here, False):
            raise Killed(party)

    def kill(self, party: Party) -> None:
        self.parties.pop(party).journal.close()

    def _made(self, party: Party, journal: Journal) -> Any:
        plan, entropy = self.plan, self.entropy()
        if party == SERVER:
            own = ServerParty(entropy=entropy) if self.two is None else self.two.leader_party
            return LeaderService(
                journal,
                plan,
                self.cohort,
                first_model=self.first_model,
                party=own,
                identity=self.signers[ClientId(0)],
            )
        if party == HELPER:
            assert self.two is not None
            return HelperService(
                journal,
                plan,
                first_model=self.first_model,
                party=self.two.helper_party,
                directory=self.signers[ClientId(0)].directory,
            )
        assert not isinstance(party, str)
        client, train = party, trainer(party)

        def trained(round_id: RoundId, submodel: Submodel, coins: Secret) -> TrainingResult:
            self.trained[client, int(round_id)] += 1
            return TrainingResult(train(submodel))

        rows = holdings(len(self.cohort))[client]
        return ClientService(
            journal,
            plan,
            client,
            local=lambda periods, ledger: LocalState(
                real={"goods": rows},
                periods=periods,
                ledger=ledger,
                derived=derived(),
                place=None if self.schedule is None else self.schedule.place_of(client),
            ),
            train=trained,
            entropy=entropy,
            identity=self.signers[client],
            servers=None if self.two is None else self.two.servers,
        )

    def first_model(self) -> ServerModel:
        return ServerModel(
            self.plan,
            dense=np.zeros(DENSE, dtype=np.float32),
            tables={name: LazyTable(spec) for name, spec in specs().items()},
            derived=derived(),
        )

    # --- the links ------------------------------------------------------------------------------

    @property
    def leader(self) -> LeaderService:
        found: LeaderService = self.parties[SERVER]
        return found

    def run(self, rounds: int) -> None:
        """So many rounds, each to its end and heard by everybody."""
        idle = 0
        while True:
            try:
                moved = self._turn(rounds)
            except Killed as killed:
                self.kill(killed.party)
                self.start(killed.party)
                moved = True
            if moved is None:
                break
            idle = 0 if moved else idle + 1
            assert idle < 3, f"the round hangs in {self.leader.phases}: {self.leader.missing}"
        self.tap.check()

    def _turn(self, rounds: int) -> bool | None:
        leader, moved = self.leader, False
        if leader.is_over and self._all_heard():
            if leader.course.next_round >= rounds:
                return None
            leader.open_round()
            moved = True
        for party in list(self.parties):
            if party != SERVER:
                moved |= self._exchange(party)
        return moved

    def _all_heard(self) -> bool:
        return all(link.acknowledged == link.sent for link in self.leader.links.values())

    def _exchange(self, party: Party) -> bool:
        """All that one party and the leader have for each other now."""
        leader, member, moved = self.leader, self.parties[party], False
        standing = standing_of(leader, party)
        if standing is None:
            return False
        round_id = standing.round_id
        if member.round_id != round_id:
            member.begin(standing)
            moved = True
        member.meets(standing)
        while True:
            if (message := outgoing(member)) is not None:
                self.tap.saw(round_id, name_of(party), SERVER, message)
                (answer,) = leader.handle([MessageRequest(party, round_id, message)])
                assert answer.taken, answer
                member.acknowledged(message.number)
            elif messages := leader.links[party].view.after(member.link.received):
                self.tap.saw(round_id, SERVER, name_of(party), messages[0])
                member.take(messages[:1])
            elif party != HELPER and member.pending is not None:
                member.train()
            else:
                break
            moved = True
        link = leader.links[party]
        if link.acknowledged < member.link.received:
            leader.handle([], {party: (round_id, member.link.received)})
            moved = True
        return moved

    # --- what is left ---------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What must not depend on who was killed when."""
        facts: dict[str, Any] = {
            "model": self.leader.model.digest.hex(),
            "rounds": [
                (row[0])
                for row in self.leader.journal.database.execute(
                    "SELECT data FROM event ORDER BY number"
                )
            ],
            "charged": [len(self.parties[c].local.ledger.entries) for c in self.cohort],
        }
        if self.two is not None:
            facts["helper"] = self.parties[HELPER].model.digest.hex()
            assert facts["helper"] == facts["model"]
        return facts

    def close(self) -> None:
        for party in list(self.parties):
            self.kill(party)
        shutil.rmtree(self.folder)
