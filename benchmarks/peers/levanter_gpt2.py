"""`levanter` GPT-2 through its own trainer's step, in float32.

Gradient checkpointing, which it has on by default, is switched off: without it levanter is faster here. Its
`next_token_loss` gives JAX a float as a mask, which this version of JAX refuses; what it calls with the logits and the
targets is called directly instead, on every position.
"""

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import levanter
import numpy as np
from haliax.state_dict import from_torch_compatible_state_dict
from levanter.layers.attention import AttentionMask
from levanter.models.gpt2 import Gpt2Config, Gpt2LMHeadModel
from levanter.models.lm_model import LmExample
from levanter.models.loss import cross_entropy_and_logsumexp_penalty
from levanter.optim import AdamConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from safetensors.numpy import load_file
from serve import open_pipe, serve

DECAYED = r".*attn.*weight|.*mlp.*weight|.*token_embeddings|.*position_embeddings"
NUM_STEPS = 100_000


def loss(model: Any, example: LmExample, *, key: Any = None) -> Any:
    """Mean cross-entropy of the next tokens."""
    hidden = model.activations(example.tokens, example.attn_mask, key=key)
    logits = hax.dot(hidden, model.get_lm_head(), axis=model.Embed)
    targets = hax.nn.one_hot(hax.roll(example.tokens, -1, model.Pos), model.Vocab, dtype=logits.dtype)
    return cross_entropy_and_logsumexp_penalty(model.Vocab, logits, targets, reduction=hax.mean)


def build_trainer(shape: dict[str, Any]) -> Trainer:
    """Levanter's trainer with our numbers and nothing that reports or saves."""
    numbers = shape["adamw"]
    optimizer = AdamConfig(
        learning_rate=numbers["lr"], beta1=numbers["beta1"], beta2=numbers["beta2"], epsilon=numbers["epsilon"],
        weight_decay=numbers["weight_decay"], max_grad_norm=numbers["clip_norm"],
        lr_schedule="constant", warmup=0.0, weight_decay_modules=DECAYED,
    )  # fmt: skip
    config = TrainerConfig(
        id="bench", tracker=NoopConfig(), train_batch_size=shape["rows"], num_train_steps=NUM_STEPS,
        log_jaxprs=False, log_xla_hlo=False, require_accelerator=False, load_checkpoint=False,
        log_dir=Path(tempfile.gettempdir()),
    )  # fmt: skip
    return Trainer(config, optimizer.build(NUM_STEPS), loss, add_default_hooks=False)


def main() -> None:
    say = open_pipe()
    shape: dict[str, Any] = json.loads(sys.argv[1])
    folder = Path(shape["folder"])
    config = Gpt2Config(
        seq_len=shape["length"], hidden_dim=shape["width"], num_layers=shape["layers"], num_heads=shape["heads"],
        gradient_checkpointing=False,
    )  # fmt: skip
    batch_axis, position = hax.Axis("batch", shape["rows"]), config.Pos
    ones = hax.ones((batch_axis, position), dtype=bool)
    inputs = np.load(folder / "batches.npy")[:, 0]
    batches = [
        LmExample(hax.named(jax.numpy.asarray(x), (batch_axis, position)), ones, AttentionMask.causal()) for x in inputs
    ]
    stored = load_file(folder / "model" / "model.safetensors")
    weights = {name.removeprefix("transformer."): array for name, array in stored.items()}
    with build_trainer(shape) as trainer:
        vocabulary = hax.Axis("vocab", shape["vocabulary"])
        model = Gpt2LMHeadModel.init(vocabulary, config, key=jax.random.key(0))
        model = from_torch_compatible_state_dict(model, weights)
        state = trainer.initial_state(jax.random.PRNGKey(0), model=model)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
        del model
        at = 0

        def train(steps: int) -> list[float]:
            nonlocal state, at
            losses = []
            for _ in range(steps):
                info = trainer.train_step(state, batches[at % len(batches)])
                state = info.state
                losses.append(float(info.loss))
                at += 1
            jax.block_until_ready(jax.tree.leaves(eqx.filter(state, eqx.is_array)))
            return losses

        names = ("levanter", "haliax", "jax")
        versions = {name: importlib.metadata.version(name) for name in names}
        assert levanter.__name__ == "levanter"
        serve(train, {"parameters": parameters, "versions": versions}, say)


if __name__ == "__main__":
    main()
