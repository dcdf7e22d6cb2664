"""What happens in a run, as data that sinks write down."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.types import Json, JsonView

RECORDED = ("train", "validation", "evaluation", "stage", "checkpoint", "certificate")
CONSOLE_ONLY = ("progress", "message", "prepare")


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Args:
        kind: one of `RECORDED`, which are kept in `metrics.jsonl`, or of `CONSOLE_ONLY`.
        step: optimizer steps completed.
        tokens: step x batch_size x block_size.
        values: what is known about it; for `message` the key `text`, for `prepare` the keys `name`, `done`,
            `total` and `unit`.
    """

    kind: str
    step: int = 0
    tokens: int = 0
    values: JsonView = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.kind in RECORDED + CONSOLE_ONLY, f"unknown kind of event: {self.kind}"

    @property
    def recorded(self) -> bool:
        """Whether the event belongs in `metrics.jsonl`."""
        return self.kind in RECORDED

    def record(self) -> Json:
        """The event as one mapping, with kind, step and tokens first."""
        return {"kind": self.kind, "step": self.step, "tokens": self.tokens, **self.values}


def message(text: str, step: int = 0, tokens: int = 0) -> Event:
    """A line for the user."""
    return Event("message", step, tokens, {"text": text})


def scalars(values: JsonView, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings, each with its slash path; texts, lists and nulls are left out.

    >>> list(scalars({"loss": 2, "rows": {"a": 3, "b": None}, "name": "x"}))
    [('loss', 2.0), ('rows/a', 3.0)]
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif not isinstance(value, str | bytes | list | tuple) and value is not None:
            yield f"{prefix}{name}", float(value)
