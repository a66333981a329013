"""A party with more messages than one request holds sends all without waiting in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

pytest.importorskip("uvicorn")

from rounds.population import plan
from services.asking import MemoryConnection
from services.service_lab import Lab
from tessera.ids import HELPER, SERVER, ClientId, Party, RoundId
from tessera.plan import ServicePlan, TwoServerPlan
from tessera.services.group_commit import GroupCommit
from tessera.services.http import requests as parcel
from tessera.services.http.app import CohortApp, create_app
from tessera.services.http.conductor import Conductor
from tessera.services.http.connection import LeaderConnection
from tessera.services.http.dialer import Dialer
from tessera.services.http.requests import RequestChecker
from tessera.services.keyring import Directory, Keyring
from tessera.services.logs import JsonLog

BUNDLE: Final = b"b" * 32
QUIET: Final = JsonLog("", quiet=True)
PATIENT: Final = ServicePlan(join=600.0, phase=600.0, poll=600.0, request=600.0)
"""No round ends because somebody has waited for so long."""
PARCEL: Final = 2
PLAN: Final = plan("two-server", cohort=9, two_server=TwoServerPlan(domain="whole", write="dpf"))
"""A helper with over four parcels at once, as with 300 clients and 64 messages a parcel."""


class Deployed:
    """Leader, helper and clients of a lab at their connections, without sockets."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.waits: list[tuple[Party, int]] = []
        """Who was held, and how many messages it had on its way that the leader did not have."""
        self.requests: dict[Party, list[str]] = {}

    def keyring(self, party: Party) -> Keyring:
        assert self.lab.two is not None
        if party == HELPER:
            key = self.lab.two.helper.signing
        else:
            key = self.lab.signers[cast(ClientId, party)].key
        return cast(Keyring, SimpleNamespace(signing=key, directory=SimpleNamespace(bundle=BUNDLE)))

    @contextlib.asynccontextmanager
    async def app(self) -> AsyncIterator[CohortApp]:
        """The leader, whose journal is opened in another thread."""
        lab = self.lab
        assert lab.two is not None
        lab.parties.pop(SERVER).journal.close()

        def load() -> Any:
            lab.start(SERVER)
            return lab.leader

        conductor = Conductor(load, PATIENT, rounds=1, log=QUIET)
        directory = Directory(
            BUNDLE, lab.two.servers, {c: lab.signers[c].key.public for c in lab.cohort}
        )
        app = CohortApp(conductor, RequestChecker(directory, BUNDLE), PATIENT)
        wait = app._wait

        async def waited(peer: Party, until: float) -> bool:
            self.waits.append((peer, self.untaken(peer)))
            if self.waits[-1][1]:
                return False  # as if its poll were over
            return await wait(peer, until)

        app._wait = waited  # type: ignore[method-assign]
        work = asyncio.create_task(conductor.run())
        try:
            yield app
        finally:
            conductor.stop()
            await work

    def untaken(self, peer: Party) -> int:
        link, theirs = self.lab.parties[peer].link, self.lab.leader.links[peer]
        return link.sent - theirs.received if link.round_id == theirs.round_id else 0

    async def run(self) -> None:
        async with self.app() as app:
            while app._conductor.leader is None:
                await asyncio.sleep(0.01)
            with contextlib.ExitStack() as stack:
                async with asyncio.TaskGroup() as group:
                    for party in (HELPER, *self.lab.cohort):
                        member = self.lab.parties[party]
                        steps = GroupCommit([member], 0.01, QUIET)
                        stack.callback(steps.close)
                        targets = self.requests.setdefault(party, [])
                        connection = MemoryConnection(create_app(app), targets)
                        made = Dialer(
                            member,
                            self.keyring(party),
                            cast(LeaderConnection, connection),
                            PATIENT,
                            QUIET,
                            steps,
                        )
                        group.create_task(made.run())


def test_a_helper_with_many_parcels_is_never_held_with_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcel, "MOST_MESSAGES", PARCEL)
    lab = Lab(PLAN, tmp_path / "lab")
    deployed = Deployed(lab)
    asyncio.run(asyncio.wait_for(deployed.run(), 120))
    assert '"survivors": 9' in lab.leader.outcome(RoundId(0))
    assert [untaken for _, untaken in deployed.waits if untaken] == []
    with_more = [target for target in deployed.requests[HELPER] if "more=1" in target]
    assert len(with_more) >= PLAN.cohort // PARCEL
    lab.close()
