"""Update to words and sums to means: one is the other's inverse, on average and within a level."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rounds.population import CATEGORIES, DENSE, GOODS, derived, plan, trainer
from tessera.crypto.secret import Secret
from tessera.errors import MisuseError
from tessera.ids import ClientId, StageId
from tessera.learning.averaging import Average
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart
from tessera.plan import Plan, UpdatePlan
from tessera.protocols.secagg.phases import StageSum, TableSum
from tessera.rounds import encode, select
from tessera.rounds.messages import whole_words

COINS = Secret(bytes(range(32)))
ROWS = np.array([2, 3, 40], dtype=np.uint64)
MAPS = derived()
ROWS_OF = {"goods": ROWS, "categories": MAPS["categories"].row_ids(ROWS)}


def update_of(settings: Plan) -> ModelUpdate:
    everything = {
        t.name: TablePart(np.arange(t.rows, dtype=np.uint64), np.zeros((t.rows, t.width)))
        for t in settings.tables
    }
    return trainer(ClientId(1))(Submodel(np.zeros(DENSE), everything, ROWS_OF))


def sum_of(settings: Plan, words: encode.UpdateWords) -> StageSum:
    """One client's words as if they were a whole sum."""
    dense = (
        whole_words(settings, words.dense, words.tables) if settings.counts_rows else words.dense
    )
    tables = {
        settings.table_id(name): TableSum(
            rows=part.ids, words=part.words, members={}, below_quorum=0, shrunk=0
        )
        for name, part in words.tables.items()
        if settings.scheme.by_rows
    }
    survivors = np.array([1], dtype=np.uint64)
    return StageSum(stage=StageId(0), survivors=survivors, dense=dense, tables=tables)


def settings_of(scheme: str, average: Average = Average.ROWS) -> Plan:
    return replace(plan(scheme), update=UpdatePlan(levels=2**20 + 1, clip=4.0, average=average))


@pytest.mark.parametrize(
    "settings",
    [
        settings_of("submodel"),
        settings_of("two-server"),
        settings_of("fedavg", Average.ROWS),
        settings_of("fedavg", Average.EXAMPLES),
    ],
    ids=["rows", "two servers", "whole with counts", "whole"],
)
def test_means_of_one_clients_words_are_its_update(settings: Plan) -> None:
    update = update_of(settings)
    words = encode.update_words(settings, update, ROWS_OF, COINS)
    result = encode.means(settings, sum_of(settings, words), union={})
    step = settings.quantizer.clip / settings.quantizer.top
    assert not result.out_of_bounds and not result.rows_out_of_bounds
    assert result.weight == update.weight
    assert np.abs(result.dense - update.dense).max() <= step
    for name, rows in ROWS_OF.items():
        mean, own = result.tables[name], update.tables[name]
        at = np.searchsorted(mean.ids, rows)
        assert np.abs(mean.mean[at] - own.values).max() <= step
        assert words.written[name].tolist() == rows.tolist()
        if settings.scheme.by_rows or settings.counts_rows:
            assert mean.counts[at].tolist() == own.counts.tolist()
    assert words.clipped.cut == 0 < words.clipped.of


def test_rows_are_taken_to_where_they_are_due_with_zeros_between() -> None:
    settings = settings_of("submodel")
    part = encode.update_words(settings, update_of(settings), ROWS_OF, COINS).tables["goods"]
    due = np.array([1, 3, 40, 77], dtype=np.uint64)
    words = part.at(due)
    assert not words[[0, 3]].any()
    assert (words[[1, 2]] == part.words[1:]).all()


def test_rounding_follows_from_the_coins() -> None:
    settings = settings_of("submodel")
    update = update_of(settings)
    first, again, other = (
        encode.update_words(settings, update, ROWS_OF, coins)
        for coins in (COINS, COINS, Secret(bytes(32)))
    )
    drawn = [each.tables["goods"].words.tobytes() for each in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_is_beyond_the_clip_is_counted() -> None:
    settings = replace(plan("submodel"), update=UpdatePlan(clip=0.01))
    words = encode.update_words(settings, update_of(settings), ROWS_OF, COINS)
    assert 0 < words.clipped.cut < words.clipped.of
    assert words.clipped.of == DENSE + 3 * len(ROWS) + 2 * len(ROWS_OF["categories"])


def test_a_trainer_that_changes_its_rows_is_our_mistake_and_a_flaw_between_two_servers() -> None:
    settings = settings_of("submodel")
    update = update_of(settings)
    fewer = {**ROWS_OF, "goods": ROWS[1:]}
    with pytest.raises(MisuseError, match="changed the rows"):
        encode.update_words(settings, update, fewer, COINS)
    assert "are due" in encode.flaw(settings, update, fewer)
    assert encode.flaw(settings, update, ROWS_OF) == ""
    assert encode.flaw(settings, None, ROWS_OF) == encode.NOTHING
    nan = replace(update, dense=np.full(DENSE, np.nan))
    assert "not finite" in encode.flaw(settings, nan, ROWS_OF)


def test_a_table_that_nobody_has_a_row_of_may_be_missing_from_a_sum() -> None:
    settings = settings_of("two-server")
    total = sum_of(settings, encode.update_words(settings, update_of(settings), ROWS_OF, COINS))
    union = select.with_derived(settings, {"goods": np.arange(GOODS, dtype=np.uint64)}, MAPS)
    less = replace(total, tables={0: total.tables[0]})
    result = encode.means(settings, less, union=union, residual=2)
    assert result.tables.keys() == {"goods"} and result.rows_opened == len(ROWS)
    assert (result.union_rows, result.union_residual) == (GOODS + CATEGORIES, 2)
