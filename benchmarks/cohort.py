"""What a round of local training costs: a cohort side by side, against one client after the other.

    python benchmarks/cohort.py            # a table
    python benchmarks/cohort.py --json     # one object, in the form all benchmarks share
    python benchmarks/cohort.py --quick    # measured once, and without peers
    python benchmarks/cohort.py --next     # the lag model of `next` alone

The papers' click-through model (64,327 dense parameters and rows of 18), a hundred clients with
about 330 examples each, batches of 2, histories of 50. Seconds are CPU seconds of one core, for
peers that start processes of the whole process tree. The baselines take a part of the cohort and
are scaled by the examples, which the settings say; they run in turns with ours, as the machine may
be busy with other things.

One after the other is what one would write by hand: a module with the client's rows, `SGD`, a loop
over batches by indexing tensors. The peers, `pfl` and Flower's simulation (`make bench-env`), know
no submodels: they get tables as small as a client's, with ids that fit, which flatters them.
Compiling is reported apart, with an empty cache and with a full one.

The text task (`--text`: it alone) is the next word by a softmax over a table: clients with about
500 candidates of 24,661 words and about 600 examples each. Every step takes all candidates, so that
arithmetic and not overhead is most of it; ours is not compiled here.

`next` (`--next`: it alone) is one step of a lag model for each of 100 clients, 50 examples with
histories of 50, 300 negatives, about 440 rows of 64 columns as on MovieLens 1M. It stands against
tessera's own trainer of one client after the other, and against a loop by hand.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import machine
from benchmarks.peers import PeerFailed, PeerMissing, flwr_cohort, pfl_cohort
from tessera.crypto.secret import Secret
from tessera.data.examples import Examples
from tessera.learning.bound_model import BoundModel, Derived, Local, Table
from tessera.learning.models.din import DIN
from tessera.learning.models.lags import LagModel
from tessera.learning.models.next_word import NextWord
from tessera.learning.module_tables import Tables
from tessera.learning.softmax import CANDIDATES, SampledSoftmax, Softmax
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import Job, Trainable, click_loss, prepare
from tessera.learning.training.local import Sequential
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised.check import best

ITEMS, CATEGORIES, USERS = 143_534, 4_815, 49_023
CLIENTS, BASELINE_CLIENTS, PEER_CLIENTS = 100, 10, 20
OWN, EXAMPLES, HISTORY, SPREAD = 301, 330, 50, 0.15
TRAINING = LocalTraining(batch=2, rate=0.1)
REPEATS = 5
DENSE: Final = 64_327

WORDS, OWN_WORDS, NEGATIVES, SPOKEN, WIDTH, LENGTH = 24_661, 300, 200, 600, 32, 4
SPEAKERS = 20
TEXT = LocalTraining(batch=4, rate=0.2, table_rate=1.0)
NEXT_WORD = Softmax("words.weight", "biases.weight", target="next", negatives=NEGATIVES)

GOODS, GOODS_DRAWN = 3_706, 300
LAGGED = LocalTraining(batch=50, examples=50, rate=1.0, decay=1.0, weight_decay=2e-4)
NEXT_ITEM = SampledSoftmax(
    "items.weight",
    "biases.weight",
    target="item",
    negatives=GOODS_DRAWN,
    weights=np.arange(1.0, GOODS + 1) ** -0.5,
)

Columns = dict[str, npt.NDArray[Any]]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- The cohort -----------------------------------------------------------------------------------


def cohort(clients: int) -> tuple[nn.Module, BoundModel, list[Job]]:
    """The model and the clients' jobs: 301 items each, of which examples and histories are made."""
    rng = np.random.default_rng(1)
    module = DIN(ITEMS, CATEGORIES, USERS)
    tables = Tables(
        {
            "items.weight": Table("item", "history"),
            "categories.weight": Derived(
                "items.weight",
                rng.integers(0, CATEGORIES, ITEMS),
                {"category": "item", "history_category": "history"},
            ),
            "users.weight": Local("user"),
        }
    )
    bound = tables.bind(module)
    if bound.dense_size != DENSE:
        raise SystemExit(f"the model has {bound.dense_size:,} dense parameters, not {DENSE:,}")
    dense = bound.pack(module)
    initial = {table.name: bound.initial(table.name) for table in bound.tables}
    jobs = []
    for client in range(clients):
        own = rng.choice(ITEMS, OWN, replace=False)
        n = int(EXAMPLES * np.exp(SPREAD * rng.standard_normal() - SPREAD**2 / 2))
        examples = Examples(
            {
                "user": np.full(n, client),
                "item": rng.choice(own, n),
                "history": rng.choice(own, (n, HISTORY)),
                "label": rng.integers(0, 2, n).astype(np.float32),
            }
        )
        rows = bound.all_row_ids_of(examples)
        parts = {name: TablePart(ids, initial[name][ids]) for name, ids in rows.items()}
        users = {"users": parts.pop("users")}
        trained = {name: part.ids for name, part in parts.items()}
        jobs.append(
            Job(
                client,
                Submodel(dense, parts, trained),
                examples,
                users,
                coins=Secret(int(client).to_bytes(32, "big")),
            )
        )
    return module, bound, jobs


# --- Baselines ------------------------------------------------------------------------------------


def small_module() -> nn.Module:
    """The model with tables that hold one client's rows."""
    return DIN(OWN, OWN, 1)


def train_by_hand(module: nn.Module, columns: Columns, batch: int, rate: float) -> None:
    """A client's training as one would write it."""
    fields = {name: torch.from_numpy(column) for name, column in columns.items()}
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    module.train()
    for which in torch.randperm(len(fields["label"])).split(batch):
        step: dict[str, Tensor] = {name: column[which] for name, column in fields.items()}
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(module(step), step["label"]).backward()
        optimizer.step()


def one_after_the_other(jobs: list[Job], columns: list[Columns]) -> None:
    """The loop over clients, each with a fresh copy of the weights and its own rows."""
    module = small_module()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    for job, own in zip(jobs, columns, strict=True):
        module.load_state_dict(start)
        with torch.no_grad():
            for name in ("items", "categories"):
                rows = torch.from_numpy(job.submodel.tables[name].values)
                module.get_parameter(f"{name}.weight")[: len(rows)].copy_(rows)
        train_by_hand(module, own, TRAINING.batch, TRAINING.rate)
        {name: value - start[name] for name, value in module.state_dict().items()}


def columns_of(bound: BoundModel, jobs: list[Job]) -> list[Columns]:
    return [dict(prepare(bound, job).batch) for job in jobs]


# --- The text task --------------------------------------------------------------------------------


def speakers() -> tuple[nn.Module, BoundModel, list[Job]]:
    """The next-word model and its clients' jobs: own words and negatives."""
    rng = np.random.default_rng(2)
    module = NextWord(WORDS, length=LENGTH, width=WIDTH, hidden=WIDTH)
    tables = {
        "words.weight": Table("next", "context"),
        "biases.weight": Table("next"),
        "before.weight": Table("context"),
    }
    bound = Tables(tables).bind(module, NEXT_WORD)
    dense = bound.pack(module)
    initial = {table.name: bound.initial(table.name) for table in bound.tables}
    jobs = []
    for client in range(SPEAKERS):
        own = rng.choice(WORDS, OWN_WORDS, replace=False)
        n = int(SPOKEN * np.exp(SPREAD * rng.standard_normal() - SPREAD**2 / 2))
        examples = Examples({"context": rng.choice(own, (n, LENGTH)), "next": rng.choice(own, n)})
        drawn = rng.choice(WORDS, NEGATIVES, replace=False).astype(np.uint64)
        rows = np.union1d(bound.row_ids_of(examples)["words"], drawn)
        parts = {name: TablePart(rows, values[rows]) for name, values in initial.items()}
        jobs.append(
            Job(
                client,
                Submodel(dense, parts, dict.fromkeys(parts, rows)),
                examples,
                coins=Secret(int(client).to_bytes(32, "big")),
            )
        )
    return module, bound, jobs


def text_by_hand(bound: BoundModel, jobs: list[Job]) -> None:
    """The loop over speakers: a module with the candidates' rows, SGD, a loop over batches."""
    for job in jobs:
        ready = prepare(bound, job)
        module = NextWord(len(ready.rows["words"]), length=LENGTH, width=WIDTH, hidden=WIDTH)
        with torch.no_grad():
            for name, values in ready.values.items():
                module.get_parameter(f"{name}.weight").copy_(torch.from_numpy(values))
        fields = {name: torch.from_numpy(column) for name, column in ready.batch.items()}
        weights = torch.from_numpy(ready.shared[CANDIDATES])
        optimizer = torch.optim.SGD(module.parameters(), lr=TEXT.rate)
        module.train()
        for which in torch.randperm(ready.examples).split(TEXT.batch):
            step = {name: column[which] for name, column in fields.items()}
            optimizer.zero_grad()
            F.cross_entropy(module(step) + weights, step["next"]).backward()
            optimizer.step()


def text_row(*, quick: bool) -> machine.Row:
    """The text task side by side, against one speaker after the other."""
    module, bound, jobs = speakers()
    learner = best(Trainable(module, bound, NEXT_WORD, TEXT), sample=jobs, compile=False)
    few = jobs[: SPEAKERS // 4]
    examples = sum(len(job.examples) for job in jobs)
    scale = examples / sum(len(job.examples) for job in few)
    ours, by_hand = [], []
    for turn in range(1 if quick else REPEATS):
        note(f"  text, turn {turn + 1}: {learner.name}, by hand")
        ours.append(seconds_of(partial(learner.train, jobs, round_id=0)))
        by_hand.append(scale * seconds_of(partial(text_by_hand, bound, few)))
    taken, baseline = min(ours), min(by_hand)
    settings = {
        "clients": len(jobs),
        "examples": examples,
        "batch": TEXT.batch,
        "candidates": OWN_WORDS + NEGATIVES,
        "width": WIDTH,
        "baseline scaled from": len(few),
    }
    ratio = baseline / taken
    return machine.result(
        f"text round, {learner.name}",
        settings,
        taken,
        "s",
        baseline,
        "one after the other",
        ratio,
        ">= 4",
        machine.meets(ratio, ">= 4"),
    )


# --- What comes next ------------------------------------------------------------------------------


def shoppers() -> tuple[nn.Module, BoundModel, list[Job]]:
    """The lag model and its clients' jobs, as long as those of MovieLens 1M."""
    rng = np.random.default_rng(3)
    module = LagModel(GOODS, length=HISTORY, width=64)
    tables = {"items.weight": Table("item", "history"), "biases.weight": Table("item")}
    bound = Tables(tables).bind(module, NEXT_ITEM)
    dense = bound.pack(module)
    initial = {table.name: bound.initial(table.name) for table in bound.tables}
    jobs = []
    for client in range(CLIENTS):
        had = int(np.clip(np.exp(4.5 + rng.standard_normal()), 20, GOODS // 2))
        own = rng.permutation(rng.choice(GOODS, had, replace=False, p=NEXT_ITEM.weights))
        at = np.sort(rng.choice(had, min(had, LAGGED.batch), replace=False))
        back = at[:, None] - 1 - np.arange(HISTORY)
        history = np.where(back >= 0, own[np.maximum(back, 0)], -1)
        drawn = rng.choice(GOODS, GOODS_DRAWN, p=NEXT_ITEM.weights)
        rows = np.union1d(own, drawn).astype(np.uint64)
        parts = {name: TablePart(rows, values[rows]) for name, values in initial.items()}
        jobs.append(
            Job(
                client,
                Submodel(dense, parts, dict.fromkeys(parts, rows)),
                Examples({"item": own[at], "history": history}),
                coins=Secret(int(client).to_bytes(32, "big")),
                own=np.sort(own).astype(np.uint64),
            )
        )
    return module, bound, jobs


def next_by_hand(bound: BoundModel, jobs: list[Job]) -> None:
    """The loop over clients: a module with a client's rows, SGD, one step."""
    for job in jobs:
        ready = prepare(bound, job)
        module = LagModel(len(ready.rows["items"]), length=HISTORY, width=64)
        with torch.no_grad():
            for name, values in ready.values.items():
                module.get_parameter(f"{name}.weight").copy_(torch.from_numpy(values))
        batch = {name: torch.from_numpy(column) for name, column in ready.batch.items()}
        batch[CANDIDATES] = torch.from_numpy(ready.shared[CANDIDATES])
        optimizer = torch.optim.SGD(
            module.parameters(), lr=LAGGED.rate, weight_decay=LAGGED.weight_decay
        )
        module.train()
        optimizer.zero_grad()
        NEXT_ITEM(module(batch), batch).mean().backward()
        optimizer.step()


def next_rows(*, quick: bool) -> list[machine.Row]:
    """`next` side by side, against our own trainer one by one and against a loop by hand."""
    module, bound, jobs = shoppers()
    model = Trainable(module, bound, NEXT_ITEM, LAGGED)
    learner, alone = best(model, sample=jobs, compile=False), Sequential(model)
    module.train()
    taken: dict[str, list[float]] = {"ours": [], "one by one": [], "by hand": []}
    for turn in range(2 if quick else 4 * REPEATS):
        note(f"  next, turn {turn + 1}: {learner.name}, one by one, by hand")
        taken["ours"].append(seconds_of(partial(learner.train, jobs, round_id=0)))
        taken["one by one"].append(seconds_of(partial(alone.train, jobs, round_id=0)))
        taken["by hand"].append(seconds_of(partial(next_by_hand, bound, jobs)))
    settings = {
        "clients": len(jobs),
        "examples": sum(len(job.examples) for job in jobs),
        "rows": round(float(np.mean([len(job.submodel.trained["items"]) for job in jobs]))),
        "negatives": GOODS_DRAWN,
        "width": 64,
        "learner": type(learner).__name__,
    }
    rows = []
    for name in ("one by one", "by hand"):
        ratio = min(taken[name]) / min(taken["ours"])
        rows.append(
            machine.result(
                f"next round, {learner.name}",
                settings,
                min(taken["ours"]),
                "s",
                min(taken[name]),
                name,
                ratio,
                ">= 4",
                machine.meets(ratio, ">= 4"),
            )
        )
    return rows


# --- Rows of results -----------------------------------------------------------------------------


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="measured once, no peers")
    parser.add_argument("--text", action="store_true", help="the text task alone")
    parser.add_argument("--next", action="store_true", help="the lag model of `next` alone")
    parser.add_argument("--require-peers", action="store_true", help="exit 1 without the peers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # for the baselines; ours does it itself
    torch.manual_seed(0)
    calibration = machine.calibrate()
    if args.text or args.next:
        alone = [text_row(quick=args.quick)] if args.text else next_rows(quick=args.quick)
        machine.print_report(calibration, alone, title="Training a cohort", as_json=args.json)
        return machine.exit_status(alone, require_peers=False)
    module, bound, jobs = cohort(CLIENTS)
    settings = {
        "clients": len(jobs),
        "examples": sum(len(job.examples) for job in jobs),
        "batch": TRAINING.batch,
        "history": HISTORY,
        "dense": DENSE,
    }

    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        note("  compiling, with an empty cache")
        begin = time.monotonic()
        compiled = best(Trainable(module, bound, click_loss, TRAINING), sample=jobs)
        cold = time.monotonic() - begin
        torch.compiler.reset()
        note(f"  {compiled.name}: {compiled.reason}; again, from the cache")
        begin = time.monotonic()
        compiled = best(Trainable(module, bound, click_loss, TRAINING), sample=jobs)
        warm = time.monotonic() - begin
        uncompiled = best(
            Trainable(module, bound, click_loss, TRAINING), sample=jobs, compile=False
        )
        rows = measured(bound, jobs, settings, compiled, uncompiled, quick=args.quick)
        rows += [text_row(quick=args.quick), *next_rows(quick=args.quick)]
    for what, taken in (("empty", cold), ("full", warm)):
        rows.append(
            machine.result(
                "check and compile, wall",
                {"cache": what, "chosen": compiled.name},
                taken,
                "s",
                None,
                None,
                None,
                None,
                None,
            )
        )
    machine.print_report(calibration, rows, title="Training a cohort", as_json=args.json)
    return machine.exit_status(rows, require_peers=args.require_peers)


def measured(
    bound: BoundModel,
    jobs: list[Job],
    settings: dict[str, Any],
    compiled: Any,
    uncompiled: Any,
    *,
    quick: bool,
) -> list[machine.Row]:
    """Ours and the loop by hand in turns, then the peers."""
    few = jobs[:BASELINE_CLIENTS]
    own = columns_of(bound, few)
    scale = settings["examples"] / sum(len(job.examples) for job in few)
    ours: list[float] = []
    slower: list[float] = []
    by_hand: list[float] = []
    turns = 1 if quick else REPEATS
    for turn in range(turns):
        note(f"  turn {turn + 1} of {turns}: {compiled.name}, by hand")
        ours.append(seconds_of(partial(compiled.train, jobs, round_id=0)))
        by_hand.append(scale * seconds_of(partial(one_after_the_other, few, own)))
        if turn == 0:
            slower.append(seconds_of(partial(uncompiled.train, jobs, round_id=0)))
    baseline = median(by_hand)
    name = "one after the other"
    rows = []
    for learner, taken, target in (
        (compiled, median(ours), ">= 7"),
        (uncompiled, median(slower), None),
    ):
        ratio = baseline / taken
        rows.append(
            machine.result(
                f"round, {learner.name}",
                {**settings, "baseline scaled from": BASELINE_CLIENTS},
                taken,
                "s",
                baseline,
                name,
                ratio,
                target,
                target and machine.meets(ratio, target),
            )
        )
    if not quick:
        rows += peer_rows(bound, jobs, settings, median(ours))
    return rows


def peer_rows(
    bound: BoundModel, jobs: list[Job], settings: dict[str, Any], ours: float
) -> list[machine.Row]:
    few = jobs[:PEER_CLIENTS]
    own = columns_of(bound, few)
    scale = settings["examples"] / sum(len(job.examples) for job in few)
    rows = []
    for what, peer, target in (
        ("pfl", pfl_cohort, ">= 8"),
        ("Flower's simulation", flwr_cohort, ">= 10"),
    ):
        note(f"  {what}, {PEER_CLIENTS} clients (takes a minute)")
        label, theirs = None, None
        try:
            found = peer.run(small_module, train_by_hand, own, TRAINING.batch, TRAINING.rate)
        except (PeerMissing, PeerFailed) as error:
            note(f"  {error}")
        else:
            label, theirs = f"{found.package} {found.version}", scale * found.seconds
        ratio = None if theirs is None else theirs / ours
        rows.append(
            machine.result(
                f"round, against {what}",
                {**settings, "peer scaled from": PEER_CLIENTS},
                ours,
                "s",
                theirs,
                label,
                ratio,
                target,
                machine.meets(ratio, target),
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
