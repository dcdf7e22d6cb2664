"""Runs beside each other: seeds grouped, differences told, and nothing called best without cause."""

import csv
import dataclasses
import io
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from fake_runs import FakeRun
from holdfast import results
from holdfast.errors import UserError
from holdfast.evaluation.statistics import pareto
from holdfast.report import compare
from holdfast.report.chart import limits, thin, ticks
from holdfast.report.export import find_runs
from holdfast.report.groups import Group, best_group, compute, config_differences, grouped, new_tokens, seed_difference
from holdfast.report.run_files import open_run, read_results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with three seeds each, one of them much better, and a run with a smaller learning rate."""
    root = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        FakeRun(root / f"plain-s{seed}", seed=seed, kept=0.0, probes=False).go()
        FakeRun(root / f"anchor-s{seed}", seed=seed, kept=0.9, lr=2e-3, probes=False).go()
    FakeRun(root / "half", kept=0.5, steps=20, lr=1e-4, probes=False).go()
    return root


def test_lists_that_a_stages_section_replaces_are_not_compared(folder: Path) -> None:
    run = open_run(folder / "plain-s0")
    assert run.config["optimization"]["kl"]["betas"] == [0.0, 0.1, 0.1, 0.1, 0.1]  # the default, which nothing reads
    plain = {**run.config, "job": "continual/train/abcd"}
    plain["optimization"] = {key: value for key, value in plain["optimization"].items() if key != "kl"}
    other = dataclasses.replace(run, config=plain)
    found = config_differences([run, other])
    assert "job" in found
    assert "optimization/kl/estimator" in found
    assert not {"optimization/kl/betas", "optimization/kl/reference_update_stages", "training/dataset"} & set(found)


def test_seeds_of_one_config_are_one_group(folder: Path) -> None:
    found = compare.compare([folder / "*"])
    assert [(group.name, len(group.runs)) for group in found.groups] == [
        ("anchor (3 seeds)", 3),
        ("half", 1),
        ("plain (3 seeds)", 3),
    ]


def test_two_runs_of_one_seed_stay_apart(folder: Path) -> None:
    run = open_run(folder / "half")
    assert [len(group.runs) for group in grouped([run, open_run(folder / "half")])] == [1, 1]


def test_the_best_is_marked_where_seeds_agree(folder: Path) -> None:
    both = compare.compare([folder / "plain-*", folder / "anchor-*"])
    marked = {f"{measure}/{metric}": [s.best for s in scores] for measure, metric, scores in both.scores()}
    assert marked["bits_per_byte/forgetting"] == [False, True]
    assert marked["bits_per_byte/backward_transfer"] == [False, True]


def test_one_seed_is_never_best(folder: Path) -> None:
    found = compare.compare([folder / "plain-s0", folder / "anchor-s0"])
    assert not any(score.best for _, _, scores in found.scores() for score in scores)
    assert "★" not in compare.render(found)


def test_seeds_that_disagree_mark_nothing() -> None:
    assert not seed_difference({0: 1.0, 1: 1.0, 2: 1.0}, {0: 1.5, 1: 1.6, 2: 0.9}).real  # type: ignore[union-attr]
    assert seed_difference({0: 1.0}, {0: 2.0}) is None
    assert seed_difference({0: 1.0, 1: 1.0}, {2: 2.0, 3: 2.0}) is None


def test_the_interval_over_seeds_is_students(folder: Path) -> None:
    difference = seed_difference({0: 0.0, 1: 0.0, 2: 0.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert difference is not None
    assert difference.mean == 2.0
    assert difference.high - difference.mean == pytest.approx(4.303 / 3**0.5)


def test_best_needs_to_beat_every_other_group(folder: Path) -> None:
    groups = {
        name: Group(name, tuple(open_run(folder / f"{name}-s{seed}") for seed in range(3)))
        for name in ("plain", "anchor")
    }
    alone = Group("half", (open_run(folder / "half"),))
    assert best_group([groups["plain"], groups["anchor"]], "nll", "forgetting") == 1
    assert best_group([groups["plain"], groups["anchor"], alone], "nll", "forgetting") is None


def test_unequal_data_is_flagged(folder: Path) -> None:
    found = compare.compare([folder / "*"])
    warnings = {group.name: group.warnings for group in found.groups}
    assert warnings["plain (3 seeds)"] == warnings["anchor (3 seeds)"] == ()
    assert warnings["half"] == ("0.50x the new-data tokens",)
    assert "0.50x the new-data tokens" in compare.render(found)


def test_an_unfinished_seed_does_not_count_while_others_are_finished(folder: Path, tmp_path: Path) -> None:
    whole, cut = FakeRun(tmp_path / "x-s0", seed=0).go(), FakeRun(tmp_path / "x-s1", seed=1).go(90)
    [group] = grouped([open_run(whole.path), open_run(cut.path)])
    assert list(group.values("nll", "learning_accuracy")) == [0]
    assert group.warnings == ("unfinished",)


def test_new_tokens_follow_the_curriculum(folder: Path) -> None:
    run = open_run(folder / "plain-s0")
    curriculum = run.timeline.curriculum
    assert curriculum is not None
    expected = sum(
        weight for step in range(curriculum.total_steps) for source, weight in curriculum.weights_at(step).items()
        if source.name != "stories"
    )  # fmt: skip
    assert new_tokens(run) == pytest.approx(expected * curriculum.tokens_per_step)
    assert compute(run) is None  # no checkpoint tells the model


def test_differences_inside_stages_are_told_by_themselves(folder: Path) -> None:
    found = config_differences([open_run(folder / name) for name in ("plain-s0", "plain-s1", "half")])
    assert set(found) == {"training/seed", "optimization/lr", *(f"stages/{index}/tokens" for index in range(5))}


def test_an_unfinished_run_is_flagged(folder: Path, tmp_path: Path) -> None:
    FakeRun(tmp_path / "cut").go(90)
    found = compare.compare([folder / "half", tmp_path / "cut"])
    assert "unfinished" in {group.name: group.warnings for group in found.groups}["cut"]


def test_the_page_has_everything(folder: Path) -> None:
    text = compare.render(compare.compare([folder / "*"]))
    assert set(re.findall(r'data-chart="(\w+)"', text)) == {
        "plane_bits_per_byte",
        "plane_accuracy",
        "curves_accuracy",
        "curves_bits_per_byte",
        "curves_nll",
    }
    assert "half minus anchor (3 seeds)" in text
    assert "optimization/lr" in text
    assert not re.search(r"https?://(?!www\.w3\.org)", text)


def test_the_terminal_names_what_differs(folder: Path) -> None:
    console = Console(record=True, width=240, file=io.StringIO())
    compare.print_comparison(compare.compare([folder / "plain-s0", folder / "half"]), console)
    text = console.export_text()
    assert "optimization/lr" in text
    assert "new-data tokens" in text
    assert "logging" not in text


def test_the_terminal_has_a_line_a_group(folder: Path) -> None:
    console = Console(record=True, width=80, file=io.StringIO())
    found = compare.compare([folder / "plain-*", folder / "anchor-*"])
    compare.print_comparison(found, console)
    text = console.export_text()
    assert "…" not in text  # nothing is cut
    assert "training/seed" not in text  # both have the same seeds
    rates = {
        group.name: value for group, value in zip(found.groups, found.differences()["optimization/lr"], strict=True)
    }
    assert rates == {"anchor (3 seeds)": "0.002", "plain (3 seeds)": "0.001"}
    whole = compare.compare([folder / "*"])
    seeds = zip(whole.groups, whole.differences()["training/seed"], strict=True)
    assert {group.name: value for group, value in seeds}["half"] == "0"


def test_csv_and_frame_hold_the_results(folder: Path, tmp_path: Path) -> None:
    found = compare.compare([folder / "*"])
    compare.write_csv(found, tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    frame = results.load(folder / "*")
    assert list(frame.columns) == list(rows[0])
    assert len(frame) == len(rows)
    expected = read_results(folder / "half")
    column = expected["tasks"].index("mnli")
    mine = [r for r in rows if (r["run"], r["task"], r["metric"]) == ("half", "mnli", "accuracy")]
    assert [float(r["value"]) for r in mine] == [row[column] for row in expected["matrix"]["accuracy"]]
    assert all(float(r["low"]) <= float(r["value"]) <= float(r["high"]) for r in mine)
    whole = frame[(frame.run == "half") & (frame.metric == "nll/forgetting")]
    assert whole.value.item() == expected["metrics"]["nll"]["forgetting"]
    assert set(frame[frame.run == "plain-s1"].seed) == {1}


def test_latex_compiles_in_principle(folder: Path, tmp_path: Path) -> None:
    compare.write_latex(compare.compare([folder / "plain-*", folder / "anchor-*"]), tmp_path / "out.tex")
    text = (tmp_path / "out.tex").read_text()
    assert text.count("{") == text.count("}")
    columns = {line.count("&") for line in text.splitlines() if line.endswith("\\\\")}
    assert columns == {2}
    assert "\\textbf{$" in text
    assert "95 \\%" in text


def test_mistakes_are_told(folder: Path) -> None:
    with pytest.raises(UserError, match="no run there"):
        find_runs([folder / "nothing*"])
    with pytest.raises(UserError, match="at least two"):
        compare.compare([folder / "half"])
    assert len(find_runs([folder / "half", folder / "*"])) == 7


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20))
def test_the_front_is_what_no_other_surpasses(points: list[tuple[int, int]]) -> None:
    front = pareto(points)
    surpassed = [p for p in points if any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)]
    assert set(front) == set(points) - set(surpassed)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=500), st.integers(4, 40))
def test_thinning_keeps_the_extremes(values: list[float | None], most: int) -> None:
    x, y = thin(list(range(len(values))), values, most)
    assert len(x) <= max(most, len(values) if len(values) <= most else 0)
    assert x == sorted(x)
    known = [value for value in values if value is not None]
    if known:
        kept = [value for value in y if value is not None]
        assert (min(kept), max(kept)) == (min(known), max(known))


@settings(deadline=None, max_examples=100)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 12))
@example(-900719926.0, 1e-6, 5)
def test_ticks_lie_inside_and_are_few(low: float, width: float, wanted: int) -> None:
    found = ticks(low, low + width, wanted)
    assert len(found) <= wanted + 2
    assert all(low - width * 1e-3 - 1e-9 <= tick <= low + width * 1.001 + 1e-9 for tick in found)
    assert limits(found)[0] <= min(found, default=0.0)
