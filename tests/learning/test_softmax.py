"""A softmax over the rows at hand stands for one over the whole table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn
from torch.nn import functional as F

from tessera.crypto.secret import Secret
from tessera.data.examples import ClientData, Examples
from tessera.data.speech import speakers_like
from tessera.errors import ConfigError
from tessera.learning.bound_model import Derived, Table
from tessera.learning.metrics import RankMetric
from tessera.learning.models.next_word import NextWord
from tessera.learning.module_tables import Tables
from tessera.learning.scores import evaluate
from tessera.learning.softmax import (
    CANDIDATES,
    SampledSoftmax,
    Softmax,
    UnionSoftmax,
    log_weights,
    ranked,
)
from tessera.learning.tables.submodel import Submodel, TablePart
from tessera.learning.training.jobs import Job, Trainable, prepare
from tessera.learning.training.local import Sequential
from tessera.learning.training.settings import LocalTraining
from tessera.learning.training.vectorised.check import best
from tessera.tasks import Recommended, Task, word_task

WORDS, WIDTH = 40, 5
LOSS = Softmax("words.weight", "biases.weight", target="next", negatives=7)
DECLARED = {
    "words.weight": Table("next", "context"),
    "biases.weight": Table("next"),
    "before.weight": Table("context"),
}


def module(**more) -> NextWord:
    return NextWord(WORDS, length=3, width=WIDTH, hidden=4, **{"dropout": 0.0, **more})


def said(client: int, n: int = 20, own: int = 9) -> Examples:
    rng = np.random.default_rng([3, client])
    words = rng.choice(WORDS, own, replace=False)
    context = rng.choice(words, (n, 3))
    context[rng.random((n, 3)) < 0.2] = -1
    return Examples({"context": context, "next": rng.choice(words, n)})


def job(bound, net, examples: Examples, extra, client: int = 0) -> Job:
    rows = np.union1d(bound.row_ids_of(examples)["words"], np.asarray(extra, np.uint64))
    parts = {t.name: TablePart(rows, bound.initial(t.name)[rows]) for t in bound.tables}
    dense = bound.pack(net)
    return Job(
        client,
        Submodel(dense, parts, dict.fromkeys(parts, rows)),
        examples,
        coins=Secret(int(client).to_bytes(32, "big")),
    )


# --- the loss -------------------------------------------------------------------------------------


def test_with_all_rows_at_hand_it_is_the_cross_entropy():
    logits, target = torch.randn(6, WORDS), torch.arange(6)
    found = LOSS(logits, {"next": target})
    assert_allclose(found, F.cross_entropy(logits, target, reduction="none"), rtol=1e-6)


def test_an_example_without_a_target_teaches_nothing():
    logits = torch.randn(2, WORDS, requires_grad=True)
    found = LOSS(logits, {"next": torch.tensor([-1, 3])})
    found.sum().backward()
    assert found[0] == 0.0 and not logits.grad[0].any() and logits.grad[1].any()


def test_the_sum_over_the_table_is_estimated_without_bias():
    """Over many draws of negatives the mean of the estimated denominator is the true one."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=WORDS))
    own = np.sort(rng.choice(WORDS, 6, replace=False)).astype(np.uint64)
    others = np.setdiff1d(np.arange(WORDS, dtype=np.uint64), own)
    found = []
    for _ in range(4_000):
        at_hand = np.sort(np.concatenate([own, rng.choice(others, 5, replace=False)]))
        weights = torch.from_numpy(log_weights(WORDS, at_hand, own))
        found.append(float(torch.exp(logits[at_hand.astype(np.int64)] + weights).sum()))
    true = float(torch.exp(logits).sum())
    assert abs(np.mean(found) - true) < 4 * np.std(found) / len(found) ** 0.5
    # without the correction it is far off
    plain = [float(torch.exp(logits[own.astype(np.int64)]).sum())]
    assert abs(np.mean(plain) - true) > 0.3 * true


def test_a_client_without_negatives_has_its_own_rows_alone():
    own = np.array([2, 5], np.uint64)
    assert_array_equal(log_weights(WORDS, own, own), np.zeros(2, np.float32))


# --- training -------------------------------------------------------------------------------------


def test_every_candidate_is_trained_and_counts_do_not_tell_which_are_own():
    net = module()
    bound = Tables(DECLARED).bind(net, LOSS)
    examples = said(1)
    own = bound.row_ids_of(examples)["words"]
    extra = np.setdiff1d(np.arange(WORDS, dtype=np.uint64), own)[:7]
    one = job(bound, net, examples, extra)
    (found,) = Sequential(Trainable(net, bound, LOSS, LocalTraining(batch=4, rate=0.1))).train(
        [one], round_id=0
    )
    update = found.update.tables["words"]
    assert np.abs(update.values).max(axis=1).min() > 0
    assert set(update.counts.tolist()) == {len(examples)}
    # Of words before, counts are of those that are there.
    assert set(found.update.tables["before"].counts.tolist()) != {len(examples)}


def test_a_client_trains_on_its_candidates_as_a_plain_program_does():
    """The independent answer: autograd on a module that holds only the candidates."""
    net = module()
    bound = Tables(DECLARED).bind(net, LOSS)
    examples = said(2)
    own = bound.row_ids_of(examples)["words"]
    extra = np.setdiff1d(np.arange(WORDS, dtype=np.uint64), own)[:7]
    one = job(bound, net, examples, extra)
    (found,) = Sequential(Trainable(net, bound, LOSS, LocalTraining(batch=0, rate=0.5))).train(
        [one], round_id=0
    )
    rows = one.submodel.trained["words"]
    small = NextWord(len(rows), length=3, width=WIDTH, hidden=4, dropout=0.0)
    state = dict(net.state_dict())
    for name in ("words", "biases", "before"):
        state[f"{name}.weight"] = state[f"{name}.weight"][rows.astype(np.int64)]
    small.load_state_dict(state)
    place = {int(row): at for at, row in enumerate(rows)}
    place[-1] = -1
    context = torch.tensor([[place[int(w)] for w in line] for line in examples["context"]])
    target = torch.tensor([place[int(w)] for w in examples["next"]])
    mine = np.isin(rows, own)
    lift = torch.from_numpy(np.where(mine, 0.0, np.log((WORDS - mine.sum()) / 7))).float()
    F.cross_entropy(small({"context": context}) + lift, target).backward()
    for name in ("words", "biases", "before"):
        up = small.get_parameter(f"{name}.weight").grad.numpy()
        assert_allclose(found.update.tables[name].values, -0.5 * up, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_side_by_side_it_trains_as_one_by_one(decay):
    net = module()
    bound = Tables(DECLARED).bind(net, LOSS)
    training = LocalTraining(batch=4, rate=0.2, weight_decay=decay, clip=0.5)
    jobs = [
        job(bound, net, said(c, 9 + 5 * c, own=5 + 3 * c), [c, 30, 35, 39], client=c)
        for c in range(5)
    ]
    fast = best(Trainable(net, bound, LOSS, training), sample=jobs, compile=False)
    assert fast.name == "vectorised", fast.reason
    slow = Sequential(Trainable(net, bound, LOSS, training))
    for a, b in zip(slow.train(jobs, round_id=0), fast.train(jobs, round_id=0), strict=True):
        assert_allclose(a.update.dense, b.update.dense, atol=1e-6)
        for name, table in a.update.tables.items():
            assert_allclose(table.values, b.update.tables[name].values, atol=1e-6)
            assert_array_equal(table.counts, b.update.tables[name].counts)


def test_what_the_batch_says_of_candidates_has_one_entry_per_row_at_hand():
    net = module()
    bound = Tables(DECLARED).bind(net, LOSS)
    ready = prepare(bound, job(bound, net, said(4), [1, 2, 3]))
    assert ready.shared[CANDIDATES].shape == ready.rows["words"].shape


# --- ranks ----------------------------------------------------------------------------------------


def test_ranks_by_hand():
    logits = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0], [0.0, float("nan"), 1.0]])
    found = ranked(logits, torch.tensor([2, 0, 2]))
    assert_array_equal(found[:, 0], [1, 2, 1])  # ties and what is no number stand ahead
    assert_allclose(found[1, 1], -np.log(3), rtol=1e-6)
    unknown = ranked(logits[:1], torch.tensor([-1]))
    assert_allclose(unknown, [[3, -np.log(3)]], rtol=1e-6)


def test_evaluation_is_over_all_rows_whatever_the_batch():
    net = module()
    bound = Tables(DECLARED).bind(net, LOSS)
    examples = said(3, 30)
    parameters = {name: p.detach().numpy() for name, p in net.named_parameters()}
    with torch.no_grad():
        fields = {name: torch.from_numpy(column) for name, column in examples.fields.items()}
        whole = net.eval()(fields)
    expected = ranked(whole, torch.from_numpy(examples["next"]))
    for batch in (1, 7, 4096):
        assert_allclose(evaluate(net, bound, parameters, examples, batch=batch), expected, 1e-5)
    assert_allclose(evaluate(net, bound, parameters, examples, rank=False), whole, rtol=1e-5)
    assert evaluate(net, bound, parameters, examples.take(slice(0, 0))).shape == (0, 2)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("softmax", "tables", "message"),
    [
        (Softmax("word.weight", target="next"), DECLARED, "not a Table"),
        (Softmax("words.weight", target="nxt"), DECLARED, "'nxt' does not index"),
        (Softmax("before.weight", target="next"), DECLARED, "not indexed by the target"),
        (
            Softmax("biases.weight", target="next"),
            {
                "words.weight": Table("next", "context"),
                "before.weight": Table("context"),
                "biases.weight": Derived("words.weight", np.arange(WORDS), {"bias": "next"}),
            },
            "not a Table",
        ),
    ],
)
def test_a_softmax_that_does_not_fit_is_refused_when_it_is_bound(softmax, tables, message):
    with pytest.raises(ConfigError, match=message) as refused:
        Tables(tables).bind(module(), softmax)
    assert refused.value.hint


def test_a_softmax_has_a_table_and_negatives():
    with pytest.raises(ConfigError, match="no table"):
        Softmax(target="next")
    with pytest.raises(ConfigError, match="negatives = 0"):
        Softmax("words.weight", target="next", negatives=0)


class WholeVocabulary(nn.Module):
    """Multiplies with a layer of its own, which has one output per word of the dictionary."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.out = nn.Linear(WIDTH, words)

    def forward(self, batch):
        return self.out(self.words(batch["context"].clamp(min=0)).mean(1))


def test_a_module_that_gives_one_logit_per_word_of_the_dictionary_is_told():
    data = speakers_like(5, 60, spoken_each=36)
    good = word_task(data, title="", recommended=Recommended(), width=4, hidden=4)
    good.try_out(0)
    wrong = replace(
        good,
        module=lambda: WholeVocabulary(data.sizes["word"]),
        tables=Tables({"words.weight": Table("context", "next")}),
        loss=Softmax("words.weight", target="next"),
    )
    with pytest.raises(ConfigError, match="one logit per row at hand") as refused:
        wrong.try_out(0)
    assert "self.words.weight.T" in refused.value.hint


class Tags(nn.Module):
    """Extreme classification: which of many tags a vector of numbers has."""

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.tags = nn.Embedding(tags, 6)
        self.inner = nn.Linear(4, 6)

    def forward(self, batch):
        return torch.tanh(self.inner(batch["x"])) @ self.tags.weight.T


def test_extreme_classification_needs_a_target_alone():
    rng = np.random.default_rng(0)
    part = Examples({"x": rng.random((20, 4), dtype=np.float32), "tag": rng.integers(0, 500, 20)})
    offsets = np.array([0, 10, 20])
    task = Task(
        name="tags",
        data=ClientData(
            name="tags",
            train=part,
            offsets=offsets,
            test=part,
            test_offsets=offsets,
            sizes={"tag": 500},
        ),
        module=lambda: Tags(500),
        tables=Tables({"tags.weight": Table("tag")}),
        loss=Softmax("tags.weight", target="tag"),
        metric=RankMetric(rows=500, target="tag"),
    )
    task.try_out(0)
    assert set(task.metric.baselines(task.data)) == {"most frequent"}


# --- a group's union ------------------------------------------------------------------------------


def in_groups(size: int = 10, negatives: int = 3) -> UnionSoftmax:
    rng = np.random.default_rng(5)
    held = np.append(rng.random(WORDS - 2) ** 4, [0.0, 1.0])
    alone = SampledSoftmax(
        "words.weight",
        target="next",
        negatives=20,
        weights=np.sqrt(100 * held + 1.0),
        held=held,
        union_negatives=negatives,
    )
    found = alone.in_groups(size)
    assert isinstance(found, UnionSoftmax)
    return found


def test_a_row_is_in_a_union_as_often_as_its_weight_says():
    """Own rows by chance, and negatives of every member; of rows that one member does not have."""
    loss, rng, size, groups = in_groups(), np.random.default_rng(1), 10, 4_000
    assert loss.weights is not None and loss.held is not None
    own = rng.random((groups, size, WORDS)) < loss.held
    there = own[:, 1:].any(1)
    drawn = rng.choice(WORDS, (groups, size * loss.negatives), p=loss.weights)
    there[np.arange(groups)[:, None], drawn] = True
    expected = loss.chance()
    assert_allclose(there.mean(0), expected, atol=4 * 0.5 / np.sqrt(groups))
    assert expected[-1] == 1.0 and 0.0 < expected[-2] < 0.6


def test_own_rows_are_no_candidates_of_a_union_and_others_stand_for_those_that_are_not_there():
    loss, every = in_groups(), np.arange(WORDS, dtype=np.uint64)
    found = loss.log_weights(WORDS, every, np.array([3, 39], np.uint64))
    assert np.isneginf(found[[3, 39]]).all() and np.isfinite(np.delete(found, [3, 39])).all()
    left = np.delete(every, [3, 39])
    assert_allclose(found[left.astype(int)], -np.log(loss.chance()[left]), rtol=1e-6)
    assert found[38] == found[np.isfinite(found)].max()  # which nobody holds


def test_without_negatives_for_it_a_union_is_never_the_candidate():
    alone = SampledSoftmax("words.weight", target="next", weights=np.ones(WORDS), negatives=5)
    assert alone.in_groups(10) is alone and not alone.whole_union
    assert LOSS.in_groups(10) is LOSS


def test_a_digest_of_counts_tells_any_of_them_from_others():
    loss = in_groups()
    assert loss.weights is not None and loss.held is not None
    digests = {loss.counts_digest, in_groups(negatives=4).counts_digest}
    for array in (loss.weights, loss.held):
        array[7] *= 1 + 1e-15 + 1e-12
        digests.add(loss.counts_digest)
    assert len(digests) == 4 and in_groups().counts_digest in digests
    assert LOSS.counts_digest == b""
