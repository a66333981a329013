"""Taobao behaviour: both rules for a click, the nine days, and a part of the users."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from own_secrets import secret_of
from tessera.data import delimited
from tessera.data.examples import draw
from tessera.data.taobao import END, FIRST, taobao
from tessera.errors import ConfigError

EVENTS = [  # user, good, category, behaviour, seconds after the start
    (5, 90, 7, "pv", 300),
    (5, 80, 7, "pv", 100),
    (5, 80, 7, "cart", 200),
    (5, 70, 6, "buy", 400),
    (5, 70, 6, "pv", -1),  # the evening before
    (9, 60, 6, "fav", 10),
    (9, 90, 7, "pv", END - FIRST),  # the morning after
    (9, 80, 7, "pv", END - FIRST - 1),
]


def write(folder: Path, lines: list[str] | None = None, *, name="taobao-userbehavior") -> Path:
    own = folder / name
    own.mkdir(exist_ok=True)
    text = lines or [f"{u},{g},{c},{b},{FIRST + t}" for u, g, c, b, t in EVENTS]
    (own / "UserBehavior.csv").write_text("\n".join(text) + "\n")
    return folder


def test_wanted_goods_are_those_put_aside_or_bought(tmp_path):
    data = taobao(write(tmp_path), label="wanted", history=2)
    assert data.sizes == {"user": 2, "item": 4, "category": 2}
    own = data.of(0)
    assert own["item"].tolist() == [2, 2, 3, 1]  # 80 looked at, 80 into the cart, 90, 70 bought
    assert own["label"].tolist() == [0, 1, 0, 1]
    assert own["history"].tolist() == [[-1, -1], [-1, -1], [2, -1], [2, -1]]
    assert "rate" in data.train.fields
    assert data.category_of is not None
    assert data.category_of.tolist() == [0, 0, 1, 1]
    assert data.facts["events outside the nine days, left out"] == 2


def test_opened_goods_count_once_and_stand_beside_goods_never_touched(tmp_path):
    data = draw(taobao(write(tmp_path), history=3), secret_of)
    own = data.of(0)
    assert own["item"][own["label"] == 1].tolist() == [2, 3, 1]
    assert own["item"][own["label"] == 0].tolist() == [0, 0, 0]  # 60: the only one left
    assert own["history"][-1].tolist() == [2, 3, -1]
    assert "rate" not in data.train.fields
    other = taobao(tmp_path, history=3, negatives=2)
    assert len(other.train) > len(data.train)


def test_the_first_users_of_the_file_are_read_whole_in_any_block(tmp_path, monkeypatch):
    users = [f"{u},{g},1,pv,{FIRST + g}" for u in (4, 2, 9, 1) for g in range(1, 6)]
    write(tmp_path, users)
    whole = taobao(tmp_path, users=2, label="wanted")
    assert whole.facts["users"] == 2
    assert whole.facts["examples"] == 10
    monkeypatch.setattr(delimited, "_BLOCK", 30)
    pieces = taobao(tmp_path, users=2, label="wanted")
    for field in ("user", "item"):
        assert (pieces.train[field] == whole.train[field]).all()


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("1,2,3,look,1511539200", "line 2: 'behaviour' is 'look', not one of pv"),
        ("1,2,3,pv", "line 2: 4 fields where 5"),
        ("1,2,3,pv,soon", "line 2: 'time' is not a whole number: 'soon'"),
    ],
)
def test_an_event_that_cannot_be_is_named(tmp_path, line, match):
    with pytest.raises(ConfigError, match=match):
        taobao(write(tmp_path, [f"1,2,3,pv,{FIRST}", line]))


@pytest.mark.parametrize("bad", [{"label": "liked"}, {"users": 0}, {"negatives": 0}])
def test_settings_that_cannot_work_are_refused(tmp_path, bad):
    with pytest.raises(ConfigError):
        taobao(write(tmp_path), **bad)


def test_a_file_of_another_time_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no event from 25 November"):
        taobao(write(tmp_path, ["1,2,3,pv,-2134949234"]))


def test_the_published_sample_has_its_counts(published):
    folder = published("taobao-userbehavior-sample")
    wanted = taobao(folder, label="wanted")
    assert wanted.facts["events"] + 35 == 84_287
    assert wanted.facts["events outside the nine days, left out"] == 35
    assert wanted.clients == 814
    assert "a sample" in wanted.facts["source"]
    opened = draw(taobao(folder), secret_of)
    assert opened.facts["examples"] == 2 * opened.facts["clicks"] == 127_606
    # It can be learned: users come back to categories, which the history shows ...
    test, category_of = opened.test, opened.category_of
    assert category_of is not None
    past = np.where(test["history"] >= 0, category_of[test["history"]], -1)
    back = (past == category_of[test["item"]][:, None]).any(axis=1)
    assert back[test["label"] == 1].mean() > 2 * back[test["label"] == 0].mean()
    # ... and not from having seen the item before, which is where careless sampling gives it away.
    seen = np.isin(test["item"], opened.train["item"][opened.train["label"] == 1])
    assert seen[test["label"] == 1].mean() == pytest.approx(
        seen[test["label"] == 0].mean(), abs=0.1
    )
