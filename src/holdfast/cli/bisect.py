"""`holdfast bisect`: when was it lost, and to which rows?"""

import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from holdfast.cli.options import table
from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.analysis.bisect import Bisection, Told

STOPPED = 130  # the exit code of what Ctrl-C ended


def bisect_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run with checkpoints.")],
    task: Annotated[Optional[str], typer.Option("--task", help="The evaluation that was lost.")] = None,
    example: Annotated[Optional[str], typer.Option("--example", help="The id of one question that was lost.")] = None,
    dataset: Annotated[Optional[str], typer.Option("--dataset", help="The dataset whose loss rose.")] = None,
    since: Annotated[Optional[int], typer.Option("--since", min=0, help="Step to look from.")] = None,
    until: Annotated[Optional[int], typer.Option("--until", min=1, help="Step to look up to; the newest.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most questions or held-out rows.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random rows in the proof.")] = 0,
    html: Annotated[Optional[Path], typer.Option("--html", help="Where the page goes; RUN/bisect-NAME.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Find when something was lost, and to which rows.

    Takes the run's steps again from its checkpoints, exactly, and measures more and more closely. Ranks the rows of the
    steps in which it was lost by their effect through the optimizer; then the proof: the same steps without these rows,
    beside 39 random sets of as many. Writes a page and a JSON file beside it.

    Example: holdfast bisect runs/general/default/first --task lists
    """
    if dataset is not None and (task is not None or example is not None):
        raise UserError("--dataset: --task and --example are of questions; leave them out, or --dataset")
    if task is None and example is None and dataset is None:
        raise UserError("name what was lost: --task T, --example ID or --dataset D")
    if since is not None and until is not None and until <= since:
        raise UserError(f"--until {until}: expected a step after --since {since}")
    if html is not None and html.suffix == ".json":
        raise UserError(f"--html {html}: expected a page, such as {html.with_suffix('.html')}; the JSON goes beside it")
    try:
        found = _found(run, task, example, dataset, since, until, limit, seed)
    except KeyboardInterrupt:
        print("\nstopped; nothing was written", file=sys.stderr)
        raise typer.Exit(STOPPED) from None
    _show(found, as_json=as_json)
    _write(found, run, html, say=not as_json)


def _found(
    run: Path,
    task: str | None,
    example: str | None,
    dataset: str | None,
    since: int | None,
    until: int | None,
    limit: int,
    seed: int,
) -> "Bisection":
    from holdfast.analysis.bisect import bisect
    from holdfast.analysis.replay import Replay
    from holdfast.analysis.target import find_target

    replay = Replay(run)
    try:
        target = find_target(replay.trainer, task=task, example=example, dataset=dataset, limit=limit)
        say, tell = (lambda line: print(line, file=sys.stderr)), Progress()
        found = bisect(replay, target, since=since, until=until, seed=seed, say=say, tell=tell)
        tell.close()
        return found
    finally:
        replay.close()


class Progress:
    """Shows on stderr what is being done, at most once a second and whenever something else begins."""

    def __init__(self) -> None:
        self._doing, self._shown = "", 0.0
        self._live = sys.stderr.isatty()

    def __call__(self, told: "Told") -> None:
        """Show how far the work is."""
        now = time.monotonic()
        if told.doing != self._doing:
            self.close()
            self._doing = told.doing
        elif not self._live or now - self._shown < 1:
            return
        self._shown = now
        end = "\r" if self._live else "\n"
        count = f" {told.done}/{told.total}" if self._live else " ..."
        print(f"{told.doing}{count}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line."""
        if self._live and self._doing:
            print(file=sys.stderr)


def _show(found: "Bisection", *, as_json: bool) -> None:
    """The rows ranked first, and the sentence last."""
    from holdfast.analysis.bisect import to_json

    if as_json:
        print(json.dumps(to_json(found), indent=1, ensure_ascii=False, allow_nan=False))
        return
    from rich.console import Console
    from rich.text import Text

    from holdfast.report.bisect import ROW_HEAD, after, cells, sentence

    console = Console(highlight=False)
    if found.rows:
        rows = [cells(rank, row) for rank, row in enumerate(found.rows[:12], 1)]
        console.print(table(ROW_HEAD, [[*row[:-1], row[-1][:120]] for row in rows], name="source"))
    for line in (*found.notes, sentence(found), after(found)):
        if line:
            console.print(Text(line), soft_wrap=True)


def _write(found: "Bisection", run: Path, html: Path | None, *, say: bool) -> None:
    from holdfast.analysis.bisect import to_json
    from holdfast.execution.files import write_json
    from holdfast.report.bisect import write_bisection

    name = re.sub(r"[^\w.-]+", "_", found.target).strip("._-")[:80] or "target"
    page = html or run / f"bisect-{name}.html"
    write_bisection(found, page)
    write_json(page.with_suffix(".json"), to_json(found))
    if say:
        print(page)
