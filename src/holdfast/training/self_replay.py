"""Self-replay: rows that the model samples from itself before it enters a stage, for those who have no old data.

A sample begins after an end of text, goes on through further ones and is cut into blocks, so that most rows begin in
the middle of a text, as rows of a stream do. What is sampled depends on the seed, the step, the number of the sample
and the position alone; the last bits of logits may depend on the shape of a batch and on the mesh, so that parts that
were made with another one are made again.

Shapes: B samples, P prompt tokens, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from holdfast.data.permutation import key_of
from holdfast.data.plan import SampledSet
from holdfast.data.sampled import BLOCKS, Parts, open_set, set_path
from holdfast.data.sampling import SELF
from holdfast.data.store import remove
from holdfast.errors import UserError
from holdfast.evaluation.decoding import Sampler
from holdfast.evaluation.forward import Runner
from holdfast.execution import Topology, processes
from holdfast.models.family import Model
from holdfast.models.lora import fingerprint
from holdfast.models.parameters import leaves_of
from holdfast.training.resolve import ResolvedRun
from holdfast.types import Json, Tree


def sample_window(
    model: Model,
    params: Tree,
    prompts_BP: jax.Array,
    seeds_B2: jax.Array,
    samples_B: jax.Array,
    first_B: jax.Array,
    *,
    num_tokens: int,
    temperature: float,
    vocab_size: int,
) -> jax.Array:
    """The next tokens (B, num_tokens) of some samples, from the full softmax.

    Args:
        prompts_BP: the last tokens of each sample; with the new ones, but for the last, they fill the block at most.
        seeds_B2, samples_B: what the random numbers of a sample are made from: the seed, its number.
        first_B: tokens that each sample has already.
        vocab_size: of the tokenizer; the model may have more, unused ids.
    """
    sampler = Sampler(temperature)
    num_prompts, width = prompts_BP.shape
    keys_B = jax.vmap(
        lambda seed, sample: jax.random.fold_in(jax.random.fold_in(jax.random.key(seed[0]), seed[1]), sample)
    )(seeds_B2, samples_B)

    def pick(logits_BV: jax.Array, offset: jax.Array | int) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in)(keys_B, first_B + offset)
        return sampler.pick(logits_BV[:, :vocab_size].astype(jnp.float32), keys)

    def step(carry: tuple[jax.Array, Any], offset: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
        tokens_B, cache = carry
        logits_BV, cache = model.decode(params, tokens_B[:, None], cache)
        tokens_B = pick(logits_BV, offset)
        return (tokens_B, cache), tokens_B

    cache = model.init_cache(num_prompts, width + num_tokens - 1)
    logits_BV, cache = model.decode(params, prompts_BP, cache)
    first = pick(logits_BV, 0)
    _, others = jax.lax.scan(step, (first, cache), jnp.arange(1, num_tokens))
    return jnp.concatenate([first[None], others]).T


def windows(block_size: int) -> list[tuple[int, int]]:
    """How a sample of BLOCKS rows and one token comes about: (tokens to read, tokens to sample) at a time.

    When the block is full the model goes on from its second half.

    >>> windows(8)
    [(1, 8), (4, 5), (4, 5), (4, 5), (4, 5), (4, 5)]
    """
    found, length = [(1, block_size)], 1 + block_size
    half = max(block_size // 2, 1)
    while length < BLOCKS * block_size + 1:
        found.append((half, block_size + 1 - half))
        length += block_size + 1 - half
    return found


def sample_rows(
    runner: Runner,
    params: Tree,
    samples: NDArray[np.int32],
    *,
    seed: int,
    temperature: float,
    vocab_size: int,
    eot_id: int,
) -> NDArray[np.int32]:
    """The rows of some samples, (samples x BLOCKS, T + 1): T inputs and the target of the last one.

    Args:
        samples: the numbers of the samples, as many as the mesh divides.
        seed: 64 bits.
    """
    block_size, count = runner.model.block_size, len(samples)
    seeds = np.tile(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), (count, 1))
    text = np.full((count, 1), eot_id, np.int32)
    for width, num_tokens in windows(block_size):
        arrays = (text[:, -width:], seeds, samples, np.full(count, text.shape[1], np.int32))
        new = runner.call(
            sample_window, params, arrays, num_tokens=num_tokens, temperature=temperature, vocab_size=vocab_size
        )
        text = np.concatenate([text, new], axis=1)
    rows = [text[:, start * block_size : (start + 1) * block_size + 1] for start in range(BLOCKS)]
    return np.stack(rows, axis=1).reshape(count * BLOCKS, block_size + 1)


def cost_of(num_rows: int, block_size: int) -> tuple[int, int]:
    """How many tokens are sampled for that many rows, and how many are read for it, sampled ones among them.

    >>> cost_of(4, 8)
    (33, 48)
    """
    samples = -(-num_rows // BLOCKS)
    parts = windows(block_size)
    return samples * sum(new for _, new in parts), samples * sum(old + new - 1 for old, new in parts)


def make_set(
    run: ResolvedRun,
    runner: Runner,
    run_dir: Path,
    params: Tree,
    made: SampledSet,
    *,
    told: Callable[[int], None],
    say: Callable[[str], None],
) -> None:
    """Sample the rows of a set into the run's folder, unless they are there; a kill loses one batch of samples.

    All processes compute; the first one writes.

    Args:
        runner: the run's model on its mesh.
        params: the weights to sample from.
        told: called with the number of rows that are there after each batch; it may raise to stop.
        say: shows a line to the user.
    """
    count = min(run.options.evaluation.batch_size, -(-made.num_rows // BLOCKS))
    count = -(-count // runner.row_multiple) * runner.row_multiple
    num_parts = -(-made.num_rows // (count * BLOCKS))
    parts = Parts(set_path(run_dir, made), _made_by(fingerprint(leaves_of(params)), count, runner.topology))
    with processes.together():
        missing = _missing(parts, made, num_parts, say) if processes.is_first() else None
    missing = processes.agreed(missing)
    if missing is None:
        return
    options, tokenizer = run.curriculum.sampled, run.tokenizer
    assert options is not None, "a plan has sets where its curriculum samples rows"
    for number in missing:
        rows = sample_rows(
            runner,
            params,
            np.arange(number * count, (number + 1) * count, dtype=np.int32),
            seed=key_of(run.options.run.seed_of("data"), SELF.name, made.step),
            temperature=options.temperature,
            vocab_size=tokenizer.vocab_size,
            eot_id=tokenizer.eot_id,
        )
        with processes.together():
            if processes.is_first():
                parts.write(number, rows, tokenizer)
        told(min((number + 1) * count * BLOCKS, made.num_rows))
    with processes.together():
        if processes.is_first():
            parts.publish(made, num_parts, run.curriculum.block_size, tokenizer)


def _made_by(weights: str, count: int, topology: Topology | None) -> Json:
    return {
        "weights": weights,
        "samples": count,
        "mesh": dict(topology.sizes) if topology else None,
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "cores": processes.visible_cores() if jax.default_backend() == "cpu" else None,
    }


def _missing(parts: Parts, made: SampledSet, num_parts: int, say: Callable[[str], None]) -> list[int] | None:
    """The parts that must be made; None where the whole set is there, sampled from the same weights."""
    if parts.path.exists():
        try:
            found = open_set(parts.path.parent.parent, made)
            if found.ledger["made_by"]["weights"] == parts.made_by["weights"]:
                return None
            reason = "they were sampled from other weights"
        except UserError:
            reason = "they are damaged"
        say(f"{parts.path.name}: the rows are sampled again: {reason}, and nothing was trained on them yet")
        remove(parts.path)
    parts.path.parent.mkdir(exist_ok=True)
    return parts.begin(num_parts)
