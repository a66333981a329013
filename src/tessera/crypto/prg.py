"""The mask generator: (secret, label) -> uniform group vectors, from any position; sums of them.

A `Stream` is AES-128 in counter mode under a derived key and nonce
(docs/decisions/0002-mask-generator.md). Word i is at a fixed place in it, so that a mask is
addressed by (secret, label, context, position) and two clients which share a few rows expand only
those. A stream masks one vector once; the label and context say which.

In Z_2^b a mask is the low b bits of its word. In F_p, p = 2^e - 1, it is the low e bits, and where
those are all ones it is redrawn at the same place of a second stream, a third if need be: taking
the word mod p would favour zero.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto import kernel
from tessera.crypto.field import Field
from tessera.crypto.group import Group, Words
from tessera.crypto.kernel.backend import BLOCK, KEY_BYTES, NONCE_BYTES
from tessera.crypto.ring import LIMB, Ring
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError

_FIELD_CHUNK: Final = 1 << 14  # words of a field vector worked on at once


class Label(StrEnum):
    """What a derivation, a digest or a signature is for: the one list, for every layer.

    Two uses never share a label (`tests/crypto/test_labels.py`). The text is part of what is
    derived or signed, so it stays when the name of a member changes.
    """

    # A client's secrets in a round of secure sums
    PARTY_ROOT = "party root"  # entropy -> the root of all that a party draws in a round
    ROUND_ROOT = "round root"  # entropy -> all of a client's secrets in one round
    NONCE = "nonce"  # a round's root -> the public number that makes its advert unique
    COMMITMENT = "commitment"  # a self-mask seed -> the commitment that is advertised
    GRAPH = "graph"  # entropy -> a round's public seed -> the order of the sparse graph's ring
    MASK_KEY = "mask key"  # a round's root -> a stage's agreement key
    CHANNEL_KEY = "channel key"  # a round's root -> the agreement key of its sealed boxes
    SELF_SEED = "self-mask seed"  # a round's root -> a stage's self-mask seed
    SHARE_COEFFICIENTS = "share coefficients"  # a round's root -> the polynomials of its shares
    PAIR_SECRET = "pair secret"  # an agreement of mask keys -> what both derive from
    CHANNEL = "channel"  # an agreement of channel keys -> the key of a box
    PAIR_MASK = "pair mask"  # a pair secret -> the mask that one adds and the other subtracts
    SELF_MASK = "self mask"  # a self-mask seed -> the mask that survivors' shares take away
    HOLD_BACK = "hold-back"  # a round's root -> the row keys of a stage and table
    HOLD_BACK_TWEAK = "tessera hold-back"  # the public AES key that expands a client's row keys
    SECAGG_ROUND = "tessera secagg round"  # a round's parameters -> their digest
    PLAIN_ROUND = "tessera plain round"  # the same of a sum in the clear
    ADVERT = "tessera advert"  # signed: a client's public keys
    CONSISTENCY = "tessera consistency"  # signed: what a client was sent in a stage
    AGREED = "tessera agreed"  # what all clients were sent before a stage's inputs -> its digest
    OWN_VIEW = "tessera own view"  # a client's groups and the rows it was sent -> their digest
    MODEL_DIGEST = "tessera model"  # what all clients are sent of a model -> its digest

    # Groups that wait
    GROUP_CHAIN = "tessera group chain"  # a fixed group -> h_0, where its hash chain begins
    EPOCH_LINK = "tessera epoch link"  # h_(e-1) and what was received for epoch e -> h_e
    EPOCH_ROOT = "epoch root"  # entropy -> a member's secrets in one epoch
    EPOCH_MASK_KEY = "epoch mask key"  # an epoch's root -> the agreement key of its masks
    EPOCH_COINS = "epoch coins"  # an epoch's root -> the root of what a member draws in it
    EPOCH_PAIR = "epoch pair secret"  # an agreement of an epoch's mask keys -> a pair's secret
    EPOCH_MASK = "epoch pair mask"  # that -> the mask that one adds and the other subtracts
    EPOCH_MAPS = "tessera epoch maps"  # images of a union under public maps -> a digest
    EPOCH_COUNTS = "tessera epoch counts"  # what negatives are drawn and weighed by -> a digest
    DELIVERED = "tessera delivered"  # signed: what was delivered, and the next mask key
    LEFT_GROUP = "tessera left group"  # signed: a member is out of its group for good

    # A client's other randomness in a round
    UNION_COINS = "union coins"  # a round's root -> a client's words in one union
    ROUNDING = "rounding"  # a round's root -> the coins of stochastic rounding
    DECOYS = "decoys"  # a client's or a period's secret -> the decoy ids of its unions
    WHOLE_CATALOGUE = "whole table of"  # a catalogue of all ids -> its digest
    LISTED_CATALOGUE = "listed"  # a catalogue of listed ids -> its digest
    CLIENT_SECRET = "client"  # entropy -> a client's lasting secret in a federation
    OWN_ROWS = "own rows"  # that -> the first values of the rows that never leave it
    NEGATIVES = "negative rows"  # that -> rows that it takes beside its own
    SAMPLED_NEGATIVES = "sampled negatives"  # that -> items beside a client's clicks
    MASK_VALIDATION = "mask validation"  # that -> what a client's mask is not fitted to at first
    TRAINING_COINS = "training coins"  # a round's root -> what a client draws while it trains
    EXAMPLES_DRAWN = "examples drawn"  # those -> which examples it trains on
    EXAMPLE_ORDER = "example order"  # the same -> the order of its batches in a local pass
    DROPOUT_MASKS = "dropout masks"  # the same -> which units of the module are left out
    CENTRAL_COINS = "central coins"  # entropy -> what is drawn where all data is in one place
    CENTRAL_BATCH = "central batch"  # those -> dropout and negatives of one batch
    CENTRAL_NEGATIVES = "central negatives"  # a batch's -> rows beside its own in a softmax
    ROWS_KEPT = "rows kept"  # a client's secret -> which rows it keeps under the cap
    PERIOD_SECRET = "index privacy: period secret"  # entropy -> a period's secret
    PERMANENT_RESPONSE = "index privacy: permanent answer"  # a period's secret -> a word per row
    INSTANTANEOUS_RESPONSE = "index privacy: instantaneous answer"  # a round's root -> words
    PERTURBED_SET = "index privacy: perturbed real set"  # a period's secret -> a word per row
    PERIOD_ROWS_KEPT = "index privacy: rows kept under max_rows"  # the same, for the cap

    # Noise, and who is in a noisy step
    COHORT_COINS = "cohort coins"  # a leader's entropy -> who is in a round's cohort
    CLIENT_NOISE = "client noise"  # training coins -> the noise that a client adds to its update
    SERVER_NOISE = "server noise"  # entropy -> the noise of `CentralSubDP`, as printed
    STATISTIC_NOISE = "statistic noise"  # entropy -> noise on a sum that is no update
    STATISTIC_SHARE = "statistic share"  # entropy -> a client's share of its part for a helper
    SUM_NOISE = "sum noise"  # a party's root -> the noise that it adds to a round's sum
    CORRELATED_NOISE = "correlated noise"  # that -> z of a round, of which later sums have a part
    ROW_CUT = "row cut"  # training coins -> which examples a row that is protected stays in
    BATCH_COINS = "batch coins"  # the same -> who is in each step's batch
    DENSE_NOISE = "dense noise"  # the same -> noise on the dense part
    ROW_NOISE = "row noise"  # the same -> noise on the rows of a table

    # Point functions
    POINT_SEEDS = "point function seeds"  # entropy -> both servers' private parts
    KEY_PERIOD_ROOT = "two-server key period"  # entropy -> what a period's keys follow from
    CHECK_COEFFICIENTS = "point function check"  # a coin -> the coefficients of all leaves
    CHECK_SEED = "point function coins"  # the helper's root -> what its coin follows from
    CHECK_COIN = "point function coin"  # that, and a closed list of reports -> the coin
    POINT_CIPHER = "point function cipher"  # a report id -> its AES key
    POINT_DUMMIES = "point function dummies"  # a secret -> the points of dummies
    SELECTORS = "selectors"  # a secret -> the values of the functions of a retrieval
    FOREST = "tessera-1 forest"  # the shape of a forest -> its digest

    # Two servers
    SERVER_NONCE = "two-server nonce"  # entropy -> a server's nonce in the handshake
    SERVER_COMMITMENT = "tessera two-server commitment"  # the leader's nonce -> its commitment
    TWO_SERVER_ROUND = "tessera two-server round"  # a round's parameters -> their digest
    BIN_SEED = "tessera two-server seed"  # both nonces -> the seed of a round
    BINS = "tessera two-server bins"  # a round's seed -> the hash seed of a table's bins
    HEADER = "tessera two-server header"  # signed: the header of a round
    TABLE_DIGEST = "tessera two-server table digest"  # a table's rows -> their digest
    DENSE_DIGEST = "tessera two-server dense"  # the dense part -> its digest
    REPORT_ID = "two-server report id"  # entropy -> a report's public id
    TABLE_REPORT_ID = "tessera two-server table"  # a report's id -> that of one table's functions
    PUBLIC_PART = "tessera two-server public"  # the public part of a report -> its digest
    BOX = "tessera two-server box"  # the HPKE info of the helper's box
    BOX_STATEMENT = "tessera two-server box statement"  # signed: everything in that box
    ANSWER_KEY = "two-server answer key"  # entropy -> the one-time key of a query's answer
    ANSWER = "tessera two-server answer"  # the HPKE info of the helper's answer
    ANSWER_STATEMENT = "tessera two-server signed"  # signed: the helper's half of an answer
    RETRIEVAL_POINTS = "two-server aim"  # entropy -> points and values of a query, by table
    ROW_TAGS = "tessera row fingerprints"  # a round's seed -> the AES key of its row tags
    DENSE_SEED = "two-server dense seed"  # entropy -> the helper's seed of the dense share
    DENSE_SHARE = "two-server dense share"  # that seed -> the helper's share of the dense words
    INCLUDED_LIST = "tessera two-server list"  # signed: the reports of a sum
    SUM = "tessera two-server sum"  # signed: a share of the sum, or the sum

    # Groups that can be checked
    MERKLE_LEAF = "tessera tree leaf"  # a digest -> the lowest node of a tree
    MERKLE_NODE = "tessera tree node"  # two nodes -> the one above them
    MERKLE_ROOT = "tessera tree root"  # the number of leaves, the highest node -> the root
    HASH_CHAIN = "tessera hash chain"  # a value -> the one before it; the first is committed to
    SHUFFLE = "tessera shuffle"  # a public key, a size -> all rounds of a permutation
    SNAPSHOT = "tessera snapshot"  # signed: clients that are put into groups together
    BEACON_CHAIN = "tessera beacon chain"  # a federation, a party -> the context of its hash chain
    BEACON_SECRET = "beacon secret"  # entropy -> the last value of that chain
    BEACON_VALUE = "tessera beacon value"  # signed: a value, for one snapshot
    BEACON = "tessera beacon"  # both values, the snapshot -> the key of the permutation

    # Long-term keys, and what engines draw
    IDENTITY = "identity"  # entropy -> a client's signing key
    SERVER_KEY = "server key"  # entropy -> the signing and sealing keys of a server
    SEALING_KEY = "sealing-key"  # entropy -> a fresh sealing key
    PSEUDONYMS = "pseudonyms"  # entropy -> what clients are called in a round
    TRAINING = "tessera training"  # all that noise is sized by -> the digest that clients keep
    SCHEDULE = "tessera schedule"  # a public seed -> the order of clients in a schedule
    SCHEDULE_SEED = "schedule-seed"  # entropy -> that seed, once everybody is registered
    SIMULATED_SCHEDULE = "tessera simulated schedule"  # a plan's seed -> that seed
    SCHEDULE_DIGEST = "tessera schedule digest"  # places -> the digest of a schedule
    FIXED_GROUPS = "tessera fixed groups"  # a public salt, a client's id -> its place in an order
    SERVER_MODEL = "tessera server model"  # a server's model and what its step remembers -> digest
    BUNDLE = "tessera bundle"  # a plan and its first model -> the digest of a deployment
    CATALOGUE = "tessera catalogue"  # ids by row, and what is said of them -> its digest
    CODE = "tessera code"  # a package's files -> the digest by which a bundle names it
    ID_KEY = "key of hashed ids"  # entropy -> the key under which a federation hashes its ids
    AUTHORITY = "authority key"  # entropy -> the key that signs a deployment's directory
    DIRECTORY = "tessera directory"  # signed: everybody's public keys
    REQUEST = "tessera request"  # signed: a request to the leader
    OFFERED_ROW = "tessera offered row"  # an account's key -> a row of its data, an id of a group
    CHARGED_TRAINING = "tessera charged training"  # an account's key -> a person, a training
    MEASUREMENT = "plan"  # entropy -> keys with which `tessera plan` measures this machine

    # Below and above the protocols
    REDRAW = "redraw"  # a stream -> the stream for the words it rejected
    AGREEMENT_SALT = "tessera-1 x25519"  # the salt of HKDF-Extract over an agreement
    SCRIPTED_ENTROPY = "tessera-1 scripted entropy, for tests only"  # a test's seed -> its root
    PUBLIC_DRAWS = "public draws"  # a plan's seed and public numbers -> what an attacker tries
    CANARIES = "canaries"  # entropy -> which canaries of an audit are in, and their noise
    LAZY_ROWS = "tessera rows 1"  # a table's seed and name -> the key of its initial rows
    OWN_RATINGS = "tessera own ratings"  # a client's ratings -> how its simulation splits them
    HASHED_IDS = "tessera interactions"  # the public key under which ids of a file are hashed


@dataclass(frozen=True, slots=True)
class Stream:
    """A key stream's name: block c is AES-128_key(nonce || c as 8 bytes big-endian)."""

    key: bytes = field(repr=False)
    nonce: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.nonce) != NONCE_BYTES:
            raise MisuseError(f"a stream has {KEY_BYTES} bytes of key and {NONCE_BYTES} of nonce")

    @classmethod
    def of(cls, secret: Secret, label: str, *context: int | bytes | str) -> Stream:
        """The stream that this secret has for this use."""
        material = secret.derive(label, *context, size=KEY_BYTES + NONCE_BYTES).reveal()
        return cls(material[:KEY_BYTES], material[KEY_BYTES:])

    def redraw(self, attempt: int) -> Stream:
        """The stream that replaces rejected words of this one, at the same positions.

        HMAC-SHA-256 under all 192 bits of this stream's name, so it is independent of it.
        """
        tweak = f"tessera-1 {Label.REDRAW} {attempt}".encode()
        material = hmac.digest(self.key + self.nonce, tweak, "sha256")
        return Stream(material[:KEY_BYTES], material[KEY_BYTES : KEY_BYTES + NONCE_BYTES])


def uniform(group: Group, stream: Stream, count: int, *, start: int = 0) -> Words:
    """Words start .. start + count of the stream: `uniform(start=k)` equals `uniform()[k:]`."""
    if count < 0 or start < 0:
        raise MisuseError(f"uniform: {count} words from {start} on")
    first_block, skip = divmod(start * group.word_bytes, BLOCK)
    raw = np.empty(skip + count * group.word_bytes, dtype=np.uint8)
    kernel.active().keystream(stream.key, stream.nonce, first_block, raw)
    words: Words = raw[skip:].view(group.dtype).reshape(count, *group.limbs)
    if isinstance(group, Field):
        line = words.reshape(1, count)
        _reject(group, stream, line, np.array([first_block], dtype=LIMB), skip // group.word_bytes)
    else:
        _ring(group).reduce(words)
    return words


def uniform_rows(
    group: Group, stream: Stream, positions: npt.NDArray[np.uint64], width: int
) -> Words:
    """These rows of the stream, each `width` words: an array of shape (rows, width, *limbs).

    Row j begins at block j * ceil(width * word_bytes / 16), so a row's mask depends on its own
    position only, and on the width that both sides know.
    """
    positions = _row_numbers(positions)
    rows = group.zeros((positions.size, width))
    _add_rows(group, rows, width, [stream], [1], [np.arange(positions.size)], [positions])
    if isinstance(group, Field):
        row_blocks = -(-width * group.word_bytes // BLOCK)
        _reject(group, stream, rows, positions * LIMB.type(row_blocks), 0)
    else:
        _ring(group).reduce(rows)
    return rows


def accumulate(
    group: Group,
    acc: Words,
    streams: Sequence[Stream],
    signs: Sequence[int],
    *,
    start: int = 0,
) -> None:
    """acc += sum of sign * (words start, start + 1, ... of each stream), reduced, in place.

    `acc` is a contiguous array of shape (count, *limbs).
    """
    _check_acc(group, acc, 1)
    if len(streams) != len(signs):
        raise MisuseError(f"accumulate: {len(streams)} streams and {len(signs)} signs")
    if isinstance(group, Field):
        _accumulate_field(group, acc, streams, signs, start)
        return
    keys, nonces = _joined(streams)
    kernel.active().accumulate(acc, group.word_bytes, keys, nonces, signs, start)
    _ring(group).reduce(acc)


def accumulate_rows(
    group: Group,
    acc: Words,
    streams: Sequence[Stream],
    signs: Sequence[int],
    index: Sequence[npt.NDArray[Any]],
    positions: Sequence[npt.NDArray[np.uint64]],
) -> None:
    """acc[index[p][i]] += signs[p] * (row positions[p][i] of streams[p]), reduced, in place.

    `acc` is a contiguous array of shape (rows, width, *limbs); index[p] has no repeats. One call
    for all pairs of a client is the fast way: a pair often shares only a handful of rows.
    """
    _check_acc(group, acc, 2)
    if not len(streams) == len(signs) == len(index) == len(positions):
        raise MisuseError("accumulate_rows: streams, signs, index and positions differ in length")
    if isinstance(group, Field):
        for stream, sign, chosen, rows in zip(streams, signs, index, positions, strict=True):
            _accumulate_field_rows(group, acc, stream, sign, chosen, rows)
        return
    _add_rows(group, acc, acc.shape[1], streams, signs, index, positions)
    _ring(group).reduce(acc)


# Rings: the kernel adds unreduced words, and one pass at the end reduces.


def _add_rows(
    group: Group,
    acc: Words,
    width: int,
    streams: Sequence[Stream],
    signs: Sequence[int],
    index: Sequence[npt.NDArray[Any]],
    positions: Sequence[npt.NDArray[np.uint64]],
) -> None:
    """acc[index] += sign * rows modulo 2^(8 * word_bytes), for all streams in one kernel call."""
    counts = [len(part) for part in index]
    if counts != [len(part) for part in positions]:
        raise MisuseError("accumulate_rows: each index needs one row position")
    chosen = [_row_indices(part) for part in index]
    rows = [_row_numbers(part) for part in positions]
    keys, nonces = _joined(streams)
    kernel.active().accumulate_rows(
        acc,
        width,
        group.word_bytes,
        keys,
        nonces,
        signs,
        counts,
        np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64),
        np.concatenate(rows) if rows else np.empty(0, dtype=np.uint64),
    )


# Fields: words are drawn first, because a rejected one must be redrawn before it counts.


def _reject(
    group: Field,
    stream: Stream,
    rows: Words,
    first_blocks: npt.NDArray[np.uint64],
    skip: int,
) -> None:
    """Keep the low bits of raw words, in place, and redraw those that are all ones.

    Column 0 of row i is word `skip` of block first_blocks[i]. Every element has probability 1/p
    exactly: each attempt is uniform over 2^e values, of which one is refused.
    """
    p = group.dtype.type(group.order)
    np.bitwise_and(rows, p, out=rows)
    row, column = np.nonzero(rows == p)
    lanes = BLOCK // group.word_bytes
    attempt = 0
    while row.size:
        attempt += 1
        block = first_blocks[row] + ((column + skip) // lanes).astype(LIMB)
        drawn = group.zeros((row.size, lanes))
        again = stream.redraw(attempt)
        _add_rows(group, drawn, lanes, [again], [1], [np.arange(row.size)], [block])
        words = drawn[np.arange(row.size), (column + skip) % lanes] & p
        rows[row, column] = words
        row, column = row[words == p], column[words == p]


def _accumulate_field(
    group: Field, acc: Words, streams: Sequence[Stream], signs: Sequence[int], start: int
) -> None:
    """Sum in 64 bits and reduce only when the next word might not fit."""
    if any(sign not in (1, -1) for sign in signs):
        raise MisuseError("a sign is +1 or -1")
    for begin in range(0, acc.size, _FIELD_CHUNK):
        part = acc[begin : begin + _FIELD_CHUNK]
        total, held = part.astype(LIMB), 1
        for stream, sign in zip(streams, signs, strict=True):
            words = uniform(group, stream, part.size, start=start + begin)
            if held == group.headroom:
                total, held = group.fold(total), 1
            np.add(total, words if sign > 0 else group.dtype.type(group.order) - words, out=total)
            held += 1
        part[...] = group.fold(total)


def _accumulate_field_rows(
    group: Field,
    acc: Words,
    stream: Stream,
    sign: int,
    index: npt.NDArray[Any],
    positions: npt.NDArray[np.uint64],
) -> None:
    chosen = _row_indices(index)
    if len(chosen) != len(positions) or np.unique(chosen).size != chosen.size:
        raise MisuseError("accumulate_rows: each index once, and one row position for it")
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < acc.shape[0]:
        raise MisuseError(f"accumulate_rows: an index is outside the {acc.shape[0]} rows")
    if sign not in (1, -1):
        raise MisuseError("a sign is +1 or -1")
    masks = uniform_rows(group, stream, positions, acc.shape[1])
    combine = group.add if sign > 0 else group.sub
    acc[chosen] = combine(acc[chosen], masks)


def _check_acc(group: Group, acc: Words, axes: int) -> None:
    if acc.ndim != axes + len(group.limbs) or not acc.flags.c_contiguous:
        raise MisuseError(f"{group.name}: the sum is not a contiguous array of {axes} axes + limbs")
    if not group.contains(acc):
        raise MisuseError(f"{group.name}: the sum holds words that are not the group's")


def _ring(group: Group) -> Ring:
    if not isinstance(group, Ring):
        raise MisuseError(f"no masks are defined in {group.name}")
    return group


def _row_indices(index: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    array = np.asarray(index)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise MisuseError("accumulate_rows: an index is a flat array of integers")
    return array.astype(np.int64, copy=False)


def _row_numbers(positions: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    array = np.asarray(positions)
    if array.ndim != 1 or (array.size and array.dtype != np.uint64):
        raise MisuseError("row positions are a flat array of uint64")
    return np.ascontiguousarray(array, dtype=np.uint64)


def _joined(streams: Sequence[Stream]) -> tuple[bytes, bytes]:
    return b"".join(s.key for s in streams), b"".join(s.nonce for s in streams)


# --- coins ----------------------------------------------------------------------------------------
#
# Words of one key stream in order, and coins made of them.


class WordReader:
    """The words of one stream, in order; none is read twice."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.block = 0

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """The next words; a block has two, and one that was begun is not gone on with."""
        words = _read(self._stream, self.block, count)
        self.block += -(-count // 2)
        return words

    def second_words(self, block: int, count: int) -> npt.NDArray[np.uint64]:
        """More words for those that were read at this block, from a stream of their own."""
        return _read(self._stream.redraw(1), block, count)


def _read(stream: Stream, block: int, count: int) -> npt.NDArray[np.uint64]:
    words = np.empty(count, dtype=np.uint64)
    kernel.active().keystream(stream.key, stream.nonce, block, words.view(np.uint8))
    return words


class CoinStream(WordReader):
    """Independent coins out of one stream; its words also serve to order or cut by chance."""

    def heads(self, count: int, probability: float) -> npt.NDArray[np.bool_]:
        """Which of `count` coins fall on a side of this probability, rounded down to 2^-64."""
        words = self.words(count)
        if probability >= 1.0:
            return np.ones(count, dtype=np.bool_)
        return words < np.uint64(int(probability * 2**64))

    def permutation(self, count: int) -> npt.NDArray[np.int64]:
        """The numbers below `count` in an order by chance: two equal words have 2^-64 each."""
        return np.argsort(self.words(count), kind="stable")

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Numbers from [0, 1), multiples of 2^-53."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
