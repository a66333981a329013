"""`tessera init`: a commented plan for a task, to be read, changed and run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from tessera.cli.plan_two_server import KEYS, Held
from tessera.errors import ConfigError
from tessera.rounds.plan import Plan, Scheme

TEMPLATE: Final = """\
# A plan: everything a federation agrees on beforehand. A misspelt key is refused.
# `tessera plan {name}` checks it and predicts what it costs; `tessera run {name}` trains by it.
# A [training] or [server] that is left out, a clip of 0 and an average of "auto" are what the task
# recommends; the run's folder has the plan complete.

federation = "{task}"
# central           all data in one place: the accuracy that the others are measured against
# fedavg            the full model, averaged in the open; the server sees every update
# submodel          only the rows a client needs, in the open; the server sees rows and updates
# secure-fedavg     the full model under secure aggregation; the server sees the sum
# secure-submodel   only rows, under secure aggregation, and deniable which ones
# two-server        only rows, fetched and written unseen by either of two servers; both see the sum
scheme = "{scheme}"
cohort = {cohort}               # clients in a round
seed = 0                  # who is sampled, how rows begin; never a key

[task]
name = "{task}"
{options}
[training]                # what a client does in a round
{training}
{server}
[update]                  # what leaves a client is cut and rounded first
clip = {clip}                # a row's move times the examples behind it, to [-clip, clip] ...
dense_clip = {dense_clip}         # ... the dense part's, times the client's examples ...
levels = 32768            # ... and rounded at random to one of so many
max_count = 16383         # most examples that count for one row
average = "{average}"      # a whole model's mean: by "examples", or by "rows" and their counts

[privacy]                 # of which rows a client has, per index, given the union
level = "cpp2"            # cpp1 (no cover) to cpp5 (the whole union); or p1, p2, p3, p4
decoys = 0.1              # made-up ids in the union, per real one
period_rounds = 100       # rounds that share one set of permanent answers

[union]
{cap}
encoding = "auto"         # or "bloom", "sum-table": by expected bytes

[security]
threat = "semi-honest"    # or "active": a server that lies; needs signed keys
graph = "complete"        # or "sparse", for large cohorts
corrupt = 0               # clients that may be the server's own
dropout = 0.2             # share of the cohort that may vanish at any time
sharing = "secure"        # or "plain", "auto": unmasked where a client's own mask covers it
indicator = 0.05          # how far off its ratings a mask may be for that, with "auto"

[two_server]              # for scheme = "two-server": a leader and a helper, by two parties
{two_server}
[simulation]              # no part of what clients agree on
rounds = {rounds}
crypto = "every"          # or "sampled": real messages in every crypto_every-th round, or "none"
crypto_every = 10
dropout = 0.0             # share of a cohort that does vanish
min_examples = 1          # clients with fewer are never asked
evaluate_every = 5        # rounds between tests of the model
metrics = "central"       # or "federated": clients test on their own, only sums leave
"""


SERVER: Final = """\
[server]                  # how far the model goes along a round's mean: plain, momentum, adaptive
"""


def init(
    task: Annotated[str, typer.Argument(help="The task; without one, what there is.")] = "",
    out: Annotated[Path, typer.Option(help="Where the plan goes.")] = Path("plan.toml"),
    scheme: Annotated[str, typer.Option(help="Who is trusted with what.")] = "secure-submodel",
) -> None:
    """Write a commented plan for TASK to plan.toml, or to --out."""
    from tessera import tasks

    if not task:
        typer.echo("tasks:")
        for name, known in tasks.TASKS.items():
            typer.echo(f"  {name:<16} {known.summary}")
        typer.echo("`tessera init TASK` writes a plan for one.")
        return
    if scheme not in list(Scheme):
        raise ConfigError(f"--scheme {scheme}", hint=f"one of {', '.join(Scheme)}")
    if out.exists():
        raise ConfigError(f"{out} is there already", hint="name another with --out")
    found = tasks.known(task)
    good, options = found.recommended, found.options
    text = written(task, out.name, scheme, good, options, cap(good.max_rows))
    if scheme == Scheme.TWO_SERVER:
        held = counted(Plan.parse(text))
        text = written(task, out.name, scheme, good, options, pair_cap(good.max_rows, held))
    out.write_text(text)
    typer.echo(f"wrote {out}")
    typer.echo(f"next: `tessera plan {out}`, then `tessera run {out}`")


def counted(plan: Plan) -> Held | None:
    """The rows that the task's clients hold; None if its data is not at hand yet."""
    from tessera import tasks

    with Console(stderr=True).status(f"counting the rows of {plan.task.name}'s clients"):
        try:
            task = tasks.load(plan.task.name, **plan.task.options)
        except ConfigError:
            return None
        return Held.of(task, plan)


def cap(most: int) -> str:
    return f"max_rows = {most:<14} # most rows a client names of a table"


def pair_cap(most: int, held: Held | None) -> str:
    """Between two servers a cap that is too high costs everybody bytes."""
    if held is not None:
        most = held.fitting
        told = f"clients hold {held.most:,} at most, {held.mean:,} in the mean"
    else:
        told = "no more than clients hold; `tessera plan` says what fewer would take"
    return (
        f"max_rows = {most:<14} # most rows a client fetches and writes of a table\n"
        "                          # everybody's messages are as long as this asks for:\n"
        f"                          # {told}"
    )


def written(task: str, name: str, scheme: str, good: Any, options: dict[str, Any], cap: str) -> str:
    """The template, filled in; `cap` is the line about max_rows."""

    def section(part: Any) -> str:
        return "".join(f"{f.name} = {_toml(getattr(part, f.name))}\n" for f in fields(part))

    return TEMPLATE.format(
        task=task,
        name=name,
        scheme=scheme,
        cohort=good.cohort,
        options="".join(f"{key} = {_toml(value)}\n" for key, value in options.items()),
        training=section(good.training),
        server=SERVER + section(good.server)
        if not good.shrinkage
        else "# [server] is left out: the task's, which depend on how many of its clients meet\n",
        clip=good.clip,
        dense_clip=good.dense_clip,
        cap=cap,
        average=good.average.value,
        two_server=KEYS,
        rounds=good.rounds,
    )


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)
