"""Where a run starts: fresh, from its own newest checkpoint, from another run's past, or from its weights alone."""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from holdfast.data.plan import DataPlan, SampledSet
from holdfast.data.sampled import check_sets, copy_sets
from holdfast.errors import RunError, UserError
from holdfast.evaluation.matrix import Point
from holdfast.evaluation.results import FOLDER as EVALUATIONS
from holdfast.execution import Topology, processes
from holdfast.execution.checkpoints import (
    CHECKSUMS,
    CheckpointInfo,
    list_checkpoints,
    named_checkpoint,
    rename,
    set_aside,
    unusable_checkpoints,
)
from holdfast.execution.files import write_atomically
from holdfast.execution.storage import gave_up, unreachable
from holdfast.models.family import DECODER, harmless_differences, option_path
from holdfast.models.parameters import OPTIONS as TRAINED
from holdfast.tracking.jsonl import FILE_NAME, digests
from holdfast.training import weights
from holdfast.training.initial import abstract, begun, memory_shapes, restore_target, with_arrays, with_new_methods
from holdfast.training.manifest import ROW_ORDER, Progress, changed_meanings, check_resume, differences
from holdfast.training.resolve import ResolvedRun
from holdfast.training.state import Objective, TrainState, methods_of, objective_at
from holdfast.types import JsonView, Tree

WEIGHTS_ALONE = "average"  # key of the manifest of a checkpoint that holds weights and nothing to train on with

Say = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Restorer:
    """What it takes to put a checkpoint's arrays into a run's state.

    Args:
        mesh: where arrays go.
        run_dir: of the run that the state is for.
    """

    run: ResolvedRun
    mesh: jax.sharding.Mesh
    run_dir: Path

    def load(self, state: TrainState, info: CheckpointInfo) -> TrainState:
        """The state of a checkpoint whose model is the same.

        Args:
            state: as the options of the run begin.
        """
        begun = state.keep
        state, reference = self._beginning(state, info)
        target = restore_target(state, reference, weights.reference_dtype(info))
        arrays = weights.read_arrays(info, target, whole=True)
        restored = with_arrays(state, arrays, reference).replace(objective=self._objective(info.step))
        if begun is not None:
            restored = restored.replace(keep={**begun, **(restored.keep or {})})
        return with_new_methods(restored, self.run, info.manifest.get("memory", ()))

    def look(self, state: TrainState, info: CheckpointInfo) -> TrainState:
        """A state with the weights of a checkpoint, and the reference where it has one; not the optimizer's state."""
        if WEIGHTS_ALONE in info.manifest:
            return state.replace(params=self.weights(info), base=None, ema=None)
        state, reference = self._beginning(state, info)
        target = restore_target(state, reference, weights.reference_dtype(info))
        part = {name: array for name, array in target.items() if name in ("params", "reference", "ema")}
        return with_arrays(state, weights.read_arrays(info, part), reference)

    def adopt(self, state: TrainState, info: CheckpointInfo) -> TrainState:
        """The parent's weights, reference and counts for a branch that trains other parts than its parent.

        Its adapters and its optimizer start fresh.
        """
        counts = {name: array for name, array in state.arrays().items() if isinstance(array, jax.Array)}
        arrays = weights.read_arrays(info, jax.tree.map(abstract, counts))
        state = self.begun_from(state.replace(**arrays), info)
        if self.run.curriculum.has_reference(info.step):
            state = state.anchored(weights.checkpoint_params(info, self.run.model, self.mesh, "reference"))
        return state.replace(objective=self._objective(info.step))

    def begun_from(self, state: TrainState, info: CheckpointInfo) -> TrainState:
        """A state that begins with the weights of a checkpoint, with fresh adapters and optimizer."""
        return begun(state, self.run, self.weights(info), weights.source_name(info, self.run_dir))

    def weights(self, info: CheckpointInfo, item: str = "params") -> Tree:
        """The parameters of a checkpoint alone, placed as the run's, adapters added to their kernels.

        Args:
            item: as for `weights.checkpoint_params`.
        """
        self.check_model(info)
        return weights.checkpoint_params(info, self.run.model, self.mesh, item)

    def check_model(self, info: CheckpointInfo) -> None:
        """Refuse a checkpoint of another model or tokenizer, saying what differs."""
        own = {"model": self.run.model.described(), "tokenizer": self.run.tokenizer.fingerprint}
        lines = model_differences(info.manifest, own)
        if lines:
            raise UserError(f"{info.path}: the checkpoint is of another model:\n" + "\n".join(lines))

    def _objective(self, step: int) -> Objective:
        return objective_at(self.run, self.run.curriculum.stage_at(max(step - 1, 0)))

    def _beginning(self, state: TrainState, info: CheckpointInfo) -> tuple[TrainState, str | None]:
        """The state that a checkpoint's arrays go into, and what they hold of a reference."""
        self.check_model(info)
        state = weights.with_base(state, self.run, info, self.mesh, self.run_dir)
        if state.memory is not None:
            shapes = memory_shapes(state, self.run, self.run.curriculum.stage_at(info.step - 1)) if info.step else None
            memory = state.memory if shapes is None else shapes
            known = {name: part for name, part in memory.items() if name in info.manifest.get("memory", ())}
            state = state.replace(memory=known or None)
        if state.keep is not None:
            held = {name: own for name, own in state.keep.items() if name in info.manifest.get("kept", ())}
            state = state.replace(keep=held or None)
        reference = None
        if self.run.curriculum.has_reference(info.step):
            reference = "all" if state.base is None else info.manifest["base"]["reference"]
        return state, reference


def model_differences(old: JsonView, new: JsonView) -> list[str]:
    """What of two manifests' models and tokenizers keeps the weights of one from serving the other, in lines."""
    was, now = ({"family": DECODER, **each["model"]} for each in (old, new))
    changed = differences(was, now)
    if "family" in changed:
        changed = {"family": changed["family"]}  # the others follow from it
    harmless = harmless_differences(now)
    lines = [
        f"  {option_path(now['family'], name)}: was {before!r}, is {after!r}"
        for name, (before, after) in changed.items()
        if name not in harmless
    ]
    if old["tokenizer"] != new["tokenizer"]:
        lines.append("  tokenizer/name: another tokenizer than the checkpoint's")
    return lines


def start(
    restorer: Restorer,
    state: TrainState,
    plan: DataPlan,
    tags_at: Callable[[int], tuple[str, ...]],
    say: Say,
    parent: str | None = None,
) -> tuple[TrainState, Progress]:
    """The state in which the run goes on, and what is known so far.

    The newest checkpoint that can be read, and whose records are in `metrics.jsonl`, is taken; others are set aside and
    named. Where no records agree, the newest that can be read is taken.

    Args:
        state: before the first step.
        tags_at: lasting names of the checkpoint after a step.
        say: shows a line to the user.
        parent: `RUN@CHECKPOINT` whose past a new run shares.
    """
    run, run_dir = restorer.run, restorer.run_dir
    own = own_checkpoints(run_dir / "checkpoints", say)
    troubles = processes.agreed(records_troubles(run_dir, own) if processes.is_first() else None)
    without = {info.step: trouble for info, trouble in zip(own, troubles, strict=True) if trouble is not None}
    sources = sorted(own, key=lambda info: (info.step not in without, info.step), reverse=True)
    for info in sources or ([named_checkpoint(parent)] if parent else []):
        taken, reason = _resumed(restorer, state, info, plan, say, branch=not own)
        if taken is None:
            if not own:
                raise UserError(
                    f"--from {parent}: the checkpoint cannot be taken over: {reason}; a branch has its parent's job"
                )
            say(f"checkpoint {info.step} cannot be read and is skipped: {reason}")
            if processes.is_first():
                set_aside(info.path)
            continue
        if own:
            _settle(own, info, without, tags_at, say)
        else:
            if processes.is_first():
                _take_over(info, run_dir, say)
                copy_sets(plan.sampled_sets.values(), info.path.parent.parent, run_dir)
            say(f"branched from {parent} at step {info.step}")
        manifest = info.manifest
        if CHECKSUMS not in manifest:
            say("note: the checkpoint was made by an earlier version, without checksums: it cannot be checked")
        if info.step < run.curriculum.total_steps:
            if own:
                say(f"resumed at step {info.step} of {run.curriculum.total_steps}")
            for line in [*_notes(manifest), *_switched_on(run, manifest)]:
                say(line)
        return taken, Progress.of(manifest, saved_step=info.step if own else -1)
    return state, Progress()


def _resumed(
    restorer: Restorer, state: TrainState, info: CheckpointInfo, plan: DataPlan, say: Say, *, branch: bool
) -> tuple[TrainState | None, str | None]:
    """The state of a checkpoint that the run may go on from; or None, and why it cannot be read."""
    if WEIGHTS_ALONE in info.manifest:
        raise UserError(
            f"{info.path.parent.parent}: this is an average of two checkpoints: it holds weights alone and cannot "
            "be trained on; start a new run from it with --init-from"
        )
    try:
        lines = check_resume(info.manifest, restorer.run, plan, branch=branch)
        check_sets(info.manifest, _sets_needed(plan, info.step), info.path.parent.parent)
        for point in info.manifest["points"]:
            Point.from_dict(point)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        # Of earlier versions, whose manifests have no seal: one that is sealed is what was written.
        return None, f"its manifest is damaged ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
    for line in lines:
        say(f"changed since the checkpoint: {line}")
    # A branch that trains other parts of the model starts with a fresh optimizer.
    take = restorer.adopt if any(line.startswith(TRAINED) for line in lines) else restorer.load
    return _taken(take, state, info)


def _settle(
    own: Sequence[CheckpointInfo],
    taken: CheckpointInfo,
    without: Mapping[int, str],
    tags_at: Callable[[int], tuple[str, ...]],
    say: Say,
) -> None:
    """Make a run's folder that of a run which goes on from one of its checkpoints, and say what is not as it was.

    Args:
        without: by step, what is wrong with the records up to a checkpoint.
    """
    if taken.step in without:
        say(
            f"warning: {without[taken.step]}, and no checkpoint agrees with it: the run goes on from the newest, and "
            f"records of steps up to {taken.step} are lost"
        )
    later = [info for info in own if info.step > taken.step and info.path.exists()]
    for info in later:
        why = without.get(info.step, "it is newer than the one that is taken")
        say(f"checkpoint {info.step} is skipped: {why}; its steps are done again")
    if processes.is_first():
        for info in later:
            set_aside(info.path)
        rename([each for each in own if each.step <= taken.step and each.path.exists()], tags_at)


def records_troubles(run_dir: Path, infos: Sequence[CheckpointInfo]) -> list[str | None]:
    """What is wrong with the records that were there before each checkpoint of a run; None where nothing is."""
    path = run_dir / FILE_NAME
    size = path.stat().st_size if path.is_file() else None
    lengths = [info.manifest.get("metrics_length", 0) for info in infos]
    found = digests(path, lengths)

    def trouble(step: int, length: int, digest: str | None) -> str | None:
        if length <= 0:
            return None if length == 0 else f"checkpoint {step} says that {path} had {length} bytes"
        if size is None:
            return f"{path} is missing"
        if size < length:
            return f"{path} has {size} bytes and had {length} at checkpoint {step}"
        if digest:
            return None if found[length] == digest else f"{path} is not what it was at checkpoint {step}"
        with path.open("rb") as file:
            file.seek(length - 1)
            return None if file.read(1) == b"\n" else f"{path} has no record that ends where checkpoint {step} says"

    return [
        trouble(info.step, length, info.manifest.get("metrics_digest"))
        for info, length in zip(infos, lengths, strict=True)
    ]


def _switched_on(run: ResolvedRun, manifest: JsonView) -> list[str]:
    """What methods that a branch switches on tell their user."""
    known = manifest["config"].get("training/methods") or ()
    fresh = {name: method.config.switched_on for name, method in methods_of(run).items() if name not in known}
    return [f"{name}: {told}" for name, told in fresh.items() if told]


def _sets_needed(plan: DataPlan, step: int) -> list[SampledSet]:
    """The sampled rows that steps from a checkpoint on look at: methods also look at those of the stage just ended."""
    newest = plan.curriculum.stage_at(max(step - 1, 0))
    done = step >= plan.curriculum.total_steps
    return [] if done else [made for made in plan.sampled_sets.values() if made.stage >= newest]


def _notes(manifest: JsonView) -> list[str]:
    """What makes the rest of a run differ from what the one that made a checkpoint would have done."""
    lines = []
    meanings = changed_meanings(manifest.get("semantics", 1), manifest["config"])
    if meanings:
        lines.append(f"note: this run was begun with an earlier version; from here on {'; '.join(meanings)}")
    then, now = manifest.get("cores"), processes.visible_cores()
    if then not in (None, now) and jax.default_backend() == "cpu":
        lines.append(
            f"note: {now} visible core{'s' if now != 1 else ''}, {then} when the checkpoint was made: results may "
            "differ in the last bits"
        )
    return lines


def own_checkpoints(folder: Path, say: Say) -> list[CheckpointInfo]:
    """The run's checkpoints, those that the first process sees, oldest first; unusable ones are set aside."""
    if processes.is_first():
        for name, reason in unusable_checkpoints(folder).items():
            say(f"checkpoint {name.partition('.')[0]} is skipped: {reason}")
            if name.isdigit():
                set_aside(folder / name)
    found = {info.step: info for info in list_checkpoints(folder)}
    steps = processes.agreed(list(found))
    for step in steps:
        if step not in found:
            raise UserError(
                f"{folder}: this process does not see checkpoint {step}, which process 0 sees; the "
                "folder of runs must be on a disk that all hosts share"
            )
    return [found[step] for step in steps]


def _taken(
    take: Callable[[TrainState, CheckpointInfo], TrainState], state: TrainState, info: CheckpointInfo
) -> tuple[TrainState | None, str | None]:
    """A checkpoint in all processes, by `load` or `adopt`; where one cannot read it, why."""
    taken = reason = trouble = None
    try:
        taken = take(state, info)
    except UserError:
        raise
    except Exception as error:  # a broken checkpoint raises whatever its broken file raises
        trouble = unreachable(error)
        reason = " ".join(str(error).removeprefix(f"{info.path}: ").split())[:300]
    heard = processes.gather([reason, trouble])
    disk = next((each for _, each in heard if each is not None), None)
    if disk is not None:  # of one process; the checkpoint may be good
        raise RunError(gave_up(str(info.path), disk, 0))
    reason = next((why for why, _ in heard if why is not None), None)
    return (taken if reason is None else None), reason


def recorded_micro_batch(run: ResolvedRun, topology: Topology, checkpoint_dir: Path, parent: str | None) -> int | None:
    """Rows per shard that an earlier process found, where the mesh and the batch are the same."""
    infos = list_checkpoints(checkpoint_dir) or ([named_checkpoint(parent)] if parent else [])
    manifests = [info.manifest for info in infos if WEIGHTS_ALONE not in info.manifest]
    if not manifests:
        return None
    newest = manifests[-1]
    batch_size = newest["config"].get("training/batch_size")
    same = newest["mesh"] == dict(topology.sizes) and batch_size == run.config.batch_size
    return int(newest["per_device_batch_size"]) if same else None


def recorded_row_order(checkpoint_dir: Path, parent: str | None) -> int:
    """The order of a step's rows (`ROW_ORDER`) of a run as it was begun, or of the one it branches from."""
    infos = list_checkpoints(checkpoint_dir) or ([named_checkpoint(parent)] if parent else [])
    manifests = [info.manifest for info in infos if WEIGHTS_ALONE not in info.manifest]
    return int(manifests[-1].get("row_order", 1)) if manifests else ROW_ORDER


def _take_over(info: CheckpointInfo, run_dir: Path, say: Say) -> None:
    """Copy the parent's records and examples up to the branch into the new run's folder."""
    parent_dir = info.path.parent.parent
    (trouble,) = records_troubles(parent_dir, [info])
    if trouble is not None:
        say(f"warning: {trouble}: the branch lacks records of its past")
    path = parent_dir / FILE_NAME
    records = path.read_bytes()[: info.manifest["metrics_length"]] if path.is_file() else b""
    write_atomically(run_dir / FILE_NAME, records)
    for folder in (parent_dir / EVALUATIONS).glob("*"):
        if folder.name.isdigit() and int(folder.name) <= info.step:
            shutil.copytree(folder, run_dir / EVALUATIONS / folder.name, dirs_exist_ok=True)
