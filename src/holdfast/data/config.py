"""Options of the data side: where raw data and prepared stores are, which tokenizer, which sources of one's own."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional

from holdfast.config import field
from holdfast.conversion import check_path
from holdfast.errors import ConfigError, UserError, shortened

FORMATS = ("jsonl", "json", "parquet", "arrow", "csv", "tsv", "txt", "bin", "npy", "megatron", "ds", "input_ids")
DTYPES = ("uint16", "uint32")  # of the ids of token files without a header
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST = 10**18  # documents or tokens of anything
LONGEST_NAME = 128  # bytes; with what is added to it, it is the name of a folder


def check_dataset_name(name: str, what: str = "dataset") -> None:
    """Refuse a name of a dataset or split that could leave the folder in which it becomes a path."""
    bad = not name or name.startswith((".", "-", "~")) or any(c in "/\\" or not c.isprintable() for c in name)
    if bad or len(name.encode("utf-8", "replace")) > LONGEST_NAME:
        raise UserError(
            f"{what} {shortened(name)}: expected a name of letters, digits, dots, dashes and underscores, at most "
            f"{LONGEST_NAME} bytes; data that lies elsewhere is described under data/sources/NAME/path"
        )


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer turns text into ids, and which of its tokens are special."""

    name: str = field(
        "tokenizer/name",
        resume="planned",
        default="bytes",
        help="bytes, a tokenizer.json, a folder with vocab.json and merges.txt, a tok512.bin, or a hub name",
    )
    eot: Optional[str] = field(
        "tokenizer/eot",
        resume="planned",
        default=None,
        help="token that ends a document; null finds a well-known one such as </s>",
    )
    pad: Optional[str] = field(
        "tokenizer/pad",
        resume="planned",
        default=None,
        help="token that fills rows; null finds <pad>, else the end-of-text token",
    )

    def __post_init__(self) -> None:
        check_path(self.name, "tokenizer/name", "bytes, a path or a hub name")


@dataclass(frozen=True)
class SourceConfig:
    """A dataset of the user's own, described in the configuration alone.

    Text needs `text`; a task needs `prompt` and `answer` (or `labels`); rows with `messages` or `conversations` are
    chats by themselves. Templates name fields in braces, or places in them: `{messages[0][content]}`.
    """

    path: str  # a file, a folder, a glob, or a hub name such as owner/name
    format: Optional[str] = None  # one of FORMATS; null goes by the file's ending
    config: Optional[str] = None  # hub only: the configuration's name
    revision: Optional[str] = None  # hub only: a branch, tag or commit
    text: Optional[str] = None  # the field that holds the text, or a template; `text` unless this is a task or a chat
    sample_by: str = "chunk"  # txt only: a document is a chunk of paragraphs, a line or a file
    delimiter: Optional[str] = None  # csv only: between fields; null finds one of , ; | and tab
    encoding: Optional[str] = None  # of texts, several tried in order: "utf-8, cp1252"; null is UTF-8 or a mark's
    messages: Optional[str] = None  # the field that holds a chat; null finds `messages` or `conversations`
    chat_template: Optional[str] = None  # chatml, a template's name or NAME.jinja; null is the tokenizer's, else chatml
    loss_turns: Optional[str] = None  # chats only: all of the assistant's turns (null), or only the last
    tools: Optional[str] = None  # chats only: the field with what the assistant may call; `tools`
    prompt: Optional[str] = None  # template of what the model is given
    answer: Optional[str] = None  # template of what it must say; directly appended to the prompt
    choices: Optional[List[str]] = None  # templates of the possible answers, or one that names a field with a list
    label: str = "label"  # the field whose value `labels` translates, or which holds the index into `choices`
    labels: Optional[Dict[str, str]] = None  # raw label -> the text that stands for it, itself a template
    group: Optional[str] = None  # template of what examples have in common (a premise); never split in two
    validation: Optional[str] = None  # path of the validation rows (hub: the split's name)
    train: str = "train"  # hub only: the name of the training split
    validation_fraction: Optional[float] = None  # share held out where there is no validation split
    max_documents: Optional[int] = None
    max_tokens: Optional[int] = None
    dtype: Optional[str] = None  # token files without a header: uint16 or uint32; null goes by the vocabulary

    def __post_init__(self) -> None:
        check_path(self.path, "path", "a file, a folder, a glob or a hub name")
        check_path(self.validation, "validation", "a path, or the name of a split")
        if self.format is not None and self.format not in FORMATS:
            raise ConfigError("format", self.format, f"one of {', '.join(FORMATS)}", "or leave it out")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, f"one of {', '.join(DTYPES)}", "or leave it out")
        if self.sample_by not in ("chunk", "line", "file"):
            raise ConfigError("sample_by", self.sample_by, "one of chunk, line, file")
        if self.prompt is None and (self.answer is not None or self.choices or self.labels):
            raise ConfigError("prompt", None, "a template, since answer, choices or labels are set", "add prompt: ...")
        if self.prompt is not None and self.text is not None:
            raise ConfigError("text", self.text, "nothing, since prompt makes this a task", "remove text or prompt")
        if self.prompt is not None and self.answer is None and not self.labels and not self.choices:
            raise ConfigError("answer", None, "a template such as '{answer}', or labels or choices", "add answer: ...")
        self._check_reading()
        if self.validation_fraction is not None and not 0 < self.validation_fraction < 1:
            raise ConfigError("validation_fraction", self.validation_fraction, "a share between 0 and 1")
        for name in ("max_documents", "max_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST:
                raise ConfigError(name, value, f"a whole number from 1 to {MOST}")

    def _check_reading(self) -> None:
        """Of options that say how files and chats are read."""
        chat = {"messages": self.messages, "chat_template": self.chat_template, "loss_turns": self.loss_turns}
        for name, value in chat.items():
            if value is not None and (self.text is not None or self.prompt is not None):
                other = "text" if self.text is not None else "prompt"
                raise ConfigError(
                    name, value, f"nothing, since {other} makes this no chat", f"remove {other} or {name}"
                )
        if self.loss_turns not in (None, "all", "last"):
            raise ConfigError("loss_turns", self.loss_turns, "one of all, last")
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ConfigError("delimiter", self.delimiter, "one character", 'a tab is written "\\t"')
        for name in self.encodings:
            try:
                "a".encode(name)
            except (LookupError, ValueError):
                raise ConfigError(
                    "encoding", self.encoding, "names of encodings such as utf-8, cp1252 or utf-16"
                ) from None

    @property
    def encodings(self) -> tuple[str, ...]:
        """The encodings that are tried, in order."""
        return tuple(name.strip() for name in self.encoding.split(",")) if self.encoding is not None else ()


@dataclass(frozen=True)
class DataConfig:
    """Where data comes from, where it is kept once prepared, and how much is wrong before work stops."""

    root: Optional[str] = field(
        "data/root",
        resume="free",
        tells="nothing",
        default=None,
        help="folder with NAME/train.jsonl and so on, used before the hub; HOLDFAST_DATA",
    )
    cache: Optional[str] = field(
        "data/cache",
        resume="free",
        tells="nothing",
        default=None,
        help="folder of prepared stores; HOLDFAST_CACHE, else the user's cache folder",
    )
    sources: Dict[str, SourceConfig] = field(
        "data/sources",
        resume="planned",
        default_factory=dict,
        help="datasets of one's own: NAME: {path: ..., text: field}",
    )
    workers: int = field(
        "data/workers",
        resume="free",
        tells="nothing",
        default=0,
        ge=0,
        le=4096,
        help="tokenising processes; 0 uses the tokenizer's own threads",
    )
    max_broken: float = field(
        "data/max_broken",
        resume="free",
        default=0.01,
        ge=0,
        le=1,
        help="share of broken rows above which data is refused",
    )
    max_leak: float = field(
        "data/max_leak",
        resume="free",
        default=0.1,
        ge=0,
        le=1,
        help="share of held-out rows found in training above which it stops",
    )
    max_documents: Optional[int] = field(
        "data/max_documents",
        resume="planned",
        default=None,
        ge=1,
        le=MOST,
        help="documents taken from each split of each dataset; null is all",
    )
    max_tokens: Optional[int] = field(
        "data/max_tokens",
        resume="planned",
        default=None,
        ge=1,
        le=MOST,
        help="tokens taken from each split of each dataset; null is all",
    )
    loss_on: str = field(
        "data/loss_on",
        default="answer",
        choices=("answer", "all"),
        help="which tokens of a task count in the loss: its answer's or also its prompt's",
    )
    validation_fraction: float = field(
        "data/validation_fraction",
        resume="planned",
        default=0.05,
        gt=0,
        lt=1,
        help="share of documents held out where a dataset has no validation split",
    )

    def __post_init__(self) -> None:
        check_path(self.root or None, "data/root", "a folder")
        check_path(self.cache or None, "data/cache", "a folder")
        for name in self.sources:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"data/sources/{name}", name, "a name of letters, digits, dots, dashes and underscores"
                )

    def root_path(self) -> Path | None:
        """The folder of local raw data, if one is set."""
        root = self.root or os.environ.get("HOLDFAST_DATA")
        return Path(root).expanduser() if root else None

    def cache_path(self) -> Path:
        """The folder that prepared stores live in."""
        cache = self.cache or os.environ.get("HOLDFAST_CACHE")
        if cache:
            return Path(cache).expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(base).expanduser() / "holdfast"
