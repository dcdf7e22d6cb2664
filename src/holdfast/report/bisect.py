"""When something was lost and to which rows: a sentence, rows for tables, and a page with the proof."""

from html import escape
from pathlib import Path

from holdfast.analysis.bisect import Bisection, Proof, RankedRow
from holdfast.execution.files import write_atomically
from holdfast.report.drawing.chart import Chart, Line, Panel, Span, number, thin
from holdfast.report.drawing.figures import figure, html_table
from holdfast.report.shell import page

ROW_HEAD = ["rank", "step", "source", "row", "harm", "verdict", "text"]


def sentence(found: Bisection) -> str:
    """What was found, in words."""
    name, (first, last) = found.target, found.window
    place, proof = found.place, found.proof
    if found.word == "kept" or place is None:
        return f"{name} was never lost between steps {first} and {last}."
    if found.word == "evenly":
        return (
            f"{name}: no single place: it was lost evenly between steps {first} and {last}; no rise stands out, and "
            f"the steepest is around step {place.end}."
        )
    where = (
        f"{name} was lost in steps {place.start} to {place.end - 1}: its log-loss rose from {number(place.before)} to "
        f"{number(place.after)}"
    )
    assert proof is not None, "a place that stands out is tried"
    if found.word == "rows":
        return (
            f"{where}. Without {proof.size} of the {found.num_rows:,} rows of these steps it would have been "
            f"{number(proof.without)} ({proof.undone:.0%} of the rise undone), lower than without any of "
            f"{len(proof.controls)} random sets of as many rows (lowest {number(min(proof.controls))})."
        )
    why = (
        "random rows did as well"
        if not proof.beats_all
        else f"leaving out {proof.size} rows undoes only {max(proof.undone, 0):.0%} of the rise"
    )
    return f"{where}; no few rows of these steps are accused: {why}."


def after(found: Bisection) -> str:
    """What became of it later, in words; nothing where nothing was lost."""
    if found.word not in ("rows", "place") or found.proof is None or not found.proof.followed:
        return ""
    step, kept, without = found.proof.followed[-1]
    return f"At step {step} the log-loss is {number(kept)}, and without these rows {number(without)}."


def cells(rank: int, row: RankedRow) -> list[str]:
    """A row as cells."""
    verdict = "accused" if row.accused else ""
    return [str(rank), str(row.step), row.source, str(row.row), f"{row.harm:+.4f}", verdict, " ".join(row.text.split())]


def write_bisection(found: Bisection, path: Path) -> None:
    """Write the page, whole or not at all."""
    body = [
        "<h1>When was it lost, and to which rows?</h1>",
        f'<p class="muted">{escape(found.run)}<br>{escape(found.kind)} {escape(found.target)}, {found.count:,} '
        f"{'rows' if found.kind == 'dataset' else 'questions' if found.count > 1 else 'question'}</p>",
        f'<p class="lead{" unfinished" if found.word in ("rows", "place") else ""}" id="summary">'
        f"{escape(sentence(found))}</p>",
        f"<p>{escape(after(found))}</p>" if after(found) else "",
        *(f'<p class="muted">{escape(note)}</p>' for note in found.notes),
        figure(curve(found)),
        "" if found.proof is None else _proof(found, found.proof),
        _rows(found),
        f'<p class="muted">{found.steps_taken:,} steps were taken again, {found.measured:,} measurements made.</p>',
    ]
    write_atomically(path, page(f"{found.target}: when was it lost? · Holdfast", "\n".join(p for p in body if p)))


def curve(found: Bisection) -> Chart:
    """The target along the run, with the steps in which it was lost."""
    steps, losses = [point[0] for point in found.curve], [point[1] for point in found.curve]
    x, y = thin(steps, losses)
    lines = [Line(found.target, x, y, style="both" if len(x) < 40 else "line")]
    place, proof = found.place, found.proof
    if proof is not None and proof.followed:
        along = [each[0] for each in proof.followed]
        lines.append(Line(f"without {proof.size} rows", along, [each[2] for each in proof.followed], 1, "both"))
    spans = []
    if place is not None and found.word in ("rows", "place"):
        spans = [Span(place.start, place.end, "lost")]
    top = max(losses, default=0.0)
    return Chart(
        "curve",
        "Along the run",
        "Log-loss in nats, lower is better; measured more closely where it rose most.",
        f"The log-loss of {found.target} from step {found.window[0]} to {found.window[1]}; at most {number(top)}.",
        [Panel("log-loss", lines, zero=True)],
        x_label="step",
        spans=spans,
    )


def _proof(found: Bisection, proof: Proof) -> str:
    rows = [
        ["before the rise", number(proof.before), ""],
        ["as the run went", number(proof.original), ""],
        [f"without the first {proof.size} rows", number(proof.without), f"{proof.undone:.0%} of the rise undone"],
        [
            f"without {proof.size} random rows, {len(proof.controls)} times",
            f"{number(sum(proof.controls) / len(proof.controls))}",
            f"from {number(min(proof.controls))} to {number(max(proof.controls))}",
        ],
    ]
    assert found.place is not None, "a proof is of a place"
    return (
        f'<section id="proof"><h2>The same steps without these rows</h2><p class="muted">Log-loss after step '
        f"{found.place.end - 1}: the same steps and the same other rows, from the same state. Rows are accused only if "
        "leaving them out does better than every random set and undoes half of the rise.</p>"
        f"{html_table(['', 'log-loss', ''], rows)}</section>"
    )


def _rows(found: Bisection) -> str:
    if not found.rows:
        return ""
    cards = "".join(
        f"<li><blockquote>{escape(row.text)}</blockquote><p>step {row.step}, {escape(row.source)} row {row.row}, harm "
        f"{row.harm:+.4f} nats{', <span class=lost>accused</span>' if row.accused else ''}</p></li>"
        for row in found.rows
    )
    return (
        f'<section id="rows"><h2>The rows that did most harm</h2><p class="muted">The first {len(found.rows)} of '
        f"{found.num_rows:,} rows, by how much the log-loss would fall without each alone, to first order, through the "
        f"optimizer. An arrow stands before what the loss counts.</p><ol class='cards'>{cards}</ol></section>"
    )
