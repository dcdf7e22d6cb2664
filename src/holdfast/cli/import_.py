"""`holdfast import`: a pretrained model as a folder to train from."""

from pathlib import Path
from typing import Annotated

import typer


def import_command(
    source: Annotated[str, typer.Argument(help="Folder with safetensors, llama2.c's file or folder, or a hub name.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    dtype: Annotated[str, typer.Option("--dtype", help="Type of the weights: float32 or bfloat16.")] = "float32",
) -> None:
    """Check a pretrained model weight by weight and write it as a folder for `architecture.from=OUT`.

    Example: holdfast import HuggingFaceTB/SmolLM2-135M smollm2
    """
    from holdfast.errors import UserError
    from holdfast.models.config import DTYPES

    if dtype not in DTYPES:
        raise UserError(f"--dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    from holdfast.models.pretrained import import_model

    done = import_model(source, out, dtype=dtype)
    tokenizer = "with its tokenizer" if done.tokenizer else "without a tokenizer: set tokenizer/name"
    print(f"{out}: {done.family}, {done.spec.num_parameters():,} parameters, {tokenizer}")
    print(f"train from it with architecture.from={out} architecture.block_size=N (at most {done.spec.block_size})")
