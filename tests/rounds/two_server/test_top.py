"""The largest changes between two servers: the model of the open twin, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from simulation import test_top as dense
from tessera.errors import ConfigError
from tessera.plan import SecurityPlan, TwoServerPlan
from tessera.protocols.two_server.params import WRITTEN_LIMIT, Write
from tessera.runs.training import Training, complete
from tessera.tasks import Task

WORDS = 1_200


class Bag(nn.Module):
    """Vectors of words, added up: a tensor that is cut into rows, and two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.classes = nn.Embedding(WORDS, 4), nn.Linear(4, dense.CLASSES)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = (batch["x"].abs() * 400).long().clamp(max=WORDS - 1)
        return self.classes(torch.tanh(self.words(ids).sum(-2)))


def task(by: str) -> Task:
    return dense.task() if by == "element" else replace(dense.task(), module=Bag)


def trained(by: str, scheme: str, rounds: int = 3, **more) -> tuple[bytes, list, Training]:
    update = {"top_by": by, **more.pop("update", {})}
    own = task(by)
    settings = complete(dense.plan(scheme=scheme, update=update, **more), own)
    with Training(own, settings, entropy=dense.scripted()) as training:
        for _ in training.run(rounds):
            continue
        kept = sorted((c, k.tolist()) for c, k in training.clients.residuals())
        return training.dense.tobytes(), kept, training


@pytest.mark.parametrize("by", ["element", "row"])
@pytest.mark.parametrize("write", ["dpf", "dense"])
def test_two_servers_open_what_the_open_twin_sums(by, write):
    """Also what clients keep, whichever way the changes are written."""
    way = TwoServerPlan(write=write)
    model, kept, training = trained(by, "two-server", two_server=way)
    assert {cost.write for cost in training.federation.last.writing} == {Write(write)}
    assert (model, kept) == trained(by, "fedavg")[:2]
    assert any(any(values) for _, values in kept)


def test_who_drops_out_keeps_what_it_wrote():
    """A round with messages and one without; in either some are left out of the sum."""
    half = {"security": SecurityPlan(dropout=0.5)}
    found = [
        trained("element", "two-server", 6, simulation={"dropout": 0.3, "crypto": crypto}, **half)[
            :2
        ]
        for crypto in ("every", "none")
    ]
    assert found[0] == found[1]
    assert found[0] != trained("element", "two-server", 6, **half)[:2]


def test_only_what_is_cut_is_written_by_keys():
    training = trained("row", "two-server", rounds=1)[2]
    params = training.federation.last.state.over.domain.params
    (cut,) = params.tables
    assert (cut.rows, cut.words, cut.row_bytes) == (WORDS, 4, 0)
    assert params.dense == 4 * dense.CLASSES + dense.CLASSES + 1
    assert params.dense_bytes == 4 * training.plan.model.dense


def test_a_table_that_is_only_written_need_not_be_narrowed():
    small = TwoServerPlan(row_limit=20)
    settings = complete(dense.plan(scheme="two-server", two_server=small), dense.task())
    assert not settings.narrows and settings.model.dense > 20
    assert trained("element", "two-server", rounds=1, two_server=small)[0]
    assert WRITTEN_LIMIT > 1_663_370
    with pytest.raises(ConfigError, match="without a table"):
        complete(dense.plan(scheme="two-server", top=1.0, error_feedback=False), dense.task())
    with pytest.raises(ConfigError, match="keys that last are for the same rows"):
        lasting = TwoServerPlan(key_rounds=4)
        complete(dense.plan(scheme="two-server", two_server=lasting), dense.task())
    with pytest.raises(ConfigError, match="union"):
        union = TwoServerPlan(domain="union")
        complete(dense.plan(scheme="two-server", two_server=union), dense.task())


def test_few_changes_are_keys_and_many_are_shares():
    """ "auto" takes the fewer bytes, and says so."""
    written = {}
    for top in (0.002, 0.5):
        training = trained("row", "two-server", rounds=1, top=top)[2]
        (cost,) = training.federation.last.writing
        assert cost.table == "dense part, cut 1" and cost.reason
        written[top] = cost.write
    assert written == {0.002: Write.POINTS, 0.5: Write.DENSE}
    assert np.isfinite(training.dense).all()
