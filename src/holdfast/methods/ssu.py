"""Source-shielded updates (Yamaguchi et al. 2025, arXiv 2512.04844).

The input features that matter most for old rows are frozen: of each dense kernel the rows of our (in, out) arrays (the
paper's columns) with the highest score ‖W_j‖₂ · mean x_j² over calibration rows of the ended stage.
Embeddings and the output head are left free. Norms' scales and biases have no input of their own: they are frozen
number by number, the largest first.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, List, Mapping, Optional

from holdfast.config import field
from holdfast.errors import UserError
from holdfast.methods.method import Method, MethodConfig, StageData, State
from holdfast.methods.refusals import StageFacts, refuse_adapters, refuse_first_stage, refuse_other_updates
from holdfast.registry import methods
from holdfast.types import Json, Tree

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class SSUConfig(MethodConfig):
    """Options of source-shielded updates."""

    stages: Optional[List[int]] = field(
        "methods/ssu/stages",
        resume="unused",
        default=None,
        help="stages in which it acts (0-based); null = all from the second on",
        ge=0,
    )
    ratio: float = field(
        "methods/ssu/ratio",
        resume="unused",
        default=0.5,
        help="share of the input features of each kernel, and of each small vector, that is frozen; 0 = none",
        ge=0,
        le=1,
    )
    rows: int = field(
        "methods/ssu/rows",
        resume="unused",
        default=500,
        help="rows of the ended stage that inputs are measured on",
        ge=1,
        le=10**9,
    )

    def check(self, about: StageFacts) -> None:
        """It freezes parts of the model's own weights, by rows of the stage before, alone."""
        refuse_adapters(about, "the base is frozen in any case, and adapters have no source to shield")
        refuse_first_stage(about)
        refuse_other_updates(about)


@methods.register("ssu", config=SSUConfig, help="freeze the input features that matter most for old rows")
@dataclass(frozen=True)
class SSU(Method):
    """The memory is what is frozen: of kernels (…, in, 1), of small vectors each number, of others nothing."""

    config: SSUConfig

    def init(self, params: Tree) -> Tree:
        """Nothing is frozen."""
        import jax.numpy as jnp

        from holdfast.models.parameters import leaves_of, tree_of

        def shape(kind: str, own: tuple[int, ...]) -> tuple[int, ...]:
            return {"kernel": (*own[:-1], 1), "vector": own, "free": (1,) * len(own)}[kind]

        kinds = _kinds(params)
        leaves = leaves_of(params)
        return tree_of({path: jnp.zeros(shape(kinds[path], leaf.shape), bool) for path, leaf in leaves.items()})

    def remember(self, memory: Tree, state: State, data: StageData) -> Tree:
        """What the rows of the stage that just ended need most."""
        import jax

        if self.config.ratio == 0:
            return self.init(state.trained())
        return jax.jit(self.frozen)(state.trained(), dict(data.input_moments(state, self.config.rows)))

    def frozen(self, params: Tree, moments: "Mapping[str, jax.Array]") -> Tree:
        """The share of highest scores, of each layer for itself.

        Args:
            moments: mean square of the inputs of each kernel, by its path.
        """
        import jax.numpy as jnp

        from holdfast.models.parameters import leaves_of, tree_of

        kinds, found = _kinds(params), leaves_of(self.init(params))
        for path, leaf in leaves_of(params).items():
            wide = leaf.astype(jnp.float32)
            if kinds[path] == "kernel":
                if path not in moments:
                    raise UserError(
                        f"training/methods: ssu: the inputs of {path} are not measured, since it is not the kernel of "
                        "a holdfast.models.Dense; make it one, or leave ssu out"
                    )
                scores = jnp.sqrt(jnp.square(wide).sum(axis=-1)) * moments[path]
                found[path] = self._highest(scores)[..., None]
            elif kinds[path] == "vector":
                found[path] = self._highest(jnp.abs(wide))
        return tree_of(found)

    def _highest(self, scores: "jax.Array") -> "jax.Array":
        """Whether each score is among the share of highest ones along the last axis; of equal ones the first."""
        import jax.numpy as jnp

        places = jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1)
        return places < round(self.config.ratio * scores.shape[-1])

    def updates(self, memory: Tree, updates: Tree, params: Tree) -> Tree:
        """Nothing for what is frozen."""
        import jax
        import jax.numpy as jnp

        if self.config.ratio == 0:
            return updates
        # Minus zero changes no number when it is added; plus zero would make a plus of a minus zero.
        return jax.tree.map(lambda held, update: jnp.where(held, -0.0, update), memory, updates)


def _kinds(params: Tree) -> Json:
    """What each parameter is by slash path: a `kernel`, a small `vector` (stacked or not), or `free`."""
    import jax

    from holdfast.models.parameters import leaves_of
    from holdfast.optim.build import decays, inner_matrix

    def kind(path: Any, leaf: Any) -> str:
        if inner_matrix(path, leaf):
            return "kernel"
        return "free" if decays(path, leaf) or not leaf.ndim else "vector"

    return leaves_of(jax.tree_util.tree_map_with_path(kind, params))
