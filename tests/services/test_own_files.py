"""A client's own file: what is read of it, what is refused, and code that is not the bundle's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

from tessera.cli.main import main
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data import catalogue, interactions
from tessera.data.catalogue import ItemCatalogue
from tessera.data.interactions import UNKNOWN_IDS, UNKNOWN_LINES
from tessera.errors import ConfigError
from tessera.ids import ClientId
from tessera.plan import GroupsPlan, Plan, Scheme, TaskPlan
from tessera.services.bundle import Bundle
from tessera.services.code import NamedCode
from tessera.services.journal import Journal
from tessera.services.journal_stores import JournalExamples
from tessera.services.link import name_of
from tessera.services.packing import deploy, moment_of, sources, task_function
from tessera.services.task_clients import own_maker
from tessera.tasks.known import how_of, known
from tessera.tasks.own import OwnInteractions, own_task

CLIENTS, ITEMS, FIRST = 4, 40, 1_700_000_000
SEQUENCES = {"time": "when", "model": "next", "history": 6, "negatives": 10, "width": 4}
CLICKS = {"time": "when", "history": 5, "negatives": 2, "category": "kind"}


def lines(client: int, count: int = 12) -> list[str]:
    rng = np.random.default_rng([3, client])
    return [f"i{rng.integers(ITEMS)},{FIRST + 60 * at}" for at in range(count)]


def own_file(folder: Path, client: int, more: list[str] | None = None) -> Path:
    path = folder / f"client-{client}.csv"
    path.write_text("\n".join(["item,when", *lines(client), *(more or [])]) + "\n")
    return path


def listed(folder: Path) -> Path:
    path = folder / "catalogue.csv"
    rows = (f"i{at},Title {at},{'ab'[at % 2]},{at}\n" for at in range(ITEMS))
    path.write_text("item,title,kind,sold\n" + "".join(rows))
    return path


def plan_of(name: str = "sequences", **options: Any) -> Plan:
    return Plan(
        scheme=Scheme.SECURE_SUBMODEL,
        cohort=CLIENTS,
        federation="shop",
        task=TaskPlan(name=name, options=options or dict(SEQUENCES)),
        groups=GroupsPlan(size=CLIENTS, small=True, period=2),
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return deploy(None, plan_of(), items=listed(tmp_path), clients=CLIENTS)


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"), [("sequences", SEQUENCES), ("interactions", CLICKS)], ids=["next", "DIN"]
)
def test_a_clients_own_file_gives_what_the_simulator_reads_of_all(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """Every client's examples, row for row, as if all lines were in one file with a user column."""
    made = catalogue.read(listed(tmp_path), category=options.get("category", ""), room=7)
    central = tmp_path / "all.csv"
    every = [f"u{c},{line}" for c in range(CLIENTS) for line in lines(c)]
    central.write_text("\n".join(["user,item,when", *every]) + "\n")
    how = replace(how_of({**known(name).options, **options}), dictionary=made)
    reading: Callable[..., Any] = (
        interactions.read_sequences if name == "sequences" else interactions.read
    )
    whole = reading(central, how)
    nobody = own_task(name, options, OwnInteractions(clients=CLIENTS, catalogue=made))
    for client in range(CLIENTS):
        own = OwnInteractions(
            clients=CLIENTS, catalogue=made, client=client, source=own_file(tmp_path, client)
        )
        task = own_task(name, options, own)
        mine, expected = task.data.of(client), whole.of(client)
        assert mine.fields.keys() == expected.fields.keys() == nobody.data.train.fields.keys()
        for field, column in mine.fields.items():
            assert np.array_equal(column, expected[field]), field
            assert column.dtype == nobody.data.train[field].dtype
        assert task.data.sizes == nobody.data.sizes == {**whole.sizes, "user": CLIENTS}
        assert np.diff(task.data.offsets).nonzero()[0].tolist() == [client]
        pools = [data.undrawn for data in (task.data, nobody.data, whole)]
        named = {tuple(pool.train) for pool in pools if pool is not None}
        assert named in (set(), {tuple(range(ITEMS))}), "rows that wait are no negatives"


def test_a_folder_a_parquet_file_and_a_function_are_the_same(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = catalogue.read(listed(tmp_path))
    whole = own_file(tmp_path, 0)
    folder, cells = tmp_path / "parts", [line.split(",") for line in lines(0)]
    folder.mkdir()
    for part, some in (("a.csv", cells[:5]), ("b.csv", cells[5:])):
        text = "\n".join(["item,when", *(",".join(one) for one in some)])
        (folder / part).write_text(text + "\n")
    table = pa.table({"item": [a for a, _ in cells], "when": [int(b) for _, b in cells]})
    pq.write_table(table, tmp_path / "mine.parquet")

    def examples(source: Any) -> list[Any]:
        own = OwnInteractions(clients=1, catalogue=made, source=source)
        return [
            c.tolist() for c in own_task("sequences", SEQUENCES, own).data.train.fields.values()
        ]

    first = examples(whole)
    for other in (folder, tmp_path / "mine.parquet", lambda: table):
        assert examples(other) == first


def test_items_that_the_catalogue_lacks_are_counted_and_said(
    tmp_path: Path, bundle: Bundle
) -> None:
    path, said = own_file(tmp_path, 0, ["new-1,1800000000", "new-1,1800000001"]), list[str]()
    own = OwnInteractions(clients=CLIENTS, catalogue=bundle.catalogue, source=path)
    facts = own_task("sequences", SEQUENCES, own).data.facts
    assert (facts[UNKNOWN_IDS], facts[UNKNOWN_LINES]) == (1, 2)
    make(bundle, tmp_path, path, said=said.append)
    assert said == [
        "client 0: "
        + said[0].removeprefix("client 0: ").partition(";")[0]
        + "; 1 items that the catalogue lacks, 2 interactions with them, which wait"
    ]


def test_hashed_ids_need_no_catalogue(tmp_path: Path) -> None:
    options = {**SEQUENCES, "ids": "hash", "buckets": 512}
    packed = deploy(None, plan_of(**options), clients=CLIENTS)
    assert packed.catalogue is None and packed.plan.table("items").rows == 512
    make(packed, tmp_path, own_file(tmp_path, 0))


# --- what is refused ------------------------------------------------------------------------------


def make(
    bundle: Bundle,
    folder: Path,
    path: Path | str,
    *,
    client: int = 0,
    as_of: str | None = None,
    said: Callable[[str], None] = lambda _: None,
) -> Journal:
    """What `join` does before it says a word to anybody."""
    entropy = ScriptedEntropy(b"own files")
    where = sources(str(path), as_of, several=False, said=said)
    maker = own_maker(bundle, task_function(bundle, None), where, entropy)
    journal = Journal.open(folder / "state", owner="client", plan=bundle.digest)
    try:
        maker(journal, ClientId(client))
    finally:
        journal.close()
    return journal


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sku,when\ni1,1700000000\n", "no column 'item'"),
        ("item,date\ni1,1700000000\n", "no column 'when'"),
        ("item,when\n", "no line below it"),
        ("", "empty"),
        ("item,when\nx1,1700000000\n", "no line of it counts"),
        ("user,item,when\na,i1,1700000000\nb,i2,1700000001\n", "lines of 2 in the column 'user'"),
    ],
    ids=["no item", "no time", "no lines", "empty", "unknown alone", "several users"],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, bundle: Bundle, text: str, reason: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as refused:
        make(bundle, tmp_path, path)
    assert refused.value.hint


def test_without_times_in_groups_takes_the_owners_word(tmp_path: Path) -> None:
    options = {k: v for k, v in SEQUENCES.items() if k != "time"}
    bundle = deploy(
        None, plan_of(**options, any_order=True), items=listed(tmp_path), clients=CLIENTS
    )
    path = tmp_path / "mine.csv"
    path.write_text("item\ni1\ni2\ni3\n")
    with pytest.raises(ConfigError, match="no times") as refused:
        make(bundle, tmp_path, path)
    assert "--as-of" in (refused.value.hint or "")
    make(bundle, tmp_path, path, as_of="2026-01-31")
    with pytest.raises(ConfigError, match="not a date"):
        make(bundle, tmp_path, path, as_of="yesterday")
    own = OwnInteractions(
        clients=1, catalogue=bundle.catalogue, source=path, as_of=moment_of("2026-01-31")
    )
    timeline = own_task("sequences", bundle.plan.task.options, own).data.timeline
    assert timeline is not None and len(timeline.up_to(moment_of("2026-01-31")).train) == 2
    with pytest.raises(ConfigError, match="no line of it counts"):
        timeline.up_to(moment_of("2026-01-30"))


def test_lines_after_the_cut_off_wait_and_other_changes_are_refused(
    tmp_path: Path, bundle: Bundle
) -> None:
    path = own_file(tmp_path, 0)
    cutoff = FIRST + 60 * 8
    make(bundle, tmp_path, path)
    begin(bundle, tmp_path, path, cutoff)
    make(bundle, tmp_path, path)  # as it was
    own_file(tmp_path, 0, [f"i3,{FIRST + 10**6}"])
    make(bundle, tmp_path, path)  # later lines
    text = path.read_text().splitlines()
    unseen = next(f"i{at}" for at in range(ITEMS) if not any(f"i{at}," in one for one in text))
    for changed in (
        text[:1] + text[2:],
        [*text, f"{unseen},{cutoff - 1}"],
        [text[0], *text[2:], text[1]],
    ):
        path.write_text("\n".join(changed) + "\n")
        if sorted(changed) == sorted(text):
            make(bundle, tmp_path, path)  # the same lines in another order
            continue
        with pytest.raises(ConfigError, match="not those that its period began with"):
            make(bundle, tmp_path, path)


def begin(bundle: Bundle, folder: Path, path: Path, cutoff: int) -> None:
    """The client's period, as its first visit does."""
    entropy = ScriptedEntropy(b"own files")
    where = sources(str(path), None, several=False, said=lambda _: None)
    maker = own_maker(bundle, task_function(bundle, None), where, entropy)
    with Journal.open(folder / "state", owner="client", plan=bundle.digest) as journal:
        local, _ = maker(journal, ClientId(0))
        from tessera.privacy.dp.ledger import Ledger
        from tessera.privacy.index.period import MemoryPeriods

        data = local(MemoryPeriods(), Ledger()).data
        assert data is not None
        with journal.step():
            data.up_to(cutoff)
        stored = JournalExamples(journal, name_of(ClientId(0))).cutoff
        assert stored is not None and stored[0] == cutoff


# --- a catalogue ----------------------------------------------------------------------------------


def test_a_catalogue_only_grows(tmp_path: Path) -> None:
    first = catalogue.read(listed(tmp_path), popularity="sold", category="kind", room=3)
    more = ItemCatalogue(ids=("i1", "n1", "n2"), titles=("other", "New one", ""))
    grown = first.grown(more)
    assert grown.rows == first.rows == ITEMS + 3 and grown.room == 1
    assert grown.ids[:ITEMS] == first.ids and grown.ids[ITEMS:] == ("n1", "n2")
    assert grown.title(1) == "Title 1" and grown.title(ITEMS) == "New one"
    assert grown.extends(first) and not first.extends(grown)
    assert ItemCatalogue.from_json(grown.to_json()) == grown
    assert grown.digest != first.digest
    with pytest.raises(ConfigError, match="room for 1"):
        grown.grown(ItemCatalogue(ids=("n3", "n4")))
    assert first.weights is not None and first.weights[-3:].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("item\na\na\n", "a second time"),
        ("id\na\n", "no column 'item'"),
        ("item\n", "no line below it"),
    ],
)
def test_a_catalogue_that_is_none(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "items.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        deploy(None, plan_of(), items=path, clients=CLIENTS)


def test_a_bundle_for_own_data_needs_a_catalogue_or_a_hash() -> None:
    with pytest.raises(ConfigError, match="no catalogue"):
        deploy(None, plan_of(), clients=CLIENTS)


def test_nothing_of_whoever_packs_is_in_the_bundle(tmp_path: Path) -> None:
    options = {**SEQUENCES, "path": str(tmp_path / "central.csv"), "dictionary": "ids.txt"}
    packed = deploy(None, plan_of(**options), items=listed(tmp_path), clients=CLIENTS)
    assert not {"path", "dictionary"} & packed.plan.task.options.keys()
    packed.write(tmp_path / "bundle.npz")
    assert Bundle.read(tmp_path / "bundle.npz").digest == packed.digest
    again = deploy(None, plan_of(**options), items=listed(tmp_path), clients=CLIENTS)
    assert again.digest == packed.digest, "whoever packs the same has the same digest"


# --- code -----------------------------------------------------------------------------------------

CODE = """
from pathlib import Path
Path("imported").touch()
from tessera.tasks.own import own_task
OPTIONS = {"time": "when", "model": "next", "history": 6, "negatives": 10, "width": 4}
def task(own):
    return own_task("sequences", OPTIONS, own)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "ownshop").mkdir()
    (tmp_path / "ownshop" / "__init__.py").write_text("")
    (tmp_path / "ownshop" / "model.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    return "ownshop.model:task"


def test_code_is_found_and_compared_before_anything_is_imported(
    tmp_path: Path, package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('scheme = "secure-submodel"\ncohort = 4\n[groups]\nsize = 4\nsmall = true\n')
    pack = ["pack", str(plan), "--items", str(listed(tmp_path)), "--clients", "4"]
    assert main([*pack, "--task", package]) == 0
    assert main(["keys", "bundle.npz", "--insecure-test-entropy", "x"]) == 0
    for name in [name for name in sys.modules if name.partition(".")[0] == "ownshop"]:
        del sys.modules[name]
    (tmp_path / "imported").unlink()
    own_file(tmp_path, 0)
    join = ["join", "bundle.npz", "https://127.0.0.1:1", "--keys", "keys/client-0", "--client", "0"]
    join += ["--state", "state", "--home", "home", "--interactions", "client-0.csv"]

    def refused(*more: str, why: str) -> None:
        capsys.readouterr()
        assert main([*join, *more]) == 2
        found = capsys.readouterr().err
        assert why in found and "hint: " in found, found
        assert not (tmp_path / "imported").exists(), "something was imported"
        assert "ownshop.model" not in sys.modules

    refused(why="nobody here has agreed")
    refused("--task", "ownshop.model:other", why="packed with ownshop.model:task")
    refused("--task", "os:system", why="packed with ownshop.model:task")
    refused("--task", "not a name", why="packed with")
    beside = tmp_path / "ownshop" / "more.py"
    beside.write_text("")  # any file of the package counts
    refused("--task", package, why="its code here is")
    beside.unlink()
    (tmp_path / "ownshop" / "model.py").write_text(CODE + "\n")
    refused("--task", package, why="its code here is")
    (tmp_path / "ownshop" / "model.py").write_text(CODE)
    assert NamedCode.find(package) == Bundle.read(tmp_path / "bundle.npz").code
    assert not (tmp_path / "imported").exists()


def test_a_function_that_nobody_can_import_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot import by name"):
        deploy(lambda own: own, plan_of(), items=listed(tmp_path))  # type: ignore[arg-type,return-value]


def test_interactions_where_there_are_none_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    deploy(None, plan_of(), items=listed(tmp_path), clients=CLIENTS, out="bundle.npz")
    assert main(["keys", "bundle.npz", "--insecure-test-entropy", "x"]) == 0
    join = ["join", "bundle.npz", "https://127.0.0.1:1", "--keys", "keys/client-0", "--client", "0"]
    join += ["--state", "state"]
    for more, why in (
        ([], "none are named"),
        (["--interactions", "nowhere.csv"], "no such file"),
        (["--interactions", "nowhere:function"], "no module 'nowhere'"),
        (["--interactions", "catalogue.csv", "--task", "a:b"], "one of ours"),
    ):
        assert main([*join, *more]) == 2
        assert why in capsys.readouterr().err
