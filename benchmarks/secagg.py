"""What a secure sum costs: CPU seconds and bytes, beside the AES limit and `flwr`'s SecAgg+.

    python benchmarks/secagg.py            # a table
    python benchmarks/secagg.py --json     # one object, in the form all benchmarks share
    python benchmarks/secagg.py --quick    # the smallest length only

Every round is run by the real roles over the simulator, with every message encoded and decoded, and
its sum is compared with the plain sum. Seconds are CPU seconds of one core. The peer needs the
bench group (`make bench-env`); without it its rows have `ok: null`, and `--require-peers` makes
that an exit status of 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tessera.protocols.secagg.client import SecAggClientSetup
from tessera.protocols.secagg.server import SecAggServerSetup

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from benchmarks.peers import PeerMissing, flwr_secagg
from tessera.crypto import kernel, prg
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.prg import Label, Stream
from tessera.crypto.ring import Ring
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, RoundId
from tessera.protocols.secagg.client import Client
from tessera.protocols.secagg.params import GraphKind, SecAggParams, StageSpec
from tessera.protocols.secagg.standalone import Aggregator, Contribution, Contributor
from tessera.simulation.faults import Drop
from tessera.simulation.simulator import MeasuredTraffic, Simulator

LENGTHS = (143_534, 640_000, 3_617_023)
PEER_LENGTH = 640_000
CLIENTS = 100
DROPPED = 20
CORRUPT = 10
LEVELS = 2**15
GROUP = Ring(22)
"""22 bits hold a hundred values of 15 bits."""


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parameters(length: int, graph: GraphKind) -> SecAggParams:
    stage = StageSpec(name="update", group=GROUP, dense=length, max_value=LEVELS - 1)
    return SecAggParams(
        federation="benchmark",
        round_id=RoundId(1),
        plan_hash=bytes(32),
        cohort=CLIENTS,
        stages=(stage,),
        graph=graph,
        corrupt=CORRUPT,
    )


def run(length: int, graph: GraphKind, dropped: int) -> MeasuredTraffic:
    """One round; raises if its sum is not the plain sum of the survivors."""
    params = parameters(length, graph)
    clients = [ClientId(i) for i in range(CLIENTS)]
    rng = np.random.default_rng(1)
    inputs = {c: rng.integers(0, LEVELS, length, dtype=GROUP.dtype) for c in clients}
    joined = {
        c: Client.join(SecAggClientSetup(params, c), entropy=SystemEntropy()) for c in clients
    }
    server = Aggregator(SecAggServerSetup(params, clients), entropy=SystemEntropy())
    simulator = Simulator(
        server,
        {
            c: Contributor(member, [Contribution(dense=inputs[c])])
            for c, (member, _) in joined.items()
        },
        {c: out for c, (_, out) in joined.items()},
        faults=[Drop(c, "collect") for c in clients[: dropped * 5 : 5]],
    )
    outcome = simulator.run()
    total = GROUP.zeros(length)
    for client in server.sums[0].survivors:
        GROUP.iadd(total, inputs[ClientId(int(client))])
    if outcome.aborted or len(server.sums[0].survivors) != CLIENTS - dropped:
        raise SystemExit(f"the round did not end as it should: {outcome.aborted}")
    if not np.array_equal(total, server.sums[0].dense):
        raise SystemExit("the opened sum is not the plain sum")
    return outcome.traffic


def client_seconds(traffic: MeasuredTraffic) -> float:
    """The median over survivors, all their messages together."""
    spent = [sum(kinds.values()) for kinds in traffic.client_seconds.values()]
    return median(sorted(spent)[-(CLIENTS - DROPPED) :])


def bytes_up(traffic: MeasuredTraffic) -> int:
    return max(kinds.total() for kinds in traffic.up.values())


def bytes_down(traffic: MeasuredTraffic) -> int:
    return max(kinds.total() for kinds in traffic.down.values())


def round_rows(length: int, calibration: dict[str, Any]) -> tuple[list[machine.Row], dict]:
    rows = []
    kept: dict[tuple[str, str, int], MeasuredTraffic] = {}
    names = (
        ["reference"]
        if calibration["kernel"] == "reference"
        else [
            calibration["kernel"],
            "reference",
        ]
    )
    for name in names:
        for graph in GraphKind:
            for dropped in (0, DROPPED):
                note(f"  l = {length:,}, {graph.value}, {dropped} dropped, {name}")
                with kernel.use(name):
                    traffic = run(length, graph, dropped)
                kept[name, graph.value, dropped] = traffic
                topology = parameters(length, graph).topology
                settings = {
                    "n": CLIENTS,
                    "l": length,
                    "graph": graph.value,
                    "degree": topology.degree,
                    "dropped": dropped,
                    "kernel": name,
                }
                # What AES alone would take for the masks of each side, by this machine's limit.
                per_mask = length * GROUP.word_bytes / limit(calibration, name)
                masks = {
                    "client": topology.degree + 1,
                    "server": CLIENTS - dropped + server_pairs(topology.degree, dropped),
                }
                for side, seconds in (
                    ("client", client_seconds(traffic)),
                    ("server", sum(traffic.server_seconds.values())),
                ):
                    floor = masks[side] * per_mask
                    rows.append(
                        machine.result(
                            f"{side}, whole round",
                            settings,
                            seconds,
                            "s",
                            floor,
                            "AES limit of its masks",
                            seconds / floor,
                            None,
                            None,
                        )
                    )
                plain = (length * GROUP.bits + 7) // 8
                up = bytes_up(traffic)
                rows.append(
                    machine.result(
                        "bytes up per client",
                        settings,
                        up,
                        "B",
                        plain,
                        "the packed vector",
                        up / plain,
                        None,
                        None,
                    )
                )
    return rows, kept


def server_pairs(degree: int, dropped: int) -> float:
    """Masks between dropped clients and survivors, on average over the random graph."""
    return dropped * degree * (CLIENTS - dropped) / (CLIENTS - 1)


def limit(calibration: dict[str, Any], name: str) -> float:
    """Bytes of AES-CTR per second for this kernel on this machine."""
    if name == "reference":
        return float(calibration["aes_ctr_bytes_per_second"])
    return 16.0 * float(calibration["aes_limit_blocks_per_second"])


def mask_rows(calibration: dict[str, Any]) -> list[machine.Row]:
    """A hundred masks over a vector, against nothing but the AES they are made of."""
    rows = []
    streams = [
        Stream.of(Secret(bytes([i]) * 32), Label.PAIR_MASK, "benchmark") for i in range(CLIENTS)
    ]
    signs = [1 if i % 2 else -1 for i in range(CLIENTS)]
    for length in LENGTHS[:2]:
        for name in dict.fromkeys([calibration["kernel"], "reference"]):
            acc = GROUP.zeros(length)
            with kernel.use(name):
                spent = machine.cpu_seconds(
                    lambda acc=acc: prg.accumulate(GROUP, acc, streams, signs),
                    repeats=9,
                )
            floor = CLIENTS * length * GROUP.word_bytes / limit(calibration, name)
            settings = {"l": length, "masks": CLIENTS, "kernel": name}
            if name == "reference":
                ratio, target, what = spent / floor, "<= 1.6", "AES-CTR of `cryptography`"
            else:
                ratio, target, what = floor / spent, ">= 0.9", "AES limit of this machine"
            rows.append(
                machine.result(
                    "masks",
                    settings,
                    spent,
                    "s",
                    floor,
                    what,
                    ratio,
                    target,
                    machine.meets(ratio, target),
                )
            )
    return rows


def peer_rows(kept: dict[tuple[str, str, int], MeasuredTraffic], name: str) -> list[machine.Row]:
    """`flwr`'s SecAgg+, its own workflow over an in-process carrier, at our degree."""
    rows = []
    topology = parameters(PEER_LENGTH, GraphKind.SPARSE).topology
    for dropped in (0, DROPPED):
        settings = {
            "n": CLIENTS,
            "l": PEER_LENGTH,
            "degree": topology.degree,
            "threshold": topology.threshold,
            "dropped": dropped,
            "kernel": name,
        }
        note(f"  flwr's SecAgg+, {dropped} dropped (takes a minute)")
        try:
            peer = flwr_secagg.run(
                CLIENTS, PEER_LENGTH, topology.degree + 1, topology.threshold, dropped, 1
            )
        except PeerMissing as error:
            note(f"  {error}")
            peer = None
        ours = kept[name, GraphKind.SPARSE.value, dropped]
        server, client = sum(ours.server_seconds.values()), client_seconds(ours)
        both = bytes_up(ours) + bytes_down(ours)
        label = None if peer is None else f"flwr {peer.version}"
        for what, measured, unit, theirs, faster, target in (
            ("server against SecAgg+", server, "s", peer and peer.server_seconds, True, ">= 20"),
            ("client against SecAgg+", client, "s", peer and peer.client_seconds, True, ">= 5"),
            (
                "bytes against SecAgg+",
                both,
                "B",
                peer and peer.bytes_up + peer.bytes_down,
                False,
                "<= 0.5",
            ),
        ):
            ratio = None if theirs is None else (theirs / measured if faster else measured / theirs)
            rows.append(
                machine.result(
                    what,
                    settings,
                    measured,
                    unit,
                    theirs,
                    label,
                    ratio,
                    target,
                    machine.meets(ratio, target),
                )
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="the smallest length, and no peer")
    parser.add_argument("--require-peers", action="store_true", help="exit 1 without the peer")
    args = parser.parse_args()
    calibration = machine.calibrate()
    rows = mask_rows(calibration)
    kept: dict[tuple[str, str, int], MeasuredTraffic] = {}
    for length in LENGTHS[:1] if args.quick else LENGTHS:
        more, traffic = round_rows(length, calibration)
        rows += more
        if length == PEER_LENGTH:
            kept = traffic
    if kept:
        rows += peer_rows(kept, calibration["kernel"])
    machine.print_report(calibration, rows, title="Secure sums", as_json=args.json)
    return machine.exit_status(rows, require_peers=args.require_peers)


if __name__ == "__main__":
    sys.exit(main())
