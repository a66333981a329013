"""The attacks on ratings over recorded runs: what the product's own rounds give away, and to whom.

Runs are small and real: every message by the roles, every byte as it would be sent.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from runs import raters
from tessera.api import simulate
from tessera.audit import in_the_clear
from tessera.audit.finding import Finding, Verdict
from tessera.audit.record import Record
from tessera.audit.suite import report
from tessera.cli.audit import audit
from tessera.crypto.entropy import ScriptedEntropy
from tessera.data.ratings import RatingData
from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.plan import UpdatePlan
from tessera.runs.folder import LABELS, RUN
from tessera.runs.training import Training, complete

READ = "gradients in the open: ratings read back exactly"
ONCE = "gradients in the open: the same after one round"
SCRIPT = "ratings audit"
MASKED = "gradients in the open: masked ratings read back"
TAKEN_OFF = "masks: taken off, ratings exact"
SOLE = "secure sum: a row opens as one rating"
SEVERAL = "secure sum: ratings of rows with several raters"
NAMED = "secure sum: the client of a row of its own is identified"


def recorded(
    folder: Path, scheme: str, rounds: int = 5, *, each: int = 15, mask: str = "none", **more
) -> Path:
    task = raters.task(raters.films(each=each), mask=mask, factors=8)
    plan = raters.plan(scheme, **{"cohort": 10, **more})
    simulate(task, plan, rounds, out=folder, record_views=True, insecure_test_entropy=SCRIPT)
    return folder


def found(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in report(Record.load(folder)).findings}


@pytest.mark.parametrize(
    ("scheme", "more"),
    [
        ("submodel", {}),
        ("submodel", {"simulation": {"dropout": 0.3}}),
        ("fedavg", {}),
        ("fedavg", {"update": UpdatePlan(average="examples", dense_clip=30.0)}),
        ("secure-submodel", {"security": {"sharing": "plain"}}),
    ],
)
def test_ratings_shared_in_the_open_come_back_exactly(tmp_path, scheme, more) -> None:
    findings = found(recorded(tmp_path / "run", scheme, 6, **more))
    assert set(findings) == {READ, ONCE}
    twice = findings[READ]
    assert twice.measured == 1.0 and twice.trials > 50
    assert twice.claimed == 1.0 and twice.verdict is Verdict.UNCLAIMED


def test_rounds_that_were_not_recorded_leave_the_level_open(tmp_path) -> None:
    """With sampled cryptography clients train in rounds that send no messages."""
    more = {"simulation": {"crypto": "sampled", "crypto_every": 2}}
    findings = found(recorded(tmp_path / "run", "submodel", 6, **more))
    assert findings[READ].verdict is Verdict.UNTESTED
    assert findings[ONCE].trials > 100


@pytest.mark.parametrize(("mask", "share"), [("linear", 1.0), ("network", 0.9)])
def test_masked_ratings_come_back_and_their_masks_come_off(tmp_path, mask, share) -> None:
    folder = recorded(tmp_path / "run", "submodel", 6, each=20, mask=mask)
    record = Record.load(folder)
    data = raters.films(each=20)
    assert isinstance(data, RatingData) and record.labels is not None
    known = replace(record.labels, attributes=data.items.values)
    outcome = report(replace(record, labels=known))
    findings = {finding.name: finding for finding in outcome.findings}
    assert findings[MASKED].measured == 1.0 and findings[MASKED].trials > 100
    assert findings[TAKEN_OFF].measured >= share
    fair, paper = (
        findings[f"masks: top tenth found, {how}"].measured
        for how in ("ties counted fairly", "as Yang et al. count")
    )
    assert paper < fair
    assert findings["masks: rated 4 or more, AUC"].measured > 0.9
    assert outcome.tables["ranking"].keys() == {"0.1", "0.3", "0.5", "0.7", "0.9"}
    for rows in ("recovery", "ranking", "ranking_fair"):
        for shares in outcome.tables[rows].values():
            assert sum(shares) == pytest.approx(1.0, abs=1e-3)


@pytest.fixture(scope="module", params=["secure-submodel", "secure-fedavg"])
def summed(request, tmp_path_factory) -> dict[str, Finding]:
    """Everybody in every row's group (CPP5), or whole models: no group to tell clients by."""
    folder = tmp_path_factory.mktemp("summed") / "run"
    recorded(folder, request.param, 3, each=6, privacy={"level": "cpp5"})
    return found(folder)


def test_a_secure_sum_opens_rows_of_one_rater_and_no_name(summed) -> None:
    assert not summed.keys() & {READ, ONCE, MASKED}  # nothing of the kind can be tried
    sole, named = summed[SOLE], summed[NAMED]
    assert sole.claimed > 0.1
    assert 0.9 * sole.claimed <= sole.measured <= sole.claimed  # but for errors too small to use
    assert named.claimed == pytest.approx(1 / 10)
    assert named.verdict is Verdict.HOLDS


def test_clients_that_open_somewhere_open_elsewhere_too(summed) -> None:
    assert summed[SEVERAL].measured > 0.1
    assert summed[SEVERAL].verdict is Verdict.BROKEN


def test_linked_rows_name_their_client_through_small_groups(tmp_path) -> None:
    privacy = {"level": "", "p1": 0.9, "p2": 0.3, "p3": 1.0, "p4": 0.0}
    findings = found(recorded(tmp_path / "run", "secure-submodel", 4, each=8, privacy=privacy))
    sole, named = findings[SOLE], findings[NAMED]
    assert 0.9 * sole.claimed <= sole.measured <= sole.claimed
    assert 1 / 10 < named.claimed < 0.6  # a row alone has its group to hide in
    assert named.verdict is Verdict.BROKEN


def test_in_a_mixed_cohort_each_is_attacked_the_way_it_went(tmp_path) -> None:
    common = {"cohort": 8, "privacy": {"level": "cpp5"}}
    task = raters.task(raters.films(each=18), mask="linear", factors=8)
    plan = complete(raters.plan("secure-submodel", **common), task)
    with Training(task, plan, entropy=ScriptedEntropy(SCRIPT.encode())) as training:
        assert training.setup is not None and training.setup.indicator is not None
        found_by = training.setup.indicator
        cohorts = [training.federation.cohorts.sample(RoundId(r)) for r in range(24)]

    def unmasked(limit: float) -> set[int]:
        """How many of a round's clients are at or below it, over the rounds."""
        return {sum(bool(found_by[c] <= limit) for c in cohort) for cohort in cohorts}

    # All of a cohort in the clear, all but one or two, who would be alone, and some.
    indicator = next(
        float(limit)
        for limit in np.sort(found_by)
        if 8 in unmasked(limit) and unmasked(limit) & {6, 7} and unmasked(limit) & {1, 2, 3, 4, 5}
    )
    security = {"sharing": "auto", "indicator": indicator}
    folder = recorded(
        tmp_path / "run", "secure-submodel", 24, each=18, mask="linear", security=security, **common
    )
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    went = [json.loads(line)["unmasked"] for line in lines]
    assert 0 in went and 8 in went and len(set(went)) > 2  # all masked, none, and some
    findings = found(folder)
    assert findings[MASKED].measured == 1.0 and findings[MASKED].trials > 30
    assert findings[SOLE].trials > 0


def test_the_command_prints_it_all(tmp_path) -> None:
    folder = recorded(tmp_path / "run", "submodel", 3, each=20, mask="linear")
    app = typer.Typer()
    app.command()(audit)
    text = CliRunner().invoke(app, [str(folder)]).stdout
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "3 recorded rounds" in text and "ties counted fairly" in text and ".8-1" in text
    printed = json.loads(CliRunner().invoke(app, [str(folder), "--json"]).stdout)
    assert printed.keys() == {"attacks", "tables"}
    (auc,) = (a for a in printed["attacks"] if a["unit"] == "auc")
    assert 0.5 < auc["measured"] <= 1.0


def refused(folder: Path, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        report(Record.load(folder))
    assert caught.value.hint


@pytest.mark.parametrize("text", ["[", "[1]", '{"a": {}}', '{"0": {"item": [1], "label": [2]}}'])
def test_labels_that_are_none_are_refused(tmp_path, text) -> None:
    folder = recorded(tmp_path / "run", "submodel", 1)
    (folder / LABELS).write_text(text)
    refused(folder, "not ratings by client")


def test_a_run_without_its_mean_or_with_strangers_is_refused(tmp_path) -> None:
    folder = recorded(tmp_path / "run", "submodel", 1)
    kept = (folder / RUN).read_text()
    (folder / RUN).write_text(json.dumps(json.loads(kept) | {"setup": {}}))
    refused(folder, r"does not have setup\.mean")
    (folder / RUN).write_text(kept)
    truth = json.loads((folder / LABELS).read_text())
    keep = dict(list(truth.items())[:2])
    (folder / LABELS).write_text(json.dumps(keep))
    refused(folder, "does not know client")


def test_without_labels_the_rows_of_a_run_in_the_clear_are_read(tmp_path) -> None:
    folder = recorded(tmp_path / "run", "submodel", 1)
    (folder / LABELS).unlink()
    (found,) = report(Record.load(folder)).findings
    assert found.name == in_the_clear.READ and found.measured == 1.0
