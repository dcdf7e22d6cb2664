"""The published table is made from files of results alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tools import leaderboard
from tools.leaderboard import Result, at_share, gap_to_joint, kl_and_forgetting, plain_after, read_result

from holdfast.studies.records import COST_COLUMNS, write_rows
from holdfast.studies.results import Row, write_results
from study_examples import arm_rows, plain_rows

STUDY = """config:
  job: continual/train/abcd_kl
  stages: [{name: a, tokens: 4096, data: [{name: a}]}, {name: b, tokens: 2048, data: [{name: b}]}]
  training: {batch_size: 4}
  optimization: {lr: 0.003, schedule: constant}
  architecture: {preset: tiny, n_layers: 1, n_embd: 16, n_head: 2, block_size: 64}
old: [a]
new: [b, c]
seeds: [0]
arms: {}
drift: true
"""
FULL = {"new_tokens": 100.0, "total_tokens": 100.0}
SEEDS = 5


def asked(row: Row, kl: float, steps: float = 20.0, back: float = 1.0) -> Row:
    return replace(row, costs={**row.costs, "new_kl": kl, "relearn_steps": steps, "relearned": back})


def rows() -> list[Row]:
    """Plain with an early point, an arm of which a quarter is replayed, a null arm, joint training."""
    plain = [replace(row, steps=100 if row.arm == "plain" else 0) for row in plain_rows(SEEDS)]
    early = [replace(row, steps=75, new=row.new + 0.2, old=row.old + 0.1) for row in plain if row.arm == "plain"]
    plain = [asked(row, row.old / 10) if row.arm == "plain" else row for row in plain]
    replayed = arm_rows("replay 5 %", 3.0, 1.5, seeds=SEEDS, steps=100, costs={**FULL, "new_tokens": 75.0})
    worst = [replace(row, steps=75, old=row.old + 0.5) for row in replayed]
    null = arm_rows("forward KL", 3.0, 2.0, seeds=SEEDS, noise=0.1, steps=100, costs=FULL)
    joint = [
        Row("joint", seed, None, 1.2 + 0.1 * seed, 2.5 + 0.1 * seed, steps=200, costs=FULL) for seed in range(SEEDS)
    ]
    ended = [asked(row, 0.2, 60.0, float(row.seed > 0)) for row in replayed]
    return [*plain, *early, *ended, *worst, *(asked(row, 9.0) for row in null), *joint]


def write(path: Path, found: list[Row]) -> None:
    """Results as a study writes them, with what each row was made with: plain tells what it began with."""
    write_results(path, found)
    head, *lines = path.read_text().splitlines()
    told = [line.replace("before,", "plain,").split(",") for line in lines]
    digests = [f"{arm}{rate or 0.003}" for arm, _, rate, *_ in told]
    path.write_text("\n".join([f"{head},digest", *map(",".join, zip(lines, digests, strict=True))]) + "\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One study with results and costs, one without."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(STUDY)
    (tmp_path / "results").mkdir()
    write(tmp_path / "results" / "one.csv", rows())
    cost = dict.fromkeys(COST_COLUMNS, "") | {"arm": "forward KL", "learning_rate": "0.003", "step_seconds": "0.5"}
    costs = [
        {**cost, "seed": f"{seed}", "run": f"r{seed}", "seconds": "720", "machine": "a machine"} for seed in range(5)
    ]
    write_rows(tmp_path / "results" / "one.costs.csv", costs, COST_COLUMNS)
    monkeypatch.setattr(leaderboard, "STUDIES", tmp_path)
    return tmp_path


def result(folder: Path) -> Result:
    return read_result(folder / "one.yaml", folder / "results" / "one.csv")


def test_the_page_has_words_first_then_a_table_with_all_that_stands_beside(folder: Path) -> None:
    page = leaderboard.page(*leaderboard.read_studies(folder / "results"))
    words, head = page.index("replay 5 % keeps"), page.index("| arm | verdict |")
    assert (
        page.index("- **a → b (one)**, 5 seeds. better: replay 5 % (+0.4") < page.index("## a → b (one)") < words < head
    )
    line = next(line for line in page.splitlines() if line.startswith("| replay 5 %"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == "better"
    assert cells[2].startswith("+0.4")
    assert cells[3:6] == ["3.200", "1.700", "2.200"]
    assert cells[8] == "≥ 60 (4 of 5 back)"
    assert cells[9] == "0.200"
    assert cells[-1] == "5 + 0"
    null = next(line for line in page.splitlines() if line.startswith("| forward KL"))
    assert "| 20 | 9.000 | 0.500 |" in null
    assert "30 runs, of which 5 took 1.0 hours by their own clocks" in page
    assert "0.01M parameters on bytes, trained from scratch; a 16 steps, b 8 steps; 4 rows of 64 tokens a step" in page
    assert "- s/step: not measured, these runs were made before that was recorded." in page  # plain's
    assert "on a machine" in page
    assert "two (not run)" in page
    assert "- [one.yaml](../examples/studies/one.yaml): old is a, new is the mean of b and c; 0.01M" in page


def test_plain_is_taken_where_it_had_seen_as_many_new_tokens(folder: Path) -> None:
    found = result(folder)
    total, new = leaderboard.equal_tokens(found)
    better = {name: verdict.better for name, verdict in total.items()}
    # There plain is 0.1 worse at the same rate, and the place of equal new loss is at a higher rate.
    assert new["replay 5 %"].better is not None
    assert better["replay 5 %"] is not None
    assert new["replay 5 %"].better.mean > better["replay 5 %"].mean + 0.1
    assert new["forward KL"].better == better["forward KL"]
    assert at_share(found, 0.3) is None, "plain was not measured near there"


def test_between_two_checkpoints_plain_is_interpolated_in_log_steps() -> None:
    points = [Row("plain", 0, 0.1, 2.0, 4.0, steps=75), Row("plain", 0, 0.1, 3.0, 2.0, steps=100)]
    found = plain_after(points, np.sqrt(0.75))
    assert found is not None
    assert (found.old, found.new, found.steps) == (pytest.approx(2.5), pytest.approx(3.0), 100)
    assert plain_after(points, 0.745) == replace(points[0], steps=100)
    assert plain_after(points, 0.5) is None


def test_kl_predicts_forgetting_of_arms_that_do_not_minimise_it(folder: Path) -> None:
    found = result(folder)
    fit, whole = kl_and_forgetting(found), kl_and_forgetting(found, ())
    assert fit is not None
    assert whole is not None
    assert (fit.runs, fit.arms) == (20, 4)
    assert fit.line > 0.9 > 0.5 > whole.line
    assert whole.runs == 25


def test_the_gap_to_joint_training_is_paired_by_seed(folder: Path) -> None:
    gap = gap_to_joint(result(folder), "replay 5 %")
    assert gap is not None
    assert gap[0].mean == pytest.approx(0.3)
    assert gap[0].low < 0.3 < gap[0].high < 0.35
    assert gap[1].mean == pytest.approx(0.5)


def test_orders_and_a_larger_model_are_put_beside_each_other(folder: Path) -> None:
    for name in ("order-x", "order-y", "one-15m"):
        (folder / f"{name}.yaml").write_text(STUDY)
        write(folder / "results" / f"{name}.csv", rows())
    page = leaderboard.page(*leaderboard.read_studies(folder / "results"))
    assert "The verdict is the same in all 2 orders for replay 5 %, forward KL." in page
    assert "The order of the ways is the same." in page
    assert "Keeps most beyond plain, in each order: replay 5 %, replay 5 %." in page
    less = [row for row in rows() if row.arm != "forward KL"]
    write(folder / "results" / "order-y.csv", less)
    page = leaderboard.page(*leaderboard.read_studies(folder / "results"))
    assert "in all 2 orders for replay 5 %. Not run in every order: forward KL." in page
    assert "| plain × 1 loses | 5.500 | 5.500 |" in page
