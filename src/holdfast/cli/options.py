"""What commands share: arguments and options, and tables."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

from holdfast.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

Config = Annotated[Path, typer.Argument(help="YAML config file.")]
Overrides = Annotated[Optional[List[str]], typer.Argument(help="path=value …, such as training.seed=1")]
Name = Annotated[Optional[str], typer.Option("--name", help="Name of the run; the config's file name.")]
Project = Annotated[str, typer.Option("--project", help="Folder above the group.")]
Group = Annotated[str, typer.Option("--group", help="Folder above the run.")]
Out = Annotated[Path, typer.Option("--out", help="Folder of all runs.")]
Parent = Annotated[
    Optional[str], typer.Option("--from", help="RUN@CHECKPOINT whose past this new run shares (a branch).")
]
InitFrom = Annotated[
    Optional[str], typer.Option("--init-from", help="RUN[@CHECKPOINT] whose weights alone this run starts from.")
]


def run_and_checkpoints(run: str, given: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """The folder and the checkpoints of `RUN[@CHECKPOINT[,CHECKPOINT]]`, none where none is named.

    Args:
        given: what `--checkpoint` names instead.
    """
    from holdfast.execution.checkpoints import split_name

    folder, name = split_name(run)
    named = [] if str(folder) == str(Path(run)) else [part.strip() for part in name.split(",") if part.strip()]
    if named and given:
        raise UserError(f"{run} and --checkpoint {given[0]}: name checkpoints in one of the two places")
    return folder, named or list(given)


_HUB_NAME, _PATTERN = re.compile(r"[\w.-]+/[\w.-]+"), "*?["


def named_data(name: str, taken: Collection[str] = ()) -> tuple[str, str | None]:
    """Data on the command line: the name it gets in a config, and its path; a dataset that has a name needs none.

    Args:
        name: a file, folder, glob or hub name such as owner/name; else the name of a dataset.
        taken: names that stand for something else already.

    >>> named_data("tinystories"), named_data("owner/my-texts"), named_data("notes/*.txt", ["notes"])
    (('tinystories', None), ('my-texts', 'owner/my-texts'), ('notes_', 'notes/*.txt'))
    """
    path = Path(name).expanduser()
    pattern = any(mark in name for mark in _PATTERN) and not path.exists()
    if not (path.exists() or pattern or _HUB_NAME.fullmatch(name)):
        return name, None
    named = path
    while pattern and any(mark in named.name for mark in _PATTERN):
        named = named.parent
    key = re.sub(r"[^\w.-]+", "_", named.stem if named.is_file() else named.name).strip("._-")[:60] or "data"
    while key in taken:
        key += "_"
    return key, str(path) if path.exists() else name


_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ?(%|[KMGT]iB))?|\?|")


def table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None, name: str | None = None
) -> "Table":
    """A table whose cells are plain text: a bracket in them is a bracket, not markup.

    Args:
        name: the title of the column that is never broken or cut, because commands take what stands there.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, head in enumerate(titles):
        cells = [row[index] for row in rows]
        numbers = any(cells) and all(_NUMBER.fullmatch(cell) for cell in cells)
        whole = max(map(len, [head, *cells])) if head == name else None
        made.add_column(
            Text(head),
            justify="right" if numbers else "left",
            overflow="fold",
            min_width=whole,
            no_wrap=numbers or head == name,
        )
    for row in rows:
        made.add_row(*map(Text, row))
    return made
