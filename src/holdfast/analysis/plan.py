"""What a run will do, before it runs: stages, rows of every step, shares of the loss, size, cost."""

import functools
import time

import numpy as np

from holdfast.curriculum import Curriculum
from holdfast.data.leaks import Leak, check_leaks
from holdfast.data.plan import DataPlan, SourceSize
from holdfast.data.prepare import find_prepared
from holdfast.data.rows import Rows
from holdfast.data.sampling import SELF, DatasetStyle, SourceKey
from holdfast.data.slots import most_old_rows
from holdfast.data.store import TokenStore
from holdfast.errors import ConfigError, UserError
from holdfast.execution.topology import axis_sizes
from holdfast.methods.active import initial_memory
from holdfast.methods.budget import check_control, control_facts
from holdfast.models.family import ModelFamily
from holdfast.models.parameters import leaves_of, tree_of
from holdfast.optim import learning_rates
from holdfast.training.compile import check_batch
from holdfast.training.resolve import FRESH_REFERENCE, ResolvedRun
from holdfast.training.self_replay import cost_of
from holdfast.training.state import learning_rate, methods_of, objective_at
from holdfast.training.triggers import measurements
from holdfast.types import Json, Tree

# What of a matrix product's speed training reaches, by the model's width, and how far off that may be.
FULL_SHARE, FULL_WIDTH, LEAST_SHARE, DOUBT = 0.6, 384, 0.1, 2.0
START_SECONDS = (10.0, 60.0)  # imports, data, compiling
PMD = DatasetStyle.PMD
MOST_LISTED = 100_000  # steps; of a longer run every second, third, … is listed
SKEW = 2.0  # a source whose share of the loss is off its rate by more than this factor is warned about


def plan_run(run: ResolvedRun, devices: int | None = None) -> Json:
    """The plan of a run as `holdfast plan --json` prints it.

    Args:
        devices: how many the mesh must fit; those of this machine unless given.
    """
    curriculum, options = run.curriculum, run.options
    rows, missing = prepared_rows(run)
    sizes = None
    if not missing:
        sizes = {key: SourceSize(len(r), r.mean_loss_tokens, r.prepared.fingerprint) for key, r in rows.items()}
    unit = options.run.mixture_unit
    plan = DataPlan(curriculum, options.run.seed_of("data"), sizes, unit)
    check_control(plan)
    every = -(-curriculum.total_steps // MOST_LISTED)
    listed = range(0, curriculum.total_steps, every)
    schedule = learning_rate(run)
    warnings = [f"{name} is not prepared yet: epochs and shares of the loss are unknown" for name in missing]
    if missing and unit == "tokens":
        warnings.append("training/mixture_unit is tokens, which needs prepared data: rows are counted as by rows here")
    warnings += [f"{name} of eval/held_out is not prepared yet" for name in unprepared_held_out(run)]
    warnings += [f"leak: {leak}" for leak in known_leaks(run, rows)]
    if run.anchors_to_fresh_weights:
        warnings.append(FRESH_REFERENCE)
    warnings += check_mesh(run, devices)
    warnings += unused_options(run)
    if run.overrides_batch:
        warnings.append(
            f"{run.trainer.__name__} overrides batch(): rows are those of the data plan, not of its batches"
        )
    stages = [stage_facts(plan, index, rows) for index in range(len(curriculum.stages))]
    costs = cost(run, plan)
    samples = self_replay(run, plan, costs)
    warnings += self_warnings(curriculum, samples)
    return {
        "job": run.job,
        "tokens_per_step": curriculum.tokens_per_step,
        "total_steps": curriculum.total_steps,
        "stages": stages,
        "fades": fades(curriculum),
        "held_out": list(run.held_out),
        "self_replay": samples,
        "keep": control_facts(plan),
        "methods": {
            name: [index for index in range(len(stages)) if method.config.acts_in(index)]
            for name, method in methods_of(run).items()
        },
        "steps": {
            "every": every,
            "rows": rows_by_name(plan, listed),
            "beta": [curriculum.beta_at(step) for step in listed],
            "learning_rate": learning_rates(schedule, np.array(listed)).tolist(),
        },
        **costs,
        # Where a mesh is planned for other devices than these, a time of this machine would mislead.
        "estimated_time": None if devices else time_here(run, costs["total_flops"]),
        "warnings": warnings + [warning for stage in stages for warning in skews(stage, unit)],
    }


def unused_options(run: ResolvedRun) -> list[str]:
    """Options that were set of methods that are not switched on."""
    options, defaults, declared = run.flat_config(), run.flat_defaults(), methods_of(run)
    return [
        f"{path} is set, and {name} is not in training/methods: it does nothing"
        for path, value in options.items()
        if path.startswith("methods/") and value != defaults.get(path)
        if (name := path.split("/")[1]) not in declared
    ]


def prepared_rows(run: ResolvedRun) -> tuple[dict[SourceKey, Rows], list[str]]:
    """Rows of the sources whose stores are there, and the names of those that are not."""
    rows: dict[SourceKey, Rows] = {}
    missing = []
    data, tokenizer = run.options.data, run.tokenizer
    for source in run.curriculum.datasets:
        prepared = _store(run, source.name, "train")
        if prepared is None:
            missing.append(source.name)
            continue
        rows[source] = Rows(
            prepared, source.style, run.curriculum.block_size, loss_on=data.loss_on, pad_id=tokenizer.pad_id
        )
    return rows, list(dict.fromkeys(missing))


def check_mesh(run: ResolvedRun, devices: int | None = None) -> list[str]:
    """Refuse a batch or a model that the mesh does not divide; a mesh for other devices than these is a warning."""
    import jax

    config = run.config
    try:
        sizes = axis_sizes(run.options.topology, devices or jax.device_count())
    except ConfigError as error:
        if devices is not None:
            raise
        return [f"not for this machine: {error}"]
    check_batch(config.batch_size, config.per_device_batch_size, sizes["data"] * sizes["fsdp"])
    run.model.check_mesh(sizes)
    return []


def unprepared_held_out(run: ResolvedRun) -> list[str]:
    """Datasets of `eval/held_out` whose held-out store is not there."""
    return [name for name in run.held_out if _store(run, name, "validation") is None]


def _store(run: ResolvedRun, name: str, split: str) -> TokenStore | None:
    try:
        return find_prepared(name, split, data=run.options.data, tokenizer=run.tokenizer)
    except UserError:  # its files are not here
        return None


def known_leaks(run: ResolvedRun, rows: dict[SourceKey, Rows]) -> list[Leak]:
    """Held-out rows of prepared sources that occur in prepared training data."""
    data, tokenizer = run.options.data, run.tokenizer
    held_out = {}
    for name in (*(source.name for source in rows), *run.held_out):
        store = _store(run, name, "validation")
        if store is not None:
            held_out[name] = store
    training = {source.name: found.prepared for source, found in rows.items()}
    leaks = check_leaks(held_out, training, tokenizer, cache=data.cache_path())
    return [leak for leak in leaks if leak.leaked]


def self_replay(run: ResolvedRun, plan: DataPlan, costs: Json) -> list[Json]:
    """What the model samples from itself before each stage, and what that costs beside training.

    Tokens are sampled one after another: a share of the operations is a lower bound for the share of the time.

    Args:
        costs: as `cost` has them; what sampling takes is added to its total.
    """
    model, block_size = run.model, run.curriculum.block_size
    forward = model.flops_per_token(backward=False)
    if type(model.kind).read is ModelFamily.read:
        forward *= block_size  # without a cache all tokens are computed again for each new one
    found = []
    for made in plan.sampled_sets.values():
        tokens, read = cost_of(made.num_rows, block_size)
        end = run.curriculum.stage_end(made.stage)
        drawn = plan.drawn_before(end)[SELF] - made.first_draw
        facts = {"stage": made.stage, "step": made.step, "rows": made.num_rows, "drawn": drawn}
        found.append({**facts, "tokens": tokens, "flops": read * forward})
    costs["total_flops"] += sum(each["flops"] for each in found)
    return [{**each, "share": each["flops"] / costs["total_flops"]} for each in found]


def self_warnings(curriculum: Curriculum, samples: list[Json]) -> list[str]:
    """What may be wrong with rows that the model samples from itself: too many, or of what it cannot begin."""
    found = [
        f"stage {each['stage']} draws {each['drawn']:,} rows of self and samples {each['rows']:,}; the others are "
        "never seen: lower training/replay/rows"
        for each in samples
        if each["drawn"] < each["rows"]
    ]
    last = max((each["stage"] for each in samples), default=0)
    silent = [key.name for key in curriculum.datasets if curriculum.home(key) < last and key.style is not PMD]
    if silent:
        found.append(
            f"samples begin after an end of text, and as PADDED or PACKED rows {', '.join(dict.fromkeys(silent))} "
            "never show how a text begins (nor, by default, prompts): style PMD does"
        )
    return found


def stage_facts(plan: DataPlan, index: int, rows: dict[SourceKey, Rows]) -> Json:
    """One stage: where it lies, what it holds, and what its sources bring to the loss."""
    curriculum = plan.curriculum
    stage = curriculum.stages[index]
    start_step, end_step = curriculum.stage_start(index), curriculum.stage_end(index)
    drawn = plan.table.drawn_before(end_step) - plan.table.drawn_before(start_step)
    tokens_a_row = {source: found.mean_loss_tokens for source, found in rows.items()}
    if curriculum.sampled is not None:
        tokens_a_row[SELF] = float(curriculum.block_size)
    loss_tokens = {
        source: int(drawn[number]) * tokens_a_row[source] if source in tokens_a_row else None
        for number, source in enumerate(curriculum.sources)
    }
    known = all(loss_tokens[source] is not None for number, source in enumerate(curriculum.sources) if drawn[number])
    total = sum(amount or 0.0 for amount in loss_tokens.values())
    sources = []
    for number, source in enumerate(curriculum.sources):
        if drawn[number]:
            amount, num_rows = loss_tokens[source], plan.num_rows(source, index)
            if num_rows is None and source in rows:
                num_rows = len(rows[source])
            sources.append(
                {
                    "name": source.name,
                    "style": source.style.name,
                    "rows": int(drawn[number]),
                    "loss_tokens": None if amount is None else round(amount),
                    "in_loss": rows[source].loss_share if source in rows else None,
                    "loss_share": amount / total if known and total and amount is not None else None,
                    "epochs": int(drawn[number]) / num_rows if num_rows else None,
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


def skews(stage: Json, unit: str) -> list[str]:
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


def fades(curriculum: Curriculum) -> list[Json]:
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


def rows_by_name(plan: DataPlan, listed: range) -> dict[str, list[int]]:
    """Rows of each dataset at some steps, whatever its style."""
    if listed.step == 1:
        counts = plan.table.counts_until(listed.stop)
    else:
        counts = np.array([plan.table.counts_at(step) for step in listed])
    by_name: Json = {}
    for number, source in enumerate(plan.sources):
        by_name[source.name] = by_name.get(source.name, 0) + counts[:, number]
    return {name: column.tolist() for name, column in by_name.items()}


def reference_rows(run: ResolvedRun, plan: DataPlan) -> int:
    """Rows that the reference runs on inside the loss: those of all steps that look at it, or of their old slots."""
    total = 0
    for stage in range(len(run.curriculum.stages)):
        objective = objective_at(run, stage)
        if objective.needs_reference:
            total += _rows(plan, stage, old=objective.reference_on_old)
    return total


def method_flops(run: ResolvedRun, plan: DataPlan) -> float:
    """Operations of the passes that methods ask for beside the loss: token losses of whole batches, old gradients."""
    total, forward = 0.0, run.model.flops_per_token(backward=False)
    for stage in range(len(run.curriculum.stages)):
        methods = objective_at(run, stage).methods
        looks = {method.config.weighs_by for method in methods.having("batch_weights").values()}
        total += len(looks) * _rows(plan, stage, old=False) * forward
        if methods.needs_old_gradients:
            total += _rows(plan, stage, old=True) * run.model.flops_per_token()
    return total * run.curriculum.block_size


def _rows(plan: DataPlan, stage: int, *, old: bool) -> int:
    """Rows of the steps of a stage, or of their old slots."""
    curriculum, total = plan.curriculum, 0
    most = most_old_rows(plan, stage) if old else (curriculum.batch_size,) * 2
    for start, end, constant in curriculum.segments():
        steps = min(end, curriculum.stage_end(stage)) - max(start, curriculum.stage_start(stage))
        total += max(steps, 0) * most[not constant]
    return total


def cost(run: ResolvedRun, plan: DataPlan) -> Json:
    """Parameters, operations and memory; memory is estimated from shapes, nothing is compiled."""
    import jax
    from flax import linen as nn

    from holdfast.models.derived import boxed_params

    model, curriculum, config = run.model, run.curriculum, run.config
    params = nn.meta.unbox(boxed_params(model))
    optimizer = objective_at(run, 0).optimizer
    trained, reference = params, params
    if run.trainable is not None:
        trainable = run.trainable
        adapters = trainable.lora.shapes(model) if trainable.lora else {}
        shapes = {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in adapters.items()}
        params = tree_of({**leaves_of(params), **shapes})
        trained = jax.eval_shape(trainable.part, params)
        reference = shapes if trainable.lora else params
    state = jax.eval_shape(optimizer.init, trained)
    held = _held_reference(run, reference) if curriculum.needs_reference(0) else {"device": 0, "host": 0}
    rows = config.per_device_batch_size if config.per_device_batch_size > 0 else config.batch_size
    memory = {
        "parameters": _bytes(params),
        "gradients": _bytes(trained),
        "optimizer": _bytes(state),
        "reference": held["device"],
        "methods": _bytes(jax.eval_shape(lambda part: initial_memory(methods_of(run), part), trained)),
        "average": _numbers(trained) * 4 if run.options.run.ema else 0,
        "activations": rows * curriculum.block_size * model.kind.activation_bytes(model),
    }
    flops = model.flops_per_token()
    forward = model.flops_per_token(backward=False)
    passes = 2 if run.options.optim.sam.rho else 1  # a second gradient, uphill
    total = curriculum.tokens_per_step * curriculum.total_steps * flops * passes
    total += reference_rows(run, plan) * curriculum.block_size * forward + method_flops(run, plan)
    return {
        "parameters": model.num_parameters(),
        "trained_parameters": run.trainable.num_trained(model) if run.trainable else model.num_parameters(),
        "flops_per_token": flops,
        "total_flops": total,
        "estimated_memory": {**memory, "total": sum(memory.values()), "micro_batch_rows": rows},
        "estimated_host_memory": held["host"],
    }


def _held_reference(run: ResolvedRun, reference: Tree) -> dict[str, int]:
    """Bytes of a reference on the device and on its host, as its options hold it."""
    from holdfast.analysis.estimates import streamed_bytes

    store = objective_at(run, 0).held
    num_bytes = _numbers(reference) * np.dtype(store.dtype).itemsize if store.dtype else _bytes(reference)
    if store.memory == "device":
        return {"device": num_bytes, "host": 0}
    return {"device": streamed_bytes(run.model, reference, num_bytes), "host": num_bytes}


def time_here(run: ResolvedRun, training_flops: float) -> Json:
    """About how long a run takes on this machine: its work over the speed of a matrix product now, as a range.

    Seen on two CPU cores: training reaches about 60 % of that speed at a width of 384 and 15 % at 128, where much
    time goes to what is not a product. A start reads data and compiles.
    """
    model, curriculum, config = run.model, run.curriculum, run.config
    speed = matmul_speed(model.dtype)
    share = min(max(FULL_SHARE * model.width / FULL_WIDTH, LEAST_SHARE), FULL_SHARE)
    shares = share / DOUBT, min(share * DOUBT, 1.0)
    names = {source.name for source in curriculum.datasets}
    evaluations = len(measurements(curriculum, run.options.evaluation.steps)) if config.evaluate else 0
    validations = curriculum.total_steps // config.validation_interval if config.validate else 0
    looks = evaluations * (len(names) + len(run.held_out)) + validations * len(names)
    held_out = looks * config.validation_steps * curriculum.block_size
    flops = training_flops + held_out * model.flops_per_token(backward=False)
    low, high = (start + flops / (speed * part) for start, part in zip(START_SECONDS, shares[::-1], strict=True))
    return {
        "low_seconds": low,
        "high_seconds": high,
        "matmul_flops_per_second": speed,
        "share_of_matmul": list(shares),
        "how": (
            f"an estimate: matrix products run at {speed / 1e9:,.0f} GFLOP/s here now, of which such a model is taken "
            f"to reach {shares[0]:.0%} to {shares[1]:.0%}; held-out rows are counted, questions of evaluations and "
            "downloads are not"
        ),
    }


@functools.cache
def matmul_speed(dtype: str) -> float:
    """Operations a second of a matrix product on all devices together, measured in a fraction of a second."""
    import jax
    import jax.numpy as jnp

    on_cpu = jax.default_backend() == "cpu"
    size = 1024 if on_cpu else 8192
    matrix, product = jnp.ones((size, size), dtype), jax.jit(jnp.dot)
    product(matrix, matrix).block_until_ready()  # compiled on the way
    seconds: list[float] = []
    while sum(seconds) < 0.3 or len(seconds) < 3:  # the best of many: other work on the machine comes and goes
        began = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2.0 * size**3 / min(seconds) * (1 if on_cpu else jax.device_count())  # a CPU's devices share its cores


def _numbers(tree: Tree) -> int:
    import jax

    return int(sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(tree)))


def _bytes(tree: Tree) -> int:
    import jax

    return int(sum(np.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)))
