"""Making a bundle for clients with data of their own, and what such a client runs: no PyTorch yet.

    tessera.deploy(shop.task, plan, items="catalogue.csv", clients=100, out="bundle.npz")

The function is called here without interactions, and at each client with that client's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tessera.data import catalogue
from tessera.data.catalogue import ItemCatalogue
from tessera.data.columns import PARQUET, TEXTS
from tessera.errors import ConfigError
from tessera.plan import Plan, TaskPlan
from tessera.services.bundle import Bundle, pack_own
from tessera.services.code import NAMED, NamedCode, imported

if TYPE_CHECKING:
    from tessera.services.task_clients import OwnSource
    from tessera.tasks import Task
    from tessera.tasks.own import OwnInteractions

    TaskFunction = Callable[[OwnInteractions], Task]

OF_THE_FILE: Final = ("path", "dictionary", "item_features")
"""Options of a task that name files of whoever packs; no client has them."""
SPARE: Final = 2
"""Of so many items a catalogue has room for one more."""


def deploy(
    task: TaskFunction | None,
    plan: Plan,
    *,
    items: Any = None,
    clients: int | None = None,
    title: str = "",
    popularity: str = "",
    room: int | None = None,
    out: Path | str | None = None,
) -> Bundle:
    """The bundle of a federation whose clients read interactions of their own.

    `task` is a function of a module that clients have, too, which takes an `OwnInteractions` and
    returns a `Task`; without it the plan names one of ours. `items` is the catalogue, a file or a
    frame with a line per item; without it ids are hashed. `clients` is how many there may be.
    """
    from tessera.tasks.own import OwnInteractions, id_key

    options = {k: v for k, v in plan.task.options.items() if k not in OF_THE_FILE}
    listed = None
    if items is not None:
        if options.get("ids") == "hash":
            raise ConfigError("a catalogue and hashed ids", hint="leave --items out, or ids")
        listed = _catalogue(items, options, title, popularity, room)
    elif options.get("ids") != "hash":
        raise ConfigError(
            "no catalogue: clients would number items each in its own way",
            hint='--items catalogue.csv, or ids = "hash" in [task]',
        )
    if task is None and plan.task.name == "sequences" and not popularity:
        options.setdefault("power", 0.0)  # nobody has counted what occurs
    plan = replace(plan, task=TaskPlan(name=plan.task.name, options=options))
    own = OwnInteractions(
        clients=plan.cohort if clients is None else clients,
        catalogue=listed,
        key=id_key(plan.federation),
    )
    code = None if task is None else NamedCode.of(task)
    bundle = pack_own(plan, task or _named(plan), own, code)
    if out is not None:
        bundle.write(Path(out))
    return bundle


def _catalogue(
    items: Any, options: dict[str, Any], title: str, popularity: str, room: int | None
) -> ItemCatalogue:
    found = catalogue.read(
        items,
        item=str(options.get("item", "item")),
        title=title or str(options.get("title", "")),
        category=str(options.get("category", "")),
        popularity=popularity,
    )
    return replace(found, room=len(found.ids) // SPARE if room is None else room)


def _named(plan: Plan) -> TaskFunction:
    from tessera.tasks.own import own_task

    if not plan.task.name:
        raise ConfigError("the plan names no task", hint="[task] name, or --task MODULE:FUNCTION")
    return partial(own_task, plan.task.name, plan.task.options)


# --- at a client ----------------------------------------------------------------------------------


def task_function(bundle: Bundle, name: str | None) -> TaskFunction:
    """What a client runs: the bundle's named task, or the code that its own operator names.

    `ConfigError`, before anything is imported, if that is not the code that was packed.
    """
    if bundle.code is None:
        if name is not None:
            raise ConfigError(
                f"--task {name}: this bundle's task is {bundle.plan.task.name!r}, one of ours",
                hint="leave --task out",
            )
        return _named(bundle.plan)
    if name is None:
        raise ConfigError(
            f"this federation trains by code of its own, {bundle.code.name}, and nobody here has "
            "agreed to run it",
            hint=f"read it, and then --task {bundle.code.name}",
        )
    return bundle.code.checked(name)


def sources(
    where: str, as_of: str | None, *, several: bool, said: Callable[[str], None]
) -> Callable[[int], OwnSource]:
    """Where each client's interactions are; of `several` in one process in a folder by number."""
    from tessera.services.task_clients import OwnSource

    moment = None if as_of is None else moment_of(as_of)
    function = imported(where) if NAMED.fullmatch(where) and not Path(where).exists() else None

    def of(client: int) -> OwnSource:
        source: Any = function
        if function is None:
            source = _of_number(Path(where), client) if several else Path(where)
            if not source.exists():
                raise ConfigError(f"{source}: no such file", hint="--interactions mine.csv")
        elif several:
            source = partial(function, client)
        person = str(source) if several else ""
        return OwnSource(source=source, person=person, as_of=moment, said=said)

    return of


def _of_number(folder: Path, client: int) -> Path:
    """`client-3.csv`, or a folder `client-3`."""
    names = [f"client-{client}{suffix}" for suffix in ("", *TEXTS, *PARQUET)]
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise ConfigError(
        f"{folder}: no interactions of client {client}", hint=f"such as {folder / names[1]}"
    )


def moment_of(text: str) -> int:
    """The last second of a day, or a moment, as ISO 8601 has it; without a zone: UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"--as-of {text!r} is not a date", hint="such as 2026-01-31") from error
    if len(text) <= len("2026-01-31"):
        found = datetime.combine(found, time(23, 59, 59))
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())
