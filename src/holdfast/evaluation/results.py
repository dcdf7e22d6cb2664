"""What an evaluation found: figures of each task, and each example by itself, so that forgetting can be traced."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

from holdfast.errors import UserError
from holdfast.evaluation import statistics
from holdfast.evaluation.matrix import finite
from holdfast.evaluation.sums import Answers, TaskSums
from holdfast.execution.files import read_regular, write_atomically
from holdfast.types import Json

FOLDER = "evaluations"
MEASURES = ("accuracy", "nll", "bits_per_byte", "kl_forward", "kl_reverse")


@dataclass(frozen=True)
class Example:
    """One question and how it was answered.

    Args:
        scores: log-likelihood of each choice; empty where the answer was generated.
        per_byte: the same divided by each choice's bytes.
        normalised: the same divided by the characters of each choice, as lm-evaluation-harness does for `acc_norm`.
        chosen: the text that was chosen or generated; None where no score was a number.
        label: index of the right choice, where there are choices.
        measures: further scores of the answer, such as `accuracy_norm` or `rouge_l`.
    """

    id: str
    prompt: str
    answer: str
    chosen: Optional[str]
    right: bool
    group: str = ""
    choices: tuple[str, ...] = ()
    label: Optional[int] = None
    scores: tuple[Optional[float], ...] = ()
    per_byte: tuple[Optional[float], ...] = ()
    normalised: tuple[Optional[float], ...] = ()
    measures: Mapping[str, float] = field(default_factory=dict)

    def choose(self, scores: Sequence[Optional[float]]) -> Optional[int]:
        """The index of the largest score; the first of equals."""
        known = [(score, -index) for index, score in enumerate(scores) if score is not None]
        return -max(known)[1] if known else None

    @property
    def margin(self) -> float:
        """By how much the right answer is likelier than the best of the others, in nats; 0 where that is not known.

        >>> Example("1", "", "a", "a", True, choices=("a", "b"), label=0, scores=(-1.0, -3.0)).margin
        2.0
        """
        right = self.scores[self.label] if self.label is not None and self.label < len(self.scores) else None
        others = [score for index, score in enumerate(self.scores) if index != self.label and score is not None]
        return right - max(others) if right is not None and others else 0.0


@dataclass(frozen=True)
class TaskResult:
    """The figures of one task; a measure that was not taken is None.

    Args:
        measures: accuracy, nll, bits_per_byte, kl_forward, kl_reverse.
        intervals: low and high end, of the measures that have them.
        chance: accuracy of guessing.
        majority: accuracy of always giving the most frequent answer.
        per_class: how often each answer was given; by place where the choices differ between questions.
        examples: every question.
        sums: what the measures and their intervals are made of.
        uniform: the losses of a model that knows nothing, for which all tokens are equally likely.
        failed: why there are no figures, where the task could not be evaluated.
        reported: what another program said of the task, under its own names.
    """

    name: str
    measures: Mapping[str, Optional[float]]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    kind: str = "held_out"
    chance: Optional[float] = None
    majority: Optional[float] = None
    per_class: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    num_rows: int = 0
    num_tokens: int = 0
    sums: TaskSums = field(default_factory=TaskSums)
    uniform: Mapping[str, float] = field(default_factory=dict)
    failed: Optional[str] = None
    reported: Mapping[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> Optional[float]:
        """The share of right answers, where there are questions."""
        return self.measures.get("accuracy")

    @property
    def count(self) -> int:
        """How many questions were asked."""
        return len(self.examples)

    @property
    def one_class(self) -> bool:
        """Whether every answer was the same although several were given to choose from: nothing was understood."""
        return self.count > 1 and len(self.per_class) == 1

    def facts(self) -> Json:
        """What one must know to judge the scores, as JSON can hold it."""
        rows = self.sums.rows
        facts: Json = {"kind": self.kind}
        if rows is not None:
            facts |= {"rows": self.num_rows, "documents": rows.num_documents, "uniform": dict(self.uniform)}
        if self.failed is not None:
            facts["failed"] = self.failed
        if self.reported:
            facts["reported"] = dict(self.reported)
        if self.accuracy is None:
            return facts
        facts |= {
            "count": self.count,
            "chance": self.chance,
            "majority": self.majority,
            "per_class": dict(self.per_class),
            "one_class": self.one_class,
        }
        if self.kind == "choice":
            facts["accuracy_raw"] = _accuracy([(each, each.scores) for each in self.examples])
            facts["accuracy_per_byte"] = _accuracy([(each, each.per_byte) for each in self.examples])
            facts["accuracy_norm"] = _accuracy([(each, each.normalised) for each in self.examples])
        return facts


def _accuracy(scored: Sequence[tuple[Example, Sequence[Optional[float]]]]) -> Optional[float]:
    right = [each.choose(scores) == each.label for each, scores in scored]
    return sum(right) / len(right) if right else None


def answers_of(examples: Sequence[Example]) -> Answers:
    """How some questions were answered: rightly or not, and their further scores where all have one."""
    ids, groups, right = zip(*((each.id, each.group, each.right) for each in examples), strict=True)
    names = [name for name in examples[0].measures if all(name in each.measures for each in examples)]
    return Answers(ids, groups, right, {name: tuple(each.measures[name] for each in examples) for name in names})


def task_result(name: str, kind: str, examples: Sequence[Example], *, judged: bool = True) -> TaskResult:
    """The figures of a task whose questions were answered.

    Args:
        judged: whether answers are right or wrong; else their further scores alone are figures.
    """
    answers = answers_of(examples)
    sums = TaskSums(answers=answers if judged else replace(answers, right=None))
    right = [each.right for each in examples]
    means = {measure: math.fsum(scores) / len(scores) for measure, scores in answers.values.items()}
    if not judged:
        return TaskResult(
            name,
            measures={**dict.fromkeys(MEASURES), **means},
            intervals=sums.intervals(),
            kind=kind,
            examples=tuple(examples),
            sums=sums,
        )
    same_choices = len({each.choices for each in examples}) == 1

    def class_of(each: Example, text: Optional[str]) -> str:
        if text is None:
            return "none"
        return text.strip() if same_choices or text not in each.choices else str(each.choices.index(text))

    truths = [class_of(each, each.answer) for each in examples]
    given = Counter(class_of(each, each.chosen) for each in examples)
    return TaskResult(
        name,
        measures={**dict.fromkeys(MEASURES), "accuracy": sum(right) / len(right), **means},
        intervals=sums.intervals(),
        kind=kind,
        chance=statistics.chance([len(each.choices) for each in examples]) if kind == "choice" else 0.0,
        majority=statistics.majority(truths),
        per_class=dict(given.most_common(20)),
        examples=tuple(examples),
        sums=sums,
    )


def merged(first: TaskResult, second: TaskResult) -> TaskResult:
    """One result of a task's questions and of the held-out rows of the dataset of its name."""
    taken = {name: value for name, value in first.measures.items() if value is not None}
    measures = {**second.measures, **taken}
    intervals = {**second.intervals, **first.intervals}
    values = {**first.__dict__, "measures": measures, "intervals": intervals}
    values |= {"num_rows": second.num_rows, "num_tokens": second.num_tokens, "uniform": second.uniform}
    return TaskResult(**{**values, "sums": TaskSums(second.sums.rows, first.sums.answers)})


def file_name(task: str) -> str:
    """The file of a task's examples.

    >>> file_name("group/task"), file_name("harness:arc_easy")
    ('group_task.jsonl', 'harness_arc_easy.jsonl')
    """
    return task.replace("/", "_").replace(":", "_") + ".jsonl"


def write_examples(folder: Path, results: Mapping[str, TaskResult]) -> None:
    """Write `TASK.jsonl` for every task that has questions, one example a line, each file whole or not at all."""
    for name, result in results.items():
        if result.examples:
            lines = [json.dumps(asdict(each), ensure_ascii=False, allow_nan=False) for each in result.examples]
            write_atomically(folder / file_name(name), "\n".join(lines) + "\n")


def read_examples(path: Path) -> list[Example]:
    """The examples of a file that `write_examples` made."""
    examples = []
    for line in read_regular(path).decode().splitlines():
        values = json.loads(line)
        # Files of earlier versions have no normalised scores.
        lists = {name: tuple(values.get(name, ())) for name in ("choices", "scores", "per_byte", "normalised")}
        examples.append(Example(**{**values, **lists}))
    return examples


def numbers(values: Any) -> tuple[Optional[float], ...]:
    """Floats as JSON can hold them: None for what is not finite.

    >>> numbers([1, float("nan")])
    (1.0, None)
    """
    return tuple(finite(value) for value in values)


class Lost(NamedTuple):
    """An example that was answered rightly at one step and wrongly at a later one."""

    before: Example
    after: Example


class Forgotten(NamedTuple):
    """What of a task was known at one step and lost at another."""

    task: str
    known_step: int
    lost_step: int
    num_known: int
    lost: list[Lost]


def forgotten(run_dir: Path, task: str, known_step: int | None = None, lost_step: int | None = None) -> Forgotten:
    """The examples of a task that were right after one evaluation of a run and wrong after a later one.

    Args:
        known_step: step of the earlier evaluation; None is the one with the highest accuracy before the later.
        lost_step: step of the later evaluation; None is the last.
    """
    paths = {int(path.parent.name): path for path in (run_dir / FOLDER).glob(f"*/{file_name(task)}")}
    steps = sorted(paths)
    if len(steps) < 2:
        found = sorted({path.stem for path in (run_dir / FOLDER).glob("*/*.jsonl")})
        raise UserError(
            f"{run_dir}: {len(steps)} evaluations of {task!r}, and forgetting needs two; evaluated tasks: "
            f"{', '.join(found) or 'none'}"
        )
    for step in (known_step, lost_step):
        if step is not None and step not in paths:
            raise UserError(f"{run_dir}: {task} was not evaluated at step {step}; steps: {', '.join(map(str, steps))}")
    last = steps[-1] if lost_step is None else lost_step
    after = {each.id: each for each in read_examples(paths[last])}
    if known_step is None:
        earlier = [step for step in steps if step < last]
        if not earlier:
            raise UserError(f"{run_dir}: {task} was not evaluated before step {last}; choose a later step")
        # The latest of equally good ones: what was lost since.
        known_step = max(earlier, key=lambda step: (sum(each.right for each in read_examples(paths[step])), step))
    known = [each for each in read_examples(paths[known_step]) if each.right and each.id in after]
    lost = [Lost(each, after[each.id]) for each in known if not after[each.id].right]
    return Forgotten(task, known_step, last, len(known), lost)


def step_after(run_dir: Path, stage: str) -> int:
    """The step at which a run was measured after a stage, given by name or number (1 is the first, 0 before all)."""
    try:
        results = json.loads((run_dir / "results.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{run_dir}: there is no results.json yet; a run writes it when it is evaluated") from None
    names = [str(name) for name in results["stages"]]
    row = names.index(stage) + 1 if stage in names else int(stage) if stage.isdecimal() else None
    steps = [int(point["step"]) for point in results["points"] if row is not None and point.get("row") == row]
    if not steps:
        measured = {point.get("row") for point in results["points"]}
        known = [f"{number} ({name})" for number, name in enumerate(["before all", *names]) if number in measured]
        raise UserError(f"{run_dir}: not measured after stage {stage!r}; stages measured: {', '.join(known) or 'none'}")
    return steps[-1]
