"""`tessera statement`: one page about a plan, a run or a federation, for whoever has to sign it.

The command finds out what it is given, and prints; what the page says is in
`tessera.report.statement`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tessera.cli.format import AsJson, DataFolder, Exact, model_of
from tessera.errors import ConfigError, __version__
from tessera.plan import Plan
from tessera.report.page import save
from tessera.report.statement import Statement, Subject, statement_of
from tessera.report.statement_page import BRAND, html, text
from tessera.rounds import schemes
from tessera.rounds.noise import noise_of
from tessera.runs.folder import AUDIT, PLAN, STATEMENT, RunFolder
from tessera.services.journal import NAME as JOURNAL

BUNDLE: Final = ".npz"


def statement(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|PLAN|BUNDLE", help="A run's folder, a plan, or the bundle of a federation."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File of the page; its text is written beside it as .txt (default: "
            "statement.html in the run's folder, or here)."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With a bundle: the leader's folder of state."),
    ] = None,
    data: DataFolder = None,
    exact: Exact = False,
    as_json: AsJson = False,
) -> None:
    """One page to sign: what is promised to whom, who must be honest, what was attacked."""
    if path.suffix == BUNDLE or not path.is_dir():
        file = out or Path(STATEMENT)
    else:
        file = out or path / STATEMENT
    if file.suffix not in (".html", ".htm"):
        raise ConfigError(
            f"--out {file}: the page is HTML, and its text is written beside it",
            hint=f"--out {file.with_suffix('.html')}",
        )
    found = statement_of(subject_of(path, file, state=state, data=data, exact=exact))
    written = write(found, file)
    if as_json:
        typer.echo(json.dumps(found.as_json() | {"page": str(file), "text": str(written)}))
        return
    typer.echo(f"{text(found)}\nThe page: {file}")


def write(found: Statement, file: Path) -> Path:
    """Both forms; the file of the text. Nothing is overwritten that is not such a page."""
    beside = file.with_suffix(".txt")
    if beside.exists() and not beside.read_text(errors="replace").startswith(BRAND.upper()):
        raise ConfigError(
            f"{beside} exists and is not a statement", hint="name another file with --out"
        )
    save(html(found), file)
    beside.write_text(text(found), encoding="utf-8")
    return beside


def subject_of(
    path: Path, file: Path, *, state: Path | None, data: Path | None, exact: bool
) -> Subject:
    """What the path is, and what is known of it."""
    if state is not None and path.suffix != BUNDLE:
        raise ConfigError("--state without a bundle", hint="tessera statement BUNDLE --state DIR")
    if path.is_dir():
        if (path / JOURNAL).exists() and not (path / PLAN).exists():
            raise ConfigError(
                f"{path} is the state of a party, which does not contain its plan",
                hint=f"tessera statement BUNDLE --state {path}",
            )
        return of_run(path, exact=exact or file.resolve().is_relative_to(path.resolve()))
    if path.suffix == BUNDLE:
        return of_bundle(path, state)
    return of_plan(path, data)


def of_run(folder: Path, *, exact: bool) -> Subject:
    log = RunFolder.load(folder)
    log.check_described()
    ended = [e["event"] for e in log.events() if e["event"] in ("RoundFinished", "RoundAbort")]
    return Subject(
        name=str(folder),
        kind="run",
        plan=log.plan,
        version=str(log.facts.get("version", __version__)),
        rounds=len(ended),
        people=int(log.fact("task", "clients")),
        setup="sum" in (log.facts.get("setup") or {}),
        test_entropy=log.fact("entropy") != "system",
        model=model_of(log.plan),
        audit=checked(folder / AUDIT, log.kept(AUDIT)),
        exact=exact,
    )


def of_plan(path: Path, data: Path | None) -> Subject:
    """A plan that leaves something open is completed by its task, as before a run."""
    from tessera import tasks
    from tessera.runs.training import complete

    plan, people = Plan.read(path), 0
    if not schemes.of(plan).federated:
        raise ConfigError(
            f"{path}: central training has all data in one place, and promises nothing",
            hint="a statement is about a federated scheme",
        )
    if not plan.is_complete:
        task = tasks.load(plan.task.name, data=data, **plan.task.options)
        plan, people = complete(plan, task), task.data.clients
    plan = noise_of(plan).calibrated()
    return Subject(
        name=str(path),
        kind="plan",
        plan=plan,
        version=__version__,
        people=people,
        model=model_of(plan),
    )


def of_bundle(path: Path, state: Path | None) -> Subject:
    """A deployed federation: its bundle, and its rounds where a leader's state is at hand."""
    from tessera.services.bundle import Bundle
    from tessera.services.journal import rounds_ended

    packed = Bundle.read(path)
    return Subject(
        name=str(path),
        kind="federation",
        plan=packed.plan,
        version=__version__,
        rounds=None if state is None else rounds_ended(state, packed.digest),
        people=packed.clients,
        model=model_of(packed.plan),
    )


KEYS: Final = ("name", "unit", "measured", "low", "high", "claimed", "verdict")


def checked(path: Path, found: Any) -> dict[str, Any] | None:
    """audit.json as `tessera audit` writes it; None where there is none."""
    if found is None:
        return None
    attacks = found.get("attacks") if isinstance(found, dict) else None
    whole = isinstance(attacks, list) and all(
        isinstance(each, dict) and all(key in each for key in KEYS) for each in attacks
    )
    if not whole:
        raise ConfigError(
            f"{path} is not what `tessera audit` writes", hint="remove it, or audit the run again"
        )
    return dict(found)
