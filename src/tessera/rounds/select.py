"""Rows: how a client says which rows it fetches and writes, and the functions that choose them.

`rounds/schemes.py` says which kind of `Rows` a plan has. The functions are pure, and shared by
rounds over one server and over two: rows under the cap, rows offered to the union, rows asked for
and rows trained. Rows are by table name. A client
chooses rows of root tables only; those of a derived table follow by its public map, since an answer
of their own would reveal more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.ids import RoundId
from tessera.learning.tables.submodel import Ids
from tessera.learning.tables.table import DerivedMap
from tessera.plan import Plan, TablePlan
from tessera.privacy.dp.events import THE_ROWS, THE_UNION, THE_WRITTEN_ROWS
from tessera.privacy.index.period import FrozenPeriod, keyed_subset
from tessera.privacy.index.response import IndexPrivacy
from tessera.protocols.union.decoys import Catalogue, with_decoys
from tessera.rounds.messages import UnionOpened


class Shown(Enum):
    """What a round shows to its servers, for an attack to start from."""

    CLEAR_ROWS = "rows in the clear"
    CLEAR_PLACES = "places of the largest changes in the clear"
    UPLOADS = "single clients' gradients of ratings"
    RATING_SUMS = "sums of gradients of ratings"
    SUMS = "masked sums over whole cohorts"
    UNIONS = "unions of clients' rows"
    ANSWERS = "randomised answers, in sums with shares for those who drop out"
    GROUPS = "fixed groups"
    SHARES = "keys and shares at each of two servers"
    SHARED_ROWS = "rows of a sum that two servers open"
    KEY_PERIODS = "keys that last for several rounds"


class Rows:
    """How a client says which rows it fetches and writes. Here it does not: all of them travel."""

    chosen: bool = False
    """Whether a client fetches and writes rows of its own choice, and not the whole model."""
    randomised: bool = False
    """Whether clients answer at random about a union's rows: a quorum and an epsilon apply."""
    capped: bool = False
    """Whether `max_rows` bounds what a client names, so that sizes tell nothing."""
    union: bool = False
    """Whether a round begins with a private set union of the cohort's rows."""
    exact: tuple[str, ...] = ()
    """What a round releases without noise of who holds which row."""
    opened_first: tuple[str, ...] = ()
    """Likewise before it sums anything else, and so whatever has noise."""
    charged_with_answers: tuple[str, ...] = ()
    """What of it a client is charged for when it freezes its answers."""
    shown: frozenset[Shown] = frozenset()
    """What clients say of their rows beside a masked sum."""

    work: tuple[str, ...] = ()
    """Steps of a round about the union and the groups of rows (`simulation/calibration.py`)."""
    union_rows: str = "rows in the union"
    """What a round's union is called where its size is printed."""
    opened_rows: str = "opened"
    """Likewise the rows that were opened."""
    domain: str = "whole"
    """The rows of a table that two servers look at, as it is printed."""
    summed_over: str = "the whole cohort"
    """Among whom the holder of a row is, in a sum."""

    def held(self, plan: Plan, rows: int) -> int:
        """How many of so many rows of a table a client may use."""
        return rows

    def followed(self, plan: Plan) -> tuple[TablePlan, ...]:
        """The tables whose rows follow from a client's choice."""
        return ()

    def left_out(self, over: int) -> int:
        """Of so many rows beyond the plan's cap, those that are left out."""
        return 0

    def must_name_all(self, own: IndexPrivacy | None) -> bool:
        """Whether these probabilities of a client's own keep it from checking who shares a row."""
        return self.union and own is not None and not own.names_all


class ChosenRows(Rows):
    """A client fetches and writes rows of its own choice."""

    chosen = True
    summed_over = "its group"

    def followed(self, plan: Plan) -> tuple[TablePlan, ...]:
        return tuple(t for t in plan.tables if t.derived_from)


class CappedRows(ChosenRows):
    """Not more than `max_rows` of a table."""

    capped = True

    def left_out(self, over: int) -> int:
        return over


class ListedRows(Rows):
    """Everybody fetches and writes all rows of a public list."""


class NamedRows(ChosenRows):
    """By id, in the clear."""

    exact = (THE_ROWS,)


class RandomisedRows(CappedRows):
    """By randomised answers about the cohort's union."""

    randomised = union = True
    work: tuple[str, ...] = ("union", "groups")
    exact = charged_with_answers = (THE_UNION,)
    shown = frozenset({Shown.UNIONS, Shown.ANSWERS})

    def held(self, plan: Plan, rows: int) -> int:
        return max(1, min(round(plan.privacy.keep * rows), plan.union.max_rows))


class GroupRows(RandomisedRows):
    """All of the union of a fixed group, which opens once a period."""

    work = ()
    union_rows = "rows in the largest union of a group"
    opened_rows = "opened, in all groups"
    shown = frozenset({Shown.UNIONS, Shown.GROUPS})


class UnseenRows(CappedRows):
    """By point functions, of which a server alone learns nothing."""

    exact = (THE_WRITTEN_ROWS,)

    def held(self, plan: Plan, rows: int) -> int:
        return min(rows, plan.union.max_rows)


class NarrowedRows(UnseenRows):
    """Likewise, inside the union of the cohort's rows, which opens first."""

    union = True
    work = ("union",)
    domain = "union"
    opened_first = (THE_UNION,)


Maps = Mapping[str, DerivedMap]


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows a client asks for, cover included, and those of them that it trains."""

    requested: Mapping[str, Ids] = field(repr=False)
    trained: Mapping[str, Ids] = field(repr=False)


def with_derived(plan: Plan, roots: Mapping[str, Ids], maps: Maps) -> dict[str, Ids]:
    """Rows of root tables, and those of derived tables that follow from them."""
    found = dict(roots)
    for t in plan.tables:
        if t.derived_from:
            found[t.name] = maps[t.name].row_ids(found[t.derived_from])
    return found


# --- a client's own rows --------------------------------------------------------------------------


def held(plan: Plan, real: Mapping[str, Ids]) -> dict[str, Ids]:
    """A client's rows of every root table, none where it has none."""
    none = np.zeros(0, dtype=np.uint64)
    return {t.name: real.get(t.name, none) for t in plan.roots}


def capped(plan: Plan, rows: Mapping[str, Ids], secret: Secret) -> dict[str, Ids]:
    """As many rows of each root table as the plan lets a client name between two servers.

    Which those are follows from a secret of its own and each row's id, not from its place among
    them: drawn by place, one row more would exchange most of those kept.
    """
    return {
        name: keyed_subset(
            ids,
            plan.union.max_rows,
            secret=secret.derive(Label.ROWS_KEPT, name),
            context=(plan.federation,),
        )
        for name, ids in rows.items()
    }


def own(plan: Plan, real: Mapping[str, Ids], maps: Maps) -> dict[str, Ids]:
    """A client's rows of every table, where it gets and sends the whole model.

    Rows of a derived table whose map it does not have are those it names itself, if any.
    """
    found = dict(real)
    for t in plan.tables:
        if t.derived_from and t.name in maps:
            found[t.name] = maps[t.name].row_ids(found[t.derived_from])
    return found


# --- the union ------------------------------------------------------------------------------------


def offered(
    plan: Plan, rows: Mapping[str, Ids], secret: Secret, period: int, catalogue: Catalogue
) -> Ids:
    """What a client puts into the union: its rows in the one space of ids, and decoys.

    Decoys follow from the secret and the period: drawn anew each round, they would fade from
    intersections.
    """
    shifted = [rows[t.name] + np.uint64(plan.offsets[t.name]) for t in plan.roots]
    ids = np.concatenate([*shifted, np.zeros(0, dtype=np.uint64)])
    stream = Stream.of(secret, Label.DECOYS, plan.federation, period)
    return with_decoys(ids, catalogue, stream, share=plan.privacy.decoy_share)


def opened_union(plan: Plan, round_id: RoundId, ids: Ids) -> UnionOpened:
    """The decoded union as a message.

    Ids left in a residual are not in it: their holders skip those rows this round.
    """
    roots = plan.split_ids(ids)
    return UnionOpened(
        round_id=round_id, tables={plan.table_id(name): rows for name, rows in roots.items()}
    )


def union_flaw(plan: Plan, message: UnionOpened) -> str:
    """What is wrong with a union that was sent; "" if the plan allows it."""
    roots, most = plan.root_ids, plan.most_union
    if message.tables.keys() != roots.keys():
        return "sent a union of other tables"
    # Before anything is made of it: the sender chose its size.
    if sum(map(len, message.tables.values())) > most:
        return "sent a union of more rows than its cohort can name"
    for table, t in roots.items():
        ids = message.tables[table]
        if len(ids) and int(ids[-1]) >= t.rows:
            return f"sent a union with rows outside table {t.name!r}"
    return ""


def union_rows(plan: Plan, message: UnionOpened, maps: Maps) -> dict[str, Ids]:
    """The union by table name, derived tables included."""
    roots = {t.name: message.tables[table] for table, t in plan.root_ids.items()}
    return with_derived(plan, roots, maps)


def positions(union: Mapping[str, Ids], name: str, ids: Ids) -> Ids:
    """Rows are addressed by their place in the union, or by their id where there is none."""
    if name not in union:
        return ids
    return np.searchsorted(union[name], ids).astype(np.uint64)


def ids_at(union: Mapping[str, Ids], name: str, places: Ids) -> Ids:
    """The inverse of `positions`."""
    return union[name][places] if name in union else places


# --- the rows a client asks for -------------------------------------------------------------------


def choose_held(
    plan: Plan, rows: Mapping[str, Ids], union: Mapping[str, Ids], maps: Maps
) -> Selection:
    """A client's rows as they are, inside the union where there is one: all are trained.

    What a union lost has to wait for another round.
    """
    roots = {
        name: ids[np.isin(ids, union[name], assume_unique=True)] if name in union else ids
        for name, ids in rows.items()
    }
    chosen = with_derived(plan, roots, maps)
    return Selection(requested=chosen, trained=chosen)


def with_candidates(plan: Plan, chosen: Selection, table: str) -> Selection:
    """All requested rows of this table are trained, and of those that follow it; "" is no table."""
    every = {t.name for t in plan.tables if table and table in (t.name, t.derived_from)}
    trained = {
        name: chosen.requested[name] if name in every else ids
        for name, ids in chosen.trained.items()
    }
    return Selection(requested=chosen.requested, trained=trained)


def choose_answers(
    plan: Plan,
    frozen: FrozenPeriod,
    union: Mapping[str, Ids],
    maps: Maps,
    *,
    round_id: RoundId,
    entropy: Entropy,
) -> Selection:
    """The randomised answers about the union's rows: what they reveal, and what is real of it."""
    answers = {
        t.name: frozen.answer(
            plan.table_id(t.name), union[t.name], round_id=round_id, entropy=entropy
        )
        for t in plan.roots
    }
    return Selection(
        requested=with_derived(plan, {n: a.revealed for n, a in answers.items()}, maps),
        trained=with_derived(plan, {n: a.succinct for n, a in answers.items()}, maps),
    )
