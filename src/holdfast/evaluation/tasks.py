"""Evaluations by name: which examples are asked and how; the user's own come from `data/sources`."""

from dataclasses import dataclass
from typing import Optional

from holdfast.data.config import DataConfig
from holdfast.data.documents import Document, SourceContext, digest, read
from holdfast.data.sources.suites import CLASSIFIED, EXACT, SCORED, task_file_source
from holdfast.errors import ConfigError, UserError
from holdfast.evaluation.config import EvaluationConfig
from holdfast.evaluation.harness_tasks import HarnessTask, harness_task, is_harness
from holdfast.evaluation.metrics import GRADED
from holdfast.registry import evaluations


@dataclass(frozen=True)
class Task:
    """An evaluation: the held-out examples of a dataset, and whether answers are chosen or generated.

    Args:
        name: of the evaluation; the dataset has the same name unless `dataset` is given.
        kind: `choice` or `generate`; `eval/kind` overrides it.
        metric: how a generated answer is scored: `exact_match`, `letter` (by its first letter), or a name of
            `metrics.GRADED`, for which there is no right or wrong.
        scored: whether its figure also stands under `score`, where a suite averages tasks with different metrics.
    """

    name: str
    kind: str = "choice"
    dataset: Optional[str] = None
    split: str = "validation"
    metric: str = EXACT
    scored: bool = False

    @property
    def graded(self) -> bool:
        """Whether answers are scored by degrees."""
        return self.metric in GRADED

    def examples(self, data: DataConfig, limit: int | None = None, seed: int = 0) -> list[Document]:
        """The examples, in the dataset's order; with a limit, a subset that depends on the seed and ids alone."""
        from holdfast.data.sources import find_source

        source = find_source(self.dataset or self.name, data)
        if source.kind != "task":
            raise UserError(
                f"eval/evaluations: {self.name} is plain text without questions and answers; its held-out loss is "
                "measured when it is a dataset of the run"
            )
        examples = list(read(source, self.split, SourceContext(data)))
        if not examples:
            raise UserError(f"eval/evaluations: {self.name} has no {self.split} examples")
        return subset(examples, limit, seed)


def subset(examples: list[Document], limit: int | None, seed: int) -> list[Document]:
    """The examples whose hashed ids come first, so that a larger limit adds examples and drops none.

    >>> documents = [Document(str(i)) for i in range(9)]
    >>> small, large = subset(documents, 3, 0), subset(documents, 5, 0)
    >>> set(small) < set(large) and large == sorted(large)
    True
    """
    if limit is None or limit >= len(examples):
        return examples
    ranked = sorted(range(len(examples)), key=lambda index: (digest(f"{seed}/{examples[index].id}"), index))
    return [examples[index] for index in sorted(ranked[:limit])]


def find_task(
    name: str,
    data: DataConfig,
    *,
    evaluation: EvaluationConfig | None = None,
    path: str = "eval/evaluations",
) -> Task | HarnessTask:
    """The evaluation of that name: registered, one of the user's own `data/sources` that has answers, or the harness's.

    Args:
        evaluation: options of evaluations, among them where tasks of the harness are.
        path: where the configuration names it.
    """
    if is_harness(name):
        return harness_task(name, evaluation or EvaluationConfig(), path)
    if name in data.sources:
        source = data.sources[name]
        if source.prompt is None:
            raise ConfigError(
                path, name, "a task", f"data/sources/{name} has no prompt and answer: it is text or chats"
            )
        return Task(name, kind="choice" if source.choices or source.labels else "generate")
    if name not in evaluations and task_file_source(name) is not None:
        return Task(name, "generate", metric="rouge_l", scored=True)
    task: Task = evaluations.get(name, path=path)
    return task


evaluations.register("arithmetic", help="choice of 4: sums and differences, generated")(Task("arithmetic"))
evaluations.register("lists", help="choice of 4: operations on short lists, generated")(Task("lists"))
evaluations.register("mnli", help="choice of 3: does a premise entail a hypothesis")(Task("mnli"))
evaluations.register("qqp", help="choice of 2: do two questions ask the same")(Task("qqp"))
evaluations.register("siqa", help="choice of 3: everyday social situations")(Task("siqa"))
evaluations.register("sst2", help="choice of 2: is a sentence positive or negative")(Task("sst2"))
evaluations.register("topics", help="choice of 4: what three words are about, generated")(Task("topics"))
for dataset in CLASSIFIED.values():
    evaluations.register(dataset, help="choice of the topic or sentiment of a text")(Task(dataset, scored=True))
for dataset, metric in SCORED.items():
    evaluations.register(dataset, help=f"generated answers of TRACE, by {metric.replace('_', ' ')}")(
        Task(dataset, "generate", metric=metric, scored=True)
    )
