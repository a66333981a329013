"""What a number per person takes for granted, broken in turn: each is refused before training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runs.test_noise_per_person import PERSON, planned, shops, task
from tessera import tasks
from tessera.crypto.entropy import RootedEntropy
from tessera.data.examples import SUBJECT
from tessera.errors import ConfigError
from tessera.plan import DPPlan, Unknown
from tessera.privacy.dp.accounting import check_people, delta_flaw
from tessera.privacy.dp.noise_setting import Drawn
from tessera.rounds.noise import noise_of
from tessera.runs.training import Training, complete
from tessera.services.bundle import pack_task
from tessera.services.task_clients import task_maker


def started(section: DPPlan, subject: np.ndarray | None = None) -> Training:
    data = shops()
    if subject is not None:
        data = replace(data, train=data.train.with_field(SUBJECT, subject))
    whole = task(data)
    return Training(whole, complete(planned(section), whole))


def unnamed() -> np.ndarray:
    """A whole person at a time: its row then stays that of one."""
    subject = shops().train[SUBJECT]
    return np.where(subject < 3, -1, subject)


def test_records_without_a_subject_are_refused() -> None:
    with pytest.raises(ConfigError, match="name no subject") as found:
        started(PERSON, unnamed())
    assert "one-subject" in (found.value.hint or "")


def test_or_all_of_them_are_one_person_who_is_then_at_more_clients() -> None:
    section = replace(PERSON, unknown=Unknown.ONE_SUBJECT)
    with pytest.raises(ConfigError, match="1 people are at more than the 2 clients"):
        started(section, unnamed())
    with started(replace(section, clients_per_subject=3), unnamed()) as run:
        list(run.run(1))
        assert len(np.unique(run.task.data.train[SUBJECT])) == 18  # of twenty, three are one


def test_people_at_more_clients_than_the_plan_says_are_counted_and_refused() -> None:
    with pytest.raises(ConfigError, match="20 people are at more than the 1 clients") as found:
        started(replace(PERSON, clients_per_subject=1))
    assert "clients per subject = 2" in (found.value.hint or "")


def test_a_person_over_the_records_that_are_claimed_is_counted_and_refused() -> None:
    drawn = replace(PERSON, drawn=Drawn.RECORDS, cap=2, records_per_subject=4, sampling=0.5)
    with pytest.raises(ConfigError, match="more than the 4 records at a client") as found:
        started(drawn)
    assert "draw subjects" in (found.value.hint or "")
    started(replace(drawn, records_per_subject=30)).close()
    started(replace(PERSON, records_per_subject=4)).close()  # drawing people needs no such bound


def test_a_delta_that_one_person_could_have_alone_is_named_with_its_rule() -> None:
    people = shops().subjects
    assert "one over 20 people" in delta_flaw(1.0 / people, people)
    assert delta_flaw(0.9 / people, people) == ""
    with pytest.raises(ConfigError, match="one over 20 people") as refused:
        check_people(1.0 / people, people)
    assert "5e-03" in (refused.value.hint or "")
    with pytest.raises(ConfigError, match="one over 20 people"):
        started(replace(PERSON, delta=0.06)).close()


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_each_client_of_a_person_is_charged_against_every_observer(clients: int) -> None:
    """Noise by each client itself: c clients compose as c times the releases of one."""
    plan = complete(planned(replace(PERSON, clients_per_subject=clients, noise=5.0)), task())
    once = complete(planned(replace(PERSON, clients_per_subject=1, noise=5.0)), task())
    setting, every = noise_of(plan).setting, replace(noise_of(once).setting, correlation=None)
    for observer in setting.sight.observers:
        kept = setting.ledger(4).guarantee(unit=setting.unit, against=observer, delta=1e-6)
        times = setting.releases(4) * clients
        same = every.ledger(times).guarantee(unit=setting.unit, against=observer, delta=1e-6)
        assert kept.epsilon == pytest.approx(same.epsilon, rel=1e-6)
        assert (f"at most {clients} clients" if clients > 1 else "if one client") in kept.scope


# --- services -------------------------------------------------------------------------------------


def made(monkeypatch: pytest.MonkeyPatch, section: DPPlan, subject: np.ndarray | None = None):  # type: ignore[no-untyped-def]
    """Clients of a packed plan, as `tessera join` makes them of the data at hand."""
    data = shops()
    if subject is not None:
        data = replace(data, train=data.train.with_field(SUBJECT, subject))
    # A rating task has a set-up sum, which is not deployed: without it, items alone.
    whole = replace(task(data), setup=None)
    monkeypatch.setattr(tasks, "load", lambda name, **_: whole)
    bundle = pack_task(planned(section), None)
    return task_maker(bundle, None, RootedEntropy.fresh())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (replace(PERSON, clients_per_subject=1), "20 people are at more than the 1 clients"),
        (
            replace(PERSON, drawn=Drawn.RECORDS, cap=2, records_per_subject=4, sampling=0.5),
            "more than the 4 records at a client",
        ),
    ],
)
def test_services_refuse_people_beyond_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, section: DPPlan, message: str
) -> None:
    """Before any client is made, let alone dials; and with bounds that hold they are made."""
    with pytest.raises(ConfigError, match=message):
        made(monkeypatch, section)
    assert callable(made(monkeypatch, replace(section, clients_per_subject=2, drawn=PERSON.drawn)))


def test_services_refuse_records_without_a_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="name no subject"):
        made(monkeypatch, PERSON, unnamed())
