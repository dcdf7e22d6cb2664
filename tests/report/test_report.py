"""A run's report is made from its files alone, whatever state they are in, and its numbers are those of the results."""

import html.parser
import io
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fake_runs import BATCH, NAMES, FakeRun
from holdfast.data.plan import DataPlan
from holdfast.errors import UserError
from holdfast.report import open_run, print_summary, write_report
from holdfast.report.drawing.chart import number
from holdfast.report.drawing.figures import html_table
from holdfast.report.drawing.heat import Heat, HeatCell, matrix_heat, svg
from holdfast.report.page import surely_forgotten
from holdfast.report.pictures import curriculum as curriculum_picture
from holdfast.report.run_files import read_results
from holdfast.report.verdicts import sentence, verdicts

PICTURES = {"curriculum", "loss", "forgetting", "kl", "kl_forgetting", "dip", "work"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "whole"
    FakeRun(path).go()
    return path


class Page(html.parser.HTMLParser):
    """What a page holds: matrices and metrics with their exact values, figures, ids, and addresses."""

    VOID = {"meta", "link", "input", "br", "hr", "rect", "line", "circle", "path", "polygon"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.matrices: dict[str, list[list[float | None]]] = {}
        self.metrics: dict[str, float | None] = {}
        self.figures: set[str] = set()
        self.ids = dict(re.findall(r'id="(\w+)"[^>]*>([^<]*)<', text))
        self.addresses: list[str] = []
        self.open: list[str] = []
        self._matrix = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        found = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [found[name] for name in ("href", "src") if found.get(name)]
        if "data-chart" in found:
            self.figures.add(found["data-chart"])
        if "data-matrix" in found:
            self._matrix = found["data-matrix"].removeprefix("matrix_")
            self.matrices[self._matrix] = []
        if tag == "tr" and self._matrix:
            self.matrices[self._matrix].append([])
        value = found.get("data-value")
        exact = float(value) if value else None
        if tag == "td" and value is not None:
            self.matrices[self._matrix][-1].append(exact)
        if "data-metric" in found:
            self.metrics[found["data-metric"]] = exact

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another element"
        if tag == "table":
            self._matrix = ""


def read_page(run: Path) -> Page:
    page = Page(write_report(run, pictures=False).read_text())
    assert not page.open
    return page


def test_the_numbers_of_the_report_are_those_of_the_results(finished: Path) -> None:
    page, results = read_page(finished), read_results(finished)
    assert set(page.matrices) == set(results["matrix"])
    homes = results["homes"]
    in_order = sorted(range(len(homes)), key=lambda j: homes[j])
    assert in_order != sorted(in_order)  # results.json has evaluations first
    for measure, rows in results["matrix"].items():
        columns = [j for j in in_order if any(row[j] is not None for row in rows)]
        assert page.matrices[measure][1:] == [[row[j] for j in columns] for row in rows]
    expected = {
        f"{m}/{name}": value if m == "accuracy" or name == "forgetting" else -value
        for m in ("accuracy", "bits_per_byte", "nll")
        for name, value in results["metrics"][m].items()
    }
    assert page.metrics == expected


def test_framed_cells_form_a_diagonal(finished: Path) -> None:
    for measure in ("accuracy", "bits_per_byte", "nll", "kl_forward"):
        drawn = matrix_heat(open_run(finished), measure)
        assert drawn is not None
        framed = [
            row for column in range(len(drawn.columns)) for row, cells in enumerate(drawn.cells) if cells[column].home
        ]
        assert framed == sorted(framed)
        assert len(framed) == len(drawn.columns)


def test_nothing_in_a_drawn_matrix_is_wider_than_its_cell() -> None:
    """Measured with DejaVu Sans, which is wider than the sans serifs that systems come with."""
    pytest.importorskip("matplotlib")
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    from holdfast.report.drawing.png import heat_figure

    def width(text: str, size: float, weight: str = "normal") -> float:
        return float(
            TextPath((0, 0), text, size=size, prop=FontProperties("DejaVu Sans", weight=weight)).get_extents().width
        )

    cells = [
        [HeatCell(-0.00012345, (-0.000123, 0.000456), -1.0, count=123456), HeatCell(0.5, (0.1, 0.9), 1.0, True, 8)]
    ]
    heat = Heat(
        "m", "a title that is longer than two narrow columns are wide", "", ["after a"], ["a", "b"], cells, True, ["b"]
    )
    drawn = ET.fromstring(svg(heat))
    texts = {str(each.text): each for each in drawn.findall(".//{*}text")}
    total = float(drawn.attrib["width"])
    rectangles = [each.attrib for each in drawn.findall(".//{*}rect") if "x" in each.attrib]
    assert width(heat.title, 12, "bold") + 8 <= total
    assert "+0.5" in texts  # a difference has its sign in the file, too
    assert "b (not learned)" in texts
    for cell, rectangle in zip(cells[0], rectangles, strict=True):
        text = texts[cell.ends]
        left, wide = float(rectangle["x"]), float(rectangle["width"])
        half = width(cell.ends, 9) / 2
        assert left <= float(text.attrib["x"]) - half
        assert float(text.attrib["x"]) + half <= left + wide
    figure = heat_figure(heat)
    figure.canvas.draw()
    (axis,) = figure.axes
    small = [each for each in axis.texts if " … " in each.get_text()]
    assert len(small) == 2
    for text, patch in zip(small, axis.patches, strict=True):
        inside, around = text.get_window_extent(), patch.get_window_extent()
        assert around.x0 <= inside.x0
        assert inside.x1 <= around.x1
    assert axis.title.get_window_extent().x1 <= figure.bbox.x1


def test_every_number_has_its_own_unit_and_direction(finished: Path) -> None:
    text = write_report(finished, pictures=False).read_text()
    assert "negated" not in text
    assert "count negative" not in text
    for measure, metric, arrow in (
        ("bits_per_byte", "average", "↓"),
        ("bits_per_byte", "forgetting", "↓"),
        ("accuracy", "forgetting", "↓"),
        ("accuracy", "learning_accuracy", "↑"),
    ):
        found = re.search(rf'data-metric="{measure}/{metric}" data-value="([^"]*)">[^<]*</span> (.)', text)
        assert found is not None
        assert (float(found[1]) > 0, found[2]) == (True, arrow)
    console = Console(record=True, width=160, file=io.StringIO())
    print_summary(finished, console)
    assert "losses count negative" not in console.export_text()


def test_words_stand_left_and_numbers_right() -> None:
    text = html_table(
        ["task", "verdict", "now"], [["a", "learned", "3.5"], ["b", "–", "–"], ["c", "lost", "+3 [1, 2]"]]
    )
    assert "<td>learned</td>" in text
    assert text.count('<td class="number">') == 3


def test_the_report_stands_alone(finished: Path) -> None:
    text = write_report(finished, pictures=False).read_text()
    page = Page(text)
    assert page.figures == PICTURES
    assert all(address.startswith("data:") for address in page.addresses)
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org)", text)
    assert len(text) < 800_000


def test_texts_of_a_run_are_never_markup(finished: Path) -> None:
    text = write_report(finished, pictures=False).read_text()
    assert "film number" in text
    assert "<b>& co" not in text


def test_every_picture_has_a_text_and_a_table_and_files(finished: Path) -> None:
    text = write_report(finished).read_text()
    for figure in re.findall(r"<figure.*?</figure>", text, re.S):
        assert re.search(r'<svg[^>]*aria-label="[^"]{20,}"', figure)
        assert "<details><summary>Table</summary>" in figure
        assert figure.count("<tr>") > 3
    names = {path.name for path in (finished / "figures").iterdir()}
    measures = {f"matrix_{name}" for name in ("accuracy", "nll", "bits_per_byte", "kl_forward", "kl_reverse")}
    assert names == {f"{name}.{kind}" for name in PICTURES | measures for kind in ("svg", "png")}
    for path in (finished / "figures").iterdir():
        start = path.read_bytes()[:4]
        assert start == (b"\x89PNG" if path.suffix == ".png" else b"<svg")


def test_a_report_is_made_of_the_files_alone(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "whole"
    shutil.copytree(finished, copy)
    assert write_report(copy, pictures=False).read_text() == write_report(finished, pictures=False).read_text()


@pytest.mark.parametrize("step", [0, 1, 17, 45, 101])
def test_a_killed_run_is_reported_as_unfinished(step: int, tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "killed").go(step)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 10')  # a torn last line
    page = read_page(run.path)
    assert page.ids["state"] == "unfinished"
    assert f"stopped at step {step - step % 2} of 200" in page.ids["summary"]  # every other step is recorded


def test_rows_after_the_last_results_are_not_lost(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "killed").go(45)
    before = (run.path / "results.json").read_text()
    run.go(100)
    (run.path / "results.json").write_text(before)
    matrix = open_run(run.path).matrix
    assert matrix is not None
    assert matrix.measures["nll"][2][matrix.tasks.index("mnli")] is not None
    assert matrix.measures["nll"][5] == (None,) * 5


@pytest.mark.parametrize(
    "made",
    [
        {"stages": 2, "overlap": 0.0},
        {"evaluate": False},
        {"probes": False, "overlap": 0.0},
        {"steps": 3},
    ],
    ids=str,
)
def test_runs_of_every_kind_have_a_report(made: dict[str, Any], tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", **made).go()
    assert read_page(run.path).ids["state"] == "finished"
    print_summary(run.path, Console(file=None, record=True, width=100, quiet=True))


@pytest.mark.parametrize("kept", ["config.yaml", "metrics.jsonl"])
def test_one_file_is_enough(kept: str, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(finished / kept, run / kept)
    page = read_page(run)
    assert page.ids["summary"]
    assert page.figures == (PICTURES if kept == "metrics.jsonl" else set())


def test_unreadable_files_do_not_stop_a_report(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "results.json").write_text('{"finished": true, "matr')
    (run / "config.yaml").write_text("job: [unclosed")
    for path in (run / "evaluations").rglob("*.jsonl"):
        path.write_text("not json\n")
    assert "learned" in read_page(run).ids["summary"]


def keep_train_records(run: Path, steps: set[int]) -> None:
    """Leave a run's train records at a few steps alone, as a large report_interval does."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [record for record in lines if record["kind"] != "train" or record["step"] in steps]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))


def drawn_at(run: Path, tokens: float) -> dict[str, float]:
    """What the picture of the curriculum shows at a place."""
    found = curriculum_picture.drawn(open_run(run))
    assert found is not None
    [piece] = [piece for piece in found.pieces if piece.start <= tokens < piece.end]
    return {name: amount for name, amount in piece.amounts.items() if amount}


@pytest.mark.parametrize("broken", ["", "config.yaml"], ids=["planned", "recorded"])
def test_a_stage_with_one_record_shows_its_own_dataset(broken: str, tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", overlap=0.0).go()
    keep_train_records(run.path, {40, 60, 120, 198, 200})  # stages of 40 steps: one record in each, two in the last
    if broken:
        (run.path / broken).write_text("job: [unclosed")
    unit = run.curriculum.tokens_per_step
    for stage, name in enumerate(NAMES):
        for step in (40 * stage, 40 * stage + 1, 40 * stage + 39):
            expected = {name: float(BATCH)}
            if broken and stage == 3 and step < 198:
                continue  # no record of this stage: the one after it counts
            assert drawn_at(run.path, step * unit) == expected, (name, step)


def test_the_curriculum_is_drawn_from_the_plan_to_the_last_row(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", overlap=0.7, steps=37, replay=0.1).go()
    keep_train_records(run.path, {74})
    plan, unit = DataPlan(run.curriculum, seed=0), run.curriculum.tokens_per_step
    found = curriculum_picture.drawn(open_run(run.path))
    assert found is not None
    edges = {edge for start, end, _ in run.curriculum.segments() for edge in (start, end)}
    assert {edge * unit for edge in edges} <= {0, *(each.end for each in found.pieces)}
    for step in edges:
        pieces = [each for each in found.pieces if each.end <= step * unit]
        for source, count in plan.drawn_before(step).items():
            rows = sum(each.amounts[source.name] * (each.end - each.start) / unit for each in pieces)
            assert rows == pytest.approx(count, abs=1e-6)
    assert [each.end for each in found.pieces[:-1]] == [each.start for each in found.pieces[1:]]
    assert found.pieces[-1].end == plan.table.total_steps * unit


def test_an_unfinished_run_shows_what_it_has_drawn(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run").go(50)
    found = curriculum_picture.drawn(open_run(run.path))
    assert found is not None
    assert found.pieces[-1].end == 50 * run.curriculum.tokens_per_step


def test_shares_of_tokens_need_no_data(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", overlap=0.0, mixture_unit="tokens").go()
    found = curriculum_picture.drawn(open_run(run.path))
    assert found is not None
    assert "share" in found.label
    assert drawn_at(run.path, 50 * run.curriculum.tokens_per_step) == {"mnli": 1.0}


def test_a_long_plan_is_drawn_by_its_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(FakeRun(tmp_path / "run").go().path)
    counted = curriculum_picture.drawn(run)
    monkeypatch.setattr(curriculum_picture, "COUNTED_STEPS", 10)
    shared = curriculum_picture.drawn(run)
    assert counted is not None
    assert shared is not None
    for first, second in zip(counted.pieces, shared.pieces, strict=True):
        assert (first.start, first.end) == (second.start, second.end)
        assert all(abs(first.amounts[name] - second.amounts[name]) <= 1 for name in NAMES)


def test_null_losses_are_drawn_as_gaps(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if record["kind"] == "train" and record["step"] % 8 == 0:
            record |= {"loss": None, "ce": None, "grad_norm": None, "skipped": 1}
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = write_report(run, pictures=False).read_text()
    assert "recorded steps were skipped" in text
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", text.lower())


def test_a_folder_without_a_run_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no run"):
        write_report(tmp_path)


def test_the_sentence_tells_learned_from_forgotten(tmp_path: Path) -> None:
    forgetful, keeping = (FakeRun(tmp_path / str(kept), kept=kept).go().path for kept in (0.0, 1.0))
    words = {each.task: each.word for each in verdicts(open_run(forgetful))}
    assert words["stories"] == words["mnli"] == "forgotten"
    assert words["speeches"] == "learned"
    assert {each.word for each in verdicts(open_run(keeping))} == {"learned"}
    assert "forgot nothing that shows" in sentence(open_run(keeping))
    assert re.search(r"^Finished: learned .*; forgot .*stories", sentence(open_run(forgetful)))


def test_the_most_surely_forgotten_come_first(tmp_path: Path) -> None:
    run = open_run(FakeRun(tmp_path / "run", kept=0.0).go().path)
    lost = surely_forgotten(run)
    assert lost
    assert [each.sureness for each in lost] == sorted((each.sureness for each in lost), reverse=True)
    assert all(each.before.right and not each.after.right for each in lost)


def test_the_terminal_shows_the_matrix(finished: Path) -> None:
    console = Console(record=True, width=160, quiet=False, file=io.StringIO())
    print_summary(finished, console)
    text = console.export_text()
    results = read_results(finished)
    for value in [v for row in results["matrix"]["bits_per_byte"] for v in row]:
        assert number(value) in text
    assert "forgetting" in text


def test_a_report_imports_no_jax(finished: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from holdfast.report import write_report, print_summary\n"
        f"run = Path({str(finished)!r}); write_report(run, pictures=False); print_summary(run)\n"
        "heavy = {'jax', 'flax', 'orbax', 'pandas', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
