"""Choice: the log-likelihood of each possible answer, given the prompt.

A prompt is read once, whatever the number of answers: tokens that all answers begin with are read along with it,
and where answers go on after their first own token, that rest is read from the prompt's key/value cache. Questions
are sorted by length into batches of a few fixed shapes.

Prompt and answer are tokenised separately, as training rows are. Whether the end-of-text token counts is
`eval/end_of_text`: by default only for questions in which one answer begins another ("1" and "12"), where the
shorter would otherwise always be the likelier. Answers are compared by their log-likelihood, or by that divided by
their length as lm-evaluation-harness counts it for `acc_norm`.

Shapes: B questions, C choices, P prompt tokens, N tokens of a choice that are its own, K shared tokens, V vocabulary.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from holdfast.data.documents import Document
from holdfast.data.tokenizers import Tokenizer
from holdfast.evaluation.forward import Runner, bucket, few_widths, pad
from holdfast.models.family import Model
from holdfast.models.layers import capped
from holdfast.types import Tree

MOST_WIDTHS = 5  # widths of prompts that one task is compiled for
MOST_OWN_WIDTHS = 3  # and of answers


class Question(NamedTuple):
    """A prompt and its possible answers, as ids; `shared` tokens at the end of the prompt belong to every answer."""

    prompt: list[int]
    choices: list[list[int]]  # without the shared tokens; may be empty
    shared: int = 0


class Scores(NamedTuple):
    """Log-likelihoods (…, C) in nats, and whether each answer is what greedy decoding would say."""

    log_likelihood: Any
    greedy: Any


def questions(
    documents: Sequence[Document], tokenizer: Tokenizer, block_size: int, end_of_text: str = "auto"
) -> list[Question]:
    """Documents with choices as ids.

    Args:
        block_size: a prompt that does not fit beside the longest answer loses its left end, as in training rows.
        end_of_text: whether the end-of-text token is part of the answers: `always`, `never`, or `auto`, which
            is where one answer of the question begins another.
    """
    texts = [text for document in documents for text in (document.prompt, *document.choices)]
    encoded = iter(tokenizer.encode_batch(texts))
    made = []
    for document in documents:
        prompt, *choices = (next(encoded) for _ in range(1 + len(document.choices)))
        if end_of_text == "always" or (end_of_text == "auto" and any_prefix(choices)):
            choices = [[*choice, tokenizer.eot_id] for choice in choices]
        made.append(question(prompt, choices, block_size, tokenizer.eot_id))
    return made


def harness_length(text: str) -> int:
    """The length of an answer as `acc_norm` of lm-evaluation-harness counts it, for which the score is divided.

    That is characters, not bytes, of the answer without the space that sets it off from its prompt: the harness
    adds that (`target_delimiter`) after the choice was measured. An empty answer counts as one character.

    >>> harness_length(" yes"), harness_length("café"), harness_length("")
    (3, 4, 1)
    """
    return max(len(text.removeprefix(" ")), 1)


def any_prefix(choices: Sequence[Sequence[int]]) -> bool:
    """Whether one of several different answers begins another.

    >>> any_prefix([[1], [1, 2]]), any_prefix([[1, 3], [1, 2]])
    (True, False)
    """
    ordered = sorted({tuple(choice) for choice in choices})
    return any(longer[: len(shorter)] == shorter for shorter, longer in itertools.pairwise(ordered))


def question(prompt: list[int], choices: list[list[int]], block_size: int, eot_id: int) -> Question:
    """A question that fits into a block; what all choices begin with moves to the prompt.

    >>> question([5], [[1, 2], [1, 3, 4]], 8, 0)
    Question(prompt=[5, 1], choices=[[2], [3, 4]], shared=1)
    """
    choices = [choice[:block_size] for choice in choices]
    longest = max(map(len, choices))
    prompt = (prompt or [eot_id])[-max(block_size + 1 - longest, 1) :]  # an answer's last token is only a target
    # A lone answer is read with the prompt but for its last token.
    ends = [len(choice) for choice in choices] if len(choices) > 1 else [len(choices[0]) - 1]
    shared = 0
    while shared < min(ends) and len({choice[shared] for choice in choices}) == 1:
        shared += 1
    own = [choice[shared:] for choice in choices]
    return Question(prompt + choices[0][:shared], own, shared)


class Shape(NamedTuple):
    """The fixed sizes of a batch of questions."""

    rows: int
    prompt: int
    choices: int
    own: int
    shared: int


def batches(
    asked: Sequence[Question], block_size: int, num_rows: Callable[[int, int], int]
) -> Iterator[tuple[Shape, list[int]]]:
    """Indices of questions in batches of like lengths, longest first; all but the last of one width are full.

    Args:
        num_rows: rows of a batch, for prompts of a width and a number of questions.
    """
    longest = [max(map(len, each.choices)) - 1 for each in asked]  # the last token of a choice is never read
    most_shared = max(each.shared for each in asked)
    shared = bucket(most_shared, smallest=4) if most_shared else 0
    order = sorted(range(len(asked)), key=lambda index: (-len(asked[index].prompt), index))
    shortest = -1
    for own in [0, *few_widths([each for each in longest if each > 0], MOST_OWN_WIDTHS, unit=4)]:
        group = [index for index in order if shortest < max(longest[index], 0) <= own]
        shortest = own
        if not group:
            continue
        choices = max(len(asked[index].choices) for index in group)
        lengths = [len(asked[index].prompt) for index in group]
        # Every width is compiled by itself, which pays only for many batches.
        num_batches = len(group) // num_rows(max(lengths), len(group))
        widths = few_widths(lengths, min(max(num_batches // 2, 1), MOST_WIDTHS))
        while group:
            prompt = min(next(width for width in widths if len(asked[group[0]].prompt) <= width), block_size)
            count = num_rows(prompt, len(lengths))
            yield Shape(count, prompt, choices, 1 + own, shared), group[:count]
            group = group[count:]


def score(runner: Runner, params: Tree, asked: Sequence[Question], batch_size: int) -> list[Scores]:
    """The log-likelihood of every choice of every question."""
    results: list[Scores | None] = [None] * len(asked)

    def num_rows(width: int, available: int) -> int:
        return runner.rows(batch_size, width, available)

    for shape, indices in batches(asked, runner.model.block_size, num_rows):
        arrays = _arrays([asked[index] for index in indices], shape)
        scores = runner.call(choice_scores, params, arrays, num_shared=shape.shared)
        for row, index in enumerate(indices):
            count = len(asked[index].choices)
            results[index] = Scores(scores.log_likelihood[row, :count], scores.greedy[row, :count])
    return [each for each in results if each is not None]


def _arrays(asked: Sequence[Question], shape: Shape) -> tuple[NDArray[np.int32], ...]:
    num_rows = shape.rows
    prompts = pad([each.prompt for each in asked], num_rows, shape.prompt)
    prompt_lengths = np.ones(num_rows, np.int32)  # rows that only fill the batch read one token
    shared = np.zeros(num_rows, np.int32)
    own = np.zeros((num_rows, shape.choices, shape.own), np.int32)
    own_lengths = np.zeros((num_rows, shape.choices), np.int32)
    for row, each in enumerate(asked):
        prompt_lengths[row], shared[row] = len(each.prompt), each.shared
        for column, choice in enumerate(each.choices):
            own[row, column, : len(choice)] = choice
            own_lengths[row, column] = len(choice)
    return prompts, prompt_lengths, shared, own, own_lengths


def choice_scores(
    model: Model,
    params: Tree,
    prompts_BP: jax.Array,
    prompt_lengths_B: jax.Array,
    shared_B: jax.Array,
    own_BCN: jax.Array,
    own_lengths_BC: jax.Array,
    *,
    num_shared: int,
) -> Scores:
    """Scores (B, C) of a batch of one shape; a pure function.

    Args:
        shared_B: how many tokens at the end of each prompt belong to the answers, at most `num_shared`.
    """
    B, P = prompts_BP.shape
    N = own_BCN.shape[2]
    matrix_DV, softcap = model.unembedding(params), model.softcap
    if N == 1:
        hidden_BPD, cache = model.hidden(params, prompts_BP)[0], None
    else:
        empty = model.init_cache(B, P + N - 1)
        hidden_BPD, cache = model.read(params, prompts_BP, empty, prompt_lengths_B)
    last_B = prompt_lengths_B - 1
    last_BD = jnp.take_along_axis(hidden_BPD, last_B[:, None, None], axis=1)[:, 0]
    first_CB1 = own_BCN[:, :, 0].T[:, :, None]
    total, greedy = _score_tokens(last_BD[:, None], matrix_DV, softcap, first_CB1, own_lengths_BC.T > 0)
    if num_shared:
        back_BK = last_B[:, None] - jnp.arange(num_shared, 0, -1)
        inputs_BKD = jnp.take_along_axis(hidden_BPD, jnp.maximum(back_BK, 0)[..., None], axis=1)
        targets_BK = jnp.take_along_axis(prompts_BP, jnp.clip(back_BK + 1, 0, P - 1), axis=1)
        counted_BK = jnp.arange(num_shared, 0, -1) <= shared_B[:, None]
        prefix, prefix_greedy = _score_tokens(inputs_BKD, matrix_DV, softcap, targets_BK[None], counted_BK[None])
        total, greedy = total + prefix, greedy & prefix_greedy
    if cache is not None:
        kept = cache

        def rest(choice: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            own_BN, lengths_B = choice
            hidden, _ = model.read(params, own_BN[:, :-1], kept)
            counted = jnp.arange(1, N) < lengths_B[:, None]
            scored = _score_tokens(hidden, matrix_DV, softcap, own_BN[None, :, 1:], counted[None])
            return scored[0][0], scored[1][0]

        # One choice at a time, so that the cache is never copied for all of them at once.
        more, more_greedy = jax.lax.map(rest, (own_BCN.swapaxes(0, 1), own_lengths_BC.T))
        total, greedy = total + more, greedy & more_greedy
    return Scores(total.T, greedy.T)


def _score_tokens(
    hidden_BTD: jax.Array, matrix_DV: jax.Array, softcap: float | None, targets_CBT: jax.Array, counted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Summed log-probability (C, B) of alternative targets after the same hidden states, and whether all are likeliest.

    Args:
        counted: (C, B, T), or (C, B) for T = 1; targets that are not counted add nothing.
    """
    B, T, D = hidden_BTD.shape
    counted_CBT = counted.reshape(targets_CBT.shape)
    flat_ND = hidden_BTD.reshape(B * T, D)
    logits_NV = jnp.dot(flat_ND, matrix_DV.astype(flat_ND.dtype), preferred_element_type=jnp.float32)
    logits_BTV = capped(logits_NV, softcap).reshape(B, T, -1)
    chosen_CBT = jax.vmap(lambda y_BT: jnp.take_along_axis(logits_BTV, y_BT[..., None], axis=2)[..., 0])(targets_CBT)
    log_p_CBT = chosen_CBT - jax.nn.logsumexp(logits_BTV, axis=2)
    likeliest_CBT = chosen_CBT >= logits_BTV.max(axis=2)
    summed = jnp.where(counted_CBT, log_p_CBT, 0).sum(2)
    return summed, (likeliest_CBT | ~counted_CBT).all(2)
