"""An attack: what a run has to show for it, what is claimed against it, and what it reads.

The table of all attacks is in `suite.py`. To add one is a class that carries it out, and a line of
that table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from tessera.audit.finding import Finding
from tessera.audit.ratings.labels import Labels
from tessera.audit.ratings.record import RatingRound, rating_round
from tessera.audit.record import Record, replays
from tessera.audit.round_view import Entries, RoundView, Truth
from tessera.audit.two_server_view import LEADER, TwoServerView, both_views
from tessera.crypto.keys import SealingKey
from tessera.errors import ConfigError
from tessera.ids import ClientId, RoundId
from tessera.plan import Plan
from tessera.protocols.plain import PlainInput, SparsePlainInput
from tessera.protocols.two_server.messages import Purpose
from tessera.rounds.select import Shown

Seen = TypeVar("Seen")
SeenIn = TypeVar("SeenIn", contravariant=True)


class Attacker(Protocol[SeenIn]):
    """Takes what it reads of each round, in order; the truth is for scoring only."""

    def take(self, seen: SeenIn, /) -> None:
        """One more of what it reads."""

    def findings(self) -> list[Finding]:
        """What came out, once all rounds are taken."""


@dataclass(frozen=True, slots=True)
class Attack(Generic[Seen]):
    """One line of the table. `claim`: the most that a plan allows, and what that follows from."""

    name: str
    needs: Shown
    claim: str
    by: Callable[[Record], Attacker[Seen]]
    reads: Callable[[RoundSeen], Iterable[Seen]] = attrgetter("sums")


def scored(make: Callable[[Plan, Truth], Attacker[Seen]]) -> Callable[[Record], Attacker[Seen]]:
    """An attacker that is made of a plan (of fixed groups: one group's) and the truth."""
    return lambda record: make(record.plan.group_plan, record.truth)


@dataclass(frozen=True, kw_only=True)
class RoundSeen:
    """One round as each party has it; what no attack reads is not worked out.

    A client that the truth does not know is a ConfigError.
    """

    plan: Plan
    round_id: RoundId
    truth: Truth = field(repr=False)
    entries: Entries = field(repr=False)  # of the server; of two: the leader
    helper_entries: Entries = field(default_factory=list, repr=False)
    box_key: SealingKey | None = field(default=None, repr=False)
    seeds: dict[RoundId, bytes] = field(default_factory=dict, repr=False)  # of the rounds before
    labels: Labels | None = field(default=None, repr=False)
    epoch: RoundView | None = field(default=None, repr=False)  # of a fixed group, instead of phases

    @cached_property
    def messages(self) -> list[list[Any]]:
        """All messages of the server, in one list."""
        found = [message for _, message in self.entries]
        senders = (m.sender for m in found if isinstance(m, PlainInput | SparsePlainInput))
        return self._scored([found], senders, self.truth)

    @cached_property
    def sums(self) -> list[RoundView]:
        """Every secure sum, replayed."""
        found: list[RoundView] = [] if self.epoch is None else [self.epoch]
        found += replays(self.plan, self.round_id, self.entries)
        return self._scored(found, (c for view in found for c in view.in_union), self.truth)

    @cached_property
    def ratings(self) -> list[RatingRound]:
        """Gradients of ratings: uploads in the clear, and with each secure sum."""
        sums: list[RoundView | None] = [*self.sums]
        found = [
            rating_round(self.plan.group_plan, self.round_id, self.entries, view)
            for view in sums or [None]
        ]
        clients = (c for one in found for c in (*one.uploads, *one.survivors))
        return self._scored(found, clients, {} if self.labels is None else self.labels.of)

    @cached_property
    def servers(self) -> list[TwoServerView]:
        """The round as each of two servers has it, as far as it is known; the leader first."""
        found = both_views(
            self.plan, self.round_id, self.entries, self.helper_entries, self.box_key, self.seeds
        )
        clients = (c for view in found for c in view.received[Purpose.RETRIEVE])
        return self._scored(found, clients, self.truth)

    @property
    def rating_sums(self) -> list[RatingRound]:
        """Those of the gradients of ratings that are of a secure sum."""
        return [one for one in self.ratings if one.total is not None]

    @property
    def leader(self) -> list[TwoServerView]:
        """The round as the leader has it; both servers open the same sums."""
        return [view for view in self.servers if view.whose == LEADER]

    def _scored(
        self, found: list[Seen], clients: Iterable[ClientId], known: Collection[ClientId]
    ) -> list[Seen]:
        missing = set(clients) - set(known)
        if missing:
            raise ConfigError(
                f"the truth does not know client {min(missing)} of round {self.round_id}",
                hint="it is written with the run, for all clients",
            )
        return found


def rounds_of(record: Record) -> Iterator[RoundSeen]:
    """Every round of a record, in order; of fixed groups every epoch whose sum opened."""
    seeds: dict[RoundId, bytes] = {}
    for part in record.taken():
        yield RoundSeen(
            plan=record.plan,
            round_id=part.round_id,
            truth=record.truth,
            entries=part.entries,
            epoch=part.epoch,
            helper_entries=part.helper_entries,
            box_key=record.box_key,
            seeds=seeds,
            labels=record.labels,
        )
