"""The board: live, read-only, for this machine and this folder alone."""

import base64
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.campaign.malformed import KNOWN, damaged, damages

from fake_runs import FakeRun
from holdfast.errors import UserError
from holdfast.execution.files import run_lock
from holdfast.report import live, write_report
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


def test_files_of_runs_are_never_pages(root: Path, board: Served) -> None:
    for name in ("evil.html", "evil.svg", "evil.js", "evil.xhtml"):
        (root / "general" / "default" / "one" / name).write_text("<script>alert(1)</script>")
        status, headers, _ = board.answer(f"/files/general/default/one/{name}")
        assert status == 200
        assert headers["content-disposition"].startswith("attachment")
        assert headers["content-type"] == "application/octet-stream"
        assert headers["content-security-policy"].startswith("sandbox; default-src 'none'")


@pytest.mark.parametrize("path", ["/", "/run/general/default/one", "/compare?run=general/default/one", "/nothing"])
def test_no_page_may_run_anything_but_its_own_script(board: Served, path: str) -> None:
    _, headers, text = board.answer(path)
    policy = headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    for tag in (b"script", b"style"):
        for inline in re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), text, re.DOTALL):
            assert base64.b64encode(hashlib.sha256(inline).digest()).decode() in policy
    assert not re.search(rb"<[^>]* (style|on[a-z]+)=", text)


def test_a_report_on_disk_has_the_same_policy(root: Path) -> None:
    text = write_report(root / "general" / "default" / "one", pictures=False).read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert "unsafe" not in policy
    assert policy.startswith("default-src &#x27;none&#x27;; style-src &#x27;sha256-")
    assert not re.search(r"<[^>]* (style|on[a-z]+)=", text)


def test_a_board_that_others_reach_asks_for_its_token(root: Path) -> None:
    board = Served(root, token="secret-token")
    try:
        for path in ("/", "/api/runs", "/files/general/default/one/results.json", "/?token=wrong", "/nothing"):
            status, _, text = board.answer(path)
            assert (status, b"general" in text) == (401, False)
        assert board.answer("/api/runs", Authorization="Bearer secret-token")[0] == 200
        assert board.answer("/api/runs", Authorization="Bearer wrong")[0] == 401
        status, headers, _ = board.answer("/?token=secret-token&run=a")
        assert (status, headers["location"]) == (303, "/?run=a")
        assert "httponly" in headers["set-cookie"].lower()
        assert board.answer("/api/runs", Cookie=headers["set-cookie"].partition(";")[0], host="board.example")[0] == 200
        assert board.answer("//evil.example/?token=secret-token")[1]["location"] == "/evil.example/"
    finally:
        board.close()


def test_addresses_that_others_reach_are_told_with_a_token(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str | None] = []
    monkeypatch.setattr("holdfast.report.board.make_board", lambda root, token: made.append(token))
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    said: list[str] = []
    for host in ("127.0.0.1", "0.0.0.0"):
        serve(root, 0, said.append, host)
    assert made[0] is None
    assert "token" not in said[0]
    assert made[1]
    assert f"?token={made[1]}" in said[1]
    with pytest.raises(UserError, match="--host"):
        serve(root, 0, said.append, "no such host")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FakeRun(tmp_path_factory.mktemp("small") / "good", stages=2, steps=12, probes=False).go().path


def test_a_bad_run_hides_no_other(small: Path, tmp_path: Path) -> None:
    for index, (_name, damage) in enumerate(itertools.islice(damages(), len(KNOWN) + 12)):
        damaged(small, tmp_path / "runs" / f"bad{index:03}", damage)
    shutil.copytree(small, tmp_path / "runs" / "good")
    found = {status.path: status for status in live.statuses(tmp_path / "runs")}
    assert found["good"].state == "finished"
    assert len(found) > len(KNOWN)
    assert json.dumps([status.to_dict() for status in found.values()], allow_nan=False).encode()


def test_one_run_that_cannot_be_read_at_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = live.status
    monkeypatch.setattr(live, "status", lambda path, name: 1 / 0 if "two" in name else real(path, name))
    found = {status.path: status.state for status in live.statuses(root)}
    assert found == {"general/default/one": "finished", "general/default/two": "unreadable"}


def test_pages_of_bad_runs_say_so(root: Path, board: Served) -> None:
    one, two = root / "general" / "default" / "one", root / "general" / "default" / "two"
    with (one / "metrics.jsonl").open("a") as file:
        file.write("no record\n")
    status, text = board.ask("/run/general/default/one")
    assert (status, b"1 line is no record" in text) == (200, True)
    (two / "config.yaml").unlink()
    os.mkfifo(two / "lock")
    (two / "results.json").write_text("[]")
    assert board.ask("/run/general/default/two")[0] in (200, 400)
    assert board.ask("/compare?run=general/default/one&run=general/default/two")[0] in (200, 400)
    assert board.ask("/api/runs")[0] == 200


def test_curves_are_windowed_smoothed_and_grow(root: Path, board: Served) -> None:
    asked = "/api/curves?run=general/default/one&run=general/default/three&run=nowhere&metric=train/loss&x=step"
    run = FakeRun(root / "general" / "default" / "three", seed=2).go(20)
    first = board.json(asked)
    assert set(first["series"]["train/loss"]) == {"general/default/one", "general/default/three"}
    assert first["series"]["train/loss"]["general/default/three"]["end"] == 20
    assert "bits_per_byte/stories" in first["metrics"]
    run.go(60)
    assert board.json(asked)["series"]["train/loss"]["general/default/three"]["line"]["x"][-1] == 60
    window = board.json(f"{asked}&low=50&high=100&smooth=0.5")["series"]["train/loss"]["general/default/one"]
    assert window["line"]["x"] == window["faint"]["x"] == list(range(48, 103, 2))
    assert window["line"]["y"] != window["faint"]["y"]
    text = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text("".join(text[: len(text) // 2]))  # as a run that is resumed leaves it
    cut = board.json(asked)["series"]["train/loss"]["general/default/three"]
    assert cut["end"] < 60


def test_matrices_come_side_by_side(root: Path, board: Served) -> None:
    found = board.json("/api/matrix?run=general/default/one&run=general/default/two&run=nowhere&measure=accuracy")
    one, two, gone = found["runs"]
    assert one["columns"] == ["mnli", "sst2"]
    assert one["cells"][2][0]["home"]
    assert len(two["rows"]) == 6
    assert gone["problem"]
    assert "bits_per_byte" in found["measures"]
