"""`holdfast configure`: write a job's complete config."""

from pathlib import Path
from typing import Annotated, List, Optional

import typer


def configure_command(
    job: Annotated[str, typer.Argument(help="Name of a job; `holdfast jobs` lists them.")],
    out: Annotated[Path, typer.Argument(help="YAML file to write.")],
    overrides: Annotated[
        Optional[List[str]], typer.Argument(help="path=value …, such as training.batch_size=32")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write the full default config of a job, every option with a comment.

    Example: holdfast configure continual/train/abcd_kl my.yaml training.batch_size=32
    """
    from holdfast.cli.configs import job_config
    from holdfast.config import to_yaml
    from holdfast.errors import UserError
    from holdfast.execution.files import write_atomically

    if out.exists() and not force:
        raise UserError(f"{out}: the file is there already; choose another name or add --force")
    resolved = job_config(job, {}, overrides or [])
    write_atomically(out, to_yaml(resolved.cfg, resolved.classes, job))
    print(f"wrote {out}; `holdfast plan {out}` shows what it will do, `holdfast run {out}` does it")
