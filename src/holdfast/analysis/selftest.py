"""Whether what Holdfast rests on works on the devices that are here: what a user with a new machine runs first.

Kernels against the plain formula, collectives, a run twice, a checkpoint and back, the mesh against one device; then
what a step achieves. Each check says what it saw. One that fails or breaks off does not stop the others.
"""

import contextlib
import functools
import importlib.metadata
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from holdfast.analysis.profile import Matmul
from holdfast.analysis.rehearsal import Rehearsal
from holdfast.config import merge
from holdfast.execution import Topology, processes
from holdfast.execution.chips import chip_of
from holdfast.execution.topology import AXES
from holdfast.models import kernels
from holdfast.models.attention import chunked_attention
from holdfast.training import restore
from holdfast.training.config import config_classes
from holdfast.training.resolve import ResolvedRun, resolve
from holdfast.types import Json, Tree

JOB = "continual/train/abcd_kl"
STEPS = 4  # of the short run
MEASURED = 6
EMULATED = {"splash": "tpu", "triton": "gpu"}  # on a CPU kernels run step by step
# Rules that kernels are checked with: no others, and those beside them that a kernel knows.
KERNEL_RULES = {
    "splash": (kernels.PLAIN, kernels.Rules(0.2, 4.0, 70)),
    "triton": (kernels.PLAIN, kernels.Rules(0.2)),
    "cudnn": (kernels.PLAIN, kernels.Rules(0.2, window=70)),
}
KERNEL_LENGTHS = (640, 2000, 4096)  # small blocks, large ones, and splash's other backward pass


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Args:
        passed: None where there was nothing to check.
        found: what was seen, in words.
    """

    name: str
    passed: bool | None
    found: str
    seconds: float


class WrongError(Exception):
    """What a check found wrong."""


def machine() -> Json:
    """What the checks ran on; nothing that names a host, a user or a folder."""
    device = jax.devices()[0]
    return {
        "holdfast": importlib.metadata.version("holdfast"),
        "jax": jax.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }


def checks() -> Iterator[Check]:
    """All checks, each when it is done."""
    for name in kernel_names():
        yield _checked(f"kernel {name}", functools.partial(kernel, name))
    yield _checked("collectives", lambda: collectives(jax.devices()))
    with tempfile.TemporaryDirectory() as folder, _compiled_once(Path(folder)):
        short = ShortRun(Path(folder))
        yield _checked("short run", short.take)
        yield _checked("the same run again", short.again)
        yield _checked("checkpoint and back", short.resumed)
        yield _checked("mesh against one device", short.on_one_device)
        yield _checked("throughput", lambda: throughput(Path(folder)))


@contextlib.contextmanager
def _compiled_once(folder: Path) -> Iterator[None]:
    """Programs that several checks run are compiled for the first of them."""
    before: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]  # flags are made at run time
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def _checked(name: str, work: Callable[[], str | None]) -> Check:
    started = time.perf_counter()
    try:
        found = work()
    except WrongError as error:
        return Check(name, False, str(error), time.perf_counter() - started)
    except Exception as error:  # whatever breaks on a new machine is what this command is for
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return Check(name, False, f"{type(error).__name__}: {reason}", time.perf_counter() - started)
    return Check(name, None if found is None else True, found or "nothing to check here", time.perf_counter() - started)


# Kernels


def kernel_names() -> list[str]:
    """The kernels that can run here: those of the platform, and on a CPU all that can be run step by step."""
    platform = jax.default_backend()
    if platform == "tpu":
        return ["splash"]
    if platform == "gpu":
        return ["triton", "cudnn"] if kernels.has_cudnn() else ["triton"]
    return list(EMULATED)


def kernel(name: str) -> str:
    """Values and gradients of a kernel against the plain formula; no token is seen from where it must not be.

    On all devices of this process: each has its own rows and heads.
    """
    emulated = jax.default_backend() == "cpu"
    lengths, dtype = ((200,), "float32") if emulated else (KERNEL_LENGTHS, "bfloat16")
    mesh = _mesh(jax.local_devices())
    off = [_kernel_on(mesh, name, length, rules) for length in lengths for rules in KERNEL_RULES[name]]
    how = "step by step" if emulated else "compiled"
    devices = f" on {mesh.size} devices" if mesh.size > 1 else ""
    return f"within {max(off):.1e} of the plain formula ({dtype}, {how}{devices}); packed examples are apart"


def _kernel_on(mesh: Mesh, name: str, length: int, rules: kernels.Rules) -> float:
    """How far a kernel is off the plain formula with some rules, as a share of the largest number."""
    emulated = jax.default_backend() == "cpu"
    heads, groups, size, dtype = (4, 2, 16, "float32") if emulated else (8, 2, 64, "bfloat16")
    random, rows = np.random.default_rng(0), max(2, mesh.shape["data"] * mesh.shape["fsdp"])
    arrays = tuple(
        jnp.asarray(random.normal(size=(rows, length, count, size)), dtype) for count in (heads, groups, groups, heads)
    )
    # In turns a row of three examples and one of a single text.
    segments: NDArray[Any] = np.zeros((rows, length), np.int32)
    if name != "cudnn":
        segments[::2] = np.arange(length) * 3 // length
    ids = None if name == "cudnn" else jnp.asarray(segments)

    def results(attention: Callable[..., jax.Array], given: tuple[jax.Array, ...]) -> Tree:
        out, pull = jax.vjp(attention, *given[:3])
        return (out, *pull(given[3].astype(out.dtype)))

    def fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return kernels.on_mesh(name, q, k, v, ids, rules)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return chunked_attention(q, k, v, ids, rules=rules)

    step_by_step = kernels.emulating(EMULATED[name]) if emulated else contextlib.nullcontext()
    with jax.set_mesh(mesh), step_by_step:
        taken = jax.jit(lambda given: results(fused, given)).lower(arrays).compile()
    got = taken(arrays)
    with jax.default_matmul_precision("highest"):
        whole = tuple(array.astype(jnp.float32) for array in arrays)
        expected = jax.jit(lambda given: results(plain, given))(whole)
    limit, apart = (1e-5 if emulated else 2e-3), []
    for own, right in zip(got, expected, strict=True):
        error = np.asarray(own, np.float32) - np.asarray(right)
        far = np.abs(error).max() if emulated else np.sqrt(np.square(error).mean())
        apart.append(float(far / np.abs(right).max()))
    worst = float(np.max(apart))  # NaN where one of them is, which Python's own `max` may pass over
    if not worst <= limit:
        raise WrongError(f"{worst:.1e} off the plain formula{_with(rules)}; at most {limit:.0e} is rounding")
    _apart(taken, arrays, got[0], segments, rules)
    return worst


def _apart(
    taken: Callable[..., Tree],
    arrays: tuple[jax.Array, ...],
    out: jax.Array,
    segments: NDArray[Any],
    rules: kernels.Rules,
) -> None:
    """A token changes nothing that must not see it, and gets no gradient from there: not a bit, however small.

    Args:
        taken: gives values and gradients.
        out: the values as they are.
    """
    q, k, v, gradient = arrays
    length = q.shape[1]
    at, time = length // 2, np.arange(length)
    of_one, near = segments == segments[:, at : at + 1], np.abs(time - at) < (rules.window or length)
    changed = taken((q, k.at[:, at].add(1), v.at[:, at].add(10), gradient))[0]
    moved = np.asarray((changed != out).any(axis=(2, 3)))
    if (moved & ~(of_one & near & (time >= at))).any():
        raise WrongError(f"a token is seen from the past or from another packed example{_with(rules)}")
    found = taken((q, k, v, jnp.zeros_like(gradient).at[:, at].set(gradient[:, at])))[1:]
    reached = [np.asarray((each != 0).any(axis=(2, 3))) for each in found]
    for each, where in zip(
        reached, (time == at, of_one & near & (time <= at), of_one & near & (time <= at)), strict=True
    ):
        if (each & ~where).any():
            raise WrongError(f"a gradient goes to the future or to another packed example{_with(rules)}")


def _with(rules: kernels.Rules) -> str:
    found = {name: value for name, value in rules._asdict().items() if value is not None}
    return " with " + ", ".join(f"{name} {value}" for name, value in found.items()) if found else ""


def _mesh(devices: list[jax.Device]) -> Mesh:
    """The devices on all axes that they allow."""
    tensor, fsdp = _axes(len(devices))
    shape = (len(devices) // (tensor * fsdp), fsdp, tensor)
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def _axes(num_devices: int) -> tuple[int, int]:
    """Sizes of the axes `tensor` and `fsdp` among so many devices."""
    return 2 if num_devices % 4 == 0 else 1, 2 if num_devices % 2 == 0 else 1


# Collectives


def collectives(devices: list[jax.Device]) -> str | None:
    """Sums, gathers, scatters, shifts and exchanges of small whole numbers over all devices, exactly."""
    count = len(devices)
    if count == 1:
        return None
    mesh = Mesh(np.array(devices), ("all",))
    rows, whole = PartitionSpec("all"), PartitionSpec()
    numbers = np.arange(count * count, dtype=np.int32).reshape(count, count)
    given = jax.make_array_from_callback(numbers.shape, NamedSharding(mesh, rows), lambda index: numbers[index])
    shift = [(device, (device + 1) % count) for device in range(count)]
    cases: dict[str, tuple[Callable[[jax.Array], jax.Array], PartitionSpec, NDArray[Any]]] = {
        "all-reduce": (lambda x: jax.lax.psum(x[0], "all"), whole, numbers.sum(axis=0)),
        "all-gather": (lambda x: jax.lax.all_gather(x[0], "all"), whole, numbers),
        "reduce-scatter": (lambda x: jax.lax.psum_scatter(x[0], "all", tiled=True), rows, numbers.sum(axis=0)),
        "permute": (lambda x: jax.lax.ppermute(x, "all", shift), rows, np.roll(numbers, 1, axis=0)),
        "all-to-all": (lambda x: jax.lax.all_to_all(x, "all", 1, 1, tiled=True), rows, numbers.T),
    }
    for name, (function, out, expected) in cases.items():
        spread = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=out, check_vma=False)
        result = jax.jit(spread)(given)
        for shard in result.addressable_shards:
            if not np.array_equal(np.asarray(shard.data), expected[shard.index]):
                raise WrongError(f"{name} over {count} devices gives wrong numbers")
    return f"{', '.join(cases)} over {count} devices, exact"


# A short run


def short_config(num_devices: int, *, accelerator: bool) -> tuple[Json, list[str]]:
    """A small anchored run on text that needs no download, spread over all axes that the devices allow."""
    length, batch = (256 if accelerator else 64), 4 * num_devices
    sizes = {"n_layers": 2, "n_embd": 256, "n_head": 4} if accelerator else {"n_layers": 2, "n_embd": 64, "n_head": 4}
    values: Json = {
        "stages": [
            {"tokens": batch * length * STEPS, "data": [{"name": "lists", "style": "PACKED"}]},
            {
                "tokens": batch * length * STEPS,
                "data": [{"name": "arithmetic", "style": "PACKED"}],
                "beta": 0.5,
                "update_reference": True,
            },
        ],
        "training": {"batch_size": batch, "per_device_batch_size": 2},
        "optimization": {"kl": {"estimator": "forward"}},
        "eval": {"evaluations": ["arithmetic"], "limit": 8},
        "architecture": {
            "block_size": length,
            "preset": "tiny",
            "dtype": "bfloat16" if accelerator else "float32",
            **sizes,
        },
    }
    tensor, fsdp = _axes(num_devices)
    return values, [f"topology.tensor={tensor}", f"topology.fsdp={fsdp}"]


class ShortRun:
    """A few steps of an anchored stage, taken in several ways that must agree.

    Args:
        folder: of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.accelerator = jax.default_backend() != "cpu"
        self.losses: list[float] = []
        self.end: dict[str, bytes] = {}

    def resolved(self, num_devices: int) -> ResolvedRun:
        """The run on so many devices; its rows are those of all devices."""
        values, overrides = short_config(jax.device_count(), accelerator=self.accelerator)
        if num_devices == 1:
            overrides = []
        return resolve(JOB, merge(config_classes(JOB), values, [*overrides, f"data.cache={self.folder / 'cache'}"]))

    def rehearsal(self, name: str, *, topology: Topology | None = None) -> Rehearsal:
        """The run in a folder of its own, at the beginning of the anchored stage."""
        devices = jax.device_count() if topology is None else topology.mesh.size
        return Rehearsal(self.resolved(devices), self.folder / name, stage=1, topology=topology)

    def take(self) -> str:
        """Some steps; the loss must be a number and fall."""
        rehearsal = self.rehearsal("first")
        try:
            rehearsal.take(STEPS)
            self.losses, self.end = rehearsal.losses.found, _bits(rehearsal.trainer.state.arrays())
        finally:
            rehearsal.close()
        mesh = " x ".join(f"{axis} {size}" for axis, size in rehearsal.trainer.topology.sizes.items())
        if processes.is_first() and not np.isfinite(self.losses).all():
            raise WrongError(f"losses {self.losses}")
        return f"{STEPS} steps on {mesh}" + (f", loss {self.losses[-1]:.4f}" if self.losses else "")

    def again(self) -> str:
        """The same steps from the beginning, to the bit."""
        rehearsal = self.rehearsal("second")
        try:
            rehearsal.take(STEPS)
            self._must_equal(_bits(rehearsal.trainer.state.arrays()))
        finally:
            rehearsal.close()
        return f"{len(self.end)} arrays are the same to the bit"

    def resumed(self) -> str:
        """Half of the steps, a checkpoint, the other half in a new trainer, to the bit."""
        half = STEPS // 2
        rehearsal = self.rehearsal("broken")
        try:
            rehearsal.take(half)
            at = rehearsal.step
            rehearsal.loop.checkpoint(at, (), durable=True)
            rehearsal.store.wait()
        finally:
            rehearsal.close()
        rehearsal = self.rehearsal("broken")
        try:
            trainer = rehearsal.trainer
            trainer.state, _ = restore.start(
                trainer.restorer, trainer.state, trainer.plan, trainer.triggers.tags, lambda _: None
            )
            if int(trainer.state.step) != at:
                raise WrongError(f"the checkpoint of step {at} came back as step {int(trainer.state.step)}")
            rehearsal.skip(half)
            rehearsal.take(STEPS - half)
            self._must_equal(_bits(trainer.state.arrays()))
        finally:
            rehearsal.close()
        return "the resumed run ends in the same bits"

    def on_one_device(self) -> str | None:
        """The same steps on one device: the same losses up to rounding."""
        if jax.device_count() == 1 or jax.process_count() > 1:
            return None
        rehearsal = self.rehearsal("alone", topology=Topology.build(devices=jax.devices()[:1]))
        try:
            rehearsal.take(STEPS)
            apart = float(np.abs(np.subtract(rehearsal.losses.found, self.losses)).max())
        finally:
            rehearsal.close()
        limit = 2e-2 if self.accelerator else 1e-4
        if not apart <= limit:
            raise WrongError(f"losses differ by {apart:.1e}; at most {limit:.0e} is rounding")
        return f"losses within {apart:.1e}"

    def _must_equal(self, other: dict[str, bytes]) -> None:
        if not self.end:
            raise WrongError("there is no run to compare with")
        different = [name for name, value in self.end.items() if other.get(name) != value]
        if different or len(other) != len(self.end):
            raise WrongError(
                f"{len(different)} of {len(self.end)} arrays differ, {different[0] if different else 'or more'}"
            )


def _bits(arrays: Tree) -> dict[str, bytes]:
    """This process's part of a state."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    found: dict[str, bytes] = {}
    for path, leaf in leaves:
        shards = leaf.addressable_shards if isinstance(leaf, jax.Array) else []
        parts = [np.asarray(shard.data).tobytes() for shard in shards] if shards else [np.asarray(leaf).tobytes()]
        found[jax.tree_util.keystr(path)] = b"".join(parts)
    return found


# What a step achieves


def throughput(folder: Path) -> str:
    """Tokens a second, and the share of the peak: of the published one where the device is known."""
    accelerator, count = jax.default_backend() != "cpu", jax.device_count()
    values, overrides = short_config(count, accelerator=accelerator)
    if accelerator:  # large enough that matrix products dominate
        length, batch = 1024, 8 * count
        values["architecture"] |= {"block_size": length, "n_layers": 12, "n_embd": 768, "n_head": 12}
        values["training"] |= {"batch_size": batch, "per_device_batch_size": 8}
        for stage in values["stages"]:
            stage["tokens"] = batch * length * STEPS
        overrides = []
    run = resolve(JOB, merge(config_classes(JOB), values, [*overrides, f"data.cache={folder / 'cache'}"]))
    rehearsal = Rehearsal(run, folder / "throughput")
    try:
        rehearsal.take(2)
        started = time.perf_counter()
        rehearsal.take(MEASURED)
        seconds = (time.perf_counter() - started) / MEASURED
    finally:
        rehearsal.close()
    tokens = run.curriculum.tokens_per_step
    achieved = run.model.flops_per_token() * tokens / seconds
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is not None:
        peak, whose = chip.flops * chip.cores * count, "the published peak: MFU"
    else:
        matmul = Matmul(run.model.dtype)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            matmul.run(1)
            times.append(time.perf_counter() - started)
        # The fastest: what else runs here slows some. On a CPU all devices share the cores that the product ran on.
        peak = matmul.flops / min(times) * (count if accelerator else 1)
        whose = "the matrix-product peak measured here"
    return f"{tokens / seconds:,.0f} tokens/s, {seconds * 1e3:,.0f} ms a step, {achieved / peak:.1%} of {whose}"
