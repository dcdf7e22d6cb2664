"""Decoding: tokens one after another from a cache, greedy or sampled.

A prompt is read at once; then a compiled loop makes some tokens for all rows and returns to the host, which stops
when every row has ended or goes on. What a row says depends on its prompt, its number and the seed, never on the
rows beside it.

Shapes: B rows, P prompt tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from holdfast.data.tokenizers import Tokenizer
from holdfast.evaluation.forward import Runner, bucket, pad
from holdfast.models.family import Model
from holdfast.types import Tree

CHUNK = 8  # tokens between two looks at what was said
REPLACEMENT = "\ufffd"  # what decoding gives for a character that is not complete yet


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen from its logits.

    Args:
        temperature: 0 takes the likeliest token; 1 samples as the model says.
        top_k: only that many likeliest tokens; 0 is all.
        top_p: only the likeliest tokens that together reach this probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def filtered(self, logits_BV: jax.Array) -> jax.Array:
        """Logits at the temperature, −inf for tokens that are left out."""
        logits_BV = logits_BV / self.temperature
        if self.top_k and self.top_k < logits_BV.shape[1]:
            least_B1 = jax.lax.top_k(logits_BV, self.top_k)[0][:, -1:]
            logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
        if self.top_p < 1:
            sorted_BV = jnp.sort(logits_BV, axis=1, descending=True)
            before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV), axis=1) - jax.nn.softmax(sorted_BV)
            least_B1 = jnp.where(before_BV < self.top_p, sorted_BV, jnp.inf).min(axis=1, keepdims=True)
            logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
        return logits_BV

    def pick(self, logits_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
        """The next token of each row."""
        if self.temperature == 0:
            return jnp.argmax(logits_BV, axis=1).astype(jnp.int32)
        return jax.vmap(jax.random.categorical)(keys_B, self.filtered(logits_BV)).astype(jnp.int32)


def prefill(
    model: Model, params: Tree, prompts_BP: jax.Array, lengths_B: jax.Array, *, num_slots: int
) -> tuple[jax.Array, Any]:
    """Read prompts into a new cache; returns logits (B, V) of the next tokens, and the cache."""
    return model.decode(params, prompts_BP, model.init_cache(prompts_BP.shape[0], num_slots), lengths_B)


def advance(
    model: Model,
    params: Tree,
    logits_BV: jax.Array,
    cache: Any,
    seeds_B: jax.Array,
    rows_B: jax.Array,
    steps_B: jax.Array,
    *,
    sampler: Sampler,
    vocab_size: int,
) -> tuple[jax.Array, jax.Array, Any]:
    """CHUNK more tokens (B, CHUNK), then logits and cache to go on from.

    Args:
        seeds_B, rows_B, steps_B: what the random numbers of a row are made from: seed, number, tokens so far.
        vocab_size: of the tokenizer; the model may have more, unused ids.
    """
    keys_B = jax.vmap(lambda seed, row: jax.random.fold_in(jax.random.key(seed), row))(seeds_B, rows_B)

    def step(carry: tuple[jax.Array, Any], offset: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
        logits, cache = carry
        tokens_B = sampler.pick(logits[:, :vocab_size], jax.vmap(jax.random.fold_in)(keys_B, steps_B + offset))
        return model.decode(params, tokens_B[:, None], cache), tokens_B

    (logits_BV, cache), tokens = jax.lax.scan(step, (logits_BV, cache), jnp.arange(CHUNK))
    return tokens.T, logits_BV, cache


def chunks(
    runner: Runner,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    num_tokens: int,
    sampler: Sampler,
    vocab_size: int,
    seed: int = 0,
    start: int = 0,
    num_rows: int = 1,
) -> Iterator[NDArray[np.int32]]:
    """The tokens after some prompts, (prompts, CHUNK) at a time, until there are at least `num_tokens`.

    Args:
        prompts: ids; none empty, and none so long that prompt and new tokens leave the block.
        rows: the number of each prompt.
        start: tokens that were made before.
        num_rows: rows of the compiled batch, at least; those that are not prompts are wasted.
    """
    longest = max(map(len, prompts))
    width = bucket(longest, runner.model.block_size)
    count = -(-max(len(prompts), num_rows) // runner.row_multiple) * runner.row_multiple
    lengths = np.ones(count, np.int32)
    lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
    num_slots = bucket(longest + num_tokens + CHUNK)
    logits, cache = runner.start(prefill, params, (pad(prompts, count, width), lengths), num_slots=num_slots)
    jax.block_until_ready(logits)  # several programs in flight can deadlock on a CPU with several devices
    numbers = np.zeros(count, np.int32)
    numbers[: len(prompts)] = rows
    seeds = np.full(count, seed, np.int32)
    for made in range(start, start + num_tokens, CHUNK):
        state = (logits, cache, seeds, numbers, np.full(count, made, np.int32))
        tokens, logits, cache = runner.start(
            advance, params, state, runner.replicated_first(2), sampler=sampler, vocab_size=vocab_size
        )
        yield np.asarray(tokens)[: len(prompts)]


def generate_tokens(
    runner: Runner,
    params: Tree,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    seed: int = 0,
    batch_size: int = 32,
    stop: Callable[[list[int]], bool] | None = None,
) -> list[list[int]]:
    """What the model says after each prompt, up to the end-of-text token (left out) or a number of tokens.

    A prompt that does not fit beside its answer loses its left end; an empty one is the end-of-text token.

    Args:
        stop: whether a row needs no more tokens; some more may come all the same.
    """
    block_size = runner.model.block_size
    max_new_tokens = min(max_new_tokens, block_size)
    keep = block_size + 1 - max_new_tokens
    cut = [(list(prompt) or [tokenizer.eot_id])[-keep:] for prompt in prompts]
    order = sorted(range(len(cut)), key=lambda index: (-len(cut[index]), index))
    results: list[list[int]] = [[] for _ in cut]
    while order:
        count = runner.rows(batch_size, bucket(len(cut[order[0]]), block_size), len(cut))
        part, order = order[:count], order[count:]
        made = chunks(
            runner,
            params,
            [cut[index] for index in part],
            part,
            max_new_tokens,
            sampler or Sampler(),
            tokenizer.vocab_size,
            seed,
            num_rows=count,
        )
        for tokens in made:
            for index, row in zip(part, tokens.tolist(), strict=True):
                results[index] += row
            if all(tokenizer.eot_id in results[index] or (stop and stop(results[index])) for index in part):
                break
    return [_until(row, tokenizer.eot_id, max_new_tokens) for row in results]


def _until(tokens: list[int], eot_id: int, most: int) -> list[int]:
    return tokens[: min(tokens.index(eot_id) if eot_id in tokens else most, most)]


def stream(
    runner: Runner,
    params: Tree,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    seed: int = 0,
    row: int = 0,
) -> Iterator[str]:
    """What the model says after a prompt, a text or ids, as pieces of text while it says them.

    When the block is full the model goes on from its second half, so that a text may be longer than a block.
    """
    block_size = runner.model.block_size
    text = (tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)) or [tokenizer.eot_id]
    said: list[int] = []
    shown = ""
    while len(said) < max_new_tokens:
        window = (text + said)[-max(block_size // 2, 1) :] if len(text) + len(said) >= block_size else text + said
        room = min(max_new_tokens - len(said), block_size + 1 - len(window))
        made = chunks(
            runner, params, [window], [row], room, sampler or Sampler(), tokenizer.vocab_size, seed, len(said)
        )
        before = len(said)
        for tokens in made:
            fresh = tokens[0].tolist()[: room - (len(said) - before)]
            ended = tokenizer.eot_id in fresh
            said += _until(fresh, tokenizer.eot_id, len(fresh))
            now = tokenizer.decode(said)
            whole = now if ended or len(said) >= max_new_tokens else now.rstrip(REPLACEMENT)
            if len(whole) > len(shown):
                yield whole[len(shown) :]
                shown = whole
            if ended:
                return


def until(pieces: Iterator[str], stop: str) -> Iterator[str]:
    """Pieces of text up to where the whole has a text; what may be the beginning of it is held back.

    >>> list(until(iter(["Hel", "lo<", "end> and", " more"]), "<end>"))
    ['Hel', 'lo']
    """
    if not stop:
        yield from pieces
        return
    held = ""
    for piece in pieces:
        held += piece
        if stop in held:
            rest = held.partition(stop)[0]
            if rest:
                yield rest
            return
        kept = next(size for size in range(min(len(stop) - 1, len(held)), -1, -1) if held.endswith(stop[:size]))
        if len(held) > kept:
            yield held[: len(held) - kept]
            held = held[len(held) - kept :]
    if held:
        yield held
