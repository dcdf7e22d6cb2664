"""`qqp`: do two questions ask the same?"""

from holdfast.data.sources.tables import Hub, TableSource
from holdfast.data.sources.templates import Template
from holdfast.registry import datasets

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
