"""The seam of a method, a way to keep the old: one file, one frozen config, and any of these pure hooks.

JAX is named in types alone, so that methods can be listed and their options checked without it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Optional, Protocol, Sequence

from holdfast.types import Tree

# Which tokens a penalty is averaged over: those of the loss, those of the loss in rows that are not old, or those of
# the anchor's mask (`optimization/kl/tokens` and `on`).
PenaltyTokens = Literal["loss", "new", "penalty"]

if TYPE_CHECKING:
    import jax

    from holdfast.data.batches import Batch
    from holdfast.methods.refusals import StageFacts

HOOKS = (
    "init",
    "remember",
    "token_weights",
    "batch_weights",
    "token_penalty",
    "token_penalty_gradient",
    "parameter_penalty",
    "gradients",
    "updates",
    "weights",
    "observe",
    "measure",
)


@dataclass(frozen=True)
class TokenPenalty:
    """A penalty on each token's distribution; C tokens of a chunk, V vocabulary.

    Args:
        value: (policy_logp_CV, reference_logp_CV, targets_C) -> value_C, in float32. Targets are valid indices.
        tokens: which tokens it is averaged over, whatever other penalties see.
        gradient: (policy_logp_CV, reference_logp_CV, targets_C, value_C) -> gradient of each value on the
            policy's logits, (C, V). None: derived from `value` by automatic differentiation.
    """

    value: "Callable[[jax.Array, jax.Array, jax.Array], jax.Array]"
    tokens: PenaltyTokens = "penalty"
    gradient: "Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array] | None" = None


@dataclass(frozen=True)
class ParameterPenalty:
    """A penalty on the parameters themselves.

    Args:
        value: (params, reference_params) -> scalar, differentiable in the first.
    """

    value: "Callable[[Tree, Tree], jax.Array]"


class BatchWeights(NamedTuple):
    """What `batch_weights` gives for all tokens of a batch, (S, B, T) each.

    Args:
        factor: on each token's cross-entropy; finite also where no token counts.
        counted: tokens that stay in the divisor; the others must have a factor of 0. None: all stay.
    """

    factor: "jax.Array"
    counted: "jax.Array | None" = None


class MethodConfig:
    """What a method's options may say; a config is a frozen dataclass of `field`s below `methods/NAME/`.

    A config declares `weight` where a weight makes sense, and `stages`. The other attributes are facts about the method
    that decide what is computed for it.
    """

    weight: float = 1.0  # of its penalties
    stages: Optional[Sequence[int]] = None  # in which it acts; None = all from the second on
    needs_reference: ClassVar[bool] = False  # its hooks look at the reference; `looks_back` knows of some by itself
    needs_old_gradients: ClassVar[bool] = False  # `gradients` looks at those of old rows
    needs_old_mask: ClassVar[bool] = False  # its hooks look at `old_mask` of batches
    weighs_by: ClassVar[Literal["policy", "reference"]] = "policy"  # whose token losses `batch_weights` is given
    penalty_tokens: ClassVar[PenaltyTokens] = "penalty"  # that `token_penalty` is averaged over
    switched_on: ClassVar[str] = ""  # what a user should know where a branch switches it on

    def acts_in(self, stage: int) -> bool:
        """Whether the method is on in a stage."""
        return stage > 0 if self.stages is None else stage in self.stages

    def check(self, about: "StageFacts") -> None:
        """Raise a ConfigError where the method makes no sense in a stage; asked for every stage in which it acts."""


class State(Protocol):
    """What `remember` sees of the train state."""

    params: Tree
    reference: Tree

    def reference_params(self) -> Tree:
        """The parameters of the snapshot, None where there is none yet."""

    def token_losses(self, params: Tree, micro: "Batch") -> "jax.Array":
        """The negative log-likelihood of every target of a micro-batch, (B, T); 0 where there is none."""

    def log_likelihoods(self, trained: Tree, micro: "Batch") -> "jax.Array":
        """Log-likelihood of every target, (B, T); 0 where there is none. Differentiable in the trained part."""

    def trained(self) -> Tree:
        """The part of the parameters that is trained."""

    def sampled(self, micro: "Batch", key: "jax.Array") -> "Batch":
        """A micro-batch whose targets are drawn from the model itself, given the real tokens before each."""

    def input_moments(self, rows: "Batch") -> "Mapping[str, jax.Array]":
        """Mean square (…, in) of the inputs of every dense kernel (…, in, out), as far as it is trained, by its path.

        Args:
            rows: (S, B, T); the mean is over their real tokens.
        """


class StageData(Protocol):
    """Rows around a boundary, pure functions of the config and the step; each (S, B, T) in the run's own shape."""

    def old(self, num_rows: int) -> "Batch":
        """Rows of the stage that just ended, at least that many where it has them."""

    def new(self, num_rows: int) -> "Batch":
        """Rows of the stage that begins."""

    def new_batches(self, num_rows: int | None) -> "Iterator[Batch]":
        """The same, one step's batch after another; None: each row once. Where shapes alone are traced: none."""

    @property
    def renews_reference(self) -> bool:
        """Whether the present parameters become the snapshot right after."""

    def input_moments(self, state: State, num_rows: int) -> "Mapping[str, jax.Array]":
        """`State.input_moments` of rows of the stage that just ended."""

    def key(self, stream: str) -> "jax.Array":
        """A random key for a stream of that name at this boundary, from the run's seed."""

    def initial_reference(self) -> Tree:
        """The weights that `optimization/kl/reference_from` names."""


class StagePosition(NamedTuple):
    """Where in its stage a step is."""

    step: "jax.Array"  # steps of the stage that are complete
    num_steps: "jax.Array"  # that it has


@dataclass(frozen=True)
class Method:
    """A way to keep the old. A subclass is a frozen dataclass that overrides the hooks it needs; all are pure.

    What no method asks for is not computed. Token weights multiply, penalties add with their weights, and gradient,
    update and weight hooks apply in the listed order. Hooks see the trained part of the parameters alone (adapters as
    they are); what it was at the snapshot is for the memory to keep.

    Args:
        config: its options.
        edges: the first steps of all stages and the number of steps of the run, for `position`.
    """

    config: MethodConfig
    edges: tuple[int, ...] = (0, 1)

    def has(self, hook: str) -> bool:
        """Whether the method has a hook of its own."""
        return has_hook(type(self), hook)

    @property
    def looks_back(self) -> bool:
        """Whether it needs a snapshot."""
        return looks_back(type(self), self.config)

    def position(self, step: "jax.Array") -> StagePosition:
        """Where in its stage a step is, which is complete; it follows from the curriculum."""
        import jax.numpy as jnp

        edges = jnp.asarray(self.edges, jnp.int32)
        stage = jnp.searchsorted(edges[1:-1], step - 1, side="right")
        return StagePosition(step - edges[stage], edges[stage + 1] - edges[stage])

    def init(self, params: Tree) -> Tree:
        """The memory before the first step, or where a branch switches the method on: any pytree."""
        raise _absent("init")

    def remember(self, memory: Tree, state: State, data: StageData) -> Tree:
        """The memory on entering a stage in which the method acts, before the snapshot is replaced."""
        raise _absent("remember")

    def token_weights(
        self, memory: Tree, logp: "jax.Array", reference_logp: "jax.Array | None", targets: "jax.Array"
    ) -> "jax.Array":
        """A factor (C,) on each token's cross-entropy; no gradient flows through it."""
        raise _absent("token_weights")

    def batch_weights(self, memory: Tree, nll: "jax.Array", batch: "Batch") -> BatchWeights:
        """Factors from the token losses of a whole batch, (S, B, T), before any gradient is taken.

        Args:
            nll: of every target by the model or the snapshot, as the config's `weighs_by` says; 0 where there is none.
        """
        raise _absent("batch_weights")

    def token_penalty(self, logp: "jax.Array", reference_logp: "jax.Array", targets: "jax.Array") -> "jax.Array":
        """A value (C,) for each token, averaged over the tokens that the penalty sees."""
        raise _absent("token_penalty")

    def token_penalty_gradient(
        self, logp: "jax.Array", reference_logp: "jax.Array", targets: "jax.Array", value: "jax.Array"
    ) -> "jax.Array":
        """The gradient (C, V) of `token_penalty` on the logits; without it, automatic differentiation."""
        raise _absent("token_penalty_gradient")

    def parameter_penalty(self, memory: Tree, params: Tree, reference: Tree | None) -> "jax.Array":
        """A scalar, once a step."""
        raise _absent("parameter_penalty")

    def gradients(self, memory: Tree, gradients: Tree, old_gradients: Tree | None) -> Tree:
        """New gradients, once a step, after accumulation and before clipping.

        With `needs_old_gradients` in the config, `gradients` are those of the new rows and `old_gradients` those of the
        cross-entropy of old rows, each over its own tokens.
        """
        raise _absent("gradients")

    def updates(self, memory: Tree, updates: Tree, params: Tree) -> Tree:
        """New updates, after optimizer, decay and learning rate: what must not move does not move."""
        raise _absent("updates")

    def weights(self, memory: Tree, params: Tree, reference: Tree | None, step: "jax.Array") -> Tree:
        """New parameters after the update; `step` counts the steps that are complete (`position`: of its stage)."""
        raise _absent("weights")

    def observe(self, memory: Tree, gradients: Tree, taken: Tree, params: Tree) -> Tree:
        """The memory after a step; where a step is skipped it stays as it is.

        Args:
            gradients: of the rows' loss, before parameter penalties, gradient hooks and clipping.
            taken: the step as it was taken, new minus old parameters, after update and weight hooks.
            params: before the step.
        """
        raise _absent("observe")

    def measure(
        self, memory: Tree, gradients: Tree, old_gradients: Tree | None, taken: Tree, params: Tree
    ) -> "dict[str, jax.Array]":
        """Scalars to be recorded with the step, arguments as for `observe`; NaN is recorded as null."""
        raise _absent("measure")


def has_hook(method: type[Method], hook: str) -> bool:
    """Whether a class of methods has a hook of its own."""
    assert hook in HOOKS, hook
    return getattr(method, hook) is not getattr(Method, hook)


def looks_back(method: type[Method], config: MethodConfig) -> bool:
    """Whether a method needs a snapshot: it says so, or has a hook that is always given the reference's side."""
    weighs = has_hook(method, "batch_weights") and config.weighs_by == "reference"
    return config.needs_reference or weighs or has_hook(method, "token_penalty")


def _absent(hook: str) -> AssertionError:
    return AssertionError(f"{hook}: this method has no such hook; ask `has` first")
