"""Methods that weigh tokens: each by its formula in NumPy, alone and inside a step, and plain where it is neutral."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast import registry
from holdfast.data.batches import Batch
from holdfast.data.plan import DataPlan, SourceSize
from holdfast.errors import UserError
from holdfast.objectives.token_loss import Penalised, token_loss
from holdfast.training.data import BoundaryRows
from holdfast.training.initial import NoRows
from holdfast.training.state import stage_state
from holdfast.training.step import loss_and_gradients
from training import tiny

JOB = "continual/train/abcd"
VALUES: dict[str, Any] = {
    **tiny.CONTINUAL,
    "stages": [
        {"tokens": 8 * 32 * 8, "data": [{"name": "lists", "style": "PADDED"}]},
        {"tokens": 8 * 32 * 8, "data": [{"name": "arithmetic", "style": "PADDED"}]},
    ],
    "optimization": {"lr": 0.003},
    "training": {
        **tiny.CONTINUAL["training"],
        "replay": {"rate": 0.25},
        "per_device_batch_size": 8,
        "evaluate": False,
        "validation": False,
    },
}
LOSS = jax.jit(loss_and_gradients)
R, T, D, V = 3, 32, 8, 31


def method(name: str, **options: Any) -> Any:
    return registry.methods.get(name)(registry.methods.config(name)(**options))


def log_softmax(logits: Any) -> Any:
    shifted = np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def picked(logp: Any, targets: Any) -> Any:
    return np.take_along_axis(logp, np.maximum(targets, 0)[..., None], -1)[..., 0]


def entropy_share(logp: Any, top: int) -> Any:
    """H / ln K of the K likeliest tokens."""
    likeliest = np.sort(np.exp(logp), axis=-1)[..., ::-1][..., :top]
    share = likeliest / likeliest.sum(-1, keepdims=True)
    return -(share * np.log(share)).sum(-1) / np.log(likeliest.shape[-1])


# Each method's factors in NumPy: (log-probabilities, those of the reference, targets) -> (…, T).
FACTORS: dict[str, Any] = {
    "dft": lambda logp, _reference, targets: np.exp(picked(logp, targets)),
    "asft": lambda logp, _reference, targets: np.exp(picked(logp, targets)),
    "eaft": lambda logp, _reference, _targets: entropy_share(logp, 20),
}


def talr(nll: Any, counted: Any, floor: float = 0.01) -> Any:
    pairs = zip(nll.reshape(-1, T), counted.reshape(-1, T), strict=True)
    temperature = np.median([row[there].mean() for row, there in pairs if there.any()])
    return np.maximum(np.exp(-nll) ** (1 / temperature), floor)


def flow(nll: Any, counted: Any, segment_ids: Any, temperature: float) -> Any:
    factors = np.ones_like(nll)
    for place in np.ndindex(*nll.shape[:-1]):
        for segment in np.unique(segment_ids[place]):
            here = segment_ids[place] == segment
            if (here & counted[place]).any():
                factors[place][here] = np.exp(-nll[place][here & counted[place]].mean() / temperature)
    return factors


@pytest.fixture(scope="module")
def case() -> Any:
    random = np.random.default_rng(0)
    targets = random.integers(0, V, (R, T))
    targets[0, 3:6] = -1
    return {
        "hidden": random.normal(size=(R, T, D)).astype(np.float32),
        "matrix": random.normal(size=(D, V)).astype(np.float32),
        "reference_hidden": random.normal(size=(R, T, D)).astype(np.float32),
        "targets": targets.astype(np.int32),
        "weights": ((targets >= 0) / (targets >= 0).sum()).astype(np.float32),
    }


@pytest.mark.parametrize(("name", "options"), [("dft", {}), ("asft", {}), ("eaft", {})])
def test_the_factor_is_the_formulas(name: str, options: Any) -> None:
    random = np.random.default_rng(1)
    logits, targets = 3 * random.normal(size=(40, V)), random.integers(0, V, 40)
    found = method(name, **options).token_weights(None, jnp.asarray(log_softmax(logits), jnp.float32), None, targets)
    np.testing.assert_allclose(found, FACTORS[name](log_softmax(logits), None, targets), rtol=1e-5, atol=1e-6)


def test_eaft_of_few_tokens_and_of_certainty() -> None:
    sure = log_softmax(np.array([[40.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, -1.0]]))
    logp = jnp.asarray(sure, jnp.float32)
    found = method("eaft").token_weights(None, logp, None, np.zeros(3, np.int32))
    np.testing.assert_allclose(found, [0, 1, entropy_share(sure, 20)[2]], atol=1e-6)
    halved = method("eaft", alpha=0.5).token_weights(None, logp, None, np.zeros(3, np.int32))
    np.testing.assert_allclose(halved, np.sqrt(found), rtol=1e-6)
    plain = method("eaft", alpha=0.0).token_weights(None, logp, None, np.zeros(3, np.int32))
    np.testing.assert_array_equal(plain, [1, 1, 1])


@pytest.mark.parametrize("name", ["dft", "asft", "eaft"])
def test_in_the_loss_it_has_the_formulas_gradient(case: Any, name: str) -> None:
    """The factor is a number: the gradient is that of Σ w · factor · nll, with the factor from NumPy."""
    tried = method(name)
    penalties = []
    if name == "asft":
        penalty = registry.penalties.get("forward")
        penalties = [Penalised(penalty, tried.config.weight, case["weights"])]
        assert tried.token_penalty_gradient.__doc__
    factors = FACTORS[name](log_softmax(case["hidden"] @ case["matrix"]), None, case["targets"])
    reference = log_softmax(case["reference_hidden"] @ case["matrix"])

    def found(hidden: Any, matrix: Any) -> Any:
        weigh = [(lambda *arguments: jax.lax.stop_gradient(tried.token_weights(*arguments)), None)]
        states = {"reference_hidden": case["reference_hidden"], "reference_unembedding_DV": case["matrix"]}
        return token_loss(
            hidden, matrix, case["targets"], case["weights"], token_weights=weigh, chunk_tokens=7,
            penalties=penalties, **(states if penalties else {}),
        )  # fmt: skip

    def textbook(hidden: Any, matrix: Any) -> Any:
        logp = jax.nn.log_softmax(hidden @ matrix)
        nll = -jnp.take_along_axis(logp, np.maximum(case["targets"], 0)[..., None], -1)[..., 0]
        total = (case["weights"] * factors * nll).sum()
        if name == "asft":
            kl = (np.exp(reference) * (reference - logp)).sum(-1)
            total += tried.config.weight * (case["weights"] * kl).sum()
        return total

    (value, aux), gradients = jax.value_and_grad(found, (0, 1), has_aux=True)(case["hidden"], case["matrix"])
    wanted, slopes = jax.value_and_grad(textbook, (0, 1))(case["hidden"], case["matrix"])
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for one, two in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)
    nll = -picked(log_softmax(case["hidden"] @ case["matrix"]), case["targets"])
    np.testing.assert_allclose(aux.ce, (case["weights"] * nll).sum(), rtol=1e-6)  # the record stays unweighted


# Of a whole batch


@pytest.fixture(scope="module")
def losses() -> Any:
    """Token losses of 2 x 3 rows, some packed, one without any token of the loss, some tokens not counted."""
    random = np.random.default_rng(2)
    y = random.integers(0, V, (2, 3, T))
    y[0, 0, 5:9] = y[1, 1] = -1
    padding = np.ones((2, 3, T), np.int8)
    padding[..., 28:] = 0
    segment_ids = np.where(padding > 0, 1 + np.arange(T) // 9, 0).astype(np.int32)
    old = np.zeros((2, 3, T), np.int8)
    old[1, 2] = 1
    batch = Batch(y, y, padding, segment_ids, segment_ids, None, old)
    counted = (padding > 0) & (y >= 0)
    nll = np.where(counted, random.gamma(2.0, 0.7, (2, 3, T)), 0).astype(np.float32)
    nll[0, 1, 2] = 12.0
    return nll, counted, batch


def test_stm_drops_what_is_hard_from_loss_and_divisor(losses: Any) -> None:
    nll, counted, batch = losses
    kept, divisor = method("stm").batch_weights(None, nll, batch)
    np.testing.assert_array_equal(np.asarray(kept)[counted], np.exp(nll[counted]) <= 2.5)
    np.testing.assert_array_equal(kept, divisor)
    assert 0 < np.asarray(kept)[counted].mean() < 1
    for share in (0.25, 0.5, 1.0):
        stays = np.asarray(method("stm", quantile=share).batch_weights(None, nll, batch)[0]) > 0
        assert stays[counted].sum() == np.ceil(share * counted.sum())
        assert nll[counted & stays].max() < nll[counted & ~stays].min(initial=np.inf)
    assert np.asarray(method("stm", perplexity=None).batch_weights(None, nll, batch)[0]).all()


def test_talr_is_the_formulas(losses: Any) -> None:
    nll, counted, batch = losses
    factor, divisor = method("talr").batch_weights(None, nll, batch)
    assert divisor is None
    np.testing.assert_allclose(np.asarray(factor)[counted], talr(nll, counted)[counted], rtol=1e-5)
    assert np.asarray(factor).min() == np.float32(0.01)
    even = jax.tree.map(lambda leaf: leaf[:1, :2], batch)
    factor, _ = method("talr").batch_weights(None, nll[:1, :2], even)
    np.testing.assert_allclose(factor, talr(nll[:1, :2], counted[:1, :2]), rtol=1e-5)
    np.testing.assert_array_equal(method("talr", floor=1.0).batch_weights(None, nll, batch)[0], np.ones_like(nll))


def test_flow_weighs_segments_of_packed_rows(losses: Any) -> None:
    nll, counted, batch = losses
    memory = {"temperature": jnp.float32(1.3)}
    factor, divisor = method("flow").batch_weights(memory, nll, batch)
    assert divisor is None
    np.testing.assert_allclose(factor, flow(nll, counted, batch.segment_ids, 1.3), rtol=1e-6)
    assert len(np.unique(np.asarray(factor)[0, 0])) == 5, "four segments, and padding that does not count"
    whole, _ = method("flow").batch_weights(memory, nll, batch._replace(segment_ids=None))
    np.testing.assert_allclose(whole, flow(nll, counted, np.zeros_like(batch.y), 1.3), rtol=1e-6)
    neutral = method("flow", temperature=1e30)
    np.testing.assert_array_equal(neutral.batch_weights(neutral.init(None), nll, batch)[0], np.ones_like(nll))


@jax.tree_util.register_static
class Snapshot:
    """A state whose token losses are its parameters times what a batch has in place of positions."""

    params, reference = 1.0, 2.0

    def reference_params(self) -> float:
        return self.reference

    def token_losses(self, params: Any, micro: Batch) -> Any:
        return params * jnp.asarray(micro.positions)


@pytest.mark.parametrize("renews", [True, False])
def test_flows_temperature_is_the_median_of_new_rows_under_the_snapshot_to_be(losses: Any, renews: bool) -> None:
    nll, counted, batch = losses

    class Data:
        renews_reference = renews

        def new_batches(self, num_rows: int | None) -> Any:
            assert num_rows == 7
            return iter([batch._replace(positions=nll), batch._replace(positions=3 * nll)])

    means = [
        scale * nll[place][here].mean()
        for scale in (1, 3)
        for place in np.ndindex(2, 3)
        for segment in range(1, 5)
        if (here := counted[place] & (batch.segment_ids[place] == segment)).any() and not batch.old_mask[place].any()
    ]
    found = method("flow", rows=7).remember(None, Snapshot(), Data())
    np.testing.assert_allclose(found["temperature"], (1 if renews else 2) * np.median(means), rtol=1e-6)


def test_the_new_rows_of_a_stage_lie_between_its_fades() -> None:
    stages = [{**VALUES["stages"][index % 2], "tokens": 8 * 32 * 10, "overlap": 0.4} for index in range(3)]
    curriculum = tiny.resolved(JOB, {**VALUES, "stages": [{**stages[0], "overlap": 0}, *stages[1:]]}).curriculum

    def steps(step: int, num_rows: int | None) -> list[int]:
        same, epoch_end = (lambda step: step), DataPlan(curriculum, 0, sizes).epoch_end
        data = BoundaryRows(curriculum, step, same, same, lambda: None, epoch_end)  # type: ignore[arg-type,return-value]
        return list(data.new_batches(num_rows))  # type: ignore[arg-type]

    sizes = {source: SourceSize(1000, 1.0, "") for source in curriculum.sources}
    fades = [curriculum.fade_steps(boundary) for boundary in range(2)]
    assert (fades[0][1], fades[1][0]) == (12, 19)
    assert steps(10, None) == [*range(12, 19)]
    assert steps(10, 9) == [12, 13]
    assert steps(10, 1000) == [*range(12, 19)], "rows of the next stage are not new rows of this one"
    assert steps(0, None) == [*range(fades[0][0])]
    assert steps(20, None) == [*range(22, 30)]
    sizes = {source: SourceSize(20, 1.0, "") for source in curriculum.sources}
    assert steps(0, None) == [0, 1, 2], "rows that are drawn again are not asked again"
    assert steps(10, 9) == [12, 13]


def test_factors_of_a_batch_enter_the_loss(case: Any) -> None:
    factors = np.random.default_rng(3).random((R, T)).astype(np.float32)

    def found(hidden: Any) -> Any:
        return token_loss(
            hidden, case["matrix"], case["targets"], case["weights"], ce_factors=factors, chunk_tokens=7, z_loss=0.1
        )

    def textbook(hidden: Any) -> Any:
        logits = hidden @ case["matrix"]
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), np.maximum(case["targets"], 0)[..., None], -1)[..., 0]
        return (case["weights"] * factors * (nll + 0.1 * jax.nn.logsumexp(logits, -1) ** 2)).sum()

    (value, aux), gradient = jax.value_and_grad(found, has_aux=True)(case["hidden"])
    wanted, slope = jax.value_and_grad(textbook)(case["hidden"])
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradient, slope, atol=1e-6)
    nll = -picked(log_softmax(case["hidden"] @ case["matrix"]), case["targets"])
    np.testing.assert_allclose(aux.ce, (case["weights"] * nll).sum(), rtol=1e-6)


# Inside a step of a tiny model


def entered(folder: Path, *overrides: str, values: Any = VALUES) -> Any:
    """A trainer in its second stage, whose parameters have moved away from the snapshot."""
    trainer = tiny.trainer(JOB, values, folder, *overrides)
    state = stage_state(trainer.state, trainer.resolved, 8, NoRows(trainer.resolved))
    return trainer, state.replace(params=jax.tree.map(lambda leaf: leaf * 1.5, state.params), step=jnp.int32(8))


def reshaped(batch: Batch, num_micro: int) -> Batch:
    return Batch(*(None if a is None else np.asarray(a).reshape(num_micro, -1, a.shape[-1]) for a in batch))


def log_probabilities(state: Any, params: Any, batch: Batch) -> Any:
    """(S, B, T, V) in float64, by the module itself."""
    flat = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, leaf.shape[-1]), batch)
    extra = {} if flat.segment_ids is None else {"segment_ids": flat.segment_ids, "positions": flat.positions}
    logits = jax.jit(state.objective.model.module.apply)({"params": params}, flat.x, **extra)
    return log_softmax(logits).reshape(*batch.x.shape, -1)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


PACKED = {
    **VALUES,
    "stages": [
        VALUES["stages"][0],
        {**VALUES["stages"][1], "data": [{"name": "arithmetic", "style": "PACKED"}]},
    ],
}


@pytest.mark.parametrize("names", [("stm", "asft"), ("talr", "flow", "eaft")])
def test_several_at_once_over_micro_batches_are_the_formulas(names: tuple[str, ...], tmp_path: Path) -> None:
    """Statistics are over the whole packed batch: 1 x 8 and 4 x 2 rows give one loss and one gradient."""
    options = ["methods.stm.quantile=0.6", "methods.flow.temperature=2", "data.loss_on=answer"]
    trainer, state = entered(tmp_path, f"training.methods=[{','.join(names)}]", *options, values=PACKED)
    batch = trainer.batch("train", 8)
    loss, parts, gradients, *_ = LOSS(state, reshaped(batch, 1), jax.random.key(0))
    again, _, parted, *_ = LOSS(state, reshaped(batch, 4), jax.random.key(0))
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    for one, two in zip(jax.tree.leaves(gradients), jax.tree.leaves(parted), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)

    own, frozen = (log_probabilities(state, params, batch) for params in (state.params, state.reference))
    counted = (batch.padding_mask > 0) & (batch.y >= 0)
    nll, old = (np.where(counted, -picked(logp, batch.y), 0) for logp in (own, frozen))
    if "stm" in names:
        limit = np.sort(old[counted])[int(np.ceil(0.6 * counted.sum())) - 1]
        kept = counted & (old <= limit + 1e-6)
        new = counted & (batch.old_mask == 0)
        assert 0 < new.sum() < counted.sum() < (batch.padding_mask > 0).sum()
        kl = (np.exp(frozen) * (frozen - own)).sum(-1)[new].mean()
        np.testing.assert_allclose(parts["method/asft"], kl, rtol=1e-5)
        wanted = (np.exp(-nll) * nll)[kept].mean() + 0.05 * kl
        np.testing.assert_allclose(parts["method/stm"], kept.sum() / counted.sum(), rtol=1e-6)
    else:
        factors = talr(nll, counted) * flow(old, counted, batch.segment_ids, 2.0) * entropy_share(own, 20)
        wanted = (factors * nll)[counted].mean()
        np.testing.assert_allclose(parts["method/talr"], talr(nll, counted)[counted].mean(), rtol=1e-5)
        assert len(np.unique(batch.segment_ids)) > 2
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(parts["ce"], nll[counted].mean(), rtol=1e-6)


def test_only_the_passes_that_are_asked_for_are_run(tmp_path: Path) -> None:
    """stm's pass is the reference's one pass; talr's is the model's and needs no reference; plain has none."""

    def products(names: str) -> int:
        trainer, state = entered(tmp_path, f"training.methods=[{names}]")
        assert (state.reference is None) == ("stm" not in names)
        text = jax.jit(loss_and_gradients).lower(state, trainer.batch("train", 8), jax.random.key(0)).as_text()
        return text.count("dot_general")

    plain, stm, talr, both = map(products, ("", "stm", "talr", "stm,asft"))
    assert plain < stm == talr < both


def test_neutral_settings_are_plain_to_the_bit(tmp_path: Path) -> None:
    """Loss and gradients; of all at once, since factors of 1 multiply to 1. asft without its KL is dft."""

    def stepped(*overrides: str) -> Any:
        trainer, state = entered(tmp_path, *overrides)
        loss, parts, gradients, *_ = LOSS(state, trainer.batch("train", 8), jax.random.key(0))
        return bits((loss, parts["ce"], gradients))

    plain = stepped()
    neutral = {"eaft.alpha": "0", "stm.perplexity": "null", "talr.floor": "1", "flow.temperature": "1e30"}
    options = [f"methods.{path}={value}" for path, value in neutral.items()]
    assert stepped("training.methods=[eaft,stm,talr,flow]", *options) == plain
    dft = stepped("training.methods=[dft]")
    assert dft != plain
    assert stepped("training.methods=[asft]", "methods.asft.weight=0") == dft


KL_ALONE = {
    **VALUES,
    "stages": [
        *VALUES["stages"][:1],
        {**VALUES["stages"][1], "beta": 0.5, "update_reference": True},
        {**VALUES["stages"][0], "beta": 0.5},
    ],
}


@pytest.mark.parametrize(
    ("job", "values", "overrides", "message"),
    [
        (JOB, VALUES, ["training.methods=[dft,asft]"], "training/methods/1: got 'asft', expected no dft beside it"),
        (
            "continual/train/abcd_kl",
            KL_ALONE,
            ["training.methods=[eaft]", "training.replay.objective=kl"],
            "training/methods/0: got 'eaft', expected stages in which tokens count: every row of stage 2 is old",
        ),
        (
            "continual/train/abcd_kl",
            KL_ALONE,
            ["training.methods=[asft]"],
            "expected stages with new rows: stage 2 draws from earlier stages' datasets alone",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(job: str, values: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny.resolved(job, values, *overrides)


def test_a_weight_beside_kl_on_old_rows_is_fine_where_new_rows_count() -> None:
    tiny.resolved(
        "continual/train/abcd_kl", KL_ALONE, "training.methods=[dft]", "training.replay.objective=kl",
        "methods.dft.stages=[1]",
    )  # fmt: skip
