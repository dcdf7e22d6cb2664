"""Chats: templates as `transformers` renders them, masks to the token, stores and rows that keep them."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_examples import data_config, write_jsonl
from holdfast.config import configure, merge
from holdfast.data import chat_template, encode
from holdfast.data import prepare as preparation
from holdfast.data.chat_template import ChatError, ChatRenderer
from holdfast.data.config import DataConfig
from holdfast.data.documents import Document, SourceContext
from holdfast.data.encode import encode_documents
from holdfast.data.leaks import check_leaks
from holdfast.data.prepare import prepare
from holdfast.data.rows import IGNORE, Rows
from holdfast.data.sampling import DatasetStyle
from holdfast.data.sources import find_source
from holdfast.data.sources.chats import messages_of
from holdfast.data.store import LOSS_MASK, TokenStore
from holdfast.data.tokenizers import ChatFormat, Tokenizer, load_tokenizer
from holdfast.errors import ConfigError, UserError

HERE = Path(__file__).parent / "chats"
TEMPLATES = ("llama3", "qwen", "mistral", "gemma", "chatml", "zephyr")
TOKENIZERS = ("bytelevel", "sentencepiece")
CHATS = json.loads((HERE / "chats.json").read_text(encoding="utf-8"))
BYTES = load_tokenizer("bytes")
BLOCKS = re.compile(r"\{%(-?)\s*(end)?generation\s*%\}")
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}


def tokenizer_of(name: str, template: str, *, blocks: bool = True) -> Tokenizer:
    """A tokenizer of the golden files with a template, on request without its generation blocks."""
    found = load_tokenizer(HERE / name, eot="<eos>")
    text = (HERE / f"{template}.jinja").read_text(encoding="utf-8")
    if not blocks:
        text = BLOCKS.sub(r"{%\1 if true %}", text.replace("endgeneration", "endif")).replace("generation %}", "x %}")
        text = re.sub(r"\{%(-?)\s*x %\}", r"{%\1 if true %}", text)
    found.chat = ChatFormat({"default": text}, found.chat.tokens)
    return found


def encoded(chat: dict[str, Any], tokenizer: Tokenizer, turns: str = "all") -> tuple[list[int], list[int]]:
    """The ids and the mask of a chat as a store gets them."""
    renderer = ChatRenderer.of(tokenizer, None, turns, "here")
    text, spans = renderer.render(messages_of(chat["messages"]), chat.get("tools"))
    flat, _, mask = encode_documents([Document("0", prompt="x", rendered=text, spans=spans)], tokenizer)
    assert mask is not None
    assert len(flat) == len(mask)
    return flat.tolist(), mask.tolist()


def checked(golden: dict[str, Any], chat: dict[str, Any], tokenizer: Tokenizer) -> None:
    if "refused" in golden:
        with pytest.raises(ChatError, match=golden["refused"]):
            encoded(chat, tokenizer)
        return
    # The end of text is ours: it is added after the template's last token, outside the loss.
    ids, mask = encoded(chat, tokenizer)
    assert ids == [*golden["ids"], tokenizer.eot_id]
    assert mask == [*golden["mask"], 0]
    assert sum(mask) > 0


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_golden_files_hold_to_the_token(name: str, template: str) -> None:
    golden = json.loads((HERE / name / "golden.json").read_text(encoding="utf-8"))[template]
    marked, plain = tokenizer_of(name, template), tokenizer_of(name, template, blocks=False)
    assert "generation %}" not in plain.chat.templates["default"]
    for title, chat in CHATS.items():
        checked(golden[title], chat, marked)
        checked(golden[title], chat, plain)  # without blocks turns are found by rendering what stands before them


@pytest.mark.extra
@pytest.mark.parametrize("name", TOKENIZERS)
def test_transformers_renders_and_masks_the_same(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install holdfast[hf]")
    for template in TEMPLATES:
        folder = tmp_path / template
        folder.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((HERE / name / file).read_bytes())
        (folder / "chat_template.jinja").write_bytes((HERE / f"{template}.jinja").read_bytes())
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"})
        )
        theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder, eot="<eos>")
        for chat in CHATS.values():
            given = {"conversation": chat["messages"], "tools": chat.get("tools")}
            try:
                found = theirs.apply_chat_template(**given, return_dict=True, return_assistant_tokens_mask=True)
            except Exception as error:
                golden: dict[str, Any] = {"refused": str(error)}
            else:
                golden = {"ids": list(found["input_ids"]), "mask": list(found["assistant_masks"])}
            checked(golden, chat, ours)


def test_the_bos_token_of_a_template_is_the_only_one() -> None:
    for name in TOKENIZERS:
        tokenizer = tokenizer_of(name, "llama3")
        ids, mask = encoded(CHATS["one turn"], tokenizer)
        assert ids.count(0) == 1  # <s>, which the tokenizer itself would add too
        assert ids[0] == 0
        assert mask[0] == 0


def test_an_end_that_the_template_writes_is_not_written_twice() -> None:
    tokenizer = load_tokenizer(HERE / "bytelevel", eot="</s>")
    tokenizer.chat = ChatFormat(
        {"default": (HERE / "mistral.jinja").read_text(encoding="utf-8")}, tokenizer.chat.tokens
    )
    ids, mask = encoded(CHATS["one turn"], tokenizer)
    assert ids[-1] == tokenizer.eot_id
    assert ids.count(tokenizer.eot_id) == 1
    assert mask[-1] == 1  # the assistant says it


@pytest.mark.parametrize("blocks", [True, False])
def test_only_the_last_turn_counts_on_request(blocks: bool) -> None:
    tokenizer = tokenizer_of("bytelevel", "chatml", blocks=blocks)
    every, last = (encoded(CHATS["several turns"], tokenizer, turns) for turns in ("all", "last"))
    assert every[0] == last[0]
    first = "".join(map(str, last[1])).index("1")
    assert last[1][first:] == every[1][first:]
    assert tokenizer.decode([token for token, on in zip(*last, strict=True) if on]) == "You're welcome.<|im_end|>"


def test_bytes_have_chatml_and_masks_between_bytes() -> None:
    ids, mask = encoded(CHATS["several turns"], BYTES)
    said = [message["content"] for message in CHATS["several turns"]["messages"] if message["role"] == "assistant"]
    assert BYTES.decode([token for token, on in zip(ids, mask, strict=True) if on]) == "".join(
        f"{content}<|im_end|>" for content in said
    )
    assert BYTES.decode(ids).startswith(
        "<|im_start|>user\n  Grüße! 🌊 \n<|im_end|>\n<|im_start|>assistant\n Hallo, 世界 🐚"
    )


def test_chatml_shows_tools_and_calls() -> None:
    ids, mask = encoded(CHATS["tools"], BYTES)
    text = BYTES.decode(ids)
    assert "Höhe der Flut" in text
    assert text.count("You know the tides.") == 1
    said = BYTES.decode([token for token, on in zip(ids, mask, strict=True) if on])
    assert '<tool_call>\n{"name": "tide", "arguments": {"hour": 7}}\n</tool_call><|im_end|>' in said
    assert "3.2 m\n" not in said.partition("At seven")[0]


def test_thoughts_that_a_template_drops_from_earlier_turns_are_no_hindrance() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat = ChatFormat({"default": template})
    chat = [{"role": role, "content": f"{role}{at}"} for at in range(3) for role in ("user", "assistant")]
    text, spans = ChatRenderer.of(tokenizer, None, "all", "here").render(chat)
    assert [text[a:b] for a, b in spans] == ["assistant0</>", "assistant1</>", "<think></think>assistant2</>"]


def test_a_template_that_rewrites_the_past_is_refused_unless_the_last_turn_is_enough() -> None:
    template = "{% for m in messages %}{{ messages|length if not loop.last else '' }}{{ m.content }};{% endfor %}"
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat = ChatFormat({"default": template})
    with pytest.raises(ChatError, match=r"loss_turns: last|generation"):
        ChatRenderer.of(tokenizer, None, "all", "here").render(messages_of(CHATS["several turns"]["messages"]))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 'xxxxxxxxxx' * 1000000000 }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ 'x' * 10000 }}{% endfor %}{% endfor %}",
    ],
)
def test_templates_stay_in_their_sandbox(template: str) -> None:
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat = ChatFormat({"default": template})
    chat = [{"role": "user", "content": "Hi"}]
    try:
        text = ChatRenderer.of(tokenizer, None, "all", "here").render(chat).text
    except ChatError:
        text = ""
    assert text == ""
    assert len(chat) == 1


def test_a_store_does_not_depend_on_the_day() -> None:
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat = ChatFormat({"default": "{{ strftime_now('%d %b %Y') }}"})
    assert ChatRenderer.of(tokenizer, None, "all", "here").prompt([{"role": "user", "content": "?"}]) == "26 Jul 2024"


def test_where_templates_are_found(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((HERE / "bytelevel" / "tokenizer.json").read_bytes())
    config: dict[str, Any] = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}
    write = (tmp_path / "tokenizer_config.json").write_text
    write(json.dumps({**config, "chat_template": "one"}))
    assert load_tokenizer(tmp_path).chat == ({"default": "one"}, {"bos_token": "<s>", "eos_token": "</s>"})
    assert load_tokenizer(tmp_path / "tokenizer.json").chat.templates == {"default": "one"}
    several = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    write(json.dumps({**config, "chat_template": several}))
    found = load_tokenizer(tmp_path)
    assert found.chat.templates == {"default": "one", "tool_use": "two"}
    chat = [{"role": "user", "content": "?"}]
    assert ChatRenderer.of(found, None, "all", "here").render(chat).text == "one"
    assert ChatRenderer.of(found, None, "all", "here").render(chat, [{"name": "f"}]).text == "two"
    assert ChatRenderer.of(found, "tool_use", "all", "here").render(chat).text == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    found = load_tokenizer(tmp_path)
    assert found.chat.templates["default"] == "three"
    found.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").chat == found.chat
    assert load_tokenizer(tmp_path / "saved").fingerprint == found.fingerprint
    with pytest.raises(ConfigError, match=r"chat_template: got 'nosuch'.*default, tool_use, chatml"):
        ChatRenderer.of(found, "nosuch", "all", "data/sources/a/chat_template")
    write("not json")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def user(tmp_path: Path, **source: Any) -> DataConfig:
    values = {"data": {"cache": str(tmp_path / "cache"), "sources": {"mine": source}}}
    return configure(DataConfig, merge([DataConfig], values))


def many(count: int = 60) -> list[dict[str, Any]]:
    """Chats of one to three turns."""
    return [
        {
            "messages": [
                {"role": role, "content": f"{role} {number}.{turn} " + "ß" * (number % 7)}
                for turn in range(1 + number % 3)
                for role in ("user", "assistant")
            ]
        }
        for number in range(count)
    ]


def test_a_path_alone_is_enough(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = many()
    write_jsonl(tmp_path / "chat.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    (tmp_path / "chat.json").write_text(json.dumps(rows), encoding="utf-8")
    write_jsonl(tmp_path / "root" / "talk" / "train.jsonl", rows)
    found = []
    for name in ("chat.jsonl", "chat.parquet", "chat.json"):
        data = user(tmp_path, path=str(tmp_path / name))
        source = find_source("mine", data)
        assert source.kind == "chat", name
        found.append([each._replace(id="") for each in source.documents("train", SourceContext(data, BYTES))])
    source, data = find_source("talk", data_config(tmp_path)), data_config(tmp_path)
    found.append([each._replace(id="") for each in source.documents("train", SourceContext(data, BYTES))])
    assert all(each == found[0] for each in found)
    assert (
        found[0][0].rendered
        == "<|im_start|>user\nuser 0.0 <|im_end|>\n<|im_start|>assistant\nassistant 0.0 <|im_end|>\n"
    )
    assert found[0][1].prompt == "user 1.0 ß\nassistant 1.0 ß\nuser 1.1 ß"


def test_sharegpt_is_understood(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "chat.jsonl", [SHAREGPT])
    data = user(tmp_path, path=str(tmp_path / "chat.jsonl"))
    (document,) = find_source("mine", data).documents("train", SourceContext(data, BYTES))
    assert document.rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    assert (document.prompt, document.answer) == ("Hi", "\nHello")


def test_rows_with_a_text_stay_texts(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "both.jsonl", [{"text": "plain", **SHAREGPT}])
    data = user(tmp_path, path=str(tmp_path / "both.jsonl"))
    assert find_source("mine", data).kind == "text"
    data = user(tmp_path, path=str(tmp_path / "both.jsonl"), messages="conversations")
    assert find_source("mine", data).kind == "chat"
    data = user(tmp_path, path=str(tmp_path / "both.jsonl"), text="body")
    context = SourceContext(data)
    assert not list(find_source("mine", data).documents("train", context))
    assert context.broken.examples["missing field"][0]["detail"].endswith("; for chats set messages: conversations")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"messages": []}, "not a chat"),
        ({"messages": [{"role": "user"}]}, "not a chat"),
        ({"messages": ["Hi"]}, "not a chat"),
        ({"other": 1}, "missing field"),
        ({"messages": [{"from": "martian", "value": "Hi"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not only text"),
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": "{"}, "bad tools"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid UTF-8"),
        ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "invalid UTF-8"),
        ({"messages": [{"role": "system", "content": "no"}]}, "the template refuses the chat"),
    ],
)
def test_what_is_no_chat_is_counted_with_its_place(row: dict[str, Any], kind: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "chat.jsonl", [*many(1), row])
    data = user(tmp_path, path=str(tmp_path / "chat.jsonl"), chat_template=str(HERE / "gemma.jinja"))
    context = SourceContext(data, BYTES)
    assert len(list(find_source("mine", data).documents("train", context))) == 1
    assert dict(context.broken.counts) == {kind: 1}
    assert context.broken.examples[kind][0]["line"] == 2


def test_the_template_and_the_turns_tell_stores_apart(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "chat.jsonl", many())
    one = load_tokenizer(HERE / "bytelevel")
    other = tokenizer_of("bytelevel", "zephyr")
    found = {
        find_source("mine", data).fingerprint(SourceContext(data, tokenizer))
        for tokenizer in (one, other)
        for turns in ("all", "last")
        for data in [user(tmp_path, path=str(tmp_path / "chat.jsonl"), loss_turns=turns)]
    }
    assert len(found) == 4


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    write_jsonl(tmp_path / "chat.jsonl", many())
    data = user(tmp_path, path=str(tmp_path / "chat.jsonl"))
    return prepare("mine", "train", data=data, tokenizer=BYTES, progress=False)


def test_rows_train_on_the_assistant_alone(store: TokenStore) -> None:
    assert store.loss_mask is not None
    for style in (DatasetStyle.PADDED, DatasetStyle.PACKED):
        rows = Rows(store, style, 300)
        arrays = rows.rows(range(len(rows)))
        seen, counted = [], 0
        for row in range(len(rows)):
            for segment in range(1, int(arrays.segment_ids[row].max()) + 1):
                here = arrays.segment_ids[row] == segment
                y = arrays.y[row][here]
                seen.append(BYTES.decode(y[y != IGNORE]))
                counted += int((y != IGNORE).sum())
        expected = []
        for index in range(store.num_documents):
            ids = store.tokens(index)
            parts = BYTES.decode(ids).split("<|im_start|>assistant\n")[1:]
            expected.append("".join(part.partition("\n<|im_start|>")[0].rstrip("\n") for part in parts))
        assert seen == expected
        assert rows.mean_loss_tokens * len(rows) == counted == int(store.loss_mask.sum())
        every = Rows(store, style, 300, loss_on="all")
        assert every.mean_loss_tokens == every.mean_tokens


def test_a_chat_that_does_not_fit_loses_the_left_of_its_prompt_first(store: TokenStore) -> None:
    rows = Rows(store, DatasetStyle.PADDED, 40)
    arrays = rows.rows(range(len(rows)))
    assert rows.num_truncated == store.num_documents
    assert ((arrays.y != IGNORE).sum(1) > 0).all()
    assert rows.mean_loss_tokens * len(rows) == (arrays.y != IGNORE).sum()


def test_a_damaged_mask_is_found_and_made_again(store: TokenStore, tmp_path: Path, capfd: Any) -> None:
    before = {path.name: path.read_bytes() for path in store.path.iterdir()}
    content = bytearray(before[LOSS_MASK])
    content[7] ^= 1
    (store.path / LOSS_MASK).write_bytes(bytes(content))
    data = user(tmp_path, path=str(tmp_path / "chat.jsonl"))
    again = prepare("mine", "train", data=data, tokenizer=BYTES, progress=False)
    Rows(again, DatasetStyle.PADDED, 300)
    assert f"{LOSS_MASK} does not have its checksums" in capfd.readouterr().err
    assert {path.name: path.read_bytes() for path in again.path.iterdir()} == before


def test_an_interrupted_preparation_ends_with_the_same_bytes(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in store.path.iterdir()}
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(preparation, "JOURNAL_SECONDS", -1.0)
    data = configure(DataConfig, merge([DataConfig], {"data": {
        "cache": str(tmp_path / "other"), "sources": {"mine": {"path": str(tmp_path / "chat.jsonl")}}}}))  # fmt: skip
    original, calls = encode.encode_documents, []

    def failing(*arguments: Any) -> encode.Encoded:
        calls.append(1)
        if len(calls) in (3, 7):
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(encode, "encode_documents", failing)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare("mine", "train", data=data, tokenizer=BYTES, progress=False)
    made = prepare("mine", "train", data=data, tokenizer=BYTES, progress=False)
    assert {path.name: path.read_bytes() for path in made.path.iterdir()} == before


@pytest.fixture
def silent(tmp_path: Path) -> DataConfig:
    """Chats under a template whose generation blocks never hold a turn."""
    write_jsonl(tmp_path / "chat.jsonl", many())
    (tmp_path / "silent.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'bot' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}"
    )
    return user(tmp_path, path=str(tmp_path / "chat.jsonl"), chat_template=str(tmp_path / "silent.jinja"))


def test_a_template_that_puts_nothing_into_the_loss_is_refused(silent: DataConfig) -> None:
    made = prepare("mine", "train", data=silent, tokenizer=BYTES, progress=False)
    for style in (DatasetStyle.PADDED, DatasetStyle.PACKED):
        with pytest.raises(UserError, match=r"mine/train: none of its .* rows .* data/sources/mine/chat_template"):
            Rows(made, style, 64)
        assert Rows(made, style, 64, loss_on="all").mean_loss_tokens > 0


def test_chats_that_only_begin_alike_are_no_leak(tmp_path: Path) -> None:
    def chat(number: int) -> dict[str, Any]:
        draw = random.Random(number)
        words = ["".join(draw.choices("abcdefghij", k=4)) for _ in range(16)]
        system = "You are a patient and careful guide to the sea, its tides and all that lives in it."
        said = (system, "Hello", "Hi", " ".join(words), "Yes")
        roles = ("system", "user", "assistant", "user", "assistant")
        return {"messages": [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]}

    write_jsonl(tmp_path / "a.jsonl", [chat(number) for number in range(100)])
    write_jsonl(tmp_path / "b.jsonl", [chat(number) for number in range(95, 120)])
    data = user(tmp_path, path=str(tmp_path / "a.jsonl"), validation=str(tmp_path / "b.jsonl"))
    made = {
        split: prepare("mine", split, data=data, tokenizer=BYTES, progress=False) for split in ("train", "validation")
    }
    (leak,) = check_leaks({"mine": made["validation"]}, {"mine": made["train"]}, BYTES, max_leak=1.0, cache=None)
    assert leak.leaked == 5
    ids, length = made["train"].tokens(1), made["train"].question_lengths(0, 100)[1]
    assert BYTES.decode(ids[length:]) == "Yes<|im_end|>\n"


def test_stores_of_texts_and_tasks_are_what_they_were(tmp_path: Path) -> None:
    """Their names, which hash all that their content depends on, are those of the version before chats."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"Text {n}.", "q": f"{n}?", "a": n % 2} for n in range(40)])
    names = []
    for source in ({}, {"prompt": "{q}", "labels": {"0": " no", "1": " yes"}, "label": "a"}):
        data = user(tmp_path, path=str(tmp_path / "a.jsonl"), **source)
        made = prepare("mine", "train", data=data, tokenizer=BYTES, progress=False)
        assert not (made.path / LOSS_MASK).exists()
        assert made.loss_mask is None
        names.append(made.path.name)
    assert names == ["mine-train-2c72387a8121e3bf", "mine-train-6559b2894c112e06"]


def test_jinja_is_imported_late() -> None:
    import subprocess
    import sys

    code = "import holdfast.data.prepare, sys; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert chat_template.NAMED.keys() == {"chatml"}


def test_masks_are_whole_numbers_of_tokens() -> None:
    """A token with one character of the assistant counts; blanks before a span do not."""
    tokenizer = load_tokenizer(HERE / "bytelevel", eot="<eos>")
    text = "user: yes assistant: yes"
    start = text.rindex(" yes")
    flat, records, mask = encode_documents([Document("0", prompt="x", rendered=text, spans=((start, 24),))], tokenizer)
    assert mask is not None
    assert tokenizer.decode(flat[mask == 1]) == " yes"
    assert int(records["prompt"][0]) == int(np.flatnonzero(mask)[0])


def test_a_character_of_several_tokens_is_in_the_loss_as_a_whole() -> None:
    tokenizer = load_tokenizer(HERE / "bytelevel", eot="<eos>")
    text = "say 🦀 twice"
    flat, _, mask = encode_documents([Document("0", prompt="x", rendered=text, spans=((4, 5),))], tokenizer)
    assert mask is not None
    assert mask.sum() > 1
    assert tokenizer.decode(flat[mask == 1]).strip() == "🦀"
