"""Writes the golden files of the chat templates beside it: what `transformers` makes of chats.json.

The templates are of our own making and behave as the published ones of their names do, with `{% generation %}` blocks.
Run it after a change of a template or of chats.json: python tests/data/chats/make_golden.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TEMPLATES = ("llama3", "qwen", "mistral", "gemma", "chatml", "zephyr")
SPECIAL = (
    "<s>",
    "</s>",
    "<eos>",
    "<pad>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
)
SETTINGS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
VOCAB = 420


def make_tokenizers() -> Iterator[tuple[str, Any]]:
    """A byte-level tokenizer and one in sentencepiece's manner; both add a bos token of their own where asked."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    texts = [(HERE / "chats.json").read_text(encoding="utf-8"), *(p.read_text() for p in sorted(HERE.glob("*.jinja")))]
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    yield "bytelevel", made

    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = [AddedToken(f"<0x{value:02X}>", special=False, normalized=False) for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=2 * VOCAB, special_tokens=[*special, AddedToken("<unk>", special=True), *pieces], show_progress=False
    )
    made.train_from_iterator([text.replace(" ", "▁") for text in texts], trainer)
    made.post_processor = bos
    yield "sentencepiece", made


def main() -> None:
    from transformers import PreTrainedTokenizerFast

    chats = json.loads((HERE / "chats.json").read_text(encoding="utf-8"))
    for name, rust in make_tokenizers():
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        rust.save(str(folder / "tokenizer.json"), pretty=False)
        (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS) + "\n", encoding="utf-8")
        golden: dict[str, dict[str, Any]] = {}
        for template in TEMPLATES:
            theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **SETTINGS)
            theirs.chat_template = (HERE / f"{template}.jinja").read_text(encoding="utf-8")
            golden[template] = {title: rendered(theirs, chat) for title, chat in chats.items()}
        lines = json.dumps(golden, ensure_ascii=False, separators=(",", ":")).replace('},"', '},\n"')
        (folder / "golden.json").write_text(lines + "\n", encoding="utf-8")


def rendered(tokenizer: Any, chat: dict[str, Any]) -> dict[str, Any]:
    """What `transformers` makes of a chat: its text, ids and assistant mask, or that it is refused."""
    given = {"conversation": chat["messages"], "tools": chat.get("tools")}
    try:
        text = tokenizer.apply_chat_template(**given, tokenize=False)
        found = tokenizer.apply_chat_template(**given, return_dict=True, return_assistant_tokens_mask=True)
    except Exception as error:
        return {"refused": str(error)}
    return {"text": text, "ids": list(found["input_ids"]), "mask": list(found["assistant_masks"])}


if __name__ == "__main__":
    main()
