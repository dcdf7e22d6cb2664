"""`holdfast study`: many runs of one question, from one file."""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

from holdfast.cli.options import Out
from holdfast.cluster.resources import Resources
from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.studies.graph import Cost, StudyRun
    from holdfast.studies.runner import Progress, State

app = typer.Typer(no_args_is_help=True, help="Run a study of ways to train: plan, run, status.")

Files = Annotated[List[Path], typer.Argument(metavar="STUDY...", help="YAML files of studies.")]


@app.command()
def plan(studies: Files, out: Out = Path("runs")) -> None:
    """Show the runs of a study, what they share, and what is left to do.

    Trains nothing.

    Example: holdfast study plan examples/studies/stories-shakespeare.yaml
    """
    from rich.console import Console

    from holdfast.cli.options import table
    from holdfast.studies.graph import cost
    from holdfast.studies.records import is_finished

    console = Console(highlight=False)
    for path in studies:
        progress, state = _look(path, out, whole=True)
        arms: dict[str, list[int]] = {}
        for run in state.runs:
            counts = arms.setdefault(run.cell.arm, [0, 0, 0, 0])
            for index, value in enumerate((1, run.steps, run.shared_steps, run in state.pending)):
                counts[index] += value
        rows = [(arm, *(f"{count:,}" for count in counts)) for arm, counts in arms.items()]
        served = {cell.arm for run in state.runs for cell in run.cells} - {*arms}
        rows += [(arm, "0", "0", "0", "0") for arm in sorted(served)]
        console.print(table(("arm", "runs", "steps", "shared steps", "runs left"), rows, title=progress.study.name))
        untrained = [run for run in state.pending if not is_finished(progress.folder / run.name)]
        whole, left = cost(state.runs), cost(untrained)
        console.print(
            f"{whole.runs} runs, {whole.steps:,} steps; one by one from scratch {whole.alone:,}: × {whole.ideal:.2f}"
        )
        for arm in state.chosen:
            console.print(f"{arm}: {_shown(state, arm)} is judged, chosen among {len(progress.graph.choices(arm))}")
        open_ = [
            f"{arm} ({len(progress.graph.choices(arm))})" for arm in progress.graph.grids if arm not in state.chosen
        ]
        if open_:
            console.print(f"one configuration is chosen on the selection seeds, then judged, of: {', '.join(open_)}")
        time = _time_left(progress, state, left) if left.runs else ""
        console.print(f"left: {left.runs} runs, {left.steps:,} steps{time}")
        measured = len(state.pending) - len(untrained)
        if measured:
            console.print(f"{measured} finished runs are to be measured afterwards")


def _shown(state: "State", arm: str) -> str:
    choice = state.chosen[arm]
    strength = "" if choice.strength is None else f", strength {choice.strength:g}"
    return f"rate × {choice.rate:g}{strength}"


def _time_left(progress: "Progress", state: "State", left: "Cost") -> str:
    """How long what is left will take, by the clocks of the runs that are there: medians of a step and of the rest."""
    from statistics import median

    runs = {row["run"]: row for row in progress.known_costs() if row.get("seconds")}
    steps = [float(row["step_seconds"] or "nan") for row in runs.values()]
    steps = [seconds for seconds in steps if seconds == seconds]  # a run with one record has no time of a step
    each = median(steps) if steps else 0.0
    own = {run.name: run.steps for run in state.runs}
    rest = [float(row["seconds"]) - own[name] * each for name, row in runs.items() if name in own]
    if not rest:
        return "; how long they take is told after the first"
    more = max(median(rest), 0.0)
    told = f"{each:.3f} s a step and {more:.1f} s a run" if steps else f"{more:.1f} s a run"
    return f", about {_duration(left.steps * each + left.runs * more)} at {told} in one process"


def _duration(seconds: float) -> str:
    """A time in its largest units.

    >>> _duration(3720)
    '1 h 2 min'
    """
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min" if hours else f"{rest} min" if rest else f"{seconds:.0f} s"


@app.command()
def status(studies: Files, out: Out = Path("runs")) -> None:
    """Show which runs of a study are finished, running or missing.

    Example: holdfast study status my-study.yaml
    """
    from rich.console import Console

    from holdfast.cli.options import table
    from holdfast.execution.checkpoints import list_checkpoints
    from holdfast.execution.files import is_locked
    from holdfast.studies.records import is_finished
    from holdfast.studies.runner import claim_held

    console = Console(highlight=False)
    for path in studies:
        progress, state = _look(path, out)
        rows = []
        for run in state.pending:
            folder = progress.folder / run.name
            saved = [info.step for info in list_checkpoints(folder / "checkpoints")]
            held = is_locked(folder) or claim_held(progress.folder, run.name)
            word = "running" if held else "begun" if saved or folder.is_dir() else "missing"
            word = "to be measured" if not held and is_finished(folder) else word
            rows.append((run.name, word, f"{max(saved, default=0)} of {run.total_steps}", run.parent or ""))
        done = len(state.finished) + len(state.kept)
        console.print(f"{progress.study.name}: {done} of {len(state.runs)} runs are finished")
        if state.kept:
            console.print(f"{len(state.kept)} of them are known from earlier results alone")
        if rows:
            console.print(table(("run", "state", "saved steps", "branches from"), rows, name="run"))
        console.print(f"results: {progress.results}; live page: holdfast board {progress.folder}")


@app.command()
def run(
    context: typer.Context,
    studies: Files,
    out: Out = Path("runs"),
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes that share the runs.")] = 1,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit arrays of jobs to SLURM and exit.")] = False,
    time: Annotated[str, typer.Option("--time", help="SLURM's limit of one start of a job.")] = "1:00:00",
    setup: Annotated[Optional[List[str]], typer.Option("--setup", help="Line of shell before; repeatable.")] = None,
    only: Annotated[Optional[List[str]], typer.Option("--only", help="Name of a run; repeatable.")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True, help="One of several processes.")] = False,
    next_: Annotated[bool, typer.Option("--next", hidden=True, help="Submit what was never begun.")] = False,
) -> None:
    """Train what a study lacks; the same command goes on after anything.

    Equal pasts are trained once. A seed or an arm that is added later runs only what is new. Results are written to
    RUNS/study/NAME/results.csv.

    Example: holdfast study run examples/studies/*.yaml --workers 2
    """
    code, plugins = 0, context.find_root().params.get("plugin") or []
    if only and (slurm or workers > 1):
        raise UserError("--only: not with --workers or --slurm, which share all runs; leave one of them out")
    for path in studies:
        progress, state = _look(path, out)
        _check_names(path, state, only or [])
        if slurm:
            code = max(code, _submit(progress, state, Resources(time=time, setup=tuple(setup or ())), plugins, next_))
        elif workers > 1:
            code = max(code, _share(path, out, workers, plugins))
            code = max(code, int(_finish(progress) > 0))
        else:
            found = _work(progress, only)
            # A run that failed must not end the other workers; the process that started them counts what is left.
            code = max(code, 0 if worker and found == 1 else found)
        if code > 128:
            break  # somebody wants it to stop
    raise typer.Exit(code)


def _check_names(path: Path, state: "State", only: list[str]) -> None:
    """Refuse names that no run of a study has."""
    names = [run.name for run in state.runs]
    for name in only:
        if name not in names:
            near = get_close_matches(name, names, n=3, cutoff=0.0)
            raise UserError(f"{path}: --only: got {name!r}, expected the name of a run, such as {', '.join(near)}")


def _submit(progress: "Progress", state: "State", resources: Resources, plugins: list[str], again: bool) -> int:
    """Hand to SLURM what is neither finished nor queued: an array for each depth of the graph, then what follows.

    The last job writes the results and submits what could not be known before: the chosen configurations.

    Args:
        again: this is that job; what was begun before and is not finished has failed.
    """
    from holdfast.cluster import submissions
    from holdfast.studies.records import is_finished

    out, folder = progress.out.absolute(), progress.folder
    progress.write(state)
    place = f"{folder.parent.name}/{folder.name}"
    queued = _queued(out, f"{place}/")
    missing = [run for run in state.pending if f"{place}/{run.name}" not in queued]
    if again:
        # One that is finished is asked for more: an arm was chosen that is measured on it.
        missing = [run for run in missing if not (folder / run.name).is_dir() or is_finished(folder / run.name)]
    if not missing:
        print(f"{progress.study.name}: {len(state.pending)} of {len(state.runs)} runs are left, none to submit")
        return int(again and bool(state.pending))
    base = [sys.executable, "-m", "holdfast", *(part for module in plugins for part in ("--plugin", module))]
    base += ["study", "run", str(progress.study.path.absolute()), "--out", str(out)]
    jobs = [*{*queued.values()}]

    def submit(name: str, runs: list[submissions.SubmittedRun], commands: list[list[str]]) -> str:
        request = submissions.Request(
            name, out, progress.study.path, (), (), runs, resources, commands=commands, after=tuple(jobs)
        )
        return str(submissions.submit(request).job)

    for wave in _waves(missing):
        runs = [submissions.SubmittedRun(run.name, f"{place}/{run.name}") for run in wave]
        jobs.append(submit(progress.study.name, runs, [[*base, "--only", run.name] for run in wave]))
        print(f"job {jobs[-1]}: {len(wave)} runs")
    more = ["--slurm", "--next", "--time", resources.time]
    more += [part for line in resources.setup for part in ("--setup", line)]
    # This job may be the one before it: they must not be taken for two that work on one run.
    name = f"{progress.study.name}-results"
    number = len(list((out / submissions.FOLDER).glob(f"{name}-*")))
    last = submit(name, [submissions.SubmittedRun(name, f"{place}/results-{number}")], [[*base, *more]])
    print(f"job {last}: results, and what follows from them")
    print(f"holdfast queue status --out {out}; holdfast study status {progress.study.path} --out {out}")
    return 0


def _queued(out: Path, place: str) -> dict[str, str]:
    """Folders of a study's runs that SLURM still has, each with its job."""
    from holdfast.cluster.submissions import submissions

    found: dict[str, str] = {}
    for each in submissions(out):
        if any(run.folder.startswith(place) for run in each.runs):
            live = {index for index, state in each.states().items() if state.live}
            found |= {run.folder: str(each.job) for index, run in enumerate(each.runs) if index in live}
    return found


def _waves(runs: "Sequence[StudyRun]") -> "list[list[StudyRun]]":
    """Runs by how many of the others they wait for, one after the other."""
    depths: dict[str, int] = {}
    for run in runs:  # each comes after the one that it branches from
        depths[run.name] = depths.get(run.parent or "", -1) + 1
    return [[run for run in runs if depths[run.name] == depth] for depth in sorted({*depths.values()})]


def _look(path: Path, out: Path, *, whole: bool = False) -> "tuple[Progress, State]":
    from holdfast.studies.runner import Progress
    from holdfast.studies.study import read_study

    progress = Progress(read_study(path), out)
    return progress, progress.look(whole=whole)


def _work(progress: "Progress", only: list[str] | None) -> int:
    from holdfast.studies.runner import work

    code = work(progress, lambda line: print(line, flush=True), only)
    if code <= 1 and only is None:
        _finish(progress)
    return code


def _finish(progress: "Progress") -> int:
    """Write the results of all that is there, and say so; returns how many runs are left."""
    state = progress.look()
    progress.write(state)
    done = len(state.finished) + len(state.kept)
    print(f"{progress.study.name}: {done} of {len(state.runs)} runs are finished; results: {progress.results}")
    return len(state.pending)


def _share(path: Path, out: Path, workers: int, plugins: list[str]) -> int:
    """Several processes that each take what no other holds; returns the worst of their exit codes."""
    from holdfast.execution.launching import run_all

    loaded = [part for module in plugins for part in ("--plugin", module)]
    command = [sys.executable, "-m", "holdfast", *loaded, "study", "run", str(path), "--out", str(out), "--worker"]
    return run_all([command] * workers, [dict(os.environ)] * workers)
