"""Flower's simulation on a cohort: rounds of its FedAvg, with clients in Ray's processes.

`run_simulation`, `ServerApp`, `ClientApp` and `FedAvg` run unmodified from the installed package;
a client trains by the loop that the benchmark holds everybody to. The first round warms the
processes up, the second one counts: CPU seconds of this process and all below it, from sending the
model out to the mean of the results.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from benchmarks.peers import PeerFailed, PeerMissing

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation
except ImportError as absent:
    _absent: ImportError | None = absent
    FedAvg = object
else:
    _absent = None

ROUNDS = 2

Columns = Mapping[str, npt.NDArray[Any]]
Train = Callable[[nn.Module, Any, int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """One round: CPU seconds of the process tree."""

    package: str
    version: str
    seconds: float


class Metered(FedAvg):  # type: ignore[misc]
    """FedAvg with a meter around each round."""

    def __init__(self, clients: int) -> None:
        super().__init__(
            fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
        )
        self.seconds: list[float] = []
        self.replies: list[int] = []
        self._begin = 0.0

    def configure_train(self, *args: Any, **kwargs: Any) -> Any:
        self._begin = tree_seconds()
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
        came = list(replies)
        self.replies.append(sum(not reply.has_error() for reply in came))
        result = super().aggregate_train(server_round, came)
        self.seconds.append(tree_seconds() - self._begin)
        return result


def run(
    make_module: Callable[[], nn.Module],
    train: Train,
    clients: Sequence[Columns],
    batch: int,
    rate: float,
) -> PeerResult:
    """Two rounds over these clients, of which the second counts."""
    if _absent is not None:
        raise PeerMissing("flwr[simulation]", _absent)
    client_app, server_app = ClientApp(), ServerApp()
    strategy = Metered(len(clients))
    columns = [dict(own) for own in clients]

    @client_app.train()  # type: ignore[untyped-decorator]
    def train_client(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        module = make_module()
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        own = columns[int(context.node_config["partition-id"])]
        train(module, own, batch, rate)
        content = {
            "arrays": ArrayRecord(module.state_dict()),
            "metrics": MetricRecord({"num-examples": len(own["label"])}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    @server_app.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, context: Context) -> None:
        start = ArrayRecord(make_module().state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=ROUNDS)

    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            run_simulation(
                server_app,
                client_app,
                num_supernodes=len(clients),
                backend_config={
                    "init_args": {"log_to_driver": False, "include_dashboard": False},
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                },
            )
    finally:
        ray.shutdown()
    if strategy.replies != [len(clients)] * ROUNDS:
        raise PeerFailed(f"Flower's clients answered {strategy.replies} times")
    return PeerResult(package="flwr", version=version("flwr"), seconds=strategy.seconds[-1])


def tree_seconds() -> float:
    """CPU seconds so far of this process and all below it, those that ended included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))  # own, and children waited for
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(ticks.get(pid, 0) for pid in below) / os.sysconf("SC_CLK_TCK")
