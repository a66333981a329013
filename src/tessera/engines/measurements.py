"""Measurements: what a simulated round cost and what came of it, as one event."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from tessera.engines.cohort_training import TrainingOutcome
from tessera.engines.participant import Participant
from tessera.engines.stopwatch import TRAIN, Counted
from tessera.engines.subcohort import Subcohort
from tessera.ids import ClientId, RoundId
from tessera.rounds import schemes
from tessera.rounds.encode import RoundResult
from tessera.rounds.events import RoundFinished
from tessera.rounds.plan import Plan


def round_finished(
    plan: Plan,
    round_id: RoundId,
    parts: Sequence[Subcohort],
    summed: Sequence[Subcohort],
    participants: Mapping[ClientId, Participant],
    results: Sequence[RoundResult],
    result: RoundResult,
    training: TrainingOutcome,
    metric: float | None,
    seconds: float,
) -> RoundFinished:
    """The event of a finished round; bytes and seconds are a client's on average.

    `summed` are the parts that came to a sum, with their `results`; all have cost something.
    """
    cohort = sum(len(part.named) for part in parts)
    real = parts[0].watch.simulator is not None
    clients = [client for part in parts for client in part.clients.values()]
    worst = max(
        (participants[c].local.ledger.guarantee() for part in parts for c in part.named.values()),
        key=lambda g: g.epsilon,
    )
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
        training.failed.get(part.named[c], client.broken)
        for part in parts
        for c, client in part.clients.items()
        if client.broken
    )
    return RoundFinished(
        round_id=round_id,
        cohort=cohort,
        survivors=len(result.survivors),
        union_rows=result.union_rows,
        union_residual=result.union_residual,
        rows_opened=result.rows_opened,
        rows_below_quorum=result.below_quorum,
        rows_shrunk=result.shrunk,
        rows_lost=result.lost,
        rows_out_of_bounds=result.rows_out_of_bounds,
        weight=result.weight,
        measured=real,
        secure=real and schemes.of(parts[0].plan).hides,
        bytes_up=_mean_by_category(parts, Counted.UP),
        bytes_down=_mean_by_category(parts, Counted.DOWN),
        client_seconds=client_seconds,
        server_seconds=dict(server_seconds),
        helper_seconds=dict(helper_seconds),
        bytes_between=between,
        writing=parts[0].writing if real else {},
        epsilon=worst.epsilon,
        condition=worst.condition,
        metric=metric,
        loss=training.loss / training.examples if training.examples else None,
        not_finite=training.not_finite + broken.total(),
        broken=dict(broken),
        clipped=cut / values if values else 0.0,
        rows_over_cap=sum(client.left_out for client in clients),
        singleton_rows=sum(p.singleton_rows(r) for p, r in zip(summed, results, strict=True)),
        groups_aborted=len(parts) - len(summed),
        excluded=dict(
            sum(
                (part.excluded(r.survivors) for part, r in zip(summed, results, strict=True)),
                Counter(),
            )
        ),
        unmasked=sum(len(part.named) for part in parts if part.plan.scheme is not plan.scheme),
        seconds=seconds,
    )


def _mean_by_category(parts: Sequence[Subcohort], which: Counted) -> dict[str, float]:
    """Bytes or seconds of a client on average over all parts of a cohort, by cost category."""
    every = sum(len(part.named) for part in parts)
    total: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        for category, mean in part.watch.by_category(which, list(part.named)).items():
            total[category] += mean * len(part.named) / every
    return dict(total)
