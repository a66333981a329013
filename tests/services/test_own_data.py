"""Clients that read files of their own, by a module and a reader of their own, over TLS.

Every client is a process in a folder of its own, with its own file, keys and code; what comes of it
is the simulator's model over all files together, to the bit.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "h11", "torch", "pyarrow")):
    pytest.skip("an extra is not installed", allow_module_level=True)

from services.processes import free_port
from tessera.cli.main import main
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.examples import ClientData, Examples
from tessera.ids import SERVER
from tessera.learning.training.vectorised.learner import single_threaded
from tessera.plan import Plan
from tessera.runs import training
from tessera.runs.client_training import Trainer
from tessera.runs.training import Training
from tessera.services.bundle import Bundle
from tessera.services.deployment import open_leader
from tessera.services.group_leader import GroupLeaderService, epochs_in
from tessera.services.keyring import Keyring
from tessera.services.loopback import ReplayedGroups
from tessera.services.membership import groups_of
from tessera.services.model_export import ExportedModel, exported, newest
from tessera.services.packing import deploy, task_function
from tessera.services.recommending import held, recommended
from tessera.tasks import Task
from tessera.tasks.own import OwnInteractions

CLIENTS, ITEMS, LINES, ROUNDS = 10, 60, 24, 3
SCRIPT: Final = "files of their own"
PLAN: Final = """
scheme = "secure-submodel"
cohort = 10
federation = "diaries"
seed = 4
[groups]
size = 5
small = true
delay = 0.0
[service]
poll = 5
retry = 0.05
"""
CODE: Final = '''
"""A module and a reader of one's own: was the next one liked, after the last one?"""

from pathlib import Path

import numpy as np
from torch import nn

from tessera import Table, Tables, Task
from tessera.data.examples import Examples

EMPTY = {
    "user": np.zeros(0, np.int64),
    "item": np.zeros(0, np.int64),
    "history": np.zeros((0, 2), np.int64),
    "label": np.zeros(0, np.float32),
}


class Diary(nn.Module):
    def __init__(self, items):
        super().__init__()
        self.items = nn.Embedding(items, 6)
        self.after = nn.Linear(6, 6)

    def forward(self, batch):
        ids = batch["history"]
        before = self.after((self.items(ids.clamp(min=0)) * (ids >= 0).unsqueeze(-1)).sum(-2))
        return (before * self.items(batch["item"])).sum(-1)


def reader(row_of, client):
    def read(source, until):
        lines = [line.split("|") for line in Path(source).read_text().splitlines()]
        known = [
            (row_of(name), float(stars))
            for when, name, stars in lines
            if row_of(name) >= 0 and (until is None or int(when) <= until)
        ]
        rows = np.array([row for row, _ in known], np.int64)
        liked = np.array([stars >= 4 for _, stars in known], np.float32)
        return Examples(
            {
                "user": np.full(max(0, len(rows) - 2), client),
                "item": rows[2:],
                "history": np.stack([rows[:-2], rows[1:-1]], 1),
                "label": liked[2:],
            }
        )

    return read


def task(own):
    data = own.read(
        reader(own.catalogue.row, own.client),
        sizes={"item": own.items},
        fields=EMPTY,
        name="diaries",
    )
    return Task(
        name="diaries",
        data=data,
        module=lambda: Diary(own.items),
        tables=Tables({"items.weight": Table("item", "history")}),
    )
'''


def diary(client: int) -> str:
    """Lines of one client, some with an item that nobody else and no catalogue has."""
    rng = np.random.default_rng([7, client])
    names = [f"i{rng.integers(ITEMS)}" for _ in range(LINES)]
    names[5] = names[9] = only_of(client)
    return "".join(
        f"{1_700_000_000 + 3600 * at}|{name}|{rng.integers(1, 6)}\n"
        for at, name in enumerate(names)
    )


def only_of(client: int) -> str:
    return f"own-secret-of-{client}-"


def write_code(folder: Path) -> None:
    (folder / "diaries").mkdir(parents=True)
    (folder / "diaries" / "__init__.py").write_text("")
    (folder / "diaries" / "model.py").write_text(CODE)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package as whoever packs has it."""
    write_code(tmp_path / "operator")
    monkeypatch.syspath_prepend(str(tmp_path / "operator"))
    monkeypatch.chdir(tmp_path)
    invalidate_caches()
    yield import_module("diaries.model")
    for name in [name for name in sys.modules if name.partition(".")[0] == "diaries"]:
        del sys.modules[name]


def catalogue(folder: Path, count: int = ITEMS) -> Path:
    path = folder / "catalogue.csv"
    lines = (f"i{at},Title {at}\n" for at in range(count))
    path.write_text("item,title\n" + "".join(lines))
    return path


class TenFolders:
    """A leader, and ten clients each in a folder of its own."""

    def __init__(self, code: Any, folder: Path) -> None:
        self.folder, self.bundle_file = folder, folder / "bundle.npz"
        self.bundle = deploy(
            code.task,
            Plan.parse(PLAN, own_task=True),
            items=catalogue(folder),
            clients=CLIENTS,
            out=self.bundle_file,
        )
        keys = ["keys", str(self.bundle_file), "--out", str(folder / "keys")]
        assert main([*keys, "--insecure-test-entropy", SCRIPT]) == 0
        self.port = free_port()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["services.own_zygote"])
        self.running: dict[str, Any] = {}
        for client in range(CLIENTS):
            own = folder / "clients" / f"client-{client}"
            write_code(own)
            (own / "mine.txt").write_text(diary(client))
            (own / "bundle.npz").write_bytes(self.bundle_file.read_bytes())
            (folder / "keys" / own.name).rename(own / "keys")

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start(self, name: str, folder: Path, *line: object) -> None:
        from services import own_zygote

        process = self._context.Process(
            target=own_zygote.run,
            args=(str(folder), str(self.log(name)), [*map(str, line)]),
            daemon=True,
        )
        process.start()
        self.running[name] = process

    def serve(self, *more: object) -> None:
        line = ["serve", self.bundle_file, "--keys", self.folder / "keys" / "leader", *more]
        line += ["--state", self.state, "--port", self.port]
        self.start("leader", self.folder, *line, "--insecure-test-entropy", SCRIPT)

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def join(self, client: int) -> None:
        own = self.folder / "clients" / f"client-{client}"
        line = ["join", "bundle.npz", self.url, "--client", client, "--keys", "keys"]
        line += ["--state", "state", "--home", "home", "--interactions", "mine.txt"]
        line += ["--task", "diaries.model:task", "--insecure-test-entropy", SCRIPT]
        self.start(own.name, own, *line)

    def wait(self, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        for name, process in self.running.items():
            process.join(max(0.0, end - time.monotonic()))
            assert process.exitcode == 0, (
                f"{name}: {process.exitcode}\n{self.log(name).read_text()}"
            )

    def close(self) -> None:
        for process in self.running.values():
            if process.is_alive():
                process.kill()
            process.join()


def joined(code: Any, bundle: Bundle) -> Task:
    """The same task over all diaries in one place."""
    assert bundle.catalogue is not None
    own = OwnInteractions(clients=CLIENTS, catalogue=bundle.catalogue)
    parts = []
    for client in range(CLIENTS):
        path = Path(f"joined-{client}.txt")
        path.write_text(diary(client))
        parts.append(code.reader(bundle.catalogue.row, client)(path, None))
    counts = [0, *np.cumsum([len(part) for part in parts])]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0].fields}
    task: Task = code.task(own)
    none = np.zeros(CLIENTS + 1, np.int64)
    data = ClientData(
        name="diaries",
        train=Examples(columns),
        offsets=np.array(counts),
        test=parts[0].take(slice(0)),
        test_offsets=none,
        sizes=task.data.sizes,
    )
    return replace(task, data=data)


def simulated(
    code: Any, made: TenFolders, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> ReplayedGroups:
    """The simulator over all files, with the groups and in the order of the deployment."""
    plan, bundle = made.bundle.plan, made.bundle
    keyring = Keyring.read(made.folder / "keys" / "leader", SERVER, bundle.digest)
    monkeypatch.setattr(training, "federation_for", lambda _: ReplayedGroups)
    run = Training(
        joined(code, bundle),
        plan,
        entropy=ScriptedEntropy(SCRIPT.encode()),
        trainer=Trainer.SEQUENTIAL,
    )
    assert isinstance(run.federation, ReplayedGroups)
    run.federation.drawn = groups_of(keyring.draws(plan), plan)
    run.federation.replay(epochs_in(made.state), rounds)
    return run.federation


@pytest.fixture
def made(code: Any, tmp_path: Path) -> Iterator[TenFolders]:
    found = TenFolders(code, tmp_path)
    yield found
    found.close()


def test_ten_folders_train_the_simulators_model_to_the_bit(
    code: Any, made: TenFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.serve("--rounds", ROUNDS, "--export", made.folder / "models")
    for client in range(CLIENTS):
        made.join(client)
    made.wait()
    entropy = ScriptedEntropy(SCRIPT.encode())
    leader = open_leader(made.bundle, made.folder / "keys" / "leader", made.state, entropy)
    assert isinstance(leader, GroupLeaderService)
    with leader.journal:
        digest, rounds = leader.model.digest, leader.next_round
    assert rounds >= ROUNDS
    with single_threaded():
        assert digest == simulated(code, made, rounds, monkeypatch).model.digest
    assert digest != made.bundle.first_model().digest
    for client in range(CLIENTS):
        said = made.log(f"client-{client}").read_text()
        if os.geteuid() == 0:
            assert '"alone"' in said
        assert f"client {client}: {LINES - 4} examples" in said
    seen = [made.bundle_file, made.log("leader"), *made.state.iterdir()]
    stored = b"".join(path.read_bytes() for path in seen)
    with zipfile.ZipFile(made.bundle_file) as arrays:
        stored += b"".join(arrays.read(name) for name in arrays.namelist())
    for client in range(CLIENTS):
        assert only_of(client).encode() in diary(client).encode()
        assert only_of(client).encode() not in stored
    at_a_client(made)


def at_a_client(made: TenFolders) -> None:
    """What was exported is the leader's model, and a client ranks by it, by title."""
    models, own = made.folder / "models", made.folder / "clients" / "client-3"
    file = newest(models)
    assert file is not None
    found = exported(made.state, made.bundle)
    again = ExportedModel.from_bytes(file.read_bytes(), made.bundle)
    assert again.round_id == found.round_id
    for name, values in found.parameters.items():
        assert np.array_equal(values, again.parameters[name]), name
    os.chdir(own)
    make = task_function(made.bundle, "diaries.model:task")
    top = recommended(made.bundle, again, make, Path("mine.txt"))
    first = made.bundle.first_model()
    assert not np.array_equal(
        first.tables["items"].values(np.arange(5, dtype=np.uint64)),
        again.parameters["items.weight"][:5],
    )
    rows = [made.bundle.catalogue.row(one.id) for one in top]  # type: ignore[union-attr]
    assert len(top) == 10 and [one.title for one in top] == [f"Title {row}" for row in rows]
    items, weight, bias = (
        again.parameters[name] for name in ("items.weight", "after.weight", "after.bias")
    )
    liked = [
        int(name[1:])
        for _, name, stars in (line.split("|") for line in diary(3).splitlines()[2:])
        if int(stars) >= 4 and name.startswith("i")
    ]
    # By the module's own formula, over what the reader says was liked, its first two aside.
    known = held(make(of_three(made)).data)
    assert set(known) <= set(liked)
    scores = items[:ITEMS] @ (weight @ items[known[-2:]].sum(0) + bias)
    order = [row for row in np.argsort(-scores, kind="stable").tolist() if row not in known]
    assert rows == order[:10]
    assert recommended(made.bundle, again, make), "one who never trained, and has nothing"


def of_three(made: TenFolders) -> OwnInteractions:
    return OwnInteractions(
        clients=CLIENTS, catalogue=made.bundle.catalogue, client=0, source=Path("mine.txt")
    )
