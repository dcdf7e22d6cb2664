"""`holdfast data`: what the cache of prepared stores holds."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.data.config import DataConfig
from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.data.store import Prepared

app = typer.Typer(no_args_is_help=True, help="List, show and remove prepared data.")

Cache = Annotated[Path | None, typer.Option(help="cache folder; HOLDFAST_CACHE or the user's cache folder")]
PERCENTILES = (5, 25, 50, 75, 95, 100)


def _cache(folder: Path | None) -> Path:
    return DataConfig(cache=str(folder) if folder else None).cache_path()


@app.command("list")
def list_(
    cache: Cache = None, as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False
) -> None:
    """List the prepared stores of the cache.

    Example: holdfast data list
    """
    from rich.console import Console
    from rich.table import Table

    from holdfast.data.store import stores

    found = list(stores(_cache(cache)))
    if as_json:
        for store in found:
            typer.echo(json.dumps({"name": store.path.name, "disk": disk(store.path), **_counts(store)}))
        return
    table = Table("store", "documents", "tokens", "bytes", "on disk", "tokenizer")
    for store in found:
        counts = (store.num_documents, store.num_tokens, store.num_bytes, disk(store.path))
        table.add_row(store.path.name, *(f"{count:,}" for count in counts), store.ledger["tokenizer"]["name"])
    console = Console()
    console.print(table if found else f"{_cache(cache)}: nothing is prepared yet; `holdfast prepare CONFIG` does it")


def _counts(store: "Prepared") -> dict[str, Any]:
    ledger = store.ledger
    return {key: ledger[key] for key in ("source", "split", "kind", "documents", "tokens", "bytes", "tokenizer")}


def disk(folder: Path) -> int:
    """Bytes that a folder's files take."""
    return sum(path.stat().st_size for path in folder.iterdir())


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="a store's name, or the beginning of it")],
    cache: Cache = None,
    examples: Annotated[int, typer.Option(min=0, help="documents to decode")] = 3,
) -> None:
    """Show a prepared store: counts, lengths, broken rows and a few documents.

    Example: holdfast data show pydocs-train
    """
    import numpy as np

    from holdfast.data.documents import broken_lines
    from holdfast.data.prepare import tokenizer_folder
    from holdfast.data.tokenizers import load_tokenizer

    for store in matching(name, _cache(cache)):
        typer.echo(f"{store.path.name}: {store.path}")
        for key, value in _counts(store).items():
            typer.echo(f"  {key}: {value['name'] if key == 'tokenizer' else value}")
        lengths = np.percentile(np.diff(store.offsets), PERCENTILES, method="nearest")
        shown = ", ".join(f"{p} %: {int(length)}" for p, length in zip(PERCENTILES, lengths, strict=True))
        typer.echo(f"  tokens a document: {shown}")
        for line in broken_lines(store.ledger["broken"]):
            typer.echo(f"  broken: {line}")
        tokenizer = load_tokenizer(tokenizer_folder(_cache(cache), store.ledger["tokenizer"]["fingerprint"]))
        for index in np.linspace(0, store.num_documents - 1, min(examples, store.num_documents)).astype(int).tolist():
            ids, prompt = store.tokens(index), store.prompt_length(index)
            parts = [tokenizer.decode(ids[:prompt]), tokenizer.decode(ids[prompt:])]
            text = " ⟶ ".join(repr(part if len(part) <= 500 else part[:500] + "…") for part in parts if part)
            typer.echo(f"  document {index} ({len(ids)} tokens): {text}")


def matching(name: str, cache: Path) -> "list[Prepared]":
    """The stores whose names begin so; none is an error."""
    from holdfast.data.store import stores

    found = [store for store in stores(cache) if store.path.name.startswith(name)]
    if not found:
        raise UserError(f"{name}: there is no such store in {cache}; `holdfast data list` shows all")
    return found


@app.command()
def remove(
    names: Annotated[list[str] | None, typer.Argument(help="names of stores, or beginnings of them")] = None,
    cache: Cache = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    unfinished: Annotated[bool, typer.Option("--unfinished", help="also what killed preparations left")] = False,
) -> None:
    """Remove prepared stores; they are prepared again when they are needed.

    Example: holdfast data remove pydocs
    """
    from holdfast.data.store import remove as remove_store
    from holdfast.data.store import remove_unfinished

    if not names and not unfinished:
        raise UserError("name the stores to remove, or give --unfinished; `holdfast data list` shows all")
    if unfinished:
        for name in remove_unfinished(_cache(cache)):
            typer.echo(f"{name}: unfinished, removed")
    found = {store.path: store for name in names or [] for store in matching(name, _cache(cache))}
    for path in found:
        typer.echo(f"{path.name}: {disk(path):,} bytes")
    if found and not yes and not typer.confirm(f"remove {len(found)} stores?"):
        raise typer.Exit(1)
    for path in found:
        remove_store(path)
