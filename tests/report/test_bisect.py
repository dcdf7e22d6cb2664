"""The page and the sentences of a bisection."""

from dataclasses import replace
from pathlib import Path

from holdfast.analysis.bisect import Bisection, Place, Proof, RankedRow
from holdfast.report.bisect import after, cells, sentence, write_bisection

ROWS = tuple(
    RankedRow(
        102 + rank % 2, rank, "<b>facts</b>", 40 + rank, 0.05 / (1 + rank), f"is it {rank}? ⟶ <i>no</i>", rank < 8
    )
    for rank in range(12)
)
FOUND = Bisection(
    run="runs/<script>alert(1)</script>",
    target="facts & more",
    kind="task",
    count=200,
    window=(0, 400),
    curve=tuple((step, 0.1 + (0.9 if step == 104 else 0.0), 0.1, 1.0) for step in range(0, 401, 4)),
    word="rows",
    place=Place(90, 106, 0.1, 1.0, 0.5, 0.1),
    rows=ROWS,
    num_rows=512,
    proof=Proof(8, 1.0, 0.2, (0.9, 0.95, 1.0), 0.1, ((106, 1.0, 0.2), (114, 0.5, 0.15))),
    steps_taken=1400,
    measured=180,
    notes=("a <note>",),
)


def test_every_answer_has_its_sentence() -> None:
    assert "was lost in steps 90 to 105" in sentence(FOUND)
    assert "Without 8 of the 512 rows" in sentence(FOUND)
    assert "89% of the rise undone" in sentence(FOUND)
    assert after(FOUND) == "At step 114 the log-loss is 0.5, and without these rows 0.15."
    assert "never lost between steps 0 and 400" in sentence(replace(FOUND, word="kept", proof=None))
    assert "no single place: it was lost evenly" in sentence(replace(FOUND, word="evenly", proof=None))
    assert after(replace(FOUND, word="evenly", proof=None)) == ""
    assert FOUND.proof is not None
    beaten = replace(FOUND, word="place", proof=replace(FOUND.proof, controls=(0.1, 0.9)))
    assert "random rows did as well" in sentence(beaten)
    little = replace(FOUND, word="place", proof=replace(FOUND.proof, without=0.8))
    assert "leaving out 8 rows undoes only 22% of the rise" in sentence(little)


def test_names_and_texts_are_shown_and_never_run(tmp_path: Path) -> None:
    path = tmp_path / "bisect.html"
    write_bisection(FOUND, path)
    page = path.read_text()
    assert "<script>alert" not in page
    assert "&lt;b&gt;facts&lt;/b&gt;" in page
    assert "⟶ &lt;i&gt;no&lt;/i&gt;" in page
    assert "a &lt;note&gt;" in page
    assert page.count(">accused<") == 8
    assert 'id="proof"' in page
    write_bisection(replace(FOUND, word="kept", rows=(), proof=None), path)
    assert 'id="proof"' not in path.read_text()
    assert cells(1, ROWS[0])[-2:] == ["accused", "is it 0? ⟶ <i>no</i>"]
