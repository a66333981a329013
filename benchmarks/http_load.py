"""What a deployment costs beside its roles: time of a stage, CPU, disk and memory of the leader.

    python benchmarks/http_load.py --json              # ten clients, a hundred, a thousand
    python benchmarks/http_load.py --clients 100 --rounds 2
    python benchmarks/http_load.py --idle --json       # which part of a round nobody works in
    python benchmarks/http_load.py --idle --clients 10 --scheme two-server --times 4 --off

The unit U is one signed TLS request to a handler that does nothing but check it and commit one row
durably, one after the other over one connection, on the same server as the leader's. All clients
are in one process. The leader has one core for itself and everybody else another, as between
machines, U's server and its client too: left to themselves they are on one core or on two as it
happens, and a stage takes up to twice as long on one. The roles' own time is what the simulator
takes for the same rounds, after a first one that does not count: the leader's, the helper's and all
clients', with what it takes to make and start them and to step the model. U and the roles' own time
are taken before and after. The role alone is the leader's role in a process of its own, given the
messages of the last round from the leader's journal; its peak memory and its CPU time are what the
leader's are compared with.

Idle time is the part of the wall time, from the opening of a first round to the end of the last, in
which no process of the deployment used CPU: of samples every 10 ms, those in which each of them had
less than a hundredth of the time between two samples. A round that does not count comes first. In
fixed groups rounds end and are not opened; it is counted from the end of the first round on.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import resource
import sqlite3
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from http.client import HTTPSConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tessera.crypto import kernel
from tessera.crypto.entropy import ScriptedEntropy
from tessera.ids import SERVER, ClientId
from tessera.rounds import schemes
from tessera.rounds.course import Course
from tessera.rounds.events import RoundFinished
from tessera.services.bundle import Bundle
from tessera.services.deployment import leader_party
from tessera.services.http.requests import RequestChecker, signed_headers
from tessera.services.http.serving import Address, http_server
from tessera.services.journal import NAME, Journal
from tessera.services.keyring import CA, TLS, TLS_KEY, Keyring
from tessera.services.link import party_of
from tessera.services.loopback import LoopbackDeployment, simulation

SCRIPT = "load"
SELF = [sys.executable, __file__]
ROWS = 8
TICKS = os.sysconf("SC_CLK_TCK")
SAMPLED = 0.01
"""Seconds between two looks at who used CPU."""
WORKED = 0.01
"""Share of that time from which on a process counts as having worked."""
IDLE_TARGET = 0.3
PLAN = """
scheme = "{scheme}"
cohort = {clients}
federation = "load"
seed = 1
[model]
dense = 64
[[table]]
name = "items"
rows = 256
width = 4
[union]
max_rows = 32
{kind}
[security]
graph = "{graph}"
dropout = {dropout}
[service]
join = {join}
phase = 300
poll = 20
retry = 0.5
"""
DRAWN = '[privacy]\nlevel = "cpp4"'
GROUPS = "[groups]\nsmall = true"


def packed(
    folder: Path,
    scheme: str,
    clients: int,
    *,
    times: int = 1,
    groups: bool = False,
    dropout: float = 0.05,
    join: float = 300.0,
) -> LoopbackDeployment:
    text = PLAN.format(
        scheme=scheme,
        clients=clients,
        graph="sparse" if clients >= 100 else "complete",
        kind=GROUPS if groups else DRAWN,
        dropout=dropout,
        join=join,
    )
    enrolled = times * clients
    return LoopbackDeployment.packed(folder, text, rows=ROWS, script=SCRIPT, clients=enrolled)


CORES = sorted(os.sched_getaffinity(0))


def on_core(pid: int, *, leader: bool) -> None:
    """A core for the leader, and one for everybody else."""
    os.sched_setaffinity(pid, {CORES[0] if leader else CORES[-1]})


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    return 0


def written_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("write_bytes"):
            return int(line.split()[1])
    return 0


# --- the unit -------------------------------------------------------------------------------------


def serve_unit(folder: Path) -> None:
    """A server whose handler checks a request and commits one row."""
    bundle = Bundle.read(folder / "bundle.npz")
    keyring = Keyring.read(folder / "keys" / "leader", SERVER, bundle.digest)
    checker = RequestChecker(keyring.directory, bundle.digest)
    journal = Journal.open(folder / "unit", owner="unit", plan=bundle.digest)

    async def post(request: Request) -> Response:
        checker.check("POST", request.url.path, request.headers)
        body = await request.body()
        with journal.step():
            journal.set_fact("unit", "body", body)
        return Response(status_code=202)

    app = Starlette(routes=[Route("/unit", post, methods=["POST"])])
    keys = folder / "keys" / "leader"
    address = Address("127.0.0.1", 0, keys / TLS, keys / TLS_KEY)
    with address.bound() as listening:
        print(address.url(listening), checker.session, flush=True)
        http_server(app, address, request=30, keep=30).run(sockets=[listening])


def unit(folder: Path, bundle: Bundle, requests: int = 300) -> dict[str, float]:
    """Wall and the server's CPU seconds of one U."""
    keyring = Keyring.read(folder / "keys" / "client-0", ClientId(0), bundle.digest)
    line = [*SELF, "--unit-server", str(folder)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            on_core(server.pid, leader=True)
            on_core(0, leader=False)
            url, session = server.stdout.readline().split()
            body, times = os.urandom(500), []
            trust = ssl.create_default_context(cafile=str(keyring.folder / CA))
            address = urlsplit(url).netloc
            with closing(HTTPSConnection(address, context=trust)) as connection:
                for at in range(requests + 20):
                    if at == 20:
                        before = cpu_seconds(server.pid)
                    headers = signed_headers(
                        keyring.signing, ClientId(0), bundle.digest, "POST", "/unit", body, session
                    )
                    started = time.perf_counter()
                    connection.request("POST", "/unit", body, headers)
                    answer = connection.getresponse()
                    assert answer.status == 202 and not answer.read()
                    times.append(time.perf_counter() - started)
            cpu = (cpu_seconds(server.pid) - before) / requests
        finally:
            os.sched_setaffinity(0, CORES)
            server.kill()
    return {"wall": statistics.median(times[20:]), "cpu": cpu}


# --- the roles alone ------------------------------------------------------------------------------


def roles_alone(folder: Path, rounds: int) -> None:
    """The same rounds in the simulator: what the median one takes, and how much of it is messages
    taken, phases closed and training (without making and starting roles and stepping the model), as
    JSON."""
    kernel.active()
    bundle = Bundle.read(folder / "bundle.npz")
    federation = simulation(bundle, ScriptedEntropy(SCRIPT.encode()))
    gc.collect()
    gc.freeze()  # as in a deployment's processes
    whole, messages = [], []
    started = time.process_time()
    for event in federation.run(rounds + 1):
        if isinstance(event, RoundFinished):
            both = (*event.server_seconds.values(), *event.helper_seconds.values())
            each = sum(event.client_seconds.values())
            messages.append(sum(both) + bundle.clients * each)
            whole.append(time.process_time() - started)
            started = time.process_time()
    found = {"seconds": whole, "of messages": messages}
    print(json.dumps({name: statistics.median(each[1:]) for name, each in found.items()}))


def role_alone(folder: Path) -> None:
    """The leader's role over the last round's messages: its CPU and peak memory, as JSON."""
    kernel.active()
    bundle = Bundle.read(folder / "bundle.npz")
    keyring = Keyring.read(folder / "keys" / "leader", SERVER, bundle.digest)
    party = leader_party(keyring, ScriptedEntropy(SCRIPT.encode()))
    course = Course(bundle.plan, keyring.directory.clients, bundle.first_model(), party)
    path = folder / "state" / "leader" / NAME
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        (round_id,) = database.execute("SELECT MAX(round_id) FROM link").fetchone()
        for _ in course.skip_to(round_id):
            pass
        drawn = course.draw()
        (part,) = drawn.parts
        role = course.server(drawn, part, keyring.identity)
        messages, received, seconds = 0, 0, 0.0
        started = time.process_time()
        role.start()
        for peer, data in database.execute("SELECT peer, data FROM received ORDER BY id"):
            messages, received = messages + 1, received + len(data)
            role.receive(party_of(peer), bytes(data))
            while role.phase not in ("done", "aborted") and not role.expected:
                role.close_phase()
        seconds = time.process_time() - started
    print(
        json.dumps(
            {
                "done": role.phase == "done",
                "cpu": seconds,
                "messages": messages,
                "received": received,
                "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
        )
    )


# --- the deployment -------------------------------------------------------------------------------


def deployed(parties: LoopbackDeployment, rounds: int) -> dict[str, Any]:
    """So many rounds between processes: the leader's CPU, disk, memory, and their seconds.

    CPU and disk are those from the opening of a first round to that of the last; the last one ends
    and stays in the journal.
    """
    names = ["leader", *(["helper"] * schemes.of(parties.bundle.plan).two_servers), "clients"]
    parties.rounds = rounds + 1
    try:
        for name in names:
            on_core(parties.start(name).pid, leader=name == "leader")
        leader = parties.running["leader"].pid
        peaks: list[int] = []
        at_opening: list[tuple[float, int]] = []  # CPU and disk
        ended: list[dict[str, Any]] = []
        while len(ended) <= rounds:
            time.sleep(0.02)
            opened = list(parties.events("round opened"))
            at_opening += [(cpu_seconds(leader), written_bytes(leader))] * (
                len(opened) - len(at_opening)
            )
            now = list(parties.events("round ended"))
            peaks += [peak_bytes(leader)] * (len(now) - len(ended))
            ended = now
            for name in names:
                status = parties.running[name].poll()
                over = status == 0 and len(list(parties.events("round ended"))) > rounds
                assert status is None or over, parties.log(name).read_text()[-2000:]
        for name in names:
            assert parties.running[name].wait(60) == 0
    finally:
        parties.close()
    (cpu, written), (cpu_end, written_end) = at_opening[0], at_opening[rounds]
    outcomes = [json.loads(e["outcome"]) for e in ended]
    return {
        "cpu": (cpu_end - cpu) / rounds,
        "written": (written_end - written) / rounds,
        "peaks": peaks,
        "seconds": [e["time"] - o["time"] for e, o in zip(ended, opened, strict=True)],
        "survivors": [o.get("survivors", 0) for o in outcomes],
    }


# --- idle time ------------------------------------------------------------------------------------


def on_cpu(pid: int) -> float:
    """Seconds of CPU that another process has used, to the nanosecond (its CPU clock on Linux)."""
    return time.clock_gettime((~pid << 3) | 2)


def staying(parties: LoopbackDeployment, off: int) -> list[str]:
    """Processes of clients without so many that are off; of fixed groups whole groups are, where
    that is possible, since a group with one member off waits and costs nobody anything."""
    enrolled = parties.bundle.clients
    if not off:
        return ["clients"]
    if not parties.bundle.plan.grouped:
        return [f"clients 0-{enrolled - off - 1}"]
    order = [client for group in parties.groups() for client in group.members]
    gone = set(order[-off:])
    there = [client for client in range(enrolled) if client not in gone]
    edges = [at for at in range(1, len(there)) if there[at] != there[at - 1] + 1]
    runs = zip([0, *edges], [*edges, len(there)], strict=True)
    return [f"clients {there[first]}-{there[last - 1]}" for first, last in runs]


def idle(scheme: str, clients: int, rounds: int, *, times: int, off: bool) -> dict[str, Any]:
    """The share of idle time, and the seconds of a round."""
    groups = scheme == "secure-submodel"
    gone = times * clients // 10 if off else 0
    with TemporaryDirectory() as made:
        # Where all are drawn those who are off are dropouts; the first round waits for them, once.
        dropout = 0.2 if off and times == 1 else 0.05
        join = 5.0 if off else 300.0
        parties = packed(
            Path(made), scheme, clients, times=times, groups=groups, dropout=dropout, join=join
        )
        parties.rounds = rounds + 1
        helper = ["helper"] if schemes.of(parties.bundle.plan).two_servers else []
        names = ["leader", *helper, *staying(parties, gone)]
        samples: list[tuple[float, bool]] = []
        try:
            pids = [parties.start(name).pid for name in names]
            for pid, name in zip(pids, names, strict=True):
                on_core(pid, leader=name == "leader")
            used, looked = [on_cpu(pid) for pid in pids], 0.0
            while parties.running["leader"].poll() is None:
                time.sleep(SAMPLED)
                now, before = time.time(), samples[-1][0] if samples else time.time() - SAMPLED
                try:
                    used_now = [on_cpu(pid) for pid in pids]
                except OSError:  # one of them has ended
                    break
                most = max(b - a for a, b in zip(used, used_now, strict=True))
                samples.append((now, most < WORKED * (now - before)))
                used = used_now
                if now - looked > 1.0:
                    looked = now
                    if len(list(parties.events("round ended"))) > rounds:
                        break
            opened = [each["time"] for each in parties.events("round opened")]
            ended = [each["time"] for each in parties.events("round ended")]
            if len(ended) > rounds:  # they end by themselves, after the last poll
                for name in names:
                    parties.running[name].wait(120)
        finally:
            parties.close()
    starts = opened if opened else ended
    first, last = starts[1 if opened else 0], ended[-1]
    idle_time = sum(
        at - before
        for (before, _), (at, quiet) in itertools.pairwise(samples)
        if quiet and first < before and at < last
    )
    share = idle_time / (last - first)
    return {
        "what": "idle share of a round's wall time",
        "settings": {"scheme": scheme, "cohort": clients, "enrolled": times * clients, "off": gone},
        "ours": round(share, 3),
        "unit": "of wall time",
        "target": IDLE_TARGET,
        "ok": share <= IDLE_TARGET,
        "rounds": len(ended) - 1,
        "seconds a round": round((last - first) / (len(ended) - 1), 3),
    }


def all_idle(rounds: int) -> Iterator[dict[str, Any]]:
    """Both schemes, three sizes, enrolled = 1x and 4x the cohort, nobody or a tenth off."""
    for scheme, clients in itertools.product(("two-server", "secure-submodel"), (10, 100, 300)):
        for times, off in itertools.product((1, 4), (False, True)):
            if scheme == "secure-submodel" and off and clients * times < 100:
                continue  # of one group, or of four, a tenth are not whole groups
            yield idle(scheme, clients, rounds, times=times, off=off)


def leader(folder: Path, found: dict[str, Any], u: dict[str, float]) -> dict[str, float]:
    """What the leader takes beside its role. Not with two servers: the helper's messages are for
    the model of their round, which is no longer there."""
    line = [*SELF, "--role-alone", str(folder)]
    alone = json.loads(subprocess.run(line, check=True, capture_output=True).stdout)
    assert alone["done"], "the role alone opens the sum, too"
    beside = found["cpu"] - alone["cpu"]
    return {
        "messages a round": alone["messages"],
        "leader cpu per message over U": beside / alone["messages"] / u["cpu"],
        "written over received": found["written"] / alone["received"],
        "peak over role's": found["peaks"][-1] / alone["peak"],
    }


def roles_in_simulator(folder: Path, rounds: int) -> dict[str, float]:
    line = [*SELF, "--roles-alone", str(folder), "--rounds", str(rounds)]
    run = subprocess.run(line, check=True, capture_output=True)
    found: dict[str, float] = json.loads(run.stdout)
    return found


def mean(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(each[name] for each in found) for name in found[0]}


def measured(scheme: str, clients: int, rounds: int) -> dict[str, Any]:
    with TemporaryDirectory() as made:
        folder = Path(made)
        parties = packed(folder, scheme, clients)
        # Twice, before and after: the speed of a machine in a cloud changes within seconds.
        simulated = rounds if clients < 100 else 1
        least = [unit(folder, parties.bundle)]
        alone = [roles_in_simulator(folder, simulated)]
        found = deployed(parties, rounds)
        alone.append(roles_in_simulator(folder, simulated))
        least.append(unit(folder, parties.bundle))
        u = mean(least)
        own = mean(alone)
        beside = {} if schemes.of(parties.bundle.plan).two_servers else leader(folder, found, u)
    stages = len(schemes.of(parties.bundle.plan).phases(parties.bundle.plan))
    stage = max(0.0, statistics.median(found["seconds"][1:]) - own["seconds"]) / stages
    return {
        "scheme": scheme,
        "clients": clients,
        "rounds": rounds,
        "U wall ms": 1e3 * u["wall"],
        "U cpu ms": 1e3 * u["cpu"],
        "stages": stages,
        "roles' own seconds a round": own["seconds"],
        "of these, messages and training": own["of messages"],
        "stage over U": stage / u["wall"],
        "everybody in the sum": sum(s == clients for s in found["survivors"]),
        **beside,
        "leader peak MB": found["peaks"][-1] / 1e6,
        "peak, last round over second": found["peaks"][-1] / found["peaks"][1],
        "stage ms": 1e3 * stage,
        "rounds per minute": 60.0 / statistics.median(found["seconds"]),
        "round seconds": [round(s, 3) for s in found["seconds"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clients", type=int, help="one run with so many")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unit-server", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--roles-alone", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--role-alone", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--scheme", default="secure-fedavg", help="of the one run")
    parser.add_argument("--idle", action="store_true", help="idle time, over --rounds (10 or more)")
    parser.add_argument("--times", type=int, default=1, help="enrolled clients over the cohort")
    parser.add_argument("--off", action="store_true", help="a tenth of the enrolled are off")
    options = parser.parse_args()
    if options.unit_server is not None:
        serve_unit(options.unit_server)
        return
    if options.roles_alone is not None:
        roles_alone(options.roles_alone, options.rounds)
        return
    if options.role_alone is not None:
        role_alone(options.role_alone)
        return
    if options.idle:
        rounds = max(10, options.rounds)
        found: Iterable[dict[str, Any]] = all_idle(rounds)
        if options.clients is not None:
            about = {"times": options.times, "off": options.off}
            found = [idle(options.scheme, options.clients, rounds, **about)]
        for row in found:
            print(json.dumps(row) if options.json else row, flush=True)
        return
    runs = [
        ("secure-submodel", 10, 10),
        ("two-server", 10, 10),
        ("secure-fedavg", 100, 10),
        ("secure-fedavg", 1000, 3),
    ]
    if options.clients is not None:
        runs = [(options.scheme, options.clients, options.rounds)]
    for scheme, clients, rounds in runs:
        figures = measured(scheme, clients, rounds)
        if options.json:
            print(json.dumps(figures), flush=True)
            continue
        for name, value in figures.items():
            shown = f"{value:.3g}" if isinstance(value, float) else value
            print(f"{name:32} {shown}")
        print(flush=True)


if __name__ == "__main__":
    main()
