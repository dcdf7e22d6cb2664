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

from fake_runs import NAMES, FakeRun
from holdfast import results
from holdfast.errors import UserError
from holdfast.evaluation.statistics import pareto
from holdfast.report import compare
from holdfast.report.drawing.chart import limits, number, thin, ticks
from holdfast.report.export import better, find_runs
from holdfast.report.groups import (
    Group,
    best_group,
    compute,
    config_differences,
    grouped,
    new_tokens,
    outcomes,
    seed_difference,
)
from holdfast.report.pictures import comparison
from holdfast.report.run_files import Run, open_run, read_results
from holdfast.report.verdicts import Verdict


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


def said(found: compare.Comparison, width: int = 400) -> str:
    """What the terminal shows, on lines so wide that none is broken."""
    console = Console(record=True, width=width, file=io.StringIO())
    compare.print_comparison(found, console)
    return console.export_text()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> compare.Comparison:
    """Two runs of one seed each: one that forgets, and one that keeps everything."""
    root = tmp_path_factory.mktemp("pair")
    FakeRun(root / "plain", kept=0.0, probes=False).go()
    FakeRun(root / "anchor", kept=1.0, lr=2e-3, probes=False).go()
    return compare.compare([root / "plain", root / "anchor"])


def test_it_opens_with_what_was_kept_and_lost(pair: compare.Comparison) -> None:
    [sentence] = pair.sentences()
    first, second = (outcomes(group)["stories"] for group in pair.groups)
    assert sentence.startswith("anchor kept stories, mnli")
    assert "which plain forgot" in sentence
    assert (
        f"stories ended at {number(first.now, 3)} bits per byte with plain ({number(first.after, 3)} after its stage) "
        f"and {number(second.now, 3)} with anchor ({number(second.after, 3)})" in sentence
    )
    assert "mnli at accuracy" in sentence
    assert said(pair).startswith(sentence)
    page = compare.render(pair)
    assert re.findall(r'<p class="lead">(.*?)</p>', page) == [sentence]
    assert page.index('class="lead"') < page.index('id="outcomes"') < page.index('data-chart="curves_bits_per_byte"')


def test_every_other_group_is_told_beside_the_first(folder: Path) -> None:
    found = compare.compare([folder / "plain-*", folder / "anchor-*", folder / "half"])
    assert len(found.sentences()) == 2
    assert all("bits per byte with plain (" in sentence for sentence in found.sentences())
    assert not any("seeds" in sentence for sentence in found.sentences())


def test_runs_without_a_common_task_say_so(folder: Path, tmp_path: Path) -> None:
    FakeRun(tmp_path / "none", evaluate=False).go()
    [sentence] = compare.compare([folder / "half", tmp_path / "none"]).sentences()
    assert "no task in common" in sentence


def test_the_table_has_each_task_in_its_own_unit(pair: compare.Comparison) -> None:
    results_of = {group.name: read_results(group.runs[0].path) for group in pair.groups}
    order = [(group.name, each.task) for group, each in pair.outcomes]
    assert order == [(name, task) for task in NAMES for name in ("plain", "anchor")]
    for group, each in pair.outcomes:
        expected = results_of[group.name]
        column, home = expected["tasks"].index(each.task), NAMES.index(each.task) + 1
        rows = expected["matrix"][each.measure]
        assert each.measure == ("accuracy" if each.task in ("mnli", "sst2") else "bits_per_byte")
        assert (each.before, each.after, each.now) == (rows[home - 1][column], rows[home][column], rows[-1][column])
        if home < 5:
            assert each.change == rows[-1][column] - rows[home][column]
            assert each.interval is not None
            assert each.interval[0] <= each.change <= each.interval[1]


def test_losses_are_never_negated(pair: compare.Comparison, tmp_path: Path) -> None:
    page = compare.render(pair)
    found = {
        name: float(value) for name, value in re.findall(r'data-metric="([\w/]+)" data-value="([^"]+)"', page)
    }  # of the last group
    whole = read_results(pair.groups[-1].runs[0].path)["metrics"]
    for measure in ("bits_per_byte", "nll"):
        assert found[f"{measure}/average"] == -whole[measure]["average"] > 0
        assert found[f"{measure}/backward_transfer"] == -whole[measure]["backward_transfer"]
        assert found[f"{measure}/forgetting"] == whole[measure]["forgetting"]
    assert found["accuracy/average"] == whole["accuracy"]["average"]
    heads = re.findall(r"<th[^>]*>([^<]*, (?:higher|lower) is better)</th>", page)
    assert {head for head in heads if head.startswith("forgetting")} == {"forgetting, lower is better"}
    assert "negative" not in page
    compare.write_latex(pair, tmp_path / "out.tex")
    for line in (tmp_path / "out.tex").read_text().splitlines():
        if line.startswith("bits per byte: at the end"):
            assert "(lower is better)" in line
            assert "$-" not in line


def test_one_seed_has_no_spread_and_no_heading_of_one(pair: compare.Comparison, tmp_path: Path) -> None:
    compare.write_latex(pair, tmp_path / "out.tex")
    for text in (said(pair), compare.render(pair), (tmp_path / "out.tex").read_text()):
        assert "over seeds" not in text
        assert "±" not in text.replace("data-", "")
        assert compare.ONE_SEED in text
    assert "1 seed gives no verdict, 3 may" in compare.ONE_SEED


def test_several_seeds_have_means_and_an_interval_over_them(folder: Path) -> None:
    found = compare.compare([folder / "plain-*", folder / "anchor-*"])
    for text in (said(found), compare.render(found)):
        assert "over seeds" in text
        assert "±" in text
    outcome = outcomes(found.groups[0])["stories"]
    assert outcome.over == "3 seeds"
    assert outcome.spread is not None
    changes = [outcomes(Group("one", (run,)))["stories"].change for run in found.groups[0].runs]
    expected = seed_difference(dict.fromkeys(range(3), 0.0), dict(enumerate(changes)))  # type: ignore[arg-type]
    assert expected is not None
    assert outcome.interval == (expected.low, expected.high)


def test_what_cannot_be_paired_has_no_interval(tmp_path: Path) -> None:
    for name, kept in (("a", 0.0), ("b", 0.9)):
        FakeRun(tmp_path / name, kept=kept, lr=1e-3 + kept, sums=False).go()
    found = compare.compare([tmp_path / "a", tmp_path / "b"])
    texts = [each for _, each in found.outcomes if each.measure == "bits_per_byte"]
    assert texts
    assert all(each.interval is None for each in texts)
    assert not any(each.forgotten or each.kept for each in texts)
    assert "stories ended at" in found.sentences()[0]


def test_what_was_known_before_can_be_forgotten(pair: compare.Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(run: Run) -> list[Verdict]:
        change = 0.02 if run.name == "anchor" else 1.0
        word = "known before" if run.name == "anchor" else "forgotten"
        ends = (change - 0.1, change + 0.1)
        return [
            Verdict("stories", "bits_per_byte", "stories stage", 1.0, 1.0, 1.0 + change, word, "known before", True,
                    "after", change, ends, 64, "documents"),
        ]  # fmt: skip

    monkeypatch.setattr("holdfast.report.groups.verdicts", judged)
    found = compare.Comparison(pair.runs, pair.names, pair.groups)
    assert found.sentences()[0].startswith("anchor kept stories, which plain forgot")
    assert "known before, forgotten" in said(found)
    assert "+1 [0.9, 1.1]" in said(found)
    page = compare.render(found)
    assert "known before, forgotten" in page
    assert "+1 [0.9, 1.1]" in page
    assert "over 64 documents" in page


def test_a_front_is_named_only_where_there_is_one(folder: Path, pair: compare.Comparison) -> None:
    assert not re.search(r'data-chart="plane|data-toggle="front"', compare.render(pair))
    found = compare.compare([folder / "*"])
    for measure in ("bits_per_byte", "accuracy"):
        chart = comparison.plane(found.groups, found.names_of, measure)
        assert chart is not None
        front = [line for line in chart.panels[0].lines if line.name == "front"]
        assert all(len(line.x) > 1 for line in front)
        assert ("front" in chart.legend) == ("front" in chart.note) == bool(front)
        assert f"{better(measure)} is better" in chart.x_label
        assert f"{better(measure)} is better" in chart.panels[0].label
        points = [x for line in chart.panels[0].lines for x in line.x]
        assert min(points) >= 0


def test_one_run_that_surpasses_all_makes_no_front(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare.compare([folder / "plain-*", folder / "half"])
    places = iter([(1.0, 0.0), (2.0, 1.0), (3.0, 2.0), (4.0, 3.0)])
    monkeypatch.setattr(comparison, "new_and_old", lambda *_: next(places))
    chart = comparison.plane(found.groups, found.names_of, "bits_per_byte")
    assert chart is not None
    assert "front" not in chart.legend


def test_matrices_are_framed_along_the_diagonal(pair: compare.Comparison) -> None:
    for measure in ("bits_per_byte", "accuracy"):
        for drawn in comparison.group_heats(pair.groups, measure):
            columns = range(len(drawn.columns))
            framed = [row for column in columns for row, cells in enumerate(drawn.cells) if cells[column].home]
            assert framed == sorted(framed)
            assert len(framed) == len(drawn.columns)


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
