"""What a deployment costs beside its roles: time of a stage, CPU, disk and memory of the leader.

    python benchmarks/http_load.py --json              # ten clients, then a thousand
    python benchmarks/http_load.py --clients 100 --rounds 2

The unit U is one signed TLS request to a handler that does nothing but check it and commit one row
durably, measured in the same script. The roles' own CPU time, their messages and bytes are the
simulator's for the same plan, in a process of its own; that process has the clients in it too, so
that its peak memory is an upper bound of the role's alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response

from tessera.crypto.entropy import ScriptedEntropy
from tessera.engines import population
from tessera.engines.bundle import Bundle
from tessera.engines.federation import Federation
from tessera.engines.http.requests import RequestChecker, signed_headers
from tessera.engines.http.serving import Address, http_server
from tessera.engines.journal import Journal
from tessera.engines.keyring import CA, TLS, TLS_KEY, Keyring
from tessera.ids import SERVER, ClientId
from tessera.protocols.secagg.identity import identities
from tessera.rounds import schemes
from tessera.rounds.events import RoundFinished

ROWS = 8
TICKS = os.sysconf("SC_CLK_TCK")
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
[privacy]
level = "cpp4"
[security]
graph = "{graph}"
dropout = 0.05
[service]
join = 300
phase = 300
poll = 20
retry = 0.5
"""


def tessera(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tessera.cli.main", *map(str, arguments)]


def packed(folder: Path, scheme: str, clients: int) -> Bundle:
    graph = "sparse" if clients >= 100 else "complete"
    text = PLAN.format(scheme=scheme, clients=clients, graph=graph)
    (folder / "plan.toml").write_text(text, encoding="utf-8")
    for line in (
        tessera("pack", "plan.toml", "--rows-per-client", ROWS),
        tessera("keys", "bundle.npz"),
    ):
        subprocess.run(line, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return Bundle.read(folder / "bundle.npz")


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
    app = FastAPI(openapi_url=None)

    async def post(request: Request) -> Response:
        checker.check("POST", request.url.path, request.headers)
        body = await request.body()
        with journal.step():
            journal.set_fact("unit", "body", body)
        return Response(status_code=202)

    app.add_api_route("/unit", post, methods=["POST"])
    keys = folder / "keys" / "leader"
    address = Address("127.0.0.1", 0, keys / TLS, keys / TLS_KEY)
    with address.bound() as listening:
        print(address.url(listening), flush=True)
        http_server(app, address, request=30, keep=30).run(sockets=[listening])


def unit(folder: Path, bundle: Bundle, requests: int = 300) -> dict[str, float]:
    """Wall and the server's CPU seconds of one U."""
    keyring = Keyring.read(folder / "keys" / "client-0", ClientId(0), bundle.digest)
    line = [sys.executable, __file__, "--unit-server", str(folder)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url, body, times = server.stdout.readline().strip(), os.urandom(500), []
            trust = ssl.create_default_context(cafile=str(keyring.folder / CA))
            with httpx.Client(verify=trust, trust_env=False) as http:
                for at in range(requests + 20):
                    if at == 20:
                        before = cpu_seconds(server.pid)
                    headers = signed_headers(
                        keyring.signing, ClientId(0), bundle.digest, "POST", "/unit", body
                    )
                    started = time.perf_counter()
                    assert http.post(f"{url}/unit", content=body, headers=headers).is_success
                    times.append(time.perf_counter() - started)
            cpu = (cpu_seconds(server.pid) - before) / requests
        finally:
            server.kill()
    return {"wall": statistics.median(times[20:]), "cpu": cpu}


# --- the roles alone ------------------------------------------------------------------------------


def roles_alone(folder: Path, rounds: int) -> None:
    """The same rounds in the simulator; what they take, as JSON."""
    bundle = Bundle.read(folder / "bundle.npz")
    plan, entropy = bundle.plan, ScriptedEntropy(b"load")
    members = population.participants(plan, bundle.clients, ROWS)
    for client, identity in identities(list(members), entropy, plan.federation).items():
        members[client].identity = identity
    federation = Federation(
        plan,
        members,
        dense=population.dense(plan),
        tables=population.tables(plan),
        trainer=population.cohort_trainer(plan, bundle.clients),
        derived=population.derived_maps(plan),
        entropy=entropy,
    )
    ends = [e for e in federation.run(rounds) if isinstance(e, RoundFinished)]
    phases = len(schemes.of(plan).phases(plan))
    print(
        json.dumps(
            {
                "server_cpu": sum(sum(e.server_seconds.values()) for e in ends),
                "helper_cpu": sum(sum(e.helper_seconds.values()) for e in ends),
                "client_cpu": sum(sum(e.client_seconds.values()) for e in ends),
                "received": sum(sum(e.bytes_up.values()) for e in ends) * bundle.clients,
                "phases": phases,
                "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
        )
    )


# --- the deployment -------------------------------------------------------------------------------


def deployed(folder: Path, bundle: Bundle, rounds: int) -> dict[str, Any]:
    """So many rounds between processes: the leader's CPU, disk, memory, and their seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"https://127.0.0.1:{port}", (folder / "leader.log").open("wb")
    two = schemes.of(bundle.plan).two_servers
    lines = [
        ["serve", "bundle.npz", "--keys", "keys/leader", "--state", "state/leader"],
        *([["help-serve", "bundle.npz", url, "--keys", "keys/helper", "--state", "h"]] * two),
        ["join", "bundle.npz", url, "--keys", "keys", "--state", "state/clients"],
    ]
    lines[0] += ["--port", str(port)]
    lines[-1] += ["--clients", f"0-{bundle.clients - 1}"]
    processes = []
    try:
        for at, line in enumerate(lines):
            out = log if at == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(tessera(*line), cwd=folder, stdout=out, stderr=out))
        leader, peaks, ended = processes[0].pid, [], []
        begun: tuple[float, int] | None = None  # CPU and disk when the first round opened
        while len(ended) < rounds:
            time.sleep(0.2)
            events = [
                json.loads(x)
                for x in (folder / "leader.log").read_text().splitlines()
                if x.startswith("{")
            ]
            if begun is None and any(e.get("event") == "round opened" for e in events):
                begun = cpu_seconds(leader), written_bytes(leader)
            now = [e for e in events if e.get("event") == "round ended"]
            peaks += [peak_bytes(leader)] * (len(now) - len(ended))
            ended = now
            assert all(p.poll() is None for p in processes), (folder / "leader.log").read_text()
        opened = [e["time"] for e in events if e.get("event") == "round opened"][:rounds]
        outcomes = [json.loads(e["outcome"]) for e in ended[:rounds]]
        assert begun is not None
        return {
            "cpu": cpu_seconds(leader) - begun[0],
            "written": written_bytes(leader) - begun[1],
            "peaks": peaks,
            "seconds": [e["time"] - o for e, o in zip(ended, opened, strict=False)],
            "survivors": [o.get("survivors", 0) for o in outcomes],
        }
    finally:
        for process in processes:
            process.kill()
            process.wait()
        log.close()


def measured(scheme: str, clients: int, rounds: int) -> dict[str, Any]:
    with TemporaryDirectory() as made:
        folder = Path(made)
        bundle = packed(folder, scheme, clients)
        u = unit(folder, bundle)
        line = [sys.executable, __file__, "--roles-alone", str(folder), "--rounds", str(rounds)]
        alone = json.loads(subprocess.run(line, check=True, capture_output=True).stdout)
        found = deployed(folder, bundle, rounds)
    own = (alone["server_cpu"] + alone["helper_cpu"]) / rounds + alone["client_cpu"] / rounds
    stage = max(0.0, statistics.median(found["seconds"]) - own) / alone["phases"]
    messages = clients * rounds * alone["phases"]
    return {
        "scheme": scheme,
        "clients": clients,
        "rounds": rounds,
        "U wall ms": 1e3 * u["wall"],
        "U cpu ms": 1e3 * u["cpu"],
        "stage over U": stage / u["wall"],
        "everybody in the sum": sum(s == clients for s in found["survivors"]),
        "leader cpu per message over U": (found["cpu"] - alone["server_cpu"]) / messages / u["cpu"],
        "written over received": found["written"] / max(1.0, alone["received"]),
        "peak over role's": found["peaks"][-1] / alone["peak"],
        "peak, last round over second": found["peaks"][-1] / found["peaks"][min(1, rounds - 1)],
        "rounds per minute": 60.0 / statistics.median(found["seconds"]),
        "round seconds": found["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clients", type=int, help="one run of secure-fedavg with so many")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unit-server", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--roles-alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.unit_server is not None:
        serve_unit(options.unit_server)
        return
    if options.roles_alone is not None:
        roles_alone(options.roles_alone, options.rounds)
        return
    runs = [("secure-submodel", 10), ("two-server", 10), ("secure-fedavg", 1000)]
    if options.clients is not None:
        runs = [("secure-fedavg", options.clients)]
    for scheme, clients in runs:
        found = measured(scheme, clients, options.rounds)
        if options.json:
            print(json.dumps(found), flush=True)
            continue
        for name, value in found.items():
            shown = f"{value:.3g}" if isinstance(value, float) else value
            print(f"{name:32} {shown}")
        print(flush=True)


if __name__ == "__main__":
    main()
