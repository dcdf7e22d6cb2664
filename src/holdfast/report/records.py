"""Records and results of a run as others may have left them: read in one pass, thinned on the way, made to fit.

A line that is no record is left out and counted. A value of a wrong type or size counts as not measured. So whatever
reads a run may rely on the types below, whoever wrote its files.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from holdfast.conversion import from_yaml
from holdfast.evaluation.matrix import ScoreMatrix
from holdfast.execution.files import open_regular
from holdfast.types import Json, JsonView

BLOCK = 1 << 22
LONGEST = 1 << 24  # of a line; a longer one is no record
PARSED = 250_000  # train records that are read of a longer file, evenly
KEPT = {"train": 10_000, "validation": 4_000, "evaluation": 2_000}  # about so many at least, others not beyond OTHERS
OTHERS = 20_000
PIECE = 8  # records of which two stay
LARGEST = 1e100  # no loss is: charts and sums stay finite
COUNTABLE = 2**53
DEEPEST = 200  # levels of a config; the parsers themselves take a few thousand
TRAIN = b'{"kind": "train"'  # as JsonlSink begins a line: such lines are told without being parsed


@dataclass
class Records:
    """What was read of a metrics file.

    Args:
        records: in order of the file within each kind.
        num_bad: lines that are no record; the first of them is line `first_bad`.
        every: of so many train records one was read; its seconds count for all of them.
    """

    records: list[Json] = field(default_factory=list)
    num_bad: int = 0
    first_bad: int = 0
    every: int = 1

    def note_bad(self, line: int) -> None:
        """Count a line that is no record."""
        self.num_bad += 1
        self.first_bad = self.first_bad or line

    @property
    def problem(self) -> str:
        """What could not be read, in words; empty where everything could."""
        if not self.num_bad:
            return ""
        lines = "1 line is" if self.num_bad == 1 else f"{self.num_bad:,} lines are"
        return f"metrics.jsonl: {lines} no record and left out (the first is line {self.first_bad:,})"


def read_records(path: Path, *, curves: bool = True) -> Records:
    """The records of a metrics file; a torn last line, of a run that is alive or was killed, is left out.

    Args:
        curves: without them the first and the last train record are enough, and the others are not parsed.
    """
    found = Records()
    kept = {kind: _Thinned(most) for kind, most in KEPT.items()}
    others: list[Json] = []

    def take(line: bytes, number: int) -> None:
        if not line.strip():
            return
        record = _read(line)
        if record is None:
            found.note_bad(number)
        elif record["kind"] in kept:
            kept[record["kind"]].add(record)
        elif len(others) < OTHERS:
            others.append(fitted(record))

    number, seen, last = 0, 0, (b"", 0)
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        for lines in _blocks(file):
            if not number and curves:
                found.every = max(1, math.ceil(size / max(sum(map(len, lines)), 1) * len(lines) / PARSED))
            for place, line in enumerate(lines, number + 1):
                if line.startswith(TRAIN) and (not curves or found.every > 1):
                    seen += 1
                    last = line, place
                    if seen > 1 and (not curves or seen % found.every):
                        continue
                    last = b"", 0
                take(line, place)
            number += len(lines)
    if last[0]:
        take(*last)
    by_kind = {kind: [fitted(record) for record in thinned.records] for kind, thinned in kept.items()}
    if found.every > 1:
        _scale(by_kind["train"][1:], found.every)
    found.records = [*others, *(record for records in by_kind.values() for record in records)]
    return found


def _blocks(file: BinaryIO) -> Iterator[list[bytes]]:
    """Whole lines, some megabytes at a time."""
    rest = b""
    while data := file.read(BLOCK):
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            rest += data
            if len(rest) > LONGEST:
                rest = rest[:1] + b"\0"  # no JSON: it is counted when its line ends
            continue
        yield (rest + head).split(b"\n")
        rest = tail


class _Thinned:
    """Records of a kind, halved whenever they are twice as many as wanted; rows of the score matrix all stay."""

    def __init__(self, most: int) -> None:
        self.records: list[Json] = []
        self._limit = 2 * most

    def add(self, record: Json) -> None:
        self.records.append(record)
        if len(self.records) >= self._limit:
            self.records = halved(self.records)
            if len(self.records) > 0.75 * self._limit:  # mostly rows: there is little to thin
                self._limit *= 2


def halved(records: list[Json]) -> list[Json]:
    """Of eight records each those of lowest and highest loss, and the first and last of all.

    What a record says of the time since the one before it, the next one that stays says as well.
    """
    stay = {0, len(records) - 1}
    for start in range(0, len(records), PIECE):
        losses = {
            index: loss
            for index, record in enumerate(records[start : start + PIECE], start)
            if (loss := number(record.get("loss"))) is not None
        } or {start: 0.0}
        stay |= {min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)}
    stay |= {index for index, record in enumerate(records) if record.get("row") is not None}
    kept: list[Json] = []
    waiting: list[Json] = []
    for index, record in enumerate(records):
        waiting.append(record)
        if index in stay:
            kept.append(_folded(waiting))
            waiting = []
    return kept


def _folded(records: list[Json]) -> Json:
    """The last of some records, with the seconds, skipped steps and memory of all of them."""
    last = records[-1]
    if len(records) == 1 or last["kind"] != "train":
        return last
    seconds: dict[str, float] = {}
    for record in records:
        for kind, spent in numbers(record.get("seconds")).items():
            seconds[kind] = seconds.get(kind, 0.0) + (spent or 0.0)
    skipped = sum(count(record.get("skipped")) or 0 for record in records)
    memory = max(filter(None, (_memory(record.get("memory")) for record in records)), key=_size, default=None)
    return {**last, "seconds": seconds, "skipped": skipped} | ({"memory": memory} if memory else {})


def _size(memory: Any) -> float:
    return sum(value or 0.0 for value in memory.values()) if isinstance(memory, dict) else float(memory)


def _scale(records: list[Json], factor: int) -> None:
    for record in records:
        record["seconds"] = {kind: factor * (spent or 0.0) for kind, spent in record.get("seconds", {}).items()}


def parse(line: bytes | str) -> Json | None:
    """A line as a record whose values have the types that they are documented with; None where it is none.

    >>> parse(b'{"kind": "train", "step": 2, "loss": "low", "rows": {"a": 3, "b": []}}')
    {'kind': 'train', 'step': 2, 'tokens': 0, 'loss': None, 'rows': {'a': 3}}
    >>> parse(b'{"kind": "train", "step": -1}') is None
    True
    """
    record = _read(line)
    return None if record is None else fitted(record)


def _read(line: bytes | str) -> Json | None:
    """A line as a record of which kind, step and tokens alone are sure: a long file has many that are not kept."""
    record = parse_json(line)
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    record["step"], record["tokens"] = count(record.get("step")), count(record.get("tokens", 0))
    return None if record["step"] is None or record["tokens"] is None else record


def fitted(record: Json) -> Json:
    """A record whose other values have their types too."""
    head = {"kind": record["kind"], "step": record["step"], "tokens": record["tokens"]}
    return head | _fitted(record, _FIELDS)


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text, None where it is none; what JSON does not know (NaN) is None inside it too."""
    try:
        return _DECODER.decode(text.decode() if isinstance(text, bytes) else text)
    except (ValueError, RecursionError):
        return None


_DECODER = json.JSONDecoder(parse_constant=lambda _name: None)


def parse_yaml(data: bytes) -> Any:
    """The value of a YAML text; None where it is none, or nested or repeated as no run writes it.

    >>> parse_yaml(b"a: [1]"), parse_yaml(b"[" * 5000), parse_yaml(b"a: &x [1]\\nb: [*x, *x]")
    ({'a': [1]}, None, None)
    """
    try:
        if _suspicious(data) and not _plain_yaml(data):
            return None
        return from_yaml(data)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, OverflowError):
        return None


def _suspicious(data: bytes) -> bool:
    """Whether a text could be nested too deeply, or be short and become very large."""
    nested = data.count(b"[") + data.count(b"{") > DEEPEST or b"- " * 30 in data or b" " * 2 * DEEPEST in data
    return nested or (b"&" in data and b"*" in data) or b"? ? " in data


def _plain_yaml(data: bytes) -> bool:
    """Whether a YAML text has no aliases and few levels; the parser itself would overflow its stack on many."""
    depth = 0
    for token in yaml.scan(data, Loader=yaml.CSafeLoader):
        name = type(token).__name__
        if name == "AliasToken":
            return False
        depth += name.endswith("StartToken") - name.endswith("EndToken")
        if depth > DEEPEST:
            return False
    return True


def number(value: Any) -> float | int | None:
    """A number that can be drawn and added, else None.

    >>> number(2), number(float("inf")), number(True), number("2")
    (2, None, None, None)
    """
    if type(value) is float or type(value) is int:
        return value if -LARGEST < value < LARGEST else None
    return None


def count(value: Any) -> int | None:
    """A whole number from 0 on that a float holds too, else None."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < COUNTABLE else None


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def text(value: Any) -> str:
    """A text that every page and terminal can show: without control characters and halves of characters.

    >>> text("a\\x1b[2Jb")
    'a\ufffd[2Jb'
    """
    shown = value if isinstance(value, str) else str(value)
    return shown if shown.isprintable() else _CONTROL.sub("\ufffd", shown)


def mapping(inner: Callable[[Any], Any]) -> Callable[[Any], Json]:
    """What makes a mapping of texts to values that fit: others are left out, and what is no mapping is an empty one."""
    keeps_none = inner in (number, count)  # a score that was not finite

    def fit(value: Any) -> Json:
        made: Json = {}
        for key, item in value.items() if isinstance(value, dict) else ():
            fitted = None if item is None else inner(item)
            if fitted is not None or (keeps_none and item is None):
                made[text(key)] = fitted
        return made

    return fit


def _interval(value: Any) -> list[float] | None:
    ends = [number(end) for end in value] if isinstance(value, list) else []
    return [end for end in ends if end is not None] if len(ends) == 2 and None not in ends else None


def _texts(value: Any) -> list[str]:
    return [text(item) for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _memory(value: Any) -> Any:
    return numbers(value) if isinstance(value, dict) else number(value)


def _facts(value: Any) -> Json | None:
    if not isinstance(value, dict):
        return None
    fits = {"chance": number, "majority": number, "count": count, "uniform": numbers, "failed": text}
    return {text(key): fits[key](item) if key in fits else item for key, item in value.items() if item is not None}


def _ema(value: Any) -> Json:
    return _fitted(value, _FIELDS) if isinstance(value, dict) else {}


numbers = mapping(number)
_by_task = mapping(numbers)
_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("loss", "ce", "penalty", "beta", "learning_rate", "grad_norm"), number),
    **dict.fromkeys(("stage", "skipped", "row"), count),
    **dict.fromkeys(("name", "at"), text),
    **dict.fromkeys(("rows", "seconds", "losses"), numbers),
    "memory": _memory,
    "tags": _texts,
    "scores": _by_task,
    "counts": mapping(mapping(count)),
    "intervals": mapping(mapping(_interval)),
    "facts": mapping(_facts),
    "ema": _ema,
}


def _fitted(record: JsonView, fields: Mapping[str, Callable[[Any], Any]]) -> Json:
    """What a record holds beside kind, step and tokens; mappings are never None, so that one may look into them."""
    made: Json = {}
    for key, value in record.items():
        fit = fields.get(key)
        if fit is None:
            if key not in ("kind", "step", "tokens"):
                made[key] = value
        elif value is None:
            made |= {key: None} if fit is number else {}
        elif (fitted := fit(value)) is not None or fit is number:
            made[key] = fitted
    return made


def fit_results(tree: Json) -> tuple[Json, list[str]]:
    """The content of a `results.json` that everything which reads it may rely on, and what was left out of it."""
    made, problems = dict(tree), []
    made["finished"] = tree.get("finished") is True
    made["points"] = [point for point in map(_point, _listed(tree.get("points"))) if point is not None]
    if len(made["points"]) < len(_listed(tree.get("points"))):
        problems.append("results.json: evaluations without a step or scores are left out")
    for key in ("metrics", "ema", "average"):
        if key in tree and not isinstance(tree[key], dict):
            del made[key]
            problems.append(f"results.json: {key} is no mapping and left out")
    if "metrics" in made:
        made["metrics"] = _by_task(tree["metrics"])
    if not _fits_matrix(made):
        for key in ("matrix", "stages", "tasks", "homes", "not_learned", "metrics"):
            made.pop(key, None)
        problems.append("results.json: its score matrix does not fit together and is left out")
    if "ema" in made:
        shared: Json = {key: tree[key] for key in ("finished", "stages", "tasks", "homes") if key in tree}
        made["ema"], inner = fit_results({**shared, **made["ema"]})
        problems += [f"{problem} (of the averaged weights)" for problem in inner]
    return made, problems


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _point(value: Any) -> Json | None:
    if not isinstance(value, dict) or not isinstance(value.get("scores"), dict):
        return None
    step, tokens = count(value.get("step")), count(value.get("tokens", 0))
    return None if step is None or tokens is None else {"step": step, "tokens": tokens} | _fitted(value, _FIELDS)


def _fits_matrix(results: Json) -> bool:
    """Whether the matrix can be read, if there is one; its names and cells are made to fit."""
    if "matrix" not in results:
        return all(isinstance(results.get(key, []), list) for key in ("stages", "tasks", "homes"))
    try:
        for key in ("stages", "tasks"):
            results[key] = [text(name) for name in results[key]]
        if len(set(results["tasks"])) < len(results["tasks"]):
            return False
        results["homes"] = [home if type(home) is int else None for home in results.get("homes") or [None] * 10**4]
        results["homes"] = results["homes"][: len(results["tasks"])]
        results["not_learned"] = _texts(results.get("not_learned"))
        results["baseline"] = _by_task(results.get("baseline"))
        results["matrix"] = {
            text(measure): [[number(cell) for cell in row] for row in rows]
            for measure, rows in results["matrix"].items()
        }
        ScoreMatrix.from_results(results)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError):
        return False
    return True
