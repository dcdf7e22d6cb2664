"""Before a run: what there is (`jobs`), and a config to start from (`configure`)."""

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, List, Optional

import typer

from holdfast import registry
from holdfast.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from holdfast.cli.configs import JobConfig


def jobs_command() -> None:
    """List jobs, datasets, evaluations, models and the rest.

    The rest: optimizers, schedules, penalties and trackers.

    Example: holdfast jobs
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for kind, plugins in registry.KINDS.items():
        table = Table(title=kind, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name in plugins:
            table.add_row(Text(name), Text(plugins.help(name)))
        console.print(table)
        console.print()


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


def configure_command(
    job: Annotated[str, typer.Argument(help="Name of a job; `holdfast jobs` lists them.")],
    out: Annotated[Path, typer.Argument(help="YAML file to write.")],
    overrides: Annotated[
        Optional[List[str]], typer.Argument(help="path=value …, such as training.batch_size=32")
    ] = None,
    preset: Annotated[
        Optional[str],
        typer.Option("--preset", help="A small start: laptop, quickstart, own-data or pretrained."),
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Only what one would change; the rest has defaults.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every option, also with --preset.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write the config of a job, or a small one to start from.

    Every option of the job with its default and a comment; with --preset a short file that runs as it is (laptop,
    quickstart) or after its paths are edited (own-data, pretrained).

    Example: holdfast configure continual/train/abcd_kl my.yaml --preset laptop
    """
    from holdfast.cli.configs import job_config
    from holdfast.config import to_yaml
    from holdfast.execution.files import write_atomically

    if short and full:
        raise UserError("--short and --full: choose one")
    if out.exists() and not force:
        raise UserError(f"{out}: the file is there already; choose another name or add --force")
    text, values = read_preset(preset, job)
    resolved = job_config(job, values, overrides or [])
    if full or (preset is None and not short):
        text = to_yaml(resolved.cfg, resolved.classes, job)
    elif preset is None or overrides:  # the comments of a preset are of its own values
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
