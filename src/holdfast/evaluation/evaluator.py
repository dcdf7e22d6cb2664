"""The evaluator: a model's answers to the questions of its tasks, and its loss on held-out rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from holdfast.data.config import DataConfig
from holdfast.data.documents import Document
from holdfast.data.rows import Rows
from holdfast.data.tokenizers import Tokenizer
from holdfast.errors import UserError
from holdfast.evaluation import choice, generate, harness
from holdfast.evaluation.config import EvaluationConfig
from holdfast.evaluation.forward import Runner
from holdfast.evaluation.harness_tasks import HarnessTask
from holdfast.evaluation.metrics import GRADED
from holdfast.evaluation.perplexity import held_out
from holdfast.evaluation.results import (
    MEASURES,
    Example,
    TaskResult,
    forgotten,
    merged,
    numbers,
    read_examples,
    task_result,
    write_examples,
)
from holdfast.evaluation.statistics import uniform_losses
from holdfast.evaluation.sums import TaskSums
from holdfast.evaluation.tasks import Task, find_task, subset
from holdfast.execution.topology import Topology
from holdfast.models.family import Model
from holdfast.types import JsonView, Tree

M = TypeVar("M")

__all__ = ["Evaluator", "Example", "TaskResult", "forgotten", "read_examples", "write_examples"]


class Evaluator(Generic[M]):
    """Evaluates parameters of one model; examples are read and functions compiled once, when first needed.

    Args:
        model: the choice of model.
        tasks: evaluations, by name or as they are.
        rows: held-out rows of datasets, by name.
        max_rows: rows measured of each dataset, the first ones; None is all.
        topology: where the parameters are; None is one device.
        data: where the tasks' examples come from.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        config: EvaluationConfig,
        *,
        tasks: Sequence[str | Task | HarnessTask] = (),
        rows: Mapping[str, Rows] | None = None,
        max_rows: int | None = None,
        topology: Topology | None = None,
        data: DataConfig | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.data = data or DataConfig()
        found = (find_task(task, self.data, evaluation=config) if isinstance(task, str) else task for task in tasks)
        self.tasks = {task.name: task for task in found}
        self.rows = dict(rows or {})
        self.max_rows = max_rows
        self.runner: Runner = Runner(model, topology)
        self._examples: dict[str, list[Document]] = {}
        self._questions: dict[tuple[str, int | None], list[choice.Question]] = {}

    def evaluate(
        self,
        params: Tree,
        reference: Tree = None,
        *,
        tasks: Sequence[str] | None = None,
        datasets: Sequence[str] | None = None,
    ) -> dict[str, TaskResult]:
        """Every task and dataset, or those named; a name that is both has one result.

        Args:
            reference: parameters that divergences are measured against, if any.
        """
        return self._results(params, reference, tasks, datasets, self.config.limit, self.max_rows)

    def probe(
        self,
        params: Tree,
        reference: Tree = None,
        *,
        tasks: Sequence[str] | None = None,
        datasets: Sequence[str] | None = None,
    ) -> dict[str, TaskResult]:
        """As `evaluate`, on few examples and rows: always the same `eval/probe_rows` of each."""
        few = self.config.probe_rows
        return self._results(params, reference, tasks, datasets, few, few)

    def _results(
        self,
        params: Tree,
        reference: Tree,
        tasks: Sequence[str] | None,
        datasets: Sequence[str] | None,
        num_examples: int | None,
        num_rows: int | None,
    ) -> dict[str, TaskResult]:
        results: dict[str, TaskResult] = {}
        for name in self.tasks if tasks is None else _known(tasks, self.tasks, "evaluation"):
            results[name] = self._answered(params, self.tasks[name], num_examples)
        for name in self.rows if datasets is None else _known(datasets, self.rows, "dataset"):
            measured = self._measure(params, reference, name, num_rows)
            results[name] = merged(results[name], measured) if name in results else measured
        return results

    def examples(self, name: str, limit: int | None = None) -> list[Document]:
        """The questions of a task; with a limit, the first of its seeded order. The harness reads those of its own."""
        task = self.tasks[name]
        if isinstance(task, HarnessTask):
            return []
        if name not in self._examples:
            self._examples[name] = task.examples(self.data, self.config.limit, self.config.seed)
        return subset(self._examples[name], limit, self.config.seed)

    def _answered(self, params: Tree, task: Task | HarnessTask, limit: int | None) -> TaskResult:
        if isinstance(task, Task):
            return self._ask(params, task, limit)
        model = harness.HarnessModel(self.runner, params, self.tokenizer, self.config.batch_size)
        return harness.evaluate_task(model, task, limit)

    def _ask(self, params: Tree, task: Task, limit: int | None) -> TaskResult:
        documents = self.examples(task.name, limit)
        kind = self.config.kind or task.kind
        if kind == "choice" and not all(len(each.choices) > 1 for each in documents):
            kind = "generate"  # nothing to choose from
        answer: Callable[[], list[Example]] = {
            "choice": lambda: self._choose(params, task.name, documents, limit),
            "generate": lambda: self._generate(params, task, documents),
        }[kind]
        examples = answer()
        if task.scored:
            examples = [_with_score(each, task.metric if kind == "generate" else None) for each in examples]
        return task_result(task.name, kind, examples, judged=kind == "choice" or not task.graded)

    def _choose(self, params: Tree, name: str, documents: Sequence[Document], limit: int | None) -> list[Example]:
        key = (name, limit)
        if key not in self._questions:
            self._questions[key] = choice.questions(
                documents, self.tokenizer, self.model.block_size, self.config.end_of_text
            )
        scored = choice.score(self.runner, params, self._questions[key], self.config.batch_size)
        return [self._chosen(each, scores) for each, scores in zip(documents, scored, strict=True)]

    def _chosen(self, document: Document, scored: choice.Scores) -> Example:
        sizes = [max(len(text.encode()), 1) for text in document.choices]
        lengths = [choice.harness_length(text) for text in document.choices]
        label = document.choices.index(document.answer) if document.label is None else document.label
        example = Example(
            id=document.id,
            prompt=document.prompt,
            answer=document.choices[label],
            chosen=None,
            right=False,
            group=document.group,
            choices=document.choices,
            label=label,
            scores=numbers(scored.log_likelihood),
            per_byte=numbers(scored.log_likelihood / sizes),
            normalised=numbers(scored.log_likelihood / lengths),
        )
        index = example.choose(example.scores if self.config.normalise == "raw" else example.normalised)
        if index is None:
            return example
        return Example(**{**example.__dict__, "chosen": document.choices[index], "right": index == label})

    def _generate(self, params: Tree, task: Task, documents: Sequence[Document]) -> list[Example]:
        said = generate.answers(self.runner, params, self.tokenizer, documents, self.config, task.metric)
        return [
            Example(
                id=document.id,
                prompt=document.prompt,
                answer=document.answer,
                chosen=text,
                right=generate.is_right(text, document.answer, task.metric),
                measures={task.metric: GRADED[task.metric](document, text)} if task.graded else {},
                group=document.group,
                choices=document.choices,
                label=document.label,
            )
            for document, text in zip(documents, said, strict=True)
        ]

    def _measure(self, params: Tree, reference: Tree, name: str, limit: int | None) -> TaskResult:
        found = held_out(
            self.runner,
            params,
            self.rows[name],
            limit=limit,
            batch_size=self.config.batch_size,
            reference=reference,
        )
        num_tokens, num_bytes = int(found.tokens.sum()), int(found.num_bytes.sum())
        return TaskResult(
            name,
            measures={**dict.fromkeys(MEASURES), **found.measures()},
            intervals=found.intervals(),
            num_rows=len(found.nll),
            num_tokens=num_tokens,
            sums=TaskSums(rows=found),
            uniform=uniform_losses(self.tokenizer.vocab_size, num_tokens, num_bytes),
        )


def _with_score(example: Example, metric: str | None) -> Example:
    """An example with what a suite averages: its graded score, or whether it is right."""
    graded = example.measures.get(metric) if metric is not None else None
    score = float(example.right) if graded is None else graded
    return replace(example, measures={**example.measures, "score": score})


def _known(names: Sequence[str], known: JsonView, kind: str) -> Sequence[str]:
    for name in names:
        if name not in known:
            raise UserError(f"there is no {kind} {name!r} in this run; known: {', '.join(known) or 'none'}")
    return names
