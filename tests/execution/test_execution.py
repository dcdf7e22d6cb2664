"""Specs, meshes, files, locks and checkpoints' names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, UserError
from holdfast.execution import ExecutionSpec, TopologyConfig
from holdfast.execution.checkpoints import CheckpointInfo, find_checkpoint, kept_steps, list_checkpoints, split_name
from holdfast.execution.files import (
    is_locked,
    locked,
    make_private,
    remove_leftovers,
    run_lock,
    write_atomically,
    write_json,
)
from holdfast.execution.topology import axis_sizes


def test_a_local_spec_has_all_devices_and_the_runs_folder(tmp_path: Path) -> None:
    spec = ExecutionSpec.local(tmp_path, name="a", project="p", group="g")
    assert spec.run_dir == tmp_path / "p" / "g" / "a"
    assert spec.topology is not None
    assert set(spec.topology.sizes) == {"data", "fsdp", "tensor"}
    assert spec.id


@pytest.mark.parametrize("name", ["..", "a/b", "/etc", "", "a\n", "-x"])
def test_names_that_are_no_folder_names_are_refused(name: str) -> None:
    with pytest.raises(UserError):
        ExecutionSpec(name=name)


@pytest.mark.parametrize(
    ("config", "devices", "sizes"),
    [
        (TopologyConfig(), 8, (8, 1, 1)),
        (TopologyConfig(fsdp=2, tensor=2), 8, (2, 2, 2)),
        (TopologyConfig(data=1, fsdp=-1), 4, (1, 4, 1)),
    ],
)
def test_one_axis_takes_the_rest(config: TopologyConfig, devices: int, sizes: tuple[int, ...]) -> None:
    assert tuple(axis_sizes(config, devices).values()) == sizes


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (TopologyConfig(fsdp=3), "topology/fsdp"),
        (TopologyConfig(data=-1, fsdp=-1), "topology/fsdp"),
        (TopologyConfig(data=2, tensor=2), "topology/data"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: TopologyConfig, path: str) -> None:
    with pytest.raises(ConfigError) as error:
        axis_sizes(config, 8)
    assert error.value.path == path


def test_an_axis_without_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match="topology/tensor"):
        TopologyConfig(tensor=0)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    write_atomically(path, b"bytes")
    assert path.read_bytes() == b"bytes"
    assert [item.name for item in path.parent.iterdir()] == ["file.json"]


def test_a_lock_is_held_by_one_process_and_freed_by_its_death(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from holdfast.execution.files import run_lock\n"
        "with run_lock(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert is_locked(tmp_path)
        with pytest.raises(UserError, match=f"pid {process.pid}"), run_lock(tmp_path):
            pass
        process.kill()
        process.wait()
    assert not is_locked(tmp_path)
    with run_lock(tmp_path):
        pass


def checkpoint(folder: Path, step: int, *tags: str) -> CheckpointInfo:
    path = folder / str(step) / "manifest"
    path.mkdir(parents=True)
    (path / "metadata").write_text(json.dumps({"step": step, "tags": tags}))
    return CheckpointInfo(step, path.parent, {"tags": tags})


def test_checkpoints_are_found_by_step_and_by_tag(tmp_path: Path) -> None:
    for step, tags in ((0, ["boundary_0"]), (5, ["best_0"]), (9, ["best_0"]), (10, ["boundary_1"]), (12, [])):
        checkpoint(tmp_path, step, *tags)
    (tmp_path / "13.orbax-checkpoint-tmp").mkdir()
    assert [info.step for info in list_checkpoints(tmp_path)] == [0, 5, 9, 10, 12]
    names = {"latest": 12, "5": 5, "boundary_1": 10, "best_0": 9, "best": 9}
    assert {name: find_checkpoint(tmp_path, name).step for name in names} == names
    with pytest.raises(UserError, match="boundary_1"):
        find_checkpoint(tmp_path, "nope")


def test_pruning_leaves_boundaries_the_best_and_the_newest(tmp_path: Path) -> None:
    infos = [
        checkpoint(tmp_path, step, *tags)
        for step, tags in ((0, ["boundary_0"]), (5, ["best_0"]), (8, []), (9, ["best_0"]), (10, []), (12, []))
    ]
    assert kept_steps(infos, rolling=2) == {0, 9, 10, 12}
    assert kept_steps(infos, rolling=0) == {0, 9}


def test_a_run_and_its_checkpoint_are_written_in_one_word() -> None:
    assert split_name("runs/a/b/c@boundary_1") == (Path("runs/a/b/c"), "boundary_1")
    assert split_name("runs/a") == (Path("runs/a"), "latest")


def test_a_private_folder_is_made_for_its_user_alone_and_another_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "compiled"
    assert make_private(folder) is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert make_private(folder) is None
    folder.chmod(0o775)
    assert make_private(folder) == f"others may write in {folder}"
    (tmp_path / "link").symlink_to(folder)
    assert make_private(tmp_path / "link") == f"{tmp_path / 'link'} is no folder of its own"


def test_leftovers_go_and_what_is_being_written_stays(tmp_path: Path) -> None:
    left, written = tmp_path / "deep" / ".results.json.ab12_cde", tmp_path / ".config.yaml.xy12_cde"
    left.parent.mkdir()
    for path in (left, written):
        path.write_text("half")
    with locked(written):
        assert remove_leftovers(tmp_path) == [left]
    assert remove_leftovers(tmp_path) == [written]
