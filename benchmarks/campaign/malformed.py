"""Run folders as no run leaves them: files that are missing, torn, of other kinds, with other types, or hostile."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.conversion import from_yaml, to_yaml_text

FILES = ("config.yaml", "metrics.jsonl", "results.json")
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 10**400, 1e308, -1e308, "", "text", "²", "9" * 6000, [], [[]], {},
    {"a": {"b": []}}, [None], [1, 2, 3], {"": None}, "\ud800", "\x1b[2J\x00", "<script>alert(1)</script>",
    "../../etc", "x" * 100_000,
)  # fmt: skip
Damage = Callable[[Path], None]


def damages(seed: int = 0) -> Iterator[tuple[str, Damage]]:
    """Named ways to damage a run: first each known one, then seeded ones without end."""
    yield from KNOWN.items()
    number = 0
    while True:
        kind, name = (("value", "flip", "cut", "line")[number % 4], FILES[number // 4 % 3])
        chance = random.Random(f"{seed} {number}")
        yield f"{kind} {name} {number}", _seeded(kind, name, chance)
        number += 1


def _seeded(kind: str, name: str, chance: random.Random) -> Damage:
    return {"value": _other_value, "flip": _flipped, "cut": _cut, "line": _other_line}[kind](name, chance)


def _other_value(name: str, chance: random.Random) -> Damage:
    """Another value in some place of a file."""

    def damage(run: Path) -> None:
        path = run / name
        if name == "config.yaml":
            path.write_text(to_yaml_text(_changed(from_yaml(path.read_bytes()), chance)), errors="replace")
        elif name == "results.json":
            path.write_text(_json(_changed(json.loads(path.read_bytes()), chance)))
        else:
            lines = path.read_text().splitlines()
            for index in chance.sample(range(len(lines)), 8):
                lines[index] = _json(_changed(json.loads(lines[index]), chance))
            path.write_text("\n".join(lines) + "\n")

    return damage


def _json(value: Any) -> str:
    return json.dumps(value)


def _changed(tree: Any, chance: random.Random) -> Any:
    """A tree with another value, key or length somewhere."""
    if isinstance(tree, dict) and tree:
        key = chance.choice(sorted(tree, key=str))
        if chance.random() < 0.1:
            return {other: value for other, value in tree.items() if other != key}
        return {**tree, key: _changed(tree[key], chance) if chance.random() < 0.7 else chance.choice(VALUES)}
    if isinstance(tree, list) and tree:
        index = chance.randrange(len(tree))
        if chance.random() < 0.2:
            return [*tree[:index], *tree[index + 1 :]]
        return [*tree[:index], _changed(tree[index], chance), *tree[index + 1 :]]
    return chance.choice(VALUES)


def _flipped(name: str, chance: random.Random) -> Damage:
    def damage(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        for _ in range(20):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (run / name).write_bytes(data)

    return damage


def _cut(name: str, chance: random.Random) -> Damage:
    def damage(run: Path) -> None:
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: chance.randrange(len(data))])

    return damage


def _other_line(name: str, chance: random.Random) -> Damage:
    def damage(run: Path) -> None:
        lines = (run / name).read_bytes().split(b"\n")
        for _ in range(5):
            lines.insert(chance.randrange(len(lines)), chance.choice(LINES))
        (run / name).write_bytes(b"\n".join(lines))

    return damage


LINES = (
    b"", b"{", b"null", b"[]", b"3", b'"text"', b"\xff\xfe\x00", b"{}", b'{"kind": "train"}', b'{"kind": 3, "step": 1}',
    b'{"kind": "train", "step": "1", "tokens": []}', b'{"kind": "train", "step": -5, "tokens": -5, "loss": 1}',
    b'{"kind": "train", "step": 1, "tokens": 1e400, "loss": NaN}', b"[" * 100_000, b'{"a":' * 100_000,
    b'{"kind": "evaluation", "step": 1, "tokens": 1, "row": 99, "scores": {"a": 3}}',
    b'{"kind": "evaluation", "step": 1, "tokens": 1, "row": -1, "scores": {"a": {"accuracy": "high"}}}',
    b'{"kind": "evaluation", "step": 2, "tokens": 2, "row": 1, "scores": {"a": {"accuracy": 0.5}}, "intervals": 3}',
    b'{"kind": "stage", "step": 1, "tokens": 1, "name": {"a": 1}, "beta": "x"}', b'{"kind": "checkpoint", "step": 3, '
    b'"tags": "final"}', b'{"kind": "train", "step": ' + b"9" * 5000 + b"}", b"x" * 3_000_000,
)  # fmt: skip


def _write(name: str, data: str | bytes) -> Damage:
    return lambda run: (run / name).write_bytes(data.encode() if isinstance(data, str) else data) and None


def _append(name: str, data: bytes) -> Damage:
    return lambda run: (run / name).open("ab").write(data) and None


def _folder(name: str) -> Damage:
    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return damage


def _pipe(name: str) -> Damage:
    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return damage


def _link(name: str, target: str) -> Damage:
    def damage(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)

    return damage


def _gone(name: str) -> Damage:
    return lambda run: (run / name).unlink()


def _evaluations(data: bytes | None) -> Damage:
    """All files of the evaluations exchanged; None puts pipes there."""

    def damage(run: Path) -> None:
        for path in [path for path in run.glob("evaluations/*/*") if path.is_file()]:
            path.unlink()
            if data is None:
                os.mkfifo(path)
            else:
                path.write_bytes(data)

    return damage


def _checkpoint(data: bytes | None) -> Damage:
    """A checkpoint whose manifest is something else; None makes it a pipe."""

    def damage(run: Path) -> None:
        path = run / "checkpoints" / "10" / "manifest" / "metadata"
        path.parent.mkdir(parents=True)
        if data is None:
            os.mkfifo(path)
        else:
            path.write_bytes(data)

    return damage


def _both(*damages: Damage) -> Damage:
    def damage(run: Path) -> None:
        for each in damages:
            each(run)

    return damage


def _matrix(tasks: Any, homes: Any, rows: Any, **more: Any) -> Damage:
    """Results of one stage with such a matrix."""
    results = {"finished": True, "stages": ["a"], "tasks": tasks, "homes": homes, "matrix": {"accuracy": rows}}
    return _write("results.json", json.dumps(results | more))


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
_TYPES = {"a number": "3", "a text": '"text"', "a list": "[1, [2], {}]", "null": "null", "a mapping": "{}"}

KNOWN: dict[str, Damage] = {
    **{f"{name} is missing": _gone(name) for name in FILES[:1] + FILES[2:]},
    **{f"{name} is empty": _write(name, "") for name in FILES},
    **{f"{name} is a folder": _folder(name) for name in (*FILES, "lock")},
    **{f"{name} is a pipe": _pipe(name) for name in (*FILES, "lock", "report.html")},
    **{f"{name} is a link to nothing": _link(name, "nowhere") for name in (*FILES, "lock")},
    **{f"{name} is a link to a device": _link(name, "/dev/zero") for name in (*FILES, "lock")},
    **{f"{name} is a link to itself": _link(name, name) for name in FILES},
    **{f"{name} is binary": _write(name, bytes(range(256)) * 40) for name in (*FILES, "lock")},
    **{f"{name} is {what}": _write(name, f"{text}\n") for name in FILES for what, text in _TYPES.items()},
    **{f"{name} is nested deeply": _write(name, "[" * 50_000 + "\n") for name in FILES},
    "config.yaml is nested in dashes": _write("config.yaml", "- " * 50_000),
    "config.yaml is nested in mappings": _write("config.yaml", "{a: " * 50_000),
    "config.yaml repeats itself": _write("config.yaml", _BOMB),
    "config.yaml has other sections": _write("config.yaml", "job: [1]\ntraining: 3\nstages: {a: 1}\nlogging: text\n"),
    "config.yaml has other options": _write(
        "config.yaml", "job: continual/train/abcd_kl\nstages: [{name: 3, tokens: -1}, 7, null]\ntraining: {seed: [1]}\n"
    ),
    "config.yaml has a huge number": _write("config.yaml", f"training: {{tokens: {'9' * 6000}, batch_size: 1}}\n"),
    "config.yaml reads the environment": _write("config.yaml", "job: ${oc.env:HOME}\ntraining: {seed: '${x.y}'}\n"),
    "metrics.jsonl has no end of line": _write("metrics.jsonl", '{"kind": "train", "step": 1}'),
    "metrics.jsonl has one bad line": _append("metrics.jsonl", b"this is no record\n"),
    "metrics.jsonl has every bad line": _append("metrics.jsonl", b"\n".join(LINES) + b"\n"),
    "metrics.jsonl goes back in time": _append("metrics.jsonl", b'{"kind":"train","step":1,"tokens":1,"loss":2}\n' * 9),
    "metrics.jsonl alone": _both(_gone("config.yaml"), _gone("results.json")),
    "lock is large": _write("lock", b"pid 1 on " + b"x" * 3_000_000),
    "lock names a huge process": _write("lock", f"pid {'9' * 18} on {os.uname().nodename}"),
    "lock names an impossible process": _write("lock", f"pid {'9' * 400} on elsewhere"),
    "evaluations are pipes": _evaluations(None),
    "evaluations are empty": _evaluations(b""),
    "evaluations are of other types": _evaluations(b'{"weights": {"stories": 3}, "id": []}\n[]\n'),
    "a manifest is a pipe": _checkpoint(None),
    "a manifest is of another type": _checkpoint(b'{"model": 3, "tokens": "x"}'),
    "a matrix of other sizes": _matrix(["b"], [9], [[1, 2], [3]]),
    "a matrix of texts": _matrix(["b"], [1], [["x"], [{}]]),
    "tasks of one name": _matrix(["b", "b"], [1, 1], [[0, 1], [1, 0]]),
    "metrics of another type": _matrix(["b"], [1], [[0], [1]], metrics={"accuracy": {"average": "x"}}),
    "evaluations of another type": _matrix(["b"], [1], [[0], [1]], points=[3, {}, {"step": 1, "scores": []}]),
    "averaged weights of another type": _write("results.json", '{"finished": true, "ema": [1], "average": 3}'),
}


def damaged(base: Path, run: Path, damage: Damage) -> None:
    """A copy of a run with some damage done to it."""
    shutil.copytree(base, run)
    damage(run)


NAMES = ("stories", "mnli", "sst2", "arithmetic", "speeches")  # of the made runs that tests and the campaign have


def renamed(run: Path, payload: str) -> None:
    """Put a text into every name and text of a run's files: stages, datasets, tasks, options, questions, answers."""

    def other(value: Any) -> Any:
        if isinstance(value, dict):
            return {_other_name(key, payload): other(item) for key, item in value.items()}
        if isinstance(value, list):
            return [other(item) for item in value]
        return _other_name(value, payload) if isinstance(value, str) else value

    config = run / "config.yaml"
    tree = from_yaml(config.read_bytes())
    tree["data"] = {**(tree.get("data") or {}), "root": payload}
    config.write_text(to_yaml_text(other(tree)))
    results = run / "results.json"
    results.write_text(json.dumps(other(json.loads(results.read_bytes()))))
    for path in [run / "metrics.jsonl", *run.glob("evaluations/*/*.jsonl")]:
        lines = [other(json.loads(line)) for line in path.read_text().splitlines()]
        for line in lines:
            line |= {
                key: payload + line[key] for key in ("prompt", "answer", "chosen") if isinstance(line.get(key), str)
            }
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if path.parent != run:
            path.rename(path.with_name(_other_name(path.stem, payload).replace("/", "_") + ".jsonl"))


def _other_name(name: str, payload: str) -> str:
    return f"{name} {payload}" if name.removesuffix(" stage") in NAMES else name
