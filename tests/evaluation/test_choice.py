"""Log-likelihoods of answers against scoring one (prompt, answer) at a time."""

import numpy as np
import pytest

from evaluation.conftest import TOKENIZER, Tiny
from holdfast.data.documents import Document
from holdfast.evaluation import choice
from holdfast.evaluation.choice import Question
from holdfast.evaluation.forward import Runner


def document(prompt: str, *choices: str) -> Document:
    return Document(prompt, prompt=prompt, choices=choices, label=0)


DOCUMENTS = [
    document("is it so? ", "yes", "no"),
    document("which one, then, of the three that were shown to us? ", "the first", "the second", "the third"),
    document("1+1=", "2", "12", "21", "1"),
    document("a ", "b", "b"),
    document("x", "y" * 30, "z"),
    document("", "empty prompt", "empty"),
    document("p" * 100, "long prompts lose their left end", "x"),
]


def naive(tiny: Tiny, prompt: list[int], answer: list[int]) -> tuple[float, bool]:
    """Log-likelihood of one answer, from a row of its own."""
    keep = tiny.spec.block_size + 1 - len(answer)
    prompt = (prompt or [TOKENIZER.eot_id])[-keep:]
    log_p = tiny.log_p((prompt + answer)[:-1])[len(prompt) - 1 :]
    return log_p[np.arange(len(answer)), answer].sum(), list(log_p.argmax(1)) == answer


@pytest.mark.parametrize("end_of_text", ["auto", "always", "never"])
@pytest.mark.parametrize("kind", ["tiny", pytest.param("rotary", marks=pytest.mark.slow)])
def test_scores_equal_those_of_one_answer_at_a_time(
    kind: str, end_of_text: str, request: pytest.FixtureRequest
) -> None:
    model: Tiny = request.getfixturevalue(kind)
    asked = choice.questions(DOCUMENTS, TOKENIZER, model.spec.block_size, end_of_text)
    found = choice.score(model.runner, model.params, asked, 3)
    for each, scores in zip(DOCUMENTS, found, strict=True):
        answers = [TOKENIZER.encode(text) for text in each.choices]
        ended = end_of_text == "always" or (end_of_text == "auto" and each.prompt in ("1+1=", ""))
        answers = [[*answer, TOKENIZER.eot_id] if ended else answer for answer in answers]
        longest = max(answers, key=len)
        prompt = TOKENIZER.encode(each.prompt)
        prompt = prompt[-(model.spec.block_size + 1 - len(longest)) :]  # one prompt for all answers
        wanted = [naive(model, prompt, answer) for answer in answers]
        np.testing.assert_allclose(scores.log_likelihood, [total for total, _ in wanted], rtol=1e-5, atol=1e-5)
        assert scores.greedy.tolist() == [greedy for _, greedy in wanted]


def test_greedy_is_true_for_what_the_model_would_say(tiny: Tiny) -> None:
    tokens = [70, 71, 72]
    for _ in range(6):
        tokens.append(int(tiny.logits(tokens)[-1].argmax()))
    said, other = tokens[3:], [*tokens[3:-1], 1]
    asked = [choice.question(tokens[:3], [said, other], tiny.spec.block_size, 0)]
    assert asked[0].shared == 5
    assert choice.score(tiny.runner, tiny.params, asked, 1)[0].greedy.tolist() == [True, False]


def test_an_answer_that_begins_another_is_ended() -> None:
    plain, numbers = choice.questions([DOCUMENTS[0], DOCUMENTS[2]], TOKENIZER, 64)
    assert plain.choices == [TOKENIZER.encode("yes"), TOKENIZER.encode("no")]
    assert all(answer[-1] == TOKENIZER.eot_id for answer in numbers.choices)


def test_batches_hold_every_question_once_in_few_shapes() -> None:
    rng = np.random.default_rng(0)
    asked = [Question([1] * int(n), [[2] * int(n % 5 + 1)]) for n in rng.integers(1, 200, 300)]
    made = list(choice.batches(asked, 256, lambda width, _: max(1, 1024 // width)))
    assert sorted(index for _, part in made for index in part) == list(range(300))
    assert len({shape for shape, _ in made}) <= 10
    for shape, part in made:
        assert len(part) <= shape.rows
        assert all(len(asked[index].prompt) <= shape.prompt for index in part)
        assert all(len(answer) <= shape.own for index in part for answer in asked[index].choices)


def test_compiled_functions_are_shared_between_evaluations(tiny: Tiny) -> None:
    runner = Runner(tiny.model)
    asked = choice.questions(DOCUMENTS[:2], TOKENIZER, tiny.spec.block_size)
    first = choice.score(runner, tiny.params, asked, 4)
    [compiled] = runner._compiled.values()
    count = compiled._cache_size()  # type: ignore[attr-defined]
    second = choice.score(runner, tiny.other, asked, 4)
    assert compiled._cache_size() == count  # type: ignore[attr-defined]
    assert not np.allclose(first[0].log_likelihood, second[0].log_likelihood)
