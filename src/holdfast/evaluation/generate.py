"""Generate: the model answers in its own words, and is right when they are the answer's after normalising."""

from collections.abc import Sequence

from holdfast.data.documents import Document, normalise
from holdfast.data.sources.suites import EXACT, LETTER
from holdfast.data.tokenizers import Tokenizer
from holdfast.evaluation import decoding
from holdfast.evaluation.config import EvaluationConfig
from holdfast.evaluation.forward import Runner
from holdfast.evaluation.metrics import first_letter
from holdfast.types import Tree

LETTER_TOKENS = 16  # within which the letter of a choice stands, `Answer:` before it or not
AROUND = " .,;:!?'\"`"  # not signs and brackets, which may be part of an answer


def answers(
    runner: Runner,
    params: Tree,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    config: EvaluationConfig,
    metric: str = EXACT,
) -> list[str]:
    """The text that the model says after each document's prompt.

    No more tokens are made than the longest right answer has with its end: what is longer cannot be right. Where
    answers are scored by degrees it can; where the first letter tells, a few tokens are enough.
    """
    if metric in (EXACT, LETTER):
        longest = max(map(len, tokenizer.encode_batch([document.answer for document in documents])))
        longest = longest if metric == EXACT else min(longest, LETTER_TOKENS)
    else:
        longest = config.max_new_tokens
    made = decoding.generate_tokens(
        runner,
        params,
        tokenizer,
        tokenizer.encode_batch([document.prompt for document in documents]),
        max_new_tokens=min(config.max_new_tokens, longest + 1),
        sampler=decoding.Sampler(config.temperature, config.top_k, config.top_p),
        seed=config.seed,
        batch_size=config.batch_size,
    )
    return [tokenizer.decode(ids) for ids in made]


def is_right(said: str, answer: str, metric: str = EXACT) -> bool:
    """Whether an answer is the right one: in its first letter where that is the choice, else as a whole."""
    if metric == LETTER:
        return bool(said.strip()) and first_letter(said) == first_letter(answer)
    return exact_match(said, answer)


def exact_match(said: str, answer: str) -> bool:
    """Whether two answers are the same but for case, white space and punctuation at their ends.

    >>> exact_match(" Positive.", "positive"), exact_match("1 2", "12")
    (True, False)
    """
    return _bare(said) == _bare(answer)


def _bare(text: str) -> str:
    """A normalised text without punctuation around it; one of nothing else stays as it is."""
    plain = normalise(text)
    return plain.strip(AROUND) or plain
