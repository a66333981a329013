"""Nothing ends in a traceback: plans, data files, run folders and models, mutated by a seed.

Each of 500 mutations is read by the commands that take it. They have to work or to say `error:`
with status 2 (1: a run whose rounds failed), within a minute, and to leave alone what they read.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import hostile
import tessera
from tessera.cli import main as cli
from tessera.data.interactions import read
from tessera.errors import ConfigError

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
        assert digests(copy) == before, what
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
