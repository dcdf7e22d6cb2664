"""`holdfast export --push`: the folder reaches a hub, card and weights, and what goes wrong is one message."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.errors import RunError, UserError
from hub_server import Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub("a-token") as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("HF_TOKEN", "a-token")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # LFS is what the stand-in speaks
        yield served


def export(whole: Any, out: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["export", f"{whole.spec.run_dir}@final", str(out), *options])


def test_a_model_reaches_the_hub_whole(whole: Any, hub: Hub, tmp_path: Path) -> None:
    for number in (1, 2):  # the second time into the repository that is there
        out = tmp_path / f"out-{number}"
        done = export(whole, out, "--push", "me/kept", "--private")
        assert done.exception is None, done.output
        assert f"{hub.address}/me/kept" in done.output
        assert hub.files["me/kept"] == {path.name: path.read_bytes() for path in out.iterdir()}
    assert hub.repositories["me/kept"]["visibility"] == "private"
    assert list(hub.blobs.values()) == [(tmp_path / "out-1" / "model.safetensors").read_bytes()]
    assert "step 16" in hub.commits[0]
    card = hub.files["me/kept"]["README.md"].decode()
    assert "| after | arithmetic | lists |" in card or "| after | lists | arithmetic |" in card  # the matrix
    assert "1. " in card  # the curriculum
    assert hub.validated[-1] == card


def test_a_wrong_name_is_refused_before_anything_is_written(whole: Any, hub: Hub, tmp_path: Path) -> None:
    done = export(whole, tmp_path / "out", "--push", "a/b/c")
    assert isinstance(done.exception, UserError)
    assert "--push a/b/c: no name of a repository; expected NAME or OWNER/NAME" in str(done.exception)
    assert not (tmp_path / "out").exists()
    assert not hub.repositories


def test_a_token_that_may_not_write_is_said(
    whole: Any, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "another")
    done = export(whole, tmp_path / "out", "--push", "me/kept")
    assert isinstance(done.exception, UserError)
    assert "the hub refuses it (401)" in str(done.exception)
    assert (tmp_path / "out" / "model.safetensors").is_file()  # what was exported stays


def test_a_hub_that_is_not_there_is_said(whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "a-token")
    done = export(whole, tmp_path / "out", "--push", "me/kept")
    assert isinstance(done.exception, RunError)
    assert "the hub cannot be reached" in str(done.exception)


def test_private_needs_a_push(whole: Any, tmp_path: Path) -> None:
    done = export(whole, tmp_path / "out", "--private")
    assert isinstance(done.exception, UserError)
    assert "--private" in str(done.exception)
