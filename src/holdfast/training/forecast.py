"""What a run will do, before it runs: stages, rows of every step, shares of the loss, size, cost."""

from typing import Any

import numpy as np

from holdfast import registry
from holdfast.curriculum import Curriculum
from holdfast.data.leaks import Leak, check_leaks
from holdfast.data.plan import DataPlan, SourceSize
from holdfast.data.prepare import find_prepared
from holdfast.data.rows import Rows
from holdfast.data.sampling import SourceKey
from holdfast.errors import ConfigError, UserError
from holdfast.execution.topology import axis_sizes
from holdfast.models.axes import check_divisible
from holdfast.optim import build_optimizer, learning_rates
from holdfast.training.base import schedule_for
from holdfast.training.blueprint import Blueprint
from holdfast.training.microbatch import check_batch
from holdfast.training.trainable import leaves_of, tree_of

SKEW = 2.0  # a source whose share of the loss is off its rate by more than this factor is warned about


def forecast(job: str, drawn: Blueprint[Any], devices: int | None = None) -> dict[str, Any]:
    """The plan of a run as `holdfast plan --json` prints it.

    Args:
        devices: how many the mesh must fit; those of this machine unless given.
    """
    curriculum, settings = drawn.curriculum, drawn.settings
    rows, missing = prepared_rows(drawn)
    sizes = None
    if not missing:
        sizes = {key: SourceSize(len(r), r.mean_loss_tokens, r.prepared.fingerprint) for key, r in rows.items()}
    unit = settings.run.mixture_unit
    plan = DataPlan(curriculum, settings.run.seed_of("data"), sizes, unit)
    counts = plan.table.counts_until(curriculum.total_steps)
    schedule = schedule_for(registry.jobs.get(job), settings, curriculum)
    warnings = [f"{name} is not prepared yet: epochs and shares of the loss are unknown" for name in missing]
    if missing and unit == "tokens":
        warnings.append("training/mixture_unit is tokens, which needs prepared data: rows are counted as by rows here")
    warnings += [f"leak: {leak}" for leak in known_leaks(drawn, rows)]
    warnings += check_mesh(drawn, devices)
    stages = [stage_facts(curriculum, index, counts, rows) for index in range(len(curriculum.stages))]
    return {
        "job": job,
        "tokens_per_step": curriculum.tokens_per_step,
        "total_steps": curriculum.total_steps,
        "stages": stages,
        "fades": fades(curriculum),
        "steps": {
            "rows": rows_by_name(plan, counts),
            "beta": [curriculum.beta_at(step) for step in range(curriculum.total_steps)],
            "learning_rate": learning_rates(schedule, np.arange(curriculum.total_steps)).tolist(),
        },
        **cost(job, drawn),
        "warnings": warnings + [warning for stage in stages for warning in skews(stage, unit)],
    }


def prepared_rows(drawn: Blueprint[Any]) -> tuple[dict[SourceKey, Rows], list[str]]:
    """Rows of the sources whose stores are there, and the names of those that are not."""
    rows: dict[SourceKey, Rows] = {}
    missing = []
    data, tokenizer = drawn.settings.data, drawn.tokenizer
    for source in drawn.curriculum.sources:
        try:
            prepared = find_prepared(source.name, "train", data=data, tokenizer=tokenizer)
        except UserError:
            prepared = None
        if prepared is None:
            missing.append(source.name)
            continue
        rows[source] = Rows(
            prepared, source.style, drawn.curriculum.block_size, loss_on=data.loss_on, pad_id=tokenizer.pad_id
        )
    return rows, list(dict.fromkeys(missing))


def check_mesh(drawn: Blueprint[Any], devices: int | None = None) -> list[str]:
    """Refuse a batch or a model that the mesh does not divide; a mesh for other devices than these is a warning."""
    import jax

    config = drawn.settings.trainer
    try:
        sizes = axis_sizes(drawn.settings.topology, devices or jax.device_count())
    except ConfigError as error:
        if devices is not None:
            raise
        return [f"not for this machine: {error}"]
    check_batch(config.batch_size, config.per_device_batch_size, sizes["data"] * sizes["fsdp"])
    check_divisible(drawn.model, sizes)
    return []


def known_leaks(drawn: Blueprint[Any], rows: dict[SourceKey, Rows]) -> list[Leak]:
    """Held-out rows of prepared sources that occur in prepared training data."""
    data, tokenizer = drawn.settings.data, drawn.tokenizer
    held_out = {}
    for source in rows:
        store = find_prepared(source.name, "validation", data=data, tokenizer=tokenizer)
        if store is not None:
            held_out[source.name] = store
    training = {source.name: found.prepared for source, found in rows.items()}
    leaks = check_leaks(held_out, training, tokenizer, cache=data.cache_path())
    return [leak for leak in leaks if leak.leaked]


def stage_facts(
    curriculum: Curriculum, index: int, counts: "np.ndarray[Any, Any]", rows: dict[SourceKey, Rows]
) -> dict[str, Any]:
    """One stage: where it lies, what it holds, and what its sources bring to the loss."""
    stage = curriculum.stages[index]
    start_step, end_step = curriculum.stage_start(index), curriculum.stage_end(index)
    drawn = counts[start_step:end_step].sum(axis=0)
    loss_tokens = {
        source: int(drawn[number]) * rows[source].mean_loss_tokens if source in rows else None
        for number, source in enumerate(curriculum.sources)
    }
    known = all(loss_tokens[source] is not None for number, source in enumerate(curriculum.sources) if drawn[number])
    total = sum(amount or 0.0 for amount in loss_tokens.values())
    sources = []
    for number, source in enumerate(curriculum.sources):
        if drawn[number]:
            amount = loss_tokens[source]
            sources.append(
                {
                    "name": source.name,
                    "style": source.style.name,
                    "rows": int(drawn[number]),
                    "loss_tokens": None if amount is None else round(amount),
                    "loss_share": amount / total if known and total and amount is not None else None,
                    "epochs": int(drawn[number]) / len(rows[source]) if source in rows else None,
                }
            )
    return {
        "index": index,
        "name": stage.name,
        "start_step": start_step,
        "end_step": end_step,
        "tokens": stage.tokens,
        "beta": stage.beta,
        "update_reference": stage.update_reference,
        "reset_optimizer": stage.reset_optimizer,
        "datasets": [{"name": s.name, "rate": s.rate, "style": s.style.name} for s in stage.mixture],
        "sources": sources,
    }


def skews(stage: dict[str, Any], unit: str) -> list[str]:
    """Warnings for sources whose share of the loss is far from their rate."""
    rates = {(d["name"], d["style"]): d["rate"] for d in stage["datasets"]}
    found = []
    for source in stage["sources"]:
        rate, share = rates.get((source["name"], source["style"])), source["loss_share"]
        if unit == "rows" and rate and share is not None and not rate / SKEW <= share <= rate * SKEW:
            found.append(
                f"stage {stage['index']} ({stage['name']}): {source['name']} has {rate:.1%} of the rows but "
                f"{share:.1%} of the loss; training/mixture_unit: tokens makes rates shares of the loss"
            )
    return found


def fades(curriculum: Curriculum) -> list[dict[str, Any]]:
    """The blending region at every boundary."""
    return [
        {
            "boundary": boundary + 1,
            "start_step": curriculum.fade_steps(boundary)[0],
            "end_step": curriculum.fade_steps(boundary)[1],
            "overlap_tokens": curriculum.overlap_tokens(boundary),
        }
        for boundary in range(len(curriculum.stages) - 1)
    ]


def rows_by_name(plan: DataPlan, counts: "np.ndarray[Any, Any]") -> dict[str, list[int]]:
    """Rows of each dataset at every step, whatever its style."""
    by_name: dict[str, Any] = {}
    for number, source in enumerate(plan.sources):
        by_name[source.name] = by_name.get(source.name, 0) + counts[:, number]
    return {name: column.tolist() for name, column in by_name.items()}


def cost(job: str, drawn: Blueprint[Any]) -> dict[str, Any]:
    """Parameters, operations and memory; memory is estimated from shapes, nothing is compiled."""
    import jax
    from flax import linen as nn

    from holdfast.models.decoder import Decoder

    spec, curriculum, config = drawn.model, drawn.curriculum, drawn.settings.trainer
    key = jax.eval_shape(lambda: jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, 1), np.int32)
    params = nn.meta.unbox(jax.eval_shape(Decoder(spec).init, key, tokens)["params"])
    optimizer = build_optimizer(registry.jobs.get(job).optimizer(), drawn.settings.optim)
    trained, reference = params, params
    if drawn.trainable is not None:
        trainable = drawn.trainable
        adapters = trainable.lora.shapes(spec) if trainable.lora else {}
        shapes = {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in adapters.items()}
        params = tree_of({**leaves_of(params), **shapes})
        trained = jax.eval_shape(trainable.part, params)
        reference = shapes if trainable.lora else params
    state = jax.eval_shape(optimizer.init, trained)
    needs_reference = curriculum.needs_reference(0)
    rows = config.per_device_batch_size if config.per_device_batch_size > 0 else config.batch_size
    width = 4 if spec.dtype == "float32" else 2
    per_token = spec.n_layers * (10 * spec.n_embd + 3 * spec.n_ff) + 4 * spec.n_embd
    memory = {
        "parameters": _bytes(params),
        "gradients": _bytes(trained),
        "optimizer": _bytes(state),
        "reference": _bytes(reference) if needs_reference else 0,
        "average": _numbers(trained) * 4 if drawn.settings.run.ema else 0,
        "activations": rows * curriculum.block_size * per_token * width,
    }
    flops = spec.flops_per_token()
    penalised = sum(
        curriculum.stage_end(i) - curriculum.stage_start(i) for i, s in enumerate(curriculum.stages) if s.beta > 0
    )
    forward = spec.flops_per_token(backward=False)
    total = curriculum.tokens_per_step * (curriculum.total_steps * flops + penalised * forward)
    return {
        "parameters": spec.num_parameters(),
        "trained_parameters": drawn.trainable.num_trained(spec) if drawn.trainable else spec.num_parameters(),
        "flops_per_token": flops,
        "total_flops": total,
        "estimated_memory": {**memory, "total": sum(memory.values()), "micro_batch_rows": rows},
    }


def _numbers(tree: Any) -> int:
    import jax

    return int(sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(tree)))


def _bytes(tree: Any) -> int:
    import jax

    return int(sum(np.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)))
