"""Which rows: those under the cap, those offered to the union, those asked for and those trained.

Pure functions, shared by rounds over one server and over two. Rows are by table name. A client
chooses rows of root tables only; those of a derived table follow by its public map, since an answer
of their own would reveal more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tessera.crypto.entropy import Entropy
from tessera.crypto.prg import Label, Stream
from tessera.crypto.secret import Secret
from tessera.ids import RoundId
from tessera.learning.tables.spec import DerivedMap
from tessera.learning.tables.submodel import Ids
from tessera.plan import Plan
from tessera.privacy.index.period import FrozenPeriod, keyed_subset
from tessera.protocols.union.decoys import Catalogue, with_decoys
from tessera.rounds.messages import UnionOpened

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
