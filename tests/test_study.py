"""The study's estimate: an arm is better than learning less, and not because of noise or of a curve drawn by chords."""

import doctest
import subprocess
import sys
from pathlib import Path

import frontier as estimator
import numpy as np
import pytest
import study
from frontier import Plain, detectable, frontier, gaps, judge
from scipy import stats
from scipy.interpolate import PchipInterpolator

ROOT = Path(__file__).resolve().parents[1]
RATES = np.array([0.01, 0.1, 1.0])


def plain(new: list[float], old: list[float], *, seeds: int = 3, before: float = 5.0) -> Plain:
    """Seeds that differ by a constant in both losses."""
    shift = 0.1 * np.arange(seeds)[:, None]
    return Plain(RATES, np.array(new) + shift, np.array(old) + shift, before + shift[:, 0])


def arm(new: float, old: float, *, seeds: int = 3, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    shift = 0.1 * np.arange(seeds)
    return new + shift, old + shift + noise * (np.arange(seeds) - (seeds - 1) / 2)


@pytest.mark.parametrize("module", [estimator, study])
def test_its_examples_are_true(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_the_frontier_is_linear_in_the_logarithm_of_the_rate() -> None:
    new, old = np.array([4.0, 3.0, 2.0]), np.array([1.0, 2.0, 6.0])
    assert frontier(RATES, new, old, 4.5) == (1.0, 0.01)
    assert frontier(RATES, new, old, 4.0) == (1.0, 0.01)
    # A quarter of the way from 3 to 2 is 10^-0.75, not 0.1 + 0.9 / 4.
    lowest = frontier(RATES, new, old, 2.75)
    assert lowest is not None
    assert lowest == (pytest.approx(3.0), pytest.approx(10**-0.75))
    assert frontier(RATES, new, old, 2.0) == (6.0, 1.0)
    assert frontier(RATES, new, old, 1.9) is None


def test_a_faster_rate_that_keeps_more_is_the_frontier_too() -> None:
    # The new loss rises again at the end: both ends of what is allowed count.
    assert frontier(RATES, np.array([4.0, 2.0, 3.0]), np.array([5.0, 4.0, 3.0]), 2.5)[0] == pytest.approx(3.5)  # type: ignore[index]
    found = plain([4.0, 2.0, 3.0], [1.0, 4.0, 5.0])
    assert found.dominated() == {1.0: 0.1}
    assert plain([4.0, 3.0, 2.0], [1.0, 2.0, 3.0]).dominated() == {}


def test_the_margin_is_a_hundredth_of_what_plain_learns() -> None:
    assert plain([4.0, 3.0, 2.0], [1.0, 2.0, 3.0], before=5.0).margin == pytest.approx(0.01 * (5.0 - 2.0))


def test_gaps_are_taken_on_both_sides_of_the_arm() -> None:
    curve = plain([4.0, 3.0, 2.0], [1.0, 2.0, 6.0])
    new, old = arm(3.0, 1.5)
    assert gaps(curve, new, old, 0.0) == pytest.approx([0.5] * 3)
    assert gaps(curve, new, old, 0.03) == pytest.approx([0.5 - 0.03] * 3)
    assert gaps(curve, new, old, -0.03) == pytest.approx([0.5 + 4 * 0.03] * 3)


def test_no_seed_is_dropped_whose_own_curve_does_not_reach_the_arm() -> None:
    curve = plain([4.0, 3.0, 2.0], [1.0, 2.0, 6.0])
    new, old = arm(2.15, 5.0)
    new[0] = 1.95  # below everything of its seed, while the mean is not
    found = gaps(curve, new, old, 0.0)
    assert found is not None
    assert found == pytest.approx([1.0, 0.4, 0.4])


def test_an_arm_that_learns_more_is_compared_where_plain_learns_most() -> None:
    curve = plain([4.0, 2.0, 3.0], [1.0, 2.0, 6.0])
    new, old = arm(1.5, 1.0, noise=0.01)
    assert gaps(curve, new, old, 0.0) == pytest.approx([1.01, 1.0, 0.99])
    assert gaps(curve, new, old, -0.03) is None
    verdict = judge(curve, {"more": (new, old)})["more"]
    assert (verdict.words, verdict.worse) == ("better", None)
    assert verdict.notes == ("learns more than every plain run",)
    # It learns more and keeps less: that is another point of the trade, and not worse.
    assert not judge(curve, {"more": arm(1.5, 3.0, noise=0.01)})["more"].words.startswith("worse")


def test_beyond_the_smallest_rate_there_is_no_verdict_but_the_rate_to_run() -> None:
    curve = plain([4.0, 3.0, 2.0], [1.0, 2.0, 6.0])
    verdicts = judge(curve, {"less": arm(4.2, 0.1), "edge": arm(3.99, 0.1), "in": arm(3.9, 0.1), "end": arm(1.98, 5.0)})
    assert verdicts["less"].words == "no verdict: learns less than plain at × 0.01; run plain at × 0.003"
    assert verdicts["edge"].words == "no verdict: the frontier may go on below × 0.01; run plain at × 0.003"
    assert verdicts["less"].better is None
    assert verdicts["in"].words == "better"
    assert verdicts["end"].notes == ()
    assert judge(curve, {"end": arm(1.96, 5.0)})["end"].notes == (
        "learns more than every plain run",
        "at the end of plain's rates: run plain at × 2 too",
    )


def test_words_follow_the_intervals() -> None:
    curve = plain([4.0, 3.0, 2.0], [1.0, 2.0, 6.0])
    flat = plain([4.0, 3.0, 2.0], [1.0, 1.0001, 1.0002])
    assert judge(curve, {"a": arm(3.0, 1.5, noise=0.01)})["a"].words == "better"
    assert judge(curve, {"a": arm(3.0, 2.5, noise=0.01)})["a"].words == "worse"
    assert judge(curve, {"a": arm(3.0, 2.0, noise=0.01)})["a"].words.startswith("no evidence")
    assert judge(flat, {"a": arm(3.0, 1.0, noise=0.001)})["a"].words == "equal"
    two = plain([4.0, 3.0, 2.0], [1.0, 2.0, 6.0], seeds=2)
    assert judge(two, {"a": arm(3.0, 1.5, seeds=2, noise=0.01)})["a"].words == "no verdict below 3 seeds"


def test_the_smallest_effect_that_would_have_been_seen_is_said() -> None:
    curve = plain([4.0, 3.0, 2.0], [1.0, 2.0, 6.0])
    verdict = judge(curve, {"a": arm(3.0, 2.0, noise=0.5)})["a"]
    assert verdict.better is not None
    assert verdict.better.error == pytest.approx(0.5 / 3**0.5)
    seen = (stats.t.ppf(0.975, 2) + stats.t.ppf(0.8, 2)) * 0.5 / 3**0.5
    assert detectable(verdict.better.error, 3, 0.025) == pytest.approx(seen)
    assert verdict.words.startswith(f"no evidence; an effect of at least {seen:.2f} would have been seen")
    assert verdict.without_margin == pytest.approx(0.0)
    assert verdict.margin_worth == pytest.approx(0.03, rel=1e-4)  # one bit of old for a bit of new, there


def test_more_arms_need_more_evidence() -> None:
    curve = plain([4.0, 3.0, 2.0], [1.0, 2.0, 6.0])
    tried = arm(3.0, 1.5, noise=0.15)
    assert judge(curve, {"a": tried})["a"].words == "better"
    family = judge(curve, {"a": tried, **{f"null {i}": arm(3.0, 2.0, noise=0.1) for i in range(4)}})
    assert family["a"].words.startswith("no evidence")
    assert family["a"].better is not None
    assert family["a"].better.level == pytest.approx(0.025 / 5)


# Plain training on tinystories to shakespeare, seed 0, and noise of about its size.
CURVE_RATES = np.array([0.03, 0.1, 0.2, 0.5, 1.0])
NEW = PchipInterpolator(np.log(CURVE_RATES), [3.180, 2.973, 2.906, 2.853, 2.847])
OLD = PchipInterpolator(np.log(CURVE_RATES), [2.576, 2.700, 2.766, 2.885, 3.039])


def by_chords(curve: Plain, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """The former estimate: three rates joined by straight lines in the new loss."""
    found = []
    for seed in range(len(new)):
        points = sorted((curve.new[seed, i], curve.old[seed, i]) for i in (0, 2, 4))
        found.append(np.interp(new[seed], *zip(*points, strict=True)) - old[seed])
    return np.array(found)


def alarms(rate: float, gain: float, *, seeds: int = 5, studies: int = 200) -> dict[str, float]:
    """How often simulated studies call an arm that is plain training at some rate, but for a gain, better or worse."""
    random = np.random.default_rng(0)
    counts = {"chords": 0, "better": 0, "worse": 0}
    for _ in range(studies):
        # All runs of a seed share what their parent brings.
        parents = random.normal(0, 0.05, (seeds, 1)), random.normal(0, 0.07, (seeds, 1))
        logs = np.log([*CURVE_RATES, rate])
        new = NEW(logs) + parents[0] + random.normal(0, 0.01, (seeds, 6))
        old = OLD(logs) + parents[1] + random.normal(0, 0.02, (seeds, 6))
        curve = Plain(CURVE_RATES, new[:, :5], old[:, :5], 4.3 + parents[0][:, 0])
        tried = new[:, 5], old[:, 5] - gain
        counts["chords"] += estimator.estimate(by_chords(curve, *tried), 0.025).low > 0
        words = judge(curve, {"arm": tried})["arm"].words
        counts["better"] += words == "better"
        counts["worse"] += words == "worse"
    return {name: count / studies for name, count in counts.items()}


def test_an_arm_that_is_plain_training_is_seldom_called_better_where_chords_did_so_mostly() -> None:
    found = alarms(rate=0.3, gain=0.0)
    assert found["chords"] > 0.5
    assert found["better"] <= 0.025
    assert found["worse"] <= 0.025


def test_plain_training_at_a_rate_that_gains_nothing_is_not_called_worse() -> None:
    found = alarms(rate=1.0, gain=0.0)
    assert max(found["better"], found["worse"]) <= 0.025


def test_a_gain_is_found() -> None:
    assert alarms(rate=0.3, gain=0.1, studies=50)["better"] > 0.9


def test_only_what_has_no_row_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int, str, float]] = []

    def run_arm(out: Path, curriculum: str, seed: int, name: str, rate: float) -> list[study.Row]:
        ran.append((curriculum, seed, name, rate))
        return [
            study.Row(curriculum, "before", seed, 0.0, 2.0, 4.0),
            study.Row(curriculum, name, seed, rate, 2.5 - rate, 3.0 + 0.1 * seed),
        ]

    monkeypatch.setattr(study, "run_arm", run_arm)
    path = tmp_path / "study.csv"
    study.run_missing(path, tmp_path, seeds=2)
    assert len(ran) == 2 * sum(len(study.arms_of(curriculum)) for curriculum in study.CURRICULA)
    assert ran[0] == ("tinystories to shakespeare", 0, "plain", 0.003)
    rows, text = study.read_rows(path), path.read_text()
    ran.clear()
    study.run_missing(path, tmp_path, seeds=2)
    assert ran == []
    lost = study.Row("fineweb to sst2", "forward KL", 1, 0.003, 2.497, 3.1)
    assert lost in rows
    study.write_rows(path, [row for row in rows if row != lost])
    study.run_missing(path, tmp_path, seeds=2)
    # It branches from the plain run of its seed, which must be there.
    assert ran == [("fineweb to sst2", 1, "plain", 0.003), ("fineweb to sst2", 1, "forward KL", 0.003)]
    assert path.read_text() == text


def test_a_seed_counts_when_all_its_runs_are_there() -> None:
    curriculum = "fineweb to sst2"
    rows = [
        study.Row(curriculum, name, seed, rate, 3.0 + seed, 1.0 - rate)
        for seed in range(3)
        for name, rate in [("before", 0.0), *study.arms_of(curriculum)]
    ]
    found = study.study_of(rows[:-1], curriculum)
    assert found is not None
    assert found.plain.new.shape == (2, 6)
    assert found.plain.new[0] == pytest.approx(1.0 - study.BASE_RATE * found.plain.rates)
    assert study.study_of(rows[:20], curriculum) is None


def test_the_page_has_the_tables_that_the_rows_give() -> None:
    script = ROOT / "examples" / "study.py"
    done = subprocess.run([sys.executable, script, "--table"], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line]
    page = (ROOT / "docs" / "study.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 20
    for line in lines:
        assert line in page
