"""`transformers` GPT-2 through its own training step: the model is given labels and returns the loss."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from serve import THREADS, open_pipe, serve
from torch_gpt import adamw


def main() -> None:
    say = open_pipe()
    shape: dict[str, Any] = json.loads(sys.argv[1])
    folder = Path(shape["folder"])
    torch.set_num_threads(THREADS)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "model", dtype=torch.float32)
    model.train()
    optimizer = adamw(model, shape["adamw"])
    # `labels` are moved by one inside; a row's last target is its first word, which `shift_labels` can say.
    batches = [tuple(torch.from_numpy(part).long() for part in pair) for pair in np.load(folder / "batches.npy")]
    at = 0

    def train(steps: int) -> list[float]:
        nonlocal at
        losses = []
        for _ in range(steps):
            x, y = batches[at % len(batches)]
            loss = model(input_ids=x, labels=x, shift_labels=y, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), shape["adamw"]["clip_norm"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            at += 1
        return losses

    parameters = sum(parameter.numel() for parameter in model.parameters())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    serve(train, {"parameters": parameters, "versions": versions}, say)


if __name__ == "__main__":
    main()
