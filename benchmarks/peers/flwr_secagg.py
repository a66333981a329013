"""`flwr`'s SecAgg+ on one machine: its own workflow and client mod over an in-process carrier.

`SecAggPlusWorkflow` (server) and `secaggplus_mod` (client) run unmodified from the installed
package, through all four stages. Only the carrier is ours: it hands each message straight to
the client it is for. Every message still passes through `flwr`'s own protobuf encoding, both
because the byte counts are lengths of what was encoded and because the mod alters the records it
is given, which a carrier by reference would share between clients.

What is charged to whom, in CPU seconds of the whole process (`flwr` shares secrets in a thread
pool):

- server: the workflow, less everything that happens behind the carrier;
- client: the mod, less the application it wraps, whose "training" only draws a vector;
- nobody: encoding and decoding, so the peer is flattered where ours pays for its own.

Client figures are means over the clients that finished. Dropped clients answer the first two
stages and stay silent when masked vectors are collected.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from statistics import fmean
from typing import Any, Final, cast
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from benchmarks.peers import PeerFailed, PeerMissing

try:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.client.mod import make_ffn, secaggplus_mod
    from flwr.common import (
        Code,
        FitIns,
        FitRes,
        Parameters,
        Status,
        ndarrays_to_parameters,
        parameters_to_ndarrays,
    )
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.compat.common.recorddict_compat import (
        fitres_to_recorddict,
        parameters_to_arrayrecord,
    )
    from flwr.proto.message_pb2 import Message as ProtoMessage
    from flwr.server import LegacyContext
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
    from flwr.server.workflow.constant import Key as WorkflowKey
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as absent:
    _absent: ImportError | None = absent
else:
    _absent = None

Vector = npt.NDArray[np.float32]

CLIPPING_RANGE: Final = 8.0  # flwr's default
QUANTIZATION_RANGE: Final = 2**22  # flwr's default
RUN_ID: Final = 1
SERVER_ID: Final = 1  # the node id of flwr's own server
MAX_WEIGHT: Final = 1000  # flwr's default, and every client's weight here: a plain mean

# A client is off by at most one quantisation step (stochastic rounding) and a quarter for the
# float32 addition before it. A mask left in would be off by thousands.
ERROR_BOUND: Final = 1.25 * 2 * CLIPPING_RANGE / QUANTIZATION_RANGE


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """One SecAgg+ round of `flwr`. Byte counts are per client, and exclude the model."""

    version: str
    server_seconds: float
    client_seconds: float
    bytes_up: int
    bytes_down: int
    bytes_up_by_stage: dict[str, int]
    bytes_down_by_stage: dict[str, int]
    model_bytes_down: int  # the model that `flwr` sends along in its third stage
    checked_error: float  # largest distance of the aggregate from the survivors' true mean
    uncharged_seconds: float  # encoding, decoding and the stand-in for training, all parties


class CpuMeter:
    """CPU seconds by owner; what runs inside an inner `charging` is not charged to the outer."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._owner = "nobody"
        self._since = time.process_time()

    @contextmanager
    def charging(self, owner: str) -> Iterator[None]:
        outer = self._hand_over(owner)
        try:
            yield
        finally:
            self._hand_over(outer)

    def _hand_over(self, owner: str) -> str:
        now = time.process_time()
        self.seconds[self._owner] += now - self._since
        outer, self._owner, self._since = self._owner, owner, now
        return outer


@dataclass(frozen=True, slots=True)
class Proxy:
    """What the workflow asks of a client proxy: its name."""

    node_id: int


class WholeCohort:
    """The strategy the workflow calls: everybody trains, and the aggregate is kept as it came.

    `FedAvg` would average the aggregate once more per client; that is not part of the protocol, so
    the peer is not charged for it.
    """

    def __init__(self, node_ids: Iterable[int]) -> None:
        self.proxies = [Proxy(node_id) for node_id in node_ids]
        self.aggregate: Parameters | None = None

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: object
    ) -> list[tuple[Proxy, FitIns]]:
        return [(proxy, FitIns(parameters, {})) for proxy in self.proxies]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Proxy, FitRes]], failures: list[Exception]
    ) -> tuple[Parameters, dict[str, Any]]:
        self.aggregate = results[0][1].parameters  # the workflow gives the same to every result
        return self.aggregate, {}


class Client:
    """One client app under `secaggplus_mod`, with the context that lives from stage to stage."""

    def __init__(self, node_id: int, draw: Callable[[], Vector], meter: CpuMeter) -> None:
        self.context = Context(RUN_ID, node_id, {}, RecordDict(), {})
        self._draw = draw
        self._meter = meter
        self._owner = f"client {node_id}"
        self._under_mod = make_ffn(self._fit, [secaggplus_mod])

    @property
    def seconds(self) -> float:
        return self._meter.seconds[self._owner]

    def answer(self, message: Message) -> Message:
        with self._meter.charging(self._owner):
            return self._under_mod(message, self.context)

    def _fit(self, message: Message, context: Context) -> Message:
        with self._meter.charging("training"):
            trained = FitRes(
                status=Status(Code.OK, ""),
                parameters=ndarrays_to_parameters([self._draw()]),
                num_examples=MAX_WEIGHT,
                metrics={},
            )
            return Message(fitres_to_recorddict(trained, keep_input=False), reply_to=message)


class Carrier:
    """The part of `flwr`'s `Grid` that the workflow uses, with the clients behind it."""

    def __init__(self, clients: dict[int, Client], silent: frozenset[int], meter: CpuMeter) -> None:
        self.up: Counter[tuple[str, int]] = Counter()  # by stage and client
        self.down: Counter[tuple[str, int]] = Counter()
        self.model_down: Counter[int] = Counter()
        self._clients = clients
        self._silent = silent
        self._meter = meter

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        with self._meter.charging("carrier"):
            replies = (self._deliver(message) for message in messages)
            return [reply for reply in replies if reply is not None]

    def _deliver(self, message: Message) -> Message | None:
        node_id = message.metadata.dst_node_id
        stage = str(message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE])
        message.metadata.__dict__["_message_id"] = str(uuid4())  # as flwr's own carriers do
        model = sum(
            len(array.data)
            for record in message.content.array_records.values()
            for array in record.values()
        )
        encoded = message_to_proto(message).SerializeToString()
        self.down[stage, node_id] += len(encoded) - model
        self.model_down[node_id] += model
        if stage == Stage.COLLECT_MASKED_VECTORS and node_id in self._silent:
            return None
        arrived = message_from_proto(ProtoMessage.FromString(encoded))
        reply = self._clients[node_id].answer(arrived)
        encoded = message_to_proto(reply).SerializeToString()
        self.up[stage, node_id] += len(encoded)
        return message_from_proto(ProtoMessage.FromString(encoded))


def run(
    n: int, length: int, num_shares: int, threshold: int | float, dropped: int, seed: int
) -> PeerResult:
    """One round of `flwr`'s SecAgg+: n clients, a float32 vector of `length` each.

    `num_shares` counts the client itself: degree + 1. `threshold` shares open a secret, or that
    fraction of `num_shares` if it is a float. `dropped` clients never send a masked vector. The
    aggregate is compared with the survivors' mean; a wrong one is `PeerFailed`.
    """
    if _absent is not None:
        raise PeerMissing("flwr", _absent) from _absent
    if not 0 <= dropped < n:
        raise ValueError(f"{dropped} dropped clients of {n}: at least one has to stay")

    chance = random.Random(seed)
    node_ids = [chance.getrandbits(64) for _ in range(n)]  # flwr's ids are random 8-byte integers
    silent = frozenset(chance.sample(node_ids, dropped))
    finished = [node_id for node_id in node_ids if node_id not in silent]

    def vector_of(node_id: int) -> Vector:
        generator = np.random.default_rng((seed, node_id))
        return 2 * generator.random(length, dtype=np.float32) - 1

    meter = CpuMeter()
    clients = {node_id: Client(node_id, partial(vector_of, node_id), meter) for node_id in node_ids}
    carrier = Carrier(clients, silent, meter)
    strategy = WholeCohort(node_ids)
    context = _server_context(strategy, model=np.zeros(length, np.float32))
    workflow = SecAggPlusWorkflow(
        num_shares,
        threshold,
        max_weight=float(MAX_WEIGHT),
        clipping_range=CLIPPING_RANGE,
        quantization_range=QUANTIZATION_RANGE,
    )
    with _seeded_globals(seed), _quiet(), meter.charging("server"):
        workflow(cast(Any, carrier), context)  # it calls send_and_receive and no more of a Grid

    if strategy.aggregate is None:
        raise PeerFailed(
            f"flwr's SecAgg+ halted with {dropped} of {n} clients dropped, "
            f"{num_shares} shares, threshold {threshold}"
        )
    mean = sum((vector_of(node_id).astype(np.float64) for node_id in finished), np.zeros(length))
    mean /= len(finished)
    error = float(np.abs(parameters_to_ndarrays(strategy.aggregate)[0] - mean).max())
    if not error <= ERROR_BOUND:
        raise PeerFailed(f"flwr's aggregate is off by {error:.2g}, bound {ERROR_BOUND:.2g}")

    up, down = (_by_stage(counts, finished) for counts in (carrier.up, carrier.down))
    return PeerResult(
        version=version("flwr"),
        server_seconds=meter.seconds["server"],
        client_seconds=fmean(clients[node_id].seconds for node_id in finished),
        bytes_up=sum(up.values()),
        bytes_down=sum(down.values()),
        bytes_up_by_stage=up,
        bytes_down_by_stage=down,
        model_bytes_down=round(fmean(carrier.model_down[node_id] for node_id in finished)),
        checked_error=error,
        uncharged_seconds=meter.seconds["carrier"] + meter.seconds["training"],
    )


def _server_context(strategy: WholeCohort, *, model: Vector) -> LegacyContext:
    # flwr's runtime tells a server process who it is; new messages read their sender from here.
    TaskIdentity.task_id = TaskIdentity.run_id = RUN_ID
    TaskIdentity.node_id = SERVER_ID
    blank = Context(RUN_ID, SERVER_ID, {}, RecordDict(), {})
    context = LegacyContext(blank, strategy=cast(Any, strategy))
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(
        ndarrays_to_parameters([model]), keep_input=False
    )
    return context


def _by_stage(counts: Counter[tuple[str, int]], node_ids: list[int]) -> dict[str, int]:
    return {
        stage: round(fmean(counts[stage, node_id] for node_id in node_ids)) for stage in Stage.all()
    }


@contextmanager
def _seeded_globals(seed: int) -> Iterator[None]:
    """Seed what `flwr` draws its graph and its rounding from, and put it back afterwards.

    Its keys and seeds come from the system, so byte counts can move by a few bytes.
    """
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the workflow's progress off stderr; its errors still show."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def main(arguments: list[str] | None = None) -> int:
    """Measure one round and print it; 1 if the peer is missing or failed, 2 for bad arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.flwr_secagg", description="flwr's SecAgg+, one round."
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--length", type=int, default=640_000, help="float32 values per client")
    parser.add_argument("--shares", type=int, default=51, help="degree + 1")
    parser.add_argument("--threshold", type=int, default=None, help="default: two thirds of shares")
    parser.add_argument("--dropped", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    chosen = parser.parse_args(arguments)
    threshold = chosen.threshold if chosen.threshold is not None else 2 * chosen.shares // 3
    try:
        measured = run(
            chosen.clients, chosen.length, chosen.shares, threshold, chosen.dropped, chosen.seed
        )
    except ValueError as wrong:
        parser.error(str(wrong))
    except (PeerMissing, PeerFailed) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps(asdict(measured)))
    else:
        for name, value in asdict(measured).items():
            print(f"{name:20} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
