"""A cohort in one process, in virtual time.

The simulator carries encoded messages between roles, so that byte counts are lengths of what was
encoded, and its clock closes phases: when everybody has answered, or at the deadline. It knows
nothing about the content of messages. Faults come from a script (`simulation/faults.py`).
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from tessera.errors import PeerError, RoundAborted, ServerFault
from tessera.ids import HELPER, SERVER, ClientId, Party, clients_in
from tessera.protocols.machine import Clocked, Outbound, Receiver
from tessera.simulation.faults import (
    Corrupt,
    Delay,
    Drop,
    Duplicate,
    Fault,
    Lie,
    Reorder,
    Replay,
    corrupted,
    lied,
)
from tessera.simulation.views import Views

R = TypeVar("R")

Work = Callable[
    [Collection[ClientId]], Mapping[ClientId, tuple[float, Callable[[], list[Outbound]]]]
]
"""What clients do between messages: given who is present, for some of them the CPU seconds it took
and the step that returns their messages."""

LATENCY = 0.05
DEADLINE = 10.0
FINISHED = frozenset({"done", "aborted", "over"})
WORK, OUTCOME = "work", "outcome of the work"
"""Used in place of a kind of message for seconds that are spent between messages."""


Seconds = defaultdict[str, float]


@dataclass(slots=True)
class MeasuredTraffic:
    """Bytes by client and kind of message, and CPU seconds by what they were spent on."""

    up: dict[ClientId, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    down: dict[ClientId, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    client_seconds: dict[ClientId, Seconds] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    server_seconds: Seconds = field(default_factory=lambda: defaultdict(float))
    helper_seconds: Seconds = field(default_factory=lambda: defaultdict(float))
    between: Counter[str] = field(default_factory=Counter)  # bytes between two servers, both ways

    def bytes_of(self, client: ClientId) -> tuple[int, int]:
        """(up, down) of one client."""
        return self.up[client].total(), self.down[client].total()


@dataclass(slots=True)
class Outcome:
    """How a simulated round went."""

    aborted: RoundAborted | None = None
    refused: list[PeerError] = field(default_factory=list)
    left: dict[ClientId, ServerFault] = field(default_factory=dict)
    helper_left: ServerFault | None = None
    traffic: MeasuredTraffic = field(default_factory=MeasuredTraffic)


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """A phase ended, for the `visit`-th time from 0, with these clients missing."""

    time: float
    phase: str
    visit: int
    answered: int
    missing: tuple[ClientId, ...]


class Simulator:
    """One round: a server role, its clients, and what goes wrong."""

    def __init__(
        self,
        server: Clocked,
        clients: Mapping[ClientId, Receiver],
        first_messages: Mapping[ClientId, list[Outbound]],
        *,
        helper: Receiver | None = None,
        greeting: Iterable[Outbound] = (),
        faults: Iterable[Fault] = (),
        work: Work | None = None,
        ending: Callable[[], Iterable[Outbound]] | None = None,
        views: Views | None = None,
        latency: float = LATENCY,
        deadline: float = DEADLINE,
        on_phase: Callable[[PhaseEnd], None] | None = None,
        between_messages: Callable[[Simulator], None] | None = None,
    ) -> None:
        """`first_messages` are the clients', `greeting` the server's. A client that has no entry
        there has refused the round.

        A `helper` talks to the server alone, without delay. `work` (training) is called once all
        messages on their way to clients have arrived. `ending` are the server's last messages, when
        the round has ended, well or not. `between_messages` runs after every step.
        """
        self.server, self.helper = server, helper
        self.clients = dict(clients)
        self.outcome = Outcome()
        self._first_messages = first_messages
        self._greeting = tuple(greeting)
        self._faults = tuple(faults)
        self._work, self._ending = work, ending
        self._views = views
        self._latency = latency
        self._deadline = deadline
        self._on_phase = on_phase
        self._after_step = between_messages
        self._now = 0.0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, ClientId, bool, str, bytes]] = []
        self._under_way = 0  # messages to clients
        self._gone: set[ClientId] = set(clients) - set(first_messages)
        self._visits: Counter[str] = Counter()
        self._sent_down: Counter[tuple[ClientId, str]] = Counter()
        self._sent: dict[tuple[ClientId, str, int], bytes] = {}

    def run(self) -> Outcome:
        """Run the round until it is finished or aborted."""
        self._from_server(self._greeting)
        for client, out in self._first_messages.items():
            self._from_client(client, out)
        while self.server.phase not in FINISHED:
            phase, stage = self.server.phase, self._visits[self.server.phase]
            expected = len(clients_in(self.server.expected))
            self._wait()
            missing = tuple(sorted(clients_in(self.server.expected)))
            try:
                out = self._timed_server(self.server.close_phase)
            except RoundAborted as error:
                self.outcome.aborted = error
                out = []
            self._visits[phase] += 1
            if self._on_phase is not None:
                self._on_phase(PhaseEnd(self._now, phase, stage, expected - len(missing), missing))
            self._step_done()
            self._from_server(out)
        if self._ending is not None:
            self._from_server(self._timed_server(self._ending))
            self._deliver_the_rest()
        return self.outcome

    def _deliver_the_rest(self) -> None:
        """To clients only: what they still had on their way to the server is late."""
        while self._queue:
            when, _, client, downward, kind, data = heapq.heappop(self._queue)
            if downward:
                self._now = max(self._now, when)
                self._at_client(client, kind, data)

    # -- the clock

    def _wait(self) -> None:
        """Deliver what arrives until everybody has answered or the deadline has come."""
        ends = self._now + self._deadline
        here = (self.server.phase, self._stage)
        shuffle = [f for f in self._faults if isinstance(f, Reorder) and (f.phase, f.stage) == here]
        held: list[tuple[ClientId, str, bytes]] = []
        while self.server.expected:
            if not self._under_way:
                self._do_work()
            if not self._queue or self._queue[0][0] > ends:
                break
            when, _, client, downward, kind, data = heapq.heappop(self._queue)
            self._now = max(self._now, when)
            if downward:
                self._under_way -= 1
                self._at_client(client, kind, data)
            elif shuffle:
                held.append((client, kind, data))
            else:
                self._at_server(client, kind, data)
        if held:
            for i in np.random.default_rng(shuffle[0].seed).permutation(len(held)):
                self._at_server(*held[i])
        if self.server.expected:
            self._now = ends

    def _do_work(self) -> None:
        if self._work is None:
            return
        for client, (seconds, step) in self._work(self.clients.keys() - self._gone).items():
            self.outcome.traffic.client_seconds[client][WORK] += seconds
            self._client_step(client, OUTCOME, step)

    @property
    def _stage(self) -> int:
        return self._visits[self.server.phase]

    # -- on the way

    def _from_server(self, out: Iterable[Outbound]) -> None:
        """To clients by the queue; between the servers at once, until neither sends anything."""
        waiting = deque(out)
        while waiting:
            message = waiting.popleft()
            if message.to == HELPER:
                waiting.extend(self._through_helper(message))
            else:
                self._to_client(message)

    def _through_helper(self, message: Outbound) -> list[Outbound]:
        """The server's next messages, once the helper has answered; none if it has left."""
        assert self.helper is not None
        helper, answers = self.helper, []
        self._between(SERVER, HELPER, message, arrived=self.outcome.helper_left is None)
        if self.outcome.helper_left is not None:
            return []
        started = time.process_time()
        try:
            answers = helper.receive(SERVER, message.data)
        except PeerError as error:  # that client is left out, and the helper goes on
            self.outcome.refused.append(error)
        except ServerFault as fault:
            self.outcome.helper_left = fault
        self.outcome.traffic.helper_seconds[self.server.phase] += time.process_time() - started
        out: list[Outbound] = []
        for answer in answers:
            self._between(HELPER, SERVER, answer)
            out += self._at_leader(HELPER, answer.data)
        return out

    def _between(
        self, sender: str, receiver: str, message: Outbound, *, arrived: bool = True
    ) -> None:
        self.outcome.traffic.between[message.kind] += len(message.data)
        self._record(sender, receiver, message.kind, message.data, arrived=False)
        if arrived:
            self._record(sender, receiver, message.kind, message.data, arrived=True)

    def _at_leader(self, sender: Party, data: bytes) -> list[Outbound]:
        """The server receives a message, and may answer at once."""
        try:
            return self._timed_server(lambda: self.server.receive(sender, data))
        except PeerError as error:
            self.outcome.refused.append(error)
        except RoundAborted as error:
            self.outcome.aborted = error
        return []

    def _to_client(self, message: Outbound) -> None:
        client = message.to
        assert not isinstance(client, str)
        versions = [message.data]
        for fault in self._faults_down(client, message.kind):
            if isinstance(fault, Corrupt):
                versions = [corrupted(data, fault) for data in versions]
            elif isinstance(fault, Duplicate):
                versions = versions * 2
            elif isinstance(fault, Lie):
                forged = lied(message.data, fault)
                versions = [message.data, forged] if fault.again else [forged]
        self._sent_down[client, message.kind] += 1
        for data in versions:
            self._record(SERVER, client, message.kind, data, arrived=False)
            self.outcome.traffic.down[client][message.kind] += len(data)
            self._post(client, message.kind, data, self._latency, downward=True)

    def _from_client(self, client: ClientId, out: list[Outbound]) -> None:
        phase, stage = self.server.phase, self._stage
        for message in out:
            faults = self._faults_up(client, phase, stage)
            if any(isinstance(f, Drop) and not f.after for f in faults):
                self._gone.add(client)
            if client in self._gone:
                return
            self._sent[client, phase, stage] = message.data
            copies, data, delay = 1, message.data, self._latency
            for fault in faults:
                if isinstance(fault, Delay):
                    delay += fault.seconds
                elif isinstance(fault, Corrupt):
                    data = corrupted(data, fault)
                elif isinstance(fault, Duplicate):
                    copies = 2
                elif isinstance(fault, Replay):
                    data = self._sent[client, fault.of, fault.of_stage]
                elif isinstance(fault, Drop):
                    self._gone.add(client)
            for _ in range(copies):
                self._record(client, SERVER, message.kind, data, arrived=False)
                self.outcome.traffic.up[client][message.kind] += len(data)
                self._post(client, message.kind, data, delay, downward=False)

    def _faults_up(self, client: ClientId, phase: str, stage: int) -> list[Fault]:
        return [
            f
            for f in self._faults
            if isinstance(f, Drop | Delay | Duplicate | Corrupt | Replay)
            and (f.client, f.phase, f.stage) == (client, phase, stage)
        ]

    def _faults_down(self, client: ClientId, kind: str) -> list[Fault]:
        return [
            f
            for f in self._faults
            if isinstance(f, Duplicate | Corrupt | Lie)
            and (f.client, f.kind, f.stage) == (client, kind, self._sent_down[client, kind])
        ]

    def _post(
        self, client: ClientId, kind: str, data: bytes, delay: float, *, downward: bool
    ) -> None:
        entry = (self._now + delay, next(self._order), client, downward, kind, data)
        heapq.heappush(self._queue, entry)
        self._under_way += downward

    def _record(
        self, sender: Party, receiver: Party, kind: str, data: bytes, *, arrived: bool
    ) -> None:
        if self._views is not None:
            self._views.add(self._now, sender, receiver, kind, data, arrived=arrived)

    # -- on arrival

    def _at_client(self, client: ClientId, kind: str, data: bytes) -> None:
        if client in self._gone:
            return
        self._record(SERVER, client, kind, data, arrived=True)
        self._client_step(client, kind, lambda: self.clients[client].receive(SERVER, data))

    def _client_step(self, client: ClientId, kind: str, step: Callable[[], list[Outbound]]) -> None:
        started = time.process_time()
        try:
            out = step()
        except ServerFault as fault:
            self.outcome.left.setdefault(client, fault)
            out = []
        spent = time.process_time() - started
        self.outcome.traffic.client_seconds[client][kind] += spent
        self._step_done()
        self._from_client(client, out)

    def _at_server(self, client: ClientId, kind: str, data: bytes) -> None:
        self._record(client, SERVER, kind, data, arrived=True)
        out = self._at_leader(client, data)
        self._step_done()
        self._from_server(out)

    def _timed_server(self, call: Callable[[], R]) -> R:
        phase, started = self.server.phase, time.process_time()
        try:
            return call()
        finally:
            self.outcome.traffic.server_seconds[phase] += time.process_time() - started

    def _step_done(self) -> None:
        if self._after_step is not None:
            self._after_step(self)
