"""`holdfast data`: what the cache of prepared stores holds."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.errors import UserError
from holdfast.types import Json

if TYPE_CHECKING:
    from holdfast.data.store import TokenStore
    from holdfast.data.tokenizers import Tokenizer

app = typer.Typer(no_args_is_help=True, help="List, show and remove prepared data.")

Cache = Annotated[Path | None, typer.Option(help="cache folder; HOLDFAST_CACHE or the user's cache folder")]
PERCENTILES = (5, 25, 50, 75, 95, 100)


def _cache(folder: Path | None) -> Path:
    from holdfast.data.config import DataConfig

    return DataConfig(cache=str(folder) if folder else None).cache_path()


@app.command("list")
def list_(
    cache: Cache = None, as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False
) -> None:
    """List the prepared stores of the cache.

    Example: holdfast data list
    """
    from rich.console import Console

    from holdfast.cli.options import table
    from holdfast.data.store import store_paths

    found = opened(store_paths(_cache(cache)))
    if as_json:
        for store in found:
            typer.echo(json.dumps({"name": store.path.name, "disk": disk(store.path), **_counts(store)}))
        return
    if not found:
        typer.echo(f"{_cache(cache)}: nothing is prepared yet; `holdfast prepare CONFIG` does it")
        return
    rows = [
        (
            store.path.name,
            f"{store.num_documents:,}",
            f"{store.num_tokens:,}",
            f"{disk(store.path) / 2**20:,.1f} MiB",
            Path(store.ledger["tokenizer"]["name"]).name,
        )
        for store in found
    ]
    shown = table(("store", "documents", "tokens", "on disk", "tokenizer"), rows, name="store")
    Console(highlight=False).print(shown)


def _counts(store: "TokenStore") -> Json:
    ledger = store.ledger
    return {key: ledger[key] for key in ("source", "split", "kind", "documents", "tokens", "bytes", "tokenizer")}


def disk(folder: Path) -> int:
    """Bytes that a folder's files take."""
    return sum(path.stat().st_size for path in folder.iterdir())


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="a store's name, the beginning of it, or the folder of a run")],
    cache: Cache = None,
    examples: Annotated[int, typer.Option(min=0, help="documents to decode")] = 3,
) -> None:
    """Show prepared stores: counts, lengths, documents.

    Also broken rows. An arrow stands before an answer; in chats ⟵ ends it.

    A name that several stores begin with shows all of them, and says which.

    Of a run: the rows that its model sampled from itself (training/replay/source: self), one a document.

    Example: holdfast data show pydocs-train
    """
    import numpy as np

    from holdfast.data.documents import broken_lines
    from holdfast.data.mapped import noted_files
    from holdfast.data.prepare import tokenizer_folder
    from holdfast.data.tokenizers import load_tokenizer

    of_run = (Path(name) / "config.yaml").is_file()
    found = sampled_by(Path(name)) if of_run else opened(matching(name, _cache(cache)))
    if len(found) > 1 and not of_run:
        typer.echo(f"{len(found)} stores begin with {name}: {', '.join(store.path.name for store in found)}")
    for store in found:
        typer.echo(f"{store.path.name}: {store.path}")
        for key, value in _counts(store).items():
            typer.echo(f"  {key}: {value['name'] if key == 'tokenizer' else value}")
        if store.in_place:
            typer.echo(f"  read in place: {', '.join(map(str, noted_files(store.path)))}")
        lengths = np.percentile(np.diff(store.offsets), PERCENTILES, method="nearest")
        shown = ", ".join(f"{p} %: {int(length)}" for p, length in zip(PERCENTILES, lengths, strict=True))
        typer.echo(f"  tokens a document: {shown}")
        if store.loss_mask is not None:
            said = int(np.asarray(store.loss_mask).sum(dtype=np.int64))
            typer.echo(f"  the assistant says {said} of the tokens ({said / store.num_tokens:.1%})")
        for line in broken_lines(store.ledger["broken"]):
            typer.echo(f"  broken: {line}")
        saved = tokenizer_folder(_cache(cache), store.ledger["tokenizer"]["fingerprint"])
        tokenizer = load_tokenizer(Path(name) / "tokenizer" if of_run else saved)
        for index in np.linspace(0, store.num_documents - 1, min(examples, store.num_documents)).astype(int).tolist():
            typer.echo(f"  document {index} ({len(store.tokens(index))} tokens): {_shown(store, index, tokenizer)}")


def _shown(store: "TokenStore", index: int, tokenizer: "Tokenizer") -> str:
    """A document's text: its prompt ⟶ its answer, or a chat with what the assistant says after each ⟶."""
    import numpy as np

    ids, cuts = store.tokens(index), [store.prompt_length(index)]
    if store.loss_mask is not None:
        start = int(store.offsets[index])
        mask = np.asarray(store.loss_mask[start : start + len(ids)], np.int8)
        cuts = (np.flatnonzero(np.diff(mask, prepend=0)) if mask.any() else np.array([len(ids)])).tolist()
    text = ""
    for number, part in enumerate(np.split(ids, cuts)):
        decoded = tokenizer.decode(part)
        if decoded:
            before = "" if not text else " ⟶ " if number % 2 else " ⟵ "
            text += before + repr(decoded if len(decoded) <= 500 else decoded[:500] + "…")
    return text


def sampled_by(run_dir: Path) -> "list[TokenStore]":
    """The rows that the model of a run sampled from itself; none is an error."""
    from holdfast.data.sampled import published_sets

    found = published_sets(run_dir)
    if not found:
        raise UserError(
            f"{run_dir}: no rows that its model sampled; training/replay: {{source: self}} makes a run have some"
        )
    return found


def opened(paths: list[Path]) -> "list[TokenStore]":
    """The stores in some folders; damaged ones are told on stderr."""
    from holdfast.data.store import DamagedStore, TokenStore

    found = []
    for path in paths:
        try:
            found.append(TokenStore.open(path))
        except DamagedStore as error:
            typer.echo(str(error), err=True)
    return found


def matching(name: str, cache: Path) -> list[Path]:
    """The folders of the stores whose names begin so; none is an error."""
    from holdfast.data.store import store_paths

    found = [path for path in store_paths(cache) if path.name.startswith(name)]
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
    """Remove prepared stores.

    They are prepared again when they are needed.

    Example: holdfast data remove pydocs
    """
    from holdfast.data.store import remove as remove_store
    from holdfast.data.store import remove_unfinished

    if not names and not unfinished:
        raise UserError("name the stores to remove, or give --unfinished; `holdfast data list` shows all")
    if unfinished:
        for name in remove_unfinished(_cache(cache)):
            typer.echo(f"{name}: unfinished, removed")
    found = dict.fromkeys(path for name in names or [] for path in matching(name, _cache(cache)))
    for path in found:
        typer.echo(f"{path.name}: {disk(path):,} bytes")
    if found and not yes and not typer.confirm(f"remove {len(found)} stores?"):
        raise typer.Exit(1)
    for path in found:
        remove_store(path)
