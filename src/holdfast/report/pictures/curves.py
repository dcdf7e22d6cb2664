"""Curves over the tokens of a run: training loss, forgetting, and the dip around each boundary."""

import itertools
from collections.abc import Sequence

from holdfast.report.drawing.chart import Chart, Line, Panel, Value, limits, number, thin
from holdfast.report.pictures.axis import token_axis
from holdfast.report.run_files import Run

Curve = dict[float, Value]
CURVES = {"nll": "held-out NLL (nats per token)", "bits_per_byte": "bits per byte", "accuracy": "accuracy"}
PROBED = {"bits_per_byte": "bits per byte", "nll": "held-out NLL", "accuracy": "accuracy"}


def loss(run: Run) -> Chart | None:
    """The loss of the recorded steps; cross-entropy and penalty apart where there is a penalty."""
    records = run.kind("train")
    if not records:
        return None
    x = [float(record["tokens"]) for record in records]
    losses = [record.get("loss") for record in records]
    lines = [Line("loss", *thin(x, losses), 0)]
    penalties = [record.get("penalty") for record in records]
    panels = []
    if any(penalties):
        lines = [Line("cross-entropy", *thin(x, [record.get("ce") for record in records]), 1), *lines]
        panels = [Panel("penalty (before beta)", [Line("penalty", *thin(x, penalties), 3)], 90, level=0)]
    panels.insert(0, Panel("training loss (nats per token)", lines, 220))
    skipped = sum(record.get("skipped") or 0 for record in records)
    known = [loss for loss in losses if loss is not None]
    range_ = f"from {number(known[0])} to {number(known[-1])}, lowest {number(min(known))}" if known else "never finite"
    note = "Each point is the loss of one step alone, not an average."
    if skipped:
        note += f" {skipped} recorded steps were skipped because loss or gradient was not finite."
    return Chart("loss", "Training loss", note, f"Training loss over tokens: {range_}.", panels, **token_axis(run))


def curves(run: Run, measure: str, *, probes: bool = False) -> dict[str, Curve]:
    """Values of a measure by task and tokens; NLL also from the regular validations.

    An evaluation and a validation of one step differ in their rows; the evaluation counts. Probes look at few
    rows and would draw a jagged line: they have a picture of their own.
    """
    found: dict[str, Curve] = {}
    if measure == "nll":
        for record in run.kind("validation"):
            for name, value in (record.get("losses") or {}).items():
                found.setdefault(name, {})[float(record["tokens"])] = value
    for point in run.points:
        if probes or point.at != "probe":
            for name, scores in point.scores.items():
                if scores.get(measure) is not None:
                    found.setdefault(name, {})[float(point.tokens)] = scores[measure]
    return found


def seen_range(run: Run, lines: Sequence[Line]) -> tuple[float, float]:
    """The axis that holds each dataset's values from its own stage on.

    A loss on data that is still to come says little, and may be so large that forgetting could not be seen beside it.
    """
    starts = {name: stage.start for stage in reversed(run.timeline.stages) for name in stage.datasets}
    seen = [[y for x, y in zip(line.x, line.y, strict=True) if x >= starts.get(line.name, 0)] for line in lines]
    known = [value for values in seen for value in values[1 if len(values) > 1 else 0 :]]
    everything = [value for line in lines for value in line.y if value is not None]
    highest = max((value for value in known if value is not None), default=float("inf"))
    return limits([value for value in everything if value <= 1.5 * highest], pad=0.06)


def forgetting(run: Run) -> Chart | None:
    """One panel a measure, one line a dataset."""
    panels, said = [], []
    for measure, label in CURVES.items():
        lines = []
        for name, curve in curves(run, measure).items():
            x = sorted(curve)
            y = [curve[at] for at in x]
            lines.append(Line(name, x, y, run.color(name), "both" if len(x) < 60 else "line"))
            known = [value for value in y if value is not None]
            if known and measure != "bits_per_byte":
                said.append(f"{name} {measure} from {number(known[0])} to {number(known[-1])}")
        if lines:
            panels.append(
                Panel(label, lines, 180)
                if measure == "accuracy"
                else Panel(label, lines, 220, y_range=seen_range(run, lines))
            )
    if not panels:
        return None
    return Chart(
        "forgetting",
        "Forgetting curves",
        "Held-out scores of every dataset over the whole run: a loss that rises again after its stage is forgetting. "
        "Losses on data still to come may lie above the axis.",
        "Held-out scores over tokens: " + "; ".join(said) + ".",
        panels,
        **token_axis(run),
    )


def dip(run: Run) -> Chart | None:
    """Probes over tokens, one line a dataset, cut between boundaries."""
    probes = [point for point in run.points if point.at == "probe"]
    if not probes:
        return None
    gap = _gap([point.tokens for point in probes])
    panels: list[Panel] = []
    said: list[str] = []
    for measure, label in PROBED.items():
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
