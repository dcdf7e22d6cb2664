"""Writing folders: families by themselves, several files, whole or not at all, model cards."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from holdfast.data.tokenizers import load_tokenizer
from holdfast.errors import UserError
from holdfast.execution.topology import Topology
from holdfast.models import ArchitectureConfig, Decoder, resolve
from holdfast.models.pretrained import family_for, import_model, load_params, load_spec, save_pretrained, write
from holdfast.models.pretrained.write import run_card

SMALL = {"n_layers": 2, "n_embd": 16, "n_head": 2, "n_ff": 24}


def spec_of(preset="tiny", **values):
    return resolve(ArchitectureConfig(preset=preset, **{**SMALL, **values}), block_size=16, vocab_size=258)


def params_of(spec):
    boxed = jax.eval_shape(Decoder(spec).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    random = np.random.default_rng(0)
    kind = jnp.dtype(spec.param_dtype)
    return jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(kind), nn.meta.unbox(boxed))


def mesh():
    return Topology.build(devices=jax.devices()[:1]).mesh


@pytest.mark.parametrize(
    ("preset", "family"),
    [
        ("tiny", "llama"),
        ("small", "llama"),
        ("gpt-mini", "gpt2"),
        ("gpt2-xl", "gpt2"),
        ("pythia-160m", "gpt_neox"),
        ("smollm2-135m", "llama"),
        ("llama-8b", "llama"),
        ("qwen2-0.5b", "qwen2"),
        ("qwen3-0.6b", "qwen3"),
    ],
)
def test_every_preset_has_a_family(preset, family):
    spec = resolve(ArchitectureConfig(preset=preset), block_size=64, vocab_size=512)
    assert family_for(spec).model_type == family


def test_what_no_family_has_is_said():
    with pytest.raises(UserError, match=r"architecture/bias: is False, gpt2 has True"):
        family_for(spec_of("gpt2", bias=False))
    with pytest.raises(UserError, match=r"the family gpt2 cannot express this model(.|\n)*architecture/norm: is 'rms'"):
        family_for(spec_of("tiny"), "gpt2")
    with pytest.raises(UserError, match="there is no family 'bert'"):
        family_for(spec_of("tiny"), "bert")


@pytest.mark.parametrize("preset", ["gpt2", "tiny", "qwen3-0.6b", "pythia-160m"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read_bit_by_bit_from_several_files(preset, param_dtype, tmp_path):
    more = {"n_kv_head": 2, "head_dim": 8} if preset == "qwen3-0.6b" else {}
    spec = spec_of(preset, param_dtype=param_dtype, **more)
    params = params_of(spec)
    tokenizer = load_tokenizer("bytes")
    save_pretrained(params, spec, tmp_path / "out", tokenizer, max_file_bytes=4000, extra={"note": "mine"})
    assert len([*(tmp_path / "out").glob("model-*-of-*.safetensors")]) > 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["note"], config["torch_dtype"], config["eos_token_id"]) == ("mine", param_dtype, 256)
    back = load_spec(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / "out", spec, mesh()), params)
    assert (back.n_embd, back.vocab_size, back.norm) == (spec.n_embd, spec.vocab_size, spec.norm)
    assert load_tokenizer(tmp_path / "out").fingerprint == tokenizer.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_is_left_when_writing_fails_and_nothing_is_overwritten(tmp_path, monkeypatch):
    spec = spec_of()
    monkeypatch.setattr(write, "write_weights", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_pretrained(params_of(spec), spec, tmp_path / "out")
    assert not [*tmp_path.iterdir()]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(UserError, match="there is something already"):
        save_pretrained(params_of(spec), spec, tmp_path / "out")


def test_importing_writes_the_same_model_again(tmp_path):
    spec = spec_of("pythia-160m")
    params = params_of(spec)
    save_pretrained(params, spec, tmp_path / "one", load_tokenizer("bytes"))
    done = import_model(str(tmp_path / "one"), tmp_path / "two")
    assert (done.family, done.spec) == ("gpt_neox", load_spec(tmp_path / "one"))
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two"))
    assert first == second
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / "two", spec, mesh()), params)
    card = (tmp_path / "two" / "README.md").read_text()
    assert "Converted by Holdfast from `one`" in card
    assert str(tmp_path) not in card


def test_the_card_holds_the_curriculum_and_the_matrix(tmp_path):
    results = {
        "stages": ["stories", "plays"],
        "tasks": ["tinystories", "shakespeare"],
        "matrix": {"nll": [[5.0, 5.5], [1.25, 4.0], [2.0, None]], "accuracy": [[None, None]] * 3},
        "metrics": {"nll": {"forgetting": 0.75, "forward_transfer": None}},
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    places = f"architecture:\n  from: {tmp_path}/models/small\ndata:\n  root: ~/data\n  cache: {tmp_path}/cache\n"
    text = f"# which job\njob: continual/train/abcd\ntraining:\n  seed: 0\n{places}"
    (tmp_path / "config.yaml").write_text(text)
    card = run_card(tmp_path, "final", {"step": 1200, "tokens": 76800}, "llama", spec_of())
    for part in (
        "checkpoint `final`: step 1,200",
        "1. stories\n2. plays",
        "| plays | 2 | – |",
        "forgetting 0.75",
        "```yaml\njob: continual/train/abcd\ntraining:\n  seed: 0\narchitecture:",
    ):
        assert part in card
    assert "forward transfer" not in card
    assert "from: small" in card
    assert str(tmp_path) not in card
    assert "~" not in card
    assert "accuracy" not in card  # no task of the run has one
