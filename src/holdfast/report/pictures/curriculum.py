"""The curriculum as it was run: rows of each dataset, betas, learning rate and reference snapshots."""

from holdfast.report.chart import Chart, Line, Panel, thin
from holdfast.report.pictures.axis import token_axis, told
from holdfast.report.run_files import Run

# A few rows of replay come and go from step to step: their mean over some steps is what can be seen.
PIECES = 60


def picture(run: Run) -> Chart | None:
    """Stacked rows over tokens, with beta and learning rate aligned below."""
    records = [record for record in run.kind("train") if record.get("rows")]
    if not records:
        return None
    every = -(-len(records) // PIECES)
    pieces = [records[start : start + every] for start in range(0, len(records), every)]
    names = [name for name in run.datasets if any(name in record["rows"] for record in records)]
    x = [0.0, *(float(piece[-1]["tokens"]) for piece in pieces)]
    lines = []
    for name in names:
        rows = [sum(record["rows"].get(name, 0) for record in piece) / len(piece) for piece in pieces]
        lines.append(Line(name, x, [rows[0], *rows], run.color(name)))
    panels = [Panel("rows of each dataset in a step", lines, 190, stacked=True)]
    marks = [(float(at), f"reference snapshot at {at:,} tokens") for at in run.timeline.snapshots if at <= run.tokens]
    tokens = [float(record["tokens"]) for record in records]
    betas = [record.get("beta") for record in records]
    if any(betas) or marks:
        bx, by = thin(tokens, betas)
        line = Line("beta", bx, by, len(run.datasets), "step")
        panels.append(Panel("beta, weight of the penalty (▲ reference snapshot)", [line], 80, zero=True, marks=marks))
    lx, ly = thin(tokens, [record.get("learning_rate") for record in records])
    panels.append(Panel("learning rate", [Line("learning rate", lx, ly, len(run.datasets) + 1)], 80, zero=True))
    stages = told([f"{stage.name} ({told(list(stage.datasets))})" for stage in run.timeline.stages])
    return Chart(
        "curriculum",
        "The curriculum as it was run",
        f"Rows of each dataset, mean over {every} recorded step{'s' if every > 1 else ''}; grey regions are fades, "
        "dotted lines stage boundaries.",
        f"Stacked areas of the rows of {told(names)} over the tokens of the run. Stages: {stages}. "
        f"{len(run.timeline.fades)} fades; {len(marks)} reference snapshots.",
        panels,
        **token_axis(run),
    )
