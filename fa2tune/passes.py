"""The passes: which kernels run, in which order, on which workspaces. Configs come from outside; nothing is looked up here.

A plan is made once per (problem, strides, scale, configs) and called many times. Tensors are (batch, heads, seqlen, dim)
views of any strides with a contiguous last dimension.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fa2tune.compiler import variant_named
from fa2tune.launch import TORCH_DTYPES, addressing, bind, strides_of
from fa2tune.problem import Config, Problem

SPLIT, FUSED = "split", "fused"
#: The tuned kernels of each road of the backward, in order. bwd_dq also makes delta; before bwd_fused, bwd_delta does.
ROADS = {SPLIT: ("bwd_dq", "bwd_dkdv"), FUSED: ("bwd_fused",)}


def float32_precision() -> str:
    """How torch is set to multiply float32 matrices: "ieee" or "tf32"."""
    # not allow_tf32, which raises once the newer setting has been used; this one follows both
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    **gradient: torch.Tensor,
) -> Problem:
    """The Problem that these tensors pose; with ``o`` and ``do``, the backward's."""
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, head_dim_v = v.shape
    dtype = TORCH_DTYPES[q.dtype]
    read = {"q": q, "k": k, "v": v, **gradient}
    aligned, wide, tma = addressing(read, {name: strides_of(tensor) for name, tensor in read.items()})
    # what is written is dense: its batch stride passes 2^31 where a batch entry does
    widest = max(head_dim, head_dim_v)
    wide |= max(heads_q * seqlen_q, heads_kv * seqlen_k) * widest >= 1 << 31
    return Problem(
        dtype, batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal,
        precision=float32_precision() if dtype == "fp32" else "ieee",
        aligned=aligned, wide=wide, negate=not gradient and softmax_scale < 0, tma=tma,
    )  # fmt: skip


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """Of what a forward writes beside its output, float32: (batch, heads, seqlen) of lse; for float32 inputs two such planes,
    the second with what the rounding of the first left out."""
    return (2, *q.shape[:3]) if q.dtype is torch.float32 else tuple(q.shape[:3])


def lse_of(words: torch.Tensor) -> torch.Tensor:
    """(batch, heads, seqlen) lse, of the tensor that ``lse_shape`` describes."""
    return words[0] if words.dim() == 4 else words


def empty_ordered(like: torch.Tensor, dim: int) -> torch.Tensor:
    """Uninitialised (batch, heads, seqlen, dim), dense, in the memory order of ``like``: (b, h, s, d) or (b, s, h, d)."""
    batch, heads, rows, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty((batch, rows, heads, dim)).transpose(1, 2)
    return like.new_empty((batch, heads, rows, dim))


def _template(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its memory: what ``torch.empty_like`` copies shape, strides, dtype and device from, faster than they
    can be named. A plan keeps no memory: made during a CUDA graph's warm-up, it would hold on to the graph's pool."""
    tensor.untyped_storage().resize_(0)
    return tensor


class ForwardPlan:
    """q, k, v -> (o, lse). Needs Sk >= 1 and no empty dimension."""

    def __init__(self, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float,
                 config: Config) -> None:  # fmt: skip
        self.causal, self.softmax_scale = problem.causal, softmax_scale
        self.o = _template(empty_ordered(q, problem.head_dim_v))
        self.lse = _template(q.new_empty(lse_shape(q), dtype=torch.float32))
        strides = {name: strides_of(tensor) for name, tensor in (("q", q), ("k", k), ("v", v), ("o", self.o))}
        names = ("q", "k", "v", "o", "lse")
        self.launch = bind(variant_named("fwd"), problem, config, strides, softmax_scale, names, q.get_device())

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = torch.empty_like(self.o), torch.empty_like(self.lse)
        self.launch(q, k, v, o, lse)
        return o, lse


class BackwardPlan:
    """do, dlse, q, k, v, o, lse -> (dq, dk, dv), each in the memory order of its input."""

    def __init__(self, problem: Problem, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
                 v: torch.Tensor, o: torch.Tensor, softmax_scale: float, road: str,
                 configs: Mapping[str, Config]) -> None:  # fmt: skip
        self.road, self.softmax_scale = road, softmax_scale
        self.dq, self.dk, self.dv = (_template(empty_ordered(t, t.shape[3])) for t in (q, k, v))
        self.delta = _template(q.new_empty(q.shape[:3], dtype=torch.float32))
        inputs = {"q": q, "k": k, "v": v, "o": o, "do": do} | ({} if dlse is None else {"dlse": dlse})
        outputs = {"dq": self.dq, "dk": self.dk, "dv": self.dv}
        strides = {name: strides_of(tensor) for name, tensor in (inputs | outputs).items()}
        gradients = ("o", "do", "delta") if dlse is None else ("o", "do", "delta", "dlse")
        names = {
            "bwd_delta": gradients,
            "bwd_dq": ("q", "k", "v", "lse", "dq", *gradients),
            "bwd_dkdv": ("q", "k", "v", "do", "lse", "delta", "dk", "dv"),
            "bwd_fused": ("q", "k", "v", "do", "lse", "delta", "dq", "dk", "dv"),
        }
        kernels: tuple[str, ...] = ROADS[road]
        if road == FUSED:
            kernels = ("bwd_delta", *kernels)
            configs = {**configs, "bwd_delta": variant_named("bwd_delta").space.default(problem.specialization, 0)}
        self.launches = {
            kernel: bind(
                variant_named(kernel), problem, configs[kernel], strides, softmax_scale, names[kernel], q.get_device()
            )
            for kernel in kernels
        }

    def __call__(
        self, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        dq, dk, dv = torch.empty_like(self.dq), torch.empty_like(self.dk), torch.empty_like(self.dv)
        delta = torch.empty_like(self.delta)
        gradients = (o, do, delta) if dlse is None else (o, do, delta, dlse)
        if self.road == SPLIT:
            self.launches["bwd_dq"](q, k, v, lse, dq, *gradients)
            self.launches["bwd_dkdv"](q, k, v, do, lse, delta, dk, dv)
        else:
            self.launches["bwd_delta"](*gradients)
            sums = torch.zeros(dq.shape, dtype=torch.float32, device=q.device)
            self.launches["bwd_fused"](q, k, v, do, lse, delta, sums, dk, dv)
            torch.mul(sums, self.softmax_scale, out=dq)
        return dq, dk, dv


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, softmax_scale: float, config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward with an explicit config. q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o, lse (of
    ``lse_shape``, as the backward wants it)."""
    problem = describe(q, k, v, causal, softmax_scale)
    return ForwardPlan(problem, q, k, v, softmax_scale, config)(q, k, v)


def backward(
    do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, *, causal: bool, softmax_scale: float, road: str, configs: Mapping[str, Config],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """One backward with explicit configs. road: "split" (deterministic) or "fused" (atomic sums of dQ)."""
    problem = describe(q, k, v, causal, softmax_scale, o=o, do=do)
    plan = BackwardPlan(problem, do, dlse, q, k, v, o, softmax_scale, road, configs)
    return plan(do, dlse, q, k, v, o, lse)
