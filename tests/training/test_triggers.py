"""When things happen: evaluations that are asked for, beside those at boundaries."""

from holdfast.curriculum import Curriculum, Stage
from holdfast.data.sampling import Sampling
from holdfast.training.triggers import Intervals, Measurement, Triggers, measurements

CURRICULUM = Curriculum(
    tuple(Stage(name, 40, (Sampling(name),)) for name in ("a", "b")), batch_size=1, block_size=10
)  # 4 steps each


def test_steps_that_are_asked_for_fill_no_row_and_change_no_other_evaluation() -> None:
    usual = measurements(CURRICULUM)
    asked = measurements(CURRICULUM, [6, 4, 2, 8, 99, 6])
    assert {step: asked[step] for step in usual} == usual
    assert {*asked} - {*usual} == {2, 6}
    assert asked[6] == Measurement(("asked",), None)
    assert [*asked] == sorted(asked)


def test_they_are_measured_and_not_saved_unless_evaluation_is_off() -> None:
    def triggers(*, evaluate: bool) -> Triggers:
        return Triggers(CURRICULUM, Intervals(1, None, 100, evaluate=evaluate, asked=(6,)))

    assert triggers(evaluate=True).measures(6) is not None
    assert [triggers(evaluate=True).measures(step) for step in (5, 7)] == [None, None]
    assert not triggers(evaluate=True).saves(6)
    assert triggers(evaluate=False).measures(6) is None
