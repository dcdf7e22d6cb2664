"""`fineweb`: filtered web pages, streamed from the hub and never wholly downloaded."""

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
