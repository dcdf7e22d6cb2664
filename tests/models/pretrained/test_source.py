"""Reading folders of the hub's kind and llama2.c's files, without transformers: what is taken, what is refused."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast.config import build, configure, merge
from holdfast.data.config import TokenizerConfig
from holdfast.data.tokenizers import load_tokenizer
from holdfast.errors import ConfigError, UserError
from holdfast.execution.topology import Topology, TopologyConfig
from holdfast.models import ArchitectureConfig, Decoder, resolve
from holdfast.models.pretrained import load_params, load_spec, tokenizer_for

SHARED = Path(os.environ.get("HOLDFAST_SHARED", Path(__file__).resolve().parents[4] / "shared"))
STORIES = SHARED / "weights" / "stories260K"
needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="the shared weights are not on this machine")

D, F, H, G, L, V, P = 16, 24, 4, 2, 2, 40, 32
LLAMA = {
    "model_type": "llama",
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "max_position_embeddings": P,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def mesh(**sizes):
    return Topology.build(TopologyConfig(**sizes), jax.devices()[:1] if not sizes else None).mesh


def llama_tensors(dtype=np.float32):
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(L):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (D,),
            at + "post_attention_layernorm.weight": (D,),
            at + "self_attn.q_proj.weight": (D, D),
            at + "self_attn.k_proj.weight": (D // 2, D),
            at + "self_attn.v_proj.weight": (D // 2, D),
            at + "self_attn.o_proj.weight": (D, D),
            at + "mlp.gate_proj.weight": (F, D),
            at + "mlp.up_proj.weight": (F, D),
            at + "mlp.down_proj.weight": (D, F),
        }
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write(folder, tensors, files=1, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    places = {name: f"model-{at % files + 1:05d}-of-{files:05d}.safetensors" for at, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def loaded(folder):
    return load_params(folder, load_spec(folder), mesh())


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_one_file_several_files_and_a_missing_prefix_are_the_same(tmp_path):
    tensors = llama_tensors()
    params = loaded(write(tmp_path / "one", tensors))
    np.testing.assert_array_equal(params["embed"]["embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(
        params["layers"]["mlp"]["down"]["kernel"][1], tensors["model.layers.1.mlp.down_proj.weight"].T
    )
    equal(loaded(write(tmp_path / "three", tensors, files=3)), params)
    equal(loaded(write(tmp_path / "bare", {name.removeprefix("model."): t for name, t in tensors.items()})), params)


def test_buffers_and_a_repeated_head_are_left_out(tmp_path):
    tensors = llama_tensors()
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
        "lm_head.weight": tensors["model.embed_tokens.weight"],
    }
    equal(loaded(write(tmp_path / "more", tensors | more)), loaded(write(tmp_path / "plain", tensors)))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_becomes_float32_masters(kind, tmp_path):
    tensors = llama_tensors(jnp.dtype(kind))
    params = loaded(write(tmp_path / "half", tensors))
    scale = params["final_norm"]["scale"]
    assert scale.dtype == jnp.float32
    np.testing.assert_array_equal(scale, tensors["model.norm.weight"].astype(np.float32))


def test_every_wrong_weight_is_in_one_message(tmp_path):
    tensors = llama_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(D + 1, np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(D, np.float32)
    with pytest.raises(UserError) as caught:
        loaded(write(tmp_path / "wrong", tensors))
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        f"model.norm.weight: shape [{D + 1}], expected [{D}]",
        "model.layers.1.mlp.up_proj.weight: missing",
        "model.layers.0.self_attn.q_proj.bias: unknown",
    ]


def test_what_cannot_be_read_is_a_sentence(tmp_path):
    folder = write(tmp_path / "broken", llama_tensors())
    (folder / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(UserError, match="not a whole safetensors file"):
        loaded(folder)
    several = write(tmp_path / "several", llama_tensors(), files=3)
    (several / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"there is no model-00002-of-00003.safetensors"):
        loaded(several)
    quantised = write(tmp_path / "int8", llama_tensors() | {"model.norm.weight": np.ones(D, np.int8)})
    with pytest.raises(UserError, match=r"model.norm.weight: I8, expected one of"):
        loaded(quantised)
    with pytest.raises(UserError, match="there is no such file or folder"):
        load_spec(tmp_path / "nowhere")


def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path):
    folder = write(tmp_path / "pickled", llama_tensors())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin is refused.*save_pretrained\("):
        loaded(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"pytorch_model.bin is refused"):
        load_spec(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "bert"}, "model_type: got 'bert', expected one of llama"),
        ({"attention_bias": True}, "mlp_bias: got None, expected True"),
        ({"hidden_act": "relu"}, "hidden_act: got 'relu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window: got 0, expected a number from 1"),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention"]}, "layer_types: got ['sliding_attention']"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1.0}}, "rope_parameters"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window: got True"),
        ({"model_type": "phi3", "rope_scaling": {"rope_type": "longrope"}}, "rope_scaling"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers: got 'two', expected int"),
        ({"hidden_size": None}, "hidden_size: missing"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_its_key(changes, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(UserError) as caught:
        load_spec(tmp_path)
    assert said in str(caught.value)


def test_a_window_that_no_row_is_longer_than_changes_nothing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mistral", "sliding_window": 8}))
    assert load_spec(tmp_path, block_size=8).block_size == 8


def test_learned_positions_are_cut_to_the_block_size(tmp_path):
    from holdfast.models.pretrained import save_pretrained

    spec = resolve(ArchitectureConfig(preset="gpt2", n_layers=1, n_embd=16, n_head=2), block_size=P, vocab_size=V)
    shapes = jax.eval_shape(Decoder(spec).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    from flax import linen as nn

    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype("float32"), nn.meta.unbox(shapes))
    save_pretrained(params, spec, tmp_path / "out")
    short = load_spec(tmp_path / "out", block_size=10)
    table = load_params(tmp_path / "out", short, mesh())["positions"]["embedding"]
    np.testing.assert_array_equal(table, params["positions"]["embedding"][:10])
    with pytest.raises(ConfigError, match=f"architecture/block_size: got 64, expected at most {P}"):
        load_spec(tmp_path / "out", block_size=64)


SHARDED = """
import sys, jax, numpy as np
from holdfast.execution.topology import Topology, TopologyConfig
from holdfast.models.pretrained import load_params, load_spec
spec = load_spec(sys.argv[1])
one = load_params(sys.argv[1], spec, Topology.build(devices=jax.devices()[:1]).mesh)
for sizes in (dict(data=2, fsdp=2, tensor=2), dict(data=1, fsdp=4, tensor=2)):
    mesh = Topology.build(TopologyConfig(**sizes)).mesh
    many = load_params(sys.argv[1], spec, mesh)
    jax.tree.map(np.testing.assert_array_equal, many, one)
    kernel = many["layers"]["attention"]["q"]["kernel"]
    assert kernel.addressable_shards[0].data.size * sizes["fsdp"] * sizes["tensor"] == kernel.size
"""


def test_each_device_holds_its_own_part(tmp_path):
    folder = write(tmp_path / "model", llama_tensors(), files=2)
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(folder)], env={**os.environ, **flags}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def options(folder, **changes):
    values = {"architecture": {"from": str(folder), **changes}}
    return configure(ArchitectureConfig, merge([ArchitectureConfig], values))


def test_options_come_from_the_model_and_others_are_refused(tmp_path):
    folder = write(tmp_path / "model", llama_tensors())
    assert "from" in build(ArchitectureConfig)["architecture"]
    spec = resolve(options(folder, dtype="bfloat16", n_layers=L), block_size=16, vocab_size=V)
    assert (spec.n_embd, spec.block_size, spec.dtype, spec.rope_interleaved) == (D, 16, "bfloat16", False)
    for changes, path in (
        ({"n_layers": 7}, "architecture/n_layers: got 7, expected 2"),
        ({"preset": "gpt2"}, "architecture/preset"),
        ({"vocab_size": 64}, "architecture/vocab_size: got 64, expected 40"),
        ({"bias": True}, "architecture/bias: got True, expected False"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(options(folder, **changes), block_size=16, vocab_size=V)
        assert str(caught.value).startswith(path)
    with pytest.raises(ConfigError, match="tokenizer/name: got 41"):
        resolve(options(folder), block_size=16, vocab_size=V + 1)
    with pytest.raises(UserError, match=r"architecture/from: .*no such file"):
        resolve(options(tmp_path / "nowhere"), block_size=16, vocab_size=V)


def test_configurations_are_checked_without_jax(tmp_path):
    folder = write(tmp_path / "model", llama_tensors())
    code = (
        "import sys; from holdfast.models import ArchitectureConfig, resolve\n"
        f"resolve(ArchitectureConfig(source={str(folder)!r}), block_size=8, vocab_size=8)\n"
        "assert not {'jax', 'flax', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_tokenizer_travels_along(tmp_path):
    folder = tmp_path / "model"
    load_tokenizer("bytes").save(folder)
    assert tokenizer_for(str(folder), TokenizerConfig()).fingerprint == load_tokenizer("bytes").fingerprint
    assert tokenizer_for(None, TokenizerConfig()).name == "bytes"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="tokenizer/name"):
        tokenizer_for(str(empty), TokenizerConfig())


# llama2.c


def llama2c_file(path, version=0, tied=True):
    """The tensors of `llama_tensors` in llama2.c's order, rotated channels as neighbours."""
    tensors = llama_tensors()

    def neighbours(name, matrix):
        if "q_proj" not in name and "k_proj" not in name:
            return matrix
        heads = matrix.shape[0] // (D // H)
        return matrix.reshape(heads, 2, D // H // 2, D).swapaxes(1, 2).reshape(matrix.shape)

    def each(*names):
        found = [f"model.layers.{layer}.{name}.weight" for name in names for layer in range(L)]
        return [neighbours(name, tensors[name]) for name in found]

    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = ["mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"]
    embedding, final = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    numbers = (D, F, L, H, G, V, P)
    if version == 0:
        head = struct.pack("<7i", *numbers[:5], V if tied else -V, P)
        body = [embedding, *each(norms[0], *attention, norms[1], *mlp), final, np.zeros(P * D // H, np.float32)]
    else:
        head = (struct.pack("<Ii7i", 0x616B3432, version, *numbers) + bytes([tied])).ljust(256, b"\0")
        body = [*each(*norms), final, embedding, *each(*attention, *mlp)]
    body += [] if tied else [2 * embedding]
    path.write_bytes(head + b"".join(np.ascontiguousarray(part).tobytes() for part in body))
    return path


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_llama2c_files_are_llamas(version, tied, tmp_path):
    path = llama2c_file(tmp_path / "model.bin", version, tied)
    tensors = llama_tensors() | ({} if tied else {"lm_head.weight": 2 * llama_tensors()["model.embed_tokens.weight"]})
    folder = write(tmp_path / "hub", tensors, tie_word_embeddings=tied)
    assert load_spec(path) == load_spec(tmp_path) == load_spec(folder)
    equal(loaded(path), loaded(folder))


def test_a_quantised_or_cut_llama2c_file_is_refused(tmp_path):
    path = llama2c_file(tmp_path / "model.bin", version=1)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"expected config.json"):
        load_spec(path)
    path.write_bytes(struct.pack("<Ii", 0x616B3432, 2) + bytes(300))
    with pytest.raises(UserError, match="version 2 is quantised"):
        load_spec(path)


@needs_stories
def test_stories260k_reads_stories():
    spec = load_spec(STORIES)
    params = load_params(STORIES, spec, mesh())
    tokenizer = tokenizer_for(str(STORIES), TokenizerConfig())
    assert tokenizer.vocab_size == spec.vocab_size == 512
    file = SHARED / "data" / "tinystories" / "validation.jsonl"
    if not file.is_file():
        pytest.skip("the shared stories are not on this machine")
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    length = 192
    x, y = np.zeros((len(texts), length), np.int32), np.full((len(texts), length), -1, np.int32)
    for row, ids in enumerate(tokenizer.encode_batch(texts)):
        text = np.array([tokenizer.eot_id, *ids][: length + 1])
        x[row, : len(text) - 1], y[row, : len(text) - 1] = text[:-1], text[1:]
    logits = jax.jit(Decoder(spec).apply)({"params": params}, x)
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), np.maximum(y, 0)[..., None], -1)[..., 0]
    assert float(nats[y >= 0].mean()) == pytest.approx(1.31, abs=0.03)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "[" * 100_000, '{"weight_map": []}', '{"weight_map": "x"}', '{"weight_map": {}}'),
        *(
            '{"weight_map": {"a": 1}}',
            '{"weight_map": {"a": "../x.safetensors"}}',
            '{"weight_map": {"a": "/etc/passwd"}}',
        ),
        *('{"weight_map": null}', '{"weight_map": {"a": null}}', '{"weight_map": {"a": "\\u0000"}}'),
    ],
    ids=lambda text: text[:40],
)
def test_an_index_that_is_none_is_named(tmp_path, text):
    folder = tmp_path / "model"
    write(folder, llama_tensors())
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        load_params(folder, load_spec(folder), mesh())


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": ["llama"]},
        {"hidden_size": 2**31},
        {"hidden_size": 2**63},
        {"hidden_size": 0},
        {"num_hidden_layers": -1},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"num_attention_heads": 17},
        {"intermediate_size": 10**30},
        {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1.0},
        {"rope_theta": 0},
        {"rope_theta": float("inf")},
        {"head_dim": 3},
        {"model_type": "mistral", "sliding_window": "x"},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
        {"rope_scaling": {"rope_type": ["llama3"]}},
        {"max_position_embeddings": True},
    ],
    ids=str,
)
def test_options_of_a_hostile_folder_are_refused_in_a_message(tmp_path, changes):
    folder = tmp_path / "model"
    write(folder, llama_tensors(), **changes)
    with pytest.raises(UserError, match=r"config\.json"):
        load_spec(folder, 16)
