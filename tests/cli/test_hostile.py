"""Nothing ends in a traceback: plans, data files, run folders and models, mutated by a seed.

Each of 500 mutations is read by the commands that take it. They have to work or to say `error:`
with status 2 (1: a run whose rounds failed), within a minute, and to leave alone what they read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import hostile
import tessera
from tessera.cli import main as cli
from tessera.data import interactions
from tessera.data.interactions import Interactions
from tessera.errors import ConfigError
from tessera.runs.folder import AUDIT


def read(source, **how):
    return interactions.read(source, Interactions(**how))


# A learning rate of 1e308 is a setting; that its numbers overflow is no failure of a reader.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = {"users": 30, "items": 80, "examples": 6, "history": 4, "cohort": 10, "rounds": 2}
SCHEMES = ("secure-submodel", "two-server", "submodel", "central")
LONGEST = 60  # seconds


@contextmanager
def no_hang() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise AssertionError(f"it hangs: over {LONGEST} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict[str, str]:
    """A plan of each kind with all its keys, small enough to run."""
    top, found = tmp_path_factory.mktemp("plans"), {}
    for scheme in SCHEMES:
        path = top / f"{scheme}.toml"
        assert cli.main(["init", "taobao-like", "--scheme", scheme, "--out", str(path)]) == 0
        text = re.sub(r" *#.*", "", path.read_text())
        for key, value in SIZES.items():
            text = re.sub(rf"^{key} = \d+", f"{key} = {value}", text, flags=re.MULTILINE)
        found[scheme] = text
    return found


@pytest.fixture(scope="module")
def runs(plans, tmp_path_factory) -> list[Path]:
    """A run of each kind with a model, and views where there are any."""
    top, found = tmp_path_factory.mktemp("runs"), []
    for scheme in ("secure-submodel", "two-server", "central"):
        path, out = top / f"{scheme}.toml", top / scheme
        path.write_text(plans[scheme])
        command = ["run", str(path), "--out", str(out), "--trainer", "sequential"]
        assert cli.main([*command, *([] if scheme == "central" else ["--record-views"])]) == 0
        assert cli.main(["export", str(out)]) == 0
        found.append(out)
    return found


def judged(arguments: list[str], capsys, what: str) -> int:
    capsys.readouterr()
    with no_hang():
        status = cli.main(arguments)
    err = capsys.readouterr().err
    assert status in (0, 1, 2), what
    if status:
        assert "error: " in err and "Traceback" not in err, (what, err)
    return status


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "-wal" not in path.name and "-shm" not in path.name
    }


@pytest.mark.slow
def test_mutated_plans(plans, tmp_path, capsys):
    rng, ran = random.Random(19), 0
    for number in range(200):
        path, out = tmp_path / "plan.toml", tmp_path / "out"
        path.write_bytes(hostile.spoilt_plan(plans[rng.choice(SCHEMES)], rng))
        before = path.read_bytes()
        if judged(["plan", str(path), "--json"], capsys, f"plan {number}") == 0 and ran < 15:
            ran += 1
            judged(
                ["run", str(path), "--rounds", "1", "--out", str(out), "--trainer", "sequential"],
                capsys,
                f"run of plan {number}",
            )
            shutil.rmtree(out, ignore_errors=True)
        assert path.read_bytes() == before


def test_mutated_data_files(tmp_path):
    lines = "".join(f"u{k % 9},i{k % 17},{1_700_000_000 + k},{k % 2}\n" for k in range(120))
    base, rng, refused = ("user,item,time,label\n" + lines).encode(), random.Random(19), 0
    for number in range(100):
        path = tmp_path / "own.csv"
        path.write_bytes(hostile.spoilt_lines(base, rng))
        for settings in ({"label": "label"}, {"label": "label", "on_bad": "skip"}, {}):
            try:
                with no_hang():
                    data = read(path, user="user", item="item", time="time", **settings)
                assert len(data.train), number
            except ConfigError as error:
                assert str(error), number
                refused += 1
    assert 50 < refused < 290  # both happen


def test_columns_of_every_type_in_parquet(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    good = {
        "user": [f"u{k % 9}" for k in range(60)],
        "item": [k % 17 for k in range(60)],
        "time": [1_700_000_000 + k for k in range(60)],
        "label": [k % 2 for k in range(60)],
    }
    far = [2**60, -(2**60), 7, None, 0] * 12
    for name in good:
        for kind in (
            *(pa.timestamp("ns"), pa.timestamp("us"), pa.timestamp("ms"), pa.date32(), pa.date64()),
            *(pa.decimal128(38, 2), pa.list_(pa.int64()), pa.binary(), pa.float32(), pa.bool_()),
            *(pa.time64("us"), pa.duration("ms"), pa.large_string(), pa.null(), pa.uint64()),
        ):
            values = (
                pa.array(far, pa.int64()).cast(kind, safe=False)
                if _castable(pa, kind)
                else (pa.nulls(60, kind))
            )
            path = tmp_path / "own.parquet"
            parquet.write_table(pa.table({**good, name: values}), path)
            try:
                with no_hang():
                    read(path, user="user", item="item", time="time", label="label", on_bad="skip")
            except ConfigError as error:
                assert str(error), (name, kind)


def _castable(pa, kind) -> bool:
    try:
        pa.array([1], pa.int64()).cast(kind, safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


@pytest.mark.slow
def test_mutated_run_folders(runs, tmp_path, capsys):
    rng = random.Random(19)
    often = {"run.json": 6, "rounds.jsonl": 6, "plan.toml": 2, "events.jsonl": 2}

    def weight(path: Path) -> int:
        return 0 if path.parent.name == "model" else often.get(path.name, 1)

    for number in range(100):
        source, copy = rng.choice(runs), tmp_path / "run"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        what = f"{number}: {hostile.spoil_folder(copy, rng, weight=weight)}"
        before = digests(copy)
        page, model = tmp_path / "page.html", tmp_path / "model"
        shutil.rmtree(model, ignore_errors=True)
        for arguments in (
            ["compare", str(copy), str(source), "--out", str(page)],
            ["export", str(copy), "--out", str(model)],
            ["audit", str(copy)],
            ["recommend", str(copy), "--client", "1"],
        ):
            judged(arguments, capsys, f"{arguments[0]} {what}")
        kept = digests(copy)
        kept.pop(AUDIT, None)  # what the audit found
        assert kept == before, what
        judged(["run", str(copy), "--resume", "--rounds", "3"], capsys, f"resume {what}")


@pytest.mark.slow
def test_mutated_models(runs, tmp_path):
    rng = random.Random(19)
    for number in range(100):
        copy = tmp_path / "model"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(rng.choice(runs) / "model", copy)
        what = hostile.spoil_folder(
            copy, rng, weight=lambda path: 6 if path.name == "about.json" else 1
        )
        if rng.random() < 0.7:
            forge(copy)
        before = digests(copy)
        try:
            with no_hang():
                tessera.load(copy).recommend(history=["1"], k=3)
        except ConfigError as error:
            assert str(error), (number, what)
        assert digests(copy) == before


def forge(folder: Path) -> None:
    """Digests made to fit, as whoever changes a model on purpose would."""
    try:
        about = json.loads((folder / "about.json").read_bytes())
        for name in about["files"]:
            content = (folder / name).read_bytes()
            about["files"][name] = hashlib.sha256(content).hexdigest()
        (folder / "about.json").write_text(json.dumps(about))
    except (OSError, ValueError, LookupError, TypeError):
        pass  # too spoilt to forge


# --- what was found by others, one by one ---------------------------------------------------------


@pytest.fixture
def own_file(tmp_path, capsys) -> str:
    """A plan for a file of one's own, with every key."""
    lines = "".join(
        f"u{k % 12},i{k * k % 41 + k % 12},{1_700_000_000 + k},c{k % 3}\n" for k in range(240)
    )
    (tmp_path / "own.csv").write_text("user,item,time,category\n" + lines)
    path = tmp_path / "own.toml"
    assert (
        cli.main(["init", str(tmp_path / "own.csv"), "--model", "clicks", "--out", str(path)]) == 0
    )
    return re.sub(r" *#.*", "", path.read_text())


def with_key(plan: str, section: str, key: str, value: str) -> str:
    """The plan with this value instead of the one it has."""
    whole = re.sub(rf"^{key} = .*\n", "", plan, flags=re.MULTILINE) if not section else plan
    head, found, rest = whole.partition(f"[{section}]\n") if section else ("", "", whole)
    rest = re.sub(rf"\A((?:(?!\[).*\n)*?){key} = .*\n", r"\1", rest)
    if not found and section:
        head, found, rest = whole + "\n", f"[{section}]\n", ""
    if key == "buckets":
        rest = 'ids = "hash"\n' + re.sub(r"^ids = .*\n", "", rest, flags=re.MULTILINE)
    return f"{head}{found}{key} = {value}\n{rest}"


@pytest.mark.parametrize(
    "section, key, value, said",
    [
        ("task", "buckets", "4294967296", "categories for 4294967296 rows"),
        ("task", "buckets", "4294967297", "4294967297 buckets"),
        ("task", "buckets", "-1", "buckets = -1"),
        ("task", "negatives", "1000000000", "1000000000 sampled negatives"),
        ("task", "negatives", "-1", "negatives = -1"),
        ("task", "history", "1000000000", "a history of 1000000000 items"),
        ("task", "threshold", "nan", "threshold = nan"),
        ("task", "history", "-1", "history = -1"),
        ("", "seed", "-1", "seed = -1"),
        ("", "seed", "18446744073709551616", "seed is a number of 65 bits"),
        ("", "cohort", "10000000000000000000", "cohort is a number of 64 bits"),
        ("", "cohort", "1", "cohort = 1"),
        ("training", "rate", "10000000000000000000", "rate is a number of 64 bits"),
        ("training", "rate", "nan", "rate = nan"),
        ("training", "rate", "-1e-3", "rate = -0.001"),
        ("training", "decay", "0", "decay = 0"),
        ("training", "table_rate", "inf", "table_rate = inf"),
        ("training", "weight_decay", "-1", "weight_decay = -1"),
        ("training", "epochs", "10000000000000000000", "epochs is a number of 64 bits"),
        ("training", "epochs", "100001", "epochs = 100001"),
        ("training", "epochs", "-1", "epochs = -1"),
        ("training", "batch", "10000000000000000000", "batch is a number of 64 bits"),
        ("training", "batch", "2147483649", "batch = 2147483649"),
        ("training", "examples", "-1", "examples = -1"),
        ("server", "rate", "10000000000000000000", "rate is a number of 64 bits"),
        ("server", "rate", "0", "rate = 0"),
        ("server", "momentum", "1", "momentum = 1"),
        ("simulation", "rounds", "-1", "rounds = -1"),
        ("simulation", "rounds", "10000000000000000000", "rounds is a number of 64 bits"),
        ("simulation", "evaluate_every", "0", "evaluate_every = 0"),
        ("simulation", "dropout", "1.5", "dropout = 1.5"),
        ("union", "max_rows", "10000000000000000000", "max_rows is a number of 64 bits"),
        ("union", "max_rows", "0", "max_rows = 0"),
        ("update", "levels", "10000000000000000000", "levels is a number of 64 bits"),
        ("update", "levels", "2", "levels = 2"),
        ("privacy", "period_rounds", "-1", "period_rounds = -1"),
        ("groups", "size", "1", "size = 1"),
    ],
)
def test_a_key_out_of_range_is_refused_by_name(
    own_file, section, key, value, said, tmp_path, capsys
):
    path, out = tmp_path / "spoilt.toml", tmp_path / "out"
    path.write_text(with_key(own_file, section, key, value))
    for arguments in (["plan", str(path), "--json"], ["run", str(path), "--out", str(out)]):
        capsys.readouterr()
        with no_hang():
            assert cli.main(arguments) == 2, arguments
        found = capsys.readouterr()
        assert not found.out and "Traceback" not in found.err
        error, hint = found.err.splitlines()[:2]
        assert error.startswith("error: ") and said in error and hint.startswith("hint: ")
    assert not out.exists()


@pytest.mark.parametrize(
    "section, key, value",
    [
        ("", "seed", "9223372036854775807"),
        ("task", "negatives", "20"),
        ("task", "history", "1000"),
        ("training", "batch", "2147483648"),
        ("training", "table_rate", "1e-19"),
        ("update", "levels", "3"),
        ("privacy", "period_rounds", "1"),
        ("simulation", "evaluate_every", "1000000000"),
    ],
)
def test_a_key_at_the_end_of_its_range_is_a_setting(
    own_file, section, key, value, tmp_path, capsys
):
    """The plan of the test above, with a value that is just allowed, trains: it is no other fault
    that refuses the others."""
    path, out = tmp_path / "plan.toml", tmp_path / "out"
    path.write_text(with_key(own_file, section, key, value))
    command = ["run", str(path), "--out", str(out), "--trainer", "sequential", "--rounds", "1"]
    assert judged(["plan", str(path), "--json"], capsys, value) == 0
    assert judged(command, capsys, value) == 0
    assert len((out / "rounds.jsonl").read_text().splitlines()) == 1


def test_a_rate_that_bursts_the_model_ends_in_an_error_or_without_a_step(
    own_file, tmp_path, capsys
):
    """Clients whose training leaves the numbers send nothing; the model stays finite."""
    path, out = tmp_path / "plan.toml", tmp_path / "out"
    path.write_text(with_key(own_file, "training", "rate", "1e19"))
    command = ["run", str(path), "--out", str(out), "--trainer", "sequential", "--rounds", "2"]
    assert judged(command, capsys, "rate = 1e19") == 0
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and lines[0]["not_finite"] > 0


@pytest.mark.slow
def test_other_types_in_the_store_and_in_the_log(runs, tmp_path, capsys):
    """Null, text and numbers that do not fit, in every column of every table in turn."""
    source, copy = runs[0], tmp_path / "run"

    def fresh() -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)

    store = source / "checkpoint" / "model.sqlite"
    for table, column in columns_of(store):
        for value in (None, "x", -1, 2**62):
            fresh()
            if not set_all(copy / store.relative_to(source), table, column, value):
                continue
            what = f"{table}.{column} = {value!r}"
            judged(["recommend", str(copy), "--client", "1"], capsys, what)
            if column == "round_id":
                judged(["run", str(copy), "--resume", "--rounds", "3"], capsys, what)
    for value in (-1, None, 2**62):
        fresh()
        lines = [json.loads(line) for line in (copy / "rounds.jsonl").read_text().splitlines()]
        text = "".join(json.dumps({**line, "round_id": value}) + "\n" for line in lines)
        (copy / "rounds.jsonl").write_text(text)
        for arguments in (
            ["compare", str(copy), "--out", str(copy.parent / "page.html")],
            ["audit", str(copy)],
            ["run", str(copy), "--resume", "--rounds", "3"],
        ):
            judged(arguments, capsys, f"rounds.jsonl: round_id = {value!r}")


def columns_of(store: Path) -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(store)) as found:
        tables = [
            row[0] for row in found.execute("select name from sqlite_master where type='table'")
        ]
        return [
            (table, row[1])
            for table in tables
            if not table.startswith("sqlite_")
            for row in found.execute(f"pragma table_info('{table}')")
        ]


def set_all(store: Path, table: str, column: str, value: object) -> bool:
    """Whether the database lets it happen: some columns are keys, or of one type."""
    with contextlib.closing(sqlite3.connect(store)) as found:
        try:
            with found:
                changed = found.execute(f'update "{table}" set "{column}" = ?', (value,)).rowcount
        except sqlite3.DatabaseError:
            return False
        return changed > 0
