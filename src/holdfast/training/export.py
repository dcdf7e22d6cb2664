"""A checkpoint of a run as a folder that other programs load."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.data.tokenizers import load_tokenizer
from holdfast.execution.checkpoints import CheckpointInfo, CheckpointStore, named_checkpoint
from holdfast.models.config import ModelSpec
from holdfast.models.pretrained import abstract_params, family_for, save_pretrained
from holdfast.models.pretrained.card import run_card
from holdfast.models.pretrained.convert import local_mesh
from holdfast.models.pretrained.write import check_free


@dataclass(frozen=True)
class Exported:
    """What was exported."""

    family: str
    spec: ModelSpec
    step: int


def export_run(run: str, folder: Path, family: str | None = None) -> Exported:
    """Write the model of `RUN[@CHECKPOINT]` with its tokenizer and a model card.

    Args:
        family: as which it is written; None takes the first that can express it.
    """
    check_free(folder)
    info = named_checkpoint(run)
    spec = ModelSpec(**info.manifest["model"])
    chosen = family_for(spec, family).model_type  # refused before anything is read
    run_dir = info.path.parent.parent
    name = run.partition("@")[2] or "latest"
    card = run_card(run_dir, name, info.manifest, chosen, spec)
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    save_pretrained(checkpoint_params(info, spec), spec, folder, tokenizer, family=chosen, card=card)
    return Exported(chosen, spec, info.step)


def checkpoint_params(info: CheckpointInfo, spec: ModelSpec) -> Any:
    """The parameters of a checkpoint in host memory."""
    store = CheckpointStore(info.path.parent, read_only=True)
    try:
        return store.restore_part(info.step, {"params": abstract_params(spec, local_mesh())})["params"]
    finally:
        store.close()
