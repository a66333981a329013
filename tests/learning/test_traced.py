"""A recorded step: fewer operations, the same training, the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tessera.crypto.secret import Secret
from tessera.learning.bound_model import BoundModel
from tessera.learning.module_tables import Tables
from tessera.learning.training.jobs import Job, Loss, Trainable, click_loss, prepare
from tessera.learning.training.local import Sequential
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised import learner as learner_module
from tessera.learning.training.vectorised import traced
from tessera.learning.training.vectorised.batches import lay_out
from tessera.learning.training.vectorised.learner import Slots, Vectorised
from tessera.learning.training.vectorised.traced import Traced
from tests.learning import test_cohort as clicks
from tests.learning import test_softmax as words

TRAINING = LocalTraining(batch=2, rate=0.2, table_rate=2.0)


class Tied(nn.Module):
    """One table for the words before and the words to come: its gradient has two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = words.module()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        table = self.net.words.weight
        ids = batch["context"]
        before = table[ids.clamp(min=0)] * (ids >= 0).unsqueeze(-1)
        return before.sum(-2) @ table.T + self.net.biases.weight.squeeze(-1)


class ProductOfParameters(clicks.Clicks):
    """The gradient of one parameter is made of another that the same step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(1, 5))
        self.b = nn.Parameter(torch.randn(5, 6))

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        return super().features(batch) + self.a @ self.b


def of_clicks(make: Callable[[], nn.Module]) -> tuple[nn.Module, BoundModel, Loss, list[Job]]:
    module = make()
    bound, jobs = clicks.cohort(module, (9, 12, 30))
    return module, bound, click_loss, jobs


def of_words(dropout: float = 0.0) -> tuple[nn.Module, BoundModel, Loss, list[Job]]:
    net = words.module(dropout=dropout)
    bound = Tables(words.DECLARED).bind(net, words.LOSS)
    jobs = [words.job(bound, net, words.said(c, 9 + 5 * c), [c, 30, 35], c) for c in range(3)]
    return net, bound, words.LOSS, jobs


def tied() -> tuple[nn.Module, BoundModel, Loss, list[Job]]:
    net = Tied()
    loss = words.Softmax("net.words.weight", "net.biases.weight", target="next", negatives=7)
    tables = {
        f"net.{name}": table for name, table in words.DECLARED.items() if "before" not in name
    }
    bound = Tables(tables).bind(net, loss)
    return net, bound, loss, [tied_job(bound, net, c) for c in range(3)]


def tied_job(bound: BoundModel, net: nn.Module, client: int) -> Job:
    examples = words.said(client, 9 + 5 * client)
    own = bound.row_ids_of(examples)["net.words"]
    parts = {
        t.name: words.TablePart(own, bound.initial(t.name)[own.astype(int)]) for t in bound.tables
    }
    dense = bound.pack(net)
    return Job(
        client,
        words.Submodel(dense, parts, dict.fromkeys(parts, own)),
        examples,
        coins=Secret(int(client).to_bytes(32, "big")),
    )


CASES = {
    "clicks": lambda: of_clicks(clicks.Clicks),
    "dropout": lambda: of_clicks(clicks.WithDropout),
    "places": lambda: of_clicks(clicks.WithPositions),
    "a product of parameters": lambda: of_clicks(ProductOfParameters),
    "words": of_words,
    "words with dropout": lambda: of_words(0.3),
    "tied words": tied,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("clip, decay", [(0.0, 0.0), (0.05, 0.1)])
def test_recorded_steps_train_as_the_step_does_with_the_same_draws(case, clip, decay):
    module, bound, loss, jobs = CASES[case]()
    module.train()
    training = replace(TRAINING, clip=clip, weight_decay=decay)
    plain = Vectorised(Trainable(module, bound, loss, training)).eager
    refusals: list[str] = []
    states = []
    for step in (plain, Traced(plain, refusals.append)):
        # Laid out twice, since a step changes the rows in place; double, so that it is no chance.
        laid_out = lay_out(
            bound,
            training,
            [prepare(bound, job) for job in jobs],
            dtype=torch.float64,
        )
        slots = Slots(bound, laid_out, len(jobs))
        for client in range(len(jobs)):
            slots.fill(client)
        torch.manual_seed(4)
        for _ in range(4):
            slots.run(step, torch.tensor(0.2, dtype=torch.float64))
        held = [*slots.dense.values(), *slots.rows.values(), *laid_out.values.values()]
        states.append((held, slots.losses, torch.get_rng_state()))
    assert not refusals
    (one, losses, drawn), (other, other_losses, other_drawn) = states
    for a, b in zip([*one, losses], [*other, other_losses], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert torch.equal(drawn, other_drawn)


def operations(case: str) -> list[str]:
    """What the recorded step of a case runs."""
    module, bound, loss, jobs = CASES[case]()
    step = Traced(Vectorised(Trainable(module, bound, loss, TRAINING)).eager, pytest.fail)
    laid_out = lay_out(bound, TRAINING, [prepare(bound, j) for j in jobs])
    slots = Slots(bound, laid_out, len(jobs))
    for client in range(len(jobs)):
        slots.fill(client)
    slots.run(step, torch.tensor(0.2))
    assert step._recorded is not None
    return [str(node.target) for node in step._recorded.graph.nodes]


def test_row_gradients_of_a_softmax_are_added_as_they_are_computed():
    ran = operations("words")
    # places, inner and outer, and the words to come; of the words before only those looked up
    assert ran.count("aten.baddbmm_.default") == 4
    assert ran.count("aten.scatter_add_.default") == 1
    assert "aten.embedding_dense_backward.default" not in ran


def test_a_gradient_with_two_parts_is_left_as_it_is():
    ran = operations("tied words")
    assert "aten.baddbmm_.default" not in ran


def test_a_recording_that_computes_something_else_is_not_used(monkeypatch):
    honest = traced.simplify

    def wrong(recorded):
        honest(recorded)
        first = next(n for n in recorded.graph.nodes if n.target is traced.aten.baddbmm_.default)
        first.kwargs = {"alpha": -2}
        recorded.recompile()

    monkeypatch.setattr(traced, "simplify", wrong)
    monkeypatch.setattr(learner_module, "RECORD_FROM", 1)
    module, bound, loss, jobs = of_words()
    learner = Vectorised(Trainable(module, bound, loss, TRAINING))
    found = learner.train(jobs, round_id=0)
    assert "not recorded for 3 slots" in learner.reason
    assert "trains differently" in learner.reason
    expected = Sequential(Trainable(module, bound, loss, TRAINING)).train(jobs, round_id=0)
    clicks.assert_same(found, expected)


@pytest.mark.parametrize("case", ["clicks", "words", "tied words"])
def test_a_cohort_of_long_clients_trains_as_one_by_one_does(case, monkeypatch):
    monkeypatch.setattr(learner_module, "RECORD_FROM", 2)
    module, bound, loss, jobs = CASES[case]()
    learner = Vectorised(Trainable(module, bound, loss, TRAINING), slots=2)
    found = learner.train(jobs, round_id=1)
    assert not learner.reason
    assert learner._made  # something was recorded
    clicks.assert_same(
        found, Sequential(Trainable(module, bound, loss, TRAINING)).train(jobs, round_id=1)
    )
