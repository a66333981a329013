"""Trainings of one user account add up, whatever they are called and wherever their journals are.

Through services: packed plans with noise over a file of eight people in one user account.
"""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from services.service_lab import Killed
from services.test_offered_rows import Deployed, shop
from tessera.cli.main import main
from tessera.errors import ConfigError
from tessera.ids import SERVER, ClientId, RoundId
from tessera.privacy.dp.events import Bounds, ExactRelease, IndexAnswers, NoisySum
from tessera.privacy.dp.guarantee import Adjacency, Observer, Trust, Unit
from tessera.privacy.dp.ledger import BudgetExceeded, Entry, Ledger, Limit
from tessera.privacy.dp.mechanism import GaussianNoise, Unseen
from tessera.privacy.index.response import IndexPrivacy
from tessera.services.account_store import default_home
from tessera.services.charged_trainings import (
    NAME,
    AccountLedger,
    ChargedTrainings,
    OwnBudget,
    composed,
)
from tessera.services.journal import Moment

ROUNDS, NOISE, DELTA = 2, 4.0, 1e-5

PLAN = """
scheme = "secure-fedavg"
cohort = 8
federation = "{federation}"
seed = {seed}
[dp]
unit = "user"
trust = "server"
noise = 4.0
epsilon = 8.0
delta = 1e-5
{privacy}
[simulation]
rounds = 2
[task]
name = "interactions"
path = "{path}"
item = "{item}"
label = "liked"
size = "tiny"
width = 2
"""


class Noisy(Deployed):
    text = PLAN


def deployed(
    folder: Path, data: Path, name: str, budget: float = 0.0, *, correlated: bool = False
) -> Noisy:
    own = OwnBudget(budget, DELTA) if budget else None
    more = "correlated = true" if correlated else ""
    return Noisy(folder / name, data, federation=name, privacy=more, budget=own)


def gaussian(squares: float) -> float:
    """Epsilon of Gaussian releases whose mu^2 add up to this, by the formula."""
    mu = math.sqrt(squares)

    def left(epsilon: float) -> float:
        gone = norm.cdf(mu / 2 - epsilon / mu)
        return float(gone - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - DELTA)

    return float(brentq(left, 0.0, 50.0, xtol=1e-12))


ONE, TWO = gaussian(ROUNDS / NOISE**2), gaussian(2 * ROUNDS / NOISE**2)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that a first training leaves on disk, the account's home too."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        with deployed(folder, shop(folder / "shop.csv"), "first") as lab:
            lab.run(ROUNDS)
    return folder


@pytest.fixture
def data(begun: Path) -> Path:
    return begun / "shop.csv"


@pytest.fixture
def first(begun: Path, tmp_path: Path) -> Path:
    """A training that is over, in this test's account."""
    shutil.copytree(begun / "state" / "tessera", default_home())
    shutil.copytree(begun / "first", tmp_path / "first")
    return tmp_path / "first"


def charged(home: Path | None = None) -> list[tuple[str, str]]:
    """(training, event) of everybody."""
    with closing(sqlite3.connect((home or default_home()) / NAME)) as database:
        return database.execute(
            "SELECT name, event FROM charge JOIN training ON training.id = training"
        ).fetchall()


def spent_by(lab: Noisy, client: int = 0) -> float:
    """Over all trainings, of one client's person."""
    local = lab.parties[ClientId(client)].local
    assert isinstance(local.ledger, AccountLedger)
    store, training = local.ledger._store, local.ledger._training
    with store._transaction() as database:
        (person,) = database.execute(
            "SELECT person FROM training WHERE digest = ?", (training.digest,)
        ).fetchone()
        assert person == training.person
    every = store.spent_with(lab.clients.fact(f"client {client}", "ledger"))
    found = composed(every).guarantee(unit=Unit.USER, against=Observer.READERS, delta=DELTA)
    return found.epsilon


def test_two_trainings_with_journals_of_their_own_add_up(
    first: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert TWO > 1.4 * ONE
    with deployed(tmp_path, data, "first", 1.01 * ONE) as lab:
        assert spent_by(lab) == pytest.approx(ONE, rel=1e-6)
    before = charged()
    assert len(before) == 8 * ROUNDS
    with pytest.raises(BudgetExceeded, match=r"over 2 trainings .*first, second") as refused:
        deployed(tmp_path, data, "second", 0.99 * TWO)
    assert f"reach epsilon {TWO:.4g}" in str(refused.value)
    assert refused.value.hint and "--budget-epsilon" in refused.value.hint
    assert charged() == before  # refused before the first message: nothing was charged or sent
    with deployed(tmp_path, data, "second", 1.01 * TWO) as lab:
        lab.run(ROUNDS)
        assert spent_by(lab) == pytest.approx(TWO, rel=1e-6)
        own = lab.parties[ClientId(0)].local.ledger
        alone = own.guarantee(unit=Unit.USER, against=Observer.READERS, delta=DELTA)
        assert alone.epsilon == pytest.approx(ONE, rel=1e-6)  # its plan's budget is its own
    assert len(charged()) == 2 * len(before)
    assert main(["status", str(tmp_path / "second" / "clients"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["clients"]["client 3"]
    assert shown["account"]["trainings"] == 2
    (number,) = shown["account"]["spent"]
    assert (number["unit"], number["delta"]) == ("user", 1e-6)
    assert number["epsilon"] > shown["spent"][0]["epsilon"] > ONE
    assert main(["status", str(tmp_path / "second" / "clients")]) == 0
    told = capsys.readouterr().out
    assert "over all 2 trainings of this account: 4 charges, epsilon" in told
    assert "per user at delta 1e-06" in told


def test_without_the_account_a_second_training_passes(
    first: Path, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: another name and another folder of state, and nobody adds up."""
    with pytest.raises(BudgetExceeded):
        deployed(tmp_path, data, "second", 1.01 * ONE)
    for broken in ("removed", "not kept"):
        if broken == "removed":
            shutil.rmtree(default_home())
        else:
            monkeypatch.setattr("tessera.services.charged_trainings._charged", lambda *_: [])
        with deployed(tmp_path, data, f"second, {broken}", 1.01 * ONE) as lab:
            lab.run(1)


def test_a_journal_of_a_removed_home_is_entered_again(
    first: Path, tmp_path: Path, data: Path
) -> None:
    shutil.rmtree(default_home())
    with deployed(tmp_path, data, "first"):
        assert len(charged()) == 8 * ROUNDS
    with pytest.raises(BudgetExceeded):
        deployed(tmp_path, data, "second", 0.99 * TWO)


def test_a_correlated_training_is_charged_once_and_another_one_again(
    tmp_path: Path, data: Path
) -> None:
    with deployed(tmp_path, data, "first", correlated=True) as lab:
        lab.run(1)
        assert len(charged()) == 8
        once = spent_by(lab)
        (entry,) = lab.parties[ClientId(0)].local.ledger.entries
        (mechanism,) = {m for o, m in entry.event.seen if o is Observer.READERS}
        assert isinstance(mechanism, GaussianNoise)
        assert once == pytest.approx(gaussian(mechanism.noise**-2), rel=1e-6)
        lab.run(ROUNDS)
        assert len(charged()) == 8 and spent_by(lab) == once
    twice = gaussian(2 * mechanism.noise**-2)
    with pytest.raises(BudgetExceeded, match="over 2 trainings"):
        deployed(tmp_path, data, "second", 0.999 * twice, correlated=True)
    with deployed(tmp_path, data, "second", 1.001 * twice, correlated=True) as lab:
        lab.run(1)
        assert spent_by(lab) == pytest.approx(twice, rel=1e-6)


def test_the_same_bundle_from_a_new_journal_is_another_charge(
    first: Path, tmp_path: Path, data: Path
) -> None:
    for folder in ("clients", "leader"):
        shutil.rmtree(tmp_path / "first" / folder)
    with pytest.raises(BudgetExceeded, match=r"over 2 trainings .*first, first"):
        deployed(tmp_path, data, "first", 0.99 * TWO)


def test_a_crash_between_account_and_journal_is_charged_and_charged_once(
    tmp_path: Path, data: Path
) -> None:
    def kill(moment: Moment) -> None:
        if moment is Moment.BEFORE_COMMIT and (default_home() / NAME).exists() and charged():
            raise Killed(SERVER)

    lab = deployed(tmp_path, data, "first")
    lab.clients.watch = kill
    with pytest.raises(Killed):
        for _ in range(20):
            lab._turn(1)
    (count,) = lab.clients.database.execute("SELECT COUNT(*) FROM charge").fetchone()
    lab.close()
    assert count == 0 and len(charged()) == 1  # charged, and nothing was sent
    with deployed(tmp_path, data, "first", 1.01 * ONE) as again:
        again.run(ROUNDS)
        assert len(charged()) == 8 * ROUNDS
        assert spent_by(again) == pytest.approx(ONE, rel=1e-6)


def test_two_processes_that_began_together_do_not_pass_the_budget_together(
    tmp_path: Path, data: Path
) -> None:
    """Each had room for its whole training when it was started."""
    budget = gaussian(3 / NOISE**2) * 1.001
    with deployed(tmp_path, data, "a", budget) as one, deployed(tmp_path, data, "b", budget) as two:
        one.run(ROUNDS)
        two.run(1)
        client = two.parties[ClientId(0)]
        two.leader.open_round()
        two._exchange(ClientId(0))
        assert "own budget" in client.left and "over 2 trainings" in client.left
        assert spent_by(two) == pytest.approx(gaussian(3 / NOISE**2), rel=1e-6)


def test_a_budget_where_there_is_no_noise_is_refused(tmp_path: Path, data: Path) -> None:
    exact = PLAN.partition("[dp]")[0] + "[task]" + PLAN.partition("[task]")[2]

    class Exact(Deployed):
        text = exact

    with pytest.raises(ConfigError, match="adds no noise") as refused:
        Exact(tmp_path / "exact", data, budget=OwnBudget(3.0), privacy="")
    assert refused.value.hint
    Exact(tmp_path / "again", data, privacy="").close()
    assert not (default_home() / NAME).exists()


def test_join_takes_a_budget(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["join", str(tmp_path / "first" / "bundle.npz"), "https://127.0.0.1:1", "--client", "2"]
    line += ["--keys", str(tmp_path / "first" / "keys" / "client-2")]
    line += ["--state", str(tmp_path / "other")]
    budget = ["--budget-epsilon", f"{ONE:g}", "--budget-delta", "1e-5"]
    assert main([*line, *budget]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: 'first', all its rounds: privacy per user against")
    assert "hint: --budget-epsilon" in told
    for wrong in (["--budget-delta", "1e-5"], ["--budget-epsilon", "0"], [*budget[:3], "2"]):
        assert main([*line, *wrong]) == 2
        assert "hint: " in capsys.readouterr().err


# --- the account alone ----------------------------------------------------------------------------


def noisy(round_id: int, unit: Unit = Unit.USER, *unseen: Observer, noise: float = 2.0) -> NoisySum:
    trusted = () if unseen else (Observer.LEADER,)
    return NoisySum(
        federation="f",
        round_id=RoundId(round_id),
        what="noisy sums",
        unit=unit,
        adjacency=Adjacency.ZERO_OUT,
        trust=Trust.SERVER,
        seen=tuple(
            (by, Unseen() if by in unseen else GaussianNoise(noise))
            for by in Observer
            if by not in trusted
        ),
        summed=True,
    )


def account_ledger(home: Path, journal: bytes, epsilon: float = 0.0, **more: object) -> Ledger:
    store = ChargedTrainings(home)
    training = store.training("f", journal, "me", Bounds(rows_per_client=4))
    against = more.pop("against", Observer.READERS)
    limit = Limit(epsilon=epsilon, delta=DELTA, unit=Unit.USER, against=against)
    return AccountLedger(store, training, limits=(limit,) if epsilon else (), **more)


def test_an_event_is_charged_once_for_a_journal_and_again_from_another(tmp_path: Path) -> None:
    first = account_ledger(tmp_path, b"1")
    for number in range(2):
        first.spend(noisy(number), reason=f"round {number}")
    again = account_ledger(tmp_path, b"1", entries=first.entries[:1])  # its second was not stored
    assert len(charged(tmp_path)) == 2
    again.spend(noisy(1), reason="round 1")
    assert len(charged(tmp_path)) == 2
    account_ledger(tmp_path, b"2").spend(noisy(1), reason="round 1")
    assert len(charged(tmp_path)) == 3


def test_what_a_plan_or_the_account_refuses_is_in_neither(tmp_path: Path) -> None:
    low = Limit(epsilon=0.01, delta=DELTA, unit=Unit.USER, against=Observer.READERS)
    ledger = account_ledger(tmp_path, b"1", 0.01)
    for limits in ((low,), ()):
        with pytest.raises(BudgetExceeded):
            ledger.spend(noisy(0), reason="round 0", limits=limits)
        assert not ledger.entries and not charged(tmp_path)
    assert not account_ledger(tmp_path, b"1").affords([noisy(0)], (low,))
    assert account_ledger(tmp_path, b"1").affords([noisy(0)])
    assert not charged(tmp_path)


def test_somebody_without_a_part_in_a_training_may_read_its_model(tmp_path: Path) -> None:
    """The helper of a second training was none of the first."""
    account_ledger(tmp_path, b"1").spend(noisy(0, Unit.USER, Observer.HELPER), reason="round 0")
    budget = gaussian(2 / 2.0**2)
    second = account_ledger(tmp_path, b"2", 0.99 * budget, against=Observer.HELPER)
    with pytest.raises(BudgetExceeded, match=f"reach epsilon {budget:.4g}"):
        second.spend(noisy(0), reason="round 0")
    more = account_ledger(tmp_path, b"2", 1.01 * budget, against=Observer.HELPER)
    more.spend(noisy(0), reason="round 0")


def test_against_a_server_that_was_trusted_nothing_adds_up(tmp_path: Path) -> None:
    account_ledger(tmp_path, b"1").spend(noisy(0), reason="round 0")
    second = account_ledger(tmp_path, b"2", 99.0, against=Observer.LEADER)
    with pytest.raises(BudgetExceeded, match="epsilon inf"):
        second.spend(noisy(0, Unit.USER, Observer.HELPER), reason="round 0")


def test_units_are_not_mixed(tmp_path: Path) -> None:
    account_ledger(tmp_path, b"1").spend(noisy(0, Unit.ITEM), reason="round 0")
    with pytest.raises(BudgetExceeded, match="they have no sum") as refused:
        account_ledger(tmp_path, b"2", 99.0).spend(noisy(0), reason="round 0")
    assert refused.value.hint


def test_rounds_and_periods_of_two_trainings_under_one_name_are_different_ones(
    tmp_path: Path,
) -> None:
    privacy = IndexPrivacy(p1=0.9, p2=0.1, p3=1.0, p4=0.0)
    answers = IndexAnswers(federation="f", period=0, round_id=RoundId(0), privacy=privacy)
    exact = ExactRelease(federation="f", round_id=RoundId(0), what="the union")
    for journal in (b"1", b"2"):
        ledger = account_ledger(tmp_path, journal)
        for event in (exact, answers):
            ledger.spend(event, reason="round 0")
    found = composed(ChargedTrainings(tmp_path).spent_with(b"1"))
    alone = Ledger(entries=[Entry(event=answers, reason="")]).guarantee().epsilon
    assert found.guarantee().epsilon == pytest.approx(2 * alone)
    assert found.bounds.rows_per_client == 4
