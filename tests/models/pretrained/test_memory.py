"""A model of a billion parameters on eight devices: the host holds it once, not twice."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast.models.pretrained import load_spec

CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
LOAD = """
import resource, sys, time
import jax
from holdfast.execution.topology import Topology, TopologyConfig
from holdfast.models.pretrained import load_params, load_spec
started = time.perf_counter()
mesh = Topology.build(TopologyConfig(data=1, fsdp=8)).mesh
params = load_params(sys.argv[1], load_spec(sys.argv[1]), mesh)
held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
kernel = params["layers"]["mlp"]["up"]["kernel"]
assert kernel.addressable_shards[0].data.size * 8 == kernel.size
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(held, peak, time.perf_counter() - started)
"""


def write_model(folder):
    """A folder with one file for each layer, filled with random numbers."""
    random = np.random.default_rng(0)
    width, inner, kv, places = 2048, 8192, 512, {}

    def save(file, shapes):
        tensors = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
        save_file(tensors, folder / file)
        places.update(dict.fromkeys(shapes, file))

    save("model-00.safetensors", {"model.embed_tokens.weight": (32000, width), "model.norm.weight": (width,)})
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes = {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        named = {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        save(f"model-{layer + 1:02d}.safetensors", named)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.slow
def test_a_billion_parameters_are_held_once(tmp_path):
    if shutil.disk_usage(tmp_path).free < 8e9:
        pytest.skip("the generated model needs 5 GB of disk")
    write_model(tmp_path)
    assert load_spec(tmp_path).num_parameters() > 1e9
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], env={**os.environ, **flags}, capture_output=True, text=True
    )
    shutil.rmtree(tmp_path)
    assert done.returncode == 0, done.stderr
    held, peak, seconds = map(float, done.stdout.split())
    print(f"held {held / 1e9:.2f} GB, peak {peak / 1e9:.2f} GB, {seconds:.1f} s")
    assert peak < 1.2 * held
