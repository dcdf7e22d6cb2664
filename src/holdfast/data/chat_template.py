"""Chat templates: messages to the text that a model reads, and which of it the assistant says.

A template is Jinja, rendered in its sandbox, as the `transformers` library renders it: the same text, and the same
tokens of the assistant. What the assistant says is what stands in `{% generation %}` blocks; of a template without
them, what a turn adds to the chat before it, the generation prompt excluded, and the white space after the
token that ends it.

A prepared store must not depend on the day on which it was made: for templates that ask for the date, it is always DAY.
"""

import datetime
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import ConfigError, UserError
from holdfast.types import Json

if TYPE_CHECKING:
    import jinja2

    from holdfast.data.tokenizers import Tokenizer

ASSISTANT = "assistant"
DAY = datetime.date(2024, 7, 26)  # the one that Llama 3.1's template names by itself
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # Unicode says that these two are never text
LONGEST = 1 << 26  # characters of a rendered chat
_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function or call) | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
NAMED = {"chatml": CHATML}

Messages = Sequence[Json]
Spans = tuple[tuple[int, int], ...]  # of characters, from and to


class ChatError(Exception):
    """A chat that a template does not render, or of which nobody can tell what the assistant says."""


class Rendered(NamedTuple):
    """A chat as text, and the spans of it that the assistant says."""

    text: str
    spans: Spans


@dataclass(frozen=True)
class ChatRenderer:
    """Renders chats for one tokenizer.

    Args:
        template: Jinja text.
        tools_template: used for chats with tools; the same unless the tokenizer has one of its own for them.
        tokens: what templates know by name: `bos_token`, `eos_token`, …
        turns: `all` of the assistant's turns are its spans, or only the `last`.
    """

    template: str
    tools_template: str
    tokens: Mapping[str, str]
    turns: str = "all"

    @classmethod
    def of(cls, tokenizer: "Tokenizer", chosen: str | None, turns: str, path: str) -> "ChatRenderer":
        """The renderer of a tokenizer.

        Args:
            chosen: a file of a template, the name of one of ours or of the tokenizer's; None is the tokenizer's own,
                else chatml.
            path: of that choice in the configuration.
        """
        own = tokenizer.chat.templates
        if chosen is None:
            template = own.get("default") or next(iter(own.values()), CHATML)
            made = cls(template, own.get("tool_use", template), tokenizer.chat.tokens, turns)
        else:
            template = _chosen(chosen, own, path)
            made = cls(template, template, tokenizer.chat.tokens, turns)
        for text in {made.template, made.tools_template}:
            try:
                _compiled(text)
            except Exception as error:  # whatever Jinja makes of a text that is no template
                where = path if chosen is not None else f"the chat template of the tokenizer {tokenizer.name}"
                raise UserError(f"{where}: it is no Jinja template: {error}") from None
        return made

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with what the same chats become."""
        parts = [self.template, self.tools_template, sorted(self.tokens.items()), self.turns]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def prompt(self, messages: Messages, tools: Sequence[Json] | None = None) -> str:
        """A chat that the assistant goes on from."""
        return _unmarked(self._render(messages, tools, prompted=True)).text

    def end_of_turn(self) -> str:
        """What follows an answer, without white space; empty where nothing does."""
        chat: Messages = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "AnswerAnswer"}]
        return _unmarked(self._render(chat, None)).text.rpartition("AnswerAnswer")[2].strip()

    def render(self, messages: Messages, tools: Sequence[Json] | None = None) -> Rendered:
        """A whole chat; ChatError where the template refuses it."""
        marked = self._render(messages, tools)
        text, spans = _unmarked(marked)
        last = max((index for index, each in enumerate(messages) if each["role"] == ASSISTANT), default=None)
        if last is None:
            return Rendered(text, ())
        if _BLOCK.search(self.tools_template if tools else self.template):
            if self.turns == "last":
                spans = spans[len(_unmarked(self._render(messages[:last], tools)).spans) :] if last else spans
        else:
            turns = [last] if self.turns == "last" else range(last + 1)
            spans = tuple(self._span(text, messages, tools, at) for at in turns if messages[at]["role"] == ASSISTANT)
        return Rendered(text, tuple(span for span in spans if span[0] < span[1]))

    def _span(self, text: str, messages: Messages, tools: Sequence[Json] | None, at: int) -> tuple[int, int]:
        """Where the assistant's turn of that number stands in the text of the whole chat."""
        start = self._start(text, messages[:at], tools)
        end = self._end(text, start, messages, tools, at)
        said, content = text[start:end].rstrip(), str(messages[at]["content"]).strip()
        # White space after a token that ends the turn is the template's; without such a token it is how turns end.
        ended = not content or not said.endswith(content)
        return start, start + len(said) if ended else end

    def _end(self, text: str, start: int, messages: Messages, tools: Sequence[Json] | None, at: int) -> int:
        if at + 1 == len(messages):
            return len(text)
        turn = self._render(messages[: at + 1], tools)
        if text.startswith(turn):
            return len(turn)
        # Some templates leave the thoughts out of all turns but the last: then the whole chat has the turn's end alone.
        if turn.startswith(text[:start]):
            ends = (turn[cut:] for cut in range(start + 1, len(turn)))
            found = next((end for end in ends if text.startswith(end, start)), None)
            following = self._render(messages[: at + 2], tools)
            if found is not None and following.startswith(text[:start] + found):
                return start + len(found)
        raise ChatError(
            f"the template writes turn {at} otherwise once others follow: take loss_turns: last, or a template with "
            "{% generation %} blocks"
        )

    def _start(self, text: str, before: Messages, tools: Sequence[Json] | None) -> int:
        if not before:  # some templates cannot render nothing
            return 0
        for prompted in (True, False):
            prefix = self._render(before, tools, prompted=prompted)
            if text.startswith(prefix):
                return len(prefix)
        raise ChatError(
            f"the template writes what stands before turn {len(before)} otherwise once the turn follows: take a "
            "template with {% generation %} blocks"
        )

    def _render(self, messages: Messages, tools: Sequence[Json] | None, *, prompted: bool = False) -> str:
        template = _compiled(self.tools_template if tools else self.template)
        try:
            pieces = template.generate(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=prompted,
                **self.tokens,
            )
            return "".join(_at_most(pieces, LONGEST))
        except ChatError:
            raise
        except Exception as error:  # a template may do anything to a chat that its author did not think of
            raise ChatError(" ".join(str(error).split()) or type(error).__name__) from None


def _at_most(pieces: Iterator[str], limit: int) -> Iterator[str]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > limit:
            raise ChatError(f"it becomes more than {limit:,} characters")
        yield piece


def _unmarked(marked: str) -> Rendered:
    """The text without the marks of generation blocks, and what stood between them."""
    if OPEN not in marked:
        return Rendered(marked, ())
    parts = re.split(f"[{OPEN}{CLOSE}]", marked)
    marks = re.findall(f"[{OPEN}{CLOSE}]", marked)
    if marks != [OPEN, CLOSE] * (len(marks) // 2):
        raise ChatError("generation blocks of the template lie within each other")
    ends = list(itertools.accumulate(map(len, parts)))
    return Rendered("".join(parts), tuple(zip(ends[0::2], ends[1::2], strict=False)))


def _chosen(name: str, own: Mapping[str, str], path: str) -> str:
    if name.endswith(".jinja"):
        try:
            return Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(path, name, "a file with a chat template", str(error)) from None
    found = own.get(name) or NAMED.get(name)
    if found is None:
        known = ", ".join(dict.fromkeys([*own, *NAMED]))
        raise ConfigError(path, name, f"a file NAME.jinja or one of {known}", "null takes the tokenizer's own")
    return found


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> "jinja2.Template":
    return _environment().from_string(template)


@functools.cache
def _environment() -> "jinja2.Environment":
    """Jinja's sandbox: no attribute that leads out of it, nothing can be changed, no text that fills the memory."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Puts a mark on both sides of what `{% generation %}` … `{% endgeneration %}` renders."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            sides = [nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (OPEN, CLOSE)]
            return nodes.Scope([sides[0], *body, sides[1]], lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            repeated = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
            times = [side for side in (left, right) if isinstance(side, int)]
            if operator == "**" or (repeated and times and repeated[0] * times[0] > LONGEST):
                raise SecurityError(f"{operator} makes something too large")
            return super().call_binop(context, operator, left, right)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    made.filters["tojson"] = _as_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = DAY.strftime
    return made


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates of language models want it: nothing is escaped for web pages, as Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
