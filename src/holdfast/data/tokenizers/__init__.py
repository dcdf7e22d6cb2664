"""Tokenizers: bytes by default, or any that the `tokenizers` library can load."""

from holdfast.data.tokenizers.base import ChatFormat, Placed, Tokenizer, model_vocab_size
from holdfast.data.tokenizers.load import load_tokenizer

__all__ = ["ChatFormat", "Placed", "Tokenizer", "load_tokenizer", "model_vocab_size"]
