"""`tessera doctor`, and how the command line answers when something is wrong."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera import __version__
from tessera.cli import doctor
from tessera.cli import main as cli
from tessera.crypto import kernel
from tessera.errors import ConfigError, CryptoError, RoundAborted, TesseraError
from tessera.ids import RoundId
from tessera.learning.models import lag_library

REPORT = doctor.Report(
    version="1.2.3",
    machine=doctor.Machine(
        python="3.11.7",
        platform="Linux 6.1 x86_64",
        cpu="A Processor With A Long Name @ 2.50GHz",
        features={"aes": True, "avx2": True, "vaes": False, "avx512f": False},
        cores=2,
        memory_bytes=16 * 2**30,
    ),
    masks=doctor.Masks(
        kernel="aesni",
        available=("aesni", "reference"),
        reason="the fastest this machine can run",
        gigabytes_per_second={"aesni": 8.0, "reference": 4.0},
        rows_per_second={"aesni": 17_000_000, "reference": 1_000_000},
        todo=None,
    ),
    parts=(
        doctor.Part(name="torch", purpose="to train models", found="2.13.0", todo=None),
        doctor.Part(
            name="pyarrow",
            purpose="to read data of your own",
            found=None,
            todo="pip install pyarrow",
        ),
    ),
    data=doctor.examine_data(None),
)


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Terminal]:
    def make(columns: int) -> Terminal:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        return Terminal()

    return make


def description(
    name: str, available: tuple[str, ...], reason: str | None = None
) -> kernel.Description:
    return kernel.Description(name=name, available=available, reason=reason)


@pytest.mark.parametrize("columns", [80, 140])
def test_every_line_fits_the_terminal_and_every_next_step_is_whole(
    columns: int, terminal_of: Callable[[int], Terminal]
) -> None:
    screen = terminal_of(columns)
    doctor.show(REPORT, stream=screen)
    plain = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert max(map(len, plain.splitlines())) <= columns
    assert "what to do: pip install pyarrow" in plain
    assert screen.getvalue() != plain, "a terminal gets colours"


def test_a_pipe_gets_one_plain_line_for_each_thing() -> None:
    out = io.StringIO()
    doctor.show(REPORT, stream=out)
    text = out.getvalue()
    assert "\x1b" not in text
    (line,) = [line for line in text.splitlines() if "pyarrow:" in line]
    assert "missing" in line
    assert line.endswith("what to do: pip install pyarrow")
    assert "8.00 GB/s, 2 times the reference" in text
    (line,) = [line for line in text.splitlines() if "point functions: " in line]
    assert "17 million rows/s, 17 times the reference" in line


def test_without_compiled_code_it_says_what_that_costs_two_servers() -> None:
    slow = replace(
        REPORT.masks,
        kernel="reference",
        gigabytes_per_second={"reference": 4.0},
        rows_per_second={"reference": 1_000_000},
    )
    out = io.StringIO()
    doctor.show(replace(REPORT, masks=slow), stream=out)
    (line,) = [line for line in out.getvalue().splitlines() if "point functions: " in line]
    assert "1 million rows/s; compiled code is about twenty times faster" in line


def test_what_is_there_comes_without_a_next_step() -> None:
    out = io.StringIO()
    doctor.show(replace(REPORT, parts=REPORT.parts[:1]), stream=out)
    (line,) = [line for line in out.getvalue().splitlines() if "torch:" in line]
    assert "what to do" not in line


def test_json_is_one_object_with_everything_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    out, err = capsys.readouterr()
    seen = json.loads(out)
    assert err == ""
    assert seen["version"] == __version__
    assert seen["machine"]["cores"] >= 1
    assert seen["masks"]["kernel"] in seen["masks"]["available"]
    for speeds in ("gigabytes_per_second", "rows_per_second"):
        assert set(seen["masks"][speeds]) == {seen["masks"]["kernel"], "reference"}
        assert min(seen["masks"][speeds].values()) > 0
    assert {part["name"] for part in seen["parts"]} == {
        "torch",
        "pyarrow",
        "dp-accounting",
        "starlette",
        "training loops in C",
    }
    for part in seen["parts"]:
        assert (part["found"] is None) == (part["todo"] is not None), part


def test_doctor_prints_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out, _ = capsys.readouterr()
    assert kernel.active().name in out
    assert __version__ in out


def test_features_are_read_from_an_x86_listing(tmp_path: Path) -> None:
    listing = tmp_path / "cpuinfo"
    core = "processor\t: {}\nmodel name\t: Some CPU\nflags\t\t: fpu aes avx2 avx512fp16\n\n"
    listing.write_text(core.format(0) + core.format(1))
    assert doctor.read_cpu(listing) == (
        "Some CPU",
        {"aes": True, "avx2": True, "vaes": False, "avx512f": False},
    )


def test_features_are_read_from_an_arm_listing(tmp_path: Path) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor : 0\nFeatures : fp asimd aes\n")
    name, features = doctor.read_cpu(listing)
    assert name is None
    assert features is not None
    assert features["aes"]
    assert not features["avx2"]


def test_a_system_without_a_listing_is_not_said_to_lack_anything(tmp_path: Path) -> None:
    name, features = doctor.read_cpu(tmp_path / "nothing")
    assert (name, features) == (None, None)
    assert "does not list" in doctor.describe_features(features)


def test_the_fastest_kernel_needs_no_advice() -> None:
    _, todo = doctor.explain(description("vaes256", ("vaes256", "reference")), None)
    assert todo is None


def test_a_kernel_slowed_by_the_environment_says_so() -> None:
    reason, todo = doctor.explain(description("reference", ("aesni", "reference")), "reference")
    assert reason == f"{kernel.VARIABLE} is reference"
    assert todo == f"unset {kernel.VARIABLE} to use aesni"


@pytest.mark.parametrize(("compiler", "first"), [(None, "apt-get"), ("cc", "install tessera-fl")])
def test_a_machine_without_the_c_kernel_is_told_how_to_get_it(
    compiler: str | None, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "first_program", lambda *names: compiler)
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    found = description("reference", ("reference",), "no C compiler when it was installed")
    reason, todo = doctor.explain(found, None)
    assert reason == "no C compiler when it was installed"
    assert todo is not None
    assert todo.startswith(first)


def test_data_sets_count_plain_and_compressed(tmp_path: Path) -> None:
    for folder, name in (("ml-1m", "ratings.dat"), ("ml-100k", "u.data.gz"), ("mnist", "README")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    seen = doctor.examine_data(str(tmp_path))
    assert seen.found == ("ml-100k", "ml-1m")
    assert "mnist" in seen.missing
    assert seen.todo is not None
    assert "mnist" in seen.todo


@pytest.mark.parametrize("folder", [None, "", "no/such/folder"])
def test_a_folder_without_data_has_a_next_step(folder: str | None) -> None:
    seen = doctor.examine_data(folder)
    assert seen.found == ()
    assert seen.todo is not None
    assert doctor.DATA_VARIABLE in seen.todo


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        (
            ConfigError("too few holders", hint="take 3"),
            2,
            ["error: too few holders", "hint: take 3"],
        ),
        (ConfigError("too few holders"), 2, ["error: too few holders"]),
        (CryptoError("a box does not open"), 1, ["error: a box does not open"]),
        (
            RoundAborted(round_id=RoundId(7), phase="unmask", answered=2, needed=3),
            1,
            ["error: round 7, unmask: 2 answered, 3 are needed"],
        ),
    ],
)
def test_an_error_is_two_lines_on_stderr_and_a_status(
    error: TesseraError,
    status: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> doctor.Report:
        raise error

    monkeypatch.setattr(doctor, "examine", fail)
    assert cli.main(["doctor"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (["dance"], "dance", "tessera --help"),
        (["--fast"], "--fast", "tessera --help"),
        (["doctor", "--fast"], "--fast", "tessera doctor --help"),
    ],
)
def test_a_bad_command_line_is_bad_input(
    arguments: list[str], said: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert second.startswith("hint: ")
    assert hint in second


def test_what_was_not_foreseen_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> doctor.Report:
        raise ZeroDivisionError

    monkeypatch.setattr(doctor, "examine", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_version_and_help_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tessera {__version__}\n"
    assert cli.main([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_loops_of_an_older_build_are_named(tmp_path, monkeypatch) -> None:
    """A library that loads and lacks a function: what an editable install has after an update."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text("void tessera_lag_sums(void) {}")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)

    def parts(origin: str | None) -> str | None:
        spec = None if origin is None else SimpleNamespace(origin=origin)
        monkeypatch.setattr(lag_library.importlib.util, "find_spec", lambda name: spec)
        lag_library.lag_library.cache_clear()
        return {part.name: part for part in doctor.optional_parts()}["training loops in C"].todo

    try:
        assert "of another version" in (parts(str(library)) or "")
        assert "not built" in (parts(None) or "")
    finally:
        monkeypatch.undo()
        lag_library.lag_library.cache_clear()
