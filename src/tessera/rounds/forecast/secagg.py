"""SecAggTraffic: the messages of one client in a secure sum, by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.group import Group
from tessera.crypto.shamir import SHARE_BYTES
from tessera.ids import ClientId, RoundId, StageId, TableId
from tessera.protocols.secagg import messages
from tessera.protocols.secagg.params import SecAggParams, Threat
from tessera.rounds.forecast.rows import TableForecast

# --- sizes ----------------------------------------------------------------------------------------
#
# Lengths of messages that are built to the expected sizes and encoded.
#
# So a forecast cannot drift from the wire format.


ROUND: Final = RoundId(1)


def some(count: float, of: int) -> npt.NDArray[np.uint64]:
    """`count` places out of `of`, as a random set would lie: its encoding has a typical length."""
    wanted = min(round(count), of)
    rng = np.random.default_rng(0)
    if wanted * 2 < of:
        found = np.unique(rng.integers(of, size=wanted, dtype=np.uint64))
        while len(found) < wanted:
            more = rng.integers(of, size=wanted - len(found), dtype=np.uint64)
            found = np.union1d(found, more)
        return found
    return np.sort(rng.permutation(of)[:wanted]).astype(np.uint64)


def length(message: Any) -> float:
    return float(len(wire.encode(message)))


def carried(*sizes: int) -> float:
    """Bytes that fields of these lengths add to a message in which they were empty."""
    return float(sum(size + max(0, (size.bit_length() + 6) // 7 - 1) for size in sizes))


# --- secagg ---------------------------------------------------------------------------------------

KEY: Final = bytes(32)
PEERS_SAMPLED: Final = 40


@dataclass(frozen=True)
class SecAggTraffic:
    """What a client and the server send each other, in bytes."""

    params: SecAggParams

    def keys_up(self) -> Iterator[tuple[str, float]]:
        boxes = dict.fromkeys(self._others, (bytes(messages.BOX_BYTES),) * len(self.params.stages))
        yield (
            "keys",
            length(
                messages.Advert(
                    round_id=ROUND,
                    sender=ClientId(0),
                    context=KEY,
                    channel_key=KEY,
                    nonce=KEY,
                    stages=self._stage_keys,
                    signature=self._signature,
                )
            ),
        )
        yield "keys", length(messages.ShareBoxes(round_id=ROUND, sender=ClientId(0), boxes=boxes))

    def keys_down(self) -> Iterator[tuple[str, float]]:
        member = messages.Member(
            client=ClientId(0),
            channel_key=KEY,
            nonce=KEY,
            stages=self._stage_keys,
            signature=self._signature,
        )
        boxes = dict.fromkeys(self._others, (bytes(messages.BOX_BYTES),) * len(self.params.stages))
        roster = messages.Roster(
            round_id=ROUND, graph_seed=KEY, members=(member,) * self.params.cohort
        )
        yield "keys", length(roster)
        yield (
            "keys",
            length(messages.ForwardedShares(round_id=ROUND, sharers=self._everybody, boxes=boxes)),
        )

    def masked(self, dense: int, *tables: int) -> float:
        frame = messages.MaskedInput(
            round_id=ROUND,
            stage=StageId(0),
            sender=ClientId(0),
            dense=b"",
            tables=(b"",) * len(tables),
        )
        return length(frame) + carried(dense, *tables)

    def unmask_up(self) -> Iterator[float]:
        if self._active:
            yield length(
                messages.ConsistencySignature(
                    round_id=ROUND,
                    stage=StageId(0),
                    sender=ClientId(0),
                    groups=KEY,
                    signature=bytes(64),
                )
            )
        yield self.shares({})

    def shares(self, row_keys: dict[TableId, bytes]) -> float:
        own = [ClientId(0)] if self.params.topology.complete else []
        return length(
            messages.RevealedShares(
                round_id=ROUND,
                stage=StageId(0),
                sender=ClientId(0),
                self_masks=dict.fromkeys([*own, *self._others], bytes(SHARE_BYTES)),
                mask_keys={},
                row_keys=row_keys,
            )
        )

    def unmask_down(self) -> Iterator[float]:
        yield length(
            messages.SurvivorList(round_id=ROUND, stage=StageId(0), survivors=self._everybody)
        )
        if self._active:
            signed = messages.Endorsement(groups=KEY, signature=bytes(64))
            yield length(
                messages.ConsistencyProof(
                    round_id=ROUND,
                    stage=StageId(0),
                    endorsements={ClientId(c): signed for c in range(self.params.cohort)},
                )
            )

    def row_groups(self, tables: tuple[TableForecast, ...]) -> float:
        """One client's groups, with some of its peers drawn at random and the rest like them."""
        rng = np.random.default_rng(0)  # which rows does not matter, only how densely they lie
        peers = self.params.cohort - 1
        sampled = min(peers, PEERS_SAMPLED)
        size = 0.0
        for i, f in enumerate(tables):
            included = round(f.included)
            shared = {
                ClientId(c): np.flatnonzero(rng.random(included) < f.shared).astype(np.uint64)
                for c in range(sampled)
            }
            shared = {c: rows for c, rows in shared.items() if len(rows)}
            head, full = (
                length(
                    messages.RowGroups(
                        round_id=ROUND,
                        stage=StageId(1),
                        tables=(
                            messages.TableGroups(
                                table=TableId(i),
                                included=some(f.included, round(f.revealed)),
                                shared=groups,
                            ),
                        ),
                    )
                )
                for groups in ({}, shared)
            )
            size += head + (full - head) * peers / sampled
        frame = length(messages.RowGroups(round_id=ROUND, stage=StageId(1), tables=()))
        return size - (len(tables) - 1) * frame

    @property
    def _active(self) -> bool:
        return self.params.threat is Threat.ACTIVE

    @property
    def _signature(self) -> bytes:
        return bytes(64) if self._active else b""

    @property
    def _stage_keys(self) -> tuple[messages.StageKeys, ...]:
        return (messages.StageKeys(mask_key=KEY, commitment=KEY),) * len(self.params.stages)

    @property
    def _others(self) -> list[ClientId]:
        return [ClientId(c) for c in range(1, self.params.topology.degree + 1)]

    @property
    def _everybody(self) -> npt.NDArray[np.uint64]:
        return np.arange(self.params.cohort, dtype=np.uint64)


# --- work -----------------------------------------------------------------------------------------
#
# Work: what the masked sums of a round make processors do.


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
