"""Models in and out: `import` and `export`."""

from pathlib import Path
from typing import Annotated, Optional

import typer


def import_command(
    source: Annotated[str, typer.Argument(help="Folder with safetensors, llama2.c's file or folder, or a hub name.")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    dtype: Annotated[str, typer.Option("--dtype", help="Type of the weights: float32 or bfloat16.")] = "float32",
) -> None:
    """Write a pretrained model as a folder to train from.

    It is checked weight by weight; a run starts from it by `architecture.from=OUT`.

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


def export_command(
    run: Annotated[str, typer.Argument(help="RUN or RUN@CHECKPOINT (a step, boundary_1, best_0, final).")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    family: Annotated[
        Optional[str],
        typer.Option(
            "--family", help="llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, gpt2, ...; by itself if it can."
        ),
    ] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="The adapters alone, as peft loads them, instead of a merged model.")
    ] = False,
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights (training/ema) instead.")] = False,
    push: Annotated[
        Optional[str], typer.Option("--push", help="Also put it on the Hugging Face hub, as NAME or OWNER/NAME.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: a new repository is private.")] = False,
) -> None:
    """Write a model as a folder that transformers loads.

    `transformers.AutoModelForCausalLM.from_pretrained(OUT)` loads it; a model card with the curriculum and the score
    matrices lies beside it. With --push the folder also goes to the hub, as `hf auth login` or HF_TOKEN allows.

    Example: holdfast export runs/general/default/quickstart@final my-model
    """
    from holdfast.errors import UserError

    if adapters and ema:
        raise UserError("--adapters and --ema: choose one; the average is exported merged")
    if private and push is None:
        raise UserError("--private: is about the repository of --push NAME; name one")
    if push is not None:
        from holdfast.analysis.hub import check_name

        check_name(push)
    from holdfast.analysis.export import export_run

    done = export_run(run, out, family, adapters=adapters, ema=ema)
    what = "adapters of a model with " if adapters else ""
    print(f"{out}: {done.family}, {what}{done.spec.num_parameters():,} parameters of step {done.step:,}")
    if push is not None:
        from holdfast.analysis.hub import push_folder

        print(push_folder(out, push, f"{run}, step {done.step:,}", private=private))
