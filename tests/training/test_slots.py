"""Work on old rows alone: the same numbers as on the whole batch, on fewer rows, and old runs as they were."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast import registry
from holdfast.analysis.hlo import matmul_flops
from holdfast.analysis.plan import method_flops, reference_rows, unused_options
from holdfast.config import field
from holdfast.data.batches import Batch
from holdfast.execution.checkpoints import write_manifest
from holdfast.methods import Method, MethodConfig
from holdfast.methods.anchors import FORWARD, REVERSE
from holdfast.objectives.token_loss import Penalised, token_loss
from holdfast.training.compile import abstract_arguments, abstract_batch, trace_train
from holdfast.training.initial import NoRows, abstract_stage
from holdfast.training.manifest import ROW_ORDER
from holdfast.training.state import stage_state
from holdfast.training.step import loss_and_gradients
from training import tiny

JOB = "continual/train/abcd_kl"
OLD = (
    "optimization.kl.on=old",
    "training.replay.rate=0.25",
    "stages.1.overlap=0",
    "training.evaluate=false",
    "training.validation=false",
)


@jax.jit
def loss_of(state: Any, batch: Batch, key: jax.Array) -> Any:
    """The loss of a step, its parts, and the gradients that go to the optimizer."""
    found = loss_and_gradients(state, batch, key)
    return (found.loss, found.parts), found.total


@dataclass(frozen=True)
class TurnsConfig(MethodConfig):
    """Options of the test's method."""

    stages: Optional[List[int]] = field("methods/turns/stages", default=None, help="null = all from the second on")
    needs_old_gradients = True


@registry.methods.register("turns", config=TurnsConfig, help="gradients of new rows plus ten times those of old ones")
@dataclass(frozen=True)
class Turns(Method):
    """Makes the gradients of old rows visible in a step's."""

    config: TurnsConfig

    def gradients(self, memory: Any, gradients: Any, old_gradients: Any) -> Any:
        """g + 10 g_old."""
        return jax.tree.map(lambda new, old: new + 10 * old, gradients, old_gradients)


def entered(folder: Path, *overrides: str) -> tuple[Any, Any]:
    """A trainer and its state in the second stage, whose weights have moved away from the reference."""
    trainer = tiny.trainer(JOB, tiny.CONTINUAL, folder, *OLD, *overrides)
    state = stage_state(trainer.state, trainer.resolved, 8, NoRows(trainer.resolved))
    moved = jax.tree.map(lambda leaf: leaf * 1.1 + 0.01, state.params)
    return trainer, state.replace(params=moved)


def unordered(batch: Batch) -> Batch:
    """The batch of another order of rows, without slots."""
    order = np.random.default_rng(0).permutation(batch.x.shape[0] * batch.x.shape[1])

    def shuffled(array: Any) -> Any:
        flat = np.asarray(array).reshape(-1, array.shape[-1])
        return flat[order].reshape(array.shape)

    return Batch(*(None if array is None else shuffled(array) for array in batch._replace(slots=None)))


@pytest.mark.parametrize("rows", [8, 4])
def test_the_gradients_of_a_step_are_those_without_slots(rows: int, tmp_path: Path) -> None:
    """Of an exact KL on old rows, and of a method that looks at the gradients of old rows."""
    trainer, state = entered(tmp_path, f"training.per_device_batch_size={rows}", "training.methods=[turns]")
    batch = trainer.batch("train", 8)
    assert batch.slots.shape == (8 // rows, 1, 2 * rows // 8)
    (loss, parts), gradients = loss_of(state, batch, jax.random.key(0))
    assert float(parts["penalty"]) > 1e-3
    for other in (batch._replace(slots=None), unordered(batch)):
        (wanted_loss, wanted_parts), wanted = loss_of(state, other, jax.random.key(0))
        np.testing.assert_allclose([loss, parts["penalty"]], [wanted_loss, wanted_parts["penalty"]], rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), gradients, wanted)


def test_a_step_without_old_rows_runs_no_reference(tmp_path: Path) -> None:
    trainer, state = entered(tmp_path, "training.replay.rate=0.001", "training.methods=[turns]")
    batch = trainer.batch("train", 8)
    assert batch.slots.shape == (1, 1, 0)
    (loss, parts), gradients = loss_of(state, batch, jax.random.key(0))
    (wanted_loss, _), wanted = loss_of(state, batch._replace(slots=None), jax.random.key(0))
    assert float(parts["penalty"]) == 0
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), gradients, wanted)


def test_the_reference_runs_on_the_rows_that_are_looked_at(tmp_path: Path) -> None:
    """Products: of the whole batch for the policy, of a quarter of it for the reference."""
    trainer, _ = entered(tmp_path)
    run, mesh = trainer.resolved, trainer.topology.mesh

    def products(stage: int, slots: tuple[int, int] | None) -> int:
        state = abstract_stage(trainer.state, run, stage)
        batch = abstract_batch(run, mesh, (1, 8), slots)
        traced = trace_train(trainer.train_step, mesh, state, batch, jax.random.key(0))
        return matmul_flops(traced.jaxpr, 32)

    plain, whole, quarter = products(0, None), products(1, None), products(1, (1, 2))
    assert (quarter - plain) == pytest.approx((whole - plain) / 4, rel=1e-3)
    state = abstract_stage(trainer.state, run, 1)
    assert abstract_arguments(run, trainer.topology, 8, state)[1].slots.shape == (1, 1, 2)
    assert abstract_arguments(run, trainer.topology, 8, state, row_order=1)[1].slots is None


def test_the_plan_counts_the_rows_that_the_reference_runs_on(tmp_path: Path) -> None:
    trainer = tiny.trainer(JOB, tiny.CONTINUAL, tmp_path, *OLD)
    whole = tiny.trainer(JOB, tiny.CONTINUAL, tmp_path, *OLD, "optimization.kl.on=batch", name="whole")
    assert reference_rows(trainer.resolved, trainer.plan) == 8 * 2
    assert reference_rows(whole.resolved, whole.plan) == 8 * 8


@pytest.mark.parametrize(
    ("overrides", "slotted"),
    [
        ((), True),
        (("optimization.kl.on=batch",), False),
        (("optimization.kl.estimator=nll_difference",), False),
        (("optimization.kl.estimator=l2_reference",), False),
        (("optimization.kl.on=batch", "training.replay.objective=ce"), False),
        (("optimization.kl.on=batch", "training.methods=[turns]"), True),
    ],
)
def test_only_what_looks_at_old_rows_alone_has_slots(overrides: Any, slotted: bool, tmp_path: Path) -> None:
    trainer = tiny.trainer(JOB, tiny.CONTINUAL, tmp_path, *OLD, *overrides)
    assert (trainer.batch("train", 8).slots is not None) == slotted
    assert trainer.batch("train", 7).slots is None


def test_a_run_begun_with_an_earlier_version_keeps_its_order(tmp_path: Path) -> None:
    first = tiny.trainer(JOB, tiny.CONTINUAL, tmp_path, *OLD)
    assert first.row_order == ROW_ORDER
    first.save(Path("begun"))
    (path,) = first.checkpoint_dir.glob("*/manifest/metadata")
    manifest = json.loads(path.read_text())
    assert manifest.pop("row_order") == ROW_ORDER
    again = tiny.trainer(JOB, tiny.CONTINUAL, tmp_path, *OLD)
    assert again.row_order == ROW_ORDER
    write_manifest(path.parent.parent, manifest)
    resumed = tiny.trainer(JOB, tiny.CONTINUAL, tmp_path, *OLD)
    branch = tiny.trainer(JOB, tiny.CONTINUAL, tmp_path, *OLD, name="branch", parent=f"{first.spec.run_dir}@begun")
    for trainer in (resumed, branch):
        assert trainer.machine["row_order"] == 1, "and its next checkpoints say so too"
        batch, refs = trainer.batch("train", 9), trainer.plan.rows_at(9)
        assert batch.slots is None
        old = trainer.plan.is_old(1)[refs.source]
        assert (batch.penalty_mask[0].any(axis=-1) == old).all(), "rows lie as they are shuffled"
    assert (np.sort(batch.x[0], axis=0) == np.sort(first.batch("train", 9).x[0], axis=0)).all()


@pytest.mark.parametrize("chunk_tokens", [None, 24])
@pytest.mark.parametrize(("blocks", "held"), [(1, 2), (4, 1), (2, 3)])
def test_a_loss_whose_reference_has_the_first_rows_of_each_block(
    blocks: int, held: int, chunk_tokens: int | None
) -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    rows, time, width, vocabulary = 8, 6, 5, 11
    hidden, reference = (jax.random.normal(key, (rows, time, width)) for key in keys[:2])
    matrix, other = (jax.random.normal(key, (width, vocabulary)) for key in keys[2:4])
    targets = jax.random.randint(keys[4], (rows, time), -1, vocabulary)
    first = np.zeros((blocks, rows // blocks, time), np.float32)
    first[:, :held] = np.random.default_rng(0).random((blocks, held, time))
    weights = jnp.asarray(first.reshape(rows, time))
    penalties = [Penalised(FORWARD, 0.7, weights), Penalised(REVERSE, 0.3, weights / 2)]
    cut = reference.reshape(blocks, -1, time, width)[:, :held].reshape(-1, time, width)

    def loss(hidden: Any, matrix: Any, states: Any, parts: int) -> Any:
        return token_loss(
            hidden,
            matrix,
            targets,
            jnp.full(targets.shape, 0.1),
            penalties=penalties,
            reference_hidden=states,
            reference_unembedding_DV=other,
            reference_blocks=parts,
            chunk_tokens=chunk_tokens,
        )

    found, wanted = (
        jax.value_and_grad(lambda h, m: loss(h, m, *given), argnums=(0, 1), has_aux=True)(hidden, matrix)  # noqa: B023
        for given in ((cut, blocks), (reference, 1))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


def test_the_plan_counts_what_methods_compute_beside_the_loss(tmp_path: Path) -> None:
    """Of 8 steps of 8 rows: a look of the snapshot and one of the model at each, and two old rows pulled back again."""
    weighing = "training.methods=[stm,talr,flow]"
    made = [
        tiny.trainer(JOB, tiny.CONTINUAL, tmp_path, *OLD, names, name=name)
        for name, names in (("plain", "training.methods=[]"), ("weighs", weighing), ("old", "training.methods=[turns]"))
    ]
    plain, weighs, old = (method_flops(each.resolved, each.plan) / 32 for each in made)
    model = made[0].resolved.model
    assert plain == 0
    assert weighs == pytest.approx(2 * 8 * 8 * model.flops_per_token(backward=False))
    assert old == pytest.approx(2 * 8 * model.flops_per_token())


def test_the_plan_names_options_that_do_nothing() -> None:
    run = tiny.resolved(JOB, tiny.CONTINUAL, *OLD, "training.methods=[turns]", "methods.ewc.weight=3")
    assert unused_options(run) == ["methods/ewc/weight is set, and ewc is not in training/methods: it does nothing"]
    assert unused_options(tiny.resolved(JOB, tiny.CONTINUAL, "training.methods=[ewc]", "methods.ewc.weight=3")) == []
