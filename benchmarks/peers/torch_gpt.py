"""A plain PyTorch GPT, written as its users would: eager or compiled, in float32 or with bfloat16 autocast."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from serve import THREADS, open_pipe, serve
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and feed-forward, each on a normed copy of the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2's design with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = functional.linear(self.norm(hidden), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def load_weights(model: GPT, folder: Path) -> None:
    """Our initial weights, which are stored in GPT-2's names and (in, out) order."""
    names = {"attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    weights = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("transformer.").replace("h.", "blocks.", 1).replace("ln_f", "norm")
        for theirs, ours in names.items():
            if f".{theirs}." in name:
                name = name.replace(theirs, ours)
                tensor = tensor.T.contiguous() if tensor.dim() == 2 else tensor
        weights[name.replace("wte", "tokens").replace("wpe", "positions")] = tensor
    model.load_state_dict(weights)


def adamw(model: nn.Module, numbers: dict[str, float]) -> torch.optim.AdamW:
    """Fused AdamW that decays matrices and embeddings alone."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": numbers["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    betas = (numbers["beta1"], numbers["beta2"])
    return torch.optim.AdamW(groups, lr=numbers["lr"], betas=betas, eps=numbers["epsilon"], fused=True)


def main() -> None:
    say = open_pipe()
    shape: dict[str, Any] = json.loads(sys.argv[1])
    folder = Path(shape["folder"])
    torch.set_num_threads(THREADS)
    model = GPT(shape["layers"], shape["width"], shape["heads"], shape["length"], shape["vocabulary"])
    load_weights(model, folder / "model")
    optimizer = adamw(model, shape["adamw"])
    batches = [tuple(torch.from_numpy(part).long() for part in pair) for pair in np.load(folder / "batches.npy")]
    forward = torch.compile(model) if shape["compile"] else model
    at = 0

    def precision() -> Any:
        return torch.autocast("cpu", torch.bfloat16) if shape["bfloat16"] else contextlib.nullcontext()

    def train(steps: int) -> list[float]:
        nonlocal at
        losses = []
        for _ in range(steps):
            with precision():
                loss = forward(*batches[at % len(batches)])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), shape["adamw"]["clip_norm"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            at += 1
        return losses

    parameters = sum(parameter.numel() for parameter in model.parameters())
    serve(train, {"parameters": parameters, "versions": {"torch": torch.__version__}}, say)


if __name__ == "__main__":
    main()
