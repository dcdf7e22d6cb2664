"""Resolving `architecture/…` to a ModelSpec: presets, what follows from what, and what is refused."""

import dataclasses

import pytest

from holdfast import registry
from holdfast.config import build, configure, merge
from holdfast.errors import ConfigError, UserError
from holdfast.models import ArchitectureConfig, ModelSpec, check_divisible, resolve
from holdfast.models.config import LATER
from holdfast.models.family import decoder


def spec_of(preset="tiny", vocab_size=257, block_size=64, **values):
    return resolve(ArchitectureConfig(preset=preset, **values), block_size=block_size, vocab_size=vocab_size)


def test_defaults_round_trip_through_the_tree():
    assert configure(ArchitectureConfig, build(ArchitectureConfig)) == ArchitectureConfig()


@pytest.mark.parametrize(
    ("preset", "vocab_size", "block_size", "millions"),
    [
        ("tiny", 257, 256, 0.9),
        ("small", 257, 256, 10.7),
        ("gpt2", 50257, 1024, 124.4),
        ("gpt2-medium", 50257, 1024, 354.8),
        ("gpt2-xl", 50257, 1024, 1557.6),
        ("pythia-160m", 50304, 2048, 162.3),
        ("smollm2-135m", 49152, 2048, 134.5),
        ("llama-160m", 32000, 2048, 162.4),
        ("llama-1b", 128256, 2048, 1235.8),
        ("llama-8b", 128256, 2048, 8030.3),
        ("qwen2-0.5b", 151936, 2048, 494.0),
        ("qwen3-0.6b", 151936, 2048, 596.0),
    ],
)
def test_presets_have_the_size_of_the_models_they_are_named_after(preset, vocab_size, block_size, millions):
    parameters = spec_of(preset, vocab_size, block_size).num_parameters()
    assert parameters / 1e6 == pytest.approx(millions, rel=2e-3, abs=0.05)


def test_every_preset_resolves_and_has_a_help_text():
    for name in registry.models:
        assert spec_of(name).n_layers > 0
        assert registry.models.help(name)


def test_what_the_user_sets_replaces_the_preset():
    spec = spec_of("gpt2", n_layers=3, dropout=0.1, bias=False)
    assert (spec.n_layers, spec.n_embd, spec.dropout, spec.bias) == (3, 768, 0.1, False)


def test_what_is_not_set_follows():
    spec = spec_of("gpt2", n_embd=96, n_head=4)
    assert (spec.head_dim, spec.n_kv_head, spec.n_ff, spec.qkv_bias) == (24, 4, 384, True)
    assert spec_of(n_embd=100, n_head=2).n_ff == 320  # 8/3 of the width, up to a multiple of 64
    assert spec_of("qwen3-0.6b").head_dim == 128


def test_the_vocabulary_is_the_tokenizers_or_larger():
    assert spec_of().vocab_size == 257
    assert spec_of(vocab_size=257).vocab_size == 257
    assert resolve(ArchitectureConfig(vocab_size=320), block_size=8, vocab_size=257).vocab_size == 320
    with pytest.raises(ConfigError, match="architecture/vocab_size: got 256, expected at least 257"):
        resolve(ArchitectureConfig(vocab_size=256), block_size=8, vocab_size=257)


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("architecture/n_head", {"n_head": 3}),
        ("architecture/n_kv_head", {"n_kv_head": 3}),
        ("architecture/head_dim", {"head_dim": 7}),
        ("architecture/head_dim", {"rope_pct": 0.01}),
        ("architecture/block_size", {"block_size": 0}),
        ("architecture/window_layers", {"window": 4, "window_layers": "wx"}),
        ("architecture/rope_layers", {"rope_layers": ""}),
    ],
)
def test_what_cannot_work_is_refused_by_path(path, values):
    with pytest.raises(ConfigError) as caught:
        spec_of(**values)
    assert caught.value.path == path


@pytest.mark.parametrize(
    "override",
    ["activation=relu", "norm=batch", "dropout=1", "dropout=-0.1", "n_layers=0", "dtype=float8", "rope_pct=0"],
)
def test_bad_values_are_refused_by_the_config(override):
    with pytest.raises(ConfigError, match="architecture/" + override.split("=")[0]):
        merge([ArchitectureConfig], {}, [f"architecture.{override}"])


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(UserError, match=r"architecture/preset: there is no model 'gpt3'; did you mean 'gpt2'"):
        spec_of("gpt3")


def test_a_preset_with_unknown_keys_is_refused(monkeypatch):
    monkeypatch.setattr(registry.models, "_entries", dict(registry.models._entries))
    registry.models.register("odd")({"n_layers": 1, "n_embd": 8, "n_head": 1, "width": 3})
    with pytest.raises(ConfigError, match="not width"):
        spec_of("odd")


def test_a_spec_is_hashable_and_complete():
    spec = spec_of()
    assert hash(spec) == hash(dataclasses.replace(spec))
    off = {"window", "window_rope_base", "attention_scale", "attention_softcap", "logit_softcap"}
    assert {name for name, value in dataclasses.asdict(spec).items() if value is None} == off


def test_a_manifest_names_later_options_only_where_they_are_on():
    assert not set(LATER) & set(decoder(spec_of()).described())
    described = decoder(spec_of(window=4, window_layers="wfwf", block_size=8)).described()
    assert {name for name in LATER if name in described} == {"window", "window_layers"}
    assert (described["window_layers"], ModelSpec(**described).windows) == ("wf", (4, None, 4, None))


def test_flops_grow_with_visible_keys_and_triple_in_training():
    spec = ModelSpec(6, 384, 6, 6, 64, 1536, vocab_size=512, block_size=256)
    # The performance notes count 146 GFLOP a step of 2048 tokens, of which masked attention scores are 3.6.
    assert spec.flops_per_token() * 2048 == pytest.approx(142e9, rel=0.02)
    assert spec.flops_per_token() == 3 * spec.flops_per_token(backward=False)
    assert spec.flops_per_token(512) > spec.flops_per_token(256)


@pytest.mark.parametrize(
    ("sizes", "number"),
    [({"fsdp": 5}, "n_embd"), ({"tensor": 3}, "n_head"), ({"tensor": 4}, "n_kv_head"), ({"tensor": 2}, "vocab_size")],
)
def test_a_mesh_that_does_not_divide_the_model_says_which_number(sizes, number):
    spec = spec_of(n_head=4, n_kv_head=2, vocab_size=257)
    with pytest.raises(ConfigError, match=f"a divisor of architecture/{number} = ") as caught:
        check_divisible(spec, sizes)
    assert caught.value.path == f"topology/{next(iter(sizes))}"


def test_a_mesh_that_divides_the_model_passes():
    check_divisible(spec_of(vocab_size=256), {"data": 7, "fsdp": 4, "tensor": 2})
