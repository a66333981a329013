"""A bundle: what all parties of a deployment begin with. The completed plan, the first model, maps.

A leader and a helper make their model from it without PyTorch, and both the same. One file of
arrays (`.npz`); its digest covers every byte of content and is what journals and requests are bound
to, so that nobody goes on under another plan or from another model.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.errors import ConfigError, MisuseError
from tessera.learning.tables.submodel import Floats, read_npz
from tessera.learning.tables.table import (
    ZEROS,
    DenseTable,
    DerivedMap,
    Distribution,
    Given,
    LazyTable,
    Normal,
    StoredTable,
    TableSpec,
    Uniform,
    Zeros,
)
from tessera.plan import Plan, ServicePlan
from tessera.rounds.noise import noise_of
from tessera.rounds.party import ServerModel
from tessera.rounds.resolve import resolve
from tessera.simulation import population

VERSION: Final = 2
PLAN, ABOUT, DENSE = "plan", "about", "dense"
GIVEN, MAP = "given/", "map/"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticClients:
    """Clients without data, for a plan without a task: how many, and rows of each."""

    clients: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A plan with its first model. `given` are tables that begin with certain values."""

    plan: Plan
    dense: Floats = field(repr=False)
    specs: Mapping[str, TableSpec]
    given: Mapping[str, Floats] = field(default_factory=dict, repr=False)
    maps: Mapping[str, npt.NDArray[np.uint64]] = field(default_factory=dict, repr=False)
    counts: bytes = b""
    """Digest of the public counts by which clients draw negatives, if they do."""
    clients: int
    synthetic: SyntheticClients | None = None

    def __post_init__(self) -> None:
        check_deployable(self.plan)
        model, packed = self.plan.model, self._digest(named=False).hex()
        if model.packed not in ("", packed):
            raise ConfigError(
                f"the plan is for the first model {model.packed[:16]}, and this is {packed[:16]}",
                hint="pack the plan again, without [model] packed",
            )
        plan = replace(self.plan, model=replace(model, packed=packed))
        object.__setattr__(self, "plan", plan)
        plan.check_population(
            self.clients, hint="pack for more clients, or make the cohort smaller"
        )

    def served(self, service: ServicePlan) -> Bundle:
        """The same with an operator's own settings; its digest does not change."""
        return replace(self, plan=replace(self.plan, service=service))

    # --- what follows ---------------------------------------------------------------------------

    def first_model(self) -> ServerModel:
        """The model before the first round, as a server has it."""
        tables: dict[str, StoredTable] = {}
        for name, spec in self.specs.items():
            rows = self.given.get(name)
            tables[name] = LazyTable(spec) if rows is None else DenseTable.from_array(name, rows)
        return ServerModel(
            self.plan,
            dense=self.dense.copy(),
            tables=tables,
            derived=self.derived_maps(),
            counts=self.counts,
        )

    def derived_maps(self) -> dict[str, DerivedMap]:
        return {
            name: DerivedMap(
                self.specs[self.plan.table(name).derived_from], self.specs[name], images
            )
            for name, images in self.maps.items()
        }

    @cached_property
    def digest(self) -> bytes:
        """Of everything in it."""
        return self._digest(named=True)

    def _digest(self, *, named: bool) -> bytes:
        """The same, with or without the plan's own name for the rest ([model] packed); and without
        [service], which every operator may change."""
        plan = replace(self.plan, service=ServicePlan())
        if not named:
            plan = replace(plan, model=replace(plan.model, packed=""))
        hashed = hashlib.sha256(Label.BUNDLE.encode())
        for name, array in sorted(self._arrays(plan).items()):
            shape = " ".join(map(str, array.shape))
            hashed.update(encode_context(name, str(array.dtype), shape))
            hashed.update(array.tobytes())
        return hashed.digest()

    # --- the file -------------------------------------------------------------------------------

    def _arrays(self, plan: Plan) -> dict[str, npt.NDArray[Any]]:
        about = {
            "version": VERSION,
            "clients": self.clients,
            "synthetic": None if self.synthetic is None else self.synthetic.rows,
            "tables": [
                {
                    "name": spec.name,
                    "size": spec.size,
                    "width": spec.width,
                    "initial": _initial_text(spec.initial),
                    "seed": spec.seed,
                }
                for spec in self.specs.values()
            ],
            "counts": self.counts.hex(),
        }
        return {
            PLAN: _bytes(plan.to_toml()),
            ABOUT: _bytes(json.dumps(about)),
            DENSE: self.dense.astype("<f4"),
            **{GIVEN + name: rows.astype("<f4") for name, rows in self.given.items()},
            **{MAP + name: images.astype("<u8") for name, images in self.maps.items()},
        }

    def write(self, path: Path) -> None:
        content = io.BytesIO()
        np.savez(content, **self._arrays(self.plan))  # type: ignore[arg-type]
        path.write_bytes(content.getvalue())

    @classmethod
    def read(cls, path: Path) -> Bundle:
        """`ConfigError` for anything but a bundle."""
        try:
            arrays = read_npz(path)
            about = json.loads(arrays[ABOUT].tobytes())
            plan = Plan.parse(arrays[PLAN].tobytes().decode())
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{path} is not a bundle: {error}", hint="`tessera pack PLAN.toml` writes one"
            ) from error
        if about.get("version") != VERSION:
            raise ConfigError(
                f"{path}: bundle version {about.get('version')}, this tessera reads {VERSION}",
                hint="pack the plan again",
            )
        specs = {
            t["name"]: TableSpec(
                name=t["name"],
                size=t["size"],
                width=t["width"],
                initial=_initial(t["initial"]),
                seed=t["seed"],
            )
            for t in about["tables"]
        }
        rows = about["synthetic"]
        return cls(
            plan=plan,
            dense=arrays[DENSE].astype(np.float32),
            specs=specs,
            given={
                name.removeprefix(GIVEN): array.astype(np.float32)
                for name, array in arrays.items()
                if name.startswith(GIVEN)
            },
            maps={
                name.removeprefix(MAP): array.astype(np.uint64)
                for name, array in arrays.items()
                if name.startswith(MAP)
            },
            counts=bytes.fromhex(about["counts"]),
            clients=about["clients"],
            synthetic=None
            if rows is None
            else SyntheticClients(clients=about["clients"], rows=rows),
        )


def check_deployable(plan: Plan) -> None:
    """Refuse by name what only a simulation does so far."""
    agreed = resolve(plan)
    reasons = (
        agreed.sum.only_simulated,
        agreed.cohorts.only_simulated,
        agreed.noise.only_simulated,
        plan.simulation.only_simulated,
    )
    for reason in filter(None, reasons):
        raise ConfigError(reason, hint="`tessera run` simulates it")


def _bytes(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _initial_text(initial: Distribution) -> list[Any]:
    match initial:
        case Zeros():
            return ["zeros"]
        case Uniform(bound):
            return ["uniform", bound]
        case Normal(std):
            return ["normal", std]
        case Given():
            return ["given"]
    raise MisuseError(f"unknown first rows: {initial}")


def _initial(text: list[Any]) -> Distribution:
    match text:
        case ["zeros"]:
            return ZEROS
        case ["uniform", bound]:
            return Uniform(float(bound))
        case ["normal", std]:
            return Normal(float(std))
        case ["given"]:
            return Given()
    raise ConfigError(f"a bundle with unknown first rows: {text}", hint="pack the plan again")


# --- packing --------------------------------------------------------------------------------------
#
# Making a bundle: of a named task, or of synthetic clients where the plan names none.


def pack_synthetic(plan: Plan, clients: int, rows: int) -> Bundle:
    """Clients with random rows and NumPy noise for updates (`simulation/population.py`)."""
    if not plan.is_complete:
        raise ConfigError(
            "the plan names neither a task nor tables", hint="add [task] name, or [[table]]s"
        )
    if noise_of(plan).clips_examples:
        raise ConfigError(
            f"[dp] unit = {noise_of(plan).dp.unit.value!r}: synthetic clients have no examples",
            hint='name a [task], or use unit = "user"',
        )
    maps = population.derived_maps(plan)
    return Bundle(
        plan=plan,
        dense=population.dense(plan),
        specs={t.name: population.spec(plan, t.name) for t in plan.tables},
        maps={
            name: each.images(np.arange(each.parent.size, dtype=np.uint64))
            for name, each in maps.items()
        },
        clients=clients,
        synthetic=SyntheticClients(clients=clients, rows=rows),
    )


def pack_task(plan: Plan, data: Path | None) -> Bundle:
    """The plan completed by its task, and the task's first model. Needs PyTorch."""
    from tessera import tasks
    from tessera.runs.training import Clients, complete

    task = tasks.load(plan.task.name, data=data, **plan.task.options)
    if task.setup is not None:
        raise ConfigError(
            f"task {task.name!r} has a set-up over all clients, which is not part of a deployment "
            "yet",
            hint="`tessera run` simulates it",
        )
    if task.beside is not None:
        one, other = task.beside.names
        raise ConfigError(
            f"task {task.name!r} has two models, and a federation trains one",
            hint=f'a federation with model = "{one}" and another with model = "{other}" in [task]',
        )
    if plan.grouped and plan.groups.period and task.data.timeline is None:
        raise ConfigError(
            f"[groups] period = {plan.groups.period} with task {task.name!r}, whose data have no "
            "times: there is nothing to cut a new period's data by, and what is fixed on arrival "
            "shows whose it is",
            hint="period = 0, or data with times",
        )
    plan = complete(plan, task)
    task = resolve(plan).cohorts.task_of(task)
    module = task.build(plan.seed)
    bound = task.bind(module)
    names = [t.name for t in bound.tables if not t.local]
    specs = {name: bound.spec(name, seed=plan.seed) for name in names}
    maps = {name: each for name, each in bound.derived_maps().items() if name in names}
    return Bundle(
        plan=plan,
        dense=bound.pack(module),
        specs=specs,
        given={n: bound.initial(n) for n in names if isinstance(specs[n].initial, Given)},
        maps={
            name: each.images(np.arange(each.parent.size, dtype=np.uint64))
            for name, each in maps.items()
        },
        counts=bound.counts_digest,
        clients=int(max(Clients(task, bound, plan).eligible)) + 1,
    )
