"""Any readable model as a folder of the hub's kind, checked weight by weight on the way."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import jax

from holdfast.data.config import TokenizerConfig
from holdfast.execution.topology import Topology
from holdfast.models.config import ModelSpec
from holdfast.models.pretrained.card import imported_card
from holdfast.models.pretrained.read import load_params
from holdfast.models.pretrained.source import open_model
from holdfast.models.pretrained.tokenizers import find_tokenizer, tokenizer_for
from holdfast.models.pretrained.write import check_free, save_pretrained


@dataclass(frozen=True)
class Imported:
    """What was imported."""

    family: str
    spec: ModelSpec
    tokenizer: str | None


def import_model(source: str, folder: Path, *, dtype: str = "float32") -> Imported:
    """Read a model and write it as a folder that `architecture/from` and transformers take.

    Args:
        source: a folder, a llama2.c file, or a hub name.
        dtype: type of the weights to write.
    """
    check_free(folder)
    model = open_model(source, weights=True)
    spec = dataclasses.replace(model.spec(), param_dtype=dtype)
    tokenizer = tokenizer_for(source, TokenizerConfig()) if find_tokenizer(source) else None
    params = load_params(source, spec, local_mesh())
    family = model.family.model_type
    card = imported_card(source, family, spec)
    save_pretrained(params, spec, folder, tokenizer, family=family, card=card)
    return Imported(family, spec, tokenizer.name if tokenizer else None)


def local_mesh() -> jax.sharding.Mesh:
    """One device whose memory is the host's: weights only pass through."""
    return Topology.build(devices=jax.devices("cpu")[:1]).mesh
