"""Noise inside the sums: what it costs each server of two, a round between them, and a client.

The round between two servers is that of `reproduce fsl-tables` (143,534 rows of 18 values and a
count, 64,327 dense parameters), with and without `[dp] trust = "each"`, in turns. Both are warm:
the public part is made in a first run, which also changes rows, as a round before does: with noise
that is every row. The client of `secure-fedavg` has a smaller table; CPU seconds and bytes of a
client on average, with and without `trust = "shares"`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Final

from benchmarks import machine
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.noise import discrete_gaussian
from tessera.crypto.prg import Label, Stream
from tessera.reproduce.fsl import measure as fsl
from tessera.reproduce.sfsl import measure as sfsl
from tessera.reproduce.sfsl.measure import RoundSetting
from tessera.rounds.plan import DPPlan, NoiseFrom

WORDS: Final = sfsl.ITEMS * (sfsl.COLUMNS + 1) + sfsl.DENSE
EACH: Final = DPPlan(unit="user", noise=1.0, trust=NoiseFrom.EACH)
SHARES: Final = replace(EACH, trust=NoiseFrom.SHARES)


def sums_rows(quick: bool) -> list[machine.Row]:
    return [*noise_rows(), *two_server_rows(quick), *shares_rows(quick)]


def noise_rows() -> list[machine.Row]:
    """The integers of one server alone; a table is made once and not counted."""
    found = []
    for deviation in (400.0, 16_384.0):
        source, taken = discrete_gaussian(deviation), []
        for at in range(5):
            secret = SystemEntropy().secret(Label.MEASUREMENT)
            stream = Stream.of(secret, Label.MEASUREMENT, at)
            began = time.process_time()
            source.sample(stream, WORDS)
            taken.append(time.process_time() - began)
        least = min(taken)
        settings = {"words": WORDS, "deviation": deviation}
        target = "<= 0.5"
        found.append(
            machine.result(
                "noise of a server",
                settings,
                least,
                "s",
                None,
                "0.5 s",
                least,
                target,
                machine.meets(least, target),
            )
        )
    return found


def two_server_rows(quick: bool) -> list[machine.Row]:
    clients, repeats = (4, 1) if quick else (20, 3)
    without = RoundSetting(clients=clients, items=5_000 if quick else sfsl.ITEMS)
    pairs = [
        tuple(fsl.two_server(setting) for setting in (without, replace(without, dp=EACH)))
        for _ in range(repeats)
    ]
    settings = {"clients": clients, "rows": without.items}
    found = []
    for what, take, target in (
        ("the leader's round", lambda m: sum(m.leader.values()), "<= 1.6"),
        ("the helper's round", lambda m: sum(m.helper.values()), "<= 1.6"),
        ("a client's round", lambda m: m.client, "<= 1.1"),
        ("a client's bytes", lambda m: float(m.bytes), "<= 1.1"),
    ):
        bare, noisy = (median(take(pair[at]) for pair in pairs) for at in (0, 1))
        unit = "B" if "bytes" in what else "s"
        found.append(_compared(what, settings, noisy, unit, bare, target))
    return found


def shares_rows(quick: bool) -> list[machine.Row]:
    clients, repeats = (6, 1) if quick else (20, 3)
    without = RoundSetting(
        scheme="secure-fedavg", clients=clients, items=1_000 if quick else 10_000, papers=False
    )
    pairs = [
        tuple(sfsl.measure(setting) for setting in (without, replace(without, dp=SHARES)))
        for _ in range(repeats)
    ]
    settings = {"clients": clients, "words": without.plan.stages[-1].dense}
    found = []
    for what, take, target in (
        (
            "a client's round in secure-fedavg",
            lambda m: sum(s for kind, s in m.client_seconds.items() if kind != "train"),
            "<= 2",
        ),
        ("its bytes", lambda m: float(m.bytes), None),
    ):
        bare, noisy = (median(take(pair[at]) for pair in pairs) for at in (0, 1))
        unit = "B" if "bytes" in what else "s"
        found.append(_compared(what, settings, noisy, unit, bare, target))
    return found


def _compared(
    what: str,
    settings: dict[str, int],
    noisy: float,
    unit: str,
    bare: float,
    target: str | None,
) -> machine.Row:
    ratio = noisy / bare
    ok = None if target is None else machine.meets(ratio, target)
    return machine.result(what, settings, noisy, unit, bare, "without noise", ratio, target, ok)
