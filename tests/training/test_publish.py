"""`holdfast export --push`: the folder reaches a hub, card and weights, and what goes wrong is one message."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.errors import RunError, UserError
from hub_server import Hub

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto-publish.md"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub("a-token") as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("HF_TOKEN", "a-token")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # LFS is what the stand-in speaks
        yield served


def export(whole: Any, out: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["export", f"{whole.spec.run_dir}@final", str(out), *options])


def test_the_command_of_the_page_brings_a_model_to_the_hub_whole(
    whole: Any, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = re.findall(r"^```bash\nholdfast (.*)\n```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    shutil.copytree(whole.spec.run_dir, tmp_path / "runs" / "general" / "quickstart" / "holdfast")
    monkeypatch.chdir(tmp_path)
    first = CliRunner().invoke(app, shlex.split(command))
    again = export(whole, tmp_path / "again", "--push", "you/my-model")  # into the repository that is there
    for done, out in ((first, tmp_path / "my-model"), (again, tmp_path / "again")):
        assert done.exception is None, done.output
        assert f"{hub.address}/you/my-model" in done.output
        assert hub.files["you/my-model"].keys() == {path.name for path in out.iterdir()}
    assert hub.files["you/my-model"] == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert hub.repositories["you/my-model"]["visibility"] == "private"
    assert list(hub.blobs.values()) == [(tmp_path / "my-model" / "model.safetensors").read_bytes()]
    assert "step 16" in hub.commits[0]
    card = hub.files["you/my-model"]["README.md"].decode()
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
