"""The part "index" of subject-dp: what counts as learnt, and plans that hold."""

from papers import subject_dp_trained as rows
from tessera.privacy.dp.guarantee import Observer, Unit
from tessera.rounds.noise import noise_of
from tessera.runs.training import complete


def test_a_row_is_learnt_if_it_is_closer_to_its_aim_than_to_where_it_began() -> None:
    aim = [1.0, -1.0, 0.5, 0.0]
    assert rows.learnt([0.6, -1.9, 0.0, 0.0], aim) == 2
    assert rows.learnt(aim, aim) == 3  # a row that does not move is not learnt
    assert rows.learnt([0.0] * 4, aim) == 0


def test_both_units_keep_their_epsilon_and_an_index_has_the_users_beside_it() -> None:
    task = rows.shop(0)
    for line in rows.UNIT_LINES:
        plan = complete(line.plan(task.data.clients, 3.0, 0), task)
        ledger = noise_of(plan).setting.ledger(rows.ROUNDS)
        unit = Unit(line.unit)
        found = ledger.guarantee(unit=unit, against=Observer.READERS, delta=rows.DELTA)
        assert 2.9 < found.epsilon <= 3.0
        assert (found.per_user is not None) is (unit is Unit.INDEX)
