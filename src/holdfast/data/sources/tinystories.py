"""`tinystories`: short stories in the words of a small child."""

from holdfast.data.sources.tables import Hub, TableSource
from holdfast.data.sources.templates import Template
from holdfast.registry import datasets

datasets.register("tinystories", help="text: short simple stories (roneneldan/TinyStories)")(
    TableSource(name="tinystories", template=Template(text="text"), hub=Hub("roneneldan/TinyStories"))
)
