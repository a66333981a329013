"""A round at the sizes of Niu et al. 2020, with synthetic holdings, measured.

Niu et al. 2020, section 6: 100 clients a round, 301 items each of 143,534, categories that follow
from the items, 18 columns, 64,327 dense parameters, updates of 2^15 levels. The holdings are
synthetic, with the papers' distribution (`papers/sfsl_holdings.py`). Training returns constants and
is not part of any figure; everything else is the real roles exchanging their real messages.
Secrets are scripted, so that the bytes of a setting are the same in every run.

Memory is measured in processes of their own: one that is a client and nothing else, and one that is
the server, each fed what it was sent in a recorded round.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from papers.sfsl_holdings import Market
from tessera.crypto.entropy import ScriptedEntropy
from tessera.errors import ConfigError
from tessera.ids import SERVER, ClientId, RoundId
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TableUpdate
from tessera.learning.tables.table import DerivedMap, LazyTable, StoredTable, TableSpec, Uniform
from tessera.plan import DPPlan, ModelPlan, Plan, Precision, PrivacyPlan, TablePlan, UnionPlan
from tessera.privacy.index.period import MemoryPeriods, PeriodStore, SqlitePeriods
from tessera.protocols.union.choice import EncodingChoice
from tessera.rounds import schemes
from tessera.rounds.client import ClientRound
from tessera.rounds.party import ClientRoundSetup, LocalState, ServerParty, ServerRoundSetup
from tessera.rounds.server import ServerRound
from tessera.simulation import views
from tessera.simulation.faults import Drop, Fault
from tessera.simulation.simulator import PhaseEnd, Simulator
from tessera.simulation.subcohort import Counted, Stopwatch, between_messages
from tessera.simulation.views import Views

USERS: Final = 49_023
ITEMS: Final = 143_534
CATEGORIES: Final = 4_815
DENSE: Final = 64_327
COLUMNS: Final = 18
PER_CLIENT: Final = 301
EXAMPLES: Final = 323

ROUND: Final = RoundId(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSetting:
    """One round to measure.

    `papers` is their setting: no decoys, and a row is opened even for a single holder. Otherwise
    ours: decoys and a quorum of two.
    """

    scheme: str = schemes.DEFAULT.value
    level: str = "cpp2"
    clients: int = 100
    dropout: float = 0.0
    papers: bool = True
    precision: str = "float16"
    items: int = ITEMS
    encoding: str = "auto"
    per_client: int = PER_CLIENT
    dense: int = DENSE
    dp: DPPlan | None = None

    @property
    def market(self) -> Market:
        """In a larger table the same items lie further apart, so that rounds can be compared."""
        return Market(
            rows=self.items,
            stocked=min(self.items, ITEMS),
            categories=CATEGORIES,
            per_client=self.per_client,
        )

    @property
    def plan(self) -> Plan:
        items = TablePlan(name="goods", rows=self.items, width=COLUMNS)
        categories = TablePlan(
            name="categories", rows=CATEGORIES, width=COLUMNS, derived_from="goods"
        )
        users = TablePlan(name="users", rows=USERS, width=COLUMNS)
        entry = schemes.named(self.scheme)
        privacy = PrivacyPlan(level=self.level)
        if self.papers:
            privacy = PrivacyPlan(
                level=self.level, decoys=0.0, min_group=1, insecure_small_groups=True
            )
        return Plan(
            scheme=entry.scheme,
            cohort=self.clients,
            federation="sfsl",
            # A user's own row stays local; the papers' full model has everybody's.
            tables=(items, categories) if entry.by_rows else (items, categories, users),
            model=ModelPlan(dense=self.dense, precision=Precision(self.precision)),
            privacy=privacy,
            union=UnionPlan(encoding=EncodingChoice(self.encoding), max_rows=self.per_client),
            dp=self.dp,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """What a round came to: bytes and CPU seconds by cost category, means over the survivors."""

    up: Mapping[str, float]
    down: Mapping[str, float]
    kinds: Mapping[str, float]
    client_seconds: Mapping[str, float]
    server_seconds: Mapping[str, float]
    union_rows: int
    survivors: int
    encoding: str

    @property
    def bytes(self) -> float:
        return sum(self.up.values()) + sum(self.down.values())

    def union_bytes(self) -> float:
        """The union alone: its stage, and all of the keys, which the update shares with it."""
        return sum(part[stage] for part in (self.up, self.down) for stage in ("keys", "union"))


def clients_of(
    setting: RoundSetting, plan: Plan, numbers: Sequence[int], periods: PeriodStore | None = None
) -> dict[ClientId, ClientRound]:
    """Some clients of the cohort, before their first word."""
    given = own_of(setting, plan, numbers, periods)
    return {me: ClientRound(setup) for me, setup in given.items()}


def own_of(
    setting: RoundSetting, plan: Plan, numbers: Sequence[int], periods: PeriodStore | None = None
) -> dict[ClientId, ClientRoundSetup]:
    """What these clients' roles are given."""
    market, maps = setting.market, derived_maps(setting, plan)
    entropy = ScriptedEntropy(b"sfsl")
    found = {}
    for number in numbers:
        real = {"goods": market.client(number)}
        if not schemes.of(plan).by_rows:
            real["users"] = np.array([number], dtype=np.uint64)
        local = LocalState(real=real, periods=periods or MemoryPeriods(), derived=maps)
        me = ClientId(number)
        found[me] = ClientRoundSetup(
            plan=plan, round_id=ROUND, party=me, local=local, entropy=entropy
        )
    return found


def server_of(setting: RoundSetting, plan: Plan) -> ServerRound:
    return ServerRound(server_setup(setting, plan))


def server_setup(setting: RoundSetting, plan: Plan) -> ServerRoundSetup:
    return ServerRoundSetup(
        plan=plan,
        round_id=ROUND,
        **model_of(setting, plan),
        invited=[ClientId(i) for i in range(setting.clients)],
        own=ServerParty(entropy=ScriptedEntropy(b"sfsl")),
    )


def model_of(setting: RoundSetting, plan: Plan) -> dict[str, Any]:
    """The model before the round, as the server is given it."""
    tables: dict[str, StoredTable] = {t.name: LazyTable(spec(plan, t.name)) for t in plan.tables}
    return {
        "dense": np.zeros(plan.model.dense, dtype=np.float32),
        "tables": tables,
        "derived": derived_maps(setting, plan),
    }


def spec(plan: Plan, name: str) -> TableSpec:
    t = plan.table(name)
    return TableSpec(name=name, size=t.rows, width=t.width, initial=Uniform(0.01))


def derived_maps(setting: RoundSetting, plan: Plan) -> dict[str, DerivedMap]:
    lookup = setting.market.category_of
    return {"categories": DerivedMap(spec(plan, "goods"), spec(plan, "categories"), lookup)}


def trained(plan: Plan, submodels: Mapping[ClientId, Submodel]) -> dict[ClientId, ModelUpdate]:
    """Returns at once: what is measured is the protocol. A move weighs as much as its examples."""
    dense: npt.NDArray[np.float64] = np.full(plan.model.dense, 0.25 / EXAMPLES)
    return {
        client: ModelUpdate(
            dense,
            EXAMPLES,
            {
                name: TableUpdate(
                    np.full((len(ids), COLUMNS), 0.25), np.ones(len(ids), dtype=np.int64)
                )
                for name, ids in submodel.trained.items()
            },
        )
        for client, submodel in submodels.items()
    }


def dropouts(setting: RoundSetting, plan: Plan) -> list[Fault]:
    """The setting's share of the cohort, leaving in turn at every point of the round."""
    gone = round(setting.dropout * setting.clients)
    if not gone:
        return []
    places = [("share", 0), ("collect", 0), ("unmask", 0)]
    if len(plan.stages) == 2:
        places += [("reveal", 0), ("collect", 1), ("unmask", 1)]
    chosen = np.random.default_rng(7).choice(setting.clients, gone, replace=False)
    return [
        Drop(ClientId(int(c)), phase, stage=stage)
        for i, c in enumerate(chosen)
        for phase, stage in [places[i % len(places)]]
    ]


def measure(setting: RoundSetting, record: Views | None = None) -> Measured:
    """Run the round and count."""
    measured, _ = run(setting, record)
    return measured


def run(setting: RoundSetting, record: Views | None = None) -> tuple[Measured, list[int]]:
    """The round's figures, and how many messages the server had received at each phase's end."""
    plan = setting.plan
    clients = clients_of(setting, plan, range(setting.clients))
    server = server_of(setting, plan)
    first_messages, started = {}, {}
    for name, client in clients.items():
        begun = time.process_time()
        first_messages[name] = client.start()
        started[name] = time.process_time() - begun
    watch = Stopwatch(plan)
    closings: list[int] = []

    def on_phase(phase_end: PhaseEnd) -> None:
        watch.on_phase(phase_end)
        if record is not None:
            seen = record.by_party.get(SERVER, [])
            closings.append(sum(entry.direction == "received" for entry in seen))

    simulator = watch.simulator = Simulator(
        server,
        clients,
        first_messages,
        greeting=server.start(),
        faults=dropouts(setting, plan),
        work=between_messages(clients, partial(trained, plan)),
        views=record,
        on_phase=on_phase,
    )
    outcome = simulator.run()
    if outcome.aborted is not None:
        raise outcome.aborted
    traffic, survivors = outcome.traffic, list(server.result.survivors)
    seconds: dict[ClientId, dict[str, float]] = {
        c: {"start": started[c], **traffic.client_seconds[c]} for c in survivors
    }
    kinds: Counter[str] = Counter()
    for c in survivors:
        kinds.update(traffic.up[c])
        kinds.update(traffic.down[c])
    encoding = type(plan.union_encoding(ROUND)).__name__ if schemes.of(plan).randomises else "none"
    measured = Measured(
        up=watch.by_category(Counted.UP, survivors),
        down=watch.by_category(Counted.DOWN, survivors),
        kinds={kind: total / len(survivors) for kind, total in kinds.items()},
        client_seconds=watch.by_category(Counted.SECONDS, survivors, seconds),
        server_seconds=dict(watch.server),
        union_rows=server.result.union_rows,
        survivors=len(survivors),
        encoding=encoding,
    )
    return measured, closings


# --- memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Footprint:
    """Peak resident bytes of one party's process, what it had before the round, what it stores."""

    peak: int
    before: int
    snapshot: int = 0
    period: int = 0

    @property
    def grown(self) -> int:
        return self.peak - self.before


def footprints(setting: RoundSetting) -> dict[str, Footprint]:
    """A client's and the server's memory, each replayed in a process of its own."""
    record = Views()
    _, closings = run(setting, record)
    client = next(c for c in map(ClientId, range(setting.clients)) if c in record.by_party)
    with tempfile.TemporaryDirectory() as folder:
        kept = Views()
        for party in (SERVER, client):
            kept.by_party[party] = [
                entry for entry in record.by_party.pop(party) if entry.direction == "received"
            ]
        record.by_party.clear()
        kept.write(Path(folder))
        kept.by_party.clear()
        gc.collect()
        job = {"setting": asdict(setting), "closings": closings, "client": int(client)}
        (Path(folder) / "job.json").write_text(json.dumps(job))
        return {party: _alone(party, folder) for party in ("client", "server")}


def _alone(party: str, folder: str) -> Footprint:
    command = [sys.executable, "-m", "papers.sfsl_round", party, folder]
    root = Path(__file__).parents[1]  # where `papers` is found, wherever the command was called
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    if done.returncode:
        raise ConfigError(f"the {party}'s process failed: {done.stderr.strip().splitlines()[-1:]}")
    return Footprint(**json.loads(done.stdout))


def _replay(party: str, folder: Path) -> Footprint:
    """In the process of that party: take its messages in, and see how much memory that took."""
    job = json.loads((folder / "job.json").read_text())
    setting = RoundSetting(**job["setting"])
    plan = setting.plan
    if party == "server":
        server = server_of(setting, plan)
        before = _peak()
        server.start()
        seen = views.read(folder / f"{SERVER}.view.jsonl")
        taken = 0
        for until in job["closings"]:
            while taken < until:
                entry = next(seen)
                assert not isinstance(entry.other, str)
                server.receive(entry.other, entry.data)
                taken += 1
            server.close_phase()
        return Footprint(peak=_peak(), before=before)
    number = job["client"]
    store = folder / "periods.db"
    client = clients_of(setting, plan, [number], SqlitePeriods(store))[ClientId(number)]
    before = _peak()
    client.start()
    snapshots = []
    for entry in views.read(folder / f"client-{number}.view.jsonl"):
        client.receive(SERVER, entry.data)
        if (submodel := client.pending) is not None:
            client.supply(trained(plan, {client.me: submodel})[client.me])
        if schemes.of(plan).masks:
            snapshots.append(len(client.snapshot()))
    stored = store.stat().st_size if store.exists() else 0
    return Footprint(peak=_peak(), before=before, snapshot=max(snapshots, default=0), period=stored)


def _peak() -> int:
    """The most resident bytes this process has had.

    On Linux not from `getrusage`: there a process begins with the peak of the one that started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource  # not on every system

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    print(json.dumps(asdict(_replay(sys.argv[1], Path(sys.argv[2])))))
