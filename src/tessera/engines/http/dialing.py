"""A process of dialers: the helper, a client, or many clients over one journal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import ExitStack

from tessera.engines.http.dialer import Dialer, line_to, trusted
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
    with ExitStack() as stack:
        stack.callback(steps.close)
        dialers = []
        for party, keyring in parties:
            line = line_to(url, deadlines, trust)
            stack.callback(line.close)
            dialers.append(Dialer(party, keyring, line, deadlines, quiet, steps))
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
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # one reason is enough
    log("finished", rounds=sum(dialer.rounds_ended for dialer in dialers))
    if refused := [dialer.refused for dialer in dialers if dialer.refused is not None]:
        raise refused[0]
    return 0


async def _run(dialers: Sequence[Dialer]) -> None:
    """A party that the leader refuses ends alone; the others of its process go on."""
    async with asyncio.TaskGroup() as group:
        for dialer in dialers:
            group.create_task(dialer.run_or_be_refused())


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()
