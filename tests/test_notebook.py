"""`quick` and `results` as the page about notebooks shows them, and the notebooks themselves."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from holdfast import quick, results
from holdfast.errors import UserError
from holdfast.report.run_files import open_run
from holdfast.tracking import RunInfo
from holdfast.tracking.events import Event, message
from holdfast.tracking.notebook import NotebookSink, in_notebook

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
RUNS = re.compile(r"^<!-- runs -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the examples of the page leave behind, run as they stand in an empty folder."""
    folder = tmp_path_factory.mktemp("page")
    blocks = RUNS.findall((ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8"))
    assert len(blocks) == 2
    names: dict[str, Any] = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in blocks:
            exec(block, names)  # as a reader would
        names["folder"] = folder / "runs" / "general" / "default" / "try"
    return names


def test_the_examples_of_the_page_run(page: dict[str, Any]) -> None:
    assert page["figure"].axes
    assert isinstance(page["found"], pd.DataFrame)
    assert page["found"].runs == ["try"]


def test_results_are_the_runs_own_numbers(page: dict[str, Any]) -> None:
    found, run = page["found"], open_run(page["folder"])
    matrix = found.matrix("nll")
    assert list(matrix.index) == ["before training", "lists", "topics"]
    assert matrix.to_numpy().tolist() == [list(row) for row in run.results["matrix"]["nll"]]
    assert found.metrics().loc["try", "nll/average"] == run.results["metrics"]["nll"]["average"]
    curves = found.curves("train")
    assert list(curves[curves.name == "loss"].value) == [record["loss"] for record in run.kind("train")]


def test_a_notebook_shows_sentence_matrix_and_curves(page: dict[str, Any]) -> None:
    html = page["found"]._repr_html_()
    assert "<b>try</b>: Finished" in html
    assert html.count("data:image/svg+xml;base64,") >= 3
    both = results.load([page["folder"], page["folder"]])
    assert both.runs == ["try"]  # a run that is named twice is one


def test_what_is_not_there_is_said(page: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"figure: got 'nothing', expected one of .*loss"):
        page["found"].figure("nothing")
    with pytest.raises(UserError, match="measure: got 'f1', expected one of"):
        page["found"].matrix("f1")
    with pytest.raises(UserError, match="run: got 'other', expected one of try"):
        page["found"].matrix(run="other")


def test_options_are_set_as_on_the_command_line(tmp_path: Path) -> None:
    with quick("gpt/train/pretrain", root=tmp_path) as job:
        job.config.training.seed = 3
        job.set("training.batch_size=4 optimization.lr=0.5", "eval.evaluations=[lists, topics]")
        assert (job.config.training.batch_size, job.config.optimization.lr, job.config.training.seed) == (4, 0.5, 3)
        assert list(job.config.eval.evaluations) == ["lists", "topics"]
        with pytest.raises(UserError, match="training/batch_siz"):
            job.set("training.batch_siz=4")


def test_the_display_moves_and_keeps_rows_of_the_matrix() -> None:
    assert not in_notebook()
    shown: list[str] = []
    clock = iter(range(100))

    def show(html: str) -> Any:
        shown.append(html)
        return shown.append

    info = RunInfo(Path(), name="<a>", total_steps=10, tokens_per_step=8, stages=((0, "one"), (5, "two")))
    sink = NotebookSink(info, show, lambda: float(next(clock)))
    sink.log(Event("train", 5, 40, {"loss": 2.0}))
    sink.log(Event("evaluation", 5, 40, {"row": 1, "scores": {"lists": {"accuracy": 0.5}}}))
    sink.log(message("a word"))
    sink.log(Event("train", 10, 80, {"loss": 1.0}))
    sink.close()
    assert "one · step 5/10 · loss 2.0000" in shown[0]
    assert "width:50.0%" in shown[0]
    assert "after one: accuracy lists 0.5" in shown[-1]
    assert "a word" in shown[-1]
    assert "two · step 10/10 · loss 1.0000" in shown[-1]
    assert "width:100.0%" in shown[-1]
    assert "&lt;a&gt;" in shown[-1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs_and_install_first(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert "pip" in "".join(code[0]["source"])


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_to_their_ends(path: Path) -> None:
    pytest.importorskip("nbclient", reason="nbclient is not installed (pip install 'holdfast[notebooks]')")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (pip install 'holdfast[notebooks]')")
    tool = runpy.run_path(str(ROOT / "tools" / "run_notebooks.py"))
    if not tool["can_run"](path):
        pytest.skip(f"there is no command {tool['NEEDS'][path.stem]} yet")
    page = tool["render"](path.stem, tool["run"](path))
    assert "holdfast-progress" in page
    assert "<pre>0</pre>" not in page
    if path.stem == "verdict":
        assert "replay keeps " in page, "an arm that is better is found to be"
        assert "\x1b[" not in page
