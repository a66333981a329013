"""Apple's `pfl` on a cohort: one round of its federated averaging over its simulated backend.

`FederatedAveraging`, `SimulatedBackend` and `PyTorchModel` run unmodified from the installed
package. The clients' columns are tensors before the clock starts, and nothing is evaluated. With
noise the backend clips every user's statistics and adds Gaussian noise to their sum, by its own
`GaussianMechanism`, applied centrally.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers import PeerFailed, PeerMissing

try:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
except ImportError as absent:
    _absent: ImportError | None = absent
else:
    _absent = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """One round: CPU seconds of this process."""

    package: str
    version: str
    seconds: float


class WithLoss(nn.Module):
    """The module in the form `pfl` asks for: a loss and metrics over a client's columns."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.names = tuple(names)

    def loss(self, *columns: Tensor, **_: object) -> Tensor:
        batch = dict(zip(self.names, columns, strict=True))
        self.train()
        return F.binary_cross_entropy_with_logits(self.module(batch), batch["label"])

    def metrics(self, *columns: Tensor, **_: object) -> dict[str, Any]:
        return {}


def run(
    make_module: Callable[[], nn.Module],
    train: object,
    clients: Sequence[Mapping[str, npt.NDArray[Any]]],
    batch: int,
    rate: float,
    *,
    clip: float = 0.0,
    noise: float = 0.0,
) -> PeerResult:
    """One round over these clients; `train` is not used, `pfl` has its own loop.

    `noise` clips of deviation are on the sum of updates that are `clip` long at most.
    """
    if _absent is not None:
        raise PeerMissing("pfl", _absent)
    names = list(clients[0])
    module = WithLoss(make_module(), names)
    before = torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])
    users = [
        Dataset([torch.from_numpy(own[name]) for name in names], user_id=str(i))
        for i, own in enumerate(clients)
    ]
    turn = iter(range(len(users)))
    data = FederatedDataset(lambda i: users[i], lambda: next(turn))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    private = []
    if noise:
        private = [CentrallyAppliedPrivacyMechanism(GaussianMechanism(clip, noise))]
    begin = time.process_time()
    with redirect_stdout(sys.stderr):  # it prints what it counted
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=1,
                evaluation_frequency=2,
                train_cohort_size=len(users),
                val_cohort_size=0,
            ),
            SimulatedBackend(training_data=data, val_data=None, postprocessors=private),
            model,
            NNTrainHyperParams(
                local_num_epochs=1, local_learning_rate=rate, local_batch_size=batch
            ),
        )
    seconds = time.process_time() - begin
    after = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    if next(turn, None) is not None or torch.equal(before, after):
        raise PeerFailed("pfl did not train every client")
    return PeerResult(package="pfl", version=version("pfl"), seconds=seconds)
