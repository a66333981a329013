"""The transcript of a round: statements that clients sign, and digests that keys are bound to.

Every derived key and every signed statement names the round's context digest (federation, round,
plan hash and all parameters), so that nothing made for one round is valid in another. What is made
once the roster is known also names the roster: a client that is reset to its first state and given
another roster shares with other polynomials and seals with other keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.crypto.keys import verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import MisuseError
from tessera.ids import ClientId, StageId, TableId
from tessera.protocols.secagg.messages import Advert, Member, Roster, RowGroups, Rows, StageKeys
from tessera.protocols.secagg.params import SecAggParams
from tessera.wire.index_set import JoinedSets


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


# --- what pair masks are bound to -----------------------------------------------------------------
#
# Digests of what each client was sent before its input.
#
# A pair mask cancels only if both clients derive the same one. The derivation names what everybody
# was sent alike, and for rows the values of those that the two share, *as each of them received
# it* (Pasquini, Francati, Ateniese 2022, arXiv 2111.07380, propose this for the model's
# parameters). A server that gives two honest clients different things gets inputs whose masks stay
# on. It costs no byte, since nothing is compared: nobody has to tell anybody what it received.
#
# A role knows digests only; what they are of is its caller's affair.


DIGEST_BYTES: Final = 32
NOTHING: Final = bytes(DIGEST_BYTES)
"""In place of a digest, where nothing was sent."""

NO_VIEW: Final = bytes(DIGEST_BYTES)
"""In place of a client's view of its groups, in a stage without tables or without signatures."""

Digests = npt.NDArray[np.uint8]
"""One digest a row, shape (rows, 32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """Digests of what the server sent a client for an input, made from the bytes that came.

    `common` is of what all clients are sent alike. `rows` has for a table one digest for each of
    the client's included rows, in their order; a table that is missing was sent no values.
    """

    common: bytes = field(default=NOTHING, repr=False)
    rows: Mapping[TableId, Digests] = field(default_factory=dict, repr=False)

    def row_digests(self, table: TableId, included: Rows) -> Digests:
        found = self.rows.get(table)
        return _no_digests(len(included)) if found is None else found

    def check(self, included: Mapping[TableId, Rows]) -> None:
        """Our caller's digests: of the right size, and as many as there are rows."""
        if len(self.common) != DIGEST_BYTES:
            raise MisuseError(f"a digest of {len(self.common)} bytes; it has {DIGEST_BYTES}")
        for table, digests in self.rows.items():
            if table not in included:
                raise MisuseError(f"digests of table {table}, which the stage does not have")
            due = (len(included[table]), DIGEST_BYTES)
            if digests.dtype != np.uint8 or digests.shape != due:
                raise MisuseError(f"table {table}: {digests.shape} digests where {due} are due")


class SentDigests(Protocol):
    """The same digests at the server, of what it sent.

    It is asked only where masks have to be derived again, those with clients that dropped out, and
    in the active setting for the common digest.
    """

    def common(self, stage: StageId) -> bytes:
        """Of what all clients were sent alike for this stage's input."""

    def rows(self, stage: StageId, table: TableId, positions: Rows) -> Digests:
        """Of the values of these rows, in this order."""


class NothingSent:
    """For sums whose inputs do not follow from anything that the server sent."""

    def common(self, stage: StageId) -> bytes:
        return NOTHING

    def rows(self, stage: StageId, table: TableId, positions: Rows) -> Digests:
        return _no_digests(len(positions))


def agreed_digest(context: bytes = NOTHING, common: bytes = NOTHING) -> bytes:
    """What all clients of a sum agree on: the caller's context (the union) and what they were sent.

    All pair masks of a stage are derived from it, and in the active setting it is signed.
    """
    return hashlib.sha256(encode_context(Label.AGREED, context, common)).digest()


def shared_digest(digests: Digests, index: npt.NDArray[Any]) -> bytes:
    """Of the rows at these places, in this order."""
    return hashlib.sha256(digests.take(index, axis=0).tobytes()).digest()


def pair_binding(agreed: bytes, shared: Iterable[tuple[TableId, bytes]] = ()) -> bytes:
    """What the masks of two clients are bound to.

    Beside what all agree on these are, by table, the digests of the rows that the two share: of
    tables in which they share none there is no digest. All parts have a fixed length.
    """
    parts = [part for table, digest in shared for part in (table.to_bytes(2, "big"), digest)]
    return hashlib.sha256(b"".join([agreed, *parts])).digest()


def pair_bindings(
    agreed: bytes,
    received: Received,
    peers: Iterable[ClientId],
    *,
    included: Mapping[TableId, Rows],
    shared: Mapping[TableId, Mapping[ClientId, Rows]],
) -> dict[ClientId, bytes]:
    """The same for each peer of one client; `shared` has places among the included rows."""
    found: dict[ClientId, list[tuple[TableId, bytes]]] = {c: [] for c in peers}
    for table in sorted(shared):
        digests = received.row_digests(table, included[table])
        joined, known = JoinedSets.of(shared[table]), dict[int, bytes]()
        for peer, number in zip(joined, joined.numbers.tolist(), strict=True):
            if number not in known:  # peers with the same rows have one set
                known[number] = shared_digest(digests, joined.numbered(number))
            found[peer].append((table, known[number]))
    return {c: pair_binding(agreed, parts) for c, parts in found.items()}


def view_digest(groups: RowGroups, received: Received) -> bytes:
    """A client's own groups, and the values it was sent of their rows: what it signs of both."""
    rows = [
        part for table in sorted(received.rows) for part in (table, received.rows[table].tobytes())
    ]
    return hashlib.sha256(encode_context(Label.OWN_VIEW, wire.digest(groups), *rows)).digest()


def _no_digests(rows: int) -> Digests:
    return np.zeros((rows, 0), dtype=np.uint8)
