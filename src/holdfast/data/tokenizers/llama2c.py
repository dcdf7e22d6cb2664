"""The tokenizer files of llama2.c (`tok512.bin`): sentencepiece's BPE with a score for every piece.

Sentencepiece puts a blank before a text, so the first piece of a document stands for one byte that is not there.
"""

import struct
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

SPECIAL = ("<unk>", "<s>", "</s>")  # ids 0, 1, 2


def read_llama2c(path: Path) -> "RustTokenizer":
    """The same tokenizer as an object of the `tokenizers` library."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as RustTokenizer

    pieces = _read(path)
    spelled = [*SPECIAL, *(piece.decode("utf-8", "replace") for piece, _ in pieces[len(SPECIAL) :])]
    vocab = {piece: index for index, piece in enumerate(spelled)}
    scores = {piece: score for piece, (_, score) in zip(spelled, pieces, strict=True)}
    # Pieces are merged best score first; each may be reached from any two pieces it is made of.
    merges = [
        (left, right)
        for piece in sorted(spelled[len(SPECIAL) :], key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab and not piece.startswith("<0x")
    ]
    rust = RustTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.normalizer = normalizers.Prepend(" ")
    rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return rust


def _read(path: Path) -> list[tuple[bytes, float]]:
    """Every piece with its score, in the order of ids."""
    content = path.read_bytes()
    pieces, place = [], 4  # after the length of the longest piece
    try:
        while place < len(content):
            score, length = struct.unpack_from("<fi", content, place)
            place += 8
            if length < 0 or place + length > len(content):
                raise ValueError("a piece reaches past the end of the file")
            pieces.append((content[place : place + length], score))
            place += length
        if len(pieces) < 259:
            raise ValueError(f"only {len(pieces)} pieces")
    except (struct.error, ValueError) as error:
        raise ConfigError("tokenizer/name", str(path), "a tokenizer file of llama2.c", f"{error}") from None
    return pieces
