"""The continual-learning suites that people compare on: their datasets, published orders and metrics.

`text-classification` (d'Autume et al., 2019) and `standard-cl` (the four of them that LLM papers use), `trace` (Wang
et al., 2023), and `superni`, task files of Super-NaturalInstructions in the orders of later papers. Rows come from
`data/root`, in the formats in which they are published, or from the hub where they are there.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.data.config import DataConfig
from holdfast.data.documents import Document, LocalSource, SourceContext
from holdfast.data.sources.files import Row, file_hash, split_files
from holdfast.data.sources.tables import Files, Hub, TableSource
from holdfast.data.sources.templates import Template
from holdfast.errors import UserError
from holdfast.registry import datasets
from holdfast.types import Json

EXACT, LETTER = "exact_match", "letter"
TRAIN_TEST = {"train": "train", "validation": "test"}
SUPERNI_PREFIX = "superni-"
_SUPERNI = re.compile(r"superni-(task\d{1,5})")


@dataclass(frozen=True)
class Suite:
    """Tasks that are learned one after the other.

    Args:
        datasets: by the name that the paper gives each task, the dataset of it.
        orders: the published orders, by those names; `--order 1` is the first.
        examples: training examples of each stage.
        held_out: questions of each evaluation.
        epochs: passes over a task's examples, one where it is not named.
        values: options that belong to the suite.
    """

    help: str
    datasets: Mapping[str, str]
    orders: tuple[tuple[str, ...], ...]
    examples: int
    held_out: int
    epochs: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Json] = field(default_factory=dict)


def place(folders: Sequence[str], held_out: Sequence[str]) -> Callable[[str, DataConfig], Files]:
    """Finds a dataset's files below `data/root`: in the first folder that has training rows.

    Args:
        folders: beside the dataset's own name.
        held_out: names of the split that is held out, the best first.
    """

    def find(name: str, data: DataConfig) -> Files:
        root = data.root_path()
        for folder in () if root is None else (root / each for each in (name, *folders)):
            if train := split_files(folder, "train"):
                rest = next((found for split in held_out if (found := split_files(folder, split))), [])
                return {"train": train, **({"validation": rest} if rest else {})}
        return {}

    return find


@dataclass(frozen=True)
class ReviewSource(TableSource):
    """A dataset of Zhang et al. (2015), also as their CSV files without a header: a class from 1 on, then texts.

    Args:
        columns: what their columns are called on the hub, the class first.
        first_class: what the hub calls class 1.
        join: columns of theirs that are one on the hub, with a space between.
    """

    columns: tuple[str, ...] = ()
    first_class: int = 0
    join: bool = False

    def _rows(self, split: str, context: SourceContext) -> Iterator[Row]:
        paths = self.files(self.name, context.data).get(split, [])
        if not paths or not all(path.suffix == ".csv" and _without_header(path) for path in paths):
            return super()._rows(split, context)
        return self._plain_rows(paths, context)

    def _plain_rows(self, paths: Sequence[Path], context: SourceContext) -> Iterator[Row]:
        for path in paths:
            with path.open(encoding="utf-8", newline="") as file:
                for number, values in enumerate(csv.reader(file), 1):
                    texts = [" ".join(values[1:])] if self.join else values[1:]
                    if not values or not values[0].isdigit() or len(texts) != len(self.columns) - 1:
                        detail = f"{len(values)} columns, {len(self.columns)} expected, a class from 1 on first"
                        context.broken.add("not a row of this dataset", path.name, number, detail)
                        continue
                    label = int(values[0]) - 1 + self.first_class
                    fields: Json = dict(zip(self.columns, [label, *texts], strict=True))
                    yield Row(fields, path.name, number)


def _without_header(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        return next(csv.reader(file), [""])[0].isdigit()


SENTIMENTS = (" very negative", " negative", " neutral", " positive", " very positive")
TOPICS = {
    "ag_news": ("World", "Sports", "Business", "Science and Technology"),
    "dbpedia": (
        "Company", "Educational Institution", "Artist", "Athlete", "Office Holder", "Mean of Transportation",
        "Building", "Natural Place", "Village", "Animal", "Plant", "Album", "Film", "Written Work",
    ),
    "yahoo": (
        "Society and Culture", "Science and Mathematics", "Health", "Education and Reference",
        "Computers and Internet", "Sports", "Business and Finance", "Entertainment and Music",
        "Family and Relationships", "Politics and Government",
    ),
}  # fmt: skip


def _labels(texts: Sequence[str], first: int = 0) -> dict[str, str]:
    return {str(first + index): text for index, text in enumerate(texts)}


def _topics(name: str) -> dict[str, str]:
    return _labels([f" {topic}" for topic in TOPICS[name]])


HELD_OUT = ("validation", "test")
for source in (
    ReviewSource(
        "ag_news",
        Template(prompt="{text}\nTopic:", labels=_topics("ag_news")),
        Hub("fancyzhx/ag_news", splits=TRAIN_TEST),
        place(["ag_news_csv"], HELD_OUT),
        columns=("label", "text"),
        join=True,
    ),
    ReviewSource(
        "amazon",
        Template(
            prompt="{review_title}\n{review_text}\nSentiment:", label="class_index", labels=_labels(SENTIMENTS, 1)
        ),
        Hub("yassiracharki/Amazon_Reviews_for_Sentiment_Analysis_fine_grained_5_classes", splits=TRAIN_TEST),
        place(["amazon_review_full_csv"], HELD_OUT),
        columns=("class_index", "review_title", "review_text"),
        first_class=1,
    ),
    ReviewSource(
        "dbpedia",
        Template(prompt="{title}\n{content}\nTopic:", labels=_topics("dbpedia")),
        Hub("fancyzhx/dbpedia_14", splits=TRAIN_TEST),
        place(["dbpedia_csv"], HELD_OUT),
        columns=("label", "title", "content"),
    ),
    ReviewSource(
        "yahoo",
        Template(
            prompt="{question_title}\n{question_content}\n{best_answer}\nTopic:",
            label="topic",
            labels=_topics("yahoo"),
        ),
        Hub("community-datasets/yahoo_answers_topics", splits=TRAIN_TEST),
        place(["yahoo_answers_csv"], HELD_OUT),
        columns=("topic", "question_title", "question_content", "best_answer"),
    ),
    ReviewSource(
        "yelp",
        Template(prompt="{text}\nSentiment:", labels=_labels(SENTIMENTS)),
        Hub("Yelp/yelp_review_full", splits=TRAIN_TEST),
        place(["yelp_review_full_csv"], HELD_OUT),
        columns=("label", "text"),
    ),
):
    assert source.hub is not None
    datasets.register(source.name, help=f"task: text classification ({source.hub.name})")(source)

# TRACE: its task, how an answer is scored, and the passes that its authors make.
TRACE = {
    "C-STANCE": (EXACT, 5),
    "FOMC": (EXACT, 3),
    "MeetingBank": ("rouge_l", 7),
    "Py150": ("similarity", 5),
    "ScienceQA": (LETTER, 3),
    "NumGLUE-cm": (EXACT, 5),
    "NumGLUE-ds": (EXACT, 5),
    "20Minuten": ("sari", 7),
}
TRACE_FOLDERS = ("{}", "trace/{}", "TRACE/{}", "LLM-CL-Benchmark_5000/{}", "TRACE-Benchmark/LLM-CL-Benchmark_5000/{}")
for task in TRACE:
    folders = [folder.format(task) for folder in TRACE_FOLDERS]
    datasets.register(f"trace-{task}", help=f"task: {task} of TRACE, from its files train.json and test.json")(
        TableSource(
            f"trace-{task}",
            Template(prompt="{prompt}", answer="{answer}"),
            files=place(folders, ("test", "eval", "validation")),
        )
    )


@dataclass(frozen=True)
class TaskFileSource(LocalSource):
    """A task file of Super-NaturalInstructions: its definition before each of its instances.

    Of several right outputs the first is learned and compared with; examples of the file are not shown.
    """

    name: str
    kind: str = "task"

    def splits(self, context: SourceContext) -> tuple[str, ...]:  # noqa: ARG002 (the protocol's argument)
        return ("train",)

    def path(self, data: DataConfig) -> Path:
        """The task's file below `data/root`."""
        task, root = self.name.removeprefix(SUPERNI_PREFIX), data.root_path()
        patterns = (f"{task}.json", f"{task}_*.json")
        places = () if root is None else (root, root / "superni", root / "tasks", root / "natural-instructions/tasks")
        found = [path for place in places for each in patterns for path in sorted(place.glob(each))]
        if not found:
            raise UserError(
                f"dataset {self.name}: wanted {task}_NAME.json of Super-NaturalInstructions in the folder that "
                "data/root (or HOLDFAST_DATA) names, or in its folder superni or tasks"
            )
        return found[0]

    def documents(self, split: str, context: SourceContext) -> Iterator[Document]:  # noqa: ARG002
        path = self.path(context.data)
        try:
            content = json.loads(path.read_bytes())
            definition, instances = content["Definition"], content["Instances"]
            definition = definition if isinstance(definition, str) else " ".join(definition)
            count = len(instances)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a task file with Definition and Instances ({error})") from None
        for number, instance in enumerate(instances, 1):
            context.fraction = number / count
            given, outputs = (
                (instance.get(key) for key in ("input", "output")) if isinstance(instance, dict) else 2 * [0]
            )
            output = outputs[0] if isinstance(outputs, list) and outputs else outputs
            if not isinstance(given, str) or not isinstance(output, str) or not output.strip():
                context.broken.add("no input and output", path.name, number)
                continue
            prompt = f"Definition: {definition.strip()}\n\nInput: {given.strip()}\nOutput:"
            yield Document(f"{path.name}:{number}", "", prompt, f" {output.strip()}")

    def fingerprint(self, context: SourceContext) -> str:
        return f"1 {file_hash(self.path(context.data), context.data.cache_path())}"


def task_file_source(name: str) -> TaskFileSource | None:
    """The source of a name such as `superni-task1572`."""
    return TaskFileSource(name) if _SUPERNI.fullmatch(name) else None


CLASSIFIED = {"ag": "ag_news", "amazon": "amazon", "dbpedia": "dbpedia", "yahoo": "yahoo", "yelp": "yelp"}
SUPERNI_ORDERS = (
    "1572 363 1290 181 002 1510 639 1729 073 1590 748 511 591 1687 875",
    "748 073 1590 639 1572 1687 591 363 1510 1729 181 511 002 1290 875",
)
SUITES = {
    "text-classification": Suite(
        "AG News, Amazon, DBpedia, Yahoo and Yelp, in the four orders of d'Autume et al. (2019); accuracy",
        CLASSIFIED,
        (
            ("yelp", "ag", "dbpedia", "amazon", "yahoo"),
            ("dbpedia", "yahoo", "ag", "amazon", "yelp"),
            ("yelp", "yahoo", "amazon", "dbpedia", "ag"),
            ("ag", "yelp", "amazon", "yahoo", "dbpedia"),
        ),
        examples=115_000,
        held_out=7_600,
        values={"architecture": {"block_size": 256}},
    ),
    "standard-cl": Suite(
        "DBpedia, Amazon, Yahoo and AG News, in the three orders that papers on LLMs use (O-LoRA, 2023); accuracy",
        {name: CLASSIFIED[name] for name in ("ag", "amazon", "dbpedia", "yahoo")},
        (
            ("dbpedia", "amazon", "yahoo", "ag"),
            ("dbpedia", "amazon", "ag", "yahoo"),
            ("yahoo", "amazon", "ag", "dbpedia"),
        ),
        examples=5_000,
        held_out=7_600,
        values={"architecture": {"block_size": 256}},
    ),
    "trace": Suite(
        "the eight tasks of TRACE (2023), in its order and in the second one that papers use; accuracy, ROUGE-L, "
        "similarity, SARI",
        {task: f"trace-{task}" for task in TRACE},
        (
            tuple(TRACE),
            ("NumGLUE-cm", "NumGLUE-ds", "FOMC", "20Minuten", "C-STANCE", "Py150", "MeetingBank", "ScienceQA"),
        ),
        examples=5_000,
        held_out=2_000,
        epochs={task: epochs for task, (_, epochs) in TRACE.items()},
        values={"architecture": {"block_size": 1536}, "eval": {"max_new_tokens": 512}},
    ),
    "superni": Suite(
        "fifteen tasks of Super-NaturalInstructions, in the two orders of SAPT (2024); ROUGE-L",
        {f"task{number}": f"{SUPERNI_PREFIX}task{number}" for number in SUPERNI_ORDERS[0].split()},
        tuple(tuple(f"task{number}" for number in order.split()) for order in SUPERNI_ORDERS),
        examples=1_000,
        held_out=100,
        values={"architecture": {"block_size": 512}, "eval": {"max_new_tokens": 50}},
    ),
}
# How the answers of a suite's tasks are scored, by the name of the dataset; choices where it is not here.
SCORED = {f"trace-{task}": metric for task, (metric, _) in TRACE.items()}
