"""The leader of one round as an HTTP service: a `ServerRound`, mailboxes, and the only clock.

    python -m tessera.engines.http.leader PLAN.toml --round 0 --clients 0,1,2,3,4,5

Prints a line of JSON when it listens and one when the round is over. See the package for what this
carrier does not do.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

from tessera.engines import population
from tessera.engines.http import NUMBER, entropy_of, loopback, report_error
from tessera.errors import ConfigError, PeerError, RoundAborted, TesseraError
from tessera.ids import ClientId, RoundId
from tessera.learning.averaging import Averaging, ServerStep
from tessera.learning.tables import StoredTable
from tessera.protocols.machine import Outbound
from tessera.protocols.secagg.messages import BOX_BYTES
from tessera.protocols.union.encoding import packed_bytes
from tessera.rounds import schemes
from tessera.rounds.encode import RoundResult
from tessera.rounds.plan import Plan
from tessera.rounds.server import ServerRound

FINISHED: Final = frozenset({"done", "aborted"})
FRAME: Final = 4096
"""Room for what a message holds besides its payload: ids, lengths, keys, signatures."""

LONGEST_POLL: Final = 20.0


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds until a phase closes without those who are missing; the first waits for joiners."""

    join: float = 60.0
    phase: float = 30.0
    linger: float = 5.0  # after the end, for clients that still have to hear of it

    def __post_init__(self) -> None:
        if not (0 < self.join and 0 < self.phase and 0 <= self.linger):
            raise ConfigError(f"deadlines {self} must be positive")


def largest_upload(plan: Plan) -> int:
    """No honest message of a client is longer than this; longer ones are not even read."""
    most = plan.cohort * (8 + len(plan.stages) * (BOX_BYTES + 4))  # share boxes
    capacity = plan.union_encoding(RoundId(0)).capacity if needs_union(plan) else 0
    for stage in plan.stages:
        payload = packed_bytes(stage.group, stage.dense)
        for t in stage.tables:
            rows = plan.tables[t.table].rows
            named = min(rows, 2 * capacity) if capacity else rows  # a union may pass its capacity
            payload += packed_bytes(stage.group, named * t.width)
            most = max(most, 9 * named)  # the set itself, by id or by place
        most = max(most, payload)
    return most + FRAME


def needs_union(plan: Plan) -> bool:
    return schemes.of(plan).randomises


class RoundService:
    """One round and its mailboxes. The role is called by one task at a time, off the event loop."""

    def __init__(
        self,
        server: ServerRound,
        cohort: Sequence[ClientId],
        *,
        deadlines: Deadlines,
        on_end: Callable[[RoundService], None] | None = None,
    ) -> None:
        schemes.check("a leader over HTTP", server.plan, schemes.ONE_SERVER)
        if server.plan.privacy.pseudonyms:
            raise ConfigError(
                "plan: pseudonyms are for simulation: here every request names its client",
                hint="over a network they take one-time tokens and a relay, which are not built",
            )
        self.server, self.cohort = server, frozenset(cohort)
        self.aborted: RoundAborted | None = None
        self.refused = 0
        self.cap = largest_upload(server.plan)
        self._deadlines, self._on_end = deadlines, on_end
        self._mail: dict[ClientId, list[bytes]] = {c: [] for c in cohort}
        self._role = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._look()

    def _look(self) -> None:
        """What may be read while another thread is in the role: as it was between two calls."""
        self.phase, self.missing = self.server.phase, self.server.expected

    @property
    def over(self) -> bool:
        return self.phase in FINISHED

    @property
    def result(self) -> RoundResult | None:
        return self.server.result if self.phase == "done" else None

    def mailbox(self, client: ClientId) -> list[bytes]:
        return self._mail[client]

    async def take(self, client: ClientId, data: bytes) -> None:
        """One message from a client. PeerError: refused, and the round is as it was."""
        async with self._role:
            try:
                await asyncio.to_thread(self.server.receive, client, data)
            except PeerError:
                self.refused += 1
                raise
            self._look()
        await self._tell()

    async def mail(self, client: ClientId, after: int, wait: float) -> bytes | None:
        """The client's message number after + 1, as soon as it is there; None if none comes."""
        box = self._mail[client]
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: len(box) > after or self.over), wait
                )
            except TimeoutError:
                return None
        return box[after] if len(box) > after else None

    async def keep_time(self) -> None:
        """Close each phase when everybody has answered, or at its deadline; to the round's end."""
        self._deliver(self.server.start())
        seconds = self._deadlines.join
        while not self.over:
            await self._answered(seconds)
            async with self._role:
                try:
                    out = await asyncio.to_thread(self.server.close_phase)
                except RoundAborted as error:
                    self.aborted, out = error, []
                self._deliver(out)
                if self.server.phase in FINISHED:
                    self._deliver(self.server.farewell())
                self._look()  # not before: a round that is over has no more mail
            await self._tell()
            seconds = self._deadlines.phase
        await asyncio.sleep(self._deadlines.linger)
        if self._on_end is not None:
            self._on_end(self)

    async def _answered(self, seconds: float) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: not self.missing), seconds)
            except TimeoutError:
                return

    def _deliver(self, out: Sequence[Outbound]) -> None:
        for message in out:
            assert not isinstance(message.to, str)
            self._mail[message.to].append(message.data)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def status(self) -> dict[str, Any]:
        """Where the round is. Nothing in it is anybody's own."""
        result = self.result
        return {
            "round": int(self.server.round_id),
            "phase": self.phase,
            "cohort": len(self.cohort),
            "missing": sorted(int(c) for c in self.missing),
            "refused": self.refused,
            "aborted": None if self.aborted is None else str(self.aborted),
            "survivors": None if result is None else [int(c) for c in result.survivors],
        }


def create_app(leader: RoundService) -> FastAPI:
    """The leader's three addresses; its clock runs as long as the app does."""

    @asynccontextmanager
    async def clock(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(leader.keep_time())
        yield
        task.cancel()

    # No pages that describe the service: nobody but our client should talk to it.
    app = FastAPI(title="tessera leader", lifespan=clock, openapi_url=None)

    def known(round_id: int, client: int) -> ClientId:
        if round_id != leader.server.round_id:
            raise HTTPException(404, f"there is no round {round_id} here")
        if client not in leader.cohort:
            raise HTTPException(403, f"client {client} is not in this cohort")
        return ClientId(client)

    @app.post("/rounds/{round_id}/messages", status_code=202)
    async def post(round_id: int, client: int, request: Request) -> Response:
        sender = known(round_id, client)
        try:
            await leader.take(sender, await body_of(request, leader.cap))
        except PeerError as error:
            raise HTTPException(409, str(error)) from error
        return Response(status_code=202)

    @app.get("/rounds/{round_id}/messages")
    async def fetch(
        round_id: int, client: int, after: int = 0, wait: float = LONGEST_POLL
    ) -> Response:
        reader = known(round_id, client)
        if after < 0 or after > len(leader.mailbox(reader)):
            raise HTTPException(400, f"message {after} was never there")
        data = await leader.mail(reader, after, max(0.0, min(wait, LONGEST_POLL)))
        if data is not None:
            return Response(
                data,
                media_type="application/octet-stream",
                headers={NUMBER: str(after + 1)},
            )
        return Response(status_code=410 if leader.over else 204)

    @app.get("/rounds/{round_id}/status")
    async def status(round_id: int) -> dict[str, Any]:
        if round_id != leader.server.round_id:
            raise HTTPException(404, f"there is no round {round_id} here")
        return leader.status()

    return app


async def body_of(request: Request, cap: int) -> bytes:
    """The request's body, whose length has to be declared and within the cap before it is read."""
    declared = request.headers.get("content-length", "")
    if not declared.isdecimal():
        raise HTTPException(411, "the content-length header is missing")
    if int(declared) > cap:
        raise HTTPException(413, f"{declared} bytes; a message has at most {cap}")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > cap:  # a server in front of us may not hold clients to what they declare
            raise HTTPException(413, f"a message has at most {cap} bytes")
    return bytes(data)


def model_digest(dense: npt.NDArray[np.float32], tables: Mapping[str, StoredTable]) -> str:
    """A digest of the dense part and of every row that was ever updated."""
    digest = hashlib.sha256(np.ascontiguousarray(dense, dtype="<f4").tobytes())
    for name in sorted(tables):
        ids, rows = tables[name].pending()
        digest.update(name.encode() + b"\0" + ids.astype("<u8").tobytes())
        digest.update(rows.astype("<f4").tobytes())
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tessera.engines.http.leader")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument("--clients", required=True, help="the cohort's ids, as 0,1,2")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--join-seconds", type=float, default=Deadlines.join)
    parser.add_argument("--phase-seconds", type=float, default=Deadlines.phase)
    parser.add_argument("--linger-seconds", type=float, default=Deadlines.linger)
    parser.add_argument("--insecure-test-entropy", metavar="SCRIPT")
    options = parser.parse_args(arguments)
    try:
        return serve(options)
    except TesseraError as error:
        return report_error(error)


def serve(options: argparse.Namespace) -> int:
    """Listen, lead the round, merge it into a model that starts afresh, and say how it went."""
    host = loopback(options.host)
    plan = Plan.read(options.plan)
    deadlines = Deadlines(
        join=options.join_seconds, phase=options.phase_seconds, linger=options.linger_seconds
    )
    try:
        cohort = sorted({ClientId(int(c)) for c in options.clients.split(",")})
    except ValueError:
        raise ConfigError(f"--clients {options.clients!r}", hint="write ids as 0,1,2") from None
    if len(cohort) != plan.cohort:
        raise ConfigError(f"{len(cohort)} clients for a cohort of {plan.cohort}")
    model = population.tables(plan)
    server = ServerRound(
        plan,
        RoundId(options.round),
        cohort,
        dense=population.dense(plan),
        tables=model,
        derived=population.derived_maps(plan),
        entropy=entropy_of(options.insecure_test_entropy),
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        try:
            listening.bind((host, options.port))
        except OSError as error:
            raise ConfigError(
                f"{host}:{options.port}: {error.strerror}", hint="--port 0 takes a free one"
            ) from error
        leader = RoundService(server, cohort, deadlines=deadlines, on_end=lambda _: stop())
        service = uvicorn.Server(
            uvicorn.Config(create_app(leader), log_level="warning", access_log=False)
        )

        def stop() -> None:
            service.should_exit = True

        shown = f"[{host}]" if ":" in host else host
        print_json({"listening": f"http://{shown}:{listening.getsockname()[1]}"})
        service.run(sockets=[listening])
    if leader.aborted is not None:
        raise leader.aborted
    result = leader.result
    if result is None:
        print("error: stopped before the round was over", file=sys.stderr)
        return 1
    step = Averaging(plan.server or ServerStep(), plan.model.dense, model)
    dense = step.apply(population.dense(plan), result.dense, result.tables)
    print_json(leader.status() | {"model": model_digest(dense, model)})
    return 0


def print_json(fact: Mapping[str, Any]) -> None:
    print(json.dumps(fact), flush=True)


if __name__ == "__main__":
    sys.exit(main())
