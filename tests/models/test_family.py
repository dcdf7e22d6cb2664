"""The model seam: the decoder behind it is what it was, and a family of one's own gets everything from its module."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from holdfast import registry
from holdfast.config import field
from holdfast.data.tokenizers.bytelevel import BytesTokenizer
from holdfast.errors import ConfigError, UserError
from holdfast.evaluation.choice import questions, score
from holdfast.evaluation.decoding import generate_tokens
from holdfast.evaluation.forward import Runner
from holdfast.models import ArchitectureConfig, Dense, Embedding, ModelSpec, Norm, axes, derived
from holdfast.models.config import LATER
from holdfast.models.family import DecoderFamily, Model, ModelFamily, decoder, resolve_model
from holdfast.models.parameters import trainable_for
from holdfast.optim.config import LoraConfig
from holdfast.training import restore
from holdfast.training.base import BaseTrainer
from holdfast.training.config import BaseTrainerConfig
from training import tiny

SPECS = {
    "gated": ModelSpec(2, 32, 4, 2, 8, 64, 320, 16, activation="silu_gated", norm="rms", positions="rotary"),
    "biased": ModelSpec(3, 32, 4, 4, 8, 64, 320, 16, bias=True, qkv_bias=True, qk_norm=True, scan_layers=True),
    "untied": ModelSpec(2, 32, 4, 4, 8, 64, 320, 16, tie_embeddings=False),
}


@dataclass(frozen=True)
class StackConfig:
    """Options of a family for tests."""

    width: int = field("architecture/stack/width", default=16, ge=1, help="width")
    depth: int = field("architecture/stack/depth", default=3, ge=1, help="layers")
    softcap: float = field("architecture/stack/softcap", default=2.0, gt=0, help="bound of the logits")
    balance: float = field("architecture/stack/balance", default=0.5, ge=0, help="weight of the auxiliary loss")


class StackLayer(nn.Module):
    """The mean of the tokens so far, through two products."""

    config: StackConfig

    @nn.compact
    def __call__(self, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        mean = jnp.einsum("bts,bsd->btd", weights, Norm(name="norm")(x))
        up = nn.gelu(Dense(2 * self.config.width, (axes.EMBED, axes.MLP), name="up")(mean))
        return x + Dense(self.config.width, (axes.MLP, axes.EMBED), name="down")(up), None


class Stack(nn.Module):
    """Stacked layers, an unembedding of its own, an auxiliary loss."""

    config: StackConfig
    vocab_size: int

    def setup(self) -> None:
        config = self.config
        self.embed = Embedding(self.vocab_size, config.width, axes.VOCAB)
        self.layers = nn.scan(
            StackLayer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast,),
            length=config.depth,
            metadata_params={nn.PARTITION_NAME: axes.LAYERS},
        )(config)
        self.unembed = Dense(self.vocab_size, (axes.EMBED, axes.VOCAB))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.unembed(self.hidden(tokens)[0])

    def hidden(self, tokens: jax.Array, *, segment_ids: Any = None, positions: Any = None, deterministic: bool = True):
        length = tokens.shape[1]
        seen = jnp.tril(jnp.ones((length, length), bool))[None]
        if segment_ids is not None:
            seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
        weights = seen / seen.sum(-1, keepdims=True)
        states, _ = self.layers(self.embed(tokens), weights)
        return states, {"balance": (jnp.square(states).mean(), self.config.balance)}


class StackFamily(ModelFamily[StackConfig]):
    option_of_axis = {axes.EMBED: "architecture/stack/width"}

    def build(self, options: StackConfig, vocab_size: int, block_size: int) -> Stack:
        return Stack(options, vocab_size)

    def unembedding(self, options: StackConfig, params: Any) -> jax.Array:
        return params["unembed"]["kernel"]

    def softcap(self, options: StackConfig) -> float | None:
        return options.softcap


class UncachedDecoder(DecoderFamily):
    """The decoder as if it had no cache and knew nothing without JAX."""

    init_cache = ModelFamily.init_cache
    read = ModelFamily.read
    decode = ModelFamily.decode


registry.families.register("stack", config=StackConfig, help="for tests")(StackFamily)
registry.families.register("uncached", help="for tests")(UncachedDecoder)
STACK = Model("stack", StackConfig(), vocab_size=320, block_size=16)
VALUES = {**tiny.PRETRAIN, "architecture": {"block_size": 32, "family": "stack"}}


def params_of(model: Model, seed: int = 0, scale: float = 4.0) -> Any:
    params = nn.meta.unbox(model.module.init(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32)))["params"]
    return jax.tree.map(lambda leaf: leaf * scale, params)


@pytest.mark.parametrize("name", SPECS)
def test_what_the_decoder_knows_without_jax_is_what_its_module_has(name: str) -> None:
    model = decoder(SPECS[name])
    assert derived.parameters(model) == model.parameters()
    assert derived.projections(model) == model.projections()
    assert derived.states(model) == (model.width, model.dtype)
    assert model.num_parameters() == SPECS[name].num_parameters()
    assert derived.tensor_sums(model) == model.kind.tensor_sums(model)


def test_a_decoder_in_a_manifest_is_its_specification_as_ever() -> None:
    """Without the options that came later, which a plain decoder has off."""
    values = dataclasses.asdict(SPECS["gated"])
    assert decoder(SPECS["gated"]).described() == {name: values[name] for name in values if name not in LATER}


@pytest.mark.parametrize(("family", "default"), [(None, "decoder"), ("decoder", "stack")])
def test_the_option_comes_before_the_trainers_own_family(family: str | None, default: str) -> None:
    architecture = ArchitectureConfig(family=family)
    name = architecture.family or default
    assert resolve_model(name, architecture, None, block_size=16, vocab_size=320).family == "decoder"


def test_a_family_that_is_not_there_is_named_with_its_path() -> None:
    with pytest.raises(UserError, match=r"architecture/family: there is no model family 'decodr'.*'decoder'"):
        resolve_model("decodr", ArchitectureConfig(), None, block_size=16, vocab_size=320)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"n_layers": 2}, "n_layers"),
        ({"preset": "gpt2"}, "preset"),
        ({"source": "x"}, "from"),
    ],
)
def test_options_of_the_decoder_beside_another_family_are_refused(options: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=rf"architecture/{path}: got .*family is stack; .*architecture/stack/"):
        resolve_model("stack", ArchitectureConfig(**options), StackConfig(), block_size=16, vocab_size=320)


def test_the_vocabulary_is_an_option_of_every_family() -> None:
    model = resolve_model("stack", ArchitectureConfig(vocab_size=512), StackConfig(), block_size=16, vocab_size=320)
    assert model.vocab_size == 512
    with pytest.raises(ConfigError, match="architecture/vocab_size: got 100"):
        resolve_model("stack", ArchitectureConfig(vocab_size=100), StackConfig(), block_size=16, vocab_size=320)


def test_names_counts_and_types_come_from_the_module() -> None:
    found = STACK.parameters()
    assert found["layers/up/kernel"] == ((3, 16, 32), 3)
    assert found["embed/embedding"] == ((320, 16), 0)
    assert STACK.projections()["layers/down"] == (32, 16, (3,))
    assert STACK.projections()["unembed"] == (16, 320, ())
    assert (STACK.width, STACK.dtype) == (16, "float32")
    assert STACK.num_parameters() == 2 * 320 * 16 + 3 * (2 * 16 * 32 + 16)
    assert STACK.flops_per_token(backward=False) == 2 * (3 * 2 * 16 * 32 + 320 * 16)
    assert STACK.flops_per_token() == 3 * STACK.flops_per_token(backward=False)
    assert STACK.kind.activation_bytes(STACK) > 3 * 4 * (16 + 32)
    assert STACK.described() == {
        "family": "stack", **dataclasses.asdict(StackConfig()), "vocab_size": 320, "block_size": 16,
    }  # fmt: skip


def test_freezing_and_adapters_follow_the_modules_names() -> None:
    found = trainable_for(["layers/0-1/*", "embed"], LoraConfig(), STACK)
    assert dict(found.rows) == {
        "layers/norm/scale": (2,), "layers/up/kernel": (2,), "layers/down/kernel": (2,), "unembed/kernel": None,
    }  # fmt: skip
    adapters = trainable_for([], LoraConfig(rank=2), STACK).lora
    assert adapters.modules == ("layers/up", "layers/down", "unembed")
    shapes = adapters.shapes(STACK)
    assert shapes["layers/up/lora_in"] == (3, 16, 2)
    assert shapes["layers/up/lora_scale"] == (3,)
    assert shapes["unembed/lora_out"] == (2, 320)
    assert shapes["unembed/lora_scale"] == ()
    with pytest.raises(ConfigError, match=r"optimization/freeze/0: .*the nearest name is layers/up"):
        trainable_for(["layers/upp"], LoraConfig(), STACK)


def test_a_mesh_that_does_not_fit_names_the_option() -> None:
    STACK.check_mesh({"data": 8, "fsdp": 4, "tensor": 2})
    with pytest.raises(ConfigError, match="topology/fsdp: got 3, expected a divisor of architecture/stack/width = 16"):
        STACK.check_mesh({"fsdp": 3})
    with pytest.raises(ConfigError, match=r"topology/tensor: got 3, .* of 320, the axis 'vocab' of embed"):
        STACK.check_mesh({"tensor": 3})


def test_a_checkpoint_of_another_family_or_of_other_options_is_refused() -> None:
    # As manifests were before there were families, and options that came later.
    held = {name: value for name, value in dataclasses.asdict(SPECS["gated"]).items() if name not in LATER}
    old = {"model": held, "tokenizer": "t"}
    assert restore.model_differences(old, {"model": decoder(SPECS["gated"]).described(), "tokenizer": "t"}) == []
    stack = {"model": STACK.described(), "tokenizer": "t"}
    assert restore.model_differences(old, stack) == ["  architecture/family: was 'decoder', is 'stack'"]
    wide = dataclasses.replace(STACK, options=StackConfig(width=32), vocab_size=512).described()
    assert restore.model_differences(stack, {"model": wide, "tokenizer": "t"}) == [
        "  architecture/vocab_size: was 320, is 512",
        "  architecture/stack/width: was 16, is 32",
    ]


def test_without_a_cache_generation_and_choices_are_the_same() -> None:
    spec, tokenizer = SPECS["gated"], BytesTokenizer()
    cached, uncached = decoder(spec), Model("uncached", spec, 320, 16)
    params = params_of(cached)
    prompts = [tokenizer.encode(text) for text in ("ab", "a longer one")]
    said = [
        generate_tokens(Runner(model), params, tokenizer, prompts, max_new_tokens=10) for model in (cached, uncached)
    ]
    assert said[0] == said[1]
    assert max(map(len, said[0])) == 10
    asked = questions([tiny_question()], tokenizer, 16)
    scores = [score(Runner(model), params, asked, 4)[0].log_likelihood for model in (cached, uncached)]
    np.testing.assert_allclose(*scores, atol=1e-4)


def tiny_question() -> Any:
    from holdfast.data.documents import Document

    return Document(id="0", text="", prompt="one plus", answer=" two", choices=(" two", " three"), label=0)


def test_a_family_of_its_own_generates_what_its_logits_say() -> None:
    params, tokenizer = params_of(STACK), BytesTokenizer()
    (said,) = generate_tokens(Runner(STACK), params, tokenizer, [tokenizer.encode("abc")], max_new_tokens=6)
    row = tokenizer.encode("abc")
    for token in said:
        states, _ = STACK.hidden(params, jnp.asarray([row]))
        logits = states[0, -1] @ STACK.unembedding(params)
        assert int(logits[: tokenizer.vocab_size].argmax()) == token
        row.append(token)


def test_logits_are_capped_in_decoding() -> None:
    params = params_of(STACK, scale=20.0)
    logits, _ = STACK.decode(params, jnp.asarray([[1, 2, 3]]), STACK.init_cache(1), jnp.asarray([3]))
    states, _ = STACK.hidden(params, jnp.asarray([[1, 2, 3]]))
    plain = states[0, -1] @ STACK.unembedding(params)
    assert np.abs(plain).max() > 4
    # Logits of some tens carry rounding of some 1e-5, which differs between processors.
    np.testing.assert_allclose(logits[0], 2.0 * np.tanh(plain / 2.0), atol=2e-4)


def test_auxiliary_losses_are_added_with_their_weights_and_recorded(tmp_path: Path) -> None:
    micro = "training.per_device_batch_size=4"
    trainer = tiny.trainer("gpt/train/pretrain", VALUES, tmp_path, "training.tokens=512", micro)
    assert trainer.resolved.model.family == "stack"
    batch = trainer.batch()
    assert batch.x.shape[0] == 2
    _, loss, meta = jax.jit(trainer.train_step, static_argnums=3)(
        trainer.state, batch, jax.random.key(0), batch.x.shape[0]
    )
    balance = np.mean([trainer.resolved.model.hidden(trainer.state.params, x)[1]["balance"][0] for x in batch.x])
    np.testing.assert_allclose(meta["balance"], balance, rtol=1e-5)
    np.testing.assert_allclose(loss, meta["ce"] + 0.5 * balance, rtol=1e-5)
    trainer.run()
    lines = (trainer.spec.run_dir / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    assert len(records) == 2
    np.testing.assert_allclose([record["loss"] for record in records], [r["ce"] + 0.5 * r["balance"] for r in records])


def test_a_trainers_own_family_is_what_null_means(tmp_path: Path) -> None:
    class StackTrainer(BaseTrainer[BaseTrainerConfig, Any]):
        """A trainer whose models are stacks."""

        MODEL = "stack"

    job = "test/train/stack"
    registry.jobs.register(job, config=BaseTrainerConfig)(StackTrainer)
    values = {**VALUES, "architecture": {"block_size": 32}}
    assert tiny.resolved(job, values).model == Model("stack", StackConfig(), 320, 32)
    assert tiny.resolved(job, values, "architecture.family=decoder").model.family == "decoder"
    assert tiny.trainer(job, values, tmp_path).resolved.model.family == "stack"
