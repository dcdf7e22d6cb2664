"""Datasets of the hub that are known by name: `fineweb` and `tinystories` are text, the others tasks."""

from holdfast.data.sources.tables import Hub, TableSource
from holdfast.data.sources.templates import Template
from holdfast.registry import datasets

datasets.register("fineweb", help="text: web pages, streamed (HuggingFaceFW/fineweb)")(
    TableSource(
        name="fineweb",
        template=Template(text="text"),
        hub=Hub("HuggingFaceFW/fineweb", config="sample-10BT", splits={"train": "train"}, stream=True),
    )
)

datasets.register("tinystories", help="text: short simple stories (roneneldan/TinyStories)")(
    TableSource(name="tinystories", template=Template(text="text"), hub=Hub("roneneldan/TinyStories"))
)

datasets.register("mnli", help="task: entailment of sentence pairs (nyu-mll/multi_nli)")(
    TableSource(
        name="mnli",
        template=Template(
            prompt="{premise}\nQuestion: {hypothesis} True, false or neither?\nAnswer:",
            labels={"0": " true", "1": " neither", "2": " false"},
            group="{premise}",
        ),
        hub=Hub("nyu-mll/multi_nli", splits={"train": "train", "validation": "validation_matched"}),
    )
)

datasets.register("qqp", help="task: duplicate questions (nyu-mll/glue, config qqp)")(
    TableSource(
        name="qqp",
        template=Template(
            prompt="First: {question1}\nSecond: {question2}\nSame question?",
            labels={"0": " no", "1": " yes"},
            group="{question1}",
        ),
        hub=Hub("nyu-mll/glue", config="qqp"),
    )
)

datasets.register("siqa", help="task: questions about social situations (lighteval/siqa)")(
    TableSource(
        name="siqa",
        template=Template(
            prompt="{context}\nQuestion: {question}\nAnswer:",
            labels={"1": " {answerA}", "2": " {answerB}", "3": " {answerC}"},
            group="{context}",
        ),
        hub=Hub("lighteval/siqa"),
    )
)

datasets.register("sst2", help="task: sentiment of film reviews (stanfordnlp/sst2)")(
    TableSource(
        name="sst2",
        template=Template(
            prompt="Review: {sentence}\nSentiment:",
            labels={"0": " negative", "1": " positive"},
        ),
        hub=Hub("stanfordnlp/sst2"),
    )
)
