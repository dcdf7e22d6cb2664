"""The largest difference between the losses of the same tokens in PACKED and in PADDED rows."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from holdfast.analysis.rehearsal import Rehearsal
from holdfast.config import merge
from holdfast.data.rows import Rows
from holdfast.data.sampling import DatasetStyle
from holdfast.objectives.token_loss import token_nll
from holdfast.training.config import config_classes
from holdfast.training.resolve import resolve

PACKED_ROWS = 8


def main() -> None:
    cfg = merge(config_classes("gpt/train/pretrain"), json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Rehearsal(resolve("gpt/train/pretrain", cfg), Path(scratch)).trainer
        store = next(iter(trainer.data.train.values())).prepared
        block = trainer.resolved.curriculum.block_size
        packed, padded = (
            Rows(store, style, block, loss_on="all") for style in (DatasetStyle.PACKED, DatasetStyle.PADDED)
        )
        state = trainer.state

        @jax.jit
        def losses(params: Any, batch: Any) -> jax.Array:
            extra = {"segment_ids": batch.segment_ids, "positions": batch.positions}
            hidden = state.apply_fn({"params": params}, batch.x, method="hidden", **extra)
            return token_nll(hidden, trainer.resolved.model.unembedding(params), batch.y)

        largest = 0.0
        for row in range(PACKED_ROWS):
            one = packed.rows([row])
            together = np.asarray(losses(state.params, one))[0]
            documents = list(packed.documents(row))
            # As many rows as the longest row has documents, so that one shape is compiled.
            chosen = documents + documents[:1] * (64 - len(documents))
            alone = np.asarray(losses(state.params, padded.rows(chosen)))
            for number, _ in enumerate(documents):
                mine = together[one.segment_ids[0] == number + 1]
                largest = max(largest, float(np.abs(mine - alone[number, : len(mine)]).max()))
        print(json.dumps({"difference": largest}))


if __name__ == "__main__":
    main()
