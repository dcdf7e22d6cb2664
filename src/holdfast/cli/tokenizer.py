"""`holdfast tokenizer`: train a tokenizer on the data of a config."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.errors import ConfigError, UserError
from holdfast.types import Json

if TYPE_CHECKING:
    from holdfast.data.config import DataConfig

app = typer.Typer(no_args_is_help=True, help="Train tokenizers.")


@app.callback()
def _main() -> None:
    """Train tokenizers."""


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="config whose training/dataset names the mixture")],
    out: Annotated[Path, typer.Argument(help="folder to write the tokenizer to")],
    vocab_size: Annotated[int, typer.Option(help="tokens, special ones included")],
    max_bytes: Annotated[int, typer.Option(help="bytes of text to look at")] = 200_000_000,
) -> None:
    """Train a byte-level BPE tokenizer on a config's data.

    Example: holdfast tokenizer train config.yaml my-tokenizer --vocab-size 4096
    """
    from holdfast.config import configure, merge, read_yaml
    from holdfast.data.config import DataConfig
    from holdfast.data.tokenizers.train import train_tokenizer

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already; name a folder that does not exist or is empty")
    values = read_yaml(config)
    data = configure(DataConfig, merge([DataConfig], {"data": values.get("data") or {}}))
    rates = mixture_rates(values)
    tokenizer = train_tokenizer(mixture_texts(rates, data, max_bytes), vocab_size, str(out))
    tokenizer.save(out)
    typer.echo(f"{out}: {tokenizer.vocab_size} tokens, trained on {', '.join(rates)}; use it by tokenizer/name: {out}")


def mixture_rates(values: Json) -> dict[str, float]:
    """The summed share of every dataset in a config's `training/dataset`, over all stages.

    >>> a, b = {"name": "a", "rate": 0.5}, {"name": "b", "rate": 0.5}
    >>> mixture_rates({"training": {"dataset": [[{"name": "a"}], [a, b]]}})
    {'a': 1.5, 'b': 0.5}
    """
    rates: dict[str, float] = {}
    pending: list[Any] = [(values.get("training") or {}).get("dataset")]
    while pending:
        item = pending.pop(0)
        if isinstance(item, list):
            pending = [*item, *pending]
        elif isinstance(item, dict) and "name" in item:
            rates[item["name"]] = rates.get(item["name"], 0.0) + float(item.get("rate", 1.0))
        else:
            raise ConfigError("training/dataset", item, "a list of datasets, each with a name", "see `holdfast jobs`")
    rates = {name: rate for name, rate in rates.items() if rate > 0}
    if not rates:
        raise ConfigError("training/dataset", None, "at least one dataset with a rate above 0")
    return rates


def mixture_texts(rates: dict[str, float], data: "DataConfig", max_bytes: int) -> Iterator[str]:
    """Training texts of several datasets, interleaved so that their bytes follow the rates."""
    from holdfast.data.sources import documents

    streams = {name: documents(name, "train", data) for name in rates}
    used = dict.fromkeys(rates, 0)
    while streams and sum(used.values()) < max_bytes:
        name = min(streams, key=lambda name: used[name] / rates[name])
        document = next(streams[name], None)
        if document is None:
            del streams[name]
            continue
        used[name] += len(document.full_text.encode())
        yield document.full_text
