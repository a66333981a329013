"""Alimama's ads: the published tables, and the prepared form with 267 fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.data.alimama import alimama, alimama_sample
from tessera.errors import ConfigError

HEADER = "user,time_stamp,adgroup_id,pid,nonclk,clk"
SHOWN = [  # the file is in no order of users
    "8,300,55,430548_1007,1,0",
    "3,100,44,430548_1007,0,1",
    "8,200,44,430539_1007,0,1",
    "3,150,66,430539_1007,1,0",  # an ad that is not listed
    "3,200,55,430539_1007,0,1",
]
ADS = ["55,9,1,1,NULL,1.5", "44,7,2,2,13,99.0", "77,9,3,3,,0.0"]


def write(folder: Path, shown=SHOWN, header=HEADER) -> Path:
    own = folder / "taobao-alimama"
    own.mkdir()
    (own / "raw_sample.csv").write_text("\n".join([header, *shown]) + "\n")
    columns = "adgroup_id,cate_id,campaign_id,customer,brand,price"
    (own / "ad_feature.csv").write_text("\n".join([columns, *ADS]) + "\n")
    return folder


def test_impressions_become_examples_in_the_order_of_time(tmp_path):
    data = alimama(write(tmp_path), history=2)
    assert data.sizes == {"user": 2, "item": 3, "category": 2}
    assert data.of(0)["item"].tolist() == [0, 1]  # 44, 55
    assert data.of(0)["label"].tolist() == [1, 1]
    assert data.of(1)["item"].tolist() == [0, 1]
    assert data.of(1)["label"].tolist() == [1, 0]
    assert data.of(1)["history"].tolist() == [[-1, -1], [0, -1]]
    assert data.category_of is not None
    assert data.category_of.tolist() == [0, 1, 1]
    assert data.facts["impressions of ads that are not listed, left out"] == 1


def test_some_of_the_users_can_be_drawn(tmp_path):
    write(tmp_path)
    one = alimama(tmp_path, users=1, seed=3)
    assert one.clients == 1
    assert (one.train["item"] == alimama(tmp_path, users=1, seed=3).train["item"]).all()
    assert alimama(tmp_path, users=10).clients == 2
    with pytest.raises(ConfigError, match="0 users"):
        alimama(tmp_path, users=0)


@pytest.mark.parametrize(
    ("shown", "header", "match"),
    [
        (SHOWN, "user,clk", "no column 'time_stamp'"),
        ([*SHOWN, "3,100,44,x,0,7"], HEADER, "line 7: 'clk' is '7', not one of 0, 1"),
        ([*SHOWN, "3,noon,44,x,0,1"], HEADER, "line 7: 'time_stamp' is not a whole number: 'noon'"),
        (["3,150,66,x,1,0"], HEADER, "no impression of an ad"),
        ([], HEADER, "no line below"),
    ],
)
def test_tables_that_cannot_be_are_named(tmp_path, shown, header, match):
    with pytest.raises(ConfigError, match=match):
        alimama(write(tmp_path, shown, header))


def prepared(user, ad, category, click, past=()) -> str:
    fields = ["0"] * 267
    fields[50 : 50 + len(past)] = [str(one) for one in past]
    fields[250], fields[259], fields[260], fields[266] = map(str, (user, ad, category, click))
    fields[263], fields[264] = "NULL", "0.5"
    return ",".join(fields)


def sample(folder: Path, lines: list[str]) -> Path:
    own = folder / "taobao-alimama-sample"
    own.mkdir()
    (own / "alimama_sampled_train.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_the_prepared_form_brings_its_categories_along(tmp_path):
    lines = [
        prepared(9, 500, 30, 1, [30, "", 80]),
        prepared(2, 400, "", 0),
        prepared(9, 400, "", 0, [80]),
    ]
    data = alimama_sample(sample(tmp_path, lines), history=2)
    assert data.sizes == {"user": 2, "item": 2, "category": 3}  # none, 30, 80
    assert data.category_of is not None
    assert data.category_of.tolist() == [0, 1]
    assert data.of(1)["item"].tolist() == [1, 0]
    assert data.of(1)["history"].tolist() == [[-1, -1], [1, -1]]
    assert data.of(1)["category_history"][:, :3].tolist() == [[1, -1, 2], [2, -1, -1]]
    assert data.of(1)["category_history"].shape == (2, 50)


def test_a_line_with_other_fields_is_named(tmp_path):
    with pytest.raises(ConfigError, match="line 2: 266 fields where 267 are due"):
        line = prepared(1, 2, 3, 1)
        alimama_sample(sample(tmp_path, [line, line.removesuffix(",1")]))


def test_the_published_sample_has_its_counts(published):
    data = alimama_sample(published("taobao-alimama-sample"))
    assert data.facts["examples"] == 500
    assert data.facts["clicks"] == 210
    assert data.sizes["user"] == 230
    assert data.sizes["item"] == 297
