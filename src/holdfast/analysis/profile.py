"""Where the time of a run goes: a short rehearsal of its loop, measured, traced and set against the machine's peak."""

import collections
import functools
import gzip
import json
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from holdfast.analysis.rehearsal import Rehearsal
from holdfast.execution.files import write_json
from holdfast.methods import TokenPenalty
from holdfast.training.resolve import ResolvedRun
from holdfast.training.run import use_compilation_cache
from holdfast.types import Json

TRACE = "perfetto_trace.json.gz"
FIGURES = "profile.json"
TRACED_STEPS = 2
ROUNDS = 3
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?metadata=\{[^}]*?op_name=\"([^\"]*)\"", re.MULTILINE)
_WRAPPER = re.compile(r"(jit|jvp|transpose|checkpoint|rematted_computation|closed_call|Decoder|layers|while|body)\b.*")


class Matmul:
    """A product of two square matrices, large enough to run at the peak of a device."""

    def __init__(self, dtype: str) -> None:
        size = 2048 if jax.default_backend() == "cpu" else 8192
        self.flops = 2.0 * size**3
        self._matrix = jnp.ones((size, size), dtype)
        self._product = jax.jit(jnp.dot)

    def run(self, times: int) -> None:
        """Multiply, and wait until it is done."""
        for _ in range(times):
            product = self._product(self._matrix, self._matrix)
            # One at a time: products that wait would only take memory.
            product.block_until_ready()


@dataclass(frozen=True)
class Operation:
    """Compiled operations of a step that come from one place of the model.

    Args:
        origin: the place as the model's scopes name it; without one, the primitive of the loss or the optimizer.
        count: how many operations, such as one for each layer.
        seconds: of one step, summed over threads.
    """

    origin: str
    count: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """What was measured; times are seconds of one step, medians over rounds.

    Args:
        wall: a step of the running loop, of which `compute` is the compiled step alone, `data` the wait for a
            batch and its way to the devices, and `host` the rest.
        batch: what making a batch takes in the background.
        peak_flops: matrix products a second on all devices, measured between the rounds.
    """

    parameters: int
    tokens_per_step: int
    flops_per_step: float
    devices: int
    start: float
    compile: float
    wall: float
    compute: float
    data: float
    host: float
    batch: float
    peak_flops: float
    operations: tuple[Operation, ...]

    @property
    def share_of_peak(self) -> float:
        """Achieved share of the matrix-product peak."""
        return self.flops_per_step / self.wall / self.peak_flops

    @property
    def tokens_per_second(self) -> float:
        """Tokens of rows a second, padding included."""
        return self.tokens_per_step / self.wall

    def to_dict(self) -> Json:
        """All figures as JSON holds them."""
        figures = {name: value for name, value in self.__dict__.items() if name != "operations"}
        operations = [operation.__dict__ for operation in self.operations]
        shares = {"share_of_peak": self.share_of_peak, "tokens_per_second": self.tokens_per_second}
        return {**figures, **shares, "operations": operations}


def profile(run: ResolvedRun, out: Path, *, steps: int, stage: int = 0) -> Profile:
    """Rehearse a run and write `perfetto_trace.json.gz` and `profile.json` into a folder.

    Args:
        steps: how many are measured, besides those that warm up and those that are traced.
    """
    use_compilation_cache(run.options.data)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        rehearsal = Rehearsal(run, Path(scratch), stage)
        try:
            rehearsal.take(1)
            start = time.perf_counter() - started
            rehearsal.take(1)
            measured = _measure(rehearsal, steps)
            trace = _trace(rehearsal, Path(scratch))
            operations = top_operations(trace, rehearsal.loop.steps.hlo())
            shutil.copy(trace, out / f".{TRACE}")
            (out / f".{TRACE}").replace(out / TRACE)
            found = _profile(rehearsal, start, measured, operations)
        finally:
            rehearsal.close()
    write_json(out / FIGURES, found.to_dict())
    return found


def _measure(rehearsal: Rehearsal, steps: int) -> dict[str, float]:
    """Medians over rounds, in which the loop, the step alone, a batch alone and the peak take turns."""
    per_round = max(1, steps // ROUNDS)
    dtype = rehearsal.trainer.resolved.model.dtype
    matmul = Matmul(dtype)
    matmul.run(1)
    found: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(ROUNDS):
        before = rehearsal.data_seconds
        found["wall"].append(_seconds(functools.partial(rehearsal.take, per_round)) / per_round)
        found["data"].append((rehearsal.data_seconds - before) / per_round)
        for _ in range(per_round):
            batch = rehearsal.draw()
            jax.block_until_ready(batch)
            found["compute"].append(_seconds(functools.partial(_alone, rehearsal, batch)))
        make = rehearsal.trainer.batches.__getitem__
        found["batch"].append(_seconds(functools.partial(make, rehearsal.step)))
        found["peak"].append(matmul.flops / _seconds(functools.partial(matmul.run, 1)))
    return {name: statistics.median(values) for name, values in found.items()}


def _alone(rehearsal: Rehearsal, batch: Any) -> None:
    """The compiled step and nothing else."""
    trainer = rehearsal.trainer
    trainer.state, _, _ = rehearsal.loop.steps.ready(trainer.state, batch)()
    jax.block_until_ready(trainer.state)
    rehearsal.taken += 1


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _trace(rehearsal: Rehearsal, folder: Path) -> Path:
    """A trace of a few steps, without Python's own calls, which would drown them."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder / "trace"), create_perfetto_trace=True, profiler_options=options):
        for _ in range(TRACED_STEPS):
            with jax.profiler.StepTraceAnnotation("step", step_num=rehearsal.step):
                rehearsal.take(1)
    return next((folder / "trace").rglob(TRACE))


def _profile(
    rehearsal: Rehearsal, start: float, measured: Mapping[str, float], operations: tuple[Operation, ...]
) -> Profile:
    trainer, model = rehearsal.trainer, rehearsal.trainer.resolved.model
    devices = trainer.topology.mesh.devices.size
    tokens = trainer.resolved.curriculum.tokens_per_step
    flops = model.flops_per_token() * tokens
    if isinstance(trainer.state.objective.penalty, TokenPenalty):
        flops += model.flops_per_token(backward=False) * tokens  # the reference's forward pass
    # On a CPU all devices share the cores that the product ran on.
    sharing = 1 if jax.default_backend() == "cpu" else devices
    wall, compute, data = measured["wall"], measured["compute"], measured["data"]
    compile_seconds = trainer.micro_batch.seconds + rehearsal.loop.steps.compile_seconds
    return Profile(
        parameters=model.num_parameters(),
        tokens_per_step=tokens,
        flops_per_step=flops,
        devices=devices,
        start=start,
        compile=compile_seconds,
        wall=wall,
        compute=min(compute, wall),
        data=data,
        host=max(0.0, wall - compute - data),
        batch=measured["batch"],
        peak_flops=measured["peak"] * sharing,
        operations=operations,
    )


def top_operations(trace: Path, hlo: str) -> tuple[Operation, ...]:
    """The operations of the traced steps by their origin, the longest first.

    Args:
        hlo: the text of the compiled step.
    """
    origins = dict(_INSTRUCTION.findall(hlo))
    module = hlo.partition("HloModule ")[2].partition(",")[0]
    spent: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    for event in events:
        values = event.get("args") or {}
        if event.get("ph") == "X" and values.get("hlo_module") == module and "hlo_op" in values:
            name = values["hlo_op"]
            spent[shown(origins.get(name, name))][name] += event["dur"] / 1e6 / TRACED_STEPS
    found = [Operation(origin, len(names), sum(names.values())) for origin, names in spent.items()]
    return tuple(sorted(found, key=lambda operation: -operation.seconds))


def shown(scope: str) -> str:
    """A scope of the compiler's without what every one of them has in common.

    >>> shown("jit(<lambda>)/transpose(jvp(Decoder._trunk))/closed_call/layers/attention/q/dot_general")
    'backward attention/q/dot_general'
    """
    parts = scope.split("/")
    backward = any(part.startswith("transpose(") for part in parts)
    kept = dict.fromkeys(part for part in parts if not _WRAPPER.fullmatch(part))
    return ("backward " if backward else "") + "/".join(kept)
