"""A client of one round over HTTP: a `ClientRound` between posts and polls.

    python -m tessera.engines.http.client http://127.0.0.1:PORT PLAN.toml --client 3

Rows and updates are synthetic (`engines/population.py`); a program with data of its own calls
`take_part` with its own `ClientRound` and trainer. See the package for what this carrier does not
do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from tessera.engines import population
from tessera.engines.cohort_training import ClientTrainer
from tessera.engines.http import NUMBER, entropy_of, loopback, report_error
from tessera.errors import ConfigError, ServerFault, TesseraError
from tessera.ids import SERVER, ClientId, RoundId
from tessera.privacy.period import MemoryPeriods
from tessera.protocols.machine import Outbound
from tessera.protocols.secagg.params import Threat
from tessera.protocols.wire import DEFAULT_CAP
from tessera.rounds import schemes
from tessera.rounds.client import ClientRound
from tessera.rounds.local_state import LocalState
from tessera.rounds.plan import Plan

POLL: Final = 15.0
"""Seconds that one request for the next message waits."""

CHUNK: Final = 1 << 16
"""Bytes of an answer that are looked at together."""

PATIENCE: Final = 10.0
"""Seconds beyond that until the leader counts as unreachable."""


@dataclass(frozen=True, slots=True)
class ClientOutcome:
    """How a client's round ended: messages received, and messages of its own that came too late."""

    received: int
    refused: int


def take_part(
    url: str, role: ClientRound, trainer: ClientTrainer, *, http: httpx.Client | None = None
) -> ClientOutcome:
    """Go through a round with the leader at `url`, to its end; `trainer` trains what it fetched.

    `ServerFault`: the leader broke the protocol or is gone, and this client has left the round.
    """
    schemes.check("a client over HTTP", role.plan, schemes.ONE_SERVER)
    if role.plan.dp is not None:
        raise ConfigError(
            "[dp]: a client over HTTP adds no noise yet", hint="simulate it by `tessera run`"
        )
    base = f"{leader_at(url)}/rounds/{role.round_id}"
    with http or httpx.Client(timeout=POLL + PATIENCE, trust_env=False) as line:
        carrier = _Carrier(line, base, role)
        carrier.send(role.start())
        while (data := carrier.next()) is not None:
            carrier.send(role.receive(SERVER, data))
            if (submodel := role.pending) is not None:
                carrier.send(role.supply(trainer(submodel)))
        return ClientOutcome(carrier.received, carrier.refused)


def leader_at(url: str) -> str:
    """The leader's address without a trailing slash; loopback only, for nothing is encrypted."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(
            f"{url!r} is not a leader's address", hint="such as http://127.0.0.1:8000"
        )
    loopback(parts.hostname)
    return url.rstrip("/")


class _Carrier:
    """Requests and what their answers mean."""

    def __init__(self, line: httpx.Client, base: str, role: ClientRound) -> None:
        self._line, self._role = line, role
        self._messages = f"{base}/messages"
        self.received = self.refused = 0

    def send(self, out: Sequence[Outbound]) -> None:
        for message in out:
            answer, _ = self._request("POST", {}, content=message.data)
            if answer.status_code == httpx.codes.CONFLICT:
                self.refused += 1  # too late: the round goes on without us, which we will hear
            elif answer.status_code != httpx.codes.ACCEPTED:
                raise self._fault(answer)

    def next(self) -> bytes | None:
        """The next message; None when the round is over."""
        while True:
            answer, content = self._request("GET", {"after": self.received, "wait": POLL})
            if answer.status_code == httpx.codes.NO_CONTENT:
                continue
            if answer.status_code == httpx.codes.GONE:
                return None
            if answer.status_code != httpx.codes.OK:
                raise self._fault(answer)
            if answer.headers.get(NUMBER) != str(self.received + 1):
                raise self._fault(answer)
            self.received += 1
            return content

    def _request(
        self, method: str, params: dict[str, int | float], *, content: bytes | None = None
    ) -> tuple[httpx.Response, bytes]:
        """The answer and its body, which is capped as it comes: after decompression, too."""
        try:
            with self._line.stream(
                method,
                self._messages,
                params={"client": int(self._role.me), **params},
                content=content,
            ) as answer:
                body = bytearray()
                for part in answer.iter_bytes(CHUNK):
                    body += part
                    if len(body) > DEFAULT_CAP:
                        raise self._fault(answer)
                return answer, bytes(body)
        except httpx.TransportError as error:
            if not self.received:
                raise ConfigError(
                    f"{self._messages}: {error}", hint="start the leader first; is it there?"
                ) from error
            raise ServerFault(
                "is gone", round_id=self._role.round_id, phase=self._role.phase
            ) from error

    def _fault(self, answer: httpx.Response) -> ServerFault:
        return ServerFault(
            f"answered with status {answer.status_code}, which does not fit here",
            round_id=self._role.round_id,
            phase=self._role.phase,
        )


def synthetic_role(
    plan: Plan, round_id: RoundId, me: ClientId, rows: int, script: str | None = None
) -> ClientRound:
    """This client of the synthetic population; the same in every process."""
    if schemes.of(plan).masks and plan.security.threat is Threat.ACTIVE:
        raise ConfigError(
            "an active server is withstood with signed keys, and synthetic clients of several "
            "processes do not know each other's",
            hint='use threat = "semi-honest" here',
        )
    return ClientRound(
        plan,
        round_id,
        me,
        local=LocalState(
            real=population.real_rows(plan, me, rows),
            periods=MemoryPeriods(),
            derived=population.derived_maps(plan),
        ),
        entropy=entropy_of(script),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tessera.engines.http.client")
    parser.add_argument("leader", help="its address, such as http://127.0.0.1:8000")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--client", type=int, required=True)
    parser.add_argument("--round", type=int, default=0)
    parser.add_argument("--rows-per-client", type=int, default=20)
    parser.add_argument("--insecure-test-entropy", metavar="SCRIPT")
    options = parser.parse_args(arguments)
    try:
        plan = Plan.read(options.plan)
        role = synthetic_role(
            plan,
            RoundId(options.round),
            ClientId(options.client),
            options.rows_per_client,
            options.insecure_test_entropy,
        )
        outcome = take_part(options.leader, role, population.trainer(plan, role.me))
    except TesseraError as error:
        return report_error(error)
    fact = {"client": options.client, "phase": role.phase, "heard": outcome.received}
    print(json.dumps(fact | {"refused": outcome.refused}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
