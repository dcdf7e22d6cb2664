"""The dip around each boundary, from the dense probes: what a switch of data costs at once, and what comes back."""

import itertools

from holdfast.report.chart import Chart, Line, Panel, number
from holdfast.report.pictures.axis import token_axis
from holdfast.report.pictures.forgetting import seen_range
from holdfast.report.run_files import Run

MEASURES = {"bits_per_byte": "bits per byte", "nll": "held-out NLL", "accuracy": "accuracy"}


def picture(run: Run) -> Chart | None:
    """Probes over tokens, one line a dataset, cut between boundaries."""
    probes = [point for point in run.points if point.at == "probe"]
    if not probes:
        return None
    gap = _gap([point.tokens for point in probes])
    panels: list[Panel] = []
    said: list[str] = []
    for measure, label in MEASURES.items():
        lines = []
        for name in run.datasets:
            known = [(float(p.tokens), p.scores[name][measure]) for p in probes if measure in p.scores.get(name, {})]
            if any(y is not None for _, y in known):
                x, y = _cut(known, gap)
                lines.append(Line(name, x, y, run.color(name), "both"))
        if lines and not (measure == "nll" and panels):
            seen = None if measure == "accuracy" else seen_range(run, lines)
            panels.append(Panel(f"{label}, probes", lines, 190, y_range=seen))
            said += [f"{line.name} {label} between {_ends(line)}" for line in lines]
    return (
        Chart(
            "dip",
            "Around the boundaries",
            "Small evaluations on fixed examples, close together around each boundary: the dip when the data changes "
            "and what comes back. They look at few examples and are not rows of the matrix.",
            f"{len(probes)} probes around {len(run.timeline.boundaries)} boundaries: " + "; ".join(said) + ".",
            panels,
            **token_axis(run),
        )
        if panels
        else None
    )


def _ends(line: Line) -> str:
    known = [value for value in line.y if value is not None]
    return f"{number(min(known))} and {number(max(known))}"


def _gap(tokens: list[int]) -> float:
    """A distance that only lies between the windows of two boundaries."""
    steps = sorted(b - a for a, b in itertools.pairwise(tokens))
    return 3.0 * steps[len(steps) // 2] if steps else 0.0


def _cut(known: list[tuple[float, float | None]], gap: float) -> tuple[list[float], list[float | None]]:
    x: list[float] = []
    y: list[float | None] = []
    for at, value in known:
        if x and at - x[-1] > gap:
            x.append((at + x[-1]) / 2)
            y.append(None)
        x.append(at)
        y.append(value)
    return x, y
