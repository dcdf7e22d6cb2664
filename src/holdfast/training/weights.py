"""The weights of a checkpoint in full, also where it holds adapters alone and their base is elsewhere.

A base is found by what the manifest says: the options of the run (`architecture/from`, or the seed), or another
run's checkpoint. Its fingerprint must be the one that the adapters were trained on.
"""

import os
from pathlib import Path

import jax

from holdfast.errors import UserError
from holdfast.execution import processes
from holdfast.execution.checkpoints import (
    CHECKSUMS,
    CheckpointInfo,
    CheckpointStore,
    DamagedCheckpointError,
    named_checkpoint,
)
from holdfast.execution.checksums import checksums
from holdfast.execution.storage import unreachable
from holdfast.models.derived import abstract_params
from holdfast.models.family import Model
from holdfast.models.lora import adapter_shardings, fingerprint, merged
from holdfast.models.parameters import leaves_of, trainable_of, tree_of
from holdfast.training.initial import begun, held_reference, initial_params
from holdfast.training.placement import ReferenceStore, shardings_of
from holdfast.training.resolve import ResolvedRun
from holdfast.training.state import LATER_ARRAYS, Base, TrainState
from holdfast.types import Json, Tree


def checkpoint_params(info: CheckpointInfo, model: Model, mesh: jax.sharding.Mesh, item: str = "params") -> Tree:
    """The parameters of a checkpoint on a mesh, its adapters added to their kernels.

    Args:
        item: `params`; or `reference` or `ema`, the average, where the checkpoint has one.
    """
    if item == "ema":
        return _averaged_params(info, model, mesh)
    plain, base = abstract_params(model, mesh), info.manifest.get("base")
    held = "adapters" if item == "params" else base and base["reference"]
    if base is None or held == "all":
        return _read_typed(info, item, plain)
    weights = base_params(info, model, mesh)
    if held == "base":
        return weights
    return _merged(weights, _read_typed(info, item, abstract_adapters(info, model, plain)))


def reference_dtype(info: CheckpointInfo) -> str | None:
    """The type in which a checkpoint holds its reference, None: that of the parameters."""
    found: str | None = info.manifest["config"].get("optimization/kl/reference_dtype")
    return found


def _read_typed(info: CheckpointInfo, item: str, plain: Tree) -> Tree:
    """Parameters of a checkpoint in the types of the model's, also where a reference is held in another one."""
    stored = ReferenceStore(dtype=reference_dtype(info) if item == "reference" else None)
    arrays = read_arrays(info, {item: jax.tree.map(stored.shape, plain)})[item]
    if stored.dtype is None:
        return arrays
    cast = jax.jit(lambda tree: jax.tree.map(lambda leaf, own: leaf.astype(own.dtype), tree, plain))
    return cast(arrays)


def _merged(base: Tree, adapters: Tree) -> Tree:
    leaves = {**leaves_of(base), **leaves_of(adapters)}
    return tree_of(jax.jit(merged, out_shardings=leaves_of(shardings_of(base)))(leaves))


def no_ema(place: Path) -> UserError:
    """What to say where an average of the weights is asked for and there is none."""
    return UserError(f"{place}: it holds no average of the weights: it was made without training/ema")


def _averaged_params(info: CheckpointInfo, model: Model, mesh: jax.sharding.Mesh) -> Tree:
    """The average of a checkpoint in the place of the parameters that it is of."""
    if not info.manifest["config"].get("training/ema") or "average" in info.manifest:
        raise no_ema(info.path)
    trainable, has_base = trainable_of(info.manifest["config"], model), "base" in info.manifest
    plain = abstract_params(model, mesh)
    held = abstract_adapters(info, model, plain) if has_base else plain
    shapes = held if trainable is None else jax.eval_shape(trainable.part, held)
    placed = shardings_of(held if trainable is None else trainable.whole(held))
    target = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=at), shapes, placed)
    arrays = read_arrays(info, {"params": held, "ema": target})

    def averaged(arrays: Tree) -> Tree:
        whole = arrays["ema"] if trainable is None else trainable.completed(arrays["params"], arrays["ema"])
        return jax.tree.map(lambda mean, own: mean.astype(own.dtype), whole, arrays["params"])

    average = jax.jit(averaged, out_shardings=shardings_of(held))(arrays)
    return _merged(base_params(info, model, mesh), average) if has_base else average


def base_params(info: CheckpointInfo, model: Model, mesh: jax.sharding.Mesh) -> Tree:
    """The frozen weights that a checkpoint's adapters belong to."""
    config, base = info.manifest["config"], info.manifest["base"]
    if base["from"] is not None:
        params = checkpoint_params(base_checkpoint(info), model, mesh)
    else:
        own = config.get("training/seed_init")
        seed = config["training/seed"] if own is None else own
        params = initial_params(model, seed, mesh, config.get("architecture/from"))
    check_base(info, fingerprint(leaves_of(params)))
    return params


def abstract_adapters(info: CheckpointInfo, model: Model, plain: Tree) -> Tree:
    """The adapters of a checkpoint as shapes, types and shardings.

    Args:
        plain: the base, likewise.
    """
    trainable = trainable_of(info.manifest["config"], model)
    assert trainable is not None, "a checkpoint with a base has adapters"
    assert trainable.lora is not None, "a checkpoint with a base has adapters"
    shapes = trainable.lora.shapes(model)
    placed = adapter_shardings(leaves_of(plain), shapes)
    return tree_of(
        {path: jax.ShapeDtypeStruct(shape, "float32", sharding=placed[path]) for path, shape in shapes.items()}
    )


def read_arrays(info: CheckpointInfo, target: Json, *, whole: bool = False) -> Json:
    """Some of the arrays of a checkpoint, placed as the target says; without those that earlier versions did not save.

    All processes of a run call this together. What is not what was saved is a `DamagedCheckpointError`.

    Args:
        whole: the target is all that the checkpoint should hold.
    """
    arrays, failure, reason = None, None, None
    try:
        arrays = _read(info, target, whole)
    except Exception as error:  # a broken checkpoint raises whatever its broken file raises
        failure, reason = error, " ".join(str(error).split())[:200] or type(error).__name__
    # Summing takes all processes, so one that cannot read says so first.
    reasons = processes.gather(reason)
    if failure is not None:
        if isinstance(failure, UserError) or unreachable(failure) is not None:
            raise failure
        raise DamagedCheckpointError(f"{info.path}: the arrays cannot be read: {reason}") from failure
    for number, why in enumerate(reasons):
        if why is not None:
            raise DamagedCheckpointError(f"{info.path}: process {number} cannot read the arrays: {why}")
    assert arrays is not None
    _check_sums(info, arrays)
    return arrays


def _read(info: CheckpointInfo, target: Json, whole: bool) -> Json:
    store = CheckpointStore(info.path.parent, read_only=True)
    try:
        later = [name for name in LATER_ARRAYS if name in target]
        held = store.names(info.step) if later else set()
        known = {name: shape for name, shape in target.items() if name in held or name not in later}
        arrays: Json = (store.restore if whole else store.restore_part)(info.step, known)
        return arrays
    finally:
        store.close()


def _check_sums(info: CheckpointInfo, arrays: Json) -> None:
    """Refuse arrays that are not what was saved; of checkpoints of earlier versions nobody knows."""
    saved = info.manifest.get(CHECKSUMS)
    if saved is None:
        return
    wrong = sorted(name for name, found in checksums(arrays).items() if saved.get(name) != found)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise DamagedCheckpointError(
            f"{info.path}: the checksum is another than when it was saved, of {', '.join(wrong[:3])}{more}: the "
            "files were damaged"
        )


def run_dir_of(info: CheckpointInfo) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    return info.path.parent.parent


def base_checkpoint(info: CheckpointInfo) -> CheckpointInfo:
    """The checkpoint that a checkpoint's base comes from."""
    name = info.manifest["base"]["from"]
    try:
        return named_checkpoint(os.path.normpath(run_dir_of(info) / name))
    except UserError as error:
        raise UserError(f"{info.path}: its adapters belong to the weights of {name}, which are gone: {error}") from None


def source_name(info: CheckpointInfo, run_dir: Path) -> str:
    """A checkpoint as a run's manifest names it: relative to the run, so that both may move together."""
    return f"{os.path.relpath(run_dir_of(info).absolute(), run_dir.absolute())}@{info.step}"


def with_base(
    state: TrainState, run: ResolvedRun, info: CheckpointInfo, mesh: jax.sharding.Mesh, run_dir: Path
) -> TrainState:
    """The state with the base that a checkpoint's adapters belong to, if it has adapters.

    Args:
        state: as the options of the run begin.
        run_dir: of the run that the state is for.
    """
    base = info.manifest.get("base")
    if (base is None) != (state.base is None):
        have, want = ("whole weights", "adapters") if base is None else ("adapters", "whole weights")
        raise UserError(f"{info.path}: the checkpoint holds {have}, and optimization/lora/rank asks for {want}")
    if base is None:
        return state
    source = None
    if base["from"] is not None:
        origin = base_checkpoint(info)
        source = source_name(origin, run_dir)
        state = begun(state, run, checkpoint_params(origin, run.model, mesh), source)
    assert state.base is not None
    check_base(info, state.base.fingerprint)
    return state.replace(base=Base(base["fingerprint"], source, base["step"]))


def check_base(info: CheckpointInfo, found: str) -> None:
    """Refuse a base with other values than the adapters of a checkpoint were trained on."""
    base, config = info.manifest["base"], info.manifest["config"]
    if found == base["fingerprint"]:
        return
    where = base["from"] or config.get("architecture/from") or "the initial weights of its seed"
    raise UserError(
        f"{info.path}: its adapters were trained on other weights than {where} has now: fingerprint "
        f"{base['fingerprint']}, found {found}; put the weights back that the run began with"
    )


def held_facts(state: TrainState) -> Json:
    """The part of a manifest that says what the arrays are: what adapters belong to, which methods remember."""
    facts: Json = {}
    if state.base is not None:
        facts["base"] = {
            "fingerprint": state.base.fingerprint,
            "from": state.base.source,
            "step": state.base.step,
            "reference": held_reference(state),
        }
    if state.memory is not None:
        facts["memory"] = sorted(state.memory)
    return facts
