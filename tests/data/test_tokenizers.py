"""Tokenizers: exact ids, exact texts, special tokens only where they are wanted."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_examples import GPT2, SHARED, needs_shared
from holdfast.data.config import TokenizerConfig
from holdfast.data.tokenizers import Tokenizer, load_tokenizer, model_vocab_size
from holdfast.data.tokenizers import bpe as bpe_module
from holdfast.data.tokenizers.llama2c import _read
from holdfast.data.tokenizers.train import train_tokenizer
from holdfast.errors import ConfigError

STORIES = [
    "Once upon a time there was a fox.\nThe fox said: 'Ich heiße Fuchs!'\n",
    "A second story, of 12 foxes. 狐",
] * 20


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(STORIES, 300, "trained")


@given(st.text())
@settings(deadline=None)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == list(text.encode())


@given(st.lists(st.text(), max_size=5))
@settings(deadline=None)
def test_a_trained_tokenizer_round_trips_any_text(trained: Tokenizer, texts: list[str]) -> None:
    batch = trained.encode_batch(texts)
    assert [trained.decode(ids) for ids in batch] == texts
    pieces = trained.pieces()
    assert [b"".join(pieces[index] for index in ids).decode() for ids in batch] == texts
    assert all(max(ids, default=0) < trained.vocab_size for ids in batch)


def test_training_gives_the_size_asked_for_and_the_same_tokens_again(trained: Tokenizer) -> None:
    assert trained.vocab_size == 300
    assert train_tokenizer(STORIES, 300, "again").fingerprint == trained.fingerprint
    assert train_tokenizer(STORIES[:1], 300, "other").fingerprint != trained.fingerprint
    with pytest.raises(ConfigError, match="vocab-size"):
        train_tokenizer(STORIES, 100, "small")


def test_special_tokens_are_never_made_from_text(trained: Tokenizer) -> None:
    text = "before <|endoftext|> after <|pad|>"
    ids = trained.encode(text)
    assert trained.eot_id not in ids
    assert trained.pad_id not in ids
    assert trained.decode([*ids, trained.eot_id, trained.pad_id]) == text
    assert trained.token_bytes()[trained.eot_id] == 0


@pytest.mark.parametrize("name", ["bytes", "trained"])
def test_saved_and_loaded_it_is_the_same(name: str, trained: Tokenizer, tmp_path: Path) -> None:
    tokenizer = trained if name == "trained" else load_tokenizer(name)
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.fingerprint, again.eot_id, again.pad_id, again.name, again.vocab_size) == (
        tokenizer.fingerprint, tokenizer.eot_id, tokenizer.pad_id, tokenizer.name, tokenizer.vocab_size,
    )  # fmt: skip
    assert again.encode("A fox, 狐.") == tokenizer.encode("A fox, 狐.")


def test_a_tokenizer_json_by_path_with_chosen_special_tokens(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    swapped = load_tokenizer(TokenizerConfig(str(file), eot="<|pad|>", pad="<|endoftext|>"))
    assert (swapped.eot_id, swapped.pad_id) == (trained.pad_id, trained.eot_id)
    assert swapped.fingerprint != trained.fingerprint
    with pytest.raises(ConfigError, match="tokenizer/eot: got '<nothing>'"):
        load_tokenizer(file, eot="<nothing>")


def test_what_is_said_when_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    for name, said in (
        (str(tmp_path / "nowhere"), "no such file or folder"),
        (str(tmp_path / "empty"), "has no vocab.json and no merges.txt"),
        (str(tmp_path / "broken.json"), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=f"tokenizer/name: .*{said}"):
            load_tokenizer(name)
    with pytest.raises(ConfigError, match="tokenizer/eot"):
        load_tokenizer("bytes", eot="</s>")

    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(ConfigError, match=r"tokenizer/name: got 'some/name', .* some/name/tokenizer.json"):
        load_tokenizer("some/name")


def test_the_models_vocabulary_is_rounded_up(trained: Tokenizer) -> None:
    assert model_vocab_size(load_tokenizer("bytes")) == 320
    assert model_vocab_size(trained) == 320
    trained_size = trained.vocab_size
    try:
        for size, rounded in ((64, 64), (65, 128), (16_385, 16_512), (50_257, 50_304)):
            trained.vocab_size = size
            assert model_vocab_size(trained) == rounded
    finally:
        trained.vocab_size = trained_size


def test_long_texts_are_cut_where_ids_do_not_change(trained: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(STORIES) + "   \n\n  x it's 'so' \t\n1 2\n " * 50
    whole = trained.encode(text)
    monkeypatch.setattr(bpe_module, "SPLIT_CHARACTERS", 3)
    monkeypatch.setattr(bpe_module, "LONGEST_CHARACTERS", 50)
    flat, lengths = trained.encode_flat([text, "", "short", text])
    assert flat.tolist() == [*whole, *trained.encode("short"), *whole]
    assert lengths.tolist() == [len(whole), 0, len(trained.encode("short")), len(whole)]


@needs_shared
def test_gpt2_gives_the_ids_of_the_library_on_all_of_fineweb() -> None:
    from tokenizers import ByteLevelBPETokenizer

    library = ByteLevelBPETokenizer(str(GPT2 / "vocab.json"), str(GPT2 / "merges.txt"))
    tokenizer = load_tokenizer(GPT2)
    files = [SHARED / "data" / "fineweb" / f"{split}.jsonl" for split in ("train", "validation")]
    texts = [json.loads(line)["text"] for file in files for line in file.open(encoding="utf-8")]
    assert len(texts) == 434
    ids = tokenizer.encode_batch(texts)
    assert ids == [encoding.ids for encoding in library.encode_batch(texts)]
    assert [tokenizer.decode(row) for row in ids] == texts
    sizes = tokenizer.token_bytes()
    assert [int(sizes[row].sum()) for row in ids] == [len(text.encode()) for text in texts]
    assert (tokenizer.vocab_size, tokenizer.eot_id, model_vocab_size(tokenizer)) == (50_257, 50_256, 50_304)
    assert tokenizer.dtype is np.uint16


def llama2c_encode(text: str, pieces: list[tuple[bytes, float]]) -> list[int]:
    """llama2.c's own algorithm: characters, or their bytes, then the best-scored pair again and again."""
    ids = {piece: index for index, (piece, _) in enumerate(pieces)}
    tokens: list[int] = []
    for character in " " + text:
        known = ids.get(character.encode())
        tokens += [known] if known is not None else [byte + 3 for byte in character.encode()]
    while True:
        best: tuple[float, int, int] | None = None
        for place in range(len(tokens) - 1):
            merged = ids.get(pieces[tokens[place]][0] + pieces[tokens[place + 1]][0])
            if merged is not None and (best is None or pieces[merged][1] > best[0]):
                best = (pieces[merged][1], place, merged)
        if best is None:
            return tokens
        tokens[best[1] : best[1] + 2] = [best[2]]


@needs_shared
def test_llama2c_tokenizer_does_what_llama2c_does() -> None:
    file = SHARED / "weights" / "stories260K" / "tok512.bin"
    tokenizer = load_tokenizer(file)
    pieces = _read(file)
    lines = (SHARED / "data" / "tinystories" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    for text in [json.loads(line)["text"][:400] for line in lines[:40]] + ["Zoë's naïve 狐\tfox  \n"]:
        ids = tokenizer.encode(text)
        assert ids == llama2c_encode(text, pieces)
        assert tokenizer.decode(ids) == text
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (512, 1)


def test_a_broken_llama2c_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tok.bin").write_bytes(b"\x01\x00\x00\x00" + b"\xff" * 40)
    with pytest.raises(ConfigError, match="tokenizer/name"):
        load_tokenizer(tmp_path / "tok.bin")
