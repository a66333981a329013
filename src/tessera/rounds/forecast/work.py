"""Work: what the masked sums of a round make processors do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.crypto.group import Group
from tessera.protocols.secagg.params import SecAggParams
from tessera.rounds.forecast.rows import TableForecast


@dataclass(frozen=True, slots=True)
class MaskWork:
    """Keystream that one stage takes, in its own group."""

    group: Group
    client_bytes: float  # of one client
    server_bytes: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a round makes processors do, to be weighed with a machine's own figures."""

    agreements: float  # Diffie-Hellman operations of one client, a mask's stream derived from each
    boxes: float  # sealed and unsealed by one client
    masks: tuple[MaskWork, ...]  # by stage
    openings: float  # secrets that the server puts together from shares


def masked_sums(params: SecAggParams, tables: Sequence[TableForecast], dropout: float) -> Work:
    """The work of a round's secure sums, if this share of the cohort drops out."""
    degree, stages, n = params.topology.degree, params.stages, params.cohort
    gone = dropout * n
    masks = []
    for stage in stages:
        own = pairs = masked_bytes(stage.group, stage.dense)
        pairs *= degree
        for f, spec in zip(tables, stage.tables, strict=False):
            rows = masked_bytes(stage.group, f.included * spec.width)
            own, pairs = own + rows, pairs + rows * f.shared * (n - 1)
        masks.append(MaskWork(stage.group, own + pairs, (n - gone) * own + gone * pairs))
    return Work(
        agreements=degree * (1 + len(stages)),
        boxes=2 * degree * len(stages),
        masks=tuple(masks),
        openings=n * len(stages),
    )


def masked_bytes(group: Group, words: float) -> float:
    """Keystream behind so many words of a mask."""
    return words * group.word_bytes
