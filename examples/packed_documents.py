"""Trains a small language model on documents packed into one row: no padding, and no token sees another document.

python examples/packed_documents.py    # on a GPU, in bf16
TRITON_INTERPRET=1 python examples/packed_documents.py 1 1 48 2    # without one, slow: layers, heads, tokens, steps
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

import fa2tune


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(1, (3, -1, 64)).unbind(1)  # [T, heads, head_dim] each
        x = x + self.out(fa2tune.attention_varlen(q, k, v, offsets, causal=True).flatten(1))
        return x + self.mlp(self.norms[1](x))


def train(layers: int = 6, heads: int = 8, tokens: int = 8192, steps: int = 100) -> list[float]:
    """-> the loss of every step."""
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    torch.manual_seed(0)
    documents = [torch.tensor(list(line)) for line in Path(__file__).read_bytes().splitlines() if line]
    width, losses = 64 * heads, []
    words, places = nn.Embedding(256, width), nn.Embedding(max(map(len, documents)), width)
    blocks, head = nn.ModuleList(Block(width) for _ in range(layers)), nn.Linear(width, 256)
    optimizer = torch.optim.AdamW(nn.ModuleList([words, places, blocks, head]).to(device).parameters(), lr=1e-3)
    for step in range(steps):
        drawn = [documents[n] for n in torch.randint(len(documents), (tokens,))]  # as many as fill a row, and more
        row = torch.cat(drawn)[:tokens].to(device)
        positions = torch.cat([torch.arange(len(document)) for document in drawn])[:tokens].to(device)
        offsets = fa2tune.cu_seqlens(position_ids=positions[None])  # once for all layers
        targets = row.roll(-1).masked_fill(positions.roll(-1) == 0, -100)  # of a document's last token there is none
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            x = words(row) + places(positions)
            for block in blocks:
                x = block(x, offsets)
            loss = nn.functional.cross_entropy(head(x).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step:4}  loss {losses[-1]:.3f}", flush=True)
    return losses


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
