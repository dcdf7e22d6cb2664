"""`mnli`: does the premise entail the hypothesis?"""

from holdfast.data.sources.tables import Hub, TableSource
from holdfast.data.sources.templates import Template
from holdfast.registry import datasets

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
