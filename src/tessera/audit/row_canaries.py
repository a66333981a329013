"""Canaries that are rows: what shows of a row in all the other words that a client sends.

A canary is a client that has a row in its examples or does not. The row stands in the histories of
others' examples, as many as the client's cut leaves it in, and turns their gradients round; and as
many examples are aimed at it as stay. All that is looked at is the one weight of the dense part:
the row's own words are not. Cut, clip, rounding and noise are those of a plan's training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from tessera.audit.canaries import Guessing, Mask, Values, likelihood_ratios
from tessera.audit.canary_training import flipped
from tessera.crypto.entropy import Entropy
from tessera.crypto.noise import discrete_gaussian
from tessera.crypto.prg import Label
from tessera.data.examples import NONE, Examples
from tessera.ids import SERVER, RoundId
from tessera.learning.bound_model import Table
from tessera.learning.module_tables import Tables
from tessera.learning.tables.submodel import ModelUpdate, Submodel, TablePart
from tessera.learning.training.local import Job
from tessera.learning.training.row_cut import RowCut
from tessera.learning.training.vectorised.noisy import NoisyVectorised
from tessera.plan import NoiseFrom, Plan
from tessera.privacy.dp.mechanism import GaussianNoise
from tessera.rounds import dp
from tessera.rounds.clipped_vector import clipped_vector, noise_stream
from tessera.runs.noisy import index_steps

TABLE: Final = "rows"
PLACES: Final = 1
"""Of a history: then an example aimed at a row costs two, and most is left for histories."""
STEEP: Final = 1e4


class TurnedRound(nn.Module):
    """One weight; an entry in its history turns an example's gradient round."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, 1)
        self.weight = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.rows.weight)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        sign = torch.where(batch["history"].ge(0).any(-1), 1.0, -1.0)
        return sign * self.weight


def steep_loss(output: Tensor, batch: object) -> Tensor:
    return -STEEP * output


@dataclass(frozen=True, slots=True)
class SeenRows:
    """(releases, canaries): the weight's moves, 1 apart with and without the row, 0 without it."""

    moved: Values = field(repr=False)
    present: Mask = field(repr=False)
    noise: float

    def guesses(self) -> Guessing:
        one = GaussianNoise(max(self.noise, 1e-6))
        return Guessing(likelihood_ratios(self.moved, one), self.present)


def observe_rows(
    plan: Plan,
    *,
    unknown: int,
    canaries: int,
    rounds: int,
    entropy: Entropy,
    on_the_row_alone: bool = False,
) -> SeenRows:
    """Half of the clients have the row; noise of `unknown` sources is left to the observer.

    `on_the_row_alone`: noise as a claim about the row's own words would have it, and none on the
    dense part.
    """
    section = dp.section(plan)
    cut = RowCut.of(section.per_row, PLACES)
    present = flipped(entropy, canaries)
    worlds = (examples(cut, with_row=False), examples(cut, with_row=True))
    rows = 1 + cut.histories + 1
    module = TurnedRound(rows)
    bound = Tables({"rows.weight": Table("item", "history")}).bind(module)
    every = np.arange(rows, dtype=np.uint64)
    part = TablePart(every, np.zeros((rows, 1), np.float32))
    submodel = Submodel(np.zeros(1, np.float32), {TABLE: part}, {TABLE: every})
    assert plan.training is not None
    learner = NoisyVectorised(module, bound, steep_loss, plan.training, index_steps(plan))
    local = section.trust is NoiseFrom.LOCAL

    def trained(which: Mask, at: int) -> list[ModelUpdate]:
        jobs = []
        for canary, there in enumerate(which):
            secret = entropy.secret(Label.CANARIES, "row", at, canary)
            own = cut.apply(bound, worlds[int(there)], secret)
            jobs.append(Job(canary, submodel, own, coins=secret))
        return [found.update for found in learner.train(jobs, round_id=0)]

    moved = np.zeros((rounds, canaries))
    # As many examples as stay: no coin changes them, and where others add noise nothing else does.
    both = [] if local else trained(np.array([False, True]), 0)
    for at in range(rounds):
        if local:
            moved[at] = [float(update.dense[0]) for update in trained(present, at)]
        else:
            hidden = 0 if on_the_row_alone else unknown
            moved[at] = released(plan, both, present, hidden, at, entropy)
    # Without the row h examples are turned the other way; with it they and those aimed at it.
    apart = (2 * cut.histories + cut.targets) * section.example_clip
    deviation = section.noise * section.clip * np.sqrt(unknown / dp.noise_setting(plan).sources)
    return SeenRows(
        (moved + cut.histories * section.example_clip) / apart, present, float(deviation / apart)
    )


def examples(cut: RowCut, *, with_row: bool) -> Examples:
    """As many as stay: aimed at others with the row in their history, and aimed at the row."""
    others = np.arange(1, 1 + cut.histories)
    history = np.full((cut.histories, PLACES), 0 if with_row else NONE)
    if with_row:
        beside = np.full((cut.targets, PLACES), 1 + cut.histories)
        others = np.concatenate([others, np.zeros(cut.targets, np.int64)])
        history = np.concatenate([history, beside if cut.places else np.full_like(beside, NONE)])
    return Examples({"item": others.astype(np.int64), "history": history.astype(np.int64)})


def released(
    plan: Plan, both: list[ModelUpdate], present: Mask, unknown: int, at: int, entropy: Entropy
) -> Values:
    """The dense part's weight as an observer has it, of each client by itself."""
    vector = plan.noisy_vector
    assert vector is not None
    every = np.arange(len(both[0].tables[TABLE].values), dtype=np.uint64)
    coins = entropy.secret(Label.CANARIES, "coins", at)
    sent = [
        int(clipped_vector(vector, update, {TABLE: every}, {TABLE: 1}, 1, coins).dense[0])
        for update in both
    ]
    values = np.where(present, sent[1], sent[0]).astype(np.float64)
    source = discrete_gaussian(vector.deviation)
    for other in range(unknown):
        secret = entropy.secret(Label.CANARIES, "noise", at, other)
        stream = noise_stream(secret, RoundId(at), SERVER, str(other))
        values += source.sample(stream, len(values))
    return values / vector.scale
