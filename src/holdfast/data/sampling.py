"""What a mixture is made of: datasets by name, their share, and how their examples become rows."""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.errors import ConfigError


class DatasetStyle(enum.Enum):
    """How the examples of a dataset become rows of a batch."""

    PMD = "pmd"  # contiguous blocks of one flat token stream
    PADDED = "padded"  # one example a row, padded on the right
    PACKED = "packed"  # whole examples side by side, each with its own segment id


@dataclass(frozen=True)
class Sampling:
    """One dataset of a mixture: its name, its share of the mixture and its style."""

    name: str
    rate: float = 1.0
    style: DatasetStyle = DatasetStyle.PMD

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ConfigError("rate", self.rate, "a share between 0 and 1", "shares of a mixture sum to 1")


class SourceKey(NamedTuple):
    """A source is a (name, style) pair: it counts its own rows over the whole run."""

    name: str
    style: DatasetStyle


SELF = SourceKey("self", DatasetStyle.PMD)  # rows that the model samples from itself, where replay asks for them
