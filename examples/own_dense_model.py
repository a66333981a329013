"""A network without tables, whose clients send their largest changes, unseen."""

import numpy as np
import torch
from torch import Tensor, nn

import tessera
from tessera.data.examples import Examples
from tessera.data.split import spread_evenly
from tessera.learning.metrics import ClassMetric
from tessera.learning.training.jobs import class_loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.kinds = nn.Linear(8, 2_000), nn.Linear(2_000, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.kinds(torch.relu(self.hidden(batch["x"])))


def main(rounds: int = 30) -> tessera.Run:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2_400, 8)).astype(np.float32)
    every = Examples({"x": x, "label": (x**2 @ rng.normal(size=(8, 3))).argmax(axis=1)})
    train, test = every.take(slice(0, 2_000)), every.take(slice(2_000, None))
    data = spread_evenly("points", train, test, clients=20, seed=0, sizes={"class": 3}, facts={})
    how = {"module": Net, "tables": tessera.Tables({}), "loss": class_loss}
    task = tessera.Task(name="own-dense-model", data=data, metric=ClassMetric(3), **how)
    update = {"top": 0.005, "error_feedback": True}  # the rest waits at the client
    plan = tessera.Plan(scheme="two-server", cohort=10, update=update)
    return tessera.simulate(task, plan, rounds)


if __name__ == "__main__":
    run = main()
    print("accuracy by round:", {done: round(right, 3) for done, right in run.curve})
    print("the largest class:", run.facts["trivial"], "written by", run.rounds[-1]["writing"])
