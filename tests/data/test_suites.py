"""Suites: published formats become documents, published orders become curricula, and metrics follow their formulas."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data.suite_files import TRACE_ROWS, task_file, write_reviews, write_trace
from holdfast.cli.app import app
from holdfast.cli.configs import read_config
from holdfast.cli.configure import suite_values
from holdfast.data.config import DataConfig
from holdfast.data.documents import SourceContext
from holdfast.data.sources import documents, find_source
from holdfast.data.sources.suites import SUITES
from holdfast.errors import UserError
from holdfast.evaluation.generate import is_right
from holdfast.evaluation.metrics import GRADED, rouge_l, sari, similarity, tokens_13a
from holdfast.evaluation.tasks import Task, find_task

NEEDED = ("rouge_score", "sacrebleu")


def configure(*arguments: str) -> None:
    done = CliRunner().invoke(app, ["configure", *arguments])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_is_written_and_can_be_planned(name: str, tmp_path: Path) -> None:
    out = tmp_path / "suite.yaml"
    order = len(SUITES[name].orders)
    configure("--suite", name, "--order", str(order), str(out), "--examples", "10", "training.batch_size=4")
    run = read_config(out, []).resolved()
    assert tuple(stage.name for stage in run.curriculum.stages) == SUITES[name].orders[-1]
    datasets = [SUITES[name].datasets[task] for task in SUITES[name].orders[-1]]
    assert run.config.evaluations == datasets
    assert [source.name for source in run.curriculum.datasets] == datasets
    assert run.options.evaluation.limit == SUITES[name].held_out
    first = SUITES[name].orders[-1][0]
    rows = -(-10 * SUITES[name].epochs.get(first, 1) // 4) * 4
    assert run.curriculum.stages[0].tokens == rows * run.curriculum.block_size
    assert all(set(order) == set(SUITES[name].datasets) for order in SUITES[name].orders)


def test_what_a_suite_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match="--suite tracee: there is no such suite; did you mean trace"):
        suite_values("tracee", None, None, None)
    with pytest.raises(UserError, match="--order 3: trace has the orders 1 to 2"):
        suite_values("trace", 3, None, None)
    with pytest.raises(UserError, match="--tasks FOMD: trace has no such task"):
        suite_values("trace", None, "FOMC,FOMD", None)
    with pytest.raises(UserError, match="each once"):
        suite_values("trace", None, "FOMC,FOMC", None)
    done = CliRunner().invoke(app, ["configure", "continual/train/abcd_kl", "x.yaml", "--order", "1"])
    assert "add --suite NAME" in str(done.exception)
    assert len(suite_values("superni", None, "task5,task1572", None)["stages"]) == 2  # type: ignore[arg-type]


def test_jobs_lists_the_suites() -> None:
    said = CliRunner().invoke(app, ["jobs"]).output
    assert all(name in said for name in SUITES)


def test_the_published_csv_files_are_what_the_hub_has(tmp_path: Path) -> None:
    write_reviews(tmp_path)
    data = DataConfig(root=str(tmp_path))
    first = {name: next(documents(name, "train", data)) for name in ("ag_news", "amazon", "dbpedia", "yahoo", "yelp")}
    assert first["ag_news"].prompt == "Wall St. 0 Shares fell.\nTopic:"
    assert (first["ag_news"].answer, len(first["ag_news"].choices)) == (" World", 4)
    assert first["amazon"].prompt == 'Great 0\nIt is "good", really.\nSentiment:'
    assert (first["amazon"].answer, first["yelp"].answer) == (" very negative", " very negative")
    assert (first["dbpedia"].answer, len(first["dbpedia"].choices)) == (" Company", 14)
    assert first["yahoo"].prompt == "why 0?\n\nbecause\nTopic:"
    assert len(first["yahoo"].choices) == 10
    assert [each.label for each in documents("yelp", "validation", data)] == [0, 1, 2, 3, 4] * 4
    # The same rows with the hub's field names, as jsonl, csv with a header or parquet.
    hub = tmp_path / "hub" / "ag_news"
    hub.mkdir(parents=True)
    (hub / "train.jsonl").write_text(json.dumps({"text": "Wall St. 0 Shares fell.", "label": 0}) + "\n")
    [again] = documents("ag_news", "train", DataConfig(root=str(tmp_path / "hub"), validation_fraction=1e-9))
    assert again._replace(id="") == first["ag_news"]._replace(id="")


def test_a_csv_row_with_other_columns_is_broken(tmp_path: Path) -> None:
    (tmp_path / "dbpedia").mkdir()
    (tmp_path / "dbpedia" / "train.csv").write_text('"1","a","b"\n"2","only a title"\n')
    data = DataConfig(root=str(tmp_path))
    context = SourceContext(data)
    assert len(list(find_source("dbpedia", data).documents("train", context))) == 1
    assert context.broken.counts == {"not a row of this dataset": 1}


def test_trace_files_are_read_where_they_are(tmp_path: Path) -> None:
    write_trace(tmp_path / "LLM-CL-Benchmark_5000")
    data = DataConfig(root=str(tmp_path))
    for task in ("C-STANCE", "20Minuten"):
        prompt, answer = TRACE_ROWS[task]
        train, held_out = (list(documents(f"trace-{task}", split, data)) for split in ("train", "validation"))
        assert (train[0].prompt, train[0].answer) == (prompt.format(0), answer)
        assert held_out[0].prompt == prompt.format(200)  # test.json, not eval.json
    with pytest.raises(UserError, match="trace-FOMC"):
        list(documents("trace-FOMC", "train", DataConfig(root=str(tmp_path / "LLM-CL-Benchmark_5000" / "FOMC"))))


def test_task_files_have_their_definition_before_each_instance(tmp_path: Path) -> None:
    content = task_file()
    content["Instances"].append({"id": "x", "input": "y", "output": []})
    (tmp_path / "superni").mkdir()
    (tmp_path / "superni" / "task1572_samsum_summary.json").write_text(json.dumps(content))
    data = DataConfig(root=str(tmp_path))
    context = SourceContext(data)
    found = list(find_source("superni-task1572", data).documents("train", context))
    assert found[3].prompt == "Definition: Summarise the dialogue.\n\nInput: dialogue 3\nOutput:"
    assert (found[3].answer, len(found)) == (" summary 3", 40)
    assert context.broken.counts == {"no input and output": 1}
    parts = [{each.prompt for each in documents("superni-task1572", split, data)} for split in ("train", "validation")]
    assert len(parts[0]) + len(parts[1]) == 40
    assert not parts[0] & parts[1]
    with pytest.raises(UserError, match=r"superni-task7: wanted task7_NAME\.json"):
        list(documents("superni-task7", "train", data))
    (tmp_path / "task8_x.json").write_text("[]")
    with pytest.raises(UserError, match="not a task file"):
        list(documents("superni-task8", "train", data))
    task = find_task("superni-task1572", data)
    assert isinstance(task, Task)
    assert (task.kind, task.metric) == ("generate", "rouge_l")


def test_metrics_by_hand() -> None:
    assert rouge_l("a b c", "a x c") == pytest.approx(2 / 3)
    assert rouge_l("", "a") == 0
    # "a b" kept as it is where "a c" was wanted: by hand, operation by operation and size by size.
    assert sari("a b", "a b", "a c") == pytest.approx(((2 / 3 + 1 + 0) + (0 + 1 + 0) + 3 + 3) / 12)
    assert sari("a b", "a c", "a c") == 1
    assert similarity("abcd", "abxd") == 0.75
    assert similarity("y = <STR_LIT:a>", "y = a") == 1
    assert is_right("Answer: B\nBecause", "B\nSo it is", "letter")
    assert not is_right("", "B", "letter")
    assert set(GRADED) == {"rouge_l", "similarity", "sari"}


@pytest.mark.extra
@pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDED)), reason="not installed: harness")
def test_rouge_and_tokens_are_those_of_the_known_packages() -> None:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    rng = random.Random(0)
    words = "the Cat sat , 3.5 dogs-cats (x) it's U.S. 1-2 &quot;q&quot; end.".split()  # noqa: SIM905 (readable)
    theirs, tokenizer = RougeScorer(["rougeL"]), Tokenizer13a()
    for _ in range(100):
        first, second = (" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(2))
        assert rouge_l(first, second) == pytest.approx(theirs.score(second, first)["rougeL"].fmeasure)
        assert tokens_13a(first) == tokenizer(first).split()
