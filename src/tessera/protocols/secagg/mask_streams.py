"""The key streams of masks, and the secrets they come from, the same at client and server."""

from __future__ import annotations

from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, StageId, TableId


def seed_commitment(seed: Secret, context: bytes, owner: ClientId, stage: StageId) -> bytes:
    """Advertised beforehand, so that a seed recovered from wrong shares is recognised."""
    return seed.derive(Label.COMMITMENT, context, owner, stage).reveal()


def pair_secret(
    own: AgreementKey,
    peer_key: bytes,
    context: bytes,
    pair: tuple[ClientId, ClientId],
    stage: StageId,
    bound: bytes,
) -> Secret:
    """The mask secret of two clients in one stage; the same whichever of them computes it.

    `bound` is the digest of what the server sent to both (`binding.pair_binding`): two clients that
    were sent different things have different secrets.
    """
    return own.agree(peer_key, Label.PAIR_SECRET, context, stage, min(pair), max(pair), bound)


def mask_sign(me: ClientId, peer: ClientId) -> int:
    """Of two clients the one with the smaller id adds their mask, the other subtracts it."""
    return 1 if me < peer else -1


def dense_stream(key: Secret, label: Label) -> Stream:
    """The stream of a pair secret (PAIR_MASK) or a seed (SELF_MASK) over the dense words."""
    return Stream.of(key, label, "dense")


def row_stream(key: Secret, label: Label, table: TableId) -> Stream:
    """The same over the rows of a table, addressed by row position."""
    return Stream.of(key, label, "rows", table)
