"""The curriculum as it was run: rows of each dataset as the plan drew them, betas, learning rate and snapshots."""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from holdfast.curriculum import Curriculum
from holdfast.data.plan import DataPlan
from holdfast.report.drawing.chart import Chart, Line, Panel, thin
from holdfast.report.pictures.axis import token_axis, told
from holdfast.report.run_files import Run
from holdfast.types import Json

# A few rows of replay come and go from step to step: their mean over some steps is what can be seen.
PIECES = 60
# Counting every row of a longer plan takes seconds, and shows nothing that the shares do not.
COUNTED_STEPS = 20_000
SAMPLED_STEPS = 32


class Piece(NamedTuple):
    """Steps from `start` to `end`, and what a step of them holds of each dataset in the mean."""

    start: float
    end: float
    amounts: Mapping[str, float]


class Drawn(NamedTuple):
    """What the steps of a run drew: pieces on the axis of tokens, their unit, and how to read them."""

    pieces: list[Piece]
    label: str
    note: str


def drawn(run: Run) -> Drawn | None:
    """What each step drew, up to the last recorded one: by the plan where the options tell it, else as recorded."""
    records = [record for record in run.kind("train") if record.get("rows")]
    if not records:
        return None
    curriculum = run.timeline.curriculum
    if curriculum is None:
        return Drawn(
            recorded_pieces(run, records),
            "rows of each dataset in a step",
            "Rows of each dataset as recorded, since the options of the run cannot be read: between two records the "
            "later one counts.",
        )
    done = min(run.step, curriculum.total_steps)
    if run.flat.get("training/mixture_unit") == "tokens":
        return Drawn(
            planned_pieces(curriculum, done, rows=False),
            "share of each dataset in the loss tokens of a step",
            "Shares of the loss tokens as planned (training/mixture_unit is tokens).",
        )
    return Drawn(
        planned_pieces(curriculum, done, rows=True),
        "rows of each dataset in a step",
        "Rows of each dataset as the plan draws them, the mean over steps between two fades and over some steps inside "
        "them.",
    )


def planned_pieces(curriculum: Curriculum, done: int, *, rows: bool) -> list[Piece]:
    """What the first steps of a curriculum draw; none reaches over the end of a span of constant shares.

    Args:
        done: so many steps.
        rows: rows of a step; otherwise the planned shares, which are of loss tokens then.
    """
    plan = DataPlan(curriculum, seed=0) if rows and curriculum.total_steps <= COUNTED_STEPS else None
    scale = curriculum.batch_size if rows else 1
    pieces = []
    for start, end, constant in curriculum.segments():
        last = min(end, done)
        number = 1 if constant else max(1, min(last - start, round(PIECES * (last - start) / max(done, 1)) + 4))
        edges = [start + (last - start) * index // number for index in range(number + 1)]
        for first, stop in pairwise(edges):
            if first < stop:
                amounts = _rows(plan, first, stop) if plan else _shares(curriculum, first, stop, scale)
                pieces += _divided(Piece(first, stop, amounts), curriculum, done)
    return pieces


def _rows(plan: DataPlan, start: int, stop: int) -> dict[str, float]:
    before, after = plan.drawn_before(start), plan.drawn_before(stop)
    amounts: dict[str, float] = {}
    for source, count in after.items():
        amounts[source.name] = amounts.get(source.name, 0.0) + (count - before[source]) / (stop - start)
    return amounts


def _shares(curriculum: Curriculum, start: int, stop: int, scale: int) -> dict[str, float]:
    steps = range(start, stop, -(-(stop - start) // SAMPLED_STEPS))
    amounts: dict[str, float] = {}
    for step in steps:
        for source, share in curriculum.weights_at(step).items():
            amounts[source.name] = amounts.get(source.name, 0.0) + share
    return {name: scale * total / len(steps) for name, total in amounts.items()}


def _divided(piece: Piece, curriculum: Curriculum, done: int) -> list[Piece]:
    """A long piece as several of the same amounts in tokens, so that a pointer finds a value everywhere."""
    unit = curriculum.tokens_per_step
    number = max(1, round(PIECES * (piece.end - piece.start) / max(done, 1)))
    edges = [unit * (piece.start + (piece.end - piece.start) * index / number) for index in range(number + 1)]
    return [Piece(first, last, piece.amounts) for first, last in pairwise(edges)]


def recorded_pieces(run: Run, records: list[Json]) -> list[Piece]:
    """What records tell: each counts back to the one before it, but not over the start of its stage."""
    starts = [stage.start for stage in run.timeline.stages]
    pieces: list[Piece] = []
    position = 0.0
    for record in records:
        tokens, amounts = float(record["tokens"]), record["rows"]
        entered = max((start for start in starts if start < tokens), default=0)
        if pieces and position < entered:
            pieces.append(Piece(position, entered, pieces[-1].amounts))
            position = entered
        pieces.append(Piece(position, tokens, amounts))
        position = tokens
    every = -(-len(pieces) // (4 * PIECES))
    return pieces if every == 1 else [_joined(pieces[at : at + every]) for at in range(0, len(pieces), every)]


def _joined(pieces: list[Piece]) -> Piece:
    length = pieces[-1].end - pieces[0].start
    names = dict.fromkeys(name for piece in pieces for name in piece.amounts)
    amounts = {
        name: sum(piece.amounts.get(name, 0) * (piece.end - piece.start) for piece in pieces) / length for name in names
    }
    return Piece(pieces[0].start, pieces[-1].end, amounts)


def picture(run: Run) -> Chart | None:
    """Stacked rows over tokens, with beta and learning rate aligned below."""
    found = drawn(run)
    if found is None:
        return None
    names = [name for name in run.datasets if any(piece.amounts.get(name) for piece in found.pieces)]
    x = [edge for piece in found.pieces for edge in (piece.start, piece.end)]
    lines = [
        Line(name, x, [piece.amounts.get(name, 0.0) for piece in found.pieces for _ in range(2)], run.color(name))
        for name in names
    ]
    panels = [Panel(found.label, lines, 190, stacked=True)]
    records = run.kind("train")
    marks = [(float(at), f"reference snapshot at {at:,} tokens") for at in run.timeline.snapshots if at <= run.tokens]
    tokens = [float(record["tokens"]) for record in records]
    betas = [record.get("beta") for record in records]
    if any(betas) or marks:
        bx, by = thin(tokens, betas)
        line = Line("beta", bx, by, len(run.datasets), "step")
        panels.append(
            Panel("beta, weight of the penalty, recorded (▲ reference snapshot)", [line], 80, zero=True, marks=marks)
        )
    lx, ly = thin(tokens, [record.get("learning_rate") for record in records])
    panels.append(
        Panel("learning rate, recorded", [Line("learning rate", lx, ly, len(run.datasets) + 1)], 80, zero=True)
    )
    stages = told([f"{stage.name} ({told(list(stage.datasets))})" for stage in run.timeline.stages])
    return Chart(
        "curriculum",
        "The curriculum as it was run",
        f"{found.note} Grey regions are fades, dotted lines stage boundaries.",
        f"Stacked areas of the rows of {told(names)} over the tokens of the run. Stages: {stages}. "
        f"{len(run.timeline.fades)} fades; {len(marks)} reference snapshots.",
        panels,
        **token_axis(run),
    )
