"""A period is frozen: whatever restarts, an answer stays; whatever is asked for, terms stay."""

from __future__ import annotations

import math
import sqlite3
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.crypto.entropy import ScriptedEntropy, SystemEntropy
from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId, TableId
from tessera.privacy.index.period import (
    Agreement,
    EarlyPeriod,
    FrozenPeriod,
    MemoryPeriods,
    PeriodStore,
    SqlitePeriods,
    freeze,
    must_not_be_early,
)
from tessera.privacy.index.response import LEVELS, IndexPrivacy, Perturbation, as_rows

GOODS = TableId(0)
UNION = np.arange(0, 60_000, 3, dtype=np.uint64)  # 20,000 rows
REAL = UNION[::2]
CPP2 = LEVELS["cpp2"]
AGREED = Agreement(plan=b"plan", decoys=0.5, catalogue=b"all rows")
UNEVEN = IndexPrivacy(p1=0.9, p2=0.2, p3=0.7, p4=0.05)


def begin(store: PeriodStore | None = None, **changes) -> FrozenPeriod:
    settings = {
        "federation": "f",
        "period": 4,
        "privacy": CPP2,
        "real": {GOODS: REAL},
        "entropy": ScriptedEntropy(b"periods"),
        "agreement": AGREED,
    } | changes
    return freeze(MemoryPeriods() if store is None else store, **settings)


def assert_rate(hits: int, trials: int, probability: float) -> None:
    """Within five standard deviations; the randomness is scripted, so the verdict is fixed."""
    spread = math.sqrt(trials * probability * (1 - probability))
    assert abs(hits - trials * probability) <= 5 * spread


def answered(period: FrozenPeriod, round_id: int, union=UNION):
    return period.answer(
        GOODS, union, round_id=RoundId(round_id), entropy=ScriptedEntropy(b"rounds")
    )


# ---------------------------------------------------------------------------------------- the rates


@pytest.mark.parametrize("privacy", [*LEVELS.values(), UNEVEN])
def test_answers_have_the_rates_of_algorithm_2(privacy: IndexPrivacy) -> None:
    period = begin(privacy=privacy)
    real = np.isin(UNION, REAL)
    yes = period.permanent(GOODS, UNION)
    assert_rate(int(yes[real].sum()), int(real.sum()), privacy.p1)
    assert_rate(int(yes[~real].sum()), int((~real).sum()), privacy.p2)

    found = answered(period, 1)
    said = np.isin(UNION, found.revealed)
    assert np.array_equal(found.permanent, UNION[yes])
    assert_rate(int(said[yes].sum()), int(yes.sum()), privacy.p3)
    assert_rate(int(said[~yes].sum()), int((~yes).sum()), privacy.p4)
    assert_rate(int(said[real].sum()), int(real.sum()), privacy.p5)
    assert_rate(int(said[~real].sum()), int((~real).sum()), privacy.p6)
    assert np.array_equal(found.succinct, np.intersect1d(found.revealed, REAL))


def test_instantaneous_answers_of_two_rounds_are_independent_given_the_permanent_ones() -> None:
    period = begin(privacy=UNEVEN)
    yes = period.permanent(GOODS, UNION)
    first, second = (np.isin(UNION, answered(period, r).revealed) for r in (1, 2))
    assert_rate(int((first & second)[yes].sum()), int(yes.sum()), UNEVEN.p3**2)
    assert_rate(int((first & second)[~yes].sum()), int((~yes).sum()), UNEVEN.p4**2)


def test_clients_and_periods_answer_independently() -> None:
    one, other = begin(), begin(entropy=ScriptedEntropy(b"another client"))
    later = begin(period=5)
    strangers = ~np.isin(UNION, REAL)
    for second in (other, later):
        both = one.permanent(GOODS, UNION) & second.permanent(GOODS, UNION)
        assert_rate(int(both[strangers].sum()), int(strangers.sum()), CPP2.p2**2)


# ------------------------------------------------------------------------------------------ frozen


def test_a_permanent_answer_never_changes_over_rounds_and_restarts(tmp_path: Path) -> None:
    path = tmp_path / "periods.sqlite"
    begin(SqlitePeriods(path), entropy=SystemEntropy())
    expected = begin(SqlitePeriods(path)).permanent(GOODS, UNION)
    generator = np.random.default_rng(7)
    for round_id in range(60):
        # a restart: a new store object, and system entropy that would give another secret
        period = begin(SqlitePeriods(path), entropy=SystemEntropy())
        asked = np.sort(generator.choice(UNION, size=500, replace=False))
        at = np.searchsorted(UNION, asked)
        assert np.array_equal(period.permanent(GOODS, asked), expected[at])
        assert np.array_equal(answered(period, round_id, asked).permanent, asked[expected[at]])


@given(
    st.sets(st.integers(0, 2**64 - 1), min_size=1, max_size=30),
    st.lists(st.floats(0.01, 0.99), min_size=4, max_size=4),
)
@settings(max_examples=50)
def test_fields_carry_everything(real: set[int], p: list[float]) -> None:
    privacy = IndexPrivacy(p1=p[0], p2=p[1], p3=p[2], p4=p[3])
    period = begin(
        privacy=privacy,
        real={GOODS: np.array(sorted(real), dtype=np.uint64), TableId(9): []},
        max_rows={GOODS: 5},
        perturbation=Perturbation(keep=0.5, add=0.25),
        pool={GOODS: np.arange(20)},
    )
    again = FrozenPeriod.from_fields(period.to_fields())
    assert again.to_fields() == period.to_fields()
    assert again.secret == period.secret
    again.must_match(period)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy": LEVELS["cpp3"]}, "bisect"),
        ({"privacy": IndexPrivacy(p1=15 / 16, p2=0.0, p3=15 / 16, p4=1 / 16)}, "bisect"),
        ({"privacy": IndexPrivacy(p1=15 / 16, p2=1 / 16, p3=1.0, p4=1 / 16)}, "bisect"),
        ({"real": {GOODS: REAL[1:]}}, "flips"),
        ({"real": {GOODS: REAL, TableId(1): [1]}}, "table 1"),
        ({"real": {}}, "table 0"),
        ({"max_rows": {GOODS: 100}}, "max_rows"),
        ({"perturbation": Perturbation(keep=0.5, add=0.0)}, "bisect"),
        ({"period": 3}, "period 3"),
        ({"agreement": replace(AGREED, decoys=0.0)}, "decoys = 0.5, and 0.0 was requested"),
        ({"agreement": replace(AGREED, catalogue=b"other")}, "another catalogue"),
        ({"agreement": replace(AGREED, plan=b"other")}, "another plan"),
    ],
)
def test_other_terms_within_a_period_are_refused_and_change_nothing(
    tmp_path: Path, durable: bool, changes, reason: str
) -> None:
    store = SqlitePeriods(tmp_path / "p.sqlite") if durable else MemoryPeriods()
    before = begin(store).to_fields()
    with pytest.raises(ConfigError, match=reason) as refused:
        begin(store, **changes)
    assert refused.value.hint is not None
    after = store.latest("f")
    assert after is not None
    assert after.to_fields() == before


def test_a_new_period_brings_a_new_secret_and_may_bring_other_terms(tmp_path: Path) -> None:
    store = SqlitePeriods(tmp_path / "p.sqlite")
    first = begin(store)
    second = begin(store, period=5, privacy=LEVELS["cpp4"], real={GOODS: [1, 2]})
    assert second.secret != first.secret
    assert second.privacy == LEVELS["cpp4"]
    with pytest.raises(ConfigError, match="period 4"):
        begin(store)


def test_secret_and_rows_of_a_finished_period_are_gone_from_the_file(tmp_path: Path) -> None:
    store = SqlitePeriods(tmp_path / "p.sqlite")
    first = begin(store)
    somewhere = REAL[5000:5040].tobytes()
    assert first.secret.reveal() in store.path.read_bytes()
    assert somewhere in store.path.read_bytes()
    begin(store, period=5, real={GOODS: [1]})
    assert first.secret.reveal() not in store.path.read_bytes()
    assert somewhere not in store.path.read_bytes()


def test_a_file_from_before_plans_were_frozen_waits_for_the_next_period(tmp_path: Path) -> None:
    store = SqlitePeriods(tmp_path / "p.sqlite")
    begin(store)
    with closing(sqlite3.connect(store.path)) as database:
        database.execute("DROP TABLE agreement")
        database.commit()
    store = SqlitePeriods(store.path)
    with pytest.raises(ConfigError, match="was requested"):
        begin(store)
    assert begin(store, period=5).agreement == AGREED


def test_federations_have_periods_of_their_own(tmp_path: Path) -> None:
    store = SqlitePeriods(tmp_path / "p.sqlite")
    begin(store)
    other = begin(store, federation="g", period=0, privacy=LEVELS["cpp4"])
    assert other.privacy == LEVELS["cpp4"]
    assert begin(store).privacy == CPP2


@pytest.mark.parametrize("stored", [True, False])
def test_rounds_are_counted_for_the_period_and_from_zero_in_the_next(
    tmp_path: Path, stored: bool
) -> None:
    def store() -> PeriodStore:
        return SqlitePeriods(tmp_path / "p.sqlite") if stored else in_memory

    in_memory = MemoryPeriods()
    begin(store())
    for _ in range(3):
        store().count_round("f")
    must_not_be_early(store(), "f", 4, 99)  # the period it is in
    must_not_be_early(store(), "g", 5, 99)  # one it never met
    must_not_be_early(store(), "f", 5, 3)
    with pytest.raises(EarlyPeriod, match="3 rounds"):
        must_not_be_early(store(), "f", 5, 4)
    assert store().rounds("f") == 4  # the refused one counts
    assert store().rounds("g") == 0
    begin(store(), period=5)
    assert store().rounds("f") == 0


def test_a_store_keeps_the_first_of_two_secrets_for_one_period(tmp_path: Path) -> None:
    """Two processes that freeze at the same time end with the same answers."""
    one, two = (SqlitePeriods(tmp_path / "p.sqlite") for _ in range(2))
    first = begin(one, entropy=SystemEntropy())
    second = begin(two, entropy=SystemEntropy())
    assert first.secret == second.secret


def test_the_store_is_for_its_owners_eyes_only(tmp_path: Path) -> None:
    store = SqlitePeriods(tmp_path / "p.sqlite")
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600


def test_a_file_that_is_no_store_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, and long enough to be looked at" * 20)
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        SqlitePeriods(path)
    assert path.read_text().startswith("not a database")


@pytest.mark.parametrize("period", [-1, 1 << 63])
def test_a_period_number_out_of_range_is_refused(period: int) -> None:
    with pytest.raises(ConfigError, match=str(period)):
        begin(period=period)


def test_ids_outside_the_table_are_refused() -> None:
    with pytest.raises(ConfigError, match="outside the table"):
        begin(sizes={GOODS: 1000})


def test_a_union_with_a_repeated_row_and_an_unknown_table_are_bugs_of_the_caller() -> None:
    with pytest.raises(MisuseError):
        answered(begin(), 1, np.array([3, 3], dtype=np.uint64))
    with pytest.raises(MisuseError, match="table 7"):
        begin().permanent(TableId(7), UNION)


def test_neither_secret_nor_rows_are_printed() -> None:
    period = begin(real={GOODS: [123456789]})
    text = repr(period) + repr(answered(period, 1, as_rows([123456789], what="u")))
    assert "123456789" not in text
    assert period.secret.reveal().hex() not in text


# --------------------------------------------------------------------------- caps and perturbation


def test_a_cap_keeps_the_same_rows_all_period_and_tells_the_client_which_are_over_it() -> None:
    period = begin(max_rows={GOODS: 1000})
    table = period.tables[0]
    assert table.offered.size == 1000
    assert np.array_equal(np.union1d(table.offered, table.left_out), REAL)
    assert not np.intersect1d(table.offered, table.left_out).size
    assert np.array_equal(begin(max_rows={GOODS: 1000}).tables[0].offered, table.offered)
    # the choice is keyed: another client with the same rows keeps others
    other = begin(max_rows={GOODS: 1000}, entropy=ScriptedEntropy(b"another client"))
    assert np.intersect1d(other.tables[0].offered, table.offered).size < 300
    # a row left out is answered as one that is not real
    yes = period.permanent(GOODS, table.left_out)
    assert_rate(int(yes.sum()), yes.size, CPP2.p2)


def test_a_cap_that_is_not_reached_changes_nothing() -> None:
    table = begin(max_rows={GOODS: REAL.size}).tables[0]
    assert np.array_equal(table.offered, REAL)
    assert not table.left_out.size


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_rows = 0"):
        begin(max_rows={GOODS: 0})


def test_a_perturbed_set_keeps_and_adds_at_its_rates_and_trains_only_what_is_real() -> None:
    period = begin(perturbation=Perturbation(keep=0.8, add=0.1), pool={GOODS: UNION})
    table = period.tables[0]
    real = np.isin(table.offered, REAL)
    assert_rate(int(real.sum()), REAL.size, 0.8)
    assert_rate(int((~real).sum()), UNION.size - REAL.size, 0.1)
    assert np.array_equal(table.trained, table.offered[real])
    found = answered(period, 1)
    assert np.isin(found.succinct, REAL).all()
    # rows that were added are answered as real ones: nothing tells them apart
    added = table.offered[~real]
    assert_rate(int(period.permanent(GOODS, added).sum()), added.size, CPP2.p1)


def test_a_period_is_synchronised_to_disk_before_its_first_answer(tmp_path, monkeypatch):
    """SQLite syncs at COMMIT only if it was told to: that must come first, in every transaction."""
    statements: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments, **more):
        database = connect(*arguments, **more)
        database.set_trace_callback(statements.append)
        return database

    store = SqlitePeriods(tmp_path / "periods")
    monkeypatch.setattr(sqlite3, "connect", traced)
    frozen = begin(store)
    first = statements.index("PRAGMA synchronous = EXTRA")
    started = statements.index("BEGIN IMMEDIATE")
    insert = next(i for i, s in enumerate(statements) if s.startswith("INSERT INTO period"))
    commit = statements.index("COMMIT", insert)
    assert first < started < insert < commit == len(statements) - 1
    with closing(connect(tmp_path / "periods")) as database:
        assert database.execute("SELECT number FROM period").fetchone() == (frozen.period,)
