"""A step planned for devices that are not there: nothing is made, and shards are as large as the mesh says."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from holdfast.analysis.chip_plan import SHAPES, chip_plan, describe
from holdfast.analysis.plan import plan_run
from holdfast.config import merge, read_yaml
from holdfast.conversion import to_yaml_text
from holdfast.errors import ConfigError, UserError
from holdfast.execution import TopologyConfig
from holdfast.execution.chips import CHIPS
from holdfast.models.config import ModelSpec
from holdfast.training.config import config_classes
from holdfast.training.resolve import resolve
from training import tiny

ROOT = Path(__file__).resolve().parents[2]
ONE_BILLION = ROOT / "examples" / "scale" / "one-billion.yaml"
JOB = "continual/train/abcd_kl"


def plan(devices: int, *overrides: str) -> dict[str, Any]:
    """The plan of a tiny curriculum on so many H100."""
    return chip_plan(tiny.resolved(JOB, tiny.CONTINUAL, *overrides), CHIPS["h100"], (devices,))


def test_every_kind_of_stage_is_planned_and_says_where_its_numbers_come_from() -> None:
    planned = plan(4, "topology.fsdp=4", "training.per_device_batch_size=1")
    assert planned["source"] == SHAPES
    why = "float32, rows of 32 tokens, heads of 8 channels"
    assert planned["attention"] == f"plain formula in chunks (no kernel takes {why})"
    assert planned["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1}
    assert (planned["micro_batches"], planned["rows_per_device"]) == (2, 1)
    plain, anchored = planned["steps"]
    assert (plain["kind"], anchored["kind"]) == ("plain", "anchored (forward)")
    assert plain["memory"]["reference"] == 0 < anchored["memory"]["reference"]
    assert {part["kind"] for part in plain["collectives"]} == {"all-gather", "reduce-scatter"}
    assert plain["fits"]
    times = plain["seconds"]
    assert times["at_least"] <= times["one_after_another"] <= 3 * times["at_least"]
    json.dumps(planned)


@pytest.mark.parametrize("options", [{}, {"n_kv_head": 1}, {"window": 4}, {"window": 4, "window_layers": "wf"}])
def test_a_traced_step_has_the_operations_that_the_model_counts(options: dict[str, Any]) -> None:
    spec = ModelSpec(2, 32, 4, 4, 8, 128, vocab_size=320, block_size=32, activation="silu_gated")
    tokens, spec = 8 * 32, dataclasses.replace(spec, **options)
    given = [f"architecture.{name}={value}" for name, value in options.items()]
    plain, anchored = plan(4, "topology.fsdp=4", *given)["steps"]
    # Exactly: causal attention counts the keys that are seen in both, and so in every share of a peak.
    assert plain["flops_per_device"] == spec.flops_per_token() * tokens / 4
    # One more forward pass, of three.
    assert anchored["flops_per_device"] == plain["flops_per_device"] * 4 / 3


def test_options_that_save_memory_are_in_the_plan() -> None:
    mesh = ("topology.fsdp=4", "architecture.n_layers=8")
    host, half = "optimization.kl.reference_memory=host", "optimization.kl.reference_dtype=bfloat16"
    moments = ("optimization.adamw.moment_dtype=bfloat16", "optimization.adamw.second_moment_dtype=bfloat16")
    plain = plan(4, *mesh)["steps"][1]
    held, halved, both = (plan(4, *mesh, *more)["steps"][1] for more in ((host,), (half,), (host, half, *moments)))
    whole = plain["memory"]["reference"]
    assert plain["host_bytes"] == 0
    assert held["host_bytes"] == whole == 2 * halved["memory"]["reference"] == 2 * both["host_bytes"]
    # Two layers of eight, and the embedding, are on the device at once.
    assert both["memory"]["reference"] < held["memory"]["reference"] < 0.6 * whole
    assert held["memory"]["state"] == plain["memory"]["state"]
    assert both["memory"]["state"] == pytest.approx(plain["memory"]["state"] * 2 / 3, rel=0.01)
    cost_of = [plan_run(tiny.resolved(JOB, tiny.CONTINUAL, *mesh[1:], *more), 1) for more in ((), (host,), (half,))]
    device, there, rounded = (each["estimated_memory"]["reference"] for each in cost_of)
    assert [each["estimated_host_memory"] for each in cost_of] == [0, device, 0]
    assert there < 0.6 * device == 1.2 * rounded


@pytest.mark.parametrize(("axis", "split"), [("fsdp", 4), ("tensor", 4), ("data", 1)])
def test_state_shrinks_with_the_axes_that_split_it(axis: str, split: int) -> None:
    one = plan(1)["steps"][1]
    four = plan(4, f"topology.{axis}=4", *(["topology.data=1"] if axis != "data" else []))["steps"][1]
    for name in ("state", "reference"):
        share = one["memory"][name] / four["memory"][name]
        assert split * 0.8 <= share <= split, (name, share)  # scales and counts are on every device
    assert not one["collectives"]
    assert sum(part["sent"] for part in four["collectives"]) > 0


def test_a_model_of_eight_billion_is_planned_without_making_it() -> None:
    before = sum(array.nbytes for array in jax.live_arrays())
    values = read_yaml(ONE_BILLION)
    job = str(values.pop("job"))
    cfg = merge(config_classes(job), values, ["architecture.preset=llama-8b"])
    planned = chip_plan(resolve(job, cfg), CHIPS["h100"], (8,))
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 1e6
    assert not planned["steps"][0]["fits"] or planned["steps"][0]["memory"]["state"] < 80 * 2**30
    # AdamW in float32: parameters and two moments, an eighth of each.
    assert planned["steps"][0]["memory"]["state"] == pytest.approx(8.03e9 * 12 / 8, rel=0.01)


def test_the_micro_batch_is_that_of_the_run_where_a_shard_has_fewer_rows_than_asked() -> None:
    planned = plan(8, "topology.fsdp=8", "training.per_device_batch_size=4")
    assert (planned["micro_batches"], planned["rows_per_device"]) == (1, 1)


def test_only_what_is_trained_has_gradients_to_sum_and_a_ring_across_hosts_is_slow() -> None:
    def sums(*overrides: str) -> dict[str, Any]:
        parts = plan(16, "topology.fsdp=8", "training.batch_size=16", *overrides)["steps"][0]["collectives"]
        return {part["kind"]: part for part in parts}

    every, some = sums(), sums("optimization.freeze=[embed*]")
    assert every["all-reduce"]["span"] == 16 > CHIPS["h100"].node == every["reduce-scatter"]["span"]
    assert some["all-reduce"]["num_bytes"] < every["all-reduce"]["num_bytes"]
    assert some["reduce-scatter"]["count"] < every["reduce-scatter"]["count"]
    assert some["all-gather"] == every["all-gather"]
    assert {kind: part["axes"] for kind, part in every.items()} == {
        "all-gather": "fsdp",
        "reduce-scatter": "fsdp",
        "all-reduce": "data",
    }


@pytest.mark.parametrize(("override", "times"), [("architecture.dropout=0.0", 1), ("architecture.dropout=0.1", 4)])
def test_gradients_are_summed_over_data_once_a_step_unless_random_numbers_depend_on_how_rows_are_cut(
    override: str, times: int
) -> None:
    rows = ("training.batch_size=64", "training.per_device_batch_size=1")
    planned = plan(16, "topology.fsdp=8", *rows, override)
    assert planned["micro_batches"] == 4
    alone = plan(1, "training.batch_size=64", "training.per_device_batch_size=64", override)
    assert planned["steps"][0]["flops_per_device"] * 16 == alone["steps"][0]["flops_per_device"]
    found = {part["axes"]: part for part in planned["steps"][0]["collectives"] if part["kind"] == "all-reduce"}
    whole = {part["axes"]: part for part in planned["steps"][0]["collectives"] if part["kind"] == "reduce-scatter"}
    assert found["data"]["num_bytes"] * 8 * 4 == whole["fsdp"]["num_bytes"] * times


def test_a_mesh_for_other_devices_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"topology/fsdp.*16 devices"):
        plan(16, "topology.fsdp=3")


def test_without_libtpu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: Any) -> Any:
        raise RuntimeError("JAX TPU support not installed; cannot generate TPU topology.")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(UserError, match=r"libtpu.*not installed; pip install 'holdfast\[tpu\]'"):
        describe(CHIPS["tpu-v5e"], (2, 4), TopologyConfig(fsdp=8))


def test_weights_are_gathered_over_fsdp_and_activations_stay_where_their_rows_are() -> None:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    program = Path(__file__).with_name("exchange_program.py")
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "weights alone", done.stderr[-2000:] + done.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.extra
def test_a_step_of_a_billion_parameters_is_compiled_for_eight_tpus() -> None:
    pytest.importorskip("libtpu", reason="the extra tpu is not installed")
    options = ["--chip", "tpu-v5e", "--devices", "2x4", "--json", "topology.fsdp=8", "training.batch_size=32"]
    command = [sys.executable, "-m", "holdfast", "plan", str(ONE_BILLION), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    planned = json.loads(done.stdout)["chip"]
    assert planned["source"] == "the compiler's own"
    plain, anchored = planned["steps"]
    # 1.24 billion parameters with two moments, in float32, an eighth of each: 1.73 GiB; the reference a third more.
    assert plain["memory"]["arguments"] == pytest.approx(1.2359e9 * 12 / 8, rel=0.01)
    assert anchored["memory"]["arguments"] == pytest.approx(1.2359e9 * 16 / 8, rel=0.01)
    for step in (plain, anchored):
        assert step["fits"]
        sent = {part["kind"]: part["sent"] for part in step["collectives"]}
        assert sent["all-gather"] > 1e9


@pytest.mark.slow
@pytest.mark.extra
def test_less_than_a_host_of_tpus_is_described_too() -> None:
    pytest.importorskip("libtpu", reason="the extra tpu is not installed")
    shapes = [("tpu-v5e", (1, 1)), ("tpu-v5e", (1, 2)), ("tpu-v5e", (2, 4)), ("tpu-v5p", (1, 1, 1))]
    program = (
        "from holdfast.analysis.chip_plan import describe\n"
        "from holdfast.execution import TopologyConfig\n"
        "from holdfast.execution.chips import CHIPS\n"
        f"print([describe(CHIPS[chip], sizes, TopologyConfig()).mesh.size for chip, sizes in {shapes}])\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[1, 2, 8, 1]", done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.extra
def test_a_reference_on_the_host_is_not_among_what_a_tpu_holds(tmp_path: Path) -> None:
    pytest.importorskip("libtpu", reason="the extra tpu is not installed")
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml_text({"job": JOB, **tiny.CONTINUAL}))
    options = [
        "--chip",
        "tpu-v5e",
        "--devices",
        "2x4",
        "--json",
        "topology.fsdp=8",
        "optimization.kl.reference_memory=host",
    ]
    sizes = ["architecture.n_layers=4", "architecture.n_embd=128", "architecture.scan_layers=true"]
    command = [sys.executable, "-m", "holdfast", "plan", str(config), *options, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    plain, anchored = json.loads(done.stdout)["chip"]["steps"]
    assert plain["host_bytes"] == 0 < anchored["host_bytes"]
    # All but the mask of the tokens that the anchor sees.
    assert anchored["memory"]["arguments"] == pytest.approx(plain["memory"]["arguments"], rel=0.01)
