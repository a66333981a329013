"""The conductor: the one thread that has the leader, and the only clock of a deployment.

Requests are handed to it and wait for the step that takes them; all that came in while it was busy
is one step, and one sync of the disk. It closes phases at their deadlines and opens the next round
once the helper has the last one in its journal. After a restart a phase has its whole time again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from tessera.ids import HELPER, ClientId, Party, RoundId
from tessera.plan import ServicePlan
from tessera.runs.logs import JsonLog
from tessera.services.journal import JournalFailed
from tessera.services.leader import Answer, Heard, LeaderService, MessageRequest

FOREVER: Final = 3600.0
OLD_STATE: Final = (
    "peers remember later rounds than the leader does: its state is an old copy, and no round opens"
)


@dataclass(slots=True, eq=False)
class Submission:
    """Messages of one request. `answers` is what becomes of them; None if they are not on disk."""

    requests: Sequence[MessageRequest]
    ticket: Any = None
    """The submitter's own."""
    answers: list[Answer] | None = None


OnStep = Callable[[Sequence[Submission], frozenset[Party]], None]
"""Called from the conductor's thread after a step: whose messages are settled, and for whom there
is news."""


class Conductor(threading.Thread):
    """Drives a `LeaderService`; `load` makes it, in this thread."""

    def __init__(
        self,
        load: Callable[[], LeaderService],
        deadlines: ServicePlan,
        *,
        rounds: int | None,
        on_step: OnStep,
        on_fatal: Callable[[], None],
        log: JsonLog,
    ) -> None:
        super().__init__(name="conductor", daemon=True)
        self.leader: LeaderService | None = None
        self.fatal: BaseException | None = None
        self.finished = False
        """All rounds that were asked for are done, and everybody needed has heard of it. As it was
        after the last turn: while a round is being opened the leader has none in hand."""
        self.trouble = ""  # why steps do not commit at the moment
        self.deadline: float | None = None  # of the phase under way, by time.monotonic
        self.shown: dict[str, Any] = {"round": None, "phase": "loading"}  # after the last step
        self._load, self._deadlines, self._rounds = load, deadlines, rounds
        self._on_step, self._on_fatal, self._log = on_step, on_fatal, log
        self._wake = threading.Condition()
        self._submitted: list[Submission] = []
        self._heard: dict[Party, Heard] = {}
        self._urgent = False  # whether a step should not wait to take what was heard
        self._ahead: set[Party] = set()  # who remembers a later round than there is
        self._free: dict[ClientId, RoundId | None] = {}  # who waits for a round behind that one
        self._stopping = self._over = False
        self._timed = (-1, -1)  # (round, phases closed) that the deadline is for
        self._ended = time.monotonic()

    # --- from the event loop --------------------------------------------------------------------

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Have these messages taken; `on_step` is called when they are on disk, or cannot be."""
        with self._wake:
            if not self._over:
                self._submitted += submissions
                self._wake.notify()
                return
        self._on_step(submissions, frozenset())

    def heard(self, peer: Party, round_id: RoundId, number: int) -> None:
        """This peer has so many of its messages of the round in its journal."""
        leader = self.leader
        if leader is None or number <= leader.links[peer].acknowledged:
            return
        with self._wake:
            self._heard[peer] = max((round_id, number), self._heard.get(peer, (round_id, 0)))
            # Others' may wait for the next step: nothing depends on them.
            if peer == HELPER or number > leader.links[peer].sent:
                self._urgent = True
                self._wake.notify()

    def waits(self, client: ClientId, behind: RoundId | None) -> None:
        """This client is free for a round behind that one."""
        with self._wake:
            self._free[client] = behind
            if self.leader is not None and len(self._free) >= self.leader.plan.least_survivors:
                self._wake.notify()

    def ahead(self, peer: Party) -> None:
        """This peer asks for what comes after a round that the leader does not know."""
        with self._wake:
            self._ahead.add(peer)
            self._wake.notify()

    def stop(self) -> None:
        """No new round and no new step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _done(self, leader: LeaderService) -> bool:
        return (
            self._rounds is not None
            and leader.finished
            and leader.course.next_round >= self._rounds
        )

    # --- the thread -----------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self.leader = self._load()
            self._log("loaded", round=self.leader.round_id, starts=self.leader.journal.starts)
            while not self._stopping:
                self._turn(self.leader)  # first: a phase that was under way has its deadline again
                self._wait(self.leader)
        except Exception as error:  # noqa: BLE001 (shown by the process, which ends with it)
            self.fatal = error
            self._on_fatal()
        finally:
            self._settle_all()

    def _wait(self, leader: LeaderService) -> None:
        """Until something came in, or a deadline. What may be missed is looked at under the lock:
        whoever brings it has the lock, too, and wakes us."""
        with self._wake:
            due = FOREVER if self.deadline is None else self.deadline - time.monotonic()
            if leader.finished and not self._done(leader):
                due = min(due, self._opens_in(leader))
            if not self._submitted and not self._urgent and not self._stopping and due > 0:
                self._wake.wait(due)

    def _turn(self, leader: LeaderService) -> None:
        with self._wake:
            taken, self._submitted = self._submitted, []
            heard, self._heard = self._heard, {}
            self._urgent = False
        before = leader.round_id, leader.finished
        try:
            if taken or heard:
                answers = iter(leader.handle([m for each in taken for m in each.requests], heard))
                for each in taken:
                    each.answers = list(islice(answers, len(each.requests)))
            self._keep_time(leader)
            self.trouble = ""
        except JournalFailed as error:
            # No step, nothing sent: the leader is again what its journal has.
            self.trouble = str(error)
            self._log("step failed", reason=str(error))
            leader.load()
            time.sleep(self._deadlines.retry)
        if leader.finished and before != (leader.round_id, True) and leader.round_id is not None:
            self._ended = time.monotonic()
            self._log("round ended", outcome=leader.outcome(leader.round_id))
        self.finished = self._done(leader) and leader.heard_by_helper
        changed, leader.changed = frozenset(leader.changed), set()
        self._show(leader)
        if taken or changed or self.finished:
            self._on_step(taken, changed)

    def _show(self, leader: LeaderService) -> None:
        """What operators may know, put together between two steps."""
        model = self.shown.get("model")
        if self._done(leader) and model is None:
            model = leader.model.digest.hex()
        self.shown = {
            "round": leader.round_id,
            "phase": "between rounds" if leader.finished else ", ".join(leader.phases),
            "missing": len(leader.missing),
            "restarts": leader.journal.starts - 1,
            "disk": leader.journal.bytes_on_disk,
            "trouble": self.trouble or (OLD_STATE if self._is_old_copy(leader) else ""),
            "model": model,
        }

    def _keep_time(self, leader: LeaderService) -> None:
        """Open a round that is due, or close a phase that is overdue."""
        now = time.monotonic()
        if leader.finished:
            self.deadline = None
            if not self._done(leader) and self._opens_in(leader) <= 0:
                round_id = leader.open_round()
                with self._wake:
                    self._free = {c: r for c, r in self._free.items() if r == round_id}
                self._log("round opened", round=round_id)
        elif self.deadline is not None and now >= self.deadline:
            phases, missing = leader.phases, len(leader.missing)
            leader.close_overdue()
            self._log("deadline", round=leader.round_id, phases=phases, missing=missing)
        if leader.finished:
            self.deadline = None
            return
        here = (int(leader.round_id or 0), leader.closed)
        if here != self._timed:
            first = here[0] != self._timed[0]
            self._timed = here
            self.deadline = now + (self._deadlines.join if first else self._deadlines.phase)

    def _opens_in(self, leader: LeaderService) -> float:
        """Seconds until the next round may open; FOREVER if somebody has to come first."""
        if not leader.heard_by_helper or self._stopping or self._is_old_copy(leader):
            return FOREVER
        with self._wake:  # clients come in while this is counted
            free = sum(leader.links[c].round_id == behind for c, behind in self._free.items())
        since = time.monotonic() - self._ended
        if free >= len(leader.clients):
            return self._deadlines.pause - since
        if free >= leader.plan.least_survivors:
            return max(self._deadlines.pause, self._deadlines.join) - since
        return FOREVER

    def _is_old_copy(self, leader: LeaderService) -> bool:
        """Whether the helper is ahead of the leader, or so many clients that no quorum is left. One
        client that says so is believed by nobody."""
        spare = len(leader.clients) - leader.plan.least_survivors
        return HELPER in self._ahead or len(self._ahead) > spare

    def _settle_all(self) -> None:
        """Nothing more comes to disk."""
        with self._wake:
            self._over = True
            left, self._submitted = self._submitted, []
        self._on_step(left, frozenset())
