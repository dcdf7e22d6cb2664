"""The hooks of a method inside a real step: what each gives is what the formula says, and what is off costs nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast import registry
from holdfast.config import field
from holdfast.errors import UserError
from holdfast.methods import BatchWeights, Method, MethodConfig, StageFacts
from holdfast.training.compile import abstract_batch, trace_train
from holdfast.training.initial import NoRows, abstract_stage
from holdfast.training.state import stage_state
from training import killing, tiny

JOB = "continual/train/abcd"
QUIET = (
    "training.per_device_batch_size=8",
    "training.evaluate=false",
    "training.validation=false",
    "optimization.clip_norm=0",
)
VALUES = {**tiny.CONTINUAL, "optimization": {"lr": 0.003, "weight_decay": 0.0}}
VALUES["stages"] = [
    {key: value for key, value in stage.items() if key not in ("beta", "update_reference", "overlap")}
    for stage in tiny.CONTINUAL["stages"]
]


@dataclass(frozen=True)
class TriedConfig(MethodConfig):
    """Options of the method under test."""

    weight: float = field("methods/tried/weight", default=1.0, help="its weight")
    stages: Optional[List[int]] = field("methods/tried/stages", default=None, help="its stages")
    scale: float = field("methods/tried/scale", default=1.0, help="what tokens weigh")
    needs_reference = True
    penalty_tokens = "loss"


@registry.methods.register("tried", config=TriedConfig, help="for these tests")
@dataclass(frozen=True)
class Tried(Method):
    """Weighs tokens by a constant, penalises the squared log-probability of targets against the reference's."""

    config: TriedConfig

    def token_weights(self, memory: Any, logp: Any, reference_logp: Any, targets: Any) -> Any:
        return jnp.full(targets.shape, self.config.scale, jnp.float32)

    def token_penalty(self, logp: Any, reference_logp: Any, targets: Any) -> Any:
        def picked(values: Any) -> Any:
            return jnp.take_along_axis(values, targets[:, None], 1)[:, 0]

        return jnp.square(picked(logp) - picked(reference_logp))


@dataclass(frozen=True)
class OldConfig(MethodConfig):
    """Options of a method that looks at old rows."""

    stages: Optional[List[int]] = field("methods/looks_back/stages", default=None, help="its stages")
    needs_old_gradients = True

    def check(self, about: StageFacts) -> None:
        if not about.draws_old:
            raise about.refusal(f"old rows in stage {about.stage}", "set training/replay")
        if about.others_with("token_penalty") or about.beta or about.trains_adapters:
            raise about.refusal("to be alone")


@registry.methods.register("looks_back", config=OldConfig, help="for these tests")
@dataclass(frozen=True)
class LooksBack(Method):
    """Adds the gradients of old rows to those of the new, and takes back half a step every time."""

    config: OldConfig

    def gradients(self, memory: Any, gradients: Any, old_gradients: Any) -> Any:
        return jax.tree.map(jnp.add, gradients, old_gradients)

    def weights(self, memory: Any, params: Any, reference: Any, step: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * 1.0, params)


@dataclass(frozen=True)
class UnsaidConfig(MethodConfig):
    """Says nothing of a reference."""

    stages: Optional[List[int]] = field("methods/unsaid/stages", default=None, help="its stages")


@registry.methods.register("unsaid", config=UnsaidConfig, help="for these tests")
@dataclass(frozen=True)
class Unsaid(Method):
    """A token penalty, which is always given the reference's side, and a memory of plain numbers."""

    config: UnsaidConfig

    def init(self, params: Any) -> Any:
        return {"seen": 0, "share": 1.0, "list": [np.zeros(2, np.float32), None]}

    def remember(self, memory: Any, state: Any, data: Any) -> Any:
        return {**memory, "seen": 10, "share": 0.5}

    def token_penalty(self, logp: Any, reference_logp: Any, targets: Any) -> Any:
        return jnp.square(logp - reference_logp).mean(axis=1)

    def observe(self, memory: Any, gradients: Any, taken: Any, params: Any) -> Any:
        return {**memory, "seen": memory["seen"] + 1, "share": memory["share"] * 0.5}


@dataclass(frozen=True)
class ByReferenceConfig(MethodConfig):
    """Token losses by the reference are asked for here alone."""

    stages: Optional[List[int]] = field("methods/by_reference/stages", default=None, help="its stages")
    weighs_by = "reference"


@registry.methods.register("by_reference", config=ByReferenceConfig, help="for these tests")
@dataclass(frozen=True)
class ByReference(Method):
    """Weighs tokens by the reference's probability."""

    config: ByReferenceConfig

    def batch_weights(self, memory: Any, nll: Any, batch: Any) -> BatchWeights:
        return BatchWeights(jnp.exp(-nll))


def entered(folder: Path, *overrides: str) -> Any:
    """A trainer at the first step of its second stage, where its parameters have moved away from the reference."""
    trainer = tiny.trainer(JOB, VALUES, folder, *QUIET, *overrides)
    state = stage_state(trainer.state, trainer.resolved, 8, NoRows(trainer.resolved))
    moved = jax.tree.map(lambda leaf: leaf * 1.02, state.params)
    return trainer, state.replace(params=moved, step=jnp.int32(8))


def one_step(trainer: Any, state: Any) -> Any:
    batch = trainer.batch("train", 8)
    return trainer.train_step(state, batch, jax.random.key(0), batch.x.shape[0])


def test_token_weights_and_penalties_enter_the_loss_as_the_formula_says(tmp_path: Path) -> None:
    trainer, state = entered(
        tmp_path, "training.methods=[tried]", "methods.tried.weight=0.25", "methods.tried.scale=0.5"
    )
    assert state.reference is not None, "a method that looks at the reference has a snapshot taken"
    _, loss, meta = one_step(trainer, state)
    batch = trainer.batch("train", 8)
    tokens = (batch.padding_mask > 0) & (batch.y >= 0)

    def log_likelihoods(params: Any) -> Any:
        micro = [jax.tree.map(lambda leaf, index=index: leaf[index], batch) for index in range(batch.x.shape[0])]
        return np.stack([np.asarray(state.log_likelihoods(params, each), np.float64) for each in micro])

    own, frozen = log_likelihoods(state.params), log_likelihoods(state.reference)
    np.testing.assert_allclose(meta["ce"], -own[tokens].sum() / tokens.sum(), rtol=1e-5)
    np.testing.assert_allclose(loss, 0.5 * meta["ce"] + 0.25 * meta["method/tried"], rtol=1e-5)
    np.testing.assert_allclose(meta["method/tried"], np.square(own - frozen)[tokens].mean(), rtol=1e-4)


def test_at_its_neutral_setting_it_agrees_with_plain_training(tmp_path: Path) -> None:
    neutral = (
        "training.methods=[tried]",
        "methods.tried.weight=0",
        "methods.tried.scale=1",
        "methods.tried.stages=[1]",
    )
    runs = [tiny.trainer(JOB, VALUES, tmp_path, *QUIET, name="plain")]
    runs.append(tiny.trainer(JOB, VALUES, tmp_path, *QUIET, *neutral, name="neutral"))
    for trainer in runs:
        trainer.run()
    found = [[record["ce"] for record in killing.train_records(trainer.spec.run_dir)] for trainer in runs]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    assert found[0][:8] == found[1][:8], "off in the first stage"


@pytest.mark.parametrize("name", ["unsaid", "by_reference"])
def test_a_hook_that_is_given_the_references_side_has_a_snapshot_taken(name: str) -> None:
    curriculum = tiny.resolved(JOB, VALUES, f"training.methods=[{name}]").curriculum
    assert curriculum.snapshot_steps() == {8: 1}


def test_a_memory_of_plain_numbers_trains_and_goes_on(tmp_path: Path) -> None:
    """What `init` and `remember` give as numbers are arrays in the state, which steps and checkpoints need."""
    overrides = (*QUIET, "training.methods=[unsaid]")
    whole = tiny.trainer(JOB, VALUES, tmp_path / "whole", *overrides)
    whole.run()
    memory = whole.state.memory["unsaid"]
    assert int(memory["seen"]) == 10 + 8
    assert float(memory["share"]) == 0.5**9
    tiny.copy_until(whole, tmp_path / "again", 8)
    again = tiny.trainer(JOB, VALUES, tmp_path / "again", *overrides)
    again.run()
    tiny.same_state(whole, again)


def test_gradients_of_old_and_new_rows_are_told_apart(tmp_path: Path) -> None:
    """Their sum is the gradient of the cross-entropies of both, each over its own tokens."""
    replay = "training.replay={rate: 0.5}"
    trainer, state = entered(tmp_path, "training.methods=[looks_back]", replay)
    batch = trainer.batch("train", 8)
    old = batch.old_mask > 0
    assert old.any()
    assert not old.all()
    _, _, meta = one_step(trainer, state)

    def gradient(rows: Any) -> Any:
        def loss(params: Any) -> Any:
            total = count = 0.0
            for index in range(batch.x.shape[0]):
                micro = jax.tree.map(lambda leaf, index=index: leaf[index], batch)
                counted = jnp.asarray(rows[index] & (micro.padding_mask > 0) & (micro.y >= 0))
                total = total - jnp.where(counted, state.log_likelihoods(params, micro), 0).sum()
                count = count + counted.sum()
            return total / count

        return jax.grad(loss)(state.params)

    wanted = jax.tree.map(jnp.add, gradient(~old), gradient(old))
    norm = np.sqrt(sum(float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(wanted)))
    np.testing.assert_allclose(meta["grad_norm"], norm, rtol=1e-4)


def test_a_stage_in_which_no_method_acts_compiles_to_plain_training(tmp_path: Path) -> None:
    def products(trainer: Any, stage: int) -> int:
        batch = abstract_batch(trainer.resolved, trainer.topology.mesh, (1, 8))
        state = abstract_stage(trainer.state, trainer.resolved, stage)
        lowered = trace_train(trainer.train_step, trainer.topology.mesh, state, batch, jax.random.key(0)).lower()
        return lowered.as_text().count("dot_general")

    plain = tiny.trainer(JOB, VALUES, tmp_path, *QUIET)
    method = tiny.trainer(JOB, VALUES, tmp_path, *QUIET, "training.methods=[tried]", name="method")
    assert products(plain, 0) == products(plain, 1) == products(method, 0) < products(method, 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.methods=[tryed]", r"training/methods/0: there is no method 'tryed'; did you mean 'tried'"),
        ("training.methods=[tried,tried]", "training/methods/1: got 'tried', expected each method once"),
        ("training.methods=[TRIED]", r"training/methods/0: there is no method 'TRIED'; did you mean 'tried'"),
        ("training.methods=[sam]", "training/methods/0: got 'sam', expected a method.*set optimization/sam/rho"),
        ("training.methods=[dft,forward]", "training/methods/1: got 'forward'.*set optimization/kl/estimator"),
        ("training.methods=[lines]", "training/methods/0: got 'lines'.*`holdfast average"),
        ("training.methods=null", r"training/methods: got None, expected a list \(text each\); write \[\] for none"),
        ("logging.probes=[update_norm]", r"logging/probes/0: there is no probe 'update_norm'; did you mean"),
    ],
)
def test_a_wrong_name_is_refused_with_its_path(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny.resolved(JOB, VALUES, override)


def test_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="methods/tried/stages/1: got 7, expected the index of a stage, 0 to 1"):
        tiny.resolved(JOB, VALUES, "training.methods=[tried]", "methods.tried.stages=[1,7]")
    with pytest.raises(UserError, match=r"methods/tried/stages: got \[\], expected at least one stage"):
        tiny.resolved(JOB, VALUES, "training.methods=[tried]", "methods.tried.stages=[]")
    with pytest.raises(UserError, match="methods/tried/stages/1: got 1, expected each stage once"):
        tiny.resolved(JOB, VALUES, "training.methods=[tried]", "methods.tried.stages=[1,1]")


REPLAY = "training.replay={rate: 0.25}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), r"training/methods/0: got 'looks_back', expected old rows in stage 1; set training/replay"),
        (("training.methods=[tried,looks_back]", REPLAY), "training/methods/1: got 'looks_back', expected to be alone"),
        ((REPLAY, "optimization.lora.rank=2"), "expected to be alone"),
        ((REPLAY, "methods.looks_back.stages=[0]"), "expected old rows in stage 0"),
        ((REPLAY,), None),
        (("training.fade.overlap=0.5",), None),
        (("training.methods=[tried,looks_back]", REPLAY, "methods.tried.stages=[0]"), None),
    ],
)
def test_a_method_refuses_a_stage_in_which_it_makes_no_sense(overrides: tuple[str, ...], message: str | None) -> None:
    every = ("training.methods=[looks_back]", *overrides)
    if message is None:
        tiny.resolved(JOB, VALUES, *every)
        return
    with pytest.raises(UserError, match=message):
        tiny.resolved(JOB, VALUES, *every)
