"""A bundle: what all parties of a deployment begin with. The completed plan, the first model, maps;
where clients have data of their own, also the catalogue of items, and the code by name and digest.

All of it is public; where clients have data of their own nothing in it follows from these. Leader
and helper make their model from it without PyTorch, and both the same. One file of arrays (`.npz`);
its digest covers every byte of content and is what journals and requests are bound to, so that
nobody goes on under another plan or from another model.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.data.catalogue import ItemCatalogue
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
from tessera.privacy.dp.accounting import check_people
from tessera.rounds.noise import noise_of
from tessera.rounds.party import ServerModel
from tessera.rounds.resolve import resolve
from tessera.services.code import NamedCode
from tessera.simulation import population

if TYPE_CHECKING:
    from tessera.tasks import Task
    from tessera.tasks.own import OwnInteractions

VERSION: Final = 3
PLAN, ABOUT, DENSE, CATALOGUE = "plan", "about", "dense", "catalogue"
GIVEN, MAP = "given/", "map/"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticClients:
    """Clients without data, for a plan without a task: how many, and rows of each."""

    clients: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the module's parameters are called: of the dense part each with its shape, in order, and
    of the tables by name. `architecture` makes a module of ours again, `history` is how many items
    back it looks."""

    dense: tuple[tuple[str, tuple[int, ...]], ...] = ()
    tables: Mapping[str, str] = field(default_factory=dict)
    architecture: Mapping[str, Any] | None = None
    history: int = 0

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> ModelShape:
        return cls(
            dense=tuple((str(name), tuple(map(int, shape))) for name, shape in found["dense"]),
            tables=dict(found["tables"]),
            architecture=found["architecture"],
            history=int(found["history"]),
        )


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
    own_data: bool = False
    """Whether every client reads interactions of its own."""
    catalogue: ItemCatalogue | None = field(default=None, repr=False)
    code: NamedCode | None = None
    """The task function, where it is not one of ours."""
    shape: ModelShape = field(default_factory=ModelShape, repr=False)

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
        if plan.dp is not None:
            check_people(plan.dp.delta, self.clients)
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
            "own_data": self.own_data,
            "code": None if self.code is None else [self.code.name, self.code.digest.hex()],
            "shape": {
                "dense": [[name, list(shape)] for name, shape in self.shape.dense],
                "tables": dict(self.shape.tables),
                "architecture": self.shape.architecture,
                "history": self.shape.history,
            },
        }
        listed = {} if self.catalogue is None else {CATALOGUE: _bytes(self.catalogue.to_json())}
        return {
            **listed,
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
        rows, code = about["synthetic"], about["code"]
        listed = arrays.get(CATALOGUE)
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
            own_data=about["own_data"],
            catalogue=None if listed is None else ItemCatalogue.from_json(listed.tobytes()),
            code=None if code is None else NamedCode(code[0], bytes.fromhex(code[1])),
            shape=ModelShape.of_json(about["shape"]),
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
    if agreed.noise.open_setting:
        raise ConfigError(
            f"a bundle whose plan leaves this open: {agreed.noise.open_setting}",
            hint="`tessera pack` writes it; do not join a bundle that lacks it",
        )


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
    plan = noise_of(plan).calibrated()
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
    from tessera.runs.training import eligible

    task = tasks.load(plan.task.name, data=data, **plan.task.options)
    if plan.grouped and plan.groups.period and task.data.timeline is None:
        raise ConfigError(
            f"[groups] period = {plan.groups.period} with task {task.name!r}, whose data have no "
            "times: there is nothing to cut a new period's data by, and what is fixed on arrival "
            "shows whose it is",
            hint="period = 0, or data with times",
        )
    return _packed(plan, task, lambda plan: int(max(eligible(task.data, plan))) + 1)


def pack_own(
    plan: Plan,
    make: Callable[[OwnInteractions], Task],
    own: OwnInteractions,
    code: NamedCode | None = None,
) -> Bundle:
    """For clients that read their own interactions: the model of a task function, made from what
    is public alone. `code` names the function where it is not one of ours. Needs PyTorch."""
    task = make(own)
    if not task.data.of_nobody:
        raise ConfigError(
            f"task {task.name!r} was made of examples, and a bundle holds what is public",
            hint="a task function reads by what it is given: own.clicks, own.sequences, own.read",
        )
    return _packed(
        plan,
        task,
        lambda _: own.clients,
        own_data=True,
        catalogue=own.catalogue,
        code=code,
    )


def _packed(
    plan: Plan,
    task: Task,
    clients: Callable[[Plan], int],
    *,
    own_data: bool = False,
    catalogue: ItemCatalogue | None = None,
    code: NamedCode | None = None,
) -> Bundle:
    from tessera.runs.training import complete

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
    plan = complete(plan, task)
    count = clients(plan)
    task = resolve(plan).cohorts.task_of(task)
    module = task.build(plan.seed)
    bound = task.bind(module)
    shared = [t for t in bound.tables if not t.local]
    names = [t.name for t in shared]
    specs = {name: bound.spec(name, seed=plan.seed) for name in names}
    maps = {name: each for name, each in bound.derived_maps().items() if name in names}
    history = task.data.train.fields.get("history")
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
        clients=count,
        own_data=own_data,
        catalogue=catalogue,
        code=code,
        shape=ModelShape(
            dense=bound.dense,
            tables={t.name: t.parameter for t in shared},
            architecture=task.architecture,
            history=0 if history is None or history.ndim != 2 else history.shape[1],
        ),
    )
