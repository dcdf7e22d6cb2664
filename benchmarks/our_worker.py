"""Our own training as a worker: the trainer's compiled step in its real loop, data loader included.

With "export" it only writes what the peers need, the initial weights in GPT-2's format and the first batches.
"""

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.serve import open_pipe, serve
from holdfast.analysis.rehearsal import Rehearsal
from holdfast.config import merge
from holdfast.models.pretrained import save_pretrained
from holdfast.training.config import config_classes
from holdfast.training.resolve import resolve

NUM_BATCHES = 16


def export(rehearsal: Rehearsal, folder: Path) -> None:
    """Write the initial weights and the inputs and targets of the first batches, (N, 2, rows, length)."""
    trainer = rehearsal.trainer
    save_pretrained(trainer.state.params, trainer.resolved.model.options, folder / "model", family="gpt2")
    batches = [trainer.batches[step] for step in range(NUM_BATCHES)]
    np.save(folder / "batches.npy", np.stack([np.stack([batch.x[0], batch.y[0]]) for batch in batches]))


def useful_tokens(rehearsal: Rehearsal, steps: int) -> int:
    """Real tokens of the next steps' batches."""
    batches = rehearsal.trainer.batches
    return sum(int(batches[rehearsal.step + step].padding_mask.sum()) for step in range(steps))


def main() -> None:
    say = open_pipe()
    told: dict[str, Any] = json.loads(sys.argv[1])
    cfg = merge(config_classes(told["job"]), told["config"])
    with tempfile.TemporaryDirectory() as scratch:
        rehearsal = Rehearsal(resolve(told["job"], cfg), Path(scratch), told.get("stage", 0))
        if "export" in told:
            export(rehearsal, Path(told["export"]))
            return
        trainer = rehearsal.trainer

        def train(steps: int) -> list[float]:
            rehearsal.losses.found.clear()
            rehearsal.take(steps)
            return list(rehearsal.losses.found)

        versions = {name: importlib.metadata.version(name) for name in ("holdfast", "jax", "jaxlib")}
        facts = {
            "parameters": trainer.resolved.model.num_parameters(),
            "flops_per_step": trainer.resolved.model.flops_per_token() * trainer.resolved.curriculum.tokens_per_step,
            "useful_per_step": useful_tokens(rehearsal, 50) / 50,
            "versions": versions,
        }
        serve(train, facts, say)
        rehearsal.close()


if __name__ == "__main__":
    main()
