"""Scores of an answer that is right by degrees: ROUGE-L, similarity, SARI, each from 0 to 1, by their formulas.

What differs from the programs that papers used is said at each. Nothing here imports JAX.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence

from holdfast.data.documents import Document

_WORD = re.compile(r"\w+")
_LITERAL = re.compile(r"<(?:STR|NUM|CHAR)_LIT:(.*?)>", re.DOTALL)
_EMPTY_LITERALS = {"<NUM_LIT>": "0", "<STR_LIT>": "", "<CHAR_LIT>": ""}
# How mteval-v13a sets marks apart from words: symbols always, dots and commas unless within a number.
_MARKS = re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])")
_BEFORE_MARK, _AFTER_MARK = re.compile(r"([^0-9])([\.,])"), re.compile(r"([\.,])([^0-9])")
_DASH = re.compile(r"([0-9])(-)")
LONGEST_GRAM = 4


def rouge_l(said: str, wanted: str) -> float:
    """F1 of the longest common subsequence of words (Lin, 2004), without case.

    As `rouge_score` without stemming on ASCII texts; the `rouge` package, which TRACE used, takes unions of
    subsequences of sentences and counts equal words once.

    >>> rouge_l("the cat sat", "The cat was sat.")
    0.8571428571428571
    """
    first, second = _WORD.findall(said.lower()), _WORD.findall(wanted.lower())
    if not first or not second:
        return 0.0
    common = _common(first, second)
    return 2 * common / (len(first) + len(second))


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for index, other in enumerate(second, 1):
            diagonal, row[index] = row[index], diagonal + 1 if word == other else max(row[index], row[index - 1])
    return row[-1]


def similarity(said: str, wanted: str) -> float:
    """The share of matching characters of two lines of code, as `fuzzywuzzy.fuzz.ratio` rounds it; TRACE's for Py150.

    Literals that stand for a value (`<STR_LIT:a>`) are replaced by it first, as there.

    >>> similarity("x = <NUM_LIT:1>", "x = 1"), similarity("", "x")
    (1.0, 0.0)
    """
    first, second = _with_literals(said), _with_literals(wanted)
    if not first or not second:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, first, second).ratio()) / 100


def _with_literals(code: str) -> str:
    for name, value in _EMPTY_LITERALS.items():
        code = code.replace(name, value)
    return _LITERAL.sub(lambda match: match[1], code)


def sari(source: str, said: str, wanted: str) -> float:
    """SARI (Xu et al., 2016) of a simplification against one reference: how well words are kept, deleted and added.

    The mean over n-grams of one to four words, F1 of keeping and adding and precision of deleting, with 0 / 0 = 1,
    lower case and the tokens of mteval-v13a: as the `sari` metric of Hugging Face, divided by 100.

    >>> sari("a b", "a b", "a b")
    1.0
    """
    texts = [tokens_13a(text.lower()) for text in (source, said, wanted)]
    total = 0.0
    for size in range(1, LONGEST_GRAM + 1):
        total += sum(_operations(*(Counter(_grams(tokens, size)) for tokens in texts)))
    return total / (3 * LONGEST_GRAM)


def _grams(tokens: Sequence[str], size: int) -> list[str]:
    return [" ".join(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]


def _operations(source: Counter[str], said: Counter[str], wanted: Counter[str]) -> tuple[float, float, float]:
    """How well n-grams were kept, deleted and added."""
    kept, keepable = source & said, source & wanted
    good = kept & wanted
    precision = _ratio(sum(good[gram] / kept[gram] for gram in good), len(kept))
    keep = _f1(precision, _ratio(sum(good.values()), sum(keepable.values())))
    deleted = source - said
    gone = deleted - wanted
    delete = _ratio(sum(gone[gram] / deleted[gram] for gram in gone), len(deleted))
    added, addable = set(said) - set(source), set(wanted) - set(source)
    found = len(added & set(wanted))
    return keep, delete, _f1(_ratio(found, len(added)), _ratio(found, len(addable)))


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 1.0


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision or recall else 0.0


def tokens_13a(text: str) -> list[str]:
    """A text as the machine-translation evaluation of 2009 (mteval-v13a) cuts it.

    >>> tokens_13a("It's 3.5, or so.")
    ["It's", '3.5', ',', 'or', 'so', '.']
    """
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for name, mark in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        text = text.replace(name, mark)
    text = _MARKS.sub(r" \1 ", f" {text} ")
    text = _AFTER_MARK.sub(r" \1 \2", _BEFORE_MARK.sub(r"\1 \2 ", text))
    return _DASH.sub(r"\1 \2 ", text).split()


def first_letter(text: str) -> str:
    """The letter that a lettered choice begins with, `Answer:` before it or not.

    >>> first_letter("Answer: B\\nBecause"), first_letter(" c."), first_letter("...")
    ('B', 'C', '')
    """
    return next((each.upper() for each in text.strip().removeprefix("Answer:") if each.isalnum()), "")


# By the name of the measure: the score of what was said after a document's prompt.
GRADED: dict[str, Callable[[Document, str], float]] = {
    "rouge_l": lambda document, said: rouge_l(said, document.answer),
    "similarity": lambda document, said: similarity(said.strip(), document.answer.strip()),
    "sari": lambda document, said: sari(document.prompt, said, document.answer),
}
