"""Everything about a run that can be checked before a device is touched; nothing here imports JAX."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from holdfast.curriculum import Curriculum
from holdfast.data.sources import find_source
from holdfast.data.tokenizers import Tokenizer, model_vocab_size
from holdfast.errors import ConfigError, UserError
from holdfast.evaluation.tasks import find_task
from holdfast.execution.checkpoints import named_checkpoint
from holdfast.models.config import ModelSpec, resolve
from holdfast.models.pretrained import tokenizer_for
from holdfast.training.configs import BaseTrainerConfig
from holdfast.training.settings import Settings
from holdfast.training.trainable import Trainable, trainable_for

C = TypeVar("C", bound=BaseTrainerConfig)


@dataclass(frozen=True)
class Blueprint(Generic[C]):
    """A validated run: its options and what they resolve to."""

    settings: Settings[C]
    curriculum: Curriculum
    tokenizer: Tokenizer
    model: ModelSpec
    trainable: Trainable | None  # the part of the model that is trained, None where that is all of it


def draw(settings: Settings[C], curriculum: Curriculum) -> Blueprint[C]:
    """Check the names and numbers of a run; what is wrong is a UserError that names its path."""
    _check_places(settings)
    for source in curriculum.sources:
        with _at(curriculum.spelling.data.format(curriculum.home(source))):
            find_source(source.name, settings.data)
    for index, name in enumerate(settings.trainer.evaluations):
        with _at(f"eval/evaluations/{index}"):
            find_task(name, settings.data)
    architecture = settings.architecture
    with _at("architecture/from") if architecture.source else contextlib.nullcontext():
        tokenizer = tokenizer_for(architecture.source, settings.tokenizer)
    # A pretrained model has the vocabulary that it has; ours is rounded up.
    vocab_size = tokenizer.vocab_size if architecture.source else model_vocab_size(tokenizer)
    model = resolve(architecture, block_size=curriculum.block_size, vocab_size=vocab_size)
    trainable = trainable_for(settings.optim.freeze, settings.optim.lora, model)
    return Blueprint(settings, curriculum, tokenizer, model, trainable)


def _check_places(settings: Settings[C]) -> None:
    """Folders and runs that are named must be there."""
    root = settings.data.root
    if root is not None and not Path(root).expanduser().is_dir():
        raise ConfigError("data/root", root, "a folder that is there", "create it, or leave data/root null")
    if settings.penalty.reference_from is not None:
        with _at("optimization/kl/reference_from"):
            named_checkpoint(settings.penalty.reference_from)


@contextlib.contextmanager
def _at(path: str) -> Iterator[None]:
    """Name the config path in an error that does not."""
    try:
        yield
    except UserError as error:
        raise error if str(error).startswith(path) else UserError(f"{path}: {error}") from error
