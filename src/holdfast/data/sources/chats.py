"""Chats: rows with a list of messages, of roles and contents or as ShareGPT writes them, become documents."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.data.chat_template import ASSISTANT, CLOSE, OPEN, ChatError, ChatRenderer
from holdfast.data.documents import Document, SourceContext
from holdfast.data.sources.templates import BrokenRowError, fill, proper
from holdfast.types import Json, JsonView

FIELDS = ("messages", "conversations")  # where chats are looked for in rows that have no text
SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of one thing; templates know the first


@dataclass(frozen=True)
class Chats:
    """Which field of a row holds a chat, how it is rendered, and which of the assistant's turns count.

    Args:
        field: None is the first of FIELDS that a row has.
        tools: the field with what the assistant may call, a list or the JSON of one.
        turns: `all` or `last`.
        chat_template: a file or a name, as `ChatRenderer.of` takes it.
        path: of the dataset in the configuration.
    """

    field: str | None = None
    tools: str = "tools"
    turns: str = "all"
    chat_template: str | None = None
    group: str | None = None
    path: str = ""

    kind = "chat"

    def fingerprint_of(self, context: SourceContext) -> str:
        """Changes with the documents that the same rows give."""
        own = json.dumps([self.field, self.tools, self.group])
        return f"chat-1 {own} {self._renderer(context).fingerprint if context.tokenizer else ''}"

    def reader(self, context: SourceContext) -> Callable[[JsonView, str], Document]:
        """What makes a document of a row and its id; raises BrokenRowError."""
        renderer = self._renderer(context) if context.tokenizer else None
        return lambda row, id: self._document(row, id, renderer)

    def _renderer(self, context: SourceContext) -> ChatRenderer:
        assert context.tokenizer is not None
        path = f"{self.path}/chat_template" if self.path else "chat_template"
        return ChatRenderer.of(context.tokenizer, self.chat_template, self.turns, path)

    def _document(self, row: JsonView, id: str, renderer: ChatRenderer | None) -> Document:
        messages, tools = messages_of(self._chat(row)), _tools(row.get(self.tools))
        group = "" if self.group is None else fill(self.group, row)
        last = max((at for at, each in enumerate(messages) if each["role"] == ASSISTANT), default=len(messages))
        said = [_plain(message) for message in messages]
        prompt, answer = "\n".join(said[:last]), "\n".join(said[last:])
        if last and answer:
            answer = "\n" + answer
        document = Document(id, prompt=prompt, answer=answer, group=group)
        proper(document.full_text)
        if renderer is None:
            return document
        try:
            text, spans = renderer.render(messages, tools)
        except ChatError as error:
            raise BrokenRowError("the template refuses the chat", str(error)) from None
        return document._replace(rendered=proper(text), spans=spans)

    def _chat(self, row: JsonView) -> Any:
        names = FIELDS if self.field is None else (self.field,)
        for name in names:
            if row.get(name) is not None:
                return row[name]
        has = ", ".join(map(str, row)) or "nothing"
        raise BrokenRowError("missing field", f"{' or '.join(names)} (the row has {has})")


def is_chat(row: JsonView) -> bool:
    """Whether a row that names no text looks like a chat.

    >>> is_chat({"messages": [{"role": "user", "content": "Hi"}]}), is_chat({"text": "Hi"})
    (True, False)
    """
    found = next((row[name] for name in FIELDS if row.get(name) is not None), None)
    return "text" not in row and isinstance(found, list) and all(isinstance(each, Mapping) for each in found)


def messages_of(chat: Any) -> list[Json]:
    """The messages of a chat as templates take them; raises BrokenRowError.

    >>> messages_of([{"from": "human", "value": "Hi"}])
    [{'role': 'user', 'content': 'Hi'}]
    """
    if not isinstance(chat, list) or not chat:
        raise BrokenRowError("not a chat", f"expected a list of messages, got {type(chat).__name__}")
    return [_message(message, number) for number, message in enumerate(chat)]


def _message(message: Any, number: int) -> Json:
    if not isinstance(message, Mapping):
        raise BrokenRowError("not a chat", f"message {number} is {type(message).__name__}, expected role and content")
    # Tables give every message the fields of all of them, empty where it has none.
    found = {key: value for key, value in message.items() if value is not None}
    if "role" not in found and "from" in found:
        speaker = found.pop("from")
        if speaker not in SHAREGPT:
            raise BrokenRowError("unknown role", f"message {number} is from {speaker!r}, not {', '.join(SHAREGPT)}")
        found = {"role": SHAREGPT[speaker], "content": found.pop("value", None), **found}
    if not isinstance(found.get("role"), str):
        raise BrokenRowError("not a chat", f"message {number} has no role")
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = content = "".join(_part(part, number) for part in content)
    if not isinstance(content, str):
        if content is not None or not found.get("tool_calls"):
            raise BrokenRowError("not a chat", f"message {number} has no content that is text")
        found["content"] = ""
    if any(mark in found["content"] for mark in (OPEN, CLOSE)):
        raise BrokenRowError("invalid UTF-8", f"message {number} has a character that Unicode keeps out of texts")
    thought = next((found[name] for name in THOUGHTS if isinstance(found.get(name), str)), None)
    return found if thought is None else {"thinking": thought, **found, THOUGHTS[0]: thought}


def _part(part: Any, number: int) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BrokenRowError("not only text", f"message {number} has a part that is no text")


def _tools(value: Any) -> list[Json] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise BrokenRowError("bad tools", "they are a text, and not JSON") from None
    if value and not (isinstance(value, list) and all(isinstance(each, Mapping) for each in value)):
        raise BrokenRowError("bad tools", f"expected a list of tools, got {type(value).__name__}")
    return value or None


def _plain(message: Json) -> str:
    """What a message says, without a template."""
    calls = message.get("tool_calls")
    try:
        return str(message["content"]) + (json.dumps(calls, ensure_ascii=False) if calls else "")
    except (TypeError, ValueError):
        raise BrokenRowError("not a chat", "its tool calls are no JSON") from None
