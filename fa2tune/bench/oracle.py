"""What ``fa2tune bench`` compares results with: attention written out in float32.

Importable without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa2tune.spec.mask import FULL, Mask
from fa2tune.spec.score import NONE, Score
from fa2tune.spec.scorefile import Places

if TYPE_CHECKING:
    import torch

_TILE = 64


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, mask: Mask, score: Score = NONE,
    batch: int = 0, head: int = 0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """One head, number ``head`` of sequence ``batch``: q [Sq, D], k [Sk, D], v [Sk, DV], do [Sq, DV] -> o, dq, dk, dv in
    float32, written out, a block of rows at a time so that any length fits. A row that sees no key has zeros."""
    import torch

    q, k, v, do = (tensor.float() for tensor in (q, k, v, do))
    scale, length = q.shape[1] ** -0.5, k.shape[0]
    columns = torch.arange(length, device=q.device)
    places = torch.arange(q.shape[0], device=q.device)
    out = {"o": torch.empty_like(do), "dq": torch.empty_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    step = max(_TILE, (1 << 26) // length)
    for first in range(0, q.shape[0], step):
        rows = slice(first, first + step)
        scores = q[rows] @ k.T * scale
        if score != NONE:
            plain = scores.requires_grad_()
            with torch.enable_grad():
                at = Places(places[rows, None], columns, length - len(places), batch, head)
                transformed = score.transformed(plain, at)
            scores = transformed.detach().clone()  # to be masked
        if mask != FULL:
            visible = mask.visible(places[rows, None], columns, len(places), len(columns))
            scores.masked_fill_(~visible, float("-inf"))
            p = torch.softmax(scores, -1).masked_fill_(~visible.any(-1, keepdim=True), 0.0)
        else:
            p = torch.softmax(scores, -1)
        o = p @ v
        ds = p * (do[rows] @ v.T - (do[rows] * o).sum(-1, keepdim=True))
        if score != NONE:
            (ds,) = torch.autograd.grad(transformed, plain, ds)
        out["o"][rows], out["dq"][rows] = o, ds @ k * scale
        out["dk"] += ds.T @ q[rows] * scale
        out["dv"] += p.T @ do[rows]
    return out


def tile_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest RMS error of a tile of 64 rows, relative to the RMS of the tile. [S, D] each.

    By tile, because under a causal mask early rows are so much larger that they would hide wrong late ones."""
    import torch

    def rms(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tile.square().mean().sqrt() for tile in tensor.split(_TILE)])

    floor = 1.0 / want.shape[0]  # well below any tile but those that are zero by construction, as dq of the first row
    return float((rms(got.float() - want) / rms(want).clamp_min(floor)).max())
