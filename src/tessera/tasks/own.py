"""A task at one client of a deployment: made of what is public and of this client's own data.

A task function takes an `OwnInteractions` and returns a `Task`. When a federation is packed it is
called without any (`source` is None): tables, first model and settings follow from what is public
alone. At a client it is called with that client's own, and nothing else is read.

    def shop(own: OwnInteractions) -> Task:
        data = own.clicks(Interactions(item="sku", time="when"))
        return Task(name="shop", data=data, module=lambda: Mine(own.items), tables=..., ...)

A reader of one's own is a function of the source and of a moment up to which it reads, which
returns examples, the oldest first: `own.read(reader, sizes={"item": own.items})`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tessera.crypto.prg import Label
from tessera.crypto.secret import encode_context
from tessera.data import interactions
from tessera.data.catalogue import ItemCatalogue
from tessera.data.examples import LABEL, ClientData, Examples, Pools, Timeline
from tessera.data.interactions import KEY, Alone, Interactions
from tessera.data.row_names import OwnNames
from tessera.data.sequences import SequenceData, Sequences
from tessera.errors import ConfigError
from tessera.tasks.known import check_options, how_of, kinds_of_ids, known
from tessera.tasks.sequences import is_about_next
from tessera.tasks.task import Task

Reader = Callable[[Any, int | None], Examples]
"""(source, until) -> this client's examples up to then, in seconds since 1970; None: all."""

OF_FILES: Final = ("interactions", "sequences")
"""Tasks whose clients read files of their own."""
NO_TIMES: Final = "without times nobody knows which of its lines are of a period"


def id_key(federation: str) -> bytes:
    """Under which a federation hashes ids, where it has no catalogue. Public, as its name is."""
    return hashlib.sha256(encode_context(Label.ID_KEY, federation)).digest()


@dataclass(frozen=True, kw_only=True)
class OwnInteractions:
    """What one client has: its number among so many, its `source`, and what is public.

    `source` is a path, a folder of tables, a frame, or a function that gives one of these; None
    where a federation is packed. `as_of` is its owner's word that nothing in it is later, in
    seconds since 1970. Ids are rows of the `catalogue`, or hashed under the federation's `key`.
    """

    clients: int
    catalogue: ItemCatalogue | None = field(default=None, repr=False)
    key: bytes = field(default=KEY, repr=False)
    client: int = 0
    source: Any = field(default=None, repr=False)
    as_of: int | None = None

    @property
    def items(self) -> int:
        """Rows of tables over items."""
        if self.catalogue is None:
            raise ConfigError("this federation has no catalogue", hint="pack --items CATALOGUE")
        return self.catalogue.rows

    @property
    def _alone(self) -> Alone:
        return Alone(self.client, max(self.clients, self.client + 1), self.as_of)

    def _opened(self) -> Any:
        return self.source() if callable(self.source) else self.source

    def _how(self, how: Interactions) -> Interactions:
        return replace(how, dictionary=self.catalogue, key=self.key)

    def _rows(self, how: Interactions) -> int:
        return how.buckets if how.ids == "hash" else self.items

    # --- readers --------------------------------------------------------------------------------

    def clicks(self, how: Interactions) -> ClientData:
        """Its interactions as click examples (`data/interactions.py`)."""
        how = self._how(how)
        if self.source is None:
            return self._public_clicks(how)

        def read(until: int | None) -> ClientData:
            return interactions.read(self._opened(), how, until=until, alone=self._alone)

        return _again(read)

    def sequences(self, how: Interactions) -> SequenceData:
        """Its interactions as what came next."""
        how = self._how(how)
        if self.source is None:
            return self._public_sequences(how)

        def read(until: int | None) -> ClientData:
            return interactions.read_sequences(self._opened(), how, until=until, alone=self._alone)

        found = _again(read)
        assert isinstance(found, SequenceData)
        return found

    def read(
        self, reader: Reader, *, sizes: Mapping[str, int], fields: Mapping[str, Any], name: str
    ) -> ClientData:
        """What a reader of one's own gives; `fields` are examples of nobody, with empty columns of
        the right shapes and types."""
        sizes = {"user": self._alone.clients, **sizes}
        if self.source is None:
            none = Examples({one: np.asarray(column)[:0] for one, column in fields.items()})
            return _of_one(name, none, 0, self.clients, sizes, of_nobody=True)

        def read(until: int | None) -> ClientData:
            own, alone = reader(self._opened(), until), self._alone
            if not isinstance(own, Examples):
                raise ConfigError(
                    f"the reader of {name!r} gave {type(own).__name__}", hint="it returns Examples"
                )
            return _of_one(name, own, alone.client, alone.clients, sizes)

        found = read(None)
        return replace(found, timeline=Timeline(np.zeros(1, np.int64), read))

    # --- what is public -------------------------------------------------------------------------

    def _public_clicks(self, how: Interactions) -> ClientData:
        how.check("catalogue")
        rows, whole = self._rows(how), np.zeros(0, np.int64)
        columns: dict[str, Any] = {
            "user": whole,
            "item": whole,
            "history": np.zeros((0, how.history), np.int64),
            LABEL: np.zeros(0, np.float32),
            **({} if how.label is None else {"rate": np.zeros(0, np.float32)}),
            **{name: np.zeros(0, np.float32) for name in how.features},
        }
        sizes, of = {"user": self.clients, "item": rows}, None
        if self.catalogue is not None and (of := self.catalogue.category_of) is not None:
            sizes["category"] = int(of.max()) + 1
        named = rows - (0 if self.catalogue is None else self.catalogue.room)
        every = np.arange(named) if how.label is None and how.negatives else None
        made = _of_one("catalogue", Examples(columns), 0, self.clients, sizes, of_nobody=True)
        return replace(made, category_of=of, undrawn=None if every is None else Pools(every, every))

    def _public_sequences(self, how: Interactions) -> SequenceData:
        how.check("catalogue")
        none, ends = np.zeros(0, np.int64), np.zeros(self.clients + 1, np.int64)
        examples = Examples(
            {"user": none, "item": none, "history": np.zeros((0, how.history), np.int32)}
        )
        return SequenceData(
            name="catalogue",
            events=Sequences(none, ends),
            ordered=how.time is not None,
            popularity=None if self.catalogue is None else self.catalogue.weights,
            waiting=0 if self.catalogue is None else self.catalogue.room,
            train=examples,
            offsets=ends,
            test=examples,
            test_offsets=ends,
            sizes={"user": self.clients, "item": self._rows(how)},
            of_nobody=True,
        )


def _again(read: Callable[[int | None], ClientData]) -> ClientData:
    """Data that are read again for every cut-off, from what their source gives by then."""
    found = read(None)
    if found.timeline is None:
        return found
    return replace(found, timeline=Timeline(found.timeline.marks, read))


def _of_one(
    name: str,
    own: Examples,
    client: int,
    clients: int,
    sizes: Mapping[str, int],
    *,
    of_nobody: bool = False,
) -> ClientData:
    ends = np.zeros(clients + 1, np.int64)
    ends[client + 1 :] = len(own)
    return ClientData(
        name=name,
        train=own,
        offsets=ends,
        test=own.take(slice(0)),
        test_offsets=np.zeros(clients + 1, np.int64),
        sizes=sizes,
        of_nobody=of_nobody,
    )


# --- tasks by name --------------------------------------------------------------------------------


def own_task(name: str, options: Mapping[str, Any], own: OwnInteractions) -> Task:
    """The task of this name over a client's own file."""
    made = known(name)
    if name not in OF_FILES:
        raise ConfigError(
            f"task {name!r} is a published set, and its clients read no files of their own",
            hint=f"one of {', '.join(OF_FILES)}, or a task function of your own",
        )
    check_options(name, options)
    how = how_of({**made.options, **options})
    if how.attributes:
        raise ConfigError(
            f"task {name!r}: attributes of items are not part of a deployment yet",
            hint="leave attributes out",
        )
    data = own.sequences(how) if is_about_next(made.kind) else own.clicks(how)
    model = {key: options[key] for key in made.kind.options if key in options}
    title = made.title.format(data=data)
    return made.kind.make(data, title=title, recommended=made.recommended, **made.fixed, **model)


def names_in(task: Task, own: OwnInteractions, *, person: str, naming: object) -> OwnNames:
    """What this client's rows are called in its own data (`data/row_names.py`)."""
    ids, kinds = task.data.ids, kinds_of_ids(task)
    source = own.source
    return OwnNames(
        person=person,
        source=str(Path(source).resolve()) if isinstance(source, str | Path) else "",
        naming=json.dumps(naming),
        kinds=kinds,
        names={kind: ids[kind] for kind in kinds.values() if kind in ids},
    )
