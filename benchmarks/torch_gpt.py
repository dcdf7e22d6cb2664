"""A plain PyTorch GPT, written as its users would: the peer that our step is measured against.

Reads a shape as JSON on the command line, trains on random tokens, prints one JSON line for every round it is asked
for on standard input.
"""

import json
import math
import resource
import sys
import time

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and feed-forward, each on a normed copy of the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2's design with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 1 / math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = functional.linear(self.norm(hidden), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def main() -> None:
    shape = json.loads(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(shape["threads"])
    model = GPT(shape["layers"], shape["width"], shape["heads"], shape["length"], shape["vocabulary"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    rows, length = shape["rows"], shape["length"]
    tokens = torch.randint(0, shape["vocabulary"], (rows, length + 1))
    x, y = tokens[:, :-1], tokens[:, 1:]

    def step() -> float:
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    first = step()
    step()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"parameters": count, "first_loss": first}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        for _ in range(shape["steps"]):
            step()
        seconds = time.perf_counter() - started
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"tokens_per_s": shape["steps"] * rows * length / seconds, "memory": memory}), flush=True)


if __name__ == "__main__":
    main()
