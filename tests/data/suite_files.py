"""Small files of the suites in the formats in which they are published."""

import csv
import json
from pathlib import Path
from typing import Any

TRACE_ROWS = {
    "C-STANCE": ("判断以下文本对指定对象的态度。文本：{}\n态度：\n", "A"),
    "FOMC": ("What is the monetary policy stance? Text: {}\nStance:\n", "B"),
    "MeetingBank": ("Write a summary. Meeting transcripts: item {}.\nSummary:\n", "a recommendation was adopted"),
    "Py150": ("<s> import os <EOL> x = {} <EOL>", "y = <NUM_LIT:1>"),
    "ScienceQA": ("Choose an answer. Question: {}?\nAnswer:\n", "C\nBecause it is so."),
    "NumGLUE-cm": ("Solve the following math problem. {} + 1?\nAnswer:\n", "12"),
    "NumGLUE-ds": ("Solve the following math problem. {} - 1?\nAnswer:\n", "3"),
    "20Minuten": ("Provide a simplified version in German. Absatz {}.\n", "Ein Absatz."),
}
CSV_ROWS = {
    "ag_news_csv": ["Wall St. {}", "Shares fell."],
    "amazon_review_full_csv": ["Great {}", 'It is "good", really.'],
    "dbpedia_csv": ["Acme {}", "Acme is a company."],
    "yahoo_answers_csv": ["why {}?", "", "because"],
    "yelp_review_full_csv": ["place {} was fine\\nreally"],
}
CLASSES = {"ag_news_csv": 4, "amazon_review_full_csv": 5, "dbpedia_csv": 14, "yahoo_answers_csv": 10}


def write_trace(root: Path, count: int = 6) -> None:
    """TRACE's folders: `TASK/train.json`, `eval.json` and `test.json`, arrays of prompt and answer."""
    for task, (prompt, answer) in TRACE_ROWS.items():
        folder = root / task
        folder.mkdir(parents=True)
        for part, name in enumerate(("train", "eval", "test")):
            rows = [{"prompt": prompt.format(100 * part + i), "answer": answer} for i in range(count)]
            (folder / f"{name}.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")


def write_reviews(root: Path, count: int = 20) -> None:
    """The CSV files of Zhang et al., without a header."""
    for name, texts in CSV_ROWS.items():
        (root / name).mkdir(parents=True)
        for part, split in enumerate(("train", "test")):
            with (root / name / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, quoting=csv.QUOTE_ALL)
                for i in range(count):
                    filled = [text.format(1000 * part + i) for text in texts]
                    writer.writerow([i % CLASSES.get(name, 5) + 1, *filled])


def task_file(count: int = 40) -> dict[str, Any]:
    """The content of a task file of Super-NaturalInstructions."""
    instances = [
        {"id": f"t-{i}", "input": f"dialogue {i}", "output": [f"summary {i}", "another"]} for i in range(count)
    ]
    return {
        "Contributors": ["a"], "Categories": ["Summarization"], "Definition": ["Summarise the dialogue."],
        "Positive Examples": [{"input": "x", "output": "y", "explanation": "z"}], "Negative Examples": [],
        "Instances": instances,
    }  # fmt: skip
