"""The verdict: every word, what it is compared with, families, selection, several tasks, documents."""

import json
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.verdict import BOWED, POWER, RISING, STEEP, STORIES, Documents, share

from holdfast.errors import UserError
from holdfast.studies.results import Row
from holdfast.studies.verdict import MEAN, Judgement, Verdict, judge_rows
from holdfast.studies.words import few_seeds_words, plain_words, sentence, to_json
from study_examples import RATES, arm_rows, plain_rows, study_rows


def only(rows: list[Row], **options) -> Verdict:
    return judge_rows(rows, **options).primary["a"]


@pytest.fixture(scope="module")
def every() -> Judgement:
    return judge_rows(study_rows())


def test_the_words(every: Judgement) -> None:
    assert {name: verdict.word for name, verdict in every.primary.items()} == {
        "kept": "better",
        "lost": "worse",
        "null": "no evidence",
        "slow": "learns less",
        "quick": "learns more",
    }


def test_the_margin_is_a_hundredth_of_what_plain_learns(every: Judgement) -> None:
    assert every.margin == pytest.approx(0.01 * (5.0 - 2.0))
    unknown = judge_rows([row for row in study_rows() if row.arm != "before"])
    assert unknown.margin == pytest.approx(0.025 * (4.0 - 2.0))
    assert "for want of rows `before`" in unknown.margin_source
    assert judge_rows(study_rows(), margin=0.5).margin == 0.5
    # Steps 0 of plain say the same as `before`.
    renamed = [
        Row("plain", row.seed, 0.003, row.old, row.new, steps=0) if row.arm == "before" else row for row in study_rows()
    ]
    assert judge_rows(renamed).margin == every.margin


def test_an_arm_is_compared_on_both_sides(every: Judgement) -> None:
    kept = every.primary["kept"]
    assert kept.better is not None
    assert kept.worse is not None
    assert kept.better.mean == pytest.approx(0.5 - 0.03)
    assert kept.worse.mean == pytest.approx(0.5 + 4 * 0.03)
    assert kept.without_margin == pytest.approx(0.5)
    assert kept.margin_worth == pytest.approx(0.03, rel=1e-4)  # one bit of old for a bit of new, there
    assert kept.at == "rate × 0.322"


def test_beyond_plains_runs_a_rate_is_asked_for(every: Judgement) -> None:
    slow, quick = every.primary["slow"], every.primary["quick"]
    assert slow.better is None
    assert slow.notes == ("learns less than the slowest plain run; run plain at × 0.0333 too",)
    assert quick.notes == (
        "learns more than every plain run",
        "at the fast end of plain's rates: run plain at × 2 too",
    )
    assert quick.worse is None
    edge = only([*plain_rows(), *arm_rows("a", 3.99, 0.1)])
    # Plain might keep more at a rate that was not run, so that nobody is better there.
    assert (edge.word, len(edge.notes)) == ("no evidence", 1)
    assert "the frontier may go on: run plain at × 0.0333 too" in edge.notes[0]
    said = sentence(judge_rows([*plain_rows(), *arm_rows("a", 3.99, 0.1)]))
    assert said.startswith("a: no evidence yet, at the slow end of plain's runs")
    assert "would have been seen" not in said


def bowed_rows(seeds: int = 5) -> list[Row]:
    """Plain at five rates of curves that are steep at first: a chord of them lies far above what plain is between."""
    rows = []
    for seed in range(seeds):
        for rate in (0.03, 0.1, 0.2, 0.5, 1.0):
            new, old = bowed(rate)
            rows.append(Row("plain", seed, rate, old + 0.1 * seed, new + 0.1 * seed))
    return rows


def bowed(rate: float) -> tuple[float, float]:
    far = np.log(rate / 0.03)
    return float(0.1 + 0.75 * np.exp(-1.6 * far)), float(4.3 * np.exp(0.3 * far))


def test_plain_between_two_of_its_rates_is_no_winner_of_its_own_bow() -> None:
    new, old = bowed(0.06)
    found = only([*bowed_rows(), *arm_rows("a", new, old, seeds=5, rate=0.06)])
    assert found.better is not None
    assert found.better.low > 0.1  # above the chord
    assert (found.word, found.notes) == (
        "no evidence",
        ("plain's rates are far apart there and it may be bowed: measure it at rate × 0.0771 too",),
    )
    said = sentence(judge_rows([*bowed_rows(), *arm_rows("a", new, old, seeds=5, rate=0.06)]))
    assert said == f"a: no evidence yet, {found.notes[0]}."
    # What the bow cannot explain is better there too, and beside a rate that was run there is no bow.
    assert only([*bowed_rows(), *arm_rows("a", new, old - 1.5, seeds=5, rate=0.06)]).word == "better"
    there, kept = bowed(0.1)
    assert only([*bowed_rows(), *arm_rows("a", there, kept - 0.3, seeds=5, rate=0.1)]).word == "better"


def test_who_learns_more_within_the_noise_is_not_compared_with_the_fastest_rate_alone() -> None:
    # Beyond × 0.33 plain learns nothing more: which rate has the lowest new loss there is chance.
    rows = plain_rows(5, new=(4.0, 2.001, 2.0), old=(1.0, 4.0, 5.0))
    noise = 0.1 * np.array([-2, 1, 0, 2, -1])
    lucky = [
        replace(row, new=row.new + shift)
        for row, shift in zip(arm_rows("a", 1.95, 4.0, seeds=5, noise=0.05), noise, strict=True)
    ]
    found = only([*rows, *lucky])
    assert found.better is not None
    assert found.better.low > 0.5
    assert found.word == "learns more"
    assert any("within the noise" in note for note in found.notes)
    assert only([*rows, *arm_rows("a", 1.5, 4.0, seeds=5)]).word == "better"


def test_plain_under_another_name_at_a_dominated_rate_is_not_worse() -> None:
    rows = plain_rows(5, new=(4.0, 2.0, 2.5), old=(1.0, 4.0, 5.0))
    same = only([*rows, *arm_rows("a", 2.5, 5.0, seeds=5, noise=0.02)])
    assert same.worse is not None
    assert same.worse.high < -0.5
    assert (same.word, same.notes[-1]) == ("no evidence", "as plain at its own rate × 1, which is dominated")
    # What keeps less than plain at that rate, or learns less, is worse; so is what has no rate of plain's.
    for new, old, rate in ((2.5, 5.2, 0.003), (2.9, 5.0, 0.003), (2.5, 5.0, 0.03)):
        assert only([*rows, *arm_rows("a", new, old, seeds=5, noise=0.02, rate=rate)]).word == "worse"


def test_what_learns_all_there_is_and_keeps_less_is_told_why_it_is_not_worse() -> None:
    found = only([*plain_rows(5), *arm_rows("a", 2.0, 8.0, seeds=5)])
    assert found.better is not None
    assert found.better.high < 0
    assert (found.word, found.notes[-1]) == (
        "no evidence",
        "it keeps less, but no plain run surely learns more, which worse asks for",
    )
    assert not any("worse asks" in note for note in only([*plain_rows(5), *arm_rows("a", 2.5, 8.0, seeds=5)]).notes)


def test_what_learns_and_keeps_more_is_better() -> None:
    found = only([*plain_rows(new=(4.0, 2.0, 3.0)), *arm_rows("a", 1.5, 1.0)])
    assert found.word == "better"
    assert "learns more than every plain run" in found.notes
    assert found.better is not None
    assert found.better.mean == pytest.approx(1.0)  # plain at the rate where it learns most


def test_equal_is_within_the_margin_on_both_sides() -> None:
    flat = plain_rows(old=(1.0, 1.0001, 1.0002))
    assert only([*flat, *arm_rows("a", 3.0, 1.0, noise=0.001)]).word == "equal"
    assert only([*flat, *arm_rows("a", 3.0, 1.0, noise=0.1)]).word == "no evidence"


def test_two_seeds_are_too_few_and_one_is_no_crash() -> None:
    for seeds in (1, 2):
        found = judge_rows([*plain_rows(seeds), *arm_rows("a", 3.0, 1.5, seeds=seeds)])
        assert found.primary["a"].word == "too few seeds"
        told = to_json(found)["arms"]["a"]
        assert [told[name] is None for name in ("low", "high", "p", "mde")] == [seeds == 1] * 4
        json.dumps(to_json(found), allow_nan=False)
        assert "a verdict needs 3, 8 are recommended" in sentence(found)
    assert few_seeds_words(3) is None


def test_dominated_rates_are_named_and_nothing_else_is_said_of_them() -> None:
    rows = [
        *plain_rows(5, new=(4.0, 2.0, 2.1), old=(1.0, 4.0, 5.0)),
        *arm_rows("again", 2.1, 5.0, seeds=5, noise=0.05),
    ]
    found = judge_rows(rows)
    assert found.dominated == {0.003: 0.001}
    assert plain_words(found) == ["plain at rate × 1 is dominated by rate × 0.333"]
    assert [point["dominated_by"] for point in to_json(found)["plain"]] == [None, None, pytest.approx(1 / 3, abs=1e-5)]


def test_a_rate_is_dominated_by_rates_and_not_by_what_stops_early() -> None:
    rows = [replace(row, steps=4) if row.arm == "plain" else row for row in plain_rows(5)]
    early = [replace(row, steps=1, new=row.new - 2.5, old=row.old - 5.5) for row in rows if row.learning_rate == 0.003]
    found = judge_rows([*rows, *early, *arm_rows("a", 3.0, 1.5, seeds=5)])
    assert found.dominated == {}


def test_more_arms_need_more_evidence() -> None:
    tried = arm_rows("a", 3.0, 1.5, noise=0.15)
    assert only([*plain_rows(), *tried]).word == "better"
    nulls = [row for index in range(4) for row in arm_rows(f"null {index}", 3.0, 2.0, noise=0.1)]
    family = only([*plain_rows(), *tried, *nulls])
    assert family.word == "no evidence"
    assert family.better is not None
    assert family.better.level == pytest.approx(0.025 / 5)
    assert family.better.p > 0.025


def test_early_stops_of_plain_belong_to_its_frontier() -> None:
    ends = plain_rows(steps=100)
    early = [
        Row("plain", row.seed, row.learning_rate, 1.2 + 0.1 * row.seed, 2.95 + 0.1 * row.seed, steps=10)
        for row in ends
        if row.arm == "plain"
    ]
    arm = arm_rows("a", 3.0, 1.5, steps=100)
    assert only([*ends, *arm]).word == "better"
    found = judge_rows([*ends, *early, *arm])
    assert found.primary["a"].word == "worse"
    # Of an arm, earlier rows are the worst that it went through.
    worse = [Row("a", row.seed, 0.003, 9.0, 3.5, steps=50) for row in arm]
    assert judge_rows([*ends, *arm, *worse]).measured.arms["a"].beside == {"worst_old": 9.0}


def test_a_configuration_is_chosen_on_other_seeds() -> None:
    rows = plain_rows(6)
    for strength, old in (("1", 1.5), ("2", 1.2), ("3", 0.5)):
        lucky = arm_rows("a", 3.0, old, seeds=6, strength=strength)
        rows += [
            row if strength != "3" or row.seed > 1 else Row("a", row.seed, 0.003, 5.0, row.new, "3") for row in lucky
        ]
    found = judge_rows(rows, selection=[0, 1])
    assert (list(found.primary), dict(found.chosen), found.selection_seeds) == (["a"], {"a": "strength 2"}, (0, 1))
    assert found.measured.seeds == (2, 3, 4, 5)
    by_role = judge_rows([Row(**{**vars(row), "role": "selection" if row.seed < 2 else "judging"}) for row in rows])
    assert by_role.primary == found.primary
    # Without selection the whole grid is one family.
    grid = judge_rows(rows)
    assert list(grid.primary) == ["a, strength 1", "a, strength 2", "a, strength 3"]
    assert any("judged as they are; Holm runs over all configurations of a" in note for note in grid.notes)
    with pytest.raises(UserError, match="at least 2 seeds to choose on and others to judge on"):
        judge_rows(rows, selection=[0])


def test_a_study_ran_only_what_it_chose_on_the_judging_seeds() -> None:
    rows = [*plain_rows(6), *arm_rows("a", 3.0, 1.5, seeds=6, strength="1")]
    rows += arm_rows("a", 3.0, 1.0, seeds=2, strength="2")
    found = judge_rows(rows, selection=[0, 1])
    assert found.measured.arms["a"].strength == "1"
    alone = judge_rows([*rows, *arm_rows("b", 3.0, 1.0, seeds=2)], selection=[0, 1])
    assert "b is not judged: it was run on selection seeds alone" in alone.notes


def tasks(seeds: int = 5) -> list[Row]:
    """Two old tasks, a loss and an accuracy: arm `a` keeps the first and loses the second."""
    loss = {"task": "text"}
    accuracy = {"task": "quiz", "measure": "accuracy"}
    rows = [*plain_rows(seeds, **loss), *arm_rows("a", 3.0, 1.5, seeds=seeds, **loss)]
    for seed in range(seeds):
        shift, new = 0.001 * seed, (4.0, 3.0, 2.0)
        for rate, n, right in zip(RATES, new, (0.9, 0.8, 0.5), strict=True):
            rows.append(Row("plain", seed, rate, right + shift, n + 0.1 * seed, **accuracy))
        rows.append(Row("before", seed, None, 0.95 + shift, 5.0 + 0.1 * seed, **accuracy))
        rows.append(Row("a", seed, 0.003, 0.6 + 1.1 * shift, 3.0 + 0.1 * seed, **accuracy))
    return rows


def test_several_tasks_have_a_verdict_each_and_one_for_their_mean() -> None:
    found = judge_rows(tasks())
    assert [outcome.name for outcome in found.outcomes] == [MEAN, "text", "quiz"]
    words = {name: arms["a"].word for name, arms in found.verdicts.items()}
    assert (words["text"], words["quiz"]) == ("better", "worse")
    # Plain at the base rate loses 5.5 bits and 0.45 of accuracy; each task's change counts as a share of that.
    level = found.primary["a"].without_margin
    assert level == pytest.approx((0.5 / 5.5 - (0.8 - 0.6) / 0.45) / 2, abs=2e-3)
    told = to_json(found)["arms"]["a"]
    assert set(told["tasks"]) == {"text", "quiz"}
    assert told["verdict"] == found.primary["a"].word


def test_a_task_that_plain_does_not_lose_is_left_out_of_the_mean() -> None:
    rows = [*plain_rows(task="text"), *arm_rows("a", 3.0, 1.5, task="text")]
    rows += [*plain_rows(task="kept", old=(0.5, 0.4, 0.3)), *arm_rows("a", 3.0, 0.4, task="kept")]
    found = judge_rows(rows)
    assert [task.name for task, _ in found.outcomes[0].tasks] == ["text"]
    assert any(note.startswith("kept is not in the mean") for note in found.notes)


def test_tasks_without_a_mean_are_one_family() -> None:
    rows = []
    for task in ("text", "code"):  # plain loses nothing of either
        rows += [*plain_rows(task=task, old=(0.5, 0.4, 0.3)), *arm_rows("a", 3.0, 0.2, task=task)]
    found = judge_rows(rows)
    assert [outcome.name for outcome in found.outcomes] == ["text", "code"]
    levels = sorted(arms["a"].better.level for arms in found.verdicts.values() if arms["a"].better is not None)
    assert levels == [pytest.approx(0.0125), pytest.approx(0.025)]


def test_without_rows_before_the_mean_begins_where_plain_keeps_most() -> None:
    rows = [*plain_rows(task="text", before=None), *plain_rows(task="code", before=None)]
    rows += [row for task in ("text", "code") for row in arm_rows("a", 3.0, 1.5, task=task)]
    assert [point["old"] for point in to_json(judge_rows(rows))["plain"]] == pytest.approx([0.0, 0.2, 1.0])


def test_documents_widen_the_interval_and_are_told() -> None:
    random = np.random.default_rng(0)
    rows, means = [], []
    differ = random.normal(0, 0.3, 6)
    for row in [*plain_rows(5), *arm_rows("a", 3.0, 1.5, seeds=5, noise=0.05)]:
        own = row.old + (differ if row.arm == "a" else 0.0) - (differ.mean() if row.arm == "a" else 0.0) + np.arange(6)
        own = own + random.normal(0, 0.01, 6)
        rows += [
            Row(row.arm, row.seed, row.learning_rate, float(loss), row.new, document=f"d{index}")
            for index, loss in enumerate(own)
        ]
        means.append(Row(row.arm, row.seed, row.learning_rate, float(own.mean()), row.new))
    both, seeds = judge_rows(rows), judge_rows(means)
    wide, narrow = both.primary["a"].better, seeds.primary["a"].better
    assert wide is not None
    assert narrow is not None
    assert wide.mean == pytest.approx(narrow.mean)
    assert wide.error > 1.5 * narrow.error
    conditional = "conditional on this held-out set: no interval counts its documents"
    assert (conditional in both.notes, conditional in seeds.notes) == (False, True)
    with pytest.raises(
        UserError, match=r"arm 'a', seed 4, learning_rate 0\.003: column document: document 'd5' is missing"
    ):
        judge_rows(rows[:-1])


def test_one_parent_for_all_seeds_is_told() -> None:
    rows = [*plain_rows(parent="p"), *arm_rows("a", 3.0, 1.5, parent="p")]
    assert any("conditional on this parent" in note for note in judge_rows(rows).notes)
    assert not any("conditional on this parent" in note for note in judge_rows(study_rows()).notes)


def test_bounds_have_no_verdict_and_what_is_incomplete_is_said() -> None:
    rows = [*study_rows(), Row("joint", 0, None, 1.0, 2.0), Row("single", 0, None, 0.9, 1.9)]
    found = judge_rows(rows)
    assert found.measured.bounds == {"joint": (2.0, {"": 1.0}), "single": (1.9, {"": 0.9})}
    assert set(found.primary) == set(judge_rows(study_rows()).primary)
    some = [row for row in study_rows() if (row.arm, row.seed, row.learning_rate) != ("plain", 4, 0.001)]
    less = judge_rows(some)
    assert less.measured.seeds == (0, 1, 2, 3)
    assert "seed 4 is left out: plain at 0.001 is missing" in less.notes
    assert any("plain was run at 3 learning rates; 5 or more are asked for" in note for note in less.notes)


@pytest.mark.parametrize("arm", ["plain", "a"])
def test_the_largest_steps_of_a_run_are_its_end_whatever_others_have(arm: str) -> None:
    rows = [*plain_rows(), *arm_rows("a", 3.0, 1.5)]
    by_seed = [replace(row, steps=100 + row.seed) if row.arm == arm else row for row in rows]
    by_rate = [replace(row, steps=round(1e5 * (row.learning_rate or 0))) if row.arm == arm else row for row in rows]
    told = judge_rows(rows).primary["a"]
    for changed in (by_seed, by_rate):
        found = judge_rows(changed)
        assert found.primary["a"] == told
        differ = len({row.steps for row in changed if row.arm == arm}) > 1
        assert any("the last row of each is its end" in note for note in found.notes) == differ


def test_a_run_that_names_no_steps_has_ended_as_others_that_do() -> None:
    rows = [*plain_rows(), *arm_rows("a", 3.0, 1.5)]
    fastest = max(RATES)
    some = [replace(row, steps=150) if (row.arm, row.learning_rate) == ("plain", fastest) else row for row in rows]
    assert judge_rows(some).primary == judge_rows(rows).primary


def test_interpolations_at_step_0_are_not_what_seeds_begin_with() -> None:
    rows = [*plain_rows(), *arm_rows("a", 3.0, 1.5)]
    between = [replace(row, strength="0.5", new=4.5, steps=0) for row in rows if row.arm == "plain"]
    assert judge_rows([*rows, *between]).margin == judge_rows(rows).margin


def test_rates_that_differ_in_their_last_digits_are_two_configurations() -> None:
    rows = [*plain_rows(), *arm_rows("a", 3.0, 1.5)]
    near = [replace(row, learning_rate=0.00300000001) for row in arm_rows("a", 3.0, 1.0)]
    assert len(judge_rows([*rows, *near]).primary) == 2


def test_an_arm_that_lacks_a_seed_says_so() -> None:
    rows = [*plain_rows(5), *arm_rows("a", 3.0, 1.5, seeds=5)]
    found = judge_rows([row for row in rows if (row.arm, row.seed) != ("a", 3)])
    assert (found.primary["a"].seeds, "a: not run on seed 3" in found.notes) == (4, True)
    assert not any("not run" in note for note in judge_rows(rows).notes)


CONFUSED = [("a", 0, 0.003, 1.0, 3.0, "1"), ("a", 0, 0.003, 1.0, 3.0, "2"), ("a, strength 1", 0, 0.003, 1.0, 3.0)]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (arm_rows("a", 3.0, 1.5), "column arm: no row of the arm 'plain'"),
        ([row for row in plain_rows() if row.learning_rate in (0.003, None)], "column learning_rate: arm 'plain'"),
        ([*plain_rows(), Row("a", 7, 0.003, 1.0, 3.0)], "arm 'a': column seed: none of its seeds"),
        ([*plain_rows(), Row("a", 0, 0.003, 1.0, 3.0, measure="accuracy")], "column measure"),
        ([*plain_rows(), Row("a", 0, 0.003, 1.0, 3.0, bytes=2.0)], "column bytes: 2 here and 1 elsewhere"),
        (
            [*plain_rows(), *(Row(*told) for told in CONFUSED)],
            "column arm: 'a, strength 1' is the name of an arm and of a configuration of another; rename one",
        ),
        (
            [replace(row, learning_rate=(row.learning_rate or 1) * (1 + row.seed)) for row in plain_rows()],
            "of which no seed has two or more in common",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(rows: list[Row], named: str) -> None:
    with pytest.raises(UserError) as caught:
        judge_rows(rows)
    assert named in str(caught.value)


def test_the_sentence(every: Judgement) -> None:
    said = sentence(every)
    assert said.startswith("kept keeps 0.47 ± ")
    for part in (
        "bits per byte more than plain training that learns as much",
        "lost keeps ",
        "quick learns more than every plain run and keeps ",
        "null: no evidence, an effect of ",
        "slow: no verdict, it learns less than the slowest plain run; run plain at × 0.0333 too",
    ):
        assert part in said
    assert sentence(judge_rows(plain_rows())) == "Plain training alone: there is no arm to judge."


def test_simulated_error_rates_and_power() -> None:
    # `python -m benchmarks.verdict` has the whole of it; here a wrong estimate shows at once.
    places = [(STORIES, 0.1), (STORIES, 1.0), (STEEP, 0.5), (BOWED, 0.06), (POWER, 0.05), (RISING, 0.3), (RISING, 1.0)]
    for curve, rate in places:
        found = share(curve, 5, [(rate, 0.0)], 150)
        assert max(found["better"], found["worse"]) <= 0.04
    assert share(STORIES, 5, [(0.1, 0.06)], 50)["better"] > 0.9
    assert share(STORIES, 5, [(0.1, -0.3)], 50)["worse"] > 0.9
    place = (STORIES, 20, [(0.1, 0.0)], 60, Documents(40, 0.06, 0.04))
    assert share(*place)["wrong"] <= 0.05 < share(*place, forget_documents=True)["wrong"]


def test_accuracies_are_told_with_their_own_sign() -> None:
    found = judge_rows([row for row in tasks() if row.task == "quiz"])
    told = to_json(found)
    assert told["arms"]["a"]["old"] == pytest.approx(0.6022)
    assert [point["old"] for point in told["plain"]] == pytest.approx([0.902, 0.802, 0.502])
    assert (told["unit"], told["arms"]["a"]["verdict"]) == ("accuracy", "worse")
