"""Tasks of lm-evaluation-harness as evaluations of a run: `harness:NAME` (extra `harness`).

A name is looked up before training, in the folder of `eval/harness/include_path` first and then among the harness's
own tasks. Nothing here imports JAX.
"""

import difflib
import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from holdfast.errors import ConfigError, UserError
from holdfast.evaluation.config import EvaluationConfig

PREFIX = "harness:"
FOLDER_PATH = "eval/harness/include_path"


@dataclass(frozen=True)
class HarnessTask:
    """A task, a group or a tag of the harness.

    Args:
        name: as `eval/evaluations` has it, with the prefix.
        include_path: folder with task definitions of one's own.
        num_fewshot: solved examples before each question; None leaves it to the task.
    """

    name: str
    include_path: Optional[str] = None
    num_fewshot: Optional[int] = None

    @property
    def task(self) -> str:
        """The name that the harness knows."""
        return self.name.removeprefix(PREFIX)


def is_harness(name: str) -> bool:
    """Whether a name is of a task of the harness.

    >>> is_harness("harness:arc_easy"), is_harness("arithmetic")
    (True, False)
    """
    return name.startswith(PREFIX)


def check_folder(config: EvaluationConfig) -> None:
    """Refuse a folder of task definitions that is not there, also where no task asks for it yet."""
    folder = config.harness_include_path
    if folder is not None and not Path(folder).expanduser().is_dir():
        raise ConfigError(FOLDER_PATH, folder, "a folder with task definitions (YAML) that is there")


def harness_task(name: str, config: EvaluationConfig, path: str) -> HarnessTask:
    """The task of that name; a missing extra, folder or task is an error that names the config path."""
    check_folder(config)
    folder = config.harness_include_path
    task = HarnessTask(name, folder, config.harness_num_fewshot)
    known = task_manager(task, at=f"{path}: {name}").all_tasks
    if task.task not in known:
        near = difflib.get_close_matches(task.task, known, n=1)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else "`lm_eval ls tasks` lists them"
        where = f" or of {FOLDER_PATH}" if folder is not None else ""
        raise ConfigError(path, name, f"the name of a task of lm-evaluation-harness{where}", hint)
    return task


def task_manager(task: HarnessTask, at: str) -> Any:
    """The harness's `TaskManager` that knows a task: of one's own folder alone where that is enough.

    Its own thousands of definitions take seconds to read.
    """
    import_harness("lm_eval.tasks", at)
    if task.include_path is not None:
        own = _manager(task.include_path, False)
        if task.task in own.all_tasks:
            return own
    return _manager(task.include_path, True)


@functools.lru_cache(maxsize=8)
def _manager(folder: str | None, defaults: bool) -> Any:
    tasks = importlib.import_module("lm_eval.tasks")
    path = None if folder is None else str(Path(folder).expanduser())
    try:
        return tasks.TaskManager(include_path=path, include_defaults=defaults)
    except Exception as error:  # YAML has its own types of errors
        if folder is None:
            raise
        raise ConfigError(FOLDER_PATH, folder, f"task definitions that can be read ({_first_line(error)})") from None


def import_harness(module: str, at: str) -> Any:
    """A module of the harness; without the extra a message that names it.

    Args:
        at: the option that asks for it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{at}: lm-evaluation-harness cannot be imported ({error}); pip install 'holdfast[harness]'"
        ) from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
