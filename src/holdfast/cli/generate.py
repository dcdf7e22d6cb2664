"""`holdfast generate`: text from a run's checkpoints, to see with one's own eyes what was forgotten."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, List, Optional

import typer

from holdfast.cli.options import run_and_checkpoints
from holdfast.types import Json


def generate_command(
    run: Annotated[str, typer.Argument(help="RUN, RUN@CHECKPOINT, RUN@ONE,TWO, or the folder of a pretrained model.")],
    prompt: Annotated[str, typer.Argument(help="What the model goes on from.")],
    checkpoint: Annotated[
        Optional[List[str]],
        typer.Option("--checkpoint", help="The same as RUN@CHECKPOINT; repeatable: they stand side by side."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens to make.")] = 200,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Only that many likeliest tokens; 0 is all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=1e-6, max=1, help="Only the likeliest tokens that reach this probability.")
    ] = 1.0,
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights (training/ema) instead.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed says the same.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's turn; the model answers it, by the chat template.")
    ] = False,
    chat_template: Annotated[
        Optional[str], typer.Option("--chat-template", help="Another one: chatml, or a file NAME.jinja.")
    ] = None,
) -> None:
    """Generate text, shown while it is made.

    A checkpoint is latest, a step, boundary_1, best_0 or final; several stand side by side. No data is needed.

    Example: holdfast generate runs/general/default/quickstart@boundary_1,final "def "
    """
    from holdfast.errors import UserError
    from holdfast.execution.checkpoints import LATEST
    from holdfast.models.pretrained.source import is_model

    folder, names = run_and_checkpoints(str(run), checkpoint or [])
    pretrained = not (folder / "config.yaml").is_file() and is_model(folder)
    if pretrained and (names or ema):
        asked = f"checkpoint {names[0]}" if names else "--ema"
        raise UserError(f"{asked}: {folder} is a pretrained model, which has no checkpoints")

    from holdfast.evaluation.decoding import Sampler, stream, until

    runner, tokenizer, models = _model(folder) if pretrained else _checkpoints(folder, names or [LATEST], ema=ema)
    sampler = Sampler(temperature, top_k, top_p)
    turn: str | list[int] = prompt
    stop = ""
    if chat or chat_template:
        turn, stop = _turn(prompt, tokenizer, chat_template)
    streams = [
        until(stream(runner, params, tokenizer, turn, max_new_tokens=tokens, sampler=sampler, seed=seed), stop)
        for params in models.values()
    ]
    if turn is not prompt:
        prompt += "\n"
    if len(streams) == 1:
        _show_one(prompt, streams[0])
    else:
        _show_many(prompt, list(models), streams)


def _turn(said: str, tokenizer: Any, template: str | None) -> tuple[list[int], str]:
    """A user's turn as ids, up to where the assistant begins, and the text with which it ends."""
    from holdfast.data.chat_template import ChatError, ChatRenderer
    from holdfast.errors import UserError

    renderer = ChatRenderer.of(tokenizer, template, "all", "--chat-template")
    try:
        text = renderer.prompt([{"role": "user", "content": said}])
        return tokenizer.encode_rendered([text])[0].ids.tolist(), renderer.end_of_turn()
    except ChatError as error:
        raise UserError(f"--chat: the chat template refuses it: {error}") from None


def _checkpoints(run: Path, names: list[str], *, ema: bool) -> tuple[Any, Any, Json]:
    """What checkpoints of a run are decoded with, and their weights by title."""
    from holdfast.evaluation.forward import Runner
    from holdfast.training.runs import open_run

    opened = open_run(run)
    infos = [opened.checkpoint(name) for name in names]
    trainer = opened.empty_trainer() if ema else opened.trainer(names[0])
    runner: Runner = Runner(trainer.resolved.model, trainer.topology)
    if ema:
        weights = [trainer.restorer.weights(info, "ema") for info in infos]
    else:
        weights = [trainer.state.params, *(trainer.restorer.weights(info) for info in infos[1:])]
    titles = [f"{name} (step {info.step:,})" for name, info in zip(names, infos, strict=True)]
    return runner, trainer.resolved.tokenizer, dict(zip(titles, weights, strict=True))


def _model(folder: Path) -> tuple[Any, Any, Json]:
    """What a pretrained model is decoded with, and its weights."""
    from holdfast.training.runs import open_pretrained

    model = open_pretrained(str(folder))
    return model.runner, model.tokenizer, {model.title: model.params}


def _show_one(prompt: str, pieces: Iterator[str]) -> None:
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def _show_many(prompt: str, titles: list[str], streams: list[Iterator[str]]) -> None:
    """Columns that grow together, a piece of each in turn."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Column, Table
    from rich.text import Text

    texts = [prompt] * len(streams)

    def table() -> Table:
        made = Table(*(Column(Text(title)) for title in titles), expand=True)
        made.add_row(*map(Text, texts))
        return made

    def grow() -> Iterator[None]:
        waiting = dict(enumerate(streams))
        while waiting:
            for index, pieces in list(waiting.items()):
                piece = next(pieces, None)
                if piece is None:
                    del waiting[index]
                else:
                    texts[index] += piece
            yield

    console = Console(highlight=False)
    if not console.is_terminal:
        list(grow())
        console.print(table())
        return
    with Live(table(), console=console, vertical_overflow="visible", auto_refresh=False) as live:
        for _ in grow():
            live.update(table(), refresh=True)
