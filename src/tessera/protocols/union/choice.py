"""Choice: which encoding a union uses, by expected bytes unless the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from tessera.errors import ConfigError
from tessera.protocols.union import bloom, decoys, sizing
from tessera.protocols.union.bloom import BloomFilter, Intervals
from tessera.protocols.union.encoding import UnionEncoding, check_domain
from tessera.protocols.union.sumtable import SumTable


class EncodingChoice(StrEnum):
    """What a plan may ask for."""

    AUTO = "auto"
    BLOOM = "bloom"
    SUM_TABLE = "sum-table"


def choose(
    domain: int,
    cohort: int,
    max_rows: int,
    *,
    expected_union: int | None = None,
    partitions: Sequence[Intervals] = (),
    encoding: EncodingChoice = EncodingChoice.AUTO,
    decoy_share: float = decoys.SHARE,
    false_positive_rate: float = bloom.FALSE_POSITIVE_RATE,
    false_negative_rate: float = bloom.FALSE_NEGATIVE_RATE,
    seed: int = 0,
) -> UnionEncoding:
    """The encoding for a cohort whose clients hold at most `max_rows` ids each, decoys apart.

    Everything here is public. `expected_union` is an estimate from earlier unions (which had
    their decoys in them); without it the table is sized for the worst case, where no two clients
    share an id. The rates and partitions are the Bloom filter's.
    """
    check_domain(domain)
    rows = max_rows + decoys.decoy_count(max(0, max_rows), decoy_share)
    capacity = sizing.union_bound(domain, cohort, rows, expected_union)

    def filter_() -> BloomFilter:
        return BloomFilter.sized(
            domain,
            capacity,
            partitions=partitions,
            false_positive_rate=false_positive_rate,
            false_negative_rate=false_negative_rate,
            seed=seed,
        )

    if encoding is EncodingChoice.BLOOM:
        return filter_()
    table = SumTable.sized(domain, capacity, seed=seed)
    if encoding is EncodingChoice.SUM_TABLE:
        return table
    try:
        candidates: list[UnionEncoding] = [filter_(), table]
    except ConfigError:  # partitions too coarse to scan: the table needs none
        return table
    return min(candidates, key=lambda candidate: candidate.expected_bytes)
