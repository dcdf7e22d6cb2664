"""Evaluates the same model on one device and on a mesh of four, and prints both; run by test_mesh."""

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from evaluation.conftest import TOKENIZER, make_rows, make_tiny
from holdfast.data.documents import Document
from holdfast.data.sampling import DatasetStyle
from holdfast.evaluation.config import EvaluationConfig
from holdfast.evaluation.decoding import generate_tokens
from holdfast.evaluation.evaluator import Evaluator
from holdfast.execution.topology import Topology, TopologyConfig
from holdfast.models.axes import RULES

TASKS = [Document(str(i), prompt=f"{i}? ", answer=f"answer {i}") for i in range(9)]


def main() -> None:
    tiny = make_tiny()
    topology = Topology.build(TopologyConfig(data=-1, fsdp=2, tensor=1))
    shapes = jax.eval_shape(tiny.model.module.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(shapes), topology.mesh, RULES)["params"]
    sharded = [jax.device_put(params, shardings) for params in (tiny.params, tiny.other)]
    with tempfile.TemporaryDirectory() as folder:
        rows = make_rows(Path(folder), TASKS, DatasetStyle.PACKED)
        found: list[Any] = []
        for place, (params, other) in ((None, (tiny.params, tiny.other)), (topology, sharded)):
            evaluator = Evaluator(
                tiny.model,
                TOKENIZER,
                EvaluationConfig(limit=7, batch_size=3),
                tasks=["arithmetic"],
                rows={"packed": rows},
                topology=place,
            )
            results = evaluator.evaluate(params, other)
            prompts = [[1, 2, 3], [4], [5] * 20]
            said = generate_tokens(evaluator.runner, params, TOKENIZER, prompts, max_new_tokens=9)
            scores = [each.scores for each in results["arithmetic"].examples]
            found.append({"scores": scores, "packed": results["packed"].measures, "said": said})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
