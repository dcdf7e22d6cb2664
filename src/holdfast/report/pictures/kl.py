"""How far the model has gone from its reference, over time and against what was forgotten."""

from holdfast.evaluation.matrix import Point
from holdfast.report.drawing.chart import Chart, Line, Panel, number
from holdfast.report.pictures.axis import token_axis
from holdfast.report.run_files import Run

KINDS = {"kl_forward": "KL(reference ‖ model)", "kl_reverse": "KL(model ‖ reference)"}
LOSSES = ("bits_per_byte", "nll")


def picture(run: Run) -> Chart | None:
    """KL to the reference on each dataset's held-out rows, over tokens."""
    panels = []
    for measure, label in KINDS.items():
        lines = []
        for name in run.datasets:
            known = [(float(p.tokens), p.scores[name][measure]) for p in run.points if _has(p, name, measure)]
            if known:
                lines.append(Line(name, [x for x, _ in known], [y for _, y in known], run.color(name), "both"))
        if lines:
            panels.append(Panel(f"{label}, nats per token", lines, 150, zero=True))
    if not panels:
        return None
    return Chart(
        "kl",
        "Distance to the reference",
        "Mean KL between the current model and the reference snapshot on held-out rows; it starts anew at a snapshot.",
        f"KL to the reference over tokens, in both directions, on {len(panels[0].lines)} datasets.",
        panels,
        **token_axis(run),
    )


def against_forgetting(run: Run) -> Chart | None:
    """One point for each dataset and evaluation: KL to the reference, and loss gained since its own stage."""
    lines, measure = [], "kl_forward"
    for name in run.datasets:
        points = [point for point in run.points if _has(point, name, measure)]
        loss = next((loss for loss in LOSSES if any(_has(point, name, loss) for point in points)), None)
        best = _after_home(run, name, loss) if loss else None
        if loss is None or best is None:
            continue
        then, lowest = best
        later = [point for point in points if point.tokens >= then and _has(point, name, loss)]
        x = [point.scores[name][measure] or 0.0 for point in later]
        y = [(point.scores[name][loss] or 0.0) - lowest for point in later]
        tips = [
            f"{name} at {point.tokens:,} tokens: KL {number(a)}, {'+' if b >= 0 else ''}{number(b)} {_unit(loss)}"
            for point, a, b in zip(later, x, y, strict=True)
        ]
        if x:
            lines.append(Line(name, x, y, run.color(name), "points", tips=tips))
    if not lines:
        return None
    return Chart(
        "kl_forgetting",
        "KL to the reference against forgetting",
        "Each point is one evaluation of one dataset after its own stage: distance to the reference against the "
        "loss gained since that stage. Points that climb to the right: the KL predicts forgetting.",
        f"Scatter of KL to the reference against loss gained since the own stage, for {len(lines)} datasets.",
        [Panel("loss gained since its own stage (bits per byte)", lines, 260, level=0)],
        x_label="KL(reference ‖ model), nats per token",
        scatter=True,
    )


def _has(point: Point, name: str, measure: str) -> bool:
    return point.scores.get(name, {}).get(measure) is not None


def _unit(loss: str) -> str:
    return loss.replace("_", " ")


def _after_home(run: Run, name: str, loss: str) -> tuple[int, float] | None:
    """Tokens and loss of a dataset at the end of its own stage."""
    matrix = run.matrix
    if matrix is None or name not in matrix.tasks:
        return None
    home = matrix.homes[matrix.tasks.index(name)]
    point = run.row_point(home) if home is not None else None
    if point is None or not _has(point, name, loss):
        return None
    return point.tokens, float(point.scores[name][loss] or 0.0)
