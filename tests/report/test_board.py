"""The board: live, read-only, for this machine and this folder alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_runs import FakeRun
from holdfast.errors import UserError
from holdfast.execution.files import run_lock
from holdfast.report import live
from holdfast.report.board import serve
from holdfast.report.live import alive, find_run_dirs
from served_board import Served


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    FakeRun(folder / "general" / "default" / "one").go()
    FakeRun(folder / "general" / "default" / "two", seed=1).go(50)
    (tmp_path / "secret.txt").write_text("secret")
    return folder


@pytest.fixture
def board(root: Path) -> Iterator[Served]:
    served = Served(root)
    yield served
    served.close()


def files_below(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}


def test_states_and_progress(root: Path, board: Served) -> None:
    found = board.runs()
    assert {path: run["state"] for path, run in found.items()} == {
        "general/default/one": "finished",
        "general/default/two": "unfinished",
    }
    two = found["general/default/two"]
    assert (two["step"], two["total_steps"], two["stage"]) == (50, 200, "mnli stage")
    assert two["loss"] > 0
    assert "mnli 0." in two["evaluation"]


def test_a_run_moves_and_ends_while_the_board_looks(root: Path, board: Served) -> None:
    run = FakeRun(root / "general" / "default" / "three", seed=2)
    name = "general/default/three"
    with run_lock(run.path):
        run.go(20)
        first = board.runs()[name]
        run.go(60)
        second = board.runs()[name]
        run.go(finished=True)
    assert (first["state"], first["step"]) == ("running", 20)
    assert (second["state"], second["step"]) == ("running", 60)
    assert 0 < second["eta_seconds"] < first["eta_seconds"]
    last = board.runs()[name]
    assert (last["state"], last["step"], last["eta_seconds"]) == ("finished", 200, None)


def test_a_killed_run_is_not_running(root: Path) -> None:
    run = root / "general" / "default" / "two"
    (run / "lock").write_text("pid 999999999 on elsewhere")
    assert not alive(run)
    (run / "lock").write_text("")
    assert not alive(run)


@pytest.mark.parametrize(
    "path",
    [
        "/files/..%2f..%2fetc/passwd",
        "/files/../../etc/passwd",
        "/files/..%2fsecret.txt",
        "/files/%2e%2e/secret.txt",
        "/files//etc/passwd",
        "/files/%2fetc%2fpasswd",
        "/files/general/%00",
        "/files/link.txt",
        "/files/general",
        "/run/..%2f..%2fetc/passwd",
        "/run/..",
        "/run/nothing",
        "/..%2f..%2fetc/passwd",
        "/compare?run=..%2f..&run=general/default/one",
        "/nothing",
    ],
)
def test_nothing_outside_is_served(path: str, root: Path, board: Served) -> None:
    (root / "link.txt").symlink_to(root.parent / "secret.txt")
    status, text = board.ask(path)
    assert status == 404
    assert b"secret" not in text
    assert b"root:" not in text


def test_reports_files_and_comparisons_are_served(root: Path, board: Served) -> None:
    status, text = board.ask("/run/general/default/one")
    assert status == 200
    assert b'data-chart="forgetting"' in text
    assert (
        board.ask("/files/general/default/one/results.json")[1]
        == (root / "general" / "default" / "one" / "results.json").read_bytes()
    )
    status, text = board.ask("/compare?run=general/default/one&run=general/default/two")
    assert (status, b"2 runs compared" in text) == (200, True)
    assert board.ask("/compare?run=general/default/one")[0] == 400
    assert b"general/default/two" in board.ask("/")[1]


def test_it_only_reads(root: Path, board: Served) -> None:
    before = files_below(root)
    for path in (
        "/",
        "/api/runs",
        "/run/general/default/two",
        "/compare?run=general/default/one&run=general/default/two",
    ):
        assert board.ask(path)[0] == 200
    assert files_below(root) == before
    for method in ("POST", "PUT", "DELETE"):
        assert board.ask("/files/general/default/one/results.json", method)[0] == 405


def test_other_hosts_names_are_refused(board: Served) -> None:
    assert board.ask("/api/runs", host="evil.example")[0] == 400
    assert board.ask("/api/runs", host=f"localhost:{board.port}")[0] == 200


def test_it_listens_on_the_loopback_address_alone(board: Served, root: Path) -> None:
    said: list[str] = []
    with pytest.raises(UserError, match="--port"):
        serve(root, board.port, said.append)
    with pytest.raises(UserError, match="no such folder"):
        serve(root / "nowhere", 0, said.append)
    assert not said


def test_two_hundred_runs_are_listed(tmp_path: Path) -> None:
    first = FakeRun(tmp_path / "runs" / "g" / "r000", probes=False).go()
    texts = {name: (first.path / name).read_bytes() for name in ("config.yaml", "metrics.jsonl", "results.json")}
    for number in range(1, 200):
        folder = tmp_path / "runs" / "g" / f"r{number:03}"
        folder.mkdir()
        for name, data in texts.items():
            (folder / name).write_bytes(data)
    found = live.statuses(tmp_path / "runs")
    assert len(found) == 200
    assert found[7].step == 200


def test_runs_are_found_below_and_not_inside_runs(root: Path) -> None:
    inner = root / "general" / "default" / "one" / "copy"
    FakeRun(inner)
    (root / ".hidden").mkdir()
    FakeRun(root / ".hidden" / "x")
    assert [path.name for path in find_run_dirs(root)] == ["one", "two"]
