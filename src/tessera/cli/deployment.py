"""The commands of a deployment: pack, keys, serve, help-serve, join, status."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

import typer

from tessera.cli.format import AsJson, DataFolder
from tessera.crypto.entropy import Entropy, ScriptedEntropy, SystemEntropy
from tessera.errors import ConfigError
from tessera.ids import HELPER, SERVER, ClientId
from tessera.plan import Plan
from tessera.privacy.index.bound import ON_THE_OPERATORS_WORD
from tessera.privacy.index.groups import CORRUPT_SHARES, DrawnGroups
from tessera.protocols.membership.draw import void_before
from tessera.protocols.membership.proof import LEAST_GROUPS
from tessera.services.account_store import default_home
from tessera.services.bundle import Bundle, pack_synthetic, pack_task
from tessera.services.charged_trainings import DELTA, OwnBudget
from tessera.services.code import imported
from tessera.services.deployment import (
    Account,
    ClientMaker,
    open_clients,
    open_helper,
    open_leader,
    synthetic_maker,
)
from tessera.services.group_client import GroupClientService
from tessera.services.http import is_loopback
from tessera.services.http.dialer import dial
from tessera.services.http.metrics import TOKEN, OperatorToken
from tessera.services.http.serving import Address, lead
from tessera.services.keyring import TLS, TLS_KEY, KeyFolders, Keyring, folder_of, make_keys
from tessera.services.logs import LEVELS, JsonLog
from tessera.services.membership import PROOF
from tessera.services.model_export import follow
from tessera.services.offered_rows import OneGroup
from tessera.services.party_status import client_lines, party_status
from tessera.services.settings import service_settings

BundleFile = Annotated[Path, typer.Argument(metavar="BUNDLE", help="What `tessera pack` wrote.")]
Keys = Annotated[Path, typer.Option(help="The party's folder of keys.")]
State = Annotated[Path, typer.Option(help="The party's folder of state; one process at a time.")]
TestEntropy = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Derive every secret from TEXT. Loopback only, for tests."),
]
BOTH_VALUES: Final = f"{ON_THE_OPERATORS_WORD}: whoever ran this holds both values of the beacon"
Settings = Annotated[
    Path | None,
    typer.Option(
        "--settings", metavar="FILE", help="[service] of this operator: deadlines, connections."
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--service",
        metavar="KEY=VALUE",
        help="One setting of [service], as join=30; repeatable. Also TESSERA_SERVICE_JOIN=30.",
    ),
]
LogLevel = Annotated[str, typer.Option(help=f"Of lines on stderr: {', '.join(LEVELS)}.")]
PlainHttp = Annotated[
    bool, typer.Option("--plain-http", help="Without TLS; on loopback addresses only.")
]


def packed_for(bundle: Path, settings: Path | None, service: list[str] | None) -> Bundle:
    """The bundle, with [service] as this operator has it."""
    packed = Bundle.read(bundle)
    found = service_settings(packed.plan.service, file=settings, given=service or ())
    return packed.served(found)


def logged(party: str, level: str, *, clients: bool = False) -> JsonLog:
    if level not in LEVELS:
        raise ConfigError(f"--log-level {level}", hint=f"one of {', '.join(LEVELS)}")
    return JsonLog(party, level=level, clients=clients)


def entropy_of(script: str | None, host: str) -> Entropy:
    """The system's generator, or scripted entropy on loopback, with a warning."""
    if script is None:
        return SystemEntropy()
    if not is_loopback(host):
        raise ConfigError(
            "--insecure-test-entropy outside loopback: anybody could recompute every secret",
            hint="leave it out",
        )
    typer.echo("warning: insecure test entropy: every secret of this process is known", err=True)
    return ScriptedEntropy(script.encode())


def pack(
    path: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan to deploy.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("bundle.npz"),
    items: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The public catalogue, CSV or Parquet, each item once: clients read interactions "
            "of their own by it.",
        ),
    ] = None,
    title: Annotated[
        str, typer.Option(metavar="COLUMN", help="Of --items: titles (default: title, if there).")
    ] = "",
    popularity: Annotated[
        str,
        typer.Option(metavar="COLUMN", help="Of --items: public counts to draw negatives by."),
    ] = "",
    room: Annotated[
        int | None,
        typer.Option(min=0, help="Rows for items to come (default: half as many as there are)."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="A task function of your own; it is imported here."
        ),
    ] = None,
    data: DataFolder = None,
    clients: Annotated[
        int | None,
        typer.Option(help="How many, with --items or synthetic ones (default: a cohort)."),
    ] = None,
    rows_per_client: Annotated[
        int, typer.Option(help="Without a task: rows a client holds of each table.")
    ] = 20,
) -> None:
    """Complete a plan by its task and pack it with the first model and what else is public."""
    plan = Plan.read(path, own_task=task is not None)
    if task is not None or items is not None or plan.task.options.get("ids") == "hash":
        from tessera.services.packing import deploy

        wanted = None if task is None else imported(task)
        bundle = deploy(
            wanted,
            plan,
            items=items,
            clients=clients,
            title=title,
            popularity=popularity,
            room=room,
        )
    elif plan.task.name:
        bundle = pack_task(plan, data)
    else:
        bundle = pack_synthetic(plan, clients or plan.cohort, rows_per_client)
    bundle.write(out)
    typer.echo(f"{out}: bundle {bundle.digest.hex()[:16]}, plan {bundle.plan.digest.hex()[:16]}")
    if bundle.catalogue is not None:
        listed = bundle.catalogue
        typer.echo(f"catalogue: {len(listed.ids):,} items, room for {listed.room:,} more")
    if bundle.code is not None:
        typer.echo(f"code: {bundle.code.name} {bundle.code.digest.hex()[:16]}; join with --task")


def keys(
    bundle: BundleFile,
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("keys"),
    clients: Annotated[
        int | None, typer.Option(help="Number of clients (default: as many as were packed).")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address of leader or helper, for certificates; repeatable."),
    ] = None,
    add: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Add N clients to the keys in --out, in groups of their own."
        ),
    ] = None,
    void: Annotated[
        bool,
        typer.Option(
            "--void", help="Give up a snapshot whose beacon value is lost or withheld: all see it."
        ),
    ] = False,
    insecure_test_entropy: TestEntropy = None,
) -> None:
    """Make signing keys, the helper's box key, TLS certificates and a signed directory; draw fixed
    groups, where the plan has them. Later: add clients to them."""
    packed = Bundle.read(bundle)
    hosts = host or ["127.0.0.1", "localhost"]
    if add is not None or void:
        if clients is not None or host or (add is not None and void):
            raise ConfigError(
                "--add, --void and --clients or --host do not go together",
                hint="--add N adds N clients to the keys in --out",
            )
        entropy = entropy_of(insecure_test_entropy, hosts[0])
        for line in add_to_keys(packed, out, add, entropy):
            typer.echo(line)
        return
    count = packed.clients if clients is None else clients
    packed.plan.check_population(count, hint="make keys for more: --clients")
    entropy = entropy_of(insecure_test_entropy, hosts[0])
    size = packed.plan.group_size if packed.plan.grouped else 0
    if count < LEAST_GROUPS * size and not packed.plan.groups.small:
        raise ConfigError(
            f"--clients {count}: groups of {size} are drawn among at least {LEAST_GROUPS * size}: "
            "among fewer, whoever admits clients chooses who is in a group",
            hint="more clients, or [groups] small = true for a test or a small federation",
        )
    make_keys(
        out,
        packed.digest,
        packed.plan.federation,
        map(ClientId, range(count)),
        entropy,
        hosts,
        group=size,
    )
    typer.echo(f"{out}: keys of leader, helper and {count} clients; keep {out}/authority offline")
    if size:
        typer.echo(
            f"{count // size} groups of {size}, {count % size} clients left over; {BOTH_VALUES}"
        )


def add_to_keys(packed: Bundle, out: Path, add: int | None, entropy: Entropy) -> Iterator[str]:
    """Newcomers, or (None) a snapshot given up; what there is to say about it."""
    plan = packed.plan
    if not plan.grouped:
        raise ConfigError(
            "clients are added in fixed groups, and this plan has none: cohorts of others would "
            "not be the ones that were drawn",
            hint="begin a federation of another name, with keys for all",
        )
    folders, size = KeyFolders(out, packed.digest, plan.group_size), plan.group_size
    draws = folders.void() if add is None else folders.add(add, entropy, small=plan.groups.small)
    last, known = draws[-1], folders.directory.clients
    number, waiting = last.snapshot.number, len(last.left_over)
    new = sorted(leaf.client for leaf in last.leaves if leaf.client not in known)
    if new:
        yield f"{out}: {len(new)} more clients, {folder_of(new[0])} to {folder_of(new[-1])}"
    if last.void:
        yield f"snapshot {number} is void: its {waiting} clients are in the next one (--add N)"
    else:
        some = f"{last.groups} new groups of {size}, {waiting} clients left over"
        yield f"snapshot {number}: {some}; {BOTH_VALUES}"
    members = frozenset(last.members)
    if waited := sorted(members & known.keys()):
        yield (
            f"{len(waited)} who had waited have a group now, {folder_of(waited[0])} to "
            f"{folder_of(waited[-1])}: hand each the {PROOF} in its folder"
        )
    if most := max((v for c, v in void_before(draws).items() if c in members), default=0):
        words = DrawnGroups(size=size, void=most).in_words(CORRUPT_SHARES[0])
        yield f"each void snapshot was one more draw for whoever gave it up: {words}"
    if not last.void:
        yield "the leader has them after a restart; those who have a group keep it"


def serve(
    bundle: BundleFile,
    keys: Keys,
    state: State,
    rounds: Annotated[
        int | None, typer.Option(help="End after this many rounds in total (default: never).")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any that is free.")] = 8400,
    plain_http: PlainHttp = False,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write the model there as rounds end, and serve it to everybody."
        ),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Of --export: rounds between models.")] = 1,
    rows: Annotated[
        int, typer.Option(min=0, help="Of --export: most popular items only (0: all).")
    ] = 0,
    settings: Settings = None,
    service: Setting = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The operator's token, for /status and /metrics (default: one is made in --state, "
            f"{TOKEN}).",
        ),
    ] = None,
    log_level: LogLevel = "info",
    log_clients: Annotated[
        bool, typer.Option("--log-clients", help="Say in the log which client a line is about.")
    ] = False,
    insecure_test_entropy: TestEntropy = None,
) -> int:
    """Lead rounds: clients and the helper connect to this address."""
    packed = packed_for(bundle, settings, service)
    certificate = (None, None) if plain_http else (keys / TLS, keys / TLS_KEY)
    address = Address(host, port, *certificate)
    entropy = entropy_of(insecure_test_entropy, host)
    keyring = Keyring.read(keys, SERVER, packed.digest)

    def listening(url: str) -> None:
        typer.echo(json.dumps({"listening": url, "bundle": packed.digest.hex()}))

    log = logged("leader", log_level, clients=log_clients)
    with exporting(packed, Path(state), export, every, rows, log):
        return lead(
            lambda: open_leader(packed, keys, Path(state), entropy),
            packed,
            keyring.directory,
            address,
            rounds=rounds,
            log=log,
            on_listening=listening,
            models=export,
            state=Path(state),
            token=OperatorToken.of(Path(state), token_file),
        )


@contextmanager
def exporting(
    bundle: Bundle, state: Path, folder: Path | None, every: int, rows: int, log: JsonLog
) -> Iterator[None]:
    """Beside a leader, in a thread that only reads its state; the last model at the end."""
    if folder is None:
        yield
        return
    stop = threading.Event()

    def run() -> None:
        try:
            follow(
                state,
                bundle,
                folder,
                every=every,
                rows=rows,
                stop=stop,
                written=lambda path: log("exported", file=path.name),
            )
        except (ConfigError, OSError) as error:  # rounds go on
            log("not exported", reason=str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def help_serve(
    bundle: BundleFile,
    leader: Annotated[str, typer.Argument(metavar="URL", help="The leader's address.")],
    keys: Keys,
    state: State,
    settings: Settings = None,
    service: Setting = None,
    log_level: LogLevel = "info",
    insecure_test_entropy: TestEntropy = None,
) -> int:
    """Run the second server: connect to the leader, hold one share of every report."""
    packed = packed_for(bundle, settings, service)
    entropy = entropy_of(insecure_test_entropy, urlsplit(leader).hostname or "")
    keyring = Keyring.read(keys, HELPER, packed.digest)
    helper = open_helper(packed, keys, Path(state), entropy)
    with helper.journal:
        return dial(leader, [(helper, keyring)], packed.plan.service, logged(HELPER, log_level))


def join(
    bundle: BundleFile,
    leader: Annotated[str, typer.Argument(metavar="URL", help="The leader's address.")],
    keys: Annotated[
        Path, typer.Option(help="The client's folder of keys; with --clients its parent folder.")
    ],
    state: State,
    client: Annotated[int | None, typer.Option(help="Which client this is.")] = None,
    clients: Annotated[
        str | None, typer.Option(metavar="A-B", help="Host these clients over one state.")
    ] = None,
    data: DataFolder = None,
    interactions: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            help="This client's own: a CSV or Parquet file, a folder of them, or "
            "MODULE:FUNCTION that gives a table. With --clients a folder with client-N.csv.",
        ),
    ] = None,
    as_of: Annotated[
        str | None,
        typer.Option(
            metavar="DATE", help="Your word that --interactions, which has no times, ends there."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="The code that you agree to run; its name and digest must be the bundle's.",
        ),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where this user account records which rows were offered to which group and what "
            "trainings cost, for all federations (default: $XDG_STATE_HOME/tessera).",
        ),
    ] = None,
    budget_epsilon: Annotated[
        float | None,
        typer.Option(
            metavar="E",
            help="The most that this person spends on all trainings of the account together; one "
            "that would pass it is refused before anything is sent.",
        ),
    ] = None,
    budget_delta: Annotated[
        float | None, typer.Option(metavar="D", help=f"At this delta (default: {DELTA:g}).")
    ] = None,
    accept_identification: Annotated[
        bool,
        typer.Option(
            "--accept-identification",
            help="Offer rows that another group has seen: their holder can be identified (B = 1).",
        ),
    ] = False,
    leave: Annotated[
        bool,
        typer.Option(
            "--leave",
            help="Leave its fixed group for good: its key is erased, the leader is told, and the "
            "group is retired.",
        ),
    ] = False,
    settings: Settings = None,
    service: Setting = None,
    log_level: LogLevel = "info",
    insecure_test_entropy: TestEntropy = None,
) -> int:
    """Take part in rounds: as one client of the bundle's task, or a synthetic one."""
    packed = packed_for(bundle, settings, service)
    entropy = entropy_of(insecure_test_entropy, urlsplit(leader).hostname or "")
    if (client is None) == (clients is None):
        raise ConfigError("one of --client and --clients says who joins", hint="--client 3")
    if client is not None:
        keyrings = [Keyring.read(keys, ClientId(client), packed.digest)]
    else:
        keyrings = [
            Keyring.read(keys / folder_of(each), each, packed.digest)
            for each in several(clients or "")
        ]
        waiting = {each.folder for each in keyrings if packed.plan.grouped and each.waits}
        if len(waiting) < len(keyrings):
            for folder in sorted(waiting):
                typer.echo(f"{folder}: left over, has no group yet", err=True)
            keyrings = [each for each in keyrings if each.folder not in waiting]
    services = open_clients(
        packed,
        keyrings,
        Path(state),
        entropy,
        maker(packed, data, entropy, interactions, as_of, task, several=clients is not None),
        Account(home, accept_identification, own_budget(budget_epsilon, budget_delta)),
    )
    for member in services:
        if isinstance(member, GroupClientService):
            for reason in member.group.reasons:
                typer.echo(f"{member.name}: {ON_THE_OPERATORS_WORD}: {reason}", err=True)
            if void := member.group.void:
                drawn = DrawnGroups(size=packed.plan.group_size, void=void)
                typer.echo(f"{member.name}: {drawn.in_words(CORRUPT_SHARES[0])}", err=True)
        periods = member.local.periods
        if isinstance(periods, OneGroup) and periods.price:
            typer.echo(f"warning: {periods.price}", err=True)
        if leave:
            if not isinstance(member, GroupClientService):
                raise ConfigError(
                    "--leave without fixed groups", hint="stop the process: nobody waits for it"
                )
            member.leave()
    with services[0].journal:
        party = f"client {client}" if client is not None else f"clients {clients}"
        members = list(zip(services, keyrings, strict=True))
        return dial(leader, members, packed.plan.service, logged(party, log_level))


def maker(
    bundle: Bundle,
    data: Path | None,
    entropy: Entropy,
    interactions: str | None = None,
    as_of: str | None = None,
    task: str | None = None,
    *,
    several: bool = False,
) -> ClientMaker:
    """Who the clients are, and what they train on."""
    if not bundle.own_data and (interactions or as_of or task):
        given = "--interactions" if interactions else "--as-of" if as_of else "--task"
        raise ConfigError(
            f"{given}: the clients of this bundle have no data of their own",
            hint="pack --items CATALOGUE for clients that do",
        )
    if bundle.synthetic is not None:
        return synthetic_maker(bundle)
    if not bundle.own_data:
        from tessera.services.task_clients import task_maker

        return task_maker(bundle, data, entropy)
    if interactions is None:
        raise ConfigError(
            "this federation's clients read interactions of their own, and none are named",
            hint="--interactions mine.csv",
        )
    from tessera.services.packing import sources, task_function

    make = task_function(bundle, task)  # before any code of others is imported, or data are read
    from tessera.services.task_clients import own_maker

    said = partial(typer.echo, err=True)
    return own_maker(
        bundle, make, sources(interactions, as_of, several=several, said=said), entropy
    )


def own_budget(epsilon: float | None, delta: float | None) -> OwnBudget | None:
    """A client's own, over all trainings of its account."""
    if epsilon is None and delta is not None:
        raise ConfigError("--budget-delta without a budget", hint="--budget-epsilon 3")
    return None if epsilon is None else OwnBudget(epsilon, DELTA if delta is None else delta)


def several(text: str) -> list[ClientId]:
    """`0-999`, both included."""
    first, dash, last = text.partition("-")
    if not dash or not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
        raise ConfigError(f"--clients {text!r}", hint="write them as 0-999")
    return [ClientId(c) for c in range(int(first), int(last) + 1)]


def status(
    where: Annotated[
        str, typer.Argument(metavar="URL|DIR", help="A leader's address, or a folder of state.")
    ],
    ca: Annotated[
        Path | None, typer.Option(help="The authority of its certificate (a party's ca.pem).")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="TESSERA_TOKEN_FILE",
            help=f"The operator's token at a leader's address: {TOKEN} in its folder of state.",
        ),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A client's: what `tessera join --home` names."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Of a leader: round, phase, who is missing, deadline, last rounds, trouble, disk. Of a client:
    what it has spent, here and on all trainings of its account, and which rounds counted."""
    remote = where.startswith(("http://", "https://"))
    if remote:
        found = status_of(where, ca, token_file)
    else:
        found = party_status(Path(where), home or default_home())
    if as_json:
        typer.echo(json.dumps(found))
        return
    rounds, clients = found.pop("rounds", []), found.pop("clients", {})
    lines = {name: str(value) for name, value in found.items() if value not in (None, "", [])}
    if remote:
        lines["clients"] = ", ".join(f"{count} {state}" for state, count in clients.items())
    else:
        lines |= client_lines(clients)
    for each in rounds:
        detail = each.get("reason") or f"{each.get('survivors')} survivors"
        if each["outcome"] == "aborted" and each.get("needed"):
            detail = (
                f"in {each['phase']}, {each['answered']} of {each['needed']} answered; {detail}"
            )
        for phase, gone in each.get("missing", {}).items():
            detail += f"; missing in {phase}: {', '.join(gone)}"
        lines[f"round {each['round']}"] = f"{each['outcome']}: {detail}"
    width = max(map(len, lines), default=0)
    for name, text in lines.items():
        typer.echo(f"{name:{width}}  {text}")


def status_of(url: str, ca: Path | None, token_file: Path | None) -> dict[str, Any]:
    """What a running leader says; without a proxy, whatever the environment names."""
    hint = "is a leader there? --ca names its authority"
    if token_file is None:
        raise ConfigError(
            f"{url}: a leader shows its status to its operator",
            hint=f"--token-file STATE/{TOKEN} of the leader; or `tessera status STATE`",
        )
    token = token_file.read_text(encoding="utf-8").strip()
    asked = Request(f"{url.rstrip('/')}/status", headers={"Authorization": f"Bearer {token}"})
    trusted = ssl.create_default_context(cafile=None if ca is None else str(ca))
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=trusted))
    try:
        with opener.open(asked, timeout=10.0) as answer:
            found: dict[str, Any] = json.load(answer)
    except HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            hint = "this is not the token of that leader"
        raise ConfigError(f"{url}: {error}", hint=hint) from error
    except (URLError, OSError, ValueError) as error:
        raise ConfigError(f"{url}: {error}", hint=hint) from error
    return found
