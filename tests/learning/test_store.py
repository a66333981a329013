"""A store against a dictionary of rows, through commits, reopening, kills and cut-off logs."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.testing import assert_array_equal

from tessera.errors import ConfigError, MisuseError
from tessera.ids import RoundId
from tessera.learning.tables import store as store_module
from tessera.learning.tables.store import ModelStore
from tessera.learning.tables.table import (
    DenseTable,
    LazyTable,
    Normal,
    StoredTable,
    TableSpec,
    Uniform,
    Zeros,
)

PLAN = bytes(range(32))
LARGEST = 2**64 - 1


def goods(**change: object) -> LazyTable:
    fields = {"name": "goods", "size": LARGEST, "width": 3, "initial": Normal(0.1), "seed": 7}
    return LazyTable(TableSpec(**(fields | change)))  # type: ignore[arg-type]


def shops() -> DenseTable:
    return DenseTable.from_array("shops", np.arange(14, dtype=np.float32).reshape(7, 2))


def opened(path: Path, *tables: StoredTable, plan_hash: bytes = PLAN) -> ModelStore:
    return ModelStore.open(path, plan_hash=plan_hash, tables=tables)


def touch(table: StoredTable, rows: Sequence[int], value: float) -> None:
    ids = np.array(sorted(rows), dtype=np.uint64)
    values = np.full((ids.size, table.width), value, dtype=np.float32)
    table.put(ids, values, np.ones(ids.size, dtype=np.int64))


def read(table: StoredTable, *rows: int) -> np.ndarray:
    return table.values(np.array(rows, dtype=np.uint64))


def weights(value: float) -> dict[str, np.ndarray]:
    return {"bias": np.float32(value) * np.ones(2, dtype=np.float32)}


# --- The oracle -----------------------------------------------------------------------------------

EDGE_IDS = [0, 1, 2, 6, 2**31, 2**63 - 1, 2**63, 2**63 + 1, LARGEST - 1]


class StoreAgainstDictionaries(RuleBasedStateMachine):
    """Two tables and a dense part; `rows` is what is read now, `safe` what a reopening gives."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "model.db"

    @initialize()
    def start(self) -> None:
        self.open()
        self.rows: dict[tuple[str, int], np.ndarray] = {}
        self.dirty: set[tuple[str, int]] = {("shops", row) for row in range(7)}
        self.round: int | None = None
        self.dense: dict[str, np.ndarray] = {}
        self.safe = (self.rows.copy(), self.dirty.copy())

    def open(self) -> None:
        self.tables = {"goods": goods(), "shops": shops()}
        self.store = opened(self.path, *self.tables.values())

    @rule(
        name=st.sampled_from(["goods", "shops"]),
        chosen=st.dictionaries(st.sampled_from(EDGE_IDS), st.integers(0, 2)),
        delta=st.floats(-4, 4, width=32),
    )
    def update(self, name: str, chosen: dict[int, int], delta: float) -> None:
        table = self.tables[name]
        chosen = {row: count for row, count in sorted(chosen.items()) if row < table.size}
        ids = np.array(list(chosen), dtype=np.uint64)
        deltas = np.full((ids.size, table.width), delta, dtype=np.float32)
        for row, count in chosen.items():
            if count:
                self.rows[name, row] = self.expected(name, row) + np.float32(delta)
                self.dirty.add((name, row))
        table.update(ids, deltas, np.array(list(chosen.values()), dtype=np.int64))

    @rule(
        skip=st.integers(1, 3),
        dense=st.dictionaries(
            st.sampled_from(["w", "b", "größe"]), st.lists(st.integers(0, 3), max_size=3)
        ),
    )
    def commit(self, skip: int, dense: dict[str, list[int]]) -> None:
        self.round = (-1 if self.round is None else self.round) + skip
        self.dense = {
            name: np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + self.round
            for name, shape in dense.items()
        }
        assert self.store.commit(RoundId(self.round), self.dense) == len(self.dirty)
        self.dirty = set()
        self.safe = (self.rows.copy(), set())

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()
        self.rows, self.dirty = self.safe[0].copy(), self.safe[1].copy()

    def expected(self, name: str, row: int) -> np.ndarray:
        first = goods().initial if name == "goods" else shops().values
        stored = self.rows.get((name, row))
        return first(np.array([row], dtype=np.uint64))[0] if stored is None else stored

    @invariant()
    def everything_agrees(self) -> None:
        for name, table in self.tables.items():
            known = [row for row in EDGE_IDS if row < table.size]
            assert_array_equal(read(table, *known), [self.expected(name, row) for row in known])
            changed = table.pending()[0].tolist()
            assert changed == sorted(row for owner, row in self.dirty if owner == name)
        assert self.tables["goods"].touched == sum(owner == "goods" for owner, _ in self.rows)
        assert self.store.round_id == self.round
        found = self.store.dense()
        assert found.keys() == self.dense.keys()
        for name, array in self.dense.items():
            assert found[name].shape == array.shape
            assert_array_equal(found[name], array)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


TestStoreAgainstDictionaries = StoreAgainstDictionaries.TestCase
TestStoreAgainstDictionaries.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None
)


# --- What is written ------------------------------------------------------------------------------


def test_a_round_writes_the_rows_that_changed_in_it_and_no_others(tmp_path: Path) -> None:
    table = goods()
    with opened(tmp_path / "model.db", table) as store:
        touch(table, range(100), 1.0)
        assert store.commit(RoundId(0), weights(0)) == 100
        read(table, 5, 500)
        touch(table, [7, 100], 2.0)
        assert store.commit(RoundId(1), weights(1)) == 2
        assert store.commit(RoundId(2), weights(2)) == 0


def test_rows_are_little_endian_floats_under_ids_that_sql_can_read(tmp_path: Path) -> None:
    table = goods()
    with opened(tmp_path / "model.db", table) as store:
        touch(table, [12, 2**63, LARGEST - 1], 1.0)
        store.commit(RoundId(2**64 - 1), {"scalar": np.array(2.0, dtype=np.float32)})
    plain = sqlite3.connect(tmp_path / "model.db")
    found = plain.execute("SELECT row_id, data FROM model_row ORDER BY row_id").fetchall()
    dense = plain.execute("SELECT name, shape, data FROM model_dense").fetchall()
    plain.close()
    one = bytes.fromhex("0000803f") * 3
    assert found == [(-(2**63), one), (-2, one), (12, one)]
    assert dense == [("scalar", "", bytes.fromhex("00000040"))]
    with opened(tmp_path / "model.db", again := goods()) as store:
        assert store.round_id == 2**64 - 1
        assert store.dense()["scalar"].shape == ()
    assert again.touched == 3


def test_more_rows_than_one_batch_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_RESTORE_BATCH", 64)
    ids = np.arange(1_000, dtype=np.uint64) * np.uint64(2**54 + 3)  # across 2^63
    values = np.arange(3_000, dtype=np.float32).reshape(1_000, 3)
    table = goods()
    with opened(tmp_path / "model.db", table) as store:
        table.put(ids, values, np.ones(1_000, dtype=np.int64))
        store.commit(RoundId(0), {})
    with opened(tmp_path / "model.db", again := goods()):
        assert_array_equal(again.values(ids), values)
        assert again.touched == 1_000


def test_a_given_table_resumes_without_the_array_it_began_with(tmp_path: Path) -> None:
    with opened(tmp_path / "model.db", shops()) as store:
        assert store.commit(RoundId(0), {}) == 7
    other = DenseTable.from_array("shops", np.zeros((7, 2), dtype=np.float32))
    with opened(tmp_path / "model.db", other) as store:
        assert_array_equal(read(other, *range(7)), read(shops(), *range(7)))
        assert store.commit(RoundId(1), {}) == 0


def test_a_born_table_and_a_dense_one_share_a_store(tmp_path: Path) -> None:
    spec = TableSpec(name="goods", size=50, width=3, initial=Uniform(0.5), seed=1)
    with opened(tmp_path / "model.db", lazy := LazyTable(spec)) as store:
        touch(lazy, [3, 49], 1.5)
        store.commit(RoundId(0), {})
    with opened(tmp_path / "model.db", dense := DenseTable(spec)):
        assert_array_equal(read(dense, *range(50)), read(lazy, *range(50)))
        assert dense.touched == 2


# --- Interrupted ----------------------------------------------------------------------------------

CHILD = """
import os, signal, sqlite3, sys
from pathlib import Path
import numpy as np
from tessera.learning.tables.store import ModelStore
from tessera.learning.tables.table import LazyTable
from tessera.learning.tables.table import TableSpec

path, deadly, when, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
armed = False
seen = 0

def watch(statement):
    global seen
    if armed and statement.startswith(deadly):
        seen += 1
        if seen == when:
            os.kill(os.getpid(), signal.SIGKILL)

connect = sqlite3.connect
def watched(*args, **kwargs):
    connection = connect(*args, **kwargs)
    connection.set_trace_callback(watch)
    return connection
sqlite3.connect = watched

table = LazyTable(TableSpec(name="goods", size=2**64 - 1, width=3))
with ModelStore.open(path, plan_hash=bytes(range(32)), tables=[table]) as store:
    for round_id in range(rounds):
        armed = round_id == 2
        # Row r is written in every round, row 1000 + round only in its own.
        ids = np.append(np.arange(50), 1000 + round_id).astype(np.uint64)
        table.put(ids, np.full((51, 3), round_id + 1, dtype=np.float32), np.ones(51, dtype=int))
        store.commit(round_id, {"bias": np.full(2, round_id, dtype=np.float32)})
        print(round_id, flush=True)
"""


def child(path: Path, *, deadly: str, when: int, rounds: int) -> subprocess.Popen[str]:
    """A process that commits round after round and kills itself at a statement of round 2."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), deadly, str(when), str(rounds)],
        env={"PYTHONPATH": str(Path(store_module.__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )


def whole_round(path: Path) -> int | None:
    """The round a store holds, after checking that all of the child's round is there."""
    table = goods(initial=Zeros())
    with opened(path, table) as store:
        last = store.round_id
        if last is None:
            assert table.touched == 0
            assert store.dense() == {}
            return None
        assert table.touched == 50 + last + 1
        assert_array_equal(read(table, *range(50)), float(last + 1))
        own = read(table, *(1000 + r for r in range(last + 2)))
        assert_array_equal(own[:, 0], [*range(1, last + 2), 0.0])
        assert_array_equal(store.dense()["bias"], float(last))
        return int(last)


@pytest.mark.parametrize(
    ("deadly", "when"),
    [
        ("BEGIN", 1),
        ("INSERT INTO model_row", 1),
        ("INSERT INTO model_row", 30),
        ("INSERT INTO model_row", 51),
        ("DELETE FROM model_dense", 1),
        ("INSERT INTO model_dense", 1),
        ("UPDATE model_state", 1),
        ("COMMIT", 1),
    ],
)
def test_a_commit_killed_on_its_way_leaves_the_round_before(
    tmp_path: Path, deadly: str, when: int
) -> None:
    with child(tmp_path / "model.db", deadly=deadly, when=when, rounds=4) as process:
        assert process.stdout is not None
        assert process.stdout.read().split() == ["0", "1"]
    assert process.returncode == -signal.SIGKILL
    assert whole_round(tmp_path / "model.db") == 1


@pytest.mark.parametrize("after", [1, 7, 23])
def test_a_store_killed_at_any_moment_holds_the_last_round_it_told_of(
    tmp_path: Path, after: int
) -> None:
    with child(tmp_path / "model.db", deadly="nothing", when=1, rounds=2_000) as process:
        assert process.stdout is not None
        for _ in range(after):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        committed = [after - 1, *map(int, process.stdout.read().split())]
    assert whole_round(tmp_path / "model.db") in (committed[-1], committed[-1] + 1)


def test_a_log_cut_short_holds_a_whole_round(tmp_path: Path) -> None:
    """What a power cut may leave of the log: some of it. The rounds in what is left are whole."""
    table = goods(initial=Zeros())
    store = opened(tmp_path / "model.db", table)
    for round_id in range(4):
        touch(table, [*range(50), 1000 + round_id], round_id + 1)
        bias = {"bias": np.full(2, round_id, dtype=np.float32)}
        store.commit(RoundId(round_id), bias)
    log = (tmp_path / "model.db-wal").read_bytes()
    frame, header = 4096 + 24, 32
    assert (len(log) - header) % frame == 0
    ends = range(header, len(log) + 1, frame)
    found = set()
    for cut in sorted({0, 17, *ends, *(end + 2000 for end in ends if end < len(log))}):
        copy = tmp_path / f"cut-{cut}"
        copy.mkdir()
        shutil.copy(tmp_path / "model.db", copy)
        (copy / "model.db-wal").write_bytes(log[:cut])
        found.add(whole_round(copy / "model.db"))
    store.close()
    assert found == {None, 0, 1, 2, 3}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """The connections that stores have opened in this test."""
    connections: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def remembered(path: Path, *, isolation_level: None) -> sqlite3.Connection:
        connections.append(connect(path, isolation_level=isolation_level))
        return connections[-1]

    monkeypatch.setattr(sqlite3, "connect", remembered)
    return connections


def test_a_full_disk_fails_the_commit_and_loses_nothing(
    tmp_path: Path, made: list[sqlite3.Connection]
) -> None:
    table = goods()
    with opened(tmp_path / "model.db", table) as store:
        touch(table, [1], 1.0)
        store.commit(RoundId(0), weights(0))
        (pages,) = made[0].execute("PRAGMA page_count").fetchone()
        made[0].execute(f"PRAGMA max_page_count = {pages + 2}")
        touch(table, range(1_000), 2.0)
        with pytest.raises(ConfigError, match="cannot commit round 1") as error:
            store.commit(RoundId(1), weights(1))
        assert error.value.hint is not None and "disk" in error.value.hint
        assert store.round_id == 0
        assert_array_equal(store.dense()["bias"], 0.0)
        made[0].execute("PRAGMA max_page_count = 100000")
        assert store.commit(RoundId(1), weights(1)) == 1_000
    with opened(tmp_path / "model.db", again := goods()) as store:
        assert store.round_id == 1
        assert again.touched == 1_000


def test_a_committed_round_is_synced_before_commit_returns(
    tmp_path: Path, made: list[sqlite3.Connection]
) -> None:
    # A test cannot cut the power; it can see that SQLite was told to sync the log at each commit.
    with opened(tmp_path / "model.db", goods()):
        assert made[0].execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert made[0].execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


# --- What is refused ------------------------------------------------------------------------------


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A store with one round in it."""
    table = goods()
    with opened(tmp_path / "model.db", table) as store:
        touch(table, [1, 2], 1.0)
        store.commit(RoundId(0), weights(0))
    return tmp_path / "model.db"


def test_a_store_of_another_plan_is_refused_and_left_alone(used: Path) -> None:
    before = used.read_bytes()
    with pytest.raises(ConfigError, match="belongs to plan 000102030405") as error:
        opened(used, goods(), plan_hash=b"\xff" * 32)
    assert error.value.hint is not None and "new file" in error.value.hint
    assert used.read_bytes() == before


def test_a_store_of_another_schema_is_refused_and_left_alone(used: Path) -> None:
    plain = sqlite3.connect(used)
    plain.execute("UPDATE model_state SET schema_version = 99")
    plain.execute("ALTER TABLE model_state RENAME COLUMN plan_hash TO plan")
    plain.commit()
    plain.close()
    before = used.read_bytes()
    with pytest.raises(ConfigError, match="schema version 99, this tessera reads version 1") as e:
        opened(used, goods())
    assert e.value.hint is not None
    assert used.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        {"name": "shops"},
        {"size": 10**9},
        {"width": 4},
        {"seed": 8},
        {"initial": Normal(0.2)},
        {"initial": Uniform(0.1)},
    ],
    ids=str,
)
def test_a_store_of_other_tables_is_refused(used: Path, change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="tables are not those of this task; it has 'goods'"):
        opened(used, goods(**change))
    with pytest.raises(ConfigError, match="tables are not those of this task"):
        opened(used, goods(), shops())


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database " * 100)
    with pytest.raises(ConfigError, match="not a database"):
        opened(text, goods())
    assert text.read_text() == "not a database " * 100
    other = tmp_path / "other.db"
    plain = sqlite3.connect(other)
    plain.execute("CREATE TABLE recipes (name TEXT)")
    plain.close()
    before = other.read_bytes()
    with pytest.raises(ConfigError, match="database of something else"):
        opened(other, goods())
    assert other.read_bytes() == before


def test_a_path_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot open"):
        opened(tmp_path / "missing" / "model.db", goods())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("UPDATE model_row SET data = x'00'", "not 3 wide"),
        ("UPDATE model_dense SET shape = '3'", "does not fill its shape"),
    ],
)
def test_a_damaged_store_is_refused(used: Path, damage: str, message: str) -> None:
    plain = sqlite3.connect(used)
    plain.execute(damage)
    plain.commit()
    plain.close()
    with pytest.raises(ConfigError, match=message):
        with opened(used, goods()) as store:
            store.dense()


def test_a_second_leader_cannot_commit_over_the_first(used: Path) -> None:
    first_table, second_table = goods(), goods()
    with opened(used, first_table) as first, opened(used, second_table) as second:
        touch(first_table, [5], 1.0)
        first.commit(RoundId(1), weights(1))
        touch(second_table, [6], 1.0)
        with pytest.raises(ConfigError, match="from round 0 to round 1"):
            second.commit(RoundId(2), weights(2))
    with opened(used, again := goods()) as store:
        assert store.round_id == 1
        assert again.touched == 3


def test_a_round_number_never_goes_back(used: Path) -> None:
    with opened(used, goods()) as store:
        with pytest.raises(MisuseError, match="round 0 comes after round 0"):
            store.commit(RoundId(0), weights(0))


def test_a_store_needs_fresh_tables_a_plan_and_float32(used: Path) -> None:
    stale = goods()
    touch(stale, [9], 1.0)
    with pytest.raises(MisuseError, match="updated before it was restored"):
        opened(used, stale)
    with pytest.raises(MisuseError, match="same name"):
        opened(used, goods(), goods())
    with pytest.raises(MisuseError, match="plan hash"):
        opened(used, goods(), plan_hash=b"")
    with opened(used, goods()) as store:
        with pytest.raises(MisuseError, match="float64, not float32"):
            store.commit(RoundId(1), {"w": np.zeros(2)})  # type: ignore[dict-item]
