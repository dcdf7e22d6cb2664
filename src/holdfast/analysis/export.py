"""A checkpoint of a run as a folder that other programs load."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from holdfast.data.tokenizers import Tokenizer, load_tokenizer
from holdfast.errors import UserError
from holdfast.execution.checkpoints import CheckpointInfo, named_checkpoint
from holdfast.models.config import ModelSpec
from holdfast.models.derived import abstract_params
from holdfast.models.family import decoder, described_spec
from holdfast.models.parameters import leaves_of
from holdfast.models.pretrained import family_for, save_pretrained
from holdfast.models.pretrained.write import check_free, local_mesh, run_card
from holdfast.training.weights import abstract_adapters, checkpoint_params, read_arrays


@dataclass(frozen=True)
class Exported:
    """What was exported."""

    family: str
    spec: ModelSpec
    step: int


def export_run(
    run: str,
    folder: Path,
    family: str | None = None,
    *,
    adapters: bool = False,
    ema: bool = False,
    positions: int | None = None,
) -> Exported:
    """Write the model of `RUN[@CHECKPOINT]` with its tokenizer and a model card; adapters are merged.

    Args:
        family: as which it is written; None takes the first that can express it.
        adapters: write them alone, as the `peft` library reads them.
        ema: write the average of the weights (`training/ema`) instead of the weights.
        positions: that the model is said to have, of rotary ones; None: as many tokens as the run's rows had.
    """
    check_free(folder)
    info = named_checkpoint(run)
    described = info.manifest["model"]
    spec = described_spec(described)
    if spec is None:
        raise UserError(
            f"{info.path}: a model of the family {described['family']} has no form that other programs know"
        )
    chosen = family_for(spec, family).model_type  # refused before anything is read
    run_dir = info.path.parent.parent
    name = run.partition("@")[2] or "latest"
    card = run_card(run_dir, f"{name} (average of the weights)" if ema else name, info.manifest, chosen, spec)
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    if adapters:
        _save_adapters(info, spec, folder, tokenizer, chosen, card)
        return Exported(chosen, spec, info.step)
    params = checkpoint_params(info, decoder(spec), local_mesh(), "ema" if ema else "params")
    if positions is not None and spec.positions == "rotary":  # no weight depends on how many there are
        spec = dataclasses.replace(spec, block_size=positions)
    save_pretrained(params, spec, folder, tokenizer, family=chosen, card=card)
    return Exported(chosen, spec, info.step)


def _save_adapters(
    info: CheckpointInfo, spec: ModelSpec, folder: Path, tokenizer: Tokenizer, family: str, card: str
) -> None:
    from holdfast.models.pretrained.write import save_adapters

    config, base = info.manifest["config"], info.manifest.get("base")
    if base is None:
        raise UserError(f"{info.path}: it has no adapters: it was trained without optimization/lora/rank")
    target = abstract_adapters(info, decoder(spec), abstract_params(decoder(spec), local_mesh()))
    found = leaves_of(read_arrays(info, {"params": target})["params"])
    alpha, source = config["optimization/lora/alpha"], base["from"] or config.get("architecture/from") or ""
    card = card.replace("library_name: transformers", "library_name: peft", 1)
    save_adapters(found, spec, folder, tokenizer, alpha=alpha, family=family, base=source, card=card)
