"""Two models compared: a sentence, rows for tables, and a page with the texts and answers that changed."""

from html import escape
from pathlib import Path

from holdfast.analysis.diff import AnswerChange, DataDiff, Diff, Slice, TaskDiff, TextChange
from holdfast.execution.files import write_atomically
from holdfast.report.drawing.chart import number
from holdfast.report.drawing.figures import html_table
from holdfast.report.shell import page

SLICES = {
    "length": "length of the text",
    "position": "position in the text",
    "characters": "kind of character",
    "group": "field of your own",
}
DATA_HEAD = ["dataset", "verdict", "A", "B", "rise [95 % interval]", "texts"]
TASK_HEAD = ["task", "verdict", "A", "B", "known: A", "known: B", "right, then wrong", "wrong, then right", "p"]


def sentence(found: Diff) -> str:
    """What was lost, in words."""
    where = f"from {found.first} to {found.second}"
    parts = []
    for task in (each for each in found.tasks if each.word == "lost"):
        parts.append(f"{task.name} (known share {task.known[0]:.2f} → {task.known[1]:.2f})")
    for data in (each for each in found.data if each.word == "lost"):
        parts.append(f"{data.name} ({data.first:.3f} → {data.second:.3f} bits per byte)")
    if parts:
        return f"Lost beyond {found.tolerance:g} {where}: {', '.join(parts)}."
    undecided = found.named("undecided")
    if undecided:
        return (
            f"Nothing is surely lost beyond {found.tolerance:g} {where}; undecided, since the interval holds the "
            f"tolerance: {', '.join(undecided)}."
        )
    return f"Nothing was lost beyond {found.tolerance:g} {where}."


def data_row(each: DataDiff) -> list[str]:
    """A dataset as cells."""
    ends = "" if each.change is None else f" [{each.change.low:+.3f}, {each.change.high:+.3f}]"
    numbers = [number(each.first, 4), number(each.second, 4)]
    return [each.name, each.word, *numbers, f"{each.rise:+.3f}{ends}", f"{each.num_documents:,}"]


def task_row(each: TaskDiff) -> list[str]:
    """A task as cells."""
    shares = [f"{value:.3f}" for value in (each.first, each.second, *each.known)]
    return [each.name, each.word, *shares, str(each.lost), str(each.won), f"{each.p:.2g}"]


def write_diff(found: Diff, path: Path) -> None:
    """Write the page, whole or not at all."""
    body = [
        "<h1>What was lost?</h1>",
        f'<p class="muted">A: {escape(found.first)}<br>B: {escape(found.second)}</p>',
        f'<p class="lead{" unfinished" if found.lost else ""}" id="summary">{escape(sentence(found))}</p>',
        *(f'<p class="muted">{escape(note)}</p>' for note in found.notes),
        _tasks(found),
        _data(found),
        *(_task_section(each) for each in found.tasks if each.examples),
        *(_data_section(each) for each in found.data),
    ]
    write_atomically(path, page("What was lost? · Holdfast", "\n".join(part for part in body if part)))


def _tasks(found: Diff) -> str:
    if not found.tasks:
        return ""
    return (
        '<section id="tasks"><h2>Questions</h2><p class="muted">Accuracy, and the share of known questions: corrected '
        "for chance. McNemar's p is about these two models on these questions.</p>"
        f"{html_table(TASK_HEAD, [task_row(each) for each in found.tasks])}</section>"
    )


def _data(found: Diff) -> str:
    if not found.data:
        return ""
    return (
        '<section id="data"><h2>Texts</h2><p class="muted">Bits per byte of the same bytes, lower is better; '
        "the interval is paired over texts.</p>"
        f"{html_table(DATA_HEAD, [data_row(each) for each in found.data])}</section>"
    )


def _task_section(each: TaskDiff) -> str:
    cards = "".join(_answer_card(change) for change in each.examples)
    return (
        f'<section><h2>{escape(each.name)}: right before, wrong after</h2><p class="muted">{each.lost} of '
        f"{each.num_questions} questions; the surest first.</p><ol class='cards'>{cards}</ol></section>"
    )


def _answer_card(change: AnswerChange) -> str:
    first, second = change.first, change.second
    return (
        f"<li><blockquote>{escape(first.prompt)}</blockquote>"
        f"<p>right: <span class='kept'>{escape(first.answer)}</span>, "
        f"A said {escape(str(first.chosen))}, B says <span class='lost'>{escape(str(second.chosen))}</span></p></li>"
    )


def _data_section(each: DataDiff) -> str:
    parts = [_slice_table(kind, [part for part in each.slices if part.kind == kind]) for kind in SLICES]
    apart = ""
    if each.divergence is not None:
        forward, reverse = each.divergence
        apart = f'<p class="muted">KL(A ‖ B) {forward:.4f}, KL(B ‖ A) {reverse:.4f} nats a token.</p>'
    cards = "".join(_text_card(text) for text in each.texts)
    changed = f"<h2>{escape(each.name)}: texts that lost most</h2><ol class='cards'>{cards}</ol>" if cards else ""
    return f"<section><h2>{escape(each.name)} by parts</h2>{apart}{''.join(parts)}{changed}</section>"


def _slice_table(kind: str, parts: list[Slice]) -> str:
    if len(parts) < 2:
        return ""
    rows = [
        [
            part.name,
            number(part.first, 4),
            number(part.second, 4),
            f"{part.second - part.first:+.3f}",
            f"{part.share:.0%}",
        ]
        for part in parts
    ]
    return html_table(["", "A", "B", "rise", "bytes"], rows, caption=SLICES[kind])


def _text_card(text: TextChange) -> str:
    spans = "".join(
        f"<blockquote>{escape(span.before)}<mark>{escape(span.text)}</mark>{escape(span.after)} "
        f"<small>{span.rise:+.1f} bits</small></blockquote>"
        for span in text.spans
    )
    return (
        f"<li><p>{escape(text.id)}: {text.first:.3f} → {text.second:.3f} bits per byte, "
        f"{text.rise:+.1f} bits in all</p>{spans}</li>"
    )
