"""Measurements: what a simulated round cost and what came of it, as one event."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tessera.ids import ClientId
from tessera.privacy.dp.guarantee import Guarantee
from tessera.rounds.course import PartOutcome
from tessera.rounds.events import RoundFinished
from tessera.rounds.noise import noise_of
from tessera.rounds.two_server.leader import LeaderRound
from tessera.simulation.cohort_training import TrainingOutcome
from tessera.simulation.stopwatch import TRAIN, Counted
from tessera.simulation.subcohort import Participant, Subcohort


def measured_round(
    event: RoundFinished,
    parts: Sequence[Subcohort],
    outcomes: Sequence[PartOutcome],
    participants: Mapping[ClientId, Participant],
    training: TrainingOutcome,
    *,
    scripted: bool = False,
) -> RoundFinished:
    """The event of a finished round with all that a simulation knows beside the server.

    Noise that was `scripted` by test entropy protects nobody, and has no number.

    Bytes and seconds are a client's on average. Parts that came to no sum have cost something, too.
    """
    cohort = event.cohort
    clients = [client for part in parts for client in part.clients.values()]
    worst = max(
        (participants[c].local.ledger.guarantee() for part in parts for c in part.named.values()),
        key=lambda g: g.epsilon,
    )
    left = [
        found
        for part in parts
        for c in part.named.values()
        if (found := noise_of(part.part.plan).guarantee(participants[c].local.ledger)) is not None
    ]
    noise = max(left, key=lambda g: g.epsilon, default=None)
    client_seconds = _mean_by_category(parts, Counted.SECONDS)
    client_seconds[TRAIN] = sum(training.seconds.values()) / cohort
    server_seconds: defaultdict[str, float] = defaultdict(float)
    helper_seconds: defaultdict[str, float] = defaultdict(float)
    between = 0.0
    for part in parts:
        for category, spent in part.watch.server.items():
            server_seconds[category] += spent
        for category, spent in part.watch.helper.items():
            helper_seconds[category] += spent
        if part.watch.simulator is not None:
            between += part.watch.simulator.outcome.traffic.between.total() / cohort
    cut = sum(client.clipped.cut for client in clients)
    values = sum(client.clipped.of for client in clients)
    broken = Counter(
        why
        for part in parts
        for c, client in part.clients.items()
        if (why := training.failed.get(part.named[c], client.broken))
    )
    return replace(
        event,
        bytes_up=_mean_by_category(parts, Counted.UP),
        bytes_down=_mean_by_category(parts, Counted.DOWN),
        client_seconds=client_seconds,
        server_seconds=dict(server_seconds),
        helper_seconds=dict(helper_seconds),
        bytes_between=between,
        epsilon=worst.epsilon,
        condition=worst.condition,
        loss=training.loss / training.examples if training.examples else None,
        not_finite=training.not_finite + broken.total(),
        broken=dict(broken),
        clipped=cut / values if values else 0.0,
        noise_epsilon=None if noise is None or scripted else noise.epsilon,
        noise_scope=_scope(noise, scripted),
        groups_not_finite=training.groups_not_finite,
        rows_over_cap=sum(client.left_out for client in clients),
        rows_exposed=sum(
            len(ids)
            for part in parts
            if isinstance(part.server, LeaderRound)
            for c in part.server.absent
            if (keys := participants[part.named[c]].local.own_keys.latest()) is not None
            for ids in keys.rows.values()
        ),
        singleton_rows=sum(
            part.singleton_rows(outcome.result)
            for part, outcome in zip(parts, outcomes, strict=True)
            if outcome.result is not None
        ),
    )


def _scope(noise: Guarantee | None, scripted: bool) -> str:
    if noise is None:
        return ""
    return "no number: test entropy" if scripted else f"delta {noise.delta:.3g} {noise.scope}"


def _mean_by_category(parts: Sequence[Subcohort], which: Counted) -> dict[str, float]:
    """Bytes or seconds of a client on average over all parts of a cohort, by cost category."""
    every = sum(len(part.named) for part in parts)
    total: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        for category, mean in part.watch.by_category(which, list(part.named)).items():
            total[category] += mean * len(part.named) / every
    return dict(total)
