"""The `tessera` command: each subcommand parses, calls one layer down and prints.

Results go to stdout, progress and errors to stderr. An error is one `error:` line and, where there
is something to do about it, one `hint:` line; the exit status is 2 for bad input and 1 for a run
that failed. Subcommands import what they need when they are called, so that `tessera --version`
does not wait for it; those with many options have a module of their own that holds the options too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final, cast

import typer

from tessera.errors import ConfigError, TesseraError, __version__

BAD_INPUT: Final = 2
FAILED: Final = 1
INTERRUPTED: Final = 130

# What typer raises for a bad command line. It has moved between typer's versions (click's own, then
# a copy inside typer); the public subclass knows where it is.
UsageError: Final = cast(type[Exception], typer.BadParameter.__base__)

HELP: Final = ["-h", "--help"]

app = typer.Typer(
    name="tessera",
    help="Federated learning over large tables, each client touching only its own rows.",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": HELP, "max_content_width": 100},
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tessera {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def tessera(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


COMMANDS: Final = {
    "doctor": "What this machine has, and how to add what is missing.",
    "demo": "Several schemes in one shop: what each costs and hides.",
    "init": "Write a commented plan for a task, or for your own file.",
    "plan": "Check a plan; predict bytes, rows, privacy and time.",
    "run": "Train by a plan, into a folder with a report.",
    "compare": "Runs side by side: a table and a page.",
    "recommend": "What a run's model recommends to one of its users.",
    "rank": "Recall and NDCG of a run's model over all items.",
    "export": "A trained model as a plain state_dict, for `tessera.load`.",
    "audit": "Attack a run's recorded views; compare with its claims.",
    "statement": "One page to sign: what a plan or run promises, to whom.",
    "privacy": "Epsilon and costs of randomised index sets; `privacy dp`: of noise.",
    "mask-bound": "Error bound of a private mask (FedMMF, Theorem 1).",
    "reproduce": "A paper's tables beside ours.",
    "pack": "A plan and its first model as one file, to deploy.",
    "keys": "Keys of a deployment: a folder per party.",
    "serve": "Lead the rounds of a deployment.",
    "help-serve": "The second server of a deployment.",
    "join": "A client of a deployment, or many.",
    "status": "Where a deployment is.",
}
"""Each is a function of its name, a hyphen as an underscore, in a module of the same name."""
DEPLOYMENT: Final = frozenset({"pack", "keys", "serve", "help-serve", "join", "status"})
"""Those in one module, `tessera.cli.deployment`."""
WITHIN: Final = {("privacy", "dp")}
"""Commands with a second word: `privacy dp` is `privacy_dp`, and `privacy` alone stays."""

GONE: Final = {"explain": "in a checkout, `python examples/explain.py` shows a secure sum"}
"""Commands that there were, and what to do instead."""


def register(name: str, summary: str) -> None:
    """A command that loads its module, and hands over its arguments, only when it is called."""

    def forward(context: typer.Context) -> int:
        place, arguments = name.replace("-", "_"), context.args
        if arguments and (name, arguments[0]) in WITHIN:
            place, arguments = f"{place}_{arguments[0]}", arguments[1:]
        module = import_module(f"tessera.cli.{'deployment' if name in DEPLOYMENT else place}")
        inner = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        inner.command(name, context_settings={"help_option_names": HELP})(getattr(module, place))
        words = " ".join([context.command_path, *place.split("_")[len(name.split("-")) :]])
        status = inner(args=arguments, prog_name=words, standalone_mode=False)
        return status if isinstance(status, int) else 0

    # Everything is left to the inner command, `--help` too.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, help=summary, short_help=summary, context_settings=settings)(forward)


for _name, _summary in COMMANDS.items():
    register(_name, _summary)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (the process's own by default); return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in GONE:
        complain(f"there is no command {arguments[0]!r} any more", GONE[arguments[0]])
        return BAD_INPUT
    try:
        # Not standalone: typer then hands us its errors instead of printing them its own way.
        status = app(args=arguments, prog_name="tessera", standalone_mode=False)
    except TesseraError as error:
        complain(str(error), error.hint)
        return BAD_INPUT if isinstance(error, ConfigError) else FAILED
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        complain(f"{path}{error.strerror or error}", "is the path right, and writable?")
        return BAD_INPUT
    except (MemoryError, RecursionError) as error:
        complain(
            f"this machine has not enough memory for it ({error})", "make what is asked for smaller"
        )
        return BAD_INPUT
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        complain(
            "training needs PyTorch, which is not installed",
            "install torch, or this package with its extra `train`",
        )
        return BAD_INPUT
    except UsageError as error:
        where = getattr(error, "ctx", None)
        command = where.command_path if where is not None else "tessera"
        complain(usage_message(error), f"`{command} --help` lists what there is")
        return BAD_INPUT
    except typer.Abort:
        complain("interrupted", None)
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def complain(message: str, hint: str | None) -> None:
    """Two lines at most: what is wrong, and the next step."""
    typer.echo(f"error: {message}", err=True)
    if hint is not None:
        typer.echo(f"hint: {hint}", err=True)


def usage_message(error: Exception) -> str:
    """What is wrong with the command line, naming the option where there is one."""
    return cast(str, error.format_message())  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
