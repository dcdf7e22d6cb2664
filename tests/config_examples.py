"""Config classes with a field of every type, for the tests of configuration."""

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, Dict, List, Literal, Optional, Tuple

import pytest

from holdfast.config import configure, field, merge
from holdfast.data.sampling import DatasetStyle, Sampling
from holdfast.errors import UserError


class Colour(enum.Enum):
    RED = 1
    DARK_GREEN = 2


@dataclass(frozen=True)
class Leaf:
    name: str
    share: float = 0.0
    colour: Colour = Colour.RED
    note: Optional[str] = None
    inner: List[int] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class Fade:
    overlap: float = field("training/fade/overlap", default=0.0, help="share of a stage that fades", ge=0, le=1)
    curve: str = field("training/fade/curve", default="linear", help="its shape", choices=("linear", "cosine"))


@dataclass(frozen=True)
class Train:
    batch_size: int = field("training/batch_size", default=512, help="rows of a step", ge=1)
    tokens: List[int] = field("training/tokens", default_factory=lambda: [10, 20], help="tokens of each stage", gt=0)
    lr: float = field("optimization/lr", default=3e-4, help="peak learning rate", gt=0)
    validate: bool = field("training/validation", default=False, help="validate at intervals")
    limit: Optional[int] = field("eval/limit", default=None, help="examples of an evaluation", ge=1)
    label: str = field("training/label", default="", help="a text")
    note: Optional[str] = field("training/note", default=None, help="a text or nothing")
    zero: int = field("training/zero", default=0, help="falsy")
    empty: List[str] = field("eval/names", default_factory=list, help="falsy")
    kind: Literal["a", "b"] = field("training/kind", default="a", help="one of two")
    colour: Colour = field("training/colour", default=Colour.DARK_GREEN, help="an enum")
    pair: Tuple[int, float] = field("optimization/pair", default=(1, 0.5), help="two numbers")
    many: Tuple[float, ...] = field("optimization/many", default=(), help="any number of numbers")
    table: Dict[str, float] = field("optimization/table", default_factory=dict, help="names to numbers", ge=0)
    either: int | str = field("training/either", default=3, help="a number or a text")
    leaf: Optional[Leaf] = field("training/leaf", default=None, help="a mapping")
    datasets: List[List[Sampling]] = field(
        "training/dataset",
        default_factory=lambda: [[Sampling("fineweb", 1)], [Sampling("mnli", 1, DatasetStyle.PADDED)]],
        help="mixtures",
    )
    leaves: List[List[Leaf]] = field("training/leaves", default_factory=list, help="lists of lists of mappings")
    fade: Fade = Fade()


def message(values: dict[str, Any], *overrides: str) -> str:
    """What a user is told about these values."""
    with pytest.raises(UserError) as caught:
        configure(Train, merge([Train], values, overrides))
    return str(caught.value)
