"""`holdfast export`: a checkpoint as a folder that other programs load."""

from pathlib import Path
from typing import Annotated, Optional

import typer


def export_command(
    run: Annotated[str, typer.Argument(help="RUN or RUN@CHECKPOINT (a step, boundary_1, best_0, final).")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    family: Annotated[
        Optional[str],
        typer.Option("--family", help="llama, mistral, qwen2, qwen3, gpt2 or gpt_neox; by itself if it can."),
    ] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="The adapters alone, as peft loads them, instead of a merged model.")
    ] = False,
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights (training/ema) instead.")] = False,
) -> None:
    """Write a model as `transformers.AutoModelForCausalLM.from_pretrained(OUT)` loads it, with a model card.

    Example: holdfast export runs/general/default/quickstart@final my-model
    """
    from holdfast.errors import UserError
    from holdfast.training.export import export_run

    if adapters and ema:
        raise UserError("--adapters and --ema: choose one; the average is exported merged")
    done = export_run(run, out, family, adapters=adapters, ema=ema)
    what = "adapters of a model with " if adapters else ""
    print(f"{out}: {done.family}, {what}{done.spec.num_parameters():,} parameters of step {done.step:,}")
