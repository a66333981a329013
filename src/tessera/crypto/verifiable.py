"""Verifiable point functions: both servers check that a client writes one leaf of a bin at most.

After de Castro and Polychroniadou 2021 (ia.cr/2021/580), over leaf *states*: words stay in their
ring, and what a leaf is worth is not looked at. The two servers' states are equal at all leaves but
the point's. A tag of a leaf is

    G(y) ^ t c cs        G(y): two blocks, t: the upper control bit of y, c: its position plus one

where cs, 32 bytes for each tree, is chosen by the client so that the tags at its point are equal,
too. c multiplies in GF(2^128), block by block. Each server adds up coefficient * tag over all
leaves of all bins and tables; the coefficients, 64 bits for each leaf, come from a coin that is
drawn when the keys cannot be changed any more. The sums of an honest client are equal. Those of a
client with two live leaves in a bin, or with none corrected, differ but with the probability in
docs/protocols/point-functions.md. Both servers compute the same 32 bytes, each alone, so that a
server which lies learns nothing from the comparison.

It bounds how many leaves are written, and not how large the words in them are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.crypto.dpf import Forest, KeyPair, ServerKeys
from tessera.crypto.kernel.points import TAG_BYTES
from tessera.crypto.kernel.trees import Bytes, RowSpace
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.errors import Malformed, MisuseError

SUM_BYTES: Final = TAG_BYTES
"""What a server says of one client."""

COIN_BYTES: Final = 32

Coefficients = npt.NDArray[np.uint64]


def correction_bytes(forest: Forest) -> int:
    """What a client sends for one table."""
    return TAG_BYTES * forest.trees.count


def corrections(pair: KeyPair, points: npt.NDArray[np.int64], *, report_id: bytes) -> bytes:
    """cs of every tree: (G(y0) ^ G(y1)) / c at its point; for dummies, too.

    `points` are those that the keys were made for, counted in rows; -1 is a dummy.
    """
    forest = pair.public.forest
    if points.shape != (forest.bins,):
        raise MisuseError(f"corrections: one point for each of {forest.bins} bins")
    backend, trees, shape = kernel.active(), forest.trees, forest.values.shape
    which = np.arange(trees.count)
    leaf = np.maximum(points, 0)[forest.order] // shape.rows
    tags = []
    for party, seed in enumerate(pair.seeds):
        one = ServerKeys.of(pair.public, seed, party=party, report_id=report_id)
        tags.append(backend.tags(one.trees, trees, shape, which, np.ascontiguousarray(leaf)))
    return backend.divide(tags[0] ^ tags[1], (leaf + 1).astype(np.uint64)).tobytes()


def coefficients(coin: Secret, forests: Sequence[Forest]) -> list[Coefficients]:
    """64 bits for every leaf of every tree of these forests, the same for all clients.

    One stream over all forests, in their order.
    """
    if len(coin) != COIN_BYTES:
        raise MisuseError(f"a coin is {COIN_BYTES} bytes, not {len(coin)}")
    stream = Stream.of(coin, Label.CHECK_COEFFICIENTS)
    counts = [forest.trees.total_leaves for forest in forests]
    words = np.empty(8 * sum(counts), dtype=np.uint8)
    kernel.active().keystream(stream.key, stream.nonce, 0, words)
    return np.split(words.view("<u8"), np.cumsum(counts)[:-1]) if counts else []


def check_sums(
    forest: Forest,
    keys: Sequence[ServerKeys],
    sent: Sequence[bytes | memoryview],
    factors: Coefficients,
    leaves: Bytes | RowSpace | None = None,
    *,
    part: range | None = None,
) -> Bytes:
    """One server's sums for these clients, (clients, 32): those of several forests or parts XOR.

    `sent` are their corrections. With `leaves` the clients' values are added to them in the same
    pass, as by `dpf.add_to`.
    """
    if any(one.forest is not forest for one in keys):
        raise MisuseError("check_sums: keys of another forest")
    if len({one.party for one in keys}) > 1:
        raise MisuseError("check_sums: keys of both servers")
    return kernel.active().verify(
        [one.trees for one in keys],
        forest.trees,
        forest.values.shape,
        [parsed(forest, data) for data in sent],
        factors,
        leaves=leaves,
        part=part,
    )


def parsed(forest: Forest, data: bytes | memoryview) -> Bytes:
    """Corrections as they came; Malformed for another length, and every other string is some."""
    if len(data) != correction_bytes(forest):
        raise Malformed(
            f"corrections of tags take {correction_bytes(forest)} bytes, not {len(data)}"
        )
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, TAG_BYTES)
