"""`holdfast prepare`: read and tokenise what a config needs."""

from pathlib import Path
from typing import Annotated, List, Optional

import typer


def prepare_command(
    config: Annotated[Path, typer.Argument(help="YAML config file.")],
    overrides: Annotated[Optional[List[str]], typer.Argument(help="path=value …")] = None,
) -> None:
    """Download or read, tokenise and cache the datasets of a config; `run` does it too when they are missing.

    Example: holdfast prepare my.yaml data.root=/data
    """
    from holdfast.cli.configs import read_config
    from holdfast.training.check import checked
    from holdfast.training.data import load_data

    resolved = read_config(config, overrides or [])
    drawn = checked(resolved.job, resolved.cfg)
    data = load_data(
        drawn.curriculum,
        drawn.settings.data,
        drawn.tokenizer,
        evaluations=drawn.settings.trainer.evaluations,
        progress=True,
    )
    for source, rows in data.train.items():
        held_out = data.validation[source]
        print(
            f"{source.name} ({source.style.name}): {rows.prepared.num_documents:,} documents, "
            f"{rows.prepared.num_tokens:,} tokens, {len(rows):,} rows; validation {len(held_out):,} rows"
        )
    for leak in data.leaks:
        print(f"leak: {leak}")
