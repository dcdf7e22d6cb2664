"""`results.csv`: what is written is read, and a mistake is named by its line and column."""

from pathlib import Path

import pytest

from holdfast.errors import UserError
from holdfast.studies.results import Row, read_results, results_file, to_csv, write_results

HEAD = "arm,seed,learning_rate,old,new"


def write(folder: Path, text: str) -> Path:
    path = folder / "r.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = [
        Row("plain", 0, 0.1 + 0.2, 1 / 3, 2.0, steps=10),
        Row("plain", 0, 0.003, 2.0, 2.0, strength="0.5", steps=10),
        Row(
            "a, b", 1, 0.003, 0.5, 2.0, "x", "sst2", 7, "d1", 12.0, "accuracy", "selection", "p", {"step_seconds": 0.5}
        ),
        Row("before", 0, None, 1.0, 3.0),
    ]
    path = tmp_path / "deep" / "results.csv"
    write_results(path, rows)
    # Two ways to compute one rate are one rate.
    assert read_results(path) == [Row("plain", 0, 0.3, 1 / 3, 2.0, steps=10), *rows[1:]]
    assert to_csv(rows[3:]) == f"{HEAD}\nbefore,0,,1.0,3.0\n"


def test_a_file_from_elsewhere_may_have_other_columns_spaces_and_blank_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path, "\ufeffnew, old ,mine,seed,arm,learning_rate\n2,1,x,0,plain,1e-3\n\n,,,,,\n3,2,y,1, b ,0.1\n"
    )
    assert read_results(path) == [Row("plain", 0, 0.001, 1.0, 2.0), Row("b", 1, 0.1, 2.0, 3.0)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ":1: column arm is missing; expected arm, seed, learning_rate, old, new, found nothing"),
        ("arm,seed,old,new\n", ":1: column learning_rate is missing"),
        (f"{HEAD}\n".replace(",", ";"), "found arm;seed;learning_rate;old;new; put commas between the cells"),
        (f"{HEAD},old\n", ":1: column old stands there twice"),
        (f"{HEAD}\n", "no rows below the header"),
        (f"{HEAD}\nplain,0,0.1,1,2\nplain,0,0.2,x,2\n", ":3: column old: got 'x', expected a finite loss"),
        (f"{HEAD}\nplain,0,0.1,1_000,2\n", ":2: column old: got '1_000', expected a finite loss"),
        (f"{HEAD}\nplain,0,0.1,1,nan\n", ":2: column new: got 'nan', expected a finite loss; a run that diverged"),
        (f"{HEAD}\nplain,0,0.1,-1,2\n", ":2: column old: got '-1', expected a loss of at least 0; lower is better"),
        (f"{HEAD}\nplain,0,0.1,1,1e308\n", ":2: column new: got '1e308', expected a loss of at most 1e+06"),
        (f"{HEAD}\nplain,a,0.1,1,2\n", ":2: column seed: got 'a', expected a whole number"),
        (f"{HEAD}\nplain,0.5,0.1,1,2\n", ":2: column seed: got '0.5', expected a whole number"),
        (f"{HEAD}\nplain,0,0,1,2\n", ":2: column learning_rate: got '0', expected a number above 0"),
        (f"{HEAD}\nplain,0,,1,2\n", ":2: column learning_rate: got '', expected a number above 0; only before"),
        (f"{HEAD}\n,0,0.1,1,2\n", ":2: column arm: got '', expected a name"),
        (f"{HEAD}\nplain,0,0.1,1\n", ":2: column new: 4 cells for 5 columns"),
        (f"{HEAD}\nplain,0,0.1,1,2,3\n", ":2: column new: 6 cells for 5 columns"),
        (f"{HEAD}\nplain,0,0.1,1,2\nplain,0,0.1,1,2\n", ":3: column arm: 'plain', seed 0 stands in line 2 already"),
        (f"{HEAD},measure\nplain,0,0.1,1,2,f1\n", ":2: column measure: got 'f1', expected loss or accuracy"),
        (f"{HEAD},measure\nplain,0,0.1,81,2,accuracy\n", ":2: column old: got '81', expected an accuracy from 0 to 1"),
        (f"{HEAD},role\nplain,0,0.1,1,2,test\n", ":2: column role: got 'test', expected judging or selection"),
        (f"{HEAD},strength\nplain,0,0.1,1,2,3\n", ":2: column strength: got '3', expected a share from 0 to 1"),
        (f"{HEAD},steps\nplain,0,0.1,1,2,-3\n", ":2: column steps: got '-3', expected a whole number"),
        (f"{HEAD},bytes\nplain,0,0.1,1,2,0\n", ":2: column bytes: got '0', expected a number above 0"),
        (f'{HEAD}\n"plain,0,0.1,1,2\n', "not CSV"),
    ],
)
def test_mistakes_are_named_by_line_and_column(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_results(write(tmp_path, text))
    assert named in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_bytes(b"arm\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        read_results(path)


def test_a_study_is_its_folder_or_its_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no results\.csv in this folder"):
        results_file(tmp_path)
    with pytest.raises(UserError, match="there is no such file"):
        results_file(tmp_path / "x.csv")
    study = tmp_path / "small.yaml"
    study.write_text("name: named\n")
    with pytest.raises(UserError, match="run the study first"):
        results_file(study, tmp_path)
    results = tmp_path / "study" / "named" / "results.csv"
    write_results(results, [Row("plain", 0, 0.1, 1.0, 2.0)])
    assert results_file(study, tmp_path) == results_file(results.parent) == results_file(results) == results


def test_costs_that_stand_beside_the_results_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    write_results(path, [Row("plain", 0, 0.1, 1.0, 2.0), Row("a", 0, 0.1, 1.0, 2.0, "5")])
    costs = tmp_path / "costs.csv"
    costs.write_text("arm,seed,learning_rate,strength,step_seconds,memory_gib,run\nplain,0,0.10,,0.5,nan,x\n")
    plain, other = read_results(path)
    assert (plain.costs, other.costs) == ({"step_seconds": 0.5}, {})
    costs.write_text("arm,seed\nplain,0\n")
    with pytest.raises(UserError, match=r"costs\.csv: not the costs of a study"):
        read_results(path)
