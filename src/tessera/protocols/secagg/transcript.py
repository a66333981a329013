"""The transcript of a round: statements that clients sign, and digests that keys are bound to.

Every derived key and every signed statement names the round's context digest (federation, round,
plan hash and all parameters), so that nothing made for one round is valid in another. What is made
once the roster is known also names the roster: a client that is reset to its first state and given
another roster shares with other polynomials and seals with other keys.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.keys import verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.ids import ClientId, StageId
from tessera.protocols.secagg.messages import Advert, Member, Roster, StageKeys
from tessera.protocols.secagg.params import SecAggParams


@lru_cache(maxsize=16)  # every transition of a round needs it, for the same roster
def roster_digest(roster: Roster) -> bytes:
    """Covers every member's keys and nonces, and the graph's seed."""
    return wire.digest(roster)


def roster_context(params: SecAggParams, roster: Roster) -> bytes:
    """A digest of the round and its roster; coefficients, boxes and pair secrets depend on it."""
    return hashlib.sha256(params.context + roster_digest(roster)).digest()


def box_nonce_and_data(
    context: bytes, stage: StageId, sender: ClientId, receiver: ClientId
) -> tuple[bytes, bytes]:
    """(nonce, associated data) of a box. The key is fresh per roster, pair and direction."""
    nonce = int(stage).to_bytes(12, "big")
    return nonce, encode_context(context, stage, sender, receiver)


def advert_statement(
    context: bytes, sender: ClientId, channel: bytes, nonce: bytes, stages: tuple[StageKeys, ...]
) -> bytes:
    """What a client signs of its public keys."""
    keys = [part for stage in stages for part in (stage.mask_key, stage.commitment)]
    return encode_context(Label.ADVERT, context, sender, channel, nonce, *keys)


def advert_is_signed(advert: Advert | Member, context: bytes, public: bytes | None) -> bool:
    """Whether these keys are signed with that client's key in the directory."""
    sender = advert.sender if isinstance(advert, Advert) else advert.client
    statement = advert_statement(context, sender, advert.channel_key, advert.nonce, advert.stages)
    return public is not None and verify(public, advert.signature, statement)


def consistency_statement(
    params: SecAggParams,
    roster: bytes,
    stage: StageId,
    agreed: bytes,
    own_view: bytes,
    survivors: npt.NDArray[np.uint64],
) -> bytes:
    """What a client signs before it reveals a share: everything the server sent it in this stage.

    `roster` is the roster's digest, `agreed` that of the union and of what everybody was sent of
    the model. Federation, round and plan hash are in the context digest too; they are repeated in
    the clear so that a signature can be read without the parameters. A client knows its own groups
    and rows only, so `own_view` is different for each; docs/protocols/secagg.md says why that
    suffices.
    """
    return encode_context(
        Label.CONSISTENCY,
        params.federation,
        params.round_id,
        params.plan_hash,
        params.context,
        roster,
        stage,
        agreed,
        own_view,
        survivors.astype("<u8").tobytes(),
    )
