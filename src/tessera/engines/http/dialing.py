"""A process of dialers: the helper, a client, or many clients over one journal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack

from tessera.engines.http.dialer import Dialer, http_client, trusted
from tessera.engines.http.leading import prepare_process
from tessera.engines.http.shared_steps import SharedSteps
from tessera.engines.keyring import CA, Keyring
from tessera.engines.logs import JsonLog
from tessera.engines.service.dialing import DialingParty
from tessera.rounds.plan import ServicePlan

QUIET_FROM: int = 20
"""A process with so many parties does not log each of them."""


def dial(
    url: str,
    parties: Sequence[tuple[DialingParty, Keyring]],
    deadlines: ServicePlan,
    log: JsonLog,
) -> int:
    """Take part until the leader says that all rounds are done, or until SIGTERM; the status."""
    prepare_process()
    return asyncio.run(_dial(url, parties, deadlines, log))


async def _dial(
    url: str,
    parties: Sequence[tuple[DialingParty, Keyring]],
    deadlines: ServicePlan,
    log: JsonLog,
) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for which in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(which, stop.set)
    quiet = JsonLog("", quiet=True) if len(parties) >= QUIET_FROM else log
    trust = trusted(url, parties[0][1].folder / CA)
    steps = SharedSteps([party for party, _ in parties], deadlines.retry, log)
    async with AsyncExitStack() as stack:
        stack.callback(steps.close)
        dialers = []
        for party, keyring in parties:
            http = await stack.enter_async_context(http_client(url, deadlines, trust))
            dialers.append(Dialer(party, keyring, http, deadlines, quiet, steps))
        work = asyncio.create_task(_run(dialers))
        stopped = asyncio.create_task(_until(stop))
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            log("stopped")
            return 0
    log("finished", rounds=sum(dialer.rounds_ended for dialer in dialers))
    return 0


async def _run(dialers: Sequence[Dialer]) -> None:
    async with asyncio.TaskGroup() as group:
        for dialer in dialers:
            group.create_task(dialer.run())


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()
