"""Forecasts of runs from their files: in `show`, on the page, and from pilots in `plan`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forecast_runs import LENGTH, LEVELS, changes, write_run
from holdfast import registry
from holdfast.cli import main
from holdfast.config import merge
from holdfast.report.forecasts import cheapest, curves, forecast_lines, pilot, planned
from holdfast.report.page import render
from holdfast.report.run_files import Run, open_run
from holdfast.training.config import config_classes
from holdfast.training.resolve import read_options

NUMBER = re.compile(r"at (-?[\d.]+) bits per byte, with 90 % between (-?[\d.]+) and (-?[\d.]+);")
METHODS = {"training": {"batch_size": 8, "methods": ["ewc"]}}
TARGET = {"optimization": {"schedule": "constant", "kl": {"estimator": "forward", "target": 0.1}}}


def run_of(path: Path, until: int, **more: Any) -> Run:
    return open_run(write_run(path, until, **more), curves=False)


def test_an_unfinished_run_is_told_where_its_losses_end(tmp_path: Path) -> None:
    old, new = forecast_lines(run_of(tmp_path / "run", 40))
    assert old.startswith("forecast: lists (old) ends stage arithmetic at ")
    assert new.startswith("forecast: arithmetic (new) ends stage arithmetic at ")
    for said, name, truth in zip((new, old), ("arithmetic", "lists"), changes([LENGTH]), strict=True):
        found = NUMBER.search(said)
        assert found is not None
        end, low, high = map(float, found.groups())
        assert low < LEVELS[name] + truth[0] < high
        assert abs(end - LEVELS[name] - truth[0]) < 0.1


def test_probes_of_fewer_rows_are_compared_with_the_same_rows_at_the_switch(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 40, few=3)
    known = curves(run, planned(run)[0])["lists"]
    _, truth = changes(known.steps)
    assert known.narrow
    assert known.changes == pytest.approx(0.8 * truth)  # what the first three rows show
    assert known.corrected()[3:] == pytest.approx(0.8 * truth[3:] + 0.2 * truth[3])  # all rows, as at step 16


def test_refusals_are_one_sentence(tmp_path: Path) -> None:
    few = forecast_lines(run_of(tmp_path / "few", 12))
    assert few == ["no forecast: 3 measurements since the switch are too few (at least 6)"]
    (method,) = forecast_lines(run_of(tmp_path / "method", 40, options=METHODS))
    assert method == "no forecast: forecasts were not tuned on runs with ewc"
    (target,) = forecast_lines(run_of(tmp_path / "target", 40, options=TARGET))
    assert target.startswith("no forecast: a budget steers the run")
    (fade,) = forecast_lines(
        run_of(tmp_path / "fade", 40, options={"training": {"batch_size": 8, "fade": {"overlap": 0.5}}})
    )
    assert fade == "no forecast: the stage fades in, and forecasts were tuned on hard switches"
    warm = {"optimization": {"lr": 1e-3, "schedule": "cosine_rewarm", "warmup_pct": 0.15}}
    (warming,) = forecast_lines(run_of(tmp_path / "warm", 16, options=warm))
    assert warming == "no forecast: the learning rate is still warming up"
    assert len(forecast_lines(run_of(tmp_path / "warmed", 60, options=warm))) == 2


def test_a_run_that_is_over_or_has_not_switched_has_no_forecast(tmp_path: Path) -> None:
    assert forecast_lines(run_of(tmp_path / "over", LENGTH)) == []
    path = write_run(tmp_path / "first", 0)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    (path / "metrics.jsonl").write_text(json.dumps(lines[0] | {"step": 20}) + "\n")
    first = forecast_lines(open_run(path))
    assert first == ["no forecast: the run has not switched to its second stage yet"]


def test_the_page_and_show_say_it(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    run = run_of(tmp_path / "run", 40)
    assert '<section id="forecast"><h2>Forecast</h2><p>forecast: lists (old)' in render(run)
    monkeypatch.setattr(sys, "argv", ["holdfast", "show", str(run.path)])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "forecast: lists (old) ends stage arithmetic" in capsys.readouterr().out


def test_forecasts_import_no_jax(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 40)
    code = (
        "import sys; from pathlib import Path; from holdfast.report.run_files import open_run; "
        "from holdfast.report.forecasts import forecast_lines; import holdfast.report.summary; "
        "assert 'scipy' not in sys.modules; "
        f"print(len(forecast_lines(open_run(Path({str(path)!r}))))); assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.parametrize("job", [name for name in registry.jobs if registry.jobs.is_built_in(name)])
def test_a_built_in_trainer_declares_the_schedule_of_its_config(job: str) -> None:
    options = read_options(job, merge(config_classes(job), {}))
    assert registry.jobs.get(job).schedule() == options.trainer.own_schedule


def pilots(folder: Path, shares: tuple[float, ...], until: int = 40) -> list[Path]:
    return [write_run(folder / f"pilot-{share:g}", until, replay=share) for share in shares]


def test_pilots_say_where_a_longer_stage_ends_and_the_cheapest_replay(tmp_path: Path) -> None:
    paths = pilots(tmp_path, (0.0, 0.05, 0.25))
    stages = planned(open_run(paths[0]))
    made = [pilot(open_run(path), stages) for path in paths]
    ends = [each.ends["lists"].change for each in made]  # type: ignore[union-attr]  # none is refused
    assert ends[0] > ends[1] > ends[2]
    found = cheapest(made, "lists", ends[1])
    assert found.share == pytest.approx(0.05, abs=1e-3)  # type: ignore[union-attr]  # not refused


def plan(monkeypatch: Any, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["holdfast", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_plan_prints_what_pilots_say(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    paths = pilots(tmp_path, (0.0, 0.05, 0.25))
    given = [part for path in paths for part in ("--pilot", path)]
    assert plan(monkeypatch, paths[0] / "config.yaml", *given, "--budget", 0.6) == 0
    said = capsys.readouterr().out
    assert "pilot pilot-0.05 (replay 0.05), end of stage arithmetic: lists +" in said
    assert re.search(r"budget: lists may rise by 0.6 bits per byte: a replay rate of 0\.\d+ is the cheapest", said)
    assert plan(monkeypatch, paths[0] / "config.yaml", *given[:4], "--budget", 0.6) == 0
    assert (
        "no replay rate for lists by 0.6: pilots with 2 different replay rates are too few" in capsys.readouterr().out
    )
    assert plan(monkeypatch, paths[0] / "config.yaml", *given, "--budget", 5, "--json") == 0
    assert any("outside of what the pilots come to" in line for line in json.loads(capsys.readouterr().out)["pilots"])


def test_wrong_pilots_are_refused(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (path,) = pilots(tmp_path, (0.0,))
    assert plan(monkeypatch, path / "config.yaml", "--budget", 0.3) == 2
    assert "give --pilot RUN" in capsys.readouterr().err
    other = write_run(tmp_path / "other", 40, options={"stages": [
        {"name": name, "tokens": 5120, "data": [{"name": name, "style": "PADDED"}]} for name in ("arithmetic", "lists")
    ]})  # fmt: skip
    assert plan(monkeypatch, path / "config.yaml", "--pilot", other) == 2
    assert "expected lists, then arithmetic" in capsys.readouterr().err
    assert plan(monkeypatch, path / "config.yaml", "--pilot", tmp_path / "none") == 2
