"""Training that fails is one client's, or everybody's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tessera.ids import ClientId, RoundId
from tessera.learning.tables.submodel import ModelUpdate, Submodel
from tessera.learning.training.settings import FAILURES
from tessera.simulation.subcohort import TrainingOutcome, failing_alone

ALL = [ClientId(c) for c in range(5)]
SUBMODELS = {c: Submodel(np.zeros(1, np.float32), {}, {}) for c in ALL}


class Together:
    """Trains everybody at once, and fails as a whole if somebody's training does."""

    def __init__(self, failing: Mapping[ClientId, type[Exception]]) -> None:
        self.failing, self.calls = failing, 0

    def __call__(
        self, round_id: RoundId, submodels: Mapping[ClientId, Submodel]
    ) -> TrainingOutcome:
        self.calls += 1
        for client in submodels:
            if client in self.failing:
                raise self.failing[client]("training went wrong")
        outcome = TrainingOutcome(not_finite=len(submodels))
        for client in submodels:
            outcome.updates[client] = ModelUpdate(np.full(1, int(client)), int(round_id))
            outcome.seconds[client] = 0.5
        return outcome


def test_a_lesson_that_nothing_is_wrong_with_is_given_once():
    trainer = Together({})
    outcome = failing_alone(trainer)(RoundId(7), SUBMODELS)
    assert trainer.calls == 1 and not outcome.failed
    assert list(outcome.updates) == ALL and outcome.not_finite == 5


@pytest.mark.parametrize("error", [*FAILURES, FloatingPointError, OverflowError, RecursionError])
def test_whose_training_fails_has_no_update_and_all_others_do(error):
    outcome = failing_alone(Together({ALL[1]: error, ALL[3]: ValueError}))(RoundId(7), SUBMODELS)
    assert outcome.failed == {
        ALL[1]: f"training raised {error.__name__}",
        ALL[3]: "training raised ValueError",
    }
    assert {c: (u.dense.tolist(), u.weight) for c, u in outcome.updates.items()} == {
        ClientId(c): ([c], 7) for c in (0, 2, 4)
    }
    assert outcome.not_finite == 3 and outcome.seconds == dict.fromkeys(outcome.updates, 0.5)


@pytest.mark.parametrize("error", [NameError, AttributeError, TypeError, KeyError, OSError])
def test_a_fault_of_the_program_is_raised(error):
    with pytest.raises(error):
        failing_alone(Together({ALL[1]: error}))(RoundId(7), SUBMODELS)
