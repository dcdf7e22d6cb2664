"""The console: a bar on a terminal, few lines elsewhere, results always."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.tracking import Event, RunInfo, message
from holdfast.tracking.console import ConsoleSink, Rate

INFO = RunInfo(Path(), total_steps=10, tokens_per_step=100, stages=((0, "prose"), (5, "code")))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(console: Console, seconds_per_step: float = 1.0) -> str:
    clock = Clock()
    sink = ConsoleSink(INFO, console, clock)
    for step in range(1, 11):
        clock.now += seconds_per_step
        sink.log(Event("train", step, 100 * step, {"loss": 1 / step}))
        if step == 5:
            sink.log(Event("validation", step, 500, {"loss": 0.25, "sources": {"prose": 0.5}}))
            scores = {"sst2": {"accuracy": 0.75, "nll": 9.0}, "text[/x]": {"nll": 1.0, "bits_per_byte": 2.0}}
            sink.log(Event("evaluation", step, 500, {"scores": scores, "row": 1, "at": "boundary_1"}))
            sink.log(Event("evaluation", step, 500, {"scores": scores, "row": None, "at": "probe"}))
            sink.log(Event("checkpoint", step, 500))
            sink.log(Event("stage", step, 500, {"name": "code"}))
    sink.log(message("all [bold]done"))
    sink.close()
    sink.close()
    return console.file.getvalue()


def test_plain_lines_are_few_and_carry_the_figures():
    shown = run(Console(file=io.StringIO(), width=200, force_terminal=False))
    lines = shown.splitlines()
    training = [line for line in lines if "loss" in line]
    assert training[0] == "prose · step 1/10 · loss 1.0000"
    assert training[2] == "code · step 8/10 · loss 0.1250 · validation 0.2500 · 100 tokens/s · ETA 0:02"
    assert training[-1].startswith("code · step 10/10")
    assert "after prose (step 5): accuracy sst2 0.75 · bits per byte text[/x] 2" in lines
    assert not any("probe" in line or "checkpoint" in line for line in lines)
    assert lines[-1] == "all [bold]done"
    assert "\x1b" not in shown


@pytest.mark.parametrize(("steps", "seconds_per_step", "most"), [(400, 0.1, 6), (400, 1.0, 6), (20_000, 2.0, 340)])
def test_plain_lines_follow_the_length_of_a_run(steps, seconds_per_step, most):
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    clock = Clock()
    sink = ConsoleSink(RunInfo(Path(), total_steps=steps, tokens_per_step=100), console, clock)
    silent, shown = 0.0, 0
    for step in range(1, steps + 1):
        clock.now += seconds_per_step
        sink.log(Event("progress", step, 100 * step, {"loss": 1.0}))
        lines = len(console.file.getvalue().splitlines()) if step % 20 == 0 or step < 20 else shown
        silent = silent + seconds_per_step if lines == shown else 0.0
        shown = lines
        assert silent <= 121 + 20 * seconds_per_step
    assert 5 <= len(console.file.getvalue().splitlines()) <= most


def test_a_terminal_gets_a_bar_with_messages_above_it():
    shown = run(Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None))
    assert "code · 10/10" in shown
    assert "100%" in shown
    assert "100 tokens/s" in shown
    assert shown.index("after prose (step 5)") < shown.rindex("10/10")
    assert "all [bold]done" in shown


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_odd_terminals(environment):
    shown = run(Console(file=io.StringIO(), width=20, force_terminal=True, _environ=environment))
    assert "all [bold]done" in shown
    assert "\x1b[3" not in shown  # no colours


@pytest.mark.parametrize("terminal", [False, True])
def test_preparation_and_unknown_totals(terminal):
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None)
    clock = Clock()
    sink = ConsoleSink(RunInfo(Path()), console, clock)
    for done in (0, 10, 5000):
        clock.now += 1
        sink.log(Event("prepare", values={"name": "fineweb", "done": done, "total": 5000, "unit": "documents"}))
    sink.log(Event("prepare", values={"name": "stream", "done": 3}))
    sink.log(Event("train", 3, 24, {"loss": None}))
    sink.close()
    assert "preparing fineweb" in console.file.getvalue()
    assert "5k/5k documents" in console.file.getvalue()


def test_rate_forgets_compilation():
    rate = Rate(window_seconds=10)
    assert rate.per_second() is None
    rate.add(0, 0)
    for second in range(100, 130):
        rate.add(second, 50 * (second - 99))
    assert rate.per_second() == 50
