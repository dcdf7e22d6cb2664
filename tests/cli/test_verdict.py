"""`holdfast verdict`: words, tables, JSON, files, and how mistakes end."""

import csv
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import main
from holdfast.cli.app import app
from holdfast.studies.results import Row, write_results
from study_examples import arm_rows, plain_rows, study_rows

ROOT = Path(__file__).resolve().parents[2]
TWO_RATES = "arm,seed,learning_rate,old,new\nplain,0,0.1,1,2\nplain,0,0.2,1,2\n"
KEYS = {"verdict", "delta", "low", "high", "p", "mde", "seeds"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("study") / "results.csv"
    costs = {"step_seconds": 0.25}
    write_results(path, [Row(**{**vars(row), "costs": costs}) for row in study_rows()])
    return path


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["verdict", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_words_come_first_then_tables_and_what_it_is_conditional_on(results: Path) -> None:
    said = run(results)
    assert said.startswith("kept keeps 0.47 ± ")
    for part in ("Δ₊ [interval]", "rate × 0.333", "s/step", "δ = 0.03 (1% of what plain learns); 5 seeds, 40 runs"):
        assert part in said
    assert "- conditional on this held-out set" in said
    assert run(results.parent) == said


def test_json_has_the_promised_keys(results: Path) -> None:
    found = json.loads(run(results, "--json"))
    assert {name: arm["verdict"] for name, arm in found["arms"].items()} == {
        "kept": "better",
        "lost": "worse",
        "null": "no evidence",
        "slow": "learns less",
        "quick": "learns more",
    }
    assert all(set(arm) >= KEYS for arm in found["arms"].values())
    kept, lost, slow = (found["arms"][name] for name in ("kept", "lost", "slow"))
    assert 0 < kept["low"] < kept["delta"] < kept["high"]
    assert lost["low"] < lost["delta"] < lost["high"] < 0
    assert kept["p"] <= 0.025
    assert [slow[name] for name in ("delta", "low", "high", "p", "mde")] == [None] * 5
    assert kept["beside"] == {"step_seconds": 0.25}


def test_files_are_written(results: Path, tmp_path: Path) -> None:
    names = {kind: tmp_path / f"out.{kind}" for kind in ("html", "csv", "latex", "svg")}
    said = run(results, *(part for kind, path in names.items() for part in (f"--{kind}", path)))
    assert said.split()[-4:] == [str(path) for path in names.values()]
    with names["csv"].open(newline="") as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert (rows["kept"]["verdict"], rows["slow"]["delta"]) == ("better", "")
    assert float(rows["kept"]["delta"]) == pytest.approx(0.47)
    latex = names["latex"].read_text()
    assert r"\toprule" in latex
    assert r"$\Delta_+$" in latex
    assert "δ" not in latex
    ET.fromstring(names["svg"].read_text())
    page = names["html"].read_text()
    assert "kept keeps 0.47 ±" in page
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", page), "the page needs nothing else"
    assert page.count('data-chart="frontier_') == 1
    for word in ("plain, each seed", "plain moved by the margin", "How to read it", "s/step"):
        assert word in page


def test_json_stays_alone_on_stdout_where_files_are_written_too(results: Path, tmp_path: Path) -> None:
    assert json.loads(run(results, "--json", "--csv", tmp_path / "x.csv"))["seeds"] == [0, 1, 2, 3, 4]


def test_several_tasks_have_a_section_and_a_picture_each(tmp_path: Path) -> None:
    rows = [row for task in ("a", "b") for row in (*plain_rows(task=task), *arm_rows("arm", 3.0, 1.5, task=task))]
    path, page = tmp_path / "r.csv", tmp_path / "v.html"
    write_results(path, [*rows, Row("joint", 0, None, 1.0, 2.0, task="a")])
    said = run(path, "--html", page)
    assert "mean of tasks, of what plain loses" in said
    assert "joint (bound)" in said
    assert page.read_text().count('data-chart="frontier_') == 3


def test_two_arms_are_compared_with_each_other(results: Path) -> None:
    said = run(results, "--pair", "kept", "lost", "--resample", "20")
    assert said.startswith("kept against lost, 5 seeds: keeps 1.1")
    assert "20 resamplings: " in said
    assert json.loads(run(results, "--pair", "kept", "lost", "--json"))["verdict"] == "better"


@pytest.mark.parametrize(
    ("text", "more", "named"),
    [
        ("arm,seed,learning_rate,old,new\nplain,0,0.1,1,2\nplain,0,0.2,?,2\n", [], "r.csv:3: column old: got '?'"),
        ("arm,seed,learning_rate,old,new\na,0,0.1,1,2\n", [], "r.csv: column arm: no row of the arm 'plain'"),
        (None, [], "r.csv: there is no such file"),
        ("arm,seed,learning_rate,old,new\nplain,0,0.1,1,2\n", ["--select", "x"], "--select: got 'x'"),
        (TWO_RATES, ["--pair", "a", "plain@0.1"], "--html: not with --pair"),
        (TWO_RATES, ["--resample", "5"], "--resample: expected --pair beside it"),
        (TWO_RATES, ["--base-rate", "0"], "--base-rate: got 0, expected a learning rate above 0"),
        (TWO_RATES, ["--base-rate", "nan"], "--base-rate: got nan"),
        (TWO_RATES, ["--margin", "inf"], "--margin: got inf, expected a loss of at least 0"),
        (TWO_RATES, ["--csv", "."], "--csv: . is a folder"),
    ],
)
def test_mistakes_end_with_2_and_nothing_is_written(
    text: str | None, more: list[str], named: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    path = tmp_path / "r.csv"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr("sys.argv", ["holdfast", "verdict", str(path), "--html", str(tmp_path / "x.html"), *more])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_results_are_not_written_over_and_unknown_pairs_end_with_2(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "r.csv"
    path.write_text(TWO_RATES)
    for more, named in ((["--csv", str(path)], "is the file of results"), (["--pair", "a", "b"], "--pair: got 'a'")):
        monkeypatch.setattr("sys.argv", ["holdfast", "verdict", str(path), *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert named in capsys.readouterr().err
    assert path.read_text() == TWO_RATES


def test_the_page_shows_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "verdict.md").read_text(encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^<!-- runs -->\n```bash\nholdfast verdict (.*)\n```$", page, re.MULTILINE)
    assert len(commands) == 2
    words, pair = (" ".join(run(*command.split()).split()) for command in commands)
    assert words.startswith(re.findall(r"^> (.*)$", page, re.MULTILINE)[0])
    assert f"`{pair}`" in page
    assert (tmp_path / "verdict.html").is_file()
