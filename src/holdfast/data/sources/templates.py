"""Templates: how a row of named fields becomes a document."""

import functools
import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.data.documents import Document, SourceContext
from holdfast.errors import ConfigError
from holdfast.types import JsonView

_NAME = re.compile(r"[^.\[\]]+(\[[^\[\]]+\])*")
_WHOLE = re.compile(r"-?\d{1,9}")


class BrokenRowError(Exception):
    """A row that makes no document, and of which kind its fault is."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Template:
    """Which fields of a row make a text, or a prompt with its answer.

    Text has `text`, the name of a field or a template; a task has `prompt`, a template, and one of: `labels`, from raw
    values of the field `label` to answers; `choices` alone, whose index the field `label` holds; or `answer`, a
    template.
    """

    text: str | None = None
    prompt: str | None = None
    answer: str | None = None
    choices: tuple[str, ...] = ()
    label: str = "label"
    labels: Mapping[str, str] = field(default_factory=dict)
    group: str | None = None

    @property
    def kind(self) -> str:
        """`text` or `task`."""
        return "text" if self.prompt is None else "task"

    @property
    def fingerprint(self) -> str:
        """Changes with the documents that the same rows give."""
        # The order of labels is the order of the choices, so keys are not sorted.
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    def fingerprint_of(self, context: SourceContext) -> str:  # noqa: ARG002 (as chats have it)
        return self.fingerprint

    def reader(self, context: SourceContext) -> Callable[[JsonView, str], Document]:  # noqa: ARG002
        """What makes a document of a row and its id; raises BrokenRowError."""
        return self.document

    def document(self, row: JsonView, id: str) -> Document:
        """The document of a row; raises BrokenRowError."""
        group = "" if self.group is None else fill(self.group, row)
        if self.prompt is None:
            text = self.text or "text"
            return Document(id, text=proper(fill(text, row) if "{" in text else _value(row, text)), group=group)
        prompt = proper(fill(self.prompt, row))
        answer, choices, label = self._answer(row)
        return Document(id, "", prompt, proper(answer), choices, label, group)

    @functools.cached_property
    def _fixed(self) -> tuple[str, ...]:
        """The answers, where they are the same for all rows."""
        varies = self.answer is not None or self.choices or any(fields(text) for text in self.labels.values())
        return () if varies else tuple(text.format() for text in self.labels.values())

    @functools.cached_property
    def _order(self) -> dict[str, int]:
        return {raw: index for index, raw in enumerate(self.labels)}

    def _answer(self, row: JsonView) -> tuple[str, tuple[str, ...], int | None]:
        if self.labels:
            raw = str(_value(row, self.label))
            label = self._order.get(raw)
            if label is None:
                detail = f"{self.label} is {raw!r}, not {', '.join(self.labels)}"
                raise BrokenRowError("label outside the choices", detail)
            wrapped = self._fixed or tuple(self._wrap(text, row) for text in self.labels.values())
            if not self.choices:
                return wrapped[label], wrapped, label
            return _placed(wrapped[label], self._choices(row))
        if self.answer is not None:
            answer = fill(self.answer, row)
            return _placed(answer, self._choices(row)) if self.choices else (answer, (), None)
        choices = self._choices(row)
        raw = str(_value(row, self.label))
        if not (raw.isascii() and raw.isdigit() and len(raw) <= 18) or int(raw) >= len(choices):
            raise BrokenRowError(
                "label outside the choices", f"{self.label} is {raw[:80]!r}, choices are 0 to {len(choices) - 1}"
            )
        return choices[int(raw)], choices, int(raw)

    def _wrap(self, text: str, row: JsonView) -> str:
        """What a label stands for, put into the answer's template if there is one."""
        text = fill(text, row)
        return text if self.answer is None else fill(self.answer, {**row, self.label: text})

    def _choices(self, row: JsonView) -> tuple[str, ...]:
        if len(self.choices) == 1:
            names = fields(self.choices[0])
            found = _looked_up(row, names[0]) if len(names) == 1 else None
            if isinstance(found, Sequence) and not isinstance(found, str):
                return tuple(fill(self.choices[0], {names[0]: choice}) for choice in found)
        return tuple(fill(choice, row) for choice in self.choices)


def _placed(answer: str, choices: tuple[str, ...]) -> tuple[str, tuple[str, ...], int]:
    if answer not in choices:
        raise BrokenRowError("label outside the choices", f"the answer {answer!r} is not among {choices!r}")
    return answer, choices, choices.index(answer)


def _value(row: JsonView, name: str) -> Any:
    return _there(row, name, row.get(name))


def _looked_up(row: JsonView, name: str) -> Any:
    """The value of a field, or of a place in it such as `messages[0][content]`; None where there is none."""
    if name in row or "[" not in name:
        return row.get(name)
    head, *places = name.replace("]", "").split("[")
    value = row.get(head)
    for place in places:
        if isinstance(value, Mapping):
            value = value.get(place)
        elif isinstance(value, Sequence) and not isinstance(value, str) and _WHOLE.fullmatch(place):
            value = value[int(place)] if -len(value) <= int(place) < len(value) else None
        else:
            return None
    return value


def _there(row: JsonView, name: str, value: Any) -> Any:
    if value is None:
        chat = next((f"; for chats set messages: {key}" for key in ("messages", "conversations") if key in row), "")
        raise BrokenRowError("missing field", f"{name} (the row has {', '.join(map(str, row)) or 'nothing'}){chat}")
    return value


def proper(text: Any) -> str:
    """A text that can be tokenised, as it is; raises BrokenRowError."""
    if not isinstance(text, str):
        raise BrokenRowError("text is not a text", f"it is {type(text).__name__}")
    if not text or text.isspace():
        raise BrokenRowError("empty text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, written as an escape in JSON
            raise BrokenRowError("invalid UTF-8", f"half a surrogate pair at character {error.start}") from None
    return text


def fill(template: str, row: JsonView) -> str:
    """A template with the row's values in place of the names in braces.

    >>> fill("{a} and {b}", {"a": 1, "b": "two"})
    '1 and two'
    """
    return _filled(template, lambda name: _there(row, name, _looked_up(row, name)))


def _filled(template: str, value: Callable[[str], Any]) -> str:
    return "".join(text + ("" if name is None else format(value(name), form)) for text, name, form in _parts(template))


_parsed: dict[str, list[tuple[str, str | None, str]]] = {}  # parsed templates; there are only ever a few


def fields(template: str) -> list[str]:
    """The names in braces.

    >>> fields("{a} and {b}")
    ['a', 'b']
    """
    return [name for _, name, _ in _parts(template) if name is not None]


def _parts(template: str) -> list[tuple[str, str | None, str]]:
    """What stands before each name, the name, and its format; the last one may be without a name."""
    if template not in _parsed:
        _parsed[template] = [(text, name, form or "") for text, name, form, _ in string.Formatter().parse(template)]
    return _parsed[template]


def check(template: str, path: str) -> None:
    """Raise ConfigError unless a template is text with names of fields, or of places in them, in braces."""
    expected = "a template such as 'Question: {question}'"
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(path, template, expected, f"{error}; write {{{{ and }}}} for braces themselves") from None
    for _, name, spec, conversion in parts:
        if name is not None and (not _NAME.fullmatch(name) or name.isdigit() or spec or conversion):
            raise ConfigError(
                path,
                template,
                expected,
                f"{{{name}}} is not the plain name of a field, nor a place in one such as {{messages[0][content]}}",
            )
