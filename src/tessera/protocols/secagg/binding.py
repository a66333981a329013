"""What keys, boxes and signatures are bound to, in one place for both sides.

Every derived key and every signed statement names the round's context digest (federation, round,
plan hash and all parameters), so that nothing made for one round means anything in another. What is
made once the roster is known names the roster as well: a client put back to its first state and
given another roster shares with other polynomials and seals under other keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tessera.crypto.keys import AgreementKey, SigningKey, verify
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret, encode_context
from tessera.ids import ClientId, StageId, TableId
from tessera.protocols import wire
from tessera.protocols.secagg.messages import Advert, Member, Roster, StageKeys
from tessera.protocols.secagg.params import SecAggParams

NO_GROUPS = bytes(32)
"""Stands where a stage without tables has no groups to sign."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A client's long-term signing key, and everybody's public one: the active setting's roots."""

    key: SigningKey = field(repr=False)
    directory: Mapping[ClientId, bytes] = field(repr=False)


def commitment(seed: Secret, context: bytes, owner: ClientId, stage: StageId) -> bytes:
    """Advertised beforehand, so that a seed put together from bad shares is recognised."""
    return seed.derive(Label.COMMITMENT, context, owner, stage).reveal()


def pair_key(
    mine: AgreementKey,
    peer_key: bytes,
    context: bytes,
    pair: tuple[ClientId, ClientId],
    stage: StageId,
) -> Secret:
    """The mask secret of two clients in one stage; the same whichever of them computes it."""
    return mine.agree(peer_key, Label.PAIR_SECRET, context, stage, min(pair), max(pair))


def sign_of(me: ClientId, peer: ClientId) -> int:
    """Of two clients the one with the smaller id adds their mask, the other subtracts it."""
    return 1 if me < peer else -1


def dense_stream(key: Secret, label: Label) -> Stream:
    """The stream of a pair secret (PAIR_MASK) or a seed (SELF_MASK) over the dense words."""
    return Stream.of(key, label, "dense")


def row_stream(key: Secret, label: Label, table: TableId) -> Stream:
    """The same over the rows of a table, addressed by row position."""
    return Stream.of(key, label, "rows", table)


def box_binding(
    context: bytes, stage: StageId, sender: ClientId, receiver: ClientId
) -> tuple[bytes, bytes]:
    """(nonce, associated data) of a box. The key is fresh per roster, pair and direction."""
    nonce = int(stage).to_bytes(12, "big")
    return nonce, encode_context(context, stage, sender, receiver)


def advert_statement(
    context: bytes, sender: ClientId, channel: bytes, nonce: bytes, stages: tuple[StageKeys, ...]
) -> bytes:
    keys = [part for stage in stages for part in (stage.mask_key, stage.commitment)]
    return encode_context("tessera advert", context, sender, channel, nonce, *keys)


def advert_is_signed(advert: Advert | Member, context: bytes, public: bytes | None) -> bool:
    """Whether these keys are really that client's, by its key in the directory."""
    sender = advert.sender if isinstance(advert, Advert) else advert.client
    statement = advert_statement(context, sender, advert.channel_key, advert.nonce, advert.stages)
    return public is not None and verify(public, advert.signature, statement)


def consistency_statement(
    params: SecAggParams,
    roster_digest: bytes,
    stage: StageId,
    union_digest: bytes,
    groups_digest: bytes,
    survivors: npt.NDArray[np.uint64],
) -> bytes:
    """What a client signs before it reveals a share: everything it was told in this stage.

    Federation, round and plan hash are in the context digest too; they stand here in the open so
    that a signature can be read without the parameters. A client is told its own groups only, so
    that the groups digest is of its own view; see docs/protocols/secagg.md for why that suffices.
    """
    return encode_context(
        "tessera consistency",
        params.federation,
        params.round_id,
        params.plan_hash,
        params.context,
        roster_digest,
        stage,
        union_digest,
        groups_digest,
        survivors.astype("<u8").tobytes(),
    )


@lru_cache(maxsize=16)  # every transition of a round asks again, with the same roster
def digest_of(roster: Roster) -> bytes:
    """Covers every member's keys and nonces, and the graph's seed."""
    return wire.digest(roster)


def roster_context(params: SecAggParams, roster: Roster) -> bytes:
    """A digest of the round and its roster: what coefficients, boxes and pair keys are bound to."""
    return hashlib.sha256(params.context + digest_of(roster)).digest()
