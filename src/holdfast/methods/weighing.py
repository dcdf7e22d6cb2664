"""What methods that weigh tokens share: where a weight makes no sense, and statistics of a batch's token losses.

Legend: S micro-batches, B rows of one, T tokens of a row, G examples of a packed row.
"""

from typing import TYPE_CHECKING

from holdfast.methods.method import MethodConfig
from holdfast.methods.refusals import StageFacts

if TYPE_CHECKING:
    import jax

    from holdfast.data.batches import Batch


class WeighingConfig(MethodConfig):
    """Options of a method that weighs the cross-entropy of tokens."""

    def check(self, about: StageFacts) -> None:
        """There must be a cross-entropy to weigh."""
        if not about.counts_cross_entropy:
            raise about.refusal(
                f"stages in which tokens count: every row of stage {about.stage} is old, and with "
                "training/replay/objective: kl old rows train by the penalty alone",
                f"set that to both, or name other stages in methods/{about.name}/stages",
            )


def counted_tokens(batch: "Batch") -> "jax.Array":
    """Which tokens the loss counts, (…, T)."""
    counted: jax.Array = (batch.padding_mask > 0) & (batch.y >= 0)
    return counted


def ordered(values: "jax.Array", there: "jax.Array") -> "tuple[jax.Array, jax.Array]":
    """The values that are there in ascending order, in one row filled up with infinity, and how many they are."""
    import jax.numpy as jnp

    return jnp.sort(jnp.where(there, values, jnp.inf).reshape(-1)), there.sum()


def median(values: "jax.Array", there: "jax.Array") -> "jax.Array":
    """The median of the values that are there, between the two in the middle of an even number; infinite of none."""
    import jax.numpy as jnp

    row, count = ordered(values, there)
    return (row[jnp.maximum(count - 1, 0) // 2] + row[count // 2 % row.size]) / 2


def segment_means(
    nll_BT: "jax.Array", counted_BT: "jax.Array", segment_ids_BT: "jax.Array | None"
) -> "tuple[jax.Array, jax.Array, jax.Array]":
    """The mean loss of each example over the tokens that count, (B, G); whether it has any; and (B, T), each token's.

    Where rows are not packed each is one example, G = 1.
    """
    import jax
    import jax.numpy as jnp

    T = nll_BT.shape[1]
    ids_BT = jnp.zeros_like(counted_BT, jnp.int32) if segment_ids_BT is None else segment_ids_BT
    num_segments = 1 if segment_ids_BT is None else T + 1

    def summed(values_BT: "jax.Array") -> "jax.Array":
        return jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, num_segments))(values_BT, ids_BT)

    tokens_BG = summed(counted_BT.astype(jnp.float32))
    means_BG = summed(jnp.where(counted_BT, nll_BT, 0)) / jnp.maximum(tokens_BG, 1)
    return means_BG, tokens_BG > 0, jnp.take_along_axis(means_BG, ids_BT, axis=1)
