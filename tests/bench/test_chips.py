"""The table of compiled steps: rows are final, programs that changed are compiled again, the page has both sides."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import chips
from benchmarks.bench import Bench
from benchmarks.chips import Case, Found
from benchmarks.environments import Environment

OURS = Case("ours", "plain", "1B", "v5e", "2x4", 2048)
THEIRS = OURS._replace(system="levanter")
PROGRAM = ["first"]
TEXT = """
ENTRY %main () -> f32[] {
  %gathered = f32[1024,1024,256]{2,1,0} all-gather(%x), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}
  %kernel = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"
}
"""
FOUND = Found("abc", "0.0.1", 3 << 30, 1 << 30, 2 << 30, 1.5e13, 3, 60)


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """What is compiled by two cases whose compiler is made up."""
    done: list[Case] = []

    def asked(command: list[str]) -> dict[str, Any]:
        case = OURS if "benchmarks.chip_worker" in command else THEIRS
        facts: dict[str, Any] = {"libtpu": chips.LIBTPU_VERSION}
        if case == OURS:
            facts["program"] = PROGRAM[0]
            if json.loads(command[-1])["known"] == PROGRAM[0]:
                return facts
        done.append(case)
        sizes = {"argument": 3, "output": 3, "alias": 3, "temp": 1 if case == OURS else 5, "generated_code": 0}
        Path(json.loads(command[-1])["text"]).write_text(TEXT)
        return {**facts, "products": 8e13, "memory": {name: size << 30 for name, size in sizes.items()}}

    page = tmp_path / "benchmarks.md"
    page.write_text("# Benchmarks\n\nbefore\n")
    monkeypatch.setattr(chips, "RESULTS", tmp_path / "chips.csv")
    monkeypatch.setattr(chips, "PAGE", page)
    monkeypatch.setattr(chips, "cases", lambda: iter([OURS, THEIRS]))
    monkeypatch.setattr(chips, "environment", lambda name: Environment(Path(name)))
    monkeypatch.setattr(chips, "asked", asked)
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", ["first"])
    return done


def test_a_row_is_compiled_once_and_again_when_its_program_changes(compilations: list[Case], tmp_path: Path) -> None:
    bench = Bench(tmp_path, 1)
    chips.run(bench)
    chips.run(bench)
    assert compilations == [OURS, THEIRS]
    PROGRAM[0] = "changed"
    chips.run(bench)
    assert compilations == [OURS, THEIRS, OURS]
    assert {case: found.program for case, found in chips.read(chips.RESULTS).items()} == {
        OURS: "changed",
        THEIRS: chips.LEVANTER_VERSION,
    }


def test_no_compilation_is_begun_when_the_time_is_over_and_a_page_is_written_all_the_same(
    compilations: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chips, "MINUTES", -1)
    chips.run(Bench(tmp_path, 1))
    assert compilations == []
    assert "2 of 2 programs are not, or not wholly, compiled yet" in chips.PAGE.read_text()
    assert "compiled, not run" in chips.PAGE.read_text()


def test_the_page_has_one_section_with_ours_beside_theirs(compilations: list[Case], tmp_path: Path) -> None:
    for _ in range(2):
        chips.run(Bench(tmp_path, 1))
    text = chips.PAGE.read_text()
    assert "compiled yet" not in text
    assert text.startswith("# Benchmarks\n\nbefore\n")
    assert text.count("compiled, not run") == 1
    assert "| ours, plain | 4.00 GiB | 0.50 | 0.88 GiB | 1.00 | 10.0 T | 1 |" in text
    assert "| levanter | 8.00 GiB |  | 0.88 GiB |  | 11.1 T | 1 |" in text


def test_a_program_that_does_not_fit_has_its_memory_alone(tmp_path: Path) -> None:
    refused = FOUND._replace(temporaries=None, sent=None, flops=None, kernels=None)
    chips.write(tmp_path / "rows.csv", {OURS: refused, THEIRS: FOUND})
    assert chips.read(tmp_path / "rows.csv") == {OURS: refused, THEIRS: FOUND}
    assert chips.line(OURS, refused, FOUND).endswith("| ours, plain | 3.00 GiB, does not fit | 1.00 |  |  |  |  |")


def test_both_sides_do_the_same_work_and_ours_has_kernels_inside() -> None:
    known = chips.read(chips.RESULTS)
    assert known, "rows are committed"
    for case, found in known.items():
        if found.kernels is not None:
            assert found.kernels > 0, case
        peer = known.get(case._replace(system="levanter"))
        if case.kind == "plain" and peer is not None and peer.flops and found.flops:
            assert found.flops == pytest.approx(peer.flops, rel=0.02), case
