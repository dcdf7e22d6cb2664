"""Evaluations of a model, and the score matrix made from them.

What needs no JAX is imported at once; the evaluator and its functions when first asked for, so that a config can be
checked without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.evaluation.config import EvaluationConfig
from holdfast.evaluation.matrix import Point, ScoreMatrix
from holdfast.evaluation.results import Example, TaskResult, forgotten, read_examples, write_examples

if TYPE_CHECKING:
    from holdfast.evaluation.decoding import Sampler, generate_tokens, stream
    from holdfast.evaluation.evaluator import Evaluator
    from holdfast.evaluation.perplexity import held_out
    from holdfast.evaluation.scoring import Sums, batch_sums, row_sums
    from holdfast.evaluation.tasks import Task, find_task

__all__ = [
    "EvaluationConfig",
    "Evaluator",
    "Example",
    "Point",
    "Sampler",
    "ScoreMatrix",
    "Sums",
    "Task",
    "TaskResult",
    "batch_sums",
    "find_task",
    "forgotten",
    "generate_tokens",
    "held_out",
    "read_examples",
    "row_sums",
    "stream",
    "write_examples",
]

_MODULES = {
    "Evaluator": "evaluator",
    "Sampler": "decoding",
    "Sums": "scoring",
    "Task": "tasks",
    "batch_sums": "scoring",
    "find_task": "tasks",
    "generate_tokens": "decoding",
    "held_out": "perplexity",
    "row_sums": "scoring",
    "stream": "decoding",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"holdfast.evaluation.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
