"""metrics.jsonl: exact numbers, whole lines, cut back at any length."""

import errno
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import RunError
from holdfast.execution.storage import Patience
from holdfast.tracking import Event, RunInfo, Tracker
from holdfast.tracking.jsonl import JsonlSink, digests, encode, read, read_lines, truncate


def train(step: int, **values) -> Event:
    return Event("train", step, 8 * step, {"loss": np.float32(1 / step), **values})


def test_lines_have_kind_step_and_tokens_first(tmp_path):
    sink = JsonlSink(RunInfo(tmp_path / "new"))
    sink.log(train(3, beta=float("inf"), rows={"a": np.int64(2)}, penalty=jnp.float32(jnp.nan)))
    sink.log(Event("message", values={"text": "not recorded"}))
    sink.log(Event("progress", 4, 32))
    sink.close()
    (line,) = sink.path.read_text().splitlines()
    assert list(json.loads(line)) == ["kind", "step", "tokens", "loss", "beta", "rows", "penalty"]
    record = json.loads(line)
    assert record["step"] == 3
    assert record["tokens"] == 24
    assert record["beta"] is None
    assert record["penalty"] is None
    assert record["rows"] == {"a": 2}


@given(st.floats(width=32))
def test_float32_survives_exactly(number):
    value = np.float32(number)
    back = json.loads(encode({"a": value, "b": jnp.asarray(value), "c": np.array([value])}))
    if math.isfinite(number):
        assert np.float32(back["a"]) == np.float32(back["b"]) == np.float32(back["c"][0]) == value
    else:
        assert back == {"a": None, "b": None, "c": [None]}


def test_resume_at_every_length(tmp_path):
    sink = JsonlSink(RunInfo(tmp_path))
    lengths = [0]
    for step in range(1, 6):
        sink.log(train(step))
        lengths.append(sink.length(durable=step == 5))
    sink.close()
    whole = sink.path.read_bytes()
    for step, length in enumerate(lengths):
        sink.path.write_bytes(whole)
        assert truncate(sink.path, length) == length
        again = JsonlSink(RunInfo(tmp_path))
        assert again.length() == length
        for later in range(step + 1, 6):
            again.log(train(later))
        again.close()
        assert sink.path.read_bytes() == whole


@settings(deadline=None, max_examples=30)
@given(cut=st.integers(0, 300))
def test_a_torn_last_line_is_tolerated(cut, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    path = directory / "metrics.jsonl"
    whole = b"".join(encode(train(step).record()).encode() + b"\n" for step in range(1, 6))
    path.write_bytes(whole[:cut])
    complete = whole[:cut].count(b"\n")
    assert len(read(path)) == complete
    sink = JsonlSink(RunInfo(directory))
    sink.log(train(9))
    sink.close()
    assert [record["step"] for record in read(path)] == [*range(1, complete + 1), 9]


def test_truncate_never_grows_a_file_and_accepts_none(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert truncate(path, 10) == 0
    assert not path.exists()
    path.write_bytes(b"{}\n")
    assert truncate(path, 1000) == 3
    path.write_bytes(b"x" * 200_000)
    assert truncate(path) == 0


def test_what_json_cannot_hold_is_an_error():
    with pytest.raises(TypeError, match="object cannot be written"):
        encode({"a": object()})


class Refusing:
    """A file on a disk that takes half of a line, so many times."""

    def __init__(self, file, times):
        self.file = file
        self.times = times

    def write(self, line):
        if self.times:
            self.times -= 1
            self.file.write(line[: len(line) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(line)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_line_that_was_torn_is_written_again_over_itself(tmp_path):
    said = []
    sink = JsonlSink(RunInfo(tmp_path, patience=Patience(30, say=said.append)))
    sink.log(train(1))
    sink._file = Refusing(sink._file, 1)
    sink.log(train(2))
    sink.log(train(3))
    assert sink.length() == sink.path.stat().st_size
    sink.close()
    assert [record["step"] for record in read(sink.path)] == [1, 2, 3]
    assert "the disk is full; trying again" in said[0]


def test_records_that_cannot_be_written_end_the_run(tmp_path):
    with Tracker.open(["jsonl"], RunInfo(tmp_path)) as tracker:
        tracker.log("train", 1, 8, {"loss": 1.0})
        sink = tracker.sink("jsonl")
        sink._file = Refusing(sink._file, 1)
        with pytest.raises(RunError, match=r"metrics\.jsonl: the disk is full; what was saved before is intact"):
            tracker.log("train", 2, 16, {"loss": 1.0})
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1]


def test_records_that_are_gone_are_not_filled_up_with_zeros(tmp_path):
    sink = JsonlSink(RunInfo(tmp_path))
    sink.log(train(1))
    sink._file = Refusing(sink._file, 1)
    sink.path.write_bytes(b"")
    with pytest.raises(RunError):
        sink.log(train(2))
    with pytest.raises(RunError, match="reports an error"):
        sink.log(train(3))
    assert b"\0" not in sink.path.read_bytes()


def test_a_folder_that_cannot_be_written_is_an_error_not_a_warning(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError):
        Tracker.open(["jsonl"], RunInfo(tmp_path / "file" / "run"))


def test_a_bad_line_is_left_out_and_numbered(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [encode({"kind": "train", "step": step}).encode() for step in range(3)]
    bad = [b'{"kind": "tra', b"\xff\xfe", b"[1, 2]", b'{"kind": 3, "step": 1}', b'{"kind": "train", "step": null}', b""]
    bad += [b"[" * 100_000, b'{"kind": "train", "step": ' + b"1" * 6000 + b"}"]
    path.write_bytes(b"\n".join([good[0], *bad, good[1], good[2], b'{"torn']))
    records, numbers = read_lines(path)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert numbers == list(range(2, 2 + len(bad)))
    assert read(path) == records


def test_the_digest_of_a_sink_is_that_of_its_file_also_after_a_resume(tmp_path):
    lengths = []
    for _ in range(2):
        sink = JsonlSink(RunInfo(tmp_path))
        sink.log(train(1 + len(lengths)))
        lengths.append((sink.length(), sink.digest()))
        sink.close()
    assert digests(sink.path, [number for number, _ in lengths]) == dict(lengths)
    assert digests(sink.path, [lengths[-1][0] + 1]) == {lengths[-1][0] + 1: None}
    assert digests(tmp_path / "absent", [5]) == {5: None}
