"""Speed of evaluation beside the plain way: choice scoring and generation, on the same model.

    python benchmarks/evaluation.py [--examples 100] [--width 128] [--layers 4]

Choice: `evaluation.choice` against one (prompt, answer) at a time, each a row of its own. Generation: the key/value
cache against reading the whole row again for each token. Real questions and the GPT-2 tokenizer where
`HOLDFAST_DATA` and `HOLDFAST_GPT2` name them, otherwise generated questions and bytes.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from holdfast.data.config import DataConfig, TokenizerConfig
from holdfast.data.documents import Document
from holdfast.data.tokenizers import Tokenizer, load_tokenizer, model_vocab_size
from holdfast.evaluation import choice
from holdfast.evaluation.decoding import generate_tokens
from holdfast.evaluation.forward import Runner, bucket
from holdfast.evaluation.tasks import find_task
from holdfast.models.config import ModelSpec
from holdfast.models.decoder import Decoder
from holdfast.models.family import decoder

BLOCK = 512
NEW_TOKENS = 256


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """The best of three runs after one that compiles, in seconds, and the result."""
    result = run()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def one_at_a_time(model: Decoder, params: Any, tokenizer: Tokenizer) -> Callable[[Document], list[float]]:
    """Scores each answer of a question from a row of its own, as long as a power of two."""

    @jax.jit
    def log_likelihood(params: Any, x: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(model.apply({"params": params}, x))
        return (jnp.take_along_axis(log_p, y[..., None], axis=-1)[..., 0] * mask).sum()

    def score(document: Document) -> list[float]:
        prompt = tokenizer.encode(document.prompt)
        scores = []
        for text in document.choices:
            answer = tokenizer.encode(text)
            tokens = (prompt + answer)[-(BLOCK + 1) :]
            size = len(tokens) - 1
            width = bucket(size, BLOCK)
            x, y, mask = (np.zeros((1, width), np.int32) for _ in range(3))
            x[0, :size], y[0, :size] = tokens[:-1], tokens[1:]
            mask[0, size - len(answer) : size] = 1
            scores.append(float(log_likelihood(params, x, y, mask)))
        return scores

    return score


def compare_choice(model: Decoder, params: Any, tokenizer: Tokenizer, name: str, count: int) -> None:
    documents = find_task(name, DataConfig()).examples(DataConfig(), count)
    runner = Runner(decoder(model.spec))

    def ours() -> list[choice.Scores]:
        return choice.score(runner, params, choice.questions(documents, tokenizer, BLOCK, "never"), 32)

    seconds, scores = timed(ours)
    plain = one_at_a_time(model, params, tokenizer)
    slow, wanted = timed(lambda: [plain(document) for document in documents])
    gap = max(np.abs(a.log_likelihood - b).max() for a, b in zip(scores, wanted, strict=True))
    print(
        f"{name:12}{len(documents):6} questions: ours {seconds:.3f} s, one at a time {slow:.3f} s = "
        f"{slow / seconds:.1f} x, largest difference {gap:.1e}",
        flush=True,
    )


def compare_generation(model: Decoder, params: Any, tokenizer: Tokenizer) -> None:
    runner = Runner(decoder(model.spec))
    prompt = tokenizer.encode("Once upon a time")

    @jax.jit
    def next_token(params: Any, x: jax.Array, last: jax.Array) -> jax.Array:
        return model.apply({"params": params}, x)[0, last, : tokenizer.vocab_size].argmax()

    def again() -> list[int]:
        row = np.zeros((1, BLOCK), np.int32)
        row[0, : len(prompt)] = prompt
        for position in range(len(prompt), len(prompt) + NEW_TOKENS):
            row[0, position] = next_token(params, row, position - 1)
        return row[0, len(prompt) : len(prompt) + NEW_TOKENS].tolist()

    def cached() -> list[int]:
        return generate_tokens(runner, params, tokenizer, [prompt], max_new_tokens=NEW_TOKENS)[0]

    seconds, tokens = timed(cached)
    slow, wanted = timed(again)
    same = tokens == wanted[: len(tokens)]
    print(f"{NEW_TOKENS} tokens: cache {seconds:.3f} s, without {slow:.3f} s = {slow / seconds:.1f} x, same: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    tokenizer = load_tokenizer(TokenizerConfig(name=os.environ.get("HOLDFAST_GPT2", "bytes")))
    heads = max(options.width // 64, 1)
    spec = ModelSpec(
        options.layers, options.width, heads, heads, options.width // heads, 4 * options.width,
        vocab_size=model_vocab_size(tokenizer), block_size=BLOCK,
    )  # fmt: skip
    model = Decoder(spec)
    params = nn.unbox(model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32)))["params"]
    real = "HOLDFAST_DATA" in os.environ
    for name in ("mnli", "qqp", "sst2", "siqa") if real else ("arithmetic", "lists"):
        compare_choice(model, params, tokenizer, name, options.examples)
    compare_generation(model, params, tokenizer)


if __name__ == "__main__":
    main()
