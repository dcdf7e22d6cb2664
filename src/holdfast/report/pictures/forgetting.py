"""The forgetting curves: held-out loss of every dataset, and accuracy of every task, over the whole run."""

from collections.abc import Sequence

from holdfast.report.chart import Chart, Line, Panel, Value, limits, number
from holdfast.report.pictures.axis import token_axis
from holdfast.report.run_files import Run

Curve = dict[float, Value]
MEASURES = {"nll": "held-out NLL (nats per token)", "bits_per_byte": "bits per byte", "accuracy": "accuracy"}


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


def picture(run: Run) -> Chart | None:
    """One panel a measure, one line a dataset."""
    panels, said = [], []
    for measure, label in MEASURES.items():
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
