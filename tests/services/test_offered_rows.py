"""A row is offered to one group in its client's life, whatever a federation is called.

Through services: packed plans over a file of eight people in one user account, in groups of four.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from services.group_lab import Visits
from services.service_lab import Killed, Lab
from services.tap import Tap
from tessera.cli.main import main
from tessera.crypto.entropy import ScriptedEntropy
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.data.row_names import OwnNames, RowNames
from tessera.errors import ConfigError
from tessera.ids import SERVER, ClientId, TableId
from tessera.plan import Plan
from tessera.privacy.index.period import AnotherGroup, FrozenPeriod, MemoryPeriods, freeze
from tessera.rounds.noise import noise_of
from tessera.services.account_store import default_home
from tessera.services.bundle import pack_synthetic, pack_task
from tessera.services.charged_trainings import OwnBudget
from tessera.services.deployment import Account, open_clients, open_leader, synthetic_maker
from tessera.services.journal import Moment
from tessera.services.keyring import Keyring, folder_of, make_keys
from tessera.services.offered_rows import (
    NAME,
    ExactSum,
    OfferedRows,
    OneGroup,
)
from tessera.services.task_clients import task_maker

PEOPLE, ITEMS, SCRIPT = 8, 30, b"one group for life"

PLAN = """
scheme = "secure-submodel"
cohort = 8
federation = "{federation}"
seed = {seed}
[privacy]
{privacy}
[task]
name = "interactions"
path = "{path}"
item = "{item}"
label = "liked"
size = "tiny"
width = 2
"""


def shop(path: Path, first: int = 0) -> Path:
    """A file of eight people, each with six items and one that nobody else has."""
    rng = np.random.default_rng(1)
    lines = ["user,item,shelf,liked"]
    for person in range(PEOPLE):
        for item in [*rng.choice(ITEMS, 6, replace=False), 100 + person]:
            lines.append(f"p{person},i{first + item},s{item % 7},{rng.integers(2)}")
    path.write_text("\n".join(lines) + "\n")
    return path


class OtherBeacon(ScriptedEntropy):
    """The same keys for everybody, and another draw of the groups."""

    def secret(self, label: str, *context: int | bytes | str, size: int = 32) -> Secret:
        again = ("again",) if label == Label.BEACON_SECRET else ()
        return super().secret(label, *context, *again, size=size)


class Deployed(Visits, Lab):
    """A packed plan, its leader and all its clients, over states and a user account of their own.

    Keys follow from a script and the federation's name, so that a leader may keep them and change
    all else.
    """

    text = PLAN

    def __init__(
        self,
        folder: Path,
        data: Path,
        *,
        federation: str = "first",
        seed: int = 3,
        drawn_from: type[ScriptedEntropy] = ScriptedEntropy,
        item: str = "item",
        privacy: str = 'level = "groups"\n[groups]\nsize = 4\nsmall = true',
        accepted: bool = False,
        budget: OwnBudget | None = None,
    ) -> None:
        names = {"federation": federation, "path": data, "item": item, "privacy": privacy}
        text = self.text.format(seed=seed, **names)
        self.folder, self.data, self.accepted = folder, data, accepted
        folder.mkdir(exist_ok=True)
        self.bundle = pack_task(Plan.parse(text), None)
        if not (folder / "keys").exists():
            self.bundle.write(folder / "bundle.npz")
            everybody = [ClientId(c) for c in range(PEOPLE)]
            entropy = drawn_from(SCRIPT)
            plan, names = self.bundle.plan, ["localhost"]
            make_keys(
                folder / "keys",
                self.bundle.digest,
                federation,
                everybody,
                entropy,
                names,
                group=plan.group_size if plan.grouped else 0,
            )
        self.tap, self.parties = Tap(), {}
        self.two = None
        self.plan = self.bundle.plan
        self.sent = {}
        keys, entropy = folder / "keys", ScriptedEntropy(SCRIPT)
        self.cohort = [ClientId(c) for c in range(PEOPLE)]
        rings = [Keyring.read(keys / folder_of(c), c, self.bundle.digest) for c in self.cohort]
        services = open_clients(
            self.bundle,
            rings,
            folder / "clients",
            entropy,
            task_maker(self.bundle, None, entropy),
            Account(accepts_identification=accepted, budget=budget),
        )
        for client, service in zip(self.cohort, services, strict=True):
            self.parties[client] = service
        self.parties[SERVER] = open_leader(
            self.bundle, keys / "leader", folder / "leader", ScriptedEntropy(SCRIPT)
        )

    def _turn(self, rounds: int) -> bool | None:
        """Each client of a group sends one message."""
        if not self.plan.grouped:
            return super()._turn(rounds)
        if self.leader.next_round >= rounds:
            return None
        for client in self.cohort:
            self.visit(client, once=True)
        return True

    @property
    def clients(self):
        return self.parties[ClientId(0)].journal

    def close(self) -> None:
        self.leader.journal.close()
        self.clients.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def trained(deployed: Deployed) -> int:
    """Clients that were in the sums of all rounds so far."""
    rows = deployed.leader.journal.database.execute("SELECT data FROM event ORDER BY number")
    return sum('"survivors":8' in row.replace(" ", "") for (row,) in rows)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that a first federation leaves on disk after a round, the account's home too."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        with Deployed(folder / "first", shop(folder / "shop.csv")) as lab:
            lab.run(1)
            assert trained(lab) == 1
    return folder


@pytest.fixture
def data(begun: Path) -> Path:
    return begun / "shop.csv"


@pytest.fixture
def first(begun: Path, tmp_path: Path) -> Path:
    """A federation of eight people of one account in two groups, after its first round."""
    shutil.copytree(begun / "state" / "tessera", default_home())
    shutil.copytree(begun / "first", tmp_path / "first")
    return tmp_path / "first"


def test_another_federation_over_the_same_rows_is_refused_before_anything_is_sent(
    first: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AnotherGroup, match="6 of its 6 rows were offered in federation 'first'"):
        Deployed(tmp_path / "second", data, federation="second")
    state = tmp_path / "second" / "clients"
    line = ["join", str(tmp_path / "second" / "bundle.npz"), "https://127.0.0.1:1"]
    line += ["--keys", str(tmp_path / "second" / "keys" / "client-2"), "--client", "2"]
    assert main([*line, "--state", str(tmp_path / "other")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: client 2: 6 of its 6 rows were offered in federation 'first'")
    assert "hint: " in told and "--accept-identification" in told and "B = 1" in told
    assert state.exists()  # opened, and nothing of a round is in it


def test_its_own_federation_goes_on_after_a_restart(first: Path, data: Path) -> None:
    with Deployed(first, data) as lab:
        lab.run(2)
        assert trained(lab) == 2


def test_a_crash_between_store_and_send_does_not_cost_the_group(tmp_path: Path, data: Path) -> None:
    """The store has the group, the journal does not, and nothing was sent."""

    def kill(moment: Moment) -> None:
        path = default_home() / NAME
        if moment is Moment.BEFORE_COMMIT and path.exists() and _offered(path):
            raise Killed(SERVER)

    lab = Deployed(tmp_path / "first", data)
    lab.clients.watch = kill
    with pytest.raises(Killed):
        for _ in range(20):
            lab._turn(1)
    lab.close()
    assert _offered(default_home() / NAME)
    with Deployed(tmp_path / "first", data) as again:
        again.run(1)
        assert trained(again) == 1


def _offered(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("SELECT COUNT(*) FROM offered_row").fetchone()[0])


def test_another_group_of_the_same_federation_is_left_before_a_row_is_offered(
    first: Path, data: Path, tmp_path: Path
) -> None:
    """The same name and the same keys, a fresh state, and another draw: other members."""
    with pytest.raises(AnotherGroup, match="6 of its 6 rows were offered in federation 'first'"):
        Deployed(tmp_path / "again", data, drawn_from=OtherBeacon)


@pytest.mark.slow
def test_who_accepts_the_price_takes_part_and_goes_on_in_both(
    first: Path, data: Path, tmp_path: Path
) -> None:
    with Deployed(tmp_path / "second", data, federation="second", accepted=True) as lab:
        price = lab.parties[ClientId(0)].local.periods.price
        assert "6 of its 6 rows" in price and price.endswith("accepted: B = 1 for them")
        lab.run(1)
        assert trained(lab) == 1
    for folder, name in (("second", "second"), ("first", "first")):
        with Deployed(tmp_path / folder, data, federation=name) as lab:
            lab.run(2)
            assert trained(lab) == 2
    with pytest.raises(AnotherGroup):
        Deployed(tmp_path / "third", data, federation="third")


def test_new_rows_of_the_same_people_are_welcome_elsewhere(first: Path, tmp_path: Path) -> None:
    """Another file with the same columns: its rows are told by their names."""
    new = shop(tmp_path / "later.csv", first=1000)
    with Deployed(tmp_path / "second", new, federation="second") as lab:
        lab.run(1)
        assert trained(lab) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 9}, "6 of its 6 rows"),  # other keys would be those of another name
        ({"privacy": 'level = "cpp5"'}, "6 of its 6 rows"),  # no groups at all
        ({"item": "shelf"}, "rows named in another way"),
    ],
)
def test_nothing_that_the_leader_chooses_makes_rows_new(
    first: Path, data: Path, tmp_path: Path, change: dict[str, object], why: str
) -> None:
    with pytest.raises(AnotherGroup, match=why):
        Deployed(tmp_path / "second", data, federation="second", **change)


def test_the_path_of_the_file_does_not_make_rows_new(first: Path, tmp_path: Path) -> None:
    copied = shop(tmp_path / "elsewhere.csv")
    with pytest.raises(AnotherGroup, match="6 of its 6 rows"):
        Deployed(tmp_path / "second", copied, federation="second")


@pytest.mark.slow
def test_rows_of_a_sum_without_groups_are_not_hidden_by_a_group_later(
    tmp_path: Path, data: Path
) -> None:
    for name in ("open", "another"):  # neither promises anything that the other breaks
        with Deployed(tmp_path / name, data, federation=name, privacy='level = "cpp5"') as lab:
            lab.run(1)
            assert trained(lab) == 1
    with pytest.raises(AnotherGroup, match="6 of its 6 rows were offered in federation 'open'"):
        Deployed(tmp_path / "first", data)


def test_nothing_is_kept_of_a_federation_that_was_never_reached(tmp_path: Path, data: Path) -> None:
    for privacy in ('level = "cpp5"', 'level = "groups"\n[groups]\nsize = 4\nsmall = true'):
        Deployed(tmp_path / privacy[9:12], data, federation="never", privacy=privacy).close()
    assert not _offered(default_home() / NAME)


def test_made_up_clients_have_no_rows_of_their_own(tmp_path: Path) -> None:
    bundle = pack_synthetic(
        Plan.parse(
            'scheme = "secure-submodel"\ncohort = 10\nfederation = "made up"\n'
            '[model]\ndense = 4\n[[table]]\nname = "items"\nrows = 50\nwidth = 2\n'
            "[groups]\nsmall = true\n"
        ),
        10,
        5,
    )
    everybody, entropy = [ClientId(c) for c in range(10)], ScriptedEntropy(SCRIPT)
    keys, names = tmp_path / "keys", ["localhost"]
    make_keys(keys, bundle.digest, "made up", everybody, entropy, names, group=10)
    rings = [Keyring.read(tmp_path / "keys" / folder_of(c), c, bundle.digest) for c in everybody]
    made = open_clients(bundle, rings, tmp_path / "state", entropy, synthetic_maker(bundle))
    made[0].journal.close()
    assert not default_home().exists()


# --- the store ------------------------------------------------------------------------------------


def named(person: str = "me", source: str = "here", **more) -> OwnNames:
    return OwnNames(person=person, source=source, naming="n", kinds={"goods": "item"}, **more)


def rows(*ids: int) -> dict[str, np.ndarray]:
    return {"goods": np.array(ids, dtype=np.uint64)}


def group(name: str = "a", members: bytes = b"123") -> ExactSum:
    return ExactSum(name, name.encode(), members, fixed=True)


def test_the_store_is_its_owners_and_has_no_name_of_a_row(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "home"
    store = OfferedRows(home)
    secret = named(names={"item": RowNames(["a rare disease"])})
    store.record(store.offer(secret, rows(0)), group(), accepted=False)
    assert stat.S_IMODE(os.stat(home).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(home / NAME).st_mode) == 0o600
    assert b"rare disease" not in (home / NAME).read_bytes()
    other = OfferedRows(tmp_path / "another")
    assert store.offer(secret, rows(0)) != other.offer(secret, rows(0))  # keys of their own
    assert store.offer(secret, rows(0)) == OfferedRows(home).offer(secret, rows(0))


def test_a_row_is_told_by_its_name_and_not_by_its_place(tmp_path: Path) -> None:
    store = OfferedRows(tmp_path)
    one, two = RowNames(["tea", "milk"]), RowNames(["milk", "tea", "salt"])
    tea = store.offer(named(names={"item": one}), rows(0))
    assert tea.rows == store.offer(named(names={"item": two}), rows(1)).rows
    assert tea.rows != store.offer(named("you", names={"item": one}), rows(0)).rows
    # Several ids in one row of hashed ids are all offered with it.
    hashed = RowNames(["milk", "tea", "salt"], np.array([5, 9, 5]))
    assert not tea.rows & store.offer(named(names={"item": hashed}), rows(5)).rows
    assert tea.rows < store.offer(named(names={"item": hashed}), rows(5, 9)).rows
    unnamed = store.offer(named(names={"item": one}), rows(0, 7))
    assert tea.rows < unnamed.rows and len(unnamed.rows) == 2


def test_of_two_processes_at_once_one_has_the_rows(tmp_path: Path) -> None:
    def take(number: int) -> bool:
        store = OfferedRows(tmp_path)  # its own connection, as another process has
        try:
            store.record(
                store.offer(named(), rows(1, 2, number)), group(f"f{number}"), accepted=False
            )
        except AnotherGroup:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(3, 35))) == 1

    def keep(number: int) -> None:
        store = OfferedRows(tmp_path)
        store.record(store.offer(named(f"p{number}"), rows(number)), group(), accepted=False)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(keep, range(32)))
    assert _offered(tmp_path / NAME) == 3 + 32


def test_a_refused_offer_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    store = OfferedRows(tmp_path)
    store.record(store.offer(named(), rows(1)), group("a"), accepted=False)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(AnotherGroup):
        store.record(store.offer(named(), rows(1, 2)), group("b"), accepted=False)
    assert _offered(tmp_path / NAME) == 1
    assert (tmp_path / NAME).read_bytes() == before


def test_sums_with_noise_alone_are_no_matter_of_the_store(tmp_path: Path) -> None:
    text = (
        'scheme = "secure-fedavg"\ncohort = 4\nfederation = "noisy"\n[model]\ndense = 4\n'
        '[[table]]\nname = "goods"\nrows = 50\nwidth = 2\n'
        '[dp]\nunit = "user"\nepsilon = 1.0\ndelta = 1e-5\ntrust = "shares"\nnoise = 2.0\n'
    )
    noisy = Plan.parse(text)
    assert not noise_of(noisy).opens_exactly
    exact = Plan.parse(text.partition("[dp]")[0])
    assert noise_of(exact).opens_exactly
    store, keys = OfferedRows(tmp_path), {ClientId(0): b"0"}
    store.record(store.offer(named(), rows(1)), group("a"), accepted=False)
    guarded = {
        plan.digest: OneGroup(MemoryPeriods(), store, plan, ClientId(0), named(), directory=keys)
        for plan in (noisy, exact)
    }
    guarded[noisy.digest].check(rows(1))
    guarded[noisy.digest].begin_round(rows(1))
    for call in (guarded[exact.digest].check, guarded[exact.digest].begin_round):
        with pytest.raises(AnotherGroup):
            call(rows(1))


def test_a_new_row_of_a_later_period_that_has_met_others_is_left_out(tmp_path: Path) -> None:
    """In the first period the client refuses; later it stays, also after a restart."""
    plan = Plan.parse(
        'scheme = "secure-submodel"\ncohort = 4\nfederation = "f"\n[model]\ndense = 4\n'
        '[[table]]\nname = "goods"\nrows = 50\nwidth = 2\n[groups]\nsize = 4\nsmall = true\n'
    )
    store, keys = OfferedRows(tmp_path), {ClientId(c): b"%d" % c for c in range(4)}
    store.record(store.offer(named(), rows(7)), group("other"), accepted=False)
    periods = MemoryPeriods()

    def started() -> OneGroup:
        return OneGroup(
            periods, store, plan, ClientId(0), named(), directory=keys, members=(0, 1, 2, 3)
        )

    def period(number: int, *ids: int) -> FrozenPeriod:
        return freeze(
            started(),
            federation="f",
            period=number,
            privacy=plan.privacy.index,
            real={TableId(0): rows(*ids)["goods"]},
            entropy=ScriptedEntropy(b"s"),
        )

    with pytest.raises(AnotherGroup):
        period(1, 1, 2, 7)
    period(1, 1, 2)
    for _ in range(2):  # a union that did not decode is asked for again
        (found,) = period(2, 1, 2, 5, 7).tables
        assert found.offered.tolist() == [1, 2, 5] and found.left_out.tolist() == [7]
    started().check(rows(1, 2, 5, 7))
    assert store.flaw(store.offer(named(), rows(5)), group("third")), "it has this group now"
    assert not store.flaw(store.offer(named(), rows(7)), group("other")), "and this one its own"


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the rows that this account has offered") as found:
        OfferedRows(tmp_path / "file" / "home")
    assert "--home" in str(found.value.hint)
    (tmp_path / NAME).write_bytes(b"something else, and long enough to be no database at all")
    with pytest.raises(ConfigError, match="cannot"):
        OfferedRows(tmp_path)
