"""Budgets: the controller against its formula, the mix of gradients, control rows in the plan, what is refused."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.config import merge
from holdfast.curriculum import Budget, Curriculum, ReplayMemory, SelfReplay, Stage
from holdfast.data.batches import kept_rows, without_control
from holdfast.data.plan import DataPlan, SourceSize
from holdfast.data.sampling import SELF, DatasetStyle, Sampling, SourceKey
from holdfast.errors import ConfigError
from holdfast.evaluation.budgets import exit_code, told, verdict
from holdfast.evaluation.statistics import Difference
from holdfast.methods.budget import KeepConfig, check_control, with_budgets
from holdfast.methods.controller import Controller, moved_by, unmoved
from holdfast.training.certificate import certificate, end_of_stage
from holdfast.training.config import config_classes
from holdfast.training.initial import NoRows
from holdfast.training.resolve import read_options
from holdfast.training.state import stage_state
from holdfast.training.step import loss_and_gradients, train_step
from training import tiny

JOB = "continual/train/abcd_kl"
BATCH, BLOCK, STEPS = 8, 4, 400
A, B = (SourceKey(name, DatasetStyle.PMD) for name in "ab")
VALUES: dict[str, Any] = {
    **tiny.CONTINUAL,
    "stages": [
        {"tokens": 8 * 32 * 8, "data": [{"name": "lists", "style": "PMD"}]},
        {"tokens": 8 * 32 * 320, "data": [{"name": "arithmetic", "style": "PMD"}]},
    ],
    "training": {**tiny.CONTINUAL["training"], "replay": {"rate": 0.25}},
}
QUIET = ("training.evaluate=false", "training.validation=false", "eval.evaluations=[]")


def test_the_controller_is_its_formula() -> None:
    """Over steps with none, one and several control rows, above and below the aim, also in a stage's last fifth."""
    rng, limit = np.random.default_rng(0), 0.05
    state, integral, top, weight, multiplier = unmoved(), 0.0, 0.0, 0.0, 1.0
    for step in range(60):
        rise, rows, late = float(rng.normal(0.06 if step < 25 else 0.01, 0.02)), int(rng.integers(1, 4)), step >= 48
        state = moved_by(state, jnp.float32(rise), jnp.int32(rows), limit, jnp.asarray(late))
        memory = (31 / 32) ** rows
        top, weight = memory * top + (1 - memory) * rise, memory * weight + (1 - memory)
        error = min(max((top / weight - 0.8 * limit) / (0.8 * limit), -1), 1)
        if error > 0:
            integral += 0.05 * error
        elif not late:
            integral += 0.02 * error
        multiplier = math.exp(min(max(integral + 0.5 * error, math.log(0.01)), math.log(100)))
        np.testing.assert_allclose(state["multiplier"], multiplier, rtol=1e-4)
        np.testing.assert_allclose(state["integral"], integral, atol=1e-5)
    assert integral < 0.05 * 25


def test_a_multiplier_at_its_bound_counts_rows() -> None:
    state = {**unmoved(), "integral": jnp.float32(math.log(100))}
    for count in (3, 6):
        state = moved_by(state, jnp.float32(9.0), jnp.int32(3), 0.05, jnp.asarray(True))
        assert (float(state["multiplier"]), int(state["at_bound"])) == (pytest.approx(100), count)
    state = moved_by({**state, "integral": jnp.float32(0)}, jnp.float32(9.0), jnp.int32(3), 0.05, jnp.asarray(True))
    assert int(state["at_bound"]) == 0


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer and its state in the second stage, moved away from the snapshot, with a multiplier of 3."""
    trainer = tiny.trainer(JOB, VALUES, tmp_path_factory.mktemp("keep"), *QUIET, "keep.lists=0.05")
    state = stage_state(trainer.state, trainer.resolved, 8, NoRows(trainer.resolved))
    keep = {"lists": {**state.keep["lists"], "multiplier": jnp.float32(3.0)}}
    moved = jax.tree.map(lambda leaf: leaf * 1.1 + 0.01, state.params)
    return trainer, state.replace(params=moved, keep=keep)


def with_control(trainer: Any) -> tuple[int, Any]:
    """The first step of the stage with a control row, and its batch."""
    return next((s, b) for s in range(8, 40) if (kept_rows(b := trainer.batch("train", s)).budget < 0).any())


def test_the_gradient_is_the_mix_of_new_and_old(stepped: Any) -> None:
    """(g_new + λ g_old)/(1 + λ), g_old of cross-entropy and KL over the expected tokens; control rows train nothing."""
    trainer, state = stepped
    _, batch = with_control(trainer)
    assert batch.slots is not None
    found = jax.jit(loss_and_gradients)(state, batch, jax.random.key(0))
    rows = kept_rows(batch)
    new, old = (rows.budget == 0)[..., None], (rows.budget > 0)[..., None]
    model, y = state.objective.model, batch.y[0]
    expected = 8 * 0.25 * 0.9 * 32

    def wanted(params: Any) -> Any:
        def logp(weights: Any) -> Any:
            hidden, _ = model.hidden(weights, batch.x[0], segment_ids=None, positions=None, key=None)
            return jax.nn.log_softmax((hidden @ model.unembedding(weights)).astype(jnp.float32))

        policy, reference = logp(params), jax.lax.stop_gradient(logp(state.reference))
        nll = -jnp.take_along_axis(policy, y[..., None], axis=-1)[..., 0]
        kl = (jnp.exp(reference) * (reference - policy)).sum(-1)
        g_new = jnp.where(new[0], nll, 0).sum() / new.sum() / 32
        g_old = jnp.where(old[0], nll + kl, 0).sum() / expected
        return (g_new + 3 * g_old) / 4

    loss, gradients = jax.jit(jax.value_and_grad(wanted))(state.params)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found.total, gradients)


def test_a_step_measures_its_control_rows_and_moves_the_multiplier(stepped: Any) -> None:
    trainer, state = stepped
    at, batch = with_control(trainer)
    rows = kept_rows(batch)
    control = rows.budget < 0
    stored = jnp.arange(512, dtype=jnp.float32) / 100
    state = state.replace(step=jnp.int32(at), keep={"lists": {**state.keep["lists"], "reference": stored}})
    after, _, meta = jax.jit(lambda s, b: train_step(s, b, jax.random.key(0), 1))(state, batch)
    nll = np.asarray(state.token_losses(state.params, jax.tree.map(lambda leaf: leaf[0], batch)))[control[0]].sum()
    rise = (nll - stored[rows.place[control].astype(int)].sum()) / rows.num_bytes[control].sum() / math.log(2)
    wanted = moved_by(state.keep["lists"], jnp.float32(rise), jnp.int32(control.sum()), 0.05, jnp.asarray(False))
    assert float(meta["keep/lists/difference"]) == pytest.approx(float(rise), rel=1e-4)
    assert float(meta["keep/lists/multiplier"]) == 3.0
    assert float(after.keep["lists"]["multiplier"]) == pytest.approx(float(wanted["multiplier"]), rel=1e-5)
    assert int(after.keep["lists"]["rows"]) == control.sum()


def test_what_leaves_the_loss_leaves_the_divisor_of_new_rows(stepped: Any) -> None:
    """As with stm: g_new is a mean over the new tokens that stay; old ones are divided by their expected number."""
    trainer, state = stepped
    _, batch = with_control(trainer)
    left = np.random.default_rng(0).random(batch.y.shape) < 0.6
    controller = state.objective.keep
    whole, part = (controller.row_weights(state.keep, batch, mask).factors for mask in (None, left))
    counted = ((batch.padding_mask > 0) & (controller.trained(batch).y >= 0)).sum()
    new, old = ((kept_rows(batch).budget == 0)[..., None], (kept_rows(batch).budget > 0)[..., None])
    assert float(jnp.where(new, whole, 0).sum() / counted) == pytest.approx(1 / 4, rel=1e-5)
    assert float(jnp.where(new & left, part, 0).sum() / counted) == pytest.approx(1 / 4, rel=1e-5)
    np.testing.assert_array_equal(jnp.where(old, whole, 0), jnp.where(old, part, 0))


def test_nothing_is_remembered_of_control_rows(stepped: Any) -> None:
    """A Fisher, or features that are frozen, by control rows would train on them in a roundabout way."""
    trainer, _ = stepped
    _, batch = with_control(trainer)
    control, seen = kept_rows(batch).budget < 0, without_control(batch)
    assert (seen.y[control] == -1).all()
    assert not seen.padding_mask[control].any()
    for name in ("y", "padding_mask"):
        whole, part = getattr(batch, name), getattr(seen, name)
        assert part.dtype == whole.dtype
        np.testing.assert_array_equal(part[~control], whole[~control])
    plain = batch._replace(kept=None)
    assert without_control(plain) is plain


def test_nothing_moves_in_a_fade_or_without_control_rows() -> None:
    controller = Controller((Budget("a", 0.05, 1),), True, True, (0, 10, 20), fades=((8, 12),))
    held = {"a": unmoved()}
    for step, budget in ((11, -1.0), (13, 1.0)):
        batch = SimpleNamespace(kept=np.array([[[budget, 0, 8, 1]]], np.float32))
        after = controller.stepped(held, batch, {0: jnp.float32(9)}, jnp.int32(step), jnp.asarray(True))  # type: ignore[arg-type]  # what it reads
        assert float(after["a"]["multiplier"]) == 1 and int(after["a"]["rows"]) == 0  # noqa: PT018


# Control rows


def curriculum(rate: float = 0.25, **options: Any) -> Curriculum:
    stages = (
        Stage("a", 20 * BATCH * BLOCK, (Sampling("a"),)),
        Stage("b", STEPS * BATCH * BLOCK, (Sampling("b", 1 - rate), Sampling("a", rate))),
    )
    return Curriculum(stages, BATCH, BLOCK, **options)


def plan(made: Curriculum, num_rows: int = 3000) -> DataPlan:
    sizes = {source: SourceSize(num_rows, float(BLOCK), source.name) for source in made.datasets}
    return DataPlan(made, 0, sizes)


@pytest.mark.parametrize(("num_rows", "memory"), [(3000, None), (600, None), (100, None), (3000, 150)])
def test_control_rows_are_not_trained_on_while_they_are_old(num_rows: int, memory: int | None) -> None:
    kept = ReplayMemory(memory, ((), (A,))) if memory else None
    plain = plan(curriculum(memory=kept), num_rows)
    made = plan(curriculum(memory=kept, budgets=(Budget("a", 0.05, 1),)), num_rows)
    control, trained = set(), []
    chosen = made.control.rows(A, 1).tolist()
    for step in range(20 + STEPS):
        refs, old = made.rows_at(step), plain.rows_at(step)
        assert (refs.source == old.source).all()
        if step < 20:
            assert (refs.row == old.row).all(), "a parent without a budget has the same past"
            assert (refs.control < 0).all()
            continue
        assert (refs.row[refs.source == 1] == old.row[refs.source == 1]).all(), "new rows stay as they were"
        seen = refs.control >= 0
        assert all(chosen[place] == row for place, row in zip(refs.control[seen], refs.row[seen], strict=True))
        control |= set(refs.row[seen].tolist())
        trained += refs.row[(refs.source == 0) & ~seen].tolist()
    assert len(chosen) == len(set(chosen)) == made.control.size(A, 1)
    assert control <= set(chosen)
    assert not set(trained) & set(chosen)
    assert made.control.drawn(A, 1) == 2 * STEPS // 10
    if memory is None:
        apart = sum((row + 1) % num_rows not in chosen for row in chosen)
        assert apart <= 8, "neighbours share documents: few rows that are trained on are next to control rows"
    assert made.fingerprint(20) == plain.fingerprint(20)
    assert made.fingerprint(21) != plain.fingerprint(21)


def test_each_stage_has_control_rows_of_its_own_samples() -> None:
    stages = tuple(Stage(n, 400 * BATCH * BLOCK, (Sampling(n, 0.75), Sampling(SELF.name, 0.25))) for n in "ab")
    made = plan(Curriculum(stages, BATCH, BLOCK, sampled=SelfReplay(), budgets=(Budget(SELF.name, 0.05, 0),)))
    assert made.sampled_sets[1].num_rows == 800
    assert made.control.rows(SELF, 1).tolist() == list(range(800, 1056))
    drawn = [made.rows_at(step) for step in range(400, 800)]
    own = np.concatenate([refs.row[(refs.source == 1) & (refs.control < 0)] for refs in drawn])
    assert own.min() >= 1056


def test_a_later_stage_does_not_change_what_was_drawn() -> None:
    made = curriculum(budgets=(Budget("a", 0.05, 1),))
    longer = Curriculum((*made.stages, made.stages[1]), BATCH, BLOCK, budgets=made.budgets)
    assert plan(made).fingerprint(20 + STEPS) == plan(longer).fingerprint(20 + STEPS)


# What is refused


def test_too_few_control_rows_are_refused() -> None:
    check_control(plan(curriculum(budgets=(Budget("a", 0.05, 1),))))
    with pytest.raises(ConfigError, match=r"keep/a: .*at least 64 control rows of a.*draws 40"):
        check_control(plan(curriculum(0.125, budgets=(Budget("a", 0.05, 1),))))
    with pytest.raises(ConfigError, match="has 50, half of its rows"):
        check_control(plan(curriculum(budgets=(Budget("a", 0.05, 1),)), 100))
    run = tiny.resolved(JOB, VALUES, "keep.lists=0.05", "training.replay={rate: 0.25, rows: 40}")
    with pytest.raises(ConfigError, match="has 20, half of its rows"):  # also where no data is prepared
        check_control(DataPlan(run.curriculum, 0))


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (("keep.lists=0.05", "training.replay=null"), "training/replay: {rate: 0.25}.*source: self"),
        (("keep.arithmetic=0.05",), r"keep/arithmetic.*an old source of a stage \(lists\).*; name one"),
        (("keep.self=0.05",), r"keep/self.*; set training/replay: \{source: self"),
        (("keep.lists=0.05", "training.replay={source: self}"), r"keep/lists.*\(self\).*; replay it \(training/replay"),
        (("keep.absent=0.05",), r"keep/absent.*\(lists\); absent is none"),
        (("keep.lists=0.05", "stages.1.beta=0.1", "stages.1.update_reference=true"), "stages/1/beta.*takes the place"),
        (("keep.lists=-1",), "keep/lists"),
        (("keep.lists=true",), "keep/lists.*bits per byte"),
        (("keep.certify=0.5", "keep.lists=1"), "keep/certify.*true or false"),
        (("keep.certify=true",), "keep/certify.*a budget to certify"),
        (("keep.lists=1", "training.methods=[agem]"), "agem"),
        (("keep.lists=1", "optimization.kl.reference_at=fade_start"), "reference_at"),
        (("keep.lists=1", "architecture.dropout=0.1"), "architecture/dropout: got 0.1, expected 0 beside keep"),
        (("keep.lists=1", "keep.certify=true", "optimization.lora.rank=2"), "keep/certify.*adapters"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        tiny.resolved(JOB, VALUES, *overrides)


def test_the_section_takes_names_and_its_option() -> None:
    options = read_options(JOB, merge(config_classes(JOB), {**VALUES, "keep": {"lists": 0.05}}, ["keep.certify=true"]))
    assert options.keep == KeepConfig({"lists": 0.05, "certify": True})
    run = tiny.resolved(JOB, VALUES, "keep={lists: 0.05, certify: true}", "training.replay.objective=kl")
    assert run.curriculum.budgets == (Budget("lists", 0.05, 1),)
    assert run.curriculum.snapshot_steps() == {8: 1}
    assert not tiny.resolved(JOB, VALUES).curriculum.snapshot_steps()


def test_what_a_pretrained_model_brings_along_is_old_from_the_first_stage_on() -> None:
    values = {**VALUES, "stages": [{"tokens": 8 * 32 * 400, "data": [{"name": "lists", "rate": 0.25, "style": "PMD"},
        {"name": "arithmetic", "rate": 0.75, "style": "PMD"}]}]}  # fmt: skip
    values["training"] = {**VALUES["training"], "replay": None}
    options = read_options(JOB, merge(config_classes(JOB), values, ["keep.lists=0.05", "architecture.from=model"]))
    made = with_budgets(options.trainer.curriculum(options), options.keep, options)
    assert made.budgets == (Budget("lists", 0.05, 0),)
    assert made.is_old(SourceKey("lists", DatasetStyle.PMD), 0)
    assert not made.is_old(SourceKey("arithmetic", DatasetStyle.PMD), 0)
    assert made.snapshot_steps() == {0: 0}


# What is proved, and what is judged


class Known:
    """Control sets whose rise is known: twice the weight, give or take a hundredth."""

    def __init__(self, limit: float) -> None:
        self.plan = SimpleNamespace(curriculum=curriculum(budgets=(Budget("a", limit, 1),)))

    def rise(self, _budget: Budget, _stage: int, _state: Any, params: Any, level: float) -> Difference:
        mean = 2 * float(params["w"])
        return Difference(mean, mean - 0.01, mean + 0.01, 100)


class Weights(SimpleNamespace):
    """As much of a train state as a certificate looks at."""

    def reference_params(self) -> Any:
        return {"w": jnp.float32(0)}

    trained_reference = reference_params

    def trained(self) -> Any:
        return self.params

    def replace(self, **changed: Any) -> "Weights":
        return Weights(**{**vars(self), **changed})


@pytest.mark.parametrize(("limit", "alpha"), [(3.0, 1.0), (1.0, 0.45), (0.12, 0.05), (0.001, None)])
def test_a_certificate_goes_as_far_as_the_bound_allows(limit: float, alpha: float | None) -> None:
    """At α the bound is 2α + 0.01."""
    objective = SimpleNamespace(completed=lambda _params, trained: trained)
    ema = {"w": jnp.float32(0.5)}
    state: Any = Weights(base=None, params={"w": jnp.float32(1)}, objective=objective, ema=ema)
    sets: Any = Known(limit)
    found = certificate(state, 1, 420, sets)
    assert found["alpha"] == alpha
    assert len(found["tested"]) == (21 if alpha == 1 else 1 if alpha is None else round(alpha * 20) + 2)
    after, applied = end_of_stage(state, 1, 420, sets, certify=True)
    kept = 1.0 if alpha is None else alpha
    assert applied["applied"] == (alpha is not None and alpha < 1)
    assert float(after.params["w"]) == pytest.approx(kept)
    assert float(after.ema["w"]) == pytest.approx(kept / 2), "the average of weights steps back with them"
    assert applied["control"]["a"]["rise"] == pytest.approx(2 * kept)
    assert end_of_stage(state, 1, 420, sets, certify=False)[0] is state


def test_the_interval_decides_and_strict_takes_no_doubt() -> None:
    ends = {"kept": (0.0, 0.04), "broken": (0.06, 0.1), "undecided": (0.04, 0.06)}
    for word, (low, high) in ends.items():
        judged = {"low": low, "high": high, "rise": 0.05, "num": 9, "unit": "documents"}
        found = {"name": "a", "limit": 0.05, "judged": judged, "verdict": verdict(0.05, judged)}
        assert found["verdict"] == word
        assert f"Budget {word}: a +0.050" in told(found, [{"alpha": 0.9}])
        results = {"keep": {"budgets": [found]}}
        assert exit_code(results, strict=False) == (3 if word == "broken" else 0)
        assert exit_code(results, strict=True) == (0 if word == "kept" else 3)
    assert exit_code({}, strict=True) == 0
    assert "undecided" in told({"name": "a", "limit": 0.05, "judged": None, "verdict": "undecided"}, [])
