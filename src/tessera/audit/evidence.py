"""Evidence: what an observer has of a transcript, as `privacy/index/posterior.py` weighs it.

A *channel* says for each row whether a holder was active: in a row's count or movement those are
the clients in its sum, in a union all that were present. An observer is the server, or one curious
client. The client is told the groups of the rows it names (it names all), and sees a row's value
whenever it fetches it: what it is told of a round's sum is whether the row moved until it fetches
it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.audit.transcript import Bits, ByClient, Clients, Meeting
from tessera.ids import ClientId
from tessera.plan import Plan
from tessera.privacy.index.exposure import Holders
from tessera.privacy.index.posterior import Floats, log_ratio_table, pack, posterior, size_prior

CHUNK: Final = 1 << 26
"""Bits of evidence that are weighed at a time, about."""


@dataclass(frozen=True, slots=True)
class Channel:
    """`positive` = OR over the row's holders of `active`, wherever it is `known`."""

    period: int
    active: ByClient = field(repr=False)
    positive: Bits = field(repr=False)
    known: Bits = field(repr=False)


@dataclass(frozen=True, slots=True)
class Questions:
    """Answers of one meeting about the rows that were asked for."""

    period: int
    answers: ByClient = field(repr=False)
    asked: Bits = field(repr=False)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that one observer has."""

    channels: list[Channel]
    questions: list[Questions]

    @property
    def periods(self) -> list[int]:
        """Those in which anything was seen."""
        return sorted({c.period for c in self.channels} | {q.period for q in self.questions})

    def during(self, period: int) -> Evidence:
        """What was seen in one period."""
        return Evidence(
            [c for c in self.channels if c.period == period],
            [q for q in self.questions if q.period == period],
        )


def of_server(plan: Plan, meetings: Sequence[Meeting]) -> Evidence:
    """Counts, unions and answers."""
    found = Evidence([], [])
    for one in meetings:
        found.channels.append(Channel(one.period, one.active, one.positive, one.counted))
        found.channels.extend(_union(plan, one))
        if one.in_union is not None:
            found.questions.append(Questions(one.period, one.answers, one.in_union))
    return found


def of_participation(plan: Plan, meetings: Sequence[Meeting]) -> Evidence:
    """Who was there: unions, and counts where everybody named every row; answers aside."""
    found = Evidence([], [])
    for one in meetings:
        if (one.answers.bits | ~one.fetched).all():
            found.channels.append(Channel(one.period, one.active, one.positive, one.counted))
        found.channels.extend(_union(plan, one))
    return found


def of_client(plan: Plan, meetings: Sequence[Meeting], me: ClientId) -> Evidence:
    """One client that names every row: groups, unions and movement, in the rounds it is in.

    What moved a row between two of its rounds may have been somebody else's round (or group): then
    a row that moved proves nothing, and one that did not excludes everybody in its sum.
    """
    found = Evidence([], [])
    attended = [m for m in meetings if me in m.answers.clients]
    if not attended:
        return found
    order = np.array([m.round_id for m in meetings])
    times_moved = np.cumsum(
        [np.zeros_like(meetings[0].moved), *(m.moved for m in meetings)], axis=0
    )
    later = np.full(len(meetings[0].moved), -1)  # the round in which it fetches the row next
    for one in reversed(attended):
        first = int(np.searchsorted(order, one.round_id))
        last = np.searchsorted(order, np.maximum(later, 0))
        last = np.where(later < 0, first, last)
        moved = np.take_along_axis(times_moved, last[None, :], axis=0)[0] > times_moved[first]
        known = one.counted & one.fetched & (later >= 0) & (~moved | (last == first + 1))
        found.channels.append(Channel(one.period, one.active, moved, known))
        found.channels.extend(_union(plan, one))
        if one.in_union is not None:
            found.questions.append(Questions(one.period, one.answers, one.in_union))
        later = np.where(one.fetched, one.round_id, later)
    return found


def _union(plan: Plan, one: Meeting) -> Iterator[Channel]:
    """A row that is missing from a union is not held by anybody present.

    One that is in it may be a decoy's, an added one or a false positive of the encoding.
    """
    if one.in_union is None or not one.present:
        return
    everybody = ByClient.everything(one.present, len(one.in_union))
    yield Channel(one.period, everybody, one.in_union, ~one.in_union | plan.union_is_exact)


@dataclass(frozen=True, slots=True)
class Circle:
    """Clients that met each other, directly or through others, and who of them holds which row.

    A row's holders are looked for within a circle; what happens in another one says nothing.
    """

    clients: Clients
    truth: Bits = field(repr=False)  # (rows, clients), of the rows that are held in it
    rows: npt.NDArray[np.intp] = field(repr=False)  # which of the transcript's

    def without(self, client: ClientId) -> Circle:
        """The circle as one of its clients looks at it: others' rows which it does not hold."""
        at = self.clients.index(client)
        kept = ~self.truth[:, at]
        others = tuple(c for c in self.clients if c != client)
        return Circle(others, np.delete(self.truth, at, axis=1)[kept], self.rows[kept])

    def holds(self, plan: Plan, evidence: Evidence) -> Floats:
        """P(client holds row) at [row, client], given everything an observer has."""
        if not self.rows.size:
            return np.zeros(self.truth.shape)
        counts, rows = np.unique(self.truth.sum(axis=1), return_counts=True)
        shares = {int(h): float(n) / len(self.rows) for h, n in zip(counts, rows, strict=True)}
        prior = size_prior(Holders.of(shares))
        within = self._within(evidence)
        found = self._in_parts(plan, within, self.rows, prior)
        moved, periods = ~found.any(axis=1), within.periods
        if moved.any() and len(periods) > 1:
            # A row that came or went between two periods has no holders that explain all of them.
            single = [
                self._in_parts(plan, within.during(t), self.rows[moved], prior) for t in periods
            ]
            found[moved] = np.max(single, axis=0)
        return found

    def _in_parts(
        self, plan: Plan, evidence: Evidence, rows: npt.NDArray[np.intp], prior: Floats
    ) -> Floats:
        """Some rows at a time, so that memory stays small."""
        bits = max(1, len(evidence.channels)) * len(self.clients)
        size = max(1, CHUNK // bits)
        return np.concatenate(
            [
                self._weighed(plan, evidence, rows[at : at + size], prior)
                for at in range(0, len(rows), size)
            ]
        )

    def _within(self, evidence: Evidence) -> Evidence:
        known = set(self.clients)
        return Evidence(
            [c for c in evidence.channels if known & set(c.active.clients)],
            [q for q in evidence.questions if known & set(q.answers.clients)],
        )

    def _weighed(
        self, plan: Plan, evidence: Evidence, rows: npt.NDArray[np.intp], prior: Floats
    ) -> Floats:
        place = {c: i for i, c in enumerate(self.clients)}
        channels, shape = evidence.channels, (len(rows), len(self.clients))
        periods = evidence.periods or [0]
        active = np.zeros((*shape, len(channels)), dtype=np.bool_)
        positive, known = (np.zeros((len(rows), len(channels)), dtype=np.bool_) for _ in range(2))
        for k, channel in enumerate(channels):
            here = [(i, place[c]) for i, c in enumerate(channel.active.clients) if c in place]
            lines, columns = (list(part) for part in zip(*here, strict=True))
            active[:, columns, k] = channel.active.bits[lines][:, rows].T
            positive[:, k], known[:, k] = channel.positive[rows], channel.known[rows]
        asked, yes = (np.zeros((*shape, len(periods)), dtype=np.int64) for _ in range(2))
        for one in evidence.questions:
            here = [(i, place[c]) for i, c in enumerate(one.answers.clients) if c in place]
            lines, columns = (list(part) for part in zip(*here, strict=True))
            t, put = periods.index(one.period), one.asked[rows]
            answered_yes = one.answers.bits[lines][:, rows].T & put[:, None]
            asked[:, columns, t] += put[:, None]
            yes[:, columns, t] += answered_yes
        table = log_ratio_table(plan.privacy.index, int(asked.max(initial=0)))
        log_lr, perturbed = table[asked, yes], plan.privacy.perturbation
        when = np.array([c.period for c in channels])
        return posterior(
            pack(active),
            pack(positive),
            log_lr if perturbed else log_lr.sum(axis=2),
            prior,
            known=pack(known),
            periods=pack(when == np.array(periods)[:, None]) if perturbed else None,
            perturbation=perturbed,
        ).holds


def circles(meetings: Sequence[Meeting], owned: Mapping[ClientId, Bits]) -> list[Circle]:
    """Clients that took part in anything opened, joined wherever they met; rows by who holds them.

    `owned`: for each client which rows of the transcript it holds.
    """
    root: dict[ClientId, ClientId] = {}

    def top(client: ClientId) -> ClientId:
        while root[client] != client:
            root[client] = root[root[client]]
            client = root[client]
        return client

    for one in meetings:
        who = sorted({*one.present, *one.answers.clients, *one.active.clients})
        for client in who:
            root.setdefault(client, client)
            root[top(client)] = top(who[0])
    joined: dict[ClientId, list[ClientId]] = {}
    for client in sorted(root):
        joined.setdefault(top(client), []).append(client)
    found = []
    for clients in joined.values():
        truth = np.array([owned[c] for c in clients]).T
        rows = np.flatnonzero(truth.any(axis=1))
        found.append(Circle(tuple(clients), truth[rows], rows))
    return found
