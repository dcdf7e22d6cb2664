"""metrics.jsonl: exact numbers, whole lines, cut back at any length."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.tracking import Event, RunInfo, Tracker
from holdfast.tracking.jsonl import JsonlSink, encode, metrics_length, read, truncate


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


def test_metrics_length_of_a_tracker(tmp_path):
    with Tracker.open(["jsonl"], RunInfo(tmp_path)) as tracker:
        tracker.log("train", 1, 8, {"loss": 1.0})
        assert metrics_length(tracker) == (tmp_path / "metrics.jsonl").stat().st_size
    assert metrics_length(Tracker({})) is None
