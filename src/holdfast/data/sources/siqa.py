"""`siqa`: what do people feel, want or do in everyday situations?"""

from holdfast.data.sources.tables import Hub, TableSource
from holdfast.data.sources.templates import Template
from holdfast.registry import datasets

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
