"""The statement: every figure on it is in the plan, the ledger or the audit, and it is one page.

Numbers are parsed from what was written, and looked up in a pool that is made here from the files,
by other calls than the statement's own.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from runs import toy
from tessera.api import Run, simulate
from tessera.audit.suite import audited
from tessera.cli import main as cli
from tessera.cli.statement import of_run
from tessera.errors import ConfigError
from tessera.plan import CohortsPlan, DPPlan, GroupsPlan, Plan, TaskPlan
from tessera.privacy.index import exposure, known_rows
from tessera.report.statement import NUMBER, Quoted, Subject, quoted, statement_of, text_of
from tessera.report.statement_page import WIDTH, html, text
from tessera.rounds.noise import noise_of
from tessera.runs.folder import AUDIT, RunFolder

NOISE = {"unit": "user", "epsilon": 3.0, "delta": 1e-5}
PLANS = {
    "each of two servers": lambda: toy.plan(
        "two-server",
        dp=DPPlan(**NOISE, trust="each"),
        simulation={"rounds": 2, "evaluate_every": 1, "metrics": "federated"},
    ),
    "a trusted server": lambda: toy.plan(
        "fedavg", dp=DPPlan(**NOISE, trust="server"), simulation={"rounds": 2}
    ),
    "a schedule": lambda: toy.plan(
        "two-server",
        cohorts=CohortsPlan(drawn="schedule"),
        dp=DPPlan(**NOISE, trust="each", correlated=True),
        simulation={"rounds": 8},
    ),
    "groups": lambda: toy.plan(
        privacy={"level": "groups"}, groups=GroupsPlan(size=6), simulation={"rounds": 2}
    ),
    "answers": lambda: toy.plan(simulation={"rounds": 2}),
    "two servers": lambda: toy.plan("two-server", simulation={"rounds": 2}),
    "in the clear": lambda: toy.plan("submodel", simulation={"rounds": 2}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    """One of each kind; those that recorded views are audited, as `tessera audit` does it."""
    found = {}
    for name, plan in PLANS.items():
        out = tmp_path_factory.mktemp("run") / "run"
        watched = name != "a trusted server"
        found[name] = simulate(
            toy.task(), plan(), out=out, progress=False, record_views=watched, trainer="sequential"
        )
        if watched:
            RunFolder.load(out).keep(AUDIT, audited(out).as_json())
    return found


def page_of(run: Run, **more):
    return statement_of(replace(of_run(run.folder, exact=True), **more))


# --- where every figure is from -------------------------------------------------------------------


def forms(value: float | str) -> set[str]:
    """Ways in which a value of a source may be written on a page."""
    if isinstance(value, str):
        return {value}
    value = float(value)
    texts = {f"{value:g}", f"{value:.3g}", f"{value:.2f}", f"{value:.3f}", f"{value:,.0f}"}
    part = 100.0 * value
    texts |= {f"{part:.4g}%", f"{part:.1f}%", f"{part:.0f}%", f"{part:.1g}%"}
    if 0.0 < value < 0.005:  # "<0.01" and "<0.001%"
        texts |= {"0.01", "0.001%"}
    if 0.999 < value < 1.0:  # ">99.9%"
        texts.add("99.9%")
    return texts


def flat(value):
    if isinstance(value, dict):
        for one in value.values():
            yield from flat(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from flat(one)
    elif isinstance(value, bool) or value is None:
        return
    else:
        yield value


def pool_of(run: Run) -> set[str]:
    """Every number that the plan, the ledger, the audit or the log of this run have."""
    import tomllib

    log = RunFolder.load(run.folder)
    plan = Plan.read(run.folder / "plan.toml")
    values = [*flat(tomllib.loads((run.folder / "plan.toml").read_text()))]
    ended = [e for e in log.events() if e["event"] in ("RoundFinished", "RoundAbort")]
    values += [len(ended), log.facts["task"]["clients"]]
    if plan.dp is not None:
        noise = noise_of(plan)
        setting = noise.setting_with(setup=False)
        values += [noise.lasts, noise.in_the_sum, setting.tests]
        for rounds in {len(ended), plan.simulation.rounds}:
            for observer in setting.sight.observers:
                kept = setting.ledger(rounds).guarantee(
                    unit=plan.dp.unit, against=observer, delta=plan.dp.delta
                )
                values += [kept.epsilon, *NUMBER.findall(kept.scope)]
    else:
        promise = plan.promise
        values += [promise.bound(), promise.bound(curious_clients=1), promise.group]
        values += [*promise.with_corrupt(), *promise.with_corrupt().values()]
        if not plan.grouped:
            values.append(exposure.epsilon_per_round(plan.privacy.index))
            values.append(exposure.epsilon_longitudinal(plan.privacy.index))
        values += NUMBER.findall(known_rows.in_words(plan.task.name, "personal"))
    audit = log.kept(AUDIT)
    if audit is not None:
        attacks = audit["attacks"]
        values += [number for each in attacks for number in NUMBER.findall(each["name"])]
        values += [*flat(attacks), len(attacks), max(0, len(attacks) - 8)]
        verdicts = [each["verdict"] for each in attacks]
        values += [verdicts.count(each) for each in {*verdicts}]
    return {form for value in values if value is not None for form in forms(value)}


def shown(found) -> str:
    """What a reader of the HTML sees, without what names things: plan, version and federation."""
    body = html(found).partition("<main>")[2].partition("</main>")[0]
    seen = unescape(re.sub(r"<[^>]*>", "\n", body)).replace("\xa0", " ")
    return re.sub(r"plan [0-9a-f]{12}, tessera \S+", "", seen)


@pytest.mark.parametrize("name", PLANS)
def test_every_figure_on_the_page_is_in_plan_ledger_or_audit(runs, name):
    found, pool = page_of(runs[name]), pool_of(runs[name])
    plain = re.sub(r"plan [0-9a-f]{12},\s+tessera\s+\S+", "", text(found))
    for form in (shown(found), plain):
        numbers = NUMBER.findall(form)
        assert numbers
        assert not [each for each in numbers if each not in pool]
    # And each of them is known as a figure, with its source.
    listed = {each for figure in found.figures for each in NUMBER.findall(figure.text)}
    assert not {*NUMBER.findall(shown(found))} - listed


def test_a_figure_that_is_typed_by_hand_is_found(runs):
    """The test above can fail: a number in a sentence of ours is not in the pool."""
    run = runs["each of two servers"]
    found = page_of(run)
    typed = replace(found, under=("epsilon 2.71 would be better",))
    wrong = [each for each in NUMBER.findall(shown(typed)) if each not in pool_of(run)]
    assert wrong == ["2.71"]
    assert "2.71" not in {figure.text for figure in typed.figures}


def test_digits_in_names_are_no_figures():
    assert NUMBER.findall("cpp5, NDCG@10, secure-2 and 1e-05, 12.5% of 1,234") == [
        *("1e-05", "12.5%", "1,234")
    ]
    assert text_of(quoted("if 83 of 100 add it", "ledger", "")) == "if 83 of 100 add it"
    parts = quoted("if 83 of 100 add it", "ledger", "")
    assert [p.value for p in parts if isinstance(p, Quoted)] == [83.0, 100.0]


# --- what it says ---------------------------------------------------------------------------------


def test_with_noise_it_has_scheme_unit_level_observers_and_trust(runs):
    said = page_of(runs["each of two servers"]).as_json()
    assert said["headline"] == "epsilon 3.00 at delta 1e-05, per user"
    lines = said["lines"]
    assert "each of the two servers, other clients and readers" in lines["Against whom"]
    assert lines["Who must be honest"].startswith("one of two servers")
    assert "two-server" in lines["Scheme"] and "zeros in its place" in lines["Unit"]
    assert "Two servers that collude" in " ".join(said["not_covered"])
    assert "outside epsilon" in said["not_covered"][0]
    assert any(each["name"].startswith("canaries") for each in said["attacks"])


def test_with_a_schedule_it_says_which_rounds_a_client_is_in_and_who_sees_to_it(runs):
    said = page_of(runs["a schedule"]).as_json()
    assert said["headline"] == "epsilon 3.00 at delta 1e-05, per user"
    bound = Plan.read(runs["a schedule"].folder / "plan.toml").participation
    assert 1 < bound.most < bound.rounds and bound.separation > 1
    line = said["lines"]["Rounds of a client"]
    expected = (
        f"at most {bound.most} of {bound.rounds} rounds, any two at least {bound.separation} "
    )
    assert line.startswith(expected) and "refuses any other" in line
    assert "Rounds of a client" not in page_of(runs["answers"]).as_json()["lines"]


def test_a_trusted_server_has_no_number_against_it(runs):
    said = page_of(runs["a trusted server"]).as_json()
    assert "the server: no number" in said["lines"]["Against whom"]
    assert said["lines"]["Who must be honest"].startswith("the server")
    assert "nothing was attacked" in said["attacked"]


def test_without_noise_it_has_b_and_one_known_row(runs):
    said = page_of(runs["groups"]).as_json()
    assert said["headline"] == "B = 16.7%" and "epsilon" not in said["headline"]
    assert "One known row" in said["lines"]
    assert "honest ones" in said["lines"]["Who must be honest"]
    assert page_of(runs["in the clear"]).as_json()["headline"].startswith("Nothing is hidden")
    answers = page_of(runs["answers"]).as_json()
    assert answers["headline"] == "B = 100%" and "given the union" in answers["lines"]["Answers"]


def test_who_should_not_sign_is_told(runs):
    run = runs["each of two servers"]
    scripted = page_of(run, test_entropy=True).as_json()
    assert scripted["headline"] == "No finite epsilon"
    assert "Do not sign" in scripted["warnings"][0]
    many = page_of(run, people=200_000).as_json()
    assert "delta 1e-05 is not below one over 200,000 people" in many["warnings"][0]
    audit = json.loads((run.folder / AUDIT).read_text())
    audit["attacks"][0]["verdict"] = "broken"
    broken = page_of(run, audit=audit).as_json()
    assert audit["attacks"][0]["name"] in broken["warnings"][0]
    assert broken["attacks"][0]["verdict"] == "broken"


def test_outside_the_folder_attacks_against_the_truth_are_withheld(runs):
    run = runs["each of two servers"]
    own, elsewhere = page_of(run), page_of(run, exact=False)
    assert len(own.attacks) > len(elsewhere.attacks) > 0
    assert all(text_of(each.name).startswith("canaries") for each in elsewhere.attacks)
    assert "outside epsilon" in text_of(elsewhere.attacked)
    # Without [dp] there is no number that they could break.
    assert page_of(runs["groups"], exact=False).attacks == page_of(runs["groups"]).attacks


@pytest.mark.parametrize("name", PLANS)
def test_the_text_fits_eighty_columns(runs, name):
    written = text(page_of(runs[name])).splitlines()
    assert max(map(len, written)) <= WIDTH
    assert written[-1].startswith("Signature:")


def test_a_name_cannot_become_markup(runs):
    found = replace(page_of(runs["groups"]), title="<script>alert(1)</script>")
    assert "<script>" not in html(found)


# --- the command ----------------------------------------------------------------------------------


def test_a_run_a_plan_and_a_bundle_have_statements(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = runs["each of two servers"].folder
    assert cli.main(["statement", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert Path(said["page"]) == folder / "statement.html"
    assert (folder / "statement.txt").read_text().startswith("PRIVACY STATEMENT")
    options = {"users": 20, "items": 60}
    noisy = Plan(
        scheme="two-server",
        cohort=8,
        dp=DPPlan(**NOISE, trust="each"),
        task=TaskPlan(name="taobao-like", options=options),
    ).with_simulation(rounds=2)
    Path("plan.toml").write_text(noisy.to_toml())
    assert cli.main(["statement", "plan.toml", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["headline"] == said["headline"] and "Spent so far" not in planned["lines"]
    assert cli.main(["pack", "plan.toml", "--out", "fed.npz"]) == 0
    capsys.readouterr()
    assert cli.main(["statement", "fed.npz", "--out", "fed.html"]) == 0
    assert "federation, 2 rounds planned, 20 clients" in capsys.readouterr().out
    assert Path("fed.html").exists() and Path("fed.txt").exists()


def refused(capsys, *arguments) -> str:
    assert cli.main(["statement", *map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "\nhint: " in said
    return said


def test_bad_input_has_a_hint(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = runs["groups"].folder
    assert "HTML" in refused(capsys, folder, "--out", "page.pdf")
    assert "No such file" in refused(capsys, "nowhere")
    assert "without a bundle" in refused(capsys, folder, "--state", "state")
    Path("mine.html").write_text("mine")
    assert "not a page written by tessera" in refused(capsys, folder, "--out", "mine.html")
    Path("notes.txt").write_text("mine")
    assert "not a statement" in refused(capsys, folder, "--out", "notes.html")
    Path("central.toml").write_text(
        'scheme = "central"\ncohort = 2\n[task]\nname = "taobao-like"\n'
    )
    assert "promises nothing" in refused(capsys, "central.toml")
    state = tmp_path / "state"
    state.mkdir()
    (state / "journal.sqlite").write_bytes(b"")
    assert "does not contain its plan" in refused(capsys, state)


def test_a_damaged_audit_is_refused(runs, tmp_path):
    from tessera.cli.statement import checked

    for found in ([], {"attacks": 3}, {"attacks": [{"name": "x"}]}):
        with pytest.raises(ConfigError, match="not what `tessera audit` writes"):
            checked(tmp_path / AUDIT, found)
    assert checked(tmp_path / AUDIT, None) is None


def test_a_leaders_rounds_are_read_from_its_state(tmp_path):
    from tessera.ids import SERVER, ClientId
    from tessera.services.journal import Journal, rounds_ended

    digest = b"\x01" * 32
    with Journal.open(tmp_path / "leader", owner=SERVER, plan=digest):
        pass
    assert rounds_ended(tmp_path / "leader", digest) == 0
    with pytest.raises(ConfigError, match="another federation"):
        rounds_ended(tmp_path / "leader", b"\x02" * 32)
    with Journal.open(tmp_path / "client", owner=str(ClientId(3)), plan=digest):
        pass
    with pytest.raises(ConfigError, match="is the state of 3"):
        rounds_ended(tmp_path / "client", digest)
    with pytest.raises(ConfigError, match="no state here"):
        rounds_ended(tmp_path / "nowhere", digest)


def test_what_is_known_of_a_subject_is_enough(runs):
    """A plan that names nobody's number of people says nothing about delta."""
    plan = runs["each of two servers"].plan
    found = statement_of(Subject(name="x", kind="plan", plan=plan, version="1"))
    assert not found.warnings and "clients" not in text_of(found.about)
