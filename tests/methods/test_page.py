"""What users are told of each method: a line in `holdfast jobs`, and a paragraph on the page."""

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast import registry
from holdfast.cli.app import main
from holdfast.methods import BESIDE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
BUILT_IN = ("agem", "asft", "dft", "eaft", "ewc", "flow", "osf", "sfa", "si", "ssu", "stm", "talr")
OPTIONS = ("lines", "sam")  # options of other things than a stage


def paragraph(name: str) -> str:
    """The paragraph that a name begins."""
    found = re.search(rf"^\*\*`{name}`.*?(?=\n\n|\Z)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None, f"docs/methods.md has no paragraph on {name}"
    return found[0]


def test_every_method_has_one_line_in_the_list(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["holdfast", "jobs"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    listed, beside = capsys.readouterr().out.split("\nmethods")[1].split("\n\n")[:2]
    for name in BUILT_IN:
        assert re.search(rf"^  {name} +{re.escape(registry.methods.help(name))}", listed, re.MULTILINE), name
    assert beside.split()[:2] == ["beside", "methods"]
    for name, told in BESIDE.items():
        assert re.search(rf"^  {name} +{re.escape(told)}", beside, re.MULTILINE), name
    assert {"replay", "keep", *OPTIONS} <= {*BESIDE}


@pytest.mark.parametrize("name", [*BUILT_IN, *OPTIONS])
def test_every_method_has_a_paragraph_with_its_paper_and_what_it_needs(name: str) -> None:
    told = paragraph(name)
    assert "https://arxiv.org/abs/" in told
    assert re.search(r"[Nn]eeds|costs no\s+training", told)
