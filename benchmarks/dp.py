"""What noise in every step costs: beside Opacus over a large table, and a cohort with and without.

    python benchmarks/dp.py            # a table
    python benchmarks/dp.py --json     # one object, in the form all benchmarks share
    python benchmarks/dp.py --quick    # a smaller table, fewer steps, without the peer

The table has 10^6 rows of 16, all of them at hand. A batch is 64 examples, drawn by coins, each
with an item and a history of 20 of which the mean is taken, under two linear layers. Ours takes 100
steps with noise from the system's entropy, and the pending noise of untouched rows is drawn at the
end and counted. Opacus takes fewer steps, with torch's generator: its ghost clipping, and plain
per-sample gradients (8 GB). CPU seconds per step, and peak memory over that of the loaded model,
each in a process of its own.

The cohort is that of `cohort.py` (64,327 dense parameters, histories of 50), 20 clients with 320
examples each. A round without noise is 10 steps of 32 examples; with noise it is 10 steps of 32
examples on average, each by a coin, each gradient cut, and noise on every value and row in every
step. Both take the trainer that a run would take: once neither is compiled, once both are. In
turns, CPU seconds of everything from jobs to updates, without compiling; and which part of it draws
noise.

Noise inside the sums (`--part sums`), and correlated over rounds (`--part correlated`), is in
`noisy_sums.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from benchmarks.cohort import cohort, note
from benchmarks.noisy_sums import correlated_rows, sums_rows
from tessera.crypto import noise
from tessera.crypto.entropy import SystemEntropy
from tessera.crypto.prg import Label
from tessera.data.examples import Examples
from tessera.learning.bound_model import Table
from tessera.learning.module_tables import Tables
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import Job, Trainable, click_loss
from tessera.learning.training.noisy_steps import EachExample, NoisySteps
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised.check import best, best_noisy
from tessera.learning.training.vectorised.noisy import NoisyVectorised

ROWS, WIDTH, HISTORY, BATCH, EXAMPLES = 1_000_000, 16, 20, 64, 6_400
OUR_STEPS, GHOST_STEPS, PLAIN_STEPS = 100, 10, 2
CLIP, NOISE, RATE = 1.0, 1.0, 0.1
CLIENTS, COHORT_BATCH, COHORT_STEPS, REPEATS = 20, 32, 10, 5
COHORT_EXAMPLES = COHORT_BATCH * COHORT_STEPS


class Pooled(nn.Module):
    """An item and the mean of a history, under two linear layers."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.items = nn.Embedding(rows, WIDTH)
        self.first = nn.Linear(2 * WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def of(self, item: Tensor, history: Tensor) -> Tensor:
        both = torch.cat([self.items(item), self.items(history).mean(-2)], -1)
        return self.last(torch.tanh(self.first(both))).squeeze(-1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.of(batch["item"], batch["history"])


class ForPeer(Pooled):
    """The same with one tensor of ids in: the item, then its history."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        rows = self.items(ids)
        both = torch.cat([rows[:, 0], rows[:, 1:].mean(-2)], -1)
        return self.last(torch.tanh(self.first(both)))


# --- memory and time of one process ---------------------------------------------------------------


def status(name: str) -> int:
    """A size of this process by the kernel's account, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


class Measured:
    """CPU seconds of what happens within, and the most memory over that at its beginning."""

    def __enter__(self) -> Measured:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before, self._began = status("VmRSS"), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self._began
        self.memory = status("VmHWM") - self._before


def drawn_examples(rows: int, count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "item": rng.integers(0, rows, count),
        "history": rng.integers(0, rows, (count, HISTORY)),
        "label": rng.integers(0, 2, count).astype(np.float32),
    }


def ours(rows: int, steps: int) -> dict[str, float]:
    """All steps of one client, noise that is owed included."""
    module = Pooled(rows)
    bound = Tables({"items.weight": Table("item", "history")}).bind(module)
    ids = np.arange(rows, dtype=np.uint64)
    part = TablePart(ids, module.items.weight.detach().numpy())
    submodel = Submodel(bound.pack(module), {"items": part}, {"items": ids})
    secret = SystemEntropy().secret(Label.CLIENT_NOISE, "benchmark")
    job = Job(0, submodel, Examples(drawn_examples(rows, EXAMPLES)), {}, coins=secret)
    noisy = NoisySteps(
        clip=CLIP, noise=NOISE, steps=steps, batch=BATCH, drawing=EachExample(BATCH / EXAMPLES)
    )
    learner = NoisyVectorised(
        Trainable(module, bound, click_loss, LocalTraining(batch=BATCH, rate=RATE)),
        replace(noisy, steps=2),
    )
    small = np.arange(100, dtype=np.uint64)  # the first call loads tables and code
    warm = replace(
        job,
        submodel=Submodel(
            submodel.dense,
            {"items": TablePart(small, part.values[:100])},
            {"items": small},
        ),
        examples=Examples(drawn_examples(100, EXAMPLES)),
    )
    learner.train([warm], round_id=0)
    learner.noisy = noisy
    with Measured() as found:
        (trained,) = learner.train([job], round_id=0)
    if not trained.finite or not (trained.update.tables["items"].values != 0).any(axis=1).all():
        raise SystemExit("a row has no noise")
    return {"seconds": found.seconds / steps, "memory": found.memory}


def opacus(mode: str, rows: int, steps: int) -> dict[str, float]:
    """Steps of DP-SGD by Opacus, by ghost clipping or plain, without its batch sampler."""
    warnings.filterwarnings("ignore")
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer
    from opacus.optimizers.optimizer_fast_gradient_clipping import (
        DPOptimizerFastGradientClipping,
    )
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    columns = drawn_examples(rows, BATCH * (steps + 1))
    ids = torch.from_numpy(np.concatenate([columns["item"][:, None], columns["history"]], 1))
    labels = torch.from_numpy(columns["label"])[:, None]
    module, loss = ForPeer(rows), nn.BCEWithLogitsLoss(reduction="mean")
    sgd = torch.optim.SGD(module.parameters(), lr=RATE)
    settings: dict[str, Any] = {
        "noise_multiplier": NOISE,
        "max_grad_norm": CLIP,
        "expected_batch_size": BATCH,
    }
    criterion: Any = loss
    if mode == "ghost":
        wrapped: Any = GradSampleModuleFastGradientClipping(
            module, max_grad_norm=CLIP, use_ghost_clipping=True
        )
        optimizer: Any = DPOptimizerFastGradientClipping(sgd, **settings)
        criterion = DPLossFastGradientClipping(wrapped, optimizer, loss)
    else:
        wrapped, optimizer = GradSampleModule(module), DPOptimizer(sgd, **settings)

    def step(at: int) -> None:
        some = slice(at * BATCH, (at + 1) * BATCH)
        optimizer.zero_grad()
        criterion(wrapped(ids[some]), labels[some]).backward()
        optimizer.step()

    with Measured() as found:
        step(0)
        began = time.process_time()
        for at in range(1, steps + 1):
            step(at)
        taken = time.process_time() - began
    return {"seconds": taken / steps, "memory": found.memory}


def apart(what: str, *arguments: object) -> dict[str, float] | None:
    """One of the above in a process of its own, on one thread; None where the peer is missing."""
    command = [sys.executable, __file__, "--only", what, *map(str, arguments)]
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=os.environ | one, stdout=subprocess.PIPE, text=True, check=False
    )
    return json.loads(done.stdout) if done.returncode == 0 else None


# --- the cohort -----------------------------------------------------------------------------------


class NoiseClock:
    """CPU seconds spent drawing noise, while it is in place."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> NoiseClock:
        self._plain = noise.Gaussian.draw, noise.Gaussian.owed

        def timed(method: Any) -> Any:
            def wrapper(*arguments: Any) -> Any:
                began = time.process_time()
                try:
                    return method(*arguments)
                finally:
                    self.seconds += time.process_time() - began

            return wrapper

        noise.Gaussian.draw, noise.Gaussian.owed = map(timed, self._plain)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        noise.Gaussian.draw, noise.Gaussian.owed = self._plain  # type: ignore[method-assign]


def rounds(clients: int, repeats: int, *, compiled: bool) -> dict[str, Any]:
    """Seconds of a round without noise and with it, in turns; same examples, steps and batches."""
    module, bound, drawn = cohort(clients)
    jobs = [
        replace(job, examples=job.examples.take(np.arange(COHORT_EXAMPLES) % len(job.examples)))
        for job in drawn
    ]
    entropy = SystemEntropy()
    noisy_jobs = [
        replace(job, coins=entropy.secret(Label.CLIENT_NOISE, job.client)) for job in jobs
    ]
    training = LocalTraining(batch=COHORT_BATCH, rate=RATE)
    steps = NoisySteps(
        clip=CLIP,
        noise=NOISE,
        steps=COHORT_STEPS,
        batch=COHORT_BATCH,
        drawing=EachExample(COHORT_BATCH / COHORT_EXAMPLES),
    )
    plain = best(Trainable(module, bound, click_loss, training), sample=jobs, compile=compiled)
    noisy = best_noisy(
        Trainable(module, bound, click_loss, training), steps, sample=jobs, compile=compiled
    )
    for learner in (plain, noisy):
        if learner.name.startswith("compiled") is not compiled:
            raise SystemExit(f"{learner.name}: {learner.reason}")
    without, with_noise, share = [], [], []
    plain.train(jobs, round_id=0)
    noisy.train(noisy_jobs, round_id=0)
    for at in range(repeats):
        began = time.process_time()
        plain.train(jobs, round_id=at)
        without.append(time.process_time() - began)
        with NoiseClock() as clock:
            began = time.process_time()
            noisy.train(noisy_jobs, round_id=at)
            with_noise.append(time.process_time() - began)
        share.append(clock.seconds / with_noise[-1])
    return {
        "without": median(without),
        "with": median(with_noise),
        "ratio": median(w / o for w, o in zip(with_noise, without, strict=True)),
        "noise_share": median(share),
        "learner": plain.name,
    }


# --- the report -----------------------------------------------------------------------------------


def table_rows(quick: bool) -> list[machine.Row]:
    rows, steps = (50_000, 20) if quick else (ROWS, OUR_STEPS)
    settings = {"rows": rows, "width": WIDTH, "batch": BATCH, "history": HISTORY, "steps": steps}
    note(f"a table of {rows:,} rows: ours, {steps} steps")
    mine = apart("ours", rows, steps)
    if mine is None:
        raise SystemExit("training failed")
    found: list[machine.Row] = []
    for mode, count, faster, smaller in (
        ("ghost", GHOST_STEPS, ">= 20", "<= 0.5"),
        ("plain", PLAIN_STEPS, ">= 200", None),
    ):
        if not quick:
            note(f"a table of {rows:,} rows: Opacus, {mode}, {count} steps")
        peer = None if quick else apart(mode, rows, count)
        name, more = f"Opacus, {mode}", {**settings, "steps of the baseline": count}
        for what, key, unit, target in (
            ("a step", "seconds", "s", faster),
            ("memory over the model", "memory", "B", smaller),
        ):
            ratio = None
            if peer is not None:
                ratio = peer[key] / mine[key] if key == "seconds" else mine[key] / peer[key]
            found.append(
                machine.result(
                    what,
                    more,
                    mine[key],
                    unit,
                    None if peer is None else peer[key],
                    name,
                    ratio,
                    target,
                    target and machine.meets(ratio, target),
                )
            )
    return found


def cohort_rows(quick: bool) -> list[machine.Row]:
    clients, repeats = (4, 1) if quick else (CLIENTS, REPEATS)
    found: list[machine.Row] = []
    for compiled in (False,) if quick else (False, True):
        note(f"a cohort with and without noise, {'compiled' if compiled else 'not compiled'}")
        taken = rounds(clients, repeats, compiled=compiled)
        settings = {
            "clients": clients,
            "batch": COHORT_BATCH,
            "steps": COHORT_STEPS,
            "trainer": taken["learner"],
        }
        found.append(
            machine.result(
                "a round",
                settings,
                taken["with"],
                "s",
                taken["without"],
                f"without noise, {taken['learner']}",
                taken["ratio"],
                "<= 3",
                machine.meets(taken["ratio"], "<= 3"),
            )
        )
        share = taken["noise_share"]
        found.append(
            machine.result(
                "of it, drawing noise", settings, share, "", None, None, None, None, None
            )
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--require-peers", action="store_true")
    parser.add_argument(
        "--part", choices=("table", "cohort", "sums", "correlated"), help="one part only"
    )
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only:
        what, rows, steps = args.only[0], int(args.only[1]), int(args.only[2])
        print(json.dumps(ours(rows, steps) if what == "ours" else opacus(what, rows, steps)))
        return 0
    calibration = machine.calibrate()
    results: list[machine.Row] = []
    if args.part in (None, "table"):
        results += table_rows(args.quick)
    if args.part in (None, "cohort"):
        results += cohort_rows(args.quick)
    if args.part in (None, "sums"):
        results += sums_rows(args.quick)
    if args.part in (None, "correlated"):
        results += correlated_rows(args.quick)
    machine.print_report(
        calibration, results, title="Noise in steps and in sums", as_json=args.json
    )
    return machine.exit_status(results, require_peers=args.require_peers)


if __name__ == "__main__":
    sys.exit(main())
