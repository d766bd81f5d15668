"""The passes: which kernels run, in which order, on which workspaces. Configs come from outside; nothing is looked up here.

A plan is made once per (problem, strides, scale, configs) and called many times. Tensors are (batch, heads, seqlen, dim)
views of any strides with a contiguous last dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fa2tune.compiler import variant_named
from fa2tune.launch import TORCH_DTYPES, addressing, bind, strides_of
from fa2tune.problem import Config, Problem

SPLIT, FUSED = "split", "fused"
#: Kernels that each road of the backward runs after bwd_delta.
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
    do: torch.Tensor | None = None,
) -> Problem:
    """The Problem that these tensors pose; with ``do``, the backward's."""
    batch, heads_q, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, head_dim_v = v.shape
    dtype = TORCH_DTYPES[q.dtype]
    read = {"q": q, "k": k, "v": v} if do is None else {"q": q, "k": k, "v": v, "do": do}
    aligned, wide, tma = addressing(read, {name: strides_of(tensor) for name, tensor in read.items()})
    # what is written is dense: its batch stride passes 2^31 where a batch entry does
    widest = max(head_dim, head_dim_v)
    wide |= max(heads_q * seqlen_q, heads_kv * seqlen_k) * widest >= 1 << 31
    return Problem(
        dtype, batch, heads_q, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v, causal,
        precision=float32_precision() if dtype == "fp32" else "ieee",
        aligned=aligned, wide=wide, negate=do is None and softmax_scale < 0, tma=tma,
    )  # fmt: skip


def empty_ordered(like: torch.Tensor, dim: int) -> torch.Tensor:
    """Uninitialised (batch, heads, seqlen, dim), dense, in the memory order of ``like``: (b, h, s, d) or (b, s, h, d)."""
    batch, heads, rows, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty((batch, rows, heads, dim)).transpose(1, 2)
    return like.new_empty((batch, heads, rows, dim))


def _allocator(tensor: torch.Tensor, like: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """How to allocate another ``tensor``: by empty_like(like) where that gives the same strides, as it is fastest."""
    twin = torch.empty_like(like)
    if (twin.shape, twin.stride()) == (tensor.shape, tensor.stride()):
        return torch.empty_like
    shape, stride = tensor.shape, tensor.stride()
    return lambda q: q.new_empty_strided(shape, stride)


class ForwardPlan:
    """q, k, v -> (o, lse). Needs Sk >= 1 and no empty dimension."""

    def __init__(self, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float,
                 config: Config) -> None:  # fmt: skip
        self.causal, self.softmax_scale = problem.causal, softmax_scale
        # A plan keeps no tensor: made during a CUDA graph's warm-up, it would hold on to the graph's memory pool.
        self.lse_shape = (problem.batch, problem.heads_q, problem.seqlen_q)
        o = empty_ordered(q, problem.head_dim_v)
        self.new_o = _allocator(o, q)
        strides = {name: strides_of(tensor) for name, tensor in (("q", q), ("k", k), ("v", v), ("o", o))}
        names = ("q", "k", "v", "o", "lse")
        self.launch = bind(variant_named("fwd"), problem, config, strides, softmax_scale, names, q.get_device())

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o = self.new_o(q)
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=q.device)
        self.launch(q, k, v, o, lse)
        return o, lse


class BackwardPlan:
    """do, dlse, q, k, v, o, lse -> (dq, dk, dv), each in the memory order of its input."""

    def __init__(self, problem: Problem, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
                 v: torch.Tensor, o: torch.Tensor, softmax_scale: float, road: str,
                 configs: Mapping[str, Config]) -> None:  # fmt: skip
        device_index = q.get_device()
        self.road = road
        self.rows_shape = (problem.batch, problem.heads_q, problem.seqlen_q)
        dq, dk, dv = (empty_ordered(t, t.shape[3]) for t in (q, k, v))
        self.new_dq, self.new_dk, self.new_dv = _allocator(dq, q), _allocator(dk, k), _allocator(dv, v)
        has_dlse = dlse is not None
        strides = {name: strides_of(t) for name, t in
                   (("q", q), ("k", k), ("v", v), ("do", do), ("o", o), ("dq", dq), ("dk", dk), ("dv", dv))}  # fmt: skip
        strides["dlse"] = strides_of(dlse) if dlse is not None else (0, 0, 0)

        delta = variant_named("bwd_delta")
        delta_config = {**delta.space.default(problem.specialization, 0), "HAS_DLSE": has_dlse}
        names = ("o", "do", "delta", "dlse") if has_dlse else ("o", "do", "delta")
        self.delta = bind(delta, problem, delta_config, strides, softmax_scale, names, device_index)
        read = ("q", "k", "v", "do", "lse", "delta")
        written = {"bwd_dq": ("dq",), "bwd_dkdv": ("dk", "dv"), "bwd_fused": ("dq", "dk", "dv")}
        self.launches = {
            kernel: bind(
                variant_named(kernel),
                problem,
                configs[kernel],
                strides,
                softmax_scale,
                (*read, *written[kernel]),
                device_index,
            )
            for kernel in ROADS[road]
        }
        self.softmax_scale = softmax_scale

    def __call__(
        self, do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        o: torch.Tensor, lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        dq, dk, dv, delta = self.new_dq(q), self.new_dk(k), self.new_dv(v), torch.empty_like(lse)
        if dlse is None:
            self.delta(o, do, delta)
        else:
            self.delta(o, do, delta, dlse)
        if self.road == SPLIT:
            self.launches["bwd_dq"](q, k, v, do, lse, delta, dq)
            self.launches["bwd_dkdv"](q, k, v, do, lse, delta, dk, dv)
        else:
            sums = torch.zeros((*self.rows_shape, q.shape[3]), dtype=torch.float32, device=q.device)
            self.launches["bwd_fused"](q, k, v, do, lse, delta, sums, dk, dv)
            torch.mul(sums, self.softmax_scale, out=dq)
        return dq, dk, dv


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, softmax_scale: float, config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward with an explicit config. q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, DV] -> o, lse."""
    problem = describe(q, k, v, causal, softmax_scale)
    return ForwardPlan(problem, q, k, v, softmax_scale, config)(q, k, v)


def backward(
    do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, *, causal: bool, softmax_scale: float, road: str, configs: Mapping[str, Config],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """One backward with explicit configs. road: "split" (deterministic) or "fused" (atomic sums of dQ)."""
    problem = describe(q, k, v, causal, softmax_scale, do)
    plan = BackwardPlan(problem, do, dlse, q, k, v, o, softmax_scale, road, configs)
    return plan(do, dlse, q, k, v, o, lse)
