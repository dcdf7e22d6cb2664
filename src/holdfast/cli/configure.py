"""Before a run: what there is (`jobs`), and a config to start from (`configure`)."""

import difflib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

from holdfast import registry
from holdfast.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from holdfast.cli.configs import JobConfig
    from holdfast.data.sources.suites import Suite

SUITE_JOB = "continual/train/abcd_kl"
SUITE_BATCH = 32  # rows of a step, where nothing else is said


def jobs_command() -> None:
    """List jobs, datasets, evaluations, models and the rest.

    The rest: optimizers, schedules, penalties and trackers.

    Example: holdfast jobs
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from holdfast.methods import BESIDE

    console = Console(highlight=False)

    def show(title: str, lines: Mapping[str, str]) -> None:
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, told in lines.items():
            table.add_row(Text(name), Text(told))
        console.print(table)

    for kind, plugins in registry.KINDS.items():
        show(kind, {name: plugins.help(name) for name in plugins})
        console.print()
        if plugins is registry.methods:
            show("beside methods", BESIDE)
            console.print()
    show("suites", {name: suite.help for name, suite in _suites().items()})


# What one would change first, in the order in which it is thought of.
SHORT = (
    "training/dataset",
    "training/tokens",
    "training/batch_size",
    "training/replay",
    "training/fade/overlap",
    "training/seed",
    "optimization/lr",
    "optimization/kl/estimator",
    "optimization/kl/beta",
    "optimization/kl/betas",
    "optimization/kl/reference_update_stages",
    "architecture/preset",
    "architecture/block_size",
    "tokenizer/name",
    "eval/evaluations",
    "eval/limit",
    "logging/validation_interval",
    "logging/checkpoint_interval",
)


SuiteName = Annotated[
    Optional[str],
    typer.Option("--suite", help="A whole curriculum: text-classification, standard-cl, trace or superni."),
]
SuiteOrder = Annotated[Optional[int], typer.Option("--order", help="Which of the suite's published orders, from 1.")]
SuiteTasks = Annotated[
    Optional[str], typer.Option("--tasks", help="Tasks of the suite with commas, in an order of your own.")
]
SuiteExamples = Annotated[
    Optional[int], typer.Option("--examples", help="Training examples of each task of the suite; its own number.")
]


def configure_command(
    job: Annotated[
        str, typer.Argument(help="Name of a job; `holdfast jobs` lists them. With --suite it may be left out.")
    ],
    out: Annotated[Optional[Path], typer.Argument(help="YAML file to write.")] = None,
    overrides: Annotated[
        Optional[List[str]], typer.Argument(help="path=value …, such as training.batch_size=32")
    ] = None,
    preset: Annotated[
        Optional[str],
        typer.Option("--preset", help="A small start: laptop, quickstart, own-data or pretrained."),
    ] = None,
    suite: SuiteName = None,
    order: SuiteOrder = None,
    tasks: SuiteTasks = None,
    examples: SuiteExamples = None,
    short: Annotated[bool, typer.Option("--short", help="Only what one would change; the rest has defaults.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every option, also with --preset.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write the config of a job, or a small one to start from.

    Every option of the job with its default and a comment; with --preset a short file that runs as it is (laptop,
    quickstart) or after its paths are edited (own-data, pretrained); with --suite the curriculum of a published suite
    with its order and evaluations, whose data is looked for in data/root and then on the hub.

    Example: holdfast configure continual/train/abcd_kl my.yaml --preset laptop
    Example: holdfast configure --suite trace --order 1 trace.yaml architecture.from=my-model data.root=DATA
    """
    from holdfast.cli.configs import job_config
    from holdfast.config import to_yaml
    from holdfast.execution.files import write_atomically

    if short and full:
        raise UserError("--short and --full: choose one")
    given = [] if overrides is None else overrides
    if suite is not None:
        _check_alone(preset, short)
        job, out, given = _shifted(job, out, given)
    elif (order, tasks, examples) != (None, None, None):
        raise UserError("--order, --tasks and --examples are of a suite: add --suite NAME")
    if out is None:
        raise UserError("configure: the file to write is missing: holdfast configure JOB OUT.yaml")
    if out.exists() and not force:
        raise UserError(f"{out}: the file is there already; choose another name or add --force")
    text, values = read_preset(preset, job)
    if suite is not None:
        values = suite_values(suite, order, tasks, examples, given)
    resolved = job_config(job, values, given)
    if full or (preset is None and suite is None and not short):
        text = to_yaml(resolved.cfg, resolved.classes, job)
    elif suite is not None:
        text = to_yaml(only_changed(resolved, ("training/batch_size", "training/fade/overlap")), resolved.classes, job)
    elif preset is None or given:  # the comments of a preset are of its own values
        named = SHORT if preset is None else ()
        text = to_yaml(only_changed(resolved, named), resolved.classes, job)
    write_atomically(out, text)
    print(f"wrote {out}; `holdfast plan {out}` shows what it will do, `holdfast run {out}` does it")


def read_preset(name: str | None, job: str) -> tuple[str, dict[str, object]]:
    """The text of a preset for a job, and the options that it sets; no preset sets none."""
    if name is None:
        return "", {}
    text, made_for, values = open_preset(name)
    if made_for != job:
        raise UserError(f"--preset {name}: is for the job {made_for}, got {job}; name that job")
    return text, values


def open_preset(name: str) -> tuple[str, str, dict[str, object]]:
    """The text of a preset, the job that it is for, and the options that it sets."""
    from holdfast.config import JOB_KEY, read_yaml

    folder = resources.files("holdfast.cli") / "presets"
    known = sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".yaml"))
    if name not in known:
        raise UserError(f"--preset {name}: there is no such starting point; expected one of {', '.join(known)}")
    with resources.as_file(folder / f"{name}.yaml") as path:
        text, values = path.read_text(encoding="utf-8"), read_yaml(path)
    return text, str(values.pop(JOB_KEY)), values


def only_changed(resolved: "JobConfig", named: tuple[str, ...]) -> "DictConfig":
    """The options that differ from their defaults, and those that are named."""
    from omegaconf import OmegaConf

    from holdfast.config import build, flatten

    defaults = flatten(build(*resolved.classes), resolved.classes)
    kept = OmegaConf.create({})
    for path, value in flatten(resolved.cfg, resolved.classes).items():
        if path in named or value != defaults[path]:
            OmegaConf.update(kept, path.replace("/", "."), value)
    return kept


def _suites() -> "dict[str, Suite]":
    from holdfast.data.sources.suites import SUITES

    return SUITES


def _check_alone(preset: str | None, short: bool) -> None:
    if preset is not None or short:
        raise UserError("--suite: it is a whole config of its own; leave out --preset and --short")


def _shifted(job: str, out: Path | None, overrides: list[str]) -> tuple[str, Path, list[str]]:
    """The job, the file and the overrides, where the job may have been left out."""
    if job in registry.jobs:
        if out is None:
            raise UserError("configure: the file to write is missing: holdfast configure --suite NAME OUT.yaml")
        return job, out, overrides
    rest = [] if out is None else [str(out)]
    return SUITE_JOB, Path(job), [*rest, *overrides]


def suite_values(
    name: str, order: int | None, tasks: str | None, examples: int | None, overrides: Sequence[str] = ()
) -> dict[str, object]:
    """The options of a suite: a stage and an evaluation for each task.

    Args:
        order: one of its published orders, counted from 1; the first unless given.
        tasks: an order of one's own, with commas.
        examples: training examples of each task; None is the suite's own number.
        overrides: what is said about batches and rows there counts in the length of stages.
    """
    known = _suites()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"--suite {name}: there is no such suite; {hint}known: {', '.join(known)}")
    suite = known[name]
    if examples is not None and examples < 1:
        raise UserError(f"--examples {examples}: expected at least 1")
    values: dict[str, dict[str, object]] = {key: dict(part) for key, part in suite.values.items()}
    batch_size = _number(overrides, "training.batch_size", SUITE_BATCH)
    block_size = _number(overrides, "architecture.block_size", int(str(values["architecture"]["block_size"])))
    stages = []
    chosen = _order(name, suite, order, tasks)
    for task in chosen:
        rows = (suite.examples if examples is None else examples) * suite.epochs.get(task, 1)
        tokens = -(-rows // batch_size) * batch_size * block_size
        data = [{"name": _dataset(suite, task), "style": "PADDED"}]
        stages.append({"name": task, "tokens": tokens, "data": data})
    values.setdefault("training", {}).update({"batch_size": batch_size, "fade": {"overlap": 0.0}})
    evaluations = [_dataset(suite, task) for task in chosen]
    values.setdefault("eval", {}).update({"evaluations": evaluations, "limit": suite.held_out})
    return {"stages": stages, **values}


def _order(name: str, suite: "Suite", order: int | None, tasks: str | None) -> Sequence[str]:
    if tasks is None:
        number = 1 if order is None else order
        if not 1 <= number <= len(suite.orders):
            raise UserError(f"--order {number}: {name} has the orders 1 to {len(suite.orders)}")
        return suite.orders[number - 1]
    if order is not None:
        raise UserError("--order and --tasks: choose one")
    chosen = [task.strip() for task in tasks.split(",") if task.strip()]
    for task in chosen:
        if _dataset(suite, task) == "":
            raise UserError(f"--tasks {task}: {name} has no such task; known: {', '.join(suite.datasets)}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise UserError(f"--tasks {tasks}: expected at least one task, each once")
    return chosen


def _dataset(suite: "Suite", task: str) -> str:
    """The dataset of a task; any task file will do for a suite of task files."""
    from holdfast.data.sources.suites import SUPERNI_PREFIX, task_file_source

    if task in suite.datasets:
        return suite.datasets[task]
    own = f"{SUPERNI_PREFIX}{task}"
    of_files = any(name.startswith(SUPERNI_PREFIX) for name in suite.datasets.values())
    return own if of_files and task_file_source(own) is not None else ""


def _number(overrides: Sequence[str], path: str, default: int) -> int:
    """The whole number that an override gives an option, or its default."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key.replace("/", ".") == path and value.isdigit() and int(value) > 0:
            default = int(value)
    return default
