"""Working through a study: the state is the runs' folders alone, so that the same command goes on after anything.

One process trains run after run; several share the work by locks. What has its rows in `results.csv`, or in the
study's own file of earlier results, is not run again.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.config import JOB_KEY, flatten, merge, read_yaml
from holdfast.errors import RunError, UserError
from holdfast.evaluation.sums import SUMS, WEIGHTS
from holdfast.execution import ExecutionSpec
from holdfast.execution.checkpoints import list_checkpoints
from holdfast.execution.files import locked, write_json
from holdfast.studies.afterwards import Asker, answer_files
from holdfast.studies.graph import Cell, Graph, StudyRun, place
from holdfast.studies.records import (
    COST_COLUMNS,
    INTERPOLATED,
    RESULTS,
    Collector,
    Row,
    cell_digest,
    cell_key,
    cost_rows,
    costs_file,
    is_finished,
    learning_rate,
    read_rows,
    read_table,
    strength_text,
    write_rows,
)
from holdfast.studies.results import rows_of
from holdfast.studies.study import BEFORE, BOUNDS, PLAIN, Choice, Study
from holdfast.studies.verdict import choose
from holdfast.training.config import config_classes
from holdfast.training.manifest import differences
from holdfast.types import Json

MADE_WITH, CLAIMS = "study.json", ".claims"
PROJECT = "study"
DONE = (0, 3)  # exit codes of a run that came to its end; 3: a budget that it kept to ended it
WAIT_SECONDS = 1.0

Say = Callable[[str], object]


@dataclass
class State:
    """Where a study stands.

    Args:
        chosen: configurations of the arms that are chosen already.
        runs: all runs that are known to be needed, each after the one that it branches from.
        finished: names of those whose folders are complete.
        kept: names of those whose rows an earlier file of results has.
    """

    chosen: dict[str, Choice] = field(default_factory=dict)
    runs: list[StudyRun] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)

    @property
    def pending(self) -> list[StudyRun]:
        """Runs that are still to be trained: those without results, and those that they branch from."""
        return [run for run in self.runs if run.name not in self.finished | self.kept]


class Progress:
    """A study on disk.

    Args:
        study: the checked file.
        out: the folder of all runs.
    """

    def __init__(self, study: Study, out: Path) -> None:
        self.study = study
        self.out = out
        self.graph = Graph(study)
        self.folder = study.folder(out)
        self.collector = Collector(self.graph, self.folder)
        self._whole: set[tuple[str | float | Cell, ...]] = set()  # names of runs with what was measured of them
        self._asker: tuple[int, Asker] | None = None
        self._digests: dict[str, str] = {}  # of runs that were begun

    @property
    def results(self) -> Path:
        """The file of all rows."""
        return self.folder / RESULTS

    def look(self, *, whole: bool = False) -> State:
        """Where the study stands, from its folders and files; an arm that is not what it was is refused.

        Args:
            whole: of arms that are not chosen yet take the first configuration, to see all runs that there will be.
        """
        kept = self._kept_rows()
        made = {path.parent.name: _read(path) for path in self.folder.glob(f"*/{MADE_WITH}")}
        begun = {name: int(facts["branch_stage"]) for name, facts in made.items()}
        self._digests = {name: str(facts["digest"]) for name, facts in made.items()}
        state = State()
        selected = self.graph.runs(self.graph.selection(), begun)
        self._add(state, selected, kept)
        state.chosen = self._chosen(state)
        first = {arm: self.graph.choices(arm)[0] for arm in self.graph.grids} if whole else {}
        self._add(state, self.graph.runs(self.graph.judging({**first, **state.chosen}), begun), kept)
        self._revive_parents(state)
        return state

    def _add(self, state: State, runs: Iterable[StudyRun], kept: dict[tuple[str, ...], str]) -> None:
        for run in runs:
            state.runs.append(run)
            self._refuse_changed(run, kept)
            if run.name in self._digests and self.is_whole(run):
                state.finished.add(run.name)
            elif all(self._key(cell) in kept for cell in run.cells) and not self._can_be_asked(run):
                state.kept.add(run.name)

    def _revive_parents(self, state: State) -> None:
        """A run that only a file remembers is trained again where one that is missing branches from it."""
        for _ in state.runs:
            needed = {run.parent for run in state.pending} & state.kept
            if not needed:
                return
            state.kept -= {name for name in needed if name is not None}

    def is_whole(self, run: StudyRun) -> bool:
        """Whether all that a run is measured by is there; more may be asked of it once an arm is chosen."""
        folder, shares, cells = self.folder / run.name, self.shares(run), run.cells
        if (run.name, *shares, *cells) not in self._whole:
            measured = [folder / INTERPOLATED / f"{share:g}" / SUMS for share in shares]
            measured += [path for cell in cells for path in answer_files(self.study.config, folder, cell).values()]
            if not (is_finished(folder) and all(path.is_file() for path in measured)):
                return False
            self._whole.add((run.name, *shares, *cells))
        return True

    def _can_be_asked(self, run: StudyRun) -> bool:
        """Whether a run that is finished and not whole has the weights to be measured by, and those it began with."""
        folders = [self.folder / name for name in (run.name, run.parent) if name is not None]
        return is_finished(folders[0]) and all(list_checkpoints(folder / "checkpoints") for folder in folders)

    def asker(self, seed: int) -> Asker:
        """What asks finished runs of a seed; that of one seed is kept, because making it takes as long as asking."""
        if self._asker is None or self._asker[0] != seed:
            self._asker = (seed, Asker(self.study.config, self.graph.resolved(PLAIN, Choice(), seed)))
        return self._asker[1]

    def shares(self, run: StudyRun) -> list[float]:
        """Shares of its last weights at which a run is measured too."""
        found: set[float] = set()
        for cell in run.cells:
            if cell.arm == PLAIN:
                found |= {*self.study.config.plain.interpolations}
            if cell.weights == "interpolated" and cell.choice.strength is not None:
                found.add(cell.choice.strength)
        return sorted(found)

    # Rows

    def _kept_rows(self) -> dict[tuple[str, ...], str]:
        """The digest that each cell of earlier results was made with."""
        return {cell_key(row): row["digest"] for row in self.earlier() if row["arm"] != BEFORE}

    def earlier(self) -> list[Row]:
        """Rows of the study's own file of earlier results, and of `results.csv`."""
        return [row for path in self._result_files() for row in read_rows(path)]

    def known_costs(self) -> list[Row]:
        """What the steps of runs took, as the files beside the results say."""
        return [row for path in self._result_files() for row in read_table(costs_file(path))]

    def _result_files(self) -> list[Path]:
        """The study's own file of results, if it names one, and `results.csv`."""
        named = self.study.config.results
        return [*([self.study.path.parent / named] if named else []), self.results]

    def _key(self, cell: Cell) -> tuple[str, str, str, str]:
        rate = "" if cell.arm in BOUNDS else repr(learning_rate(self.graph.resolved(cell.arm, cell.choice)))
        return cell.arm, str(cell.seed), rate, strength_text(cell.choice.strength)

    def rows(self, state: State) -> list[Row]:
        """All rows of the study's cells: of finished runs from their folders, of others from earlier files."""
        wanted = {self._key(cell): cell_digest(cell, run.digest) for run in state.runs for cell in run.cells}
        digests, seeds = {*wanted.values()}, {key[1] for key in wanted}
        made: list[Row] = []
        for run in state.runs:
            if run.name in state.finished:
                made += self.collector.rows(run, self._role(run.cell.seed))
        known = {_identity(row) for row in made}
        for row in self.earlier():
            # Plain's early stops and interpolations, and what it began with, are no cells of their own.
            shared = row["arm"] in (BEFORE, PLAIN) and row["digest"] in digests and row["seed"] in seeds
            if (shared or wanted.get(cell_key(row)) == row["digest"]) and _identity(row) not in known:
                known.add(_identity(row))
                made.append({**row, "role": self._role(int(row["seed"]))})
        return made

    def _role(self, seed: int) -> str:
        return "selection" if seed in self.study.config.selection else ""

    def _chosen(self, state: State) -> dict[str, Choice]:
        """The configuration of each arm whose runs on the selection seeds are all there."""
        missing = {cell.arm for run in state.pending for cell in run.cells}
        ready = [arm for arm in self.graph.grids if not missing & {PLAIN, arm}]
        if not ready:
            return {}
        wanted = {PLAIN, BEFORE, *ready}
        rows = [row for row in self.rows(state) if row["role"] == "selection" and row["arm"] in wanted]
        best = {arm: (each.rate, each.strength) for arm, each in choose(rows_of(rows)).items()}
        found: dict[str, Choice] = {}
        for arm in ready:
            for choice in self.graph.choices(arm):
                rate, strength = self._key(Cell(arm, choice, 0))[2:]
                if best[arm] == (float(f"{float(rate):.10g}"), strength):
                    found[arm] = choice
        return found

    def write(self, state: State) -> None:
        """Write the rows and the costs of what is finished, also to the study's own file of results."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(claim_file(self.folder, RESULTS), lambda: None):
            rows = self.rows(state)
            done = [run for run in state.runs if run.name in state.finished]
            files = self._result_files()
            costs = cost_rows(self.graph, self.folder, done, self.known_costs())
            for path in files:
                write_rows(path, rows)
                write_rows(costs_file(path), costs, COST_COLUMNS)

    # What a name stands for

    def _refuse_changed(self, run: StudyRun, kept: dict[tuple[str, ...], str]) -> None:
        """Refuse an arm whose runs or results were made with other options under its name."""
        if self._digests.get(run.name, run.digest) != run.digest:
            raise self._changed(run.cell, self.folder / run.name)
        for cell in run.cells:
            was = kept.get(self._key(cell))
            if was is not None and was != cell_digest(cell, run.digest):
                raise self._changed(cell, None)

    def _changed(self, cell: Cell, folder: Path | None) -> UserError:
        lines = [] if folder is None else self._differences(cell, folder)
        told = ":\n" + "\n".join(lines) + "\n" if lines else "; "
        source = f"its run {folder}" if folder is not None else "its results"
        return UserError(
            f"{self.study.path}: {place(self.study, cell.arm)}: {source} was made with other options{told}"
            "put them back, or give the arm (or the study) another name"
        )

    def _differences(self, cell: Cell, folder: Path) -> list[str]:
        path = folder / "config.yaml"
        if not path.is_file():
            return []
        values = read_yaml(path)
        values.pop(JOB_KEY, None)
        classes = config_classes(self.study.job)
        try:
            old = flatten(merge(classes, values), classes)
        except UserError:  # of a version whose options were others
            return []
        new = self.graph.resolved(cell.arm, cell.choice, cell.seed).flat_config()
        return [f"  {path}: was {was!r}, is {now!r}" for path, (was, now) in differences(old, new).items()]


def _read(path: Path) -> Json:
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    return found


def _identity(row: Row) -> tuple[str, ...]:
    return (*cell_key(row), row["task"], row["steps"], row["document"])


def claim_file(folder: Path, name: str) -> Path:
    """The file that is held while a process works on something of a study."""
    path = folder / CLAIMS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def claim_held(folder: Path, name: str) -> bool:
    """Whether a process works on a run of a study."""
    path = folder / CLAIMS / name
    if not path.exists():
        return False
    with locked(path) as (mine, _):
        return not mine


def work(progress: Progress, say: Say, only: Iterable[str] | None = None) -> int:
    """Train what is missing, one run after the other, until nothing is left; returns the exit code.

    Several processes may do this at once: each takes what no other holds. A run that fails is named, and what does not
    branch from it goes on.

    Args:
        only: names of runs; None is all.
    """
    names = None if only is None else {*only}
    failed: dict[str, str] = {}
    while True:
        state = progress.look()
        left = [run for run in state.pending if run.name not in failed and (names is None or run.name in names)]
        tried = (_claimed(progress, run, say, failed) for run in left if _has_past(progress, run))
        code = next((code for code in tried if code is not None), None)
        if code is not None and code not in DONE:
            return code
        if code is None:
            if all(_is_lost(progress, run, left) for run in left):
                break
            time.sleep(WAIT_SECONDS)  # another process holds what is left, or what it branches from
            continue
        if names is None:
            progress.write(progress.look())
    if names is None:
        progress.write(progress.look())
    for name, reason in failed.items():
        say(f"{name}: failed: {reason}")
    for run in left:
        if run.name not in failed:
            say(f"{run.name}: not run: the past that it shares, of {run.parent}, is not there")
    return 1 if failed or left else 0


def _has_past(progress: Progress, run: StudyRun) -> bool:
    """Whether the checkpoint that a run branches from is there, or one of its own."""
    if run.parent is None:
        return True
    tag = f"boundary_{run.branch_stage}"
    parents = list_checkpoints(progress.folder / run.parent / "checkpoints")
    return any(tag in info.tags for info in parents) or bool(
        list_checkpoints(progress.folder / run.name / "checkpoints")
    )


def _is_lost(progress: Progress, run: StudyRun, left: Iterable[StudyRun]) -> bool:
    """Whether the past of a run will not come: what it needs has failed or is gone, and nobody works on it.

    Args:
        left: runs that this process may train.
    """
    mine = {each.name: each for each in left}
    while run.parent is not None and run.parent in mine:
        run = mine[run.parent]
    # Who lets go of a run has written its checkpoint, so that it is looked for after that.
    return run.parent is not None and not claim_held(progress.folder, run.parent) and not _has_past(progress, run)


def _claimed(progress: Progress, run: StudyRun, say: Say, failed: dict[str, str]) -> int | None:
    """Train a run unless another process does; its exit code, None where it is held."""
    with locked(claim_file(progress.folder, run.name)) as (mine, _):
        if not mine:
            return None
        if progress.is_whole(run):
            return 0
        try:
            return _train(progress, run, say)
        except RunError as error:
            failed[run.name] = str(error)
            return 0


def _train(progress: Progress, run: StudyRun, say: Say) -> int:
    """One run to its end, and what is measured of its weights afterwards."""
    import jax

    from holdfast.training.run import start_run, use_compilation_cache

    folder = progress.folder / run.name
    parent = None if run.parent is None else f"{progress.folder / run.parent}@boundary_{run.branch_stage}"
    if not is_finished(folder):
        told = f", from step {run.shared_steps} of {run.parent}" if run.parent else ""
        say(f"{run.name}: {run.steps} steps{told}")
        if not (folder / MADE_WITH).is_file():  # what it took over it took over at its first start
            facts = {"digest": run.digest, "parent": run.parent, "branch_stage": run.branch_stage}
            write_json(folder / MADE_WITH, {"study": progress.study.name, **facts})
        spec = ExecutionSpec(
            name=run.name, project=PROJECT, group=progress.study.name, root=progress.out, parent=parent
        )
        resolved = progress.graph.resolved(run.cell.arm, run.cell.choice, run.cell.seed)
        use_compilation_cache(resolved.options.data)
        # Runs of one kind compile the same programs, of which many are small: together they take seconds of each run.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        code = start_run(resolved, spec)
        if code not in DONE:
            return code
    for share in progress.shares(run):
        _interpolate(progress, run, beginning(progress, run.name), share)
    for cell in run.cells:
        files = answer_files(progress.study.config, folder, cell)
        if not all(path.is_file() for path in files.values()):
            say(f"{run.name}: {' and '.join(files)}")
            progress.asker(cell.seed).ask(beginning(progress, run.name), f"{folder}@final", cell, files)
    return 0


def beginning(progress: Progress, name: str) -> str:
    """The checkpoint at which arms begin, of a run or of the one that trained that past for it."""
    stage = progress.study.config.first_stage
    while int((facts := _read(progress.folder / name / MADE_WITH))["branch_stage"]) >= stage:
        name = str(facts["parent"])
    return f"{progress.folder / name}@boundary_{stage}"


def _interpolate(progress: Progress, run: StudyRun, first: str, share: float) -> None:
    """Measure an interpolation between a boundary's weights and a run's last ones, unless it was."""
    from holdfast.analysis.interpolation import Interpolator
    from holdfast.training.results import write_evaluation

    folder = progress.folder / run.name
    target = folder / INTERPOLATED / f"{share:g}"
    if (target / SUMS).is_file():
        return
    config = progress.study.config
    tasks = [*dict.fromkeys([*config.old, *config.new_tasks])]
    found = Interpolator(first, f"{folder}@final", tasks=tasks).results(share)
    write_evaluation(target, {WEIGHTS: found}, examples=False)
