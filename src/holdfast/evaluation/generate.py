"""Generate: the model answers in its own words, and is right when they are the answer's after normalising."""

from collections.abc import Sequence

from holdfast.data.documents import Document, normalise
from holdfast.data.tokenizers import Tokenizer
from holdfast.evaluation import decoding
from holdfast.evaluation.config import EvaluationConfig
from holdfast.evaluation.forward import Runner
from holdfast.types import Tree

AROUND = " .,;:!?'\"`"  # not signs and brackets, which may be part of an answer


def answers(
    runner: Runner, params: Tree, tokenizer: Tokenizer, documents: Sequence[Document], config: EvaluationConfig
) -> list[str]:
    """The text that the model says after each document's prompt.

    No more tokens are made than the longest right answer has with its end: what is longer cannot be right.
    """
    longest = max(map(len, tokenizer.encode_batch([document.answer for document in documents])))
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
