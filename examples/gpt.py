"""Trains a small GPT on its own source code, character by character, with fa2tune.attention.

On a GPU, in bf16, 12 layers, 1024 characters:
    python examples/gpt.py

Without a GPU, in Triton's interpreter, which is slow:
    TRITON_INTERPRET=1 python examples/gpt.py --layers 1 --heads 2 --length 48 --batch 2 --steps 2
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import fa2tune


class Block(nn.Module):
    """Attention and MLP, each with its norm and residual. [B, S, W] -> [B, S, W]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        packed = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = packed.unbind(2)  # views: the kernels take strides, nothing is copied
        attended = fa2tune.attention(q, k, v, causal=True, layout="bshd")
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Characters [B, S] -> logits [B, S, vocabulary]."""

    def __init__(self, vocabulary: int, length: int, layers: int, heads: int, head_dim: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.character, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.character(characters) + self.position.weight[: characters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(arguments: argparse.Namespace) -> list[float]:
    """-> the loss of every step."""
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("needs a CUDA GPU that torch can use, or TRITON_INTERPRET=1 (see --help)")
    text = Path(__file__).read_text()
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text], device=device)

    torch.manual_seed(0)
    model = GPT(len(alphabet), arguments.length, arguments.layers, arguments.heads, arguments.head_dim).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    losses = []
    for step in range(arguments.steps):
        start = time.perf_counter()
        first = torch.randint(len(data) - arguments.length, (arguments.batch,), device=device)
        window = data[first[:, None] + torch.arange(arguments.length + 1, device=device)]  # [B, S + 1]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(window[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        rate = arguments.batch * arguments.length / (time.perf_counter() - start)
        print(f"step {step:4}  loss {losses[-1]:.3f}  {rate:,.0f} characters/s", flush=True)
    return losses


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 12, "heads": 12, "head-dim": 64, "length": 1024, "batch": 16, "steps": 200}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate, default 3e-4")
    return parser


if __name__ == "__main__":
    train(parser().parse_args())
