"""A folder of task definitions for lm-evaluation-harness with local data: one of each kind, and one that cannot work.

`sources` are three datasets that teach one answer each, so that every stage moves the scores of the tasks.
"""

import json
from pathlib import Path
from typing import Any

ANSWERS = ["yes", "näin", "maybe so"]
LABELS = [0, 0, 0, 1, 1, 2]
HEAD = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
"""
KINDS = {
    "own_choice": """output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: ["yes", "näin", "maybe so"]
doc_to_target: "{{a}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "own_words": """output_type: loglikelihood
doc_to_text: "{{q}}"
doc_to_target: " {{['yes', 'näin', 'maybe so'][a]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "own_said": """output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: " yes"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "own_text": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
}


def write_tasks(folder: Path) -> Path:
    """The folder `tasks` below a folder, with the data beside it; `own_broken` names a file that is not there."""
    data = folder / "questions.jsonl"
    rows = [{"q": f"is {i} {'very ' * (i % 3)}even?", "a": label} for i, label in enumerate(LABELS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, rest in KINDS.items():
        (tasks / f"{name}.yaml").write_text(HEAD.format(name=name, path=data) + rest)
    broken = HEAD.format(name="own_broken", path=folder / "nothing.jsonl") + KINDS["own_choice"]
    (tasks / "own_broken.yaml").write_text(broken)
    return tasks


def sources(folder: Path) -> dict[str, Any]:
    """Datasets `stage_0`, `stage_1` and `stage_2`, which answer every question with one word each."""
    made = {}
    for index, answer in enumerate(ANSWERS):
        path = folder / f"stage_{index}.jsonl"
        rows = [{"q": f"is {i} {'very ' * (i % 3)}even?"} for i in range(index * 100 + 10, index * 100 + 90)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made[f"stage_{index}"] = {"path": str(path), "prompt": "{q}", "answer": f" {answer}"}
    return made
