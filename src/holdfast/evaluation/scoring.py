"""Losses of rows of tokens, without gradients: the one place where held-out NLL and KL are computed.

Shapes: B rows, T time, D width, V vocabulary.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from holdfast.models.family import Model
from holdfast.objectives.token_loss import token_kl, token_nll
from holdfast.types import Tree


class RowBatch(Protocol):
    """What is read of a batch: arrays (B, T), as in `holdfast.data.batches.Batch`."""

    @property
    def x(self) -> Any: ...
    @property
    def y(self) -> Any: ...
    @property
    def padding_mask(self) -> Any: ...
    @property
    def segment_ids(self) -> Any: ...
    @property
    def positions(self) -> Any: ...


class Sums(NamedTuple):
    """Sums over tokens: of a batch (scalars) or of each row (B,).

    `nll` counts real tokens whose target is not ignored; the divergences count every real token, and are 0 over
    0 tokens where there is no reference.
    """

    nll: jax.Array
    tokens: jax.Array
    kl_forward: jax.Array
    kl_reverse: jax.Array
    kl_tokens: jax.Array


def row_sums(model: Model, params: Tree, batch: RowBatch, reference_params: Any = None) -> Sums:
    """Sums over the tokens of each row, (B,) in float32; a pure function.

    Args:
        reference_params: of the model that divergences are measured against; None measures none.
    """
    mask_BT = batch.padding_mask > 0
    targets_BT = jnp.where(mask_BT, batch.y, -1)
    hidden_BTD = _hidden(model, params, batch)
    matrix_DV = model.unembedding(params)
    nll_B = token_nll(hidden_BTD, matrix_DV, targets_BT, softcap=model.softcap).sum(1)
    tokens_B = (targets_BT >= 0).sum(1).astype(jnp.float32)
    if reference_params is None:
        zero_B = jnp.zeros_like(nll_B)
        return Sums(nll_B, tokens_B, zero_B, zero_B, zero_B)
    reference_BTD = _hidden(model, reference_params, batch)
    reference_DV = model.unembedding(reference_params)
    kl = token_kl(hidden_BTD, matrix_DV, reference_BTD, reference_DV, softcap=model.softcap)
    forward_B, reverse_B = (jnp.where(mask_BT, each, 0).sum(1) for each in kl)
    return Sums(nll_B, tokens_B, forward_B, reverse_B, mask_BT.sum(1).astype(jnp.float32))


def batch_sums(model: Model, params: Tree, batch: RowBatch, reference_params: Any = None) -> Sums:
    """Sums over all tokens of a batch; arguments as for `row_sums`."""
    return Sums(*(each.sum() for each in row_sums(model, params, batch, reference_params)))


def _hidden(model: Model, params: Tree, batch: RowBatch) -> jax.Array:
    return model.hidden(params, batch.x, segment_ids=batch.segment_ids, positions=batch.positions)[0]
