"""A run from its first line to its last: lock, data, resume, trackers, loop, close; and jobs by name."""

import contextlib
import copy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
from omegaconf import OmegaConf

from holdfast.config import to_yaml
from holdfast.data.config import DataConfig
from holdfast.data.sampling import SELF
from holdfast.errors import RunError
from holdfast.execution import ExecutionSpec, processes
from holdfast.execution.checkpoints import CheckpointStore, list_checkpoints, named_checkpoint, split_name
from holdfast.execution.faults import fault_point
from holdfast.execution.files import (
    altered_files,
    file_digests,
    lock_file,
    make_private,
    remove_leftovers,
    run_lock,
    write_atomically,
)
from holdfast.execution.signals import Consent, Interrupted, interrupts
from holdfast.execution.storage import Patience
from holdfast.tracking import RunInfo, Tracker
from holdfast.tracking.jsonl import FILE_NAME, truncate
from holdfast.training import restore
from holdfast.training.loop import TrainLoop
from holdfast.training.manifest import Progress, check_same
from holdfast.training.resolve import ResolvedRun, curriculum_for, read_options, resolve_options
from holdfast.training.results import ResultsRecorder
from holdfast.training.state import methods_of
from holdfast.types import JsonView

if TYPE_CHECKING:
    from holdfast.training.base import Trainer


def start_run(run: ResolvedRun, spec: ExecutionSpec) -> int:
    """Run a job to its end; returns the exit code, above 128 when a signal stopped it.

    Args:
        spec: the run's place; devices are found here unless it has some.
    """
    use_compilation_cache(run.options.data)
    place = {f"--{name}": getattr(spec, name) for name in ("name", "project", "group")}
    starts = {"--from": spec.parent, "--init-from": spec.init_from}
    check_same(run, place | {name: text and split_name(text)[1] for name, text in starts.items()})
    with processes.together():
        trainer = make_trainer(run, spec)
    try:
        trainer.run()
    except Interrupted as stopped:
        if processes.is_first():
            print(stopped)
        return 128 + stopped.signal_number
    return 0


def make_trainer(run: ResolvedRun, spec: ExecutionSpec) -> "Trainer":
    """The trainer of a resolved run, on the devices of the spec or of this process."""
    if spec.topology is None:
        spec = spec.on_devices(run.options.topology)
    run = from_branch_on(run, spec)
    return run.trainer(spec.carrying(run))


class _Switched(NamedTuple):
    """Something that a branch may switch on: where its stages stand, and which they could be."""

    path: str
    stages: list[int]
    had: bool  # by the checkpoint that the branch goes on from
    written: list[int] | None  # in that checkpoint's options


def from_branch_on(run: ResolvedRun, spec: ExecutionSpec) -> ResolvedRun:
    """A branch in which what it switches on acts from the branch on, where the parent's past would need it otherwise.

    So do methods that look at a snapshot or at old rows, and replay. The stages are written into the branch's options,
    so that it goes on with the same ones.
    """
    infos = list_checkpoints(spec.run_dir / "checkpoints") if spec.parent else []
    newest = infos[-1] if infos else named_checkpoint(spec.parent) if spec.parent else None
    if newest is None or "config" not in newest.manifest:
        return run
    cfg, changed = copy.deepcopy(run.options.cfg), False
    for each in _switched(run, newest.manifest["config"]):
        left = [index for index in each.stages if each.had or run.curriculum.stage_start(index) >= newest.step]
        if infos:
            left = list(each.written or each.stages)
        if left and left != each.stages:
            OmegaConf.update(cfg, each.path, left, force_add=True)
            changed = True
    if not changed:
        return run
    options = read_options(run.job, cfg)
    return resolve_options(run.job, options, curriculum_for(run.job, options), run.declared_by)


def _switched(run: ResolvedRun, then: JsonView) -> Iterator[_Switched]:
    """What of a run would need another past, and has no stages of its own.

    Args:
        then: the options of the checkpoint that it goes on from.
    """
    stages = range(len(run.curriculum.stages))
    declared = methods_of(run)
    for name in run.options.run.methods:
        config = declared[name].config if name in declared else None
        if config is not None and config.stages is None and (declared[name].looks_back or config.needs_old_gradients):
            acting = [index for index in stages if config.acts_in(index)]
            had = name in (then.get("training/methods") or ())
            yield _Switched(f"methods.{name}.stages", acting, had, then.get(f"methods/{name}/stages"))
    replay, before = run.options.stages.replay, then.get("training/replay") or {}
    if replay is not None and replay.rate > 0 and replay.stages is None:
        first = 0 if replay.source == SELF.name and run.options.architecture.source is not None else 1
        had = bool(before) and before.get("rate") != 0
        yield _Switched("training.replay.stages", list(stages[first:]), had, before.get("stages"))


def use_compilation_cache(data: DataConfig, say: Callable[[str], object] | None = None) -> None:
    """Keep compiled steps in the cache folder, so that a second start is quick.

    They are programs that this process will run, so they come only from a folder that nobody else may write in; and
    where a config names it, which may be somebody else's, that is said.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]  # flags are made at run time
        return
    say = say or _to_stderr
    folder = data.cache_path() / "compiled"
    reason = make_private(folder)
    if reason is not None:
        say(f"warning: compiled programs are not kept: {reason}; chmod 700 it after a look inside, or remove it")
        return
    if data.cache is not None:
        say(f"compiled programs are kept in {folder}, which data/cache names")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _to_stderr(line: str) -> None:
    if processes.is_first():
        print(line, file=sys.stderr)


def run(trainer: "Trainer") -> None:
    """Train to the end, from wherever the run's checkpoints are."""
    spec, resolved = trainer.spec, trainer.resolved
    with held(spec.run_dir), interrupts() as asked:
        prepare_data(trainer)
        fault_point("prepared")
        with processes.together():
            say = print if processes.is_first() else lambda _: None
            trainer.state, progress = restore.start(
                trainer.restorer, trainer.state, trainer.plan, trainer.triggers.tags, say, spec.parent
            )
            if spec.init_from is not None and int(trainer.state.step) == 0:
                trainer.state = trainer.restorer.begun_from(trainer.state, named_checkpoint(spec.init_from))
        already_done = trainer.done
        fault_point("restored")
        if processes.is_first():
            truncate(spec.run_dir / FILE_NAME, progress.metrics_length)
            write_run_files(resolved, spec.run_dir, progress)
        fault_point("run files")
        info = run_info(resolved, spec, int(trainer.state.step))
        names = resolved.options.tracking.sink_names(resolved.config.wandb)
        tracker = Tracker.open(names if processes.is_first() and not already_done else [], info)
        rolling = resolved.options.run.rolling
        store = CheckpointStore(trainer.checkpoint_dir, rolling=rolling, patience=info.patience)
        leaks = trainer.data.leaks
        recorder = ResultsRecorder(resolved, spec.run_dir, trainer.evaluator, leaks, progress, info.patience)
        try:
            loop = TrainLoop(trainer, tracker, store, recorder, spec.on_results)
            if not already_done:
                with loop.watchdog:
                    loop.train(Consent(asked))
            elif processes.is_first():
                print(f"{spec.run_dir}: this run is finished ({resolved.curriculum.total_steps} steps)")
            fault_point("trained")
            store.wait()
            loop.write_results(finished=True)
            recorder.check_finite()
            fault_point("end")
        finally:
            store.close()
            tracker.close()


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold the run's folder, in the first process for all of them."""
    with contextlib.ExitStack() as stack:
        with processes.together():
            if processes.is_first():
                stack.enter_context(run_lock(run_dir))
                remove_leftovers(run_dir)
        fault_point("start")
        yield


def prepare_data(trainer: "Trainer") -> None:
    """Make what is missing in the first process; the others wait, then open it, or make it on a disk of their own."""
    fingerprint = ""
    for first in (True, False):
        with processes.together(processes.PREPARE_SECONDS):
            if processes.is_first() == first:
                fingerprint = trainer.plan.fingerprint(trainer.resolved.curriculum.total_steps)
    fingerprints = processes.gather(fingerprint)
    for number, other in enumerate(fingerprints):
        if other != fingerprints[0]:
            raise RunError(
                f"process {number} has other data than process 0; let all hosts read the same data/root and data/cache"
            )


def write_run_files(resolved: ResolvedRun, folder: Path, progress: Progress | None = None) -> None:
    """The resolved config and the tokenizer, enough to run again and to read checkpoints.

    What was written once and is not what it was is named; a tokenizer is written again.
    """
    write_atomically(folder / "config.yaml", to_yaml(resolved.options.cfg, resolved.classes, resolved.job))
    progress, tokenizer = progress or Progress(), folder / "tokenizer"
    for name in altered_files(folder, progress.files):
        if Path(name).parts[0] == tokenizer.name:
            print(f"{folder / name} was altered or is gone: the tokenizer is written again")
            shutil.rmtree(tokenizer, ignore_errors=True)
        else:
            print(f"warning: {folder / name} was altered or is gone: what reports make of it cannot be trusted")
    if not tokenizer.exists():
        resolved.tokenizer.save(tokenizer)
    progress.files.update(file_digests(tokenizer, folder))


def run_info(resolved: ResolvedRun, spec: ExecutionSpec, start_step: int) -> RunInfo:
    """What trackers know about the run."""
    curriculum = resolved.curriculum
    return RunInfo(
        directory=spec.run_dir,
        name=spec.name,
        project=spec.project,
        group=spec.group,
        id=spec.id,
        total_steps=curriculum.total_steps,
        tokens_per_step=curriculum.tokens_per_step,
        stages=tuple((curriculum.stage_start(index), stage.name) for index, stage in enumerate(curriculum.stages)),
        start_step=start_step,
        config=resolved.flat_config(),
        patience=Patience(
            resolved.options.run.disk_patience, lock_file(spec.run_dir) if processes.is_first() else None
        ),
    )
