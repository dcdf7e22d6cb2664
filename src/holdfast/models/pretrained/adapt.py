"""The options under `architecture/` beside a pretrained model's own: what it has is taken, the rest is refused."""

import dataclasses

from holdfast.errors import ConfigError, UserError
from holdfast.models.config import DEFAULT_PRESET, ArchitectureConfig, ModelSpec, options_of
from holdfast.models.pretrained.families import FREE
from holdfast.models.pretrained.source import load_spec


def adapt(architecture: ArchitectureConfig, *, block_size: int, vocab_size: int) -> ModelSpec:
    """The specification of the model that `architecture/from` names, for rows of that many tokens.

    Args:
        vocab_size: of the tokenizer; the model's may be larger.
    """
    source = architecture.source
    assert source is not None, "there is nothing to adapt to"
    if architecture.preset != DEFAULT_PRESET:
        raise ConfigError(
            "architecture/preset",
            architecture.preset,
            f"the default, since architecture/from = {source} brings its own options",
            "remove one of the two",
        )
    if block_size < 1:
        raise ConfigError("architecture/block_size", block_size, "at least 1 token", "set it to 512")
    try:
        spec = load_spec(source, block_size)
    except ConfigError:
        raise
    except UserError as error:
        raise UserError(f"architecture/from: {error}") from None
    free = {}
    for name, value in options_of(architecture).items():
        if value is None:
            continue
        if name in FREE:
            free[name] = value
        elif value != getattr(spec, name):
            raise ConfigError(
                f"architecture/{name}",
                value,
                f"{getattr(spec, name)!r}, which {source} has",
                "leave it null, or remove architecture/from",
            )
    if vocab_size > spec.vocab_size:
        raise ConfigError(
            "tokenizer/name",
            vocab_size,
            f"a tokenizer of at most {spec.vocab_size} tokens, the vocabulary of {source}",
            "leave tokenizer/name at its default: the model's own tokenizer is used",
        )
    return dataclasses.replace(spec, **free)
