"""A leader's process: the conductor's thread, the event loop, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Sequence
from typing import Final

from tessera.crypto import kernel
from tessera.engines.bundle import Bundle
from tessera.engines.http.app import LeaderApp, create_app
from tessera.engines.http.committed import CommittedOutcomes
from tessera.engines.http.conductor import Conductor, Submission
from tessera.engines.http.requests import RequestChecker
from tessera.engines.http.serving import Address, http_server
from tessera.engines.keyring import Directory
from tessera.engines.logs import JsonLog
from tessera.engines.service.leader import LeaderService
from tessera.ids import Party

SWITCH: Final = 0.001
"""Seconds until a thread that waits for the interpreter gets it. A process has two that matter, one
at the line and one at the journal, and each waits for the other in every stage of a round."""
NEW_OBJECTS: Final = 10_000
"""Containers made and not yet freed until garbage is looked for among them."""
TLS_BUFFER: Final = 1 << 15
"""Bytes that asyncio sets aside for reading on each connection, 256 kB left to itself: most of a
leader's memory where a thousand clients wait for news."""
LINGER: Final = 1.0
"""Seconds after the last round, at least, for parties that still have to hear of it."""


def lead(
    load: Callable[[], LeaderService],
    bundle: Bundle,
    directory: Directory,
    address: Address,
    *,
    rounds: int | None,
    log: JsonLog,
    on_listening: Callable[[str], None],
) -> int:
    """Serve until all rounds are done, or until SIGTERM; the exit status.

    What the journal refuses is raised here.
    """
    prepare_process()
    deadlines = bundle.plan.service
    loop_of: list[asyncio.AbstractEventLoop] = []

    def on_step(settled: Sequence[Submission], peers: frozenset[Party]) -> None:
        if loop_of:
            with contextlib.suppress(RuntimeError):  # nobody is left to be told
                loop_of[0].call_soon_threadsafe(app.after_step, settled, peers)

    def on_fatal() -> None:
        server.should_exit = True

    conductor = Conductor(
        load, deadlines, rounds=rounds, on_step=on_step, on_fatal=on_fatal, log=log
    )

    def outcomes() -> CommittedOutcomes:
        assert conductor.leader is not None
        return CommittedOutcomes(conductor.leader.journal.path)

    app = LeaderApp(conductor, RequestChecker(directory, bundle.digest), outcomes, deadlines)
    server = http_server(
        create_app(app), address, request=deadlines.request, keep=2 * deadlines.poll
    )

    async def main() -> None:
        loop_of.append(asyncio.get_running_loop())
        conductor.start()
        watch = asyncio.create_task(watch_the_end())
        await server.serve(sockets=[listening])
        watch.cancel()

    async def watch_the_end() -> None:
        while not conductor.finished and not server.should_exit:
            await asyncio.sleep(0.1)
        if conductor.finished:
            await asyncio.sleep(LINGER)
            loop = loop_of[0]
            last = loop.time() + deadlines.poll
            while app.untold and loop.time() < last and not server.should_exit:
                await asyncio.sleep(0.1)
        app.closing = True
        app.after_step((), frozenset())
        server.should_exit = True

    with address.bound() as listening:
        on_listening(address.url(listening))
        asyncio.run(main())
    conductor.stop()
    conductor.join()
    if conductor.leader is not None:
        conductor.leader.journal.close()
    if conductor.fatal is not None:
        raise conductor.fatal
    log("stopped", **{k: v for k, v in conductor.shown.items() if k in ("round", "model")})
    return 0


def prepare_process() -> None:
    """Small buffers for each connection; the kernel tested, which takes a second, before anybody
    waits for us; no search for garbage among all that was imported, 35 ms in the middle of a round,
    and less often for what is new; threads that give way to each other; and as many open
    connections as the system lets this process have."""
    SSLProtocol.max_size = TLS_BUFFER
    kernel.active()
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    sys.setswitchinterval(SWITCH)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
