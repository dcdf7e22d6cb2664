"""`levanter`'s training step of a Llama, compiled for TPUs that are not there; nothing is run.

Its trainer's own step: float32 parameters, bfloat16 activations, rematerialised layers, parameters split along the
width over all devices. It would choose the splash kernel by itself on a TPU; here, where the process has a CPU alone,
the kernel is named. Its `next_token_loss` gives JAX a float as a mask, which this version of JAX refuses: what it calls
with the logits and the targets is called directly, as in `levanter_gpt2.py`.
"""

import importlib.metadata
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax.partitioning import ResourceAxis, infer_resource_partitions
from jax.experimental import topologies
from jax.extend import core
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.lm_model import LmExample
from levanter.models.loss import cross_entropy_and_logsumexp_penalty
from levanter.optim import AdamConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import TrainerState

NUM_STEPS = 100_000


class DescribedConfig(TrainerConfig):
    """A trainer's config whose devices are described."""

    devices: Any = None

    @property
    def device_mesh(self) -> jax.sharding.Mesh:
        """All devices along the axis that parameters and rows are split over."""
        names = (ResourceAxis.REPLICA, ResourceAxis.DATA, ResourceAxis.MODEL)
        return jax.sharding.Mesh(np.array(self.devices).reshape(1, -1, 1), names)

    @property
    def data_axis_size(self) -> int:
        """Their number."""
        return len(self.devices)


def loss(model: Any, example: LmExample, *, key: Any = None) -> Any:
    """Mean cross-entropy of the next tokens, in float32."""
    hidden = model.activations(example.tokens, example.attn_mask, key=key)
    logits = hax.dot(hidden, model.get_lm_head(), axis=model.Embed).astype(jnp.float32)
    targets = hax.nn.one_hot(hax.roll(example.tokens, -1, model.Pos), model.Vocab, dtype=logits.dtype)
    return cross_entropy_and_logsumexp_penalty(model.Vocab, logits, targets, reduction=hax.mean)


def build_trainer(shape: dict[str, Any], devices: Any) -> Trainer:
    """Levanter's trainer with our numbers and nothing that reports or saves."""
    numbers = shape["adamw"]
    optimizer = AdamConfig(
        learning_rate=numbers["lr"], beta1=numbers["beta1"], beta2=numbers["beta2"], epsilon=numbers["epsilon"],
        weight_decay=numbers["weight_decay"], max_grad_norm=numbers["clip_norm"], lr_schedule="constant", warmup=0.0,
    )  # fmt: skip
    config = DescribedConfig(
        id="chips", tracker=NoopConfig(), train_batch_size=shape["rows"] * shape["micro_batches"] * len(devices),
        per_device_parallelism=shape["rows"], num_train_steps=NUM_STEPS, mp=jmp.get_policy("p=f32,c=bfloat16"),
        log_jaxprs=False, log_xla_hlo=False, require_accelerator=False, load_checkpoint=False,
        log_dir=Path(tempfile.gettempdir()),
    )  # fmt: skip
    config.devices = devices
    return Trainer(config, optimizer.build(NUM_STEPS), loss, add_default_hooks=False)


def placed(tree: Any, mapping: Any, mesh: jax.sharding.Mesh) -> Any:
    """A tree of shapes with the shardings that a mapping of axes gives them."""
    where = infer_resource_partitions(tree, mapping, preserve_existing_shardings=False, mesh=mesh)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def put(leaf: Any, place: Any) -> Any:
        given = place if isinstance(place, jax.sharding.Sharding) else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given)

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [put(*pair) for pair in zip(leaves, jax.tree.leaves(where), strict=True)])


def products(jaxpr: Any) -> int:
    """Operations of the matrix products of a traced function, on all devices; what is inside kernels is left out."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
        elif equation.primitive.name != "pallas_call":
            values = (
                part for value in equation.params.values() for part in (value if isinstance(value, tuple) else [value])
            )
            inner = [getattr(part, "jaxpr", part) for part in values]
            found = sum(products(part) for part in inner if isinstance(part, core.Jaxpr))
            total += found * equation.params.get("length", 1) if found else 0
    return total


def traced(shape: dict[str, Any]) -> Any:
    """The step that levanter would run on these devices."""
    described = topologies.get_topology_desc(platform="tpu", topology_name=shape["topology"])
    config = LlamaConfig(
        seq_len=shape["length"], hidden_dim=shape["width"], num_layers=shape["layers"], num_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"], intermediate_dim=shape["feed_forward"], tie_word_embeddings=shape["tied"],
        attn_backend=AttentionBackend.SPLASH,
    )  # fmt: skip
    trainer = build_trainer(shape, described.devices)
    mesh, mapping = trainer.device_mesh, trainer.parameter_axis_mapping
    vocabulary, rows = hax.Axis("vocab", shape["vocabulary"]), trainer.config.TrainBatch

    def initial() -> TrainerState:
        model = LlamaLMHeadModel.init(vocabulary, config, key=jax.random.PRNGKey(0))
        return TrainerState.init(trainer.optimizer, model, key=jax.random.PRNGKey(1), is_trainable=True, mp=trainer.mp)

    state = eqx.filter_eval_shape(initial)
    tokens = hax.NamedArray(jax.ShapeDtypeStruct((rows.size, config.Pos.size), jnp.int32), (rows, config.Pos))
    ones = hax.NamedArray(jax.ShapeDtypeStruct(tokens.array.shape, jnp.bool_), tokens.axes)
    batch = LmExample(tokens, ones, AttentionMask.causal())
    dynamic, static = eqx.partition((state, batch), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    given = placed(dynamic[0], mapping, mesh), placed(dynamic[1], trainer.compute_axis_mapping, mesh)

    def step(state: Any, batch: Any) -> Any:
        state, batch = eqx.combine((state, batch), static)
        result = trainer._train_step(state, (batch,), {}, _no_hooks=True)  # what its loop calls
        return eqx.filter(result.new_state, eqx.is_array), result.loss

    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shardings = jax.tree.map(lambda leaf: leaf.sharding, given[0]), whole
    # As the trainer enters itself, but for the mesh's shape alone: what is computed on the spot runs on this CPU.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping(mapping):
        return jax.jit(step, donate_argnums=0, out_shardings=shardings).trace(*given)


def main() -> None:
    shape: dict[str, Any] = json.loads(sys.argv[1])
    versions = {name: importlib.metadata.version(name) for name in ("levanter", "haliax", "jax", "libtpu")}
    step = traced(shape)
    facts = {"versions": versions, "libtpu": versions["libtpu"], "products": products(step.jaxpr.jaxpr)}
    try:
        program = step.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        print(json.dumps({**facts, "refused": str(error)[:2000]}))
        return
    usage = program.memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    memory = {name: int(getattr(usage, f"{name}_size_in_bytes")) for name in names}
    Path(shape["text"]).write_text(program.as_text())
    print(json.dumps({**facts, "memory": memory}))


if __name__ == "__main__":
    main()
