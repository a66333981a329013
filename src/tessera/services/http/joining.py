"""A process of dialers: the helper, a client, or many clients over one journal."""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tessera.errors import TesseraError
from tessera.plan import ServicePlan
from tessera.runs.logs import JsonLog
from tessera.services.dialing import DialingParty
from tessera.services.http.dialer import Dialer, line_to, trusted
from tessera.services.http.serving import prepare_process
from tessera.services.http.shared_steps import SharedSteps
from tessera.services.keyring import CA, Keyring

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
        work = asyncio.create_task(_run(dialers, log))
        stopped = asyncio.create_task(_until(stop))
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not work.done():
            work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            log("stopped")
        else:
            log("finished", rounds=sum(dialer.rounds_ended for dialer in dialers))
    failures = [each.refused or each.failed for each in dialers if each.refused or each.failed]
    for error in failures:
        if isinstance(error, TesseraError | OSError):
            raise error  # one reason is enough
    return 1 if failures else 0


async def _run(dialers: Sequence[Dialer], log: JsonLog) -> None:
    """A party that the leader refuses, or whose work fails, ends alone; the others of its process
    go on."""
    async with asyncio.TaskGroup() as group:
        for dialer in dialers:
            group.create_task(_run_alone(dialer, log))


async def _run_alone(dialer: Dialer, log: JsonLog) -> None:
    try:
        await dialer.run_or_be_refused()
    except Exception as error:  # noqa: BLE001 (a bug, logged here; the process ends with status 1)
        dialer.failed = error
        # Where, and not what it says: that may have values of the client's.
        frames = traceback.extract_tb(error.__traceback__)
        at = [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames]
        log("failed", member=dialer.party.name, error=type(error).__name__, at=at)


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()
