"""The built-in optimizers by name; importing this module registers them and imports no JAX.

Each gives a descent direction; clipping, weight decay and the learning rate come around it (`build.py`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from holdfast.config import field
from holdfast.errors import ConfigError
from holdfast.optim.build import inner_matrix
from holdfast.registry import optimizers
from holdfast.types import Tree

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class AdafactorConfig:
    """Adafactor (Shazeer & Stern 2018): second moments of a matrix from its row and column sums.

    Optax scales by the learning rate before it scales by the parameter's size; without momentum the two
    commute, so the direction needs no learning rate. Momentum would average scaled updates and is left out.
    """

    decay_rate: float = field(
        "optimization/adafactor/decay_rate", default=0.8, gt=0, lt=1, help="second-moment rate is 1 - step^-decay_rate"
    )
    clip_threshold: float = field(
        "optimization/adafactor/clip_threshold",
        default=1.0,
        ge=0,
        le=1e12,
        help="largest RMS of a parameter's update; 0: off",
    )
    parameter_scale: bool = field(
        "optimization/adafactor/parameter_scale",
        default=True,
        help="scale updates by the parameter's RMS; lr is then relative (try 0.01)",
    )
    min_dim_size_to_factor: int = field(
        "optimization/adafactor/min_dim_size_to_factor",
        default=128,
        ge=1,
        le=2**31 - 1,
        help="smaller matrices are not factored",
    )
    epsilon: float = field(
        "optimization/adafactor/epsilon", default=1e-30, gt=0, le=1, help="added to squared gradients"
    )


@optimizers.register("adafactor", config=AdafactorConfig, help="factored second moments; almost no optimizer memory")
def adafactor(config: AdafactorConfig) -> "optax.GradientTransformation":
    """The descent direction of Adafactor."""
    import optax

    return optax.adafactor(
        learning_rate=None,
        min_dim_size_to_factor=config.min_dim_size_to_factor,
        decay_rate=config.decay_rate,
        multiply_by_parameter_scale=config.parameter_scale,
        clipping_threshold=config.clip_threshold or None,
        eps=config.epsilon,
    )


MOST_BETA2 = 0.99  # with a second moment in bfloat16, whose neighbours are up to 0.8 % apart


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW (Loshchilov & Hutter 2019), with the second-moment rate that language models are trained with."""

    beta1: float = field("optimization/adamw/beta1", default=0.9, ge=0, lt=1, help="decay rate of the first moment")
    beta2: float = field("optimization/adamw/beta2", default=0.95, ge=0, lt=1, help="decay rate of the second moment")
    epsilon: float = field(
        "optimization/adamw/epsilon", default=1e-8, gt=0, le=1, help="added to the root second moment"
    )
    moment_dtype: Optional[str] = field(
        "optimization/adamw/moment_dtype",
        default=None,
        choices=("float32", "bfloat16"),
        help="dtype of the first moment; null: the parameters' own",
    )
    second_moment_dtype: Optional[str] = field(
        "optimization/adamw/second_moment_dtype",
        default=None,
        choices=("float32", "bfloat16"),
        help="dtype in which the second moment is held between steps; null: the parameters' own if it can follow beta2",
    )

    def __post_init__(self) -> None:
        if self.second_moment_dtype == "bfloat16" and self.beta2 > MOST_BETA2:
            raise ConfigError(
                "optimization/adamw/second_moment_dtype",
                self.second_moment_dtype,
                f"float32 where optimization/adamw/beta2 is more than {MOST_BETA2}: a step of {1 - self.beta2:.2g} of "
                "the moment is less than bfloat16 can tell apart",
                f"lower optimization/adamw/beta2 to {MOST_BETA2} or less, or leave it null",
            )


@optimizers.register("adamw", config=AdamWConfig, help="Adam with decoupled weight decay")
def adamw(config: AdamWConfig) -> "optax.GradientTransformation":
    """The descent direction of Adam."""
    import optax

    # Parameters in bfloat16 would take theirs there too, where it might never move.
    dtype = config.second_moment_dtype or ("float32" if config.beta2 > MOST_BETA2 else None)
    if dtype is None:
        return optax.adam(1.0, config.beta1, config.beta2, config.epsilon, mu_dtype=config.moment_dtype)
    scale = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon, mu_dtype=config.moment_dtype)
    return optax.chain(with_second_moment(scale, dtype), optax.scale_by_learning_rate(1.0))


def with_second_moment(scale: "optax.GradientTransformation", dtype: str) -> "optax.GradientTransformation":
    """`optax.scale_by_adam` whose second moment is held in a type of its own; a step computes it in float32."""
    import jax
    import optax

    def typed(tree: Any, kind: str) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(kind), tree)

    def init(params: Any) -> Any:
        state: Any = scale.init(params)
        return state._replace(nu=typed(state.nu, dtype))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        stepped: Any
        updates, stepped = scale.update(gradients, state._replace(nu=typed(state.nu, "float32")), params)
        return updates, stepped._replace(nu=typed(stepped.nu, dtype))

    return optax.GradientTransformation(init, update)


@dataclass(frozen=True)
class LionConfig:
    """Lion (Chen et al. 2023): the sign of an interpolated momentum; wants a smaller lr than AdamW and more decay."""

    beta1: float = field("optimization/lion/beta1", default=0.9, ge=0, lt=1, help="share of momentum in the update")
    beta2: float = field("optimization/lion/beta2", default=0.99, ge=0, lt=1, help="decay rate of the momentum")
    moment_dtype: Optional[str] = field(
        "optimization/lion/moment_dtype",
        default=None,
        choices=("float32", "bfloat16"),
        help="dtype of the momentum; null: the parameters' own",
    )


@optimizers.register("lion", config=LionConfig, help="sign of the momentum; half of AdamW's memory")
def lion(config: LionConfig) -> "optax.GradientTransformation":
    """The descent direction of Lion."""
    import optax

    return optax.lion(1.0, config.beta1, config.beta2, mu_dtype=config.moment_dtype, weight_decay=0.0)


@dataclass(frozen=True)
class MuonConfig:
    """Muon (Jordan 2024): orthogonalised momentum for the matrices inside the model, Adam for everything else.

    Embeddings, the output head, norms and biases go to Adam. With `consistent_rms` a matrix's update has the
    size of AdamW's (Liu et al. 2025), so one learning rate and one weight decay serve both.
    """

    beta: float = field("optimization/muon/beta", default=0.95, ge=0, lt=1, help="decay rate of the momentum")
    ns_steps: int = field("optimization/muon/ns_steps", default=5, ge=1, le=100, help="Newton-Schulz iterations")
    nesterov: bool = field("optimization/muon/nesterov", default=True, help="look ahead along the momentum of matrices")
    consistent_rms: float = field(
        "optimization/muon/consistent_rms",
        default=0.2,
        ge=0,
        le=100,
        help="RMS of a matrix's update, 0.2 is AdamW's; 0: scale by the matrix's shape instead",
    )
    adam_beta1: float = field("optimization/muon/adam_beta1", default=0.9, ge=0, lt=1, help="Adam's first-moment rate")
    adam_beta2: float = field(
        "optimization/muon/adam_beta2", default=0.95, ge=0, lt=1, help="Adam's second-moment rate"
    )


def matrix_axes(params: Tree) -> Any:
    """For each parameter the axes that Muon sees as a matrix (the last two; others are stacked layers), or None."""
    import jax
    from optax.contrib import MuonDimensionNumbers

    def axes(path: Any, leaf: Any) -> Any:
        return MuonDimensionNumbers(reduction_axis=-2, output_axis=-1) if inner_matrix(path, leaf) else None

    return jax.tree_util.tree_map_with_path(axes, params)


@optimizers.register("muon", config=MuonConfig, help="orthogonalised momentum for matrices, Adam for the rest")
def muon(config: MuonConfig) -> "optax.GradientTransformation":
    """The descent direction of Muon; its Adam is plain Adam, whatever the matrices' momentum is."""
    import jax
    import optax

    plain = _muon(config, nesterov=False)
    if not config.nesterov:
        return plain
    # Optax hands `nesterov` on to Adam. Both variants keep the same state, so that each gives its part of the updates.
    ahead = _muon(config, nesterov=True)

    def update(gradients: Tree, state: Any, params: Tree = None) -> Any:
        matrices, next_state = ahead.update(gradients, state, params)
        others, _ = plain.update(gradients, state, params)

        def chosen(path: Any, matrix: Any, other: Any) -> Any:
            return matrix if inner_matrix(path, matrix) else other

        return jax.tree_util.tree_map_with_path(chosen, matrices, others), next_state

    return optax.GradientTransformation(ahead.init, update)


def _muon(config: MuonConfig, *, nesterov: bool) -> "optax.GradientTransformation":
    from optax import contrib

    return contrib.muon(
        1.0,
        ns_steps=config.ns_steps,
        beta=config.beta,
        nesterov=nesterov,
        adam_b1=config.adam_beta1,
        adam_b2=config.adam_beta2,
        muon_weight_dimension_numbers=matrix_axes,
        consistent_rms=config.consistent_rms or None,
    )


@dataclass(frozen=True)
class SGDConfig:
    """Stochastic gradient descent, with momentum when asked for."""

    momentum: float = field("optimization/sgd/momentum", default=0.0, ge=0, lt=1, help="decay rate of past gradients")
    nesterov: bool = field("optimization/sgd/nesterov", default=False, help="look ahead along the momentum")


@optimizers.register("sgd", config=SGDConfig, help="gradient descent, with optional momentum")
def sgd(config: SGDConfig) -> "optax.GradientTransformation":
    """The descent direction of gradient descent; momentum sums plain gradients, so the learning rate stays outside."""
    import optax

    return optax.chain(
        optax.trace(config.momentum, config.nesterov) if config.momentum else optax.identity(), optax.scale(-1.0)
    )
