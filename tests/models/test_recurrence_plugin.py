"""The example architecture of examples/plugins, used from outside: all that the decoder does, it does too."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from holdfast import registry
from holdfast.models import ArchitectureConfig
from holdfast.models.family import Model, resolve_model
from holdfast.models.parameters import leaves_of
from training import killing, tiny

PLUGINS = Path(__file__).resolve().parents[2] / "examples" / "plugins"
COMMAND = [*killing.COMMAND, "--plugin", "recurrence"]
JOB = "continual/train/abcd_kl"
STEP = 8 * 32  # tokens
VALUES: dict[str, Any] = {
    "stages": [
        {"tokens": STEP * 12, "data": [{"name": "lists", "style": "PACKED"}]},
        {
            "tokens": STEP * 12,
            "data": [{"name": "arithmetic", "style": "PADDED"}],
            "beta": 0.5,
            "update_reference": True,
            "overlap": 0.5,
        },
    ],
    "training": {"batch_size": 8, "validation_steps": 8, "per_device_batch_size": 4},
    "optimization": {"kl": {"estimator": "forward"}, "lr": 0.01},
    "architecture": {
        "block_size": 32,
        "family": "recurrence",
        "recurrence": {"n_layers": 2, "n_embd": 32, "n_memory": 32, "n_ff": 64},
    },
    "logging": {"report_interval": 1, "checkpoint_interval": 5, "validation_interval": 10},
    "eval": {"evaluations": ["arithmetic", "lists"], "limit": 8},
}


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Any:
    """The plug-in, loaded as `--plugin` loads it."""
    sys.path.insert(0, str(PLUGINS))
    registry.load_plugins(["recurrence"])
    yield
    sys.path.remove(str(PLUGINS))


@pytest.fixture(scope="module")
def model() -> Model:
    options = registry.families.config("recurrence")(n_embd=32, n_memory=32, n_ff=64)
    return resolve_model("recurrence", ArchitectureConfig(), options, block_size=32, vocab_size=320)


@pytest.fixture(scope="module")
def params(model: Model) -> Any:
    from flax import linen as nn

    made = nn.meta.unbox(model.module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
    return jax.tree.map(lambda leaf: leaf * 5, made)  # far from 0, so that mistakes show


def environment(cache: Path, devices: int = 1) -> dict[str, str]:
    path = os.pathsep.join([str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**killing.environment(cache, devices), "PYTHONPATH": path}


def said(env: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([*COMMAND, *arguments], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_texts_of_a_packed_row_do_not_see_each_other(model: Model, params: Any) -> None:
    tokens = jax.random.randint(jax.random.key(1), (1, 24), 0, 320)
    segments = jnp.asarray([[1] * 10 + [2] * 14])
    packed, _ = model.hidden(params, tokens, segment_ids=segments)
    alone = [model.hidden(params, part)[0] for part in (tokens[:, :10], tokens[:, 10:])]
    np.testing.assert_allclose(packed, jnp.concatenate(alone, axis=1), atol=1e-5)
    whole, _ = model.hidden(params, tokens)
    assert jnp.abs(whole[:, 10:] - packed[:, 10:]).max() > 1e-2, "without segments a memory crosses the border"


def test_the_memory_is_that_of_the_plain_recurrence() -> None:
    import recurrence  # type: ignore[import-not-found]  # of examples/plugins

    keys = jax.random.split(jax.random.key(2))
    decay, given = jax.random.uniform(keys[0], (2, 9, 4)), jax.random.normal(keys[1], (2, 9, 4))
    memory, states = jnp.zeros((2, 4)), []
    for t in range(9):
        memory = decay[:, t] * memory + given[:, t]
        states.append(memory)
    np.testing.assert_allclose(recurrence.recurrence(decay, given), jnp.stack(states, 1), atol=1e-5)


@pytest.mark.slow
def test_adapters_train_while_the_base_stays(tmp_path: Path) -> None:
    trainer = tiny.trainer(JOB, VALUES, tmp_path, "optimization.lora.rank=2", "eval.evaluations=[]")
    before = {path: np.asarray(leaf) for path, leaf in leaves_of(trainer.state.params).items()}
    assert before["layers_0/gate/lora_in"].shape == (32, 2)
    trainer.run()
    after = leaves_of(trainer.state.params)
    moved = {path for path in before if not np.array_equal(before[path], np.asarray(after[path]))}
    assert moved == {path for path in before if path.endswith(("lora_in", "lora_out"))}
    assert trainer.state.reference is not None
    again = tiny.trainer(JOB, VALUES, tmp_path, "optimization.lora.rank=2", "eval.evaluations=[]")
    again.load(Path("latest"))
    for path, leaf in leaves_of(again.state.params).items():
        np.testing.assert_array_equal(leaf, after[path])


def test_a_mesh_that_does_not_fit_names_the_plug_ins_option(model: Model) -> None:
    with pytest.raises(Exception, match="expected a divisor of architecture/recurrence/n_embd = 32"):
        model.check_mesh({"fsdp": 3})


@pytest.mark.slow
def test_it_trains_fades_anchors_resumes_evaluates_generates_and_shards(tmp_path: Path) -> None:
    config, env = tmp_path / "config.yaml", environment(tmp_path / "cache")
    config.write_text(yaml.safe_dump({"job": JOB, **VALUES}))
    plan = json.loads(said(env, "plan", str(config), "--json"))
    assert plan["parameters"] == 320 * 32 + 32 + 2 * (5 * 32 * 32 - 32 * 32 + 2 * 32 * 64 + 32 + 2 * 32)
    assert plan["estimated_memory"]["activations"] > 0

    run = [*COMMAND, "run", str(config), "--name", "run", "--out"]
    subprocess.run([*run, str(tmp_path / "whole")], env=env, check=True, capture_output=True)
    whole = tmp_path / "whole" / "general" / "default" / "run"
    records = killing.train_records(whole)
    assert len(records) == 24
    assert records[-1]["ce"] < records[12]["ce"] < records[0]["ce"] + 1
    assert records[12]["penalty"] == 0
    assert records[-1]["penalty"] > 0
    assert len({json.dumps(record["rows"], sort_keys=True) for record in records}) > 2, "the datasets fade"

    killed = subprocess.Popen([*run, str(tmp_path / "killed")], env=env, stdout=subprocess.DEVNULL)
    folder = tmp_path / "killed" / "general" / "default" / "run"
    while killed.poll() is None and killing.last_step(folder) < 14:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    subprocess.run([*run, str(tmp_path / "killed")], env=env, check=True, capture_output=True)
    killing.assert_identical(whole, folder)

    found = json.loads(said(env, "eval", str(whole), "--tasks", "lists", "--json"))
    assert found["lists"]["measures"]["nll"] > 0
    assert said(env, "generate", str(whole), "1 + ", "--tokens", "12").startswith("1 + ")

    four = environment(tmp_path / "cache", 4)
    split = ["topology.fsdp=2", "topology.tensor=2", "training.per_device_batch_size=2"]
    subprocess.run([*run, str(tmp_path / "four"), *split], env=four, check=True, capture_output=True)
    ours, theirs = killing.losses(whole), killing.losses(tmp_path / "four" / "general" / "default" / "run")
    assert max(abs(ours[step] - theirs[step]) for step in ours) < 1e-3
