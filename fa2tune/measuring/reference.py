"""What attention should give: the float64 oracle, and the same-dtype reference whose error the error rule is measured in.

Both are ``softmax(q @ k^T * scale) @ v`` written out, with gradients by autograd. Works on any device torch has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from fa2tune.spec.mask import FULL, Mask
from fa2tune.spec.problem import Problem
from fa2tune.spec.score import NONE, Score
from fa2tune.spec.scorefile import Places

DTYPE_OF_NAME = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: Factor on the outlier channel: scores grow by its square, and must stay below 65504 in fp16 before they are scaled.
OUTLIER = 8.0


@dataclass(frozen=True)
class Inputs:
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV], do [B, Hq, Sq, DV] in the problem's dtype, and
    dlse [B, Hq, Sq] in float32, None where lse gets no gradient."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    dlse: torch.Tensor | None = None


def make_inputs(
    problem: Problem, device: torch.device | str, *, scale: float = 1.0, outlier: bool = False,
    with_dlse: bool = False, seed: int = 0, on_device: bool = False,
) -> Inputs:  # fmt: skip
    """Normal q, k, v, do of standard deviation ``scale`` (do: 1), contiguous. ``outlier``: the first channel of q and k is
    OUTLIER times larger. The same values on every device, for a seed; ``on_device``: drawn by the device's own generator."""
    maker = device if on_device else "cpu"
    generator = torch.Generator(maker).manual_seed(seed)
    dtype = DTYPE_OF_NAME[problem.dtype]

    def normal(heads: int, seqlen: int, *dims: int) -> torch.Tensor:
        return torch.randn(problem.batch, heads, seqlen, *dims, generator=generator, device=maker)

    q = normal(problem.heads_q, problem.seqlen_q, problem.head_dim) * scale
    k = normal(problem.heads_kv, problem.seqlen_k, problem.head_dim) * scale
    v = normal(problem.heads_kv, problem.seqlen_k, problem.head_dim_v) * scale
    do = normal(problem.heads_q, problem.seqlen_q, problem.head_dim_v)
    dlse = normal(problem.heads_q, problem.seqlen_q).to(device) if with_dlse else None
    if outlier:
        q[..., 0] *= OUTLIER
        k[..., 0] *= OUTLIER
    q, k, v, do = (tensor.to(device, dtype) for tensor in (q, k, v, do))
    return Inputs(q, k, v, do, dlse)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., M, K] @ b [..., K, N] -> [..., M, N]. cuBLAS has no TF32 for rows that are not whole multiples of 16 bytes, so
    where that is asked for they are filled up with zeros; so then are those of the gradients' products."""
    inner, columns = b.shape[-2:]
    odd = inner % 4 or columns % 4
    if not odd or a.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return a @ b
    a, b = pad(a, (0, -inner % 4)), pad(b, (0, -columns % 4, 0, -inner % 4))
    return (a @ b)[..., :columns]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask = FULL, softmax_scale: float | None = None,
    score: Score = NONE, sequence: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o [B, Hq, Sq, DV], lse [B, Hq, Sq], differentiable, every
    tensor in the dtype of q. Rows that see no key: o = 0,
    lse = -inf, no gradient. ``sequence``: number of the first batch entry, for a score term."""
    batch, heads_q, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_k = k.shape[1], k.shape[2]
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    if q.numel() == 0 or seqlen_k == 0:  # nothing to see; the sums keep the graph, so that gradients are zeros
        nothing = q.sum() * 0 + k.sum() * 0 + v.sum() * 0
        o = torch.zeros(batch, heads_q, seqlen_q, v.shape[3], dtype=q.dtype, device=q.device) + nothing
        return o, torch.full_like(o[..., 0], float("-inf")) + nothing
    group = heads_q // heads_kv
    # the query heads of one key head are one tall matrix: [B, Hkv, G * Sq, D]
    scores = _product(q.reshape(batch, heads_kv, group * seqlen_q, head_dim), k.transpose(2, 3)) * scale
    rows = torch.arange(seqlen_q, device=q.device).repeat(group)[:, None]
    keys = torch.arange(seqlen_k, device=q.device)
    sequences = torch.arange(sequence, sequence + batch, device=q.device)[:, None, None, None]
    heads = torch.arange(heads_q, device=q.device).repeat_interleave(seqlen_q).reshape(heads_kv, group * seqlen_q, 1)
    scores = score.transformed(scores, Places(rows, keys, seqlen_k - seqlen_q, sequences, heads))
    blind = None
    if mask != FULL:
        hidden = ~mask.visible(rows, keys, seqlen_q, seqlen_k)  # [G * Sq, Sk]
        blind = hidden.all(1, keepdim=True)  # [G * Sq, 1]
        # blind rows keep their scores: all -inf would put NaN into the gradient; they are zeroed below
        scores = scores.masked_fill(hidden & ~blind, float("-inf"))
    o = _product(torch.softmax(scores, -1), v)
    lse = torch.logsumexp(scores, -1)
    if blind is not None:
        o = o.masked_fill(blind, 0.0)
        lse = lse.masked_fill(blind[:, 0], float("-inf"))
    return o.reshape(batch, heads_q, seqlen_q, v.shape[3]), lse.reshape(batch, heads_q, seqlen_q)


def evaluate(
    inputs: Inputs, dtype: torch.dtype, *, mask: Mask = FULL, softmax_scale: float | None = None,
    score: Score = NONE, gradients: bool = True, sequence: int = 0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """o, lse and, with ``gradients``, dq, dk, dv, all computed in ``dtype`` (float64: the oracle; the dtype of the
    inputs: the reference)."""
    q, k, v = (tensor.detach().to(dtype).requires_grad_(gradients) for tensor in (inputs.q, inputs.k, inputs.v))
    o, lse = attention(q, k, v, mask=mask, softmax_scale=softmax_scale, score=score, sequence=sequence)
    results = {"o": o.detach(), "lse": lse.detach()}
    if gradients:
        outputs, incoming = [o], [inputs.do.to(dtype)]
        if inputs.dlse is not None:
            outputs.append(lse)
            incoming.append(inputs.dlse.to(dtype))
        results |= zip(("dq", "dk", "dv"), torch.autograd.grad(outputs, (q, k, v), incoming), strict=True)
    return results


def oracle_and_reference(
    inputs: Inputs,
    *,
    mask: Mask = FULL,
    softmax_scale: float | None = None,
    score: Score = NONE,
    gradients: bool = True,
    sequence: int = 0,
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """``evaluate`` in float64 and in the dtype of the inputs."""
    options: dict[str, Any] = {"mask": mask, "softmax_scale": softmax_scale, "score": score}
    options |= {"gradients": gradients, "sequence": sequence}
    oracle = evaluate(inputs, torch.float64, **options)
    same = evaluate(inputs, inputs.q.dtype, **options)
    return oracle, same


def rounded_off(
    inputs: Inputs, oracle: Mapping[str, torch.Tensor], *, mask: Mask = FULL, softmax_scale: float | None = None
) -> dict[str, torch.Tensor]:
    """What float32 may round off dP - delta, in dq and dk (float64, their shapes), besides what the reference rounds off.

    dS = P * (dP - delta). The reference's delta is the sum of P * dP over the same dP: where P is nearly one-hot, both have
    the same rounding, and it cancels. FlashAttention's delta is rowsum(dO * O), whose rounding is another. A sum of DV
    products in sequence is off by up to half an ulp of each partial sum: u * root of their squares is 2.5 times the standard
    deviation of that. The rest of dS is linear in it: P, scale, and then |k| along a row, or the queries of a key as
    independent terms."""
    q, k, v, do = (tensor.double() for tensor in (inputs.q, inputs.k, inputs.v, inputs.do))
    (batch, heads_q, seqlen_q, head_dim), (heads_kv, seqlen_k) = q.shape, k.shape[1:3]
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    k, v = (tensor.repeat_interleave(heads_q // heads_kv, 1) for tensor in (k, v))
    p = torch.exp(q @ k.transpose(2, 3) * scale - oracle["lse"][..., None])
    rows = torch.arange(seqlen_q, device=q.device)[:, None]
    keys = torch.arange(seqlen_k, device=q.device)
    p = p.where(mask.visible(rows, keys, seqlen_q, seqlen_k), 0.0)
    partial, squares = torch.zeros_like(p), torch.zeros_like(p)
    for column in range(v.shape[3]):
        partial.addcmul_(do[..., column, None], v[..., None, :, column])
        squares.addcmul_(partial, partial)
    squares += (do * oracle["o"]).cumsum(-1).square().sum(-1, keepdim=True)  # delta's
    half_ulp = torch.finfo(torch.float32).eps / 2
    ds = p * squares.sqrt() * (half_ulp * abs(scale))
    dk = (ds.square().transpose(2, 3) @ q.square()).reshape(batch, heads_kv, -1, seqlen_k, head_dim).sum(2).sqrt()
    return {"dq": ds @ k.abs(), "dk": dk}
