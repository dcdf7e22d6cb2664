"""Tokens from the cache against reading everything again, and the filters of sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evaluation.conftest import TOKENIZER, Tiny
from holdfast.evaluation.decoding import Sampler, generate_tokens, stream
from holdfast.evaluation.generate import exact_match

PROMPTS = [[10], [20, 21, 22, 23], list(range(40)), [], list(range(100))]
NEW = 12


def without_cache(tiny: Tiny, prompt: list[int], count: int) -> list[int]:
    tokens = (prompt or [TOKENIZER.eot_id])[-(tiny.spec.block_size + 1 - count) :]
    said: list[int] = []
    while len(said) < count:
        said.append(int(tiny.logits(tokens + said)[-1, : TOKENIZER.vocab_size].argmax()))
        if said[-1] == TOKENIZER.eot_id:
            return said[:-1]
    return said


@pytest.mark.parametrize("kind", ["tiny", "rotary"])
def test_the_cache_changes_no_token(kind: str, request: pytest.FixtureRequest) -> None:
    model: Tiny = request.getfixturevalue(kind)
    runner = model.runner
    found = generate_tokens(runner, model.params, TOKENIZER, PROMPTS, max_new_tokens=NEW, batch_size=2)
    assert found == [without_cache(model, prompt, NEW) for prompt in PROMPTS]


def test_sampling_depends_on_seed_and_row_alone(tiny: Tiny) -> None:
    runner = tiny.runner
    prompts = [[10, 11], [10, 11], [30] * 9]

    def run(seed: int, batch_size: int) -> list[list[int]]:
        return generate_tokens(
            runner, tiny.params, TOKENIZER, prompts, max_new_tokens=8, sampler=Sampler(1.0), seed=seed,
            batch_size=batch_size,
        )  # fmt: skip

    first = run(0, 3)
    assert first == run(0, 2)
    assert first != run(1, 3)
    assert first[0] != first[1]


def test_filters_keep_the_likeliest() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.25, 0.05]]))

    def kept(sampler: Sampler) -> list[list[bool]]:
        return np.isfinite(sampler.filtered(logits)).tolist()

    assert kept(Sampler(1.0, top_k=1)) == [[True, False, False, False], [False, True, False, False]]
    assert kept(Sampler(1.0, top_p=0.5)) == [[True, False, False, False], [False, True, False, False]]
    assert kept(Sampler(1.0, top_p=0.8)) == [[True, True, True, False], [False, True, True, False]]
    assert kept(Sampler(1.0, top_p=1e-9)) == kept(Sampler(1.0, top_k=1))
    np.testing.assert_allclose(Sampler(2.0).filtered(logits), logits / 2)


def test_samples_follow_the_probabilities() -> None:
    keys = jax.random.split(jax.random.key(0), 4000)
    logits = jnp.tile(jnp.log(jnp.array([[0.7, 0.2, 0.1]])), (4000, 1))
    shares = np.bincount(Sampler(1.0).pick(logits, keys), minlength=3) / 4000
    np.testing.assert_allclose(shares, [0.7, 0.2, 0.1], atol=0.03)


def test_a_stream_says_the_same_and_goes_on_beyond_the_block(tiny: Tiny) -> None:
    runner = tiny.runner
    [tokens] = generate_tokens(runner, tiny.params, TOKENIZER, [TOKENIZER.encode("say")], max_new_tokens=NEW)
    pieces = list(stream(runner, tiny.params, TOKENIZER, "say", max_new_tokens=NEW))
    assert "".join(pieces) == TOKENIZER.decode(tokens)
    sampled = Sampler(2.0, top_k=200)
    long = "".join(stream(runner, tiny.params, TOKENIZER, "é" * 60, max_new_tokens=100, sampler=sampled, seed=5))
    again = "".join(stream(runner, tiny.params, TOKENIZER, "é" * 60, max_new_tokens=100, sampler=sampled, seed=5))
    assert long == again
    assert len(long) > 0


def test_a_character_is_shown_when_it_is_complete(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a€b" + "ü" * 7
    ids = [*TOKENIZER.encode(text), TOKENIZER.eot_id, 65]

    def two_at_a_time(*_args: object, **_kwargs: object) -> object:
        return (np.array([ids[start : start + 2]]) for start in range(0, len(ids), 2))

    monkeypatch.setattr("holdfast.evaluation.decoding.chunks", two_at_a_time)
    pieces = list(stream(tiny.runner, None, TOKENIZER, "x", max_new_tokens=50))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_exact_match_ignores_case_space_and_punctuation_around() -> None:
    assert exact_match(" Yes!\n", "yes")
    assert not exact_match("-5", "5")
    assert not exact_match("", "yes")
