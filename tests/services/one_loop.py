"""A deployment in one event loop: the leader's app, its conductor and its parties' dialers, over
real journals and without sockets. Its clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

from services.asking import MemoryConnection
from tessera.crypto.entropy import ScriptedEntropy
from tessera.ids import HELPER, SERVER, ClientId
from tessera.plan import Plan, ServicePlan
from tessera.services.bundle import Bundle, pack_synthetic
from tessera.services.deployment import open_clients, open_helper, open_leader, synthetic_maker
from tessera.services.group_commit import GroupCommit
from tessera.services.http.app import CohortApp, create_app
from tessera.services.http.conductor import Conductor
from tessera.services.http.connection import LeaderConnection
from tessera.services.http.dialer import Dialer
from tessera.services.http.requests import RequestChecker
from tessera.services.keyring import Keyring, folder_of, make_keys
from tessera.services.leader import LeaderService
from tessera.services.logs import JsonLog

NEVER = 1e6
"""Seconds; a test that waited for a poll or a deadline would not end."""
NO_WAITS = ServicePlan(join=NEVER, phase=NEVER, poll=NEVER, retry=0.01)
QUIET = JsonLog("", quiet=True)
ENTROPY = ScriptedEntropy(b"one loop")


class OneLoop:
    """A leader, and as many of its parties as a test starts."""

    def __init__(
        self,
        plan: Plan,
        enrolled: int,
        folder: Path,
        *,
        deadlines: ServicePlan = NO_WAITS,
        clock: Callable[[], float] = lambda: 0.0,
        rounds: int | None = None,
    ) -> None:
        self.bundle: Bundle = pack_synthetic(plan, enrolled, 8)
        self.folder, self.deadlines = folder, deadlines
        everybody = [ClientId(c) for c in range(enrolled)]
        make_keys(
            folder / "keys", self.bundle.digest, plan.federation, everybody, ENTROPY, ["localhost"]
        )
        self.leaders_keys = self.keys(SERVER)
        self.conductor = Conductor(self._load, deadlines, rounds=rounds, log=QUIET, clock=clock)
        checker = RequestChecker(self.leaders_keys.directory, self.bundle.digest)
        self.app = CohortApp(self.conductor, checker, deadlines)
        self.served: Any = create_app(self.app)
        self.dialers: list[Dialer] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._close: list[Callable[[], None]] = []

    def _load(self) -> LeaderService:
        found = open_leader(self.bundle, self.folder / "keys/leader", self.folder / "L", ENTROPY)
        return cast(LeaderService, found)

    def keys(self, party: Any) -> Keyring:
        named = {SERVER: "leader", HELPER: "helper"}
        folder = named[party] if isinstance(party, str) else folder_of(party)
        return Keyring.read(self.folder / "keys" / folder, party, self.bundle.digest)

    def start(self) -> None:
        """The leader's own work."""
        self.tasks.append(asyncio.create_task(self.conductor.run()))

    def join(self, clients: Collection[int]) -> None:
        """These clients take part from now on, over one journal."""
        keyrings = [self.keys(ClientId(c)) for c in clients]
        state = self.folder / f"C{min(clients)}"
        made = open_clients(self.bundle, keyrings, state, ENTROPY, synthetic_maker(self.bundle))
        self._dial(list(zip(made, keyrings, strict=True)))

    def help(self) -> None:
        """The helper takes part from now on."""
        folder = self.folder / "keys" / "helper"
        helper = open_helper(self.bundle, folder, self.folder / "H", ENTROPY)
        self._dial([(helper, self.keys(HELPER))])

    def _dial(self, parties: list[tuple[Any, Keyring]]) -> None:
        steps = GroupCommit([party for party, _ in parties], self.deadlines.retry, QUIET)
        for party, keyring in parties:
            connection = cast(LeaderConnection, MemoryConnection(self.served))
            dialer = Dialer(party, keyring, connection, self.deadlines, QUIET, steps)
            self.dialers.append(dialer)
            self.tasks.append(asyncio.create_task(dialer.run_or_be_refused()))
        self._close += [steps.close, parties[0][0].journal.close]

    async def ask(self, target: str, headers: dict[str, str] | None = None) -> Any:
        return await MemoryConnection(self.served).ask("GET", target, headers or {})

    async def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                for task in self.tasks:
                    if task.done() and not task.cancelled() and task.exception() is not None:
                        await task
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        self.conductor.stop()
        for task in self.tasks[1:]:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for close in self._close:
            close()
        if self.conductor.leader is not None:
            self.conductor.leader.journal.close()
