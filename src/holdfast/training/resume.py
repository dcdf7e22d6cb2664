"""Where a run starts: fresh, from its own newest checkpoint, or from another run's."""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from holdfast.config import build as default_config
from holdfast.config import flatten
from holdfast.errors import RunError, UserError
from holdfast.execution import processes
from holdfast.execution.checkpoints import (
    CheckpointInfo,
    CheckpointStore,
    list_checkpoints,
    named_checkpoint,
    rename,
    set_aside,
    unusable_checkpoints,
)
from holdfast.execution.files import write_atomically
from holdfast.execution.storage import gave_up, unreachable
from holdfast.training import build, weights
from holdfast.training.jobs import config_classes
from holdfast.training.manifest import FORMAT, check_resume, differences, facts
from holdfast.training.state import KLDivergenceTrainState, TrainState
from holdfast.training.trainable import OPTIONS

if TYPE_CHECKING:
    from holdfast.training.base import BaseTrainer

WEIGHTS_ALONE = "average"  # key of the manifest of a checkpoint that holds weights and nothing to train on with


@dataclass
class Progress:
    """What a run has found out so far; every checkpoint's manifest holds it."""

    points: list[dict[str, Any]] = field(default_factory=list)  # evaluations, as in results.json
    best: dict[str, float] = field(default_factory=dict)  # stage -> lowest validation loss
    metrics_length: int = 0
    saved_step: int = -1  # step of the checkpoint that this was read from, -1 for a fresh start


def manifest_of(
    trainer: "BaseTrainer[Any, Any]", step: int, tags: Sequence[str], progress: Progress | None = None
) -> dict[str, Any]:
    """What the checkpoint of a step says about itself."""
    progress = progress or Progress()
    return {
        "format": FORMAT,
        "step": step,
        "tokens": step * trainer.stages.tokens_per_step,
        "stage": trainer.stages.stage_at(max(step - 1, 0)),
        "tags": list(tags),
        "config": flat_config(trainer),
        "model": dataclasses.asdict(trainer.model_spec),
        "tokenizer": trainer.tokenizer.fingerprint,
        **weights.base_facts(trainer.state),
        **facts(trainer.plan, step),
        "per_device_batch_size": trainer.batch_shape[1] // trainer.topology.num_row_shards,
        "mesh": dict(trainer.topology.sizes),
        "processes": jax.process_count(),
        "points": progress.points,
        "best": progress.best,
        "metrics_length": progress.metrics_length,
    }


def flat_config(trainer: "BaseTrainer[Any, Any]") -> dict[str, Any]:
    """The run's options as path -> value."""
    return flatten(trainer.settings.cfg, trainer_classes(trainer))


def _defaults(trainer: "BaseTrainer[Any, Any]") -> dict[str, Any]:
    """What options had been, before there were such options, in checkpoints that do not name them."""
    classes = trainer_classes(trainer)
    return flatten(default_config(*classes), classes)


def trainer_classes(trainer: "BaseTrainer[Any, Any]") -> list[type]:
    """The config classes of the trainer's job."""
    return config_classes(trainer.CONFIG)


def load(trainer: "BaseTrainer[Any, Any]", info: CheckpointInfo) -> None:
    """Give a trainer the state of a checkpoint whose model is the same."""
    state, reference = _beginning(trainer, info)
    store = CheckpointStore(info.path.parent, read_only=True)
    try:
        arrays = store.restore(info.step, build.restore_target(state, reference))
    finally:
        store.close()
    stage = trainer.stages.stage_at(max(info.step - 1, 0))
    trainer.state = build.with_arrays(state, arrays, reference).replace(objective=trainer.objective_at(stage))


def look(trainer: "BaseTrainer[Any, Any]", info: CheckpointInfo) -> None:
    """Give a trainer the weights of a checkpoint, and the reference where it holds one; not the optimizer's state."""
    if WEIGHTS_ALONE in info.manifest:
        trainer.state = trainer.state.replace(params=load_weights(trainer, info), base=None, ema=None)
        return
    state, reference = _beginning(trainer, info)
    target = build.restore_target(state, reference)
    part = {name: array for name, array in target.items() if name in ("params", "reference", "ema")}
    trainer.state = build.with_arrays(state, weights.read_arrays(info, part), reference)


def _beginning(trainer: "BaseTrainer[Any, Any]", info: CheckpointInfo) -> tuple[TrainState, str | None]:
    """The state that a checkpoint's arrays go into, and what they hold of a reference."""
    check_model(trainer, info)
    seed = trainer.settings.run.seed_of("init")
    state = weights.with_base(trainer.state, info, trainer.topology.mesh, trainer.spec.run_dir, seed)
    reference = None
    if trainer.stages.has_reference(info.step):
        reference = "all" if state.base is None else info.manifest["base"]["reference"]
    return state, reference


def load_weights(trainer: "BaseTrainer[Any, Any]", info: CheckpointInfo, item: str = "params") -> Any:
    """The parameters of a checkpoint alone, placed as the trainer's, adapters added to their kernels.

    Args:
        item: as for `weights.checkpoint_params`.
    """
    check_model(trainer, info)
    return weights.checkpoint_params(info, trainer.model_spec, trainer.topology.mesh, item)


def init_from(trainer: "BaseTrainer[Any, Any]", name: str) -> None:
    """Give a trainer that has not begun the weights of `RUN[@CHECKPOINT]`."""
    info = named_checkpoint(name)
    source = weights.source_name(info, trainer.spec.run_dir)
    seed = trainer.settings.run.seed_of("init")
    trainer.state = build.begun(trainer.state, load_weights(trainer, info), seed, source)


def adopt(trainer: "BaseTrainer[Any, Any]", info: CheckpointInfo) -> None:
    """Give a branch that trains other parts than its parent the parent's weights, reference and counts.

    Its adapters and its optimizer start fresh.
    """
    counts = {name: array for name, array in trainer.state.arrays().items() if isinstance(array, jax.Array)}
    arrays = weights.read_arrays(info, jax.tree.map(build.abstract, counts))
    source = weights.source_name(info, trainer.spec.run_dir)
    seed = trainer.settings.run.seed_of("init")
    state = build.begun(trainer.state.replace(**arrays), load_weights(trainer, info), seed, source)
    if trainer.stages.has_reference(info.step):
        assert isinstance(state, KLDivergenceTrainState)
        mesh = trainer.topology.mesh
        state = state.anchored(weights.checkpoint_params(info, trainer.model_spec, mesh, "reference"))
    stage = trainer.stages.stage_at(max(info.step - 1, 0))
    trainer.state = state.replace(objective=trainer.objective_at(stage))


def check_model(trainer: "BaseTrainer[Any, Any]", info: CheckpointInfo) -> None:
    """Refuse a checkpoint of another model or tokenizer, saying what differs."""
    own = {"model": dataclasses.asdict(trainer.model_spec), "tokenizer": trainer.tokenizer.fingerprint}
    lines = model_differences(info.manifest, own)
    if lines:
        raise UserError(f"{info.path}: the checkpoint is of another model:\n" + "\n".join(lines))


def model_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What of two manifests' models and tokenizers keeps the weights of one from serving the other, in lines."""
    changed = differences(old["model"], new["model"])
    harmless = {"remat", "scan_layers", "dtype", "dropout", "block_size"}
    lines = [
        f"  architecture/{name}: was {was!r}, is {now!r}"
        for name, (was, now) in changed.items()
        if name not in harmless or (name == "block_size" and new["model"]["positions"] == "learned")
    ]
    if old["tokenizer"] != new["tokenizer"]:
        lines.append("  tokenizer/name: another tokenizer than the checkpoint's")
    return lines


def start(trainer: "BaseTrainer[Any, Any]", say: Any, parent: str | None = None) -> Progress:
    """Put the trainer's state where the run goes on, and return what is known so far.

    The newest checkpoint that can be read is taken; unreadable ones are set aside and named.

    Args:
        say: shows a line to the user.
        parent: `RUN@CHECKPOINT` whose past a new run shares.
    """
    own = _own_checkpoints(trainer, say)
    sources = own[::-1] or ([named_checkpoint(parent)] if parent else [])
    for info in sources:
        if WEIGHTS_ALONE in info.manifest:
            raise UserError(
                f"{info.path.parent.parent}: this is an average of two checkpoints: it holds weights alone and cannot "
                "be trained on; start a new run from it with --init-from"
            )
        reuse_micro_batch(trainer, info)
        made_with = {**info.manifest, "config": {**_defaults(trainer), **info.manifest["config"]}}
        lines = check_resume(made_with, flat_config(trainer), trainer.plan, branch=not own)
        for line in lines:
            say(f"changed since the checkpoint: {line}")
        take = adopt if any(line.startswith(OPTIONS) for line in lines) else load
        reason = _load_reason(take, trainer, info)
        if reason is not None:
            if not own:
                raise UserError(
                    f"--from {parent}: the checkpoint cannot be taken over: {reason}; a branch has its parent's job"
                )
            say(f"checkpoint {info.step} cannot be read and is skipped: {reason}")
            if processes.is_first():
                set_aside(info.path)
            continue
        if own and processes.is_first():
            rename([each for each in own if each.step <= info.step], trainer.agenda.tags)
        if not own:
            if processes.is_first():
                _take_over(trainer, info)
            say(f"branched from {parent} at step {info.step}")
        elif info.step < trainer.stages.total_steps:
            say(f"resumed at step {info.step} of {trainer.stages.total_steps}")
        manifest = info.manifest
        saved_step = info.step if own else -1
        return Progress(list(manifest["points"]), dict(manifest["best"]), manifest["metrics_length"], saved_step)
    return Progress()


def _own_checkpoints(trainer: "BaseTrainer[Any, Any]", say: Any) -> list[CheckpointInfo]:
    """The run's checkpoints, those that the first process sees, oldest first."""
    if processes.is_first():
        for name, reason in unusable_checkpoints(trainer.checkpoint_dir).items():
            say(f"checkpoint {name.partition('.')[0]} is skipped: {reason}")
            if name.isdigit():
                set_aside(trainer.checkpoint_dir / name)
    found = {info.step: info for info in list_checkpoints(trainer.checkpoint_dir)}
    steps = processes.agreed(list(found))
    for step in steps:
        if step not in found:
            raise UserError(
                f"{trainer.checkpoint_dir}: this process does not see checkpoint {step}, which process 0 sees; the "
                "folder of runs must be on a disk that all hosts share"
            )
    return [found[step] for step in steps]


def _load_reason(take: Any, trainer: "BaseTrainer[Any, Any]", info: CheckpointInfo) -> str | None:
    """Load a checkpoint in all processes, by `load` or `adopt`; where one cannot read it, why."""
    reason = None
    try:
        take(trainer, info)
    except UserError:
        raise
    except Exception as error:  # a broken checkpoint raises whatever its broken file raises
        if (trouble := unreachable(error)) is not None:
            raise RunError(gave_up(str(info.path), trouble, 0)) from error
        reason = " ".join(str(error).split())[:200]
    return next((why for why in processes.gather(reason) if why is not None), None)


def reuse_micro_batch(trainer: "BaseTrainer[Any, Any]", info: CheckpointInfo) -> None:
    """Take the micro-batch that was found before, where the mesh is the same."""
    same = info.manifest["mesh"] == dict(trainer.topology.sizes)
    size = trainer.config.batch_size
    if same and trainer.config.per_device_batch_size < 0 and info.manifest["config"]["training/batch_size"] == size:
        rows = info.manifest["per_device_batch_size"] * trainer.topology.num_row_shards
        trainer.__dict__["batch_shape"] = (size // rows, rows)


def _take_over(trainer: "BaseTrainer[Any, Any]", info: CheckpointInfo) -> None:
    """Copy the parent's records and examples up to the branch into the new run's folder."""
    parent_dir, run_dir = info.path.parent.parent, trainer.spec.run_dir
    records = (parent_dir / "metrics.jsonl").read_bytes()[: info.manifest["metrics_length"]]
    write_atomically(run_dir / "metrics.jsonl", records)
    for folder in (parent_dir / "evaluations").glob("*"):
        if folder.name.isdigit() and int(folder.name) <= info.step:
            shutil.copytree(folder, run_dir / "evaluations" / folder.name, dirs_exist_ok=True)
