"""`sst2`: is a sentence of a film review positive or negative?"""

from holdfast.data.sources.tables import Hub, TableSource
from holdfast.data.sources.templates import Template
from holdfast.registry import datasets

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
