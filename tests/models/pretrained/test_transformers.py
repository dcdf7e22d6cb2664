"""Our logits beside those of `transformers`, both ways, for small models of every family."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from holdfast.execution.topology import Topology
from holdfast.models import ArchitectureConfig, Decoder, resolve
from holdfast.models.family import decoder
from holdfast.models.pretrained import load_params, load_spec, save_pretrained

pytestmark = pytest.mark.extra
torch = pytest.importorskip("torch", reason="needs the extra hf: pip install holdfast[hf]")
transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install holdfast[hf]")

V, LONG = 97, 192
LLAMA = {
    "vocab_size": V,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": LONG,
}
GROUPED = {**LLAMA, "num_key_value_heads": 2}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GPT2 = {"vocab_size": V, "n_positions": LONG, "n_embd": 48, "n_layer": 3, "n_head": 4}
NEOX = {**LLAMA, "hidden_size": 64, "num_attention_heads": 4}
SMALL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HALF_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GEMMA = {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 50}
CASES = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", {**GPT2, "tie_word_embeddings": False, "n_inner": 72, "activation_function": "gelu"}),
    "llama": ("Llama", {**GROUPED, "tie_word_embeddings": False}),
    "llama-tied": ("Llama", {**GROUPED, "tie_word_embeddings": True, "head_dim": 12, "rms_norm_eps": 1e-5}),
    "llama-bias": ("Llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", {**GROUPED, "rope_parameters": SCALED}),
    "linear-rope": ("Llama", {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": None}),
    "mistral-window": ("Mistral", {**GROUPED, "sliding_window": 50}),
    "qwen2": ("Qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16}),
    "qwen3-window": (
        "Qwen3",
        {**GROUPED, "head_dim": 16, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "smollm3": ("SmolLM3", {**GROUPED, **SMALL_IDS, "num_hidden_layers": 4}),
    "granite": (
        "Granite",
        {
            **GROUPED,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 13.0,
        },
    ),
    "phi3": ("Phi3", {**GROUPED, **SMALL_IDS}),
    "phi3-window": (
        "Phi3",
        {
            **GROUPED,
            **SMALL_IDS,
            "sliding_window": 50,
            "rope_parameters": HALF_ROPE,
        },
    ),
    "olmo2": ("Olmo2", {**GROUPED, **SMALL_IDS}),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2", {**GEMMA, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0}),
    "gemma2-short": ("Gemma2", {**GEMMA, "sliding_window": 4096, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3Text", {**GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 3}),
    "gemma3-stretched": (
        "Gemma3Text",
        {
            **GEMMA,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4, "num_hidden_layers": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **GROUPED,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "neox": ("GPTNeoX", NEOX),
    "neox-serial-tied": ("GPTNeoX", {**NEOX, "use_parallel_residual": False, "tie_word_embeddings": True}),
}


def mesh():
    return Topology.build(devices=jax.devices()[:1]).mesh


def tokens():
    return np.random.default_rng(0).integers(0, V, (2, LONG))


@pytest.fixture(scope="module", params=CASES)
def theirs(request, tmp_path_factory):
    """A small model with lively weights, saved by transformers, and its logits."""
    name, options = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.15)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, logits_of(model), tie(model)


def logits_of(model):
    with torch.no_grad():
        return model(torch.from_numpy(tokens())).logits.numpy()


def tie(model):
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def our_logits(spec, params):
    return np.asarray(jax.jit(decoder(spec).module.apply)({"params": params}, jnp.asarray(tokens())))


def test_logits_are_theirs_and_survive_the_way_back(theirs, tmp_path):
    folder, expected, tied = theirs
    spec = load_spec(folder)
    assert (spec.block_size, spec.tie_embeddings) == (LONG, tied)
    params = load_params(folder, spec, mesh())
    np.testing.assert_allclose(our_logits(spec, params), expected, atol=1e-4, rtol=1e-4)

    save_pretrained(
        params, spec, tmp_path / "out", family=json.loads((folder / "config.json").read_text())["model_type"]
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    np.testing.assert_array_equal(logits_of(again), expected)

    assert load_spec(tmp_path / "out") == spec
    back = load_params(tmp_path / "out", spec, mesh())
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize(
    ("preset", "options", "family"),
    [
        ("tiny", {}, "llama"),
        ("tiny", {"rope_interleaved": True, "n_kv_head": 2}, "llama"),
        ("qwen3-0.6b", {"rope_interleaved": True}, "qwen3"),
        ("gpt-mini", {}, "gpt2"),
        ("pythia-160m", {"rope_interleaved": True, "rope_pct": 0.5}, "gpt_neox"),
        ("qwen2-0.5b", {}, "qwen2"),
    ],
)
def test_our_own_presets_are_loaded_by_transformers(preset, options, family, tmp_path):
    small = {"n_layers": 2, "n_embd": 64, "n_head": 4, "head_dim": 16, "n_ff": 96, "n_kv_head": 4, **options}
    spec = resolve(ArchitectureConfig(preset=preset, **small), block_size=LONG, vocab_size=V)
    shapes = jax.eval_shape(Decoder(spec).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: 0.2 * random.normal(size=leaf.shape).astype("float32"), nn.meta.unbox(shapes))
    assert save_pretrained(params, spec, tmp_path / "out").model_type == family
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    np.testing.assert_allclose(our_logits(spec, params), logits_of(model), atol=1e-4, rtol=1e-4)


def test_older_files_say_the_same_in_other_words(tmp_path):
    """Keys of transformers 4: rope_theta and rope_scaling instead of rope_parameters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**GROUPED, rope_parameters=SCALED, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    new = load_spec(tmp_path)
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = rope
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_spec(tmp_path) == new
    assert new.rope_scaling == "llama3"


@pytest.mark.parametrize("text", ["Hello, wörld!  two  blanks\n\n日本 <|endoftext|>", ""])
def test_the_bytes_tokenizer_is_the_same_in_transformers(text, tmp_path):
    from holdfast.data.tokenizers import load_tokenizer
    from holdfast.models.pretrained.tokenizers import save_tokenizer

    ours = load_tokenizer("bytes")
    save_tokenizer(ours, tmp_path, 64)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = text.replace("<|endoftext|>", "")
    assert loaded(plain, add_special_tokens=False)["input_ids"] == ours.encode(plain)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (ours.eot_id, ours.pad_id)
    assert loaded.decode(ours.encode(plain)) == plain
    assert load_tokenizer(tmp_path).fingerprint == ours.fingerprint
