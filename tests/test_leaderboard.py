"""The published table is made from files of results alone."""

from pathlib import Path

import pytest
from tools import leaderboard

from holdfast.studies.records import COLUMNS, to_csv

VERDICTS = {
    "arms": {
        "replay": {"verdict": "better", "delta": 0.1, "low": 0.05, "high": 0.15, "mde": 0.04, "seeds": 2},
        "EWC": {"verdict": "no evidence", "delta": 0.01, "low": -0.05, "high": 0.07, "mde": 0.06, "seeds": 2},
    }
}


def rows() -> list[dict[str, str]]:
    found = []
    for seed in (0, 1):
        for arm, rate, steps, old, new in (
            ("before", "", 0, 2.0, 4.0),
            ("plain", "0.001", 4, 3.0, 3.0),
            ("plain", "0.01", 4, 4.0, 2.0),
            ("replay", "0.01", 2, 3.9, 2.5),
            ("replay", "0.01", 4, 3.5, 2.0),
            ("EWC", "0.01", 4, 4.0, 2.0),
            ("joint", "", 8, 2.5, 2.0),
        ):
            told = {"arm": arm, "learning_rate": rate, "steps": f"{steps}", "old": f"{old + seed}", "new": f"{new}"}
            found.append({**dict.fromkeys(COLUMNS, ""), **told, "seed": f"{seed}", "task": "a", "extra_rows": "5"})
    return found


def test_the_page_has_verdicts_in_words_means_and_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "one.yaml").touch()
    (tmp_path / "two.yaml").touch()
    (tmp_path / "results" / "one.csv").write_text(to_csv(rows()))
    monkeypatch.setattr(leaderboard, "STUDIES", tmp_path)
    monkeypatch.setattr(leaderboard, "judged", lambda _: VERDICTS)
    page = leaderboard.page()
    assert "- **replay**: better; keeps +0.100 [+0.050, +0.150] bits per byte more than plain\n" in page
    assert "an effect of 0.060 would have been seen" in page
    replay = next(line for line in page.splitlines() if line.startswith("| replay"))
    cells = [cell.strip() for cell in replay.strip("|").split("|")]
    assert cells[3] == "2.000 ± 0.000"
    assert cells[4].startswith("4.000")
    assert cells[5].startswith("4.400"), "the largest old loss, before the end"
    assert cells[8] == "1.000 ± 0.000", "paired by seed with joint training"
    assert "Not run yet: two." in page
