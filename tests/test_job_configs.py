"""The configuration of every job: complete, documented, and no value can be nonsense unnoticed."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.config import build, configure, flatten, merge, plain, read_yaml, schema, to_yaml
from holdfast.errors import UserError
from holdfast.registry import jobs
from holdfast.training.config import config_classes

JOBS = jobs.names()
NONSENSE = [{"no such key": ["nonsense"]}, float("nan")]


@pytest.mark.parametrize("job", JOBS)
def test_defaults_are_written_read_and_valid(job: str, tmp_path: Path) -> None:
    classes = config_classes(job)
    (tmp_path / "x.yaml").write_text(to_yaml(build(*classes), classes, job), encoding="utf-8")
    read = read_yaml(tmp_path / "x.yaml")
    assert read.pop("job") == job
    cfg = merge(classes, read)
    assert flatten(cfg, classes) == {path: plain(entry.default) for path, entry in schema(*classes).items()}
    for cls in classes:
        assert configure(cls, cfg) == cls()


@pytest.mark.parametrize("job", JOBS)
def test_every_option_has_a_line_of_help(job: str) -> None:
    options = schema(*config_classes(job)).values()
    assert not [entry.path for entry in options if not entry.help or "\n" in entry.help]


def complaint(classes: list[type], values: dict[str, Any]) -> str:
    """What a user is told about these values; empty when they are taken."""
    try:
        merge(classes, values)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("job", JOBS)
def test_nonsense_at_any_path_is_named_by_that_path(job: str) -> None:
    """Every option of every job; one that several jobs share, field for field, is tried with the first of them."""
    classes = config_classes(job)
    earlier = [schema(*config_classes(other)) for other in JOBS[: JOBS.index(job)]]
    own = [path for path, entry in schema(*classes).items() if not any(entry == seen.get(path) for seen in earlier)]
    owners = {path: [each for each in classes if path in schema(each)] for path in own}
    told = {(path, str(value)): complaint(owners[path], {path: value}) for path in own for value in NONSENSE}
    assert not {key: said for key, said in told.items() if not said.startswith(key[0])}
