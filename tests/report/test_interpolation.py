"""The page and the tables of interpolations."""

import io
from pathlib import Path

from rich.console import Console

from holdfast.evaluation.interpolations import Interpolation, Interpolations
from holdfast.report.interpolation import PAGE, PICTURE, plane, print_interpolations, write_interpolations

FIRST = {"run": "runs/<b>", "checkpoint": "boundary_1", "step": 1, "tokens": 10}
SECOND = {"run": "runs/<b>", "checkpoint": "final", "step": 2, "tokens": 20}
POINTS = tuple(
    Interpolation(
        alpha, {"old": {"bits_per_byte": 1 + alpha**2}, "new": {"bits_per_byte": 3 - alpha, "accuracy": alpha}}
    )
    for alpha in (0.0, 0.5, 1.0)
)


def averages(new: tuple[str, ...] = ("new",)) -> Interpolations:
    return Interpolations(FIRST, SECOND, "same", ("old",), new, POINTS)


def test_the_page_shows_every_alpha_and_its_marks(tmp_path: Path) -> None:
    text = write_interpolations(averages(), tmp_path).read_text()
    assert "alpha 0.5" in text
    assert "front best" in text
    assert "<b>@" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    picture = (tmp_path / PICTURE).read_text()
    assert picture.count("<circle") >= 3
    assert ">0.5</text>" in picture
    assert (tmp_path / PAGE).stat().st_size == len(text.encode())


def test_the_terminal_names_the_best_and_the_rule() -> None:
    stream = io.StringIO()
    print_interpolations(averages(), Console(file=stream, width=120))
    said = stream.getvalue()
    assert "Best by bits per byte: alpha 0.5 (the highest mean" in said
    assert "1.25" in said
    assert "accuracy, higher is better" in said


def test_no_plane_without_something_new(tmp_path: Path) -> None:
    found = averages(new=())
    assert plane(found, "bits_per_byte") is None
    write_interpolations(found, tmp_path)
    assert not (tmp_path / PICTURE).exists()
