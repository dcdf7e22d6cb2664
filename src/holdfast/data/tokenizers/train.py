"""Train a byte-level BPE tokenizer on text."""

from collections.abc import Iterable

from holdfast.data.tokenizers.bpe import LibraryTokenizer
from holdfast.errors import ConfigError

EOT = "<|endoftext|>"
PAD = "<|pad|>"
SMALLEST = 256 + 2  # every byte, and the special tokens


def train_tokenizer(texts: Iterable[str], vocab_size: int, name: str) -> LibraryTokenizer:
    """A byte-level BPE of `vocab_size` tokens, the two special ones included; the same texts give the same one."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST:
        raise ConfigError("--vocab-size", vocab_size, f"at least {SMALLEST}: every byte and two special tokens")
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rust.train_from_iterator(texts, trainer)
    return LibraryTokenizer(rust, name, EOT, PAD)
