"""Events become JSON that every reader knows."""

from __future__ import annotations

import json

from tessera.cli.run_summary import highest_epsilon
from tessera.rounds.events import RoundFinished, as_json


def finished(**more) -> RoundFinished:
    counts = dict.fromkeys(
        (
            "round_id cohort survivors union_rows union_residual rows_opened rows_below_quorum "
            "rows_shrunk rows_lost weight"
        ).split(),
        0,
    )
    parts = {key: {} for key in ("bytes_up", "bytes_down", "client_seconds", "server_seconds")}
    settings = {"measured": True, "secure": True, "epsilon": 1.5, "condition": "given the union"}
    return RoundFinished(**{**counts, **parts, **settings, **more})


def test_what_json_does_not_know_is_a_word_or_nothing():
    line = as_json(finished(epsilon=float("inf"), metric=float("nan"), loss=0.5))
    assert (line["epsilon"], line["metric"], line["loss"]) == ("inf", None, 0.5)
    assert json.loads(json.dumps(line, allow_nan=False)) == line


def test_a_runs_level_is_the_highest_of_any_round_and_none_where_nothing_is_randomised():
    spent = [{"epsilon": value} for value in (1.0, 2.7, 2.0)]
    assert highest_epsilon(spent) == 2.7
    assert highest_epsilon([*spent, {"epsilon": "inf"}]) == "inf"
    assert highest_epsilon([{"epsilon": None}]) is None
    assert highest_epsilon([]) is None
