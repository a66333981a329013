"""A client writes one leaf of a bin, or the servers' sums differ; and every rule of it is needed.

Attacks are on states of leaves, which a dishonest client may choose in ways that keys from `gen` do
not: `said` is the check by its definition, one leaf at a time, with each rule to be switched off.
It is compared with the kernels on keys that nobody generated, where all kinds of states occur.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.crypto import dpf, kernel, verifiable
from tessera.crypto.dpf import SELECTORS, Forest, ServerKeys, Values
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.kernel.points_reference import (
    Hash,
    _inverse,
    _product,
    _reduced,
    grown,
    tweaks,
)
from tessera.crypto.kernel.reference import Reference
from tessera.crypto.kernel.trees import Kind, LeafShape, TreeKeys, Trees
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.errors import Malformed, MisuseError

REFERENCE = Reference()
each_backend = pytest.mark.parametrize("name", kernel.available())
RUNS = 1000
LEAVES, BINS = 5, 3
ONES = (1 << 128) - 1
LOW, UPPER = 1 << 63, 1 << 127  # the control bits
COIN = Secret(bytes(range(32)))


# The check by its definition.


@dataclass(frozen=True)
class Rules:
    """All of them hold; a test switches one off."""

    coefficients: bool = True  # off: a plain XOR of tags
    position: str = "factor"  # "none": c = 1; "tweak": in H's tweak, and c = 1
    halves: bool = False  # each half of a correction by its own control bit
    per_leaf: bool = True  # off: one coefficient for a position, whatever the bin
    bits: int = 64  # of each half of G that are kept


ALL_RULES = Rules()


class States:
    """Both servers' states of one client, bin by bin, and its corrections."""

    def __init__(self, rng: np.random.Generator, rules: Rules = ALL_RULES) -> None:
        self.rng, self.rules = rng, rules
        self.hash = Hash(rng.bytes(16))
        self.seen: dict[tuple[int, int], tuple[int, ...]] = {}
        self.states = [[self.block()] * 2 for _ in range(BINS * LEAVES)]
        self.r = [int(x) for x in rng.integers(1, 2**63, BINS * LEAVES)]
        self.cs = [(0, 0)] * BINS
        for b in range(BINS):
            self.make_live(b, int(rng.integers(LEAVES)))

    def block(self) -> int:
        return int.from_bytes(self.rng.bytes(16), "little")

    def make_live(self, b: int, leaf: int) -> None:
        """As an honest client does it: states that differ, control bits too, and a cs for them."""
        offset = self.block() | LOW | UPPER
        self.put(b, leaf, self.block(), offset)
        self.point = getattr(self, "point", {}) | {b: leaf}
        c = self.factor(leaf)
        self.cs[b] = tuple(quotient(d, c) for d in self.differences(b, leaf))

    def put(self, b: int, leaf: int, state: int, offset: int) -> None:
        self.states[b * LEAVES + leaf] = [state, state ^ offset]

    def other(self, b: int) -> int:
        """A leaf of the bin that is not its point."""
        return (self.point[b] + 1 + int(self.rng.integers(LEAVES - 1))) % LEAVES

    def factor(self, leaf: int) -> int:
        return leaf + 1 if self.rules.position == "factor" else 1

    def g(self, state: int, leaf: int) -> tuple[int, ...]:
        known = state, leaf
        if known not in self.seen:
            self.seen[known] = self._g(state, leaf)
        return self.seen[known]

    def _g(self, state: int, leaf: int) -> tuple[int, ...]:
        place = leaf + 1 if self.rules.position == "tweak" else 0
        y = np.array([state % 2**64, state >> 64], dtype=np.uint64)
        keep = (1 << self.rules.bits) - 1
        out = []
        for block in (0, 1):
            tweak = np.array([block << 32 | place, 2 << 56], dtype=np.uint64)
            low, high = self.hash(y, tweak).tolist()
            out.append((low & keep) | (high & keep) << 64)
        return tuple(out)

    def differences(self, b: int, leaf: int) -> tuple[int, ...]:
        first, second = (self.g(state, leaf) for state in self.states[b * LEAVES + leaf])
        return tuple(x ^ y for x, y in zip(first, second, strict=True))

    def switched(self, state: int, correction: int) -> int:
        if not self.rules.halves:
            return correction if state & UPPER else 0
        kept = (correction % 2**64 if state & LOW else 0) | (
            correction >> 64 << 64 if state & UPPER else 0
        )
        return kept

    def said(self, party: int) -> tuple[int, int]:
        """The sums of one server."""
        total = [0, 0]
        for b in range(BINS):
            for leaf in range(LEAVES):
                r = self.r[leaf if not self.rules.per_leaf else b * LEAVES + leaf]
                state = self.states[b * LEAVES + leaf][party]
                for block, g in enumerate(self.g(state, leaf)):
                    scaled = times(self.factor(leaf), self.cs[b][block])
                    tag = g ^ self.switched(state, scaled)
                    total[block] ^= times(r if self.rules.coefficients else 1, tag)
        return total[0], total[1]

    def passes(self) -> bool:
        return self.said(0) == self.said(1)


def times(a: int, b: int) -> int:
    return _reduced(_product(a, b))


def quotient(a: int, c: int) -> int:
    return times(a, _inverse(c))


def passing(attack: Callable[[States], None], rules: Rules = ALL_RULES, runs: int = RUNS) -> int:
    """How many of these clients get through."""
    count = 0
    for run in range(runs):
        client = States(np.random.default_rng([7, run]), rules)
        attack(client)
        count += client.passes()
    return count


@each_backend
@pytest.mark.parametrize("clients", [1, 3])
def test_the_kernel_does_what_the_definition_says(name: str, clients: int) -> None:
    """On random roots and steps, so that states of all kinds occur, also in the control bits."""
    shape, trees = LeafShape(Kind.ADD32, words=5, bits=32), Trees.of(np.full(BINS, LEAVES))
    for run in range(30):
        client = States(np.random.default_rng([1, run]))
        key = client.rng.bytes(16)
        client.hash, client.seen = Hash(key), {}
        public = np.frombuffer(client.rng.bytes(trees.key_bytes(shape)), dtype=np.uint8)
        cs = np.frombuffer(client.rng.bytes(32 * BINS), dtype=np.uint8).reshape(BINS, 32)
        client.cs = [
            tuple(int.from_bytes(row[16 * i :][:16].tobytes(), "little") for i in (0, 1))
            for row in cs
        ]
        both = [
            TreeKeys(key, np.frombuffer(client.rng.bytes(16 * BINS), "u1").reshape(-1, 16), public)
            for _ in (0, 1)
        ]
        nodes = [grown(one, trees, range(BINS)).tolist() for one in both]
        client.states = [
            [low | high << 64 for low, high in pair] for pair in zip(*nodes, strict=True)
        ]
        r = np.array(client.r, dtype=np.uint64)
        with kernel.use(name) as backend:
            for party, one in enumerate(both):
                found = backend.verify([one] * clients, trees, shape, [cs] * clients, r)
                due = b"".join(part.to_bytes(16, "little") for part in client.said(party))
                assert [row.tobytes() for row in found] == [due] * clients


# 1,000 of 1,000 each.


def test_honest_clients_pass() -> None:
    assert passing(lambda client: None) == RUNS


def test_two_rows_in_a_bin_are_caught() -> None:
    def second_row(client: States) -> None:
        client.put(1, client.other(1), client.block(), client.block() | LOW | UPPER)

    assert passing(second_row) == 0


@pytest.mark.parametrize("bit", [LOW, UPPER], ids=["lower", "upper"])
def test_a_state_that_differs_only_in_a_control_bit_is_caught(bit: int) -> None:
    assert passing(lambda client: client.put(1, client.other(1), client.block(), bit)) == 0


def test_corrections_of_two_bins_swapped_are_caught() -> None:
    def swap(client: States) -> None:
        client.cs[0], client.cs[1] = client.cs[1], client.cs[0]

    assert passing(swap) == 0


def test_one_correction_solved_for_two_rows_is_caught_by_the_coefficients() -> None:
    """A plain XOR of tags asks for one equation in cs, which has one."""

    def solve(client: States) -> None:
        first, second = client.point[1], client.other(1)
        client.put(1, second, client.block(), client.block() | LOW | UPPER)
        both = zip(client.differences(1, first), client.differences(1, second), strict=True)
        c = client.factor(first) ^ client.factor(second)
        client.cs[1] = tuple(quotient(x ^ y, c) for x, y in both)

    assert passing(solve, Rules(coefficients=False)) == RUNS
    assert passing(solve) == 0


def test_crafted_equal_states_at_two_leaves_are_caught_by_the_position() -> None:
    def repeat(client: States) -> None:
        client.states[LEAVES + client.other(1)] = list(client.states[LEAVES + client.point[1]])

    assert passing(repeat, Rules(position="none")) == RUNS
    assert passing(repeat) == 0


def test_states_shifted_by_the_difference_of_two_tweaks_are_caught_by_the_factor() -> None:
    """The position in H's tweak binds nothing: H(y ^ d, w ^ d) = H(y, w) ^ d, for both states."""

    def shift(client: States) -> None:
        first, second = client.point[1], client.other(1)
        difference = (first + 1) ^ (second + 1)
        client.states[LEAVES + second] = [
            state ^ difference for state in client.states[LEAVES + first]
        ]

    assert passing(shift, Rules(position="tweak")) == RUNS
    assert passing(shift) == 0


def test_two_leaves_live_in_one_half_each_are_caught_by_one_control_bit_for_all() -> None:
    """With G cut to two bits a half, so that a half collides after some tries.

    Half by half, the lower half of cs corrects a leaf whose lower control bits differ, and the
    upper half another one whose upper ones do.
    """
    bits, tries = 2, 1024

    def colliding(client: States, leaf: int, bit: int) -> None:
        """States that differ in this control bit, and whose G differ in its half and no other.

        The upper half of 2 cs, at leaf 1, begins with a zero: so has the difference there.
        """
        own, other = (0, 1) if bit == LOW else (1, 0)
        first, second = (client.rng.integers(0, 2**63, (tries, 2), np.uint64) for _ in (0, 1))
        second[:, own] |= np.uint64(1 << 63)
        keep = np.uint64((1 << bits) - 1)
        found = np.stack(
            [
                (client.hash(first, tweak) ^ client.hash(second, tweak)) & keep
                for tweak in tweaks(2, 2)
            ],
            axis=1,
        )  # (tries, block, half)
        good = (found[:, :, other] == 0).all(axis=1) & (found[:, :, own] != 0).any(axis=1)
        if bit == UPPER:
            good &= (found[:, :, own] & np.uint64(1) == 0).all(axis=1)
        at = int(np.flatnonzero(good)[0])
        state, changed = (int(y[0]) | int(y[1]) << 64 for y in (first[at], second[at]))
        client.put(1, leaf, state, state ^ changed)

    def live_in_halves(client: States) -> None:
        client.put(1, client.point[1], client.block(), 0)
        colliding(client, 0, LOW)
        colliding(client, 1, UPPER)
        both = zip(client.differences(1, 0), client.differences(1, 1), strict=True)
        client.cs[1] = tuple(joined(x % 2**64, y >> 64) for x, y in both)

    assert passing(live_in_halves, Rules(halves=True, bits=bits)) == RUNS
    assert passing(live_in_halves, Rules(bits=bits)) == 0


def joined(low: int, high: int) -> int:
    """x whose lower half is `low` and for which the upper half of 2 x is `high`."""
    assert not low >> 63 and not high & 1
    return low | high >> 1 << 64


def test_equal_differences_in_two_bins_are_caught_by_a_coefficient_for_each_leaf() -> None:
    def same_twice(client: States) -> None:
        leaf = next(i for i in range(LEAVES) if i not in (client.point[0], client.point[1]))
        state, offset = client.block(), client.block() & ~UPPER
        client.put(0, leaf, state, offset)
        client.put(1, leaf, state, offset)

    assert passing(same_twice, Rules(per_leaf=False)) == RUNS
    assert passing(same_twice) == 0


@pytest.mark.parametrize("right", [True, False])
def test_a_server_that_shifts_its_state_is_told_the_same_whether_it_guessed_right(
    right: bool,
) -> None:
    def shift(client: States) -> None:
        leaf = client.point[1] if right else client.other(1)
        client.states[LEAVES + leaf][0] ^= client.block() | 1

    assert passing(shift) == 0


# With keys from `gen`.


def client_of(forest: Forest, seed: int) -> Any:
    """(points, keys of both servers, corrections) of an honest client, dummies among its bins."""
    rng = np.random.default_rng(seed)
    points = np.array([int(rng.integers(-1, size)) if size else -1 for size in forest.sizes])
    report, values = rng.bytes(32), None
    group = forest.values.group
    if group is None:
        chosen = dpf.retrieval_points(forest, points, Secret(rng.bytes(32)))
        points, values = chosen.points, chosen.values
    else:
        values = group.from_ints(rng.integers(0, 2**16, forest.bins * forest.values.words))
        values = values.reshape(forest.bins, forest.values.words, *group.limbs)
    pair = dpf.gen(forest, points, values, report_id=report, entropy=SystemEntropy())
    both = [
        ServerKeys.of(pair.public, seed_, party=party, report_id=report)
        for party, seed_ in enumerate(pair.seeds)
    ]
    return points, both, verifiable.corrections(pair, points, report_id=report)


@each_backend
@settings(max_examples=25)
@given(
    values=st.sampled_from([Values(Ring(32)), Values(Ring(22), 19), Values(Ring(128)), SELECTORS]),
    sizes=st.lists(st.integers(0, 60) | st.integers(500, 2500), min_size=1, max_size=6),
    clients=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    cut=st.floats(0, 1),
)
def test_kernels_agree_sums_of_honest_clients_are_equal_and_values_come_along(
    name: str, values: Values, sizes: list[int], clients: int, seed: int, cut: float
) -> None:
    forest = Forest.of(np.array(sizes), values)
    some = [client_of(forest, seed + c) for c in range(clients)]
    factors = verifiable.coefficients(COIN, [forest])[0]
    bound = round(cut * forest.trees.count)
    parts = [range(bound), range(bound, forest.trees.count)]
    with kernel.use(name):
        for party in (0, 1):
            keys, sent = [one[1][party] for one in some], [one[2] for one in some]
            leaves = forest.empty()
            sums = np.bitwise_xor(
                *(verifiable.check_sums(forest, keys, sent, factors, leaves, part=p) for p in parts)
            )
            with kernel.use("reference"):
                due = verifiable.check_sums(forest, keys, sent, factors)
            assert np.array_equal(sums, due)
            assert np.array_equal(leaves, dpf.evaluate(forest, keys))
            if party == 0:
                first = sums
        assert np.array_equal(first, sums)
        for points, _, sent in some:
            assert len(sent) == verifiable.correction_bytes(forest) == 32 * forest.trees.count
            assert points.size == forest.bins


@each_backend
@given(
    divisors=st.lists(st.integers(1, 2**64 - 1) | st.integers(1, 999), min_size=1, max_size=20),
    seed=st.integers(0, 2**32),
)
def test_quotients_times_divisors_are_the_values(name: str, divisors: list[int], seed: int) -> None:
    raw = np.random.default_rng(seed).bytes(32 * len(divisors))
    values = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 32)
    with kernel.use(name) as backend:
        found = backend.divide(values, np.array(divisors, dtype=np.uint64))
    for divisor, value, result in zip(divisors, values, found, strict=True):
        for half in (slice(0, 16), slice(16, 32)):
            due = int.from_bytes(value[half].tobytes(), "little")
            assert times(divisor, int.from_bytes(result[half].tobytes(), "little")) == due


def test_a_changed_correction_or_key_shows() -> None:
    forest = Forest.of(np.array([9, 40, 700]), Values(Ring(32), 3))
    _, both, sent = client_of(forest, 3)
    factors = verifiable.coefficients(COIN, [forest])[0]
    good = verifiable.check_sums(forest, [both[0]], [sent], factors)
    for place in (0, 33, len(sent) - 1):
        odd = bytearray(sent)
        odd[place] ^= 4
        sums = [verifiable.check_sums(forest, [one], [bytes(odd)], factors) for one in both]
        assert not np.array_equal(*sums)
        assert not any(np.array_equal(one, good) for one in sums)


def test_coefficients_differ_over_leaves_tables_and_coins() -> None:
    forests = [Forest.of(np.array([300, 20]), Values(Ring(64))), Forest.of([70], SELECTORS)]
    found = np.concatenate(verifiable.coefficients(COIN, forests))
    assert found.size == sum(f.trees.total_leaves for f in forests) == np.unique(found).size
    other = np.concatenate(verifiable.coefficients(Secret(bytes(32)), forests))
    assert not np.intersect1d(found, other).size
    assert verifiable.coefficients(COIN, []) == []


def test_corrections_say_nothing_about_the_point() -> None:
    """Bit by bit, for two points of one bin: at most 5.5 standard deviations apart."""
    forest = Forest.of(np.array([11]), Values(Ring(32)))
    means = []
    for point in (0, 9):
        seen = []
        for _ in range(1500):
            report = SystemEntropy().secret("report").reveal()
            pair = dpf.gen(
                forest,
                np.array([point]),
                np.full((1, 1), 7, dtype=np.uint32),
                report_id=report,
                entropy=SystemEntropy(),
            )
            sent = verifiable.corrections(pair, np.array([point]), report_id=report)
            seen.append(np.unpackbits(np.frombuffer(sent, dtype=np.uint8)))
        means.append(np.mean(seen, axis=0))
    assert np.abs(means[0] - means[1]).max() < 5.5 * (2 * 0.25 / 1500) ** 0.5


def test_what_does_not_fit_is_refused() -> None:
    forest = Forest.of(np.array([9, 40]), Values(Ring(32), 3))
    _, both, sent = client_of(forest, 3)
    factors = verifiable.coefficients(COIN, [forest])[0]
    for wrong in (sent[:-1], sent + b"\0", b""):
        with pytest.raises(Malformed, match="bytes"):
            verifiable.check_sums(forest, [both[0]], [wrong], factors)
    with pytest.raises(MisuseError, match="both servers"):
        verifiable.check_sums(forest, both, [sent, sent], factors)
    with pytest.raises(MisuseError, match="another forest"):
        verifiable.check_sums(Forest.of(np.array([9, 40]), SELECTORS), both, [sent] * 2, factors)
    with pytest.raises(MisuseError, match="32 bytes"):
        verifiable.coefficients(Secret(bytes(16)), [forest])
    trees, shape = forest.trees, forest.values.shape
    cs, one = verifiable.parsed(forest, sent), both[0].trees
    flat = np.zeros(1, dtype=np.int64)
    for name in kernel.available():
        with kernel.use(name) as backend:
            for call in (
                lambda k: k.verify([one], trees, shape, [], factors),
                lambda k: k.verify([one], trees, shape, [cs[:1]], factors),
                lambda k: k.verify([one], trees, shape, [cs], factors[:-1]),
                lambda k: k.verify([one], trees, shape, [cs], factors.astype(np.int64)),
                lambda k: k.verify([one], trees, shape, [cs], factors, part=range(3)),
                lambda k: k.verify([one], trees, shape, [cs], factors, leaves=np.zeros((1, 16))),
                lambda k: k.tags(one, trees, shape, flat + 2, flat),
                lambda k: k.tags(one, trees, shape, flat, flat + 9),
                lambda k: k.tags(one, trees, shape, flat, flat[:0]),
                lambda k: k.divide(cs, np.zeros(2, dtype=np.uint64)),
                lambda k: k.divide(cs, np.ones(1, dtype=np.uint64)),
            ):
                with pytest.raises(MisuseError):
                    call(backend)
