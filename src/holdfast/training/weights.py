"""The weights of a checkpoint in full, also where it holds adapters alone and their base is elsewhere.

A base is found by what the manifest says: the options of the run (`architecture/from`, or the seed), or another
run's checkpoint. Its fingerprint must be the one that the adapters were trained on.
"""

import os
from pathlib import Path
from typing import Any

import jax

from holdfast.errors import UserError
from holdfast.execution.checkpoints import CheckpointInfo, CheckpointStore, named_checkpoint
from holdfast.models.config import ModelSpec
from holdfast.models.lora import adapter_shardings, fingerprint, merged
from holdfast.models.pretrained import abstract_params
from holdfast.training import build
from holdfast.training.state import Base, KLDivergenceTrainState, TrainState, shardings_of
from holdfast.training.trainable import leaves_of, trainable_of, tree_of


def checkpoint_params(info: CheckpointInfo, spec: ModelSpec, mesh: jax.sharding.Mesh, item: str = "params") -> Any:
    """The parameters of a checkpoint on a mesh, its adapters added to their kernels.

    Args:
        item: `params`; or `reference` or `ema`, the average, where the checkpoint has one.
    """
    if item == "ema":
        return _averaged_params(info, spec, mesh)
    plain, base = abstract_params(spec, mesh), info.manifest.get("base")
    held = "adapters" if item == "params" else base and base["reference"]
    if base is None or held == "all":
        return read_arrays(info, {item: plain})[item]
    weights = base_params(info, spec, mesh)
    if held == "base":
        return weights
    adapters = read_arrays(info, {item: abstract_adapters(info, spec, plain)})[item]
    return _merged(weights, adapters)


def _merged(base: Any, adapters: Any) -> Any:
    leaves = {**leaves_of(base), **leaves_of(adapters)}
    return tree_of(jax.jit(merged, out_shardings=leaves_of(shardings_of(base)))(leaves))


def no_average(place: Path) -> UserError:
    """What to say where an average of the weights is asked for and there is none."""
    return UserError(f"{place}: it holds no average of the weights: it was made without training/ema")


def _averaged_params(info: CheckpointInfo, spec: ModelSpec, mesh: jax.sharding.Mesh) -> Any:
    """The average of a checkpoint in the place of the parameters that it is of."""
    if not info.manifest["config"].get("training/ema") or "average" in info.manifest:
        raise no_average(info.path)
    trainable, has_base = trainable_of(info.manifest["config"], spec), "base" in info.manifest
    plain = abstract_params(spec, mesh)
    held = abstract_adapters(info, spec, plain) if has_base else plain
    shapes = held if trainable is None else jax.eval_shape(trainable.part, held)
    placed = shardings_of(held if trainable is None else trainable.whole(held))
    target = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, "float32", sharding=at), shapes, placed)
    arrays = read_arrays(info, {"params": held, "ema": target})

    def averaged(arrays: Any) -> Any:
        whole = arrays["ema"] if trainable is None else trainable.completed(arrays["params"], arrays["ema"])
        return jax.tree.map(lambda mean, own: mean.astype(own.dtype), whole, arrays["params"])

    average = jax.jit(averaged, out_shardings=shardings_of(held))(arrays)
    return _merged(base_params(info, spec, mesh), average) if has_base else average


def base_params(info: CheckpointInfo, spec: ModelSpec, mesh: jax.sharding.Mesh) -> Any:
    """The frozen weights that a checkpoint's adapters belong to."""
    config, base = info.manifest["config"], info.manifest["base"]
    if base["from"] is not None:
        params = checkpoint_params(base_checkpoint(info), spec, mesh)
    else:
        own = config.get("training/seed_init")
        seed = config["training/seed"] if own is None else own
        params = build.initial_params(spec, seed, mesh, config.get("architecture/from"))
    check_base(info, fingerprint(leaves_of(params)))
    return params


def abstract_adapters(info: CheckpointInfo, spec: ModelSpec, plain: Any) -> Any:
    """The adapters of a checkpoint as shapes, types and shardings.

    Args:
        plain: the base, likewise.
    """
    trainable = trainable_of(info.manifest["config"], spec)
    assert trainable is not None, "a checkpoint with a base has adapters"
    assert trainable.lora is not None, "a checkpoint with a base has adapters"
    shapes = trainable.lora.shapes(spec)
    placed = adapter_shardings(leaves_of(plain), shapes)
    return tree_of(
        {path: jax.ShapeDtypeStruct(shape, "float32", sharding=placed[path]) for path, shape in shapes.items()}
    )


def read_arrays(info: CheckpointInfo, target: dict[str, Any]) -> dict[str, Any]:
    """Some of the arrays of a checkpoint, placed as the target says."""
    store = CheckpointStore(info.path.parent, read_only=True)
    try:
        arrays: dict[str, Any] = store.restore_part(info.step, target)
        return arrays
    finally:
        store.close()


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


def with_base(state: TrainState, info: CheckpointInfo, mesh: jax.sharding.Mesh, run_dir: Path, seed: int) -> TrainState:
    """The state with the base that a checkpoint's adapters belong to, if it has adapters.

    Args:
        state: as the options of the run begin.
        run_dir: of the run that the state is for.
        seed: of the adapters.
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
        state = build.begun(state, checkpoint_params(origin, state.objective.model, mesh), seed, source)
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


def base_facts(state: TrainState) -> dict[str, Any]:
    """The part of a manifest that says what adapters belong to; nothing where there are none."""
    if state.base is None:
        return {}
    facts = {"fingerprint": state.base.fingerprint, "from": state.base.source, "step": state.base.step}
    reference = state.reference if isinstance(state, KLDivergenceTrainState) else None
    held = None
    if reference is not None:
        held = "all" if "embed" in reference else "adapters" if reference else "base"
    return {"base": {**facts, "reference": held}}
