"""Two keys add up to the point function; one says nothing; what is not a key is refused."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vectors
from tessera.crypto import dpf, kernel
from tessera.crypto.cuckoo import Layout, SimpleTable, bins_for
from tessera.crypto.dpf import BITS, SELECTORS, Forest, KeyPair, PublicKeys, ServerKeys, Values
from tessera.crypto.entropy import ScriptedEntropy, SystemEntropy
from tessera.crypto.field import Field
from tessera.crypto.group import Group, group_from_name
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError, Malformed, MisuseError, TrailingBytes, Truncated

each_backend = pytest.mark.parametrize("name", kernel.available())

GROUPS = [Ring(17), Ring(32), Ring(40), Ring(64), Ring(100), Ring(128), Field(61)]
VALUES = st.builds(Values, st.sampled_from(GROUPS), st.integers(1, 4) | st.sampled_from([19, 33]))
REPORT = bytes(range(32))


def drawn(group: Group, shape: tuple[int, ...], seed: int) -> Any:
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    extremes = [0, 1, group.order - 1, group.order // 2]
    ints = [extremes[i % 4] if i % 3 == 0 else int(rng.integers(2**62)) ** 2 for i in range(count)]
    return group.from_ints(ints).reshape(*shape, *group.limbs)


def keys(forest: Forest, points: Any, values: Any, seed: bytes = b"") -> KeyPair:
    report = hashlib.sha256(seed).digest()
    return dpf.gen(
        forest, np.array(points), values, report_id=report, entropy=ScriptedEntropy(seed)
    )


def servers(pair: KeyPair, seed: bytes = b"") -> tuple[ServerKeys, ServerKeys]:
    """As the servers have them: from the wire."""
    data = pair.public.to_bytes()
    public = PublicKeys.from_bytes(pair.public.forest, data)
    report = hashlib.sha256(seed).digest()
    first, second = (
        ServerKeys.of(public, pair.seeds[party], party=party, report_id=report) for party in (0, 1)
    )
    return first, second


@each_backend
@settings(max_examples=40)
@given(
    values=VALUES,
    sizes=st.lists(
        st.integers(0, 40) | st.sampled_from([64, 65, 700, 2100]) | st.integers(1, 9000),
        min_size=1,
        max_size=12,
    ).filter(lambda sizes: sum(sizes) < 12_000),
    seed=st.integers(0, 2**32),
)
def test_shares_add_up_to_the_point_functions(
    name: str, values: Values, sizes: list[int], seed: int
) -> None:
    """Any bins, empty ones too: at every position the truth, whole or point by point."""
    group = values.group
    assert group is not None
    rng = np.random.default_rng(seed)
    forest = Forest.of(np.array(sizes), values)
    points = [int(rng.integers(-1, size)) if size else -1 for size in sizes]
    betas = drawn(group, (len(sizes), values.words), seed)
    with kernel.use(name):
        both = servers(keys(forest, points, betas))
        total = group.zeros((forest.trees.total_leaves * values.per_leaf, values.stride))
        for one in both:
            words = forest.words(dpf.evaluate(forest, [one])).copy()
            if isinstance(group, Ring):
                group.reduce(words)
            group.iadd(total, group.neg(words) if one.party else words)
        for bin_, (size, point) in enumerate(zip(sizes, points, strict=True)):
            if not size:
                continue
            here = np.full(size, bin_), np.arange(size)
            expected = group.zeros((size, values.words))
            if point >= 0:
                expected[point] = betas[bin_]
            assert np.array_equal(total[forest.slots(*here)][:, : values.words], expected)
            single = [dpf.evaluate_points(one, *here) for one in both]
            assert np.array_equal(group.add(*single), expected)


@each_backend
@settings(max_examples=30)
@given(
    values=VALUES,
    rows=st.integers(3, 120),
    share=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    stash=st.integers(0, 2),
    clients=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_the_sum_over_clients_is_the_sum_of_their_rows(
    name: str, values: Values, rows: int, share: float, stash: int, clients: int, seed: int
) -> None:
    """k = 0 and k = m among them; in leaf space, scattered once, signed once."""
    group = values.group
    assert group is not None
    k = round(share * rows)
    table = SimpleTable.of(rows, bins_for(max(k, 1), stash=stash), seed, stash=stash)
    layout = Layout.of(table, values)
    truth = group.zeros((rows, values.words))
    held: list[list[ServerKeys]] = [[], []]
    with kernel.use(name):
        for client in range(clients):
            own = np.random.default_rng([seed, client]).permutation(rows)[:k]
            updates = drawn(group, (k, values.words), seed + client)
            truth[own] = group.add(truth[own], updates)
            placement = table.place(own)
            assert placement.left_out.size == 0
            pair = keys(layout.forest, placement.points, layout.spread(placement, updates), b"x")
            for party, one in enumerate(servers(pair, b"x")):
                held[party].append(one)
        leaves = [dpf.evaluate(layout.forest, one) for one in held]
        shares = [layout.rows(leaves[party], party) for party in (0, 1)]
        for party, one in enumerate(held):  # the same without a leaf space
            space = layout.row_space(party)
            dpf.add_to(layout.forest, one, space)
            assert np.array_equal(layout.row_words(space), shares[party])
    assert np.array_equal(group.add(*shares), truth)
    assert all(group.contains(share) for share in shares)


@each_backend
@settings(max_examples=30)
@given(
    rows=st.integers(3, 400),
    k=st.integers(0, 20),
    width=st.integers(1, 100),
    stash=st.integers(0, 2),
    values=st.sampled_from([BITS, SELECTORS]),
    seed=st.integers(0, 2**32),
)
def test_retrieved_rows_are_the_tables_bit_for_bit(
    name: str, rows: int, k: int, width: int, stash: int, values: Values, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    content = rng.integers(0, 256, (rows, width), dtype=np.uint8)
    table = SimpleTable.of(rows, bins_for(20, stash=stash), seed, stash=stash)
    layout = Layout.of(table, values)
    own = rng.permutation(rows)[:k]
    placement = table.place(own)
    chosen = dpf.retrieval_points(layout.forest, placement.points, Secret(bytes(32)))
    assert np.array_equal(layout.rows_at(chosen.points)[placement.bins], own)
    with kernel.use(name):
        padded = layout.padded(content)
        both = servers(keys(layout.forest, chosen.points, chosen.values))
        first, second = (layout.answer([one] * 2, padded, width)[0] for one in both)
    assert np.array_equal(first[0], first[1])
    assert np.array_equal((first[0] ^ second[0])[placement.bins], content[own])
    bins = placement.bins
    points = [dpf.evaluate_points(one, bins, placement.points[bins]) for one in both]
    assert np.array_equal(
        points[0] ^ points[1],
        np.ones((own.size, 1)) if chosen.values is None else chosen.values[bins],
    )


@each_backend
@settings(max_examples=20)
@given(rows=st.integers(3, 300), stash=st.integers(0, 1), seed=st.integers(0, 2**32))
def test_products_of_both_servers_are_the_words_times_the_factors(
    name: str, rows: int, stash: int, seed: int
) -> None:
    factors = np.random.default_rng(seed).integers(0, 256, (rows, 16), dtype=np.uint8)
    table = SimpleTable.of(rows, bins_for(9, stash=stash), seed, stash=stash)
    layout = Layout.of(table, SELECTORS)
    chosen = dpf.retrieval_points(layout.forest, np.full(layout.forest.bins, -1), Secret(bytes(32)))
    assert chosen.values is not None
    with kernel.use(name):
        padded = layout.padded(factors)
        both = servers(keys(layout.forest, chosen.points, chosen.values))
        first, second = (layout.answer([one], padded, 16, padded)[1][0] for one in both)
    for bin_, row in enumerate(layout.rows_at(chosen.points)):
        due = [0, 0]
        for half in range(2) if row >= 0 else ():
            factor = int.from_bytes(factors[row, 8 * half :][:8].tobytes(), "little")
            for bit in range(64):  # schoolbook, in Python's integers
                due[half] ^= (int(chosen.values[bin_, 0]) >> bit & 1) * factor << bit
        products = (first ^ second)[bin_].tobytes()
        assert [
            int.from_bytes(products[:16], "little"),
            int.from_bytes(products[16:], "little"),
        ] == due


def test_selectors_are_odd_and_fill_their_word() -> None:
    forest = Forest.of(np.full(4000, 8), SELECTORS)
    chosen = dpf.retrieval_points(forest, np.full(4000, -1), Secret(bytes(32)))
    assert chosen.values is not None
    assert np.array_equal(chosen.values & np.uint64(1), np.ones((4000, 1)))
    set_bits = (chosen.values >> np.arange(1, 64, dtype=np.uint64) & np.uint64(1)).sum(axis=0)
    assert np.abs(set_bits.astype(np.int64) - 2000).max() < 6 * np.sqrt(
        1000
    )  # each of 63: one time in 10^9
    again = dpf.retrieval_points(forest, np.full(4000, -1), Secret(bytes(32)))
    assert np.array_equal(again.points, chosen.points) and np.array_equal(
        again.values, chosen.values
    )
    other = dpf.retrieval_points(forest, np.full(4000, -1), Secret(bytes(31) + b"1"))
    assert not np.any(other.values == chosen.values)


@each_backend
def test_a_dummy_of_retrieval_points_anywhere(name: str) -> None:
    forest = Forest.of(np.full(4000, 8), BITS)
    with kernel.use(name):
        chosen = dpf.retrieval_points(forest, np.full(4000, -1), Secret(bytes(32)))
        both = servers(keys(forest, chosen.points, None))
        bits = np.bitwise_xor(*(dpf.evaluate(forest, [one]) for one in both))[:, 0]
    assert set(bits.tolist()) == {1 << i for i in range(8)}
    counts = np.bincount(bits)[1 << np.arange(8)]
    assert ((counts - 500) ** 2 / 500).sum() < 50  # 7 degrees of freedom: one time in 10^8


def test_parts_of_the_trees_add_up_to_all_of_them() -> None:
    forest = Forest.of(np.arange(1, 60), Values(Ring(32), 3))
    one, _ = servers(keys(forest, np.zeros(59, np.int64), drawn(Ring(32), (59, 3), 1)))
    whole = dpf.evaluate(forest, [one, one])
    for count in (1, 2, 3, 7, 100):
        leaves, parts = forest.empty(), forest.parts(count)
        assert [t for part in parts for t in part] == list(range(59))
        for part in parts:
            dpf.evaluate(forest, [one, one], leaves, part=part)
        assert np.array_equal(leaves, whole)


def test_equal_entropy_gives_equal_keys_and_another_report_others() -> None:
    forest = Forest.of(np.array([9, 3]), Values(Ring(32)))
    beta = drawn(Ring(32), (2, 1), 0)
    make = lambda report, seed: dpf.gen(  # noqa: E731
        forest, np.array([3, 1]), beta, report_id=report, entropy=ScriptedEntropy(seed)
    )
    first, again = make(REPORT, b"a"), make(REPORT, b"a")
    assert first.public.to_bytes() == again.public.to_bytes() and first.seeds == again.seeds
    for other in (make(REPORT, b"b"), make(bytes(32), b"a")):
        assert other.public.to_bytes() != first.public.to_bytes() and other.seeds != first.seeds


def test_the_aes_key_belongs_to_the_report() -> None:
    """With another report id the same bytes are other functions: nothing is shared by reports."""
    forest = Forest.of(np.array([40]), Values(Ring(64)))
    pair = keys(forest, [7], drawn(Ring(64), (1, 1), 3))
    here, there = (
        ServerKeys.of(pair.public, pair.seeds[0], party=0, report_id=report)
        for report in (REPORT, bytes(32))
    )
    assert not np.any(dpf.evaluate(forest, [here]) == dpf.evaluate(forest, [there]), axis=1).all()
    assert here.trees.key != there.trees.key


# What one server sees.


@pytest.mark.slow
@pytest.mark.parametrize("party", [0, 1])
def test_one_servers_view_does_not_depend_on_point_or_value(party: int) -> None:
    """A classifier on every bit of key and leaves, trained on half of the runs, guesses the rest.

    3,000 keys for (point 0, value 0), 3,000 for (point 5, a large value), of which half are for
    training. A guess is right half of the time up to chance: over five standard deviations off
    happens once in 1.7 million runs of this test.
    """
    values = Values(Ring(32))
    forest = Forest.of(np.array([11]), values)
    samples = {}
    for label, (point, beta) in enumerate([(0, 0), (5, 0xDEADBEEF)]):
        views = []
        for _ in range(3000):
            report = SystemEntropy().secret("report").reveal()
            pair = dpf.gen(
                forest,
                np.array([point]),
                np.full((1, 1), beta, dtype=np.uint32),
                report_id=report,
                entropy=SystemEntropy(),
            )
            one = ServerKeys.of(pair.public, pair.seeds[party], party=party, report_id=report)
            leaves = dpf.evaluate(forest, [one])
            view = pair.public.to_bytes()[16:] + pair.seeds[party].reveal() + leaves.tobytes()
            views.append(np.unpackbits(np.frombuffer(view, dtype=np.uint8)))
        samples[label] = np.array(views, dtype=np.float64) - 0.5
    train = {label: views[:1500] for label, views in samples.items()}
    weights = train[1].mean(axis=0) - train[0].mean(axis=0)
    threshold = (train[1].mean(axis=0) + train[0].mean(axis=0)) @ weights / 2
    right = sum(
        int(((views[1500:] @ weights > threshold) == bool(label)).sum())
        for label, views in samples.items()
    )
    assert abs(right - 1500) < 5 * (3000 * 0.25) ** 0.5
    # and no single bit is off: 4.5 sigma for each, with a correction for their number
    for views in samples.values():
        off = np.abs(views.mean(axis=0)) * 2 * views.shape[0] ** 0.5
        varying = views.std(axis=0) > 0
        assert off[varying].max() < 5.5
        assert (~varying).sum() <= 8  # padding of the packed bits, and nothing else


def test_the_distinguisher_sees_a_planted_leak() -> None:
    """The same classifier on a view that has both servers' seeds tells the two apart."""
    forest = Forest.of(np.array([4]), Values(Ring(32)))
    seen = []
    for point in (0, 3):
        both = servers(keys(forest, [point], np.full((1, 1), 9, dtype=np.uint32)))
        total = np.subtract(*(forest.words(dpf.evaluate(forest, [one])) for one in both))
        seen.append(total.ravel().tolist())
    assert seen[0] == [9, 0, 0, 0] and seen[1] == [0, 0, 0, 9]


def test_sizes_on_the_wire_depend_on_the_forest_alone() -> None:
    values = Values(Ring(22), 5)
    forest = Forest.of(np.array([4, 0, 9, 100]), values)
    sizes = set()
    for point in (-1, 0, 3):
        pair = keys(forest, [point, -1, point, point], drawn(Ring(22), (4, 5), point + 1))
        sizes.add(len(pair.public.to_bytes()))
        assert all(len(seed) == dpf.SEED_BYTES for seed in pair.seeds)
    steps = 2 + 4 + 7
    assert sizes == {forest.public_bytes} == {16 + 16 * steps + -(-3 * 5 * 22 // 8)}


# What is refused.


def test_keys_of_anything_else_are_refused() -> None:
    values = Values(Ring(32), 2)
    forest = Forest.of(np.array([9, 3]), values)
    data = keys(forest, [3, 1], drawn(Ring(32), (2, 2), 0)).public.to_bytes()
    PublicKeys.from_bytes(forest, data)
    for other in (
        Forest.of(np.array([10, 3]), values),  # same depth, other domain
        Forest.of(np.array([17, 3]), values),  # one level more
        Forest.of(np.array([9, 3, 3]), values),
        Forest.of(np.array([3, 9]), values),
        Forest.of(np.array([9, 3]), Values(Ring(64), 1)),  # the same number of bytes
        Forest.of(np.array([9, 3]), Values(Ring(32), 3)),
        Forest.of(np.array([9, 3]), BITS),
    ):
        with pytest.raises(Malformed, match="another domain, depth, count or value type"):
            PublicKeys.from_bytes(other, data)
    with pytest.raises(Truncated):
        PublicKeys.from_bytes(forest, data[:-1])
    with pytest.raises(TrailingBytes):
        PublicKeys.from_bytes(forest, data + b"\0")
    for short in (b"", data[:15]):
        with pytest.raises(Malformed):
            PublicKeys.from_bytes(forest, short)


def test_padding_and_unreduced_words_are_refused() -> None:
    forest = Forest.of(np.array([9]), Values(Field(61)))
    data = keys(forest, [3], drawn(Field(61), (1, 1), 0)).public.to_bytes()
    finals_at = 16 + 16 * forest.trees.total_steps
    order = (2**61 - 1 | (2**61 - 1) << 61).to_bytes(16, "little")
    with pytest.raises(Malformed, match="order"):
        PublicKeys.from_bytes(forest, data[:finals_at] + order)
    last = bytearray(data)
    last[-1] |= 0x80
    with pytest.raises(Malformed, match="padding"):
        PublicKeys.from_bytes(forest, bytes(last))


GOOD = {"points": np.array([3, -1, 0]), "values": np.zeros((3, 2), np.uint32), "report_id": REPORT}


@pytest.mark.parametrize(
    "wrong",
    [
        {"points": np.array([9, -1, 0])},
        {"points": np.array([-2, -1, 0])},
        {"points": np.array([3, 0, 0])},  # a row in an empty bin
        {"points": np.array([3, -1])},
        {"points": np.array([3.0, -1, 0])},
        {"values": None},
        {"values": np.zeros((3, 3), np.uint32)},
        {"values": np.zeros((3, 2), np.uint64)},
        {"values": np.full((3, 2), 2**20, np.uint32)},
        {"report_id": bytes(31)},
    ],
)
def test_gen_refuses_what_does_not_fit(wrong: dict[str, Any]) -> None:
    forest = Forest.of(np.array([9, 0, 1]), Values(Ring(20), 2))
    dpf.gen(forest, **GOOD, entropy=ScriptedEntropy(b""))
    with pytest.raises(MisuseError):
        dpf.gen(forest, **GOOD | wrong, entropy=ScriptedEntropy(b""))


@pytest.mark.parametrize(
    "words",
    [None, np.ones((2, 1), np.uint64), np.ones((1, 1), np.int64), np.zeros((1, 1), np.uint64)],
)
def test_gen_refuses_words_that_do_not_select(words: Any) -> None:
    forest = Forest.of(np.array([9]), SELECTORS)
    keys(forest, [3], np.ones((1, 1), np.uint64))
    with pytest.raises(MisuseError):
        keys(forest, [3], words)


def test_bits_have_no_values_and_words_fetch_nothing() -> None:
    bits, words = (Forest.of(np.array([9]), v) for v in (BITS, Values(Ring(32))))
    with pytest.raises(MisuseError, match="no values"):
        keys(bits, [3], np.zeros((1, 1), np.uint32))
    one, two = servers(keys(words, [3], np.zeros((1, 1), np.uint32)))
    with pytest.raises(MisuseError, match="writing"):
        dpf.retrieval_points(words, np.array([3]), Secret(bytes(32)))
    with pytest.raises(MisuseError, match="has no point"):
        keys(bits, [-1], None)
    with pytest.raises(MisuseError, match="both servers"):
        dpf.evaluate(words, [one, two])
    with pytest.raises(MisuseError, match="another forest"):
        dpf.evaluate(bits, [one])
    for bin_, position in ((1, 0), (-1, 0), (0, 9), (0, -1)):
        with pytest.raises(MisuseError):
            dpf.evaluate_points(one, np.array([bin_]), np.array([position]))
    with pytest.raises(MisuseError, match="party 2"):
        ServerKeys.of(keys(bits, [0], None).public, Secret(bytes(24)), party=2, report_id=REPORT)
    with pytest.raises(MisuseError, match="24 bytes"):
        ServerKeys.of(keys(bits, [0], None).public, Secret(bytes(32)), party=1, report_id=REPORT)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Values(Ring(16)),
        lambda: Values(Field(31)),
        lambda: Values(Ring(32), 0),
        lambda: Values(None, 2),
        lambda: Values(None, bits=8),
    ],
)
def test_values_that_trees_do_not_carry_are_a_config_error(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("sizes", [[-1], [[1]], [2**31]])
def test_a_forest_of_impossible_bins_is_refused(sizes: list[int]) -> None:
    with pytest.raises(MisuseError):
        Forest.of(np.array(sizes), BITS)


def test_keys_do_not_print() -> None:
    forest = Forest.of(np.array([9]), BITS)
    pair = keys(forest, [3], None)
    text = repr(pair) + repr(servers(pair))
    assert pair.seeds[0].reveal().hex() not in text and "array" not in text
    assert repr(servers(pair)[0].trees) == "TreeKeys()"


# Known answers, computed without tessera.


@pytest.mark.parametrize("vector", vectors.load("dpf.json"), ids=lambda v: v.name)
@each_backend
def test_known_answers(name: str, vector: SimpleNamespace) -> None:
    group = None if vector.group is None else group_from_name(vector.group)
    values = Values(group, vector.words, vector.bits)
    forest = Forest.of(np.array(vector.sizes), values)
    with vectors.expectation(vector), kernel.use(name):
        if vector.kind == "gen":
            betas = None
            if group is not None:
                betas = group.from_ints([int(v) for row in vector.betas for v in row])
                betas = betas.reshape(len(vector.sizes), vector.words, *group.limbs)
            elif vector.bits > 1:
                betas = np.array([[int(v) for v in row] for row in vector.betas], np.uint64)
            pair = dpf.gen(
                forest,
                np.array(vector.points),
                betas,
                report_id=vector.report_id,
                entropy=_Given(vector.seeds),
            )
            assert pair.public.to_bytes() == vector.public
        public = PublicKeys.from_bytes(forest, vector.public)
        for party in (0, 1):
            seed = Secret(vector.seeds[24 * party :][:24])
            one = ServerKeys.of(public, seed, party=party, report_id=vector.report_id)
            for bin_, shares in enumerate(vector.shares[party]):
                here = np.full(len(shares), bin_), np.arange(len(shares))
                got = dpf.evaluate_points(one, *here)
                words = got.ravel().tolist() if group is None else group.to_ints(got)
                assert words == [int(v) for row in shares for v in row]


class _Given:
    """Entropy that gives the seeds of a vector."""

    def __init__(self, seeds: bytes) -> None:
        self.seeds = seeds

    def secret(self, label: str, *context: Any, size: int = 32) -> Secret:
        return Secret(self.seeds[:size] if "seeds" in label else bytes(size))
