"""Training loss with the stage boundaries."""

from holdfast.report.chart import Chart, Line, Panel, number, thin
from holdfast.report.pictures.axis import token_axis
from holdfast.report.run_files import Run


def picture(run: Run) -> Chart | None:
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
    told = f"from {number(known[0])} to {number(known[-1])}, lowest {number(min(known))}" if known else "never finite"
    note = "Each point is the loss of one step alone, not an average."
    if skipped:
        note += f" {skipped} recorded steps were skipped because loss or gradient was not finite."
    return Chart("loss", "Training loss", note, f"Training loss over tokens: {told}.", panels, **token_axis(run))
