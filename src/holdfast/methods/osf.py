"""Orthogonal subspace fine-tuning (Nayak et al. 2025, arXiv 2504.07097).

Weights move only across what the model uses most: ΔW ← (I − UUᵀ) ΔW (I − VVᵀ), where U and V are the top singular
directions of every matrix when the stage began. The paper sets ranks by layer; here each matrix has the same share of
its rank. Embeddings, the output head, norms and biases are left free.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional

from holdfast.config import field
from holdfast.methods.method import Method, MethodConfig, StageData, State
from holdfast.methods.refusals import StageFacts, refuse_adapters, refuse_other_updates
from holdfast.registry import methods
from holdfast.types import Json, Tree

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class OSFConfig(MethodConfig):
    """Options of orthogonal subspaces."""

    stages: Optional[List[int]] = field(
        "methods/osf/stages",
        resume="unused",
        default=None,
        help="stages in which it acts (0-based); null = all from the second on",
        ge=0,
    )
    rank: float = field(
        "methods/osf/rank",
        resume="unused",
        default=0.5,
        help="share of each matrix's singular directions that are kept from moving; 0 = none",
        ge=0,
        le=1,
    )

    def check(self, about: StageFacts) -> None:
        """It holds directions of the model's own weights, alone."""
        refuse_adapters(about, "the base does not move at all, and adapters have no directions to keep yet")
        refuse_other_updates(about)


@methods.register("osf", config=OSFConfig, help="move weights only across their top singular directions")
@dataclass(frozen=True)
class OSF(Method):
    """The memory is {left, right}: of each matrix (…, in, out) U (…, in, r) and V (…, out, r)."""

    config: OSFConfig

    def init(self, params: Tree) -> Tree:
        """No directions: zeros hold nothing back."""
        import jax.numpy as jnp

        from holdfast.models.parameters import tree_of

        left: Json = {}
        right: Json = {}
        for path, matrix in _matrices(params).items():
            *stack, inputs, outputs = matrix.shape
            columns = max(self.rank(matrix), 1)  # of zeros where the share is 0: arrays without any cannot be stored
            left[path] = jnp.zeros((*stack, inputs, columns), jnp.float32)
            right[path] = jnp.zeros((*stack, outputs, columns), jnp.float32)
        return {"left": tree_of(left), "right": tree_of(right)}

    def rank(self, matrix: "jax.Array") -> int:
        """How many directions of a matrix are kept."""
        return round(self.config.rank * min(matrix.shape[-2:]))

    def remember(self, memory: Tree, state: State, data: StageData) -> Tree:
        """The top singular directions of the weights as they are now."""
        import jax

        return jax.jit(self.directions)(state.trained())

    def directions(self, params: Tree) -> Tree:
        """The top singular directions of all matrices."""
        import jax.numpy as jnp

        from holdfast.models.parameters import tree_of

        if self.config.rank == 0:
            return self.init(params)
        left: Json = {}
        right: Json = {}
        for path, matrix in _matrices(params).items():
            rank = max(self.rank(matrix), 1)
            u, _, vt = jnp.linalg.svd(matrix.astype(jnp.float32), full_matrices=False)
            kept = jnp.float32(self.rank(matrix) > 0)
            left[path], right[path] = kept * u[..., :rank], kept * jnp.swapaxes(vt, -1, -2)[..., :rank]
        return {"left": tree_of(left), "right": tree_of(right)}

    def updates(self, memory: Tree, updates: Tree, params: Tree) -> Tree:
        """(I − UUᵀ) ΔW (I − VVᵀ)."""
        import jax
        import jax.numpy as jnp

        from holdfast.models.parameters import leaves_of, tree_of

        if self.config.rank == 0:
            return updates
        left, right, found = leaves_of(memory["left"]), leaves_of(memory["right"]), leaves_of(updates)

        def product(*arrays: "jax.Array", spelled: str) -> "jax.Array":
            return jnp.einsum(spelled, *arrays, precision=jax.lax.Precision.HIGHEST)

        for path, u in left.items():
            wide = found[path].astype(jnp.float32)
            v = right[path]
            wide = wide - product(u, product(u, wide, spelled="...ir,...io->...ro"), spelled="...ir,...ro->...io")
            wide = wide - product(product(wide, v, spelled="...io,...or->...ir"), v, spelled="...ir,...or->...io")
            found[path] = wide.astype(found[path].dtype)
        return tree_of(found)


def _matrices(params: Tree) -> Json:
    """The matrices inside the model by slash path; other axes than the last two are stacked layers."""
    import jax

    from holdfast.models.parameters import leaves_of
    from holdfast.optim.build import inner_matrix

    inside = leaves_of(jax.tree_util.tree_map_with_path(inner_matrix, params))
    return {path: leaf for path, leaf in leaves_of(params).items() if inside[path]}
