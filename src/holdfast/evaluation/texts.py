"""The loss of whole texts, token by token: each token with as much before it as fits into a block.

Where a token ends in the bytes of its text is known, so that two models with different tokenizers can be compared on
the same bytes. B rows, T time.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from holdfast.data.rows import IGNORE
from holdfast.data.tokenizers import Tokenizer
from holdfast.evaluation.forward import Runner, bucket, pad
from holdfast.models.family import Model
from holdfast.objectives.token_loss import token_kl, token_nll
from holdfast.types import Tree


class Window(NamedTuple):
    """Tokens that are read together; targets that an earlier window predicted are ignored."""

    text: int
    inputs: list[int]
    targets: list[int]


class TextLoss(NamedTuple):
    """The loss of one text: nats of every token, and the byte at which each ends."""

    nats: NDArray[np.float64]
    ends: NDArray[np.int64]

    def until(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        """Nats spent on the text before each byte; inside a token they are spread evenly.

        >>> TextLoss(np.array([2.0, 1.0]), np.array([4, 5])).until(np.array([0, 2, 4, 5])).tolist()
        [0.0, 1.0, 2.0, 3.0]
        """
        # Tokens that add no byte (parts of a character) end where the one before did: the last of them counts.
        ends, spent = np.concatenate([[0], self.ends]), np.concatenate([[0.0], np.cumsum(self.nats)])
        last = np.append(ends[1:] != ends[:-1], True)
        found: NDArray[np.float64] = np.interp(
            places, np.concatenate([[0], ends[last]]), np.concatenate([[0.0], spent[last]])
        )
        return found


def windows(tokens: Sequence[int], block_size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and targets that predict every token but the first once, each with as much before it as fits.

    >>> list(windows([0, 1, 2, 3], 2))
    [([0, 1], [1, 2]), ([1, 2], [-1, 3])]
    """
    for start in range(0, len(tokens) - 1, block_size):
        end = min(start + block_size, len(tokens) - 1)
        first = max(end - block_size, 0)  # the last window reaches back, so that it is full too
        yield list(tokens[first:end]), [IGNORE] * (start - first) + list(tokens[start + 1 : end + 1])


def text_losses(
    runner: Runner, params: Tree, tokenizer: Tokenizer, texts: Sequence[str], batch_size: int = 32
) -> list[TextLoss]:
    """The loss of every text; the end-of-text token stands before each and is never predicted."""
    encoded = tokenizer.encode_batch(texts)
    nats = [np.zeros(len(ids)) for ids in encoded]
    filled = [0] * len(texts)
    for rows, x, y in _batches(runner, tokenizer, encoded, batch_size):
        found = np.asarray(runner.call(_token_losses, params, (x, y)), np.float64)
        for row, window in enumerate(rows):
            counted = np.asarray(window.targets) != IGNORE
            values = found[row, : len(counted)][counted]
            nats[window.text][filled[window.text] : filled[window.text] + len(values)] = values
            filled[window.text] += len(values)
    sizes = tokenizer.token_bytes()
    return [TextLoss(each, _ends(sizes[ids], text)) for each, ids, text in zip(nats, encoded, texts, strict=True)]


def text_divergences(
    runner: Runner,
    params: Tree,
    other: Model,
    other_params: Tree,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    batch_size: int = 32,
) -> NDArray[np.float64]:
    """KL(first ‖ second), KL(second ‖ first) and tokens of every text, (3, texts), for models with one vocabulary.

    Args:
        runner, params: the second model, whose `Runner` computes both.
        other, other_params: the first model.
    """
    totals = np.zeros((3, len(texts)))
    for rows, x, y in _batches(runner, tokenizer, tokenizer.encode_batch(texts), batch_size):
        found = np.asarray(runner.call(_divergences, (params, other_params), (x, y), other=other), np.float64)
        for row, window in enumerate(rows):
            totals[:, window.text] += found[:, row]
    return totals


def _batches(
    runner: Runner, tokenizer: Tokenizer, encoded: Sequence[Sequence[int]], batch_size: int
) -> Iterator[tuple[list[Window], NDArray[np.int32], NDArray[np.int32]]]:
    block_size = runner.model.block_size
    rows = [
        Window(index, *window)
        for index, ids in enumerate(encoded)
        for window in windows([tokenizer.eot_id, *ids], block_size)
    ]
    num_rows = runner.rows(batch_size, block_size, max(len(rows), 1))
    for start in range(0, len(rows), num_rows):
        part = rows[start : start + num_rows]
        width = bucket(max(len(each.inputs) for each in part), block_size)
        x = pad([each.inputs for each in part], num_rows, width)
        yield part, x, pad([each.targets for each in part], num_rows, width, fill=IGNORE)


def _token_losses(model: Model, params: Tree, x_BT: jax.Array, y_BT: jax.Array) -> jax.Array:
    hidden, _ = model.hidden(params, x_BT)
    return token_nll(hidden, model.unembedding(params), y_BT, softcap=model.softcap)


def _divergences(
    model: Model, params: tuple[Tree, Tree], x_BT: jax.Array, y_BT: jax.Array, *, other: Model
) -> jax.Array:
    own, others = params
    hidden, reference = model.hidden(own, x_BT)[0], other.hidden(others, x_BT)[0]
    matrices = model.unembedding(own), other.unembedding(others)
    forward, reverse = token_kl(hidden, matrices[0], reference, matrices[1], softcap=model.softcap)
    counted = y_BT != IGNORE
    return jnp.stack([jnp.where(counted, each, 0).sum(1) for each in (forward, reverse, jnp.ones_like(forward))])


def _ends(sizes: NDArray[np.int32], text: str) -> NDArray[np.int64]:
    """Where each token ends in the bytes of a text.

    Some tokenizers put a space of their own before a text: what they have more than the text stands before it.
    """
    length = len(text.encode())
    ends = np.cumsum(sizes, dtype=np.int64)
    ahead = int(ends[-1]) - length if len(ends) else 0
    return np.clip(ends - ahead, 0, length)
