"""Runs notebooks from their first cell to their last, in an empty folder each, and writes what they show as pages.

python tools/run_notebooks.py build/notebooks                            # all of examples/notebooks
python tools/run_notebooks.py build/notebooks examples/notebooks/own-model.ipynb
"""

import argparse
import base64
import os
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
NEEDS = {"verdict": "verdict"}  # notebook -> the command that it shows
STYLE = """body{max-width:56rem;margin:2rem auto;padding:0 1rem;font:16px/1.5 system-ui,sans-serif}
pre{background:#f5f6f8;padding:.75rem;overflow:auto;font-size:13px}.out{margin:0 0 1.5rem 1rem;overflow:auto}
table{border-collapse:collapse;font-size:14px}
td,th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #ddd}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the pages")
    parser.add_argument("notebooks", type=Path, nargs="*", help="all unless given")
    arguments = parser.parse_args()
    for path in arguments.notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        started = time.monotonic()
        if not can_run(path):
            print(f"{path.name}: skipped, there is no command {NEEDS[path.stem]} here", flush=True)
            continue
        page = arguments.out / f"{path.stem}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(render(path.stem, run(path)), encoding="utf-8")
        print(f"{path.name}: ran in {time.monotonic() - started:.0f} s; {page}", flush=True)


def can_run(path: Path) -> bool:
    """Whether the command that a notebook shows is there."""
    from holdfast.cli.app import COMMANDS

    return NEEDS.get(path.stem) in (None, *COMMANDS)


def run(path: Path) -> Any:
    """The notebook with its outputs; a cell that fails raises."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a libtpu without a TPU would look for one
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": folder}})
        client.execute()
    return notebook


def render(title: str, notebook: Any) -> str:
    """The notebook as a plain page."""
    parts = [f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(markdown(cell.source))
            continue
        parts.append(f"<pre>{escape(cell.source)}</pre>")
        parts += [f'<div class="out">{shown(output)}</div>' for output in cell.outputs]
    return "\n".join(parts)


def markdown(text: str) -> str:
    """Headings and paragraphs, which is all that our notebooks have."""
    blocks = []
    for block in text.split("\n\n"):
        level = len(block) - len(block.lstrip("#"))
        blocks.append(f"<h{level}>{escape(block[level:])}</h{level}>" if level else f"<p>{escape(block)}</p>")
    return "\n".join(blocks)


def shown(output: Any) -> str:
    """One output as a browser shows it."""
    if output.output_type == "stream":
        return f"<pre>{escape(output.text)}</pre>"
    data = output.get("data", {})
    if "text/html" in data:
        return str(data["text/html"])
    if "image/png" in data:
        return f'<img src="data:image/png;base64,{base64.b64encode(base64.b64decode(data["image/png"])).decode()}">'
    return f"<pre>{escape(str(data.get('text/plain', '')))}</pre>"


if __name__ == "__main__":
    sys.exit(main())
