"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, List, Optional

import typer

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
